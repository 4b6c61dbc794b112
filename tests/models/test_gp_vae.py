"""GP-VAEs: with linear decoders against the multi-output Gaussian processes that they are; their shapes, priors and errors."""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO, fit
from pyro_lvgp.kernels import RBF, Matern, Stack
from pyro_lvgp.likelihoods import Binomial, Gaussian, LogNormal, Poisson
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.models.mixture import MixturePrediction
from pyro_lvgp.networks import MLP, FactorNet, IndexNet
from pyro_lvgp.ops import gaussian_sites

N, M, D, B = 6, 3, 3, 3
NOISE = 0.3
LOADINGS = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)  # orthogonal columns
DRAWS = 20_000


pytestmark = pytest.mark.usefixtures("float64")


class Exact(NamedTuple):
    """A multi-output Gaussian process given the data of one series, at their inputs and then at new ones."""

    log_evidence: Tensor
    f_mean: Tensor  # [Q N]
    f_covariance: Tensor  # [Q N, Q N]
    mean: Tensor  # of outputs, [N, D]
    function_covariance: Tensor  # [D N, D N]


def exact(model, x, y, x_new=None):
    """The Gaussian process y_nd = Σ_q w_dq f_q(x_n) + b_d + noise, whose kernel is Σ_q w_q w_qᵀ ⊗ k_q."""
    x_all = x if x_new is None else torch.cat([x, x_new])
    K = torch.block_diag(*model.kernel(x_all))
    A = torch.kron(model.decoder.weight, torch.eye(len(x_all)))  # [D N, Q N]
    bias = model.decoder.bias.repeat_interleave(len(x_all))
    values = torch.full((D, len(x_all)), torch.nan)
    values[:, : len(x)] = y.mT
    values = values.flatten()
    seen = ~torch.isnan(values)
    total = A[seen] @ K @ A[seen].mT + model.likelihood.variance * torch.eye(int(seen.sum()))
    gain = K @ A[seen].mT @ torch.linalg.inv(total)
    f_mean, f_covariance = gain @ (values - bias)[seen], K - gain @ A[seen] @ K
    return Exact(
        MultivariateNormal(bias[seen], total).log_prob(values[seen]),
        f_mean,
        f_covariance,
        (A @ f_mean + bias).unflatten(0, (D, -1)).mT,
        A @ f_covariance @ A.mT,
    )


def exact_variance(model, found):
    """Of outputs [N, D], noise included."""
    return found.function_covariance.diagonal().unflatten(0, (D, -1)).mT + model.likelihood.variance


def make_linear(num_latents, *series, **options):
    """One latent and holes in the data, or two with orthogonal loadings and whole rows only: the likelihood factorises."""
    variance, lengthscale = torch.tensor([1.2, 0.8])[:num_latents], torch.tensor([[0.3], [0.6]])[:num_latents]
    kernel = Matern(1, variance=variance, lengthscale=lengthscale, batch_shape=(num_latents,))
    model = GPVAE(kernel, nn.Linear(num_latents, D), Gaussian(NOISE), **options)
    model.decoder.weight, model.decoder.bias = LOADINGS[:, :num_latents].clone(), torch.tensor([0.5, 0.0, -0.5])
    x = torch.rand(*series, N, 1).sort(-2).values
    y = model(x).detach()
    y[..., 1, :] = torch.nan
    if num_latents == 1:
        y[..., 0, 1:] = torch.nan
        y[..., 3, 0] = torch.nan
    return model, x, y


def exact_sites(model, y):
    """Location and scale [*, N, Q] of the likelihood as a function of each latent."""
    W, seen = model.decoder.weight, (~torch.isnan(y)).to(y)
    norm = seen @ W.square()
    told = norm > 0.0
    loc = torch.where(told, ((y - model.decoder.bias).nan_to_num() * seen) @ W / norm, 0.0)
    return loc, torch.where(told, (model.likelihood.variance / norm).sqrt(), 1.0)


def make_exact(num_latents, *series):
    """With a guide whose own sites are the likelihood's."""
    model, x, y = make_linear(num_latents, *series)
    guide = StructuredGPGuide(model)
    guide(x, y)
    loc, scale = (part.mT.detach().reshape(guide.locs.f.shape) for part in exact_sites(model, y))
    guide.locs.f, guide.scales.f = loc, scale
    return model, guide, x, y


