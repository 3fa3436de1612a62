"""A key that was erased is nowhere, comes back by nothing, and leaves no check red."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from click.testing import CliRunner

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import erasing, publication_log, rejects
from highwater.assets.erasing import find
from highwater.assets.work import Work
from highwater.declaration import Accepted
from highwater.envelope import Origin
from highwater.erasing import ErasedCounts, Erasure, compute_digest, compute_erasure_times, subtract_counts
from highwater.errors import ConfigurationError, TemporaryError, UnbalancedError
from highwater.orchestration.checking.completeness import compare_with_topic
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations import erasing as operation
from highwater.orchestration.operations import rebuilding
from highwater.orchestration.operations.erasing import ErasureRequest, _sort_by_version, erase_key
from highwater.orchestration.reporting.audit import audit
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import locate
from highwater.orchestration.sensing.run_history import read_past_runs
from highwater.orchestration.sensing.run_requests import list_in_flight
from highwater.reclaims import Reclaim
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange
from tests.helpers.erasure_commits import FakeErasureCommits
from tests.helpers.foreign_records import enveloped
from tests.helpers.support import Bench, Message, order_message
from tests.helpers.world import FIRST, NOON, RETRIED, STREAM, FakeRecord, World, slice_, write_world

# Seconds of processor each.
pytestmark = pytest.mark.slow

NOW = datetime.now(UTC)
O1 = hashlib.sha256(b"o1").hexdigest()


# Numbers and the record


def test_a_decision_without_some_records_adds_up() -> None:
    counts = {"raw": 10, "events": 5, "rejects": 3, "tombstones": 1, "superseded": 1, "rejects_malformed": 3, "x": 7}
    found = subtract_counts("a", counts, raw=4, tombstones=1, events=1, rejects={"malformed": 1}, rules={})
    assert found == {
        "raw": 6, "events": 4, "rejects": 2, "tombstones": 0, "superseded": 0, "rejects_malformed": 2, "x": 7
    }  # fmt: skip


def test_a_decision_without_some_records_has_fewer_rejects_of_their_rules() -> None:
    """A rule that was renamed between decision and rejects stops no erasure."""
    counts = {"raw": 6, "rejects": 6, "rejects_invalid": 6, "rule_amount_positive": 4, "rule_sort_is_short": 2}
    rules = {"amount_positive": 1, "sort_is_short": 3, "renamed": 1}
    found = subtract_counts("a", counts, raw=5, tombstones=0, events=0, rejects={"invalid": 5}, rules=rules)
    left = {"rejects": 1, "rejects_invalid": 1, "rule_amount_positive": 3, "rule_sort_is_short": 0}
    assert {name: found[name] for name in found if name.startswith("r") and name != "raw"} == left


@pytest.mark.parametrize(
    ("raw", "events", "rejects", "table"),
    [(11, 0, {}, "raw"), (6, 6, {}, "events"), (4, 0, {"malformed": 4}, "rejects")],
)
def test_an_erasure_that_exceeds_its_decision_names_the_table(
    raw: int, events: int, rejects: dict[str, int], table: str
) -> None:
    counts = {"raw": 10, "events": 5, "rejects": 3, "tombstones": 1, "superseded": 1, "rejects_malformed": 3}
    with pytest.raises(UnbalancedError, match=f"more {table} would be erased") as caught:
        subtract_counts("a", counts, raw=raw, tombstones=0, events=events, rejects=rejects, rules={})
    assert f"another writer changed {table}: run highwater audit STREAM" in str(caught.value.remedy)


def test_a_key_is_erased_up_to_its_last_erasure() -> None:
    made = [Erasure("orders", digest, "", "", NOON + timedelta(days=day)) for digest, day in (("a", 2), ("a", 1))]
    assert compute_erasure_times(made) == {"a": NOON + timedelta(days=2)}
    assert compute_digest(b"o1") == O1


def test_the_ledger_keeps_what_was_begun_and_what_is_done(tmp_path: Path) -> None:
    erasures = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}").erasures
    number = erasures.add(Erasure("orders", O1, "asked for", "somebody", NOON))
    places = {0: [OffsetRange(3, 5), OffsetRange(9, 10)], 2: [OffsetRange(0, 1)]}
    erasures.begin(number, [ErasedCounts("a", places, {"raw": 4, "events": 1})])
    erasures.begin(number, [ErasedCounts("a", {}, {})])
    [stored] = erasures.read_for_slices(["a", "b"])["a"]
    assert stored == ErasedCounts("a", places, {"raw": 4, "events": 1}, None, number)
    erasures.mark_done(["a"], O1, NOON)
    assert erasures.read_for_key("orders", O1)["a"] == [replace(stored, done_at=NOON)]
    assert erasures.read_for_key("others", O1) == {}
    assert [(one.reason, one.erased_by, one.erased_at) for one in erasures.list_for_stream("orders")] == [
        ("asked for", "somebody", NOON)
    ]


@pytest.mark.parametrize(
    "asked",
    [
        ErasureRequest("o1"),
        ErasureRequest(O1.upper()),
        ErasureRequest(O1, dry_run=False),
        ErasureRequest(O1, dry_run=False, by="me"),
    ],
)
def test_incomplete_erasure_requests_are_refused(asked: ErasureRequest) -> None:
    with pytest.raises(ConfigurationError):
        asked.check_complete()


# Looks, without a JVM


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return write_world(tmp_path, monkeypatch)


def test_every_row_of_a_key_is_found(world: World) -> None:
    found = find(world.lake, STREAM, O1)
    second = world.second.key
    assert found.places == {FIRST.key: [(0, 0), (0, 3)], second: [(0, 6)]}
    assert found.rows[FIRST.key] == {"raw": 2, "tombstones": 1, "events": 1}, "current has the version of the second"
    assert found.rows[second] == {"raw": 1, "tombstones": 0, "events": 1, "current": 1}
    o5 = find(world.lake, STREAM, compute_digest(b"o5")).rows
    assert o5[FIRST.key] == {
        "raw": 2, "tombstones": 0, "rejects": 2, "rejects_malformed": 1, "rejects_unresolved": 1, "dlq": 2
    }  # fmt: skip
    assert o5[RETRIED.key] == {"raw": 3, "tombstones": 0, "events": 1, "current": 1}


def test_a_dry_run_erases_nothing(world: World) -> None:
    nothing = cast("Any", None)
    lines: list[str] = []
    work = Work(STREAM, [], nothing, world.lake, world.ledger, nothing, lines.append)
    found = erase_key(work, None, ErasureRequest(O1), NOW)
    assert found.table[1] == [[FIRST.key, "2", "1", "0", "0", "0"], [world.second.key, "1", "1", "0", "0", "1"]]
    assert lines[1:] == ["2 slices hold the key. A dry run: nothing was erased"]
    assert world.ledger.erasures.list_for_stream("orders") == []


def test_slices_under_way_are_left_for_later(world: World) -> None:
    """One that a run works on, one that a run may have begun to read before, and one that is decided and not whole."""
    world.ledger.add([slice_(3, p0=(90, 91))])
    world.alter_slice_commit("rejects", FIRST, attempt=1)
    world.write()
    nothing, unread = cast("Any", None), slice_(3).key
    work = Work(STREAM, [], nothing, world.lake, world.ledger, nothing, print)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", [*world.keys, unread])
        for key in (world.second.key, unread):
            tags = {"dagster/partition": key, "highwater/stream": "orders"}
            instance.add_run(dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))
        found = erase_key(work, instance, ErasureRequest(O1), NOW)
    assert found.later == {
        FIRST.key: "it is decided, and not in rejects yet",
        world.second.key: "a run works on it",
        unread: "a run reads it",
    }


def work_of(world: World) -> Work:
    nothing = cast("Any", None)
    return Work(STREAM, [], nothing, world.lake, world.ledger, nothing, print)


def act_after(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], object]) -> None:
    """Let something happen once after a step of the look that precedes the record of an erasure."""
    acts, take_step = [act], getattr(operation, step)

    def step_and_act(*arguments: Any) -> Any:
        found = take_step(*arguments)
        while acts:
            acts.pop()()
        return found

    monkeypatch.setattr(operation, step, step_and_act)


@pytest.mark.parametrize("at", [NOON, NOW + timedelta(hours=1)], ids=["a record", "a producer's clock runs ahead"])
def test_a_slice_that_was_read_between_look_and_record_is_erased_too(
    world: World, monkeypatch: pytest.MonkeyPatch, at: datetime
) -> None:
    """Its run knew of no erasure, and the erasure of no such rows: the key stayed, and the command succeeded."""
    for name in ("events", "rejects"):
        by_reason = {"rejects_malformed": 1, "rejects_unresolved": 1}
        world.alter_slice_commit(name, FIRST, counts={**world.slice_commits[name][FIRST.key].counts, **by_reason})
    FakeErasureCommits(world, monkeypatch)
    late = slice_(3, p0=(90, 91))
    world.ledger.add([late])

    def read() -> None:
        world.read(late, 0, 0, "o5", timestamp=at)
        world.slice_commits["raw"][late.key] = SliceCommit(late, 1, 1)
        world.write()

    act_after(monkeypatch, "find", read)
    asked = ErasureRequest(compute_digest(b"o5"), dry_run=False, by="somebody", because="asked for")
    found = erase_key(work_of(world), None, asked, NOW)
    assert late.key in found.done
    assert [row["slice"] for row in world.of("raw", key=b"o5")] == []
    moments = sorted({NOW, max(NOW, at.replace(microsecond=at.microsecond // 1000 * 1000))})
    assert [one.erased_at for one in world.ledger.erasures.list_for_stream("orders")] == moments


def test_a_slice_whose_run_began_between_look_and_record_is_left_for_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread, seen = slice_(3, p0=(90, 91)), world.second.key
    world.ledger.add([slice_(3, p0=(90, 91))])
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", [*world.keys, unread.key])

        def begin() -> None:
            for key in (unread.key, seen):
                tags = {"dagster/partition": key, "highwater/stream": "orders"}
                instance.add_run(dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))

        act_after(monkeypatch, "list_versions", begin)
        asked = ErasureRequest(compute_digest(b"o9"), dry_run=False, by="somebody", because="asked for")
        found = erase_key(work_of(world), instance, asked, NOW)
    assert found.later == {unread.key: "a run reads it"}, "rows that are read again rest on the erasure"


@pytest.mark.parametrize(
    ("postponed", "covering"),
    [("first", {"second"}), ("second", set[str]()), ("first, not decided", {"second"})],
)
def test_newer_events_stay_while_older_ones_are_left_for_later(
    world: World, postponed: str, covering: set[str]
) -> None:
    """Once the newest event was erased before an older one, `current` had the older one until the next erasure."""
    slices = {"first": FIRST, "second": world.second}
    one = slices[postponed.partition(",")[0]]
    if postponed.endswith("not decided"):
        del world.slice_commits["events"][one.key]
        world.rows["events"] = [row for row in world.rows["events"] if row["slice"] != one.key]
        world.write()
    nothing = cast("Any", None)
    work = Work(STREAM, [], nothing, world.lake, world.ledger, nothing, print)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", world.keys)
        tags = {"dagster/partition": one.key, "highwater/stream": "orders"}
        instance.add_run(dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))
        found = erase_key(work, instance, ErasureRequest(O1), NOW)
        unversioned = replace(work, stream=replace(STREAM, version=None, first_version=None, transitions=None))
        assert set(erase_key(unversioned, instance, ErasureRequest(O1), NOW).later) == {one.key}
    assert set(found.later) == {one.key, *(slices[name].key for name in covering)}
    assert all("older events of the key" in found.later[slices[name].key] for name in covering)


def test_the_newest_events_are_erased_last() -> None:
    """A process that died after the first of two commits left the older event in `current`."""
    versions = {"a": [3, 9], "b": [5], "c": [1, 2]}
    assert _sort_by_version({"a", "b", "c", "without events"}, versions) == ["without events", "c", "b", "a"]


def test_slices_that_are_being_sent_are_left_for_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that goes on, and by one that broke off."""
    stream = replace(STREAM, publishes=Accepted("orders.accepted"))
    nothing, lines = cast("Any", None), list[str]()
    work = Work(stream, [], nothing, world.lake, world.ledger, nothing, lines.append)
    monkeypatch.setattr(publication_log, "list_sending_slices", lambda *_: {FIRST.key, RETRIED.key})
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", world.keys)
        tags = {"dagster/partition": world.second.key, "highwater/stream": "orders", "highwater/purpose": "publish"}
        instance.add_run(dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))
        assert list_in_flight(read_past_runs(instance, stream, world.keys, NOW)) == set()
        found = erase_key(work, instance, ErasureRequest(O1), NOW)
        assert found.later == {
            FIRST.key: "its publication broke off, materialise orders/published of it first",
            world.second.key: "a run works on it",
        }
        erase_key(
            work,
            instance,
            ErasureRequest(compute_digest(b"o9"), dry_run=False, by="somebody", because="asked for"),
            NOW,
        )
    assert "orders.accepted" in lines[-1]


