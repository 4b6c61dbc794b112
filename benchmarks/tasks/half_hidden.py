"""Latents of incomplete rows: oil flow with 6 of 12 entries missing, Frey faces with 75 % of the pixels missing."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from sklearn.covariance import LedoitWolf
from sklearn.impute import KNNImputer
from sklearn.mixture import GaussianMixture
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks import imputation
from benchmarks.tasks.annealed import TASKS as ANNEALED_TASKS
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.diagnostics import stacking_weights
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Kernel, Linear
from pyro_lvgp.likelihoods import Gaussian, StudentT
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, latent_mixture
from pyro_lvgp.models._latent_rows import Guide

NUM_THREADS = 1
NUM_COMPONENTS, NUM_STARTS, NUM_DRAWS = 20, 16, 2000
NUM_FITS = {"IW, S = 5, locally linear": 5, "RandomFeatureLVM": 5}  # one of all other methods
TAILED = ("IW, S = 5, locally linear",)  # methods whose new rows may have noise with heavy tails
PUBLISHED: list[Row] = []
NOTES = """\
Oil flow: 900 complete training rows, and 100 other rows with 6 hidden entries each, standardised by the training rows. Metrics
are RMSE and mean negative log predictive density (NLPD) of the hidden entries, given the observed entries of their row. The
prior of the latents of new rows is a mixture of 20 Gaussians fitted to the latents of the training rows. Posteriors are
mixtures of 16 Gaussians with diagonal covariances for each row (`infer_latents(num_starts=16)`), or in "Laplace" one Gaussian
with full covariance for each of the 20 components (`infer_latents(method="laplace")`). Predictions are mixtures over 2000
draws of the latents. Median NLPD is the median over entries. "fit" does not include inference of latents and predictions.
Kernels are ARD RBF; "locally linear" is RBF(x₁, x₂) + RBF(x₁, x₂) · Linear(x) + Linear(x), with a small initial noise. In
"Student's t" the noise of new rows is not the fitted Gaussian, but a Student's t distribution with four degrees of freedom and
the same scale, which was tried after errors of one split had been seen. "5 fits" is an equal mixture of the predictions of
five fits with different seeds. "all of these" is the mixture of all predictions of a model, "together" that of all models.
"stacked" has the weights under which a third of the observed entries of the same rows, which are hidden too and predicted by
the first fits, have the highest density (`pyro_lvgp.diagnostics.stacking_weights`). Steps of the models with inducing points
are compiled (`fit(compile=True)`).

Frey: 75 % of the pixels of 5 % of the rows are hidden, all other rows are complete; RMSE in grey level / 255. All observed
entries are training data; the random-feature model is fitted as in the benchmark `imputation`."""


class Predicted(NamedTuple):
    """Means of entries, and log densities at the truth."""

    mean: Float[Tensor, "B D"]
    log_density: Float[Tensor, "B D"]


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on both sets, or one part, for each seed."""
    for name in [only] if only else list(TASKS):
        for seed in tqdm(range(seeds), desc=name, unit="seed"):
            yield from TASKS[name](seed, 50 if quick else None)


