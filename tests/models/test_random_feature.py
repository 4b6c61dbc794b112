"""The random-feature model and its guide: exact where they should be, below the evidence elsewhere."""

import math
from contextlib import nullcontext
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.nn import PyroSample
from pyro.optim import Adam
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp import conjugate
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.conjugate.feature_regression import gaussian_log_density, weight_posterior
from pyro_lvgp.datasets import s_curve
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI, MeanFieldELBO, fit
from pyro_lvgp.infer.elbo.handlers import Bounding
from pyro_lvgp.kernels import random_features
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, Logistic, LogNormal, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.likelihoods import polya_gamma as polyagamma
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.networks import IndexNet, ZeroImputation

N, D, Q, F, C = 12, 3, 2, 4, 3


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def Y():
    return torch.randn(N, D)


def _holes(Y):
    Y = Y.clone()
    Y[torch.rand(Y.shape) < 0.5] = torch.nan
    Y[:, 0] = torch.where(torch.isnan(Y).all(1), torch.ones(len(Y)), Y[:, 0])
    return Y


def _pair(Y, likelihood=None, latent_dim=Q, **options):
    model = RandomFeatureLVM(len(Y), D, latent_dim, num_frequencies=F, num_components=C, likelihood=likelihood).initialize(Y)
    guide = RandomFeatureGuide(model, **options)
    guide(Y)
    return model, guide


def _pin(guide):
    """Take the noise out of latents and frequencies."""
    guide.X.scale = torch.full_like(guide.X.scale, 1e-9)
    guide.omega.scale = torch.full_like(guide.omega.scale, 1e-9)


def _features(model, guide):
    """At the means of a pinned guide."""
    return model.features(guide.X.loc, guide.omega.loc).detach()


def _traces(model, guide, Y):
    guide_trace = poutine.trace(guide).get_trace(Y)
    model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(Y)
    guide_trace.compute_log_prob()
    model_trace.compute_log_prob()
    return guide_trace.nodes, model_trace.nodes


def _settle(guide, Y):
    """Pin a guide, and let its variational parameters converge."""
    _pin(guide)
    for _ in range(60):
        guide.a.c = guide._update_weights(Y)["guide.a.c"]


LIKELIHOODS = {
    "bernoulli": Bernoulli,
    "binomial": lambda: Binomial(5),
    "negative-binomial": lambda: NegativeBinomial(torch.tensor([3.0, 6.0, 9.0]), data_dim=D),
}
FORMS = {
    "bernoulli": lambda y: polyagamma.binomial(y, torch.ones(())),
    "binomial": lambda y: polyagamma.binomial(y, torch.tensor(5.0)),
    "negative-binomial": lambda y: polyagamma.negative_binomial(y, torch.tensor([3.0, 6.0, 9.0])),
}


@pytest.mark.parametrize("bounding", [nullcontext, Bounding])
@pytest.mark.parametrize("data_dim", [D, None])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_weights_are_collapsed_exactly_at_every_draw_and_at_their_mean(Y, holes, frequencies, data_dim, bounding):
    """log p(y | a) + log p(a) − log q(a) is the dense evidence of the draws of X and ω; so are its gradients."""
    Y = _holes(Y) if holes else Y
    model, guide = _pair(Y, Gaussian(0.3, data_dim=data_dim), frequencies=frequencies)
    with bounding():
        q, p = _traces(model, guide, Y)
    assert torch.equal(q["a"]["value"], q["a"]["fn"].mean) == (bounding is Bounding)
    ours = p["y"]["log_prob"].sum() + p["a"]["log_prob"].sum() - q["a"]["log_prob"].sum()
    features, noise = model.features(q["X"]["value"], q["omega"]["value"]), model.likelihood.variance.expand(D)
    dense = 0.0
    for d in range(D):
        seen = ~torch.isnan(Y[:, d])
        K = features[seen] @ features[seen].mT + noise[d] * torch.eye(int(seen.sum()))
        dense = dense + MultivariateNormal(torch.zeros(len(K)), K).log_prob(Y[seen, d] - model.mean[d])
    torch.testing.assert_close(ours, dense)
    parameters = [*model.likelihood.parameters(), *guide.X.parameters(), *guide.omega.parameters()]
    slopes = (torch.autograd.grad(value, parameters, retain_graph=True) for value in (ours, dense))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


class _Geometric(Logistic):
    """Failures before the first success, as a user would write it."""

    def distribution(self, f, params):
        return dist.Geometric(logits=-f)

    def inverse_link(self, y):
        return (y + 0.5).log()

    def exponents(self, y, params):
        return y, y + 1.0


def test_weights_of_another_logistic_likelihood_are_collapsed_too():
    """A geometric one is negative binomial with r = 1."""
    Y = _holes(NegativeBinomial(1.0)(torch.randn(N, D)).sample().detach())
    known = NegativeBinomial(1.0).requires_grad_(False)
    bounds = []
    for likelihood in (_Geometric(), known):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = _pair(Y, likelihood, frequencies="gaussian")
        assert guide.weights == "collapsed"
        losses = fit(model, guide, Y, blocks=guide.blocks(), num_steps=5, progress=False).losses
        bounds.append(losses)
        y, f = torch.tensor([0.0, 3.0]), torch.tensor([-1.0, 2.0], requires_grad=True)
        (slope,) = torch.autograd.grad(likelihood(f).log_prob(y).sum(), f)
        torch.testing.assert_close(likelihood.log_prob_derivatives(y, f.detach(), likelihood.params())[0], slope)
    torch.testing.assert_close(*map(torch.as_tensor, bounds))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_logistic_bound_lies_between_polya_gamma_and_the_evidence(name):
    """The likelihood itself under the Gaussian weights of the Pólya-gamma bound is tighter than that bound."""
    pyro.set_rng_seed(3)
    likelihood = LIKELIHOODS[name]()
    Y = likelihood(torch.randn(N, D)).sample().detach()
    # The likelihood is known: initialize leaves it as it is.
    model, guide = _pair(_holes(Y), LIKELIHOODS[name]().requires_grad_(False), frequencies="gaussian")
    Y = guide.data
    model.mean = torch.zeros(D)
    _settle(guide, Y)

    def log_weights(number):
        with pyro.plate("draws", number, dim=-2), torch.no_grad():
            q, p = _traces(model, guide, Y)
        return (p["y"]["log_prob"].sum(-1) + p["a"]["log_prob"].sum(-1) - q["a"]["log_prob"].sum(-1)).squeeze()

    draws, others = log_weights(400), log_weights(4000)
    form = FORMS[name](torch.nan_to_num(Y)).where(~torch.isnan(Y))
    lower = polyagamma.collapsed_log_bound(_features(model, guide), form, guide.a.c).sum().detach()
    error = draws.std() / 20.0
    assert draws.mean() > lower - 3.0 * error
    # The evidence, which other draws estimate by importance weighting.
    evidence = others.logsumexp(0) - math.log(len(others))
    weights = (others - evidence).exp()
    assert draws.mean() - 3.0 * error < evidence + 3.0 * weights.std() / len(others) ** 0.5
    assert evidence - lower < 2.0


