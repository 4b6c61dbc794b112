"""What an encoder is not shown in training, so that it learns to fill gaps: functions that turn more entries into NaN.

:class:`~pyro_lvgp.infer.StructuredELBO` takes one as ``corruption``: the guide encodes what is left, the model scores all that
is observed (eq. 5.6 of the GP-VAE thesis).  An encoder then learns to predict the entries that it is not shown, and learns
most about the gaps of the data if it is shown gaps like them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.control_flow import holds

Corruption = Callable[[Tensor], Tensor]


def mask_entries(fraction: float) -> Corruption:
    """Hide each entry with a probability.

    :param fraction: the probability.
    :raises ValueError: for a fraction that is not from 0 to 1.

    >>> mask_entries(1.0)(torch.zeros(1, 2))
    tensor([[nan, nan]])

    Source: eq. 5.6 of the GP-VAE thesis.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"expected a fraction from 0 to 1, got {fraction}")
    return lambda y: y.masked_fill(torch.rand_like(y) < fraction, torch.nan)


def mask_like_rows(y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
    """Hide of each row what is missing in another row of its series, drawn at random from those not wholly missing.

    :param y: data, NaN where missing.

    >>> mask_like_rows(torch.tensor([[1.0, torch.nan], [2.0, torch.nan]]))
    tensor([[1., nan],
            [2., nan]])
    """
    missing = torch.isnan(y)
    has_data = ~missing.all(-1)
    if holds(has_data.all()):
        rows = torch.randint(y.shape[-2], y.shape[:-1], device=y.device)
    else:  # others pad a series, and are no gaps to imitate
        chances = has_data.double() + 1e-9  # of a series that is all padding, any row
        rows = torch.multinomial(chances.reshape(-1, y.shape[-2]), y.shape[-2], replacement=True).reshape(has_data.shape)
    return y.masked_fill(missing.gather(-2, rows[..., None].expand_as(missing)), torch.nan)


def mask_like_shifted(y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
    """Hide what is missing a random number of rows before, round the end: a block that is missing stays a block.

    The end of a series is the last row of which something is observed.

    :param y: data, NaN where missing, with rows in the order of their inputs.

    >>> hidden = mask_like_shifted(torch.tensor([[1.0], [torch.nan], [torch.nan], [4.0]]))
    >>> int(torch.isnan(hidden).sum()) in (2, 3, 4)
    True
    """
    missing, steps = torch.isnan(y), torch.arange(y.shape[-2], device=y.device)
    # Rows at the end of which nothing is observed pad a series.
    length = ((steps + 1) * ~missing.all(-1)).amax(-1, keepdim=True).clamp_min(1)
    rows = (steps - torch.randint(y.shape[-2], (), device=y.device)) % length
    return y.masked_fill(missing.gather(-2, rows[..., None].expand_as(missing)), torch.nan)
