"""Properties of models for drawn sizes, masks, permutations, precisions and seeds."""

import io
import pickle

import numpy as np
import pyro
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyro import poutine

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Cosine, Linear, Matern, Periodic, RationalQuadratic, SpectralMixture
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, LogNormal, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.models import BayesianGPLVM, LinearGPVAE
from pyro_lvgp.ops.joint_sites import joint_log_normaliser
from pyro_lvgp.sklearn import GPLVM

few = settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**31 - 1)
KERNELS = {
    "RBF": RBF(2),
    "Matern": Matern(2, 2.5),
    "Periodic": Periodic(2),
    "Linear": Linear(2),
    "Cosine": Cosine(2),
    "RationalQuadratic": RationalQuadratic(2),
    "SpectralMixture": SpectralMixture(2, 2),
    "sum": RBF(2) + Linear(2),
    "product": RBF(2) * Periodic(2),
}
LIKELIHOODS = {
    "Gaussian": Gaussian(0.2),
    "Gaussian per column": Gaussian(torch.tensor([0.1, 0.2, 0.3, 0.4]), data_dim=4),
    "StudentT": StudentT(),
    "LogNormal": LogNormal(),
    "Poisson": Poisson(),
    "NegativeBinomial": NegativeBinomial(),
    "Bernoulli": Bernoulli(),
    "Binomial": Binomial(5),
}


def draw_data(seed, dtype=torch.float64, rows=8, columns=4):
    """Data with missing entries, but an observed one in each row and column."""
    generator = torch.Generator().manual_seed(seed)
    Y = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    missing = torch.rand(rows, columns, generator=generator) < torch.rand((), generator=generator)
    missing[torch.arange(rows), torch.arange(rows) % columns] = False
    return torch.where(missing, torch.nan, Y).to(dtype), generator


def make_model(Y, **options):
    model = BayesianGPLVM(*Y.shape, latent_dim=2, num_inducing=4, **options).to(Y.dtype).initialize(Y)
    return model, MeanFieldGuide(model)


def log_joint(model, X, Y, idx=None):
    """Log joint of rows at the initial values of the inducing outputs."""
    given_u = poutine.condition(model.statistics, {"u": model.initial_values["u"].to(Y.dtype)})
    return model.log_joint({"X": X}, given_u(Y, idx))


@few
@given(seed=seeds, name=st.sampled_from(sorted(KERNELS)))
def test_covariances_are_permuted_with_the_points(seed, name):
    generator = torch.Generator().manual_seed(seed)
    X, order = torch.randn(6, 2, generator=generator), torch.randperm(6, generator=generator)
    kernel = KERNELS[name]
    torch.testing.assert_close(kernel(X[order]), kernel(X)[order][:, order])
    torch.testing.assert_close(kernel.diagonal(X), kernel(X).diagonal(), rtol=1e-4, atol=1e-4)


@few
@given(seed=seeds, name=st.sampled_from(sorted(LIKELIHOODS)))
def test_expected_log_likelihoods_are_those_of_the_entries(seed, name):
    generator = torch.Generator().manual_seed(seed)
    likelihood = LIKELIHOODS[name]
    mean, variance = torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator)
    params = likelihood.params()
    pyro.set_rng_seed(seed)
    y = likelihood.distribution(mean, params).sample()
    observed = torch.rand(3, 4, generator=generator) < 0.5
    entries = likelihood.expected_log_prob(y, mean, variance, params)
    rows = likelihood.log_prob_of_rows(y, observed, mean, variance, params)
    torch.testing.assert_close(rows, torch.where(observed, entries, 0.0).sum(-1), rtol=1e-4, atol=1e-4)


@few
@given(seed=seeds)
def test_the_log_joint_is_that_of_the_rows_in_any_order_and_batch(seed):
    Y, generator = draw_data(seed)
    model, _ = make_model(Y)
    X = model.initial_values["X"]
    idx = torch.randperm(8, generator=generator)[:5]
    torch.testing.assert_close(log_joint(model, X[idx], Y[idx], idx), log_joint(model, X, Y)[idx])


