"""Factors of mixture weights and of component assignments."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._utils.argument_types import names_types

__all__ = [
    "categorical_assignments",
    "concentration",
    "dirichlet_log_weights",
    "dirichlet_weights",
    "stick_breaking",
    "stick_log_weights",
]


def stick_log_weights(
    a: Float[Tensor, "*#batch sticks"], b: Float[Tensor, "*#batch sticks"]
) -> Float[Tensor, "*batch components"]:
    r"""Compute expected log weights :math:`E \log \pi_c = E \log v_c + \sum_{j<c} E \log(1 - v_j)` of C = sticks + 1
    components.

    The sticks are :math:`v_c \sim \mathrm{Beta}(a_c, b_c)` for c < C, and :math:`v_C = 1`.

    :param a: parameters a of the sticks.
    :param b: parameters b of the sticks.

    Source: Blei and Jordan (2006), section 3.2.

    >>> stick_log_weights(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor([-1.0000, -1.0000])
    """
    a, b = torch.broadcast_tensors(a, b)
    total = torch.digamma(a + b)
    log_stick = pad(torch.digamma(a) - total, (0, 1))
    log_remainder = pad((torch.digamma(b) - total).cumsum(-1), (1, 0))
    return log_stick + log_remainder


@names_types
def stick_breaking(
    assignments: Float[Tensor, "*#batch L C"], concentration: Float[Tensor, "*#batch"]
) -> tuple[Float[Tensor, "*batch sticks"], Float[Tensor, "*batch sticks"]]:
    r"""Update the sticks :math:`\mathrm{Beta}(a_c, b_c)`, c < C, with :math:`a_c = 1 + \sum_l \phi_{lc}` and
    :math:`b_c = E\alpha + \sum_l \sum_{j>c} \phi_{lj}`.

    The model is :math:`v_c \sim \mathrm{Beta}(1, \alpha)`, :math:`z_l \sim \mathrm{Cat}(\pi(v))`, and
    :math:`q(z_l = c) = \phi_{lc}`.

    :param assignments: responsibilities φ.
    :param concentration: mean Eα of the concentration.
    :returns: a and b.

    Source: Blei and Jordan (2006), eqs. 18 and 19.

    >>> stick_breaking(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]), torch.tensor(2.0))
    (tensor([2.0000, 1.5000]), tensor([3.0000, 2.5000]))
    """
    counts = assignments.sum(-2)
    beyond = counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    a, b = 1.0 + counts[..., :-1], concentration[..., None] + beyond
    return a.expand(b.shape), b


@names_types
def concentration(
    shape: Float[Tensor, "*#batch"],
    rate: Float[Tensor, "*#batch"],
    a: Float[Tensor, "*#batch sticks"],
    b: Float[Tensor, "*#batch sticks"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""Update the concentration :math:`\alpha \sim \mathrm{Gamma}(a_0 + C - 1,\; b_0 - \sum_{c<C} E \log(1 - v_c))` given the
    sticks.

    :param shape: shape a₀ of the prior.
    :param rate: rate b₀ of the prior.
    :param a: parameters a of the sticks.
    :param b: parameters b of the sticks.
    :returns: shape and rate.

    Source: Blei and Jordan (2006), section 3.2 and appendix A.

    >>> concentration(torch.tensor(1.0), torch.tensor(1.0), torch.ones(3), torch.ones(3))
    (tensor(4.), tensor(4.0000))
    """
    log_remainder = torch.digamma(b) - torch.digamma(a + b)
    shape, rate = torch.broadcast_tensors(shape + log_remainder.shape[-1], rate - log_remainder.sum(-1))
    return shape, rate


@names_types
def dirichlet_weights(
    assignments: Float[Tensor, "*#batch L C"], concentration: Float[Tensor, "*#batch C"]
) -> Float[Tensor, "*batch C"]:
    r"""Update the weights :math:`\pi \sim \mathrm{Dirichlet}(\alpha_c + \sum_l \phi_{lc})` given assignments.

    :param assignments: responsibilities φ.
    :param concentration: concentration α of the prior.

    Source: Bishop (2006), eqs. 10.57 and 10.58.

    >>> dirichlet_weights(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.ones(2))
    tensor([2.5000, 1.5000])
    """
    return concentration + assignments.sum(-2)


@names_types
def dirichlet_log_weights(concentration: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    r"""Compute expected log weights :math:`E \log \pi_c = \psi(\alpha_c) - \psi(\sum_j \alpha_j)` under a Dirichlet.

    :param concentration: concentration α.

    Source: Bishop (2006), eq. 10.66.

    >>> dirichlet_log_weights(torch.ones(2))
    tensor([-1.0000, -1.0000])
    """
    return torch.digamma(concentration) - torch.digamma(concentration.sum(-1, keepdim=True))


@names_types
def categorical_assignments(
    log_weights: Float[Tensor, "*#batch C"], log_likelihood: Float[Tensor, "*#batch L C"]
) -> Float[Tensor, "*batch L C"]:
    r"""Compute normalised log responsibilities, :math:`\log \phi_{lc} = E \log \pi_c + E \log p(x_l \mid c) + \mathrm{const}`.

    :param log_weights: expected log weights E log π.
    :param log_likelihood: expected log likelihoods E log p(x_l | c).

    Source: Bishop (2006), eqs. 10.46 and 10.49.

    >>> categorical_assignments(torch.zeros(2), torch.tensor([[0.0, 0.0]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    return (log_weights.unsqueeze(-2) + log_likelihood).log_softmax(-1)
