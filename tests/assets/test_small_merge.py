"""A small slice is merged into `current` by delta-rs as Spark's MERGE would, and what could differ is left to Spark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, TableFeatures, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from dev.planted import plant
from highwater.assets import current, small_merge, small_slices
from highwater.assets.commit import measure_write_cost
from highwater.assets.current import STATISTICS_COLUMNS, build_precedence
from highwater.assets.work import Work
from highwater.commit_records import CommitRecord
from highwater.errors import DependencyUnavailableError, IncompleteReadError, SupersededAttemptError
from highwater.resources.commit_log import read_number
from highwater.resources.delta import add_actions, read_commit_metrics
from highwater.resources.delta_rs_writes import CHECKPOINTS, create, merge_rows
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.numbered_commits import NumberedCommit, Target, commit_slices, session_options
from highwater.resources.object_store import FILE_LOG_STORE_SETTING
from highwater.resources.table_pool import LentTable
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange
from tests.helpers.fake_session import FakeConf, FakeSession
from tests.helpers.logged_commits import build_options, open_table
from tests.helpers.support import make_stream, read_rows
from tests.helpers.written_tables import a_slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.resources.commit_log import TableSlices

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
UTC_TIME = pa.timestamp("us", "UTC")
FIELDS: Mapping[str, pa.DataType] = {
    "order-id": pa.string(),
    "größe": pa.float64(),
    "@Type": pa.string(),
    "place": pa.int32(),
    "amount": pa.decimal128(20, 2),
    "paid": pa.bool_(),
    "day": pa.date32(),
    "at_home": pa.timestamp("us"),
}
ORIGIN: Mapping[str, pa.DataType] = {
    "origin_topic": pa.string(),
    "origin_generation": pa.int32(),
    "origin_partition": pa.int32(),
    "origin_offset": pa.int64(),
    "origin_timestamp": UTC_TIME,
    "origin_timestamp_ms": pa.int64(),
}
PLAIN = {"key": pa.string(), "version": pa.int64(), "event_time": UTC_TIME, **FIELDS, **ORIGIN}
STATISTICS = {"delta.dataSkippingStatsColumns": ",".join(STATISTICS_COLUMNS)}
# In the order of precedence; of all but the version the smaller one wins.
PLACE = ("origin_timestamp_ms", "origin_partition", "origin_offset", "origin_generation")


def row_of(key: str, number: int | None, **changes: Any) -> dict[str, Any]:
    """An event of a version; `changes` sets columns."""
    plain = {
        "key": key,
        "version": number,
        "event_time": NOON,
        "order-id": f"o{key}",
        "größe": 0.5,
        "@Type": "a'b",
        "place": 7,
        "amount": Decimal("12.50"),
        "paid": None,
        "day": date(2026, 3, 1),
        "at_home": datetime(2026, 3, 1, 13),  # noqa: DTZ001 - a local time
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": 0,
        "origin_offset": 0,
        "origin_timestamp": NOON,
        "origin_timestamp_ms": 1_000,
    }
    assert {*changes} <= {*plain}
    return plain | changes


@dataclass
class Merging:
    """`current` and the events of slices, written without the pipeline."""

    home: Path
    spark: SparkSession = field(default_factory=lambda: cast("SparkSession", FakeSession()))
    columns: Mapping[str, pa.DataType] = field(default_factory=lambda: PLAIN)
    properties: Mapping[str, str] = field(default_factory=lambda: STATISTICS)
    slices: int = 0

    def __post_init__(self) -> None:
        self.lake = Lake(str(self.home / "lake"))
        self.ledger = Ledger(f"sqlite:///{self.home / 'ledger.sqlite'}")
        self.target = Target(self.spark, self.lake, self.ledger, "orders", "current")
        self.events = self.lake.build_table_path("orders", "events")
        create(self.target.path, self.schema("updated_by_slice"), configuration=self.properties)
        create(self.events, self.schema("slice"), configuration={"delta.dataSkippingStatsColumns": "slice"})

    def schema(self, by_slice: str) -> pa.Schema:
        return pa.schema([*self.columns.items(), (by_slice, pa.string())])

    def add_events(
        self, rows: Sequence[Mapping[str, Any]], *, offsets: int | None = None, recorded: int | None = None
    ) -> Work:
        """Commit the events of another slice, which has as many offsets and records as many rows unless said otherwise.

        Returns:
            The work on it.
        """
        slice_ = a_slice(self.slices, len(rows) if offsets is None else 1)
        if offsets is not None:
            slice_ = replace(slice_, ranges={0: OffsetRange(0, offsets)})
        self.slices += 1
        self.ledger.add([slice_])
        made = pa.Table.from_pylist([{**row, "slice": slice_.key} for row in rows], self.schema("slice"))
        count = len(rows) if recorded is None else recorded
        plant(self.events, made, [SliceCommit(slice_, 1, count, {"rejects": 0, "tombstones": 0})])
        unused = cast("Any", None)
        return Work(make_stream("orders"), [slice_], self.spark, self.lake, self.ledger, unused, print)

    def find_winners(self, work: Work) -> pa.Table | None:
        version = DeltaTable(self.events).version()
        return small_merge.find_winners(work, self.target, version, work.keys)

    def look(self, work: Work) -> TableSlices:
        return self.lake.load_commits("orders", "current", work.keys)

    def merge(self, work: Work) -> NumberedCommit:
        """Commit a slice by delta-rs."""
        winners = self.find_winners(work)
        assert winners is not None
        seen = self.look(work)
        return self.commit(work, seen, lambda options: small_merge.merge(self.target, winners, seen.number, options))

    def commit(self, work: Work, seen: TableSlices, write: Callable[[Mapping[str, str]], object]) -> NumberedCommit:
        records = [CommitRecord(key, 1, None, batch="") for key in work.keys]
        return commit_slices(self.target, seen, records, "run", write)

    def rows(self) -> list[dict[str, Any]]:
        return sorted(read_rows(self.target.path), key=lambda row: str(row["key"]))

    def versions(self) -> dict[str, int]:
        found = {row["key"]: row["version"] for row in self.rows()}
        assert len(found) == len(self.rows()), "a key has several rows"
        return found


@pytest.fixture
def merging(tmp_path: Path) -> Merging:
    return Merging(tmp_path)


def test_the_winner_of_each_key_is_merged_with_all_of_its_values(merging: Merging) -> None:
    first = merging.add_events(
        [row_of("a", 1), row_of("a", 3, amount=Decimal("-0.01")), row_of("a", 2), row_of("b", 5)]
    )
    done = merging.merge(first)
    assert merging.rows() == [
        {**row_of("a", 3, amount=Decimal("-0.01")), "updated_by_slice": first.keys[0]},
        {**row_of("b", 5), "updated_by_slice": first.keys[0]},
    ]
    assert {name: done.metrics[name] for name in ("num_target_rows_inserted", "num_target_rows_updated")} == {
        "num_target_rows_inserted": 2,
        "num_target_rows_updated": 0,
    }
    second = merging.add_events([row_of("a", 2), row_of("b", 6), row_of("c", 1)])
    done = merging.merge(second)
    assert merging.versions() == {"a": 3, "b": 6, "c": 1}
    cost = measure_write_cost(done)
    assert cost.pop("write/bytes") > 0
    assert cost == {
        "write/rows_inserted": 1,
        "write/rows_updated": 1,
        "write/rows_deleted": 0,
        "write/rows_copied": 1,
        "write/files": len(open_table(merging.lake, "current").file_uris()),
    }


def test_the_bytes_of_a_commit_are_those_of_the_files_it_added(merging: Merging) -> None:
    done = merging.merge(merging.add_events([row_of(f"{n}", 1) for n in range(50)]))
    written = sum(file.stat().st_size for file in Path(merging.target.path).glob("*.parquet"))
    assert measure_write_cost(done)["write/bytes"] == written > 0


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("place", PLACE)
def test_of_equal_versions_the_earliest_origin_wins(merging: Merging, place: str, order: int) -> None:
    """Within a slice, and between a slice and the table."""
    rows = [row_of("k", 1, **{place: 1}), row_of("k", 1, **{place: 2})][::order]
    merging.merge(merging.add_events(rows))
    assert [row[place] for row in merging.rows()] == [1]
    for at, wins in ((2, 1), (1, 1), (0, 0)):
        merging.merge(merging.add_events([row_of("k", 1, **{place: at})]))
        assert [row[place] for row in merging.rows()] == [wins]


def test_a_version_goes_before_every_place_and_each_place_before_the_next(merging: Merging) -> None:
    names = ["version", *PLACE]
    for at, name in enumerate(names):
        better, worse = dict.fromkeys(names, 1), dict.fromkeys(names, 1)
        better[name], worse[name] = (2, 1) if name == "version" else (0, 1)
        for later in names[at + 1 :]:
            better[later], worse[later] = 9, 0
        for ways in ((better, worse), (worse, better)):
            key = f"{name}{ways[0] is better}"
            for values in ways:
                merging.merge(merging.add_events([row_of(key, None, **values)]))
            [row] = [row for row in merging.rows() if row["key"] == key]
            assert {name: row[name] for name in names} == better, "one after the other"
        key = f"{name} at once"
        merging.merge(merging.add_events([row_of(key, None, **worse), row_of(key, None, **better)]))
        [row] = [row for row in merging.rows() if row["key"] == key]
        assert {name: row[name] for name in names} == better, "at once"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_in_whatever_slices_the_table_has_the_best_row_of_each_key(merging: Merging, seed: int) -> None:
    some = random.Random(seed)
    history: list[dict[str, Any]] = []
    for _ in range(6):
        rows = [
            row_of(
                some.choice("abcdef"),
                some.randrange(3),
                **{name: some.randrange(2) for name in PLACE},
                amount=Decimal(some.randrange(10_000)) / 100,
            )
            for _ in range(some.randrange(1, 12))
        ]
        # An origin is one record.
        taken = {(row["key"], *(row[name] for name in PLACE)) for row in history}
        fresh = {(row["key"], *(row[name] for name in PLACE)): row for row in rows}
        brought = [row for place, row in fresh.items() if place not in taken]
        history += brought
        merging.merge(merging.add_events(brought))
        best = {
            key: min(
                (row for row in history if row["key"] == key),
                key=lambda row: (-row["version"], *(row[name] for name in PLACE)),
            )
            for key in {row["key"] for row in history}
        }
        found = {row["key"]: {name: row[name] for name in PLAIN} for row in merging.rows()}
        assert found == best


@pytest.mark.parametrize("name", ["version", "origin_timestamp_ms", "origin_generation"])
def test_a_missing_value_loses_against_every_other(merging: Merging, name: str) -> None:
    """As in a struct of Spark's; somebody may have written such a row."""
    here, there = row_of("a", 1, **{name: None}), row_of("b", 1, **{name: 7})
    merging.merge(merging.add_events([here, there]))
    merging.merge(merging.add_events([row_of("a", 1, **{name: 7}), row_of("b", 1, **{name: None})]))
    assert [row[name] for row in merging.rows()] == [7, 7]


