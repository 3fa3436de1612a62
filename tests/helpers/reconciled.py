"""Tables that agree with the generator's account, written without Spark."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from dev.account import Written, digest
from dev.compare import Comparison, compare, expected_event
from dev.intended import EVENT, Ending, Intended
from dev.orders import ORDERS
from dev.readings import Place, Tables, TopicRecord
from dev.script import Script
from dev.shapes import SHAPES

BEGIN = datetime(2026, 5, 1, tzinfo=UTC)
ORDER_SHAPE = SHAPES["orders"]


@dataclass
class World:
    """An account, a topic and tables that agree, made by hand and cheap to spoil."""

    account: list[Written]
    topic: dict[Place, TopicRecord]
    raw: list[dict[str, Any]]
    events: list[dict[str, Any]]
    rejects: list[dict[str, Any]]
    current: list[dict[str, Any]]
    dlq: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    published: dict[str, dict[Place, TopicRecord]]
    slice_commits: dict[str, list[dict[str, Any]]]

    def compare(self, **options: Any) -> Comparison:
        tables = Tables(self.raw, self.events, self.rejects, self.current, self.dlq, self.metrics, self.slice_commits)
        return compare(ORDER_SHAPE, self.account, self.topic, tables, dlq=self.published, **options)

    def kinds(self, **options: Any) -> set[str]:
        return set(self.compare(**options).differences.counts)


def slice_of(place: Place) -> str:
    return f"orders@{min(place.offset // 100, 1):07d}"


def written(identity: int, made: Intended, place: Place, timestamp: int) -> Written:
    return Written(
        id=identity,
        entity=made.entity,
        key=made.key,
        value_hash=None if made.value is None else digest(made.value),
        fault=made.fault,
        ending=made.ending,
        version=made.version,
        waits_for=made.waits_for,
        known=False,
        visible=made.transaction != "aborted",
        partition=place.partition,
        offset=place.offset,
        timestamp=timestamp,
    )


def origin(place: Place, stored: TopicRecord) -> dict[str, Any]:
    return {
        "slice": slice_of(place),
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": place.partition,
        "origin_offset": place.offset,
        "origin_timestamp_ms": stored.timestamp,
        "attempt": 1,
        "retries": 0,
    }


def make_world() -> World:
    world = World([], {}, [], [], [], [], [], [], {}, {})
    ends = [0, 0, 0]
    script = Script(ORDERS, seed=3, records=600, rates={"large_record": 0.0})
    for number, made in enumerate(record for batch in script.batches() for record in batch):
        partition = zlib.crc32(made.entity.encode()) % 3
        place = Place(partition, ends[partition])
        ends[partition] += 1
        timestamp = int(BEGIN.timestamp() * 1000) + number // 5 - made.backdated_ms
        world.account.append(written(number, made, place, timestamp))
        if made.transaction == "aborted":
            continue
        stored = TopicRecord(place, timestamp, 0, made.key, made.value, made.headers)
        world.topic[place] = stored
        add_rows(world, made.ending, place, stored)
    world.current = current_rows(world)
    world.metrics = metrics_rows(world)
    world.slice_commits = slice_commits(world, ends)
    return world


def add_rows(world: World, ending: Ending, place: Place, stored: TopicRecord) -> None:
    headers = [{"key": name, "value": value} for name, value in stored.headers] or None
    world.raw.append(
        {
            "slice": slice_of(place),
            "topic": "orders",
            "generation": 0,
            "partition": place.partition,
            "offset": place.offset,
            "timestamp_ms": stored.timestamp,
            "timestamp_type": 0,
            "key": stored.key,
            "value": stored.value,
            "headers": headers,
        }
    )
    if ending == EVENT:
        world.events.append({**origin(place, stored), **expected_event(ORDER_SHAPE, stored)})
    elif ending.end == "reject":
        next_topic = "orders.parked" if ending.permanent else "orders.dlq.1"
        row = {
            **origin(place, stored),
            "reason": ending.reason,
            "rule": "amount.at_least" if ending.reason == "invalid" else None,
            "permanent": ending.permanent,
            "next_topic": next_topic,
        }
        world.rejects.append({**row, "key": stored.key, "value": stored.value, "headers": headers})
        world.dlq.append(row)
        publish(world, world.rejects[-1], stored)


def publish(world: World, row: dict[str, Any], stored: TopicRecord) -> None:
    """What `docs/dlq.md` says of the record on its topic."""
    records = world.published.setdefault(row["next_topic"], {})
    place = Place(row["origin_partition"], len(records))
    reported = {
        "origin.topic": "orders",
        "origin.generation": "0",
        "origin.partition": str(row["origin_partition"]),
        "origin.offset": str(row["origin_offset"]),
        "origin.timestamp": str(stored.timestamp),
        "attempt": str(row["retries"] + 1),
        "reason": row["reason"],
        **({"rule": row["rule"]} if row["rule"] else {}),
        "slice": row["slice"],
        "reclaims": str(row.get("reclaims", 0)),
    }
    envelope = tuple((f"highwater.{name}", value.encode()) for name, value in reported.items())
    records[place] = TopicRecord(
        place, stored.timestamp + 1000, 1, stored.key, stored.value, (*stored.headers, *envelope)
    )


def retry(world: World, row: dict[str, Any]) -> None:
    """Let a reject of the main topic come back through its tier and be an event."""
    stored = world.topic[Place(row["origin_partition"], row["origin_offset"])]
    event = {**origin(stored.place, stored), **expected_event(ORDER_SHAPE, stored), "retries": 1}
    world.events.append({**event, "slice": "orders.dlq.1@0000000"})


def ensure_tier_read(world: World) -> None:
    """A slice of the tier that holds all of it."""
    records = world.published["orders.dlq.1"]
    key = "orders.dlq.1@0000000"
    for place, stored in records.items():
        headers = [{"key": name, "value": value} for name, value in stored.headers]
        raw = {"slice": key, "topic": "orders.dlq.1", "generation": 0, **place._asdict(), "timestamp_type": 1}
        body = {"key": stored.key, "value": stored.value, "headers": headers}
        world.raw.append({**raw, **body, "timestamp_ms": stored.timestamp})
    ranges = {
        str(p): [0, max([o + 1 for q, o in records if q == p], default=0)]
        for p in {place.partition for place in records}
    }
    for name, rows in (("raw", world.raw), ("events", world.events), ("rejects", world.rejects)):
        count = sum(row["slice"] == key for row in rows)
        world.slice_commits[name].append({"slice": key, "rows": count, "ranges": ranges})


def current_rows(world: World) -> list[dict[str, Any]]:
    """The winners of each slice, as the table holds them: several rows a key."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in world.events:
        at = (row["slice"], row["key"])
        if at not in best or order(row) < order(best[at]):
            best[at] = row
    return [dict(row) for row in best.values()]


