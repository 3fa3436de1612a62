"""Ledger, lake and Dagster's instance lost together: the stream restarted from what Kafka holds."""

# The topic is planned again from where its log begins, under ordinals that nobody saw, and what its log lacks is
# recorded as lost. What tiers and the parked topic hold is read first, and kept in the table `dlq_copies`: the main
# slices leave these records to the DLQ, and the tiers' slices try them again from there, each from where it was. So is
# what was sent to the topic of accepted events (`highwater.orchestration.operations.reading_accepted`).
#
# A rebuild cannot restore records that Kafka no longer has, acceptances, the old slices' ranges, and attempts that
# came to nothing. Discards and erased keys are read from copies of two tables.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.assets import discards_table, dlq_copies, erasures_table, publication_log
from highwater.assets.dlq_marks import parse_groups
from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN, Envelope, Origin, open_envelope
from highwater.erasing import to_moment
from highwater.errors import ConfigurationError, TopicAbsentError, UnknownSliceError
from highwater.operator_actions import ensure_named
from highwater.orchestration.checking.slice_status import read_stream_commits
from highwater.orchestration.operations import reading_accepted
from highwater.orchestration.operations.reading_accepted import AcceptedFacts
from highwater.orchestration.operations.rebuilding import find_highest_ordinals
from highwater.plans import Generation, Loss
from highwater.resources.consumer_groups import read_group_offsets
from highwater.resources.ledger.restoring import restore_plans
from highwater.slices import OffsetRange, SliceKey

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState

# A copy takes at most 1.5 KB: this many are held at a time.
COPIES_PER_BATCH = 10_000


@dataclass
class CopyFacts:
    """The facts that were noted while topics were read; the copies themselves are not held.

    Args:
        count: copies by the topic that holds them.
        without_envelope: records without a sound envelope; they are reported by their own place.
        slices: the highest ordinal of each topic whose slices sent them.
        newest: by generation and partition of the main topic the copy whose origin has the highest offset.
    """

    count: Counter[str] = field(default_factory=Counter)
    without_envelope: int = 0
    slices: dict[str, int] = field(default_factory=dict)
    newest: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, topic: str, envelope: Envelope, main: str) -> None:
        """Add a copy from a topic."""
        self.count[topic] += 1
        self.note_origin(envelope.origin, envelope.timestamp, envelope.slice_key, main)

    def note_origin(self, origin: Origin, ms: int, slice_key: str, main: str) -> None:
        """Note the slices and the main topic that a copy names."""
        for name, ordinal in find_highest_ordinals([slice_key]).items():
            self.slices[name] = max(self.slices.get(name, 0), ordinal)
        if origin.topic == main:
            place, seen = (origin.generation, origin.partition), (origin.offset, ms)
            self.newest[place] = max(self.newest.get(place, seen), seen)


@dataclass(frozen=True)
class NewBeginning:
    """The new beginning of a stream.

    Args:
        generations: one for each topic that is there.
        losses: offsets that the main topic's log no longer holds.
        copies: by DLQ topic how many records it holds.
        without_envelope: records there without a sound envelope.
        log: by topic and partition what its log holds.
        accepted: the records of the topic of accepted events.
    """

    generations: Sequence[Generation]
    losses: Sequence[Loss]
    copies: Mapping[str, int]
    without_envelope: int
    log: Mapping[str, Mapping[int, OffsetRange]]
    accepted: AcceptedFacts = field(default_factory=AcceptedFacts)

    @property
    def lines(self) -> list[str]:
        """The result, in sentences."""
        lines = [
            f"{one.topic}: generation {one.number}, {_count_offsets(self.log[one.topic]):,} offsets are planned again, "
            f"from ordinal {one.first_ordinal} on"
            for one in self.generations
        ]
        lines += [
            f"{topic} holds {count:,} records that were published, and keeps them"
            for topic, count in self.copies.items()
        ]
        lines += [f"{self.without_envelope:,} records there have no sound envelope"] if self.without_envelope else []
        lines += [*self._accepted_lines]
        lines += [
            f"partition {loss.partition}: {loss.offsets} is recorded as lost: {loss.reason}" for loss in self.losses
        ]
        return [*lines, "acceptances and permissions of operators are unknown now, and are not restored"]

    @property
    def _accepted_lines(self) -> Iterator[str]:
        found, main = self.accepted, self.generations[0]
        if found.log:
            yield f"{found.count:,} accepted events are sent, and are not sent again while their content stays the same"
        for p, offsets in sorted(found.select_unknown_ranges(main.number, self.log[main.topic]).items()):
            yield (
                f"partition {p}: {offsets} may be sent again: what was accepted of these {len(offsets):,} offsets "
                "is no longer on the topic of accepted events"
            )
        for topic, count in sorted(found.older.items()):
            yield (
                f"{topic}: {count:,} records may be sent again: what was accepted of so old ones is no longer on "
                "the topic of accepted events"
            )


def _count_offsets(log: Mapping[int, OffsetRange]) -> int:
    return sum(len(offsets) for offsets in log.values())


