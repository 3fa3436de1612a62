"""Tables of a stream made large without Spark: what the pipeline would have written, column by column in Arrow.

The stream has what a producer's usual faults leave behind: second deliveries, records that came back through a tier,
parked ones, and offsets of transaction markers. None of it is an error, so whatever finds one is wrong.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dev.planted import plant
from highwater.commit_records import CommitRecord, to_user_metadata
from highwater.plans import Generation
from highwater.resources.commit_log import build_log_path
from highwater.resources.commit_log_writer import add_missing_records, build_row, build_schema
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

PARTITIONS = 4
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
# A number of keys live at a time, each through three versions.
LIVING = 10_000
STATES = ("placed", "paid", "refunded")
# Of a given number of records one is delivered twice, one comes back through a tier, and one more cannot be parsed.
FAULT_EVERY = 1_000
TWICE, UNRESOLVED, MALFORMED = 7, 13, 17
SLICES_PER_COMMIT = 20
# The rows of each file of a table that is only a log, without data.
ROWS_PER_FILE = 1_000
_SOUND, _COPY, _UNRESOLVED, _MALFORMED = range(4)


@dataclass
class Chunk:
    """Records of one slice of the main topic, by column.

    Args:
        slice_: the slice.
        content: for each record the number of what it says.
        kind: sound, a copy, unresolved or malformed.
        partition, offset: where it is.
    """

    slice_: Slice
    content: NDArray[np.int64]
    kind: NDArray[np.int64]
    partition: NDArray[np.int64]
    offset: NDArray[np.int64]

    def where(self, *kinds: int) -> Chunk:
        """The rows of some kinds."""
        import numpy as np

        mask = np.isin(self.kind, kinds)
        return Chunk(self.slice_, self.content[mask], self.kind[mask], self.partition[mask], self.offset[mask])

    @property
    def keys(self) -> pa.Array:
        """Their keys; a malformed record has one of its own."""
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = self.content // (3 * LIVING) * LIVING + self.content % LIVING
        numbers[self.kind == _MALFORMED] = -1 - self.content[self.kind == _MALFORMED]
        return pc.binary_join_element_wise("o", pa.array(numbers).cast(pa.string()), "")

    @property
    def versions(self) -> NDArray[np.int64]:
        """Their versions, from 1."""
        return self.content % (3 * LIVING) // LIVING + 1

    @property
    def times(self) -> pa.Array:
        """The times of publication and of the events."""
        import pyarrow as pa

        first = int(BEGIN.timestamp() * 1_000_000)
        return pa.array(first + self.content * 1_000_000, pa.timestamp("us", "UTC"))

    @property
    def milliseconds(self) -> pa.Array:
        """The times of publication, as Kafka has them."""
        import pyarrow as pa

        return pa.array(int(BEGIN.timestamp() * 1000) + self.content * 1000, pa.int64())

    def values(self) -> pa.Array:
        """The records' values."""
        import pyarrow as pa
        import pyarrow.compute as pc

        versions, whole = self.versions, self.keys
        states = pa.array(STATES).take(pa.array(versions - 1))
        parts: list[Any] = ['{"order_id":"', whole, '","version":', pa.array(versions).cast(pa.string())]
        parts += [',"status":"', states, '","customer_id":"c1","amount":12.50,"event_time":"']
        parts += [pc.strftime(self.times.cast(pa.timestamp("s", "UTC")), "%Y-%m-%dT%H:%M:%S+00:00"), '"}']
        made = pc.binary_join_element_wise(*parts, "")
        return pc.if_else(pa.array(self.kind == _MALFORMED), "{", made).cast(pa.binary())


