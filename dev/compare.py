"""Holds topic and tables against the generator's account, identity by identity."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from dev.account import Written, digest
from dev.compare_accepted import compare_accepted
from dev.compare_dlq import compare_published
from dev.compare_metrics import compare_metrics
from dev.differences import Differences
from dev.intended import EVENT, TOMBSTONE, UNRESOLVED, Ending
from dev.readings import Place, Row, Tables, TopicRecord
from dev.shapes import Shape

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Comparison:
    """The scope and the findings of a comparison.

    Args:
        stream: the stream.
        differences: none of them is allowed.
        numbers: how much was compared, by name.
        faults: for each kind of fault where its records ended.
    """

    stream: str
    differences: Differences = field(default_factory=Differences)
    numbers: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def compare(
    shape: Shape,
    account: Sequence[Written],
    topic: Mapping[Place, TopicRecord],
    tables: Tables,
    *,
    dlq: Mapping[str, Mapping[Place, TopicRecord]],
    accepted: Mapping[Place, TopicRecord] | None = None,
    all_retried: bool = False,
    all_sent: bool = False,
    main_topic: str | None = None,
) -> Comparison:
    """Hold everything against everything.

    Args:
        shape: the stream.
        account: what the generator wrote.
        topic: what the topic holds.
        tables: what the lake holds.
        dlq: what the DLQ topics hold, by topic.
        accepted: what the topic of accepted events holds; None if there is none.
        all_retried: whether every record of a late customer who is known by now was tried since: then it must be an
            event; else it may still wait.
        all_sent: whether every accepted event was sent; else it may still wait.
        main_topic: the topic's name, where it is not the stream's.
    """
    made = Comparison(shape.stream)
    name = main_topic or shape.stream
    written_by_place = _account_and_topic(account, topic, made)
    raw = _raw_and_topic(tables, topic, name, made)
    for tier in shape.dlq_topics(name):
        _raw_and_topic(tables, _planned(tables, dlq.get(tier, {}), tier), tier, made)
    _slices(tables, made)
    events = _by_place(tables.events, name, "events", topic, made)
    rejects = _by_place(tables.rejects, name, "rejects", topic, made)
    winners = [
        w for p, w in written_by_place.items() if _ended(p, w, raw, events, rejects, made, all_retried=all_retried)
    ]
    _event_contents(shape, topic, raw, events, made)
    _reject_contents(shape, name, topic, raw, rejects, made)
    made.numbers["records published to the DLQ"] = compare_published(
        tables.rejects, tables.dlq, dlq, made.differences, tables.events
    )
    if accepted is not None:
        made.numbers["accepted events sent"] = compare_accepted(
            shape.types, tables.events, accepted, made.differences, main_topic=name, all_sent=all_sent
        )
    _current(shape, winners, {w.id: p for p, w in written_by_place.items()}, topic, tables.current, made)
    if shape.measures:
        minutes = compare_metrics(shape.measures, tables.events, tables.metrics, made.differences)
        made.numbers["minutes in metrics"] = minutes
    _nowhere(account, written_by_place, tables, made)
    made.numbers["records in the topic"] = len(topic)
    made.numbers["rows of raw"] = len(tables.raw)
    made.numbers["events"] = len(tables.events)
    made.numbers["accepted by a retry"] = sum(row["retries"] > 0 for row in tables.events)
    made.numbers["rejects"] = len(tables.rejects)
    made.numbers["tombstones"] = sum(record.value is None for record in topic.values())
    return made


def _account_and_topic(
    account: Sequence[Written], topic: Mapping[Place, TopicRecord], made: Comparison
) -> dict[Place, Written]:
    """The place of each committed record of the account; notes what only one of the two holds."""
    diff = made.differences
    written_by_place: dict[Place, Written] = {}
    lost: dict[tuple[bytes | None, bytes | None], list[Written]] = defaultdict(list)
    for written in account:
        place = place_of(written)
        if place is None:
            lost[written.key, written.value_hash].append(written)
        elif written.visible is False or (written.visible is None and place not in topic):
            made.numbers["aborted records"] += 1
            if place in topic:
                diff.add("topic: shows an aborted record", place)
        elif place not in topic:
            diff.add("topic: lacks a record that was delivered", place)
        else:
            written_by_place[place] = written
            _same_record(written, topic[place], diff)
    for place in topic.keys() - written_by_place.keys():
        _claim(place, topic[place], lost, written_by_place, diff)
    return written_by_place


def place_of(written: Written) -> Place | None:
    """The place of a record by its delivery report; None without one, or where it does not say."""
    if written.partition is None or written.offset is None or written.offset < 0:
        return None
    return Place(written.partition, written.offset)


def _same_record(written: Written, record: TopicRecord, diff: Differences) -> None:
    diff.compare("topic: another key than was written", record.place, written.key, record.key)
    value_hash = None if record.value is None else digest(record.value)
    diff.compare("topic: another value than was written", record.place, written.value_hash, value_hash)
    diff.compare("topic: another timestamp than was reported", record.place, written.timestamp, record.timestamp)


def _claim(
    place: Place,
    record: TopicRecord,
    lost: Mapping[tuple[bytes | None, bytes | None], list[Written]],
    written_by_place: dict[Place, Written],
    diff: Differences,
) -> None:
    """A record without a delivery report, because its writer was killed, may be in the topic after all."""
    candidates = lost.get((record.key, None if record.value is None else digest(record.value)), [])
    if candidates:
        written_by_place[place] = candidates.pop(0)
    else:
        diff.add("topic: holds a record that nobody wrote", place)


def _raw_and_topic(tables: Tables, topic: Mapping[Place, TopicRecord], name: str, made: Comparison) -> dict[Place, Row]:
    diff = made.differences
    raw: dict[Place, Row] = {}
    for row in tables.raw:
        place = Place(row["partition"], row["offset"])
        if row["topic"] != name:
            continue
        if place in raw:
            diff.add("raw: holds a record twice", place, raw[place]["slice"], row["slice"])
        raw[place] = row
        record = topic.get(place)
        if record is None:
            diff.add("raw: holds what the topic does not", place)
        else:
            _same_bytes(row, record, diff)
    for place in topic.keys() - raw.keys():
        diff.add("raw: lacks a record of the topic", place)
    return raw


def _planned(tables: Tables, records: Mapping[Place, TopicRecord], topic: str) -> dict[Place, TopicRecord]:
    """The records of a tier that lie in slices; the others are not due yet."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for slice_commit in tables.slice_commits.get("raw", ()):
        if _topic_of(slice_commit["slice"]) == topic:
            for partition, (start, end) in slice_commit["ranges"].items():
                ranges[int(partition)].append((start, end))
    return {
        place: record
        for place, record in records.items()
        if any(start <= place.offset < end for start, end in ranges[place.partition])
    }


