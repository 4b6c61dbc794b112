"""Recorded operations: which draws become random inputs, and what stands for an input that is given twice."""

import pytest
import torch

from pyro_lvgp._compile.recording import record, record_pure
from pyro_lvgp._utils.seeding import seeded


@pytest.mark.parametrize("draw", [torch.randn_like, torch.rand_like])
def test_draws_in_the_shape_of_a_tensor_become_random_inputs(draw):
    x = torch.zeros(2, 3, dtype=torch.float64)
    recording = record(lambda: [x.exp() + draw(x.exp())], [x])
    assert not recording.is_random
    with seeded(1):
        expected = x.exp() + draw(x)
    with seeded(1):
        draws = recording.random_inputs()
    assert [noise.dtype for noise in draws] == [torch.float64]
    assert torch.equal(recording.graph(x, *draws)[0], expected)


def test_draws_in_another_order_of_memory_stay():
    x = torch.zeros(2, 3)
    recording = record(lambda: [torch.randn_like(x.exp().T)], [x])
    assert recording.is_random
    with seeded(1):
        expected = torch.randn_like(x.T)
    with seeded(1):
        found = recording.graph(x, *recording.random_inputs())[0]
    assert torch.equal(found, expected)


def test_draws_that_nothing_needs_stay_in_the_order_of_draws():
    x = torch.zeros(2)

    def function():
        torch.randn(3)
        return [x + torch.rand(2)]

    recording = record(function, [x])
    with seeded(1):
        (expected,) = function()
    with seeded(1):
        draws = recording.random_inputs()
    assert torch.equal(recording.graph(x, *draws)[0], expected)


def test_an_input_given_twice_stands_for_two():
    x = torch.tensor(2.0)
    graph = record_pure(lambda a, b: [a - b], [x, x])
    assert graph(torch.tensor(3.0), torch.tensor(1.0))[0] == 2.0


def test_masks_that_depend_on_nothing_take_what_they_took():
    """Also where they are written into between two uses; those of data are another thing."""

    def function(x):
        mask = torch.zeros(3, 3, dtype=torch.bool)
        mask[0].fill_(True)
        first = x[..., mask]
        mask[:, 1].fill_(True)
        filled = x.clone()
        filled[:, mask] = first.sum()
        return [first, filled, x[mask[0].new_ones(2), 0, 1:]]

    recorded = record_pure(function, [torch.randn(2, 3, 3)])
    x = torch.randn(2, 3, 3)
    for found, expected in zip(recorded(x), function(x), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"do not depend on the values of tensors, got aten\.index"):
        record_pure(lambda x: [x[x > 0.0]], [x])
