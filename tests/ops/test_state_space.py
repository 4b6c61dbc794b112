"""Chains, scans and Kalman filters against the same with matrices."""

import math
from itertools import pairwise

import numpy as np
import pyro
import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF, Linear, Matern, Periodic, Stack
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet
from pyro_lvgp.ops import gaussian_sites, state_space
from pyro_lvgp.ops.state_space import Series

pytestmark = pytest.mark.usefixtures("float64")


def batch_of_kernels():
    return Matern(1, 2.5, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(2,))


KERNELS = {
    "1/2": lambda: Matern(1, 0.5, variance=1.3, lengthscale=0.4),
    "3/2": lambda: Matern(1, 1.5, variance=1.3, lengthscale=0.4),
    "5/2": lambda: Matern(1, 2.5, variance=1.3, lengthscale=0.4),
    "batch": batch_of_kernels,
    "sum": lambda: Matern(1, 0.5, lengthscale=0.2) + batch_of_kernels() + 0.3,
    "product": lambda: 2.0 * Matern(1, 1.5, lengthscale=0.7) * batch_of_kernels(),
    "stack": lambda: Stack(Matern(1, 0.5), batch_of_kernels(), 0.5 * Matern(1, 1.5) + Matern(1, 0.5)),
}
every_kernel = pytest.mark.parametrize("make_kernel", KERNELS.values(), ids=KERNELS)


def make_series(kernel, x):
    """x [*batch, N] → the chain at these inputs, where batches line up with that of the kernel."""
    steps, order, inverse = state_space.sort_inputs(x)
    return Series(kernel.state_space_model(steps, kernel.params()), order, inverse)


def make_inputs(num, *batch):
    """Irregular, in no order, with a few of them repeated."""
    x = 2.0 * torch.rand(*batch, num)
    x[..., num // 2 : num // 2 + 2] = x[..., :1]
    return x


def make_sites(num, *batch):
    """Means and precisions, of which one is 0."""
    precision = torch.where(torch.arange(num) == 1, 0.0, 0.5 + 5.0 * torch.rand(*batch, num))
    return torch.randn(*batch, num), precision


def both(kernel, x, site_mean, site_precision):
    """Posteriors by matrices and by the filter."""
    dense = gaussian_sites.condition(kernel(x[..., None]), torch.zeros_like(x), site_mean, site_precision)
    return dense, state_space.condition(make_series(kernel, x), site_mean, site_precision)


def quantities(posterior):
    """All that depends on how it was made."""
    log_Z, kl = gaussian_sites.log_normaliser(posterior), gaussian_sites.kl_divergence(posterior)
    return [*posterior[:-1], log_Z, kl]


# ---- chains


@every_kernel
@pytest.mark.parametrize("batch", [(), (3, 1)], ids=["one", "several"])
def test_chains_have_the_covariance_of_their_kernel(make_kernel, batch):
    kernel, x = make_kernel(), make_inputs(6, *batch).sort(-1).values
    chain, K = kernel.state_space_model(x.diff(dim=-1), kernel.params()), kernel(x[..., None])
    P = chain.P
    for n in range(6):
        torch.testing.assert_close((chain.emission[..., None, :] @ P @ chain.emission[..., None])[..., 0, 0], K[..., n, n])
        carried = P @ chain.emission[..., None]
        for m in range(n, 5):
            carried = chain.A[..., m, :, :] @ carried
            torch.testing.assert_close((chain.emission[..., None, :] @ carried)[..., 0, 0], K[..., n, m + 1])
        if n < 5:
            P = chain.A[..., n, :, :] @ P @ chain.A[..., n, :, :].mT + chain.Q[..., n, :, :]
            torch.testing.assert_close(P, chain.P)
    assert chain.A.shape[:-3] == chain.Q.shape[:-3] == chain.P.shape[:-2] == chain.emission.shape[:-1] == K.shape[:-2]


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("step", [1e-6, 1e-3, 0.1, 3.0, 50.0])
def test_what_is_new_in_a_step_to_full_relative_precision(nu, step, dtype):
    """Against quadrature of q ∫ exp(F s) e eᵀ exp(F s)ᵀ ds, which adds up what is positive; and it has a Cholesky factor."""
    lam, size = math.sqrt(2.0 * nu), int(nu + 0.5)
    chain = state_space.matern(torch.tensor([step], dtype=dtype), *torch.ones(2, dtype=dtype), nu)
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(80))
    s, weights = 0.5 * lam * step * (nodes + 1.0), 0.5 * lam * step * weights
    shape = {
        1: lambda s: [s**0],
        2: lambda s: [s, 1.0 - s],
        3: lambda s: [s**2 / 2.0, s - s**2 / 2.0, 1.0 - 2.0 * s + s**2 / 2.0],
    }
    response = torch.stack(shape[size](s), -1) * (-s).exp()[:, None]
    density = {1: 2.0, 2: 4.0, 3: 16.0 / 3.0}[size]
    Q = density * (weights[:, None, None] * response[:, :, None] * response[:, None, :]).sum(0)
    scale = Q.diagonal().sqrt()
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    found = chain.Q[0].double() / scale[:, None] / scale
    torch.testing.assert_close(found, Q / scale[:, None] / scale, rtol=tolerance, atol=tolerance)
    assert torch.linalg.cholesky_ex(found.to(dtype)).info == 0


