"""Annealed guides beside NumPyro's AutoSemiDAIS and AutoDAIS on oil flow: bound, reconstruction error, step time."""

import statistics
from collections.abc import Iterator
from itertools import product

import jax
import numpyro
from jaxtyping import Float
from torch import Tensor

from benchmarks.core.contestant import Case, Contestant, train_in_turn
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.numpyro_dais import NumPyroDAIS
from benchmarks.tasks.annealed import paper_chain
from benchmarks.tasks.oilflow import BATCH_SIZE, LATENT_DIM, LEARNING_RATE, NUM_INDUCING, standardised
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import CompiledELBO, MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS = 1
PEER = f"NumPyro {numpyro.__version__}"
PUBLISHED: list[Row] = []
NOTES = """\
All methods have the same model, initial values, learning rate of Adam and number K of transitions. AutoSemiDAIS anneals the
latents of the rows in a mini-batch, as our guide does. AutoDAIS anneals latents and inducing values together, on all rows at
every step. The bounds of both libraries are lower bounds of the same evidence; NumPyro draws u, our bound marginalises u. Our
chains are underdamped. Both libraries compile a whole step, ours by `CompiledELBO`. "compile" of ours is the time of the
slowest step minus the median, which is a part of "fit"; torch reuses earlier compilations in its cache on disk. "compile" of
NumPyro is the time of `lower().compile()`, which is not a part of "fit". Blocks of steps alternate between the methods, and
each method has at most one core. NumPyro's guides are corrected in two places, see `benchmarks/peers/numpyro_dais.py`; without
the corrections AutoDAIS does not use the learned hyperparameters."""


class Ours(Contestant):
    """Contestant with our model and an annealed guide."""

    def __init__(self, Y: Float[Tensor, "N D"], *, num_steps: int, batch_size: int | None, seed: int, compile: bool):
        def make() -> Case:
            model = BayesianGPLVM(len(Y), Y.shape[1], LATENT_DIM, num_inducing=NUM_INDUCING).to(Y)
            chain = paper_chain(model.initialize(Y, seed=seed))
            guide = AutoAnnealedLangevin(model, num_steps=num_steps, step_size=0.4, **chain)
            bound = MeanFieldELBO(num_samples=1, max_plate_nesting=1)
            return Case(model, guide, CompiledELBO(bound) if compile else bound, (Y,), batch_size, LEARNING_RATE)

        self._Y = Y
        super().__init__(make)

    def predict(self) -> Float[Tensor, "N D"]:
        """Mean of f at draws of latents and u, averaged over 64 of them."""
        with self.own_parameters():
            return self.model.reconstruct(self.guide, self._Y).f_mean


def run(*, quick: bool, seeds: int, device: str = "cpu") -> Iterator[Measurement]:
    """Measure all methods for each seed."""
    num_steps, lengths = (100, (5,)) if quick else (3000, (5, 10))
    with jax.default_device(jax.devices("gpu" if device == "cuda" else device)[0]):
        for seed in range(seeds):
            yield from measure(num_steps=num_steps, seed=seed, lengths=lengths, device=device)


def measure(
    *,
    num_steps: int,
    seed: int,
    lengths: tuple[int, ...] = (5, 10),
    block: int = 250,
    compile: bool = True,
    device: str = "cpu",
) -> Iterator[Measurement]:
    """Fit all methods in turn, a block of steps each, and measure them.

    :param num_steps: steps of each method.
    :param seed: seed of the start, of mini-batches and of noise.
    :param lengths: numbers K of transitions, each on mini-batches and on all rows.
    :param block: steps of a method before the next takes over.
    :param compile: compile our steps.
    :param device: of ours; NumPyro takes JAX's default.
    """
    Y = standardised().to(device)
    methods: dict[str, Ours | NumPyroDAIS] = {}
    for batch_size, K in product((BATCH_SIZE, None), lengths):
        rows = f"{batch_size or 'all'} rows"
        ours = Ours(Y, num_steps=K, batch_size=batch_size, seed=seed, compile=compile)
        peer = "AutoSemiDAIS" if batch_size else "AutoDAIS"
        methods[f"pyro_lvgp, K = {K}, {rows}"] = ours
        methods[f"{PEER} {peer}, K = {K}, {rows}"] = NumPyroDAIS(
            Y,
            ours.model,
            num_steps=K,
            learning_rate=LEARNING_RATE,
            batch_size=batch_size,
            guide="semi" if batch_size else "full",
        )
    seconds = train_in_turn(methods, num_steps, block=block, seed=seed, description=f"annealed_peers, seed {seed}")
    settings: Settings = {
        "Q": LATENT_DIM,
        "M": NUM_INDUCING,
        "steps": num_steps,
        "optimiser": f"Adam, rate {LEARNING_RATE:g}",
        "dtype": "float64",
    }
    for name, method in methods.items():
        values = {
            "negative bound [nats/row]": method.negative_bound(num_evaluations=32),
            "reconstruction MSE": (method.predict().to(device) - Y).square().mean().item(),
            "step [ms]": 1e3 * statistics.median(seconds[name]),
            "compile [s]": method.compile_seconds,
        }
        for metric, value in values.items():
            yield Measurement("oilflow", name, metric, value, sum(seconds[name]), settings)
