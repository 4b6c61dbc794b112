"""Groups of the prior, of its log density and of constant data."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample

from pyro_lvgp.diagnostics import observed_entries, to_arviz
from pyro_lvgp.guides import MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import GPVAE, BayesianGPLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

T = torch.linspace(0.0, 1.0, 8)[:, None]


def gplvm(Y, **options):
    kernel = RBF(2)
    kernel.lengthscale = PyroSample(dist.LogNormal(0.5, 0.7).expand([2]).to_event(1))
    model = BayesianGPLVM(*Y.shape, 2, kernel, num_inducing=4, **options).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)  # makes its parameters
    return model, guide


def gp_vae(kernel=RBF):
    y = torch.sin(6.0 * T).repeat(1, 2)
    y[2:4, 1] = torch.nan
    model = GPVAE(kernel(1, lengthscale=0.4, batch_shape=(2,)), MLP(2, 2))
    return model, StructuredGPGuide(model, encoders={"f": IndexNet(2, 2)}), y


def rows_with_gaps(N=10, D=3):
    Y = torch.randn(N, D)
    Y[1, 2] = Y[4, 0] = torch.nan
    return Y


def test_log_prior_of_a_gplvm_is_the_density_by_hand():
    Y = rows_with_gaps()
    model, guide = gplvm(Y)
    tree = to_arviz(model, guide, Y, num_samples=30, seed=0)
    found, draws = tree.log_prior, tree.posterior
    X, u, lengthscale = (draws[name].values for name in ("X", "u", "kernel.lengthscale"))
    assert found["X"].dims == ("chain", "draw", "data")
    assert found["kernel.lengthscale"].dims == ("chain", "draw")
    np.testing.assert_allclose(found["X"], -0.5 * (X**2 + math.log(2 * math.pi)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found["u"], -0.5 * (u**2 + math.log(2 * math.pi)).sum(-1), rtol=1e-5)
    log = np.log(lengthscale)
    by_hand = -log - math.log(0.7) - 0.5 * math.log(2 * math.pi) - 0.5 * ((log - 0.5) / 0.7) ** 2
    np.testing.assert_allclose(found["kernel.lengthscale"], by_hand.sum(-1), rtol=1e-4)


def test_log_prior_of_a_gp_vae_is_the_density_by_hand():
    model, guide, y = gp_vae(Matern)  # whose matrices need no jitter
    model, guide, x, y = model.double(), guide.double(), T.double(), y.double()
    tree = to_arviz(model, guide, x, y, num_samples=5, seed=0)
    f = torch.tensor(tree.posterior["f"].values)  # [chain, draw, latent, points]
    assert tree.log_prior["f"].dims == ("chain", "draw")
    by_hand = dist.MultivariateNormal(torch.zeros(8).double(), model.kernel(x[None]).detach()).log_prob(f).sum(-1)
    np.testing.assert_allclose(tree.log_prior["f"], by_hand, rtol=1e-6)


def test_log_prior_with_the_log_likelihood_is_the_log_joint():
    Y = rows_with_gaps()
    model, guide = gplvm(Y)
    tree = to_arviz(model, guide, Y, num_samples=10, seed=0)
    parts = [tree.log_prior[name] for name in tree.log_prior.data_vars] + [tree.log_likelihood["y_observed"]]
    total = sum(part.sum([dim for dim in part.dims if dim not in ("chain", "draw")]) for part in parts)
    np.testing.assert_allclose(tree.sample_stats["lp"], total, rtol=1e-4)


def test_masked_latents_and_subsamples_have_the_density_of_their_rows():
    y = torch.randn(3)

    def model(y):
        with pyro.plate("data", 12, subsample=torch.tensor([1, 5, 7])):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).mask(torch.tensor([True, False, True])))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def guide(y):
        with pyro.plate("data", 12, subsample=torch.tensor([1, 5, 7])):
            pyro.sample("z", dist.Normal(0.3, 1.0).mask(torch.tensor([True, False, True])))

    tree = to_arviz(model, guide, y, num_samples=4, prior=True)
    by_hand = -0.5 * (tree.posterior["z"] ** 2 + math.log(2 * math.pi)) * [1.0, 0.0, 1.0]
    np.testing.assert_allclose(tree.log_prior["z"], by_hand, rtol=1e-5)
    np.testing.assert_array_equal(tree.prior["data"], [1, 5, 7])


def test_prior_draws_have_the_moments_of_the_model():
    Y = rows_with_gaps(20)
    model, guide = gplvm(Y)
    num_samples = 2000
    tree = to_arviz(model, guide, Y, num_samples=num_samples, seed=0, prior=True)
    assert tree.prior.data_vars.keys() == tree.posterior.data_vars.keys()
    for name in ("X", "u"):
        values = tree.prior[name]
        tolerance = 4.0 / math.sqrt(values.size)
        assert abs(float(values.mean())) < tolerance
        assert abs(float(values.var()) - 1.0) < tolerance * math.sqrt(2.0)
    log = np.log(tree.prior["kernel.lengthscale"])
    assert abs(float(log.mean()) - 0.5) < 4 * 0.7 / math.sqrt(log.size)
    # y_nd ~ N(c_d, k(x, x) + noise) under the prior; draws share u, so that they are independent over draws alone.
    entry = tree.prior_predictive["y"].isel(data=3, output=1)
    variance = float((model.kernel.variance + model.likelihood.variance).detach())
    assert abs(float(entry.mean()) - float(model.mean[1])) < 4 * math.sqrt(variance / num_samples)
    assert abs(float(entry.var()) / variance - 1.0) < 4 * math.sqrt(2.0 / num_samples)
    where = tree.prior_predictive["y_observed"]
    np.testing.assert_array_equal(where, tree.prior_predictive["y"].values[:, :, where["y_data"], where["y_output"]])


def test_prior_draws_leave_the_posterior_draws_as_they_are():
    Y = rows_with_gaps()
    model, guide = gplvm(Y)
    one, two = (to_arviz(model, guide, Y, num_samples=20, chunk_size=7, seed=0, prior=prior) for prior in (False, True))
    assert {"prior", "prior_predictive"} == two.children.keys() - one.children.keys()
    for group in one.children:
        assert one[group].dataset.drop_attrs().identical(two[group].dataset.drop_attrs()), group


@pytest.mark.parametrize("vectorize", [True, False])
def test_prior_draws_of_deterministic_sites_follow_their_latents(vectorize):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2.0 * mu)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 0.01), obs=y)

    tree = to_arviz(model, AutoNormal(model), torch.zeros(4), num_samples=6, prior=True, vectorize=vectorize)
    np.testing.assert_allclose(tree.prior["twice"], 2.0 * tree.prior["mu"], rtol=1e-6)
    assert (abs(tree.prior_predictive["y"] - tree.prior["mu"]) < 0.1).all()
    assert float(tree.prior["mu"].std()) > 0.1


def test_inputs_are_constant_data():
    model, guide, y = gp_vae()
    tree = to_arviz(model, guide, T, y, num_samples=3)
    np.testing.assert_array_equal(tree.constant_data["x"], T)
    assert tree.constant_data["x"].dims == ("points", "input")
    several = torch.stack([T, T + 1.0]), torch.stack([y, y])
    tree = to_arviz(model, guide, *several, num_samples=3, prior=True)
    assert tree.constant_data["x"].dims == ("series", "points", "input")
    assert tree.prior["f"].shape[:3] == (1, 3, 2)
    sparse = SparseGPVAE(RBF(1, batch_shape=(2,)), MLP(2, 2), T[::2].clone())
    tree = to_arviz(sparse, SparseStructuredGPGuide(sparse, encoders={"u": IndexNet(2, 2)}), T, y, num_samples=3, prior=True)
    assert tree.constant_data["x"].sizes == {"points": 8, "input": 1}
    assert np.isfinite(tree.prior["f"]).all()


def regression(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def test_constant_data_of_any_model_are_given():
    x, y = torch.arange(3.0), torch.zeros(3)
    guide = AutoNormal(regression)
    tree = to_arviz(regression, guide, x, y, num_samples=3, constant_data={"x": x, "age": [4]}, dims={"x": ["data"]})
    np.testing.assert_array_equal(tree.constant_data["x"], x)
    assert (tree.constant_data["x"].dims, tree.constant_data["age"].dims) == (("data",), ("age_dim_0",))
    assert "constant_data" not in to_arviz(regression, guide, x, y, num_samples=3).children
    with pytest.raises(ValueError, match="a name for each of 1 dimensions, got"):
        to_arviz(regression, guide, x, y, num_samples=3, constant_data={"x": x}, dims={"x": ["data", "column"]})
    with pytest.raises(ValueError, match=r"dimension 'data': expected one size, got 3 and, at 'x', 2"):
        to_arviz(regression, guide, x, y, num_samples=3, constant_data={"x": x[:2]}, dims={"x": ["data"]})


def test_counts_are_integers():
    Y = torch.poisson(torch.ones(6, 3))
    Y[0, 0] = torch.nan
    model, guide = gplvm(Y, likelihood=Poisson())
    tree = to_arviz(model, guide, Y, num_samples=5, prior=True)
    for group in ("posterior_predictive", "prior_predictive", "observed_data"):
        assert tree[group]["y_observed"].dtype == np.int64, group
    np.testing.assert_array_equal(tree.observed_data["y"], Y)
    np.testing.assert_array_equal(tree.observed_data["y_observed"], Y[~Y.isnan()])
    assert (tree.posterior_predictive["y"] >= 0).all()


def test_observed_entries_are_the_only_data():
    Y = rows_with_gaps()
    model, guide = gplvm(Y)
    tree = to_arviz(model, guide, Y, num_samples=5, prior=True)
    selected = observed_entries(tree)
    for group in ("posterior_predictive", "prior_predictive", "observed_data", "log_likelihood"):
        assert list(selected[group].data_vars) == ["y_observed"], group
        assert selected[group]["y_observed"].identical(tree[group]["y_observed"]), group
    assert selected.posterior.dataset.identical(tree.posterior.dataset)
    assert selected.attrs == tree.attrs
    assert "y" in tree.observed_data.data_vars
    complete = to_arviz(model, guide, Y.nan_to_num(), num_samples=5)
    assert observed_entries(complete).identical(complete)
