"""The benchmarks of balls, estimators and mini-batches at a few steps, and the linear dynamical system where it is right."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from benchmarks.core.report import aggregate
from benchmarks.peers.linear_dynamics import LinearDynamics
from benchmarks.tasks import balls, estimators, gpvae_pictures, minibatches
from pyro_lvgp.datasets import bouncing_balls

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def small(monkeypatch):
    """Few and short sequences."""
    monkeypatch.setattr(balls, "NUM_TRAINED", 12)
    monkeypatch.setattr(balls, "NUM_TESTED", 2)
    monkeypatch.setattr(balls, "NUM_TIMES", 12)
    monkeypatch.setattr(balls, "AHEAD", (1, 3))


def test_linear_dynamics_foresee_a_rotation():
    start = 2.0 * torch.pi * torch.rand(40, 1)
    angle = start + 0.5 * torch.arange(30.0)
    Y = torch.stack([angle.cos(), angle.sin(), 2.0 + angle.cos() - angle.sin()], -1)
    noisy = Y + 0.01 * torch.randn(Y.shape)
    model = LinearDynamics(noisy, 2).fit(noisy, 300)
    assert (model.forecast(noisy[:, :20], 10) - Y[:, 20:]).abs().mean() < 0.03


@pytest.mark.parametrize("task", list(balls.TASKS))
def test_balls_are_measured(small, task):
    rows = aggregate(balls.measure(task, 0, num_steps=3))
    values = {(row.method, row.metric): row.mean for row in rows}
    assert np.isfinite(list(values.values())).all()
    assert {method for method, _ in values} == {"GP-VAE"} | ({"linear dynamical system"} if task == "one" else set())
    assert sum(metric.startswith("MAE") for _, metric in values) == (4 if task == "one" else 2)


def test_errors_ahead_are_zero_for_the_truth_and_know_where_they_look(small, monkeypatch):
    task = balls.one(0)
    truth = task.F[balls.NUM_TRAINED :]
    monkeypatch.setattr(balls, "foresee", lambda *_: truth.expand(11, -1, -1, -1))
    assert balls.errors_ahead(task, None, (1, 3)) == {1: 0.0, 3: 0.0}
    # A forecast that is wrong by n after n + 1 images: errors at τ average over all prefixes that leave τ images.
    wrong = truth + torch.arange(11.0)[:, None, None, None]
    monkeypatch.setattr(balls, "foresee", lambda *_: wrong)
    assert balls.errors_ahead(task, None, (1, 3)) == {
        1: pytest.approx(np.arange(11).mean()),
        3: pytest.approx(np.arange(9).mean()),
    }


def test_correlations_find_which_latent_follows_which_ball(small):
    task = balls.two(0)
    places = task.places[:, balls.NUM_TRAINED :]
    latents = torch.stack([-(places[1] ** 3), places[0].exp()], -2)[..., None, :, :]

    class Guide:
        def median(self, *_):
            return {"f": latents}

    found = balls.correlations(task, balls.Fitted(None, Guide(), 0.0))
    assert found["rank correlation, ball 0"] == pytest.approx(1.0, abs=1e-3)
    assert found["rank correlation, ball 1"] == pytest.approx(1.0, abs=1e-3)
    assert found["other rank correlation, ball 0"] < 0.9


def test_two_balls_are_half_seen_and_one_of_them_falls():
    task = balls.two(3)
    assert torch.isnan(task.Y).double().mean() == pytest.approx(0.5, abs=0.01)
    falling = bouncing_balls(90, 50, 50, period=11.0, width=2.0, gravity=True, seed=301)
    torch.testing.assert_close(task.places[1], torch.as_tensor(falling["position"]))


@pytest.mark.parametrize(("value", "gradient"), estimators.ESTIMATORS)
def test_estimators_are_measured(value, gradient, monkeypatch):
    monkeypatch.setattr(estimators, "NUM_DRAWS", 3)
    monkeypatch.setattr(estimators, "NUM_CHECKPOINTS", 2)
    progress = estimators.train(value, gradient, seed=0, num_epochs=4)
    assert progress.epochs == [2, 4]
    assert np.isfinite(progress.bounds).all()
    assert all(len(sds) == 2 and min(sds) > 0.0 for sds in progress.sds.values())


def test_mini_batches_are_measured(monkeypatch):
    monkeypatch.setattr(minibatches, "NUM_POINTS", 60)
    monkeypatch.setattr(minibatches, "NUM_BATCHES", 4)
    metrics = ["on batches [nats]", "on all [nats]", "noise variance", "RMSE"]
    for held_out, size in [(0.0, 10), (0.5, 10), (None, 10), (0.0, None)]:
        found = [(name, value) for name, value, _ in minibatches.train(held_out, size, seed=0, num_steps=3)]
        assert [name for name, _ in found] == (metrics if size else metrics[1:])
        assert np.isfinite([value for _, value in found]).all()


def test_pictures_are_drawn(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimators, "NUM_DRAWS", 2)
    monkeypatch.setattr(gpvae_pictures, "PREFIX", 6)
    monkeypatch.setattr(gpvae_pictures, "LONGEST", 8)
    gpvae_pictures.main(["--quick", "--out", str(tmp_path)])
    assert "python -m benchmarks.tasks.gpvae_pictures --quick" in capsys.readouterr().out
    names = {f"gpvae_{name}.png" for name in ("balls_one", "balls_two", "balls_ahead", "estimators")}
    assert {path.name for path in tmp_path.iterdir()} == names
    for path in tmp_path.iterdir():
        assert plt.imread(path)[..., :3].std() > 0.05
