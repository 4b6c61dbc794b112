r"""Chains under Gaussian sites: the Kalman filter as the Cholesky factor of I + W K W, and all that needs it.

What :mod:`pyro_lvgp.ops.gaussian_sites` does with matrices K, for processes that are Gauss–Markov models.  With sites
:math:`c_n = W_n f_n + \epsilon`, let P and m be of the state given the sites before n, and

.. math::

    s_n = 1 + W_n^2 h^T P_n h, \qquad p_n = P_n h / s_n, \qquad k_n = W_n p_n, \qquad
    \Psi_n = (I - W_n k_n h^T) A_{n-1} .

Then :math:`|B| = \prod_n s_n`, the filter is :math:`m'_n = \Psi_n m'_{n-1} + k_n c_n`, and what the future adds comes back by
the transposed recursion.  No covariance is ever inverted, so that inputs may coincide and sites say nothing, or all.

Source: Särkkä and García-Fernández (2021), "Temporal parallelization of Bayesian smoothers", for the covariances; Durbin and
Koopman (2012), section 4.5, and Bierman (1973), "Fixed interval smoothing with discrete measurements", for the way back.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from pyro_lvgp.ops import gaussian_sites
from pyro_lvgp.ops.gaussian_sites import Posterior
from pyro_lvgp.ops.linalg import FIRST_JITTER
from pyro_lvgp.ops.state_space.models import StateSpaceModel
from pyro_lvgp.ops.state_space.scan import Maps, prefix


class Series(NamedTuple):
    """A chain at inputs in any order; values of the process are in the order of the inputs.

    :param model: at the inputs in increasing order.
    :param order: indices that sort.
    :param inverse: indices that undo it.
    """

    model: StateSpaceModel
    order: Int[Tensor, "*batch N"]
    inverse: Int[Tensor, "*batch N"]


class KalmanFilter(NamedTuple):
    """The Cholesky factor of B = I + W K W.

    :param W: square roots of the sites' precisions, in increasing order of the inputs as all else.
    :param s: squares of the factor's diagonal.
    :param p: covariances of state and process, given the sites up to here.
    :param k: gains, W p.
    :param Psi: from one filtered state to the next.
    """

    W: Float[Tensor, "*batch N 1 1"]
    s: Float[Tensor, "*batch N 1 1"]
    p: Float[Tensor, "*batch N S 1"]
    k: Float[Tensor, "*batch N S 1"]
    Psi: Float[Tensor, "*batch T S S"]


def sort_inputs(
    x: Float[Tensor, "*batch N"],
) -> tuple[Float[Tensor, "*batch T"], Int[Tensor, "*batch N"], Int[Tensor, "*batch N"]]:
    """Steps between inputs in increasing order, the indices that sort them, and those that undo it.

    :param x: inputs in any order.

    >>> sort_inputs(torch.tensor([0.5, 0.0, 2.0]))
    (tensor([0.5000, 1.5000]), tensor([1, 0, 2]), tensor([1, 0, 2]))
    """
    x, order = x.sort(dim=-1, stable=True)
    return x.diff(dim=-1), order, order.argsort(dim=-1)


def condition(series: Series, site_mean: Float[Tensor, "*#batch N"], site_precision: Float[Tensor, "*#batch N"]) -> Posterior:
    """The posterior under sites, as of :func:`pyro_lvgp.ops.gaussian_sites.condition`.

    :param series: prior, of mean zero.
    :param site_mean: μ, anything finite where the precision is 0.
    :param site_precision: 1/v, zero where a site says nothing.

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
    # What the sites up to n leave, less what those after tell.
    filtered, told = _output(model) @ LB.p, LB.p.mT @ _precision_ahead(model, LB) @ LB.p
    variance, before = (_unsort(x[..., 0, 0], series) for x in (filtered - told, filtered))
    variance = gaussian_sites.bounded_variance(variance, before, site_precision)
    mean, variance, alpha = torch.broadcast_tensors(mean, variance, alpha)
    return Posterior(mean, variance, W, c, alpha, 0.5 * LB.s.log().sum((-3, -2, -1)), LB)


