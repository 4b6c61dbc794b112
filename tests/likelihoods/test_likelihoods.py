import math
import re
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch.distributions import Independent, kl_divergence

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.likelihoods import (
    Bernoulli,
    Binomial,
    Gaussian,
    Heterogeneous,
    Likelihood,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_lvgp.models import BayesianGPLVM, Prediction, RandomFeatureLVM
from pyro_lvgp.ops.quadrature import gauss_hermite
from pyro_lvgp.ops.student_t import log_student_t_plus_normal

LIKELIHOODS = {
    "gaussian": lambda: Gaussian(0.3),
    "gaussian per output": lambda: Gaussian(0.3, data_dim=4),
    "log-normal": lambda: LogNormal(0.2),
    "log-normal per output": lambda: LogNormal(0.2, data_dim=4),
    "student-t": lambda: StudentT(2.0),
    "student-t per output": lambda: StudentT(2.0, df=7.0, data_dim=4),
    "bernoulli": Bernoulli,
    "binomial": lambda: Binomial(7),
    "poisson": Poisson,
    "negative binomial": lambda: NegativeBinomial(5.0),
    "negative binomial per output": lambda: NegativeBinomial(5.0, data_dim=4),
    "ordinal": lambda: Ordinal(torch.tensor([-1.0, 0.0, 1.0]), 1.0),
    "ordinal per output": lambda: Ordinal(torch.tensor([-1.0, 0.0]) + 0.5 * torch.arange(4)[:, None], 1.0, data_dim=4),
    "columns of several kinds": lambda: Heterogeneous(
        [(StudentT(2.0), [2]), (NegativeBinomial(torch.tensor([5.0, 3.0]), data_dim=2), [3, 0]), (Bernoulli(), [1])]
    ),
}


@pytest.fixture(params=LIKELIHOODS, ids=str)
def likelihood(request) -> Likelihood:
    return LIKELIHOODS[request.param]().double()


@pytest.fixture
def problem(likelihood):
    mean, variance = torch.randn(3, 4).double(), torch.rand(3, 4).double()
    return likelihood(mean).sample(), mean, variance


def _grid(function, mean, variance):
    """∫ g(f) N(f; mean, variance) df on a fine grid."""
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64).view(-1, 1, 1)
    density = torch.exp(dist.Normal(0.0, 1.0).log_prob(z))
    return torch.trapezoid(density * function(mean + variance.sqrt() * z), dx=18 / 4000, dim=0)


def test_gauss_hermite_is_exact_for_polynomials():
    mean, variance = torch.tensor(0.7).double(), torch.tensor(2.0).double()
    fourth = mean**4 + 6 * mean**2 * variance + 3 * variance**2
    torch.testing.assert_close(gauss_hermite(lambda f: f**4, mean, variance, num_points=3), fourth)
    log = gauss_hermite(lambda f: f, mean, variance, log=True)
    torch.testing.assert_close(log, mean + variance / 2)


def test_gauss_hermite_gradient_at_zero_variance():
    variance = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    gauss_hermite(torch.sin, torch.zeros(2, dtype=torch.float64), variance).sum().backward()
    assert variance.grad.isfinite().all()


