"""GP-VAE imputation of EEG and Jura data, by encoder, beside regressions."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.regressions import EXPENSIVE, PEERS
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.diagnostics import gap_folds, held_out_log_prob, stacking_weights
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import Callback, EarlyStopping, JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import RBF, Kernel, Matern, Periodic
from pyro_lvgp.likelihoods import Gaussian, Likelihood, StudentT
from pyro_lvgp.models import GPVAE, Prediction
from pyro_lvgp.networks import (
    MLP,
    Corruption,
    FactorNet,
    IndexNet,
    PointNet,
    ZeroImputation,
    mask_entries,
    mask_like_rows,
    mask_like_shifted,
)

NUM_THREADS = 1
BEST_SHARE = 2 / 3
NOTES = """\
All models predict from the posteriors of their encoders, as in the thesis, without updates of sites.

"eeg" and "jura" follow the thesis: mini-batches of 100 points, 3000 epochs without their last, shorter batch, Adam with a
learning rate of 1e-3, networks with two layers of 20 and ReLU (PointNet and IndexNet: one layer on each side of a
20-dimensional sum), and the two thirds of the runs with the highest bounds. Inputs are not scaled; outputs are standardised by
the moments of their observed entries. "eeg_narrow" has the initial values of the code of the thesis's authors, which the
thesis does not state: standard deviations of 0.1 for sites and noise, a noise variance for each output, and one hidden layer
in the decoder; 9000 steps, three per epoch. "eeg_sizes" and "eeg_variants" change one setting of the IndexNet of "eeg_narrow":
the number of latents, the decoder, or the input corruption. "eeg_composite" adds a periodic kernel to that of each smooth
latent: of "eeg_narrow", of "eeg", and of "eeg_selected", which is shown without it too. "eeg_stopped" restores the parameters
that predict a block of training entries best, which the fit does not use and which are evaluated every 250 steps. The row
"white latents" has one smooth and four white ones.

"eeg_defaults" and "jura_defaults" (in logarithms) have the defaults of the library, and all runs: 1000 steps of `fit` on all
points, noise of 0.3, default encoders, a network with two layers of 64 as decoder. "as docs/gp_vae.md begins" has a linear
decoder instead, four white latents beside the smooth ones, a noise variance for each output, and input corruption with gaps
like those of the data. "jura_encoders" is the model of "jura_selected" with the lowest test error, with each of the encoders.

"eeg_selected" and "jura_selected" select among candidates by their predictions of additionally hidden training entries: three
folds, each of which hides a third of the rows in the columns that have gaps, and one fit for each fold and candidate
("held-out NLL", of standardised entries; `pyro_lvgp.diagnostics`). Then each candidate is fitted to all training entries.
Candidates use all points at every step, a learning rate of Adam that falls from 0.01 to 0 along a cosine, a linear decoder, a
noise variance for each output, SiLU, and input corruption with gaps like those of the data (`pyro_lvgp.networks`). Those of
Jura model logarithms, take fewer steps, and include two more candidates, which were added after test errors of such models had
been seen. "selected" is the candidate with the lowest held-out NLL. "stacked" is the mixture of all candidates, one run of
each, with the weights under which the held-out entries have the highest density. "together" is the mixture of all runs.

