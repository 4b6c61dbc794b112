"""Encoders ignore what is missing, and train inside a guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.nn import PyroModule
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import MLP, ZeroImputation, as_pyro_module

D, Q = 4, 3


@pytest.fixture
def Y(dtype):
    Y = torch.randn(6, D, dtype=dtype)
    Y[torch.rand(Y.shape) < 0.4] = torch.nan
    return Y


@pytest.mark.parametrize("hidden_dims", [(), (5,), (7, 5)])
def test_mlp_shapes(hidden_dims):
    net = MLP(D, 2, hidden_dims, nn.Tanh)
    sizes = [D, *hidden_dims, 2]
    assert [m.weight.shape for m in net if isinstance(m, nn.Linear)] == list(zip(sizes[1:], sizes[:-1], strict=True))
    assert sum(isinstance(m, nn.Tanh) for m in net) == len(hidden_dims)
    assert isinstance(net[-1], nn.Linear)
    assert net(torch.zeros(3, 6, D)).shape == (3, 6, 2)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
class TestZeroImputation:
    def test_shapes_dtype_and_valid_scales(self, covariance, Y):
        loc, scale = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)(Y)
        assert loc.shape == (6, Q)
        assert loc.dtype == scale.dtype == Y.dtype
        if covariance == "diagonal":
            assert scale.shape == (6, Q)
            assert (scale > 0).all()
        else:
            assert scale.shape == (6, Q, Q)
            assert dist.constraints.lower_cholesky.check(scale).all()
            assert (scale.tril(-1) != 0).any()
            covariances = scale @ scale.mT
            torch.testing.assert_close(torch.linalg.cholesky(covariances), scale, rtol=1e-3, atol=1e-4)

    def test_is_the_network_of_values_and_indicators(self, covariance, Y):
        """Whatever stands at a missing entry, the network sees zero and that it is missing, unlike a zero that was seen."""
        encoder = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)
        missing = torch.isnan(Y)
        inputs = torch.cat([torch.where(missing, torch.zeros_like(Y), Y), (~missing).to(Y.dtype)], -1)
        torch.testing.assert_close(encoder(Y)[0], encoder.net(inputs)[:, :Q])
        zeros = encoder(Y.nan_to_num())
        rows = missing.any(1)
        assert rows.any()
        for found, other in zip(encoder(Y), zeros, strict=True):
            assert found.isfinite().all()
            assert (found[rows] != other[rows]).any()
            torch.testing.assert_close(found[~rows], other[~rows])

    def test_missing_entries_send_no_gradient(self, covariance, Y):
        encoder = ZeroImputation(D, Q, covariance=covariance).to(Y.dtype)
        Y.requires_grad_()
        loc, scale = encoder(Y)
        (gradient,) = torch.autograd.grad(loc.sum() + scale.square().sum(), Y)
        assert (gradient[torch.isnan(Y)] == 0).all()
        assert (gradient[~torch.isnan(Y)] != 0).all()

    def test_gradients_are_finite_with_everything_missing(self, covariance, dtype):
        encoder = ZeroImputation(D, Q, covariance=covariance).to(dtype)
        loc, scale = encoder(torch.full((2, D), torch.nan, dtype=dtype))
        (loc.sum() + scale.square().sum()).backward()
        for name, parameter in encoder.named_parameters():
            assert parameter.grad.isfinite().all(), name
        assert any((parameter.grad != 0).any() for parameter in encoder.parameters())


def test_as_pyro_module_keeps_outputs_and_makes_every_parameter_a_pyro_param(dtype):
    net = nn.Sequential(MLP(D, 2, [5]), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)).to(dtype).eval()
    x = torch.randn(6, D, dtype=dtype)
    before, count = net(x), len(list(net.parameters()))
    assert as_pyro_module(as_pyro_module(net)) is net
    assert all(isinstance(module, PyroModule) for module in net.modules())
    assert torch.equal(net(x), before)
    names = [name for name, _ in net.named_parameters()]
    assert len(names) == count
    assert all(name.endswith("_unconstrained") for name in names)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_every_weight_trains_through_svi(local, covariance):
    Y = torch.randn(8, D)
    Y[2, 1:] = torch.nan
    with pyro.settings.context(module_local_params=local):
        model = BayesianGPLVM(8, D, Q, num_inducing=4).initialize(Y)
        encoder = ZeroImputation(D, Q, [5], covariance=covariance)
        guide = MeanFieldGuide(model, covariance={"X": covariance}, encoders={"X": encoder})
        svi = SVI(model, guide, Adam({"lr": 0.1}), TraceMeanField_ELBO())
        svi.step(Y)
        before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
        assert len(before) == 4
        svi.step(Y)
        for name, parameter in encoder.named_parameters():
            assert not torch.equal(parameter, before[name]), name
