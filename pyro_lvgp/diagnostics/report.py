"""Report of a fit: convergence, distance to the posterior, calibration, unused latents, chains and evidence."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from html import escape
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.diagnostics._fixed_model import MakeGuide, fit_guide, fixed_copy, simulate
from pyro_lvgp.diagnostics._hidden_entries import check_coverage
from pyro_lvgp.diagnostics._local_plate import find_local_plate
from pyro_lvgp.diagnostics.chain_gain import chain_gain
from pyro_lvgp.diagnostics.checks import (
    ChainCheck,
    ConvergenceCheck,
    CoverageCheck,
    EvidenceCheck,
    LatentUseCheck,
    LeaveOneOutCheck,
    WeightsCheck,
)
from pyro_lvgp.diagnostics.findings import Check, Finding, NotApplicable
from pyro_lvgp.diagnostics.importance_weights import effective_sample_size, log_weights, pareto_k
from pyro_lvgp.diagnostics.leave_one_out import loo
from pyro_lvgp.diagnostics.sandwich import bound_sandwich
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import FitResult, sample_traces
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import BayesianGPLVM

__all__ = ["Report", "report"]

_NUM_GLOBAL_DRAWS = 20  # over which the prior variance of latents is averaged
_NUM_LOO_DRAWS = 200


@dataclass(frozen=True, eq=False)
class Report:
    """Results of the checks of a fit, made by :func:`report`.

    ``print(report)`` lists the findings and a line for each check; notebooks show the same as tables.

    :param convergence: whether the bound had stopped rising.
    :param weights: Pareto k̂ and effective sample size of the importance weights of each datum.
    :param leave_one_out: expected log predictive density.
    :param coverage: coverage of predictive intervals of hidden entries.
    :param latents: use of the latent dimensions.
    :param chains: gain of the bound by the chains of an annealed guide.
    :param evidence: bounds on the evidence of simulated data from both sides.
    """

    convergence: ConvergenceCheck | NotApplicable
    weights: WeightsCheck | NotApplicable
    leave_one_out: LeaveOneOutCheck | NotApplicable
    coverage: CoverageCheck | NotApplicable
    latents: LatentUseCheck | NotApplicable
    chains: ChainCheck | NotApplicable
    evidence: EvidenceCheck | NotApplicable

    @property
    def checks(self) -> dict[str, Check]:
        """Results by the name of the check."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all checks, warnings first."""
        found = [finding for check in self.checks.values() for finding in check.findings]
        return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))

    @property
    def _title(self) -> str:
        number = sum(not isinstance(check, NotApplicable) for check in self.checks.values())
        return (
            f"{len(self.findings) or 'no'} finding{'s' * (len(self.findings) != 1)} in {number} of {len(self.checks)} checks"
        )

    def __str__(self) -> str:
        checks = [f"  {name.replace('_', ' ')}: {check.summary}" for name, check in self.checks.items()]
        return "\n".join([self._title, *(f"  {finding}" for finding in self.findings), "checks", *checks])

    def _repr_html_(self) -> str:
        findings = _table((each.severity, f"{each.text}{each.rows_text}", each.advice) for each in self.findings)
        checks = _table((name.replace("_", " "), check.summary) for name, check in self.checks.items())
        return f"<p><b>{escape(self._title)}</b></p>{findings}{checks}"


def _table(rows: Any) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{cells}</table>" if cells else ""


