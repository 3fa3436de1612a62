"""Each defect, planted into sound tables, turns the named checks red, and no other."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa

from highwater.gaps import Gaps
from highwater.plans import Loss, Publication
from highwater.slices import OffsetRange, Slice
from highwater.topic_rules import Setting
from orchestration import audit as audit_page
from orchestration import gap_checks
from orchestration.offset_queries import in_raw
from orchestration.plan_status import StreamStatus
from orchestration.unread import Ages
from resources.kafka import Kafka
from tests.world import FIRST, ID, NOON, RETRIED, STREAM, TIER, Place, World, piece

TILE, PLANNED, GAPS = "slices_tile", "offsets_as_planned", "gaps_explained"
ACCOUNTED, PUBLISHED = "offsets_accounted_for", "rejects_published"
FOLLOWS, VERSIONS = "current_follows_events", "versions_in_order"
MISSING = "no_version_missing"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes sound tables that nobody has looked at."""

    def made(copies: int = 1) -> World:
        world = World(tmp_path, copies)

        def settings(*_: object) -> dict[str, Setting]:
            return {"cleanup.policy": Setting(world.topics.cleanup_policy, "DYNAMIC_TOPIC_CONFIG")}

        monkeypatch.setattr(gap_checks, "topic_settings", settings)
        return world

    return made


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


@pytest.fixture
def looked(make: Callable[..., World]) -> World:
    """The same, whose gaps were looked at."""
    return look(make())


def look(world: World) -> World:
    world.write()
    held = in_raw(world.ledger, world.lake, STREAM, world.keys)
    found = gap_checks.gaps_explained(world.ledger, cast("Kafka", world.topics), held)
    assert all(verdict.passed for verdict in found.values())
    world.topics.reads.clear()
    return world


def test_sound_tables_turn_nothing_red_and_are_asked_of_kafka_once(looked: World) -> None:
    told = {key: kept.counts for key, kept in looked.ledger.gaps(looked.keys).items()}
    nothing = dict.fromkeys(("aborted", "markers", "markers_or_compacted", "lost", "unseen"), 0)
    assert told == {
        FIRST.key: {**nothing, "aborted": 1, "markers": 1},
        looked.second.key: nothing,
        RETRIED.key: {**nothing, "markers": 1},
    }
    assert looked.red() == {}
    assert looked.topics.reads == []


Plant = Callable[[World, Slice], object]


def drop(table: str, *places: Place) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for place in places:
            world.rows[table].remove(world.at(table, of, place))

    return plant


def double(table: str, place: Place, **changes: object) -> Plant:
    return lambda world, of: world.rows[table].append({**world.at(table, of, place), **changes})


def alter(table: str, place: Place, **changes: object) -> Plant:
    return lambda world, of: world.at(table, of, place).update(changes)


def move(table: str, place: Place, by: int) -> Plant:
    name = "offset" if table == "raw" else "origin_offset"
    return lambda world, of: world.at(table, of, place).update({name: world.at(table, of, place)[name] + by})


def prove(*tables: str, **changes: Any) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for table in tables:
            world.alter_proof(table, of, **changes)

    return plant


def prove_other_offsets(*tables: str) -> Plant:
    def plant(world: World, of: Slice) -> None:
        [low, high] = [of.ranges[0].start, of.ranges[0].end]
        prove(*tables, piece=replace(of, ranges={**of.ranges, 0: OffsetRange(low, high - 1)}))(world, of)

    return plant


def publish(attempt: int, sent: int) -> Plant:
    return lambda world, of: world.ledger.record_publication("orders", of.key, Publication(attempt, sent, NOON))


def forget(table: str) -> Plant:
    """Let the ledger lose its rows of the slice."""

    def plant(world: World, of: Slice) -> None:
        with sa.create_engine(f"sqlite:///{Path(world.lake.root).parent / 'ledger.sqlite'}").begin() as connection:
            connection.execute(sa.text(f"DELETE FROM {table} WHERE slice_key = :key"), {"key": of.key})

    return plant


EVENT, MALFORMED, TOMBSTONE, WINNER, LOSER, LONE = (0, 0), (0, 2), (0, 3), (1, 3), (1, 0), (1, 2)
TO_MARKER, FAR = 5, 10_000

