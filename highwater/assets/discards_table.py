"""The table `discards`: discarded parked records, synchronised between ledger and lake, and their copies in Spark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.envelope import ORIGIN, Origin
from highwater.erasing import to_microseconds
from highwater.plans import Discard
from highwater.resources.delta import query

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

# The ledger decides, and the table follows it before a decision of retries rests on it. So no commit ever rests on a
# discard that the table lacks, wherever a process dies. Rows are only added.

# A record that was sent back from the parked topic may be discarded before its retry is decided. From then on its end
# is that: the copy counts no more, as one of a record that was reclaimed.

TABLE = "discards"
# A copy of a record that was discarded.
DISCARDED = "discarded"
# In the commit of a tier's slice: until when it saw what was discarded, in microseconds since 1970. Without it
# nothing was.
SEEN = "discards_seen"


def build_schema() -> pa.Schema:
    """The table's columns: those of the ledger's table of the same name."""
    import pyarrow as pa

    return pa.schema(
        [
            *zip(ORIGIN, (pa.string(), pa.int32(), pa.int32(), pa.int64()), strict=True),
            ("reason", pa.string()),
            ("discarded_by", pa.string()),
            ("discarded_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def sync_with_ledger(ledger: Ledger, lake: Lake, stream: str) -> int:
    """Add to ledger and table the discards that only the other has; returns the number of rows added to the table.

    A ledger lacks discards after it was rebuilt, or restored from a backup.

    Raises:
        SupersededAttemptError: others added to the table again and again.
        DependencyUnavailableError: the ledger or the storage is unavailable.
    """
    if _read_stored_state(lake, stream) == ledger.discards.count_and_last(stream):
        return 0  # both only grow: so a million of them are not read for each slice

    def find_missing(table: DeltaTable | None) -> pa.Table:
        import pyarrow as pa

        there = _read(table)
        ledger.discards.add(stream, there)
        held = {one.origin for one in there}
        rows = [_build_row(one) for one in ledger.discards.list_for_stream(stream) if one.origin not in held]
        return pa.Table.from_pylist(rows, build_schema())

    return lake.append_missing(stream, TABLE, find_missing)


def read(lake: Lake, stream: str) -> list[Discard]:
    """The rows of the table, oldest first.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    return _read(lake.open_stream_table(stream, TABLE))


def _read(table: DeltaTable | None) -> list[Discard]:
    rows = [] if table is None else query(table, "SELECT * FROM t ORDER BY discarded_at")
    found = [
        Discard(Origin.from_row(row), *(row[name] for name in ("reason", "discarded_by", "discarded_at")))
        for row in rows
    ]
    return [*{one.origin: one for one in reversed(found)}.values()][::-1]


def _read_stored_state(lake: Lake, stream: str) -> tuple[int, datetime | None]:
    table = lake.open_stream_table(stream, TABLE)
    if table is None:
        return 0, None
    [row] = query(table, "SELECT count(*) AS many, max(discarded_at) AS last FROM t")
    return row["many"], row["last"]


def _build_row(discard: Discard) -> dict[str, object]:
    details = {"reason": discard.reason, "discarded_by": discard.discarded_by, "discarded_at": discard.discarded_at}
    return {**dict(zip(ORIGIN, discard.origin, strict=True)), **details}


def read_current_state(work: Work) -> dict[str, int]:
    """The time of the last discard, as a decision keeps it; from here on a ledger that is rebuilt knows it too."""
    sync_with_ledger(work.ledger, work.lake, work.stream.name)
    last = work.ledger.discards.read_last_discard_time(work.stream.name)
    return {} if last is None else {SEEN: to_microseconds(last)}


def with_discarded(
    work: Work, rows: DataFrame, tiers: Sequence[Slice], seen: Mapping[str, Mapping[str, int]]
) -> DataFrame:
    """Rows with `DISCARDED` where a record is.

    Args:
        work: the connections.
        rows: raw rows with their origins, and `DISCARDED` that is false.
        tiers: the slices of tiers among those that the rows are of.
        seen: for each of them what its decision rests on.

    Raises:
        DependencyUnavailableError: the ledger could not be read.
    """
    from pyspark.sql import functions as F

    moments = {slice_.key: seen[slice_.key][SEEN] for slice_ in tiers if SEEN in seen[slice_.key]}
    found = _list_discarded_origins(work, rows, moments) if moments else []
    if not found:
        return rows
    names = ", ".join(f"{name} {kind}" for name, kind in zip(ORIGIN, ("STRING", "INT", "INT", "BIGINT"), strict=True))
    frame = work.spark.createDataFrame(found, f"slice STRING, {names}").withColumn(DISCARDED, F.lit(True))
    joined = rows.drop(DISCARDED).join(frame, ["slice", *ORIGIN], "left")
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