@pytest.mark.parametrize("bound", [Trace_ELBO(), TraceMeanField_ELBO()])
def test_bounds_of_blocks_take_the_weights_at_their_mean(Y, bound):
    """And have the same value there as at a draw, which is what all others get; so do bounds of some rows."""
    model, guide = _pair(Y, frequencies="gaussian")
    _pin(guide)
    vi, some = BlockCoordinateVI(model, guide, guide.blocks(), loss=bound), torch.tensor([0, 2])
    at_mean, at_draw = (seeded(0)(loss)(*args) for loss, args in ((vi.evaluate_loss, (Y,)), (bound.loss, (model, guide, Y))))
    assert at_mean == pytest.approx(at_draw, rel=1e-9)
    spread = {}
    for handler in (Bounding, nullcontext):
        for args in ((Y,), (Y[some], some)):
            with handler(), torch.no_grad():
                spread[handler, len(args)] = float((guide(*args)["a"] - guide(*args)["a"]).abs().max())
    assert spread.pop((Bounding, 1)) < 1e-6
    assert min(spread.values()) > 1e-2


def test_latents_are_those_of_the_guide(Y):
    _, guide = _pair(Y)
    torch.testing.assert_close(guide.latents().mean, guide.median(Y, num_samples=2)["X"])
    idx = torch.tensor([3, 1])
    torch.testing.assert_close(guide.latents(Y[idx], idx).stddev, guide.X.scale[idx])
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected all 12 rows, .* got 5 rows; .* model.infer_latents\(guide, Y\)"):
        guide.latents(Y[:5])
    _, guide = _pair(Y, encoders={"X": IndexNet(D, Q, (4,))})
    torch.testing.assert_close(guide.latents(Y).mean, guide.median(Y, num_samples=2)["X"])
    with pytest.raises(ValueError, match="expected data for the encoder"):
        guide.latents()


@pytest.mark.parametrize("holes", [False, True])
def test_a_prior_on_the_noise_is_one_site_outside_the_rows(Y, holes):
    Y = _holes(Y) if holes else Y
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    nodes = poutine.trace(model).get_trace(Y).nodes
    assert [name for name in nodes if "variance" in name and nodes[name]["type"] == "sample"] == ["likelihood.variance"]
    assert nodes["likelihood.variance"]["fn"].batch_shape == ()
    rows = nodes["y"]["fn"]
    slow = dist.Normal(rows.base_dist.base_dist.f_mean, nodes["likelihood.variance"]["value"].sqrt())
    expected = torch.where(torch.isnan(Y), 0.0, slow.log_prob(torch.nan_to_num(Y))).sum(-1)
    torch.testing.assert_close(rows.log_prob(nodes["y"]["value"]), expected)


def test_latents_need_a_guide_that_has_run(Y):
    with pytest.raises(RuntimeError, match=r"call guide\(Y\) first"):
        RandomFeatureGuide(RandomFeatureLVM(N, D, Q)).latents()


def test_touching_points_start_where_the_data_are():
    """Counts without overdispersion have an r far above their mean, which is then far out on the logit scale."""
    counts = torch.poisson(torch.full((40, 5), 3.0))
    model = RandomFeatureLVM(40, 5, 2, num_frequencies=8, likelihood=NegativeBinomial()).initialize(counts)
    guide = RandomFeatureGuide(model)
    guide(counts)
    assert model.likelihood.dispersion.item() == pytest.approx(30.0 * counts.mean().item())
    torch.testing.assert_close(guide.a.c.detach(), (model.likelihood.inverse_link(counts).square() + 1.0).sqrt().detach())
    BlockCoordinateVI(model, guide, guide.blocks()).step(counts)
    mean = model.reconstruct(guide, counts, num_samples=4).mean
    assert (mean.mean() - counts.mean()).abs() < 0.5


@pytest.mark.parametrize("start", [0.25, 4.0])
def test_a_dispersion_is_found_again(start):
    """The counts of 20 functions of a line, with r = 1: 3000 of them tell r to some 5 %."""
    functions = random_features(torch.randn(150, 1), torch.randn(8, 1) / (2 * math.pi)) @ torch.randn(16, 20)
    counts = dist.NegativeBinomial(1.0, logits=functions + 1.0).sample()
    model = RandomFeatureLVM(150, 20, 1, num_frequencies=8, num_components=2, likelihood=NegativeBinomial())
    model.initialize(counts).likelihood.dispersion = torch.tensor(start)
    guide = RandomFeatureGuide(model)
    vi = BlockCoordinateVI(model, guide, guide.blocks(learning_rate=0.05))
    for _ in range(150):
        vi.step(counts)
    assert 0.85 < model.likelihood.dispersion < 1.15


