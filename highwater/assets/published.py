"""The stage `published`: each accepted event is sent once to a topic, in the order of its origin."""

# One name for all transactions of a topic keeps the order: opening it fences every earlier run. A batch is written to
# the log before anything of it is committed, sent with a mark in each transaction that counts its records, and settled.
# Nothing here needs a JVM.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from highwater import envelope
from highwater.assets import events, publication_log, publication_log_writer, rejects, retraction_guard
from highwater.assets.commit import Clock, CommittedSlices, require_newer
from highwater.assets.event_records import EventRecords
from highwater.assets.events import require_upstream_commits
from highwater.assets.origins import DLQ
from highwater.assets.publication_batch import PublicationBatch
from highwater.assets.publication_window import RUN, PublicationWindow
from highwater.assets.work import SliceReport, Work, pause_garbage_collection
from highwater.batching import PrefetchingIterator, compute_batch_ranges
from highwater.errors import ConfigurationError, SupersededAttemptError, TemporaryError, TopicAbsentError
from highwater.plans import PublicationRecord
from highwater.publishing import EventState, PublicationOutcome, group_for_publication, select_in_order
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.dlq_topics import ensure_accepted
from highwater.resources.producer_records import Record
from highwater.resources.transactions import PublicationMark, Transactions

if TYPE_CHECKING:
    from highwater.envelope import KafkaHeader
    from highwater.resources.dlq_topics import TopicShape
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

TABLE = publication_log.TABLE
# One transaction holds so much at the most: it lasts seconds, and memory is bounded.
RECORDS_PER_TRANSACTION = 20_000
BYTES_PER_TRANSACTION = 16 * 1024 * 1024
# A batch is two commits of the table; one large slice is a batch of its own.
ROWS_PER_BATCH = 100_000
SLICES_PER_BATCH = 20


def materialise(work: Work) -> list[SliceReport]:
    """Send the events of the slices that were not sent yet; a report for each slice, in their order.

    Raises:
        TemporaryError: a slice is not done yet, or one before it is not published.
        RetractionError: what was sent of a slice would be no event any more.
        TopicDriftError: the topic has unsafe settings.
        TopicRecreatedError: the topic is not the one that was published to.
        RecordTooLargeError: the topic does not take an event; it and what follows wait.
        SupersededAttemptError: another run publishes the same stream, or a slice was reprocessed meanwhile.
        DependencyUnavailableError: Kafka or the lake is unavailable; what was sent so far is known and not sent again.
    """
    decided = require_upstream_commits(work, events.TABLE)
    _ensure_done(work, decided)
    before = publication_log.read_published_commits(work.lake, work.stream, work.keys)
    require_newer(decided.slice_commits, {key: slice_commit.attempt for key, slice_commit in before.items()})
    run = _Run(work, decided)
    if any(not run.is_settled(key, before) for key in work.keys):
        with run.clock.phase("publish"):
            run.publish(before)
    return run.build_reports(before)


def _ensure_done(work: Work, decided: CommittedSlices) -> None:
    """Ensure that the slices are done up to their publication to the DLQ: only then are their events final.

    Raises:
        TemporaryError: one is not.
    """
    rejected, published = CommittedSlices.read(work, rejects.TABLE), CommittedSlices.read(work, DLQ)

    def is_done(key: str) -> bool:
        attempt = decided.find_attempt(key)
        if rejected.find_attempt(key) != attempt:
            return False
        return not rejected.slice_commits[key].rows or published.find_attempt(key) == attempt

    if undone := [key for key in work.keys if not is_done(key)]:
        raise TemporaryError(
            f"{', '.join(undone)}: rejects or dlq do not follow the events yet",
            remedy=f"materialise {work.stream.name}/{rejects.TABLE} and {work.stream.name}/{DLQ} of these slices first",
        )