def log_normaliser(
    series: Series, W: Float[Tensor, "*#batch N"], c: Float[Tensor, "*#particles N"]
) -> Float[Tensor, "*particles"]:
    """``log Z`` of sites, without their constants, when no more of the posterior is needed: the way forward alone.

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
    series: Series, f: Float[Tensor, "*particles M"], posterior: Posterior | None = None
) -> Float[Tensor, "*particles"]:
    """Log density of the last M values of the process, with the white noise that ``safe_cholesky`` starts with.

    :param series: prior, of mean zero.
    :param f: values, with leading dimensions for several of them.
    :param posterior: what :func:`condition` returned, without sites at these values; the prior if omitted, of all values.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 1.5), *orders)
    >>> log_prob(series, torch.zeros(2))  # −log 2π
    tensor(-1.8379)
    """
    model = series.model
    variance = (model.emission[..., None, :] @ model.P @ model.emission[..., None]).squeeze(-1)
    W = (FIRST_JITTER[f.dtype] * variance).rsqrt().expand(*variance.shape[:-1], f.shape[-1])
    constants = (W.log() - 0.5 * math.log(2.0 * math.pi)).sum(-1)
    if posterior is None:
        return log_normaliser(series, W, W * f) + constants
    before = (series.order.shape[-1] - f.shape[-1], 0)
    both = log_normaliser(series, posterior.W + F.pad(W, before), posterior.c + F.pad(W * f, before))
    return both - gaussian_sites.log_normaliser(posterior) + constants


def sample_prior(series: Series, noise: Float[Tensor, "*particles N S"]) -> Float[Tensor, "*particles N"]:
    """Joint draws of the process.

    :param series: prior, of mean zero.
    :param noise: standard normal, for each point and entry of its state.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 0.5), *orders)
    >>> sample_prior(series, torch.tensor([[1.0], [2.0]]))  # points so far apart are independent
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
    """Joint draws of q(f) from those of the prior, by Matheron's rule as in
    :func:`pyro_lvgp.ops.gaussian_sites.sample_posterior`.

    :param series: prior, of mean zero.
    :param posterior: what :func:`condition` returned.
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
    """What is seen of the states, for products with columns [*batch, N, S, columns]."""
    return model.emission[..., None, None, :]


def _factorise(model: StateSpaceModel, W: Float[Tensor, "*#batch N"]) -> KalmanFilter:
    """Variances of the state before each site by a scan; all else follows point by point."""
    W, h = W[..., None, None], _output(model).mT
    # In double precision: where states are sums, I + C J of sharp sites is singular to the digits of float32.
    A, Q, P, told = (x.double() for x in (model.A, model.Q, model.P[..., None, :, :], W.square() * h @ h.mT))
    later = prefix((A, Q, told[..., :-1, :, :]), P, _compose_updates, _update)
    Ph = (torch.cat([P.expand(*later.shape[:-3], -1, -1, -1), later], -3) @ h.double()).to(h)
    # No variance is negative, whatever rounding says.
    s = 1.0 + W.square() * (h.mT @ Ph).clamp_min(0.0)
    p = Ph / s
    k = W * p
    Psi = model.A - (W * k)[..., 1:, :, :] @ (h.mT @ model.A)
    return KalmanFilter(W, s, p, k, Psi)


def _update(maps: Maps, P: Tensor) -> Tensor:
    """Covariance of the next state before its site: ``A (P⁻¹ + J)⁻¹ Aᵀ + C``."""
    A, C, J = maps
    return A @ _solve_plus_identity(P @ J, P) @ A.mT + C


def _compose_updates(first: Maps, second: Maps) -> Maps:
    """Eqs. 14 to 16 of Särkkä and García-Fernández, each site before its transition."""
    (A1, C1, J1), (A2, C2, J2) = first, second
    # (I + C₁ J₂)⁻¹ [A₁, C₁]
    A, C = _solve_plus_identity(C1 @ J2, torch.cat(torch.broadcast_tensors(A1, C1), -1)).split(A1.shape[-1], -1)
    return A2 @ A, A2 @ C @ A2.mT + C2, A1.mT @ J2 @ A + J1


def _solve_plus_identity(A: Tensor, B: Tensor) -> Tensor:
    """``(I + A)⁻¹ B`` for the product A of two covariances, which makes that regular."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_ex(identity + A, B, check_errors=False).result


def _filter(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """Filtered states and ``s⁻¹`` times the innovations, for columns c."""
    kc = LB.k @ c
    m = _recursion(LB.Psi, kc[..., 1:, :, :], kc[..., :1, :, :])
    predicted = _output(model) @ model.A @ m[..., :-1, :, :]
    return m, (c - LB.W * F.pad(predicted, (0, 0, 0, 0, 1, 0))) / LB.s


def _solve(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """``K W B⁻¹ c`` and ``B⁻¹ c`` for columns c [*batch, N, 1, columns]."""
    m, residual = _filter(model, LB, c)
    hA = _output(model) @ model.A
    # What each site tells the state before it, and so on back to the first.
    told = hA.mT @ (LB.W * residual)[..., 1:, :, :]
    r = _recursion(LB.Psi.mT.flip(-3), told.flip(-3), torch.zeros_like(m[..., -1:, :, :])).flip(-3)
    return _output(model) @ m + LB.p.mT @ r, residual - LB.k.mT @ r


def _precision_ahead(model: StateSpaceModel, LB: KalmanFilter) -> Tensor:
    """What the sites after n add to the precision of the state at n."""
    hA = _output(model) @ model.A
    told = hA.mT @ (LB.W.square() / LB.s)[..., 1:, :, :] @ hA
    none = torch.zeros_like(LB.p @ LB.p.mT)[..., :1, :, :]
    before = prefix(
        (LB.Psi.mT.flip(-3), told.flip(-3)),
        none,
        lambda i, j: (j[0] @ i[0], j[0] @ i[1] @ j[0].mT + j[1]),
        lambda i, N: i[0] @ N @ i[0].mT + i[1],
    )
    return F.pad(before.flip(-3), (0, 0, 0, 0, 0, 1))


def _recursion(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """``x_n = A_n x_{n−1} + b_n`` from x_0 on, for columns."""
    x = prefix((A, b), start, lambda i, j: (j[0] @ i[0], j[0] @ i[1] + j[1]), lambda i, x: i[0] @ x + i[1])
    return torch.cat([start.expand(*x.shape[:-3], *start.shape[-3:]), x], -3)


def _square_root(Q: Float[Tensor, "*batch S S"]) -> Float[Tensor, "*batch S S"]:
    """Lower triangular L with ``L Lᵀ = Q``, for small matrices that may be singular."""
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
    """[*extra, *batch, N, E] as [*batch, N, E, columns], for a batch of some rank, and the extra dimensions."""
    extra = x.shape[: max(x.dim() - 2 - rank, 0)]
    return x.reshape(extra.numel(), *x.shape[len(extra) :]).movedim(0, -1), extra


def _from_columns(x: Float[Tensor, "*batch N columns"], extra: torch.Size) -> Float[Tensor, "*particles N"]:
    return x.movedim(-1, 0).unflatten(0, extra) if extra else x.squeeze(-1)
