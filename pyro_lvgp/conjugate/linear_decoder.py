r"""Mean-field factors of a linear decoder with Gaussian noise.

.. math::

    y_{nd} = w_d^T z_n + b_d + \epsilon_{nd}, \quad \epsilon_{nd} \sim N\big(0, 1 / (\tau_d u_n)\big), \quad
    w_{dq} \sim N(0, 1 / \alpha_q), \quad \alpha_q, \tau_d \sim \mathrm{Gamma}, \quad
    u_n \sim \mathrm{Gamma}(\nu / 2, \nu / 2)

The latents :math:`z_n = (f_n, s_n)` are values of processes f, and R white latents :math:`s_n \sim N(0, I / u_n)`.  The scale
:math:`u_n` of a row makes its white part a multivariate Student's t.  The factors are
:math:`q(f, s) \prod_d q(w_d, b_d)\, q(\tau_d) \prod_q q(\alpha_q) \prod_n q(u_n)`, with full covariances over the latents of a
point and over the weights of an output.  A missing entry has no term in any update.

Source: Bishop (1999), "Variational principal components", for the relevances; Luttinen and Ilin (2010), "Transformations in
variational Bayesian factor analysis to speed up learning".
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Gamma, kl_divergence
from torch.nn import functional as F

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.conjugate.regression import gamma_precision

__all__ = [
    "DecoderFactors",
    "LatentMoments",
    "Table",
    "WhiteGivenProcesses",
    "divergence",
    "extrapolate",
    "initial_factors",
    "latent_sites",
    "marginalize_white",
    "rescale_latents",
    "site_constant",
    "update_dof",
    "update_noise",
    "update_relevance",
    "update_row_scales",
    "update_weights",
]

PRIOR_SHAPE = PRIOR_RATE = 1e-2  # of relevances and noise precisions, for standardised data
BIAS_PRECISION = 0.1


class Table(NamedTuple):
    """Data with missing entries.

    :param y: values, any finite number where missing.
    :param observed: 1 for an observed entry, 0 for a missing one.
    """

    y: Float[Tensor, "N D"]
    observed: Float[Tensor, "N D"]

    @classmethod
    def of(cls, y: Float[Tensor, "N D"]) -> "Table":
        """Create the table from data with NaN where missing.

        :param y: data.
        """
        return cls(torch.nan_to_num(y), (~torch.isnan(y)).to(y))


class LatentMoments(NamedTuple):
    """Posterior means and covariances of the latents of each point."""

    mean: Float[Tensor, "N Q"]
    covariance: Float[Tensor, "N Q Q"]

    def with_constant(self) -> tuple[Float[Tensor, "N L"], Float[Tensor, "N L L"]]:
        """First and second moments of the features (z, 1), with L = Q + 1."""
        features = F.pad(self.mean, (0, 1), value=1.0)
        return features, F.pad(self.covariance, (0, 1, 0, 1)) + _outer(features)


class DecoderFactors(NamedTuple):
    """Factors of weights, relevances, noise precisions and row scales.

    :param mean: means of the weights and, in the last column, of the bias of each output; L = Q + 1.
    :param covariance: their covariances.
    :param relevance: α, of batch shape [Q].
    :param noise: τ, of batch shape [D].
    :param row_scale: u, of batch shape [N].
    :param dof: degrees of freedom ν of the row scales.
    """

    mean: Float[Tensor, "D L"]
    covariance: Float[Tensor, "D L L"]
    relevance: Gamma
    noise: Gamma
    row_scale: Gamma
    dof: Float[Tensor, ""]

    @property
    def second_moment(self) -> Float[Tensor, "D L L"]:
        """``E[w_d w_dᵀ]``, with the bias as the last weight."""
        return self.covariance + _outer(self.mean)

    def precision(self, table: Table) -> Float[Tensor, "N D"]:
        """Mean noise precision ``E[τ_d] E[u_n]`` of each entry, 0 where it is missing.

        :param table: the data.
        """
        return table.observed * self.noise.mean * self.row_scale.mean[:, None]


def initial_factors(
    table: Table, loadings: Float[Tensor, "D Q"], noise_variance: Float[Tensor, " D"], dof: float = 10.0
) -> DecoderFactors:
    """Create factors with given weights and noise variances, and row scales of 1.

    :param table: standardised data.
    :param loadings: means of the weights.
    :param noise_variance: noise variances.
    :param dof: degrees of freedom ν.

    >>> q = initial_factors(Table.of(torch.randn(5, 2)), torch.ones(2, 1), torch.full((2,), 0.5))
    >>> q.mean, q.noise.mean
    (tensor([[1., 0.],
            [1., 0.]]), tensor([2., 2.]))
    """
    (N, D), Q = table.y.shape, loadings.shape[1]
    shape = PRIOR_SHAPE + 0.5 * table.observed.sum(0)
    covariance = 1e-4 * torch.eye(Q + 1, dtype=loadings.dtype, device=loadings.device).expand(D, -1, -1)
    half_dof, one = loadings.new_full((N,), 0.5 * dof), loadings.new_ones(Q)
    q = DecoderFactors(
        F.pad(loadings, (0, 1)),
        covariance,
        _gamma(one, one),
        _gamma(shape, shape * noise_variance),
        _gamma(half_dof, half_dof),
        loadings.new_tensor(dof),
    )
    return update_relevance(q)


def latent_sites(table: Table, q: DecoderFactors) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q Q"]]:
    r"""Compute the sites :math:`\exp(h_n^T z_n - \tfrac12 z_n^T \Lambda_n z_n)` of the latents of each point,

    .. math::

        \Lambda_n = \sum_{d\;\mathrm{observed}} E\tau_d\, E u_n\, E[w_d w_d^T], \qquad
        h_n = \sum_{d\;\mathrm{observed}} E\tau_d\, E u_n \big(y_{nd} E w_d - E[w_d b_d]\big) .

    :param table: the data.
    :param q: the factors.
    :returns: h and Λ.

    >>> table = Table.of(torch.tensor([[1.0, torch.nan]]))
    >>> latent_sites(table, initial_factors(table, torch.ones(2, 1), torch.full((2,), 0.5)))
    (tensor([[2.]]), tensor([[[2.0002]]]))
    """
    weights = q.precision(table)
    precision = torch.einsum("nd,dij->nij", weights, q.second_moment)
    linear = (weights * table.y) @ q.mean[:, :-1] - precision[:, :-1, -1]
    return linear, precision[:, :-1, :-1]


class WhiteGivenProcesses(NamedTuple):
    r"""White latents given the processes, :math:`s_n \mid f_n \sim N(c_n + G_n f_n, C_n)`.

    :param constant: the constant c.
    :param gain: the gain G.
    :param covariance: the covariance C.
    """

    constant: Float[Tensor, "N R"]
    gain: Float[Tensor, "N R Q"]
    covariance: Float[Tensor, "N R R"]

    def joint(self, processes: LatentMoments) -> LatentMoments:
        """Moments of processes and white latents together.

        :param processes: moments of the processes.
        """
        mean, covariance = processes
        white = self.constant + (self.gain @ mean[..., None]).squeeze(-1)
        cross = self.gain @ covariance
        upper = torch.cat([covariance, cross.mT], -1)
        lower = torch.cat([cross, self.covariance + cross @ self.gain.mT], -1)
        return LatentMoments(torch.cat([mean, white], -1), torch.cat([upper, lower], -2))


def marginalize_white(
    linear: Float[Tensor, "N Q"], precision: Float[Tensor, "N Q Q"], row_scale: Float[Tensor, " N"], num_white: int
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P P"], Float[Tensor, ""], WhiteGivenProcesses]:
    """Integrate the last latents of each point, ``s_n ~ N(0, I / u_n)``, out of their sites.

    :param linear: h of all latents.
    :param precision: Λ of all latents.
    :param row_scale: mean row scales u.
    :param num_white: number R of white latents.
    :returns: h and Λ of the processes, the log normaliser of this integral, and the white latents given the processes.

    >>> h, Lambda, log_normaliser, white = marginalize_white(torch.zeros(1, 2), torch.ones(1, 2, 2), torch.ones(1), 1)
    >>> Lambda, white.covariance
    (tensor([[[0.5000]]]), tensor([[[0.5000]]]))
    """
    P = linear.shape[-1] - num_white
    identity = torch.eye(num_white, dtype=linear.dtype, device=linear.device)
    cross = precision[:, P:, :P]
    L = safe_cholesky(
        precision[:, P:, P:] + row_scale[:, None, None] * identity, jitter=0.0, name="precision of white latents"
    )
    solved = torch.cholesky_solve(torch.cat([cross, linear[:, P:, None]], -1), L)
    gain, constant = -solved[..., :P], solved[..., P]
    log_dets = num_white * row_scale.log() - 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_normaliser = 0.5 * (log_dets.sum() + (linear[:, P:] * constant).sum())
    white = WhiteGivenProcesses(constant, gain, torch.cholesky_inverse(L))
    marginal_precision = precision[:, :P, :P] + cross.mT @ gain
    return linear[:, :P] - (cross.mT @ constant[..., None]).squeeze(-1), marginal_precision, log_normaliser, white


def update_weights(table: Table, q: DecoderFactors, z: LatentMoments) -> DecoderFactors:
    r"""Update the weights and the bias of each output: :math:`V_d^{-1} = \mathrm{diag}(E\alpha) + E\tau_d \sum_n E u_n
    E[z_n z_n^T]` and :math:`V_d^{-1} \mu_d = E\tau_d \sum_n E u_n\, y_{nd} E z_n`, over observed entries.

    :param table: the data.
    :param q: the factors.
    :param z: moments of the latents.
    """
    features, second = z.with_constant()
    weights = q.precision(table)
    precision = torch.einsum("nd,nij->dij", weights, second) + torch.diag(_prior_precision(q))
    L = safe_cholesky(precision, jitter=0.0, name="precision of decoder weights")
    mean = torch.cholesky_solve(((weights * table.y).mT @ features)[..., None], L).squeeze(-1)
    return q._replace(mean=mean, covariance=torch.cholesky_inverse(L))


def update_relevance(q: DecoderFactors) -> DecoderFactors:
    """Update the relevances α, by which the weights of unused latents shrink to zero.

    :param q: the factors.
    """
    squares = _weight_squares(q)[:, :-1]
    prior = squares.new_tensor(PRIOR_SHAPE), squares.new_tensor(PRIOR_RATE)
    return q._replace(relevance=_gamma(*gamma_precision(*prior, squares.mT)))


def update_noise(table: Table, q: DecoderFactors, z: LatentMoments) -> DecoderFactors:
    """Update the noise precisions τ.

    :param table: the data.
    :param q: the factors.
    :param z: moments of the latents.
    """
    squares = q.row_scale.mean[:, None] * _residual_squares(table, q, z)
    prior = squares.new_tensor(PRIOR_SHAPE), squares.new_tensor(PRIOR_RATE)
    return q._replace(noise=_gamma(*gamma_precision(*prior, squares.mT, table.observed.mT)))


def update_row_scales(table: Table, q: DecoderFactors, z: LatentMoments, num_white: int) -> DecoderFactors:
    """Update the row scales u from the white latents and the residuals of each row.

    :param table: the data.
    :param q: the factors.
    :param z: moments of the latents.
    :param num_white: number R of white latents, the last ones.
    """
    white = z.mean.square() + z.covariance.diagonal(dim1=-2, dim2=-1)
    white = white[:, white.shape[-1] - num_white :]
    squares = torch.cat([white, q.noise.mean * _residual_squares(table, q, z)], -1)
    counted = torch.cat([torch.ones_like(white), table.observed], -1)
    half_dof = 0.5 * q.dof.expand(len(squares))
    return q._replace(row_scale=_gamma(*gamma_precision(half_dof, half_dof, squares, counted)))


def update_dof(q: DecoderFactors) -> DecoderFactors:
    """Set the degrees of freedom ν to the best of a grid from 2 to 1000 and the present value.

    :param q: the factors.
    """
    u, N = q.row_scale, q.row_scale.mean.numel()
    half = 0.5 * torch.cat([q.dof.reshape(1), torch.logspace(math.log10(2.0), 3.0, 100, dtype=u.mean.dtype).to(u.mean)])
    merit = N * (half * half.log() - torch.lgamma(half)) + half * (_mean_log(u) - u.mean).sum()
    return q._replace(dof=2.0 * half[merit.argmax()])


def extrapolate(before: DecoderFactors, after: DecoderFactors, step: float) -> DecoderFactors:
    """Lengthen the step of an update of the mean weights and of the logarithms of noise and row scales.

    The bound may fall, so that the caller has to compare it and to return to ``after``.

    :param before: factors before the update.
    :param after: factors after the update.
    :param step: length of the step, 1 for the update itself.

    Source: Salakhutdinov and Roweis (2003), "Adaptive overrelaxed bound optimization methods".
    """
    return after._replace(
        mean=before.mean + step * (after.mean - before.mean),
        noise=_gamma(after.noise.concentration, _extrapolate_log(before.noise.rate, after.noise.rate, step)),
        row_scale=_gamma(after.row_scale.concentration, _extrapolate_log(before.row_scale.rate, after.row_scale.rate, step)),
    )


def _extrapolate_log(before: Tensor, after: Tensor, step: float) -> Tensor:
    return before * (after / before) ** step


def rescale_latents(
    q: DecoderFactors, z: LatentMoments, process_squares: Float[Tensor, " P"]
) -> tuple[DecoderFactors, LatentMoments]:
    r"""Move along transformations :math:`z \to R z, w \to R^{-T} w` that do not change the data, to a higher bound.

    Coordinate ascent is slow along these transformations.  R scales each process so that its expected square is that of its
    prior, and rotates and scales the white latents so that their second moment is I and their loadings are orthogonal.  Each
    of these changes is made only if it raises the bound.

    :param q: the factors.
    :param z: moments of the latents.
    :param process_squares: :math:`E[f_q^T K_q^{-1} f_q]` of each process.
    :returns: the factors and the moments.

    Source: Luttinen and Ilin (2010); parameter-expanded EM of Liu, Rubin and Wu (1998).
    """
    (N, Q), P, D = z.mean.shape, len(process_squares), len(q.mean)
    R, R_inverse = (torch.eye(Q, dtype=z.mean.dtype, device=z.mean.device) for _ in range(2))
    loadings = q.second_moment[:, :-1, :-1].sum(0)
    size = _unit_scaling(process_squares, loadings.diagonal()[:P], N, D)
    R.diagonal()[:P], R_inverse.diagonal()[:P] = size.reciprocal(), size
    if P < Q:
        second = z.covariance[:, P:, P:] + _outer(z.mean[:, P:])
        squares = (q.row_scale.mean[:, None, None] * second).sum(0)
        if (change := _whitening(squares, loadings[P:, P:], N, D)) is not None:
            R[P:, P:], R_inverse[P:, P:] = change
    of_features = torch.block_diag(R_inverse, R_inverse.new_ones(1, 1))
    q = q._replace(mean=q.mean @ of_features, covariance=of_features.mT @ q.covariance @ of_features)
    return update_relevance(q), LatentMoments(z.mean @ R.mT, R @ z.covariance @ R.mT)


def _unit_scaling(squares: Float[Tensor, " P"], loadings: Float[Tensor, " P"], N: int, D: int) -> Float[Tensor, " P"]:
    """Compute numbers by which to divide each process; 1 where that would lower the bound.

    :param squares: expected squares of the processes.
    :param loadings: sums of the second moments of their weights.
    """
    variance = squares / N
    gain = 0.5 * ((D - N) * variance.log() + squares - N)
    gain = gain - (PRIOR_SHAPE + 0.5 * D) * ((PRIOR_RATE + 0.5 * variance * loadings) / (PRIOR_RATE + 0.5 * loadings)).log()
    return torch.where(gain > 0.0, variance.sqrt(), 1.0)


def _whitening(
    squares: Float[Tensor, "R R"], loadings: Float[Tensor, "R R"], N: int, D: int
) -> tuple[Float[Tensor, "R R"], Float[Tensor, "R R"]] | None:
    """Compute a transformation of a group of latents and its inverse; None if it would lower the bound.

    :param squares: sum of the second moments of the latents.
    :param loadings: sum of the second moments of the weights.
    """
    L = safe_cholesky(squares / N, jitter=0.0, name="second moment of latents")
    _, U = torch.linalg.eigh(L.mT @ loadings @ L)
    R_inverse = L @ U
    R = U.mT @ torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    # Entropies of latents and weights, prior of the latents, and weights under their prior with new relevances
    log_det = -L.diagonal().log().sum()
    rates = PRIOR_RATE + 0.5 * torch.stack([loadings.diagonal(), (R_inverse.mT @ loadings @ R_inverse).diagonal()])
    gain = (N - D) * log_det + 0.5 * (squares.trace() - N * len(L))
    gain = gain - (PRIOR_SHAPE + 0.5 * D) * rates.log().sum(-1).diff().squeeze()
    return (R, R_inverse) if gain > 0.0 else None


def site_constant(table: Table, q: DecoderFactors, num_white: int) -> Float[Tensor, ""]:
    """Compute the part of the expected log likelihood that does not depend on the latents, and is not in their sites.

    :param table: the data.
    :param q: the factors.
    :param num_white: number R of white latents.
    """
    log_scale, scale = _mean_log(q.row_scale), q.row_scale.mean
    squares = table.y.square() - 2.0 * table.y * q.mean[:, -1] + q.second_moment[:, -1, -1]
    log_precision = _mean_log(q.noise) + log_scale[:, None] - math.log(2.0 * math.pi)
    # E log N(s; 0, 1/u) is log N(s; 0, 1/E u) plus a difference of logarithms for each white latent.
    white = num_white * (log_scale - scale.log()).sum()
    return 0.5 * ((table.observed * log_precision).sum() - (q.precision(table) * squares).sum() + white)


def divergence(q: DecoderFactors) -> Float[Tensor, ""]:
    """Compute the KL divergence of the factors from their priors.

    The bound on the log evidence is the log normaliser of the latents under :func:`latent_sites`, plus
    :func:`site_constant`, minus this divergence.

    :param q: the factors.
    """
    precision = _prior_precision(q)
    log_precision = torch.cat([_mean_log(q.relevance), precision[-1:].log()])
    log_dets = torch.linalg.slogdet(q.covariance)[1]
    weights = 0.5 * ((precision * _weight_squares(q) - 1.0 - log_precision).sum() - log_dets.sum())
    prior = _gamma(q.mean.new_tensor(PRIOR_SHAPE), q.mean.new_tensor(PRIOR_RATE))
    half_dof = 0.5 * q.dof.expand_as(q.row_scale.mean)
    gammas = ((q.relevance, prior), (q.noise, prior), (q.row_scale, _gamma(half_dof, half_dof)))
    return weights + sum(kl_divergence(*pair).sum() for pair in gammas)


def _residual_squares(table: Table, q: DecoderFactors, z: LatentMoments) -> Float[Tensor, "N D"]:
    """Expected squares of the residuals of all entries, meaningless where an entry is missing."""
    features, second = z.with_constant()
    predicted = torch.einsum("dij,nij->nd", q.second_moment, second)
    return table.y.square() - 2.0 * table.y * (features @ q.mean.mT) + predicted


def _weight_squares(q: DecoderFactors) -> Float[Tensor, "D L"]:
    return q.mean.square() + q.covariance.diagonal(dim1=-2, dim2=-1)


def _prior_precision(q: DecoderFactors) -> Float[Tensor, " L"]:
    """Mean prior precision of the weights and of the bias."""
    return F.pad(q.relevance.mean, (0, 1), value=BIAS_PRECISION)


def _mean_log(gamma: Gamma) -> Tensor:
    return torch.digamma(gamma.concentration) - gamma.rate.log()


def _gamma(shape: Tensor, rate: Tensor) -> Gamma:
    return Gamma(shape, rate, validate_args=False)


def _outer(x: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch L L"]:
    return x[..., :, None] * x[..., None, :]