DEFECTS: dict[str, tuple[Plant, set[str]]] = {
    "raw: a row is gone": (drop("raw", EVENT), {GAPS, ACCOUNTED}),
    "raw: the row of a tombstone is gone": (drop("raw", TOMBSTONE), {GAPS, ACCOUNTED}),
    "raw: a row is there twice": (double("raw", EVENT), {PLANNED, ACCOUNTED}),
    "raw: a row took the place of a marker": (move("raw", EVENT, TO_MARKER), {GAPS, ACCOUNTED}),
    "raw: a row lies outside of the slice": (move("raw", EVENT, FAR), {PLANNED, GAPS, ACCOUNTED}),
    "raw: a row is of another generation": (alter("raw", EVENT, generation=1), {PLANNED, GAPS, ACCOUNTED}),
    "raw: another key": (alter("raw", EVENT, key=b"o9"), {ACCOUNTED}),
    "raw: another time": (alter("raw", EVENT, timestamp=NOON - timedelta(1)), {ACCOUNTED}),
    "raw: a reject has another value": (alter("raw", MALFORMED, value=b"x"), {ACCOUNTED}),
    "raw: a value is gone": (alter("raw", EVENT, value=None), {ACCOUNTED}),
    "raw: the commit has other offsets": (prove_other_offsets("raw"), {PLANNED, ACCOUNTED}),
    "raw: the commit is of another topic": (
        lambda world, of: prove("raw", piece=replace(of, topic_id="B" * 22))(world, of),
        {PLANNED},
    ),
    "events: a winner is gone": (drop("events", WINNER), {ACCOUNTED, FOLLOWS}),
    "events: a row that did not win is gone": (drop("events", LOSER), {ACCOUNTED, MISSING}),
    "events: a row is there twice": (double("events", LOSER), {ACCOUNTED}),
    "events: a winner has another field": (alter("events", WINNER, amount=Decimal(99)), {FOLLOWS}),
    "events: a winner has a higher version": (alter("events", WINNER, version=7), {FOLLOWS, VERSIONS, MISSING}),
    "events: another key": (alter("events", LONE, key="o9"), {ACCOUNTED, FOLLOWS, VERSIONS}),
    "events: another origin": (move("events", LOSER, FAR), {ACCOUNTED}),
    "events: the commit has other offsets": (prove_other_offsets("events"), {ACCOUNTED}),
    "events: the commit has other rows": (prove("events", rows=4), {ACCOUNTED}),
    "rejects: a row is gone": (drop("rejects", MALFORMED), {ACCOUNTED, PUBLISHED}),
    "rejects: a row is there twice": (double("rejects", MALFORMED), {ACCOUNTED, PUBLISHED}),
    "rejects: another reason": (alter("rejects", MALFORMED, reason="invalid"), {PUBLISHED}),
    "rejects: another way": (alter("rejects", MALFORMED, next_topic=TIER), {PUBLISHED}),
    "rejects: another value": (alter("rejects", MALFORMED, value=b"x"), {ACCOUNTED}),
    "rejects: also among the events": (
        lambda world, of: double("events", EVENT, origin_offset=of.ranges[0].start + 2)(world, of),
        {ACCOUNTED},
    ),
    "rejects: the commit has other offsets": (prove_other_offsets("rejects"), {ACCOUNTED, PUBLISHED}),
    "dlq: a row is gone": (drop("dlq", MALFORMED), {PUBLISHED}),
    "dlq: a row is there twice": (double("dlq", MALFORMED), {PUBLISHED}),
    "dlq: another way": (alter("dlq", MALFORMED, next_topic=TIER), {PUBLISHED}),
    "dlq: one that was never rejected": (double("dlq", MALFORMED, origin_offset=FAR), {PUBLISHED}),
    "dlq: the slice is gone": (lambda world, of: world.proofs["dlq"].pop(of.key), {PUBLISHED}),
    "dlq: the commit has other offsets": (prove_other_offsets("dlq"), {PUBLISHED}),
    "current: a winner is gone": (drop("current", WINNER), {FOLLOWS, VERSIONS}),
    "current: a winner is there twice": (double("current", WINNER), {FOLLOWS}),
    "current: another field": (alter("current", WINNER, amount=Decimal(99)), {FOLLOWS}),
    "current: a higher version": (alter("current", WINNER, version=7), {FOLLOWS}),
    "current: a lower version": (alter("current", WINNER, version=1), {FOLLOWS, VERSIONS}),
    "current: under another slice": (alter("current", WINNER, updated_by_slice=RETRIED.key), {FOLLOWS}),
    "current: the commit has other offsets": (prove_other_offsets("current"), {FOLLOWS}),
    "current: it follows another decision": (prove("current", attempt=1), {FOLLOWS}),
    "all commits but that of raw have other offsets": (
        prove_other_offsets("events", "rejects", "dlq", "current"),
        {ACCOUNTED, PUBLISHED, FOLLOWS},
    ),
    "a reject was never published": (forget("publications"), {PUBLISHED}),
    "a reject was published twice": (publish(2, 3), {PUBLISHED}),
    "another decision was published": (publish(3, 2), {PUBLISHED}),
}


