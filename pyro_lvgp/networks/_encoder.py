"""What encoders share."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pyro_lvgp._utils.validation import check_init_scale, check_sizes, check_tensors


def smallest_scale(like: Tensor) -> float:
    """A scale with room for sums of 1 / scale⁴, which the gradient of a precision takes: 3e-8 in float32."""
    return torch.finfo(like.dtype).tiny ** 0.2


def positive(raw: Float[Tensor, "*batch Q"], start: float) -> Float[Tensor, "*batch Q"]:
    """Scales that are ``start`` where raw is zero."""
    raw = raw + (start + math.log(-math.expm1(-start)))  # softplus⁻¹(start)
    return nn.functional.softplus(raw).clamp_min(smallest_scale(raw))


def loc_and_scale(
    output: Float[Tensor, "*batch twice_Q"], start: float
) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
    """Halves of a network's output, the second made positive."""
    loc, raw = output.chunk(2, -1)
    return loc, positive(raw, start)


class Encoder(nn.Module):
    """Checks of sizes, and of data."""

    def __init__(self, data_dim: int, latent_dim: int, hidden_dims: Sequence[int], init_scale: float, feature_dim: int = 1):
        super().__init__()
        check_sizes(data_dim=data_dim, latent_dim=latent_dim, hidden_dims=min(hidden_dims, default=1), feature_dim=feature_dim)
        check_init_scale(init_scale)
        self.data_dim, self.latent_dim, self.init_scale = data_dim, latent_dim, init_scale

    def _observed(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch D"], Bool[Tensor, "*batch D"]]:
        """Data with zeros where missing, as no mask keeps a NaN out of gradients later, and what is observed."""
        check_tensors([y])
        if y.shape[-1:] != (self.data_dim,):
            raise ValueError(
                f"expected data of shape [*, {self.data_dim}], got {list(y.shape)}; data_dim is the number of its columns"
            )
        if y.dtype != (dtype := next(self.parameters()).dtype):
            mend = f"call encoder.to({y.dtype})" if y.is_floating_point() else f"use y.to({dtype})"
            raise TypeError(f"expected data of {dtype}, as the parameters of the encoder, got {y.dtype}; {mend}")
        return torch.nan_to_num(y), ~torch.isnan(y)
