"""Dlq: what was rejected is published to the tiers and to the parked topic, each record once (I7)."""

# 1. events and rejects hold the decision.
# 2. Its rejects are published in batches, each with a mark that counts them.
# 3. The ledger stores the last mark, and the table the origins; the mark is deleted.
# From then on the slice may be reprocessed: published records are left to the DLQ until a person reclaims them
# (`highwater.orchestration.operations.reclaiming`).

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from highwater.assets import raw, rejects
from highwater.assets.commit import (
    Clock,
    CommittedSlices,
    build_reports,
    commit_rows,
    ensure_table,
    require_newer,
    take_commit_turn,
)
from highwater.assets.dlq_marks import PREFIX, build_group_name, delete_marks
from highwater.assets.dlq_sending import EnvelopeTemplate, RejectSending, RejectToSend
from highwater.assets.events import ORIGIN_COLUMNS, ensure_slices_present, require_upstream_commits
from highwater.assets.origins import DLQ as TABLE
from highwater.assets.origins import MILLISECONDS, TIMESTAMP, build_origin_predicate
from highwater.assets.parked_references import build_originals, find_value_reference
from highwater.assets.reclaims import NUMBER, with_reclaim_number
from highwater.assets.work import SliceReport, Work, pause_garbage_collection
from highwater.batching import PrefetchingIterator, compute_batch_ranges
from highwater.envelope import MAX_COUNT, MAX_DETAIL, ORIGIN, Envelope, ValueReference
from highwater.errors import ConfigurationError, SupersededAttemptError, UnbalancedError
from highwater.plans import PublicationRecord
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.deleted_topics import find_vanished_error
from highwater.resources.delta import has_column, query_arrow, read_count, slice_is_one_of
from highwater.resources.dlq_topics import TopicShape, ensure_dlq_topics
from highwater.resources.numbered_commits import NumberedCommit
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.resources.transactions import PublicationMark, Transactions

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

COLUMNS = (
    f"{ORIGIN_COLUMNS}, reason STRING, rule STRING, detail STRING, next_topic STRING, first_failed_at TIMESTAMP, "
    "published_at TIMESTAMP"
)
# Columns in which many rejects of a slice are alike.
_ALIKE = (*ORIGIN[:-1], "reason", "rule", "slice", "first_failed_at", "next_topic")
STATISTICS_COLUMNS = ("slice", "origin_partition", "origin_offset", "reason", "next_topic")
# In the slice commit: how many were sent of this decision; the other rows were published of earlier ones.
SENT = "sent"
# One transaction holds so much at the most: it lasts seconds, and memory is bounded.
RECORDS_PER_TRANSACTION = 20_000
BYTES_PER_TRANSACTION = 16 * 1024 * 1024
# The number of rejects in one read, and their bytes of values: each read opens the slice's files again.
RECORDS_PER_READ = 50_000
_ORDER = ", ".join(ORIGIN)
_RECORD = (
    f"slice, {_ORDER}, {MILLISECONDS}, coalesce(retries, 0) AS retries, reason, "
    "rule, detail, next_topic, first_failed_at, key, value, headers"
)


