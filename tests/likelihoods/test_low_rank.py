"""The Gaussian likelihood with a low-rank-plus-diagonal covariance, beside dense normals."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn
from torch.distributions import MultivariateNormal

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, Heterogeneous, LowRankGaussian
from pyro_lvgp.models import GPVAE, BayesianGPLVM, Prediction

pytestmark = pytest.mark.usefixtures("float64")
N, D = 5, 4


@pytest.fixture
def likelihood() -> LowRankGaussian:
    likelihood = LowRankGaussian(2, D)
    likelihood.cov_factor, likelihood.cov_diag = torch.randn(D, 2), torch.rand(D) + 0.2
    return likelihood


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, mask of the observed entries, means and variances of f."""
    observed = torch.rand(N, D) < 0.6
    observed[0], observed[1], observed[2] = True, False, torch.arange(D) == 1
    return torch.randn(N, D), observed, torch.randn(N, D), torch.rand(N, D)


def covariance(likelihood) -> torch.Tensor:
    return (likelihood.cov_factor @ likelihood.cov_factor.mT + likelihood.cov_diag.diag()).detach()


def test_a_row_given_f_is_a_multivariate_normal(likelihood, rows):
    y, _, f, _ = rows
    given = likelihood(f)
    dense = MultivariateNormal(f, covariance(likelihood))
    assert given.event_shape == (D,)
    torch.testing.assert_close(given.log_prob(y), dense.log_prob(y))
    torch.testing.assert_close(given.mean, dense.mean)
    torch.testing.assert_close(given.variance, dense.variance)


def test_terms_of_rows_are_those_of_the_dense_normal(likelihood, rows):
    y, observed, mean, variance = rows
    of = {t: LikelihoodPredictive(likelihood, mean, variance, t).rows(observed) for t in ("svgp", "fitc", "sampled")}
    S = covariance(likelihood)
    with torch.no_grad():
        draws = of["sampled"].expand((20_000, N)).log_prob(y)
        svgp, fitc = of["svgp"].log_prob(y), of["fitc"].log_prob(y)
    for n in range(1, N):
        o = observed[n]
        if o.any():
            dense = MultivariateNormal(mean[n, o], S[o][:, o] + variance[n, o].diag())
            torch.testing.assert_close(fitc[n], dense.log_prob(y[n, o]))
        else:
            assert svgp[n] == fitc[n] == 0.0
    assert (svgp <= fitc).all()
    assert ((draws.mean(0) - svgp).abs() <= 4.0 * draws.std(0) / len(draws) ** 0.5).all()


def test_marginals_and_samples_of_rows(likelihood, rows):
    y, _, mean, variance = rows
    predicted = LikelihoodPredictive(likelihood, mean, variance)
    assert (predicted.batch_shape, predicted.event_shape) == ((N,), (D,))
    S = covariance(likelihood)
    for value, want in zip(predicted.moments(), (mean, variance + S.diagonal()), strict=True):
        torch.testing.assert_close(value, want)
    want = dist.Normal(mean, (variance + S.diagonal()).sqrt()).log_prob(y)
    torch.testing.assert_close(predicted.log_prob_of_entries(y), want)
    draws = predicted.sample((40_000,))
    for n in range(N):
        found, exact = draws[:, n].T.cov(), S + variance[n].diag()
        error = (exact.square() + exact.diagonal()[:, None] * exact.diagonal()).sqrt() / len(draws) ** 0.5
        assert ((found - exact).abs() < 4.5 * error).all()


def conditional(y, observed, mean, variance, S):
    """Means and covariances of the missing entries of a row given the observed ones."""
    m, o = ~observed, observed
    gain = torch.linalg.solve(S[o][:, o] + variance[o].diag(), S[o][:, m]).mT
    return mean[m] + gain @ (y - mean)[o], S[m][:, m] + variance[m].diag() - gain @ S[o][:, m]


