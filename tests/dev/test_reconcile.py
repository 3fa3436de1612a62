"""The comparison finds each kind of planted difference, and none where there is none."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dev.account import Account
from dev.compare import current_view, expected_event
from dev.intended import EVENT, UNRESOLVED, Ending, Intended
from dev.readings import Place, TopicRecord
from tests.helpers.reconciled import (
    BEGIN,
    ORDER_SHAPE,
    World,
    add_rows,
    current_rows,
    ensure_tier_read,
    make_world,
    metrics_rows,
    order,
    origin,
    publish,
    retry,
)

SOUND = pickle.dumps(make_world())


@pytest.fixture
def world() -> World:
    found: World = pickle.loads(SOUND)
    return found


def test_a_world_that_agrees_has_no_difference(world: World) -> None:
    found = world.compare()
    assert not found.differences.samples
    assert found.numbers["records in the topic"] > 500
    assert found.numbers["aborted records"] > 0
    assert found.faults["tombstone"]["tombstone"] == found.numbers["tombstones"] > 0


def first(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row[name] == value for name, value in values.items()))


def spoil_topic_record(world: World, **changes: Any) -> None:
    place = next(place for place, stored in world.topic.items() if stored.key and stored.value and stored.headers)
    world.topic[place] = replace(world.topic[place], **changes)


def spoil_twice(rows: list[dict[str, Any]]) -> None:
    rows.append(dict(rows[0]))


def spoil_event_to_reject(world: World) -> None:
    row = world.events.pop(0)
    stored = world.topic[Place(row["origin_partition"], row["origin_offset"])]
    add_rows(world, UNRESOLVED, stored.place, stored)
    world.raw.pop()


def spoil_both_places(world: World) -> None:
    stored = world.topic[Place(world.events[0]["origin_partition"], world.events[0]["origin_offset"])]
    add_rows(world, UNRESOLVED, stored.place, stored)
    world.raw.pop()


def spoil_tombstone_to_event(world: World) -> None:
    place = next(place for place, stored in world.topic.items() if stored.value is None)
    event = {**world.events[0], **origin(place, world.topic[place])}
    world.events.append(event)


def spoil_abort(world: World, table: str) -> None:
    aborted = next(w for w in world.account if w.visible is False)
    stored = TopicRecord(
        Place(aborted.partition or 0, aborted.offset or 0), aborted.timestamp or 0, 0, aborted.key, b"{}", ()
    )
    if table == "topic":
        world.topic[stored.place] = stored
    elif table == "raw":
        add_rows(world, Ending("tombstone"), stored.place, stored)
    else:
        rows: list[dict[str, Any]] = getattr(world, table)
        rows.append({**rows[0], **origin(stored.place, stored), "key": aborted.entity})


def spoil_current_loser(world: World) -> None:
    """The key's second best event instead of its best."""
    view = current_view(world.current)
    loser = next(row for row in world.events if row["version"] < view[row["key"]]["version"])
    world.current = [row for row in world.current if row["key"] != loser["key"]] + [dict(loser)]


def spoil_conflict(world: World) -> None:
    """Of two contents under one version the later one wins."""
    by_version: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in world.events:
        by_version.setdefault((row["key"], row["version"]), []).append(row)
    view = current_view(world.current)
    pair = next(
        sorted(rows, key=order)
        for (key, version), rows in by_version.items()
        if len(rows) == 2 and view[key]["version"] == version and rows[0]["amount"] != rows[1]["amount"]
    )
    world.current = [row for row in world.current if row["key"] != pair[1]["key"]] + [dict(pair[1])]


def set_first(rows: list[dict[str, Any]], column: str, value: Any) -> None:
    rows[0][column] = value


