"""Sparse GP-VAEs: the dense ones where inducing points lie at the data; mini-batches, streams, shapes, priors and errors."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import nn
from torch.distributions import kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_lvgp.distributions import SparseProcess
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.infer.elbo.handlers import Integrating
from pyro_lvgp.kernels import RBF, Matern, Stack
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, NeighbourNet, OffsetNet

N, M, D, Q, B = 8, 5, 3, 2, 3


pytestmark = pytest.mark.usefixtures("float64")


def kernel():
    return Matern(1, lengthscale=torch.tensor([[0.3], [0.6]]), variance=torch.tensor([1.2, 0.8]), batch_shape=(Q,))


def data(*series, num_data=N):
    """With holes, and a row of them."""
    x, y = torch.rand(*series, num_data, 1).sort(-2).values, torch.randn(*series, num_data, D)
    y[..., 1:2, :] = torch.nan
    y[..., 2:, 0] = torch.nan
    return x, y


def make(form="projected", Z=None, **options):
    """A model with a nonlinear decoder, and a guide."""
    latents = Q + options.get("independent_dim", 0)
    Z = torch.linspace(0.0, 1.0, M)[:, None] if Z is None else Z
    model = SparseGPVAE(kernel(), MLP(latents, D, (5,)), Z, **options)
    return model, SparseStructuredGPGuide(model, encoders={"u": encoder(form)})


def encoder(form):
    if form == "nearest":
        return OffsetNet(FactorNet(D, 4), 4, input_dim=1, latent_dim=Q, num_nearest=3)
    if form == "neighbours":
        return stirred(NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=Q, num_nearest=3))
    return IndexNet(D, Q) if form == "projected" else None


def stirred(net):
    """Away from its start, where the network says nothing."""
    for parameter in net.net[-1].parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def told_to_points(form, net, latent_dim, **sizes):
    """An encoder of sites on f, told to the inducing points as the form has it."""
    if form == "projected":
        return net
    sizes |= {"input_dim": 1, "latent_dim": latent_dim}
    return NeighbourNet(net, **sizes) if form == "neighbours" else OffsetNet(net, latent_dim, init_scale=0.01, **sizes)


def posterior(guide, *args):
    """Trace of the guide with u integrated out: the fn of f are its marginals."""
    with Integrating():
        return poutine.trace(guide).get_trace(*args)


def function(guide, *args):
    """Marginal mean and standard deviation of f [*series, N, Q]."""
    fn = posterior(guide, *args).nodes["f"]["fn"]
    return fn.base_dist.loc, fn.base_dist.scale


def assert_close(got, expected, atol=1e-8):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0.0)


ENCODED = ["nearest", "neighbours", "projected"]
every_form = pytest.mark.parametrize("form", [*ENCODED, "free"])
encoded = pytest.mark.parametrize("form", ENCODED)
one_and_several = pytest.mark.parametrize("series", [(), (B,)], ids=["one series", "several"])


# ---- inducing points at the data: the dense GP-VAE


def dense_and_sparse(*series):
    """The same parameters twice."""
    x, y = data(*series)
    Z = x if not series else x[:, None]
    sparse, sparse_guide = make(Z=Z, jitter=1e-10)
    dense = GPVAE(kernel(), MLP(Q, D, (5,)))
    dense_guide = StructuredGPGuide(dense, encoders={"f": IndexNet(D, Q)})
    for guide in (sparse_guide, dense_guide):
        guide(x, y)
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "inducing" not in k})
    dense_guide.encoders.f.load_state_dict(sparse_guide.encoders.u.state_dict())
    return (sparse, sparse_guide), (dense, dense_guide), (x, y)


@one_and_several
@pytest.mark.usefixtures("local_params")
def test_points_at_the_data_give_the_dense_posterior(series):
    """Marginals, KL, and the gradients of both in every parameter that both have."""
    (sparse, sparse_guide), (dense, dense_guide), args = dense_and_sparse(*series)
    trace, model_trace = posterior(sparse_guide, *args), poutine.trace(sparse).get_trace(*args)
    marginals = trace.nodes["f"]["fn"].base_dist
    kl = kl_divergence(trace.nodes["u"]["fn"], model_trace.nodes["u"]["fn"]).sum()
    q = poutine.trace(dense_guide).get_trace(*args).nodes["f"]["fn"].base_dist
    dense_kl = kl_divergence(q, q.prior).sum()
    dense_mean, dense_variance = q.mean.mT.squeeze(-3 if series else 0), q.variance.mT.squeeze(-3 if series else 0)
    assert_close((marginals.loc, marginals.variance, kl), (dense_mean, dense_variance, dense_kl), atol=1e-6)
    weights = torch.randn(2, *marginals.loc.shape)
    results = []
    for (model, guide), numbers in (
        ((sparse, sparse_guide), (marginals.loc, marginals.variance, kl)),
        ((dense, dense_guide), (dense_mean, dense_variance, dense_kl)),
    ):
        total = numbers[2] + (weights[0] * numbers[0]).sum() + (weights[1] * numbers[1]).sum()
        net = guide.encoders.u if model is sparse else guide.encoders.f
        results.append(torch.autograd.grad(total, [*model.kernel.parameters(), *net.parameters()]))
    assert_close(*results, atol=1e-6)


@pytest.mark.usefixtures("local_params")
def test_points_at_the_data_give_the_dense_bound():
    """With one process and the same noise."""
    x, y = data()
    sparse = SparseGPVAE(RBF(1, lengthscale=0.1, batch_shape=(1,)), MLP(1, D, (5,)), x, jitter=1e-10)
    dense = GPVAE(RBF(1, lengthscale=0.1, batch_shape=(1,)), MLP(1, D, (5,)))
    guide, dense_guide = (
        SparseStructuredGPGuide(sparse, encoders={"u": IndexNet(D, 1)}),
        StructuredGPGuide(dense, encoders={"f": IndexNet(D, 1)}),
    )
    guide(x, y), dense_guide(x, y)
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "inducing" not in k})
    dense_guide.encoders.f.load_state_dict(guide.encoders.u.state_dict())
    f_noise = torch.randn(N)
    bound, dense_bound = MeanFieldELBO("points", num_samples=1), StructuredELBO()
    bound.loss(sparse, guide, x, y), dense_bound.loss(dense, dense_guide, x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda t: f_noise.reshape(t.shape))
        patch.setattr("torch.distributions.normal._standard_normal", lambda shape, **_: f_noise.reshape(shape))
        patch.setattr("torch.distributions.multivariate_normal._standard_normal", lambda shape, **_: torch.zeros(shape))
        losses = [
            bound.differentiable_loss(sparse, guide, x, y),
            dense_bound.differentiable_loss(dense, dense_guide, x, y),
        ]
    assert_close(losses[:1], losses[1:], atol=1e-5)
    parameters = [
        [*model.kernel.parameters(), *model.decoder.parameters(), *net.parameters()]
        for model, net in ((sparse, guide.encoders.u), (dense, dense_guide.encoders.f))
    ]
    assert_close(*(torch.autograd.grad(loss, own) for loss, own in zip(losses, parameters, strict=True)), atol=1e-5)


# ---- sites on f told to the nearest points


def test_neighbours_are_told_the_same_at_first():
    """T points share what a datum knows."""
    net = NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=Q)
    y = torch.randn(5, D)
    y[1] = torch.nan
    loc, scale = net.encoder(y)
    told_loc, told_scale = net(y, torch.randn(5, 3, 1))
    assert_close((told_loc, told_scale), (loc[:, None].expand(5, 3, Q), 3**0.5 * scale[:, None].expand(5, 3, Q)))
    with pytest.raises(ValueError, match=rf"expected an encoder of latent_dim=1 processes, got one of {Q}"):
        NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=1)(y, torch.randn(5, 3, 1))


@pytest.mark.parametrize("form", ["nearest", "neighbours"])
def test_what_nothing_is_known_of_does_not_drown_what_is(form):
    """A latent without data has a scale of 1e61 in float64, whose logarithm dwarfs all else that a network is told."""
    net, told = told_to_points(form, FactorNet(D, D, loadings=torch.eye(D)), D, num_nearest=3), []
    net.net.register_forward_pre_hook(lambda module, args: told.append(args[0]))
    y = torch.randn(5, D)
    y[:, 0] = torch.nan
    assert (net.encoder(y)[1][:, 0] > 1e60).all()
    net(y, torch.randn(5, 3, 1))
    loc, known = told[0][..., 1:].split(D, -1)
    assert loc[..., 0].abs().max() < 1e-12
    assert known[..., 0].abs().max() < 1e-12
    assert (known[..., 1:] > 0.0).all()


def test_one_neighbour_at_each_datum_is_the_projected_form():
    """Where the network says nothing yet."""
    x, y = data()
    model, projected = make("projected", x, jitter=1e-10)
    net = NeighbourNet(projected.encoders.u, input_dim=1, latent_dim=Q, num_nearest=1)
    neighbours = SparseStructuredGPGuide(model, encoders={"u": net})
    assert_close(function(neighbours, x, y), function(projected, x, y), atol=1e-6)


def test_neighbours_against_quadrature_of_both_integrals():
    """One datum told to two points: p(u) ∏ₘ ∫ N(f; μₘ, vₘ) p(f | uₘ) df on a grid, with a network that has its say."""
    x, y = torch.tensor([[0.3]]), torch.randn(1, D)
    Z = torch.tensor([[0.1], [0.6]])
    model = SparseGPVAE(RBF(1, variance=1.3, lengthscale=0.4, batch_shape=(1,)), nn.Linear(1, D), Z)
    net = stirred(NeighbourNet(FactorNet(D, 1), input_dim=1, latent_dim=1, num_nearest=2))
    guide = SparseStructuredGPGuide(model, encoders={"u": net})
    got_mean, got_scale = function(guide, x, y)
    with torch.no_grad():
        K = model.kernel(torch.cat([Z, x]))[0]
        grid = torch.linspace(-7.0, 7.0, 400)
        step = grid[1] - grid[0]
        u = torch.cartesian_prod(grid, grid)
        log_q = dist.MultivariateNormal(torch.zeros(2), K[:2, :2]).log_prob(u).reshape(400, 400)
        loc, scale = net(y, (Z - x)[None])
        for m in range(2):
            conditional = dist.Normal(K[m, 2] / K[m, m] * grid, (K[2, 2] - K[m, 2] ** 2 / K[m, m]).sqrt())
            site = dist.Normal(loc[0, m], scale[0, m]).log_prob(grid)
            told = (conditional.log_prob(grid[:, None]) + site[:, None]).logsumexp(0) + step.log()
            log_q = log_q + (told[:, None] if m == 0 else told)
        q = log_q.flatten().softmax(0)
        gain = torch.linalg.solve(K[:2, :2], K[:2, 2])
        f = u @ gain
        mean = (q * f).sum()
        variance = (q * f.square()).sum() - mean**2 + K[2, 2] - gain @ K[:2, 2]
    assert_close((got_mean.squeeze(), got_scale.squeeze().square()), (mean, variance), atol=1e-4)


# ---- bounds


@every_form
@one_and_several
def test_every_bound_has_the_same_mean(form, series):
    model, guide = make(form)
    x, y = data(*series)
    guide(x, y)
    bounds = {
        "integrated": MeanFieldELBO("points", num_samples=300),
        "structured": StructuredELBO(num_particles=300),
        "mean field": TraceMeanField_ELBO(num_particles=300, vectorize_particles=True, max_plate_nesting=2),
        "plain": Trace_ELBO(num_particles=300, vectorize_particles=True, max_plate_nesting=2),
    }
    draws = {name: torch.tensor([bound.loss(model, guide, x, y) for _ in range(10)]) for name, bound in bounds.items()}
    mean, error = draws["integrated"].mean(), draws["integrated"].std() / 10**0.5
    for values in draws.values():
        assert abs(values.mean() - mean) < 5.0 * torch.hypot(error, values.std() / 10**0.5)


def test_integrating_u_lowers_the_noise_of_gradients():
    """Points that hang together have noise of their own each, not one noise."""
    model = SparseGPVAE(RBF(1, lengthscale=2.0, batch_shape=(1,)), nn.Linear(1, D), torch.rand(2, 1), Gaussian(1.0))
    guide = SparseStructuredGPGuide(model, init_scale=1.0)
    args = data(num_data=100)
    gradients = {}
    for bound in (MeanFieldELBO("points", 1), TraceMeanField_ELBO()):
        for _ in range(50):
            bound.loss_and_grads(model, guide, *args)
            gradients.setdefault(bound, []).append(model.decoder.weight_unconstrained.grad.clone())
            model.zero_grad()
    integrated, drawn = (torch.stack(values).std(0) for values in gradients.values())
    assert integrated.norm() < 0.5 * drawn.norm()


@every_form
@one_and_several
@pytest.mark.parametrize("bound", ["integrated", "structured", "plain"])
def test_svi_moves_every_parameter(form, series, bound):
    model, guide = make(form, independent_dim=1)
    x, y = data(*series)
    bounds = {
        "integrated": MeanFieldELBO("points"),
        "structured": StructuredELBO(num_particles=2),
        "plain": Trace_ELBO(),
    }
    svi = SVI(model, guide, Adam({"lr": 0.01}), bounds[bound])
    assert svi.step(x, y) < float("inf")
    parameters = dict([*model.named_parameters(), *guide.named_parameters()])
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(2):
        svi.step(x, y)
    for name, p in parameters.items():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name


def test_free_form_reaches_the_evidence_of_a_linear_model():
    """Classical SVGP: with points at the data its best q(u) is exact, and the bound tight."""
    x = torch.linspace(0.0, 1.0, N)[:, None]
    model = SparseGPVAE(RBF(1, lengthscale=0.3, batch_shape=(1,)), nn.Linear(1, 1), x, Gaussian(0.1))
    model.decoder.weight, model.decoder.bias = torch.ones(1, 1), torch.zeros(1)
    y = torch.sin(6.0 * x)
    for p in model.parameters():
        p.requires_grad_(False)
    guide = SparseStructuredGPGuide(model)
    fit(model, guide, x, y, loss=MeanFieldELBO("points", 20), num_steps=600, learning_rate=0.05, progress=False)
    K = model.kernel(x)[0] + 0.1 * torch.eye(N)
    evidence = dist.MultivariateNormal(torch.zeros(N), K).log_prob(y[:, 0])
    bound = -MeanFieldELBO("points", 4000).loss(model, guide, x, y)
    assert evidence - 0.1 < bound < evidence + 0.05


# ---- what is observed


@encoded
def test_rows_of_nan_say_nothing(form):
    model, guide = make(form)
    x, y = data()
    kept = [n for n in range(N) if n != 1]
    before = function(guide, x, y)
    after = function(guide, x[kept], y[kept])
    assert_close([part[kept] for part in before], after)
    mean, scale = function(guide, x, torch.full_like(y, torch.nan))
    assert_close((mean, scale.square()), (torch.zeros(N, Q), model.kernel.diagonal(x).mT))


@encoded
def test_series_padded_with_nan_are_ragged(form):
    _, guide = make(form)
    x, y = data(B)
    y[0, 5:] = torch.nan
    mean, scale = function(guide, x, y)
    assert_close((mean[0, :5], scale[0, :5]), function(guide, x[0, :5], y[0, :5]))


@every_form
def test_one_point(form):
    model, guide = make(form)
    x, y = torch.rand(1, 1), torch.randn(1, D)
    loss = MeanFieldELBO("points").differentiable_loss(model, guide, x, y)
    loss.backward()
    for p in [*model.parameters(), *guide.parameters()]:
        assert p.grad is None or torch.isfinite(p.grad).all()


@encoded
def test_repeated_inputs_say_it_twice(form):
    _, guide = make(form)
    x, y = data()
    twice = function(guide, x[[0, 0, 3]], y[[0, 0, 3]])
    assert_close([part[0] for part in twice], [part[1] for part in twice])
    once = function(guide, x[[0, 3]], y[[0, 3]])
    assert (twice[1][0] < once[1][0]).all()


@encoded
def test_tiny_site_and_likelihood_variances_train(form):
    """Against collapse of the posterior: 1e-4 each."""
    net = told_to_points(form, IndexNet(D, Q, init_scale=0.01), Q)
    model = SparseGPVAE(kernel(), MLP(Q, D, (5,)), torch.rand(M, 1), Gaussian(1e-4))
    guide = SparseStructuredGPGuide(model, encoders={"u": net})
    history = fit(model, guide, *data(num_data=40), loss=MeanFieldELBO("points"), num_steps=50, progress=False)
    assert history.losses[-1] < 0.7 * history.losses[0]


# ---- mini-batches


@encoded
def test_sums_of_mini_batches_are_unbiased(form):
    """Their average over an epoch is the sum over all data."""
    x, y = data()
    _, guide = make(form, num_data=N)
    guide(x, y)
    whole = guide.condition(x, y)
    parts = []
    for idx in torch.randperm(N).split(2):
        guide.restore(None)
        parts.append(guide.condition(x[idx], y[idx], idx))
    assert_close([torch.stack([getattr(part, name) for part in parts]).mean(0) for name in whole._fields[1:]], whole[1:])


@encoded
def test_mini_batches_with_points_held_out_are_unbiased(form):
    """Their average over all mini-batches is that of the bounds, in closed form, of each q(u) that one makes."""
    x, y = data()
    x, y = x[[0, 1, 2, 5]], y[[0, 1, 2, 5]]  # the second of which nothing is observed
    model = SparseGPVAE(kernel(), nn.Linear(Q, D), torch.linspace(0.0, 1.0, M)[:, None], Gaussian(0.2), num_data=4)
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder(form)})
    guide(x, y)
    expected, losses = [], []
    bound = MeanFieldELBO("points", 50_000)
    for told in range(4):
        idx = torch.tensor([told])
        u = posterior(guide, x[idx], y[idx], idx).nodes["u"]["fn"]
        with torch.no_grad():
            guide.condition(x[idx], y[idx], idx)
            mean, scale = function(guide, x, torch.full_like(y, torch.nan))
            guide.restore(None)
            params, W = model.likelihood.params(), model.decoder.weight
            entries = model.likelihood.expected_log_prob(y, model.decoder(mean), scale.square() @ W.square().mT, params)
            prior = dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
            expected.append(kl_divergence(u, prior).sum() - entries.nansum())
        model.held_out = 0.5
        for other in set(range(4)) - {told}:
            idx = torch.tensor([told, other])
            losses.append(bound.loss(model, guide, x[idx], y[idx], idx))
        model.held_out = 0.0
    assert torch.tensor(losses).mean() == pytest.approx(torch.stack(expected).mean().item(), rel=0.002)


def test_mini_batches_of_a_free_form_are_exact():
    x, y = data()
    model, guide = make("free", num_data=N)
    guide(x, y)
    bound = MeanFieldELBO("points", 3000)
    losses = torch.tensor([bound.loss(model, guide, x[idx], y[idx], idx) for idx in torch.arange(N).split(2)])
    assert losses.mean() == pytest.approx(bound.loss(model, guide, x, y), rel=0.01)


@every_form
def test_mini_batches_of_series_are_exact(form):
    x, y = data(4)
    model, guide = make(form, num_data=4)
    guide(x, y)
    bound = MeanFieldELBO("points", 2000)
    losses = torch.tensor([bound.loss(model, guide, x[idx], y[idx], idx) for idx in torch.arange(4).split(2)])
    assert losses.mean() == pytest.approx(bound.loss(model, guide, x, y), rel=0.01)


@every_form
@pytest.mark.parametrize("series", [(), (4,)], ids=["points", "series"])
@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_fit_takes_mini_batches(form, series, held_out):
    model, guide = make(form, num_data=4 if series else N, independent_dim=1, held_out=held_out)
    history = fit(model, guide, *data(*series), loss=MeanFieldELBO("points"), num_steps=5, batch_size=2, progress=False)
    assert len(history.losses) == 5


def test_mini_batches_too_small_to_hold_points_out_are_refused():
    guide = make(num_data=N, held_out=0.3)[1]
    x, y = data()
    with pytest.raises(ValueError, match=r"points to hold out 0.3 of, not all, got 1 points; take more"):
        guide(x[:1], y[:1], torch.arange(1))
    with pytest.raises(ValueError, match=r"expected held_out from 0 to below 1, got 1.0"):
        make(held_out=1.0)


def test_mini_batch_without_num_data_is_refused():
    _, guide = make()
    x, y = data()
    with pytest.raises(
        ValueError, match="expected num_data with mini-batches, got one of 2 and none; pass num_data to Sparse"
    ):
        guide(x[:2], y[:2], torch.arange(2))


# ---- shapes


@encoded
@pytest.mark.parametrize("lead", [(), (Q,), (B, 1), (B, Q)], ids=["shared", "latents", "series", "both"])
def test_inducing_points_shared_or_not(form, lead):
    """Equal points give equal posteriors, however many copies there are."""
    Z = torch.linspace(0.0, 1.0, M)[:, None]
    args = data(B)
    model, guide = make(form, Z)
    own_model, own = make(form, Z.expand(*lead, M, 1))
    own.encoders.u, own_model.kernel = guide.encoders.u, model.kernel
    if form != "projected":  # the order of neighbours is that of each process
        guide.encoders.u.num_nearest = M
    assert_close(function(own, *args), function(guide, *args))
    loss = MeanFieldELBO("points").differentiable_loss(own_model, own, *args)
    assert torch.autograd.grad(loss, own_model.inducing_points_unconstrained)[0].shape == (*lead, M, 1)


@encoded
def test_other_sites_start_where_they_are_told(form):
    model, _ = make()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder(form)}, init_loc_fn=lambda site: torch.tensor(3.0))
    args = data()
    guide(*args)
    torch.testing.assert_close(guide.median(*args)["likelihood.variance"], torch.tensor(3.0))


@encoded
def test_series_of_their_own_points_in_mini_batches(form):
    x, y = data(4)
    _, guide = make(form, torch.rand(4, 1, M, 1), num_data=4)
    guide(x, y)
    idx = torch.tensor([2, 0])
    assert_close(function(guide, x[idx], y[idx], idx), [part[idx] for part in function(guide, x, y)])


@encoded
def test_inputs_shared_by_all_series(form):
    model, guide = make(form)
    x, y = data(B)
    assert_close(function(guide, x[0], y), function(guide, x[:1].expand(B, -1, -1), y))
    assert model.predict(guide, x[0], y, num_samples=4).mean.shape == (B, N, D)


def test_stacked_kernels():
    model = SparseGPVAE(Stack(RBF(1), Matern(1, 0.5)), MLP(2, D), torch.rand(M, 1))
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)})
    assert function(guide, *data(B))[0].shape == (B, N, 2)


@encoded
@one_and_several
def test_priors_on_parameters_of_the_kernel(form, series):
    model, guide = make(form)
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 0.3).expand([Q, 1]).to_event(2))
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 0.3))
    x, y = data(*series)
    for bound in (MeanFieldELBO("points"), StructuredELBO(num_particles=3), Trace_ELBO()):
        assert torch.isfinite(torch.tensor(SVI(model, guide, Adam({"lr": 0.01}), bound).step(x, y)))
    assert model.predict(guide, x, y, x[..., :2, :], num_samples=3).mean.shape == (*series, 2, D)
    assert guide.condition(x, y).precision.shape == (*series, Q, M, M)


# ---- predictions


@encoded
@one_and_several
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("independent_dim", [0, 1])
def test_predictions_have_the_moments_of_a_linear_model(form, series, joint, independent_dim):
    model = SparseGPVAE(kernel(), nn.Linear(Q + independent_dim, D), torch.rand(M, 1), independent_dim=independent_dim)
    own = {"w": IndexNet(D, independent_dim)} if independent_dim else {}
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder(form), **own})
    x, y = data(*series)
    x_new = torch.rand(*series, 3, 1)
    both, nothing = torch.cat([x, x_new], -2), torch.full((*series, 3, D), torch.nan)
    mean, scale = (part[..., N:, :] for part in function(guide, both, torch.cat([y, nothing], -2)))
    W = model.decoder.weight.detach()
    predicted = model.predict(guide, x, y, x_new, num_samples=20_000, joint=joint)
    variance = scale.square() @ W[:, :Q].mT.square() + model.likelihood.variance + W[:, Q:].square().sum(-1)
    torch.testing.assert_close(predicted.mean, mean @ W[:, :Q].mT + model.decoder.bias, atol=0.05, rtol=0.0)
    torch.testing.assert_close(predicted.variance, variance, atol=0.0, rtol=0.05)


@one_and_several
@pytest.mark.parametrize("inputs", ["data", "new", "shared"])
def test_joint_draws_have_the_covariance_of_the_process_between_points(series, inputs):
    """The dense process's given the same sites on the inducing values, where these say little and where they say all."""
    model = SparseGPVAE(kernel(), nn.Linear(Q, D), torch.linspace(0.0, 0.5, M)[:, None])
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder("projected")})
    x, y = data(*series)
    x_new = {"data": None, "new": 2.0 * torch.rand(*series, 4, 1), "shared": torch.linspace(0.1, 2.0, 4)[:, None]}[inputs]
    at = x if x_new is None else x_new
    u = poutine.trace(guide).get_trace(x, y).nodes["u"]["fn"]
    draws = 20_000
    found = model.predict(guide, x, y, x_new, num_samples=draws, joint=True).parts[0].mean
    found = (found - model.decoder.bias).detach() @ torch.linalg.pinv(model.decoder.weight.detach().mT)
    A = model.process(at).A
    A = A.squeeze(-4) if A.dim() > 3 else A
    covariance = model.kernel(at.unsqueeze(-3)) + A.mT @ (u.covariance_matrix - torch.eye(M)) @ A
    mean = (u.mean.unsqueeze(-2) @ A).squeeze(-2)
    centred = found.mT - mean
    sampled = torch.einsum("s...i,s...j->...ij", centred, centred) / draws
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    error = ((variance[..., None] * variance[..., None, :] + covariance.square()) / draws).sqrt()
    assert ((sampled - covariance).abs() < 4.5 * error + 1e-4).all()


