r"""The posterior of a Gaussian process under Gaussian sites: pure tensor functions.

A site is a factor :math:`l(f_n) = N(f_n; \mu_n, v_n)` of the value of the process at input n.  With
:math:`W = \mathrm{diag}(v)^{-1/2}` and :math:`c = W\mu`,

.. math::

    q(f) = \frac{1}{Z} N(f; m, K) \prod_n l(f_n), \qquad B = I + W K W = L_B L_B^T, \qquad
    (K + S)^{-1} = W B^{-1} W,

so that no matrix is singular: the eigenvalues of B are at least 1, and a site without information has :math:`W_n = c_n = 0`.
The constants :math:`\log W_n - \tfrac12 \log 2\pi` of the sites cancel in every bound and are left out of both log l and
log Z.

Source: section 3.2 of the GP-VAE thesis; Rasmussen and Williams (2006), section 3.4.3, for B.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.ops._conditioning import Conditioning
from pyro_lvgp.ops.linalg import solve_lower

__all__ = [
    "Posterior",
    "bounded_precision",
    "bounded_variance",
    "condition",
    "expected_log_sites",
    "kl_divergence",
    "log_normaliser",
    "log_sites",
    "positive_variance",
    "predict",
    "predictive_covariance",
    "sample_posterior",
    "whitened_sites",
]

_LARGEST_RELATIVE_PRECISION = 1e11  # in double precision I + W K W and log densities of joint draws keep five digits


class Posterior(NamedTuple):
    """Marginals of q(f) at the inputs, and the factors from which the other moments are computed.

    :param mean: means of f_n.
    :param variance: variances of f_n.
    :param W: square roots of the sites' precisions.
    :param c: W times the difference of the sites' means and the prior mean.
    :param alpha: B⁻¹ c.
    :param half_log_det: ½ log|B|.
    :param LB: Cholesky factor of B: a matrix, or the :class:`~pyro_lvgp.ops.state_space.KalmanFilter` of a Markov process.
    """

    mean: Float[Tensor, "*batch N"]
    variance: Float[Tensor, "*batch N"]
    W: Float[Tensor, "*batch N"]
    c: Float[Tensor, "*batch N"]
    alpha: Float[Tensor, "*batch N"]
    half_log_det: Float[Tensor, "*batch"]
    LB: Any


def condition(
    K: Float[Tensor, "*#batch N N"],
    prior_mean: Float[Tensor, "*#batch N"],
    site_mean: Float[Tensor, "*#batch N"],
    site_precision: Float[Tensor, "*#batch N"],
    cholesky: Callable[[Tensor], Tensor] = torch.linalg.cholesky,
) -> Posterior:
    """Compute the posterior under Gaussian sites.

    :param K: prior covariance.
    :param prior_mean: prior mean m.
    :param site_mean: μ, any finite number where the precision is 0.
    :param site_precision: 1/v, zero for a site without information.
    :param cholesky: function that returns the lower Cholesky factor of B, with jitter where rounding makes B indefinite.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> posterior.mean, posterior.variance
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    W, c = whitened_sites(site_mean - prior_mean, site_precision)
    batch = torch.broadcast_shapes(K.shape[:-2], W.shape[:-1], c.shape[:-1])
    W, c = W.expand(*batch, -1), c.expand(*batch, -1)
    alpha, shift, reduction, half_log_det, LB, _ = Conditioning.apply(K.expand(*batch, -1, -1), W, c, cholesky)
    prior_variance = K.diagonal(dim1=-2, dim2=-1)
    variance = bounded_variance(prior_variance - reduction, prior_variance, site_precision)
    return Posterior(prior_mean + shift, variance, W, c, alpha, half_log_det, LB)


def log_normaliser(posterior: Posterior) -> Float[Tensor, "*batch"]:
    """Compute the log normaliser ``log Z = −½ cᵀB⁻¹c − ½ log|B|``, without the constants of the sites.

    :param posterior: returned by :func:`condition`.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> log_normaliser(posterior)  # log N(2; 0, 2) + ½ log 2π
    tensor(-1.3466)
    """
    return -0.5 * (posterior.c * posterior.alpha).sum(-1) - posterior.half_log_det