class ExactEncoder(nn.Module):
    """The same sites as an encoder, for data never seen."""

    def __init__(self, model):
        super().__init__()
        self.sites = lambda y: exact_sites(model, y)

    def forward(self, y):
        return self.sites(y)


def one_by_one(model, x, y, x_new=None):
    if y.dim() == 2:
        return [exact(model, x, y, x_new)]
    new = [None] * B if x_new is None else x_new if x_new.dim() == 3 else [x_new] * B
    return [exact(model, *row) for row in zip(x, y, new, strict=True)]


every_linear = pytest.mark.parametrize("num_latents", [1, 2], ids=["one latent", "two latents"])
one_and_several = pytest.mark.parametrize("series", [(), (B,)], ids=["one series", "several"])


# ---- exact sites


@every_linear
@one_and_several
def test_exact_sites_give_the_exact_evidence(num_latents, series):
    """The doubly stochastic value and joint draws have no noise left; the semi-analytic value has."""
    model, guide, x, y = make_exact(num_latents, *series)
    evidence = sum(found.log_evidence for found in one_by_one(model, x, y)).item()
    for bound in (*(StructuredELBO(value="doubly-stochastic", gradient_estimator=g) for g in ("path", "score")), Trace_ELBO()):
        for _ in range(2):
            assert bound.loss(model, guide, x, y) == pytest.approx(-evidence, rel=1e-9)
    elbo = StructuredELBO(num_particles=500, max_plate_nesting=2)
    losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(20)])
    error = losses.std() / 20**0.5
    assert 0.0 < error < 0.1
    assert abs(losses.mean() + evidence) < 4.5 * error


@every_linear
@one_and_several
def test_exact_sites_give_the_exact_posterior(num_latents, series):
    model, guide, x, y = make_exact(num_latents, *series)
    x_new = torch.rand(*series, M, 1)
    q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
    new = q.at(x_new[:, None, None] if series else x_new[None], joint=True)
    K = q.prior.covariance_matrix
    covariance = gaussian_sites.predictive_covariance(q.posterior, K, K)
    lay_out = (lambda part: part.squeeze(1)) if series else (lambda part: part[None])
    moments = [lay_out(part) for part in (q.mean, covariance, new.mean, new.covariance_matrix)]
    for mean, covariance, new_mean, new_covariance, found in zip(*moments, one_by_one(model, x, y, x_new), strict=True):
        f_mean = found.f_mean.unflatten(0, (num_latents, -1))
        torch.testing.assert_close(mean, f_mean[:, :N])
        torch.testing.assert_close(new_mean, f_mean[:, N:])
        blocks = found.f_covariance.unflatten(0, (num_latents, -1)).unflatten(-1, (num_latents, -1))
        for k in range(num_latents):
            torch.testing.assert_close(covariance[k], blocks[k, :N, k, :N])
            torch.testing.assert_close(new_covariance[k], blocks[k, N:, k, N:], rtol=1e-6, atol=1e-6)


@every_linear
def test_exact_sites_give_the_slopes_of_the_exact_evidence(num_latents):
    """Those of sites vanish, those of the kernel have no noise, and those of the decoder have the right mean."""
    model, guide, x, y = make_exact(num_latents)
    evidence = exact(model, x, y).log_evidence
    own = [guide.locs.f_unconstrained, guide.scales.f_unconstrained]
    kernel, others = list(model.kernel.parameters()), [*model.decoder.parameters(), *model.likelihood.parameters()]
    expected = torch.autograd.grad(evidence, kernel + others)
    elbo = StructuredELBO(value="doubly-stochastic", num_particles=200, max_plate_nesting=1)
    runs = []
    for _ in range(20):
        loss = elbo.differentiable_loss(model, guide, x, y)
        slopes = torch.autograd.grad(-loss, own + kernel + others)
        for slope in slopes[:2]:
            torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-9)
        for slope, exactly in zip(slopes[2:4], expected[:2], strict=True):
            torch.testing.assert_close(slope, exactly)
        runs.append(torch.cat([slope.flatten() for slope in slopes[4:]]))
    runs, rest = torch.stack(runs), torch.cat([slope.flatten() for slope in expected[2:]])
    error = runs.std(0) / 20**0.5
    assert error.norm() < 0.1 * rest.norm()
    assert ((runs.mean(0) - rest).abs() < 4.5 * error).all()