def test_touching_points_settle_where_the_bound_is_flat():
    Y = Bernoulli()(torch.randn(N, D)).sample()
    model, guide = _pair(Y, Bernoulli(), frequencies="gaussian")
    model.mean = torch.zeros(D)
    _settle(guide, Y)
    c = guide.a.c.detach().requires_grad_()
    form = polyagamma.binomial(Y, torch.ones(()))
    (slope,) = torch.autograd.grad(polyagamma.collapsed_log_bound(_features(model, guide), form, c).sum(), c)
    torch.testing.assert_close(slope, torch.zeros(N, D), rtol=0.0, atol=1e-7)


def _filled(Y):
    """A pinned pair with filled weights, and the exact posterior of the weights."""
    model, guide = _pair(Y, Gaussian(0.3), weights="filled", frequencies="gaussian")
    _pin(guide)
    zero = torch.zeros_like(Y)
    return model, guide, weight_posterior(_features(model, guide), *model.weight_sites(Y, zero, zero))


def test_filled_weights_are_collapsed_ones_where_nothing_is_missing(Y):
    model, guide, exact = _filled(Y)
    assert exact.precision_tril.shape == (1, 2 * F, 2 * F)
    q, _ = _traces(model, guide, Y)
    torch.testing.assert_close(q["a"]["fn"].mean, exact.mean)
    torch.testing.assert_close(q["a"]["fn"].precision_tril, exact.precision_tril)


def test_filled_weights_may_be_collapsed_after_the_fit():
    Y = _holes(torch.randn(N, D))
    model, guide, exact = _filled(Y)
    guide(Y)
    guide.weights = "collapsed"
    q, _ = _traces(model, guide, Y)
    torch.testing.assert_close(q["a"]["fn"].mean, exact.mean)
    torch.testing.assert_close(q["a"]["fn"].precision_tril, exact.precision_tril)


def test_gaps_rest_while_weights_are_collapsed():
    Y = _holes(torch.randn(N, D))
    model, guide = _pair(Y, weights="filled")
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    gaps = guide.a.gaps.detach().clone()
    guide.weights = "collapsed"
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    assert torch.equal(guide.a.gaps, gaps)
    guide.weights = "filled"
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    assert not torch.equal(guide.a.gaps, gaps)


@pytest.mark.parametrize(
    ("weights", "others"),
    [("filled", ["explicit", "shared"]), ("collapsed", ["filled", "explicit"]), ("explicit", ["collapsed", "shared"])],
)
def test_weights_stay_what_they_ran_with(Y, weights, others):
    _, guide = _pair(Y, weights=weights, frequencies="gaussian")
    guide.weights = weights
    for other in others:
        with pytest.raises(ValueError, match=f"weights=\"{weights}\" of a guide that has run with them, got '{other}'"):
            guide.weights = other
    assert guide.weights == weights


def test_filling_gaps_raises_the_bound_to_that_of_the_exact_means():
    Y = _holes(torch.randn(N, D))
    model, guide, exact = _filled(Y)
    features, observed = _features(model, guide), ~torch.isnan(Y)

    def bound():
        """Of the data, in closed form: E log p(y | a) − KL(q(a) ‖ p(a))."""
        weights = guide.a.posterior(model, guide.data, features)
        precision = weights.precision_tril @ weights.precision_tril.mT
        posterior = MultivariateNormal(weights.mean, precision_matrix=precision.expand(D, -1, -1))
        f = model.mean + features @ weights.mean.mT
        spread = (features @ precision.inverse().squeeze(0) * features).sum(-1, keepdim=True)
        density = dist.Normal(f, model.likelihood.variance.sqrt()).log_prob(torch.nan_to_num(Y))
        expected = torch.where(observed, density - 0.5 * spread / model.likelihood.variance, 0.0).sum()
        prior = MultivariateNormal(torch.zeros(2 * F), torch.eye(2 * F))
        return (expected - kl_divergence(posterior, prior).sum()).item()

    guide(Y)
    bounds = [bound()]
    for _ in range(400):
        guide.a.gaps = guide._update_weights(Y)["guide.a.gaps"]
        bounds.append(bound())
    assert min(b - a for a, b in pairwise(bounds)) > -1e-8
    assert bounds[-1] > bounds[0] + 0.1
    torch.testing.assert_close(guide.a.posterior(model, guide.data, features).mean, exact.mean, rtol=0.0, atol=1e-5)
    centred = torch.nan_to_num(Y - model.mean)
    assert bounds[-1] < gaussian_log_density(features, centred, observed, model.likelihood.variance[None]).sum()
    # What guide and model say of one draw of the weights is this bound on average.
    with pyro.plate("draws", 4000, dim=-2), torch.no_grad():
        q, p = _traces(model, guide, Y)
    terms = p["y"]["log_prob"].sum(-1) + p["a"]["log_prob"].sum(-1) - q["a"]["log_prob"].sum(-1)
    assert abs(terms.mean().item() - bounds[-1]) < 4.0 * terms.std().item() / len(terms) ** 0.5


def _kernel_bound(model, guide):
    """What α, v and assignments contribute to the bound, in closed form."""
    alpha = dist.Gamma(guide.alpha.shape, guide.alpha.rate)
    v = dist.Beta(guide.v.a, guide.v.b)
    log_alpha = torch.digamma(alpha.concentration) - alpha.rate.log()
    log_left = torch.digamma(guide.v.b) - torch.digamma(guide.v.a + guide.v.b)
    shape, rate = model.concentration
    prior_alpha = shape * rate.log() - torch.lgamma(shape) + (shape - 1.0) * log_alpha - rate * alpha.mean
    prior_v = (log_alpha + (alpha.mean - 1.0) * log_left).sum()
    mixture = model.spectral_points(conjugate.stick_log_weights(guide.v.a, guide.v.b))
    log_pi = conjugate.stick_log_weights(guide.v.a, guide.v.b)
    phi = guide.assignments()
    points = (phi * (log_pi - phi.log())).sum()
    if guide.frequencies == "gaussian":
        gaussian = dist.Normal(guide.omega.loc[:, None], guide.omega.scale[:, None])
        points = points - (phi * kl_divergence(gaussian, mixture._components()).sum(-1)).sum()
    return prior_alpha + prior_v + points + alpha.entropy() + v.entropy().sum()


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_closed_forms_never_lower_the_bound_and_settle_at_its_maximum(Y, frequencies):
    model, guide = _pair(Y, frequencies=frequencies)
    blocks = {block.name: block for block in guide.blocks()}
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
        bounds = [_kernel_bound(model, guide)]
        for _ in range(200):
            for name, (first, second) in {"sticks": ("v.a", "v.b"), "concentration": ("alpha.shape", "alpha.rate")}.items():
                values = blocks[name].update(Y)
                for path in (first, second):
                    site, parameter = path.split(".")
                    setattr(getattr(guide, site), parameter, values[f"guide.{path}"])
                bounds.append(_kernel_bound(model, guide))
    assert (torch.stack(bounds).diff() >= -1e-10).all()
    slopes = torch.autograd.grad(_kernel_bound(model, guide), [*guide.v.parameters(), *guide.alpha.parameters()])
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-5)


