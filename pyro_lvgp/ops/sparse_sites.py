r"""The posterior of a sparse Gaussian process under Gaussian sites: pure tensor functions.

With inducing values :math:`u = f(Z) = L v`, :math:`K_{uu} = L L^T` and whitened :math:`v \sim N(0, I)`, every site here is a
Gaussian in one linear function :math:`g_r^T v`, with precision :math:`\lambda_r` and information :math:`\eta_r`, its precision
times its mean.  Their natural parameters add up:

.. math::

    H = \sum_r \lambda_r g_r g_r^T, \quad h = \sum_r \eta_r g_r, \qquad q(v) = N\big(J^{-1} h,\; J^{-1}\big), \quad J = I + H .

- Sites on the inducing values themselves, summed over data ("nearest"): the columns of :math:`G = L^T`.
- Sites on :math:`f_n`, projected through its conditional mean ("projected"): those of :math:`G = A = L^{-1} K_{uf}`.

The eigenvalues of J are at least 1, so that no matrix is singular, and a site without information has
:math:`\lambda_r = \eta_r = 0`.  Time is O(N M² + M³) and memory O(N M) for N data and M inducing points.

Source: section 3.4 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders", for the
second form; Titsias (2009) for both.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp.ops.gaussian_sites import positive_variance
from pyro_lvgp.ops.linalg import invert_lower

__all__ = [
    "Sites",
    "aggregate",
    "marginals",
    "nearest",
    "posterior",
    "reversed_precision",
    "sum_at",
    "transfer",
]


class Sites(NamedTuple):
    """Natural parameters of the Gaussian factor of the whitened inducing values that the data contribute.

    :param precision: precision H.
    :param information: precision times mean, h.
    """

    precision: Float[Tensor, "*batch M M"]
    information: Float[Tensor, "*batch M"]


def aggregate(
    G: Float[Tensor, "*#batch M R"], precision: Float[Tensor, "*#batch R"], information: Float[Tensor, "*#batch R"]
) -> Sites:
    """Add up the sites on R linear functions ``gᵀv`` to one factor ``H = G Λ Gᵀ``, ``h = G η``.

    :param G: the functions, in columns.
    :param precision: λ, zero for a site without information.
    :param information: η.

    >>> aggregate(torch.eye(2), torch.tensor([4.0, 0.0]), torch.tensor([2.0, 0.0])).information
    tensor([2., 0.])
    """
    return Sites((G * precision[..., None, :]) @ G.mT, (G @ information[..., None]).squeeze(-1))


def reversed_precision(sites: Sites) -> Float[Tensor, "*batch M M"]:
    """Compute the posterior precision ``J = I + H`` of the whitened inducing values, with rows and columns reversed.

    :param sites: the factor of the data.

    >>> reversed_precision(Sites(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)))
    tensor([[3., 0.],
            [0., 2.]])
    """
    H = sites.precision
    return (torch.eye(H.shape[-1], dtype=H.dtype, device=H.device) + H).flip((-2, -1))


def posterior(
    sites: Sites, reversed_tril: Float[Tensor, "*batch M M"]
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch M M"]]:
    """Compute mean ``J⁻¹ h`` and Cholesky factor R of the covariance ``R Rᵀ = J⁻¹`` of the whitened inducing values.

    :param sites: the factor of the data.
    :param reversed_tril: lower Cholesky factor of :func:`reversed_precision`.

    >>> sites = Sites(3.0 * torch.eye(1), torch.tensor([2.0]))
    >>> posterior(sites, torch.linalg.cholesky(reversed_precision(sites)))
    (tensor([0.5000]), tensor([[0.5000]]))
    """
    # In the original order the factor of J is upper triangular, and its inverse transposed is the lower triangular R.
    R = invert_lower(reversed_tril.flip((-2, -1)).mT)
    return (R @ (R.mT @ sites.information[..., None])).squeeze(-1), R


def marginals(
    A: Float[Tensor, "*#batch M N"],
    variance: Float[Tensor, "*#batch N"],
    v: Float[Tensor, "*#batch M"],
    scale_tril: Float[Tensor, "*#batch M M"] | None = None,
) -> tuple[Float[Tensor, "*batch N"], Float[Tensor, "*batch N"]]:
    """Mean ``Aᵀv`` and variance ``k − diag(AᵀA)`` of f given v; plus ``diag(AᵀR RᵀA)`` for v ~ N(v, R Rᵀ).

    :param A: L⁻¹ K_uf.
    :param variance: k, the prior variances of f.
    :param v: whitened inducing values, or their means.
    :param scale_tril: Cholesky factor R of the covariance of v; None if v is known.

    >>> marginals(torch.tensor([[0.6]]), torch.ones(1), torch.tensor([2.0]))
    (tensor([1.2000]), tensor([0.6400]))
    """
    mean = (A.mT @ v[..., None]).squeeze(-1)
    result = variance - A.square().sum(-2)
    if scale_tril is not None:
        result = result + (scale_tril.mT @ A).square().sum(-2)
    mean, result = torch.broadcast_tensors(mean, positive_variance(result, variance))
    return mean, result


def transfer(sites: Sites, C: Float[Tensor, "*#batch K M"]) -> Sites:
    r"""Transfer a factor to other inducing points, whose whitened values are :math:`v' \sim N(0, I)`.

    With :math:`v = C^T v' + e` and :math:`e \sim N(0, D)`, :math:`D = I - C^T C`, marginalising e gives

    .. math:: H' = C (I + H D)^{-1} H C^T, \qquad h' = C (I + H D)^{-1} h .

    The new inducing values then have the posterior of the process at the new points.  The transfer is exact if the new
    inducing points include the old ones.

    :param sites: the factor.
    :param C: covariance of the new and the old whitened values.

    Source: Bui, Nguyen and Turner (2017), "Streaming sparse Gaussian process approximations", for the representation of old
    data by the old inducing points.

    >>> transfer(Sites(torch.eye(1), torch.ones(1)), torch.tensor([[1.0], [0.0]])).precision
    tensor([[1., 0.],
            [0., 0.]])
    """
    H, h = sites
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    solved = torch.linalg.solve(identity + H @ (identity - C.mT @ C), torch.cat([H @ C.mT, h[..., None]], -1))
    precision = C @ solved[..., :-1]
    return Sites(0.5 * (precision + precision.mT), (C @ solved[..., -1:]).squeeze(-1))


def nearest(similarity: Float[Tensor, "*batch M N"], num_nearest: int) -> Int[Tensor, "*batch N T"]:
    """Find the indices of the T inducing points with the greatest similarity to each input.

    :param similarity: of each inducing point to each input.
    :param num_nearest: number T of points for each input.

    >>> nearest(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]]), 2)
    tensor([[1, 2],
            [0, 2]])
    """
    return similarity.mT.topk(num_nearest, dim=-1).indices


def sum_at(index: Int[Tensor, "*#batch N T"], values: Float[Tensor, "*#batch N T"], num_inducing: int) -> Tensor:
    """Add up, for each inducing point, the values of the inputs that have it among their T nearest: ``[*batch, M]``.

    :param index: indices of the T inducing points nearest to each input.
    :param values: a value for each input and each of its T inducing points.
    :param num_inducing: number of inducing points M.

    >>> sum_at(torch.tensor([[1, 2], [0, 2]]), torch.ones(2, 2), 3)
    tensor([1., 1., 2.])
    """
    index, values = torch.broadcast_tensors(index, values)
    total = values.new_zeros(*values.shape[:-2], num_inducing)
    return total.scatter_add(-1, index.flatten(-2), values.flatten(-2))