Metrics are in the units of the data. SMSE is averaged over the columns with hidden entries. NLL is the mean negative log
density per hidden entry of a Gaussian with the predictive moments (for logarithms, of a log-normal, whose median is the
prediction in the MAE). "mixture NLL" is that of the mixture over 200 draws. Rows without a standard deviation do not depend on
a seed, or are one run."""


@dataclass(frozen=True)
class Task:
    """Table with hidden entries.

    :param x: inputs.
    :param Y: truth, in units of the data.
    :param hidden: mask of the entries to predict.
    :param lengthscale: initial lengthscale of all latents.
    :param latent_dim: number of smooth latents.
    :param error: ``"SMSE"`` or ``"MAE"``.
    :param gaps: input corruption with gaps like those of the data.
    :param log: whether to model logarithms.
    """

    x: Float[Tensor, "N P"]
    Y: Float[Tensor, "N D"]
    hidden: Bool[Tensor, "N D"]
    lengthscale: float
    latent_dim: int
    error: str
    gaps: Corruption
    log: bool = False

    @property
    def candidates(self) -> dict[str, "Method"]:
        """GP-VAEs for model selection."""
        return OVER_PLACES if self.x.shape[-1] > 1 else CANDIDATES

    @property
    def values(self) -> Float[Tensor, "N D"]:
        """Modelled values: the data, or their logarithms."""
        return self.Y.log() if self.log else self.Y

    def scores(self, mean: Tensor, stddev: Tensor) -> dict[str, float]:
        """Error and NLL of Gaussian predictions of the values."""
        guess = mean.exp() if self.log else mean
        columns = [(guess[m, d], self.Y[m, d]) for d, m in enumerate(self.hidden.T) if m.any()]
        if self.error == "SMSE":
            error = np.mean([((a - b).square().mean() / b.var(correction=0)).item() for a, b in columns])
        else:
            error = np.mean([(a - b).abs().mean().item() for a, b in columns])
        return {
            self.error: float(error),
            "NLL": self.nll(dist.Normal(mean, stddev, validate_args=False).log_prob(self.values)),
        }

    def scores_of_mixture(self, predicted: Prediction) -> dict[str, float]:
        """Scores of a predictive mixture of standardised entries, and its exact NLL."""
        _, centre, scale = self.data
        log_prob = predicted.log_prob((self.values - centre) / scale) - scale.log()
        moments = self.scores(centre + scale * predicted.mean, scale * predicted.stddev)
        return moments | {"mixture NLL": self.nll(log_prob)}

    def nll(self, log_prob: Tensor) -> float:
        """Mean negative log density of the data, from that of the values."""
        return -(log_prob - (self.values if self.log else 0.0))[self.hidden].mean().item()

    @property
    def data(self) -> tuple[Float[Tensor, "N D"], Float[Tensor, " D"], Float[Tensor, " D"]]:
        """Observed values, standardised, and the mean and standard deviation of each column."""
        observed = self.values.masked_fill(self.hidden, torch.nan)
        centre = observed.nanmean(0)
        scale = (observed - centre).square().nanmean(0).sqrt()
        return (observed - centre) / scale, centre, scale


@dataclass(frozen=True)
class Method:
    """Settings of a GP-VAE and of its fit.

    :param encoder: class of its encoders.
    :param activation: activation of its networks.
    :param linear: whether the decoder is linear.
    :param smooth: number of smooth latents; that of the task if None.
    :param white: number of independent latents.
    :param own_noise: whether each output has a noise variance of its own.
    :param noise: initial noise variance, or squared scale.
    :param df: degrees of freedom of Student's t noise; None for Gaussian noise.
    :param init_scale: initial standard deviation of the sites.
    :param decoder_dims: hidden layers of the decoder.
    :param corruption: input corruption (eq. 5.6 of the thesis); ``"gaps"`` for gaps like those of the data.
    :param periodic: whether each kernel has a periodic kernel added to it.
    :param rough: whether kernels are Matérn-1/2, with lengthscales from a tenth to a half of the task's.
    :param isotropic: whether a kernel has one lengthscale for all inputs.
    :param num_steps: number of steps of a fit.
    :param batch_size: number of points in a step; all of them if None.
    :param cosine: whether Adam's learning rate falls to zero along a cosine.
    :param stop_early: whether to stop early, by predictions of a third of the rows without gaps, in the columns with gaps.
    """

    encoder: type[nn.Module] = IndexNet
    activation: type[nn.Module] = nn.ReLU
    linear: bool = False
    smooth: int | None = None
    white: int = 0
    own_noise: bool = False
    noise: float = 0.1
    df: float | None = None
    init_scale: float = 0.7
    decoder_dims: tuple[int, ...] = (20, 20)
    corruption: Corruption | Literal["gaps"] | None = None
    periodic: bool = False
    rough: bool = False
    isotropic: bool = False
    num_steps: int | None = None
    batch_size: int | None = 100
    learning_rate: float = 1e-3
    cosine: bool = False
    stop_early: bool = False

    def kernel(self, task: Task, latent_dim: int) -> Kernel:
        """Kernel with a batch element for each smooth latent."""
        columns, batch = task.x.shape[-1], (latent_dim,)
        if self.rough:
            lengthscales = task.lengthscale * torch.linspace(0.1, 0.5, latent_dim)[:, None]
            return Matern(columns, 0.5, lengthscale=lengthscales, ard=not self.isotropic, batch_shape=batch)
        smooth = RBF(columns, lengthscale=task.lengthscale, ard=not self.isotropic, batch_shape=batch)
        return smooth + Periodic(columns, period=task.lengthscale, batch_shape=batch) if self.periodic else smooth


ENCODERS = {
    "ZeroImputation": Method(ZeroImputation),
    "PointNet": Method(PointNet),
    "IndexNet": Method(),
    "FactorNet": Method(FactorNet),
}
NARROW = {
    name: replace(method, init_scale=0.1, noise=0.01, own_noise=True, decoder_dims=(20,), num_steps=9000)
    for name, method in ENCODERS.items()
}
SIZES = {f"IndexNet, Q = {Q}": replace(NARROW["IndexNet"], smooth=Q) for Q in (5, 7, 9)}
VARIANTS = {
    "IndexNet, linear decoder": replace(NARROW["IndexNet"], linear=True),
    "IndexNet, encoding half (eq. 5.6)": replace(NARROW["IndexNet"], corruption=mask_entries(0.5)),
}
STOPPED = {name: replace(method, stop_early=True) for name, method in ENCODERS.items()}
METHODS = ENCODERS | {
    **{f"IndexNet, Q = {Q}": Method(smooth=Q) for Q in (5, 7, 9)},
    "IndexNet, linear decoder": Method(linear=True),
    "IndexNet, encoding half (eq. 5.6)": Method(corruption=mask_entries(0.5)),
    "IndexNet, RBF + periodic": Method(periodic=True),
    "IndexNet, noise per output": Method(own_noise=True),
    "IndexNet, linear decoder, white latents, noise per output": Method(linear=True, smooth=1, white=4, own_noise=True),
}
_TUNED = Method(
    activation=nn.SiLU,
    linear=True,
    own_noise=True,
    corruption="gaps",
    num_steps=2500,
    batch_size=None,
    learning_rate=0.01,
    cosine=True,
)
CANDIDATES = {
    "smooth": _TUNED,
    "1 smooth, 4 white": replace(_TUNED, smooth=1, white=4),
    "2 rough, 4 white": replace(_TUNED, smooth=2, white=4, rough=True),
}
_ISOTROPIC = replace(_TUNED, smooth=3, white=2, rough=True, isotropic=True, num_steps=1500)
_PLAIN = Method(
    activation=nn.SiLU,
    noise=0.3,
    init_scale=0.5,
    decoder_dims=(64, 64),
    num_steps=1000,
    batch_size=None,
    learning_rate=0.01,
)
_DOCUMENTED = replace(_PLAIN, linear=True, white=4, own_noise=True, corruption="gaps")
DEFAULTS = {
    "as docs/gp_vae.md begins": _DOCUMENTED,
    "the same without masking": replace(_DOCUMENTED, corruption=None),
    "the same without white latents": replace(_DOCUMENTED, white=0),
    "the same with one noise": replace(_DOCUMENTED, own_noise=False),
    "the same with a network": replace(_DOCUMENTED, linear=False),
    "a network and nothing else": _PLAIN,
}
COMPOSITE = {
    "IndexNet, RBF + periodic": replace(NARROW["IndexNet"], periodic=True),
    "IndexNet, linear decoder, RBF + periodic": Method(linear=True, periodic=True),
    "1 smooth, 4 white": CANDIDATES["1 smooth, 4 white"],
    "1 smooth, 4 white, RBF + periodic": replace(CANDIDATES["1 smooth, 4 white"], periodic=True),
}
OVER_PLACES = {name: replace(candidate, num_steps=1500) for name, candidate in CANDIDATES.items()} | {
    "3 rough, 2 white, isotropic": _ISOTROPIC,
    "3 rough, 2 white, isotropic, Student's t": replace(_ISOTROPIC, df=3.0),
}
OVER_PLACES_BY_ENCODER = {name: replace(_ISOTROPIC, df=3.0, encoder=method.encoder) for name, method in ENCODERS.items()}
THESIS = {  # tasks, where, error, and mean and standard deviation of error and NLL by method
    ("eeg", "eeg_narrow", "eeg_stopped"): (
        "Table 5.1",
        "SMSE",
        {
            "ZeroImputation": ((0.272, 0.030), (2.236, 0.367)),
            "PointNet": ((0.602, 0.088), (3.030, 1.341)),
            "IndexNet": ((0.238, 0.019), (2.012, 0.283)),
            "FactorNet": ((0.278, 0.043), (2.228, 0.210)),
        },
    ),
    ("eeg_composite",): ("section 5.3", "SMSE", {"IndexNet, RBF + periodic": ((0.188, 0.024), (1.621, 0.102))}),
    ("jura", "jura_encoders"): (
        "Table 5.2",
        "MAE",
        {
            "ZeroImputation": ((0.420, 0.008), (1.131, 0.090)),
            "IndexNet": ((0.437, 0.020), (1.120, 0.082)),
            "FactorNet": ((0.404, 0.005), (0.999, 0.062)),
            "IndexNet, linear decoder": ((0.487, 0.008), (1.179, 0.041)),
        },
    ),
}
PUBLISHED = [
    Row(task, f"{name} (thesis, {where})", metric, mean, sd, 10, None, {})
    for tasks, (where, error, methods) in THESIS.items()
    for task in tasks
    for name, values in methods.items()
    for metric, (mean, sd) in zip((error, "NLL"), values, strict=True)
]


def eeg() -> Task:
    """Seven electrodes over a second; the last 100 samples of three are hidden."""
    data = load_dataset("eeg")
    x, Y, hidden = torch.as_tensor(data["t"])[:, None], torch.as_tensor(data["Y"]), torch.as_tensor(data["test_mask"])
    return Task(x, Y, hidden, lengthscale=0.1, latent_dim=3, error="SMSE", gaps=mask_like_shifted)


def jura() -> Task:
    """Cadmium, nickel and zinc in the soil of 359 places; cadmium is hidden in 100."""
    data = load_dataset("jura")
    metals = [list(data["columns"]).index(metal) for metal in ("Cd", "Ni", "Zn")]
    x, Y, hidden = (torch.as_tensor(data[name]) for name in ("X", "Y", "test_mask"))
    return Task(x, Y[:, metals], hidden[:, metals], lengthscale=1.0, latent_dim=2, error="MAE", gaps=mask_like_rows)


TASKS = {
    "eeg": eeg,
    "jura": jura,
    "eeg_narrow": eeg,
    "eeg_sizes": eeg,
    "eeg_variants": eeg,
    "eeg_composite": eeg,
    "eeg_stopped": eeg,
    "eeg_selected": eeg,
    "eeg_defaults": eeg,
    "jura_defaults": lambda: replace(jura(), log=True),
    "jura_encoders": lambda: replace(jura(), log=True),
    "jura_selected": lambda: replace(jura(), log=True),
}
BY_BOUND = {
    "eeg": METHODS,
    "jura": METHODS,
    "eeg_narrow": NARROW,
    "eeg_sizes": SIZES,
    "eeg_variants": VARIANTS,
    "eeg_composite": COMPOSITE,
    "eeg_stopped": STOPPED,
}
ALL_RUNS = {"eeg_defaults": DEFAULTS, "jura_defaults": DEFAULTS, "jura_encoders": OVER_PLACES_BY_ENCODER}
FOLDS, EPOCHS = 3, 3000


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all tasks, or on one."""
    for name in [only] if only else list(TASKS):
        task = TASKS[name]()
        for peer, predict in PEERS.items():
            if quick and peer in EXPENSIVE:
                continue
            start = time.perf_counter()
            scores = task.scores(*predict(task.x, task.values, task.hidden, task.lengthscale))
            for metric, value in scores.items():
                yield Measurement(name, peer, metric, value, time.perf_counter() - start, {})
        yield from (selected if name.endswith("selected") else each)(name, task, seeds, 20 if quick else None)