def test_closed_forms_pass_the_check_of_the_bound_that_is_climbed(Y):
    model, guide = _pair(Y, frequencies="mixture")
    vi = BlockCoordinateVI(model, guide, guide.blocks(), check_updates=100)
    for _ in range(3):
        vi.step(Y)


def test_bound_holds_the_kernel_bound_in_expectation(Y):
    """Analytic divergences in TraceMeanField_ELBO add up to the closed form, but for X and the data."""
    model, guide = _pair(Y)
    with pyro.plate("draws", 1000, dim=-2), torch.no_grad():
        q, p = _traces(model, guide, Y)
    terms = -sum(kl_divergence(q[name]["fn"], p[name]["fn"]) for name in ("alpha", "v", "omega")).squeeze()
    assert terms.shape == (1000,)
    assert abs(terms.mean() - _kernel_bound(model, guide)) < 4.0 * terms.std() / len(terms) ** 0.5


@pytest.mark.parametrize("holes", [False, True])
def test_natural_gradients_at_full_batch_are_the_closed_form(Y, holes):
    Y = _holes(Y) if holes else Y
    model, guide = _pair(Y, Gaussian(0.4), weights="explicit")
    _pin(guide)
    blocks = {block.name: block for block in guide.blocks(damping=1.0)}
    values = blocks["weights"].update(Y)
    observed, features = ~torch.isnan(Y), _features(model, guide)
    sites = model.weight_sites(Y, torch.zeros(N, D), torch.zeros(N, D))
    expected = weight_posterior(features, *sites)
    precision = expected.precision_tril @ expected.precision_tril.mT
    torch.testing.assert_close(values["guide.a.precision"], precision.expand(D, 2 * F, 2 * F))
    mean = torch.linalg.solve(values["guide.a.precision"], values["guide.a.linear"][..., None]).squeeze(-1)
    torch.testing.assert_close(mean, expected.mean)
    # There the bound is the collapsed density.
    guide.a.linear, guide.a.precision = values["guide.a.linear"].detach(), values["guide.a.precision"].detach()
    q, _ = _traces(model, guide, Y)
    prior = dist.Normal(torch.zeros(2 * F), 1.0).to_event(1)
    f_mean, f_variance = features @ mean.mT, torch.einsum("nl,dlk,nk->nd", features, q["a"]["fn"].covariance_matrix, features)
    likelihood = model.likelihood.expected_log_prob(
        torch.nan_to_num(Y), model.mean + f_mean, f_variance, model.likelihood.params()
    )
    bound = torch.where(observed, likelihood, 0.0).sum() - kl_divergence(q["a"]["fn"], prior).sum()
    exact = gaussian_log_density(features, torch.nan_to_num(Y - model.mean), observed, model.likelihood.params())
    torch.testing.assert_close(bound, exact.sum())


def test_a_shared_covariance_is_each_output_s_own_where_nothing_is_missing(Y):
    """Natural gradients, bounds and their slopes in all else."""
    found = []
    for weights in ("explicit", "shared"):
        pyro.clear_param_store()
        torch.manual_seed(1)
        model, guide = _pair(Y, Gaussian(0.4), weights=weights)
        values = guide.blocks()[-1].update(Y)
        guide.a.linear, guide.a.precision = values["guide.a.linear"].detach(), values["guide.a.precision"].detach()
        loss = MeanFieldELBO(max_plate_nesting=1)(model, guide)(Y)
        moved = [*model.parameters(), *guide.omega.parameters(), *guide.X.parameters()]
        found.append([values["guide.a.linear"], values["guide.a.precision"].expand(D, -1, -1), loss])
        found[-1] += torch.autograd.grad(loss, moved, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(*found)
    assert guide.a.precision.shape == (1, 2 * F, 2 * F)


@pytest.mark.parametrize(("likelihood", "weights"), [(Gaussian, "shared"), (Poisson, "shared"), (Poisson, "explicit")])
def test_natural_gradients_settle_at_the_maximum(likelihood, weights):
    """Where outputs lack different rows: the gradient of the bound in means and covariances is zero there."""
    Y = _holes(likelihood()(torch.randn(N, D)).sample().detach())
    model, guide = _pair(Y, likelihood(), weights=weights)
    _pin(guide)
    for _ in range(300):
        values = guide._update_weights(Y)
        guide.a.linear = torch.lerp(guide.a.linear.detach(), values["guide.a.linear"], 0.5)
        guide.a.precision = torch.lerp(guide.a.precision.detach(), values["guide.a.precision"], 0.5)
    loss = MeanFieldELBO(num_samples=1)(model, guide)
    for slope in torch.autograd.grad(loss(Y), list(guide.a.parameters())):
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("weights", ["explicit", "shared"])
@pytest.mark.parametrize("likelihood", [Gaussian, Bernoulli, Poisson])
def test_mini_batches_of_natural_gradients_are_unbiased(likelihood, weights):
    Y = _holes(likelihood()(torch.randn(N, D)).sample().detach())
    _, guide = _pair(Y, likelihood(), weights=weights)
    _pin(guide)
    update = guide.blocks()[-1].update
    whole = update(Y)
    parts = [update(Y[idx], idx) for idx in torch.randperm(N).split(4)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts) / len(parts), value)


