"""Mixtures over posterior draws by hand: moments, densities, samples, quantiles and pools."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.models import Prediction

N, D = 6, 3

pytestmark = pytest.mark.usefixtures("float64")


def test_mixtures_by_hand():
    means, variances = torch.randn(5, N, D), 0.1 + torch.rand(5, N, D)
    parts = tuple(dist.Normal(m, v.sqrt()) for m, v in zip(means.split([2, 3]), variances.split([2, 3]), strict=True))
    mixture, y = Prediction(parts), torch.randn(N, D)
    y[0, 1] = torch.nan
    log_prob = mixture.log_prob(y)
    for n in range(N):
        for d in range(D):
            mean = sum(means[s, n, d] for s in range(5)) / 5
            square = sum(means[s, n, d] ** 2 + variances[s, n, d] for s in range(5)) / 5
            torch.testing.assert_close(mixture.mean[n, d], mean)
            torch.testing.assert_close(mixture.variance[n, d], square - mean**2)
            torch.testing.assert_close(mixture.stddev[n, d], (square - mean**2).sqrt())
            terms = [
                -((y[n, d] - means[s, n, d]) ** 2) / (2 * variances[s, n, d])
                - 0.5 * math.log(2 * math.pi * variances[s, n, d])
                for s in range(5)
            ]
            if (n, d) == (0, 1):
                assert log_prob[n, d].isnan()
            else:
                torch.testing.assert_close(log_prob[n, d], torch.logsumexp(torch.stack(terms), 0) - math.log(5.0))


def test_pooled_mixtures_weigh_their_parts_equally():
    one, other = (Prediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 2.0))
    both, y = Prediction.pool(iter([one, other])), torch.randn(N, D)
    torch.testing.assert_close(both.mean, 0.5 * (one.mean + other.mean))
    torch.testing.assert_close(both.log_prob(y), torch.logaddexp(one.log_prob(y), other.log_prob(y)) - math.log(2.0))
    fewer_draws = Prediction((dist.Normal(torch.randn(3, N, D), 1.0),))
    with pytest.raises(ValueError, match=r"expected predictions of one shape .*, got \[\(3,"):
        Prediction.pool([one, fewer_draws])
    with pytest.raises(ValueError, match="expected predictions of one shape"):
        Prediction.pool([])


def test_pooled_mixtures_weigh_as_told():
    parts = [Prediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 1.0, 2.0)]
    pair = Prediction.pool(parts[:2], [3.0, 1.0])
    for found, weights in [
        (pair, [0.75, 0.25, 0.0]),
        (Prediction.pool([*parts[:2], parts[2]], [3.0, 1.0, 0.0]), [0.75, 0.25, 0.0]),
        (Prediction.pool([pair, Prediction.pool([parts[2]] * 2)]), [0.375, 0.125, 0.5]),
        (Prediction.pool([pair, Prediction.pool([parts[2]] * 2)], [0.2, 0.8]), [0.15, 0.05, 0.8]),
    ]:
        y, shares = torch.randn(N, D), torch.tensor(weights)[:, None, None]
        means, variances = (torch.stack([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        mean = (shares * means).sum(0)
        torch.testing.assert_close(found.mean, mean)
        torch.testing.assert_close(found.variance, (shares * (variances + means.square())).sum(0) - mean.square())
        densities = torch.stack([part.log_prob(y) for part in parts]).exp()
        torch.testing.assert_close(found.log_prob(y), (shares * densities).sum(0).log())


def test_draws_of_weighted_mixtures_are_as_many_as_they_weigh():
    far_apart = [Prediction((dist.Normal(torch.full((5000, 1, 1), loc), 0.1),)) for loc in (-10.0, 10.0)]
    found = Prediction.pool(far_apart, [0.3, 0.7])
    share = (found.sample() > 0.0).double().mean().item()
    assert share == pytest.approx(0.7, abs=4.0 * (0.3 * 0.7 / 10_000) ** 0.5)
    assert found.quantile(0.2).item() == pytest.approx(-10.0, abs=1.0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.1], [0.0, 0.0], [1.0, math.nan]])
def test_weights_that_do_not_fit_are_refused(weights):
    part = Prediction((dist.Normal(torch.randn(4, N, D), 1.0),))
    with pytest.raises(ValueError, match="expected 2 weights from zero up"):
        Prediction.pool([part, part], weights)


@pytest.mark.usefixtures("unchecked")
def test_weights_go_by_their_order():
    parts = [Prediction((dist.Normal(torch.randn(4, N, D), scale),)) for scale in (0.5, 2.0)]
    weights = {"one": 3.0, "other": 1.0}
    expected = Prediction.pool(parts, [3.0, 1.0]).mean
    for given in (weights.values(), torch.tensor([3.0, 1.0])):
        torch.testing.assert_close(Prediction.pool(parts, given).mean, expected)
    with pytest.raises(TypeError, match=r"by the names \['one', 'other'\]; pass weights.values\(\)"):
        Prediction.pool(parts, weights)


def test_mixtures_far_from_the_data_do_not_underflow():
    mixture = Prediction((dist.Normal(torch.tensor([[[0.0]], [[1.0]]]), 0.01),))
    expected = dist.Normal(1.0, 0.01).log_prob(torch.tensor(3.0)) - math.log(2.0)
    torch.testing.assert_close(mixture.log_prob(torch.tensor([[3.0]])).squeeze(), expected)


def test_several_quantiles_come_from_the_same_draws():
    mixture = Prediction((dist.Normal(torch.zeros(50, 3, 2), 1.0),))
    low, high = mixture.quantile([0.5, 0.52])
    assert low.shape == (3, 2)
    assert (low < high).all()


def test_quantiles_of_mixtures():
    """Half the draws are far below and half far above: a quarter is the lower half's median."""
    means = torch.tensor([-10.0, 10.0]).repeat(5000).reshape(-1, 1, 1)
    mixture = Prediction((dist.Normal(means, 1.0),))
    error = (math.pi / 2.0 / 5000) ** 0.5  # of a median
    assert mixture.quantile(0.25).item() == pytest.approx(-10.0, abs=5.0 * error)
    assert mixture.quantile(0.75).item() == pytest.approx(10.0, abs=5.0 * error)