def oilflow(seed: int, num_steps: int | None) -> Iterator[Measurement]:
    """Test rows of oil flow with half of the entries hidden."""
    X = torch.as_tensor(load_dataset("oilflow")["X"], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(X), generator=generator)
    train, test = X[order[:900]], X[order[900:]]
    train, test = (train - train.mean(0)) / train.std(0), (test - train.mean(0)) / train.std(0)
    hidden = torch.rand(test.shape, generator=generator, dtype=torch.float64).argsort(-1) < 6
    Y = test.masked_fill(hidden, torch.nan)

    def measure(
        method: str, mean: Tensor, log_density: Tensor | None, seconds: float, settings: Settings
    ) -> Iterator[Measurement]:
        values = {"RMSE": (mean - test)[hidden].square().mean().sqrt().item()}
        if log_density is not None:
            values |= {"NLPD": -log_density[hidden].mean().item(), "median NLPD": -log_density[hidden].median().item()}
        for metric, value in values.items():
            yield Measurement("oilflow, 6 of 12 entries hidden", method, metric, value, seconds, settings)

    start = time.perf_counter()
    filled = torch.as_tensor(KNNImputer(n_neighbors=5).fit(train.numpy()).transform(Y.numpy()))
    yield from measure("KNNImputer(5)", filled, None, time.perf_counter() - start, {})
    for number in (1, NUM_COMPONENTS):
        start = time.perf_counter()
        fitted = GaussianMixture(number, reg_covar=1e-4, n_init=3, random_state=seed).fit(train.numpy())
        weights, means, covariances = map(torch.as_tensor, (fitted.weights_, fitted.means_, fitted.covariances_))
        mean, log_density = mixture_given(weights, means, covariances, Y, test)
        yield from measure(f"{number} Gaussian(s), EM", mean, log_density, time.perf_counter() - start, {})
    by_name: dict[str, list[Predicted]] = {}
    found_again: dict[str, Tensor] = {}  # log densities of observed entries, by the first fits, if these are hidden too
    fold = third_of_observed(hidden, generator)
    total = 0.0
    for name, method in METHODS.items():
        kinds = [name, f"{name}, Student's t"] if name in TAILED else [name]
        predictions = {f"{kind}, {posterior}": list[Predicted]() for kind in kinds for posterior in POSTERIORS}
        seconds: list[float] = []
        for number in range(NUM_FITS.get(name, 1)):
            with isolated(seed + 1000 * number):
                model, guide, took, settings = method(train, seed + 1000 * number, num_steps)
                draws = torch.cat([guide(train)["X"].detach() for _ in range(4)])
                mixture = latent_mixture(draws, NUM_COMPONENTS, seed=seed)
                seconds.append(took)
                for kind in kinds:
                    if kind != name:
                        model.likelihood = tailed(model.likelihood)
                    for posterior, one in predicted(model, guide, Y, mixture, test).items():
                        predictions[f"{kind}, {posterior}"].append(one)
                    again = predicted(model, guide, Y.masked_fill(fold, torch.nan), mixture, test) if number == 0 else {}
                    found_again |= {f"{kind}, {posterior}": one.log_density[fold] for posterior, one in again.items()}
        for kind in kinds:
            both: list[Predicted] = []
            for posterior in POSTERIORS:
                parts = predictions[f"{kind}, {posterior}"]
                yield from measure(f"{kind}, {posterior}", *parts[0], seconds[0], settings)
                if len(parts) > 1:
                    yield from measure(f"{kind}, {posterior}, {len(parts)} fits", *pooled(parts), sum(seconds), settings)
                both += parts
            yield from measure(f"{kind}, all {len(both)} of these", *pooled(both), sum(seconds), settings)
        by_name |= predictions
        total += sum(seconds)
    everything = [part for parts in by_name.values() for part in parts]
    yield from measure(f"all {len(everything)} together", *pooled(everything), total, {})
    stacked = stacking_weights(found_again)
    shares = [stacked[name] / len(parts) for name, parts in by_name.items() for _ in parts]
    yield from measure(f"all {len(everything)}, stacked", *pooled(everything, shares), total, {})


def third_of_observed(hidden: Bool[Tensor, "B D"], generator: torch.Generator) -> Bool[Tensor, "B D"]:
    """Mask of a third of the observed entries of each row."""
    order = torch.rand(hidden.shape, generator=generator).masked_fill(hidden, 1.0).argsort(-1).argsort(-1)
    return order < (~hidden).sum(-1, keepdim=True) // 3


def pooled(parts: Sequence[Predicted], shares: Sequence[float] | None = None) -> Predicted:
    """Mixture of predictions, with equal weights by default."""
    mean, log_density = (torch.stack(values) for values in zip(*parts, strict=True))
    weights = mean.new_tensor([1.0 / len(parts)] * len(parts) if shares is None else shares)[:, None, None]
    return Predicted((weights * mean).sum(0), (weights.log() + log_density).logsumexp(0))


class Fitted(NamedTuple):
    """Model of the training rows, its seconds and its settings."""

    model: BayesianGPLVM | RandomFeatureLVM
    guide: Guide
    seconds: float
    settings: Settings


def radial(train: Tensor, seed: int, num_steps: int | None) -> Fitted:
    """Bayesian GPLVM with a noise variance for each column."""
    noise = Gaussian(0.1, data_dim=12)
    model = BayesianGPLVM(len(train), 12, 10, num_inducing=100, likelihood=noise).double()
    guide = MeanFieldGuide(model.initialize(train, seed=seed))
    return adam(model, guide, train, seed, num_steps, max_steps=8000, learning_rate=0.02)


def locally_linear(train: Tensor, seed: int, num_steps: int | None) -> Fitted:
    """Bayesian GPLVM that is linear in all latents, with coefficients that vary over two of them."""
    kernel = near() + near() * Linear(12) + Linear(12)
    noise = Gaussian(1e-4, data_dim=12)
    model = BayesianGPLVM(len(train), 12, 12, kernel, num_inducing=200, likelihood=noise).double()
    guide = MeanFieldGuide(model.initialize(train, seed=seed), covariance={"X": "full"}, init_scale=0.02)
    return adam(model, guide, train, seed, num_steps, max_steps=3000, learning_rate=0.01)


