"""Parked records: lists those that still wait for a person, sends them back to the tiers, or discards them."""

# A record that is sent back keeps its origin, so it is accepted once, however often it is sent; its copy on the parked
# topic stays, and counts no more.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from highwater.assets import discards_table
from highwater.assets.commit import LEASE_SECONDS
from highwater.assets.events import build_retries_lease_name
from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN, Envelope, Origin, open_envelope
from highwater.erasing import compute_digest, compute_erasure_times, to_milliseconds
from highwater.errors import ConfigurationError, TopicAbsentError, TopicVanishedError
from highwater.operator_actions import ensure_named
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.dependencies import ensure_lake_exists
from highwater.orchestration.operations.redriving import extract_headers, extract_key, redrive
from highwater.plans import Discard
from highwater.reclaims import count_reclaims, is_stale
from highwater.reject_reasons import INVALID, count_causes, format_causes
from highwater.resources.commit_log import ensure_all_rows_seen
from highwater.resources.deleted_topics import find_vanished_error, read_state
from highwater.resources.delta import query, read_count
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

SAMPLES = 10
# This many characters of each record's detail are held and shown.
DETAIL = 60


@dataclass(frozen=True)
class ParkedSelection:
    """A selection of parked records; without arguments it selects all.

    Args:
        reasons: why they were rejected the last time.
        rules: the rules or checks that refused them the last time; only invalid records have one.
        slices: the slices that rejected them.
        keys: the keys of the records, as text.
        since: parked at this moment or later.
        until: parked before this moment.

    Raises:
        ConfigurationError: rules are selected together with other reasons than `invalid` alone.
    """

    reasons: Collection[str] = ()
    rules: Collection[str] = ()
    slices: Collection[str] = ()
    keys: Collection[str] = ()
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if self.rules and (others := sorted({*self.reasons} - {INVALID})):
            raise ConfigurationError(
                f"records that are rejected for {', '.join(others)} have no rule",
                stored=f"rules {', '.join(self.rules)}",
                remedy=f"select rules alone or with the reason {INVALID}, and other reasons by a request of their own",
            )

    def matches(self, reason: str, rule: str | None, slices: Iterable[str], key: bytes | None, parked_ms: int) -> bool:
        """Whether a record is meant that these slices rejected."""
        return (
            (not self.reasons or reason in self.reasons)
            and (not self.rules or rule in self.rules)
            and (not self.slices or not set(slices).isdisjoint(self.slices))
            and (not self.keys or (key or b"").decode("utf-8", "replace") in self.keys)
            and (self.since is None or parked_ms >= self.since.timestamp() * 1000)
            and (self.until is None or parked_ms < self.until.timestamp() * 1000)
        )


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """A parked record: the place of its latest copy, when it was parked (ms since 1970), and why, in a few words.

    For a record that is parked by reference also the parts that it leaves out.
    """

    partition: int
    offset: int
    parked_ms: int
    reason: str
    slice_key: str
    detail: str
    key: str
    left_out: str = ""
    reclaims: int = 0
    rule: str | None = None


@dataclass(frozen=True)
class Parked:
    """The parked records of a stream that wait for a person.

    Args:
        waiting: the selected records by origin.
        other_causes: how many wait beside them, by cause.
        ended: how many of the topic's records were accepted, discarded, reclaimed or erased, since.
        without_envelope: records of the topic without a sound envelope; they are ignored.
        ends: to where the topic was read.
        missing: how many wait by the tables beyond those that the topic holds.
    """

    waiting: Mapping[Origin, ParkedRecord]
    other_causes: Mapping[str, int]
    ended: int
    without_envelope: int
    ends: Mapping[int, OffsetRange]
    missing: int = 0

    @property
    def others(self) -> int:
        """How many wait beside the selected ones."""
        return sum(self.other_causes.values())

    @property
    def lines(self) -> list[str]:
        """The findings, in sentences."""
        lines = [f"{len(self.waiting):,} parked records match: {format_causes(count_causes(self.waiting.values()))}"]
        referred = sum(bool(one.left_out) for one in self.waiting.values())
        lines += [f"{referred:,} of them are parked by reference: raw holds all of them"] if referred else []
        lines += [f"{self.others:,} others wait: {format_causes(self.other_causes)}"] if self.others else []
        lines += [f"{self.ended:,} were accepted, discarded, reclaimed or erased before"] if self.ended else []
        lines += (
            [f"{self.without_envelope:,} have no Highwater envelope and are ignored"] if self.without_envelope else []
        )
        lost = f"{self.missing:,} more wait by the tables, and the topic does not hold them: highwater reclaim"
        lines += [f"{lost} --on this topic reclaims what was parked there"] if self.missing else []
        return lines

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """The first of those that are meant, as names of columns and rows."""
        names = ["partition", "offset", "origin", "key", "reason", "rule", "slice", "left out", "detail"]
        shown = sorted(self.waiting.items(), key=lambda item: (item[1].partition, item[1].offset))[:SAMPLES]
        return names, [
            [
                *(str(one.partition), str(one.offset), _format_origin(origin)),
                *(one.key, one.reason, one.rule or "", one.slice_key, one.left_out, one.detail),
            ]
            for origin, one in shown
        ]

    @property
    def places(self) -> set[tuple[int, int]]:
        """Partition and offset of those that are meant."""
        return {(one.partition, one.offset) for one in self.waiting.values()}


