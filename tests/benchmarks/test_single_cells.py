"""The benchmark of counts of single cells, and the VAE that it compares with."""

import math

import pytest
import torch

from benchmarks.peers.count_vae import CountVAE
from benchmarks.tasks import single_cells


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_all_methods_are_scored(monkeypatch):
    monkeypatch.setattr(single_cells, "NUM_CELLS", 140)
    monkeypatch.setattr(single_cells, "NUM_DRAWS", 2)
    latents = {}
    measurements = list(single_cells.measure(0, num_steps=2, num_epochs=1, latents=latents))
    scores = {(each.method, each.metric): each.value for each in measurements}
    assert all(math.isfinite(value) for value in scores.values())
    held_out = {method: value for (method, metric), value in scores.items() if metric.startswith("held-out")}
    assert len(held_out) == 5
    assert max(held_out, key=held_out.get) == "true means"
    assert all(X.shape == (140, 10) for X in latents.values())
    assert scores["VAE", "time / VAE's"] == 1.0


def test_counts_of_the_vae_have_the_library_size_and_hidden_entries_no_effect():
    model = CountVAE(6, 2, latent_dim=3, hidden=8).eval()
    library, batch = torch.tensor([[100.0], [50.0]]), torch.eye(2)
    torch.testing.assert_close(model.counts(torch.randn(2, 3), library, batch).mean.sum(-1, keepdim=True), library)
    Y = torch.tensor([[1.0, 2.0, 0.0, 3.0, 1.0, 0.0]] * 2)
    hidden = Y.clone()
    hidden[:, 2] = torch.nan  # the encoder sees a zero there
    losses = []
    for y in (Y, hidden):
        torch.manual_seed(0)
        losses.append(model(y, library, batch, 0.5))
    torch.manual_seed(0)
    mean, stddev = model.encode(Y)
    entry = model.counts(mean + stddev * torch.randn_like(mean), library, batch).log_prob(Y)[:, 2].mean()
    torch.testing.assert_close(losses[1] - losses[0], entry)
