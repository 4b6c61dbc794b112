"""The tutorials run from end to end."""

import math
import os

import matplotlib.pyplot as plt
import pyro
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from tutorials import digits, item_response, missing_channels, soil, spike_counts, streaming, weather

needs_data = pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")


def run(tutorial, folder, monkeypatch, capsys):
    """Run for three steps; return the names of the files and the first column of the table."""
    monkeypatch.setattr("sys.argv", [tutorial.__name__, "--steps", "3", "--out", str(folder)])
    with pyro.settings.context(module_local_params=pyro.settings.get("module_local_params")):
        tutorial.main()
    plt.close("all")
    assert all(path.stat().st_size > 1000 for path in folder.iterdir())
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    return {path.name for path in folder.iterdir()}, rows


def test_digits(tmp_path, monkeypatch, capsys):
    names, rows = run(digits, tmp_path, monkeypatch, capsys)
    assert names == {"latents.png", "relevance.png", "bounds.png", "reconstructions.png", "posterior.nc"}
    assert rows == ["method, 8 dimensions", "PCA", "mean field", "importance-weighted, S = 5"]


def test_item_response(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(item_response, "NUM_PERSONS", 200)
    monkeypatch.setattr(item_response, "NUM_DRAWS", 50)
    monkeypatch.setattr(item_response, "NUM_REPEATS", 2)
    names, rows = run(item_response, tmp_path, monkeypatch, capsys)
    assert names == {"posteriors.png", "scores.png", "bounds.png", "posterior.nc"}
    assert rows == ["abilities by", "AutoNormal", "full covariance", "annealed, underdamped", "annealed, overdamped"]


def test_item_response_quadrature_agrees_with_weighted_prior_draws(monkeypatch):
    monkeypatch.setattr(item_response, "NUM_PERSONS", 50)
    monkeypatch.setattr(item_response, "NUM_DRAWS", 5000)
    answers = item_response.simulate()
    guide = MeanFieldGuide(item_response.model, init_scale=1.0)
    guide(answers)
    verdict = item_response.judge(guide, answers)
    log_evidence = verdict.gap + verdict.log_w.mean(0)
    torch.testing.assert_close(verdict.log_w.logsumexp(0) - math.log(5000), log_evidence, atol=0.2, rtol=0.0)
    torch.testing.assert_close(verdict.weighted, verdict.exact, atol=0.1, rtol=0.0)
    torch.testing.assert_close(verdict.posterior.sum(1), torch.ones(50))


def test_item_response_needs_both_skills():
    ability = torch.randn(5, 2)
    discrimination, difficulty = torch.rand(12) + 0.5, torch.randn(12)
    success = torch.sigmoid(discrimination[:, None] * (ability[:, None] - difficulty[:, None]))
    expected = torch.where(item_response.NEEDS, success, torch.ones(())).prod(-1)
    torch.testing.assert_close(item_response.logits(ability, discrimination, difficulty).sigmoid(), expected)


def test_spike_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(spike_counts, "NUM_TRAINED", 6)
    monkeypatch.setattr(spike_counts, "NUM_NEW", 4)
    names, rows = run(spike_counts, tmp_path, monkeypatch, capsys)
    assert names == {"new_trial.png", "bounds.png"}
    assert rows == ["guide", "mean field", "structured, own sites", "structured, encoder", "structured, encoder"]


def test_spike_counts_error_is_of_log_rates():
    rates = torch.rand(3, 5, 4) + 0.5
    counts = torch.ones(3, 5, 4)
    counts[0, :, 1] = torch.nan
    recording = spike_counts.Recording(counts, rates)
    drawn = torch.stack([rates * torch.where(torch.isnan(counts), 2.0, 1.1)] * 2)
    assert spike_counts.error(drawn, recording, True) == pytest.approx(math.log(2.0), rel=1e-5)
    assert spike_counts.error(drawn, recording, False) == pytest.approx(math.log(1.1), rel=1e-5)
    around = rates * torch.linspace(0.9, 1.1, 41)[:, None, None, None]
    around[:, 0] = 2.0 * rates[0]
    assert spike_counts.coverage(around, recording) == pytest.approx(2 / 3)


@needs_data
def test_missing_channels(tmp_path, monkeypatch, capsys):
    names, rows = run(missing_channels, tmp_path, monkeypatch, capsys)
    assert names == {"electrodes.png", "latents.png"}
    assert rows == ["method", "Bayesian ridge", "GP-VAE", "GP-VAE, corruption"]


@needs_data
def test_soil(tmp_path, monkeypatch, capsys):
    names, rows = run(soil, tmp_path, monkeypatch, capsys)
    assert names == {"map.png"}
    assert rows == ["method", "ridge on the other metals", "GP-VAE"]


@needs_data
@pytest.mark.parametrize(
    ("tutorial", "expected"),
    [(weather, {"map.png", "year.png"}), (streaming, {"stream.png", "seconds.png"})],
    ids=["weather", "streaming"],
)
def test_sparse(tutorial, expected, tmp_path, monkeypatch, capsys):
    names, _ = run(tutorial, tmp_path, monkeypatch, capsys)
    assert names == expected