def _format_origin(origin: Origin) -> str:
    return f"{origin.topic}[{origin.partition}]@{origin.offset}"


@dataclass(frozen=True)
class ParkedRequest:
    """A request to send parked records back or to discard them.

    Args:
        choice: the selected records.
        most: at most this many matching records, oldest first; all if None.
        dry_run: do nothing; only report what would be done.
        by: the person's name.
        because: why they are discarded; None sends them back instead.
    """

    choice: ParkedSelection = field(default_factory=ParkedSelection)
    most: int | None = None
    dry_run: bool = True
    by: str = ""
    because: str | None = None


def redrive_or_discard(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, request: ParkedRequest, log: Callable[[str], object]
) -> Parked:
    """Read the parked records, and send back or discard the selected ones.

    Args:
        ledger: has the discards, and the lease of the stream's retries.
        kafka: has the parked topic and the first tier.
        lake: has the events, and the rows of records that are parked by reference.
        stream: the declared stream.
        request: the selection and the action; with a reason it discards, otherwise it redrives.
        log: takes sentences about the result.

    Returns:
        The parked records that waited, with the selected ones.

    Raises:
        ConfigurationError: it is to be done and nobody is named, no reason is given, or there is no tier.
        RecordTooLargeError: the first tier does not take some of them, which stay parked; the others are sent.
        UnbalancedError: raw does not hold some that are parked by reference; the others are sent.
        LeaseHeldError: retries are being decided for minutes; nothing was discarded.
        DependencyUnavailableError: Kafka, the ledger or the lake is unavailable.
    """
    ensure_named(
        request.by, "discard-parked" if request.because is not None else "redrive-parked", dry_run=request.dry_run
    )
    if not request.dry_run and request.because == "":
        raise ConfigurationError(
            "no reason is given for the discard",
            remedy="say why: --because TEXT, or `because` in the run's configuration",
        )
    parked = select_oldest(read_parked(ledger, kafka, lake, stream, request.choice), request.most)
    for line in parked.lines:
        log(line)
    if request.dry_run:
        log("a dry run: nothing was changed")
    elif request.because is None:
        find_error = partial(find_vanished_error, ledger, stream)
        for sent in redrive(kafka, lake, stream, parked.places, parked.ends, find_error):
            log(f"{sent:,} of {len(parked.waiting):,} sent back to {stream.tier_topics[0]}")
    else:
        count, late = _discard(ledger, lake, stream, parked, request)
        log(f"{count:,} discarded by {request.by}: {request.because}")
        if late:
            log(f"{late:,} were accepted, discarded or reclaimed meanwhile")
    return parked


def read_parked(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, choice: ParkedSelection) -> Parked:
    """Read the parked topic, and leave out what ended since.

    Held in memory is 0.6 KB for each parked record, and its key; none of their values.

    Raises:
        TopicVanishedError: the parked topic is not there any more.
        DependencyUnavailableError: Kafka, the ledger or the lake could not be read.
    """
    known = count_parked(ledger, lake, stream, published=True)
    try:
        state = read_state(ledger, kafka, stream, stream.parked_topic)
    except TopicVanishedError:
        raise
    except TopicAbsentError:
        return Parked({}, {}, 0, 0, {})
    ends = {
        p: OffsetRange(seen.log_start, seen.last_stable)
        for p, seen in state.partitions.items()
        if seen.log_start is not None and seen.last_stable is not None
    }
    waiting: dict[Origin, tuple[ParkedRecord, bool]] = {}
    reclaim_numbers, gone = count_reclaims(ledger.reclaims.list_for_stream(stream.name)), set[Origin]()
    erased = compute_erasure_times(ledger.erasures.list_for_stream(stream.name))
    without_envelope = 0
    for message in kafka.read(stream.parked_topic, ends):
        envelope = open_envelope(extract_headers(message), stream.is_origin)
        if envelope is None:
            without_envelope += 1
        elif is_stale(reclaim_numbers, envelope.origin, envelope.reclaims):
            gone.add(envelope.origin)  # its main slice reprocesses it; what that publishes carries another number
        elif _is_erased(message, envelope, erased):
            gone.add(envelope.origin)
        else:
            chosen = choice.matches(
                envelope.reason,
                envelope.rule,
                [envelope.slice_key],
                extract_key(message),
                message.timestamp()[1],
            )
            waiting[envelope.origin] = _build_parked_record(message, envelope), chosen
    ended = _load_ended_origins(ledger, lake, stream, waiting)
    meant = {origin: one for origin, (one, chosen) in waiting.items() if chosen and origin not in ended}
    others = count_causes(one for origin, (one, chosen) in waiting.items() if not chosen and origin not in ended)
    finished = len(ended) + len(gone - waiting.keys())
    missing = max(0, known - (len(waiting) - len(ended)) - len(gone - waiting.keys()))
    return Parked(meant, others, finished, without_envelope, ends, missing)


