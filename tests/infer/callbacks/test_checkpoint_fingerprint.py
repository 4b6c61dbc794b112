"""Checkpoints of other data or settings, damaged ones, and states of optimisers that do not fit."""

import errno
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Checkpoint, JointAdam, JointOptim, MeanFieldELBO, fit
from pyro_lvgp.infer.callbacks._fingerprint import digest
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import BayesianGPLVM

Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def fitted(path: Path, Y: torch.Tensor = Y, *, model: dict[str, Any] | None = None, **settings: Any) -> BayesianGPLVM:
    pyro.clear_param_store()
    options = {"num_steps": 2, "loss": MeanFieldELBO(), "progress": False} | settings
    options["callbacks"] = [Checkpoint(path), *options.get("callbacks", [])]
    part = BayesianGPLVM(len(Y), Y.shape[1], latent_dim=2, num_inducing=4, **(model or {}))
    fit(part, MeanFieldGuide(part), Y, **options)
    return part


def frozen() -> RBF:
    kernel = RBF(2)
    kernel.lengthscale_unconstrained.requires_grad_(False)
    return kernel


DIFFERENT = [
    ({"Y": Y.roll(5, 0) + 5.0}, r"data\[0\]"),
    ({"Y": torch.where(torch.eq(Y, Y[3, 0]), torch.nan, Y)}, r"data\[0\]"),
    ({"seed": 1}, r"seed \(0 there, 1 here\)"),
    ({"loss": MeanFieldELBO(num_samples=3)}, r"loss.num_samples \(2 there, 3 here\)"),
    ({"optim": JointAdam(lr=0.5)}, r"optim.lr \(0.01 there, 0.5 here\)"),
    ({"model": {"kernel": frozen()}}, r"model.kernel.frozen \(None there, \['lengthscale_unconstrained'\] here\)"),
    ({"model": {"kernel": Matern(2, 1.5)}}, r"model.kernel \('?RBF'? there, '?Matern'? here\)"),
]


@pytest.mark.parametrize(("other", "match"), DIFFERENT, ids=["data", "gaps", "seed", "bound", "optimiser", "frozen", "kernel"])
def test_a_checkpoint_of_another_fit_is_refused_and_named(tmp_path, other, match):
    model: Any = {"model": {"kernel": RBF(2)}}
    fitted(tmp_path / "fit.pt", **model)
    before = (tmp_path / "fit.pt").read_bytes()
    with pytest.raises(ValueError, match=rf"expected a checkpoint of this fit, got one that differs in {match}"):
        fitted(tmp_path / "fit.pt", **{"model": {"kernel": RBF(2)}} | other)
    assert (tmp_path / "fit.pt").read_bytes() == before


def test_more_steps_and_other_callbacks_are_the_same_fit(tmp_path):
    fitted(tmp_path / "fit.pt")
    fitted(tmp_path / "fit.pt", num_steps=4, callbacks=[Checkpoint(tmp_path / "other.pt")])
    assert len(torch.load(tmp_path / "fit.pt", weights_only=True)["history"]["losses"]) == 4


def test_every_flip_of_a_bit_that_changes_the_states_is_noticed(tmp_path):
    fitted(tmp_path / "fit.pt")
    whole = (tmp_path / "fit.pt").read_bytes()
    states = torch.load(tmp_path / "fit.pt", weights_only=True)
    random = torch.Generator().manual_seed(0)
    num_noticed = 0
    for position in torch.randint(len(whole), (60,), generator=random).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(torch.randint(8, (), generator=random))
        (tmp_path / "fit.pt").write_bytes(damaged)
        try:
            read = torch.load(tmp_path / "fit.pt", weights_only=True)
            is_same = digest(read) == digest(states)
        except Exception:  # a damaged file can raise anything
            is_same = False
        if is_same:
            continue  # between the records of the file
        num_noticed += 1
        with pytest.raises(ValueError, match=r"cannot be read|was changed|states of a fit"):
            fitted(tmp_path / "fit.pt", num_steps=3)
    assert num_noticed > 10


def test_files_are_read_without_code_whatever_the_environment_says(tmp_path, monkeypatch):
    class Malicious:
        def __reduce__(self):
            return (Path(tmp_path / "made").touch, ())

    torch.save({"tensors": Malicious()}, tmp_path / "fit.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ValueError, match="cannot be read"):
        fitted(tmp_path / "fit.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_a_full_disk_leaves_the_last_file_and_no_other(tmp_path, monkeypatch, error):
    fitted(tmp_path / "fit.pt")
    before = (tmp_path / "fit.pt").read_bytes()

    def fail(states: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=r"expected to write a checkpoint to .*the last checkpoint is as it was"):
        fitted(tmp_path / "fit.pt", num_steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["fit.pt"]
    assert (tmp_path / "fit.pt").read_bytes() == before


@pytest.mark.parametrize("wrong", [torch.zeros(1), torch.zeros(12, 2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_moments_that_do_not_fit_are_refused_before_anything_is_read(tmp_path, wrong):
    fitted(tmp_path / "fit.pt")
    states = torch.load(tmp_path / "fit.pt", weights_only=True)
    kind = next(name for name in states if name.startswith("Joint"))
    path = next(name for name, own in states[kind]["state"].items() if own["exp_avg"].shape == (12, 2))
    states[kind]["state"][path]["exp_avg"] = wrong
    states["tensors"] = {name: value + 1.0 for name, value in states["tensors"].items()}
    del states["digest"]
    torch.save({"digest": digest(states), **states}, tmp_path / "fit.pt")
    pyro.clear_param_store()
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4)
    guide, random = MeanFieldGuide(model), torch.get_rng_state()
    guide(Y)
    before = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    torch.set_rng_state(random)
    with pytest.raises(ValueError, match=r"expected the state of an optimiser of .* got exp_avg of shape"):
        fit(model, guide, Y, num_steps=3, loss=MeanFieldELBO(), callbacks=[Checkpoint(tmp_path / "fit.pt")], progress=False)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in before.items():
        assert torch.equal(pyro.param(name), value)


def test_joint_optimisers_refuse_moments_of_another_shape():
    param = pyro.param("x", torch.zeros(3))
    optim = JointOptim(torch.optim.Adam, {"lr": 0.1, "fused": True})
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    optim.set_state({"usual_norm": None, "state": {"x": moments}})
    param.unconstrained().grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"optimiser of 'x', of shape \[3\]"):
        optim([param.unconstrained()])
    assert torch.equal(pyro.param("x"), torch.zeros(3))


@pytest.mark.parametrize("rows", [12, 5])
def test_the_shapes_of_the_first_call_of_a_guide_do_not_matter(tmp_path, rows):
    Y = torch.randn(12, 3)

    def fitted(num_steps, num_rows):
        model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y[:num_rows], torch.arange(num_rows))
        checkpoint = Checkpoint(tmp_path / "fit.pt")
        return fit(model, guide, Y, num_steps=num_steps, batch_size=4, callbacks=[checkpoint], progress=False)

    fitted(2, 4)
    assert len(fitted(3, rows).losses) == 3
