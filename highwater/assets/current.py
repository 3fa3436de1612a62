"""The stage `current`: one row per key, its highest version in any order of arrival; a delete removes the row (I6)."""

# A slice that is new here is one MERGE of its winners. A slice whose events changed recomputes its keys: those of the
# rows that it had brought, and those of its events now. Merges of one stream take turns; each is a numbered commit, so
# a late writer cannot bring back what a later attempt rejected (`highwater.resources.commit_log`).

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from highwater.assets import commit, events, small_merge
from highwater.assets.commit import (
    Clock,
    build_target,
    ensure_table,
    log_reports,
    measure_write_cost,
    require_newer,
    take_commit_turn,
)
from highwater.assets.events import require_upstream_commits
from highwater.assets.fields import build_column_type
from highwater.assets.origins import TIMESTAMP
from highwater.assets.parsing import find_version_type, quote_column, select_column_fields
from highwater.assets.schema_evolution import adapt_types, with_added_fields
from highwater.assets.small_merge import PRECEDENCE
from highwater.assets.small_slices import small_slice_settings
from highwater.assets.work import SliceReport, Work
from highwater.commit_records import CommitRecord
from highwater.envelope import ORIGIN
from highwater.errors import SupersededAttemptError
from highwater.resources.delta import slice_is_one_of
from highwater.resources.numbered_commits import NumberedCommit, close_intents, commit_slices, session_options
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import quote_table, read_table_version

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.commit import CommittedSlices
    from highwater.declaration import Stream
    from highwater.resources.commit_log import TableSlices
    from highwater.resources.ledger.leases import Lease
    from highwater.slice_commits import SliceCommit

TABLE = "current"
STATISTICS_COLUMNS = ("key", "version", "event_time", "updated_by_slice")
TRIES = 4
# Merges of other runs go first: ten of a minute each.
WAIT_SECONDS = 600.0
_SOURCE = "highwater_current_source"


def build_sql_columns(stream: Stream) -> str:
    """The columns of the stream's table in SQL; it has versions."""
    version = find_version_type(stream)
    fields = "".join(f", {quote_column(f.name)} {build_column_type(f)}" for f in select_column_fields(stream))
    return (
        f"key STRING, version {version}, event_time TIMESTAMP{fields}, origin_topic STRING, "
        "origin_generation INT, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP, "
        "origin_timestamp_ms BIGINT, updated_by_slice STRING"
    )


def quote_column_names(stream: Stream) -> list[str]:
    """The names of the columns, quoted for Spark."""
    fields = [quote_column(f.name) for f in select_column_fields(stream)]
    return ["key", "version", "event_time", *fields, *ORIGIN, *TIMESTAMP, "updated_by_slice"]


def select_winners(rows: DataFrame, *by: str) -> DataFrame:
    """The row of each key with the highest version; among equal versions the one with the earliest origin."""
    from pyspark.sql import functions as F

    best = F.max_by(F.struct("*"), F.expr(build_precedence())).alias("best")
    return rows.groupBy(*by).agg(best).select("best.*")


def has_deletes(work: Work, events_version: int) -> bool:
    """Whether events may hold deletes: they stay such when the stream no longer declares any."""
    table = work.lake.open_existing_table(work.stream.name, events.TABLE, events_version)
    return "deleted" in {field.name for field in table.schema().fields}


def with_deleted_as_boolean(events: DataFrame) -> DataFrame:
    """Events with `deleted`, never null: those from before the stream declared deletes have none."""
    from pyspark.sql import functions as F

    no = F.lit(False)
    return events.withColumn("deleted", F.coalesce("deleted", no) if "deleted" in events.columns else no)


def build_precedence(alias: str = "") -> str:
    """The order of the version rule in SQL: the greatest value wins.

    Args:
        alias: the table's alias with a dot after it.
    """
    return f"struct({', '.join(f'{alias}{name}' if greater else f'-{alias}{name}' for name, greater in PRECEDENCE)})"


def materialise(work: Work) -> list[SliceReport]:
    """Merge what the slices' events say about their keys; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: other writers were first again and again.
        LeaseHeldError: other merges of the stream went on for too long; nothing was committed.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable; nothing was committed, or the next run
            completes it.
    """
    # A merge that did not end before is left to Spark: delta-rs may refuse what Spark merges.
    did_not_end = bool(work.ledger.intents.list_for_table(work.stream.name, TABLE))
    work = with_added_fields(work)
    ensure_table(work, TABLE, build_sql_columns(work.stream), STATISTICS_COLUMNS)
    adapt_types(work, TABLE, build_sql_columns(work.stream))
    clock = Clock()
    for tries in range(1, TRIES + 1):
        try:
            return _follow_events(work, clock, by_spark=did_not_end or tries > 1)
        except SupersededAttemptError:
            if tries == TRIES:
                raise
            time.sleep(tries)
    raise AssertionError("unreachable")


