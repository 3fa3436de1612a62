"""Retention: slices of raw that are old enough lose their rows, as the stream declares it; a step of maintenance."""

# The record comes first, in the ledger and in the lake (`highwater.assets.erasures_table`), as it does where a key is
# erased. A run that began to decide a slice between look and commit is looked for afterwards: then the rows are put
# back. A maintenance that dies in between leaves slices that are begun and not done, and the next one looks at these
# first.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.assets import erasures_table
from highwater.assets.raw import TABLE as RAW
from highwater.assets.raw_expiry import expire_rows, restore_rows
from highwater.batching import split_by_count
from highwater.envelope import ORIGIN, Origin
from highwater.erasing import AGED, BY_AGE, ErasedCounts, Erasure
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.maintenance import format_hours
from highwater.orchestration.checking.last_rejections import build_left_over_clause, build_origin_condition
from highwater.orchestration.checking.offset_queries import read_raw_rows
from highwater.orchestration.operations.erasing import LEASE_SECONDS, build_lease_name
from highwater.orchestration.operations.key_retirement import PAGE, list_complete_slices, list_keys_in_use
from highwater.orchestration.operations.pending_reprocessing import list_pending_slices
from highwater.resources.commit_log import ensure_all_rows_seen, read_recorded_rows
from highwater.resources.delta import ensure_complete, query, query_all, slice_is_one_of
from highwater.retention import (
    MAX_SLICES,
    RetentionFacts,
    count_expired_rows,
    select_free_slices,
    select_old_slices,
    select_planned_before,
)

if TYPE_CHECKING:
    from datetime import timedelta

    import dagster as dg
    from deltalake import DeltaTable

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

BY = "maintenance"


