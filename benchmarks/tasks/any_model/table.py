"""Rows of the results of a model, and of the summary over models."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpyro

from benchmarks.core.report import Measurement, Settings
from benchmarks.tasks.any_model.contest import Outcome
from benchmarks.tasks.any_model.posterior import Distance, Moments, root_mean_square

MAX_RHAT = 1.05
NUM_ERRORS = 2.0
NUTS = f"NumPyro {numpyro.__version__} NUTS"
BASE, ANNEALED = "MeanFieldGuide", "AutoAnnealedLangevin"
MEANS, LOG_STDDEVS = "means, distance [sd]", "log sds, distance"
_MAX_WORDS = 160


@dataclass(frozen=True)
class Comparison:
    """Outcomes of both guides on one model from one seed."""

    base: Outcome
    annealed: Outcome

    @property
    def gain(self) -> float:
        """Bound of the annealed guide minus that of its base, in nats; NaN unless both have one."""
        if self.base.bound is None or self.annealed.bound is None:
            return math.nan
        return self.annealed.bound.mean - self.base.bound.mean

    @property
    def gain_in_errors(self) -> float:
        """The same in standard errors."""
        if self.base.bound is None or self.annealed.bound is None:
            return math.nan
        return self.gain / math.hypot(self.base.bound.error, self.annealed.bound.error)

    @property
    def starts_as_high(self) -> bool:
        """Whether the first bound of the annealed guide is at least that of its base, minus one standard error."""
        if self.base.first is None or self.annealed.first is None:
            return False
        return self.annealed.first.mean >= self.base.first.mean - math.hypot(self.base.first.error, self.annealed.first.error)

    @property
    def has_close_means(self) -> bool:
        """Whether the means are close to those of NUTS, see :func:`is_close`."""
        return self._is_close(attrgetter("means"), attrgetter("means_error"))

    @property
    def has_close_stddevs(self) -> bool:
        """Whether the standard deviations are close to those of NUTS, see :func:`is_close`."""
        return self._is_close(attrgetter("log_stddevs"), attrgetter("log_stddevs_error"))

    def _is_close(self, distance: Callable[[Distance], float], error: Callable[[Distance], float]) -> bool:
        base, annealed = self.base.distance, self.annealed.distance
        if annealed is None:
            return False
        return is_close(distance(annealed), None if base is None else distance(base), error(annealed))


def is_close(distance: float, base: float | None, error: float) -> bool:
    """Return whether a distance is at most half that of the base, if it has one, or within two Monte Carlo errors."""
    return distance <= NUM_ERRORS * error or (base is not None and distance <= base / 2.0)


def reference_rows(model: str, reference: Moments, seconds: float, settings: Settings) -> Iterator[Measurement]:
    """Rows of NUTS: its R-hat, and its own Monte Carlo errors in the columns of the distances."""
    method = NUTS if reference.rhat <= MAX_RHAT else f"{NUTS}, no reference"
    values = {
        MEANS: root_mean_square(reference.mean_error),
        LOG_STDDEVS: root_mean_square(reference.log_stddev_error),
        "R-hat": reference.rhat,
    }
    for metric, value in values.items():
        yield Measurement(model, method, metric, value, seconds, settings)


def comparison_rows(model: str, comparison: Comparison, settings: Settings) -> Iterator[Measurement]:
    """Rows of both guides, and of the difference of their bounds."""
    yield from outcome_rows(model, BASE, comparison.base, settings)
    yield from outcome_rows(model, ANNEALED, comparison.annealed, settings)
    for metric, value in {"gain [nats]": comparison.gain, "gain [standard errors]": comparison.gain_in_errors}.items():
        yield Measurement(model, ANNEALED, metric, value, comparison.annealed.seconds, settings)


def outcome_rows(model: str, method: str, outcome: Outcome, settings: Settings) -> Iterator[Measurement]:
    """Rows of a guide, as far as its fit got, and a row whose method has the words of the error, if there was one."""
    values: dict[str, float] = {}
    if outcome.first is not None:
        values["first bound [nats]"] = outcome.first.mean
    if outcome.bound is not None:
        values |= {"bound [nats]": outcome.bound.mean, "its standard error": outcome.bound.error}
    if outcome.distance is not None:
        values |= distance_values(outcome.distance)
    for metric, value in values.items():
        yield Measurement(model, method, metric, value, outcome.seconds, settings)
    if outcome.failure is not None:
        yield Measurement(model, f"{method}: {words(outcome.failure)}", "failures", 1.0, outcome.seconds, settings)


def distance_values(distance: Distance) -> dict[str, float]:
    """Distances from NUTS by metric, with their Monte Carlo errors."""
    return {
        MEANS: distance.means,
        f"{MEANS}, error": distance.means_error,
        LOG_STDDEVS: distance.log_stddevs,
        f"{LOG_STDDEVS}, error": distance.log_stddevs_error,
    }


def summary_rows(comparisons: Sequence[Comparison], num_references: int, settings: Settings) -> Iterator[Measurement]:
    """Numbers of models on which the annealed guide does well, for one seed.

    :param comparisons: one for each model.
    :param num_references: number of models with a reference.
    """
    dataset = f"summary of {len(comparisons)} models, {num_references} of them with a reference"
    counts = {
        "first bound ≥ base − 1 se": sum(c.starts_as_high for c in comparisons),
        "bound ≥ base − 1 se": sum(c.gain_in_errors >= -1.0 for c in comparisons),
        "bound > base + 1 se": sum(c.gain_in_errors > 1.0 for c in comparisons),
        "means close to NUTS": sum(c.has_close_means for c in comparisons),
        "sds close to NUTS": sum(c.has_close_stddevs for c in comparisons),
        "failures": sum(c.annealed.failure is not None for c in comparisons),
    }
    seconds = sum(c.annealed.seconds for c in comparisons)
    for metric, count in counts.items():
        yield Measurement(dataset, f"{ANNEALED}, models", metric, float(count), seconds, settings)


def words(error: Exception) -> str:
    """Type and first words of an error, as a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]} …"
