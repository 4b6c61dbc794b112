"""The training loop and its optimiser: against hand counts, and against Pyro's own optimiser step by step."""

import copy
import itertools
import math
import re
import signal

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.util import is_validation_enabled
from pyro.optim import SGD, Adam

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Block, BlockCoordinateVI, JointOptim, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM

N, D = 20, 3


@pytest.fixture
def Y():
    Y = torch.randn(N, 2) @ torch.randn(2, D) + 0.1 * torch.randn(N, D)
    Y[3, 1] = torch.nan
    return Y


def _pair(Y):
    """The same model and guide each time."""
    pyro.clear_param_store()
    model = BayesianGPLVM(N, D, 2, num_inducing=5).initialize(Y)
    return model, MeanFieldGuide(model)


def _values(*modules):
    return {f"{i}.{name}": p.detach().clone() for i, m in enumerate(modules) for name, p in m.named_parameters()}


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def _regression(y, idx=None):
    """A user's own model: a function, with a plate it subsamples itself."""
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", N, subsample=idx):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


class _Sharing:
    """A model whose inputs serve all rows of the data."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args):
        self.model(*args)

    def mini_batch(self, idx, x, y):
        return x, y[idx], idx


class _Climb:
    """Log density -p: constant gradient; records how it was called and whether Pyro validates."""

    def __init__(self, bad_at=math.inf, bad=math.nan):
        self.batches, self.validated, self.bad_at, self.bad = [], [], bad_at, bad

    def model(self, *args):
        p = pyro.param("p", torch.tensor(0.0))
        pyro.factor("loss", -p + (self.bad if len(self.batches) == self.bad_at else 0.0))
        self.batches.append(args)
        self.validated.append(is_validation_enabled())

    def guide(self, *args):
        pass

    def fit(self, *args, **kwargs):
        return fit(self.model, self.guide, *args, **{"num_steps": 4, "progress": False} | kwargs)


def _path(num_steps, **kwargs):
    """Values of p after each of SGD's steps of size one: differences are the factors on the learning rate."""
    path = [0.0]
    pyro.clear_param_store()
    optim = JointOptim(torch.optim.SGD, {"lr": 1.0}, **kwargs)
    _Climb().fit(optim=optim, num_steps=num_steps, callback=lambda *_: path.append(pyro.param("p").item()))
    return -np.diff(path)