@pytest.mark.parametrize("likelihood", [Poisson, StudentT, Bernoulli])
@pytest.mark.parametrize("weights", ["explicit", "shared"])
def test_natural_gradients_of_all_rows_do_not_lower_the_bound(likelihood, weights):
    """From anywhere, as the loss says that the block's update is never told of."""
    Y = _holes(likelihood()(2.0 * torch.randn(N, D)).sample().detach())
    model, guide = _pair(Y, likelihood(), weights=weights)
    _pin(guide)
    loss = MeanFieldELBO(num_samples=1)
    for _ in range(20):
        guide.a.linear = 5.0 * torch.randn_like(guide.a.linear)
        before = seeded(0)(loss.loss)(model, guide, Y)
        values = guide._update_weights(Y)
        assert any((values[f"guide.a.{name}"] != getattr(guide.a, name)).any() for name in ("linear", "precision"))
        guide.a.linear, guide.a.precision = values["guide.a.linear"], values["guide.a.precision"]
        assert seeded(0)(loss.loss)(model, guide, Y) <= before + 1e-5 * abs(before)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_fit_counts_of_any_size(dtype, seed):
    torch.set_default_dtype(dtype)
    pyro.set_rng_seed(seed)
    Y = torch.poisson((1.25 * torch.randn(60, 2) @ torch.randn(2, 5)).exp())
    model = RandomFeatureLVM(60, 5, Q, num_frequencies=10, num_components=C, likelihood=Poisson()).initialize(Y)
    guide = RandomFeatureGuide(model)
    vi = BlockCoordinateVI(model, guide, guide.blocks())
    losses = torch.tensor([vi.step(Y) for _ in range(100)])
    assert losses[-10:].mean() < 0.7 * losses[:10].mean()
    assert losses[-10:].std() < 0.35 * losses[-10:].mean()


def test_natural_gradients_of_wild_counts_stay_finite_and_climb():
    """Plain Newton steps overflow here: where f is low and y high, the curvature tells of peaks far away."""
    Y = torch.poisson((2.0 * torch.randn(60, 5)).exp())
    model = RandomFeatureLVM(60, 5, Q, num_frequencies=F, num_components=C, likelihood=Poisson()).initialize(Y)
    guide = RandomFeatureGuide(model)
    blocks = guide.blocks(learning_rate=0.05, damping=lambda sweep: (sweep + 2.0) ** -0.6)
    vi = BlockCoordinateVI(model, guide, blocks, loss=MeanFieldELBO(num_samples=1))
    losses = []
    for _ in range(60):
        idx = torch.randperm(60)[:20]
        losses.append(vi.step(Y[idx], idx))
    assert max(losses[-10:]) < max(losses[:10])
    assert vi.evaluate_loss(Y) < losses[0]


def test_mini_batches_of_collapsed_weights_are_unbiased(Y):
    model, guide = _pair(Y, frequencies="gaussian")
    elbo = TraceMeanField_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
    with torch.no_grad():
        whole = torch.tensor([elbo.loss(model, guide, Y) for _ in range(20)])
        parts = torch.tensor([elbo.loss(model, guide, Y[i], i) for _ in range(20) for i in torch.randperm(N).split(4)])
    parts = parts.unflatten(0, (20, 3)).mean(1)
    assert abs(whole.mean() - parts.mean()) < 4.0 * ((whole.var() + parts.var()) / 20).sqrt()


