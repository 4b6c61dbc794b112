r"""State-space models under Gaussian sites: the Kalman filter as the Cholesky factor of I + W K W.

These functions compute for Gauss–Markov models what :mod:`pyro_lvgp.ops.gaussian_sites` computes from the matrix K.
With sites :math:`c_n = W_n f_n + \epsilon`, let m and P be the mean and the covariance of the state given the sites before n,
and

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
from pyro_lvgp.ops.state_space._kalman import factorise, output_row, precision_ahead, recursion, solve
from pyro_lvgp.ops.state_space._log_normaliser import log_normaliser_of_scalar
from pyro_lvgp.ops.state_space.models import StateSpaceModel

__all__ = [
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


def sort_inputs(
    x: Float[Tensor, "*batch N"],
) -> tuple[Float[Tensor, "*batch T"], Int[Tensor, "*batch N"], Int[Tensor, "*batch N"]]:
    """Sort inputs.

    :param x: inputs in any order.
    :returns: steps between the sorted inputs, indices that sort the inputs, and indices that restore their order.

    >>> sort_inputs(torch.tensor([0.5, 0.0, 2.0]))
    (tensor([0.5000, 1.5000]), tensor([1, 0, 2]), tensor([1, 0, 2]))
    """
    x, order = x.sort(dim=-1, stable=True)
    return x.diff(dim=-1), order, order.argsort(dim=-1)


def condition(series: Series, site_mean: Float[Tensor, "*#batch N"], site_precision: Float[Tensor, "*#batch N"]) -> Posterior:
    """Compute the posterior under Gaussian sites, as :func:`pyro_lvgp.ops.gaussian_sites.condition`.

    :param series: prior, of mean zero.
    :param site_mean: μ, any finite number where the precision is 0.
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
    LB = factorise(model, _sort(W, series))
    mean, alpha = (_unsort(x[..., 0, 0], series) for x in solve(model, LB, _sort(c, series)[..., None, None]))
    # The smoothed variance is the filtered variance less a reduction by the sites after n.
    filtered, reduction = output_row(model) @ LB.p, LB.p.mT @ precision_ahead(model, LB) @ LB.p
    difference, minuend = (_unsort(x[..., 0, 0], series) for x in (filtered - reduction, filtered))
    variance = gaussian_sites.bounded_variance(difference, minuend, site_precision)
    mean, variance, alpha = torch.broadcast_tensors(mean, variance, alpha)
    return Posterior(mean, variance, W, c, alpha, 0.5 * LB.s.log().sum((-3, -2, -1)), LB)


def log_normaliser(
    series: Series, W: Float[Tensor, "*#batch N"], c: Float[Tensor, "*#particles N"]
) -> Float[Tensor, "*particles"]:
    """Compute the log normaliser ``log Z`` of the sites, without their constants, by the filter alone.

    :param series: prior, of mean zero.
    :param W: square roots of the sites' precisions.
    :param c: W times the sites' means, with leading dimensions for several of them.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> steps, *orders = sort_inputs(torch.tensor([0.0, 9.0]))
    >>> series = Series(matern(steps, torch.tensor(0.1), torch.tensor(1.0), 1.5), *orders)
    >>> log_normaliser(series, torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))  # log N(2; 0, 2) + ½ log 2π
    tensor(-1.3466)
    """
    W, c = (_sort(x, series) for x in (W, c))
    P, A, Q, h = series.model
    batch = torch.broadcast_shapes(A.shape[:-3], W.shape[:-1])
    columns, extra = _as_columns(c[..., None], len(batch))
    A, Q, columns = (x.expand(*batch, *x.shape[-3:]) for x in (A, Q, columns))
    P, h, W = P.expand(*batch, *P.shape[-2:]), h.expand(*batch, -1), W.expand(*batch, -1)
    value = log_normaliser_of_scalar(P, A, Q, h, W, columns)
    return _from_columns(value[..., None, :], extra).squeeze(-1)


def log_prob(
    series: Series, f: Float[Tensor, "*particles M"], posterior: Posterior | None = None, *, jitter: float
) -> Float[Tensor, "*particles"]:
    """Compute the log density of the last M values of the process plus white noise.

    :param series: prior, of mean zero.
    :param f: values, with leading dimensions for several of them.
    :param posterior: returned by :func:`condition`, without sites at these values; None for the prior of all values.
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
    padding = (series.order.shape[-1] - f.shape[-1], 0)
    all_sites = log_normaliser(series, posterior.W + F.pad(W, padding), posterior.c + F.pad(W * f, padding))
    return all_sites - gaussian_sites.log_normaliser(posterior) + constants


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
    x = recursion(model.A, _square_root(model.Q) @ columns[..., 1:, :, :], start)
    return _unsort(_from_columns((output_row(model) @ x).squeeze(-2), extra), series)


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
    change, _ = solve(series.model, posterior.LB, columns)
    return prior_draw + _unsort(_from_columns(change.squeeze(-2), extra), series)


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
