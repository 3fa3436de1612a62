"""Events: what of raw was parsed, validated and resolved. Their commit is the decision of the whole split (I4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from highwater.assets import raw
from highwater.assets.breaker_gate import end_probe, ensure_admitted, ensure_within_limit
from highwater.assets.commit import (
    LEASE_SECONDS,
    Clock,
    CommittedSlices,
    commit_until_settled,
    ensure_table,
    release_quietly,
)
from highwater.assets.dlq_copies import COPIED_AT
from highwater.assets.evolution import adapt_types, evolve
from highwater.assets.fields import sql_type
from highwater.assets.ordered_holds import HOLDS, counted_holds, end_holds, ensure_none_held, holding, rejected_anyway
from highwater.assets.origins import (
    DLQ,
    TIMESTAMP,
    Seen,
    seen_now,
    tier_slices,
    with_fate,
    with_origins,
    with_superseded,
)
from highwater.assets.parsing import (
    INVALID,
    MALFORMED,
    SCHEMA,
    UNRESOLVED,
    event_time_of,
    field_columns,
    is_tombstone,
    key_of,
    parse_records,
    quoted,
    version_of,
    version_type,
)
from highwater.assets.retraction_guard import ensure_no_retraction, exposed, guarded
from highwater.assets.work import SliceReport, Work, nothing
from highwater.envelope import ORIGIN
from highwater.errors import SliceHeldError, SupersededAttemptError, TemporaryError, UnbalancedError
from highwater.resources.delta import slice_is_one_of
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import rows_at
from highwater.retention import aged, records
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Stream
    from highwater.slices import Slice

TABLE = "events"
ORIGIN_COLUMNS = (
    "slice STRING, origin_topic STRING, origin_generation INT, origin_partition INT, origin_offset BIGINT, "
    "origin_timestamp TIMESTAMP, origin_timestamp_ms BIGINT, attempt INT, retries INT, reclaims INT"
)
# The last two mark events that came back through the DLQ: few files have any of them.
SEARCHED = (
    "slice",
    "origin_partition",
    "origin_offset",
    "origin_timestamp",
    "key",
    "version",
    "event_time",
    "retries",
    "reclaims",
)
REASONS = (MALFORMED, SCHEMA, INVALID, UNRESOLVED)
# Among the counts of a slice: events whose record has another key than theirs.
OTHER_KEYS = "other_keys"
# What a record is beside its origin.
PAYLOAD = ("key", "value", "headers")


def counts_keys(stream: Stream) -> bool:
    """Whether it is counted how many records have another key than their event."""
    return bool(stream.key) and stream.record_key == "warn"


def columns(stream: Stream) -> str:
    """The columns of the stream's events table in SQL."""
    version = f"version {version_type(stream)}, " if stream.versioned else ""
    deleted = ", deleted BOOLEAN" if stream.deletes else ""
    fields = "".join(f", {quoted(f.name)} {sql_type(f)}" for f in field_columns(stream))
    return f"{ORIGIN_COLUMNS}, key STRING, {version}event_time TIMESTAMP{deleted}{fields}"


def searched(stream: Stream) -> list[str]:
    """The columns whose file statistics let readers of events skip files."""
    lacking = set() if stream.versioned else {"version"}
    return [*[name for name in SEARCHED if name not in lacking], *(["deleted"] if stream.deletes else [])]


def materialise(work: Work) -> list[SliceReport]:
    """Decide the split of the slices and commit their events once; a report for each slice, in their order.

    A slice whose rejects, publication, current or metrics do not follow the committed events was left half done: its
    decision is taken over. So a decision is recreated only when all that it rejected is published, and known as such,
    and the minutes of its events are known to metrics.

    Slices of tiers are decided one after another, by one run at a time: what one accepts is superseded in the others.
    So are those of the main topic where a reason holds, in their order: what comes before a held one is committed.

    A slice whose rows of raw went by their age keeps its decision, and the report says so.

    Raises:
        TemporaryError: raw of a slice is not there yet.
        UnbalancedError: rows of raw went by their age, and so did the decision by something else.
        BreakerOpenError: the stream's breaker lets none of them be decided.
        RetractionError: an event that was sent to the accepted topic would be rejected; nothing was committed.
        SliceHeldError: records hold a slice; neither it nor what comes behind it was committed.
        RejectsOverLimitError: too many records of a slice would be rejected; no slice of the main topic was committed.
        DependencyAwayError: Spark, the lake or the reference table is away; nothing was committed.
    """
    ensure_table(work, TABLE, columns(work.stream), searched(work.stream))
    read = require(work, raw.TABLE)
    work = evolve(work, raw_rows(work, work.slices, read.version), TABLE)
    adapt_types(work, TABLE, columns(work.stream))
    tiers = tier_slices(work, work.slices)
    main = [slice_ for slice_ in work.slices if slice_ not in tiers]
    found = [report for together in _taken(work, main) for report in _materialise(replace(work, slices=together), read)]
    for slice_ in tiers:
        with work.ledger.lease(retries_lease(work.stream), seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS) as lease:
            found += _materialise(replace(work, slices=[slice_], before_commit=lease.check), read)
    return sorted(found, key=lambda report: work.keys.index(report.slice_.key))


