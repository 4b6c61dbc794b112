"""Arguments of other types at the public functions, generated from their signatures: errors name the argument."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyro_lvgp import diagnostics, infer, kernels, likelihoods, networks
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.models import GPVAE, BayesianGPLVM, LinearGPVAE, RandomFeatureLVM, SparseGPVAE

pytestmark = pytest.mark.usefixtures("unchecked")

N, D = 8, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
MODEL = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
GUIDE = MeanFieldGuide(MODEL)
GUIDE(Y)

VALID: dict[Callable[..., Any], dict[str, Any]] = {
    kernels.RBF: {"input_dim": 1},
    kernels.Matern: {"input_dim": 1, "nu": 1.5},
    kernels.Periodic: {"input_dim": 1},
    likelihoods.Gaussian: {"variance": 0.1},
    likelihoods.StudentT: {"scale": 0.1},
    likelihoods.Binomial: {"total_count": 3},
    likelihoods.NegativeBinomial: {"dispersion": 1.0},
    likelihoods.Ordinal: {"edges": torch.zeros(1)},
    networks.MLP: {"in_dim": 1, "out_dim": 1},
    networks.IndexNet: {"data_dim": 3, "latent_dim": 2},
    BayesianGPLVM: {"num_data": N, "data_dim": D, "latent_dim": 2, "num_inducing": 4},
    RandomFeatureLVM: {"num_data": N, "data_dim": D, "latent_dim": 2, "num_frequencies": 4},
    GPVAE: {"kernel": kernels.RBF(1), "decoder": networks.MLP(1, D)},
    SparseGPVAE: {"kernel": kernels.RBF(1), "decoder": networks.MLP(1, D), "inducing_points": torch.zeros(1, 1)},
    LinearGPVAE: {"kernel": None, "independent_dim": 1},
    MeanFieldGuide: {"model": MODEL},
    RandomFeatureGuide: {"model": RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4)},
    StructuredGPGuide: {"model": GPVAE(kernels.RBF(1), networks.MLP(1, D))},
    infer.JointAdam: {"lr": 0.1},
    infer.fit: {"model": MODEL, "guide": GUIDE, "num_steps": 1, "progress": False},
    infer.load: {"path": "model.safetensors"},
    infer.save: {"path": "", "model": MODEL},
    diagnostics.pareto_k: {"log_weights": torch.zeros(30)},
    diagnostics.effective_sample_size: {"log_weights": torch.zeros(30)},
    diagnostics.log_weights: {"model": MODEL, "guide": GUIDE},
    load_dataset: {"name": "bridges"},
    MODEL.predict: {"guide": GUIDE, "X": torch.zeros(2, 2)},
    MODEL.reconstruct: {"guide": GUIDE, "Y": Y},
    MODEL.impute: {"guide": GUIDE, "Y": Y},
    MODEL.infer_latents: {"guide": GUIDE, "Y": Y},
}
CASES = [(function, name) for function, arguments in VALID.items() for name in arguments if name != "progress"]


class Unknown:
    """Object that no function takes."""


@pytest.mark.parametrize("wrong", [Unknown(), "text", Unknown], ids=["object", "string", "class"])
@pytest.mark.parametrize(("function", "name"), CASES, ids=[f"{function.__qualname__}-{name}" for function, name in CASES])
def test_errors_name_the_argument(function: Callable[..., Any], name: str, wrong: Any) -> None:
    arguments = VALID[function] | {name: wrong}
    is_data = function in (infer.fit, diagnostics.log_weights)
    if isinstance(wrong, str) and name in ("path", "name"):
        return
    with pytest.raises((TypeError, ValueError), match="expected"):
        function(*[arguments.pop(key) for key in ("model", "guide") if is_data], *[Y] * is_data, **arguments)


@pytest.mark.parametrize("function", [diagnostics.pareto_k, diagnostics.effective_sample_size])
def test_log_weights_without_entries_or_of_integers(function: Callable[..., Any]) -> None:
    for empty in (torch.zeros(0), torch.zeros(30, 0), torch.zeros(())):
        with pytest.raises(ValueError, match=r"expected log_weights \[draws, ...\] with one draw or more, got \["):
            function(empty)
    with pytest.raises(TypeError, match=r"expected log_weights of a floating-point dtype, got torch.int64; use .*double"):
        function(torch.zeros(30, dtype=torch.long))


@pytest.mark.parametrize("bad", [[1, 2], "text", 0.5])
def test_bounds_decoders_and_networks_are_refused_at_once(bad: Any) -> None:
    for make in (infer.MeanFieldELBO, infer.ImportanceWeightedELBO):
        if not isinstance(bad, str):  # the name of a plate
            with pytest.raises(TypeError, match=r"expected local_plate to be str, got"):
                make(bad)
    with pytest.raises(TypeError, match=r"expected decoder to be .*Module"):
        GPVAE(kernels.RBF(1), bad)


def test_importance_weights_of_collapsed_weights_are_drawn_one_by_one() -> None:
    model = RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4)
    guide = RandomFeatureGuide(model)
    guide(Y)
    with pytest.raises(ValueError, match="num_samples=1 or vectorize=False"):
        diagnostics.log_weights(model, guide, Y, num_samples=3)
    assert diagnostics.log_weights(model, guide, Y, num_samples=3, vectorize=False).shape == (3, N)


def test_what_works_is_not_refused() -> None:
    assert kernels.RBF(np.int64(1), lengthscale=np.float64(0.5)).lengthscale.tolist() == [0.5]
    assert isinstance(infer.JointAdam(lr=1), infer.JointAdam)


def test_errors_of_others_are_as_they_were() -> None:
    def model(y: torch.Tensor) -> None:
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine"):
        infer.fit(model, lambda y: None, Y, num_steps=1, progress=False)


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf, True])
def test_learning_rates(lr: float) -> None:
    with pytest.raises(ValueError, match="expected a finite lr of 0 or more"):
        infer.JointAdam(lr=lr)


def test_a_truth_value_is_no_count() -> None:
    with pytest.raises(TypeError, match="expected a whole number as total_count, got True"):
        likelihoods.Binomial(True)
