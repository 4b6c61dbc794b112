"""All models that are killed, interrupted, or written to damaged files and full disks: nothing is lost."""

import errno
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from pyro_lvgp.infer import Callback, Checkpoint, MeanFieldELBO, StructuredELBO, fit, load, pyro_lock, save
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

N, D = 12, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
T = torch.linspace(0.0, 1.0, N)[:, None]
FULL = OSError(errno.ENOSPC, "No space left on device")


def gplvm() -> tuple[Any, ...]:
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
    return model, MeanFieldGuide(model), (Y,), {"loss": MeanFieldELBO()}


def random_features() -> tuple[Any, ...]:
    model = RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4, num_components=2).initialize(Y)
    guide = RandomFeatureGuide(model)
    return model, guide, (Y,), {"optim": guide.blocks()}


def gp_vae() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = GPVAE(RBF(1, lengthscale=0.3), MLP(1, D, [4]))
    return model, StructuredGPGuide(model, encoders={"f": IndexNet(D, 1)}), (T, Y), {"loss": StructuredELBO()}


def sparse_gp_vae() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = SparseGPVAE(RBF(1, lengthscale=0.3), MLP(1, D, [4]), T[::3].clone())
    return model, SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 1)}), (T, Y), {"loss": MeanFieldELBO()}


def annealed_gplvm() -> tuple[Any, ...]:
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y)
    return model, AutoAnnealedLangevin(model, num_steps=2), (Y,), {}


Make = Callable[[], tuple[Any, ...]]
MODELS: list[Make] = [gplvm, annealed_gplvm, random_features, gp_vae, sparse_gp_vae]
of_all_models = pytest.mark.parametrize("make", MODELS)


def fitted(make: Make, *callbacks: Callback, num_steps: int = 2) -> tuple[Any, Any]:
    pyro.clear_param_store()
    model, guide, data, options = make()
    fit(model, guide, *data, num_steps=num_steps, callbacks=callbacks, progress=False, **options)
    return model, guide


def damaged(content: bytes, positions: range, seed: int) -> bytes:
    """Flip a bit at a position that the seed determines."""
    random = torch.Generator().manual_seed(seed)
    position = positions[int(torch.randint(len(positions), (), generator=random))]
    changed = bytearray(content)
    changed[position] ^= 1 << int(torch.randint(8, (), generator=random))
    return bytes(changed)


def positions_of_states(path: Path) -> range:
    """Positions of the longest tensor of a checkpoint; bits between records, and some of the pickle, have no meaning."""
    with zipfile.ZipFile(path) as archive:
        tensors = [record for record in archive.infolist() if "/data/" in record.filename]
        longest = max(tensors, key=lambda record: record.file_size)
        with archive.open(longest) as record:
            start = path.read_bytes().index(record.read())
    return range(start, start + longest.file_size)