def test_spark_has_the_same_precedence() -> None:
    assert build_precedence("s.") == (
        "struct(s.version, -s.origin_timestamp_ms, -s.origin_partition, -s.origin_offset, -s.origin_generation)"
    )


def test_a_slice_that_brings_nothing_newer_is_a_commit_too(merging: Merging) -> None:
    """Its records are in it, and what it wrote is nothing."""
    merging.merge(merging.add_events([row_of("a", 2)]))
    before, number = open_table(merging.lake, "current"), read_number(open_table(merging.lake, "current"))
    for rows in ([row_of("a", 1)], []):
        work = merging.add_events(rows)
        done = merging.merge(work)
        number += 1
        assert read_number(open_table(merging.lake, "current")) == number
        assert merging.lake.load_commits("orders", "current").attempts[work.keys[0]] == 1
        cost = measure_write_cost(done)
        assert {cost[f"write/{name}"] for name in ("rows_inserted", "rows_updated", "bytes", "files")} == {0}
    assert open_table(merging.lake, "current").file_uris() == before.file_uris()
    assert merging.versions() == {"a": 2}


def test_the_metrics_of_a_commit_of_spark_are_those_of_its_log(merging: Merging) -> None:
    opened = open_table(merging.lake, "current")
    assert read_commit_metrics(opened, opened.version()) == {}, "one that says nothing"
    written = {"numFiles": "1", "numOutputBytes": "5"}
    made = pa.Table.from_pylist([], merging.schema("updated_by_slice"))
    properties = CommitProperties(custom_metadata={"operationMetrics": written})
    opened.create_write_transaction([], "append", made.schema, commit_properties=properties)
    opened = open_table(merging.lake, "current")
    assert read_commit_metrics(opened, opened.version()) == written


