"""Callbacks of the documentation that send the history of a fit to loggers."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Callback, fit
from pyro_lvgp.models import BayesianGPLVM

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_block(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the block of the page that defines a callback, with a model, and record the history of its fit."""
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in BLOCK.findall(PAGE.read_text("utf-8")) if f"class {name}(" in block)
    Y = torch.randn(12, 3)
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    namespace: dict[str, Any] = {"Callback": Callback, "model": model, "guide": MeanFieldGuide(model), "Y": Y}

    def recorded(*args: Any, **options: Any) -> None:
        namespace["history"] = fit(*args, **options)

    namespace["fit"] = recorded
    exec(code, namespace)
    return namespace


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_the_bounds_and_the_parameters(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = run_block("TensorBoard", tmp_path, monkeypatch)["history"]
    events = event_accumulator.EventAccumulator(str(tmp_path / "runs"), {"scalars": 0})
    events.Reload()
    scalars = events.Scalars("bound per entry")
    assert [event.step for event in scalars] == list(range(1, 101))
    assert [event.value for event in scalars] == pytest.approx(list(history.bounds_per_entry), rel=1e-6)
    assert {"model.kernel.variance", "guide.locs.X"} <= set(events.Tags()["histograms"])


def test_a_logger_of_lightning_has_the_bounds(tmp_path, monkeypatch):
    pytest.importorskip("lightning.pytorch.loggers")
    history = run_block("LightningLogger", tmp_path, monkeypatch)["history"]
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bound_per_entry"]) for row in rows] == pytest.approx(list(history.bounds_per_entry), rel=1e-6)


def test_weights_and_biases_has_the_bounds(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[dict[str, float]] = []
    original = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda self, data, **options: (logged.append(data), original(self, data, **options))
    )
    history = run_block("WeightsAndBiases", tmp_path, monkeypatch)["history"]
    assert [data["bound per entry"] for data in logged] == pytest.approx(list(history.bounds_per_entry))
    assert list(tmp_path.rglob("*.wandb"))
