"""Block coordinate ascent: who moves when, how far, and where it ends."""

import copy
import functools
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import Normal, constraints, kl_divergence

from pyro_lvgp import conjugate
from pyro_lvgp.conjugate import NaturalGaussian
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Block, BlockCoordinateVI, MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM

N, Q = 30, 3


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=[False, True], ids=["param store", "local parameters"])
def _local(request):
    with pyro.settings.context(module_local_params=request.param):
        yield


def adam(lr=0.1):
    return functools.partial(torch.optim.Adam, lr=lr)


class Model(PyroModule):
    """A regression on features X, whose noise is a parameter."""

    def __init__(self):
        super().__init__()
        self.noise = PyroParam(torch.tensor(0.5), constraints.positive)

    def forward(self, X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, self.noise), obs=y)


class Guide(PyroModule):
    """Independent Gaussians; the mean has a module of its own."""

    def __init__(self):
        super().__init__()
        self.w = PyroModule()
        self.w.mean = PyroParam(torch.zeros(Q))
        self.precision = PyroParam(torch.ones(Q), constraints.positive)

    def forward(self, X, y):
        pyro.sample("w", dist.Normal(self.w.mean, self.precision.rsqrt()).to_event(1))


def model(X, y):
    noise = pyro.param("noise", torch.tensor(0.5), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def guide(X, y):
    mean = pyro.param("w.mean", torch.zeros(Q))
    precision = pyro.param("precision", torch.ones(Q), constraint=constraints.positive)
    pyro.sample("w", dist.Normal(mean, precision.rsqrt()).to_event(1))


def exact_loss(model, guide, X, y):
    """Minus the bound of the regression, in closed form."""
    mean, precision, noise = guide.w.mean, guide.precision, model.noise
    squares = (y - X @ mean).square().sum() + (X.square() @ precision.reciprocal()).sum()
    expected = -0.5 * (len(y) * (2.0 * torch.pi * noise.square()).log() + squares / noise.square())
    return kl_divergence(Normal(mean, precision.rsqrt()), Normal(torch.zeros(Q), 1.0)).sum() - expected


def data():
    X = torch.randn(N, Q) @ (torch.eye(Q) + 0.3)
    return X, X @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(N)


def precision_update(X, y, noise=0.5):
    return {"guide.precision": 1.0 + X.square().sum(0) / noise**2}


def parts(kind):
    return (Model(), Guide()) if kind == "modules" else (model, guide)


def run_on(svi, *args, steps=20):
    pyro.set_rng_seed(1)
    return [svi.step(*args) for _ in range(steps)]


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("kind", ["modules", "functions"])
def test_one_gradient_block_is_svi(kind, elbo):
    args, results = data(), []
    for make in (
        lambda m, g: SVI(m, g, pyro.optim.Adam({"lr": 0.1}), elbo()),
        lambda m, g: BlockCoordinateVI(m, g, [Block("all", params=["*"], optim=adam())], loss=elbo()),
    ):
        pyro.clear_param_store()
        m, g = parts(kind)
        g(*args)
        svi = make(m, g)
        losses = run_on(svi, *args)
        values = [x.detach() for part in (m, g) for x in part.parameters()] if kind == "modules" else []
        values += [x.detach() for _, x in sorted(pyro.get_param_store().items())]
        results.append((losses, values, svi.evaluate_loss(*args)))
    assert results[0][0] == results[1][0]
    assert len(results[0][1]) >= 3
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0.0, atol=0.0)
    assert results[0][2] == results[1][2]


@pytest.mark.usefixtures("_local")
def test_blocks_in_any_module_find_their_parameters():
    args, m, g = data(), Model(), Guide()
    blocks = [
        Block("noise", params=["model.*"], optim=adam()),
        Block("mean", sites=["w"], optim=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: precision_update(X, y, m.noise)),
    ]
    vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss)
    losses = [vi.step(*args) for _ in range(300)]
    assert losses[-1] < losses[0] - 5.0
    # At the optimum no gradient is left.
    slopes = torch.autograd.grad(exact_loss(m, g, *args), [*m.parameters(), *g.parameters()])
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-3)


def test_orphans_overlaps_and_idle_patterns_are_named():
    blocks = [
        Block("one", params=["model.noise", "guide.w.*"], optim=adam()),
        Block("two", params=["model.*", "guide.w"], sites=["v"], optim=adam()),
    ]
    with pytest.raises(ValueError, match="exactly one block") as error:
        BlockCoordinateVI(Model(), Guide(), blocks).step(*data())
    for fault in (
        "pattern 'guide.w' of block 'two' fits none",
        "site 'v' of block 'two' fits none",
        "'guide.precision' is in no block",
        "'model.noise' is in blocks ['one', 'two']",
    ):
        assert fault in str(error.value)


