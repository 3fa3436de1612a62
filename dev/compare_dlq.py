"""Compares the DLQ topics with the rejects: each is published once, to its topic, with the envelope of its origin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dev.differences import Differences
from dev.readings import Place, Row, TopicRecord


class Sent(NamedTuple):
    """A record on a DLQ topic, by what its envelope says: identity, attempt, and how often it was reclaimed before."""

    topic: str
    origin: tuple[str, int, int, int]
    attempt: int
    reclaims: int


def compare_published(
    rejects: Sequence[Row],
    noted: Sequence[Row],
    held: Mapping[str, Mapping[Place, TopicRecord]],
    diff: Differences,
    events: Sequence[Row] = (),
) -> int:
    """Compare the records on the topics with the rejects, and with the table of published ones.

    Args:
        rejects: the table of rejects.
        noted: the table of what was published.
        held: the DLQ topics' records.
        diff: gets what differs.
        events: the table of events. What was reclaimed and reprocessed leaves its copy on the topic, and no reject.

    Returns:
        How many records are on the topics.
    """
    expected = {_sent(row): row for row in rejects}
    found: dict[Sent, list[TopicRecord]] = defaultdict(list)
    for topic, records in held.items():
        for record in records.values():
            identity = _sent_of(topic, record)
            if identity is None:
                diff.add("dlq: a record whose envelope cannot be read", f"{topic} {record.place}")
            else:
                found[identity].append(record)
    for sent, row in expected.items():
        _one(sent, row, found.get(sent, []), diff)
    newest: Counter[tuple[str, int, int, int]] = Counter()
    for row in [*rejects, *events]:
        newest[_origin(row)] = max(newest[_origin(row)], _reclaims(row))
    for sent in found.keys() - expected.keys():
        if sent.reclaims >= newest[sent.origin]:
            diff.add("dlq: holds what was not rejected", sent)
    _noted(rejects, noted, diff)
    return sum(len(records) for records in held.values())


def _sent(row: Row) -> Sent:
    return Sent(row["next_topic"], _origin(row), row["retries"] + 1, _reclaims(row))


def _origin(row: Row) -> tuple[str, int, int, int]:
    return row["origin_topic"], row["origin_generation"], row["origin_partition"], row["origin_offset"]


def _reclaims(row: Row) -> int:
    return int(row.get("reclaims") or 0)


def _sent_of(topic: str, record: TopicRecord) -> Sent | None:
    headers = envelope(record)
    try:
        numbers = [int(headers[f"origin.{name}"]) for name in ("generation", "partition", "offset")]
        origin = (headers["origin.topic"], numbers[0], numbers[1], numbers[2])
        return Sent(topic, origin, int(headers["attempt"]), int(headers.get("reclaims", "0")))
    except (KeyError, ValueError):
        return None


def envelope(record: TopicRecord) -> dict[str, str]:
    """The headers that Highwater gave a record, by their names without the common beginning."""
    prefix = "highwater."
    return {
        name.removeprefix(prefix): (value or b"").decode(errors="replace")
        for name, value in record.headers
        if name.startswith(prefix)
    }


def _own(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes | None]]:
    return [header for header in headers if not header[0].startswith("highwater.")]


def _one(sent: Sent, row: Row, records: Sequence[TopicRecord], diff: Differences) -> None:
    diff.compare("dlq: records of a reject", sent, 1, len(records))
    own = [(header["key"], header["value"]) for header in row["headers"] or ()]
    for record in records[:1]:
        headers = envelope(record)
        missing = headers.get("left_out", "").split(",")  # of one that is parked by reference
        pairs: tuple[tuple[str, Any, Any], ...] = (
            ("key", None if "key" in missing else row["key"], record.key),
            ("value", b"" if "value" in missing else row["value"], record.value),
            ("headers of the record itself", [] if "headers" in missing else _own(own), _own(record.headers)),
            ("partition", row["origin_partition"], record.place.partition),
            ("timestamp type", 1, record.timestamp_type),
            ("reason", row["reason"], headers.get("reason")),
            ("rule", row["rule"], headers.get("rule")),
            ("slice", row["slice"], headers.get("slice")),
            ("origin timestamp", row["origin_timestamp_ms"], int(headers.get("origin.timestamp", -1))),
        )
        for what, expected, found in pairs:
            diff.compare(f"dlq: another {what}", sent, expected, found)


def _noted(rejects: Sequence[Row], noted: Sequence[Row], diff: Differences) -> None:
    expected, found = (Counter((row["slice"], _sent(row), row["attempt"]) for row in rows) for rows in (rejects, noted))
    for missing in (expected - found).elements():
        diff.add("dlq: the table lacks what was published", missing)
    for extra in (found - expected).elements():
        diff.add("dlq: the table holds what was not rejected", extra)