@dataclass(frozen=True)
class RetentionOutcome:
    """The outcome for rows of raw that are old enough, or the preview.

    Args:
        age: how long the stream keeps them.
        rows: for each slice that lost its rows how many these were, the oldest slice first.
        retained: how many slices that were planned long enough ago keep theirs, by reason; no slice is looked at beyond
            those that one maintenance takes.
        back: slices whose rows were put back, since a run began to work on them.
        notes: further sentences.
    """

    age: timedelta
    rows: Mapping[str, int] = field(default_factory=dict)
    retained: Mapping[str, int] = field(default_factory=dict)
    back: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """The outcome in sentences."""
        keys, age_text = [*self.rows], f"retained for {format_hours(self.age)}"
        ends = f": {keys[0]} .. {keys[-1]}" if keys else ""
        lines = [f"raw, {age_text}: {len(keys):,} slices lose {sum(self.rows.values()):,} rows{ends}"]
        lines += [f"raw: {count:,} slices keep their rows, {why}" for why, count in self.retained.items()]
        lines += [f"raw: a run began to work on {', '.join(self.back)}: the rows were put back"] if self.back else []
        return [*lines, *[f"raw: {note}" for note in self.notes]]

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name."""
        return {
            "aged_slices": len(self.rows),
            "aged_rows": sum(self.rows.values()),
            "retained_slices": sum(self.retained.values()),
        }

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.numbers,
            "raw_seconds": self.age.total_seconds(),
            "slices": [*self.rows],
            "retained": dict(self.retained),
            "put_back": [*self.back],
        }


def retain(work: Work, instance: dg.DagsterInstance | None, now: datetime, *, dry_run: bool) -> RetentionOutcome | None:
    """Take the rows of slices that are old enough, or report which; None of a stream that keeps them forever.

    Args:
        work: the connections; its slices do not matter.
        instance: Dagster's instance; without it it is not known which slices runs work on, and nothing is taken.
        now: in UTC.
        dry_run: do nothing; only report what would be done.

    Raises:
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable, or what names slices is unknown; what
            was taken by then is recorded.
    """
    age = work.stream.retention.raw
    if age is None:
        return None
    if instance is None:
        return RetentionOutcome(age, notes=["DAGSTER_HOME is not set, so no slice loses its rows"])
    if dry_run:
        return _look(work, instance, age, now)
    try:
        with work.ledger.lease(build_lease_name(work.stream), LEASE_SECONDS) as lease:
            return _remove_expired_rows(replace(work, before_commit=lease.check), instance, age, now)
    except (SupersededAttemptError, LeaseHeldError) as error:
        return RetentionOutcome(
            age, notes=[f"gave way to another writer, and the next maintenance goes on: {error.problem}"]
        )


def _look(work: Work, instance: dg.DagsterInstance, age: timedelta, now: datetime) -> RetentionOutcome:
    """The slices whose rows would go, and the reasons that keep the others."""
    stream, table = work.stream, work.lake.open_stream_table(work.stream.name, RAW)
    if table is None:
        return RetentionOutcome(age)
    there = {
        key: slice_commit
        for key, slice_commit in work.lake.load_slice_commits(stream.name, RAW).items()
        if not count_expired_rows(slice_commit)
    }
    wanted = select_planned_before(
        {key: slice_commit.slice_.planned_at for key, slice_commit in there.items()}, age, now
    )
    if not wanted:
        return RetentionOutcome(age)
    needed = replace(_load_needed_slices(work, instance, now), in_dlq=read_dlq_slices(work.ledger, work.lake, stream))
    old, retained = dict[str, int](), Counter[str]()
    for some in split_by_count(wanted, PAGE):
        found, stay = select_free_slices(some, replace(needed, complete=list_complete_slices(work.lake, stream, some)))
        retained.update(stay)
        times, rows = _load_times_and_counts(table, found) if found else ({}, {})
        old |= {key: rows[key] for key in select_old_slices(found, times, age, now)}
        if len(old) > MAX_SLICES:
            break
    more = [f"{MAX_SLICES:,} slices are what one maintenance takes: the next one goes on"]
    return RetentionOutcome(
        age, dict([*old.items()][:MAX_SLICES]), retained, notes=more if len(old) > MAX_SLICES else ()
    )


def _load_times_and_counts(table: DeltaTable, keys: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The greatest timestamp of each slice's rows in milliseconds, and how many rows there are."""
    where = slice_is_one_of(keys)
    rows = query(table, f"SELECT slice, max(timestamp_ms) AS ms, count(*) AS n FROM t WHERE {where} GROUP BY slice")
    ensure_complete(table, {row["slice"]: row["n"] for row in rows}, read_recorded_rows(table, keys))
    return {row["slice"]: row["ms"] for row in rows}, {row["slice"]: row["n"] for row in rows}


def _load_needed_slices(work: Work, instance: dg.DagsterInstance, now: datetime) -> RetentionFacts:
    """The slices whose rows are needed now, but for the DLQ and incomplete slices."""
    ledger, lake, stream = work.ledger, work.lake, work.stream
    live = list(instance.get_dynamic_partitions(stream.partitions_name))
    return RetentionFacts(
        in_unfinished_runs=list_keys_in_use(instance, stream, live, now),
        reclaimed_slices={one.slice_key for one in list_pending_slices(ledger, lake, stream)},
    )


