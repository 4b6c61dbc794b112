"""Kernels on levels of a category, such as subjects, sites or groups, which are a column of integers."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.kernels._levels import read_levels
from pyro_lvgp.kernels._parametric import _REAL, _Parametric, _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.ops import levels

__all__ = ["Categorical", "Index"]


class _OneCategory(_Parametric):
    """Base class of kernels of one column of levels, with parameters for the whole category."""

    num_levels: Any

    @property
    def level_columns(self) -> tuple[int, ...]:
        return self.active_dims or (0,)

    def _levels(self, X: Tensor) -> Tensor:
        return read_levels(X, self.num_levels, self)


class Categorical(_OneCategory):
    r"""Compound symmetry of the levels of a category: each pair of different levels has the same covariance.

    .. math:: k(i, j) = \sigma^2 \big(\rho + (1 - \rho)\, \delta_{ij}\big)

    Levels are integers, in a column of a floating-point dtype.  For any number of levels the kernel is positive definite if
    0 ≤ ρ < 1, and for L levels if −1/(L − 1) < ρ < 1.  A product with a kernel of time has a function of time for each level,
    with correlation ρ between the functions of two levels.  The covariance with a level that is not in the data, such as a new
    subject, is defined as well, unless ``num_levels`` is given.

    :param num_levels: number L of levels, which then are 0 … L − 1, and allow ρ < 0; None for any integers.
    :param correlation: ρ, of shape ``batch_shape``; None for independent levels, ρ = 0, which is not learned.
    :param variance: σ², of shape ``batch_shape``.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: index of the column of levels; by default the inputs have that column alone.
    :raises ValueError: if a parameter is outside its range, or has the wrong shape, and at a call for a level that is not an
        integer, or not among the levels.
    :raises TypeError: if ``num_levels`` is no integer.

    Source: Pinheiro and Bates (2000), "Mixed-effects models in S and S-PLUS", section 5.3, for compound symmetry; Roustant et
    al. (2020), "Group kernels for Gaussian process metamodels with categorical inputs", for the range of ρ.

    >>> kernel = Categorical(correlation=0.5, variance=2.0)
    >>> kernel(torch.tensor([[0.0], [1.0], [7.0]])).detach()
    tensor([[2., 1., 1.],
            [1., 2., 1.],
            [1., 1., 2.]])

    One function of time for all subjects, and one for each subject:

    >>> from pyro_lvgp.kernels import RBF
    >>> time_and_subject = torch.tensor([[0.0, 3.0], [0.0, 4.0]])
    >>> kernel = RBF(1, active_dims=[0]) + Categorical(correlation=None, active_dims=[1]) * RBF(1, active_dims=[0])
    >>> kernel(time_and_subject).detach()
    tensor([[2., 1.],
            [1., 2.]])
    """

    variance: Tensor
    correlation: Tensor | None

    def __init__(
        self,
        num_levels: int | None = None,
        *,
        correlation: _Value | None = 0.5,
        variance: _Value = 1.0,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        parameters: dict[str, tuple[_Value, tuple[int, ...]]] = {"variance": (variance, ())}
        if correlation is not None:
            parameters["correlation"] = (correlation, ())
        if num_levels is not None:
            check_sizes(least=2, num_levels=num_levels)
        lower = 0.0 if num_levels is None else -1.0 / (num_levels - 1)
        super().__init__(1, batch_shape, active_dims, parameters, {"correlation": (lower, 1.0)})
        if correlation is None:
            self.correlation = None
        self.num_levels = num_levels

    def params(self) -> KernelParams:
        variance, correlation = self.variance, self.correlation
        return variance, torch.zeros_like(variance) if correlation is None else correlation

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, correlation = params
        return levels.compound_symmetry(self._levels(X), self._levels(Z), correlation, variance)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        variance, correlation = params
        batch = torch.broadcast_shapes(X.shape[:-2], variance.shape, correlation.shape)
        return variance[..., None].expand(*batch, self._levels(X).shape[-1])


class Index(_OneCategory):
    r"""Coregionalisation of the levels of a category: a learned covariance matrix of all levels.

    .. math:: k(i, j) = \big(W W^T + \mathrm{diag}(\kappa)\big)_{ij}, \qquad i, j = 0 \dots L - 1

    with W of L rows and R columns.  A product with a kernel of time is the intrinsic coregionalisation model: a function of
    time for each level, with learned covariances between levels.  Levels are integers, in a column of a floating-point dtype.
    The covariance of a level without data is that of the initial W and κ; for levels that are not in the data use
    :class:`Categorical`.

    :param num_levels: number L of levels.
    :param rank: number R of columns of W.
    :param factor: W, of shape ``batch_shape + (num_levels, rank)``; by default draws of a normal distribution of variance
        1/(2R), so that k(i, i) = 1 on average.
    :param variance: κ, of shape ``batch_shape + (num_levels,)``.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: index of the column of levels; by default the inputs have that column alone.
    :raises ValueError: if a size is not positive, a variance is not positive, or a parameter has the wrong shape, and at a
        call for a level that is not an integer, or not among the levels.
    :raises TypeError: if a size is no integer.

    Source: Bonilla, Chai and Williams (2007), "Multi-task Gaussian process prediction", sections 2 and 3.

    >>> kernel = Index(2, factor=torch.tensor([[1.0], [2.0]]), variance=0.5)
    >>> kernel(torch.tensor([[0.0], [1.0], [1.0]])).detach()
    tensor([[1.5000, 2.0000, 2.0000],
            [2.0000, 4.5000, 4.5000],
            [2.0000, 4.5000, 4.5000]])
    """

    factor: Tensor
    variance: Tensor

    def __init__(
        self,
        num_levels: int,
        rank: int = 1,
        *,
        factor: Tensor | None = None,
        variance: _Value = 0.5,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        check_sizes(num_levels=num_levels, rank=rank)
        if factor is None:
            factor = torch.randn(*batch_shape, num_levels, rank) / (2.0 * rank) ** 0.5
        parameters = {"variance": (variance, (num_levels,)), "factor": (factor, (num_levels, rank))}
        super().__init__(1, batch_shape, active_dims, parameters, {"factor": _REAL})
        self.num_levels, self.rank = num_levels, rank

    def params(self) -> KernelParams:
        return self._of_shape("factor", (self.num_levels, self.rank)), self._of_shape("variance", (self.num_levels,))

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        return levels.coregionalisation(self._levels(X), self._levels(Z), *params)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Float[Tensor, "*out N"]:
        factor, variance = params
        return levels.take_levels((factor.square().sum(-1) + variance)[..., None], self._levels(X)).squeeze(-1)
