"""Arguments of other kinds at every public function and constructor, generated from the signatures of all ``__all__``."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions.transforms import ExpTransform

import pyro_lvgp
from pyro_lvgp import conjugate, distributions, infer, kernels, likelihoods, models, networks
from pyro_lvgp._utils.argument_types import check_types
from pyro_lvgp.diagnostics import SiteRanks, to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.ops.sparse_sites import Sites

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]

PACKAGES = [name for name in pyro_lvgp.__all__ if inspect.ismodule(getattr(pyro_lvgp, name)) and name != "ops"]
N, D = 30, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
T = torch.linspace(0.0, 1.0, N)[:, None]


class Unknown:
    """Object that no function takes."""


WRONG = {"string": "text", "list": [1, 2], "class": Unknown, "object": Unknown(), "None": None, "scalar": np.float64(0.5)}

# Names that no user calls, with the reason.
EXCLUDED = {
    "results that the library constructs": "Calibration ChainGain Dataset FitResult FitState Gain Moments Sandwich "
    "Restart Restarts "
    "SampledSite SampledTraces Saved InducingValues ObservedRows MarginalizeGaussians LikelihoodTerm NaturalGaussian "
    "NormalInverseWishart ChainCheck Check ConvergenceCheck CoverageCheck EvidenceCheck Finding IntervalCoverage "
    "LatentUseCheck LeaveOneOutCheck NotApplicable RankCalibration Report SiteRanks WeightsCheck",
    "abstract bases, whose subclasses are tested": "Kernel Combination Likelihood LogConcaveLikelihood Logistic RowLikelihood "
    "Encoder LatentVariableModel LatentProcessModel LocalELBO DifferentiableELBO Callback",
    "types and errors": "KernelParams LikelihoodName Corruption NotPositiveDefiniteError",
    "decorators": "pyro_lock",
    "functions that take seconds, tested in tests/diagnostics": "report simulation_based_calibration chains_to_arviz",
    "constructors of Pyro, with its own checks of values": "PathDelta DrawnNormal",
    "constructors of torch, with its own checks of values": "RowAdam",
    "estimators, whose arguments scikit-learn wants to be checked in fit": "GPLVM GPLVMImputer "
    "GPLVMClassifier GPLVMRegressor GPVAERegressor GPVAEImputer RandomFeatureGPLVM",
}
SKIPPED = {name for names in EXCLUDED.values() for name in names.split()}


@cache
def fitted() -> tuple[Any, Any]:
    model = models.BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    return model, guide


def annealed(**options: Any) -> dict[str, Any]:
    model = models.BayesianGPLVM(N, D, latent_dim=2, num_inducing=4, **options).initialize(Y)
    guide = AutoAnnealedLangevin(model, num_steps=1)
    guide(Y)
    return {"model": model, "guide": guide, "args": (Y,)}


def latents() -> dict[str, torch.Tensor]:
    nodes = pyro.poutine.trace(fitted()[0]).get_trace(Y).nodes
    return {name: nodes[name]["value"] for name in ("X", "u")}


def process() -> distributions.GaussianProcess:
    return distributions.GaussianProcess(kernels.RBF(1), T)


def normals() -> Any:
    return dist.Normal(torch.zeros(5, N, D), 1.0)


def prediction() -> models.Prediction:
    return models.Prediction([normals()])


def site_ranks() -> SiteRanks:
    points = np.array([0.25, 0.5, 0.75])
    return SiteRanks(np.array([0, 3]), (), points, points, points - 0.6, points + 0.6, 0.8)


def annotated() -> Any:
    return pytest.importorskip("anndata").AnnData(Y.numpy())


def components() -> conjugate.NormalInverseWishart:
    return conjugate.NormalInverseWishart(torch.zeros(2, 2), torch.ones(2), torch.eye(2).expand(2, 2, 2), 5.0 * torch.ones(2))


def with_model(**others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": fitted()[0], "guide": fitted()[1], "args": (Y,), **others}


def sticks() -> dict[str, Any]:
    return {name: torch.ones(1, 3) for name in ("a", "b")}


def sites_model(y: torch.Tensor) -> None:
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=y)


X = torch.randn(N, 2, generator=torch.Generator().manual_seed(1))
ONE, ROW = torch.ones(1), torch.ones(1, 2)
# Arguments with which each name can be called, of those that have no default.
VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "AutoAnnealedLangevin": lambda: {"model": fitted()[0]},
    "BayesianGPLVM": lambda: {"num_data": N, "data_dim": D, "latent_dim": 2, "num_inducing": 4},
    "MultiViewGPLVM": lambda: {"num_data": N, "view_dims": {"a": 2, "b": 1}, "latent_dim": 2, "num_inducing": 4},
    "RandomFeatureLVM": lambda: {"num_data": N, "data_dim": D, "latent_dim": 2},
    "GPVAE": lambda: {"kernel": kernels.RBF(1), "decoder": networks.MLP(1, D)},
    "SparseGPVAE": lambda: {"kernel": kernels.RBF(1), "decoder": networks.MLP(1, D), "inducing_points": T[::5].clone()},
    "LinearGPVAE": lambda: {"kernel": None, "independent_dim": 1},
    "Prediction": lambda: {"parts": [normals()]},
    "cluster_centres": lambda: {"X": X, "num_centres": 3},
    "latent_mixture": lambda: {"X": X, "num_components": 2},
    "linear_latents": lambda: {"Y": Y, "latent_dim": 2},
    "tsne_layout": lambda: {"Y": Y},
    "MeanFieldGuide": lambda: {"model": fitted()[0]},
    "RandomFeatureGuide": lambda: {"model": models.RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4)},
    "StructuredGPGuide": lambda: {"model": models.GPVAE(kernels.RBF(1), networks.MLP(1, D))},
    "SparseStructuredGPGuide": lambda: {"model": models.SparseGPVAE(kernels.RBF(1), networks.MLP(1, D), T[::5].clone())},
    "Block": lambda: {"name": "all", "params": ["p"], "optimizer": lambda tensors: torch.optim.Adam(tensors)},
    "BlockCoordinateVI": lambda: {
        "model": sites_model,
        "guide": MeanFieldGuide(sites_model),
        "blocks": [infer.Block("all", sites=["x"], optimizer=lambda tensors: torch.optim.Adam(tensors))],
    },
    "Checkpoint": lambda: {"path": "fit.pt"},
    "CompiledELBO": lambda: {"bound": infer.MeanFieldELBO()},
    "EarlyStopping": lambda: {"score": lambda: 0.0},
    "fit": with_model(num_steps=1, progress=False),
    "holds": lambda: {"condition": torch.tensor(True)},
    "load": lambda: {"path": "model.safetensors"},
    "save": lambda: {"path": "model.safetensors", "model": fitted()[0]},
    "sample_moments": lambda: {"name": "z", "fn": dist.Normal(0.0, 1.0)},
    "sample_traces": with_model(num_samples=2),
    "RBF": lambda: {"input_dim": 1},
    "Categorical": dict,
    "Cosine": lambda: {"input_dim": 1},
    "Embedded": lambda: {"kernel": kernels.RBF(2), "num_levels": 3},
    "Index": lambda: {"num_levels": 3},
    "Linear": lambda: {"input_dim": 1},
    "Matern": lambda: {"input_dim": 1},
    "Periodic": lambda: {"input_dim": 1},
    "RationalQuadratic": lambda: {"input_dim": 1},
    "SpectralMixture": lambda: {"input_dim": 1},
    "Product": lambda: {"kernels": (kernels.RBF(1), kernels.RBF(1))},
    "Sum": lambda: {"kernels": (kernels.RBF(1), kernels.RBF(1))},
    "Stack": lambda: {"kernels": (kernels.RBF(1), kernels.RBF(1))},
    "as_kernel": lambda: {"kernel": kernels.RBF(1)},
    "mixture_kernel": lambda: {"X": X, "X2": X, "weights": ONE, "locs": ROW, "scales": ROW},
    "random_features": lambda: {"X": X, "omega": ROW},
    "spectral_density": lambda: {"omega": ROW, "weights": ONE, "locs": ROW, "scales": ROW},
    "Binomial": lambda: {"total_count": 3},
    "Heterogeneous": lambda: {"parts": [(likelihoods.Gaussian(), [0])]},
    "LowRankGaussian": lambda: {"rank": 1, "data_dim": D},
    "Ordinal": lambda: {"edges": torch.zeros(1)},
    "as_likelihood": lambda: {"likelihood": None},
    "likelihood_by_name": lambda: {"likelihood": "gaussian", "Y": Y},
    "DiagonalMixture": lambda: {"logits": torch.zeros(2), "locs": torch.zeros(2, 3), "scales": torch.ones(2, 3)},
    "GaussianProcess": lambda: {"kernel": kernels.RBF(1), "X": T},
    "LikelihoodPredictive": lambda: {"likelihood": likelihoods.Gaussian(), "mean": Y, "variance": torch.ones(N, D)},
    "PrecisionNormal": lambda: {"loc": torch.zeros(2), "precision_tril": torch.eye(2)},
    "PrecisionNormalAtMean": lambda: {"loc": torch.zeros(2), "precision_tril": torch.eye(2)},
    "SparseProcess": lambda: {"kernel": kernels.RBF(1), "Z": T[::5], "X": T},
    "StateSpacePosterior": lambda: {
        "prior": distributions.GaussianProcess(kernels.Matern(1, 0.5), T),
        "site_mean": torch.zeros(N),
        "site_precision": torch.ones(N),
    },
    "StructuredPosterior": lambda: {"prior": process(), "site_mean": torch.zeros(N), "site_precision": torch.ones(N)},
    "WarpedNormal": lambda: {"loc": torch.zeros(2), "scale": torch.ones(2), "warp": ExpTransform()},
    "YeoJohnsonTransform": lambda: {
        "powers": ONE,
        "shift": ONE,
        "scale": ONE,
        "limits": (-9.0 * ONE, 9.0 * ONE),
        "moments": (0.0 * ONE, ONE),
    },
    "assignment_logits": lambda: {
        "loc": torch.zeros(4, 3),
        "scale": torch.ones(4, 3),
        "mixture": distributions.DiagonalMixture(torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 3)),
    },
    "inducing_posterior": lambda: {"sites": Sites(torch.eye(5), torch.zeros(5))},
    "safe_cholesky": lambda: {"K": torch.eye(2)},
    "without_independent": lambda: {"fn": dist.Normal(0.0, 1.0)},
    "categorical_assignments": lambda: {"log_weights": torch.zeros(2), "log_likelihood": torch.zeros(4, 2)},
    "concentration": lambda: {"shape": torch.tensor(1.0), "rate": torch.tensor(1.0), "a": torch.ones(3), "b": torch.ones(3)},
    "dirichlet_log_weights": lambda: {"concentration": torch.ones(3)},
    "dirichlet_weights": lambda: {"assignments": torch.ones(4, 3), "concentration": torch.ones(3)},
    "gamma_precision": lambda: {"shape": torch.tensor(1.0), "rate": torch.tensor(1.0), "expected_squares": torch.ones(3)},
    "gaussian_weights": lambda: {
        "prior": conjugate.NaturalGaussian(torch.zeros(2), torch.eye(2)),
        "features": torch.ones(4, 2),
        "targets": torch.ones(4),
        "precision": torch.ones(4),
    },
    "normal_inverse_wishart": lambda: {
        "prior": conjugate.NormalInverseWishart(torch.zeros(2), torch.tensor(1.0), torch.eye(2), torch.tensor(5.0)),
        "responsibilities": torch.ones(4, 2),
        "mean": torch.zeros(4, 2),
    },
    "normal_inverse_wishart_kl": lambda: {"q": components(), "p": components()},
    "normal_log_likelihood": lambda: {"components": components(), "mean": torch.zeros(4, 2)},
    "stick_breaking": lambda: {"assignments": torch.ones(4, 3), "concentration": torch.tensor(1.0)},
    "stick_log_weights": lambda: {"a": torch.ones(3), "b": torch.ones(3)},
    "MLP": lambda: {"in_dim": 1, "out_dim": 1},
    "FactorNet": lambda: {"data_dim": D, "latent_dim": 2},
    "IndexNet": lambda: {"data_dim": D, "latent_dim": 2},
    "PointNet": lambda: {"data_dim": D, "latent_dim": 2},
    "ZeroImputation": lambda: {"data_dim": D, "latent_dim": 2},
    "NeighbourNet": lambda: {"encoder": networks.IndexNet(D, 2), "input_dim": 1, "latent_dim": 2},
    "OffsetNet": lambda: {"encoder": networks.IndexNet(D, 2), "feature_dim": 2, "input_dim": 1, "latent_dim": 2},
    "as_pyro_module": lambda: {"network": networks.MLP(1, 1)},
    "loc_and_scale": lambda: {"output": torch.zeros(3, 4), "init_scale": 1.0},
    "mask_entries": lambda: {"fraction": 0.5},
    "mask_like_rows": lambda: {"y": Y},
    "mask_like_shifted": lambda: {"y": Y},
    "replace_parameter": lambda: {"owner": likelihoods.Gaussian(), "name": "variance", "value": torch.tensor(1.0)},
    "bound_sandwich": lambda: annealed(likelihood_term="fitc") | {"latents": latents(), "num_samples": 1},
    "calibrate": lambda: {"prediction": prediction(), "y": Y},
    "chain_gain": lambda: annealed() | {"num_samples": 2},
    "effective_sample_size": lambda: {"log_weights": torch.zeros(30)},
    "gap_folds": lambda: {"y": torch.where(torch.rand(N, D) < 0.2, torch.nan, Y)},
    "shifted_folds": lambda: {"y": Y},
    "fit_restarts": lambda: {"make": lambda seed: fitted(), "args": (Y,), "num_restarts": 1, "num_steps": 1},
    "held_out_log_prob": lambda: {"candidates": {"a": lambda y: prediction()}, "y": Y, "folds": [torch.rand(N, D) < 0.1]},
    "held_out_nll": lambda: {"candidates": {"a": lambda y: prediction()}, "y": Y, "folds": [torch.rand(N, D) < 0.1]},
    "log_weights": with_model(num_samples=2),
    "loo": with_model(num_samples=25, num_local_samples=2),
    "observed_entries": lambda: {"tree": to_arviz(*fitted(), Y, num_samples=2)},
    "pareto_k": lambda: {"log_weights": torch.randn(30)},
    "stacking_weights": lambda: {"log_prob": {"a": torch.randn(9), "b": torch.randn(9)}},
    "to_arviz": with_model(num_samples=2),
    "bouncing_balls": lambda: {"num_sequences": 2, "num_steps": 3},
    "ghcn_daily": lambda: {"stations": "none", "years": [2000], "download": False},
    "load_dataset": lambda: {"name": "bridges", "download": False},
    "s_curve": lambda: {"num_data": 5, "data_dim": 3},
    "single_cells": lambda: {"num_cells": 5, "num_genes": 3},
    "Cells": lambda: {"table": Y, "rows": None, "categories": {}},
    "as_tensor": lambda: {"table": Y},
    "from_anndata": lambda: {"adata": annotated()},
    "write_latents": lambda: {"adata": annotated(), "latents": torch.zeros(N, 2)},
    "plot_ard": lambda: {"relevance": torch.ones(3)},
    "plot_bounds": lambda: {"histories": {"a": [1.0, 2.0]}},
    "plot_field": lambda: {"places": X, "values": torch.zeros(N)},
    "plot_latents": lambda: {"mean": X},
    "plot_reconstructions": lambda: {"Y": torch.rand(2, 4), "Y_hat": torch.rand(2, 4), "image_shape": (2, 2)},
    "plot_ranks": lambda: {"ranks": {"x": site_ranks()}},
    "plot_relevances": lambda: {"relevance": {"a": torch.ones(3)}},
    "plot_series": lambda: {"t": T[:, 0], "mean": Y},
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for package in PACKAGES:
        module = importlib.import_module(f"pyro_lvgp.{package}")
        for name in module.__all__:
            if callable(value := getattr(module, name)) and name not in SKIPPED:
                yield name, value


def parameters(value: Callable[..., Any]) -> list[str]:
    function: Any = value.__init__ if isinstance(value, type) else value
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds and name != "self"]


CASES = [(name, value, parameter) for name, value in public() for parameter in parameters(value)]


def call(value: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    arguments = dict(arguments)
    args = arguments.pop("args", ())
    names = [p for p in parameters(value) if p in arguments]
    if args:  # data come after the arguments that are given by position
        signature = inspect.signature(value).parameters
        first = [name for name in names if signature[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        value(*(arguments.pop(name) for name in first), *args, **arguments)
    elif "kernels" in arguments:
        value(*arguments["kernels"], **{name: arguments[name] for name in names})
    else:
        value(**arguments)


@pytest.mark.parametrize(("name", "value"), list(public()), ids=[name for name, _ in public()])
def test_valid_arguments_work(name: str, value: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise other arguments would not be reached."""
    monkeypatch.chdir(tmp_path)
    try:
        call(value, VALID.get(name, dict)())
    except FileNotFoundError:
        assert name in ("load", "load_dataset", "ghcn_daily")


@pytest.mark.parametrize(("name", "value", "parameter"), CASES, ids=[f"{name}-{parameter}" for name, _, parameter in CASES])
def test_other_kinds_are_fine_or_named(
    name: str, value: Callable[..., Any], parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    valid = VALID.get(name, dict)()
    for kind, wrong in WRONG.items():
        pyro.clear_param_store()
        try:
            call(value, valid | {parameter: wrong})
        except FileNotFoundError:  # which names the file
            continue
        except (TypeError, ValueError) as error:
            text = str(error)
            assert "expected" in text or "unexpected keyword" in text or "missing" in text, (kind, text)
            continue
        if isinstance(value, type):  # a constructor would tell later, or never
            arguments: Any = valid | {parameter: wrong}
            check_types(value.__init__, (None,), {key: arguments[key] for key in parameters(value) if key in arguments})  # type: ignore[misc]
