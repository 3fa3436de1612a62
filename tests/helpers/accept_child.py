"""A process that sends the accepted events of slices, and kills or stops itself at a point that a test names."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dev.processes import wait_until
from highwater.assets import publication_log_writer, published, retraction_guard
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.plans import PublicationRecord
from highwater.resources.ledger.publications import Publications
from tests.helpers.accepted import Tables
from tests.helpers.publish_child import FENCED, RECORDS, FakeDyingTransactions

# Steps of a transaction as in `tests.helpers.publish_child`, and those of the table around them.
# Each is a process that restarts, so the others of these steps are left to `tests.assets.test_publication_batch`.
POINTS = ("written down", "half", "marked", "committing", "unrecorded", "settling")
LAPSED = 8
# The term of a lease in seconds: what a killed process held is waited for so long. A minute where nobody is killed.
LEASE = 5.0
# What is written beside the half of a transaction, and has passed when it is written.
BESIDE = {"half": "written down", "half of the second": "recorded"}


class FakeStoppingTransactions(FakeDyingTransactions):
    """Transactions whose process hangs only when nothing is written beside them.

    A process that hung in a transaction of the ledger would lock it for all others.
    """

    passed: ClassVar[set[str]] = set()

    @classmethod
    def die(cls, now: str) -> None:
        """End or stop this process if it is to do so here."""
        cls.passed.add(now)
        if cls.point == now and cls.sign == signal.SIGSTOP:
            wait_until(lambda: BESIDE[now] in cls.passed, 60, BESIDE[now])
        super().die(now)


def main(task: dict[str, Any]) -> int:
    """Send; the point says where this process ends."""
    published.RECORDS_PER_TRANSACTION = RECORDS
    vars(retraction_guard)["lease_sending"] = partial(retraction_guard.lease_sending, seconds=LEASE)
    tables = Tables(Path(task["folder"]), task["topic"], bootstrap=task["bootstrap"])
    _arm(task["point"], signal.Signals(task["sign"]))
    try:
        tables.publish(*tables.ledger.get(task["slices"]))
    except SupersededAttemptError:
        return FENCED
    except LeaseHeldError:
        return LAPSED
    return 0


def _arm(point: str | None, sign: signal.Signals) -> None:
    FakeStoppingTransactions.point, FakeStoppingTransactions.sign = point, sign
    vars(published)["Transactions"] = FakeStoppingTransactions
    record, write_down = Publications.record, publication_log_writer.PublicationLog.write_down
    settle, commit_settled = (
        publication_log_writer.PublicationLog.settle,
        publication_log_writer.PublicationLog.commit_settled,
    )

    def recording(publications: Publications, stream: str, key: str, publication: PublicationRecord) -> None:
        FakeStoppingTransactions.die("unrecorded")
        record(publications, stream, key, publication)
        FakeStoppingTransactions.die("recorded")

    def writing(book: publication_log_writer.PublicationLog, *given: Any) -> None:
        write_down(book, *given)
        FakeStoppingTransactions.die("written down")

    def settling(book: publication_log_writer.PublicationLog, *given: Any) -> None:
        whole = given[0] == book.sending.total
        if whole:
            FakeStoppingTransactions.die("settling")
        settle(book, *given)

    def committing(book: publication_log_writer.PublicationLog) -> None:
        anything = book._settled is not None
        commit_settled(book)
        if anything:
            FakeStoppingTransactions.die("settled")

    setattr(Publications, "record", recording)  # noqa: B010 - a method, which an assignment may not replace
    setattr(publication_log_writer.PublicationLog, "write_down", writing)  # noqa: B010
    setattr(publication_log_writer.PublicationLog, "settle", settling)  # noqa: B010
    setattr(publication_log_writer.PublicationLog, "commit_settled", committing)  # noqa: B010
