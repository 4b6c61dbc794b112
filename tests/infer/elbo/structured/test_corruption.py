"""Entries hidden from the encoder."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.networks import FactorNet, mask_entries
from tests.helpers.structured import B, D, N, Q, make_data, make_model
from tests.infer.elbo.structured._bounds import every_estimator, loss_and_slopes

pytestmark = pytest.mark.usefixtures("float64")


class Spy(nn.Module):
    """An encoder that notes what it sees."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.seen = encoder, []

    def forward(self, y):
        self.seen.append(y)
        return self.encoder(y)


@pytest.mark.parametrize("rescale", [False, True])
@every_estimator
def test_masking_hides_entries_from_the_guide_alone(estimator, rescale, fixed_noise):
    model, (x, y) = make_model(), make_data(B)
    spy = Spy(FactorNet(D, Q, [2]))
    guide = StructuredGPGuide(model, encoders={"f": spy})
    guide(x, y)
    elbo = StructuredELBO(corruption=mask_entries(0.5), rescale=rescale, max_plate_nesting=2, **estimator)
    spy.seen.clear()
    found = loss_and_slopes(elbo, model, guide, x, y)
    (encoded,) = spy.seen
    assert torch.isnan(encoded)[torch.isnan(y)].all()
    kept = ~torch.isnan(encoded)
    assert torch.equal(encoded[kept], y[kept])
    assert 0 < kept.sum() < (~torch.isnan(y)).sum()

    given = lambda x, y: guide(x, encoded)  # noqa: E731
    loss = StructuredELBO(rescale=rescale, **estimator).differentiable_loss(model, given, x, y)
    torch.testing.assert_close(found[0], loss.detach())
    slopes = torch.autograd.grad(loss, [*model.parameters(), *guide.parameters()])
    torch.testing.assert_close(found[1:], torch.cat([slope.flatten() for slope in slopes]))
    spy.seen.clear()
    assert elbo.loss(model, guide, x, y) == pytest.approx(StructuredELBO(**estimator).loss(model, guide, x, y))
    assert all(torch.equal(torch.isnan(seen), torch.isnan(y)) for seen in spy.seen)


def test_only_rescaling_and_masking_look_for_data_among_the_arguments():
    """A model may hold its data, and a guide that needs none of them may be called without."""
    y = torch.randn(N)

    def model():
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("points", N):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    guide = MeanFieldGuide(model)
    assert math.isfinite(StructuredELBO().loss_and_grads(model, guide))
    for options in ({"rescale": True}, {"corruption": mask_entries(0.5)}):
        with pytest.raises(ValueError, match="expected data among the arguments of the model, got"):
            StructuredELBO(**options).loss_and_grads(model, guide)
