"""Latents of new rows."""

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian, StudentT
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM
from tests.models.gplvm._models import D, M, N, Q, make_model, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def test_infer_latents_equals_factor_analysis_for_a_linear_kernel():
    """Given u, a linear kernel with M ≥ Q makes x | y Gaussian: precision I + WᵀW/σ², W the rows of weights seen."""
    model = make_model(kernel=Linear(Q), likelihood=Gaussian(0.5))
    guide = MeanFieldGuide(model, init_scale=1e-4)
    y = torch.randn(N, D)
    guide(y)
    guide.locs.u = torch.randn(D, M)
    with torch.no_grad():
        unit = model.predict(guide, torch.eye(Q)).f_mean.mT  # W [D, Q], as f is linear in x
    Y_new = with_holes(torch.randn(6, D))
    prior = dist.Normal(torch.zeros(Q), 1.0).to_event(1)
    copies = Y_new.repeat(40, 1)  # whose means have a fraction of the noise of a fit
    how = {"method": "variational", "prior": prior, "num_steps": 500, "learning_rate": 0.05}
    q = model.infer_latents(guide, copies, **how).base_dist
    q_loc, q_scale = (x.unflatten(0, (40, 6)) for x in (q.loc, q.scale))
    assert q_loc.std(0).max() < 0.1
    for n in range(6):
        W = unit[~torch.isnan(Y_new[n])]
        precision = torch.eye(Q) + W.mT @ W / 0.5
        loc = torch.linalg.solve(precision, W.mT @ Y_new[n][~torch.isnan(Y_new[n])] / 0.5)
        torch.testing.assert_close(q_loc[:, n].mean(0), loc, rtol=0.0, atol=0.05)
        torch.testing.assert_close(q_scale[:, n].mean(0), precision.diagonal().rsqrt(), rtol=0.1, atol=0.0)


def test_infer_latents_finds_both_modes_under_a_mixture_prior():
    """Given u, a linear kernel makes the posterior under a mixture of Gaussians another one, in closed form."""
    model = make_model(kernel=Linear(Q), likelihood=Gaussian(0.5))
    guide = MeanFieldGuide(model, init_scale=1e-4)
    guide(torch.randn(N, D))
    guide.locs.u = 0.3 * torch.randn(D, M)
    with torch.no_grad():
        W = model.predict(guide, torch.eye(Q)).f_mean.mT
    means, scale = torch.tensor([[-2.0] * Q, [2.0] * Q]), 0.3
    prior = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.7, 0.3])), dist.Normal(means, scale).to_event(1))
    Y_new = 0.3 * torch.randn(5, D)
    q = model.infer_latents(guide, Y_new, method="variational", prior=prior, num_starts=40)
    for n, y in enumerate(Y_new):
        evidence = dist.MultivariateNormal(means @ W.mT, scale**2 * W @ W.mT + 0.5 * torch.eye(D))
        weight = (torch.tensor([0.7, 0.3]).log() + evidence.log_prob(y)).softmax(0)
        gain = scale**2 * W.mT @ torch.linalg.inv(scale**2 * W @ W.mT + 0.5 * torch.eye(D))
        loc = means + (y - means @ W.mT) @ gain.mT
        found = q.component_distribution.mean[n]
        share = q.mixture_distribution.probs[n]
        for k in range(2):
            at = (found - loc[k]).norm(dim=-1) < 0.2
            assert share[at].sum().item() == pytest.approx(weight[k].item(), abs=0.05)
    filled = model.impute(guide, Y_new.masked_fill(torch.rand(Y_new.shape) < 0.3, torch.nan), latents=q)
    assert filled.mean.isfinite().all()


def test_infer_latents_wants_as_many_candidates_as_starts(Y):
    model = make_model()
    guide = MeanFieldGuide(model)
    guide(Y)
    with pytest.raises(ValueError, match=f"num_starts of at most {M}, the number of candidates"):
        model.infer_latents(guide, Y, prior=dist.Normal(torch.zeros(Q), 1.0).to_event(1), num_starts=M + 1)


def test_infer_latents_leaves_model_guide_and_random_state_alone(Y):
    model = make_model()
    guide = MeanFieldGuide(model)
    guide(Y)
    Y_new = torch.randn(30, D)  # more rows than the model has data
    before = {k: v.clone() for k, v in [*model.state_dict().items(), *guide.state_dict().items()]}
    state = torch.get_rng_state()
    model.infer_latents(guide, Y_new, num_steps=3)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in [*model.state_dict().items(), *guide.state_dict().items()]:
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in [*model.parameters(), *guide.parameters()])


@pytest.mark.parametrize("model_of", [BayesianGPLVM, RandomFeatureLVM])
def test_wild_entries_do_not_lead_the_start_under_tails(model_of):
    """Latents to start from, and column means, explain what lies below the wild entries."""
    clean = torch.randn(100, 2) @ torch.randn(2, 6) + 2.0
    Y = torch.where(torch.rand(100, 6) < 0.03, 1000.0, clean + 0.1 * torch.randn(100, 6))
    size = {"num_inducing": 5} if model_of is BayesianGPLVM else {"num_frequencies": 5}
    model = model_of(100, 6, 2, likelihood=StudentT(), **size).initialize(Y)
    assert ((model.mean - clean.mean(0)).abs() < 0.3).all()
    X = torch.cat([model.initial_values["X"], torch.ones(100, 1)], 1)
    left = clean - X @ torch.linalg.lstsq(X, clean).solution
    assert left.var() < 0.02 * clean.var()


@pytest.mark.parametrize("method", ["variational", "laplace"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_latents_are_inferred_where_gradients_are_off(Y, method, mode):
    model = make_model().initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    expected = model.infer_latents(guide, Y, method=method, num_steps=5).mean
    with mode():
        found = model.infer_latents(guide, Y.clone(), method=method, num_steps=5).mean
    assert torch.equal(found, expected)


class TestPriorOfNewRows:
    @pytest.fixture
    def fitted(self, Y):
        model = make_model().initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y)
        return model, guide

    @pytest.mark.parametrize("method", ["variational", "laplace"])
    @pytest.mark.usefixtures("unchecked")
    def test_is_a_distribution_of_the_dtype_of_the_model(self, fitted, Y, method):
        model, guide = fitted
        with pytest.raises(TypeError, match="dtype"):
            model.infer_latents(guide, Y, method=method, prior=dist.Normal(torch.zeros(Q).float(), 1.0).to_event(1))
        with pytest.raises(TypeError, match="expected a distribution"):
            model.infer_latents(guide, Y, method=method, prior="n")

    @pytest.mark.parametrize("num_starts", [1, 2])
    @pytest.mark.parametrize("method", ["variational", "laplace"])
    def test_may_be_a_mixture_of_torch(self, fitted, Y, method, num_starts):
        model, guide = fitted
        found = []
        for family in (dist, torch.distributions):
            parts = family.Independent(family.Normal(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), 1.0), 1)
            prior = family.MixtureSameFamily(family.Categorical(torch.ones(2)), parts)
            found.append(model.infer_latents(guide, Y, method=method, prior=prior, num_starts=num_starts, num_steps=5).mean)
        torch.testing.assert_close(*found)
