"""Errors of structured guides."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet
from tests.guides.structured._models import first_call
from tests.helpers.structured import B, D, N, Pooled, Q, make_data, make_model, matern, two_processes

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("net", [None, Pooled()], ids=["free", "encoder"])
def test_trials_that_share_processes_of_one_site_are_refused(net):
    """But those of a site each are served."""

    def one_site(t, y):
        with pyro.plate("latents", 2):
            f = pyro.sample("f", GaussianProcess(RBF(1), t))
        observe(f.sum(-2), y)

    def two_sites(t, y):
        observe(pyro.sample("f", GaussianProcess(RBF(1), t)) + pyro.sample("g", GaussianProcess(RBF(1), t)), y)

    def observe(f, y):
        with pyro.plate("trials", len(y), dim=-2), pyro.plate("points", N, dim=-1):
            pyro.sample("y", dist.Normal(f, 0.5).expand([len(y), N]), obs=y[..., 0])

    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(3, N, 1)
    with pytest.raises(ValueError, match=rf"\[3, {N}, 1\], got \[2, {N}\]; give each process that the series share a site"):
        StructuredGPGuide(one_site, encoders={"f": net})(t, y)
    guide = StructuredGPGuide(two_sites, encoders={"f": net, "g": None})
    assert {name: value.shape for name, value in guide(t, y).items()} == {"f": (N,), "g": (N,)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.0}, "expected a positive and finite init_scale, got 0"),
        ({"init_scale": math.inf}, "expected a positive and finite init_scale, got inf"),
        ({"method": "kalman"}, "expected method in .*state-space.*, got 'kalman'"),
    ],
)
def test_options_that_make_no_sense(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        StructuredGPGuide(make_model(), **options)


def test_a_model_that_does_not_name_its_process_needs_encoders():
    with pytest.raises(
        ValueError, match=r"expected encoders=\{<name of a Gaussian-process site>: encoder\}, got none for function"
    ):
        StructuredGPGuide(two_processes)


def test_unknown_sites():
    with pytest.raises(ValueError, match=r"one of \['f'\], got 'rate'"):
        first_call({"rate": None})


def test_priors_that_cannot_be_multiplied():
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"'likelihood.variance', got LogNormal; leave the site out of encoders"):
        first_call({"likelihood.variance": None}, model=model)


@pytest.mark.parametrize(("site", "latents", "series"), [("f", Q + 1, ()), ("f", 3, (B,)), ("w", 2, ()), ("w", 2, (B,))])
def test_encodings_of_the_wrong_shape(site, latents, series):
    with pytest.raises(
        ValueError, match=rf"lines up with site '{site}' of shape \[.*\], got \[.*{latents}.*\]; encoders return"
    ):
        first_call({site: FactorNet(D, latents)}, *make_data(*series), model=make_model(independent_dim=1))


def of_dense(encoder):
    return StructuredGPGuide(make_model(), encoders={"f": encoder})


def of_sparse(encoder):
    model = SparseGPVAE(RBF(1, batch_shape=(Q,)), nn.Linear(Q, D), torch.rand(3, 1))
    return SparseStructuredGPGuide(model, encoders={"u": encoder})


@pytest.mark.parametrize("guide_of", [of_dense, of_sparse], ids=["dense", "sparse"])
def test_encoders_return_pairs(guide_of):
    """One tensor for two series is no pair."""
    x, y = torch.rand(2, N, 1), torch.randn(2, N, D)
    with pytest.raises(TypeError, match=r"expected loc and scale from the encoder of '[fu]', got Tensor; an IndexNet"):
        guide_of(nn.Linear(D, Q))(x, y)


def test_guides_and_models_with_inducing_points_go_together():
    dense, sparse = of_dense(None).model, of_sparse(FactorNet(D, Q)).model
    with pytest.raises(ValueError, match="got SparseGPVAE, which has inducing points; take a SparseStructuredGPGuide"):
        StructuredGPGuide(sparse)
    with pytest.raises(ValueError, match="got none for GPVAE; a model without inducing points takes a StructuredGPGuide"):
        SparseStructuredGPGuide(dense)


def test_more_latents_than_the_kernel_has():
    """Encodings do not widen the prior."""
    model = GPVAE(RBF(1), MLP(1, D))
    with pytest.raises(ValueError, match=r"of shape \[1, 5\] \[..., latent dimensions, points\], got \[2, 5\]"):
        first_call({"f": FactorNet(D, 2)}, model=model)


def test_several_encodings_of_one_process():
    def model(t, y):
        pyro.sample("f", GaussianProcess(RBF(1), t))

    with pytest.raises(ValueError, match=r"of shape \[1, 5\].*got \[4, 1, 5\]"):
        first_call({"f": FactorNet(D, 1)}, torch.rand(1, N, 1), torch.randn(B, N, D), model=model)


def test_processes_whose_priors_depend_on_each_other_are_refused():
    def model(t, y):
        level = pyro.sample("level", GaussianProcess(RBF(1, lengthscale=0.3), t))
        rough = pyro.sample("rough", dist.MultivariateNormal(level, matern(t) + 1e-6 * torch.eye(len(t))))
        with pyro.plate("points", len(t)):
            pyro.sample("y", dist.Normal(rough, 0.3), obs=y[:, 0])

    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(model, encoders={"level": IndexNet(1, 1), "rough": IndexNet(1, 1)})
    with torch.no_grad(), pytest.raises(ValueError, match="'rough', whose prior depends on 'level'; take Trace_ELBO"):
        StructuredELBO().loss(model, guide, t, y)
    assert math.isfinite(Trace_ELBO().loss(model, guide, t, y))
