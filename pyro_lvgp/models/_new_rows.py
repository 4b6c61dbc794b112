"""Posteriors of the latents of rows that a model was not trained on, given the posterior of what all rows share."""

from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp.models._laplace import Entries, gaussian_components, laplace

_AT_ONCE = 500  # searches, each of which takes megabytes with hundreds of inducing points

LogLikelihood = Callable[[Float[Tensor, "B Q"], Float[Tensor, "B D"]], Float[Tensor, " B"]]


def variational(
    log_likelihoods: Sequence[LogLikelihood],
    Y: Float[Tensor, "B D"],
    prior: torch.distributions.Distribution,
    loc: Float[Tensor, "starts Q"],
    scale: Float[Tensor, "starts Q"],
    *,
    num_steps: int,
    learning_rate: float,
) -> TorchDistributionMixin:
    """Gaussians with diagonal covariances that maximise their bounds, or mixtures of those from several starts.

    :param log_likelihoods: log p(y | x) of rows for each of several draws of what rows share, which take turns.
    :param Y: rows, NaN where missing.
    :param prior: p(x) of one row.
    :param loc: where to start, all rows once for each start.
    :param scale: the first standard deviations.
    :param num_steps: Adam's.
    :param learning_rate: Adam's.
    """
    num_starts, number = len(loc) // len(Y), len(log_likelihoods)
    rows = Y.repeat(num_starts, 1)
    loc, log_scale = loc.clone().requires_grad_(), scale.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([loc, log_scale], lr=learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(num_steps, 1))

    def bounds(step: int) -> Tensor:
        q = dist.Normal(loc, log_scale.exp())
        X = q.rsample()
        return log_likelihoods[step % number](X, rows) + prior.log_prob(X) + q.entropy().sum(-1)

    for step in range(num_steps):
        loc.grad, log_scale.grad = torch.autograd.grad(-bounds(step).sum(), [loc, log_scale])
        optimizer.step()
        decay.step()
    q = dist.Normal(loc.detach(), log_scale.detach().exp()).to_event(1)
    if num_starts == 1:
        return q
    with torch.no_grad():
        bound = torch.stack([bounds(step) for step in range(4 * number)]).mean(0)
    loc, scale, bound = (x.unflatten(0, (num_starts, -1)).transpose(0, 1) for x in (q.mean, q.stddev, bound))
    gaussians = dist.Normal(loc, scale).to_event(1)
    return dist.MixtureSameFamily(dist.Categorical(logits=_counted_once(gaussians, bound)), gaussians)


def by_laplace(
    entries: Sequence[Entries],
    Y: Float[Tensor, "B D"],
    prior: torch.distributions.Distribution,
    start: Float[Tensor, "starts Q"] | None,
    num_starts: int,
    *,
    num_steps: int,
) -> TorchDistributionMixin:
    """Gaussians at modes, or mixtures of those from several starts, of each component of the prior if that is a mixture.

    :param entries: p(y | x) entry by entry for each of several draws of what rows share.
    :param Y: rows, NaN where missing.
    :param prior: p(x) of one row, a Gaussian or a mixture of them.
    :param start: where to start, all rows once for each start; None for the mean of each component, and draws from it.
    :param num_starts: starts for each component.
    :param num_steps: those of Gauss and Newton.
    """
    log_weights, components = gaussian_components(prior)
    if start is None:
        of_components = torch.cat([components.mean[None], components.sample((num_starts - 1,))])
        places = of_components.flatten(0, 1)[:, None].expand(-1, len(Y), -1)
        repeated = components.expand((num_starts, len(log_weights)))
        components = dist.MultivariateNormal(repeated.loc.flatten(0, 1), scale_tril=repeated.scale_tril.flatten(0, 1))
    else:
        places = start.unflatten(0, (num_starts, -1))
    few = max(_AT_ONCE // len(places), 1)
    parts = [
        laplace(entries, rows, components, of_rows, num_steps=num_steps)
        for rows, of_rows in zip(Y.split(few), places.split(few, 1), strict=True)
    ]
    loc, scale_tril, log_evidence = map(torch.cat, zip(*parts, strict=True))
    if len(places) == 1:
        return dist.MultivariateNormal(loc[:, 0], scale_tril=scale_tril[:, 0])
    # To [B, components, starts, ...].
    loc, scale_tril, log_evidence = (x.unflatten(1, (num_starts, -1)).transpose(1, 2) for x in (loc, scale_tril, log_evidence))
    logits = _counted_once(dist.MultivariateNormal(loc, scale_tril=scale_tril), log_evidence) + log_weights[:, None]
    gaussians = dist.MultivariateNormal(loc.flatten(1, 2), scale_tril=scale_tril.flatten(1, 2))
    return dist.MixtureSameFamily(dist.Categorical(logits=logits.flatten(1)), gaussians)


@torch.no_grad()
def best_candidates(
    log_likelihood: LogLikelihood,
    Y: Float[Tensor, "B D"],
    prior: torch.distributions.Distribution,
    candidates: Float[Tensor, "C Q"],
    num_starts: int,
) -> Float[Tensor, "starts Q"]:
    """Where to start, all rows once for each start: at the best candidate, or at several by Gumbel's trick.

    :raises ValueError: if there are fewer candidates than starts.
    """
    if len(candidates) < num_starts:
        raise ValueError(f"expected at most {len(candidates)} starts, as many as there are candidates, got {num_starts}")
    scores = torch.stack([log_likelihood(x.expand(len(Y), -1), Y) + prior.log_prob(x) for x in candidates])
    if num_starts > 1:  # one of each place that is likely, rather than the best place many times
        scores = 0.5 * scores - torch.empty_like(scores).exponential_().log()
    return candidates[scores.topk(num_starts, 0).indices].flatten(0, 1)


def _counted_once(gaussians: Any, log_weight: Float[Tensor, "*batch S"]) -> Float[Tensor, "*batch S"]:
    """Log weights of Gaussians that started at several places: those that met share one."""
    overlap = gaussians.log_prob(gaussians.mean.movedim(-2, 0).unsqueeze(-2))  # [i, *batch, j]: log q_j at the mean of q_i
    own = overlap.diagonal(dim1=0, dim2=-1)
    return log_weight - (overlap.logsumexp(-1).movedim(0, -1) - own)
