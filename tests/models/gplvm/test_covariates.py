"""Covariates of rows, as further inputs of the functions."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Linear, Matern
from pyro_lvgp.likelihoods import Gaussian, LowRankGaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from tests.models.gplvm._models import D, M, N, Q, with_holes

pytestmark = pytest.mark.usefixtures("float64")

P = 2
KERNELS = {
    "default": lambda: None,
    "joint": lambda: RBF(Q + P),
    "interaction": lambda: RBF(Q, active_dims=[0, 1]) * RBF(P, active_dims=[2, 3]) + Linear(P, active_dims=[2, 3]),
}


def make(rows, cls=BayesianGPLVM, **kwargs):
    return cls(N, D, Q, num_inducing=M, rows=rows, **kwargs)


class Traced(BayesianGPLVM):
    """Model whose chains trace it."""

    def forward(self, y=None, idx=None, rows=None):
        return super().forward(y, idx, rows)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("likelihood", [lambda: Gaussian(0.3), lambda: Poisson(), lambda: LowRankGaussian(1, D)])
@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9])])
def test_functions_are_processes_of_latents_and_covariates(kind, likelihood, idx):
    """Against an expectation over f computed from the covariances of the joint inputs."""
    rows = RowArguments(covariates=torch.randn(N, P))
    Y = with_holes(torch.poisson(torch.ones(N, D)))
    Y = Y if idx is None else Y[idx]
    model = make(rows, kernel=KERNELS[kind](), likelihood=likelihood())
    X, u = torch.randn(len(Y), Q), torch.randn(D, M)
    inputs = torch.cat([X, rows.covariates if idx is None else rows.covariates[idx]], -1)
    trace = poutine.trace(poutine.condition(model, {"X": X, "u": u})).get_trace(Y, idx)
    Z, k = model.inducing_points, model.kernel
    A = torch.linalg.solve(torch.linalg.cholesky(k(Z)), k(Z, inputs))
    mean, variance = A.mT @ u.mT, (k.diagonal(inputs) - A.square().sum(0))[:, None].expand(-1, D)
    expected = model.likelihood.log_prob_of_rows(Y.nan_to_num(), ~Y.isnan(), mean, variance, model.likelihood.params())
    log_prob = trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"])
    torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-4)
    statistics = poutine.condition(model.statistics, {"u": u})(Y, idx)
    log_prior = dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
    torch.testing.assert_close(model.log_joint({"X": X}, statistics), log_prob + log_prior)


@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9])])
@pytest.mark.parametrize("likelihood", [lambda: Gaussian(0.3), lambda: LowRankGaussian(1, D)])
@pytest.mark.parametrize("kind", ["default", "products of covariates", "joint", "interaction", "another order"])
@pytest.mark.parametrize("particles", [(), (4,)])
def test_score_of_additive_kernels_is_the_gradient_of_the_log_joint(kind, likelihood, idx, particles):
    """In closed form for sums of an RBF kernel of the latents and kernels of covariates; otherwise by autograd."""
    kernels = KERNELS | {
        "products of covariates": lambda: (
            0.5 + Matern(1, 1.5, active_dims=[2]) * Linear(1, active_dims=[3]) + RBF(Q, active_dims=[0, 1])
        ),
        "another order": lambda: RBF(Q, lengthscale=torch.tensor([1.0, 2.0]), active_dims=[1, 0]),
    }
    Y, rows = with_holes(torch.randn(N, D)), RowArguments(covariates=torch.randn(N, P))
    model = make(rows, kernel=kernels[kind](), likelihood=likelihood())
    args = (Y,) if idx is None else (Y[idx], idx)
    statistics = poutine.condition(model.statistics, {"u": torch.randn(*particles, D, M)})(*args)
    assert (statistics.score is not None) == (kind in ("default", "products of covariates"))
    X = torch.randn(*particles, len(args[0]), Q)
    want = torch.func.grad(lambda X: model.log_joint({"X": X}, statistics).sum())(X)
    torch.testing.assert_close(model.score({"X": X}, statistics)["X"], want)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9, 2])])
def test_chains_of_the_pure_log_joint_are_those_of_the_traced_model(kind, idx):
    Y, rows, results = with_holes(torch.randn(N, D)), RowArguments(covariates=torch.randn(N, P)), []
    for cls in (BayesianGPLVM, Traced):
        with seeded(0):
            model = make(rows, cls, kernel=KERNELS[kind](), likelihood=Gaussian(0.3)).initialize(Y)
            guide = AutoAnnealedLangevin(model, num_steps=3, step_size=0.1)
            args = (Y,) if idx is None else (Y[idx], idx)
            guide(Y)
            loss = MeanFieldELBO(max_plate_nesting=1, num_samples=1)(model, guide)(*args)
            loss.backward()
            modules = {"guide": guide, "model": model}
            gradients = {
                f"{part}.{name}": p.grad
                for part, module in modules.items()
                for name, p in module.named_parameters()
                if p.grad is not None
            }
            results.append({"loss": loss.detach(), **gradients})
    assert any("lengthscale" in name for name in results[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def batches(num_rows=120):
    """Rows of one latent in two batches whose columns have other means."""
    x, batch = torch.rand(num_rows) * 4.0 - 2.0, torch.randint(2, (num_rows,))
    one_hot = torch.nn.functional.one_hot(batch, 2).to(x)
    F = torch.stack([x, torch.tanh(2.0 * x), torch.sin(x), x.square() / 2.0 - 1.0], -1)
    effect = torch.tensor([[2.0, -2.0, 1.0, 1.5], [-2.0, 2.0, -1.0, -1.5]])
    return x, one_hot, F, F + one_hot @ effect


def test_batch_effects_are_predicted_replaced_and_left_out_of_latents():
    torch.manual_seed(0)
    x, one_hot, F, mean = batches()
    Y = mean + 0.1 * torch.randn_like(mean)
    rows, latents = RowArguments(covariates=one_hot), {}
    for name, known in (("with", rows), ("without", None)):
        model = BayesianGPLVM.from_data(Y, 1, likelihood=Gaussian(0.1), rows=known, num_inducing=15)
        guide = MeanFieldGuide(model)
        how = {"loss": MeanFieldELBO(), "optim": JointAdam(lr=0.03), "compile": "torchscript"}
        fit(model, guide, Y, num_steps=250, progress=False, **how)
        latents[name] = guide.locs.X[:, 0].detach()
        if known is not None:
            fitted = model, guide
    of_x, of_batch = (
        {name: abs(torch.corrcoef(torch.stack([X, z]))[0, 1]) for name, X in latents.items()} for z in (x, one_hot[:, 0])
    )
    assert of_x["with"] > 0.98
    assert of_batch["with"] < 0.2 < 0.7 < of_batch["without"]
    model, guide = fitted
    first, second = (RowArguments(covariates=torch.eye(2)[[i]]) for i in range(2))
    own = model.reconstruct(guide, Y).mean
    assert (own - mean).square().mean().sqrt() < 0.15
    in_first, in_second = (model.reconstruct(guide, Y, rows=each).mean for each in (first, second))
    effect = mean - F
    true = (effect[one_hot[:, 0] == 1][0] - effect[one_hot[:, 1] == 1][0]).expand(len(Y), -1)
    torch.testing.assert_close(in_first - in_second, true, rtol=0.0, atol=0.3)
    taken_out = model.predict(guide, guide.locs.X.detach(), rows=first).mean
    torch.testing.assert_close(taken_out, in_first, rtol=0.0, atol=0.15)
    # New rows of either batch have latents by their functions alone.
    x_new = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    new = torch.eye(2)[[0, 1, 0, 1]]
    F_new = torch.stack([x_new, torch.tanh(2.0 * x_new), torch.sin(x_new), x_new.square() / 2.0 - 1.0], -1)
    Y_new = F_new + new @ torch.stack([effect[one_hot[:, i] == 1][0] for i in range(2)])
    for method in ("laplace", "variational"):
        q = model.infer_latents(guide, Y_new, rows=RowArguments(covariates=new), method=method)
        assert abs(q.mean[0] - q.mean[1]) < 0.2
        assert abs(q.mean[2] - q.mean[3]) < 0.2
        assert abs(q.mean[0] - q.mean[2]) > 0.7
    holes = Y_new.clone()
    holes[:, 3] = torch.nan
    filled = model.impute(guide, holes, latents=q, rows=RowArguments(covariates=new))
    torch.testing.assert_close(filled.mean[:, 3], Y_new[:, 3], rtol=0.0, atol=0.4)


def test_the_default_number_of_dimensions_is_that_without_covariates_or_that_of_priors():
    torch.manual_seed(0)
    x, batch = torch.randn(200, 1), torch.nn.functional.one_hot(torch.randint(3, (200,)), 3).double()
    Y = x @ torch.randn(1, 8) + 4.0 * batch @ torch.randn(3, 8) + 0.1 * torch.randn(200, 8)
    assert BayesianGPLVM.from_data(Y).latent_dim > 1
    assert BayesianGPLVM.from_data(Y, rows=RowArguments(covariates=batch)).latent_dim == 1
    assert BayesianGPLVM.from_data(Y, rows=RowArguments(prior_loc=torch.randn(200, 3))).latent_dim == 3


def test_effects_by_the_default_kernel_are_additive():
    model = make(RowArguments(covariates=torch.randn(N, P)))
    X, Z = torch.randn(4, Q), torch.randn(3, Q)
    a, b = torch.randn(4, P), torch.randn(3, P)
    k = model.kernel(torch.cat([X, a], -1), torch.cat([Z, b], -1)) - model.kernel(
        torch.cat([X, 0.0 * a], -1), torch.cat([Z, b], -1)
    )
    torch.testing.assert_close(k, a @ b.mT)


def test_a_kernel_needs_the_columns_of_latents_and_covariates():
    with pytest.raises(ValueError, match="expected X with 2 columns, got 4"):
        make(RowArguments(covariates=torch.randn(N, P)), kernel=RBF(Q))
