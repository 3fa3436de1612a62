"""Slices whose tables a test writes by itself, and the asset that sends their events: without Spark.

`FakeTransactionLog` is a test double for the topic and its transactions, for tests of the order of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dev.planted import plant
from highwater.assets import dlq, events, published, raw, rejects
from highwater.assets.reclaims import SEEN
from highwater.assets.work import SliceReport, Work, do_nothing
from highwater.declaration import Accepted
from highwater.envelope import Origin
from highwater.resources.commit_log_writer import replace_slices
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream, order, with_milliseconds

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.producer_records import Record
    from highwater.resources.transactions import PublicationMark


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TARGET = "orders.accepted"


@dataclass(frozen=True)
class Event:
    """An event of a slice, by where its record was first published.

    Args:
        partition, offset: there.
        key: the order.
        version: of it.
        minute: of its publication, after noon.
        changes: other fields than `tests.helpers.support.order` gives.
        reclaims: how often its origin was reclaimed from the DLQ.
        left_at: as a reject, when it had been published before the lake was lost.
    """

    partition: int
    offset: int
    key: str
    version: int = 1
    minute: float = 0
    changes: Mapping[str, object] = field(default_factory=dict)
    reclaims: int = 0
    left_at: datetime | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What its record said."""
        return order(self.key, self.version, **self.changes)

    def row(self, stream: Stream, slice_key: str, attempt: int) -> dict[str, Any]:
        said = self.fields
        return {
            "slice": slice_key,
            **{f"origin_{n}": v for n, v in self.origin(stream)._asdict().items()},
            "origin_timestamp": NOON + timedelta(minutes=self.minute),
            "attempt": attempt,
            "retries": 0 if slice_key.startswith(f"{stream.topic}@") else 1,
            "reclaims": self.reclaims,
            **said,
            "key": self.key,
            "amount": Decimal(str(said["amount"])).quantize(Decimal("0.01")),
            "event_time": datetime.fromisoformat(said["event_time"]),
        }

    def read_reject(self, stream: Stream, slice_key: str, attempt: int) -> dict[str, Any]:
        """The same as a reject, which was parked."""
        return {
            **self.row(stream, slice_key, attempt),
            "key": self.key.encode(),
            "value": json.dumps(self.fields).encode(),
            "reason": "invalid",
            "permanent": True,
            "detail": "why",
            "next_topic": stream.parked_topic,
            "first_failed_at": NOON,
            "published_at": self.left_at,
        }

    def origin(self, stream: Stream) -> Origin:
        return Origin(stream.topic, 0, self.partition, self.offset)


