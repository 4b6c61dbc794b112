"""Forecasts at the next times."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.kernels import Matern
from pyro_lvgp.models import GPVAE, Prediction
from pyro_lvgp.networks import FactorNet
from tests.models.gp_vae._models import D, N, make_exact, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


@one_and_several
def test_a_forecast_is_a_joint_prediction_at_the_next_times(series):
    model, guide, _, y = make_exact(1, *series)
    # Each series has steps of its own.
    x = torch.arange(N)[:, None] * torch.linspace(0.1, 0.2, *(series or (1,)))[:, None, None] - 3.0
    x = x if series else x[0]
    step = x[..., 1:2, :] - x[..., :1, :]
    ahead = x[..., -1:, :] + torch.tensor([1.0, 2.0, 3.0])[:, None] * step
    for options in ({}, {"joint": False}):
        draws = []
        for prediction in (
            lambda o=options: model.forecast(guide, x, y, 3, num_samples=5, **o),
            lambda o=options: model.predict(guide, x, y, ahead, num_samples=5, **({"joint": True} | o)),
        ):
            pyro.set_rng_seed(3)
            draws.append(prediction().parts[0].mean)
        assert draws[0].shape == (5, *series, 3, D)
        torch.testing.assert_close(*draws)


@pytest.mark.parametrize(
    "times",
    [[0.0, 1.0, 3.0], [0.0, 1e-9, 3e-9], [0.0], [2.0, 1.0, 0.0], [1.0, 1.0, 1.0]],
    ids=["uneven", "uneven and tiny", "one", "decreasing", "repeated"],
)
def test_forecasts_need_even_times(times):
    model, guide, _, y = make_exact(1)
    x = torch.tensor(times)[:, None]
    with pytest.raises(
        ValueError, match=rf"increasing in equal steps, got \[{len(x)}, 1\] with steps from .* give the inputs to"
    ):
        model.forecast(guide, x, y[: len(x)], 2)


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_forecasts_of_long_series_allow_for_rounding(start, monkeypatch):
    num_times = 50_000
    x = (start + torch.arange(num_times) / num_times)[:, None].float()
    model = GPVAE(Matern(1, 0.5, batch_shape=(1,)), nn.Linear(1, 1))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(1, 1)})
    monkeypatch.setattr(model, "predict", lambda guide, x, y, x_new, **_: Prediction((dist.Normal(x_new, 1.0),)))
    ahead = model.forecast(guide, x, torch.zeros_like(x), num_times).parts[0].mean
    # By the mean step: errors of a single one, rounded, would grow with the number of steps.
    assert ahead[-1].item() == pytest.approx(start + 2.0 - 1.0 / num_times, rel=4e-7)


def test_forecasts_need_times(unchecked):
    model, guide, _, y = make_exact(1)
    with pytest.raises(ValueError, match=r"two or more times of shape \[..., N, 1\], increasing in equal steps, got \[6, 2\]"):
        model.forecast(guide, torch.arange(N)[:, None].expand(N, 2).double(), y, 2)


@pytest.mark.parametrize("horizon", [0, -1])
def test_forecasts_look_ahead(horizon):
    model, guide, _, y = make_exact(1)
    with pytest.raises(ValueError, match=f"expected horizon of 1 or more, got {horizon}"):
        model.forecast(guide, torch.arange(float(N))[:, None], y, horizon)
