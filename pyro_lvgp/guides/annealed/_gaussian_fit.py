"""Gaussians with large bounds, by a deterministic objective: means, diagonal and full covariances."""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.guides.annealed._ascent import LEAST_RISE, Ascent
from pyro_lvgp.guides.annealed._joint_density import JointDensity, antithetic_noise

_SAMPLE_SIZES = (8, 32)
_MAX_ITERATIONS = 100  # for each sample
_MAX_EVALUATIONS = 150
_NUM_HESSIANS = 4
_MAX_NEWTON_STEPS = 4
_LEAST_EIGENVALUE = 1e-2  # of an expected Hessian in units of scales, so that these grow at most tenfold


def mean_field_optimum(
    density: JointDensity, loc: Float[Tensor, " P"], stddev: Float[Tensor, " P"]
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    r"""Return mean m and standard deviations s of the diagonal Gaussian with the largest bound, for fixed draws.

    .. math:: \max_{m,\, s}\; \frac1M \sum_{j=1}^M \log p(m + s\, \epsilon_j) + \sum_i \log s_i

    by L-BFGS, first with few draws :math:`\epsilon_j`, then with more.

    :param density: the density.
    :param loc: mean of the first iterate.
    :param stddev: standard deviations of the first iterate, the units of the steps.

    Source: Giordano, Ingram and Broderick (2024), "Black box variational inference with a deterministic objective: faster,
    more accurate, and even more black box"; for samples that grow, Burroni, Domke and Sheldon (2023), "Sample average
    approximation for black-box VI".
    """
    for num_draws in _SAMPLE_SIZES:
        loc, stddev = _optimum_of_sample(density, loc, stddev, antithetic_noise(loc, num_draws, seed=1))
    return loc, stddev


def _optimum_of_sample(density: JointDensity, loc: Tensor, stddev: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviations with the largest average over this sample."""

    def gaussian(steps: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_ratio = steps.to(loc)
        return loc + stddev * shift, stddev * log_ratio.exp()

    def bound(steps: Tensor) -> tuple[float, Tensor]:
        mean, scale = gaussian(steps)
        value, scores = density.log_joint_and_score(mean + scale * noise)
        gradient = torch.stack([stddev * scores.mean(0), (scale * noise * scores).mean(0) + 1.0])
        return value / len(noise) + steps[1].sum().item(), gradient

    # Double precision, for the differences of values in line searches.
    start = torch.zeros(2, len(loc), dtype=torch.float64, device=loc.device)
    return gaussian(Ascent(bound, start).run(max_iter=_MAX_ITERATIONS, max_eval=_MAX_EVALUATIONS))


def full_covariance_optimum(
    density: JointDensity, loc: Float[Tensor, " P"], stddev: Float[Tensor, " P"], bound: float
) -> tuple[Float[Tensor, " P"], Float[Tensor, "P P"]] | None:
    r"""Return mean m and Cholesky factor L of a Gaussian with a larger bound than a diagonal one.

    .. math:: (L L^\top)^{-1} \leftarrow -E_q[\nabla^2 \log p], \qquad m \leftarrow m + L L^\top\, E_q[\nabla \log p]

    with :math:`q = N(m, L L^\top)`, while the bound rises; a fixed point has the largest bound.  Hessians are differences of
    scores in coordinates whitened by q.  Negative eigenvalues change their sign.  None if the first step lowers the bound, or
    leads where the model is not defined.

    :param density: the density.
    :param loc: first mean.
    :param stddev: first standard deviations.
    :param bound: bound of the diagonal Gaussian.

    Source: Opper and Archambeau (2009), "The variational Gaussian approximation revisited", eq. 11; Khan and Lin (2017),
    "Conjugate-computation variational inference", for steps along natural gradients.
    """
    best, largest, previous = None, bound, (loc, stddev.diag())
    for _ in range(_MAX_NEWTON_STEPS):
        following = _newton_step(density, *previous)
        if following is None or not (bound := density.bound(*following)) > largest:
            break
        best, rise, largest = following, bound - largest, bound
        if rise < LEAST_RISE:
            break
        previous = following
    return best


def _newton_step(density: JointDensity, loc: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the next mean and factor; None where the model is not defined."""
    centres = loc + antithetic_noise(loc, _NUM_HESSIANS, seed=2) @ factor.mT
    steps = factor.mT[:, None]
    points = torch.stack([centres - steps, centres + steps])
    _, scores = density.log_joint_and_score(points.flatten(0, 2))
    below, above = (scores @ factor).reshape(points.shape)
    hessian, gradient = 0.5 * (below - above).mean(1).double(), 0.5 * (below + above).mean((0, 1))
    if not hessian.isfinite().all():
        return None
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    root = vectors * values.abs().clamp_min(_LEAST_EIGENVALUE).rsqrt()
    white = torch.linalg.qr(root.mT).R.mT  # white whiteᵀ = root rootᵀ
    white = (white * white.diagonal().sign()).to(factor)
    return loc + factor @ (white @ (white.mT @ gradient)), factor @ white
