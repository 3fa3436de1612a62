"""The stage `rejects`: commits what of raw the committed events left over, with reason and destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from highwater.assets import events, raw, slice_classification
from highwater.assets.commit import (
    Clock,
    CommittedSlices,
    build_reports,
    commit_rows,
    ensure_table,
    require_newer,
    take_commit_turn,
)
from highwater.assets.dlq_copies import COPIED_AT
from highwater.assets.events import require_upstream_commits
from highwater.assets.expressions import GUARDED, has_expressions
from highwater.assets.hold_gate import list_slices_to_park
from highwater.assets.origins import DLQ, filter_first_per_origin, with_fate, with_origins
from highwater.assets.parsing import is_tombstone, parse_records
from highwater.assets.schema_evolution import with_added_fields
from highwater.assets.slice_classification import build_origin_columns, choose_rule
from highwater.assets.small_slices import are_few, list_classification_tables, small_slice_settings
from highwater.assets.work import SliceReport, Work
from highwater.balancing import combine_pairwise
from highwater.envelope import ORIGIN
from highwater.errors import SupersededAttemptError, UnbalancedError
from highwater.reject_reasons import BY_REASON, PERMANENT, REASONS, UNRESOLVED
from highwater.resources.delta import slice_is_one_of
from highwater.resources.numbered_commits import NumberedCommit
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.routing import find_destination
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Stream

TABLE = "rejects"
COLUMNS = (
    f"{events.ORIGIN_COLUMNS}, reason STRING, rule STRING, permanent BOOLEAN, detail STRING, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, next_topic STRING, first_failed_at TIMESTAMP, "
    "published_at TIMESTAMP"
)
STATISTICS_COLUMNS = ("slice", "origin_partition", "origin_offset", "origin_timestamp", "reason")
# Time of publication, for a reject that was published before a lost lake was rebuilt; else null.
PUBLISHED_AT = "published_at"
TRIES = 3


def materialise(work: Work) -> list[SliceReport]:
    """Commit the rejects of the decision that is in events; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: newer decisions were committed again and again meanwhile.
        DependencyUnavailableError: Spark, the lake or the reference table is unavailable; nothing was committed.
    """
    work = with_added_fields(work)
    ensure_table(work, TABLE, COLUMNS, STATISTICS_COLUMNS)
    for tries in range(1, TRIES + 1):
        try:
            found = _follow_decision(
                work, require_upstream_commits(work, events.TABLE), CommittedSlices.read(work, TABLE), Clock()
            )
        except SupersededAttemptError:
            if tries == TRIES:
                raise
            work.log("rejects: another run committed meanwhile; looking again")
        else:
            if work.classified is not None:
                work.classified.release()
            return found
    raise AssertionError("unreachable")


def _follow_decision(
    work: Work, decided: CommittedSlices, committed: CommittedSlices, clock: Clock
) -> list[SliceReport]:
    decisions = decided.slice_commits
    rejected = any(decision.counts["rejects"] for decision in decisions.values())
    published = CommittedSlices.read(work, DLQ) if rejected else CommittedSlices({}, -1)
    wrong = _find_unbalanced_slices(work, decisions, committed, published)
    open_ = [key for key in work.keys if key in wrong or committed.find_attempt(key) != decisions[key].attempt]
    require_newer(decisions, {key: committed.find_attempt(key) for key in open_})
    done = NumberedCommit(committed.version, {})
    if open_:
        read = require_upstream_commits(work, raw.TABLE)
        _ensure_conserved(read, [decisions[key] for key in open_])
        mine = [decisions[key] for key in open_]
        with clock.phase("commit"), delta_errors("the rejects of " + ", ".join(open_)), ExitStack() as settings:
            rows, held = None, False
            if with_rejects := [decision for decision in mine if decision.counts["rejects"]]:
                rows, held = _build_rows(work, with_rejects, read.version, decided.version, published)
                settings.enter_context(small_slice_settings(work, list_classification_tables(work)))
                settings.enter_context(session_settings(work.spark, GUARDED if has_expressions(work.stream) else {}))
            done = _commit(work, rows, mine, committed, held=held)
    slice_commits = {key: _build_slice_commit(decisions[key]) for key in work.keys}
    notes = {key: "already followed the decision" for key in work.keys if key not in open_}
    found = build_reports(work, TABLE, slice_commits, notes, clock, done)
    _ensure_balanced(found, decisions)
    return found


def _find_unbalanced_slices(
    work: Work, decisions: Mapping[str, SliceCommit], committed: CommittedSlices, published: CommittedSlices
) -> set[str]:
    """Unpublished slices whose rejects were written while raw or events were damaged: they are repaired."""
    same = [key for key, slice_commit in decisions.items() if committed.find_attempt(key) == slice_commit.attempt]
    if not same:
        return set()
    open_ = [key for key in same if published.find_attempt(key) != decisions[key].attempt]
    there = work.lake.count_slice_rows(work.stream.name, TABLE, open_)
    return {key for key, rows in there.items() if rows != decisions[key].counts["rejects"]}


def _build_slice_commit(decision: SliceCommit) -> SliceCommit:
    return replace(decision, rows=decision.counts["rejects"])


def _ensure_conserved(read: CommittedSlices, decisions: Sequence[SliceCommit]) -> None:
    """Ensure that raw is what was decided of: rejects are what the decision left over of it (I5).

    Raises:
        SupersededAttemptError: raw was read again since, and gave another number of records.
    """
    for decision in decisions:
        found, decided = read.slice_commits[decision.key].rows, decision.counts["raw"]
        if found != decided:
            raise SupersededAttemptError(
                f"{decision.key}: raw has another number of records than the classification",
                stored=decided,
                found=found,
                remedy="materialise the slice again from events on: it is reprocessed, unless its rejects began to be "
                "published; then restore raw as it was then. If retention "
                "deleted rows, materialise raw again while Kafka has the records",
            )


def _ensure_balanced(found: Sequence[SliceReport], decisions: Mapping[str, SliceCommit]) -> None:
    """Compare the written rows with the decision (I5).

    Raises:
        UnbalancedError: the rejects are not what the decision left: somebody changed raw or events beside Highwater.
    """
    for report in found:
        expected = decisions[report.slice_.key].counts["rejects"]
        if report.rows != expected:
            raise UnbalancedError(
                f"{report.slice_.key}: raw minus events leaves another number of rejects than was decided",
                stored=expected,
                found=report.rows,
                remedy="materialise the slice again from events on: it is reprocessed, unless its rejects began to be "
                "published; then restore the table that was changed first",
            )


def _commit(
    work: Work, rows: DataFrame | None, decisions: Sequence[SliceCommit], committed: CommittedSlices, *, held: bool
) -> NumberedCommit:
    slice_commits = [_build_slice_commit(decision) for decision in decisions]
    with take_commit_turn(work, TABLE):
        files = raw.compute_file_count([slice_commit.rows or 0 for slice_commit in slice_commits])
        return commit_rows(
            work,
            TABLE,
            rows,
            slice_commits,
            committed,
            files=files,
            spread="origin_offset",
            tasks=1 if held else None,
            few=held and work.classified is not None and are_few(work.slices, work.classified.size),
        )


def _build_rows(
    work: Work, decisions: Sequence[SliceCommit], raw_version: int, events_version: int, published: CommittedSlices
) -> tuple[DataFrame, bool]:
    """The rejects of decisions that have some, as this run classified them, or else what their events left over.

    The second value is whether Spark holds them.
    """
    from pyspark.sql import functions as F

    held = _select_classified_rejects(work, decisions, published)
    found = held
    if found is None:
        found = _classify_again(work, decisions, raw_version, events_version, published)
    rows = found.select(
        *build_origin_columns({d.key: d.attempt for d in decisions}),
        "reason",
        "rule",
        F.col("reason").isin(sorted(PERMANENT)).alias("permanent"),
        "detail",
        *slice_classification.PAYLOAD,
        F.coalesce("held_next_topic", _build_next_topic(work.stream, list_slices_to_park(work))).alias("next_topic"),
        F.coalesce("first_failed_at", F.current_timestamp()).alias("first_failed_at"),
        F.col(COPIED_AT).alias(PUBLISHED_AT),
    )
    return rows, held is not None


def _select_classified_rejects(
    work: Work, decisions: Sequence[SliceCommit], published: CommittedSlices
) -> DataFrame | None:
    """The rejects as this run classified them; None where another run decided, or the run began again."""
    from pyspark.sql import DataFrame as Frame

    if work.classified is None:
        return None
    attempts = {d.key: d.attempt for d in decisions}
    frames = work.classified.select_frames(attempts, {key: published.find_attempt(key) for key in attempts})
    mine = [rows.where(slice_is_one_of(keys)).where(slice_classification.is_rejected()) for rows, keys in frames]
    return combine_pairwise(Frame.unionByName, mine) if mine else None


def _classify_again(
    work: Work, decisions: Sequence[SliceCommit], raw_version: int, events_version: int, published: CommittedSlices
) -> DataFrame:
    """Raw minus the committed events, the tombstones and the superseded, parsed again for the reason.

    All are read at the versions in which the decisions were found, so what another run commits meanwhile does not
    matter. Only a lookup can answer otherwise than it did when the events were decided; such a record stays a reject of
    that decision, as unresolved, and its retry will accept it. A published reject keeps its published content.
    """
    from pyspark.sql import functions as F

    left = _read_unaccepted_rows(work, decisions, raw_version, events_version, published)
    found = parse_records(work, left, guarded=True)
    unknown = F.lit("unknown when the slice was decided, known since")
    # With a schema that was registered since, the result could differ: the decision counted it as unresolved.
    counted = [(d.key, [name for name in REASONS if d.counts.get(f"{BY_REASON}{name}")]) for d in decisions]
    pairs = [part for key, names in counted for part in (F.lit(key), F.array(*map(F.lit, names)).cast("array<string>"))]
    was_counted = F.array_contains(F.create_map(*pairs)[F.col("slice")], F.col("reason"))
    found = found.withColumn("reason", F.when(was_counted, F.col("reason")))
    reason = F.coalesce("held_reason", "reason")
    return found.withColumns(
        {
            "reason": F.coalesce(reason, F.lit(UNRESOLVED)),
            "rule": F.when(reason.isNotNull(), choose_rule()),
            "detail": F.coalesce("held_detail", "detail", unknown),
            "first_failed_at": F.coalesce("held_first_failed_at", "first_failed_at"),
        }
    )


def _read_unaccepted_rows(
    work: Work, decisions: Sequence[SliceCommit], raw_version: int, events_version: int, published: CommittedSlices
) -> DataFrame:
    from pyspark.sql import functions as F

    slices = [d.slice_ for d in decisions]
    mine = slice_is_one_of([d.key for d in decisions])
    name = work.stream.name
    accepted = read_table_version(work.spark, work.lake.build_table_path(name, events.TABLE), events_version).where(
        mine
    )
    read = read_table_version(work.spark, work.lake.build_table_path(name, raw.TABLE), raw_version).where(mine)
    seen = {d.key: d.counts for d in decisions}
    origins = with_origins(work, read, slices, seen, published.slice_commits)
    fated = with_fate(work, origins, slices, seen, published)
    alive = fated.where(~is_tombstone(work.stream) & ~F.col("elsewhere"))
    return filter_first_per_origin(
        work, alive.join(accepted.select("slice", *ORIGIN), ["slice", *ORIGIN], "left_anti"), slices
    )


def _build_next_topic(stream: Stream, parked: Sequence[str] = ()) -> Column:
    """The topic that `highwater.routing.find_destination` gives for each reason and each number of retries.

    Args:
        stream: its declaration.
        parked: slices whose holding records a person parks.
    """
    from pyspark.sql import functions as F

    def build_destination(*, park: bool) -> Column:
        found = F.when(F.col("retries") >= len(stream.tiers), stream.parked_topic)
        for reason, retries in rules:
            mine = (F.col("reason") == reason) & (F.col("retries") == retries)
            found = found.when(mine, find_destination(stream, reason, retries, park=park))
        return found.otherwise(stream.parked_topic)

    rules = [(reason, retries) for reason in stream.on_reject for retries, _ in enumerate(stream.tiers)]
    usual = build_destination(park=False)
    return F.when(F.col("slice").isin(list(parked)), build_destination(park=True)).otherwise(usual) if parked else usual
