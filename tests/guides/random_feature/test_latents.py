"""Latents of the guide, free and encoded."""

import pyro
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.networks import IndexNet
from tests.helpers.random_features import C, D, N, Q, make_pair, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def test_latents_are_those_of_the_guide(Y):
    _, guide = make_pair(Y)
    torch.testing.assert_close(guide.latents().mean, guide.median(Y, num_samples=2)["X"])
    idx = torch.tensor([3, 1])
    torch.testing.assert_close(guide.latents(Y[idx], idx).stddev, guide.X.scale[idx])
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected all 12 rows, .* got 5 rows; .* model.infer_latents\(guide, Y\)"):
        guide.latents(Y[:5])
    _, guide = make_pair(Y, encoders={"X": IndexNet(D, Q, (4,))})
    torch.testing.assert_close(guide.latents(Y).mean, guide.median(Y, num_samples=2)["X"])
    with pytest.raises(ValueError, match="expected data for the encoder"):
        guide.latents()


def test_latents_need_a_guide_that_has_run(Y):
    with pytest.raises(RuntimeError, match=r"call guide\(Y\) first"):
        RandomFeatureGuide(RandomFeatureLVM(N, D, Q)).latents()


@pytest.mark.usefixtures("local_params")
@pytest.mark.parametrize("weights", ["collapsed", "filled", "explicit", "shared"])
def test_an_encoder_is_free_latents_that_it_computes(Y, weights):
    """Bounds of all rows and of some, and every closed form."""
    Y = with_holes(Y)
    model, free = make_pair(Y, frequencies="gaussian", weights=weights)
    encoder = IndexNet(D, Q)
    amortised = RandomFeatureGuide(model, frequencies="gaussian", weights=weights, encoders={"X": encoder})
    amortised(Y)
    with torch.no_grad():
        free.X.loc, free.X.scale = encoder(Y)
    if weights in ("explicit", "shared"):
        free.a.linear, free.a.precision = amortised.a.linear.detach(), amortised.a.precision.detach()
    loss, idx = TraceMeanField_ELBO(max_plate_nesting=1), torch.tensor([7, 2, 5])
    values = []
    for guide in (free, amortised):
        torch.manual_seed(1)
        updates = [block.update(Y) for block in guide.blocks() if block.update]
        mean = model.predict(guide, torch.zeros(2, Q), num_samples=3).mean
        values.append((loss.loss(model, guide, Y), loss.loss(model, guide, Y[idx], idx), updates, mean))
    torch.testing.assert_close(*values)
    loc, scale = encoder(Y[:4])
    encoded = model.infer_latents(amortised, Y[:4], num_steps=0)
    torch.testing.assert_close((encoded.mean, encoded.stddev), (loc, scale))
    torch.testing.assert_close(amortised.median(Y[idx], idx)["X"], free.X.loc[idx].detach())


def test_an_encoder_learns_from_mini_batches_and_reads_new_rows():
    X = torch.linspace(-2.0, 2.0, 200)[:, None]
    Y = torch.cat([X, X.sin(), (2.0 * X).cos()], -1) + 0.05 * torch.randn(200, D)
    Y[torch.rand(Y.shape) < 0.1] = torch.nan
    train = Y[::2]
    model = RandomFeatureLVM(100, D, 1, num_frequencies=10, num_components=C).initialize(train)
    guide = RandomFeatureGuide(model, weights="shared", encoders={"X": IndexNet(D, 1)})
    blocks = guide.blocks(lr=0.02, damping=lambda sweep: (sweep + 10.0) ** -0.6)
    fit(model, guide, train, loss=MeanFieldELBO(), optim=blocks, num_steps=300, batch_size=25, progress=False)
    new = guide.median(Y[1::2], torch.arange(100))["X"]
    assert torch.stack([new[:, 0], X[1::2, 0]]).corrcoef()[0, 1].abs() > 0.95
