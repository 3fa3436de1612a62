"""The intended content and end of a generated record, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Headers = tuple[tuple[str, bytes | None], ...]
Fate = Literal["committed", "aborted"]


class Ending(NamedTuple):
    """The expected end of a record: `event`, `reject` with its reason, or `tombstone`."""

    end: Literal["event", "reject", "tombstone"]
    reason: str | None = None
    permanent: bool | None = None

    def __str__(self) -> str:
        return self.end if self.reason is None else f"{self.end} ({self.reason})"


EVENT = Ending("event")
TOMBSTONE = Ending("tombstone")
MALFORMED = Ending("reject", "malformed", permanent=True)
INVALID = Ending("reject", "invalid", permanent=True)
UNRESOLVED = Ending("reject", "unresolved", permanent=False)


@dataclass(frozen=True)
class Intended:
    """One record that is to be written.

    Args:
        entity: what it is about (an order id, a payment), whatever its key says.
        key: the record's key.
        value: the record's value; None is a tombstone.
        fault: the fault's name, `none` for a sound record.
        ending: where it must end.
        version: the version as a number; a timestamp counts in microseconds since 1970. None where it has none.
        headers: in their order.
        partition: a fixed partition; by the key if None.
        backdated_ms: so much earlier than now is its publish time.
        waits_for: the customer that must become known first; it ends as unresolved until then.
        transaction: written inside of a transaction with this fate.
    """

    entity: str
    key: bytes | None
    value: bytes | None
    fault: str
    ending: Ending
    version: int | None = None
    headers: Headers = ()
    partition: int | None = None
    backdated_ms: int = 0
    waits_for: str | None = None
    transaction: Fate | None = None


def microseconds(text: str) -> int:
    """An ISO 8601 time with a zone, in microseconds since 1970."""
    span = datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
