"""Kernels, likelihoods and networks that are used by themselves leave Pyro's parameter store alone."""

import copy
import inspect

import pyro
import pytest
import torch
from pyro import poutine

from pyro_lvgp import kernels, likelihoods, networks
from pyro_lvgp.kernels import RBF, Kernel, Matern
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Likelihood, Ordinal

X, Y = torch.stack([torch.randn(6), torch.arange(6.0) % 3], -1), torch.rand(6, 3)
KERNELS = {
    "Categorical": lambda scale: kernels.Categorical(3, variance=scale, active_dims=[1]),
    "Cosine": lambda scale: kernels.Cosine(2, variance=scale),
    "Embedded": lambda scale: kernels.Embedded(RBF(1, variance=scale), 3, active_dims=[1]),
    "Index": lambda scale: kernels.Index(3, variance=scale, active_dims=[1]),
    "Linear": lambda scale: kernels.Linear(2, variance=scale),
    "Matern": lambda scale: Matern(2, 1.5, variance=scale),
    "Periodic": lambda scale: kernels.Periodic(2, variance=scale),
    "Product": lambda scale: RBF(2, variance=scale) * Matern(2, 1.5),
    "RBF": lambda scale: RBF(2, variance=scale),
    "RationalQuadratic": lambda scale: kernels.RationalQuadratic(2, variance=scale),
    "SpectralMixture": lambda scale: kernels.SpectralMixture(2, 3, weights=scale),
    "Stack": lambda scale: kernels.Stack(RBF(2, variance=scale), Matern(2, 0.5)),
    "Sum": lambda scale: RBF(2, variance=scale) + Matern(2, 0.5),
}
LIKELIHOODS = {
    "Bernoulli": lambda scale: Bernoulli(),
    "Binomial": lambda scale: likelihoods.Binomial(3),
    "Gaussian": Gaussian,
    "Heterogeneous": lambda scale: likelihoods.Heterogeneous([(Gaussian(scale), [0, 2]), (Bernoulli(), [1])]),
    "LogNormal": likelihoods.LogNormal,
    "LowRankGaussian": lambda scale: likelihoods.LowRankGaussian(1, 3, variance=scale),
    "NegativeBinomial": likelihoods.NegativeBinomial,
    "Ordinal": lambda scale: Ordinal(torch.tensor([0.0, 1.0]), scale),
    "Poisson": lambda scale: likelihoods.Poisson(),
    "StudentT": likelihoods.StudentT,
}
NETWORKS = {
    "FactorNet": lambda: networks.FactorNet(3, 2),
    "IndexNet": lambda: networks.IndexNet(3, 2),
    "MLP": lambda: networks.MLP(3, 2),
    "PointNet": lambda: networks.PointNet(3, 2),
    "ZeroImputation": lambda: networks.ZeroImputation(3, 2),
}


def concrete(package, base):
    found = (getattr(package, name) for name in package.__all__)
    return {
        part.__name__ for part in found if isinstance(part, type) and issubclass(part, base) and not inspect.isabstract(part)
    }


def test_every_kernel_and_likelihood_is_in_the_tables():
    assert concrete(likelihoods, Likelihood) - LIKELIHOODS.keys() <= {"Logistic", "LogConcaveLikelihood"}
    assert concrete(kernels, Kernel) - KERNELS.keys() <= {"Combination", "GPyTorchKernel"}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_kernels(make):
    first, second = make(0.1), make(1.0)
    matrix = first(X)
    assert not torch.allclose(second(X), matrix)
    first.diagonal(X)
    assert torch.equal(first(X), matrix)
    assert not pyro.get_param_store().keys()


@pytest.mark.parametrize("make", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_likelihoods(make):
    first, second = make(0.1), make(1.0)
    for likelihood, scale in ((first, 0.1), (second, 1.0)):
        entries = likelihood(torch.zeros(6, 3))
        assert entries.shape() == (6, 3)
        if likelihood.params() is not None:
            params = likelihood.params().flatten()
            assert torch.isclose(params, torch.tensor(scale)).any()
    assert not pyro.get_param_store().keys()


def test_ordinal_likelihoods_of_other_widths():
    for width in (3, 5):
        levels = torch.randint(3, (20, width)).float()
        assert Ordinal.from_data(levels)(torch.zeros(20, width)).log_prob(levels).shape == (20, width)
    assert not pyro.get_param_store().keys()


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_networks(make):
    first, second = make(), make()
    outputs = [module(Y) for module in (first, second, first)]
    first, second, again = (x[0] if isinstance(x, tuple) else x for x in outputs)
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)
    assert not pyro.get_param_store().keys()


def test_networks_of_other_libraries():
    first, second = (networks.as_pyro_module(torch.nn.Linear(3, 2)) for _ in range(2))
    twin = networks.as_pyro_module(copy.deepcopy(first))
    assert not torch.allclose(first(Y), second(Y))
    assert torch.equal(first(Y), twin(Y))
    assert not pyro.get_param_store().keys()
    names = {name for part in (first, second, twin) for name in poutine.trace(part).get_trace(Y).param_nodes}
    assert len(names) == 6
    assert not any(name in {"weight", "bias"} for name in names)


@pytest.mark.parametrize("make", [Gaussian, lambda scale: copy.deepcopy(Gaussian(scale))], ids=["new", "copy"])
def test_likelihoods_of_a_model_that_is_a_function(make):
    first, second = make(0.1), make(1.0)
    trace = poutine.trace(lambda: (first(Y).variance[0, 0].item(), second(Y).variance[0, 0].item())).get_trace()
    assert trace.nodes["_RETURN"]["value"] == pytest.approx((0.1, 1.0))
    assert len(trace.param_nodes) == 2


def test_a_part_that_a_model_makes_anew_learns_from_run_to_run():
    def model():
        pyro.factor("loss", -Gaussian(1.0)(Y).variance.mean())

    svi = pyro.infer.SVI(model, lambda: None, pyro.optim.SGD({"lr": 0.1}), pyro.infer.Trace_ELBO())
    losses = [svi.step() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
