"""One record located: the slice that holds its offset, its row in raw, and how its origin ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN_TOPIC, Origin, build_headers, open_envelope
from highwater.errors import (
    ConfigurationError,
    HighwaterError,
    IncompleteReadError,
    OffsetsExpiredError,
    TopicAbsentError,
)
from highwater.foreign import parse_foreign_origin, resolve_origin
from highwater.gaps import expand_ranges
from highwater.orchestration.checking.origin_checks import build_tombstone_condition
from highwater.orchestration.checking.slice_status import read_commit_attempts, read_stream_commits
from highwater.reclaims import count_reclaims, is_stale
from highwater.resources.commit_log import ensure_all_records_seen, ensure_all_rows_seen
from highwater.resources.delta import count_slice_rows, query, read_count, slice_is_one_of
from highwater.retention import count_expired_rows
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.envelope import Envelope
    from highwater.erasing import Erasure
    from highwater.plans import Loss
    from highwater.reclaims import Reclaim
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState
    from highwater.slices import Slice


@dataclass(frozen=True)
class LocatedRecord:
    """The facts about one offset.

    Args:
        end: `accepted`, `waiting`, `parked`, `discarded`, `reclaimed` (and not reprocessed yet), `rejected` (and not
            published yet), `tombstone`, `superseded`, `gap`, `unread` (planned, and not in raw yet), `unplanned`,
            `erased`, `aged` (its row of raw has expired, and nothing else is known of it), `lost` or `unknown`.
        text: the end in a sentence.
        origin: where the record was first published; None where no record is known.
        slice_: the slice that holds the offset; None where none does.
        row: the row in raw, its key as text, without value and headers.
        facts: further sentences, in the order of what happened.
        commits: by table the attempt that committed the slice; tables that lack it are left out.
        unseen: the error that kept Kafka from being read; None if it was read, or was not needed.
    """

    end: str
    text: str
    origin: Origin | None = None
    slice_: Slice | None = None
    row: Mapping[str, Any] | None = None
    facts: Sequence[str] = ()
    commits: Mapping[str, int] = field(default_factory=dict)
    unseen: HighwaterError | None = None

    @property
    def lines(self) -> list[str]:
        """All of it in sentences."""
        lines = []
        if self.slice_ is not None:
            lines.append(
                f"slice {self.slice_.key}, generation {self.slice_.generation}, planned {self.slice_.planned_at}"
            )
        if self.commits:
            commits = ", ".join(f"{table} by attempt {attempt}" for table, attempt in self.commits.items())
            lines.append(f"committed to {commits}")
        if self.row is not None:
            lines.append("raw: " + ", ".join(f"{name} {value}" for name, value in self.row.items()))
        if self.origin is not None:
            lines.append(f"origin: {format_origin(self.origin)}")
        return [*lines, *self.facts, f"{self.end}: {self.text}"]

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "end": self.end,
            "text": self.text,
            "origin": None if self.origin is None else self.origin._asdict(),
            "slice": None if self.slice_ is None else self.slice_.key,
            "generation": None if self.slice_ is None else self.slice_.generation,
            "commits": {**self.commits},
            "row": None if self.row is None else {name: str(value) for name, value in self.row.items()},
            "facts": [*self.facts],
        }


def format_origin(origin: Origin) -> str:
    """An origin as people write it."""
    return f"{origin.topic} partition {origin.partition} offset {origin.offset}, generation {origin.generation}"


def find_stream(streams: Iterable[Stream], topic: str) -> Stream:
    """The stream that a topic belongs to.

    Raises:
        ConfigurationError: none declares it.
    """
    known = {name: stream for stream in streams for name in stream.all_topics}
    if topic not in known:
        raise ConfigurationError(
            f"no stream has a topic {topic!r}",
            found=f"declared are {', '.join(sorted(known)) or 'none'}",
            remedy="name one of them",
        )
    return known[topic]


def locate(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, topic: str, partition: int, offset: int
) -> list[LocatedRecord]:
    """The facts about an offset: an answer for each generation of the topic that planned it, or one with the reason.

    Args:
        ledger: has slices, losses, discards and reclaims.
        kafka: read for parked records and for offsets in no slice.
        lake: has the tables.
        stream: the stream that the topic belongs to.
        topic: a main topic, a tier, a foreign topic or the parked topic.
        partition: the partition.
        offset: the offset.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    if topic == stream.parked_topic:
        return [_on_parked(ledger, kafka, lake, stream, partition, offset)]
    slices = ledger.list_slices_at_offset(stream.name, topic, partition, offset)
    if not slices:
        return [_locate_unplanned(ledger, kafka, stream, topic, partition, offset)]
    found = [(slice_, _locate_in_slice(ledger, lake, stream, slice_, partition, offset)) for slice_ in slices]
    return [replace(one, commits=_load_attempts(lake, stream, slice_)) for slice_, one in found]


