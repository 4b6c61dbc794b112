import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from pyro.infer.reparam import LocScaleReparam
from pyro.optim import Adam
from torch import nn
from torch.distributions import AffineTransform, ExpTransform, constraints, kl_divergence

from pyro_lvgp.distributions import DrawnNormal
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import IndexNet, ZeroImputation


def hierarchical(y, idx=None):
    """Not one of ours: constrained, scalar, vector and matrix sites; nested plates; subsampling; a site with a dotted name."""
    scale = pyro.sample("noise.scale", dist.LogNormal(0.0, 1.0))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    loading = pyro.sample("loading", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    columns = pyro.plate("columns", 3, dim=-2)
    with columns:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10, subsample=idx, dim=-1):
        x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
        loc = (x @ loading * weights).mT + shift
        with columns:
            pyro.sample("y", dist.Normal(loc, scale), obs=y)


def _plates(y, idx=None):
    return pyro.plate("data", 10, subsample=idx, dim=-1)


@pytest.fixture
def y():
    return torch.randn(3, 10)


def test_emits_plain_distributions_with_the_model_s_shapes(y):
    guide = MeanFieldGuide(hierarchical, covariance={"weights": "full"}, create_plates=_plates)
    trace = poutine.trace(guide).get_trace(y)
    model = poutine.trace(poutine.replay(hierarchical, trace)).get_trace(y)
    for name in ("noise.scale", "weights", "loading", "shift", "x"):
        assert trace.nodes[name]["fn"].batch_shape == model.nodes[name]["fn"].batch_shape
        assert trace.nodes[name]["fn"].event_shape == model.nodes[name]["fn"].event_shape
    assert isinstance(trace.nodes["x"]["fn"], dist.MultivariateNormal)  # full, as its prior
    assert isinstance(trace.nodes["loading"]["fn"].base_dist, dist.Normal)


@pytest.mark.usefixtures("float64")
def test_the_density_of_a_draw_needs_no_solution():
    loc, scale_tril = torch.randn(3, 2, requires_grad=True), torch.tensor([[1.0, 0.0], [0.5, 2.0]], requires_grad=True)
    q = DrawnNormal(loc, scale_tril=scale_tril).expand((5, 3))
    x = q.rsample((4,))
    assert x.shape == (4, 5, 3, 2)
    fast, slow = (q.log_prob(value) for value in (x, x.clone()))
    torch.testing.assert_close(fast, slow)
    assert torch.autograd.grad(fast.sum(), loc, retain_graph=True, allow_unused=True) == (None,)
    of_loc, of_factor = torch.autograd.grad(slow.sum(), [loc, scale_tril], retain_graph=True)
    torch.testing.assert_close(of_loc, torch.zeros(3, 2), atol=1e-12, rtol=0.0)
    torch.testing.assert_close(torch.autograd.grad(fast.sum(), scale_tril)[0], of_factor.tril())


def test_the_density_of_a_draw_keeps_its_digits_where_the_factor_is_nearly_singular():
    scale_tril = torch.full((40, 40), 0.9).tril(-1) + 1e-3 * torch.eye(40)
    q = DrawnNormal(torch.randn(40), scale_tril=scale_tril)
    x = q.rsample()
    most = 40 * (3.0 * math.log(10.0) - 0.5 * math.log(2.0 * math.pi))
    assert most - 60.0 < q.log_prob(x) < most
    assert not most - 60.0 < q.log_prob(x.clone()) < most  # the solution in float32 is not the noise


def test_subsampled_call_takes_the_rows_of_the_batch(y):
    guide = MeanFieldGuide(hierarchical, create_plates=_plates)
    guide(y)
    guide.locs.x = torch.arange(20.0).reshape(10, 2)
    idx = torch.tensor([7, 2])
    trace = poutine.trace(guide).get_trace(y[:, idx], idx)
    assert torch.equal(trace.nodes["x"]["fn"].loc, guide.locs.x[idx])
    assert trace.nodes["x"]["scale"] == 5.0