def test_missing_entries_given_observed_ones(likelihood, rows):
    y, observed, mean, variance = rows
    S = covariance(likelihood)
    given = LikelihoodPredictive(likelihood, mean, variance, "fitc").condition(y.masked_fill(~observed, torch.nan))
    found_mean, found_variance = (x.detach() for x in given.moments())
    draws = given.sample((40_000,))
    for n in range(1, N):
        want, exact = conditional(y[n], observed[n], mean[n], variance[n], S)
        m = ~observed[n]
        torch.testing.assert_close(found_mean[n, m], want)
        torch.testing.assert_close(found_variance[n, m], exact.diagonal())
        error = (exact.square() + exact.diagonal()[:, None] * exact.diagonal()).sqrt() / len(draws) ** 0.5
        assert ((draws[:, n, m].T.cov() - exact).abs() < 4.5 * error).all()
    torch.testing.assert_close(given.f_mean, mean)  # f is the same


def test_a_prediction_with_observed_entries_is_conditioned_for_each_draw(likelihood, rows):
    y, observed, mean, variance = rows
    seen, weights = y.masked_fill(~observed, torch.nan), torch.tensor([0.2, 0.8])
    with torch.no_grad():
        parts = [LikelihoodPredictive(likelihood, s * mean, variance, "fitc").expand((1, N)) for s in (1.0, -2.0)]
        predicted = Prediction(parts, weights)
        filled = predicted.with_observed(seen)
    S = covariance(likelihood)
    for n in range(1, N):
        m = ~observed[n]
        draws = [conditional(y[n], observed[n], s * mean[n], variance[n], S) for s in (1.0, -2.0)]
        means, variances = torch.stack([d[0] for d in draws]), torch.stack([d[1].diagonal() for d in draws])
        average = weights @ means
        torch.testing.assert_close(filled.mean[n, m], average)
        torch.testing.assert_close(filled.variance[n, m], weights @ (variances + (means - average).square()))
        want = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means.T, variances.T.sqrt())).log_prob(y[n, m])
        torch.testing.assert_close(filled.log_prob(y)[n, m], want)
    torch.testing.assert_close(filled.mean[observed], y[observed])
    assert torch.equal(filled.f_mean, predicted.f_mean)
    assert not torch.allclose(filled.mean[~observed], predicted.mean[~observed])
    assert torch.equal(Prediction.pool([filled, filled]).mean.round(decimals=9), filled.mean.round(decimals=9))
    with pytest.raises(ValueError, match="expected a prediction without observed entries, got one that has some"):
        filled.with_observed(seen)


def test_a_prediction_of_moments_alone_cannot_be_conditioned(likelihood):
    part = LikelihoodPredictive(likelihood, torch.zeros(1, N, D), torch.zeros(()), "fitc")
    predicted = Prediction([part], hold_parts=False)
    with pytest.raises(ValueError, match="predict fewer rows at a time"):
        predicted.with_observed(torch.zeros(N, D))


def test_without_factors_it_is_the_gaussian_with_a_variance_for_each_output(rows):
    y, observed, mean, variance = rows
    noise = torch.rand(D) + 0.2
    none, plain = LowRankGaussian(0, D, variance=noise), Gaussian(noise, data_dim=D)
    for term in ("svgp", "fitc"):
        found, want = (LikelihoodPredictive(each, mean, variance, term) for each in (none, plain))
        torch.testing.assert_close(found.rows(observed).log_prob(y), want.rows(observed).log_prob(y))
        torch.testing.assert_close(found.rows().log_prob(y), want.rows().log_prob(y))
        torch.testing.assert_close(found.moments(), want.moments())
        torch.testing.assert_close(found.condition(y.masked_fill(~observed, torch.nan)).moments(), want.moments())
    torch.testing.assert_close(none(mean).log_prob(y), plain(mean).to_event(1).log_prob(y))
    none.init_from_data(y, mean)
    assert (none.cov_diag > 0.0).all()