def test_expectations_against_a_grid(likelihood, problem):
    y, mean, variance = problem
    with torch.no_grad():
        params = likelihood.params()
        expected = _grid(lambda f: likelihood(f).log_prob(y), mean, variance)
        torch.testing.assert_close(likelihood.expected_log_prob(y, mean, variance, params), expected, rtol=1e-6, atol=1e-5)
        marginal = _grid(lambda f: likelihood(f).log_prob(y).exp(), mean, variance).log()
        torch.testing.assert_close(likelihood.log_predictive_density(y, mean, variance, params), marginal, rtol=0.0, atol=2e-3)
        y_mean, y_variance = likelihood.moments(mean, variance, params)
        expected_mean = _grid(lambda f: likelihood(f).mean, mean, variance)
        square = _grid(lambda f: likelihood(f).variance + likelihood(f).mean ** 2, mean, variance)
        torch.testing.assert_close(y_mean, expected_mean, rtol=1e-4, atol=0.0)
        torch.testing.assert_close(y_variance, square - expected_mean**2, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("likelihood", "y", "mean", "variance"),
    [
        (Poisson(), 1000.0, 6.9, 0.25),
        (Poisson(), 1000.0, 0.0, 9.0),
        (Poisson(), 0.0, 5.0, 1.0),
        (Bernoulli(), 0.0, 40.0, 100.0),
        (Binomial(1000), 700.0, 0.0, 1.0),
        (Binomial(1_000_000), 600_000.0, 0.0, 0.25),
        (NegativeBinomial(10.0), 30.0, 0.0, 9.0),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Likelihood) else str(x),
)
def test_marginals_where_y_says_more_of_f_than_is_known_of_it(likelihood, y, mean, variance):
    """With gradients."""
    likelihood = likelihood.double()
    y, mean, variance = (torch.tensor([[x]], dtype=torch.float64, requires_grad=True) for x in (y, mean, variance))
    z = torch.linspace(-15.0, 15.0, 300_001, dtype=torch.float64).view(-1, 1, 1)
    log_joint = likelihood(mean + variance.sqrt() * z).log_prob(y.detach()) + dist.Normal(0.0, 1.0).log_prob(z)
    expected = log_joint.logsumexp(0) + (z[1] - z[0]).log()
    found = likelihood.log_predictive_density(y.detach(), mean, variance, likelihood.params())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=5e-3)
    inputs = [mean, variance, *likelihood.parameters()]
    for ours, exact in zip(*(torch.autograd.grad(value.sum(), inputs) for value in (found, expected)), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "likelihood", [Poisson(), Bernoulli(), Binomial(7), NegativeBinomial(5.0)], ids=lambda x: type(x).__name__
)
def test_slopes_are_derivatives(likelihood):
    f = torch.linspace(-3.0, 3.0, 8, dtype=torch.float64, requires_grad=True)
    likelihood, y, params = likelihood.double(), torch.ones(8, dtype=torch.float64), likelihood.double().params()
    (first,) = torch.autograd.grad(likelihood.distribution(f, params).log_prob(y).sum(), f, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), f)
    torch.testing.assert_close(likelihood.log_prob_derivatives(y, f, params), (first, second))


@pytest.mark.parametrize("count", [10, 1000, 10_000_000])
def test_variances_of_counts_that_hardly_vary(count):
    f = torch.linspace(-30.0, 30.0, 121)
    for variance in (0.0, 1e-8):
        _, found = Binomial(count).moments(f, torch.full_like(f, variance), None)
        assert (found >= 0.0).all()
        p, q = f.double().sigmoid(), (-f.double()).sigmoid()
        expected = count * p * q + (count * p * q).square() * variance
        near = f.abs() < 8.0  # beyond, 1 − p has few digits
        torch.testing.assert_close(found[near].double(), expected[near], rtol=1e-2, atol=0.0)


def test_derivatives_of_predictive_densities(likelihood, problem):
    """In the mean of f, and by the heat equation in its variance."""
    y, mean, variance = problem[0], *(x.requires_grad_() for x in problem[1:])
    density = likelihood.log_predictive_density(y, mean, variance, likelihood.params())
    first, of_variance = torch.autograd.grad(density.sum(), (mean, variance), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), mean)
    found = likelihood.log_predictive_derivatives(y, mean, variance, likelihood.params())
    torch.testing.assert_close(found, (density.detach(), first.detach(), second), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(0.5 * (found[2] + found[1].square()), of_variance.detach(), rtol=1e-4, atol=1e-4)


def test_function_inverts_the_link_roughly(likelihood):
    f = torch.linspace(-1, 1, 4).double()
    start = likelihood.inverse_link(likelihood(f).sample((20_000,)).mean(0))
    assert (start.diff() > 0).all()
    assert (start - f).abs().max() < 0.9


def test_several_data_share_one_function(likelihood):
    """As many rows as there are nodes of quadrature too, which must not be taken for these."""
    y = likelihood(torch.randn(20, 4).double()).sample()
    mean, variance, params = torch.randn(4).double(), torch.rand(()).double(), likelihood.params()
    for log_prob in (likelihood.expected_log_prob, likelihood.log_predictive_density):
        every = log_prob(y, mean.expand(20, 4), variance.expand(20, 4), params)
        torch.testing.assert_close(log_prob(y, mean, variance, params), every)


def test_wild_entries_are_left_out_of_the_start():
    """More than five standard deviations from the mean of normal columns; but not rows that are far as a whole."""
    y = torch.randn(10_001, 3)
    y[:3] = torch.tensor([[0.1, 5.5, torch.nan], [-4.5, 1e6, 0.2], [9.0, 9.0, 0.0]])
    start = StudentT().initial_function(y)
    nan = torch.nan
    torch.testing.assert_close(start[:3], torch.tensor([[0.1, nan, nan], [-4.5, nan, 0.2], [9.0, 9.0, 0.0]]), equal_nan=True)
    torch.testing.assert_close(start[3:], y[3:])
    mostly_one = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [7.0, 3.0]])  # the first column has no spread
    torch.testing.assert_close(StudentT().initial_function(mostly_one), mostly_one)
    torch.testing.assert_close(Gaussian().initial_function(y), y, equal_nan=True)


