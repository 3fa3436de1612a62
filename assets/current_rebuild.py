"""`current` computed anew from the events alone, whatever became of it.

What belongs here: telling what differs from the events, and replacing all of it in one commit. What does not: how
slices come into `current` day by day (`assets.current`).

All slices land in the partition `base`, as a fold of all of them would leave it. The commit is a compare-and-set like
every other one, so runs may go on: a slice that is decided meanwhile finds itself in the fold, or follows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assets import current, events
from assets.commit import commit_lock, have_table
from assets.layout import TABLE, Layout
from assets.work import Work
from highwater.errors import ConfigurationError, SupersededAttemptError
from highwater.folding import BASE, RECENT, Fold, merged_runs
from highwater.slices import SliceKey
from resources.lake import slice_is_one_of
from resources.spark import delta_errors
from resources.spark_tables import replace_slices, rows_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.proof import Proof

SAMPLES = 10
MOST_NAMED = 200


@dataclass(frozen=True)
class Differences:
    """What `current` holds otherwise than the events have it.

    Args:
        slices: decided slices, all of which are to stand in `current`.
        behind: those of them that do not stand there as they were decided.
        strange: partitions of `current` whose slices the events do not have, or that lack their proof.
        lacking: rows that the events give and `current` lacks.
        wrong: rows of `current` that the events do not give.
        samples: some of both, as rows of a table.
    """

    slices: int
    behind: Sequence[str]
    strange: Sequence[str]
    lacking: int
    wrong: int
    samples: Sequence[Mapping[str, Any]] = ()

    @property
    def none(self) -> bool:
        """Whether `current` is what the events say."""
        return not (self.behind or self.strange or self.lacking or self.wrong)

    @property
    def lines(self) -> list[str]:
        """The same in sentences."""
        told = [f"{self.slices:,} decided slices; {self.lacking:,} rows are lacking, {self.wrong:,} are wrong"]
        told += [f"{len(self.behind):,} slices are not in current as they were decided: {_some(self.behind)}"] * bool(
            self.behind
        )
        told += [f"{len(self.strange):,} partitions are not of decided slices: {_some(self.strange)}"] * bool(
            self.strange
        )
        return told


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (" and more" if len(keys) > 5 else "")


@dataclass(frozen=True)
class Look:
    """Events and the layout of `current` at one moment.

    Args:
        version: the version of events.
        decisions: the slices that stand in it.
        layout: of `current`; looked at first, so that what stands there without a decision never had one.
    """

    version: int
    decisions: Mapping[str, Proof]
    layout: Layout

    @classmethod
    def take(cls, work: Work) -> Look:
        """Look now.

        Raises:
            ConfigurationError: there are no events to compute from, or a proof in `current` cannot be read.
            DependencyAwayError: the lake could not be read.
        """
        path = work.lake.path(work.stream.name, TABLE)
        try:
            layout = Layout.read(work)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"a proof in {path} cannot be read",
                found=f"{type(error).__name__}: {error}",
                remedy="delete the table's folder, then rebuild it: it is made of the events alone",
            ) from error
        decisions, version = work.lake.committed_at(work.stream.name, events.TABLE)
        if not decisions:
            raise ConfigurationError(
                f"{work.stream.name} has no events from which current could be computed",
                stored=f"{len(layout.rows):,} partitions of current",
                found="no slice in events",
                remedy="see that HIGHWATER_LAKE is the right one, or materialise the slices from events on",
            )
        return cls(version, decisions, layout)

    @property
    def behind(self) -> list[str]:
        """Decided slices that do not stand in `current` at the attempt of their decision."""
        folded = {str(SliceKey(*one)): n for fold in self.layout.folds.values() for one, n in fold.attempts().items()}
        there = {**folded, **{key: proof.attempt for key, proof in self.layout.slices.items()}}
        return sorted(key for key, decision in self.decisions.items() if there.get(key) != decision.attempt)

    @property
    def strange(self) -> list[str]:
        """Partitions that stand there without a decision or without a proof."""
        proved = {**self.layout.slices, **self.layout.folds}
        known = {*self.decisions, BASE, RECENT}
        return sorted(str(key) for key in {*self.layout.rows} if key not in proved or key not in known)

    def places(self) -> list[tuple[str, str]]:
        """Each decided slice, and the partition of `current` that its rows belong into now."""
        folded = {str(SliceKey(*one)): name for name in (RECENT, BASE) for one in self.layout.fold(name).attempts()}
        return [(key, key if key in self.layout.rows else folded.get(key, key)) for key in self.decisions]

    def replaced(self) -> str:
        """The predicate that picks all of `current`: another run's commit to any of these slices conflicts with ours.

        Of slices that are decided later it picks none: their runs go on beside this one.
        """
        named = [key for key in self.layout.rows if key is not None and key not in self.decisions]
        spans = _spans(self.decisions)
        covered = [f"(slice >= '{first}' AND slice <= '{last}')" for first, last in spans]
        return " OR ".join([slice_is_one_of(sorted({BASE, RECENT, *named})), "slice IS NULL", *covered])


def _spans(keys: Iterable[str]) -> list[tuple[str, str]]:
    """The fewest spans of keys that cover these, and of each topic no ordinal that is not among them."""
    runs = merged_runs([], dict.fromkeys(keys, 1))
    return [
        (str(SliceKey(topic, run.first)), str(SliceKey(topic, run.last)))
        for topic, found in runs.items()
        for run in found
    ]


def differences(work: Work, look: Look) -> Differences:
    """Compare `current` with the events, row by row as they stand in its partitions.

    Raises:
        DependencyAwayError: Spark or the lake is away.
    """
    from pyspark.sql import functions as F

    with delta_errors(f"current of {work.stream.name}"):
        places = work.spark.createDataFrame(look.places(), "updated_by_slice STRING, place STRING")
        placed = _event_rows(work, look).join(F.broadcast(places), "updated_by_slice")
        expected = current.winners(placed, "place", "key").withColumnRenamed("place", "slice")
        names = ["slice", *current.columns_of(work.stream)]
        right, there = expected.select(*names), _standing(work).select(*names)
        found = (
            right.exceptAll(there)
            .withColumn("what", F.lit("lacking"))
            .unionByName(there.exceptAll(right).withColumn("what", F.lit("wrong")))
            .persist()
        )
        try:
            counts: Counter[str] = Counter({row["what"]: row["n"] for row in _counted(found)})
            shown = found.select("what", "slice", "key", "version", "updated_by_slice")
            samples = [row.asDict() for row in shown.orderBy("key", "slice", "what").limit(SAMPLES).collect()]
        finally:
            found.unpersist()
    return Differences(len(look.decisions), look.behind, look.strange, counts["lacking"], counts["wrong"], samples)


def _counted(found: DataFrame) -> list[Any]:
    from pyspark.sql import functions as F

    return found.groupBy("what").agg(F.count("*").alias("n")).collect()


def _event_rows(work: Work, look: Look) -> DataFrame:
    """The events of the decided slices, with the columns of `current` save `slice`."""
    from pyspark.sql import functions as F

    rows = rows_at(work.spark, work.lake.path(work.stream.name, events.TABLE), look.version)
    proved = work.spark.createDataFrame([(key,) for key in look.decisions], "slice STRING")
    mine = rows.join(F.broadcast(proved), "slice", "left_semi").withColumn("updated_by_slice", F.col("slice"))
    return _with_columns_of(work, mine).drop("slice")


def _standing(work: Work) -> DataFrame:
    """The rows of `current`; none where there is no table."""
    empty = work.spark.createDataFrame([], current.columns(work.stream))
    if work.lake.table(work.stream.name, TABLE) is None:
        return empty
    return _with_columns_of(work, current.standing_rows(work))


def _with_columns_of(work: Work, rows: DataFrame) -> DataFrame:
    """The rows with the declared columns: a field that was added has null in rows of before."""
    empty = work.spark.createDataFrame([], current.columns(work.stream))
    return empty.unionByName(rows, allowMissingColumns=True).select(*empty.columns)


def rebuild(work: Work) -> int:
    """Replace all of `current` by what the events say, in one commit; returns the rows that it holds now.

    Raises:
        ConfigurationError: there are no events.
        SupersededAttemptError: other writers were first again and again; nothing was written.
        LeaseHeldError: a fold, or another rebuild, went on for too long; nothing was written.
        DependencyAwayError: Spark or the lake is away; nothing was written.
    """
    Look.take(work)  # before a table is made: without events there is nothing to make
    have_table(work, TABLE, current.columns(work.stream), current.SEARCHED)
    for tries in range(1, current.TRIES + 1):
        try:
            with current.fold_lease(work, wait=current.FOLD_SECONDS):
                replace_all(work, Look.take(work))
        except SupersededAttemptError:
            if tries == current.TRIES:
                raise
            work.log("current: another run committed meanwhile; looking again")
            time.sleep(tries)
        else:
            return work.lake.sizes(work.stream.name, TABLE, [BASE])[BASE].rows or 0
    raise AssertionError("unreachable")


def replace_all(work: Work, look: Look) -> int:
    """Commit the winners of all decided slices in place of all that stands; returns the version of the table."""
    from pyspark.sql import functions as F

    layout = look.layout
    best = current.winners(_event_rows(work, look), "key").withColumn("slice", F.lit(BASE))
    before = layout.fold_attempts()
    runs = merged_runs([], {key: decision.attempt for key, decision in look.decisions.items()})
    with commit_lock(work, TABLE), delta_errors(f"current of {work.stream.name}"):
        return replace_slices(
            work.spark,
            work.lake.path(work.stream.name, TABLE),
            best,
            [Fold(BASE, max(before.values()) + 1, runs)],
            {BASE: before[BASE]},
            files=0,
            spread="key",
            replaced=look.replaced(),
            unchanged=_unchanged(look) | {RECENT: before[RECENT]},
        )


def _unchanged(look: Look) -> dict[str, int]:
    """The attempts on which the commit rests: of partitions that stand, and of slices that may be on their way.

    Where all of `current` is gone there are too many to name. One of them that is decided anew and followed just
    before the commit is then behind, and repair requests it.
    """
    slices = look.layout.slices
    there = {key: slices[key].attempt if key in slices else 0 for key in look.layout.rows if key is not None}
    behind = dict.fromkeys(look.behind, 0) if len(look.behind) <= MOST_NAMED else {}
    return {key: n for key, n in (behind | there).items() if key not in {BASE, RECENT}}
