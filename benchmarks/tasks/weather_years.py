"""GP-VAE of hidden temperatures over thirty years in Trentino: ten periods of two years to fit and one to predict."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

from tqdm import tqdm

from benchmarks.core.report import Measurement, Row
from benchmarks.tasks import weather
from benchmarks.tasks.weather_data import TRENTINO, Weather, load

NUM_THREADS = weather.NUM_THREADS
METHODS = ("VAE", "GP-VAE, linear decoder", "GP-VAE")
TASKS = {task: {name: weather.TASKS[task][name] for name in METHODS} for task in ("three days", "weeks")}
REFERENCE = weather.SAME_KERNELS
PERIODS = [replace(TRENTINO, train_years=(year, year + 1), unseen_years=(year + 2,)) for year in range(1978, 2007, 3)]
PUBLISHED: list[Row] = []
NOTES = """\
The benchmark "weather" on the last thirty years of the record instead of three: in each period of three years methods are
fitted to two years (seen), and predict hidden temperatures of these and of the third (unseen). Settings are those of
"weather", which were selected on 1996; the other nine periods were not used for any choice. Stations are those with a maximum
temperature on at least half of the days of the fitted years. The table before the last has means over the periods. The last
table has differences from independent processes with the kernels of the GP-VAE; its standard deviations are over the periods,
whose number is in the column "seeds".

NLL is the mean negative log density per hidden entry of a Gaussian with the predictive moments, "mixture NLL" that of the
mixture over 200 draws; both in nats per °C. Rows of one seed have no standard deviation."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure dense methods and their peers in every period, on three days and weeks or on one of them."""
    for task in [only] if only else TASKS:
        periods = []
        for source in tqdm(PERIODS, desc=task, unit="period"):
            periods.append(measure_period(task, load(weather.days_per_group(task), source=source), quick=quick, seeds=seeds))
            yield from periods[-1]
        yield from means(task, periods)
        yield from differences(task, periods)


def measure_period(task: str, data: Weather, *, quick: bool, seeds: int) -> list[Measurement]:
    """Measurements of the benchmark "weather" on one period, with years named seen and unseen."""
    seen, unseen = data.source.seen, data.source.unseen
    measured = weather.measure(
        f"{task}, {seen}, and {unseen} unseen", data, TASKS[task], peers=weather.PEERS, pooled={}, quick=quick, seeds=seeds
    )
    return [replace(m, metric=m.metric.replace(unseen, "unseen").replace(seen, "seen")) for m in measured]


def means(task: str, periods: list[list[Measurement]]) -> Iterator[Measurement]:
    """Means over periods of each measurement."""
    for same in zip(*periods, strict=True):
        seconds = mean(m.seconds for m in same)
        yield replace(same[0], dataset=f"{task}, all periods", value=mean(m.value for m in same), seconds=seconds)


def differences(task: str, periods: list[list[Measurement]]) -> Iterator[Measurement]:
    """Differences of the mean over seeds from the reference, for each period."""
    for period in periods:
        values: dict[tuple[str, str], list[Measurement]] = {}
        for measured in period:
            values.setdefault((measured.method, measured.metric), []).append(measured)
        for (method, metric), group in values.items():
            reference = values.get((REFERENCE, metric))
            if reference and method != REFERENCE:
                value = mean(m.value for m in group) - reference[0].value
                yield replace(group[0], dataset=f"{task}, less {REFERENCE}", value=value)
