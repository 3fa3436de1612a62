"""The stage `events`: which slices of raw are decided, taken over or refused, and the commit of their events (I4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from highwater.assets import raw
from highwater.assets.breaker_gate import ensure_admitted
from highwater.assets.commit import LEASE_SECONDS, CommittedSlices, commit_with_retries, ensure_table
from highwater.assets.fields import build_column_type
from highwater.assets.hold_gate import end_holds
from highwater.assets.origins import DLQ, select_tier_slices
from highwater.assets.parsing import find_version_type, quote_column, select_column_fields
from highwater.assets.schema_evolution import adapt_types, evolve
from highwater.assets.slice_classification import classify_slices, read_raw_rows
from highwater.assets.small_slices import list_classification_tables, small_slice_settings
from highwater.assets.work import SliceReport, Work
from highwater.errors import ConfigurationError, TemporaryError, UnbalancedError
from highwater.retention import count_expired_rows, count_records
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.slices import Slice

TABLE = "events"
# Written as the table is created, so that events of different keys or versions never meet in `current`.
KEY_PROPERTY = "highwater.key"
ORIGIN_COLUMNS = (
    "slice STRING, origin_topic STRING, origin_generation INT, origin_partition INT, origin_offset BIGINT, "
    "origin_timestamp TIMESTAMP, origin_timestamp_ms BIGINT, attempt INT, retries INT, reclaims INT"
)
# The last two mark events that came back through the DLQ: few files have any of them.
STATISTICS_COLUMNS = (
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


def build_sql_columns(stream: Stream) -> str:
    """The columns of the stream's events table in SQL."""
    version = f"version {find_version_type(stream)}, " if stream.versioned else ""
    deleted = ", deleted BOOLEAN" if stream.deletes else ""
    fields = "".join(f", {quote_column(f.name)} {build_column_type(f)}" for f in select_column_fields(stream))
    return f"{ORIGIN_COLUMNS}, key STRING, {version}event_time TIMESTAMP{deleted}{fields}"


def select_searched_columns(stream: Stream) -> list[str]:
    """The columns whose file statistics let readers of events skip files."""
    # None of them is a boolean: Delta then refuses every change of the table's columns.
    own = [name for name in STATISTICS_COLUMNS if name != "version" or stream.versioned]
    return [*own, *[quote_column(name) for name in dict.fromkeys(stream.maintenance.cluster_by) if name not in own]]


def materialise(work: Work) -> list[SliceReport]:
    """Decide the split of the slices and commit their events once; a report for each slice, in their order.

    A slice whose rejects, publication, current or metrics do not follow the committed events was left half done: its
    decision is taken over. So a decision is recreated only when all that it rejected is published, and known as such,
    and the minutes of its events are known to metrics.

    Slices of tiers are decided one after another, by one run at a time: what one accepts is superseded in the others.
    So are those of the main topic where a reason holds, in their order: what comes before a held one is committed.

    A slice whose rows of raw have expired keeps its decision, and the report says so.

    Raises:
        TemporaryError: raw of a slice is not there yet.
        UnbalancedError: rows of raw have expired, and the decision is gone too.
        ConfigurationError: the stream declares another key or version than the table was created for.
        BreakerOpenError: the stream's breaker lets none of them be decided.
        RetractionError: an event that was sent to the accepted topic would be rejected; nothing was committed.
        SliceHeldError: records hold a slice; neither it nor what comes after it was committed.
        RejectsOverLimitError: too many records of a slice would be rejected; no slice of the main topic was committed.
        DependencyUnavailableError: Spark, the lake or the reference table is unavailable; nothing was committed.
    """
    key = format_key_and_version(work.stream)
    searched = select_searched_columns(work.stream)
    ensure_table(work, TABLE, build_sql_columns(work.stream), searched, {KEY_PROPERTY: key})
    ensure_same_key_and_version(work.lake, work.stream)
    read = require_upstream_commits(work, raw.TABLE)
    work = evolve(work, partial(read_raw_rows, work, work.slices, read.version), TABLE)
    adapt_types(work, TABLE, build_sql_columns(work.stream))
    tiers = select_tier_slices(work, work.slices)
    main = [slice_ for slice_ in work.slices if slice_ not in tiers]
    found = [
        report
        for together in _group_slices(work, main)
        for report in _materialise(replace(work, slices=together), read)
    ]
    for slice_ in tiers:
        with work.ledger.lease(
            build_retries_lease_name(work.stream), seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS
        ) as lease:
            found += _materialise(replace(work, slices=[slice_], before_commit=lease.check), read)
    return sorted(found, key=lambda report: work.keys.index(report.slice_.key))


def format_key_and_version(stream: Stream) -> str:
    """The declared key and version, as the property of the table has them."""
    separator = stream.key_separator if len(stream.key) > 1 else ""
    return json.dumps({"key": stream.key, "separator": separator, "version": stream.version_fields})


def ensure_same_key_and_version(lake: Lake, stream: Stream) -> None:
    """Ensure that the table's events have the declared key and version: in `current` only these replace each other.

    Raises:
        ConfigurationError: they have others.
        DependencyUnavailableError: the lake could not be read.
    """
    stored = lake.open_existing_table(stream.name, TABLE).metadata().configuration.get(KEY_PROPERTY)
    declared = format_key_and_version(stream)
    if stored not in {None, declared}:
        raise ConfigurationError(
            f"stream {stream.name} declares another key or version than its events have",
            stored=stored,
            found=declared,
            remedy="declare these again; with others declare a new stream under another name, on another topic or "
            "instead of this one",
        )