def test_which_kernels_are_markov():
    assert all(make_kernel().is_markov for make_kernel in KERNELS.values())
    for kernel in (RBF(1), Periodic(1) * Matern(1), Matern(2), Matern(1, active_dims=[1]), Stack(Matern(1), Linear(1))):
        assert not kernel.is_markov
    with pytest.raises(NotImplementedError, match="got RBF, which has no state-space model"):
        RBF(1).state_space_model(torch.ones(2), ())


# ---- scans


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 7, 8, 13])
def test_prefix_is_a_loop(num):
    """Maps that do not commute, in batches that broadcast."""
    A, b, start = torch.randn(2, num, 3, 3), torch.randn(num, 3, 1), torch.randn(4, 1, 1, 3, 1)
    x, states = start, []
    for n in range(num):
        x = A[:, n, None] @ x + b[n]
        states.append(x)
    found = state_space.prefix((A, b), start, lambda i, j: (j[0] @ i[0], j[0] @ i[1] + j[1]), lambda i, x: i[0] @ x + i[1])
    assert found.shape[-3] == num
    if num:
        torch.testing.assert_close(found, torch.cat(states, -3))


def test_the_depth_of_a_scan_is_logarithmic():
    calls = []

    def counted(first, second):
        calls.append(len(first[0]))
        return (first[0] + second[0],)

    state_space.prefix((torch.ones(1000, 1, 1),), torch.zeros(1, 1, 1), counted, lambda i, x: i[0] + x)
    assert len(calls) == 9
    assert sum(calls) < 1000


# ---- posteriors


def assert_same(found, expected, inputs):
    """Values and gradients."""
    found, weights = found.expand(expected.shape), torch.randn(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    sums = [(weights * value).sum() + 0.0 * inputs[0].sum() for value in (found, expected)]
    slopes = [torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True) for value in sums]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)


@every_kernel
@pytest.mark.parametrize("num", [1, 2, 3, 8, 13])
def test_the_posterior_and_its_gradients(make_kernel, num):
    kernel, x = make_kernel(), make_inputs(num)
    sites = [site.requires_grad_() for site in make_sites(num)]
    for expected, found in zip(*map(quantities, both(kernel, x, *sites)), strict=True):
        assert_same(found, expected, [*sites, *kernel.parameters()])


@pytest.mark.parametrize("nu", [1.5, 2.5])
def test_gradients_in_the_inputs(nu):
    """Also where two of them coincide; a process of ν = ½ has a cusp there."""
    kernel, x = Matern(1, nu, lengthscale=0.4), make_inputs(8).requires_grad_()
    for expected, found in zip(*map(quantities, both(kernel, x, *make_sites(8))), strict=True):
        assert_same(found, expected, [x])


@pytest.mark.parametrize("inputs", [(), (4, 1)])
@pytest.mark.parametrize("sites", [(), (2,), (4, 1), (4, 2)])
def test_batches(inputs, sites):
    for make_kernel in (KERNELS["batch"], KERNELS["3/2"]):
        kernel, x = make_kernel(), make_inputs(5, *inputs)
        dense, found = both(kernel, x, *make_sites(5, *sites))
        for a, b in zip(quantities(dense), quantities(found), strict=True):
            torch.testing.assert_close(a, b.expand(a.shape), rtol=1e-6, atol=1e-8)
        shape = torch.broadcast_shapes(kernel.batch_shape, inputs, sites)
        assert found.mean.shape == found.variance.shape == found.alpha.shape == (*shape, 5)


