"""Cells from AnnData objects, and latents into them."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from pyro_lvgp import BayesianGPLVM, MeanFieldGuide, fit
from pyro_lvgp.likelihoods import NegativeBinomial
from pyro_lvgp.tables import as_tensor, from_anndata, write_latents

# anndata sets an option of pandas that pandas 3 has no use for.
pytestmark = pytest.mark.filterwarnings("ignore:The 'mode.chained_assignment' option is deprecated")
anndata = pytest.importorskip("anndata")
N, D = 40, 5


@pytest.fixture
def cells():
    random = np.random.default_rng(0)
    counts = random.poisson(3.0, (N, D)) + np.eye(N, D)
    obs = pd.DataFrame(
        {
            "batch": pd.Categorical(["a", "b", "b", "c"] * (N // 4)),
            "age": np.arange(N, dtype=float),
            "size": 2.0 * counts.sum(1),
            "donor": ["x", "y"] * (N // 2),
        },
        index=[f"cell {n}" for n in range(N)],
    )
    adata = anndata.AnnData(np.log1p(counts).astype(np.float32), obs, pd.DataFrame(index=[f"gene {d}" for d in range(D)]))
    adata.layers["counts"] = sp.csr_matrix(counts)
    return adata


def test_layers_and_columns_become_tables_and_row_arguments(cells):
    table, rows, categories = from_anndata(cells, layer="counts", exposure="total", covariates=["batch", "age"], weight="size")
    assert table.index.equals(cells.obs_names)
    assert table.columns.equals(cells.var_names)
    counts = torch.tensor(cells.layers["counts"].toarray())
    torch.testing.assert_close(as_tensor(table), counts)
    torch.testing.assert_close(rows.exposure[:, 0], counts.sum(1))
    torch.testing.assert_close(rows.weight, 2.0 * counts.sum(1))
    torch.testing.assert_close(rows.covariates[:3], torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 2]]).double())
    assert categories == {"batch": ["a", "b", "c"]}
    assert from_anndata(cells).rows is None
    np.testing.assert_array_equal(from_anndata(cells).table.to_numpy(), cells.X)


def test_further_cells_have_the_indicators_of_training(cells):
    categories = from_anndata(cells, covariates=["batch"]).categories
    new = cells[cells.obs["batch"] == "c"].copy()
    rows = from_anndata(new, covariates=["batch"], categories=categories).rows
    assert rows.covariates.unique(dim=0).tolist() == [[0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match=r"expected the categories \['a'\] in obs\['batch'\] of every cell, got \['b', 'c'\]"):
        from_anndata(cells, covariates=["batch"], categories={"batch": ["a"]})


def test_latents_go_back(cells):
    table, rows, _ = from_anndata(cells, layer="counts", exposure="total", covariates=["batch"])
    model = BayesianGPLVM.from_data(table, 2, likelihood=NegativeBinomial(), rows=rows)
    guide = MeanFieldGuide(model)
    fit(model, guide, table, num_steps=2, progress=False)
    write_latents(cells, guide.stored_posterior("X"))
    np.testing.assert_array_equal(cells.obsm["X_lvgp"], guide.median()["X"].numpy(force=True))
    assert (cells.obsm["X_lvgp_stddev"] > 0).all()
    options = {"rows": rows, "num_steps": 1, "max_components": 1}
    write_latents(cells, model.infer_latents(guide, table, **options), key="X_new")
    assert cells.obsm["X_new"].shape == (N, 2)
    filled = model.impute(guide, table).to_pandas()
    assert filled.index.equals(cells.obs_names)


def test_what_does_not_fit(cells):
    with pytest.raises(
        TypeError, match=r"got AnnData, which has several; use counts, rows, _ = pyro_lvgp\.tables\.from_anndata"
    ):
        BayesianGPLVM.from_data(cells)
    with pytest.raises(TypeError, match=r"expected adata to be an anndata.AnnData object, got DataFrame"):
        from_anndata(cells.obs)
    with pytest.raises(ValueError, match=r"expected a layer of \['counts'\], got 'raw'"):
        from_anndata(cells, layer="raw")
    with pytest.raises(ValueError, match=r"expected a column of obs, .* got 'type'"):
        from_anndata(cells, covariates=["type"])
    with pytest.raises(ValueError, match=r"numbers or categories in obs\['donor'\].*call adata.strings_to_categoricals\(\)"):
        from_anndata(cells, covariates=["donor"])
    cells.strings_to_categoricals()
    assert from_anndata(cells, covariates=["donor"]).rows.covariates.shape == (N, 2)
    for latents in (torch.zeros(3, 2), torch.full((N, 2), torch.nan), torch.zeros(N)):
        with pytest.raises(ValueError, match="expected finite latents of 40 cells"):
            write_latents(cells, latents)