def lease_merges(work: Work) -> AbstractContextManager[Lease]:
    """One run merges into the table at a time: two MERGE commands into one table conflict."""
    return work.ledger.lease(f"merge {work.stream.name}/{TABLE}", seconds=commit.LEASE_SECONDS, wait=WAIT_SECONDS)


def close_open_intents(work: Work) -> None:
    """Close the intents that dead runs left open; the caller holds the lease of merges."""
    if work.ledger.intents.list_for_table(work.stream.name, TABLE):
        with take_commit_turn(work, TABLE):
            close_intents(build_target(work, TABLE))


def _follow_events(work: Work, clock: Clock, *, by_spark: bool) -> list[SliceReport]:
    with lease_merges(work) as lease:
        close_open_intents(work)
        decided = require_upstream_commits(work, events.TABLE)
        seen = work.lake.load_commits(work.stream.name, TABLE, work.keys)
        behind = [
            slice_commit
            for key, slice_commit in decided.slice_commits.items()
            if seen.find_attempt(key) != slice_commit.attempt
        ]
        require_newer(
            decided.slice_commits, {slice_commit.key: seen.find_attempt(slice_commit.key) for slice_commit in behind}
        )
        done = NumberedCommit(seen.version, {})
        if behind:
            with clock.phase("commit"):
                done = _merge(work, decided, behind, seen, lease, by_spark=by_spark)
    cost = measure_write_cost(done)
    merged = {slice_commit.key for slice_commit in behind}
    found = [
        SliceReport(
            slice_=slice_,
            attempt=decided.find_attempt(slice_.key),
            rows=decided.slice_commits[slice_.key].rows or 0,
            delta_version=done.version,
            counts=dict(decided.slice_commits[slice_.key].counts),
            seconds=dict(clock.seconds),
            note=None if slice_.key in merged else "already followed the events",
            measures={**cost, **_measure_freshness(decided.slice_commits[slice_.key])} if slice_.key in merged else {},
        )
        for slice_ in work.slices
    ]
    log_reports(work, found, clock)
    return found


def _measure_freshness(decided: SliceCommit) -> dict[str, float]:
    """The age in seconds of the newest event of a slice as `current` gets it; empty without events."""
    last = decided.counts.get("last_event_us")
    return {} if last is None else {"freshness_seconds": time.time() - last / 1_000_000}


def _merge(
    work: Work,
    decided: CommittedSlices,
    behind: Sequence[SliceCommit],
    seen: TableSlices,
    lease: Lease,
    *,
    by_spark: bool,
) -> NumberedCommit:
    """Merge slices in one commit, which is Spark's if it must be."""
    keys, target = [slice_commit.key for slice_commit in behind], build_target(work, TABLE)
    records = [
        CommitRecord(slice_commit.key, slice_commit.attempt, slice_commit.rows, batch="") for slice_commit in behind
    ]

    def commit_by(write: Callable[[Mapping[str, str]], object]) -> NumberedCommit:
        lease.check()
        with take_commit_turn(work, TABLE):
            work.before_commit()
            return commit_slices(target, seen, records, work.run, write)

    again = [key for key in keys if seen.find_attempt(key)]
    reads_events = again or has_deletes(work, decided.version)
    if not reads_events and not by_spark:
        winners = small_merge.find_winners(work, target, decided.version, keys)
        if winners is not None:
            return commit_by(partial(small_merge.merge, target, winners, seen.number))
    # The number of a MERGE's commit is a setting of its session.
    work = replace(work, spark=work.open_own_session()) if work.open_own_session else work
    tables = [
        work.lake.build_table_path(work.stream.name, name)
        for name in (TABLE, *([events.TABLE] if reads_events else []))
    ]
    with small_slice_settings(work, tables), delta_errors(f"current of {work.stream.name}"):
        names = _list_common_columns(work, decided.version)
        found = _read_events(work, decided.version, names)
        if again:
            source, actions = _recompute_winners(work, found, keys, again, seen), _REPLACE
        elif reads_events:
            source, actions = _with_earlier_deletes(work, found, keys), _UPSERT_OR_DELETE
        else:
            source, actions = select_winners(found.where(slice_is_one_of(keys)).drop("slice"), "key"), _UPSERT
        source.createOrReplaceTempView(_SOURCE)
        return commit_by(partial(_run_statement, work, _build_merge_statement(work, names, actions)))


def _run_statement(work: Work, statement: str, options: Mapping[str, str]) -> None:
    with session_options(work.spark, options):
        work.spark.sql(statement).collect()


