"""What models, guides and their parts are printed as."""

import copy
import re
from html import unescape

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp._utils.representation import display_name
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF, Kernel, Linear, Matern, Stack
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import GPVAE, BayesianGPLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet


def test_a_model_is_printed_as_its_call_with_its_parts():
    model = BayesianGPLVM(num_data=1797, data_dim=64, latent_dim=2)
    expected = (
        "BayesianGPLVM(num_data=1797, data_dim=64, latent_dim=2, kernel=RBF(input_dim=2, variance=1, "
        "lengthscale=[1.414, 1.414]), likelihood=Gaussian(variance=0.3))"
    )
    assert repr(model) == str(model) == expected
    assert repr(BayesianGPLVM(9, 3, 2, num_inducing=4)).endswith("num_inducing=4, likelihood=Gaussian(variance=0.3))")


def test_present_values_of_parameters_are_printed():
    kernel = RBF(2)
    kernel.variance = torch.tensor(0.25)
    assert repr(kernel) == "RBF(input_dim=2, variance=0.25, lengthscale=[1, 1])"
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    assert repr(kernel) == "RBF(input_dim=2, variance=0.25, lengthscale=PyroSample(LogNormal))"
    assert repr(RBF(9)) == "RBF(input_dim=9, variance=1, lengthscale=Tensor[9])"


def test_combinations_are_printed_with_their_parts():
    assert repr(RBF(1) + 0.5 * Linear(1)) == (
        "Sum(RBF(input_dim=1, variance=1, lengthscale=[1]), Product(0.5, Linear(input_dim=1, variance=[1])))"
    )


def test_networks_and_guides_are_printed():
    model = GPVAE(Stack(RBF(1), Matern(1, 2.5)), MLP(2, 3, [4]), Poisson())
    assert repr(model).endswith("decoder=MLP(in_dim=2, out_dim=3, hidden_dims=[4]), likelihood=Poisson())")
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 2)})
    assert repr(guide) == "StructuredGPGuide(model=GPVAE(…), encoders={'f': IndexNet(data_dim=3, latent_dim=2)})"
    own = GPVAE(RBF(1, batch_shape=(2,)), nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    assert "decoder=Sequential(…)" in repr(own)
    sparse = SparseGPVAE(RBF(1, batch_shape=(2,)), MLP(2, 3), torch.randn(4, 2))
    assert "inducing_points=Tensor[4, 2]" in repr(sparse)
    rows = BayesianGPLVM(9, 3, 2, num_inducing=4)
    assert repr(MeanFieldGuide(rows)) == "MeanFieldGuide(model=BayesianGPLVM(…))"
    assert repr(AutoAnnealedLangevin(rows, num_steps=4)).startswith("AutoAnnealedLangevin(model=BayesianGPLVM(…), num_steps=4")


def test_a_model_in_a_handler_has_its_name():
    model = poutine.condition(BayesianGPLVM(9, 3, 2, num_inducing=4), {"u": torch.zeros(3, 4)})
    assert display_name(model) == "BayesianGPLVM"
    assert repr(MeanFieldGuide(model)) == "MeanFieldGuide(model=BayesianGPLVM(…))"


def test_a_kernel_of_a_user_is_printed():
    class White(Kernel):
        def __init__(self, input_dim, scale=1.0, *, names=(), **others):
            super().__init__(input_dim, **others)

        def k(self, X, Z, params):
            return (X[..., :, None, :] == Z[..., None, :, :]).all(-1).to(X.dtype)

        def k_diagonal(self, X, params):
            return torch.ones_like(X[..., 0])

    assert repr(White(1)) == "White(input_dim=1)"
    printed = repr(White(1, 2.0, names=("a",), active_dims=[3]))
    assert printed == "White(input_dim=1, scale=2.0, names=('a',), active_dims=[3])"


def test_printing_runs_nothing_of_pyro():
    state = torch.get_rng_state()
    model = BayesianGPLVM(9, 3, 2, num_inducing=4)
    state = torch.get_rng_state()
    repr(model), model._repr_html_()
    assert torch.equal(state, torch.get_rng_state())
    import pyro

    assert not list(pyro.get_param_store().keys())


def test_notebooks_show_a_table():
    model = BayesianGPLVM(9, 3, 2, num_inducing=4, likelihood=Gaussian())
    html = unescape(model._repr_html_())
    assert re.findall(r"<td>(\w+ ?\w*)</td>", html) == [
        *("num_data", "data_dim", "latent_dim", "kernel", "num_inducing", "likelihood", "learned numbers")
    ]
    assert f"<code>{sum(part.numel() for part in model.parameters())}</code>" in html
    assert html.startswith("<b>BayesianGPLVM</b>")
    assert "<script" not in copy.deepcopy(model)._repr_html_()


def test_copies_are_printed_as_by_torch():
    model = BayesianGPLVM(9, 3, 2, num_inducing=4)
    assert repr(copy.deepcopy(model)).startswith("BayesianGPLVM(\n  (likelihood)")
