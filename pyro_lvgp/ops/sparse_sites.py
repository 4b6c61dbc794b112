r"""The posterior of a sparse Gaussian process under Gaussian sites: pure tensor functions.

With inducing values :math:`u = f(Z) = L v`, :math:`K_{uu} = L L^T` and whitened :math:`v \sim N(0, I)`, every site here is a
Gaussian in one linear function :math:`g_r^T v`, with precision :math:`\lambda_r` and information :math:`\eta_r`, its precision
times its mean.  Their natural parameters add up:

.. math::

    H = \sum_r \lambda_r g_r g_r^T, \quad h = \sum_r \eta_r g_r, \qquad q(v) = N\big(J^{-1} h,\; J^{-1}\big), \quad J = I + H .

- Sites on the inducing values themselves, summed over data ("nearest"): the columns of :math:`G = L^T`.
- Sites on :math:`f_n`, projected through its conditional mean ("projected"): those of :math:`G = A = L^{-1} K_{uf}`.

The eigenvalues of J are at least 1, so that nothing is ever singular, and a site that says nothing has
:math:`\lambda_r = \eta_r = 0`.  Time is O(N M² + M³) and memory O(N M) for N data and M inducing points.

Source: section 3.4 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders", for the
second form; Titsias (2009) for both.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp._compile.recording import assume
from pyro_lvgp.ops.gaussian_sites import _positive
from pyro_lvgp.ops.linalg import invert_lower, safe_cholesky


class Sites(NamedTuple):
    """All that data say about the whitened inducing values: a Gaussian factor by its natural parameters.

    :param precision: precision H.
    :param information: precision times mean, h.
    """

    precision: Float[Tensor, "*batch M M"]
    information: Float[Tensor, "*batch M"]


def aggregate(
    G: Float[Tensor, "*#batch M R"], precision: Float[Tensor, "*#batch R"], information: Float[Tensor, "*#batch R"]
) -> Sites:
    """Sites on the R linear functions ``gᵀv``, as one factor ``H = G Λ Gᵀ``, ``h = G η``.

    :param G: the functions, in columns.
    :param precision: λ, zero where a site says nothing.
    :param information: η.

    >>> aggregate(torch.eye(2), torch.tensor([4.0, 0.0]), torch.tensor([2.0, 0.0])).information
    tensor([2., 0.])
    """
    return Sites((G * precision[..., None, :]) @ G.mT, (G @ information[..., None]).squeeze(-1))


def posterior(
    sites: Sites, in_double: Callable[[], Sites] | None = None
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch M M"]]:
    """Mean and Cholesky factor of the covariance of the whitened inducing values, ``J⁻¹ h`` and ``R Rᵀ = J⁻¹``.

    :param sites: what the data say.
    :param in_double: gives the same in double precision, for sites so sharp that rounding of H in single is more than I.

    >>> posterior(Sites(3.0 * torch.eye(1), torch.tensor([2.0])))
    (tensor([0.5000]), tensor([[0.5000]]))
    """
    H, h = sites
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    # With its rows and columns in reverse, the factor of J is upper triangular, and its inverse transposed a lower R.
    J = (identity + H).flip((-2, -1))
    reverse, info = torch.linalg.cholesky_ex(J)
    if not assume(~(info > 0).any()):
        if in_double is not None and H.dtype != torch.float64:
            # Jitter would be more than I, too: what sites say nothing about would be known.
            loc, R = posterior(in_double())
            return loc.to(h), R.to(h)
        reverse = safe_cholesky(J, name="I + H")
    R = invert_lower(reverse.flip((-2, -1)).mT)
    return (R @ (R.mT @ h[..., None])).squeeze(-1), R


def marginals(
    A: Float[Tensor, "*#batch M N"],
    variance: Float[Tensor, "*#batch N"],
    v: Float[Tensor, "*#batch M"],
    scale_tril: Float[Tensor, "*#batch M M"] | None = None,
) -> tuple[Float[Tensor, "*batch N"], Float[Tensor, "*batch N"]]:
    """Mean ``Aᵀv`` and variance ``k − diag(AᵀA)`` of f given v; ``+ diag(AᵀR RᵀA)`` for v ~ N(v, R Rᵀ).

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
    mean, result = torch.broadcast_tensors(mean, _positive(result, variance))
    return mean, result


def transfer(sites: Sites, C: Float[Tensor, "*#batch K M"]) -> Sites:
    r"""The same factor seen from other inducing points, whose whitened values are :math:`v' \sim N(0, I)`.

    With :math:`v = C^T v' + e` and :math:`e \sim N(0, D)`, :math:`D = I - C^T C`, it is, e integrated out,

    .. math:: H' = C (I + H D)^{-1} H C^T, \qquad h' = C (I + H D)^{-1} h .

    So the new inducing values have the posterior that the process had there before.  Nothing is lost if the old points are
    among the new.

    :param sites: the factor.
    :param C: covariance of the new and the old whitened values.

    Source: Bui, Nguyen and Turner (2017), "Streaming sparse Gaussian process approximations", in its way of seeing old data
    through old inducing points.

    >>> transfer(Sites(torch.eye(1), torch.ones(1)), torch.tensor([[1.0], [0.0]])).precision
    tensor([[1., 0.],
            [0., 0.]])
    """
    H, h = sites
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    seen = torch.linalg.solve(identity + H @ (identity - C.mT @ C), torch.cat([H @ C.mT, h[..., None]], -1))
    precision = C @ seen[..., :-1]
    return Sites(0.5 * (precision + precision.mT), (C @ seen[..., -1:]).squeeze(-1))


def nearest(similarity: Float[Tensor, "*batch M N"], num_nearest: int) -> Int[Tensor, "*batch N T"]:
    """Indices of the T inducing points that are most similar to each input.

    :param similarity: of each inducing point to each input.
    :param num_nearest: number T of points for each input.

    >>> nearest(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]]), 2)
    tensor([[1, 2],
            [0, 2]])
    """
    return similarity.mT.topk(num_nearest, dim=-1).indices


def sum_at(index: Int[Tensor, "*#batch N T"], values: Float[Tensor, "*#batch N T"], num_inducing: int) -> Tensor:
    """Sums ``[*batch, M]`` of what each input says about each of its T nearest inducing points.

    :param index: of these inducing points.
    :param values: what is said of them.
    :param num_inducing: number of inducing points M.

    >>> sum_at(torch.tensor([[1, 2], [0, 2]]), torch.ones(2, 2), 3)
    tensor([1., 1., 2.])
    """
    index, values = torch.broadcast_tensors(index, values)
    total = values.new_zeros(*values.shape[:-2], num_inducing)
    return total.scatter_add(-1, index.flatten(-2), values.flatten(-2))
