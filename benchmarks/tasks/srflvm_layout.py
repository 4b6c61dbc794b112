"""Random-feature LVM from a t-SNE layout by one call: nearest neighbours of training and new rows in two dimensions."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.core.scores import neighbour_accuracy
from benchmarks.tasks import srflvm
from benchmarks.tasks.srflvm import Latents, Task, compiled_umap, tsne
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.models import RandomFeatureLVM

NUM_THREADS = 1
TASKS = {name: task for name, task in srflvm.TASKS.items() if name != "s_curve"}
MOST_ROWS, TRAINING_SHARE, NUM_STEPS, INIT_SCALE, QUICK_STEPS, QUICK_ROWS = 500, 0.8, 200, 0.02, 2, 120
MOST_COLLAPSED = 20  # columns of counts, for each of which collapsed weights have a Cholesky factor
TSNE = "t-SNE"
ACCURACY, DIFFERENCE, NEW = "1-NN", "1-NN − t-SNE", "1-NN, new rows"
SURE, UNSURE, START, BOUND = "… surer half", "… other half", "1-NN at the start", "negative bound per row [nats]"
PUBLISHED: list[Row] = []
NOTES = f"""\
{MOST_ROWS} rows of each set at most, {100 * TRAINING_SHARE:.0f} % of them for training. "1-NN" is the accuracy of one nearest
neighbour in two dimensions among training rows, the mean over five folds; "new rows" that of the other rows, whose neighbours
are training rows. A seed is that of the split, of the folds and of all methods. "1-NN − t-SNE" is the difference of one seed,
whose spread is smaller than that of its parts. "Surer half" are the new rows whose posterior of the latents has a smaller
standard deviation than the median. "All columns" are nearest neighbours among the data themselves, without a map. t-SNE has no
new rows; UMAP has `transform`, and ours `infer_latents`, with default arguments.

