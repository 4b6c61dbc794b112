"""Diagonal Gaussian with the largest bound along a path of ascent."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.guides.annealed._ascent import Ascent
from pyro_lvgp.guides.annealed._chain import curvatures
from pyro_lvgp.guides.annealed._joint_density import JointDensity
from pyro_lvgp.guides.annealed.transitions import Coordinates

_NUM_POINTS, _MAX_FAILURES = 6, 2
_MAX_EVALUATIONS = 25  # of a line search
_FLATTEST = 1e-2  # least curvature, so that a scale grows at most tenfold at a time


def best_on_path(
    density: JointDensity, loc: Float[Tensor, " P"], stddev: Float[Tensor, " P"]
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"], float]:
    r"""Return mean, standard deviations and bound of the Gaussian with the largest bound, of those along a path of ascent.

    .. math:: q_j = N\big(h_j,\, \mathrm{diag}(-\partial^2 \log p(h_j) / \partial h_i^2)^{-1}\big)

    at the iterates :math:`h_j` of L-BFGS, and the given Gaussian, which remains if no other has a larger bound.  The mode
    itself need not be the best: a hierarchical model has a density without limit where a scale is 0.  The path ends where the
    bound has not risen for two points.

    :param density: the density.
    :param loc: where the path starts.
    :param stddev: standard deviations there.

    Source: Zhang, Carpenter, Gelman and Vehtari (2022), "Pathfinder: parallel quasi-Newton variational inference", with
    curvatures by differences of scores.
    """
    first, start = stddev, loc
    largest, num_failures = density.bound(loc, stddev), 0
    for h in _ascent(density, start):
        found = _conditional_stddevs(density, h, first)
        if (bound := density.bound(h, found)) > largest:
            loc, stddev, largest, num_failures = h, found, bound, 0
        elif (num_failures := num_failures + 1) == _MAX_FAILURES:
            break
    return loc, stddev, largest


def _ascent(density: JointDensity, start: Tensor) -> Iterator[Tensor]:
    """Ascend the log density by L-BFGS; yield iterates 0, 1, 3, 7, 15 … until it has converged."""
    yield start

    def log_joint_and_score(h: Tensor) -> tuple[float, Tensor]:
        value, score = density.log_joint_and_score(h[None])
        return value, score[0]

    ascent, before = Ascent(log_joint_and_score, start), start
    for j in range(_NUM_POINTS):
        after = ascent.run(max_iter=2**j, max_eval=2 ** (j + 1) + _MAX_EVALUATIONS)
        if not after.isfinite().all() or torch.equal(after, before):
            return
        yield after
        if ascent.has_converged:
            return
        before = after


def _conditional_stddevs(density: JointDensity, loc: Tensor, scale: Tensor) -> Tensor:
    """Estimate the standard deviation of each coordinate given the others, from curvatures at distances of these."""
    for _ in range(2):  # the second time at the distances found the first time

        def scores(points: Iterator[Coordinates], scale: Tensor = scale) -> Iterator[Coordinates]:
            _, found = density.log_joint_and_score(loc + scale * torch.stack([x for (x,) in points]))
            return ((score,) for score in scale * found)

        (found,) = curvatures(scores, (loc,))
        scale = scale * found.nan_to_num(1.0).clamp_min(_FLATTEST).rsqrt()
    return scale
