"""Current: one row a key, the event with the highest version, whatever the order of arrival (I6).

What belongs here: the version rule over tables, and the layout of `current`. What does not: the events themselves.

Each slice commits only the winners among its own events, so a commit costs what the slice costs and never looks at the
keys that are there: no MERGE, no conflict between slices. The documented view takes the winner of a key over all
slices; taking a maximum is commutative, associative and idempotent, so order and repetition do not matter. Now and then
the slices are folded together, which keeps reading cheap; `docs/adr/` has the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from operator import or_
from typing import TYPE_CHECKING

from assets import events
from assets.commit import Clock, commit_lock, have_table, reports, require_newer
from assets.events import require
from assets.layout import TABLE, Layout
from assets.origins import MILLISECONDS, TIMESTAMP
from assets.parsing import field_columns, quoted, sql_type
from assets.work import SliceReport, Work
from highwater.balancing import balanced
from highwater.envelope import ORIGIN
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.folding import BASE, RECENT, Fold, Run, merged_runs
from resources.lake import slice_is_one_of
from resources.spark import delta_errors
from resources.spark_tables import replace_slices, rows_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from assets.commit import Standing
    from highwater.declaration import Stream
    from highwater.proof import Proof

SEARCHED = ("key", "version", "event_time")
TRIES = 4
FOLD_SECONDS = 600


def columns(stream: Stream) -> str:
    """The columns of the stream's table in SQL, `proof` left out."""
    version = sql_type(stream.field_named(stream.version))
    fields = "".join(f", {quoted(f.name)} {sql_type(f)}" for f in field_columns(stream))
    return (
        f"slice STRING, key STRING, version {version}, event_time TIMESTAMP{fields}, origin_topic STRING, "
        "origin_generation INT, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP, "
        "origin_timestamp_ms BIGINT, updated_by_slice STRING"
    )


def view(spark: SparkSession, path: str) -> DataFrame:
    """The documented view of `current`: one row a key."""
    return winners(spark.read.format("delta").load(path).where("proof IS NULL").drop("slice", "proof"), "key")


def winners(rows: DataFrame, *by: str) -> DataFrame:
    """Of the rows of a key the one with the highest version; of equal versions the one with the earliest origin."""
    from pyspark.sql import functions as F

    best = F.max_by(F.struct("*"), precedence()).alias("best")
    return rows.groupBy(*by).agg(best).select("best.*")


def precedence() -> Column:
    """The order of the version rule: the greatest value wins."""
    from pyspark.sql import functions as F

    return F.struct(
        F.col("version"),
        -F.col(MILLISECONDS),
        -F.col("origin_partition"),
        -F.col("origin_offset"),
        -F.col("origin_generation"),
    )


def materialise(work: Work) -> list[SliceReport]:
    """Commit what the slices' events say of their keys; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: other writers were first again and again.
        DependencyAwayError: Spark or the lake is away; nothing was committed.
    """
    have_table(work, TABLE, columns(work.stream), SEARCHED)
    clock = Clock()
    for tries in range(1, TRIES + 1):
        try:
            reports = _follow_events(work, require(work, events.TABLE), clock)
        except SupersededAttemptError:
            if tries == TRIES:
                raise
            time.sleep(tries)
        else:
            fold_if_due(work, clock)
            return reports
    raise AssertionError("unreachable")


def _follow_events(work: Work, decided: Standing, clock: Clock) -> list[SliceReport]:
    decisions = decided.proofs
    layout = Layout.read(work)
    stale = [d for key, d in decisions.items() if layout.attempt(key) != d.attempt]
    require_newer(decisions, {d.key: layout.attempt(d.key) for d in stale})
    folded = [d for d in stale if d.key not in layout.slices and layout.attempt(d.key)]
    fresh = [d for d in stale if d not in folded]
    version = layout.version
    with clock.phase("commit"), delta_errors(f"current of {work.stream.name}"):
        if fresh:
            version = _commit_slices(work, fresh, layout, _event_rows(work, decided))
        if folded:
            with fold_lease(work, wait=FOLD_SECONDS):
                # What was decided of the other folded slices while this one waited counts as well.
                decided, layout = require(work, events.TABLE), Layout.read(work)
                folded = [decided.proofs[d.key] for d in folded]
                require_newer(decided.proofs, {d.key: layout.attempt(d.key) for d in folded})
                version = _commit_folded_again(work, folded, layout, _event_rows(work, decided))
    changed = {d.key for d in stale}
    notes = {key: "already followed the events" for key in work.keys if key not in changed}
    return reports(work, TABLE, decided.proofs, notes, clock, version)


def _commit_slices(work: Work, decisions: Sequence[Proof], layout: Layout, event_rows: DataFrame) -> int:
    with commit_lock(work, TABLE):
        return replace_slices(
            work.spark,
            work.lake.path(work.stream.name, TABLE),
            _slice_winners(decisions, event_rows),
            decisions,
            {d.key: layout.slices[d.key].attempt if d.key in layout.slices else 0 for d in decisions},
            files=1,
            spread="key",
            # A slice that was folded meanwhile must not come back beside the fold.
            unchanged=layout.fold_attempts(),
        )


def _slice_winners(decisions: Sequence[Proof], event_rows: DataFrame) -> DataFrame:
    return winners(event_rows.where(slice_is_one_of([d.key for d in decisions])), "slice", "key")


