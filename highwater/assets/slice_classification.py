"""The decision which records of raw are events and which are rejects, held by Spark until it is committed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from highwater.assets import raw
from highwater.assets.breaker_gate import end_probe, ensure_within_limit
from highwater.assets.commit import Clock, CommittedSlices, release_quietly
from highwater.assets.dlq_copies import COPIED_AT
from highwater.assets.expressions import GUARDED, has_expressions
from highwater.assets.fields import mask_value
from highwater.assets.hold_gate import (
    FIRST,
    HOLDS,
    aggregate_holds,
    ensure_none_held,
    holds_slice,
    subtract_released_rejects,
)
from highwater.assets.origins import TIMESTAMP, Seen, read_current_state, with_fate, with_origins, with_superseded
from highwater.assets.parsing import (
    build_event_time,
    build_key,
    build_version,
    has_other_key,
    is_tombstone,
    parse_records,
    select_column_fields,
)
from highwater.assets.retraction_guard import block_sending, ensure_no_retraction, list_exposed_slices
from highwater.assets.small_slices import are_few
from highwater.assets.work import Work, do_nothing
from highwater.envelope import ORIGIN
from highwater.errors import SliceHeldError, SupersededAttemptError
from highwater.reject_reasons import BY_REASON, BY_RULE, REASONS
from highwater.resources.delta import slice_is_one_of
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Stream
    from highwater.slices import Slice

# Among the counts of a slice: events whose record has another key than theirs.
OTHER_KEYS = "other_keys"
# Bytes of the records' keys and values, and of the headers of rejects.
PAYLOAD_BYTES = "payload_bytes"
# A record's columns beside its origin.
PAYLOAD = ("key", "value", "headers")


def needs_key_count(stream: Stream) -> bool:
    """Whether it is counted how many records have another key than their event."""
    return bool(stream.key) and stream.record_key == "warn"


@dataclass(frozen=True)
class ClassifiedSlices:
    """The split of some slices, held by Spark until it is committed, or until the run's rejects are.

    Args:
        work: the connections.
        rows: the classified records.
        measured: the numbers of the split, by slice.
        seen: further inputs of the decision.
        exposed: slices with events that may still be sent until they are reprocessed.
        few: whether the memory of this process can hold the rows.
        spread: the column that spreads a slice over files.
    """

    work: Work
    rows: DataFrame
    measured: Mapping[str, Mapping[str, int]]
    seen: Seen
    exposed: Collection[str]
    few: bool
    spread: str = "origin_offset"

    def build_slice_commit(self, slice_: Slice, attempt: int) -> SliceCommit:
        counts = dict(self.measured[slice_.key]) if slice_.key in self.measured else _build_zero_counts()
        return SliceCommit(slice_, attempt, rows=counts["events"], counts={**counts, **self.seen[slice_.key]})

    def count_files(self, keys: Sequence[str]) -> int:
        return raw.compute_file_count([self.measured[key]["events"] if key in self.measured else 0 for key in keys])

    def count_tasks(self, keys: Sequence[str]) -> int:
        del keys
        return 1

    def find_refusal(self, slice_: Slice, committed: SliceCommit | None) -> str | None:
        del slice_, committed
        return None

    def select_rows(self, attempts: Mapping[str, int]) -> DataFrame:
        from pyspark.sql import functions as F

        mine = self._accepted.where(F.col("slice").isin(list(attempts)))
        return mine.select(*build_origin_columns(attempts), *build_event_columns(self.work.stream))

    @property
    def _accepted(self) -> DataFrame:
        from pyspark.sql import functions as F

        return self.rows.where(_is_event_or_reject() & F.col("reason").isNull())

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
        return block_sending(self.work, lambda: self.ensure_no_retraction(mine)) if mine else nullcontext(do_nothing)

    def release(self) -> None:
        if self.work.classified is None:
            self.rows.unpersist()


def _build_zero_counts() -> dict[str, int]:
    names = ("raw", "events", "tombstones", "superseded", "rejects", *(f"{BY_REASON}{reason}" for reason in REASONS))
    return dict.fromkeys(names, 0)


def is_rejected() -> Column:
    """Whether a classified record is a reject."""
    from pyspark.sql import functions as F

    return _is_event_or_reject() & F.col("reason").isNotNull()


def _is_event_or_reject() -> Column:
    """Whether a record is an event or a reject."""
    from pyspark.sql import functions as F

    return ~F.col("tombstone") & ~F.col("superseded")


def classify_slices(
    committed: CommittedSlices,
    published: CommittedSlices,
    read: CommittedSlices,
    work: Work,
    slices: Sequence[Slice],
    clock: Clock,
) -> ClassifiedSlices:
    """Classify the records of slices: the split into events, rejects and the rest that one run commits.

    Args:
        committed: the slices in `events`.
        published: the slices in `dlq`.
        read: the slices in `raw`.
        work: the connections.
        slices: the slices to classify.
        clock: measures the phase `classify`.

    Raises:
        DependencyUnavailableError: Spark or the lake is unavailable.
    """
    with delta_errors("the split of " + ", ".join(s.key for s in slices)), clock.phase("classify"):
        seen = {slice_.key: read_current_state(work, slice_, committed.version) for slice_ in slices}
        # Spark may compute the split more than once until it is committed: all that it reads is of one version.
        version = work.lake.open_existing_table(work.stream.name, raw.TABLE).version()
        rows = with_origins(work, read_raw_rows(work, slices, version), slices, seen, published.slice_commits)
        rows, measured = _classify_and_measure(work, with_fate(work, rows, slices, seen, published), slices)
        size = sum(row[PAYLOAD_BYTES] for row in measured.values())
        if work.classified is not None:
            work.classified.keep(rows, {slice_.key: published.find_attempt(slice_.key) for slice_ in slices}, size)
        try:
            # Chosen before the publication log is read: no other slice is published after that read.
            open_ = list_exposed_slices(work, committed.slice_commits)
            _ensure_as_read(work, read, {slice_.key: measured.get(slice_.key, {}).get("raw", 0) for slice_ in slices})
            made = ClassifiedSlices(
                work,
                rows,
                {key: _select_counts(row) for key, row in measured.items()},
                seen,
                open_,
                are_few(slices, size),
            )
            _ensure_decidable(made, committed, slices, measured)
        except BaseException:
            release_quietly(rows.unpersist, work)
            raise
        return made


def _classify_and_measure(
    work: Work, rows: DataFrame, slices: Sequence[Slice]
) -> tuple[DataFrame, dict[str, dict[str, Any]]]:
    """The classified rows, which Spark holds, and their numbers by slice.

    An expression that fails on a record must not stop the others: the query then runs again with guarded expressions.
    """
    from pyspark.errors import PySparkException

    try:
        with delta_errors(f"the split of {work.stream.name}"):
            return _hold_and_measure(work.stream, _classify(work, rows, slices, guarded=False))
    except PySparkException as error:
        if not has_expressions(work.stream):
            raise
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        work.log(f"classifying again, so that a record on which an expression fails is a reject: {cause[:300]}")
    with session_settings(work.spark, GUARDED):
        return _hold_and_measure(work.stream, _classify(work, rows, slices, guarded=True))


def _classify(work: Work, rows: DataFrame, slices: Sequence[Slice], *, guarded: bool) -> DataFrame:
    from pyspark.sql import functions as F

    chosen = {"reason": F.coalesce("held_reason", "reason"), "rule": choose_rule()}
    parsed = parse_records(work, rows, guarded=guarded).withColumns(chosen)
    return _select_needed_columns(work.stream, with_superseded(work, parsed, slices))


def _hold_and_measure(stream: Stream, rows: DataFrame) -> tuple[DataFrame, dict[str, dict[str, Any]]]:
    rows = rows.persist()
    try:
        return rows, _measure(stream, rows)
    except BaseException:
        with suppress(Exception):  # a session that died has dropped the rows
            rows.unpersist()
        raise


def _ensure_as_read(work: Work, read: CommittedSlices, found: Mapping[str, int]) -> None:
    """Ensure that a split is of the rows that raw held when it was read: rows may expire or be read again meanwhile.

    Raises:
        SupersededAttemptError: raw was committed again since, with another number of rows.
    """
    differ = [key for key, count in found.items() if count != read.slice_commits[key].rows]
    now = CommittedSlices.read(work, raw.TABLE) if differ else read
    for key in differ:
        if now.find_attempt(key) != read.find_attempt(key):
            raise SupersededAttemptError(
                f"{key}: raw was committed again during the classification",
                stored=read.slice_commits[key].rows,
                found=found[key],
                remedy="nothing to do: the slice is tried again",
            )


def _ensure_decidable(
    made: ClassifiedSlices,
    committed: CommittedSlices,
    slices: Sequence[Slice],
    measured: Mapping[str, Mapping[str, Any]],
) -> None:
    """Ensure that nothing speaks against a split before it is committed; the breaker, which remembers, is asked last.

    All slices are checked: if the lake lost a slice's events, only `published` lists the sent ones.
    """
    work, measured_rejects = made.work, subtract_released_rejects(measured, made.measured)
    try:
        ensure_none_held(work, committed.slice_commits, measured)
    except SliceHeldError:
        end_probe(work, slices, committed.slice_commits, measured_rejects)
        raise
    made.ensure_no_retraction([slice_.key for slice_ in slices])
    ensure_within_limit(work, slices, committed.slice_commits, measured_rejects)


def read_raw_rows(work: Work, slices: Sequence[Slice], version: int) -> DataFrame:
    """The raw rows of the slices in one version of the table."""
    rows = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, raw.TABLE), version)
    return rows.where(slice_is_one_of([s.key for s in slices]))


def _select_needed_columns(stream: Stream, rows: DataFrame) -> DataFrame:
    """The needed columns of the classified rows: all for a reject, fewer for others, so that Spark holds less."""
    from pyspark.sql import functions as F

    # Masked before Spark holds the rows.
    fields = [mask_value(f, F.col(f"field_{f.name}")).alias(f"field_{f.name}") for f in stream.stored_fields]
    own = (*TIMESTAMP, "retries", "reclaims", "superseded", "reason", "rule", COPIED_AT)
    tombstone, countable = is_tombstone(stream).alias("tombstone"), F.col("held_reason").isNull().alias("again")
    return rows.select(
        *[F.col(name) for name in ("slice", *ORIGIN, *own)],
        tombstone,
        countable,
        F.coalesce("held_detail", "detail").alias("detail"),
        F.col("held_next_topic"),
        F.coalesce("held_first_failed_at", "first_failed_at").alias("first_failed_at"),
        *[F.when(F.col("reason").isNotNull(), F.col(name)).alias(name) for name in PAYLOAD],
        F.expr(_PAYLOAD_BYTES).alias(PAYLOAD_BYTES),
        *([holds_slice(stream).alias(HOLDS)] if stream.ordered else []),
        *([has_other_key(stream).alias(OTHER_KEYS)] if needs_key_count(stream) else []),
        *(["deleted"] if stream.deletes else []),
        *fields,
    )


_PAYLOAD_BYTES = """
coalesce(length(key), 0) + coalesce(length(value), 0) + if(reason IS NULL, 0,
  coalesce(aggregate(headers, 0, (sum, one) -> sum + length(one.key) + coalesce(length(one.value), 0)), 0))
