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
    """Mixture posteriors Σ_c φ_lc N(μ_c, σ_c²) with the components of the prior; ``logits`` [F, C] are those of φ.

    :param model: the model.
    :param noise: standard normal numbers [F, C or more], for the initial logits.
    """

    def __init__(self, model: RandomFeatureModel, noise: Tensor):
        super().__init__()
        self.logits: Any = PyroParam(0.1 * noise[:, : model.num_components], constraints.real)

    def posterior(self, model: RandomFeatureModel) -> Distribution:
        """Return the posterior of the frequencies."""
        return model.spectral_points(self.logits)

    def assignments(self, model: RandomFeatureModel, log_weights: Float[Tensor, " C"]) -> Float[Tensor, "F C"]:
        """Return the assignment probabilities φ."""
        return self.logits.softmax(-1)


class GaussianFrequencies(PyroModule):
    """Gaussian posteriors of the frequencies, with ``loc`` and ``scale`` [F, Q].

    :param model: the model, whose components the initial frequencies cycle through.
    :param noise: standard normal numbers [F, Q or more], for the initial ``loc``.
    """

    def __init__(self, model: RandomFeatureModel, noise: Tensor):
        super().__init__()
        component = torch.arange(model.num_frequencies, device=noise.device) % model.num_components
        with torch.no_grad():
            scale = model.component_scales[component]
            loc = model.component_locs[component] + scale * noise[:, : model.latent_dim]
        self.loc: Any = PyroParam(loc, constraints.real)
        self.scale: Any = PyroParam(0.5 * scale, constraints.positive)

    def posterior(self, model: RandomFeatureModel) -> Distribution:
        """Return the posterior of the frequencies."""
        return dist.Normal(self.loc, self.scale).to_event(1)

    def assignments(self, model: RandomFeatureModel, log_weights: Float[Tensor, " C"]) -> Float[Tensor, "F C"]:
        """Compute the optimal φ, given expected logarithms of the components' weights."""
        return assignment_logits(self.loc, self.scale, model.spectral_points(log_weights)).softmax(-1)
