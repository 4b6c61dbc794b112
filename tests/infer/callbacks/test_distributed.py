"""Fits in two processes against fits in one."""

import itertools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer.autoguide import AutoDelta
from torch import Tensor

from benchmarks.core.joined import in_processes
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import (
    Block,
    Callback,
    Checkpoint,
    Distributed,
    EarlyStopping,
    FitResult,
    JointOptim,
    StopOnConvergence,
    fit,
)
from pyro_lvgp.models import BayesianGPLVM
from tests.helpers import ROOT
from tests.helpers.fits import OnStep

NUM_PROCESSES = 2
Results = Mapping[Callable[[int], Any], tuple[Any, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Results of each function in each process, all in the same processes, since these take seconds to start."""
    with pytest.raises(FileNotFoundError):  # neither process has a result
        in_processes(partial(killed, folder / "killed"), NUM_PROCESSES)
    works = (
        fitted_to_half,
        fitted_in_batches,
        stopped_at_convergence,
        rising,
        interrupted,
        resumed,
        resumed_after_a_death,
        fitted_without_names,
        late_and_idle,
    )
    joined = in_processes(partial(in_turn, works, folder), NUM_PROCESSES)
    return dict(zip(works, zip(*joined, strict=True), strict=True))


def in_turn(works: Sequence[Callable[[int], Any]], folder: Path, rank: int) -> list[Any]:
    """Results of functions that are called in a folder, each with an empty parameter store and the same seed."""
    os.chdir(folder)
    results = []
    for work in works:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        results.append(work(rank))
    return results


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", 40, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def fitted(parts: slice, *callbacks: Callback) -> tuple[Tensor, list[float]]:
    """The mode of a regression on some of 40 rows, scaled to all."""
    x, y = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tensor_split([2], -1)
    guide = AutoDelta(regression)
    optim = JointOptim(torch.optim.Adam, {"lr": 0.1}, clip_factor=2.0)
    how: Any = {"optim": optim, "num_steps": 20, "callbacks": callbacks, "progress": False}
    history = fit(regression, guide, x[parts], y[parts, 0], **how)
    return guide.median()["w"].detach(), history.losses


def fitted_to_half(rank: int) -> tuple[Tensor, list[float]]:
    return fitted(slice(rank, None, NUM_PROCESSES), Distributed())


def test_halves_of_the_data_make_the_fit_of_all(results: Results):
    mode, losses = fitted(slice(None))
    for own_mode, own_losses in results[fitted_to_half]:
        torch.testing.assert_close(own_mode, mode)
        torch.testing.assert_close(torch.tensor(own_losses), torch.tensor(losses))


class Seen(BayesianGPLVM):
    """Remembers the rows of its mini-batches."""

    batches: list[list[int]]

    def mini_batch(self, idx: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        self.batches.append(sorted(idx.tolist()))
        return *(arg[idx] for arg in args), idx


def fitted_in_batches(rank: int) -> tuple[dict[str, Tensor], FitResult, list[list[int]]]:
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    model = Seen(12, 3, latent_dim=2, num_inducing=4).initialize(Y, seed=rank)
    model.batches = []
    with torch.no_grad():
        model.kernel.lengthscale = torch.full((2,), 1.0 + rank)  # starts are those of the first process
    guide = MeanFieldGuide(model)
    scores = iter([1.0, 0.0, 2.0] if rank == 0 else [1.0, 3.0, 2.0])  # of which the mean is lowest at first
    stopping = EarlyStopping(lambda: next(scores), every=2, patience=2)
    result = fit(model, guide, Y, num_steps=8, batch_size=4, callbacks=[stopping, Distributed()], progress=False)
    values = {name: value.detach() for name, value in pyro.get_param_store().items()}
    model.batches.remove([0, 1, 2, 3])  # of the example by which parameters are made
    return values, result, model.batches


def test_processes_share_the_rows_of_a_pass_and_stay_alike(results: Results):
    (first, result, rows), (second, other_result, other_rows) = results[fitted_in_batches]
    assert len(first) > 4
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert len(result.losses) == 6
    assert result.losses == other_result.losses
    assert result.scores == other_result.scores == [(2, 1.0), (4, 1.5), (6, 2.0)]
    for own, others in zip(rows, other_rows, strict=True):
        assert len(set(own) | set(others)) == 8
    assert rows[0] != rows[1]


def regression_on_rows(x: Tensor, y: Tensor, idx: Tensor | None = None) -> None:
    regression(x, y)


def stopped_at_convergence(rank: int) -> FitResult:
    x, y = torch.randn(40, 2), torch.randn(40)
    rule = StopOnConvergence(0.1)
    how: Any = {"batch_size": 5, "num_steps": 2000, "progress": False}
    return fit(regression_on_rows, AutoDelta(regression_on_rows), x, y, callbacks=[rule, Distributed()], **how)


def test_processes_stop_at_convergence_after_the_same_step(results: Results):
    result, other_result = results[stopped_at_convergence]
    assert len(result.losses) < 2000
    assert result.losses == other_result.losses
    assert result.steps_per_epoch == other_result.steps_per_epoch == 4
    assert result.converged


def rising(rank: int) -> list[str]:
    x, y = torch.randn(40, 2), 1e3 * torch.randn(40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(regression, AutoDelta(regression), x, y, num_steps=500, callbacks=[Distributed()], progress=False)
    return [warning.category.__name__ for warning in caught]


def test_the_first_process_alone_warns_of_a_bound_that_rises(results: Results):
    assert results[rising] == (["ConvergenceWarning"], [])


def interrupted(rank: int) -> FitResult:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run

    def interrupt(step: int, loss: float) -> None:
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    x, y = torch.randn(40, 2), torch.randn(40)
    return fit(regression, AutoDelta(regression), x, y, callbacks=[OnStep(interrupt), Distributed()], progress=False)


def test_interrupting_one_process_ends_the_fit_of_all(results: Results):
    for result in results[interrupted]:
        assert result.interrupted
        assert len(result.losses) == 4


def resumed(rank: int) -> tuple[list[float], list[float], list[int]]:
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

    def fitted_anew(num_steps: int, *callbacks: Callback) -> list[float]:
        pyro.clear_param_store()
        model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
        how: Any = {"num_steps": num_steps, "batch_size": 4, "progress": False}
        return fit(model, MeanFieldGuide(model), Y, callbacks=[*callbacks, Distributed()], **how).losses

    steps: list[int] = []
    checkpoint = Checkpoint("fit.pt")
    fitted_anew(4, checkpoint)
    losses = fitted_anew(6, checkpoint, OnStep(lambda step, loss: steps.append(step)))
    return losses, fitted_anew(6), steps


def test_checkpoints_are_of_each_process(results: Results, folder: Path):
    for losses, uninterrupted, steps in results[resumed]:
        assert losses == uninterrupted
        assert steps == [4, 5]
    assert (folder / "fit.pt.0").exists()
    assert (folder / "fit.pt.1").exists()


def killed(folder: Path, rank: int) -> None:
    """The second process ends without a word after the fifth step."""

    def die(step: int, loss: float) -> None:
        if step == 4 and rank == 1:
            os._exit(0)

    folder.mkdir(exist_ok=True)
    try:
        long_fit(folder, OnStep(die))
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
    os._exit(0)


def long_fit(folder: Path, *callbacks: Callback) -> list[float]:
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).tensor_split([2], -1)
    pyro.clear_param_store()
    every = [Checkpoint(folder / "fit.pt", every=2), *callbacks, Distributed()]
    how: Any = {"num_steps": 8, "callbacks": every, "progress": False}
    return fit(regression, AutoDelta(regression), x, y[:, 0], **how).losses


def resumed_after_a_death(rank: int) -> tuple[list[float], list[float], list[int]]:
    steps: list[int] = []
    losses = long_fit(Path("killed"), OnStep(lambda step, loss: steps.append(step)))
    Path("other").mkdir(exist_ok=True)
    return losses, long_fit(Path("other")), steps


def test_a_fit_ends_when_a_process_is_killed_and_resumes(results: Results, folder: Path):
    assert "one of them was killed" in (folder / "killed" / "error").read_text()
    for losses, uninterrupted, steps in results[resumed_after_a_death]:
        assert steps == [4, 5, 6, 7]
        assert losses == uninterrupted


def fitted_without_names(rank: int) -> tuple[list[float], list[Tensor]]:
    with pyro.settings.context(module_local_params=True):
        torch.manual_seed(rank)
        model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(torch.randn(12, 3))
        guide = MeanFieldGuide(model)
        history = fit(model, guide, torch.randn(12, 3), num_steps=2, callbacks=[Distributed()], progress=False)
        return history.losses, [param.detach() for part in (model, guide) for param in part.parameters()]


def test_parameters_need_no_names(results: Results):
    (losses, first), (other_losses, second) = results[fitted_without_names]
    assert losses == other_losses
    assert len(first) > 4
    assert all(map(torch.equal, first, second))


def late_and_idle(rank: int) -> list[float]:
    """Parameters that come late, and at some steps serve one process alone."""

    def model(y: Tensor) -> None:
        total = pyro.param("a", torch.tensor(float(rank)))
        if next(number) > 1:
            total = total + pyro.param("b", torch.tensor(1.0 + rank))
        if rank == 0:
            total = total + pyro.param("a", torch.tensor(0.0))
        pyro.factor("loss", -total.square())

    number = itertools.count()
    fit(model, lambda y: None, torch.zeros(1), num_steps=6, callbacks=[Distributed()], progress=False)
    return [pyro.param(name).item() for name in "ab"]


def test_parameters_that_come_late_are_those_of_the_first_process(results: Results):
    first, second = results[late_and_idle]
    assert first == second


def test_one_process_alone_is_refused():
    x, y = torch.randn(40, 2), torch.randn(40)
    with pytest.raises(RuntimeError, match="start the script by torchrun"):
        fit(regression, AutoDelta(regression), x, y, callbacks=[Distributed()], progress=False)


def test_the_script_of_the_page_runs_under_torchrun(tmp_path: Path):
    page = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    script = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "share.py").write_text(script.replace("1000", "3"), "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "share.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "digits.pt").exists(), done.stderr


def test_blocks_have_no_gradient_of_all_parameters():
    blocks = [Block("all", params=["*"], optimizer=torch.optim.Adam)]
    how: dict[str, Any] = {"optim": blocks, "callbacks": [Distributed()], "progress": False}
    with pytest.raises(ValueError, match=r"expected gradients of all parameters, .* got blocks"):
        fit(regression, AutoDelta(regression), torch.randn(40, 2), torch.randn(40), **how)
