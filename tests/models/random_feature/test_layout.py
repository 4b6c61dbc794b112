"""Models at a layout of their rows: the start, the lengthscale by its bound, likelihoods of counts, and frozen latents."""

import math

import numpy as np
import pytest
import torch
from sklearn.manifold import TSNE

from pyro_lvgp.conjugate.feature_regression import profile_log_density
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI
from pyro_lvgp.kernels.spectral import random_features
from pyro_lvgp.likelihoods import Gaussian, NegativeBinomial
from pyro_lvgp.models import RandomFeatureLVM, RowArguments, linear_latents, tsne_layout
from pyro_lvgp.models._layout import candidate_lengthscales, log_densities_of_lengthscales
from pyro_lvgp.networks import IndexNet

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def Y():
    X = torch.randn(60, 2)
    waves = (2.0 * math.pi * X @ torch.randn(2, 8) / 1.5 + 6.0 * torch.rand(8)).cos()
    return waves @ torch.randn(8, 6) + 0.1 * torch.randn(60, 6)


def test_starts_at_the_standardised_t_sne_of_the_data(Y):
    model = RandomFeatureLVM.from_data(Y, layout="tsne", num_frequencies=20, seed=3)
    layout = TSNE(2, perplexity=59 / 3, random_state=3).fit_transform(Y.numpy())
    expected = (layout - layout.mean(0)) / layout.std(0)
    np.testing.assert_allclose(model.initial_values["X"], expected, rtol=0.0, atol=1e-4)


def test_is_the_initialized_model_of_the_best_lengthscale(Y):
    """The layout can have any unit."""
    X, seed, F = linear_latents(Y, 2)[0], 1, 20
    model = RandomFeatureLVM.from_data(Y, layout=(7.0 * X + 3.0).numpy(), num_frequencies=F, seed=seed)
    lengthscales = candidate_lengthscales(2)
    assert lengthscales[2] == 0.5
    draws = torch.randn(F, 2, generator=torch.Generator().manual_seed(seed))
    found = log_densities_of_lengthscales(X, Y, lengthscales, F, seed=seed)
    features = (random_features(X, draws / (2.0 * math.pi * lengthscale)) for lengthscale in lengthscales)
    torch.testing.assert_close(found, torch.stack([profile_log_density(Phi, Y - Y.mean(0))[0] for Phi in features]))
    best = lengthscales[int(found.argmax())]
    expected = RandomFeatureLVM(60, 6, 2, num_frequencies=F, lengthscale=best, seed=seed).initialize(Y, latents=X, seed=seed)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    torch.testing.assert_close(model.initial_values["X"], expected.initial_values["X"])
    given = RandomFeatureLVM.from_data(Y, layout=X, lengthscale=0.3, seed=seed)
    torch.testing.assert_close(given.component_scales, best / 0.3 * model.component_scales)


def test_the_lengthscale_of_the_data_is_found():
    """Functions drawn with a lengthscale of the grid have their highest log density there or next to it."""
    X = torch.rand(300, 2) * 12**0.5
    X = (X - X.mean(0)) / X.std(0, correction=0)
    for lengthscale in (0.125, 0.5):
        Phi = random_features(X, torch.randn(400, 2) / (2.0 * math.pi * lengthscale))
        Y = Phi @ torch.randn(800, 20) + 0.1 * torch.randn(300, 20)
        found = log_densities_of_lengthscales(X, Y, candidate_lengthscales(2), 200, seed=0)
        assert abs(math.log2(candidate_lengthscales(2)[int(found.argmax())] / lengthscale)) < 0.6


def test_gaps_are_imputed_by_a_linear_model(Y):
    gapped = Y.masked_fill(torch.rand(Y.shape) < 0.1, torch.nan)
    model = RandomFeatureLVM.from_data(gapped, layout="tsne", num_frequencies=5)
    layout = tsne_layout(linear_latents(gapped, 2)[1])
    expected = (layout - layout.mean(0)) / layout.std(0, correction=0)
    torch.testing.assert_close(model.initial_values["X"], expected)


