"""Rejects: what of raw the committed events left over, with the reason and where it goes.

What belongs here: the rest of the split, computed from the decision that stands in events. What does not: a decision of
its own, or sending anything anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assets import events
from assets.commit import Clock, Standing, commit_lock, let_go, reports, require_newer
from assets.events import attempt_of, origin_columns, raw_rows, require
from assets.parsing import PERMANENT, UNRESOLVED, judged
from assets.work import SliceReport, Work
from highwater.errors import SupersededAttemptError
from highwater.proof import Proof
from resources.lake import create_table, replace_slices, slice_is_one_of
from resources.spark import delta_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Stream

TABLE = "rejects"
COLUMNS = (
    f"{events.ORIGIN_COLUMNS}, reason STRING, permanent BOOLEAN, detail STRING, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, next_topic STRING"
)
SEARCHED = ("origin_partition", "origin_offset", "origin_timestamp", "reason")
TRIES = 3


def materialise(work: Work) -> list[SliceReport]:
    """Commit the rejects of the decision that stands in events; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: newer decisions were committed again and again meanwhile.
        DependencyAwayError: Spark, the lake or the reference table is away; nothing was committed.
    """
    create_table(work.spark, work.lake.path(work.stream.name, TABLE), COLUMNS, SEARCHED)
    for tries in range(1, TRIES + 1):
        try:
            return _follow_decision(work, require(work, events.TABLE), Standing.read(work, TABLE), Clock())
        except SupersededAttemptError:
            if tries == TRIES:
                raise
            work.log("rejects: another run committed meanwhile; looking again")
    raise AssertionError("unreachable")


def _follow_decision(work: Work, decisions: Mapping[str, Proof], standing: Standing, clock: Clock) -> list[SliceReport]:
    open_ = [key for key in work.keys if standing.attempt(key) != decisions[key].attempt]
    require_newer(decisions, {key: standing.attempt(key) for key in open_})
    version = _commit(work, [decisions[key] for key in open_], standing, clock) if open_ else -1
    proofs = {key: _proof(decisions[key]) for key in work.keys}
    notes = {key: "already followed the decision" for key in work.keys if key not in open_}
    return reports(work, TABLE, proofs, notes, clock, version)


def _proof(decision: Proof) -> Proof:
    return replace(decision, rows=decision.counts["rejects"])


def _commit(work: Work, decisions: Sequence[Proof], standing: Standing, clock: Clock) -> int:
    rows = _rows(work, decisions)
    try:
        with delta_errors("the rejects of " + ", ".join(d.key for d in decisions)), clock.phase("judge"):
            _see_conserved(rows, decisions)
        with clock.phase("commit"), commit_lock(work, TABLE):
            return replace_slices(
                work.spark,
                work.lake.path(work.stream.name, TABLE),
                rows,
                [_proof(decision) for decision in decisions],
                {d.key: standing.attempt(d.key) for d in decisions},
                files=1,
                spread="origin_offset",
            )
    finally:
        let_go(rows.unpersist, work)


def _rows(work: Work, decisions: Sequence[Proof]) -> DataFrame:
    """Raw minus the committed events and the tombstones, judged once more for the reason.

    Only a lookup can answer otherwise than it did when the events were decided; such a record stays a reject of that
    decision, as unresolved, and its retry will accept it.
    """
    from pyspark.sql import functions as F

    with_rejects = [d for d in decisions if d.counts["rejects"]]
    if not with_rejects:
        return work.spark.createDataFrame([], COLUMNS)
    rest = _left_over(work, with_rejects)
    found = judged(work, rest)
    reason = F.coalesce("reason", F.lit(UNRESOLVED))
    detail = F.coalesce("detail", F.lit("unknown when the slice was decided, known since"))
    permanent = reason.isin(sorted(PERMANENT))
    return found.select(
        *origin_columns(),
        attempt_of({d.key: d.attempt for d in with_rejects}),
        reason.alias("reason"),
        permanent.alias("permanent"),
        detail.alias("detail"),
        "key",
        "value",
        "headers",
        _next_topic(work.stream, permanent),
    ).persist()


def _left_over(work: Work, decisions: Sequence[Proof]) -> DataFrame:
    from pyspark.sql import functions as F

    accepted = (
        work.spark.read.format("delta")
        .load(work.lake.path(work.stream.name, events.TABLE))
        .where(slice_is_one_of([d.key for d in decisions]))
        .where("proof IS NULL")
        .select(
            F.col("slice"),
            F.col("attempt"),
            F.col("origin_partition").alias("partition"),
            F.col("origin_offset").alias("offset"),
        )
        .where(F.col("attempt") == attempt_of({d.key: d.attempt for d in decisions}))
        .drop("attempt")
    )
    alive = raw_rows(work, [d.piece for d in decisions]).where("value IS NOT NULL")
    return alive.join(accepted, ["slice", "partition", "offset"], "left_anti")


def _next_topic(stream: Stream, permanent: Column) -> Column:
    from pyspark.sql import functions as F

    return (
        F.when(permanent, F.lit(f"{stream.topic}.parked")).otherwise(F.lit(f"{stream.topic}.dlq.1")).alias("next_topic")
    )


def _see_conserved(rows: DataFrame, decisions: Sequence[Proof]) -> None:
    """Hold the rest against the numbers of the decision (I5).

    Raises:
        SupersededAttemptError: the numbers differ, as they do when a newer decision replaced the events meanwhile.
    """
    found = {row["slice"]: row["count"] for row in rows.groupBy("slice").count().collect()}
    for decision in decisions:
        expected = decision.counts["rejects"]
        if found.get(decision.key, 0) != expected:
            raise SupersededAttemptError(
                f"{decision.key}: raw minus events leaves another number of rejects than was decided",
                stored=expected,
                found=found.get(decision.key, 0),
                remedy="request the slice again; if this stays, see the check of the slice's offsets",
            )
