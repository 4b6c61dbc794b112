"""Table of rows with what is known of each row."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.distributions import YeoJohnsonTransform
from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn._rows import scaled_rows

__all__ = ["KnownTable"]


class KnownTable(NamedTuple):
    """Rows, and what is known of them.

    :param values: entries, NaN where missing.
    :param known: known quantities of the rows, with standard errors in units of ``values``; None for nothing.
    """

    values: Float[Tensor, "N D"]
    known: RowArguments | None

    def at(self, idx: Tensor) -> "KnownTable":
        """Select rows."""
        return KnownTable(self.values[idx], None if self.known is None else self.known[idx])

    @property
    def error(self) -> Float[Tensor, "N D"] | None:
        """Standard errors of the entries; None without."""
        error = None if self.known is None else self.known.standard_error
        return error.expand_as(self.values) if isinstance(error, Tensor) else None

    def transformed(self, warp: YeoJohnsonTransform) -> "KnownTable":
        """Transform the entries, and divide standard errors, which are in their units, by the scale of the columns."""
        return KnownTable(warp(self.values), scaled_rows(self.known, warp.scale, self.values, len(self.values)))

    def without_errors_of_missing_entries(self) -> "KnownTable":
        """Set standard errors of missing entries to 0."""
        if self.known is None or self.error is None:
            return self
        error = RowArguments(standard_error=torch.where(self.values.isnan(), 0.0, self.error))
        return self._replace(known=self.known.replace(error))

    def to(self, dtype: torch.dtype) -> "KnownTable":
        return KnownTable(self.values.to(dtype), None if self.known is None else self.known.to(dtype))
