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

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides._model_guide import ModelGuide
from pyro_lvgp.infer._sites import SiteLayout, is_deterministic, max_plate_nesting
from pyro_lvgp.infer.sampling import log_weights_of_draws


class SampledGuide(ModelGuide):
    """Base of guides whose marginals have no closed form; medians and quantiles are those of draws.

    Subclasses implement ``forward``.
    """

    @pyro_lock
    def sample_posterior(
        self,
        num_samples: int,
        *args,
        num_candidates: int | None = None,
        chunk_size: int = 100,
        vectorize: bool | None = None,
        **kwargs,
    ) -> dict[str, Tensor]:
        r"""Draw all latent and deterministic sites, along a new first dimension.

        Each draw is one of C candidates :math:`z_c \sim q`, chosen with the probabilities
        :math:`w_c / \sum_{c'} w_{c'}` of their importance weights :math:`w_c = p(y, z_c) / q(z_c)`, which brings it closer to
        the posterior the larger C is.  If a plate of the model draws its own subsample, all draws have the same rows.

        :param num_samples: number of draws.
        :param args: arguments of the model, which encoders and chains need.
        :param num_candidates: C; by default 4 for an annealed guide without a local plate, else 1, which are draws from q.
        :param chunk_size: number of candidates that are computed at once.
        :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.  By
            default two draws at once are compared with the same draws one by one.
        :raises ValueError: if a number is not positive.
        :raises TypeError: if a number is no integer.

        Source of the choice: Rubin (1987), "The calculation of posterior distributions by data augmentation: comment"; Cremer,
        Morris and Duvenaud (2017), "Reinterpreting importance-weighted autoencoders".
        """
        num_candidates = self._num_candidates if num_candidates is None else num_candidates
        check_sizes(num_samples=num_samples, num_candidates=num_candidates, chunk_size=chunk_size)
        num_draws = num_samples * num_candidates
        with torch.no_grad(), poutine.block():
            trace, model_trace = self._trace_once(args, kwargs)
            layouts = self._layouts(model_trace)
            outermost = -1 - max_plate_nesting(model_trace.nodes.values())
            with _ReplaySubsamples(trace):
                if vectorize is None:
                    vectorize = num_draws > 1 and self._broadcasts(outermost, args, kwargs)
                values: dict[str, list[Tensor]] = {name: [] for name in layouts}
                log_w = []
                for chunk in torch.arange(num_draws).split(chunk_size if vectorize else 1):
                    size = len(chunk)
                    with pyro.plate("_pyro_lvgp_draws", size, dim=outermost) if vectorize else nullcontext():
                        guide_trace, model_trace = self._trace_once(args, kwargs)
                    for name, layout in layouts.items():
                        values[name].append(layout.stack(model_trace.nodes[name], size))
                    if num_candidates > 1:
                        log_w.append(log_weights_of_draws(model_trace, guide_trace, size))
        draws = {name: torch.cat(chunks) for name, chunks in values.items()}
        if num_candidates == 1:
            return draws
        logits = torch.cat(log_w).reshape(num_samples, num_candidates)
        chosen = torch.distributions.Categorical(logits=logits).sample()
        rows = chosen + num_candidates * torch.arange(num_samples, device=chosen.device)
        return {name: value[rows.to(value.device)] for name, value in draws.items()}

    @property
    def _num_candidates(self) -> int:
        """Number of candidates of a draw of ``sample_posterior`` by default."""
        return 1

    def _layouts(self, model_trace: Trace) -> dict[str, SiteLayout]:
        """Return the layouts of the latent and deterministic sites of the model, by name."""
        latents = {name for name, _ in self.prototype_trace.iter_stochastic_nodes()}
        return {
            name: SiteLayout.of(site)
            for name, site in model_trace.nodes.items()
            if name in latents or (site["type"] == "sample" and is_deterministic(site))
        }

    def _trace_once(self, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        """Return traces of the guide, and of the model at the values that the guide drew."""
        trace = poutine.trace(self).get_trace(*args, **kwargs)
        return trace, poutine.trace(poutine.replay(self.model, trace)).get_trace(*args, **kwargs)

    def _broadcasts(self, dim: int, args: tuple, kwargs: dict) -> bool:
        """Return whether the log joint of two draws along a dimension is the sum of those of the draws."""
        draws = [self._trace_once(args, kwargs)[1] for _ in range(2)]
        apart = torch.as_tensor(sum(draw.log_prob_sum() for draw in draws))
        stacked = Trace()
        sites: Any = draws[0].nodes
        for name, site in sites.items():
            if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
                continue
            values: Any = [draw.nodes[name]["value"] for draw in draws]
            num_plates = -dim - 1 + site["fn"].event_dim
            value = torch.stack([x.reshape((1,) * (num_plates - x.dim()) + x.shape) for x in values])
            stacked.add_node(name, **site | {"value": value})
        try:
            with pyro.plate("_pyro_lvgp_draws", 2, dim=dim):
                trace = poutine.trace(poutine.replay(self.model, stacked)).get_trace(*args, **kwargs)
                together = torch.as_tensor(trace.log_prob_sum())
        except Exception:  # whatever the model raises for more dimensions: draws one by one have none
            return False
        return torch.allclose(together, apart, rtol=1e-3, atol=1e-3, equal_nan=True)

    @pyro_lock
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