def test_first_call_may_be_a_mini_batch(y):
    """Initial values for all rows reach all rows, though the first call sees three of them."""
    start = torch.arange(20.0).reshape(10, 2)
    guide = MeanFieldGuide(hierarchical, init_loc_fn=init_to_value(values={"x": start}), create_plates=_plates)
    idx = torch.tensor([7, 2, 4])
    guide(y[:, idx], idx)
    assert torch.equal(guide.locs.x.detach(), start)


@pytest.mark.parametrize("rows", [[7, 2, 4], range(10)], ids=["batch", "all"])
def test_initial_values_have_the_shape_of_their_site(rows):
    """A value that all members of a plate share starts them, and does not tie them; others of another shape are refused."""

    def model(y, idx=None):
        with pyro.plate("rows", 10, subsample=idx, dim=-2):
            u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("columns", 4, dim=-1):
                pyro.sample("y", dist.Normal(u.sum(-1), 1.0), obs=y)

    def plates(y, idx=None):
        return pyro.plate("rows", 10, subsample=idx, dim=-2)

    def locs_from(start):
        guide = MeanFieldGuide(model, init_loc_fn=init_to_value(values={"u": start}), create_plates=plates)
        guide(torch.zeros(len(rows), 4), torch.tensor(rows))
        return guide.locs.u

    shared = torch.tensor([1.0, 2.0])
    assert torch.equal(locs_from(shared), shared.expand(10, 1, 2))
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"initial value of site 'u' of shape \[10, 1, 2\], got \[10, 2\]"):
        locs_from(torch.zeros(10, 2))


@pytest.mark.parametrize("initial", [init_to_mean, init_to_value(values={"scale": torch.tensor(0.0)})])
def test_initial_values_are_inside_the_support(initial):
    def model():
        pyro.sample("scale", dist.HalfCauchy(1.0))  # whose mean is infinite

    with pytest.raises(ValueError, match=r"initial value of site 'scale' inside its support.*init_to_median"):
        MeanFieldGuide(model, init_loc_fn=initial)()


def test_reparameterised_sites_begin_where_the_model_does():
    """From values of the site that they replace, though the first call sees some rows only."""

    def model(y, idx=None):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3, subsample=idx):
            x = pyro.sample("x", dist.Normal(loc, 2.0))
            pyro.sample("y", dist.Normal(x, 0.5), obs=y)

    model, y = poutine.reparam(model, {"x": LocScaleReparam(0.0)}), torch.tensor([1.0, 2.0, 4.0])
    initial = init_to_value(values={"loc": torch.tensor(1.0), "x": torch.tensor([5.0, 7.0])})
    guide = MeanFieldGuide(model, init_loc_fn=initial, create_plates=lambda y, idx=None: pyro.plate("data", 3, subsample=idx))
    guide(y[:2], torch.tensor([0, 1]))
    torch.testing.assert_close(guide.locs.x_decentered.detach(), torch.tensor([2.0, 3.0, 2.0]))
    # With x = loc + 2 z: E log p − log q of the Gaussians over loc and the z.
    loc, z, sd = torch.tensor(1.0), torch.tensor([2.0, 3.0, 2.0]), 0.1
    expected = dist.Normal(loc + 2.0 * z, 0.5).log_prob(y).sum() - 3 * (sd**2 + 4.0 * sd**2) / (2.0 * 0.25)
    expected -= sum(kl_divergence(dist.Normal(m, sd), dist.Normal(0.0, 1.0)) for m in (loc, *z))
    loss = TraceMeanField_ELBO(num_particles=4000, vectorize_particles=True).loss(model, guide, y)
    assert loss == pytest.approx(-expected.item(), abs=0.3)


def test_mean_field_bound_uses_the_analytic_kl(y):
    model = BayesianGPLVM(10, 3, 2, num_inducing=4)
    for covariance in ({}, {"X": "full"}):
        pyro.clear_param_store()
        guide = MeanFieldGuide(model, covariance=covariance)
        trace = poutine.trace(guide).get_trace(y.mT)
        prior = poutine.trace(poutine.replay(model, trace)).get_trace(y.mT)
        for name in ("u", "X"):
            assert kl_divergence(trace.nodes[name]["fn"], prior.nodes[name]["fn"]).shape == prior.nodes[name]["fn"].batch_shape