def read_dlq_slices(ledger: Ledger, lake: Lake, stream: Stream) -> set[str]:
    """The slices with a rejected record that was neither accepted nor discarded; also the slice that read it.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    # Downstream first, so that what was decided meanwhile is not taken for what was not.
    tables = {name: lake.open_stream_table(stream.name, name) for name in ("dlq", "rejects", "events")}
    opened = {name: table for name, table in tables.items() if table is not None}
    if "rejects" not in opened:
        return set()
    ensure_all_rows_seen(opened["rejects"])  # a reject that was not seen would let rows of raw go
    condition, origin = "true", ", ".join(f"r.{name}" for name in ORIGIN)
    rows = query_all(
        opened,
        f"{build_left_over_clause(opened, condition)} SELECT DISTINCT r.slice, {origin} "
        f"FROM (SELECT * FROM rejects WHERE {condition}) r JOIN left_over l ON {build_origin_condition('r', 'l')}",
    )
    discarded_origins = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}
    return {row["slice"] for row in rows if Origin.from_row(row) not in discarded_origins}


def _remove_expired_rows(work: Work, instance: dg.DagsterInstance, age: timedelta, now: datetime) -> RetentionOutcome:
    """Finish started removals first; then remove rows that are old enough now."""
    stream, erasures = work.stream, work.ledger.erasures
    back = _return_needed_rows(work, instance, _find_open_work(work, now), now)
    preview = _look(work, instance, age, now)
    # A run that began and ended since then may have rejected records of them.
    late = read_dlq_slices(work.ledger, work.lake, stream) if preview.rows else set()
    wanted = [key for key in preview.rows if key not in late]
    if not wanted:
        return replace(preview, rows={}, back=back)
    reason = f"raw is retained for {format_hours(age)}"
    number = erasures.add(Erasure(stream.name, BY_AGE, reason, BY, now))
    gone: dict[str, int] = {}
    # Each round reads all that was ever recorded, in ledger and lake, so there are few.
    for some in split_by_count(wanted, PAGE):
        recorded = _load_rows_to_erase(work, some)
        erasures.begin(number, [*recorded.values()])
        erasures_table.sync_with_ledger(work.ledger, work.lake, stream.name)
        part_of_work = replace(work, slices=work.ledger.get(some))
        taken = expire_rows(part_of_work, {key: one.rows[AGED] for key, one in recorded.items()})
        returned = _return_needed_rows(work, instance, taken, now)
        gone |= {key: recorded[key].rows[AGED] for key in taken if key not in returned}
        back = [*back, *returned]
        work.log(f"raw: {len(gone):,} of {len(wanted):,} slices lost their rows")
    erasures_table.sync_with_ledger(work.ledger, work.lake, stream.name)
    return replace(preview, rows=gone, back=back)


def _load_rows_to_erase(work: Work, keys: Sequence[str]) -> dict[str, ErasedCounts]:
    """The removed rows of each slice: all of its rows. The query sorts rows, so it covers few slices at a time."""
    table = work.lake.open_stream_table(work.stream.name, RAW)
    assert table is not None, "the slices' rows were just read there"
    found: dict[str, ErasedCounts] = {}
    for some in split_by_count(keys, work.stream.limits.slices_per_run):
        held = read_raw_rows(table, work.ledger.get(some))
        found |= {key: ErasedCounts(key, rows.held, {AGED: rows.rows}) for key, rows in held.items()}
    return found


def _find_open_work(work: Work, now: datetime) -> list[str]:
    """Slices whose rows a maintenance that died began to take; after the horizon their files are gone."""
    since = now - work.stream.maintenance.horizon
    recorded = [one for one in work.ledger.erasures.list_recorded(work.stream.name) if one.erasure.by_age]
    young = [one for one in recorded if one.erasure.erased_at > since]
    return sorted({key for one in young for key, it in one.slices.items() if it.done_at is None})


def _return_needed_rows(work: Work, instance: dg.DagsterInstance, keys: Sequence[str], now: datetime) -> list[str]:
    """Ensure that nobody needed what was taken of slices, and put it back where somebody did; returns those slices.

    A later result of a record is no reason: the DLQ has all of it, as it is rejected now. A slice that has its
    rows is not done: none were taken, or they were read from Kafka again.
    """
    gone = [
        key
        for key, slice_commit in work.lake.load_slice_commits(work.stream.name, RAW, keys).items()
        if count_expired_rows(slice_commit)
    ]
    if not gone:
        return []
    needed = replace(
        _load_needed_slices(work, instance, now), complete=list_complete_slices(work.lake, work.stream, gone)
    )
    wanted = [key for key in gone if needed.find_reason(key) is not None]
    back: list[str] = []
    for some in split_by_count(wanted, work.stream.limits.slices_per_run):
        back += restore_rows(replace(work, slices=work.ledger.get(some)))
    work.ledger.erasures.mark_done([key for key in gone if key not in wanted], BY_AGE, datetime.now(UTC))
    return back