def _load_attempts(lake: Lake, stream: Stream, slice_: Slice) -> dict[str, int]:
    slice_commits = read_stream_commits(lake, stream, [slice_.key])
    current = read_commit_attempts(lake, stream, slice_commits, [slice_.key]).current
    attempts = {
        table: slice_commit.attempt for table, found in slice_commits.items() for slice_commit in found.values()
    }
    return attempts | ({"current": current[slice_.key]} if current and slice_.key in current else {})


def _locate_in_slice(
    ledger: Ledger, lake: Lake, stream: Stream, slice_: Slice, partition: int, offset: int
) -> LocatedRecord:
    lost = [
        loss
        for loss in ledger.list_losses(stream.name, slice_.topic)
        if (loss.generation, loss.partition) == (slice_.generation, partition) and offset in loss.offsets
    ]
    raw, slice_commits = (
        lake.open_stream_table(stream.name, "raw"),
        lake.load_slice_commits(stream.name, "raw", [slice_.key]),
    )
    if raw is None or slice_.key not in slice_commits:
        if raw is not None:
            ensure_all_records_seen(raw)
        if raw is not None and count_slice_rows(raw, [slice_.key])[slice_.key]:
            raise IncompleteReadError(
                f"a read of raw of {stream.name} did not return the commit of {slice_.key}",
                stored="rows of the slice",
                found="no commit",
                remedy="nothing was concluded from it; see IncompleteReadError in the runbook",
            )
        return (
            _build_lost_result(lost[0], slice_)
            if lost
            else LocatedRecord("unread", "planned, and not in raw yet", slice_=slice_)
        )
    where = f'{slice_is_one_of([slice_.key])} AND "partition" = {partition} AND "offset" = {offset}'
    # `octet_length` takes text alone here.
    size = "octet_length(encode(value, 'hex')) / 2 AS bytes"
    columns = (
        f"timestamp_ms AS ms, timestamp_type, key, {build_tombstone_condition(stream)} AS tombstone, {size}, headers"
    )
    found = query(raw, f"SELECT {columns} FROM t WHERE {where}")
    if not found and lost:
        return _build_lost_result(lost[0], slice_)
    gone = [
        one
        for one in (ledger.erasures.read_for_slices([slice_.key]).get(slice_.key, ()) if not found else ())
        if (partition, offset) in expand_ranges(one.places)
    ]
    # A key that was erased after its rows had expired is erased all the same.
    for one in sorted(gone, key=lambda one: one.by_age):
        [why] = [erasure for erasure in ledger.erasures.list_for_stream(stream.name) if erasure.number == one.number]
        if not why.by_age:
            return LocatedRecord("erased", f"by {why.erased_by} at {why.erased_at}: {why.reason}", slice_=slice_)
        if count_expired_rows(slice_commits[slice_.key]):
            return _locate_aged_record(
                ledger, lake, stream, slice_, Origin(slice_.topic, slice_.generation, partition, offset), why
            )
    if not found:
        ensure_all_rows_seen(raw, [slice_.key])
        text = "no record at this offset: a marker of a transaction, an aborted record, or one that compaction took"
        return LocatedRecord("gap", text, slice_=slice_)
    [row] = found
    here = Origin(slice_.topic, slice_.generation, partition, offset)
    origin = here if slice_.topic == stream.topic else _find_origin(ledger, lake, stream, here, row)
    record = {"timestamp_ms": row["ms"], "key": _decode_key(row["key"]), "bytes": row["bytes"]}
    return _locate_origin(ledger, lake, stream, origin, slice_, record, tombstone=bool(row["tombstone"]))


