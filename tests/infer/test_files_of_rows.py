"""Files of models whose rows have arguments."""

import json

import numpy as np
import pandas as pd
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


def test_a_file_has_the_labels_of_columns(tmp_path):
    path, labels = tmp_path / "model.safetensors", ["mass", "length", 3]
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(N, D)), columns=labels)
    model = BayesianGPLVM.from_data(table, Q, num_inducing=4)
    guide = MeanFieldGuide(model)
    guide(torch.tensor(table.to_numpy()))
    save(path, model, guide)
    again, its_guide = load(path)
    assert list(again.predict(its_guide, torch.zeros(1, Q).double(), num_samples=1).to_pandas().columns) == labels
    with pytest.raises(ValueError, match="in the order of the training data"):
        again.infer_latents(its_guide, table[labels[::-1]])
    dates = table.set_axis(pd.date_range("2024-01-01", periods=D), axis=1)  # labels that a file cannot hold
    save(path, model.initialize(dates), guide)
    assert list(load(path).model.predict(its_guide, torch.zeros(1, Q).double(), num_samples=1).to_pandas().columns) == [
        0,
        1,
        2,
    ]
