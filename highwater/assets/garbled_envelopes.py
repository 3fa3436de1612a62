"""Envelopes on tiers that name an origin which no slice of the main topic has decided yet: they were garbled."""

# The look costs the ledger's keys of the main topic and the logs of two tables: no rows of theirs are read.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.assets import dlq_copies
from highwater.assets.foreign import DLQ_SEEN, GENERATIONS_SEEN, LOSSES_SEEN
from highwater.envelope import ORIGIN_OFFSET
from highwater.plans import Planned
from highwater.resources.commit_log import read_slice_keys
from highwater.resources.delta import slice_is_one_of
from highwater.unprocessed_offsets import Undecided, build_undecided

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.plans import Generation
    from highwater.slices import Slice

# In the commit of a tier's slice: the version of events in which others' acceptance, and decisions, counted.
EVENTS_SEEN = "events_seen"
# The detail of such a record.
DETAIL = f"header {ORIGIN_OFFSET} names a record of the main topic that no slice has decided yet"
# Whether a row is such a record.
EARLY = "named_early"
_SPAN = "in_slice STRING, in_generation INT, in_partition INT, from_offset BIGINT, to_offset BIGINT"


def _load_undecided(work: Work, seen: Mapping[str, int]) -> Undecided | None:
    """Origins that were not decided in the state that a decision saw; None where an older Highwater recorded no state.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    where = (work.stream.name, work.stream.topic)
    generations, losses = work.ledger.topics.list_generations(*where), work.ledger.list_losses(*where)
    known, lost = generations[: seen.get(GENERATIONS_SEEN, 0)], losses[: seen.get(LOSSES_SEEN, 0)]
    if not known:
        return None
    planned = Planned.from_generation(known[-1], _load_last_slice(work, known, generations), lost)
    # If the lake lost a slice in one of the tables, the other one shows it.
    decided = _load_slice_keys(work, "events", seen[EVENTS_SEEN]) | _load_slice_keys(work, "dlq", seen[DLQ_SEEN])
    keys = [key for topic_id in {one.topic_id for one in known} for key in work.ledger.read_attempts(*where, topic_id)]
    waiting = work.ledger.get([key for key in keys if key not in decided])
    return build_undecided(planned, waiting, lost, _load_copied_ends(work))


def _load_last_slice(work: Work, known: Sequence[Generation], generations: Sequence[Generation]) -> Slice | None:
    """The last slice of the newest generation that was known."""
    where = (work.stream.name, work.stream.topic)
    if len(known) == len(generations):
        return work.ledger.read_last_slice(*where)
    planned = reversed(work.ledger.list_slices(*where))
    return next((slice_ for slice_ in planned if slice_.generation == known[-1].number), None)


def _load_slice_keys(work: Work, table: str, version: int) -> set[str]:
    return set() if version < 0 else read_slice_keys(work.lake.open_existing_table(work.stream.name, table, version))


def _load_copied_ends(work: Work) -> dict[int, int]:
    """The main topic's ends when a lost lake was restarted."""
    table = work.lake.open_stream_table(work.stream.name, dlq_copies.TABLE)
    ends = json.loads(table.metadata().description or "{}") if table is not None else {}
    return {int(partition): end for partition, end in ends.get(work.stream.topic, {}).items()}


def with_early(
    work: Work,
    rows: DataFrame,
    named: Mapping[str, Column],
    tiers: Sequence[Slice],
    seen: Mapping[str, Mapping[str, int]],
    sent: Sequence[str],
) -> DataFrame:
    """Rows of tiers with `EARLY`.

    A record that was parked as early stays parked when its slice is reprocessed: by then the origin is decided, and the
    record would have two ends.

    Args:
        work: the connections.
        rows: raw rows.
        named: the columns of the origin that an envelope names.
        tiers: the slices of tiers among those that the rows are of.
        seen: for each of them what its decision rests on.
        sent: the slices with published records.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    from pyspark.sql import functions as F

    looked = {slice_.key: _load_undecided(work, seen[slice_.key]) for slice_ in tiers}
    undecided_of = {key: found for key, found in looked.items() if found is not None}
    topic, generation, partition, offset = named.values()
    spans = [(key, *span) for key, found in undecided_of.items() for span in found.spans]
    inside = (
        (F.col("slice") == F.col("in_slice"))
        & (generation == F.col("in_generation"))
        & (partition == F.col("in_partition"))
        & (offset >= F.col("from_offset"))
        & (F.col("to_offset").isNull() | (offset < F.col("to_offset")))
    )
    frame = work.spark.createDataFrame(spans, _SPAN)
    rows_with_place = rows.join(F.broadcast(frame), inside, "left")
    beyond = [F.when(F.col("slice") == key, _is_beyond_plan(found, named)) for key, found in undecided_of.items()]
    none = F.lit(False)
    early = (topic == work.stream.topic) & (F.col("in_slice").isNotNull() | F.coalesce(*beyond, none))
    return _with_early_in_slice(
        work, rows_with_place.withColumn(EARLY, F.coalesce(early, none)).drop(*frame.columns), sent
    )


def _is_beyond_plan(found: Undecided, named: Mapping[str, Column]) -> Column:
    """Whether an origin is of no generation and no partition that is known."""
    _, generation, partition, _ = named.values()
    unplanned = (generation == found.newest) & ~partition.isin(sorted(found.partitions))
    return (generation > found.newest) | unplanned


def _with_early_in_slice(work: Work, rows: DataFrame, sent: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    if not sent:
        return rows
    dlq = work.spark.read.format("delta").load(work.lake.build_table_path(work.stream.name, "dlq"))
    early_rejects = dlq.where(slice_is_one_of(sent)).where(F.col("detail") == DETAIL)
    # Such a record is rejected under its own place.
    places = early_rejects.select(
        F.col("slice").alias("in_slice"),
        F.col("origin_partition").alias("in_partition"),
        F.col("origin_offset").alias("in_offset"),
    ).distinct()
    same = (
        (F.col("slice") == F.col("in_slice"))
        & (F.col("partition") == F.col("in_partition"))
        & (F.col("offset") == F.col("in_offset"))
    )
    rows_with_place = rows.join(places, same, "left")
    return rows_with_place.withColumn(EARLY, F.col(EARLY) | F.col("in_slice").isNotNull()).drop(*places.columns)