def materialise(work: Work) -> list[SliceReport]:
    """Publish the rejects of the slices, and keep what was published; a report for each slice, in their order.

    A slice without rejects has nothing to publish and gets no row: its rejects' own commit says so. A slice whose
    earlier rejects were all reclaimed still gets a commit for its new decision.

    Raises:
        TemporaryError: rejects of a slice are not there yet.
        TopicDriftError: a DLQ topic has unsafe settings.
        TopicVanishedError: one is not there any more; it is not created again.
        RecordTooLargeError: the parked topic does not even take a reference to a record.
        SupersededAttemptError: another run publishes the same slice, or decided it again.
        DependencyUnavailableError: Kafka, Spark or the lake is unavailable; what was published so far is known and not
            sent again.
    """
    decided = require_upstream_commits(work, rejects.TABLE)
    decisions = decided.slice_commits
    committed = CommittedSlices.read(work, TABLE)
    open_ = [p for p in work.slices if _needs_publication(decisions[p.key], committed.find_attempt(p.key))]
    require_newer(decisions, {p.key: committed.find_attempt(p.key) for p in open_})
    clock, done = Clock(), NumberedCommit(committed.version, {})
    if open_:
        ensure_table(work, TABLE, COLUMNS, STATISTICS_COLUMNS)
        with clock.phase("publish"):
            rejected = [slice_ for slice_ in open_ if decisions[slice_.key].rows]
            find_error = partial(find_vanished_error, work.ledger, work.stream)
            topics = ensure_dlq_topics(work.kafka, work.stream, find_error) if rejected else {}
            sent = dict.fromkeys([slice_.key for slice_ in open_], 0)
            read = decided.version
            for slice_ in rejected:
                sent[slice_.key], read = _publish(work, slice_, decisions[slice_.key], topics)
        with clock.phase("commit"), delta_errors("what was published of " + ", ".join(p.key for p in open_)):
            done = _commit(work, [decisions[slice_.key] for slice_ in open_], sent, committed, read)
        delete_marks(work, {slice_.key: decisions[slice_.key].attempt for slice_ in rejected})
    new = {slice_.key for slice_ in open_}
    notes = {key: _describe_skip_reason(decisions[key]) for key in work.keys if key not in new}
    return build_reports(work, TABLE, decisions, notes, clock, done)


def _needs_publication(decision: SliceCommit, published: int) -> bool:
    return published != decision.attempt and bool(decision.rows or published)


def _describe_skip_reason(decision: SliceCommit) -> str:
    return "already published" if decision.rows else "nothing was rejected"


def _publish(work: Work, slice_: Slice, decision: SliceCommit, topics: Mapping[str, TopicShape]) -> tuple[int, int]:
    """Send the rejects of a slice that are not sent yet.

    Returns:
        How many were sent of this decision in all, and the version of rejects with their destinations.
    """
    name, group = f"{PREFIX}{slice_.key}", build_group_name(slice_.key, decision.attempt)
    least = min(topic.max_message_bytes for topic in topics.values())
    parked = work.stream.parked_topic
    # The next batch is read in parallel: first while Kafka is waited for, then while a batch goes out.
    with pause_garbage_collection(), ThreadPoolExecutor(1, "rejects") as beside:
        likely = beside.submit(_Waiting, work, slice_, decision)
        with Transactions(work.kafka, name, parked, most_bytes=least, group=group) as transactions:
            mark = transactions.mark()
            # From now on no other run publishes the slice. An earlier run may have sent records elsewhere than rejects
            # said: an earlier read is valid only if nobody wrote since.
            waiting = _reuse_if_unchanged(likely) or _Waiting(work, slice_, decision)
            _ensure_whole(slice_, decision, waiting.rejects)
            sent = _count_sent(work, slice_, decision, mark)
            total = len(waiting)
            _record_sent(work, slice_, decision, sent)
            if sent < total:
                work.log(f"{slice_.key}: publishing {total - sent:,} of {total:,} rejects")
            sending = RejectSending(work, decision, waiting.version, topics, transactions)
            ahead = waiting.read_batches(sent)
            for batch in ahead:
                following = beside.submit(ahead.prepare)
                before, sent = PublicationMark(decision.attempt, sent, slice_.identity), sent + len(batch)
                sending.send(batch, before, replace(before, sent=sent))
                _record_sent(work, slice_, decision, sent)
                work.log(f"{slice_.key}: {sent:,} of {total:,} rejects published")
                following.result()
    return total, sending.version


def _reuse_if_unchanged(likely: Future[_Waiting]) -> _Waiting | None:
    """The rows that were read ahead, if the tables still hold them; the next read reports any failure."""
    if likely.exception() is not None:
        return None
    found = likely.result()
    return found if found.is_unchanged() else None


