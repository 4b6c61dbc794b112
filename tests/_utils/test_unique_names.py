"""Parameters of several models and guides in one program stay separate; sample sites keep their names."""

import copy
import gc
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam

from pyro_lvgp import GPVAE, AutoAnnealedLangevin, BayesianGPLVM, MeanFieldGuide, RandomFeatureGuide, RandomFeatureLVM
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.networks import MLP


def data():
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def new_pair(kind):
    torch.manual_seed(0)
    if kind == "random features":
        model = RandomFeatureLVM(12, 3, 2, num_frequencies=4, num_components=2).initialize(data())
        return model, RandomFeatureGuide(model)
    model = BayesianGPLVM(12, 3, 2, num_inducing=4).initialize(data())
    return model, AutoAnnealedLangevin(model, num_steps=2) if kind == "annealed" else MeanFieldGuide(model)


def losses(model, guide):
    torch.manual_seed(1)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO(max_plate_nesting=1))
    return [svi.step(data()) for _ in range(4)]


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize("kind", ["mean field", "annealed", "random features"])
def test_a_second_pair_learns_as_the_first_did(kind, setting):
    with pyro.settings.context(module_local_params=setting):
        first, second = new_pair(kind), new_pair(kind)
        assert losses(*first) == losses(*second)
        assert pyro.settings.get("module_local_params") == setting
        tensors = [{id(p) for part in pair for p in part.parameters()} for pair in (first, second)]
        assert not tensors[0] & tensors[1]


def test_a_module_of_the_user_keeps_its_names_in_the_store():
    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.gplvm = BayesianGPLVM(12, 3, 2, num_inducing=4)
            self.gplvm.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
            self.loc = torch.nn.Parameter(torch.zeros(()))

        def forward(self, y):
            return self.gplvm(y - self.loc)

    trace = poutine.trace(Model()).get_trace(data())
    assert {"loc", "gplvm.kernel.variance", "gplvm.inducing_points"} <= set(pyro.get_param_store().keys())
    assert "gplvm.kernel.lengthscale" in trace.nodes


def test_sites_with_a_prior_have_no_prefix_for_any_handler():
    model = BayesianGPLVM(12, 3, 2, num_inducing=4)
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    value = torch.tensor([0.5, 2.0])
    trace = poutine.trace(poutine.condition(model, {"kernel.lengthscale": value})).get_trace(data())
    assert torch.equal(trace.nodes["kernel.lengthscale"]["value"], value)
    trace = poutine.trace(model).get_trace(data())
    replayed = poutine.trace(poutine.replay(model, trace)).get_trace(data())
    assert torch.equal(replayed.nodes["X"]["value"], trace.nodes["X"]["value"])
    assert torch.equal(replayed.nodes["kernel.lengthscale"]["value"], trace.nodes["kernel.lengthscale"]["value"])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"])
def test_copies_have_parameters_of_their_own(again):
    model, guide = new_pair("mean field")
    losses(model, guide)
    other = again(model)
    before = {name: tensor.clone() for name, tensor in other.named_parameters()}
    losses(other, MeanFieldGuide(other))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in other.named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name])


def test_a_part_of_two_modules_leaves_the_store_with_the_last():
    shared, models = Gaussian(0.5), []
    for _ in range(2):
        models.append(BayesianGPLVM(12, 3, 2, num_inducing=4, likelihood=shared))
        losses(models[-1], MeanFieldGuide(models[-1]))
    names = {f"{model._pyro_name}.likelihood.variance" for model in models}
    assert names <= pyro.get_param_store().keys()
    del models
    gc.collect()
    BayesianGPLVM(12, 3, 2, num_inducing=4)
    state = pyro.get_param_store().get_state()
    assert not names & state["params"].keys()
    assert state["params"].keys() == state["constraints"].keys()


def test_parameters_of_modules_that_no_longer_exist_leave_the_store():
    model = GPVAE(RBF(1, batch_shape=(1,)), MLP(1, 2, [3]))
    model(torch.linspace(0.0, 1.0, 4)[:, None])
    assert any(name.startswith(f"{model._pyro_name}.") for name in pyro.get_param_store())
    name = model._pyro_name
    del model
    gc.collect()
    MeanFieldGuide(lambda: None)
    assert not any(key.startswith(f"{name}.") for key in pyro.get_param_store())
