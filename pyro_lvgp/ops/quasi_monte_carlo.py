"""Randomised quasi-Monte Carlo draws from scrambled Sobol' points with random shifts and permutations."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["qmc_normal"]


def qmc_normal(num_draws: int, normal: Distribution, *, dim: int = -1) -> Float[Tensor, "draws *shape"]:
    r"""Draw from the marginals of a Gaussian by randomised quasi-Monte Carlo.

    .. math::

        f_{sb} = m_b + \sigma_b \, \Phi^{-1}\big(\mathrm{fold}(p_{\pi_b(s)} + u_b)\big), \qquad u_b \sim U(0, 1)^Q, \qquad
        \mathrm{fold}(t) = 1 - \big|2 (t \bmod 1) - 1\big|

    with scrambled Sobol' points p and a random permutation :math:`\pi_b`.  Each draw of a vector b has the marginal
    distribution of b, draws of one vector are negatively dependent, and vectors are independent.  The error of a mean over S
    draws is about :math:`1/S` instead of :math:`1/\sqrt S`, for the mean of a smooth function of one vector and small Q.  The
    fold makes that function periodic in u.

    :param num_draws: number of draws S.
    :param normal: a Gaussian, whose mean m and variance σ² are used.
    :param dim: dimension of the Q entries of a vector.
    :returns: draws along a new first dimension.

    >>> f = qmc_normal(64, torch.distributions.Normal(torch.ones(3, 2), 1.0))
    >>> f.shape, bool(((f.mean(0) - 1.0).abs() < 0.15).all())
    (torch.Size([64, 3, 2]), True)

    Source: Sobol' (1967), "On the distribution of points in a cube and the approximate evaluation of integrals"; Cranley and
    Patterson (1976), "Randomization of number theoretic methods for multiple integration"; Hickernell (2002), "Obtaining
    O(N^{-2+ε}) convergence for lattice quadrature rules", for the fold, the baker's transformation.
    """
    mean, stddev = (moment.movedim(dim, -1) for moment in (normal.mean, normal.variance.sqrt()))
    *batch, size = mean.shape
    points = torch.quasirandom.SobolEngine(size, scramble=True).draw(num_draws, dtype=torch.float64).to(mean.device)
    order = torch.rand(num_draws, *batch, device=mean.device).argsort(0)
    shift = torch.rand(mean.shape, dtype=torch.float64, device=mean.device)
    end = torch.finfo(torch.float64).eps  # the quantiles at 0 and 1 are infinite
    uniform = 1.0 - (2.0 * ((points[order] + shift) % 1.0) - 1.0).abs()
    return (mean + stddev * torch.special.ndtri(uniform.clamp(end, 1.0 - end)).to(mean.dtype)).movedim(-1, dim)