@names_types
@pyro_lock
def report(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    history: FitResult | None = None,
    make_guide: MakeGuide | None = None,
    num_samples: int = 400,
    hidden_share: float = 0.1,
    local_plate: str | None = None,
    vectorize: bool = True,
    seed: int = 0,
) -> Report:
    r"""Check a fit: did it converge, how far is the guide from the posterior, are its predictions calibrated.

    ===================  =============================================================================================
    ``convergence``      :attr:`~pyro_lvgp.infer.FitResult.converged` of the ``history``
    ``weights``          :func:`pareto_k` and :func:`effective_sample_size` of the :func:`log_weights` of each datum;
                         warning for :math:`\hat k > 0.7`, a note if all data have one weight
    ``leave_one_out``    :func:`loo`, for models with a plate over data and latent sites outside of it
    ``coverage``         share of hidden entries in their central 50 % and 90 % intervals, for models with a method
                         ``impute``; warning if it differs from that of simulations from the prediction by more than three
                         standard errors and 0.03
    ``latents``          :math:`\sum_n \mathrm{Var}_q[x_{nq}] / \sum_n \mathrm{Var}_p[x_{nq}]` and
                         :math:`\sum_n (E_q[x_{nq}] - E_p[x_{nq}])^2 / \sum_n \mathrm{Var}_p[x_{nq}]` of each latent
                         dimension of the data; unused if above 0.5 and below 0.05
    ``chains``           :func:`chain_gain`, for an :class:`~pyro_lvgp.guides.AutoAnnealedLangevin`
    ``evidence``         :func:`bound_sandwich` on simulated data, for an ``AutoAnnealedLangevin`` and a ``make_guide``;
                         warning for a mean gap of more than 0.5 nats
    ===================  =============================================================================================

    A check that is not defined for the model, or lacks an argument, is :class:`NotApplicable` and says why.

    **Hidden entries.**  Without ``make_guide`` the latents of the rows are inferred anew from the remaining entries, under
    globals and parameters that were fitted to the hidden entries too, which favours the model.  With ``make_guide`` a guide
    is fitted without them, and only the parameters know of them.  Neither replaces :func:`held_out_log_prob`, which fits the
    parameters anew too.

    :param model: a Pyro model.
    :param guide: its fitted guide.
    :param args: arguments of both, the data as for :func:`~pyro_lvgp.infer.fit`.
    :param history: history of the fit.
    :param make_guide: function ``make_guide(model, *args)`` that returns a new guide of the model, fitted to data, for the
        checks that need one.  It gets a copy of the model whose parameters are fixed.
    :param num_samples: number of draws of latents and importance weights.
    :param hidden_share: share of the observed entries that are hidden.
    :param local_plate: name of the plate over data; by default the guide's ``local_plate`` or the model's.
    :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: seed of all draws; the global random state does not change.
    :raises ValueError: if model and guide cannot be run on the data, there are fewer than 25 draws, or the share is not
        between 0 and 1.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import fit
    >>> with seeded(0):
    ...     Y = torch.randn(60, 1) @ torch.randn(1, 5) + 0.3 * torch.randn(60, 5)
    >>> model = BayesianGPLVM(60, 5, latent_dim=1, num_inducing=10).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> history = fit(model, guide, Y, num_steps=20, progress=False)
    >>> result = report(model, guide, Y, history=history)
    >>> result.convergence.summary
    '20 steps, too few to say whether the bound still rises'
    >>> result.chains.summary
    'not applicable: the guide has no chains; it is a MeanFieldGuide'

    Source: Gelman et al. (2020), "Bayesian workflow", for the selection of checks; each has its own source.
    """
    check_sizes(least=25, num_samples=num_samples)
    if not 0.0 < hidden_share < 1.0:
        raise ValueError(f"expected a hidden_share between 0 and 1, got {hidden_share}; divide percentages by 100")
    with seeded(seed):
        plate = find_local_plate(model, guide, local_plate, args, {}, seed=seed)
        with torch.no_grad(), poutine.block():  # errors of model, guide and data
            poutine.replay(model, trace=poutine.trace(guide).get_trace(*args))(*args)
        options: Any = {"local_plate": plate, "vectorize": vectorize, "seed": seed}
        return Report(
            NotApplicable("no history was given; pass history=fit(...)") if history is None else ConvergenceCheck(history),
            _attempt(lambda: _check_weights(model, guide, args, num_samples, **options)),
            _attempt(lambda: _check_loo(model, guide, args, plate, seed)),
            _attempt(lambda: check_coverage(model, guide, args, share=hidden_share, make_guide=make_guide, seed=seed)),
            _attempt(lambda: _check_latents(model, guide, args, num_samples, **options)),
            _attempt(lambda: _check_chains(model, guide, args, num_samples, vectorize, seed)),
            _attempt(lambda: _check_evidence(model, guide, args, make_guide, vectorize, seed)),
        )


def _attempt(check: Callable[[], Any]) -> Any:
    """Return the result of a check; not applicable if a function of this package refuses the model or the guide."""
    try:
        return check()
    except (TypeError, ValueError) as error:
        if not str(error).startswith("expected"):
            raise
        return NotApplicable(str(error))


def _check_weights(model: Any, guide: Any, args: tuple, num_samples: int, **options: Any) -> WeightsCheck:
    log_w = log_weights(model, guide, *args, num_samples=num_samples, **options)
    return WeightsCheck(pareto_k(log_w), effective_sample_size(log_w), num_samples)


def _check_loo(model: Any, guide: Any, args: tuple, plate: str | None, seed: int) -> LeaveOneOutCheck:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = loo(model, guide, *args, num_samples=_NUM_LOO_DRAWS, local_plate=plate, seed=seed)
    # ArviZ warns of what pareto_k says.
    texts = (str(each.message) for each in caught)
    messages = tuple(text for text in texts if not text.startswith("Estimated shape parameter of Pareto"))
    return LeaveOneOutCheck(float(result.elpd), float(result.se), torch.as_tensor(result.pareto_k.values.copy()), messages)


