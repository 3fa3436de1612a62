"""Slices over many Kafka partitions, in files that Spark wrote: readers without a JVM see what Spark sees.

The record of a commit grows with the partitions of its slice. Spark's Parquet files lack the count of nulls of a column
with values of 2,048 bytes or more. deltalake takes a missing count for zero, so a query for nulls leaves out every row
of such a file: checks and audit turned red, `locate` reported a gap, and `erase` reported success for a key that it had
not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from deltalake import DeltaTable

from highwater.assets import published
from highwater.assets.erasing import find
from highwater.envelope import Origin
from highwater.erasing import compute_digest
from highwater.errors import IncompleteReadError
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.operations import rebuilding
from highwater.orchestration.operations.parked import ParkedSelection, _load_ended_origins
from highwater.orchestration.operations.raw_retention import _load_times_and_counts, read_dlq_slices
from highwater.orchestration.operations.reclaiming import read_records_on_dlq
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import locate
from highwater.orchestration.reporting.publication_status import measure_publication_lag
from highwater.resources import delta
from highwater.resources.commit_log import TABLE as COMMITS
from highwater.resources.dlq_topics import TopicShape
from highwater.topic_rules import Setting
from tests.helpers.accepted import Event, FakeTransactionLog, Tables
from tests.helpers.fake_topics import FakeNoGroups
from tests.helpers.support import read_rows
from tests.helpers.world import COLUMNS, FIRST, World
from tests.helpers.world import FULL_STREAM as STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect

# Beside slices over one partition, which the world has. The record of a commit passes 2,048 bytes within.
WIDTHS = (19, 20, 64, 300)
OURS = "our session"


def write_by_spark(spark: SparkSession, path: str) -> None:
    """Replace the files of a table, which a test wrote without Spark, by one of Spark's for each of its partitions."""
    table = DeltaTable(path)
    rows: Any = table.to_pyarrow_table()
    frame = spark.createDataFrame(rows)
    by = table.metadata().partition_columns
    if by:
        frame.repartition(*by).write.format("delta").mode("overwrite").partitionBy(*by).save(path)
    else:
        frame.write.format("delta").mode("overwrite").save(path)


class WideWorld(World):
    """Slices of these widths, with one event for each further partition, in tables that Spark writes."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        super().__init__(folder, copies=len(WIDTHS), stream=STREAM, widths=WIDTHS)
        self.spark, self.is_written = spark, False

    def write(self) -> None:
        if self.is_written:
            return
        super().write()
        for table in (*COLUMNS, COMMITS):
            write_by_spark(self.spark, self.lake.build_table_path("orders", table))
        self.is_written = True

    def spark_counts(self, table: str) -> dict[str, int]:
        path = self.lake.build_table_path("orders", table)
        rows = self.spark.read.format("delta").load(path)
        rows = rows.withColumnRenamed("updated_by_slice", "slice") if table == "current" else rows
        found = rows.groupBy("slice").count()
        return {row["slice"]: row["count"] for row in found.collect()}


@pytest.fixture
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_checks, "fetch_topic_settings", lambda *_: {"cleanup.policy": Setting("delete", "DEFAULT")})


@pytest.fixture(params=[OURS, "another writer"])
def wide(
    request: pytest.FixtureRequest, _settings: None, spark_server: SparkConnect, spark: SparkSession, tmp_path: Path
) -> Iterator[WideWorld]:
    """Tables as we write them, and as an older version did, or somebody's OPTIMIZE."""
    from pyspark.sql import SparkSession

    from highwater.resources.spark import close

    if request.param == OURS:
        yield WideWorld(tmp_path, spark)
        return
    other = SparkSession.builder.remote(spark_server.remote).create()
    other.conf.set("spark.sql.session.timeZone", "UTC")
    yield WideWorld(tmp_path, other)
    close(other)