def _topic_of(slice_key: str) -> str:
    return slice_key.rpartition("@")[0]


def _same_bytes(row: Row, record: TopicRecord, diff: Differences) -> None:
    for column, expected, found in (
        ("key", record.key, row["key"]),
        ("value", record.value, row["value"]),
        ("headers", record.headers, _headers(row)),
        ("timestamp", record.timestamp, row["timestamp_ms"]),
        ("timestamp type", record.timestamp_type, row["timestamp_type"]),
        ("generation", 0, row["generation"]),
    ):
        diff.compare(f"raw: another {column} than the topic", record.place, expected, found)


def _headers(row: Row) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((header["key"], header["value"]) for header in row["headers"] or ())


def _microseconds(when: datetime) -> int:
    span = when - EPOCH
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def _slices(tables: Tables, made: Comparison) -> None:
    """The slice commits: every slice has one in each table, it counts the rows that are there, and slices tile."""
    diff = made.differences
    planned = {slice_commit["slice"]: slice_commit for slice_commit in tables.slice_commits.get("raw", ())}
    made.numbers["slices"] = len(planned)
    for name, rows in (("raw", tables.raw), ("events", tables.events), ("rejects", tables.rejects)):
        slice_commits = Counter(slice_commit["slice"] for slice_commit in tables.slice_commits.get(name, ()))
        counted = Counter(row["slice"] for row in rows)
        for key in planned.keys() | slice_commits.keys() | counted.keys():
            diff.compare(f"{name}: commits of a slice", key, 1, slice_commits[key])
        for slice_commit in tables.slice_commits.get(name, ()):
            if slice_commit["rows"] is not None:
                key = slice_commit["slice"]
                diff.compare(f"{name}: rows of a slice by its slice commit", key, slice_commit["rows"], counted[key])
    for row in tables.raw:
        start, end = planned.get(row["slice"], {"ranges": {}})["ranges"].get(str(row["partition"]), (0, 0))
        if not start <= row["offset"] < end:
            diff.add("raw: a record outside of its slice", Place(row["partition"], row["offset"]), [start, end])
    _tiles(planned.values(), diff)


