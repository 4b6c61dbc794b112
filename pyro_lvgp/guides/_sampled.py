"""Base class of guides whose marginals have no closed form."""

from contextlib import nullcontext
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.transforms import biject_to
from pyro.poutine import Trace
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides._model_guide import ModelGuide
from pyro_lvgp.infer._sites import SiteLayout, is_deterministic


class SampledGuide(ModelGuide):
    """Base of guides whose marginals have no closed form; medians and quantiles are those of draws.

    Subclasses implement ``forward``.
    """

    def sample_posterior(
        self, num_samples: int, *args, chunk_size: int = 100, vectorize: bool | None = None, **kwargs
    ) -> dict[str, Tensor]:
        """Draw all latent and deterministic sites, along a new first dimension.

        If a plate of the model draws its own subsample, all draws have the same rows.

        :param num_samples: number of draws.
        :param args: arguments of the model, which encoders and chains need.
        :param chunk_size: number of draws in memory at once.
        :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.  By
            default two draws at once are compared with the same draws one by one.
        :raises ValueError: if a number is not positive.
        :raises TypeError: if a number is no integer.
        """
        check_sizes(num_samples=num_samples, chunk_size=chunk_size)
        with torch.no_grad(), poutine.block():
            trace, model_trace = self._trace_once(args, kwargs)
            with _ReplaySubsamples(trace):
                outermost = -1 - _max_plate_nesting(model_trace)
                if vectorize is None:
                    vectorize = num_samples > 1 and self._broadcasts(outermost, args, kwargs)
                sizes = [len(chunk) for chunk in torch.arange(num_samples).split(chunk_size if vectorize else 1)]
                chunks = []
                for size in sizes:
                    with pyro.plate("_pyro_lvgp_draws", size, dim=outermost) if vectorize else nullcontext():
                        chunks.append(self._trace_once(args, kwargs)[1])
        latents = {name for name, _ in self.prototype_trace.iter_stochastic_nodes()}
        layouts = {
            name: SiteLayout.of(site)
            for name, site in model_trace.nodes.items()
            if name in latents or (site["type"] == "sample" and is_deterministic(site))
        }
        return {
            name: torch.cat([layout.stack(chunk.nodes[name], size) for chunk, size in zip(chunks, sizes, strict=True)])
            for name, layout in layouts.items()
        }

    def _trace_once(self, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        """Return traces of the guide, and of the model at the values that the guide drew."""
        trace = poutine.trace(self).get_trace(*args, **kwargs)
        return trace, poutine.trace(poutine.replay(self.model, trace)).get_trace(*args, **kwargs)

    def _broadcasts(self, dim: int, args: tuple, kwargs: dict) -> bool:
        """Return whether the log joint of two draws along a dimension is the sum of those of the draws."""
        draws = [self._trace_once(args, kwargs)[1] for _ in range(2)]
        stacked = draws[0].copy()
        sites: Any = stacked.nodes
        for name, site in sites.items():
            if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site):
                values: Any = [draw.nodes[name]["value"] for draw in draws]
                num_plates = -dim - 1 + site["fn"].event_dim
                site["value"] = torch.stack([x.reshape((1,) * (num_plates - x.dim()) + x.shape) for x in values])
        try:
            with pyro.plate("_pyro_lvgp_draws", 2, dim=dim):
                trace = poutine.trace(poutine.replay(self.model, stacked)).get_trace(*args, **kwargs)
                together = torch.as_tensor(trace.log_prob_sum())
        except Exception:  # whatever the model raises for more dimensions: draws one by one have none
            return False
        apart = torch.as_tensor(sum(draw.log_prob_sum() for draw in draws))
        return torch.allclose(together, apart, rtol=1e-3, atol=1e-3, equal_nan=True)

    def quantiles(
        self, quantiles: list[float] | Tensor, *args, num_samples: int = 100, seed: int | None = 0, **kwargs
    ) -> dict[str, Tensor]:
        """Estimate marginal posterior quantiles by latent or deterministic site, along a new first dimension, from draws.

        Quantiles are taken in unconstrained space.  Where the support constrains coordinates jointly, as a simplex does, the
        results are the images of the unconstrained quantiles.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model, which encoders and chains need.
        :param num_samples: number of draws.
        :param seed: seed of the draws; None draws from the global state.
        """
        with seeded(seed):
            draws = self.sample_posterior(num_samples, *args, **kwargs)
        result, latents = {}, dict(self.prototype_trace.iter_stochastic_nodes())
        for name, x in draws.items():
            if name not in latents:
                result[name] = x.quantile(torch.as_tensor(quantiles).to(x), dim=0)
                continue
            transform = biject_to(latents[name]["fn"].support)
            sign = direction(transform)
            result[name] = transform(sign * (sign * transform.inv(x)).quantile(torch.as_tensor(quantiles).to(x), dim=0))
        return result


def direction(transform: Any) -> Any:
    """Return the sign of the derivative of a scalar bijection; 1 for a bijection without one sign.

    Under a decreasing bijection, sign −1, low quantiles are the images of high ones.
    """
    try:
        return transform.sign
    except NotImplementedError:
        return 1


class _ReplaySubsamples(ReplayMessenger):
    """Replay the subsamples of the plates of a trace, and no other sites."""

    def _pyro_sample(self, msg):
        if site_is_subsample(msg):
            super()._pyro_sample(msg)


def _max_plate_nesting(trace: Trace) -> int:
    """Number of dimensions that the plates of a trace take."""
    frames = [frame for site in trace.nodes.values() if site["type"] == "sample" for frame in site["cond_indep_stack"]]
    return max((-frame.dim for frame in frames if frame.dim is not None), default=0)