def test_the_files_have_the_statistics_of_the_table(merging: Merging) -> None:
    """Readers skip files by them; of other columns there are none."""
    work = merging.add_events([row_of("a", 1), row_of("b", 7)])
    merging.merge(work)
    stream = open_table(merging.lake, "current").get_add_actions(flatten=True)
    actions = pa.RecordBatchReader.from_stream(stream).read_all()
    assert {name for name in actions.column_names if name.startswith("min.")} == {
        f"min.{n}" for n in STATISTICS_COLUMNS
    }
    assert min(actions["min.version"].to_pylist()) == 1
    assert max(actions["max.version"].to_pylist()) == 7
    assert {*actions["max.updated_by_slice"].to_pylist()} == {work.keys[0]}
    assert sum(actions["num_records"].to_pylist()) == 2


def test_a_read_that_misses_events_is_an_error(merging: Merging) -> None:
    work = merging.add_events([row_of("a", 1)], recorded=2)
    with pytest.raises(IncompleteReadError, match="2 rows by its commit"):
        merging.find_winners(work)


# Other writers


def test_nothing_is_written_where_another_numbered_commit_came_since_the_look(merging: Merging) -> None:
    work, other = merging.add_events([row_of("a", 1)]), merging.add_events([row_of("a", 9)])
    winners, seen = merging.find_winners(work), merging.look(work)
    assert winners is not None
    merging.merge(other)
    version = open_table(merging.lake, "current").version()
    with pytest.raises(SupersededAttemptError):
        merging.commit(work, seen, lambda options: small_merge.merge(merging.target, winners, seen.number, options))
    assert open_table(merging.lake, "current").version() == version
    assert merging.ledger.intents.list_for_table("orders", "current") == [], "it never commits any more"