def test_quantiles_leave_the_random_state_alone():
    mixture = Prediction([dist.Normal(torch.randn(50, 3, 2), 1.0)])
    state = torch.get_rng_state()
    first = mixture.quantile(0.3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(mixture.quantile(0.3), first)


@pytest.mark.parametrize(("q", "expected"), [(0.0, 0.0), (0.3, 2.0), (0.3001, 3.0), (0.5, 4.0), (1.0, 9.0)])
def test_quantiles_are_the_least_samples_with_that_share_below(q, expected, monkeypatch):
    """Of one sample from each of ten draws, which hardly vary."""
    monkeypatch.setattr(Prediction, "max_size", 10)
    mixture = Prediction([dist.Normal(torch.arange(10.0)[:, None], 1e-9)])
    assert mixture.quantile(q).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("q", [-0.1, 1.1, [0.5, math.nan]])
def test_quantiles_are_of_probabilities(q):
    with pytest.raises(ValueError, match=r"expected q between 0 and 1, got .*; divide percentages by 100"):
        Prediction([dist.Normal(torch.zeros(5, 2), 1.0)]).quantile(q)


def test_samples_follow_the_weights_by_less_than_one():
    far_apart = dist.Normal(torch.tensor([-10.0, 0.0, 10.0])[:, None], 0.1)
    mixture = Prediction([far_apart], torch.tensor([1.0, 0.0, 3.0]))
    expected = math.log(0.25) + far_apart.log_prob(far_apart.mean)[0].item()
    assert mixture.log_prob(torch.tensor([-10.0])).item() == pytest.approx(expected)
    samples = mixture.sample(10)
    assert samples.shape == (10, 1)
    assert (samples.abs() > 5.0).all()
    assert 7 <= int((samples > 5.0).sum()) <= 8
    counts = torch.tensor([int((mixture.sample(10) > 5.0).sum()) for _ in range(400)]).double()
    assert counts.mean().item() == pytest.approx(7.5, abs=4.0 * 0.5 / 20.0)
    with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
        mixture.sample(0)


def test_parts_must_agree():
    part = dist.Normal(torch.zeros(4, 2), 1.0)
    with pytest.raises(ValueError, match="expected one part or more, got none"):
        Prediction([])
    with pytest.raises(ValueError, match=r"expected parts of one batch shape \[draws, \*\[2\]\], got \[4, 3\]"):
        Prediction([part, dist.Normal(torch.zeros(4, 3), 1.0)])


@pytest.mark.usefixtures("unchecked")
def test_weights_are_of_draws():
    part = dist.Normal(torch.zeros(4, 2), 1.0)
    with pytest.raises(ValueError, match=r"expected 8 weights, one for each draw, got \[4\]"):
        Prediction([part, part], torch.full((4,), 0.25))


def test_pools_of_imputations_want_the_same_observed_entries():
    part = [dist.Normal(torch.randn(4, N, D), 1.0)]
    y = torch.randn(N, D)
    y[0, 0] = torch.nan
    one, other = (Prediction(part).with_observed(y) for _ in range(2))
    pooled = Prediction.pool([one, other])
    assert torch.equal(pooled.mean[~y.isnan()], y[~y.isnan()])
    torch.testing.assert_close(pooled.variance, one.variance)
    torch.testing.assert_close(pooled.log_prob(torch.zeros(N, D)), one.log_prob(torch.zeros(N, D)))
    for different in (Prediction(part), Prediction(part).with_observed(y + 1.0)):
        with pytest.raises(ValueError, match="expected predictions with the same observed entries, got different ones"):
            Prediction.pool([one, different])
    with pytest.raises(ValueError, match=r"expected y of shape \[6, 3\]"):
        one.with_observed(y[:2])
