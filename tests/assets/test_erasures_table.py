"""What was erased is known to a ledger that is rebuilt from the lake, wherever an erasure died; and what is retired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dev.planted import plant
from highwater.assets import erasures_table, publication_log, raw
from highwater.assets.erasures_table import read, sync_with_ledger
from highwater.assets.work import Work
from highwater.declaration import Accepted, Maintenance, Stream
from highwater.erasing import BY_AGE, ErasedCounts, Erasure, RecordedErasure, compute_digest
from highwater.errors import ConfigurationError, DependencyUnavailableError, TemporaryError
from highwater.orchestration.operations import erasing, maintenance, rebuilding
from highwater.orchestration.operations.erasing import ErasureRequest
from highwater.orchestration.operations.rebuilding import RebuiltPlans
from highwater.resources.delta_rs_writes import create
from highwater.resources.lake import DELETION_VECTORS, Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.restoring import restore_plans
from highwater.slices import OffsetRange
from tests.helpers.erasure_commits import FakeErasureCommits
from tests.helpers.failing_sync import FailingSync
from tests.helpers.world import FIRST, NOON, RETRIED, STREAM, World, slice_, write_world

# Seconds of processor each.
pytestmark = pytest.mark.slow

NOTHING = cast("Any", None)
KAFKA = cast("Any", SimpleNamespace(list_group_names=list))
O5 = compute_digest(b"o5")
# Of the world: what was rejected of the first slice, and what of it came back through the tier.
TAKEN = {FIRST.key: {0: [(2, 3), (4, 5)]}, RETRIED.key: {0: [(0, 1), (2, 4)]}}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return write_world(tmp_path, monkeypatch)


def fresh(world: World, known: Sequence[str] = (), stream: Stream = STREAM) -> tuple[Ledger, RebuiltPlans]:
    """A ledger that was rebuilt from the lake of the world."""
    made = Ledger(f"sqlite:///{Path(world.lake.root).parent / 'rebuilt.sqlite'}")
    return made, rebuilding.rebuild_from_lake(made, world.lake, KAFKA, stream, known, lambda _: None, dry_run=False)


def taken(ledger: Ledger) -> dict[str, Any]:
    """What was erased of slices, as plain numbers."""
    found = ledger.erasures.read_for_slices([FIRST.key, RETRIED.key])
    return {k: {p: [(r.start, r.end) for r in it] for p, it in one.places.items()} for k, [one] in found.items()}


def test_the_table_follows_the_ledger_and_only_grows(tmp_path: Path) -> None:
    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    assert (sync_with_ledger(ledger, lake, "orders"), read(lake, "orders")) == (0, [])
    first = ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    ledger.erasures.add(Erasure("others", O5, "asked for", "ann", NOON))
    assert (sync_with_ledger(ledger, lake, "orders"), sync_with_ledger(ledger, lake, "orders")) == (1, 0)
    places = {0: [OffsetRange(2, 3), OffsetRange(9, 12)], 3: [OffsetRange(0, 1)]}
    ledger.erasures.begin(first, [ErasedCounts("a", places, {"raw": 5, "events": 1}), ErasedCounts("b", {})])
    assert sync_with_ledger(ledger, lake, "orders") == 2
    done = NOON + timedelta(microseconds=1)
    ledger.erasures.mark_done(["a"], O5, done)
    assert sync_with_ledger(ledger, lake, "orders") == 1
    erasure = Erasure("orders", O5, "asked for", "ann", NOON)
    slices = {"a": ErasedCounts("a", places, {"raw": 5, "events": 1}, done), "b": ErasedCounts("b", {})}
    assert read(lake, "orders") == [RecordedErasure(erasure, slices)]

    other = Ledger(f"sqlite:///{tmp_path / 'other.sqlite'}")
    other.erasures.add(Erasure("orders", compute_digest(b"o6"), "asked for", "bob", NOON + timedelta(days=1)))
    assert sync_with_ledger(other, lake, "orders") == 1, "a ledger that knows less removes nothing"
    assert [one.erasure.erased_by for one in read(lake, "orders")] == ["ann", "bob"]
    for _ in range(2):
        restore_plans(other.database, [], [], {}, [], {}, erasures=read(lake, "orders"))
    assert [(one.digest, one.erased_by) for one in other.erasures.list_for_stream("orders")] == [
        (compute_digest(b"o6"), "bob"),
        (O5, "ann"),
    ]
    assert {key: replace(one, number=0) for key, [one] in other.erasures.read_for_slices(["a", "b"]).items()} == slices
    assert sync_with_ledger(other, lake, "orders") == 0


def test_a_table_with_deletion_vectors_gets_no_rows(tmp_path: Path) -> None:
    """A row that somebody deleted that way is in its file as before."""
    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    properties = {DELETION_VECTORS: "true"}
    create(lake.build_table_path("orders", "erasures"), erasures_table.build_schema(), configuration=properties)
    ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    with pytest.raises(ConfigurationError, match="has deletion vectors"):
        sync_with_ledger(ledger, lake, "orders")


def test_readers_of_records_sync_only_erasures_of_keys(tmp_path: Path) -> None:
    """Expired rows are one entry a slice, for ever."""
    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    number = ledger.erasures.add(Erasure("orders", BY_AGE, "retention", "maintenance", NOON))
    ledger.erasures.begin(number, [ErasedCounts(f"s{n}", {}, {"aged": 1}) for n in range(3)])
    ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    assert sync_with_ledger(ledger, lake, "orders", of_keys=True) == 1
    assert [one.erasure.digest for one in read(lake, "orders", of_keys=True)] == [O5]
    assert sync_with_ledger(ledger, lake, "orders") == 1 + 3
    assert sync_with_ledger(ledger, lake, "orders", of_keys=True) == 0
    assert len(read(lake, "orders")) == 2


# The table follows after the erasure is in the ledger, after what each slice loses is, and when all of it is done.
POINTS = ["before 1", "before 2", "after 2", "raw", "rejects", "before 3", ""]


@pytest.mark.parametrize("point", POINTS)
def test_wherever_an_erasure_dies_the_lake_knows_what_was_removed_and_nothing_that_was_not_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A rebuilt ledger forgot erasures: what they had removed was reported as loss, and came back when it was read."""
    for name in ("events", "rejects"):
        counts = world.slice_commits[name][FIRST.key].counts
        world.alter_slice_commit(name, FIRST, counts={**counts, "rejects_malformed": 1, "rejects_unresolved": 1})
    stored = FakeErasureCommits(world, monkeypatch)
    stored.dies_after = point
    FailingSync(erasures_table, point, monkeypatch)
    asked = ErasureRequest(O5, dry_run=False, by="ann", because="asked for")

    def erase(ledger: Ledger) -> None:
        work = Work(STREAM, [], NOTHING, world.lake, ledger, NOTHING, lambda _: None)
        erasing.erase_key(work, None, asked, datetime.now(UTC))

    if point:
        with pytest.raises(TemporaryError, match="killed"):
            erase(world.ledger)
        stored.dies_after = ""
    else:
        erase(world.ledger)
    rebuilt, found = fresh(world)
    gone = not world.of("raw", key=b"o5")
    assert gone == (point not in POINTS[:3])
    known = {(one.digest, one.erased_at) for one in world.ledger.erasures.list_for_stream("orders")}
    assert {(one.digest, one.erased_at) for one in rebuilt.erasures.list_for_stream("orders")} == (
        set() if point == "before 1" else known
    )
    assert taken(rebuilt) == ({} if point in POINTS[:2] else TAKEN)
    open_ = point in POINTS[2:6]
    assert any("they are not done: erase the keys again" in line for line in found.lines) == open_
    world.ledger = rebuilt
    if open_ or not gone:
        erase(rebuilt)
    assert taken(rebuilt) == TAKEN or len(rebuilt.erasures.read_for_slices([FIRST.key])[FIRST.key]) > 1
    assert not world.of("raw", key=b"o5")
    gaps = world.check_slices()["gaps_explained"]
    assert [gaps[key].passed for key in (FIRST.key, RETRIED.key)] == [True, True]
    assert (gaps[FIRST.key].numbers["erased"], gaps[RETRIED.key].numbers["erased"]) == (2, 3)