@pytest.mark.slow
def test_every_read_without_a_jvm_sees_what_spark_sees(wide: WideWorld, request: pytest.FixtureRequest) -> None:
    wide.write()
    for table in COLUMNS:
        seen = wide.spark_counts(table)
        assert seen == {key: len(rows) for key in wide.keys if (rows := wide.of(table, slice=key))}
        by = "updated_by_slice" if table == "current" else "slice"
        sql = f"SELECT {by} AS slice, count(*) AS n FROM t GROUP BY {by}"
        assert {
            row["slice"]: row["n"] for row in delta.query(wide.lake.open_existing_table("orders", table), sql)
        } == seen
        if wide.spark is request.getfixturevalue("spark"):
            assert len(read_rows(wide.lake.build_table_path("orders", table))) == sum(seen.values()), (
                "by the documented query"
            )

    # The checks; the first also looks up what explains gaps.
    assert wide.red() == {}
    ledger, lake, topics = wide.ledger, wide.lake, cast("Any", wide.topics)
    ends = count_ends(ledger, lake, STREAM)
    rejected, events = wide.rows["rejects"], wide.rows["events"]
    assert (ends.error, ends.produced) == (None, len([row for row in wide.rows["raw"] if row["topic"] == "orders"]))
    assert ends.accepted == len({(row["origin_partition"], row["origin_offset"]) for row in events})

    # One record, and one slice.
    places = {(row["partition"], row["offset"]) for row in wide.rows["raw"] if row["partition"] in {2, 19, 63, 299}}
    assert {place[0] for place in places} == {2, 19, 63, 299}
    for partition, offset in places:
        [reported] = locate(ledger, topics, lake, STREAM, "orders", partition, offset)
        assert (reported.end, reported.origin.partition, reported.origin.offset) == ("accepted", partition, offset)
    for one in wide.slices:
        rejects_shown = explain(ledger, lake, STREAM, one.key).rejects
        assert sum(one.records for one in rejects_shown) == len(wide.of("rejects", slice=one.key))

    # What operators reclaim, erase and let go.
    assert len(rejected) == 2 * len(WIDTHS)
    assert len(read_records_on_dlq(ledger, lake, STREAM, ParkedSelection()).meant) == len(rejected) - 1, (
        "one was accepted by its retry"
    )
    assert read_dlq_slices(ledger, lake, STREAM) >= {one.key for one in wide.copies}
    last = wide.copies[-1]
    assert _load_times_and_counts(lake.open_existing_table("orders", "raw"), wide.keys)[1] == {
        key: len(wide.of("raw", slice=key)) for key in wide.keys
    }
    found = find(lake, STREAM, compute_digest(b"o6.3.299"))
    start = last.ranges[299].start
    assert found.places == {last.key: [(299, start)]}
    assert found.rows == {last.key: {"raw": 1, "tombstones": 0, "events": 1, "current": 1}}
    assert measure_publication_lag(ledger, lake, STREAM).slices == 0


