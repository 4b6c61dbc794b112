"""The tutorials run from end to end."""

import matplotlib.pyplot as plt
import pyro

from tutorials import digits


def test_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["digits", "--steps", "3", "--out", str(tmp_path)])
    with pyro.settings.context(module_local_params=pyro.settings.get("module_local_params")):
        digits.main()
    plt.close("all")
    names = {"latents.png", "relevance.png", "bounds.png", "reconstructions.png", "posterior.nc"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["method, 8 dimensions", "PCA", "mean field", "importance-weighted, S = 5"]
