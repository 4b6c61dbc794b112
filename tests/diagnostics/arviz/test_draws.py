"""Names, shapes and densities of draws."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal, AutoNormalMessenger
from pyro.infer.reparam import HaarReparam, LocScaleReparam, SplitReparam
from pyro.nn import PyroModule, PyroParam

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.infer.sampling import sample_traces
from tests.diagnostics.arviz._models import conjugate, exact, local_and_global


def nested(y):
    with pyro.plate("rows", 4, dim=-2):
        a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("columns", 3, dim=-1):
            b = pyro.sample("b", dist.Gamma(2.0, 2.0))
            pyro.sample("y", dist.Normal(a.sum(-1), b), obs=y)
    with pyro.plate("columns_only", 3, dim=-1):
        pyro.sample("c", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))


def full_covariance(y):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(loc, torch.eye(2)), obs=y)


MODELS = {
    "conjugate": (conjugate, (5,), {"mu": (), "y": ("data",)}),
    "local and global": (
        local_and_global,
        (5, 3),
        {
            "scale": ("scale_dim_0",),
            "z": ("data", "z_dim_0"),
            "double": ("data", "double_dim_0"),
            "default": ("data",),
            "y": ("data", "y_dim_0"),
        },
    ),
    "nested": (
        nested,
        (4, 3),
        {
            "a": ("rows", "a_dim_0"),
            "b": ("rows", "columns"),
            "c": ("columns_only", "c_dim_0", "c_dim_1"),
            "y": ("rows", "columns"),
        },
    ),
    "full covariance": (full_covariance, (5, 2), {"loc": ("loc_dim_0",), "y": ("data", "y_dim_0")}),
}


def joint(model, y, values):
    """log p(y, z) of one draw by Pyro itself."""
    return poutine.trace(poutine.condition(model, values)).get_trace(y).log_prob_sum()


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("make_guide", [AutoNormal, AutoDiagonalNormal, AutoNormalMessenger])
@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_densities(name, make_guide, vectorize):
    model, shape, names = MODELS[name]
    y = torch.randn(shape)
    guide = make_guide(model)
    guide(y)
    tree = to_arviz(model, guide, y, num_samples=7, chunk_size=3, vectorize=vectorize, seed=1)
    posterior = tree["posterior"]
    for site, dims in names.items():
        group = "posterior_predictive" if site == "y" else "posterior"
        assert tree[group][site].dims == ("chain", "draw", *dims)
        assert tree[group][site].shape[:2] == (1, 7)
    latent = [site for site in names if site not in ("y", "double", "default")]
    for s in range(7):
        values = {site: torch.as_tensor(posterior[site].values[0, s]) for site in latent}
        # a's plate is at dim −2: one draw of it has an empty dimension that the export drops
        if name == "nested":
            values["a"] = values["a"].unsqueeze(1)
        np.testing.assert_allclose(tree["sample_stats"]["lp"].values[0, s], joint(model, y, values), rtol=1e-5)
    likelihood = tree["log_likelihood"]["y"]
    if name == "local and global":
        z, scale = posterior["z"], posterior["scale"].values[:, :, None]
        by_hand = dist.Normal(torch.tensor(z.values), torch.tensor(scale)).log_prob(y)
        np.testing.assert_allclose(likelihood, by_hand, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(posterior["double"], 2 * z)
        np.testing.assert_allclose(posterior["default"], z[..., 0] + 1)
    if name == "full covariance":
        assert likelihood.dims == ("chain", "draw", "data")
    np.testing.assert_array_equal(tree["observed_data"]["y"], y)


def test_conjugate_posterior_is_exact():
    y = torch.tensor([1.0, 2.0, 4.5])
    tree = to_arviz(conjugate, exact, y, num_samples=4000, chunk_size=1000, seed=0)
    mu = tree["posterior"]["mu"].values
    # Posterior N(7.5 / 4, 1 / 4): four standard errors of 4000 draws.
    assert abs(mu.mean() - 7.5 / 4) < 4 * 0.5 / 4000**0.5
    # log p(y, z) − log q(z) is the log evidence, whatever the draw; y ~ N(0, I + 11ᵀ).
    evidence = dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 1.0).log_prob(y)
    np.testing.assert_allclose(tree["sample_stats"]["log_weight"], evidence, atol=1e-5)
    np.testing.assert_allclose(
        tree["sample_stats"]["lq"].values[0], dist.Normal(7.5 / 4, 0.5).log_prob(torch.tensor(mu[0])), rtol=1e-4
    )
    predictions = tree["posterior_predictive"]["y"].values
    assert abs(predictions.mean() - 7.5 / 4) < 4 * (0.25 + 1.0) ** 0.5 / 4000**0.5
    assert abs(predictions[..., 0].var() - 1.25) < 4 * 1.25 * (2 / 4000) ** 0.5


def test_guide_with_other_plates_than_the_model():
    y = torch.randn(4, 3)

    def guide(y):  # event dimensions where the model has plates, and a plate for what is an event there
        pyro.sample("b", dist.LogNormal(torch.zeros(4, 3), 0.1).to_event(2))
        with pyro.plate("guide_rows", 4, dim=-1):
            pyro.sample("a_rows", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        pyro.sample("a", dist.Normal(torch.zeros(4, 1, 2), 1.0).to_event(3))
        with pyro.plate("columns_only", 3, dim=-1):
            pyro.sample("c", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))

    fast = to_arviz(nested, guide, y, num_samples=6)
    assert fast["posterior"]["a"].dims == ("chain", "draw", "rows", "a_dim_0")
    for s in range(6):
        values = {site: torch.as_tensor(fast["posterior"][site].values[0, s]) for site in ("a", "b", "c")}
        values["a"] = values["a"].unsqueeze(1)
        np.testing.assert_allclose(fast["sample_stats"]["lp"].values[0, s], joint(nested, y, values), rtol=1e-5)


def test_sites_that_the_guide_lacks_weigh_nothing():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("noise", dist.Normal(mu, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = torch.tensor([1.0, 2.0])
    weight = to_arviz(model, exact, y, num_samples=5)["sample_stats"]["log_weight"]
    evidence = dist.MultivariateNormal(torch.zeros(2), torch.eye(2) + 1.0).log_prob(y)
    np.testing.assert_allclose(weight, evidence, atol=1e-5)


@pytest.mark.parametrize("explicit", [True, False])
def test_one_subsample_for_all_draws(explicit):
    y = torch.randn(20)

    def model(y, idx=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        size = None if explicit else 6
        with pyro.plate("data", 20, subsample_size=size, subsample=idx) as rows:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[rows])

    idx = torch.tensor([3, 11, 0, 19, 5, 6]) if explicit else None
    plates = (lambda y, idx: pyro.plate("data", 20, subsample=idx)) if explicit else None
    tree = to_arviz(model, AutoNormal(model, create_plates=plates), y, idx, num_samples=9, chunk_size=2)
    rows = tree["posterior"]["z"].coords["data"].values.tolist()
    assert rows == ([3, 11, 0, 19, 5, 6] if explicit else rows)
    np.testing.assert_array_equal(tree["observed_data"]["y"], y[rows])
    mu, z = (torch.tensor(tree["posterior"][site].values[0]) for site in ("mu", "z"))
    likelihood = dist.Normal(z, 1.0).log_prob(y[rows])
    np.testing.assert_allclose(tree["log_likelihood"]["y"].values[0], likelihood, rtol=1e-4)  # not scaled
    lp = dist.Normal(0.0, 1.0).log_prob(mu)
    lp = lp + 20 / 6 * (likelihood + dist.Normal(mu[:, None], 1.0).log_prob(z)).sum(-1)
    np.testing.assert_allclose(tree["sample_stats"]["lp"].values[0], lp, rtol=1e-5)

    letters = [chr(65 + i) for i in range(20)]
    for labels in (letters, np.array(letters)):
        named = to_arviz(model, AutoNormal(model, create_plates=plates), y, idx, num_samples=2, coords={"data": labels})
        rows = named["posterior"]["z"].coords["data"].values
        np.testing.assert_array_equal(named["observed_data"]["y"], y[[letters.index(row) for row in rows]])


def test_dtype_is_kept(dtype):
    y = torch.randn(4, dtype=dtype)

    def model(y):
        mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    torch.set_default_dtype(dtype)
    tree = to_arviz(model, AutoNormal(model), y, num_samples=3)
    want = torch.zeros((), dtype=dtype).numpy().dtype
    for group, name in (("posterior", "mu"), ("posterior_predictive", "y"), ("log_likelihood", "y"), ("observed_data", "y")):
        assert tree[group][name].dtype == want
    assert tree["sample_stats"]["lp"].dtype == np.float64


def test_seed_repeats_draws_and_leaves_the_global_state_alone():
    y = torch.randn(5)
    first = to_arviz(conjugate, exact, y, num_samples=5, seed=3)
    torch.manual_seed(7)
    again = to_arviz(conjugate, exact, y, num_samples=5, seed=3)
    after = torch.rand(())
    torch.manual_seed(7)
    assert after == torch.rand(())
    assert again["posterior"].equals(first["posterior"])
    other = to_arviz(conjugate, exact, y, num_samples=5, seed=4)
    assert not other["posterior"].equals(first["posterior"])


def test_groups_can_be_left_out():
    tree = to_arviz(conjugate, exact, torch.zeros(2), num_samples=2, posterior_predictive=False, log_likelihood=False)
    assert set(tree.children) == {"posterior", "log_prior", "observed_data", "sample_stats"}


def test_guide_that_needs_gradients_and_local_parameters():
    class Guide(PyroModule):
        def __init__(self):
            super().__init__()
            self.loc = PyroParam(torch.tensor(0.5))

        def forward(self, y):
            loc = self.loc
            with torch.enable_grad():
                at = torch.zeros((), requires_grad=True)
                (step,) = torch.autograd.grad((at - 3.0).square(), at)
            pyro.factor("weight", torch.tensor(-0.25), has_rsample=True)
            pyro.sample("mu", dist.Delta(loc - step, log_density=torch.tensor(1.0)))

    with pyro.settings.context(module_local_params=True):
        tree = to_arviz(conjugate, Guide(), torch.zeros(2), num_samples=3)
    np.testing.assert_allclose(tree["posterior"]["mu"], 6.5)
    np.testing.assert_allclose(tree["sample_stats"]["lq"], 0.75)


def test_draws_of_two_chunk_sizes_have_the_same_densities():
    y = torch.randn(5)
    draws = [sample_traces(conjugate, exact, y, num_samples=6, chunk_size=c, seed=0) for c in (1, 4, 6)]
    for d in draws:
        mu = d.sites["mu"].value
        torch.testing.assert_close(d.log_q, dist.Normal(y.sum() / 6, 6**-0.5).log_prob(mu).double())


def test_simulation_leaves_deterministic_sites_alone():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            f = pyro.deterministic("f", mu + torch.arange(4.0))  # no event_dim: Pyro takes the plate for an event
            pyro.sample("y", dist.Normal(f, 1e-3), obs=y)

    tree = to_arviz(model, AutoNormal(model), torch.zeros(4), num_samples=6)
    assert tree["posterior"]["f"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(tree["posterior_predictive"]["y"], tree["posterior"]["f"], atol=0.01)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("reparam", [LocScaleReparam(0.0), LocScaleReparam(), HaarReparam(), SplitReparam([1, 3], -1)])
def test_reparameterised_sites_are_deterministic(reparam, vectorize):
    """Also where what is left of them is not masked (Haar), or has a density (split)."""

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            x = pyro.sample("x", dist.Normal(torch.zeros(4), scale[..., None]).to_event(1))
            pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    model, y = poutine.reparam(model, {"x": reparam}), torch.zeros(3, 4)
    draws = sample_traces(model, AutoNormal(model), y, num_samples=5, vectorize=vectorize)
    assert draws.sites["x"].kind == "deterministic"
    assert draws.sites["x"].value.shape == (5, 3, 4)
    assert draws.sites["x"].plates == ("data",)
    latents = {name: site.value[0] for name, site in draws.sites.items() if site.kind == "latent"}
    assert draws.log_p[0].item() == pytest.approx(joint(model, y, latents).item(), rel=1e-5)
    assert [name for name, site in draws.sites.items() if site.kind == "observed"] == ["y"]
