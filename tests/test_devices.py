"""Models, guides and fits stay on the device of their data: here the CPU, and a GPU where there is one (`make gpu`)."""

import pytest
import torch

from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.training import fit

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
    history = fit(model, guide, Y, blocks=guide.blocks(), num_steps=3, progress=False)
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
    guide = SparseStructuredGPGuide(model, encoder) if sparse else StructuredGPGuide(model, encoder)
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
