"""Each defect, planted into sound tables, turns the named checks red, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa

from highwater.gaps import PartitionOffset
from highwater.orchestration.checking.completeness import compare_with_topic
from highwater.plans import PublicationRecord
from highwater.resources.kafka import Kafka
from highwater.slices import OffsetRange, Slice
from tests.helpers.planting import (
    ACCOUNTED,
    ALONG,
    EVENT,
    FOLLOWS,
    GAPS,
    LONE,
    LOSER,
    MALFORMED,
    METRICS,
    MISSING,
    ONE_CONTENT,
    PLANNED,
    PUBLISHED,
    RECORDED,
    SENT,
    TILE,
    TOMBSTONE,
    TRANSITIONS,
    VERSIONS,
    WINNER,
    Plant,
    alter,
    double,
    drop,
    look,
)
from tests.helpers.support import order
from tests.helpers.world import FIRST, NOON, RETRIED, TIER, World
from tests.helpers.world import FULL_STREAM as STREAM

# Seconds of processor each.
pytestmark = pytest.mark.slow


def test_sound_tables_turn_nothing_red_and_are_asked_of_kafka_once(looked: World) -> None:
    reported = {key: stored.counts for key, stored in looked.ledger.gaps.read_for_slices(looked.keys).items()}
    nothing = dict.fromkeys(("aborted", "markers", "markers_or_compacted", "lost", "unseen"), 0)
    assert reported == {
        FIRST.key: {**nothing, "aborted": 1, "markers": 1},
        looked.second.key: nothing,
        RETRIED.key: {**nothing, "markers": 1},
    }
    assert looked.red() == {}
    assert looked.topics.reads == []


def alter_all(table: str, **changes: object) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for row in world.of(table, slice=of.key):
            row.update(changes)

    return plant


def of_order(key: str, version: int, **changes: object) -> bytes:
    """The value of a record on the topic."""
    return json.dumps({**order(key, version), **changes}).encode()


def of_minute(world: World, of: Slice, version: int) -> dict[str, Any]:
    """The row of metrics of the minute in which the slice's events of this version happened."""
    [row] = world.of("metrics", minute=datetime(2026, 3, 1, 10, version, tzinfo=UTC) + timedelta(days=of.ordinal))
    return row


def drop_minute(world: World, of: Slice) -> None:
    world.rows["metrics"].remove(of_minute(world, of, 1))


def double_minute(world: World, of: Slice) -> None:
    world.rows["metrics"].append({**of_minute(world, of, 1)})


def alter_minute(version: int = 2, **changes: object) -> Plant:
    return lambda world, of: of_minute(world, of, version).update(changes)


def move(table: str, place: PartitionOffset, by: int) -> Plant:
    name = "offset" if table == "raw" else "origin_offset"
    return lambda world, of: world.at(table, of, place).update({name: world.at(table, of, place)[name] + by})


def prove(*tables: str, **changes: Any) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for table in tables:
            world.alter_slice_commit(table, of, **changes)

    return plant


def prove_other_offsets(*tables: str) -> Plant:
    def plant(world: World, of: Slice) -> None:
        [low, high] = [of.ranges[0].start, of.ranges[0].end]
        prove(*tables, slice_=replace(of, ranges={**of.ranges, 0: OffsetRange(low, high - 1)}))(world, of)

    return plant


def prove_another_topic(table: str) -> Plant:
    return lambda world, of: prove(table, slice_=replace(of, topic_id="B" * 22))(world, of)


def publish(attempt: int, sent: int) -> Plant:
    return lambda world, of: world.ledger.publications.record("orders", of.key, PublicationRecord(attempt, sent, NOON))


def forget(table: str) -> Plant:
    """Let the ledger lose its rows of the slice."""

    def plant(world: World, of: Slice) -> None:
        with sa.create_engine(f"sqlite:///{Path(world.lake.root).parent / 'ledger.sqlite'}").begin() as connection:
            connection.execute(sa.text(f"DELETE FROM {table} WHERE slice_key = :key"), {"key": of.key})

    return plant


