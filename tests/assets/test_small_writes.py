"""Few rows are appended by delta-rs as Spark would append them, and what could differ is left to Spark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from highwater.assets import commit, small_writes
from highwater.assets.commit import CommittedSlices, commit_rows, measure_write_cost
from highwater.assets.small_writes import MAX_STATISTICS_BYTES
from highwater.assets.work import Work
from highwater.errors import DependencyUnavailableError
from highwater.resources import delta_rs_writes
from highwater.resources.commit_log import read_number
from highwater.resources.delta import add_actions, query, read_commit_metrics
from highwater.resources.delta_rs_writes import create
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from tests.helpers.fake_session import FakeSession
from tests.helpers.logged_commits import build_options
from tests.helpers.support import make_stream, read_rows
from tests.helpers.written_tables import a_slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC_TIME = pa.timestamp("us", "UTC")
HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
ITEMS = pa.list_(pa.struct([("id", pa.int32()), ("tags", pa.list_(pa.string())), ("price", pa.decimal128(9, 3))]))
SCHEMA = pa.schema(
    {
        "slice": pa.string(),
        "origin_offset": pa.int64(),
        "origin_timestamp": UTC_TIME,
        "version": pa.decimal128(18, 0),
        "share_of_all": pa.decimal128(38, 0),
        "value": pa.binary(),
        "headers": HEADERS,
        "items": ITEMS,
        "amount": pa.decimal128(12, 2),
        "share": pa.float64(),
        "paid": pa.bool_(),
        "day": pa.date32(),
        "at_home": pa.timestamp("us"),
    }
)
SEARCHED = ("slice", "origin_offset", "origin_timestamp", "version")
NOON = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)


def row_of(offset: int, **changes: Any) -> dict[str, Any]:
    plain = {
        "slice": a_slice(0, 10).key,
        "origin_offset": offset,
        "origin_timestamp": NOON,
        "version": Decimal(10**18 - 1),
        "share_of_all": Decimal(10**38 - 1),
        "value": b"\x00\xff",
        "headers": [{"key": "k", "value": b"\x00"}, {"key": "", "value": None}],
        "items": [
            {"id": 1, "tags": ["a", None], "price": Decimal("1.250")},
            None,
            {"id": 2, "tags": [], "price": None},
        ],
        "amount": Decimal("-0.01"),
        "share": 0.1,
        "paid": None,
        "day": date(1900, 1, 2),
        "at_home": datetime(2026, 3, 1, 13),  # noqa: DTZ001 - a local time
    }
    assert {*changes} <= {*plain}
    return plain | changes


ROWS = [
    row_of(0),
    row_of(1, headers=None, items=None, version=None, share=-0.0),
    row_of(2, headers=[], items=[], value=None, day=None),
]


class Rows:
    """A test double for rows that Spark computes."""

    def __init__(self, found: pa.Table) -> None:
        self.found, self.asked = found, 0

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        self.asked += 1
        return self.found


def build_rows(rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> Rows:
    return Rows(pa.Table.from_pylist(rows, schema))


def make_table(path: Path, schema: pa.Schema = SCHEMA, **properties: str) -> DeltaTable:
    create(str(path), schema, configuration={"delta.dataSkippingStatsColumns": ",".join(SEARCHED), **properties})
    return DeltaTable(str(path))


def append(opened: DeltaTable, rows: Rows) -> bool:
    return small_writes.append(opened, cast("Any", rows), build_options(7, "a note"))


def test_rows_are_appended_with_all_their_values_and_what_the_commit_carries(tmp_path: Path) -> None:
    opened = make_table(tmp_path / "t")
    mixed_up = pa.Table.from_pylist(ROWS, SCHEMA).select([*reversed(SCHEMA.names)])
    assert append(opened, Rows(mixed_up))
    found = DeltaTable(str(tmp_path / "t"))
    assert read_rows(str(tmp_path / "t")) == ROWS
    assert (found.version(), read_number(found), found.history(1)[0]["userMetadata"]) == (1, 7, "a note")
    actions = add_actions(found)
    assert {name.partition(".")[2] for name in actions.column_names if name.startswith("min.")} == {*SEARCHED}
    for name in SEARCHED:
        values = [row[name] for row in ROWS if row[name] is not None]
        if name == "origin_timestamp":  # by Delta's protocol in milliseconds, and a reader adds one
            values = [NOON.replace(microsecond=0)]
        for bound, expected in (("min", min(values)), ("max", max(values))):
            assert actions[f"{bound}.{name}"].to_pylist() == [expected], name
    [largest] = query(found, f"SELECT count(*) AS n FROM t WHERE version >= {10**18 - 1}")
    assert largest["n"] == 2
    metrics = read_commit_metrics(found, 1)
    written = sum(file.stat().st_size for file in (tmp_path / "t").glob("*.parquet"))
    assert (metrics["num_added_rows"], metrics["num_target_bytes_added"]) == (3, written)


def test_rows_without_a_long_value_are_found(tmp_path: Path) -> None:
    """A reader takes a file for one without nulls where the count of them is missing beside long values."""
    assert append(make_table(tmp_path / "t"), build_rows([row_of(n, value=b"a" * 5_000 * n or None) for n in range(3)]))
    found = DeltaTable(str(tmp_path / "t"))
    assert [row["origin_offset"] for row in query(found, "SELECT origin_offset FROM t WHERE value IS NULL")] == [0]


def with_a(column: str, kind: pa.DataType) -> pa.Schema:
    return pa.schema([*SCHEMA, (column, kind)])


@pytest.mark.parametrize(
    ("rows", "schema", "searched"),
    [
        pytest.param([row_of(0, day=date(1900, 1, 1))], SCHEMA, SEARCHED, id="an early day"),
        pytest.param([row_of(0, origin_timestamp=datetime(1899, 1, 1, tzinfo=UTC))], SCHEMA, SEARCHED, id="early time"),
        pytest.param([row_of(0, slice="x" * (MAX_STATISTICS_BYTES + 1))], SCHEMA, SEARCHED, id="a long text"),
        pytest.param(ROWS, SCHEMA, (*SEARCHED, "amount"), id="statistics of decimal places"),
        pytest.param(ROWS, SCHEMA, (*SEARCHED, "share"), id="statistics of inexact numbers"),
        pytest.param(ROWS, SCHEMA, (*SEARCHED, "share_of_all"), id="statistics of numbers beyond 64 bits"),
        pytest.param([row_of(0, share=float("nan"))], SCHEMA, SEARCHED, id="no number"),
        pytest.param(ROWS, with_a("parts", pa.list_(pa.float64())), SEARCHED, id="a list of floats"),
        pytest.param(ROWS, SCHEMA, (), id="statistics of all columns"),
        pytest.param(ROWS, with_a("parts", pa.map_(pa.string(), pa.string())), SEARCHED, id="a map"),
        pytest.param(ROWS, with_a("parts", pa.list_(pa.map_(pa.string(), pa.int32()))), SEARCHED, id="maps"),
        pytest.param(ROWS, with_a("parts", pa.list_(pa.date32())), SEARCHED, id="a list of days"),
        pytest.param(ROWS, with_a("parts", pa.struct([("a", UTC_TIME)])), SEARCHED, id="a struct with a time"),
    ],
)
def test_what_could_differ_is_left_to_spark(
    tmp_path: Path, rows: list[dict[str, Any]], schema: pa.Schema, searched: tuple[str, ...]
) -> None:
    opened = make_table(tmp_path / "t", schema, **{"delta.dataSkippingStatsColumns": ",".join(searched)})
    assert not append(opened, build_rows(rows, schema))
    assert DeltaTable(str(tmp_path / "t")).version() == 0


def test_rows_with_other_columns_than_the_table_are_left_to_spark(tmp_path: Path) -> None:
    opened = make_table(tmp_path / "t")
    for schema in (with_a("more", pa.string()), SCHEMA.remove(SCHEMA.get_field_index("amount"))):
        rows = [{name: value for name, value in row.items() if name in schema.names} for row in ROWS]
        assert not append(opened, build_rows(rows, schema))
    assert DeltaTable(str(tmp_path / "t")).version() == 0


@pytest.mark.parametrize(
    "brought",
    [
        pa.struct([("id", pa.int32()), ("tags", pa.list_(pa.string())), ("Price", pa.decimal128(9, 3))]),
        pa.struct([("id", pa.int32()), ("tags", pa.list_(pa.string()))]),
        pa.struct([*ITEMS.value_type, ("more", pa.int32())]),
    ],
)
def test_parts_with_other_names_are_left_to_spark(tmp_path: Path, brought: pa.DataType) -> None:
    """A cast drops parts that the table lacks, and leaves others without a value."""
    rows = [{name: value for name, value in row.items() if name != "items"} for row in ROWS]
    schema = SCHEMA.set(SCHEMA.get_field_index("items"), pa.field("items", pa.list_(brought)))
    assert not append(make_table(tmp_path / "t"), build_rows([{**row, "items": [{"id": 1}]} for row in rows], schema))
    assert DeltaTable(str(tmp_path / "t")).version() == 0


@pytest.mark.parametrize(
    ("schema", "properties"),
    [
        (SCHEMA, {"delta.enableChangeDataFeed": "true"}),
        (SCHEMA, {"delta.dataSkippingStatsColumns": "slice,amount"}),
        (with_a("parts", pa.map_(pa.string(), pa.string())), {}),
    ],
)
def test_rows_for_a_table_that_delta_rs_does_not_write_are_not_even_fetched(
    tmp_path: Path, schema: pa.Schema, properties: Mapping[str, str]
) -> None:
    rows = build_rows(ROWS, schema)
    assert not append(make_table(tmp_path / "t", schema, **properties), rows)
    assert rows.asked == 0


def test_what_delta_rs_refuses_is_for_spark_and_what_it_committed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, path = make_table(tmp_path / "t"), str(tmp_path / "t")

    def fail(error: Exception, *, late: bool) -> None:
        def write(*given: Any, **named: Any) -> None:
            if late:
                write_deltalake(*given, **named)
            raise error

        monkeypatch.setattr("deltalake.write_deltalake", write)

    for error in (DeltaError("a feature of a later release"), CommitFailedError("taken"), ValueError("a new type")):
        fail(error, late=False)
        assert not append(opened, build_rows(ROWS))
    fail(DeltaError("the checkpoint failed"), late=True)
    assert append(opened, build_rows(ROWS))
    fail(OSError("the answer was lost"), late=True)
    assert append(DeltaTable(path), build_rows(ROWS))
    assert len(read_rows(path)) == 2 * len(ROWS)
    fail(OSError("the storage is away"), late=False)
    with pytest.raises(DependencyUnavailableError, match="the storage is away"):
        append(DeltaTable(path), build_rows(ROWS))


class Committing:
    """A table of a stream, and commits of few rows."""

    def __init__(self, home: Path) -> None:
        self.lake, self.ledger = Lake(str(home / "lake")), Ledger(f"sqlite:///{home / 'ledger.sqlite'}")
        self.path = self.lake.build_table_path("orders", "events")
        make_table(Path(self.path))

    def commit(self, ordinal: int, rows: int = len(ROWS)) -> Any:
        slice_, unused = a_slice(ordinal, 10), cast("Any", None)
        self.ledger.add([slice_])
        session = cast("Any", FakeSession())
        work = Work(make_stream("orders"), [slice_], session, self.lake, self.ledger, unused, print)
        made: Any = build_rows([{**row, "slice": slice_.key} for row in ROWS[:rows]])
        seen = CommittedSlices.read(work, "events")
        return commit_rows(
            work, "events", made, [SliceCommit(slice_, 1, rows)], seen, files=1, spread="origin_offset", few=True
        )


def test_slices_are_recorded_as_by_spark(tmp_path: Path) -> None:
    committing = Committing(tmp_path)
    for ordinal in range(12):  # with a checkpoint
        done = committing.commit(ordinal)
        assert (done.version, done.rows) == (ordinal + 1, {a_slice(ordinal, 10).key: 3})
        cost = measure_write_cost(done)
        assert cost.pop("write/bytes") > 0
        assert cost == {"write/files": 1}
    found = committing.lake.load_slice_commits("orders", "events")
    assert {key: one.rows for key, one in found.items()} == {a_slice(ordinal, 10).key: 3 for ordinal in range(12)}
    assert len(read_rows(committing.path)) == 36
    assert committing.ledger.intents.list_for_table("orders", "events") == []


def test_a_slice_without_rows_is_recorded_too(tmp_path: Path) -> None:
    committing = Committing(tmp_path)
    assert committing.commit(0, rows=0).rows == {a_slice(0, 10).key: 0}
    assert committing.commit(1).rows == {a_slice(1, 10).key: 3}


def test_spark_writes_under_the_same_number_what_delta_rs_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit without a number came since the look: no reason to begin again."""
    committing = Committing(tmp_path)

    def append_late(table: DeltaTable, rows: pa.Table, options: Mapping[str, str]) -> bool:
        DeltaTable(committing.path).alter.set_table_description("orders")
        return delta_rs_writes.append_rows(table, rows, options)

    def write(path: str, rows: Any, keys: list[str], options: Mapping[str, str], **_: object) -> None:
        assert delta_rs_writes.append_rows(DeltaTable(path), rows.found, options)

    monkeypatch.setattr(small_writes, "append_rows", append_late)
    monkeypatch.setattr(commit, "write_slices", write)
    done = committing.commit(0)
    assert (done.version, done.rows) == (2, {a_slice(0, 10).key: 3})
    assert committing.ledger.intents.list_for_table("orders", "events") == []


