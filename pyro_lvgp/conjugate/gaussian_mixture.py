"""Mixtures of Gaussians of rows with missing entries, whose covariances are shrunk to a common one."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from sklearn.cluster import KMeans
from torch import Tensor

__all__ = ["GaussianMixture", "RowMoments", "gaussian_mixture"]

_RIDGE = 1e-4  # of covariances, relative to the variances of the columns
_LEAST_VARIANCE = 1e-6  # of a column
_MEAN_STRENGTH = 0.01  # rows that the prior of a mean is worth
_CHUNK_SIZE = 2_000_000  # elements of covariances, which bounds the memory


class RowMoments(NamedTuple):
    """Moments of all entries of rows in each component, given the observed entries.

    :param log_weight: log posterior probabilities of the components.
    :param log_prob: log densities of the observed entries.
    :param mean: conditional means; observed entries are their own.
    :param covariance: conditional covariances, zero for observed entries.
    """

    log_weight: Float[Tensor, "B K"]
    log_prob: Float[Tensor, " B"]
    mean: Float[Tensor, "B K D"]
    covariance: Float[Tensor, "B K D D"]


class _Statistics(NamedTuple):
    """Expected numbers of rows, and sums of rows and of their outer products, in each component."""

    number: Float[Tensor, " K"]
    first: Float[Tensor, "K D"]
    second: Float[Tensor, "K D D"]


class GaussianMixture(NamedTuple):
    r"""Mixture :math:`\sum_k \pi_k N(\mu_k, \Sigma_k)` of rows.

    :param weight: probabilities π of the components.
    :param mean: means μ.
    :param covariance: covariances Σ.
    """

    weight: Float[Tensor, " K"]
    mean: Float[Tensor, "K D"]
    covariance: Float[Tensor, "K D D"]

    def condition(self, Y: Float[Tensor, "B D"]) -> RowMoments:
        """Compute the moments of rows given their observed entries, in closed form.

        :param Y: rows, NaN where missing; for a row without observed entries the moments are those of the mixture.
        """
        seen = (~Y.isnan()).to(self.mean)[:, None]
        residual = (Y.nan_to_num()[:, None] - self.mean) * seen
        # Rows and columns of missing entries are those of the identity, which changes neither densities nor gains.
        masked = self.covariance * seen[..., None] * seen[..., None, :] + torch.diag_embed(1.0 - seen)
        factor = torch.linalg.cholesky(masked)
        half = torch.linalg.solve_triangular(factor, self.covariance * seen[..., None], upper=False)
        whitened = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * seen.sum(-1) * math.log(2.0 * math.pi)
        log_joint = self.weight.log() - 0.5 * whitened.square().sum((-2, -1)) - log_det
        mean = torch.where(seen > 0.0, Y.nan_to_num()[:, None], self.mean + (half * whitened).sum(-2))
        hidden = (1.0 - seen)[..., None]
        covariance = (self.covariance - half.mT @ half) * hidden * hidden.mT
        return RowMoments(log_joint.log_softmax(1), log_joint.logsumexp(1), mean, covariance)

    def chunks(self, Y: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "B D"], ...]:
        """Split rows so that the covariances of a part fit into memory.

        :param Y: rows.
        """
        return Y.split(max(_CHUNK_SIZE // self.covariance.numel(), 1))


def gaussian_mixture(
    Y: Float[Tensor, "N D"], num_components: int, *, num_iterations: int = 15, seed: int = 0
) -> GaussianMixture:
    r"""Fit a mixture of Gaussians to the observed entries of rows, with covariances shrunk to the common one.

    Each step computes the moments of the missing entries given the observed ones, and from the expected numbers :math:`N_k`
    of rows and scatter matrices :math:`S_k` of the components

    .. math::

        \Sigma_k = \frac{S_k + D \Sigma_0}{N_k + D}, \qquad
        \Sigma_0 = \frac{S + D\, \mathrm{diag}(S) / N}{N + D}, \quad S = \sum_k S_k

    so that the common covariance :math:`\Sigma_0` of D columns counts as D further rows of each component, and its diagonal
    as D further rows of all.  A single component has the covariance :math:`\Sigma_0`.  The start of several is k-means of rows
    whose missing entries have the conditional means of a single component.

    :param Y: rows, NaN where missing; each column has an observed entry.
    :param num_components: number K of components, but at most as many as distinct rows.
    :param num_iterations: number of steps.
    :param seed: seed of the start.

    Source: Ghahramani and Jordan (1994), "Supervised learning from incomplete data via an EM approach"; Friedman (1989),
    "Regularized discriminant analysis".

    >>> Y = torch.randn(40, 3, dtype=torch.float64)
    >>> Y[::2, 1] = torch.nan
    >>> rows = gaussian_mixture(Y, 2).condition(Y)
    >>> rows.mean.shape, rows.covariance.shape
    (torch.Size([40, 2, 3]), torch.Size([40, 2, 3, 3]))
    """
    variance = (Y - Y.nanmean(0)).square().nanmean(0).clamp_min(_LEAST_VARIANCE)
    single = GaussianMixture(Y.new_ones(1), Y.nanmean(0)[None], variance.diag()[None])
    single = _ascend(Y, single, variance, num_iterations)
    if num_components == 1:
        return single
    filled = torch.cat([single.condition(rows).mean[:, 0] for rows in single.chunks(Y)])
    num_components = min(num_components, len(filled.unique(dim=0)))
    labels = KMeans(num_components, n_init=3, random_state=seed).fit_predict(filled.numpy(force=True))
    return _ascend(Y, _of_groups(filled, torch.as_tensor(labels).long(), variance), variance, num_iterations)


def _of_groups(Y: Float[Tensor, "N D"], labels: Int[Tensor, " N"], variance: Float[Tensor, " D"]) -> GaussianMixture:
    """Mixture of complete rows whose components are known."""
    shares = torch.nn.functional.one_hot(labels).to(Y)
    second = torch.einsum("nk,ni,nj->kij", shares, Y, Y)
    return _maximize(_Statistics(shares.sum(0), shares.mT @ Y, second), variance)


def _ascend(
    Y: Float[Tensor, "N D"], mixture: GaussianMixture, variance: Float[Tensor, " D"], num_iterations: int
) -> GaussianMixture:
    for _ in range(num_iterations):
        parts = [_expect(mixture.condition(rows)) for rows in mixture.chunks(Y)]
        mixture = _maximize(_Statistics(*(torch.stack(part).sum(0) for part in zip(*parts, strict=True))), variance)
    return mixture


def _expect(rows: RowMoments) -> _Statistics:
    shares = rows.log_weight.exp()
    weighted = shares[..., None] * rows.mean
    second = torch.einsum("nki,nkj->kij", weighted, rows.mean) + torch.einsum("nk,nkij->kij", shares, rows.covariance)
    return _Statistics(shares.sum(0), weighted.sum(0), second)


def _maximize(statistics: _Statistics, variance: Float[Tensor, " D"]) -> GaussianMixture:
    number, first, second = statistics
    N, K, D = number.sum(), len(number), len(variance)
    mean = (first + _MEAN_STRENGTH * first.sum(0) / N) / (number + _MEAN_STRENGTH)[:, None]
    cross = mean[:, :, None] * first[:, None, :]
    scatter = second - cross - cross.mT + number[:, None, None] * mean[:, :, None] * mean[:, None, :]
    total = scatter.sum(0)
    common = (total + D * total.diagonal().diag() / N) / (N + D)
    covariance = common[None] if K == 1 else (scatter + D * common) / (number + D)[:, None, None]
    return GaussianMixture((number + 1.0 / K) / (N + 1.0), mean, covariance + _RIDGE * variance.diag())