def test_each_defect_turns_its_checks_red_and_no_other(make: Callable[..., World]) -> None:
    """Each is planted into a slice of its own; those before and behind them are left sound."""
    looked = look(make(copies=len(DEFECTS) + 1))
    planted = dict(zip(DEFECTS, looked.copies[1:], strict=True))
    for name, of in planted.items():
        DEFECTS[name][0](looked, of)
    found: dict[str, set[str]] = {key: set() for key in looked.keys}
    for check, failing in looked.red().items():
        for key in failing:
            found[key].add(check)
    expected = {planted[name].key: checks for name, (_, checks) in DEFECTS.items()}
    assert {name: found[of.key] for name, of in planted.items()} == {name: DEFECTS[name][1] for name in planted}
    assert {key: checks for key, checks in found.items() if checks} == expected


def test_a_slice_that_is_gone_from_the_plan_leaves_a_hole(looked: World) -> None:
    forget("slices")(looked, FIRST)
    left = [looked.second.key, RETRIED.key]
    assert looked.red(left) == {TILE: [looked.second.key]}
    assert "partition 0 [0, 6) is in no slice" in looked.verdicts(left)[TILE][looked.second.key].text


def test_defects_in_a_slice_of_a_tier(looked: World) -> None:
    retry, copy = (0, 4), (0, 2)
    defects: list[tuple[Plant, set[str]]] = [
        (drop("events", retry), {ACCOUNTED, FOLLOWS}),
        (double("events", retry), {ACCOUNTED}),
        (alter("events", retry, origin_offset=2), {ACCOUNTED, FOLLOWS}),
        (drop("raw", copy), {GAPS, ACCOUNTED}),
        (alter("raw", copy, headers=None), {ACCOUNTED}),
    ]
    sound = deepcopy(looked.rows)
    for plant, expected in defects:
        looked.rows = deepcopy(sound)
        plant(looked, RETRIED)
        assert looked.red() == {check: [RETRIED.key] for check in expected}


def test_a_copy_is_superseded_only_where_its_origin_was_accepted(looked: World) -> None:
    drop("events", EVENT)(looked, FIRST)
    assert looked.red()[ACCOUNTED] == [FIRST.key, RETRIED.key]


def test_what_superseded_a_copy_may_be_rejected_later(looked: World) -> None:
    """The slice that accepted it is decided anew, by other rules: no origin is lost, it waits as a reject."""
    drop("events", EVENT)(looked, FIRST)
    double("rejects", MALFORMED, origin_offset=0, first_failed_at=NOON + timedelta(hours=2))(looked, FIRST)
    assert ACCOUNTED not in looked.red([RETRIED.key])


# Gaps


def seen(world: World) -> Gaps:
    world.verdicts()
    return world.ledger.gaps([FIRST.key])[FIRST.key]


def test_on_a_topic_that_is_compacted_a_marker_is_not_told_from_what_was_compacted(world: World) -> None:
    world.topics.cleanup_policy = "compact,delete"
    assert (seen(world).aborted, seen(world).markers, seen(world).markers_or_compacted) == (1, 0, 1)
    assert world.red() == {}


def test_a_topic_that_was_compacted_once_may_have_been_compacted_before_a_read(world: World) -> None:
    world.topics.cleanup_policy = "compact"
    world.verdicts([RETRIED.key])
    world.topics.cleanup_policy = "delete"
    assert seen(world).markers_or_compacted == 1


