"""Kernels of GPyTorch, and ours against theirs."""

import re
import warnings

import pyro
import pyro.contrib.gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroSample

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import (
    RBF,
    Cosine,
    Index,
    Linear,
    Matern,
    Periodic,
    RationalQuadratic,
    SpectralMixture,
    as_kernel,
)
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import ZeroImputation
from tests.helpers.points import rand
from tests.kernels._kernels import GPModel


@pytest.fixture
def gpytorch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts functions at import
        return pytest.importorskip("gpytorch")


@pytest.mark.parametrize("ard", [True, False], ids=["ard", "isotropic"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["single", "batch"])
def test_agrees_with_gpytorch(gpytorch, ard, batch):
    Q = 2
    ell = torch.rand(*batch, Q if ard else 1, dtype=torch.float64) + 0.5
    period = torch.rand(*batch, Q if ard else 1, dtype=torch.float64) + 1.0
    variance = torch.rand(batch, dtype=torch.float64) + 0.5
    ours = {"variance": variance, "lengthscale": ell, "ard": ard, "batch_shape": batch}
    theirs = {"ard_num_dims": Q if ard else None, "batch_shape": torch.Size(batch)}
    pairs = [
        (RBF(Q, **ours), gpytorch.kernels.RBFKernel(**theirs)),
        (Matern(Q, 0.5, **ours), gpytorch.kernels.MaternKernel(0.5, **theirs)),
        (Matern(Q, 1.5, **ours), gpytorch.kernels.MaternKernel(1.5, **theirs)),
        (Matern(Q, 2.5, **ours), gpytorch.kernels.MaternKernel(2.5, **theirs)),
        (Periodic(Q, period, **ours), gpytorch.kernels.PeriodicKernel(**{**theirs, "ard_num_dims": Q if ard else 1})),
    ]
    X, Z = rand(7, Q), rand(4, Q)
    for kernel, core in pairs:
        core.double()
        core.lengthscale = ell.unsqueeze(-2)
        if isinstance(kernel, Periodic):
            core.lengthscale = ell.square().unsqueeze(-2)  # GPyTorch divides by ℓ, not by ℓ²
            core.period_length = period.unsqueeze(-2)
        scaled = gpytorch.kernels.ScaleKernel(core, batch_shape=torch.Size(batch)).double()
        scaled.outputscale = variance
        assert kernel(X, Z).shape == (*batch, 7, 4)
        torch.testing.assert_close(kernel(X, Z), scaled(X, Z).to_dense(), rtol=0, atol=1e-6)
        torch.testing.assert_close(kernel(X), scaled(X).to_dense(), rtol=0, atol=1e-6)
        torch.testing.assert_close(as_kernel(scaled)(X, Z), kernel(X, Z), rtol=0, atol=1e-6)


def test_further_kernels_agree_with_gpytorch(gpytorch):
    """Rational quadratic, cosine, spectral mixture and coregionalisation kernels."""
    X, Z, theirs = rand(7, 1), rand(4, 1), gpytorch.kernels
    ours = [
        RationalQuadratic(1, 0.7, lengthscale=1.3).double(),
        Cosine(1, period=0.9).double(),
        SpectralMixture(1, 3, weights=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)),
    ]
    others = [theirs.RQKernel().double(), theirs.CosineKernel().double(), theirs.SpectralMixtureKernel(3).double()]
    others[0].alpha, others[0].lengthscale, others[1].period_length = 0.7, 1.3, 0.45  # GPyTorch has cos(πd/p)
    others[2].mixture_weights, others[2].mixture_means, others[2].mixture_scales = (
        ours[2].weights.detach(),
        ours[2].locs.detach()[:, None],
        ours[2].scales.detach()[:, None],
    )
    for kernel, other in zip(ours, others, strict=True):
        torch.testing.assert_close(kernel(X, Z), other(X, Z).to_dense(), rtol=0.0, atol=1e-6)
    index, other = Index(3, rank=2).double(), theirs.IndexKernel(3, rank=2).double()
    other.covar_factor.data, other.var = index.factor.detach(), index.variance.detach()
    levels = torch.tensor([[0], [2], [2], [1]])
    torch.testing.assert_close(index(levels.double()), other.covar_matrix.to_dense()[levels, levels.mT], rtol=0.0, atol=1e-6)


