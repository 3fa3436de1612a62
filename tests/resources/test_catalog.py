"""Tables under names in Spark's catalog: registered when they are created, and kept up by maintenance."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from assets.streams.orders import STREAM as ORDERS
from dev.spark_connect import SparkConnect
from highwater.assets.commit import ensure_table
from highwater.assets.work import Work
from highwater.errors import ConfigurationError
from highwater.orchestration.operations.maintenance import maintain
from highwater.resources.catalog import build_catalog_name, drop_missing, register
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.spark import close, connect, prepare
from highwater.settings import CATALOG, Settings
from tests.helpers.fake_topics import FakeNoGroups
from tests.helpers.support import FakeSilentKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = replace(ORDERS, metrics=None, publishes=None)


@pytest.mark.parametrize("text", ["lake", "unity.lake", "lake_2"])
def test_a_schema_is_named_with_or_without_its_catalog(text: str) -> None:
    assert Settings.from_environment({CATALOG: text}).catalog == text


@pytest.mark.parametrize("text", ["a.b.c", "la-ke", "lake;", "`lake`", "lake.", " "])
def test_another_text_is_no_schema(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"HIGHWATER_CATALOG names no schema"):
        Settings.from_environment({CATALOG: text})


def test_without_the_variable_nothing_is_registered() -> None:
    assert Settings.from_environment({}).catalog is None


def test_names_are_of_stream_and_table() -> None:
    assert [build_catalog_name("orders", one) for one in ("events", "_commits")] == ["orders_events", "orders_commits"]


class FakeCatalog:
    """A catalog that lists tables by name and location, and records the statements that change it."""

    def __init__(self, **locations: str) -> None:
        self.changes: list[str] = []
        self._rows = [
            {"tableName": name, "information": f"Catalog: x\nLocation: {at}\nProvider: delta\n", "isTemporary": False}
            for name, at in locations.items()
        ]

    def sql(self, text: str) -> FakeCatalog:
        if text.startswith(("DROP", "CREATE TABLE")):
            self.changes.append(text)
        return self

    def collect(self) -> list[dict[str, Any]]:
        return self._rows


def write_table(path: Path) -> str:
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(path), pa.table({"n": [1]}))
    return str(path)


def test_a_name_of_another_lake_is_left_alone(tmp_path: Path) -> None:
    """Two deployments with one schema took each other's names in turn, and queries read the other lake."""
    first, second = (write_table(tmp_path / lake / "orders" / "events") for lake in ("first", "second"))
    catalog: Any = FakeCatalog(orders_events=f"file:{first}")
    with pytest.raises(ConfigurationError, match=r"another table under the name lake\.orders_events") as caught:
        register(catalog, "lake", {"orders_events": second})
    assert (caught.value.stored, caught.value.found) == (first, second)
    assert catalog.changes == []
    assert register(catalog, "lake", {"orders_events": first}) == []
    # The lake moved.
    shutil.rmtree(tmp_path / "first")
    assert register(catalog, "lake", {"orders_events": second}) == ["orders_events"]
    assert [one.split()[0] for one in catalog.changes] == ["DROP", "CREATE"]


def test_a_location_on_s3_is_the_same_by_each_scheme() -> None:
    """Catalogs of AWS write s3://, and the table was registered again each night."""
    catalog: Any = FakeCatalog(orders_events="s3://bucket/lake/orders/events/")
    assert register(catalog, "lake", {"orders_events": "s3a://bucket/lake/orders/events"}) == []


def test_only_names_of_highwater_are_dropped(tmp_path: Path) -> None:
    """A table of another kind that a person put below the lake lost its name each night."""
    gone, other = f"{tmp_path}/orders/events", f"{tmp_path}/reference/regions"
    catalog: Any = FakeCatalog(orders_events=gone, regions=other, sales_events=gone)
    assert drop_missing(catalog, "lake", str(tmp_path)) == ["orders_events"]
    assert catalog.changes == ["DROP TABLE IF EXISTS `lake`.`orders_events`"]


class FakeSilentKafkaWithoutGroups(FakeNoGroups, FakeSilentKafka):
    """A cluster without consumer groups that answers nothing else."""


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[SparkSession]:
    """A session whose catalog is a Hive Metastore with a Derby database of its own."""
    conf = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={tmp_path}/metastore;create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
        "spark.hadoop.hive.metastore.schema.verification": "false",
    }
    with SparkConnect(tmp_path / "spark", extra=conf) as server:
        session = prepare(connect(server.remote))
        yield session
        close(session)


@pytest.mark.slow
def test_tables_are_found_by_name_whatever_becomes_of_lake_and_catalog(hive: SparkSession, tmp_path: Path) -> None:
    lake, ledger = Lake(str(tmp_path / "lake"), "lake"), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    lines: list[str] = []
    kafka: Any = FakeSilentKafkaWithoutGroups()
    work = Work(STREAM, [], hive, lake, ledger, kafka, lines.append)
    path = lake.build_table_path("orders", "events")

    def count() -> int:
        return int(hive.sql("SELECT count(*) AS n FROM lake.orders_events").collect()[0]["n"])

    ensure_table(work, "events", "slice STRING, attempt INT", ["slice"])
    assert lines == []
    assert count() == 0
    hive.sql("INSERT INTO lake.orders_events VALUES ('orders@0000000', 1)")
    described = {
        row["col_name"]: row["data_type"] for row in hive.sql("DESCRIBE TABLE EXTENDED lake.orders_events").collect()
    }
    assert described["Comment"] == "The records that were parsed, validated and resolved."
    assert (described["slice"], described["attempt"]) == ("string", "int")
    tags = {row["key"]: row["value"] for row in hive.sql("SHOW TBLPROPERTIES lake.orders_events").collect()}
    assert (tags["highwater.stream"], tags["highwater.owner"]) == ("orders", ORDERS.owner)

    # A person dropped the name: no file is lost, and maintenance brings it back, with the tables written without Spark.
    hive.sql("DROP TABLE lake.orders_events")
    assert maintain(work, None, datetime.now(UTC), dry_run=True).catalog == ""
    assert (
        maintain(work, None, datetime.now(UTC), dry_run=False).catalog
        == "registered in lake: orders_events, orders_commits"
    )
    assert count() == 1
    assert maintain(work, None, datetime.now(UTC), dry_run=False).catalog == ""

    # The lake moved.
    shutil.move(tmp_path / "lake", tmp_path / "moved")
    moved = str(tmp_path / "moved" / "orders" / "events")
    assert register(hive, "lake", {"orders_events": moved}) == ["orders_events"]
    assert count() == 1

    # The stream was renamed: the name of a table that is gone is dropped, and others are left alone.
    hive.sql("CREATE TABLE lake.orders_raw (n INT) USING parquet")
    shutil.move(tmp_path / "moved" / "orders", tmp_path / "moved" / "sales")
    assert drop_missing(hive, "lake", str(tmp_path / "moved")) == ["orders_events"]
    with pytest.raises(ConfigurationError, match=r"another table under the name lake\.orders_raw"):
        register(hive, "lake", {"orders_raw": path})
    left = [row["tableName"] for row in hive.sql("SHOW TABLES IN lake").collect()]
    assert left == ["orders_commits", "orders_raw"], "a name of another lake, which the old folder is, stays"