class TestFit:
    def test_loss_goes_down_and_the_history_is_complete(self, Y):
        model, guide = _pair(Y)
        steps = []
        history = fit(
            model,
            guide,
            Y,
            loss=MeanFieldELBO(),
            num_steps=80,
            learning_rate=0.05,
            progress=False,
            callback=lambda *step: steps.append(step),
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

    @pytest.mark.parametrize(("batch_size", "per_epoch"), [(5, 4), (6, 3), (N, 1)])
    def test_mini_batches_without_replacement(self, batch_size, per_epoch):
        y, labels, spy = torch.randn(N, 2), torch.arange(N), _Climb()
        spy.fit(y, labels, batch_size=batch_size, num_steps=3 * per_epoch)
        orders = []
        for epoch in range(3):
            rows = spy.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            for batch, label, idx in rows:
                assert len(idx) == batch_size
                assert torch.equal(batch, y[idx])
                assert torch.equal(label, labels[idx])
            orders.append(torch.cat([idx for *_, idx in rows]).tolist())
            assert len(set(orders[-1])) == per_epoch * batch_size
        if batch_size == N:  # by which Pyro indexes no parameters
            assert orders == 3 * [list(range(N))]
        else:
            assert orders[0] != orders[1] != orders[2]

    def test_mini_batches_as_the_model_takes_them(self):
        x, y, spy = torch.randn(3, 1), torch.randn(N, 3, 2), _Climb()
        spy.model = _Sharing(spy.model)
        spy.fit(x, y, batch_size=5)
        for inputs, batch, idx in spy.batches:
            assert inputs is x
            assert torch.equal(batch, y[idx])
        assert torch.cat([idx for *_, idx in spy.batches]).sort().values.tolist() == list(range(N))

    def test_all_rows_and_no_index_without_batch_size(self):
        y, spy = torch.randn(N, 2), _Climb()
        spy.fit(y)
        assert [len(args) for args in spy.batches] == [1, 1, 1, 1]
        assert all(torch.equal(args[0], y) for args in spy.batches)

    def test_a_seed_repeats_the_fit_and_leaves_the_global_state_alone(self, Y):
        results = []
        for seed, noise in ((3, 1), (3, 2), (4, 1)):
            torch.manual_seed(noise)
            model, guide = _pair(Y)
            before = torch.get_rng_state()
            losses = fit(model, guide, Y, num_steps=4, batch_size=8, seed=seed, progress=False).losses
            assert torch.equal(before, torch.get_rng_state())
            results.append((losses, _values(model, guide)))
        assert results[0][0] == results[1][0] != results[2][0]
        assert _same(results[0][1], results[1][1])

    @pytest.mark.parametrize("batch_size", [None, 8])
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_learns_where_gradients_are_off(self, Y, mode, batch_size):
        losses = fit(*_pair(Y), Y, num_steps=5, batch_size=batch_size, progress=False).losses
        model, guide = _pair(Y)
        with mode():
            history = fit(model, guide, Y.clone(), num_steps=5, batch_size=batch_size, progress=False)
        assert history.losses == losses

    def test_no_seed_uses_and_advances_the_global_state(self, Y):
        losses = []
        for noise in (1, 1, 2):
            model, guide = _pair(Y)
            torch.manual_seed(noise)
            before = torch.get_rng_state()
            losses.append(fit(model, guide, Y, num_steps=3, seed=None, progress=False).losses)
            assert not torch.equal(before, torch.get_rng_state())
        assert losses[0] == losses[1] != losses[2]

    def test_interrupt_keeps_parameters_and_history(self, Y):
        def stop(step, loss):
            if step == 5:
                raise KeyboardInterrupt

        model, guide = _pair(Y)
        stopped = fit(model, guide, Y, num_steps=50, progress=False, callback=stop)
        after = _values(model, guide)
        assert stopped.interrupted
        model, guide = _pair(Y)
        six = fit(model, guide, Y, num_steps=6, progress=False)
        assert stopped.losses == six.losses
        assert len(stopped.seconds) == 6
        assert _same(after, _values(model, guide))

    @pytest.mark.parametrize(("presses", "steps"), [(1, 3), (2, 2)])
    def test_ctrl_c_waits_for_the_end_of_the_step_and_a_second_does_not(self, presses, steps):
        number = itertools.count()

        def model(y):
            p = pyro.param("p", torch.tensor(0.0))
            if next(number) == 2:
                for _ in range(presses):
                    signal.raise_signal(signal.SIGINT)
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Normal(p, 1.0), obs=y)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            history = fit(model, _no_guide, torch.ones(3), num_steps=50, progress=False)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert history.interrupted
        assert len(history.losses) == steps

    @pytest.mark.parametrize("called", [False, True])
    def test_dtype_converts_model_guide_and_data(self, Y, called):
        model, guide = _pair(Y)
        if called:
            guide(Y)
        before = _values(model)
        seen = []
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        history = fit(model, guide, Y, num_steps=3, dtype=torch.float64, batch_size=6, progress=False)
        assert all(p.dtype == torch.float64 for p in [*model.parameters(), *guide.parameters()])
        assert seen[-1] == torch.float64
        assert model.mean.dtype == torch.float64
        assert Y.dtype == torch.float32
        assert not any(torch.equal(value.double(), _values(model)[name]) for name, value in before.items())
        assert math.isfinite(history.losses[-1])

    def test_a_model_of_your_own_with_an_autoguide(self):
        y = 3.0 + torch.randn(N)
        guide = AutoNormal(_regression, create_plates=lambda y, idx=None: pyro.plate("rows", N, subsample=idx))
        fit(_regression, guide, y, num_steps=400, batch_size=10, learning_rate=0.05, schedule="cosine", progress=False)
        posterior_sd = (1 / (N + 0.01)) ** 0.5
        assert guide.median()["loc"].item() == pytest.approx(y.mean().item(), abs=posterior_sd)

    def test_schedules(self):
        def factors(schedule):
            pyro.clear_param_store()
            path = [0.0]
            # With a constant gradient every step of Adam is as long as its learning rate.
            _Climb().fit(
                num_steps=8,
                learning_rate=0.1,
                schedule=schedule,
                callback=lambda *_: path.append(pyro.param("p").item()),
            )
            return -np.diff(path) / 0.1

        np.testing.assert_allclose(factors("constant"), np.ones(8), rtol=1e-4)
        np.testing.assert_allclose(factors("cosine"), 0.5 * (1 + np.cos(np.pi * np.arange(8) / 8)), rtol=1e-3)
        np.testing.assert_allclose(factors(lambda step: 1 / (1 + step)), 1 / np.arange(1.0, 9), rtol=1e-3)

    def test_an_optimiser_of_your_own(self):
        _Climb().fit(optim=SGD({"lr": 0.5}), learning_rate=100.0)
        assert pyro.param("p").item() == pytest.approx(-2.0)

    @pytest.mark.filterwarnings("ignore:Encountered NaN")
    @pytest.mark.parametrize("with_blocks", [False, True])
    @pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
    def test_a_bound_that_is_not_finite_stops_the_fit_before_it_moves_anything(self, bad, what, with_blocks):
        block = Block("p", params=["p"], optim=lambda tensors: torch.optim.SGD(tensors, lr=0.5))
        how = {"blocks": [block]} if with_blocks else {"optim": SGD({"lr": 0.5})}
        with pytest.raises(ValueError, match=rf"became {what}; what was learned before is kept.*float64"):
            _Climb(3 if with_blocks else 2, bad).fit(**how)
        assert pyro.param("p").item() == pytest.approx(-1.0)
        assert pyro.param("p").grad is None

    def test_a_gradient_that_is_not_finite_stops_the_fit_before_it_moves_anything(self):
        def model():
            p = pyro.param("p", torch.tensor(0.0))
            pyro.factor("loss", -p + pyro.param("q", torch.tensor(0.0)).abs().sqrt())  # NaN at 0

        with pytest.raises(ValueError, match="expected finite gradients, got NaN or infinity; nothing was moved by them"):
            fit(model, lambda: None, num_steps=2, progress=False)
        assert pyro.param("p").item() == 0.0
        assert pyro.param("p").grad is None

    def test_a_step_cut_short_leaves_no_gradient_to_the_next_fit(self, Y):
        class Interrupted(torch.optim.SGD):
            def step(self, closure=None):
                raise KeyboardInterrupt

        model, guide = _pair(Y)
        assert fit(model, guide, Y, optim=JointOptim(Interrupted, {"lr": 0.1}), num_steps=2, progress=False).interrupted
        assert all(parameter.grad is None for part in (model, guide) for parameter in part.parameters())

    @pytest.mark.parametrize("batch_size", [0, N + 1])
    def test_batch_size_out_of_range(self, Y, batch_size):
        with pytest.raises(ValueError, match=f"from 1 to {N}, the rows of the data, got {batch_size}"):
            _Climb().fit(Y, batch_size=batch_size)

    def test_mini_batches_need_data(self):
        with pytest.raises(ValueError, match="from 1 to 0"):
            _Climb().fit(batch_size=2)

    def test_tensors_of_other_lengths_have_no_mini_batches(self):
        for other in (torch.zeros(2 * N), torch.tensor(3)):
            found = re.escape(f"got shapes [{list(other.shape)}, [{N}]]")
            with pytest.raises(ValueError, match=f"expected {N} rows in each tensor, .* {found}"):
                fit(_regression, lambda *_: None, other, torch.zeros(N), batch_size=5, progress=False)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(("num", "num_entries"), [(N, N), (None, 1)])
    def test_numbers_beside_the_data(self, num, num_entries):
        def model(y, sd):
            loc = pyro.sample("loc", dist.Normal(0.0, sd))
            with pyro.plate("data", y.numel()):
                pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

        y = torch.tensor(2.0) if num is None else torch.full((num,), 2.0)
        history = fit(model, AutoNormal(model), y, torch.tensor(3.0), num_steps=2, progress=False)
        assert history.num_entries == num_entries

    @pytest.mark.usefixtures("unchecked")
    def test_whole_numbers_are_data_of_a_model_of_your_own(self):
        def counts(k, idx=None):
            rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
            with pyro.plate("rows", N, subsample=idx):
                pyro.sample("k", dist.Poisson(rate), obs=k)

        guide = AutoNormal(counts, create_plates=lambda k, idx=None: pyro.plate("rows", N, subsample=idx))
        history = fit(counts, guide, torch.arange(N), num_steps=3, batch_size=np.int64(5), progress=False)
        assert len(history.losses) == 3
        assert history.num_entries == N

    @pytest.mark.usefixtures("unchecked")
    def test_unknown_schedule(self):
        with pytest.raises(ValueError, match=r"\"constant\", \"cosine\" or a function.*'linear'"):
            _Climb().fit(schedule="linear")

    @pytest.mark.usefixtures("unchecked")
    def test_arguments_of_another_kind(self, Y):
        model, guide = _pair(Y)
        with pytest.raises(TypeError, match=r"expected data to be tensors, got ndarray; use torch.as_tensor"):
            fit(model, guide, Y.numpy(), progress=False)
        for args in ((), (Y, torch.arange(N))):
            with pytest.raises(TypeError, match=rf"expected all data \(Y\), got {len(args)} tensor\(s\)"):
                fit(model, guide, *args, progress=False)
        with pytest.raises(TypeError, match=r"got the class MeanFieldGuide; make one: MeanFieldGuide\(...\)"):
            fit(model, MeanFieldGuide, Y, progress=False)
        with pytest.raises(TypeError, match=r"expected loss to be a bound, got <class .*Trace_ELBO'>; make one"):
            fit(model, guide, Y, loss=Trace_ELBO, progress=False)
        with pytest.raises(TypeError, match=r"expected early_stopping to be EarlyStopping\(score\), got True"):
            fit(model, guide, Y, early_stopping=True, progress=False)
        with pytest.raises(ValueError, match="expected num_steps of 0 or more, got -1"):
            fit(model, guide, Y, num_steps=-1, progress=False)
        for name in ("num_steps", "batch_size"):
            with pytest.raises(TypeError, match=f"expected {name} to be an integer, got 5.0"):
                fit(model, guide, Y, progress=False, **{name: 5.0})

    def test_data_unfit_for_the_model(self, Y):
        model, guide = _pair(Y)
        with pytest.raises(ValueError, match="row 3"):
            fit(model, guide, Y.index_fill(0, torch.tensor(3), torch.nan), num_steps=1, progress=False)

    def test_progress_bar(self, capsys):
        _Climb().fit(progress=True)
        captured = capsys.readouterr()
        assert "bound/entry" in captured.err
        assert "4/4" in captured.err
        _Climb().fit(progress=False)
        assert capsys.readouterr() == ("", "")

    @pytest.mark.filterwarnings("ignore:Encountered NaN")
    @pytest.mark.parametrize("setting", [True, False])
    def test_validation_until_all_rows_were_seen_and_restored(self, setting):
        with pyro.validation_enabled(setting):
            spy = _Climb()
            spy.fit()
            assert spy.validated == [setting, False, False, False]
            on_batches = _Climb()
            on_batches.fit(torch.randn(N, 2), batch_size=N // 2)
            assert on_batches.validated == [setting, setting, False, False]
            assert is_validation_enabled() == dist.is_validation_enabled() == setting
            with pytest.raises(ValueError, match="NaN"):
                _Climb(bad_at=1).fit()
            assert is_validation_enabled() == dist.is_validation_enabled() == setting

    def test_a_batch_of_all_rows_is_a_full_batch(self, Y):
        losses = []
        for batch_size in (None, N):
            pyro.clear_param_store()
            losses.append(fit(*_pair(Y), Y, num_steps=5, batch_size=batch_size, progress=False).losses)
        assert losses[0] == pytest.approx(losses[1])

    def test_warns_of_shared_parameters(self, Y):
        fit(*_pair(Y), Y, num_steps=1, progress=False)
        other = BayesianGPLVM(N, D, 2, num_inducing=5)
        with pytest.warns(UserWarning, match="BayesianGPLVM takes the values.*inducing_points.*module_local_params"):
            fit(other, MeanFieldGuide(other), Y, num_steps=0, progress=False)

    def test_two_models_side_by_side_under_module_local_params(self, Y):
        with pyro.settings.context(module_local_params=True):
            for _ in range(2):
                model = BayesianGPLVM(N, D, 2, num_inducing=5).initialize(Y)
                fit(model, MeanFieldGuide(model), Y, num_steps=2, progress=False)


def _two_params(step):
    """A noisy bound; parameter b enters late, and rests at every third step."""
    a = pyro.param("a", torch.ones(3))
    loc = a.sum()
    if step >= 2 and step % 3:
        loc = loc + pyro.param("b", torch.tensor(0.5), constraint=dist.constraints.positive)
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.randn(()))


