"""Gibbs sampler of the random-feature latent variable model with Gaussian noise, an exact but slow reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Beta, Categorical, Gamma, Normal
from torch.nn.functional import one_hot, pad

from pyro_lvgp.conjugate.feature_regression import log_partition, weight_posterior
from pyro_lvgp.kernels import random_features
from pyro_lvgp.models import linear_latents

_SHAPE, _RATE = 3.0, 2.0


class Theta(NamedTuple):
    """Parameters of the library's model.

    :param locs: means of the components of the spectral density.
    :param scales: their standard deviations.
    :param kernel_variance: σ_k².
    :param noise: variance σ².
    """

    locs: Float[Tensor, "#S C Q"]
    scales: Float[Tensor, "#S C Q"]
    kernel_variance: Float[Tensor, " #S"]
    noise: Float[Tensor, " #S"]


@dataclass(frozen=True)
class State:
    """State of a number of chains, in float64.

    :param X: latents.
    :param omega: frequencies.
    :param z: component of each frequency.
    :param rest: remainder 1 − v of each stick, stored since it may be smaller than the precision of v.
    :param alpha: concentration parameter.
    :param weights: weights of features of variance one, ``σ_k a_d``.
    :param theta: kernel and noise parameters.
    """

    X: Float[Tensor, "S N Q"]
    omega: Float[Tensor, "S F Q"]
    z: Int[Tensor, "S F"]
    rest: Float[Tensor, "S C-1"]
    alpha: Float[Tensor, " S"]
    weights: Float[Tensor, "S D L"]
    theta: Theta

    def function(self, X: Float[Tensor, "S N Q"]) -> Float[Tensor, "S N D"]:
        """Compute outputs without noise at latents."""
        return random_features(X, self.omega) @ self.weights.mT


@dataclass(frozen=True)
class GibbsRFLVM:
    r"""Gibbs sampler of the posterior of a :class:`~pyro_lvgp.models.RandomFeatureLVM` with one Gaussian noise variance.

    A sweep draws blocks of frequencies by elliptical slice sampling with the weights marginalised; then weights,
    assignments, sticks, concentration and θ from their exact conditionals, and each row of X by elliptical slice sampling
    given the weights.  If θ is unknown it has the prior :math:`\sigma_{cq}^2 \sim s^2\, \mathrm{InvGamma}(3, 2)` and
    :math:`\mu_{cq} \sim N(0, \sigma_{cq}^2)`, where s is that of a kernel with lengthscale √Q.  Both variances have the prior
    InvGamma(3, 2).

    :param fixed: θ, if it is known: the posterior is that of the library's model with these parameters.
    :param concentration: shape and rate of the prior of α.
    :param block_size: number of frequencies drawn together.

    Source: Gundersen, Zhang and Engelhardt (2021), "Latent variable modeling with random features", with the library's
    truncated sticks for their Chinese restaurant process; Murray, Adams and MacKay (2010), "Elliptical slice sampling".
    """

    fixed: Theta | None = None
    concentration: tuple[float, float] = (1.0, 1.0)
    block_size: int = 5

    def prior(self, N: int, D: int, Q: int, *, F: int, C: int, num_chains: int = 1) -> State:
        """Draw independent states from the prior."""
        one = torch.ones(num_chains, dtype=torch.float64)
        alpha = Gamma(self.concentration[0] * one, self.concentration[1] * one).sample()
        rest = Beta(alpha[:, None], one[:, None].expand(-1, C - 1)).sample()
        z = Categorical(_component_weights(rest)).sample(torch.Size([F])).mT
        theta = self.fixed or _components(torch.zeros_like(z[:, :0]), one[:, None, None].expand(-1, 0, Q), C)._replace(
            kernel_variance=_inverse_gamma(_SHAPE * one, _RATE * one), noise=_inverse_gamma(_SHAPE * one, _RATE * one)
        )
        omega = _of(theta.locs, z) + _of(theta.scales, z) * one.new_empty(num_chains, F, Q).normal_()
        weights = theta.kernel_variance.sqrt()[:, None, None] * one.new_empty(num_chains, D, 2 * F).normal_()
        return State(one.new_empty(num_chains, N, Q).normal_(), omega, z, rest, alpha, weights, theta)

    def sweep(self, state: State, Y: Float[Tensor, "#S N D"]) -> State:
        """Draw every variable once; leaves the posterior invariant."""
        for block in torch.randperm(state.omega.shape[-2]).split(self.block_size):
            state = _move_frequencies(state, Y, block)
        state = replace(state, weights=_draw_weights(state, Y))
        state = self._draw_assignments(replace(state, X=_move_latents(state, Y)))
        if self.fixed is not None:
            return state
        residual = Y - state.function(state.X)
        kernel_variance, noise = map(_draw_variance, (state.weights, residual))
        theta = _components(state.z, state.omega, state.rest.shape[-1] + 1)
        return replace(state, theta=theta._replace(kernel_variance=kernel_variance, noise=noise))

    def _draw_assignments(self, state: State) -> State:
        shape, rate = self.concentration
        components = Normal(state.theta.locs.unsqueeze(-3), state.theta.scales.unsqueeze(-3))
        points = components.log_prob(state.omega.unsqueeze(-2)).sum(-1)
        z = Categorical(logits=_component_weights(state.rest).log().unsqueeze(-2) + points).sample()
        counts = one_hot(z, points.shape[-1]).sum(-2).to(points)
        beyond = counts.flip(-1).cumsum(-1).flip(-1) - counts
        rest = Beta(state.alpha[:, None] + beyond[:, :-1], 1.0 + counts[:, :-1]).sample()
        alpha = Gamma((shape + rest.shape[-1]) * torch.ones_like(state.alpha), rate - rest.log().sum(-1)).sample()
        return replace(state, z=z, rest=rest, alpha=alpha)


def elliptical_slice(
    log_likelihood: Callable[[Tensor], Tensor],
    current: Float[Tensor, "*batch K"],
    loc: Float[Tensor, "*batch K"],
    scale: Float[Tensor, "*batch K"],
) -> Float[Tensor, "*batch K"]:
    """Take one step of elliptical slice sampling for each chain of a batch.

    The step leaves ``N(x; loc, scale²) exp(log_likelihood(x))`` invariant.

    :param log_likelihood: from [*batch, K] to [*batch].
    :param current: current states of the chains.
    :param loc: mean of the Gaussian.
    :param scale: its standard deviations.
    """
    centred, other = current - loc, scale * torch.randn_like(current)
    threshold = log_likelihood(current)
    threshold = threshold + torch.rand_like(threshold).log()
    angle = 2.0 * math.pi * torch.rand_like(threshold)
    low, high = angle - 2.0 * math.pi, angle
    state, waiting = current, torch.ones_like(threshold, dtype=torch.bool)
    while waiting.any():
        proposal = loc + centred * angle.cos()[..., None] + other * angle.sin()[..., None]
        accepted = waiting & (log_likelihood(proposal) > threshold)
        state = torch.where(accepted[..., None], proposal, state)
        # In an interval of length zero the proposal is the current point.
        waiting = waiting & ~accepted & (high - low > 1e-9)
        low, high = torch.where(angle < 0.0, angle, low), torch.where(angle < 0.0, high, angle)
        angle = low + (high - low) * torch.rand_like(angle)
    return state


def mean_latents(sampler: GibbsRFLVM, state: State, Y: Float[Tensor, "#S N D"], *, num_sweeps: int) -> Float[Tensor, "S N Q"]:
    """Average X over the second half of the sweeps.

    Each draw is aligned with the last one, since the posterior is invariant to rotations.

    :param state: initial state.
    """
    draws = []
    for sweep in range(num_sweeps):
        state = sampler.sweep(state, Y)
        if 2 * sweep >= num_sweeps:
            draws.append(state.X)
    return torch.stack([turned(X, draws[-1]) for X in draws]).mean(0)


def start(sampler: GibbsRFLVM, Y: Float[Tensor, "N D"], latent_dim: int, *, F: int, C: int) -> State:
    """Draw an initial state from the prior, with X at principal components and half of the variance of the data as noise."""
    N, D = Y.shape
    state = sampler.prior(N, D, latent_dim, F=F, C=C)
    X = linear_latents(Y.double(), latent_dim)[0]
    half = 0.5 * Y.double().var()[None]
    return replace(state, X=X[None], theta=sampler.fixed or state.theta._replace(kernel_variance=half, noise=half))


def turned(X: Float[Tensor, "*S N Q"], towards: Float[Tensor, "*S N Q"]) -> Float[Tensor, "*S N Q"]:
    """Rotate or reflect X to be nearest to other latents."""
    U, _, Vh = torch.linalg.svd(X.mT @ towards)
    return X @ U @ Vh


def _move_frequencies(state: State, Y: Tensor, block: Tensor) -> State:
    def moved(points: Tensor) -> State:
        return replace(state, omega=state.omega.index_copy(-2, block, points.unflatten(-1, (len(block), -1))))

    def log_likelihood(points: Tensor) -> Tensor:
        return log_partition(weight_posterior(*_sites(moved(points), Y))).sum(-1)

    gaussian = (state.omega, _of(state.theta.locs, state.z), _of(state.theta.scales, state.z))
    return moved(elliptical_slice(log_likelihood, *(values[:, block].flatten(-2) for values in gaussian)))


def _move_latents(state: State, Y: Tensor) -> Tensor:
    def log_likelihood(X: Tensor) -> Tensor:
        return -0.5 * (Y - state.function(X)).square().sum(-1) / state.theta.noise[:, None]

    return elliptical_slice(log_likelihood, state.X, torch.zeros_like(state.X), torch.ones_like(state.X))


def _sites(state: State, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute features of variance σ_k², and the Gaussian sites of their outputs."""
    kernel_stddev, precision = state.theta.kernel_variance.sqrt(), state.theta.noise.reciprocal()[:, None, None]
    features = kernel_stddev[:, None, None] * random_features(state.X, state.omega)
    return features, precision * Y, precision.expand(*features.shape[:-1], 1)