Ours are `RandomFeatureLVM.from_data(Y, 2)`, from PCA, and `from_data(Y, 2, layout="tsne")`, with latents that are learned or
frozen at the layout. No setting depends on the set: guides have Gaussian frequencies, an initial standard deviation of
{INIT_SCALE} and, for counts of more than {MOST_COLLAPSED} columns, shared weights; fits have {NUM_STEPS} steps of Adam with a
rate that falls from 0.02 to 0. Ours have the raw counts of bridges, montreal and newsgroups, whose likelihood is then negative
binomial, and their layout is t-SNE of the inverse link of the counts. All other data, and the data of the other methods, have
standardised columns; images are centred and divided by one number.
Frozen latents have the accuracy of their layout by construction."""


class Map(NamedTuple):
    """Two-dimensional map of training rows and of new rows.

    :param train: latents of the training rows.
    :param new: latents of the new rows; None where a method has none.
    :param spread: standard deviations of the latents of the new rows; None where a method has none.
    :param others: other scores.
    """

    train: Latents
    new: Latents | None = None
    spread: Float[np.ndarray, " M"] | None = None
    others: dict[str, float] | None = None


class Split(NamedTuple):
    """Training rows and new rows."""

    train: Task
    new: Task
    seed: int


def split(task: Task, seed: int) -> Split:
    """Divide rows at random; standardise new rows as training rows are."""
    order = np.random.default_rng(seed).permutation(len(task.Y))
    number = round(TRAINING_SHARE * len(order))
    train, new = (replace(task, Y=task.Y[rows], target=task.target[rows]) for rows in (order[:number], order[number:]))
    return Split(train, new, seed)


def standardised(given: Split) -> tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "M D"]]:
    """Training rows and new rows, by the moments of the training rows."""
    train = given.train
    centre = train.Y.mean(0)
    scale = (train.Y - centre).std() if train.image else (train.Y - centre).std(0)
    scale = np.where(scale > 0.0, scale, 1.0)
    return (train.Y - centre) / scale, (given.new.Y - centre) / scale


def all_columns(given: Split, num_steps: int) -> Map:
    """The data themselves."""
    return Map(*standardised(given))


def neighbour_embedding(given: Split, num_steps: int) -> Map:
    """t-SNE, which does not place new rows."""
    return Map(tsne(given.train, given.seed, 0))


def umap(given: Split, num_steps: int) -> Map:
    """UMAP and its transform."""
    train, new = standardised(given)
    num_threads = torch.get_num_threads()
    fitted = compiled_umap()(n_components=2, n_jobs=1, random_state=given.seed).fit(train)
    found = Map(fitted.embedding_, fitted.transform(new))
    torch.set_num_threads(num_threads)
    return found


def ours(given: Split, num_steps: int, *, layout: Any = None, freeze_latents: bool = False) -> Map:
    """Fit our model, and infer the latents of new rows."""
    rows = (given.train.Y, given.new.Y) if given.train.counts else standardised(given)
    Y, Y_new = (torch.as_tensor(part, dtype=torch.float32) for part in rows)
    model = RandomFeatureLVM.from_data(Y, 2, layout=layout, seed=given.seed)
    start = neighbour_accuracy(model.initial_values["X"].numpy(), given.train.target, seed=given.seed)
    has_shared = given.train.counts and Y.shape[1] > MOST_COLLAPSED
    options: Any = {"weights": "shared"} if has_shared else {}
    options |= {"init_scale": INIT_SCALE, "freeze_latents": freeze_latents, "seed": given.seed}
    guide = RandomFeatureGuide(model, frequencies="gaussian", **options)
    loss, callbacks = MeanFieldELBO(num_samples=1, max_plate_nesting=1), [LRSchedule("cosine")]
    how: Any = {"loss": loss, "callbacks": callbacks, "num_steps": num_steps, "seed": given.seed, "progress": False}
    losses = fit(model, guide, Y, optim=guide.blocks(), **how).losses
    latents = model.infer_latents(guide, Y_new, seed=given.seed)
    with torch.no_grad():
        spread: Tensor = latents.variance.sum(-1).sqrt()
        others = {START: start, BOUND: float(np.mean(losses[-30:])) / len(Y)}
        return Map(guide.latents().mean.numpy(), latents.mean.numpy(), spread.numpy(), others)


_OURS: Settings = {"F": 100, "steps": NUM_STEPS}
Methods = dict[str, tuple[Callable[[Split, int], Map], Settings]]
METHODS: Methods = {
    "all columns": (all_columns, {}),
    TSNE: (neighbour_embedding, {"perplexity": 30}),
    "UMAP": (umap, {"neighbours": 15}),
    "RandomFeatureLVM, from PCA": (ours, _OURS),
    'RandomFeatureLVM, layout="tsne"': (partial(ours, layout="tsne"), _OURS),
    'RandomFeatureLVM, layout="tsne", frozen': (partial(ours, layout="tsne", freeze_latents=True), _OURS),
}


def scores(found: Map, given: Split) -> dict[str, float]:
    """Accuracies of nearest neighbours of training rows, and of new rows among training rows."""
    classes, new_classes = given.train.target, given.new.target
    values = {ACCURACY: neighbour_accuracy(found.train, classes, seed=given.seed)}
    if found.new is not None:
        is_right = right(found.train, classes, found.new, new_classes)
        values[NEW] = float(is_right.mean())
        if found.spread is not None:
            is_sure = found.spread <= np.median(found.spread)
            values |= {SURE: float(is_right[is_sure].mean()), UNSURE: float(is_right[~is_sure].mean())}
    return values | (found.others or {})


def right(
    X: Latents, classes: Shaped[np.ndarray, " N"], new: Latents, new_classes: Shaped[np.ndarray, " M"]
) -> Shaped[np.ndarray, " M"]:
    """Whether the nearest training row of each new row has its class."""
    return KNeighborsClassifier(1).fit(X, classes).predict(new) == new_classes


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all sets, or on one, for each seed; if quick, with few steps on some of the rows of one."""
    compiled_umap()
    yield from measured(METHODS, quick=quick, seeds=seeds, only=only, num_steps=NUM_STEPS)


def measured(methods: Methods, *, quick: bool, seeds: int, only: str | None, num_steps: int) -> Iterator[Measurement]:
    """Measure methods on all sets, or on one, for each seed; if quick, with few steps on some of the rows of one."""
    for name in [only] if only else list(TASKS)[: 1 if quick else None]:
        task = TASKS[name]()
        number = QUICK_ROWS if quick else MOST_ROWS
        task = task.some(number) if len(task.Y) > number else task
        for seed in tqdm(range(seeds), desc=name, unit="seed"):
            yield from measure(methods, name, task, seed=seed, num_steps=QUICK_STEPS if quick else num_steps)


def measure(methods: Methods, dataset: str, task: Task, *, seed: int, num_steps: int) -> Iterator[Measurement]:
    """Scores of methods on one split."""
    given = split(task, seed)
    of_tsne = None
    for method, (embed, settings) in methods.items():
        with isolated(seed):
            start = time.perf_counter()
            found = embed(given, num_steps)
            seconds = time.perf_counter() - start
        values = scores(found, given)
        of_tsne = values[ACCURACY] if method == TSNE else of_tsne
        if of_tsne is not None and method != TSNE:
            values[DIFFERENCE] = values[ACCURACY] - of_tsne
        own = settings | ({"steps": num_steps} if "steps" in settings else {})
        for metric, value in values.items():
            yield Measurement(dataset, method, metric, value, seconds, own)
