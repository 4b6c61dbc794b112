"""The mean-field bound with u integrated out: against Pyro's bound, a closed form, and models that are not ours."""

from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM

N, D, Q, M = 9, 3, 2, 4
LIKELIHOODS = {"gaussian": lambda: Gaussian(0.4), "poisson": Poisson, "bernoulli": Bernoulli}


pytestmark = pytest.mark.usefixtures("float64")


def _make(likelihood=None, **kwargs):
    """A model, data from its likelihood with holes, and a guide away from its start."""
    likelihood = Gaussian(0.4) if likelihood is None else likelihood
    model = BayesianGPLVM(N, D, Q, num_inducing=M, likelihood=likelihood, **kwargs)
    Y = likelihood(torch.randn(N, D)).sample()
    Y[0, 1:], Y[4, 0] = torch.nan, torch.nan
    guide = MeanFieldGuide(model, init_scale=0.3)
    guide(Y)
    guide.locs.u, guide.locs.X = 0.5 * torch.randn(D, M), torch.randn(N, Q)
    return model, guide, Y


def _mean_and_error(values):
    values = torch.as_tensor(values)
    return values.mean(), values.std() / len(values) ** 0.5


def _losses(elbo, model, guide, *args, draws):
    return torch.tensor([elbo.loss(model, guide, *args) for _ in range(draws)])


def _pyro_elbo(num_particles, nesting=1):
    return TraceMeanField_ELBO(num_particles=num_particles, vectorize_particles=True, max_plate_nesting=nesting)


def _assert_same_mean(first, second):
    (a, a_error), (b, b_error) = _mean_and_error(first), _mean_and_error(second)
    assert abs(a - b) < 4 * (a_error**2 + b_error**2) ** 0.5


