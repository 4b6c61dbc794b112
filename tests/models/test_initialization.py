"""Linear starts against scikit-learn and against data that are exactly linear."""

from functools import partial

import pytest
import torch
from sklearn.decomposition import PCA, FactorAnalysis

from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, cluster_centres, latent_mixture, linear_latents


@pytest.fixture
def low_rank(dtype):
    """Rank-two data with offsets, no noise."""
    return torch.randn(60, 2, dtype=dtype) @ torch.randn(2, 6, dtype=dtype) + torch.randn(6, dtype=dtype)


def _with_holes(Y):
    holes = torch.rand(Y.shape) < 0.15
    holes[torch.arange(len(Y)), torch.randint(Y.shape[1], (len(Y),))] = False
    return Y.masked_fill(holes, torch.nan), holes


def _span_distance(X, Y):
    """How much of the columns of X lies outside the span of the centred columns of Y, in units of X."""
    basis = torch.linalg.svd(Y - Y.mean(0), full_matrices=False)[0][:, :2]
    return (X - basis @ (basis.mT @ X)).square().mean().sqrt().item()


@pytest.mark.parametrize(("method", "peer"), [("pca", PCA), ("factor-analysis", FactorAnalysis)])
def test_equals_scikit_learn_up_to_sign(dtype, method, peer):
    Y = torch.randn(50, 5, dtype=dtype) * torch.arange(1.0, 6, dtype=dtype)
    X, filled = linear_latents(Y, 3, method=method)
    scores = torch.as_tensor(peer(3).fit_transform(Y.double().numpy()))
    scores = scores / scores.std(0, correction=0)
    signs = (X.double() * scores).sum(0).sign()
    torch.testing.assert_close(X.double(), signs * scores, rtol=0.0, atol=1e-3 if method == "factor-analysis" else 1e-5)
    assert torch.equal(filled, Y)


def test_unknown_methods_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"expected method in \('pca', 'factor-analysis'\), got 'PCA'"):
        linear_latents(torch.randn(5, 3), 2, method="PCA")