def _tiles(planned: Iterable[Row], diff: Differences) -> None:
    ranges: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for slice_commit in planned:
        for partition, (start, end) in slice_commit["ranges"].items():
            if start < end:
                ranges[_topic_of(slice_commit["slice"]), partition].append((start, end, slice_commit["slice"]))
    for (_, partition), slices in ranges.items():
        reached = 0
        for start, end, key in sorted(slices):
            diff.compare("slices: a hole or an overlap", f"{key} partition {partition}", reached, start)
            reached = end


def _by_place(
    rows: Sequence[Row], name: str, table: str, topic: Mapping[Place, TopicRecord], made: Comparison
) -> dict[Place, list[Row]]:
    found: dict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        place = Place(row["origin_partition"], row["origin_offset"])
        if row["origin_topic"] != name or row["origin_generation"] != 0 or place not in topic:
            made.differences.add(f"{table}: an origin that the topic does not hold", f"{row['origin_topic']} {place}")
        found[place].append(row)
    return found


def _ended(
    place: Place,
    written: Written,
    raw: Mapping[Place, Row],
    events: Mapping[Place, Sequence[Row]],
    rejects: Mapping[Place, Sequence[Row]],
    made: Comparison,
    *,
    all_retried: bool,
) -> bool:
    """Whether a record ended as an event; notes where it is in no place, in two, or in the wrong one."""
    ends = [EVENT for _ in events.get(place, ())]
    tried = sorted(rejects.get(place, ()), key=_try)
    _ensure_each_try(place, tried, events.get(place, ()), made)
    # What was rejected and is an event now was tried again; else it is where its last try left it.
    ends += [Ending("reject", row["reason"], row["permanent"]) for row in tried[-1:] if not ends]
    if place in raw and raw[place]["value"] is None and not ends:
        ends = [TOMBSTONE]
    diff = made.differences
    for end in ends[:1]:
        made.faults[written.fault][str(end)] += 1
    if len(ends) != 1:
        kind = "ends: a record in none of events, rejects, tombstones" if not ends else "ends: a record in two places"
        diff.add(kind, place, written.ending, [str(end) for end in ends])
    elif ends[0] not in _allowed(written, all_retried=all_retried):
        diff.add(f"ends: another end than {written.ending}", place, written.fault, str(ends[0]))
    return EVENT in ends


def _ensure_each_try(place: Place, rejects: Sequence[Row], events: Sequence[Row], made: Comparison) -> None:
    """A record is rejected once at each try before the last, and accepted once at the most, after those.

    Where it was reclaimed from the DLQ its slice decided it again: what that said before is gone, and what its tiers
    said is not.
    """
    tries = [_try(row) for row in [*rejects, *events]]
    counted = Counter(number for number, _ in tries)
    newest = max(counted, default=0)
    expected = [
        (number, retries + (number != newest)) for number, times in sorted(counted.items()) for retries in range(times)
    ]
    if tries != expected or len(events) > 1:
        made.differences.add("ends: a record in two places", place, expected, tries)


def _try(row: Row) -> tuple[int, int]:
    """The number of reclaims of the record before a try, and of tries since then."""
    return int(row.get("reclaims") or 0), int(row["retries"])


def _allowed(written: Written, *, all_retried: bool) -> tuple[Ending, ...]:
    if written.ending != UNRESOLVED or not written.known:
        return (written.ending,)
    return (EVENT,) if all_retried else (EVENT, UNRESOLVED)


def _event_contents(
    shape: Shape,
    topic: Mapping[Place, TopicRecord],
    raw: Mapping[Place, Row],
    events: Mapping[Place, Sequence[Row]],
    made: Comparison,
) -> None:
    for place, rows in events.items():
        if place in topic:
            expected = expected_event(shape, topic[place])
            for row in rows:
                _same_columns("events", place, expected, row, made.differences)
                _same_slice("events", place, raw, row, made.differences)


def expected_event(shape: Shape, record: TopicRecord) -> dict[str, Any]:
    """The columns of the event that a record must become, by a reading of its JSON of its own."""
    value = _parsed(record.value)
    columns = {name: _typed(value.get(name), kind) for name, kind in shape.types.items()}
    return {
        **columns,
        "key": None if record.key is None else record.key.decode(errors="replace"),
        "version": columns[shape.version],
        "event_time": columns[shape.event_time],
        "origin_timestamp_ms": record.timestamp,
    }


def _parsed(value: bytes | None) -> dict[str, Any]:
    try:
        plain = json.loads(value or b"", parse_float=Decimal)
    except ValueError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _typed(value: Any, kind: str) -> object:
    if kind == "decimal" and isinstance(value, int | Decimal) and not isinstance(value, bool):
        return Decimal(value)
    if kind == "time" and isinstance(value, str):
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except ValueError:
            return value
    return value


