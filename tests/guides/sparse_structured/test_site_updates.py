"""Natural-gradient updates of sites on inducing values: exactness, monotonicity, memories, mini-batches and gradients."""

import pyro
import pytest
import torch
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from tests.helpers.site_updates import Constant, N, make_data
from tests.helpers.sparse_processes import assert_close, encoded, function, posterior, told_to_points

pytestmark = pytest.mark.usefixtures("float64")
M, D, B = 6, 4, 3


def make_model(latent_dim=1, likelihood=None, decoder=None, points=M, **options):
    kernel = RBF(1, lengthscale=0.2, batch_shape=(latent_dim,))
    decoder = decoder or nn.Linear(latent_dim + options.get("independent_dim", 0), D)
    Z = torch.linspace(0.0, 1.0, points)[:, None]
    return SparseGPVAE(kernel, decoder, Z, likelihood or Gaussian(0.05, data_dim=D), **options)


def make_guide(model, encoder=None, num_eval_site_updates=20, **options):
    latent_dim = model.kernel.batch_shape[0]
    encoders = {"u": encoder or Constant(latent_dim)}
    if model.independent_dim:
        encoders["w"] = Constant(model.independent_dim, 5.0, 0.01)
    return SparseStructuredGPGuide(model, encoders=encoders, num_eval_site_updates=num_eval_site_updates, **options).eval()


def titsias(model, x, y, weight=1.0):
    """Mean and covariance of the whitened inducing values of one process, and the collapsed bound, for a linear decoder.

    Titsias (2009), with the outputs of a point that has a weight as independent observations of w_d f_n + b_d.
    """
    process = model.process(x)
    A, kff = process.A.reshape(-1, len(x)), process.Kff.reshape(-1)
    W, noise = model.decoder.weight[:, 0], model.likelihood.params().expand(len(x), D)
    seen = ~torch.isnan(y)
    precision = weight * torch.where(seen, W.square() / noise, 0.0).sum(-1)
    information = weight * torch.where(seen, W * (y.nan_to_num() - model.decoder.bias) / noise, 0.0).sum(-1)
    covariance = torch.linalg.inv(torch.eye(len(A)) + A @ precision.diag() @ A.T)
    mean = covariance @ A @ information
    loadings = torch.einsum("dq,mn->ndm", model.decoder.weight, A).reshape(len(x) * D, -1)[seen.flatten()]
    S = loadings @ loadings.T + noise[seen].diag()
    residual = (y - model.decoder.bias)[seen]
    fit = torch.distributions.MultivariateNormal(torch.zeros(len(S)), S).log_prob(residual)
    return mean, covariance, fit - 0.5 * (precision * (kff - A.square().sum(0))).sum()


@encoded
@pytest.mark.parametrize("constants", [(100.0, 1e-3), (0.0, 1.0), (-2.0, 30.0)], ids=str)
def test_one_update_is_the_optimum_of_titsias_for_a_linear_decoder_and_gaussian_noise(form, constants, bounds):
    model = make_model()
    x, y = make_data(model)
    mean, covariance, bound = titsias(model, x, y)
    net = Constant(1, *constants) if form == "projected" else told_to_points(form, IndexNet(D, 1), 1, num_nearest=2)
    u = posterior(make_guide(model, net, num_eval_site_updates=1), x, y).nodes["u"]["fn"]
    assert_close([u.mean.squeeze(0), u.covariance_matrix.squeeze(0)], [mean, covariance], atol=1e-7)
    torch.testing.assert_close(bounds[-1][-1], bound)


def test_series_are_updated_by_themselves(bounds):
    """Whatever the other series are; and the bounds of each never fall."""
    model = make_model(2, Poisson(), MLP(2, D, (5,)))
    x, y = make_data(model, B)
    guide = make_guide(model, IndexNet(D, 2))
    together = function(guide, x, y)
    steps = bounds[-1]
    assert steps.shape == (21, B)
    assert (steps.diff(dim=0) >= 0.0).all()
    assert (steps[-1] > steps[0] + 1.0).all()
    for b in range(B):
        assert_close(function(guide, x, y[b]), [part[b] for part in together])


@pytest.mark.parametrize("likelihood", [Poisson(), Gaussian(0.05, data_dim=D)], ids=["Poisson", "Gaussian"])
def test_with_inducing_points_at_the_data_functions_are_those_of_the_dense_guide(likelihood):
    sparse = make_model(1, likelihood, points=N, jitter=1e-10)
    x, y = make_data(sparse)
    dense = GPVAE(sparse.kernel, sparse.decoder, likelihood)
    found = function(make_guide(sparse, num_eval_site_updates=60), x, y)
    guide = StructuredGPGuide(dense, encoders={"f": Constant(1)}, num_eval_site_updates=60).eval()
    guide(x, y)
    q = guide._posterior("f", dense.prior(x), (x, y), guide._update_sites(lambda _, prior: prior, (x, y), {})[0])
    assert_close(found, [q.mean.mT, q.variance.sqrt().mT], atol=1e-4)


