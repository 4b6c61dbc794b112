"""Natural gradients of the weights."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.conjugate.feature_regression import gaussian_log_density, weight_posterior
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI, MeanFieldELBO
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from pyro_lvgp.models import RandomFeatureLVM
from tests.guides.random_feature._models import traces_of
from tests.helpers.random_features import C, D, F, N, Q, features_of, make_pair, pin, with_holes

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("holes", [False, True])
def test_natural_gradients_at_full_batch_are_the_closed_form(Y, holes):
    Y = with_holes(Y) if holes else Y
    model, guide = make_pair(Y, Gaussian(0.4), weights="explicit")
    pin(guide)
    blocks = {block.name: block for block in guide.blocks(damping=1.0)}
    values = blocks["weights"].update(Y)
    observed, features = ~torch.isnan(Y), features_of(model, guide)
    sites = model.weight_sites(Y, torch.zeros(N, D), torch.zeros(N, D))
    expected = weight_posterior(features, *sites)
    precision = expected.precision_tril @ expected.precision_tril.mT
    torch.testing.assert_close(values["guide.a.precision"], precision.expand(D, 2 * F, 2 * F))
    mean = torch.linalg.solve(values["guide.a.precision"], values["guide.a.linear"][..., None]).squeeze(-1)
    torch.testing.assert_close(mean, expected.mean)
    # There the bound is the collapsed density.
    guide.a.linear, guide.a.precision = values["guide.a.linear"].detach(), values["guide.a.precision"].detach()
    q, _ = traces_of(model, guide, Y)
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
        model, guide = make_pair(Y, Gaussian(0.4), weights=weights)
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
    Y = with_holes(likelihood()(torch.randn(N, D)).sample().detach())
    model, guide = make_pair(Y, likelihood(), weights=weights)
    pin(guide)
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
    Y = with_holes(likelihood()(torch.randn(N, D)).sample().detach())
    _, guide = make_pair(Y, likelihood(), weights=weights)
    pin(guide)
    update = guide.blocks()[-1].update
    whole = update(Y)
    parts = [update(Y[idx], idx) for idx in torch.randperm(N).split(4)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts) / len(parts), value)


@pytest.mark.parametrize("likelihood", [Poisson, StudentT, Bernoulli])
@pytest.mark.parametrize("weights", ["explicit", "shared"])
def test_natural_gradients_of_all_rows_do_not_lower_the_bound(likelihood, weights):
    """From anywhere, as the loss says that the block's update is never told of."""
    Y = with_holes(likelihood()(2.0 * torch.randn(N, D)).sample().detach())
    model, guide = make_pair(Y, likelihood(), weights=weights)
    pin(guide)
    loss = MeanFieldELBO(num_samples=1)
    for _ in range(20):
        guide.a.linear = 5.0 * torch.randn_like(guide.a.linear)
        before = seeded(0)(loss.loss)(model, guide, Y)
        values = guide._update_weights(Y)
        assert any((values[f"guide.a.{name}"] != getattr(guide.a, name)).any() for name in ("linear", "precision"))
        guide.a.linear, guide.a.precision = values["guide.a.linear"], values["guide.a.precision"]
        assert seeded(0)(loss.loss)(model, guide, Y) <= before + 1e-5 * abs(before)


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float64), (2, torch.float32)])
def test_blocks_fit_counts_of_any_size(seed, dtype):
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
    blocks = guide.blocks(lr=0.05, damping=lambda sweep: (sweep + 2.0) ** -0.6)
    vi = BlockCoordinateVI(model, guide, blocks, loss=MeanFieldELBO(num_samples=1))
    losses = []
    for _ in range(60):
        idx = torch.randperm(60)[:20]
        losses.append(vi.step(Y[idx], idx))
    assert max(losses[-10:]) < max(losses[:10])
    assert vi.evaluate_loss(Y) < losses[0]
