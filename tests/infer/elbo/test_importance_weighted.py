"""The importance-weighted bound against quadrature, brute force and itself under subsampling."""

import math
from functools import partial
from itertools import combinations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from pyro.optim import Adam

from pyro_lvgp.diagnostics import log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM

N, D, M = 8, 3, 4
COPIES = 20

pytestmark = pytest.mark.usefixtures("float64")


def _estimate(elbo, model, guide, *args, draws=400):
    values = torch.tensor([-elbo.loss(model, guide, *args) for _ in range(draws)])
    return values.mean(), values.std() / draws**0.5


def given_u(copies=1):
    """A one-dimensional GPLVM given u, its guide, data with holes, and the exact evidence by quadrature.

    Each row is there many times, so that one evaluation of a bound averages over as many draws.
    """
    Y = torch.randn(N, D)
    Y[0, 1:] = torch.nan
    model = BayesianGPLVM(copies * N, D, 1, num_inducing=M, likelihood=Gaussian(0.5))
    u = torch.randn(D, M)
    given = poutine.condition(model, {"u": u})
    guide = MeanFieldGuide(given, init_scale=1.0, create_plates=model.create_plates)
    guide(Y.repeat(copies, 1))
    with torch.no_grad():
        grid = torch.linspace(-8, 8, 2001)[:, None]
        k, Z, noise = model.kernel, model.inducing_points, model.likelihood.variance
        A = torch.linalg.solve(torch.linalg.cholesky(k(Z) + 1e-8 * torch.eye(M)), k(Z, grid))
        mean, s = A.mT @ u.mT, 1.0 - (A * A).sum(0)
        y, seen = torch.nan_to_num(Y)[:, None, :], ~torch.isnan(Y)[:, None, :]
        entries = dist.Normal(mean, noise.sqrt()).log_prob(y) - (s / (2 * noise))[:, None]
        log_joint = (entries * seen).sum(-1) + dist.Normal(0.0, 1.0).log_prob(grid[:, 0])
        log_evidence = (torch.logsumexp(log_joint, 1) + math.log(16 / 2000)).sum()
        log_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    return given, guide, Y.repeat(copies, 1), copies * log_evidence + log_u


@pytest.fixture
def fixed_u():
    return given_u()


def test_below_quadrature_evidence_and_rising_in_the_number_of_samples():
    model, guide, Y, log_evidence = given_u(COPIES)
    last, last_error = -math.inf, 0.0
    for num_samples in (1, 4, 16, 64, 2048):
        bound, error = _estimate(ImportanceWeightedELBO("data", num_samples), model, guide, Y, draws=20)
        assert bound < log_evidence + 4 * error
        assert bound > last - 4 * (error + last_error)
        last, last_error = bound, error
    assert log_evidence - last < 0.1 * COPIES


def test_weights_average_to_the_evidence_of_each_datum(fixed_u):
    """E[w] = ∫ p(y_n, x) dx, so log-mean-exp over very many samples is exact."""
    model, guide, Y, log_evidence = fixed_u
    elbo = ImportanceWeightedELBO("data", 200_000)
    with torch.no_grad():
        log_w = elbo.log_weights(model, guide, Y)
        log_u = poutine.trace(model).get_trace(Y)
        log_u.compute_log_prob()
        total = torch.logsumexp(log_w, 0).sum() - N * math.log(200_000) + log_u.nodes["u"]["log_prob_sum"]
        weights = torch.softmax(log_w, 0)
        error = (weights.square().sum(0) - 1 / 200_000).sum().sqrt()
    assert log_w.shape == (200_000, N)
    assert abs(total - log_evidence) < 4 * error


def test_one_sample_is_the_ordinary_bound():
    model, guide, Y, _ = given_u(COPIES)
    one, error = _estimate(ImportanceWeightedELBO("data", 1), model, guide, Y, draws=75)
    ordinary, other = _estimate(Trace_ELBO(), model, guide, Y, draws=75)
    assert abs(one - ordinary) < 4 * (error**2 + other**2) ** 0.5


