"""Whitened coordinates of all annealed sites, in which the base is N(0, I)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_lvgp.guides._coordinates import SiteCoordinates
from pyro_lvgp.guides.annealed.transitions import Coordinates

Bases = tuple[tuple[Tensor, Tensor], ...]  # loc and scale of each site


@dataclass(frozen=True)
class Preconditioner:
    """Affine map h = m + L w of all coordinates of all sites.

    :param loc: the point m that w = 0 maps to.
    :param factor: lower-triangular L with a positive diagonal, or its diagonal if the other entries are 0.
    """

    loc: Float[Tensor, " P"]
    factor: Tensor

    def __call__(self, w: Float[Tensor, "draws P"]) -> Float[Tensor, "draws P"]:
        """Map w to h."""
        return self.loc + (self.factor * w if self.factor.dim() == 1 else w @ self.factor.mT)

    def inverse(self, h: Float[Tensor, "draws P"]) -> Float[Tensor, "draws P"]:
        """Map h to w."""
        if self.factor.dim() == 1:
            return (h - self.loc) / self.factor
        return torch.linalg.solve_triangular(self.factor, (h - self.loc).mT, upper=False).mT

    def entry_log_det(self) -> Float[Tensor, " P"]:
        """Compute the terms of ``log |∂h / ∂w|``, one for each coordinate."""
        return (self.factor if self.factor.dim() == 1 else self.factor.diagonal()).log()


@dataclass(frozen=True)
class Whitened:
    """Whitened coordinates z of the annealed sites: those of the base of each site, and a preconditioner of all.

    :param sites: names and coordinates of the sites.
    :param preconditioner: map from the coordinates of the bases to unconstrained values; None for the identity.
    """

    sites: tuple[tuple[str, SiteCoordinates], ...]
    preconditioner: Preconditioner | None = None

    def from_white(self, z: Coordinates, bases: Bases) -> Coordinates:
        """Map z to unconstrained values."""
        w = tuple(site.from_white(x, *base) for (_, site), x, base in zip(self.sites, z, bases, strict=True))
        return w if self.preconditioner is None else self._split(self.preconditioner(self._join(w, bases)), w, bases)

    def to_white(self, h: Coordinates, bases: Bases) -> Coordinates:
        """Map unconstrained values to z."""
        if self.preconditioner is not None:
            h = self._split(self.preconditioner.inverse(self._join(h, bases)), h, bases)
        return tuple(site.to_white(x, *base) for (_, site), x, base in zip(self.sites, h, bases, strict=True))

    def log_dets(self, bases: Bases) -> Coordinates:
        """Compute ``log |∂h / ∂z|`` of each site, summed over the event."""
        found = tuple(site.log_det(scale) for (_, site), (_, scale) in zip(self.sites, bases, strict=True))
        if self.preconditioner is None:
            return found
        locs = tuple(loc for loc, _ in bases)
        terms = self._split(self.preconditioner.entry_log_det(), locs, bases)
        return tuple(x + sum_rightmost(y, site.event_dim) for x, y, (_, site) in zip(found, terms, self.sites, strict=True))

    def values(self, z: Coordinates, bases: Bases) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the values of the sites at z, and the log determinants of their constraints."""
        values, log_dets = {}, {}
        for (name, site), h in zip(self.sites, self.from_white(z, bases), strict=True):
            values[name], log_dets[name] = site.constrain(h)
        return values, log_dets

    def _join(self, x: Coordinates, bases: Bases) -> Float[Tensor, "draws P"]:
        """Concatenate the coordinates of all sites, draw by draw."""
        return torch.cat([part.reshape(-1, loc.numel()) for part, (loc, _) in zip(x, bases, strict=True)], -1)

    def _split(self, flat: Float[Tensor, "*draws P"], like: Coordinates, bases: Bases) -> Coordinates:
        """Return the coordinates of each site."""
        parts = flat.split([loc.numel() for loc, _ in bases], -1)
        return tuple(part.reshape(x.shape) for part, x in zip(parts, like, strict=True))


def zeros_with_gradient(whitened: Whitened, bases: Bases, z: Coordinates, score: Coordinates) -> Coordinates:
    """Return zeros with the gradient of the base's own bound with respect to its locs and scales, entry by entry.

    At w = loc + S^½ z the pathwise gradient of ``log p(y, w)`` is that of w times the score; the entropy has the gradient of
    ``log |S^½|``.
    """
    fixed = tuple((loc.detach(), scale.detach()) for loc, scale in bases)
    h_white = whitened.to_white(whitened.from_white(z, bases), fixed)
    sites = zip(whitened.sites, bases, h_white, score, strict=True)
    own = [s.detach() * x + site.entry_log_det(scale) for (_, site), (_, scale), x, s in sites]
    return tuple(x - x.detach() for x in own)