@dataclass(frozen=True)
class Sent:
    """A record as a reader of the topic finds it."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, str]

    @property
    def place(self) -> tuple[int, int]:
        """The partition and offset of its origin, by its headers."""
        return int(self.headers["highwater.origin.partition"]), int(self.headers["highwater.origin.offset"])


class FakeTransactionLog:
    """A topic with transactions, in memory; it breaks where it is asked to."""

    def __init__(self) -> None:
        self.records: list[Sent] = []
        self.marks: dict[str, PublicationMark] = {}
        self.breaks: str | None = None
        self.commits = 0

    def __call__(
        self, kafka: object, name: str, topic: str, *, most_bytes: int = 0, group: str | None = None
    ) -> FakeTransactionLog:
        del kafka, topic, most_bytes
        self.name = group or name
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def mark(self) -> PublicationMark | None:
        return self.marks.get(self.name)

    def commit(
        self, records: Iterable[Record], mark: PublicationMark, meanwhile: Callable[[], object] = do_nothing
    ) -> None:
        self.commits += 1
        self.at("handed over")
        meanwhile()
        self.at("before")
        self.records += [
            Sent(r.partition or 0, r.key, r.value, {n: (v or b"").decode() for n, v in r.headers}) for r in records
        ]
        self.marks[self.name] = mark
        self.at("committed")

    def at(self, point: str) -> None:
        """Break here if this is the point: `before 2` is the second transaction."""
        if self.breaks == f"{point} {self.commits}":
            self.breaks = None
            raise Broken(point)


class Broken(Exception):  # noqa: N818 - no error of the project
    """A test double for the death of the process."""


class Tables:
    """A stream's ledger and tables, written slice by slice.

    Args:
        folder: for lake and ledger.
        topic: the main topic.
        topic_id: of it.
        kafka: the connection; none is needed with a `FakeTransactionLog`.
    """

    def __init__(self, folder: Path, topic: str = "orders", topic_id: str = "A" * 22, bootstrap: str = "") -> None:
        self.stream = make_stream(topic, publishes=Accepted(f"{topic}.accepted"))
        self.lake, self.ledger = Lake(str(folder / "lake")), Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.kafka = Kafka(bootstrap or "nowhere:1")
        self.topic_id = topic_id
        self.slices: dict[str, Slice] = {}
        self.attempts = 0
        self.lines: list[str] = []

    def plan(
        self, ordinal: int, topic: str | None = None, minute: float | None = None, **ranges: tuple[int, int]
    ) -> Slice:
        """A planned slice; by its ordinal if no minute is given, tiers an hour later."""
        tier = topic is not None and topic != self.stream.topic
        at = NOON + timedelta(minutes=minute if minute is not None else ordinal + (60 if tier else 0))
        slice_ = Slice(
            "orders",
            topic or self.stream.topic,
            self.topic_id if not tier else "B" * 22,
            0,
            ordinal,
            {int(name[1:]): OffsetRange(*bounds) for name, bounds in ranges.items()},
            at,
        )
        self.ledger.add([slice_])
        self.slices[slice_.key] = slice_
        return slice_

    def decide(
        self, slice_: Slice, rows: Iterable[Event], rejected: Iterable[Event] = (), *, known: bool = True
    ) -> None:
        """Write what a decision of a slice made: its events, its rejects, and whether these are known as published."""
        found, left = [*rows], [*rejected]
        attempt = self.ledger.allocate_attempts([slice_.key])[slice_.key]
        times = [int(datetime.fromisoformat(one.fields["event_time"]).timestamp() * 1e6) for one in found]
        counts = {"events": len(found), "rejects": len(left)}
        if times:
            counts |= {"first_event_us": min(times), "last_event_us": max(times)}
        if any(one.reclaims for one in found):
            counts[SEEN] = 1
        made = [one.row(self.stream, slice_.key, attempt) for one in found]
        self._write(
            "events",
            events.build_sql_columns(self.stream),
            slice_,
            made,
            SliceCommit(slice_, attempt, len(made), counts),
        )
        gone = [one.read_reject(self.stream, slice_.key, attempt) for one in left]
        slice_commit = SliceCommit(slice_, attempt, len(gone))
        self._write("rejects", rejects.COLUMNS, slice_, gone, slice_commit)
        if gone and known:
            self._write("dlq", dlq.COLUMNS, slice_, gone, slice_commit)

    def read(self, slice_: Slice, records: int) -> None:
        """Let a slice are in raw, without its rows."""
        self._write("raw", raw.COLUMNS, slice_, [], SliceCommit(slice_, 1, records))

    def _write(
        self, table: str, columns: str, slice_: Slice, rows: Sequence[Mapping[str, Any]], slice_commit: SliceCommit
    ) -> None:
        import pyarrow as pa

        # It brings Dagster with it, which processes that only send need not load.
        from tests.helpers.world import schema_of

        kinds = schema_of(columns)
        names = set(kinds.names)
        stored = [{name: value for name, value in row.items() if name in names} for row in with_milliseconds(rows)]
        made = pa.Table.from_pylist(stored, kinds)
        path = self.lake.build_table_path("orders", table)
        if self.lake.open_stream_table("orders", table) is None:
            plant(path, kinds.empty_table())
        replace_slices(self.lake.open_existing_table("orders", table), made, [slice_.key], [slice_commit], "")

    def work(self, *slices: Slice) -> Work:
        return Work(self.stream, slices, None, self.lake, self.ledger, self.kafka, self.lines.append)  # type: ignore[arg-type]

    def publish(self, *slices: Slice) -> dict[str, SliceReport]:
        """Send what is to be sent of the slices."""
        return {report.slice_.key: report for report in published.materialise(self.work(*slices))}


def read_fields(record: Sent) -> dict[str, Any]:
    """The fields of a record, decimals exact."""
    found: dict[str, Any] = json.loads(record.value or b"", parse_float=Decimal)
    return found


def build_orders(partition: int, first: int, last: int, **changes: Any) -> list[Event]:
    """Events at these offsets, each of an order of its own."""
    return [Event(partition, n, f"o{partition}-{n}", minute=n, changes={"n": n, **changes}) for n in range(first, last)]


def list_places(records: list[Sent]) -> list[tuple[int, int]]:
    return [record.place for record in records]