@every_linear
def test_other_sites_give_less_by_the_divergence(num_latents):
    """The bound is the evidence less KL(q ‖ p(f | y))."""
    model, guide, x, y = make_exact(num_latents)
    found = exact(model, x, y)
    elbo = StructuredELBO(num_particles=1000, max_plate_nesting=1)
    for _ in range(4):
        guide.locs.f, guide.scales.f = torch.randn(num_latents, N), 0.2 + torch.rand(num_latents, N)
        q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
        K = q.prior.covariance_matrix
        covariance = torch.block_diag(*gaussian_sites.predictive_covariance(q.posterior, K, K))
        divergence = torch.distributions.kl_divergence(
            MultivariateNormal(q.mean.flatten(), covariance), MultivariateNormal(found.f_mean, found.f_covariance)
        )
        losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(16)])
        error = losses.std() / 4.0
        assert error < 0.05 * divergence
        assert abs(found.log_evidence - divergence + losses.mean()) < 6.0 * error


def test_svi_finds_the_exact_sites():
    """Sites of their own, with the model held fixed; the noise goes as they come near."""
    model, x, y = make_linear(1)
    guide, loss = StructuredGPGuide(model), StructuredELBO(value="doubly-stochastic", max_plate_nesting=1)
    optim = Adam(lambda name: {"lr": 0.2 if name.startswith("StructuredGPGuide") else 0.0})
    svi = SVI(model, guide, optim, loss)
    losses = [svi.step(x, y) for _ in range(150)]
    found = exact(model, x, y)
    assert losses[0] > 1.0 - found.log_evidence
    q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
    spread = found.f_covariance.diagonal().sqrt()
    assert ((q.mean[0] - found.f_mean).abs() < 0.1 * spread).all()
    torch.testing.assert_close(q.variance[0].sqrt(), spread, rtol=0.05, atol=0.0)
    bound = -StructuredELBO(value="doubly-stochastic", num_particles=1000).loss(model, guide, x, y)
    assert found.log_evidence - 0.05 < bound < found.log_evidence + 0.02


def make_with_white(*series):
    """One smooth latent and one that is independent from point to point, with orthogonal loadings and exact sites."""
    smooth, x, y = make_linear(1, *series)
    pyro.clear_param_store()  # of the decoder that is replaced
    y = torch.where(torch.isnan(y).all(-1, keepdim=True), torch.nan, torch.randn(y.shape))
    model = GPVAE(smooth.kernel, nn.Linear(2, D), Gaussian(NOISE), independent_dim=1)
    model.decoder.weight, model.decoder.bias = LOADINGS.clone(), torch.tensor([0.5, 0.0, -0.5])

    class Column(nn.Module):
        def __init__(self, column):
            super().__init__()
            self.column = column

        def forward(self, y):
            return tuple(part[..., self.column, None] for part in exact_sites(model, y))

    guide = StructuredGPGuide(model, encoders={"f": Column(0), "w": Column(1)})
    guide(x, y)
    return model, guide, x, y


class _Both(NamedTuple):
    """The same model with the white latent as a process."""

    kernel: object
    decoder: nn.Module
    likelihood: Gaussian


def as_two_processes(model):
    def kernel(x):
        return torch.cat([model.kernel(x), torch.eye(len(x))[None]])

    return _Both(kernel, model.decoder, model.likelihood)


@one_and_several
def test_latents_independent_from_point_to_point(series):
    """``w`` is a process with a white kernel: evidence, posterior, and predictions at new inputs and at the data."""
    model, guide, x, y = make_with_white(*series)
    x_new = torch.rand(*series, M, 1)
    exactly = one_by_one(as_two_processes(model), x, y, x_new)
    evidence = sum(found.log_evidence for found in exactly)
    elbo = StructuredELBO(num_particles=500, max_plate_nesting=2)
    losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(16)])
    error = losses.std() / 4.0
    assert error < 0.1
    assert abs(losses.mean() + evidence) < 6.0 * error
    w = poutine.trace(guide).get_trace(x, y).nodes["w"]["fn"].base_dist
    for mean, variance, found in zip(
        *((part if series else part[None]) for part in (w.mean, w.variance)), exactly, strict=True
    ):
        torch.testing.assert_close(mean[:, 0], found.f_mean[N + M :][:N])
        torch.testing.assert_close(variance[:, 0], found.f_covariance.diagonal()[N + M :][:N])
    for at, rows in ((None, slice(0, N)), (x_new, slice(N, N + M))):
        assert_predicts(model.predict(guide, x, y, at, num_samples=DRAWS), model, exactly, rows)


# ---- predictions


