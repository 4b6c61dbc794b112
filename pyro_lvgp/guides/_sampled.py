"""Base class of guides whose marginals have no closed form."""

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


class SampledGuide(ModelGuide):
    """Base of guides whose marginals have no closed form; medians and quantiles are those of draws.

    Subclasses implement ``forward``.
    """

    def sample_posterior(
        self, num_samples: int, *args, chunk_size: int = 100, vectorize: bool = True, **kwargs
    ) -> dict[str, Tensor]:
        """Draw all sites from the guide, along a new first dimension.

        If a plate of the model draws its own subsample, all draws have the same rows.

        :param num_samples: number of draws.
        :param args: arguments of the model, which encoders and chains need.
        :param chunk_size: number of draws in memory at once.
        :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
        :raises ValueError: if a number is not positive.
        :raises TypeError: if a number is no integer.
        """
        check_sizes(num_samples=num_samples, chunk_size=chunk_size)
        with torch.no_grad(), poutine.block():
            model_trace = poutine.trace(self.model).get_trace(*args, **kwargs)
            with _ReplaySubsamples(model_trace):
                if not vectorize:
                    draws = [self._draw_latents(args, kwargs) for _ in range(num_samples)]
                    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
                chunks = []
                for chunk in torch.arange(num_samples).split(chunk_size):
                    with pyro.plate("_pyro_lvgp_draws", len(chunk), dim=-1 - _max_plate_nesting(model_trace)):
                        chunks.append(self._draw_latents(args, kwargs))
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        ranks = {name: len(site["fn"].batch_shape) + site["fn"].event_dim for name, site in sites.items()}
        return {
            name: torch.cat([x.reshape(len(x), *x.shape[x.dim() - rank :]) for x in (c[name] for c in chunks)])
            for name, rank in ranks.items()
        }

    def _draw_latents(self, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        """Draw every latent site once, including sites of parts of the guide that return no values."""
        sites: Any = poutine.trace(self).get_trace(*args, **kwargs).nodes
        return {name: sites[name]["value"] for name, _ in self.prototype_trace.iter_stochastic_nodes()}

    def quantiles(
        self, quantiles: list[float] | Tensor, *args, num_samples: int = 100, seed: int | None = 0, **kwargs
    ) -> dict[str, Tensor]:
        """Estimate marginal posterior quantiles by site, along a new first dimension, from draws.

        Quantiles are taken in unconstrained space.  Where the support constrains coordinates jointly, as a simplex does, the
        results are the images of the unconstrained quantiles.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model, which encoders and chains need.
        :param num_samples: number of draws.
        :param seed: seed of the draws; None draws from the global state.
        """
        with seeded(seed):
            draws = self.sample_posterior(num_samples, *args, **kwargs)
        result = {}
        for name, x in draws.items():
            transform = biject_to(self.prototype_trace.nodes[name]["fn"].support)
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
