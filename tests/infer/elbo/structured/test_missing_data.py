"""Bounds of partly observed and padded series, and their gradients."""

import pyro
import pytest
import torch

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF, Linear, Stack
from pyro_lvgp.networks import FactorNet, IndexNet, PointNet, ZeroImputation
from tests.helpers.structured import B, D, N, Q, make, make_data, make_model, posterior_of
from tests.infer.elbo.structured._bounds import every_estimator, loss_and_slopes

pytestmark = pytest.mark.usefixtures("float64")


@every_estimator
def test_padding_changes_nothing(estimator, fixed_noise):
    """Series of different lengths, padded with rows of NaN, against each by itself."""
    model, guide, x, y = make(B)
    rows = [slice(0, N), slice(0, 3), slice(2, N), slice(3, 4)]
    padding = torch.ones(B, N, dtype=torch.bool)
    alone = 0.0
    for n, row in enumerate(rows):
        y[n, row] = torch.nan_to_num(y[n, row])
        padding[n, row] = False
        alone = alone + loss_and_slopes(StructuredELBO(**estimator), model, guide, x[n, row], y[n, row])
    x, y = x.masked_fill(padding[..., None], -7.0), y.masked_fill(padding[..., None], torch.nan)
    together = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
    torch.testing.assert_close(together, alone)


def make_encoders():
    return [ZeroImputation(D, Q, [4]), PointNet(D, Q, [4]), IndexNet(D, Q, [4]), FactorNet(D, Q, [4]), None]


@every_estimator
def test_slopes_are_finite_whatever_is_missing(estimator):
    x, y = (part.float() for part in make_data(B))
    y[1, 1:], y[2, :, 1:], y[3] = torch.nan, torch.nan, torch.nan
    for encoder in make_encoders():
        pyro.clear_param_store()
        model = make_model().float()
        guide = StructuredGPGuide(model, encoders={"f": encoder and encoder.float()})
        found = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
        assert found.isfinite().all()
        assert found[0] != 0.0
        y_nothing = torch.full_like(y, torch.nan)
        assert (loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y_nothing) == 0.0).all()
        q = posterior_of(guide, x, y_nothing)
        assert (q.mean == 0.0).all()
        assert torch.equal(q.variance, model.kernel.variance[:, None].expand(B, 1, Q, N))


@every_estimator
def test_slopes_are_finite_where_a_process_has_no_variance(estimator, dtype):
    """A linear kernel at 0."""
    model = make_model()
    model.kernel = Stack(Linear(1), RBF(1))
    guide = StructuredGPGuide(model.to(dtype), encoders={"f": FactorNet(D, Q, [4]).to(dtype)})
    x, y = torch.linspace(0.0, 1.0, N, dtype=dtype)[:, None], torch.randn(N, D, dtype=dtype)
    assert loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y).isfinite().all()
    assert posterior_of(guide, x, y).mean[0, 0] == 0.0