@of_all_models
def test_a_damaged_checkpoint_is_refused(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    fitted(make, Checkpoint(path))
    whole, positions = path.read_bytes(), positions_of_states(path)
    for seed in range(5):
        path.write_bytes(damaged(whole, positions, seed))
        with pytest.raises(ValueError, match=r"cannot be read|was changed|states of a fit"):
            fitted(make, Checkpoint(path), num_steps=3)


@of_all_models
def test_a_damaged_saved_model_is_refused(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, *fitted(make))
    whole = path.read_bytes()
    for seed in range(20):
        path.write_bytes(damaged(whole, range(len(whole)), seed))
        with pytest.raises(ValueError, match=r"expected .*wrote"):
            load(path)


def test_the_memory_of_a_guide_is_saved(tmp_path: Path) -> None:
    model, guide = fitted(sparse_gp_vae)
    guide.condition(T, Y)
    save(tmp_path / "model.safetensors", model, guide)
    _, again = load(tmp_path / "model.safetensors")
    for own, loaded in zip(guide.memory, again.memory, strict=True):
        assert torch.equal(own, loaded)


@of_all_models
def test_a_full_disk_leaves_the_last_checkpoint(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.pt"
    fitted(make, Checkpoint(path))
    before = path.read_bytes()

    def fail(states: Any, unfinished: Path) -> None:
        unfinished.write_bytes(b"half")
        raise FULL

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="the last checkpoint is as it was"):
        fitted(make, Checkpoint(path), num_steps=3)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@of_all_models
def test_a_full_disk_leaves_the_last_saved_model(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    model, guide = fitted(make)
    save(path, model, guide)
    before = path.read_bytes()

    def fail(unfinished: Path, content: bytes) -> None:
        with unfinished.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="an old file of that name is as it was"):
        save(path, model, guide)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def kill_each(folder: Path) -> None:
    """Fit each model in a child process, which is killed in the middle of its third step or of its second checkpoint."""

    class KillsInStep(Callback):
        def on_step(self, state: Any) -> None:
            if state.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    for make in MODELS:  # imports, once for all children
        fitted(make, num_steps=1)
    save_whole = torch.save

    def kill_in_checkpoint(states: Any, unfinished: Path) -> None:
        if states["history"]["losses"][1:]:
            unfinished.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save_whole(states, unfinished)

    for make in MODELS:
        for moment in ("step", "checkpoint"):
            if not os.fork():
                torch.save = kill_in_checkpoint if moment == "checkpoint" else save_whole
                callbacks = (Checkpoint(folder / f"{make.__name__}_{moment}.pt", every=1), KillsInStep())
                fitted(make, *callbacks, num_steps=5)
                os._exit(1)
            _, status = os.wait()
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (make, moment)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints of killed fits."""
    folder = tmp_path_factory.mktemp("killed")
    script = "import sys, torch; from pathlib import Path; from tests.infer.test_files_of_models import kill_each\n"
    script += "torch.set_num_threads(1); kill_each(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("moment", ["step", "checkpoint"])
@of_all_models
def test_a_fit_that_was_killed_goes_on_as_if_it_had_not_been(make: Make, moment: str, killed: Path) -> None:
    expected, expected_guide = fitted(make, num_steps=5)
    path = killed / f"{make.__name__}_{moment}.pt"
    before = len(torch.load(path, weights_only=True)["history"]["losses"])
    assert before == (2 if moment == "step" else 1)
    found, guide = fitted(make, Checkpoint(path), num_steps=5)
    for one, other in ((expected, found), (expected_guide, guide)):
        for name, value in one.named_parameters():
            assert torch.equal(other.get_parameter(name), value), name


@of_all_models
def test_an_interrupted_fit_is_usable(make: Make) -> None:
    class Stop(Callback):
        def on_step(self, state: Any) -> None:
            if state.step == 2:
                raise KeyboardInterrupt

    model, guide, data, options = make()
    history = fit(model, guide, *data, num_steps=5, callbacks=[Stop()], progress=False, **options)
    assert (history.interrupted, len(history.losses)) == (True, 2)
    assert model.impute(guide, *data, num_samples=2).mean.isfinite().all()
    assert not fit(model, guide, *data, num_steps=2, progress=False, **options).interrupted


@of_all_models
def test_two_threads_fit_what_one_does(make: Make) -> None:
    def losses(seed: int) -> list[float]:
        with pyro_lock:  # initial values of networks come from the global random state
            model, guide, data, options = make()
        return fit(model, guide, *data, num_steps=3, seed=seed, progress=False, **options).losses

    expected = [losses(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(losses, range(2))) == expected


@of_all_models
def test_a_fit_that_was_interrupted_goes_on_as_if_it_had_not_been(make: Make, tmp_path: Path) -> None:
    class Interrupted(Checkpoint):
        def on_step(self, state: Any) -> None:
            super().on_step(state)
            if state.step == 2:
                raise KeyboardInterrupt

    expected, _ = fitted(make, num_steps=5)
    fitted(make, Interrupted(tmp_path / "fit.pt"), num_steps=5)
    found, _ = fitted(make, Checkpoint(tmp_path / "fit.pt"), num_steps=5)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
