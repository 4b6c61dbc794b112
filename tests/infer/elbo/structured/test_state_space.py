"""State-space inference against dense matrices."""

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_lvgp.distributions import StateSpacePosterior
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.networks import FactorNet
from tests.helpers.structured import B, D, N, Q, make_data, make_model, posterior_of
from tests.infer.elbo.structured._bounds import every_estimator, loss_and_slopes

pytestmark = pytest.mark.usefixtures("float64")
METHODS = ("dense", "state-space")


@every_estimator
@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_both_methods_have_one_bound(estimator, series, fixed_noise):
    """Unsorted inputs, some of them repeated, and rows of NaN."""
    x, y = make_data(*series)
    x = x[..., torch.randperm(N), :]
    x[..., 3, :] = x[..., 2, :]
    found = []
    for method in METHODS:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = make_model()
        guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])}, method=method)
        found.append(loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y))
        assert isinstance(posterior_of(guide, x, y), StateSpacePosterior) == (method == "state-space")
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("independent_dim", [0, 1])
def test_both_methods_train_alike(independent_dim):
    (x, y), losses = make_data(B), []
    for method in METHODS:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = make_model(independent_dim=independent_dim)
        sites = {"f": FactorNet(D, Q, [2]), "w": FactorNet(D, 1, [2])}
        guide = StructuredGPGuide(model, encoders=sites if independent_dim else {"f": sites["f"]}, method=method)
        svi = SVI(model, guide, Adam({"lr": 0.02}), StructuredELBO(max_plate_nesting=2))
        losses.append(torch.tensor([svi.step(x, y) for _ in range(6)]))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)
    assert len(losses[0].unique()) == 6


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_both_methods_forecast_alike(series):
    """Means of many trajectories, and their changes from step to step, within 5 standard errors."""
    x, y = torch.linspace(0.0, 1.0, N)[:, None].expand(*series, N, 1), torch.randn(*series, N, D)
    moments = []
    for method in METHODS:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = make_model()
        guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])}, method=method)
        (rows,) = model.forecast(guide, x, y, 3, num_samples=4000).parts
        for draws in (rows.mean, rows.mean.diff(dim=-2).square()):
            moments.append((draws.mean(0), draws.var(0) / len(draws)))
        assert model.impute(guide, x, y).mean.shape == y.shape
    for (mean, error), (other_mean, other_error) in zip(moments[:2], moments[2:], strict=True):
        assert ((mean - other_mean).abs() < 5.0 * (error + other_error).sqrt()).all()
