"""NumPyro's annealed guides on our GPLVM: the same log joint, gradients and start, and chains that follow the parameters."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pyro import poutine

pytest.importorskip("numpyro")

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import log_density

from benchmarks.peers.numpyro_dais import NumPyroDAIS, _batches
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.kernels import RBF, Linear
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import BayesianGPLVM

N, D, Q, M, B = 23, 4, 2, 5, 5
# Beyond the default of eta_max, so that both arguments count.
OPTIONS = {"eta_init": 0.15, "eta_max": 0.3, "gamma_init": 0.6}
HYPERPARAMETERS = {
    "inducing_points": "inducing_points",
    "lengthscale": "kernel.lengthscale",
    "variance": "kernel.variance",
    "noise": "likelihood.variance",
}


pytestmark = pytest.mark.usefixtures("float64")


def _data():
    random = np.random.default_rng(0)
    Y = torch.tensor(1.0 + random.normal(size=(N, Q)) @ random.normal(size=(Q, D)) + 0.1 * random.normal(size=(N, D)))
    Y[0, 1:], Y[4, 0] = torch.nan, torch.nan
    return Y


def _model(**kwargs):
    settings = {"kernel": RBF(Q, lengthscale=torch.tensor([0.8, 2.0])), **kwargs}
    return BayesianGPLVM(N, D, Q, num_inducing=M, **settings).to(torch.float64).initialize(_data())


def _peer(guide, model, **kwargs):
    batch_size = B if guide == "semi" else None
    settings = {"num_steps": 3, "learning_rate": 0.02, "batch_size": batch_size, "guide": guide, **OPTIONS}
    return NumPyroDAIS(_data(), model, **(settings | kwargs))


def _params(peer):
    with jax.enable_x64(True):
        return peer._svi.get_params(peer._state)


@pytest.fixture(scope="module", params=["semi", "full"])
def trained(request):
    """A peer, what it was at the start, and after some training."""
    model = _model()
    peer = _peer(request.param, model)
    first, bounds = _params(peer), [peer.negative_bound(num_evaluations=50)]
    seconds = peer.train(40, seed=0)
    bounds.append(peer.negative_bound(num_evaluations=50))
    return SimpleNamespace(name=request.param, model=model, peer=peer, first=first, bounds=bounds, seconds=seconds)


semi = pytest.mark.parametrize("trained", ["semi"], indirect=True)


def _losses(loss, params, num_draws, *args):
    """Minus the bound per datum, once for each key and row of the arguments."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(1), num_draws)
        return np.array([loss(key, params, *row) for key, *row in zip(keys, *args, strict=True)]) / N


def _still(trained):
    """The start with steps of length 0, so that what is left of the guide is its base."""
    return {**trained.first, "auto_eta0": np.zeros_like(trained.first["auto_eta0"])}


def _mean_and_error(values):
    return np.mean(values), np.std(values) / len(values) ** 0.5


def _assert_same_mean(first, second):
    (a, a_error), (b, b_error) = _mean_and_error(first), _mean_and_error(second)
    assert abs(a - b) < 4 * np.hypot(a_error, b_error)


@pytest.mark.parametrize("rows", [list(range(N)), [7, 0, 4]], ids=["full", "subsampled"])
def test_log_joint_and_its_gradients_are_those_of_our_model(rows):
    model = _model()
    gplvm, idx = _peer("semi", model)._gplvm, jnp.array(rows)
    X, u = (torch.randn(*shape, requires_grad=True) for shape in [(len(rows), Q), (D, M)])
    parameters = {name: model.get_parameter(f"{ours}_unconstrained") for name, ours in HYPERPARAMETERS.items()}
    with poutine.condition(data={"X": X, "u": u}):
        expected = poutine.trace(model).get_trace(_data()[rows], torch.tensor(rows)).log_prob_sum()
    expected.backward()

    def log_joint(values):
        values = {
            name: biject_to(constraints.softplus_positive)(value) if name in ("lengthscale", "variance", "noise") else value
            for name, value in values.items()
        }
        with handlers.substitute(data={"data": idx}):
            return log_density(lambda: gplvm.rows(gplvm.outputs(), len(rows)), (), {}, values)[0]

    with jax.enable_x64(True):
        inputs = {"X": X, "u": u, **parameters}
        arrays = {name: jnp.asarray(value.detach().numpy()) for name, value in inputs.items()}
        found, gradients = jax.jit(jax.value_and_grad(log_joint))(arrays)
    assert float(found) == pytest.approx(expected.item(), abs=1e-8)
    for name, value in inputs.items():
        np.testing.assert_allclose(gradients[name], value.grad, rtol=1e-7, atol=1e-7, err_msg=name)


def test_starts_where_our_guide_does(trained):
    covariance = {"u": "full" if trained.name == "semi" else "diagonal"}
    guide = MeanFieldGuide(trained.model, covariance=covariance, init_scale=0.1)
    elbo, Y = MeanFieldELBO(), _data()
    with torch.no_grad():
        expected = [elbo.loss(trained.model, guide, Y) / N for _ in range(100)]
    found = _losses(trained.peer._loss, _still(trained), 1000)
    _assert_same_mean(found, expected)