def each(name: str, task: Task, seeds: int, num_steps: int | None) -> Iterator[Measurement]:
    """Scores of all methods over all of their runs, or over those with the highest bounds, as in the thesis."""
    settings: Settings = {"runs": seeds, "kept": seeds if name in ALL_RUNS else int(np.ceil(BEST_SHARE * seeds))}
    for method_name, method in tqdm((BY_BOUND | ALL_RUNS)[name].items(), desc=name, unit="method"):
        runs = [fit_to(task, method, task.data[0], seed=seed, num_steps=num_steps) for seed in range(seeds)]
        runs.sort(key=lambda run: -run.bound)
        for run in runs[: int(settings["kept"])]:
            for metric, value in run.scores(task).items():
                yield Measurement(name, method_name, metric, value, run.seconds, settings)


def selected(name: str, task: Task, seeds: int, num_steps: int | None) -> Iterator[Measurement]:
    """Scores of all candidates, of the one with the best validation score, and of their stacked mixture."""
    settings: Settings = {"runs": seeds, "folds": FOLDS}
    y, *_ = task.data
    predictors = {
        candidate: lambda y, method=method: fit_to(task, method, y, seed=0, num_steps=num_steps).predicted
        for candidate, method in task.candidates.items()
    }
    held_out = held_out_log_prob(predictors, y, gap_folds(y, FOLDS, consecutive=task.gaps is mask_like_shifted))
    best = max(held_out, key=lambda candidate: held_out[candidate].mean().item())
    weights = stacking_weights(held_out)
    fits: dict[str, list[Fitted]] = {}
    for candidate, method in task.candidates.items():
        fits[candidate] = [fit_to(task, method, y, seed=seed, num_steps=num_steps) for seed in range(seeds)]
        merits = {"held-out NLL": -held_out[candidate].mean().item(), "stacking weight": weights[candidate]}
        for run in fits[candidate]:
            for metric, value in (run.scores(task) | merits).items():
                for method_name in [candidate, "selected"] if candidate == best else [candidate]:
                    yield Measurement(name, method_name, metric, value, run.seconds, settings)

    def pooled(method_name: str, runs: Sequence[Fitted], shares: Sequence[float] | None = None) -> Iterator[Measurement]:
        predicted = Prediction.pool((run.predicted for run in runs), shares)
        for metric, value in task.scores_of_mixture(predicted).items():
            yield Measurement(name, method_name, metric, value, sum(run.seconds for run in runs), settings)

    shares = [weights[candidate] for candidate in fits]
    yield from pooled(f"selected, {seeds} runs together", fits[best])
    for runs in zip(*fits.values(), strict=True):
        yield from pooled("stacked", runs, shares)
    everything = [run for runs in fits.values() for run in runs]
    yield from pooled(f"stacked, {seeds} runs together", everything, [share for share in shares for _ in range(seeds)])


