"""Losses, randomness and models of a user's own."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.infer.util import is_validation_enabled

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM
from tests.helpers.fits import Climb, OnStep, parameter_values, same_values
from tests.infer.fit._models import D, N, make_pair, regression


def test_loss_goes_down_and_the_history_is_complete(Y):
    model, guide = make_pair(Y)
    steps = []
    history = fit(
        model,
        guide,
        Y,
        loss=MeanFieldELBO(),
        num_steps=80,
        optim=JointAdam(lr=0.05),
        progress=False,
        callbacks=[OnStep(lambda *step: steps.append(step))],
    )
    assert len(history.losses) == len(history.seconds) == len(history.bounds_per_entry) == 80
    assert steps == list(enumerate(history.losses))
    assert history.num_entries == N * D - 1
    np.testing.assert_allclose(history.bounds_per_entry, [-loss / (N * D - 1) for loss in history.losses])
    assert np.all(np.diff(history.seconds) > 0)
    assert history.seconds[0] > 0
    assert not history.interrupted
    first, last = np.array(history.losses[:10]), np.array(history.losses[-10:])
    assert first.mean() - last.mean() > 4 * ((first.var(ddof=1) + last.var(ddof=1)) / 10) ** 0.5


def test_all_rows_and_no_index_without_batch_size():
    y, spy = torch.randn(N, 2), Climb()
    spy.fit(y)
    assert [len(args) for args in spy.batches] == [1, 1, 1, 1]
    assert all(torch.equal(args[0], y) for args in spy.batches)


def test_a_seed_repeats_the_fit_and_leaves_the_global_state_alone(Y):
    results = []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(noise)
        model, guide = make_pair(Y)
        before = torch.get_rng_state()
        losses = fit(model, guide, Y, num_steps=4, batch_size=8, seed=seed, progress=False).losses
        assert torch.equal(before, torch.get_rng_state())
        results.append((losses, parameter_values(model, guide)))
    assert results[0][0] == results[1][0] != results[2][0]
    assert same_values(results[0][1], results[1][1])


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learns_where_gradients_are_off(Y, mode, batch_size):
    losses = fit(*make_pair(Y), Y, num_steps=5, batch_size=batch_size, progress=False).losses
    model, guide = make_pair(Y)
    with mode():
        history = fit(model, guide, Y.clone(), num_steps=5, batch_size=batch_size, progress=False)
    assert history.losses == losses


def test_no_seed_uses_and_advances_the_global_state(Y):
    losses = []
    for noise in (1, 1, 2):
        model, guide = make_pair(Y)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        losses.append(fit(model, guide, Y, num_steps=3, seed=None, progress=False).losses)
        assert not torch.equal(before, torch.get_rng_state())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("called", [False, True])
def test_fits_in_the_dtype_of_model_guide_and_data(Y, called):
    model, guide = make_pair(Y)
    if called:
        guide(Y)
    before = parameter_values(model)
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    history = fit(model.double(), guide.double(), Y.double(), num_steps=3, batch_size=6, progress=False)
    assert all(p.dtype == torch.float64 for p in [*model.parameters(), *guide.parameters()])
    assert seen[-1] == torch.float64
    assert model.mean.dtype == torch.float64
    assert Y.dtype == torch.float32
    assert not any(torch.equal(value.double(), parameter_values(model)[name]) for name, value in before.items())
    assert math.isfinite(history.losses[-1])


def test_a_model_of_your_own_with_an_autoguide():
    y = 3.0 + torch.randn(N)
    guide = AutoNormal(regression, create_plates=lambda y, idx=None: pyro.plate("rows", N, subsample=idx))
    how = {"optim": JointAdam(lr=0.05), "callbacks": [LRSchedule("cosine")], "progress": False}
    fit(regression, guide, y, num_steps=400, batch_size=10, **how)
    posterior_sd = (1 / (N + 0.01)) ** 0.5
    assert guide.median()["loc"].item() == pytest.approx(y.mean().item(), abs=posterior_sd)


def test_progress_bar(capsys):
    Climb().fit(progress=True)
    captured = capsys.readouterr()
    assert "bound/entry" in captured.err
    assert "4/4" in captured.err
    Climb().fit(progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("setting", [True, False])
def test_validation_until_all_rows_were_seen_and_restored(setting):
    with pyro.validation_enabled(setting):
        spy = Climb()
        spy.fit()
        assert spy.validated == [setting, False, False, False]
        on_batches = Climb()
        on_batches.fit(torch.randn(N, 2), batch_size=N // 2)
        assert on_batches.validated == [setting, setting, False, False]
        assert is_validation_enabled() == dist.is_validation_enabled() == setting
        with pytest.raises(ValueError, match="NaN"):
            Climb(bad_at=1).fit()
        assert is_validation_enabled() == dist.is_validation_enabled() == setting


@pytest.mark.parametrize("local", [False, True])
def test_two_models_side_by_side(Y, local):
    with pyro.settings.context(module_local_params=local):
        results = []
        for _ in range(2):
            model = BayesianGPLVM(N, D, 2, num_inducing=5).initialize(Y)
            guide = MeanFieldGuide(model)
            losses = fit(model, guide, Y, num_steps=2, progress=False).losses
            results.append((losses, parameter_values(model, guide)))
    assert results[0][0] == results[1][0]
    assert same_values(results[0][1], results[1][1])
