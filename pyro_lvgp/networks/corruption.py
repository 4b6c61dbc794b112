"""Input corruption: functions that replace entries of an encoder's input by NaN during training.

:class:`~pyro_lvgp.infer.StructuredELBO` takes one as ``corruption``: the guide encodes the corrupted data, and the model
scores all observed entries (eq. 5.6 of the GP-VAE thesis).  An encoder then learns to predict masked entries.  It predicts
the missing entries of the data best if the masks have the same pattern.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.control_flow import holds

__all__ = ["Corruption", "mask_entries", "mask_like_rows", "mask_like_shifted"]

Corruption = Callable[[Tensor], Tensor]


@names_types
def mask_entries(fraction: float) -> Corruption:
    """Mask each entry independently with the same probability.

    :param fraction: the probability.
    :raises ValueError: for a fraction that is not from 0 to 1.

    >>> mask_entries(1.0)(torch.zeros(1, 2))
    tensor([[nan, nan]])

    Source: eq. 5.6 of the GP-VAE thesis.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"expected a fraction from 0 to 1, got {fraction}")
    return lambda y: y.masked_fill(torch.rand_like(y) < fraction, torch.nan)


@names_types
def mask_like_rows(y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
    """Mask the entries of each row that are missing in another row of its series, drawn at random.

    Rows without any observed entry are not drawn.

    :param y: data, NaN where missing.

    >>> mask_like_rows(torch.tensor([[1.0, torch.nan], [2.0, torch.nan]]))
    tensor([[1., nan],
            [2., nan]])
    """
    missing = torch.isnan(y)
    has_entries = ~missing.all(-1)
    if holds(has_entries.all()):
        rows = torch.randint(y.shape[-2], y.shape[:-1], device=y.device)
    else:  # rows that are missing as a whole are the padding of a series
        weights = has_entries.double() + 1e-9  # the constant allows series that are all padding
        rows = torch.multinomial(weights.reshape(-1, y.shape[-2]), y.shape[-2], replacement=True).reshape(has_entries.shape)
    return y.masked_fill(missing.gather(-2, rows[..., None].expand_as(missing)), torch.nan)


@names_types
def mask_like_shifted(y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
    """Mask the entries that are missing in the same series shifted cyclically by a random number of rows.

    Contiguous missing blocks keep their shape.  A series ends with its last row that has an observed entry.

    :param y: data, NaN where missing, with rows in the order of their inputs.

    >>> masked = mask_like_shifted(torch.tensor([[1.0], [torch.nan], [torch.nan], [4.0]]))
    >>> int(torch.isnan(masked).sum()) in (2, 3, 4)
    True
    """
    missing, steps = torch.isnan(y), torch.arange(y.shape[-2], device=y.device)
    # Rows without observed entries at the end of a series are padding.
    length = ((steps + 1) * ~missing.all(-1)).amax(-1, keepdim=True).clamp_min(1)
    rows = (steps - torch.randint(y.shape[-2], (), device=y.device)) % length
    return y.masked_fill(missing.gather(-2, rows[..., None].expand_as(missing)), torch.nan)
