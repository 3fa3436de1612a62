"""An event that was sent to the topic of accepted events is not rejected by a later decision of its slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from highwater.assets import accepted_copies
from highwater.assets.commit import LEASE_SECONDS
from highwater.assets.publication_log import SENDING, TABLE, list_sending_slices, read_published_commits
from highwater.envelope import ORIGIN, Origin
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.publishing import EventState, can_retract, ensure_none_retracted
from highwater.resources.delta import count_slice_rows, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from highwater.assets.work import Work
    from highwater.resources.ledger.leases import Lease
    from highwater.slice_commits import SliceCommit

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
# An error names some of at most this many.
MAX_RETRACTED = 1_000
# The time without sending after a run died during the commit of a decision: Spark may go on with it. A Connect server
# notices within 120 s that a client is gone, and ends its query 300 s later (`detachedTimeout`) or 330 s. That
# is 450 s, the least that is left of a term that was renewed a quarter of it ago.
ABANDONED_SECONDS = 600


def ensure_no_retraction(work: Work, keys: Sequence[str], accepted: DataFrame, refused: DataFrame) -> None:
    """Ensure that a new decision of slices accepts all that was sent of them, or may have been, before it is committed.

    Args:
        work: the connections.
        keys: slices that are about to be decided.
        accepted: the currently accepted records: slice and origin.
        refused: the currently rejected records that were not left to the DLQ before: the same columns.

    Raises:
        RetractionError: an event that was sent would be rejected, and nobody allows that.
        DependencyUnavailableError: the lake could not be read.
    """
    found: dict[str, dict[Origin, datetime | None]] = {}
    for row in (
        *_load_retracted_events(work, _list_sent_slices(work, keys), accepted),
        *accepted_copies.list_refused_events(work, keys, refused),
    ):
        # Not by a float: that rounds the last microsecond of the year 9999 into a year that Python does not have.
        at = None if row["us"] is None else _BEGIN + timedelta(microseconds=row["us"])
        found.setdefault(row["slice"], {}).setdefault(Origin.from_row(row.asDict()), at)
    leaves = work.ledger.breakers.read_accepted_slices([*found])
    for key, origins in found.items():
        leave = leaves[key].accepted_at if key in leaves else None
        ensure_none_retracted(key, origins, allowed=can_retract(leave, origins.values()))


def _load_retracted_events(work: Work, keys: Sequence[str], accepted: DataFrame) -> list[Row]:
    """Events that were sent of slices and are not accepted of them now: the slice, the origin, and when it was sent."""
    from pyspark.sql import functions as F

    if not keys:
        return []
    columns = ["slice", *ORIGIN, "state", "published_at"]
    # The batch before the table: a batch that settles between the two reads is in the table by then.
    being_sent = list_sending_slices(work.lake, work.stream) & {*keys}
    rows = work.spark.read.format("delta").load(work.lake.build_table_path(work.stream.name, TABLE))
    if being_sent:
        sending = work.spark.read.format("delta").load(work.lake.build_table_path(work.stream.name, SENDING))
        rows = rows.select(*columns).union(sending.where("batch IS NULL").select(*columns))
    was = rows.where(F.col("slice").isin(*keys)).where(F.col("state") == EventState.SENT.value)
    sent = was.select("slice", *ORIGIN, F.unix_micros("published_at").alias("us"))
    # The last that were sent first: a leave that covers them covers the rest.
    gone = sent.join(accepted.select("slice", *ORIGIN), ["slice", *ORIGIN], "left_anti")
    return gone.orderBy(F.col("us").desc_nulls_first()).limit(MAX_RETRACTED).collect()


def list_exposed_slices(work: Work, committed: Mapping[str, SliceCommit]) -> set[str]:
    """The slices whose committed events may be sent until they are reprocessed.

    A slice that was sent unchanged is followed only by second deliveries, where their first one is retracted.

    Args:
        work: the connections.
        committed: the commits of slices in events. A slice without a decision was never sent.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    if work.stream.publishes is None or not committed:
        return set()
    found = read_published_commits(work.lake, work.stream, [*committed])
    return {
        key
        for key, slice_commit in committed.items()
        if key not in found or found[key].attempt != slice_commit.attempt or found[key].counts.get("second_deliveries")
    }


def lease_sending(work: Work, seconds: float = LEASE_SECONDS) -> AbstractContextManager[Lease]:
    """The lock between writing a batch and committing a decision that may reject its events: one at a time."""
    return work.ledger.lease(f"sending {work.stream.name}", seconds=seconds, wait=2 * ABANDONED_SECONDS)


@contextmanager
def block_sending(work: Work, check_sent: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Keep batches from being written down while slices are committed, and see again what was sent of them.

    Writing a batch is followed by a look at events. So this commit sees the batch, or the batch sees the decision.

    Args:
        work: the connections.
        check_sent: ensures that sent events stay events; for the slices whose committed events may be sent.

    Raises:
        RetractionError: an event that was sent would be rejected, and nobody allows that.
        LeaseHeldError: somebody else kept the lock, or took it; nothing was committed.
        DependencyUnavailableError: the lake or the ledger could not be read.
    """
    with lease_sending(work, ABANDONED_SECONDS) as lease:
        check_sent()
        lease.left = True  # a run that dies, or gets no report of the outcome, leaves a query that may still commit
        try:
            yield lease.check
        except (SupersededAttemptError, LeaseHeldError):
            lease.left = False  # nothing was written, and nothing will be
            raise
        lease.left = False


def _list_sent_slices(work: Work, keys: Sequence[str]) -> list[str]:
    """The slices with sent events, or events that may have been sent, whatever events holds of them."""
    if work.stream.publishes is None:
        return []
    # The batch before the table: a batch that settles between the two reads is in the table by then.
    being_sent = list_sending_slices(work.lake, work.stream)
    table = open_table(work.lake.build_table_path(work.stream.name, TABLE))
    if table is None:
        return []
    rows = count_slice_rows(table, keys)
    return [key for key in keys if rows[key] or key in being_sent]
