"""Results of the checks of a fit: their numbers, a line of text for each, and the findings that follow."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp.diagnostics.chain_gain import ChainGain
from pyro_lvgp.diagnostics.findings import Finding
from pyro_lvgp.diagnostics.sandwich import Sandwich
from pyro_lvgp.infer import FitResult

__all__ = [
    "ChainCheck",
    "ConvergenceCheck",
    "CoverageCheck",
    "EvidenceCheck",
    "IntervalCoverage",
    "LatentUseCheck",
    "LeaveOneOutCheck",
    "WeightsCheck",
]

_MAX_K = 0.7  # at which importance weights still correct a guide
_LEAST_SHIFT, _LEAST_RATIO = 0.05, 0.5  # of a latent dimension in use, and of one whose posterior is near its prior
_NUM_ERRORS = 3.0  # of a coverage
_LEAST_DEVIATION = 0.03  # of a coverage that matters
_MAX_GAP = 0.5  # nats per datum
_CLOSER_GUIDE = "a guide closer to the posterior: full covariances (covariance=...), AutoAnnealedLangevin, or more steps"


@dataclass(frozen=True)
class ConvergenceCheck:
    """Whether the bound had stopped rising at the end of a fit.

    :param history: history of the fit.
    """

    history: FitResult

    @property
    def converged(self) -> bool | None:
        """Whether the gain of the bound is negligible; None for too few steps to say."""
        return self.history.converged

    @property
    def summary(self) -> str:
        """Gain of the bound, in a line of text."""
        gain, steps = self.history.gain, len(self.history.losses)
        if gain is None:
            return f"{steps} steps, too few to say whether the bound still rises"
        return f"{'converged' if self.converged else 'not converged'}; change of the bound at the end: {gain}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """A bound that still rises, or a fit that is too short or was interrupted."""
        found = []
        if self.converged is False:
            text = f"the bound had not converged: it rose by {self.history.gain} at the end of the fit"
            found.append(Finding("warning", text, 'fit(..., num_steps="auto"), or more steps; a second call continues'))
        if self.converged is None:
            text = f"{len(self.history.losses)} steps are too few to say whether the bound has converged"
            found.append(Finding("note", text, "500 steps and 40 epochs or more"))
        if self.history.interrupted:
            found.append(Finding("note", "the fit was interrupted", "fit again, which continues"))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class WeightsCheck:
    """Importance weights of the guide: of each datum given the globals [N], or of all data jointly [].

    :param pareto_k: shape k̂ of the tail of the weights.
    :param effective_sample_size: Kish's effective sample size of the draws.
    :param num_samples: number of draws.
    """

    pareto_k: Float[Tensor, "..."]
    effective_sample_size: Float[Tensor, "..."]
    num_samples: int

    @property
    def rows(self) -> Int[Tensor, " rows"]:
        """Indices of the data whose k̂ is above 0.7, highest first."""
        return _worst(self.pareto_k.reshape(-1), _MAX_K)

    @property
    def summary(self) -> str:
        """Share of data with a high k̂, and effective sample sizes, in a line of text."""
        k, ess = self.pareto_k.reshape(-1), self.effective_sample_size.reshape(-1)
        if k.numel() == 1:
            return f"k̂ {k.item():.2f}, effective sample size {ess.item():.0f} of {self.num_samples}, of all data jointly"
        return (
            f"k̂ above {_MAX_K} for {len(self.rows)} of {k.numel()} data, at most {k.max():.2f}; effective sample size of "
            f"{self.num_samples} draws: median {ess.median():.0f}, least {ess.min():.0f}"
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Data whose weights have a high k̂."""
        if not len(self.rows):
            return ()
        if self.pareto_k.numel() == 1:
            text = f"k̂ of the joint weights is {self.pareto_k.item():.2f}, above {_MAX_K}"
            # The weights of many latents collapse even if the guide is close in each.
            return (Finding("note", f"{text}: the guide is far from the posterior, or there are many latents", _CLOSER_GUIDE),)
        text = f"k̂ is above {_MAX_K} for {len(self.rows)} of {self.pareto_k.numel()} data"
        advice = f"{_CLOSER_GUIDE}; look at these rows for outliers"
        return (Finding("warning", f"{text}: the guide is far from their posterior", advice, tuple(self.rows.tolist())),)


