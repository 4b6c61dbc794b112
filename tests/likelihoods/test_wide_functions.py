"""Expected log likelihoods and log predictive densities against adaptive quadrature, for narrow and wide functions."""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from scipy.integrate import quad
from scipy.special import log_ndtr

from pyro_lvgp.likelihoods import Bernoulli, Binomial, NegativeBinomial, Ordinal, Poisson, StudentT
from pyro_lvgp.ops.ordered_probit import expected_log_interval
from pyro_lvgp.ops.student_t import expected_log_student_t

SDS, MEANS = (0.1, 1.0, 5.0, 20.0, 50.0), (0.0, 0.7, -4.0, 40.0)


def of_levels(edges: list[float], scale: float, y: float) -> Callable[[float], float]:
    ends = [-math.inf, *edges, math.inf]

    def log_prob(f: float) -> float:
        a, b = ((end - f) / scale for end in ends[int(y) : int(y) + 2])
        a, b = (-b, -a) if a + b > 0.0 else (a, b)
        return log_ndtr(b) + math.log(-math.expm1(log_ndtr(a) - log_ndtr(b)))

    return log_prob


def of_t(scale: float, df: float, y: float) -> Callable[[float], float]:
    constant = math.lgamma((df + 1.0) / 2.0) - math.lgamma(df / 2.0) - 0.5 * math.log(math.pi * df) - math.log(scale)
    return lambda f: constant - 0.5 * (df + 1.0) * math.log1p(((y - f) / scale) ** 2 / df)


def expectation(function: Callable[[float], float], mean: float, sd: float, kinks: Iterable[float]) -> float:
    """E[g(f)] by adaptive quadrature between points around kinks of g."""
    points = sorted({mean - 12.0 * sd, mean, mean + 12.0 * sd, *(p for p in kinks if abs(p - mean) < 12.0 * sd)})
    density = lambda f: math.exp(-0.5 * ((f - mean) / sd) ** 2) / (sd * math.sqrt(2.0 * math.pi))  # noqa: E731
    parts = itertools.pairwise(points)
    return sum(quad(lambda f: density(f) * function(f), *part, epsabs=1e-10, epsrel=1e-10, limit=200)[0] for part in parts)


@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
@pytest.mark.parametrize("sd", SDS)
@pytest.mark.parametrize(("edges", "scale"), [([-1.0, 0.0, 2.0], 0.5), ([-1.0, 0.0, 2.0], 0.05), ([0.0, 0.125, 30.0], 2.0)])
def test_expected_log_likelihoods_of_levels(edges, scale, sd, float64):
    likelihood = Ordinal(torch.tensor(edges), scale)
    for y in (0.0, 1.0, 2.0, 3.0):
        check(likelihood, y, sd, of_levels(edges, scale, y), edges, scale)


@pytest.mark.parametrize("sd", SDS)
@pytest.mark.parametrize(("scale", "df"), [(0.5, 4.0), (0.05, 2.5), (3.0, 50.0)])
def test_expected_log_likelihoods_of_heavy_tails(scale, df, sd, float64):
    for y in (0.0, 3.0, -60.0):
        check(StudentT(scale, df=df), y, sd, of_t(scale, df, y), [y], scale)


def check(likelihood, y, sd, log_prob, kinks, scale):
    around = [kink + distance * scale for kink in kinks for distance in (-8.0, -2.0, 0.0, 2.0, 8.0)]
    for mean in MEANS:
        oracle = expectation(log_prob, mean, sd, around)
        found = likelihood.expected_log_prob(*torch.tensor([[y], [mean], [sd**2]]), likelihood.params())
        assert found.item() == pytest.approx(oracle, rel=2e-7, abs=2e-6), (y, mean)


@pytest.mark.parametrize("sd", [1e-3, *SDS])
@pytest.mark.parametrize(
    ("likelihood", "ys"),
    [
        (Bernoulli(), (0.0, 1.0)),
        (Binomial(10), (0.0, 3.0, 10.0)),
        (Binomial(10**6), (0.0, 3.0)),
        (NegativeBinomial(3.0), (0.0, 40.0)),
        (Poisson(), (0.0, 1.0, 1000.0)),
    ],
    ids=["Bernoulli", "binomial", "large binomial", "negative binomial", "Poisson"],
)
def test_log_predictive_densities(likelihood, ys, sd, float64):
    params = likelihood.double().params()
    for y in torch.tensor(ys):
        for mean in (0.0, 0.7, -4.0, 10.0):
            low, high = -1e5, 1e5  # of the standardised function: the interval that has all of the integral
            for num in (200_001, 20_001, 20_001, 100_001):
                z = torch.linspace(low, high, num)
                log_joint = likelihood.distribution(mean + sd * z, params).log_prob(y) - 0.5 * z.square()
                inside = (log_joint > log_joint.max() - 60.0).nonzero()
                low, high = z[(inside[0] - 1).clamp_min(0)].item(), z[(inside[-1] + 1).clamp_max(num - 1)].item()
            oracle = log_joint.logsumexp(0) + (z[1] - z[0]).log() - 0.5 * math.log(2.0 * math.pi)
            found = likelihood.log_predictive_density(y, *torch.tensor([mean, sd**2]), params)
            assert found.item() == pytest.approx(oracle.item(), rel=5e-6, abs=1e-5), (y, mean)


@pytest.mark.parametrize("variance", [0.0, 1e-12, 0.3, 400.0, 1e4])
def test_gradients_against_finite_differences(variance, float64):
    """One-sided in the variance, which may be zero."""

    def numerically(function, a, v, steps):
        first, second = (function(a + n * steps[0], v + n * steps[1]) for n in (1.0, 2.0))
        return (-3.0 * function(a, v) + 4.0 * first - second) / (2.0 * sum(steps))

    t = lambda r, v: expected_log_student_t(r, torch.tensor(0.7), 4.0, v)  # noqa: E731
    interval = lambda a, v: expected_log_interval(a, a + 1.5, v)  # noqa: E731
    for function in (t, interval, lambda a, v: expected_log_interval(torch.full_like(a, -torch.inf), a, v)):
        for where in (-30.0, 0.1, 2.0):
            a, v = torch.tensor(where).requires_grad_(), torch.tensor(variance).requires_grad_()
            found = torch.autograd.grad(function(a, v), (a, v))
            expected = tuple(numerically(function, a, v, steps) for steps in ((1e-4, 0.0), (0.0, 1e-4 * max(variance, 1.0))))
            if variance < 1e-9 and function is not t:
                # Below rounding in units of the noise the part by quadrature has no gradient in the variance.
                torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
                assert found[1].isfinite()
            else:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_single_precision_and_shapes():
    likelihood = Ordinal(torch.tensor([[-1.0, 0.0], [0.0, 3.0]]), torch.tensor([0.5, 1.0]), data_dim=2)
    y, mean, variance = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), 30.0 * torch.randn(5, 2, 2), torch.tensor([[1e-8], [1e3]])
    for each in (likelihood, StudentT(torch.tensor([0.1, 2.0]), data_dim=2)):
        found = each.expected_log_prob(y, mean, variance, each.params())
        double = each.double()
        expected = double.expected_log_prob(y.double(), mean.double(), variance.double(), double.params())
        assert found.shape == (5, 2, 2)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
