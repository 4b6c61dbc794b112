"""Figures of the GP-VAE: `python -m benchmarks.tasks.gpvae_pictures [--quick] [--out FOLDER]`."""

from functools import partial

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.core.pictures import write_pictures
from benchmarks.tasks import balls, estimators
from pyro_lvgp.plots import PALETTE

SEED, QUICK_STEPS, PREFIX, LONGEST = 0, 20, 30, 40


def draw_estimators(num_epochs: int) -> Figure:
    """Bounds by epoch under each estimator, and the standard deviation of single values in one of the fits."""
    fits = {f"{value}, {gradient}": (value, gradient) for value, gradient in estimators.ESTIMATORS}
    found = {name: estimators.train(*pair, seed=SEED, num_epochs=num_epochs) for name, pair in fits.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for colour, (name, progress) in zip(PALETTE, found.items(), strict=False):
        left.plot(progress.epochs, progress.bounds, color=colour, label=name)
    last = [progress.bounds[-1] for progress in found.values()]
    left.set(xlabel="epoch", ylabel="bound [nats]", ylim=(min(last) - 300.0, max(last) + 50.0))
    left.set_title("climbing by each estimator", fontsize="medium")
    progress = found["doubly-stochastic, path"]
    for colour, (name, sds) in zip(PALETTE[4:], progress.sds.items(), strict=False):
        right.plot(progress.epochs, sds, color=colour, label=name)
    right.set(xlabel="epoch", ylabel="standard deviation of a value [nats]", yscale="log")
    right.set_title("noise of the value, climbing by doubly-stochastic, path", fontsize="medium")
    for ax in (left, right):
        ax.legend(frameon=False, fontsize="small")
    return figure


def draw_balls(name: str, num_steps: int | None) -> Figure:
    """Plot a test sequence: truth, observed pixels, predictions given a prefix, and latent processes."""
    task = balls.TASKS[name](SEED)
    fitted = balls.train(task, seed=SEED, num_steps=num_steps, progress=True)
    model, guide, row = fitted.model, fitted.guide, balls.NUM_TRAINED
    seen = task.Y[row : row + 1].clone()
    seen[:, PREFIX:] = torch.nan
    predicted = model.predict(guide, task.t, seen, num_samples=100).mean[0]
    bands = guide.quantiles([0.025, 0.5, 0.975], task.t[None], seen)["f"].flatten(1, -3)[:, 0]  # [3, Q, T]
    figure, axes = plt.subplots(4, 1, figsize=(7.5, 6.6), sharex=True, layout="constrained", height_ratios=(1, 1, 1, 1.2))
    titles = ("truth", "seen", f"prediction, given what is seen before step {PREFIX}")
    maps = matplotlib.colormaps["gray"].with_extremes(bad="#C9D6E8")
    for ax, title, images in zip(axes, titles, (task.F[row], seen[0], predicted), strict=False):
        ax.imshow(images.mT.numpy(), aspect="auto", cmap=maps, vmin=0.0, vmax=1.0, origin="lower", interpolation="nearest")
        ax.set_ylabel("pixel")
        ax.set_title(title, fontsize="medium")
    time = task.t[:, 0]
    for k, (low, middle, high) in enumerate(zip(*bands, strict=True)):
        axes[3].fill_between(time, low, high, color=PALETTE[k], alpha=0.2, linewidth=0)
        axes[3].plot(time, middle, color=PALETTE[k], label=f"latent {k}")
    for ax in axes:
        ax.axvline(PREFIX - 0.5, color=PALETTE[1], linewidth=1.0)
    axes[3].set(xlabel="step", ylabel="latent")
    axes[3].legend(frameon=False, fontsize="small", ncols=2)
    return figure


def draw_errors_ahead(num_steps: int | None) -> Figure:
    """Forecast errors of one ball by horizon, beside a linear dynamical system."""
    task, ahead = balls.TASKS["one"](SEED), range(1, LONGEST + 1)
    ours = balls.errors_ahead(task, balls.train(task, seed=SEED, num_steps=num_steps, progress=True), ahead)
    peer = balls.peer_errors(task, balls.fit_peer(task, num_steps), ahead)
    figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    for colour, (name, errors) in zip(PALETTE, (("GP-VAE", ours), ("linear dynamical system", peer)), strict=False):
        ax.plot(list(errors), list(errors.values()), color=colour, label=name)
    ax.set(xlabel="steps ahead", ylabel="mean absolute error of a pixel", ylim=(0.0, None))
    ax.legend(frameon=False, fontsize="small")
    return figure


def draw(quick: bool) -> dict[str, Figure]:
    """Fit the models and draw all figures."""
    steps = QUICK_STEPS if quick else None
    figures = {f"balls_{name}": draw_balls(name, steps) for name in balls.TASKS}
    return figures | {"balls_ahead": draw_errors_ahead(steps), "estimators": draw_estimators(steps or estimators.NUM_EPOCHS)}


main = partial(write_pictures, "gpvae", draw, num_threads=balls.NUM_THREADS)


if __name__ == "__main__":
    main()
