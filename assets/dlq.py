"""Dlq: what was rejected is published to the tiers and to the parked topic, each record once (I7).

What belongs here: which rejects are still to be sent, and in which portions; the table of what was. What does not: the
routing, which the rejects carry, what becomes of a record that its topic does not take (`assets.dlq_sending`), and the
transactions (`resources.transactions`).

The order is: the decision stands in events and rejects; its rejects are published, portion by portion, each with a mark
that counts them; the ledger keeps the last mark; the table keeps the origins. Only then may the slice be decided anew,
and what was published is left to the DLQ, until a person takes it back (`orchestration.reclaiming`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from assets import rejects
from assets.commit import Clock, Standing, commit_lock, reports, require_newer
from assets.dlq_sending import Reject, Sending
from assets.events import ORIGIN_COLUMNS, require
from assets.origins import DLQ as TABLE
from assets.origins import covering
from assets.reclaims import NUMBER, counted
from assets.references import came_as, original_of
from assets.work import SliceReport, Work
from highwater.envelope import ORIGIN, Envelope
from highwater.errors import ConfigurationError, DependencyAwayError, SupersededAttemptError, UnbalancedError
from highwater.plans import Publication
from highwater.portions import cut
from resources.dlq_topics import Shape, ensure
from resources.lake import count_in, query, slice_is_one_of, stream_rows
from resources.spark import delta_errors
from resources.spark_tables import create_table, replace_slices, rows_at
from resources.transactions import Mark, Transactions
from resources.vanished_topics import expected

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.proof import Proof
    from highwater.slices import Slice

T = TypeVar("T")

COLUMNS = (
    f"{ORIGIN_COLUMNS}, reason STRING, detail STRING, next_topic STRING, first_failed_at TIMESTAMP, "
    "published_at TIMESTAMP"
)
SEARCHED = ("origin_partition", "origin_offset", "reason", "next_topic")
# In the proof: how many were sent of this decision; the other rows were published of earlier ones.
SENT = "sent"
# One transaction holds so much at the most: it lasts seconds, and memory is bounded.
RECORDS_A_TRANSACTION = 5_000
BYTES_A_TRANSACTION = 16 * 1024 * 1024
_ORDER = ", ".join(ORIGIN)
# The timestamp as a number: a producer's clock may name a year that Python's times do not know.
_RECORD = (
    f"slice, {_ORDER}, arrow_cast(origin_timestamp, 'Int64') AS origin_us, coalesce(retries, 0) AS retries, reason, "
    "detail, next_topic, first_failed_at, key, value, headers"
)


def materialise(work: Work) -> list[SliceReport]:
    """Publish the rejects of the slices, and keep what was published; a report for each slice, in their order.

    A slice without rejects has nothing to publish and gets no row: its rejects' own proof says so. One that had some
    before they were taken back follows its decision all the same.

    Raises:
        TemporaryError: rejects of a slice are not there yet.
        TopicDriftError: a DLQ topic is not set up as it must be.
        TopicVanishedError: one is not there any more; it is not created again.
        RecordTooLargeError: the parked topic does not even take a reference to a record.
        SupersededAttemptError: another run publishes the same slice, or decided it anew.
        DependencyAwayError: Kafka, Spark or the lake is away; what was published so far is known and not sent again.
    """
    decided = require(work, rejects.TABLE)
    decisions = decided.proofs
    standing = Standing.read(work, TABLE)
    open_ = [p for p in work.slices if _follows(decisions[p.key], standing.attempt(p.key))]
    require_newer(decisions, {p.key: standing.attempt(p.key) for p in open_})
    clock, version = Clock(), -1
    if open_:
        create_table(work.spark, work.lake.path(work.stream.name, TABLE), COLUMNS, SEARCHED)
        with clock.phase("publish"):
            rejected = [piece for piece in open_ if decisions[piece.key].rows]
            topics = ensure(work.kafka, work.stream, expected(work.ledger, work.stream)) if rejected else {}
            sent = dict.fromkeys([piece.key for piece in open_], 0)
            read = decided.version
            for piece in rejected:
                sent[piece.key], read = _publish(work, piece, decisions[piece.key], topics)
        with clock.phase("commit"), delta_errors("what was published of " + ", ".join(p.key for p in open_)):
            version = _commit(work, [decisions[piece.key] for piece in open_], sent, standing, read)
    done = {piece.key for piece in open_}
    notes = {key: _why_nothing(decisions[key]) for key in work.keys if key not in done}
    return reports(work, TABLE, decisions, notes, clock, version)


def _follows(decision: Proof, published: int) -> bool:
    return published != decision.attempt and bool(decision.rows or published)


def _why_nothing(decision: Proof) -> str:
    return "already published" if decision.rows else "nothing was rejected"


def _publish(work: Work, piece: Slice, decision: Proof, topics: Mapping[str, Shape]) -> tuple[int, int]:
    """Send what is not sent yet of a slice's rejects.

    Returns:
        How many were sent of this decision in all, and the version of rejects that tells where to.
    """
    name = f"highwater.pub.{piece.key}"
    least = min(topic.room for topic in topics.values())
    with Transactions(work.kafka, name, work.stream.parked_topic, most_bytes=least) as transactions:
        mark = transactions.mark()
        # From now on no other run publishes the slice. One that did may have sent records elsewhere than rejects told.
        version = _still_decided(work, piece, decision)
        waiting = _Waiting(work, piece, version)
        _see_whole(piece, decision, waiting.rejects)
        sent = _sent(work, piece, decision, mark)
        total = len(waiting.origins)
        _record_sent(work, piece, decision, sent)
        if sent < total:
            work.log(f"{piece.key}: publishing {total - sent:,} of {total:,} rejects")
        sending = Sending(work, decision, version, topics, transactions)
        for portion in waiting.portions(sent):
            before, sent = Mark(decision.attempt, sent, piece.identity), sent + len(portion)
            sending.send(portion, before, replace(before, sent=sent))
            _record_sent(work, piece, decision, sent)
            work.log(f"{piece.key}: {sent:,} of {total:,} rejects published")
    return total, sending.version


def _still_decided(work: Work, piece: Slice, decision: Proof) -> int:
    """The version of rejects in which the decision stands.

    Raises:
        SupersededAttemptError: another run decided the slice anew.
    """
    standing = require(replace(work, slices=[piece]), rejects.TABLE)
    if standing.attempt(piece.key) != decision.attempt:
        raise SupersededAttemptError(
            f"{piece.key} was decided anew while it was to be published",
            stored=f"attempt {decision.attempt}",
            found=f"attempt {standing.attempt(piece.key)}",
            remedy="nothing: the run that decided it publishes it",
        )
    return standing.version


def _see_whole(piece: Slice, decision: Proof, found: int) -> None:
    if found != decision.rows:
        raise UnbalancedError(
            f"{piece.key}: the table of rejects holds another number of rows than its commit recorded",
            stored=decision.rows,
            found=found,
            remedy="materialise the slice again from rejects on; nothing of it was sent now",
        )


def _record_sent(work: Work, piece: Slice, decision: Proof, sent: int) -> None:
    """Copy the mark at once: one that expires in Kafka while the rest waits must not be forgotten."""
    publication = Publication(decision.attempt, sent, datetime.now(UTC))
    work.ledger.record_publication(work.stream.name, piece.key, publication)


def _sent(work: Work, piece: Slice, decision: Proof, mark: Mark | None) -> int:
    """How many were sent already, by Kafka's mark or, where that expired, by the ledger's copy of it.

    Raises:
        ConfigurationError: the mark is of another plan under the same key.
        SupersededAttemptError: a later decision was published meanwhile.
    """
    if mark is not None and mark.identity != piece.identity:
        raise ConfigurationError(
            f"{piece.key}: the rejects of another plan were published under this key",
            stored=f"mark of {mark.identity}, {mark.sent} sent",
            found=f"this plan is {piece.identity}",
            remedy="another ledger plans this topic, or the ledger was lost: restore it, or highwater rebuild-ledger "
            f"{piece.stream}; if the lake is lost too, highwater rebuild-all {piece.stream}, both into an empty ledger",
        )
    kept = work.ledger.publications([piece.key]).get(piece.key)
    known = [(m.attempt, m.sent) for m in (mark, kept) if m is not None]
    latest = max((attempt for attempt, _ in known), default=0)
    if latest > decision.attempt:
        raise SupersededAttemptError(
            f"{piece.key} was decided and published anew meanwhile",
            stored=f"attempt {latest}",
            found=f"attempt {decision.attempt}",
            remedy="nothing: the publication of the later decision stands",
        )
    return max((sent for attempt, sent in known if attempt == decision.attempt), default=0)


class _Waiting:
    """The rejects of a slice that no publication of an earlier decision holds, in the order of their origins."""

    def __init__(self, work: Work, piece: Slice, version: int) -> None:
        self._piece = piece
        self._table = _at(work, rejects.TABLE, version)
        mine = f"proof IS NULL AND {slice_is_one_of([piece.key])}"
        # `octet_length` takes text alone here.
        size = "coalesce(octet_length(encode(value, 'hex')), 0) / 2"
        # A table that an older Highwater wrote has no such column until its next slice.
        before = rejects.PUBLISHED_AT if rejects.PUBLISHED_AT in _names_of(self._table) else "NULL"
        copy = f"{_ORDER}, {count_in(self._table, NUMBER)} AS {NUMBER}, {before} IS NOT NULL AS sent_before"
        found = query(self._table, f"SELECT {copy}, {size} AS bytes FROM t WHERE {mine} ORDER BY {_ORDER}")
        held = _published(work, mine)
        self.rejects = len(found)
        open_ = [row for row in found if not row["sent_before"] and _copy(row) not in held]
        self.origins = [(_place(row), int(str(row["bytes"]))) for row in open_]

    def portions(self, sent: int) -> Iterator[list[Reject]]:
        """The rejects behind the first `sent` ones, in portions for a transaction each.

        What is read at once is bounded by the values' sizes, what is sent at once by those of whole records.
        """
        for places in _cut(self.origins[sent:], lambda origin: origin[1]):
            yield from _cut(self._rejects([place for place, _ in places]), attrgetter("size"))

    def _rejects(self, places: Sequence[tuple[Any, ...]]) -> Iterator[Reject]:
        mine = slice_is_one_of([self._piece.key])
        wanted = set(places)
        where = f"proof IS NULL AND {mine} AND ({covering(places)})"
        columns = f"{_RECORD}, {count_in(self._table, NUMBER)} AS {NUMBER}"
        for row in stream_rows(self._table, f"SELECT {columns} FROM t WHERE {where} ORDER BY {_ORDER}"):
            if _place(row) in wanted:
                yield self._reject(row)

    def _reject(self, row: Mapping[str, Any]) -> Reject:
        envelope = Envelope(
            topic=row["origin_topic"],
            generation=row["origin_generation"],
            partition=row["origin_partition"],
            offset=row["origin_offset"],
            timestamp=row["origin_us"] // 1000,
            attempt=row["retries"] + 1,
            reason=row["reason"],
            detail=row["detail"] or "",
            slice_key=row["slice"],
            first_failed_at=row["first_failed_at"],
            reclaims=row[NUMBER],
        )
        found = original_of(row)
        if row["retries"]:  # headers of the main topic mean nothing
            envelope = replace(envelope, reference=came_as(found))
        return Reject.of(envelope, row["next_topic"], found)


def _cut(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    return cut(items, size, RECORDS_A_TRANSACTION, BYTES_A_TRANSACTION)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ORIGIN)


def _copy(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is published once: an origin, anew each time that it was taken back."""
    return (*_place(row), row[NUMBER])