def test_priors_line_up_with_particles(likelihood, rows):
    y, observed, mean, variance = rows
    values = torch.rand(3, 1, D) + 0.2  # as under a plate of 3 particles
    likelihood.cov_diag = PyroSample(dist.Delta(values).to_event(0))
    params = likelihood.params()
    found = likelihood.log_prob_of_rows(y, observed, mean.expand(3, N, D), variance, params)
    for s in range(3):
        single = LowRankGaussian(2, D, variance=values[s, 0])
        single.cov_factor = likelihood.cov_factor.detach()
        torch.testing.assert_close(found[s], single.log_prob_of_rows(y, observed, mean, variance, single.params()))
    assert likelihood.distribution(mean, params).sample().shape == (3, N, D)


def test_initial_parameters_are_those_of_the_residuals():
    W, noise = 2.0 * torch.randn(D, 1), torch.rand(D) + 0.2
    f = 5.0 * torch.randn(20_000, D)
    y = f + torch.randn(20_000, 1) @ W.T + noise.sqrt() * torch.randn(20_000, D)
    y = y.masked_fill(torch.rand(y.shape) < 0.3, torch.nan)
    likelihood = LowRankGaussian(1, D)
    likelihood.init_from_data(y, f)
    want = W @ W.T + noise.diag()
    scale = want.diagonal().sqrt()
    assert ((covariance(likelihood) - want) / scale / scale[:, None]).abs().max() < 4.0 * (20_000 * 0.49) ** -0.5


def test_initial_parameters_stay_where_frozen_and_finite_without_residuals(likelihood):
    y = torch.randn(30, D)
    before = likelihood.params().detach()
    likelihood.cov_factor_unconstrained.requires_grad_(False)
    likelihood.init_from_data(y, torch.zeros_like(y))
    torch.testing.assert_close(likelihood.params().detach(), before)
    likelihood.cov_factor_unconstrained.requires_grad_(True)
    likelihood.init_from_data(y, y)
    assert (likelihood.cov_factor == before[1:3].mT).all()  # a W of zeros would have no gradient
    torch.testing.assert_close(likelihood.cov_diag.detach(), 1e-3 * y.var(0, correction=0))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rank": -1}, "expected a rank from 0 to data_dim=4, got -1"),
        ({"rank": 5}, "expected a rank from 0 to data_dim=4, got 5"),
        ({"rank": 1, "variance": 0.0}, "expected one positive variance, or data_dim=4 of them, got 0.0"),
        ({"rank": 1, "variance": torch.ones(3)}, "expected one positive variance, or data_dim=4 of them"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, match, unchecked):
    with pytest.raises(ValueError, match=match):
        LowRankGaussian(data_dim=D, **arguments)


def test_uses_that_need_independent_entries_are_refused(likelihood, rows):
    y, _, mean, variance = rows
    with pytest.raises(NotImplementedError, match="got LowRankGaussian, whose entries of a row are dependent"):
        likelihood.expected_log_prob(y, mean, variance, likelihood.params())
    with pytest.raises(TypeError, match="independent entries for Heterogeneous, got LowRankGaussian"):
        Heterogeneous([(likelihood, range(D)), (Gaussian(), [D])])
    with pytest.raises(TypeError, match="independent entries for GPVAE, got LowRankGaussian"):
        GPVAE(RBF(1, batch_shape=(1,)), nn.Linear(1, D), likelihood)
    with pytest.raises(ValueError, match="expected a likelihood of 3 outputs, got one of 4; pass data_dim=3 to it"):
        BayesianGPLVM(N, 3, 1, num_inducing=2, likelihood=likelihood)


def test_copies_and_saved_states_hold_the_parameters(likelihood):
    other = LowRankGaussian(2, D)
    other.load_state_dict(copy.deepcopy(likelihood).state_dict())
    pyro.clear_param_store()
    torch.testing.assert_close(other.params(), likelihood.params())
    assert likelihood.float()(torch.zeros(2, D, dtype=torch.float32)).mean.dtype == torch.float32