def test_recovers_a_correlated_gaussian_posterior():
    """y_n ~ N(Wx, σ²): the full covariance finds the exact posterior, the diagonal one its mean and conditional scales."""
    W, noise = torch.tensor([[1.0, 0.5], [0.2, 1.0], [0.7, 0.7]]), 0.5
    y = torch.tensor([1.0, -0.5, 0.3])

    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ W.mT, noise).to_event(1), obs=y)

    precision = torch.eye(2) + W.mT @ W / noise**2
    loc = torch.linalg.solve(precision, W.mT @ y / noise**2)
    for kind, covariance in (("full", precision.inverse()), ("diagonal", torch.diag(1 / precision.diagonal()))):
        pyro.clear_param_store()
        guide = MeanFieldGuide(model, covariance={"x": kind})
        loss = TraceMeanField_ELBO(num_particles=32, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(model, guide, Adam({"lr": 0.02}), loss)
        for _ in range(600):
            svi.step(y)
        fitted = guide._posterior("x", ())
        torch.testing.assert_close(fitted.mean, loc, rtol=0.0, atol=0.05)
        torch.testing.assert_close(fitted.variance, covariance.diagonal(), rtol=0.15, atol=0.0)
        if kind == "full":
            torch.testing.assert_close(fitted.covariance_matrix, covariance, rtol=0.0, atol=0.03)


def test_encoders_return_pairs_and_need_data(unchecked):
    model = BayesianGPLVM(6, 3, 2, num_inducing=4)
    Y = torch.randn(6, 3)
    with pytest.raises(TypeError, match="expected loc and scale from the encoder of 'X', got Tensor"):
        MeanFieldGuide(model, encoders={"X": nn.Linear(3, 2)})(Y)
    pyro.clear_param_store()
    guide = MeanFieldGuide(model, encoders={"X": IndexNet(3, 2)})
    guide(Y)
    with pytest.raises(ValueError, match="expected the arguments of the model for the encoder of 'X', got none"):
        guide.median()


@pytest.mark.parametrize(
    ("encoder", "covariance", "match"),
    [
        ({"latent_dim": 3}, "diagonal", r"loc \[2\] and scale \[2\] for each row .* got \[6, 3\] and \[6, 3\]; give it"),
        ({"latent_dim": 2}, "full", r"scale \[2, 2\] for each row from .* of 'X', got \[6, 2\] and \[6, 2\]; give it"),
        ({"latent_dim": 2, "covariance": "full"}, "diagonal", r"got \[6, 2\] and \[6, 2, 2\]; give it"),
    ],
)
def test_encoders_fit_their_sites(encoder, covariance, match):
    model = BayesianGPLVM(6, 3, 2, num_inducing=4)
    guide = MeanFieldGuide(model, covariance={"X": covariance}, encoders={"X": ZeroImputation(3, **encoder)})
    with pytest.raises(ValueError, match=match):
        guide(torch.randn(6, 3))


@pytest.mark.parametrize("is_annealed", [False, True])
def test_encoders_serve_data_of_another_size_in_plates_that_know_it(is_annealed):
    def model(y):
        with pyro.plate("data", len(y)):
            x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    def make(**options):
        base = MeanFieldGuide(model, encoders={"x": ZeroImputation(2, 2)}, **options)
        return AutoAnnealedLangevin(model, num_steps=2, base_guide=base) if is_annealed else base

    guide = make()
    guide(torch.randn(4, 2))
    with pytest.raises(ValueError, match=r"expected 4 rows in plate 'data' from the encoder of 'x', got 9; .*create_plates="):
        guide(torch.randn(9, 2))
    pyro.clear_param_store()
    guide = make(create_plates=lambda y: pyro.plate("data", len(y)))
    assert [len(guide(torch.randn(rows, 2))["x"]) for rows in (4, 9, 1)] == [4, 9, 1]


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_amortised_by_an_encoder(covariance):
    Y = torch.randn(10, 3)
    Y[torch.rand(Y.shape) < 0.3] = torch.nan
    Y[:, 0] = torch.nan_to_num(Y[:, 0])
    model = BayesianGPLVM(10, 3, 2, num_inducing=4).initialize(Y)
    encoder = ZeroImputation(3, 2, covariance=covariance)
    guide = MeanFieldGuide(model, covariance={"X": covariance}, encoders={"X": encoder})
    svi = SVI(model, guide, Adam({"lr": 0.01}), TraceMeanField_ELBO())
    before = [p.detach().clone() for p in encoder.parameters()]
    idx = torch.tensor([1, 5, 8])
    svi.step(Y[idx], idx)
    assert not any(torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))
    assert guide.median(Y)["X"].shape == (10, 2)
    loc, _ = encoder(Y)
    assert torch.equal(model.infer_latents(guide, Y, num_steps=0).mean, loc)


