import json
import os
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("gpytorch")

from benchmarks.__main__ import main
from benchmarks.core.report import Measurement, Row, aggregate, to_markdown
from benchmarks.peers.gpytorch_gplvm import GPyTorchGPLVM
from benchmarks.tasks import oilflow
from pyro_lvgp.infer import CompiledELBO

KEYS = ["dataset", "method", "metric", "mean", "sd", "seeds", "seconds", "settings"]


@pytest.fixture
def fake():
    module = ModuleType("fake", "One line.\n\nMore lines.")
    module.PUBLISHED = [Row("toy", "published, Table 1", "error", 0.5, None, 1, None, {"units": "unknown"})]
    module.NOTES = "Read with care."
    module.NUM_THREADS = 1

    def run(*, quick, seeds):
        for seed in range(seeds):
            yield Measurement("toy", "ours", "error", float(seed), 2.0 + seed, {"steps": 1 if quick else 9})
            yield Measurement("toy", "ours", "time", 7.0, 2.0 + seed, {"steps": 1 if quick else 9})

    module.run = run
    num_threads = torch.get_num_threads()
    yield {"fake": module}
    torch.set_num_threads(num_threads)


def test_list_names_every_benchmark_with_its_first_line(capsys):
    main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "annealed",
        "annealed_peers",
        "any_model",
        "balls",
        "compiled",
        "defaults",
        "devices",
        "estimators",
        "exponents",
        "gpvae",
        "half_hidden",
        "healing_mnist",
        "imputation",
        "large_data",
        "longseries",
        "million_rows",
        "minibatches",
        "new_rows",
        "oilflow",
        "processes",
        "recordings",
        "robustness",
        "rotated_mnist",
        "row_arguments",
        "sandwich",
        "schedules",
        "single_cells",
        "site_updates",
        "soak",
        "speed",
        "speed_gp_vae",
        "speed_item_response",
        "speed_predictions",
        "srflvm",
        "srflvm_advised",
        "srflvm_large",
        "srflvm_layout",
        "srflvm_scaling",
        "srflvm_variants",
        "views",
        "weather",
        "weather_years",
    ]
    (line,) = (line for line in lines if line.startswith("oilflow"))
    assert line.endswith(oilflow.__doc__.splitlines()[0])


@pytest.mark.parametrize(
    "argv",
    [
        ["nosuch"],
        [],
        ["fake", "--seeds", "0"],
        ["fake", "--json", "no/such/folder/x.json"],
        ["fake", "--only", "toy"],
        ["fake", "--device", "cpu"],
        ["fake", "--minutes", "1"],
        ["fake", "--picture", "x.png"],
    ],
)
def test_bad_arguments_exit_with_2_before_anything_runs(fake, argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv, fake)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected" in captured.err
    assert ("One line." in captured.err) == (argv[:1] != ["fake"])


@pytest.mark.parametrize(
    ("argv", "mean", "sd", "seeds", "steps"),
    [([], 1.0, 1.0, 3, 9), (["--quick"], 0.0, None, 1, 1), (["--quick", "--seeds", "2"], 0.5, 0.5**0.5, 2, 1)],
)
def test_json_rows(fake, tmp_path, argv, mean, sd, seeds, steps):
    main(["fake", "--json", str(tmp_path / "rows.json"), *argv], fake)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [list(row) for row in rows] == [KEYS] * 3
    assert rows[0]["sd"] == (None if sd is None else pytest.approx(sd))
    assert (rows[0]["mean"], rows[0]["seeds"], rows[0]["settings"]) == (mean, seeds, {"steps": steps})
    assert rows[0]["seconds"] == pytest.approx(2.0 + (seeds - 1) / 2)
    assert rows[-1]["method"] == "published, Table 1"
    assert rows[-1]["seconds"] is None


