"""Table of rows with what is known of each row."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.models import RowArguments

__all__ = ["KnownTable"]


class KnownTable(NamedTuple):
    """Transformed rows, and what is known of them.

    :param values: transformed entries, NaN where missing.
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

    def without_errors_of_missing_entries(self) -> "KnownTable":
        """Set standard errors of missing entries to 0."""
        if self.known is None or self.error is None:
            return self
        error = RowArguments(standard_error=torch.where(self.values.isnan(), 0.0, self.error))
        return self._replace(known=self.known.replace(error))

    def to(self, dtype: torch.dtype) -> "KnownTable":
        return KnownTable(self.values.to(dtype), None if self.known is None else self.known.to(dtype))
