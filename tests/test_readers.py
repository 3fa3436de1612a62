"""Plain tables (I17): DuckDB, polars, delta-rs and Spark give the right counts without a filter or a view."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import duckdb
import duckdb_extension_delta
import polars as pl
import pytest
from deltalake import DeltaTable

from assets import current
from resources.delta import query
from tests.support import Bench, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support import Message

Reader = Callable[[str], dict[str, int]]


def from_duckdb(path: str) -> dict[str, int]:
    connection = duckdb.connect()
    connection.execute(f"LOAD '{delta_extension()}'")
    [count] = connection.execute(f"SELECT count(*) FROM delta_scan('{path}')").fetchone() or []
    found = dict(connection.execute(f"SELECT key, version FROM delta_scan('{path}')").fetchall())
    assert count == len(found)
    return found


def delta_extension() -> str:
    """DuckDB's extension for Delta, which it would otherwise download."""
    [folder] = duckdb_extension_delta.__path__
    return f"{folder}/extensions/v{duckdb.__version__}/delta.duckdb_extension"


def from_polars(path: str) -> dict[str, int]:
    table = pl.scan_delta(path)
    [count] = table.select(pl.len()).collect().row(0)
    found = dict(table.select("key", "version").collect().rows())
    assert count == len(found)
    return found


def from_delta_rs(path: str) -> dict[str, int]:
    table = DeltaTable(path)
    [row] = query(table, "SELECT count(*) AS n FROM t")
    found = {one["key"]: one["version"] for one in query(table, "SELECT key, version FROM t")}
    assert row["n"] == len(found) == table.to_pyarrow_table().num_rows
    return found


@pytest.fixture
def readers(spark: SparkSession) -> dict[str, Reader]:
    def from_spark(path: str) -> dict[str, int]:
        [row] = spark.sql(f"SELECT count(*) AS n FROM delta.`{path}`").collect()
        found = {one["key"]: one["version"] for one in spark.sql(f"SELECT key, version FROM delta.`{path}`").collect()}
        assert row["n"] == len(found)
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

    path = bench.work().lake.path(bench.stream.name, current.TABLE)
    for piece, read in zip(slices, bounds[1:], strict=False):
        bench.materialise(piece)
        assert {name: read_table(path) for name, read_table in readers.items()} == dict.fromkeys(
            readers, expected(read)
        )
    bench.materialise(slices[1], slices[2])  # a second time
    assert {name: read_table(path) for name, read_table in readers.items()} == dict.fromkeys(
        readers, expected(len(sent))
    )
