"""Density of all coordinates of all sites as one vector, at several points at once."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.seeding import normal_draws
from pyro_lvgp.guides.annealed.transitions import Coordinates
from pyro_lvgp.infer._sites import max_plate_nesting

_NUM_DRAWS = 32
_MAX_POINTS, _MAX_ENTRIES = 64, 1_000_000  # at once, and of all their sites
_UNDEFINED = (ValueError, torch.linalg.LinAlgError)  # invalid parameters of a distribution, or a singular covariance


@runtime_checkable
class LogJoint(Protocol):
    """Log density of the coordinates of each site, summed over draws."""

    def log_joint(self, z: Coordinates) -> Tensor:
        """Compute log p, without gradients."""

    def log_joint_and_score(self, z: Coordinates) -> tuple[Tensor, Coordinates]:
        """Compute log p and ∇ log p."""


@dataclass(frozen=True)
class JointDensity:
    """Density of one vector h of all coordinates, and the bounds of Gaussians.

    :param target: density of the coordinates of each site.
    :param shapes: shape of the coordinates of each site, those of plates and those of an event.
    :param event_dims: number of dimensions of an event of each site.
    :param max_plate_nesting: number of dimensions of plates, left of which the target broadcasts.
    :param max_points: number of points that the target computes at once; with 1 it need not broadcast.
    """

    target: LogJoint
    shapes: tuple[torch.Size, ...]
    event_dims: tuple[int, ...]
    max_plate_nesting: int
    max_points: int

    @classmethod
    def of_target(
        cls,
        target: LogJoint,
        gaussians: Sequence[tuple[Tensor, Tensor]],
        event_dims: Sequence[int],
        sites: Sequence[dict[str, Any]],
    ) -> "JointDensity":
        """Return the density of a target, at as many points at once as memory and the model allow.

        :param target: density of the coordinates of each site.
        :param gaussians: mean and standard deviations of each site, at draws of which the target is tried at two points.
        :param event_dims: number of dimensions of an event of each site.
        :param sites: sample sites of a trace of the model.
        """
        loc, stddev = zip(*gaussians, strict=True)
        num_entries = sum(site["value"].numel() for site in sites)
        density = cls(
            target,
            tuple(x.shape for x in loc),
            tuple(event_dims),
            max_plate_nesting(sites),
            max_points=min(_MAX_POINTS, max(_MAX_ENTRIES // num_entries, 1)),
        )
        mean, scale = density.join(loc), density.join(stddev)
        if density.max_points > 1 and not density.broadcasts(mean + scale * antithetic_noise(mean, 2, seed=0)):
            return replace(density, max_points=1)
        return density

    def join(self, h: Coordinates) -> Float[Tensor, " P"]:
        """Concatenate the coordinates of all sites."""
        return torch.cat([x.reshape(-1) for x in h])

    def split(self, h: Float[Tensor, " P"]) -> Coordinates:
        """Return the coordinates of each site."""
        parts = h.split([shape.numel() for shape in self.shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def broadcasts(self, points: Float[Tensor, "2 P"]) -> bool:
        """Return whether the target has the same log density and scores for two points at once as one by one."""
        try:
            value, scores = self.target.log_joint_and_score(self._split_points(points))
            apart = [self.target.log_joint_and_score(self.split(h)) for h in points]
        except Exception:  # whatever the model raises for more dimensions: one point has none
            return False
        expected = torch.stack([self.join(score) for _, score in apart])
        atol = 1e-5 * expected.nan_to_num(0.0).abs().max().item()
        return torch.allclose(value, apart[0][0] + apart[1][0], rtol=1e-4, equal_nan=True) and torch.allclose(
            self._join_points(scores), expected, rtol=1e-3, atol=atol, equal_nan=True
        )

    def log_joint(self, points: Float[Tensor, "draws P"]) -> float:
        """Compute the log density, summed over points; −∞ where the model is not defined."""
        try:
            value = sum(self.target.log_joint(z).item() for z in self.chunks(points))
        except _UNDEFINED:
            return -math.inf
        return value if math.isfinite(value) else -math.inf

    def log_joint_and_score(self, points: Float[Tensor, "draws P"]) -> tuple[float, Float[Tensor, "draws P"]]:
        """Compute the log density, summed over points, and its gradients; −∞ and NaN where the model is not defined."""
        total, scores = 0.0, []
        try:
            for z in self.chunks(points):
                value, score = self.target.log_joint_and_score(z)
                total += value.item()
                scores.append(self._join_points(score))
        except _UNDEFINED:
            return -math.inf, torch.full_like(points, math.nan)
        return total if math.isfinite(total) else -math.inf, torch.cat(scores)

    def bound(self, loc: Float[Tensor, " P"], factor: Tensor) -> float:
        """Estimate the bound of N(loc, L Lᵀ), up to a constant, from the same random numbers at each call.

        :param loc: mean.
        :param factor: L [P, P], or its diagonal [P] if the other entries are 0.
        """
        noise = antithetic_noise(loc, _NUM_DRAWS, seed=0)
        diagonal = factor if factor.dim() == 1 else factor.diagonal()
        points = loc + (factor * noise if factor.dim() == 1 else noise @ factor.mT)
        return self.log_joint(points) / _NUM_DRAWS + diagonal.log().sum().item()

    def chunks(self, points: Float[Tensor, "draws P"]) -> Iterator[Coordinates]:
        """Yield the coordinates of each site for as many points as are computed at once."""
        if self.max_points == 1:
            yield from map(self.split, points)
        else:
            yield from map(self._split_points, points.split(self.max_points))

    def _split_points(self, points: Float[Tensor, "draws P"]) -> Coordinates:
        """Return the coordinates of each site, with the dimension of draws left of those of all plates."""
        result = []
        parts = points.split([shape.numel() for shape in self.shapes], -1)
        for part, shape, event_dim in zip(parts, self.shapes, self.event_dims, strict=True):
            ones = (1,) * (self.max_plate_nesting + event_dim - len(shape))
            result.append(part.reshape(-1, *ones, *shape))
        return tuple(result)

    def _join_points(self, h: Coordinates) -> Float[Tensor, "draws P"]:
        """Concatenate the coordinates of all sites, draw by draw."""
        return torch.cat([x.reshape(-1, shape.numel()) for x, shape in zip(h, self.shapes, strict=True)], -1)


def antithetic_noise(like: Float[Tensor, " P"], num_draws: int, *, seed: int) -> Float[Tensor, "draws P"]:
    """Draw standard normal vectors and their opposites, scaled to have mean 0 and variance 1 for each coordinate.

    :param like: a vector of the shape and dtype, and on the device, of one draw.
    :param num_draws: an even number.
    :param seed: seed of the draws.
    """
    half = normal_draws(num_draws // 2, len(like), seed=seed, like=like)
    half = half / half.square().mean(0).sqrt()
    return torch.cat([half, -half])
