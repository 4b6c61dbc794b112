"""Inducing points at the data: posterior and bound of the dense GP-VAE."""

import pytest
import torch
from pyro import poutine
from torch.distributions import kl_divergence

from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from tests.helpers.sparse_processes import D, N, Q, assert_close, data, kernel, make, one_and_several, posterior

pytestmark = pytest.mark.usefixtures("float64")


def dense_and_sparse(*series):
    """The same parameters twice."""
    x, y = data(*series)
    Z = x if not series else x[:, None]
    sparse, sparse_guide = make(Z=Z, jitter=1e-10)
    dense = GPVAE(kernel(), MLP(Q, D, (5,)))
    dense_guide = StructuredGPGuide(dense, encoders={"f": IndexNet(D, Q)})
    for guide in (sparse_guide, dense_guide):
        guide(x, y)
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "inducing" not in k})
    dense_guide.encoders.f.load_state_dict(sparse_guide.encoders.u.state_dict())
    return (sparse, sparse_guide), (dense, dense_guide), (x, y)


@one_and_several
@pytest.mark.usefixtures("local_params")
def test_points_at_the_data_give_the_dense_posterior(series):
    """Marginals, KL, and the gradients of both in every parameter that both have."""
    (sparse, sparse_guide), (dense, dense_guide), args = dense_and_sparse(*series)
    trace, model_trace = posterior(sparse_guide, *args), poutine.trace(sparse).get_trace(*args)
    marginals = trace.nodes["f"]["fn"].base_dist
    kl = kl_divergence(trace.nodes["u"]["fn"], model_trace.nodes["u"]["fn"]).sum()
    q = poutine.trace(dense_guide).get_trace(*args).nodes["f"]["fn"].base_dist
    dense_kl = kl_divergence(q, q.prior).sum()
    dense_mean, dense_variance = q.mean.mT.squeeze(-3 if series else 0), q.variance.mT.squeeze(-3 if series else 0)
    assert_close((marginals.loc, marginals.variance, kl), (dense_mean, dense_variance, dense_kl), atol=1e-6)
    weights = torch.randn(2, *marginals.loc.shape)
    results = []
    for (model, guide), numbers in (
        ((sparse, sparse_guide), (marginals.loc, marginals.variance, kl)),
        ((dense, dense_guide), (dense_mean, dense_variance, dense_kl)),
    ):
        total = numbers[2] + (weights[0] * numbers[0]).sum() + (weights[1] * numbers[1]).sum()
        net = guide.encoders.u if model is sparse else guide.encoders.f
        results.append(torch.autograd.grad(total, [*model.kernel.parameters(), *net.parameters()]))
    assert_close(*results, atol=1e-6)


@pytest.mark.usefixtures("local_params")
def test_points_at_the_data_give_the_dense_bound():
    """With one process and the same noise."""
    x, y = data()
    sparse = SparseGPVAE(RBF(1, lengthscale=0.1, batch_shape=(1,)), MLP(1, D, (5,)), x, jitter=1e-10)
    dense = GPVAE(RBF(1, lengthscale=0.1, batch_shape=(1,)), MLP(1, D, (5,)))
    guide, dense_guide = (
        SparseStructuredGPGuide(sparse, encoders={"u": IndexNet(D, 1)}),
        StructuredGPGuide(dense, encoders={"f": IndexNet(D, 1)}),
    )
    guide(x, y), dense_guide(x, y)
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "inducing" not in k})
    dense_guide.encoders.f.load_state_dict(guide.encoders.u.state_dict())
    f_noise = torch.randn(N)
    bound, dense_bound = MeanFieldELBO("points", num_samples=1), StructuredELBO()
    bound.loss(sparse, guide, x, y), dense_bound.loss(dense, dense_guide, x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda t: f_noise.reshape(t.shape))
        patch.setattr("torch.distributions.normal._standard_normal", lambda shape, **_: f_noise.reshape(shape))
        patch.setattr("torch.distributions.multivariate_normal._standard_normal", lambda shape, **_: torch.zeros(shape))
        losses = [
            bound.differentiable_loss(sparse, guide, x, y),
            dense_bound.differentiable_loss(dense, dense_guide, x, y),
        ]
    assert_close(losses[:1], losses[1:], atol=1e-5)
    parameters = [
        [*model.kernel.parameters(), *model.decoder.parameters(), *net.parameters()]
        for model, net in ((sparse, guide.encoders.u), (dense, dense_guide.encoders.f))
    ]
    assert_close(*(torch.autograd.grad(loss, own) for loss, own in zip(losses, parameters, strict=True)), atol=1e-5)