def _locate_aged_record(
    ledger: Ledger, lake: Lake, stream: Stream, slice_: Slice, here: Origin, why: Erasure
) -> LocatedRecord:
    """The end of a record whose row of raw has expired; on the main topic its place is its origin."""
    fact = f"its row of raw expired, by {why.erased_by} at {why.erased_at}: {why.reason}"
    if slice_.topic == stream.topic:
        found = _locate_origin(ledger, lake, stream, here, slice_, None)
        if found.end != "unknown":
            return replace(found, facts=[fact, *found.facts])
        return LocatedRecord("aged", f"{fact}; it was no event and no reject: a tombstone", here, slice_)
    return LocatedRecord("aged", f"{fact}; which record it was a copy of is not known any more", slice_=slice_)


def _find_origin(ledger: Ledger, lake: Lake, stream: Stream, here: Origin, row: Mapping[str, Any]) -> Origin:
    """The origin of a record that waits for a retry: what its headers say, or where it lies.

    If it was rejected under its own place, this place is its origin, even if its headers name another.
    """
    own = here if here.topic not in stream.foreign_topics else here._replace(topic=stream.namespace + here.topic)
    if _load_origin_rows(lake, stream, "rejects", own):
        return own
    headers = build_headers(row)
    envelope = open_envelope(headers, stream.is_origin)
    if envelope is not None:
        return envelope.origin
    if here.topic not in stream.foreign_topics:
        return here
    ours = any(name == ORIGIN_TOPIC for name, _ in headers)
    found = parse_foreign_origin(headers, row["ms"], row["timestamp_type"])
    if ours or found is None:
        return here._replace(topic=stream.namespace + here.topic)
    from highwater.assets.foreign import read_main_log

    return resolve_origin(stream, read_main_log(ledger, stream), found, row["ms"])


def _build_lost_result(loss: Loss, slice_: Slice | None) -> LocatedRecord:
    return LocatedRecord(
        "lost", f"{loss.reason}, accepted by {loss.accepted_by}, generation {loss.generation}", slice_=slice_
    )


def _decode_key(key: Any) -> str | None:
    return None if key is None else bytes(key).decode("utf-8", "replace")


def _locate_origin(
    ledger: Ledger,
    lake: Lake,
    stream: Stream,
    origin: Origin,
    slice_: Slice | None,
    row: Mapping[str, Any] | None,
    *,
    tombstone: bool = False,
) -> LocatedRecord:
    """The end of an origin: its last known event."""
    published = {(found["slice"], found[NUMBER]): found for found in _load_origin_rows(lake, stream, "dlq", origin)}
    found = _load_origin_rows(lake, stream, "rejects", origin)
    rejects = sorted(found, key=lambda row: _build_sort_key(row, published.get(_copy(row))))
    facts = [_describe_reject(row, published.get(_copy(row))) for row in rejects]
    facts += [_describe_reclaim(one) for one in ledger.reclaims.list_for_stream(stream.name) if one.origin == origin]
    end, text = _describe_end(ledger, lake, stream, origin, rejects, published)
    if end == "unknown" and slice_ is not None:
        for table in (lake.open_stream_table(stream.name, name) for name in ("events", "rejects")):
            if table is not None:
                ensure_all_rows_seen(table, [slice_.key])
    if end == "unknown" and tombstone:
        end, text = "tombstone", "a null value is no event; it stays in raw"
    elif end == "unknown" and slice_ is not None and slice_.topic != stream.topic:
        why = "its origin was accepted already, counts elsewhere in the slice, or was left to its main slice"
        end, text = "superseded", why
    return LocatedRecord(end, text, origin, slice_, row, facts)


def _describe_end(
    ledger: Ledger,
    lake: Lake,
    stream: Stream,
    origin: Origin,
    rejects: Sequence[Mapping[str, Any]],
    published: Collection[tuple[str, int]],
) -> tuple[str, str]:
    for found in _load_origin_rows(lake, stream, "events", origin):
        return "accepted", f"in events of {found['slice']}, attempt {found['attempt']}, retries {found['retries']}"
    for discard in ledger.discards.list_for_stream(stream.name):
        if discard.origin == origin:
            return "discarded", f"by {discard.discarded_by} at {discard.discarded_at}: {discard.reason}"
    if not rejects:
        return "unknown", "neither in events nor in rejects: the slice is not decided yet"
    last = rejects[-1]
    reclaims = [one for one in ledger.reclaims.list_for_stream(stream.name) if one.origin == origin]
    if is_stale(count_reclaims(reclaims), origin, last[NUMBER]):
        return "reclaimed", f"{reclaims[-1].slice_key} reprocesses it when it is materialised again"
    if _copy(last) not in published:
        return "rejected", f"as {last['reason']} by {last['slice']}, to be published to {last['next_topic']}"
    return ("parked" if last["next_topic"] == stream.parked_topic else "waiting"), f"on {last['next_topic']}"


