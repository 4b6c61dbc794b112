"""The Gibbs sampler of the random-feature LVM: it leaves the joint as it is, and says what our variational fit says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from benchmarks.peers import gibbs_rflvm
from benchmarks.peers.gibbs_rflvm import GibbsRFLVM, Theta
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import RandomFeatureLVM


def _draw_data(state):
    outputs = state.function(state.X)
    return outputs + state.theta.noise.sqrt()[:, None, None] * torch.randn_like(outputs)


def _statistics(state):
    theta, F = state.theta, state.omega.shape[-2]
    first = (state.z == 0).sum(-1).double()
    values = {
        "X": state.X[:, 0, 0],
        "X²": state.X.square().mean((1, 2)),
        "X⁴": state.X.pow(4).mean((1, 2)),
        "ω": state.omega[:, 0, 0],
        "|ω|": state.omega.abs().mean((1, 2)),
        "|x ω|": (state.X[:, :1] * state.omega[:, :1]).abs().mean((1, 2)),
        "first component": first,
        "first component²": first.square(),
        "same component": (state.z[:, 0] == state.z[:, F - 1]).double(),
        "log rest": state.rest.log().clamp_min(-50.0).mean(-1),
        "log α": state.alpha.log(),
        "α": state.alpha,
        "log function": state.function(state.X).square().mean((1, 2)).log(),
        "log weights": state.weights.square().mean((1, 2)).log(),
    }
    if len(theta.noise) > 1:
        values |= {
            "log scales": theta.scales.log().mean((1, 2)),
            "|locs|": theta.locs.abs().mean((1, 2)),
            "log kernel variance": theta.kernel_variance.log(),
            "log noise": theta.noise.log(),
        }
    return values


@pytest.mark.parametrize("held", [False, True])
def test_sweeps_between_new_data_leave_the_prior_as_it_is(held):
    """Geweke's test: draws of unknowns and data stay draws of their joint."""
    scales = torch.tensor([[0.3, 0.1], [0.2, 0.3], [0.1, 0.5]]).double()
    theta = Theta(3.0 * scales.flip(0)[None], scales[None], torch.tensor([2.0]).double(), torch.tensor([0.3]).double())
    sampler = GibbsRFLVM(theta if held else None, block_size=2)
    first = state = sampler.prior(4, 2, 2, F=3, C=3, num_chains=4000)
    Y = _draw_data(state)
    for _ in range(6):
        state = sampler.sweep(state, Y)
        Y = _draw_data(state)
    # Chains are independent and start at exact draws: no autocorrelation spoils the standard errors.
    before, after = _statistics(first), _statistics(state)
    assert (state.X != first.X).all()
    assert (state.omega != first.omega).all()
    change = torch.stack([after[name] - before[name] for name in before])
    z = change.mean(1) / (change.std(1) / change.shape[1] ** 0.5)
    assert z.abs().max() < 3.7, dict(zip(before, z.tolist(), strict=True))


def test_the_prior_is_the_documented_one():
    state = GibbsRFLVM().prior(2, 2, 3, F=4, C=3, num_chains=20_000)
    assert state.alpha.mean().item() == pytest.approx(1.0, abs=0.04)
    # E v = E 1 / (1 + α) for α ~ Exp(1) is e E₁(1).
    assert (1.0 - state.rest).mean().item() == pytest.approx(0.5963, abs=0.01)
    assert (state.z == 0).double().mean().item() == pytest.approx(0.5963, abs=0.015)
    assert state.theta.noise.mean().item() == pytest.approx(1.0, abs=0.04)
    spectral = state.theta.scales.square() * (2.0 * math.pi) ** 2 * 3.0
    assert spectral.mean().item() == pytest.approx(1.0, abs=0.03)
    assert (state.theta.locs / state.theta.scales).square().mean().item() == pytest.approx(1.0, abs=0.03)


def test_a_slice_draws_from_a_gaussian_posterior():
    loc, scale, noise, y = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]), 0.8, torch.tensor([2.0, 1.0])
    current = (loc + scale * torch.randn(20_000, 2)).double()
    for _ in range(15):
        current = gibbs_rflvm.elliptical_slice(
            lambda x: -0.5 * (x - y).square().sum(-1) / noise**2, current, loc.expand_as(current), scale.expand_as(current)
        )
    precision = scale**-2 + noise**-2
    mean = (loc / scale**2 + y / noise**2) / precision
    np.testing.assert_allclose(current.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(current.var(0), 1.0 / precision, rtol=0.05)


def test_turning_undoes_a_rotation_and_keeps_distances():
    X = torch.randn(30, 2).double()
    angle = torch.tensor(2.0).double()
    R = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([-angle.sin(), -angle.cos()])])
    torch.testing.assert_close(gibbs_rflvm.turned(X @ R, X), X)
    other = gibbs_rflvm.turned(2.0 * X, torch.randn(30, 2).double())
    torch.testing.assert_close(torch.pdist(other), 2.0 * torch.pdist(X))


def test_our_variational_means_agree_with_the_sampler():
    """One posterior, its parameters known to both: exact means of the latents and ours, up to an affine function."""
    spectral = torch.full((1, 2, 2), 1.0 / (2.0 * math.pi * 1.5)).double()
    theta = Theta(torch.zeros_like(spectral), spectral, torch.ones(1).double(), torch.full((1,), 0.05).double())
    sampler = GibbsRFLVM(theta)
    Y = _draw_data(sampler.prior(25, 20, 2, F=10, C=2))[0]
    model = RandomFeatureLVM(25, 20, 2, num_frequencies=10, num_components=2, likelihood=Gaussian(0.05)).double().initialize(Y)
    with torch.no_grad():
        model.component_scales, model.kernel_variance, model.mean = (
            spectral[0],
            theta.kernel_variance[0],
            torch.zeros(20).double(),
        )
    model.requires_grad_(False)
    guide = RandomFeatureGuide(model, frequencies="gaussian")
    gradient, *closed_forms = guide.blocks(lr=0.03)
    blocks = [replace(gradient, params=["guide.omega.*", "guide.X.*"]), *closed_forms]
    fit(model, guide, Y, optim=blocks, num_steps=200, progress=False)
    start = gibbs_rflvm.start(sampler, Y, 2, F=10, C=2)
    assert start.theta is theta
    exact = gibbs_rflvm.mean_latents(sampler, start, Y[None], num_sweeps=400)[0]

    def r2(X):
        return LinearRegression().fit(X, exact).score(X, exact)

    # Principal components, where both start, are straight; the functions are not.
    assert r2(start.X[0]) < 0.97
    assert r2(guide.median()["X"]) > 0.99
