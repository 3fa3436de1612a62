"""A part of `rebuild-all`: stores what the topic of accepted events has, so that nothing is sent to it twice."""

# The new run opens the name of the topic's transactions first: an earlier run that still goes on is fenced, and its
# open transaction is settled. Then the topic is read, and the mark handed to the new table.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from highwater.assets import accepted_copies, publication_log_writer
from highwater.assets.work import Work
from highwater.errors import ConfigurationError, TopicAbsentError
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.resources.transactions import PublicationMark, Transactions
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import SparkSession

    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# A row takes at most 1 KB while it is made: this many are held at a time.
ROWS_PER_BATCH = 50_000


@dataclass
class AcceptedFacts:
    """The facts that were noted while the topic was read; the records themselves are not held.

    Args:
        log: the topic's offsets by partition; empty for a stream that publishes nothing, or everything again.
        count: records that the topic holds.
        first: by generation and partition of the main topic the lowest offset of the records in order.
        since: by partition whose log does not begin at 0 the time of its first record, in milliseconds; None without.
        older: records on tiers that may have been accepted before that: the topic does not show it.
    """

    log: Mapping[int, OffsetRange] = field(default_factory=dict)
    count: int = 0
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    since: dict[int, int | None] = field(default_factory=dict)
    older: Counter[str] = field(default_factory=Counter)

    def add(self, copy: accepted_copies.AcceptedCopy, partition: int, sent_ms: int, main: str) -> None:
        """Add a record of the topic."""
        self.count += 1
        if self.log[partition].start:
            known = self.since.get(partition)
            self.since[partition] = sent_ms if known is None else min(known, sent_ms)
        if copy.late is None and copy.origin.topic == main:
            place = copy.origin.generation, copy.origin.partition
            self.first[place] = min(self.first.get(place, copy.origin.offset), copy.origin.offset)

    def ensure_on_tier(self, topic: str, partition: int, copied_ms: int) -> None:
        """Take note of a record on a tier, of an origin on this partition of the main topic."""
        if not self.log or not self.log[partition % len(self.log)].start:
            return
        since = self.since.get(partition % len(self.log))
        if since is None or copied_ms < since:
            self.older[topic] += 1

    def select_unknown_ranges(self, number: int, log: Mapping[int, OffsetRange]) -> dict[int, OffsetRange]:
        """By partition the offsets of the main topic whose events may have been sent, and are not there any more.

        The records in order begin with an offset, and nothing after that is gone: late records of earlier ones
        preceded it too.

        Args:
            number: the main topic's generation.
            log: the offsets that it holds.
        """
        if self.first and number not in {generation for generation, _ in self.first}:
            return {}  # other records are there now
        found = {}
        for p, held in log.items():
            cut = bool(self.log) and self.log[p % len(self.log)].start
            end = min(self.first.get((number, p), held.end), held.end)
            if cut and end > held.start:
                found[p] = OffsetRange(held.start, end)
        return found


def store_accepted(
    ledger: Ledger,
    lake: Lake,
    kafka: Kafka,
    stream: Stream,
    on_record: Callable[[accepted_copies.AcceptedCopy], None],
    *,
    dry_run: bool,
    resend: bool,
) -> AcceptedFacts:
    """Store the topic's records, and let the table `published` begin after it; or only look.

    Args:
        on_record: takes note of each record.
        dry_run: write nothing.
        resend: nothing is kept, so that all is sent again.

    Raises:
        ConfigurationError: the topic holds what this stream did not send, or is compacted.
        SupersededAttemptError: another run publishes the stream.
        DependencyUnavailableError: Kafka, the lake or the ledger is unavailable.
    """
    topic = "" if stream.publishes is None or resend else stream.publishes.topic
    if not dry_run and lake.open_stream_table(stream.name, accepted_copies.TABLE) is not None:
        accepted_copies.write(lake, stream.name, [], {})  # of a command that died
    try:
        state = kafka.read_topic_state(topic) if topic else None
    except TopicAbsentError:
        state = None
    if state is None:
        return AcceptedFacts()
    _ensure_not_compacted(kafka, topic)
    if dry_run:
        found = AcceptedFacts(state.list_offset_ranges())
        for _ in _read_copy_batches(kafka, stream, topic, found, on_record):
            pass  # read to be counted
        return found
    with Transactions(kafka, f"highwater.pub.{topic}", topic) as transactions:
        mark, state = transactions.mark(), kafka.read_topic_state(topic)
        found = AcceptedFacts(state.list_offset_ranges())
        # A fenced reader had read no further.
        ends = {
            stream.topic: {p: held.end for p, held in kafka.read_topic_state(stream.topic).list_offset_ranges().items()}
        }
        accepted_copies.write(lake, stream.name, _read_copy_batches(kafka, stream, topic, found, on_record), ends)
        work = Work(stream, [], cast("SparkSession", None), lake, ledger, kafka, lambda _: None)
        book = publication_log_writer.PublicationLog(work, state.topic_id)
        book.follow(0 if mark is None else mark.attempt)
        transactions.commit([], PublicationMark(book.sending.attempt, 0, book.identity))
    return found


def _ensure_not_compacted(kafka: Kafka, topic: str) -> None:
    settings = fetch_topic_settings(kafka, topic)
    policy = "" if settings is None else str(settings["cleanup.policy"].value)
    if "compact" in policy:
        raise ConfigurationError(
            f"topic {topic} is compacted, so the events that were sent to it are unknown",
            stored="no record of what was sent",
            found=f"cleanup.policy={policy}",
            remedy="declare another topic for them, delete this one, or let it get all events again: --accepted-again",
        )


def _read_copy_batches(
    kafka: Kafka,
    stream: Stream,
    topic: str,
    found: AcceptedFacts,
    on_record: Callable[[accepted_copies.AcceptedCopy], None],
) -> Iterator[list[dict[str, Any]]]:
    """The records as rows, in batches, partition by partition: so files hold neighbouring offsets."""
    batch: list[dict[str, Any]] = []
    for partition, offsets in found.log.items():
        for message in kafka.read(topic, {partition: offsets}):
            copy = _read(stream, topic, message)
            sent_ms = message.timestamp()[1]
            found.add(copy, partition, sent_ms, stream.topic)
            on_record(copy)
            batch.append(copy.build_row(sent_ms))
            if len(batch) == ROWS_PER_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _read(stream: Stream, topic: str, message: Message) -> accepted_copies.AcceptedCopy:
    headers: Any = message.headers()
    problem = "its origin is of another stream"
    try:
        copy = accepted_copies.read(headers or (), message.value())
        if stream.is_origin(copy.origin.topic):
            return copy
        problem += f": {copy.origin.topic}"
    except ValueError as error:
        problem = str(error)
    raise ConfigurationError(
        f"{topic} holds a record that {stream.name} did not send",
        stored=f"partition {message.partition()}, offset {message.offset()}",
        found=problem,
        remedy=f"ensure that {stream.name} alone publishes to {topic}; declare another topic for it, or let this one "
        "get all events again: --accepted-again",
    )