"""


def choose_rule() -> Column:
    """The rule that refused a record; of a published reject the published one, which is null for other reasons."""
    from pyspark.sql import functions as F

    return F.when(F.col("held_reason").isNotNull(), F.col("held_rule")).otherwise(F.col("rule"))


# How the numbers of the groups of a slice become one; all others are added up.
_COMBINE = {
    "first_event_us": partial(min, default=None),
    "last_event_us": partial(max, default=None),
    FIRST: partial(min, default=None),
}


def _measure(stream: Stream, rows: DataFrame) -> dict[str, dict[str, Any]]:
    """The numbers of the split, by slice; rejects by the rules that refused them as `rule_<name>`.

    Published rejects may name rules that are no longer declared, so Spark groups by rule too.
    """
    groups: dict[str, dict[str | None, dict[str, Any]]] = {}
    for row in _aggregate_by_rule(stream, rows).collect():
        group = row.asDict()
        groups.setdefault(group.pop("slice"), {})[group.pop("rule")] = group
    return {key: _combine_groups(mine) for key, mine in groups.items()}


def _combine_groups(groups: Mapping[str | None, Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of a slice from those of its groups, one for each rule and one for all other records."""
    by_rule = {f"{BY_RULE}{rule}": group["rejects"] for rule, group in groups.items() if rule is not None}
    names = next(iter(groups.values()))
    values = {name: [group[name] for group in groups.values() if group[name] is not None] for name in names}
    return {**{name: _COMBINE.get(name, sum)(found) for name, found in values.items()}, **by_rule}