@one_and_several
def test_impute_and_forecast(series):
    model, guide = make()
    x, y = data(*series)
    x = torch.linspace(0.0, 1.0, N)[:, None].expand_as(x)
    filled = model.impute(guide, x, y, num_samples=5)
    seen = ~torch.isnan(y)
    assert torch.equal(filled.mean[seen], y[seen])
    assert (filled.variance[~seen] > 0.0).all()
    assert model.forecast(guide, x, y, 4, num_samples=5).mean.shape == (*series, 4, D)


@every_form
def test_quantiles_are_those_of_the_marginals(form):
    _, guide = make(form)
    x, y = data()
    with pytest.raises(ValueError, match="no parameters before its first call"):
        guide.median(x, y)
    mean, scale = function(guide, x, y)
    low, middle = guide.quantiles([0.1, 0.5], x, y)["f"]
    assert_close((low, middle), (dist.Normal(mean, scale).icdf(torch.tensor(0.1)), mean))
    assert guide.median(x, y)["u"].shape == (Q, M)


# ---- streams


@encoded
@one_and_several
def test_conditioning_in_pieces_is_conditioning_at_once(form, series):
    _, guide = make(form)
    x, y = data(*series, num_data=20)
    x_new, nothing = torch.rand(*series, 4, 1), torch.full((*series, 4, D), torch.nan)
    guide(x, y)
    whole = guide.condition(x, y)
    at_once = function(guide, x_new, nothing)
    guide.restore(None)
    for piece in torch.arange(20).split(2):
        pieces = guide.condition(x[..., piece, :], y[..., piece, :])
    assert_close(pieces, whole)
    assert_close(function(guide, x_new, nothing), at_once)
    guide.restore(None)
    expected = function(guide, torch.cat([x, x_new], -2), torch.cat([y, nothing], -2))
    assert_close(at_once, [part[..., 20:, :] for part in expected])


