"""Factors of linear regression: Gaussian weights, and gamma precisions of the noise."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.cholesky import safe_cholesky

__all__ = ["NaturalGaussian", "gamma_precision", "gaussian_weights"]


class NaturalGaussian(NamedTuple):
    """Gaussian ``N(Λ⁻¹ h, Λ⁻¹)`` in natural parameters.

    In Pyro it is ``MultivariateNormal(gaussian.mean, precision_matrix=gaussian.precision)``.

    :param precision_mean: precision times mean, h.
    :param precision: precision matrix Λ.

    >>> NaturalGaussian(torch.tensor([3.0, 4.0]), 2.0 * torch.eye(2)).mean
    tensor([1.5000, 2.0000])
    """

    precision_mean: Float[Tensor, "*batch L"]
    precision: Float[Tensor, "*batch L L"]

    @property
    def mean(self) -> Float[Tensor, "*batch L"]:
        """Mean Λ⁻¹ h."""
        L_precision = safe_cholesky(self.precision, jitter=0.0, name="precision of a Gaussian")
        return torch.cholesky_solve(self.precision_mean[..., None], L_precision).squeeze(-1)


@names_types
def gaussian_weights(
    prior: NaturalGaussian,
    features: Float[Tensor, "*#batch N L"],
    targets: Float[Tensor, "*#batch N"],
    precision: Float[Tensor, "*#batch N"],
) -> NaturalGaussian:
    r"""Update the weights :math:`w` of :math:`y_n \sim N(\phi_n^T w,\, 1/\tau_n)`:
    :math:`\Lambda = \Lambda_0 + \sum_n E\tau_n\, \phi_n \phi_n^T` and :math:`h = h_0 + \sum_n E\tau_n\, y_n \phi_n`.

    :param prior: prior of the weights.
    :param features: features φ.
    :param targets: targets y, any finite number where the precision is 0.
    :param precision: mean noise precisions Eτ, 0 where a target is missing.

    Source: Bishop (2006), eqs. 3.50 and 3.51.

    >>> prior = NaturalGaussian(torch.zeros(1), torch.eye(1))
    >>> gaussian_weights(prior, torch.ones(3, 1), torch.full((3,), 4.0), torch.ones(3)).mean
    tensor([3.])
    """
    weighted = precision[..., None] * features
    precision_mean = prior.precision_mean + (weighted * targets[..., None]).sum(-2)
    total = prior.precision + weighted.mT @ features
    batch = torch.broadcast_shapes(precision_mean.shape[:-1], total.shape[:-2])
    return NaturalGaussian(precision_mean.expand(*batch, -1), total.expand(*batch, -1, -1))


@names_types
def gamma_precision(
    shape: Float[Tensor, "*#batch"],
    rate: Float[Tensor, "*#batch"],
    expected_squares: Float[Tensor, "*#batch N"],
    weights: Float[Tensor, "*#batch N"] | None = None,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""Update the precision :math:`\tau` of residuals :math:`r_n \sim N(0, 1/\tau)`:

    .. math:: \tau \sim \mathrm{Gamma}\big(a_0 + \tfrac12 \sum_n w_n,\; b_0 + \tfrac12 \sum_n w_n E r_n^2\big)

    The variance 1/τ is inverse-gamma with the same parameters.

    :param shape: shape a₀ of the prior.
    :param rate: rate b₀ of the prior.
    :param expected_squares: mean squares E r² of the residuals, any number where the weight is 0.
    :param weights: weights w, such as responsibilities, or 0 where a residual is missing; all 1 by default.
    :returns: shape and rate.

    Source: Bishop (2006), eqs. 10.29 and 10.30.

    >>> gamma_precision(torch.tensor(1.0), torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    (tensor(2.), tensor(3.))
    """
    weights = torch.ones_like(expected_squares) if weights is None else weights
    counted = torch.where(weights > 0.0, weights * expected_squares, 0.0)
    shape, rate = torch.broadcast_tensors(shape + 0.5 * weights.sum(-1), rate + 0.5 * counted.sum(-1))
    return shape, rate
