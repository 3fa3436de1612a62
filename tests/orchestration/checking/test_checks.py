"""The checks on tables that were damaged after Highwater's back: each check is seen to fail."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.orchestration.checking.origin_checks import check_offsets_accounted
from highwater.orchestration.checking.slice_status import check_version_order, read_attempts
from highwater.resources.lake import Lake
from tests.conftest import create_topic
from tests.helpers.support import Message, make_bench, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.slices import Slice
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sound(bootstrap: str, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Slice, Slice]:
    """Two slices, materialised; the second brings the higher versions."""
    home = tmp_path_factory.mktemp("sound")
    topic = f"orders.checks.{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic, 3, {})
    bench = make_bench(topic, bootstrap, spark, home)
    bench.send(
        order_message("o1", 1),
        order_message("o2", 1),
        Message(b"o3", b"no JSON"),
        order_message("o1", 2),
        order_message("o2", 2),
        Message(b"o2", None),
    )
    first, second = bench.plan(0, p0=(0, 3)), bench.plan(1, p0=(3, 6))
    bench.materialise(first, second)
    return bench, first, second


@pytest.fixture
def done(sound: tuple[Bench, Slice, Slice], tmp_path: Path) -> tuple[Bench, Slice, Slice]:
    """The same in a lake that a test may damage."""
    bench, first, second = sound
    shutil.copytree(bench.lake.root, tmp_path / "damaged")
    return replace(bench, lake=Lake(str(tmp_path / "damaged"))), first, second


def delete(bench: Bench, table: str, where: str) -> None:
    from deltalake import DeltaTable

    assert DeltaTable(bench.lake.build_table_path(bench.stream.name, table)).delete(where)["num_deleted_rows"]


def put_in_current(bench: Bench, slice_: Slice, key: str) -> None:
    """Let the event of a slice be in `current` in place of the one that won."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    path = bench.lake.build_table_path(bench.stream.name, "current")
    [event] = [row for row in bench.rows("events") if (row["slice"], row["key"]) == (slice_.key, key)]
    schema = DeltaTable(path).to_pyarrow_table().schema
    row = {**{name: event.get(name) for name in schema.names}, "updated_by_slice": slice_.key}
    delete(bench, "current", f"key = '{key}'")
    write_deltalake(path, pa.Table.from_pylist([row], schema), mode="append")


def test_sound_slices_pass(done: tuple[Bench, Slice, Slice]) -> None:
    bench, first, second = done
    keys = [first.key, second.key]
    accounted = check_offsets_accounted(bench.ledger, bench.lake, bench.stream, keys)
    assert [accounted[key].text for key in keys] == [
        "3 raw = 2 events + 1 rejects + 0 tombstones + 0 superseded, origin by origin",
        "3 raw = 2 events + 0 rejects + 1 tombstones + 0 superseded, origin by origin",
    ]
    assert all(result.passed for result in accounted.values())
    assert all(result.passed for result in check_version_order(bench.lake, bench.stream, keys).values())
    assert all(read_attempts(bench.lake, bench.stream).select_missing_tables(key) == () for key in keys)
    assert bench.failing() == {}


@pytest.mark.parametrize("table", ["raw", "events", "rejects"])
def test_a_row_that_is_gone_fails_its_slice_and_no_other(done: tuple[Bench, Slice, Slice], table: str) -> None:
    bench, first, second = done
    column = "offset" if table == "raw" else "origin_offset"
    offset = 2 if table == "rejects" else 1
    delete(bench, table, f"{column} = {offset}")
    accounted = check_offsets_accounted(bench.ledger, bench.lake, bench.stream, [first.key, second.key])
    assert not accounted[first.key].passed
    recorded = {"raw": 3, "events": 2, "rejects": 1}[table]
    assert f"the commit of {table} recorded {recorded} rows, and {recorded - 1} are there" in accounted[first.key].text
    assert accounted[second.key].passed


def test_a_key_that_current_lost_or_holds_at_a_lower_version_fails(done: tuple[Bench, Slice, Slice]) -> None:
    bench, first, second = done
    put_in_current(bench, first, "o1")
    found = check_version_order(bench.lake, bench.stream, [first.key, second.key])
    assert found[first.key].passed, "current holds its version"
    assert found[second.key].text.startswith("of 2 keys 0 are absent and 1 behind")
    delete(bench, "current", "key = 'o1'")
    found = check_version_order(bench.lake, bench.stream, [first.key, second.key])
    assert found[first.key].text.startswith("of 2 keys 1 are absent and 0 behind")
    assert found[second.key].text.startswith("of 2 keys 1 are absent and 0 behind")


def test_current_rests_on_events_row_by_row(done: tuple[Bench, Slice, Slice]) -> None:
    from deltalake import DeltaTable

    bench, first, second = done
    held = read_attempts(bench.lake, bench.stream, [first.key, second.key])
    assert [held.select_missing_tables(key) for key in (first.key, second.key)] == [(), ()]
    table = DeltaTable(bench.lake.build_table_path(bench.stream.name, "current"))
    assert table.update({"amount": "99"}, predicate="key = 'o2'")["num_updated_rows"] == 1
    assert [*bench.failing()] == [f"current_follows_events of {second.key}"]


def test_without_tables_nothing_passes(bench: Bench, tmp_path: Path) -> None:
    slice_ = bench.plan(0, p0=(0, 0))
    assert not check_offsets_accounted(bench.ledger, bench.lake, bench.stream, [slice_.key])[slice_.key].passed
    assert not check_version_order(bench.lake, bench.stream, [slice_.key])[slice_.key].passed
    assert read_attempts(bench.lake, bench.stream).select_missing_tables(slice_.key) == (
        "raw",
        "events",
        "rejects",
        "dlq",
        "current",
    )
