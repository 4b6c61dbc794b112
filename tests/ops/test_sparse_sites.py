"""Sparse posteriors against dense formulas: eqs. 3.43 to 3.47 of the thesis, the projected form, the process itself."""

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from pyro_lvgp.distributions import SparseProcess, inducing_posterior
from pyro_lvgp.kernels import RBF, Linear, Periodic
from pyro_lvgp.ops import gaussian_sites
from pyro_lvgp.ops.linalg import solve_lower
from pyro_lvgp.ops.sparse_sites import Sites, aggregate, marginals, nearest, sum_at, transfer

N, M, Q = 7, 4, 2

every_batch = pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "several"])


pytestmark = pytest.mark.usefixtures("float64")


def make(*batch, num_data=N, jitter=1e-5):
    """A process of different kernels, and sites where the data are."""
    kernel = RBF(2, lengthscale=torch.tensor([[0.7], [0.4]]), variance=torch.tensor([1.5, 0.8]), ard=False, batch_shape=(Q,))
    X, Z = torch.rand(*batch, 1, num_data, 2), torch.rand(M, 2)
    process = SparseProcess(kernel, Z, X, jitter=jitter)
    precision, loc = torch.rand(*batch, Q, num_data) * 5.0, torch.randn(*batch, Q, num_data)
    precision[..., 1:2] = 0.0
    return process, precision, loc


def on_values(process, sites):
    """Mean and covariance of the inducing values themselves."""
    loc, scale_tril = inducing_posterior(sites)
    root = process.L @ scale_tril
    return (process.L @ loc[..., None]).squeeze(-1), root @ root.mT


def Kuu(process):
    return process.L @ process.L.mT


# ---- the two forms


@every_batch
def test_nearest_form_is_eqs_3_46_and_3_47(batch):
    process, *_ = make(*batch)
    Sigma, mu = 0.1 + torch.rand(*batch, Q, M), torch.randn(*batch, Q, M)
    sites = aggregate(process.L.mT, 1 / Sigma, mu / Sigma)
    mean, variance = marginals(process.A, process.Kff, *inducing_posterior(sites))
    gain = process.Kuf.mT @ torch.linalg.inv(Kuu(process) + torch.diag_embed(Sigma))
    covariance = process.kernel.covariance(process.X, process.X, process.params) - gain @ process.Kuf
    torch.testing.assert_close(mean, (gain @ mu[..., None]).squeeze(-1))
    torch.testing.assert_close(variance, covariance.diagonal(dim1=-2, dim2=-1))


def test_kl_of_the_nearest_form_is_eqs_3_44_and_3_45():
    process, *_ = make()
    Sigma, mu = 0.1 + torch.rand(Q, M), torch.randn(Q, M)
    sites = aggregate(process.L.mT, 1 / Sigma, mu / Sigma)
    mean, covariance = on_values(process, sites)
    log_Z = MultivariateNormal(torch.zeros(M), Kuu(process) + torch.diag_embed(Sigma)).log_prob(mu)
    expected = Normal(mu, Sigma.sqrt()).log_prob(mean) - 0.5 * covariance.diagonal(dim1=-2, dim2=-1) / Sigma
    loc, scale_tril = inducing_posterior(sites)
    prior = Independent(Normal(torch.zeros(Q, M), 1.0), 1)
    torch.testing.assert_close(kl_divergence(MultivariateNormal(loc, scale_tril=scale_tril), prior), expected.sum(-1) - log_Z)


@every_batch
def test_projected_form_is_the_published_one(batch):
    process, precision, loc = make(*batch)
    mean, covariance = on_values(process, aggregate(process.A, precision, precision * loc))
    K, S_inv = Kuu(process), torch.diag_embed(precision)
    Phi = torch.linalg.inv(K + process.Kuf @ S_inv @ process.Kuf.mT)
    torch.testing.assert_close(mean, (K @ Phi @ process.Kuf @ S_inv @ loc[..., None]).squeeze(-1))
    torch.testing.assert_close(covariance, K @ Phi @ K)