def _aggregate_by_rule(stream: Stream, rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    alive = _is_event_or_reject()
    accepted = alive & F.col("reason").isNull()
    time = F.when(accepted, F.unix_micros(build_event_time(stream)))
    by_reason = [F.count_if(alive & (F.col("reason") == r)).alias(f"{BY_REASON}{r}") for r in REASONS]
    rule = F.when(alive, F.col("rule")).alias("rule")
    return rows.groupBy("slice", rule).agg(
        F.count("*").alias("raw"),
        F.count_if(accepted).alias("events"),
        F.count_if("tombstone").alias("tombstones"),
        F.count_if(alive & F.col("reason").isNotNull()).alias("rejects"),
        F.count_if(F.col("superseded") & ~F.col("tombstone")).alias("superseded"),
        *by_reason,
        *(aggregate_holds(alive) if stream.ordered else ()),
        *([F.count_if(accepted & F.col(OTHER_KEYS)).alias(OTHER_KEYS)] if needs_key_count(stream) else ()),
        *([F.count_if(accepted & F.col("deleted")).alias("deletes")] if stream.deletes else ()),
        F.min(time).alias("first_event_us"),
        F.max(time).alias("last_event_us"),
        F.sum(PAYLOAD_BYTES).alias(PAYLOAD_BYTES),
    )


def _select_counts(row: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in row.items() if isinstance(value, int) and name not in {HOLDS, PAYLOAD_BYTES}}


def build_event_columns(stream: Stream) -> list[Column]:
    """The columns of an event that come from its parsed fields."""
    from pyspark.sql import functions as F

    return [
        build_key(stream).alias("key"),
        *([build_version(stream).alias("version")] if stream.versioned else []),
        build_event_time(stream).alias("event_time"),
        *([F.col("deleted")] if stream.deletes else []),
        *[F.col(f"field_{f.name}").alias(f.name) for f in select_column_fields(stream)],
    ]


def build_origin_columns(attempts: Mapping[str, int]) -> list[Column]:
    """The columns that events and rejects share: slice, origin, and the attempt of the slice's decision."""
    from pyspark.sql import functions as F

    pairs = [F.lit(part) for pair in attempts.items() for part in pair]
    attempt = F.create_map(*pairs)[F.col("slice")].alias("attempt")
    names = ("slice", *ORIGIN, *TIMESTAMP)
    return [*[F.col(name) for name in names], attempt, F.col("retries"), F.col("reclaims")]
