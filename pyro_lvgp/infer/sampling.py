"""Draws from a guide in parallel, with the model replayed on each of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from jaxtyping import Float64, Int64
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_factor, site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_device, check_sizes
from pyro_lvgp.infer._sites import SampledSite, SiteLayout, entries, is_deterministic, is_undeclared, same, stack
from pyro_lvgp.infer.elbo._terms import share_masks, trace_guide

__all__ = ["SampledTraces", "log_weights_of_draws", "sample_traces"]

_DRAWS = "_pyro_lvgp_draws"


@dataclass(frozen=True, eq=False)
class SampledTraces:
    """Sites and log densities of a model and a guide at S draws z ~ q(z).

    :param sites: sites of the model by name, in its order.
    :param log_p: log p(y, z) of every draw.
    :param log_q: log density of every draw under the guide, including the priors of sites that the guide does not have.
    :param plates: row indices of each plate by name: 0 … size − 1, or the subsample.
    """

    sites: dict[str, SampledSite]
    log_p: Float64[Tensor, " S"]
    log_q: Float64[Tensor, " S"]
    plates: dict[str, Int64[Tensor, " size"]]


@names_types
@pyro_lock
def sample_traces(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int,
    chunk_size: int = 50,
    vectorize: bool = True,
    predict: bool = True,
    log_likelihood: bool = True,
    prior: bool = False,
    seed: int | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> SampledTraces:
    """Draw from a guide, replay the model on the draws, and simulate data from them.

    The weight of draw s is p(y, z_s) / q(z_s) with z_s ~ q.  Sites of the model that the guide does not have are
    drawn from their prior given the other sites, which is then part of both p and q.  All draws have the same subsamples of
    plates, and log p and log q include Pyro's scale factors.

    Draws are made ``chunk_size`` at a time in a plate to the left of all others, as in ``Trace_ELBO`` with
    ``vectorize_particles=True``, so model and guide must broadcast over dimensions on the left of their plates.

    :param model: any Pyro model.
    :param guide: any Pyro guide for it, autoguides and ``GuideMessenger`` included.
    :param args: arguments of both.
    :param num_samples: number of draws S.
    :param chunk_size: number of draws in memory at once, besides the results.
    :param vectorize: False runs model and guide draw by draw, which is slow, but does not require that they broadcast.
    :param predict: simulate the observed sites.
    :param log_likelihood: return the log density of every observed entry.
    :param prior: draw all sites from the model alone too, after the draws from the guide.
    :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
    :param device: device of the results; None for the device of the computation.
    :param kwargs: keyword arguments of both.
    :raises ValueError: if a number is not positive, or an observed value depends on the latent sites.
    :raises TypeError: if a number is no integer.
    :raises RuntimeError: if model or guide cannot make several draws at once.

    >>> from pyro import distributions as dist
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> def guide(y):
    ...     pyro.sample("mu", dist.Normal(y.sum() / (1 + len(y)), (1 + len(y)) ** -0.5))
    >>> draws = sample_traces(model, guide, torch.tensor([1.0, 3.0]), num_samples=4, seed=0)
    >>> draws.sites["y"].prediction.shape, draws.sites["y"].plates
    (torch.Size([4, 2]), ('data',))
    >>> bool((draws.log_p - draws.log_q).std() < 1e-5)  # an exact posterior has one weight only
    True
    """
    check_sizes(num_samples=num_samples, chunk_size=chunk_size)
    check_device(device)
    chunk_size = chunk_size if vectorize else 1
    with torch.no_grad(), seeded(seed):
        pair = _Pair(model, guide, args, kwargs, vectorize)
        sizes = [min(chunk_size, num_samples - start) for start in range(0, num_samples, chunk_size)]
        draws = _in_chunks(lambda num: pair.draw(num, predict, log_likelihood), sizes, device)
        if prior:
            draws |= _in_chunks(pair.sample_prior, sizes, device)
    sites = {name: layout.site(name, draws) for name, layout in pair.layouts.items()}
    return SampledTraces(sites, draws["log_p", ""], draws["log_q", ""], pair.plates)


def _in_chunks(
    draw: Callable[[int], dict[tuple[str, str], Tensor]], sizes: list[int], device: torch.device | str | None
) -> dict[tuple[str, str], Tensor]:
    """Concatenate draws of several sizes, each moved to a device."""
    chunks = []
    for num in progress_bar(sizes, "draws"):
        chunks.append({key: value.detach().to(device or value.device) for key, value in draw(num).items()})
    return {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}


class _Pair:
    """Model and guide, with the layout of their sites and one subsample of every subsampled plate."""

    def __init__(self, model: Callable, guide: Callable, args: tuple, kwargs: dict, vectorize: bool):
        self.model, self.guide, self.args, self.kwargs, self.vectorize = model, guide, args, kwargs, vectorize
        self.is_checked = False
        self.subsamples = Trace()
        guide_trace = self._trace_guide()
        model_trace = self._trace_model(guide_trace, model)
        for trace in (guide_trace, model_trace):
            self.subsamples.nodes.update((name, site) for name, site in trace.nodes.items() if _is_subsample(site))
        self.plates = {name: torch.as_tensor(site["value"]).cpu() for name, site in self.subsamples.nodes.items()}
        guide_sites, model_sites = _sampled(guide_trace), _sampled(model_trace)
        frames = [f for site in (*guide_sites.values(), *model_sites.values()) for f in site["cond_indep_stack"]]
        self.nesting = max((-frame.dim for frame in frames if frame.vectorized), default=0)
        self.guide_shapes = {name: site["value"].shape for name, site in guide_sites.items()}
        self.layouts = {name: SiteLayout.of(site) for name, site in model_sites.items() if not site_is_factor(site)}
        if not self.layouts:
            raise ValueError("expected a model with sample sites, got none; check that it calls pyro.sample")
        if vectorize:
            for trace in (guide_trace, model_trace):
                _log_prob(trace, 1)  # outside the handler below: errors here are not about broadcasting
                with _explain_failure():
                    _check_log_prob_shapes(trace, self.nesting)

    def draw(self, num: int, predict: bool, log_likelihood: bool) -> dict[tuple[str, str], Tensor]:
        """Make ``num`` draws; return tensors by (quantity, site), with draws along the first dimension."""
        if not self.vectorize:
            return self._draw(1, None, nullcontext(), predict, log_likelihood)
        try:
            return self._draw_at_once(num, predict, log_likelihood)
        except (RuntimeError, ValueError, IndexError):
            # A model that does not broadcast fails for few draws but not for one.  Invalid values fail for one draw too, and
            # a lack of memory not for few.
            self._draw(1, None, nullcontext(), predict, log_likelihood)
            for few in (2, 3):  # two numbers, because a plate of the same size as the draws can hide the error
                with _explain_failure():
                    self._draw_at_once(few, predict, log_likelihood)
            raise

    def sample_prior(self, num: int) -> dict[tuple[str, str], Tensor]:
        """Make ``num`` draws of all sites from the model alone; return tensors by (quantity, site)."""
        nesting = self.nesting + 1
        with pyro.plate(_DRAWS, num, dim=-nesting) if self.vectorize else nullcontext():
            trace = self._trace_model(Trace(), _Simulate()(self.model))
        if absent := self.layouts.keys() - trace.nodes.keys():
            raise ValueError(f"expected the same sites in draws from the prior, got none of {sorted(absent)}")
        return {("prior", name): layout.stack(trace.nodes[name], num) for name, layout in self.layouts.items()}

    def _draw_at_once(self, num: int, predict: bool, log_likelihood: bool) -> dict[tuple[str, str], Tensor]:
        nesting = self.nesting + 1
        draws = self._draw(num, nesting, pyro.plate(_DRAWS, num, dim=-nesting), predict, log_likelihood)
        if not self.is_checked:
            self._check_independence(draws)
        return draws

    def _draw(
        self, num: int, nesting: int | None, plate: AbstractContextManager, predict: bool, log_likelihood: bool
    ) -> dict[tuple[str, str], Tensor]:
        with plate:
            guide_trace = self._trace_guide()
            latents = guide_trace if nesting is None else self._for_model(guide_trace, num)
            model_trace = self._trace_model(latents, self.model)
            share_masks(model_trace, guide_trace)
            log_p, log_q = (_log_prob(trace, num) for trace in (model_trace, guide_trace))
            if nesting is not None:
                _check_log_prob_shapes(model_trace, nesting)
                _check_log_prob_shapes(guide_trace, nesting)
            simulated = self._trace_model(model_trace, _Simulate()(self.model)) if predict else None
        # Sites that the guide does not have were drawn from the model, whose density is part of q.
        log_q |= {n: log_p[n] for n, layout in self.layouts.items() if layout.kind == "latent" and n not in log_q}
        zero = torch.zeros(num, dtype=torch.float64, device=next(iter(log_p.values())).device)
        result = {("log_p", ""): sum(log_p.values(), zero), ("log_q", ""): sum(log_q.values(), zero)}
        for name, layout in self.layouts.items():
            if name not in model_trace:
                raise ValueError(f"expected the same sites in every draw, got some without {name!r}")
            site = model_trace.nodes[name]
            if layout.kind != "observed":
                result["value", name] = layout.stack(site, num)
                if layout.kind == "latent":
                    result["log_prior", name] = layout.stack_log_prob(site, num)
                continue
            log_prob, mask = layout.stack_entries(site, num)
            result["value", name] = same(layout.stack(site, num), name)
            result["mask", name] = mask.any(0, keepdim=True)
            if log_likelihood:
                result["log_likelihood", name] = log_prob
            if simulated is not None:
                result["prediction", name] = layout.stack(simulated.nodes[name], num)
        return result

    def _check_independence(self, draws: Mapping[tuple[str, str], Tensor]) -> None:
        """Raise if the results of the first draw depend on the other draws, as ``x.mean()`` over a plate makes them."""
        first = Trace()
        for name, layout in self.layouts.items():
            if layout.kind == "latent":
                first.add_node(name, type="sample", name=name, is_observed=False, infer={}, value=draws["value", name][0])

        def alone() -> dict[tuple[str, str], Tensor]:
            sites: Any = self._trace_model(first, self.model).nodes
            kinds = {name: layout.kind for name, layout in self.layouts.items()}
            values = {("value", name): sites[name]["value"] for name, kind in kinds.items() if kind == "deterministic"}
            entry = {("log_likelihood", name): entries(sites[name])[0] for name, kind in kinds.items() if kind == "observed"}
            return values | {key: value for key, value in entry.items() if key in draws}

        found = alone()
        # Two runs of a model with its own noise, such as dropout, differ too.
        if not _agree(found, {key: draws[key][0] for key in found}) and _agree(found, alone()):
            raise ValueError(
                "expected results of one draw that do not depend on other draws, got results that do; does the model reduce "
                "over a plate, as x.mean()?"
            )
        self.is_checked = True

    def _for_model(self, guide_trace: Trace, num: int) -> Trace:
        """Reshape the guide's values to [num, 1, …, 1, *batch, *event], with draws to the left of all plates of the model.

        The guide may nest its plates differently, or have event dimensions for plates of the model.
        """
        trace = guide_trace.copy()
        for name, site in _sampled(guide_trace).items():
            if name in self.layouts and not site["is_observed"]:
                shape = self.guide_shapes[name]
                ones = (1,) * (self.nesting + self.layouts[name].event_dim - len(shape))
                value = stack(site["value"], num, shape, name).reshape(num, *ones, *shape)
                trace.nodes[name] = site | {"value": value}
        return trace

    def _trace_guide(self) -> Trace:
        return trace_guide(poutine.replay(self.guide, trace=self.subsamples), self.args, self.kwargs)

    def _trace_model(self, latents: Trace, model: Callable) -> Trace:
        replayed = self.subsamples.copy()
        replayed.nodes.update((n, s) for n, s in latents.nodes.items() if s["type"] == "sample" and not s["is_observed"])
        return poutine.trace(poutine.replay(model, trace=replayed)).get_trace(*self.args, **self.kwargs)


class _Simulate(Messenger):
    """Draw the observed sites, but, unlike ``poutine.uncondition``, not deterministic sites and factors."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and not is_deterministic(msg) and not site_is_factor(msg):
            msg["is_observed"], msg["value"], msg["done"] = False, None, False


