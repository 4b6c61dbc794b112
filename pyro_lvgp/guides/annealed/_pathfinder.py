"""First base of annealed chains: the Gaussian with the largest bound along a path of ascent."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pyro.poutine import Trace
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides.annealed._chain import curvatures
from pyro_lvgp.guides.annealed._targets import Target, TracedTarget
from pyro_lvgp.guides.annealed._whitened import Whitened
from pyro_lvgp.guides.annealed.transitions import Coordinates
from pyro_lvgp.guides.mean_field import MeanFieldGuide

_NUM_POINTS, _NUM_DRAWS, _MAX_FAILURES = 8, 16, 2
_MAX_EVALUATIONS = 25  # of a line search
_FLATTEST = 1e-2  # least curvature, so that a scale grows at most tenfold at a time
_LEAST_EIGENVALUE = 1e-6  # of a Hessian whose diagonal is about 1
_LARGE = 1e30
_TOLERANCE = 0.5  # of the fall of the log density, relative to that of a Gaussian


class FirstBase(NamedTuple):
    """Gaussian of all coordinates.

    :param loc: mean of each site.
    :param stddev: standard deviations of each site, for a diagonal covariance.
    :param factor: Cholesky factor of a covariance of all coordinates with a larger bound; None if that is diagonal.
    :param is_gaussian: whether the density is about that of this Gaussian, up to a factor.
    """

    loc: Coordinates
    stddev: Coordinates
    factor: Float[Tensor, "P P"] | None
    is_gaussian: bool


def first_base(
    guide: MeanFieldGuide,
    model: Callable[..., Any],
    names: Sequence[str],
    args: tuple,
    kwargs: dict,
    *,
    correlated: bool,
) -> FirstBase:
    """Return the Gaussian of all latent sites with the largest bound, on a path of ascent from the location of a guide.

    :param guide: the guide, with all rows.
    :param model: its model.
    :param names: names of all latent sites, in the order of the results.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param correlated: as for :func:`best_gaussian`.
    """
    gaussians = [guide.loc_and_stddev(name, args) for name in names]
    locs, stddevs = (tuple(x.detach() for x in column) for column in zip(*gaussians, strict=True))
    # Coordinates that a base N(0, 1) whitens are unconstrained ones.
    coordinates = [replace(guide.coordinates[name], covariance="diagonal") for name in names]
    units = tuple((torch.zeros_like(loc), torch.ones_like(loc)) for loc in locs)
    sites = Whitened(tuple(zip(names, coordinates, strict=True)))
    target = TracedTarget(
        model, sites, units, Trace(), marginalize=False, local_plate=None, differentiable=False, args=args, kwargs=kwargs
    )
    return best_gaussian(target, locs, stddevs, correlated=correlated)


def best_gaussian(target: Target, loc: Coordinates, scale: Coordinates, *, correlated: bool) -> FirstBase:
    r"""Return the Gaussian with the largest bound, of those at points of a path of ascent.

    .. math:: q_j = N\big(h_j,\, \mathrm{diag}(-\partial^2 \log p(h_j) / \partial h_i^2)^{-1}\big)

    at the iterates :math:`h_j` of L-BFGS, and the given Gaussian, which remains if no other has a larger bound.  The mode
    itself need not be the best: a hierarchical model has a density without limit where a scale is 0.  The path ends where the
    bound has not risen for two points.

    :param target: density of the unconstrained coordinates h.
    :param loc: where the path starts.
    :param scale: standard deviations there.
    :param correlated: take the covariance :math:`(-\nabla^2 \log p)^{-1}` at the best point, if its bound is larger.

    Source: Zhang, Carpenter, Gelman and Vehtari (2022), "Pathfinder: parallel quasi-Newton variational inference", with
    curvatures by differences of scores.
    """
    density = _Density(target, loc)
    point = density.join(loc)
    first = stddev = density.join(scale)
    largest, num_failures = density.bound(point, stddev), 0
    for h in _ascent(density, point):
        found = density.conditional_stddevs(h, first)
        if (bound := density.bound(h, found)) > largest:
            point, stddev, largest, num_failures = h, found, bound, 0
        elif (num_failures := num_failures + 1) == _MAX_FAILURES:
            break
    factor = density.covariance_factor(point, stddev) if correlated else None
    if factor is not None and (bound := density.bound(point, factor)) > largest:
        largest = bound
    else:
        factor = None
    is_gaussian = density.is_gaussian_at(point, stddev if factor is None else factor, largest)
    return FirstBase(density.split(point), density.split(stddev), factor, is_gaussian)


def _ascent(density: "_Density", start: Tensor) -> Iterator[Tensor]:
    """Ascend the log density by L-BFGS; yield iterates 0, 1, 3, 7, 15 … until it has converged."""
    yield start
    h = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([h], history_size=10, line_search_fn="strong_wolfe")

    def minus_log_joint() -> Tensor:
        value, gradient = density.log_joint(h.detach()), density.score(h.detach())
        h.grad = torch.zeros_like(h) if gradient is None else -gradient.nan_to_num(0.0)
        # The line search interpolates between values, so that they must be finite.
        return h.new_tensor(-max(value, -_LARGE))

    for j in range(_NUM_POINTS):
        before = h.detach().clone()
        optimizer.param_groups[0].update(max_iter=2**j, max_eval=2 ** (j + 1) + _MAX_EVALUATIONS)
        with torch.enable_grad():
            optimizer.step(minus_log_joint)
        after = h.detach().clone()
        if not after.isfinite().all() or torch.equal(after, before):
            return
        yield after


class _Density:
    """Density of one vector of all coordinates, and the bounds of Gaussians.

    :param target: density of the coordinates of each site.
    :param like: coordinates of these shapes.
    """

    def __init__(self, target: Target, like: Coordinates):
        self._target, self._shapes = target, [x.shape for x in like]

    def join(self, h: Coordinates) -> Float[Tensor, " P"]:
        """Concatenate the coordinates of all sites."""
        return torch.cat([x.reshape(-1) for x in h])

    def split(self, h: Float[Tensor, " P"]) -> Coordinates:
        """Return the coordinates of each site."""
        parts = h.split([shape.numel() for shape in self._shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True))

    def log_joint(self, h: Tensor) -> float:
        """Compute the log density; −∞ where the model is not defined."""
        try:
            value = self._target.log_joint(self.split(h)).item()
        except _UNDEFINED:
            return -math.inf
        return value if math.isfinite(value) else -math.inf

    def score(self, h: Tensor) -> Tensor | None:
        """Compute the gradient of the log density; None where the model is not defined."""
        try:
            return self.join(self._target.score(self.split(h)))
        except _UNDEFINED:
            return None

    def bound(self, loc: Tensor, factor: Tensor) -> float:
        """Estimate the bound of N(loc, L Lᵀ), up to a constant, from the same random numbers at each call.

        :param loc: mean.
        :param factor: L [P, P], or its diagonal [P] if the other entries are 0.
        """
        with seeded(0):
            noise = [torch.randn_like(loc) for _ in range(_NUM_DRAWS)]
        expected = sum(self.log_joint(loc + (factor * x if factor.dim() == 1 else factor @ x)) for x in noise) / _NUM_DRAWS
        return expected + _log_det(factor)

    def is_gaussian_at(self, loc: Tensor, factor: Tensor, bound: float) -> bool:
        """Return whether the density is about N(loc, L Lᵀ), up to a factor.

        Then a Newton step is shorter than a standard deviation of each coordinate, and the log density of a draw is on average
        P / 2 less than that at the mean.

        :param loc: mean.
        :param factor: as for :meth:`bound`.
        :param bound: bound of this Gaussian.
        """
        gradient, half = self.score(loc), 0.5 * len(loc)
        if gradient is None:
            return False
        white = factor * gradient if factor.dim() == 1 else factor.mT @ gradient
        fall = self.log_joint(loc) - (bound - _log_det(factor))
        return bool(white.square().mean() < 1.0) and abs(fall - half) < max(1.0, _TOLERANCE * half)

    def conditional_stddevs(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Estimate the standard deviation of each coordinate given the others, from curvatures at distances of these."""
        for _ in range(2):  # the second time at the distances found the first time

            def score(z: Coordinates, scale: Tensor = scale) -> Coordinates:
                gradient = self.score(loc + scale * z[0])
                return (torch.full_like(loc, math.nan) if gradient is None else scale * gradient,)

            (found,) = curvatures(score, (loc,))
            scale = scale * found.nan_to_num(1.0).clamp_min(_FLATTEST).rsqrt()
        return scale

    def covariance_factor(self, loc: Tensor, scale: Tensor) -> Float[Tensor, "P P"] | None:
        """Return the Cholesky factor of minus the inverse Hessian, from differences of scores at distances ``scale``.

        Negative eigenvalues, of a saddle, change their sign.  None where the model is not defined.
        """
        columns = []
        for step in scale.diag():
            above, below = self.score(loc + step), self.score(loc - step)
            if above is None or below is None:
                return None
            columns.append(0.5 * scale * (below - above))
        hessian = torch.stack(columns).double()
        if not hessian.isfinite().all():
            return None
        values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
        root = vectors * values.abs().clamp_min(_LEAST_EIGENVALUE).rsqrt()
        factor = torch.linalg.qr(root.mT).R.mT  # L Lᵀ = root rootᵀ
        return scale[:, None] * (factor * factor.diagonal().sign()).to(scale)


def _log_det(factor: Tensor) -> float:
    """Compute log |L| of a triangular matrix, or of a diagonal."""
    return (factor if factor.dim() == 1 else factor.diagonal()).log().sum().item()


_UNDEFINED = (ValueError, torch.linalg.LinAlgError)  # invalid parameters of a distribution, or a singular covariance