@pytest.mark.parametrize("numbered", [True, False])
def test_a_commit_that_another_one_was_before_writes_nothing(merging: Merging, numbered: bool) -> None:
    """A numbered one, or a person's: it comes after the table was opened for the merge."""
    work, other = merging.add_events([row_of("a", 1)]), merging.add_events([row_of("a", 9)])
    opened, number = merging.target.open_table(), merging.look(work).number
    winners = merging.find_winners(work)
    if numbered:
        merging.merge(other)
    else:
        mine = pa.Table.from_pylist([{**row_of("x", 1), "updated_by_slice": "me"}], merging.schema("updated_by_slice"))
        write_deltalake(merging.target.path, mine, mode="append")
    before = merging.versions()
    merge_rows(opened, cast("pa.Table", winners), small_merge._build_newer(), build_options(number + 1, "late"))
    assert open_table(merging.lake, "current").version() == opened.version() + 1
    assert merging.versions() == before


def test_a_commit_whose_answer_was_lost_is_found(merging: Merging, monkeypatch: pytest.MonkeyPatch) -> None:
    work = merging.add_events([row_of("a", 1)])
    with monkeypatch.context() as patched:
        patched.setattr(LentTable, "version", _failing_once(DeltaTable.version, 1))
        done = merging.merge(work)
    assert done.version == 1
    assert merging.versions() == {"a": 1}
    assert merging.ledger.intents.list_for_table("orders", "current") == []


def _failing_once(real: Callable[[DeltaTable], int], version: int) -> Callable[[DeltaTable], int]:
    """`version` of a table, which fails once at a version: the first look after the merge."""
    failed: list[int] = []

    def look(table: DeltaTable) -> int:
        found = real(table)
        if found == version and table.table_uri.rstrip("/").endswith("current") and not failed:
            failed.append(found)
            raise DeltaError("the answer was lost")
        return found

    return look


def test_a_merge_that_committed_nothing_and_fails_is_an_error(
    merging: Merging, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = merging.add_events([row_of("a", 1)])

    def fail(*_: Any, **__: Any) -> Any:
        raise DeltaError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "merge", fail)
        with pytest.raises(DependencyUnavailableError, match="the disk is full"):
            merging.merge(work)
    assert len(merging.ledger.intents.list_for_table("orders", "current")) == 1, "for the next run"
    assert merging.versions() == {}


# What is left to Spark


def prepared(home: Path, **changes: Any) -> tuple[Merging, Work]:
    merging = Merging(home, **changes)
    return merging, merging.add_events([row_of("a", 1)])