def _open_decided_rejects(work: Work, slice_: Slice, decision: SliceCommit) -> DeltaTable:
    """Rejects as they are now, with the decision in them; later reads use this version.

    Raises:
        TemporaryError: rejects do not hold the slice any more.
        SupersededAttemptError: another run decided the slice again.
        DependencyUnavailableError: the table is gone, or could not be read.
    """
    table = work.lake.open_existing_table(work.stream.name, rejects.TABLE)
    held = read_slice_commits(table, [slice_.key])
    ensure_slices_present(work, rejects.TABLE, [slice_.key], held)
    if held[slice_.key].attempt != decision.attempt:
        raise SupersededAttemptError(
            f"{slice_.key} was reprocessed while it was to be published",
            stored=f"attempt {decision.attempt}",
            found=f"attempt {held[slice_.key].attempt}",
            remedy="nothing to do: the run that decided it publishes it",
        )
    return table


def _ensure_whole(slice_: Slice, decision: SliceCommit, found: int) -> None:
    if found != decision.rows:
        raise UnbalancedError(
            f"{slice_.key}: the table of rejects holds another number of rows than its commit recorded",
            stored=decision.rows,
            found=found,
            remedy="materialise the slice again from rejects on; nothing of it was sent now",
        )


def _record_sent(work: Work, slice_: Slice, decision: SliceCommit, sent: int) -> None:
    """Copy the mark at once: one that expires in Kafka while the rest waits must not be forgotten."""
    publication = PublicationRecord(decision.attempt, sent, datetime.now(UTC))
    work.ledger.publications.record(work.stream.name, slice_.key, publication)


def _count_sent(work: Work, slice_: Slice, decision: SliceCommit, mark: PublicationMark | None) -> int:
    """The number of copies already sent, by Kafka's mark or, where that expired, by the ledger's copy of it.

    Raises:
        ConfigurationError: the mark is of another plan under the same key.
        SupersededAttemptError: a later decision was published meanwhile.
    """
    if mark is not None and mark.identity != slice_.identity:
        raise ConfigurationError(
            f"{slice_.key}: the rejects of another plan were published under this key",
            stored=f"mark of {mark.identity}, {mark.sent} sent",
            found=f"this plan is {slice_.identity}",
            remedy="another ledger plans this topic, or the ledger was lost: restore it, or highwater rebuild-ledger "
            f"{slice_.stream}; with a lost lake, highwater rebuild-all {slice_.stream}. Both need an empty ledger",
        )
    stored_mark = work.ledger.publications.read_for_slices([slice_.key]).get(slice_.key)
    known = [(m.attempt, m.sent) for m in (mark, stored_mark) if m is not None]
    latest = max((attempt for attempt, _ in known), default=0)
    if latest > decision.attempt:
        raise SupersededAttemptError(
            f"{slice_.key} was reprocessed and published again meanwhile",
            stored=f"attempt {latest}",
            found=f"attempt {decision.attempt}",
            remedy="nothing to do: the publication of the later decision stays",
        )
    return max((sent for attempt, sent in known if attempt == decision.attempt), default=0)


