"""(m), (n): reading `events` and `current` as an analyst does, beside the same rows in a plain Delta table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bench.harness import Result, Row, Target, alternate, measure_seconds
from bench.world import BEGIN, Bed, World, fill_topic
from highwater.assets import current, events
from highwater.assets.current_rebuild import rebuild
from highwater.commit_records import CommitRecord, to_user_metadata, with_slice_commit
from highwater.orchestration.operations.maintenance import maintain
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.spark_tables import create_table
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    import duckdb

TOPIC = "bench-m"
EVENTS_PER_SLICE = 100_000
SMALL_SLICES = 10_000
QUESTIONS = {
    "count": "SELECT count(*) FROM {table}",
    "group by": "SELECT status, count(*), sum(amount), max(version) FROM {table} GROUP BY status",
}
Ask = Callable[[str], object]


def compare_table_reads(world: World, rounds: int, records: int) -> Result:
    """(m) Count and group by over `events` and `current`, against the same rows in a plain Delta table."""
    bed = world.fresh(fill_topic(world, TOPIC, 1))
    _fill(world, bed, records, max(1, records // EVENTS_PER_SLICE))
    _write_peer(world, bed)
    rows = _rows(world, bed, rounds)
    bed.remove()
    return Result(
        name="m",
        title="Reading events and current",
        method=(
            f"{records:,} keys with one event each, in slices of {EVENTS_PER_SLICE:,}, a file each; one rebuild "
            "wrote `current`. The peer is one Delta table of these rows; the share is of its speed."
        ),
        rows=rows,
        targets=_list_targets(rows, 0.9),
    )


def compare_reads_of_small_slices(world: World, rounds: int, records: int) -> Result:
    """(n) The same after many small slices and one maintenance."""
    bed = world.fresh(fill_topic(world, f"{TOPIC}-small", 1))
    _fill(world, bed, records, SMALL_SLICES)
    [events_] = [
        one for one in maintain(world.work(bed, []), None, BEGIN, dry_run=False).tables if one.table == events.TABLE
    ]
    _write_peer(world, bed)
    rows = _rows(world, bed, rounds)
    bed.remove()
    return Result(
        name="n",
        title="Reading after many small slices and one maintenance",
        method=(
            f"As (m), with {records:,} events in {SMALL_SLICES:,} slices. One maintenance first merged "
            f"{events_.before.files:,} files of events into {events_.after.files:,}; the peer is written after it."
        ),
        rows=rows,
        targets=_list_targets(rows, 0.8),
    )


def _rows(world: World, bed: Bed, rounds: int) -> list[Row]:
    return [
        _build_row(bed, table, reader, ask, question, rounds)
        for table in (events.TABLE, current.TABLE)
        for reader, ask in _list_readers(world).items()
        for question in QUESTIONS
    ]


def _list_targets(rows: Sequence[Row], wanted: float) -> list[Target]:
    return [Target("share", row.ratio("Highwater", "plain table"), wanted, case=row.case) for row in rows]


def _list_readers(world: World) -> Mapping[str, Ask]:
    database = _open_duckdb()
    return {
        "Spark": lambda sql: world.spark.sql(sql).collect(),
        "DuckDB": lambda sql: database.execute(sql).fetchall(),
    }


def _open_duckdb() -> duckdb.DuckDBPyConnection:
    import duckdb
    import duckdb_extension_delta

    database = duckdb.connect()
    [folder] = duckdb_extension_delta.__path__
    database.execute(f"LOAD '{folder}/extensions/v{duckdb.__version__}/delta.duckdb_extension'")
    return database


def _build_row(bed: Bed, table: str, reader: str, ask: Ask, question: str, rounds: int) -> Row:
    paths = {
        "Highwater": bed.lake.build_table_path(bed.stream.name, table),
        "plain table": bed.lake.build_table_path("peer", table),
    }
    form = "delta.`{}`" if reader == "Spark" else "delta_scan('{}')"

    def timed_query(path: str) -> Callable[[int], float]:
        sql = QUESTIONS[question].format(table=form.format(path))
        return lambda _: measure_seconds(lambda: ask(sql))

    variants = {name: timed_query(path) for name, path in paths.items()}
    return alternate(f"{question} of {table}, {reader}", variants, rounds)


def _fill(world: World, bed: Bed, keys: int, slices: int) -> None:
    """Events in slices of a file each, and `current` built from them."""
    share = keys // slices
    some_slices = [
        Slice(bed.stream.name, TOPIC, "bench", 0, n, {0: OffsetRange(n * share, (n + 1) * share)}, BEGIN)
        for n in range(slices)
    ]
    bed.ledger.add(some_slices)
    path = bed.lake.build_table_path(bed.stream.name, events.TABLE)
    create_table(world.spark, path, events.build_sql_columns(bed.stream), events.STATISTICS_COLUMNS)
    rows = world.spark.range(share * slices).selectExpr(
        f"concat('{TOPIC}@', lpad(CAST(id DIV {share} AS STRING), 7, '0')) AS slice",
        f"'{TOPIC}' AS origin_topic", "0 AS origin_generation", "0 AS origin_partition", "id AS origin_offset",
        "timestamp'2026-01-01' AS origin_timestamp", "1767225600000 AS origin_timestamp_ms", "1 AS attempt",
        "0 AS retries", "0 AS reclaims", "concat('o', id) AS key", "1 AS version",
        "timestamp_seconds(1767225600 + id) AS event_time", "concat('o', id) AS order_id",
        "element_at(array('placed', 'paid', 'refunded'), CAST(id % 3 AS INT) + 1) AS status",
        "concat('c', id % 1000) AS customer_id", "CAST(id % 10000 / 100 AS DECIMAL(12,2)) AS amount",
    )  # fmt: skip
    base = CommitRecord("", 0, None, "planted")
    records = [with_slice_commit(base, SliceCommit(slice_, 1, share, {"events": share})) for slice_ in some_slices]
    options = {"userMetadata": to_user_metadata(records, 0)}
    # In ranges of offsets a slice is in one file, or in two where a range ends inside of it.
    rows.repartitionByRange(slices, "origin_offset").write.format("delta").mode("append").options(**options).save(path)
    add_missing_records(bed.lake.open_existing_table(bed.stream.name, events.TABLE))
    rebuild(world.work(bed, []))


def _write_peer(world: World, bed: Bed) -> None:
    """The rows as they lie now, in plain tables."""
    for table in (events.TABLE, current.TABLE):
        there = world.spark.read.format("delta").load(bed.lake.build_table_path(bed.stream.name, table))
        there.write.format("delta").save(bed.lake.build_table_path("peer", table))