def _taken(work: Work, main: Sequence[Slice]) -> list[Sequence[Slice]]:
    """Slices of the main topic as they are decided together: all at once, or one after another."""
    if work.stream.ordered:
        return [[slice_] for slice_ in sorted(main, key=attrgetter("ordinal"))]
    return [main] if main else []


def retries_lease(stream: Stream) -> str:
    """The lock of those who decide of records that came back, or take them back from the DLQ: one at a time."""
    return f"retries {stream.name}"


def _materialise(work: Work, read: CommittedSlices) -> list[SliceReport]:
    committed = CommittedSlices.read(work, TABLE)
    # What was never decided was never published either.
    published = CommittedSlices.read(work, DLQ) if committed.slice_commits else CommittedSlices({}, -1)
    skipped = _undecidable(read, work.keys, committed) | _unfinished(work, read, committed, published)
    ensure_admitted(work, [slice_ for slice_ in work.slices if slice_.key not in skipped], committed.slice_commits)
    found = commit_until_settled(work, TABLE, committed, skipped, partial(_decide, committed, published, read))
    _ensure_as_measured(work, found)
    if work.classified is not None:
        work.classified.committed({report.slice_.key: report.attempt for report in found if report.note is None})
    end_holds(work)
    return found


def require(work: Work, table: str) -> CommittedSlices:
    """The commits of the slices in an upstream table.

    Raises:
        TemporaryError: a slice is not in it.
    """
    committed = CommittedSlices.read(work, table)
    ensure_held(work, table, work.keys, committed.slice_commits)
    return committed


def ensure_held(work: Work, table: str, keys: Sequence[str], held: Mapping[str, SliceCommit]) -> None:
    """Ensure that slices are in an upstream table, by the slice commits that were read there.

    Raises:
        TemporaryError: one does not.
    """
    if missing := [key for key in keys if key not in held]:
        raise TemporaryError(
            f"{work.stream.name}/{table} does not hold {', '.join(missing)}",
            remedy=f"materialise {work.stream.name}/{table} for these slices first",
        )


def _undecidable(read: CommittedSlices, keys: Sequence[str], committed: CommittedSlices) -> dict[str, str]:
    """Slices whose decision stays as it is, since raw does not hold what it was made of any more."""
    gone = {key: count for key in keys if (count := aged(read.slice_commits[key]))}
    lost = sorted(gone.keys() - committed.slice_commits.keys())
    if lost:
        raise UnbalancedError(
            f"{', '.join(lost)}: there is no decision, and nothing to decide of",
            stored="rows of raw went by their age, which only those of decided slices do",
            found="events do not hold the slices",
            remedy="restore events, or materialise raw of the slices again while Kafka holds their records",
        )
    return {
        key: f"the decision stays: {count:,} rows of raw went by their age; where Kafka still holds the records, "
        "materialise raw of the slice first"
        for key, count in gone.items()
    }