class _Waiting:
    """The rejects of a slice that no publication of an earlier decision holds, in the order of their origins.

    Raises:
        As `_open_decided_rejects`.
    """

    def __init__(self, work: Work, slice_: Slice, decision: SliceCommit) -> None:
        self._work, self._slice = work, slice_
        self._table = _open_decided_rejects(work, slice_, decision)
        self._held_by = work.lake.open_stream_table(work.stream.name, TABLE)
        mine = f"{slice_is_one_of([slice_.key])}"
        # `octet_length` takes text alone here.
        size = "CAST(coalesce(octet_length(encode(value, 'hex')), 0) / 2 AS BIGINT)"
        # A table that an older Highwater wrote has no such column until its next slice.
        before = rejects.PUBLISHED_AT if has_column(self._table, rejects.PUBLISHED_AT) else "NULL"
        copy = f"{_ORDER}, {read_count(self._table, NUMBER)} AS {NUMBER}, {before} IS NOT NULL AS sent_before"
        sql = f"SELECT {copy}, {size} AS bytes FROM t WHERE {mine} ORDER BY {_ORDER}"
        found = query_arrow({"t": self._table}, sql)
        self.rejects = len(found)
        held = _read_published_copies(self._held_by, mine)
        self._open = found.filter(_is_open(found, held))
        self._first: PrefetchingIterator[list[RejectToSend]] | None = self._start_reading(0)

    def __len__(self) -> int:
        """The number of copies."""
        return len(self._open)

    @property
    def version(self) -> int:
        """The version of the table of rejects, as it was read."""
        return int(self._table.version())

    def is_unchanged(self) -> bool:
        """Whether the tables still are as they were read."""
        lake, stream = self._work.lake, self._work.stream.name
        now = [lake.open_stream_table(stream, rejects.TABLE), lake.open_stream_table(stream, TABLE)]
        return [_find_identity(one) for one in now] == [_find_identity(one) for one in (self._table, self._held_by)]

    def read_batches(self, sent: int) -> PrefetchingIterator[list[RejectToSend]]:
        """The rejects after the first `sent` ones, in batches for a transaction each; the first of them is read.

        Value sizes bound a read; sizes of whole records bound a transaction.
        """
        first, self._first = self._first, None
        return self._start_reading(sent) if sent or first is None else first

    def _start_reading(self, sent: int) -> PrefetchingIterator[list[RejectToSend]]:
        ahead = PrefetchingIterator(self._iterate_batches(sent))
        ahead.prepare()
        return ahead

    def _iterate_batches(self, sent: int) -> Iterator[list[RejectToSend]]:
        left = self._open.slice(sent)
        for start, end in compute_batch_ranges(left["bytes"].to_pylist(), RECORDS_PER_READ, BYTES_PER_TRANSACTION):
            rows = self._read(left.slice(start, end - start))
            for at in range(0, len(rows), RECORDS_PER_TRANSACTION):
                found = _build_rejects(rows.slice(at, RECORDS_PER_TRANSACTION))
                for one in compute_batch_ranges(
                    [reject.size for reject in found], RECORDS_PER_TRANSACTION, BYTES_PER_TRANSACTION
                ):
                    yield found[slice(*one)]

    def _read(self, places: pa.Table) -> pa.Table:
        mine = slice_is_one_of([self._slice.key])
        where = f"{mine} AND ({build_origin_predicate(places)})"
        columns = f"{_RECORD}, {read_count(self._table, NUMBER)} AS {NUMBER}"
        rows = query_arrow({"t": self._table}, f"SELECT {columns} FROM t WHERE {where} ORDER BY {_ORDER}")
        if len(rows) > len(places):  # others lie between them
            wanted = {*_select_origins(places)}
            rows = rows.filter([place in wanted for place in _select_origins(rows)])
        return rows


