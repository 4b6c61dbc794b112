r"""The posterior of a Gaussian process under Gaussian sites: pure tensor functions.

A site says :math:`l(f_n) = N(f_n; \mu_n, v_n)` about the process at input n.  With :math:`W = \mathrm{diag}(v)^{-1/2}` and
:math:`c = W\mu`,

.. math::

    q(f) = \frac{1}{Z} N(f; m, K) \prod_n l(f_n), \qquad B = I + W K W = L_B L_B^T, \qquad
    (K + S)^{-1} = W B^{-1} W,

so that nothing is ever singular: the eigenvalues of B are at least 1, and a site that says nothing has :math:`W_n = c_n = 0`.
The constants :math:`\log W_n - \tfrac12 \log 2\pi` of the sites cancel in every bound and are left out of both log l and
log Z.

Source: section 3.2 of the GP-VAE thesis; Rasmussen and Williams (2006), section 3.4.3, for B.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.ops.linalg import safe_cholesky, solve_lower


class Posterior(NamedTuple):
    """q(f) at the inputs, by its marginals and what its other moments need.

    :param mean: of f_n.
    :param variance: of f_n.
    :param W: square roots of the sites' precisions.
    :param c: W times the sites' means, less the prior mean.
    :param alpha: B⁻¹ c.
    :param half_log_det: ½ log|B|.
    :param LB: Cholesky factor of B: a matrix, or what serves as one.
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
) -> Posterior:
    """The posterior under sites.

    :param K: prior covariance.
    :param prior_mean: prior mean m.
    :param site_mean: μ, anything finite where the precision is 0.
    :param site_precision: 1/v, zero where a site says nothing.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> posterior.mean, posterior.variance
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    W, c = whitened_sites(site_mean - prior_mean, site_precision)
    batch = torch.broadcast_shapes(K.shape[:-2], W.shape[:-1], c.shape[:-1])
    W, c = W.expand(*batch, -1), c.expand(*batch, -1)
    alpha, shift, reduction, half_log_det, LB, _ = _Conditioning.apply(K.expand(*batch, -1, -1), W, c)
    prior_variance = K.diagonal(dim1=-2, dim2=-1)
    variance = bounded_variance(prior_variance - reduction, prior_variance, site_precision)
    return Posterior(prior_mean + shift, variance, W, c, alpha, half_log_det, LB)


class _Conditioning(torch.autograd.Function):
    r"""B⁻¹c, the shift K W B⁻¹ c of the mean, the reduction r = diag(K W B⁻¹ W K) of the variance, ½ log|B| and L_B.

    Their gradients, given here, take one triangular solution and one product of N × N matrices; those of each operation
    would take more of both.  With :math:`A = B^{-1} W K` and bars for derivatives of the loss,

    .. math::

        \bar B = \tfrac12 \bar h B^{-1} - A \, \mathrm{diag}(\bar r) A^T - \tfrac12 (u \alpha^T + \alpha u^T), \qquad
        B^{-1} = I - A W, \qquad u = B^{-1} \bar\alpha,

    to which r adds :math:`2 W A \, \mathrm{diag}(\bar r)` in :math:`\bar K`, besides :math:`W \bar B W`.
    """

    @staticmethod
    def forward(K, W, c):
        WK = W[..., :, None] * K
        B = WK * W[..., None, :]
        B.diagonal(dim1=-2, dim2=-1).add_(1.0)
        # The eigenvalues of B are at least 1: rounding alone may ask for jitter.
        LB = safe_cholesky(B, jitter=0.0, name="I + W K W")
        alpha = torch.cholesky_solve(c[..., None], LB)
        LB_inv_WK = solve_lower(LB, WK)
        half_log_det = LB.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        shift = (WK.mT @ alpha).squeeze(-1)
        return alpha.squeeze(-1), shift, LB_inv_WK.square().sum(-2), half_log_det, LB, LB_inv_WK

    @staticmethod
    def setup_context(ctx, inputs, output):
        K, W, _ = inputs
        alpha, *_, LB, LB_inv_WK = output
        ctx.mark_non_differentiable(LB_inv_WK)
        ctx.save_for_backward(K, W, alpha, LB, LB_inv_WK)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, of_alpha, of_shift, of_reduction, of_half_log_det, of_LB, _):
        K, W, alpha, LB, LB_inv_WK = ctx.saved_tensors
        nothing, alpha = torch.zeros_like(W), alpha[..., None]
        of_alpha, of_shift, of_reduction = (nothing if x is None else x for x in (of_alpha, of_shift, of_reduction))
        left, right, r = W[..., :, None], W[..., None, :], of_reduction[..., None, :]
        if torch.is_grad_enabled():  # second derivatives need A as a function of K and W
            A = torch.cholesky_solve(left * K, LB)
        else:
            A = torch.linalg.solve_triangular(LB.mT, LB_inv_WK, upper=True)
        K_shift = K @ of_shift[..., None]
        u = torch.cholesky_solve(of_alpha[..., None] + left * K_shift, LB)

        h = nothing[..., :1] if of_half_log_det is None else 0.5 * of_half_log_det[..., None]
        inner = r.mT * A.mT
        inner.diagonal(dim1=-2, dim2=-1).add_(h * W)
        B_bar = -0.5 * (torch.cat([u, alpha], -1) @ torch.cat([alpha, u], -1).mT)
        B_bar.sub_(A @ inner).diagonal(dim1=-2, dim2=-1).add_(h)
        if of_LB is not None:
            B_bar = B_bar + _of_cholesky(LB, of_LB)

        half = (B_bar * right).addcmul_(A, r)
        W_bar = 2.0 * (half * K).sum(-1) + (alpha * K_shift).squeeze(-1)
        K_bar = (torch.addcmul(half, A, r) * left).add_((left * alpha) * of_shift[..., None, :])
        return K_bar, W_bar, u.squeeze(-1)


def _of_cholesky(L: Float[Tensor, "*batch N N"], L_bar: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch N N"]:
    """Derivative by a symmetric matrix from that by its Cholesky factor L.

    Source: Murray (2016), "Differentiation of the Cholesky decomposition", eq. 10.
    """
    inner = (L.mT @ L_bar).tril()
    inner.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    inner = torch.linalg.solve_triangular(L.mT, inner + inner.mT, upper=True)  # L⁻ᵀ Φ
    return 0.5 * torch.linalg.solve_triangular(L, inner, upper=False, left=False)


def log_normaliser(posterior: Posterior) -> Float[Tensor, "*batch"]:
    """``log Z = −½ cᵀB⁻¹c − ½ log|B|``, without the constants of the sites.

    :param posterior: what :func:`condition` returned.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> log_normaliser(posterior)  # log N(2; 0, 2) + ½ log 2π
    tensor(-1.3466)
    """
    return -0.5 * (posterior.c * posterior.alpha).sum(-1) - posterior.half_log_det


def log_sites(posterior: Posterior, centred: Float[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N"]:
    """``log l(f_n) = −½ (W_n (f_n − m_n) − c_n)²``, without the constants of the sites.

    :param posterior: what :func:`condition` returned.
    :param centred: f less the prior mean.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> log_sites(posterior, torch.zeros(2))
    tensor([-2., -0.])
    """
    return -0.5 * (posterior.W * centred - posterior.c).square()


def expected_log_sites(
    posterior: Posterior, centred: Float[Tensor, "*#batch N"], variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """``E[log l(f_n)]`` for Gaussian f, without the constants of the sites.

    :param posterior: what :func:`condition` returned.
    :param centred: mean of f less the prior mean.
    :param variance: of f.

    >>> posterior = condition(torch.eye(2), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> expected_log_sites(posterior, torch.zeros(2), torch.ones(2))
    tensor([-2.5000, -0.0000])
    """
    return log_sites(posterior, centred) - 0.5 * posterior.W.square() * variance


def kl_divergence(posterior: Posterior) -> Float[Tensor, "*batch"]:
    """``KL(q ‖ prior) = E_q[log l] − log Z``.

    :param posterior: what :func:`condition` returned.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> kl_divergence(posterior)  # KL(N(1, ½) ‖ N(0, 1)) = ½ (½ + 1 − 1 + log 2)
    tensor(0.5966)
    """
    # At the posterior mean  W (f − m) − c = −B⁻¹c.
    expected = -0.5 * (posterior.alpha.square() + posterior.W.square() * posterior.variance)
    return expected.sum(-1) - log_normaliser(posterior)


def predict(
    posterior: Posterior,
    K_new: Float[Tensor, "*#batch M N"],
    variance_new: Float[Tensor, "*#batch M"],
    prior_mean_new: Float[Tensor, "*#batch M"],
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch M"]]:
    """Marginal means and variances at other inputs.

    :param posterior: what :func:`condition` returned.
    :param K_new: covariance between those inputs and the ones with sites.
    :param variance_new: prior variances there.
    :param prior_mean_new: prior means there.

    Source: eqs. 3.8 and 3.9 of the GP-VAE thesis.

    >>> posterior = condition(torch.ones(1, 1), torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    >>> predict(posterior, torch.tensor([[1.0], [0.0]]), torch.ones(2), torch.zeros(2))  # at the site, and far away
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    KW = K_new * posterior.W[..., None, :]
    mean = prior_mean_new + (KW @ posterior.alpha[..., None]).squeeze(-1)
    variance = variance_new - solve_lower(posterior.LB, KW.mT).square().sum(-2)
    mean, variance = torch.broadcast_tensors(mean, _positive(variance, variance_new))
    return mean, variance


def predictive_covariance(
    posterior: Posterior, K_new: Float[Tensor, "*#batch M N"], K_new_new: Float[Tensor, "*#batch M M"]
) -> Float[Tensor, "*batch M M"]:
    """Covariance at other inputs, ``K** − K* W B⁻¹ W K*ᵀ``; with ``K_new = K_new_new = K`` that of q(f) itself.

    :param posterior: what :func:`condition` returned.
    :param K_new: covariance between those inputs and the ones with sites.
    :param K_new_new: prior covariance there.

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
    """A joint draw of q(f) from one of the prior, by Matheron's rule ``f + K W B⁻¹ (c + ε − W f)``.

    :param posterior: what :func:`condition` returned.
    :param prior_draw: f, less the prior mean.
    :param K: prior covariance.
    :param noise: ε, standard normal, of the draw's shape.
    :returns: the draw, less the prior mean.

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
    """W and c of sites, with finite gradients where the precision is 0.

    :param site_mean: μ, less the prior mean.
    :param site_precision: 1/v.

    >>> whitened_sites(torch.tensor([3.0, 5.0]), torch.tensor([4.0, 0.0]))
    (tensor([2., 0.]), tensor([6., 0.]))
    """
    told = site_precision > 0.0
    # √ has no derivative at 0.
    W = torch.where(told, torch.where(told, site_precision, 1.0).sqrt(), 0.0)
    return W, W * site_mean


def bounded_variance(
    variance: Float[Tensor, "*#batch N"],
    before: Float[Tensor, "*#batch N"],
    site_precision: Float[Tensor, "*#batch N"],
) -> Float[Tensor, "*batch N"]:
    """Posterior variances, which rounding can make neither negative nor larger than those of the sites alone.

    :param variance: a difference.
    :param before: what it was taken from, to whose rounding it is known.
    :param site_precision: 1/v.

    >>> bounded_variance(torch.tensor([-1e-9, 0.3]), torch.ones(2), torch.tensor([100.0, 10.0]))
    tensor([1.1921e-07, 1.0000e-01])
    """
    # E[log l] of a sharp site would fall without bound.  The least precision has room for the derivative of its inverse.
    of_site = site_precision.clamp_min(torch.finfo(site_precision.dtype).tiny ** 0.4).reciprocal()
    return torch.minimum(_positive(variance, before), of_site)


def _positive(variance: Float[Tensor, "*batch N"], before: Float[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N"]:
    """Differences from variances, which are known to rounding of those only; where they are 0, with room for 1 / variance²."""
    info = torch.finfo(variance.dtype)
    return torch.maximum(variance, info.eps * before).clamp_min(info.tiny**0.4)