def test_median_and_quantiles(y):
    guide = MeanFieldGuide(hierarchical, create_plates=_plates, init_scale=0.3)
    guide(y)
    low, middle, high = guide.quantiles([0.05, 0.5, 0.95])["noise.scale"]
    with pyro.plate("draws", 4000, dim=-5):
        draws = guide(y)["noise.scale"].detach().flatten()
    assert len(draws) == 4000
    assert (draws < low).float().mean() == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / 4000) ** 0.5)
    assert (draws < high).float().mean() == pytest.approx(0.95, abs=4 * (0.05 * 0.95 / 4000) ** 0.5)
    assert torch.equal(middle, guide.median()["noise.scale"])
    assert guide.median()["weights"].sum() == pytest.approx(1.0)


class NegativeLogNormal(dist.TransformedDistribution):
    support = constraints.less_than(0.0)

    def __init__(self, loc, scale):
        super().__init__(dist.Normal(loc, scale), [ExpTransform(), AffineTransform(0.0, -1.0)])


@pytest.mark.parametrize("is_annealed", [False, True])
def test_quantiles_where_the_support_ends_above(is_annealed):
    """Low quantiles of x = −exp(z) are those of high z."""

    def model():
        pyro.sample("x", NegativeLogNormal(torch.zeros(2), 1.0).to_event(1))

    guide = MeanFieldGuide(model, init_loc_fn=lambda site: -torch.ones(2))
    guide = AutoAnnealedLangevin(model, num_steps=1, base_guide=guide) if is_annealed else guide
    guide()
    low, middle, high = guide.quantiles([0.05, 0.5, 0.8])["x"]
    draws = torch.stack([guide()["x"] for _ in range(1000)]).detach()
    assert ((draws < low).float().mean(0) - 0.05).abs().max() < 0.1
    assert ((draws < high).float().mean(0) - 0.8).abs().max() < 0.2
    assert torch.equal(middle, guide.median()["x"])


@pytest.mark.parametrize("local", [True, False])
def test_module_local_parameters(y, local):
    with pyro.settings.context(module_local_params=local):
        model = BayesianGPLVM(10, 3, 2, num_inducing=4)
        for encoders in ({"X": ZeroImputation(3, 2)}, {}):
            guide = MeanFieldGuide(model, encoders=encoders)
            pyro.clear_param_store()
            svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())
            svi.step(y.mT)
            before = {name: p.detach().clone() for name, p in guide.named_parameters()}
            svi.step(y.mT)
            assert before
            for name, parameter in guide.named_parameters():
                assert not torch.equal(before[name], parameter), name


def test_state_dict_and_pickle(y):
    def make():
        guide = MeanFieldGuide(hierarchical, create_plates=_plates)
        guide(y)
        return guide

    with pyro.settings.context(module_local_params=True):
        first, second = make(), make()
        first.locs.x = torch.randn(10, 2)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first.median()["x"], second.median()["x"])
        assert torch.equal(pickle.loads(pickle.dumps(first)).median()["x"], first.median()["x"])


