"""Figures of the annealed benchmark: `python -m benchmarks.tasks.annealed_pictures [--quick] [--out FOLDER]`."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.core.pictures import write_pictures
from benchmarks.tasks.annealed import BATCH_SIZE, METHODS, NUM_THREADS, TASKS, Start, Task, optimiser, start
from pyro_lvgp import plots
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.infer import FitResult, fit

SEED, QUICK_STEPS = 0, 5
MEAN_FIELD, ANNEALED = "mean field", "annealed, K = 10"
CURVES = (MEAN_FIELD, "IW, S = 5", ANNEALED, "annealed, K = 10 × IW, S = 5")
NUM_FACES, FACE = 8, (28, 20)


class Fitted(NamedTuple):
    """Fit and its learning curve."""

    start: Start
    history: FitResult


def fit_method(task: Task, name: str, num_steps: int) -> Fitted:
    """Fit a method as :func:`benchmarks.tasks.annealed.measure` does, on the rows that it trains on."""
    print(f"\n{name}", flush=True)
    method = METHODS[name]
    with seeded(SEED):
        first = start(task, method, seed=SEED)
        history = fit(
            first.model,
            first.guide,
            first.Y,
            loss=method.loss(),
            optim=optimiser(),
            num_steps=num_steps,
            batch_size=BATCH_SIZE,
            seed=SEED,
        )
    return Fitted(first, history)


def draw_curves(fits: Mapping[str, Fitted]) -> Figure:
    """Negative bounds against steps and against seconds."""
    losses = {name: np.asarray(fitted.history.losses) for name, fitted in fits.items()}
    seconds = {name: np.asarray(fitted.history.seconds) for name, fitted in fits.items()}
    num_rows = len(next(iter(fits.values())).start.Y)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.0), sharey=True, layout="constrained")
    figure.suptitle(
        "Oil flow: negative bound of each method on the rows trained on, smoothed over steps (faint: not)", fontsize="medium"
    )
    plots.plot_bounds(losses, per=num_rows, ylabel="negative bound [nats/row]", ax=left)
    plots.plot_bounds(losses, seconds=seconds, per=num_rows, ylabel="", ax=right)
    left.legend(frameon=False, fontsize="small", loc="upper right")  # negative bounds decrease
    right.get_legend().remove()
    right.set_xlabel("wall seconds, compilation included")
    return figure


def draw_latents(fits: Mapping[str, Fitted], labels: np.ndarray) -> Figure:
    """Plot the two most relevant latents of every row, above the relevances of all."""
    figure = plt.figure(figsize=(9.5, 6.8), layout="constrained")
    figure.suptitle("Oil flow: posterior medians of the latents, in standard deviations of their prior", fontsize="medium")
    axes = figure.subplots(2, len(fits), height_ratios=(2.0, 1.0), sharey="row")
    for (name, fitted), top, bottom in zip(fits.items(), *axes, strict=True):
        model, guide, rows, Y = fitted.start
        relevance = 1.0 / model.kernel.lengthscale
        regimes = [f"regime {label}" for label in labels[rows.numpy()]]
        plots.plot_latents(guide.median(Y)["X"], regimes, relevance=relevance, ax=top)
        plots.plot_ard(relevance, ax=bottom)
        top.set_title(name, fontsize="medium")
    axes[0, 0].get_legend().remove()  # one legend for both panels
    axes[1, 1].set_ylabel("")
    return figure


def draw_faces(fitted: Fitted, task: Task) -> Figure:
    """Faces with a quarter of the pixels observed, evenly spaced among all faces, and their reconstructions."""
    model, guide, rows, Y = fitted.start
    idx = torch.isnan(Y).any(1).nonzero()[:, 0]
    truth, seen = task.Y[rows][idx], Y[idx]
    hidden = torch.isnan(seen)
    f_mean = model.reconstruct(guide, seen, idx, num_samples=16).f_mean
    rmse = task.scale * (f_mean - truth)[hidden].square().mean().sqrt()
    shown = torch.linspace(0, len(idx) - 1, NUM_FACES).long()
    filled = torch.where(hidden, f_mean, truth)
    figure = plots.plot_reconstructions(truth[shown], filled[shown], FACE, Y_masked=seen[shown], num=NUM_FACES)
    figure.suptitle(
        f"Frey faces, {ANNEALED}, {len(fitted.history.losses)} steps: 75 % of the pixels of a face hidden (blue),\n"
        f"filled by the mean of f; RMSE {rmse:.3f} in units of grey level / 255, over all {len(idx)} such faces",
        fontsize="small",
    )
    return figure


def draw(quick: bool) -> dict[str, Figure]:
    """Fit the models and draw all figures."""
    oilflow, frey = TASKS["oilflow"](), TASKS["frey"]()
    fits = {name: fit_method(oilflow, name, QUICK_STEPS if quick else oilflow.checkpoints[-1]) for name in CURVES}
    face = fit_method(frey, ANNEALED, QUICK_STEPS if quick else frey.checkpoints[-1])
    regimes = load_dataset("oilflow")["y"]
    return {
        "learning_curves": draw_curves(fits),
        "oilflow_latents": draw_latents({name: fits[name] for name in (MEAN_FIELD, ANNEALED)}, regimes),
        "frey_faces": draw_faces(face, frey),
    }


main = partial(write_pictures, "annealed", draw, num_threads=NUM_THREADS)


if __name__ == "__main__":
    main()
