"""Weights of rows under importance weighting, and latent sites that the guide lacks."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO, StructuredELBO

N = 6
ONES, TWOS, EACH = (torch.linspace(first, last, N, dtype=torch.float64) for first, last in ((1, 1), (2, 2), (0.5, 3)))
pytestmark = pytest.mark.usefixtures("float64")


def make_model(weight, *, num_rows=N, size=None):
    """y ~ N(x, 1), x ~ N(0, 1), with a weight for each row."""

    def model(y):
        with pyro.plate("data", num_rows, subsample_size=size) as idx, poutine.scale(scale=weight[idx]):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[idx])

    return model


def make_guide(weight, *, num_rows=N, size=None, scale=0.5**0.5):
    def guide(y):
        with pyro.plate("data", num_rows, subsample_size=size) as idx, poutine.scale(scale=weight[idx]):
            pyro.sample("x", dist.Normal(0.5 * y[idx], scale))

    return guide


def evidences(y):
    return dist.Normal(0.0, math.sqrt(2.0)).log_prob(y)


@pytest.mark.parametrize("num_samples", [1, 10])
@pytest.mark.parametrize("weight", [TWOS, EACH], ids=["two", "each"])
def test_weights_multiply_the_log_evidence_of_each_row(weight, num_samples):
    """Under the exact posterior every draw gives the evidence."""
    y = torch.randn(N)
    bound = ImportanceWeightedELBO(num_samples=num_samples)
    loss = bound.differentiable_loss(make_model(weight), make_guide(weight), y)
    torch.testing.assert_close(-loss, (weight * evidences(y)).sum())
    torch.testing.assert_close(
        bound.log_weights(make_model(weight), make_guide(weight), y), evidences(y).expand(num_samples, N)
    )


def test_weighted_bounds_are_weighted_averages_of_the_bounds_of_rows():
    """A guide that is too wide, against the mean over draws of the logarithm of the average of S weights."""
    y, S = torch.randn(N), 5
    weight = EACH
    model, guide = make_model(weight), make_guide(weight, scale=1.5)
    bound = ImportanceWeightedELBO(num_samples=S)
    found = torch.stack([-bound.differentiable_loss(model, guide, y) for _ in range(300)])
    x = 0.5 * y + 1.5 * torch.randn(20_000, S, N)
    log_w = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(x, 1.0).log_prob(y) - dist.Normal(0.5 * y, 1.5).log_prob(x)
    expected = (weight * (log_w.logsumexp(1) - math.log(S))).sum(-1)
    error = (found.var() / len(found) + expected.var() / len(expected)).sqrt()
    assert (found.mean() - expected.mean()).abs() < 4.0 * error
    assert found.mean() < (weight * evidences(y)).sum()


def test_weights_in_mini_batches():
    y, weight = torch.randn(N), EACH
    bound = ImportanceWeightedELBO(num_samples=4)
    losses = [bound.loss(make_model(weight, size=2), make_guide(weight, size=2), y) for _ in range(300)]
    losses = torch.tensor(losses)
    assert (losses.mean() + (weight * evidences(y)).sum()).abs() < 4.0 * losses.std() / len(losses) ** 0.5


def test_doubly_reparameterised_gradients_with_weights():
    """At the exact posterior the gradient of the guide is zero without noise."""
    y, shift = torch.randn(N), torch.zeros((), requires_grad=True)

    def guide(y):
        with pyro.plate("data", N), poutine.scale(scale=EACH):
            pyro.sample("x", dist.Normal(0.5 * y + shift, math.sqrt(0.5)))

    bound = ImportanceWeightedELBO(num_samples=4, gradient_estimator="dreg")
    (gradient,) = torch.autograd.grad(bound.differentiable_loss(make_model(EACH), guide, y), shift)
    torch.testing.assert_close(gradient, torch.zeros(()))


@pytest.mark.parametrize(("of_model", "of_guide"), [(TWOS, ONES), (ONES, TWOS), (TWOS, EACH)])
def test_sites_of_one_row_with_other_weights_are_refused(of_model, of_guide):
    with pytest.raises(ValueError, match="one scale for all sites in plate 'data'"):
        ImportanceWeightedELBO().loss(make_model(of_model), make_guide(of_guide), torch.randn(N))


def test_weights_of_parts_of_a_row_are_refused():
    def model(y):
        with pyro.plate("data", N, dim=-2):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            with pyro.plate("columns", 3, dim=-1), poutine.scale(scale=torch.tensor([1.0, 2.0, 3.0])):
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    def guide(y):
        with pyro.plate("data", N, dim=-2):
            pyro.sample("x", dist.Normal(torch.zeros(N, 1), 1.0))

    with pytest.raises(ValueError, match=r"one scale for all sites|one weight for each datum"):
        ImportanceWeightedELBO().loss(model, guide, torch.randn(N, 3))


def test_a_weight_of_all_sites_multiplies_the_bound():
    y, guide, model = torch.randn(N), make_guide(ONES), make_model(ONES)
    weighted = (poutine.scale(part, scale=0.25) for part in (model, guide))
    assert ImportanceWeightedELBO().loss(*weighted, y) == pytest.approx(-0.25 * evidences(y).sum().item())


def model_of_two(y):
    with pyro.plate("data", N):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0, 0.1))
        pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)


def model_of_a_global(y):
    z = pyro.sample("z", dist.Normal(0.0, 0.1))
    with pyro.plate("data", N):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)


@pytest.mark.parametrize(
    "bound", [ImportanceWeightedELBO(), MeanFieldELBO(), StructuredELBO()], ids=lambda b: type(b).__name__
)
@pytest.mark.parametrize("model", [model_of_two, model_of_a_global], ids=["local", "global"])
@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
def test_a_guide_without_a_latent_site_is_refused(bound, model):
    for validate in (True, False):
        with pyro.validation_enabled(validate), pytest.raises(ValueError, match=r"got none for \['z'\]"):
            bound.loss(model, make_guide(ONES), torch.randn(N))
    if isinstance(bound, ImportanceWeightedELBO):
        with pytest.raises(ValueError, match=r"got none for \['z'\]"):
            bound.log_weights(model, make_guide(ONES), torch.randn(N))
