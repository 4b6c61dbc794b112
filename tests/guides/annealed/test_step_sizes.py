"""First step sizes: chains that run at once choose those of chains one by one, where the target broadcasts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pyro_lvgp.guides.annealed._chain import AnnealedChain
from pyro_lvgp.guides.annealed._joint_density import JointDensity
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin

pytestmark = pytest.mark.usefixtures("float64")
Z = (torch.zeros(300, 2),)


class Target:
    """Independent Gaussian rows, far narrower than the base; the log joint of some draws is that of all, or of their mean."""

    differentiable = False

    def __init__(self, broadcasts):
        self.broadcasts, self.shapes = broadcasts, set()

    def score(self, z):
        self.shapes.add(z[0].shape)
        return (-100.0 * z[0],)

    def log_joint_and_score(self, z):
        return self.log_joint(z), (-100.0 * z[0],)

    def log_joint(self, z):
        value = -50.0 * z[0].square().sum()
        return value if self.broadcasts else value / len(z[0])


def chain(target, num_steps=5):
    beta = torch.linspace(0.2, 1.0, num_steps)
    return AnnealedChain(target, OverdampedLangevin(), beta, [torch.full((num_steps, 2), 0.2)], torch.zeros(()), None)


def best_scale(target, max_points):
    """Factor of the step sizes, by as many chains at once as the target allows; ``max_points=1`` for one."""
    white = [(Z[0], torch.ones_like(Z[0]))]
    site = {"type": "sample", "value": Z[0], "cond_indep_stack": (SimpleNamespace(dim=-1),)}
    density = JointDensity.of_target(target, white, [1], [site])
    return chain(target).best_scale(Z, density if max_points is None else replace(density, max_points=max_points))


def test_chains_at_once_choose_the_step_sizes_of_chains_one_by_one():
    at_once, one_by_one = Target(True), Target(True)
    scale = best_scale(at_once, None)
    assert scale == best_scale(one_by_one, 1)
    assert scale < 0.2
    assert at_once.shapes == {(4, 300, 2)}
    assert one_by_one.shapes == {(300, 2)}


def test_chains_run_one_by_one_where_draws_at_once_have_another_density():
    target = Target(False)
    best_scale(target, None)
    assert target.shapes == {(300, 2)}
