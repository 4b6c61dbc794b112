"""GP-VAEs of subjects over time with covariates, beside the exact Gaussian process with the same kernel."""

import pytest
import torch
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, fit, load, save
from pyro_lvgp.kernels import RBF, Categorical, Embedded, Index, Linear
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE, cluster_centres
from pyro_lvgp.networks import MLP, IndexNet, NeighbourNet

pytestmark = pytest.mark.usefixtures("float64")
NOISE = 0.3
TIME = {"lengthscale": 0.3, "batch_shape": (1,), "active_dims": [0]}
KERNELS = {
    "categorical": lambda: RBF(1, **TIME) + Categorical(correlation=None, batch_shape=(1,), active_dims=[1]) * RBF(1, **TIME),
    "correlated": lambda: Categorical(correlation=0.4, batch_shape=(1,), active_dims=[1]) * RBF(1, **TIME),
    "index": lambda: RBF(1, **TIME) + Index(4, 2, batch_shape=(1,), active_dims=[1]) * RBF(1, **TIME),
    "embedded": lambda: Embedded(RBF(2), 4, active_dims=[1]) * RBF(1, **TIME) + Linear(1, batch_shape=(1,), active_dims=[2]),
}
X = torch.cat(
    [
        torch.rand(20, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64),  # time
        (torch.arange(20.0, dtype=torch.float64) % 4)[:, None],  # subject
        torch.randn(20, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64),  # covariate
    ],
    -1,
)
Y = torch.sin(6.0 * X[:, :1]) + 0.5 * X[:, 1:2] + 0.1 * X[:, 2:]


class KnownSites(nn.Module):
    """Encoder whose Gaussian sites are the likelihood of data that are the process with noise."""

    def forward(self, y):
        return y, torch.full_like(y, NOISE)


def make(kernel, sparse, inducing_points=None):
    likelihood = Gaussian(NOISE**2)
    if sparse:
        points = X.clone() if inducing_points is None else inducing_points
        model = SparseGPVAE(kernel, nn.Identity(), points, likelihood, num_data=len(Y), jitter=1e-10)
        return model, SparseStructuredGPGuide(model, encoders={"u": KnownSites()})
    model = GPVAE(kernel, nn.Identity(), likelihood)
    return model, StructuredGPGuide(model, encoders={"f": KnownSites()}, num_eval_site_updates=0)


def exact(kernel, x_new):
    """Mean and variance of the exact process at new inputs."""
    with torch.no_grad():
        K = kernel(X)[0] + NOISE**2 * torch.eye(len(X))
        cross, variance = kernel(x_new, X)[0], kernel.diagonal(x_new)[0]
        gain = torch.linalg.solve(K, cross.mT).mT
        return gain @ Y[:, 0], variance - (gain * cross).sum(-1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_predictions_are_those_of_the_exact_process(name, sparse):
    torch.manual_seed(0)
    kernel = KERNELS[name]()
    x_new = torch.tensor([[0.5, 0.0, 0.3], [0.95, 3.0, -1.0], [0.1, 2.0, 0.0]])  # new times of known subjects
    if "cat" in name or name == "correlated":
        x_new = torch.cat([x_new, torch.tensor([[0.5, 77.0, 0.0]])])  # and a new subject
    mean, variance = exact(kernel, x_new)
    model, guide = make(kernel, sparse)
    guide(X, Y)
    prediction = model.predict(guide, X, Y, x_new, num_samples=4096, seed=0)
    torch.testing.assert_close(prediction.mean[:, 0], mean, rtol=0.0, atol=5e-3)
    torch.testing.assert_close(prediction.variance[:, 0], variance + NOISE**2, rtol=0.02, atol=0.0)


def test_a_new_subject_has_the_function_of_all_subjects_and_its_own_prior():
    kernel = KERNELS["categorical"]()
    shared, own = kernel.kernels[0], kernel.kernels[1]
    x_new = torch.tensor([[0.5, 77.0, 0.0]])
    mean, variance = exact(kernel, x_new)
    with torch.no_grad():
        K = kernel(X)[0] + NOISE**2 * torch.eye(len(X))
        gain = torch.linalg.solve(K, shared(X, x_new)[0])
        torch.testing.assert_close(mean, gain.mT @ Y[:, 0])
        torch.testing.assert_close(variance, own.diagonal(x_new)[0] + (shared(x_new)[0] - gain.mT @ shared(X, x_new)[0])[0])


@pytest.mark.parametrize("nearest", [False, True])
def test_levels_of_inducing_points_stay_as_they_are(nearest):
    torch.manual_seed(0)
    kernel = RBF(1, lengthscale=0.3, batch_shape=(2,), active_dims=[0])
    kernel = kernel + Index(4, batch_shape=(2,), active_dims=[1]) * RBF(1, batch_shape=(2,), active_dims=[0])
    points = X[::2].clone()
    model = SparseGPVAE(kernel, MLP(2, 3), points, num_data=20)
    y = torch.randn(20, 3)
    encoder = NeighbourNet(IndexNet(3, 2), input_dim=3, latent_dim=2, num_nearest=2) if nearest else IndexNet(3, 2)
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder})
    fit(model, guide, X, y, loss=MeanFieldELBO("points"), num_steps=4, batch_size=10, progress=False)
    moved = model.inducing_points.detach()
    assert torch.equal(moved[:, 1], points[:, 1])
    assert (moved[:, 0] != points[:, 0]).all()


def test_inducing_points_between_levels_are_refused():
    kernel = KERNELS["index"]()
    with pytest.raises(ValueError, match=r"integer levels in column 1 of the inducing points.* from the rows of the data"):
        make(kernel, sparse=True, inducing_points=cluster_centres(X, 7))
    model, guide = make(KERNELS["index"](), sparse=True)
    guide(X, Y)
    new = X.clone()
    new[0, 1] = 4.0
    with pytest.raises(ValueError, match="levels of Index as integers from 0 to 3 in column 1 of the inputs, got 4"):
        model.predict(guide, X, Y, new)


@pytest.mark.parametrize("name", KERNELS)
def test_a_loaded_model_predicts_as_the_saved_one(name, tmp_path):
    model = GPVAE(KERNELS[name](), MLP(1, 1))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(1, 1)})
    guide(X, Y)
    save(tmp_path / "fit", model, guide)
    again, its_guide = load(tmp_path / "fit")
    expected = model.predict(guide, X, Y, num_samples=8, seed=0).mean
    assert torch.equal(again.predict(its_guide, X, Y, num_samples=8, seed=0).mean, expected)