def build_new_generations(
    stream: Stream, states: Mapping[str, TopicState], ordinals: Mapping[str, int], number: int, by: str, now: datetime
) -> tuple[list[Generation], list[Loss]]:
    """The generations with which the topics begin, and what the main topic lacks.

    A record that a tier lost is no loss of the tier: its main slice reprocesses it if the main topic still has it.

    Args:
        stream: the stream.
        states: states of its existing topics, without the parked topic, which is not planned.
        ordinals: by topic the highest one that was seen anywhere.
        number: the main topic's generation.
        by: the person's name.
        now: in UTC.
    """
    generations, losses = [], []
    for topic in (stream.topic, *stream.delays):
        if topic not in states:
            continue
        state, main = states[topic], topic == stream.topic
        starts = {p: start for p, seen in state.partitions.items() if (start := seen.log_start) is not None}
        gone = {p: OffsetRange(0, start) for p, start in starts.items() if main and start}
        generations.append(
            Generation(
                stream=stream.name,
                topic=topic,
                topic_id=state.topic_id,
                number=number if main else 0,
                starts={p: 0 if p in gone else start for p, start in starts.items()},
                opened_at=now,
                opened_by=by,
                first_ordinal=ordinals[topic] + 1 if topic in ordinals else 0,
            )
        )
        losses += [
            Loss(
                stream.name,
                topic,
                number,
                p,
                offsets,
                f"gone before the rebuild: the log begins at {offsets.end}",
                by,
                now,
            )
            for p, offsets in sorted(gone.items())
        ]
    return generations, losses


def compute_generation_number(
    kafka: Kafka, state: TopicState, newest: Mapping[tuple[int, int], tuple[int, int]]
) -> int:
    """The main topic's generation: the highest that its copies name, or the next if its log holds other records now.

    Args:
        kafka: is asked for one record of each partition.
        state: the topic.
        newest: see `CopyFacts`.
    """
    last = max((generation for generation, _ in newest), default=0)
    for (generation, partition), (offset, ms) in newest.items():
        seen = state.partitions.get(partition)
        if generation != last:
            continue
        if seen is None or offset >= (seen.last_stable or 0):
            return last + 1
        if offset >= (seen.log_start or 0):
            found = kafka.read(state.topic, {partition: OffsetRange(offset, offset + 1)})
            if any(message.timestamp()[1] != ms for message in found):
                return last + 1
    return last


def rebuild_from_kafka(
    ledger: Ledger,
    lake: Lake,
    kafka: Kafka,
    stream: Stream,
    known: Sequence[str],
    log: Callable[[str], object],
    *,
    dry_run: bool,
    by: str = "",
    resend: bool = False,
) -> NewBeginning:
    """Restart a stream from Kafka, or report what that would do. It may be repeated until the ledger is written.

    Args:
        known: the keys that Dagster holds; empty where it cannot be asked.
        log: gets the sentences.
        dry_run: write nothing.
        by: the person's name.
        resend: the topic of accepted events gets all of them again.

    Raises:
        ConfigurationError: ledger or lake hold something of the stream, which accepted events were sent before cannot
            be read, or it is to be written and nobody is named.
        TopicAbsentError: the main topic is not there.
        SupersededAttemptError: somebody publishes accepted events meanwhile.
        DependencyUnavailableError: Kafka, the lake or the ledger is unavailable, or a partition has no leader; the
            ledger is still empty.
        LeaseHeldError: somebody planned the stream meanwhile.
    """
    ensure_named(by, "rebuild-all", dry_run=dry_run)
    ensure_stream_is_new(ledger, lake, stream)
    states = _fetch_topic_states(kafka, stream)
    logs = {topic: state.list_offset_ranges() for topic, state in states.items()}
    seen = CopyFacts()
    accepted = reading_accepted.store_accepted(
        ledger,
        lake,
        kafka,
        stream,
        lambda copy: seen.note_origin(copy.origin, copy.ms, copy.slice_key, stream.topic),
        dry_run=dry_run,
        resend=resend,
    )
    batches = _read_copy_batches(kafka, stream, logs, seen, accepted)
    if not dry_run:
        dlq_copies.write(
            lake, stream.name, batches, {topic: {p: r.end for p, r in log.items()} for topic, log in logs.items()}
        )
    else:
        for _ in batches:
            pass  # read to be counted
    # Its slices are gone, and the keys are not to come back: the table may be restored without the rest of the lake.
    stored = erasures_table.read(lake, stream.name)
    taken = [key for one in stored for key in one.slices]
    ordinals = find_highest_ordinals(
        [
            *known,
            *_list_marked_slices(kafka, stream, logs),
            *[str(SliceKey(*one)) for one in seen.slices.items()],
            *taken,
        ]
    )
    number = compute_generation_number(kafka, states[stream.topic], seen.newest)
    generations, losses = build_new_generations(stream, states, ordinals, number, by or "nobody yet", datetime.now(UTC))
    found = NewBeginning(generations, losses, dict(seen.count), seen.without_envelope, logs, accepted)
    for line in found.lines:
        log(line)
    erasures = [replace(one, slices={}) for one in stored if not one.erasure.by_age]
    if erasures:
        log(f"{len(erasures):,} erasures of keys are known from the table {erasures_table.TABLE}")
    if discarded := len(discards_table.read(lake, stream.name)):
        log(f"{discarded:,} records that were discarded are known from the table {discards_table.TABLE}")
    if not dry_run:
        discards_table.sync_with_ledger(ledger, lake, stream.name)
        restore_plans(ledger.database, generations, [], {}, losses, {}, erasures=erasures)
    log("a dry run: nothing was written" if dry_run else "restarted: start the sensors")
    return found


