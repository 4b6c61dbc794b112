"""Distributions of observations of rows given their latents and draws of the sites that rows share."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, cast

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.validation import check_not_empty
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.distributions.normal import PrecisionNormal
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians
from pyro_lvgp.infer.protocols import SamplesGlobals
from pyro_lvgp.models._laplace import Entries
from pyro_lvgp.models._latent_rows import Guide, LatentRows
from pyro_lvgp.models.row_arguments import RowArguments


def global_draws(model: LatentRows, guide: Guide, num_samples: int) -> Iterator[dict[str, Tensor]]:
    """Sample the sites that rows share."""
    for _ in progress_bar(range(num_samples), "posterior draws"):
        yield {
            name: cast(Tensor, site["value"])
            for name, site in prune_subsample_sites(_trace_without_data(model, guide)).iter_stochastic_nodes()
            if all(frame.name != "data" for frame in site["cond_indep_stack"])
        }


def _trace_without_data(model: LatentRows, guide: Guide) -> Trace:
    """Trace of the guide without data: of the sites that rows share, and of one unobserved row if the guide needs it."""
    like = model.latent_candidates()
    row = torch.full((1, model.data_dim), torch.nan, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        draw: Guide = guide
        if isinstance(guide, SamplesGlobals):
            draw = partial(guide.sample_globals, local_plate=model.local_plate)
        return poutine.trace(draw).get_trace(row, torch.zeros(1, dtype=torch.long, device=like.device))


def predictor(model: LatentRows, guide: Guide, known: RowArguments | None) -> Entries:
    """Predictive distribution as a function of X and the indices of its rows, for one draw of the sites that rows share."""
    drawn = _trace_without_data(model, guide)
    for name in ("X", "data"):  # keep the sites that rows share
        drawn.nodes.pop(name, None)
    for site in drawn.nodes.values():
        fn: Any = site.get("fn")
        if isinstance(fn, PrecisionNormal):  # which bounds do not marginalise
            site["fn"] = fn.multivariate_normal

    def entries(X: Tensor, index: Tensor | None = None) -> LikelihoodPredictive:
        rows = known if known is None or index is None else known[index]
        conditioned = poutine.condition(model, {"X": X, "y": _any_rows(model, X)})
        replayed = poutine.replay(MarginalizeGaussians(drawn)(conditioned), drawn)
        with torch.set_grad_enabled(X.requires_grad):
            trace = poutine.trace(replayed).get_trace(None, torch.arange(len(X), device=X.device), **as_kwargs(rows))
        y = observed_rows(trace, {"X", *drawn.nodes})
        return LikelihoodPredictive(y.likelihood, y.f_mean, y.f_variance, "fitc", y.params)

    return entries


def rows_given(model: LatentRows, globals_: dict[str, Tensor], X: Tensor, rows: RowArguments | None) -> LikelihoodPredictive:
    """Distribution p(y | X, globals) of one row for each latent; raise if there are no latents."""
    check_not_empty(X, "X")
    idx = torch.arange(X.shape[-2], device=X.device)
    with torch.set_grad_enabled(X.requires_grad):
        conditioned = poutine.condition(model, {**globals_, "X": X, "y": _any_rows(model, X)})
        return observed_rows(poutine.trace(conditioned).get_trace(None, idx, **as_kwargs(rows)), {"X", *globals_})


def _any_rows(model: LatentRows, X: Tensor) -> Float[Tensor, "*particles B D"]:
    """Values of the observations of a model whose distribution alone is needed: a draw of them takes time."""
    return X.new_zeros(()).expand(*X.shape[:-1], model.data_dim)


def as_kwargs(rows: RowArguments | None) -> dict[str, Any]:
    """Keyword arguments of a model's methods, which in a subclass need not take the arguments of rows if there are none."""
    return {} if rows is None else {"rows": rows}


def observed_rows(trace: Trace, given: Collection[str]) -> LikelihoodPredictive:
    """Distribution of the observations; raise if the trace has latents that were not given, or another distribution."""
    check_all_given(trace, given)
    fn: Any = trace.nodes["y"]["fn"]
    y = fn.base_dist if isinstance(fn, dist.Independent) else fn
    if not isinstance(y, LikelihoodPredictive) or fn.event_dim != 1:
        raise TypeError(
            f"expected an Independent around a LikelihoodPredictive at the site 'y' of a model without data, got {fn}; "
            "sample y from LikelihoodPredictive(likelihood, f_mean, f_variance).rows()"
        )
    return y


def check_all_given(trace: Trace, given: Collection[str]) -> None:
    """Raise if a model sampled latents from their priors, because a guide has no such sites.

    :param trace: trace of the model.
    :param given: names of the sites whose values the guide gave.
    :raises ValueError: if a latent site of the trace is not among them.
    """
    latents = {name for name, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)} - {"y"}
    if unknown := sorted(latents - set(given)):
        raise ValueError(
            f"expected a guide of all latent sites of the model, got one without {unknown}; create the guide after all priors "
            "of the model are set, and fit it; make known quantities frozen parameters, instead of conditioning their sites"
        )