@pytest.mark.parametrize("weights", ["collapsed", "explicit", "shared"])
def test_predict_equals_exact_regression(Y, weights):
    """With latents and frequencies pinned: Gaussian-process regression with the kernel of the features."""
    model, guide = _pair(Y, Gaussian(0.2), frequencies="gaussian", weights=weights)
    _pin(guide)
    if weights != "collapsed":
        values = guide._update_weights(Y)
        guide.a.linear, guide.a.precision = (values[f"guide.a.{name}"].detach() for name in ("linear", "precision"))
    X_new = torch.randn(5, Q)
    old, new = _features(model, guide), model.features(X_new, guide.omega.loc).detach()
    gain = new @ old.mT @ torch.linalg.inv(old @ old.mT + 0.2 * torch.eye(N))
    prediction = model.predict(guide, X_new, num_samples=300)
    mean = model.mean + gain @ (Y - model.mean)
    variance = (new @ new.mT - gain @ old @ new.mT).diagonal()[:, None].expand(5, D) + 0.2
    assert ((prediction.mean - mean).abs() < 4.5 * (variance / 300).sqrt()).all()
    torch.testing.assert_close(prediction.variance, variance, rtol=0.2, atol=0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # scikit-learn's, of a variance of one row
def test_one_row_of_one_column():
    y = torch.ones(1, 1)
    model = RandomFeatureLVM(1, 1, 1, num_frequencies=4).initialize(y)
    guide = RandomFeatureGuide(model)
    assert all(math.isfinite(loss) for loss in fit(model, guide, y, blocks=guide.blocks(), num_steps=3, progress=False).losses)


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_learned_kernel_is_the_mean_of_its_draws(Y, frequencies):
    model, guide = _pair(Y, frequencies=frequencies)
    X, X2 = torch.randn(4, Q), torch.randn(3, Q)
    if frequencies == "gaussian":
        mean_field = MeanFieldGuide(model)
        mean_field(Y)
        mean_field.locs.omega, mean_field.scales.omega = guide.omega.loc.detach(), guide.omega.scale.detach()
        torch.testing.assert_close(model.kernel(mean_field, X, X2), model.kernel(guide, X, X2))
    q, both = guide.omega.posterior(model), torch.cat([X, X2])
    draws = torch.stack([model.features(both, q.sample()).detach() for _ in range(500)])
    products = draws[:, :4] @ draws[:, 4:].mT
    error = products.std(0) / 500**0.5
    assert ((products.mean(0) - model.kernel(guide, X, X2)).abs() < 4.0 * error).all()
    torch.testing.assert_close(model.kernel(guide, X).diagonal(), model.kernel_variance.detach().expand(4))
    grid = torch.linspace(-2.0, 2.0, 101)
    density = model.spectral_density(guide, torch.cartesian_prod(grid, grid))
    assert density.sum() * 0.04**2 == pytest.approx(1.0, abs=1e-3)


def test_vectorised_particles_estimate_the_same_bound(Y):
    for options in ({}, {"frequencies": "gaussian"}, {"weights": "explicit"}):
        pyro.clear_param_store()
        model, guide = _pair(_holes(Y), **options)
        for bound in (Trace_ELBO, TraceMeanField_ELBO):
            loop = torch.tensor([bound().loss(model, guide, Y) for _ in range(40)])
            vectorised = torch.tensor(
                [
                    bound(num_particles=20, vectorize_particles=True, max_plate_nesting=1).loss(model, guide, Y)
                    for _ in range(4)
                ]
            )
            error = (loop.var() / len(loop) + vectorised.var() / len(vectorised)).sqrt()
            assert abs(loop.mean() - vectorised.mean()) < 4.0 * error


@pytest.mark.parametrize(
    "likelihood",
    [Bernoulli(), Poisson(), NegativeBinomial(), Binomial(4), Gaussian(), LogNormal(), StudentT()],
    ids=lambda x: type(x).__name__,
)
def test_every_likelihood_trains_with_holes(likelihood, dtype):
    torch.set_default_dtype(dtype)
    likelihood = likelihood.to(dtype)
    Y = _holes(likelihood(torch.randn(N, D)).sample())
    model, guide = _pair(Y, likelihood)
    vi = BlockCoordinateVI(model, guide, guide.blocks(damping=0.5))
    assert math.isfinite(vi.step(Y))
    value = TraceMeanField_ELBO().differentiable_loss(model, guide, Y)
    value.backward()
    assert value.dtype == dtype
    for name, parameter in [*model.named_parameters(), *guide.named_parameters()]:
        assert parameter.grad.isfinite().all(), name
    assert Predictive(model, guide=guide, num_samples=3)(None)["y"].shape == (3, N, D)
    q = model.infer_latents(guide, Y, num_steps=3, num_samples=2)
    filled = model.impute(guide, Y, latents=q, num_samples=2)
    seen = ~torch.isnan(Y)
    assert torch.equal(filled.mean[seen], Y[seen])
    assert filled.mean.isfinite().all()
    assert filled.mean.dtype == dtype
    assert set(guide.median()) == {"alpha", "v", "omega", "X", "a"}
    torch.testing.assert_close(guide.median()["X"], guide.X.loc.detach())
    assert 1.0 <= guide.num_components_in_use() <= C


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_one_latent_dimension(Y, frequencies):
    model, guide = _pair(Y, latent_dim=1, frequencies=frequencies)
    vi = BlockCoordinateVI(model, guide, guide.blocks(learning_rate=0.05))
    losses = [vi.step(Y) for _ in range(150)]
    assert sum(losses[-20:]) < sum(losses[:20]) - 20.0
    assert model.spectral_density(guide, torch.zeros(1, 1)).isfinite().all()


def test_s_curve_is_recovered():
    """Noise, kernel between pairs of points, and latents better than those of PCA."""
    data = s_curve(300, 60)
    Y, truth = torch.as_tensor(data.Y), torch.as_tensor(data.X)
    model = RandomFeatureLVM(300, 60, 2, num_frequencies=30).initialize(Y)
    guide = RandomFeatureGuide(model, frequencies="gaussian")
    vi = BlockCoordinateVI(model, guide, guide.blocks(learning_rate=0.05))
    with pyro.validation_enabled(False):
        for _ in range(80):
            vi.step(Y)

    def unexplained(X):
        """Of the true latents, by an affine map of X."""
        design = torch.cat([X, torch.ones(300, 1)], -1)
        residual = truth - design @ torch.linalg.lstsq(design, truth).solution
        return (residual.var(0).sum() / truth.var(0).sum()).item()

    X = guide.median()["X"]
    assert unexplained(X) < unexplained(model.initial_values["X"])
    assert model.likelihood.variance.item() == pytest.approx(0.25, rel=0.1)
    tau = truth[:, None] - truth
    periodic = (-2.0 * (math.pi * tau / 4.5).sin().square().sum(-1)).exp()
    kernels = torch.stack([model.kernel(guide, X), 0.5 * (-0.5 * tau.square().sum(-1)).exp() + 0.5 * periodic])
    assert torch.corrcoef(kernels[:, *torch.triu_indices(300, 300, 1)])[0, 1] > 0.85


@pytest.mark.parametrize("bound", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("options", [{}, {"weights": "explicit"}])
def test_works_under_svi(Y, bound, options):
    model, guide = _pair(Y, **options)
    before = {name: value.clone() for name, value in [*model.named_parameters(), *guide.named_parameters()]}
    svi = SVI(model, guide, Adam({"lr": 0.05}), bound())
    losses = [svi.step(Y) for _ in range(100)]
    assert sum(losses[-20:]) < sum(losses[:20]) - 20.0
    for name, value in [*model.named_parameters(), *guide.named_parameters()]:
        assert not torch.equal(value, before[name]), name


def test_mean_field_guide_serves_the_model_too(Y):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F, num_components=C).initialize(Y)
    guide = MeanFieldGuide(model)
    SVI(model, guide, Adam({"lr": 0.02}), MeanFieldELBO()).step(Y)
    assert model.reconstruct(guide, Y, num_samples=4).mean.shape == (N, D)


def test_guide_keeps_data_and_state(Y):
    with pyro.settings.context(module_local_params=True):
        model, guide = _pair(Y)
        _, other = _pair(torch.randn(N, D))
        other.load_state_dict(guide.state_dict())
        assert torch.equal(other.data, Y)
        idx = torch.tensor([3, 1])
        model.reconstruct(guide, Y[idx], idx, num_samples=2)
        assert guide.data is not None
        assert torch.equal(guide.data, Y)


@pytest.mark.parametrize("weights", ["collapsed", "filled"])
def test_gaps_filled_by_others_after_the_fit_do_not_reach_the_weights(Y, weights):
    Y = _holes(Y)
    model, guide = _pair(Y, weights=weights)
    X, before = guide.X.loc.detach(), guide.data.clone()
    Y.nan_to_num_(50.0)
    model.predict(guide, X, num_samples=2)
    torch.testing.assert_close(guide.data, before, equal_nan=True)


def test_models_leave_the_random_state_alone():
    state = torch.get_rng_state()
    RandomFeatureLVM(N, D, Q)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("local_params")
@pytest.mark.parametrize("weights", ["collapsed", "filled", "explicit", "shared"])
def test_an_encoder_is_free_latents_that_it_computes(Y, weights):
    """Bounds of all rows and of some, and every closed form."""
    Y = _holes(Y)
    model, free = _pair(Y, frequencies="gaussian", weights=weights)
    encoder = IndexNet(D, Q)
    amortised = RandomFeatureGuide(model, frequencies="gaussian", weights=weights, encoders={"X": encoder})
    amortised(Y)
    with torch.no_grad():
        free.X.loc, free.X.scale = encoder(Y)
    if weights in ("explicit", "shared"):
        free.a.linear, free.a.precision = amortised.a.linear.detach(), amortised.a.precision.detach()
    loss, idx = TraceMeanField_ELBO(max_plate_nesting=1), torch.tensor([7, 2, 5])
    values = []
    for guide in (free, amortised):
        torch.manual_seed(1)
        updates = [block.update(Y) for block in guide.blocks() if block.update]
        mean = model.predict(guide, torch.zeros(2, Q), num_samples=3).mean
        values.append((loss.loss(model, guide, Y), loss.loss(model, guide, Y[idx], idx), updates, mean))
    torch.testing.assert_close(*values)
    loc, scale = encoder(Y[:4])
    encoded = model.infer_latents(amortised, Y[:4], num_steps=0)
    torch.testing.assert_close((encoded.mean, encoded.stddev), (loc, scale))
    torch.testing.assert_close(amortised.median(Y[idx], idx)["X"], free.X.loc[idx].detach())


def test_an_encoder_learns_from_mini_batches_and_reads_new_rows():
    X = torch.linspace(-2.0, 2.0, 200)[:, None]
    Y = torch.cat([X, X.sin(), (2.0 * X).cos()], -1) + 0.05 * torch.randn(200, D)
    Y[torch.rand(Y.shape) < 0.1] = torch.nan
    train = Y[::2]
    model = RandomFeatureLVM(100, D, 1, num_frequencies=10, num_components=C).initialize(train)
    guide = RandomFeatureGuide(model, weights="shared", encoders={"X": IndexNet(D, 1)})
    blocks = guide.blocks(learning_rate=0.01, damping=lambda sweep: (sweep + 10.0) ** -0.6)
    fit(model, guide, train, loss=MeanFieldELBO(), blocks=blocks, num_steps=600, batch_size=25, progress=False)
    new = guide.median(Y[1::2], torch.arange(100))["X"]
    assert torch.stack([new[:, 0], X[1::2, 0]]).corrcoef()[0, 1].abs() > 0.95


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_choices(self, Y):
        model = RandomFeatureLVM(N, D, Q, likelihood=Poisson())
        with pytest.raises(ValueError, match='weights="explicit"'):
            RandomFeatureGuide(model, weights="collapsed")
        with pytest.raises(ValueError, match="expected a Gaussian likelihood"):
            RandomFeatureGuide(model, weights="filled")
        with pytest.raises(ValueError, match='expected frequencies="gaussian"'):
            RandomFeatureGuide(model, weights="explicit", frequencies="mixture")
        with pytest.raises(ValueError, match="expected frequencies in"):
            RandomFeatureGuide(model, frequencies="normal")
        for init_scale in (0.0, math.inf):
            with pytest.raises(ValueError, match="positive and finite init_scale"):
                RandomFeatureGuide(model, init_scale=init_scale)
        guide = RandomFeatureGuide(RandomFeatureLVM(N, D, Q), weights="filled")
        with pytest.raises(ValueError, match="expected weights in"):
            guide.weights = "colapsed"
        with pytest.raises(ValueError, match='expected frequencies="gaussian"'):
            guide.weights = "explicit"
        guide.weights = "collapsed"
        guide = RandomFeatureGuide(model)
        for other in ("filled", "collapsed"):
            with pytest.raises(ValueError, match=r"expected a Gaussian.* got Poisson"):
                guide.weights = other

    def test_inputs_of_the_kernel(self, Y):
        model, guide = _pair(Y)
        with pytest.raises(ValueError, match=r"X of shape \[rows, 2\], got \[5, 3\]"):
            model.kernel(guide, torch.randn(5, 3))
        with pytest.raises(TypeError, match="dtype"):
            model.kernel(guide, torch.randn(5, Q), torch.randn(5, Q, dtype=torch.float32))

    @pytest.mark.parametrize("autoguide", [AutoNormal, AutoDelta])
    def test_guides_without_a_density_of_frequencies(self, Y, autoguide):
        model = RandomFeatureLVM(N, D, Q, num_frequencies=F, num_components=C)
        guide = autoguide(model, create_plates=model.create_plates)
        guide(Y)
        for call in (model.kernel, model.spectral_density):
            with pytest.raises(TypeError, match="omega is a Normal or a DiagonalMixture, got one that samples a Delta"):
                call(guide, torch.randn(5, Q))

    def test_components_in_use_need_a_guide_that_has_run(self):
        with pytest.raises(RuntimeError, match="expected a guide that has run once"):
            RandomFeatureGuide(RandomFeatureLVM(N, D, Q)).num_components_in_use()

    def test_encoder_wants_data(self, Y):
        _, guide = _pair(Y, encoders={"X": IndexNet(D, Q)})
        with pytest.raises(ValueError, match="expected data for the encoder"):
            guide()

    @pytest.mark.parametrize(
        ("encoder", "shape"),
        [
            (IndexNet(D, Q + 1, (4,)), r"\[12, 3\]"),
            (ZeroImputation(D, Q, (4,), covariance="full"), r"\[12, 2, 2\]"),
        ],
    )
    def test_encoder_of_other_latents(self, Y, encoder, shape):
        with pytest.raises(ValueError, match=rf"loc and scale of shape \[12, 2\] from the encoder, got .*{shape}; give it"):
            _pair(Y, encoders={"X": encoder.double()})

    def test_sizes(self):
        with pytest.raises(ValueError, match="num_components of 2 or more"):
            RandomFeatureLVM(N, D, Q, num_components=1)
        with pytest.raises(ValueError, match="num_frequencies of 1 or more"):
            RandomFeatureLVM(N, D, Q, num_frequencies=0)
        with pytest.raises(ValueError, match="positive lengthscale"):
            RandomFeatureLVM(N, D, Q, lengthscale=0.0)
        with pytest.raises(ValueError, match="positive concentration"):
            RandomFeatureLVM(N, D, Q, concentration=(1.0, -1.0))

    def test_data(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        with pytest.raises(ValueError, match=r"shape \[rows, 3\], got \[12, 2\]"):
            model(Y[:, :2])
        with pytest.raises(ValueError, match="mini-batch with its indices"):
            model(Y[:5])

    def test_collapsed_weights_want_all_data_first(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        with pytest.raises(ValueError, match="has seen all data"):
            RandomFeatureGuide(model)(Y[:2], torch.arange(2))

    def test_priors_on_parameters(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        model.kernel_variance = PyroSample(dist.LogNormal(0.0, 1.0))
        with pytest.raises(ValueError, match=r"got \['kernel_variance'\] too"):
            RandomFeatureGuide(model)(Y)


class TestPriorsOfTheModel:
    @staticmethod
    def _with_prior(Y, name, prior):
        model = RandomFeatureLVM(N, D, Q, num_frequencies=F, num_components=C)
        setattr(model, name, PyroSample(prior))
        return model.initialize(10.0 * Y), MeanFieldGuide(model, init_scale=0.3)

    def test_survive_initialisation_whose_value_guides_start_at(self, Y):
        _, guide = self._with_prior(Y, "kernel_variance", dist.LogNormal(0.0, 1.0))
        guide(10.0 * Y)
        expected = (10.0 * (Y - Y.mean(0))).square().mean()
        torch.testing.assert_close(guide.median()["kernel_variance"], expected)

    def test_kernel_has_the_mean_of_its_variance_under_the_guide(self, Y):
        model, guide = self._with_prior(Y, "kernel_variance", dist.LogNormal(0.0, 1.0))
        guide(10.0 * Y)
        state, x = torch.get_rng_state(), torch.zeros(1, Q)
        variance = model.kernel(guide, x).item()
        assert torch.equal(state, torch.get_rng_state())
        assert model.kernel(guide, x) == variance
        # A log-normal of σ = 0.3, of which 100 draws have a mean within 0.031 of theirs.
        expected = guide.median()["kernel_variance"].item() * math.exp(0.5 * 0.3**2)
        assert abs(variance / expected - 1.0) < 4 * 0.031

    @pytest.mark.parametrize("name", ["component_locs", "component_scales"])
    def test_of_components_are_drawn_for_each_particle(self, Y, name):
        base = dist.Normal(0.0, 1.0) if name == "component_locs" else dist.LogNormal(0.0, 1.0)
        model, guide = self._with_prior(Y, name, base.expand([C, Q]).to_event(2))
        with seeded(0):
            losses = torch.tensor([Trace_ELBO(max_plate_nesting=1).loss(model, guide, Y) for _ in range(300)])
        bound = Trace_ELBO(num_particles=2000, vectorize_particles=True, max_plate_nesting=1)
        with seeded(0):
            assert abs(bound.loss(model, guide, Y) - losses.mean()) < 6 * losses.std() / 300**0.5


def test_what_is_held_stays_where_it_is(Y):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F)
    model.kernel_variance_unconstrained.requires_grad_(False)
    assert model.initialize(10.0 * Y).kernel_variance == 1.0


@pytest.mark.usefixtures("unchecked")
def test_spectral_density_wants_frequencies_of_its_dimensions(Y):
    model, guide = _pair(Y)
    for omega in (torch.linspace(-1.0, 1.0, 5), torch.randn(5, 1)):
        with pytest.raises(ValueError, match=r"expected omega of shape \[rows, 2\]"):
            model.spectral_density(guide, omega)
    with pytest.raises(TypeError, match="dtype"):
        model.spectral_density(guide, torch.randn(5, 2, dtype=torch.float32))


def test_a_call_too_early_leaves_nothing_behind(Y):
    """A prototype made without data would start the variational parameters elsewhere."""
    counts = torch.distributions.Poisson(5.0).sample((N, D))
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F, likelihood=NegativeBinomial(10.0)).initialize(counts)
    early, guide = RandomFeatureGuide(model), RandomFeatureGuide(model)
    for call in (lambda: model.kernel(early, torch.zeros(1, Q)), lambda: early(counts[:2], torch.arange(2))):
        with pytest.raises(ValueError, match=r"has seen all data.*call guide\(Y\)"):
            call()
    with pyro.get_param_store().scope():
        early(counts)
    with pyro.get_param_store().scope():
        guide(counts)
    assert torch.equal(early.a.c, guide.a.c)


@pytest.mark.usefixtures("unchecked")
def test_concentration_may_be_whole_numbers(Y):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F, concentration=(2, 1))
    assert model.concentration.dtype == Y.dtype
    assert model().shape == (N, D)