def tailed(noise: Gaussian) -> StudentT:
    """Student-t likelihood with the scales of a Gaussian likelihood."""
    scale = noise.variance.detach().sqrt()
    return StudentT(scale, df=4.0, data_dim=len(scale)).to(scale)


def near() -> Kernel:
    """RBF kernel over the first two latents."""
    return RBF(2, active_dims=[0, 1])


def adam(
    model: BayesianGPLVM,
    guide: MeanFieldGuide,
    train: Tensor,
    seed: int,
    num_steps: int | None,
    *,
    max_steps: int,
    learning_rate: float,
) -> Fitted:
    """Fit by the importance-weighted bound on mini-batches; compile the steps unless there are few."""
    bound, steps = ImportanceWeightedELBO(num_samples=5, max_plate_nesting=1), num_steps or max_steps
    how: dict[str, Any] = {"batch_size": 200, "optim": JointAdam(lr=learning_rate), "callbacks": [LRSchedule("cosine")]}
    how |= {"compile": num_steps is None, "progress": False}
    history = fit(model, guide, train, loss=bound, num_steps=steps, seed=seed, **how)
    settings: Settings = {"Q": model.latent_dim, "M": model.num_inducing, "steps": steps, "batch": 200}
    return Fitted(model, guide, history.seconds[-1], settings | {"optimiser": f"Adam, {learning_rate} by cosine to 0"})


def frequencies(train: Tensor, seed: int, num_steps: int | None) -> Fitted:
    """Random-feature LVM with a noise variance for each column."""
    steps = (num_steps, num_steps) if num_steps else (2000, 500)
    noise = Gaussian(0.1, data_dim=12)
    model = RandomFeatureLVM(len(train), 12, 10, num_frequencies=50, lengthscale=10**0.5, likelihood=noise, seed=seed).double()
    guide = RandomFeatureGuide(model.initialize(train, seed=seed), frequencies="gaussian", seed=seed)
    seconds = 0.0
    for rate, number in zip((0.02, 0.002), steps, strict=True):
        blocks = guide.blocks(lr=rate)
        seconds += fit(model, guide, train, optim=blocks, num_steps=number, seed=seed, progress=False).seconds[-1]
    settings: Settings = {"Q": 10, "frequencies": 50, "steps": f"{steps[0]} then {steps[1]}"}
    return Fitted(model, guide, seconds, settings | {"optimiser": "Adam, 0.02 then 0.002, all rows"})


def frey(seed: int, num_steps: int | None) -> Iterator[Measurement]:
    """Frey faces, fitted to their observed pixels."""
    task = ANNEALED_TASKS["frey"]()
    assert task.hidden is not None
    truth, hidden = task.Y, task.hidden
    Y = truth.masked_fill(hidden, torch.nan)

    def measure(method: str, filled: Tensor, seconds: float, settings: Settings) -> Measurement:
        rmse = task.scale * (filled - truth)[hidden].square().mean().sqrt().item()
        return Measurement("frey, 75 % of the pixels of 5 % of the rows hidden", method, "RMSE", rmse, seconds, settings)

    complete, partial = Y[~hidden.any(-1)], hidden.any(-1)
    start = time.perf_counter()
    filled = torch.as_tensor(KNNImputer(n_neighbors=5).fit_transform(Y.numpy()))
    yield measure("KNNImputer(5)", filled, time.perf_counter() - start, {})
    start = time.perf_counter()
    gaussian = LedoitWolf().fit(complete.double().numpy())
    location, covariance = torch.as_tensor(gaussian.location_)[None], torch.as_tensor(gaussian.covariance_)[None]
    filled = truth.double()
    filled[partial], _ = mixture_given(torch.ones(1).double(), location, covariance, Y[partial].double(), filled[partial])
    yield measure("Gaussian, Ledoit-Wolf", filled, time.perf_counter() - start, {})
    steps = num_steps or 500
    settings: Settings = {"Q": 30, "M": 100, "steps": steps, "batch": 200, "optimiser": "Adam, 0.01 by cosine to 0"}
    with isolated(seed):
        model = BayesianGPLVM(len(Y), Y.shape[1], 30, num_inducing=100).initialize(Y, seed=seed)
        guide, loss = MeanFieldGuide(model), MeanFieldELBO(num_samples=2, max_plate_nesting=1)
        history = fit(
            model,
            guide,
            Y,
            loss=loss,
            num_steps=steps,
            batch_size=200,
            optim=JointAdam(lr=0.01),
            callbacks=[LRSchedule("cosine")],
            seed=seed,
            progress=False,
        )
        filled = model.impute(guide, Y, num_samples=16).mean
    yield measure("Bayesian GPLVM, mean field", filled, history.seconds[-1], settings)
    with isolated(seed):
        start = time.perf_counter()
        pictures, (steps, cool_steps) = imputation.Task(truth, hidden), (num_steps or 300, num_steps or 100)
        filled = imputation.random_features(pictures, 20, seed=seed, num_steps=steps, num_cool_steps=cool_steps)
        settings = {"Q": 20, "frequencies": 50, "steps": f"{steps} then {cool_steps}", "optimiser": "Adam, 0.02 then 0.003"}
        yield measure("RandomFeatureLVM", filled, time.perf_counter() - start, settings)