@pytest.mark.parametrize("method", ["pca", "factor-analysis"])
def test_centred_with_unit_variance_and_of_the_dtype_of_the_data(dtype, method):
    Y, _ = _with_holes(10 + 5 * torch.randn(40, 5, dtype=dtype))
    X, filled = linear_latents(Y, 2, method=method)
    assert X.dtype == filled.dtype == dtype
    torch.testing.assert_close(X.std(0, correction=0), torch.ones(2, dtype=dtype), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(X.mean(0), torch.zeros(2, dtype=dtype), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(("method", "turns", "tolerance"), [("pca", 200, 0.01), ("factor-analysis", 50, 0.3)])
def test_fills_the_gaps_of_low_rank_data(low_rank, method, turns, tolerance):
    Y, holes = _with_holes(low_rank)
    assert holes.any()
    X, filled = linear_latents(Y, 2, method=method, num_iterations=turns)
    assert torch.equal(filled[~holes], low_rank[~holes])
    error = (filled - low_rank)[holes].square().mean().sqrt()
    assert error < tolerance * low_rank.std()
    assert _span_distance(X, low_rank) < tolerance


def test_filling_by_turns_beats_column_means(low_rank):
    Y, holes = _with_holes(low_rank)
    errors = [
        (linear_latents(Y, 2, num_iterations=turns)[1] - low_rank)[holes].square().mean().item() for turns in (0, 1, 5, 20)
    ]
    assert errors == sorted(errors, reverse=True)
    torch.testing.assert_close(
        linear_latents(Y, 2, num_iterations=0)[1][holes], Y.nanmean(0).expand_as(Y)[holes], rtol=1e-4, atol=1e-5
    )
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("shape", [(60, 3), (4, 9)])
def test_more_latents_than_components(dtype, shape):
    Y = torch.randn(shape, dtype=dtype)
    X, _ = linear_latents(Y, 7)
    assert X.shape == (shape[0], 7)
    assert X.dtype == dtype
    assert X.isfinite().all()
    rank = min(shape)
    first, _ = linear_latents(Y, rank)
    torch.testing.assert_close(X[:, :rank], first)
    if shape[0] == 60:  # standard normal columns: the mean of 240 squares lies within 4 standard errors of 1
        assert abs(X[:, rank:].square().mean() - 1) < 4 * (2 / (60 * 4)) ** 0.5


@pytest.mark.parametrize("method", ["pca", "factor-analysis"])
def test_unit_variance_below_the_rank(dtype, method):
    """Fewer rows than latents, constant columns, one function many times over, and an indicator of groups."""
    constant = torch.randn(20, 3) * torch.tensor([1.0, 0.0, 0.0]) + torch.tensor([0.0, 0.1, 3.3])
    cases = [(torch.randn(N, 9), Q) for N, Q in ((2, 2), (3, 3), (5, 5), (4, 6))]
    cases += [(constant, 2), (torch.zeros(10, 3), 2), (torch.full((1000, 2), 0.1), 2)]
    cases += [(torch.randn(3000, 1).expand(-1, 3), 3), (torch.eye(4).repeat(10, 1), 4)]
    for Y, Q in cases:
        X, _ = linear_latents(Y.to(dtype), Q, method=method)
        torch.testing.assert_close(X.mean(0), torch.zeros(Q, dtype=dtype), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(X.std(0, correction=0), torch.ones(Q, dtype=dtype))


def test_what_varies_comes_before_random_columns():
    Y = torch.randn(20, 3) * torch.tensor([0.0, 1.0, 0.0])
    X, _ = linear_latents(Y, 2)
    assert torch.corrcoef(torch.stack([X[:, 0], Y[:, 1]]))[0, 1].abs().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.corrcoef(X.T)[0, 1].abs() < 0.9


def test_one_row_lies_at_the_centre():
    assert torch.equal(linear_latents(torch.randn(1, 3), 2)[0], torch.zeros(1, 2))


def test_constant_data_give_finite_latents():
    X, _ = linear_latents(torch.ones(10, 3) + torch.tensor([1e-3, 0.0, 0.0]) * torch.randn(10, 1), 2)
    assert X.isfinite().all()


def test_seeds():
    Y, _ = _with_holes(torch.randn(30, 3))
    state = torch.get_rng_state()
    same = [linear_latents(Y, 5, seed=1)[0] for _ in range(2)]
    other = linear_latents(Y, 5, seed=2)[0]
    assert torch.equal(*same)
    assert not torch.equal(same[0][:, 3:], other[:, 3:])
    assert torch.equal(state, torch.get_rng_state())


class TestClusterCentres:
    def test_finds_separate_clusters(self, dtype):
        truth = 10 * torch.eye(3, dtype=dtype)
        noise = torch.randn(40, 3, 3, dtype=dtype)
        X = (truth + noise).reshape(-1, 3)
        centres = cluster_centres(X, 3)
        assert centres.shape == (3, 3)
        assert centres.dtype == dtype
        order = centres.argmax(1).argsort()
        torch.testing.assert_close(centres[order], (truth + noise).mean(0), rtol=0.0, atol=1e-4)

    def test_as_many_centres_as_rows_are_the_rows(self):
        X = torch.randn(6, 2)
        centres = cluster_centres(X, 6)
        torch.testing.assert_close(torch.cdist(X, centres).min(1).values, torch.zeros(6), rtol=0.0, atol=1e-3)

    def test_seeds(self):
        X = torch.randn(50, 2)
        assert torch.equal(cluster_centres(X, 8, seed=1), cluster_centres(X, 8, seed=1))
        assert not torch.equal(cluster_centres(X, 8, seed=1), cluster_centres(X, 8, seed=2))

    def test_more_centres_than_places(self):
        X = torch.tensor([[0.0, 0.0], [0.0, 1.0], [5.0, 1.0]]).repeat(10, 1)
        centres = cluster_centres(X, 8)
        assert torch.pdist(centres).min() > 1e-3
        assert torch.cdist(centres, X[:3]).min(1).values.max() < 1.0


def test_latent_mixture_finds_clusters():
    centres = torch.tensor([[-3.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
    which = (torch.rand(4000) < 0.25).long()
    X = centres[which] + 0.5 * torch.randn(4000, 2, dtype=torch.float64)
    mixture = latent_mixture(X, 2)
    order = mixture.component_distribution.mean[:, 0].argsort()
    torch.testing.assert_close(mixture.component_distribution.mean[order], centres, rtol=0.0, atol=0.05)
    expected = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(mixture.mixture_distribution.probs[order], expected, rtol=0.0, atol=0.03)
    covariances = mixture.component_distribution.covariance_matrix
    torch.testing.assert_close(covariances, 0.25 * torch.eye(2).double().expand(2, 2, 2), rtol=0.0, atol=0.03)


class TestOwnLatents:
    """Both models start from latents that are given."""

    MODELS = (partial(BayesianGPLVM, num_inducing=10), partial(RandomFeatureLVM, num_frequencies=10))

    @pytest.mark.parametrize("model_class", MODELS)
    def test_models_start_at_them_standardised(self, dtype, low_rank, model_class):
        layout = 3.0 + torch.randn(60, 2, dtype=torch.float64) * torch.tensor([5.0, 0.2])
        model = model_class(60, 6, 2).to(dtype).initialize(low_rank, latents=layout)
        X = model.initial_values["X"]
        assert X.dtype == dtype
        torch.testing.assert_close(X.mean(0), torch.zeros(2, dtype=dtype), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(X.std(0, correction=0), torch.ones(2, dtype=dtype))
        torch.testing.assert_close(X.double() * layout.std(0, correction=0) + layout.mean(0), layout, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("model_class", MODELS)
    def test_those_of_pca_are_the_default(self, dtype, low_rank, model_class):
        default, own = (model_class(60, 6, 2).to(dtype) for _ in range(2))
        default.initialize(low_rank)
        own.initialize(low_rank, latents=linear_latents(low_rank, 2)[0])
        for name, value in [*default.initial_values.items(), *default.state_dict().items()]:
            other = {**own.initial_values, **own.state_dict()}[name]
            torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("model_class", MODELS)
    def test_what_cannot_be_a_start_is_named(self, low_rank, dtype, model_class):
        model = model_class(60, 6, 2).to(dtype)
        with pytest.raises(ValueError, match=r"expected latents \[60, 2\], a row for each datum, got \[60, 3\]"):
            model.initialize(low_rank, latents=torch.randn(60, 3))
        for flaw in (torch.nan, torch.inf):
            with pytest.raises(ValueError, match="expected finite latents"):
                model.initialize(low_rank, latents=torch.randn(60, 2).index_fill(0, torch.tensor([4]), flaw))
        with pytest.raises(ValueError, match="columns that vary"):
            model.initialize(low_rank, latents=torch.randn(60, 1) * torch.tensor([1.0, 0.0]))
