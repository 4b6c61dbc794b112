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
_CHUNK_SIZE = 2_000_000  # elements of moments, which bounds the memory


class RowMoments(NamedTuple):
    """Moments of rows in each component, given the observed entries.

    :param log_weight: log posterior probabilities of the components.
    :param log_prob: log densities of the observed entries.
    :param mean: conditional means; observed entries are their own.
    :param missing: columns of the missing entries, filled up with others in rows that have fewer than M.
    :param covariance: conditional covariances of these entries, zero for those that are observed.
    """

    log_weight: Float[Tensor, "B K"]
    log_prob: Float[Tensor, " B"]
    mean: Float[Tensor, "B K D"]
    missing: Int[Tensor, "B M"]
    covariance: Float[Tensor, "B K M M"]

    def variance(self) -> Float[Tensor, "B K D"]:
        """Conditional variances of all entries, zero for those that are observed."""
        variances = self.covariance.diagonal(dim1=-2, dim2=-1)
        return torch.zeros_like(self.mean).scatter(2, self.missing[:, None].expand_as(variances), variances)


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
        r"""Compute the moments of rows given their observed entries, in closed form.

        With :math:`\Lambda = \Sigma^{-1}`, residuals r, zero for the missing entries m, and :math:`g = \Lambda r`,

        .. math::

            E[y_m] = \mu_m - \Lambda_{mm}^{-1} g_m, \qquad \mathrm{Cov}[y_m] = \Lambda_{mm}^{-1}, \qquad
            r_o^T \Sigma_{oo}^{-1} r_o = r^T g - g_m^T \Lambda_{mm}^{-1} g_m, \qquad
            |\Sigma_{oo}| = |\Sigma|\, |\Lambda_{mm}|

        so that the cost of a row with M missing entries is :math:`O(K (M^3 + D^2))`.

        :param Y: rows, NaN where missing; for a row without observed entries the moments are those of the mixture.
        """
        is_missing = Y.isnan()
        missing = is_missing.int().argsort(1, descending=True)[:, : _most_missing(Y)]
        is_missing = is_missing.gather(1, missing)[:, None]
        root = torch.linalg.cholesky(self.covariance)
        precision = torch.cholesky_inverse(root)
        residual = (Y[:, None] - self.mean).nan_to_num()
        gradient = (residual.transpose(0, 1) @ precision).transpose(0, 1)
        index = missing[:, None].expand(-1, len(self.weight), -1)
        # Rows and columns of observed entries are those of the identity, which changes no determinant.
        both = is_missing[..., None] & is_missing[..., None, :]
        block = precision[:, missing[:, :, None], missing[:, None]].transpose(0, 1)
        factor = torch.linalg.cholesky(torch.where(both, block, torch.eye(missing.shape[1]).to(block)))
        covariance = torch.cholesky_inverse(factor) * both
        own = gradient.gather(2, index) * is_missing
        change = (covariance @ own[..., None]).squeeze(-1)
        square = (residual * gradient).sum(-1) - (own * change).sum(-1)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        num_observed = (~Y.isnan()).sum(1, keepdim=True)
        log_joint = self.weight.log() - 0.5 * square - log_det - 0.5 * num_observed * math.log(2.0 * math.pi)
        mean = torch.where(Y.isnan()[:, None], self.mean, Y[:, None]).scatter_add(2, index, -change)
        return RowMoments(log_joint.log_softmax(1), log_joint.logsumexp(1), mean, missing, covariance)

    def chunks(self, Y: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "B D"], ...]:
        """Split rows so that the moments of a part fit into memory.

        :param Y: rows, NaN where missing.
        """
        return Y.split(max(_CHUNK_SIZE // (len(self.weight) * (_most_missing(Y) ** 2 + Y.shape[1])), 1))


def _most_missing(Y: Float[Tensor, "B D"]) -> int:
    """Largest number of missing entries of a row."""
    return max(Y.isnan().sum(1).tolist(), default=0)


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

    :param Y: rows in double precision, NaN where missing; each column has an observed entry.
    :param num_components: number K of components, but at most as many as distinct rows.
    :param num_iterations: number of steps.
    :param seed: seed of the start.

    Source: Ghahramani and Jordan (1994), "Supervised learning from incomplete data via an EM approach"; Friedman (1989),
    "Regularized discriminant analysis".

    >>> Y = torch.randn(40, 3, dtype=torch.float64)
    >>> Y[::2, 1] = torch.nan
    >>> rows = gaussian_mixture(Y, 2).condition(Y)
    >>> rows.mean.shape, rows.covariance.shape  # of one missing entry
    (torch.Size([40, 2, 3]), torch.Size([40, 2, 1, 1]))
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
    Y = Y[Y.isnan().sum(1).argsort()]  # the cost of a part is that of its rows with most missing entries
    for _ in range(num_iterations):
        parts = [_expect(mixture.condition(rows)) for rows in mixture.chunks(Y)]
        mixture = _maximize(_Statistics(*(torch.stack(part).sum(0) for part in zip(*parts, strict=True))), variance)
    return mixture


def _expect(rows: RowMoments) -> _Statistics:
    shares = rows.log_weight.exp()
    weighted = shares[..., None] * rows.mean
    between = torch.einsum("nki,nkj->kij", weighted, rows.mean)
    within = torch.einsum("nk,nkij->knij", shares, rows.covariance)
    entries = rows.missing[:, :, None] * between.shape[-1] + rows.missing[:, None]
    second = between.flatten(1).index_add(1, entries.flatten(), within.flatten(1))
    return _Statistics(shares.sum(0), weighted.sum(0), second.view_as(between))


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
