"""Laplace's approximation: a Gaussian at a mode of the posterior of each row's latents."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.infer.elbo.handlers import gaussian_moments
from pyro_lvgp.likelihoods import RowLikelihood
from pyro_lvgp.models._packing import Packing

Entries = Callable[..., LikelihoodPredictive]  # of latents [B, Q], and of indices [B] where rows have arguments of their own
Vectors = Float[Tensor, "B D Q"]
# Log densities of rows, their derivatives in means and variances of f, and products with the second derivatives in the means.
Expansion = tuple[Float[Tensor, " B"], Float[Tensor, "B D"], Float[Tensor, "B D"], Callable[[Vectors], Vectors]]
_DAMPING, _RANGE = 1.0, (1e-8, 1e8)
MAX_ENTRIES = 3000  # at a time, whose 50 nodes of a quadrature fit into the cache of a core


@torch.no_grad()
def laplace(
    entries: Sequence[Entries],
    Y: Float[Tensor, "B D"],
    components: dist.MultivariateNormal,
    start: Float[Tensor, "S B Q"],
    *,
    num_steps: int,
    index: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B S Q"], Float[Tensor, "B S Q Q"], Float[Tensor, "B S"]]:
    r"""Compute Gaussians at modes of ``p(x_n) p(y_n | x_n)``, and the log evidence of each.

    With :math:`\ell_{nd} = \log p(y_{nd} \mid x_n)`, :math:`m_{nd}` the mean of f there and P the precision of p(x), the
    precision of the Gaussian is the Gauss-Newton approximation of the Hessian,

    .. math:: H_n = P + \sum_d h_{nd} J_{nd} J_{nd}^T, \qquad h_{nd} = \max(-\partial^2 \ell_{nd} / \partial m_{nd}^2, 0),
              \qquad J_{nd} = \partial m_{nd} / \partial x_n,

    and the evidence :math:`\log p(y_n, \hat x_n) + \tfrac{Q}{2} \log 2\pi - \tfrac12 \log |H_n|`.  Both are exact where f is
    linear with a constant variance, and the noise Gaussian.  For a :class:`~pyro_lvgp.likelihoods.RowLikelihood` the second
    term of H is :math:`-J_n^T (\partial^2 \ell_n / \partial m_n \partial m_n^T) J_n`.

    Steps are damped (Levenberg-Marquardt) separately for each row, and are rejected if they decrease its log density by more
    than rounding.  The initial damping is as large as the curvature, because long steps from a start far from the mode lead to
    worse modes under little noise.  An accepted step multiplies the damping by a factor, which is smallest where the actual
    increase equals the predicted one.  Consecutive rejected steps multiply the damping by ever larger factors (Nielsen).
    Steps of a row end when one with little damping is predicted to gain less than the rounding error of 1 nat.

    :param entries: p(y | x) of each entry, for each draw of the shared sites; ℓ and H are averaged over the draws.
    :param Y: rows, NaN where missing.
    :param components: p(x): one Gaussian, or one for each start [S], or for each start of each row [S, B].
    :param start: initial latents, S for each row.
    :param num_steps: number of Gauss-Newton steps, at most.
    :param index: indices of the rows, which ``entries`` take beside latents; None if they take latents alone.
    :returns: means, Cholesky factors of the covariances and log evidences.

    Source: Tierney and Kadane (1986), "Accurate approximations for posterior moments"; Schraudolph (2002), "Fast curvature
    matrix-vector products", on the generalised Gauss-Newton matrix; Nielsen (1999), "Damping parameter in Marquardt's method".

    One row of two entries, the second missing, whose function is x itself:

    >>> from pyro_lvgp.likelihoods import Gaussian
    >>> noise, prior = Gaussian(1.0), dist.MultivariateNormal(torch.zeros(1, 2), torch.eye(2).expand(1, 2, 2))
    >>> given = lambda X: LikelihoodPredictive(noise, X, torch.zeros(()), "fitc")
    >>> Y, start = torch.tensor([[2.0, torch.nan]]), torch.zeros(1, 1, 2)
    >>> loc, scale_tril, log_evidence = laplace([given], Y, prior, start, num_steps=10)
    >>> loc.squeeze().round(decimals=3), scale_tril.squeeze().diagonal().square()
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    S, B, Q = start.shape
    indices = () if index is None else (index.repeat(S),)
    observed = ~torch.isnan(Y).repeat(S, 1)
    Y = torch.nan_to_num(Y, entries[0](start.flatten(0, 1), *indices).likelihood.fill_value).repeat(S, 1)
    loc, factors = components.loc, components.scale_tril
    if loc.dim() < 3:
        loc, factors = loc[:, None], factors[:, None]
    loc, factors = loc.expand(S, B, Q).flatten(0, 1), factors.expand(S, B, Q, Q).flatten(0, 1)
    precision = dist.MultivariateNormal(loc, scale_tril=factors).precision_matrix

    def expansion(X: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log density, its gradient and H, of some of the rows."""
        with torch.enable_grad():
            leaf = X.detach().requires_grad_()
            given = (each(leaf, *(x[rows] for x in indices)) for each in entries)
            terms = [_likelihood_expansion(each, leaf, Y[rows], observed[rows]) for each in given]
        value, slope, H = (torch.stack(parts).mean(0) for parts in zip(*terms, strict=True))
        log_prior = dist.MultivariateNormal(loc[rows], scale_tril=factors[rows], validate_args=False).log_prob(X)
        slope = slope + (precision[rows] @ (loc[rows] - X)[..., None]).squeeze(-1)
        H = H + precision[rows]
        return value + log_prior, slope, 0.5 * (H + H.mT)  # exactly symmetric, for argument validation

    X = start.detach().flatten(0, 1).clone()
    value, slope, H = expansion(X, torch.arange(len(X), device=X.device))
    damping = torch.full_like(value, _DAMPING)
    growth = torch.full_like(value, 2.0)
    for _ in progress_bar(range(num_steps), "latents of new rows"):
        step, predicted = _damped_step(slope, H, damping)
        rows = ((predicted > torch.finfo(value.dtype).eps) | (damping >= _DAMPING)).nonzero().squeeze(-1)
        if not len(rows):
            break
        proposal, old = (X + step)[rows], value[rows]
        proposed, new_slope, new_H = expansion(proposal, rows)
        # Steps close to the mode change the log density by no more than rounding, and still reduce the distance to the mode.
        rounding = (10.0 * torch.finfo(old.dtype).eps * old.abs()).clamp_min(torch.finfo(old.dtype).tiny)
        gain_ratio = (proposed - old + rounding) / (predicted[rows] + rounding)
        accepted = gain_ratio >= 0.0
        moved = rows[accepted]
        X[moved], value[moved], slope[moved], H[moved] = (each[accepted] for each in (proposal, proposed, new_slope, new_H))
        factor = (2.0 * (gain_ratio - 1.0).abs()).clamp(1e-3, 2.0)
        damping[rows] = (damping[rows] * torch.where(accepted, factor, growth[rows])).clamp(*_RANGE)
        growth[rows] = torch.where(accepted, 2.0, 2.0 * growth[rows])
    q = dist.MultivariateNormal(X, scale_tril=_scale_tril(H))
    log_evidence = value - q.log_prob(X)
    loc, scale_tril, log_evidence = (x.unflatten(0, (S, B)).transpose(0, 1) for x in (X, q.scale_tril, log_evidence))
    return loc, scale_tril, log_evidence


def _damped_step(
    slope: Float[Tensor, "B Q"], H: Float[Tensor, "B Q Q"], damping: Float[Tensor, " B"]
) -> tuple[Float[Tensor, "B Q"], Float[Tensor, " B"]]:
    """Compute the step of each row, and the increase of its log density that the quadratic approximation predicts."""
    damped = H + torch.diag_embed(damping[:, None] * H.diagonal(dim1=-2, dim2=-1))
    step = torch.cholesky_solve(slope[..., None], safe_cholesky(damped, jitter=0.0, name="damped precision of latents"))
    predicted = (slope[..., None] * step - 0.5 * step * (H @ step)).sum((-2, -1))
    return step[..., 0], predicted


def _scale_tril(precision: Float[Tensor, "B Q Q"]) -> Float[Tensor, "B Q Q"]:
    """Cholesky factor of the inverse, in double precision: precisions of latents of precise data are nearly singular."""
    flipped = safe_cholesky(precision.double().flip(-2, -1), jitter=0.0, name="precision of latents").flip(-2, -1)
    identity = torch.eye(flipped.shape[-1], dtype=flipped.dtype, device=flipped.device)
    return torch.linalg.solve_triangular(flipped.mT, identity, upper=False).to(precision.dtype)


def _likelihood_expansion(
    entries: LikelihoodPredictive, X: Float[Tensor, "B Q"], Y: Tensor, observed: Bool[Tensor, "B D"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B Q"], Float[Tensor, "B Q Q"]]:
    """Log p(y | x), its gradient in x, and its term of the precision H of the latents."""
    mean, variance = entries.f_mean, entries.f_variance
    if isinstance(entries.likelihood, RowLikelihood):
        log_likelihood, in_mean, in_variance, curvature_times = _expansion_of_rows(entries, Y, observed)
    else:
        log_likelihood, in_mean, in_variance, curvature_times = _expansion_of_entries(entries, Y, observed)
    (slope,) = torch.autograd.grad((in_mean * mean + in_variance * variance).sum(), X, retain_graph=True)
    # Jᵀ v is linear in v: its derivatives are the columns of J, Q of them however many outputs there are.
    v = torch.zeros_like(mean, requires_grad=True)
    (JTv,) = torch.autograd.grad(mean, X, v, create_graph=True)
    J = torch.stack([torch.autograd.grad(column.sum(), v, retain_graph=True)[0] for column in JTv.unbind(-1)], -1)
    return log_likelihood, slope, -J.mT @ curvature_times(J)


def _expansion_of_entries(entries: LikelihoodPredictive, Y: Float[Tensor, "B D"], observed: Bool[Tensor, "B D"]) -> Expansion:
    """Log density of rows of independent entries, its derivatives in the moments of f, and products with its second ones.

    The second derivatives in the means are set to zero where they are positive.
    """
    packing = Packing.of(observed)
    params: Any = entries.params
    has_rows = params is not None and params.dim() > 1 and params.shape[-2] == len(Y)
    blocks = [packing.pack(x.expand_as(Y)) for x in (Y, entries.f_mean.detach(), entries.f_variance.detach())]
    number = max(MAX_ENTRIES // Y.shape[1], 1)
    own = packing.pack(params).split(number, -2) if has_rows else repeat(params)
    parts = [
        entries.likelihood.log_predictive_derivatives(*block)
        for block in zip(*(x.split(number) for x in blocks), own, strict=False)
    ]
    log_density, first, second = (packing.unpack(torch.cat(x)) for x in zip(*parts, strict=True))
    curvature = second.clamp_max(0.0)[..., None]
    return log_density.sum(-1), first, 0.5 * (second + first.square()), lambda J: curvature * J


def _expansion_of_rows(entries: LikelihoodPredictive, Y: Float[Tensor, "B D"], observed: Bool[Tensor, "B D"]) -> Expansion:
    """Log density of rows of dependent entries, its derivatives in the moments of f, and products with its Hessians."""
    mean, variance = (x.detach().clone().requires_grad_() for x in (entries.f_mean, entries.f_variance))
    at_moments = LikelihoodPredictive(entries.likelihood, mean, variance, entries.term, entries.params)
    log_likelihood = at_moments.rows(observed).log_prob(Y)
    in_mean, in_variance = torch.autograd.grad(log_likelihood.sum(), (mean, variance), create_graph=True)

    def hessian_times(J: Vectors) -> Vectors:
        columns = [torch.autograd.grad(in_mean, mean, column, retain_graph=True)[0] for column in J.unbind(-1)]
        return torch.stack(columns, -1)

    return log_likelihood.detach(), in_mean.detach(), in_variance.detach(), hessian_times


def gaussian_components(prior: torch.distributions.Distribution) -> tuple[Float[Tensor, " K"], dist.MultivariateNormal]:
    """Log weights and components of a Gaussian prior, or of a mixture of Gaussians.

    :param prior: over one vector, or a Gaussian over each of several.
    :raises ValueError: for any other prior.

    >>> log_weights, components = gaussian_components(dist.Normal(torch.zeros(2), 1.0).to_event(1))
    >>> log_weights, components.batch_shape, components.event_shape
    (tensor([0.]), torch.Size([1]), torch.Size([2]))
    """
    if isinstance(prior, torch.distributions.MixtureSameFamily):
        log_weights, parts = prior.mixture_distribution.logits.log_softmax(-1), prior.component_distribution
    else:
        log_weights, parts = prior.mean.new_zeros(1), prior.expand((1, *prior.batch_shape))
    moments = gaussian_moments(parts)
    if moments is None:
        raise ValueError(
            f"expected a Gaussian over vectors or a mixture of them as prior for method='laplace', got {prior}; pass such a "
            "prior, for example latent_mixture(...), or use method='variational'"
        )
    loc, scale_tril = moments
    return log_weights, dist.MultivariateNormal(loc, scale_tril=scale_tril)
