"""Compares the records that the tables say were sent with those on the topics: tiers, parked topic, accepted events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from highwater.assets import publication_log
from highwater.assets.reclaims import NUMBER
from highwater.declaration import Stream
from highwater.envelope import ORIGIN_SQL, REVISION, KafkaHeader, Origin, open_envelope
from highwater.errors import HighwaterError
from highwater.publishing import EventState
from highwater.resources.delta import query, read_count, slice_is_one_of
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.topic_state import TopicState
from highwater.slices import OffsetRange, Slice

SAMPLES = 5
# Nothing is sent of a slice before it is planned. When it was sent is not known as surely: a run that died between the
# transaction and its table is finished later, with a later time. Clocks differ by no more than this.
MARGIN = timedelta(hours=1)
# Some ten seconds of reading a topic.
MAX_RECORDS = 2_000_000


class SentRecord(NamedTuple):
    """The identity of a record.

    Args:
        origin: the record's origin.
        sent_by: the slice that sent it to the DLQ; empty on the topic of accepted events.
        number: how often it had been reclaimed from the DLQ, or there its revision.
    """

    origin: Origin
    sent_by: str
    number: int


# With the time at which the slice of each was planned.
Wanted = Mapping[SentRecord, datetime]


@dataclass(frozen=True)
class TopicRecords:
    """The records of slices in a topic.

    Args:
        topic: its name.
        records: records that were sent according to the tables.
        lacking: records that are missing on the topic.
        doubled: records that are on the topic more than once.
        unsure: whether some may be gone by retention, or after a transaction that is open: nothing is lacking then.
        skipped: why the topic could not be looked at; None if it was.
    """

    topic: str
    records: int
    lacking: Sequence[SentRecord] = ()
    doubled: Sequence[SentRecord] = ()
    unsure: bool = False
    skipped: str | None = None

    @property
    def error(self) -> str | None:
        """The fault, in a sentence; None if there is none."""
        parts = [
            f"{len(copies):,} records {what}: {', '.join(_describe_record(copy) for copy in copies[:SAMPLES])}"
            for copies, what in ((self.lacking, "were sent and are not there"), (self.doubled, "are there twice"))
            if copies
        ]
        return f"{self.topic}: {'; '.join(parts)}" if parts else None

    @property
    def line(self) -> str:
        """The topic in a sentence."""
        if self.skipped is not None:
            return f"{self.topic}: not counted: {self.skipped}"
        some = "none of them twice, some perhaps gone or not readable yet" if self.unsure else "each once"
        return self.error or f"{self.topic}: {self.records:,} records were sent of these slices, {some}"


def _describe_record(copy: SentRecord) -> str:
    origin = copy.origin
    by = f" by {copy.sent_by}" if copy.sent_by else ""
    return f"{origin.topic} partition {origin.partition} offset {origin.offset}{by}"


def compare_sent_records(kafka: Kafka, lake: Lake, stream: Stream, slices: Sequence[Slice]) -> list[TopicRecords]:
    """Count what was sent of slices, topic by topic, from an hour before the first of them was planned on.

    Raises:
        DependencyUnavailableError: the lake could not be read; a topic that could not be is reported as such.
    """
    if not slices:
        return []
    found = [
        _compare_topic(kafka, topic, wanted, _parse_dlq_headers)
        for topic, wanted in sorted(_read_dlq_records(lake, stream, slices).items())
    ]
    accepted = _read_accepted_records(lake, stream, slices)
    if stream.publishes is not None and accepted:
        found.append(_compare_topic(kafka, stream.publishes.topic, accepted, _parse_accepted_headers))
    return found


def _read_dlq_records(lake: Lake, stream: Stream, slices: Sequence[Slice]) -> dict[str, dict[SentRecord, datetime]]:
    """By topic what the table dlq says; what was sent before a lost lake was rebuilt is no slice's any more."""
    dlq, found = lake.open_stream_table(stream.name, "dlq"), dict[str, dict[SentRecord, datetime]]()
    planned = {slice_.key: slice_.planned_at for slice_ in slices}
    if dlq is None:
        return found
    columns = f"slice, {ORIGIN_SQL}, next_topic, {read_count(dlq, NUMBER)} AS number, published_at"
    for row in query(dlq, f"SELECT {columns} FROM t WHERE {slice_is_one_of(planned)}"):
        if row["published_at"] is not None and row["published_at"] >= planned[row["slice"]]:
            copy = SentRecord(Origin.from_row(row), row["slice"], row["number"])
            found.setdefault(row["next_topic"], {})[copy] = planned[row["slice"]]
    return found


