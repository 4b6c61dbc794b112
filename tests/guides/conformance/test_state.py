"""State, copies and shared parameters of every guide."""

import gc
import pickle

import pyro
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
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
def test_pickle(guide_id, model_id):
    """A copy has the parameters, not, as Pyro has it, the model; the guide itself goes on as before."""
    problem, guide = start(guide_id, model_id)
    expected = moved(problem, guide)
    state = pickle.loads(pickle.dumps(guide)).state_dict()
    assert set(state) == set(guide.state_dict())
    for name, value in guide.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=0.0, equal_nan=True)
    assert_draws(guide, problem.args, expected)
    if not isinstance(guide, MeanFieldGuide):
        with pytest.raises(RuntimeError, match=f"a guide with its model, got a copied or unpickled {type(guide).__name__}"):
            pickle.loads(pickle.dumps(guide))(*problem.args)


def test_traced_score_is_the_pure_one():
    with pyro.settings.context(module_local_params=True):
        problem, guide = start("annealed-local", "gplvm")
        expected = moved(problem, guide)
        traced = GUIDES["annealed-local-traced"].make(problem)
        traced(*problem.args)
        traced.load_state_dict(guide.state_dict())
        for name, value in draw(traced, problem.args).items():
            torch.testing.assert_close(value, expected[name])
