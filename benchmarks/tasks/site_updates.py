"""GP-VAE predictions of EEG trials that were not trained on, by number of updates of the encoder's sites."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.arrays import load_arrays
from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet, mask_entries

NUM_THREADS = 1
PUBLISHED: list[Row] = []
NUM_TRAINING, SMOOTH, WHITE, NUM_INDUCING, NUM_STEPS = 6, 3, 4, 50, 600
NUMBERS_OF_UPDATES = (0, 1, 5, 10, 20, 40)
NOTES = """\
Ten trials of seven electrodes, standardised over all trials: six to train on, four to predict. GP-VAEs have three smooth and
four white latents, a noise variance for each electrode, and IndexNet encoders, which are trained with half of the entries
hidden at random (600 steps of `fit`, two trials each). "sparse" is a sparse GP-VAE with a linear decoder and 50 inducing
points. "three electrodes": FZ, F1 and F2 are hidden in the last 100 of 256 samples. "six electrodes": all but one are. "all
electrodes": 20 samples of all are. "scaled" and "shifted": as "three electrodes", with trials multiplied by 4, or 5 standard
deviations higher, which the encoder has never seen.

MSE is the mean squared error of hidden entries divided by their variance; NLL is minus their mean log density; coverage is
the share of hidden entries within 1.645 predictive standard deviations; prediction [s] is the time of one call of `predict`
for the four trials."""
METHODS = {"linear": "linear decoder", "network": "network decoder", "sparse": "sparse processes"}
TASKS = tuple(METHODS)


@dataclass(frozen=True)
class Trials:
    """Trials with hidden entries.

    :param Y: values.
    :param hidden: mask of the entries to predict.
    """

    Y: Float[Tensor, "B N D"]
    hidden: Bool[Tensor, "B N D"]


def trials_by_name(Y: Float[Tensor, "B N D"]) -> dict[str, Trials]:
    """Test trials by name."""
    three, six, every = (torch.zeros(Y.shape, dtype=torch.bool) for _ in range(3))
    three[:, -100:, :3] = six[:, -100:, :6] = every[:, 100:120] = True
    return {
        "three electrodes": Trials(Y, three),
        "six electrodes": Trials(Y, six),
        "all electrodes": Trials(Y, every),
        "three electrodes, scaled": Trials(4.0 * Y, three),
        "three electrodes, shifted": Trials(Y + 5.0, three),
    }


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure predictions by all numbers of updates, of one model or of all."""
    data = load_arrays("eeg_trials")
    t, Y = torch.as_tensor(data["t"]).double()[:, None], torch.as_tensor(data["Y"]).double()
    Y = (Y - Y.mean((0, 1))) / Y.flatten(0, 1).std(0)
    for task in [only] if only else TASKS:
        for seed in tqdm(range(seeds), desc=task, unit="seed"):
            yield from measure(task, t, Y, seed=seed, num_steps=3 if quick else NUM_STEPS)


def make_pair(task: str, D: int) -> tuple[Any, StructuredGPGuide]:
    """Make a model and its guide."""
    kernel, decoder = (
        RBF(1, lengthscale=0.1, batch_shape=(SMOOTH,)),
        (MLP if task == "network" else nn.Linear)(SMOOTH + WHITE, D),
    )
    of_f, of_w = IndexNet(D, SMOOTH).double(), IndexNet(D, WHITE).double()
    sizes = {"independent_dim": WHITE, "num_data": NUM_TRAINING}
    if task == "sparse":
        Z = torch.linspace(0.0, 1.0, NUM_INDUCING)[:, None]
        sparse = SparseGPVAE(kernel, decoder, Z, Gaussian(data_dim=D), **sizes).double()
        return sparse, SparseStructuredGPGuide(sparse, encoders={"u": of_f, "w": of_w})
    model = GPVAE(kernel, decoder, Gaussian(data_dim=D), **sizes).double()
    return model, StructuredGPGuide(model, encoders={"f": of_f, "w": of_w})


def measure(
    task: str, t: Float[Tensor, "N 1"], Y: Float[Tensor, "B N D"], *, seed: int, num_steps: int
) -> Iterator[Measurement]:
    """Fit a model to the training trials, and score predictions of the others."""
    D = Y.shape[-1]
    settings: Settings = {"steps": num_steps}
    with isolated(seed):
        model, guide = make_pair(task, D)
        loss = StructuredELBO(corruption=mask_entries(0.5))
        start = time.perf_counter()
        fit(model, guide, t, Y[:NUM_TRAINING], loss=loss, num_steps=num_steps, batch_size=2, seed=seed, progress=False)
        seconds = time.perf_counter() - start
        for name, trials in trials_by_name(Y[NUM_TRAINING:]).items():
            for guide.num_eval_site_updates in NUMBERS_OF_UPDATES:
                for metric, value in scores(model, guide, t, trials).items():
                    method = f"{METHODS[task]}, {guide.num_eval_site_updates} updates"
                    yield Measurement(name, method, metric, value, seconds, settings)


def scores(model: Any, guide: StructuredGPGuide, t: Float[Tensor, "N 1"], trials: Trials) -> dict[str, float]:
    """Scores of the hidden entries."""
    hidden = trials.hidden
    with isolated(0):
        start = time.perf_counter()
        predicted = model.predict(guide, t, trials.Y.masked_fill(hidden, torch.nan), num_samples=200)
        seconds = time.perf_counter() - start
    error = (predicted.mean - trials.Y)[hidden]
    return {
        "MSE": (error.square().mean() / trials.Y[hidden].var(correction=0)).item(),
        "NLL": -predicted.log_prob(trials.Y)[hidden].mean().item(),
        "coverage": (error.abs() < 1.645 * predicted.stddev[hidden]).double().mean().item(),
        "prediction [s]": seconds,
    }