PLANTED: dict[str, tuple[Callable[[World], object], str]] = {
    "topic lost one": (lambda w: w.topic.pop(Place(0, 5)), "topic: lacks a record that was delivered"),
    "topic has a stranger": (
        lambda w: w.topic.update({Place(9, 0): TopicRecord(Place(9, 0), 0, 0, b"k", b"v", ())}),
        "topic: holds a record that nobody wrote",
    ),
    "topic shows an abort": (lambda w: spoil_abort(w, "topic"), "topic: shows an aborted record"),
    "topic key": (lambda w: spoil_topic_record(w, key=b"other"), "topic: another key than was written"),
    "topic value": (lambda w: spoil_topic_record(w, value=b"other"), "topic: another value than was written"),
    "topic time": (lambda w: spoil_topic_record(w, timestamp=1), "topic: another timestamp than was reported"),
    "raw lost one": (lambda w: w.raw.pop(), "raw: lacks a record of the topic"),
    "raw doubled one": (lambda w: spoil_twice(w.raw), "raw: holds a record twice"),
    "raw invented one": (lambda w: w.raw.append({**w.raw[0], "offset": 10**6}), "raw: holds what the topic does not"),
    "raw key": (lambda w: set_first(w.raw, "key", b"x"), "raw: another key than the topic"),
    "raw null key": (lambda w: set_first(w.raw, "key", None), "raw: another key than the topic"),
    "raw value": (lambda w: set_first(w.raw, "value", b"x"), "raw: another value than the topic"),
    "raw empty for null": (
        lambda w: first(w.raw, value=None).update(value=b""),
        "raw: another value than the topic",
    ),
    "raw headers": (
        lambda w: set_first(w.raw, "headers", [{"key": "a", "value": b"1"}]),
        "raw: another headers than the topic",
    ),
    "raw time": (
        lambda w: set_first(w.raw, "timestamp_ms", 1),
        "raw: another timestamp than the topic",
    ),
    "raw time type": (lambda w: set_first(w.raw, "timestamp_type", 1), "raw: another timestamp type than the topic"),
    "raw generation": (lambda w: set_first(w.raw, "generation", 1), "raw: another generation than the topic"),
    "raw in another slice": (
        lambda w: set_first(w.raw, "slice", "orders@0000001"),
        "raw: a record outside of its slice",
    ),
    "slice commit lost": (lambda w: w.slice_commits["events"].pop(), "events: commits of a slice"),
    "slice commit doubled": (lambda w: spoil_twice(w.slice_commits["raw"]), "raw: commits of a slice"),
    "slice commit counts wrong": (
        lambda w: w.slice_commits["rejects"][0].update(rows=1),
        "rejects: rows of a slice by its slice commit",
    ),
    "slices leave a hole": (
        lambda w: w.slice_commits["raw"][1]["ranges"].update({"0": [101, 500]}),
        "slices: a hole or an overlap",
    ),
    "slices overlap": (
        lambda w: w.slice_commits["raw"][1]["ranges"].update({"0": [99, 500]}),
        "slices: a hole or an overlap",
    ),
    "event lost": (lambda w: w.events.pop(), "ends: a record in none of events, rejects, tombstones"),
    "event doubled": (lambda w: spoil_twice(w.events), "ends: a record in two places"),
    "event also rejected": (spoil_both_places, "ends: a record in two places"),
    "event rejected instead": (spoil_event_to_reject, "ends: another end than event"),
    "reject lost": (lambda w: w.rejects.pop(), "ends: a record in none of events, rejects, tombstones"),
    "tombstone as event": (spoil_tombstone_to_event, "ends: another end than tombstone"),
    "reject with another reason": (
        lambda w: first(w.rejects, reason="malformed").update(reason="invalid"),
        "ends: another end than reject (malformed)",
    ),
    "reject not permanent": (
        lambda w: first(w.rejects, reason="invalid").update(permanent=False),
        "ends: another end than reject (invalid)",
    ),
    "event of no origin": (
        lambda w: set_first(w.events, "origin_offset", 10**6),
        "events: an origin that the topic does not hold",
    ),
    "event of another generation": (
        lambda w: set_first(w.events, "origin_generation", 1),
        "events: an origin that the topic does not hold",
    ),
    "event amount": (lambda w: set_first(w.events, "amount", Decimal("0.001")), "events: another amount"),
    "event time": (lambda w: set_first(w.events, "event_time", BEGIN), "events: another event_time"),
    "event key": (lambda w: set_first(w.events, "key", "x"), "events: another key"),
    "event in another slice": (lambda w: set_first(w.events, "slice", "x"), "events: in another slice than raw"),
    "reject value": (lambda w: set_first(w.rejects, "value", b"x"), "rejects: another value than the topic"),
    "reject headers": (
        lambda w: set_first(w.rejects, "headers", [{"key": "a", "value": b"1"}]),
        "rejects: other headers than the topic",
    ),
    "reject sent elsewhere": (lambda w: set_first(w.rejects, "next_topic", "x"), "rejects: another next_topic"),
    "current lost a key": (
        lambda w: w.current.__setitem__(slice(None), [r for r in w.current if r["key"] != w.current[0]["key"]]),
        "current: lacks a key",
    ),
    "current invented a key": (
        lambda w: w.current.append({**w.current[0], "key": "nobody"}),
        "current: a key without an accepted event",
    ),
    "current is behind": (spoil_current_loser, "current: another origin"),
    "current took the later of two contents": (spoil_conflict, "current: another origin"),
    "current field": (lambda w: [row.update(amount=Decimal(-1)) for row in w.current], "current: another amount"),
    "abort in raw": (lambda w: spoil_abort(w, "raw"), "raw: holds an aborted record"),
    "abort in events": (lambda w: spoil_abort(w, "events"), "events: holds an aborted record"),
    "abort in current": (lambda w: spoil_abort(w, "current"), "current: holds an aborted record"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(world: World, name: str) -> None:
    plant, kind = PLANTED[name]
    plant(world)
    assert kind in world.kinds()


def test_rows_are_only_rows_in_any_order(world: World) -> None:
    for rows in (world.raw, world.events, world.rejects, world.current):
        rows.reverse()
    assert not world.kinds()


def known_late(world: World) -> None:
    world.account = [replace(w, known=True) if w.waits_for else w for w in world.account]


def test_a_late_customer_must_be_an_event_when_all_was_retried(world: World) -> None:
    known_late(world)
    assert not world.kinds()
    assert world.kinds(all_retried=True) == {f"ends: another end than {UNRESOLVED}"}
    for row in [row for row in world.rejects if row["reason"] == "unresolved"]:
        retry(world, row)
    ensure_tier_read(world)
    world.current = current_rows(world)
    world.metrics = metrics_rows(world)
    found = world.compare(all_retried=True)
    assert not found.differences.samples
    assert found.numbers["accepted by a retry"] > 0


def spoil_published(world: World, topic: str, **changes: Any) -> None:
    place, stored = next(iter(world.published[topic].items()))
    world.published[topic][place] = replace(stored, **changes)


PLANTED_IN_THE_DLQ: dict[str, tuple[Callable[[World], object], str]] = {
    "not published": (lambda w: w.published["orders.dlq.1"].popitem(), "dlq: records of a reject"),
    "published twice": (
        lambda w: w.published["orders.parked"].update({Place(9, 9): next(iter(w.published["orders.parked"].values()))}),
        "dlq: records of a reject",
    ),
    "published elsewhere": (
        lambda w: w.published["orders.parked"].update([w.published["orders.dlq.1"].popitem()]),
        "dlq: holds what was not rejected",
    ),
    "no envelope": (lambda w: spoil_published(w, "orders.parked", headers=()), "dlq: a record whose envelope cannot"),
    "another key": (lambda w: spoil_published(w, "orders.parked", key=b"x"), "dlq: another key"),
    "another value": (lambda w: spoil_published(w, "orders.dlq.1", value=b"x"), "dlq: another value"),
    "the producer's clock": (lambda w: spoil_published(w, "orders.dlq.1", timestamp_type=0), "dlq: another timestamp"),
    "another partition": (
        lambda w: spoil_published(w, "orders.dlq.1", place=Place(9, 0)),
        "dlq: another partition",
    ),
    "not noted": (lambda w: w.dlq.pop(), "dlq: the table lacks what was published"),
    "noted twice": (lambda w: spoil_twice(w.dlq), "dlq: the table holds what was not rejected"),
    "tried out of turn": (lambda w: set_first(w.rejects, "retries", 1), "ends: a record in two places"),
}


@pytest.mark.parametrize("name", PLANTED_IN_THE_DLQ)
def test_a_difference_planted_in_the_dlq_is_found(world: World, name: str) -> None:
    plant, kind = PLANTED_IN_THE_DLQ[name]
    plant(world)
    assert any(found.startswith(kind) for found in world.kinds())


def take_back(world: World) -> dict[str, Any]:
    """One parked record was reclaimed, rejected again and parked again; its older copy stays on the topic."""
    row, noted = first(world.rejects, permanent=True), first(world.dlq, permanent=True)
    row["reclaims"] = noted["reclaims"] = 1
    publish(world, row, world.topic[Place(row["origin_partition"], row["origin_offset"])])
    return row


def test_reclaimed_and_rejected_records_are_no_difference(world: World) -> None:
    take_back(world)
    assert world.kinds() == set()


def test_each_try_of_a_reclaimed_record_occurs_once(world: World) -> None:
    row = take_back(world)
    world.rejects.append({**row, "reclaims": 0})
    assert "ends: a record in two places" in world.kinds(), "its slice said that before it reprocessed"


def test_records_published_after_a_reclaim_must_be_rejects(world: World) -> None:
    row = take_back(world)
    row["reclaims"] = 0
    assert "dlq: holds what was not rejected" in world.kinds()


PLANTED_IN_METRICS: dict[str, tuple[Callable[[World], object], str]] = {
    "a minute lost": (lambda w: w.metrics.pop(), "metrics: lacks a minute"),
    "a minute twice": (lambda w: spoil_twice(w.metrics), "metrics: a minute twice"),
    "a minute of nothing": (
        lambda w: w.metrics.append({**w.metrics[0], "minute": datetime(1999, 1, 1, tzinfo=UTC)}),
        "metrics: a minute without events",
    ),
    "a count": (lambda w: w.metrics[3].update(events=0), "metrics: another events"),
    "an amount": (lambda w: w.metrics[3].update(placed_amount=Decimal("0.005")), "metrics: another placed_amount"),
    "an hour": (lambda w: w.metrics[3].update(hour_events=-1), "metrics: another hour_events"),
    "a mean": (
        lambda w: w.metrics[-1].update(hour_mean=w.metrics[-1]["hour_mean"] + Decimal("0.000001")),
        "metrics: another hour_mean",
    ),
    "no mean": (lambda w: w.metrics[-1].update(hour_mean=None), "metrics: another hour_mean"),
    "a second delivery counted": (
        lambda w: first(w.metrics, paid_events=1).update(paid_events=2),
        "metrics: another paid_events",
    ),
}


@pytest.mark.parametrize("name", PLANTED_IN_METRICS)
def test_a_difference_planted_in_metrics_is_found(world: World, name: str) -> None:
    plant, kind = PLANTED_IN_METRICS[name]
    plant(world)
    assert world.kinds() == {kind}


def test_an_origin_accepted_twice_is_found(world: World) -> None:
    row = first(world.rejects, reason="unresolved")
    retry(world, row)
    retry(world, row)
    assert "ends: a record in two places" in world.kinds()


def test_a_late_customer_that_nobody_knows_yet_may_not_be_an_event(world: World) -> None:
    row = first(world.rejects, reason="unresolved")
    world.rejects.remove(row)
    stored = world.topic[Place(row["origin_partition"], row["origin_offset"])]
    add_rows(world, EVENT, stored.place, stored)
    world.raw.pop()
    assert f"ends: another end than {UNRESOLVED}" in world.kinds()


def test_samples_are_capped_and_counts_exact(world: World) -> None:
    lost = len(world.events)
    world.events.clear()
    found = world.compare().differences
    kind = "ends: a record in none of events, rejects, tombstones"
    assert found.counts[kind] == lost
    assert len(found.samples[kind]) == 5


def test_a_record_whose_writer_was_killed_before_the_report_may_stand_in_the_topic(world: World) -> None:
    at = next(n for n, w in enumerate(world.account) if w.fault == "none")
    place = Place(world.account[at].partition or 0, world.account[at].offset or 0)
    world.account[at] = replace(world.account[at], partition=None, offset=None, timestamp=None, visible=None)
    assert not world.kinds()
    del world.topic[place]
    assert "raw: holds what the topic does not" in world.kinds()


def test_a_record_whose_place_the_broker_did_not_report_is_known_by_its_content(world: World) -> None:
    at = next(n for n, w in enumerate(world.account) if w.fault == "none")
    world.account[at] = replace(world.account[at], offset=-1, timestamp=-1)
    assert not world.kinds()


def test_an_expected_event_reads_the_json_by_itself() -> None:
    value = {
        "order_id": "o",
        "version": 2,
        "status": "paid",
        "customer_id": "c",
        "amount": 12.3,
        "event_time": "2026-01-01T02:00:00+02:00",
    }
    stored = TopicRecord(Place(0, 0), 1_767_225_600_123, 0, "ö".encode(), json.dumps(value).encode(), ())
    assert expected_event(ORDER_SHAPE, stored) == {
        "order_id": "o",
        "version": 2,
        "status": "paid",
        "customer_id": "c",
        "amount": Decimal("12.3"),
        "event_time": datetime(2026, 1, 1, tzinfo=UTC),
        "key": "ö",
        "origin_timestamp_ms": stored.timestamp,
    }


def test_the_account_keeps_what_was_written(tmp_path: Path) -> None:
    account = Account(tmp_path / "account.sqlite")
    assert account.begin_run(seed=7) == 0
    assert account.begin_run(seed=7) == 1
    made = Intended("o", b"o", b"v", "late_customer", UNRESOLVED, version=1, waits_for="late")
    sent = account.enter("orders", 0, made)
    unknown = account.enter("orders", 0, replace(made, value=None, ending=Ending("tombstone"), waits_for=None))
    failed = account.enter("orders", 0, made)
    transaction = account.begin_transaction("aborted")
    aborted = account.enter("orders", 0, replace(made, transaction="aborted"), transaction)
    account.save()
    account.report(sent, 1, 5, 1000, None)
    account.report(failed, -1, -1, -1, "_MSG_TIMED_OUT")
    account.report(aborted, 1, 6, 1001, None)
    account.end_transaction(transaction, "aborted")
    account.close()

    again = Account(tmp_path / "account.sqlite")
    found = {w.id: w for w in again.written("orders")}
    assert found.keys() == {sent, unknown, aborted}
    assert (found[sent].partition, found[sent].offset, found[sent].timestamp) == (1, 5, 1000)
    assert (found[sent].ending, found[sent].visible, found[sent].known) == (UNRESOLVED, True, False)
    assert (found[unknown].visible, found[unknown].value_hash, found[unknown].offset) == (None, None, None)
    assert found[aborted].visible is False
    assert again.unknown_customers(older_than_seconds=3600) == []
    assert again.unknown_customers() == ["late"]
    again.customers_known(["late"])
    assert again.unknown_customers() == []
    assert {w.known for w in again.written("orders") if w.waits_for} == {True}
    again.close()
