"""Posteriors of the frequencies of random features, the site ``omega``."""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import Distribution

from pyro_lvgp.distributions.diagonal_mixture import assignment_logits
from pyro_lvgp.infer.protocols import RandomFeatureModel


class MixtureFrequencies(PyroModule):
    """Q(ω_l) = Σ_c φ_lc N(μ_c, σ_c²) with the components of the prior, and the ``logits`` of φ [F, C].

    :param model: the model.
    :param noise: standard normal numbers [F, C or more], to start from.
    """

    def __init__(self, model: RandomFeatureModel, noise: Tensor):
        super().__init__()
        self.logits: Any = PyroParam(0.1 * noise[:, : model.num_components], constraints.real)

    def posterior(self, model: RandomFeatureModel) -> Distribution:
        """Q of each frequency."""
        return model.spectral_points(self.logits)

    def assignments(self, model: RandomFeatureModel, log_weights: Float[Tensor, " C"]) -> Float[Tensor, "F C"]:
        """The φ."""
        return self.logits.softmax(-1)


class GaussianFrequencies(PyroModule):
    """A Gaussian for each frequency, ``loc`` and ``scale`` [F, Q].

    :param model: the model, around whose components they start, one after the other.
    :param noise: standard normal numbers [F, Q or more], to start from.
    """

    def __init__(self, model: RandomFeatureModel, noise: Tensor):
        super().__init__()
        which = torch.arange(model.num_frequencies, device=noise.device) % model.num_components
        with torch.no_grad():
            loc = model.component_locs[which] + model.component_scales[which] * noise[:, : model.latent_dim]
            scale = 0.5 * model.component_scales[which]
        self.loc: Any = PyroParam(loc, constraints.real)
        self.scale: Any = PyroParam(scale, constraints.positive)

    def posterior(self, model: RandomFeatureModel) -> Distribution:
        """Q of each frequency."""
        return dist.Normal(self.loc, self.scale).to_event(1)

    def assignments(self, model: RandomFeatureModel, log_weights: Float[Tensor, " C"]) -> Float[Tensor, "F C"]:
        """The best φ, given expected logarithms of the components' weights."""
        return assignment_logits(self.loc, self.scale, model.spectral_points(log_weights)).softmax(-1)
