import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import LinearGPVAE
from pyro_lvgp.ops import state_space

N, D = 60, 4


def rough(num=2, **kwargs):
    kernel = Matern(1, 0.5, lengthscale=0.2, batch_shape=(num,), **kwargs)
    kernel.requires_grad_(False)
    return kernel


@pytest.fixture
def series(float64):
    """Outputs that share one process; the first is missing in a third of the rows."""
    t = torch.linspace(0.0, 1.0, N)[:, None]
    y = torch.sin(9.0 * t) * torch.tensor([1.0, -2.0, 0.5, 3.0]) + torch.tensor([5.0, 0.0, 1.0, 0.0])
    y = y + 0.1 * torch.randn(N, D)
    gapped = y.clone()
    gapped[40:, 0] = torch.nan
    return t, y, gapped


def test_sweeps_never_lower_the_bound(series):
    t, _, y = series
    for model in (LinearGPVAE(rough(), independent_dim=2), LinearGPVAE(None, independent_dim=2), LinearGPVAE(rough())):
        bounds = np.array(model.fit(t, y, num_sweeps=30, tolerance=0.0))
        assert len(bounds) == 30
        assert (np.diff(bounds) > -1e-6 * abs(bounds[-1])).all()


def test_learned_lengthscales_raise_the_bound(series):
    t, _, y = series
    kernel = Matern(1, 0.5, lengthscale=0.2, batch_shape=(2,))
    frozen = LinearGPVAE(rough()).fit(t, y, num_sweeps=40, tolerance=0.0)
    learned = LinearGPVAE(kernel).fit(t, y, num_sweeps=40, tolerance=0.0)
    assert learned[-1] > frozen[-1] + 1.0


def test_a_fit_ends_when_the_bound_converges(series):
    t, _, y = series
    assert len(LinearGPVAE(None, independent_dim=1).fit(t, y, num_sweeps=500)) < 200


def test_a_gap_is_predicted_from_the_other_outputs_in_units_of_the_data(series):
    t, truth, y = series
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t, y)
    predicted = model.predict()
    error = (predicted.mean - truth)[40:, 0]
    assert error.square().mean().sqrt() < 0.2
    inside = (error.abs() < 2.0 * predicted.stddev[40:, 0]).double().mean()
    assert inside > 0.8


def test_linear_time_and_dense_inference_agree(series, monkeypatch):
    t, _, y = series
    order = torch.randperm(N)
    fast, dense = LinearGPVAE(rough(), independent_dim=1), LinearGPVAE(rough(), independent_dim=1)
    bounds = fast.fit(t, y, num_sweeps=5)
    monkeypatch.setattr(Matern, "is_markov", False)
    monkeypatch.setattr(state_space, "joint_log_normaliser", None)
    np.testing.assert_allclose(dense.fit(t[order], y[order], num_sweeps=5), bounds, rtol=1e-6)
    torch.testing.assert_close(dense.predict().mean, fast_mean(fast, monkeypatch)[order], rtol=1e-5, atol=1e-5)


def fast_mean(model, monkeypatch):
    monkeypatch.undo()
    return model.predict().mean


def test_new_inputs_are_predicted_as_rows_without_data(series):
    t, _, y = series
    y[10:15] = torch.nan
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t, y, num_sweeps=10)
    inside, new = model.predict(num_samples=4000), model.predict(t[10:15], num_samples=4000)
    torch.testing.assert_close(new.mean, inside.mean[10:15], rtol=0.0, atol=0.1)


def test_far_from_the_data_the_latents_have_their_prior(series):
    t, _, y = series
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t, y, num_sweeps=10)
    far, q = model.predict(torch.full((1, 1), 50.0), num_samples=20_000), model.factors
    shape, rate, half_dof = q.noise.concentration, q.noise.rate, 0.5 * q.dof
    squares = q.second_moment.diagonal(dim1=-2, dim2=-1).sum(-1) - q.mean[:, -1].square()
    variance = squares + rate / (shape - 1.0) * half_dof / (half_dof - 1.0)
    torch.testing.assert_close(far.variance[0], model.scale.square() * variance, rtol=0.05, atol=0.0)
    torch.testing.assert_close(far.mean[0], model.centre + model.scale * q.mean[:, -1], rtol=0.0, atol=0.05)


def test_predictive_moments_equal_those_of_draws_of_all_factors(series):
    t, _, y = series
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t, y, num_sweeps=10)
    draws = 20_000
    predicted = model.predict(num_samples=draws)
    z, q = model._condition(model.x, model.table, model.factors).latents, model.factors
    row = 50
    latents = dist.MultivariateNormal(z.mean[row], z.covariance[row]).sample((draws,))
    weights = dist.MultivariateNormal(q.mean, q.covariance).sample((draws,))
    scale = dist.Gamma(q.row_scale.concentration[row], q.row_scale.rate[row]).sample((draws, 1))
    noise = torch.randn(draws, D) * (q.noise.sample((draws,)) * scale).rsqrt()
    sampled = (weights[..., :-1] * latents[:, None]).sum(-1) + weights[..., -1] + noise
    sampled = model.centre + model.scale * sampled
    error = sampled.std(0) / math.sqrt(draws)
    assert ((predicted.mean[row] - sampled.mean(0)).abs() < 6.0 * error).all()
    torch.testing.assert_close(predicted.stddev[row], sampled.std(0), rtol=0.05, atol=0.0)


