"""Arguments of rows: checks, selection, and what predictions need."""

import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import BayesianGPLVM, LatentVariableModel, RandomFeatureLVM, RowArguments

N, D, Q = 6, 3, 2
ones = torch.ones


def test_rows_are_selected_converted_and_replaced():
    rows = RowArguments(prior_loc=torch.arange(12.0).reshape(N, Q), prior_scale=0.5, exposure=torch.arange(1.0, N + 1.0))
    chosen = rows[torch.tensor([4, 1])]
    assert torch.equal(chosen.prior_loc, torch.tensor([[8.0, 9.0], [2.0, 3.0]]))
    assert torch.equal(chosen.prior_scale, torch.full((2, Q), 0.5))
    assert torch.equal(chosen.exposure, torch.tensor([[5.0], [2.0]]))
    assert chosen.num_rows == 2
    assert chosen.weight is None
    assert rows.to(torch.float64).exposure.dtype == torch.float64
    other = rows.replace(RowArguments(exposure=torch.full((N,), 9.0)))
    assert torch.equal(other.exposure, torch.full((N, 1), 9.0))
    assert torch.equal(other.prior_loc, rows.prior_loc)
    assert torch.equal(RowArguments(covariates=ones(1, 4)).expand(3).covariates, ones(3, 4))
    assert RowArguments().num_rows is None


def test_one_part_of_a_prior_completes_the_other():
    assert torch.equal(RowArguments(prior_scale=ones(N, Q)).prior_loc, torch.zeros(N, Q))
    assert torch.equal(RowArguments(prior_loc=ones(N, Q)).prior_scale, ones(N, Q))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"weight": ["a", "b"]}, ValueError, "expected weight to be a table of numbers, got list"),
        (
            {"prior_scale": 1.0},
            TypeError,
            "expected prior_scale to be a table of numbers, got 1.0 of type float; pass prior_loc",
        ),
        ({"covariates": ones(N, 2).long()}, TypeError, "expected covariates of a floating-point dtype"),
        ({"covariates": ones(N)}, ValueError, r"expected covariates of shape \[rows, columns\], got \[6\]"),
        ({"weight": ones(N, 1)}, ValueError, r"expected weight of shape \[rows\]"),
        ({"exposure": ones(N, 1, 1)}, ValueError, r"expected exposure of shape \[rows\] or \[rows, columns\]"),
        ({"weight": torch.tensor([1.0, -1.0])}, ValueError, r"weight that are 0 or more, got -1 at weight\[1\]"),
        ({"exposure": torch.tensor([1.0, 0.0])}, ValueError, "exposure that are positive, got 0"),
        ({"prior_loc": ones(N, Q), "prior_scale": 0.0}, ValueError, "prior_scale that are positive, got 0"),
        ({"prior_loc": torch.full((N, Q), torch.nan)}, ValueError, "prior_loc that are numbers, got nan"),
        ({"standard_error": torch.tensor([torch.inf])}, ValueError, "standard_error that are 0 or more, got inf"),
        ({"prior_loc": ones(N, Q), "prior_scale": ones(N, 1)}, ValueError, "expected prior_scale of the shape of prior_loc"),
        ({"weight": ones(N), "exposure": ones(2)}, ValueError, "expected arguments of the same rows"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, error, text):
    with pytest.raises(error, match=text):
        RowArguments(**arguments)


