"""Copies of rejects in the DLQ topics before a lake was lost, so that nothing is published twice (I7)."""

# A record of the main topic was published if there is any copy of its origin. A record of another topic was published
# if a slice of this topic sent a copy that counts more attempts. On a tier the copy must also be younger: a redriven
# record may count its attempts from 1 again, beside the copies of its first way. For a reclaimed origin the copies with
# the highest number count (`highwater.reclaims`).

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.assets.reclaims import NUMBER
from highwater.envelope import MAX_COUNT, ORIGIN, ORIGIN_TYPES
from highwater.resources.delta_rs_writes import rewrite_table
from highwater.resources.spark_tables import read_table_version

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.resources.lake import Lake
    from highwater.slices import Slice

TABLE = "dlq_copies"
# When the copy came to its topic; null of a record that has none.
COPIED_AT = "copied_at"
# Where a record lies: the identity of a row of raw.
_PLACE = ("topic", "generation", "partition", "offset")
# By topic and partition the offsets before which records may have a copy.
Ends = Mapping[str, Mapping[int, int]]


def build_schema() -> pa.Schema:
    """The table's columns."""
    import pyarrow as pa

    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [
            *ORIGIN_TYPES,
            ("origin_ms", pa.int64()),
            ("attempt", pa.int32()),
            (NUMBER, pa.int32()),
            ("reason", pa.string()),
            ("rule", pa.string()),
            ("detail", pa.string()),
            ("next_topic", pa.string()),
            ("first_failed_at", time),
            ("sent_by", pa.string()),
            (COPIED_AT, time),
        ]
    )


def write(lake: Lake, stream: str, batches: Iterable[Sequence[Mapping[str, Any]]], ends: Ends) -> None:
    """Write the table again, batch by batch; one that was written in part is begun again.

    Args:
        lake: the tables.
        stream: the stream's name.
        batches: rows; one batch is held at a time.
        ends: end offsets of the main topic and of the topics that were read; later records have no copy.

    Raises:
        DependencyUnavailableError: the storage is unavailable.
    """
    rewrite_table(lake.build_table_path(stream, TABLE), build_schema(), batches, json.dumps(ends))


def may_have_copies(slices: Sequence[Slice], ends: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether copies may exist for some offsets of a slice."""
    return any(
        len(offsets) and offsets.start < ends.get(slice_.topic, {}).get(str(partition), 0)
        for slice_ in slices
        for partition, offsets in slice_.ranges.items()
    )


def with_copies(work: Work, rows: DataFrame, slices: Sequence[Slice], held: Sequence[str]) -> DataFrame:
    """Rows with what was published of them before the lake was rebuilt, where the columns `held_...` have nothing.

    Args:
        work: the connections.
        rows: raw rows with their origins and the columns `held_...`, and `COPIED_AT` that is null.
        slices: the slices that the rows are of.
        held: the names after `held_`.
    """
    from pyspark.sql import functions as F

    table = work.lake.open_stream_table(work.stream.name, TABLE)
    if table is None or not may_have_copies(slices, json.loads(table.metadata().description or "{}")):
        return rows
    joined = rows.join(_select_first_copies(work, rows, held, table.version()), [*_PLACE], "left")
    unknown = F.col("held_reason").isNull()
    # All of them or none: the rule of one publication must not join the reason of another.
    filled = {f"held_{n}": F.when(unknown, F.col(f"copy.{n}")).otherwise(F.col(f"held_{n}")) for n in held}
    copied_at = F.when(unknown, F.col(f"copy.{COPIED_AT}"))
    filled[NUMBER] = F.when(copied_at.isNotNull(), F.col(f"copy.{NUMBER}")).otherwise(F.col(NUMBER))
    return joined.withColumns({**filled, COPIED_AT: copied_at}).drop("copy")


def _select_first_copies(work: Work, rows: DataFrame, held: Sequence[str], version: int) -> DataFrame:
    """By place the copy that a record's own rejection became: of several the first."""
    from pyspark.sql import functions as F

    copies = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, TABLE), version).alias("c")
    records = rows.select(*_PLACE, *ORIGIN, "origin_timestamp_ms", "timestamp_ms", "retries", NUMBER).alias("r")
    main, topic = F.col("r.topic") == work.stream.topic, F.col("r.topic")
    theirs = topic.isin(*work.stream.foreign_topics) if work.stream.foreign_topics else F.lit(False)
    numbers = F.col(f"c.{NUMBER}"), F.col(f"r.{NUMBER}")
    following = F.least(F.col("r.retries") + 1, F.lit(MAX_COUNT))
    next_try = (F.col("c.attempt") == following) & (F.col("c.sent_by") == topic)
    # The clock of another system's topic is nobody's; that of a tier is the broker's.
    younger = theirs | (F.unix_millis(f"c.{COPIED_AT}") > F.col("r.timestamp_ms"))
    since = (main & (numbers[0] >= numbers[1])) | (next_try & younger & (numbers[0] == numbers[1]))
    same = F.col("r.origin_timestamp_ms") == F.col("c.origin_ms")
    for name in ORIGIN:
        same = same & (F.col(f"r.{name}") == F.col(f"c.{name}"))
    found = records.join(copies, same & since)
    copy = F.struct(*[F.col(f"c.{name}") for name in (*held, NUMBER, COPIED_AT)])
    first = F.min_by(copy, F.struct(-numbers[0], "c.attempt", f"c.{COPIED_AT}")).alias("copy")
    return found.groupBy(*[F.col(f"r.{name}") for name in _PLACE]).agg(first)
