"""Coordinates of a latent site: constrained, unconstrained, and whitened by a Gaussian base."""

from dataclasses import dataclass
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_lvgp.distributions.normal import DrawnNormal

Covariance = Literal["diagonal", "full"]


@dataclass(frozen=True)
class SiteCoordinates:
    """Coordinates of a latent site: ``x = transform(h)`` and ``h = loc + S^½ z``.

    If h has the Gaussian base N(loc, S), z has the base N(0, I).

    :param transform: bijection from h to the site's support; None on the real line.
    :param event_dim: number of event dimensions of h and z.
    :param covariance: whether ``scale`` is the square root of the diagonal of S, or its Cholesky factor.
    """

    transform: Any
    event_dim: int
    covariance: Covariance

    def base(self, loc: Tensor, scale: Tensor) -> TorchDistributionMixin:
        """Return the base N(loc, S), a distribution of h."""
        if self.covariance == "full":
            # The factor is valid by construction; checking it costs as much as using it.
            return DrawnNormal(loc, scale_tril=scale, validate_args=False)
        return dist.Normal(loc, scale).to_event(self.event_dim)

    def from_white(self, z: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Map z to h."""
        return loc + ((scale @ z[..., None]).squeeze(-1) if self.covariance == "full" else scale * z)

    def pull_back(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Map a gradient with respect to h to the gradient with respect to z."""
        return (scale.mT @ gradient[..., None]).squeeze(-1) if self.covariance == "full" else scale * gradient

    def to_white(self, h: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Map h to z."""
        if self.covariance == "full":
            return torch.linalg.solve_triangular(scale, (h - loc)[..., None], upper=False).squeeze(-1)
        return (h - loc) / scale

    def log_det(self, scale: Tensor) -> Tensor:
        """Compute ``log |∂h / ∂z|``, summed over the event."""
        return sum_rightmost(self.entry_log_det(scale), self.event_dim)

    def entry_log_det(self, scale: Tensor) -> Tensor:
        """Compute the terms of ``log |∂h / ∂z|``, one for each entry."""
        return (scale.diagonal(dim1=-2, dim2=-1) if self.covariance == "full" else scale).log()

    def constrain(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Map h to x; return x, and ``log |∂x / ∂h|`` summed over the event."""
        if self.transform is None:
            return h, torch.zeros_like(sum_rightmost(h, self.event_dim))
        x = self.transform(h)
        log_det = self.transform.log_abs_det_jacobian(h, x)
        return x, sum_rightmost(log_det, self.event_dim - self.transform.domain.event_dim)

    def unconstrain(self, x: Tensor) -> Tensor:
        """Map x to h."""
        return x if self.transform is None else self.transform.inv(x)
