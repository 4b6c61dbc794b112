"""The GP-VAE benchmark: scores by their definitions, folds, peers on a known answer, all methods for a few steps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("gpytorch")

from benchmarks.core.report import aggregate
from benchmarks.peers import regressions
from benchmarks.tasks import gpvae
from pyro_lvgp.networks import mask_like_shifted

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def task():
    """Four columns of which the last is a sum of two others but for noise, hidden at the end."""
    x = torch.linspace(0.0, 1.0, 120)[:, None]
    Y = torch.cat([torch.sin(8 * x), torch.cos(5 * x), torch.randn(120, 1)], 1)
    Y = torch.cat([Y, Y[:, 1:2] + Y[:, 2:] + 0.01 * torch.randn(120, 1)], 1) + 3.0
    hidden = torch.zeros(120, 4, dtype=torch.bool)
    hidden[80:, 3] = True
    return gpvae.Task(x, Y, hidden, lengthscale=0.1, latent_dim=2, error="SMSE", gaps=mask_like_shifted)


def test_scores_are_the_definitions(task):
    truth = task.Y[80:, 3]
    guess, spread = truth.mean().expand_as(task.Y), torch.full_like(task.Y, 2.0)
    found = task.scores(guess, spread)
    assert found["SMSE"] == pytest.approx(1.0)
    assert found["NLL"] == pytest.approx((math.log(2.0) + 0.5 * math.log(2 * math.pi) + truth.var(correction=0) / 8).item())


def test_scores_of_logarithms_are_in_units_of_the_data(task):
    positive = replace(task, Y=task.Y.exp(), error="MAE", log=True)
    torch.testing.assert_close(positive.values, task.Y)
    found = positive.scores(task.Y + 0.1, torch.full_like(task.Y, 0.3))
    truth = positive.Y[80:, 3]
    assert found["MAE"] == pytest.approx((truth * math.expm1(0.1)).mean().item())
    log_normal = torch.distributions.LogNormal(truth.log() + 0.1, 0.3)
    assert found["NLL"] == pytest.approx(-log_normal.log_prob(truth).mean().item())


def test_data_are_standardised_without_what_is_hidden(task):
    y, centre, scale = task.data
    assert torch.equal(torch.isnan(y), task.hidden)
    torch.testing.assert_close((centre + scale * y)[~task.hidden], task.Y[~task.hidden])
    torch.testing.assert_close(y.nanmean(0), torch.zeros(4))
    torch.testing.assert_close(y.square().nanmean(0), torch.ones(4))


@pytest.mark.parametrize("peer", list(regressions.PEERS))
def test_peers_fill_what_is_hidden_alone(task, peer, monkeypatch):
    monkeypatch.setattr(regressions, "NUM_STARTS", 2)
    mean, stddev = regressions.PEERS[peer](task.x, task.Y, task.hidden, task.lengthscale)
    torch.testing.assert_close(mean[~task.hidden], task.Y[~task.hidden])
    smse = task.scores(mean, stddev)["SMSE"]
    # The first knows the time only, which tells nothing here.
    assert smse > 0.3 if peer.startswith("independent") else smse < 0.01


METHODS = (
    gpvae.METHODS
    | gpvae.OVER_PLACES  # which has all candidates
    | {f"{name}, composite": method for name, method in gpvae.COMPOSITE.items()}
    | {f"{name}, narrow": method for name, method in (gpvae.NARROW | gpvae.SIZES | gpvae.VARIANTS).items()}
    | {f"{name}, over places": method for name, method in gpvae.OVER_PLACES_BY_ENCODER.items()}
    | {f"{name} (defaults)": method for name, method in gpvae.DEFAULTS.items()}
    | {f"{name}, stopped early": method for name, method in gpvae.STOPPED.items()}
)


@pytest.mark.parametrize("method", list(METHODS))
def test_methods_are_measured(task, method):
    run = gpvae.fit_to(task, METHODS[method], task.data[0], seed=0, num_steps=3)
    values = run.scores(task)
    assert set(values) == {"SMSE", "NLL", "mixture NLL", "bound [nats]"}
    assert np.isfinite(list(values.values())).all()
    assert run.seconds > 0.0


def test_the_selected_candidate_predicts_training_entries_best(task):
    rows = aggregate(gpvae.selected("toy", task, 2, 3))
    held_out = {row.method: row.mean for row in rows if row.metric == "held-out NLL"}
    smse = {row.method: row.mean for row in rows if row.metric == "SMSE"}
    best = min(gpvae.CANDIDATES, key=held_out.__getitem__)
    assert held_out["selected"] == held_out[best]
    assert smse["selected"] == smse[best]
    assert len(held_out) == len(gpvae.CANDIDATES) + 1
    # The error of a mean is below the mean of errors.
    assert smse["selected, 2 runs together"] < smse["selected"]
    weights = {row.method: row.mean for row in rows if row.metric == "stacking weight"}
    assert sum(weights[name] for name in gpvae.CANDIDATES) == pytest.approx(1.0)
    assert smse["stacked, 2 runs together"] < smse["stacked"] < sum(weights[name] * smse[name] for name in gpvae.CANDIDATES)
