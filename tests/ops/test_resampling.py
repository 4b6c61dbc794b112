"""Systematic resampling against its definition."""

import math

import pytest
import torch

from pyro_lvgp.ops.resampling import resample, systematic_ancestors

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def log_weights():
    """Weights of five draws of four batch entries, whose sums differ; some are 0."""
    weights = torch.rand(5, 4) ** 3 * torch.tensor([1.0, 1e-200, 1e200, 3.0])
    weights[0, 0] = weights[4, 0] = weights[2, 1] = 0.0
    weights[1:, 3] = 0.0
    return weights.log()


def test_ancestors_are_those_of_the_definition(log_weights):
    uniform = torch.tensor([0.3, 1.0, 0.01, 0.6])
    found = systematic_ancestors(log_weights, uniform)
    for n in range(4):
        shares = log_weights[:, n].softmax(0).tolist()
        sums = [math.fsum(shares[: i + 1]) for i in range(5)]
        want = [next(i for i in range(5) if sums[i] >= (s + uniform[n].item()) / 5 - 1e-12) for s in range(5)]
        assert found[:, n].tolist() == want


def test_copies_are_as_many_as_the_weights_say(log_weights):
    grid = (torch.arange(1000) + 0.5) / 1000
    ancestors = systematic_ancestors(log_weights[:, None].expand(5, 1000, 4), grid[:, None].expand(1000, 4))
    copies = torch.nn.functional.one_hot(ancestors, 5).sum(0)
    expected = 5.0 * log_weights.softmax(0).mT
    torch.testing.assert_close(copies.double().mean(0), expected, atol=4e-3, rtol=0.0)
    assert ((copies - expected).abs() < 1.0 + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_without_weight_are_never_copied(dtype):
    log_weights = torch.tensor([[0.0, 0.2, 0.0, 0.7, 0.1, 0.0]], dtype=dtype).log().mT.expand(6, 3)
    ends = torch.tensor([1.0, torch.finfo(dtype).eps, 0.5], dtype=dtype)
    assert set(systematic_ancestors(log_weights, ends).unique().tolist()) <= {1, 3, 4}


def test_entries_with_even_weights_are_left_and_all_means_remain(log_weights):
    log_weights[:, 0] = torch.tensor([1.0, 1.1, 0.9, 1.0, 1.0])
    ancestors, log_factor = resample(log_weights, torch.full((4,), 0.7), 0.8)
    after = log_weights.gather(0, ancestors) + log_factor
    assert torch.equal(after[:, 0], log_weights[:, 0])
    torch.testing.assert_close(after.logsumexp(0), log_weights.logsumexp(0))
    assert (after[:, 1:] - after[:1, 1:]).abs().max() < 1e-9
    assert torch.equal(resample(log_weights, torch.full((4,), 0.7), 0.0).ancestors, torch.arange(5)[:, None].expand(5, 4))


def test_weights_that_are_no_numbers_remain_so_for_the_check_of_chains():
    ancestors, log_factor = resample(torch.full((3, 2), torch.nan), torch.ones(2), 0.5)
    assert ancestors.max() < 3
    assert log_factor.shape == (3, 2)