def rewrite(place: PartitionOffset, like: PartitionOffset, version: int, **changes: Any) -> Plant:
    """Let a producer have sent something else: no table is wrong."""
    return lambda world, of: world.rewrite(of, place, like, version, **changes)


def fall(world: World, of: Slice) -> None:
    """Let versions 1 and 2 of a key have been sent the wrong way round, and have happened so."""
    world.rewrite(of, LOSER, WINNER, 2, minute=1)
    world.rewrite(of, WINNER, LOSER, 1, minute=2)


def lose(table: str, *, rows: bool) -> Plant:
    """Remove the commit of a slice, its rows with it or not."""

    def plant(world: World, of: Slice) -> None:
        del world.slice_commits[table][of.key]
        if rows:
            world.rows[table] = [row for row in world.rows[table] if row["slice"] != of.key]

    return plant


def of_before_a_field(world: World, of: Slice) -> None:
    """Let the slice have been decided before a field was declared that records had already."""
    alter_all("events", customer_id=None)(world, of)
    alter_all("current", customer_id=None)(world, of)


def of_before(world: World, of: Slice) -> None:
    """Let rows and commits lack what earlier versions did not write."""
    alter_all("events", retries=None, attempt=None)(world, of)
    alter_all("rejects", permanent=None)(world, of)
    alter_all("published", revision=None)(world, of)
    counts = world.slice_commits["published"][of.key].counts
    prove("published", rows=None, counts={n: count for n, count in counts.items() if n not in {"late", "revisions"}})(
        world, of
    )
    prove("metrics", "current", rows=None)(world, of)


def put_in_place(place: PartitionOffset, of_place: PartitionOffset) -> Plant:
    """Let the event of one place be in `current` in place of another of its slice that won."""

    def plant(world: World, of: Slice) -> None:
        row, event = world.at("current", of, of_place), world.at("events", of, place)
        row.update({name: event[name] for name in row.keys() & event.keys()})

    return plant


def each(*plants: Plant) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for one in plants:
            one(world, of)

    return plant


