"""Stochastic lower and upper bounds on the log evidence (bidirectional Monte Carlo)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites, site_is_factor
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.diagnostics.importance_weights import log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer.elbo._terms import leaves_entries_out
from pyro_lvgp.infer.protocols import HasLikelihoodTerm

__all__ = ["Sandwich", "bound_sandwich"]


@dataclass(frozen=True)
class Sandwich:
    """Stochastic bounds on the log evidence, in nats: of each datum [N], or of all data jointly [].

    :param lower: lower bound in expectation.
    :param upper: upper bound in expectation.
    """

    lower: Tensor
    upper: Tensor

    @property
    def gap(self) -> Tensor:
        """Upper minus lower bound; its mean bounds the KL divergences between the path of the chain and its reverse."""
        return self.upper - self.lower


@names_types
@pyro_lock
def bound_sandwich(
    model: Callable[..., Any],
    guide: AutoAnnealedLangevin,
    *args: Any,
    latents: Mapping[str, Tensor],
    num_samples: int = 16,
    vectorize: bool = True,
    seed: int | None = 0,
    **kwargs: Any,
) -> Sandwich:
    r"""Bound the log evidence of simulated data from both sides (bidirectional Monte Carlo).

    With :math:`w_s` the weights of S chains from the base, and :math:`\tilde w_s` those of S reverse chains from the
    latents that generated the data, which are an exact draw from their posterior,

    .. math::

        E\Big[\log \tfrac1S \sum_s w_s\Big] \le \log p(y) \le E\Big[-\log \tfrac1S \sum_s \tilde w_s^{-1}\Big].

    Sites that are not annealed are fixed at their true values, and the evidence is conditional on these.

    :param model: the model, at the parameters under which it generated the data.
    :param guide: annealed guide, fitted to the simulated data.
    :param args: arguments of both, with the simulated data.
    :param latents: true values of all latent sites, which generated the data: ``poutine.trace(model).get_trace()`` has data
        and latents.  With a mini-batch, pass those of its rows.
    :param num_samples: number of chains S in each direction.
    :param vectorize: False runs chains one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: seed of the draws; None draws from the global state.
    :raises TypeError: for a guide that is no ``AutoAnnealedLangevin``.
    :raises ValueError: if the value of a latent site is missing or has another shape, or the model's density is not that of
        its draws.  The latter is the case for a ``BayesianGPLVM`` without ``likelihood_term="fitc"``, and for models with
        factors, masked latents, or scales other than those of mini-batches.

    Source: Grosse, Ghahramani and Adams (2015), "Sandwiching the marginal likelihood using bidirectional Monte Carlo".

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     with pyro.plate("data", 3):
    ...         x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...         return pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> truth = poutine.trace(model).get_trace(None)
    >>> y, x = truth.nodes["y"]["value"], truth.nodes["x"]["value"]
    >>> sandwich = bound_sandwich(model, AutoAnnealedLangevin(model, local_plate="data"), y, latents={"x": x})
    >>> sandwich.lower.shape
    torch.Size([3])
    """
    if not isinstance(guide, AutoAnnealedLangevin):
        raise TypeError(f"expected an AutoAnnealedLangevin, whose chain can be run in reverse, got {type(guide).__name__}")
    if isinstance(model, HasLikelihoodTerm) and (term := model.likelihood_term) != "fitc":
        raise ValueError(
            f'expected a model whose density is that of its draws, got likelihood_term="{term}", whose density is a bound; '
            'make it with likelihood_term="fitc"'
        )
    with torch.no_grad(), poutine.block():
        guide(*args, **kwargs)  # the first call sets the annealed sites
        with seeded(0):
            sites = prune_subsample_sites(poutine.trace(model).get_trace(*args, **kwargs)).nodes
    for name, site in sites.items():
        if site["type"] == "sample" and (term := _term_not_drawn(site)):
            raise ValueError(f"expected a model whose density is that of its draws, got {term} at site {name!r}; remove it")
    missing = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes() if name not in latents]
    if missing:
        raise ValueError(f"expected the true value of every latent site, got none for {missing}")
    others = {name: value for name, value in latents.items() if name not in guide.annealed}

    def given_others(fn: Callable[..., Any]) -> Callable[..., Any]:
        return poutine.block(poutine.condition(fn, others), hide=list(others))

    log_w, reverse_log_w = (
        log_weights(
            given_others(model),
            given_others(path),
            *args,
            num_samples=num_samples,
            local_plate=guide.local_plate,
            vectorize=vectorize,
            seed=seed,
            **kwargs,
        )
        for path in (guide, guide.reverse({name: latents[name] for name in guide.annealed}))
    )
    log_S = math.log(num_samples)
    return Sandwich(log_w.logsumexp(0) - log_S, log_S - (-reverse_log_w).logsumexp(0))


def _term_not_drawn(site: Any) -> str:
    """Name the term by which the density of a site differs from that of its draws; empty without such a term."""
    if site_is_factor(site):
        return "a factor"
    if not site["is_observed"] and leaves_entries_out(site):
        return "a masked latent"
    of_plates = math.prod((frame.full_size or frame.size) / frame.size for frame in site["cond_indep_stack"])
    return "" if (abs(torch.as_tensor(site["scale"] / of_plates) - 1.0) < 1e-6).all() else "a scale"
