"""Aggregation of measurements over seeds, and output as a markdown table or JSON."""

import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

Settings = dict[str, str | int | float]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurement:
    """Value of a metric for one seed.

    :param dataset: name of the data.
    :param method: name of the fitted method and of its library.
    :param metric: name of the metric, with its unit.
    :param value: value of the metric.
    :param seconds: wall seconds of the fit.
    :param settings: settings of the method, the same for every seed.
    """

    dataset: str
    method: str
    metric: str
    value: float
    seconds: float
    settings: Settings


@dataclass(frozen=True)
class Row:
    """Mean of a metric of a method over seeds, or a published figure, which has no seconds.

    :param sd: sample standard deviation over seeds; None for one seed.
    :param seeds: number of seeds.
    :param seconds: mean wall seconds of the fit per seed.
    """

    dataset: str
    method: str
    metric: str
    mean: float
    sd: float | None
    seeds: int
    seconds: float | None
    settings: Settings


def aggregate(measurements: Iterable[Measurement]) -> list[Row]:
    """Compute mean and standard deviation over seeds for each dataset, method and metric, in order of first appearance.

    :raises ValueError: if the settings of a method differ between seeds.

    >>> runs = [Measurement("toy", "ours", "error", value, 2.0, {}) for value in (1.0, 3.0)]
    >>> aggregate(runs)[0].mean, round(aggregate(runs)[0].sd, 3)
    (2.0, 1.414)
    """
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for measurement in measurements:
        key = (measurement.dataset, measurement.method, measurement.metric)
        groups.setdefault(key, []).append(measurement)
    rows = []
    for key, group in groups.items():
        if any(m.settings != group[0].settings for m in group):
            raise ValueError(
                f"expected the same settings for every seed of {key}, got {[m.settings for m in group]}; "
                "give a method with other settings another name"
            )
        values = [m.value for m in group]
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None  # NaN stays NaN
        seconds = statistics.mean(m.seconds for m in group)
        rows.append(Row(*key, statistics.mean(values), sd, len(values), seconds, group[0].settings))
    return rows


def to_markdown(rows: Sequence[Row]) -> str:
    """Format a table for each dataset, with a line for each method and a column for each metric, and settings below."""
    return "\n\n".join(_table([row for row in rows if row.dataset == name]) for name in _unique(r.dataset for r in rows))


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a list of objects with the fields of :class:`Row`."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def environment() -> str:
    """Describe versions and hardware of the process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA"
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )


def _table(rows: Sequence[Row]) -> str:
    metrics, methods = _unique(row.metric for row in rows), _unique(row.method for row in rows)
    cells = {(row.method, row.metric): _cell(row) for row in rows}
    by_method = {row.method: row for row in reversed(rows)}
    lines = [[rows[0].dataset, *metrics, "fit [s]", "seeds"], ["---", *["---:"] * (len(metrics) + 2)]]
    for method in methods:
        row = by_method[method]
        seconds = "–" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append([method, *(cells.get((method, metric), "–") for metric in metrics), seconds, str(row.seeds)])
    by_settings: dict[str, list[str]] = {}
    for name in methods:
        by_settings.setdefault(", ".join(f"{k} = {v}" for k, v in by_method[name].settings.items()), []).append(name)
    settings = [f"- {'all' if len(by_settings) == 1 else '; '.join(names)}: {text}" for text, names in by_settings.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + "\n".join(settings)


def _cell(row: Row) -> str:
    return f"{row.mean:.4g}" if row.sd is None else f"{row.mean:.4g} ± {row.sd:.2g}"


def _unique(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