def test_a_bad_encoder_does_not_ruin_predictions():
    model = make_model(2, decoder=MLP(2, D, (5,)))
    x, y = make_data(model)
    good, bad = (model.predict(make_guide(model, net), x, y, x) for net in (IndexNet(D, 2), Constant(2)))
    without = model.predict(make_guide(model, num_eval_site_updates=0), x, y, x)
    seen = ~torch.isnan(y)
    log_prob = [prediction.log_prob(y.nan_to_num())[seen].mean() for prediction in (good, bad, without)]
    assert abs(log_prob[1] - log_prob[0]) < 0.2
    assert log_prob[2] < log_prob[1] - 10.0


def test_evaluation_mode_updates_and_training_mode_does_not():
    model = make_model(decoder=MLP(1, D, (5,)))
    x, y = make_data(model)
    guide = make_guide(model)
    plain = make_guide(model, num_eval_site_updates=0)
    plain.encoders = guide.encoders
    updated = function(guide, x, y)
    assert_close(function(guide.train(), x, y), function(plain, x, y))
    assert (updated[0] - function(plain, x, y)[0]).abs().max() > 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_stream_is_conditioned_by_updated_sites(dtype):
    """In pieces as at once, in any order, for one process, a linear decoder and Gaussian noise."""
    model = make_model()
    x, y = make_data(model)
    mean, covariance, _ = titsias(model, x, y)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    guide = make_guide(model, Constant(1).to(dtype))
    guide(x, y)
    for rows in (slice(20, None), slice(0, 7), slice(7, 20)):
        guide.condition(x[rows], y[rows])
    u = posterior(guide, x, torch.full_like(y, torch.nan)).nodes["u"]["fn"]
    atol = 1e-7 if dtype == torch.float64 else 1e-3
    assert_close([u.mean.squeeze(0).double(), u.covariance_matrix.squeeze(0).double()], [mean, covariance], atol=atol)


def test_a_condition_that_fails_leaves_the_memory_and_the_inducing_points():
    model = make_model()
    x, y = make_data(model, 2)
    guide = make_guide(model)
    guide(x, y)
    memory, Z = guide.condition(x, y), model.inducing_points.clone()
    with pytest.raises(ValueError, match=r"expected the 2 series of the guide's memory, got \[3\]"):
        guide.condition(x, y[[0, 1, 1]], inducing_points=torch.rand(4, 1))
    assert guide.memory is memory
    assert torch.equal(model.inducing_points, Z)


def test_points_of_a_mini_batch_count_for_those_they_represent():
    model = make_model(num_data=2 * N)
    x, y = make_data(model)
    mean, covariance, _ = titsias(model, x, y, weight=2.0)
    guide = make_guide(model, num_site_updates=1).train()
    u = posterior(guide, x, y, torch.arange(N)).nodes["u"]["fn"]
    assert_close([u.mean.squeeze(0), u.covariance_matrix.squeeze(0)], [mean, covariance], atol=1e-7)


def test_gradients_flow_through_updates():
    """Of a bound that is not at its optimum: as by finite differences."""
    model = make_model(2, Poisson(), MLP(2, D, (5,)))
    x, y = make_data(model)
    guide = make_guide(model, Constant(2, 0.5, 0.5), num_site_updates=2, site_step_size=0.5).train()
    guide(x, y)
    loc, elbo = guide.encoders.u.loc, StructuredELBO(max_plate_nesting=1)

    def loss(value):
        with torch.no_grad():
            loc.fill_(value)
        pyro.set_rng_seed(0)
        return elbo.differentiable_loss(model, guide, x, y)

    (gradient,) = torch.autograd.grad(loss(0.5), loc)
    numerical = (loss(0.5 + 1e-5) - loss(0.5 - 1e-5)) / 2e-5
    torch.testing.assert_close(gradient, numerical.detach(), rtol=1e-4, atol=1e-6)
    assert gradient.abs() > 1e-4


def test_other_latents_of_points_are_updated_too():
    model = make_model(1, independent_dim=1)
    x, y = make_data(model)
    w = posterior(make_guide(model), x, y).nodes["w"]["fn"]
    assert w.mean.abs().max() < 4.0
    assert (w.mean[20:22] == 0.0).all()
    batches = make_model(1, independent_dim=1, num_data=2 * N)
    with pytest.raises(ValueError, match=r"expected all points of a series for num_site_updates=1, got a mini-batch"):
        make_guide(batches, num_site_updates=1).train()(x, y, torch.arange(N))
    pyro.clear_param_store()
    guide = make_guide(batches)
    plain = make_guide(batches, num_eval_site_updates=0)
    plain.encoders = guide.encoders
    assert_close(function(guide, x, y, torch.arange(N)), function(plain, x, y, torch.arange(N)))


def test_refuses_updates_of_what_has_no_encoder():
    model = make_model()
    x, y = make_data(model)
    with pytest.raises(TypeError, match="an encoder for num_site_updates=1"):
        SparseStructuredGPGuide(model, num_site_updates=1)
    both = make_model(independent_dim=1)
    guide = SparseStructuredGPGuide(both, encoders={"u": Constant(1)}, given=("f", "w"), num_site_updates=1)
    with pytest.raises(ValueError, match=r"expected an encoder of the inducing values and given=\(conditional_site,\)"):
        guide(x, y)
    free = SparseStructuredGPGuide(model).eval()
    assert MeanFieldELBO("points", 1, max_plate_nesting=1).loss(model, free, x, y) > 0.0
