"""Training under every likelihood and with other guides."""

import math

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_lvgp.datasets import s_curve
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI, MeanFieldELBO
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, LogNormal, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.models import RandomFeatureLVM
from tests.helpers.random_features import C, D, F, N, Q, make_pair, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def test_vectorised_particles_estimate_the_same_bound(Y):
    for options in ({}, {"frequencies": "gaussian"}, {"weights": "explicit"}):
        pyro.clear_param_store()
        model, guide = make_pair(with_holes(Y), **options)
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
    Y = with_holes(likelihood(torch.randn(N, D)).sample())
    model, guide = make_pair(Y, likelihood)
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
    median = guide.median()
    assert set(median) == {"alpha", "v", "omega", "X", "a"}
    torch.testing.assert_close(median["X"], guide.X.loc.detach())
    assert 1.0 <= guide.num_components_in_use() <= C


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_one_latent_dimension(Y, frequencies):
    model, guide = make_pair(Y, latent_dim=1, frequencies=frequencies)
    vi = BlockCoordinateVI(model, guide, guide.blocks(lr=0.05))
    losses = [vi.step(Y) for _ in range(150)]
    assert sum(losses[-20:]) < sum(losses[:20]) - 20.0
    assert model.spectral_density(guide, torch.zeros(1, 1)).isfinite().all()


def test_s_curve_is_recovered():
    """Noise, kernel between pairs of points, and latents better than those of PCA."""
    data = s_curve(300, 60)
    Y, truth = torch.as_tensor(data.Y), torch.as_tensor(data.X)
    model = RandomFeatureLVM(300, 60, 2, num_frequencies=30).initialize(Y)
    guide = RandomFeatureGuide(model, frequencies="gaussian")
    vi = BlockCoordinateVI(model, guide, guide.blocks(lr=0.05))
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
    model, guide = make_pair(Y, **options)
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


def test_models_leave_the_random_state_alone():
    state = torch.get_rng_state()
    RandomFeatureLVM(N, D, Q)
    assert torch.equal(torch.get_rng_state(), state)
