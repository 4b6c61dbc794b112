"""Rescaled likelihoods of partly observed data."""

import pytest
import torch
from pyro.poutine.messenger import Messenger

from pyro_lvgp.infer import StructuredELBO
from tests.helpers.structured import B, make
from tests.infer.elbo.structured._bounds import every_estimator

pytestmark = pytest.mark.usefixtures("float64")


class ScaleObserved(Messenger):
    """Multiply log likelihoods."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg):
        if msg["is_observed"]:
            msg["scale"] = self.weight * msg["scale"]


@every_estimator
def test_rescaling_divides_the_likelihood_by_the_observed_fraction(estimator, fixed_noise):
    model, guide, x, y = make(B)
    weight = y.numel() / (~torch.isnan(y)).sum()
    assert weight > 1.2
    plain, rescaled = (StructuredELBO(rescale=rescale, max_plate_nesting=2, **estimator) for rescale in (False, True))
    slopes = [
        torch.autograd.grad(elbo.differentiable_loss(p, guide, x, y), [*model.parameters(), *guide.parameters()])
        for elbo, p in ((rescaled, model), (plain, ScaleObserved(weight)(model)), (plain, model))
    ]
    for found, expected, other in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, other)
    bound = rescaled.differentiable_loss(model, guide, x, y)
    torch.testing.assert_close(bound, plain.differentiable_loss(ScaleObserved(weight)(model), guide, x, y))
    assert rescaled.loss(model, guide, x, y) == plain.loss(model, guide, x, y) != bound.item()


def test_rescaling_of_a_batch_with_nothing_observed_is_finite():
    model, guide, x, y = make(B)
    nothing = torch.full_like(y, torch.nan)
    losses = [StructuredELBO(rescale=rescale).loss_and_grads(model, guide, x, nothing) for rescale in (False, True)]
    assert losses[0] == losses[1] == pytest.approx(0.0, abs=1e-10)