@encoded
@one_and_several
def test_more_inducing_points_keep_the_posterior(form, series):
    model, guide = make(form)
    x, y = data(*series)
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    guide.condition(x, y)
    before, Z = function(guide, x, nothing), model.inducing_points.detach()
    guide.condition(x, nothing, inducing_points=torch.cat([Z, torch.rand(3, 1)]))
    assert model.inducing_points.shape == (M + 3, 1)
    assert_close(function(guide, x, nothing), before, atol=1e-6)
    guide.condition(x, nothing, inducing_points=Z)
    assert_close(function(guide, x, nothing), before, atol=1e-6)


@pytest.mark.parametrize("moved", [False, True])
def test_other_series_than_those_remembered_change_nothing(moved):
    model, guide = make()
    x, y = data(3)
    guide(x, y)
    memory, Z = guide.condition(x, y), model.inducing_points.detach().clone()
    for part in (0, slice(0, 1), slice(0, 2)):
        with pytest.raises(ValueError, match="expected the 3 series that the guide remembers"):
            guide.condition(x[part], y[part], inducing_points=Z + 0.5 if moved else None)
    assert guide.memory is memory
    assert torch.equal(model.inducing_points, Z)


def test_a_stream_moves_on_with_its_inducing_points():
    """Points added where new data come; in the end as good as if all had been there from the first."""
    _, guide = make()
    x = torch.linspace(0.0, 4.0, 80)[:, None]
    y = torch.sin(3.0 * x) + torch.zeros(D)
    guide(x[:20], y[:20])
    Z = torch.linspace(0.0, 4.0, 41)[:, None]
    for k in range(4):
        guide.condition(x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20], inducing_points=Z[: 10 * k + 11])
    streamed = function(guide, x, torch.full_like(y, torch.nan))
    guide.restore(None)
    assert_close(streamed, function(guide, x, y), atol=0.02)


