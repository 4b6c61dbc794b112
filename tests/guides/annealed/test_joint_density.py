"""Density of all coordinates at several points at once."""

import math

import pytest
import torch

from pyro_lvgp.guides.annealed._joint_density import JointDensity, antithetic_noise
from tests.guides.annealed._densities import Target, joint_density

pytestmark = pytest.mark.usefixtures("float64")
POINTS = torch.linspace(-1.0, 2.0, 15, dtype=torch.float64).reshape(5, 3)


def two_sites(a, b):
    return a.sin().sum(-1) + (a[..., 0] * b[..., 0, 0]).square()


@pytest.mark.parametrize("max_points", [1, 2, 64])
def test_values_and_scores_do_not_depend_on_the_points_at_once(max_points):
    density = joint_density(two_sites, (2,), (1, 1), max_points=max_points)
    value, scores = density.log_joint_and_score(POINTS)
    a, b = POINTS[:, :2], POINTS[:, 2]
    expected = torch.stack([a[:, 0].cos() + 2.0 * a[:, 0] * b.square(), a[:, 1].cos(), 2.0 * b * a[:, 0].square()], -1)
    assert value == pytest.approx((a.sin().sum() + (a[:, 0] * b).square().sum()).item())
    assert density.log_joint(POINTS) == pytest.approx(value)
    torch.testing.assert_close(scores, expected)


def test_draws_are_left_of_plates():
    """Of a site in an inner plate, a site in an outer plate, and a site outside."""
    shapes = []

    def log_density(*z):
        shapes.append([tuple(x.shape) for x in z])
        return sum(x.sum() for x in z)

    sizes, event_dims = tuple(map(torch.Size, [(4,), (3, 1), (2,)])), (0, 0, 1)
    density = JointDensity(Target(log_density), sizes, event_dims, max_plate_nesting=2, max_points=64)
    density.log_joint(torch.zeros(5, 9))
    assert shapes == [[(5, 1, 4), (5, 3, 1), (5, 1, 1, 2)]]
    h = torch.arange(9.0)
    assert [x.shape for x in density.split(h)] == list(sizes)
    assert torch.equal(density.join(density.split(h)), h)


def broken(h):
    raise RuntimeError("no more dimensions")


@pytest.mark.parametrize(
    ("log_density", "expected"),
    [
        (lambda h: -h.square().sum(-1), True),
        (lambda h: -h.square().sum(-1) - 1e6, True),
        (lambda h: -h.square().sum(-1).mean() - 1e6, False),  # one draw's density for two
        (lambda h: broken(h) if h.dim() > 1 else -h.square().sum(), False),
    ],
)
def test_targets_that_broadcast_are_told_from_others(log_density, expected):
    assert joint_density(log_density, (3,)).broadcasts(POINTS[:2]) == expected


def test_the_bound_of_a_gaussian_is_its_log_normaliser():
    """For draws whose mean and variances are exact; correlations of draws are not."""
    stddev, loc = torch.tensor([0.1, 3.0]), torch.tensor([5.0, -2.0])
    density = joint_density(lambda h: -0.5 * ((h - loc) / stddev).square().sum(-1), (2,))
    assert density.bound(loc, stddev) == pytest.approx(stddev.log().sum().item() - 1.0)
    assert density.bound(loc, stddev.diag()) == pytest.approx(density.bound(loc, stddev))
    assert density.bound(loc + stddev, stddev) == pytest.approx(density.bound(loc, stddev) - 1.0)


@pytest.mark.parametrize("error", [ValueError, torch.linalg.LinAlgError, None])
def test_where_the_model_is_not_defined_the_log_density_is_minus_infinity(error):
    def log_density(h):
        if error is None:
            return h.sum(-1) * math.nan
        raise error("not defined")

    density = joint_density(log_density, (3,))
    assert density.log_joint(POINTS) == -math.inf
    value, scores = density.log_joint_and_score(POINTS)
    assert value == -math.inf
    assert scores.isnan().all()


def test_antithetic_draws_have_exact_moments():
    noise = antithetic_noise(torch.zeros(4), 8, seed=0)
    torch.testing.assert_close(noise.mean(0), torch.zeros(4))
    torch.testing.assert_close(noise.square().mean(0), torch.ones(4))
    assert torch.equal(noise, antithetic_noise(torch.zeros(4), 8, seed=0))
    assert not torch.equal(noise, antithetic_noise(torch.zeros(4), 8, seed=1))
