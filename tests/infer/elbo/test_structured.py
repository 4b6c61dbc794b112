"""Prior times sites as a guide, and its bound: against quadrature, closed forms, and the bound of each series by itself."""

import math
from functools import partial
from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam
from pyro.poutine.messenger import Messenger
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess, StateSpacePosterior, StructuredPosterior, gaussian_process
from pyro_lvgp.guides import MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.infer.elbo import structured as structured_elbo
from pyro_lvgp.kernels import RBF, Linear, Matern, Stack
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, PointNet, ZeroImputation, mask_entries
from pyro_lvgp.ops import gaussian_sites

N, D, Q, B = 5, 3, 2, 4
ESTIMATORS = [
    {"value": value, "gradient_estimator": gradient}
    for value, gradient in product(("semi-analytic", "doubly-stochastic"), ("path", "score"))
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: "-".join(e.values()))


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def fixed_noise(monkeypatch):
    """Every draw of a marginal is one standard deviation above its mean: bounds can be compared draw by draw."""
    monkeypatch.setattr(StructuredPosterior, "rsample_marginals", lambda self: self.mean + self.variance.sqrt())


def make_data(*series):
    """Inputs and data with holes, among them the whole row 1."""
    x = torch.linspace(0.0, 1.0, N)[:, None] + 0.05 * torch.rand(*series, N, 1)
    y = torch.randn(*series, N, D)
    y[torch.rand(y.shape) < 0.2] = torch.nan
    y[..., 1, :] = torch.nan
    return x, y


def make_model(**options):
    kernel = Matern(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    return GPVAE(kernel, MLP(Q + options.get("independent_dim", 0), D, [3], nn.Tanh), Gaussian(0.4), **options)


def make(*series, **options):
    model = make_model(**options)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])})
    data = make_data(*series)
    guide(*data)
    return model, guide, *data


def posterior_of(guide, *args, site="f"):
    """q of a site."""
    fn = poutine.trace(guide).get_trace(*args).nodes[site]["fn"]
    return fn.base_dist if isinstance(fn, torch.distributions.Independent) else fn


def condition_told(K, prior_mean, loc, scale, told):
    """q(f) and its KL from the prior, by matrices of the told points alone."""
    K_told, centred = K[..., told, :][..., told], (loc - prior_mean)[..., told, None]
    gain = K[..., told] @ torch.linalg.inv(K_told + torch.diag_embed(scale[..., told].square()))
    mean, covariance = prior_mean + (gain @ centred).squeeze(-1), K - gain @ K[..., told, :]
    q = MultivariateNormal(mean[..., told], covariance[..., told, :][..., told])
    kl = kl_divergence(q, MultivariateNormal((prior_mean + torch.zeros_like(mean))[..., told], K_told))
    return mean, covariance.diagonal(dim1=-2, dim2=-1), kl


def hermite(num):
    """Nodes and probabilities, for expectations over a standard normal."""
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(num))
    return nodes, weights / weights.sum()


def quadrature(model, guide, x, y):
    """The bound of one series, the expectation over each f_n by quadrature."""
    loc, scale = (part.mT for part in guide.encoders.f(y))
    mean, variance, kl = condition_told(model.kernel(x), 0.0, loc, scale, (~torch.isnan(y)).any(-1))
    nodes, weights = hermite(25)
    grid = torch.cartesian_prod(*[nodes] * Q)[:, None]
    log_prob = model.likelihood(model.decoder(mean.mT + variance.sqrt().mT * grid)).log_prob(torch.nan_to_num(y))
    expected = torch.cartesian_prod(*[weights] * Q).prod(-1) @ (log_prob * ~torch.isnan(y)).sum((-1, -2))
    return expected - kl.sum()


def particles(num, nesting=2, bound=StructuredELBO, **options):
    return bound(num_particles=num, vectorize_particles=True, max_plate_nesting=nesting, **options)


def many_particles(estimator, nesting=2, num_score=1500, **options):
    return particles(num_score if estimator["gradient_estimator"] == "score" else 200, nesting, **estimator, **options)


def loss_and_slopes(elbo, model, guide, *args):
    loss = elbo(model, guide)
    value = loss(*args)
    slopes = torch.autograd.grad(value, list(loss.parameters()), materialize_grads=True)
    return torch.cat([value.detach().reshape(1), *(slope.flatten() for slope in slopes)])


def assert_mean_of_runs(elbo, model, guide, args, expected):
    """The bound's mean and its slopes', within 6 standard errors (there are many slopes), which are small."""
    slopes = torch.autograd.grad(-expected, list(elbo(model, guide).parameters()), materialize_grads=True)
    expected = torch.cat([-expected.detach().reshape(1), *(slope.flatten() for slope in slopes)])
    runs = torch.stack([loss_and_slopes(elbo, model, guide, *args) for _ in range(16)])
    error = runs.std(0) / 4.0
    assert error[0] < 0.1 * expected[0].abs()
    assert error[1:].norm() < 0.1 * expected[1:].norm()
    assert ((runs.mean(0) - expected).abs() < 6.0 * error + 1e-9).all(), (runs.mean(0) - expected) / error


# ---- one number and one gradient


BOUNDS = {f"{'-'.join(e.values())}-{len(series)}": (e, series) for e, series in product(ESTIMATORS, [(), (B,)])}
BOUNDS |= {"trace": ({"bound": Trace_ELBO}, (B,)), "trace mean-field": ({"bound": TraceMeanField_ELBO}, (B,))}
BOUNDS |= {f"{name}-state-space": BOUNDS[name] for name in ("semi-analytic-path-1", "trace", "trace mean-field")}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_and_gradients_have_one_mean(name, monkeypatch):
    options, series = BOUNDS[name]
    if name.endswith("state-space"):
        monkeypatch.setattr(gaussian_process, "_MANY_POINTS", 0)
    model, guide, x, y = make(*series)
    rows = zip(x, y, strict=True) if series else [(x, y)]
    expected = sum(quadrature(model, guide, *row) for row in rows)
    num = 1500 if options.get("gradient_estimator") == "score" else 200
    assert_mean_of_runs(particles(num, 1 + len(series), **options), model, guide, (x, y), expected)


