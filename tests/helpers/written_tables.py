"""Tables of the stream `orders` that a test writes row by row, without the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dev.planted import plant
from highwater.envelope import Origin
from highwater.orchestration.checking.origin_counts import OriginEnds, count_ends
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
NOW = datetime(2026, 3, 1, tzinfo=UTC)
TIER, PARKED = STREAM.tier_topics[0], STREAM.parked_topic


def a_slice(ordinal: int, records: int, topic: str = "orders") -> Slice:
    start = 100 * ordinal
    return Slice("orders", topic, "A" * 22, 0, ordinal, {0: OffsetRange(start, start + records)}, NOW)


def slice_of(ordinal: int, ranges: dict[int, tuple[int, int]], generation: int = 0) -> Slice:
    spans = {p: OffsetRange(*span) for p, span in ranges.items()}
    return Slice("orders", "orders", "A" * 22, generation, ordinal, spans, NOW)


class Written:
    """Tables as a test writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lake = Lake(str(folder / "lake"))
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.rows: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("raw", "events", "rejects", "dlq", "current")
        }
        self.slice_commits: dict[str, dict[str, SliceCommit]] = {name: {} for name in self.rows if name != "current"}
        self.current: dict[str, int] = {}

    def prove(self, slice_: Slice, rows: Mapping[str, int], *, attempt: int = 1, **counts: int) -> None:
        """Commit a slice to tables, each with its number of rows."""
        for table, number in rows.items():
            if table == "current":
                self.current[slice_.key] = attempt
                continue
            slice_commit = SliceCommit(
                slice_, attempt, number, {"rejects": rows.get("rejects", 0), "tombstones": 0, **counts}
            )
            self.slice_commits[table][slice_.key] = slice_commit

    def add(self, table: str, slice_: Slice, offsets: Sequence[int], **columns: object) -> None:
        """Rows of origins of the main topic."""
        for offset in offsets:
            origin = {f"origin_{n}": v for n, v in Origin("orders", 0, 0, offset)._asdict().items()}
            self.rows[table].append({"slice": slice_.key, **origin, "retries": 0, **columns})

    def write(self) -> None:
        import pyarrow as pa

        texts = ["slice", "origin_topic", "next_topic"]
        numbers = ["origin_generation", "origin_partition", "origin_offset", "retries"]
        times = ["published_at"]
        # What the checks of versions ask for beside these.
        texts += ["key", "order_id", "status", "customer_id", "updated_by_slice"]
        numbers += ["version", "amount"]
        # A query for raw's keys.
        numbers += ["generation", "partition", "offset"]
        times += ["event_time"]
        numbers += ["origin_timestamp_ms"]
        kinds = [(texts, pa.string()), (numbers, pa.int64()), (times, pa.timestamp("us", "UTC"))]
        schema = pa.schema([(name, kind) for names, kind in kinds for name in names])
        if self.current or self.rows["current"]:
            plain = schema.remove(schema.get_field_index("slice"))
            rows = [{name: row.get(name) for name in plain.names} for row in self.rows["current"]]
            commit_current(self.lake, "orders", self.current, pa.Table.from_pylist(rows, plain), replace=True)
        for table, slice_commits in self.slice_commits.items():
            if slice_commits or self.rows[table]:
                made = pa.Table.from_pylist(self.rows[table], schema)
                plant(self.lake.build_table_path("orders", table), made, slice_commits.values(), replace=True)

    def ends(self) -> OriginEnds:
        self.write()
        return count_ends(self.ledger, self.lake, STREAM)


MAIN, LATER, RETRIED = a_slice(0, 10), a_slice(1, 5), a_slice(0, 3, TIER)