def test_a_small_slice_of_plain_values_is_for_delta_rs(tmp_path: Path) -> None:
    merging, work = prepared(tmp_path)
    winners = merging.find_winners(work)
    assert winners is not None
    assert winners.num_rows == 1


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"delta.dataSkippingStatsColumns": "key,amount"},
        {"delta.dataSkippingStatsColumns": "key,größe"},
        {**STATISTICS, "delta.dataSkippingNumIndexedCols": "3"},
        {**STATISTICS, "delta.enableChangeDataFeed": "true"},
        {**STATISTICS, "delta.appendOnly": "true"},
        {
            **STATISTICS,
            "delta.columnMapping.mode": "name",
            "delta.minReaderVersion": "2",
            "delta.minWriterVersion": "5",
        },
    ],
)
def test_tables_that_ask_more_of_their_writers_are_for_spark(tmp_path: Path, properties: dict[str, str]) -> None:
    merging, work = prepared(tmp_path, properties=properties)
    assert merging.find_winners(work) is None


def test_what_maintenance_sets_does_not_matter(tmp_path: Path) -> None:
    properties = {**STATISTICS, "delta.logRetentionDuration": "interval 30 days", "highwater.owner": "me"}
    merging, work = prepared(tmp_path, properties=properties)
    assert merging.find_winners(work) is not None


@pytest.mark.parametrize("timestamp_ntz", [True, False])
@pytest.mark.parametrize(
    "feature", [TableFeatures.DeletionVectors, TableFeatures.RowTracking, TableFeatures.AppendOnly, None]
)
def test_a_table_with_another_feature_is_for_spark(
    tmp_path: Path, feature: TableFeatures | None, timestamp_ntz: bool
) -> None:
    """Also one whose property was set back; a column without a time zone is a feature by itself."""
    columns = PLAIN if timestamp_ntz else {name: kind for name, kind in PLAIN.items() if name != "at_home"}
    merging = Merging(tmp_path, columns=columns)
    row = {name: value for name, value in row_of("a", 1).items() if name in columns}
    work = merging.add_events([row])
    assert merging.find_winners(work) is not None
    if feature is not None:
        table = DeltaTable(merging.target.path)
        table.alter.add_feature(feature, allow_protocol_versions_increase=True)
        assert not {*table.metadata().configuration} - {*STATISTICS, *CHECKPOINTS}
        assert merging.find_winners(work) is None


def test_a_constraint_is_for_spark(tmp_path: Path) -> None:
    merging, work = prepared(tmp_path)
    DeltaTable(merging.target.path).alter.add_constraint({"least": "version > 0"})
    assert merging.find_winners(work) is None


def test_a_column_with_a_name_of_delta_rs_is_for_spark(tmp_path: Path) -> None:
    """Its MERGE fails: the name would be ambiguous."""
    merging, work = prepared(tmp_path, columns={**PLAIN, "__delta_rs_source": pa.string()})
    assert merging.find_winners(work) is None


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.struct([("a", UTC_TIME)]), pa.binary()])
def test_nested_and_binary_columns_are_for_spark(tmp_path: Path, kind: pa.DataType) -> None:
    merging, work = prepared(tmp_path, columns={**PLAIN, "more": kind})
    assert merging.find_winners(work) is None


@pytest.mark.parametrize("table", ["events", "current"])
def test_a_column_that_one_of_the_tables_lacks_is_for_spark(tmp_path: Path, table: str) -> None:
    """A run that began before a field was added must not write it empty, nor may delta-rs refuse it."""
    merging, work = prepared(tmp_path)
    more = pa.table({"more": pa.array([], pa.string())})
    path = merging.lake.build_table_path("orders", table)
    write_deltalake(path, more, mode="append", schema_mode="merge")
    assert (merging.find_winners(work) is None) == (table == "current")


def test_a_column_of_another_type_is_for_spark(tmp_path: Path) -> None:
    merging, _ = prepared(tmp_path)
    merging.columns = {**PLAIN, "version": pa.int32()}
    made = pa.Table.from_pylist([], merging.schema("slice"))
    write_deltalake(merging.events, made, mode="overwrite", schema_mode="overwrite")
    assert merging.find_winners(merging.add_events([row_of("a", 2)])) is None


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_no_number_is_for_spark(tmp_path: Path, stored: bool) -> None:
    """A file's statistics leave it out, where readers take it for the greatest value."""
    merging, work = prepared(tmp_path)
    work = with_another_row(merging, work, row_of("b", 1, größe=float("nan")), stored=stored)
    assert merging.find_winners(work) is None


