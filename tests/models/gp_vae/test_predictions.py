"""Predictions and imputations, against those of the exact process."""

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, Prediction, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet
from tests.models.gp_vae._models import (
    DRAWS,
    NOISE,
    B,
    D,
    M,
    N,
    assert_predicts,
    exact,
    exact_sites,
    exact_variance,
    make_exact,
    make_linear,
    one_and_several,
    one_by_one,
)

pytestmark = pytest.mark.usefixtures("float64")


class ExactEncoder(nn.Module):
    """The same sites as an encoder, for data never seen."""

    def __init__(self, model):
        super().__init__()
        self.sites = lambda y: exact_sites(model, y)

    def forward(self, y):
        return self.sites(y)


@one_and_several
@pytest.mark.parametrize("inputs", ["data", "new", "shared"])
@pytest.mark.parametrize("joint", [False, True], ids=["marginal", "joint"])
def test_predictions_are_the_exact_process_s(series, inputs, joint):
    model, guide, x, y = make_exact(2, *series)
    x_new = {"data": None, "new": torch.rand(*series, M, 1), "shared": torch.rand(M, 1)}[inputs]
    found = model.predict(guide, x, y, x_new, num_samples=DRAWS, joint=joint)
    rows = slice(0, N) if x_new is None else slice(N, N + M)
    exactly = one_by_one(model, x, y, x_new)
    assert_predicts(found, model, exactly, rows)
    (part,) = found.parts
    functions = part.mean if series else part.mean[:, None]
    assert functions.shape == (DRAWS, B if series else 1, rows.stop - rows.start, D)
    for drawn, expected in zip(functions.unbind(1), exactly, strict=True):
        covariance = expected.function_covariance.unflatten(0, (D, -1)).unflatten(-1, (D, -1))[:, rows][..., rows]
        between = covariance[0, :, 0]  # of the first output, from point to point
        centred = drawn[..., 0] - expected.mean[rows, 0]
        sampled = centred.mT @ centred / DRAWS
        variance = between.diagonal()
        error = ((variance[:, None] * variance + between.square()) / DRAWS).sqrt()
        if not joint:
            between = torch.diag(variance)
        assert ((sampled - between).abs() < 4.5 * error).all()


@pytest.mark.parametrize("method", ["dense", "state-space", "inducing points"])
@pytest.mark.parametrize("inputs", ["data", "between", "beyond"])
def test_joint_predictions_of_sharp_sites_in_single_precision(method, inputs):
    """Trajectories vary by what double precision says, far less than rounding of the prior's covariance would move them."""
    num_points, kernel = 100, Matern(1, 2.5, lengthscale=5.0, batch_shape=(2,))
    x = torch.linspace(0.0, 10.0, num_points)[:, None]
    y = (x + torch.arange(D)).sin()
    if method == "inducing points":
        model = SparseGPVAE(kernel, nn.Linear(2, D), x[::3])
        guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2, init_scale=0.003)})
    else:
        model = GPVAE(kernel, nn.Linear(2, D))
        guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 2, init_scale=0.003)}, method=method)
    x_new = {"data": None, "between": torch.linspace(0.0, 10.0, 60)[:, None], "beyond": torch.linspace(8.0, 20.0, 60)[:, None]}

    def trajectories(dtype, **options):
        at = None if inputs == "data" else x_new[inputs].to(dtype)
        for module in (model, guide):
            module.to(dtype)
        return model.predict(guide, x.to(dtype), y.to(dtype), at, num_samples=2000, **options).parts[0].mean.double()

    expected, found = trajectories(torch.float64), trajectories(torch.float32, joint=True)
    spread = expected.std(0)
    assert ((found.std(0) / spread - 1.0).abs() < 0.1).all()
    assert ((found.mean(0) - expected.mean(0)).abs() < 0.2 * spread).all()


def test_predictions_for_series_and_inputs_never_seen():
    """An encoder serves them; inputs may be shared by all series."""
    model, x, y = make_linear(1, B)
    guide = StructuredGPGuide(model, encoders={"f": ExactEncoder(model)})
    guide(torch.rand(4, 1), torch.randn(2, 4, D))
    x_new = torch.rand(M, 1)
    for inputs in (x, x[0]):
        found = model.predict(guide, inputs, y, x_new, num_samples=DRAWS)
        exactly = [exact(model, *row, x_new) for row in zip(inputs.expand(B, N, 1), y, strict=True)]
        assert_predicts(found, model, exactly, slice(N, N + M))


