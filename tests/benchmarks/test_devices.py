"""The benchmark of devices: steps are taken on both, compiled or not; here the CPU stands in for the GPU."""

import pytest

pytest.importorskip("gpytorch")

from benchmarks.tasks import devices

SMALL = [name for name in devices.CASES if "N = 1000" in name or "N = 250" in name]


@pytest.mark.parametrize("name", SMALL)
def test_steps_on_both_are_timed(name):
    values = {found.metric: found.value for found in devices.measure(name, num_steps=8, seed=0, device="cpu")}
    assert list(values) == ["CPU [ms]", "cpu [ms]", "times fewer"]
    assert values["times fewer"] == pytest.approx(values["CPU [ms]"] / values["cpu [ms]"])
    assert min(values.values()) > 0.0


def test_compiled_steps_are_timed():
    found = list(devices.measure_compiled(devices.COMPILED[0], num_steps=4, seed=0, device="cpu", backend="eager"))
    values = {measurement.metric: measurement.value for measurement in found}
    assert list(values) == ["cpu [ms]", "cpu, compiled [ms]", "times fewer", "compile [s]"]
    assert values["times fewer"] == pytest.approx(values["cpu [ms]"] / values["cpu, compiled [ms]"])


def test_large_ones_differ_in_size_only():
    case = devices.gpvae(40, 5)
    assert [len(arg) for arg in case.args] == [40, 40]
    assert devices.gpvae(40).args[1].shape == (40, 20)


def test_all_parts_are_run(monkeypatch):
    monkeypatch.setattr(devices, "TASKS", {"plain": (devices.measure, SMALL[:1]), "other": (devices.measure, SMALL[1:2])})
    rows = list(devices.run(quick=True, seeds=1, device="cpu"))
    assert len({row.method for row in rows}) == 2
    assert {row.method for row in devices.run(quick=True, seeds=1, only="other", device="cpu")} == {SMALL[1]}
