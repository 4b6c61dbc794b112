"""Time to a fit of a user's own model by chains: item response in Pyro, and the same in NumPyro."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as jax_dist
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal, AutoSemiDAIS
from torch import Tensor

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks.speed import seconds_of
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_PERSONS, NUM_ITEMS, NUM_SKILLS, NUM_TRANSITIONS, LEARNING_RATE = 400, 12, 2, 8, 5e-3
PUBLISHED: list[Row] = []
NOTES = """\
400 persons answer 12 items: the logit of a right answer is aᵀx - b, with two abilities x of each person, log-normal
discriminations a and normal difficulties b of each item. Abilities have chains of eight transitions, items a mean-field
Gaussian. All persons are in each step, float32. "pyro_lvgp" is `fit(compile="torchscript")`, which a user chooses for a
model function of their own; "eager" is the default for one. NumPyro's `AutoSemiDAIS` compiles its step; its chains are
Hamiltonian without taming, so that the fits have equal numbers of gradients, and bounds of their own. "all in" are the wall
seconds from the data to the last step, "step" is the median of the steps, "before" the rest. Run it with `taskset -c 0`."""
TASKS = ("pyro_lvgp", "pyro_lvgp, eager", f"NumPyro {numpyro.__version__}")


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods, or one, for each seed."""
    num_steps = 20 if quick else 3000
    settings: Settings = {"K": NUM_TRANSITIONS, "persons": NUM_PERSONS, "items": NUM_ITEMS, "steps": num_steps}
    fits: dict[str, Fit] = {
        TASKS[0]: lambda *args: ours(*args, compile="torchscript"),
        TASKS[1]: lambda *args: ours(*args, compile=False),
        TASKS[2]: in_numpyro,
    }
    for seed in range(seeds):
        answers = simulate(seed=seed)
        for method in [only] if only else TASKS:
            values = seconds_of(partial(fits[method], answers, num_steps, seed), num_steps)
            for metric, value in values.items():
                yield Measurement("item response, annealed, K = 8", method, metric, value, values["all in [s]"], settings)


Fit = Callable[[Float[Tensor, "person item"], int, int], list[float]]


def model(answers: Float[Tensor, "person item"] | None) -> Tensor:
    """Item response with two abilities, in Pyro."""
    with pyro.plate("items", NUM_ITEMS, dim=-1):
        a = pyro.sample("discrimination", dist.LogNormal(torch.zeros(NUM_SKILLS), 0.5).to_event(1))
        b = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", NUM_PERSONS, dim=-1):
        x = pyro.sample("ability", dist.Normal(torch.zeros(NUM_SKILLS), 1.0).to_event(1))
        return pyro.sample("answers", dist.Bernoulli(logits=x @ a.mT - b).to_event(1), obs=answers)


def simulate(*, seed: int) -> Float[Tensor, "person item"]:
    """Draw answers from the model."""
    with seeded(seed):
        return model(None)


def ours(answers: Float[Tensor, "person item"], num_steps: int, seed: int, *, compile: Any) -> list[float]:
    """Fit the model with chains for the abilities."""
    pyro.clear_param_store()
    guide = AutoAnnealedLangevin(model, local_plate="persons", num_steps=NUM_TRANSITIONS)
    history = fit(
        model,
        guide,
        answers,
        loss=MeanFieldELBO(num_samples=1),
        optim=JointAdam(LEARNING_RATE),
        num_steps=num_steps,
        compile=compile,
        seed=seed,
        progress=False,
    )
    return np.diff(history.seconds).tolist()


def items() -> tuple[jax.Array, jax.Array]:
    """Sites of the items, in NumPyro."""
    with numpyro.plate("items", NUM_ITEMS, dim=-1):
        a = numpyro.sample("discrimination", jax_dist.LogNormal(jnp.zeros(NUM_SKILLS), 0.5).to_event(1))
        b = numpyro.sample("difficulty", jax_dist.Normal(0.0, 1.0))
    return a, b


def in_numpyro(answers: Float[Tensor, "person item"], num_steps: int, seed: int) -> list[float]:
    """Fit the same model with ``AutoSemiDAIS``."""
    y = jnp.asarray(answers.numpy())

    def local_model(sites: tuple[jax.Array, jax.Array]) -> None:
        a, b = sites
        with numpyro.plate("persons", NUM_PERSONS, subsample_size=NUM_PERSONS, dim=-1):
            x = numpyro.sample("ability", jax_dist.Normal(jnp.zeros(NUM_SKILLS), 1.0).to_event(1))
            numpyro.sample("answers", jax_dist.Bernoulli(logits=x @ a.T - b).to_event(1), obs=y)

    def joint() -> None:
        local_model(items())

    guide = AutoSemiDAIS(joint, local_model, AutoNormal(items), K=NUM_TRANSITIONS, subsample_plate="persons")
    svi = SVI(joint, guide, numpyro.optim.Adam(LEARNING_RATE), Trace_ELBO())
    state = jax.jit(svi.init)(jax.random.key(seed))
    update = jax.jit(svi.update)
    times = []
    for _ in range(num_steps):
        state, _ = jax.block_until_ready(update(state))
        times.append(time.perf_counter())
    return np.diff(times).tolist()