@pytest.mark.parametrize("rows", [None, [7, 0, 3]], ids=["full", "subsampled"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_same_mean_as_pyro_s_bound(likelihood, rows):
    model, guide, Y = _make(LIKELIHOODS[likelihood]())
    args = (Y,) if rows is None else (Y[rows], torch.tensor(rows))
    expected = _losses(_pyro_elbo(200), model, guide, *args, draws=20)
    for num_samples in (1, 2, 5):
        _assert_same_mean(_losses(MeanFieldELBO("data", num_samples), model, guide, *args, draws=50), expected)


def _gradients(elbo, model, guide, *args, draws):
    loss = elbo(model, guide)
    result = {name: [] for name, _ in loss.named_parameters()}
    for _ in range(draws):
        loss.zero_grad()
        loss(*args).backward()
        for name, parameter in loss.named_parameters():
            result[name].append(parameter.grad.clone())
    return {name: torch.stack(values) for name, values in result.items()}


@pytest.mark.parametrize(("num_samples", "rows"), [(1, None), (3, [7, 0, 3])], ids=["full", "subsampled"])
def test_same_mean_gradients_as_pyro_s_bound(num_samples, rows):
    model, guide, Y = _make()
    args = (Y,) if rows is None else (Y[rows], torch.tensor(rows))
    expected = _gradients(_pyro_elbo(100), model, guide, *args, draws=30)
    found = _gradients(MeanFieldELBO("data", num_samples), model, guide, *args, draws=60)
    assert expected.keys() == found.keys()
    for name, a in expected.items():
        b = found[name]
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        # 4.5 standard errors, as there are many entries.
        assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * error + 1e-9).all(), name


def _given_latents(**kwargs):
    """X known: what is left to draw is u."""
    model, _, Y = _make(**kwargs)
    X = torch.randn(N, Q)
    given = poutine.condition(model, {"X": X})
    pyro.clear_param_store()
    guide = MeanFieldGuide(given, init_scale=0.5, create_plates=model.create_plates)
    guide(Y)
    guide.locs.u = torch.randn(D, M)
    return model, given, guide, X, Y


@torch.no_grad()
def _closed_form(model, guide, X, Y, rows=range(N)):
    """E over u, one entry at a time, each with its own inverse."""
    L = guide.scales.u if guide.scales.u.dim() == 3 else torch.diag_embed(guide.scales.u)
    m, S = guide.locs.u, L @ L.mT
    noise, Z, k = model.likelihood.variance, model.inducing_points, model.kernel
    A = torch.linalg.inv(torch.linalg.cholesky(k(Z) + 1e-8 * torch.eye(M))) @ k(Z, X)
    bound = dist.Normal(0.0, 1.0).log_prob(X[list(rows)]).sum()
    for n in rows:
        for d in range(D):
            if not torch.isnan(Y[n, d]):
                a = A[:, n]
                f_variance = 1.0 - a @ a + a @ S[d] @ a
                bound += dist.Normal(a @ m[d], noise.sqrt()).log_prob(Y[n, d]) - f_variance / (2 * noise)
    kl = torch.distributions.kl_divergence(
        dist.MultivariateNormal(m, scale_tril=L), dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
    )
    return N / len(rows) * bound - kl.sum()


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_deterministic_and_equal_to_the_closed_form_given_the_latents(num_samples):
    model, given, guide, X, Y = _given_latents()
    losses = _losses(MeanFieldELBO("data", num_samples), given, guide, Y, draws=3)
    torch.testing.assert_close(-losses, _closed_form(model, guide, X, Y).expand(3))


def test_closed_form_of_a_mini_batch():
    model, _, guide, X, Y = _given_latents()
    rows = [7, 0, 3]
    batch = poutine.condition(model, {"X": X[rows]})
    loss = MeanFieldELBO().loss(batch, guide, Y[rows], torch.tensor(rows))
    torch.testing.assert_close(-torch.tensor(loss), _closed_form(model, guide, X, Y, rows))


def test_diagonal_covariance_of_u_is_integrated_too():
    model, given, _, X, Y = _given_latents()
    pyro.clear_param_store()
    guide = MeanFieldGuide(given, covariance={"u": "diagonal"}, init_scale=0.5, create_plates=model.create_plates)
    guide(Y)
    losses = _losses(MeanFieldELBO(), given, guide, Y, draws=2)
    assert guide.scales.u.shape == (D, M)
    torch.testing.assert_close(-losses, _closed_form(model, guide, X, Y).expand(2))


def test_less_noise_than_pyro_s_bound_and_less_with_more_samples():
    model, guide, Y = _make()
    guide.scales.u = 0.7 * torch.eye(M).expand(D, M, M)
    one, four, drawn = (
        _losses(elbo, model, guide, Y, draws=150).var()
        for elbo in (MeanFieldELBO("data", 1), MeanFieldELBO("data", 4), TraceMeanField_ELBO())
    )
    # A variance of 150 draws has a relative standard error of about 0.12.
    assert one < 0.6 * drawn
    assert four < 0.5 * one
    assert four > 0.1 * one


def test_fitc_draws_u_and_agrees_with_pyro_s_bound():
    _, given, guide, _, Y = _given_latents(likelihood_term="fitc")
    losses = _losses(MeanFieldELBO(), given, guide, Y, draws=80)
    assert losses.std() > 0.01
    _assert_same_mean(losses, _losses(TraceMeanField_ELBO(), given, guide, Y, draws=80))
    pyro.clear_param_store()
    model, guide, Y = _make(likelihood_term="fitc")
    _assert_same_mean(
        _losses(MeanFieldELBO("data", 4), model, guide, Y, draws=80), _losses(_pyro_elbo(100), model, guide, Y, draws=20)
    )


def _nested(y, idx=None):
    """Not one of ours: a global without an analytic KL, an outer plate, the local plate, and a plate inside it."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("groups", 2, dim=-2):
        shift = pyro.sample("shift", dist.Gamma(2.0, scale))
        with pyro.plate("data", 6, subsample=idx, dim=-1):
            x = pyro.sample("x", dist.Normal(shift, 1.0))
            with pyro.plate("views", 3, dim=-3):
                z = pyro.sample("z", dist.Normal(x, scale))
                pyro.sample("y", dist.Normal(z, 0.7), obs=y)


@pytest.mark.parametrize(("num_samples", "rows"), [(1, None), (3, [5, 1])], ids=["full", "subsampled"])
def test_nested_plates_of_a_model_that_is_not_ours(num_samples, rows):
    y = torch.randn(3, 2, 6)
    guide = MeanFieldGuide(
        _nested, init_scale=0.3, create_plates=lambda y, idx=None: pyro.plate("data", 6, subsample=idx, dim=-1)
    )
    guide(y)
    args = (y,) if rows is None else (y[..., rows], torch.tensor(rows))
    elbo = MeanFieldELBO("data", num_samples, max_plate_nesting=3)
    expected = _losses(_pyro_elbo(200, 3), _nested, guide, *args, draws=20)
    _assert_same_mean(_losses(elbo, _nested, guide, *args, draws=150), expected)


def test_a_hand_written_guide():
    def guide(y):
        pyro.sample("scale", dist.LogNormal(0.1, 0.2))
        with pyro.plate("groups", 2, dim=-2):
            pyro.sample("shift", dist.Gamma(torch.tensor(3.0), 2.0))
            with pyro.plate("data", 6, dim=-1):
                pyro.sample("x", dist.Normal(0.5, 0.6))
                with pyro.plate("views", 3, dim=-3):
                    pyro.sample("z", dist.Normal(0.3, 0.5))

    y = torch.randn(3, 2, 6)
    expected = _losses(_pyro_elbo(200, 3), _nested, guide, y, draws=20)
    _assert_same_mean(_losses(MeanFieldELBO(), _nested, guide, y, draws=150), expected)


@pytest.mark.parametrize("num_samples", [1, 4])
def test_a_model_without_the_plate_is_pyro_s_bound_exactly(num_samples):
    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("other", 3):
            pyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=y)

    y, guide = torch.randn(3), MeanFieldGuide(model)
    guide(y)
    elbo = MeanFieldELBO("data", num_samples, max_plate_nesting=1)
    for seed in range(3):
        torch.manual_seed(seed)
        found = elbo.loss(model, guide, y)
        torch.manual_seed(seed)
        assert found == pytest.approx(TraceMeanField_ELBO().loss(model, guide, y))


def test_loss_and_gradients_come_together():
    model, guide, Y = _make()
    parameters = [*model.parameters(), *guide.parameters()]
    torch.manual_seed(0)
    loss = MeanFieldELBO().loss(model, guide, Y)
    assert all(p.grad is None for p in parameters)
    torch.manual_seed(0)
    assert MeanFieldELBO().loss_and_grads(model, guide, Y) == pytest.approx(loss)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)


def test_integrating_inside_the_logarithm_is_looser():
    """By Jensen: E_u outside the logarithm of the weights is above E_u inside it, and that above E_x outside it."""
    model, guide, Y = _make()
    guide.scales.u = 0.7 * torch.eye(M).expand(D, M, M)
    bounds = [
        _mean_and_error(-_losses(elbo, model, guide, Y, draws=80))
        for elbo in (
            MeanFieldELBO("data", 10),
            ImportanceWeightedELBO("data", 10),
            ImportanceWeightedELBO("data", 10, marginalize=False),
        )
    ]
    for (lower, lower_error), (upper, upper_error) in pairwise(bounds):
        assert lower < upper + 4 * (lower_error**2 + upper_error**2) ** 0.5


class TestRefuses:
    def model(self, outside=False):
        with pyro.plate("data", 4):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if outside:
            pyro.sample("z", dist.Normal(x.sum(-1, keepdim=True), 1.0), obs=torch.tensor(0.0))

    def guide(self, outside=False):
        with pyro.plate("data", 4):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    def test_a_guide_that_cannot_be_reparameterised(self):
        def guide():
            with pyro.plate("data", 4):
                pyro.sample("x", dist.Poisson(torch.tensor(1.0)))

        with pytest.raises(ValueError, match="'x' with Poisson; use a distribution with has_rsample"):
            MeanFieldELBO().loss(self.model, guide)

    def test_a_site_outside_that_depends_on_one_inside(self):
        with pytest.raises(ValueError, match="'z' outside plate 'data' has batch shape"):
            MeanFieldELBO(max_plate_nesting=1).loss(self.model, self.guide, True)

    @pytest.mark.parametrize("bad", [{"num_samples": 0}, {"num_particles": 0}])
    def test_no_samples(self, bad):
        with pytest.raises(ValueError, match=f"expected {next(iter(bad))} of 1 or more, got 0"):
            MeanFieldELBO(**bad)
