"""Steps recorded as graphs select the arguments of the rows of each mini-batch, and exports take them."""

import pyro
import pytest
import torch

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import CompiledELBO, JointOptim, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from tests.models.gplvm._models import D, M, N, Q

pytestmark = pytest.mark.usefixtures("float64")

GUIDES = {"mean field": MeanFieldGuide, "annealed": lambda model: AutoAnnealedLangevin(model, num_steps=2, step_size=0.1)}
ROWS = {
    "counts": lambda: RowArguments(exposure=0.5 + torch.rand(N), weight=torch.rand(N), covariates=torch.randn(N, 2)),
    "errors": lambda: RowArguments(standard_error=torch.rand(N, D), prior_loc=torch.randn(N, Q), prior_scale=0.3),
}


def make(kind, make_guide):
    pyro.clear_param_store()
    torch.manual_seed(0)
    Y = torch.poisson(torch.ones(N, D))
    likelihood = Poisson() if kind == "counts" else Gaussian(0.3)
    model = BayesianGPLVM(N, D, Q, num_inducing=M, likelihood=likelihood, rows=ROWS[kind]()).initialize(Y)
    return model, make_guide(model), Y


@pytest.mark.parametrize("make_guide", GUIDES.values(), ids=GUIDES)
@pytest.mark.parametrize("kind", ROWS)
def test_graphs_take_the_steps_of_eager_execution(kind, make_guide):
    results = []
    for is_graph in (False, True):
        model, guide, Y = make(kind, make_guide)
        guide(Y)
        bound = MeanFieldELBO(max_plate_nesting=1)
        loss = CompiledELBO(bound, backend="torchscript") if is_graph else bound
        optim = JointOptim(torch.optim.SGD, {"lr": 1e-4})
        history = fit(model, guide, Y, loss=loss, optim=optim, num_steps=8, batch_size=4, progress=False)
        state = {
            f"{i}.{name}": p.detach().clone() for i, part in enumerate((model, guide)) for name, p in part.named_parameters()
        }
        results.append({"losses": torch.tensor(history.losses), **state})
    assert results[0]["losses"].unique().numel() == 8  # other rows in each step
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make_guide", GUIDES.values(), ids=GUIDES)
@pytest.mark.parametrize("kind", ROWS)
def test_exports_of_some_rows_have_the_arguments_of_these_rows(kind, make_guide):
    model, guide, Y = make(kind, make_guide)
    guide(Y)
    idx = torch.tensor([4, 1])
    tree = to_arviz(model, guide, Y[idx], idx, num_samples=3)
    assert tree.posterior["X"].shape == (1, 3, 2, Q)
    assert tree.posterior_predictive["y"].shape == (1, 3, 2, D)