def ensure_stream_is_new(ledger: Ledger, lake: Lake, stream: Stream) -> None:
    """Ensure that neither ledger nor lake holds anything of the stream: a second reading beside it would double it.

    Raises:
        ConfigurationError: one of them does.
    """
    planned = [topic for topic in (stream.topic, *stream.delays) if ledger.topics.list_generations(stream.name, topic)]
    slices = sum(count for (name, _), count in ledger.count_slices().items() if name == stream.name)
    if planned or slices:
        raise ConfigurationError(
            f"the ledger knows {stream.name}",
            stored=f"{slices:,} slices, plans of {', '.join(planned) or 'no topic'}",
            found="a rebuild from Kafka is for a ledger and a lake that were lost",
            remedy="no action needed; to discard both, point HIGHWATER_LEDGER_URL at an empty database",
        )
    proven = {
        table: len(slice_commits) for table, slice_commits in read_stream_commits(lake, stream).items() if slice_commits
    }
    if published := lake.list_slice_keys(stream.name, publication_log.TABLE):
        proven[publication_log.TABLE] = len(published)
    if proven:
        raise ConfigurationError(
            f"the lake holds slices of {stream.name}",
            stored=", ".join(f"{count:,} in {table}" for table, count in proven.items()),
            found="a rebuild from Kafka would read their records a second time beside them",
            remedy=f"highwater rebuild-ledger {stream.name} goes on from them; or move the folder of the stream away",
        )


def _list_marked_slices(kafka: Kafka, stream: Stream, topics: Mapping[str, Mapping[int, OffsetRange]]) -> list[str]:
    """The slices that Kafka's groups name: published ones, and the last position of the mirror."""
    published = [one.slice_key for one in parse_groups(kafka.list_group_names()).values()]
    mirrored = read_group_offsets(kafka, stream.group, [(topic, p) for topic, log in topics.items() for p in log])
    return [*published, *[one.mark.last for one in mirrored.values() if one.mark is not None]]


def _fetch_topic_states(kafka: Kafka, stream: Stream) -> dict[str, TopicState]:
    """The stream's topics that are there."""
    found = {stream.topic: kafka.read_topic_state(stream.topic)}
    for topic in (*stream.delays, stream.parked_topic):
        try:
            found[topic] = kafka.read_topic_state(topic)
        except TopicAbsentError:
            continue  # nothing was published to it
    return found


def _read_copy_batches(
    kafka: Kafka,
    stream: Stream,
    logs: Mapping[str, Mapping[int, OffsetRange]],
    seen: CopyFacts,
    accepted: AcceptedFacts,
) -> Iterator[list[dict[str, Any]]]:
    """The copies on tiers and on the parked topic as rows, in batches; `seen` takes note of each."""
    batch: list[dict[str, Any]] = []
    for topic in stream.dlq_topics:
        for message in kafka.read(topic, logs[topic]) if topic in logs else ():
            envelope = open_envelope(_extract_headers(message), stream.is_origin)
            if envelope is None:
                seen.without_envelope += 1
                continue
            seen.add(topic, envelope, stream.topic)
            if topic in stream.delays and envelope.topic == stream.topic:
                accepted.ensure_on_tier(topic, envelope.partition, message.timestamp()[1])
            batch.append(_build_row(topic, envelope, message.timestamp()[1]))
            if len(batch) == COPIES_PER_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _extract_headers(message: Message) -> list[tuple[str, Any]]:
    found: Any = message.headers()
    return list(found or [])


def _build_row(topic: str, envelope: Envelope, copied_ms: int) -> dict[str, Any]:
    return {
        **dict(zip(ORIGIN, envelope.origin, strict=True)),
        "origin_ms": envelope.timestamp,
        "attempt": envelope.attempt,
        NUMBER: envelope.reclaims,
        "reason": envelope.reason,
        "rule": envelope.rule,
        "detail": envelope.detail,
        "next_topic": topic,
        "first_failed_at": envelope.first_failed_at,
        "sent_by": _parse_topic(envelope.slice_key),
        dlq_copies.COPIED_AT: to_moment(copied_ms),
    }


def _parse_topic(slice_key: str) -> str | None:
    try:
        return SliceKey.parse(slice_key).topic
    except UnknownSliceError:
        return None
