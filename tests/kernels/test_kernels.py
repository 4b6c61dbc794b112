import importlib.util
import re
import sys
import warnings

import pyro
import pyro.contrib.gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from torch.autograd import gradcheck, gradgradcheck

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF, Kernel, Linear, Matern, Periodic, Product, Stack, Sum, as_kernel
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import ZeroImputation
from pyro_lvgp.ops import covariance


def _linear(Q, lengthscale=1.0, **kwargs):
    return Linear(Q, **kwargs)


KERNELS = {
    "rbf": RBF,
    "matern12": lambda Q, **k: Matern(Q, 0.5, **k),
    "matern32": Matern,
    "matern52": lambda Q, **k: Matern(Q, 2.5, **k),
    "periodic": lambda Q, **k: Periodic(Q, 2.0, **k),
    "linear": _linear,
    "sum": lambda Q, **k: RBF(Q, **k) + 0.3 * _linear(Q, **k),
    "product": lambda Q, **k: Matern(Q, 2.5, **k) * Periodic(Q, **k) + 1.0,
}


@pytest.fixture
def gpytorch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts functions at import
        return pytest.importorskip("gpytorch")


@pytest.fixture(params=KERNELS)
def make(request):
    return KERNELS[request.param]


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


# ---- values


@pytest.mark.parametrize("ard", [True, False], ids=["ard", "isotropic"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["single", "batch"])
def test_agrees_with_gpytorch(gpytorch, ard, batch):
    Q = 2
    ell = torch.rand(*batch, Q if ard else 1, dtype=torch.float64) + 0.5
    period = torch.rand(*batch, Q if ard else 1, dtype=torch.float64) + 1.0
    variance = torch.rand(batch, dtype=torch.float64) + 0.5
    ours = {"variance": variance, "lengthscale": ell, "ard": ard, "batch_shape": batch}
    theirs = {"ard_num_dims": Q if ard else None, "batch_shape": torch.Size(batch)}
    pairs = [
        (RBF(Q, **ours), gpytorch.kernels.RBFKernel(**theirs)),
        (Matern(Q, 0.5, **ours), gpytorch.kernels.MaternKernel(0.5, **theirs)),
        (Matern(Q, 1.5, **ours), gpytorch.kernels.MaternKernel(1.5, **theirs)),
        (Matern(Q, 2.5, **ours), gpytorch.kernels.MaternKernel(2.5, **theirs)),
        (Periodic(Q, period, **ours), gpytorch.kernels.PeriodicKernel(**{**theirs, "ard_num_dims": Q if ard else 1})),
    ]
    X, Z = rand(7, Q), rand(4, Q)
    for kernel, core in pairs:
        core.double()
        core.lengthscale = ell.unsqueeze(-2)
        if isinstance(kernel, Periodic):
            core.lengthscale = ell.square().unsqueeze(-2)  # GPyTorch divides by ℓ, not by ℓ²
            core.period_length = period.unsqueeze(-2)
        scaled = gpytorch.kernels.ScaleKernel(core, batch_shape=torch.Size(batch)).double()
        scaled.outputscale = variance
        assert kernel(X, Z).shape == (*batch, 7, 4)
        torch.testing.assert_close(kernel(X, Z), scaled(X, Z).to_dense(), rtol=0, atol=1e-6)
        torch.testing.assert_close(kernel(X), scaled(X).to_dense(), rtol=0, atol=1e-6)
        torch.testing.assert_close(as_kernel(scaled)(X, Z), kernel(X, Z), rtol=0, atol=1e-6)


def test_linear_sum_and_product_agree_with_gpytorch(gpytorch):
    X, Z, v = rand(3, 7, 2), rand(3, 4, 2), torch.tensor([0.5, 2.0], dtype=torch.float64)
    g_linear = gpytorch.kernels.LinearKernel(ard_num_dims=2).double()
    g_linear.variance = v
    g_rbf = gpytorch.kernels.RBFKernel().double()
    g_rbf.lengthscale = 0.7
    linear, rbf = Linear(2, variance=v), RBF(2, lengthscale=torch.tensor(0.7).double(), ard=False)
    for ours, theirs in [(linear, g_linear), (linear + rbf, g_linear + g_rbf), (linear * rbf, g_linear * g_rbf)]:
        torch.testing.assert_close(ours(X, Z), theirs(X, Z).to_dense(), rtol=0, atol=1e-6)


def test_diag_symmetry_and_positive_definiteness(make, dtype):
    kernel = make(2, lengthscale=torch.rand(3, 2, dtype=dtype) + 0.5, batch_shape=(3,))
    X = rand(5, 1, 20, 2, dtype=dtype)
    X[..., 1, :] = X[..., 0, :]  # repeated inputs
    K = kernel(X).detach()
    tol = 100 * torch.finfo(dtype).eps
    assert K.dtype == dtype
    assert K.shape == (5, 3, 20, 20)
    torch.testing.assert_close(kernel.diagonal(X), K.diagonal(dim1=-2, dim2=-1), rtol=tol, atol=tol)
    torch.testing.assert_close(kernel(X, X), K, rtol=0, atol=0)
    torch.testing.assert_close(K, K.mT, rtol=tol, atol=tol)
    assert torch.linalg.eigvalsh(K.double()).min() > -20 * tol


def test_diag_has_the_batch_shape_of_the_matrix(make):
    kernel = make(2, batch_shape=(3,))
    assert kernel.batch_shape == (3,)
    X = torch.randn(4, 2)
    assert kernel.diagonal(X).shape == (3, 4)
    kernel = make(2)
    for part in kernel.modules():  # a lengthscale with a batch shape of its own
        if hasattr(part, "lengthscale"):
            part.lengthscale = PyroSample(lambda _: torch.ones(5, 1, 2))
    assert kernel.diagonal(X).shape == kernel(X).shape[:-1]


def test_batch_of_kernels_equals_one_by_one(make):
    ell, v = torch.rand(3, 2).double() + 0.5, torch.rand(3).double() + 0.5
    X, Z = rand(3, 6, 2), rand(4, 2)
    batched = make(2, lengthscale=ell, batch_shape=(3,))(X, Z)
    for b in range(3):
        torch.testing.assert_close(batched[b], make(2, lengthscale=ell[b])(X[b], Z))
    batched = RBF(2, variance=v, batch_shape=(3,))(X, Z)
    torch.testing.assert_close(batched[1], RBF(2, variance=v[1])(X[1], Z))


def test_sums_products_and_numbers():
    X, Z = torch.randn(5, 2), torch.randn(3, 2)
    a, b = RBF(2, lengthscale=0.4), Linear(2, variance=3.0)
    torch.testing.assert_close((2.0 * a * b + 1)(X, Z), 2.0 * a(X, Z) * b(X, Z) + 1.0)
    torch.testing.assert_close(sum([a, b])(X, Z), a(X, Z) + b(X, Z))
    torch.testing.assert_close((a * a)(X), a(X).square())
    torch.testing.assert_close(Sum(a, b, 0.5).diagonal(X), a.diagonal(X) + b.diagonal(X) + 0.5)
    assert isinstance(a * 2, Product)
    with pytest.raises(TypeError, match="unsupported operand"):
        a + "b"
    for number in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"finite number ≥ 0 .*, got {number}"):
            a * number
    with pytest.raises(ValueError, match="one or more"):
        Sum()


