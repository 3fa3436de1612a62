"""The comparison of the topic of accepted events finds each planted difference, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from dev.compare_accepted import compare_accepted
from dev.differences import Differences
from dev.readings import Place, TopicRecord
from dev.shapes import SHAPES

Held = dict[Place, TopicRecord]


def event(partition: int, offset: int, order: str, version: int, **changes: Any) -> dict[str, Any]:
    row = {
        "order_id": order,
        "version": version,
        "status": "placed",
        "customer_id": "c1",
        "amount": Decimal("12.50"),
        "event_time": datetime(2026, 3, 1, 10, 0, version, tzinfo=UTC),
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": partition,
        "origin_offset": offset,
    }
    return {**row, **changes}


EVENTS = [
    event(0, 0, "a", 1),
    event(0, 3, "a", 2, customer_id=None),
    event(0, 4, "a", 1),  # a second delivery of the first
    event(0, 5, "b", 1),
    event(1, 0, "c", 1, amount=Decimal("3.00")),
]
VALUE = (
    '{"order_id":"%s","version":%d,"status":"placed","customer_id":%s,"amount":%s,'
    '"event_time":"2026-03-01T10:00:0%d.000000Z"}'
)


def record(
    at: int,
    partition: int,
    offset: int,
    order: str,
    version: int,
    customer: str = '"c1"',
    amount: str = "12.50",
    **more: str,
) -> TopicRecord:
    reported = {"origin.topic": "orders", "origin.generation": "0", "origin.partition": str(partition)}
    reported |= {"origin.offset": str(offset), **more}
    headers = tuple((f"highwater.{name}", value.encode()) for name, value in reported.items())
    value = None if "retracted" in more else (VALUE % (order, version, customer, amount, version)).encode()
    return TopicRecord(Place(partition, at), 0, 0, order.encode(), value, headers)


def held() -> Held:
    records = [
        record(0, 0, 0, "a", 1),
        record(2, 0, 5, "b", 1),
        record(3, 0, 3, "a", 2, "null", late="retried"),
        record(0, 1, 0, "c", 1, amount="9.99"),
        record(4, 1, 0, "c", 1, amount="3.00", revision="1", late="corrected"),
        record(7, 1, 2, "d", 1, revision="1", retracted="true", late="corrected"),
    ]
    return {stored.place: stored for stored in records}


def kinds(found: Held, *, all_sent: bool = True) -> set[str]:
    diff = Differences()
    types = SHAPES["orders"].types
    assert compare_accepted(types, EVENTS, found, diff, main_topic="orders", all_sent=all_sent) == len(found)
    return set(diff.counts)


def test_equal_records_have_no_difference() -> None:
    assert kinds(held()) == set()
    assert kinds({}, all_sent=False) == set(), "all of it may still wait"


def lost(found: Held) -> None:
    del found[Place(0, 0)]


def doubled(found: Held) -> None:
    found[Place(0, 9)] = replace(found[Place(0, 0)], place=Place(0, 9))


def second_delivery(found: Held) -> None:
    found[Place(0, 1)] = record(1, 0, 4, "a", 1)


def swapped(found: Held) -> None:
    found[Place(0, 0)], found[Place(0, 2)] = (
        replace(found[Place(0, 2)], place=Place(0, 0)),
        replace(found[Place(0, 0)], place=Place(0, 2)),
    )


def elsewhere(found: Held) -> None:
    found[Place(1, 9)] = replace(found.pop(Place(0, 2)), place=Place(1, 9))


def altered(found: Held) -> None:
    found[Place(0, 2)] = replace(record(2, 0, 5, "b", 1, amount="12.51"))


def old_content(found: Held) -> None:
    del found[Place(1, 4)]


def rejected(found: Held) -> None:
    found[Place(1, 8)] = record(8, 1, 7, "e", 1, late="retried")


def nameless(found: Held) -> None:
    found[Place(1, 8)] = TopicRecord(Place(1, 8), 0, 0, b"x", b"{}", ())


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (lost, {"accepted: records of one content"}),
        (doubled, {"accepted: records of one revision", "accepted: behind one that came later"}),
        (second_delivery, {"accepted: records of one content"}),
        (swapped, {"accepted: behind one that came later"}),
        (elsewhere, {"accepted: another partition", "accepted: behind one that came later"}),
        (altered, {"accepted: another amount"}),
        (old_content, {"accepted: another amount"}),
        (rejected, {"accepted: holds what is no event"}),
        (nameless, {"accepted: a record without its origin"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_difference_is_found(spoil: Callable[[Held], None], reported: set[str]) -> None:
    found = held()
    spoil(found)
    assert kinds(found) == reported