@every_estimator
@pytest.mark.parametrize("weights", [[1.0, 0.5, 2.0, 1.0], [True, False, True, True]], ids=["scaled", "masked"])
def test_series_count_as_often_as_their_scales_and_masks_say(weights, estimator):
    model, (x, y) = make_model(), make_data(B)
    w = torch.tensor(weights)[:, None]
    weighted = poutine.mask(model, mask=w) if w.dtype == torch.bool else poutine.scale(model, scale=w)
    guide = StructuredGPGuide(weighted, encoders={"f": FactorNet(D, Q, [2])})
    guide(x, y)
    expected = sum(weight * quadrature(model, guide, *row) for weight, *row in zip(w.squeeze(-1), x, y, strict=True))
    assert_mean_of_runs(many_particles(estimator), weighted, guide, (x, y), expected)


@pytest.mark.parametrize("value", ["semi-analytic", "doubly-stochastic"])
def test_a_process_has_one_scale_in_model_and_guide(value):
    model, guide, x, y = make(B)
    bound = StructuredELBO(value=value, max_plate_nesting=2)
    with pytest.raises(ValueError, match=r"one scale of 'f'.*got 0.1 and 1.0: wrap the guide"):
        bound.loss(poutine.scale(model, scale=0.1), guide, x, y)
    bound.loss(poutine.scale(model, scale=0.1), poutine.scale(guide, scale=0.1), x, y)


