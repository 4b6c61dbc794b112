"""Recorded functions: results to the last bit, and calls of the function itself where a graph does not hold."""

import logging

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp._compile.recording import CountOperations
from pyro_lvgp.infer import _recorded_function
from pyro_lvgp.infer._recorded_function import RecordedFunction

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def records_at_once(monkeypatch):
    monkeypatch.setattr(_recorded_function, "_NUM_EAGER", 1)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self._function, self.num_calls = function, 0

    def __call__(self, *tensors):
        self.num_calls += 1
        return self._function(*tensors)


def log_density_and_score(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = dist.Normal(0.3, x.exp()).log_prob(torch.linspace(0.0, 1.0, 3)).sum()
        return value.detach(), *torch.autograd.grad(value, x)


def check(function, *points):
    """Compare results with those of the function; return the number of calls at the last point."""
    counted = Counted(function)
    recorded = RecordedFunction(counted)
    for x in points:
        counted.num_calls = 0
        found = recorded(x)
        num_calls = counted.num_calls
        assert all(map(torch.equal, found, function(x)))
    return num_calls


def test_results_are_those_of_the_function_to_the_last_bit():
    assert check(log_density_and_score, *torch.randn(4, 3)) == 0


def test_each_shape_has_its_own_graph():
    assert check(log_density_and_score, torch.zeros(3), torch.ones(3), torch.zeros(2, 3), torch.ones(2, 3)) == 0


def test_booleans_of_tensors_choose_between_the_graph_and_the_function():
    def function(x):
        if x[0] > 0.0:
            return (x.exp(),)
        return (x.sin(),) if not x[1] < -1.0 else (x,)

    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-1.0, -2.0], [3.0, 1.0]])
    for first in range(4):  # recorded in each branch
        for last in range(5):
            expected = first == last or {first, last} <= {0, 1, 4}
            assert (check(function, points[first], points[last]) == 0) == expected


def test_invalid_parameters_raise_what_the_function_raises():
    recorded = RecordedFunction(lambda x: (dist.Poisson(x).log_prob(torch.ones(2)),))
    with pyro.validation_enabled():
        for _ in range(2):
            recorded(torch.ones(2))
        with pytest.raises(ValueError, match="Expected parameter rate"):
            recorded(torch.tensor([1.0, -1.0]))


def test_operations_that_fail_raise_what_the_function_raises():
    recorded = RecordedFunction(lambda x: (torch.linalg.cholesky(x),))
    for _ in range(2):
        recorded(torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        recorded(-torch.eye(2))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x + torch.rand(2),), "without random numbers"),
        (lambda x: (x[x > 0.5],), "aten.index.Tensor"),
        (lambda x: (x * float(x.sum()),), "a Python number or boolean"),
    ],
    ids=["random", "shape", "number"],
)
def test_what_cannot_be_recorded_is_called(function, reason, caplog):
    counted = Counted(function)
    recorded = RecordedFunction(counted)
    with caplog.at_level(logging.INFO, "pyro_lvgp"):
        recorded(torch.ones(2))
    assert reason in caplog.text
    counted.num_calls = 0
    torch.manual_seed(1)
    (found,) = recorded(torch.full((2,), 2.0))
    assert counted.num_calls == 1
    torch.manual_seed(1)
    assert torch.equal(found, function(torch.full((2,), 2.0))[0])


def test_graphs_are_recorded_and_run_where_operations_are_counted():
    counted = Counted(log_density_and_score)
    recorded = RecordedFunction(counted)
    with CountOperations():
        for x in torch.randn(3, 3):
            found = recorded(x)
    assert counted.num_calls <= 3  # the first one, and those of the recording
    assert all(map(torch.equal, found, log_density_and_score(x)))