def test_no_sites_at_all_give_the_prior():
    kernel, x = batch_of_kernels(), make_inputs(6)
    posterior = state_space.condition(make_series(kernel, x), torch.randn(6), torch.zeros(6))
    assert (posterior.mean == 0.0).all()
    torch.testing.assert_close(posterior.variance, kernel.diagonal(x[:, None]))
    assert (gaussian_sites.kl_divergence(posterior) == 0.0).all()
    assert (gaussian_sites.log_normaliser(posterior) == 0.0).all()


HARD = {
    "close": (1e-4 * torch.arange(40.0), 1.0),
    "close, sharp": (1e-3 * torch.arange(40.0), 1e4),
    "one place": (torch.zeros(40), 1e4),
    "two places": (torch.arange(40.0) % 2, 1e4),
    "far apart": (1e3 * torch.arange(40.0), 1e4),
    "worlds apart": (3.2e7 * 0.7 * torch.arange(40.0), 1e4),
    "at large": (1e4 + 0.1 * torch.arange(40.0), 10.0),
    "very sharp": (0.1 * torch.arange(40.0), 1e8),
}


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
@pytest.mark.parametrize(("x", "precision"), HARD.values(), ids=HARD)
def test_hard_inputs_and_sites(x, precision, nu, dtype):
    """float64 against the dense form, and float32 against float64, which it follows to nearly all of its digits."""
    kernel = Matern(1, nu, lengthscale=0.7).double()
    x, site_mean, precision = x.double(), x.double().sin() + 0.1 * torch.randn(40), torch.full((40,), precision)
    expected = both(kernel, x, site_mean, precision)[dtype == torch.float32]
    inputs = [value.to(dtype).requires_grad_() for value in (site_mean, precision)]
    found = state_space.condition(make_series(kernel.to(dtype), x.to(dtype)), *inputs)
    rtol = 1e-6 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=rtol, atol=rtol)
    # The dense form knows variances to rounding of the prior's.
    torch.testing.assert_close(found.variance.double(), expected.variance, rtol=rtol, atol=1e-14)
    for term in (gaussian_sites.kl_divergence, gaussian_sites.log_normaliser):
        torch.testing.assert_close(term(found).double(), term(expected), rtol=rtol, atol=rtol)
        for slope in torch.autograd.grad(term(found), [*inputs, *kernel.parameters()], retain_graph=True):
            assert slope.isfinite().all()


SUMS = {
    "with a constant": lambda: Matern(1, 1.5, lengthscale=0.7) + 0.5,
    "slow and quick": lambda: 0.5 * Matern(1, 2.5, lengthscale=10.0) + Matern(1, 0.5),
}