@few
@given(seed=seeds)
def test_precisions_agree(seed):
    Y, _ = draw_data(seed)
    model, _ = make_model(Y)
    X = model.initial_values["X"]
    double = log_joint(model, X, Y)
    single = log_joint(model.float(), X.float(), Y.float())
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-2)


@few
@given(seed=seeds)
def test_evidence_does_not_depend_on_the_order_of_points(seed):
    generator = torch.Generator().manual_seed(seed)
    x, linear = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (1, 2))
    precision = torch.eye(2, dtype=torch.float64) * torch.rand(6, 1, 1, generator=generator, dtype=torch.float64)
    order = torch.randperm(6, generator=generator)
    kernel = Matern(1, 1.5, batch_shape=(2,)).double()
    expected = joint_log_normaliser(kernel(x), linear, precision)
    torch.testing.assert_close(joint_log_normaliser(kernel(x[order]), linear[order], precision[order]), expected)


@few
@given(seed=seeds, independent_dim=st.integers(0, 1))
def test_a_linear_gp_vae_does_not_depend_on_the_order_of_rows_and_columns(seed, independent_dim):
    Y, generator = draw_data(seed)
    x = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)[:, None]
    rows, columns = (torch.randperm(n, generator=generator) for n in (8, 4))

    def fitted(x, y):
        model = LinearGPVAE(Matern(1, 1.5, lengthscale=0.3, batch_shape=(2,)), independent_dim=independent_dim)
        bounds = model.fit(x, y, num_sweeps=10)
        return torch.tensor(bounds), model.predict().mean

    bounds, mean = fitted(x, Y)
    permuted_bounds, permuted_mean = fitted(x[rows], Y[rows][:, columns])
    torch.testing.assert_close(permuted_bounds, bounds)
    torch.testing.assert_close(permuted_mean, mean[rows][:, columns])


@few
@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_imputations_keep_observed_entries(seed, dtype):
    Y, _ = draw_data(seed, dtype)
    model, guide = make_model(Y)
    guide(Y)
    filled, observed = model.impute(guide, Y, num_samples=3), ~Y.isnan()
    assert filled.mean.dtype == dtype
    assert torch.equal(filled.mean[observed], Y[observed])
    assert (filled.variance[observed] == 0.0).all()
    assert filled.mean.isfinite().all()
    assert (filled.variance[~observed] > 0.0).all()


@few
@given(seed=seeds, fit_seed=st.integers(0, 1000), batch_size=st.sampled_from([None, 3, 8]))
def test_a_seed_determines_a_fit_and_leaves_the_global_state(seed, fit_seed, batch_size):
    Y, _ = draw_data(seed)

    def losses():
        model, guide = make_model(Y)
        options = {"loss": MeanFieldELBO(max_plate_nesting=1), "batch_size": batch_size, "seed": fit_seed}
        state = torch.get_rng_state()
        found = fit(model, guide, Y, num_steps=3, progress=False, **options).losses
        assert torch.equal(torch.get_rng_state(), state)
        return found

    assert losses() == losses()


@few
@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]), frozen=st.booleans())
def test_a_saved_model_predicts_the_same(seed, dtype, frozen):
    Y, _ = draw_data(seed, dtype)

    def prediction(model, guide):
        pyro.set_rng_seed(0)
        return model.reconstruct(guide, Y, num_samples=2).mean

    model, guide = make_model(Y)
    if frozen:
        model.likelihood.variance_unconstrained.requires_grad_(False)
    fit(model, guide, Y, num_steps=2, progress=False)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    new, new_guide = make_model(Y)
    new_guide(Y)
    new.load_state_dict(state["model"])
    new_guide.load_state_dict(state["guide"])
    assert torch.equal(prediction(new, new_guide), prediction(model, guide))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pickled_estimator_transforms_the_same(seed):
    Y = draw_data(seed)[0].numpy()
    estimator = GPLVM(max_iter=3, n_inducing=4, random_state=seed).fit(Y)
    copy = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(copy.transform(Y), estimator.transform(Y))