def _read_accepted_records(lake: Lake, stream: Stream, slices: Sequence[Slice]) -> dict[SentRecord, datetime]:
    """The outcomes in the table published: of each origin the record that was sent last."""
    table = lake.open_stream_table(stream.name, publication_log.TABLE) if stream.publishes else None
    if table is None:
        return {}
    planned = {slice_.key: slice_.planned_at for slice_ in slices}
    sql = f"SELECT slice, {ORIGIN_SQL}, revision, published_at FROM t WHERE {slice_is_one_of(planned)}"
    rows = query(table, f"{sql} AND state <> '{EventState.AGAIN.value}'")
    return {
        SentRecord(Origin.from_row(row), "", row["revision"]): planned[row["slice"]]
        for row in rows
        if row["published_at"] is not None and row["published_at"] >= planned[row["slice"]]
    }


def _parse_dlq_headers(headers: Sequence[KafkaHeader]) -> SentRecord | None:
    envelope = open_envelope(headers)
    return None if envelope is None else SentRecord(envelope.origin, envelope.slice_key, envelope.reclaims)


def _parse_accepted_headers(headers: Sequence[KafkaHeader]) -> SentRecord | None:
    texts = {name: (value or b"").decode(errors="replace") for name, value in headers}
    try:
        _, *numbers = (texts[f"highwater.origin.{name}"] for name in Origin._fields)
        origin = Origin(texts["highwater.origin.topic"], *map(int, numbers))
        return SentRecord(origin, "", int(texts.get(REVISION, "0")))
    except (KeyError, ValueError):
        return None  # no record of ours


def _compare_topic(
    kafka: Kafka, topic: str, wanted: Wanted, read: Callable[[Sequence[KafkaHeader]], SentRecord | None]
) -> TopicRecords:
    found: Counter[SentRecord] = Counter()
    try:
        state = kafka.read_topic_state(topic)
        ranges, reason = _fetch_offset_ranges(kafka, state, min(wanted.values()) - MARGIN)
        if reason is not None:
            return TopicRecords(topic, len(wanted), skipped=reason)
        for message in kafka.read(topic, ranges):
            headers: Any = message.headers()
            copy = read(headers or ())
            if copy is not None and copy in wanted:
                found[copy] += 1
    except HighwaterError as error:
        return TopicRecords(topic, len(wanted), skipped=error.problem)
    unsure = _is_unsure(state, ranges)
    return TopicRecords(
        topic,
        len(wanted),
        lacking=[] if unsure else sorted(wanted.keys() - found.keys()),
        doubled=sorted(copy for copy, times in found.items() if times > 1),
        unsure=unsure,
    )


def _fetch_offset_ranges(kafka: Kafka, state: TopicState, since: datetime) -> tuple[dict[int, OffsetRange], str | None]:
    """The records of each partition, up to the last stable offset; or why there are none."""
    starts = kafka.read_offsets_at(state.topic, round(since.timestamp() * 1000), state)
    if leaderless := sorted(state.partitions.keys() - starts.keys()):
        return {}, f"no leader for partitions {', '.join(map(str, leaderless))}"
    ends = {p: seen.last_stable or 0 for p, seen in state.partitions.items()}
    ranges = {p: OffsetRange(start, ends[p]) for p, start in starts.items()}
    total = sum(len(offsets) for offsets in ranges.values())
    return ranges, None if total <= MAX_RECORDS else f"{total:,} offsets since {since:%Y-%m-%d %H:%M} UTC"


def _is_unsure(state: TopicState, ranges: Mapping[int, OffsetRange]) -> bool:
    def has_unsure_offsets(partition: int) -> bool:
        seen = state.partitions[partition]
        cut = bool(seen.log_start) and ranges[partition].start <= (seen.log_start or 0)
        return cut or seen.high_watermark != seen.last_stable

    return any(has_unsure_offsets(partition) for partition in ranges)
