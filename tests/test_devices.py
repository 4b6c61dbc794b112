"""Models, guides and fits stay on the device of their data: here the CPU, and a GPU where there is one (`make gpu`)."""

import pickle

import arviz_base
import numpy as np
import pyro
import pytest
import torch
import torch.distributed

from pyro_lvgp._compile.compilation import compile_graph
from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp._utils.seeding import normal_draws
from pyro_lvgp.diagnostics import gap_folds, to_arviz
from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import Checkpoint, CompiledELBO, Distributed, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.sklearn import GPLVM, RandomFeatureGPLVM

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
N, D, Q = 20, 3, 2


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return torch.device(request.param)


def _on(device, *things):
    """Whether tensors, or those of modules, lie there."""
    tensors = [x for thing in things for x in (thing.state_dict().values() if isinstance(thing, torch.nn.Module) else [thing])]
    return tensors and all(x.device.type == device.type for x in tensors if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("annealed", [False, True])
def test_a_gplvm_stays_where_its_data_are(device, annealed):
    Y = torch.randn(N, D).to(device)
    model = BayesianGPLVM(N, D, Q, num_inducing=5).to(device).initialize(Y)
    guide = AutoAnnealedLangevin(model, num_steps=2) if annealed else MeanFieldGuide(model)
    history = fit(model, guide, Y, num_steps=3, batch_size=10, progress=False)
    assert torch.isfinite(torch.tensor(history.losses)).all()
    assert _on(device, model, guide, model.reconstruct(guide, Y, num_samples=2).mean)


@pytest.mark.parametrize("weights", ["collapsed", "shared"])
def test_random_features_stay_where_their_data_are(device, weights):
    Y = torch.randn(N, D).to(device)
    model = RandomFeatureLVM(N, D, Q, num_frequencies=5, num_components=3).to(device).initialize(Y)
    guide = RandomFeatureGuide(model, weights=weights)
    history = fit(model, guide, Y, optim=guide.blocks(), num_steps=3, progress=False)
    assert torch.isfinite(torch.tensor(history.losses)).all()
    assert _on(device, model, guide, guide.latents().mean, model.impute(guide, Y, num_samples=2).mean)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gp_vae_stays_where_its_data_are(device, sparse):
    x, Y = torch.linspace(0.0, 1.0, N)[:, None].to(device), torch.randn(N, D).to(device)
    kernel, decoder, likelihood = RBF(1, lengthscale=0.2, batch_shape=(Q,)), MLP(Q, D, (4,)), Gaussian(0.1, data_dim=D)
    model = SparseGPVAE(kernel, decoder, x[::4].cpu(), likelihood) if sparse else GPVAE(kernel, decoder, likelihood)
    model = model.to(device)
    encoder = IndexNet(D, Q, (4,)).to(device)
    guide = (
        SparseStructuredGPGuide(model, encoders={"u": encoder})
        if sparse
        else StructuredGPGuide(model, encoders={"f": encoder})
    )
    history = fit(
        lambda y, idx=None: model(x, y),
        lambda y, idx=None: guide(x, y),
        Y,
        loss=StructuredELBO(max_plate_nesting=2),
        num_steps=3,
        progress=False,
    )
    assert torch.isfinite(torch.tensor(history.losses)).all()
    assert _on(device, model, guide, model.predict(guide, x, Y, x[:4] + 0.01, num_samples=2).mean)


def test_a_default_device_serves_all_that_is_made_on_it(device):
    with device:
        Y = torch.randn(N, D)
        model = RandomFeatureLVM(N, D, Q, num_frequencies=5, num_components=3).initialize(Y)
        guide = RandomFeatureGuide(model)
        history = fit(model, guide, Y, optim=guide.blocks(), num_steps=3, progress=False)
        estimator = GPLVM(n_components=Q, n_inducing=5, max_iter=3, random_state=0)
        latents = estimator.fit_transform(Y.cpu())
        filled = estimator.inverse_transform(latents)
    assert np.isfinite([*history.losses, *latents.flat, *filled.flat]).all()
    assert _on(device, model, guide)


def test_estimators_fit_on_the_device_that_they_are_given(device):
    Y = np.random.default_rng(0).standard_normal((N, D))
    Y[::4, 0] = np.nan
    for estimator in (GPLVM(n_inducing=5, max_iter=3), RandomFeatureGPLVM(n_frequencies=5, max_iter=3)):
        fitted = estimator.set_params(device=device, random_state=0).fit(Y)
        assert _on(device, fitted.model_, fitted.guide_)
        mean, stddev = fitted.inverse_transform(fitted.transform(Y), return_std=True)
        assert np.isfinite([*fitted.embedding_.flat, *mean.flat, *stddev.flat]).all()
        np.testing.assert_allclose(pickle.loads(pickle.dumps(fitted)).transform(Y), fitted.transform(Y), rtol=1e-3, atol=1e-3)


def test_seeds_mean_the_same_whatever_the_default_device():
    Y = torch.randn(N, D)
    Y[::4, 0] = torch.nan
    draws, folds = normal_draws(3, seed=0, like=Y), gap_folds(Y, 3, seed=0)
    with torch.device("meta"):
        assert torch.equal(normal_draws(3, seed=0, like=Y), draws)
        assert torch.equal(gap_folds(Y, 3, seed=0), folds)


@pytest.mark.parametrize("device", [CUDA], indirect=True)  # those of the CPU have tests of their own
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "graphs"])
@pytest.mark.parametrize("annealed", [False, True])
def test_compiled_steps_are_those_of_the_device(device, annealed, options):
    def losses(bound, **how):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = BayesianGPLVM(N, D, Q, num_inducing=5).double().to(device).initialize(Y)
        guide = AutoAnnealedLangevin(model, num_steps=2, **how) if annealed else MeanFieldGuide(model)
        return fit(model, guide, Y, loss=bound, num_steps=5, progress=False).losses

    Y = torch.randn(N, D, dtype=torch.float64).to(device)
    bound = MeanFieldELBO(num_samples=1)
    plain = losses(bound)
    np.testing.assert_allclose(losses(CompiledELBO(bound, options=options)), plain, rtol=1e-6)
    if annealed:
        np.testing.assert_allclose(losses(bound, compile=True), plain, rtol=1e-6)


