"""Levels with an order."""

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.special import ndtri

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import CompiledELBO, JointAdam, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, Heterogeneous, Ordinal
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet

pytestmark = pytest.mark.usefixtures("float64")
N, D, K = 80, 6, 4
EDGES = torch.tensor([[-1.0, 0.0, 2.0], [0.0, 0.1, 3.0]], dtype=torch.float64)


def answers() -> torch.Tensor:
    """Of people whom one latent tells apart, to questions that are understood one way or the other."""
    x = torch.randn(N, 1)
    f = x * torch.tensor([2.0, -2.0, 1.5, 2.0, -1.5, 1.0]) + 0.3 * torch.randn(N, D)
    return (f[..., None] > torch.tensor([-1.5, 0.0, 1.0])).sum(-1).double()


def test_two_levels_are_a_probit():
    f, y = torch.randn(50, 3), torch.randint(0, 2, (50, 3)).double()
    p = dist.Normal(0.0, 1.0).cdf((f - 0.4) / 0.7)
    found = Ordinal(torch.tensor([0.4]), 0.7)(f)
    torch.testing.assert_close(found.log_prob(y), dist.Bernoulli(p).log_prob(y))
    torch.testing.assert_close((found.mean, found.variance), (p, p * (1.0 - p)))


def test_levels_have_what_lies_between_their_edges():
    f, scale = torch.randn(5, 2), torch.tensor([0.5, 2.0])
    y = Ordinal(EDGES, scale, data_dim=2)(f)
    ends = torch.full((2, 1), torch.inf)
    cdf = dist.Normal(f[..., None], scale[:, None]).cdf(torch.cat([-ends, EDGES, ends], -1))
    torch.testing.assert_close(y.probs, cdf.diff(dim=-1))
    levels = torch.arange(K).double()
    mean = (y.probs * levels).sum(-1)
    torch.testing.assert_close((y.mean, y.variance), (mean, (y.probs * (levels - mean[..., None]).square()).sum(-1)))
    draws = y.sample((20_000,))
    share = (draws[..., None] == levels).double().mean(0)
    assert ((share - y.probs).abs() < 4.5 * (y.probs * (1.0 - y.probs) / len(draws)).sqrt() + 1e-9).all()


@pytest.mark.parametrize("f", [-40.0, -3.0, 1.0, 7.0, 45.0])
def test_tails_against_a_grid(f):
    """With gradients, on both sides of a level, near and far."""
    loc = torch.tensor([f], requires_grad=True)
    found = Ordinal(torch.tensor([0.0, 1.0, 2.0]))(loc).log_prob(torch.ones(1))
    z = torch.linspace(0.0, 1.0, 200_001)[:, None]
    weight = torch.ones(len(z), 1).index_fill(0, torch.tensor([0, len(z) - 1]), 0.5)
    expected = (dist.Normal(loc, 0.5).log_prob(z) + weight.log()).logsumexp(0) + (z[1] - z[0]).log()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    gradients = (torch.autograd.grad(value.sum(), loc) for value in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_numbers_stay_finite_far_out(dtype):
    f = torch.tensor([-1e4, -50.0, 50.0, 1e4], dtype=dtype)[:, None, None].requires_grad_()
    y = torch.arange(K).to(dtype)[:, None].expand(K, 2)
    log_prob = Ordinal(EDGES).to(dtype)(f.expand(4, K, 2)).log_prob(y)
    assert log_prob.isfinite().all()
    assert torch.autograd.grad(log_prob.sum(), f)[0].isfinite().all()


def test_edges_have_the_shares_of_the_data():
    nan = torch.nan
    Y = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, nan], [nan, 1.0]])
    likelihood = Ordinal.from_data(Y, scale=0.3)
    shares = torch.tensor([[2.5, 3.0], [0.5, 4.0]]) / 4.5  # a half more of each level: 2, 0, 1 and 0, 3, 0
    torch.testing.assert_close(likelihood.edges, ndtri(shares))
    torch.testing.assert_close(likelihood.scale.detach(), torch.full((2,), 0.3))
    assert Ordinal.from_data(Y, 5).edges.shape == (2, 4)
    torch.testing.assert_close(likelihood.inverse_link(Y).isnan(), Y.isnan())


@pytest.mark.parametrize(("bad", "num_levels"), [(3.0, 3), (0.5, None), (-1.0, None)])
def test_what_is_no_level_is_refused(bad, num_levels):
    Y = torch.tensor([[0.0, 1.0], [2.0, bad]])
    with pytest.raises(ValueError, match=rf"Ordinal likelihood: expected levels, integers from 0 to 2, got {bad:g}"):
        Ordinal.from_data(Y, num_levels)