def test_active_dims():
    X, Z = torch.randn(5, 4), torch.randn(3, 4)
    kernel = RBF(2, lengthscale=torch.tensor([0.5, 2.0]), active_dims=[3, 1])
    torch.testing.assert_close(kernel(X, Z), RBF(2, lengthscale=kernel.lengthscale.detach())(X[:, [3, 1]], Z[:, [3, 1]]))
    assert kernel.diagonal(X).shape == (5,)
    assert (kernel * Periodic(1, active_dims=[0]))(X, Z).shape == (5, 3)
    assert not any("columns" in name for name in kernel.state_dict())


@pytest.mark.parametrize("changed", ["_covariance", "covariance", "_diagonal", "diagonal", "_select", "params"])
def test_a_subclass_with_another_covariance_has_no_chain_but_its_own(changed):
    Same = type("Same", (Matern,), {"_parameters_text": lambda self: ""})
    Other = type("Other", (Same,), {changed: getattr(Matern, changed)})
    Derived = type("Derived", (Other,), {})
    Chained = type("Chained", (Derived,), {"state_space_model": Matern.state_space_model})
    Said = type("Said", (Other,), {"is_markov": True})
    found = {cls.__name__: cls(1).is_markov for cls in (Same, Other, Derived, Chained, Said)}
    assert found == {"Same": True, "Other": False, "Derived": False, "Chained": True, "Said": True}
    assert not (Matern(1) + Other(1)).is_markov


