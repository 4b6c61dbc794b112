"""Four estimators of the structured bound on a toy data set: convergence and variance."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import Callback, FitState, JointAdam, StructuredELBO, fit
from pyro_lvgp.infer.elbo.structured import GradientEstimator, Value
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, ZeroImputation

NUM_THREADS = 1
NUM_POINTS, NUM_EPOCHS, NUM_CHECKPOINTS, NUM_DRAWS = 100, 5000, 20, 50
THESIS: Settings = {"epochs": NUM_EPOCHS}
PUBLISHED = [Row("toy", "doubly-stochastic, path (thesis, section 5.2.1)", "bound [nats]", -19.17, None, 1, None, THESIS)]
NOTES = """\
Four functions of one input at 100 points (section 5.2 of the thesis), standardised; two latent processes with RBF kernels,
networks with two layers of 20, one draw per step, all points at every step, Adam with a learning rate of 1e-3. The thesis does
not state how the inputs are drawn (ours are uniform on its interval), nor the encoder (no entries are missing, and ours is
ZeroImputation). "bound" is the mean of semi-analytic values over 100 draws at the end of training. "sd" is the standard
deviation of single values there, for each estimator of the value on every fit. The thesis gives the bound of one of its fits,
and "less than -110" for the others."""

ESTIMATORS: list[tuple[Value, GradientEstimator]] = list(itertools.product(get_args(Value), get_args(GradientEstimator)))


class Progress(NamedTuple):
    """Bounds and standard deviations of their values at checkpoints of a fit.

    :param epochs: number of epochs at each checkpoint.
    :param bounds: means of semi-analytic values.
    :param sds: standard deviations of single values, by estimator of the value.
    """

    epochs: list[int]
    bounds: list[float]
    sds: dict[Value, list[float]]
    seconds: float


def toy() -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 4"]]:
    """Inputs and standardised outputs."""
    generator = torch.Generator().manual_seed(0)
    x = (200.0 * torch.rand(NUM_POINTS, generator=generator, dtype=torch.float64) - 50.0).sort().values
    first = 2.0 * (0.2 * x).sin() - 0.5 * x.cos()
    second = 2.0 * (0.5 * x).cos() + 2.0 * (0.1 * x).sin() - 5.0
    Y = torch.stack([first, second, -first + 3.0 * second, 0.5 * first - 2.0 * second], 1)
    return x[:, None], (Y - Y.mean(0)) / Y.std(0, correction=0)


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Measure fits by each estimator, for each seed."""
    for (value, gradient), seed in tqdm(list(itertools.product(ESTIMATORS, range(seeds))), desc="toy", unit="fit"):
        progress = train(value, gradient, seed=seed, num_epochs=40 if quick else NUM_EPOCHS)
        found = {"bound [nats]": progress.bounds[-1]} | {f"sd, {name}": sds[-1] for name, sds in progress.sds.items()}
        for metric, number in found.items():
            yield Measurement("toy", f"{value}, {gradient}", metric, number, progress.seconds, {})


def train(value: Value, gradient: GradientEstimator, *, seed: int, num_epochs: int = NUM_EPOCHS) -> Progress:
    """Fit, and estimate bounds and standard deviations at checkpoints."""
    x, y = toy()
    values = {name: StructuredELBO(value=name, max_plate_nesting=1) for name in get_args(Value)}
    mean = StructuredELBO(num_particles=100, max_plate_nesting=1)
    progress = Progress([], [], {name: [] for name in values}, 0.0)
    with isolated(seed):
        model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 4, (20, 20), nn.ReLU), Gaussian(0.1)).double()
        guide = StructuredGPGuide(model, encoders={"f": ZeroImputation(4, 2, (20, 20)).double()})

        class Measure(Callback):
            """Bounds, and standard deviations of their estimates, at checkpoints."""

            def on_step(self, state: FitState) -> None:
                if state.step % (num_epochs // NUM_CHECKPOINTS) == 0:
                    progress.epochs.append(state.step)
                    progress.bounds.append(-mean.loss(model, guide, x, y))
                    for name, elbo in values.items():
                        drawn = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(NUM_DRAWS)])
                        progress.sds[name].append(drawn.std().item())

        start = time.perf_counter()
        loss = StructuredELBO(value=value, gradient_estimator=gradient, max_plate_nesting=1)
        how: dict[str, Any] = {"num_steps": num_epochs, "optim": JointAdam(lr=1e-3), "seed": seed, "progress": False}
        fit(model, guide, x, y, loss=loss, callbacks=[Measure()], **how)
    return progress._replace(seconds=time.perf_counter() - start)
