"""Traced, pure and compiled chains."""

import subprocess
import sys

import pyro
import pytest
import torch
from pyro import poutine

from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS, UnderdampedLangevin
from pyro_lvgp.infer import _compiled_loop
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, NegativeBinomial
from pyro_lvgp.models import BayesianGPLVM
from tests.guides.annealed.guide._models import LOSSES, Traced, assert_paths_agree, value_and_gradients
from tests.helpers import ROOT
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("dynamics", "loss", "covariance"),
    [(name, loss, ("diagonal", "full")[(i + j) % 2]) for i, name in enumerate(TRANSITIONS) for j, loss in enumerate(LOSSES)],
)
def test_traced_and_pure_paths_agree(dynamics, loss, covariance):
    def make(target):
        base = MeanFieldGuide(target, covariance={"X": covariance})
        return AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics, base_guide=base)

    (model, Y), idx = small(), torch.tensor([2, 5, 1])
    assert_paths_agree(make, model, Y, LOSSES[loss](), Y[idx], idx)


def test_compiled_chains_are_the_eager_ones_and_compiling_does_not_grow_with_their_length():
    """In a process of its own, because the shape checks of this one cannot be compiled."""
    script = ROOT / "tests" / "helpers" / "compiled_chains.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("likelihood", "dynamics"),
    [
        (Gaussian(), "underdamped"),
        (Gaussian(), "overdamped"),
        (Bernoulli(), "underdamped"),  # by quadrature, whose gradient autograd takes
        (NegativeBinomial(), "underdamped"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_compiled_chains_take_any_likelihood_and_draws_of_any_shape(monkeypatch, likelihood, dynamics):
    """As graphs of operations that are run one by one; one likelihood and dynamics go through the compiler above."""
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    model = BayesianGPLVM(8, 3, 2, num_inducing=4, likelihood=likelihood)
    Y = torch.randint(2, (8, 3)).to(torch.get_default_dtype())
    results = []
    for compile in (False, True):
        pyro.clear_param_store()
        guide = AutoAnnealedLangevin(model, num_steps=2, dynamics=dynamics, compile=compile)
        torch.manual_seed(4)
        guide(Y)
        for _ in range(2):  # the first of each shape is not compiled
            torch.manual_seed(4)
            drawn = [guide.sample_posterior(n, Y)["X"] for n in (1, 3)]
            found = torch.cat(drawn), *value_and_gradients(model, guide, LOSSES["drawn"](), Y)
        results.append(found)
    (eager_X, eager, eager_gradients), (X, compiled, gradients) = results
    torch.testing.assert_close(X, eager_X)
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(gradients, eager_gradients, rtol=1e-7, atol=1e-9)


def test_a_chain_traces_the_model_k_plus_one_times():
    model, Y = small()
    target = Traced(model)
    guide = AutoAnnealedLangevin(target, num_steps=5)
    guide(Y)
    target.num_calls = 0
    guide(Y)
    assert target.num_calls == 6


def test_a_subclass_with_another_forward_is_traced():
    class Shifted(BayesianGPLVM):
        def forward(self, y, idx=None):
            with poutine.reparam(config={}):
                return super().forward(y, idx)

    Y = torch.randn(4, 3)
    guide = AutoAnnealedLangevin(Shifted(4, 3, 1, num_inducing=3), num_steps=1)
    guide(Y)
    assert not guide._has_pure_score


def test_a_log_joint_that_reads_a_parameter_is_not_recorded():
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="one that reads a parameter of shape"):
        record_pure(lambda x: [x * scale], [torch.ones(2)])


def test_subclasses_of_langevin_transitions_move_chains_themselves():
    class Counted(UnderdampedLangevin):
        calls = 0

        def __call__(self, *args, **options):
            type(self).calls += 1
            return super().__call__(*args, **options)

    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=3, dynamics=Counted(), step_size=0.1)
    guide(Y)
    Counted.calls = 0
    guide(Y)
    assert Counted.calls == 3
