"""Tables of a stream as a test plants them, and what every check of versions says of them.

They are written row by row, without the pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from assets.streams.orders import STREAM as ORDERS
from dev.compare import expected_event
from dev.intended import EVENT, UNRESOLVED, Intended
from dev.orders import ORDERS as SOURCE
from dev.planted import plant
from dev.readings import Place, TopicRecord
from dev.script import Script
from dev.shapes import SHAPES
from highwater.declaration import Severity, Stream
from highwater.envelope import Origin
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.slice_status import check_version_order
from highwater.orchestration.checking.version_checks import check_stream_versions, check_version_gaps, check_versions
from highwater.resources.lake import Lake
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice, SliceKey
from tests.helpers.commits import commit_current
from tests.helpers.support import with_milliseconds

if TYPE_CHECKING:
    import pyarrow as pa

BEGIN = datetime(2026, 3, 1, 10, tzinfo=UTC)
# Slices of ten offsets in each of two partitions, and one of the first tier.
FIRST, SECOND, THIRD, TIER = (*(f"orders@{n:07d}" for n in range(3)), "orders.dlq.1@0000000")
WIDTH = 10
STATES = {1: "placed", 2: "paid", 3: "refunded"}
Row = dict[str, Any]


def event(offset: int, version: int, key: str = "o1", **changes: Any) -> Row:
    """An event whose time goes with its version, in the slice of its offset; `changes` overrides columns."""
    sound = {
        "slice": f"orders@{offset // WIDTH:07d}",
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": 0,
        "origin_offset": offset,
        "origin_timestamp": BEGIN + timedelta(seconds=offset),
        "retries": 0,
        "key": key,
        "version": version,
        "event_time": BEGIN + timedelta(minutes=version),
        "order_id": key,
        "status": STATES.get(version, "paid"),
        "customer_id": "c1",
        "amount": Decimal("12.50"),
    }
    return sound | changes


def reject(offset: int, key: str, value: bytes | None, next_topic: str, **changes: Any) -> Row:
    """A rejected record that was published a minute after the stream began."""
    sound = {name: value for name, value in event(offset, 1, key).items() if name.startswith(("slice", "origin"))}
    reported = {"retries": 0, "reason": "unresolved", "key": key.encode(), "value": value, "next_topic": next_topic}
    return {**sound, **reported, **changes}


def value(version: int) -> bytes:
    """A value that names its version."""
    return json.dumps({"version": version}).encode()


class Planted:
    """The tables of the stream `orders`; sound, until a test plants something."""

    def __init__(self, folder: Path, stream: Stream = ORDERS) -> None:
        self.lake = Lake(str(folder))
        self.stream = stream
        # Three lives over three slices, a second delivery, and one whose first version came back through a tier.
        self.events = [
            *[event(10 * n, n + 1, "o1") for n in range(3)],
            *[event(1, 1, "o2"), event(11, 2, "o2"), event(12, 1, "o2")],
            *[event(2, 1, "o3", origin_partition=1), event(22, 2, "o3", origin_partition=1)],
            *[event(3, 1, "o4", slice=TIER, retries=1), event(13, 2, "o4")],
        ]
        self.rejects = [reject(3, "o4", value(1), "orders.dlq.1")]
        self.undecided: set[str] = set()
        self.reclaim_numbers: dict[Origin, int] = {}
        # As the table `dlq` has it; the rejects if None.
        self.published: list[Row] | None = None
        self.published_at = BEGIN + timedelta(minutes=1)
        self.current: list[Row] | None = None
        self.slices = [FIRST, SECOND, THIRD, TIER]
        self.width, self.partitions = WIDTH, 2
        # Columns beside those of the stream `orders`.
        self.extra: list[pa.Field[Any]] = []

    def write(self) -> None:
        import pyarrow as pa

        slice_commits = [
            _slice_commit(self.stream, key, self.width, self.partitions)
            for key in self.slices
            if key not in self.undecided
        ]
        events = [row for row in self.events if row["slice"] not in self.undecided]
        self._write("events", events, self._events(), slice_commits)
        self._write("rejects", self.rejects, _rejects(), slice_commits)
        sent = self.rejects if self.published is None else self.published
        published = [{**row, "published_at": self.published_at} for row in sent]
        schema = pa.schema([*_origin(), *_numbers(), ("published_at", pa.timestamp("us", "UTC"))])
        self._write("dlq", published, schema)
        brought = compute_winners(self.events) if self.current is None else self.current
        columns = self._events().append(pa.field("updated_by_slice", pa.string()))
        plain = columns.remove(columns.get_field_index("slice"))
        mine = [{name: row.get(name) for name in plain.names} for row in with_milliseconds(brought)]
        decided = {key: 1 for key in self.slices if key not in self.undecided}
        commit_current(self.lake, "orders", decided, pa.Table.from_pylist(mine, plain), replace=True)

    def _events(self) -> pa.Schema:
        schema = _events()
        for column in self.extra:
            schema = schema.append(column)
        return schema

    def _write(
        self, table: str, rows: Iterable[Row], schema: pa.Schema, slice_commits: Iterable[SliceCommit] = ()
    ) -> None:
        import pyarrow as pa

        names = set(schema.names)
        stored = [{name: cell for name, cell in row.items() if name in names} for row in with_milliseconds(rows)]
        made = pa.Table.from_pylist(stored, schema)
        plant(self.lake.build_table_path("orders", table), made, slice_commits, replace=True)

    def check_slices(self) -> dict[str, dict[str, CheckResult]]:
        """Each check's result on each slice, of one run over all of them, and on the stream, under the name ``."""
        self.write()
        keys = [key for key in self.slices if key not in self.undecided]
        found = {
            **check_versions(self.lake, self.stream, keys),
            **check_version_gaps(self.lake, self.stream, keys, self.reclaim_numbers),
            "versions_in_order": check_version_order(self.lake, self.stream, keys),
        }
        whole = check_stream_versions(self.lake, self.stream, self.reclaim_numbers)
        return {name: {**by_slice, "": whole[name]} for name, by_slice in found.items()}

    def red(self) -> dict[str, dict[str, Severity]]:
        """For each check that fails where it does, and how hard."""
        return red(self.stream, self.check_slices())