def test_linear_sum_and_product_agree_with_gpytorch(gpytorch):
    X, Z, v = rand(3, 7, 2), rand(3, 4, 2), torch.tensor([0.5, 2.0], dtype=torch.float64)
    g_linear = gpytorch.kernels.LinearKernel(ard_num_dims=2).double()
    g_linear.variance = v
    g_rbf = gpytorch.kernels.RBFKernel().double()
    g_rbf.lengthscale = 0.7
    linear, rbf = Linear(2, variance=v), RBF(2, lengthscale=torch.tensor(0.7).double(), ard=False)
    for ours, theirs in [(linear, g_linear), (linear + rbf, g_linear + g_rbf), (linear * rbf, g_linear * g_rbf)]:
        torch.testing.assert_close(ours(X, Z), theirs(X, Z).to_dense(), rtol=0, atol=1e-6)


def test_as_kernel_trains_by_svi(gpytorch):
    theirs = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel(ard_num_dims=2))
    model = GPModel(as_kernel(theirs) * RBF(2), torch.randn(6, 2), torch.randn(6))
    before = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    svi = SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    with poutine.trace(param_only=True) as tape:
        svi.loss_and_grads(model, lambda: None)
    assert sum("raw_" in name for name in tape.trace.nodes) == 3
    losses = [svi.step() for _ in range(20)]
    assert losses[-1] < losses[0]
    for name, value in theirs.named_parameters():
        assert not torch.allclose(value, before[name]), name


def test_as_kernel_broadcasts(gpytorch):
    kernel = as_kernel(gpytorch.kernels.RBFKernel(batch_shape=torch.Size([3]), active_dims=(1,)))
    X, Z = torch.randn(5, 1, 4, 2), torch.randn(6, 2)
    assert kernel.batch_shape == (3,)
    assert kernel(X, Z).shape == (5, 3, 4, 6)
    assert kernel(Z, X[0, 0]).shape == (3, 6, 4)
    assert kernel.diagonal(X).shape == (5, 3, 4)
    torch.testing.assert_close(kernel.diagonal(X), kernel(X).diagonal(dim1=-2, dim2=-1))
    assert kernel.parameters_text().startswith("lengthscale=[0.6931, ")


def test_as_kernel_takes_kernels_only():
    kernel = RBF(1)
    assert as_kernel(kernel) is kernel
    others = {
        "a torch.nn.modules.linear.Linear": torch.nn.Linear(1, 1),
        "1.0": 1.0,
        "'rbf'": "rbf",
        "a pyro.contrib.gp.kernels.isotropic.RBF": pyro.contrib.gp.kernels.RBF(1),
        "<class 'pyro_lvgp.kernels.stationary.RBF'>": RBF,
    }
    for got, other in others.items():
        with pytest.raises(TypeError, match=rf"expected a kernel .*, such as RBF\(2\), got {re.escape(got)}; .* subclass"):
            as_kernel(other)


def test_gpytorch_s_kernels_do_not_hold_ours(gpytorch):
    theirs = gpytorch.kernels.RBFKernel()
    for combined in (theirs + RBF(2), theirs * as_kernel(gpytorch.kernels.RQKernel())):
        with pytest.raises(TypeError, match=r"parts from GPyTorch, got \w+ with .* in it; .* as_kernel\(theirs\) \+ RBF\(2\)"):
            as_kernel(combined)


@pytest.mark.parametrize("local", [False, True])
def test_gpytorch_s_kernels_are_parts_of_our_models(gpytorch, local):
    """And leave alone what kernels share."""
    with pyro.settings.context(module_local_params=local):
        t, y = torch.linspace(0.0, 1.0, 9)[:, None], torch.randn(9, 2)
        theirs = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel())
        model = GPVAE(as_kernel(theirs), torch.nn.Linear(1, 2))
        guide = StructuredGPGuide(model, encoders={"f": ZeroImputation(2, 1)})
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), StructuredELBO())
        before = theirs.base_kernel.lengthscale.item()
        for _ in range(3):
            svi.step(t, y)
        assert theirs.base_kernel.lengthscale.item() != before
    others = gpytorch.kernels.RBFKernel().modules()
    assert not any(isinstance(part, pyro.nn.PyroModule) for part in others)


def test_a_prior_on_a_gpytorch_parameter_is_refused(gpytorch):
    kernel = as_kernel(gpytorch.kernels.RBFKernel())
    kernel.kernel.raw_lengthscale = PyroSample(dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
    with pytest.raises(ValueError, match=r"priors on \['raw_lengthscale'\]"):
        kernel(torch.randn(3, 1))
