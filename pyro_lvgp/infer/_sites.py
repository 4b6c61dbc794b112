"""Sample sites over many draws: the layout of their dimensions, and the log density of each entry."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Shaped
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_lvgp.distributions.likelihood_predictive import ObservedRows
from pyro_lvgp.distributions.normal import without_independent

Kind = Literal["latent", "deterministic", "observed"]


@dataclass(frozen=True, eq=False)
class SampledSite:
    """Sample site of the model, over S draws.

    :param kind: ``"latent"``, ``"deterministic"`` or ``"observed"``.
    :param value: ``[S, *batch, *event]``; for an observed site ``[*batch, *event]``, the data, the same for every draw.
    :param plates: for each batch dimension the name of its plate, or None if it belongs to no plate.
    :param event_dim: number of event dimensions, the rightmost ones of ``value``.
    :param log_likelihood: ``[S, *entry]`` log density of every entry of an observed site.  ``Independent`` and masks are
        removed from its distribution, so that the entries of ``Normal(...).mask(...).to_event(1)`` are numbers, not rows.
    :param is_observed: ``[*entry]``; False where an entry is masked or NaN.
    :param prediction: ``[S, *batch, *event]`` draws from the likelihood of an observed site.
    :param log_prior: ``[S, *batch]`` log density of a latent site in the model given the sites on which it depends, without
        the scale of a subsample, and zero where masked.
    :param prior: ``[S, *batch, *event]`` draws from the model alone, of observed sites too.
    :param is_discrete: whether an observed site has integer values by its distribution, whatever the dtype of its tensors.
    """

    kind: Kind
    value: Shaped[Tensor, "..."]
    plates: tuple[str | None, ...]
    event_dim: int
    log_likelihood: Shaped[Tensor, "S ..."] | None = None
    is_observed: Bool[Tensor, "..."] | None = None
    prediction: Shaped[Tensor, "S ..."] | None = None
    log_prior: Shaped[Tensor, "S ..."] | None = None
    prior: Shaped[Tensor, "S ..."] | None = None
    is_discrete: bool = False


@dataclass(frozen=True, eq=False)
class SiteLayout:
    """Layout of a site in one draw, without a plate over draws."""

    kind: Kind
    shape: torch.Size
    entry_shape: torch.Size
    plates: tuple[str | None, ...]
    event_dim: int
    is_discrete: bool

    @classmethod
    def of(cls, site: Mapping) -> "SiteLayout":
        """Return the layout of a site.

        :param site: site of a trace of one draw.
        """
        value, fn = site["value"], site["fn"]
        frames = {frame.dim: frame for frame in site["cond_indep_stack"] if frame.vectorized}
        kind: Kind
        entry_shape = torch.Size()
        if is_deterministic(site):
            kind, shape, event_dim = "deterministic", value.shape, fn.event_dim
            outermost = -min(frames, default=0)
            if event_dim == value.dim() and all(
                value.shape[dim + outermost : dim + outermost + 1] == (frame.size,) for dim, frame in frames.items()
            ):
                # By default all dimensions of pyro.deterministic are event dimensions; here those of plates are not.
                event_dim -= outermost
        else:
            kind = "observed" if site["is_observed"] else "latent"
            shape, event_dim = value_of(site).shape, fn.event_dim
            if kind == "observed":
                entry_shape = entries(site)[0].shape
        plates = tuple(frames[dim].name if dim in frames else None for dim in range(event_dim - len(shape), 0))
        return cls(kind, shape, entry_shape, plates, event_dim, kind == "observed" and _is_discrete(fn))

    def stack(self, site: Mapping, num: int) -> Tensor:
        """Return the value of a site of a trace of ``num`` draws, as [num, *batch, *event]."""
        return stack(value_of(site), num, self.shape, site["name"])

    def stack_entries(self, site: Mapping, num: int) -> tuple[Tensor, Tensor]:
        """Return log density and mask of the entries of an observed site, both [num, *entry]."""
        log_prob, mask = entries(site)
        return stack(log_prob, num, self.entry_shape, site["name"]), stack(mask, num, self.entry_shape, site["name"])

    def stack_log_prob(self, site: Mapping, num: int) -> Tensor:
        """Return the log density of a latent site, [num, *batch], without the scale of a subsample, and zero where masked."""
        log_prob = scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"])
        return stack(log_prob, num, self.shape[: len(self.shape) - self.event_dim], site["name"])

    def site(self, name: str, draws: Mapping[tuple[str, str], Tensor]) -> SampledSite:
        """Make the sampled site.

        :param name: name of the site.
        :param draws: draws of each quantity of each site, by ``(quantity, name)``.
        """
        value, is_observed = draws["value", name], None
        if self.kind == "observed":
            value = same(value, name)[0]
            # An entry of several event dimensions, such as a row of MultivariateNormal, is missing if all of it is NaN.
            is_nan = torch.isnan(value).reshape(*self.entry_shape, -1).all(-1)
            is_observed = draws["mask", name].any(0) & ~is_nan
        return SampledSite(
            self.kind,
            value,
            self.plates,
            self.event_dim,
            log_likelihood=draws.get(("log_likelihood", name)),
            is_observed=is_observed,
            prediction=draws.get(("prediction", name)),
            log_prior=draws.get(("log_prior", name)),
            prior=draws.get(("prior", name)),
            is_discrete=self.is_discrete,
        )


def is_deterministic(site: Mapping) -> bool:
    """Return whether a site is a function of others, by ``pyro.deterministic`` or a reparameteriser.

    Such a site is a Delta that is observed at its own tensor, while a Delta likelihood is observed at data.
    """
    fn = without_independent(site["fn"], masks=True)
    return site["is_observed"] and isinstance(fn, Delta) and fn.v.data_ptr() == site["value"].data_ptr()


def _is_discrete(fn: Any) -> bool:
    """Return whether the values of a distribution are integers."""
    fn = without_independent(fn.rows if isinstance(fn, ObservedRows) else fn, masks=True)
    try:
        return fn.support.is_discrete
    except NotImplementedError:  # a distribution without a support
        return False


def is_undeclared(shape: torch.Size, dims: Collection[int | None]) -> bool:
    """Return whether a batch shape has dimensions of more than one element that belong to no plate.

    :param shape: batch shape.
    :param dims: dimensions of plates, −1 the rightmost.
    """
    return any(size > 1 and dim - len(shape) not in dims for dim, size in enumerate(shape))


def max_plate_nesting(sites: Iterable[Mapping]) -> int:
    """Return the number of dimensions that the plates of sample sites take."""
    dims = [frame.dim for site in sites if site["type"] == "sample" for frame in site["cond_indep_stack"]]
    return -min((dim for dim in dims if dim is not None), default=0)


def value_of(site: Mapping) -> Tensor:
    """Return the value of a site, expanded to the shape of its distribution."""
    value = site["value"]
    if is_deterministic(site):
        return value
    return value.expand(torch.broadcast_shapes(value.shape, site["fn"].shape()))


def same(values: Tensor, name: str) -> Tensor:
    """Return ``values[:1]`` of an observed site; raise unless the values of all draws are equal."""
    if not torch.allclose(values, values[:1].expand_as(values), rtol=0.0, atol=0.0, equal_nan=True):
        raise ValueError(
            f"expected an observed value of site {name!r} that is the same for every draw, got one that depends on the latent "
            "sites; observe the data themselves, and make the transform a part of the distribution"
        )
    return values[:1]


def stack(value: Tensor, num: int, shape: torch.Size, name: str) -> Tensor:
    """Reshape the values of ``num`` draws to [num, *shape]; there may be dimensions of size one between the two."""
    if value.numel() == shape.numel():  # one draw, or a value that does not depend on the draw
        return value.reshape(shape).expand(num, *shape)
    if value.shape[0] == num and [n for n in value.shape[1:] if n != 1] == [n for n in shape if n != 1]:
        return value.reshape(num, *shape)
    expected = ", ".join(map(str, [num, 1, "…", 1, *shape]))
    raise ValueError(f"at site '{name}' expected shape [{expected}], got {list(value.shape)}; declare other dims by plates")


def entries(site: Mapping) -> tuple[Tensor, Tensor]:
    """Return the log density of every entry of an observed site, and a mask that is False for masked entries."""
    log_prob, mask = _entries_of(site["fn"], value_of(site))
    return log_prob, mask & _align(site["mask"], site["fn"].event_dim, value_of(site), log_prob)


def _entries_of(fn: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return log density and mask of the entries of a value, inside ``Independent`` and masks of its distribution."""
    if isinstance(fn, ObservedRows):
        return _entries_of(fn.rows, value)
    if isinstance(fn, torch.distributions.Independent):
        return _entries_of(fn.base_dist, value)
    if isinstance(fn, MaskedDistribution):
        log_prob, mask = _entries_of(fn.base_dist, value)
        return log_prob, mask & _align(fn._mask, fn.event_dim, value, log_prob)
    log_prob = fn.log_prob(value)
    return log_prob, torch.ones_like(log_prob, dtype=torch.bool)


def _align(mask: Tensor | bool | None, event_dim: int, value: Tensor, log_prob: Tensor) -> Tensor:
    """Reshape a mask over the batch of a distribution to broadcast against the log density of its entries."""
    mask = torch.as_tensor(True if mask is None else mask, device=value.device).bool()
    num_entry_dims = event_dim - (value.dim() - log_prob.dim())
    return mask.reshape(mask.shape + (1,) * num_entry_dims) if mask.dim() else mask
