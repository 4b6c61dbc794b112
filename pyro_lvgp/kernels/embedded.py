"""Kernels on learned embeddings of levels of a category."""

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.kernels._levels import read_levels
from pyro_lvgp.kernels.base import Kernel, KernelParams
from pyro_lvgp.ops.levels import take_levels

__all__ = ["Embedded"]


class Embedded(Kernel):
    r"""Kernel of learned embeddings of the levels of a category.

    .. math:: k(i, j) = k_0(e_i, e_j), \qquad i, j = 0 \dots L - 1, \quad e_i \in \mathbb{R}^E

    The kernel k₀ acts on points of E columns, one point for each level.  Levels with near embeddings have similar functions.
    Levels are integers, in a column of a floating-point dtype.  A level without data keeps its initial embedding; with a prior
    at ``embedding``, by ``PyroSample``, the posterior of its embedding is the prior.

    :param kernel: k₀, of :attr:`input_dim` E, without ``active_dims``.
    :param num_levels: number L of levels.
    :param embedding: initial e, of shape ``batch_shape + (num_levels, E)``; by default standard
        normal draws.
    :param batch_shape: shape of a batch of embeddings, which broadcasts with the batch of ``kernel``.
    :param active_dims: index of the column of levels; by default the inputs have that column alone.
    :raises ValueError: if sizes or shapes do not fit, an embedding is not finite, or ``kernel`` has ``active_dims``; at a call
        for a level that is not an integer, or not among the levels.
    :raises TypeError: if ``num_levels`` is no integer.

    Source: Lawrence (2004), "Gaussian process latent variable models for visualisation of high dimensional data", for latent
    inputs of a kernel; Casale et al. (2018), "Gaussian process prior variational autoencoders", for objects in views.

    >>> from pyro_lvgp.kernels import RBF
    >>> kernel = Embedded(RBF(1), 3, embedding=torch.tensor([[0.0], [0.0], [1.0]]))
    >>> kernel(torch.tensor([[0.0], [1.0], [2.0]])).detach()
    tensor([[1.0000, 1.0000, 0.6065],
            [1.0000, 1.0000, 0.6065],
            [0.6065, 0.6065, 1.0000]])
    """

    embedding: Any

    def __init__(
        self,
        kernel: Kernel,
        num_levels: int,
        *,
        embedding: Tensor | None = None,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        check_sizes(num_levels=num_levels)
        if kernel.input_dim is None or kernel.active_dims is not None:
            raise ValueError(
                f"expected a kernel with input_dim and without active_dims, which acts on embeddings, got "
                f"{type(kernel).__name__} with input_dim={kernel.input_dim} and active_dims={kernel.active_dims}; give "
                "active_dims to Embedded, and combine kernels of embeddings outside of it"
            )
        super().__init__(
            1, batch_shape=torch.broadcast_shapes(tuple(batch_shape), kernel.batch_shape), active_dims=active_dims
        )
        shape = (*batch_shape, num_levels, kernel.input_dim)
        if embedding is None:
            embedding = torch.randn(shape)
        if embedding.shape != shape or not embedding.isfinite().all():
            raise ValueError(
                f"expected a finite embedding of shape {list(shape)} (batch_shape, levels, columns of the kernel), got "
                f"{list(embedding.shape)}"
            )
        self.kernel, self.num_levels = kernel, num_levels
        self.embedding = PyroParam(embedding.clone(), constraints.real)

    @property
    def level_columns(self) -> tuple[int, ...]:
        return self.active_dims or (0,)

    # The kernel is read without entering Pyro's context: a call of this kernel has entered that of its owner already.
    def params(self) -> KernelParams:
        return self.embedding, self.kernel.params()

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        return self.kernel.covariance(self._embed(X, params), self._embed(Z, params), params[1])

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return self.kernel.diagonal(self._embed(X, params), params[1])

    def _embed(self, X: Tensor, params: KernelParams) -> Tensor:
        """Return the embeddings of the levels of points."""
        return take_levels(params[0], read_levels(X, self.num_levels, self))

    def parameters_text(self) -> str:
        return f"{super().parameters_text()}, {type(self.kernel).__name__}({self.kernel.parameters_text()})"
