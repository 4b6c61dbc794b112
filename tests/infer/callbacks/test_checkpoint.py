"""A fit that goes on from a file against one that was never stopped."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD, ClippedAdam
from torch import Tensor
from torch.distributions import constraints

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import Callback, Checkpoint, EarlyStopping, FitResult, JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.infer._parameters import name_parameters
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM
from tests.helpers.fits import OnStep

Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Case = tuple[Any, Any, dict[str, Any]]


def mini_batches() -> Case:
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    return model, MeanFieldGuide(model), {"batch_size": 5, "callbacks": [LRSchedule("cosine")], "loss": MeanFieldELBO()}


def annealed() -> Case:
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    return model, AutoAnnealedLangevin(model, num_steps=2), {"batch_size": 4, "loss": MeanFieldELBO(num_samples=1)}


def stopping_early() -> Case:
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    guide = MeanFieldGuide(model)
    stopping = EarlyStopping(lambda: (guide.median()["X"][0, 0] - 1.0).abs().item(), every=2)
    return model, guide, {"callbacks": [stopping], "optim": JointAdam(lr=0.5)}


def blocks() -> Case:
    model = RandomFeatureLVM(12, 3, latent_dim=2, num_frequencies=4, num_components=3).initialize(Y)
    guide = RandomFeatureGuide(model)
    return model, guide, {"optim": guide.blocks(), "callbacks": [LRSchedule("cosine")]}


def functions() -> Case:
    def model(y: Tensor) -> None:
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, scale).to_event(1), obs=y)

    def guide(y: Tensor) -> None:
        mean = pyro.param("mean", lambda: torch.randn(3))
        pyro.sample("loc", dist.Normal(mean, 0.1).to_event(1))

    return model, guide, {"optim": ClippedAdam({"lr": 0.1, "lrd": 0.9})}


def doubled() -> Case:
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).double().initialize(Y.double())
    return model, MeanFieldGuide(model), {"batch_size": 5, "loss": MeanFieldELBO()}


CASES = [mini_batches, annealed, stopping_early, blocks, functions]


def fitted(case: Callable[[], Case], *callbacks: Callback, **options: Any) -> tuple[FitResult, dict[str, Tensor]]:
    """The history and all values of a fit with everything new, as in another process."""
    pyro.clear_param_store()
    model, guide, settings = case()
    settings = settings | {"num_steps": 12} | options
    both = [*settings.pop("callbacks", []), *callbacks]
    data = Y.double() if case is doubled else Y
    history = fit(model, guide, data, progress=False, callbacks=both, **settings)
    stored = dict(pyro.get_param_store().named_parameters())
    return history, {path: value.detach().clone() for path, value in name_parameters(model, guide, stored).items()}


class Killed(Exception):
    pass


def kill(step: int, loss: float) -> None:
    if step == 7:
        raise Killed


def assert_same(one: tuple[FitResult, dict[str, Tensor]], other: tuple[FitResult, dict[str, Tensor]]) -> None:
    assert one[0].losses == other[0].losses
    assert one[0].scores == other[0].scores
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("case", CASES)
def test_a_fit_that_was_killed_goes_on_as_if_it_had_not_been(case: Callable[[], Case], tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt", every=3)
    with pytest.raises(Killed):
        fitted(case, checkpoint, OnStep(kill))
    steps: list[int] = []
    resumed = fitted(case, checkpoint, OnStep(lambda step, loss: steps.append(step)))
    assert steps == list(range(6, 12))
    assert_same(resumed, fitted(case))
    assert resumed[0].seconds == sorted(resumed[0].seconds)


def test_ctrl_c_leaves_the_step_that_it_came_after(tmp_path: Path):
    def interrupt(step: int, loss: float) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run
    try:
        checkpoint = Checkpoint(tmp_path / "fit.pt")
        history, _ = fitted(mini_batches, checkpoint, OnStep(interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert history.interrupted
    assert len(history.losses) == 5
    steps: list[int] = []
    resumed = fitted(mini_batches, checkpoint, OnStep(lambda step, loss: steps.append(step)))
    assert steps == list(range(5, 12))
    assert_same(resumed, fitted(mini_batches))


def test_what_was_written_with_a_gpu_is_read_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        pytest.skip("a file that names a GPU is read with one here")
    checkpoint = Checkpoint(tmp_path / "fit.pt", every=3)
    with monkeypatch.context() as patched:  # as there, but for the numbers
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()])
        with pytest.raises(Killed):
            fitted(mini_batches, checkpoint, OnStep(kill))
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(checkpoint.path)
    assert_same(fitted(mini_batches, checkpoint), fitted(mini_batches))


def test_a_finished_fit_takes_no_more_steps_unless_there_are_more(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt")
    first = fitted(annealed, checkpoint)
    assert_same(fitted(annealed, checkpoint), first)
    assert_same(fitted(annealed, checkpoint, num_steps=15), fitted(annealed, num_steps=15))


def test_a_fit_that_stopped_early_has_stopped(tmp_path: Path):
    def rising() -> Case:
        model, guide, settings = stopping_early()
        scores = iter([1.0, 2.0, 3.0])
        return model, guide, settings | {"callbacks": [EarlyStopping(lambda: next(scores), every=2, patience=2)]}

    checkpoint = Checkpoint(tmp_path / "fit.pt")
    first = fitted(rising, checkpoint)
    assert len(first[0].losses) == 6
    assert_same(fitted(rising, checkpoint), first)


def test_a_fit_goes_on_without_the_rule_that_stopped_it(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt")
    _, expected = fitted(stopping_early, callbacks=[])
    worse_and_worse = iter(range(9)).__next__
    fitted(stopping_early, checkpoint, num_steps=4, callbacks=[EarlyStopping(worse_and_worse, every=2)])
    _, values = fitted(stopping_early, checkpoint, callbacks=[])
    for name, value in expected.items():
        assert torch.equal(values[name], value)


def test_a_writing_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = Checkpoint(tmp_path / "fit.pt", every=3)
    fitted(mini_batches, checkpoint, num_steps=3)
    before = checkpoint.path.read_bytes()

    def fail(states: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        fitted(mini_batches, checkpoint, num_steps=6)
    assert checkpoint.path.read_bytes() == before


@pytest.mark.usefixtures("unchecked")
def test_what_fits_no_checkpoint_is_refused(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt")
    fitted(mini_batches, checkpoint)
    with pytest.raises(ValueError, match="12 rows with batch_size=4, got one of 12 with batch_size=5"):
        fitted(mini_batches, checkpoint, batch_size=4)
    with pytest.raises(ValueError, match=r"differs in \['guide.*make them as they were"):
        fitted(annealed, checkpoint, batch_size=5)
    with pytest.raises(ValueError, match=r"differs in \['guide.*make them as they were"):
        fitted(doubled, checkpoint)
    for optim, found in ((ClippedAdam({"lr": 0.1}), "PyroOptim of ClippedAdam"), (None, "JointAdam of Adam")):
        fitted(mini_batches, Checkpoint(tmp_path / found), optim=optim)
        with pytest.raises(ValueError, match=rf"which are .*PyroOptim of SGD.*got .*{found}.*set up the fit as it was"):
            fitted(mini_batches, Checkpoint(tmp_path / found), optim=SGD({"lr": 0.1}))
    torch.save({"model": {}}, checkpoint.path)
    with pytest.raises(ValueError, match=r"expected the states of a fit in .*fit\.pt, .*got \['model'\]; set up the fit"):
        fitted(mini_batches, checkpoint)
    with pytest.raises(TypeError, match=r"a Callback, got \['fit.pt'\]; give callbacks=\[Checkpoint\(path\)\]"):
        fit(*mini_batches()[:2], Y, callbacks=["fit.pt"])
    with pytest.raises(ValueError, match="expected a checkpoint in a folder that exists"):
        Checkpoint(tmp_path / "none" / "fit.pt")
    with pytest.raises(ValueError, match="every"):
        Checkpoint(tmp_path / "fit.pt", every=0)


def test_what_cannot_be_read_is_refused(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt")
    fitted(mini_batches, checkpoint)
    whole = Path(checkpoint.path).read_bytes()
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2]):
        Path(checkpoint.path).write_bytes(content)
        with pytest.raises(ValueError, match=r"fit\.pt, got a file that cannot be read \(.*Error\).*remove this one"):
            fitted(mini_batches, checkpoint)


def test_what_is_refused_leaves_model_and_guide_alone(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path / "fit.pt")
    fitted(mini_batches, checkpoint)
    pyro.clear_param_store()
    model, guide, settings = mini_batches()
    guide(Y)
    before = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    with pytest.raises(ValueError, match="with batch_size=4"):
        fit(model, guide, Y, **settings | {"batch_size": 4, "callbacks": [checkpoint]}, progress=False)
    for name, value in before.items():
        assert torch.equal(pyro.param(name), value)


def test_optimisers_that_know_parameters_by_names_need_names(tmp_path: Path):
    with pyro.settings.context(module_local_params=True):
        fitted(mini_batches, Checkpoint(tmp_path / "joint.pt"))
        with pytest.raises(ValueError, match=r"parameters with names .* take pyro_lvgp\.infer\.JointOptim"):
            fitted(mini_batches, Checkpoint(tmp_path / "fit.pt"), optim=ClippedAdam({"lr": 0.1}))
