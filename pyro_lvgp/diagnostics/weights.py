"""What the weights of a guide say about it: how good it is for each datum, and how tight a bound."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.ops.stats import fit_generalized_pareto
from pyro.poutine.util import prune_subsample_sites, site_is_factor
from torch import Tensor

from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import ImportanceWeightedELBO, sample_traces
from pyro_lvgp.infer.terms import mask_of
from pyro_lvgp.seeding import seeded
from pyro_lvgp.validation import check_sizes


def log_weights(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 100,
    local_plate: str | None = None,
    vectorize: bool = True,
    seed: int | None = 0,
    **kwargs: Any,
) -> Float[Tensor, "S ..."]:
    r"""Log importance weights of draws from a guide.

    For the sites of a plate over data, :math:`\log w_{sn} = \log p(y_n, x_{ns} \mid g) - \log q(x_{ns} \mid g)` at one draw of
    the globals g, shaped [S, N]; without such a plate :math:`\log w_s = \log p(y, z_s) - \log q(z_s)`, shaped [S].

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: arguments of both; with a mini-batch, weights of its rows.
    :param num_samples: number of draws S.
    :param local_plate: the plate over data; by default the guide's ``local_plate`` or the model's, if there is one.
    :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: of the draws; None draws from the global state.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> def model(y):
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> log_weights(model, MeanFieldGuide(model), torch.zeros(4), num_samples=10, local_plate="data").shape
    torch.Size([10, 4])
    """
    check_sizes(num_samples=num_samples)
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        with torch.no_grad(), seeded(seed), poutine.block():
            guide(*args, **kwargs)  # which tells its plate
    plate = local_plate or getattr(guide, "local_plate", getattr(model, "local_plate", None))
    if plate is None:
        options: Any = {"chunk_size": 1000, "predict": False, "log_likelihood": False}
        options |= {"vectorize": vectorize, "seed": seed}
        draws = sample_traces(model, guide, *args, num_samples=num_samples, **options, **kwargs)
        return draws.log_p - draws.log_q
    calls, at_once = (1, num_samples) if vectorize else (num_samples, 1)
    bound = ImportanceWeightedELBO(plate, at_once, integrate=False)
    with torch.no_grad(), seeded(seed):
        return torch.cat([bound.log_weights(model, guide, *args, **kwargs) for _ in range(calls)])


def effective_sample_size(log_weights: Float[Tensor, "S *batch"]) -> Float[Tensor, "*batch"]:
    """Kish's effective number ``(Σ_s w_s)² / Σ_s w_s²`` of the S draws, between 1 and S.

    :param log_weights: log weights, draws first.

    >>> effective_sample_size(torch.zeros(8, 2))
    tensor([8., 8.])
    """
    weights = (log_weights - log_weights.amax(0)).exp()
    return weights.sum(0).square() / weights.square().sum(0)


def pareto_k(log_weights: Float[Tensor, "S *batch"]) -> Float[Tensor, "*batch"]:
    """Shape k̂ of a Pareto tail fitted to the largest weights; above 0.7 the guide misses too much to be corrected by them.

    Equal weights have no tail, −∞; where all but a few vanish beside the largest it is ∞, and NaN where a weight is.

    :param log_weights: log weights, draws first; some hundred draws for a reliable answer.
    :raises ValueError: with fewer than 25 draws.

    Source: Vehtari et al. (2024), "Pareto smoothed importance sampling"; Yao et al. (2018), "Yes, but did it work?".

    >>> pareto_k(torch.randn(200, 2)).shape
    torch.Size([2])
    """
    S = len(log_weights)
    if S < 25:
        raise ValueError(f"expected 25 draws or more to fit a tail, got {S}; some hundred are better")
    tail = math.ceil(min(0.2 * S, 3.0 * math.sqrt(S)))
    columns = (log_weights - log_weights.amax(0)).double().reshape(S, -1).sort(0).values[-tail - 1 :].exp().T
    shapes = [_tail_shape(column[1:] - column[0]) for column in columns]
    return torch.as_tensor(shapes, dtype=log_weights.dtype, device=log_weights.device).reshape(log_weights.shape[1:])


def _tail_shape(excess: Float[Tensor, " tail"]) -> float:
    """K̂ of sorted excesses over a threshold: those that tie with it tell nothing, and others that all tie make no tail."""
    told = excess[excess > 0.0]
    if torch.isnan(excess).any():
        return math.nan
    if not len(told) or (len(told) >= _FEWEST and told[0] == told[-1]):
        return -math.inf
    return fit_generalized_pareto(told)[0] if len(told) >= _FEWEST else math.inf


_FEWEST = 5  # excesses to fit a tail to


@dataclass(frozen=True)
class Sandwich:
    """Stochastic bounds on log evidence, in nats: for each datum [N], or for all data jointly [].

    :param lower: below it on average.
    :param upper: above it on average.
    """

    lower: Tensor
    upper: Tensor

    @property
    def gap(self) -> Tensor:
        """Upper minus lower: on average it bounds the KL divergences between the path of the chain and its reverse."""
        return self.upper - self.lower


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

    With :math:`w_s` the weights of S chains started at the base, and :math:`\tilde w_s` those of S chains run backwards from
    the latents that generated the data, which are an exact draw from their posterior,

    .. math::

        E\Big[\log \tfrac1S \sum_s w_s\Big] \le \log p(y) \le E\Big[-\log \tfrac1S \sum_s \tilde w_s^{-1}\Big].

    Sites that are not annealed are held at their true values: the evidence is that given them.

    :param model: the model, at the parameters under which it generated the data.
    :param guide: annealed guide, fitted to the simulated data.
    :param args: arguments of both, with the simulated data.
    :param latents: the latents behind them, for every latent site: ``poutine.trace(model).get_trace()`` has both.  With a
        mini-batch, those of its rows.
    :param num_samples: number of chains S in each direction.
    :param vectorize: False runs them one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: of the draws; None draws from the global state.
    :raises TypeError: for a guide that anneals nothing.
    :raises ValueError: if the value of a latent site is missing or of another shape, or the model's density is not that of its
        draws: that of a ``BayesianGPLVM`` is only with ``likelihood_term="fitc"``, and a model with factors, masked latents or
        scales other than those of mini-batches has another.

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
        raise TypeError(f"expected an AutoAnnealedLangevin, whose chain can be run backwards, got {type(guide).__name__}")
    if (term := getattr(model, "likelihood_term", "fitc")) != "fitc":
        raise ValueError(
            f'expected a model whose density is that of its draws, got likelihood_term="{term}", whose density is a bound; '
            'make it with likelihood_term="fitc"'
        )
    with torch.no_grad(), poutine.block():
        guide(*args, **kwargs)  # its sites are known after the first call
        with seeded(0):
            sites = prune_subsample_sites(poutine.trace(model).get_trace(*args, **kwargs)).nodes
    for name, site in sites.items():
        if site["type"] == "sample" and (what := _not_drawn(site)):
            raise ValueError(f"expected a model whose density is that of its draws, got {what} at site {name!r}")
    missing = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes() if name not in latents]
    if missing:
        raise ValueError(f"expected the true value of every latent site, got none for {missing}")
    others = {name: value for name, value in latents.items() if name not in guide.annealed}

    def given_others(of: Callable[..., Any]) -> Callable[..., Any]:
        return poutine.block(poutine.condition(of, others), hide=list(others))

    up, down = (
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
    return Sandwich(up.logsumexp(0) - log_S, log_S - (-down).logsumexp(0))


def _not_drawn(site: Any) -> str:
    """What makes the density of a site another than that of a draw from it, if anything does."""
    if site_is_factor(site):
        return "a factor"
    if not site["is_observed"] and (mask := mask_of(site)) is not None and not torch.as_tensor(mask).all():
        return "a masked latent"
    of_plates = math.prod((frame.full_size or frame.size) / frame.size for frame in site["cond_indep_stack"])
    return "" if (abs(torch.as_tensor(site["scale"] / of_plates) - 1.0) < 1e-6).all() else "a scale"
