"""GPLVMImputer and GPVAERegressor without settings on many tables and series, beside seven other methods."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row
from benchmarks.peers import series_imputers, table_imputers
from benchmarks.peers.table_imputers import Filled
from benchmarks.tasks.defaults_data import LARGE, LARGE_SETS, QUICK, SETS, SMALL, Task, load_tasks
from benchmarks.tasks.defaults_series import SERIES, load_series
from pyro_lvgp.diagnostics import shifted_folds
from pyro_lvgp.models import Prediction
from pyro_lvgp.sklearn import GPLVMImputer, GPVAERegressor

NUM_THREADS = 1
OURS = ("GPLVMImputer", "GPVAERegressor")  # of tables and of series
PEERS = (*table_imputers.PEERS, *series_imputers.PEERS)
LEVELS = (0.5, 0.9)
PUBLISHED: list[Row] = []
NOTES = """\
Nothing is set for any set. Columns in which one value has 90 %, or that are seen in less than half of the rows, are left out,
and 15 of the others are drawn; columns are standardised, and uniform noise of the smallest distance between values makes
densities of rounded columns finite. All draws have one seed for all methods. Scores are over all hidden entries in standard
deviations of the columns; NLPD is the mean negative log predictive density in nats; coverage is that of central intervals.
"fit" is fit and predictions together; N and D are the sizes of the training rows.

Tables are sub-sampled at random to 250 training rows and 100 new rows at most, and standardised by the training rows.
"hidden entries": a fifth of the entries of the training rows is hidden. "new rows": the training rows have only the gaps of
the set, and half of the entries of each new row are hidden. Ours is GPLVMImputer. "large": some sets with 1500 training rows
and 60 columns at most.

"gaps in series": at most 500 consecutive rows of a table over time. In each column of a fifth of them, at least one, a block
of 20 % of the rows is hidden, and in all columns a block of 5 % of the rows, at random places. Ours is GPVAERegressor, with
period=24 for hourly data as in docs/gp_vae.md; methods for tables take the rows as training rows.

Sets are those of the shared data, of scikit-learn and of statsmodels that come with their libraries and have 50 rows and four
numeric columns that vary; of statsmodels' sets, columns that only number the rows (year, quarter, individual) are left out.
Series are those whose rows are times; of the ten EEG trials the first three. Counts of words (newsgroups, congress109) and
CIFAR-10 are left out.

Neighbours, regressions and interpolation predict points; their standard deviations are the RMSE of each column on training
entries that are held out: a tenth at random, or, in series, those under the gaps at another place. Independent GPs are
Matérn-3⁄2, or Matérn-½ and daily with a period. Ratios and differences are to the best peer of each task and metric, so that
no single peer has them all.

"summary": shares of the tasks in which ours is at most the best peer of the task; the largest RMSE ratio; the range of
coverage; and, in the line of each peer, the shares of its tasks in which ours is at most that one peer. First for all tasks,
then for each kind."""
GROUPS = {"tables": tuple(SETS), "large": LARGE_SETS, "series": tuple(SERIES)}
TASKS = [*GROUPS, *dict.fromkeys([*SETS, *SERIES])]


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all sets, on those of a group, or on one, and summarise them."""
    groups = [only] if only in GROUPS else list(GROUPS)
    names = dict.fromkeys(name for group in groups for name in GROUPS[group]) if only in (None, *GROUPS) else [only]
    measured: dict[str, list[Measurement]] = {}  # by kind of task
    for name in tqdm(names, desc="defaults", unit="set"):
        for seed in range(seeds):
            for kind, task in _load(name, groups, seed, quick).items():
                rows = list(measure(f"{name}, {kind}", task, seed, max_iter=3 if quick else None))
                yield from rows
                measured.setdefault(kind, []).extend(rows)
    yield from summary("summary", [row for rows in measured.values() for row in rows])
    for kind, rows in measured.items():
        yield from summary(f"summary, {kind}", rows)


def _load(name: str, groups: Collection[str], seed: int, quick: bool) -> dict[str, Task]:
    """Tasks of a set by their kind, of some of the groups."""
    tables = load_tasks(name, seed, QUICK if quick else SMALL) if name in SETS and "tables" in groups else {}
    if name in LARGE_SETS and "large" in groups:
        large = load_tasks(name, seed, QUICK if quick else LARGE)
        tables |= {f"{kind}, large": task for kind, task in large.items()}
    series = {"gaps in series": load_series(name, seed, quick=quick)} if name in SERIES and "series" in groups else {}
    return tables | series


