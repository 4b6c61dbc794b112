"""When a fit stops by itself, resumption, and the warning of a fit that ends too early."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.distributions import constraints

from pyro_lvgp.infer import (
    Block,
    Callback,
    Checkpoint,
    EarlyStopping,
    FitResult,
    FitState,
    LRSchedule,
    StopOnConvergence,
    _fit,
    fit,
)
from tests.helpers.fits import Climb, OnStep, no_guide

RISING = "the bound was still rising when the fit ended, by 50 ± 0 nats per entry over 50 steps; take more steps"
Y = torch.randn(12, generator=torch.Generator().manual_seed(0))


def stopped_after(bounds: np.ndarray, rule: StopOnConvergence, num_entries: int = 1) -> int:
    """Number of steps of a fit with these bounds; all of them if the rule does not stop it."""
    state = FitState(no_guide, no_guide, num_steps=len(bounds))
    state.history.num_entries = num_entries
    rule.on_start(state)
    for bound in bounds:
        state.history.losses.append(-bound)
        rule.on_step(state)
        if state.is_finished:
            break
    return state.step


def saturating(num_series: int, *, scale: float, sd: float, num_steps: int = 40_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return -np.exp(-np.arange(num_steps) / scale) + sd * rng.standard_normal((num_series, num_steps))


@pytest.mark.parametrize(("scale", "sd"), [(300.0, 0.0), (300.0, 0.01), (1000.0, 0.01)])
def test_the_fit_stops_soon_after_the_bound_is_flat(scale: float, sd: float):
    lengths = np.array([stopped_after(bounds, StopOnConvergence()) for bounds in saturating(10, scale=scale, sd=sd)])
    remaining = np.exp(-lengths / scale)  # of a rise by 1
    assert remaining.max() < (0.001 if sd == 0.0 else 0.02)
    assert lengths.max() < 20.0 * scale


def test_the_fit_does_not_stop_while_the_bound_rises():
    noise = 0.05 * np.random.default_rng(0).standard_normal((5, 5000))
    assert all(stopped_after(bounds, StopOnConvergence()) == 5000 for bounds in noise + 1e-3 * np.arange(5000))
    logarithm = np.log(1.0 + np.arange(5000))  # rises by 0.1 in every tenth
    assert stopped_after(logarithm, StopOnConvergence(0.05)) == 5000
    assert stopped_after(logarithm, StopOnConvergence(0.2)) == 556
    assert stopped_after(logarithm, StopOnConvergence(0.05), num_entries=4) == 556  # the tolerance is per entry


@pytest.mark.parametrize(
    ("rising", "patience", "last"),
    [([], 1, 500), ([], 2, 556), ([], 3, 618), ([500], 1, 556), ([556], 1, 500), ([556], 2, 687), ([500, 618], 2, 764)],
)
def test_checks_must_pass_in_a_row(rising: list[int], patience: int, last: int):
    bounds = np.zeros(1000)
    for step in rising:  # at which a check finds a higher bound in the last tenth than in the tenth before
        bounds[step - step // 100 * 10 :] += 1.0
    assert stopped_after(bounds, StopOnConvergence(patience=patience)) == last


@pytest.mark.parametrize(("options", "match"), [({"tolerance": 0.0}, "tolerance, got 0"), ({"patience": 0}, "patience of 1")])
def test_what_cannot_be_is_refused(options: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        StopOnConvergence(**options)


def model(y: Tensor, idx: Tensor | None = None) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(Y), subsample=idx):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def guide(y: Tensor, idx: Tensor | None = None) -> None:
    loc, scale = pyro.param("mean", torch.tensor(1.0)), pyro.param("scale", torch.tensor(0.3), constraint=constraints.positive)
    pyro.sample("loc", dist.Normal(loc, scale))


def optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


MINI_BATCHES = {"batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "all rows": {},
    "mini-batches": MINI_BATCHES,
    "compiled": {"compile": True},
    "blocks": {"optim": [Block("all", params=["mean", "scale"], optimizer=optimizer)]},
}


def fitted(*callbacks: Callback, **options: Any) -> FitResult:
    pyro.clear_param_store()
    return fit(model, guide, Y, callbacks=callbacks, progress=False, **options)


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_fit_stops(case: str):
    tolerance = 0.5  # at which a short fit has converged
    history = fitted(StopOnConvergence(tolerance), num_steps=2000, **CASES[case])
    assert len(history.losses) in (556, 618, 687, 764)
    assert history.converged
    assert history.steps_per_epoch == (3 if case == "mini-batches" else 1)
    assert history.tolerance == tolerance


def test_auto_stops_by_the_default_rule_unless_another_is_given():
    assert len(fitted(num_steps="auto").losses) < 5000
    history = fitted(StopOnConvergence(0.5, patience=1), num_steps="auto", **MINI_BATCHES)
    assert len(history.losses) < 700
    assert history.tolerance == 0.5


def test_auto_has_a_largest_number_of_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_fit, "MAX_STEPS", 500)
    with pytest.warns(ConvergenceWarning, match=RISING):
        history = Climb().fit(optim=SGD({"lr": 1.0}), num_steps="auto")
    assert len(history.losses) == 500


@pytest.mark.parametrize("options", [{"num_steps": "auto"}, {"num_steps": 10, "callbacks": [StopOnConvergence()]}])
def test_a_schedule_that_needs_the_number_of_steps_is_refused(options: dict[str, Any]):
    options = {"callbacks": []} | options
    options["callbacks"] = [LRSchedule("cosine"), *options["callbacks"]]
    with pytest.raises(ValueError, match="expected a fixed number of steps for the schedule"):
        Climb().fit(**options)


def test_another_word_is_refused(unchecked: None):
    with pytest.raises(TypeError, match="expected num_steps to be an integer, got 'until flat'"):
        Climb().fit(num_steps="until flat")


class Killed(Exception):
    pass


def kill(step: int, loss: float) -> None:
    if step == 520:
        raise Killed


def test_a_fit_that_was_killed_between_two_checks_stops_where_it_would_have(tmp_path: Path):
    rule, checkpoint = StopOnConvergence(0.5), Checkpoint(tmp_path / "fit.pt", every=510)
    with pytest.raises(Killed):
        fitted(rule, checkpoint, OnStep(kill), num_steps="auto", **MINI_BATCHES)
    steps: list[int] = []
    resumed = fitted(
        StopOnConvergence(0.5), checkpoint, OnStep(lambda step, loss: steps.append(step)), num_steps="auto", **MINI_BATCHES
    )
    assert steps[0] == 510
    assert resumed.losses == fitted(StopOnConvergence(0.5), num_steps="auto", **MINI_BATCHES).losses
    again = fitted(StopOnConvergence(0.5), checkpoint, num_steps="auto", **MINI_BATCHES)  # stopped, and takes no more steps
    assert again.losses == resumed.losses


def test_early_stopping_scores_the_parameters_after_the_last_step():
    flat = fit(
        lambda: pyro.factor("loss", 0.0 * pyro.param("p", torch.tensor(0.0))),
        no_guide,
        num_steps="auto",
        callbacks=[EarlyStopping(lambda: 1.0, every=400)],
        progress=False,
    )
    assert [step for step, _ in flat.scores] == [400, 556]


def rising_fit(**options: Any) -> FitResult:
    return Climb().fit(**{"optim": SGD({"lr": 1.0}), "num_steps": 500} | options)


def test_a_fit_that_ends_while_the_bound_rises_warns_once():
    with pytest.warns(ConvergenceWarning) as caught:
        history = rising_fit()
    assert [str(warning.message)[: len(RISING)] for warning in caught] == [RISING]
    assert history.gain == (50.0, 0.0, 50)
    assert history.converged is False


class StopAtTheEnd(Callback):
    def on_step(self, state: FitState) -> None:
        if state.step == 500:
            state.stop()


def interrupt(step: int, loss: float) -> None:
    if step == 499:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 499},
        {"num_steps": 1000, "callbacks": [StopAtTheEnd()]},
        {"callbacks": [OnStep(interrupt)]},
        {"callbacks": [EarlyStopping(itertools.count().__next__, every=100)]},
        {"optim": SGD({"lr": 1e-6})},  # a rise below the tolerance
    ],
)
def test_no_warning_of_fits_that_are_short_or_stopped_or_converged(options: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rising_fit(**options)