class Fitted(NamedTuple):
    """Predictions of all entries by a model fitted to standardised data."""

    predicted: Prediction
    bound: float
    seconds: float

    def scores(self, task: Task) -> dict[str, float]:
        """Scores of the hidden entries, and the bound."""
        return task.scores_of_mixture(self.predicted) | {"bound [nats]": self.bound}


def build(task: Task, method: Method, N: int, D: int) -> tuple[GPVAE, StructuredGPGuide]:
    """Model of N points and D outputs, and its guide."""
    Q = task.latent_dim if method.smooth is None else method.smooth
    sizes = (Q + method.white, D)
    decoder = nn.Linear(*sizes) if method.linear else MLP(*sizes, method.decoder_dims, method.activation)
    likelihood: Likelihood = Gaussian(method.noise, data_dim=D if method.own_noise else None)
    if method.df is not None:
        likelihood = StudentT(method.noise**0.5, df=method.df, data_dim=D if method.own_noise else None)
    model = GPVAE(method.kernel(task, Q), decoder, likelihood, independent_dim=method.white, num_data=N).double()
    options: dict[str, Any] = {"activation": method.activation, "init_scale": method.init_scale}
    latents = {"f": Q} | ({"w": method.white} if method.white else {})
    encoders = {name: method.encoder(D, size, **options).double() for name, size in latents.items()}
    return model, StructuredGPGuide(model, encoders=encoders, num_eval_site_updates=0)