def _no_guide(*args):
    pass


def _trajectory(optim, steps=range(12)):
    """All parameters after each step."""
    svi, path = SVI(_two_params, _no_guide, optim, Trace_ELBO()), []
    for step in steps:
        torch.manual_seed(step)
        svi.step(step)
        path.append({name: p.detach().clone() for name, p in pyro.get_param_store().items()})
    return path


class TestJointOptim:
    def test_follows_pyro_s_optimiser_exactly(self):
        expected = _trajectory(Adam({"lr": 0.1, "betas": (0.8, 0.9)}))
        pyro.clear_param_store()
        found = _trajectory(JointOptim(torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9)}))
        assert [sorted(step) for step in found] == [["a"]] * 2 + [["a", "b"]] * 10
        for a, b in zip(expected, found, strict=True):
            assert _same(a, b)

    def test_fused_follows_it_to_rounding(self):
        expected = _trajectory(Adam({"lr": 0.1}))
        pyro.clear_param_store()
        for a, b in zip(expected, _trajectory(JointOptim(optim_args={"lr": 0.1, "fused": True})), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("through_file", [False, True])
    def test_state_continues_exactly(self, through_file, tmp_path):
        def make():
            return JointOptim(torch.optim.Adam, {"lr": 0.1}, schedule=lambda step: 0.8**step)

        expected = _trajectory(make())
        pyro.clear_param_store()
        first, second = make(), make()
        _trajectory(first, range(6))
        if through_file:
            first.save(str(tmp_path / "optim.pt"))
            second.load(str(tmp_path / "optim.pt"))
        else:
            second.set_state(first.get_state())
        for a, b in zip(expected[6:], _trajectory(second, range(6, 12)), strict=True):
            assert _same(a, b)

    def test_state_continues_exactly_without_names(self, tmp_path):
        """Under module_local_params, where parameters of one shape are told apart by their values."""

        def make():
            torch.manual_seed(0)
            guide = AutoNormal(lambda: [pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "abcdefgh"])
            guide()
            return guide, JointOptim(torch.optim.Adam, {"lr": 0.1}, schedule=lambda step: 0.8**step)

        def run(guide, optim, steps):
            svi = SVI(guide.model, guide, optim, Trace_ELBO())
            for step in steps:
                torch.manual_seed(step)
                svi.step()
            return _values(guide)

        with pyro.settings.context(module_local_params=True):
            expected = run(*make(), range(12))
            guide, optim = make()
            run(guide, optim, range(6))
            optim.save(str(tmp_path / "optim.pt"))
            second, resumed = make()
            second.load_state_dict(guide.state_dict())
            resumed.load(str(tmp_path / "optim.pt"))
            assert len(resumed.get_state()["nameless"]) == 16
            assert _same(run(second, resumed, range(6, 12)), expected)
            # A running optimiser goes back too, if its parameters do.
            resumed.load(str(tmp_path / "optim.pt"))
            second.load_state_dict(guide.state_dict())
            assert _same(run(second, resumed, range(6, 12)), expected)
            third, forgetful = make()
            forgetful.load(str(tmp_path / "optim.pt"))
            with pytest.raises(ValueError, match=r"parameters as they were.*got one of shape \[\].*load the parameters"):
                run(third, forgetful, range(1))
            # The first step of Adam is as long in all parameters: some are the same still.
            guide, optim = make()
            run(guide, optim, range(1))
            second, resumed = make()
            second.load_state_dict(guide.state_dict())
            resumed.set_state(optim.get_state())
            with pytest.raises(ValueError, match=r"expected parameters that differ.*got \d with one value, of shape \[\]"):
                run(second, resumed, range(1, 2))

    def test_state_matters(self):
        """Without it Adam goes elsewhere, so the test above can fail."""
        expected = _trajectory(JointOptim(optim_args={"lr": 0.1}))
        pyro.clear_param_store()
        _trajectory(JointOptim(optim_args={"lr": 0.1}), range(6))
        assert not _same(expected[-1], _trajectory(JointOptim(optim_args={"lr": 0.1}), range(6, 12))[-1])

    def test_state_goes_where_the_parameters_are(self):
        """From one device to another; a device without numbers will do."""
        state = None
        for device in ("cpu", "meta"):
            pyro.clear_param_store()
            param = pyro.param("a", torch.ones(3, device=device)).unconstrained()
            param.grad = torch.ones(3, device=device)
            optim = JointOptim(torch.optim.Adam, {"lr": 0.1})
            if state is not None:
                optim.set_state(state)
            optim([param])
            state = optim.get_state()
        assert state["state"]["a"]["exp_avg"].is_meta
        assert state["state"]["a"]["step"] == state["num_steps"] == 2

    @pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
    def test_numbers_of_steps_go_where_the_optimiser_keeps_them(self, option):
        class Idle(torch.optim.Adam):
            """On a device where Adam itself cannot be fused."""

            def __init__(self, params, **options):
                super().__init__(params)
                self.defaults |= options

            def step(self):
                pass

        optim = JointOptim(torch.optim.Adam, {"fused": True})
        here = pyro.param("a", torch.ones(3))
        here.grad = torch.ones(3)
        optim([here])
        state = optim.get_state()
        pyro.clear_param_store()
        there = JointOptim(Idle, {option: True})
        there.set_state(state)
        there([pyro.param("a", torch.ones(3, device="meta"))])
        moved = there.get_state()["state"]["a"]
        assert moved["exp_avg"].is_meta
        assert moved["step"].is_meta == (option != "foreach")

    @pytest.mark.usefixtures("unchecked")
    def test_arguments_by_parameter_are_refused(self):
        with pytest.raises(TypeError, match="expected optim_args to be a dict for all parameters, got function; "):
            JointOptim(torch.optim.Adam, lambda name: {"lr": 0.1})

    def test_schedule_counts_steps(self):
        np.testing.assert_allclose(_path(4, schedule=lambda step: 0.5**step), [1.0, 0.5, 0.25, 0.125])
        np.testing.assert_allclose(_path(3), [1.0, 1.0, 1.0])

    def test_schedule_serves_parameters_that_come_late(self):
        def model(step):
            total = pyro.param("a", torch.tensor(0.0))
            if step:
                total = total + pyro.param("b", torch.tensor(0.0))
            pyro.factor("loss", -total)

        svi = SVI(model, _no_guide, JointOptim(torch.optim.SGD, {"lr": 1.0}, schedule=lambda s: 0.5**s), Trace_ELBO())
        for step in range(3):
            svi.step(step)
        assert pyro.param("a").item() == pytest.approx(-1.75)
        assert pyro.param("b").item() == pytest.approx(-0.75)

    @pytest.mark.parametrize(("clip_norm", "length"), [(1.0, 1.0), (10.0, 5.0), (None, 5.0)])
    def test_clips_the_norm_of_the_whole_gradient(self, clip_norm, length):
        def model():
            pyro.factor("loss", -3 * pyro.param("a", torch.tensor(0.0)) - 4 * pyro.param("b", torch.tensor(0.0)))

        SVI(model, _no_guide, JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_norm=clip_norm), Trace_ELBO()).step()
        assert pyro.param("a").item() == pytest.approx(-0.6 * length, rel=1e-5)
        assert pyro.param("b").item() == pytest.approx(-0.8 * length, rel=1e-5)

    @pytest.mark.parametrize("first", [1.0, 0.0])
    def test_clips_gradients_longer_than_usual(self, first):
        slopes = iter([first, 1.0, 1.0, 1000.0, 1.0])

        def model():
            pyro.factor("loss", -next(slopes) * pyro.param("a", torch.tensor(0.0)))

        svi = SVI(model, _no_guide, JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_factor=5.0), Trace_ELBO())
        found = [0.0]
        for _ in range(5):
            svi.step()
            found.append(-pyro.param("a").item())
        np.testing.assert_allclose(np.diff(found), [first, 1.0, 1.0, 5.0, 1.0], rtol=1e-5)
        assert svi.optim.get_state()["usual_norm"].item() == pytest.approx(0.95 * (0.95 + 0.05 * 5.0) + 0.05)

    def test_knows_the_usual_norm_again(self):
        slopes = iter([1.0, 1000.0])

        def model():
            pyro.factor("loss", -next(slopes) * pyro.param("a", torch.tensor(0.0)))

        first, second = (JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_factor=5.0) for _ in range(2))
        SVI(model, _no_guide, first, Trace_ELBO()).step()
        second.set_state(copy.deepcopy(first.get_state()))
        SVI(model, _no_guide, second, Trace_ELBO()).step()
        assert pyro.param("a").item() == pytest.approx(-6.0)

    def test_without_parameters_the_bound_is_evaluated_all_the_same(self):
        def model(y):
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

        y = torch.randn(4)
        expected = -dist.Normal(0.0, 1.0).log_prob(y).sum().item()
        assert fit(model, _no_guide, y, num_steps=2, progress=False).losses == pytest.approx([expected] * 2)
        optim = JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_norm=1.0, schedule=lambda step: 1.0)
        assert SVI(model, _no_guide, optim, Trace_ELBO()).step(y) == pytest.approx(expected)

    def test_refuses_to_clip_what_is_usual(self):
        with pytest.raises(ValueError, match=r"expected a clip_factor above 1, got 0\.5"):
            JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_factor=0.5)


