"""Chains of traced models that are one operation for autograd, against transitions one by one."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints

from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.guides.annealed._autograd_score import AutogradScore
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, UnderdampedLangevin
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO

pytestmark = pytest.mark.usefixtures("float64")


class OneByOne:
    """Transitions of subclasses, which the guide takes one by one."""

    class Overdamped(OverdampedLangevin):
        pass

    class Underdamped(UnderdampedLangevin):
        pass


PAIRS = {
    "overdamped": (OverdampedLangevin(), OneByOne.Overdamped()),
    "underdamped": (UnderdampedLangevin(), OneByOne.Underdamped()),
    "no bounds": (UnderdampedLangevin(float("inf"), float("inf")), OneByOne.Underdamped(float("inf"), float("inf"))),
}


def responses(y, idx=None):
    """Two sites of each row, of different shapes; a global site; a parameter; a mask."""
    offset = pyro.param("offset", torch.tensor([0.1, -0.2, 0.3]))
    spread = pyro.param("spread", torch.tensor(0.7), constraint=constraints.positive)
    slopes = pyro.sample("slopes", dist.Normal(torch.ones(2, 3), 0.5).to_event(2))
    with pyro.plate("rows", 6, subsample=idx):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0 / spread))
        loc = (x[..., None, :] @ slopes).squeeze(-2) + offset
        with poutine.mask(mask=~torch.isnan(y)[:, 0]):
            pyro.sample("y", dist.Normal(loc, rate[..., None].sqrt()).to_event(1), obs=y.nan_to_num(0.0))


def plates(y, idx=None):
    return pyro.plate("rows", 6, subsample=idx)


def data():
    torch.manual_seed(0)
    y = torch.randn(6, 3)
    y[2] = torch.nan
    return y


def found(transition, bound, args, **options):
    """Value of a bound, gradients of all parameters, and draws of a reverse chain."""
    pyro.clear_param_store()
    torch.manual_seed(1)
    guide = AutoAnnealedLangevin(responses, num_steps=3, dynamics=transition, step_size=0.2, **options)
    guide(*args)
    with poutine.trace(param_only=True) as parameters:
        torch.manual_seed(2)
        loss = bound.differentiable_loss(responses, guide, *args)
    params = [site["value"].unconstrained() for site in parameters.trace.nodes.values()]
    gradients = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        drawn = guide(*args)
        back = poutine.trace(guide.reverse(drawn)).get_trace(*args)
    back.compute_log_prob()
    return loss, gradients, drawn, [site["log_prob"] for site in back.nodes.values() if site["type"] == "sample"]


@pytest.mark.parametrize("dynamics", list(PAIRS))
@pytest.mark.parametrize("kind", ["local", "mini-batch", "joint", "draws"])
def test_values_and_gradients_are_those_of_transitions_one_by_one(kind, dynamics):
    y, idx = data(), torch.tensor([4, 2, 1])
    args = (y[idx], idx) if kind == "mini-batch" else (y,)
    options = {} if kind == "joint" else {"local_plate": "rows", "create_plates": plates}
    draws = ImportanceWeightedELBO("rows", num_samples=2, max_plate_nesting=1)
    bound = draws if kind == "draws" else MeanFieldELBO(max_plate_nesting=1)
    at_once, one_by_one = (found(transition, bound, args, **options) for transition in PAIRS[dynamics])
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-9, atol=1e-11)


def test_scores_that_do_not_depend_on_the_position_have_no_derivatives():
    weight = torch.ones(2, requires_grad=True)
    for constant in (torch.ones(2), 3.0 * weight):
        score = AutogradScore(lambda z, constant=constant: (constant,), [torch.Size([2])])
        value, at = score.evaluate(torch.zeros(2))
        assert torch.equal(value, constant)
        assert torch.equal(score.pull_back(at, torch.ones(2))[0], torch.zeros(2))
