# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""A Bayesian GPLVM of handwritten digits: `python -m tutorials.digits [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # A map of handwritten digits
#
# 1797 images of 8 × 8 pixels become points in eight dimensions, of which the model learns how many are relevant.  We fit the
# model twice, by the mean-field bound and by the importance-weighted bound, from the same initial values.

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import KFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from pyro_lvgp import plots
from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import FitResult, ImportanceWeightedELBO, JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM

LATENT_DIM, NUM_INDUCING, BATCH_SIZE, NUM_IMPORTANCE_SAMPLES = 8, 64, 256, 5
IMAGE_SHAPE = (8, 8)


# %% [markdown]
# The data: grey levels, centred and divided by one common scale, so that pixels that hardly vary stay small.


# %%
def load() -> tuple[torch.Tensor, np.ndarray, Callable[[torch.Tensor], torch.Tensor]]:
    """Scaled images [1797, 64], their digits, and the function that maps back to grey levels."""
    digits = load_digits()
    grey = torch.as_tensor(digits.data, dtype=torch.get_default_dtype())
    centre, scale = grey.mean(0), grey.std()
    return (grey - centre) / scale, digits.target, lambda Y: Y * scale + centre


def accuracy(X: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy of the nearest neighbour by five-fold cross-validation."""
    folds = KFold(5, shuffle=True, random_state=0)
    return cross_val_score(KNeighborsClassifier(1), X, labels, cv=folds).mean()


# %% [markdown]
# Both fits start at PCA.  The importance-weighted bound takes five weighted draws of each latent.


# %%
def fit_both(Y: torch.Tensor, num_steps: int) -> dict[str, tuple[BayesianGPLVM, MeanFieldGuide, FitResult]]:
    """Fit by each bound from the same initial values."""
    bounds = {
        "mean field": MeanFieldELBO(),
        f"importance-weighted, S = {NUM_IMPORTANCE_SAMPLES}": ImportanceWeightedELBO("data", NUM_IMPORTANCE_SAMPLES),
    }
    fits = {}
    for name, bound in bounds.items():
        print(f"\n{name}")
        model = BayesianGPLVM(*Y.shape, LATENT_DIM, num_inducing=NUM_INDUCING).initialize(Y)
        guide = MeanFieldGuide(model)
        history = fit(
            model,
            guide,
            Y,
            loss=bound,
            num_steps=num_steps,
            batch_size=BATCH_SIZE,
            optim=JointAdam(lr=0.01),
            callbacks=[LRSchedule("cosine")],
        )
        fits[name] = model, guide, history
    return fits


# %% [markdown]
# Comparison of the fits.  Each fit is evaluated by its own bound on all data.  The reconstruction error is per pixel, in units
# of the scaled data, whose variance is near 1.  The nearest neighbour is that of the posterior means of the latents.


# %%
def summarise(fits, Y: torch.Tensor, labels: np.ndarray) -> str:
    """Scores of the fits and of PCA as a markdown table."""
    pca = PCA(LATENT_DIM).fit(Y.numpy())
    scores = pca.transform(Y.numpy())
    error = float(((pca.inverse_transform(scores) - Y.numpy()) ** 2).mean())
    lines = [
        f"| method, {LATENT_DIM} dimensions | bound per entry [nats] | reconstruction MSE | 1-NN accuracy | seconds |",
        "|---|---:|---:|---:|---:|",
        f"| PCA | – | {error:.4f} | {accuracy(scores, labels):.3f} | – |",
    ]
    for name, (model, guide, history) in fits.items():
        own = MeanFieldELBO() if name == "mean field" else ImportanceWeightedELBO("data", NUM_IMPORTANCE_SAMPLES)
        torch.manual_seed(0)
        bound = -np.mean([own.loss(model, guide, Y) for _ in range(10)]) / Y.numel()
        reconstruction = model.reconstruct(guide, Y, num_samples=16)
        mse = (reconstruction.mean - Y).square().mean().item()
        latents = guide.median()["X"].numpy()
        lines.append(f"| {name} | {bound:.4f} | {mse:.4f} | {accuracy(latents, labels):.3f} | {history.seconds[-1]:.0f} |")
    return "\n".join(lines)


# %% [markdown]
# The figures: the two most relevant dimensions, the relevance of all, the bounds over time, and reconstructions of images of
# which half the pixels are hidden, whose latents are inferred without retraining.


# %%
def draw(fits, Y: torch.Tensor, labels: np.ndarray, to_grey: Callable[[torch.Tensor], torch.Tensor], out: Path) -> None:
    """Draw and save the figures."""
    model, guide, _ = list(fits.values())[-1]
    relevance = 1 / model.kernel.lengthscale.detach()
    ax = plots.plot_latents(
        guide.median()["X"],
        labels,
        images=to_grey(Y),
        image_shape=IMAGE_SHAPE,
        relevance=relevance,
        cmap="gray_r",
    )
    ax.figure.savefig(out / "latents.png", dpi=150)
    plots.plot_ard(relevance).figure.savefig(out / "relevance.png", dpi=150)
    ax = plots.plot_bounds(
        {name: -np.asarray(history.losses) for name, (_, _, history) in fits.items()},
        seconds={name: np.asarray(history.seconds) for name, (_, _, history) in fits.items()},
        per=Y.numel(),
        ylabel="bound per entry [nats]",
    )
    ax.figure.savefig(out / "bounds.png", dpi=150)

    rows = torch.arange(10)
    hidden = torch.rand(10, Y.shape[1], generator=torch.Generator().manual_seed(0)) < 0.5
    partial = Y[rows].masked_fill(hidden, torch.nan)
    filled = model.impute(guide, partial, latents=model.infer_latents(guide, partial))
    figure = plots.plot_reconstructions(
        to_grey(Y[rows]),
        to_grey(filled.mean),
        IMAGE_SHAPE,
        Y_masked=to_grey(partial),
        sd=filled.stddev,
        cmap="gray_r",
    )
    figure.savefig(out / "reconstructions.png", dpi=150)


# %% [markdown]
# Last, the posterior goes to ArviZ, as a tree of named arrays in a file that any tool for NetCDF reads.


# %%
def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each fit")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for pictures and posterior")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    start = time.perf_counter()

    Y, labels, to_grey = load()
    fits = fit_both(Y, options.steps)
    print("\n" + summarise(fits, Y, labels) + "\n")
    draw(fits, Y, labels, to_grey, options.out)
    model, guide, _ = list(fits.values())[-1]
    to_arviz(model, guide, Y, num_samples=50, seed=0).to_netcdf(options.out / "posterior.nc")
    print(f"wrote {', '.join(sorted(path.name for path in options.out.iterdir()))} to {options.out}")
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