def test_options_reach_the_guide(trained):
    np.testing.assert_allclose(trained.first["auto_eta0"], OPTIONS["eta_init"])
    np.testing.assert_allclose(trained.first["auto_gamma"], OPTIONS["gamma_init"])
    assert trained.first["auto_beta_increments"].shape[-1] == 3


def test_training_lowers_the_bound(trained):
    assert trained.bounds[1] < trained.bounds[0] - 0.5
    assert len(trained.seconds) == 40
    assert min(trained.seconds) > 0.0
    assert trained.peer.compile_seconds > 0.0
    assert all(np.isfinite(value).all() for value in _params(trained.peer).values())
    assert trained.peer.train(0, seed=0) == []


def test_training_and_bound_depend_on_the_seed_alone(trained):
    state, runs = trained.peer._state, []
    for seed in (3, 3, 4):
        trained.peer._state = state
        trained.peer.train(6, seed=seed)
        runs.append([trained.peer.negative_bound(num_evaluations=2, seed=s) for s in (0, 0, 1)])
    trained.peer._state = state
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] == runs[0][1] != runs[0][2]


@semi
def test_mini_batches_leave_the_bound_alone(trained):
    svi = trained.peer._svi

    def of_batch(key, params, idx):
        return svi.loss.loss(key, params, svi.model, svi.guide, idx)

    # In each round every row is in as many batches as any other.
    rounds = np.tile((np.arange(N)[:, None] + np.arange(B)) % N, (40, 1))
    found = _losses(jax.jit(of_batch), trained.first, len(rounds), rounds).reshape(40, N).mean(1)
    base = _losses(trained.peer._loss, _still(trained), 100).mean()
    # What the chain gains is many times the error.
    assert trained.bounds[0] < base - 20 * _mean_and_error(found)[1]
    _assert_same_mean(found, _losses(trained.peer._loss, trained.first, 400))


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_chain_follows_the_hyperparameters(trained, name):
    with jax.enable_x64(True):
        params = {**trained.first, name: 1.1 * trained.first[name]}
        before, after = (trained.peer._draw(jax.random.key(0), values)["X"] for values in (trained.first, params))
    # With one key, all that depends on the parameter is the score.
    assert np.abs(after - before).max() > 1e-4


def test_prediction_is_that_of_our_model_at_the_mean_latents(trained):
    params, model = _params(trained.peer), _model()
    with jax.enable_x64(True):
        draws = [trained.peer._draw(key, params) for key in jax.random.split(jax.random.key(0), 64)]
    for name, ours in HYPERPARAMETERS.items():
        module, _, attribute = ours.rpartition(".")
        setattr(model.get_submodule(module), attribute, torch.tensor(np.asarray(params[name])))
    latents = {name: torch.tensor(np.mean([draw[name] for draw in draws], axis=0)) for name in ("X", "u")}
    if trained.name == "semi":
        latents["u"] = torch.tensor(np.asarray(params["u_loc"]))
    with torch.no_grad(), poutine.condition(data=latents):
        expected = poutine.trace(model).get_trace(_data()).nodes["y"]["fn"].mean
    found = trained.peer.predict()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0.0)
    Y = _data()
    assert (found - Y).square().nanmean() < 0.2 * (Y - Y.nanmean(0)).square().nanmean()


@pytest.mark.parametrize(("batch_size", "per_epoch"), [(B, 4), (N - 1, 1)])
def test_batches_are_shuffled_without_replacement_and_short_ones_dropped(batch_size, per_epoch):
    batches = np.stack(list(_batches(N, batch_size, 2 * per_epoch + 1, seed=0)))
    assert batches.shape == (2 * per_epoch + 1, batch_size)
    first, second = batches[:per_epoch].ravel(), batches[per_epoch:-1].ravel()
    for epoch in (first, second):
        assert len(np.unique(epoch)) == per_epoch * batch_size
        assert epoch.max() < N
    assert not np.array_equal(first, second)


def test_all_rows_stay_in_order():
    for batch in _batches(N, N, 3, seed=0):
        np.testing.assert_array_equal(batch, np.arange(N))


def test_precision_outside_stays_as_it_was(trained):
    assert jnp.ones(1).dtype == jnp.float32
    assert _params(trained.peer)["inducing_points"].dtype == np.float64


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda: _model(kernel=Linear(Q)), {}, "expected a model with kernel RBF.*got Linear, Gaussian, svgp"),
        (lambda: BayesianGPLVM(N, D, Q, num_inducing=M, likelihood=Poisson()), {}, "got RBF, Poisson, svgp"),
        (lambda: _model(likelihood_term="fitc"), {}, "got RBF, Gaussian, fitc"),
        (lambda: BayesianGPLVM(N, D, Q, num_inducing=M), {}, r"got none of \['X', 'u'\]; call model.initialize"),
        (_model, {"guide": "partial"}, "expected guide in"),
        (_model, {"batch_size": N + 1}, "expected batch_size from 1 to 23"),
        (_model, {"guide": "full", "batch_size": B}, "AutoDAIS cannot subsample, got 5"),
    ],
)
def test_refuses_what_it_cannot_fit(model, settings, message):
    with pytest.raises(ValueError, match=message):
        _peer(settings.pop("guide", "semi"), model(), **settings)