@pytest.mark.parametrize(
    ("elbo", "scale", "repeats"),
    [
        (ImportanceWeightedELBO("data", 5), 0.5, 6),
        (TraceMeanField_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1), 0.1, 2),
    ],
    ids=["iw", "mean field"],
)
def test_subsampled_bounds_are_unbiased(elbo, scale, repeats):
    """With global sites: over many draws, all batches of B of N rows give the bound of all rows."""
    Y = torch.randn(N, D)
    model = BayesianGPLVM(N, D, 2, num_inducing=M)
    guide = MeanFieldGuide(model, init_scale=scale)
    guide(Y)
    full, error = _estimate(elbo, model, guide, Y, draws=25 * repeats)
    batches = [torch.tensor(idx) for idx in combinations(range(N), 3)]
    values = torch.tensor([[-elbo.loss(model, guide, Y[idx], idx) for idx in batches] for _ in range(repeats)])
    variance = values.var(0).mean()  # of a value, given its batch
    assert abs(values.mean() - full) < 4 * (variance / values.numel() + error**2) ** 0.5


def _grouped(y, idx=None):
    """Not one of ours: a global, an outer plate with its own latent, the local plate, and a plate inside it."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", 2, dim=-2):
        shift = pyro.sample("shift", dist.Normal(loc, 1.0))
        with pyro.plate("data", 6, subsample=idx, dim=-1):
            x = pyro.sample("x", dist.Normal(shift, 1.0))
            with pyro.plate("views", 3, dim=-3):
                pyro.sample("y", dist.Normal(x, 0.7), obs=y)


def test_outer_and_inner_plates_against_brute_force():
    """The same draw of everything, weights computed by hand."""
    y, kl = torch.randn(3, 2, 6), torch.distributions.kl_divergence
    guide = MeanFieldGuide(_grouped, init_scale=0.5)
    guide(y)
    elbo = ImportanceWeightedELBO("data", 4, max_plate_nesting=3)
    model_sites, guide_sites = elbo._sample_sites(_grouped, guide, (y,), {})
    loc, shift, x = (guide_sites[name]["value"] for name in ("loc", "shift", "x"))
    assert (loc.shape, shift.shape, x.shape) == ((), (2, 1), (4, 1, 2, 6))
    x, q = x.squeeze(1), dist.Normal(guide.locs.x, guide.scales.x)
    log_w = dist.Normal(shift, 1.0).log_prob(x) + dist.Normal(x, 0.7).log_prob(y[:, None]).sum(0) - q.log_prob(x)
    expected = (log_w.logsumexp(0) - math.log(4)).sum()
    expected = expected - kl(guide_sites["loc"]["fn"], dist.Normal(0.0, 1.0))
    expected = expected - kl(guide_sites["shift"]["fn"], dist.Normal(loc, 1.0)).sum()
    torch.testing.assert_close(elbo.particle_bound(model_sites, guide_sites), expected)
    assert elbo.log_weights(_grouped, guide, y).shape == (4, 2, 6)


def _gradients(elbo, model, guide, Y, draws):
    loss = elbo(model, guide)
    totals = {name: [] for name, _ in loss.named_parameters()}
    for _ in range(draws):
        loss.zero_grad()
        loss(Y).backward()
        for name, parameter in loss.named_parameters():
            is_local = parameter.shape[:1] == (COPIES * N,)
            totals[name].append(parameter.grad.unflatten(0, (COPIES, N)).sum(0) if is_local else parameter.grad.clone())
    return {name: torch.stack(values) for name, values in totals.items()}


def test_dreg_gradient_has_the_same_mean_and_less_noise():
    model, guide, Y, _ = given_u(COPIES)
    standard = _gradients(ImportanceWeightedELBO("data", 16), _Module(model), guide, Y, 150)
    dreg = _gradients(ImportanceWeightedELBO("data", 16, gradient_estimator="dreg"), _Module(model), guide, Y, 150)
    for name in standard:
        a, b = standard[name], dreg[name]
        error = ((a.var(0) + b.var(0)) / 150).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * error + 1e-9).all(), name
        if "scales" in name:
            assert (b.var(0) < 0.5 * a.var(0)).double().mean() > 0.7


class _Module(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        return self.model(*args)


def test_dreg_serves_autonormal_and_refuses_dependent_draws():
    def model(y):
        with pyro.plate("data", len(y)):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("b", dist.LogNormal(a, 1.0))
            pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    def dependent(y):
        with pyro.plate("data", len(y)):
            a = pyro.sample("a", dist.Normal(pyro.param("m", torch.tensor(0.0)), 1.0))
            pyro.sample("b", dist.LogNormal(a, 1.0))

    y, elbo = torch.ones(3), ImportanceWeightedELBO("data", 8, gradient_estimator="dreg")
    assert elbo.loss_and_grads(model, AutoNormal(model), y) > 0
    with pytest.raises(ValueError, match="'b' depends on 'a'"):
        elbo.loss_and_grads(model, dependent, y)
    annealed = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    with pytest.raises(ValueError, match=r"not defined for the chains of \['a', 'b'\]"):
        elbo.loss_and_grads(model, annealed, y)


def test_trains_through_svi_and_as_a_module(fixed_u):
    model, guide, Y, _ = fixed_u
    elbo = ImportanceWeightedELBO("data", 8, num_particles=2)
    before, _ = _estimate(elbo, model, guide, Y, draws=50)
    svi = SVI(model, guide, Adam({"lr": 0.2}), elbo)
    for _ in range(40):
        svi.step(Y)
    after, _ = _estimate(elbo, model, guide, Y, draws=50)
    assert after > before + 1.0
    module = elbo(_Module(model), guide)
    module.zero_grad()
    module(Y).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in guide.parameters())


class TestRefuses:
    def model(self, y, fault=None):
        with pyro.plate("data", 4):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            with pyro.plate("views", 3, subsample_size=2 if fault == "inner" else None, dim=-2):
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        if fault == "outside, in the guide":
            pyro.sample("a", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        if fault in ("outside", "outside, summed"):
            pyro.sample("z", dist.Normal(x.sum(-1, keepdim=fault == "outside"), 1.0), obs=torch.tensor(0.0))

    def guide(self, y, fault=None):
        with pyro.plate("data", 4):
            if fault == "discrete":
                pyro.sample("x", dist.Poisson(torch.tensor(1.0)))
            else:
                x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if fault == "outside, in the guide":
            pyro.sample("a", dist.Normal(x.sum(-1, keepdim=True), 1.0).to_event(1))

    @pytest.mark.parametrize(
        ("fault", "match"),
        [
            ("inner", "plate 'views' inside 'data' is subsampled"),
            ("outside", "site 'z' outside plate 'data' has batch shape"),
            ("outside, summed", "site 'z' outside plate 'data' has batch shape"),
            ("outside, in the guide", "site 'a' outside plate 'data' has batch shape"),
            ("discrete", "reparameterised, got 'x' with Poisson"),
        ],
    )
    def test_model_or_guide(self, fault, match):
        with pytest.raises(ValueError, match=match):
            ImportanceWeightedELBO("data", 5, max_plate_nesting=2).loss(self.model, self.guide, torch.tensor(0.0), fault)

    def test_a_loop_over_data(self):
        def model(y, idx):
            for i in pyro.plate("data", 4, subsample=idx):
                x = pyro.sample(f"x_{i}", dist.Normal(0.0, 1.0))
                pyro.sample(f"y_{i}", dist.Normal(x, 1.0), obs=y[i])

        def guide(y, idx):
            for i in pyro.plate("data", 4, subsample=idx):
                pyro.sample(f"x_{i}", dist.Normal(0.0, 1.0))

        with pytest.raises(ValueError, match=r"expected the data of plate 'data' side by side.*got a loop"):
            ImportanceWeightedELBO("data", 5, max_plate_nesting=1).loss(model, guide, torch.zeros(4), torch.tensor([0, 2]))

    @pytest.mark.parametrize("of", [ImportanceWeightedELBO().loss, partial(log_weights, local_plate="data")])
    def test_guides_that_draw_all_data_jointly(self, of):
        def model(y):
            with pyro.plate("data", 4):
                x = pyro.sample("x", dist.Normal(0.0, 1.0))
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)

        y, guide = torch.zeros(4), AutoDiagonalNormal(model)
        with pytest.raises(ValueError, match=r"got one that draws \['_AutoDiagonalNormal_latent'\] outside of it"):
            of(model, guide, y)
        assert ImportanceWeightedELBO(num_samples=1).loss(model, guide, y) > 0.0
        assert log_weights(model, guide, y).shape == (100,)

    def test_plate_and_arguments(self):
        with pytest.raises(ValueError, match="got local_plate='cells'"):
            ImportanceWeightedELBO("cells", 5).loss(self.model, self.guide, torch.tensor(0.0))
        with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
            ImportanceWeightedELBO("data", 0)
        with pytest.raises(ValueError, match="dreg"):
            ImportanceWeightedELBO("data", 2, gradient_estimator="sticking")
