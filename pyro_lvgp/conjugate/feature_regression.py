r"""Bayesian linear regression on features, :math:`f_d = \Phi a_d`, with weights :math:`a_d \sim N(0, I_L)` marginalised.

The log likelihood of :math:`f_{nd}` is a quadratic site :math:`h_{nd} f - \tfrac12 w_{nd} f^2`: exactly for Gaussian noise,
with :math:`h = y / \sigma^2, w = 1 / \sigma^2`; as a bound for logistic likelihoods
(:mod:`pyro_lvgp.likelihoods.polya_gamma`).  A missing entry has h = w = 0.  No matrix is larger than L × L for each output,
for any number of rows.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp.ops.linalg import function_variance, invert_lower, pair_products

__all__ = [
    "WeightPosterior",
    "divergence_from_prior",
    "from_natural",
    "function_moments",
    "gaussian_log_density",
    "gaussian_sites",
    "gaussian_weight_posterior",
    "log_partition",
    "precision_sum",
    "profile_log_density",
    "weight_posterior",
]


class WeightPosterior(NamedTuple):
    """Posterior of the weights of each output, ``a_d ~ N(mean_d, P_d⁻¹)``, with ``P_d = R_d R_dᵀ = I + Φᵀ diag(w_d) Φ``.

    :param mean: posterior means ``P_d⁻¹ Φᵀ h_d``.
    :param precision_tril: Cholesky factors R_d, or one for all outputs.
    """

    mean: Float[Tensor, "*batch D L"]
    precision_tril: Float[Tensor, "*batch #D L L"]


def gaussian_sites(
    y: Float[Tensor, "N D"], observed: Bool[Tensor, "N D"], variance: Float[Tensor, "*#rows #D"]
) -> tuple[Float[Tensor, "*batch N D"], Float[Tensor, "*batch N #D"]]:
    """Compute sites ``h = y / σ²`` and ``w = 1 / σ²`` of Gaussian noise; one column of w for complete data and a shared σ².

    :param y: data, any finite number where missing.
    :param observed: mask of the observed entries.
    :param variance: σ², one for all outputs, one for each, or one for each entry.

    >>> h, w = gaussian_sites(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0.5]))
    >>> h.shape, w
    (torch.Size([2, 3]), tensor([[2.],
            [2.]]))
    """
    precision = variance.reciprocal()
    weight = observed[..., :1] if holds(observed.all()) else observed
    return precision * observed * y, precision * weight


def precision_sum(
    features: Float[Tensor, "*#batch N L"], precision: Float[Tensor, "*#batch N D"]
) -> Float[Tensor, "*batch D L L"]:
    """Compute the precision ``Φᵀ diag(w_d) Φ`` that the sites add to the weights of each output.

    This is the transpose of the linear map :func:`~pyro_lvgp.ops.linalg.function_variance` and has the same cost.  With many
    outputs, the products of two features are computed once for all outputs.

    :param features: Φ.
    :param precision: precisions w of the sites, of each output.

    >>> precision_sum(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0], [3.0]]))
    tensor([[[1., 2.],
             [2., 7.]]])
    """
    L = features.shape[-1]
    if precision.shape[-1] <= (L + 1) // 2:
        weighted = features.mT.unsqueeze(-3) * precision.mT.unsqueeze(-2)
        return weighted @ features.unsqueeze(-3)
    rows, columns = torch.triu_indices(L, L, device=features.device)
    position = torch.empty(L, L, dtype=torch.long, device=features.device)
    position[rows, columns] = position[columns, rows] = torch.arange(len(rows), device=features.device)
    return (precision.mT @ pair_products(features))[..., position]


def weight_posterior(
    features: Float[Tensor, "*#batch N L"], linear: Float[Tensor, "*#batch N D"], precision: Float[Tensor, "*#batch N #D"]
) -> WeightPosterior:
    """Compute the posterior of the weights under quadratic sites.

    There is one Cholesky factor for all outputs if they share a column of ``precision``.

    :param features: Φ.
    :param linear: linear terms h of the sites.
    :param precision: precisions w of the sites.

    Source: the Woodbury identity; Lázaro-Gredilla et al. (2010), "Sparse spectrum Gaussian process regression", eq. 9.

    >>> posterior = weight_posterior(torch.ones(4, 1), torch.full((4, 1), 2.0), torch.ones(4, 1))
    >>> posterior.mean, posterior.precision_tril.square()
    (tensor([[1.6000]]), tensor([[[5.]]]))
    """
    identity = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
    return from_natural(linear.mT @ features, identity + precision_sum(features, precision))


def gaussian_weight_posterior(
    features: Float[Tensor, "*#batch N L"],
    y: Float[Tensor, "N D"],
    observed: Bool[Tensor, "N D"],
    variance: Float[Tensor, "*#batch #D"],
) -> WeightPosterior:
    """Compute the posterior of the weights given data with Gaussian noise, as under the sites of :func:`gaussian_sites`.

    Sums over rows are divided by the noise variances afterwards, so that complete data need one sum for all outputs.

    :param features: Φ.
    :param y: data, any finite number where missing.
    :param observed: mask of the observed entries.
    :param variance: σ², one for all outputs or one for each.

    >>> ones = torch.ones(4, 1)
    >>> posterior = gaussian_weight_posterior(ones, ones, ones.bool(), torch.tensor([0.5]))
    >>> posterior.mean, posterior.precision_tril.square()
    (tensor([[0.8889]]), tensor([[[9.]]]))
    """
    if holds(observed.all()):
        observed = observed[..., :1]
    else:
        y = torch.where(observed, y, 0.0)
    identity = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
    gram, precision = precision_sum(features, observed.to(features)), variance.reciprocal().unsqueeze(-1)
    return from_natural(precision * (y.mT @ features), identity + precision.unsqueeze(-1) * gram)


def from_natural(linear: Float[Tensor, "*batch D L"], precision: Float[Tensor, "*batch #D L L"]) -> WeightPosterior:
    """Convert natural parameters ``P_d m_d`` and ``P_d`` to mean and Cholesky factor.

    :param linear: ``P_d m_d``.
    :param precision: P, whose eigenvalues are 1 or larger; one for each output or for all.

    >>> from_natural(torch.tensor([[8.0]]), torch.tensor([[[4.0]]]))
    WeightPosterior(mean=tensor([[2.]]), precision_tril=tensor([[[2.]]]))
    """
    R = safe_cholesky(precision, jitter=0.0, name="weight precision")
    if R.shape[-3] == 1:
        return WeightPosterior(torch.cholesky_solve(linear.mT, R.squeeze(-3)).mT, R)
    return WeightPosterior(torch.cholesky_solve(linear.unsqueeze(-1), R).squeeze(-1), R)


def log_partition(posterior: WeightPosterior) -> Float[Tensor, "*batch D"]:
    r"""Log partition function :math:`\log \int N(a; 0, I) \exp(h^T \Phi a - \tfrac12 a^T \Phi^T \mathrm{diag}(w) \Phi a)\, da
    = \tfrac12 \|R^T m\|^2 - \sum_i \log R_{ii}` of each output.

    :param posterior: returned by :func:`weight_posterior`.

    >>> log_partition(weight_posterior(torch.ones(1, 1), torch.tensor([[2.0]]), torch.ones(1, 1)))  # h² / 4 − ½ log 2
    tensor([0.6534])
    """
    RT_m = (posterior.precision_tril.mT @ posterior.mean.unsqueeze(-1)).squeeze(-1)
    return 0.5 * RT_m.square().sum(-1) - posterior.precision_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def divergence_from_prior(posterior: WeightPosterior) -> Float[Tensor, "*batch D"]:
    r"""Kullback-Leibler divergence of each output from the prior.

    .. math:: KL(N(m_d, P_d^{-1}) \,\|\, N(0, I)) = \tfrac12 (\mathrm{tr}\, P^{-1} + m^T m - L) + \sum_i \log R_{ii}

    :param posterior: weights of each output.

    >>> divergence_from_prior(WeightPosterior(torch.ones(3, 2), torch.eye(2)[None]))
    tensor([1., 1., 1.])
    """
    R, mean = posterior.precision_tril, posterior.mean
    trace = invert_lower(R).square().sum((-2, -1))
    return 0.5 * (trace + mean.square().sum(-1) - mean.shape[-1]) + R.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def function_moments(
    posterior: WeightPosterior, features: Float[Tensor, "*#batch N L"]
) -> tuple[Float[Tensor, "*batch N D"], Float[Tensor, "*batch N #D"]]:
    """Compute mean ``Φ m_d`` and variance ``diag(Φ P_d⁻¹ Φᵀ)`` of each output; one column of variances for a common P.

    :param posterior: returned by :func:`weight_posterior`.
    :param features: Φ at any inputs.

    >>> posterior = from_natural(torch.tensor([[8.0]]), torch.tensor([[[4.0]]]))
    >>> function_moments(posterior, torch.tensor([[1.0], [2.0]]))
    (tensor([[2.],
            [4.]]), tensor([[0.2500],
            [1.0000]]))
    """
    variance = function_variance(features, invert_lower(posterior.precision_tril).mT)
    return features @ posterior.mean.mT, variance


def gaussian_log_density(
    features: Float[Tensor, "*#batch N L"],
    y: Float[Tensor, "N D"],
    observed: Bool[Tensor, "N D"],
    variance: Float[Tensor, "*#batch #D"],
) -> Float[Tensor, "*batch D"]:
    r"""Log density :math:`\log N(y_d;\, 0, \Phi\Phi^T + \sigma^2 I)` of the observed entries of each output, by Woodbury's
    identity.

    :param features: Φ.
    :param y: data, any finite number where missing.
    :param observed: mask of the observed entries.
    :param variance: σ², one for all outputs or one for each.

    Source: eq. 25 of the SRFLVM paper.

    >>> gaussian_log_density(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), torch.ones(1))
    tensor([-1.8379])
    """
    posterior = gaussian_weight_posterior(features, y, observed, variance)
    noise = (2.0 * math.pi * variance).log().unsqueeze(-2) + y.square() / variance.unsqueeze(-2)
    return log_partition(posterior) - 0.5 * (observed * noise).sum(-2)


def profile_log_density(
    features: Float[Tensor, "N L"], y: Float[Tensor, "N D"], *, num_ratios: int = 91
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    r"""Maximise :math:`\sum_d \log N(y_d;\, 0, \sigma^2 (I + \rho\, \Phi\Phi^T))` over the noise variance σ² and the ratio ρ.

    The optimal σ² is a closed form of ρ.  With the eigenvalues λ of ΦᵀΦ, computed once, and the squares b of the coordinates
    of Φᵀy along the eigenvectors, summed over outputs,

    .. math::

        \sigma^2(\rho) = \frac{1}{N D} \Big( \|y\|^2 - \sum_i \frac{\rho\, b_i}{1 + \rho \lambda_i} \Big), \qquad
        \max_{\sigma^2} = - \tfrac{N D}{2} \big( \log 2 \pi \sigma^2(\rho) + 1 \big)
        - \tfrac{D}{2} \sum_i \log (1 + \rho \lambda_i),

    and ρ is the best of a geometric grid from 10⁻³ to 10⁶.

    :param features: Φ.
    :param y: data, without missing entries, not all zero.
    :param num_ratios: number of values of ρ.
    :returns: the maximum, σ² and ρ.

    >>> features, y = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [1.0]])
    >>> value, variance, ratio = profile_log_density(features, y)
    >>> scaled = (ratio * variance).sqrt() * features
    >>> torch.allclose(value, gaussian_log_density(scaled, y, torch.ones(3, 1, dtype=torch.bool), variance[None]).sum())
    True
    """
    num_entries, D = y.numel(), y.shape[1]
    eigenvalues, vectors = torch.linalg.eigh(features.mT @ features)
    eigenvalues = eigenvalues.clamp_min(0.0)
    squares = (vectors.mT @ (features.mT @ y)).square().sum(-1)
    ratio = torch.logspace(-3.0, 6.0, num_ratios, dtype=y.dtype, device=y.device)
    factor = 1.0 + ratio[:, None] * eigenvalues
    smallest = torch.finfo(y.dtype).eps * y.square().sum()  # rounding of the difference
    variance = (y.square().sum() - (ratio[:, None] * squares / factor).sum(-1)).maximum(smallest) / num_entries
    value = -0.5 * (num_entries * ((2.0 * math.pi * variance).log() + 1.0) + D * factor.log().sum(-1))
    best = value.argmax()
    return value[best], variance[best], ratio[best]