def test_joint_optim_restores_a_running_optimiser():
    """State comes back for parameters already known, and a load followed by a save loses nothing."""

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    guide = AutoNormal(model)
    optim = JointOptim(torch.optim.Adam, {"lr": 0.1})
    svi = SVI(model, guide, optim, Trace_ELBO())
    for _ in range(3):
        svi.step()
    state = optim.get_state()
    for _ in range(3):
        svi.step()
    optim.set_state(state)
    assert optim.get_state()["num_steps"] == 3
    assert all(moments["step"] == 3 for moments in optim.get_state()["state"].values())
    svi.step()
    fresh = JointOptim(torch.optim.Adam, {"lr": 0.1})
    fresh.set_state(state)
    assert fresh.get_state()["state"].keys() == state["state"].keys()
    assert all(moments["step"] == 3 for moments in fresh.get_state()["state"].values())


def test_blocks_sweep_as_they_do_by_hand():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def guide(y):
        mean, precision = pyro.param("mean", torch.tensor(0.0)), pyro.param("precision", torch.tensor(1.0))
        pyro.sample("loc", dist.Normal(mean, precision.rsqrt()))

    y = torch.tensor([1.0, 2.0, 4.0])
    blocks = [
        Block("mean", params=["mean"], optim=lambda tensors: torch.optim.SGD(tensors, lr=0.1)),
        Block("precision", params=["precision"], update=lambda y: {"precision": torch.tensor(1.0 + len(y))}),
    ]
    found = []
    for loop in (
        lambda: fit(model, guide, y, blocks=blocks, num_steps=4, progress=False).losses,
        lambda: [vi.step(y) for vi in [BlockCoordinateVI(model, guide, blocks)] for _ in range(4)],
    ):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        found.append((loop(), pyro.param("mean").item(), pyro.param("precision").item()))
    assert found[0] == found[1]
    assert found[0][2] == 4.0
    with pytest.raises(ValueError, match="expected an optimiser or blocks, got both"):
        fit(model, guide, y, blocks=blocks, optim=Adam({"lr": 0.1}), progress=False)
    with pytest.raises(ValueError, match=r"expected blocks alone, .* got learning_rate too; .* guide.blocks\(learning_rate="):
        fit(model, guide, y, blocks=blocks, learning_rate=0.1, progress=False)