def assert_predicts(found, model, exactly, rows):
    """Means and variances of outputs, within 4.5 standard errors."""
    lay_out = (lambda part: part) if found.mean.dim() == 3 else (lambda part: part[None])
    for mean, variance, expected in zip(lay_out(found.mean), lay_out(found.variance), exactly, strict=True):
        expected_variance = exact_variance(model, expected)[rows]
        of_function = expected_variance - model.likelihood.variance
        assert mean.shape == expected.mean[rows].shape
        assert ((mean - expected.mean[rows]).abs() < 4.5 * (of_function / DRAWS).sqrt()).all()
        assert ((variance - expected_variance).abs() < 4.5 * of_function * (2.0 / DRAWS) ** 0.5).all()


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
        mean, variance = model.impute(guide, x, y, num_samples=DRAWS)
        assert torch.equal(mean[~missing], y[~missing])
        assert (variance[~missing] == 0.0).all()
        exactly = one_by_one(model, x, y)
        expected = torch.stack([found.mean for found in exactly]).reshape(y.shape)
        expected_variance = torch.stack([exact_variance(model, found) for found in exactly]).reshape(y.shape)
        error = ((expected_variance - NOISE) / DRAWS).sqrt()
        assert ((mean - expected).abs() < 4.5 * error)[missing].all()
        assert ((variance - expected_variance).abs() < 4.5 * error * ((expected_variance - NOISE) * 2.0).sqrt())[missing].all()


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
    monkeypatch.setattr(model, "predict", lambda guide, x, y, x_new, **_: MixturePrediction((dist.Normal(x_new, 1.0),)))
    ahead = model.forecast(guide, x, torch.zeros_like(x), num_times).parts[0].mean
    # By the mean step: errors of a single one, rounded, would grow with the number of steps.
    assert ahead[-1].item() == pytest.approx(start + 2.0 - 1.0 / num_times, rel=4e-7)


def test_forecasts_need_times(unchecked):
    model, guide, _, y = make_exact(1)
    with pytest.raises(ValueError, match=r"two or more times of shape \[..., N, 1\], increasing in equal steps, got \[6, 2\]"):
        model.forecast(guide, torch.arange(N)[:, None].expand(N, 2).double(), y, 2)


def test_predictions_draw_what_has_a_prior():
    """Once for each draw of the latents: the noise of the mixture's parts differs."""
    model, x, y = make_linear(1, B)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(1, 1), 1.0).to_event(2))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1, [2])}, init_scale=0.5)
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