@dataclass
class Maker:
    """Writes the tables of a stream that holds a given number of contents, in slices of a fixed size.

    Args:
        stream: the stream; its own topic's name and ID are used.
        lake, ledger: are written to.
        topic_id: of the main topic.
        contents: how many records there are, copies and malformed ones left out.
        width: contents of a slice.
    """

    stream: Stream
    lake: Lake
    ledger: Ledger
    topic_id: str
    contents: int
    width: int
    records: int = field(default=0, init=False)
    tier_end: int = field(default=0, init=False)

    def chunks(self) -> Iterator[Chunk]:
        """The slices of the main topic with their records, in order."""
        import numpy as np

        ends = np.zeros(PARTITIONS, np.int64)
        for ordinal, first in enumerate(range(0, self.contents, self.width)):
            content = np.arange(first, min(first + self.width, self.contents))
            fault = content % FAULT_EVERY
            times = np.where((fault == TWICE) | (fault == MALFORMED), 2, 1)
            whole = np.repeat(content, times)
            second = np.concatenate([[False], whole[1:] == whole[:-1]])
            kind = np.where(second, np.where(whole % FAULT_EVERY == TWICE, _COPY, _MALFORMED), _SOUND)
            kind[(whole % FAULT_EVERY == UNRESOLVED)] = _UNRESOLVED
            partition = self._partitions(whole)
            offset = np.zeros_like(whole)
            ranges = {}
            for number in range(PARTITIONS):
                mine = partition == number
                start, count = int(ends[number]), int(mine.sum())
                offset[mine] = np.arange(start, start + count)
                # Behind them lies the marker of their transaction.
                ends[number] = start + count + 1
                ranges[number] = OffsetRange(start, start + count + 1)
            slice_ = Slice(
                self.stream.name,
                self.stream.topic,
                self.topic_id,
                0,
                ordinal,
                ranges,
                BEGIN + timedelta(seconds=ordinal),
            )
            yield Chunk(slice_, whole, kind, partition, offset)

    def _partitions(self, content: NDArray[np.int64]) -> NDArray[np.int64]:
        """By the CRC32 of the order's key, as librdkafka's own default does; malformed ones go with their neighbour."""
        import numpy as np

        numbers, back = np.unique(content // (3 * LIVING) * LIVING + content % LIVING, return_inverse=True)
        hashed = np.array([zlib.crc32(b"o%d" % number) % PARTITIONS for number in numbers.tolist()])
        return hashed[back]

    def write(self) -> None:
        """Write plans and tables."""
        starts: dict[int, int | None] = dict.fromkeys(range(PARTITIONS), 0)
        self.ledger.topics.open_generation(
            Generation(self.stream.name, self.stream.topic, self.topic_id, 0, starts, BEGIN)
        )
        batch: list[Chunk] = []
        for chunk in self.chunks():
            self.records += len(chunk.content)
            batch.append(chunk)
            if len(batch) == SLICES_PER_COMMIT:
                self._commit(batch)
                batch = []
        if batch:
            self._commit(batch)
        for name in ("raw", "events", "rejects", "dlq", "metrics", "current"):
            add_missing_records(self.lake.open_existing_table(self.stream.name, name))

    def _commit(self, batch: list[Chunk]) -> None:
        """The slices of some chunks, and one of the first tier with what of them was unresolved."""
        back = _TierSlice.of(self, batch)
        self.ledger.add([chunk.slice_ for chunk in batch])
        self.ledger.add([back.slice_])
        tables: dict[str, list[pa.Table]] = {name: [] for name in ("raw", "events", "rejects", "dlq", "metrics")}
        slice_commits: dict[str, list[SliceCommit]] = {name: [] for name in tables}
        for chunk in batch:
            self._add(tables, slice_commits, chunk)
        back.add(tables, slice_commits)
        self._current(batch, back.slice_.key)
        for name, parts in tables.items():
            _append(self.lake.build_table_path(self.stream.name, name), parts, slice_commits[name])

    def _add(
        self, tables: dict[str, list[pa.Table]], slice_commits: dict[str, list[SliceCommit]], chunk: Chunk
    ) -> None:
        good, bad = chunk.where(_SOUND, _COPY), chunk.where(_UNRESOLVED, _MALFORMED)
        counts = {
            "raw": len(chunk.content), "events": len(good.content), "rejects": len(bad.content), "tombstones": 0,
            "superseded": 0,
        }  # fmt: skip
        rows = {"raw": None, "events": len(good.content), "rejects": len(bad.content), "dlq": len(bad.content)}
        tables["raw"].append(_build_raw(chunk))
        tables["events"].append(_build_events(good, chunk.slice_.key, 0))
        tables["rejects"].append(_build_rejects(bad, self.stream))
        tables["dlq"].append(_build_dlq(bad, self.stream))
        for name, many in {**rows, "metrics": 0}.items():
            sent = {"sent": len(bad.content)} if name == "dlq" else counts
            extra: dict[str, Any] = {"minutes": []} if name == "metrics" else {}
            slice_commits[name].append(SliceCommit(chunk.slice_, 1, many, sent if name != "raw" else {}, extra=extra))

    def _current(self, batch: list[Chunk], tier: str) -> None:
        """The keys whose last version is in these slices."""
        import pyarrow as pa
        from deltalake import CommitProperties, write_deltalake

        path = self.lake.build_table_path(self.stream.name, "current")
        parts = []
        for chunk in batch:
            # A key's last content is the third; of the keys that still live at the end, whatever came last.
            lasting = chunk.where(_SOUND, _UNRESOLVED)
            final = (lasting.versions == 3) | (lasting.content + LIVING >= self.contents)
            chosen = Chunk(
                chunk.slice_,
                *[column[final] for column in (lasting.content, lasting.kind, lasting.partition, lasting.offset)],
            )
            rows = _build_events(chosen, tier, 0).drop_columns(["slice", "attempt", "retries"])
            by = pa.array([chunk.slice_.key, tier]).take(pa.array((chosen.kind == _UNRESOLVED).astype("int64")))
            parts.append(rows.append_column("updated_by_slice", by))
        keys = [*[chunk.slice_.key for chunk in batch], tier]
        metadata = to_user_metadata([CommitRecord(key, 1, None, tier) for key in keys], 0)
        properties = CommitProperties(custom_metadata={"userMetadata": metadata})
        write_deltalake(path, pa.concat_tables(parts), mode="append", commit_properties=properties)


@dataclass
class _TierSlice:
    """A slice of the first tier, whose records are all accepted."""

    maker: Maker
    slice_: Slice
    chunks: list[Chunk]

    @classmethod
    def of(cls, maker: Maker, batch: list[Chunk]) -> _TierSlice:
        chunks = [chunk.where(_UNRESOLVED) for chunk in batch]
        ordinal = batch[0].slice_.ordinal // SLICES_PER_COMMIT
        many = sum(len(chunk.content) for chunk in chunks)
        start = maker.tier_end
        maker.tier_end = start + many
        planned_at = batch[-1].slice_.planned_at + timedelta(milliseconds=500)
        tier = maker.stream.tier_topics[0]
        ranges = {0: OffsetRange(start, start + many)}
        return cls(maker, Slice(maker.stream.name, tier, "T" * 22, 0, ordinal, ranges, planned_at), chunks)

    def add(self, tables: dict[str, list[pa.Table]], slice_commits: dict[str, list[SliceCommit]]) -> None:
        many = sum(len(chunk.content) for chunk in self.chunks)
        counts = {"raw": many, "events": many, "rejects": 0, "tombstones": 0, "superseded": 0}
        tables["events"] += [_build_events(chunk, self.slice_.key, 1) for chunk in self.chunks]
        for name, rows in {"raw": many, "events": many, "rejects": 0, "metrics": 0}.items():
            extra: dict[str, Any] = {"minutes": []} if name == "metrics" else {}
            slice_commits[name].append(SliceCommit(self.slice_, 1, rows, counts, extra=extra))


def _repeat(text: str | None, many: int) -> pa.Array:
    import pyarrow as pa

    return pa.array([text], pa.string()).take(pa.array([0] * many, pa.int64()))


def _parse_number(value: int, many: int) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    return pa.array(np.full(many, value), pa.int32())


def _build_raw(chunk: Chunk) -> pa.Table:
    import pyarrow as pa

    many = len(chunk.content)
    return pa.table(
        {
            "slice": _repeat(chunk.slice_.key, many),
            "topic": _repeat(chunk.slice_.topic, many),
            "generation": _parse_number(0, many),
            "partition": pa.array(chunk.partition, pa.int32()),
            "offset": pa.array(chunk.offset),
            "timestamp": chunk.times,
            "timestamp_ms": chunk.milliseconds,
            "timestamp_type": _parse_number(0, many),
            "key": chunk.keys.cast(pa.binary()),
            "value": chunk.values(),
            "headers": _build_empty_headers(many),
        }
    )


def _build_empty_headers(many: int) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(many, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))