def test_projected_form_at_the_data_is_the_dense_posterior():
    """Also with points that say nothing; marginals and KL."""
    X = torch.rand(1, N, 1)
    process = SparseProcess(RBF(1, lengthscale=0.2, batch_shape=(Q,)), X[0], X, jitter=1e-10)
    precision, loc = torch.rand(Q, N) * 5.0, torch.randn(Q, N)
    precision[:, 2] = 0.0
    dense = gaussian_sites.condition(process.kernel(X), torch.zeros(N), loc, precision)
    u, scale_tril = inducing_posterior(aggregate(process.A, precision, precision * loc))
    mean, variance = marginals(process.A, process.Kff, u, scale_tril)
    torch.testing.assert_close(mean, dense.mean, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(variance, dense.variance, atol=1e-6, rtol=0.0)
    kl = kl_divergence(MultivariateNormal(u, scale_tril=scale_tril), Independent(Normal(torch.zeros(Q, N), 1.0), 1))
    torch.testing.assert_close(kl, gaussian_sites.kl_divergence(dense), atol=1e-6, rtol=0.0)


def test_sites_that_say_nothing_give_the_prior():
    process, precision, loc = make()
    u, scale_tril = inducing_posterior(aggregate(process.A, 0.0 * precision, 0.0 * loc))
    assert torch.equal(u, torch.zeros(Q, M))
    assert torch.equal(scale_tril, torch.eye(M).expand(Q, M, M))
    _, variance = marginals(process.A, process.Kff, u, scale_tril)
    torch.testing.assert_close(variance, process.Kff)


def test_known_inducing_values_give_the_conditional():
    process, *_ = make()
    v = torch.randn(Q, M)
    mean, variance = marginals(process.A, process.Kff, v)
    gain = torch.linalg.solve(Kuu(process), process.Kuf).mT
    torch.testing.assert_close(mean, (gain @ process.L @ v[..., None]).squeeze(-1))
    torch.testing.assert_close(variance, process.Kff - (gain * process.Kuf.mT).sum(-1))


@pytest.mark.parametrize("form", ["nearest", "projected"])
def test_factor_of_the_covariance_is_lower_triangular_and_of_the_inverse_of_J(form):
    process, precision, loc = make()
    G, precision, loc = (process.L.mT, precision[:, :M], loc[:, :M]) if form == "nearest" else (process.A, precision, loc)
    sites = aggregate(G, precision, precision * loc)
    mean, R = inducing_posterior(sites)
    assert torch.equal(R, R.tril())
    J = torch.eye(M) + sites.precision
    torch.testing.assert_close(R @ R.mT, torch.linalg.inv(J))
    torch.testing.assert_close((J @ mean[..., None]).squeeze(-1), sites.information)


# ---- nearest points


@pytest.mark.parametrize("num_nearest", [1, 2, M])
def test_sums_over_data_are_those_of_a_loop(num_nearest):
    similarity, values = torch.rand(Q, M, N), torch.randn(Q, N, num_nearest)
    index = nearest(similarity, num_nearest)
    total = torch.zeros(Q, M)
    for q in range(Q):
        for n in range(N):
            best = similarity[q, :, n].sort(descending=True).indices[:num_nearest]
            assert torch.equal(index[q, n], best)
            total[q, best] += values[q, n]
    torch.testing.assert_close(sum_at(index, values, M), total)


def test_shared_points_have_the_same_neighbours_for_all_processes():
    process, *_ = make(3)
    own = SparseProcess(process.kernel, process.Z.expand(Q, M, 2), process.X)
    correlation = process.Kuf / (process.Kff[..., None, :] * Kuu(process).diagonal(dim1=-2, dim2=-1)[..., :, None]).sqrt()
    torch.testing.assert_close(process.similarity, correlation.mean(-3, keepdim=True))
    torch.testing.assert_close(own.similarity, correlation)


def test_offsets_are_differences_from_the_chosen_points():
    process, *_ = make(3)
    index = nearest(process.similarity, 2)
    offset = process.offsets(index)
    assert offset.shape == (3, 1, N, 2, 2)
    expected = process.Z[index] - process.X[..., None, :]
    torch.testing.assert_close(offset, expected)


def test_what_does_not_vary_is_near_to_nothing():
    process = SparseProcess(Linear(1, batch_shape=(2,)), torch.tensor([[-1.0], [0.0], [2.0]]), torch.tensor([[[0.0], [1.0]]]))
    expected = torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(process.similarity.squeeze(), expected, atol=1e-3, rtol=0.0)


def test_nearest_under_a_periodic_kernel_is_nearest_on_the_circle():
    Z = torch.tensor([[0.1], [0.5]])
    x = torch.tensor([[[0.95]]])
    for kernel, best in ((Periodic(1, batch_shape=(1,)), 0), (RBF(1, batch_shape=(1,)), 1)):
        assert nearest(SparseProcess(kernel, Z, x).similarity, 1).item() == best


# ---- other inducing points


def moved_sites(process, other, sites):
    return transfer(sites, other.whitened_covariance(process))


def test_more_points_change_nothing():
    """Even where sites are sharp, and the jitter matters."""
    process, precision, loc = make()
    sites = aggregate(process.A, 1e6 * precision, 1e6 * precision * loc)
    more = process.at_inducing_points(torch.cat([torch.rand(3, 2), process.Z]))
    before = marginals(process.A, process.Kff, *inducing_posterior(sites))
    after = marginals(more.A, more.Kff, *inducing_posterior(moved_sites(process, more, sites)))
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0.0)


def test_fewer_points_keep_what_was_known_of_them():
    process, precision, loc = make()
    sites = aggregate(process.A, precision, precision * loc)
    fewer = process.at_inducing_points(process.Z[[2, 0]])
    mean, covariance = on_values(process, sites)
    got_mean, got_covariance = on_values(fewer, moved_sites(process, fewer, sites))
    torch.testing.assert_close(got_mean, mean[:, [2, 0]])
    torch.testing.assert_close(got_covariance, covariance[:, [2, 0]][:, :, [2, 0]])


