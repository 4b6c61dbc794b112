"""Leave-one-out predictive densities for each datum of a plate, with local latents integrated out."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xarray
from jaxtyping import Float
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.poutine import Trace
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.diagnostics._local_plate import find_local_plate
from pyro_lvgp.diagnostics.importance_weights import pareto_k
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm, ObservedRows
from pyro_lvgp.infer import ImportanceWeightedELBO
from pyro_lvgp.infer.elbo._terms import Sites, log_prob_sum

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

__all__ = ["loo"]

_NUM_CHECKED = 10  # local draws of each draw of the globals, whose weights are checked
_MAX_K = 0.7


@names_types
@pyro_lock
def loo(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 200,
    num_local_samples: int = 100,
    reweight: bool = False,
    local_plate: str | None = None,
    chunk_size: int = 100,
    seed: int | None = 0,
    **kwargs: Any,
) -> "ELPDData":
    r"""Estimate the expected log predictive density by leaving out each datum of the plate over data.

    .. math::

        \log p(y_n \mid y_{-n}) \approx \log \frac{\sum_s w_{sn}\, p(y_n \mid \theta_s)}{\sum_s w_{sn}}, \qquad
        w_{sn} = \frac{v_s}{t_n(\theta_s)}, \qquad p(y_n \mid \theta) = \int p(y_n \mid x, \theta)\, p(x \mid \theta)\, dx

    with draws :math:`\theta_s \sim q` of the globals, the latent sites outside the plate, and Pareto-smoothed weights
    (PSIS).  A datum, such as a row of a table, is left out with all its entries, and its missing ones have no effect.

    **Local latents** are integrated out, for each :math:`\theta_s` and datum, by importance sampling from the guide's q(x).
    Chains of an annealed guide have weights of their own.  ``arviz_stats.loo_approximate_posterior`` gives the draws of
    :func:`to_arviz` one weight for all latents of all data, a product of one factor for each datum.  With some hundred of them
    a few draws have nearly all the weight, and k̂ is above 1 for every datum.

    **Likelihood.**  :math:`p(y_n \mid \theta)` is the predictive density, and :math:`t_n` the term by which the datum entered
    the fit.  They differ if that term is a bound, as of a :class:`~pyro_lvgp.models.BayesianGPLVM` with
    ``likelihood_term="svgp"``.  If they are equal and :math:`v_s = 1`, the estimate is
    :math:`-\log \frac{1}{S} \sum_s 1 / p(y_n \mid \theta_s)`.

    **Globals.**  By default :math:`v_s = 1`: the guide is taken for the posterior of the globals given all data, and k̂ says
    whether its draws reach the posterior without the datum.  A guide whose globals are much narrower than the posterior
    gives too high densities, which k̂ does not show.  With ``reweight`` :math:`v_s = p(y, \theta_s) / q(\theta_s)` corrects the
    guide.  That needs globals of few dimensions: with hundreds of inducing values or weights these weights collapse, and
    k̂ shows it.

    **Parameters** are not left out: the densities are those given parameters learned from all data, such as lengthscales,
    inducing points or networks.  If those are many, use :func:`held_out_log_prob`, which fits anew.

    :param model: a Pyro model with a plate over data, and latent sites outside of it.
    :param guide: its fitted guide.
    :param args: arguments of both, with all data.
    :param num_samples: number S of draws of the globals, 25 or more.
    :param num_local_samples: number of draws of the local latents for each draw of the globals, rounded up to a multiple of
        ``chunk_size`` if larger.
    :param reweight: weight the draws of the globals by their posterior density over that of the guide.
    :param local_plate: name of the plate over data; by default the guide's ``local_plate`` or the model's.
    :param chunk_size: number of draws of the local latents in memory at once.
    :param seed: seed of the draws; None draws from the global state.
    :returns: an :class:`arviz_stats.ELPDData` for :func:`arviz_stats.compare`, with the pointwise densities ``elpd_i`` and
        ``pareto_k`` of the weights of the globals.
    :raises ValueError: for fewer than 25 draws of the globals, without a plate over data, without latent sites outside of it,
        for a mini-batch, for a latent site that the guide lacks, or if sites outside the plate depend on draws inside it, as
        collapsed weights of a :class:`~pyro_lvgp.guides.RandomFeatureGuide` do.
    :raises TypeError: if a number is no integer.
    :warns UserWarning: if k̂ of the weights of the globals is too high for some data (from ArviZ), or that of the weights of
        the local latents, with the number of draws that it asks for.

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import fit
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(loc, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> y, guide = torch.linspace(-1.0, 1.0, 20), MeanFieldGuide(model)
    >>> history = fit(model, guide, y, num_steps=300, progress=False)
    >>> result = loo(model, guide, y, local_plate="data")
    >>> result.elpd_i.sizes, bool((result.pareto_k < 0.7).all())
    (Frozen({'data': 20}), True)

    Source: Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and
    WAIC"; Magnusson et al. (2019), "Bayesian leave-one-out cross-validation for large data", on weights of approximations.
    """
    check_sizes(least=25, num_samples=num_samples)
    check_sizes(num_local_samples=num_local_samples, chunk_size=chunk_size)
    plate = find_local_plate(model, guide, local_plate, args, kwargs, seed=seed)
    if plate is None:
        raise ValueError(
            "expected a model with a plate over data, whose members are left out one by one, got none from model or guide; "
            "pass local_plate=<its name>, or compare models of one joint observation by held_out_log_prob"
        )
    terms = _DatumTerms(plate, min(num_local_samples, chunk_size))
    num_chunks = math.ceil(num_local_samples / chunk_size)
    with torch.no_grad(), seeded(seed), eval_mode(model, guide):
        draws = [terms.draw(model, guide, num_chunks, args, kwargs) for _ in progress_bar(range(num_samples), "loo")]
    _check_local_weights(torch.cat([draw.relative_weights for draw in draws]))
    fitted, predictive = (torch.stack([getattr(draw, name) for draw in draws]) for name in ("fitted", "predictive"))
    log_v = (
        torch.stack([draw.log_ratio for draw in draws]) + fitted.flatten(1).sum(1) if reweight else torch.zeros(num_samples)
    )
    return _elpd(fitted, predictive, log_v, draws[0].dims, reweight)


@dataclass(frozen=True, eq=False)
class _Draw:
    """Terms of the data at one draw of the globals.

    :param fitted: log of the terms by which the data entered the fit.
    :param predictive: log predictive densities.
    :param log_ratio: log density of the globals, and of data outside the plate, less that of the globals under the guide.
    :param relative_weights: log weights of some draws of the local latents, less the log of the mean over all.
    :param dims: names of the plates.
    """

    fitted: Float[Tensor, "*plates"]
    predictive: Float[Tensor, "*plates"]
    log_ratio: Float[Tensor, ""]
    relative_weights: Float[Tensor, "S *plates"]
    dims: tuple[str, ...]


class _DatumTerms(ImportanceWeightedELBO):
    """Terms of the data given draws of the globals, by the weights of the bound."""

    def __init__(self, local_plate: str, num_samples: int):
        super().__init__(local_plate, num_samples, marginalize=False)

    def draw(self, model: Any, guide: Any, num_chunks: int, args: tuple, kwargs: dict) -> _Draw:
        """Draw the globals once and the local latents ``num_chunks`` times ``num_samples`` times."""
        model_sites, guide_sites = self._sample_sites(model, guide, args, kwargs)
        (_, global_model), (_, global_guide) = self._split(model_sites), self._split(guide_sites)
        _check_sites(model_sites, global_guide, self.local_plate)
        log_p, log_q = (sum(map(log_prob_sum, s.values()), torch.zeros(())) for s in (global_model, global_guide))
        given = Trace()
        for name, site in global_guide.items():
            given.add_node(name, **site)
        chunks, names = [self._log_weights(model_sites, guide_sites)], self._names(model_sites)
        for _ in range(num_chunks - 1):
            sites = self._sample_sites(model, poutine.replay(guide, trace=given), args, kwargs)
            chunks.append(self._log_weights(*sites))
        fitted, predictive = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        log_mean = fitted.logsumexp(0) - math.log(len(fitted))
        log_mean_predictive = predictive.logsumexp(0) - math.log(len(fitted))
        return _Draw(log_mean, log_mean_predictive, log_p - log_q, fitted[:_NUM_CHECKED] - log_mean, names)

    def _log_weights(self, model_sites: Sites, guide_sites: Sites) -> tuple[Tensor, Tensor]:
        """Compute log weights of the local draws with the terms of the fit and with predictive densities, ``[S, *plates]``."""
        local_model, _ = self._split(model_sites)
        local_guide, global_guide = self._split(guide_sites)
        self._check_draws(local_guide, global_guide)
        of_fit, of_prediction = (_replace_terms(local_model, terms) for terms in (_OF_FIT, _OF_PREDICTION))

        def log_weights(sites: Sites) -> Tensor:
            log_w, _, dims = self._weights(sites, local_guide)
            return log_w.reshape(log_w.shape[:1] + tuple(log_w.shape[dim] for dim in dims))

        fitted = log_weights(of_fit)
        differs = any(site["fn"] is not of_prediction[name]["fn"] for name, site in of_fit.items())
        return fitted, log_weights(of_prediction) if differs else fitted

    def _names(self, model_sites: Sites) -> tuple[str, ...]:
        """Return the names of the plates of the weights, in the order of their dimensions."""
        frames = self._plates_of_weights(list(self._split(model_sites)[0].values()))
        return tuple(frame.name for frame in sorted(frames, key=lambda frame: frame.dim))


# A term that is random is replaced by its expectation.
_OF_FIT: Mapping[LikelihoodTerm, LikelihoodTerm] = {"sampled": "svgp"}
_OF_PREDICTION: Mapping[LikelihoodTerm, LikelihoodTerm] = {"sampled": "fitc", "svgp": "fitc"}


def _replace_terms(sites: Sites, terms: Mapping[LikelihoodTerm, LikelihoodTerm]) -> Sites:
    """Replace likelihood terms in the distributions of the observed sites."""
    return {
        name: {**site, "fn": _with_term(site["fn"], terms)} if site["is_observed"] else site for name, site in sites.items()
    }


def _with_term(fn: Any, terms: Mapping[LikelihoodTerm, LikelihoodTerm]) -> Any:
    """Replace the likelihood term inside ``Independent``, masks and observed rows; return other distributions unchanged."""
    if isinstance(fn, LikelihoodPredictive):
        term = terms.get(fn.term)
        return fn if term is None else LikelihoodPredictive(fn.likelihood, fn.f_mean, fn.f_variance, term, fn.params)
    if isinstance(fn, ObservedRows):
        rows = _with_term(fn.rows, terms)
        return fn if rows is fn.rows else rows
    if isinstance(fn, torch.distributions.Independent):
        base = _with_term(fn.base_dist, terms)
        return fn if base is fn.base_dist else base.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, MaskedDistribution):
        base = _with_term(fn.base_dist, terms)
        return fn if base is fn.base_dist else MaskedDistribution(base, fn._mask)
    return fn


def _check_sites(model_sites: Sites, global_guide: Sites, plate: str) -> None:
    """Raise if leave-one-out densities of the data of a plate cannot be estimated from these sites."""
    if not global_guide:
        raise ValueError(
            f"expected latent sites outside plate {plate!r}, whose posterior changes if a datum is left out, got none: "
            "learned parameters do not change; give them priors, or use held_out_log_prob, which fits anew"
        )
    for site in model_sites.values():
        for frame in site["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"expected all {frame.full_size} rows of plate {frame.name!r}, got {frame.size}; pass all data, and for "
                    "less memory a smaller chunk_size"
                )


def _check_local_weights(relative_weights: Float[Tensor, "S *plates"]) -> None:
    """Warn if the local latents of some data need more draws, or another guide."""
    k = pareto_k(relative_weights)
    if num_high := int((k > _MAX_K).sum()):
        warnings.warn(
            f"k̂ of the weights of the local latents is above {_MAX_K} for {num_high} of {k.numel()} data, at most "
            f"{k.max():.2f}: their densities need more draws, or a guide closer to the posterior; increase num_local_samples, "
            "or fit a guide with full covariances of the local latents, or an AutoAnnealedLangevin",
            stacklevel=3,
        )


def _elpd(fitted: Tensor, predictive: Tensor, log_v: Tensor, dims: tuple[str, ...], reweight: bool) -> "ELPDData":
    """Smooth the weights log v − log t by PSIS, and summarise the densities by ArviZ."""
    import arviz_stats  # takes more than a second to import

    log_weights = log_v.reshape(-1, *[1] * len(dims)) - fitted
    values = (value.double()[None].numpy(force=True) for value in (-log_weights, predictive))
    ratios, densities = (xarray.DataArray(value, dims=("chain", "draw", *dims)) for value in values)
    smoothed, k = ratios.azstats.psislw(dim=["chain", "draw"])
    tree = xarray.DataTree.from_dict({"log_likelihood": xarray.Dataset({"y": densities})})
    result = arviz_stats.loo(tree, pointwise=True, reff=1.0, log_weights=smoothed, pareto_k=k)
    result.approx_posterior = reweight  # so that its text says that the guide was corrected
    return result