def test_many_sharp_sites_in_single_precision():
    """Rounding of what they say is more than the prior; where they say nothing, the prior is left."""
    x, x_new = 10.0 * torch.rand(5000, 1), torch.linspace(-2.0, 14.0, 50)[:, None]
    y = torch.sin(x + torch.arange(D))
    inputs, values = torch.cat([x, x_new]), torch.cat([y, torch.full((50, D), torch.nan)])
    model = SparseGPVAE(RBF(1, batch_shape=(Q,)), nn.Linear(Q, D), torch.linspace(0.0, 12.0, 30)[:, None])
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, Q, init_scale=0.003)})

    def moments(dtype):
        for module in (model, guide):
            module.to(dtype)
        return [part.double() for part in function(guide, inputs.to(dtype), values.to(dtype))]

    (mean, scale), (found, found_scale) = moments(torch.float64), moments(torch.float32)
    assert scale.min() < 0.005 < 0.9 < scale.max()
    assert ((found - mean).abs() < 0.1 * scale).all()
    torch.testing.assert_close(found_scale, scale, rtol=0.1, atol=0.0)


def test_streams_of_sharp_sites_in_single_precision():
    """Ten pieces, each with inducing points added: the posterior of double precision."""
    kernel = Matern(1, 2.5, lengthscale=4.0, batch_shape=(Q,))
    x = torch.linspace(0.0, 20.0, 400)[:, None]
    y = torch.sin(x + torch.arange(D))
    model = SparseGPVAE(kernel, nn.Linear(Q, D), x[:2])
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, Q, init_scale=0.01)})

    def streamed(dtype):
        for module in (model, guide):
            module.to(dtype)
        guide.restore(None)
        for k, piece in enumerate(torch.arange(400).split(40)):
            Z = 0.25 * torch.arange(8 * (k + 1) + 1, dtype=dtype)[:, None]
            guide(x[piece].to(dtype), y[piece].to(dtype))
            guide.condition(x[piece].to(dtype), y[piece].to(dtype), inducing_points=Z)
        return [part.double() for part in function(guide, x.to(dtype), torch.full_like(y, torch.nan, dtype=dtype))]

    (mean, scale), (found, found_scale) = streamed(torch.float64), streamed(torch.float32)
    assert scale.max() < 0.01
    assert ((found - mean).abs() < 0.05 * scale).all()
    torch.testing.assert_close(found_scale, scale, rtol=0.05, atol=0.0)


