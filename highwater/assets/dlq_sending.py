"""Sends a batch of rejects; those that their tier does not take are parked, which the table `rejects` records first."""

# The table of rejects names the destination of a record before it is sent, so a run after a crash and every reader of
# the table know it. Only the headers of a record say that it is parked by reference.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from highwater.assets import raw, rejects
from highwater.assets.commit import CommittedSlices, commit_rows, take_commit_turn
from highwater.assets.parked_references import OriginalRecord, find_place
from highwater.envelope import (
    KEY,
    ORIGIN,
    ORIGIN_OFFSET,
    ORIGIN_TIMESTAMP,
    OWN_HEADERS,
    VALUE,
    Envelope,
    KafkaHeader,
    Origin,
    Place,
    ValueReference,
    remove_envelope,
)
from highwater.errors import RecordTooLargeError
from highwater.message_size import SizeLimits, measure_headers, measure_message
from highwater.resources.delta import slice_is_one_of
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.producer_records import Record
from highwater.resources.spark_tables import read_table_version
from highwater.resources.transactions import PublicationMark, Transactions

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.slice_commits import SliceCommit

# No longer place can be in a reference, so what fits with it fits with any.
_LONGEST = Place("x" * 249, 2**31 - 1, 2**31 - 1, 2**63 - 1)
_ORIGINS = "origin_topic STRING, origin_generation INT, origin_partition INT, origin_offset BIGINT, note STRING"


class EnvelopeTemplate:
    """The common part of rejects that differ only in the origin's offset and time, and in the record itself.

    A slice has many rejects of few kinds: the headers of a kind are written once, a whole envelope only if asked for.

    Args:
        envelope: the envelope of any one of them.
        topic: where they go.
    """

    def __init__(self, envelope: Envelope, topic: str) -> None:
        self.envelope, self.topic = envelope, topic
        names = envelope.to_headers()
        at = [name for name, _ in names].index(ORIGIN_OFFSET)
        self._before, self._behind = names[:at], names[at + 2 :]
        between: list[KafkaHeader] = [(ORIGIN_OFFSET, None), (ORIGIN_TIMESTAMP, None)]
        self._size = measure_headers([*self._before, *between, *self._behind])

    def read_reject(self, offset: int, timestamp: int, found: OriginalRecord) -> RejectToSend:
        """One of them."""
        own = remove_envelope(found.headers) if found.headers else ()
        place, time = b"%d" % offset, b"%d" % timestamp
        headers = [*own, *self._before, (ORIGIN_OFFSET, place), (ORIGIN_TIMESTAMP, time), *self._behind]
        size = self._size + len(place) + len(time) + measure_message(found.key, found.value, own)
        return RejectToSend(self, offset, timestamp, found, headers, size)


class RejectToSend(NamedTuple):
    """A record that is to be sent.

    Args:
        template: the envelope of the record and of similar ones.
        offset: the origin's offset.
        timestamp: the origin's timestamp, in milliseconds since 1970 in UTC.
        found: the record as it was read, an earlier envelope included.
        headers: the headers of the whole record.
        size: in bytes, sent whole.
    """

    template: EnvelopeTemplate
    offset: int
    timestamp: int
    found: OriginalRecord
    headers: Sequence[KafkaHeader]
    size: int

    @classmethod
    def from_envelope(cls, envelope: Envelope, topic: str, found: OriginalRecord) -> RejectToSend:
        """A record with what follows from it."""
        return EnvelopeTemplate(envelope, topic).read_reject(envelope.offset, envelope.timestamp, found)

    @property
    def envelope(self) -> Envelope:
        """The headers of the record."""
        return replace(self.template.envelope, offset=self.offset, timestamp=self.timestamp)

    @property
    def topic(self) -> str:
        """The topic that the record goes to."""
        return self.template.topic