TO_MARKER, FAR = 5, 10_000
DEFECTS: dict[str, tuple[Plant, set[str]]] = {
    "raw: a row is gone": (drop("raw", EVENT), {GAPS, ACCOUNTED}),
    "raw: the row of a tombstone is gone": (drop("raw", TOMBSTONE), {GAPS, ACCOUNTED}),
    "raw: a row is there twice": (double("raw", EVENT), {PLANNED, ACCOUNTED}),
    "raw: a row took the place of a marker": (move("raw", EVENT, TO_MARKER), {GAPS, ACCOUNTED}),
    "raw: a row lies outside of the slice": (move("raw", EVENT, FAR), {PLANNED, GAPS, ACCOUNTED}),
    "raw: a row is of another generation": (alter("raw", EVENT, generation=1), {PLANNED, GAPS, ACCOUNTED}),
    "raw: an offset is gone": (alter("raw", EVENT, offset=None), {PLANNED, GAPS, ACCOUNTED}),
    "raw: another key": (alter("raw", EVENT, key=b"o9"), {ACCOUNTED}),
    "raw: another time": (alter("raw", EVENT, timestamp=NOON - timedelta(1)), {ACCOUNTED}),
    "raw: a reject has another value": (alter("raw", MALFORMED, value=b"x"), {ACCOUNTED}),
    "raw: a reject has other headers": (alter("raw", MALFORMED, headers=None), {ACCOUNTED}),
    "raw: an accepted record has another field": (alter("raw", EVENT, value=of_order("o1", 1, amount=9)), {RECORDED}),
    "raw: an accepted record is no JSON": (alter("raw", EVENT, value=b"o1"), {RECORDED}),
    "raw: a value is gone": (alter("raw", EVENT, value=None), {ACCOUNTED}),
    "raw: the commit has other offsets": (prove_other_offsets("raw"), {PLANNED, ACCOUNTED}),
    "raw: the commit is of another topic": (prove_another_topic("raw"), {PLANNED}),
    "events: a winner is gone": (drop("events", WINNER), {ACCOUNTED, FOLLOWS, METRICS, SENT}),
    "events: a row that did not win is gone": (drop("events", LOSER), {ACCOUNTED, MISSING, METRICS, SENT}),
    "events: a row is there twice": (double("events", LOSER), {ACCOUNTED, SENT}),
    "events: a winner has another field": (
        alter("events", WINNER, amount=Decimal(99)),
        {FOLLOWS, RECORDED, METRICS, SENT},
    ),
    "events: a winner has a higher version": (
        alter("events", WINNER, version=7),
        {FOLLOWS, VERSIONS, MISSING, RECORDED, SENT},
    ),
    "events: a row that did not win has another field": (
        alter("events", LOSER, amount=Decimal(99)),
        {RECORDED, METRICS, SENT},
    ),
    "events: a row that did not win has another time": (
        alter("events", LOSER, event_time=NOON),
        {RECORDED, METRICS, SENT},
    ),
    "events: a winner lacks a field": (alter("events", WINNER, customer_id=None), {FOLLOWS, RECORDED, SENT}),
    "events: a row that did not win lacks a field": (alter("events", LOSER, customer_id=None), {RECORDED, SENT}),
    "events: a row that did not win lacks its key's field": (
        alter("events", LOSER, order_id=None),
        {RECORDED, SENT},
    ),
    "events: a row that did not win lacks its time": (
        alter("events", LOSER, event_time=None),
        {RECORDED, METRICS, SENT},
    ),
    "events: a winner lacks its version": (
        alter("events", WINNER, version=None),
        {FOLLOWS, RECORDED, SENT},
    ),
    "events: all lack a field that they always had": (alter_all("events", order_id=None), {FOLLOWS, RECORDED}),
    "events: another time of its record": (alter("events", LOSER, origin_timestamp=NOON - timedelta(1)), {ACCOUNTED}),
    "events: it was rejected before": (alter("events", LOSER, retries=1), {ACCOUNTED}),
    "events: of another attempt": (alter("events", LOSER, attempt=1), {ACCOUNTED}),
    "events: another key": (alter("events", LONE, key="o9"), {ACCOUNTED, FOLLOWS, VERSIONS}),
    "events: another origin": (move("events", LOSER, FAR), {ACCOUNTED, SENT}),
    "events: the commit has other offsets": (prove_other_offsets("events"), {ACCOUNTED}),
    # Its follower counts as many as the table has.
    "events: the commit has other rows": (prove("events", rows=4), {ACCOUNTED, FOLLOWS}),
    "rejects: a row is gone": (drop("rejects", MALFORMED), {ACCOUNTED, PUBLISHED}),
    "rejects: a row is there twice": (double("rejects", MALFORMED), {ACCOUNTED, PUBLISHED}),
    "rejects: another reason": (alter("rejects", MALFORMED, reason="invalid"), {PUBLISHED}),
    "rejects: permanent, against the reason": (alter("rejects", MALFORMED, permanent=False), {PUBLISHED}),
    "rejects: it was rejected before": (alter("rejects", MALFORMED, retries=1), {ACCOUNTED, PUBLISHED}),
    "rejects: of another attempt": (alter("rejects", MALFORMED, attempt=1), {ACCOUNTED, PUBLISHED}),
    "rejects: another way": (alter("rejects", MALFORMED, next_topic=TIER), {PUBLISHED}),
    "rejects: another key": (alter("rejects", MALFORMED, key=b"o9"), {ACCOUNTED}),
    "rejects: another value": (alter("rejects", MALFORMED, value=b"x"), {ACCOUNTED}),
    "rejects: other headers": (alter("rejects", MALFORMED, headers=None), {ACCOUNTED}),
    "rejects: another time of its record": (
        alter("rejects", MALFORMED, origin_timestamp=NOON - timedelta(1)),
        {ACCOUNTED, PUBLISHED},
    ),
    "rejects: also among the events": (
        lambda world, of: double("events", EVENT, origin_offset=of.ranges[0].start + 2)(world, of),
        {ACCOUNTED, RECORDED, SENT},
    ),
    "rejects: the commit has other offsets": (prove_other_offsets("rejects"), {ACCOUNTED, PUBLISHED}),
    "dlq: a row is gone": (drop("dlq", MALFORMED), {PUBLISHED}),
    "dlq: a row is there twice": (double("dlq", MALFORMED), {PUBLISHED}),
    "dlq: another way": (alter("dlq", MALFORMED, next_topic=TIER), {PUBLISHED}),
    "dlq: one that was never rejected": (double("dlq", MALFORMED, origin_offset=FAR), {PUBLISHED}),
    "dlq: the slice is gone": (lose("dlq", rows=False), {PUBLISHED}),
    "dlq: the commit has other offsets": (prove_other_offsets("dlq"), {PUBLISHED}),
    "dlq: the commit has more rows": (prove("dlq", rows=3), {PUBLISHED}),
    "current: a winner is gone": (drop("current", WINNER), {FOLLOWS, VERSIONS}),
    "current: a winner is there twice": (double("current", WINNER), {FOLLOWS}),
    "current: another field": (alter("current", WINNER, amount=Decimal(99)), {FOLLOWS}),
    "current: a higher version": (alter("current", WINNER, version=7), {FOLLOWS}),
    "current: a lower version": (alter("current", WINNER, version=1), {FOLLOWS, VERSIONS}),
    "current: a row of another origin": (alter("current", WINNER, origin_offset=FAR), {FOLLOWS}),
    "current: an event that did not win": (put_in_place(LOSER, WINNER), {FOLLOWS, VERSIONS}),
    "current: the later of two contents": (
        each(rewrite(WINNER, LOSER, 1, amount=99), put_in_place(WINNER, LOSER)),
        {ONE_CONTENT, VERSIONS},
    ),
    "current: the later of two deliveries": (
        each(rewrite(WINNER, LOSER, 1), put_in_place(WINNER, LOSER)),
        set(),
    ),
    "current: the commit has other rows": (prove("current", rows=4), {FOLLOWS}),
    "current: no commit record": (lose("current", rows=False), {FOLLOWS}),
    "current: it follows another decision": (prove("current", attempt=1), {FOLLOWS}),
    "metrics: a minute is gone": (drop_minute, {METRICS}),
    "metrics: a minute is there twice": (double_minute, {METRICS}),
    "metrics: another number of events": (alter_minute(events=2), {METRICS}),
    "metrics: another amount": (alter_minute(paid_amount=Decimal("12.51")), {METRICS}),
    "metrics: another status": (alter_minute(canceled_events=1), {METRICS}),
    "metrics: other events of the hour": (alter_minute(hour_events=2), {METRICS}),
    "metrics: another amount of the hour": (alter_minute(hour_amount=Decimal("12.51")), {METRICS}),
    "metrics: another mean": (alter_minute(hour_mean=None), {METRICS}),
    "metrics: a minute that no event happened in": (alter_minute(1, minute=NOON - timedelta(400)), {METRICS}),
    "metrics: it is on another day": (alter_minute(slice="2026-02-01"), {METRICS}),
    "metrics: it follows another decision": (prove("metrics", attempt=1), {METRICS}),
    "metrics: the commit has other offsets": (prove_other_offsets("metrics"), {METRICS}),
    "metrics: the commit is of another topic": (prove_another_topic("metrics"), {METRICS}),
    "metrics: the commit has other minutes": (prove("metrics", rows=3), {METRICS}),
    "published: a row is gone": (drop("published", LOSER), {SENT}),
    "published: a row is there twice": (double("published", LOSER), {SENT}),
    "published: another origin": (move("published", LOSER, FAR), {SENT}),
    "published: another value": (alter("published", LOSER, fingerprint="0" * 32), {SENT}),
    "published: left out, by its row": (alter("published", LOSER, state="second delivery"), {SENT}),
    "published: retracted, by its row": (alter("published", LOSER, state="retracted"), {SENT}),
    "published: sent again, by its row": (alter("published", LOSER, revision=1), {SENT}),
    "published: late, by its row": (alter("published", LOSER, late="corrected"), {SENT}),
    "published: of a later attempt, by its row": (alter("published", LOSER, attempt=3), {SENT}),
    # As the rows of a slice that was reprocessed, whose events stayed the same.
    "published: of an earlier attempt, by its rows": (alter_all("published", attempt=1), set()),
    "published: the commit is gone": (lose("published", rows=False), {SENT}),
    "published: the slice is gone": (lose("published", rows=True), {SENT}),
    "published: the commit has other offsets": (prove_other_offsets("published"), {SENT}),
    "published: the commit is of another topic": (prove_another_topic("published"), {SENT}),
    "published: the commit has other rows": (prove("published", rows=6), {SENT}),
    "all commits but that of raw have other offsets": (
        prove_other_offsets("events", "rejects", "dlq"),
        {ACCOUNTED, PUBLISHED},
    ),
    "what was written before the columns and numbers were there": (of_before, set()),
    "what was decided before a field was declared": (of_before_a_field, set()),
    "data: two contents of a version": (rewrite(WINNER, LOSER, 1, amount=99), {ONE_CONTENT}),
    "data: a state that may not follow": (rewrite(WINNER, LOSER, 2, status="refunded"), {TRANSITIONS}),
    "data: a version is missing": (rewrite(WINNER, LOSER, 3), {MISSING}),
    "data: a version falls": (fall, {ALONG}),
    "data: a key moved": (rewrite(EVENT, LONE, 2), set()),
    "a reject was never published": (forget("publications"), {PUBLISHED}),
    "a reject was published twice": (publish(2, 3), {PUBLISHED}),
    "another decision was published": (publish(3, 2), {PUBLISHED}),
}


