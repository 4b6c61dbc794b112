"""State, copies and shared parameters of every guide."""

import copy
import gc
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import AutoAnnealedLangevin
from tests.guides.conformance._guides import GUIDES, draw, every_pair, moved, new, start


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Leave what is imported by now out of the collections of the tests, each of which would take a second."""
    gc.collect()
    gc.freeze()


def assert_draws(guide, args, expected):
    values = draw(guide, args)
    assert set(values) == set(expected)
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


@every_pair
def test_state_dict(guide_id, model_id):
    with pyro.settings.context(module_local_params=True):
        problem, guide = start(guide_id, model_id)
        expected = moved(problem, guide)
        other = GUIDES[guide_id].make(problem)
        other(*problem.args)
        other.load_state_dict(guide.state_dict())
        assert_draws(other, problem.args, expected)


@every_pair
def test_param_store(guide_id, model_id, tmp_path):
    problem, guide = new(guide_id, model_id)
    expected = moved(problem, guide)
    pyro.get_param_store().save(tmp_path / "params")
    pyro.clear_param_store()
    del guide  # as in another process, where its name is free
    gc.collect()
    pyro.get_param_store().load(tmp_path / "params")
    other = GUIDES[guide_id].make(problem)
    other(*problem.args)
    assert_draws(other, problem.args, expected)


@every_pair
def test_a_second_guide_has_parameters_of_its_own(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    other = GUIDES[guide_id].make(problem)
    other(*problem.args)
    expected = draw(guide, problem.args)
    moved(problem, other)
    assert not {id(tensor) for tensor in guide.parameters()} & {id(tensor) for tensor in other.parameters()}
    assert_draws(guide, problem.args, expected)


@every_pair
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))], ids=["copy", "pickle"])
def test_copies_have_parameters_and_a_model_of_their_own(guide_id, model_id, copied):
    """The guide itself goes on as before."""
    problem, guide = start(guide_id, model_id)
    expected = moved(problem, guide)
    other = copied(guide)
    state = other.state_dict()
    assert set(state) == set(guide.state_dict())
    for name, value in guide.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=0.0, equal_nan=True)
    assert_draws(guide, problem.args, expected)
    if isinstance(guide.model, torch.nn.Module):
        assert other.model is not guide.model
        assert_draws(other, problem.args, expected)


def test_a_first_call_that_failed_leaves_no_parameters():
    """Of the base guide either, which an annealed guide calls first."""

    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            x = pyro.sample("x", dist.Normal(level, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=1)
    guide.local_plate = "rows"
    with pytest.raises(ValueError, match="for plate 'rows'"):
        guide(torch.zeros(3))
    guide.local_plate = "data"
    assert guide(torch.zeros(5))["x"].shape == (5,)


def test_traced_score_is_the_pure_one():
    with pyro.settings.context(module_local_params=True):
        problem, guide = start("annealed-local", "gplvm")
        expected = moved(problem, guide)
        traced = GUIDES["annealed-local-traced"].make(problem)
        traced(*problem.args)
        traced.load_state_dict(guide.state_dict())
        for name, value in draw(traced, problem.args).items():
            torch.testing.assert_close(value, expected[name])
