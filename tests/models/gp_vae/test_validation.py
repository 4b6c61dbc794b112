"""Errors of GP-VAEs."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Binomial, Gaussian, Poisson
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet
from tests.models.gp_vae._models import B, D, N, make_exact, make_linear

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (torch.rand(N), torch.randn(N, D), ValueError, r"got \[6\] and \[6, 3\]; a single column needs \[:, None\]"),
        (torch.rand(N, 1), torch.randn(N), ValueError, r"got \[6, 1\] and \[6\]"),
        (torch.rand(N - 1, 1), torch.randn(N, D), ValueError, r"got \[5, 1\] and \[6, 3\]"),
        (torch.rand(B, N, 1), torch.randn(N, D), ValueError, r"got \[3, 6, 1\] and \[6, 3\]"),
        (torch.rand(B, N, 1), torch.randn(B + 1, N, D), ValueError, r"got \[3, 6, 1\] and \[4, 6, 3\]"),
        (
            torch.rand(N, 1).float(),
            torch.randn(N, D).double(),
            TypeError,
            "one floating-point dtype and device, got torch.float32",
        ),
        (
            torch.rand(N, 1).bfloat16(),
            torch.randn(N, D).bfloat16(),
            TypeError,
            r"torch.float32 or torch.float64, got torch.bfloat16; use .float\(\)",
        ),
        (torch.arange(N)[:, None], torch.ones(N, D).long(), TypeError, "one floating-point dtype and device, got torch.int64"),
        (torch.full((N, 1), torch.nan), torch.randn(N, D), ValueError, "expected finite inputs, .* pad series with any input"),
        (
            torch.rand(N, 1),
            torch.full((N, D), torch.inf),
            ValueError,
            "expected finite entries or NaN for missing ones, got inf",
        ),
        (torch.rand(N, 1), torch.full((N, D), torch.nan), ValueError, "expected an observed entry in every column of y"),
    ],
)
def test_data_that_do_not_fit(x, y, error, message, unchecked):
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D))
    with pytest.raises(error, match=message):
        model.check(x, y)


def test_no_rows_and_no_series_are_refused():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D))
    guide, x, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), torch.rand(N, 1), torch.randn(N, D)
    guide(x, y)
    for args in ((x, y, x[:0]), (x[:0], y[:0]), (x, y.expand(0, N, D))):
        with pytest.raises(ValueError, match=r"expected [xy] with one row or more, got none; skip empty batches"):
            model.predict(guide, *args)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_no_tensor_is_refused(sparse, unchecked):
    kernel, x, y = RBF(1, batch_shape=(2,)), torch.rand(N, 1), torch.randn(N, D)
    if sparse:
        model: GPVAE | SparseGPVAE = SparseGPVAE(kernel, MLP(2, D), inducing_points=x[:3])
        guide: Any = SparseStructuredGPGuide(model, encoders={"u": FactorNet(D, 2)})
    else:
        model = GPVAE(kernel, MLP(2, D))
        guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)})
    guide(x, y)
    for args in ((x.numpy(), y), (x, y.numpy()), (x.tolist(), y.tolist())):
        for use in (model, guide, model.check, partial(model.predict, guide), partial(model.forecast, guide, horizon=1)):
            with pytest.raises(TypeError, match=r"data to be tensors, got (ndarray|list); use pyro_lvgp.tables.as_tensor"):
                use(*args)
    with pytest.raises(TypeError, match=r"expected data to be tensors, got ndarray"):
        model.predict(guide, x, y, x.numpy())


@pytest.mark.parametrize(
    ("x_new", "error", "message"),
    [
        (torch.tensor([0.5]), ValueError, r"of 1 columns, got \[1\]; a single column needs \[:, None\]"),
        (torch.rand(3, 2), ValueError, r"of 1 columns, got \[3, 2\]"),
        (torch.full((3, 1), torch.nan).double(), ValueError, "expected finite inputs, got NaN"),
        (torch.rand(3, 1).float(), TypeError, "one floating-point dtype and device, got torch.float32 and torch.float64"),
        (torch.arange(3)[:, None], TypeError, "one floating-point dtype and device, got torch.int64"),
    ],
)
def test_new_inputs_that_do_not_fit(x_new, error, message, unchecked):
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D))
    guide, x, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), torch.rand(N, 1), torch.randn(N, D)
    with pytest.raises(error, match=message):
        model.predict(guide, x, y, x_new)
    with pytest.raises(ValueError, match=r"got \[5, 1\] and \[6, 3\]"):
        model.predict(guide, x[1:], y)


def test_data_that_fit():
    model, y = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D)), torch.randn(B, N, D)
    y[0], y[1, 2:], y[2, 3, 1] = torch.nan, torch.nan, torch.nan
    model.check(torch.rand(B, N, 1), y)
    model.check(torch.rand(N, 1), y)
    model.check(torch.rand(N, 1), y[1])


def test_data_with_other_outputs_than_the_decoder_s():
    model, x, y = make_linear(1)
    with pytest.raises(ValueError, match=f"expected data of {D} outputs, as many as the decoder has, got {D - 1}"):
        model(x, y[:, 1:])


def test_data_of_another_dtype():
    model, guide, x, y = make_exact(1)
    for use in (lambda: fit(model, guide, x.float(), y.float()), lambda: model.predict(guide, x.float(), y.float())):
        with pytest.raises(TypeError, match=r"expected data of the model's dtype torch.float64, got torch.float32; use .to"):
            use()


@pytest.mark.parametrize("outputs", [1, D])
def test_a_likelihood_of_another_number_of_outputs(outputs):
    model = GPVAE(RBF(1), nn.Linear(1, outputs), Gaussian(data_dim=D + 1))
    with pytest.raises(ValueError, match=f"expected a likelihood of {outputs} outputs, got one with {D + 1} parameters"):
        model(torch.rand(N, 1), torch.randn(N, outputs))


def test_counts_of_another_number_of_outputs():
    model = GPVAE(RBF(1), nn.Linear(1, D), Binomial(torch.full((D + 1,), 5)))
    with pytest.raises(ValueError, match=rf"one for each of {D} outputs, got \[{D + 1}\] of them"):
        model(torch.rand(N, 1), torch.ones(N, D))


def test_a_parameter_that_the_likelihood_does_not_have():
    class Pair(nn.Module):
        def forward(self, latents):
            return latents, latents.exp()

    with pytest.raises(ValueError, match="returns functions alone, as Poisson has no parameter, got a pair"):
        GPVAE(RBF(1), Pair(), Poisson())(torch.rand(N, 1), torch.ones(N, 1))


@pytest.mark.parametrize("num_series", [1, B + 1])
def test_new_inputs_of_other_series(num_series, unchecked):
    model, guide, x, y = make_exact(1, B)
    with pytest.raises(ValueError, match=rf"for the series of the data, \[{B}\], of 1 columns"):
        model.predict(guide, x, y, torch.rand(num_series, 2, 1))


def test_modules_that_have_run_elsewhere_are_refused():
    x, y = torch.linspace(0.0, 1.0, 8)[:, None], torch.randn(8, D)
    encoder, decoder = FactorNet(D, 1, [2]), MLP(1, D, [2])
    model = GPVAE(RBF(1), decoder)
    StructuredGPGuide(model, encoders={"f": encoder})(x, y)
    model(x)
    with pytest.raises(ValueError, match=r"got a .*FactorNet that has run elsewhere"):
        StructuredGPGuide(model, encoders={"f": encoder})
    with pytest.raises(ValueError, match=r"got a .*MLP that has run elsewhere"):
        GPVAE(RBF(1), decoder)
