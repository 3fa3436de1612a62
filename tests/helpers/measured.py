"""A stream whose minutes are measured from events that a test writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import metrics
from highwater.assets.work import SliceReport, Work
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.resources.commit_log_writer import replace_slices
from highwater.resources.delta_rs_writes import create
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.plain_minutes import minutes_of
from tests.helpers.support import with_milliseconds

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Event:
    """An event as its slice holds it; `seconds` after noon."""

    key: str
    version: int
    seconds: float
    status: str = "paid"
    amount: str = "10.00"
    published: int = 0
    offset: int = 0

    @property
    def time(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)


class Measured:
    """A stream with a lake of its own, whose events the test writes."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.stream = replace(ORDERS, **changes)
        self.lake = Lake(str(folder / "lake"))
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.held: dict[int, Sequence[Event]] = {}
        self.attempts: defaultdict[int, int] = defaultdict(int)

    def slice_(self, ordinal: int) -> Slice:
        return Slice("orders", "orders", "A" * 22, 0, ordinal, {0: OffsetRange(ordinal, ordinal)}, NOON)

    def decide(self, ordinal: int, *events: Event) -> None:
        """Commit a slice as the stage of events does."""
        import pyarrow as pa

        self.attempts[ordinal] += 1
        slice_ = self.slice_(ordinal)
        if ordinal not in self.held:
            self.ledger.add([slice_])
        rows = [_columns(slice_, event) for event in events]
        slice_commit = SliceCommit(slice_, self.attempts[ordinal], len(events), {"events": len(events)})
        if self.lake.open_stream_table("orders", "events") is None:
            create(self.lake.build_table_path("orders", "events"), EVENTS)
        made = pa.Table.from_pylist([*with_milliseconds(rows)], EVENTS)
        replace_slices(self.lake.open_existing_table("orders", "events"), made, [slice_.key], [slice_commit], "")
        self.held[ordinal] = events

    def work(self, *ordinals: int, **changes: Any) -> Work:
        nothing: Any = None  # neither Spark nor Kafka is asked
        slices = [self.slice_(ordinal) for ordinal in ordinals]
        work = Work(self.stream, slices, nothing, self.lake, self.ledger, nothing, lambda _: None)
        return replace(work, **changes)

    def measure(self, *ordinals: int, **changes: Any) -> list[SliceReport]:
        return metrics.materialise(self.work(*ordinals, **changes))

    def lacking(self) -> list[int]:
        held = read_attempts(self.lake, self.stream)
        assert held.metrics is not None
        return [o for o in self.held if held.metrics.get(self.slice_(o).key) != self.attempts[o]]

    def table(self) -> dict[datetime, dict[str, Any]]:
        rows = self.rows("*")
        dropped = {"slice", "minute", "linked"}
        found = {row["minute"]: {n: v for n, v in row.items() if n not in dropped} for row in rows}
        assert len(found) == len(rows), "a minute has two rows"
        return found

    def rows(self, columns: str, where: str = "true") -> list[dict[str, Any]]:
        import pyarrow as pa
        from deltalake import DeltaTable, QueryBuilder

        opened = DeltaTable(self.lake.build_table_path("orders", "metrics"))
        result = QueryBuilder().register("t", opened).execute(f"SELECT {columns} FROM t WHERE {where}")
        found: list[dict[str, Any]] = pa.table(result).to_pylist()
        return found

    def commits(self) -> list[dict[str, Any]]:
        from deltalake import DeltaTable

        return DeltaTable(self.lake.build_table_path("orders", "metrics")).history()

    def see(self) -> None:
        """Assert that the table is what the events come to."""
        assert self.table() == minutes_of(
            _columns(self.slice_(ordinal), event) for ordinal, events in self.held.items() for event in events
        )


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("slice", pa.string()),
            ("origin_topic", pa.string()),
            ("origin_generation", pa.int32()),
            ("origin_partition", pa.int32()),
            ("origin_offset", pa.int64()),
            ("origin_timestamp", pa.timestamp("us", "UTC")),
            ("origin_timestamp_ms", pa.int64()),
            ("key", pa.string()),
            ("version", pa.int32()),
            ("event_time", pa.timestamp("us", "UTC")),
            ("status", pa.string()),
            ("amount", pa.decimal128(12, 2)),
        ]
    )


EVENTS = _schema()


def _columns(slice_: Slice, event: Event) -> dict[str, Any]:
    return {
        "slice": slice_.key,
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": 0,
        "origin_offset": event.offset,
        "origin_timestamp": NOON + timedelta(seconds=event.published),
        "key": event.key,
        "version": event.version,
        "event_time": event.time,
        "status": event.status,
        "amount": Decimal(event.amount),
    }
