"""Factors of a guide's posterior that are products of a prior and of Gaussian sites, as the updates of sites take them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.distributions.sparse_gaussian_process import SparseProcess, inducing_posterior
from pyro_lvgp.guides._inducing_sites import PointSites, aggregate, product
from pyro_lvgp.ops import site_updates
from pyro_lvgp.ops.site_updates import NaturalSites
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["Factor", "InducingFactor", "PointFactor", "expand_to"]

_LEAST_RELATIVE_PRECISION = 1e-6  # of a site relative to its prior, so that the mean of the site is finite


class Factor(ABC):
    """Factor of q at a site of latents of points: the product of its prior and of Gaussian sites.

    :param sites: Gaussian sites to start from.
    :param has_data: mask of the latents of points with data, in the shape of a draw.
    :param event_dim: number of event dimensions of a draw.
    :param latent_dim: dimension of the latents of a draw, counted from the right; None if each point has one latent.
    :param is_updated: whether the Gaussian sites are updated.
    """

    sites: Any
    has_data: Bool[Tensor, "*shape"]
    event_dim: int
    latent_dim: int | None
    is_updated: bool

    @property
    def num_latents(self) -> int:
        return 1 if self.latent_dim is None else self.has_data.shape[self.latent_dim]

    @property
    @abstractmethod
    def least_precision(self) -> Tensor:
        """Least curvature of the log likelihood of a point that a step takes."""

    @abstractmethod
    def without_information(self) -> Any:
        """Return sites that leave the prior as it is."""

    @abstractmethod
    def multiply(self, sites: Any) -> Any:
        """Multiply the prior by Gaussian sites; the product has the mean and the variance of each latent of a point."""

    @abstractmethod
    def kl(self, q: Any) -> Float[Tensor, "*series"]:
        """Compute the KL divergence of a product from the prior, summed over latents and points."""

    @abstractmethod
    def step(self, sites: Any, mean: Tensor, gradient: Tensor, curvature: Tensor, step: Tensor) -> Any:
        """Move sites along the natural gradient of the bound, as :func:`~pyro_lvgp.ops.site_updates.natural_gradient_step`."""


class PointFactor(Factor):
    """Factor with one Gaussian site for each latent of a point.

    :param prior: prior of the site, as the model samples it.
    :param sites: Gaussian sites to start from, in the shape of the prior; zero where there are no data.
    :param has_data: mask of the sites with data.
    :param multiply: maps means and precisions of Gaussian sites to the product.
    :param is_updated: whether the Gaussian sites are updated.
    """

    def __init__(
        self,
        prior: Any,
        sites: NaturalSites,
        has_data: Bool[Tensor, "*shape"],
        multiply: Callable[[Tensor, Tensor], Any],
        is_updated: bool,
    ):
        self.prior, self.sites, self.has_data, self.is_updated = prior, sites, has_data, is_updated
        self._multiply = multiply
        self.event_dim = prior.event_dim
        by_point = isinstance(without_independent(prior), Normal)
        self.latent_dim = {(True, 1): -1, (False, 2): -2}.get((by_point, prior.event_dim))

    @property
    def least_precision(self) -> Tensor:
        """Least precision of Gaussian sites; zero where there are no data."""
        variance = self.prior.variance
        known = variance <= torch.finfo(variance.dtype).tiny ** 0.5  # as of a linear kernel at the origin
        return torch.where(self.has_data, _LEAST_RELATIVE_PRECISION / torch.where(known, 1.0, variance), 0.0)

    def without_information(self) -> NaturalSites:
        return NaturalSites(torch.zeros_like(self.least_precision), self.least_precision)

    def multiply(self, sites: NaturalSites) -> Any:
        return self._multiply(sites.mean, sites.precision)

    def kl(self, q: Any) -> Float[Tensor, "*series"]:
        q = without_independent(q)
        kl = sum_rightmost(kl_divergence(q, without_independent(self.prior)), self.event_dim - len(q.event_shape))
        return kl.sum(-1) if kl.dim() else kl  # the rightmost plate is that of the points

    def step(self, sites: NaturalSites, mean: Tensor, gradient: Tensor, curvature: Tensor, step: Tensor) -> NaturalSites:
        return site_updates.natural_gradient_step(sites, mean, gradient, curvature, step)


class _InducingPosterior(NamedTuple):
    """Gaussian of the whitened inducing values, and means and variances of the latents of points.

    :param u: distribution of the whitened inducing values.
    :param mean: means of the latents.
    :param variance: variances of the latents.
    """

    u: MultivariateNormal
    mean: Float[Tensor, "*series N Q"]
    variance: Float[Tensor, "*series N Q"]


class InducingFactor(Factor):
    r"""Factor of processes given their inducing values, whose Gaussian sites are on the inducing values.

    The sites :math:`\exp(h^T v - \tfrac12 v^T H v)` on the whitened inducing values v have the natural parameters h and H.
    With the conditional means :math:`A^T v` of the latents of points, expected gradients g and curvatures C of the log
    likelihood, and means m, a step is

    .. math::

        H \leftarrow (1 - \rho) H + \rho A C A^T, \qquad h \leftarrow (1 - \rho) h + \rho A (g + C m)

    :param process: the processes.
    :param sites: Gaussian sites to start from.
    :param memory: Gaussian sites of other data, which count to the prior; None without.
    :param has_data: mask of the points with data.

    Source: Khan and Lin (2017), "Conjugate-computation variational inference"; Adam et al. (2021), "Dual parameterization of
    sparse variational Gaussian processes".
    """

    event_dim, latent_dim, is_updated = 1, -1, True

    def __init__(self, process: SparseProcess, sites: Sites, memory: Sites | None, has_data: Bool[Tensor, "*series N"]):
        # Rounding in single precision makes I + H indefinite where sites are precise and inducing points close.
        self.process, self.sites = process, Sites(*(part.double() for part in sites))
        self._memory = None if memory is None else Sites(*(part.double() for part in memory))
        self.has_data = has_data[..., None].expand(*has_data.shape, process.num_latents)
        self._prior = self._normal(self.without_information())

    @property
    def least_precision(self) -> Tensor:
        return self.process.A.new_zeros(())

    def without_information(self) -> Sites:
        return Sites(*map(torch.zeros_like, self.sites))

    def _normal(self, sites: Sites) -> MultivariateNormal:
        loc, scale_tril = inducing_posterior(product(self._memory, sites))
        return MultivariateNormal(loc, scale_tril=scale_tril, validate_args=False)

    def multiply(self, sites: Sites) -> _InducingPosterior:
        u = self._normal(sites)
        mean, variance = self.process.marginals(u.loc.to(self.process.A), u.scale_tril.to(self.process.A))
        return _InducingPosterior(u, mean.mT, variance.mT)

    def kl(self, q: _InducingPosterior) -> Float[Tensor, "*series"]:
        return kl_divergence(q.u, self._prior).sum(-1).to(q.mean)

    def step(self, sites: Sites, mean: Tensor, gradient: Tensor, curvature: Tensor, step: Tensor) -> Sites:
        precision, information = (x.mT.unsqueeze(-3).double() for x in (curvature, gradient + curvature * mean))
        H, h = aggregate(PointSites(self.process.A.double(), precision, information))
        return Sites(
            sites.precision + step[..., None] * (H - sites.precision), sites.information + step * (h - sites.information)
        )


def expand_to(prior: Any, plates: Mapping[int, int]) -> Any:
    """Expand a prior to plates of these dimensions and sizes."""
    batch = [1] * max([0, *(-dim - len(prior.batch_shape) for dim in plates)]) + list(prior.batch_shape)
    for dim, size in plates.items():
        batch[dim] = size
    return prior.expand(batch)
