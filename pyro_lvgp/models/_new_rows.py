"""Posteriors of the latents of new rows, given the posterior of the sites that all rows share."""

from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.likelihoods import RowLikelihood
from pyro_lvgp.models._laplace import MAX_ENTRIES, Entries, gaussian_components, laplace
from pyro_lvgp.models._packing import Packing

_NUM_SCREENING_DRAWS = 8  # from each component of a prior
_MAX_BATCH = 1000  # Laplace approximations at a time, since each takes megabytes with hundreds of inducing points

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
    """Fit a Gaussian with a diagonal covariance to the posterior of each row, or a mixture of Gaussians from several starts.

    :param log_likelihoods: log p(y | x) of rows for each draw of the shared sites; steps cycle through the draws.
    :param Y: rows, NaN where missing.
    :param prior: p(x) of one row, or of each.
    :param loc: initial means, all rows of the first start before those of the next.
    :param scale: initial standard deviations.
    :param num_steps: number of Adam steps.
    :param learning_rate: learning rate of Adam.
    """
    num_starts, num_draws = len(loc) // len(Y), len(log_likelihoods)
    rows = Y.repeat(num_starts, 1)
    loc, log_scale = loc.clone().requires_grad_(), scale.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([loc, log_scale], lr=learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(num_steps, 1))

    def bounds(step: int) -> Tensor:
        q = dist.Normal(loc, log_scale.exp())
        X = q.rsample()
        log_prior = prior.log_prob(X.unflatten(0, (num_starts, -1))).flatten()  # priors of one row, or of each
        return log_likelihoods[step % num_draws](X, rows) + log_prior + q.entropy().sum(-1)

    for step in progress_bar(range(num_steps), "latents of new rows"):
        loc.grad, log_scale.grad = torch.autograd.grad(-bounds(step).sum(), [loc, log_scale])
        optimizer.step()
        decay.step()
    q = dist.Normal(loc.detach(), log_scale.detach().exp()).to_event(1)
    if num_starts == 1:
        return q
    with torch.no_grad():
        bound = torch.stack([bounds(step) for step in range(4 * num_draws)]).mean(0)
    loc, scale, bound = (x.unflatten(0, (num_starts, -1)).transpose(0, 1) for x in (q.mean, q.stddev, bound))
    gaussians = dist.Normal(loc, scale).to_event(1)
    return dist.MixtureSameFamily(dist.Categorical(logits=_share_weights(gaussians, bound)), gaussians)


def by_laplace(
    entries: Sequence[Entries],
    Y: Float[Tensor, "B D"],
    prior: torch.distributions.Distribution,
    start: Float[Tensor, "starts Q"] | None,
    num_starts: int,
    *,
    num_steps: int,
    max_components: int | None = None,
    by_row: bool = False,
) -> TorchDistributionMixin:
    """Fit a Gaussian at a mode of the posterior of each row, or a mixture for several starts or components of the prior.

    :param entries: p(y | x) of each entry, for each draw of the shared sites.
    :param Y: rows, NaN where missing.
    :param prior: p(x) of one row, a Gaussian or a mixture of Gaussians; or a Gaussian for each row.
    :param start: initial latents, all rows of the first start before those of the next; None for the mean of each component
        of the prior, and further starts at draws from the component.
    :param num_starts: number of starts for each component.
    :param num_steps: number of Gauss-Newton steps.
    :param max_components: number of components of the prior that remain for each row, those of the highest evidence at
        draws from them; None for all.
    :param by_row: whether p(y | x) of rows differs at the same x, as by their covariates.
    """
    log_weights, components = gaussian_components(prior)
    if start is None and max_components is not None and max_components < len(log_weights):
        start, components, log_weights = _screened(entries, Y, log_weights, components, max_components, by_row)
        loc, scale_tril, log_evidence = _laplace_by_parts(entries, Y, components, start, num_steps, by_row)
        gaussians = dist.MultivariateNormal(loc, scale_tril=scale_tril)
        return dist.MixtureSameFamily(dist.Categorical(logits=log_evidence + log_weights), gaussians)
    if start is None:
        points = torch.cat([components.mean[None], components.sample((num_starts - 1,))])
        starts = points.flatten(0, 1)[:, None].expand(-1, len(Y), -1)
        repeated = components.expand((num_starts, len(log_weights)))
        components = dist.MultivariateNormal(repeated.loc.flatten(0, 1), scale_tril=repeated.scale_tril.flatten(0, 1))
    else:
        starts = start.unflatten(0, (num_starts, -1))
    loc, scale_tril, log_evidence = _laplace_by_parts(entries, Y, components, starts, num_steps, by_row)
    if len(starts) == 1:
        return dist.MultivariateNormal(loc[:, 0], scale_tril=scale_tril[:, 0])
    # To [B, components, starts, ...].
    loc, scale_tril, log_evidence = (x.unflatten(1, (num_starts, -1)).transpose(1, 2) for x in (loc, scale_tril, log_evidence))
    logits = _share_weights(dist.MultivariateNormal(loc, scale_tril=scale_tril), log_evidence) + log_weights[:, None]
    gaussians = dist.MultivariateNormal(loc.flatten(1, 2), scale_tril=scale_tril.flatten(1, 2))
    return dist.MixtureSameFamily(dist.Categorical(logits=logits.flatten(1)), gaussians)