@dataclass(frozen=True, eq=False)
class LeaveOneOutCheck:
    """Expected log predictive density by leaving out each datum.

    :param elpd: estimate, in nats.
    :param standard_error: its standard error over data.
    :param pareto_k: k̂ of the weights of the globals, of each datum.
    :param messages: warnings of the estimate.
    """

    elpd: float
    standard_error: float
    pareto_k: Float[Tensor, "..."]
    messages: tuple[str, ...] = ()

    @property
    def rows(self) -> Int[Tensor, " rows"]:
        """Indices of the data whose k̂ is above 0.7, highest first."""
        return _worst(self.pareto_k.reshape(-1), _MAX_K)

    @property
    def summary(self) -> str:
        """Estimate with its standard error, in a line of text."""
        return (
            f"elpd {self.elpd:.1f} ± {self.standard_error:.1f} nats; k̂ of the globals above {_MAX_K} for {len(self.rows)} "
            f"of {self.pareto_k.numel()} data"
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Data without which the posterior of the globals would differ, and warnings of the estimate."""
        found = [Finding("note", f"loo: {message}", "held_out_log_prob, which fits anew") for message in self.messages]
        if len(self.rows):
            text = f"the posterior of the globals depends on {len(self.rows)} of {self.pareto_k.numel()} single data"
            advice = "look at these rows for outliers; compare models by held_out_log_prob, which fits anew"
            found.append(Finding("note", f"{text} (k̂ of loo above {_MAX_K})", advice, tuple(self.rows.tolist())))
        return tuple(found)


@dataclass(frozen=True)
class IntervalCoverage:
    """Coverage of the central intervals of hidden entries at one level.

    :param level: level of the intervals.
    :param coverage: share of the hidden entries in their interval.
    :param standard_error: its standard error, with the entries of a row as dependent.
    :param expected: share of simulations from the prediction in the interval: the level, but more for discrete data.
    """

    level: float
    coverage: float
    standard_error: float
    expected: float

    @property
    def deviation(self) -> float:
        """Coverage minus the expected one, in standard errors."""
        return (self.coverage - self.expected) / self.standard_error

    @property
    def deviates(self) -> bool:
        """Whether the deviation is more than three standard errors and more than 0.03."""
        return abs(self.deviation) > _NUM_ERRORS and abs(self.coverage - self.expected) > _LEAST_DEVIATION


@dataclass(frozen=True)
class CoverageCheck:
    """Coverage of predictive intervals of entries that were hidden.

    :param intervals: coverage at each level.
    :param num_hidden: number of hidden entries.
    :param rows: rows with more hidden entries outside their widest interval than twice the number expected, worst first.
    :param fitted_anew: whether a guide was fitted without the hidden entries; otherwise only latents of rows were inferred
        without them, under globals that were fitted to them.
    """

    intervals: tuple[IntervalCoverage, ...]
    num_hidden: int
    rows: tuple[int, ...]
    fitted_anew: bool

    @property
    def summary(self) -> str:
        """Coverages, in a line of text."""
        parts = [
            f"{each.level:.0%} intervals cover {each.coverage:.1%} ± {each.standard_error:.1%}"
            + (f" (expected {each.expected:.1%})" if abs(each.expected - each.level) > 0.02 else "")
            for each in self.intervals
        ]
        how = "a guide fitted without them" if self.fitted_anew else "latents inferred without them"
        return f"{'; '.join(parts)} of {self.num_hidden} hidden entries, by {how}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Intervals that cover too few or too many entries."""
        found = []
        for each in self.intervals:
            if not each.deviates:
                continue
            is_narrow = each.coverage < each.expected
            text = (
                f"{each.level:.0%} intervals of hidden entries are too {'narrow' if is_narrow else 'wide'}: they cover "
                f"{each.coverage:.1%} ± {each.standard_error:.1%}, expected {each.expected:.1%}"
            )
            advice = (
                "a larger noise or one for each column, a StudentT likelihood, fewer latent dimensions, or calibrate(...)"
                if is_narrow
                else "more steps, less noise, or calibrate(...)"
            )
            found.append(Finding("warning" if is_narrow else "note", text, advice, self.rows if is_narrow else ()))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class LatentUseCheck:
    """Use of the dimensions of the latents of the data: distance of their posterior from their prior.

    :param ratios: posterior variance over prior variance of each dimension, averaged over data, by site; near 1 for a
        dimension of which data say nothing.
    :param shifts: squared distance of the posterior mean from the prior mean over prior variance; near 0 for such a dimension.
    :param relevances: 1 / lengthscale of each dimension, for a ``BayesianGPLVM`` whose kernel has one for each; else None.
    """

    ratios: Mapping[str, Float[Tensor, " dims"]]
    shifts: Mapping[str, Float[Tensor, " dims"]]
    relevances: Float[Tensor, " dims"] | None = None

    @property
    def unused(self) -> dict[str, list[int]]:
        """Dimensions with a shift below 0.05 and a ratio above 0.5, by site; sites without such dimensions are left out."""
        near_prior = {site: (self.shifts[site] < _LEAST_SHIFT) & (self.ratios[site] > _LEAST_RATIO) for site in self.ratios}
        dims = {site: mask.nonzero().flatten().tolist() for site, mask in near_prior.items()}
        return {site: unused for site, unused in dims.items() if unused}

    @property
    def summary(self) -> str:
        """Ratios and relevances, in a line of text."""
        parts = [f"{site} {_numbers(ratio)}" for site, ratio in self.ratios.items()]
        relevances = "" if self.relevances is None else f"; relevance {_numbers(self.relevances)}"
        return f"posterior / prior variance of {', '.join(parts)}{relevances}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Dimensions whose posterior is the prior."""
        return tuple(
            Finding(
                "note",
                f"{len(dims)} of {self.ratios[site].numel()} dimensions of site '{site}' are unused: the posterior of "
                f"dimensions {', '.join(map(str, dims))} is the prior",
                "fewer latent dimensions; or, if all are unused, other initial values, less initial noise or scaled data",
            )
            for site, dims in self.unused.items()
        )


@dataclass(frozen=True)
class ChainCheck:
    """Gain of the bound by the chains of an annealed guide.

    :param gain: gain of each datum.
    """

    gain: ChainGain

    @property
    def summary(self) -> str:
        """Mean gain and the number of data with a loss, in a line of text."""
        value = self.gain.value.reshape(-1)
        return f"mean gain {value.mean():.3g} nats; {len(self.gain.worse)} of {value.numel()} data lose"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Data whose chains lower the bound or diverge."""
        if not len(rows := self.gain.worse):
            return ()
        value = self.gain.value.reshape(-1)
        diverging = int((~value.isfinite()).sum())
        text = f"chains lower the bound of {len(rows)} of {value.numel()} data, of which {diverging} diverge"
        advice = "smaller steps (step_size=...), OverdampedLangevin(max_drift=...), or a base guide closer to the posterior"
        return (Finding("warning", text, advice, tuple(rows.tolist()) if value.numel() > 1 else ()),)


@dataclass(frozen=True)
class EvidenceCheck:
    """Lower and upper bounds on the log evidence of simulated data.

    :param sandwich: bounds of each datum, or of all data jointly.
    """

    sandwich: Sandwich

    @property
    def summary(self) -> str:
        """Mean bounds and their gap, in a line of text."""
        lower, upper = self.sandwich.lower.mean(), self.sandwich.upper.mean()
        return f"{lower:.2f} ≤ log evidence ≤ {upper:.2f} nats per datum of simulated data; gap {upper - lower:.2g}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """A gap of more than half a nat per datum."""
        gap = self.sandwich.gap.reshape(-1)
        error = gap.std() / len(gap) ** 0.5 if len(gap) > 1 else gap.new_zeros(())
        if gap.mean() - 2.0 * error <= _MAX_GAP:
            return ()
        text = f"the bounds on the evidence of simulated data differ by {gap.mean():.2g} nats per datum"
        return (Finding("warning", text, "more transitions (num_steps=...), or a base guide closer to the posterior"),)


def _worst(values: Float[Tensor, " N"], threshold: float) -> Int[Tensor, " rows"]:
    """Return the indices of values above a threshold, or NaN, greatest first."""
    rows = (~(values <= threshold)).nonzero()[:, 0]
    return rows[values[rows].nan_to_num(torch.inf, posinf=torch.inf).argsort(descending=True)]


def _numbers(values: Float[Tensor, " dims"]) -> str:
    return "[" + ", ".join(f"{value:.2g}" for value in values.tolist()) + "]"
