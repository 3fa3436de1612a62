"""Who gave up which record is known to a ledger that is rebuilt from the lake, wherever the giving up died."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from highwater.assets import discards_table, erasures_table
from highwater.assets.discards_table import read, sync_with_ledger
from highwater.assets.work import Work
from highwater.envelope import Origin
from highwater.erasing import Erasure, to_microseconds
from highwater.errors import DependencyUnavailableError, TemporaryError
from highwater.orchestration.operations import maintenance, rebuilding
from highwater.orchestration.operations.parked import Parked, ParkedRecord, ParkedRequest, _discard
from highwater.plans import Discard
from highwater.resources import delta_rs_writes
from highwater.resources.delta_rs_writes import append_at
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.failing_sync import FailingSync
from tests.helpers.world import NOON, STREAM, World

NOTHING = cast("Any", None)
KAFKA = cast("Any", SimpleNamespace(list_group_names=list))
BY_ANN = ParkedRequest(dry_run=False, by="ann", because="test data")


def a_discard(offset: int, minutes: int = 0) -> Discard:
    return Discard(Origin("orders", 0, 0, offset), "no use", "bob", NOON + timedelta(minutes=minutes))


def parked(*offsets: int) -> Parked:
    """What a look at the parked topic found."""
    one = ParkedRecord(0, 0, 0, "malformed", "orders@0000000", "why", "o1")
    return Parked({Origin("orders", 0, 0, n): replace(one, offset=n) for n in offsets}, {}, 0, 0, {})


def work_of(ledger: Ledger, lake: Lake) -> Work:
    return Work(STREAM, (), NOTHING, lake, ledger, KAFKA, lambda _: None)


def test_the_table_follows_the_ledger_and_only_grows(ledger: Ledger, lake: Lake, tmp_path: Path) -> None:
    assert (sync_with_ledger(ledger, lake, "orders"), read(lake, "orders")) == (0, [])
    assert not Path(lake.root).exists()
    ledger.discards.add("orders", [a_discard(1), a_discard(2)])
    ledger.discards.add("others", [a_discard(7)])
    assert (sync_with_ledger(ledger, lake, "orders"), sync_with_ledger(ledger, lake, "orders")) == (2, 0)
    ledger.discards.add("orders", [a_discard(0, 1)])
    assert (sync_with_ledger(ledger, lake, "orders"), sync_with_ledger(ledger, lake, "orders")) == (1, 0)
    assert sorted(read(lake, "orders"), key=lambda one: one.origin) == [a_discard(0, 1), a_discard(1), a_discard(2)]

    backup = Ledger(f"sqlite:///{tmp_path / 'backup.sqlite'}")
    backup.discards.add("orders", [replace(a_discard(1), discarded_by="ann"), a_discard(9, 2)])
    assert sync_with_ledger(backup, lake, "orders") == 1, "a ledger that knows less removes nothing"
    assert {(one.origin.offset, one.discarded_by) for one in backup.discards.list_for_stream("orders")} == {
        (0, "bob"),
        (1, "ann"),
        (2, "bob"),
        (9, "bob"),
    }
    assert [one.origin.offset for one in read(lake, "orders")][-1] == 9


def test_a_row_that_was_written_twice_counts_once(ledger: Ledger, lake: Lake) -> None:
    ledger.discards.add("orders", [a_discard(1)])
    sync_with_ledger(ledger, lake, "orders")
    again = pa.Table.from_pylist([discards_table._build_row(a_discard(1))])
    write_deltalake(lake.build_table_path("orders", "discards"), again, mode="append")
    assert read(lake, "orders") == [a_discard(1)]
    assert sync_with_ledger(ledger, lake, "orders") == 0


@pytest.mark.parametrize("name", ["discards", "erasures"])
def test_two_that_add_a_row_at_once_add_it_once(
    ledger: Ledger, lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Maintenance holds no lease: the row of an act that was under way was in the table twice."""
    sync = {"discards": sync_with_ledger, "erasures": erasures_table.sync_with_ledger}[name]
    for number in range(2):
        ledger.discards.add("orders", [a_discard(number)])
        ledger.erasures.add(Erasure("orders", f"digest {number}", "asked for", "ann", NOON))
        added: list[int] = []

        def add_between(table: DeltaTable, rows: pa.Table, added: list[int] = added) -> bool:
            monkeypatch.undo()
            added.append(sync(ledger, lake, "orders"))
            return append_at(table, rows)

        monkeypatch.setattr(delta_rs_writes, "append_at", add_between)
        added.append(sync(ledger, lake, "orders"))
        assert added == [1, 0], "the second had looked before the first wrote"
        assert DeltaTable(lake.build_table_path("orders", name)).to_pyarrow_table().num_rows == number + 1


@pytest.mark.slow
@pytest.mark.parametrize("repaired_by", ["a decision", "the next who gives up", "maintenance", "nobody, died after"])
def test_a_rebuilt_ledger_knows_who_gave_up_what_wherever_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired_by: str
) -> None:
    """It reported discarded records as parked, and a later correction was accepted."""
    world = World(tmp_path)
    world.write()
    with pytest.MonkeyPatch.context() as patch:
        FailingSync(discards_table, "after 2" if "died" in repaired_by else "before 2", patch)
        with pytest.raises(TemporaryError, match="killed"):
            _discard(world.ledger, world.lake, STREAM, parked(2), BY_ANN)
    [known] = world.ledger.discards.list_for_stream("orders")
    if repaired_by == "a decision":
        assert discards_table.read_current_state(work_of(world.ledger, world.lake)) == {
            discards_table.SEEN: to_microseconds(known.discarded_at)
        }, "it rests on what the lake has from now on"
    elif repaired_by == "the next who gives up":
        assert _discard(world.ledger, world.lake, STREAM, parked(2), BY_ANN) == (0, 1)
    elif repaired_by == "maintenance":
        monkeypatch.setattr(maintenance, "select_tables", lambda _: [])  # they need Spark
        maintenance.maintain(work_of(world.ledger, world.lake), None, datetime.now(UTC), dry_run=False)
    rebuilt = Ledger(f"sqlite:///{tmp_path / 'rebuilt.sqlite'}")
    said: list[str] = []
    rebuilding.rebuild_from_lake(
        rebuilt, world.lake, KAFKA, STREAM, (), lambda line: said.append(str(line)), dry_run=False
    )
    assert rebuilt.discards.list_for_stream("orders") == [known]
    assert "1 records were discarded" in said
    assert rebuilt.discards.read_last_discard_time("orders") == known.discarded_at


def test_nothing_is_abandoned_in_a_lake_whose_folder_is_gone(tmp_path: Path) -> None:
    """The table would be all that a lake holds which was recreated there."""
    world = World(tmp_path)
    with world.ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE slices SET attempt = 1")
    gone = Lake(str(tmp_path / "elsewhere"))
    with pytest.raises(DependencyUnavailableError, match=r"folder .* is not there"):
        _discard(world.ledger, gone, STREAM, parked(2), BY_ANN)
    assert world.ledger.discards.list_for_stream("orders") == []
    assert not Path(gone.root).exists()
