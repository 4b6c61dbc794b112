"""Arguments of rows in the random-feature model, under the guide whose weights have closed forms."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI, MeanFieldELBO, fit
from pyro_lvgp.kernels.spectral import random_features
from pyro_lvgp.likelihoods import Gaussian, NegativeBinomial, Poisson
from pyro_lvgp.models import RandomFeatureLVM, RowArguments

pytestmark = pytest.mark.usefixtures("float64")

N, D, Q, F, P = 12, 3, 2, 5, 2


def make(rows, likelihood=None, num_data=N):
    likelihood = Gaussian(0.3) if likelihood is None else likelihood
    return RandomFeatureLVM(num_data, D, Q, num_frequencies=F, num_components=3, likelihood=likelihood, rows=rows)


def without_variance(model, Y, weights, X):
    """Guide with latents and frequencies that hardly vary."""
    guide = RandomFeatureGuide(model, weights=weights, frequencies="gaussian", init_scale=1e-7)
    guide(Y)
    guide.X.loc = X
    guide.omega.scale = torch.full_like(guide.omega.scale, 1e-7)
    return guide


def gaps(Y):
    return Y.masked_fill(torch.rand(Y.shape, generator=torch.Generator().manual_seed(3)) < 0.2, torch.nan)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        *((weights, "Gaussian") for weights in ("collapsed", "filled", "explicit", "shared")),
        *((weights, "counts") for weights in ("collapsed", "explicit", "shared")),
    ],
)
def test_a_weight_of_two_is_the_row_twice_in_bounds_and_closed_forms(weights, kind):
    make_likelihood = {"Gaussian": Gaussian, "counts": NegativeBinomial}[kind]
    Y = gaps(torch.randn(N, D) if kind == "Gaussian" else torch.poisson(3.0 * torch.ones(N, D)))
    weight, X = torch.tensor([0.0, 1.0, 2.0]).repeat(4), torch.randn(N, Q)
    copies = torch.arange(N).repeat_interleave(weight.long())
    results = []
    for rows, index in ((RowArguments(weight=weight), torch.arange(N)), (None, copies)):
        model = make(rows, make_likelihood(), len(index))
        guide = without_variance(model, Y[index], weights, X[index])
        if weights in ("explicit", "shared"):  # their first values average over a draw of latents
            for name, value in guide._update_weights(Y[index]).items():
                setattr(guide.a, name.removeprefix("guide.a."), value)
        with seeded(0):  # the same draws of the sites outside the plate, whose divergences have no closed form
            bound = MeanFieldELBO(max_plate_nesting=1, num_samples=1).loss(model, guide, Y[index])
        updated = {} if (weights, kind) == ("collapsed", "Gaussian") else guide._update_weights(Y[index])
        results.append({"bound": torch.tensor(bound), **updated})
    first = {name: value[copies] if name in ("guide.a.c", "guide.a.gaps") else value for name, value in results[0].items()}
    torch.testing.assert_close(first, results[1], rtol=1e-4, atol=1e-4)


def test_the_bound_is_the_evidence_of_features_covariates_and_known_errors():
    """Given latents and frequencies, y_d ~ N(c_d, ΦΦᵀ + diag(σ² + τ²)) with Φ = [σ_k φ(x), covariates]."""
    Y = gaps(torch.randn(N, D))
    rows = RowArguments(
        covariates=torch.randn(N, P), standard_error=torch.rand(N, D), prior_loc=torch.randn(N, Q), prior_scale=0.5
    )
    model, X = make(rows), torch.randn(N, Q)
    model.mean = torch.randn(D)
    guide = without_variance(model, Y, "collapsed", X)
    trace = poutine.trace(guide).get_trace(Y)
    of_model = poutine.trace(poutine.replay(model, trace)).get_trace(Y)
    features = torch.cat([random_features(X, guide.omega.loc), rows.covariates], -1)
    for d in range(D):
        seen = ~Y[:, d].isnan()
        cov = features[seen] @ features[seen].mT + (0.3 + rows.standard_error[seen, d].square()).diag()
        evidence = dist.MultivariateNormal(model.mean[d].expand(int(seen.sum())), cov).log_prob(Y[seen, d])
        a, q = trace.nodes["a"]["value"][d], trace.nodes["a"]["fn"]
        f = model.mean[d] + features @ a
        noise = (0.3 + rows.standard_error[:, d].square()).sqrt()
        joint = dist.Normal(f, noise).log_prob(Y[:, d].nan_to_num())[seen].sum() + dist.Normal(0.0, 1.0).log_prob(a).sum()
        torch.testing.assert_close(joint - q.log_prob(trace.nodes["a"]["value"])[d], evidence, rtol=1e-5, atol=1e-4)
    expected = dist.Normal(rows.prior_loc, 0.5).log_prob(X).sum(-1)
    torch.testing.assert_close(of_model.nodes["X"]["fn"].log_prob(X), expected)
    assert trace.nodes["a"]["value"].shape == (D, 2 * F + P)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(3.0)])
def test_sites_are_those_of_functions_with_the_logarithms_of_exposures(likelihood):
    """The slope of the site at the mean of g = f − c − log e is that of the expected log likelihood."""
    rows = RowArguments(exposure=0.5 + 4.0 * torch.rand(N), weight=torch.rand(N))
    model, Y = make(rows, likelihood), torch.poisson(2.0 * torch.ones(N, D))
    model.mean = torch.randn(D)
    g, variance = 0.3 * torch.randn(N, D, requires_grad=True), 0.1 * torch.rand(N, D)
    g = g.detach().requires_grad_()
    f = g + model.mean + rows.exposure.log()
    torch.testing.assert_close(model.offsets(rows) + g, f)
    value = (rows.weight[:, None] * likelihood.expected_log_prob(Y, f, variance, likelihood.params())).sum()
    (slope,) = torch.autograd.grad(value, g)
    h, w = model.weight_sites(Y, f.detach(), variance, rows)
    exact = isinstance(likelihood, Poisson)  # the Pólya-gamma bound touches at E f², not at the slope
    torch.testing.assert_close(h - w * g, slope, rtol=1e-5 if exact else 0.3, atol=1e-6 if exact else 0.15)


@pytest.mark.parametrize("weights", ["collapsed", "explicit", "shared"])
def test_updates_in_closed_form_never_lower_the_bound(weights):
    torch.manual_seed(0)
    e, x = torch.linspace(1.0, 20.0, N), torch.randn(N, Q)
    Y = gaps(torch.poisson(e[:, None] * (0.5 * x @ torch.randn(Q, D)).exp()))
    rows = RowArguments(exposure=e, weight=0.5 + torch.rand(N), covariates=torch.randn(N, P), prior_loc=x, prior_scale=0.1)
    model = make(rows, NegativeBinomial(5.0)).initialize(Y)
    guide = RandomFeatureGuide(model, weights=weights, frequencies="gaussian")
    vi = BlockCoordinateVI(
        model, guide, guide.blocks(), loss=MeanFieldELBO(max_plate_nesting=1, num_samples=1), check_updates=10
    )
    losses = [vi.step(Y) for _ in range(4)]
    assert sum(losses[-2:]) < sum(losses[:2])


def test_mini_batches_of_explicit_weights_select_the_arguments_of_their_rows():
    Y, rows = torch.randn(N, D), RowArguments(weight=torch.rand(N), covariates=torch.randn(N, P), standard_error=torch.rand(N))
    model, X = make(rows), torch.randn(N, Q)
    guide = without_variance(model, Y, "explicit", X)
    whole = guide._update_weights(Y)
    parts = [guide._update_weights(Y[idx], idx) for idx in torch.randperm(N).split(4)]
    for name, value in whole.items():
        torch.testing.assert_close(torch.stack([part[name] for part in parts]).mean(0), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make_guide", [MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=2, local_plate="data")]
)
def test_other_guides_and_predictions(make_guide):
    rows = RowArguments(
        weight=torch.ones(N), covariates=torch.randn(N, P), exposure=torch.ones(N), prior_loc=torch.randn(N, Q)
    )
    Y = torch.poisson(torch.ones(N, D))
    model = make(rows, Poisson()).initialize(Y)
    guide = make_guide(model)
    fit(model, guide, Y, num_steps=3, batch_size=6, progress=False)
    new = RowArguments(covariates=torch.zeros(1, P), exposure=torch.tensor([10.0]))
    X = torch.randn(4, Q)
    torch.testing.assert_close(
        model.predictive(guide, X, rows=new).f_mean.isfinite(), torch.ones(4, D, dtype=torch.bool), check_stride=False
    )
    assert model.infer_latents(guide, Y[:2], rows=new).mean.shape == (2, Q)
    assert model.reconstruct(guide, Y, rows=new, num_samples=2).mean.shape == (N, D)