def test_memory_is_saved_and_carried_on():
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    file = io.BytesIO()
    torch.save(guide.condition(x, y, inducing_points=torch.rand(7, 1))._asdict(), file)
    expected = function(guide, x, nothing)
    guide.restore(None)
    model.inducing_points = model.inducing_points.detach()[:2]
    guide.restore(type(guide.condition(x, nothing))(**torch.load(io.BytesIO(file.getvalue()))))
    assert_close(function(guide, x, nothing), expected)
    guide.condition(x[:1], y[:1])
    assert not torch.equal(function(guide, x, nothing)[0], expected[0])


@pytest.mark.parametrize("first", ["model", "guide"])
def test_memory_is_part_of_the_guide_s_state(first):
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    guide.condition(x, y, inducing_points=torch.rand(7, 1))
    expected = function(guide, x, nothing)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, file)
    pyro.clear_param_store()
    model, guide = make()
    guide(x, y)
    state = torch.load(io.BytesIO(file.getvalue()))
    modules = {"model": model, "guide": guide}
    for name in (first, *(modules.keys() - {first})):  # either moves the model's inducing points
        modules[name].load_state_dict(state[name])
    assert_close(function(guide, x, nothing), expected)
    history = fit(model, guide, x, y, loss=MeanFieldELBO("points"), num_steps=1, progress=False)
    assert len(history.losses) == 1


