"""Updates in closed form: optimum, damping and averages."""

from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule, PyroParam
from torch.distributions import Normal, constraints, kl_divergence

from pyro_lvgp import conjugate
from pyro_lvgp.conjugate import NaturalGaussian
from pyro_lvgp.infer import Block, BlockCoordinateVI
from tests.infer.block_coordinate._regression import Guide, Model, N, Q, adam, data, precision_update

pytestmark = pytest.mark.usefixtures("float64")


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
    vi = BlockCoordinateVI(m, g, [Block("mean", sites=["w"], optimizer=adam()), update])
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
