"""Reclaims in Spark: which rows are of origins that a person reclaimed from the DLQ, and which copies count no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.envelope import ORIGIN
from highwater.reclaims import count_reclaims

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.slices import Slice

# The number of a row's origin, in every table that has origins.
NUMBER = "reclaims"
# A record that was published before its origin was reclaimed.
STALE = "stale"
# In the slice commit of a decision: how many reclaims it saw. Without it there was none.
SEEN = "reclaims_seen"
_TAKEN = "highest_reclaim"


def read_current_state(work: Work) -> dict[str, int]:
    """The number of reclaims so far, as a decision keeps it."""
    acts = work.ledger.reclaims.read_last_act_number(work.stream.name)
    return {SEEN: acts} if acts else {}


def with_reclaim_number(rows: DataFrame) -> DataFrame:
    """Rows of a table with their number: 0 in rows, and in tables, from before the column was there."""
    from pyspark.sql import functions as F

    return rows.withColumn(NUMBER, F.coalesce(NUMBER, F.lit(0)) if NUMBER in rows.columns else F.lit(0))


def with_stale(
    work: Work, rows: DataFrame, slices: Sequence[Slice], seen: Mapping[str, Mapping[str, int]]
) -> DataFrame:
    """Rows with `stale` where a record is; those of the main topic get the number of their origin.

    Args:
        work: the connections.
        rows: raw rows with their origins, `stale` that is false and, of tiers, the number that they carry.
        slices: the slices that the rows are of.
        seen: for each slice what its decision rests on.
    """
    from pyspark.sql import functions as F

    taken = [row for slice_ in slices for row in _load_reclaims(work, slice_, seen[slice_.key].get(SEEN, 0))]
    if not taken:
        return rows
    names = ", ".join(f"{name} {kind}" for name, kind in zip(ORIGIN, ("STRING", "INT", "INT", "BIGINT"), strict=True))
    frame = work.spark.createDataFrame(taken, f"slice STRING, {names}, {_TAKEN} INT")
    found = rows.join(frame, ["slice", *ORIGIN], "left").withColumn(_TAKEN, F.coalesce(_TAKEN, F.lit(0)))
    main = F.col("topic") == work.stream.topic
    marked = found.withColumn(STALE, ~main & (F.col(NUMBER) < F.col(_TAKEN)))
    return marked.withColumn(NUMBER, F.when(main, F.col(_TAKEN)).otherwise(F.col(NUMBER))).drop(_TAKEN)


def _load_reclaims(work: Work, slice_: Slice, acts: int) -> list[tuple[str | int, ...]]:
    """For each origin that was reclaimed by then, and that the slice may hold, its number."""
    if not acts:
        return []
    main = slice_.topic == work.stream.topic
    found = work.ledger.reclaims.list_for_stream(work.stream.name, acts=acts, slice_key=slice_.key if main else None)
    return [(slice_.key, *origin, number) for origin, number in count_reclaims(found).items()]