def _unfinished(
    work: Work, read: CommittedSlices, committed: CommittedSlices, published: CommittedSlices
) -> dict[str, str]:
    """Slices with a committed decision and incomplete followers: they are finished, not reprocessed."""
    if not committed.slice_commits:
        return {}
    rejects = CommittedSlices.read(work, "rejects")
    followers = {"rejects": rejects.attempt, DLQ: published.attempt}
    if work.stream.versioned:
        followers["current"] = work.lake.commits(work.stream.name, "current", work.keys).attempt
    if work.stream.metrics:
        followers["metrics"] = CommittedSlices.read(work, "metrics").attempt
    lacking = {
        key: [
            name
            for name, attempt in followers.items()
            # Without rejects, now and before, there is nothing to publish, and no commit of it.
            if attempt(key) != slice_commit.attempt and (name != DLQ or slice_commit.counts["rejects"] or attempt(key))
        ]
        for key, slice_commit in committed.slice_commits.items()
    }
    open_ = [key for key, names in lacking.items() if names]
    stuck = _unfinishable(work, read, committed, rejects, open_)
    for key, why in stuck.items():
        work.log(f"{key}: the split of attempt {committed.attempt(key)} is reprocessed: {why}")
    return {
        key: f"the split of attempt {committed.attempt(key)} is taken over: {' and '.join(lacking[key])} still to be "
        "written"
        for key in open_
        if key not in stuck
    }


def _unfinishable(
    work: Work, read: CommittedSlices, committed: CommittedSlices, rejected: CommittedSlices, keys: Sequence[str]
) -> dict[str, str]:
    """The unfinished slices whose split can never be finished, with the reason: their rows do not add up.

    No rejects can follow such a split, so it would fail each run that takes it over. It may be reprocessed, since
    nothing of it was published: `dlq` sends no rejects that are not as many as were decided. Where that began before
    somebody changed a table, the split stays.
    """
    if not keys:
        return {}
    begun = {key: one.attempt for key, one in work.ledger.publications(keys).items()}
    held, left = (work.lake.rows_of(work.stream.name, table, keys) for table in (TABLE, "rejects"))
    found = {}
    for key in keys:
        slice_commit = committed.slice_commits[key]
        followed = rejected.attempt(key) == slice_commit.attempt
        classified_rows = {
            "events": (slice_commit.rows, held.get(key)),
            "rejects": (slice_commit.counts["rejects"], left.get(key) if followed else None),
            "raw": (slice_commit.counts["raw"], None if followed else records(read.slice_commits[key])),
        }
        wrong = [
            f"{name} hold {rows} rows, not {said}"
            for name, (said, rows) in classified_rows.items()
            if rows not in {None, said}
        ]
        if wrong and begun.get(key) != slice_commit.attempt:
            found[key] = " and ".join(wrong)
    return found


def _ensure_as_measured(work: Work, found: Sequence[SliceReport]) -> None:
    """Compare the written rows with the earlier measurement (I5).

    Raises:
        UnbalancedError: another number of events was written.
    """
    for report in found:
        expected = report.counts["events"]
        if report.note is None and report.rows != expected:
            if CommittedSlices.read(work, TABLE).attempt(report.slice_.key) != report.attempt:
                continue  # somebody committed since, and the rows are of that
            raise UnbalancedError(
                f"{report.slice_.key}: another number of events was written than was decided",
                stored=expected,
                found=report.rows,
                remedy="materialise the slice again from events on: it is reprocessed",
            )


@dataclass(frozen=True)
class _Decision:
    """The split of some slices, held by Spark until it is committed, or until the run's rejects are.

    Args:
        work: the connections.
        rows: the classified records.
        measured: the numbers of the split, by slice.
        seen: what else it was decided by.
        exposed: slices with events that may still be sent until they are reprocessed.
        spread: the column that spreads a slice over files.
    """

    work: Work
    rows: DataFrame
    measured: Mapping[str, Mapping[str, int]]
    seen: Seen
    exposed: Collection[str]
    spread: str = "origin_offset"

    def slice_commit(self, slice_: Slice, attempt: int) -> SliceCommit:
        counts = dict(self.measured[slice_.key]) if slice_.key in self.measured else _nothing()
        return SliceCommit(slice_, attempt, rows=counts["events"], counts={**counts, **self.seen[slice_.key]})

    def files(self, keys: Sequence[str]) -> int:
        return raw.files_for([self.measured[key]["events"] if key in self.measured else 0 for key in keys])

    def tasks(self, keys: Sequence[str]) -> int:
        del keys
        return 1

    def refused(self, slice_: Slice, committed: SliceCommit | None) -> str | None:
        del slice_, committed
        return None

    def rows_of(self, attempts: Mapping[str, int]) -> DataFrame:
        from pyspark.sql import functions as F

        mine = self._accepted.where(F.col("slice").isin(list(attempts)))
        return mine.select(*origin_columns(attempts), *_event_columns(self.work.stream))

    @property
    def _accepted(self) -> DataFrame:
        from pyspark.sql import functions as F

        return self.rows.where(_alive() & F.col("reason").isNull())

    @property
    def _rejected_now(self) -> DataFrame:
        """Rejected rows that were not left to the DLQ before."""
        from pyspark.sql import functions as F

        return self.rows.where(is_rejected() & F.col("again"))

    def ensure_no_retraction(self, keys: Sequence[str]) -> None:
        """Ensure that all that was sent of slices stays an event."""
        ensure_no_retraction(self.work, keys, self._accepted, self._rejected_now)

    def around_commit(self, keys: Sequence[str]) -> AbstractContextManager[Callable[[], None]]:
        mine = [key for key in keys if key in self.exposed]
        return guarded(self.work, lambda: self.ensure_no_retraction(mine)) if mine else nullcontext(nothing)

    def release(self) -> None:
        if self.work.classified is None:
            self.rows.unpersist()


