"""Seconds of predictions: latents of new rows, missing entries, and export of many draws to ArviZ."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal

from benchmarks.core.isolated import isolated, wall_seconds
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LowRankGaussian, Poisson, StudentT
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_TRAINING, NUM_NEW, DATA_DIM, LATENT_DIM, NUM_LATENTS, NUM_DRAWS, NUM_REPEATS = 500, 1000, 30, 5, 10_000, 500, 3
PUBLISHED: list[Row] = []
NOTES = f"""\
A Bayesian GPLVM of {LATENT_DIM} latents and 30 inducing points, fitted to {NUM_TRAINING} rows of {DATA_DIM} columns,
predicts {NUM_NEW} new rows of which half of the entries are missing; float32. "defaults" are `infer_latents` with nothing
set: Laplace's approximation under a mixture of Gaussians that is fitted to the training latents; "N(0, I)" has that prior,
and "variational" 300 steps of Adam. "impute" fills the missing entries given the latents. "to_arviz" exports {NUM_DRAWS}
draws of the latents of {NUM_LATENTS} rows, one of each, with the log likelihood of each row. Seconds are the median of
{NUM_REPEATS} calls; run it with `taskset -c 0`."""
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "Gaussian": lambda: Gaussian(data_dim=DATA_DIM),
    "low-rank Gaussian": lambda: LowRankGaussian(3, DATA_DIM),
    "Student's t": lambda: StudentT(data_dim=DATA_DIM),
    "Poisson": Poisson,
}
EXPORT = "to_arviz"
TASKS = (*LIKELIHOODS, EXPORT)


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure predictions under each likelihood, or one, and the export."""
    for seed in range(seeds):
        for name in [only] if only else TASKS:
            with isolated(seed):
                calls = export(quick=quick) if name == EXPORT else predictions(name, quick=quick)
                settings: Settings = {"training rows": NUM_TRAINING, "new rows": NUM_NEW, "columns": DATA_DIM}
                for call, function in calls.items():
                    median = statistics.median(wall_seconds(function) for _ in range(1 if quick else NUM_REPEATS))
                    yield Measurement("seconds", f"{name}, {call}", "call [s]", median, median, settings)


def table(num_rows: int, name: str) -> Float[Tensor, "N D"]:
    """Draw rows that are smooth functions of latents, of the kind that the likelihood is for."""
    X = torch.randn(num_rows, LATENT_DIM)
    f = (X @ torch.randn(LATENT_DIM, DATA_DIM, generator=torch.Generator().manual_seed(0)) / LATENT_DIM**0.5).sin()
    return torch.poisson((1.0 + f).exp()) if name == "Poisson" else f + 0.1 * torch.randn_like(f)


def predictions(name: str, *, quick: bool) -> dict[str, Callable[[], Any]]:
    """Fit a model, and return calls that predict new rows."""
    Y, new = table(NUM_TRAINING, name), table(NUM_NEW, name)
    new = new.masked_fill(torch.rand(new.shape) < 0.5, torch.nan)
    model = BayesianGPLVM.from_data(Y, LATENT_DIM, num_inducing=30, likelihood=LIKELIHOODS[name]())
    guide = MeanFieldGuide(model)
    fit(model, guide, Y, loss=MeanFieldELBO(), num_steps=10 if quick else 1000, progress=False)
    standard = Normal(torch.zeros(LATENT_DIM), 1.0)
    latents = model.infer_latents(guide, new)
    return {
        "infer_latents, defaults": lambda: model.infer_latents(guide, new),
        "infer_latents, N(0, I)": lambda: model.infer_latents(guide, new, prior=torch.distributions.Independent(standard, 1)),
        "infer_latents, variational": lambda: model.infer_latents(guide, new, method="variational"),
        "impute": lambda: model.impute(guide, new, latents=latents),
    }


def export(*, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return a call that exports draws of one latent of many rows."""
    Y = table(NUM_LATENTS, "Gaussian")[:, :5]
    model = BayesianGPLVM.from_data(Y, 1, num_inducing=20, likelihood=Gaussian(data_dim=5))
    guide = MeanFieldGuide(model)
    guide(Y)
    num_draws = 5 if quick else NUM_DRAWS
    return {f"{num_draws} draws": lambda: to_arviz(model, guide, Y, num_samples=num_draws, seed=0)}
