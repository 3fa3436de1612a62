"""For `audit --slices`: raw against the topic, record by record, by librdkafka and so by no code of the pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from highwater.divergence import compute_digest
from highwater.envelope import build_headers
from highwater.errors import HighwaterError
from highwater.gaps import expand_ranges
from highwater.plans import find_overtaking_generation
from highwater.resources.delta import slice_is_one_of, stream_rows
from highwater.retention import count_expired_rows
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.envelope import KafkaHeader
    from highwater.gaps import PartitionOffset
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState
    from highwater.slices import Slice

SAMPLES = 5


@dataclass(frozen=True)
class TopicComparison:
    """One slice against the topic.

    Args:
        slice_key: the slice.
        records: committed records that Kafka serves in its ranges.
        lacking: records that raw lacks.
        altered: records whose timestamp, its type, key, value or headers differ in raw.
        gone: rows of raw that Kafka serves no more: retention or compaction took them.
        skipped: why the slice could not be compared; None if it was.
    """

    slice_key: str
    records: int = 0
    lacking: Sequence[PartitionOffset] = ()
    altered: Sequence[PartitionOffset] = ()
    gone: int = 0
    skipped: str | None = None

    @property
    def error(self) -> str | None:
        """The fault, in a sentence; None if there is none."""
        parts = [
            f"{len(places):,} records {what}: " + ", ".join(f"partition {p} offset {o}" for p, o in places[:SAMPLES])
            for places, what in ((self.lacking, "that Kafka serves are not in raw"), (self.altered, "differ in raw"))
            if places
        ]
        return f"{self.slice_key}: {'; '.join(parts)}" if parts else None

    @property
    def line(self) -> str:
        """The slice in a sentence."""
        if self.skipped is not None:
            return f"{self.slice_key}: not compared: {self.skipped}"
        gone = f", {self.gone:,} rows that Kafka serves no more" if self.gone else ""
        return self.error or f"{self.slice_key}: {self.records:,} records of the topic are in raw as they are{gone}"


def compare_with_topic(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, slices: Iterable[Slice]
) -> list[TopicComparison]:
    """Compare slices that are in raw; in memory is one slice's digests at a time.

    Raises:
        DependencyUnavailableError: the lake or the ledger could not be read.
    """
    wanted = list(slices)
    slice_commits = lake.load_slice_commits(stream.name, "raw", [slice_.key for slice_ in wanted])
    generations = {
        topic: ledger.topics.list_generations(stream.name, topic) for topic in {slice_.topic for slice_ in wanted}
    }
    erased = ledger.erasures.read_for_slices([slice_.key for slice_ in wanted])
    # Expired rows are there again where they are compared.
    places = {
        key: {place for one in found if not one.by_age for place in expand_ranges(one.places)}
        for key, found in erased.items()
    }
    return [
        TopicComparison(slice_.key, skipped="other records occupy its offsets now, which was accepted")
        if find_overtaking_generation(slice_, generations[slice_.topic])
        else TopicComparison(
            slice_.key, skipped=f"{count_expired_rows(slice_commits[slice_.key]):,} rows of raw have expired"
        )
        if count_expired_rows(slice_commits[slice_.key])
        else _compare_slice(kafka, lake, stream, slice_, places.get(slice_.key, set()))
        for slice_ in wanted
        if slice_.key in slice_commits
    ]


def _compare_slice(
    kafka: Kafka, lake: Lake, stream: Stream, slice_: Slice, erased: set[PartitionOffset]
) -> TopicComparison:
    try:
        state = kafka.read_topic_state(slice_.topic)
        reason = _find_skip_reason(slice_, state)
        served = {} if reason else _read_served_digests(kafka, slice_, state)
    except HighwaterError as error:
        return TopicComparison(slice_.key, skipped=error.problem)
    if reason:
        return TopicComparison(slice_.key, skipped=reason)
    rows = _read_raw_places(lake, stream, slice_)
    return TopicComparison(
        slice_.key,
        records=len(served),
        lacking=sorted(served.keys() - rows.keys() - erased),
        altered=sorted(place for place in served.keys() & rows.keys() if served[place] != rows[place]),
        gone=len(rows.keys() - served.keys()),
    )


def _find_skip_reason(slice_: Slice, state: TopicState) -> str | None:
    if state.topic_id != slice_.topic_id:
        return "the topic was recreated since"
    leaderless = [
        p for p, r in slice_.ranges.items() if len(r) and (p not in state.partitions or not state.partitions[p].known)
    ]
    return f"no leader for partitions {', '.join(map(str, leaderless))}" if leaderless else None


def _read_served_digests(kafka: Kafka, slice_: Slice, state: TopicState) -> dict[PartitionOffset, str]:
    """Digests of the records that Kafka still serves in the slice's ranges."""
    ranges = {}
    for partition, offsets in slice_.ranges.items():
        start = max(offsets.start, state.partitions[partition].log_start or 0) if len(offsets) else offsets.start
        ranges[partition] = OffsetRange(min(start, offsets.end), offsets.end)
    found: dict[PartitionOffset, str] = {}
    for message in kafka.read(slice_.topic, ranges):
        key: Any = message.key()
        value: Any = message.value()
        headers: Any = message.headers()
        # librdkafka numbers the types from 1 on, 0 is none; Spark from 0 on.
        kind, at = message.timestamp()
        digest = _compute_digest(kind - 1, at, key, value, headers or ())
        found[message.partition() or 0, message.offset() or 0] = digest
    return found


def _compute_digest(
    kind: int, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Iterable[KafkaHeader]
) -> str:
    """The digest of a record with the type of its timestamp, and with its headers in their order."""
    return compute_digest(timestamp_ms, key, value) + hashlib.sha256(repr([kind, *headers]).encode()).hexdigest()


def _read_raw_places(lake: Lake, stream: Stream, slice_: Slice) -> dict[PartitionOffset, str]:
    raw = lake.open_stream_table(stream.name, "raw")
    assert raw is not None, "the slice's commit was just read there"
    columns = '"partition", "offset", timestamp_type, timestamp_ms, key, value, headers'
    where = f"{slice_is_one_of([slice_.key])}"
    return {
        (row["partition"], row["offset"]): _compute_digest(
            row["timestamp_type"], row["timestamp_ms"], row["key"], row["value"], build_headers(row)
        )
        for row in stream_rows(raw, f"SELECT {columns} FROM t WHERE {where}")
    }