MODELS = {
    "gplvm": lambda **kwargs: BayesianGPLVM(N, D, Q, num_inducing=4, **kwargs),
    "random features": lambda **kwargs: RandomFeatureLVM(N, D, Q, num_frequencies=4, num_components=2, **kwargs),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_refuse_arguments_of_other_rows_outputs_or_dtypes(make):
    with pytest.raises(ValueError, match="expected arguments of 6 rows, those of the training data, got 5"):
        make(rows=RowArguments(weight=ones(5)))
    with pytest.raises(ValueError, match="expected arguments of 6 rows, those of the training data, got None"):
        make(rows=RowArguments())
    with pytest.raises(ValueError, match="expected prior_loc with 2 columns, those of the latent dimensions, got 3"):
        make(rows=RowArguments(prior_loc=ones(N, 3)))
    with pytest.raises(ValueError, match="expected exposure with 3 columns, those of the outputs, or one for all, got 2"):
        make(rows=RowArguments(exposure=ones(N, 2)), likelihood=Poisson())
    with pytest.raises(TypeError, match=r"expected weight of the model's dtype torch.float32, got torch.float64"):
        make(rows=RowArguments(weight=ones(N).double())).check(torch.randn(N, D))


def test_predictions_need_what_training_rows_have():
    rows = RowArguments(covariates=ones(N, 2), exposure=ones(N))
    model = BayesianGPLVM(N, D, Q, num_inducing=4, likelihood=Poisson(), rows=rows)
    guide = MeanFieldGuide(model)
    Y, X = torch.ones(N, D), torch.zeros(3, Q)
    guide(Y)
    for call in (
        lambda rows: model.predict(guide, X, rows=rows),
        lambda rows: model.predictive(guide, X, rows=rows),
        lambda rows: model.infer_latents(guide, Y[:3], rows=rows, num_steps=1),
        lambda rows: model.impute(guide, Y[:3], latents=X, rows=rows),
    ):
        with pytest.raises(ValueError, match=r"expected the covariates of these rows, since .*rows=RowArguments\(covariates="):
            call(None)
        with pytest.raises(ValueError, match="expected the exposure of these rows"):
            call(RowArguments(covariates=ones(3, 2)))
        with pytest.raises(ValueError, match="expected no standard_error, since the training rows have none"):
            call(RowArguments(covariates=ones(3, 2), exposure=ones(3), standard_error=ones(3)))
        with pytest.raises(ValueError, match="expected 2 columns of covariates, as of the training rows, got 1"):
            call(RowArguments(covariates=ones(3, 1), exposure=ones(3)))
        with pytest.raises(ValueError, match="expected arguments of 3 rows, or of one for all, got 2"):
            call(RowArguments(covariates=ones(2, 2), exposure=ones(2)))
        call(RowArguments(covariates=ones(1, 2), exposure=ones(1)))
    some = model.reconstruct(guide, Y[:2], torch.arange(2), rows=RowArguments(exposure=ones(1)), num_samples=2)
    assert some.mean.shape == (2, D)


def test_a_model_without_arguments_of_rows_refuses_them():
    model = BayesianGPLVM(N, D, Q, num_inducing=4)
    guide = MeanFieldGuide(model)
    guide(torch.randn(N, D))
    with pytest.raises(ValueError, match="expected no covariates, since the training rows have none"):
        model.predict(guide, torch.zeros(2, Q), rows=RowArguments(covariates=ones(2, 2)))
    assert model.rows is None
    assert model.predict(guide, torch.zeros(2, Q), rows=RowArguments(weight=ones(2)), num_samples=1).mean.shape == (2, D)


def test_arguments_move_with_the_model_and_are_copied():
    weight = ones(N)
    model = BayesianGPLVM(N, D, Q, kernel=Linear(Q), num_inducing=4, rows=RowArguments(weight=weight)).double()
    weight[0] = 5.0
    assert torch.equal(model.rows.weight, ones(N).double())
    assert model.state_dict()["row_weight"].dtype == torch.float64


class WithoutRows(LatentVariableModel):
    """A model of a user that takes no arguments by row."""

    def forward(self, y=None, idx=None):
        raise NotImplementedError

    def latent_candidates(self):
        return torch.zeros(1, self.latent_dim)


def test_models_of_users_need_not_take_arguments_of_rows():
    with pytest.raises(TypeError, match="expected no rows for a WithoutRows, which has no arguments by row"):
        WithoutRows(N, D, Q).predict(lambda *args: {}, torch.zeros(2, Q), rows=RowArguments(weight=ones(2)))
