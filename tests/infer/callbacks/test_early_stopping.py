"""Early stopping: which state is kept, when a fit ends, and that the fit itself is not disturbed."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD

from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import EarlyStopping, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM
from tests.helpers.fits import OnStep

N, D = 20, 3


@pytest.fixture
def Y():
    return torch.randn(N, 2) @ torch.randn(2, D) + 0.1 * torch.randn(N, D)


def descend(**options):
    """A parameter that each step moves from 0 by -1."""

    def model():
        p = pyro.param("p", torch.tensor(0.0))
        pyro.factor("slope", -p)

    return fit(model, lambda: None, optim=SGD({"lr": 1.0}), progress=False, **options)


def distance_to(target):
    return lambda: abs(pyro.param("p").item() - target)


def test_the_state_with_the_lowest_score_is_kept():
    history = descend(num_steps=10, callbacks=[EarlyStopping(distance_to(-5.0), every=2)])
    assert history.scores == [(2, 3.0), (4, 1.0), (6, 1.0), (8, 3.0), (10, 5.0)]
    assert len(history.losses) == 10
    assert pyro.param("p").item() == -4.0  # the first of equals


@pytest.mark.parametrize(("patience", "last"), [(1, 5), (3, 7), (100, 20)])
def test_patience_ends_the_fit(patience, last):
    history = descend(num_steps=20, callbacks=[EarlyStopping(distance_to(-4.0), every=1, patience=patience)])
    assert len(history.losses) == history.scores[-1][0] == last
    assert not history.interrupted
    assert pyro.param("p").item() == -4.0


def test_the_last_state_is_scored():
    history = descend(num_steps=7, callbacks=[EarlyStopping(distance_to(-7.0), every=4)])
    assert history.scores == [(4, 3.0), (7, 0.0)]
    assert pyro.param("p").item() == -7.0


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_a_bound_that_fails_leaves_the_best_state():
    def fail(step, loss):
        if step == 7:
            pyro.param("p").data.fill_(torch.nan)

    with pytest.raises(ValueError, match="NaN"):
        descend(num_steps=20, callbacks=[EarlyStopping(distance_to(-3.0), every=1), OnStep(fail)])
    assert pyro.param("p").item() == -3.0


def test_ctrl_c_keeps_the_best_state():
    def interrupt(step, loss):
        if step == 7:
            raise KeyboardInterrupt

    rule = EarlyStopping(distance_to(-3.0), every=1)
    assert descend(num_steps=20, callbacks=[rule, OnStep(interrupt)]).interrupted
    assert pyro.param("p").item() == -3.0


def test_ctrl_c_before_the_first_score_keeps_the_present_state():
    def interrupt(step, loss):
        if step == 2:
            raise KeyboardInterrupt

    rule = EarlyStopping(distance_to(0.0), every=5)
    assert descend(num_steps=20, callbacks=[rule, OnStep(interrupt)]).scores == []
    assert pyro.param("p").item() == -3.0


def mean_field(Y):
    model = BayesianGPLVM(N, D, 2, num_inducing=5).initialize(Y)
    return model, MeanFieldGuide(model), {"loss": MeanFieldELBO()}


def random_features(Y):
    model = RandomFeatureLVM(N, D, 2, num_frequencies=5).initialize(Y)
    guide = RandomFeatureGuide(model)
    return model, guide, {"optim": guide.blocks()}


@pytest.mark.parametrize("local_params", [False, True])
@pytest.mark.parametrize("make", [mean_field, random_features])
def test_all_of_model_and_guide_goes_back_and_the_fit_is_not_disturbed(make, local_params, Y):
    with pyro.settings.context(module_local_params=local_params):

        def run(early_stopping):
            pyro.clear_param_store()
            torch.manual_seed(0)
            model, guide, options = make(Y)
            states.clear()

            def score():
                states.append([state.clone() for module in (model, guide) for state in module.state_dict().values()])
                torch.rand(7)  # draws that are not the fit's
                return abs(len(states) - 2)

            callbacks = [EarlyStopping(score, every=2)] if early_stopping else []
            history = fit(model, guide, Y, num_steps=8, callbacks=callbacks, progress=False, **options)
            return history, [state for module in (model, guide) for state in module.state_dict().values()]

        states: list[list[torch.Tensor]] = []
        plain, last = run(early_stopping=False)
        watched, best = run(early_stopping=True)
    assert watched.losses == plain.losses
    assert [score for _, score in watched.scores] == [1, 0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(best, states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(best, last, strict=True))


def test_draws_of_the_score_are_the_same_at_every_call():
    draws = []

    def score():
        draws.append(dist.Normal(0.0, 1.0).sample().item())
        return 0.0

    descend(num_steps=4, callbacks=[EarlyStopping(score, every=1)])
    assert len(draws) == 4
    assert len(set(draws)) == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"patience": 0}])
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=f"expected {next(iter(options))} of 1 or more, got 0"):
        EarlyStopping(lambda: 0.0, **options)


def test_a_score_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="expected a score to minimise, got NaN after 3 steps"):
        descend(num_steps=5, callbacks=[EarlyStopping(lambda: math.nan, every=3)])