@dataclass(frozen=True)
class FakeSentRecord(FakeRecord):
    """A record with what an erasure knows it by."""

    sent: bytes = b"o1"
    at: datetime = NOON

    def key(self) -> bytes:
        return self.sent

    def timestamp(self) -> tuple[int, int]:
        return 1, round(self.at.timestamp() * 1000)


def test_gaps_of_erased_records_are_no_gaps(world: World) -> None:
    """Evidence of the other gaps was kept before; that raw lost rows is an error of the check until it is recorded."""
    assert world.red() == {}
    for place in ((0, 0), (0, 3)):
        world.rows["raw"].remove(world.at("raw", FIRST, place))
    assert "gaps_explained" in world.red([FIRST.key])
    number = world.ledger.erasures.add(Erasure("orders", O1, "asked for", "somebody", NOW))
    world.ledger.erasures.begin(number, [ErasedCounts(FIRST.key, {0: [OffsetRange(0, 1), OffsetRange(3, 4)]})])
    found = world.check_slices([FIRST.key])["gaps_explained"][FIRST.key]
    assert (found.passed, found.numbers["erased"], found.numbers["gaps"]) == (True, 2, 2)
    [reported] = locate(world.ledger, cast("Any", world.topics), world.lake, STREAM, "orders", 0, 3)
    assert (reported.end, reported.text) == ("erased", f"by somebody at {NOW}: asked for")
    [reported] = locate(world.ledger, cast("Any", world.topics), world.lake, STREAM, "orders", 0, 5)
    assert reported.end == "gap"
    erased = f"erased: 2 records, by somebody at {NOW:%Y-%m-%d %H:%M} UTC: asked for"
    assert erased in explain(world.ledger, world.lake, STREAM, FIRST.key, None).lines