def measure(name: str, task: Task, seed: int, *, max_iter: int | None = None) -> Iterator[Measurement]:
    """Scores of all methods on one task.

    :param max_iter: number of steps of ours, with one fold; None for its defaults.
    """
    peers = _peers(task, seed)
    methods: dict[str, Callable[[], dict[str, float]]] = {peer: partial(_score_peer, peers[peer], task) for peer in peers}
    ours = OURS[task.t is not None]
    methods[ours] = partial(_score_ours, task, seed, max_iter)
    scores: dict[str, tuple[dict[str, float], float]] = {}
    for method, find in methods.items():
        start = time.perf_counter()
        with warnings.catch_warnings():  # of imputers and mixtures that have not converged, at their default settings
            warnings.simplefilter("ignore")
            values = find()
        scores[method] = values, time.perf_counter() - start
    best = {metric: min(scores[peer][0][metric] for peer in peers) for metric in ("RMSE", "NLPD")}
    for method, (values, seconds) in scores.items():
        for metric, value in values.items():
            yield Measurement(name, method, metric, value, seconds, {})
        yield Measurement(name, method, "RMSE / best peer", values["RMSE"] / best["RMSE"], seconds, {})
        yield Measurement(name, method, "NLPD - best peer", values["NLPD"] - best["NLPD"], seconds, {})
    for metric, size in zip(("N", "D"), task.train.shape, strict=True):  # those of a set with gaps depend on the seed
        yield Measurement(name, ours, metric, size, scores[ours][1], {})


def _peers(task: Task, seed: int) -> dict[str, Callable[[], Filled]]:
    """Predictions of all peers of a task."""
    held_out = table_imputers.random_tenth(task.train, seed) if task.t is None else shifted_folds(task.train, 1)[0]
    peers: dict[str, Callable[[], Filled]] = {
        name: partial(peer, task.train, task.rows, held_out, seed) for name, peer in table_imputers.PEERS.items()
    }
    if task.t is not None:
        for name, peer in series_imputers.PEERS.items():
            peers[name] = partial(peer, task.t, task.train, held_out, task.period)
    return peers


def _score_peer(predict: Callable[[], Filled], task: Task) -> dict[str, float]:
    filled = predict()
    y = torch.where(task.hidden, task.truth, 0.0)
    distance = 2.0 * (filled.cdf(y) - 0.5).abs()
    return score(filled.mean, filled.log_prob(y), [distance <= level for level in LEVELS], task)


def _score_ours(task: Task, seed: int, max_iter: int | None) -> dict[str, float]:
    predicted = _predict(task, seed, {} if max_iter is None else {"max_iter": max_iter, "n_folds": 1})
    y = torch.where(task.hidden, task.truth, torch.nan)
    covered = []
    for level in LEVELS:
        lower, upper = predicted.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        covered.append((lower <= y) & (y <= upper))
    return score(predicted.mean, predicted.log_prob(y), covered, task)


def _predict(task: Task, seed: int, options: dict[str, int]) -> Prediction:
    if task.t is not None:
        return GPVAERegressor(period=task.period).set_params(**options).fit(task.t, task.train).predict()
    imputer = GPLVMImputer(random_state=seed).set_params(**options)
    return imputer.fit(task.train.float().numpy()).predictive(task.rows.float().numpy())


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


def summary(name: str, measured: Sequence[Measurement]) -> Iterator[Measurement]:
    """Share of tasks in which ours is at most the best peer, the largest ratio, and the range of coverage.

    :param name: name of the tasks.
    :param measured: scores of all methods on these tasks.
    """
    ours = [m for m in measured if m.method in OURS]
    method = " and ".join(dict.fromkeys(m.method for m in ours))
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
        yield Measurement(name, method, metric, value, seconds, {})
    for peer in PEERS:
        yield from _against(peer, name, measured)


def _against(peer: str, name: str, measured: Sequence[Measurement]) -> Iterator[Measurement]:
    """Shares of the tasks that a peer has in which ours is at most the peer."""
    for metric in ("RMSE", "NLPD"):
        theirs = [m for m in measured if m.method == peer and m.metric == metric]
        tasks = {m.dataset for m in theirs}
        ours = [m for m in measured if m.method in OURS and m.metric == metric and m.dataset in tasks]
        if theirs:
            share = sum(a.value <= b.value for a, b in zip(ours, theirs, strict=True)) / len(theirs)
            yield Measurement(name, peer, f"share, {metric} of ours at most this peer's", share, math.nan, {})
