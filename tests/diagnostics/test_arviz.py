"""Draws, their densities and their names, on models of all shapes; and ArviZ on what comes out."""

import importlib
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal, AutoNormalMessenger
from pyro.infer.reparam import HaarReparam, LocScaleReparam, SplitReparam
from pyro.nn import PyroModule, PyroParam

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.infer.sampling import sample_traces

az = pytest.importorskip("arviz_stats")


def conjugate(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def exact(y):
    pyro.sample("mu", dist.Normal(y.sum() / (1 + len(y)), (1.0 + len(y)) ** -0.5))


def local_and_global(y):
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(3), 0.1).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.deterministic("double", 2 * z, event_dim=1)
        pyro.deterministic("default", z[..., 0] + 1.0)
        pyro.sample("y", dist.Normal(z, scale).to_event(1), obs=y)


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


class Masked(PyroModule):
    """Factor analysis that takes NaN for missing, with its mask in one of three places."""

    event_dims = {"z": ("latent",), "y": ("output",)}  # noqa: RUF012

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.weight = PyroParam(torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, 1.0]]))

    def forward(self, y):
        mask, y = ~torch.isnan(y), torch.nan_to_num(y)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            fn = dist.Normal(z @ self.weight, 0.5)
            if self.place == "entries":
                pyro.sample("y", fn.mask(mask).to_event(1), obs=y)
            elif self.place == "rows":
                pyro.sample("y", fn.to_event(1).mask(mask.all(-1)), obs=y)
            else:
                with poutine.mask(mask=mask.all(-1)):
                    pyro.sample("y", fn.to_event(1), obs=y)


@pytest.fixture(params=["entries", "rows", "handler"])
def incomplete(request):
    y = torch.randn(6, 3)
    y[1, 2] = y[4, 0] = torch.nan
    if request.param != "entries":
        y[[1, 4]] = torch.nan
    model = Masked(request.param)
    return y, to_arviz(model, AutoNormal(model), y, num_samples=300, seed=0)


def test_missing_entries(incomplete):
    y, tree = incomplete
    seen = ~torch.isnan(y).numpy()
    np.testing.assert_array_equal(tree["observed_data"]["y"], y)
    assert tree["observed_data"]["y"].dims == ("data", "output")
    assert tree["posterior_predictive"]["y"].shape == (1, 300, 6, 3)
    assert np.isfinite(tree["posterior_predictive"]["y"]).all()
    likelihood = tree["log_likelihood"]["y_observed"]
    assert list(tree["log_likelihood"].data_vars) == ["y_observed"]
    weight = torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, 1.0]])
    by_hand = dist.Normal(torch.tensor(tree["posterior"]["z"].values) @ weight, 0.5).log_prob(y.nan_to_num())
    np.testing.assert_allclose(likelihood, by_hand.numpy()[:, :, seen], rtol=1e-4, atol=1e-4)
    where = likelihood.coords["y_data"].values, likelihood.coords["y_output"].values
    np.testing.assert_array_equal(tree["observed_data"]["y_observed"], y.numpy()[where])
    np.testing.assert_array_equal(
        tree["posterior_predictive"]["y_observed"], tree["posterior_predictive"]["y"].values[:, :, *where]
    )


def test_arviz_statistics_with_missing_entries(incomplete):
    y, tree = incomplete
    num_observed = int((~torch.isnan(y)).sum())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto")  # the guide is not fitted
        loo = az.loo(tree, pointwise=True)
        stats = tree["sample_stats"]
        approximate = az.loo_approximate_posterior(tree, log_p=stats["lp"], log_q=stats["lq"])
    assert np.isfinite([loo.elpd, approximate.elpd]).all()
    assert loo.n_data_points == num_observed
    pit = az.loo_pit(tree, var_names="y_observed")["y_observed"]
    assert pit.shape == (num_observed,)
    assert ((pit >= 0) & (pit <= 1 + 1e-6)).all()


def test_loo_of_exact_posterior():
    y = torch.tensor([0.3, -0.4, 1.2, 0.1, 0.8, -1.0, 0.2, 0.6])
    tree = to_arviz(conjugate, exact, y, num_samples=4000, chunk_size=4000, seed=0)
    stats = tree["sample_stats"]
    loo = az.loo_approximate_posterior(tree, log_p=stats["lp"], log_q=stats["lq"])
    # Leave one out: y_i ~ N(Σ_{j≠i} y_j / N, 1 + 1 / N), N = 8.
    by_hand = dist.Normal((y.sum() - y) / 8, (1 + 1 / 8) ** 0.5).log_prob(y).sum()
    assert abs(loo.elpd - by_hand) < 0.05