def test_each_defect_turns_its_checks_red_and_no_other(make_world: Callable[..., World]) -> None:
    """Each is planted into a slice of its own; those before and after them are left sound."""
    looked = look(make_world(copies=len(DEFECTS) + 1))
    planted = dict(zip(DEFECTS, looked.copies[1:], strict=True))
    for name, of in planted.items():
        DEFECTS[name][0](looked, of)
    found: dict[str, set[str]] = {key: set() for key in looked.keys}
    for check, failing in looked.red().items():
        for key in failing:
            found[key].add(check)
    expected = {planted[name].key: checks for name, (_, checks) in DEFECTS.items() if checks}
    assert {name: found[of.key] for name, of in planted.items()} == {name: DEFECTS[name][1] for name in planted}
    assert {key: checks for key, checks in found.items() if checks} == expected


def test_a_row_of_current_that_names_another_slice_turns_that_slice_red(looked: World) -> None:
    alter("current", WINNER, updated_by_slice=RETRIED.key)(looked, FIRST)
    assert looked.red() == {FOLLOWS: [RETRIED.key]}


ONLY_IN_RAW: dict[str, tuple[PartitionOffset, dict[str, object]]] = {
    "headers of an accepted record": ((0, 0), {"headers": [{"key": "trace", "value": b"2"}]}),
    "a header fewer": ((0, 0), {"headers": None}),
    "key of a tombstone": ((0, 3), {"key": b"o9"}),
    "time of a tombstone": ((0, 3), {"timestamp": NOON - timedelta(1)}),
    "whose time it is": ((0, 0), {"timestamp_type": 1}),
    "headers of a tombstone": ((0, 3), {"headers": None}),
}


