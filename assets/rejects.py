"""Rejects: what of raw the committed events left over, with the reason and where it goes.

What belongs here: the rest of the split, computed from the decision that stands in events. What does not: a decision of
its own, or sending anything anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assets import events, raw
from assets.commit import Clock, Standing, commit_lock, reports, require_newer
from assets.events import attempt_of, origin_columns, require
from assets.parsing import PERMANENT, UNRESOLVED, judged
from assets.work import SliceReport, Work
from highwater.errors import SupersededAttemptError, UnbalancedError
from highwater.proof import Proof
from resources.lake import create_table, replace_slices, rows_at, slice_is_one_of
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


def _follow_decision(work: Work, decided: Standing, standing: Standing, clock: Clock) -> list[SliceReport]:
    decisions = decided.proofs
    open_ = [key for key in work.keys if standing.attempt(key) != decisions[key].attempt]
    require_newer(decisions, {key: standing.attempt(key) for key in open_})
    version = -1
    if open_:
        read = require(work, raw.TABLE)
        _see_conserved(read, [decisions[key] for key in open_])
        rows = _rows(work, [decisions[key] for key in open_], read.version, decided.version)
        with clock.phase("commit"), delta_errors("the rejects of " + ", ".join(open_)):
            version = _commit(work, rows, [decisions[key] for key in open_], standing)
    proofs = {key: _proof(decisions[key]) for key in work.keys}
    notes = {key: "already followed the decision" for key in work.keys if key not in open_}
    found = reports(work, TABLE, proofs, notes, clock, version)
    _see_balanced(found, decisions)
    return found


def _proof(decision: Proof) -> Proof:
    return replace(decision, rows=decision.counts["rejects"])


def _see_conserved(read: Standing, decisions: Sequence[Proof]) -> None:
    """See that raw is what was decided of: rejects are what the decision left over of it (I5).

    Raises:
        SupersededAttemptError: raw was read anew since, and gave another number of records.
    """
    for decision in decisions:
        found, decided = read.proofs[decision.key].rows, decision.counts["raw"]
        if found != decided:
            raise SupersededAttemptError(
                f"{decision.key}: raw holds another number of records than was decided of",
                stored=decided,
                found=found,
                remedy="request the slice again: its events are then decided anew",
            )


def _see_balanced(found: Sequence[SliceReport], decisions: Mapping[str, Proof]) -> None:
    """Hold what the table's log says was written against the decision (I5).

    Raises:
        UnbalancedError: the rejects are not what the decision left: somebody changed raw or events beside Highwater.
    """
    for report in found:
        expected = decisions[report.piece.key].counts["rejects"]
        if report.rows != expected:
            raise UnbalancedError(
                f"{report.piece.key}: raw minus events leaves another number of rejects than was decided",
                stored=expected,
                found=report.rows,
                remedy="restore the table that was changed, then materialise the slice again from events on",
            )


def _commit(work: Work, rows: DataFrame, decisions: Sequence[Proof], standing: Standing) -> int:
    with commit_lock(work, TABLE):
        return replace_slices(
            work.spark,
            work.lake.path(work.stream.name, TABLE),
            rows,
            [_proof(decision) for decision in decisions],
            {d.key: standing.attempt(d.key) for d in decisions},
            files=1,
            spread="origin_offset",
        )


def _rows(work: Work, decisions: Sequence[Proof], raw_version: int, events_version: int) -> DataFrame:
    """Raw minus the committed events and the tombstones, judged once more for the reason.

    Both are read at the versions in which the decisions were found, so what another run commits meanwhile does not
    matter. Only a lookup can answer otherwise than it did when the events were decided; such a record stays a reject of
    that decision, as unresolved, and its retry will accept it.
    """
    from pyspark.sql import functions as F

    with_rejects = [d for d in decisions if d.counts["rejects"]]
    if not with_rejects:
        return work.spark.createDataFrame([], COLUMNS)
    found = judged(work, _left_over(work, with_rejects, raw_version, events_version))
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
    )


def _left_over(work: Work, decisions: Sequence[Proof], raw_version: int, events_version: int) -> DataFrame:
    from pyspark.sql import functions as F

    mine = slice_is_one_of([d.key for d in decisions])
    accepted = (
        rows_at(work.spark, work.lake.path(work.stream.name, events.TABLE), events_version)
        .where(mine)
        .select("slice", F.col("origin_partition").alias("partition"), F.col("origin_offset").alias("offset"))
    )
    alive = rows_at(work.spark, work.lake.path(work.stream.name, raw.TABLE), raw_version).where(mine)
    return alive.drop("proof").where("value IS NOT NULL").join(accepted, ["slice", "partition", "offset"], "left_anti")


def _next_topic(stream: Stream, permanent: Column) -> Column:
    from pyspark.sql import functions as F

    return (
        F.when(permanent, F.lit(f"{stream.topic}.parked")).otherwise(F.lit(f"{stream.topic}.dlq.1")).alias("next_topic")
    )
