"""Quasi-Monte Carlo draws: randomised, from scrambled Sobol' points, or the same at every call."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["antithetic_normals", "qmc_normal"]


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


def antithetic_normals(num_draws: int, dim: int) -> Float[Tensor, "draws dim"]:
    r"""Standard normal vectors for expectations, with the same values at every call.

    Half of the draws are quantiles :math:`\Phi^{-1}(u_{sk})` of an additive recurrence

    .. math::

        u_{sk} = \big(\tfrac12 + s\, \phi^{-k}\big) \bmod 1, \qquad \phi^{d + 1} = \phi + 1, \qquad k = 1 \dots d,

    multiplied by a matrix that makes their second moments those of a standard normal; the others are their negatives.  Means
    over the draws are exact for polynomials of degree 3.

    :param num_draws: number of draws, even and at least four times the dimension.
    :param dim: dimension d of a vector.
    :returns: draws in double precision.

    >>> z = antithetic_normals(8, 2)
    >>> z.shape, torch.allclose(z.mT @ z / 8, torch.eye(2, dtype=torch.float64))
    (torch.Size([8, 2]), True)

    Source: Roberts (2018), "The unreasonable effectiveness of quasirandom sequences"; Owen (2013), "Monte Carlo theory,
    methods and examples", section 8.2, for antithetic draws.
    """
    ratio = 2.0
    for _ in range(64):  # of contractions to the root
        ratio = (1.0 + ratio) ** (1.0 / (dim + 1))
    index, power = (torch.arange(1, n + 1, dtype=torch.float64) for n in (num_draws // 2, dim))
    half = torch.special.ndtri((0.5 + index[:, None] * ratio**-power) % 1.0)
    tril = torch.linalg.cholesky(half.mT @ half / len(half))
    half = torch.linalg.solve_triangular(tril, half.mT, upper=False).mT
    return torch.cat([half, -half])