def _draw_weights(state: State, Y: Tensor) -> Tensor:
    posterior = weight_posterior(*_sites(state, Y))
    noise = torch.randn_like(posterior.mean)[..., None]
    away = torch.linalg.solve_triangular(posterior.precision_tril.mT, noise, upper=True).squeeze(-1)
    return state.theta.kernel_variance.sqrt()[:, None, None] * (posterior.mean + away)


def _draw_variance(values: Tensor) -> Tensor:
    """Draw the variance of the entries of a matrix with mean zero."""
    squares = values.square().sum((-1, -2))
    return _inverse_gamma(_SHAPE + 0.5 * values[0].numel() * torch.ones_like(squares), _RATE + 0.5 * squares)


def _components(z: Tensor, omega: Tensor, number: int) -> Theta:
    """Draw means and scales of the components given their frequencies; kernel and noise variances are NaN."""
    (S, _, Q), member = omega.shape, one_hot(z, number).to(omega).mT
    counts = member.sum(-1, keepdim=True)
    mean = member @ omega / (1.0 + counts)
    rate = _RATE / (4.0 * math.pi**2 * Q) + 0.5 * (member @ omega.square() - (1.0 + counts) * mean.square())
    scales = _inverse_gamma((_SHAPE + 0.5 * counts).expand(rate.shape), rate).sqrt()
    locs = mean + scales / (1.0 + counts).sqrt() * torch.randn_like(mean)
    return Theta(locs, scales, *omega.new_full((2, S), math.nan))


def _of(values: Tensor, z: Tensor) -> Tensor:
    """Select the row of the component of each frequency."""
    rows = values.expand(len(z), *values.shape[-2:])
    return rows.gather(-2, z[..., None].expand(*z.shape, rows.shape[-1]))


def _inverse_gamma(shape: Tensor, rate: Tensor) -> Tensor:
    return rate / Gamma(shape, torch.ones_like(shape)).sample()


def _component_weights(rest: Tensor) -> Tensor:
    return pad(1.0 - rest, (0, 1), value=1.0) * pad(rest, (1, 0), value=1.0).cumprod(-1)