@pytest.mark.parametrize(
    ("Y", "error", "match"),
    [
        ([[0.0]], TypeError, "expected data to be tensors, got list"),
        (torch.zeros(0, 3), ValueError, "expected Y with one row or more, got none"),
        (torch.zeros(4), ValueError, r"expected Y of shape \[rows, 4\], got \[4\]"),
        (torch.zeros(4, 2).long(), TypeError, "expected Y of a floating-point dtype"),
        (torch.tensor([[0.0, torch.inf]]), ValueError, r"expected finite entries .* got inf at Y\[0, 1\]"),
        (torch.tensor([[0.0], [4.0e9]]), ValueError, "no more of them than the 2 rows, got level 4000000000; number them by"),
    ],
)
def test_what_is_no_table_is_refused(Y, error, match, unchecked):
    with pytest.raises(error, match=match):
        Ordinal.from_data(Y)


@pytest.mark.parametrize("edges", [[], [1.0, 1.0], [0.0, math.inf], [0.0, math.nan], [[[0.0]]]])
def test_edges_that_do_not_rise_are_refused(edges, unchecked):
    with pytest.raises(ValueError, match=rf"expected increasing edges, .* got {re.escape(str(edges))}"):
        Ordinal(torch.tensor(edges))


@pytest.mark.parametrize("model", [BayesianGPLVM, RandomFeatureLVM])
def test_edges_are_for_outputs(model):
    model(N, 2, 1, likelihood=Ordinal(EDGES))
    model(N, 3, 1, likelihood=Ordinal(EDGES[:1]))
    with pytest.raises(ValueError, match="for each of 3, got 2 rows of them"):
        model(N, 3, 1, likelihood=Ordinal(EDGES))


def fitted(name: str, Y: torch.Tensor):
    """A model of the answers, its guide, and how to fit it."""
    likelihood = Ordinal.from_data(Y)
    if name == "random features":
        model = RandomFeatureLVM(N, D, 1, num_frequencies=10, likelihood=likelihood).initialize(Y)
        guide = RandomFeatureGuide(model)
        return model, guide, {"optim": guide.blocks(lr=0.1), "num_steps": 80}
    model = BayesianGPLVM(N, D, 1, num_inducing=10, likelihood=likelihood).initialize(Y)
    how = {"loss": MeanFieldELBO(num_samples=1), "optim": JointAdam(lr=0.1)}
    if name == "annealed":
        return model, AutoAnnealedLangevin(model, num_steps=2), how | {"num_steps": 15}
    return model, MeanFieldGuide(model), how | {"num_steps": 40}


@pytest.mark.parametrize("name", ["mean field", "annealed", "random features"])
def test_answers_tell_those_that_are_hidden(name):
    """Better than the shares of each level of a column do, and by levels that were given."""
    Y = answers()
    hidden = torch.rand(Y.shape) < 0.2
    seen = Y.masked_fill(hidden, torch.nan)
    model, guide, how = fitted(name, seen)
    fit(model, guide, seen, seed=0, progress=False, **how)
    found = model.predictive(guide, guide.median(seen)["X"])
    shares = (seen[..., None] == torch.arange(K)).sum(0) + 0.5
    plain = dist.Categorical(shares).log_prob(torch.nan_to_num(Y))[hidden].mean()
    assert found.log_prob(Y)[hidden].mean() > plain + 0.2
    assert set(found.sample().unique().tolist()) <= set(range(K))


def test_a_series_of_answers():
    t = torch.linspace(0.0, 6.0, 40)[:, None]
    y = (t.sin()[..., None] > torch.tensor([-0.5, 0.5])).sum(-1).double().expand(40, 3)
    model = GPVAE(RBF(1, batch_shape=(1,)), MLP(1, 3, [8]), Ordinal.from_data(y))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 1)})
    history = fit(model, guide, t, y, loss=StructuredELBO(), num_steps=200, seed=0, progress=False)
    assert history.losses[-1] < 0.5 * history.losses[0]


def test_a_compiled_bound_is_the_same():
    Y = answers()
    model, guide, _ = fitted("mean field", Y)
    losses = []
    for bound in (MeanFieldELBO(), CompiledELBO(MeanFieldELBO())):
        pyro.set_rng_seed(0)
        losses.append(bound.loss(model, guide, Y))
    torch.testing.assert_close(*losses)


def test_levels_beside_lengths_go_to_arviz():
    Y = torch.cat([answers(), torch.randn(N, 1)], 1)
    Y[:5, 2] = torch.nan
    kinds = Heterogeneous([(Ordinal.from_data(Y[:, :D]), range(D)), (Gaussian(), [D])])
    model = BayesianGPLVM(N, D + 1, 1, num_inducing=5, likelihood=kinds).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    tree = to_arviz(model, guide, Y, num_samples=5, seed=0)
    simulated = tree.posterior_predictive["y"].isel(output=slice(D))
    assert set(simulated.to_numpy().ravel()) == set(range(K))