@dataclass
class _Run:
    """The publication of one run.

    Args:
        work: the slices that are asked for, and the connections.
        decided: the commits of the slices in events.
    """

    work: Work
    decided: CommittedSlices
    clock: Clock = field(default_factory=Clock)
    sent_now: Counter[str] = field(default_factory=Counter)
    book: publication_log_writer.PublicationLog | None = None

    def is_settled(self, key: str, slice_commits: Mapping[str, SliceCommit]) -> bool:
        """Whether a slice is published as it is decided."""
        return key in slice_commits and slice_commits[key].attempt == self.decided.find_attempt(key)

    def publish(self, before: Mapping[str, SliceCommit]) -> None:
        """Settle the batch of an earlier run, then send the slices; `before` holds their commits."""
        work = self.work
        publishes = work.stream.publishes
        assert publishes is not None, "only streams that publish have the asset"
        name = f"highwater.pub.{publishes.topic}"
        # Two threads read the next batch while Kafka is waited for; the third writes the batch that goes out.
        with ThreadPoolExecutor(3, "publication") as beside:
            likely = self._build_batches([slice_ for slice_ in work.slices if not self.is_settled(slice_.key, before)])[
                0
            ]
            likely.read_ahead(beside)
            target = ensure_accepted(work.kafka, work.stream)
            with Transactions(work.kafka, name, publishes.topic, most_bytes=target.max_message_bytes) as transactions:
                self.book = book = publication_log_writer.PublicationLog(work, _fetch_topic_id(work, publishes.topic))
                last = self._settle(book, transactions.mark())
                ordered, waits = self._sort_slices(book)
                found = [likely if one.slices == likely.slices else one for one in self._build_batches(ordered)]
                for number, (one, following) in enumerate(zip_longest(found, found[1:]), last + 1):
                    batch = PublicationBatch(work, book, one)
                    with pause_garbage_collection():
                        self._begin(batch, number)
                        if following is not None:
                            following.read_ahead(beside)
                        self._send(batch, transactions, target, beside)
                book.commit_settled()
        if waits is not None:
            raise TemporaryError(
                f"{waits} is not published yet, and slices that were asked for come after it",
                remedy=f"the sensor publisher requests slices in their order; or materialise {waits} first",
            )

    def _build_batches(self, slices: Sequence[Slice]) -> list[EventRecords]:
        """The slices as they are published together."""
        work, slice_commits = self.work, self.decided.slice_commits
        decided = work.lake.open_existing_table(work.stream.name, events.TABLE, self.decided.version)
        rows = {slice_.key: slice_commits[slice_.key].rows or 0 for slice_ in slices}
        together = group_for_publication(slices, rows, ROWS_PER_BATCH, SLICES_PER_BATCH)
        return [EventRecords(work.stream, decided, some, slice_commits) for some in together]

    def _settle(self, book: publication_log_writer.PublicationLog, mark: PublicationMark | None) -> int:
        """Take over what was sent of the batch that a run before has written down; returns the last number given."""
        work, batch = self.work, book.sending.attempt
        stored_mark = work.ledger.publications.read_for_slices([book.sending.topic]).get(book.sending.topic)
        _ensure_same_table(work, book, mark, stored_mark)
        book.ensure_sending_table()
        known = [(one.attempt, one.sent) for one in (mark, stored_mark) if one is not None]
        if book.sending.slices:
            count = max((count for attempt, count in known if attempt == batch), default=0)
            keys = [*book.sending.slices]
            work.log(
                f"a batch was interrupted with {count:,} of {book.sending.total:,} records sent: {', '.join(keys)}"
            )
            book.settle(count, {slice_.key: slice_ for slice_ in work.ledger.get(keys)})
        return max([batch, *(attempt for attempt, _ in known)])

    def _sort_slices(self, book: publication_log_writer.PublicationLog) -> tuple[list[Slice], str | None]:
        work = self.work
        slice_commits = publication_log.select_complete(book.load_slice_commits(work.keys))
        unsettled = [slice_ for slice_ in work.slices if not self.is_settled(slice_.key, slice_commits)]
        following = work.ledger.list_slices(
            work.stream.name, work.stream.topic, after=book.load_last_published(), limit=len(unsettled) + 1
        )
        return select_in_order(unsettled, work.stream.topic, following, {*slice_commits})

    def _begin(self, batch: PublicationBatch, number: int) -> None:
        attempts = {slice_.key: self.decided.find_attempt(slice_.key) for slice_ in batch.slices}
        batch.book.begin(batch.build_publication_rows(), attempts, number)

    def _send(self, batch: PublicationBatch, transactions: Transactions, target: TopicShape, beside: Executor) -> None:
        """Send a batch. While the client sends a part, the next one is made; beside the last one it is settled."""
        book, slices, count = batch.book, {slice_.key: slice_ for slice_ in batch.slices}, 0
        sending, recorded = book.sending, None
        first, last = batch.slices[0].key, batch.slices[-1].key
        parts = (part for window in batch.select_outgoing() for part in split_transactions(window))
        ahead = PrefetchingIterator((part, OutgoingRecords(part, sending.topic, target.partitions)) for part in parts)

        def prepare() -> None:
            if count + len(part) < sending.total:
                ahead.prepare()
            else:  # it is committed after the part is
                book.settle(sending.total, slices)

        for part, made in ahead:
            mark = PublicationMark(sending.attempt, count + len(part), book.identity)
            if count:
                transactions.commit(made, mark, prepare)
            else:
                self._send_first(batch, partial(transactions.commit, made, mark), prepare, beside)
            count = mark.sent
            if recorded is not None:
                recorded.result()
            recorded = beside.submit(self._record_sent, sending.topic, sending.attempt, count)
            self.sent_now.update(part.count_by_slice())
            self.work.log(f"{count:,} of {sending.total:,} events sent of {first} .. {last}")
        if recorded is None:  # none of it goes out
            book.settle(0, slices)
        else:
            recorded.result()

    def _send_first(
        self,
        batch: PublicationBatch,
        commit: Callable[[Callable[[], object]], object],
        prepare: Callable[[], object],
        beside: Executor,
    ) -> None:
        """Commit the first part, once the batch is written and its slices are unchanged.

        The lock is waited for before the transaction begins: that one lasts for a minute at the most.
        """
        with retraction_guard.lease_sending(self.work) as lease:
            written = beside.submit(batch.book.write_down)

            def validate_and_prepare() -> None:
                written.result()
                self._ensure_unchanged(batch)
                lease.check()
                prepare()

            try:
                commit(validate_and_prepare)
            finally:
                wait([written])  # nothing is written once the lock is let go

    def _ensure_unchanged(self, batch: PublicationBatch) -> None:
        """Ensure that a batch belongs to the current decisions, once it is written: later decisions see the batch.

        Raises:
            SupersededAttemptError: a slice was reprocessed; nothing of the batch was sent, or will be.
        """
        table = self.work.lake.open_existing_table(self.work.stream.name, events.TABLE)
        if table.version() == self.decided.version:
            return  # nobody committed since; commits take longer to read, and decisions wait for the lock meanwhile
        slices = {slice_.key: slice_ for slice_ in batch.slices}
        now = read_slice_commits(table, [*slices])
        moved = [key for key in slices if key not in now or now[key].attempt != self.decided.find_attempt(key)]
        if moved:
            batch.book.settle(0, slices)
            batch.book.commit_settled()
            raise SupersededAttemptError(
                f"{', '.join(moved)}: reprocessed before the first record of the earlier decision was sent",
                stored=f"attempt {self.decided.find_attempt(moved[0])}",
                found=f"attempt {now[moved[0]].attempt}" if moved[0] in now else "no decision",
                remedy="nothing to do: the next run sends the current decision",
            )

    def _record_sent(self, topic: str, number: int, count: int) -> None:
        """Copy the mark at once: one that expires in Kafka while the rest waits must not be forgotten."""
        self.work.ledger.publications.record(
            self.work.stream.name, topic, PublicationRecord(number, count, datetime.now(UTC))
        )

    def build_reports(self, before: Mapping[str, SliceCommit]) -> list[SliceReport]:
        """A report for each slice, as the table is now; `before` holds the slice commits before the run."""
        slice_commits = (
            before
            if self.book is None
            else publication_log.select_complete(self.book.load_slice_commits(self.work.keys))
        )
        return [
            SliceReport(
                slice_=slice_,
                attempt=slice_commits[slice_.key].attempt,
                rows=slice_commits[slice_.key].rows or 0,
                delta_version=-1 if self.book is None else self.book.version,
                counts={**slice_commits[slice_.key].counts, "sent_now": self.sent_now[slice_.key]},
                seconds=dict(self.clock.seconds),
                note="already published" if self.is_settled(slice_.key, before) else None,
            )
            for slice_ in self.work.slices
        ]


