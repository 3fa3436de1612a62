"""A stream's tables, ledger and topic as a test writes them, row by row and without the pipeline.

Slices of the main topic and one of a tier, with a gap of each kind, a tombstone, rejects that were parked and retried,
a second delivery, and copies that are superseded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from assets.streams.orders import STREAM as ORDERS
from dev.planted import plant
from highwater.assets import current, dlq, events, minute_rows, publication_log, raw, rejects
from highwater.declaration import Accepted, Stream
from highwater.envelope import ORIGIN, Envelope, Origin
from highwater.gaps import PartitionOffset
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.checks import CHECKS, Sources
from highwater.plans import Generation, PublicationRecord
from highwater.resources import commit_log
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.spark_tables import read_column_name, split_columns
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.plain_minutes import compute_minute, compute_minutes
from tests.helpers.support import copy_stores, make_stream, order, with_milliseconds

if TYPE_CHECKING:
    import pytest

STREAM = make_stream("orders")
FULL_STREAM = make_stream("orders", metrics=ORDERS.metrics, publishes=Accepted("orders.accepted"))
TIER, PARKED = STREAM.tier_topics[0], STREAM.parked_topic
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ID = "A" * 22
COLUMNS = {
    "raw": raw.COLUMNS,
    "events": events.build_sql_columns(STREAM),
    "rejects": rejects.COLUMNS,
    "dlq": dlq.COLUMNS,
    "current": current.build_sql_columns(STREAM),
}
Row = dict[str, Any]
_WHOLE: Row = {"value": b"{}", "headers": [{"key": "trace", "value": b"1"}]}


def slice_(ordinal: int, topic: str = "orders", **ranges: tuple[int, int]) -> Slice:
    """A slice: `slice_(0, p0=(0, 6))`; those of a tier are planned an hour later."""
    at = NOON + timedelta(hours=0 if topic == "orders" else 1)
    return Slice("orders", topic, ID, 0, ordinal, {int(n[1:]): OffsetRange(*r) for n, r in ranges.items()}, at)


def like_first(ordinal: int, more: Mapping[int, OffsetRange] | None = None) -> Slice:
    """A slice whose sixth offset of partition 0 is a marker, and whose second of partition 1 was aborted."""
    made = slice_(ordinal, p0=(6 * ordinal, 6 * ordinal + 6), p1=(4 * ordinal, 4 * ordinal + 4))
    return replace(made, ranges={**made.ranges, **(more or {})})


def _further(ordinal: int, widths: Sequence[int]) -> dict[int, OffsetRange]:
    """Ranges of one offset in the partitions beyond the first two."""
    starts = {p: sum(p < before for before in widths[:ordinal]) for p in range(2, widths[ordinal])}
    return {p: OffsetRange(start, start + 1) for p, start in starts.items()}


def _list_ends(slices: Iterable[Slice]) -> dict[int, int]:
    return {p: r.end for one in slices for p, r in one.ranges.items()}


FIRST = like_first(0)
# Its second offset is a marker.
RETRIED = slice_(0, TIER, p0=(0, 4))


@dataclass(frozen=True)
class FakeRecord:
    """A record as librdkafka hands it over; of one that was aborted only the place matters."""

    place: PartitionOffset
    row: Row = field(default_factory=dict)

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]

    def timestamp(self) -> tuple[int, int]:
        return 1, round(self.row["timestamp"].timestamp() * 1000)

    def key(self) -> bytes | None:
        return cast("bytes | None", self.row["key"])

    def value(self) -> bytes | None:
        return cast("bytes | None", self.row["value"])

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return [(one["key"], one["value"]) for one in self.row.get("headers") or ()] or None


@dataclass
class FakeTopicRecords:
    """The topics of a cluster, with the records that readers of each kind see."""

    committed: dict[str, set[PartitionOffset]]
    aborted: dict[str, set[PartitionOffset]]
    ends: Mapping[str, Mapping[int, int]]
    log_start: int = 0
    topic_id: str = ID
    cleanup_policy: str = "delete"
    reads: list[tuple[str, bool]] = field(default_factory=list)
    records: Mapping[tuple[str, PartitionOffset], Row] = field(default_factory=dict)

    def read_topic_state(self, topic: str) -> TopicState:
        states = {p: PartitionState(self.log_start, end, end, 1) for p, end in self.ends[topic].items()}
        return TopicState(topic, self.topic_id, states)

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], *, committed: bool = True) -> Iterator[FakeRecord]:
        if not ranges:
            return
        self.reads.append((topic, committed))
        seen = self.committed[topic] | (set() if committed else self.aborted[topic])
        there = (place for place in sorted(seen) if place[0] in ranges and place[1] in ranges[place[0]])
        yield from (FakeRecord(place, self.records.get((topic, place), {})) for place in there)


class World:
    """The tables, to be damaged; `red` says which checks notice.

    Args:
        folder: for lake and ledger.
        copies: how many slices are like the first one, with keys and days of their own.
        stream: its declaration; with metrics these have a table too, and so has what is sent where it publishes.
        widths: for each copy over how many partitions it goes; each beyond the two has one event of it.
    """

    def __init__(
        self, folder: Path, copies: int = 1, stream: Stream = STREAM, widths: Sequence[int] | None = None
    ) -> None:
        self.stream = stream
        more = {"metrics": stream.metrics, "published": stream.publishes}
        tables = [*COLUMNS, *(table for table, declared in more.items() if declared)]
        widths = widths or [2] * copies
        self.copies = [like_first(ordinal, _further(ordinal, widths)) for ordinal in range(copies)]
        end = {p: r.end for p, r in self.copies[-1].ranges.items()}
        self.second = slice_(copies, p0=(end[0], end[0] + 2), p1=(end[1], end[1]))
        self.slices = [*self.copies, self.second, RETRIED]
        self.keys = [one.key for one in self.slices]
        self.lake = Lake(str(folder / "lake"))
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.rows: dict[str, list[Row]] = {table: [] for table in tables}
        self.slice_commits: dict[str, dict[str, SliceCommit]] = {table: {} for table in tables}
        starts = dict.fromkeys(range(max([2, *widths])), 0)
        for topic in ("orders", TIER):
            self.ledger.topics.open_generation(Generation("orders", topic, ID, 0, starts, NOON))
        self.ledger.add(self.slices)
        for one in self.copies:
            self._day = one.ordinal
            self._like_first(one, f".{one.ordinal}" if one.ordinal else "")
            self.ledger.publications.record("orders", one.key, PublicationRecord(2, 2, NOON))
        self._day = 0
        self._second()
        self._day = copies
        self._retried()
        if stream.metrics:
            self.rows["metrics"] = _compute_minutes(self.rows["events"])
        if stream.publishes:
            self.rows["published"] = [*_build_sent_rows(self.rows["events"])]
        self.minutes = {key: {compute_minute(row) for row in self.of("events", slice=key)} for key in self.keys}
        for one in self.slices:
            self._prove(one)
        self.topics = FakeTopicRecords(
            committed={
                topic: {(r["partition"], r["offset"]) for r in self.rows["raw"] if r["topic"] == topic}
                for topic in ("orders", TIER)
            },
            aborted={"orders": {(1, 4 * one.ordinal + 1) for one in self.copies}, TIER: set()},
            ends={"orders": {**_list_ends(self.copies), 0: end[0] + 2, 1: end[1]}, TIER: {0: 4}},
            records={(r["topic"], (r["partition"], r["offset"])): dict(r) for r in self.rows["raw"]},
        )

    def _like_first(self, one: Slice, of: str) -> None:
        self.build_event(one, 0, 0, f"o1{of}", 1)
        self.build_event(one, 0, 1, f"o2{of}", 1)
        self.read_reject(one, 0, 2, "malformed", PARKED)
        self.read(one, 0, 3, f"o1{of}", value=None)
        self.read_reject(one, 0, 4, "unresolved", TIER)
        self.build_event(one, 1, 0, f"o3{of}", 1)
        self.build_event(one, 1, 2, f"o4{of}", 1)
        self.build_event(one, 1, 3, f"o3{of}", 2)
        self.win(one, (0, 0), (0, 1), (1, 2), (1, 3))
        for partition in range(2, len(one.ranges)):
            self.build_event(one, partition, 0, f"o6{of}.{partition}", 1)
            self.win(one, (partition, 0))

    def _second(self) -> None:
        self.build_event(self.second, 0, 0, "o1", 2)
        self.build_event(self.second, 0, 1, "o2", 1)
        self.win(self.second, (0, 0), (0, 1))

    def _retried(self) -> None:
        """Accepted at last, sent a second time, and one that was accepted long before."""
        value = json.dumps(order("o5", 1, event_time=self._happened(1).isoformat())).encode()
        for offset, of in ((0, 4), (2, 4), (3, 0)):
            self.read(RETRIED, 0, offset, "o5", value=value, headers=build_headers(of))
        self._event(RETRIED, Origin("orders", 0, 0, 4), "o5", 1, retries=1)
        self.win(RETRIED, (0, 4))

    def read(self, of: Slice, partition: int, offset: int, key: str, **changes: Any) -> None:
        """A row of raw; its offset is distinguished from the slice's start on, as everywhere here."""
        offset += of.ranges[partition].start
        self.rows["raw"].append(
            {
                "slice": of.key,
                "topic": of.topic,
                "generation": 0,
                "partition": partition,
                "offset": offset,
                "timestamp": _build_moment(partition, offset),
                "timestamp_type": 0,
                "key": key.encode(),
                **_WHOLE,
                **changes,
            }
        )

    def build_event(self, of: Slice, partition: int, offset: int, key: str, version: int) -> None:
        """A record that was accepted."""
        reported = order(key, version, event_time=self._happened(version).isoformat())
        self.read(of, partition, offset, key, value=json.dumps(reported).encode())
        self._event(of, Origin("orders", 0, partition, of.ranges[partition].start + offset), key, version)

    def _event(self, of: Slice, origin: Origin, key: str, version: int, retries: int = 0) -> None:
        self.rows["events"].append(
            {
                "slice": of.key,
                **_select_columns(origin),
                "attempt": 2,
                "retries": retries,
                "key": key,
                "version": version,
                "event_time": self._happened(version),
                "order_id": key,
                "status": "placed" if version == 1 else "paid",
                "customer_id": "c1",
                "amount": Decimal("12.50"),
            }
        )

    def _happened(self, version: int) -> datetime:
        return datetime(2026, 3, 1, 10, version, tzinfo=UTC) + timedelta(days=self._day)

    def read_reject(self, of: Slice, partition: int, offset: int, reason: str, to: str) -> None:
        """A record that was rejected and published."""
        self.read(of, partition, offset, "o5")
        reported = {"reason": reason, "detail": "why", "next_topic": to, "first_failed_at": NOON, "retries": 0}
        origin = Origin("orders", 0, partition, of.ranges[partition].start + offset)
        found = {"slice": of.key, **_select_columns(origin), "attempt": 2, **reported}
        self.rows["rejects"].append({**found, "permanent": to == PARKED, "key": b"o5", **_WHOLE})
        self.rows["dlq"].append({**found, "published_at": NOON})

    def win(self, of: Slice, *places: PartitionOffset) -> None:
        """Hold events of the slice against the rows of `current`: the version rule decides which stay."""
        names = [read_column_name(column) for column in split_columns(COLUMNS["current"])]
        for place in places:
            event = self.at("events", of, place)
            row = {**{name: event[name] for name in names if name in event}, "updated_by_slice": of.key}
            there = self.of("current", key=row["key"])
            if all(_compute_precedence(row) < _compute_precedence(one) for one in there):
                self.rows["current"] = [one for one in self.rows["current"] if one not in there] + [row]

    def rewrite(
        self, of: Slice, place: PartitionOffset, like: PartitionOffset, version: int, minute: int = 0, **changes: Any
    ) -> None:
        """Let an accepted record of a slice be one of another record's key; all tables follow as if it always was."""
        event, record = self.at("events", of, place), self.at("raw", of, place)
        key, self._day = self.at("events", of, like)["key"], of.ordinal
        happened = self._happened(minute or version)
        reported = order(key, version, event_time=happened.isoformat(), **changes)
        record.update(key=key.encode(), value=json.dumps(reported).encode())
        amount = Decimal(str(reported["amount"])).quantize(Decimal("0.01"))
        event.update({**reported, "key": key, "amount": amount, "event_time": happened})
        at = (of.topic, (record["partition"], record["offset"]))
        self.topics.records = {**self.topics.records, at: dict(record)}
        self._follow(of)

    def _follow(self, of: Slice) -> None:
        """Compute again the tables that follow the events of a slice whose keys and days are its own."""
        events = self.of("events", slice=of.key)
        own = {"current": of.key, "published": of.key, "metrics": f"{self._happened(0):%Y-%m-%d}"}
        for table in own.keys() & self.rows.keys():
            mine = self.of(table, slice=own[table])
            self.rows[table] = [row for row in self.rows[table] if row not in mine]
        ranked = sorted(events, key=lambda row: (row["version"], -row["origin_timestamp"].timestamp()))
        for row in {row["key"]: row for row in ranked}.values():
            partition = row["origin_partition"]
            self.win(of, (partition, row["origin_offset"] - of.ranges[partition].start))
        if "metrics" in self.rows:
            self.rows["metrics"] += _compute_minutes(events)
        if "published" in self.rows:
            self.rows["published"] += _build_sent_rows(events)
        self.minutes[of.key] = {compute_minute(row) for row in events}
        self._prove(of)

    def _prove(self, one: Slice) -> None:
        rows = {table: len(self.of(table, slice=one.key)) for table in self.rows}
        tombstones = sum(row["value"] is None for row in self.of("raw", slice=one.key))
        superseded = rows["raw"] - rows["events"] - rows["rejects"] - tombstones
        split = {"tombstones": tombstones, "superseded": superseded}
        counts = {**split, **{name: rows[name] for name in ("raw", "events", "rejects")}}
        self.slice_commits["raw"][one.key] = SliceCommit(one, 1, None)
        for table, count in (
            ("events", rows["events"]),
            ("rejects", rows["rejects"]),
            ("current", rows["events"]),
            ("metrics", len(self.minutes[one.key])),
        ):
            if table in self.slice_commits:
                self.slice_commits[table][one.key] = SliceCommit(one, 2, count, counts)
        if rows["rejects"]:
            self.slice_commits["dlq"][one.key] = SliceCommit(one, 2, rows["rejects"], {"sent": rows["rejects"]})
        if "published" in self.rows:
            states = [row["state"] for row in self.of("published", slice=one.key)]
            late = sum(row["late"] is not None for row in self.of("published", slice=one.key))
            reported = {"sent": states.count("sent"), "second_deliveries": states.count("second delivery")}
            reported |= {"retracted": 0, "late": late, "revisions": 0}
            self.slice_commits["published"][one.key] = SliceCommit(one, 2, len(states), reported)

    def of(self, table: str, **where: object) -> list[Row]:
        """Rows of a table."""
        if table == "current" and "slice" in where:
            where["updated_by_slice"] = where.pop("slice")
        return [row for row in self.rows[table] if all(row[name] == value for name, value in where.items())]

    def at(self, table: str, of: Slice, place: PartitionOffset) -> Row:
        """The one row of a slice whose origin, or in raw whose record, is there."""
        names = ("partition", "offset") if table == "raw" else ("origin_partition", "origin_offset")
        where = dict(zip(names, (place[0], of.ranges[place[0]].start + place[1]), strict=True))
        [row] = self.of(table, slice=of.key, **where)
        return row

    def alter_slice_commit(self, table: str, one: Slice, **changes: Any) -> None:
        """Let a commit say something else."""
        self.slice_commits[table][one.key] = replace(self.slice_commits[table][one.key], **changes)

    def write(self) -> None:
        """Write the tables as they are now."""
        import pyarrow as pa

        # Commit records of an earlier call would count on.
        for table in ("current", commit_log.TABLE):
            shutil.rmtree(self.lake.build_table_path("orders", table), ignore_errors=True)
        for table, rows in self.rows.items():
            if table == "current":
                attempts = {key: slice_commit.attempt for key, slice_commit in self.slice_commits[table].items()}
                counted = {key: slice_commit.rows for key, slice_commit in self.slice_commits[table].items()}
                made = pa.Table.from_pylist(with_milliseconds(rows), self._schema(table))
                commit_current(self.lake, "orders", attempts, made, replace=True, counted=counted, ledger=self.ledger)
                continue
            made = pa.Table.from_pylist([*with_milliseconds(rows)], self._schema(table))
            plant(self.lake.build_table_path("orders", table), made, self._slice_commits_of(table), replace=True)

    def _slice_commits_of(self, table: str) -> list[SliceCommit]:
        slice_commits = self.slice_commits[table]
        if table != "metrics":
            return [*slice_commits.values()]
        minutes = {key: [round(one.timestamp()) // 60 for one in sorted(self.minutes[key])] for key in slice_commits}
        return [
            replace(slice_commit, extra={minute_rows.MINUTES: minutes[key]})
            for key, slice_commit in slice_commits.items()
        ]

    def _schema(self, table: str) -> Any:
        if table in COLUMNS:
            return schema_of(COLUMNS[table])
        return publication_log.build_schema() if table == "published" else minute_rows.build_schema(self.stream)

    def copy(self, folder: Path) -> World:
        """The same tables with copies of lake and ledger, for a test that changes them."""
        made = copy(self)
        made.lake, made.ledger = copy_stores(self.lake, folder)
        made.rows, made.slice_commits, made.topics = deepcopy((self.rows, self.slice_commits, self.topics))
        made.minutes = deepcopy(self.minutes)
        return made

    def check_slices(self, keys: Iterable[str] = ()) -> dict[str, dict[str, CheckResult]]:
        """Every check of these slices or of all, on the tables as they are now."""
        self.write()
        wanted = [*keys] or self.keys
        sources = Sources(self.ledger, cast("Kafka", self.topics), self.lake)
        return {
            name: by_slice
            for checks in CHECKS
            for name, by_slice in checks.check_slices(sources, self.stream, wanted).items()
        }

    def red(self, keys: Iterable[str] = ()) -> dict[str, list[str]]:
        """The checks that fail, each with the slices in which it does."""
        found = {n: [key for key, one in v.items() if not one.passed] for n, v in self.check_slices(keys).items()}
        return {name: failing for name, failing in found.items() if failing}


def _compute_precedence(row: Row) -> tuple[Any, ...]:
    """The version rule: the least wins."""
    return -row["version"], row["origin_timestamp"], row["origin_partition"], row["origin_offset"]


def _select_columns(origin: Origin) -> Row:
    at = _build_moment(origin.partition, origin.offset)
    return {**{f"origin_{name}": value for name, value in origin._asdict().items()}, "origin_timestamp": at}


def _compute_minutes(events: Iterable[Row]) -> list[Row]:
    return [{"slice": f"{at:%Y-%m-%d}", "minute": at, **row} for at, row in compute_minutes(events).items()]


def _build_sent_rows(events: Iterable[Row]) -> Iterator[Row]:
    """What became of events: of equal contents the first was sent; what came back through a tier is late."""
    before: set[str] = set()
    for row in events:
        value = (
            f'{{"order_id":"{row["order_id"]}","version":{row["version"]},"status":"{row["status"]}",'
            f'"customer_id":"c1","amount":{row["amount"]},"event_time":"{row["event_time"]:%Y-%m-%dT%H:%M:%S.%fZ}"}}'
        )
        reported = {name: row[name] for name in ("slice", *ORIGIN, "attempt")}
        reported |= {"state": "second delivery" if value in before else "sent", "revision": 0, "published_at": NOON}
        reported |= {"late": "retried" if row["retries"] else None}
        yield {**reported, "fingerprint": sha256(value.encode()).hexdigest()[:32]}
        before.add(value)


def _build_moment(partition: int, offset: int) -> datetime:
    return NOON + timedelta(seconds=10 * offset + partition)


def build_headers(offset: int) -> list[dict[str, object]]:
    """The envelope of a record of partition 0."""
    at = round(_build_moment(0, offset).timestamp() * 1000)
    envelope = Envelope("orders", 0, 0, offset, at, 1, "unresolved", "why", FIRST.key, NOON)
    return [{"key": name, "value": value} for name, value in envelope.to_headers()]


def schema_of(columns: str) -> Any:
    """The schema of a table that is declared in Spark's SQL."""
    import pyarrow as pa

    kinds = {
        "STRING": pa.string(),
        "INT": pa.int32(),
        "BIGINT": pa.int64(),
        "BINARY": pa.binary(),
        "BOOLEAN": pa.bool_(),
        "TIMESTAMP": pa.timestamp("us", "UTC"),
        "DECIMAL(12,2)": pa.decimal128(12, 2),
        "ARRAY<STRUCT<key: STRING, value: BINARY>>": pa.list_(
            pa.struct([("key", pa.string()), ("value", pa.binary())])
        ),
    }
    found = [(read_column_name(column), kinds[column.split(maxsplit=1)[1]]) for column in split_columns(columns)]
    return pa.schema(found)


def write_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Sound tables of a topic whose settings are unknown."""
    monkeypatch.setattr(gap_checks, "fetch_topic_settings", lambda *_: None)
    made = World(folder)
    made.write()
    return made