def _event_rows(work: Work, decided: Standing) -> DataFrame:
    """The events as the version of their table has them in which the decisions stand, with all columns of `current`.

    Not with those of the declaration: a run that began before a field was added must not take it from rows with it.
    """
    from pyspark.sql import functions as F

    rows = rows_at(work.spark, work.lake.path(work.stream.name, events.TABLE), decided.version)
    there = set(_names(work, events.TABLE, decided.version))
    kept = [quoted(name) for name in _names(work, TABLE) if name in there and name not in {"slice", "proof"}]
    return rows.select("slice", *kept, F.col("slice").alias("updated_by_slice"))


def _names(work: Work, name: str, version: int | None = None) -> list[str]:
    """The columns of a table, read without a JVM."""
    lake, stream = work.lake, work.stream.name
    table = lake.table(stream, name) if version is None else lake.table_at(stream, name, version)
    return [] if table is None else [column.name for column in table.schema().fields]


def columns_of(stream: Stream) -> list[str]:
    """The columns of a winner: those of the table, `slice` and `proof` left out."""
    fields = [quoted(f.name) for f in field_columns(stream)]
    return ["key", "version", "event_time", *fields, *ORIGIN, *TIMESTAMP, "updated_by_slice"]


def fold_if_due(work: Work, clock: Clock) -> str | None:
    """Fold the slices together when there are many; what was folded into, or None.

    A fold that meets another writer gives way: the next slice tries again.
    """
    if Layout.read(work).due() is None:
        return None
    try:
        with clock.phase("fold"), fold_lease(work, wait=0):
            layout = Layout.read(work)  # again: another run may have folded before we had the lease
            due = layout.due()
            if due is None:
                return None
            _fold(work, layout, due)
    except (SupersededAttemptError, LeaseHeldError):
        work.log("current: folding gave way to another writer")
        return None
    work.log(f"current: {len(layout.slices)} slices folded into {due} in {clock.seconds['fold']:.1f} s")
    return due


def fold_lease(work: Work, wait: float) -> AbstractContextManager[object]:
    """One rewrites the folded partitions at a time."""
    return work.ledger.lease(f"fold {work.stream.name}", seconds=FOLD_SECONDS, wait=wait)


def fold(work: Work, target: str) -> None:
    """Fold all slices into `target` now, due or not.

    Args:
        work: the connections; its slices do not matter.
        target: `recent`, or `base`, which takes `recent` in too.
    """
    with fold_lease(work, wait=FOLD_SECONDS):
        _fold(work, Layout.read(work), target)


def _fold(work: Work, layout: Layout, target: str) -> None:
    taken = [RECENT, BASE] if target == BASE else [RECENT]
    runs = merged_runs(
        [layout.fold(key) for key in reversed(taken)], {key: proof.attempt for key, proof in layout.slices.items()}
    )
    parts = [*taken, *layout.slices]
    _replace_fold(work, layout, target, runs, standing_rows(work).where(slice_is_one_of(parts)), parts)


def standing_rows(work: Work) -> DataFrame:
    """The rows of all partitions, the proofs left out."""
    return work.spark.read.format("delta").load(work.lake.path(work.stream.name, TABLE)).where("proof IS NULL")


def _replace_fold(
    work: Work, layout: Layout, target: str, runs: Mapping[str, tuple[Run, ...]], rows: DataFrame, parts: list[str]
) -> int:
    from pyspark.sql import functions as F

    best = winners(rows.drop("slice", "proof"), "key").withColumn("slice", F.lit(target))
    before = layout.fold(target)
    after = Fold(target, before.attempt + 1, runs)
    with commit_lock(work, TABLE), delta_errors(f"current of {work.stream.name}"):
        return replace_slices(
            work.spark,
            work.lake.path(work.stream.name, TABLE),
            best,
            [after],
            {target: before.attempt},
            files=0,
            spread="key",
            replaced=slice_is_one_of(parts),
            unchanged={key: attempt for key, attempt in layout.fold_attempts().items() if key != target}
            | {key: proof.attempt for key, proof in layout.slices.items() if key in parts},
        )


def _commit_folded_again(work: Work, decisions: Sequence[Proof], layout: Layout, event_rows: DataFrame) -> int:
    """Compute anew what folded slices say, after their events changed.

    Rows that these slices had won are taken out, their keys are computed again from the events of all folded slices,
    and the slices' new winners come in; everything lands in `base`.
    """
    again = [d.key for d in decisions]
    runs = merged_runs([layout.fold(BASE), layout.fold(RECENT)], {d.key: d.attempt for d in decisions})
    standing = standing_rows(work).where(slice_is_one_of([BASE, RECENT]))
    lost = standing["updated_by_slice"].isin(again)
    keys = standing.where(lost).select("key").distinct()
    others = event_rows.where(_in_runs(runs)).where(~_event_slice_in(again)).join(keys, "key", "left_semi")
    rows = (
        standing.where(~lost)
        .drop("proof")
        .unionByName(others, allowMissingColumns=True)
        .unionByName(_slice_winners(decisions, event_rows), allowMissingColumns=True)
    )
    return _replace_fold(work, layout, BASE, runs, rows, [BASE, RECENT])


def _event_slice_in(keys: Sequence[str]) -> Column:
    from pyspark.sql import functions as F

    return F.col("slice").isin(list(keys))


def _in_runs(runs: Mapping[str, tuple[Run, ...]]) -> Column:
    from pyspark.sql import functions as F

    topic = F.substring_index("slice", "@", 1)
    ordinal = F.substring_index("slice", "@", -1).cast("int")
    inside = [(topic == name) & ordinal.between(run.first, run.last) for name, pieces in runs.items() for run in pieces]
    return balanced(or_, inside)