def test_sites_are_the_guide_s():
    class OwnModel(Model):
        def __init__(self):
            super().__init__()
            self.w = PyroModule()
            self.w.noise = PyroParam(torch.tensor(1.0))

    blocks = [Block("w", sites=["w"], optim=adam()), Block("precision", params=["guide.precision"], optim=adam())]
    with pytest.raises(ValueError, match=r"got: 'model.noise' is in no block; 'model.w.noise' is in no block\."):
        BlockCoordinateVI(OwnModel(), Guide(), blocks).step(*data())


@pytest.mark.usefixtures("_local")
def test_sites_of_an_autoguide():
    m = Model()
    g = AutoNormal(m)
    blocks = [Block("w", sites=["w"], optim=adam()), Block("noise", params=["model.noise"], optim=adam())]
    BlockCoordinateVI(m, g, blocks).step(*data())
    assert (g.locs.w != 0.0).all()
    assert m.noise != 0.5


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("plain", [False, True], ids=["PyroParam", "nn.Parameter"])
def test_frozen_parameters_stay_and_need_no_block(plain):
    m, g = Model(), Guide()
    if plain:
        m.noise = nn.Parameter(torch.tensor(0.5))
    frozen = m.noise if plain else m.noise_unconstrained
    frozen.requires_grad_(False)
    vi = BlockCoordinateVI(m, g, [Block("w", params=["guide.*"], optim=adam())])
    run_on(vi, *data(), steps=3)
    assert not frozen.requires_grad
    assert m.noise == 0.5
    before = g.precision.clone()
    g.precision_unconstrained.requires_grad_(False)  # now as well as at the start
    vi.step(*data())
    assert torch.equal(g.precision, before)


def test_what_is_frozen_later_is_not_updated():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    blocks = [Block("mean", sites=["w"], optim=adam()), Block("precision", params=["guide.p*"], update=precision_update)]
    vi = BlockCoordinateVI(m, g, blocks)
    args = data()
    vi.step(*args)
    updated = g.precision.clone()
    g.precision_unconstrained.requires_grad_(False)
    vi.step(args[0][:3], args[1][:3])
    assert torch.equal(g.precision, updated)


@pytest.mark.usefixtures("_local")
def test_what_is_frozen_before_the_first_step_may_be_in_a_block():
    """By gradient and in closed form, of its own or beside others, whether the closed form has its value or not."""
    args = data()
    for with_frozen in (True, False):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        m.noise_unconstrained.requires_grad_(False)
        g.precision_unconstrained.requires_grad_(False)

        def update(X, y, with_frozen=with_frozen):
            frozen = {"guide.precision": torch.full((Q,), 7.0)} if with_frozen else {}
            return {"guide.w.mean": torch.ones(Q)} | frozen

        def nothing(X, y):
            raise AssertionError("there is nothing to move")

        blocks = [
            Block("noise", params=["model.noise"], optim=adam()),
            Block("w", params=["guide.w.*", "guide.precision"], update=update),
            Block("precision", params=["guide.precision"], update=nothing),
        ]
        vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss)
        before = exact_loss(m, g, *args).item()
        assert vi.step(*args) == pytest.approx(before)
        assert m.noise == 0.5
        assert torch.equal(g.precision, torch.ones(Q))
        torch.testing.assert_close(g.w.mean.detach(), torch.ones(Q))
        assert vi.state_dict()["optimizers"]["noise"]["state"] == {}


def test_guides_with_discrete_sites_are_told_of_other_bounds():
    def model():
        pyro.sample("z", dist.Bernoulli(0.5))

    def guide():
        pyro.sample("z", dist.Bernoulli(pyro.param("p", torch.tensor(0.3), constraint=constraints.unit_interval)))

    blocks = [Block("p", params=["p"], optim=adam())]
    with pytest.raises(NotImplementedError, match="fully reparameterized") as error:
        BlockCoordinateVI(model, guide, blocks).step()
    assert "Pass loss=Trace_ELBO() or TraceEnum_ELBO()" in error.value.__notes__[0]
    BlockCoordinateVI(model, guide, blocks, loss=Trace_ELBO()).step()
    BlockCoordinateVI(model, config_enumerate(guide), blocks, loss=TraceEnum_ELBO()).step()


