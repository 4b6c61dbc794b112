"""Adam over all parameters at once, against Pyro's own optimiser step by step."""

import copy

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_lvgp.infer import JointOptim, fit
from tests.helpers.fits import no_guide, parameter_values, same_values


def _two_params(step):
    """A noisy bound; parameter b enters late, and rests at every third step."""
    a = pyro.param("a", torch.ones(3))
    loc = a.sum()
    if step >= 2 and step % 3:
        loc = loc + pyro.param("b", torch.tensor(0.5), constraint=dist.constraints.positive)
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.randn(()))


def _trajectory(optim, steps=range(12)):
    """All parameters after each step."""
    svi, path = SVI(_two_params, no_guide, optim, Trace_ELBO()), []
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
            assert same_values(a, b)

    def test_fused_follows_it_to_rounding(self):
        expected = _trajectory(Adam({"lr": 0.1}))
        pyro.clear_param_store()
        for a, b in zip(expected, _trajectory(JointOptim(optim_args={"lr": 0.1, "fused": True})), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("through_file", [False, True])
    def test_state_continues_exactly(self, through_file, tmp_path):
        def make():
            return JointOptim(torch.optim.Adam, {"lr": 0.1}, clip_factor=2.0)

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
            assert same_values(a, b)

    def test_state_continues_exactly_without_names(self, tmp_path):
        """Under module_local_params, where the caller names the parameters."""

        def make():
            torch.manual_seed(0)
            guide = AutoNormal(lambda: [pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "abcdefgh"])
            guide()
            return guide, JointOptim(torch.optim.Adam, {"lr": 0.1}, clip_factor=2.0)

        def run(guide, optim, steps):
            svi = SVI(guide.model, guide, optim, Trace_ELBO())
            for step in steps:
                torch.manual_seed(step)
                svi.step()
            return parameter_values(guide)

        with pyro.settings.context(module_local_params=True):
            expected = run(*make(), range(12))
            guide, optim = make()
            run(guide, optim, range(6))
            with pytest.raises(ValueError, match=r"names in Pyro's param store, .* without; .* take pyro_lvgp.infer.Check"):
                optim.get_state()
            state = optim.get_state({tensor: name for name, tensor in guide.named_parameters()})
            torch.save(state, tmp_path / "optim.pt")
            second, resumed = make()
            second.load_state_dict(guide.state_dict())
            resumed.set_state(torch.load(tmp_path / "optim.pt"), dict(second.named_parameters()))
            names = {tensor: name for name, tensor in second.named_parameters()}
            assert resumed.get_state(names)["state"].keys() == state["state"].keys()
            assert len(state["state"]) == 16
            assert same_values(run(second, resumed, range(6, 12)), expected)
            # A running optimiser goes back too, if its parameters do.
            resumed.set_state(state, dict(second.named_parameters()))
            second.load_state_dict(guide.state_dict())
            assert same_values(run(second, resumed, range(6, 12)), expected)

    def test_state_matters(self):
        """Without it Adam goes elsewhere, so the test above can fail."""
        expected = _trajectory(JointOptim(optim_args={"lr": 0.1}))
        pyro.clear_param_store()
        _trajectory(JointOptim(optim_args={"lr": 0.1}), range(6))
        assert not same_values(expected[-1], _trajectory(JointOptim(optim_args={"lr": 0.1}), range(6, 12))[-1])

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
        assert state["state"]["a"]["step"] == 2

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

    @pytest.mark.parametrize(("clip_norm", "length"), [(1.0, 1.0), (10.0, 5.0), (None, 5.0)])
    def test_clips_the_norm_of_the_whole_gradient(self, clip_norm, length):
        def model():
            pyro.factor("loss", -3 * pyro.param("a", torch.tensor(0.0)) - 4 * pyro.param("b", torch.tensor(0.0)))

        SVI(model, no_guide, JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_norm=clip_norm), Trace_ELBO()).step()
        assert pyro.param("a").item() == pytest.approx(-0.6 * length, rel=1e-5)
        assert pyro.param("b").item() == pytest.approx(-0.8 * length, rel=1e-5)

    @pytest.mark.parametrize("first", [1.0, 0.0])
    def test_clips_gradients_longer_than_usual(self, first):
        slopes = iter([first, 1.0, 1.0, 1000.0, 1.0])

        def model():
            pyro.factor("loss", -next(slopes) * pyro.param("a", torch.tensor(0.0)))

        svi = SVI(model, no_guide, JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_factor=5.0), Trace_ELBO())
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
        SVI(model, no_guide, first, Trace_ELBO()).step()
        second.set_state(copy.deepcopy(first.get_state()))
        SVI(model, no_guide, second, Trace_ELBO()).step()
        assert pyro.param("a").item() == pytest.approx(-6.0)

    def test_without_parameters_the_bound_is_evaluated_all_the_same(self):
        def model(y):
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

        y = torch.randn(4)
        expected = -dist.Normal(0.0, 1.0).log_prob(y).sum().item()
        assert fit(model, no_guide, y, num_steps=2, progress=False).losses == pytest.approx([expected] * 2)
        optim = JointOptim(torch.optim.SGD, {"lr": 1.0}, clip_norm=1.0)
        assert SVI(model, no_guide, optim, Trace_ELBO()).step(y) == pytest.approx(expected)

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
    assert all(moments["step"] == 3 for moments in optim.get_state()["state"].values())
    svi.step()
    fresh = JointOptim(torch.optim.Adam, {"lr": 0.1})
    fresh.set_state(state)
    assert fresh.get_state()["state"].keys() == state["state"].keys()
    assert all(moments["step"] == 3 for moments in fresh.get_state()["state"].values())