@pytest.fixture
def azp():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    with warnings.catch_warnings():
        # arviz-plots 0.8 looks for matplotlib.style.core, which matplotlib ≥ 3.11 no longer imports by itself.
        warnings.simplefilter("ignore")
        importlib.import_module("matplotlib.style.core")
        yield pytest.importorskip("arviz_plots")
    matplotlib.pyplot.close("all")


def test_posterior_predictive_plot(incomplete, azp):
    _, tree = incomplete
    plots = azp.plot_ppc_dist(tree, num_samples=10)
    assert set(plots.viz["predictive_dist"].data_vars) == {"y", "y_observed"}
    one = azp.plot_ppc_dist(tree, num_samples=10, var_names="y_observed")
    assert one.viz["predictive_dist"]["y_observed"].sizes == {"sample": 10}
    azp.plot_ecdf_pit(az.loo_pit(tree, var_names="y_observed"), group=None, sample_dims=["y_entry"])


def test_netcdf_round_trip(incomplete, tmp_path):
    pytest.importorskip("h5py", reason="h5netcdf needs h5py to write files")
    _, tree = incomplete
    tree.to_netcdf(tmp_path / "tree.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "tree.nc", engine="h5netcdf") as back:
        assert back.identical(tree)


def test_counts_and_booleans_with_missing_entries_become_floats():
    counts, coins = torch.tensor([3, 0, 5]), torch.tensor([True, False, True])

    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("count", dist.Poisson(rate).mask(torch.tensor([True, False, True])), obs=counts)
            pyro.sample("coin", dist.Bernoulli(0.5), obs=coins.float())

    tree = to_arviz(model, AutoNormal(model), num_samples=4)
    np.testing.assert_array_equal(tree["observed_data"]["count"], [3, np.nan, 5])
    np.testing.assert_array_equal(tree["observed_data"]["coin"], coins)
    assert set(tree["log_likelihood"].data_vars) == {"count_observed", "coin"}


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
    assert set(tree.children) == {"posterior", "observed_data", "sample_stats"}


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


@pytest.mark.parametrize("num_samples", [3, 4])
def test_undeclared_batch_dimension_asks_for_single_draws(num_samples):
    def model(y):  # a batch of three in no plate: with three draws the two would be confused
        mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    def guide(y):
        pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0))

    with pytest.raises(RuntimeError, match="vectorize=False"):
        to_arviz(model, guide, torch.zeros(3), num_samples=num_samples)
    tree = to_arviz(model, guide, torch.zeros(3), num_samples=num_samples, vectorize=False)
    assert tree["posterior"]["mu"].dims == ("chain", "draw", "mu_batch_0")
    mu = torch.tensor(tree["posterior"]["mu"].values)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], dist.Normal(mu, 1.0).log_prob(torch.zeros(())), rtol=1e-5)


def test_model_that_does_not_broadcast_asks_for_single_draws():
    X = torch.randn(5, 2)

    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    y = torch.zeros(5)
    with pytest.raises(RuntimeError, match="vectorize=False"):
        to_arviz(model, AutoNormal(model), y, num_samples=4)
    tree = to_arviz(model, AutoNormal(model), y, num_samples=4, vectorize=False)
    w = torch.tensor(tree["posterior"]["w"].values[0])
    np.testing.assert_allclose(tree["log_likelihood"]["y"][0], dist.Normal(w @ X.T, 1.0).log_prob(y), rtol=1e-4)


class NoDraws(dist.Normal):
    def rsample(self, sample_shape=()):
        raise NotImplementedError("no draws of this")


class FewAtOnce(dist.Normal):
    def log_prob(self, value):
        if self.batch_shape.numel() > 100:
            raise RuntimeError("not enough memory")
        return super().log_prob(value)


@pytest.mark.parametrize(
    ("likelihood", "mean", "error", "message"),
    [
        (NoDraws, 3.0, NotImplementedError, "^no draws of this"),
        (FewAtOnce, 3.0, RuntimeError, "^not enough memory$"),
        (dist.Normal, -3.0, ValueError, r"(?s)^Error while computing log_prob at site 'x'.*to be within the support"),
    ],
    ids=["predictions", "memory", "support"],
)
def test_what_does_not_fail_for_want_of_broadcasting_keeps_its_error(likelihood, mean, error, message):
    def model(y):
        x = pyro.sample("x", dist.Exponential(1.0))
        with pyro.plate("data", 6):
            pyro.sample("y", likelihood(x, 1.0), obs=y)

    def guide(y):
        pyro.sample("x", dist.Normal(mean, 1e-3))

    with pytest.raises(error, match=message) as raised:
        to_arviz(model, guide, torch.zeros(6), num_samples=40)
    assert raised.type is error
    assert "vectorize" not in str(raised.value)


