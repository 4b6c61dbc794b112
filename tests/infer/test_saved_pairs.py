"""Every model with every guide: saved and loaded, a fit predicts as before, to the last bit, from the first call on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch

from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO, fit, load, save
from pyro_lvgp.kernels import RBF, Cosine, Matern, Stack
from pyro_lvgp.likelihoods import LogNormal, Poisson
from pyro_lvgp.models import GPVAE, BayesianGPLVM, LinearGPVAE, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet, PointNet, ZeroImputation

N, D = 12, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
Y[1, 2] = torch.nan
T = torch.linspace(0.0, 1.0, N)[:, None]
SERIES = torch.stack([Y, Y.flip(0)])
Make = Callable[[], tuple[Any, Any, tuple[torch.Tensor, ...], dict[str, Any]]]


def of_rows(make_model: Callable[[], Any], make_guide: Callable[[Any], Any], **options: Any) -> Make:
    def make() -> tuple[Any, Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        model = make_model().initialize(Y)
        guide = make_guide(model)
        return model, guide, (Y,), {"optim": guide.blocks()} if isinstance(guide, RandomFeatureGuide) else options

    return make


def gplvm() -> BayesianGPLVM:
    return BayesianGPLVM(N, D, latent_dim=2, num_inducing=4)


def random_features() -> RandomFeatureLVM:
    return RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4, num_components=2)


def of_series(
    encoders: Any = None, y: torch.Tensor = Y, batch_size: int | None = None, likelihood: Any = None, **options: Any
) -> Make:
    def make() -> tuple[Any, Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        torch.manual_seed(0)
        model = GPVAE(
            RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2 + len(options), D, [4]), likelihood, num_data=len(y), **options
        )
        guide = StructuredGPGuide(model, encoders=encoders and encoders())
        return model, guide, (T, y), {"loss": StructuredELBO(), "batch_size": batch_size}

    return make


def of_sparse(
    make_guide: Callable[[Any], Any], y: torch.Tensor = Y, points: tuple[int, ...] = (4, 1), batch_size: int | None = None
) -> Make:
    def make() -> tuple[Any, Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        torch.manual_seed(0)
        inputs = T[::3].expand(points).contiguous()
        model = SparseGPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2, D, [4]), inputs, num_data=len(y))
        return model, make_guide(model), (T, y), {"loss": MeanFieldELBO(), "batch_size": batch_size}

    return make


PAIRS: dict[str, Make] = {
    "gplvm, mean field": of_rows(gplvm, MeanFieldGuide),
    "gplvm, full": of_rows(gplvm, lambda model: MeanFieldGuide(model, covariance={"X": "full"})),
    "gplvm, encoder": of_rows(gplvm, lambda model: MeanFieldGuide(model, encoders={"X": ZeroImputation(D, 2, [5])})),
    "gplvm, annealed": of_rows(gplvm, lambda model: AutoAnnealedLangevin(model, num_steps=2)),
    "low rank": of_rows(lambda: BayesianGPLVM.from_data(Y, 2, rank=1, num_inducing=4), MeanFieldGuide),
    "random features": of_rows(random_features, RandomFeatureGuide),
    "random features, mean field": of_rows(random_features, MeanFieldGuide),
    "random features, annealed": of_rows(random_features, lambda model: AutoAnnealedLangevin(model, num_steps=2)),
    "gp-vae, free sites": of_series(),
    "gp-vae, encoder": of_series(lambda: {"f": IndexNet(D, 2)}),
    "gp-vae, independent latents": of_series(lambda: {"f": IndexNet(D, 2)}, independent_dim=1),
    "gp-vae, series": of_series(y=SERIES),
    "gp-vae, series, batches": of_series(y=SERIES.repeat(2, 1, 1), batch_size=2),
    "gp-vae, point batches": of_series(lambda: {"f": PointNet(D, 2)}, batch_size=5),
    "gp-vae, counts": of_series(y=Y.exp().round(), likelihood=Poisson()),
    "gp-vae, positive": of_series(y=Y.exp(), likelihood=LogNormal()),
    "sparse gp-vae, encoder": of_sparse(lambda model: SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)})),
    "sparse gp-vae, free sites": of_sparse(SparseStructuredGPGuide),
    "sparse gp-vae, mean field": of_sparse(MeanFieldGuide),
    "sparse gp-vae, points of series": of_sparse(
        lambda model: SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)}), SERIES, (2, 1, 4, 1), 1
    ),
}


def predictions(model: Any, guide: Any, data: tuple[torch.Tensor, ...], seed: int | None) -> list[torch.Tensor]:
    """Means and variances of imputations and predictions."""
    results = [model.impute(guide, *data, num_samples=3, seed=seed)]
    if isinstance(model, BayesianGPLVM | RandomFeatureLVM):
        results.append(model.predict(guide, torch.linspace(-1.0, 1.0, 4).reshape(2, 2), num_samples=3, seed=seed))
    else:
        results.append(model.predict(guide, *data, torch.tensor([[1.1], [1.2]]), num_samples=3, seed=seed))
    return [moment for result in results for moment in (result.mean, result.variance)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_loaded_pair_predicts_as_the_fit(name: str, tmp_path: Path) -> None:
    model, guide, data, options = PAIRS[name]()
    fit(model, guide, *data, num_steps=2, progress=False, **options)
    save(tmp_path / "fit", model, guide)
    expected = predictions(model, guide, data, seed=3)
    torch.manual_seed(5)
    expected_of_global_state = predictions(model, guide, data, seed=None)
    pyro.clear_param_store()
    state = torch.get_rng_state()
    again, its_guide = load(tmp_path / "fit")
    found = predictions(again, its_guide, data, seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # neither loading nor a prediction with a seed changes it
    assert all(map(torch.equal, found, expected))
    again, its_guide = load(tmp_path / "fit")
    torch.manual_seed(5)  # a first call draws what any call draws
    assert all(map(torch.equal, predictions(again, its_guide, data, seed=None), expected_of_global_state))
    save(tmp_path / "again", again, its_guide)  # and a loaded pair can be saved
    assert all(map(torch.equal, predictions(*load(tmp_path / "again"), data, seed=3), expected))


LINEAR = {
    "white latents": lambda: LinearGPVAE(None, independent_dim=2),
    "markov": lambda: LinearGPVAE(Matern(1, 1.5, lengthscale=0.2, batch_shape=(2,)), independent_dim=1),
    "stack": lambda: LinearGPVAE(Stack(RBF(1), Matern(1))),
    "product": lambda: LinearGPVAE(Matern(1, batch_shape=(1,)) * Cosine(1, batch_shape=(1,)), independent_dim=1),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_linear_model_predicts_as_the_fit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = LINEAR[name]()
    model.fit(T.to(dtype), Y.to(dtype), num_sweeps=4)
    save(tmp_path / "model", model)
    state = torch.get_rng_state()
    again, guide = load(tmp_path / "model")
    assert guide is None
    assert torch.equal(torch.get_rng_state(), state)
    for x_new in (None, torch.tensor([[1.1], [1.2]], dtype=torch.float64)):
        one, other = model.predict(x_new), again.predict(x_new)
        assert one.mean.dtype == other.mean.dtype == dtype
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.variance, other.variance)
    assert again.fit(T.to(dtype), Y.to(dtype), num_sweeps=2)  # a loaded model can be fitted


def test_an_unfitted_linear_model_and_a_state_dict(tmp_path: Path) -> None:
    save(tmp_path / "model", LINEAR["markov"]())
    again, _ = load(tmp_path / "model")
    assert again.factors is None
    with pytest.raises(ValueError, match="expected a fitted model"):
        again.predict()
    fitted = LINEAR["markov"]()
    fitted.fit(T, Y, num_sweeps=2)
    again.load_state_dict(fitted.state_dict())
    assert torch.equal(again.predict().mean, fitted.predict().mean)


def test_extras_are_saved(tmp_path: Path) -> None:
    model, guide, data, options = PAIRS["gplvm, mean field"]()
    fit(model, guide, *data, num_steps=1, progress=False, **options)
    extras = {"mean": torch.arange(3.0), "columns": ["a", "b", "c"], "scale": 2.5, "nested": {"log": (True, None)}}
    save(tmp_path / "fit", model, guide, extras=extras)
    found = load(tmp_path / "fit").extras
    assert torch.equal(found.pop("mean"), extras.pop("mean"))
    assert found == extras
    save(tmp_path / "fit", model, guide)
    assert load(tmp_path / "fit").extras == {}
    with pytest.raises(TypeError, match=r"expected numbers, strings and tensors as extras, got \['Linear', 'ndarray'\]"):
        save(tmp_path / "fit", model, guide, extras={"array": Y.numpy(), "layer": torch.nn.Linear(1, 1)})