def _agree(values: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> bool:
    """Return whether tensors are equal up to rounding errors, of ill-conditioned operations too."""
    pairs = [(value.double(), others[key].double().reshape(value.shape)) for key, value in values.items()]
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True) for a, b in pairs)


def _is_subsample(site: Any) -> bool:
    return site["type"] == "sample" and site_is_subsample(site)


def _sampled(trace: Trace) -> dict[str, Any]:
    return {name: s for name, s in trace.nodes.items() if s["type"] == "sample" and not _is_subsample(s)}


def log_weights_of_draws(model_trace: Trace, guide_trace: Trace, num: int) -> Float64[Tensor, " S"]:
    """Compute log p(y, z) − log q(z) of ``num`` draws along the outermost plate of two traces.

    :param model_trace: trace of the model, replayed on that of the guide.
    :param guide_trace: trace of a guide that has all latent sites.
    :param num: number of draws.
    """
    share_masks(model_trace, guide_trace)
    log_p, log_q = (_log_prob(trace, num) for trace in (model_trace, guide_trace))
    return torch.stack([*log_p.values(), *(-x for x in log_q.values())]).sum(0)


def _log_prob(trace: Trace, num: int) -> dict[str, Tensor]:
    """Compute the log density [num] of every site, scaled and masked, summed in float64."""
    trace.compute_log_prob(lambda _, site: not _is_subsample(site))
    return {name: s["log_prob"].reshape(num, -1).sum(-1, dtype=torch.float64) for name, s in _sampled(trace).items()}


def _check_log_prob_shapes(trace: Trace, nesting: int) -> None:
    """Raise if a site has a batch dimension that belongs to no plate."""
    for name, site in _sampled(trace).items():
        check_site_shape(site, nesting)
        if is_undeclared(shape := site["log_prob"].shape, range(-nesting, 0)):
            raise ValueError(f"at site '{name}' expected a plate for each batch dimension, got batch shape {list(shape)}")


@contextmanager
def _explain_failure() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise RuntimeError(
            "expected a model and a guide that broadcast over a plate of draws to the left of their own plates, got: "
            f"{error}\nDeclare every batch dimension by a plate and let the model broadcast over dimensions to the "
            "left of its plates, or pass vectorize=False to run model and guide draw by draw."
        ) from error
