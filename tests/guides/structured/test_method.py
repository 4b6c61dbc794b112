"""Choice between dense matrices and state-space inference."""

import pyro
import pytest
import torch

from pyro_lvgp.distributions import StateSpacePosterior, StructuredPosterior
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet
from tests.helpers.structured import D, posterior_of

pytestmark = pytest.mark.usefixtures("float64")


def test_linear_time_is_taken_where_it_can_and_pays():
    def posterior(kernel, num, **options):
        pyro.clear_param_store()
        guide = StructuredGPGuide(GPVAE(kernel, MLP(1, D)), encoders={"f": FactorNet(D, 1)}, **options)
        return type(posterior_of(guide, torch.rand(num, kernel.input_dim or 1), torch.randn(num, D)))

    assert posterior(Matern(1), 201) is StateSpacePosterior
    assert posterior(Matern(1) + 0.5, 201) is StateSpacePosterior
    assert posterior(Matern(1), 200) is StructuredPosterior
    assert posterior(Matern(1), 201, method="dense") is StructuredPosterior
    assert posterior(Matern(1), 5, method="state-space") is StateSpacePosterior
    assert posterior(RBF(1), 201) is StructuredPosterior
    assert posterior(Matern(2), 201) is StructuredPosterior
    with pytest.raises(ValueError, match=r'for linear time, got RBF; use method="dense" or method="auto"'):
        posterior(RBF(1), 201, method="state-space")
