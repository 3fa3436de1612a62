"""Actions of operators: who may take them, and the record of who did what, when and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from highwater.errors import ConfigurationError

# The outcome of an action that was carried out; of one that failed it is the name of the error.
DONE = "done"


@dataclass(frozen=True)
class OperatorAction:
    """An action that a person takes.

    Args:
        action: its name, that of the operator job, such as `accept_loss`.
        stream: the stream's name.
        asked: arguments of the action as plain values, without keys of records.
        by: the person's name, as it was given.
        because: the reason; empty where none was given.
        through: the run's id, or the login under which the command ran.
        at: the time, in UTC.
        outcome: `done`, or the name of the error; None while it lasts, or where the process died.
    """

    action: str
    stream: str
    asked: Mapping[str, Any]
    by: str
    because: str
    through: str
    at: datetime
    outcome: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """The action as values of JSON."""
        return {**vars(self), "asked": dict(self.asked), "at": self.at.isoformat()}


def ensure_named(by: str, action: str, *, dry_run: bool = False) -> None:
    """Ensure that a person is named for an action that is not a dry run.

    Args:
        by: the person's name.
        action: the action.
        dry_run: whether it is one: then no name is needed.

    Raises:
        ConfigurationError: nobody is named.
    """
    if not dry_run and not by.strip():
        raise ConfigurationError(
            f"{action} needs the name of the person who decides it",
            remedy="name a person: --by NAME, `by` in the run's configuration, or the tag `user` of the run",
        )


def ensure_may_act(action: str, by: str, operators: Collection[str] | None) -> None:
    """Ensure that a person is named, and is one of the operators.

    Args:
        action: the action.
        by: the person's name.
        operators: the names that `HIGHWATER_OPERATORS` lists; None permits everybody.

    Raises:
        ConfigurationError: nobody is named, or the name is not listed.
    """
    ensure_named(by, action)
    if operators is not None and by not in operators:
        raise ConfigurationError(
            f"{by!r} may not decide {action}: nothing was changed",
            stored=f"HIGHWATER_OPERATORS lists {', '.join(sorted(operators))}",
            found=by,
            remedy="ask one of them to decide it, or add the name to HIGHWATER_OPERATORS",
        )


def build_recorded_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an action for its record: without empty ones, and of keys of records only their number.

    Args:
        values: the arguments by name.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not value:
            continue
        if name == "keys":
            found[name] = len(value)
        elif isinstance(value, datetime):
            found[name] = value.isoformat()
        elif isinstance(value, str | int):
            found[name] = value
        else:
            found[name] = [*value]
    return dict(sorted(found.items()))