@pytest.mark.parametrize(("key", "late", "passed"), [(b"o1", -1, True), (b"o1", 1, False), (b"o2", -1, False)])
def test_a_record_that_was_erased_before_it_was_read_is_reported_by_key_and_time(
    world: World, key: bytes, late: int, passed: bool
) -> None:
    world.ledger.erasures.add(Erasure("orders", O1, "asked for", "somebody", NOON))
    world.rows["raw"].remove(world.at("raw", FIRST, (0, 0)))
    read = world.topics.read

    def sent(*arguments: Any, **changes: Any) -> Any:
        for one in read(*arguments, **changes):
            yield FakeSentRecord(one.place, sent=key, at=NOON + timedelta(seconds=late))

    world.topics.read = sent  # type: ignore[method-assign]
    found = world.check_slices([FIRST.key])["gaps_explained"][FIRST.key]
    assert found.passed is passed
    stored = world.ledger.erasures.read_for_slices([FIRST.key])
    assert [one.places for one in stored.get(FIRST.key, ())] == ([{0: [OffsetRange(0, 1)]}] if passed else [])


@pytest.mark.parametrize(("origin_ms", "passed"), [(-1, True), (1, False)])
def test_a_copy_that_was_sent_after_the_erasure_is_reported_by_the_time_of_its_original(
    world: World, origin_ms: int, passed: bool
) -> None:
    """Raw leaves it out, so the check must know why."""
    world.ledger.erasures.add(Erasure("orders", O1, "asked for", "somebody", NOON))
    world.rows["raw"].remove(world.at("raw", RETRIED, (0, 2)))
    read, noon_ms = world.topics.read, round(NOON.timestamp() * 1000)
    headers = [{"key": name, "value": value} for name, value in enveloped(noon_ms + origin_ms)]

    def sent(*arguments: Any, **changes: Any) -> Any:
        for one in read(*arguments, **changes):
            yield FakeSentRecord(one.place, {"headers": headers}, at=NOON + timedelta(hours=1))

    world.topics.read = sent  # type: ignore[method-assign]
    found = world.check_slices([RETRIED.key])["gaps_explained"][RETRIED.key]
    assert found.passed is passed