def test_warped_time_is_modelled_beyond_the_points_that_are_taken_by_chains():
    class Warped(Matern):
        def _covariance(self, X, Z, params):
            return super()._covariance(X.log(), Z.log(), params)

    X = torch.linspace(1.0, 50.0, 300, dtype=torch.float64)[:, None]
    f, kernel = X.squeeze(-1).sin(), Warped(1, 0.5).double()
    expected = GaussianProcess(Matern(1, 0.5).double(), X.log()).log_prob(f)
    torch.testing.assert_close(GaussianProcess(kernel, X).log_prob(f), expected, rtol=1e-3, atol=0.0)


def test_dtype_follows_the_tensors_given_and_to(dtype):
    assert RBF(2, lengthscale=torch.ones(2, dtype=dtype)).variance.dtype == dtype
    assert RBF(2, lengthscale=torch.tensor([1, 2])).variance.dtype == torch.float32
    torch.set_default_dtype(dtype)
    assert Linear(2).variance.dtype == dtype
    kernel = (RBF(2) + Matern(2)).double()
    assert kernel(rand(4, 2)).dtype == torch.float64
    torch.testing.assert_close(RBF(1, variance=1e-3, lengthscale=1e3).lengthscale, torch.full((1,), 1e3))


def test_float32_dates_keep_their_digits():
    """Whole days since the year 0, which float32 holds exactly; quotients of them it does not."""
    X = (738_000.0 + torch.arange(6.0))[:, None]
    for kernel in (RBF(1, lengthscale=3.0), Matern(1, 1.5, lengthscale=3.0), Periodic(1, 7.0)):
        found = kernel(X)
        torch.testing.assert_close(found.double(), kernel.double()(X.double()), rtol=0.0, atol=2e-6)


def test_float32_time_series_far_from_the_origin():
    t = 0.37 * torch.arange(1000.0).unsqueeze(-1) + 5000.0
    torch.testing.assert_close(RBF(1)(t), RBF(1).double()(t.double()).float(), rtol=0, atol=1e-6)
    X = torch.randn(50, 3) + 1000.0
    torch.testing.assert_close(RBF(3)(X), RBF(3).double()(X.double()).float(), rtol=0, atol=1e-5)


# ---- derivatives


def _differentiable():
    v, ell, p = torch.tensor(1.3).double(), torch.tensor([0.7, 1.9]).double(), torch.tensor([2.0, 3.0]).double()
    return {
        "rbf": (covariance.rbf, (ell, v)),
        "matern32": (lambda *a: covariance.matern(*a, 1.5), (ell, v)),
        "matern52": (lambda *a: covariance.matern(*a, 2.5), (ell, v)),
        "periodic": (covariance.periodic, (p, ell, v)),
        "linear": (covariance.linear, (ell,)),
    }


@pytest.mark.parametrize("name", _differentiable())
@pytest.mark.parametrize("where", ["apart", "repeated", "single"])
def test_first_and_second_derivatives(name, where):
    function, parameters = _differentiable()[name]
    X, Z = rand(4, 2), rand(3, 2)
    if where == "repeated":
        Z[0], Z[1] = X[0], X[0]
    if where == "single":
        X, Z = X[:1], X[:1].clone()
    inputs = [t.requires_grad_() for t in (X, Z, *parameters)]
    assert gradcheck(function, inputs)
    # Differences of a Matérn 3⁄2 gradient are off by the step (1e-6), because its third derivative jumps at r = 0.
    assert gradgradcheck(function, inputs, atol=1e-4)