def _is_erased(message: Message, envelope: Envelope, erased: Mapping[str, datetime]) -> bool:
    """Whether a record was published, or parked, before its key was erased.

    Sent back to a tier it would get a time of its own there, after the erasure, and be taken again.
    """
    key = extract_key(message) if erased else None
    moment = erased.get(compute_digest(key)) if key is not None else None
    oldest_ms = min(envelope.timestamp, message.timestamp()[1])
    return moment is not None and oldest_ms <= to_milliseconds(moment)


def _build_parked_record(message: Message, envelope: Envelope) -> ParkedRecord:
    return ParkedRecord(
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        parked_ms=message.timestamp()[1],
        reason=envelope.reason,
        slice_key=envelope.slice_key,
        detail=envelope.detail[:DETAIL],
        key=(extract_key(message) or b"").decode("utf-8", "replace"),
        left_out="" if envelope.reference is None else ",".join(envelope.reference.left_out),
        reclaims=envelope.reclaims,
        rule=envelope.rule,
    )


def _load_ended_origins(ledger: Ledger, lake: Lake, stream: Stream, origins: Collection[Origin]) -> set[Origin]:
    """The origins that are in events, or that a person discarded."""
    if not origins:
        return set()
    found = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}
    events = lake.open_stream_table(stream.name, "events")
    if events is not None:
        ensure_all_rows_seen(events)  # a missed event would be sent back, or discarded
        # A published record becomes an event only by a retry, or after it was reclaimed.
        since = f"(retries > 0 OR {read_count(events, NUMBER)} > 0)"
        accepted = query(events, f"SELECT {', '.join(ORIGIN)} FROM t WHERE {since}")
        found |= {Origin.from_row(row) for row in accepted}
    return found & set(origins)


def _discard(ledger: Ledger, lake: Lake, stream: Stream, parked: Parked, request: ParkedRequest) -> tuple[int, int]:
    """Discard the records, in the ledger and then in the lake; returns how many, and how many have another end by now.

    Meanwhile no retry is decided: a record that a retry accepted before is not discarded, and no retry accepts a
    discarded record later, even one that was sent back. The records stay on the topic, and are reported as discarded.
    """
    ensure_lake_exists(ledger, lake)
    with ledger.lease(build_retries_lease_name(stream), seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS) as lease:
        discards_table.sync_with_ledger(ledger, lake, stream.name)  # a ledger from a backup learns of those since
        reclaim_numbers = count_reclaims(ledger.reclaims.list_for_stream(stream.name))
        ended = _load_ended_origins(ledger, lake, stream, parked.waiting)
        meant = [
            o for o, one in parked.waiting.items() if o not in ended and not is_stale(reclaim_numbers, o, one.reclaims)
        ]
        # Decisions record by time which acts they saw.
        last, now = ledger.discards.read_last_discard_time(stream.name), datetime.now(UTC)
        now = now if last is None else max(now, last + timedelta(microseconds=1))
        lease.check()
        count = ledger.discards.add(
            stream.name, [Discard(origin, request.because or "", request.by, now) for origin in meant]
        )
        discards_table.sync_with_ledger(ledger, lake, stream.name)
    return count, len(parked.waiting) - count


def select_oldest(parked: Parked, most: int | None) -> Parked:
    """At most N matching records, oldest first."""
    if most is None or most >= len(parked.waiting):
        return parked
    ordered: Sequence[tuple[Origin, ParkedRecord]] = sorted(
        parked.waiting.items(), key=lambda item: (item[1].parked_ms, item[1].partition, item[1].offset)
    )
    chosen = dict(ordered[:most])
    left = count_causes(one for origin, one in parked.waiting.items() if origin not in chosen)
    return replace(parked, waiting=chosen, other_causes=left + Counter(parked.other_causes))