def _laplace_by_parts(
    entries: Sequence[Entries],
    Y: Float[Tensor, "B D"],
    components: dist.MultivariateNormal,
    start: Float[Tensor, "S B Q"],
    num_steps: int,
    by_row: bool,
) -> tuple[Float[Tensor, "B S Q"], Float[Tensor, "B S Q Q"], Float[Tensor, "B S"]]:
    """Compute :func:`laplace` for as many rows at a time as fit into memory."""
    number = max(_MAX_BATCH // len(start), 1)
    parts = []
    for rows in torch.arange(len(Y), device=Y.device).split(number):
        prior = components
        if components.loc.dim() == 3:
            prior = dist.MultivariateNormal(components.loc[:, rows], scale_tril=components.scale_tril[:, rows])
        index = rows if by_row else None
        parts.append(laplace(entries, Y[rows], prior, start[:, rows], num_steps=num_steps, index=index))
    means, factors, log_evidence = map(torch.cat, zip(*parts, strict=True))
    return means, factors, log_evidence


@torch.no_grad()
def _screened(
    entries: Sequence[Entries],
    Y: Float[Tensor, "B D"],
    log_weights: Float[Tensor, " K"],
    components: dist.MultivariateNormal,
    number: int,
    by_row: bool,
) -> tuple[Float[Tensor, "S B Q"], dist.MultivariateNormal, Float[Tensor, "B S"]]:
    """Starts, priors and log weights of each row for the components with the highest evidence, estimated from few draws."""
    draws = components.sample((_NUM_SCREENING_DRAWS,))
    log_likelihood = _log_likelihood_at(entries, Y, draws.flatten(0, 1), by_row).unflatten(0, draws.shape[:2])
    best = (log_likelihood.logsumexp(0) + log_weights[:, None]).topk(number, 0).indices  # [S, B]
    start = draws[log_likelihood.argmax(0).gather(0, best), best]
    return start, dist.MultivariateNormal(components.loc[best], scale_tril=components.scale_tril[best]), log_weights[best.mT]


def _log_likelihood_at(
    entries: Sequence[Entries], Y: Float[Tensor, "B D"], points: Float[Tensor, "C Q"] | Float[Tensor, "C B Q"], by_row: bool
) -> Float[Tensor, "C B"]:
    """Log p(y | x) of each row at each point, averaged over the draws of the shared sites.

    Points are the same for all rows, or of each row if ``by_row``.  Equal entries of a column, such as small counts, have one
    density at a point that is the same for all rows, where missing entries take no time.
    """
    observed = ~torch.isnan(Y)

    def of_rows(y: LikelihoodPredictive) -> Float[Tensor, "*S B"]:
        return y.rows(observed).log_prob(torch.nan_to_num(Y, y.likelihood.fill_value))

    if by_row:
        at_points = [torch.stack([of_rows(each(x.expand(len(Y), -1))) for x in points]) for each in entries]
        return torch.stack(at_points).mean(0)
    values, index = _distinct_values(Y)

    def of_values(y: LikelihoodPredictive) -> Float[Tensor, "S B"]:
        log_prob = y.log_prob(torch.nan_to_num(values, y.likelihood.fill_value))
        return torch.where(observed, log_prob.gather(-2, index.expand(len(log_prob), -1, -1)), 0.0).sum(-1)

    def at_shared_points(given: LikelihoodPredictive) -> Float[Tensor, "C B"]:
        rows, log_prob = (Y, of_rows) if isinstance(given.likelihood, RowLikelihood) else (values, of_values)
        number = max(MAX_ENTRIES // rows.numel(), 1)
        some = [slice(i, i + number) for i in range(0, len(points), number)]
        return torch.cat([log_prob(given.repeat_rows(indices, len(rows))) for indices in some])

    return torch.stack([at_shared_points(each(points)) for each in entries]).mean(0)


def _distinct_values(Y: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "U D"], Int[Tensor, "B D"]]:
    """Distinct values of each column and the indices of all entries; or all observed values, if half of them are distinct.

    Missing entries have the index of another value, and columns without observed entries are NaN.
    """
    seen = ~Y.isnan()
    first = Y.gather(0, seen.int().argmax(0, keepdim=True))
    found = [column.unique(return_inverse=True) for column in torch.where(seen, Y, first).nan_to_num().unbind(1)]
    number = max(len(values) for values, _ in found)
    if 2 * number > len(Y):
        packing = Packing.of(seen)
        return packing.pack(Y), packing.target
    values = torch.stack([pad(values, (0, number - len(values)), value=float(values[0])) for values, _ in found], 1)
    return torch.where(seen.any(0), values, torch.nan), torch.stack([index for _, index in found], 1)


@torch.no_grad()
def best_candidates(
    entries: Entries,
    Y: Float[Tensor, "B D"],
    prior: torch.distributions.Distribution,
    candidates: Float[Tensor, "C Q"] | Float[Tensor, "C B Q"],
    num_starts: int,
    *,
    by_row: bool = False,
) -> Float[Tensor, "starts Q"]:
    """Choose initial latents for each row: the candidate of the highest density, or several at random by Gumbel's trick.

    :param entries: p(y | x) of each entry, or its expectation over f.
    :param Y: rows, NaN where missing.
    :param prior: p(x) of one row, or of each.
    :param candidates: latents to choose from, the same for all rows, or some of each if ``by_row``.
    :param num_starts: number of initial latents for each row.
    :param by_row: whether ``entries`` are those of these rows, which have arguments of their own.
    :returns: initial latents, all rows of the first start before those of the next.
    :raises ValueError: if there are fewer candidates than starts.
    """
    if len(candidates) < num_starts:
        raise ValueError(f"expected num_starts of at most {len(candidates)}, the number of candidates, got {num_starts}")
    points = candidates[:, None] if candidates.dim() == 2 else candidates
    scores = _log_likelihood_at([entries], Y, candidates, by_row) + prior.log_prob(points)
    if num_starts > 1:
        # The best candidates alone may all be close to one mode.  Rows share the noise, and so do not depend on each other.
        scores = 0.5 * scores - torch.empty_like(scores[:, :1]).exponential_().log()
    best = scores.topk(num_starts, 0).indices
    chosen = candidates[best] if candidates.dim() == 2 else candidates[best, torch.arange(len(Y), device=Y.device)]
    return chosen.flatten(0, 1)


def _share_weights(gaussians: Any, log_weight: Float[Tensor, "*batch S"]) -> Float[Tensor, "*batch S"]:
    """Log weights of Gaussians from several starts, in which Gaussians at the same optimum share one weight."""
    overlap = gaussians.log_prob(gaussians.mean.movedim(-2, 0).unsqueeze(-2))  # [i, *batch, j]: log q_j at the mean of q_i
    own = overlap.diagonal(dim1=0, dim2=-1)
    return log_weight - (overlap.logsumexp(-1).movedim(0, -1) - own)