def with_another_row(merging: Merging, work: Work, row: Mapping[str, Any], *, stored: bool) -> Work:
    """The work where `current` has another row too, or on a slice whose event it is."""
    if not stored:
        return merging.add_events([row])
    made = pa.Table.from_pylist([{**row, "updated_by_slice": "x"}], merging.schema("updated_by_slice"))
    write_deltalake(merging.target.path, made, mode="append")
    return work


def test_versions_beyond_64_bits_are_for_spark(tmp_path: Path) -> None:
    """delta-rs computes their statistics in 64 bits, by which readers would miss rows."""
    for digits, is_plain in ((18, True), (19, False), (38, False)):
        columns = {**PLAIN, "version": pa.decimal128(digits, 0)}
        merging, work = prepared(tmp_path / str(digits), columns=columns)
        assert (merging.find_winners(work) is not None) == is_plain


@pytest.mark.parametrize("name", ["event_time", "day", "at_home"])
@pytest.mark.parametrize("year", [1, 1899])
@pytest.mark.parametrize("stored", [True, False])
def test_times_that_spark_3_would_refuse_are_for_spark(tmp_path: Path, name: str, year: int, stored: bool) -> None:
    """Among the slice's events, or in the table, whose rows are copied."""
    merging, work = prepared(tmp_path)
    moment = datetime(year, 6, 1, tzinfo=UTC if name == "event_time" else None)
    row = row_of("b", 1, **{name: moment.date() if name == "day" else moment})
    assert merging.find_winners(with_another_row(merging, work, row, stored=stored)) is None


@pytest.mark.parametrize("year", [1901, 2300, 9999])
def test_other_times_are_merged_and_copied_as_they_are(tmp_path: Path, year: int) -> None:
    """Also from a file with INT96, as a person's OPTIMIZE writes it."""
    merging, _ = prepared(tmp_path)
    times: dict[str, Any] = {
        "event_time": datetime(year, 6, 1, 1, 2, 3, 456_789, UTC),
        "at_home": datetime(year, 6, 1, 1, 2, 3, 456_789),  # noqa: DTZ001 - a local time
        "day": date(year, 6, 1),
    }
    mine = [{**row_of(key, 1, **times), "updated_by_slice": "x"} for key in "ab"]
    file = Path(merging.target.path) / "by-hand.parquet"
    made = pa.Table.from_pylist(mine, merging.schema("updated_by_slice"))
    pq.write_table(made, file, use_deprecated_int96_timestamps=True)
    assert pq.read_schema(file).field("event_time").type == pa.timestamp("ns")
    added = AddAction(file.name, file.stat().st_size, {}, 0, True, json.dumps({"numRecords": 2}))
    opened = open_table(merging.lake, "current")
    opened.create_write_transaction([added], "append", opened.schema())
    merging.merge(merging.add_events([row_of("b", 2, **times)]))
    assert [(row["key"], row["version"]) for row in merging.rows()] == [("a", 1), ("b", 2)]
    for row in merging.rows():
        assert {name: row[name] for name in times} == times
    assert file.name not in str(open_table(merging.lake, "current").file_uris()), "the row was copied"


def test_events_of_other_slices_do_not_count(tmp_path: Path) -> None:
    merging, work = prepared(tmp_path)
    merging.add_events([row_of("b", 1, event_time=NOON - timedelta(days=300 * 365))])
    winners = merging.find_winners(work)
    assert winners is not None
    assert winners["key"].to_pylist() == ["a"]


def test_many_offsets_rows_bytes_or_letters_are_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merging, work = prepared(tmp_path)
    merging.merge(merging.add_events([row_of(f"{n}", 1) for n in range(3)]))
    assert merging.find_winners(work) is not None
    many = merging.add_events([row_of("a", 1)], offsets=small_slices.MAX_OFFSETS + 1)
    assert merging.find_winners(many) is None
    for module, name, most in (
        (small_slices, "MAX_ROWS", 2),
        (small_merge, "MAX_BYTES", 1_000),
        (small_merge, "MAX_TEXT_BYTES", 10),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, most)
            assert merging.find_winners(work) is None


def test_the_files_of_other_slices_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merging, work = prepared(tmp_path)
    monkeypatch.setattr(
        small_merge, "MAX_BYTES", max(add_actions(open_table(merging.lake, "events"))["size_bytes"].to_pylist())
    )
    large = merging.add_events([row_of(f"key number {n}", n) for n in range(2_000)])
    assert merging.find_winners(work) is not None
    assert merging.find_winners(large) is None


