import math

import pytest
import torch

from pyro_lvgp.kernels import Matern
from pyro_lvgp.models import _row_regression
from pyro_lvgp.models._row_regression import RowRegression, patterns


@pytest.fixture
def table(float64):
    angle = torch.linspace(0.0, 6.0, 30)[:, None]
    y = torch.cat([angle.cos(), angle.sin(), (2.0 * angle).sin(), 5.0 + angle.cos() * angle.sin()], 1)
    gapped = y + 0.05 * torch.randn(30, 4)
    truth = gapped.clone()
    gapped[10:14, 2:] = torch.nan
    gapped[20:23, 3] = torch.nan
    gapped[26] = torch.nan
    return angle, gapped, truth


def test_predictions_are_those_of_a_dense_gaussian_conditional(table, monkeypatch):
    x, y, _ = table
    kernels = []

    class Recorded(Matern):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            kernels.append(self)

    monkeypatch.setattr(_row_regression, "Matern", Recorded)
    monkeypatch.setattr(_row_regression, "_PRIOR_SCALE", 1e-5)  # parameters stay at their initial values
    model = RowRegression()
    model.fit(x, y)
    predicted = model.predict()
    centre, scale = y.nanmean(0), model.scale
    standard = (y - centre) / scale
    for rows, observed, output in (
        (torch.arange(10, 14), [0, 1], 2),
        (torch.arange(10, 14), [0, 1], 3),
        (torch.arange(20, 23), [0, 1, 2], 3),
    ):
        train = (~standard[:, [*observed, output]].isnan().any(1)).nonzero().squeeze(1)
        z = standard[:, observed] / math.sqrt(len(observed))
        together = torch.cat([train, rows])
        distance = math.sqrt(3.0) * torch.cdist(z[together], z[together])
        covariance = (1.0 + distance) * (-distance).exp() + z[together] @ z[together].mT
        covariance = covariance + (0.1 + 1e-6) * torch.eye(len(together))
        n = len(train)
        gain = torch.linalg.solve(covariance[:n, :n], covariance[:n, n:]).mT
        mean = gain @ standard[train, output]
        variance = (covariance[n:, n:] - gain @ covariance[:n, n:]).diagonal()
        torch.testing.assert_close(predicted.mean[rows, output], centre[output] + scale[output] * mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(predicted.variance[rows, output], scale[output] ** 2 * variance, rtol=1e-3, atol=1e-5)
    assert len(kernels) == 3  # output 3 is missing in more of the rows with outputs 0 and 1 than output 2


def test_learned_parameters_predict_better_than_initial_ones(table, monkeypatch):
    x, y, truth = table
    hidden = y.isnan()
    hidden[26] = False
    log_prob = []
    for scale in (2.0, 1e-5):
        monkeypatch.setattr(_row_regression, "_PRIOR_SCALE", scale)
        model = RowRegression()
        model.fit(x, y)
        log_prob.append(model.predict().log_prob(truth)[hidden].mean())
    assert log_prob[0] > log_prob[1] + 0.1


def test_rows_without_data_have_the_moments_of_the_outputs_and_observed_entries_their_values(table):
    x, y, _ = table
    model = RowRegression()
    model.fit(x, y)
    for predicted in (model.predict(), model.predict(x[:1] + 100.0, num_samples=3)):
        row = predicted.mean[26] if len(predicted.mean) > 1 else predicted.mean[0]
        torch.testing.assert_close(row, model.centre)
    torch.testing.assert_close(model.predict(x[:1]).variance[0], model.scale.square())
    observed = ~y.isnan()
    torch.testing.assert_close(model.predict().mean[observed], y[observed])


def test_patterns_are_those_of_rows_that_are_partly_observed(table):
    assert patterns(table[1]).tolist() == [[True, True, False, False], [True, True, True, False]]


def test_an_output_without_two_rows_to_learn_from_has_its_moments(float64):
    y = torch.tensor([[1.0, torch.nan], [2.0, torch.nan], [torch.nan, 3.0], [torch.nan, 5.0]])
    model = RowRegression()
    model.fit(torch.arange(4.0)[:, None], y)
    torch.testing.assert_close(model.predict().mean[:2, 1], torch.full((2,), 4.0))
