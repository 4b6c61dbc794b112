"""Predictions of missing entries of tables with independent rows: neighbours, regressions, Gaussians, factors, mixtures."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.distributions import Normal

from pyro_lvgp.conjugate.factor_analysis import factor_analysis

Rows = Float[Tensor, "N D"]
Mask = Bool[Tensor, "N D"]
_REGULARIZATION = 1e-3  # of the covariances of mixtures, for columns of unit variance


class Filled(NamedTuple):
    """Predictions of the entries of rows, each a mixture of Gaussians.

    :param log_weight: log weights of the components of each row.
    :param loc: means of the entries in each component.
    :param scale: standard deviations.
    """

    log_weight: Float[Tensor, "B K"]
    loc: Float[Tensor, "B K D"]
    scale: Float[Tensor, "B K #D"]

    @property
    def mean(self) -> Float[Tensor, "B D"]:
        """Mean of each entry."""
        return (self.log_weight.exp()[..., None] * self.loc).sum(1)

    def log_prob(self, y: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Log density of each entry."""
        return (self.log_weight[..., None] + Normal(self.loc, self.scale).log_prob(y[:, None])).logsumexp(1)

    def cdf(self, y: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Cumulative distribution function of each entry."""
        return (self.log_weight.exp()[..., None] * Normal(self.loc, self.scale).cdf(y[:, None])).sum(1)


def random_tenth(train: Rows, seed: int) -> Mask:
    """Mask of a tenth of the observed entries."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(train.shape, generator=generator) < 0.1) & ~train.isnan()


def by_points(impute: Callable[[Rows, Rows], Rows], train: Rows, rows: Rows, held_out: Mask) -> Filled:
    """Imputer of points, with the RMSE of held-out training entries as standard deviation of each column.

    :param impute: function of training rows and of the rows to impute that fills in the latter.
    :param train: training rows, NaN where missing.
    :param rows: rows to impute.
    :param held_out: mask of the training entries that the standard deviations are estimated from.
    """
    fewer = train.masked_fill(held_out, torch.nan)
    error = (impute(fewer, fewer) - train).square().masked_fill(~held_out, torch.nan)
    scale = error.nanmean(0).nan_to_num(1.0).sqrt().clamp_min(1e-3)
    mean = impute(train, rows)
    return Filled(torch.zeros(len(rows), 1).to(rows), mean[:, None], scale.expand_as(mean)[:, None])


def given(weights: Float[Tensor, " K"], means: Float[Tensor, "K D"], covariances: Float[Tensor, "K D D"], Y: Rows) -> Filled:
    """Conditional distributions of missing entries under a mixture of Gaussians, in closed form.

    :param weights: weights of the components.
    :param means: means of the components.
    :param covariances: covariances of the components.
    :param Y: rows, NaN where missing.
    """
    seen = (~Y.isnan()).to(covariances)[:, None]
    residual = (Y.nan_to_num()[:, None] - means) * seen
    # Rows and columns of missing entries are those of the identity, which does not change densities and gains.
    masked = covariances * seen[..., None] * seen[..., None, :] + torch.diag_embed(1.0 - seen)
    factor = torch.linalg.cholesky(masked)
    whitened = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_weight = (weights.log() - 0.5 * whitened.square().sum(-1) - log_det).log_softmax(1)
    cross = covariances * seen[..., None]  # [B, K, D, D]: covariance of observed entries with all entries
    half = torch.linalg.solve_triangular(factor, cross, upper=False)
    mean = means + (half * whitened[..., None]).sum(-2)
    variance = covariances.diagonal(dim1=-2, dim2=-1) - half.square().sum(-2)
    return Filled(log_weight, mean, variance.clamp_min(1e-8).sqrt())


def shrunk_gaussian(train: Rows, rows: Rows, held_out: Mask, seed: int) -> Filled:
    """Gaussian with the covariance of Ledoit and Wolf, fitted to incomplete rows by EM."""
    mean, covariance = _shrunk_moments(train)
    return given(torch.ones(1).to(train), mean[None], covariance[None], rows)


def _shrunk_moments(train: Rows) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    missing = train.isnan()
    mean, covariance = train.nanmean(0), torch.eye(train.shape[1]).to(train)
    for _ in range(20 if missing.any() else 1):
        filled, residual_covariance = _expected(train, mean, covariance)
        mean = filled.mean(0)
        centred = filled - mean
        empirical = centred.mT @ centred / len(train) + residual_covariance
        share = ledoit_wolf_shrinkage(filled.numpy())
        target = empirical.diagonal().mean() * torch.eye(len(mean)).to(train)
        covariance = (1.0 - share) * empirical + share * target
    return mean, covariance


def _expected(train: Rows, mean: Tensor, covariance: Tensor) -> tuple[Rows, Float[Tensor, "D D"]]:
    """Rows with missing entries at their conditional means, and the average of the conditional covariances."""
    missing = train.isnan()
    filled, total = train.clone(), torch.zeros_like(covariance)
    for n in missing.any(1).nonzero().squeeze(1):
        m, o = missing[n], ~missing[n]
        gain = torch.linalg.solve(covariance[o][:, o], covariance[o][:, m])
        filled[n, m] = mean[m] + (train[n, o] - mean[o]) @ gain
        index = m.nonzero().squeeze(1)
        total[index[:, None], index] += covariance[m][:, m] - covariance[m][:, o] @ gain
    return filled, total / len(train)


def factors(train: Rows, rows: Rows, held_out: Mask, seed: int) -> Filled:
    """Factor analysis with 10 factors, or half as many as columns if these are fewer."""
    mean = train.nanmean(0)
    loadings, noise = factor_analysis(train - mean, min(10, max(train.shape[1] // 2, 1)))
    return given(torch.ones(1).to(train), mean[None], (loadings @ loadings.mT + noise.diag())[None], rows)


def mixture(train: Rows, rows: Rows, held_out: Mask, seed: int) -> Filled:
    """Mixture of 20 Gaussians with full covariances, or one for ten rows, fitted to incomplete rows by EM."""
    missing = train.isnan()
    filled = _expected(train, *_shrunk_moments(train))[0] if missing.any() else train
    number = max(min(20, len(train) // 10), 1)
    fitted = GaussianMixture(number, reg_covar=_REGULARIZATION, random_state=seed).fit(filled.numpy())
    weights, means, covariances = (torch.as_tensor(x) for x in (fitted.weights_, fitted.means_, fitted.covariances_))
    for _ in range(10 if missing.any() else 0):
        weights, means, covariances = _em_step(train, weights, means, covariances)
    return given(weights, means, covariances, rows)


def _em_step(
    train: Rows, weights: Float[Tensor, " K"], means: Float[Tensor, "K D"], covariances: Float[Tensor, "K D D"]
) -> tuple[Float[Tensor, " K"], Float[Tensor, "K D"], Float[Tensor, "K D D"]]:
    """EM step of a mixture of Gaussians with missing entries, whose conditional covariances count."""
    parts = given(weights, means, covariances, train)
    shares = parts.log_weight.exp()
    sums = shares.sum(0).clamp_min(1e-6)
    new_means = (shares[..., None] * parts.loc).sum(0) / sums[:, None]
    deviation = parts.loc - new_means
    scatter = torch.einsum("bk,bki,bkj->kij", shares, deviation, deviation)
    for share, seen in zip(shares, ~train.isnan(), strict=True):
        m = (~seen).nonzero().squeeze(1)
        if len(m):
            cross = covariances[:, seen][:, :, m]
            within = covariances[:, m][:, :, m] - cross.mT @ torch.linalg.solve(covariances[:, seen][:, :, seen], cross)
            scatter[:, m[:, None], m] += share[:, None, None] * within
    identity = torch.eye(train.shape[1]).to(train)
    return sums / sums.sum(), new_means, scatter / sums[:, None, None] + _REGULARIZATION * identity


def neighbours(train: Rows, rows: Rows, held_out: Mask, seed: int) -> Filled:
    """Mean of the five nearest rows."""
    return by_points(_by_sklearn(lambda: KNNImputer(n_neighbors=5, keep_empty_features=True)), train, rows, held_out)


def ridge(train: Rows, rows: Rows, held_out: Mask, seed: int) -> Filled:
    """Bayesian ridge regression of each column on the others, in turns."""
    imputer = partial(IterativeImputer, random_state=seed, keep_empty_features=True)
    return by_points(_by_sklearn(imputer), train, rows, held_out)


def _by_sklearn(make: Callable[[], Any]) -> Callable[[Rows, Rows], Rows]:
    return lambda train, rows: torch.as_tensor(make().fit(train.numpy()).transform(rows.numpy()))


PEERS: dict[str, Callable[[Rows, Rows, Mask, int], Filled]] = {
    "KNNImputer(5)": neighbours,
    "IterativeImputer, BayesianRidge": ridge,
    "factor analysis": factors,
    "Gaussian, Ledoit-Wolf": shrunk_gaussian,
    "20 Gaussians": mixture,
}