def test_a_file_without_statistics_is_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are not known."""
    merging, work = prepared(tmp_path)

    def without(opened: DeltaTable) -> pa.Table:
        found = add_actions(opened)
        if opened.table_uri.rstrip("/").endswith("current"):
            found = pa.table({"num_records": pa.array([None], pa.int64()), "size_bytes": [10]})
        return found

    monkeypatch.setattr(small_merge, "add_actions", without)
    assert merging.find_winners(work) is None


@pytest.mark.parametrize("store", [None, "io.delta.storage.LocalLogStore"])
def test_a_session_that_may_replace_our_commit_is_left_alone(tmp_path: Path, store: str | None) -> None:
    session = cast("SparkSession", FakeSession({FILE_LOG_STORE_SETTING: store}))
    merging, work = prepared(tmp_path, spark=session)
    assert merging.find_winners(work) is None


def test_a_server_that_does_not_answer_is_an_outage(tmp_path: Path) -> None:
    class FakeAwayConf(FakeConf):
        """Settings of a Connect server that is away."""

        def get(self, *_: Any) -> Any:
            raise RuntimeError("StatusCode.UNAVAILABLE")

    session = FakeSession()
    session.conf = FakeAwayConf()
    merging, work = prepared(tmp_path, spark=cast("SparkSession", session))
    with pytest.raises(DependencyUnavailableError):
        merging.find_winners(work)


def test_the_number_is_found_where_the_log_was_cleaned(merging: Merging) -> None:
    for version in range(12):
        merging.merge(merging.add_events([row_of("a", version)]))
    number = read_number(open_table(merging.lake, "current"))
    log = Path(merging.target.path) / "_delta_log"
    assert [*log.glob("*.checkpoint.parquet")]
    last = int(json.loads((log / "_last_checkpoint").read_text())["version"])
    for entry in range(last):
        (log / f"{entry:020d}.json").unlink()
    assert read_number(DeltaTable(merging.target.path)) == number
    merging.merge(merging.add_events([row_of("a", 99)]))
    assert merging.versions() == {"a": 99}


# Beside Spark


@pytest.mark.slow
def test_spark_merges_the_same_and_both_write_one_table(tmp_path: Path, spark: SparkSession) -> None:
    """Slices in turn by either engine into one table, and all of them by Spark into another."""
    some = random.Random(7)
    mixed, plain = Merging(tmp_path / "mixed", spark), Merging(tmp_path / "plain", spark)
    for number in range(12):  # with checkpoints of both
        rows = [
            row_of(
                some.choice("abcdefgh"),
                some.randrange(4),
                origin_offset=100 * number + at,
                origin_timestamp_ms=some.randrange(2),
                amount=Decimal(some.randrange(10_000)) / 100,
            )
            for at in range(12)
        ]
        for merging in (mixed, plain):
            work = merging.add_events(rows)
            if merging is mixed and number % 2 == 0:
                merging.merge(work)
                continue
            merge_by_spark(merging, work)
        assert mixed.rows() == plain.rows()
        shown = spark.read.format("delta").load(mixed.target.path).count()
        assert shown == len(mixed.rows())
    [_, *commits] = sorted((Path(mixed.target.path) / "_delta_log").glob("*.json"))
    engines = ["delta-rs" if '"engineInfo":"delta-rs' in entry.read_text() else "spark" for entry in commits]
    assert engines == ["delta-rs", "spark"] * 6
    with (Path(mixed.target.path) / "_delta_log" / "_last_checkpoint").open() as hint:
        assert json.load(hint)["version"] == 10


def merge_by_spark(merging: Merging, work: Work) -> None:
    """As the stage does with a slice that is not small."""
    spark, seen = merging.spark, merging.look(work)
    names = ["`" + name + "`" for name in (*PLAIN, "updated_by_slice")]
    rows = spark.read.format("delta").load(merging.events).where(f"slice = '{work.keys[0]}'")
    source = rows.withColumnRenamed("slice", "updated_by_slice")
    current.select_winners(source, "key").createOrReplaceTempView("highwater_current_source")
    statement = current._build_merge_statement(work, names, current._UPSERT)

    def write(options: Mapping[str, str]) -> None:
        with session_options(spark, options):
            spark.sql(statement).collect()

    merging.commit(work, seen, write)