def test_values_that_only_raw_holds_are_compared_with_the_topic(looked: World) -> None:
    """No other table has it, so no check sees it; the second reader of the audit does."""

    def altered() -> dict[str, list[PartitionOffset]]:
        looked.write()
        found = compare_with_topic(
            looked.ledger, cast("Kafka", looked.topics), looked.lake, STREAM, [FIRST, looked.second]
        )
        assert not any(one.skipped or one.lacking for one in found)
        return {one.slice_key: [*one.altered] for one in found if one.error}

    assert altered() == {}
    sound = deepcopy(looked.rows)
    for what, (place, changes) in ONLY_IN_RAW.items():
        looked.rows = deepcopy(sound)
        alter("raw", place, **changes)(looked, FIRST)
        assert altered() == {FIRST.key: [place]}, what
        assert looked.red() == {}, what


def test_outdated_rows_of_current_show_both_versions_and_the_origin(looked: World) -> None:
    drop("current", LONE)(looked, FIRST)
    alter("current", WINNER, version=1)(looked, FIRST)
    found = looked.check_slices([FIRST.key])[VERSIONS][FIRST.key]
    assert (found.numbers["absent"], found.numbers["behind"]) == (1, 1)
    origin = {"origin_topic": "orders", "origin_generation": 0, "origin_partition": 1}
    assert [*found.samples] == [
        {"key": "o3", "in_events": 2, "in_current": 1, **origin, "origin_offset": 3},
        {"key": "o4", "in_events": 1, "in_current": None, **origin, "origin_offset": 2},
    ]
    assert "materialise current of the slice again" in found.text