def test_settings_that_may_not_be_read_leave_it_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_checks, "topic_settings", lambda *_: None)
    assert (seen(world).markers, seen(world).markers_or_compacted) == (0, 1)


def test_what_kafka_serves_and_raw_lacks_is_red_at_the_first_look_and_at_every_other(world: World) -> None:
    drop("raw", (0, 1))(world, FIRST)
    for _ in range(2):
        found = world.verdicts()[GAPS][FIRST.key]
        assert not found.passed
        assert not found.warning
        assert [*found.samples] == [{"partition": 0, "start": 1, "end": 2}]
    assert FIRST.key not in world.ledger.gaps([FIRST.key]), "nothing is explained as long as a record is lacking"


def test_a_row_that_went_after_kafka_forgot_it_is_red(looked: World) -> None:
    looked.topics.log_start = 8
    drop("raw", (0, 1))(looked, FIRST)
    found = looked.verdicts()[GAPS]
    assert [found[key].passed for key in looked.keys] == [False, True, True]
    assert "others than the 2 of" in found[FIRST.key].text


def test_a_row_that_went_after_its_record_was_compacted_is_red(looked: World) -> None:
    """Also in a slice that had no gap at all."""
    looked.topics.cleanup_policy = "compact"
    looked.topics.committed["orders"].remove((0, 6))
    drop("raw", (0, 0))(looked, looked.second)
    assert looked.red([looked.second.key])[GAPS] == [looked.second.key]


def test_gaps_that_nobody_saw_in_time_are_a_warning(world: World) -> None:
    world.topics.log_start = 8
    found = world.verdicts()[GAPS][FIRST.key]
    assert (found.passed, found.warning, found.numbers["unseen"]) == (False, True, 2)
    world.topics.log_start, world.topics.topic_id = 0, "B" * 22
    assert world.ledger.gaps([FIRST.key])[FIRST.key].unseen == 2, "what was seen first stays"


def test_what_was_accepted_as_lost_before_it_was_read_is_no_gap_to_explain(world: World) -> None:
    drop("raw", (0, 0), (0, 1))(world, FIRST)
    world.alter_proof("raw", FIRST, counts={"lost": 2})
    world.ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(0, 2), "expired", "ann", NOON)])
    world.topics.log_start = 2
    found = world.verdicts([FIRST.key])[GAPS][FIRST.key]
    # The aborted record of partition 1 lies before the log start as well: nobody can say what it was.
    assert (found.numbers["lost"], found.numbers["markers"], found.numbers["unseen"]) == (2, 1, 1)


def test_the_audit_tells_seams_and_checks_the_newest_slices_once_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StreamStatus(stream="orders", topic="orders", slices=3, generation=0, topic_id=ID)
    monkeypatch.setattr(audit_page, "stream_status", lambda *_: status)
    monkeypatch.setattr(audit_page, "_ages", lambda *_: Ages({}, sure=False))
    monkeypatch.setattr(audit_page, "_looked_at", lambda *_: ([], None, []))
    monkeypatch.setattr(audit_page, "hold_against_topic", lambda *_: [])
    monkeypatch.setattr(audit_page, "judged_producers", lambda *_: ({}, []))

    def errors(newest: int) -> list[str]:
        world.write()
        made = audit_page.audit(world.ledger, cast("Kafka", world.topics), world.lake, STREAM, records_of=newest)
        return made.errors

    assert errors(3) == []
    double("current", WINNER)(world, FIRST)
    assert errors(0) == []
    [told] = errors(3)
    assert told.startswith(f"{FIRST.key}: {FOLLOWS}: ")
    world.rows["current"].pop()
    for column, value in (("amount", Decimal(99)), ("version", 3), ("status", "paid"), ("event_time", NOON)):
        sound = world.at("events", FIRST, LOSER)[column]
        alter("events", LOSER, **{column: value})(world, FIRST)
        assert f"{FIRST.key}: 1 events have other fields than their records in raw: partition 1 offset 0" in errors(3)
        alter("events", LOSER, **{column: sound})(world, FIRST)
    world.ledger.add([piece(2, p0=(9, 9), p1=(4, 4))])
    assert "orders@0000002: partition 0 [8, 9) is in no slice, and not recorded as lost" in errors(0)
