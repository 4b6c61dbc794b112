"""Progress bars and messages of functions that may take seconds."""

import io
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pyro import poutine

from pyro_lvgp._utils import progress
from pyro_lvgp.diagnostics import loo, to_arviz
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Callback, fit, fit_restarts
from pyro_lvgp.models import BayesianGPLVM, LinearGPVAE

N, D = 12, 3
T = torch.linspace(0.0, 1.0, N)[:, None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, seconds: float, file: io.StringIO) -> str:
    """What a bar over two items writes, each of which takes some seconds."""
    monkeypatch.setattr("sys.stderr", file)
    for _ in progress.progress_bar(range(2), "work"):
        time.sleep(seconds)
    return file.getvalue()


def test_bars_appear_after_a_delay_on_terminals_alone(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.2)
    assert "work" in shown(monkeypatch, 0.3, Terminal())
    assert shown(monkeypatch, 0.0, Terminal()) == ""
    assert shown(monkeypatch, 0.3, io.StringIO()) == ""


@pytest.fixture
def bars(monkeypatch):
    """Names of the bars that are made, with their totals."""
    made: list[tuple[str, int]] = []

    def record(items: Any, desc: str, total: int | None, **options: Any) -> Any:
        made.append((desc, len(items) if total is None else total))
        return items

    monkeypatch.setattr(progress, "tqdm", record)
    return made


def test_functions_of_many_steps_have_bars(bars):
    Y = torch.randn(N, D)
    Y[0, 0] = torch.nan
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
    assert bars == [("initial latents", 20)]
    guide = MeanFieldGuide(model)
    guide(Y)
    for call, expected in {
        lambda: model.infer_latents(guide, Y, method="variational", num_steps=7, num_samples=1): ("latents of new rows", 7),
        lambda: model.infer_latents(guide, Y, num_steps=3): ("latents of new rows", 3),
        lambda: model.reconstruct(guide, Y, num_samples=4): ("reconstruction", 4),
        lambda: model.predict(guide, torch.zeros(2, 2), num_samples=4): ("posterior draws", 4),
        lambda: to_arviz(model, guide, Y, num_samples=30, chunk_size=10): ("draws", 3),
        lambda: LinearGPVAE(None, independent_dim=1).fit(T, Y, num_sweeps=2): ("sweeps", 2),
    }.items():
        bars.clear()
        call()
        assert expected in bars


@pytest.mark.filterwarnings("ignore:Estimated shape parameter", "ignore:k̂ of the weights")
def test_leave_one_out_has_a_bar(bars):
    Y = torch.randn(N, D)
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    loo(model, guide, Y, num_samples=25, num_local_samples=5)
    assert ("loo", 25) in bars


def gplvm(seed: int = 0) -> tuple[BayesianGPLVM, MeanFieldGuide]:
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4)
    return model, MeanFieldGuide(model)


def in_a_handler() -> tuple[Callable[..., Any], MeanFieldGuide]:
    """Model with known inducing values, and its guide."""
    model = poutine.condition(BayesianGPLVM(N, D, latent_dim=2, num_inducing=4), {"u": torch.zeros(D, 4)})
    return model, MeanFieldGuide(model)


class Interrupt(Callback):
    def on_step(self, state):
        if state.step == 2:
            raise KeyboardInterrupt


def test_the_ends_of_fits_are_logged(caplog, capsys):
    Y = torch.randn(N, D)
    with caplog.at_level(logging.INFO, "pyro_lvgp"):
        fit(*gplvm(), Y, num_steps=3, progress=False)
        fit(*in_a_handler(), Y, num_steps=3, progress=False)
        fit(*gplvm(), Y, num_steps=3, progress=False, callbacks=[Interrupt()])
        fit_restarts(gplvm, Y, num_restarts=2, seed=4, num_steps=1, progress=False)
    records = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "pyro_lvgp"]
    levels, messages = zip(*records, strict=True)
    assert levels == ("INFO", "INFO", "WARNING", "INFO", "INFO", "INFO", "INFO")
    assert all(message.startswith("fit of BayesianGPLVM: 3 steps in ") for message in messages[:2])
    assert messages[2] == "interrupted after 2 steps; model and guide have the parameters fitted so far"
    assert [message for message in messages if message.startswith("restart")][1].startswith("restart 2 of 2, seed 5: bound ")
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