def _is_open(rows: pa.Table, held: Collection[tuple[Any, ...]]) -> pa.Array:
    """Whether each reject is unpublished, by the table `rejects` itself and by what was published."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fresh = pc.invert(rows["sent_before"])
    if not held:
        return fresh
    return pc.and_(fresh, pa.array([copy not in held for copy in _select_copy_identities(rows)], pa.bool_()))


def _build_rejects(rows: pa.Table) -> list[RejectToSend]:
    """Rejects as they are sent, from the columns of `_RECORD`."""
    originals = [*build_originals(rows)]
    retries = rows["retries"].to_pylist()
    # Headers of the main topic mean nothing.
    came = [find_value_reference(found) if tried else None for tried, found in zip(retries, originals, strict=True)]
    details = [(detail or "")[:MAX_DETAIL] for detail in _to_shared_values(rows["detail"])]
    alike = map(
        _build_envelope_template,
        *[_to_shared_values(rows[name]) for name in _ALIKE],
        details,
        retries,
        rows[NUMBER].to_pylist(),
        came,
    )
    each = zip(alike, rows["origin_offset"].to_pylist(), rows[MILLISECONDS].to_pylist(), originals, strict=True)
    return [kind.read_reject(offset, ms, found) for kind, offset, ms, found in each]


@lru_cache(maxsize=1_000)
def _build_envelope_template(
    topic: str,
    generation: int,
    partition: int,
    reason: str,
    rule: str | None,
    slice_key: str,
    first_failed_at: datetime,
    next_topic: str,
    detail: str,
    retries: int,
    reclaims: int,
    came: ValueReference | None,
) -> EnvelopeTemplate:
    """The envelope of rejects, except for offset and time."""
    envelope = Envelope(
        topic=topic,
        generation=generation,
        partition=partition,
        offset=0,
        timestamp=0,
        # A reader of the envelope must believe it.
        attempt=min(retries + 1, MAX_COUNT),
        reason=reason,
        detail=detail,
        slice_key=slice_key,
        first_failed_at=first_failed_at,
        rule=rule,
        reclaims=reclaims,
        reference=came,
    )
    return EnvelopeTemplate(envelope, next_topic)


def _to_shared_values(column: pa.ChunkedArray) -> list[Any]:
    """A column in which many values are alike: each is made once."""
    found = column.combine_chunks().dictionary_encode(null_encoding="encode")
    values = found.dictionary.to_pylist()
    return [values[at] for at in found.indices.to_pylist()]


def _select_origins(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in ORIGIN), strict=True)


def _select_copy_identities(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The identity of a publication: an origin, and the number of its reclaims."""
    return zip(*(rows[name].to_pylist() for name in (*ORIGIN, NUMBER)), strict=True)


def _find_identity(table: DeltaTable | None) -> tuple[str, int] | None:
    return None if table is None else (str(table.metadata().id), int(table.version()))


def _read_published_copies(table: DeltaTable | None, where: str) -> set[tuple[Any, ...]]:
    if table is None:
        return set()
    sql = f"SELECT {_ORDER}, {read_count(table, NUMBER)} AS {NUMBER} FROM t WHERE {where}"
    return {*_select_copy_identities(query_arrow({"t": table}, sql))}


def _commit(
    work: Work, decisions: Sequence[SliceCommit], sent: Mapping[str, int], committed: CommittedSlices, version: int
) -> NumberedCommit:
    """Store the origins of all rejects of the slices.

    This includes rejects of earlier publications, also from before a rebuild of the lake. They keep the time of their
    publication, which orders an origin's rejections.
    """
    from pyspark.sql import functions as F

    mine = slice_is_one_of([decision.key for decision in decisions])
    rows = with_reclaim_number(
        read_table_version(work.spark, work.lake.build_table_path(work.stream.name, rejects.TABLE), version).where(mine)
    )
    names = ("slice", *ORIGIN, *TIMESTAMP, "attempt", "retries", NUMBER, "reason", "rule", "detail", "next_topic")
    copied = F.col(rejects.PUBLISHED_AT) if rejects.PUBLISHED_AT in rows.columns else F.lit(None).cast("timestamp")
    published_rows = rows.select(*names, "first_failed_at", F.coalesce(copied, F.current_timestamp()).alias("now"))
    if any(committed.find_attempt(decision.key) for decision in decisions):
        before = with_reclaim_number(
            read_table_version(
                work.spark, work.lake.build_table_path(work.stream.name, TABLE), committed.version
            ).where(mine)
        )
        same = ["slice", *ORIGIN, NUMBER]
        published_rows = published_rows.join(before.select(*same, "published_at"), same, "left")
        published_rows = published_rows.withColumn("published_at", F.coalesce("published_at", "now")).drop("now")
    else:
        published_rows = published_rows.withColumnRenamed("now", "published_at")
    slice_commits = [replace(decision, counts={SENT: sent[decision.key]}) for decision in decisions]
    files = raw.compute_file_count([decision.counts["rejects"] for decision in decisions])
    with take_commit_turn(work, TABLE):
        return commit_rows(work, TABLE, published_rows, slice_commits, committed, files=files, spread="origin_offset")