def test_imputation_fills_holes_and_leaves_data_alone():
    for series in ((), (B,)):
        pyro.clear_param_store()
        model, guide, x, y = make_exact(1, *series)
        missing = torch.isnan(y)
        filled = model.impute(guide, x, y, num_samples=DRAWS)
        mean, variance = filled.mean, filled.variance
        assert torch.equal(mean[~missing], y[~missing])
        assert (variance[~missing] == 0.0).all()
        exactly = one_by_one(model, x, y)
        expected = torch.stack([found.mean for found in exactly]).reshape(y.shape)
        expected_variance = torch.stack([exact_variance(model, found) for found in exactly]).reshape(y.shape)
        error = ((expected_variance - NOISE) / DRAWS).sqrt()
        assert ((mean - expected).abs() < 4.5 * error)[missing].all()
        assert ((variance - expected_variance).abs() < 4.5 * error * ((expected_variance - NOISE) * 2.0).sqrt())[missing].all()


def test_predictions_draw_what_has_a_prior():
    """Once for each draw of the latents: the noise of the mixture's parts differs."""
    model, x, y = make_linear(1, B)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(1, 1), 1.0).to_event(2))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1, [2])}, init_scale=0.5, num_eval_site_updates=2)
    guide(x, y)
    guide.mean_field.locs.likelihood.variance = torch.tensor(0.7)
    for at, rows, num in ((None, N, 3), (torch.rand(M, 1), M, 80)):
        found = model.predict(guide, x, y, at, num_samples=num)
        assert len(found.parts) == num
        assert found.sample().shape == (num, B, rows, D)
        log_variance = torch.stack([part.variance.log().reshape(-1) for part in found.parts])
        assert (log_variance == log_variance[:, :1]).all()
    assert log_variance[:, 0].mean() == pytest.approx(0.7, abs=4.5 * 0.5 / num**0.5)
    assert log_variance[:, 0].std() == pytest.approx(0.5, abs=4.5 * 0.5 / (2 * num) ** 0.5)


def test_seeds_and_dtypes(dtype):
    model, x, y = make_linear(2, B)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2).to(dtype)})
    guide(x, y)
    found = []
    for seed in (1, 1, 2):
        pyro.set_rng_seed(seed)
        prediction = model.predict(guide, x, y, torch.rand(M, 1, dtype=dtype), num_samples=4)
        found.append(torch.cat([prediction.sample(), prediction.mean[None], prediction.log_prob(y[:, :M])[None]]))
        assert found[-1].dtype == dtype
        assert not found[-1].requires_grad
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=0.0, equal_nan=True)
    assert not torch.allclose(found[0][:5], found[2][:5])


def test_predictions_run_in_evaluation_mode():
    """Of decoders and of encoders, dropout is off; afterwards it is on again."""
    decoder, encoder = (nn.Sequential(nn.Dropout(0.5), net) for net in (MLP(2, D), FactorNet(D, 2)))
    model = GPVAE(RBF(1, batch_shape=(2,)), decoder)
    guide, x, y = StructuredGPGuide(model, encoders={"f": encoder}), torch.rand(N, 1), torch.randn(N, D)
    guide(x, y)

    def predictions():
        with seeded(0):
            return model.predict(guide, x, y).mean, model.predict(guide, x, y, x[:2] + 0.1, joint=True).mean

    in_training = predictions()
    assert decoder.training
    assert encoder[0].training
    model.eval()
    guide.eval()
    torch.testing.assert_close(in_training, predictions())


def test_guides_that_keep_no_process_do_not_predict():
    model, _, x, y = make_exact(1)
    guide = MeanFieldGuide(model)
    guide(x, y)
    with pytest.raises(TypeError, match=r"expected a guide with a process at the site f, got Normal, .*; use Struc"):
        model.predict(guide, x, y, torch.rand(2, 1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (7, 3), (5, 7, 1)])
def test_densities_are_asked_of_the_entries_predicted(shape):
    mixture = Prediction((dist.Normal(torch.zeros(5, 7, 1), 1.0),))
    assert mixture.log_prob(torch.zeros(7, 1)).shape == (7, 1)
    with pytest.raises(ValueError, match=rf"expected y of shape \[7, 1\], .* got {re.escape(str(list(shape)))}; expand"):
        mixture.log_prob(torch.zeros(shape))


@pytest.mark.parametrize("name", ["likelihood.variance", "decoder.weight"])
def test_prediction_wants_the_guide_to_know_all_that_has_a_prior(name):
    """What a guide of a conditioned model does not know would be drawn from its prior."""
    x, y = torch.linspace(0.0, 1.0, 8)[:, None], torch.randn(8, D)
    model = GPVAE(RBF(1), nn.Linear(1, D), Gaussian(0.01))
    part, attribute = name.split(".")
    owner = getattr(model, part)
    value = getattr(owner, attribute).detach().abs()
    setattr(owner, attribute, PyroSample(dist.LogNormal(0.0, 2.0).expand(value.shape).to_event(value.dim())))
    guide = StructuredGPGuide(poutine.condition(model, {name: value}), encoders={"f": FactorNet(D, 1, [2])})
    guide(x, y)
    with pytest.raises(ValueError, match=rf"got one without \['{name}'\].*make known quantities frozen parameters"):
        model.predict(guide, x, y)
