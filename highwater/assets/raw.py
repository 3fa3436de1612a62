"""Reads a slice from Kafka and commits every record to `raw` as Kafka gave it, without those of erased keys."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.assets import client_reads, erasures_table
from highwater.assets.commit import (
    Clock,
    CommittedSlices,
    commit_with_retries,
    ensure_table,
    take_commit_turn,
)
from highwater.assets.origins import build_publication_time, select_tier_slices
from highwater.assets.small_slices import small_slice_settings
from highwater.assets.unreadable_slices import list_unreadable_slices
from highwater.assets.work import SliceReport, Work, do_nothing
from highwater.balancing import combine_pairwise
from highwater.envelope import MAX_MILLISECONDS, MIN_MILLISECONDS
from highwater.erasing import compute_erasure_times, to_milliseconds
from highwater.errors import NothingFetchedError, OffsetsExpiredError, TopicAbsentError, TopicTruncatedError
from highwater.plans import RECORDED_BY_DECLARATION, Loss, subtract_losses
from highwater.resources.divergence_detection import read_fingerprints
from highwater.resources.expired_offsets import list_expired_slices
from highwater.resources.spark import DIVERGED, delta_errors
from highwater.resources.spark_tables import TASKS, build_known_rows
from highwater.retention import count_records
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice, merge_ranges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.plans import Generation
    from highwater.resources.expired_offsets import ExpiredSlice

TABLE = "raw"
COLUMNS = (
    "slice STRING, topic STRING, generation INT, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestamp_ms BIGINT, timestamp_type INT, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)

STATISTICS_COLUMNS = ("slice", "partition", "offset", "timestamp")

# A read is cut by offsets, not by partitions, into `TASKS` or more where there are enough: a partition that holds most
# records still uses as many cores. Each task costs a consumer's start, 20 a quarter more than 4 at a million records.
MIN_RECORDS_PER_TASK = 40_000
MAX_RECORDS_PER_TASK = 250_000
# Offsets in a file where several slices are gathered from the tasks that read them. A single slice that is larger than
# a task is written by the tasks that read it, a file each: to gather it would take as long as to write it.
RECORDS_PER_FILE = 100_000
# A consumer fetches ahead, beyond the slice's end; where that is the log's end, the broker holds the fetch for the
# default 500 ms and every later request of the task waits after it: 1.1 s instead of 0.15 s for 50,000 records.
# A broker 3.6 or 3.7 answers with nothing when a fetch of tiered records takes longer than the wait. Spark asks again
# with the same wait until its patience ends, 120 s by default: so the read with the short wait has little patience, and
# one that got nothing is repeated with the long wait, which costs no more than the first one's patience.
LONGEST_FETCH_MS = "1"
PATIENCE_MS = "10000"
LONGEST_TIERED_FETCH_MS = "5000"
# After each poll Spark asks the broker where the log begins and ends, and waits for either answer. With Kafka's default
# of 500 records that was nearly half of a read. A poll is of one fetch, so its bytes are bounded as well.
# Larger fetches had no effect.
RECORDS_PER_POLL = "10000"
# Each time that the planner or another run is first, losses are worked out again.
TRIES = 5
SHORT_WAIT: Mapping[str, str] = MappingProxyType({"kafka.fetch.max.wait.ms": LONGEST_FETCH_MS})
# Spark's source takes each timestamp through `java.sql.Timestamp`, in the calendar and zone of the JVM: beyond the year
# 294247 that fails, and before 1900 it gives another moment.
UNCONVERTED = "HIGHWATER_UNCONVERTED_TIMESTAMP"
_UNCONVERTED = re.compile(rf"{UNCONVERTED}|long overflow")
_OLDEST_CONVERTED = "TIMESTAMP '1901-01-01 00:00:00Z'"
# The milliseconds of a record, as Spark's source has it.
_SOURCE_MS = f"IF(timestamp < {_OLDEST_CONVERTED}, RAISE_ERROR('{UNCONVERTED}'), UNIX_MILLIS(timestamp))"


def materialise(work: Work) -> list[SliceReport]:
    """Read the slices from Kafka once and commit them once; a report for each slice, in their order.

    A slice whose records Kafka no longer holds in full keeps the rows it has, and the report says so (I10). A slice
    that was never read is read without the losses that a person accepted (I11); where the stream declares
    `on_expired="record"`, offsets that expired before they were read are recorded as lost first. A slice that this run
    has committed stays: the answer was lost, and the step is tried again.

    Raises:
        OffsetsExpiredError, TopicRecreatedError, TopicTruncatedError, TopicVanishedError, TopicAbsentError: Kafka
            cannot give a slice that was never read.
        DependencyUnavailableError: Kafka, Spark or the lake is unavailable; nothing was committed.
    """
    committed = CommittedSlices.read(work, TABLE, ensure_table(work, TABLE, COLUMNS, STATISTICS_COLUMNS))
    mine = _select_slices_of_run(work.run, committed)
    left = _load_slices_to_read(work, committed, mine)
    skipped = mine | list_unreadable_slices(work, left, committed)
    try:
        return _read_and_commit(work, left, committed, skipped)
    except (OffsetsExpiredError, TopicTruncatedError):
        # Retention deleted records during the read. Spark names neither slice nor values nor the command; the look
        # before a read does.
        before, left = left, _load_slices_to_read(work, committed, mine)
        seen = mine | list_unreadable_slices(work, left, committed)
        if seen.keys() <= skipped.keys() and left == before:
            raise
    return _read_and_commit(work, left, committed, seen)


def _load_slices_to_read(work: Work, committed: CommittedSlices, mine: Collection[str]) -> dict[str, Slice]:
    """The offsets of the slices that are left to read, after recorded losses and those to be recorded now.

    Raises:
        DependencyUnavailableError: Kafka or the ledger is unavailable.
    """
    for _ in range(TRIES):
        losses = work.ledger.list_losses(work.stream.name)
        left = {slice_.key: subtract_losses(slice_, losses) for slice_ in work.slices if slice_.key not in mine}
        if work.stream.on_expired != "record" or not _record_expired(work, left, committed):
            break
    return left


def _record_expired(work: Work, left: Mapping[str, Slice], committed: CommittedSlices) -> bool:
    """Record as lost what retention took of slices that were never read; whether there was anything to record.

    Another run may record the same, or the planner go on meanwhile; then nothing is stored, and it is worked out again.
    """
    never_read = [slice_ for key, slice_ in left.items() if key not in committed.slice_commits and slice_.offsets]
    found = False
    for topic in sorted({slice_.topic for slice_ in never_read}):
        planned = work.ledger.topics.read_planned_topic(work.stream.name, topic)
        try:
            expired = list_expired_slices(work.kafka, topic, [slice_ for slice_ in never_read if slice_.topic == topic])
        except TopicAbsentError:
            continue  # there is an error for it, with its remedy
        if expired and planned is not None:
            found = _record_unread(work, expired, planned.generation) or found
    return found


def _record_unread(work: Work, expired: Sequence[ExpiredSlice], seen: Generation) -> bool:
    """Record what expired of slices that no other run has read meanwhile; whether there are any."""
    with take_commit_turn(work, TABLE) as lease:
        held = work.lake.load_slice_commits(work.stream.name, TABLE, [one.slice_.key for one in expired])
        losses = [loss for one in expired if one.slice_.key not in held for loss in _build_losses(one)]
        lease.check()
        if losses and work.ledger.record_loss(losses, seen=seen):
            work.log("; ".join(f"recorded as lost: {loss.offsets}, {loss.reason}" for loss in losses))
    return bool(losses)


def _build_losses(one: ExpiredSlice) -> list[Loss]:
    return [
        Loss(
            stream=one.slice_.stream,
            topic=one.slice_.topic,
            generation=one.slice_.generation,
            partition=partition,
            offsets=offsets,
            reason=f"expired: deleted before its slice {one.slice_.key} was read",
            accepted_by=RECORDED_BY_DECLARATION,
            recorded_at=datetime.now(UTC),
        )
        for partition, offsets in one.offsets.items()
    ]


def _read_and_commit(
    work: Work, left: Mapping[str, Slice], committed: CommittedSlices, skipped: Mapping[str, str]
) -> list[SliceReport]:
    """Commit what Spark reads from Kafka; where its source cannot convert a timestamp, what our own consumer reads."""
    try:
        with small_slice_settings(work):
            return _commit_from_spark(work, left, committed, skipped)
    except Exception as error:
        if not _UNCONVERTED.search(str(error)):
            raise
    work.log("raw: a record's timestamp is outside of what Spark's Kafka source converts; reading by our own consumer")
    return commit_with_retries(work, TABLE, committed, skipped, partial(_read, left, committed, None))


def _commit_from_spark(
    work: Work, left: Mapping[str, Slice], committed: CommittedSlices, skipped: Mapping[str, str]
) -> list[SliceReport]:
    """Read with the short wait, and again with the long one where Kafka gave nothing."""
    short = {"kafka.fetch.max.wait.ms": LONGEST_FETCH_MS, "kafkaConsumer.pollTimeoutMs": PATIENCE_MS}
    configured = work.kafka.build_spark_options().get("kafka.fetch.max.wait.ms")
    try:
        options = {} if configured else short
        return commit_with_retries(work, TABLE, committed, skipped, partial(_read, left, committed, options))
    except NothingFetchedError as error:
        if configured:
            raise
        work.log(f"{error.problem}; reading again with fetch.max.wait.ms={LONGEST_TIERED_FETCH_MS}")
    options = {"kafka.fetch.max.wait.ms": LONGEST_TIERED_FETCH_MS}
    return commit_with_retries(work, TABLE, committed, skipped, partial(_read, left, committed, options))


def _select_slices_of_run(run: str, committed: CommittedSlices) -> dict[str, str]:
    """Slices that this run has committed before, with that as the reason why their rows stay."""
    why = "this run had committed it before; it is not read again"
    return {key: why for key, slice_commit in committed.slice_commits.items() if run and slice_commit.run == run}


@dataclass(frozen=True)
class _KafkaRows:
    """Kafka's rows of some slices.

    `again` counts the newly read records of slices that were read before; Spark caches them until the commit.
    """

    rows: DataFrame
    left: Mapping[str, Slice]
    again: Mapping[str, int] | None
    spread: str = "offset"
    run: str = ""
    release_rows: Callable[[], None] = do_nothing
    few: bool = False  # how many bytes they are is not known before they are read

    def build_slice_commit(self, slice_: Slice, attempt: int) -> SliceCommit:
        lost = slice_.offsets - self.left[slice_.key].offsets
        return SliceCommit(slice_, attempt, rows=None, counts={"lost": lost} if lost else {}, past=True, run=self.run)

    def count_files(self, keys: Sequence[str]) -> int:
        return compute_file_count([self.left[key].offsets for key in keys])

    def count_tasks(self, keys: Sequence[str]) -> int:
        if self.again is not None:
            return 1
        ranges = [len(offsets) for key in keys for offsets in self.left[key].ranges.values()]
        most = _compute_records_per_task(sum(ranges))
        return sum(math.ceil(offsets / most) for offsets in ranges)

    def find_refusal(self, slice_: Slice, committed: SliceCommit | None) -> str | None:
        if committed is None or committed.rows is None or self.again is None:
            return None
        found, recorded = self.again.get(slice_.key, 0), count_records(committed)
        if found >= recorded:
            return None
        return f"rows unchanged: Kafka would give {found} records, the commit recorded {recorded}"

    def select_rows(self, attempts: Mapping[str, int]) -> DataFrame:
        from pyspark.sql import functions as F

        # Each step is analysed by itself, and mostly all slices are committed.
        return (
            self.rows if attempts.keys() == self.left.keys() else self.rows.where(F.col("slice").isin(list(attempts)))
        )

    def around_commit(self, keys: Sequence[str]) -> AbstractContextManager[Callable[[], None]]:
        del keys
        return nullcontext(do_nothing)

    def release(self) -> None:
        try:
            if self.again is not None:
                self.rows.unpersist()
        finally:
            self.release_rows()


def _read(
    left: Mapping[str, Slice],
    committed: CommittedSlices,
    options: Mapping[str, str] | None,
    work: Work,
    slices: Sequence[Slice],
    clock: Clock,
) -> _KafkaRows:
    """Make ready to read the slices: the records go from Kafka into the files in one pass, without a stop in between.

    Only where rows exist already are the records counted first, and held meanwhile: fewer must not replace more (I10).
    """
    mine = {slice_.key: left[slice_.key] for slice_ in slices}
    with ExitStack() as opened, delta_errors(f"topic {work.stream.topic}"), clock.phase("read"):
        source = _ClientRead(work, opened) if options is None else _SparkRead(work, options)
        rows = _read_rows(work, [*mine.values()], source)
        if committed.slice_commits.keys().isdisjoint(mine):
            return _KafkaRows(rows, mine, again=None, run=work.run, release_rows=opened.pop_all().close)
        rows = rows.persist()
        counted = rows.groupBy("slice").count().collect()
        again = {row["slice"]: row["count"] for row in counted}
        return _KafkaRows(rows, mine, again=again, run=work.run, release_rows=opened.pop_all().close)


@dataclass(frozen=True)
class _SparkRead:
    """Records as Spark's Kafka source reads them.

    Args:
        work: the connections.
        options: options of the source, beside those that every read has.
        ms: a record's timestamp in milliseconds, in SQL.
        type_: its type, likewise.
    """

    work: Work
    options: Mapping[str, str]
    ms: str = _SOURCE_MS
    type_: str = "timestampType"

    def read(self, topic: str, ranges: Mapping[int, OffsetRange]) -> DataFrame:
        return _read_ranges(self.work, topic, ranges, self.options)


@dataclass(frozen=True)
class _ClientRead:
    """The records of a slice as our own consumer reads them, with any timestamp; slower than Spark.

    Args:
        work: the connections.
        opened: removes the tables that they are read into, as soon as it is closed.
        ms, type_: as Spark's.
    """

    work: Work
    opened: ExitStack
    ms: str = "timestamp_ms"
    type_: str = "timestamp_type"

    def read(self, topic: str, ranges: Mapping[int, OffsetRange]) -> DataFrame:
        path = client_reads.stage_records(self.work, topic, ranges)
        self.opened.callback(client_reads.remove, self.work.lake, self.work.stream.name, path)
        return self.work.spark.read.format("delta").load(path)


def _read_rows(work: Work, slices: Sequence[Slice], source: _SparkRead | _ClientRead) -> DataFrame:
    """The records of the slices, each named after its slice, by as few reads as their ranges allow."""
    from pyspark.sql import DataFrame as Frame

    groups: dict[tuple[str, int], list[Slice]] = {}
    for slice_ in slices:
        groups.setdefault((slice_.topic, slice_.generation), []).append(_with_fingerprints(work, slice_))
    frames = [_read_topic_rows(work, group, source) for group in groups.values()]
    return _without_erased(work, combine_pairwise(Frame.unionByName, frames))


def _without_erased(work: Work, rows: DataFrame) -> DataFrame:
    """The rows without the records of erased keys, wherever they come back from.

    A copy on a DLQ topic that was sent after the erasure, of a record from before it, is not a new record.
    """
    from pyspark.sql import functions as F

    gone = compute_erasure_times(work.ledger.erasures.list_for_stream(work.stream.name))
    if not gone:
        return rows
    # Omitted records must be known for as long as the others.
    erasures_table.sync_with_ledger(work.ledger, work.lake, work.stream.name, of_keys=True)
    moments = _build_literal_map({digest: to_milliseconds(moment) for digest, moment in gone.items()})
    last = F.expr(f"TRY_ELEMENT_AT({moments}, SHA2(key, 256))")
    published = build_publication_time(work) if select_tier_slices(work, work.slices) else F.col("timestamp_ms")
    return rows.where(last.isNull() | (published > last))


def _with_fingerprints(work: Work, slice_: Slice) -> Slice:
    """The slice with a fingerprint of each range's last record, where its plan had no answer in time.

    It shows changes during the read; for the time before, only leader epochs show them.
    """
    unmarked = {
        p: offsets
        for p, offsets in slice_.ranges.items()
        if len(offsets) and (p not in slice_.fingerprints or slice_.fingerprints[p].offset not in offsets)
    }
    return (
        replace(slice_, fingerprints={**slice_.fingerprints, **read_fingerprints(work.kafka, slice_.topic, unmarked)})
        if unmarked
        else slice_
    )


def _build_fenced_value(slices: Sequence[Slice], ms: str) -> str:
    """The value in SQL, or an error in Spark when another record is where the plan saw a partition's last one.

    The look before the read cannot see a log that is replaced, or a topic that is recreated, while it is read.
    """
    ordered = sorted(slices, key=attrgetter("ordinal"))
    prints = {
        p: mark for slice_ in ordered for p, mark in slice_.fingerprints.items() if mark.offset in slice_.ranges[p]
    }
    if not prints:
        return "value"
    at = _build_literal_map({p: mark.offset for p, mark in prints.items()})
    expected = _build_literal_map({p: mark.digest for p, mark in prints.items()})
    diverged = f"RAISE_ERROR(CONCAT('{DIVERGED}: partition ', partition, ' offset ', offset))"
    checked = f"IF({_DIGEST.format(ms=ms)} = TRY_ELEMENT_AT({expected}, partition), value, {diverged})"
    return f"IF(offset = TRY_ELEMENT_AT({at}, partition), {checked}, value) AS value"


def _build_literal_map(values: Mapping[int, int | str] | Mapping[str, int]) -> str:
    """A map in SQL, of numbers and of digests in hexadecimal; expressions of PySpark take a call of the JVM a part."""
    return f"MAP({', '.join(_build_literal(part) for pair in values.items() for part in pair)})"


def _build_literal(value: int | str) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{value}L"


# `highwater.divergence.compute_digest` as an expression of Spark.
_DIGEST = (
    "SHA2(CONCAT(CAST(CAST({ms} AS STRING) AS BINARY), "
    "COALESCE(CONCAT(X'01', key), X'00'), COALESCE(CONCAT(X'01', value), X'00')), 256)"
)


def _read_topic_rows(work: Work, slices: Sequence[Slice], source: _SparkRead | _ClientRead) -> DataFrame:
    """The records of slices of one topic and generation, each named after its slice."""
    from pyspark.sql import DataFrame as Frame

    merged = merge_ranges(slices)
    reads = max((len(ranges) for ranges in merged.values()), default=0)
    if not reads:
        return work.spark.createDataFrame([], COLUMNS)
    topic, columns = slices[0].topic, _build_columns(slices, source)
    frames = [
        source.read(topic, {p: ranges[i] for p, ranges in merged.items() if i < len(ranges)}).selectExpr(*columns)
        for i in range(reads)
    ]
    rows = combine_pairwise(Frame.unionByName, frames)
    return rows if len(slices) == 1 else _with_slice_keys(work, slices, rows)


def _build_columns(slices: Sequence[Slice], source: _SparkRead | _ClientRead) -> list[str]:
    """The columns of a record, in SQL, as one step of the plan: Spark analyses each step for milliseconds."""
    named = [f"{_build_literal(slices[0].key)} AS slice"] if len(slices) == 1 else []
    is_time = f"{source.ms} BETWEEN {MIN_MILLISECONDS} AND {MAX_MILLISECONDS}"
    times = f"IF({is_time}, TIMESTAMP_MILLIS({source.ms}), NULL) AS timestamp", f"{source.ms} AS timestamp_ms"
    taken = "topic", "partition", "offset", *times, f"{source.type_} AS timestamp_type", "key", "headers"
    return [*named, f"{slices[0].generation} AS generation", *taken, _build_fenced_value(slices, source.ms)]


def _read_ranges(
    work: Work, topic: str, ranges: Mapping[int, OffsetRange], options: Mapping[str, str] = SHORT_WAIT
) -> DataFrame:
    options = {
        "kafka.max.poll.records": RECORDS_PER_POLL,
        **options,
        **work.kafka.build_spark_options(),
        "assign": json.dumps({topic: sorted(ranges)}),
        "startingOffsets": json.dumps({topic: {str(p): r.start for p, r in ranges.items()}}),
        "endingOffsets": json.dumps({topic: {str(p): r.end for p, r in ranges.items()}}),
        "kafka.isolation.level": "read_committed",
        "failOnDataLoss": "true",
        "includeHeaders": "true",
        "maxRecordsPerPartition": str(_compute_records_per_task(sum(len(offsets) for offsets in ranges.values()))),
    }
    return work.spark.read.format("kafka").options(**options).load()


def compute_file_count(records: Sequence[int]) -> int:
    """Data files at the most, for slices with these record counts that are committed together."""
    total = sum(records)
    return max(1, math.ceil(total / (_compute_records_per_task(total) if len(records) == 1 else RECORDS_PER_FILE)))


def _compute_records_per_task(offsets: int) -> int:
    return min(MAX_RECORDS_PER_TASK, max(MIN_RECORDS_PER_TASK, math.ceil(offsets / TASKS)))


def _with_slice_keys(work: Work, slices: Sequence[Slice], rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    bounds = build_known_rows(
        work.spark,
        "slice STRING, in_partition INT, start BIGINT, end BIGINT",
        [(s.key, p, r.start, r.end) for s in slices for p, r in s.ranges.items() if len(r)],
    )
    inside = (
        (rows["partition"] == bounds["in_partition"])
        & (rows["offset"] >= bounds["start"])
        & (rows["offset"] < bounds["end"])
    )
    return rows.join(F.broadcast(bounds), inside).select("slice", rows["*"])