class WithVariance(nn.Module):
    """A decoder that gives the variance of each entry too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2 * D)

    def forward(self, latents):
        function, log_variance = self.net(latents).chunk(2, -1)
        return function, log_variance.exp()


@one_and_several
def test_a_decoder_of_means_and_variances(series):
    kernel = RBF(1, batch_shape=(2,))
    model, x = GPVAE(kernel, WithVariance()), torch.rand(*series, N, 1)
    y = torch.randn(*series, N, D)
    y[..., 2, :2] = torch.nan
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2, [3])})
    trace = poutine.trace(poutine.replay(model, poutine.trace(guide).get_trace(x, y))).get_trace(x, y)
    trace.compute_log_prob()
    f = trace.nodes["f"]["value"]
    function, variance = model.decoder((f.squeeze(1) if series else f).mT)
    expected = torch.where(torch.isnan(y), 0.0, dist.Normal(function, variance.sqrt()).log_prob(y.nan_to_num())).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected)
    (part,) = model.predict(guide, x, y, num_samples=7).parts
    assert part.variance.shape == (7, *series, N, D)
    assert part.variance.std() > 0.0
    with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
        model.predict(guide, x, y, num_samples=0)


def test_a_decoder_may_return_a_list():
    class Lists(WithVariance):
        def forward(self, latents):
            return list(super().forward(latents))

    decoder, x = Lists(), torch.rand(N, 1)
    pyro.set_rng_seed(0)
    y = poutine.trace(GPVAE(RBF(1, batch_shape=(2,)), decoder)).get_trace(x).nodes["y"]["fn"]
    assert y.base_dist.variance.std() > 0.0


def test_counts():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D, [4]), Poisson())
    x, y = torch.rand(B, N, 1), torch.poisson(torch.full((B, N, D), 2.0))
    y[0, 1] = torch.nan
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2, [4])})
    fit(model, guide, x, y, loss=StructuredELBO(), num_steps=2, progress=False)
    found = model.predict(guide, x, y, torch.rand(M, 1), num_samples=50)
    torch.testing.assert_close(found.variance, found.mean + found.parts[0].mean.var(0, correction=0))
    assert (found.sample() % 1.0 == 0.0).all()
    with pytest.raises(ValueError, match=r"Poisson likelihood: expected counts 0, 1, …, got -1"):
        fit(model, guide, x, y - 1.0 - y.nan_to_num(), num_steps=1, progress=False)


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


# ---- mixtures


def test_mixtures_by_hand():
    means, variances = torch.randn(5, N, D), 0.1 + torch.rand(5, N, D)
    parts = tuple(dist.Normal(m, v.sqrt()) for m, v in zip(means.split([2, 3]), variances.split([2, 3]), strict=True))
    mixture, y = MixturePrediction(parts), torch.randn(N, D)
    y[0, 1] = torch.nan
    log_prob = mixture.log_prob(y)
    for n in range(N):
        for d in range(D):
            mean = sum(means[s, n, d] for s in range(5)) / 5
            square = sum(means[s, n, d] ** 2 + variances[s, n, d] for s in range(5)) / 5
            torch.testing.assert_close(mixture.mean[n, d], mean)
            torch.testing.assert_close(mixture.variance[n, d], square - mean**2)
            torch.testing.assert_close(mixture.stddev[n, d], (square - mean**2).sqrt())
            terms = [
                -((y[n, d] - means[s, n, d]) ** 2) / (2 * variances[s, n, d])
                - 0.5 * math.log(2 * math.pi * variances[s, n, d])
                for s in range(5)
            ]
            if (n, d) == (0, 1):
                assert log_prob[n, d].isnan()
            else:
                torch.testing.assert_close(log_prob[n, d], torch.logsumexp(torch.stack(terms), 0) - math.log(5.0))


def test_pooled_mixtures_weigh_their_parts_equally():
    one, other = (MixturePrediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 2.0))
    both, y = MixturePrediction.pool(iter([one, other])), torch.randn(N, D)
    torch.testing.assert_close(both.mean, 0.5 * (one.mean + other.mean))
    torch.testing.assert_close(both.log_prob(y), torch.logaddexp(one.log_prob(y), other.log_prob(y)) - math.log(2.0))
    fewer_draws = MixturePrediction((dist.Normal(torch.randn(3, N, D), 1.0),))
    with pytest.raises(ValueError, match=r"expected predictions of one shape .*, got \[\(3,"):
        MixturePrediction.pool([one, fewer_draws])
    with pytest.raises(ValueError, match="expected predictions of one shape"):
        MixturePrediction.pool([])


def test_pooled_mixtures_weigh_as_told():
    parts = [MixturePrediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 1.0, 2.0)]
    pair = MixturePrediction.pool(parts[:2], [3.0, 1.0])
    for found, weights in [
        (pair, [0.75, 0.25, 0.0]),
        (MixturePrediction.pool([*parts[:2], parts[2]], [3.0, 1.0, 0.0]), [0.75, 0.25, 0.0]),
        (MixturePrediction.pool([pair, MixturePrediction.pool([parts[2]] * 2)]), [0.375, 0.125, 0.5]),
        (MixturePrediction.pool([pair, MixturePrediction.pool([parts[2]] * 2)], [0.2, 0.8]), [0.15, 0.05, 0.8]),
    ]:
        y, shares = torch.randn(N, D), torch.tensor(weights)[:, None, None]
        means, variances = (torch.stack([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        mean = (shares * means).sum(0)
        torch.testing.assert_close(found.mean, mean)
        torch.testing.assert_close(found.variance, (shares * (variances + means.square())).sum(0) - mean.square())
        densities = torch.stack([part.log_prob(y) for part in parts]).exp()
        torch.testing.assert_close(found.log_prob(y), (shares * densities).sum(0).log())


def test_draws_of_weighted_mixtures_are_as_many_as_they_weigh():
    far_apart = [MixturePrediction((dist.Normal(torch.full((5000, 1, 1), loc), 0.1),)) for loc in (-10.0, 10.0)]
    found = MixturePrediction.pool(far_apart, [0.3, 0.7])
    share = (found.sample() > 0.0).double().mean().item()
    assert share == pytest.approx(0.7, abs=4.0 * (0.3 * 0.7 / 10_000) ** 0.5)
    assert found.quantile(0.2).item() == pytest.approx(-10.0, abs=1.0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.1], [0.0, 0.0], [1.0, math.nan]])
def test_weights_that_do_not_fit_are_refused(weights):
    part = MixturePrediction((dist.Normal(torch.randn(4, N, D), 1.0),))
    with pytest.raises(ValueError, match="expected 2 weights from zero up"):
        MixturePrediction.pool([part, part], weights)


@pytest.mark.usefixtures("unchecked")
def test_weights_go_by_their_order():
    parts = [MixturePrediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 2.0)]
    weights = {"one": 3.0, "other": 1.0}
    expected = MixturePrediction.pool(parts, [3.0, 1.0]).mean
    for given in (weights.values(), torch.tensor([3.0, 1.0])):
        torch.testing.assert_close(MixturePrediction.pool(parts, given).mean, expected)
    with pytest.raises(TypeError, match=r"by the names \['one', 'other'\]; pass weights.values\(\)"):
        MixturePrediction.pool(parts, weights)


def test_mixtures_far_from_the_data_do_not_underflow():
    mixture = MixturePrediction((dist.Normal(torch.tensor([[[0.0]], [[1.0]]]), 0.01),))
    expected = dist.Normal(1.0, 0.01).log_prob(torch.tensor(3.0)) - math.log(2.0)
    torch.testing.assert_close(mixture.log_prob(torch.tensor([[3.0]])).squeeze(), expected)


def test_several_quantiles_come_from_the_same_draws():
    mixture = MixturePrediction((dist.Normal(torch.zeros(50, 3, 2), 1.0),))
    low, high = mixture.quantile([0.5, 0.52])
    assert low.shape == (3, 2)
    assert (low < high).all()


def test_quantiles_of_mixtures():
    """Half the draws are far below and half far above: a quarter is the lower half's median."""
    means = torch.tensor([-10.0, 10.0]).repeat(5000).reshape(-1, 1, 1)
    mixture = MixturePrediction((dist.Normal(means, 1.0),))
    error = (math.pi / 2.0 / 5000) ** 0.5  # of a median
    assert mixture.quantile(0.25).item() == pytest.approx(-10.0, abs=5.0 * error)
    assert mixture.quantile(0.75).item() == pytest.approx(10.0, abs=5.0 * error)


