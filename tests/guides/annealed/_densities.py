"""Joint densities by functions of the coordinates, without a Pyro model."""

import torch

from pyro_lvgp.guides.annealed._joint_density import JointDensity


class Target:
    """Target by its log density, one number for each point."""

    def __init__(self, log_density):
        self.log_density = log_density

    def log_joint(self, z):
        with torch.no_grad():
            return torch.as_tensor(self.log_density(*z)).sum()

    def log_joint_and_score(self, z):
        with torch.enable_grad():
            z = tuple(x.detach().requires_grad_() for x in z)
            value = torch.as_tensor(self.log_density(*z)).sum()
            return value.detach(), torch.autograd.grad(value, z)


def joint_density(log_density, *shapes, max_points=64):
    """Return the density of sites of these shapes, whose dimensions are those of events.

    :param log_density: function of the coordinates of each site, [..., *shape], with results [...].
    :param shapes: shape of each site.
    :param max_points: points that the function computes at once.
    """
    shapes = tuple(map(torch.Size, shapes))
    return JointDensity(Target(log_density), shapes, tuple(map(len, shapes)), max_plate_nesting=0, max_points=max_points)