def test_a_schedule_of_the_fit_is_that_of_blocks_that_move_by_gradient():
    def model(y):
        mean = pyro.param("a", torch.tensor(0.0)) + pyro.param("b", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([1]).to_event(1), obs=y)

    def blocks(schedule=None):
        descent = lambda tensors: torch.optim.SGD(tensors, lr=0.5)  # noqa: E731
        closed = {"update": lambda y: {"b": y[0] - pyro.param("a") + 1.0}, "damping": 0.5}
        return [Block("a", params=["a"], optim=descent, schedule=schedule), Block("b", params=["b"], **closed)]

    def ends(blocks, **settings):
        pyro.clear_param_store()
        losses = fit(model, _no_guide, torch.tensor([3.0]), blocks=blocks, num_steps=4, progress=False, **settings).losses
        return [*losses, pyro.param("a").item()]

    constant, cosine = ends(blocks()), ends(blocks(), schedule="cosine")
    assert ends(blocks(), schedule="constant") == constant != cosine
    assert cosine == pytest.approx(ends(blocks(lambda sweep: 0.5 * (1.0 + math.cos(math.pi * sweep / 4.0)))))
    with pytest.raises(ValueError, match="expected one schedule, got one of the fit and one of block 'a'"):
        ends(blocks(float), schedule="cosine")