def test_a_checkpoint_goes_on_where_it_was_written_and_elsewhere(device, tmp_path):
    def go_on(where, num_steps):
        pyro.clear_param_store()
        model = BayesianGPLVM(N, D, Q, num_inducing=5).to(where).initialize(Y.to(where))
        checkpoint = Checkpoint(tmp_path / "fit.checkpoint", every=2)
        how = {"num_steps": num_steps, "callbacks": [checkpoint], "seed": 0, "progress": False}
        return fit(model, MeanFieldGuide(model), Y.to(where), **how).losses

    Y = torch.randn(N, D)
    first = go_on(device, 2)
    assert go_on(device, 4)[:2] == first
    for where in (torch.device("cpu"), device):
        longer = go_on(where, 6)
        assert longer[:2] == first
        assert np.isfinite(longer).all()


def test_arviz_sees_what_lies_on_a_device(device):
    Y = torch.randn(N, D)
    Y[0, 1] = torch.nan
    Y = Y.to(device)
    model = BayesianGPLVM(N, D, Q, num_inducing=5).to(device).initialize(Y)
    tree = to_arviz(model, MeanFieldGuide(model), Y, num_samples=4)
    posterior = arviz_base.extract(tree, num_samples=None)
    assert posterior["X"].shape == (N, Q, 4)
    assert tree["posterior_predictive"]["y_observed"].shape == (1, 4, N * D - 1)


def test_processes_share_a_fit_on_a_device(device, tmp_path):
    Y = torch.randn(N, D).to(device)
    model = BayesianGPLVM(N, D, Q, num_inducing=5).to(device).initialize(Y)
    backend, rendezvous = "nccl" if device.type == "cuda" else "gloo", f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    try:
        history = fit(model, MeanFieldGuide(model), Y, num_steps=3, callbacks=[Distributed()], progress=False)
    finally:
        torch.distributed.destroy_process_group()
    assert np.isfinite(history.losses).all()
    assert _on(device, model)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_results_of_a_cuda_graph_outlive_its_next_run(device):
    x = torch.arange(3.0, device=device)
    double = compile_graph(record_pure(lambda x: (2.0 * x,), [x]), [x], options={"triton.cudagraphs": True})
    (first,), (second,) = double(x), double(x + 1.0)
    assert first.tolist() == [0.0, 2.0, 4.0]
    assert second.tolist() == [2.0, 4.0, 6.0]
