"""`current` computed from the events alone: what differs, and one commit that replaces the table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from highwater.assets import current, events
from highwater.assets.commit import build_target, ensure_table, take_commit_turn
from highwater.assets.current import TABLE
from highwater.assets.parsing import quote_column
from highwater.assets.schema_evolution import adapt_types, with_added_fields
from highwater.assets.work import Work
from highwater.commit_records import CommitRecord
from highwater.errors import ConfigurationError, SupersededAttemptError
from highwater.field_rules import CONTAINERS
from highwater.resources.numbered_commits import commit_slices
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.resources.commit_log import TableSlices
    from highwater.slice_commits import SliceCommit

SAMPLES = 10


@dataclass(frozen=True)
class Differences:
    """The differences between `current` and the events.

    Args:
        slices: slices with events that `current` must all hold.
        behind: decided slices that `current` does not hold at their attempt.
        unknown: slices that `current` holds and events do not.
        lacking: rows that the events give and `current` lacks.
        wrong: rows of `current` that the events do not give.
        samples: some of both, as rows of a table.
    """

    slices: int
    behind: Sequence[str]
    unknown: Sequence[str]
    lacking: int
    wrong: int
    samples: Sequence[Mapping[str, Any]] = ()

    @property
    def none(self) -> bool:
        """Whether `current` is what the events give."""
        return not (self.behind or self.unknown or self.lacking or self.wrong)

    @property
    def lines(self) -> list[str]:
        """The differences in sentences."""
        found = [f"{self.slices:,} slices with events; {self.lacking:,} rows are lacking, {self.wrong:,} are wrong"]
        if self.behind:
            found.append(
                f"{len(self.behind):,} slices are not in current at their attempt: {_format_keys(self.behind)}"
            )
        if self.unknown:
            found.append(f"{len(self.unknown):,} slices are in current and not in events: {_format_keys(self.unknown)}")
        return found


def _format_keys(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (" and more" if len(keys) > 5 else "")


@dataclass(frozen=True)
class RebuildSnapshot:
    """Events and `current` at one moment.

    Args:
        version: the version of events.
        decisions: the slices in it.
        seen: the slices in `current`; read first, so that a slice in it without events never had any.
    """

    version: int
    decisions: Mapping[str, SliceCommit]
    seen: TableSlices

    @classmethod
    def take(cls, work: Work) -> RebuildSnapshot:
        """Look now.

        Raises:
            ConfigurationError: there are no events to compute from.
            DependencyUnavailableError: the lake could not be read.
        """
        if not work.stream.versioned:
            raise ConfigurationError(
                f"{work.stream.name} has no table current",
                stored="the stream declares no version",
                remedy="declare a key and a version, then materialise current of its slices",
            )
        seen = work.lake.load_commits(work.stream.name, TABLE)
        decisions, version = work.lake.load_commits_and_version(work.stream.name, events.TABLE)
        if not decisions:
            raise ConfigurationError(
                f"{work.stream.name} has no events from which current could be computed",
                stored=f"{len(seen.records):,} slices in current",
                found="no slice in events",
                remedy="check that HIGHWATER_LAKE is the right one, or materialise the slices from events on",
            )
        return cls(version, decisions, seen)

    @property
    def behind(self) -> list[str]:
        """Slices that `current` does not hold at the attempt of their events."""
        return sorted(
            key for key, decision in self.decisions.items() if self.seen.find_attempt(key) != decision.attempt
        )

    @property
    def unknown(self) -> list[str]:
        """Slices that `current` holds and events do not."""
        return sorted(self.seen.records.keys() - self.decisions.keys())


def compare_with_events(work: Work, look: RebuildSnapshot) -> Differences:
    """Compare `current` with the events, row by row.

    Raises:
        DependencyUnavailableError: Spark or the lake is unavailable.
    """
    from pyspark.sql import functions as F

    work = with_added_fields(work)
    with delta_errors(f"current of {work.stream.name}"):
        names = current.quote_column_names(work.stream)
        columns = [_build_comparable(work, name) for name in names]
        right, there = _compute_expected_rows(work, look).select(*columns), _read_stored_rows(work).select(*columns)
        found = (
            right.exceptAll(there)
            .withColumn("what", F.lit("lacking"))
            .unionByName(there.exceptAll(right).withColumn("what", F.lit("wrong")))
            .persist()
        )
        try:
            counted = found.groupBy("what").agg(F.count("*").alias("n")).collect()
            counts: Counter[str] = Counter({row["what"]: row["n"] for row in counted})
            shown = found.select("what", "key", "version", "updated_by_slice")
            samples = [row.asDict() for row in shown.orderBy("key", "what").limit(SAMPLES).collect()]
        finally:
            found.unpersist()
    return Differences(len(look.decisions), look.behind, look.unknown, counts["lacking"], counts["wrong"], samples)


def _build_comparable(work: Work, name: str) -> Column:
    """A column as rows can be subtracted by: Spark compares no maps."""
    from pyspark.sql import functions as F

    nested = {quote_column(f.name) for f in work.stream.fields if f.type in CONTAINERS}
    return F.to_json(F.struct(name)).alias(name.strip("`")) if name in nested else F.col(name)


def _compute_expected_rows(work: Work, look: RebuildSnapshot) -> DataFrame:
    """The rows that `current` must hold, with the declared columns."""
    return _with_columns_of(work, _compute_winners(work, look))


def _compute_winners(work: Work, look: RebuildSnapshot) -> DataFrame:
    """The winners among the events of all slices, with all columns of events."""
    from pyspark.sql import functions as F

    rows = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, events.TABLE), look.version)
    known = work.spark.createDataFrame([(key,) for key in look.decisions], "slice STRING")
    expected_rows = rows.join(F.broadcast(known), "slice", "left_semi").withColumn("updated_by_slice", F.col("slice"))
    if "deleted" not in rows.columns:
        return current.select_winners(expected_rows, "key")
    return current.select_winners(current.with_deleted_as_boolean(expected_rows), "key").where("NOT deleted")


def _read_stored_rows(work: Work) -> DataFrame:
    """The rows of `current`; none where there is no table."""
    if work.lake.open_stream_table(work.stream.name, TABLE) is None:
        return work.spark.createDataFrame([], current.build_sql_columns(work.stream))
    return _with_columns_of(
        work, work.spark.read.format("delta").load(work.lake.build_table_path(work.stream.name, TABLE))
    )


def _with_columns_of(work: Work, rows: DataFrame) -> DataFrame:
    """The rows with the declared columns: a field that was added has null in older rows."""
    return _with_columns_like(work.spark.createDataFrame([], current.build_sql_columns(work.stream)), rows)


def _with_columns_like(empty: DataFrame, rows: DataFrame) -> DataFrame:
    return empty.unionByName(rows, allowMissingColumns=True).select(*empty.columns)


def rebuild(work: Work) -> int:
    """Replace all of `current` by what the events give, in one commit; returns the number of its rows.

    Raises:
        ConfigurationError: there are no events.
        SupersededAttemptError: other writers were first again and again; nothing was written.
        LeaseHeldError: other merges went on for too long; nothing was written.
        DependencyUnavailableError: Spark or the lake is unavailable; nothing was written.
    """
    RebuildSnapshot.take(work)  # before a table is made: without events there is nothing to make
    work = with_added_fields(work)
    ensure_table(work, TABLE, current.build_sql_columns(work.stream), current.STATISTICS_COLUMNS)
    adapt_types(work, TABLE, current.build_sql_columns(work.stream))
    for tries in range(1, current.TRIES + 1):
        try:
            with current.lease_merges(work):
                current.close_open_intents(work)
                replace_all(work, RebuildSnapshot.take(work))
        except SupersededAttemptError:
            if tries == current.TRIES:
                raise
            work.log("current: another run committed at the same time; looking again")
            time.sleep(tries)
        else:
            path = work.lake.build_table_path(work.stream.name, TABLE)
            return work.spark.read.format("delta").load(path).count()
    raise AssertionError("unreachable")


def replace_all(work: Work, look: RebuildSnapshot) -> int:
    """Commit the winners of all slices in place of the whole table; returns the version of the table."""
    path = work.lake.build_table_path(work.stream.name, TABLE)
    # The columns of the table: those of removed fields stay, with the values that events have.
    rows = _with_columns_like(work.spark.read.format("delta").load(path).limit(0), _compute_winners(work, look))
    records = [CommitRecord(key, one.attempt, one.rows, batch="") for key, one in look.decisions.items()]

    def write(options: Mapping[str, str]) -> None:
        rows.write.format("delta").mode("overwrite").options(**options).save(path)

    with delta_errors(f"current of {work.stream.name}"), take_commit_turn(work, TABLE):
        return commit_slices(build_target(work, TABLE), look.seen, records, work.run, write, replaces=True).version
