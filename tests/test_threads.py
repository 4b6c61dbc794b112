"""Fits and predictions in several threads, against the same calls in sequence."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from joblib import Parallel, delayed
from torch import Tensor

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import Callback, MeanFieldELBO, StructuredELBO, fit, pyro_lock, sample_traces
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, LinearGPVAE, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.sklearn import GPLVM

Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
x = torch.linspace(0.0, 1.0, 12)[:, None]
Calls = Sequence[Callable[[], Any]]


def in_pool(calls: Calls) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def by_joblib(calls: Calls) -> list[Any]:
    return Parallel(n_jobs=len(calls), backend="threading")(delayed(call)() for call in calls)


def by_asyncio(calls: Calls) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(call) for call in calls))

    return asyncio.run(gather())


WAYS = [in_pool, by_joblib, by_asyncio]


def gplvm() -> tuple[Any, ...]:
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    return model, MeanFieldGuide(model), (Y,), {"loss": MeanFieldELBO(), "batch_size": 5}


def random_features() -> tuple[Any, ...]:
    model = RandomFeatureLVM(12, 3, latent_dim=2, num_frequencies=4, num_components=2).initialize(Y)
    guide = RandomFeatureGuide(model)
    return model, guide, (Y,), {"optim": guide.blocks()}


def gpvae() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = GPVAE(RBF(1, lengthscale=0.3), MLP(1, 3, [4]))
    return model, StructuredGPGuide(model, encoders={"f": IndexNet(3, 1)}), (x, Y), {"loss": StructuredELBO()}


def fitted(make: Callable[[], tuple[Any, ...]], seed: int) -> tuple[list[float], Tensor]:
    with pyro_lock:  # the initial values of networks come from the global random state
        model, guide, data, options = make()
    history = fit(model, guide, *data, num_steps=8, seed=seed, progress=False, **options)
    with pyro_lock:
        pyro.set_rng_seed(seed)
        mean = (model.predict(guide, *data) if len(data) == 2 else model.reconstruct(guide, *data)).mean
    return history.losses, mean


@pytest.fixture(scope="module")
def fits() -> tuple[Calls, list[Any]]:
    """Calls, and what they return in sequence."""
    calls = [lambda make=make, seed=seed: fitted(make, seed) for make in (gplvm, gpvae, random_features) for seed in (1, 2)]
    return calls, [call() for call in calls]


@pytest.mark.parametrize("way", WAYS)
def test_fits_equal_those_in_sequence(way: Callable[[Calls], list[Any]], fits: tuple[Calls, list[Any]]):
    calls, expected = fits
    for (losses, mean), (expected_losses, expected_mean) in zip(way(calls), expected, strict=True):
        assert losses == expected_losses
        assert torch.equal(mean, expected_mean)


@pytest.mark.parametrize("way", WAYS)
def test_an_estimator_transforms_in_several_threads(way: Callable[[Calls], list[Any]]):
    estimator = GPLVM(max_iter=20, n_inducing=4, random_state=0).fit(Y.numpy())
    rows = Y.numpy().copy()
    rows[::2, 1] = np.nan
    calls = [lambda part=part: estimator.transform(part) for part in (rows[:4], rows[4:])]
    calls += [lambda: estimator.inverse_transform(estimator.embedding_)] * 2
    expected = [call() for call in calls]
    for found, value in zip(way(calls), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def test_estimators_are_fitted_in_several_threads():
    calls = [lambda seed=seed: GPLVM(max_iter=10, random_state=seed).fit_transform(Y.numpy()) for seed in range(3)]
    for found, value in zip(in_pool(calls), [call() for call in calls], strict=True):
        np.testing.assert_array_equal(found, value)


def test_functions_with_a_seed_equal_those_in_sequence():
    model, guide, data, options = gplvm()
    fit(model, guide, *data, num_steps=3, progress=False, **options)
    linear = LinearGPVAE(None, independent_dim=1)
    linear.fit(x.double(), Y.double(), num_sweeps=2)
    calls = [
        lambda: model.infer_latents(guide, Y, num_steps=5, seed=1).mean,
        lambda: model.infer_latents(guide, Y, method="laplace", num_steps=3).mean,
        lambda: sample_traces(model, guide, Y, num_samples=5, seed=2).log_p,
        lambda: torch.as_tensor(to_arviz(model, guide, Y, num_samples=5, seed=3)["posterior"]["X"].values),
        lambda: guide.median(Y)["X"],
        lambda: linear.predict(seed=4).mean,
    ] * 2
    for found, value in zip(in_pool(calls), [call() for call in calls], strict=True):
        assert torch.equal(found, value)


def test_predictions_without_a_seed_are_valid():
    model, guide, data, options = gplvm()
    fit(model, guide, *data, num_steps=3, progress=False, **options)
    missing = torch.where(torch.arange(36).reshape(12, 3) % 4 == 0, torch.nan, Y)
    calls = [
        lambda: model.predict(guide, torch.zeros(2, 2)).mean,
        lambda: model.reconstruct(guide, Y).mean,
        lambda: model.predictive(guide, torch.zeros(2, 2)).mean,
        lambda: model.impute(guide, missing).mean,
        lambda: pyro_lock(guide.__call__)(Y)["X"],
    ] * 3
    assert all(value.isfinite().all() for value in in_pool(calls))


def test_settings_of_pyro_after_fits_in_threads():
    before = pyro.settings.get()
    in_pool([lambda: GPLVM(max_iter=5, random_state=0).fit(Y.numpy())] * 4)
    assert pyro.settings.get() == before
    assert len(pyro.get_param_store()) == 0


def test_a_callback_may_predict_and_an_error_frees_the_lock():
    class Fails(Callback):
        def on_step(self, state: Any) -> None:
            state.model.reconstruct(state.guide, Y, num_samples=2)
            raise RuntimeError("mine")

    model, guide, data, options = gplvm()
    with pytest.raises(RuntimeError, match="mine"):
        fit(model, guide, *data, num_steps=3, progress=False, callbacks=[Fails()], **options)
    assert in_pool([lambda: fitted(gplvm, 0)[0]])[0] == fitted(gplvm, 0)[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")  # the latter of JAX
def test_a_forked_process_has_a_free_lock():
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pyro_lock:
            taken.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if not child:
        os._exit(0 if pyro_lock._lock.acquire(timeout=5) else 1)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