@pytest.mark.slow
def test_the_events_of_a_slice_over_many_partitions_are_published(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publication failed: it saw none of the events that the commit record of the slice counts."""
    log = FakeTransactionLog()
    monkeypatch.setattr(published, "Transactions", log)
    shape = TopicShape(300, 1, {"max.message.bytes": "1000000"})
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: shape)
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    tables = Tables(tmp_path)
    ranges: dict[str, Any] = {f"p{partition}": (0, 1) for partition in range(300)}
    one = tables.plan(0, **ranges)
    tables.decide(one, [Event(partition, 0, f"o{partition}") for partition in range(300)])
    for table in ("events", COMMITS):
        write_by_spark(spark, tables.lake.build_table_path("orders", table))
    tables.publish(one)
    assert {record.place for record in log.records} == {(partition, 0) for partition in range(300)}


# What reports absence, or does something for good because of it: each is asked while one slice is not seen.
HIDDEN: dict[str, Callable[[World], object]] = {
    "erase": lambda world: find(world.lake, STREAM, compute_digest(b"o1")),
    "locate": lambda world: locate(world.ledger, cast("Any", world.topics), world.lake, STREAM, "orders", 0, 2),
    "explain": lambda world: explain(world.ledger, world.lake, STREAM, FIRST.key),
    "reclaim": lambda world: read_records_on_dlq(world.ledger, world.lake, STREAM, ParkedSelection()),
    "retain: what is waited for": lambda world: read_dlq_slices(world.ledger, world.lake, STREAM),
    "retain: what goes": lambda world: _load_times_and_counts(
        world.lake.open_existing_table("orders", "raw"), world.keys
    ),
    "redrive and discard": lambda world: _load_ended_origins(
        world.ledger, world.lake, STREAM, [Origin("orders", 0, 0, 2)]
    ),
    "rebuild-ledger": lambda world: rebuilding.read_plans_from_lake(
        world.lake, cast("Any", FakeNoGroups()), STREAM, []
    ),
}


# With the commit record of a slice its rows were seen missing; without it other checks may be the first to notice.
REST = {"with its record": (*COLUMNS, COMMITS), "beside its record": tuple(COLUMNS)}


def hide(monkeypatch: pytest.MonkeyPatch, tables: tuple[str, ...], after: str = "") -> None:
    """Let every read of these tables without a JVM miss the rows of one slice.

    Args:
        monkeypatch: puts the reads back.
        tables: their names.
        after: what follows the table in the SQL of such a read, as a regular expression; any if empty.
    """
    ask = delta._execute_query

    def blind(read: Any, sql: str) -> Any:
        names = [name for name, table in read.items() if table.table_uri.rstrip("/").rpartition("/")[2] in tables]
        if not names:
            return ask(read, sql)
        by = "updated_by_slice" if "updated_by_slice" in sql else "slice"  # rows of current have no column slice
        hides = f"(SELECT * FROM \\1 WHERE {by} <> '{FIRST.key}')"
        return ask(read, re.sub(rf"(?<=FROM )({'|'.join(names)})\b{after}", hides, sql))

    monkeypatch.setattr(delta, "_execute_query", blind)


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("asked", HIDDEN)
def test_a_read_that_misses_rows_is_an_error_and_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, rest: str
) -> None:
    """Whatever the reason, a reader may leave out rows; the table's log and the commits count them."""
    world = World(tmp_path, stream=STREAM)
    world.write()
    HIDDEN[asked](world)
    hide(monkeypatch, REST[rest])
    with pytest.raises(IncompleteReadError):
        HIDDEN[asked](world)


# The log of `_commits` counts the records; rows of raw name the slice.
MISSED_RECORD = {
    "locate": f"/{COMMITS}/ did not return all rows",
    "explain": f"/{COMMITS}/ did not return all rows",
    "retain: what goes": f"/{COMMITS}/ did not return all rows",
    "rebuild-ledger": f"did not return .*{FIRST.key}",
}


@pytest.mark.parametrize("asked", MISSED_RECORD)
def test_a_commit_record_that_is_missed_is_an_error_and_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A read of `_commits` may leave out records: then nothing says how many rows a slice has."""
    world = World(tmp_path, stream=STREAM)
    world.write()
    hide(monkeypatch, (COMMITS,))
    with pytest.raises(IncompleteReadError, match=MISSED_RECORD[asked]):
        HIDDEN[asked](world)


@pytest.mark.parametrize("asked", ["locate", "retain: what goes"])
def test_a_read_that_misses_rows_is_compared_with_the_count_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A file may hold rows of several slices, so the table's log has no count for each of them."""
    world = World(tmp_path, stream=STREAM)
    for one in world.slices:
        world.alter_slice_commit("raw", one, rows=len(world.of("raw", slice=one.key)))
    world.write()
    HIDDEN[asked](world)
    hide(monkeypatch, ("raw",))
    with pytest.raises(IncompleteReadError, match=f"/raw/ did not return all rows of {FIRST.key}"):
        HIDDEN[asked](world)


@pytest.mark.parametrize("asked", ["locate", "retain: what goes"])
def test_rows_that_no_commit_counted_are_compared_with_a_read_of_the_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A run that died before it recorded its commit left no count; a query with a filter may miss rows all the same."""
    world = World(tmp_path, stream=STREAM)
    assert world.slice_commits["raw"][FIRST.key].rows is None
    world.write()
    HIDDEN[asked](world)
    hide(monkeypatch, ("raw",), after="(?= WHERE)")
    with pytest.raises(IncompleteReadError, match=f"/raw/ did not return all rows of {FIRST.key}"):
        HIDDEN[asked](world)


def test_a_ledger_is_not_rebuilt_without_the_record_of_a_slice_that_has_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file names such a slice; the log of `_commits` counts its record."""
    world = World(tmp_path, stream=STREAM)
    world.rows["raw"] = [row for row in world.rows["raw"] if row["slice"] != FIRST.key]
    world.write()
    HIDDEN["rebuild-ledger"](world)
    hide(monkeypatch, (COMMITS,))
    with pytest.raises(IncompleteReadError, match=f"/{COMMITS}/ did not return all rows"):
        HIDDEN["rebuild-ledger"](world)


@pytest.mark.parametrize("table", ["events", "rejects"])
def test_a_record_is_called_superseded_only_where_events_and_rejects_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """`locate` saw the record in raw and no end of it, and reported an end that it did not have."""
    world = World(tmp_path, stream=STREAM)
    world.write()
    offset = next(row["origin_offset"] for row in world.of(table, slice=FIRST.key) if row["origin_partition"] == 0)
    hide(monkeypatch, (table,))
    with pytest.raises(IncompleteReadError, match=f"/{table}/ "):
        locate(world.ledger, cast("Any", world.topics), world.lake, STREAM, "orders", 0, offset)