# ---- the model


@pytest.mark.parametrize("white", [0, 2])
@pytest.mark.parametrize(("x_shape", "series"), [((), ()), ((B,), (B,)), ((), (B,))], ids=["one", "several", "shared inputs"])
def test_sites_and_density(x_shape, series, white):
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2 + white, D, [4]), Gaussian(0.4), independent_dim=white)
    x, y = torch.linspace(0.0, 1.0, N)[:, None].expand(*x_shape, N, 1), torch.randn(*series, N, D)
    y[..., 1, :], y[..., 2, 0] = torch.nan, torch.nan
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    f = trace.nodes["f"]["value"]
    assert f.shape == ((B, 1, 2, N) if series else (2, N))
    latents = (f.squeeze(1) if series else f).mT
    expected = MultivariateNormal(torch.zeros(N), model.kernel(x[0] if x_shape else x) + 1e-8 * torch.eye(N)).log_prob(f).sum()
    if white:
        w = trace.nodes["w"]["value"]
        assert w.shape == (*series, N, white)
        expected = expected + dist.Normal(0.0, 1.0).log_prob(w).sum()
        latents = torch.cat([latents, w], -1)
    log_prob = dist.Normal(model.decoder(latents), 0.4**0.5).log_prob(y.nan_to_num())
    torch.testing.assert_close(trace.log_prob_sum(), expected + log_prob[~torch.isnan(y)].sum(), rtol=1e-6, atol=1e-6)
    plates = {name: {frame.name for frame in trace.nodes[name]["cond_indep_stack"]} for name in ("f", "y", *["w"][:white])}
    outer = {"series"} if series else set()
    assert plates.pop("f") == outer
    assert all(names == outer | {"points"} for names in plates.values())


@one_and_several
def test_data_from_the_prior(series):
    """Means of zero and the covariance of the multi-output process."""
    model, x, _ = make_linear(2, *series)
    model.decoder.bias = torch.zeros(D)
    draws = Predictive(model, num_samples=4000, parallel=True)(x)["y"].reshape(4000, *series, N, D)
    A = torch.kron(model.decoder.weight, torch.eye(N))
    for drawn, inputs in zip(draws.unbind(1) if series else [draws], x if series else [x], strict=True):
        flat = drawn.mT.flatten(1)
        covariance = A @ torch.block_diag(*model.kernel(inputs)) @ A.mT + NOISE * torch.eye(N * D)
        variance = covariance.diagonal()
        error = ((variance[:, None] * variance + covariance.square()) / 4000).sqrt()
        assert ((flat.mT @ flat / 4000 - covariance).abs() < 5.0 * error).all()
        assert (flat.mean(0).abs() < 4.5 * (variance / 4000).sqrt()).all()