@pytest.mark.parametrize(
    ("likelihood", "bad"),
    [(Bernoulli(), 2.0), (Binomial(3), 4.0), (Poisson(), -1.0), (NegativeBinomial(), 0.5), (LogNormal(), 0.0)],
)
def test_check_names_what_is_outside_the_support(likelihood, bad):
    likelihood.check(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match=r"expected .* got"):
        likelihood.check(torch.tensor([[1.0, bad]]))


def test_counts_of_columns_are_told_apart():
    for count, text in ([3, 5], r"total_count, \[3, 5\] by column"), ([3, 3], "3"), (3, "3"):
        with pytest.raises(ValueError, match=rf"expected integers from 0 to {text}, got 4"):
            Binomial(torch.tensor(count)).check(torch.tensor([[4.0, 2.0]]))


def test_a_rate_beyond_all_numbers_has_a_density(dtype):
    f, y = torch.tensor([[[1.0]], [[1000.0]]], dtype=dtype, requires_grad=True), torch.full((1, 1), 3.0, dtype=dtype)
    found = Prediction((Poisson()(f),)).log_prob(y)
    torch.testing.assert_close(found, dist.Poisson(f[0].exp()).log_prob(y) - math.log(2.0))
    (gradient,) = torch.autograd.grad(found, f)
    torch.testing.assert_close(gradient.flatten(), torch.stack([3.0 - f[0].exp(), 0.0 * f[1]]).flatten())


@pytest.mark.parametrize("make", [Gaussian, LogNormal, NegativeBinomial, StudentT])
def test_parameters_must_be_positive(make):
    with pytest.raises(ValueError, match="positive"):
        make(0.0)


def test_log_normal_is_gaussian_in_logarithms():
    mean, variance, y = torch.randn(3, 4).double(), torch.rand(3, 4).double(), torch.rand(3, 4).double() + 0.1
    positive, gaussian = LogNormal(0.4).double(), Gaussian(0.4).double()
    for name in ("expected_log_prob", "log_predictive_density"):
        found = getattr(positive, name)(y, mean, variance, positive.params())
        torch.testing.assert_close(found, getattr(gaussian, name)(y.log(), mean, variance, gaussian.params()) - y.log())


def test_student_t_with_many_degrees_of_freedom_is_gaussian():
    mean, variance, y = torch.randn(3, 4).double(), torch.rand(3, 4).double(), torch.randn(3, 4).double()
    t, gaussian = StudentT(2.0, df=1e7).double(), Gaussian(4.0).double()
    for name in ("expected_log_prob", "log_predictive_density"):
        ours, limit = (getattr(p, name)(y, mean, variance, p.params()) for p in (t, gaussian))
        torch.testing.assert_close(ours, limit, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("df", [2.1, 4.0, 30.0, 200.0])
def test_student_t_plus_normal_against_a_grid(df, dtype):
    """From a t alone to one that is narrow beside the Gaussian, and from the centre to far out; with gradients."""
    ratio = torch.tensor([0.0, 0.03, 0.3, 1.0, 5.0, 100.0]).view(-1, 1)  # standard deviation of f over the scale
    deviation = torch.tensor([0.0, 0.5, 3.0, 30.0, 60.0]) * (1.0 + ratio)
    scale, variance, deviation = (
        x.to(dtype).requires_grad_() for x in (torch.tensor(0.3), (0.3 * ratio) ** 2, 0.3 * deviation)
    )
    found = log_student_t_plus_normal(deviation, scale, df, variance)
    r, s, v = (x.detach().double().requires_grad_() for x in (deviation, scale, variance))
    log_g = torch.linspace(-45.0, 4.0, 40_001, dtype=torch.float64).view(-1, 1, 1)
    half = torch.tensor(df / 2, dtype=torch.float64)
    gamma = dist.Gamma(half, half).log_prob(log_g.exp()) + log_g
    normal = dist.Normal(0.0, (v + s.square() * torch.exp(-log_g)).sqrt()).log_prob(r)
    expected = (gamma + normal).logsumexp(0) + (log_g[1] - log_g[0]).log()
    exact = dist.StudentT(df, 0.0, s).log_prob(r[0])
    torch.testing.assert_close(expected[0], exact, rtol=1e-8, atol=1e-8)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), (deviation, variance, scale)),
        torch.autograd.grad(expected.sum(), (r, v, s)),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("df", [2.0, float("nan"), float("inf")])