def _group_slices(work: Work, main: Sequence[Slice]) -> list[Sequence[Slice]]:
    """Slices of the main topic as they are decided together: all at once, or one after another."""
    if work.stream.ordered:
        return [[slice_] for slice_ in sorted(main, key=attrgetter("ordinal"))]
    return [main] if main else []


def build_retries_lease_name(stream: Stream) -> str:
    """Name of the lock that classifying retries and reclaims share."""
    return f"retries {stream.name}"


def _materialise(work: Work, read: CommittedSlices) -> list[SliceReport]:
    committed = CommittedSlices.read(work, TABLE)
    # A slice that was never classified was never published.
    published = CommittedSlices.read(work, DLQ) if committed.slice_commits else CommittedSlices({}, -1)
    skipped = _select_undecidable_slices(read, work.keys, committed) | _list_unfinished_slices(
        work, read, committed, published
    )
    ensure_admitted(work, [slice_ for slice_ in work.slices if slice_.key not in skipped], committed.slice_commits)
    with small_slice_settings(work, list_classification_tables(work)):
        found = commit_with_retries(
            work, TABLE, committed, skipped, partial(classify_slices, committed, published, read)
        )
    _ensure_as_measured(work, found)
    if work.classified is not None:
        work.classified.record_attempts({report.slice_.key: report.attempt for report in found if report.note is None})
    end_holds(work)
    return found


def require_upstream_commits(work: Work, table: str) -> CommittedSlices:
    """The commits of the slices in an upstream table.

    Raises:
        TemporaryError: a slice is not in it.
    """
    committed = CommittedSlices.read(work, table)
    ensure_slices_present(work, table, work.keys, committed.slice_commits)
    return committed


def ensure_slices_present(work: Work, table: str, keys: Sequence[str], held: Mapping[str, SliceCommit]) -> None:
    """Ensure that slices are in an upstream table, by the slice commits that were read there.

    Raises:
        TemporaryError: one does not.
    """
    if missing := [key for key in keys if key not in held]:
        raise TemporaryError(
            f"{work.stream.name}/{table} does not hold {', '.join(missing)}",
            remedy=f"materialise {work.stream.name}/{table} for these slices first",
        )


def _select_undecidable_slices(
    read: CommittedSlices, keys: Sequence[str], committed: CommittedSlices
) -> dict[str, str]:
    """Slices that keep their decision, because retention deleted their rows in raw."""
    gone = {key: count for key in keys if (count := count_expired_rows(read.slice_commits[key]))}
    lost = sorted(gone.keys() - committed.slice_commits.keys())
    if lost:
        raise UnbalancedError(
            f"{', '.join(lost)}: events have no commit of them, and raw no longer has all rows to decide them from",
            stored="raw's retention deleted some of the rows, as it does only where events have the slice",
            found="no commit of the slices in events",
            remedy="restore events, or materialise raw of the slices again while Kafka holds their records",
        )
    return {
        key: f"the decision stays: raw's retention deleted {count:,} rows; where Kafka still holds the records, "
        "materialise raw of the slice first"
        for key, count in gone.items()
    }


def _list_unfinished_slices(
    work: Work, read: CommittedSlices, committed: CommittedSlices, published: CommittedSlices
) -> dict[str, str]:
    """Slices with a committed decision and incomplete followers: they are finished, not reprocessed."""
    if not committed.slice_commits:
        return {}
    rejects = CommittedSlices.read(work, "rejects")
    followers = {"rejects": rejects.find_attempt, DLQ: published.find_attempt}
    if work.stream.versioned:
        followers["current"] = work.lake.load_commits(work.stream.name, "current", work.keys).find_attempt
    if work.stream.metrics:
        followers["metrics"] = CommittedSlices.read(work, "metrics").find_attempt
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
    stuck = _list_unfinishable_slices(work, read, committed, rejects, open_)
    for key, why in stuck.items():
        work.log(f"{key}: the split of attempt {committed.find_attempt(key)} is reprocessed: {why}")
    return {
        key: f"the split of attempt {committed.find_attempt(key)} is taken over: {' and '.join(lacking[key])} still "
        "to be written"
        for key in open_
        if key not in stuck
    }


def _list_unfinishable_slices(
    work: Work, read: CommittedSlices, committed: CommittedSlices, rejected: CommittedSlices, keys: Sequence[str]
) -> dict[str, str]:
    """The unfinished slices whose split can never be finished, with the reason: their rows do not add up.

    No rejects can follow such a split, so it would fail each run that takes it over. It may be reprocessed, since
    nothing of it was published: `dlq` only sends rejects whose number is the decided one. If `dlq` began to send before
    somebody changed a table, the split stays.
    """
    if not keys:
        return {}
    begun = {key: one.attempt for key, one in work.ledger.publications.read_for_slices(keys).items()}
    held, left = (work.lake.count_slice_rows(work.stream.name, table, keys) for table in (TABLE, "rejects"))
    found = {}
    for key in keys:
        slice_commit = committed.slice_commits[key]
        followed = rejected.find_attempt(key) == slice_commit.attempt
        classified_rows = {
            "events": (slice_commit.rows, held.get(key)),
            "rejects": (slice_commit.counts["rejects"], left.get(key) if followed else None),
            "raw": (slice_commit.counts["raw"], None if followed else count_records(read.slice_commits[key])),
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
            if CommittedSlices.read(work, TABLE).find_attempt(report.slice_.key) != report.attempt:
                continue  # somebody committed since, and the rows are of that
            raise UnbalancedError(
                f"{report.slice_.key}: another number of events was written than was decided",
                stored=expected,
                found=report.rows,
                remedy="materialise the slice again from events on: it is reprocessed",
            )