def test_kernels_over_places_use_dense_matrices(float64):
    x = torch.rand(30, 2)
    y = torch.sin(4.0 * x.sum(1, keepdim=True)) + 0.05 * torch.randn(30, 3)
    y[::3, 0] = torch.nan
    model = LinearGPVAE(RBF(2, lengthscale=0.5, batch_shape=(1,)), independent_dim=1)
    bounds = model.fit(x, y, num_sweeps=20)
    assert bounds[-1] > bounds[0]
    assert model.predict(torch.rand(4, 2)).mean.shape == (4, 3)


def test_predictions_have_the_dtype_of_the_data_and_repeat(series):
    t, _, y = series
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t.float(), y.float(), num_sweeps=3)
    predicted = model.predict()
    assert predicted.mean.dtype == torch.float32
    torch.testing.assert_close(model.predict().variance, predicted.variance, rtol=0.0, atol=0.0)


def test_a_constant_output_is_predicted(series):
    t, _, y = series
    y[:, 3] = 7.0
    model = LinearGPVAE(rough(), independent_dim=1)
    model.fit(t, y, num_sweeps=20)
    assert (model.predict().mean[:, 3] - 7.0).abs().max() < 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearGPVAE(None), "expected a kernel or independent_dim"),
        (lambda: LinearGPVAE(None, independent_dim=-1), "expected a kernel or independent_dim"),
        (lambda: LinearGPVAE(RBF(1)), "one batch dimension over the processes"),
    ],
)
def test_bad_sizes_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_it_works_in_inference_mode(series):
    t, _, y = series
    expected, model = (LinearGPVAE(rough(), independent_dim=1) for _ in range(2))
    bounds = expected.fit(t, y, num_sweeps=2)
    with torch.inference_mode():
        assert model.fit(t.clone(), y.clone(), num_sweeps=2) == bounds
        torch.testing.assert_close(model.predict().mean, expected.predict().mean)


def test_bad_data_raise(series):
    t, _, y = series
    model = LinearGPVAE(rough())
    with pytest.raises(ValueError, match="expected a fitted model"):
        model.predict()
    with pytest.raises(ValueError, match="num_sweeps"):
        model.fit(t, y, num_sweeps=0)
    y[:, 1] = torch.nan
    with pytest.raises(ValueError, match="observ"):
        model.fit(t, y)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [6, 13])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_fit_that_was_stopped_goes_on_as_if_it_had_not_been(series, after, has_kernel, tmp_path, monkeypatch):
    t, y = series[:2]

    def make():
        return LinearGPVAE(Matern(1, 1.5, lengthscale=0.3, batch_shape=(2,)) if has_kernel else None, independent_dim=1)

    options = {"num_sweeps": 20, "tolerance": 0.0}
    expected = make()
    bounds = expected.fit(t, y, **options)
    path, sweep, calls = tmp_path / "fit.pt", LinearGPVAE._sweep, []

    def stopped(self, ascent):
        calls.append(ascent)
        if len(calls) > after:
            raise Stop
        return sweep(self, ascent)

    monkeypatch.setattr(LinearGPVAE, "_sweep", stopped)
    with pytest.raises(Stop):
        make().fit(t, y, checkpoint=path, checkpoint_every=4, **options)
    monkeypatch.undo()
    monkeypatch.setattr(LinearGPVAE, "_sweep", lambda self, ascent: (calls.append(ascent), sweep(self, ascent))[1])
    calls.clear()
    again = make()
    assert again.fit(t, y, checkpoint=path, checkpoint_every=4, **options) == bounds
    assert len(calls) == 20 - after // 4 * 4  # the sweeps before the checkpoint are not repeated
    assert torch.equal(again.predict().mean, expected.predict().mean)
    assert torch.equal(again.predict().variance, expected.predict().variance)


def test_checkpoints_of_other_fits_and_damaged_ones_are_refused(series, tmp_path):
    t, y = series[:2]
    path = tmp_path / "fit.pt"
    model = LinearGPVAE(None, independent_dim=1)
    model.fit(t, y, num_sweeps=3, checkpoint=path, checkpoint_every=1)
    with pytest.raises(ValueError, match="got one of other data or settings"):
        model.fit(t, y**3, checkpoint=path)
    with pytest.raises(ValueError, match="got one of other data or settings"):
        LinearGPVAE(None, independent_dim=2).fit(t, y, checkpoint=path)
    whole, mean = path.read_bytes(), torch.load(path, weights_only=True)["state"]["q"]["mean"]
    path.write_bytes(whole[:-200])
    with pytest.raises(ValueError, match="cannot be read"):
        model.fit(t, y, checkpoint=path)
    numbers = mean.numpy().tobytes()
    at = whole.index(numbers)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ValueError, match="was changed since it was written"):
        model.fit(t, y, checkpoint=path)


def test_a_full_disk_leaves_the_last_checkpoint(series, tmp_path, monkeypatch):
    t, y = series[:2]
    path = tmp_path / "fit.pt"
    LinearGPVAE(None, independent_dim=1).fit(t, y, num_sweeps=3, checkpoint=path, checkpoint_every=1)
    before = path.read_bytes()

    def fail(states, unfinished):
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="the last checkpoint is as it was"):
        LinearGPVAE(None, independent_dim=1).fit(t, y, num_sweeps=6, checkpoint=path, checkpoint_every=1)
    assert path.read_bytes() == before