@pytest.mark.parametrize("function", [covariance.rbf, lambda *a: covariance.matern(*a, 1.5)], ids=["rbf", "matern32"])
def test_hessian_at_coincident_points_is_minus_the_metric(function, dtype):
    # It is −σ²/ℓ² for the RBF and −3σ²/ℓ² for Matérn 3⁄2.  Rounding makes r² negative for some of the 40 points, where
    # a clamp that stops derivatives would make the Hessian 0.
    ell = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    X = rand(40, 3, dtype=dtype).requires_grad_()
    variances = function(X, X.detach().clone(), ell, torch.ones((), dtype=dtype)).diagonal()
    (gradient,) = torch.autograd.grad(variances.sum(), X, create_graph=True)
    columns = [torch.autograd.grad(g.sum(), X, retain_graph=True)[0] for g in gradient.unbind(-1)]
    expected = -torch.diag(ell**-2) * (1.0 if function is covariance.rbf else 3.0)
    torch.testing.assert_close(torch.stack(columns, -1), expected.expand(40, 3, 3), rtol=1e-4, atol=1e-4)


def test_matern_half_has_finite_derivatives_at_repeated_points():
    X = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    ell = torch.ones(2, dtype=torch.float64, requires_grad=True)
    K = covariance.matern(X, X, ell, torch.ones((), dtype=torch.float64), 0.5)
    grads = torch.autograd.grad(K.sum(), (X, ell), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in grads), (X, ell), allow_unused=True, materialize_grads=True)
    assert all(g.isfinite().all() for g in (*grads, *second))
    X, Z = rand(4, 2), rand(3, 2)
    assert gradcheck(
        lambda *a: covariance.matern(*a, 0.5), [t.requires_grad_() for t in (X, Z, ell)] + [torch.ones(()).double()]
    )


def test_squared_distance_is_that_of_differences(dtype):
    X, Z = rand(4, 1, 6, 3, dtype=dtype).requires_grad_(), rand(5, 7, 3, dtype=dtype).requires_grad_()
    fast, slow = covariance.squared_distance(X, Z), covariance.exact_squared_distance(X, Z)
    tol = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(fast, slow, rtol=tol, atol=tol)
    weights = rand(*slow.shape, dtype=dtype)
    for a, b in zip(*(torch.autograd.grad((d * weights).sum(), (X, Z)) for d in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=30 * tol)
    assert (covariance.squared_distance(X, X) >= 0).all()


@pytest.mark.parametrize("name", _differentiable())
def test_vmap_and_func_grad(name):
    function, parameters = _differentiable()[name]
    X, Z = rand(5, 4, 2), rand(3, 2)

    def total(x):
        return function(x, Z, *parameters).sum()

    torch.testing.assert_close(torch.func.vmap(lambda x: function(x, Z, *parameters))(X), function(X, Z, *parameters))
    grads = torch.func.vmap(torch.func.grad(total))(X)
    X.requires_grad_()
    torch.testing.assert_close(grads, torch.autograd.grad(total(X), X)[0])


@pytest.mark.parametrize("name", _differentiable())
def test_compiles_to_one_graph(name, monkeypatch):
    # The import hook of the tests wraps every function; compile the file as users get it, without those checks.
    spec = importlib.util.spec_from_file_location("plain_covariance", covariance.__file__)
    plain = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain_covariance", plain)
    spec.loader.exec_module(plain)
    nu = {"matern32": (1.5,), "matern52": (2.5,)}.get(name, ())
    function = getattr(plain, name.rstrip("0123456789"))
    _, parameters = _differentiable()[name]
    X, Z = rand(4, 2), rand(3, 2)

    def score(X):
        return torch.func.grad(lambda x: function(x, Z, *parameters, *nu).sum())(X)

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), score(X))


# ---- in Pyro


class _GP(PyroModule):
    def __init__(self, kernel, X, y):
        super().__init__()
        self.kernel, self.X, self.y = kernel, X, y

    def forward(self):
        K = self.kernel(self.X)
        torch.testing.assert_close(self.kernel.diagonal(self.X), K.diagonal(dim1=-2, dim2=-1))  # the same draw
        cov = K + 0.1 * torch.eye(K.shape[-1], dtype=K.dtype)
        return pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(self.y), cov), obs=self.y)


def _with_priors():
    kernel = Matern(2) + Linear(2)
    ours, linear = kernel.kernels
    ours.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    ours.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    linear.variance = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    return kernel