def fit_to(task: Task, method: Method, y: Float[Tensor, "N D"], *, seed: int, num_steps: int | None) -> Fitted:
    """Fit one model to standardised data."""
    seen = y
    callbacks: list[Callback] = [LRSchedule("cosine")] if method.cosine else []
    with isolated(seed):
        model, guide = build(task, method, *y.shape)
        if method.stop_early:
            held_out = gap_folds(y, FOLDS, consecutive=task.gaps is mask_like_shifted)[-1]
            seen = y.masked_fill(held_out, torch.nan)

            def score() -> float:
                return -model.predict(guide, task.x, seen).log_prob(y)[held_out].mean().item()

            callbacks.append(EarlyStopping(score, every=250, patience=8))
        history = fit(
            model,
            guide,
            task.x,
            seen,
            loss=StructuredELBO(
                corruption=task.gaps if method.corruption == "gaps" else method.corruption, max_plate_nesting=1
            ),
            num_steps=num_steps or method.num_steps or EPOCHS * (len(y) // 100),
            batch_size=method.batch_size,
            optim=JointAdam(lr=method.learning_rate),
            callbacks=callbacks,
            seed=seed,
            progress=False,
        )
        predicted = model.predict(guide, task.x, y, num_samples=200)
        bound = -StructuredELBO(num_particles=50, max_plate_nesting=1).loss(model, guide, task.x, y)
    return Fitted(predicted, bound, history.seconds[-1])
