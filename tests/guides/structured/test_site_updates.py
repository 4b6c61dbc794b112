"""Natural-gradient updates of encoded sites: exactness, monotonicity, missing data, predictions and gradients."""

import math
from copy import deepcopy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO, fit
from pyro_lvgp.infer.protocols import HasPointLikelihood
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.ops.quadrature import gauss_hermite
from tests.helpers.site_updates import Constant, N, make_data
from tests.helpers.structured import posterior_of, two_processes

pytestmark = pytest.mark.usefixtures("float64")
D = 4
LIKELIHOODS = {
    "Gaussian": lambda: Gaussian(0.05, data_dim=D),
    "StudentT": lambda: StudentT(0.2),
    "Poisson": Poisson,
    "Bernoulli": Bernoulli,
    "NegativeBinomial": lambda: NegativeBinomial(5.0),
}


def make_model(latent_dim, decoder=None, likelihood=None, *, kernel=RBF, **options):
    kernel = kernel(1, lengthscale=0.2, batch_shape=(latent_dim,))
    total = latent_dim + options.get("independent_dim", 0)
    return GPVAE(kernel, decoder or nn.Linear(total, D), likelihood or Gaussian(0.05, data_dim=D), **options)


def make_guide(model, encoder=None, **options):
    encoders = {"f": encoder or Constant(model.kernel.batch_shape[0])}
    if model.independent_dim:
        encoders["w"] = Constant(model.independent_dim, 5.0, 0.01)
    return StructuredGPGuide(model, encoders=encoders, **options).eval()


def exact(model, x, y):
    """Posterior mean and covariance of one series of processes [Q N], and log evidence, under a linear decoder."""
    K = torch.block_diag(*model.kernel(x))
    W, noise = model.decoder.weight, model.likelihood.params()
    seen = (~torch.isnan(y)).flatten()
    loadings = torch.einsum("dq,nm->ndqm", W, torch.eye(len(x))).reshape(len(x) * D, -1)[seen]
    S = loadings @ K @ loadings.T + torch.diag(noise.expand(len(x), D).flatten()[seen])
    residual = (y - model.decoder.bias).flatten()[seen]
    gain = torch.linalg.solve(S, loadings @ K).T
    evidence = MultivariateNormal(torch.zeros(len(S)), S).log_prob(residual)
    return gain @ residual, K - gain @ loadings @ K, evidence


@pytest.mark.parametrize("encoder", [(100.0, 1e-3), (0.0, 1.0), (-2.0, 30.0)], ids=str)
@pytest.mark.parametrize("method", ["dense", "state-space"])
def test_one_update_is_exact_for_one_latent_a_linear_decoder_and_gaussian_noise(encoder, method, bounds):
    model = make_model(1, kernel=Matern)
    x, y = make_data(model)
    mean, covariance, evidence = exact(model, x, y)
    q = posterior_of(make_guide(model, Constant(1, *encoder), method=method, num_eval_site_updates=1), x, y)
    torch.testing.assert_close(q.mean[0], mean)
    torch.testing.assert_close(q.variance[0], covariance.diagonal())
    torch.testing.assert_close(bounds[-1][-1], evidence)


def closed_form_bound(model, x, y, posterior):
    """The bound for a linear decoder, and Gaussian noise or Poisson counts."""
    mean = posterior.mean.mT @ model.decoder.weight.T + model.decoder.bias
    variance = posterior.variance.mT @ model.decoder.weight.square().T
    expected = model.likelihood.expected_log_prob(y.nan_to_num(), mean, variance, model.likelihood.params())
    return torch.where(y.isnan(), 0.0, expected).sum() - kl_divergence(posterior, model.prior(x).base_dist).sum()