def red(stream: Stream, results: dict[str, dict[str, CheckResult]]) -> dict[str, dict[str, Severity]]:
    """Of results those that fail, by check and slice, and how hard."""
    found: dict[str, dict[str, Severity]] = {}
    for name, by_slice in results.items():
        for key, result in by_slice.items():
            if not result.passed:
                found.setdefault(name, {})[key] = Severity.WARN if result.warning else stream.find_severity(name)
    return found


def compute_winners(events: Iterable[Row]) -> list[Row]:
    """What `current` holds: of each key the highest version, the earliest origin of equal ones."""
    best: dict[str, Row] = {}
    for row in with_milliseconds(events):
        at = row["key"]
        if at not in best or _order(row) < _order(best[at]):
            best[at] = {**row, "updated_by_slice": row["slice"]}
    return list(best.values())


def _order(row: Row) -> tuple[Any, ...]:
    return (-row["version"], row["origin_timestamp_ms"], row["origin_partition"], row["origin_offset"])


class Generated:
    """The orders of the generator, with every fault, as the design decides them: by the generator's own account.

    They lie in three partitions, in slices of a fixed number of offsets of each. What was unresolved comes back in one
    slice of the first tier, when all of the topic is decided.
    """

    WIDTH = 100

    def __init__(self, folder: Path) -> None:
        self.planted = Planted(folder)
        self.planted.events, self.planted.rejects = [], []
        self.faults: dict[str, str] = {}
        self._back: list[Row] = []
        ends = [0, 0, 0]
        script = Script(SOURCE, seed=5, records=900, rates={"large_record": 0.0})
        for number, made in enumerate(record for batch in script.batches() for record in batch):
            place = Place(crc32(made.entity.encode()) % 3, ends[crc32(made.entity.encode()) % 3])
            ends[place.partition] += 1
            # An aborted record leaves a gap. Publish times go with the order of writing.
            if made.transaction != "aborted":
                at = int(BEGIN.timestamp() * 1000) + number - made.backdated_ms
                self._add(made, TopicRecord(place, at, 0, made.key, made.value, ()))
        self.main = [str(SliceKey("orders", n)) for n in range(max(ends) // self.WIDTH + 1)]

    def _add(self, made: Intended, stored: TopicRecord) -> None:
        self.faults[made.entity] = made.fault if made.fault != "none" else self.faults.get(made.entity, "none")
        place = stored.place
        origin = event(place.offset, 1, made.entity, origin_partition=place.partition)
        origin["slice"] = str(SliceKey("orders", place.offset // self.WIDTH))
        origin["origin_timestamp"] = BEGIN
        reported = expected_event(SHAPES["orders"], stored)
        if made.ending == EVENT:
            self.planted.events.append(origin | reported)
        elif made.ending.end == "reject":
            to = "orders.dlq.1" if made.ending == UNRESOLVED else "orders.parked"
            raw = {"slice": origin["slice"], "origin_partition": place.partition}
            self.planted.rejects.append({**reject(place.offset, "", stored.value, to), **raw, "key": stored.key})
        if made.ending == UNRESOLVED:
            self._back.append({**origin, **reported, "slice": TIER, "retries": 1})

    def keys_with(self, fault: str) -> set[str]:
        """The keys that have a fault."""
        return {key for key, found in self.faults.items() if found == fault}

    def write(self, decided: list[str]) -> Planted:
        """The tables when this many slices are decided."""
        planted = Planted(Path(self.planted.lake.root) / str(len(decided)))
        planted.events = [row for row in [*self.planted.events, *self._back] if row["slice"] in decided]
        planted.rejects = [row for row in self.planted.rejects if row["slice"] in decided]
        planted.slices, planted.width, planted.partitions = decided, self.WIDTH, 3
        planted.write()
        return planted

    def red_keys(self, decided: list[str], judged: str | None) -> dict[str, set[str]]:
        """By check the keys that it names as wrong in a slice, or over the stream, after this many decided slices."""
        planted = self.write(decided)
        if judged is None:
            found = check_stream_versions(planted.lake, planted.stream)
        else:
            keys = [judged]
            by = check_versions(planted.lake, ORDERS, keys) | check_version_gaps(planted.lake, ORDERS, keys)
            found = {name: by_slice[judged] for name, by_slice in by.items()}
        wrong = {name: result for name, result in found.items() if not result.passed and not result.warning}
        return {name: {str(row["key"]) for row in result.samples} for name, result in wrong.items()}


def _slice_commit(stream: Stream, key: str, width: int, partitions: int) -> SliceCommit:
    parsed = SliceKey.parse(key)
    reach = OffsetRange(width * parsed.ordinal, width * (parsed.ordinal + 1))
    ranges = dict.fromkeys(range(partitions), reach)
    slice_ = Slice(stream.name, parsed.topic, "A" * 22, 0, parsed.ordinal, ranges, BEGIN)
    return SliceCommit(slice_, 1, rows=1, counts={})


def _numbers() -> list[tuple[str, Any]]:
    import pyarrow as pa

    return [("retries", pa.int32()), ("reclaims", pa.int32())]


def _origin() -> list[tuple[str, Any]]:
    import pyarrow as pa

    return [
        *[(name, pa.string()) for name in ("slice", "origin_topic")],
        *[(name, pa.int32()) for name in ("origin_generation", "origin_partition")],
        ("origin_offset", pa.int64()),
        ("origin_timestamp", pa.timestamp("us", "UTC")),
        ("origin_timestamp_ms", pa.int64()),
    ]


def _events() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            *_origin(),
            *_numbers(),
            ("key", pa.string()),
            ("version", pa.int32()),
            ("event_time", pa.timestamp("us", "UTC")),
            *[(name, pa.string()) for name in ("order_id", "status", "customer_id")],
            ("amount", pa.decimal128(12, 2)),
        ]
    )


def _rejects() -> pa.Schema:
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("reason", "rule", "next_topic")]
    binary = [(name, pa.binary()) for name in ("key", "value")]
    return pa.schema([*_origin(), *_numbers(), *texts, *binary])
