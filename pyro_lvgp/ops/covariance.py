"""Covariance functions: pure tensor functions that broadcast over leading batch dimensions.

The hyperparameters are tensors.  Each function can be differentiated twice, vmapped and compiled.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "cosine",
    "exact_squared_distance",
    "linear",
    "matern",
    "periodic",
    "rational_quadratic",
    "rbf",
    "squared_distance",
]


def squared_distance(X: Float[Tensor, "*#batch N Q"], Z: Float[Tensor, "*#batch M Q"]) -> Float[Tensor, "*batch N M"]:
    """Compute squared distances ``‖x_n − z_m‖²`` by inner products, in N·M memory for any number of columns.

    With c the mean of Z,  ‖x − z‖² = ‖x − c‖² + ‖z − c‖² − 2 (x − c)ᵀ(z − c).

    The rounding error is about ``‖x − c‖²`` times the machine epsilon: use :func:`exact_squared_distance` where small
    distances matter.  Derivatives of every order are those of the unclamped formula.

    :param X: N points.
    :param Z: M points.

    >>> squared_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(1, 2))
    tensor([[ 0.],
            [25.]])
    """
    # The result does not depend on c, so that c needs no gradient.
    c = Z.detach().mean(-2, keepdim=True)
    return _squared_distance_of_centred(X - c, Z - c)


def _squared_distance_of_centred(X: Tensor, Z: Tensor) -> Tensor:
    if X.shape[-1] == 1:  # differences of one column need no more memory, and are exact
        return exact_squared_distance(X, Z)
    norms = X.square().sum(-1, keepdim=True) + Z.square().sum(-1).unsqueeze(-2)
    squared = torch.sub(norms, X @ Z.mT, alpha=2.0)
    # max(squared, 0), whose derivatives are not zeroed: coincident points have a Hessian.
    return squared - squared.detach().clamp_max(0.0)


def exact_squared_distance(X: Float[Tensor, "*#batch N Q"], Z: Float[Tensor, "*#batch M Q"]) -> Float[Tensor, "*batch N M"]:
    """Compute squared distances ``‖x_n − z_m‖²`` by differences: exactly 0 at coincident points, in N·M·Q memory.

    :param X: N points.
    :param Z: M points.

    >>> exact_squared_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(1, 2))
    tensor([[ 0.],
            [25.]])
    """
    return (X.mT[..., :, None] - Z.mT[..., None, :]).square().sum(-3)


def rbf(
    X: Float[Tensor, "*#batch N Q"],
    Z: Float[Tensor, "*#batch M Q"],
    lengthscale: Float[Tensor, "*#batch #Q"],
    variance: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch N M"]:
    """Squared exponential covariance ``σ² exp(−½ Σ_q (x_q − z_q)² / ℓ_q²)``.

    :param X: N inputs.
    :param Z: M inputs.
    :param lengthscale: ℓ, one per column or one for all, in units of the inputs.
    :param variance: σ².

    Source: Rasmussen and Williams (2006), eq. 4.9.

    >>> rbf(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2), torch.tensor(2.0))
    tensor([[0.7358]])
    """
    return variance[..., None, None] * (-0.5 * _squared_distance_of_centred(*_centre_and_scale(lengthscale, X, Z))).exp()


def rational_quadratic(
    X: Float[Tensor, "*#batch N Q"],
    Z: Float[Tensor, "*#batch M Q"],
    lengthscale: Float[Tensor, "*#batch #Q"],
    variance: Float[Tensor, "*#batch"],
    alpha: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch N M"]:
    """Rational quadratic covariance ``σ² (1 + Σ_q (x_q − z_q)² / (2 α ℓ_q²))^(−α)``.

    :param X: N inputs.
    :param Z: M inputs.
    :param lengthscale: ℓ, one per column or one for all, in units of the inputs.
    :param variance: σ².
    :param alpha: α; the covariance tends to :func:`rbf` for large α.

    Source: Rasmussen and Williams (2006), eq. 4.19.

    >>> one = torch.tensor(1.0)
    >>> rational_quadratic(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]), torch.ones(1), one, one)
    tensor([[1.0000, 0.3333]])
    """
    squared, alpha = _squared_distance_of_centred(*_centre_and_scale(lengthscale, X, Z)), alpha[..., None, None]
    return variance[..., None, None] * (-alpha * torch.log1p(squared / (2.0 * alpha))).exp()


def matern(
    X: Float[Tensor, "*#batch N Q"],
    Z: Float[Tensor, "*#batch M Q"],
    lengthscale: Float[Tensor, "*#batch #Q"],
    variance: Float[Tensor, "*#batch"],
    nu: float,
) -> Float[Tensor, "*batch N M"]:
    """Matérn covariance of smoothness ν = ½, 3⁄2 or 5⁄2.

    With r² = Σ_q (x_q − z_q)² / ℓ_q², it is σ² times  e^{−r};  (1 + √3 r) e^{−√3 r};  (1 + √5 r + 5r²/3) e^{−√5 r}.

    First and second derivatives are exact at coincident points for ν = 3⁄2 and 5⁄2.  The covariance of ν = ½ has a
    cusp there, at which they are set to 0.

    :param X: N inputs.
    :param Z: M inputs.
    :param lengthscale: ℓ, one per column or one for all, in units of the inputs.
    :param variance: σ².
    :param nu: ν, one of 0.5, 1.5, 2.5.

    Source: Rasmussen and Williams (2006), eqs. 4.16 and 4.17.

    >>> matern(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1), torch.tensor(1.0), 0.5)
    tensor([[0.3679]])
    """
    r2 = exact_squared_distance(*_centre_and_scale(lengthscale, X, Z))
    # √ has no derivative at 0.  Where r is below rounding, the result is the first terms of the series in r², and the argument
    # of √ is 1, because NaN in the branch that torch.where discards would make the gradient NaN.
    apart = r2 > torch.finfo(r2.dtype).eps ** 2
    r = torch.where(apart, r2, 1.0).sqrt()
    if nu == 0.5:
        correlation = torch.where(apart, (-r).exp(), 1.0)
    elif nu == 1.5:
        a = math.sqrt(3.0) * r
        correlation = torch.where(apart, (1.0 + a) * (-a).exp(), 1.0 - 3.0 / 2.0 * r2)
    else:
        a = math.sqrt(5.0) * r
        correlation = torch.where(apart, (1.0 + a + a.square() / 3.0) * (-a).exp(), 1.0 - 5.0 / 6.0 * r2)
    return variance[..., None, None] * correlation


def periodic(
    X: Float[Tensor, "*#batch N Q"],
    Z: Float[Tensor, "*#batch M Q"],
    period: Float[Tensor, "*#batch #Q"],
    lengthscale: Float[Tensor, "*#batch #Q"],
    variance: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch N M"]:
    """Periodic covariance ``σ² exp(−2 Σ_q sin²(π (x_q − z_q) / p_q) / ℓ_q²)``.

    It is the RBF covariance of the points (cos 2πx/p, sin 2πx/p) on a circle, whose squared distance is 4 sin²(πd/p).

    :param X: N inputs.
    :param Z: M inputs.
    :param period: p, one per column or one for all, in units of the inputs.
    :param lengthscale: ℓ, one per column or one for all, without units.
    :param variance: σ².

    Source: MacKay (1998), "Introduction to Gaussian processes"; Rasmussen and Williams (2006), eq. 4.31.

    >>> one = torch.ones(1)
    >>> periodic(torch.zeros(1, 1), torch.tensor([[0.25], [3.0]]), one, one, torch.tensor(1.0))
    tensor([[0.3679, 1.0000]])
    """
    ell = lengthscale.unsqueeze(-2)
    X, Z = (2.0 * math.pi * x for x in _centre_and_scale(period, X, Z))
    X = torch.cat([X.cos() / ell, X.sin() / ell], -1)
    Z = torch.cat([Z.cos() / ell, Z.sin() / ell], -1)
    return variance[..., None, None] * (-0.5 * squared_distance(X, Z)).exp()


def cosine(
    X: Float[Tensor, "*#batch N Q"],
    Z: Float[Tensor, "*#batch M Q"],
    period: Float[Tensor, "*#batch #Q"],
    variance: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch N M"]:
    """Cosine covariance ``σ² Π_q cos(2π (x_q − z_q) / p_q)``.

    :param X: N inputs.
    :param Z: M inputs.
    :param period: p, one per column or one for all, in units of the inputs.
    :param variance: σ².

    >>> cosine(torch.zeros(1, 1), torch.tensor([[0.5], [3.0]]), torch.ones(1), torch.tensor(2.0))
    tensor([[-2.,  2.]])
    """
    X, Z = (2.0 * math.pi * x for x in _centre_and_scale(period, X, Z))
    return variance[..., None, None] * (X[..., :, None, :] - Z[..., None, :, :]).cos().prod(-1)


def linear(
    X: Float[Tensor, "*#batch N Q"], Z: Float[Tensor, "*#batch M Q"], variance: Float[Tensor, "*#batch #Q"]
) -> Float[Tensor, "*batch N M"]:
    """Linear covariance ``Σ_q v_q x_q z_q``.

    :param X: N inputs.
    :param Z: M inputs.
    :param variance: v, one per column or one for all.

    Source: Rasmussen and Williams (2006), section 4.2.2.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]))
    tensor([[83.]])
    """
    return (X * variance.unsqueeze(-2)) @ Z.mT


def _centre_and_scale(scale: Float[Tensor, "*#batch #Q"], X: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of Z, which reduces rounding for inputs far from zero, such as dates, and divide by a scale."""
    c = Z.detach().mean(-2, keepdim=True)
    inverse = scale.reciprocal().unsqueeze(-2)
    return (X - c) * inverse, (Z - c) * inverse