def optimise(model, x, y):
    """Posterior whose sites maximise the bound, found by L-BFGS, and the bound."""
    guide = StructuredGPGuide(model)
    guide(x, y)
    guide.scales.f = torch.ones_like(guide.scales.f)
    optimizer = torch.optim.LBFGS(guide.parameters(), max_iter=300, history_size=30, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -closed_form_bound(model, x, y, posterior_of(guide, x, y))
        loss.backward()
        return loss

    optimizer.step(closure)
    best = posterior_of(guide, x, y)
    return best, closed_form_bound(model, x, y, best)


def test_updates_reach_the_best_diagonal_sites_of_several_latents(bounds):
    model = make_model(3)
    x, y = make_data(model)
    q = posterior_of(make_guide(model, num_eval_site_updates=200), x, y)
    torch.testing.assert_close(bounds[-1][-1], closed_form_bound(model, x, y, q))  # draws have no error here
    torch.testing.assert_close(bounds[-1][-1], optimise(model, x, y)[1], rtol=0.0, atol=1e-3)
    assert bounds[-1][-1] < exact(model, x, y)[2] - 1.0  # sites that couple the latents are better


def test_updates_with_a_poisson_likelihood_end_at_a_stationary_point_of_the_bound():
    """Site parameters are those of the expected derivatives, by quadrature; and those of the optimised bound."""
    model = make_model(1, nn.Linear(1, D), Poisson())
    model.decoder.weight.data = torch.tensor([[1.0], [0.7], [-0.5], [0.2]])
    model.decoder.bias.data.fill_(1.0)
    x, y = make_data(model)
    W, b = model.decoder.weight.squeeze(), model.decoder.bias
    q = posterior_of(make_guide(model, num_eval_site_updates=50), x, y)
    mean, variance = q.mean[0], q.variance[0]

    def expect(function):
        return gauss_hermite(function, mean, variance, num_points=40)

    observed, counts = ~torch.isnan(y), y.nan_to_num()
    rates = torch.stack([expect(lambda f, d=d: (W[d] * f + b[d]).exp()) for d in range(D)], -1)
    gradient = torch.where(observed, W * (counts - rates), 0.0).sum(-1)
    curvature = torch.where(observed, W.square() * rates, 0.0).sum(-1)
    torch.testing.assert_close(q.site_precision[0], curvature, rtol=5e-3, atol=1e-8)
    torch.testing.assert_close((q.site_precision * q.site_mean)[0], gradient + curvature * mean, rtol=5e-3, atol=5e-3)

    best, _ = optimise(model, x, y)
    torch.testing.assert_close(mean, best.mean[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(variance, best.variance[0], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kernel", [RBF, Matern])
def test_the_bound_of_no_series_falls(likelihood, kernel, bounds):
    model = make_model(2, MLP(3, D, [10]), LIKELIHOODS[likelihood](), kernel=kernel, independent_dim=1)
    x, y = make_data(model, 3)
    for encoder in (Constant(2), Constant(2, 0.5, 0.5), IndexNet(D, 2)):
        copied = deepcopy(encoder)
        guide = make_guide(model, encoder, num_eval_site_updates=8)
        guide(x, y)
        of_steps = bounds.pop()
        assert of_steps.shape == (9, 3)
        assert (of_steps.diff(dim=0) >= 0.0).all()
        assert (of_steps[-1] > of_steps[0] + 1.0).all()
        if kernel is Matern:
            linear_time = make_guide(model, copied, num_eval_site_updates=8, method="state-space")
            torch.testing.assert_close(
                posterior_of(linear_time, x, y).mean, posterior_of(guide, x, y).mean, rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(bounds.pop(-2), of_steps)


def test_the_bound_that_is_estimated_with_other_draws_rises():
    model = make_model(2, MLP(2, D, [10]), LIKELIHOODS["StudentT"]())
    x, y = make_data(model)
    guide, estimates = make_guide(model, IndexNet(D, 2)), []
    for guide.num_eval_site_updates in (0, 8):
        estimates.append(-torch.tensor([StructuredELBO(num_particles=20).loss(model, guide, x, y) for _ in range(10)]))
    before, after = estimates
    assert after.mean() > before.mean() + 5.0 * (before.var() / 10 + after.var() / 10).sqrt()


def test_each_series_is_updated_as_if_it_were_alone():
    model = make_model(2, MLP(3, D, [10]), independent_dim=1)
    x, y = make_data(model, 3)
    y[1] += 20.0  # in this series steps of another size are accepted
    guide = make_guide(model)
    together = {site: posterior_of(guide, x, y, site=site) for site in ("f", "w")}
    for i in range(3):
        for site, q in together.items():
            alone = posterior_of(guide, x, y[i], site=site)
            torch.testing.assert_close(q.mean[i].reshape(alone.mean.shape), alone.mean)
            torch.testing.assert_close(q.variance[i].reshape(alone.mean.shape), alone.variance)


def test_rows_with_nothing_observed_have_no_site():
    model = make_model(2, independent_dim=1)
    x, y = make_data(model)
    guide = make_guide(model)
    empty = y.isnan().all(-1)
    q, without = posterior_of(guide, x, y), posterior_of(guide, x[~empty], y[~empty])
    assert (q.site_precision[:, empty] == 0.0).all()
    torch.testing.assert_close(q.mean[:, ~empty], without.mean)
    w = posterior_of(guide, x, y, site="w")
    torch.testing.assert_close(w.mean[empty], torch.zeros(2, 1))
    torch.testing.assert_close(w.variance[empty], torch.ones(2, 1))
    nothing = posterior_of(guide, x, torch.full_like(y, torch.nan))
    torch.testing.assert_close(nothing.mean, torch.zeros(2, N))


@pytest.mark.parametrize("method", ["dense", "state-space"])
def test_updates_in_float32(method):
    torch.set_default_dtype(torch.float32)
    model = make_model(2, kernel=Matern)
    x, y = make_data(model)
    guide = make_guide(model, method=method, num_eval_site_updates=60)
    q = posterior_of(guide, x, y)
    assert q.mean.dtype == torch.float32
    model, guide, x, y = (part.double() for part in (model, guide, x, y))
    exactly = posterior_of(make_guide(model, method=method, num_eval_site_updates=60).double(), x, y)
    torch.testing.assert_close(q.mean.double(), exactly.mean, rtol=0.0, atol=0.02)
    torch.testing.assert_close(q.variance.double(), exactly.variance, rtol=0.02, atol=1e-4)


def test_a_bad_encoder_does_not_ruin_predictions():
    model = make_model(2)
    model.decoder.weight.data = torch.randn(D, 2)
    x, y = make_data(model)
    truth = y.clone()
    y[15:, 0] = torch.nan
    hidden = y.isnan() & ~truth.isnan()
    mean = exact(model, x, y)[0].reshape(2, N).mT @ model.decoder.weight.T + model.decoder.bias
    best = (mean - truth)[hidden].square().mean().sqrt()
    by_default = model.impute(make_guide(model), x, y).mean
    as_encoded = model.impute(make_guide(model, num_eval_site_updates=0), x, y).mean
    assert (by_default - truth)[hidden].square().mean().sqrt() < 1.2 * best
    assert (as_encoded - truth)[hidden].square().mean().sqrt() > 20.0 * best
    ahead = model.forecast(make_guide(model), x, y, horizon=2)
    assert (ahead.mean - model.decoder.bias).abs().max() < 5.0


def test_evaluation_mode_updates_and_training_mode_does_not():
    model = make_model(1)
    x, y = make_data(model)
    guide = make_guide(model)
    guide(x, y)
    mean = exact(model, x, y)[0]
    torch.testing.assert_close(guide.median(x, y)["f"][0], mean)
    torch.testing.assert_close(posterior_of(guide.train(), x, y).mean.amin(), torch.tensor(100.0), rtol=0.1, atol=0.0)
    model.predict(guide, x, y)  # in evaluation mode
    with torch.inference_mode():
        predicted = model.predict(guide, x.clone(), y.clone(), num_samples=2000).f_mean
    expected = (mean[:, None] @ model.decoder.weight.T + model.decoder.bias).detach()
    torch.testing.assert_close(predicted, expected, rtol=0.0, atol=0.01)


def test_gradients_through_the_updates():
    model = make_model(2, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, D)), StudentT(0.3), independent_dim=1)
    x, y = make_data(model)
    guide = make_guide(model, Constant(2, 0.3, 0.4), num_site_updates=2).train()
    guide(x, y)

    def loss():
        trace = poutine.trace(guide).get_trace(x, y)
        f, w = (trace.nodes[site]["fn"] for site in ("f", "w"))
        return f.mean.sum() + f.variance.log().sum() + w.mean.square().sum()

    parameters = {
        "encoder": guide.encoders.f.loc,
        "other encoder": guide.encoders.w.scale,
        "kernel": model.kernel.lengthscale_unconstrained,
        "decoder": model.decoder[0].weight,
        "noise": model.likelihood.scale_unconstrained,
    }
    gradients = torch.autograd.grad(loss(), list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        entry, ends = parameter.data.view(-1), []
        for step in (1e-5, -2e-5):
            entry[0] += step
            ends.append(loss().detach())
        entry[0] += 1e-5
        torch.testing.assert_close(gradient.flatten()[0], (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("num_particles", [1, 3])
def test_training_through_updates(num_particles):
    model = make_model(2, MLP(3, D, [10]), independent_dim=1)
    model.likelihood.variance = PyroSample(dist.LogNormal(torch.full((D,), -2.0), 1.0).to_event(1))
    x, y = make_data(model, 2)
    guide = make_guide(model, IndexNet(D, 2), num_site_updates=2).train()
    loss, before = StructuredELBO(num_particles=num_particles), deepcopy(guide.encoders.state_dict())
    history = fit(model, guide, x, y, loss=loss, num_steps=20, progress=False)
    assert sum(history.losses[-5:]) < sum(history.losses[:5])
    assert all((value != before[name]).any() for name, value in guide.encoders.state_dict().items())


def test_each_particle_is_updated_given_its_own_draws():
    model = make_model(2, MLP(2, D, [10]))
    model.likelihood.variance = PyroSample(dist.LogNormal(torch.full((D,), -2.0), 1.0).to_event(1))
    for series in ((), (2,)):
        x, y = make_data(model, *series)
        guide = make_guide(model)
        guide(x, y)
        with pyro.plate("particles", 3, dim=-2 - len(series)):
            trace = poutine.trace(guide).get_trace(x, y)
        drawn, q = trace.nodes["likelihood.variance"]["value"], trace.nodes["f"]["fn"].base_dist
        assert q.mean.shape == (3, *series, 1, 2, N)
        for i in range(3):
            given = {"likelihood.variance": drawn[i].reshape(D)}
            alone = posterior_of(poutine.condition(guide, given), x, y)
            torch.testing.assert_close(q.mean[i].reshape(alone.mean.shape), alone.mean)


class Rates(PyroModule):
    """A user's model of counts with one rate."""

    def __init__(self):
        super().__init__()
        self.kernel = RBF(1, lengthscale=0.2)

    def entries(self, rate):
        return dist.Poisson((rate[..., None] + torch.linspace(-1.0, 1.0, D)).exp())

    def forward(self, x, y):
        rate = pyro.sample("rate", GaussianProcess(self.kernel, x))
        with pyro.plate("points", len(x), dim=-1):
            pyro.sample("y", self.entries(rate).mask(~y.isnan()).to_event(1), obs=y.nan_to_num())

    def log_prob_of_points(self, latents, x, y):
        return torch.where(y.isnan(), 0.0, self.entries(latents["rate"]).log_prob(y.nan_to_num())).sum(-1)


def test_a_model_of_a_user():
    model = make_model(1, nn.Linear(1, D), Poisson())
    model.decoder.weight.data.fill_(1.0)
    model.decoder.bias.data = torch.linspace(-1.0, 1.0, D)
    x, y = make_data(model)
    own = StructuredGPGuide(Rates(), encoders={"rate": Constant(1)}).eval()
    ours = posterior_of(make_guide(model), x, y)
    q = posterior_of(own, x, y, site="rate")
    torch.testing.assert_close(q.mean, ours.mean[0])
    torch.testing.assert_close(q.variance, ours.variance[0])


def test_models_and_sites_without_updates():
    x = torch.linspace(0.0, 1.0, 5)[:, None]
    guide = StructuredGPGuide(two_processes, encoders={"f": IndexNet(1, 1)}).eval()
    assert guide(x, torch.randn(5, 1))["f"].shape == (5,)
    model = make_model(2)
    x, y = make_data(model)
    free = StructuredGPGuide(model)
    before = posterior_of(free, x, y).mean
    torch.testing.assert_close(posterior_of(free.eval(), x, y).mean, before)
    assert isinstance(model, HasPointLikelihood)


def test_latents_of_points_without_an_entry_in_encoders():
    model = make_model(2, independent_dim=1)
    x, y = make_data(model)
    guide = StructuredGPGuide(model, encoders={"f": Constant(2)}).eval()
    torch.testing.assert_close(posterior_of(guide, x, y).mean.amin(), torch.tensor(100.0), rtol=0.1, atol=0.0)
    both = StructuredGPGuide(model, encoders={"f": Constant(2), "w": None}, num_site_updates=3).eval()
    assert (posterior_of(both, x, y).mean.abs() < 10.0).all()
    torch.testing.assert_close(posterior_of(both, x, y, site="w").mean, torch.zeros(N, 1))
    with pytest.raises(ValueError, match=r"latents of the points among the encoders.*got none for \['w'\]"):
        StructuredGPGuide(model, encoders={"f": Constant(2)}, num_site_updates=3)(x, y)


def test_refused_options():
    model, encoders = make_model(2), {"f": IndexNet(D, 2)}
    with pytest.raises(ValueError, match="expected num_site_updates of 0 or more, got -1"):
        StructuredGPGuide(model, encoders=encoders, num_site_updates=-1)
    with pytest.raises(ValueError, match="expected num_eval_site_updates of 0 or more, got -1"):
        StructuredGPGuide(model, encoders=encoders, num_eval_site_updates=-1)
    for step_size in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="expected site_step_size above 0 and at most 1"):
            StructuredGPGuide(model, encoders=encoders, site_step_size=step_size)
    with pytest.raises(TypeError, match=r"expected a model with log_prob_of_points.*got function"):
        StructuredGPGuide(two_processes, encoders={"f": IndexNet(1, 1)}, num_site_updates=1)
    with pytest.raises(TypeError, match=r"an encoder for num_site_updates=1, got GPVAE and encoders of \[\]"):
        StructuredGPGuide(model, num_site_updates=1)
