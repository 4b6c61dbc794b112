"""Base class of encoders, and transforms of their outputs."""

import math
from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.validation import check_init_scale, check_sizes, check_tensors

__all__ = ["Encoder", "loc_and_scale", "positive", "smallest_scale"]


class Encoder(nn.Module, metaclass=AbstractModuleMeta):
    """Base class of encoders that checks sizes and data and separates observed from missing entries.

    A subclass implements :meth:`forward`, in which it may call :meth:`split_missing`.  Guides take any ``nn.Module`` as an
    encoder, so that deriving from this class is optional.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param init_scale: initial scale of the encoded latents.
    :raises ValueError: for a size below 1, or an ``init_scale`` that is not positive and finite.
    :raises TypeError: if a size is no integer.

    >>> class LinearEncoder(Encoder):
    ...     def __init__(self, data_dim, latent_dim):
    ...         super().__init__(data_dim, latent_dim, init_scale=0.5)
    ...         self.net = nn.Linear(data_dim, 2 * latent_dim)
    ...
    ...     def forward(self, y):
    ...         y, observed = self.split_missing(y)
    ...         return loc_and_scale(self.net(y), self.init_scale)
    >>> loc, scale = LinearEncoder(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))
    """

    def __init__(self, data_dim: int, latent_dim: int, init_scale: float):
        super().__init__()
        check_sizes(data_dim=data_dim, latent_dim=latent_dim)
        check_init_scale(init_scale)
        self.data_dim, self.latent_dim, self.init_scale = data_dim, latent_dim, init_scale

    @abstractmethod
    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Compute loc and scale ``[*batch, Q]`` of the latents of data; to be implemented by subclasses.

        :param args: data ``[*batch, D]``, NaN where missing.
        """

    def split_missing(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch D"], Bool[Tensor, "*batch D"]]:
        """Replace missing entries by zero, and return the mask of the observed entries.

        Masks do not stop the gradients of NaN, which is why missing entries are replaced first.

        :param y: data, NaN where missing.
        :returns: data without NaN, and the mask.
        :raises ValueError: if the data have another number of columns than ``data_dim``.
        :raises TypeError: if the data have another dtype than the parameters of the encoder.
        """
        check_tensors([y])
        if y.shape[-1:] != (self.data_dim,):
            raise ValueError(
                f"expected data of shape [*, {self.data_dim}], got {list(y.shape)}; data_dim is the number of its columns"
            )
        if y.dtype != (dtype := next(self.parameters()).dtype):
            conversion = f"call encoder.to({y.dtype})" if y.is_floating_point() else f"use y.to({dtype})"
            raise TypeError(f"expected data of {dtype}, as the parameters of the encoder, got {y.dtype}; {conversion}")
        return torch.nan_to_num(y), ~torch.isnan(y)


@names_types
def loc_and_scale(
    output: Float[Tensor, "*batch twice_Q"], init_scale: float
) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
    """Split the output of a network into loc and a positive scale.

    :param output: loc, and beside it the unconstrained scale.
    :param init_scale: scale where the unconstrained scale is zero.

    >>> loc_and_scale(torch.zeros(4), 0.5)
    (tensor([0., 0.]), tensor([0.5000, 0.5000]))
    """
    loc, unconstrained = output.chunk(2, -1)
    return loc, positive(unconstrained, init_scale)


def positive(unconstrained: Float[Tensor, "*batch Q"], init_scale: float) -> Float[Tensor, "*batch Q"]:
    """Map real numbers to positive scales by softplus.

    :param unconstrained: real numbers.
    :param init_scale: scale where the number is zero.

    >>> positive(torch.zeros(1), 0.5)
    tensor([0.5000])
    """
    unconstrained = unconstrained + (init_scale + math.log(-math.expm1(-init_scale)))  # softplus⁻¹(init_scale)
    return nn.functional.softplus(unconstrained).clamp_min(smallest_scale(unconstrained))


def smallest_scale(like: Tensor) -> float:
    """Return the smallest scale of a dtype for which sums of 1 / scale⁴ are finite: 3e-8 in float32.

    Gradients of precisions contain such sums.

    :param like: tensor of the dtype.

    >>> round(smallest_scale(torch.zeros(())), 10)
    2.59e-08
    """
    return torch.finfo(like.dtype).tiny ** 0.2