def log_sites(posterior: Posterior, centred: Float[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N"]:
    """Compute the log sites ``log l(f_n) = −½ (W_n (f_n − m_n) − c_n)²``, without their constants.

    :param posterior: returned by :func:`condition`.
    :param centred: f minus the prior mean.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> log_sites(posterior, torch.zeros(2))
    tensor([-2., -0.])
    """
    return -0.5 * (posterior.W * centred - posterior.c).square()


def expected_log_sites(
    posterior: Posterior, centred: Float[Tensor, "*#batch N"], variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Compute the expected log sites ``E[log l(f_n)]`` for Gaussian f, without their constants.

    :param posterior: returned by :func:`condition`.
    :param centred: mean of f minus the prior mean.
    :param variance: variance of f.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> expected_log_sites(posterior, torch.zeros(2), torch.ones(2))
    tensor([-2.5000, -0.0000])
    """
    return log_sites(posterior, centred) - 0.5 * posterior.W.square() * variance


def kl_divergence(posterior: Posterior) -> Float[Tensor, "*batch"]:
    """Compute the Kullback-Leibler divergence ``KL(q ‖ prior) = E_q[log l] − log Z``.

    :param posterior: returned by :func:`condition`.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> kl_divergence(posterior)  # KL(N(1, ½) ‖ N(0, 1)) = ½ (½ + 1 − 1 + log 2)
    tensor(0.5966)
    """
    # At the posterior mean  W (f − m) − c = −B⁻¹c.
    expected = -0.5 * (posterior.alpha.square() + posterior.W.square() * posterior.variance)
    kl = expected.sum(-1) - log_normaliser(posterior)
    return kl + (kl.clamp_min(0.0) - kl).detach()  # rounding may make a difference of large terms negative


def predict(
    posterior: Posterior,
    K_new: Float[Tensor, "*#batch M N"],
    variance_new: Float[Tensor, "*#batch M"],
    prior_mean_new: Float[Tensor, "*#batch M"],
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch M"]]:
    """Compute marginal means and variances at new inputs.

    :param posterior: returned by :func:`condition`.
    :param K_new: covariance between the new inputs and those with sites.
    :param variance_new: prior variances at the new inputs.
    :param prior_mean_new: prior means at the new inputs.

    Source: eqs. 3.8 and 3.9 of the GP-VAE thesis.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> predict(posterior, torch.tensor([[1.0], [0.0]]), torch.ones(2), torch.zeros(2))  # at the site, and far away
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    KW = K_new * posterior.W[..., None, :]
    mean = prior_mean_new + (KW @ posterior.alpha[..., None]).squeeze(-1)
    variance = variance_new - solve_lower(posterior.LB, KW.mT).square().sum(-2)
    mean, variance = torch.broadcast_tensors(mean, positive_variance(variance, variance_new))
    return mean, variance


def predictive_covariance(
    posterior: Posterior, K_new: Float[Tensor, "*#batch M N"], K_new_new: Float[Tensor, "*#batch M M"]
) -> Float[Tensor, "*batch M M"]:
    """Compute the covariance at new inputs, ``K** − K* W B⁻¹ W K*ᵀ``; with ``K_new = K_new_new = K``, the covariance of q(f).

    :param posterior: returned by :func:`condition`.
    :param K_new: covariance between the new inputs and those with sites.
    :param K_new_new: prior covariance of the new inputs.

    >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    >>> posterior = condition(K[:1, :1], torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> predictive_covariance(posterior, K[:, :1], K)
    tensor([[0.5000, 0.2500],
            [0.2500, 0.8750]])
    """
    A = solve_lower(posterior.LB, (K_new * posterior.W[..., None, :]).mT)
    return K_new_new - A.mT @ A


def sample_posterior(
    posterior: Posterior, prior_draw: Float[Tensor, "*#batch N"], K: Float[Tensor, "*#batch N N"], noise: Tensor
) -> Float[Tensor, "*batch N"]:
    """Turn a joint draw of the prior into one of q(f), by Matheron's rule ``f + K W B⁻¹ (c + ε − W f)``.

    :param posterior: returned by :func:`condition`.
    :param prior_draw: f minus the prior mean.
    :param K: prior covariance.
    :param noise: ε, standard normal, of the draw's shape.
    :returns: draw of q(f) minus the prior mean.

    Source: Wilson et al. (2020), "Efficiently sampling functions from Gaussian process posteriors".

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> sample_posterior(posterior, torch.ones(2), torch.eye(2), torch.zeros(2))
    tensor([1.5000, 1.0000])
    """
    residual = posterior.c + noise - posterior.W * prior_draw
    weights = posterior.W * torch.cholesky_solve(residual[..., None], posterior.LB).squeeze(-1)
    return prior_draw + (K @ weights[..., None]).squeeze(-1)


def whitened_sites(
    site_mean: Float[Tensor, "*#batch N"], site_precision: Float[Tensor, "*#batch N"]
) -> tuple[Float[Tensor, "*#batch N"], Float[Tensor, "*batch N"]]:
    """Compute square roots W of the sites' precisions and ``c = W μ``, with finite gradients where the precision is 0.

    :param site_mean: μ minus the prior mean.
    :param site_precision: 1/v.

    >>> whitened_sites(torch.tensor([3.0, 5.0]), torch.tensor([4.0, 0.0]))
    (tensor([2., 0.]), tensor([6., 0.]))
    """
    informative = site_precision > 0.0
    # √ has no derivative at 0.
    W = torch.where(informative, torch.where(informative, site_precision, 1.0).sqrt(), 0.0)
    return W, W * site_mean


def bounded_precision(
    site_precision: Float[Tensor, "*#batch N"], prior_variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Clamp the precisions of sites to 1e11 times those of the prior.

    Beyond that, rounding in double precision is larger than the densities of sites at draws of the posterior.

    :param site_precision: 1/v.
    :param prior_variance: diagonal of the prior covariance.

    >>> bounded_precision(torch.tensor([2.0, 1e30]), torch.ones(2))
    tensor([2.0000e+00, 1.0000e+11])
    """
    tiny = torch.finfo(prior_variance.dtype).tiny ** 0.5
    return torch.minimum(site_precision, _LARGEST_RELATIVE_PRECISION / prior_variance.detach().clamp_min(tiny))


def bounded_variance(
    variance: Float[Tensor, "*#batch N"],
    minuend: Float[Tensor, "*#batch N"],
    site_precision: Float[Tensor, "*#batch N"],
) -> Float[Tensor, "*batch N"]:
    """Clamp posterior variances, computed as differences, to the range that exact arithmetic gives them.

    Each is positive, and at most the variance 1 / precision of the site alone.

    :param variance: the differences.
    :param minuend: the minuends, whose rounding error bounds the precision of the differences.
    :param site_precision: 1/v.

    >>> bounded_variance(torch.tensor([-1e-9, 0.3]), torch.ones(2), torch.tensor([100.0, 10.0]))
    tensor([1.1921e-07, 1.0000e-01])
    """
    # Without the upper bound, rounding would make E[log l] of a site of high precision very small.  The lower bound of the
    # precision avoids overflow of the derivative of the reciprocal.
    site_variance = site_precision.clamp_min(torch.finfo(site_precision.dtype).tiny ** 0.4).reciprocal()
    return torch.minimum(positive_variance(variance, minuend), site_variance)


def positive_variance(variance: Float[Tensor, "*batch N"], minuend: Float[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N"]:
    """Clamp variances, computed as differences, to the rounding error of the minuends.

    Where a minuend is 0, the variance is clamped to a constant for which 1 / variance² does not overflow.

    :param variance: the differences.
    :param minuend: the minuends.

    >>> positive_variance(torch.tensor([-1e-9, 0.3]), torch.ones(2))
    tensor([1.1921e-07, 3.0000e-01])
    """
    info = torch.finfo(variance.dtype)
    return torch.maximum(variance, info.eps * minuend).clamp_min(info.tiny**0.4)
