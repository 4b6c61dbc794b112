"""Errors of sparse GP-VAEs."""

import math

import pytest
import torch

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet, NeighbourNet, OffsetNet
from tests.helpers.sparse_processes import B, D, M, N, Q, data, encoded, kernel, make, told_to_points
from tests.models.sparse_gp_vae._forms import every_form

pytestmark = pytest.mark.usefixtures("float64")


def test_arguments_are_checked(unchecked):
    Z = torch.rand(M, 1)
    with pytest.raises(ValueError, match=r"expected inducing_points \[points, columns\].*needs \[:, None\]"):
        SparseGPVAE(kernel(), MLP(Q, D), Z.expand(1, 1, 1, M, 1))
    for wrong in (Z[:0], Z + torch.nan, torch.arange(M)[:, None]):
        with pytest.raises(ValueError, match=rf"one or more inducing points, finite.*got \[{len(wrong)}, 1\] of torch"):
            SparseGPVAE(kernel(), MLP(Q, D), wrong)
    for series in ((), (B,)):
        with pytest.raises(ValueError, match=rf"of the kernel's {Q} latent processes, got those of {Q + 1} in"):
            SparseGPVAE(kernel(), MLP(Q, D), Z.expand(*series, Q + 1, M, 1))
    with pytest.raises(ValueError, match="expected jitter of 0 or more, got -1"):
        SparseGPVAE(kernel(), MLP(Q, D), Z, jitter=-1.0)
    for name in ("feature_dim", "input_dim", "latent_dim", "num_nearest"):
        sizes = {"feature_dim": 2, "input_dim": 1, "latent_dim": 1, "num_nearest": 1, name: 0}
        with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
            OffsetNet(IndexNet(D, 2), **sizes)
        if sizes.pop("feature_dim"):
            with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
                NeighbourNet(IndexNet(D, 1), **sizes)
    for init_scale in (0.0, math.inf):
        with pytest.raises(ValueError, match=f"expected a positive and finite init_scale, got {init_scale}"):
            OffsetNet(IndexNet(D, 2), 2, input_dim=1, latent_dim=1, init_scale=init_scale)
    with pytest.raises(ValueError, match=r"expected given=\(<name of the sites given u>,\)"):
        SparseStructuredGPGuide(lambda x: x)


def test_encoders_of_sites_given_the_inducing_values_are_refused():
    model = SparseGPVAE(RBF(1), MLP(1, D), torch.rand(4, 1))
    with pytest.raises(ValueError, match=r"expected encoders of sites that have a posterior, got one of \['f'\]"):
        SparseStructuredGPGuide(model, encoders={"f": IndexNet(D, 1)})


@pytest.mark.parametrize("series", [(), (B,)])
def test_inducing_points_of_other_series_are_refused(series):
    _, guide = make(Z=torch.rand(B + 1, 1, M, 1))
    with pytest.raises(ValueError, match=rf"points of the {B if series else 1} series of the data, got those of {B + 1}"):
        guide(*data(*series))


@every_form
def test_no_rows_and_no_series_are_refused(form):
    model, guide = make(form)
    x, y = data()
    guide(x, y)
    for args in ((x, y, x[:0]), (x[:0], y[:0]), (x, y.expand(0, N, D))):
        with pytest.raises(ValueError, match=r"expected [xy] with one row or more, got none; skip empty batches"):
            model.predict(guide, *args)


@encoded
def test_encoder_of_the_wrong_number_of_processes_is_refused(form):
    net = told_to_points(form, IndexNet(D, Q + 1), Q + 1)
    guide = SparseStructuredGPGuide(SparseGPVAE(kernel(), MLP(Q, D), torch.rand(M, 1)), encoders={"u": net})
    with pytest.raises(ValueError, match=rf"expected sites of {Q} processes for 'u', got an encoding of {Q + 1}"):
        guide(*data())