def test_moved_points_have_the_posterior_that_the_process_had_there():
    process, precision, loc = make()
    sites = aggregate(process.A, precision, precision * loc)
    X = torch.rand(1, 3, 2)
    there = SparseProcess(process.kernel, process.Z, X, jitter=process.jitter)
    mean, variance = marginals(there.A, there.Kff * (1.0 + process.jitter), *inducing_posterior(sites))
    got_mean, got_covariance = on_values(moved := process.at_inducing_points(X[0]), moved_sites(process, moved, sites))
    torch.testing.assert_close(got_mean, mean)
    torch.testing.assert_close(got_covariance.diagonal(dim1=-2, dim2=-1), variance)


def test_points_moved_where_nothing_is_known_forget():
    process, precision, loc = make()
    away = process.at_inducing_points(process.Z + 100.0)
    sites = moved_sites(process, away, aggregate(process.A, precision, precision * loc))
    torch.testing.assert_close(sites, Sites(torch.zeros(Q, M, M), torch.zeros(Q, M)))


# ---- edges


@pytest.mark.parametrize("form", ["nearest", "projected"])
@pytest.mark.parametrize("num_data", [1, N])
@pytest.mark.parametrize("variance", [1e-4, 1e-10, 1e-16])
def test_tiny_variances_have_finite_gradients(form, num_data, variance):
    process, *_ = make(num_data=num_data)
    G = process.A if form == "projected" else process.L.mT
    precision = torch.full((Q, G.shape[-1]), 1.0 / variance, requires_grad=True)
    loc = torch.randn(Q, G.shape[-1], requires_grad=True)
    u, scale_tril = inducing_posterior(aggregate(G, precision, precision * loc))
    mean, spread = marginals(process.A, process.Kff, u, scale_tril)
    kl = kl_divergence(MultivariateNormal(u, scale_tril=scale_tril), Independent(Normal(torch.zeros(Q, M), 1.0), 1))
    assert (spread > 0.0).all()
    (mean.sum() + spread.sqrt().sum() + kl.sum()).backward()
    for value in (mean, spread, kl, precision.grad, loc.grad, *(p.grad for p in process.kernel.parameters())):
        assert torch.isfinite(value).all()


def test_repeated_inputs_and_inducing_points():
    """Two sites at one input are one with the sum of their natural parameters; a repeated inducing point adds nothing."""
    kernel, Z = RBF(1, lengthscale=0.5, batch_shape=(1,)), torch.tensor([[0.0], [0.5]])
    once = SparseProcess(kernel, Z, torch.tensor([[[0.2], [0.7]]]))
    twice = SparseProcess(kernel, Z, torch.tensor([[[0.2], [0.2], [0.7]]]))
    repeated = SparseProcess(kernel, Z[[0, 1, 1]], once.X)
    precision, loc = torch.tensor([[3.0, 2.0, 4.0]]), torch.tensor([[1.0, -1.0, 0.5]])
    natural = torch.stack([precision, precision * loc])
    joined = torch.stack([natural[..., :2].sum(-1), natural[..., 2]], -1)
    u, scale_tril = inducing_posterior(aggregate(twice.A, *natural))
    expected = marginals(once.A, once.Kff, u, scale_tril)
    for process in (once, repeated):
        got = marginals(process.A, process.Kff, *inducing_posterior(aggregate(process.A, *joined)))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)  # jitter splits the repeated point


def test_gradients_are_those_of_differences():
    process, precision, loc = make()
    A, Kff = process.A.detach(), process.Kff.detach()

    def function(A, precision, loc):
        mean, variance = marginals(A, Kff + 2.0, *inducing_posterior(aggregate(A, precision.exp(), loc)))
        return mean.sum() + variance.log().sum()

    args = (A.requires_grad_(), precision.requires_grad_(), loc.requires_grad_())
    assert torch.autograd.gradcheck(function, args)


def test_prior_knows_the_process_through_plates():
    process = SparseProcess(RBF(2, batch_shape=(Q,)), torch.rand(M, 2), torch.rand(3, 1, 1, N, 2))
    prior = process.prior()
    assert prior.batch_shape == (3, Q, M)
    assert prior.expand((5, 3, Q, M)).process is process
    v = prior.sample()
    torch.testing.assert_close(prior.log_prob(v), Normal(0.0, 1.0).log_prob(v))


def test_whitened_covariance_of_a_process_with_itself_is_the_identity():
    process, *_ = make()
    torch.testing.assert_close(process.whitened_covariance(process), torch.eye(M).expand(Q, M, M), atol=1e-8, rtol=0.0)
    other = process.at_inducing_points(torch.rand(6, 2))
    expected = solve_lower(process.L, process.kernel(process.Z, other.Z)) @ torch.linalg.inv(other.L).mT
    torch.testing.assert_close(process.whitened_covariance(other), expected)
