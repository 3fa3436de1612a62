"""Plain tables (I17): DuckDB, polars, delta-rs and Spark give the right counts without a filter or a view."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING

import duckdb
import duckdb_extension_delta
import polars as pl
import pytest
from deltalake import DeltaTable

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import current, events, metrics, origins, published, raw, rejects
from highwater.declaration import Accepted, Deletes
from highwater.orchestration.operations.erasing import ErasureRequest, erase_key
from highwater.orchestration.operations.maintenance import maintain
from highwater.orchestration.reporting.audit import audit
from highwater.resources.delta import query
from highwater.resources.table_maintenance import list_files
from tests.helpers.bench_records import abort_transaction
from tests.helpers.support import Bench, Message, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Reader = Callable[[str], dict[str, int]]
Counter = Callable[[str], int]


def from_duckdb(path: str) -> dict[str, int]:
    connection, count = connected(), count_in_duckdb(path)
    found = dict(connection.execute(f"SELECT key, version FROM delta_scan('{path}')").fetchall())
    assert count == len(found)
    return found


def count_in_duckdb(path: str) -> int:
    [count] = connected().execute(f"SELECT count(*) FROM delta_scan('{path}')").fetchone() or []
    return int(count)


@cache
def connected() -> duckdb.DuckDBPyConnection:
    """One connection for all reads: to load the extension takes longer than a read."""
    connection = duckdb.connect()
    connection.execute(f"LOAD '{delta_extension()}'")
    return connection


def delta_extension() -> str:
    """DuckDB's extension for Delta, which it would otherwise download."""
    [folder] = duckdb_extension_delta.__path__
    return f"{folder}/extensions/v{duckdb.__version__}/delta.duckdb_extension"


def from_polars(path: str) -> dict[str, int]:
    found = dict(pl.scan_delta(path).select("key", "version").collect().rows())
    assert count_in_polars(path) == len(found)
    return found


def count_in_polars(path: str) -> int:
    [count] = pl.scan_delta(path).select(pl.len()).collect().row(0)
    return int(count)


def from_delta_rs(path: str) -> dict[str, int]:
    found = {one["key"]: one["version"] for one in query(DeltaTable(path), "SELECT key, version FROM t")}
    assert count_in_delta_rs(path) == len(found)
    return found


def count_in_delta_rs(path: str) -> int:
    table = DeltaTable(path)
    [row] = query(table, "SELECT count(*) AS n FROM t")
    assert row["n"] == table.to_pyarrow_table().num_rows
    return int(row["n"])


@pytest.fixture
def counters(spark: SparkSession) -> dict[str, Counter]:
    def count_in_spark(path: str) -> int:
        [row] = spark.sql(f"SELECT count(*) AS n FROM delta.`{path}`").collect()
        return int(row["n"])

    return {
        "DuckDB": count_in_duckdb,
        "polars": count_in_polars,
        "delta-rs": count_in_delta_rs,
        "Spark": count_in_spark,
    }


@pytest.fixture
def readers(spark: SparkSession, counters: dict[str, Counter]) -> dict[str, Reader]:
    def from_spark(path: str) -> dict[str, int]:
        found = {one["key"]: one["version"] for one in spark.sql(f"SELECT key, version FROM delta.`{path}`").collect()}
        assert counters["Spark"](path) == len(found)
        return found

    return {"DuckDB": from_duckdb, "polars": from_polars, "delta-rs": from_delta_rs, "Spark": from_spark}


def messages(sent: list[tuple[str, int]]) -> list[Message]:
    return [order_message(key, version) for key, version in sent]