class Scaled(PyroModule):
    """A decoder with a prior on its scale."""

    def __init__(self):
        super().__init__()
        self.scale = PyroSample(dist.LogNormal(0.0, 1.0))
        self.net = nn.Linear(2, D)

    def forward(self, latents):
        return self.scale * self.net(latents)


@one_and_several
def test_priors_on_kernel_likelihood_and_decoder_are_shared(series):
    """By all series and points; a mean-field guide works too."""
    model = GPVAE(RBF(1, batch_shape=(2,)), Scaled())
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2, 1), 1.0).to_event(2))
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    x, y = torch.rand(*series, N, 1), torch.randn(*series, N, D)
    shapes = {"kernel.lengthscale": (2, 1), "likelihood.variance": (), "decoder.scale": ()}
    for guide in (StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), MeanFieldGuide(model)):
        values = guide(x, y)
        trace = poutine.trace(poutine.condition(model, {"f": values["f"]})).get_trace(x, y)
        for name, shape in shapes.items():
            assert values[name].shape == trace.nodes[name]["value"].shape == shape
            assert not trace.nodes[name]["cond_indep_stack"]
        assert math.isfinite(Trace_ELBO().loss(model, guide, x, y))


@one_and_several
@pytest.mark.parametrize("make_kernel", [lambda k: k, lambda k: k + 0.5 * RBF(1, batch_shape=(1,)), Stack])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_draws_of_a_kernel_without_a_batch_of_processes_are_refused(series, make_kernel, sparse):
    """They would be taken for processes; a single draw is in no place, and with a batch of one kernel they lie left of it."""

    def bounds(*batch_shape):
        pyro.clear_param_store()
        kernel = Matern(1, batch_shape=batch_shape)
        kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(*batch_shape, 1), 0.1).to_event(1 + len(batch_shape)))
        if sparse:
            model = SparseGPVAE(make_kernel(kernel), nn.Linear(1, D), torch.rand(3, 1))
            guide = SparseStructuredGPGuide(model, encoders={"u": FactorNet(D, 1)})
        else:
            model = GPVAE(make_kernel(kernel), nn.Linear(1, D))
            guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
        x, y = torch.rand(*series, N, 1), torch.randn(*series, N, D)
        yield Trace_ELBO().loss(model, guide, x, y)
        yield Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=2).loss(model, guide, x, y)

    assert math.isfinite(next(bounds()))
    with pytest.raises(ValueError, match=r"expected a kernel with a batch dimension .* make it with batch_shape=\(1,\)"):
        list(bounds())
    assert all(map(math.isfinite, bounds(1)))


def test_positive_data_with_gaps():
    """A log-normal likelihood is the Gaussian one of the logarithms, encoder aside."""
    model = GPVAE(RBF(1, batch_shape=(2,)), nn.Linear(2, D), LogNormal(NOISE))
    x, y = torch.rand(N, 1), torch.randn(N, D)
    y[2:4, 1] = torch.nan
    in_logarithms = GPVAE(model.kernel, model.decoder, Gaussian(NOISE))
    guide = StructuredGPGuide(model)
    guide(x, y.exp())
    bounds, predicted = [], []
    for each, data in ((model, y.exp()), (in_logarithms, y)):
        guide._model = (each,)
        torch.manual_seed(1)
        bound = StructuredELBO(num_particles=5, max_plate_nesting=1).differentiable_loss(each, guide, x, data)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(bound, list(model.decoder.parameters())))
        bounds.append(-bound)
        torch.manual_seed(2)
        predicted.append(each.predict(guide, x, data).log_prob(data))
    torch.testing.assert_close(bounds[0], bounds[1] - y.nansum())
    torch.testing.assert_close(predicted[0], predicted[1] - y, equal_nan=True)
    filled = model.impute(guide, x, y.exp())
    assert (filled.mean > 0.0).all()
    assert (filled.stddev[2:4, 1] > 0.0).all()
    torch.testing.assert_close(filled.stddev.square(), filled.variance)


