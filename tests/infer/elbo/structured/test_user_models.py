"""Bounds of models of a user's own, against quadrature and closed forms."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.networks import FactorNet
from tests.helpers.structured import N, Pooled, matern, two_processes
from tests.infer.elbo.structured._bounds import (
    ESTIMATORS,
    assert_mean_of_runs,
    condition_told,
    every_estimator,
    hermite,
    many_particles,
)

pytestmark = pytest.mark.usefixtures("float64")
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