class Spying(TraceMeanField_ELBO):
    """Notes which of some tensors require gradients, and may fail."""

    def __init__(self, tensors, fail=False):
        super().__init__()
        self.tensors, self.fail, self.seen = tensors, fail, []

    def loss_and_grads(self, *args, **kwargs):
        self.seen.append([tensor.requires_grad for tensor in self.tensors])
        value = super().loss_and_grads(*args, **kwargs)
        if self.fail:
            raise ArithmeticError("in the middle of a step")
        return value


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("fail", [False, True])
def test_only_the_block_that_moves_requires_gradients(fail):
    m, g = Model(), Guide()
    tensors = [m.noise_unconstrained, g.w.mean_unconstrained, g.precision_unconstrained]
    tensors[1].requires_grad_(False)
    first, second = Spying(tensors), Spying(tensors, fail)
    blocks = [
        Block("noise", params=["model.*"], optim=adam(), loss=first),
        Block("precision", params=["guide.precision"], optim=adam(), num_steps=2, loss=second),
    ]
    vi = BlockCoordinateVI(m, g, blocks)
    if fail:
        with pytest.raises(ArithmeticError):
            vi.step(*data())
    else:
        vi.step(*data())
    assert first.seen == [[True, False, False]]
    assert second.seen == [[False, False, True]] * (1 if fail else 2)
    assert [tensor.requires_grad for tensor in tensors] == [True, False, True]
    assert all(tensor.grad is None for tensor in tensors)


def test_gradients_left_by_others_do_not_count():
    results = []
    for stale in (False, True):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        if stale:
            for parameter in (*m.parameters(), *g.parameters()):
                parameter.grad = torch.full_like(parameter, 100.0)
        vi = BlockCoordinateVI(m, g, [Block("all", params=["*"], optim=adam())], loss=exact_loss)
        torch.manual_seed(0)
        vi.step(*data())
        results.append([parameter.detach() for parameter in (*m.parameters(), *g.parameters())])
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


