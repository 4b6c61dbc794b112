"""Data and state of the guide."""

import pyro
import pytest
import torch

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.likelihoods import NegativeBinomial
from pyro_lvgp.models import RandomFeatureLVM
from tests.helpers.random_features import D, F, N, Q, make_pair

pytestmark = pytest.mark.usefixtures("float64")


def test_guide_keeps_data_and_state(Y):
    with pyro.settings.context(module_local_params=True):
        model, guide = make_pair(Y)
        _, other = make_pair(torch.randn(N, D))
        other.load_state_dict(guide.state_dict())
        assert torch.equal(other.data, Y)
        idx = torch.tensor([3, 1])
        model.reconstruct(guide, Y[idx], idx, num_samples=2)
        assert guide.data is not None
        assert torch.equal(guide.data, Y)


def test_a_call_too_early_leaves_nothing_behind(Y):
    """A prototype made without data would start the variational parameters elsewhere."""
    counts = torch.distributions.Poisson(5.0).sample((N, D))
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F, likelihood=NegativeBinomial(10.0)).initialize(counts)
    early, guide = RandomFeatureGuide(model), RandomFeatureGuide(model)
    for call in (lambda: model.kernel(early, torch.zeros(1, Q)), lambda: early(counts[:2], torch.arange(2))):
        with pytest.raises(ValueError, match=r"has seen all data.*call guide\(Y\)"):
            call()
    with pyro.get_param_store().scope():
        early(counts)
    with pyro.get_param_store().scope():
        guide(counts)
    assert torch.equal(early.a.c, guide.a.c)
