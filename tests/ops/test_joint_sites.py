import pytest
import torch

from pyro_lvgp.kernels import Matern, Stack
from pyro_lvgp.ops import joint_sites, state_space

N, Q = 7, 3


@pytest.fixture
def sites(float64):
    """Sites of a linear decoder, one without information and one that is singular."""
    W = torch.randn(N, 2, Q)
    W[3] = 0.0
    linear = (W.mT @ torch.randn(N, 2, 1)).squeeze(-1)
    return linear.requires_grad_(), (W.mT @ W).requires_grad_()


def moments(log_normaliser, linear, precision):
    mean, square = torch.autograd.grad(log_normaliser, (linear, precision))
    return log_normaliser.detach(), mean, -square - square.mT


def oracle(K, linear, precision):
    """Log normaliser and moments from the inverse of the full prior covariance."""
    prior = torch.linalg.inv(torch.block_diag(*K))
    Lambda = torch.zeros(Q, N, Q, N)
    for n in range(N):
        Lambda[:, n, :, n] = precision[n].detach()
    covariance = torch.linalg.inv(prior + Lambda.reshape(Q * N, Q * N))
    h = linear.detach().mT.reshape(-1)
    mean = covariance @ h
    log_normaliser = 0.5 * (prior.logdet() + covariance.logdet() + h @ mean)
    second = (covariance + torch.outer(mean, mean)).reshape(Q, N, Q, N)
    return log_normaliser, mean.reshape(Q, N).mT, torch.stack([second[:, n, :, n] for n in range(N)])


def test_dense_and_linear_time_forms_equal_the_joint_gaussian(sites):
    kernel = Stack(Matern(1, 0.5, lengthscale=0.3), Matern(1, 1.5, lengthscale=0.5), Matern(1, 2.5, variance=2.0))
    t = torch.tensor([0.0, 0.2, 0.25, 0.7, 1.0, 1.1, 1.9])
    with torch.no_grad():
        K, model = kernel(t[:, None]), kernel.state_space_model(t.diff(), kernel.params())
        parts = kernel.state_space_models(t.diff(), kernel.params())
    groups = [state_space.StateSpaceModel(*(part[None] for part in model)) for model in parts]
    expected = oracle(K, *sites)
    for value in (
        joint_sites.joint_log_normaliser(K, *sites),
        state_space.joint_log_normaliser([model], *sites),
        state_space.joint_log_normaliser(groups, *sites),
    ):
        for found, exact in zip(moments(value, *sites), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


def test_inputs_may_coincide(sites):
    kernel = Matern(1, 1.5, lengthscale=0.5, batch_shape=(Q,))
    t = torch.tensor([0.0, 0.2, 0.2, 0.2, 1.0, 1.1, 1.9])
    with torch.no_grad():
        K, model = kernel(t[:, None]), kernel.state_space_model(t.diff(), kernel.params())
    dense = moments(joint_sites.joint_log_normaliser(K, *sites), *sites)
    linear_time = moments(state_space.joint_log_normaliser([model], *sites), *sites)
    for found, exact in zip(linear_time, dense, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


def test_gradients_of_kernel_parameters_agree(sites):
    linear, precision = (site.detach() for site in sites)
    kernel = Matern(1, 0.5, lengthscale=0.3, batch_shape=(Q,))
    t = torch.linspace(0.0, 1.0, N)
    model = kernel.state_space_model(t.diff(), kernel.params())
    gradients = []
    for value in (
        joint_sites.joint_log_normaliser(kernel(t[:, None]), linear, precision),
        state_space.joint_log_normaliser([model], linear, precision),
    ):
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(kernel.parameters()))]))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)