def _nothing() -> dict[str, int]:
    names = ("raw", "events", "tombstones", "superseded", "rejects", *(f"rejects_{reason}" for reason in REASONS))
    return dict.fromkeys(names, 0)


def is_rejected() -> Column:
    """Whether a classified record is a reject."""
    from pyspark.sql import functions as F

    return _alive() & F.col("reason").isNotNull()


def _alive() -> Column:
    """Whether a record is an event or a reject."""
    from pyspark.sql import functions as F

    return ~F.col("tombstone") & ~F.col("superseded")


def _decide(
    committed: CommittedSlices,
    published: CommittedSlices,
    read: CommittedSlices,
    work: Work,
    slices: Sequence[Slice],
    clock: Clock,
) -> _Decision:
    from pyspark.sql import functions as F

    with delta_errors("the split of " + ", ".join(s.key for s in slices)), clock.phase("classify"):
        seen = {slice_.key: seen_now(work, slice_, committed.version) for slice_ in slices}
        # Spark may compute the split more than once until it is committed: all that it reads is of one version.
        version = work.lake.table_at(work.stream.name, raw.TABLE).version()
        rows = with_origins(work, raw_rows(work, slices, version), slices, seen, published.slice_commits)
        fated = with_fate(work, rows, slices, seen, published)
        reason = F.coalesce("held_reason", "reason")
        classified_rows = with_superseded(work, parse_records(work, fated).withColumn("reason", reason), slices)
        rows = _needed(work.stream, classified_rows).persist()
        if work.classified is not None:
            work.classified.keep(rows, {slice_.key: published.attempt(slice_.key) for slice_ in slices})
        try:
            measured = {row["slice"]: row.asDict() for row in _measure(work.stream, rows).collect()}
            # Before it is looked what was sent: of the others nothing is sent after that look.
            open_ = exposed(work, committed.slice_commits)
            _ensure_as_read(work, read, {slice_.key: measured.get(slice_.key, {}).get("raw", 0) for slice_ in slices})
            made = _Decision(work, rows, {key: _plain(row) for key, row in measured.items()}, seen, open_)
            _ensure_decidable(made, committed, slices, measured)
        except BaseException:
            release_quietly(rows.unpersist, work)
            raise
        return made


def _ensure_as_read(work: Work, read: CommittedSlices, found: Mapping[str, int]) -> None:
    """Ensure that a split is of the rows that raw held when it was read: rows may expire or be read again meanwhile.

    Raises:
        SupersededAttemptError: raw was committed again since, with another number of rows.
    """
    differ = [key for key, count in found.items() if count != read.slice_commits[key].rows]
    now = CommittedSlices.read(work, raw.TABLE) if differ else read
    for key in differ:
        if now.attempt(key) != read.attempt(key):
            raise SupersededAttemptError(
                f"{key}: raw was committed again while it was decided of",
                stored=read.slice_commits[key].rows,
                found=found[key],
                remedy="nothing: the slice is tried again",
            )