@pytest.mark.slow
def test_every_reader_counts_one_row_per_key_of_current(bench: Bench, readers: dict[str, Reader]) -> None:
    """A count once had several rows per key and one row per slice beside them."""
    # Long values: parquet-java drops the count of nulls of a column with a value above 2,048 bytes.
    keys = [f"o{n}" for n in range(40)] + ["k" * 3000]
    sent = [(key, version) for version in (1, 3, 2) for key in keys if version == 1 or key != "o7"]
    bench.send(*messages(sent))
    bounds = [0, 10, 11, 60, len(sent)]
    slices = [bench.plan(n, p0=(start, end)) for n, (start, end) in enumerate(itertools.pairwise(bounds))]

    def expected(read: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for key, version in sent[:read]:
            found[key] = max(version, found.get(key, 0))
        return found

    path = bench.work().lake.build_table_path(bench.stream.name, current.TABLE)
    for slice_, read in zip(slices, bounds[1:], strict=False):
        bench.materialise(slice_)
        assert {name: read_table(path) for name, read_table in readers.items()} == dict.fromkeys(
            readers, expected(read)
        )
    bench.materialise(slices[1], slices[2])  # a second time
    assert {name: read_table(path) for name, read_table in readers.items()} == dict.fromkeys(
        readers, expected(len(sent))
    )


# What a record ends as, apart from the pipeline: an event with its key and version, a reject or a tombstone.
REJECT, TOMBSTONE = "reject", "tombstone"
End = tuple[str, int] | str
LONG = "k" * 3000
RECORDS: list[tuple[Message, End]] = [
    (order_message("o1", 1), ("o1", 1)),
    (order_message("o2", 1), ("o2", 1)),
    (Message(b"o3", b"no JSON"), REJECT),
    (order_message("o1", 2), ("o1", 2)),
    (order_message("o4", 1, customer_id="unknown"), REJECT),
    (Message(b"o2", None), TOMBSTONE),
    (order_message("o1", 1), ("o1", 1)),  # a second delivery
    (order_message(LONG, 1), (LONG, 1)),
    (order_message("o2", 4, status="lost"), REJECT),
]
# For each slice where it ends, and the records up to there: one has only a tombstone, one only an aborted transaction.
ABORTED = 8
SLICES = [(3, 3), (5, 5), (6, 6), (ABORTED, 8), (ABORTED + 2, 8), (ABORTED + 3, 9)]


def expected_counts(read: int) -> dict[str, int]:
    """The rows of each table after the first records."""
    ends = [end for _, end in RECORDS[:read]]
    accepted = [end for end in ends if isinstance(end, tuple)]
    refused = ends.count(REJECT)
    return {
        raw.TABLE: len(ends),
        events.TABLE: len(accepted),
        rejects.TABLE: refused,
        origins.DLQ: refused,
        current.TABLE: len({key for key, _ in accepted}),
        # An order has its event time from its version: one minute for each version.
        metrics.TABLE: len({version for _, version in accepted}),
        published.TABLE: len(accepted),
    }


@pytest.mark.slow
def test_every_reader_counts_the_records_of_every_table(bench: Bench, counters: dict[str, Counter]) -> None:
    """A plain count once included one row of bookkeeping for each slice."""
    target = f"{bench.stream.topic}.accepted"
    bench.stream = replace(bench.stream, metrics=ORDERS.metrics, publishes=Accepted(target))
    sent = [message for message, _ in RECORDS]
    bench.send(*sent[:ABORTED])
    abort_transaction(bench, partition=0)
    bench.send(*sent[ABORTED:])
    bounds = itertools.pairwise([0, *[end for end, _ in SLICES]])
    slices = [bench.plan(n, p0=span) for n, span in enumerate(bounds)]

    def counts() -> dict[str, dict[str, int]]:
        return {
            name: {table: count(bench.lake.build_table_path(bench.stream.name, table)) for table in expected_counts(0)}
            for name, count in counters.items()
        }

    for slice_, (_, read) in zip(slices, SLICES, strict=True):
        bench.materialise(slice_)
        published.materialise(bench.work(slice_))
        assert counts() == dict.fromkeys(counters, expected_counts(read))
    bench.materialise(*slices[:2])  # a second time
    published.materialise(bench.work(*slices[:2]))
    assert counts() == dict.fromkeys(counters, expected_counts(len(RECORDS)))
    assert bench.failing() == {}


# Slices of a stream with deletes: an order that is canceled goes from `current`, and its events stay.
MERGED: list[list[Message]] = [
    [order_message("o1", 1), order_message("o2", 1), Message(b"o3", b"no JSON")],
    [order_message("o1", 2), order_message("o4", 1, customer_id="unknown"), Message(b"o1", b"nor this")],
    [order_message("o2", 2, status="canceled"), Message(b"o3", None), order_message("o5", 1)],
    [order_message("o1", 1), order_message("o5", 2), order_message("o6", 1)],
]
# What each table holds, and what is left of it without the key o1.
WHOLE = {"raw": 12, "events": 8, "rejects": 3, "dlq": 3, "current": 3, "metrics": 2}
ERASED = {"raw": 8, "events": 5, "rejects": 2, "dlq": 2, "current": 2, "metrics": 2}


@pytest.mark.slow
def test_every_reader_counts_every_table_after_maintenance_and_after_an_erasure_from_merged_files(
    bench: Bench, counters: dict[str, Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the key lie in files with rows of all slices, which are written again without it."""
    monkeypatch.setattr("highwater.maintenance.FEWEST_FILES", 2)
    bench.stream = replace(bench.stream, metrics=ORDERS.metrics, deletes=Deletes("status", ("canceled",)))
    bench.send(*itertools.chain(*MERGED))
    slices = [bench.plan(n, p0=(3 * n, 3 * n + 3)) for n in range(4)]
    bench.materialise(*slices[:2])
    bench.materialise(*slices[2:])

    def count() -> dict[str, dict[str, int]]:
        paths = {table: bench.lake.build_table_path(bench.stream.name, table) for table in WHOLE}
        return {name: {table: read(path) for table, path in paths.items()} for name, read in counters.items()}

    def list_places() -> dict[str, list[tuple[int, int]]]:
        """Slice and offset of each row."""
        names = {
            table: "offset" if table == "raw" else "origin_offset" for table in ("raw", "events", "rejects", "dlq")
        }
        return {
            table: sorted((int(row["slice"][-7:]), row[name]) for row in bench.rows(table))
            for table, name in names.items()
        }

    gone = {(n, 3 * n + at) for n, sent in enumerate(MERGED) for at, one in enumerate(sent) if one.key == b"o1"}
    others = {table: [place for place in places if place not in gone] for table, places in list_places().items()}
    maintain(bench.work(), None, datetime.now(UTC), dry_run=False)
    for table in ("raw", "events", "rejects", "dlq"):
        [merged] = list_files(DeltaTable(bench.lake.build_table_path(bench.stream.name, table)))
        assert merged.first < merged.last
    assert count() == dict.fromkeys(counters, WHOLE)

    asked = ErasureRequest(hashlib.sha256(b"o1").hexdigest(), dry_run=False, by="somebody", because="asked for")
    found = erase_key(bench.work(), None, asked, datetime.now(UTC))
    assert {*found.done} == {slices[n].key for n in (0, 1, 3)}
    assert count() == dict.fromkeys(counters, ERASED)
    assert list_places() == others
    assert {key: row["version"] for key, row in bench.current().items()} == {"o5": 2, "o6": 1}
    assert bench.failing() == {}
    page = audit(bench.ledger, bench.kafka, bench.lake, bench.stream, records_of=len(slices), versions=True)
    assert [*page.errors, *page.unfinished] == []