def test_plain_modules_inside_do_not_warn():
    class Amortised(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 2)
            self.scale = PyroParam(torch.tensor(1.0), constraints.positive)

        def forward(self, y):
            loc = self.net(y.mean().reshape(1))[0]
            pyro.sample("x", dist.Normal(loc, self.scale))

    def one(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    g = Amortised()
    weight = g.net.weight.clone()
    blocks = [Block("net", params=["guide.net.*"], optim=adam()), Block("scale", params=["guide.scale"], optim=adam())]
    vi = BlockCoordinateVI(one, g, blocks)
    for _ in range(2):
        vi.step(torch.ones(5))
    assert not torch.equal(g.net.weight[0], weight[0])


def test_a_shared_parameter_goes_by_its_name_in_the_model():
    m, g = Model(), Guide()
    g.model = m
    blocks = [Block("noise", params=["model.noise"], optim=adam()), Block("rest", params=["guide.*"], optim=adam())]
    BlockCoordinateVI(m, g, blocks).step(*data())


def test_an_optimiser_with_line_search_solves_its_block():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    lbfgs = functools.partial(torch.optim.LBFGS, max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-10)
    blocks = [Block("mean", sites=["w"], optim=lbfgs), Block("precision", params=["guide.p*"], update=precision_update)]
    (X, y), vi = data(), BlockCoordinateVI(m, g, blocks, loss=exact_loss)
    vi.step(X, y)
    expected = torch.linalg.solve(torch.eye(Q) + X.mT @ X / 0.25, X.mT @ y / 0.25)
    torch.testing.assert_close(g.w.mean.detach(), expected, rtol=1e-6, atol=1e-8)


def mean_field(X, y):
    """A model with three sites, a guide in natural parameters, and the closed form of each site."""

    def model(X, y):
        w = torch.stack([pyro.sample(f"w{i}", dist.Normal(0.0, 1.0)) for i in range(Q)])
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    class Factors(PyroModule):
        def __init__(self):
            super().__init__()
            for i in range(Q):
                setattr(self, f"w{i}", PyroModule())
                getattr(self, f"w{i}").precision_mean = PyroParam(torch.zeros(1))
                getattr(self, f"w{i}").precision = PyroParam(torch.ones(1), constraints.positive)

        def mean(self):
            return torch.cat([getattr(self, f"w{i}").precision_mean / getattr(self, f"w{i}").precision for i in range(Q)])

        def forward(self, X, y):
            for i in range(Q):
                site = getattr(self, f"w{i}")
                loc, scale = site.precision_mean / site.precision, site.precision.rsqrt()
                pyro.sample(f"w{i}", dist.Normal(loc[0], scale[0]))

    def loss(model, guide, X, y):
        mean, precision = guide.mean(), torch.cat([getattr(guide, f"w{i}").precision for i in range(Q)])
        squares = (y - X @ mean).square().sum() + (X.square() @ precision.reciprocal()).sum()
        return kl_divergence(Normal(mean, precision.rsqrt()), Normal(torch.zeros(Q), 1.0)).sum() + squares / (2.0 * 0.25)

    factors = Factors()

    def update(i):
        def closed_form(X, y):
            others = factors.mean().clone()
            others[i] = 0.0
            prior = NaturalGaussian(torch.zeros(1), torch.eye(1))
            new = conjugate.gaussian_weights(prior, X[:, i : i + 1], y - X @ others, torch.full_like(y, 4.0))
            return {f"guide.w{i}.precision_mean": new.precision_mean, f"guide.w{i}.precision": new.precision[0]}

        return closed_form

    return model, factors, [Block(f"w{i}", sites=[f"w{i}"], update=update(i)) for i in range(Q)], loss


def test_coordinate_ascent_ends_at_the_mean_field_optimum():
    X, y = data()
    model, factors, blocks, loss = mean_field(X, y)
    vi = BlockCoordinateVI(model, factors, blocks, loss=loss, check_updates=True)
    losses = [vi.step(X, y) for _ in range(200)]
    assert all(after <= before + 1e-9 for before, after in pairwise(losses))
    precision = torch.eye(Q) + 4.0 * X.mT @ X
    # The mean is that of the exact posterior, the precisions are the diagonal of its precision matrix.
    torch.testing.assert_close(factors.mean().detach(), torch.linalg.solve(precision, 4.0 * X.mT @ y))
    for i in range(Q):
        torch.testing.assert_close(getattr(factors, f"w{i}").precision.detach(), precision[i, i][None])


def test_one_joint_block_is_the_exact_posterior_in_one_step():
    X, y = data()
    pyro.param("precision_mean", torch.zeros(Q))
    prior = NaturalGaussian(torch.zeros(Q), torch.eye(Q))

    def model(X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    def joint(X, y):
        precision = pyro.param("precision", torch.eye(Q), constraint=constraints.positive_definite)
        q = NaturalGaussian(pyro.param("precision_mean"), precision)
        pyro.sample("w", dist.MultivariateNormal(q.mean, precision_matrix=q.precision))

    def posterior(X, y):
        return conjugate.gaussian_weights(prior, X, y, torch.full_like(y, 4.0))._asdict()

    vi = BlockCoordinateVI(model, joint, [Block("w", params=["precision*"], update=posterior)])
    vi.step(X, y)
    precision = torch.eye(Q) + 4.0 * X.mT @ X
    torch.testing.assert_close(pyro.param("precision").detach(), precision)
    # At the exact posterior every draw gives the evidence.
    evidence = dist.MultivariateNormal(torch.zeros(N), 0.25 * torch.eye(N) + X @ X.mT).log_prob(y)
    assert BlockCoordinateVI(model, joint, vi.blocks, loss=Trace_ELBO()).evaluate_loss(X, y) == pytest.approx(-float(evidence))


@pytest.mark.parametrize("damping", [0.3, lambda sweep: 1.0 / (sweep + 1.0)])
def test_damping_mixes_values(damping):
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    update = Block("precision", params=["guide.precision"], update=precision_update, damping=damping)
    vi = BlockCoordinateVI(m, g, [Block("mean", sites=["w"], optim=adam()), update])
    args, expected = data(), torch.ones(Q)
    for sweep in range(4):
        rows = slice(5 * sweep, 5 * sweep + 5)
        vi.step(args[0][rows], args[1][rows])
        rho = damping(sweep) if callable(damping) else damping
        expected = (1.0 - rho) * expected + rho * (1.0 + args[0][rows].square().sum(0) / 0.25)
        torch.testing.assert_close(g.precision.detach(), expected)


def noisy_mean(y_all):
    """An unknown mean and an unknown precision of the data, both by closed forms for a mini-batch."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        precision = pyro.sample("precision", dist.Gamma(1.0, 1.0))
        with pyro.plate("data", len(y_all), subsample_size=len(y)):
            pyro.sample("y", dist.Normal(mean, precision.rsqrt()), obs=y)

    def guide(y):
        h, lam = pyro.param("h", torch.tensor([0.0])), pyro.param("lam", torch.ones(1, 1), constraint=constraints.positive)
        shape = pyro.param("shape", torch.tensor(1.0), constraint=constraints.positive)
        rate = pyro.param("rate", torch.tensor(1.0), constraint=constraints.positive)
        pyro.sample("mean", dist.Normal(h[0] / lam[0, 0], lam[0, 0].rsqrt()))
        pyro.sample("precision", dist.Gamma(shape, rate))

    def mean(y):
        tau = len(y_all) / len(y) * pyro.param("shape") / pyro.param("rate")
        prior = NaturalGaussian(torch.zeros(1), torch.eye(1))
        new = conjugate.gaussian_weights(prior, torch.ones(len(y), 1), y, tau.expand(len(y)))
        return {"h": new.precision_mean, "lam": new.precision}

    def precision(y):
        loc, lam = pyro.param("h")[0] / pyro.param("lam")[0, 0], pyro.param("lam")[0, 0]
        squares, weights = (y - loc).square() + 1.0 / lam, torch.full_like(y, len(y_all) / len(y))
        one = torch.tensor(1.0)
        return dict(zip(("shape", "rate"), conjugate.gamma_precision(one, one, squares, weights), strict=True))

    return model, guide, {"mean": (["h", "lam"], mean), "precision": (["shape", "rate"], precision)}


def test_damped_mini_batches_end_at_the_full_batch_fixed_point():
    y = 3.0 + torch.randn(60)
    model, guide, updates = noisy_mean(y)

    def run(steps, batch_size, damping):
        pyro.clear_param_store()
        blocks = [Block(name, params=p, update=f, damping=damping) for name, (p, f) in updates.items()]
        vi = BlockCoordinateVI(model, guide, blocks)
        for _ in range(steps):
            vi.step(y[torch.randperm(60)[:batch_size]])
        return {name: value.detach().flatten() for name, value in pyro.get_param_store().items()}

    exact = run(30, 60, 1.0)
    # The fixed point in closed form: E τ and the moments of the mean, given each other.
    tau = exact["shape"] / exact["rate"]
    torch.testing.assert_close(exact["lam"], 1.0 + 60.0 * tau)
    torch.testing.assert_close(exact["h"], tau * y.sum())
    torch.testing.assert_close(
        exact["rate"], 1.0 + 0.5 * ((y - exact["h"] / exact["lam"]).square() + 1.0 / exact["lam"]).sum()[None]
    )
    damped = run(500, 12, lambda sweep: (1.0 + sweep) ** -0.8)
    for name, value in damped.items():
        torch.testing.assert_close(value, exact[name], rtol=0.03, atol=0.0)


def test_a_schedule_of_averages_ends_an_epoch_at_the_exact_posterior():
    X, y = data()
    prior = NaturalGaussian(torch.zeros(Q), torch.eye(Q))

    def guide(X, y):
        h, precision = pyro.param("h", torch.zeros(Q)), pyro.param("P", torch.eye(Q), constraint=constraints.positive_definite)
        pyro.sample("w", dist.MultivariateNormal(NaturalGaussian(h, precision).mean, precision_matrix=precision))

    def model(X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    def posterior(X, y):
        new = conjugate.gaussian_weights(prior, X, y, torch.full_like(y, 4.0 * N / len(y)))
        return {"h": new.precision_mean, "P": new.precision}

    block = Block("w", params=["h", "P"], update=posterior, damping=lambda sweep: 1.0 / (sweep + 1.0))
    vi = BlockCoordinateVI(model, guide, [block])
    for rows in torch.randperm(N).split(5):
        vi.step(X[rows], y[rows])
    torch.testing.assert_close(pyro.param("P").detach(), torch.eye(Q) + 4.0 * X.mT @ X)
    torch.testing.assert_close(pyro.param("h").detach(), 4.0 * X.mT @ y)


def test_values_may_be_the_parameters_themselves():
    def guide():
        a, b = pyro.param("a", torch.tensor(1.0)), pyro.param("b", torch.tensor(2.0))
        pyro.sample("x", dist.Normal(a, b.abs()))

    def swap():
        return {"a": pyro.param("b"), "b": pyro.param("a")}

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    BlockCoordinateVI(model, guide, [Block("both", params=["a", "b"], update=swap)]).step()
    assert (pyro.param("a"), pyro.param("b")) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"block 'precision': expected update to return values of \['guide.precision'\], got \[\]"),
        ({"guide.precision": torch.ones(1)}, r"'guide.precision' of shape \[3\], got \[1\]"),
        ({"guide.precision": torch.tensor([1.0, -1.0, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, torch.nan, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, 0.0, 1.0])}, "'guide.precision' in GreaterThan"),
        ({"guide.precision": torch.tensor([1.0, torch.inf, 1.0])}, "'guide.precision' in GreaterThan"),
    ],
)
def test_unfit_values_are_refused(values, message):
    m, g = Model(), Guide()
    blocks = [
        Block("rest", params=["model.noise", "guide.w.*"], optim=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: values),
    ]
    with pytest.raises(ValueError, match=message):
        BlockCoordinateVI(m, g, blocks).step(*data())
    torch.testing.assert_close(g.precision.detach(), torch.ones(Q))


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        # Symmetric up to rounding in single precision.
        (constraints.positive_definite, [[1e4, 0.1], [0.1001, 1.0]], [[1.0, 2.0], [2.0, 1.0]]),
        (constraints.positive_definite, [[2.0, 1.0], [1.0, 2.0]], [[2.0, 1.0], [0.0, 2.0]]),
        (constraints.lower_cholesky, [[1.0, 0.0], [-1.0, 2.0]], [[1.0, 0.0], [-1.0, -2.0]]),
        (constraints.simplex, [0.2, 0.3, 0.5], [0.2, 0.3, 0.6]),
        (constraints.unit_interval, [0.1, 0.9], [0.1, 1.1]),
        (constraints.real, [-torch.inf, 0.0], [torch.nan, 0.0]),
        (constraints.positive, [], None),
    ],
    ids=["rounding", "symmetric", "triangular", "simplex", "interval", "infinite", "empty"],
)
def test_values_must_fit_the_constraint_up_to_rounding(constraint, good, bad):
    good = torch.tensor(good, dtype=torch.float32)

    def guide():
        start = torch.eye(2) if good.dim() == 2 else torch.full_like(good, 1.0 / max(len(good), 1))
        pyro.param("x", start.float(), constraint=constraint)

    def step(value):
        BlockCoordinateVI(lambda: None, guide, [Block("x", params=["x"], update=lambda: {"x": value})]).step()

    step(good)
    torch.testing.assert_close(pyro.param("x").detach(), good, atol=1e-3, rtol=1e-5)
    if bad is not None:
        with pytest.raises(ValueError, match="'x' in "):
            step(torch.tensor(bad, dtype=torch.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": adam()}, "expected a list of patterns"),
        ({"params": "guide.*", "optim": adam()}, "expected a list of patterns"),
        ({"params": ["*"]}, "neither"),
        ({"params": ["*"], "optim": adam(), "update": dict}, "both"),
        ({"params": ["*"], "optim": adam(), "num_steps": 0}, "at least 1, got 0"),
        ({"params": ["*"], "update": dict, "num_steps": 2}, "are for gradients"),
        ({"params": ["*"], "update": dict, "loss": Trace_ELBO()}, "are for gradients"),
        ({"params": ["*"], "update": dict, "schedule": float}, "are for gradients"),
        ({"params": ["*"], "optim": adam(), "damping": 0.5}, "damping is for update"),
        ({"params": ["*"], "update": dict, "damping": 0.0}, r"damping in \(0, 1\], got 0.0"),
    ],
)
def test_settings_of_blocks_are_checked(settings, message):
    with pytest.raises(ValueError, match=f"block 'b': .*{message}"):
        Block("b", **settings)


@pytest.mark.parametrize("values", [None, {"guide.precision": 1.0}])
def test_updates_return_tensors_by_name(values):
    blocks = [
        Block("rest", params=["model.noise", "guide.w.*"], optim=adam()),
        Block("precision", params=["guide.precision"], update=lambda X, y: values),
    ]
    with pytest.raises(TypeError, match="block 'precision': expected update to return tensors by name, got"):
        BlockCoordinateVI(Model(), Guide(), blocks).step(*data())


@pytest.mark.usefixtures("unchecked")
def test_kinds_of_arguments_are_checked():
    m, g = Model(), Guide()
    with pytest.raises(TypeError, match=r"each a Block\(...\), got \['str'\]"):
        BlockCoordinateVI(m, g, ["all"])
    blocks = [Block("all", params=["*"], optim=pyro.optim.Adam({"lr": 0.1}))]
    with pytest.raises(TypeError, match=r"got the class Trace_ELBO; pass Trace_ELBO\(\)"):
        BlockCoordinateVI(m, g, blocks, loss=Trace_ELBO)
    with pytest.raises(TypeError, match="block 'all': expected optim to make a torch optimiser of tensors, got NoneType"):
        BlockCoordinateVI(m, g, blocks).step(*data())


def test_a_first_step_that_fails_is_made_again():
    """With no block left out."""
    args, fails = data(), iter([True, True, False])

    def optim(tensors):
        return None if next(fails) else torch.optim.Adam(tensors, lr=0.1)

    m, g = Model(), Guide()
    blocks = [Block("model", params=["model.*"], optim=adam()), Block("guide", params=["guide.*"], optim=optim)]
    vi = BlockCoordinateVI(m, g, blocks)
    for _ in range(2):
        with pytest.raises(TypeError, match="block 'guide': expected optim to make a torch optimiser"):
            vi.step(*args)
    vi.step(*args)
    assert m.noise != 0.5
    assert (g.w.mean != 0.0).all()


def test_states_of_other_blocks_are_refused():
    vi = BlockCoordinateVI(Model(), Guide(), [Block("all", params=["*"], optim=adam())])
    vi.step(*data())
    other = BlockCoordinateVI(Model(), Guide(), [Block("everything", params=["*"], optim=adam())])
    with pytest.raises(ValueError, match=r"expected states of the blocks \['everything'\], got those of \['all'\]"):
        other.load_state_dict(vi.state_dict())


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_of_blocks_are_checked(names):
    with pytest.raises(ValueError, match="each with a name of its own"):
        BlockCoordinateVI(model, guide, [Block(name, params=["*"], optim=adam()) for name in names])


def test_a_schedule_out_of_range_is_refused():
    m, g = Model(), Guide()
    block = Block("all", params=["*"], update=dict, damping=lambda sweep: 2.0)
    with pytest.raises(ValueError, match=r"block 'all': expected damping in \(0, 1\], got 2.0"):
        BlockCoordinateVI(m, g, [block]).step(*data())


@pytest.mark.parametrize("factor", [0.5, 1.0, 10.0])
def test_a_wrong_closed_form_is_found_out(factor):
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)

    def update(X, y):
        return {"guide.precision": factor * (1.0 + X.square().sum(0) / 0.25)}

    args, blocks = (
        data(),
        [Block("precision", params=["guide.precision"], update=update), Block("w", sites=["w"], optim=adam())],
    )
    vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss, check_updates=True)
    g.precision = 1.0 + args[0].square().sum(0) / 0.25
    if factor == 1.0:
        for _ in range(5):
            vi.step(*args)
    else:
        with pytest.raises(RuntimeError, match="the update of block 'precision' raised the loss from"):
            vi.step(*args)


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_wrong_closed_form_is_found_out_by_many_estimates(factor):
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    args = data()
    best = 1.0 + args[0].square().sum(0) / 0.25
    blocks = [
        Block("precision", params=["guide.precision"], update=lambda X, y: {"guide.precision": factor * best}),
        Block("w", sites=["w"], optim=adam()),
    ]
    vi = BlockCoordinateVI(m, g, blocks, loss=Trace_ELBO(), check_updates=200)
    g.precision = 1.5 * best
    if factor == 1.0:
        vi.step(*args)
    else:
        with pytest.raises(RuntimeError, match="the update of block 'precision' raised the loss from"):
            vi.step(*args)


def test_checks_leave_the_random_state_alone():
    losses = []
    for check in (False, True):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        blocks = [Block("rest", params=["model.*", "guide.w.*"], optim=adam())]
        blocks.append(
            Block("precision", params=["guide.precision"], update=lambda X, y, g=g: {"guide.precision": g.precision})
        )
        losses.append(run_on(BlockCoordinateVI(m, g, blocks, check_updates=check), *data_of_seed()))
    assert losses[0] == losses[1]


def data_of_seed():
    pyro.set_rng_seed(5)
    return data()


def test_the_loss_of_a_step():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    args = data()
    precision = Block("precision", params=["guide.precision"], update=precision_update)
    mean = {"sites": ["w"], "optim": adam()}
    start = exact_loss(m, g, *args).item()
    # No gradient step on the bound: the loss before the sweep.
    assert BlockCoordinateVI(m, g, [precision, Block("mean", loss=Trace_ELBO(), **mean)], loss=exact_loss).step(*args) == start
    # Else that before the first gradient step on it.
    with torch.no_grad():
        g.precision = torch.ones(Q)
    before = [value.detach().clone() for value in g.parameters()]
    found = BlockCoordinateVI(m, g, [precision, Block("mean", num_steps=3, **mean)], loss=exact_loss).step(*args)
    updated = g.precision.detach().clone()
    for tensor, value in zip(g.parameters(), before, strict=True):
        tensor.data.copy_(value)
    g.precision = updated
    assert found == pytest.approx(exact_loss(m, g, *args).item())


def test_a_schedule_scales_the_learning_rate_of_each_sweep():
    def halved_square(model, guide):
        return 0.5 * guide().square()

    pyro.clear_param_store()
    factors, descent = (1.0, 0.5, 0.0, 0.2), lambda tensors: torch.optim.SGD(tensors, lr=0.5)
    block = Block("x", params=["x"], optim=descent, num_steps=2, schedule=factors.__getitem__)
    vi = BlockCoordinateVI(lambda: None, lambda: pyro.param("x", torch.tensor(1.0)), [block], loss=halved_square)
    expected = 1.0
    for factor in factors:
        vi.step()
        expected *= (1.0 - 0.5 * factor) ** 2
        assert pyro.param("x").item() == pytest.approx(expected)


def test_states_resume():
    args = data()

    def make():
        pyro.clear_param_store()
        m, g = Model(), Guide()
        blocks = [
            Block("noise", params=["model.*"], optim=adam(0.2)),
            Block("mean", sites=["w"], optim=adam(), schedule=lambda sweep: 0.5**sweep),
            Block("precision", params=["guide.p*"], update=precision_update, damping=lambda sweep: 1.0 / (1.0 + sweep)),
        ]
        return m, g, BlockCoordinateVI(m, g, blocks, loss=exact_loss)

    m, g, vi = make()
    run_on(vi, *args, steps=5)
    saved = vi.state_dict(), copy.deepcopy(m.state_dict()), copy.deepcopy(g.state_dict())
    straight = run_on(vi, *args, steps=5)
    for warm in (False, True):
        m, g, vi = make()
        if warm:
            vi.step(*args)
        m.load_state_dict(saved[1])
        g.load_state_dict(saved[2])
        vi.load_state_dict(saved[0])
        assert vi.state_dict()["num_sweeps"] == 5
        assert run_on(vi, *args, steps=5) == straight


def test_parameters_that_are_replaced_are_noticed():
    m, g = Model(), Guide()
    vi = BlockCoordinateVI(m, g, [Block("all", params=["*"], optim=adam())])
    vi.step(*data())
    store = pyro.get_param_store()
    store["noise"] = torch.tensor(0.3)
    with pytest.raises(RuntimeError, match=r"new tensors for \['noise'\]"):
        vi.step(*data())


def test_blocks_of_a_latent_variable_model():
    Y = torch.randn(20, 4)
    gplvm = BayesianGPLVM(20, 4, 2, num_inducing=5)
    g = MeanFieldGuide(gplvm)
    blocks = [
        Block("latents", sites=["X"], optim=adam(0.05), num_steps=2),
        Block("inducing outputs", sites=["u"], optim=adam(0.05)),
        Block("model", params=["model.*"], optim=adam(0.02)),
    ]
    vi = BlockCoordinateVI(gplvm, g, blocks, loss=MeanFieldELBO())
    idx = torch.arange(10)
    losses = [vi.step(Y[idx], idx) for _ in range(10)]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("only", [False, True], ids=["beside others", "alone in its block"])
def test_a_parameter_that_is_freed_later_moves_from_then_on(only):
    (X, y), (model, guide) = data(), parts("modules")
    model.noise_unconstrained.requires_grad_(False)
    blocks = [Block("noise", params=["model.*"], optim=adam()), Block("rest", params=["guide.*"], optim=adam())]
    vi = BlockCoordinateVI(model, guide, blocks if only else [Block("all", params=["*"], optim=adam())])
    for _ in range(3):
        vi.step(X, y)
    assert model.noise == 0.5
    model.noise_unconstrained.requires_grad_(True)
    for _ in range(3):
        vi.step(X, y)
    assert abs(model.noise - 0.5) > 0.01


def test_a_parameter_without_a_block_cannot_be_freed():
    (X, y), (model, guide) = data(), parts("modules")
    model.noise_unconstrained.requires_grad_(False)
    vi = BlockCoordinateVI(model, guide, [Block("guide", params=["guide.*"], optim=adam())])
    vi.step(X, y)
    model.noise_unconstrained.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model.noise.*to stay held"):
        vi.step(X, y)


def test_a_name_with_brackets_is_itself_before_it_is_a_pattern():
    def model():
        pyro.sample(
            "y",
            dist.Normal(pyro.param("s[0]", torch.tensor(1.0)) + pyro.param("s0", torch.tensor(2.0)), 1.0),
            obs=torch.zeros(()),
        )

    blocks = [Block(name, params=[name], optim=adam()) for name in ("s[0]", "s0")]
    vi = BlockCoordinateVI(model, lambda: None, blocks)
    vi.step()
    assert pyro.param("s[0]") < 1.0
    assert pyro.param("s0") < 2.0
