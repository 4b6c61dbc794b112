"""First call of annealed guides: prototypes, first scales and step sizes."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, init_to_value
from pyro.infer.importance import vectorized_importance_weights
from pyro.optim import Adam

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed._chain import curvatures
from pyro_lvgp.infer import JointAdam, fit
from tests.guides.annealed.guide._models import standard_error
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")
X = torch.linspace(-1.0, 1.0, 500, dtype=torch.float64)
Y = 2.0 * X + 0.3 * torch.sin(40.0 * X)


def regression(scale=10.0):
    """Regression with a posterior a hundred times narrower than its prior, and sites of several supports."""
    slope = pyro.sample("slope", dist.Normal(0.0, scale))
    noise = pyro.sample("noise", dist.HalfNormal(scale))
    with pyro.plate("rows", 500):
        pyro.sample("y", dist.Normal(slope * X, noise), obs=Y)


def counts():
    """Log rates of groups whose exposures differ by six orders of magnitude."""
    exposure = torch.logspace(0.0, 6.0, 20)
    with pyro.plate("groups", 20):
        f = pyro.sample("f", dist.Normal(0.0, 3.0))
        pyro.sample("y", dist.Poisson(exposure * f.exp()), obs=(0.1 * exposure).round())


def bound(guide, model, num=100):
    values = vectorized_importance_weights(model, guide, num_samples=num, max_plate_nesting=1)[0].detach()
    return values.mean(), standard_error(values)


def quadratic(hessian):
    """Score of a Gaussian far from its mode."""
    return lambda z: (1000.0 - z[0] @ hessian,)


def test_curvatures_are_the_diagonal_of_the_hessian_whatever_the_gradient():
    diagonal = torch.tensor([1e-2, 1.0, 1e4])
    (found,) = curvatures(partial(map, quadratic(diagonal.diag())), (torch.zeros(5, 3),))
    assert torch.allclose(found, diagonal.expand(5, 3))


def test_curvatures_are_unbiased_with_correlated_coordinates():
    A = torch.randn(3, 3)
    (found,) = curvatures(partial(map, quadratic(A @ A.mT)), (torch.zeros(20_000, 3),))
    assert ((found.mean(0) - (A @ A.mT).diagonal()).abs() < 4.0 * standard_error(found)).all()


def test_the_first_base_has_the_modes_and_the_scales_of_a_posterior_that_factorises():
    guide = AutoAnnealedLangevin(counts)
    guide()
    exposure, mode = torch.logspace(0.0, 6.0, 20), torch.full((20,), 0.1).log()
    for _ in range(50):
        mode = mode + ((0.1 * exposure).round() - exposure * mode.exp() - mode / 9.0) / (exposure * mode.exp() + 1.0 / 9.0)
    stddev = (1.0 / 9.0 + exposure * mode.exp()).rsqrt()
    assert ((guide.origin - mode).abs() < stddev).all()
    assert torch.allclose((guide.factor @ guide.factor.mT).diagonal().sqrt(), stddev, rtol=0.5)
    assert torch.equal(guide.base_guide.locs.f, torch.zeros(20))
    assert torch.allclose(guide.base_guide.scales.f, torch.ones(20))


@pytest.mark.parametrize("local_plate", [None, "rows"])
def test_the_first_bound_of_a_gaussian_posterior_is_the_evidence(local_plate):
    """Whichever sites are annealed, and however far away the data are."""
    y = torch.tensor([900.0, -3.0, 40.0])

    def model():
        with pyro.plate("rows", 3):
            x = pyro.sample("x", dist.Normal(0.0, 100.0))
            pyro.sample("y", dist.Normal(x, 0.1), obs=y)

    guide = AutoAnnealedLangevin(model, local_plate=local_plate)
    evidence = dist.Normal(0.0, (100.0**2 + 0.1**2) ** 0.5).log_prob(y).sum()
    found, error = bound(guide, model, num=200)
    assert -0.1 < found - evidence < 4.0 * error


@pytest.mark.parametrize("vectorize", [False, True])
def test_the_first_base_does_not_depend_on_the_bound_that_calls_first(vectorize):
    guides = [AutoAnnealedLangevin(counts, num_steps=2) for _ in range(2)]
    torch.manual_seed(0)
    guides[0]()
    torch.manual_seed(0)
    Trace_ELBO(num_particles=3, vectorize_particles=vectorize, max_plate_nesting=1).loss(counts, guides[1])
    torch.testing.assert_close(guides[0].origin, guides[1].origin)
    torch.testing.assert_close(guides[0].factor, guides[1].factor)


def test_many_coordinates_have_no_correlations():
    def model():
        with pyro.plate("rows", 501):
            x = pyro.sample("x", dist.Normal(0.0, 100.0))
            pyro.sample("y", dist.Normal(x, 0.1), obs=torch.linspace(-50.0, 50.0, 501))

    guide = AutoAnnealedLangevin(model, num_steps=2)
    guide()
    torch.testing.assert_close(guide.factor, torch.full((501,), (0.1**-2 + 100.0**-2) ** -0.5))
    torch.testing.assert_close(guide.origin, torch.linspace(-50.0, 50.0, 501), atol=1e-3, rtol=0.0)


def test_stored_parameters_keep_the_coordinates_of_the_chains():
    guide = AutoAnnealedLangevin(counts, num_steps=2)
    fit(counts, guide, num_steps=3, progress=False)
    torch.manual_seed(1)
    expected, stored = guide()["f"], {name: value.detach() for name, value in guide.named_parameters()}
    other = AutoAnnealedLangevin(counts, num_steps=2)
    other()
    other.load_state_dict(guide.state_dict())
    torch.manual_seed(1)
    torch.testing.assert_close(other()["f"], expected)
    assert {"origin_unconstrained", "factor_unconstrained"} <= stored.keys()


def test_base_guides_of_the_user_keep_their_parameters():
    base = MeanFieldGuide(counts, init_loc_fn=init_to_value(values={"f": torch.ones(20)}), init_scale=0.5)
    guide = AutoAnnealedLangevin(counts, base_guide=base)
    guide()
    assert torch.allclose(guide.base_guide.scales.f, torch.tensor(0.5))
    assert torch.equal(guide.base_guide.locs.f, torch.ones(20))


def test_mini_batches_scale_all_rows_alike():
    model, data = small()
    guide = AutoAnnealedLangevin(model)
    guide(data[:3], torch.arange(3))
    scales = guide.base_guide.scales.X
    assert torch.equal(scales, scales[:1].expand_as(scales))


@pytest.mark.parametrize("model", [regression, counts])
@pytest.mark.parametrize("seed", range(2))
def test_the_first_bound_is_at_least_that_of_the_base(model, seed):
    torch.manual_seed(seed)
    base, error = bound(MeanFieldGuide(model), model)
    torch.manual_seed(seed)
    annealed, other = bound(AutoAnnealedLangevin(model), model)
    assert annealed > base - 2.0 * torch.hypot(error, other)
    guide = AutoAnnealedLangevin(model)
    annealed, other = bound(guide, model)
    own, error = bound(guide.without_transitions, model)
    assert annealed > own - 2.0 * torch.hypot(error, other)


@pytest.mark.parametrize("model", [regression, counts])
def test_fits_are_better_than_those_of_the_base(model):
    base, guide = MeanFieldGuide(model), AutoAnnealedLangevin(model)
    for each in (base, guide):
        fit(model, each, num_steps=30, optim=JointAdam(lr=0.05), progress=False)
    (alone, error), (annealed, other) = bound(base, model), bound(guide, model)
    assert annealed > alone + 2.0 * torch.hypot(error, other)


@pytest.mark.parametrize("seed", range(20))
def test_models_do_not_run_at_draws_from_vague_priors(seed):
    def vague(y):
        x = pyro.sample("x", dist.Normal(0.0, 1000.0))
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)

    torch.manual_seed(seed)
    base = MeanFieldGuide(vague, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))
    guide = AutoAnnealedLangevin(vague, base_guide=base)
    guide(torch.tensor(3.0))
    assert guide.sample_posterior(3, torch.tensor(3.0))["x"].shape == (3,)
    assert torch.isfinite(guide.median(torch.tensor(3.0), num_samples=3)["x"])


def test_flat_priors_need_an_initial_value():
    def flat():
        x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))

    base = MeanFieldGuide(flat, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))
    guide = AutoAnnealedLangevin(flat, base_guide=base)
    fit(flat, guide, num_steps=60, optim=JointAdam(lr=0.05), progress=False)
    draws = guide.sample_posterior(2000)["x"]
    assert abs(draws.mean() - 2.0) < 0.3


@pytest.mark.parametrize("make", [MeanFieldGuide, AutoAnnealedLangevin])
def test_latent_deltas_are_refused_by_name(make):
    def model():
        pyro.sample("known", dist.Delta(torch.tensor(1.0)))

    with pytest.raises(ValueError, match=r"got a Delta at 'known'.*pyro.deterministic\('known', value\)"):
        make(model)()


def test_parts_of_guide_lists_are_refused_where_they_anneal_a_blocked_model():
    guide = AutoGuideList(regression)
    guide.append(AutoDelta(poutine.block(regression, expose=["noise"])))
    guide.append(AutoAnnealedLangevin(poutine.block(regression, hide=["noise"])))
    with pytest.raises(ValueError, match=r"poutine.block hides, as for a part of an AutoGuideList.* sites=\["):
        guide()


def test_hidden_discrete_sites_are_to_be_summed_out():
    def model():
        z = pyro.sample("z", dist.Bernoulli(0.5))
        x = pyro.sample("x", dist.Normal(z, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match="sum out discrete sites in the model"):
        AutoAnnealedLangevin(poutine.block(model, hide=["z"]))()


def test_sites_that_are_not_in_the_density_are_refused_by_name():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("unused", dist.Normal(0.0, 1.0).mask(False))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))

    with pytest.raises(ValueError, match=r"does not depend on \['unused'\].* sites=\["):
        AutoAnnealedLangevin(model)()
    with pytest.raises(ValueError, match=r"does not depend on \['x', 'unused'\]"):
        AutoAnnealedLangevin(poutine.mask(model, mask=False))()
    assert AutoAnnealedLangevin(model, sites=["x"])().keys() == {"x", "unused"}


def test_models_that_ask_for_the_mask_have_the_same_posterior_in_predictive():
    def model(y=None):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if poutine.get_mask() is not False:
            pyro.factor("y", -0.5 * ((x - 5.0) / 0.5).square())

    guide = AutoAnnealedLangevin(model)
    fit(model, guide, num_steps=20, optim=JointAdam(lr=0.05), progress=False)
    direct = guide.sample_posterior(2000, num_candidates=1)["x"]
    predicted = Predictive(model, guide=guide, num_samples=2000, return_sites=["x"], parallel=True)()["x"]
    assert abs(direct.mean() - 4.0) < 0.2
    assert abs(direct.mean() - predicted.mean()) < 4.0 * torch.hypot(standard_error(direct), standard_error(predicted))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_jitted_bounds_are_refused_by_name():
    guide = AutoAnnealedLangevin(regression, num_steps=2)
    guide()
    with pytest.raises(ValueError, match=r"JitTrace_ELBO, .*; use CompiledELBO\(Trace_ELBO\(\)\)"):
        SVI(regression, guide, Adam({"lr": 0.01}), JitTrace_ELBO(ignore_jit_warnings=True)).step()


def test_draws_of_models_that_do_not_broadcast_are_those_one_by_one_with_deterministic_sites():
    features = torch.randn(30, 3)

    def model(y):
        beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        mean = pyro.deterministic("mean", features @ beta)
        with pyro.plate("rows", 30):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    y = features @ torch.tensor([1.0, -1.0, 0.5])
    guide = AutoAnnealedLangevin(model, num_steps=2)
    fit(model, guide, y, num_steps=5, progress=False)
    draws = guide.sample_posterior(10, y)
    assert draws["beta"].shape == (10, 3)
    assert torch.allclose(draws["mean"], draws["beta"] @ features.mT)
    medians = guide.median(y, num_samples=10)
    assert medians.keys() == {"beta", "mean"}
    assert medians["mean"].shape == (30,)


def test_models_that_broadcast_wrongly_without_an_error_are_drawn_one_by_one():
    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("total", x.sum())
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(1.0))

    guide = AutoAnnealedLangevin(model)
    draws = guide.sample_posterior(4)
    assert torch.allclose(draws["total"], draws["x"].sum(-1))


def test_models_that_broadcast_are_drawn_at_once():
    guide, calls = AutoAnnealedLangevin(counts), []
    guide()
    guide._model = (lambda: calls.append(1) or counts(),)
    assert guide.sample_posterior(50)["f"].shape == (50, 20)
    assert len(calls) < 10 * (guide.num_steps + 2)


@pytest.mark.parametrize("vectorize", [False, True])
def test_draws_of_the_first_call_are_those_of_the_adapted_base(vectorize):
    """Sites that are not annealed have densities under the distribution that they are drawn from, at the first step too."""
    difficulty = torch.linspace(-3.0, 3.0, 10)
    answers = (torch.randn(200, 1) > difficulty + torch.randn(200, 10)).double()

    def model(answers):
        b = pyro.sample("difficulty", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        with pyro.plate("persons", 200, dim=-1):
            x = pyro.sample("ability", dist.Normal(0.0, 1.0))
            pyro.sample("answers", dist.Bernoulli(logits=x[..., None] - b).to_event(1), obs=answers)

    guide = AutoAnnealedLangevin(model, local_plate="persons", num_steps=2)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=vectorize, max_plate_nesting=1)
    first = elbo.loss(model, guide, answers)
    later = torch.tensor([elbo.loss(model, guide, answers) for _ in range(20)])
    assert abs(first - later.mean()) < 5.0 * later.std()
