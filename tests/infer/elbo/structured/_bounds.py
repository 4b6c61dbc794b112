"""Estimators of the structured bound and comparisons with its expectation."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.infer import StructuredELBO

ESTIMATORS = [
    {"value": value, "gradient_estimator": gradient}
    for value, gradient in product(("semi-analytic", "doubly-stochastic"), ("path", "score"))
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: "-".join(e.values()))


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
