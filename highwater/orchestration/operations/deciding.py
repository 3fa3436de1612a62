"""The one place where commands and operator jobs ask whether a person may decide, and record the decision."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from highwater.decisions import DONE, Decision, ensure_may_decide
from highwater.errors import HighwaterError

if TYPE_CHECKING:
    from highwater.resources.ledger import Ledger


@contextmanager
def decided(ledger: Ledger, operators: Collection[str] | None, decision: Decision) -> Iterator[None]:
    """Carry out an action within the block, after the check and the record of its decision.

    Args:
        ledger: gets the record.
        operators: the names that may decide; None lets everybody decide.
        decision: the decision.

    Raises:
        ConfigurationError: nobody is named, or the name is not listed; nothing was written, the record included.
        DependencyAwayError: the ledger is away; nothing was written.
    """
    ensure_may_decide(decision.action, decision.by, operators)
    number = ledger.decisions.begin(decision)
    try:
        yield
    except BaseException as error:
        _end(ledger, number, type(error).__name__)
        raise
    _end(ledger, number, DONE)


def _end(ledger: Ledger, number: int, outcome: str) -> None:
    with suppress(HighwaterError):  # the action is over: a ledger that is away now leaves the outcome open
        ledger.decisions.end(number, outcome)