def _ensure_decidable(
    made: _Decision, committed: CommittedSlices, slices: Sequence[Slice], measured: Mapping[str, Mapping[str, Any]]
) -> None:
    """Ensure that nothing speaks against a split before it is committed; the breaker, which remembers, is asked last.

    What was sent is asked of all slices: of one whose events the lake lost it is in `published` alone.
    """
    work, measured_rejects = made.work, rejected_anyway(measured, made.measured)
    try:
        ensure_none_held(work, committed.slice_commits, measured)
    except SliceHeldError:
        end_probe(work, slices, committed.slice_commits, measured_rejects)
        raise
    made.ensure_no_retraction([slice_.key for slice_ in slices])
    ensure_within_limit(work, slices, committed.slice_commits, measured_rejects)


def raw_rows(work: Work, slices: Sequence[Slice], version: int) -> DataFrame:
    """The raw rows of the slices in one version of the table."""
    rows = rows_at(work.spark, work.lake.path(work.stream.name, raw.TABLE), version)
    return rows.where(slice_is_one_of([s.key for s in slices]))


def _needed(stream: Stream, rows: DataFrame) -> DataFrame:
    """The needed columns of the classified rows: all for a reject, fewer for others, so that Spark holds less."""
    from pyspark.sql import functions as F

    fields = [F.col(f"field_{f.name}") for f in stream.fields]
    own = (*TIMESTAMP, "retries", "reclaims", "superseded", "reason", COPIED_AT)
    tombstone, countable = is_tombstone(stream).alias("tombstone"), F.col("held_reason").isNull().alias("again")
    other_key = ~F.col("key").eqNullSafe(key_of(stream).cast("binary"))
    return rows.select(
        *[F.col(name) for name in ("slice", *ORIGIN, *own)],
        tombstone,
        countable,
        F.coalesce("held_detail", "detail").alias("detail"),
        F.col("held_next_topic"),
        F.coalesce("held_first_failed_at", "first_failed_at").alias("first_failed_at"),
        *[F.when(F.col("reason").isNotNull(), F.col(name)).alias(name) for name in PAYLOAD],
        *([holding(stream).alias(HOLDS)] if stream.ordered else []),
        *([other_key.alias(OTHER_KEYS)] if counts_keys(stream) else []),
        *(["deleted"] if stream.deletes else []),
        *fields,
    )


def _measure(stream: Stream, rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    alive = _alive()
    accepted = alive & F.col("reason").isNull()
    time = F.when(accepted, F.unix_micros(event_time_of(stream)))
    by_reason = [F.count_if(alive & (F.col("reason") == r)).alias(f"rejects_{r}") for r in REASONS]
    return rows.groupBy("slice").agg(
        F.count("*").alias("raw"),
        F.count_if(accepted).alias("events"),
        F.count_if("tombstone").alias("tombstones"),
        F.count_if(alive & F.col("reason").isNotNull()).alias("rejects"),
        F.count_if(F.col("superseded") & ~F.col("tombstone")).alias("superseded"),
        *by_reason,
        *(counted_holds(alive) if stream.ordered else ()),
        *([F.count_if(accepted & F.col(OTHER_KEYS)).alias(OTHER_KEYS)] if counts_keys(stream) else ()),
        *([F.count_if(accepted & F.col("deleted")).alias("deletes")] if stream.deletes else ()),
        F.min(time).alias("first_event_us"),
        F.max(time).alias("last_event_us"),
    )


def _plain(row: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in row.items() if isinstance(value, int) and name != HOLDS}


def _event_columns(stream: Stream) -> list[Column]:
    from pyspark.sql import functions as F

    return [
        key_of(stream).alias("key"),
        *([version_of(stream).alias("version")] if stream.versioned else []),
        event_time_of(stream).alias("event_time"),
        *([F.col("deleted")] if stream.deletes else []),
        *[F.col(f"field_{f.name}").alias(f.name) for f in field_columns(stream)],
    ]


def origin_columns(attempts: Mapping[str, int]) -> list[Column]:
    """The columns that events and rejects share: slice, origin, and the attempt of the slice's decision."""
    from pyspark.sql import functions as F

    pairs = [F.lit(part) for pair in attempts.items() for part in pair]
    attempt = F.create_map(*pairs)[F.col("slice")].alias("attempt")
    names = ("slice", *ORIGIN, *TIMESTAMP)
    return [*[F.col(name) for name in names], attempt, F.col("retries"), F.col("reclaims")]
