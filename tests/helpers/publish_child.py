"""A process that publishes the rejects of a slice, and kills or stops itself at a point that a test names."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from highwater.assets import dlq
from highwater.assets.work import Work
from highwater.errors import SupersededAttemptError
from highwater.plans import PublicationRecord
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.publications import Publications
from highwater.resources.transactions import PublicationMark, Transactions
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from highwater.resources.producer_records import Record

FENCED = 7
RECORDS = 5
POINTS = ("before", "half", "sent", "marked", "committing", "committed", "unrecorded", "recorded")
HALVES = {RECORDS // 2: "half", RECORDS + RECORDS // 2: "half of the second"}
# The calls that `Transactions` repeats until they work, in their order.
INIT, MARK, OFFSETS, COMMIT = range(4)


def main(task: dict[str, Any]) -> int:
    """Publish; the point says where this process ends."""
    point, sign = task["point"], signal.Signals(task["sign"])
    dlq.RECORDS_PER_TRANSACTION = RECORDS
    ledger = Ledger(task["ledger"])
    work = Work(
        make_stream(task["topic"]),
        ledger.get([task["slice"]]),
        None,  # type: ignore[arg-type]  # nothing of Spark is asked before the commit of the table
        Lake(task["lake"]),
        ledger,
        Kafka(task["bootstrap"]),
        print,
    )
    _arm(point, sign)
    decided = work.lake.load_commits_and_version(work.stream.name, "rejects", work.keys)
    [slice_] = work.slices
    try:
        dlq._publish(work, slice_, decided[0][slice_.key], ensure_dlq_topics(work.kafka, work.stream))
    except SupersededAttemptError:
        return FENCED
    return 0


class FakeDyingTransactions(Transactions):
    """Transactions that end their process at a point."""

    point: str | None = None
    sign = signal.SIGKILL
    produced = 0
    calls = 0

    @classmethod
    def die(cls, now: str) -> None:
        """End this process if it is to end here."""
        if cls.point == now:
            os.kill(os.getpid(), cls.sign)

    @classmethod
    def die_soon(cls) -> None:
        """Within the milliseconds that a commit takes."""
        time.sleep(random.random() / 200)
        cls.die("committing")

    def commit(self, records: Iterable[Record], mark: PublicationMark, *given: Any) -> None:
        self.die("before")
        super().commit(records, mark, *given)
        self.die("committed")

    def _produce(self, records: Iterable[Record]) -> None:
        for record in records:
            super()._produce([record])
            self.produced += 1
            if self.point is not None and self.point == HALVES.get(self.produced):
                self._producer.flush(10)
                self.die(self.point)

    def _call_with_retries(self, call: Callable[[], Any], seconds: float) -> Any:
        if self.calls == OFFSETS and self.point == "sent":
            self._producer.flush(10)
            self.die("sent")
        if self.calls == COMMIT:
            self.die("marked")
            threading.Thread(target=self.die_soon, daemon=True).start()
        self.calls += 1
        return super()._call_with_retries(call, seconds)


def _arm(point: str | None, sign: signal.Signals) -> None:
    FakeDyingTransactions.point, FakeDyingTransactions.sign = point, sign
    vars(dlq)["Transactions"] = FakeDyingTransactions
    record = Publications.record

    def recording(publications: Publications, stream: str, key: str, publication: PublicationRecord) -> None:
        if publication.sent:
            FakeDyingTransactions.die("unrecorded")
        record(publications, stream, key, publication)
        if publication.sent:
            FakeDyingTransactions.die("recorded")

    setattr(Publications, "record", recording)  # noqa: B010 - a method, which an assignment may not replace
