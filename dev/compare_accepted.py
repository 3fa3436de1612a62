"""Compares the topic of accepted events with the table of events: each content once, exact, in its origins' order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from dev.compare_dlq import envelope
from dev.differences import Differences
from dev.readings import Place, Row, TopicRecord

Origin = tuple[str, int, int, int]


class Sent(NamedTuple):
    """A record of the topic, by what its headers say."""

    origin: Origin
    revision: int
    late: bool
    retracted: bool
    record: TopicRecord


def compare_accepted(
    types: Mapping[str, str],
    events: Sequence[Row],
    held: Mapping[Place, TopicRecord],
    diff: Differences,
    *,
    main_topic: str,
    all_sent: bool,
) -> int:
    """Hold what is on the topic against the events.

    Args:
        types: the declared fields, each a text, a number, a decimal or a time.
        events: the table of events.
        held: the topic's records.
        diff: gets what differs.
        main_topic: the topic whose order is kept.
        all_sent: whether publication has come to its end; else events may still wait for it.

    Returns:
        How many records are on the topic.
    """
    sent = [one for record in held.values() if (one := _sent_of(record, diff)) is not None]
    for (origin, revision), count in Counter((one.origin, one.revision) for one in sent).items():
        diff.compare("accepted: records of one revision", (*origin, revision), 1, count)
    _in_order(sent, main_topic, diff)
    newest = {origin: one for origin, one in _newest(sent).items() if not one.retracted}
    rows = {_origin(row): row for row in events}
    for origin in newest.keys() - rows.keys():
        diff.add("accepted: holds what is no event", origin)
    for origin in newest.keys() & rows.keys():
        _same(types, rows[origin], newest[origin], diff)
    counts = Counter(_content(types, rows[origin]) for origin in newest.keys() & rows.keys())
    for content in {_content(types, row) for row in events}:
        if all_sent or counts[content] > 1:
            diff.compare("accepted: records of one content", content, 1, counts[content])
    return len(held)


def _sent_of(record: TopicRecord, diff: Differences) -> Sent | None:
    headers = envelope(record)
    try:
        numbers = [int(headers[f"origin.{name}"]) for name in ("generation", "partition", "offset")]
        origin = (headers["origin.topic"], numbers[0], numbers[1], numbers[2])
        return Sent(origin, int(headers.get("revision", "0")), "late" in headers, "retracted" in headers, record)
    except (KeyError, ValueError):
        diff.add("accepted: a record without its origin", record.place)
        return None


def _in_order(sent: Iterable[Sent], main_topic: str, diff: Differences) -> None:
    """Records that came in time are in the order of their origins, partition by partition."""
    before: dict[int, Origin] = {}
    for one in sorted(sent, key=lambda one: one.record.place):
        if one.late or one.revision or one.origin[0] != main_topic:
            continue
        partition = one.record.place.partition
        diff.compare("accepted: another partition", one.origin, one.origin[2], partition)
        if partition in before and before[partition] >= one.origin:
            diff.add("accepted: behind one that came later", one.origin)
        before[partition] = one.origin


def _newest(sent: Iterable[Sent]) -> dict[Origin, Sent]:
    found: dict[Origin, Sent] = {}
    for one in sent:
        if one.origin not in found or one.revision > found[one.origin].revision:
            found[one.origin] = one
    return found


def _origin(row: Row) -> Origin:
    return row["origin_topic"], row["origin_generation"], row["origin_partition"], row["origin_offset"]


def _content(types: Mapping[str, str], row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in types)


def _same(types: Mapping[str, str], row: Row, one: Sent, diff: Differences) -> None:
    found = json.loads(one.record.value or b"null", parse_float=Decimal)
    diff.compare("accepted: other fields", one.origin, [*types], [*(found or ())])
    for name, kind in types.items():
        value = (found or {}).get(name)
        if value is not None and kind in _READ:
            value = _READ[kind](value)
        diff.compare(f"accepted: another {name}", one.origin, row[name], value)


_READ: Mapping[str, Callable[[str], object]] = {"decimal": Decimal, "time": datetime.fromisoformat}