def test_vectorised_particles_equal_a_loop():
    S, N = 4, 6
    X, y = torch.randn(N, 2), torch.randn(N)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.kernel = _with_priors()

        def forward(self, X):
            K = self.kernel(X.expand(*self.kernel.diagonal(X).shape[:-1], N, 2)) + 0.1 * torch.eye(N)
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(N), K), obs=y)
            return K

    model = Model()
    with pyro.plate("particles", S, dim=-2):
        trace = poutine.trace(model).get_trace(X)
    assert trace.nodes["kernel.kernels.0.lengthscale"]["value"].shape == (S, 1, 2)
    assert trace.nodes["kernel.kernels.0.variance"]["value"].shape == (S, 1)
    K = trace.nodes["_RETURN"]["value"]
    assert K.shape == (S, 1, N, N)
    sites = [f"kernel.kernels.{s}" for s in ("0.lengthscale", "0.variance", "1.variance")]
    for s in range(S):
        one = {name: trace.nodes[name]["value"][s, 0] for name in sites}
        torch.testing.assert_close(poutine.condition(model, one)(X), K[s, 0])


def test_prior_is_sampled_once_per_call_of_the_model():
    model = _GP(_with_priors(), torch.randn(5, 2), torch.randn(5))
    trace = poutine.trace(model).get_trace()
    assert {"kernel.kernels.0.lengthscale", "kernel.kernels.1.variance"} <= set(trace.nodes)


@pytest.mark.parametrize("particles", [1, 3])
def test_svi_with_priors(particles):
    model = _GP(_with_priors(), torch.randn(5, 2), torch.randn(5))
    guide = pyro.infer.autoguide.AutoNormal(model)
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    assert all(torch.isfinite(torch.tensor(svi.step())) for _ in range(3))


def test_each_parameter_is_read_once_per_call():
    model = PyroModule("model")
    model.kernel = RBF(2)
    reads = []

    class Count(poutine.messenger.Messenger):
        def _pyro_param(self, msg):
            reads.append(msg["name"])

    with Count():
        model.kernel(torch.randn(3, 2), torch.randn(4, 2))
    assert sorted(reads) == ["model.kernel.lengthscale", "model.kernel.variance"]


def test_kernels_on_their_own_do_not_share_parameters():
    X = torch.randn(3, 1)
    for make in KERNELS.values():
        a, b = make(1, lengthscale=0.1), make(1, lengthscale=2.0)
        a(X), a.diagonal(X)
        fresh = make(1, lengthscale=2.0)(X)
        torch.testing.assert_close(b(X), fresh)
        a + b  # still free to be given to an owner
    assert not list(pyro.get_param_store().keys())


def test_svi_trains_a_kernel_in_a_plain_function():
    kernel, X = RBF(1), torch.linspace(0, 1, 8).unsqueeze(-1)

    def model():
        K = kernel(X) + 0.1 * torch.eye(8)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(8), K), obs=torch.zeros(8))

    SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step()
    assert kernel.variance < 1
    torch.testing.assert_close(kernel(X).diagonal(), kernel.variance.expand(8))


# ---- GPyTorch's kernels


def test_as_kernel_trains_by_svi(gpytorch):
    theirs = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel(ard_num_dims=2))
    model = _GP(as_kernel(theirs) * RBF(2), torch.randn(6, 2), torch.randn(6))
    before = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    svi = SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    with poutine.trace(param_only=True) as tape:
        svi.loss_and_grads(model, lambda: None)
    assert sum("raw_" in name for name in tape.trace.nodes) == 3
    losses = [svi.step() for _ in range(20)]
    assert losses[-1] < losses[0]
    for name, value in theirs.named_parameters():
        assert not torch.allclose(value, before[name]), name


def test_as_kernel_broadcasts(gpytorch):
    kernel = as_kernel(gpytorch.kernels.RBFKernel(batch_shape=torch.Size([3]), active_dims=(1,)))
    X, Z = torch.randn(5, 1, 4, 2), torch.randn(6, 2)
    assert kernel.batch_shape == (3,)
    assert kernel(X, Z).shape == (5, 3, 4, 6)
    assert kernel(Z, X[0, 0]).shape == (3, 6, 4)
    assert kernel.diagonal(X).shape == (5, 3, 4)
    torch.testing.assert_close(kernel.diagonal(X), kernel(X).diagonal(dim1=-2, dim2=-1))
    assert kernel._parameters_text().startswith("lengthscale=[0.6931, ")