@pytest.mark.parametrize("trained", [True, False])
def test_inducing_points_are_held_wherever_they_go(trained):
    model, guide = make()
    other, _ = make(Z=torch.rand(M + 1, 1))
    model.inducing_points_unconstrained.requires_grad_(trained)
    x, y = data()
    guide(x, y)
    guide.condition(x, y)
    memory = guide.condition(x, y, inducing_points=torch.rand(7, 1))
    state = guide.state_dict()
    for move in (
        lambda: guide.restore(memory),
        lambda: guide.load_state_dict(state),
        lambda: model.load_state_dict(other.state_dict()),
    ):
        assert model.inducing_points_unconstrained.requires_grad == trained
        move()
    assert len(model.inducing_points) == M + 1
    assert model.inducing_points_unconstrained.requires_grad == trained


@one_and_several
def test_inducing_points_that_leave_the_memory_are_refused(series):
    model, guide = make()
    x, y = data(*series)
    guide(x, y)
    guide.condition(x, y)
    expected = function(guide, x, y)
    for moved in (model.inducing_points.detach() + 0.1, torch.rand(M + 1, 1)):
        model.inducing_points = moved
        for use in (guide, guide.condition):
            with pytest.raises(ValueError, match=r"where the guide remembers data, got others; go back by guide.restore"):
                use(x, y)
        guide.restore(guide.memory)
        assert_close(function(guide, x, y), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_fits_move_no_inducing_points_that_carry_a_memory(compiled):
    """Nor where Pyro's validation is off, as it is after the first step."""
    model, guide = make()
    x, y = data()
    options = {"loss": MeanFieldELBO("points"), "num_steps": 3, "compile": compiled, "progress": False}
    guide(x, y)
    guide.condition(x, y)
    with pytest.raises(ValueError, match=r"others; go back by guide.restore\(guide.memory\), hold them by requires_grad_"):
        fit(model, guide, x, y, **options)
    guide.restore(guide.memory)
    model.inducing_points_unconstrained.requires_grad_(False)
    assert len(fit(model, guide, x, y, **options).losses) == 3


def test_memory_changes_precision_with_the_guide():
    model, guide = make()
    x, y = data()
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    memory = guide.condition(x, y)
    expected = function(guide, x, nothing)
    for module in (model, guide):
        module.float()
    assert {part.dtype for part in guide.memory} == {torch.float32}
    mean, variance = function(guide, x.float(), nothing.float())
    assert mean.dtype == torch.float32
    assert_close([mean.double(), variance.double()], expected, atol=1e-3)
    guide.restore(memory)  # of the old precision
    assert {part.dtype for part in guide.memory} == {torch.float32}


@pytest.mark.parametrize(
    ("inducing_points", "message"),
    [
        (torch.linspace(0.0, 1.0, 4), r"laid out as the model's \[5, 1\], got \[4\]; a single column"),
        (torch.full((4, 1), torch.nan), "finite inducing points"),
        (torch.rand(4, 2), r"\[5, 1\], got \[4, 2\]"),
        (torch.rand(0, 1), r"\[5, 1\], got \[0, 1\]"),
    ],
)
def test_what_does_not_fit_leaves_the_guide_as_it_was(inducing_points, message, unchecked):
    _, guide = make()
    x, y = data()
    guide(x, y)
    guide.condition(x, y)
    expected = function(guide, x, y)
    with pytest.raises(ValueError, match=message):
        guide.condition(x, y, inducing_points=inducing_points.double())
    with pytest.raises(ValueError, match=r"expected finite entries.*got inf at y\[3, 1\]"):
        guide.condition(x, y.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.inf)))
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="expected finite inputs"):
            guide.condition(x.index_put((torch.tensor(3),), torch.tensor(wrong)), y)
    with pytest.raises(ValueError, match=r"expected inputs \[points, columns\] and data"):
        guide.condition(x, y[:1])
    with pytest.raises(ValueError, match=message):
        guide.restore(guide.memory._replace(inducing_points=inducing_points.double()))
    assert_close(function(guide, x, y), expected)


