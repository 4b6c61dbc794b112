"""Closed forms: against numerical maximisation of the bound, known posteriors and evidences, and moments by other means."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Beta, Gamma, kl_divergence

from pyro_lvgp import conjugate
from pyro_lvgp.conjugate import NaturalGaussian, NormalInverseWishart

L, C, Q = 7, 4, 2
PRIOR = (2.0, 0.5)  # of the concentration


pytestmark = pytest.mark.usefixtures("float64")


def wishart_like(*batch):
    A = torch.randn(*batch, Q, Q + 2)
    return A @ A.mT / (Q + 2) + 0.5 * torch.eye(Q)


def components(*batch):
    return NormalInverseWishart.of(
        torch.randn(*batch, Q), 0.5 + torch.rand(batch), wishart_like(*batch), 2 + torch.rand(batch)
    )


def problem(*batch):
    """Points, and a factor for everything in a mixture by stick breaking."""
    points = (torch.randn(*batch, L, Q), wishart_like(*batch, L))
    prior = NormalInverseWishart.of(torch.zeros(Q), torch.tensor(0.3), torch.eye(Q), torch.tensor(3.0))
    factors = {
        "assignments": torch.randn(*batch, L, C).log_softmax(-1),
        "sticks": (0.5 + torch.rand(*batch, C - 1), 0.5 + torch.rand(*batch, C - 1)),
        "concentration": (0.5 + torch.rand(batch), 0.5 + torch.rand(batch)),
        "components": components(*batch, C),
    }
    return points, prior, factors


def bound(points, prior, factors):
    """The exact bound of the mixture; expectations of log v are derivatives of the log normaliser of a Beta."""
    log_phi, (a, b), (shape, rate) = factors["assignments"], factors["sticks"], factors["concentration"]
    log_v, log_left = beta_moments(a, b)
    log_weights = torch.cat([log_v, torch.zeros_like(log_v[..., :1])], -1)
    log_weights = log_weights + torch.stack([log_left[..., :c].sum(-1) for c in range(C)], -1)
    log_likelihood = conjugate.normal_log_likelihood(factors["components"], *points)
    total = (log_phi.exp() * (log_weights[..., None, :] + log_likelihood - log_phi)).sum((-2, -1))
    log_alpha = torch.digamma(shape) - rate.log()
    sticks = log_alpha[..., None] + (shape / rate - 1.0)[..., None] * log_left + Beta(a, b).entropy()
    total = total + sticks.sum(-1) - kl_divergence(Gamma(shape, rate), Gamma(*map(torch.tensor, PRIOR)))
    return total - conjugate.normal_inverse_wishart_kl(factors["components"], prior).sum(-1)


def beta_moments(a, b):
    """E log v and E log(1 − v)."""
    log_normaliser = torch.func.grad(lambda a, b: (a.lgamma() + b.lgamma() - (a + b).lgamma()).sum(), argnums=(0, 1))
    return log_normaliser(a, b)


def update(block, points, prior, factors):
    if block == "assignments":
        log_likelihood = conjugate.normal_log_likelihood(factors["components"], *points)
        return conjugate.categorical_assignments(conjugate.stick_log_weights(*factors["sticks"]), log_likelihood)
    if block == "sticks":
        shape, rate = factors["concentration"]
        return conjugate.stick_breaking(factors["assignments"].exp(), shape / rate)
    if block == "concentration":
        return conjugate.concentration(*map(torch.tensor, PRIOR), *factors["sticks"])
    return conjugate.normal_inverse_wishart(prior, factors["assignments"].exp(), *points)


BLOCKS = ("assignments", "sticks", "concentration", "components")
# From tensors without constraints to a factor.
FREE = {
    "assignments": (lambda x: x.log_softmax(-1), [(L, C)]),
    "sticks": (lambda a, b: (a.exp(), b.exp()), [(C - 1,), (C - 1,)]),
    "concentration": (lambda a, b: (a.exp(), b.exp()), [(), ()]),
    "components": (
        lambda m, k, S, n: NormalInverseWishart.of(m, k.exp(), S @ S.mT, Q - 1 + n.exp()),
        [(C, Q), (C,), (C, Q, Q), (C,)],
    ),
}


def maximise(function, shapes):
    """A local maximum from a random start."""
    free = [torch.randn(shape, requires_grad=True) for shape in shapes]
    optimiser = torch.optim.LBFGS(
        free, max_iter=500, tolerance_grad=1e-6, tolerance_change=1e-14, history_size=30, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        value = -function(*free)
        value.backward()
        return value

    optimiser.step(closure)
    return [x.detach() for x in free]


@pytest.mark.parametrize("block", BLOCKS)
def test_update_is_what_numerical_maximisation_finds(block):
    points, prior, factors = problem()
    new = update(block, points, prior, factors)
    factor, shapes = FREE[block]
    found = factor(*maximise(lambda *free: bound(points, prior, factors | {block: factor(*free)}), shapes))
    if block == "assignments":  # the bound does not feel how small a small probability is
        torch.testing.assert_close(new.exp(), found.exp(), rtol=0.0, atol=1e-6)
    else:
        torch.testing.assert_close(tuple(new), tuple(found), rtol=1e-5, atol=1e-6)
    assert bound(points, prior, factors | {block: new}) >= bound(points, prior, factors | {block: found}) - 1e-10
    assert bound(points, prior, factors | {block: new}) > bound(points, prior, factors) + 1e-3


def test_no_update_lowers_the_bound():
    points, prior, factors = problem(3)
    value = bound(points, prior, factors)
    for block in BLOCKS * 10:
        factors[block] = update(block, points, prior, factors)
        new = bound(points, prior, factors)
        assert (new >= value - 1e-11 * value.abs()).all()
        value = new


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_the_way_to_an_update_never_lowers_the_bound(block):
    points, prior, factors = problem()
    new, values = update(block, points, prior, factors), []
    for rho in torch.linspace(0.0, 1.0, 21):
        mixed = [torch.lerp(x, y, rho) for x, y in zip(factors[block], new, strict=True)]
        mixed = NormalInverseWishart(*mixed) if block == "components" else tuple(mixed)
        values.append(bound(points, prior, factors | {block: mixed}))
    assert (torch.stack(values).diff() > 0.0).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_batches_are_independent(block):
    points, prior, factors = problem(3)
    together = update(block, points, prior, factors)
    for i in range(3):
        own = {name: factor[i] if name == "assignments" else tuple(x[i] for x in factor) for name, factor in factors.items()}
        own["components"] = NormalInverseWishart(*own["components"])
        alone = update(block, tuple(x[i] for x in points), prior, own)
        expected = together[i] if block == "assignments" else tuple(x[i] for x in together)
        torch.testing.assert_close(tuple(alone), tuple(expected))


def test_mini_batches_average_to_the_update():
    points, prior, factors = problem()
    phi, squares = factors["assignments"].exp(), torch.rand(L)
    targets, precision = torch.randn(L), torch.rand(L)
    weights = NaturalGaussian(torch.randn(Q), wishart_like())

    def updates(rows):
        scale = L / len(rows)
        means, covariances = (x[rows] for x in points)
        return [
            *conjugate.stick_breaking(scale * phi[rows], torch.tensor(1.3)),
            conjugate.dirichlet_weights(scale * phi[rows], torch.rand(C, generator=torch.Generator().manual_seed(0))),
            *conjugate.normal_inverse_wishart(prior, scale * phi[rows], means, covariances),
            *conjugate.gaussian_weights(weights, means, targets[rows], scale * precision[rows]),
            *conjugate.gamma_precision(torch.tensor(1.0), torch.tensor(2.0), squares[rows], torch.full((len(rows),), scale)),
        ]

    batches = [updates([i]) for i in range(L)]
    for each, whole in zip(zip(*batches, strict=True), updates(list(range(L))), strict=True):
        torch.testing.assert_close(torch.stack(each).mean(0), whole)


def test_log_weights_of_sticks_against_their_definition():
    a, b = torch.rand(2, 3) + 0.3, torch.rand(2, 3) + 0.3
    log_v, log_left = beta_moments(a, b)
    found = conjugate.stick_log_weights(a, b)
    for c in range(4):
        expected = log_left[:, :c].sum(-1) + (log_v[:, c] if c < 3 else 0.0)
        torch.testing.assert_close(found[:, c], expected)


def test_dirichlet_with_two_components_is_a_beta():
    alpha = torch.rand(5, 2) + 0.2
    expected = torch.stack(beta_moments(alpha[:, 0], alpha[:, 1]), -1)
    torch.testing.assert_close(conjugate.dirichlet_log_weights(alpha), expected)


def test_dirichlet_update_is_what_numerical_maximisation_finds():
    phi, prior = torch.randn(L, C).softmax(-1), torch.rand(C) + 0.5

    def bound(free):
        q = torch.distributions.Dirichlet(free.exp())
        expected = (phi * conjugate.dirichlet_log_weights(free.exp())).sum()
        return expected - kl_divergence(q, torch.distributions.Dirichlet(prior))

    (found,) = maximise(bound, [(C,)])
    torch.testing.assert_close(conjugate.dirichlet_weights(phi, prior), found.exp(), rtol=1e-6, atol=1e-6)


def test_responsibilities_of_known_components_are_bayes_rule():
    weights, x = torch.rand(C).softmax(-1), torch.randn(L)
    normals = torch.distributions.Normal(torch.randn(C), 0.5 + torch.rand(C))
    joint = weights * normals.log_prob(x[:, None]).exp()
    found = conjugate.categorical_assignments(weights.log(), normals.log_prob(x[:, None])).exp()
    torch.testing.assert_close(found, joint / joint.sum(-1, keepdim=True))


def test_one_component_bounds_the_evidence_exactly():
    x, prior = torch.randn(9, Q), components()
    posterior = conjugate.normal_inverse_wishart(prior, torch.ones(9, 1), x)
    found = conjugate.normal_log_likelihood(posterior, x).sum() - conjugate.normal_inverse_wishart_kl(posterior, prior).sum()
    # The chain rule, with a Student t to predict each point from those before.
    evidence, now = torch.zeros(()), prior
    for point in x:
        nu = now.dof - Q + 1.0
        scale = torch.linalg.cholesky(now.scale * (now.kappa + 1.0) / (now.kappa * nu))
        evidence = evidence + dist.MultivariateStudentT(nu, now.mean, scale).log_prob(point)
        now = NormalInverseWishart(
            *(field[0] for field in conjugate.normal_inverse_wishart(now, torch.ones(1, 1), point[None]))
        )
    torch.testing.assert_close(found, evidence)
    torch.testing.assert_close(tuple(now), tuple(field[0] for field in posterior))


def test_moments_of_the_components_are_those_of_draws():
    q, p = components(1), components(1)
    mean, covariance = torch.randn(1, Q), wishart_like(1)
    draws = 10000

    def sites(niw):
        precision = dist.Wishart(niw.dof, precision_matrix=niw.scale)
        return precision, lambda value: dist.MultivariateNormal(niw.mean, precision_matrix=niw.kappa[:, None, None] * value)

    precision_q, mean_q = sites(q)
    precision_p, mean_p = sites(p)
    with warnings.catch_warnings():
        # Torch looks for singular draws with the wrong sign.
        warnings.filterwarnings("ignore", "Singular sample detected")
        Lambda = precision_q.sample((draws,))
    mu = mean_q(Lambda).sample()
    x = torch.distributions.MultivariateNormal(mean, covariance).sample((draws,))
    log_p = torch.distributions.MultivariateNormal(mu, precision_matrix=Lambda).log_prob(x)
    kl = (
        precision_q.log_prob(Lambda) - precision_p.log_prob(Lambda) + mean_q(Lambda).log_prob(mu) - mean_p(Lambda).log_prob(mu)
    )
    for found, values in (
        (conjugate.normal_log_likelihood(q, mean, covariance).squeeze(), log_p),
        (conjugate.normal_inverse_wishart_kl(q, p).squeeze(), kl),
    ):
        assert abs(found - values.mean()) < 4.0 * values.std() / math.sqrt(draws)


def test_parameters_of_the_components_come_back():
    mean, kappa, scale, dof = torch.randn(3, Q), torch.rand(3), wishart_like(3), torch.rand(3) + 2.0
    niw = NormalInverseWishart.of(mean, kappa, scale, dof)
    torch.testing.assert_close((niw.mean, niw.kappa, niw.scale, niw.dof), (mean, kappa, scale, dof))


def test_components_may_share_all_parameters_but_one():
    mean, kappa, scale, dof = torch.randn(3, Q), torch.tensor(0.5), wishart_like(), torch.tensor(4.0)
    shared = NormalInverseWishart.of(mean, kappa, scale, dof)
    repeated = NormalInverseWishart.of(mean, kappa.expand(3), scale.expand(3, Q, Q), dof.expand(3))
    assert [x.shape for x in shared] == [x.shape for x in repeated]
    points = torch.randn(6, Q)
    found, expected = (conjugate.normal_log_likelihood(q, points) for q in (shared, repeated))
    torch.testing.assert_close(found, expected)


def test_weights_of_a_regression_are_those_of_a_gaussian_process():
    features, targets, precision = torch.randn(3, L, Q), torch.randn(3, L), 0.5 + torch.rand(3, L)
    prior_mean, prior_covariance = torch.randn(Q), wishart_like()
    prior_precision = torch.linalg.inv(prior_covariance)
    found = conjugate.gaussian_weights(
        NaturalGaussian(prior_precision @ prior_mean, prior_precision), features, targets, precision
    )
    total = features @ prior_covariance @ features.mT + torch.diag_embed(1.0 / precision)
    gain = prior_covariance @ features.mT @ torch.linalg.inv(total)
    mean = prior_mean + (gain @ (targets - features @ prior_mean)[..., None]).squeeze(-1)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(torch.linalg.inv(found.precision), prior_covariance - gain @ features @ prior_covariance)


def test_targets_of_no_precision_do_not_count():
    features, targets, precision = torch.randn(L, Q), torch.randn(L), torch.rand(L)
    prior = NaturalGaussian(torch.zeros(Q), torch.eye(Q))
    precision[2:] = 0.0
    found = conjugate.gaussian_weights(prior, features, targets, precision)
    expected = conjugate.gaussian_weights(prior, features[:2], targets[:2], precision[:2])
    torch.testing.assert_close(tuple(found), tuple(expected))


def test_precision_of_residuals_is_the_posterior():
    residuals, shape, rate = torch.randn(2, L), torch.tensor(1.5), torch.tensor(0.7)
    posterior = Gamma(*(x[:, None] for x in conjugate.gamma_precision(shape, rate, residuals.square())))
    tau = torch.tensor([0.1, 0.5, 1.0, 3.0])
    log_likelihood = torch.distributions.Normal(0.0, tau[:, None, None].rsqrt()).log_prob(residuals).sum(-1).T
    evidence = log_likelihood + Gamma(shape, rate).log_prob(tau) - posterior.log_prob(tau)
    torch.testing.assert_close(evidence, evidence[:, :1].expand(2, 4))


def test_precision_of_weighted_residuals_is_what_numerical_maximisation_finds():
    squares, weights, prior = torch.rand(L), torch.rand(L), Gamma(torch.tensor(1.5), torch.tensor(0.7))

    def bound(a, b):
        q = Gamma(a.exp(), b.exp())
        expected = 0.5 * weights * (torch.digamma(a.exp()) - b - q.mean * squares)
        return expected.sum() - kl_divergence(q, prior)

    a, b = maximise(bound, [(), ()])
    found = conjugate.gamma_precision(prior.concentration, prior.rate, squares, weights)
    torch.testing.assert_close(found, (a.exp(), b.exp()), rtol=1e-6, atol=1e-6)


def test_precision_is_kept(dtype):
    phi = torch.rand(L, C, dtype=dtype).softmax(-1)
    one = torch.ones((), dtype=dtype)
    sticks = conjugate.stick_breaking(phi, one)
    prior = NormalInverseWishart.of(torch.zeros(Q, dtype=dtype), one, torch.eye(Q, dtype=dtype), 3 * one)
    niw = conjugate.normal_inverse_wishart(prior, phi, torch.randn(L, Q, dtype=dtype))
    results = [
        *sticks,
        *conjugate.concentration(one, one, *sticks),
        conjugate.stick_log_weights(*sticks),
        conjugate.normal_log_likelihood(niw, torch.randn(L, Q, dtype=dtype)),
        conjugate.normal_inverse_wishart_kl(niw, prior),
        *conjugate.gamma_precision(one, one, phi[:, 0]),
    ]
    assert {result.dtype for result in results} == {dtype}


def test_closed_forms_broadcast_priors_and_data_to_one_batch():
    squares, left = torch.rand(3, 5), torch.ones(3, 4)
    for shape, rate in (
        conjugate.gamma_precision(torch.ones(2, 1), torch.tensor(1.0), squares[0]),
        conjugate.gamma_precision(torch.tensor(1.0), torch.ones(2, 1), squares[0]),
        conjugate.concentration(torch.ones(2, 1), torch.tensor(1.0), left[0], left[0]),
    ):
        assert shape.shape == rate.shape == (2, 1)
    targets, features = torch.randn(3, 6), torch.randn(6, Q)
    prior = NaturalGaussian(torch.zeros(Q), torch.eye(Q))
    together = conjugate.gaussian_weights(prior, features, targets, torch.ones(6))
    assert together.precision.shape == (3, Q, Q)
    for d, y in enumerate(targets):
        torch.testing.assert_close(together.mean[d], conjugate.gaussian_weights(prior, features, y, torch.ones(6)).mean)


def test_a_residual_without_weight_counts_for_nothing_whatever_it_is():
    shape, rate = conjugate.gamma_precision(
        torch.tensor(1.0), torch.tensor(1.0), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 0.0])
    )
    assert (shape, rate) == (1.5, 1.5)