def _at(work: Work, name: str, version: int) -> DeltaTable:
    """A table as one version has it, opened without a JVM."""
    table = work.lake.table(work.stream.name, name)
    if table is None:
        raise DependencyAwayError(
            f"the table {name} of {work.stream.name} is gone", remedy="restore it, or materialise the slice from raw on"
        )
    table.load_as_version(version)
    return table


def _names_of(table: DeltaTable) -> set[str]:
    return {field.name for field in table.schema().fields}


def _published(work: Work, where: str) -> set[tuple[Any, ...]]:
    table = work.lake.table(work.stream.name, TABLE)
    if table is None:
        return set()
    copies = query(table, f"SELECT {_ORDER}, {count_in(table, NUMBER)} AS {NUMBER} FROM t WHERE {where}")
    return {_copy(row) for row in copies}


def _commit(work: Work, decisions: Sequence[Proof], sent: Mapping[str, int], standing: Standing, version: int) -> int:
    """Keep the origins of all rejects of the slices.

    Those of earlier publications are still among them, also of ones before a rebuild of the lake, with the time of that
    one: it orders an origin's rejections.
    """
    from pyspark.sql import functions as F

    mine = slice_is_one_of([decision.key for decision in decisions])
    rows = counted(rows_at(work.spark, work.lake.path(work.stream.name, rejects.TABLE), version).where(mine))
    names = ("slice", *ORIGIN, "origin_timestamp", "attempt", "retries", NUMBER, "reason", "detail", "next_topic")
    copied = F.col(rejects.PUBLISHED_AT) if rejects.PUBLISHED_AT in rows.columns else F.lit(None).cast("timestamp")
    told = rows.select(*names, "first_failed_at", F.coalesce(copied, F.current_timestamp()).alias("now"))
    if any(standing.attempt(decision.key) for decision in decisions):
        before = counted(rows_at(work.spark, work.lake.path(work.stream.name, TABLE), standing.version).where(mine))
        same = ["slice", *ORIGIN, NUMBER]
        told = told.join(before.select(*same, "published_at"), same, "left")
        told = told.withColumn("published_at", F.coalesce("published_at", "now")).drop("now")
    else:
        told = told.withColumnRenamed("now", "published_at")
    with commit_lock(work, TABLE):
        return replace_slices(
            work.spark,
            work.lake.path(work.stream.name, TABLE),
            told,
            [replace(decision, counts={SENT: sent[decision.key]}) for decision in decisions],
            {decision.key: standing.attempt(decision.key) for decision in decisions},
            files=1,
            spread="origin_offset",
        )
