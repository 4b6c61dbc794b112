r"""Natural-gradient updates of the Gaussian sites of a series: the loop of a guide, for any decoder and likelihood.

The bound of a series, :math:`E_q[\log p(y \mid f)] - KL(q \| p)`, and its derivatives in the means and variances of q are
computed from draws of the marginals, with the same standard normal numbers at every evaluation, so that bounds can be
compared.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp.guides._site_factors import Factor
from pyro_lvgp.ops.quasi_monte_carlo import antithetic_normals

__all__ = ["update_sites"]

_NUM_DRAWS = 64  # 4 for each latent dimension if that is more
_PART_SIZE = 2**18  # values of a site in the draws that are in memory at once
_GROWTH, _DECAY = 1.5, 0.5  # of the step size after an accepted and after a rejected step

LogProb = Callable[[dict[str, Tensor]], Tensor]


class _Expansion(NamedTuple):
    """Gaussian sites of one factor, and what a step from them takes.

    :param sites: Gaussian sites.
    :param mean: mean of the factor.
    :param gradient: expected gradient of the log likelihood.
    :param curvature: expected second derivative of the log likelihood, made positive and negated.
    """

    sites: Any
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
    weight: float | Tensor = 1.0,
) -> tuple[dict[str, Any], list[Float[Tensor, "*series"]]]:
    """Maximise the bound of each series over the Gaussian sites of its factors, by a few natural-gradient steps.

    A step that would lower the bound of a series is rejected, and its next step is half as long; after an accepted one it is
    1.5 times as long, up to ``step_size``.

    Second derivatives are replaced by their absolute values, as precisions are positive: where the log likelihood is convex in
    a latent the step has the length of a Newton step, in the direction of the gradient.

    :param factors: factors of q by the site of the latents of points.
    :param log_prob: maps draws of all sites, along a new first dimension left of the plates, to the log likelihood of each
        point ``[draws, *series, N]``.
    :param num_updates: number of steps.
    :param step_size: largest step size.
    :param num_plates: number of dimensions of the model's plates.
    :param try_empty: whether the first step of a series starts from sites without information if their bound is higher.
    :param weight: number of data that each point represents in a mini-batch; one number, or one for each point.
    :returns: Gaussian sites of the updated factors, and the bounds before the first step and after each, which never fall.

    Gradients flow to the initial sites, and to everything that priors and likelihood depend on, unless they are disabled.

    Source: Khan and Lin (2017), "Conjugate-computation variational inference"; Kim et al. (2018), "Semi-amortized variational
    autoencoders".
    """
    draws = _Draws(factors, num_plates)
    start = {name: factor.sites for name, factor in factors.items()}

    def weighted(latents: dict[str, Tensor]) -> Tensor:
        return weight * log_prob(latents)

    state = _expand(factors, start, draws, weighted)
    bounds = [state.bound.detach()]
    if try_empty:
        empty = {name: factor.without_information() for name, factor in factors.items()}
        state, _ = _select(state, _expand(factors, _of_updated(factors, empty, start), draws, weighted))
    step = torch.full_like(state.bound, step_size).detach()
    for _ in range(num_updates):
        moved = {
            name: factors[name].step(*expansion, _align(step, expansion.mean)) for name, expansion in state.factors.items()
        }
        state, is_accepted = _select(state, _expand(factors, _of_updated(factors, moved, start), draws, weighted))
        step = torch.where(is_accepted, (_GROWTH * step).clamp(max=step_size), _DECAY * step)
        bounds.append(state.bound.detach())
    return {name: state.factors[name].sites for name, factor in factors.items() if factor.is_updated}, bounds


class _Draws:
    """Draws of the marginals of all factors, from the same standard normal vectors at every pass.

    :param factors: factors by site.
    :param num_plates: number of dimensions of the model's plates.
    """

    def __init__(self, factors: Mapping[str, Factor], num_plates: int):
        sizes = [factor.num_latents for factor in factors.values()]
        self._noise: dict[str, Tensor] = {}
        self.number = max(_NUM_DRAWS, 4 * sum(sizes))
        self._num_latents = max(factor.has_data.numel() for factor in factors.values())
        noise = antithetic_normals(self.number, sum(sizes)).split(sizes, -1)
        for (name, factor), part in zip(factors.items(), noise, strict=True):
            shape = [1] * (num_plates + factor.event_dim)
            if factor.latent_dim is not None:
                shape[factor.latent_dim] = factor.num_latents
            self._noise[name] = part.reshape(-1, *shape).to(factor.has_data.device)

    def __call__(self, means: Mapping[str, Tensor], stddevs: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
        """Yield the draws of all sites in parts.

        :param size: largest number of draws of a part.
        """
        for first in range(0, self.number, size):
            noise = {name: part[first : first + size] for name, part in self._noise.items()}
            yield {name: mean + stddevs[name] * noise[name].to(mean) for name, mean in means.items()}

    @property
    def part_size(self) -> int:
        """Number of draws whose values of a site are at most ``_PART_SIZE``, and one draw at least."""
        return max(_PART_SIZE // self._num_latents, 1)


def _expand(factors: Mapping[str, Factor], sites: Mapping[str, Any], draws: _Draws, log_prob: LogProb) -> _State:
    """Compute the bounds of the series, and the expansions of the log likelihood."""
    differentiable = torch.is_grad_enabled()
    posteriors = {name: factor.multiply(sites[name]) for name, factor in factors.items()}
    means = {name: _leaf(q.mean) for name, q in posteriors.items()}
    stddevs = {name: _leaf(q.variance.sqrt()) for name, q in posteriors.items()}
    leaves = [*means.values(), *stddevs.values()]
    expected: Any = 0.0
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    # The graph of a part is freed after it, unless gradients are to flow through the updates.
    with torch.enable_grad():
        for latents in draws(means, stddevs, draws.number if differentiable else draws.part_size):
            part = log_prob(latents).sum((0, -1)) / draws.number
            of_part = torch.autograd.grad(part.sum(), leaves, create_graph=differentiable)
            expected = expected + (part if differentiable else part.detach())
            gradients = [total + new for total, new in zip(gradients, of_part, strict=True)]
    expansions = {}
    pairs = zip(gradients[: len(factors)], gradients[len(factors) :], strict=True)
    for (name, factor), (gradient, of_stddev) in zip(factors.items(), pairs, strict=True):
        # ∂/∂σ = 2σ ∂/∂v
        curvature = torch.maximum((of_stddev / stddevs[name]).abs(), factor.least_precision)
        expansions[name] = _Expansion(sites[name], means[name], gradient, torch.where(factor.has_data, curvature, 0.0))
    bound = expected - sum(factor.kl(posteriors[name]) for name, factor in factors.items())
    if not differentiable:
        bound, expansions = bound.detach(), {name: _detached(expansion) for name, expansion in expansions.items()}
    return _State(torch.where(bound.isnan(), -torch.inf, bound), expansions)


def _leaf(x: Tensor) -> Tensor:
    """Return a tensor that requires gradients."""
    return x if x.requires_grad else x.detach().requires_grad_()


def _detached(expansion: _Expansion) -> _Expansion:
    sites, *others = expansion
    return _Expansion(sites, *(x.detach() for x in others))


def _of_updated(factors: Mapping[str, Factor], new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
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
