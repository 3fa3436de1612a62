"""A process that sends the accepted events of slices, and kills or stops itself at a point that a test names."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets import published, sent
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.plans import Publication
from resources import ledger_schema
from tests.accepted import Tables
from tests.publish_child import FENCED, RECORDS, Dying

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

# Steps of a transaction as in `tests.publish_child`, and those of the table around them.
# Each is a process that begins anew, so the others of these steps are left to `tests.test_published`.
POINTS = ("written down", "half", "marked", "committing", "unrecorded", "settling")


def main(task: dict[str, Any]) -> int:
    """Send; the point says where this process ends."""
    published.RECORDS_A_TRANSACTION = RECORDS
    tables = Tables(Path(task["folder"]), task["topic"], bootstrap=task["bootstrap"])
    _stop_outside_of_the_ledger()
    _arm(task["point"], signal.Signals(task["sign"]), tables)
    try:
        tables.publish(*tables.ledger.get(task["slices"]))
    except (SupersededAttemptError, LeaseHeldError):  # Kafka keeps it out, or the lease that ran out while it stood
        return FENCED
    return 0


def _stop_outside_of_the_ledger() -> None:
    """Stop only when no thread is in a transaction of the ledger: stopped in one it would lock it for all others."""
    free = threading.RLock()
    transaction, die = ledger_schema.transaction, Dying.die

    @contextmanager
    def alone(engine: Engine, *, writes: bool) -> Iterator[Connection]:
        with free, transaction(engine, writes=writes) as connection:
            yield connection

    def dying(now: str) -> None:
        with free:
            die(now)

    vars(ledger_schema)["transaction"] = alone
    setattr(Dying, "die", staticmethod(dying))  # noqa: B010 - a method, which an assignment may not replace


def _arm(point: str | None, sign: signal.Signals, tables: Tables) -> None:
    Dying.point, Dying.sign = point, sign
    vars(published)["Transactions"] = Dying
    record, write_down = tables.ledger.record_publication, sent.Book.write_down
    settle, commit_settled = sent.Book.settle, sent.Book.commit_settled

    def recording(stream: str, key: str, publication: Publication) -> None:
        Dying.die("unrecorded")
        record(stream, key, publication)
        Dying.die("recorded")

    def writing(book: sent.Book, *given: Any) -> None:
        write_down(book, *given)
        Dying.die("written down")

    def settling(book: sent.Book, *given: Any) -> None:
        whole = given[0] == book.sending.total
        if whole:
            Dying.die("settling")
        settle(book, *given)

    def committing(book: sent.Book) -> None:
        anything = book._settled is not None
        commit_settled(book)
        if anything:
            Dying.die("settled")

    vars(tables.ledger)["record_publication"] = recording
    setattr(sent.Book, "write_down", writing)  # noqa: B010 - a method, which an assignment may not replace
    setattr(sent.Book, "settle", settling)  # noqa: B010
    setattr(sent.Book, "commit_settled", committing)  # noqa: B010