def split_transactions(window: PublicationWindow) -> Iterator[PublicationWindow]:
    """Parts that fit a transaction; a row that is too large by itself is a part of its own."""
    for start, end in compute_batch_ranges(window.measure_sizes(), RECORDS_PER_TRANSACTION, BYTES_PER_TRANSACTION):
        yield window.select_range(start, end)


class OutgoingRecords(Iterable[Record]):
    """The records of a part in their order, each made when it is sent: to hold them would take as long as to send.

    Args:
        window: the part.
        topic: where it goes.
        partitions: the number of that topic's partitions.
    """

    def __init__(self, window: PublicationWindow, topic: str, partitions: int) -> None:
        self._topic = topic
        self._own = [_build_own_headers(one) for one in window.outcomes]
        self._runs = [_publish_run(run, partitions) for run in window.split_runs()]

    def __iter__(self) -> Iterator[Record]:
        """The records; headers are text in UTF-8."""
        for shared, partition, run in self._runs:
            for key, value, offset, ms, which in run.iterate_rows():
                origin = (envelope.ORIGIN_OFFSET, offset), (envelope.ORIGIN_TIMESTAMP, ms)
                headers = [*shared, *origin, *self._own[which]]
                # As `Record` makes one, without a call of Python's for each.
                yield tuple.__new__(Record, (self._topic, key, value, headers, partition, None))


