"""The mixture of the tutorial: its bound by draws, and its sweeps beside scikit-learn's."""

import pytest
import torch
from matplotlib import pyplot as plt
from pyro.infer import Trace_ELBO
from scipy.special import digamma
from sklearn.mixture import BayesianGaussianMixture

from pyro_lvgp.infer import BlockCoordinateVI
from tutorials import dirichlet_mixture
from tutorials.dirichlet_mixture import COLOURS, NUM_COMPONENTS, Guide, kmeans, make_blocks, model, negative_bound

pytestmark = pytest.mark.usefixtures("local_params")


def make(x, learn_alpha=False):
    """The tutorial's guide and inference, with every update checked."""
    guide = Guide(x, kmeans(x, seed=0))
    guide.alpha.requires_grad_(learn_alpha)
    blocks = [block for block in make_blocks(guide) if learn_alpha or block.name != "alpha"]
    return guide, BlockCoordinateVI(model, guide, blocks, loss=negative_bound, check_updates=True)


def test_the_bound_is_that_of_draws():
    x = dirichlet_mixture.measurements()[:30]
    guide, vi = make(x, learn_alpha=True)
    for _ in range(3):
        vi.step(x)
    found = vi.evaluate_loss(x)
    draws = torch.tensor([Trace_ELBO().loss(model, guide, x) for _ in range(100)])
    assert abs(found - draws.mean()) < 4.0 * draws.std() / 100**0.5


def test_no_sweep_lowers_the_bound():
    x = dirichlet_mixture.measurements()
    _, vi = make(x, learn_alpha=True)
    losses = torch.tensor([vi.step(x) for _ in range(20)])
    assert (losses.diff() < 1e-9).all()
    assert losses[-1] < losses[1] - 50.0


class LastStickWhole(BayesianGaussianMixture):
    """Scikit-learn's mixture with a last stick that takes all that is left."""

    def _estimate_log_weights(self, *args, **kwargs):
        log_weights = super()._estimate_log_weights(*args, **kwargs)
        a, b = (value[-1] for value in self.weight_concentration_)
        log_weights[-1] -= digamma(a) - digamma(a + b)
        return log_weights


def sklearn_mixture(monkeypatch, x, kind, num_sweeps):
    monkeypatch.setattr(dirichlet_mixture, "BayesianGaussianMixture", kind)
    return dirichlet_mixture.fit_sklearn(x, seed=0, num_sweeps=num_sweeps)


@pytest.mark.parametrize("num_sweeps", [1, 10, 40])
def test_the_sweeps_are_scikit_learn_s(num_sweeps, monkeypatch):
    x = dirichlet_mixture.measurements()
    guide, vi = make(x)
    for _ in range(num_sweeps + 1):  # theirs counts from the components of the start
        vi.step(x)
    monkeypatch.setattr(dirichlet_mixture, "TOLERANCE", 0.0)
    theirs = sklearn_mixture(monkeypatch, x, LastStickWhole, num_sweeps).guide
    for (name, ours), (_, expected) in zip(guide.named_pyro_params(), theirs.named_pyro_params(), strict=True):
        ours, expected = (value.exp() if name == "z.log_probs" else value for value in (ours, expected))
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_the_fixed_point_is_scikit_learn_s(monkeypatch):
    x = dirichlet_mixture.measurements()
    ours = dirichlet_mixture.fit_blocks(x, seed=0, num_sweeps=1000, learn_alpha=False).guide
    theirs = sklearn_mixture(monkeypatch, x, BayesianGaussianMixture, 1000).guide
    used = ours.weights() > 0.01
    assert torch.equal(used, theirs.weights() > 0.01)
    assert 1 < used.sum() < NUM_COMPONENTS
    # The two break the last of the sticks in different ways, which no component in use feels much.
    torch.testing.assert_close(ours.weights()[used], theirs.weights()[used], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(ours.factor().mean[used], theirs.factor().mean[used], rtol=0.0, atol=1e-3)
    assert negative_bound(model, ours, x) < negative_bound(model, theirs, x) + 1e-3


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dirichlet_mixture", "--steps", "3", "--out", str(tmp_path)])
    monkeypatch.setattr(dirichlet_mixture, "NUM_STARTS", 2)
    dirichlet_mixture.main()
    plt.close("all")
    assert (tmp_path / "mixture.png").stat().st_size > 1000
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["fit", *COLOURS]
