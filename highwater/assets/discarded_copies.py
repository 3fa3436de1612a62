"""Discards in Spark: copies of records that a person discarded, and that were still under way."""

# A record that was sent back from the parked topic may be discarded before its retry is decided. From then on its end
# is that: the copy counts no more, as one of a record that was reclaimed.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.assets import discards_table
from highwater.envelope import ORIGIN, Origin
from highwater.erasing import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.slices import Slice

# A copy of a record that was discarded.
DISCARDED = "discarded"
# In the commit of a tier's slice: until when it saw what was discarded, in microseconds since 1970. Without it
# nothing was.
SEEN = "discards_seen"


def read_current_state(work: Work) -> dict[str, int]:
    """The time of the last discard, as a decision keeps it; from here on a ledger that is rebuilt knows it too."""
    discards_table.sync_with_ledger(work.ledger, work.lake, work.stream.name)
    last = work.ledger.discards.read_last_discard_time(work.stream.name)
    return {} if last is None else {SEEN: to_microseconds(last)}


def with_discarded(
    work: Work, rows: DataFrame, tiers: Sequence[Slice], seen: Mapping[str, Mapping[str, int]]
) -> DataFrame:
    """Rows with their origins get the column `DISCARDED`.

    Args:
        work: the connections.
        rows: raw rows with their origins.
        tiers: the slices of tiers among those that the rows are of.
        seen: for each of them what its decision rests on.

    Raises:
        DependencyUnavailableError: the ledger could not be read.
    """
    from pyspark.sql import functions as F

    moments = {slice_.key: seen[slice_.key][SEEN] for slice_ in tiers if SEEN in seen[slice_.key]}
    found = _list_discarded_origins(work, rows, moments) if moments else []
    if not found:
        return rows.withColumn(DISCARDED, F.lit(False))
    names = ", ".join(f"{name} {kind}" for name, kind in zip(ORIGIN, ("STRING", "INT", "INT", "BIGINT"), strict=True))
    frame = work.spark.createDataFrame(found, f"slice STRING, {names}").withColumn(DISCARDED, F.lit(True))
    joined = rows.join(frame, ["slice", *ORIGIN], "left")
    return joined.withColumn(DISCARDED, F.coalesce(DISCARDED, F.lit(False)))


def _list_discarded_origins(work: Work, rows: DataFrame, moments: Mapping[str, int]) -> list[tuple[str | int, ...]]:
    """For each slice the origins that were discarded by then, and that it may hold."""
    from pyspark.sql import functions as F

    *where, offset = ORIGIN
    spans = (
        rows.where(F.col("slice").isin(list(moments)))
        .groupBy("slice", *where)
        .agg(F.min(offset).alias("first"), F.max(offset).alias("last"))
        .collect()
    )
    if not spans:
        return []
    ends = min(span["first"] for span in spans), max(span["last"] for span in spans)
    known: dict[tuple[str, int, int], list[tuple[Origin, datetime]]] = defaultdict(list)
    for one in work.ledger.discards.list_for_stream(work.stream.name, within=ends):
        known[one.origin[:3]].append((one.origin, one.discarded_at))
    return [
        (span["slice"], *origin)
        for span in spans
        for origin, moment in known[span["origin_topic"], span["origin_generation"], span["origin_partition"]]
        if span["first"] <= origin.offset <= span["last"] and to_microseconds(moment) <= moments[span["slice"]]
    ]
