"""GPLVMImputer without settings on many tables, beside neighbours, regressions, Gaussians, factors and mixtures."""

import math
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.table_imputers import PEERS
from benchmarks.tasks.defaults_data import SETS, Task, load_tasks
from pyro_lvgp.sklearn import GPLVMImputer

NUM_THREADS = 1
OURS = "GPLVMImputer"
LEVELS = (0.5, 0.9)
PUBLISHED: list[Row] = []
NOTES = """\
Nothing is set for any set. Each set is sub-sampled at random, with one seed for all methods, to 250 training rows, 100 new
rows and 15 columns at most; columns in which one value has 90 % are left out; columns are standardised by the training rows,
and uniform noise of the smallest distance between values makes densities of rounded columns finite. "hidden entries": a fifth
of the entries of the training rows is hidden. "new rows": the training rows have only the gaps of the set, and half of the
entries of each new row are hidden. Scores are over all hidden entries in standard deviations of the columns; NLPD is the mean
negative log predictive density in nats; coverage is that of central intervals. "fit" is fit and predictions together.
Neighbours and regressions predict points; their standard deviations are the RMSE of each column on a tenth of the training
entries. Ratios and differences are to the best peer of each task and metric, so that no single peer has them all.

"summary": shares of the tasks in which ours is at most the best peer of the task; the largest RMSE ratio; the range of
coverage; and, in the line of each peer, the shares of the tasks in which ours is at most that one peer. Counts of words
(newsgroups, congress109) and CIFAR-10 are left out."""
TASKS = {name: name for name in SETS}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all sets, or on one, and summarise them."""
    measured: list[Measurement] = []
    for name in tqdm([only] if only else list(SETS), desc="defaults", unit="set"):
        for seed in range(seeds):
            for kind, task in load_tasks(name, seed, quick=quick).items():
                rows = list(measure(f"{name}, {kind}", task, seed, max_iter=3 if quick else None))
                yield from rows
                measured += rows
    yield from summary(measured)


def measure(name: str, task: Task, seed: int, *, max_iter: int | None = None) -> Iterator[Measurement]:
    """Scores of all methods on one task.

    :param max_iter: number of steps of ours, with one fold; None for its defaults.
    """
    scores: dict[str, tuple[dict[str, float], float]] = {}
    for method in (*PEERS, OURS):
        start = time.perf_counter()
        with warnings.catch_warnings():  # of imputers and mixtures that have not converged, at their default settings
            warnings.simplefilter("ignore")
            values = _ours(task, seed, max_iter) if method == OURS else _peer(method, task, seed)
        scores[method] = values, time.perf_counter() - start
    best = {metric: min(scores[peer][0][metric] for peer in PEERS) for metric in ("RMSE", "NLPD")}
    settings: Settings = {"N": len(task.train), "D": task.train.shape[1]}
    for method, (values, seconds) in scores.items():
        for metric, value in values.items():
            yield Measurement(name, method, metric, value, seconds, settings)
        yield Measurement(name, method, "RMSE / best peer", values["RMSE"] / best["RMSE"], seconds, settings)
        yield Measurement(name, method, "NLPD - best peer", values["NLPD"] - best["NLPD"], seconds, settings)


def _peer(method: str, task: Task, seed: int) -> dict[str, float]:
    filled = PEERS[method](task.train, task.rows, seed)
    y = torch.where(task.hidden, task.truth, 0.0)
    distance = 2.0 * (filled.cdf(y) - 0.5).abs()
    return score(filled.mean, filled.log_prob(y), [distance <= level for level in LEVELS], task)


def _ours(task: Task, seed: int, max_iter: int | None) -> dict[str, float]:
    imputer = GPLVMImputer(random_state=seed)
    if max_iter is not None:
        imputer.set_params(max_iter=max_iter, n_folds=1)
    predicted = imputer.fit(task.train.float().numpy()).predictive(task.rows.float().numpy())
    y = torch.where(task.hidden, task.truth, torch.nan)
    covered = []
    for level in LEVELS:
        lower, upper = predicted.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        covered.append((lower <= y) & (y <= upper))
    return score(predicted.mean, predicted.log_prob(y), covered, task)


def score(
    mean: Float[Tensor, "B D"], log_prob: Float[Tensor, "B D"], covered: Sequence[Bool[Tensor, "B D"]], task: Task
) -> dict[str, float]:
    """Scores over the hidden entries of a task.

    :param mean: predictive means.
    :param log_prob: log predictive densities at the truth.
    :param covered: whether the truth lies in the interval of each level.
    """
    hidden = task.hidden
    shares = {
        f"coverage {level:.0%}": share[hidden].double().mean().item() for level, share in zip(LEVELS, covered, strict=True)
    }
    rmse = (mean - task.truth)[hidden].square().mean().sqrt().item()
    return {"RMSE": rmse, "NLPD": -log_prob[hidden].mean().item()} | shares


def summary(measured: Iterable[Measurement]) -> Iterator[Measurement]:
    """Share of tasks in which ours is at most the best peer, the largest ratio, and the range of coverage."""
    measured = list(measured)
    ours = [m for m in measured if m.method == OURS]
    values = {metric: [m.value for m in ours if m.metric == metric] for metric in {m.metric for m in ours}}
    seconds = statistics.mean(m.seconds for m in ours)
    number = len(values["RMSE"])
    found = {
        "tasks": number,
        "share, RMSE at most the best peer's": sum(x <= 1.0 for x in values["RMSE / best peer"]) / number,
        "share, NLPD at most the best peer's": sum(x <= 0.0 for x in values["NLPD - best peer"]) / number,
        "largest RMSE / best peer": max(values["RMSE / best peer"]),
        "least coverage 90%": min(values["coverage 90%"]),
        "largest coverage 90%": max(values["coverage 90%"]),
    }
    for metric, value in found.items():
        yield Measurement("summary", OURS, metric, value, seconds, {})
    for peer in PEERS:
        theirs = {
            metric: [m.value for m in measured if m.method == peer and m.metric == metric] for metric in ("RMSE", "NLPD")
        }
        for metric, them in theirs.items():
            share = sum(us <= it for us, it in zip(values[metric], them, strict=True)) / number
            yield Measurement("summary", peer, f"share, {metric} of ours at most this peer's", share, math.nan, {})