def test_remembered_series_keep_their_order():
    _, guide = make(num_data=B)
    x, y = data(B)
    guide(x, y)
    guide.condition(x, y)
    idx = torch.tensor([1, 0, 2])
    for use in (guide, guide.condition):
        with pytest.raises(ValueError, match="than the 3 of plate 'series', or all of them in order"):
            use(x[idx], y[idx], idx)


def test_remembered_series_come_all_together():
    _, guide = make(num_data=B)
    x, y = data(B)
    guide(x, y)
    guide.condition(x, y)
    idx = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"expected the 3 series that the guide remembers, got \[2\]"):
        guide(x[idx], y[idx], idx)


def test_memory_joins_new_data():
    _, guide = make()
    x, y = data()
    guide(x, y)
    expected = function(guide, x, y)
    nothing = y.clone()
    nothing[:4] = torch.nan
    guide.condition(x[:4], y[:4])
    assert_close(function(guide, x, nothing), expected)


def test_no_encoder_is_a_free_posterior():
    model, x, y = make(independent_dim=1)[0], *data()
    names = []
    for sites in ({"u": None}, {}):
        pyro.clear_param_store()
        guide = SparseStructuredGPGuide(model, encoders=sites | {"w": IndexNet(D, 1)})
        assert isinstance(posterior(guide, x, y).nodes["u"]["fn"], dist.MultivariateNormal)
        names.append([name for name, _ in guide.named_parameters()])
    assert names[0] == names[1]


def test_data_are_taken_in_in_evaluation_mode():
    (x, y), dropout = data(), nn.Dropout(0.5)
    model, _ = make()
    guide = SparseStructuredGPGuide(model, encoders={"u": nn.Sequential(dropout, FactorNet(D, Q))})
    guide(x, y)
    in_training, guide.memory = guide.condition(x, y), None
    assert dropout.training
    guide.eval()
    torch.testing.assert_close(in_training, guide.condition(x, y))


def test_a_free_posterior_cannot_be_conditioned():
    _, guide = make("free")
    x, y = data()
    guide(x, y)
    with pytest.raises(ValueError, match=r"expected an encoder for the inducing values, got a free q\(u\)"):
        guide.condition(x, y)


# ---- somebody's own model


class Counts(PyroModule):
    """Spikes of three neurons with one rate, without infer dicts or our names."""

    def __init__(self):
        super().__init__()
        self.kernel = RBF(1, lengthscale=0.2, batch_shape=(1,))
        self.inducing_points = PyroParam(torch.linspace(0.0, 1.0, M)[:, None])

    def forward(self, t, counts):
        gain = pyro.sample("gain", dist.LogNormal(torch.zeros(D), 1.0).to_event(1))
        process = SparseProcess(self.kernel, self.inducing_points, t[None])
        with pyro.plate("rates", 1, dim=-1):
            v = pyro.sample("v", process.prior().to_event(1))
        mean, variance = process.marginals(v)
        with pyro.plate("bins", len(t), dim=-1):
            rate = pyro.sample("rate", dist.Normal(mean.mT, variance.mT.sqrt()).to_event(1))
            expected = rate.exp() * gain
            pyro.sample("counts", dist.Poisson(expected).to_event(1), obs=counts)


@encoded
def test_a_model_of_ones_own(form):
    model = Counts()
    t = torch.linspace(0.0, 1.0, N)[:, None]
    counts = torch.poisson(2.0 * torch.sin(6.0 * t).exp().expand(-1, D))
    net = told_to_points(form, IndexNet(D, 1), 1, num_nearest=2)
    guide = SparseStructuredGPGuide(model, encoders={"v": net}, given=["rate"])
    svi = SVI(model, guide, Adam({"lr": 0.02}), TraceMeanField_ELBO())
    losses = [svi.step(t, counts) for _ in range(100)]
    assert sum(losses[-20:]) < sum(losses[:20])
    assert guide.median(t, counts)["gain"].shape == (D,)
    assert guide.condition(t, counts, inducing_points=torch.rand(3, 1)).precision.shape == (1, 3, 3)
    assert guide(t, counts)["v"].shape == (1, 3)