def test_without_the_table_a_rebuilt_ledger_takes_what_was_erased_for_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail; and what a check finds out later reaches the table by maintenance."""
    for name in ("events", "rejects"):
        counts = world.slice_commits[name][FIRST.key].counts
        world.alter_slice_commit(name, FIRST, counts={**counts, "rejects_malformed": 1, "rejects_unresolved": 1})
    FakeErasureCommits(world, monkeypatch)
    work = Work(STREAM, [], NOTHING, world.lake, world.ledger, KAFKA, lambda _: None)
    erasing.erase_key(work, None, ErasureRequest(O5, dry_run=False, by="ann", because="asked for"), datetime.now(UTC))
    with monkeypatch.context() as patched:
        patched.setattr(erasures_table, "read", lambda *_: [])
        forgetful, _ = fresh(world)
    known, world.ledger = world.ledger, forgetful
    assert {FIRST.key, RETRIED.key} <= {*world.red()["gaps_explained"]}
    number = known.erasures.list_for_stream("orders")[0].number
    later = slice_(7, p0=(50, 60))
    known.erasures.record_excluded(number, later.key, {0: [OffsetRange(51, 52)]}, NOON)
    monkeypatch.setattr(maintenance, "_maintain_table", lambda task: task)
    maintenance.maintain(work, None, datetime.now(UTC), dry_run=True)
    assert later.key not in read(world.lake, "orders")[0].slices
    maintenance.maintain(work, None, datetime.now(UTC), dry_run=False)
    assert read(world.lake, "orders")[0].slices[later.key].places == {0: [OffsetRange(51, 52)]}


def test_erasures_reach_the_lake_before_the_slice_is_committed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure that died before its first step is in force all the same: runs leave its records out."""
    world.ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    monkeypatch.setattr(
        raw, "_build_literal_map", lambda _: (_ for _ in ()).throw(TemporaryError("no Spark", remedy="none"))
    )
    work = Work(STREAM, [], NOTHING, world.lake, world.ledger, NOTHING, lambda _: None)
    with pytest.raises(TemporaryError, match="no Spark"):
        raw._without_erased(work, NOTHING)
    assert [one.erasure.digest for one in read(world.lake, "orders")] == [O5]