def test_as_kernel_takes_kernels_only():
    kernel = RBF(1)
    assert as_kernel(kernel) is kernel
    others = {
        "a torch.nn.modules.linear.Linear": torch.nn.Linear(1, 1),
        "1.0": 1.0,
        "'rbf'": "rbf",
        "a pyro.contrib.gp.kernels.isotropic.RBF": pyro.contrib.gp.kernels.RBF(1),
        "<class 'pyro_lvgp.kernels.stationary.RBF'>": RBF,
    }
    for got, other in others.items():
        with pytest.raises(TypeError, match=rf"expected a kernel .*, such as RBF\(2\), got {re.escape(got)}; .* subclass"):
            as_kernel(other)


def test_gpytorch_s_kernels_do_not_hold_ours(gpytorch):
    theirs = gpytorch.kernels.RBFKernel()
    for combined in (theirs + RBF(2), theirs * as_kernel(gpytorch.kernels.RQKernel())):
        with pytest.raises(TypeError, match=r"parts from GPyTorch, got \w+ with .* in it; .* as_kernel\(theirs\) \+ RBF\(2\)"):
            as_kernel(combined)


# ---- errors


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: RBF(0), "input_dim of 1 or more, got 0"),
        (lambda: RBF(2, lengthscale=0.0), "lengthscale > 0, got 0"),
        (lambda: RBF(2, lengthscale=torch.tensor([1.0, -1.0])), "lengthscale > 0"),
        (lambda: RBF(2, variance=float("nan")), "variance > 0, got nan"),
        (lambda: Periodic(1, -1.0), "period > 0"),
        (lambda: RBF(2, lengthscale=torch.ones(3)), r"lengthscale that expands to \[2\] .* got shape \[3\]"),
        (lambda: RBF(2, lengthscale=torch.ones(3), batch_shape=(3,)), r"expands to \[3, 2\]"),
        (lambda: Matern(1, 1.0), "nu of 0.5, 1.5 or 2.5, got 1.0"),
        (lambda: RBF(3, active_dims=[0, 1]), "input_dim=3 .* try input_dim=2"),
        (lambda: RBF(1, active_dims=[-1]), "none negative"),
        (lambda: RBF(1, active_dims=[3])(torch.ones(2, 2)), "at least 4 columns, got 2"),
        (lambda: RBF(3)(torch.ones(5, 2)), r"expected X with 3 columns, got 2; .* RBF\(2\)"),
        (lambda: RBF(1)(torch.ones(1, 5)), r"expected X with 1 columns, got 5; give a single column as X\[:, None\], make"),
        (lambda: RBF(3)(torch.ones(5, 3), torch.ones(5, 2)), "expected Z with 3 columns, got 2"),
        (lambda: RBF(3).diagonal(torch.ones(5, 2)), "expected X with 3 columns, got 2"),
        (lambda: RBF(3)._select(torch.ones(5), "X"), r"shape \[\*batch, N, Q\], got \[5\]"),
    ],
)
def test_value_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


@pytest.mark.parametrize("make", [RBF, Matern, Periodic, Linear])
def test_numbers_of_columns_are_whole(make, unchecked):
    with pytest.raises(TypeError, match=r"expected input_dim to be an integer, got 2\.0; use int"):
        make(2.0)


def test_sums_serve_one_model_and_hand_over_to_new_ones():
    def make():
        return RBF(2) + 2.0 * Linear(2)

    X = torch.randn(4, 2)
    kernel = make()
    kernel(X)
    kernel.diagonal(X)
    _GP(kernel, X, torch.zeros(4))  # which never runs
    first = _GP(kernel, X, torch.zeros(4))
    first.kernel.kernels[0].lengthscale = torch.tensor([0.3, 0.7])
    poutine.trace(first).get_trace()
    for taker in (lambda: _GP(kernel, X, torch.zeros(4)), lambda: kernel * RBF(2), lambda: Stack(kernel)):
        with pytest.raises(ValueError, match=r"kernel of its own for each model, got a Sum .*load_state_dict"):
            taker()
    new = make()
    new.load_state_dict(kernel.state_dict())
    pyro.clear_param_store()
    second = _GP(new, X, torch.zeros(4))
    poutine.trace(second).get_trace()
    torch.testing.assert_close(second.kernel(X), first.kernel(X), rtol=0, atol=0)


