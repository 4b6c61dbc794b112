"""Fits in two processes against fits in one."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta
from torch import Tensor

from benchmarks.core.joined import in_processes
from pyro_lvgp._utils.distributed import Processes
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Block, Checkpoint, EarlyStopping, FitResult, JointOptim, fit
from pyro_lvgp.models import BayesianGPLVM
from tests.helpers import ROOT

NUM_PROCESSES = 2


def averaged(rank: int) -> tuple[list[Tensor | None], tuple[float, bool, bool], Tensor, str]:
    processes = Processes(True)
    params = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    params.append(torch.zeros(1, 2, dtype=torch.float64, requires_grad=True))
    params[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    if rank == 1:
        params[1].grad = torch.tensor([4.0, 6.0])
    params[3].grad = torch.full((1, 2), float(rank), dtype=torch.float64)
    processes.average_gradients(params)
    start = torch.full((2,), float(rank))
    processes.make_alike({"x": start})
    message = ""
    try:
        processes.make_alike({"y": torch.zeros(1 + rank)})
    except ValueError as error:
        message = str(error)
    together = processes.mean(float(rank)), processes.any(rank == 1), processes.any(False)
    return [param.grad for param in params], together, start, message


def test_means_over_processes():
    for gradients, together, start, message in in_processes(averaged, NUM_PROCESSES):
        first, second, third, fourth = (None if gradient is None else gradient.tolist() for gradient in gradients)
        assert first == [1.5, 3.0]
        assert second == [2.0, 3.0]  # none in one process
        assert third is None  # none in any
        assert fourth == [[0.5, 0.5]]
        assert gradients[3].dtype == torch.float64
        assert together == (0.5, True, False)
        assert start.tolist() == [0.0, 0.0]
        assert "expected the same parameters in all processes" in message


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", 40, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def fitted(parts: slice, num_steps: int, *, distributed: bool) -> tuple[Tensor, list[float]]:
    """The mode of a regression on some of 40 rows, scaled to all."""
    x, y = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tensor_split([2], -1)
    guide = AutoDelta(regression)
    optim = JointOptim(torch.optim.Adam, {"lr": 0.1}, clip_factor=2.0, distributed=distributed)
    how: Any = {"optim": optim, "num_steps": num_steps, "distributed": distributed, "progress": False}
    history = fit(regression, guide, x[parts], y[parts, 0], **how)
    return guide.median()["w"].detach(), history.losses


def fitted_to_half(rank: int) -> tuple[Tensor, list[float]]:
    return fitted(slice(rank, None, NUM_PROCESSES), 21, distributed=True)


def test_halves_of_the_data_make_the_fit_of_all():
    mode, losses = fitted(slice(None), 20, distributed=False)
    for own_mode, own_losses in in_processes(fitted_to_half, NUM_PROCESSES):
        torch.testing.assert_close(own_mode, mode)
        torch.testing.assert_close(torch.tensor(own_losses[1:]), torch.tensor(losses))  # the first step makes them alike


class Seen(BayesianGPLVM):
    """Remembers the rows of its mini-batches."""

    rows: list[list[int]]

    def mini_batch(self, idx: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        self.rows.append(sorted(idx.tolist()))
        return *(arg[idx] for arg in args), idx


def fitted_in_batches(rank: int) -> tuple[dict[str, Tensor], FitResult, list[list[int]]]:
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    model = Seen(12, 3, latent_dim=2, num_inducing=4).initialize(Y, seed=rank)
    model.rows = []
    with torch.no_grad():
        model.kernel.lengthscale = torch.full((2,), 1.0 + rank)  # starts are those of the first process
    guide = MeanFieldGuide(model)
    scores = iter([1.0, 0.0, 2.0] if rank == 0 else [1.0, 3.0, 2.0])  # of which the mean is lowest at first
    stopping = EarlyStopping(lambda: next(scores), every=2, patience=2)
    result = fit(model, guide, Y, num_steps=8, batch_size=4, early_stopping=stopping, distributed=True, progress=False)
    values = {name: value.detach() for name, value in pyro.get_param_store().items()}
    return values, result, model.rows


def test_processes_share_the_rows_of_a_pass_and_stay_alike():
    (first, result, rows), (second, other_result, other_rows) = in_processes(fitted_in_batches, NUM_PROCESSES)
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


def interrupted(rank: int) -> FitResult:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run

    def interrupt(step: int, loss: float) -> None:
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    x, y = torch.randn(40, 2), torch.randn(40)
    return fit(regression, AutoDelta(regression), x, y, callback=interrupt, distributed=True, progress=False)


def test_interrupting_one_process_ends_the_fit_of_all():
    for result in in_processes(interrupted, NUM_PROCESSES):
        assert result.interrupted
        assert len(result.losses) == 4


def resumed(folder: Path, rank: int) -> tuple[list[float], list[float], list[int]]:
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

    def fitted_anew(num_steps: int, **options: Any) -> list[float]:
        pyro.clear_param_store()
        model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
        how: Any = {"num_steps": num_steps, "batch_size": 4, "distributed": True, "progress": False} | options
        return fit(model, MeanFieldGuide(model), Y, **how).losses

    steps: list[int] = []
    checkpoint = Checkpoint(folder / "fit.pt")
    fitted_anew(4, checkpoint=checkpoint)
    losses = fitted_anew(6, checkpoint=checkpoint, callback=lambda step, loss: steps.append(step))
    return losses, fitted_anew(6), steps


def test_checkpoints_are_of_each_process(tmp_path: Path):
    for losses, uninterrupted, steps in in_processes(partial(resumed, tmp_path), NUM_PROCESSES):
        assert losses == uninterrupted
        assert steps == [4, 5]
    assert (tmp_path / "fit.pt.0").exists()
    assert (tmp_path / "fit.pt.1").exists()


def nameless(rank: int) -> str:
    x, y = torch.randn(40, 2), torch.randn(40)
    with pyro.settings.context(module_local_params=True):
        svi = SVI(regression, AutoDelta(regression), JointOptim(distributed=True), Trace_ELBO())
        try:
            svi.step(x, y)
        except ValueError as error:
            return str(error)
    return ""


def test_parameters_without_names_are_refused():
    for message in in_processes(nameless, NUM_PROCESSES):
        assert "do without module_local_params" in message


def test_one_process_alone_is_refused():
    x, y = torch.randn(40, 2), torch.randn(40)
    with pytest.raises(RuntimeError, match="start the script by torchrun"):
        fit(regression, AutoDelta(regression), x, y, distributed=True, progress=False)


def test_the_script_of_the_page_runs_under_torchrun(tmp_path: Path):
    page = (ROOT / "docs" / "processes.md").read_text("utf-8")
    script = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "share.py").write_text(script.replace("1000", "3"), "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "share.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "digits.params").exists(), done.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optim": pyro.optim.Adam({"lr": 0.01})}, "it to both"),
        ({"optim": JointOptim()}, "it to both"),
        ({"blocks": [Block("all", params=["*"], optimizer=torch.optim.Adam)]}, "got blocks"),
    ],
)
def test_what_processes_do_not_share_is_refused(how: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=message):
        fit(regression, AutoDelta(regression), torch.randn(40, 2), torch.randn(40), distributed=True, progress=False, **how)