@pytest.mark.slow
def test_spark_appends_the_same_and_both_write_one_table(tmp_path: Path, spark: SparkSession) -> None:
    """Rows in turn by either engine into one table, and all of them by Spark into another."""
    mixed, plain = str(tmp_path / "mixed"), str(tmp_path / "plain")
    for path in (mixed, plain):
        make_table(Path(path))
    columns = (
        "slice STRING, origin_offset BIGINT, origin_timestamp TIMESTAMP, version DECIMAL(18, 0), "
        "share_of_all DECIMAL(38, 0), value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
        "items ARRAY<STRUCT<id: INT, tags: ARRAY<STRING>, price: DECIMAL(9, 3)>>, amount DECIMAL(12, 2), "
        "share DOUBLE, paid BOOLEAN, day DATE, at_home TIMESTAMP_NTZ"
    )
    values = [tuple(row.values()) for row in [*ROWS, row_of(3, share=None, origin_timestamp=None)]]
    frame = spark.createDataFrame(values, columns)

    def show(path: str) -> list[str]:
        return sorted(map(str, spark.read.format("delta").load(path).collect()))

    for number in range(12):  # with checkpoints of both
        options = build_options(number + 1, "{}")
        frame.write.format("delta").mode("append").options(**options).save(plain)
        if number % 2:
            frame.write.format("delta").mode("append").options(**options).save(mixed)
        else:
            assert small_writes.append(DeltaTable(mixed), frame, options)
        assert show(mixed) == show(plain)
    assert len(show(mixed)) == 48
    by_delta_rs = [sorted(map(str, read_rows(path))) for path in (mixed, plain)]
    assert by_delta_rs[0] == by_delta_rs[1]
