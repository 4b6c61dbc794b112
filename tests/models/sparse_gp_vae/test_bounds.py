"""Bounds of a sparse GP-VAE: mean, variance and optimum."""

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import SparseGPVAE
from tests.helpers.sparse_processes import D, N, data, make, one_and_several
from tests.models.sparse_gp_vae._forms import every_form

pytestmark = pytest.mark.usefixtures("float64")


@every_form
@one_and_several
def test_every_bound_has_the_same_mean(form, series):
    model, guide = make(form)
    x, y = data(*series)
    guide(x, y)
    bounds = {
        "integrated": MeanFieldELBO("points", num_samples=300),
        "structured": StructuredELBO(num_particles=300),
        "mean field": TraceMeanField_ELBO(num_particles=300, vectorize_particles=True, max_plate_nesting=2),
        "plain": Trace_ELBO(num_particles=300, vectorize_particles=True, max_plate_nesting=2),
    }
    draws = {name: torch.tensor([bound.loss(model, guide, x, y) for _ in range(10)]) for name, bound in bounds.items()}
    mean, error = draws["integrated"].mean(), draws["integrated"].std() / 10**0.5
    for values in draws.values():
        assert abs(values.mean() - mean) < 5.0 * torch.hypot(error, values.std() / 10**0.5)


def test_integrating_u_lowers_the_noise_of_gradients():
    """Points that hang together have noise of their own each, not one noise."""
    model = SparseGPVAE(RBF(1, lengthscale=2.0, batch_shape=(1,)), nn.Linear(1, D), torch.rand(2, 1), Gaussian(1.0))
    guide = SparseStructuredGPGuide(model, init_scale=1.0)
    args = data(num_data=100)
    gradients = {}
    for bound in (MeanFieldELBO("points", 1), TraceMeanField_ELBO()):
        for _ in range(50):
            bound.loss_and_grads(model, guide, *args)
            gradients.setdefault(bound, []).append(model.decoder.weight_unconstrained.grad.clone())
            model.zero_grad()
    integrated, drawn = (torch.stack(values).std(0) for values in gradients.values())
    assert integrated.norm() < 0.5 * drawn.norm()


@every_form
@one_and_several
@pytest.mark.parametrize("bound", ["integrated", "structured", "plain"])
def test_svi_moves_every_parameter(form, series, bound):
    model, guide = make(form, independent_dim=1)
    x, y = data(*series)
    bounds = {
        "integrated": MeanFieldELBO("points"),
        "structured": StructuredELBO(num_particles=2),
        "plain": Trace_ELBO(),
    }
    svi = SVI(model, guide, Adam({"lr": 0.01}), bounds[bound])
    assert svi.step(x, y) < float("inf")
    parameters = dict([*model.named_parameters(), *guide.named_parameters()])
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(2):
        svi.step(x, y)
    for name, p in parameters.items():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name


def test_free_form_reaches_the_evidence_of_a_linear_model():
    """Classical SVGP: with points at the data its best q(u) is exact, and the bound tight."""
    x = torch.linspace(0.0, 1.0, N)[:, None]
    model = SparseGPVAE(RBF(1, lengthscale=0.3, batch_shape=(1,)), nn.Linear(1, 1), x, Gaussian(0.1))
    model.decoder.weight, model.decoder.bias = torch.ones(1, 1), torch.zeros(1)
    y = torch.sin(6.0 * x)
    for p in model.parameters():
        p.requires_grad_(False)
    guide = SparseStructuredGPGuide(model)
    how = {"num_steps": 600, "optim": JointAdam(lr=0.05), "progress": False, "compile": "torchscript"}
    fit(model, guide, x, y, loss=MeanFieldELBO("points", 20), **how)
    K = model.kernel(x)[0] + 0.1 * torch.eye(N)
    evidence = dist.MultivariateNormal(torch.zeros(N), K).log_prob(y[:, 0])
    bound = -MeanFieldELBO("points", 4000).loss(model, guide, x, y)
    assert evidence - 0.1 < bound < evidence + 0.05