def test_serves_predictive(y):
    guide = MeanFieldGuide(hierarchical, create_plates=_plates)
    guide(y)
    assert Predictive(hierarchical, guide=guide, num_samples=4)(y)["x"].shape[0] == 4


def test_errors(y):
    with pytest.raises(ValueError, match=r"one of .*'weights'.*got 'nope'"):
        MeanFieldGuide(hierarchical, covariance={"nope": "full"})(y)
    with pytest.raises(ValueError, match="before its first call"):
        MeanFieldGuide(hierarchical).median()
    for init_scale in (0.0, math.inf):
        with pytest.raises(ValueError, match="positive and finite init_scale"):
            MeanFieldGuide(hierarchical, init_scale=init_scale)
    with pytest.raises(ValueError, match="create_plates"):
        MeanFieldGuide(hierarchical)(y[:, :4], torch.arange(4))
    with pytest.raises(ValueError, match="vector-valued"):
        MeanFieldGuide(hierarchical, covariance={"loading": "full"})(y)


@pytest.mark.parametrize("rows", [[1, 0, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0]])
def test_all_rows_in_another_order_are_refused(rows):
    """Pyro would leave the parameters in theirs."""
    Y, idx = torch.randn(6, 3), torch.tensor(rows)
    guide = MeanFieldGuide(BayesianGPLVM(6, 3, 2, num_inducing=4))
    guide(Y, torch.arange(6))
    with pytest.raises(ValueError, match="expected fewer rows than the 6 of plate 'data', or all of them in order"):
        guide(Y[idx], idx)
    pyro.clear_param_store()
    amortised = MeanFieldGuide(BayesianGPLVM(6, 3, 2, num_inducing=4), encoders={"X": ZeroImputation(3, 2)})
    amortised(Y[idx], idx)


@pytest.mark.usefixtures("unchecked")
def test_unknown_covariance():
    with pytest.raises(ValueError, match='"diagonal" or "full"'):
        MeanFieldGuide(hierarchical, covariance={"x": "low-rank"})


def test_training_leaves_the_initial_values_of_the_model_alone():
    Y = torch.randn(12, 3)
    model = BayesianGPLVM(12, 3, 2, num_inducing=4).initialize(Y)
    before = {name: value.clone() for name, value in model.initial_values.items()}
    guide = MeanFieldGuide(model)
    guide(Y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(1.0)
    assert before.keys() == {"X", "u"}
    for name, value in before.items():
        assert torch.equal(model.initial_values[name], value)


def test_an_encoder_may_be_of_a_site_of_a_part():
    """Whose name has a dot in it, as those of models made of models have."""

    def model(y):
        with pyro.plate("data", len(y), dim=-1):
            x = pyro.sample("part.x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(x.sum(-1, keepdim=True), 1.0).expand([len(y), 3]).to_event(1), obs=y)

    guide = MeanFieldGuide(model, encoders={"part.x": IndexNet(3, 2)})
    y = torch.randn(4, 3)
    assert guide(y)["part.x"].shape == (4, 2)
    torch.testing.assert_close(guide.median(y)["part.x"], guide.encoders.part.x(y)[0])


@pytest.mark.parametrize("make", [MeanFieldGuide, AutoAnnealedLangevin])
@pytest.mark.parametrize("name", ["type", "net.half"])
def test_sites_named_as_methods_of_modules_are_refused(make, name):
    def model():
        pyro.sample(name, dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=f"other than those of methods of modules, got '{name.removeprefix('net.')}'; rename"):
        make(model)()


def test_pickles_leave_out_models_that_pickle_refuses(y):
    def within_a_function(y):
        return hierarchical(y)

    guide = MeanFieldGuide(within_a_function, create_plates=_plates)
    guide(y)
    assert copy.deepcopy(guide).model is within_a_function
    again = pickle.loads(pickle.dumps(guide))
    assert torch.equal(again.median()["x"], guide.median()["x"])
    with pytest.raises(
        RuntimeError, match="an unpickled MeanFieldGuide without, since pickle refuses the model; define it at"
    ):
        _ = again.model
    assert pickle.loads(pickle.dumps(MeanFieldGuide(hierarchical))).model is hierarchical
