import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_lvgp.kernels import RBF, Cosine, Matern
from pyro_lvgp.models._separate_processes import SeparateProcesses

D = 3


def data(num):
    torch.manual_seed(0)
    t = torch.rand(num, 1).sort(0).values
    y = 5.0 + 3.0 * torch.sin(9.0 * t + torch.arange(D)) + 0.3 * torch.randn(num, D)
    y[num // 3 : num // 2, 0] = torch.nan
    return t, y


def dense_posterior(model, d, x_new):
    """Evidence, and mean and variance of an output at new inputs, from the dense covariance of its observed entries."""
    own, d_in_group = (model.groups[0], d) if d < 2 else (model.groups[1], 0)
    group = own.alternatives[own.choice[d_in_group]]
    seen = ~group.y[d_in_group].isnan()
    x, y = model.x[seen], group.y[d_in_group, seen]
    noisy = group.kernel(x)[d_in_group] + group.noise[d_in_group] * torch.eye(len(x))
    across = group.kernel(x_new, x)[d_in_group]
    mean = across @ torch.linalg.solve(noisy, y)
    variance = group.kernel.diagonal(x_new)[d_in_group] - (across * torch.linalg.solve(noisy, across.mT).mT).sum(-1)
    evidence = MultivariateNormal(torch.zeros(len(x)), noisy).log_prob(y)
    centre, scale = model.centre[d], model.scale[d]
    own_evidence = group.log_evidence()[d_in_group]
    noise = group.noise[d_in_group]
    return own_evidence, evidence, centre + scale * mean, scale.square() * (variance + noise)


@pytest.mark.parametrize("num", [40, 250])  # dense, and by a Kalman filter
@pytest.mark.parametrize(
    "kernel", [lambda batch: Matern(1, 1.5, lengthscale=0.2, batch_shape=batch), lambda batch: cycles(batch)]
)
def test_evidence_and_predictions_are_those_of_dense_matrices(float64, num, kernel):
    t, y = data(num)
    model = SeparateProcesses([[kernel((2,)), Matern(1, 0.5, lengthscale=0.2, batch_shape=(2,))], [kernel((1,))]])
    model.fit(t, y, num_steps=5)
    x_new = torch.tensor([[0.05], [0.41], [1.3]])
    predicted, filled = model.predict(x_new), model.predict()
    for d in range(D):
        found, evidence, mean, variance = dense_posterior(model, d, x_new)
        assert torch.allclose(found, evidence, rtol=1e-8)
        assert torch.allclose(predicted.mean[:, d], mean, rtol=1e-7)
        assert torch.allclose(predicted.variance[:, d], variance, rtol=1e-6)
        *_, mean, variance = dense_posterior(model, d, t)
        assert torch.allclose(filled.mean[:, d], mean, rtol=1e-7)
        assert torch.allclose(filled.variance[:, d], variance, rtol=1e-6)


def cycles(batch):
    cycle = Cosine(1, period=0.5, batch_shape=batch).requires_grad_(False)
    return Matern(1, 0.5, lengthscale=0.3, batch_shape=batch) + Matern(1, 0.5, lengthscale=2.0, batch_shape=batch) * cycle


def test_a_fit_maximises_the_posterior_of_the_parameters(float64):
    t, y = data(60)
    model = SeparateProcesses([[Matern(1, 1.5, lengthscale=0.2, batch_shape=(D,))]])
    model.fit(t, y, num_steps=200, tolerance=1e-9)
    (group,) = model.groups[0].alternatives

    def log_posterior(lengthscale, variance, noise):
        group.kernel.lengthscale, group.kernel.variance, group.noise = lengthscale, variance, noise
        prior = sum(
            Normal(math.log(start), 2.0).log_prob(x.log()).sum()
            for x, start in ((lengthscale, 0.2), (variance, 1.0), (noise - 1e-6, 0.1))
        )
        return (group.log_evidence().sum() + prior).item()

    best = [x.detach().clone() for x in (group.kernel.lengthscale, group.kernel.variance, group.noise)]
    highest = log_posterior(*best)
    for i in range(3):
        for factor in (0.9, 1.1):
            assert log_posterior(*(x * factor if i == j else x for j, x in enumerate(best))) < highest


def test_each_output_has_the_kernel_with_the_largest_evidence(float64):
    """A random walk and a smooth curve have the predictions of fits of one kernel alone."""
    t = torch.arange(120.0)[:, None] / 120.0
    y = torch.cat([0.2 * torch.randn(120, 1).cumsum(0), torch.sin(9.0 * t) + 0.02 * torch.randn(120, 1)], 1)
    kernels = [Matern(1, nu, lengthscale=0.2, batch_shape=(2,)) for nu in (0.5, 1.5)]
    model = SeparateProcesses([kernels])
    model.fit(t, y)
    assert model.groups[0].choice.tolist() == [0, 1]
    for d, nu in enumerate((0.5, 1.5)):
        alone = SeparateProcesses([[Matern(1, nu, lengthscale=0.2, batch_shape=(2,))]])
        alone.fit(t, y)
        for x_new in (None, torch.tensor([[0.33], [1.1]])):
            found, expected = model.predict(x_new), alone.predict(x_new)
            torch.testing.assert_close(found.mean[:, d], expected.mean[:, d])
            torch.testing.assert_close(found.variance[:, d], expected.variance[:, d])


def test_outputs_share_nothing(float64):
    t, y = data(40)
    for num in (1, D):
        model = SeparateProcesses([[RBF(1, lengthscale=0.2, batch_shape=(size,))] for size in [num] * (D // num)])
        model.fit(t, y, num_steps=300, tolerance=1e-9)
        if num == 1:
            alone = model.predict()
    assert torch.allclose(alone.mean, model.predict().mean, atol=1e-2)
    assert torch.allclose(alone.stddev, model.predict().stddev, atol=1e-2)


def test_constant_outputs_and_precision(float64):
    t, y = data(30)
    y[:, 1] = 4.0
    model = SeparateProcesses([[Matern(1, 0.5, lengthscale=0.2, batch_shape=(D,))]])
    model.fit(t.float(), y.float())
    predicted = model.predict()
    assert predicted.mean.dtype == torch.float32
    assert torch.allclose(predicted.mean[:, 1], torch.full((30,), 4.0, dtype=torch.float32), atol=1e-3)
    assert predicted.stddev.isfinite().all()