def test_output_has_command_environment_table_and_notes(fake, capsys):
    torch.set_num_threads(2)
    main(["fake", "--seeds", "3"], fake)
    out = capsys.readouterr().out
    assert "python -m benchmarks fake --seeds 3" in out
    assert f"torch {torch.__version__}, 1 thread(s)" in out
    assert "| toy | error | time | fit [s] | seeds |" in out
    assert "| ours | 1 ± 1 | 7 ± 0 | 3.0 | 3 |" in out
    assert "| published, Table 1 | 0.5 | – | – | 1 |" in out
    assert "- ours: steps = 9" in out
    assert out.endswith("Read with care.\n")


def test_a_part_is_run_alone(fake, capsys):
    whole = fake["fake"].run
    fake["fake"].TASKS = {"toy": None, "other": None}
    fake["fake"].run = lambda *, quick, seeds, only: whole(quick=quick, seeds=seeds) if only == "toy" else 1 / 0
    main(["fake", "--only", "toy"], fake)
    assert "| ours | 1 ± 1 | 7 ± 0 | 3.0 | 3 |" in capsys.readouterr().out


def test_a_device_is_handed_on_where_there_is_one(fake, capsys, monkeypatch):
    whole = fake["fake"].run
    fake["fake"].run = lambda *, quick, seeds, device="cuda": whole(quick=quick, seeds=seeds) if device == "cpu" else 1 / 0
    main(["fake", "--device", "cpu"], fake)
    assert "| ours | 1 ± 1 | 7 ± 0 | 3.0 | 3 |" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv in (["fake"], ["fake", "--device", "cuda"]):
        with pytest.raises(SystemExit):
            main(argv, fake)
        assert "expected a GPU for fake, got none" in capsys.readouterr().err


def test_what_was_measured_before_an_error_is_not_lost(fake, capsys, tmp_path):
    whole = fake["fake"].run

    def run(*, quick, seeds):
        yield from whole(quick=quick, seeds=seeds)
        raise KeyboardInterrupt

    fake["fake"].run = run
    with pytest.raises(KeyboardInterrupt):
        main(["fake", "--json", str(tmp_path / "rows.json")], fake)
    assert "| ours | 1 ± 1 | 7 ± 0 | 3.0 | 3 |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 3


def test_methods_with_the_same_settings_share_a_line():
    rows = aggregate(Measurement("toy", name, "error", 1.0, 2.0, {"steps": 3}) for name in ("one", "two"))
    assert to_markdown(rows).endswith("- all: steps = 3")
    other = aggregate([Measurement("toy", "three", "error", 1.0, 2.0, {"steps": 4})])
    assert to_markdown([*rows, *other]).endswith("- one; two: steps = 3\n- three: steps = 4")


def test_nan_is_shown_not_hidden():
    rows = aggregate(Measurement("toy", "ours", "error", value, 2.0, {}) for value in (1.0, float("nan")))
    assert "| nan ± nan |" in to_markdown(rows)


def test_markdown_has_a_table_for_each_dataset():
    rows = aggregate(Measurement(name, "ours", "error", 1.0, 2.0, {}) for name in ("one", "two"))
    assert to_markdown(rows).count("\n| --- |") == 2


def test_aggregate_refuses_settings_that_change():
    with pytest.raises(ValueError, match="expected the same settings"):
        aggregate(Measurement("toy", "ours", "error", 1.0, 2.0, {"steps": steps}) for steps in (1, 2))


@pytest.fixture
def Y():
    Y = torch.randn(80, 4, dtype=torch.float64) @ torch.randn(4, 12, dtype=torch.float64)
    return (Y - Y.mean(0)) / Y.std(0)


def _bounds(method):
    values = [method.negative_bound(num_evaluations=1, seed=seed) for seed in range(60)]
    return np.mean(values), np.std(values) / 60**0.5


