"""Kernels on levels of categories."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_lvgp._compile.recording import record
from pyro_lvgp.kernels import RBF, Categorical, Embedded, Index, Matern
from tests.helpers.points import rand

LEVELS = torch.tensor([0, 2, 1, 2, 0])
X = torch.stack([torch.linspace(0.0, 1.0, 5), LEVELS.float()], -1).double()


def covariances(kernel):
    """Covariance matrix of all three levels by the formula, with a loop over the batch."""
    with torch.no_grad():
        if isinstance(kernel, Categorical):
            correlation = torch.zeros_like(kernel.variance) if kernel.correlation is None else kernel.correlation
            variance, correlation = kernel.variance[..., None, None], correlation[..., None, None]
            return variance * (correlation + (1 - correlation) * torch.eye(3, dtype=variance.dtype))
        if isinstance(kernel, Index):
            return kernel.factor @ kernel.factor.mT + torch.diag_embed(kernel.variance)
        return kernel.kernel(kernel.embedding)


KERNELS = {
    "categorical": lambda **k: Categorical(3, correlation=-0.3, **k),
    "any levels": lambda **k: Categorical(variance=2.0, **k),
    "independent": lambda **k: Categorical(correlation=None, **k),
    "index": lambda **k: Index(3, 2, **k),
    "embedded": lambda batch_shape=(), **k: Embedded(RBF(2, batch_shape=batch_shape), 3, batch_shape=batch_shape, **k),
    "embedded once": lambda batch_shape=(), **k: Embedded(RBF(2, batch_shape=batch_shape), 3, **k),
}


@pytest.fixture(params=KERNELS)
def make(request):
    return KERNELS[request.param]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_values_are_those_of_the_formula(make, batch, dtype):
    kernel, x = make(batch_shape=batch, active_dims=[1]).to(dtype), X.to(dtype)
    expected = covariances(kernel)[..., LEVELS[:, None], LEVELS]
    assert kernel.batch_shape == batch
    assert kernel(x).dtype == dtype
    torch.testing.assert_close(kernel(x), expected)
    torch.testing.assert_close(kernel(x, x[:2]), expected[..., :2])
    torch.testing.assert_close(kernel.diagonal(x), expected.diagonal(dim1=-2, dim2=-1))
    several = torch.stack([x, x.flip(0)])[:, None]  # two series
    of_each = torch.stack([expected, expected.flip(-1, -2)]).reshape(2, *(batch or (1,)), 5, 5)
    torch.testing.assert_close(kernel(several), of_each)
    assert kernel.diagonal(several).shape == of_each.shape[:-1]
    assert make(batch_shape=batch).to(dtype).diagonal(x[:, 1:]).shape == kernel.diagonal(x).shape


def test_gradients_of_all_parameters(make):
    kernel = make(batch_shape=(2,), active_dims=[1]).double()
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in kernel.named_parameters()), strict=True)

    def of_parameters(*values):
        return torch.func.functional_call(kernel, dict(zip(names, values, strict=True)), (X,))

    assert torch.autograd.gradcheck(of_parameters, values)
    (rand(2, 5, 5) * kernel(X)).sum().backward()
    for name, parameter in kernel.named_parameters():
        assert (parameter.grad != 0.0).any(), name


def test_a_product_with_a_kernel_of_time_is_positive_definite(make):
    kernel = make(active_dims=[1]).double() * Matern(1, active_dims=[0]).double()
    assert not kernel.is_markov
    assert kernel.level_columns == (1,)
    points = torch.cartesian_prod(torch.linspace(0.0, 1.0, 4), torch.arange(3.0)).double()
    torch.testing.assert_close(kernel(points), kernel.kernels[0](points) * kernel.kernels[1](points))
    assert torch.linalg.eigvalsh(kernel(points)).min() > 1e-9
    with pytest.raises(NotImplementedError, match=f"got {type(kernel.kernels[0]).__name__}, which has no state-space model"):
        kernel.kernels[0].state_space_model(torch.ones(3), kernel.kernels[0].params())


@pytest.mark.parametrize("num_levels", [2, 3, 10])
def test_the_range_of_correlations_is_that_of_positive_definite_matrices(num_levels):
    lower, points = -1.0 / (num_levels - 1), torch.arange(float(num_levels), dtype=torch.float64)[:, None]
    for correlation in (lower + 1e-3, 1.0 - 1e-3):
        kernel = Categorical(num_levels, correlation=torch.tensor(correlation, dtype=torch.float64))
        assert 0.0 < torch.linalg.eigvalsh(kernel(points)).min() < 0.02
        torch.testing.assert_close(kernel.correlation.item(), correlation)
    for wrong in (lower, 1.0, math.nan):
        with pytest.raises(ValueError, match=f"expected finite correlation between {lower:g} and 1, both excluded, got "):
            Categorical(num_levels, correlation=wrong)
    kernel.correlation_unconstrained.data += 100.0  # however long a step is
    assert kernel.correlation.item() <= 1.0


def test_new_levels_have_the_covariance_of_all_others():
    kernel = Categorical(correlation=0.25, variance=2.0)
    new = kernel(torch.tensor([[0.0], [1.0], [-12.0]]), torch.tensor([[900.0]])).detach()
    torch.testing.assert_close(new, torch.full((3, 1), 0.5))


@pytest.mark.parametrize(
    ("kernel", "level", "message"),
    [
        (Categorical(), 0.5, "levels of Categorical as integers of less than 16777216 in size in column 0 .* got 0.5; number"),
        (Categorical(), math.nan, "got nan"),
        (Categorical(), 2.0**24, "got 1.67772e"),
        (Categorical(3), 3.0, "from 0 to 2 in column 0 of the inputs, got 3; number the levels so, or give the kernel"),
        (Index(3), -1.0, "levels of Index as integers from 0 to 2 in column 0 .* got -1"),
        (Embedded(RBF(2), 3), 1.5, "levels of Embedded as integers from 0 to 2 .* got 1.5; .* from the rows of the data"),
    ],
)
def test_numbers_that_are_no_levels(kernel, level, message):
    x = torch.tensor([[1.0], [level]])
    for call in (kernel, kernel.diagonal, lambda x: kernel(x[:1], x)):
        with pytest.raises(ValueError, match=message):
            call(x)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: Categorical(1), "num_levels of 2 or more, got 1"),
        (lambda: Categorical(correlation=0.0), "between 0 and 1, both excluded, got 0.0"),
        (lambda: Categorical(variance=0.0), "variance > 0, got 0.0"),
        (lambda: Categorical(active_dims=[0, 1]), "active_dims with input_dim=1"),
        (lambda: Index(0), "num_levels of 1 or more, got 0"),
        (lambda: Index(3, 0), "rank of 1 or more, got 0"),
        (lambda: Index(3, factor=torch.ones(4, 1)), r"factor that expands to \[3, 1\] .* got shape \[4, 1\]"),
        (lambda: Index(3, factor=torch.full((3, 1), math.inf)), "finite factor numbers, got"),
        (lambda: Embedded(RBF(1, active_dims=[0]), 3), r"without active_dims, .* got RBF with .* active_dims=\(0,\)"),
        (lambda: Embedded(RBF(1) + RBF(1), 3), "got Sum with input_dim=None"),
        (lambda: Embedded(RBF(2), 3, embedding=torch.ones(3, 1)), r"finite embedding of shape \[3, 2\] .* got \[3, 1\]"),
    ],
)
def test_value_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


def test_sizes_are_integers(unchecked):
    for make in (Categorical, Index, lambda size: Embedded(RBF(1), size)):
        with pytest.raises(TypeError, match=r"expected num_levels to be an integer, got 2\.5"):
            make(2.5)


def test_priors():
    """One draw for all uses in a call, and one for each particle."""
    kernel = Embedded(RBF(2, batch_shape=(1,)), 3, active_dims=[1]).double()
    kernel.embedding = PyroSample(dist.Normal(torch.zeros(3, 2).double(), 1.0).to_event(2))
    index = Index(3, 2, active_dims=[1]).double()
    index.factor = PyroSample(dist.Normal(torch.zeros(3, 2).double(), 1.0).to_event(2))
    for part, name, shape in ((kernel, "embedding", (4, 1, 5, 5)), (index, "factor", (4, 5, 5))):
        with pyro.plate("particles", 4, dim=-2 if part is kernel else -1):
            trace = poutine.trace(part).get_trace(X)
        K, drawn = trace.nodes["_RETURN"]["value"], trace.nodes[name]["value"]
        assert K.shape == shape
        for particle in range(4):
            alone = poutine.condition(part, {name: drawn[particle].reshape(3, 2)})(X)
            torch.testing.assert_close(K[particle], alone)
    index.factor = PyroSample(dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))
    with pytest.raises(ValueError, match=r"factor with last dimensions \[3, 2\], got shape \[3\]; give its prior 2 event"):
        index(X)


def test_parameters_text():
    assert Categorical(correlation=None).parameters_text() == "variance=1"
    text = Embedded(RBF(1), 2, embedding=torch.tensor([[0.5], [1.0]])).parameters_text()
    assert text == "embedding=[0.5, 1], RBF(lengthscale=[1], variance=1)"


def test_a_graph_checks_levels_at_every_run():
    kernel, x = Index(3), LEVELS.float()[:, None]
    _, graph, _ = record(lambda: (kernel(x).sum(),), [x])
    value, is_valid = graph(x)
    torch.testing.assert_close(value, kernel(x).sum())
    assert is_valid
    assert not graph(torch.full_like(x, 0.5))[1]
