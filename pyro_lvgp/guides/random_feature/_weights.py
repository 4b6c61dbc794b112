"""Posteriors of the weights of random features, the site ``a``: with parameters of their own, or given all latents."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_lvgp.conjugate.feature_regression import (
    WeightPosterior,
    divergence_from_prior,
    from_natural,
    function_moments,
    gaussian_weight_posterior,
    precision_sum,
    weight_posterior,
)
from pyro_lvgp.infer.protocols import RandomFeatureModel
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.likelihoods.polya_gamma import variational_parameter

Natural = tuple[Tensor, Tensor]
_NUM_HALVINGS = 10


class CollapsedWeights(PyroModule):
    """Q(a | X, ω, y) of all data.

    Of a Gaussian likelihood it is exact and has no parameters, or, where gaps are filled, the functions ``gaps`` [N, D] there;
    of logistic ones it is that of the bound that touches them at ± ``c`` [N, D].

    :param model: the model.
    :param y: all data, to start from; None if they are not known.
    :param filled: whether the gaps of Gaussian data are filled.
    """

    def __init__(self, model: RandomFeatureModel, y: Float[Tensor, "N D"] | None, *, filled: bool):
        super().__init__()
        self.filled = self.has_gaps = filled
        if filled:
            self.gaps: Any = PyroParam(model.mean.repeat(model.num_data, 1), constraints.real)
        elif not isinstance(model.likelihood, Gaussian):
            f = suggested_function(model, y)
            c = variational_parameter(f, torch.ones_like(f)).expand(model.num_data, -1).contiguous()
            self.c: Any = PyroParam(c, constraints.positive)

    def fill(self, filled: bool) -> None:
        """Fill gaps from now on, or no more."""
        self.filled = filled
        # Nothing depends on the gaps of collapsed weights, so that no block holds them.
        self.gaps_unconstrained.requires_grad_(filled)

    def posterior(
        self, model: RandomFeatureModel, data: Float[Tensor, "N D"], features: Float[Tensor, "*batch N L"]
    ) -> WeightPosterior:
        """Given data and features of all rows."""
        if not isinstance(model.likelihood, Gaussian):
            # Sites that do not fit the likelihood exactly touch it at f = ± c.
            return weight_posterior(features, *model.weight_sites(data, self.c, torch.zeros_like(self.c)))
        observed = ~torch.isnan(data)
        if self.filled:
            data, observed = torch.where(observed, data, self.gaps), torch.ones_like(observed)
        params = model.likelihood.params()
        assert params is not None
        return gaussian_weight_posterior(features, data - model.mean, observed, params)

    def updated(
        self, model: RandomFeatureModel, data: Float[Tensor, "N D"], features: Float[Tensor, "N L"]
    ) -> dict[str, Tensor]:
        """Gaps at their means, or the best places to touch, at these features."""
        posterior = self.posterior(model, data, features)
        if self.filled:
            return {"gaps": model.mean + features @ posterior.mean.mT}
        mean, variance = function_moments(posterior, features)
        return {"c": variational_parameter(model.mean + mean, variance)}


class ExplicitWeights(PyroModule):
    """A Gaussian of each output, in natural parameters: ``linear``, P m [D, L], and ``precision``, P [D or 1, L, L].

    :param model: the model.
    :param y: some rows, where each f starts as its y suggests: natural gradients do not overshoot from there.
    :param features: theirs.
    :param shared: whether all outputs have one covariance.
    """

    def __init__(self, model: RandomFeatureModel, y: Float[Tensor, "B D"], features: Float[Tensor, "B L"], *, shared: bool):
        super().__init__()
        self.shared = shared
        f = suggested_function(model, y)
        linear, precision = self._natural(model, y, features, f, torch.zeros_like(f))
        self.linear: Any = PyroParam(linear, constraints.real)
        self.precision: Any = PyroParam(precision, constraints.positive_definite)

    def posterior(self) -> WeightPosterior:
        """As they are."""
        return from_natural(self.linear, self.precision)

    def updated(
        self, model: RandomFeatureModel, y: Float[Tensor, "B D"], features: Float[Tensor, "B L"], *, is_whole: bool
    ) -> dict[str, Tensor]:
        """A natural gradient of length one, at these features.

        :param is_whole: whether these are all rows: then steps that would lower the bound are halved.
        """
        mean, variance = function_moments(self.posterior(), features)
        natural = self._natural(model, y, features, model.mean + mean, variance)
        if is_whole and not isinstance(model.likelihood, Gaussian):
            natural = self._uphill(lambda *to: self._bound(model, y, features, *to), natural)
        return dict(zip(("linear", "precision"), natural, strict=True))

    def _natural(self, model: RandomFeatureModel, y: Tensor, features: Tensor, mean: Tensor, variance: Tensor) -> Natural:
        """Prior and sites of the rows at moments of f, as if of all rows: P m and P.

        A covariance that outputs share has the mean of their precisions, and their P m are corrected for the difference.
        """
        linear, precision = model.weight_sites(y, mean, variance)
        if self.shared:
            average = precision.mean(-1, keepdim=True)
            linear, precision = linear + (average - precision) * (mean - model.mean), average
        ratio, L = model.num_data / len(y), features.shape[-1]
        total = precision_sum(features, precision)
        if not self.shared:
            total = total.expand(model.data_dim, L, L)
        # The constraint wants symmetry to more digits than products in float32 have.
        return ratio * linear.mT @ features, features.new_ones(L).diag() + 0.5 * ratio * (total + total.mT)

    def _uphill(self, bound: Callable[[Tensor, Tensor], Tensor], natural: Natural) -> Natural:
        """As far towards new parameters as the bound of each output does not fall, by ten halvings at most.

        Far from the maximum sites are poor likenesses of the likelihood, and whole steps may lead anywhere.
        """
        linear, precision = natural

        def moved(share: Tensor) -> Natural:
            by_matrix = share[:, None, None]
            return self.linear.lerp(linear, by_matrix[..., 0]), self.precision.lerp(precision, by_matrix)

        share = torch.ones_like(precision[:, 0, 0])
        present = bound(*moved(torch.zeros_like(share)))
        for _ in range(_NUM_HALVINGS):
            falls = ~(bound(*moved(share)) >= present)
            if not falls.any():
                break
            share = torch.where(falls, 0.5 * share, share)
        return moved(share)

    def _bound(
        self, model: RandomFeatureModel, y: Tensor, features: Tensor, linear: Tensor, precision: Tensor
    ) -> Float[Tensor, " D"] | Float[Tensor, " 1"]:
        """Terms of the bound that depend on the weights: of each output, or of all outputs that share a covariance."""
        posterior = from_natural(linear, precision)
        mean, variance = function_moments(posterior, features)
        f_mean, params = model.mean + mean, model.likelihood.params()
        value = torch.nan_to_num(y, model.likelihood.fill_value)
        expected = model.likelihood.expected_log_prob(value, f_mean, variance.expand_as(f_mean), params)
        bound = torch.where(torch.isnan(y), 0.0, expected).sum(0) - divergence_from_prior(posterior)
        return bound.sum(0, keepdim=True) if self.shared else bound


def suggested_function(model: RandomFeatureModel, y: Float[Tensor, "B D"] | None) -> Float[Tensor, "#B D"]:
    """Each f as its y suggests; where there is none, the mean."""
    if y is None:
        return model.mean[None]
    return torch.where(torch.isnan(y), model.mean, model.likelihood.inverse_link(y))
