"""Updates of encoded sites by a few natural-gradient steps on the bound of the series."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.distributions.gaussian_process import StructuredPosterior
from pyro_lvgp.ops import gaussian_sites
from pyro_lvgp.ops.site_updates import NaturalSites, antithetic_normals, natural_gradient_step

__all__ = ["SiteUpdates"]

_LEAST_RELATIVE_PRECISION = 1e-6  # of a site, for its mean to be finite
_STEP_GROWTH, _STEP_DECAY = 1.5, 0.5


@dataclass(frozen=True)
class SiteUpdates:
    num_predict: int = 10
    num_train: int = 0
    step_size: float = 1.0
    num_draws: int = 32

    def __post_init__(self):
        check_sizes(least=0, num_predict=self.num_predict, num_train=self.num_train)
        check_sizes(num_draws=self.num_draws)
        if not 0.0 < self.step_size <= 1.0:
            raise ValueError(f"expected step_size above 0 and up to 1, got {self.step_size}; 1 replaces the sites")


class Factor(NamedTuple):
    """Factor of the variational distribution at one site of the model, as a function of its Gaussian sites.

    :param prior: prior without ``Independent``.
    :param sites: Gaussian sites of the encoder, in the layout of the prior.
    :param has_data: mask of the sites with data.
    :param multiply: maps mean and precision of the sites to the posterior.
    :param latent_dim: position of the dimension of the latents, from the right; None if there is one latent.
    :param event_dim: number of dimensions of a value.
    :param is_updated: whether the sites are updated.
    """

    prior: Any
    sites: NaturalSites
    has_data: Tensor
    multiply: Callable[[Tensor, Tensor], Any]
    latent_dim: int | None
    event_dim: int
    is_updated: bool


class _State(NamedTuple):
    bound: Tensor
    parts: dict[str, tuple[NaturalSites, Tensor, Tensor, Tensor]]


def update(
    factors: Mapping[str, Factor],
    log_prob: Callable[[dict[str, Tensor]], Tensor],
    num_updates: int,
    options: SiteUpdates,
    num_plates: int,
    trace=None,
) -> dict[str, NaturalSites]:
    sizes = {name: f.prior_shape[f.latent_dim] if False else _num_latents(f) for name, f in factors.items()}
    total = sum(sizes.values())
    num_draws = max(options.num_draws, 4 * total)
    noise = antithetic_normals(num_draws, total).split(list(sizes.values()), -1)
    noise = {name: _spread(part, factor, num_plates) for (name, factor), part in zip(factors.items(), noise, strict=True)}

    def evaluate(sites: dict[str, NaturalSites]) -> _State:
        draws, leaves, kl = {}, {}, 0.0
        for name, factor in factors.items():
            site = sites[name]
            precision = torch.where(factor.has_data, site.precision, 0.0)
            mean = torch.where(factor.has_data, site.information / site.precision, 0.0)
            q = factor.multiply(mean, precision)
            kl = kl + _kl(q, factor)
            m, s = (x if x.requires_grad else x.detach().requires_grad_() for x in (q.mean, q.variance.sqrt()))
            leaves[name] = (m, s)
            lead = (1,) * (noise[name].dim() - 1 - m.dim())
            draws[name] = m.reshape(lead + m.shape) + s.reshape(lead + m.shape) * noise[name].to(m)
        expected = log_prob(draws).mean(0).sum(-1)
        flat = [x for pair in leaves.values() for x in pair]
        gradients = torch.autograd.grad(expected.sum(), flat, create_graph=differentiable)
        parts = {}
        for i, (name, (m, s)) in enumerate(leaves.items()):
            g, of_s = gradients[2 * i], gradients[2 * i + 1]
            curvature = (of_s / s).abs()
            parts[name] = (sites[name], m, g, torch.maximum(curvature, _LEAST_RELATIVE_PRECISION / factors[name].prior.variance))
        return _State((expected - kl).nan_to_num(nan=-torch.inf), parts)

    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        state = evaluate({n: f.sites for n, f in factors.items()})
        if trace is not None: trace.append(state.bound.detach())
        none = {}
        for n, f in factors.items():
            none[n] = NaturalSites(torch.zeros_like(f.sites.information), (_LEAST_RELATIVE_PRECISION / f.prior.variance).expand_as(f.sites.precision)) if f.is_updated else f.sites
        state, _ = _better(state, evaluate(none))
        if trace is not None: trace.append(state.bound.detach())
        step = torch.full_like(state.bound, options.step_size)
        for _ in range(num_updates):
            cand = {}
            for name, (site, m, g, c) in state.parts.items():
                cand[name] = natural_gradient_step(site, m, g, c, _like(step, m)) if factors[name].is_updated else site
            state, accept = _better(state, evaluate(cand))
            step = torch.where(accept, (_STEP_GROWTH * step).clamp(max=options.step_size), _STEP_DECAY * step)
            if trace is not None: trace.append(state.bound.detach())
            if not differentiable:
                state = _State(state.bound.detach(), {n: (NaturalSites(*(x.detach() for x in p[0])), *(x.detach() for x in p[1:])) for n, p in state.parts.items()})
    return {name: state.parts[name][0] for name, f in factors.items() if f.is_updated}


def _num_latents(factor: Factor) -> int:
    return 1 if factor.latent_dim is None else factor.sites.precision.shape[factor.latent_dim]


def _spread(noise: Tensor, factor: Factor, num_plates: int) -> Tensor:
    shape = [1] * (num_plates + factor.event_dim)
    if factor.latent_dim is not None:
        shape[factor.latent_dim] = noise.shape[-1]
    return noise.reshape(len(noise), *shape)


def _like(x: Tensor, y: Tensor) -> Tensor:
    return x.reshape(x.shape + (1,) * (y.dim() - x.dim()))


def _better(old: _State, new: _State) -> tuple[_State, Tensor]:
    accept = (new.bound >= old.bound).detach()
    parts = {}
    for name, (sites, *rest) in new.parts.items():
        other, *others = old.parts[name]
        w = _like(accept, rest[0])
        parts[name] = (
            NaturalSites(*(torch.where(w, a, b) for a, b in zip(sites, other, strict=True))),
            *(torch.where(w, a, b) for a, b in zip(rest, others, strict=True)),
        )
    return _State(torch.where(accept, new.bound, old.bound), parts), accept


def _kl(q: Any, factor: Factor) -> Tensor:
    if isinstance(q, StructuredPosterior):
        kl = gaussian_sites.kl_divergence(q.posterior).to(q.site_mean).expand(q.batch_shape)
        kl = sum_rightmost(kl, factor.event_dim - 1)
    else:
        kl = sum_rightmost(kl_divergence(q, factor.prior), factor.event_dim)
    return kl.sum(-1) if kl.dim() else kl