def test_keys_that_dagster_does_not_hold_are_retired_as_maintenance_would(tmp_path: Path) -> None:
    """Without it repair adds every key that was ever retired."""
    world = World(tmp_path, copies=4)
    world.write()
    stream = replace(STREAM, maintenance=Maintenance(live_slices=2))
    newest = {RETRIED.key, world.second.key}  # by the time of their plan, then by key
    old = [key for key in world.keys if key not in newest]
    del world.slice_commits["rejects"][old[1]]
    world.write()
    ledger, found = fresh(world, known=[old[0]], stream=stream)
    assert found.retired == [old[2], old[3]], "not the one that is live, nor the one that is not whole"
    assert ledger.retired.list_retired(world.keys) == {*found.retired}
    assert f"2 keys are retired: {old[2]} .. {old[3]}" in found.lines
    publishing = replace(stream, publishes=Accepted("orders.accepted"))
    assert rebuilding.read_plans_from_lake(world.lake, KAFKA, publishing, []).retired == [], "none of them is sent"


def test_a_stream_that_has_published_can_be_rebuilt(tmp_path: Path) -> None:
    """The table of the batch that is under way has no commit record of a slice, and names slices."""
    import pyarrow as pa
    from deltalake import write_deltalake

    world = World(tmp_path, copies=2)
    world.write()
    plant(world.lake.build_table_path("orders", publication_log.TABLE), publication_log.build_schema().empty_table())
    batch = publication_log.BatchUnderWay(3, "orders.accepted", "id", 0, {FIRST.key: 2})
    rows = pa.Table.from_pylist([{"batch": batch.to_json()}], publication_log.build_sending_schema())
    write_deltalake(world.lake.build_table_path("orders", publication_log.SENDING), rows)
    publishing = replace(STREAM, publishes=Accepted("orders.accepted"), maintenance=Maintenance(live_slices=1))
    assert rebuilding.read_plans_from_lake(world.lake, KAFKA, publishing, []).retired == []


def test_a_ledger_that_was_restored_learns_what_its_backup_lacks(world: World, tmp_path: Path) -> None:
    number = world.ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    places = {0: [OffsetRange(2, 3)]}
    unknown = slice_(77).key
    world.ledger.erasures.begin(number, [ErasedCounts(FIRST.key, places, {"raw": 1}), ErasedCounts(unknown, {})])
    sync_with_ledger(world.ledger, world.lake, "orders")
    world.ledger.erasures.mark_done([FIRST.key], O5, NOON)
    sync_with_ledger(world.ledger, world.lake, "orders")
    backup, _ = fresh(world)
    with backup.database.writing() as connection:
        for table in ("erased_slices", "erasures"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    assert backup.erasures.list_for_stream("orders") == []
    assert sync_with_ledger(backup, world.lake, "orders") == 0
    [one] = backup.erasures.list_recorded("orders")
    assert (one.erasure.digest, one.erasure.erased_by) == (O5, "ann")
    assert {key: it.done_at for key, it in one.slices.items()} == {FIRST.key: NOON}, "of slices that it knows"


def test_erasures_done_only_in_the_table_are_not_rewritten(world: World) -> None:
    """A ledger from a backup holds it as begun."""
    number = world.ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    world.ledger.erasures.begin(number, [ErasedCounts(FIRST.key, {}, {}, NOON)])
    sync_with_ledger(world.ledger, world.lake, "orders")
    with world.ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE erased_slices SET done_at = NULL")
    assert [sync_with_ledger(world.ledger, world.lake, "orders") for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("what", ["maintain", "erase"])
def test_a_lake_whose_folder_is_gone_is_not_recreated(world: World, what: str) -> None:
    world.ledger.erasures.add(Erasure("orders", O5, "asked for", "ann", NOON))
    with world.ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE slices SET attempt = 1")
    root = Path(world.lake.root)
    root.rename(root.with_name("elsewhere"))
    work = Work(STREAM, (), NOTHING, world.lake, world.ledger, NOTHING, lambda _: None)
    asked = ErasureRequest(O5, dry_run=False, by="ann", because="asked for")
    acts: dict[str, Callable[[], object]] = {
        "maintain": lambda: maintenance.maintain(work, None, datetime.now(UTC), dry_run=False),
        "erase": lambda: erasing.erase_key(work, None, asked, datetime.now(UTC)),
    }
    with pytest.raises(DependencyUnavailableError, match=r"folder .* is not there"):
        acts[what]()
    assert not root.exists()
