"""Factor analysis of data with missing entries, by the EM algorithm."""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.ops.low_rank import factor_mean, factor_posterior

__all__ = ["factor_analysis"]

_NOISE_SHARE = 1e-3  # the least noise variance, relative to the mean square of its column


def factor_analysis(
    Y: Float[Tensor, "N D"], rank: int, *, num_iterations: int = 50
) -> tuple[Float[Tensor, "D r"], Float[Tensor, " D"]]:
    r"""Fit :math:`y_n \sim N(0, W W^T + \Psi)` to the observed entries of rows by maximum likelihood.

    Each step computes the posterior of the factors of every row, given its observed entries, and from it

    .. math::

        w_d = \Big(\sum_n E[z_n z_n^T]\Big)^{-1} \sum_n y_{nd} E[z_n], \qquad
        \psi_d = \frac{1}{N_d} \sum_n y_{nd}^2 - w_d^T y_{nd} E[z_n]

    with sums over the :math:`N_d` rows in which column d is observed.  No step decreases the likelihood, as long as no
    :math:`\psi_d` is below a thousandth of its column's mean square, to which it is then increased.  The start is the singular
    value decomposition of the data with zeros at missing entries.

    :param Y: centred data, NaN where missing.  Columns of zeros have no loadings and a noise variance of 0.
    :param rank: number r of factors.
    :param num_iterations: number of steps.
    :returns: loadings W and noise variances ψ.

    >>> z = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)[:, None]
    >>> W, noise = factor_analysis(z @ torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64), 1)
    >>> (W / W[0]).squeeze()
    tensor([ 1.,  2., -1.], dtype=torch.float64)

    Source: Rubin and Thayer (1982), "EM algorithms for ML factor analysis"; Bishop (2006), section 12.2.4.
    """
    observed, N = ~torch.isnan(Y), len(Y)
    numbers = observed.sum(0).clamp_min(1)
    scale = (torch.nan_to_num(Y).square().sum(0) / numbers).sqrt()
    y = torch.nan_to_num(Y) / torch.where(scale > 0.0, scale, 1.0)  # each observed column has a mean square of 1
    _, singular, VT = torch.linalg.svd(y, full_matrices=False)
    loadings = torch.zeros_like(y[0])[:, None].repeat(1, rank)
    loadings[:, : len(VT)] = (VT.mT * singular / N**0.5)[:, :rank]
    noise = (1.0 - loadings.square().sum(-1)).clamp_min(_NOISE_SHARE)
    identity = torch.eye(rank).to(y)
    for _ in range(num_iterations):
        posterior = factor_posterior(loadings, noise, observed)
        z = factor_mean(posterior, y)
        second = z[..., None] * z[..., None, :] + torch.cholesky_solve(identity, posterior.scale_tril)
        gram, cross = torch.einsum("nd,nij->dij", observed.to(y), second), y.mT @ z
        loadings = torch.linalg.solve(gram, cross)
        noise = ((y.square().sum(0) - (loadings * cross).sum(-1)) / numbers).clamp_min(_NOISE_SHARE)
    return scale[:, None] * loadings, scale.square() * noise