class Two(PyroModule):
    """Two sites of inducing values, whose points have names of their own."""

    def __init__(self):
        super().__init__()
        self.kernel, self.places = RBF(1, lengthscale=0.2, batch_shape=(1,)), torch.linspace(0.0, 1.0, M)[:, None]

    def forward(self, t, y):
        process = SparseProcess(self.kernel, self.places, t[None])
        for name in ("a", "b"):
            with pyro.plate(f"{name}s", 1, dim=-1):
                v = pyro.sample(name, process.prior().to_event(1))
        mean, variance = process.marginals(v)
        with pyro.plate("points", len(t), dim=-1):
            f = pyro.sample("f", dist.Normal(mean.mT, variance.mT.sqrt()).to_event(1))
            pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("sites", [["a"], ["a", "b"]])
def test_only_models_of_one_process_with_its_points_can_be_conditioned(sites):
    guide = SparseStructuredGPGuide(Two(), encoders={name: IndexNet(1, 1) for name in sites}, given=["f"])
    t = torch.linspace(0.0, 1.0, N)[:, None]
    guide(t, t)
    with pytest.raises(ValueError, match=r"expected a model with one site of inducing values.*got \['a'.* in Two"):
        guide.condition(t, t)


# ---- cost


class _Largest(TorchDispatchMode):
    """Size of the largest tensor made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(part) and part.untyped_storage().nbytes():  # an expanded view takes no memory
                self.numel = max(self.numel, part.untyped_storage().nbytes() // 8)
        return result


@encoded
def test_memory_is_linear_in_the_points(form):
    """A training step, a prediction, a conditioning: no tensor beyond N times a small number."""
    num_data, num_inducing, width = 200_000, 6, 8
    x, y = torch.rand(num_data, 1), torch.randn(num_data, 1)
    net = IndexNet(1, 1, (width,), feature_dim=width)
    net = told_to_points(form, net, 1, num_nearest=2, hidden_dims=(width,))
    model = SparseGPVAE(RBF(1, lengthscale=0.2, batch_shape=(1,)), nn.Linear(1, 1), torch.rand(num_inducing, 1))
    guide = SparseStructuredGPGuide(model, encoders={"u": net})
    with _Largest() as largest:
        MeanFieldELBO("points", 1, max_plate_nesting=1).loss_and_grads(model, guide, x, y)
        model.predict(guide, x, y, x, num_samples=2)
        guide.condition(x, y)
    assert num_data * num_inducing <= largest.numel <= num_data * 2 * width


# ---- errors


def test_arguments_are_checked(unchecked):
    Z = torch.rand(M, 1)
    with pytest.raises(ValueError, match=r"expected inducing_points \[points, columns\].*needs \[:, None\]"):
        SparseGPVAE(kernel(), MLP(Q, D), Z.expand(1, 1, 1, M, 1))
    for wrong in (Z[:0], Z + torch.nan, torch.arange(M)[:, None]):
        with pytest.raises(ValueError, match=rf"one or more inducing points, finite.*got \[{len(wrong)}, 1\] of torch"):
            SparseGPVAE(kernel(), MLP(Q, D), wrong)
    for series in ((), (B,)):
        with pytest.raises(ValueError, match=rf"of the kernel's {Q} latent processes, got those of {Q + 1} in"):
            SparseGPVAE(kernel(), MLP(Q, D), Z.expand(*series, Q + 1, M, 1))
    with pytest.raises(ValueError, match="expected jitter of 0 or more, got -1"):
        SparseGPVAE(kernel(), MLP(Q, D), Z, jitter=-1.0)
    for name in ("feature_dim", "input_dim", "latent_dim", "num_nearest"):
        sizes = {"feature_dim": 2, "input_dim": 1, "latent_dim": 1, "num_nearest": 1, name: 0}
        with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
            OffsetNet(IndexNet(D, 2), **sizes)
        if sizes.pop("feature_dim"):
            with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
                NeighbourNet(IndexNet(D, 1), **sizes)
    for init_scale in (0.0, math.inf):
        with pytest.raises(ValueError, match=f"expected a positive and finite init_scale, got {init_scale}"):
            OffsetNet(IndexNet(D, 2), 2, input_dim=1, latent_dim=1, init_scale=init_scale)
    with pytest.raises(ValueError, match=r"expected given=\(<name of the sites given u>,\)"):
        SparseStructuredGPGuide(lambda x: x)


@pytest.mark.parametrize("series", [(), (B,)])
def test_inducing_points_of_other_series_are_refused(series):
    _, guide = make(Z=torch.rand(B + 1, 1, M, 1))
    with pytest.raises(ValueError, match=rf"points of the {B if series else 1} series of the data, got those of {B + 1}"):
        guide(*data(*series))


@every_form
def test_no_rows_and_no_series_are_refused(form):
    model, guide = make(form)
    x, y = data()
    guide(x, y)
    for args in ((x, y, x[:0]), (x[:0], y[:0]), (x, y.expand(0, N, D))):
        with pytest.raises(ValueError, match=r"expected [xy] with one row or more, got none; skip empty batches"):
            model.predict(guide, *args)


@encoded
def test_encoder_of_the_wrong_number_of_processes_is_refused(form):
    net = told_to_points(form, IndexNet(D, Q + 1), Q + 1)
    guide = SparseStructuredGPGuide(SparseGPVAE(kernel(), MLP(Q, D), torch.rand(M, 1)), encoders={"u": net})
    with pytest.raises(ValueError, match=rf"expected sites of {Q} processes for 'u', got an encoding of {Q + 1}"):
        guide(*data())


def test_prediction_wants_the_guide_to_know_the_kernel():
    t, y = torch.linspace(0.0, 1.0, 8)[:, None], torch.randn(8, 2)
    model = SparseGPVAE(RBF(1), nn.Linear(1, 2), t[::2])
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([1]).to_event(1))
    known = poutine.condition(model, {"kernel.lengthscale": torch.tensor([0.3])})
    guide = SparseStructuredGPGuide(known, encoders={"u": IndexNet(2, 1)}, given=("f",))
    guide(t, y)
    for joint in (False, True):
        with pytest.raises(ValueError, match=r"got one without \['kernel.lengthscale'\]"):
            model.predict(guide, t, y, joint=joint)
