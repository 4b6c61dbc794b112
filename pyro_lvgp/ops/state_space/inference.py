r"""State-space models under Gaussian sites: the Kalman filter as the Cholesky factor of I + W K W.

These functions compute for Gauss–Markov models what :mod:`pyro_lvgp.ops.gaussian_sites` computes from the matrix K.  With
sites
:math:`c_n = W_n f_n + \epsilon`, let m and P be the mean and the covariance of the state given the sites before n, and

.. math::

    s_n = 1 + W_n^2 h^T P_n h, \qquad p_n = P_n h / s_n, \qquad k_n = W_n p_n, \qquad
    \Psi_n = (I - W_n k_n h^T) A_{n-1} .

Then :math:`|B| = \prod_n s_n`, the filter is :math:`m'_n = \Psi_n m'_{n-1} + k_n c_n`, and the smoother is the transposed
recursion.  No covariance is inverted, so that inputs may coincide, and precisions of sites may be zero or very large.

Source: Särkkä and García-Fernández (2021), "Temporal parallelization of Bayesian smoothers", for the covariances; Durbin and
Koopman (2012), section 4.5, and Bierman (1973), "Fixed interval smoothing with discrete measurements", for the smoother.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from pyro_lvgp.ops import gaussian_sites
from pyro_lvgp.ops.gaussian_sites import Posterior
from pyro_lvgp.ops.state_space.models import StateSpaceModel
from pyro_lvgp.ops.state_space.scan import Maps, prefix

__all__ = [
    "KalmanFilter",
    "Series",
    "condition",
    "log_normaliser",
    "log_prob",
    "sample_posterior",
    "sample_prior",
    "sort_inputs",
]


class Series(NamedTuple):
    """A state-space model at inputs in any order; values of the process are in the order of the inputs.

    :param model: the model at the inputs in increasing order.
    :param order: indices that sort the inputs.
    :param inverse: indices that restore the order of the inputs.
    """

    model: StateSpaceModel
    order: Int[Tensor, "*batch N"]
    inverse: Int[Tensor, "*batch N"]


class KalmanFilter(NamedTuple):
    """Cholesky factor of B = I + W K W, at the inputs in increasing order.

    :param W: square roots of the sites' precisions.
    :param s: squares of the factor's diagonal.
    :param p: covariances of state and process, given the sites up to n.
    :param k: gains, W p.
    :param Psi: transition matrices of the filtered states.
    """

    W: Float[Tensor, "*batch N 1 1"]
    s: Float[Tensor, "*batch N 1 1"]
    p: Float[Tensor, "*batch N S 1"]
    k: Float[Tensor, "*batch N S 1"]
    Psi: Float[Tensor, "*batch T S S"]


def sort_inputs(
    x: Float[Tensor, "*batch N"],
) -> tuple[Float[Tensor, "*batch T"], Int[Tensor, "*batch N"], Int[Tensor, "*batch N"]]:
    """Sort inputs: the steps between them in increasing order, the indices that sort, and the indices of the inverse.

    :param x: inputs in any order.

    >>> sort_inputs(torch.tensor([0.5, 0.0, 2.0]))
    (tensor([0.5000, 1.5000]), tensor([1, 0, 2]), tensor([1, 0, 2]))
    """
    x, order = x.sort(dim=-1, stable=True)
    return x.diff(dim=-1), order, order.argsort(dim=-1)


def condition(series: Series, site_mean: Float[Tensor, "*#batch N"], site_precision: Float[Tensor, "*#batch N"]) -> Posterior:
    """Compute the posterior under Gaussian sites, as :func:`pyro_lvgp.ops.gaussian_sites.condition`.

    :param series: prior, of mean zero.
    :param site_mean: μ, anything finite where the precision is 0.
    :param site_precision: 1/v, zero for a site without information.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 1.5), *orders)
    >>> posterior = condition(series, torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> posterior.mean, posterior.variance
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    model = series.model
    W, c = gaussian_sites.whitened_sites(site_mean, site_precision)
    LB = _factorise(model, _sort(W, series))
    mean, alpha = (_unsort(x[..., 0, 0], series) for x in _solve(model, LB, _sort(c, series)[..., None, None]))
    # The smoothed variance is the filtered variance less a reduction by the sites after n.
    filtered, reduction = _output(model) @ LB.p, LB.p.mT @ _precision_ahead(model, LB) @ LB.p
    variance, before = (_unsort(x[..., 0, 0], series) for x in (filtered - reduction, filtered))
    variance = gaussian_sites.bounded_variance(variance, before, site_precision)
    mean, variance, alpha = torch.broadcast_tensors(mean, variance, alpha)
    return Posterior(mean, variance, W, c, alpha, 0.5 * LB.s.log().sum((-3, -2, -1)), LB)


def log_normaliser(
    series: Series, W: Float[Tensor, "*#batch N"], c: Float[Tensor, "*#particles N"]
) -> Float[Tensor, "*particles"]:
    """Log normaliser ``log Z`` of sites, without their constants, from the filter alone.

    :param series: prior, of mean zero.
    :param W: square roots of the sites' precisions.
    :param c: W times the sites' means, with leading dimensions for several of them.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 1.5), *orders)
    >>> log_normaliser(series, torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))  # log N(2; 0, 2) + ½ log 2π
    tensor(-1.3466)
    """
    LB = _factorise(series.model, _sort(W, series))
    columns, extra = _as_columns(_sort(c, series)[..., None], LB.Psi.dim() - 3)
    _, residual = _filter(series.model, LB, columns)
    # −½ Σ (v² / s + log s) for the innovations v = s residual
    return -0.5 * _from_columns((LB.s * residual.square() + LB.s.log()).squeeze(-2), extra).sum(-1)


def log_prob(
    series: Series, f: Float[Tensor, "*particles M"], posterior: Posterior | None = None, *, jitter: float
) -> Float[Tensor, "*particles"]:
    """Log density of the last M values of the process, plus white noise.

    :param series: prior, of mean zero.
    :param f: values, with leading dimensions for several of them.
    :param posterior: returned by :func:`condition`, without sites at these values; the prior if omitted, of all values.
    :param jitter: variance of the white noise relative to that of the process.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 1.5), *orders)
    >>> log_prob(series, torch.zeros(2), jitter=1e-5)  # −log 2π
    tensor(-1.8379)
    """
    model = series.model
    variance = (model.emission[..., None, :] @ model.P @ model.emission[..., None]).squeeze(-1)
    W = (jitter * variance).rsqrt().expand(*variance.shape[:-1], f.shape[-1])
    constants = (W.log() - 0.5 * math.log(2.0 * math.pi)).sum(-1)
    if posterior is None:
        return log_normaliser(series, W, W * f) + constants
    before = (series.order.shape[-1] - f.shape[-1], 0)
    both = log_normaliser(series, posterior.W + F.pad(W, before), posterior.c + F.pad(W * f, before))
    return both - gaussian_sites.log_normaliser(posterior) + constants


def sample_prior(series: Series, noise: Float[Tensor, "*particles N S"]) -> Float[Tensor, "*particles N"]:
    """Draw from the prior of the process.

    :param series: prior, of mean zero.
    :param noise: standard normal, for each point and each entry of its state.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 0.5), *orders)
    >>> sample_prior(series, torch.tensor([[1.0], [2.0]]))  # points at this distance are independent
    tensor([1., 2.])
    """
    model = series.model
    columns, extra = _as_columns(noise, model.A.dim() - 3)
    start = _square_root(model.P)[..., None, :, :] @ columns[..., :1, :, :]
    x = _recursion(model.A, _square_root(model.Q) @ columns[..., 1:, :, :], start)
    return _unsort(_from_columns((_output(model) @ x).squeeze(-2), extra), series)


def sample_posterior(
    series: Series, posterior: Posterior, prior_draw: Float[Tensor, "*#particles N"], noise: Tensor
) -> Float[Tensor, "*particles N"]:
    """Turn joint draws of the prior into draws of q(f), as :func:`pyro_lvgp.ops.gaussian_sites.sample_posterior`.

    :param series: prior, of mean zero.
    :param posterior: returned by :func:`condition`.
    :param prior_draw: draws f of the prior.
    :param noise: ε, standard normal, of the draw's shape.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 0.5), *orders)
    >>> posterior = condition(series, torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> sample_posterior(series, posterior, torch.ones(2), torch.zeros(2))
    tensor([1.5000, 1.0000])
    """
    c = _sort(posterior.c + noise - posterior.W * prior_draw, series)
    columns, extra = _as_columns(c[..., None], posterior.LB.Psi.dim() - 3)
    change, _ = _solve(series.model, posterior.LB, columns)
    return prior_draw + _unsort(_from_columns(change.squeeze(-2), extra), series)


def _output(model: StateSpaceModel) -> Float[Tensor, "*batch 1 1 S"]:
    """Emission vector as a row, for products with columns [*batch, N, S, columns]."""
    return model.emission[..., None, None, :]


def _factorise(model: StateSpaceModel, W: Float[Tensor, "*#batch N"]) -> KalmanFilter:
    """Kalman filter; the covariances of the state before each site come from a scan, the other terms point by point."""
    W, h = W[..., None, None], _output(model).mT
    # Double precision: in float32, I + C J is singular to rounding for states that are sums and sites of high precision.
    A, Q, P, J = (x.double() for x in (model.A, model.Q, model.P[..., None, :, :], W.square() * h @ h.mT))
    later = prefix((A, Q, J[..., :-1, :, :]), P, _compose_updates, _update)
    Ph = (torch.cat([P.expand(*later.shape[:-3], -1, -1, -1), later], -3) @ h.double()).to(h)
    # Rounding may make a variance negative.
    s = 1.0 + W.square() * (h.mT @ Ph).clamp_min(0.0)
    p = Ph / s
    k = W * p
    Psi = model.A - (W * k)[..., 1:, :, :] @ (h.mT @ model.A)
    return KalmanFilter(W, s, p, k, Psi)


def _update(maps: Maps, P: Tensor) -> Tensor:
    """Covariance ``A (P⁻¹ + J)⁻¹ Aᵀ + C`` of the next state before its site."""
    A, C, J = maps
    return A @ _solve_plus_identity(P @ J, P) @ A.mT + C


def _compose_updates(first: Maps, second: Maps) -> Maps:
    """Compose two updates, each with its site before its transition: eqs. 14 to 16 of Särkkä and García-Fernández."""
    (A1, C1, J1), (A2, C2, J2) = first, second
    # (I + C₁ J₂)⁻¹ [A₁, C₁]
    A, C = _solve_plus_identity(C1 @ J2, torch.cat(torch.broadcast_tensors(A1, C1), -1)).split(A1.shape[-1], -1)
    return A2 @ A, A2 @ C @ A2.mT + C2, A1.mT @ J2 @ A + J1


def _solve_plus_identity(A: Tensor, B: Tensor) -> Tensor:
    """Solve ``(I + A) X = B`` for the product A of two covariances, so that I + A is regular."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_ex(identity + A, B, check_errors=False).result


def _filter(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """Filtered states, and the innovations divided by s, for columns c."""
    kc = LB.k @ c
    m = _recursion(LB.Psi, kc[..., 1:, :, :], kc[..., :1, :, :])
    predicted = _output(model) @ model.A @ m[..., :-1, :, :]
    return m, (c - LB.W * F.pad(predicted, (0, 0, 0, 0, 1, 0))) / LB.s


def _solve(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for ``K W B⁻¹ c`` and ``B⁻¹ c``, with columns c [*batch, N, 1, columns]."""
    m, residual = _filter(model, LB, c)
    hA = _output(model) @ model.A
    # Backward pass of the smoother, from the last state to the first.
    information = hA.mT @ (LB.W * residual)[..., 1:, :, :]
    r = _recursion(LB.Psi.mT.flip(-3), information.flip(-3), torch.zeros_like(m[..., -1:, :, :])).flip(-3)
    return _output(model) @ m + LB.p.mT @ r, residual - LB.k.mT @ r


def _precision_ahead(model: StateSpaceModel, LB: KalmanFilter) -> Tensor:
    """Precision of the state at n that the sites after n contribute."""
    hA = _output(model) @ model.A
    precision = hA.mT @ (LB.W.square() / LB.s)[..., 1:, :, :] @ hA
    start = torch.zeros_like(LB.p @ LB.p.mT)[..., :1, :, :]
    reverse = prefix(
        (LB.Psi.mT.flip(-3), precision.flip(-3)),
        start,
        lambda i, j: (j[0] @ i[0], j[0] @ i[1] @ j[0].mT + j[1]),
        lambda i, N: i[0] @ N @ i[0].mT + i[1],
    )
    return F.pad(reverse.flip(-3), (0, 0, 0, 0, 0, 1))


def _recursion(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States of the linear recursion ``x_n = A_n x_{n−1} + b_n`` from x_0 on, for columns."""
    x = prefix((A, b), start, lambda i, j: (j[0] @ i[0], j[0] @ i[1] + j[1]), lambda i, x: i[0] @ x + i[1])
    return torch.cat([start.expand(*x.shape[:-3], *start.shape[-3:]), x], -3)


def _square_root(Q: Float[Tensor, "*batch S S"]) -> Float[Tensor, "*batch S S"]:
    """Lower triangular factor of ``Q = L Lᵀ``, for small matrices that may be singular."""
    columns = []
    for j in range(Q.shape[-1]):
        pivot = Q[..., j, j, None]
        positive = pivot > 0.0
        column = torch.where(positive, Q[..., j] * torch.where(positive, pivot, 1.0).rsqrt(), 0.0)
        columns.append(column)
        Q = Q - column[..., :, None] * column[..., None, :]
    return torch.stack(columns, -1)


def _sort(x: Float[Tensor, "*#batch N"], series: Series) -> Tensor:
    x, order = torch.broadcast_tensors(x, series.order)
    return x.gather(-1, order)


def _unsort(x: Float[Tensor, "*#batch N"], series: Series) -> Tensor:
    x, inverse = torch.broadcast_tensors(x, series.inverse)
    return x.gather(-1, inverse)


def _as_columns(x: Float[Tensor, "*particles N E"], rank: int) -> tuple[Tensor, torch.Size]:
    """Move extra leading dimensions to the end: [*extra, *batch, N, E] -> [*batch, N, E, columns]."""
    extra = x.shape[: max(x.dim() - 2 - rank, 0)]
    return x.reshape(extra.numel(), *x.shape[len(extra) :]).movedim(0, -1), extra


def _from_columns(x: Float[Tensor, "*batch N columns"], extra: torch.Size) -> Float[Tensor, "*particles N"]:
    return x.movedim(-1, 0).unflatten(0, extra) if extra else x.squeeze(-1)