def _same_columns(table: str, where: object, expected: Mapping[str, Any], row: Row, diff: Differences) -> None:
    for column, value in expected.items():
        diff.compare(f"{table}: another {column}", where, value, row.get(column))


def _same_slice(table: str, place: Place, raw: Mapping[Place, Row], row: Row, diff: Differences) -> None:
    if row["retries"]:
        if ".dlq." not in row["slice"]:
            diff.add(f"{table}: a retry in a slice of the main topic", place, found=row["slice"])
    elif place in raw:
        diff.compare(f"{table}: in another slice than raw", place, raw[place]["slice"], row["slice"])


def _reject_contents(
    shape: Shape,
    name: str,
    topic: Mapping[Place, TopicRecord],
    raw: Mapping[Place, Row],
    rejects: Mapping[Place, Sequence[Row]],
    made: Comparison,
) -> None:
    diff = made.differences
    for place, rows in rejects.items():
        for row in rows:
            if place in topic:
                record = topic[place]
                diff.compare("rejects: another key than the topic", place, record.key, row["key"])
                diff.compare("rejects: another value than the topic", place, record.value, row["value"])
                if not row["retries"]:
                    diff.compare("rejects: other headers than the topic", place, record.headers, _headers(row))
                diff.compare("rejects: another origin_timestamp", place, record.timestamp, row["origin_timestamp_ms"])
            ways = shape.dlq_topics(name)
            goes_to = ways[-1] if row["permanent"] else ways[min(row["retries"], shape.tiers)]
            diff.compare("rejects: another next_topic", place, goes_to, row["next_topic"])
            _same_slice("rejects", place, raw, row, diff)


def _current(
    shape: Shape,
    accepted: Sequence[Written],
    places: Mapping[int, Place],
    topic: Mapping[Place, TopicRecord],
    rows: Sequence[Row],
    made: Comparison,
) -> None:
    """Current by the version rule, computed from the account, against the documented view of the table."""
    winners: dict[str, Written] = {}
    for written in accepted:
        best = winners.get(written.entity)
        if best is None or _write_rank(written, places, topic) < _write_rank(best, places, topic):
            winners[written.entity] = written
    view = current_view(rows)
    diff = made.differences
    for key in winners.keys() | view.keys():
        if key not in view:
            diff.add("current: lacks a key", key)
        elif key not in winners:
            diff.add("current: a key without an accepted event", key)
        else:
            place, row = places[winners[key].id], view[key]
            diff.compare("current: another origin", key, place, Place(row["origin_partition"], row["origin_offset"]))
            if place in topic:
                _same_columns("current", key, expected_event(shape, topic[place]), row, diff)
    made.numbers["keys in current"] = len(view)


def _write_rank(written: Written, places: Mapping[int, Place], topic: Mapping[Place, TopicRecord]) -> tuple[int, ...]:
    """The version rule, smaller is better: the higher version; of equal ones the earlier publish time and place."""
    place = places[written.id]
    return (-(written.version or 0), topic[place].timestamp, *place)


def current_view(rows: Sequence[Row]) -> dict[str, Row]:
    """The documented view of `current`: one row a key, chosen among the rows on disk."""
    view: dict[str, Row] = {}
    for row in rows:
        best = view.get(row["key"])
        if best is None or _rank(row) < _rank(best):
            view[row["key"]] = row
    return view


def _rank(row: Row) -> tuple[int, int, int, int]:
    """Smaller is better."""
    version = row["version"]
    number = _microseconds(version) if isinstance(version, datetime) else int(version)
    return (-number, row["origin_timestamp_ms"], row["origin_partition"], row["origin_offset"])


def _nowhere(
    account: Sequence[Written], written_by_place: Mapping[Place, Written], tables: Tables, made: Comparison
) -> None:
    """Aborted records are in no table; their keys are theirs alone, so the keys show it too."""
    committed = {written.entity for written in written_by_place.values()}
    aborted = {w.entity for w in account if w.visible is False} - committed
    diff = made.differences
    for name, rows in (("raw", tables.raw), ("rejects", tables.rejects)):
        for row in rows:
            if (row["key"] or b"").decode(errors="replace") in aborted:
                diff.add(f"{name}: holds an aborted record", row["key"])
    for name, rows in (("events", tables.events), ("current", tables.current)):
        for row in rows:
            if row["key"] in aborted:
                diff.add(f"{name}: holds an aborted record", row["key"])
