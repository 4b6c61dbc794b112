import torch

from pyro_lvgp.ops.site_updates import NaturalSites, natural_gradient_step


def sites(*shape):
    return NaturalSites(torch.randn(*shape), torch.rand(*shape) + 0.1)


def test_means_of_sites_without_information_are_finite():
    x = NaturalSites(torch.tensor([6.0, 0.0]), torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(x.mean, torch.tensor([3.0, 0.0]))


def test_a_whole_step_gives_the_sites_of_the_likelihood_and_no_step_the_old_ones():
    old, mean, gradient, curvature = sites(3, 2, 5), torch.randn(3, 2, 5), torch.randn(3, 2, 5), torch.rand(3, 2, 5)
    step = torch.tensor([0.0, 0.25, 1.0])[:, None, None]
    new = natural_gradient_step(old, mean, gradient, curvature, step)
    whole = NaturalSites(gradient + curvature * mean, curvature)
    for got, before, after in zip(new, old, whole, strict=True):
        torch.testing.assert_close(got[0], before[0])
        torch.testing.assert_close(got[1], 0.75 * before[1] + 0.25 * after[1])
        torch.testing.assert_close(got[2], after[2])


def test_a_step_is_along_the_natural_gradient_of_the_bound():
    """The inverse Fisher matrix of q in natural parameters times the gradient in them, for one Gaussian and log p(y | f)."""

    def bound(natural):
        h, precision = natural
        mean, variance = h / (precision + 1.0), 1.0 / (precision + 1.0)  # the prior is N(0, 1)
        kl = 0.5 * (variance + mean**2 - 1.0 - variance.log())
        return 2.0 * mean - 0.3 * (mean**2 + variance) - (0.5 * mean + 0.125 * variance).exp() - kl

    def log_normaliser(natural):  # of q in the coordinates (h, −Λ / 2)
        h, half = natural
        total = 1.0 - 2.0 * half
        return 0.5 * h**2 / total - 0.5 * total.log()

    h, precision = torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    coordinates = torch.stack([h, -0.5 * precision])
    fisher = torch.autograd.functional.hessian(log_normaliser, coordinates)
    gradient = torch.autograd.functional.jacobian(lambda x: bound((x[0], -2.0 * x[1])), coordinates)
    natural_gradient = torch.linalg.solve(fisher, gradient)

    mean, variance = h / (precision + 1.0), 1.0 / (precision + 1.0)
    expected_rate = (0.5 * mean + 0.125 * variance).exp()
    of_mean, curvature = 2.0 - 0.6 * mean - 0.5 * expected_rate, 0.6 + 0.25 * expected_rate
    old = NaturalSites(h, precision)
    new = natural_gradient_step(old, mean, of_mean, curvature, torch.tensor(1e-3, dtype=torch.float64))
    torch.testing.assert_close((new.information - h) / 1e-3, natural_gradient[0])
    torch.testing.assert_close((new.precision - precision) / 1e-3, -2.0 * natural_gradient[1])
