"""Capabilities that models and guides declare by their classes."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import protocols
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, ZeroImputation

OF_ROWS = {
    "TakesTables",
    "HasExampleData",
    "ChecksData",
    "HasEventDims",
    "HasInitialValues",
    "HasLatentSymmetry",
    "HasLocalPlate",
    "HasPlates",
}
OF_SERIES = {
    "ChecksData",
    "HasEventDims",
    "HasExampleArguments",
    "HasInputs",
    "HasLatentSymmetry",
    "HasLocalPlate",
    "HasPlates",
    "HasPointLikelihood",
    "HasProcessSite",
    "TakesMiniBatches",
}
OF_GUIDES = {"HasArgumentShapes", "HasEncoders"}
SAMPLES = {"SamplesGlobals", "HasStoredPosteriors"} | OF_GUIDES


def gplvm(cls=BayesianGPLVM):
    return cls(6, 3, 2, num_inducing=3)


def gp_vae():
    return GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 3))


def sparse_gp_vae():
    return SparseGPVAE(RBF(1, batch_shape=(2,)), MLP(2, 3), torch.linspace(0.0, 1.0, 4)[:, None])


def random_feature():
    return RandomFeatureLVM(6, 3, 2, num_frequencies=4)


def declared(instance):
    return {name for name in protocols.__all__ if name != "LatentSymmetry" and isinstance(instance, getattr(protocols, name))}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: lambda y: None, set()),
        (gplvm, OF_ROWS | {"HasLogJoint", "HasScoreTensors", "HasLikelihoodTerm"}),
        (random_feature, OF_ROWS | {"RandomFeatureModel"}),
        (gp_vae, OF_SERIES | {"SubsamplesPoints"}),
        (sparse_gp_vae, OF_SERIES | {"HasConditionalSite", "HasInducingPoints"}),
        (lambda: MeanFieldGuide(gplvm()), SAMPLES),
        (lambda: AutoAnnealedLangevin(gplvm()), SAMPLES | {"HasLocalPlate"}),
        (lambda: RandomFeatureGuide(random_feature()), SAMPLES),
        (lambda: StructuredGPGuide(gp_vae()), OF_GUIDES),
        (lambda: SparseStructuredGPGuide(sparse_gp_vae()), OF_GUIDES),
    ],
)
def test_of_models_and_guides(make, expected):
    assert declared(make()) - {"HasPlates"} == expected - {"HasPlates"}
    assert "HasPlates" not in expected or isinstance(make(), protocols.HasPlates)


def test_a_guide_takes_what_a_plain_class_declares():
    class Model:
        local_plate = "rows"

        def create_plates(self, y):
            return pyro.plate("rows", 5, subsample=torch.arange(len(y)))

        def init_loc_fn(self, site):
            return torch.full((5,), 2.0)

        def __call__(self, y):
            with self.create_plates(y):
                x = pyro.sample("x", dist.Normal(0.0, 1.0))
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoAnnealedLangevin(Model(), num_steps=1)
    guide(torch.zeros(3))
    assert guide.local_plate == "rows"
    assert torch.equal(guide.base_guide.locs.x, torch.full((5,), 2.0))


@pytest.mark.parametrize("declares", [False, True])
def test_the_log_joint_belongs_to_the_forward_that_the_class_names(declares):
    class Other(BayesianGPLVM):
        def forward(self, y=None, idx=None):
            return super().forward(y, idx)

        if declares:
            log_joint_forward = forward

    class Later(Other):
        pass

    for cls in (Other, Later):
        guide = AutoAnnealedLangevin(gplvm(cls), num_steps=1)
        guide(torch.randn(6, 3))
        assert guide._has_pure_score == declares


def test_encoders_by_site():
    encoder = ZeroImputation(3, 2, (4,))
    base = MeanFieldGuide(gplvm(), encoders={"X": encoder})
    annealed = AutoAnnealedLangevin(gplvm(), base_guide=base)
    assert base.encoder_of("X") is annealed.encoder_of("X") is encoder
    assert base.encoder_of("u") is None
    assert RandomFeatureGuide(random_feature()).encoder_of("X") is None
    assert StructuredGPGuide(gp_vae()).encoder_of("f") is None


@pytest.mark.parametrize("trained", [True, False])
def test_inducing_points_are_replaced(trained):
    model = sparse_gp_vae()
    model.inducing_points_unconstrained.requires_grad_(trained)
    model.place_inducing_points(torch.rand(7, 1))
    assert model.inducing_points.shape == (7, 1)
    assert model.inducing_points_unconstrained.requires_grad == trained
