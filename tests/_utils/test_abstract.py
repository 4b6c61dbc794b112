"""Classes with abstract methods cannot be instantiated."""

import pytest
from torch import nn

from pyro_lvgp.guides._model_guide import ModelGuide
from pyro_lvgp.guides._sampled import SampledGuide
from pyro_lvgp.infer import DifferentiableELBO, LocalELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import LatentProcessModel, LatentVariableModel
from tests.helpers.abstract import missing_methods


class NoCandidates(LatentVariableModel):
    def forward(self, y=None, idx=None):
        pass


class NoLayout(LatentProcessModel):
    def forward(self, x, y=None, idx=None):
        pass

    def sample_process(self, posterior, x, x_new, num_samples, joint):
        pass


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: LatentVariableModel(3, 2, 1), "forward, latent_candidates"),
        (lambda: NoCandidates(3, 2, 1), "latent_candidates"),
        (lambda: LatentProcessModel(RBF(1), nn.Identity(), None, 0, None), "by_point, forward, sample_process"),
        (lambda: NoLayout(RBF(1), nn.Identity(), None, 0, None), "by_point"),
        (lambda: ModelGuide(lambda: None), "forward"),
        (lambda: SampledGuide(lambda: None), "forward"),
        (lambda: DifferentiableELBO(), "differentiable_loss"),
        (lambda: LocalELBO("data", 1, marginalize=True, num_particles=1, max_plate_nesting=1), "particle_bound"),
    ],
)
def test_abstract_classes_refuse(make, missing):
    with pytest.raises(TypeError, match=missing_methods(missing)):
        make()
