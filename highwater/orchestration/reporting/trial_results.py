"""The result of one thing that the doctor tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from highwater.errors import HighwaterError


@dataclass(frozen=True)
class TrialResult:
    """One thing that was tried.

    Args:
        what: in some words.
        text: the result in a sentence.
        error: why it failed; None if it works.
        warning: it works, and is not as it should be.
        remedy: remedy of a warning.
    """

    what: str
    text: str = ""
    error: HighwaterError | None = None
    warning: bool = False
    remedy: str = ""

    @property
    def row(self) -> list[str]:
        """State, what, what was found, remedy."""
        if self.error is None:
            return ["warning" if self.warning else "ok", self.what, self.text, self.remedy]
        found = f": {self.error.found}" if self.error.found else ""
        return ["failed", self.what, f"{self.error.problem}{found}", self.error.remedy]


Try = Callable[[], str]


def run_trial(what: str, trial: Try) -> TrialResult:
    """Try one thing; its error becomes the result."""
    try:
        return TrialResult(what, trial())
    except HighwaterError as error:
        return TrialResult(what, error=error)