def test_fit_on_mini_batches_of_series():
    model, x, y = make_linear(1, 9, num_data=9)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1, [8])})
    elbo = StructuredELBO(num_particles=200, max_plate_nesting=2)
    before = elbo.loss(model, guide, x, y)
    history = fit(model, guide, x, y, loss=StructuredELBO(), batch_size=3, num_steps=30, learning_rate=0.05, progress=False)
    assert history.num_entries == (~torch.isnan(y)).sum()
    assert elbo.loss(model, guide, x, y) < before - 10.0


# ---- what is refused


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
            with pytest.raises(TypeError, match=r"data to be tensors, got (ndarray|list); use torch.as_tensor\(np.asarray"):
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


def test_latents_without_an_encoder_know_no_other_series():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(3, D), independent_dim=1)
    guide, x, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), torch.rand(N, 1), torch.randn(N, D)
    guide(x, y)
    with pytest.raises(ValueError, match="expected the data of the first call, which the parameters of 'w' are for"):
        model.predict(guide, x[1:], y[1:])


def test_data_that_fit():
    model, y = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D)), torch.randn(B, N, D)
    y[0], y[1, 2:], y[2, 3, 1] = torch.nan, torch.nan, torch.nan
    model.check(torch.rand(B, N, 1), y)
    model.check(torch.rand(N, 1), y)
    model.check(torch.rand(N, 1), y[1])


@pytest.mark.parametrize("shared", [False, True])
def test_fit_takes_mini_batches_of_series_and_leaves_shared_inputs_whole(shared):
    model, x, y = make_linear(1, B, num_data=B)
    x = x[0] if shared else x
    calls = []
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
    fit(model, lambda *args: calls.append(args) or guide(*args), x, y, num_steps=B, batch_size=1, progress=False)
    for inputs, batch, idx in calls[-B:]:
        assert torch.equal(inputs, x if shared else x[idx])
        torch.testing.assert_close(batch, y[idx], equal_nan=True)


def test_mini_batches_of_another_number_of_series_are_refused():
    model, x, y = make_linear(1, B, num_data=B + 1)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
    with pytest.raises(ValueError, match=f"expected num_data={B}, the number of series to take mini-batches of, got {B + 1}"):
        fit(model, guide, x, y, num_steps=1, batch_size=1, progress=False)


def test_data_with_other_outputs_than_the_decoder_s():
    model, x, y = make_linear(1)
    with pytest.raises(ValueError, match=f"expected data of {D} outputs, as many as the decoder has, got {D - 1}"):
        model(x, y[:, 1:])


def test_a_decoder_of_other_latents():
    model, x, y = make_linear(1)
    model.decoder = nn.Linear(2, D)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        model(x, y)
    assert "the decoder was given 1 latent dimensions, and numbers of torch.float64" in caught.value.__notes__


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


def test_guides_that_keep_no_process_do_not_predict():
    model, _, x, y = make_exact(1)
    guide = MeanFieldGuide(model)
    guide(x, y)
    with pytest.raises(TypeError, match=r"expected a guide that keeps the process f, .* got Normal"):
        model.predict(guide, x, y, torch.rand(2, 1))


@pytest.mark.parametrize("num_series", [1, B + 1])
def test_new_inputs_of_other_series(num_series, unchecked):
    model, guide, x, y = make_exact(1, B)
    with pytest.raises(ValueError, match=rf"for the series of the data, \[{B}\], of 1 columns"):
        model.predict(guide, x, y, torch.rand(num_series, 2, 1))


@pytest.mark.parametrize("horizon", [0, -1])
def test_forecasts_look_ahead(horizon):
    model, guide, _, y = make_exact(1)
    with pytest.raises(ValueError, match=f"expected horizon of 1 or more, got {horizon}"):
        model.forecast(guide, torch.arange(float(N))[:, None], y, horizon)


def test_a_negative_number_of_latents():
    with pytest.raises(ValueError, match="expected independent_dim of 0 or more, got -1"):
        GPVAE(RBF(1), MLP(1, D), independent_dim=-1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (7, 3), (5, 7, 1)])
def test_densities_are_asked_of_the_entries_predicted(shape):
    mixture = MixturePrediction((dist.Normal(torch.zeros(5, 7, 1), 1.0),))
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
    with pytest.raises(ValueError, match=rf"got one without \['{name}'\].*a parameter that is held"):
        model.predict(guide, x, y)


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