@pytest.mark.parametrize("value", ["semi-analytic", "doubly-stochastic"])
def test_a_guide_of_another_model_is_refused(value):
    _, guide, x, y = make()
    kernel = RBF(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    other = GPVAE(kernel, MLP(Q, D, [3], nn.Tanh), Gaussian(0.4))
    with pytest.raises(ValueError, match="posterior of 'f' to be made of the model's prior, got one of another"):
        StructuredELBO(value=value).loss(other, guide, x, y)


def test_a_guide_of_another_model_has_no_closed_form_but_the_right_bound():
    """A divergence from another process is estimated by draws, not taken for that from the posterior's own prior."""
    _, guide, x, y = make()
    kernel = RBF(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    q, p = posterior_of(guide, x, y), GaussianProcess(kernel, x)
    with pytest.raises(NotImplementedError):
        kl_divergence(q, p)
    K = q.prior.covariance_matrix
    normal = MultivariateNormal(q.mean, gaussian_sites.predictive_covariance(q.posterior, K, K))
    f = q.rsample((20_000,))
    ratios = q.log_prob(f) - p.log_prob(f)
    error = ratios.mean(0) - kl_divergence(normal, MultivariateNormal(p.mean, p.covariance_matrix))
    assert (error.abs() < 4.0 * ratios.std(0) / len(f) ** 0.5).all()


class ScaleObserved(Messenger):
    """Multiply log likelihoods."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg):
        if msg["is_observed"]:
            msg["scale"] = self.weight * msg["scale"]


@every_estimator
def test_rescaling_divides_the_likelihood_by_the_observed_fraction(estimator, fixed_noise):
    model, guide, x, y = make(B)
    weight = y.numel() / (~torch.isnan(y)).sum()
    assert weight > 1.2
    plain, rescaled = (StructuredELBO(rescale=rescale, max_plate_nesting=2, **estimator) for rescale in (False, True))
    slopes = [
        torch.autograd.grad(elbo.differentiable_loss(p, guide, x, y), [*model.parameters(), *guide.parameters()])
        for elbo, p in ((rescaled, model), (plain, ScaleObserved(weight)(model)), (plain, model))
    ]
    for found, expected, other in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, other)
    bound = rescaled.differentiable_loss(model, guide, x, y)
    torch.testing.assert_close(bound, plain.differentiable_loss(ScaleObserved(weight)(model), guide, x, y))
    assert rescaled.loss(model, guide, x, y) == plain.loss(model, guide, x, y) != bound.item()


def test_rescaling_of_a_batch_with_nothing_observed_is_finite():
    model, guide, x, y = make(B)
    nothing = torch.full_like(y, torch.nan)
    losses = [StructuredELBO(rescale=rescale).loss_and_grads(model, guide, x, nothing) for rescale in (False, True)]
    assert losses[0] == losses[1] == pytest.approx(0.0, abs=1e-10)


@every_estimator
def test_particles_are_averaged(estimator, fixed_noise):
    """Along whatever dimension they are drawn, each is the same here."""
    model, guide, x, y = make()
    expected = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
    for nesting, vectorize in ((1, True), (3, True), (math.inf, True), (1, False)):
        options = {"num_particles": 3, "vectorize_particles": vectorize, "max_plate_nesting": nesting}
        found = loss_and_slopes(StructuredELBO(**options, **estimator), model, guide, x, y)
        torch.testing.assert_close(found, expected)


def test_a_model_that_pairs_draws_of_one_particle_with_those_of_others_is_refused():
    def model(x, y):
        gain = pyro.sample("gain", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(RBF(1), x))
        with pyro.plate("points", len(x)):
            # gain [S, 1] times f [S, N] would do: one dimension too many makes [S, S, N] of them.
            pyro.sample("y", dist.Normal(gain[..., None] * f, 1.0), obs=y[:, 0])

    x, y = make_data()
    y = torch.nan_to_num(y)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 1)})
    assert math.isfinite(StructuredELBO(max_plate_nesting=1).loss(model, guide, x, y))
    with pytest.raises(ValueError, match='at site "y", invalid log_prob shape'):
        StructuredELBO(num_particles=3, max_plate_nesting=1).loss(model, guide, x, y)


@every_estimator
def test_loss_and_its_gradients(estimator, fixed_noise):
    model, guide, x, y = make(B)
    expected = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
    assert StructuredELBO(**estimator).loss(model, guide, x, y) == pytest.approx(expected[0].item())
    parameters = [*model.parameters(), *guide.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    assert StructuredELBO(**estimator).loss_and_grads(model, guide, x, y) == pytest.approx(expected[0].item())
    torch.testing.assert_close(torch.cat([parameter.grad.flatten() for parameter in parameters]), expected[1:])


# ---- missing data


def test_rows_with_nothing_observed_add_nothing_to_the_posterior():
    _, guide, x, y = make()
    y[0] = torch.nan
    told = ~torch.isnan(y).all(-1)
    assert told.tolist() == [False, False, True, True, True]
    q, without = posterior_of(guide, x, y), posterior_of(guide, x[told], y[told])
    between = without.at(x[~told][None])
    torch.testing.assert_close(q.mean, torch.cat([between.mean, without.mean], -1))
    torch.testing.assert_close(q.variance, torch.cat([between.variance, without.variance], -1))


def test_the_prior_far_from_data():
    model, guide, x, y = make()
    q = posterior_of(guide, torch.cat([x[:2] - 100.0, x]), torch.cat([torch.full((2, D), torch.nan), y]))
    prior_variance = model.kernel.variance[:, None]
    torch.testing.assert_close(q.mean[:, :2], torch.zeros(Q, 2))
    torch.testing.assert_close(q.variance[:, :2], prior_variance.expand(Q, 2))
    assert (q.mean[:, 2:].abs() > 1e-6).all()
    assert (q.variance[:, 2:] < 0.99 * prior_variance).all()


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_prediction_is_the_guide_on_old_and_new_inputs_together(series):
    model, guide, x, y = make(*series)
    x_new = torch.rand(*series, 3, 1)
    x_both, y_both = torch.cat([x, x_new], -2), torch.cat([y, torch.full((*series, 3, D), torch.nan)], -2)
    slow = posterior_of(guide, x_both, y_both)
    X_new = x_new[:, None, None] if series else x_new[None]
    q = posterior_of(guide, x, y)
    marginals, joint = q.at(X_new), q.at(X_new, joint=True)
    torch.testing.assert_close(marginals.mean, slow.mean[..., N:])
    torch.testing.assert_close(marginals.variance, slow.variance[..., N:])
    K = model.kernel(x_both[:, None, None] if series else x_both)
    covariance = gaussian_sites.predictive_covariance(slow.posterior, K, K)[..., N:, N:]
    torch.testing.assert_close(joint.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)


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


def test_sharp_sites_in_float32_do_not_lift_the_bound():
    """Site scales far below rounding of the prior: KL and bound lose digits, but not their signs."""
    model = make_model().float()
    guide = StructuredGPGuide(model)
    x, y = torch.linspace(0.0, 1.0, 50, dtype=torch.float32)[:, None], torch.randn(50, D, dtype=torch.float32)
    guide(x, y)
    guide.locs.f = model.prior(x).sample()
    for scale in (1e-2, 1e-3, 1e-4, 1e-6):
        guide.scales.f = torch.full_like(guide.locs.f, scale)
        q = posterior_of(guide, x, y)
        assert (kl_divergence(q, model.prior(x).base_dist) > 10.0).all()
        assert (q.variance <= 1.001 * scale**2).all()


# ---- linear time


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


def test_linear_time_is_taken_where_it_can_and_pays():
    def posterior(kernel, num, **options):
        pyro.clear_param_store()
        guide = StructuredGPGuide(GPVAE(kernel, MLP(1, D)), encoders={"f": FactorNet(D, 1)}, **options)
        return type(posterior_of(guide, torch.rand(num, kernel.input_dim or 1), torch.randn(num, D)))

    assert posterior(Matern(1), 201) is StateSpacePosterior
    assert posterior(Matern(1) + 0.5, 201) is StateSpacePosterior
    assert posterior(Matern(1), 200) is StructuredPosterior
    assert posterior(Matern(1), 201, method="dense") is StructuredPosterior
    assert posterior(Matern(1), 5, method="state-space") is StateSpacePosterior
    assert posterior(RBF(1), 201) is StructuredPosterior
    assert posterior(Matern(2), 201) is StructuredPosterior
    with pytest.raises(ValueError, match=r'for linear time, got RBF; use method="dense" or method="auto"'):
        posterior(RBF(1), 201, method="state-space")


# ---- mini-batches


BATCHES = (torch.tensor([2, 0]), torch.tensor([3, 1]))


@every_estimator
@pytest.mark.parametrize("shared_inputs", [False, True])
@pytest.mark.parametrize("amortised", [False, True])
def test_mini_batches_of_series_average_to_the_full_bound(estimator, amortised, shared_inputs, fixed_noise):
    model = make_model(num_data=B)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]) if amortised else None})
    x, y = make_data(B)
    guide(x, y)
    if not amortised:
        guide.locs.f, guide.scales.f = torch.randn(B, 1, Q, N), 0.1 + torch.rand(B, 1, Q, N)
    bound = partial(loss_and_slopes, StructuredELBO(**estimator), model, guide)
    at = (lambda idx: x[0]) if shared_inputs else (lambda idx: x[idx])
    parts = [bound(at(idx), y[idx], idx) for idx in BATCHES]
    assert not torch.allclose(*parts)
    torch.testing.assert_close(sum(parts) / 2, bound(at(slice(None)), y))


@every_estimator
def test_mini_batches_of_points_scale_every_term(estimator, fixed_noise):
    model = make_model(num_data=N, independent_dim=1)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]), "w": FactorNet(D, 1, [2])})
    x, y = make_data()
    guide(x, y)
    idx = torch.tensor([3, 0])
    found = []
    for args in ((x[idx], y[idx]), (x[idx], y[idx], idx)):
        pyro.set_rng_seed(1)  # for w
        found.append(loss_and_slopes(StructuredELBO(**estimator), model, guide, *args))
    torch.testing.assert_close(found[1], N / 2 * found[0])


@pytest.mark.parametrize("site", ["f", "w"])
def test_free_sites_belong_to_points_and_want_all_of_them(site):
    model = make_model(num_data=N, independent_dim=1)
    x, y = make_data()
    idx = torch.tensor([3, 0])

    def make_guide():
        return StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]), "w": FactorNet(D, 1, [2])} | {site: None})

    with pytest.raises(ValueError, match=f"expected an encoder for site '{site}', or all points at every step"):
        make_guide()(x[idx], y[idx], idx)
    guide = make_guide()
    guide(x, y)
    with pytest.raises(ValueError, match=r"all points that the free sites of 'f' belong to|invalid shape of .*locs.w"):
        guide(x[idx], y[idx], idx)


def test_free_sites_of_series_in_another_order_are_refused():
    x, y = torch.linspace(0.0, 1.0, 5)[:, None].expand(3, 5, 1), torch.randn(3, 5, 2)
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2, 2, (4,)), num_data=3)
    guide = StructuredGPGuide(model)
    guide(x, y, torch.arange(3))
    with pytest.raises(ValueError, match="expected fewer rows than the 3 of plate 'series', or all of them in order"):
        guide(x, y, torch.tensor([0, 2, 1]))


@pytest.mark.parametrize(("series", "idx"), [((), [3, 0]), ((B,), [3, 0])], ids=["points", "series"])
def test_global_sites_are_not_scaled(series, idx):
    model = make_model(num_data=6)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q, 1), 1.0).to_event(2))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])}, create_plates=model.create_plates)
    x, y = make_data(*series)
    guide(x, y)
    idx = torch.tensor(idx)
    guide_trace = poutine.trace(guide).get_trace(x[idx], y[idx], idx)
    model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(x[idx], y[idx], idx)
    for trace in (guide_trace, model_trace):
        for name, scale in (("likelihood.variance", 1.0), ("kernel.lengthscale", 1.0), ("f", 3.0)):
            assert trace.nodes[name]["scale"] == scale
        assert trace.nodes["kernel.lengthscale"]["value"].shape == (Q, 1)
    assert StructuredELBO().differentiable_loss(model, guide, x[idx], y[idx], idx).isfinite()


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_mini_batches_need_the_number_of_data(series):
    model, guide, x, y = make(*series)
    idx = torch.tensor([3, 0])
    with pytest.raises(ValueError, match="expected num_data with mini-batches, got one of 2 and none; pass num_data to GPVAE"):
        StructuredELBO().loss(model, guide, x[idx], y[idx], idx)


# ---- data hidden from the encoder


class Spy(nn.Module):
    """An encoder that notes what it sees."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.seen = encoder, []

    def forward(self, y):
        self.seen.append(y)
        return self.encoder(y)


@pytest.mark.parametrize("rescale", [False, True])
@every_estimator
def test_masking_hides_entries_from_the_guide_alone(estimator, rescale, fixed_noise):
    model, (x, y) = make_model(), make_data(B)
    spy = Spy(FactorNet(D, Q, [2]))
    guide = StructuredGPGuide(model, encoders={"f": spy})
    guide(x, y)
    elbo = StructuredELBO(corruption=mask_entries(0.5), rescale=rescale, max_plate_nesting=2, **estimator)
    spy.seen.clear()
    found = loss_and_slopes(elbo, model, guide, x, y)
    (encoded,) = spy.seen
    assert torch.isnan(encoded)[torch.isnan(y)].all()
    kept = ~torch.isnan(encoded)
    assert torch.equal(encoded[kept], y[kept])
    assert 0 < kept.sum() < (~torch.isnan(y)).sum()

    given = lambda x, y: guide(x, encoded)  # noqa: E731
    loss = StructuredELBO(rescale=rescale, **estimator).differentiable_loss(model, given, x, y)
    torch.testing.assert_close(found[0], loss.detach())
    slopes = torch.autograd.grad(loss, [*model.parameters(), *guide.parameters()])
    torch.testing.assert_close(found[1:], torch.cat([slope.flatten() for slope in slopes]))
    spy.seen.clear()
    assert elbo.loss(model, guide, x, y) == pytest.approx(StructuredELBO(**estimator).loss(model, guide, x, y))
    assert all(torch.equal(torch.isnan(seen), torch.isnan(y)) for seen in spy.seen)


# ---- models that are not ours


# Series and outputs are as many as points, which they must not be taken for.
LAYOUTS = {"points": (N, 1), "event": (N, 1), "series": (N, N, 1), "outputs": (N, N)}


def poisson_model(t, y, *, layout):
    """Counts whose log rate is a process around an unknown level."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    prior = dist.MultivariateNormal(level[..., None] + torch.zeros(N), matern(t))
    if layout == "series":
        with pyro.plate("series", len(y), dim=-1):
            rate = pyro.sample("rate", prior)
            observe(rate, y.squeeze(-1), event_dim=1)
    elif layout == "outputs":
        rate = pyro.sample("rate", prior)
        with pyro.plate("outputs", N, dim=-1):
            observe(rate + torch.zeros_like(y.mT), y.mT, event_dim=1)
    elif layout == "points":
        rate = pyro.sample("rate", prior)
        with pyro.plate("points", N, dim=-1):
            observe(rate.squeeze(-2) if rate.dim() > 1 else rate, y.squeeze(-1), event_dim=0)
    else:
        observe(pyro.sample("rate", prior), y.squeeze(-1), event_dim=1)


def observe(log_rate, y, event_dim):
    entries = dist.Poisson(log_rate.exp()).mask(~torch.isnan(y))
    pyro.sample("y", entries.to_event(event_dim), obs=torch.nan_to_num(y))


def matern(t):
    return 0.8 * (-(t - t.mT).abs() / 0.4).exp()


def poisson_bound(guide, t, y):
    """Expectations over rates are known, those over the level are by quadrature."""
    loc, scale = guide.encoders.rate(y)
    level, spread = guide.mean_field.locs.level, guide.mean_field.scales.level
    bound = -kl_divergence(dist.Normal(level, spread), dist.Normal(0.0, 1.0))
    series = [(loc, scale, y)] if y.dim() == 2 else list(zip(loc, scale, y, strict=True))
    for node, weight in zip(*hermite(15), strict=True):
        for loc, scale, y in series:
            seen, prior_mean = ~torch.isnan(y), level + spread * node
            mean, variance, kl = condition_told(matern(t), prior_mean, loc[:, 0], scale[:, 0], seen.any(-1))
            counts, mean, variance = torch.broadcast_tensors(y.nan_to_num(), mean[:, None], variance[:, None])
            expected = counts * mean - (mean + 0.5 * variance).exp() - torch.lgamma(counts + 1.0)
            bound = bound + weight * (expected[seen].sum() - kl)
    return bound


@pytest.mark.parametrize(
    ("estimator", "layout"),
    [(e, layout) for e in ESTIMATORS for layout in (LAYOUTS if e["gradient_estimator"] == "score" else ["points"])],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_counts_with_a_normal_prior_around_a_latent_level(estimator, layout):
    t = torch.linspace(0.0, 1.0, N)[:, None]
    y = torch.poisson(torch.full(LAYOUTS[layout], 2.0))
    y[..., 1, :] = torch.nan
    model = partial(poisson_model, layout=layout)
    guide = StructuredGPGuide(model, encoders={"rate": FactorNet(y.shape[-1], 1, [2])})
    assert set(guide(t, y)) == {"level", "rate"}
    expected = poisson_bound(guide, t, y)
    # Without a plate of points, each slope of log q is multiplied by the likelihood of all of them.
    elbo = many_particles(estimator, 1, num_score=4000 if layout in ("event", "outputs") else 1000)
    assert_mean_of_runs(elbo, model, guide, (t, y), expected)


@every_estimator
def test_a_latent_below_the_process_counts(estimator):
    """f → z → y: the bound of q(f) q(z) in closed form."""
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1) + 2.0

    def model(t, y):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
        with pyro.plate("points", N):
            z = pyro.sample("z", dist.Normal(f.squeeze(-2) if f.dim() > 1 else f, 0.5))
            pyro.sample("y", dist.Normal(z, 0.7), obs=y[:, 0])

    guide = StructuredGPGuide(model, encoders={"f": None}, init_scale=1.0)
    guide(t, y)
    with torch.no_grad():
        guide.locs.f = torch.randn(N)
        guide.mean_field.locs.z = torch.randn(N)
    mean, variance, kl = condition_told(
        RBF(1, lengthscale=0.3)(t), torch.zeros(N), guide.locs.f, guide.scales.f, torch.ones(N) > 0
    )
    loc, scale = guide.mean_field.locs.z, guide.mean_field.scales.z
    expected = -kl + dist.Normal(loc, scale).entropy().sum()
    for squares, noise in (
        ((loc - mean).square() + scale.square() + variance, 0.5),
        ((y[:, 0] - loc).square() + scale.square(), 0.7),
    ):
        expected = expected - 0.5 * (squares / noise**2 + math.log(2.0 * math.pi * noise**2)).sum()
    assert_mean_of_runs(many_particles(estimator, 1), model, guide, (t, y), expected)


def test_latents_that_pair_particles_are_refused():
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)

    def model(t, y):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
        with pyro.plate("points", N):
            z = pyro.sample("z", dist.Normal(f, 0.5))  # [particles, 1, N] beside [particles, N]
            pyro.sample("y", dist.Normal(z, 0.5), obs=y[:, 0])

    guide = StructuredGPGuide(model, encoders={"f": None})
    guide(t, y)
    with pytest.raises(ValueError, match="at site"):
        StructuredELBO(num_particles=10, max_plate_nesting=1).loss(model, guide, t, y)


@pytest.mark.usefixtures("unchecked")
def test_data_are_found_or_asked_for():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 1))
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    with pytest.raises(TypeError, match=r"expected data by position.*\['y'\]"):
        StructuredGPGuide(model, encoders={"f": IndexNet(1, 2)})(t, y=y)
    with pytest.raises(TypeError, match=r"expected data of a floating-point dtype, got torch.int64; use y.to"):
        StructuredGPGuide(model, encoders={"f": IndexNet(1, 2)})(t, y.long())


def one_output(t, y=None):
    """A process seen with noise, or data drawn from it: as many outputs as inputs, of which each can pass for the other."""
    f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
    with pyro.plate("points", len(t)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=None if y is None else y.squeeze(-1))


@pytest.mark.parametrize("encoder", [FactorNet(1, 1, [2]), None], ids=["encoder", "free"])
def test_inputs_are_not_taken_for_data_where_these_are_left_out(encoder):
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(one_output, encoders={"f": encoder and encoder.double()})
    guide(t, y)
    draws = Predictive(one_output, guide=guide, num_samples=2, return_sites=["f"])
    for run in (guide, guide.median, draws):
        with pytest.raises(ValueError, match=r"expected data as argument 1 of the model, as at .* got .* as argument 0"):
            run(t)
    assert draws(t, y)["f"].shape == (2, 1, N)


def test_data_refused_at_the_first_call_can_be_mended():
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(one_output, encoders={"f": FactorNet(1, 1, [2])})
    with pytest.raises(ValueError, match="a single output needs"):
        guide(t, y[:, 0])
    assert guide(t, y)["f"].shape == (N,)
    assert math.isfinite(StructuredELBO().loss(one_output, guide, t, y))


def test_a_column_of_whole_numbers_is_not_taken_for_indices():
    def counts_of_one(t, counts):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
        with pyro.plate("points", len(t)):
            pyro.sample("counts", dist.Poisson(f.exp()), obs=counts)

    guide = StructuredGPGuide(counts_of_one, encoders={"f": FactorNet(1, 1, [2])})
    with pytest.raises(TypeError, match=r"expected data of a floating-point dtype, got torch.int64 of shape \[5\], which is"):
        guide(torch.linspace(0.0, 1.0, N)[:, None], torch.arange(N) % 2)


def two_processes(t, y):
    """A mean and a log variance: one of our processes and a normal."""
    f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
    g = pyro.sample("log.variance", dist.MultivariateNormal(torch.full((N,), -1.0), matern(t)))
    pyro.sample("y", dist.Normal(f, (0.5 * g).exp()).mask(~torch.isnan(y[:, 0])).to_event(1), obs=y[:, 0].nan_to_num())


@every_estimator
def test_two_processes_one_with_an_encoder(estimator):
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    y[2] = torch.nan
    guide = StructuredGPGuide(two_processes, encoders={"f": FactorNet(1, 1, [2]), "log.variance": None}, init_scale=0.7)
    guide(t, y)
    free = guide.locs.log.variance, guide.scales.log.variance
    told = ~torch.isnan(y[:, 0])
    assert [part.shape for part in free] == [(N,), (N,)]
    guide.locs.log.variance = torch.randn(N)
    K = RBF(1, lengthscale=0.3)(t).detach()
    loc, scale = (part[:, 0] for part in guide.encoders.f(y))
    mean, variance, kl = condition_told(K, torch.zeros(()), loc, scale, told)
    free = guide.locs.log.variance, guide.scales.log.variance
    log_mean, log_variance, log_kl = condition_told(matern(t), torch.tensor(-1.0), *free, told)
    precision = (0.5 * log_variance - log_mean).exp()
    square = (y[:, 0].nan_to_num() - mean).square() + variance
    expected = -0.5 * (math.log(2.0 * math.pi) + log_mean + square * precision)[told].sum() - kl - log_kl
    elbo = many_particles(estimator, 0, num_score=6000)
    assert_mean_of_runs(elbo, two_processes, guide, (t, y), expected)


class Pooled(nn.Module):
    """What all trials together say."""

    def forward(self, y):
        counts = (~torch.isnan(y)).sum(0)
        return y.nansum(0) / counts.clamp_min(1), 0.5 / counts.clamp_min(1).sqrt()


@pytest.mark.parametrize("free", [False, True], ids=["encoder", "free"])
@pytest.mark.parametrize("value", ["semi-analytic", "doubly-stochastic"])
def test_trials_that_share_a_process(free, value):
    """Exact sites give the exact evidence; where no trial shows anything there is no site."""

    def trials(t, y):
        f = pyro.sample("f", dist.MultivariateNormal(torch.full((N,), 0.3), matern(t)))
        with pyro.plate("trials", len(y), dim=-2), pyro.plate("points", N, dim=-1):
            noisy = dist.Normal(f, 0.5).expand([len(y), N]).mask(~torch.isnan(y[..., 0]))
            pyro.sample("y", noisy, obs=y[..., 0].nan_to_num())

    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(3, N, 1)
    y[0, 2], y[:, 1] = torch.nan, torch.nan
    guide = StructuredGPGuide(trials, encoders={"f": None if free else Pooled()})
    guide(t, y)
    if free:
        guide.locs.f, guide.scales.f = (part[:, 0] for part in Pooled()(y))
    told = ~torch.isnan(y[..., 0]).flatten()
    covariance = matern(t).repeat(3, 3)[told][:, told] + 0.25 * torch.eye(int(told.sum()))
    evidence = MultivariateNormal(torch.full((int(told.sum()),), 0.3), covariance).log_prob(y.flatten()[told])
    with torch.no_grad():
        bounds = torch.tensor([-StructuredELBO(value=value).loss(trials, guide, t, y) for _ in range(100)])
    assert (bounds.mean() - evidence).abs() < 6.0 * bounds.std() / 10.0 + 1e-9
    assert value == "semi-analytic" or bounds.std() < 1e-9


@pytest.mark.parametrize("net", [None, Pooled()], ids=["free", "encoder"])
def test_trials_that_share_processes_of_one_site_are_refused(net):
    """But those of a site each are served."""

    def one_site(t, y):
        with pyro.plate("latents", 2):
            f = pyro.sample("f", GaussianProcess(RBF(1), t))
        observe(f.sum(-2), y)

    def two_sites(t, y):
        observe(pyro.sample("f", GaussianProcess(RBF(1), t)) + pyro.sample("g", GaussianProcess(RBF(1), t)), y)

    def observe(f, y):
        with pyro.plate("trials", len(y), dim=-2), pyro.plate("points", N, dim=-1):
            pyro.sample("y", dist.Normal(f, 0.5).expand([len(y), N]), obs=y[..., 0])

    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(3, N, 1)
    with pytest.raises(ValueError, match=rf"\[3, {N}, 1\], got \[2, {N}\]; give each process that the series share a site"):
        StructuredGPGuide(one_site, encoders={"f": net})(t, y)
    guide = StructuredGPGuide(two_sites, encoders={"f": net, "g": None})
    assert {name: value.shape for name, value in guide(t, y).items()} == {"f": (N,), "g": (N,)}


def first_points(t, y):
    """A process that is seen at some of its points, in a plate of these."""
    with pyro.plate("latents", 1):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t)).squeeze(-2)
    with pyro.plate("points", 3):
        pyro.sample("y", dist.Normal(f[..., :3], 0.7), obs=y[:3, 0])


@every_estimator
def test_a_plate_of_some_of_the_points(estimator):
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    y[3:] = torch.nan
    guide = StructuredGPGuide(first_points, encoders={"f": FactorNet(1, 1, [2])})
    guide(t, y)
    loc, scale = (part[:, 0] for part in guide.encoders.f(y))
    K = RBF(1, lengthscale=0.3)(t).detach()
    mean, variance, kl = condition_told(K, torch.zeros(()), loc, scale, ~torch.isnan(y[:, 0]))
    square = (y[:3, 0] - mean[:3]).square() + variance[:3]
    expected = (-0.5 * square / 0.49 - 0.5 * math.log(2.0 * math.pi * 0.49)).sum() - kl
    assert_mean_of_runs(many_particles(estimator, 1, num_score=6000), first_points, guide, (t, y), expected)


def test_a_normal_prior_is_multiplied_in_closed_form():
    """In plates, with and without latent dimensions of its own; rows with nothing observed keep the prior."""

    def model(y):
        with pyro.plate("series", B, dim=-2), pyro.plate("points", N, dim=-1):
            w = pyro.sample("w", dist.Normal(0.3 + torch.zeros(2), 0.8).to_event(1))
            z = pyro.sample("z", dist.Normal(-1.0, 2.0))
            pyro.sample("y", dist.Normal(w.sum(-1) + z, 1.0).mask(~torch.isnan(y[..., 0])), obs=y[..., 0].nan_to_num())

    y = make_data(B)[1]
    guide = StructuredGPGuide(model, encoders={"w": FactorNet(D, 2, [2]), "z": FactorNet(D, 1, [2])})
    guide(y)
    told = ~torch.isnan(y).all(-1)
    for name, mean, scale, latents in (("w", 0.3, 0.8, (2,)), ("z", -1.0, 2.0, ())):
        q = posterior_of(guide, y, site=name)
        loc, site_scale = (part if latents else part[..., 0] for part in getattr(guide.encoders, name)(y))
        assert q.mean.shape == (B, N, *latents)
        for n, row in product(range(B), range(N)):
            if told[n, row]:
                gain = scale**2 / (scale**2 + site_scale[n, row] ** 2)
                torch.testing.assert_close(q.mean[n, row], mean + gain * (loc[n, row] - mean))
                torch.testing.assert_close(q.variance[n, row], (1.0 - gain) * scale**2)
            else:
                torch.testing.assert_close(q.mean[n, row], torch.full(latents, mean))
                torch.testing.assert_close(q.variance[n, row], torch.full(latents, scale**2))
    assert StructuredELBO().differentiable_loss(model, guide, y).isfinite()


def test_other_sites_are_those_of_a_mean_field_guide():
    """Also on the half-line, with the init_scale asked for."""
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide, other = (
        StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}, init_scale=0.2),
        MeanFieldGuide(model, init_scale=0.2),
    )
    args = make_data()
    for g, part in ((guide, guide.mean_field), (other, other)):
        g(*args)
        part.locs.likelihood.variance = torch.tensor(-0.3)
    ours, theirs = (poutine.trace(g).get_trace(*args).nodes["likelihood.variance"]["fn"] for g in (guide, other))
    value = torch.rand(())
    torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))


def test_other_sites_start_where_they_are_told():
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}, init_loc_fn=lambda site: torch.tensor(3.0))
    args = make_data()
    guide(*args)
    torch.testing.assert_close(guide.median(*args)["likelihood.variance"], torch.tensor(3.0))


def test_quantiles_of_f_are_those_of_its_marginals_at_the_medians_of_the_others():
    model = make_model()
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q, 1), 1.0).to_event(2))
    guide, (x, y) = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}), make_data(B)
    guide(x, y)
    guide.mean_field.locs.kernel.lengthscale = torch.tensor([[-1.0], [0.5]])
    median, quantiles = guide.median(x, y), guide.quantiles([0.1, 0.5], x, y)
    torch.testing.assert_close(median["kernel.lengthscale"], torch.tensor([[-1.0], [0.5]]).exp())
    q = posterior_of(poutine.condition(guide, {"kernel.lengthscale": median["kernel.lengthscale"]}), x, y)
    torch.testing.assert_close(median["f"], q.mean)
    torch.testing.assert_close(quantiles["f"][0], q.mean - 1.2815515655446004 * q.variance.sqrt())
    torch.testing.assert_close(quantiles["f"][1], median["f"])


def test_the_guide_leaves_the_model_after_its_last_latent_site():
    """Out of plates too; no handler stays behind."""
    reached = []

    def model(t, y):
        f = pyro.sample("f", GaussianProcess(RBF(1), t))
        with pyro.plate("rows", 2, dim=-1), poutine.scale(scale=0.5):
            pyro.sample("scale", dist.LogNormal(0.0, 1.0))
            reached.append(f)
            pyro.sample("y", dist.Normal(f.sum(-1, keepdim=True), 1.0), obs=torch.zeros(2))

    guide, t, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)}), torch.rand(N, 1), torch.randn(N, D)
    guide(t, y)
    reached.clear()
    for _ in range(2):
        trace = poutine.trace(guide).get_trace(t, y)
        assert not reached
        assert not pyro.poutine.runtime._PYRO_STACK
    replayed = poutine.trace(poutine.replay(model, trace)).get_trace(t, y)
    assert len(reached) == 1
    for name in ("f", "scale"):
        assert torch.equal(replayed.nodes[name]["value"], trace.nodes[name]["value"])
        assert replayed.nodes[name]["scale"] == trace.nodes[name]["scale"] == (0.5 if name == "scale" else 1.0)


# ---- what is refused


def test_quantiles_before_the_first_call():
    with pytest.raises(ValueError, match=r"no parameters before its first call"):
        StructuredGPGuide(make_model(), encoders={"f": FactorNet(D, Q)}).median(*make_data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.0}, "expected a positive and finite init_scale, got 0"),
        ({"init_scale": math.inf}, "expected a positive and finite init_scale, got inf"),
        ({"method": "kalman"}, "expected method in .*state-space.*, got 'kalman'"),
    ],
)
def test_options_that_make_no_sense(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        StructuredGPGuide(make_model(), **options)


def test_a_model_that_does_not_name_its_process_needs_encoders():
    with pytest.raises(
        ValueError, match=r"expected encoders=\{<name of a Gaussian-process site>: encoder\}, got none for function"
    ):
        StructuredGPGuide(two_processes)


def test_only_rescaling_and_masking_look_for_data_among_the_arguments():
    """A model may hold its data, and a guide that needs none of them may be called without."""
    y = torch.randn(N)

    def model():
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("points", N):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    guide = MeanFieldGuide(model)
    assert math.isfinite(StructuredELBO().loss_and_grads(model, guide))
    for options in ({"rescale": True}, {"corruption": mask_entries(0.5)}):
        with pytest.raises(ValueError, match="expected data among the arguments of the model, got"):
            StructuredELBO(**options).loss_and_grads(model, guide)


def first_call(sites, *args, model=None):
    StructuredGPGuide(model or make_model(), encoders=sites)(*(args or make_data()))


def test_unknown_sites():
    with pytest.raises(ValueError, match=r"one of \['f'\], got 'rate'"):
        first_call({"rate": None})


def test_priors_that_cannot_be_multiplied():
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"'likelihood.variance', got LogNormal; leave the site out of encoders"):
        first_call({"likelihood.variance": None}, model=model)


@pytest.mark.parametrize(("site", "latents", "series"), [("f", Q + 1, ()), ("f", 3, (B,)), ("w", 2, ()), ("w", 2, (B,))])
def test_encodings_of_the_wrong_shape(site, latents, series):
    with pytest.raises(
        ValueError, match=rf"lines up with site '{site}' of shape \[.*\], got \[.*{latents}.*\]; encoders return"
    ):
        first_call({site: FactorNet(D, latents)}, *make_data(*series), model=make_model(independent_dim=1))


def of_dense(encoder):
    return StructuredGPGuide(make_model(), encoders={"f": encoder})


def of_sparse(encoder):
    model = SparseGPVAE(RBF(1, batch_shape=(Q,)), nn.Linear(Q, D), torch.rand(3, 1))
    return SparseStructuredGPGuide(model, encoders={"u": encoder})


@pytest.mark.parametrize("guide_of", [of_dense, of_sparse], ids=["dense", "sparse"])
def test_encoders_return_pairs(guide_of):
    """One tensor for two series is no pair."""
    x, y = torch.rand(2, N, 1), torch.randn(2, N, D)
    with pytest.raises(TypeError, match=r"expected loc and scale from the encoder of '[fu]', got Tensor; an IndexNet"):
        guide_of(nn.Linear(D, Q))(x, y)


def test_guides_and_models_with_inducing_points_go_together():
    dense, sparse = of_dense(None).model, of_sparse(FactorNet(D, Q)).model
    with pytest.raises(ValueError, match="got SparseGPVAE, which has inducing points; take a SparseStructuredGPGuide"):
        StructuredGPGuide(sparse)
    with pytest.raises(ValueError, match="got none for GPVAE; a model without inducing points takes a StructuredGPGuide"):
        SparseStructuredGPGuide(dense)


def test_more_latents_than_the_kernel_has():
    """Encodings do not widen the prior."""
    model = GPVAE(RBF(1), MLP(1, D))
    with pytest.raises(ValueError, match=r"of shape \[1, 5\] \[..., latent dimensions, points\], got \[2, 5\]"):
        first_call({"f": FactorNet(D, 2)}, model=model)


def test_several_encodings_of_one_process():
    def model(t, y):
        pyro.sample("f", GaussianProcess(RBF(1), t))

    with pytest.raises(ValueError, match=r"of shape \[1, 5\].*got \[4, 1, 5\]"):
        first_call({"f": FactorNet(D, 1)}, torch.rand(1, N, 1), torch.randn(B, N, D), model=model)


@pytest.mark.parametrize("make_encoder", [lambda: None, lambda: FactorNet(1, 1)])
def test_data_must_be_there_and_have_columns(make_encoder):
    def model(t, y=None):
        pyro.sample("f", GaussianProcess(RBF(1), torch.rand(N, 1)))

    with pytest.raises(ValueError, match=r"expected data among the arguments of the model, got \['Tensor'\]; pass y"):
        first_call({"f": make_encoder()}, torch.arange(N), model=model)
    with pytest.raises(
        ValueError, match=r"expected data \[..., points, outputs\], got \[5\]; a single output needs \[:, None\]"
    ):
        first_call({"f": make_encoder()}, torch.arange(N), torch.randn(N), model=model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": "exact"}, "expected value in .*semi-analytic.* and gradient_estimator in .*, got 'exact' and 'path'"),
        ({"gradient_estimator": "reinforce"}, "got 'semi-analytic' and 'reinforce'"),
        ({"num_particles": 0}, "expected num_particles of 1 or more, got 0"),
    ],
)
def test_estimators_that_make_no_sense(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        StructuredELBO(**options)


def test_guides_that_cannot_be_reparameterised():
    def model(y):
        pyro.sample("k", dist.Poisson(torch.tensor(1.0)))

    with pytest.raises(ValueError, match="'k' with Poisson; use a distribution with has_rsample"):
        StructuredELBO().loss(model, model, torch.zeros(1))


def test_processes_whose_priors_depend_on_each_other_are_refused():
    def model(t, y):
        level = pyro.sample("level", GaussianProcess(RBF(1, lengthscale=0.3), t))
        rough = pyro.sample("rough", dist.MultivariateNormal(level, matern(t) + 1e-6 * torch.eye(len(t))))
        with pyro.plate("points", len(t)):
            pyro.sample("y", dist.Normal(rough, 0.3), obs=y[:, 0])

    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(model, encoders={"level": IndexNet(1, 1), "rough": IndexNet(1, 1)})
    with torch.no_grad(), pytest.raises(ValueError, match="'rough', whose prior depends on 'level'; take Trace_ELBO"):
        StructuredELBO().loss(model, guide, t, y)
    assert math.isfinite(Trace_ELBO().loss(model, guide, t, y))


def test_processes_are_looked_at_once(monkeypatch):
    """Though particles and masking wrap the guide anew at every step."""
    looks = []
    monkeypatch.setattr(structured_elbo._RefuseNested, "__init__", lambda self: looks.append(0) or Messenger.__init__(self))
    monkeypatch.setattr(structured_elbo._RefuseNested, "_pyro_sample", lambda self, msg: None)
    t, y = torch.rand(N, 1), torch.randn(N, 1)
    guide = StructuredGPGuide(two_processes, encoders={"f": IndexNet(1, 1), "log.variance": None})
    bound = StructuredELBO(num_particles=2, max_plate_nesting=0, corruption=mask_entries(0.5))
    for _ in range(3):
        bound.loss_and_grads(two_processes, guide, t, y)
    assert len(looks) == 1


@pytest.mark.parametrize("local", [False, True])
def test_frozen_parameters_of_networks_stay_frozen(local):
    with pyro.settings.context(module_local_params=local):
        decoder = nn.Linear(Q, D)
        decoder.weight.requires_grad_(False)
        before = decoder.weight.clone(), decoder.bias.clone()
        model = GPVAE(Matern(1, 1.5, batch_shape=(Q,)), decoder)
        svi = SVI(model, StructuredGPGuide(model, encoders={"f": IndexNet(D, Q)}), Adam({"lr": 0.1}), StructuredELBO())
        svi.step(*make_data())
        assert torch.equal(model.decoder.weight, before[0])
        assert not torch.equal(model.decoder.bias, before[1])


def test_networks_that_share_a_parameter_are_refused():
    first, second = nn.Linear(Q, Q), nn.Linear(Q, Q)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' as one"):
        GPVAE(RBF(1, batch_shape=(Q,)), nn.Sequential(first, nn.Tanh(), second))
    twice = nn.Linear(Q, Q)
    GPVAE(RBF(1, batch_shape=(Q,)), nn.Sequential(twice, nn.Tanh(), twice))