# A slice that is new here: what it brings is compared with the row that is there.
_UPSERT = """
WHEN MATCHED AND {newer} THEN UPDATE SET {assignments}
WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({values})
"""
# The winner may be a delete, of the slice or of an earlier one: a key without a row then stays without.
_UPSERT_OR_DELETE = """
WHEN MATCHED AND {newer} AND s.deleted THEN DELETE
WHEN MATCHED AND {newer} THEN UPDATE SET {assignments}
WHEN NOT MATCHED AND NOT s.deleted THEN INSERT ({names}) VALUES ({values})
"""
# Keys that were recomputed from all of their events: the source is right, and a key without a winner has none any more.
_REPLACE = """
WHEN MATCHED AND s.updated_by_slice IS NULL THEN DELETE
WHEN MATCHED THEN UPDATE SET {assignments}
WHEN NOT MATCHED AND s.updated_by_slice IS NOT NULL THEN INSERT ({names}) VALUES ({values})
"""


def _build_merge_statement(work: Work, names: Sequence[str], actions: str) -> str:
    path = work.lake.build_table_path(work.stream.name, TABLE)
    return f"MERGE INTO {quote_table(path)} t USING {_SOURCE} s ON t.key = s.key" + actions.format(
        newer=f"{build_precedence('s.')} > {build_precedence('t.')}",
        assignments=", ".join(f"t.{name} = s.{name}" for name in names),
        names=", ".join(names),
        values=", ".join(f"s.{name}" for name in names),
    )


def _with_earlier_deletes(work: Work, rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The winners among what new slices bring and the deletes of their keys that were merged before.

    A deleted key has no row in the table, so an older event of it would be inserted.
    """
    brought = rows.where(slice_is_one_of(keys))
    earlier = _filter_slices(work, rows.where("deleted"), work.lake.list_slice_keys(work.stream.name, TABLE))
    theirs = earlier.join(brought.select("key").distinct(), "key", "left_semi").select(*brought.columns)
    return select_winners(brought.unionByName(theirs).drop("slice"), "key")


def _filter_slices(work: Work, rows: DataFrame, keys: Collection[str]) -> DataFrame:
    from pyspark.sql import functions as F

    counted = work.spark.createDataFrame([(key,) for key in keys], "slice STRING")
    return rows.join(F.broadcast(counted), "slice", "left_semi")


def _recompute_winners(
    work: Work, rows: DataFrame, keys: Sequence[str], again: Sequence[str], seen: TableSlices
) -> DataFrame:
    """For every key that the slices bring or had brought its winner; a key without one has null in all other columns.

    Events of slices that are not merged yet do not count: they are merged in their turn.
    """
    from pyspark.sql import functions as F

    there = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, TABLE), seen.version)
    merged = work.lake.list_slice_keys(work.stream.name, TABLE) | set(keys)
    mine = _filter_slices(work, rows, merged)
    affected = (
        there.where(F.col("updated_by_slice").isin(list(again)))
        .select("key")
        .union(rows.where(slice_is_one_of(keys)).select("key"))
        .distinct()
    )
    if "deleted" not in rows.columns:
        won = select_winners(mine.join(affected, "key", "left_semi").drop("slice"), "key")
        return affected.join(won, "key", "left")
    # Where the slices had brought a delete there is no row in `current`, so the keys that it concerns are found by the
    # difference between `current` and the events.
    alive = select_winners(mine.drop("slice"), "key").where("NOT deleted")
    names = (*ORIGIN, "updated_by_slice")
    ours, theirs = (
        frame.select("key", F.struct(*names).alias(name)) for name, frame in (("ours", alive), ("theirs", there))
    )
    differ = ours.join(theirs, "key", "full").where(~F.col("ours").eqNullSafe(F.col("theirs")))
    affected = affected.union(differ.select("key")).distinct()
    return affected.join(alive, "key", "left")


def _list_common_columns(work: Work, events_version: int) -> list[str]:
    """The columns of `current` that events have too, quoted for Spark.

    Not those of the declaration: a run that began before a field was added must not take it from rows with it.
    """
    lake, stream = work.lake, work.stream.name
    here = {field.name for field in lake.open_existing_table(stream, TABLE).schema().fields}
    there = {field.name for field in lake.open_existing_table(stream, events.TABLE, events_version).schema().fields}
    return [*[quote_column(name) for name in sorted(here & there)], "updated_by_slice"]


def _read_events(work: Work, events_version: int, names: Sequence[str]) -> DataFrame:
    """The events of one version of their table, with `slice` beside the columns of `current`."""
    rows = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, events.TABLE), events_version)
    deleted = ["deleted"] if "deleted" in rows.columns else []
    rows = with_deleted_as_boolean(rows) if deleted else rows
    return rows.select(
        "slice", *[name for name in names if name != "updated_by_slice"], *deleted, _build_updated_by_slice()
    )


def _build_updated_by_slice() -> Column:
    from pyspark.sql import functions as F

    return F.col("slice").alias("updated_by_slice")