def test_student_t_needs_a_variance(df):
    with pytest.raises(ValueError, match=rf"expected df above 2, .* got {df}"):
        StudentT(df=df)


def test_as_many_parameters_as_outputs():
    assert Gaussian(torch.tensor([0.1]), data_dim=3).variance.shape == (3,)
    for value, data_dim in ((torch.tensor([0.1, 0.2]), None), (torch.tensor([0.1, 0.2]), 3), (torch.ones(1, 3), 3)):
        with pytest.raises(ValueError, match=rf"expected one variance, or data_dim of them, got .* and data_dim={data_dim}"):
            Gaussian(value, data_dim=data_dim)


@pytest.mark.parametrize("count", [0, 2.5])
def test_binomial_count_must_be_whole_and_positive(count, unchecked):
    with pytest.raises(ValueError, match=f"whole numbers of 1 or more as total_count, got {float(count)}"):
        Binomial(count)


@pytest.mark.parametrize("model", [partial(BayesianGPLVM, num_inducing=4), RandomFeatureLVM])
def test_binomial_counts_are_for_outputs(model):
    for count in (torch.tensor(5), torch.tensor([5]), torch.tensor([5, 6, 7])):
        model(10, 3, 2, likelihood=Binomial(count))
    for count in (torch.tensor([5, 6]), torch.full((10, 3), 5)):
        shape = str(list(count.shape))
        with pytest.raises(ValueError, match=rf"one for each of 3 outputs, got {re.escape(shape)} of them"):
            model(10, 3, 2, likelihood=Binomial(count))


def test_prior_on_a_shared_variance_lines_up_with_particles():
    likelihood = Gaussian()
    likelihood.variance = PyroSample(dist.LogNormal(torch.zeros(3, 1), 1.0))  # as under a plate of 3 particles
    assert likelihood(torch.zeros(3, 5, 4)).scale.shape == (3, 5, 4)


@pytest.mark.parametrize("holes", [False, True])
def test_rows_are_sums_over_what_is_observed(likelihood, problem, holes):
    y, mean, variance = problem
    mean = mean + torch.randn(2, 1, 1).double()  # a batch of functions
    observed = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool() if holes else torch.ones(3, 4).bool()
    params = likelihood.params()
    entries = {"known": likelihood.distribution(mean, params).log_prob(y)}
    entries["moments"] = likelihood.expected_log_prob(y, mean, variance, params)
    for name, slow in entries.items():
        fast = likelihood.log_prob_of_rows(y, observed, mean, None if name == "known" else variance, params)
        torch.testing.assert_close(fast, (slow * observed).sum(-1))


def test_rows_of_particles_with_a_variance_each():
    y, mean = torch.randn(5, 4), torch.randn(3, 5, 4)
    params = torch.tensor([0.1, 1.0, 5.0])[:, None, None]
    for observed in (torch.ones(5, 4, dtype=torch.bool), torch.rand(5, 4) < 0.5):
        fast = Gaussian().log_prob_of_rows(y, observed, mean, None, params)
        torch.testing.assert_close(fast, (dist.Normal(mean, params.sqrt()).log_prob(y) * observed).sum(-1))


def test_terms_of_a_noisy_function(likelihood, problem):
    y, mean, variance = problem
    with torch.no_grad():
        svgp, fitc, sampled = (LikelihoodPredictive(likelihood, mean, variance, t) for t in ("svgp", "fitc", "sampled"))
        assert (svgp.log_prob(y) <= fitc.log_prob(y) + 1e-9).all()
        draws = sampled.expand((20_000, 3, 4)).log_prob(y)
        standard_error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - svgp.log_prob(y)).abs() < 4.5 * standard_error).all()