def test_single_kernels_serve_several_models():
    kernel, X = RBF(2), torch.randn(4, 2)
    for make in (lambda: kernel, lambda: kernel, lambda: kernel + Linear(2), lambda: 2.0 * kernel):
        poutine.trace(_GP(make(), X, torch.zeros(4))).get_trace()


def test_arrays_are_refused(unchecked):
    X = torch.ones(3, 1)
    for call in (RBF(1), RBF(1).diagonal, RBF(1) + Linear(1)):
        with pytest.raises(TypeError, match=r"expected X to be a torch.Tensor, got ndarray; use torch.as_tensor"):
            call(X.numpy())
    with pytest.raises(TypeError, match=r"expected Z to be a torch.Tensor, got ndarray"):
        RBF(1)(X, X.numpy())


def test_integers_are_refused():
    for call in (RBF(1), RBF(1).diagonal, RBF(1) + Linear(1)):
        with pytest.raises(TypeError, match=r"X of floating point, got torch\.int64"):
            call(torch.ones(3, 1, dtype=torch.int64))


def test_prior_of_the_wrong_shape_says_so():
    kernel = RBF(2)
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"got shape \[\]; .*expand\(\[2\]\).to_event\(1\)"):
        kernel(torch.randn(3, 2))


def test_a_kernel_must_implement_its_two_methods():
    for call in (Kernel(1), Kernel(1).diagonal):
        with pytest.raises(NotImplementedError, match="Kernel must implement"):
            call(torch.ones(2, 1))


def test_parameters_text():
    kernel = RBF(2, lengthscale=torch.tensor([0.5, 1.2]))
    assert kernel._parameters_text() == "lengthscale=[0.5, 1.2], variance=1"
    shown = (2 * Linear(9) + Linear(1))._parameters_text()
    assert shown == "Product(Constant(2), Linear(variance=[1, 1, 1, 1, 1, 1, 1, 1, ...])), Linear(variance=[1])"
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    owner = PyroModule("model")
    owner.kernel = kernel
    with poutine.trace() as tape, owner._pyro_context:
        assert kernel._parameters_text() == "lengthscale=[0.5, 1.2], variance ~ LogNormal"
        assert not tape.trace.nodes
        drawn = kernel.variance
        assert kernel._parameters_text().endswith(f"variance={drawn:.4g}")


# ---- stacks


def _stack():
    parts = [
        RBF(2, lengthscale=torch.tensor([[0.5, 1.0], [2.0, 0.3]]), variance=torch.tensor([1.0, 2.0]), batch_shape=(2,)),
        Matern(1, lengthscale=0.7, active_dims=[1]),
        0.5 * Linear(2) + 1.0,
        Periodic(2, batch_shape=(1,)),
    ]
    return Stack(*parts).double(), parts


@pytest.mark.parametrize("batch", [(), (1,), (3, 1), (2, 3, 1)])
@pytest.mark.parametrize("batch_of_z", [(), (3, 1)])
def test_a_stack_is_its_kernels_one_by_one(batch, batch_of_z):
    stack, (pair, *others) = _stack()
    X, Z = rand(*batch, 7, 2), rand(*batch_of_z, 4, 2)
    joint = torch.broadcast_shapes(batch[:-1], batch_of_z[:-1])
    of_pair = pair(X, Z)
    one_by_one = [of_pair[..., 0, :, :], of_pair[..., 1, :, :]]
    one_by_one += [k(X, Z).expand(*joint, 1, 7, 4).squeeze(-3) for k in others]
    K = stack(X, Z)
    assert stack.batch_shape == (5,)
    assert K.shape == (*joint, 5, 7, 4)
    for k, expected in enumerate(one_by_one):
        torch.testing.assert_close(K[..., k, :, :], expected.expand(*joint, 7, 4))
    assert stack.diagonal(X).shape == (*batch[:-1], 5, 7)
    torch.testing.assert_close(stack.diagonal(X), stack(X).diagonal(dim1=-2, dim2=-1))


def test_gradients_reach_every_kernel_of_a_stack():
    stack, _ = _stack()
    weights = rand(5, 7, 7)
    (weights * stack(rand(7, 2))).sum().backward()
    assert len(list(stack.parameters())) == 8
    for name, parameter in stack.named_parameters():
        assert (parameter.grad != 0.0).all(), name