def version_of(world: World, name: str) -> int:
    table = world.lake.open_stream_table("orders", name)
    assert table is not None
    return int(table.version())


@pytest.mark.parametrize("dies_after", ["", "raw", "events", "rejects"])
def test_nothing_is_judged_again_for_what_others_did_since(
    world: World, monkeypatch: pytest.MonkeyPatch, dies_after: str
) -> None:
    """A record of the first slice was reclaimed and not reprocessed; the tier's slice saw a version long gone."""
    for one, more in ((RETRIED, {"events_seen": 0}), (FIRST, {"rejects_malformed": 1, "rejects_unresolved": 1})):
        for name in ("events", "rejects"):
            world.alter_slice_commit(name, one, counts={**world.slice_commits[name][one.key].counts, **more})
    stored = FakeErasureCommits(world, monkeypatch)
    reclaim = Reclaim(Origin("orders", 0, 0, 2), FIRST.key, 1, "a fixed rule", "somebody", NOON)
    world.ledger.reclaims.add("orders", [reclaim])
    now = version_of(world, "events")
    nothing = cast("Any", None)
    work = Work(STREAM, [], nothing, world.lake, world.ledger, nothing, print)
    digest = compute_digest(b"o5")
    asked = ErasureRequest(digest, dry_run=False, by="somebody", because="asked for")
    if dies_after:
        stored.dies_after = dies_after
        with pytest.raises(TemporaryError, match="killed"):
            erase_key(work, None, asked, NOW)
        stored.dies_after = ""
    erase_key(work, None, asked, NOW)
    assert [name for name in stored.names if name != "forgotten"] == ["raw", "events", "rejects"]
    assert stored.names.index("forgotten") == 1, (
        "before the events go: a run that dies in between knows no more of them"
    )
    decided, rejected = world.slice_commits["events"], world.slice_commits["rejects"]
    counts = decided[FIRST.key].counts
    assert "reclaims_seen" not in counts, "the next decision of the slice judges it"
    assert (counts["raw"], counts["events"], counts["rejects"], counts["tombstones"]) == (6, 5, 0, 1)
    assert (rejected[FIRST.key].rows, rejected[FIRST.key].counts) == (0, counts)
    retried = decided[RETRIED.key].counts
    assert retried["events_seen"] >= now > 0, "a version that maintenance has not removed"
    assert (retried["events"], retried["superseded"], "reclaims_seen" in retried) == (0, 0, False)
    assert world.of("rejects", slice=FIRST.key) == []