def test_samples_of_a_noisy_function_come_from_the_marginal(likelihood, problem):
    _, mean, variance = problem
    noisy = LikelihoodPredictive(likelihood, mean, variance)
    with torch.no_grad():
        draws = noisy.sample((40_000,))
        standard_error = noisy.variance.sqrt() / len(draws) ** 0.5
        assert ((draws.mean(0) - noisy.mean).abs() < 4.5 * standard_error).all()
        torch.testing.assert_close(draws.var(0), noisy.variance, rtol=0.25, atol=0.0)


def test_noisy_function_expands_and_masks(likelihood):
    noisy = LikelihoodPredictive(likelihood, torch.zeros(3, 4).double(), torch.ones(3, 1).double())
    assert noisy.expand((2, 3, 4)).log_prob(torch.ones(3, 4).double()).shape == (2, 3, 4)
    masked = noisy.mask(torch.tensor(False).expand(3, 4)).to_event(1)
    assert (masked.log_prob(torch.zeros(3, 4).double()) == 0).all()


def test_kl_of_full_to_diagonal_gaussian():
    A = torch.randn(2, 3, 3).double()
    q = dist.MultivariateNormal(torch.randn(2, 3).double(), A @ A.mT + torch.eye(3).double())
    loc, scale = torch.randn(2, 3).double(), torch.rand(2, 3).double() + 0.5
    p = dist.Normal(loc, scale).to_event(1)
    dense = dist.MultivariateNormal(loc, torch.diag_embed(scale**2))
    assert isinstance(p, Independent)
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(q, dense))


@pytest.mark.parametrize("shared", [False, True])
def test_dispersion_starts_where_moments_match(shared):
    """Counts around functions known up to a constant for each output."""
    r = torch.tensor([20.0]) if shared else torch.tensor([2.0, 20.0])
    f = torch.stack([torch.linspace(-2.0, 2.0, 20_000)] * 2, 1).double()
    y = dist.NegativeBinomial(r.double(), logits=f).sample()
    y[torch.rand(y.shape) < 0.3] = torch.nan
    likelihood = NegativeBinomial(5.0, data_dim=None if shared else 2)
    likelihood.init_from_data(y, f + torch.tensor([3.0, -1.0]))
    torch.testing.assert_close(likelihood.dispersion.detach(), r.squeeze(), rtol=0.1, atol=0.0)


def test_dispersion_of_counts_with_no_more_noise_than_poissons_is_large():
    """30 times the mean of the counts that are there, within [1, 10⁴]: farther out natural gradients crawl."""
    likelihood = NegativeBinomial(5.0, data_dim=3)
    f = torch.ones(50, 3)
    y = torch.tensor([3.0, 0.0, 1e4]).repeat(50, 1)
    y[:20] = torch.nan
    likelihood.init_from_data(y, f)
    torch.testing.assert_close(likelihood.dispersion.detach(), torch.tensor([90.0, 1.0, 1e4]))
    shared = NegativeBinomial(5.0)
    shared.init_from_data(y[:, :2], f[:, :2])
    assert shared.dispersion.item() == pytest.approx(45.0)


def test_dispersion_stays_where_it_is_known_or_has_a_prior():
    y, f = torch.poisson(torch.full((50, 1), 3.0)), torch.zeros(50, 1)
    frozen = NegativeBinomial(5.0)
    frozen.requires_grad_(False).init_from_data(y, f)
    assert frozen.dispersion.item() == pytest.approx(5.0)
    random = NegativeBinomial(5.0)
    random.dispersion = PyroSample(dist.LogNormal(0.0, 1.0))
    random.init_from_data(y, f)
    assert isinstance(random._pyro_samples["dispersion"], torch.distributions.LogNormal)


def test_a_distribution_without_moments_says_what_to_override():
    class OneTwo(Likelihood):
        def distribution(self, f, params):
            return dist.TransformedDistribution(dist.Bernoulli(logits=f), [dist.transforms.AffineTransform(1.0, 1.0)])

        def inverse_link(self, y):
            return y

    with pytest.raises(NotImplementedError, match=r"mean and variance from OneTwo, got TransformedDistribution; override"):
        OneTwo().moments(torch.zeros(2), torch.ones(2), None)