def _build_origins(chunk: Chunk, key: str) -> dict[str, pa.Array]:
    import pyarrow as pa

    many = len(chunk.content)
    return {
        "slice": _repeat(key, many),
        "origin_topic": _repeat(chunk.slice_.topic, many),
        "origin_generation": _parse_number(0, many),
        "origin_partition": pa.array(chunk.partition, pa.int32()),
        "origin_offset": pa.array(chunk.offset),
        "origin_timestamp": chunk.times,
        "origin_timestamp_ms": chunk.milliseconds,
    }


def _build_events(chunk: Chunk, key: str, retries: int) -> pa.Table:
    import pyarrow as pa

    many, versions = len(chunk.content), chunk.versions
    amount = pa.array([Decimal("12.50")], pa.decimal128(12, 2)).take(pa.array([0] * many, pa.int64()))
    return pa.table(
        {
            **_build_origins(chunk, key),
            "attempt": _parse_number(1, many),
            "retries": _parse_number(retries, many),
            "key": chunk.keys,
            "version": pa.array(versions, pa.int32()),
            "event_time": chunk.times,
            "order_id": chunk.keys,
            "status": pa.array(STATES).take(pa.array(versions - 1)),
            "customer_id": _repeat("c1", many),
            "amount": amount,
        }
    )


