"""Findings of checks of a fit, and checks that are not defined for a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

__all__ = ["Check", "Finding", "NotApplicable"]

Severity = Literal["warning", "note"]
_MAX_ROWS = 10  # that are printed


@dataclass(frozen=True)
class Finding:
    """Result of a check that needs attention.

    :param severity: ``"warning"`` if conclusions from the posterior may be wrong, else ``"note"``.
    :param text: the result, in a sentence.
    :param advice: what to try.
    :param rows: indices of the data concerned, worst first; empty if the finding is about all data jointly.

    >>> print(Finding("warning", "k̂ is above 0.7 for 2 of 10 data", "fit a guide closer to the posterior", rows=(7, 3)))
    warning: k̂ is above 0.7 for 2 of 10 data (rows 7, 3); try: fit a guide closer to the posterior
    """

    severity: Severity
    text: str
    advice: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}{self.rows_text}; try: {self.advice}"

    @property
    def rows_text(self) -> str:
        """Text that names the rows concerned, ten at most; empty without rows."""
        if not self.rows:
            return ""
        more = f" and {len(self.rows) - _MAX_ROWS} more" if len(self.rows) > _MAX_ROWS else ""
        return f" (rows {', '.join(map(str, self.rows[:_MAX_ROWS]))}{more})"


@runtime_checkable
class Check(Protocol):
    """Result of a check."""

    @property
    def summary(self) -> str:
        """Result in a line of text."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Results that need attention."""


@dataclass(frozen=True)
class NotApplicable:
    """Check that is not defined for a model, a guide or data, or that lacks an argument.

    :param reason: the reason.

    >>> print(NotApplicable("no history was given").summary)
    not applicable: no history was given
    """

    reason: str

    @property
    def summary(self) -> str:
        """The reason, in a line of text."""
        return f"not applicable: {self.reason}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """No findings."""
        return ()