def _build_sort_key(found: Mapping[str, Any], published: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """The order of rejections: by the number of reclaims; as they were published, then unpublished ones."""
    at = None if published is None else published["published_at"]
    moment = "" if at is None else at.isoformat(timespec="microseconds")
    return found[NUMBER], published is None, moment, found["retries"] or 0


def _copy(found: Mapping[str, Any]) -> tuple[str, int]:
    return found["slice"], found[NUMBER]


def _describe_reclaim(one: Reclaim) -> str:
    return f"reclaimed for {one.slice_key} by {one.reclaimed_by} at {one.reclaimed_at}: {one.reason}"


def _describe_reject(found: Mapping[str, Any], published: Mapping[str, Any] | None) -> str:
    when = "not published yet" if published is None else f"published {published['published_at']}"
    return f"rejected by {found['slice']} as {found['reason']} ({found['detail']}), to {found['next_topic']}: {when}"


def _load_origin_rows(lake: Lake, stream: Stream, name: str, origin: Origin) -> list[dict[str, Any]]:
    table = lake.open_stream_table(stream.name, name)
    if table is None:
        return []
    topic = origin.topic.replace("'", "''")
    where = (
        f"origin_partition = {origin.partition} AND origin_offset = {origin.offset} "
        f"AND origin_topic = '{topic}' AND origin_generation = {origin.generation}"
    )
    columns = {
        "events": "slice, attempt, retries",
        "rejects": "slice, attempt, retries, reason, detail, next_topic",
        "dlq": "slice, published_at",
    }
    number = f"{read_count(table, NUMBER)} AS {NUMBER}"
    return query(table, f"SELECT {columns[name]}, {number} FROM t WHERE {where}")


def _on_parked(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, partition: int, offset: int) -> LocatedRecord:
    """A parked record: its envelope names the origin."""
    topic = stream.parked_topic
    try:
        state = kafka.read_topic_state(topic)
        if (why := _find_unreadable_reason(state, partition, offset)) is not None:
            return LocatedRecord("unknown", why)
        messages = list(kafka.read(topic, {partition: OffsetRange(offset, offset + 1)}, seconds=10))
    except HighwaterError as error:
        return LocatedRecord(
            "unknown", f"{topic} could not be read there: {error.problem}", unseen=_find_lookup_error(error)
        )
    headers: Any = messages[0].headers() if messages else None
    envelope: Envelope | None = open_envelope(headers or (), stream.is_origin)
    if envelope is None:
        return LocatedRecord("unknown", "no record with a Highwater envelope at this offset")
    return _locate_origin(ledger, lake, stream, envelope.origin, None, None)


def _locate_unplanned(
    ledger: Ledger, kafka: Kafka, stream: Stream, topic: str, partition: int, offset: int
) -> LocatedRecord:
    for loss in ledger.list_losses(stream.name, topic):
        if loss.partition == partition and offset in loss.offsets:
            return _build_lost_result(loss, None)
    try:
        why = _find_unreadable_reason(kafka.read_topic_state(topic), partition, offset)
    except HighwaterError as error:
        text = f"no slice holds it, and the topic could not be looked at: {error.problem}"
        return LocatedRecord("unplanned", text, unseen=_find_lookup_error(error))
    return LocatedRecord("unplanned", why or "it waits for the planner, or lies before the offset where planning began")


def _find_lookup_error(error: HighwaterError) -> HighwaterError | None:
    """The error, unless it is the answer: a topic of the DLQ that is not there yet, a record that retention took."""
    return None if isinstance(error, TopicAbsentError | OffsetsExpiredError) else error


def _find_unreadable_reason(state: TopicState, partition: int, offset: int) -> str | None:
    """The reason why a topic gives no record at an offset; None if it may be read, or its leader is unavailable."""
    seen = state.partitions.get(partition)
    if seen is None:
        return f"{state.topic} has no partition {partition}"
    if seen.high_watermark is not None and offset >= seen.high_watermark:
        return f"there is no such offset yet: the high watermark is {seen.high_watermark}"
    if seen.last_stable is not None and offset >= seen.last_stable:
        return f"an open transaction holds it back: the last stable offset is {seen.last_stable}"
    if seen.log_start is not None and offset < seen.log_start:
        return f"retention took it: the log starts at {seen.log_start}"
    return None