def test_counts_have_a_negative_binomial(Y):
    counts = torch.poisson(Y.exp())
    gapped = counts.masked_fill(torch.rand(Y.shape) < 0.1, torch.nan)
    for data in (counts, gapped):
        likelihood = RandomFeatureLVM.from_data(data, layout="tsne", num_frequencies=5).likelihood
        assert isinstance(likelihood, NegativeBinomial)
        assert likelihood.dispersion.shape == (6,)
    few = counts.clamp_max(3.0)
    for data in (Y, -few, few + 0.5, (counts > 0.0).double()):
        assert type(RandomFeatureLVM.from_data(data).likelihood) is Gaussian
    assert type(RandomFeatureLVM.from_data(counts, likelihood=Gaussian()).likelihood) is Gaussian


def test_sizes_come_from_the_data(Y):
    model = RandomFeatureLVM.from_data(Y.float(), seed=3)
    expected = RandomFeatureLVM(60, 6, 2, seed=3).float().initialize(Y.float(), seed=3)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    assert RandomFeatureLVM.from_data(Y, layout=torch.randn(60, 3)).latent_dim == 3
    assert RandomFeatureLVM.from_data(Y, rows=RowArguments(prior_loc=torch.randn(60, 1))).latent_dim == 1
    constant = RandomFeatureLVM.from_data(torch.zeros(60, 2), layout=torch.randn(60, 2), seed=3)
    torch.testing.assert_close(constant.component_scales, expected.component_scales.double())


def test_frozen_latents_stay_and_all_else_is_learned(Y):
    model = RandomFeatureLVM.from_data(Y, layout=torch.randn(60, 2), num_frequencies=10)
    guide = RandomFeatureGuide(model, frequencies="gaussian", freeze_latents=True)
    guide(Y)
    before = {name: x.detach().clone() for name, x in [*model.named_parameters(), *guide.named_parameters()]}
    vi = BlockCoordinateVI(model, guide, guide.blocks())
    losses = [vi.step(Y) for _ in range(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    after = dict([*model.named_parameters(), *guide.named_parameters()])
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {"X.loc_unconstrained"}
    torch.testing.assert_close(guide.latents().mean, model.initial_values["X"])


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_combined_is_refused(Y):
    make = RandomFeatureLVM.from_data
    with pytest.raises(ValueError, match=r"expected data of shape \[rows, columns\], got \[60\]"):
        make(Y[:, 0])
    with pytest.raises(ValueError, match=r'expected layout="tsne", a table .* got \'umap\''):
        make(Y, layout="umap")
    with pytest.raises(ValueError, match=r"expected a layout of shape \[rows, latent dimensions\], got \[60\]"):
        make(Y, layout=Y[:, 0])
    with pytest.raises(ValueError, match=r"expected latents \[60, 2\], a row for each datum, got \[59, 2\]"):
        make(Y, layout=Y[1:, :2])
    with pytest.raises(ValueError, match=r"expected latents \[60, 3\], a row for each datum, got \[60, 2\]"):
        make(Y, 3, layout=Y[:, :2])
    with pytest.raises(ValueError, match="expected finite latents with columns that vary"):
        make(Y, layout=torch.ones(60, 2))
    with pytest.raises(ValueError, match="expected t-SNE in at most 3 dimensions, got 4"):
        make(Y, 4, layout="tsne")
    with pytest.raises(ValueError, match="expected 5 rows or more for t-SNE, got 4"):
        make(Y[:4], layout="tsne")
    with pytest.raises(ValueError, match="expected rows without missing entries for t-SNE"):
        tsne_layout(torch.full((6, 2), torch.nan))
    for rows in (RowArguments(prior_loc=Y[:, :2]), RowArguments(covariates=Y[:, :1]), RowArguments(exposure=torch.ones(60))):
        with pytest.raises(ValueError, match="expected no layout with priors, covariates or exposures of rows"):
            make(Y, layout="tsne", rows=rows)
    with pytest.raises(ValueError, match="expected freeze_latents=False with an encoder, got True"):
        RandomFeatureGuide(make(Y), encoders={"X": IndexNet(6, 2)}, freeze_latents=True)
    with pytest.raises(ValueError, match="expected a model with initial latents to freeze, got none"):
        RandomFeatureGuide(RandomFeatureLVM(60, 6, 2), freeze_latents=True)