def _check_latents(
    model: Any, guide: Any, args: tuple, num_samples: int, *, local_plate: str | None, vectorize: bool, seed: int
) -> LatentUseCheck | NotApplicable:
    if local_plate is None:
        return NotApplicable("the model has no plate over data")
    options: Any = {"predict": False, "log_likelihood": False, "vectorize": vectorize, "seed": seed}
    draws = sample_traces(model, guide, *args, num_samples=num_samples, **options)
    sites = {name: s for name, s in draws.sites.items() if s.kind == "latent" and local_plate in s.plates}
    if not sites:
        return NotApplicable(f"plate '{local_plate}' has no latent sites")
    with seeded(seed):
        prior = _prior_moments(model, guide, args, list(sites))
    ratios, shifts = {}, {}
    for name, site in sites.items():
        mean, variance = site.value.mean(0), site.value.var(0)
        prior_mean, prior_variance = (moment.expand_as(mean) for moment in prior[name])
        over_data = tuple(range(mean.dim() - site.event_dim))
        total = prior_variance.sum(over_data)
        ratios[name] = (variance.sum(over_data) / total).reshape(-1)
        shifts[name] = ((mean - prior_mean).square().sum(over_data) / total).reshape(-1)
    return LatentUseCheck(ratios, shifts, _relevances(model))


def _prior_moments(model: Any, guide: Any, args: tuple, names: list[str]) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Means and variances of sites under the model's prior given draws of the globals, by the law of total variance."""
    moments: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    with torch.no_grad(), poutine.block(), eval_mode(model, guide):
        for _ in range(_NUM_GLOBAL_DRAWS):
            drawn = poutine.trace(guide).get_trace(*args)
            sites: Any = prune_subsample_sites(poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args)).nodes
            for name in names:
                fn = sites[name]["fn"]
                try:
                    moments[name].append((fn.mean, fn.variance))
                except NotImplementedError as error:
                    raise ValueError(f"expected a prior of site '{name}' with a variance, got {fn}") from error
    means, variances = ({name: torch.stack([m[i] for m in each]) for name, each in moments.items()} for i in (0, 1))
    return {name: (means[name].mean(0), variances[name].mean(0) + means[name].var(0)) for name in names}


def _relevances(model: Any) -> Tensor | None:
    if not isinstance(model, BayesianGPLVM) or not isinstance(model.kernel, RBF | Matern):
        return None
    lengthscale = torch.as_tensor(model.kernel.lengthscale).detach()
    return 1.0 / lengthscale if lengthscale.shape == (model.latent_dim,) else None


def _check_chains(
    model: Any, guide: Any, args: tuple, num_samples: int, vectorize: bool, seed: int
) -> ChainCheck | NotApplicable:
    if not isinstance(guide, AutoAnnealedLangevin):
        return NotApplicable(f"the guide has no chains; it is a {type(guide).__name__}")
    return ChainCheck(chain_gain(model, guide, *args, num_samples=num_samples, vectorize=vectorize, seed=seed))


def _check_evidence(
    model: Any, guide: Any, args: tuple, make_guide: MakeGuide | None, vectorize: bool, seed: int
) -> EvidenceCheck | NotApplicable:
    if not isinstance(guide, AutoAnnealedLangevin):
        return NotApplicable(f"only chains can be run in reverse; the guide is a {type(guide).__name__}")
    if make_guide is None:
        return NotApplicable("simulated data need a guide of their own; pass make_guide")
    *inputs, y = args
    if not (torch.is_tensor(y) and y.is_floating_point()):
        return NotApplicable("simulated data replace the last argument, which is no tensor of data; pass all data")
    name, fixed = _data_site(model, guide, args), fixed_copy(model)
    with pyro.get_param_store().scope(), seeded(seed):
        truth = simulate(fixed, tuple(inputs))
        latents: dict[str, Any] = {each: site["value"] for each, site in truth.iter_stochastic_nodes()}
        simulated = latents.pop(name).masked_fill(y.isnan(), torch.nan)
        new_guide = fit_guide(make_guide, fixed, (*inputs, simulated))
        options: Any = {"latents": latents, "vectorize": vectorize, "seed": seed}
        return EvidenceCheck(bound_sandwich(fixed, new_guide, *inputs, simulated, **options))


def _data_site(model: Any, guide: Any, args: tuple) -> str:
    """Name of the observed site; raise unless there is one."""
    with torch.no_grad(), poutine.block():
        drawn = poutine.trace(guide).get_trace(*args)
        names = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args).observation_nodes
    if len(names) != 1:
        raise ValueError(f"expected one observed site, whose values are the last argument, got {names}")
    return names[0]
