"""Figures of the random-feature LVM: `python -m benchmarks.tasks.srflvm_pictures [--quick] [--out FOLDER]`."""

import json
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from sklearn.linear_model import LinearRegression
from torch import Tensor

from benchmarks.core.pictures import write_pictures
from benchmarks.core.report import Row
from benchmarks.tasks import imputation
from pyro_lvgp.datasets import s_curve
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.plots import PALETTE

SEED, RATE, LATENT_DIM, NUM_PICTURES = 0, 0.6, 20, 6
NUM_STEPS, QUICK_STEPS, QUICK_ROWS = 500, 2, 60
SHAPES = {"cifar": (20, 20), "frey": (28, 20)}


def true_kernel(X: Float[Tensor, "N 2"]) -> Float[Tensor, "N N"]:
    """Kernel from which the S-curve's data are drawn."""
    tau = X[:, None] - X
    rbf, periodic = (-0.5 * tau.square().sum(-1)).exp(), (-2.0 * (torch.pi * tau / 4.5).sin().square().sum(-1)).exp()
    return 0.5 * (rbf + periodic)


def draw_kernel(num_steps: int, num_rows: int) -> Figure:
    """True and learned kernel matrices, rows in the order along the S, and latents after an affine alignment."""
    data = s_curve(num_rows, seed=SEED)
    Y, truth = (torch.as_tensor(data[name], dtype=torch.float32) for name in ("Y", "X"))
    model = RandomFeatureLVM(num_rows, Y.shape[1], 2, num_frequencies=50, lengthscale=2**0.5, seed=SEED).initialize(Y)
    guide = RandomFeatureGuide(model, frequencies="gaussian", seed=SEED)
    fit(model, guide, Y, optim=guide.blocks(lr=0.02), num_steps=num_steps, seed=SEED)
    X = guide.latents().mean.detach()
    learned, true = model.kernel(guide, X), true_kernel(truth)
    # Centred outputs have no constant part: it is taken from both, and both have mean variance 1 then.
    panels = {"true kernel": _centred(true), "learned kernel": _centred(learned)}
    off = ~torch.eye(num_rows, dtype=torch.bool)
    correlation = torch.corrcoef(torch.stack([K[off] for K in panels.values()]))[0, 1]
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    for ax, (title, K) in zip(axes, panels.items(), strict=False):
        image = ax.imshow(K.numpy(), vmin=-1.0, vmax=1.5, cmap="viridis", interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes[1], shrink=0.8)
    print(f"correlation of the entries off the diagonal: {correlation:.3f}")
    aligned = LinearRegression().fit(X, truth).predict(X)
    for ax, (title, points) in zip(
        axes[2:], {"true latents": truth.numpy(), "learned, aligned": aligned}.items(), strict=True
    ):
        ax.scatter(*points.T, c=data["t"], s=6)
        ax.set(xlabel="$x_1$", ylabel="$x_2$")
        ax.set_title(title, fontsize="medium")
    return figure


def draw_imputation(name: str, num_steps: int, num_cool_steps: int, num_rows: int | None) -> Figure:
    """Images, their observed pixels and their reconstructions."""
    task = imputation.make_task(imputation.TASKS[name]()[:num_rows], RATE, seed=SEED)
    expected = imputation.random_features(task, LATENT_DIM, seed=SEED, num_steps=num_steps, num_cool_steps=num_cool_steps)
    filled = torch.where(task.hidden, expected, task.truth)
    rows = np.random.default_rng(SEED).choice(len(task.truth), NUM_PICTURES, replace=False)
    figure, axes = plt.subplots(4, NUM_PICTURES, figsize=(7.0, 5.2), layout="constrained")
    maps = matplotlib.colormaps["gray"].with_extremes(bad="#C9D6E8")
    panels = {"truth": task.truth, "seen": task.Y, "filled": filled, "expected": expected}
    for line, (label, pictures) in zip(axes, panels.items(), strict=True):
        line[0].set_ylabel(label)
        for ax, row in zip(line, rows, strict=True):
            ax.imshow(pictures[row].reshape(SHAPES[name]).numpy(), cmap=maps, vmin=0.0, vmax=1.0, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
    return figure


def draw_scaling() -> Figure:
    """Seconds by number of rows and of columns, as last measured by the benchmark srflvm_scaling."""
    rows = [Row(**row) for row in json.loads((Path(__file__).parents[1] / "results" / "srflvm_scaling_cpu.json").read_text())]
    datasets = dict.fromkeys(row.dataset for row in rows)
    figure, axes = plt.subplots(1, len(datasets), figsize=(8, 3.2), layout="constrained", sharey=True)
    for ax, dataset in zip(axes, datasets, strict=True):
        for method, colour in zip(dict.fromkeys(row.method for row in rows), PALETTE, strict=False):
            timed = [row for row in rows if (row.dataset, row.method) == (dataset, method) and row.metric.endswith("[s]")]
            sizes = [int(row.metric.split()[2]) for row in timed]  # "N = 500 [s]"
            means, sds = [row.mean for row in timed], [row.sd or 0.0 for row in timed]
            ax.errorbar(sizes, means, sds, color=colour, marker="o", label=method)
        ax.set(xscale="log", yscale="log", xlabel=timed[0].metric.split()[0])
        ax.set_xticks(sizes, labels=map(str, sizes))
        ax.set_xticks([], minor=True)
        ax.set_title(dataset, fontsize="medium")
    axes[0].set_ylabel("seconds")
    axes[0].legend(frameon=False)
    return figure


def _centred(K: Float[Tensor, "N N"]) -> Float[Tensor, "N N"]:
    centred = K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()
    return centred / centred.diagonal().mean()


def draw(quick: bool) -> dict[str, Figure]:
    """Fit the models and draw all figures."""
    sizes = (QUICK_STEPS, QUICK_STEPS, QUICK_ROWS) if quick else (imputation.NUM_STEPS, imputation.NUM_COOL_STEPS, None)
    figures = {"kernel": draw_kernel(*((QUICK_STEPS, QUICK_ROWS) if quick else (NUM_STEPS, 500)))}
    figures["scaling"] = draw_scaling()
    return figures | {f"imputed_{name}": draw_imputation(name, *sizes) for name in SHAPES}


main = partial(write_pictures, "srflvm", draw, num_threads=imputation.NUM_THREADS)


if __name__ == "__main__":
    main()