@pytest.mark.parametrize("make_kernel", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize(("x", "precision"), HARD.values(), ids=HARD)
def test_hard_inputs_and_sites_of_sums(x, precision, make_kernel):
    """Their states are seen as sums, of which sharp sites know many digits and none of the parts'."""
    kernel, x = make_kernel().double(), x.double()
    site_mean, precision = x.sin() + 0.1 * torch.randn(40), torch.full((40,), precision).double()
    expected = state_space.condition(make_series(kernel, x), site_mean, precision)
    found = state_space.condition(make_series(kernel.float(), x.float()), site_mean.float(), precision.float())
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.variance.double(), expected.variance, rtol=1e-2, atol=1e-14)
    found, expected = (gaussian_sites.kl_divergence(posterior).double() for posterior in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_sites_of_all_precisions_at_once(dtype):
    """From what is below the smallest normal number in float32 to what is above 1 / rounding."""
    kernel, x = Matern(1, 2.5).to(dtype), torch.linspace(0.0, 1.0, 60, dtype=dtype)
    precision = torch.logspace(-42, 12, 60, dtype=dtype)[torch.randperm(60)].requires_grad_()
    posterior = state_space.condition(make_series(kernel, x), x.sin(), precision)
    assert gaussian_sites.kl_divergence(posterior) > 10.0
    # As many sites are fitted as there are degrees of freedom: a few.
    assert 3.0 < (precision * posterior.variance).sum() < 30.0
    for term in (posterior.mean, posterior.variance.log(), gaussian_sites.kl_divergence(posterior)):
        for slope in torch.autograd.grad(term.sum(), [precision, *kernel.parameters()], retain_graph=True):
            assert slope.isfinite().all()


# ---- densities and draws


@every_kernel
def test_densities_of_values(make_kernel):
    kernel, x = make_kernel(), make_inputs(5).sort().values + 0.3 * torch.arange(5)
    K = kernel(x[:, None])
    f = torch.randn(3, *K.shape[:-1])
    found = state_space.log_prob(make_series(kernel, x), f, jitter=1e-8)
    # The factor is taken with a jitter of 1e-8.
    expected = MultivariateNormal(torch.zeros(5), scale_tril=safe_cholesky(K)).log_prob(f)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad(value.sum(), kernel.parameters(), retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-5)


def test_densities_of_the_last_values_given_sites():
    kernel, x = batch_of_kernels(), 0.3 * torch.arange(8.0)[torch.randperm(8)]
    site_mean, precision = make_sites(8)
    precision[5:] = 0.0
    dense, posterior = both(kernel, x, site_mean, precision)
    K = kernel(x[:, None])
    covariance = gaussian_sites.predictive_covariance(dense, K[:, 5:], K[:, 5:, 5:])
    f = torch.randn(4, 2, 3)
    expected = MultivariateNormal(dense.mean[:, 5:], covariance).log_prob(f)
    found = state_space.log_prob(make_series(kernel, x), f, posterior, jitter=1e-8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_kernel
@pytest.mark.parametrize("num", [1, 2, 7])
def test_draws_have_the_right_moments(make_kernel, num):
    """Draws are affine in the noise: their moments follow exactly."""
    kernel, x = make_kernel(), make_inputs(num)
    series, K = make_series(kernel, x), kernel(x[:, None])
    size, batch = series.model.emission.shape[-1], K.shape[:-2]
    unit = torch.eye(num * size).unflatten(-1, (num, size))
    L = state_space.sample_prior(series, unit.reshape(-1, *(1,) * len(batch), num, size).expand(-1, *batch, -1, -1))
    L = L.movedim(0, -2)
    torch.testing.assert_close(L.mT @ L, K)

    dense, posterior = both(kernel, x, *make_sites(num))
    none = torch.zeros_like(posterior.mean)
    centre = state_space.sample_posterior(series, posterior, none, none)
    torch.testing.assert_close(centre, dense.mean)
    of_prior = state_space.sample_posterior(series, posterior, L.movedim(-2, 0), none) - centre
    noise = torch.eye(num).reshape(num, *(1,) * len(batch), num).expand(num, *batch, num)
    of_noise = state_space.sample_posterior(series, posterior, none, noise) - centre
    covariance = sum(part.movedim(0, -1) @ part.movedim(0, -2) for part in (of_prior, of_noise))
    torch.testing.assert_close(covariance, gaussian_sites.predictive_covariance(dense, K, K))


# ---- size


class Largest(TorchDispatchMode):
    """Note the number of entries of the largest tensor ever made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.numel = max(self.numel, part.untyped_storage().nbytes() // part.itemsize)
        return result


def step(num):
    """One training step on num points: the largest tensor, and bytes that wait for the way back."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = GPVAE(Matern(1, 1.5, lengthscale=0.1), MLP(1, 2, [3]))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(2, 1, [3])})
    x, y = torch.rand(num, 1) * num / 100.0, torch.randn(num, 2)
    y[::3] = torch.nan
    guide(x, y)
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = StructuredELBO(max_plate_nesting=1).differentiable_loss(model, guide, x, y)
        waiting = sum(saved.values())
        loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in [*model.parameters(), *guide.parameters()])
    return largest.numel, waiting


def test_a_hundred_thousand_points_in_linear_memory():
    """The largest tensor has a few numbers for each point; those kept for the way back a few hundred."""
    sizes = [step(num) for num in (6_250, 25_000, 100_000)]
    for (largest, waiting), (larger, more) in pairwise(sizes):
        assert larger <= 4.01 * largest
        assert more <= 4.1 * waiting
    assert sizes[-1][0] <= 16 * 100_000
    assert sizes[-1][1] <= 4 * 1000 * 100_000
