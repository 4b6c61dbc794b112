"""Files of models whose rows have arguments."""

import json

import pytest
import torch
from safetensors import safe_open

from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import load, save
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, RowArguments

N, D, Q = 8, 3, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["gplvm", "random features"])
def test_a_file_has_the_arguments_of_rows(kind, dtype, tmp_path):
    rows = RowArguments(
        prior_loc=torch.randn(N, Q), covariates=torch.randn(N, 1), exposure=1.0 + torch.rand(N), weight=torch.rand(N)
    ).to(dtype)
    Y = torch.poisson(torch.ones(N, D)).to(dtype)
    if kind == "gplvm":
        model = BayesianGPLVM(N, D, Q, num_inducing=4, likelihood=Poisson(), rows=rows).to(Y).initialize(Y)
        guide = MeanFieldGuide(model)
    else:
        model = (
            RandomFeatureLVM(N, D, Q, num_frequencies=4, num_components=2, likelihood=Poisson(), rows=rows).to(Y).initialize(Y)
        )
        guide = RandomFeatureGuide(model)
    guide(Y)
    path = tmp_path / "model.safetensors"
    save(path, model, guide)
    again, its_guide = load(path)
    for name, value in rows.parts().items():
        assert torch.equal(again.rows.parts()[name], value)
    new, X = rows[:2], torch.randn(2, Q, dtype=dtype)
    predictions = []
    for each in ((model, guide), (again, its_guide)):
        torch.manual_seed(0)
        predictions.append(each[0].predict(each[1], X, rows=new, num_samples=2).mean)
    assert torch.equal(*predictions)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["pyro_lvgp"])
    assert header["model"]["kwargs"]["rows"]["dataclass"] == "pyro_lvgp.models.row_arguments.RowArguments"