@dataclass
class RejectSending:
    """The rejects of one slice on their way.

    Args:
        work: the connections.
        decision: the commit of the slice in rejects.
        version: that table's version; a later one if records go to another topic than decided.
        topics: how the topics are set up.
        transactions: opened by the slice's name.
    """

    work: Work
    decision: SliceCommit
    version: int
    topics: Mapping[str, TopicShape]
    transactions: Transactions
    _refused: set[tuple[Origin, str]] = field(default_factory=set)

    def send(self, batch: Sequence[RejectToSend], before: PublicationMark, after: PublicationMark) -> None:
        """Send a batch in one transaction. Records that broker or client refuse go elsewhere, in a second transaction.

        Args:
            batch: rejects in the order of their origins.
            before: the committed mark.
            after: the mark that counts these too.

        Raises:
            RecordTooLargeError: the parked topic does not even take a reference.
            As `Transactions.commit`.
        """
        while True:
            batch = self._reroute(batch, before)
            records = self._build_records(batch)
            try:
                return self.transactions.commit(records, after)
            except RecordTooLargeError as error:
                refused_ids = {id(record) for record in error.refused}
                refused = {
                    (one.envelope.origin, one.topic)
                    for one, record in zip(batch, records, strict=True)
                    if id(record) in refused_ids
                }
                if refused <= self._refused:  # a reference of it was what was sent
                    raise
                self._refused |= refused

    @cached_property
    def _limits(self) -> SizeLimits:
        size_limits = {topic: shape.max_message_bytes for topic, shape in self.topics.items()}
        return SizeLimits(size_limits, self.transactions.most_bytes, self.transactions.compresses)

    def _can_send(self, one: RejectToSend) -> bool:
        if self._refused and (one.envelope.origin, one.topic) in self._refused:
            return False
        return one.topic in self.topics and self._limits.can_send_whole(one.topic, one.size)

    def _reroute(self, batch: Sequence[RejectToSend], before: PublicationMark) -> Sequence[RejectToSend]:
        """The batch, with what its tier does not take on the parked topic; the table of rejects knows it first."""
        parked = self.work.stream.parked_topic
        moved = [one for one in batch if one.topic != parked and not self._can_send(one)]
        if not moved:
            return batch
        self.transactions.commit([], before)  # a fenced producer fails here, before the table changes
        self._record_parked(notes := {one.envelope.origin: self._describe_move(one) for one in moved})
        self.work.log(f"{self.decision.key}: {len(moved):,} records are parked: {next(iter(notes.values()))[:-2]}")
        return [_to_parked_reject(one, parked, notes) for one in batch]

    def _describe_move(self, one: RejectToSend) -> str:
        """The reason why a record does not go to its tier, as the beginning of its detail."""
        if one.topic not in self.topics:
            return f"the stream no longer declares {one.topic}; "
        return f"too large for {one.topic}, {one.size:,} bytes; "

    def _record_parked(self, notes: Mapping[Origin, str]) -> None:
        """Write to rejects that these records go to the parked topic, and why."""
        from pyspark.sql import functions as F

        work, path = self.work, self.work.lake.build_table_path(self.work.stream.name, rejects.TABLE)
        noted = work.spark.createDataFrame([(*origin, note) for origin, note in notes.items()], _ORIGINS)
        rows = read_table_version(work.spark, path, self.version).where(slice_is_one_of([self.decision.key]))
        moved = F.col("note").isNotNull()
        rows = rows.join(F.broadcast(noted), [*ORIGIN], "left")
        rows = rows.withColumns(
            {
                "next_topic": F.when(moved, F.lit(work.stream.parked_topic)).otherwise(F.col("next_topic")),
                "detail": F.when(moved, F.concat("note", F.coalesce("detail", F.lit("")))).otherwise(F.col("detail")),
            }
        ).drop("note")
        committed = CommittedSlices({self.decision.key: self.decision}, self.version)
        files = raw.compute_file_count([self.decision.rows or 0])
        with take_commit_turn(work, rejects.TABLE):
            self.version = commit_rows(
                work, rejects.TABLE, rows, [self.decision], committed, files=files, spread="origin_offset"
            ).version

    def _build_records(self, batch: Sequence[RejectToSend]) -> list[Record]:
        everywhere = 0 if self._refused else self._limits.everywhere
        return [
            Record(
                one.template.topic, one.found.key, one.found.value, one.headers, self._choose_partition(one.template)
            )
            if one.template.envelope.reference is None and (one.size <= everywhere or self._can_send(one))
            else self._build_reference_record(one)
            for one in batch
        ]

    def _choose_partition(self, template: EnvelopeTemplate) -> int:
        # As many partitions as the main topic has: only a foreign envelope may name one that there is not.
        return template.envelope.partition % self.topics[template.topic].partitions

    def _build_reference_record(self, one: RejectToSend) -> Record:
        """A record by reference. A reference that was already a reference keeps its original place."""
        came, everything = one.envelope.reference, (VALUE, OWN_HEADERS, KEY)
        longest = replace(one.envelope, reference=ValueReference(everything, _LONGEST, one.size)).to_headers()
        own = remove_envelope(one.found.headers)
        parts = self._limits.select_left_out(one.topic, one.found.key, own, longest)
        if came is None:
            place = find_place(self.work.lake, self.work.stream, one.envelope, one.found)
            reference = ValueReference(parts, place, one.size)
        else:
            reference = replace(came, left_out=(*came.left_out, *[p for p in parts if p not in came.left_out]))
        headers = replace(one.envelope, reference=reference).to_headers()
        key = None if KEY in parts else one.found.key
        return Record(
            one.topic,
            key,
            b"",
            headers if OWN_HEADERS in parts else [*own, *headers],
            self._choose_partition(one.template),
        )


def _to_parked_reject(one: RejectToSend, parked: str, notes: Mapping[Origin, str]) -> RejectToSend:
    note = notes.get(one.envelope.origin)
    if note is None:
        return one
    return RejectToSend.from_envelope(replace(one.envelope, detail=note + one.envelope.detail), parked, one.found)
