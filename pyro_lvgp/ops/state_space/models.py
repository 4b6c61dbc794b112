r"""Kernels as Gauss–Markov models: pure tensor functions.

A process with one of these kernels is a linear function of small states,

.. math::

    f_n = h^T x_n, \qquad x_1 \sim N(0, P), \qquad x_{n+1} = A_n x_n + N(0, Q_n), \qquad Q_n = P - A_n P A_n^T .

Source: Hartikainen and Särkkä (2010), "Kalman filtering and smoothing solutions to temporal Gaussian process regression
models"; Solin and Särkkä (2014), "Explicit link between periodic covariance functions and state space models", for products.
"""

import math
from collections.abc import Sequence
from functools import cache, reduce
from itertools import product
from operator import add as plus
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# Stationary covariance P of the state (f, f′, f″) in units of the lengthscale, spectral density q, and the nilpotent matrix N
# of exp(F τ) = exp(−τ) Σ_j Nʲ τʲ / j!
_MATERN = {
    0.5: ([[1.0]], 2.0, [[0.0]]),
    1.5: ([[1.0, 0.0], [0.0, 1.0]], 4.0, [[1.0, 1.0], [-1.0, -1.0]]),
    2.5: (
        [[1.0, 0.0, -1.0 / 3.0], [0.0, 1.0 / 3.0, 0.0], [-1.0 / 3.0, 0.0, 1.0]],
        16.0 / 3.0,
        [[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [-1.0, -3.0, -2.0]],
    ),
}
_LARGEST_TAU = 1e3  # exp(−τ) is zero in every precision, and τʲ is finite


__all__ = ["StateSpaceModel", "add", "constant", "cosine", "matern", "multiply", "pad"]


class StateSpaceModel(NamedTuple):
    """A Gauss–Markov process of states at N increasing inputs with T = N − 1 steps between them, and its emission.

    :param P: covariance of the first state.
    :param A: transition matrices.
    :param Q: covariances of the transition noise.
    :param emission: h, the row vector that maps a state to the value of the process.
    """

    P: Float[Tensor, "*batch S S"]
    A: Float[Tensor, "*batch T S S"]
    Q: Float[Tensor, "*batch T S S"]
    emission: Float[Tensor, "*batch S"]


def matern(
    steps: Float[Tensor, "*#batch T"], lengthscale: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"], nu: float
) -> StateSpaceModel:
    """State-space model of a Matérn kernel, whose states are f and its ν − ½ derivatives, in units of the lengthscale.

    Q is computed without differences, so that Q is positive, to full relative precision, for steps of any size.

    :param steps: differences of the inputs, all non-negative.
    :param lengthscale: ℓ, in units of the inputs.
    :param variance: σ².
    :param nu: ν, one of 0.5, 1.5, 2.5.

    >>> model = matern(torch.tensor([0.5, 2.0]), torch.tensor(1.0), torch.tensor(1.0), 0.5)
    >>> model.A.flatten(), model.Q.flatten()
    (tensor([0.6065, 0.1353]), tensor([0.6321, 0.9817]))
    """
    tau = (math.sqrt(2.0 * nu) * steps / lengthscale[..., None]).clamp_max(_LARGEST_TAU)
    P, h, of_A, of_Q = _coefficients(nu, tau.dtype, tau.device)
    size = len(h)
    powers = torch.stack([tau**j for j in range(size)], -1)
    A = ((-tau).exp()[..., None] * powers) @ of_A.flatten(1)
    Q = _incomplete_gammas(2.0 * tau, 2 * size - 1) @ of_Q.flatten(1)
    batch = torch.broadcast_shapes(tau.shape[:-1], variance.shape)
    return StateSpaceModel(
        (variance[..., None, None] * P).expand(*batch, size, size),
        A.unflatten(-1, (size, size)).expand(*batch, -1, size, size),
        variance[..., None, None, None] * Q.unflatten(-1, (size, size)),
        h.expand(*batch, size),
    )


def constant(steps: Float[Tensor, "*batch T"], value: float) -> StateSpaceModel:
    """State-space model of the constant kernel ``k(x, z) = value``.

    :param steps: differences of the inputs.
    :param value: variance.

    >>> model = constant(torch.tensor([0.5, 2.0]), 3.0)
    >>> model.P, model.A.flatten(), model.Q.flatten()
    (tensor([[3.]]), tensor([1., 1.]), tensor([0., 0.]))
    """
    one = steps.new_ones(()).expand(*steps.shape[:-1], 1)
    A = one[..., None, None].expand(*steps.shape, 1, 1)
    return StateSpaceModel(value * one[..., None], A, torch.zeros_like(A), one)


def cosine(
    steps: Float[Tensor, "*#batch T"], period: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"]
) -> StateSpaceModel:
    """State-space model of the cosine kernel: an oscillator without damping or noise.

    :param steps: differences of the inputs.
    :param period: p, in units of the inputs.
    :param variance: σ².

    Source: Solin and Särkkä (2014), "Explicit link between periodic covariance functions and state space models".

    >>> cosine(torch.tensor([0.5]), torch.tensor(1.0), torch.tensor(3.0)).A[0, 0]  # half a cycle
    tensor([-1.0000e+00,  8.7423e-08])
    """
    angle = 2.0 * math.pi * steps / period[..., None]
    batch = torch.broadcast_shapes(angle.shape[:-1], variance.shape)
    rows = torch.stack([angle.cos(), -angle.sin()], -1), torch.stack([angle.sin(), angle.cos()], -1)
    A = torch.stack(rows, -2).expand(*batch, -1, 2, 2)
    identity = torch.eye(2, dtype=A.dtype, device=A.device)
    P = (variance[..., None, None] * identity).expand(*batch, 2, 2)
    return StateSpaceModel(P, A, torch.zeros_like(A), identity[0].expand(*batch, 2))


def add(models: Sequence[StateSpaceModel]) -> StateSpaceModel:
    """State-space model of a sum of independent processes, with block-diagonal matrices.

    :param models: one for each process.

    >>> steps = torch.tensor([0.5])
    >>> model = add([matern(steps, torch.tensor(1.0), torch.tensor(1.0), 0.5), constant(steps, 3.0)])
    >>> model.A, model.emission
    (tensor([[[0.6065, 0.0000],
             [0.0000, 1.0000]]]), tensor([1., 1.]))
    """
    sizes = [model.emission.shape[-1] for model in models]
    total = sum(sizes)
    placed = [pad(model, total, sum(sizes[:i])) for i, model in enumerate(models)]
    return StateSpaceModel(*(reduce(plus, parts) for parts in zip(*placed, strict=True)))


def multiply(first: StateSpaceModel, second: StateSpaceModel) -> StateSpaceModel:
    """State-space model of the product of two kernels, with Kronecker products of the matrices.

    :param first: model of one kernel.
    :param second: model of the other kernel.

    >>> short, long = (matern(torch.tensor([1.0]), torch.tensor(scale), torch.tensor(1.0), 0.5) for scale in (1.0, 2.0))
    >>> multiply(short, long).A  # e^(−1 − ½)
    tensor([[[0.2231]]])
    """
    P, A = _kron(first.P, second.P), _kron(first.A, second.A)
    # P₁ ⊗ P₂ − (P₁ − Q₁) ⊗ (P₂ − Q₂), without differences
    Q = _kron(first.A @ first.P[..., None, :, :] @ first.A.mT, second.Q) + _kron(first.Q, second.P[..., None, :, :])
    return StateSpaceModel(P, A, Q, (first.emission[..., :, None] * second.emission[..., None, :]).flatten(-2))


def pad(model: StateSpaceModel, size: int, before: int = 0) -> StateSpaceModel:
    """Pad the states of a model with zeros to a larger size.

    :param model: a model.
    :param size: size of the padded states.
    :param before: number of zeros before the states.

    >>> pad(constant(torch.tensor([0.5]), 3.0), 2).P
    tensor([[3., 0.],
            [0., 0.]])
    """
    padding = (before, size - before - model.emission.shape[-1])
    P, A, Q = (F.pad(part, padding * 2) for part in (model.P, model.A, model.Q))
    return StateSpaceModel(P, A, Q, F.pad(model.emission, padding))


@cache
def _coefficients(nu: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, h, and the coefficients of exp(−τ) τʲ in A and of Γ(m + 1, 2τ) in Q, as constants of a device and dtype."""
    covariance, density, nilpotent = _MATERN[nu]
    with torch.inference_mode(False):
        P, N = (torch.tensor(part, dtype=torch.float64) for part in (covariance, nilpotent))
        size = len(N)
        A = torch.stack([torch.linalg.matrix_power(N, j) / math.factorial(j) for j in range(size)])
        # Q = q ∫ exp(F s) e eᵀ exp(F s)ᵀ ds for the last unit vector e, with ∫ sᵐ exp(−2s) ds = m! Γ(m + 1, 2τ) / 2ᵐ⁺¹
        Q = torch.zeros(2 * size - 1, size, size, dtype=torch.float64)
        for i, j in product(range(size), repeat=2):
            scale = density * math.factorial(i + j) / 2.0 ** (i + j + 1)
            Q[i + j] += scale * torch.outer(A[i, :, -1], A[j, :, -1])
        P, h, A, Q = (part.to(device, dtype) for part in (P, torch.eye(size)[0], A, Q))
    return P, h, A, Q


def _incomplete_gammas(x: Float[Tensor, "*batch"], num: int) -> Float[Tensor, "*batch {num}"]:
    """Regularised lower incomplete gamma functions Γ(1, x) … Γ(num, x), to full relative precision."""
    # Γ(a, x) = Γ(a + 1, x) + xᵃ exp(−x) / a!  is a sum of positive terms.
    gammas = [torch.special.gammainc(x.new_full((), num + 1.0), x)]
    for a in range(num, 0, -1):
        gammas.append(gammas[-1] + x**a * (-x).exp() / math.factorial(a))
    return torch.stack(gammas[:0:-1], -1)


def _kron(A: Float[Tensor, "*#batch a a"], B: Float[Tensor, "*#batch b b"]) -> Float[Tensor, "*batch ab ab"]:
    """Kronecker product."""
    return (A[..., :, None, :, None] * B[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