def _publish_run(run: PublicationWindow, partitions: int) -> tuple[Sequence[KafkaHeader], int, PublicationWindow]:
    """The common values of records of a partition and a slice, made once for all of them, and these records."""
    slice_key, topic, generation, partition = (run.rows[name][0].as_py() for name in RUN)
    shared = _build_shared_headers(slice_key, topic, generation, partition)
    # As many partitions as the main topic has: only a foreign envelope may name one that there is not.
    return shared, partition % partitions, run


def _build_shared_headers(slice_key: str, topic: str, generation: int, partition: int) -> tuple[KafkaHeader, ...]:
    return (
        (envelope.ORIGIN_TOPIC, topic.encode()),
        (envelope.ORIGIN_GENERATION, b"%d" % generation),
        (envelope.ORIGIN_PARTITION, b"%d" % partition),
        (envelope.SLICE, slice_key.encode()),
    )


def _build_own_headers(outcome: PublicationOutcome | None) -> list[KafkaHeader]:
    """The lateness of a record; a record in order has no revision and is not retracted."""
    if outcome is None or outcome.late is None:
        return []
    found: list[KafkaHeader] = [(envelope.LATE, outcome.late.value.encode())]
    if outcome.revision:
        found.append((envelope.REVISION, b"%d" % outcome.revision))
    if outcome.state is EventState.RETRACTED:
        found.append((envelope.RETRACTED, b"true"))
    return found


def _ensure_same_table(
    work: Work,
    book: publication_log_writer.PublicationLog,
    mark: PublicationMark | None,
    stored_mark: PublicationRecord | None,
) -> None:
    """Ensure that the marks count what this table has written down.

    Raises:
        ConfigurationError: they know more, or another table.
    """
    batch, group = book.sending.attempt, f"highwater.pub.{book.sending.topic}"
    if mark is not None and mark.identity != book.identity:
        raise ConfigurationError(
            f"{book.sending.topic} has records of another table",
            stored=f"mark of table {mark.identity}",
            found=f"this table is {book.identity}",
            remedy="ensure that no other deployment publishes to it, and restore the table if it was lost; to send "
            f"everything again, kafka-consumer-groups --delete --group {group}",
        )
    latest = max((one.attempt for one in (mark, stored_mark) if one is not None), default=0)
    # A mark of this table without a batch: the table `_sending` is gone.
    if (batch or mark is not None) and latest > batch:
        raise ConfigurationError(
            f"the table {TABLE} of {work.stream.name} is older than what was sent",
            stored=f"batch {latest} was sent",
            found=f"the table ends with batch {batch}",
            remedy=f"restore the newest version of it and of {publication_log.SENDING}: an older one would send events "
            "again",
        )


def _fetch_topic_id(work: Work, topic: str) -> str:
    try:
        return str(work.kafka.read_description(topic).topic_id)
    except TopicAbsentError as error:
        raise work.kafka.build_unavailable_error(f"topic {topic} was just created and is not shown yet") from error