def metrics_rows(world: World) -> list[dict[str, Any]]:
    """The minutes of the events, as `docs/tables.md` defines them."""
    once: dict[tuple[str, int], dict[str, Any]] = {}
    for row in sorted(world.events, key=order):
        once.setdefault((row["key"], row["version"]), row)
    minutes = {row["event_time"].replace(second=0, microsecond=0) for row in once.values()}
    return [minute_row(minute, [*once.values()]) for minute in sorted(minutes)]


def minute_row(minute: datetime, events: list[dict[str, Any]]) -> dict[str, Any]:
    end = minute + timedelta(minutes=1)
    own = [row for row in events if minute <= row["event_time"] < end]
    found: dict[str, Any] = {"minute": minute, "events": len(own)}
    for status in ("placed", "paid", "refunded", "canceled"):
        amounts = [row["amount"] for row in own if row["status"] == status]
        found |= {f"{status}_events": len(amounts), f"{status}_amount": sum(amounts, Decimal(0))}
    paid = [
        row["amount"]
        for row in events
        if row["status"] == "paid" and end - timedelta(hours=1) <= row["event_time"] < end
    ]
    total = sum(paid, Decimal(0))
    mean = (total / len(paid)).quantize(Decimal("0.000001"), ROUND_HALF_UP) if paid else None
    return found | {"hour_events": len(paid), "hour_amount": total, "hour_mean": mean}


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    return (-row["version"], row["origin_timestamp_ms"], row["origin_partition"], row["origin_offset"])


def slice_commits(world: World, ends: list[int]) -> dict[str, list[dict[str, Any]]]:
    bounds = {"orders@0000000": (0, 100), "orders@0000001": (100, None)}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (("raw", world.raw), ("events", world.events), ("rejects", world.rejects)):
        found[name] = [
            {
                "slice": key,
                "rows": sum(row["slice"] == key for row in rows),
                "ranges": {str(p): [start, ends[p] if end is None else end] for p in range(3)},
            }
            for key, (start, end) in bounds.items()
        ]
    return found