@pytest.mark.parametrize("died", [False, True], ids=["during the erasure", "after it died"])
def test_a_slice_that_was_decided_otherwise_since_the_look_is_erased_by_its_rows(
    world: World, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    """The rows that the look had counted were subtracted from a decision that counted others, which failed for ever."""

    def decide(**reasons: int) -> None:
        world.at("rejects", FIRST, (0, 2))["reason"] = world.at("dlq", FIRST, (0, 2))["reason"] = next(iter(reasons))
        by_reason = {f"rejects_{reason}": count for reason, count in reasons.items()}
        [attempt] = world.ledger.allocate_attempts([FIRST.key]).values()
        for name in ("events", "rejects", "dlq", "current"):
            counts = {n: c for n, c in world.slice_commits[name][FIRST.key].counts.items() if "rejects_" not in n}
            world.alter_slice_commit(name, FIRST, attempt=attempt, counts={**counts, **by_reason})
        world.write()

    def decide_first(*arguments: Any) -> None:
        decide(invalid=1, unresolved=1)
        monkeypatch.setattr(operation, "erase", erasing.erase)
        if died:
            raise TemporaryError("killed", remedy="none")
        erasing.erase(*arguments)

    decide(malformed=1, unresolved=1)
    FakeErasureCommits(world, monkeypatch)
    asked = ErasureRequest(compute_digest(b"o5"), dry_run=False, by="somebody", because="asked for")
    monkeypatch.setattr(operation, "erase", decide_first)
    with pytest.raises(TemporaryError, match="killed") if died else nullcontext():
        erase_key(work_of(world), None, asked, NOW)
    if died:
        erase_key(work_of(world), None, asked, NOW)
    decided, rejected = world.slice_commits["events"][FIRST.key], world.slice_commits["rejects"][FIRST.key]
    assert (decided.counts["raw"], decided.counts["events"], decided.counts["rejects"]) == (6, 5, 0)
    assert (decided.counts["rejects_invalid"], decided.counts["rejects_unresolved"]) == (0, 0)
    assert (rejected.rows, rejected.counts) == (0, decided.counts)
    [*_, erased] = world.ledger.erasures.read_for_key("orders", asked.digest)[FIRST.key]
    assert erased.done_at is not None


@pytest.mark.parametrize("table", ["raw", "events", "rejects", "current"])
def test_an_erasure_that_leaves_a_row_of_the_key_is_no_success(
    world: World, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """It reported success although the key was still in raw, events and current: nobody looked afterwards."""
    for name in ("events", "rejects"):
        by_reason = {"rejects_malformed": 1, "rejects_unresolved": 1}
        world.alter_slice_commit(name, FIRST, counts={**world.slice_commits[name][FIRST.key].counts, **by_reason})
    FakeErasureCommits(world, monkeypatch, keeps=table)
    nothing, lines = cast("Any", None), list[str]()
    work = Work(STREAM, [], nothing, world.lake, world.ledger, nothing, lines.append)
    asked = ErasureRequest(compute_digest(b"o5"), dry_run=False, by="somebody", because="asked for")
    with pytest.raises(UnbalancedError, match=f"the erased key is still in {table} of orders"):
        erase_key(work, None, asked, NOW)
    done = world.ledger.erasures.read_for_key("orders", asked.digest).values()
    assert all(one.done_at is None for all_ in done for one in all_) == (table != "current")
    assert not any("Kafka still holds" in line for line in lines)


def test_rejects_of_another_decision_are_not_taken_for_it(world: World) -> None:
    """An erasure died, and the slice was reprocessed since: its rejects are computed then."""
    was = world.slice_commits["rejects"][FIRST.key]
    taken = ErasedCounts(FIRST.key, {}, {"raw": 2, "rejects": 2, "rejects_malformed": 1, "rejects_unresolved": 1})
    lost = {**was.counts, "raw": was.counts["raw"] - 2, "rejects": 0, "rejects_malformed": 0, "rejects_unresolved": 0}
    whole = replace(was, counts={**was.counts, "rejects_malformed": 1, "rejects_unresolved": 1})
    assert erasing._matches_without_key(replace(was, counts={**lost, "last_event_us": 7}), whole, taken)
    assert not erasing._matches_without_key(replace(was, counts={**lost, "reclaims_seen": 1}), whole, taken)
    assert not erasing._matches_without_key(replace(was, counts=lost), replace(whole, counts=lost), taken)
    assert not erasing._matches_without_key(replace(was, counts=lost), None, taken)


# All of it


@pytest.mark.slow
def test_an_erased_key_is_nowhere_and_comes_back_by_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events, rejects, tombstone and row in current; killed half-way; read again, and read for the first time."""
    bench.stream = replace(bench.stream, metrics=ORDERS.metrics)
    gone = Message(b"o1", b"no json")
    bench.send(order_message("o1", 1), order_message("o2", 1), gone, Message(b"o1", None), Message(b"o2", b"no"))
    bench.send(order_message("o1", 2, amount=3), order_message("o2", 2, amount=5), Message(b"o1", b"nor this"))
    bench.send(order_message("o1", 3))
    first, second, unread = bench.plan(0, p0=(0, 5)), bench.plan(1, p0=(5, 8)), bench.plan(2, p0=(8, 10))
    bench.materialise(first, second)
    assert bench.failing() == {}
    asked = ErasureRequest(O1, dry_run=False, by="somebody", because="asked for")

    def killed(work: Work) -> Any:
        raise TemporaryError(f"killed before {work.keys}", remedy="none")

    with monkeypatch.context() as patched:
        patched.setattr(rejects, "materialise", killed)
        with pytest.raises(TemporaryError, match="killed"):
            erase_key(bench.work(), None, asked, datetime.now(UTC))
    found = erase_key(bench.work(), None, asked, datetime.now(UTC))
    assert [*found.done] == [first.key, second.key]
    assert everywhere(bench) == {"o2"}
    assert {key: row["version"] for key, row in bench.current().items()} == {"o2": 2}
    assert [len(bench.rows(name)) for name in ("raw", "events", "rejects", "dlq")] == [3, 2, 1, 1]
    assert sum(row["events"] for row in bench.rows("metrics")) == 2
    assert bench.failing() == {}

    # Raw is read from Kafka again, where the records still are.
    bench.materialise(first, second)
    assert everywhere(bench) == {"o2"}
    bench.send(order_message("o1", 1, customer_id="c1", amount=9))
    bench.materialise(unread)
    assert [(row["partition"], row["offset"]) for row in bench.rows("raw") if row["key"] == b"o1"] == [(0, 9)]
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 1, "o2": 2}, "a new order of the key"
    assert bench.failing() == {}
    stored = bench.ledger.erasures.read_for_slices([unread.key])[unread.key]
    assert [one.places for one in stored] == [{0: [OffsetRange(8, 9)]}]
    held = compare_with_topic(bench.ledger, bench.kafka, bench.lake, bench.stream, [first, second, unread])
    assert [one.error for one in held] == [None] * 3
    page = audit(bench.ledger, bench.kafka, bench.lake, bench.stream, {}, versions=True)
    assert (page.ends.accepted, page.ends.parked, page.ends.tombstones, page.ends.produced) == (3, 1, 0, 4)
    [reported] = locate(bench.ledger, bench.kafka, bench.lake, bench.stream, bench.stream.topic, 0, 2)
    assert reported.end == "erased"

    # The ledger is lost, and knows it again from the lake: nothing comes back, and nothing is missed.
    bench.ledger = Ledger(f"sqlite:///{tmp_path / 'rebuilt.sqlite'}")
    rebuilding.rebuild_from_lake(bench.ledger, bench.lake, bench.kafka, bench.stream, [], print, dry_run=False)
    bench.materialise(first, unread)
    assert everywhere(bench) == {"o1", "o2"}
    assert {(row["partition"], row["offset"]) for row in bench.rows("raw") if row["key"] == b"o1"} == {(0, 9)}
    assert bench.failing() == {}


def everywhere(bench: Bench) -> set[str]:
    """The keys that are in any table."""
    keys = {row["key"] for name in ("events", "current") for row in bench.rows(name)}
    raw = {bytes(row["key"]).decode() for name in ("raw", "rejects") for row in bench.rows(name)}
    places = {Origin.from_row(row) for row in bench.rows("dlq")} - {
        Origin.from_row(row) for row in bench.rows("rejects")
    }
    return keys | raw | {str(place) for place in places}


def test_the_command_reports_what_it_would_erase(world: World, tmp_path: Path) -> None:
    environment = {"HIGHWATER_HOME": str(tmp_path), "DAGSTER_HOME": ""}
    by_key, by_digest = (
        CliRunner().invoke(main, ["erase", "orders", *given, "--json"], env=environment)
        for given in (("--key", "o1"), ("--digest", O1))
    )
    assert by_key.exit_code == by_digest.exit_code == 0, by_key.output
    reported = json.loads(by_key.stdout)
    assert reported == json.loads(by_digest.stdout)
    assert (reported["digest"], set(reported["rows"]), reported["erased"]) == (O1, {FIRST.key, world.second.key}, [])
    assert CliRunner().invoke(main, ["erase", "orders"], env=environment).exit_code == 2
    in_words = CliRunner().invoke(main, ["erase", "orders", "--key", "o1"], env=environment)
    assert in_words.output.endswith("nothing was erased\nto do it, add --yes --by NAME --because TEXT\n")
