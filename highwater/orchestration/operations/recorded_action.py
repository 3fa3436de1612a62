"""The frame around every action of an operator, by command or job: checks the name, and records action and outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from highwater.errors import HighwaterError
from highwater.operator_actions import DONE, OperatorAction, ensure_may_act

if TYPE_CHECKING:
    from highwater.resources.ledger import Ledger


@contextmanager
def recorded_action(ledger: Ledger, operators: Collection[str] | None, action: OperatorAction) -> Iterator[None]:
    """Carry out an action within the block, after its check and its record.

    Args:
        ledger: gets the record.
        operators: the names that may act; None permits everybody.
        action: the action.

    Raises:
        ConfigurationError: nobody is named, or the name is not listed; nothing was written, the record included.
        DependencyUnavailableError: the ledger is unavailable; nothing was written.
    """
    ensure_may_act(action.action, action.by, operators)
    number = ledger.operator_actions.begin(action)
    try:
        yield
    except BaseException as error:
        _end_action(ledger, number, type(error).__name__)
        raise
    _end_action(ledger, number, DONE)


def _end_action(ledger: Ledger, number: int, outcome: str) -> None:
    with suppress(HighwaterError):  # the action is over: a ledger that is unavailable now leaves the outcome open
        ledger.operator_actions.end(number, outcome)
