"""Statistics, plots and files of ArviZ."""

import importlib
import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import xarray

from pyro_lvgp.diagnostics import to_arviz
from tests.diagnostics.arviz._models import conjugate, exact

az = pytest.importorskip("arviz_stats")


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