def test_a_slice_that_is_gone_from_the_plan_leaves_a_hole(looked: World) -> None:
    forget("slices")(looked, FIRST)
    left = [looked.second.key, RETRIED.key]
    assert looked.red(left) == {TILE: [looked.second.key]}
    assert "partition 0 [0, 6) is in no slice" in looked.check_slices(left)[TILE][looked.second.key].text


def test_defects_in_a_slice_of_a_tier(looked: World) -> None:
    retry, copy = (0, 4), (0, 2)
    defects: list[tuple[Plant, set[str]]] = [
        (drop("events", retry), {ACCOUNTED, FOLLOWS, METRICS, SENT}),
        (double("events", retry), {ACCOUNTED, SENT}),
        (alter("events", retry, origin_offset=2), {ACCOUNTED, FOLLOWS, SENT}),
        (drop("raw", copy), {GAPS, ACCOUNTED}),
        (alter("raw", copy, headers=None), {ACCOUNTED}),
        (alter_all("raw", key=b"o9"), {ACCOUNTED}),
        (alter_all("raw", value=of_order("o5", 1, amount=9)), {RECORDED}),
        (alter("events", retry, amount=Decimal(99)), {FOLLOWS, RECORDED, METRICS}),
        (alter("events", retry, order_id=None), {FOLLOWS, RECORDED}),
        # Its only event: the field may have been declared later.
        (alter("events", retry, customer_id=None), {FOLLOWS}),
        (alter("events", retry, retries=2), {ACCOUNTED}),
        (alter("events", retry, retries=None), set()),
        (alter("events", retry, attempt=1), {ACCOUNTED}),
        (alter("events", retry, origin_timestamp=NOON - timedelta(1)), {ACCOUNTED, FOLLOWS}),
    ]
    sound = deepcopy(looked.rows)
    for plant, expected in defects:
        looked.rows = deepcopy(sound)
        plant(looked, RETRIED)
        assert looked.red() == {check: [RETRIED.key] for check in expected}


def test_a_copy_is_superseded_only_where_its_origin_was_accepted(looked: World) -> None:
    drop("events", EVENT)(looked, FIRST)
    assert looked.red()[ACCOUNTED] == [FIRST.key, RETRIED.key]


def test_record_that_superseded_a_copy_may_be_rejected_later(looked: World) -> None:
    """The slice that accepted it is reprocessed, by other rules: no origin is lost, it waits as a reject."""
    drop("events", EVENT)(looked, FIRST)
    double("rejects", MALFORMED, origin_offset=0, first_failed_at=NOON + timedelta(hours=2))(looked, FIRST)
    assert ACCOUNTED not in looked.red([RETRIED.key])