METHODS: dict[str, Callable[[Tensor, int, int | None], Fitted]] = {
    "IW, S = 5": radial,
    "IW, S = 5, locally linear": locally_linear,
    "RandomFeatureLVM": frequencies,
}
Infer = Callable[[BayesianGPLVM | RandomFeatureLVM, Guide, Tensor, TorchDistributionMixin], TorchDistributionMixin]
POSTERIORS: dict[str, Infer] = {
    "16 Gaussians": lambda model, guide, Y, mixture: model.infer_latents(
        guide, Y, method="variational", prior=mixture, num_starts=NUM_STARTS
    ),
    "Laplace": lambda model, guide, Y, mixture: model.infer_latents(guide, Y, prior=mixture, max_components=20, num_steps=30),
}
TASKS: dict[str, Callable[[int, int | None], Iterator[Measurement]]] = {
    "oilflow": oilflow,
    "frey": frey,
}


def predicted(
    model: BayesianGPLVM | RandomFeatureLVM, guide: Guide, Y: Tensor, mixture: TorchDistributionMixin, test: Tensor
) -> dict[str, Predicted]:
    """Predictions of the entries of rows under each posterior of their latents."""
    return {name: moments(model, guide, infer(model, guide, Y, mixture), test) for name, infer in POSTERIORS.items()}


@torch.no_grad()
def moments(
    model: BayesianGPLVM | RandomFeatureLVM, guide: Guide, q: TorchDistributionMixin, truth: Float[Tensor, "B D"]
) -> Predicted:
    """Predictive mean, and log density at the truth, of each entry given latents of this distribution."""
    # Each part of the rows has a draw of its own of the global variables.
    draws = q.sample((NUM_DRAWS,)).split(NUM_DRAWS // 10)
    rows = truth.expand(len(draws[0]), *truth.shape).flatten(0, 1)
    parts = [model.predictive(guide, X.flatten(0, 1)) for X in draws]
    mean = torch.cat([part.mean for part in parts]).unflatten(0, (NUM_DRAWS, len(truth)))
    log_density = torch.cat([part.log_prob(rows) for part in parts]).unflatten(0, (NUM_DRAWS, len(truth)))
    return Predicted(mean.mean(0), log_density.logsumexp(0) - math.log(NUM_DRAWS))


def mixture_given(
    weights: Tensor, means: Tensor, covariances: Tensor, Y: Float[Tensor, "B D"], truth: Float[Tensor, "B D"]
) -> Predicted:
    """Predictions of a mixture of Gaussians, in closed form; the mean of an observed entry is its value."""
    mean, log_density = Y.clone(), torch.zeros_like(Y)
    for n, row in enumerate(Y):
        m = torch.isnan(row)
        o = ~m
        given = dist.MultivariateNormal(means[:, o], covariances[:, o][:, :, o])
        log_weight = (weights.log() + given.log_prob(row[o])).log_softmax(0)[:, None]
        gain = torch.linalg.solve(covariances[:, o][:, :, o], covariances[:, o][:, :, m])
        part_mean = means[:, m] + ((row[o] - means[:, o])[:, None] @ gain).squeeze(1)
        variance = covariances[:, m][:, :, m] - covariances[:, m][:, :, o] @ gain
        part = dist.Normal(part_mean, variance.diagonal(dim1=-2, dim2=-1).sqrt())
        mean[n, m] = (log_weight.exp() * part_mean).sum(0)
        log_density[n, m] = (log_weight + part.log_prob(truth[n, m])).logsumexp(0)
    return Predicted(mean, log_density)