def test_stacks_of_numbers_and_of_stacks():
    X = rand(4, 2)
    rbf = RBF(2).double()
    K = Stack(rbf, 2.0, Stack(rbf, Linear(2).double()))(X)
    torch.testing.assert_close(K, torch.stack([rbf(X), torch.full_like(K[1], 2.0), rbf(X), X @ X.mT]))


@pytest.mark.parametrize("with_priors", [(0, 3), (3,)])
def test_priors_in_a_stack(with_priors):
    """One draw for all uses in a call, and one for each particle."""
    stack, _ = _stack()
    priors = {0: dist.LogNormal(torch.zeros(2, 2).double(), 1.0), 3: dist.LogNormal(torch.zeros(1, 2).double(), 1.0)}
    for part in with_priors:
        stack.kernels[part].lengthscale = PyroSample(priors[part].to_event(2))
    X = rand(7, 2)
    with pyro.plate("particles", 3, dim=-1):
        trace = poutine.trace(stack).get_trace(X)
    K = trace.nodes["_RETURN"]["value"]
    assert K.shape == (3, 5, 7, 7)
    for particle in range(3):
        names = [f"kernels.{part}.lengthscale" for part in with_priors]
        alone = poutine.condition(stack, {name: trace.nodes[name]["value"][particle] for name in names})(X)
        torch.testing.assert_close(K[particle], alone)


def test_a_prior_needs_a_batch_of_kernels_in_a_stack():
    stack, _ = _stack()
    stack.kernels[1].variance = PyroSample(dist.LogNormal(0.0, 1.0))
    with pyro.plate("particles", 3, dim=-1), pytest.raises(ValueError, match=r"kernels that have priors batch_shape=\(1,\)"):
        stack(rand(7, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stack(), "expected one or more kernels, got none; give kernels to Stack"),
        (
            lambda: Stack(RBF(1), RBF(1, batch_shape=(2, 3))),
            r"expected kernels of batch shape \(\) or \(q,\), got \[\(\), \(2, 3\)\]",
        ),
        (
            lambda: Stack(RBF(1), Periodic(1))(torch.randn(3, 5, 1)),
            r"expected 2 kernels, got 6 from a batch of points or parameters; give points as X.unsqueeze\(-3\)",
        ),
        (
            lambda: Stack(RBF(1), Periodic(1)).diagonal(torch.randn(3, 5, 1)),
            r"expected 2 kernels, got 6 from a batch of points",
        ),
    ],
)
def test_stacks_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("local", [False, True])
def test_gpytorch_s_kernels_are_parts_of_our_models(gpytorch, local):
    """And leave alone what kernels share."""
    with pyro.settings.context(module_local_params=local):
        t, y = torch.linspace(0.0, 1.0, 9)[:, None], torch.randn(9, 2)
        theirs = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel())
        model = GPVAE(as_kernel(theirs), torch.nn.Linear(1, 2))
        guide = StructuredGPGuide(model, encoders={"f": ZeroImputation(2, 1)})
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), StructuredELBO())
        before = theirs.base_kernel.lengthscale.item()
        for _ in range(3):
            svi.step(t, y)
        assert theirs.base_kernel.lengthscale.item() != before
    others = gpytorch.kernels.RBFKernel().modules()
    assert not any(isinstance(part, pyro.nn.PyroModule) for part in others)


def test_a_prior_on_a_gpytorch_parameter_is_refused(gpytorch):
    kernel = as_kernel(gpytorch.kernels.RBFKernel())
    kernel.kernel.raw_lengthscale = PyroSample(dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
    with pytest.raises(ValueError, match=r"priors on \['raw_lengthscale'\]"):
        kernel(torch.randn(3, 1))


def test_a_diagonal_without_the_batch_of_its_kernel_is_refused():
    class White(Kernel):
        def _covariance(self, X, Z, params):
            return (X[..., :, None, :] == Z[..., None, :, :]).all(-1).to(X.dtype).expand(2, -1, -1)

        def _diagonal(self, X, params):
            return torch.ones_like(X[..., 0])

    with pytest.raises(ValueError, match=r"_diagonal of White to have the batch shape \[2\]"):
        White(1, batch_shape=(2,)).diagonal(torch.randn(3, 1))
