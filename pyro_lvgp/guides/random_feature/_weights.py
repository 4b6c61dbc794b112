"""Posteriors of the weights of random features, the site ``a``: explicit, or collapsed given the latents of all rows."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_lvgp._utils.cholesky import FIRST_JITTER, safe_cholesky
from pyro_lvgp.conjugate.feature_regression import (
    WeightPosterior,
    divergence_from_prior,
    from_natural,
    function_moments,
    gaussian_weight_posterior,
    precision_sum,
    weight_posterior,
)
from pyro_lvgp.distributions.normal import DrawnNormal
from pyro_lvgp.infer.protocols import RandomFeatureModel
from pyro_lvgp.likelihoods import Gaussian, RowLikelihood
from pyro_lvgp.likelihoods.polya_gamma import variational_parameter
from pyro_lvgp.ops.linalg import invert_lower

Natural = tuple[Tensor, Tensor]
_NUM_HALVINGS = 10


class CollapsedWeights(PyroModule):
    """Posterior q(a | X, ω, y) of the weights given the latents of all rows.

    For a Gaussian likelihood it is exact and has no parameters, or, if gaps are filled, the function values ``gaps`` [N, D]
    at missing entries.  For logistic likelihoods it is that of the Pólya-gamma bound, which is exact at f = ± ``c`` [N, D].

    :param model: the model.
    :param y: all data, for the initial ``c``; None starts from the mean.
    :param filled: whether the gaps of Gaussian data are filled.
    """

    def __init__(self, model: RandomFeatureModel, y: Float[Tensor, "N D"] | None, *, filled: bool):
        super().__init__()
        self.filled = self.has_gaps = filled
        if filled:
            self.gaps: Any = PyroParam(model.mean.repeat(model.num_data, 1), constraints.real)
        elif not isinstance(model.likelihood, Gaussian):
            f = initial_function(model, y, model.rows_at())
            c = variational_parameter(f, torch.ones_like(f)).expand(model.num_data, -1).contiguous()
            self.c: Any = PyroParam(c, constraints.positive)

    def fill(self, filled: bool) -> None:
        """Set whether gaps are filled.

        :param filled: fill them.
        """
        self.filled = filled
        # Without filling nothing depends on ``gaps``, and no block has them.
        self.gaps_unconstrained.requires_grad_(filled)

    def posterior(
        self, model: RandomFeatureModel, data: Float[Tensor, "N D"], features: Float[Tensor, "*batch N L"]
    ) -> WeightPosterior:
        """Compute the posterior given data and features of all rows."""
        rows = model.rows_at()
        if not isinstance(model.likelihood, Gaussian):
            # The quadratic bound on the log likelihood is exact at f = ± c.
            return weight_posterior(features, *model.weight_sites(data, self.c, torch.zeros_like(self.c), rows))
        observed = ~torch.isnan(data)
        if self.filled:
            data, observed = torch.where(observed, data, self.gaps), torch.ones_like(observed)
        if rows is not None and not (rows.standard_error is None and rows.weight is None):
            data = torch.where(observed, data, torch.nan)
            return weight_posterior(features, *model.weight_sites(data, data, torch.zeros_like(data), rows))
        params = model.likelihood.params()
        assert params is not None
        return gaussian_weight_posterior(features, data - model.mean, observed, params)

    def updated(
        self, model: RandomFeatureModel, data: Float[Tensor, "N D"], features: Float[Tensor, "N L"]
    ) -> dict[str, Tensor]:
        """Compute the means of the gaps, or the optimal variational parameters ``c``, at these features."""
        posterior = self.posterior(model, data, features)
        if self.filled:
            return {"gaps": model.mean + features @ posterior.mean.mT}
        mean, variance = function_moments(posterior, features)
        return {"c": variational_parameter(model.offsets(model.rows_at()) + mean, variance)}


class ExplicitWeights(PyroModule):
    """Gaussian posterior of the weights of each output, with natural parameters.

    ``linear`` [D, L] is P m, and ``precision`` [D or 1, L, L] is P.

    :param model: the model.
    :param y: rows of the data; initial function values are the inverse link of y, from where natural gradients do not
        overshoot.
    :param features: features of these rows.
    :param shared: whether all outputs have one covariance.
    :param rows: known quantities of these rows; None for nothing.
    """

    def __init__(
        self,
        model: RandomFeatureModel,
        y: Float[Tensor, "B D"],
        features: Float[Tensor, "B L"],
        *,
        shared: bool,
        rows: Any = None,
    ):
        super().__init__()
        self.shared = shared
        f = initial_function(model, y, rows)
        linear, precision = self._natural(model, y, features, f, torch.zeros_like(f), rows)
        self.linear: Any = PyroParam(linear, constraints.real)
        self.precision: Any = PyroParam(precision, constraints.positive_definite)

    def posterior(self) -> WeightPosterior:
        """Return the posterior of the present parameters."""
        return from_natural(self.linear, self.precision)

    def distribution(self) -> DrawnNormal:
        """Return the posterior as a multivariate normal, whose divergence from the prior has a closed form."""
        # P reversed in both dimensions is R Rᵀ: R reversed and transposed is lower, and its inverse is the factor of P⁻¹.
        R = safe_cholesky(self.precision.flip(-2, -1), jitter=0.0, name="weight precision")
        scale_tril = invert_lower(R.flip(-2, -1).mT)
        return DrawnNormal(self.posterior().mean, scale_tril=scale_tril, validate_args=False)

    def updated(
        self,
        model: RandomFeatureModel,
        y: Float[Tensor, "B D"],
        features: Float[Tensor, "B L"],
        *,
        is_whole: bool,
        rows: Any = None,
    ) -> dict[str, Tensor]:
        """Take a natural-gradient step of size one at these features, and return the new parameters.

        :param is_whole: whether these are all rows: then steps that would lower the bound are halved.
        :param rows: known quantities of these rows; None for nothing.
        """
        mean, variance = function_moments(self.posterior(), features)
        natural = self._natural(model, y, features, model.offsets(rows) + mean, variance, rows)
        if is_whole and not isinstance(model.likelihood, Gaussian):
            natural = self._backtrack(lambda *to: self._bound(model, y, features, to, rows), natural)
        return dict(zip(("linear", "precision"), natural, strict=True))

    def _natural(
        self, model: RandomFeatureModel, y: Tensor, features: Tensor, mean: Tensor, variance: Tensor, rows: Any
    ) -> Natural:
        """Multiply the prior by the sites of the rows at moments of f, scaled to all rows; return P m and P.

        A shared precision is the mean over outputs, and P m is corrected for the difference.
        """
        linear, precision = model.weight_sites(y, mean, variance, rows)
        if self.shared:
            average = precision.mean(-1, keepdim=True)
            linear, precision = linear + (average - precision) * (mean - model.offsets(rows)), average
        ratio, L = model.num_data / len(y), features.shape[-1]
        total = precision_sum(features, precision)
        if not self.shared:
            total = total.expand(model.data_dim, L, L)
        # Products in float32 are less symmetric than the constraint requires.
        P = features.new_ones(L).diag() + 0.5 * ratio * (total + total.mT)
        return ratio * linear.mT @ features, _positive_definite(P)

    def _backtrack(self, bound: Callable[[Tensor, Tensor], Tensor], natural: Natural) -> Natural:
        """Halve the step towards new parameters until the bound of no output, or of all, falls; ten times at most.

        Far from the maximum the sites approximate the likelihood badly, and whole steps may lower the bound.
        """
        linear, precision = natural

        def after(step_size: Tensor) -> Natural:
            weight = step_size[:, None, None]
            return self.linear.lerp(linear, weight[..., 0]), self.precision.lerp(precision, weight)

        step_size = torch.ones_like(precision[:, 0, 0])
        old_bound = bound(*after(torch.zeros_like(step_size)))
        for _ in range(_NUM_HALVINGS):
            falls = ~(bound(*after(step_size)) >= old_bound)
            if not falls.any():
                break
            step_size = torch.where(falls, 0.5 * step_size, step_size)
        return after(step_size)

    def _bound(
        self, model: RandomFeatureModel, y: Tensor, features: Tensor, natural: Natural, rows: Any
    ) -> Float[Tensor, " D"] | Float[Tensor, " 1"]:
        """Compute the terms of the bound that depend on the weights: for each output, or for all whose terms are coupled.

        Outputs with one covariance, and those of a :class:`~pyro_lvgp.likelihoods.RowLikelihood`, are coupled.
        """
        posterior = from_natural(*natural)
        mean, variance = function_moments(posterior, features)
        f_mean, params = model.offsets(rows) + mean, model.likelihood_params(rows)
        weight = 1.0 if rows is None or rows.weight is None else rows.weight
        value = torch.nan_to_num(y, model.likelihood.fill_value)
        variance, divergence = variance.expand_as(f_mean), divergence_from_prior(posterior)
        if isinstance(model.likelihood, RowLikelihood):
            expected = model.likelihood.log_prob_of_rows(value, ~torch.isnan(y), f_mean, variance, params)
            return ((weight * expected).sum() - divergence.sum()).unsqueeze(0)
        expected = model.likelihood.expected_log_prob(value, f_mean, variance, params)
        entries = torch.where(torch.isnan(y), 0.0, expected)
        bound = (entries if isinstance(weight, float) else weight[:, None] * entries).sum(0) - divergence
        return bound.sum(0, keepdim=True) if self.shared else bound


def _positive_definite(P: Float[Tensor, "*batch L L"]) -> Float[Tensor, "*batch L L"]:
    """Add jitter to the matrices that rounding has made indefinite, since the constraint of a parameter factorises them."""
    failed = torch.linalg.cholesky_ex(P).info > 0
    jitter = torch.where(failed, 10.0 * FIRST_JITTER[P.dtype] * P.diagonal(dim1=-2, dim2=-1).mean(-1), 0.0)
    return P + torch.diag_embed(jitter[..., None].expand(P.shape[:-1]))


def initial_function(model: RandomFeatureModel, y: Float[Tensor, "B D"] | None, rows: Any) -> Float[Tensor, "#B D"]:
    """Return initial function values: the inverse link of y, or the mean at missing entries."""
    offsets = torch.atleast_2d(model.offsets(rows))
    return offsets if y is None else torch.where(torch.isnan(y), offsets, model.likelihood.inverse_link(y))
