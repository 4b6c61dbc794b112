"""First base of annealed chains: the Gaussian with the largest bound along a path of ascent."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides.annealed._chain import curvatures
from pyro_lvgp.guides.annealed._targets import Target
from pyro_lvgp.guides.annealed.transitions import Coordinates

_NUM_POINTS, _NUM_DRAWS, _MAX_FAILURES = 8, 16, 2
_FLATTEST = 1e-2  # least curvature, so that a scale grows at most tenfold at a time


def best_gaussian(target: Target, loc: Coordinates, scale: Coordinates) -> tuple[Coordinates, Coordinates]:
    r"""Return loc and scale of the diagonal Gaussian with the largest bound, of those at points of a path of ascent.

    .. math:: q_j = N\big(h_j,\, \mathrm{diag}(-\partial^2 \log p(h_j) / \partial h_i^2)^{-1}\big)

    at the iterates :math:`h_j` of L-BFGS, and the given Gaussian, which remains if no other has a larger bound.  The mode
    itself need not be the best: a hierarchical model has a density without limit where a scale is 0.  The path ends where the
    bound has not risen for two points.

    :param target: density of the unconstrained coordinates h.
    :param loc: where the path starts.
    :param scale: standard deviations there.

    Source: Zhang, Carpenter, Gelman and Vehtari (2022), "Pathfinder: parallel quasi-Newton variational inference", with
    diagonal Gaussians.
    """
    best, largest, num_failures = (loc, scale), _bound(target, loc, scale), 0
    for point in _ascent(target, loc):
        found = _conditional_stddevs(target, point, scale)
        if (bound := _bound(target, point, found)) > largest:
            best, largest, num_failures = (point, found), bound, 0
        elif (num_failures := num_failures + 1) == _MAX_FAILURES:
            break
    return best


def _ascent(target: Target, start: Coordinates) -> Iterator[Coordinates]:
    """Ascend the log density by L-BFGS; yield iterates 0, 1, 3, 7, 15 … until it has converged."""
    yield start
    h = tuple(x.clone().requires_grad_() for x in start)
    optimizer = torch.optim.LBFGS(h, history_size=10, line_search_fn="strong_wolfe")

    def minus_log_joint() -> Tensor:
        at = tuple(x.detach() for x in h)
        value = _log_joint(target, at)
        slopes = target.score(at) if math.isfinite(value) else map(torch.zeros_like, at)
        for x, slope in zip(h, slopes, strict=True):
            x.grad = -slope.nan_to_num(0.0)
        # The line search interpolates between values, so that they must be finite.
        return h[0].new_tensor(-max(value, -_LARGE))

    for j in range(_NUM_POINTS):
        before = tuple(x.detach().clone() for x in h)
        optimizer.param_groups[0].update(max_iter=2**j, max_eval=2 ** (j + 1))
        with torch.enable_grad():
            optimizer.step(minus_log_joint)
        after = tuple(x.detach().clone() for x in h)
        if not all(x.isfinite().all() for x in after) or all(map(torch.equal, after, before)):
            return
        yield after


def _conditional_stddevs(target: Target, loc: Coordinates, scale: Coordinates) -> Coordinates:
    """Estimate the standard deviation of each coordinate given the others, from curvatures at distances of these."""
    for _ in range(2):  # the second time at the distances found the first time

        def score(z: Coordinates, scale: Coordinates = scale) -> Coordinates:
            h = tuple(m + s * x for m, s, x in zip(loc, scale, z, strict=True))
            return tuple(s * g for s, g in zip(scale, target.score(h), strict=True))

        try:
            found = curvatures(score, loc)
        except (ValueError, torch.linalg.LinAlgError):  # of a model that is not defined there
            return scale
        scale = tuple(s * c.nan_to_num(1.0).clamp_min(_FLATTEST).rsqrt() for s, c in zip(scale, found, strict=True))
    return scale


def _bound(target: Target, loc: Coordinates, scale: Coordinates) -> float:
    """Estimate the bound of a diagonal Gaussian, up to a constant, from the same random numbers at each call."""
    with seeded(0):
        draws = (tuple(m + s * torch.randn_like(m) for m, s in zip(loc, scale, strict=True)) for _ in range(_NUM_DRAWS))
        expected = sum(_log_joint(target, h) for h in draws) / _NUM_DRAWS
    return expected + sum(s.log().sum().item() for s in scale)


def _log_joint(target: Target, h: Coordinates) -> float:
    """Return the log density at a point; −∞ where the model is not defined."""
    try:
        value = target.log_joint(h).item()
    except (ValueError, torch.linalg.LinAlgError):  # invalid parameters of a distribution, or a singular covariance
        return -math.inf
    return value if math.isfinite(value) else -math.inf


_LARGE = 1e30
