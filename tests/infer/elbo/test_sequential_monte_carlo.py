"""The sequential Monte Carlo bound of annealed guides, against factor analysis and the importance-weighted bound."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS
from pyro_lvgp.infer import CompiledELBO, ImportanceWeightedELBO, SequentialMonteCarloELBO, _compiled_loop
from tests.guides.annealed.guide._models import LOSSES, assert_paths_agree, value_and_gradients
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")
LOADINGS, NOISE = torch.tensor([[1.0, 0.5], [0.3, -1.0], [0.7, 0.7]]).double(), 0.5
COPIES = 4000


def factor_analysis(y, idx=None, copies=COPIES):
    """Factors of every copy of each row, and entries in a plate of their own."""
    with pyro.plate("copies", copies, dim=-2), pyro.plate("rows", 3, subsample=idx, dim=-1):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("entries", 3, dim=-3):
            mean = (x * LOADINGS[:, None, None]).sum(-1)
            pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def observed(*, copies=COPIES):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, generator=generator).double()
    rows = x @ LOADINGS.mT + NOISE * torch.randn(3, 3, generator=generator)
    covariance = LOADINGS @ LOADINGS.mT + NOISE**2 * torch.eye(3)
    evidence = dist.MultivariateNormal(torch.zeros(3), covariance).log_prob(rows)
    return rows.mT[:, None].expand(3, copies, 3), evidence


def make_guide(y, *, model=factor_analysis, **options):
    pyro.clear_param_store()
    options = {"num_steps": 3, "step_size": 0.15, "base_guide": MeanFieldGuide(model, init_scale=1.0)} | options
    guide = AutoAnnealedLangevin(model, local_plate="rows", **options)
    torch.manual_seed(4)
    guide(y)
    return guide


def log_estimates(bound_class, model, guide, y, *args, seed=5, **options):
    """Logarithm of the estimate of the evidence of each datum, whose sum is the bound."""
    found = []

    class Bound(bound_class):
        def particle_bound(self, model_sites, guide_sites):
            log_w, _, dims = self._weights(self._split(model_sites)[0], self._split(guide_sites)[0])
            found.append((log_w.logsumexp(0) - math.log(self.num_samples)).reshape([log_w.shape[d] for d in dims]))
            return super().particle_bound(model_sites, guide_sites)

    torch.manual_seed(seed)
    with torch.no_grad():
        loss = Bound("rows", 4, max_plate_nesting=3, **options).differentiable_loss(model, guide, y, *args)
    return found[0], loss


@pytest.mark.parametrize(
    ("dynamics", "learn_reverse", "threshold"),
    [("overdamped", False, 0.5), ("overdamped", True, 1.0), ("underdamped", False, 1.0), ("underdamped", True, 0.5)],
)
def test_estimates_of_factor_analysis_are_unbiased_and_their_logarithm_is_higher(dynamics, learn_reverse, threshold):
    y, evidence = observed()
    guide = make_guide(y, dynamics=dynamics, learn_reverse=learn_reverse)
    with torch.no_grad():
        for x in guide.reverse_kernels.parameters() if learn_reverse else ():
            x.copy_(0.1 * torch.randn_like(x))
    log_z, loss = log_estimates(SequentialMonteCarloELBO, factor_analysis, guide, y, resampling_threshold=threshold)
    assert loss == pytest.approx(-log_z.sum().item())
    ratio = (log_z - evidence).exp()
    error = ratio.std(0) / COPIES**0.5
    assert (error < 0.1).all()
    assert ((ratio.mean(0) - 1.0).abs() < 4.0 * error).all()
    independent, _ = log_estimates(ImportanceWeightedELBO, factor_analysis, guide, y)
    gain = (log_z - independent).mean(1)  # over the data of a copy
    assert gain.mean() > 4.0 * gain.std() / COPIES**0.5


@pytest.mark.parametrize("learn_reverse", [False, True])
def test_without_resampling_it_is_the_importance_weighted_bound_draw_for_draw(learn_reverse):
    model, Y = small()
    pyro.clear_param_store()
    guide = AutoAnnealedLangevin(model, num_steps=2, step_size=0.2, learn_reverse=learn_reverse)
    guide(Y)
    never = SequentialMonteCarloELBO(num_samples=3, resampling_threshold=0.0, max_plate_nesting=1)
    found = [value_and_gradients(model, guide, bound, Y) for bound in (LOSSES["weighted"](), never)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_traced_pure_and_compiled_chains_agree(monkeypatch, dynamics):
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    model, Y = small()
    bound = SequentialMonteCarloELBO(num_samples=5, resampling_threshold=0.9, max_plate_nesting=1)

    def make(target, **options):
        base = MeanFieldGuide(target, init_scale=1.0)
        return AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics, step_size=0.2, base_guide=base, **options)

    assert_paths_agree(make, model, Y, bound, Y)
    found = []
    for options in ({}, {"compile": True}):
        pyro.clear_param_store()
        guide = make(model, **options)
        guide(Y)
        found.append([value_and_gradients(model, guide, bound, Y) for _ in range(2)][-1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)
    assert all(x.isfinite().all() for x in found[0][1])
    assert found[0][0] != value_and_gradients(model, guide, ImportanceWeightedELBO(num_samples=5, max_plate_nesting=1), Y)[0]


def test_chains_of_a_datum_do_not_depend_on_other_data():
    y, _ = observed(copies=50)

    def model(y, idx=None):
        return factor_analysis(y, idx, 50)

    guide = make_guide(y, model=model, create_plates=lambda y, idx=None: pyro.plate("rows", 3, subsample=idx, dim=-1))
    results = []
    for scale in (1.0, 3.0):
        changed = y[..., :2] * torch.tensor([1.0, scale])
        log_z, loss = log_estimates(SequentialMonteCarloELBO, model, guide, changed, torch.tensor([2, 0]))
        assert loss == pytest.approx(-1.5 * log_z.sum().item())  # of 2 of 3 rows
        results.append(log_z)
    assert torch.equal(results[0][:, 0], results[1][:, 0])
    assert not torch.isclose(results[0][:, 1], results[1][:, 1]).any()


def two_sites(y):
    """A latent site in an inner plate, whose rows have no weights of their own."""
    with pyro.plate("rows", 3, dim=-1):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("inner", 2, dim=-2):
            z = pyro.sample("z", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal(x + z.sum(-2, keepdim=True), 1.0), obs=y)


def one_site(y):
    with pyro.plate("rows", 3):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def test_recorded_steps_are_the_eager_ones():
    y, losses = torch.tensor([2.0, -3.0, 0.5]), []
    for compile in (False, True):
        pyro.clear_param_store()
        base = MeanFieldGuide(one_site, init_scale=1.0)
        guide = AutoAnnealedLangevin(one_site, local_plate="rows", num_steps=2, step_size=0.1, base_guide=base)
        torch.manual_seed(4)
        guide(y)
        bound = SequentialMonteCarloELBO("rows", 4, resampling_threshold=0.9, max_plate_nesting=1)
        bound = CompiledELBO(bound, backend="torchscript") if compile else bound
        for seed in range(3):
            torch.manual_seed(seed)
            losses.append(bound.loss_and_grads(one_site, guide, y))
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-9)


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (two_sites, {"local_plate": "rows"}, r"expected one draw of each annealed site .* got \['z'\] in more plates"),
        (
            two_sites,
            {"local_plate": "rows", "sites": ["x"]},
            r"to be annealed, .* got \['z'\] drawn otherwise; leave out sites",
        ),
        (one_site, {}, "plate 'rows' to resample, got joint chains of all sites; pass the same local_plate"),
        (one_site, {"local_plate": "rows", "num_steps": 1}, "num_steps of 2 or more to resample between transitions, got 1"),
    ],
)
def test_chains_that_cannot_be_exchanged_are_refused(model, options, match):
    guide = AutoAnnealedLangevin(model, **{"num_steps": 2} | options)
    with pytest.raises(ValueError, match=match):
        SequentialMonteCarloELBO("rows", 3).loss(model, guide, torch.zeros(3))


def test_other_guides_and_arguments_out_of_range_are_refused():
    with pytest.raises(
        ValueError, match=r"transitions to resample between, .* got MeanFieldGuide; use ImportanceWeightedELBO"
    ):
        SequentialMonteCarloELBO("rows", 3).loss(one_site, MeanFieldGuide(one_site), torch.zeros(3))
    with pytest.raises(ValueError, match=r"resampling_threshold between 0 and 1, got 1\.5"):
        SequentialMonteCarloELBO(resampling_threshold=1.5)
    with pytest.raises(ValueError, match="num_samples of 2 or more to resample, got 1"):
        SequentialMonteCarloELBO(num_samples=1)
