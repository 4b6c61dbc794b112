r"""Natural-gradient updates of the Gaussian sites of a series: the loop of a guide, for any decoder and likelihood.

The bound of a series, :math:`E_q[\log p(y \mid f)] - KL(q \| p)`, and its derivatives in the means and variances of q are
computed from draws of the marginals, with the same standard normal numbers at every evaluation, so that bounds can be
compared.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.ops.quasi_monte_carlo import antithetic_normals
from pyro_lvgp.ops.site_updates import NaturalSites, natural_gradient_step

__all__ = ["Factor", "update_sites"]

_NUM_DRAWS = 64  # 4 for each latent dimension if that is more
_LEAST_RELATIVE_PRECISION = 1e-6  # of a site relative to its prior, so that the mean of the site is finite
_GROWTH, _DECAY = 1.5, 0.5  # of the step size after an accepted and after a rejected step

LogProb = Callable[[dict[str, Tensor]], Tensor]


class Factor(NamedTuple):
    """Factor of q at one site of the model: the product of its prior and of Gaussian sites.

    :param prior: prior of the site, as the model samples it.
    :param sites: Gaussian sites to start from, in the shape of the prior; zero where there are no data.
    :param has_data: mask of the sites with data.
    :param multiply: maps means and precisions of Gaussian sites to the product.
    :param is_updated: whether the Gaussian sites are updated.
    """

    prior: Any
    sites: NaturalSites
    has_data: Bool[Tensor, "*shape"]
    multiply: Callable[[Tensor, Tensor], Any]
    is_updated: bool

    @property
    def latent_dim(self) -> int | None:
        """Dimension of the latents, counted from the right; None if the site has one latent for each point."""
        by_point = isinstance(without_independent(self.prior), Normal)
        return {(True, 1): -1, (False, 2): -2}.get((by_point, self.prior.event_dim))

    @property
    def num_latents(self) -> int:
        return 1 if self.latent_dim is None else self.has_data.shape[self.latent_dim]

    @property
    def least_precision(self) -> Tensor:
        """Least precision of Gaussian sites; zero where there are no data."""
        variance = self.prior.variance
        known = variance <= torch.finfo(variance.dtype).tiny ** 0.5  # as of a linear kernel at the origin
        return torch.where(self.has_data, _LEAST_RELATIVE_PRECISION / torch.where(known, 1.0, variance), 0.0)


class _Expansion(NamedTuple):
    """Gaussian sites of one factor, and what a step from them takes.

    :param sites: Gaussian sites.
    :param mean: mean of the factor.
    :param gradient: expected gradient of the log likelihood.
    :param curvature: expected second derivative of the log likelihood, made positive and negated.
    """

    sites: NaturalSites
    mean: Tensor
    gradient: Tensor
    curvature: Tensor


class _State(NamedTuple):
    """Bounds of the series, and the expansion of each factor."""

    bound: Float[Tensor, "*series"]
    factors: dict[str, _Expansion]


def update_sites(
    factors: Mapping[str, Factor],
    log_prob: LogProb,
    *,
    num_updates: int,
    step_size: float,
    num_plates: int,
    try_empty: bool,
) -> tuple[dict[str, NaturalSites], list[Float[Tensor, "*series"]]]:
    """Maximise the bound of each series over the Gaussian sites of its factors, by a few natural-gradient steps.

    A step that would lower the bound of a series is rejected, and its next step is half as long; after an accepted one it is
    1.5 times as long, up to ``step_size``.

    Second derivatives are replaced by their absolute values, as precisions are positive: where the log likelihood is convex in
    a latent the step has the length of a Newton step, in the direction of the gradient.

    :param factors: factors of q by site.
    :param log_prob: maps draws of all sites, along a new first dimension left of the plates, to the log likelihood of each
        point ``[draws, *series, N]``.
    :param num_updates: number of steps.
    :param step_size: largest step size.
    :param num_plates: number of dimensions of the model's plates.
    :param try_empty: whether the first step of a series starts from sites without information if their bound is higher.
    :returns: Gaussian sites of the updated factors, and the bounds before the first step and after each, which never fall.

    Gradients flow to the initial sites, and to everything that priors and likelihood depend on, unless they are disabled.

    Source: Khan and Lin (2017), "Conjugate-computation variational inference"; Kim et al. (2018), "Semi-amortized variational
    autoencoders".
    """
    draws = _Draws(factors, num_plates)
    start = {name: factor.sites for name, factor in factors.items()}
    state = _expand(factors, start, draws, log_prob)
    bounds = [state.bound.detach()]
    if try_empty:
        empty = {name: NaturalSites(torch.zeros_like(x.least_precision), x.least_precision) for name, x in factors.items()}
        state, _ = _select(state, _expand(factors, _of_updated(factors, empty, start), draws, log_prob))
    step = torch.full_like(state.bound, step_size).detach()
    for _ in range(num_updates):
        moved = {
            name: natural_gradient_step(*expansion, _align(step, expansion.mean)) for name, expansion in state.factors.items()
        }
        state, is_accepted = _select(state, _expand(factors, _of_updated(factors, moved, start), draws, log_prob))
        step = torch.where(is_accepted, (_GROWTH * step).clamp(max=step_size), _DECAY * step)
        bounds.append(state.bound.detach())
    return {name: state.factors[name].sites for name, factor in factors.items() if factor.is_updated}, bounds


class _Draws:
    """Draws of the marginals of all factors, from the same standard normal vectors at every call.

    :param factors: factors by site.
    :param num_plates: number of dimensions of the model's plates.
    """

    def __init__(self, factors: Mapping[str, Factor], num_plates: int):
        sizes = [factor.num_latents for factor in factors.values()]
        self._noise: dict[str, Tensor] = {}
        noise = antithetic_normals(max(_NUM_DRAWS, 4 * sum(sizes)), sum(sizes)).split(sizes, -1)
        for (name, factor), part in zip(factors.items(), noise, strict=True):
            shape = [1] * (num_plates + factor.prior.event_dim)
            if factor.latent_dim is not None:
                shape[factor.latent_dim] = factor.num_latents
            self._noise[name] = part.reshape(-1, *shape).to(factor.has_data.device)

    def __call__(self, name: str, mean: Tensor, stddev: Tensor) -> Tensor:
        return mean + stddev * self._noise[name].to(mean)


def _expand(factors: Mapping[str, Factor], sites: Mapping[str, NaturalSites], draws: _Draws, log_prob: LogProb) -> _State:
    """Compute the bounds of the series, and the expansions of the log likelihood."""
    differentiable = torch.is_grad_enabled()
    posteriors = {name: factor.multiply(sites[name].mean, sites[name].precision) for name, factor in factors.items()}
    means = {name: _leaf(q.mean) for name, q in posteriors.items()}
    stddevs = {name: _leaf(q.variance.sqrt()) for name, q in posteriors.items()}
    with torch.enable_grad():
        expected = log_prob({name: draws(name, means[name], stddevs[name]) for name in factors}).mean(0).sum(-1)
        leaves = [*means.values(), *stddevs.values()]
        gradients = torch.autograd.grad(expected.sum(), leaves, create_graph=differentiable)
    expansions = {}
    pairs = zip(gradients[: len(factors)], gradients[len(factors) :], strict=True)
    for (name, factor), (gradient, of_stddev) in zip(factors.items(), pairs, strict=True):
        # ∂/∂σ = 2σ ∂/∂v
        curvature = torch.maximum((of_stddev / stddevs[name]).abs(), factor.least_precision)
        expansions[name] = _Expansion(sites[name], means[name], gradient, torch.where(factor.has_data, curvature, 0.0))
    bound = expected - sum(_kl(posteriors[name], factor) for name, factor in factors.items())
    if not differentiable:
        bound, expansions = bound.detach(), {name: _detached(expansion) for name, expansion in expansions.items()}
    return _State(torch.where(bound.isnan(), -torch.inf, bound), expansions)


def _leaf(x: Tensor) -> Tensor:
    """Return a tensor that requires gradients."""
    return x if x.requires_grad else x.detach().requires_grad_()


def _detached(expansion: _Expansion) -> _Expansion:
    sites, *others = expansion
    return _Expansion(sites, *(x.detach() for x in others))


def _kl(q: Any, factor: Factor) -> Float[Tensor, "*series"]:
    """Compute the KL divergence of a factor from its prior, summed over latents and points."""
    q = without_independent(q)
    kl = sum_rightmost(kl_divergence(q, without_independent(factor.prior)), factor.prior.event_dim - len(q.event_shape))
    return kl.sum(-1) if kl.dim() else kl  # the rightmost plate is that of the points


def _of_updated(
    factors: Mapping[str, Factor], new: Mapping[str, NaturalSites], old: Mapping[str, NaturalSites]
) -> dict[str, NaturalSites]:
    """Return the new sites of the factors that are updated, and the old ones of the others."""
    return {name: (new if factor.is_updated else old)[name] for name, factor in factors.items()}


def _select(old: _State, new: _State) -> tuple[_State, Bool[Tensor, "*series"]]:
    """Return the new state of the series whose bound does not fall, and the old one of the others."""
    is_accepted = (new.bound >= old.bound).detach()

    def where(x: Any, z: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.where(_align(is_accepted, x), x, z)
        return type(x)(*(where(a, b) for a, b in zip(x, z, strict=True)))

    factors = {name: where(expansion, old.factors[name]) for name, expansion in new.factors.items()}
    return _State(where(new.bound, old.bound), factors), is_accepted


def _align(of_series: Tensor, x: Tensor) -> Tensor:
    """Append dimensions of size 1 to a tensor with one entry for each series."""
    return of_series.reshape(of_series.shape + (1,) * (x.dim() - of_series.dim()))