@pytest.mark.parametrize("num_steps", [0, 60])
def test_peer_and_its_copy_in_our_code_agree(Y, num_steps):
    ours, copied = (oilflow.Ours(Y, seed=seed, fitted_u=seed == 0) for seed in (0, 1))
    peer = GPyTorchGPLVM(Y, ours.model, ours.guide, batch_size=30, learning_rate=0.05)
    peer.train(num_steps, seed=0)
    with torch.no_grad():
        peer._model.q_u.chol_variational_covar[..., 3] *= -1.0  # the same covariance
        copied.model.mean = torch.ones(12, dtype=Y.dtype)
    peer.copy_to(copied.model, copied.guide)
    assert num_steps == 0 or (copied.predict() - ours.predict()).abs().max() > 0.1
    torch.testing.assert_close(copied.predict(), peer.predict(), atol=1e-4, rtol=0.0)
    # The two codes estimate one bound: within four standard errors, which are small beside its terms (KL of X above 1).
    (bound, error), (own, own_error) = _bounds(copied), _bounds(peer)
    assert max(error, own_error) < 0.1
    assert abs(bound - own) < 4 * np.hypot(error, own_error)


def test_single_precision_changes_little_of_the_peer(Y):
    bounds = []
    for dtype in (torch.float64, torch.float32):
        ours = oilflow.Ours(Y.to(dtype), seed=0, fitted_u=False)
        peer = GPyTorchGPLVM(Y.to(dtype), ours.model, ours.guide, batch_size=30, learning_rate=0.05)
        peer.train(60, seed=0)
        assert peer.predict().dtype == dtype
        bounds.append(_bounds(peer))
    (double, error), (single, other) = bounds
    assert abs(double - single) < 4 * np.hypot(error, other) + 0.05


def test_copying_back_leaves_the_peer_alone(Y):
    ours, copied = (oilflow.Ours(Y, seed=0, fitted_u=False) for _ in range(2))
    peer = GPyTorchGPLVM(Y, ours.model, ours.guide, batch_size=30, learning_rate=0.05)
    peer.copy_to(copied.model, copied.guide)
    before = copied.predict()
    peer.train(5, seed=0)
    torch.testing.assert_close(copied.predict(), before)
    torch.testing.assert_close(copied.predict(), ours.predict())


def test_peer_refuses_columns_with_a_mean(Y):
    ours = oilflow.Ours(Y, seed=0, fitted_u=False)
    with pytest.raises(ValueError, match="expected columns of Y with mean 0"):
        GPyTorchGPLVM(Y + 1.0, ours.model, ours.guide, batch_size=30, learning_rate=0.05)


def test_two_of_ours_share_no_parameters(Y, monkeypatch):
    monkeypatch.setattr(oilflow, "BATCH_SIZE", 30)
    first, second = (oilflow.Ours(Y, seed=0, fitted_u=False) for _ in range(2))
    before = {name: p.clone() for name, p in [*second.model.named_parameters(), *second.guide.named_parameters()]}
    first.train(3, seed=0)
    after = dict([*second.model.named_parameters(), *second.guide.named_parameters()])
    moved = dict([*first.model.named_parameters(), *first.guide.named_parameters()])
    assert len(before) == 8
    for name, value in before.items():
        assert torch.equal(after[name], value)
        assert not torch.equal(moved[name], value)


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with oilflow.npz")
def test_oilflow_measures_all_methods(monkeypatch):
    monkeypatch.setattr(oilflow, "NUM_EVALUATIONS", 8)
    monkeypatch.setattr(oilflow, "CompiledELBO", partial(CompiledELBO, backend="eager"))  # compiling takes a minute
    rows = aggregate(oilflow.measure(num_steps=20, seed=0, block=15))
    values = {(row.method, row.metric): row.mean for row in rows}
    assert np.isfinite(list(values.values())).all()
    for start in oilflow.STARTS:
        ours, peer = f"{oilflow.OURS}, {start}", f"{oilflow.PEER}, {start}"
        for method in (ours, peer):
            assert 0.0 < values[method, oilflow.MSE] < 1.5
            assert values[method, "step [ms]"] > 0.0
        assert values[ours, f"step time / {oilflow.OURS}"] == 1.0
        own = values[peer, f"{oilflow.BOUND}, by its own code"]
        assert own == pytest.approx(values[peer, oilflow.BOUND], rel=0.1)