def test_model_that_reduces_over_its_rows_asks_for_single_draws():
    def model(y):
        with pyro.plate("data", 6):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.deterministic("total", x.sum())
        with pyro.plate("obs", 6):
            pyro.sample("y", dist.Normal(x.mean(), 1.0), obs=y)

    y, guide = torch.zeros(6), AutoNormal(model, init_scale=0.8)
    with pytest.raises(RuntimeError, match=r"(?s)does the model reduce over a plate, as x.mean\(\)\?.*vectorize=False"):
        to_arviz(model, guide, y, num_samples=4)
    tree = to_arviz(model, guide, y, num_samples=4, vectorize=False, seed=0)
    np.testing.assert_allclose(tree.posterior["total"], tree.posterior["x"].sum("data"), rtol=1e-5)


def test_model_with_noise_of_its_own_is_none_that_reduces():
    dropout = torch.nn.Dropout(0.5)

    def model(y):
        with pyro.plate("data", 6):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(dropout(3.0 + x), 0.1), obs=y)

    assert to_arviz(model, AutoNormal(model), torch.zeros(6), num_samples=4).posterior["x"].shape == (1, 4, 6)


def test_plates_named_as_arviz_names_draws_are_refused():
    def model(y):
        with pyro.plate("draw", 3):
            pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"other names than ArviZ's own \['draw'\]; rename the plate"):
        to_arviz(model, AutoNormal(model), torch.zeros(3), num_samples=2)


def test_errors_say_what_to_mend():
    y = torch.zeros(5, 3)
    model = local_and_global
    with pytest.raises(ValueError, match=r"among .*got \['nope'\]"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"nope": ["a"]})
    with pytest.raises(ValueError, match="site 'z': expected a name for each of 1 event"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"z": ["data", "latent"]})
    with pytest.raises(ValueError, match="different names"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"z": ["data"]})
    with pytest.raises(ValueError, match="dimension 'k': expected one size"):
        to_arviz(conjugate_vector, AutoNormal(conjugate_vector), num_samples=2, dims={"a": ["k"], "b": ["k"]})
    with pytest.raises(ValueError, match=r"coords: expected dimensions among .*'data'.*, got \['rows'\]"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, coords={"rows": range(5)})
    with pytest.raises(ValueError, match="coords of 'data': expected 5 values, got 2"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, coords={"data": [0, 1]})
    with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
        to_arviz(model, AutoNormal(model), y, num_samples=0)
    with pytest.raises(ValueError, match="sample sites, got none"):
        to_arviz(lambda: None, lambda: None)


def conjugate_vector():
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def test_observing_a_latent_is_refused():
    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=1.0 - mu)

    for vectorize in (True, False):
        with pytest.raises((ValueError, RuntimeError), match="depends on the latent sites"):
            to_arviz(model, AutoNormal(model), num_samples=3, vectorize=vectorize)


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


@pytest.mark.parametrize("mask", [True, False])
def test_a_delta_likelihood_is_observed(mask):
    """Data that a Delta meets are data, masked or not."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Delta(torch.ones(2), 0.0 * mu, event_dim=1).mask(mask), obs=y)

    site = sample_traces(model, AutoNormal(model), torch.ones(2), num_samples=3).sites["y"]
    assert site.kind == "observed"
    assert site.is_observed == mask


class GappyNormal(dist.Normal):
    """A distribution that takes NaN for missing by itself, without a mask."""

    def log_prob(self, value):
        return torch.where(torch.isnan(value), 0.0, super().log_prob(torch.nan_to_num(value)))


def test_nan_without_a_mask_is_missing():
    y = torch.tensor([0.5, torch.nan, 2.0])

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", GappyNormal(mu, torch.ones(3), validate_args=False), obs=y)

    tree = to_arviz(model, AutoNormal(model), y, num_samples=4)
    np.testing.assert_array_equal(tree["observed_data"]["y_observed"], [0.5, 2.0])
    np.testing.assert_array_equal(tree["log_likelihood"]["y_data"], [0, 2])