def _select_target(chunk: Chunk, stream: Stream) -> pa.Array:
    import pyarrow as pa

    places = pa.array([stream.tier_topics[0], stream.parked_topic])
    return places.take(pa.array((chunk.kind == _MALFORMED).astype("int64")))


def _build_reasons(chunk: Chunk) -> pa.Array:
    import pyarrow as pa

    return pa.array(["unresolved", "malformed"]).take(pa.array((chunk.kind == _MALFORMED).astype("int64")))


def _build_reject_columns(chunk: Chunk, stream: Stream) -> dict[str, pa.Array]:
    """The columns that `rejects` and `dlq` share."""
    import pyarrow as pa

    many = len(chunk.content)
    return {
        **_build_origins(chunk, chunk.slice_.key),
        "attempt": _parse_number(1, many),
        "retries": _parse_number(0, many),
        "reason": _build_reasons(chunk),
        "rule": pa.nulls(many, pa.string()),
        "detail": _repeat("", many),
        "next_topic": _select_target(chunk, stream),
        "first_failed_at": chunk.times,
    }


def _build_rejects(chunk: Chunk, stream: Stream) -> pa.Table:
    import pyarrow as pa

    record = {
        "key": chunk.keys.cast(pa.binary()),
        "value": chunk.values(),
        "headers": _build_empty_headers(len(chunk.content)),
    }
    return pa.table({**_build_reject_columns(chunk, stream), **record})


def _build_dlq(chunk: Chunk, stream: Stream) -> pa.Table:
    import pyarrow as pa

    return pa.table({**_build_reject_columns(chunk, stream), "published_at": chunk.times})


def _append(path: str, parts: list[pa.Table], slice_commits: Sequence[SliceCommit]) -> None:
    import pyarrow as pa

    there = [part for part in parts if len(part)]
    empty = pa.table({"slice": pa.array([], pa.string())})
    plant(path, pa.concat_tables(there, promote_options="default") if there else empty, slice_commits, recorded=False)


def write_log(path: str, slices: Sequence[Slice]) -> None:
    """A table with a commit and a file for each slice, by its log and `_commits` alone: no file is there."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    plant(path, pa.table({"slice": pa.array([], pa.string())}))
    log = Path(path) / "_delta_log"
    (log / f"{1:020d}.json").write_text(
        "\n".join(json.dumps(_build_added_file(slice_, partitioned=path.endswith("/published"))) for slice_ in slices)
    )
    table = DeltaTable(path)
    table.create_checkpoint()
    records = [CommitRecord(slice_.key, 1, ROWS_PER_FILE, "planted", "", 1, slice_.planned_at) for slice_ in slices]
    slice_commits = [SliceCommit(slice_, 1, ROWS_PER_FILE).to_json() for slice_ in slices]
    rows = [
        {**build_row(table, one), "record": slice_commit}
        for one, slice_commit in zip(records, slice_commits, strict=True)
    ]
    write_deltalake(
        build_log_path(table), pa.Table.from_pylist(rows, build_schema()), mode="append", partition_by=["table"]
    )


def _build_added_file(slice_: Slice, *, partitioned: bool) -> dict[str, Any]:
    """A file as Delta's log describes it."""
    bounds = {"minValues": {"slice": slice_.key}, "maxValues": {"slice": slice_.key}}
    stats = {"numRecords": ROWS_PER_FILE, **bounds, "nullCount": {}}
    file = {
        "path": f"{f'slice={quote(slice_.key)}/' if partitioned else ''}part-{slice_.ordinal}.parquet",
        "partitionValues": {"slice": slice_.key} if partitioned else {},
        "size": 20_000,
        "modificationTime": int(BEGIN.timestamp() * 1000) + slice_.ordinal,
        "dataChange": True,
        "stats": json.dumps(stats),
    }
    return {"add": file}
