"""Rejects are read ahead of their publication, and count only if the run that is fenced then wrote nothing since."""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from highwater.assets import dlq, rejects
from highwater.assets.dlq_sending import RejectToSend
from highwater.assets.work import do_nothing
from highwater.errors import DependencyUnavailableError, SupersededAttemptError, TemporaryError, UnbalancedError
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.numbered_commits import NumberedCommit
from highwater.resources.transactions import PublicationMark
from tests.helpers.accepted import Event, FakeTransactionLog, Tables
from tests.helpers.world import STREAM

if TYPE_CHECKING:
    from highwater.resources.producer_records import Record

PARKED = STREAM.parked_topic


class FakeFencedTransactions(FakeTransactionLog):
    """Transactions in memory: `meanwhile` is what the run did last that is fenced as they are opened."""

    most_bytes, compresses = 1_000_000, False

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile, self.topics = meanwhile, list[str]()

    def mark(self) -> PublicationMark | None:
        self.meanwhile()
        return super().mark()

    def commit(
        self, records: Iterable[Record], mark: PublicationMark, meanwhile: Callable[[], object] = do_nothing
    ) -> None:
        sent = [*records]
        super().commit(sent, mark, meanwhile)
        self.topics += [one.topic for one in sent]


L = TypeVar("L", bound=FakeFencedTransactions)


class FakeExecutor(Executor):
    """Does what is submitted before anything else goes on."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, action: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(action(*given, **named))
        except Exception as error:  # noqa: BLE001 - the caller that asks for the result has it
            done.set_exception(error)
        return done


@dataclass
class ReadBefore:
    """Rejects of a slice, which a run reads before it fences the run that did something meanwhile."""

    tables: Tables
    monkeypatch: pytest.MonkeyPatch
    number: int = 3
    sent: int = 0
    waiting: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slice_ = self.tables.plan(0)
        self.rejected = [Event(0, n, f"o{n}") for n in range(self.number)]
        self.tables.decide(self.slice_, [], self.rejected, known=False)
        self.decision = self.tables.lake.load_slice_commits("orders", "rejects", [self.slice_.key])[self.slice_.key]

    def rows(self, number: int, topic: str) -> list[dict[str, Any]]:
        attempt = self.decision.attempt
        made = [one.read_reject(self.tables.stream, self.slice_.key, attempt) for one in self.rejected[:number]]
        return [{**one, "next_topic": topic} for one in made]

    def published(self, meanwhile: Callable[[], object]) -> FakeFencedTransactions:
        return self.publish(FakeFencedTransactions(meanwhile))

    def publish(self, log: L) -> L:
        read = dlq._Waiting.__init__

        def counting(waiting: dlq._Waiting, *given: Any) -> None:
            self.waiting.append(waiting)
            read(waiting, *given)

        if self.sent:
            group = f"highwater.pub.{self.slice_.key}#{self.decision.attempt}"
            log.marks[group] = PublicationMark(self.decision.attempt, self.sent, self.slice_.identity)
        self.monkeypatch.setattr(dlq, "Transactions", log)
        self.monkeypatch.setattr(dlq, "ThreadPoolExecutor", FakeExecutor)
        self.monkeypatch.setattr(dlq._Waiting, "__init__", counting)
        stream = self.tables.stream
        shapes = {topic: TopicShape(2, 1, {"max.message.bytes": "100000"}) for topic in (*stream.tier_topics, PARKED)}
        dlq._publish(self.tables.work(self.slice_), self.slice_, self.decision, shapes)
        return log


@pytest.fixture
def early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReadBefore:
    return ReadBefore(Tables(tmp_path), monkeypatch)


@pytest.fixture
def frozen() -> Iterator[None]:
    """What there is already is not looked through: the objects of all tests that were imported are millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def count_live_rejects() -> int:
    """The rejects in this process since it was frozen."""
    gc.collect()
    return sum(isinstance(one, RejectToSend) for one in gc.get_objects())


class RecordingTransactions(FakeFencedTransactions):
    """Counts the rejects that are held while a transaction is made, and the records in each."""

    def __init__(self) -> None:
        super().__init__(do_nothing)
        self.held, self.sizes = list[int](), list[int]()

    def commit(
        self, records: Iterable[Record], mark: PublicationMark, meanwhile: Callable[[], object] = do_nothing
    ) -> None:
        before = len(self.records)
        super().commit(records, mark, meanwhile)
        self.sizes.append(len(self.records) - before)
        self.held.append(count_live_rejects())


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    ("bounds", "most", "read"),
    # Values alone bound what is read by bytes; they are a small part of these records.
    [({"RECORDS_PER_READ": 10, "RECORDS_PER_TRANSACTION": 5}, 5, 10), ({"BYTES_PER_TRANSACTION": 3 * 700}, 3, 20)],
    ids=["records", "bytes"],
)
def test_however_many_rejects_there_are_few_are_held_and_each_transaction_has_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, int], most: int, read: int
) -> None:
    many = ReadBefore(Tables(tmp_path), monkeypatch, number=32)
    for name, bound in bounds.items():
        monkeypatch.setattr(dlq, name, bound)
    log = RecordingTransactions()
    many.publish(log)
    assert [one.key for one in log.records] == [b"o%d" % n for n in range(32)]
    assert 1 < max(log.sizes) <= most
    # The batch that goes out, and the read from which the next one is made.
    assert 0 < max(log.held) <= most + read


def test_rejects_are_read_while_kafka_is_waited_for(early: ReadBefore) -> None:
    log = early.published(lambda: None)
    assert [one.key for one in log.records] == [b"o0", b"o1", b"o2"]
    assert log.topics == [PARKED] * 3
    assert len(early.waiting) == 1


def test_records_counted_by_the_mark_are_not_sent_again(early: ReadBefore) -> None:
    early.sent = 2
    assert [one.key for one in early.published(lambda: None).records] == [b"o2"]


def test_where_records_go_is_read_again_if_the_run_before_wrote_it(early: ReadBefore) -> None:
    slice_commit = early.decision
    tier = early.tables.stream.tier_topics[0]
    log = early.published(
        lambda: early.tables._write("rejects", rejects.COLUMNS, early.slice_, early.rows(3, tier), slice_commit)
    )
    assert log.topics == [tier] * 3


def test_records_published_by_the_previous_run_are_not_sent_again(early: ReadBefore) -> None:
    def end() -> None:
        early.tables._write("dlq", dlq.COLUMNS, early.slice_, early.rows(2, PARKED), early.decision)

    assert [one.key for one in early.published(end).records] == [b"o2"]


def test_a_slice_that_was_reprocessed_meanwhile_is_not_published(early: ReadBefore) -> None:
    def decide() -> None:
        early.tables.decide(early.slice_, [], early.rejected, known=False)

    with pytest.raises(SupersededAttemptError, match="reprocessed while"):
        early.published(decide)


def test_a_slice_that_rejects_hold_no_more_waits_for_them(early: ReadBefore) -> None:
    def restore() -> None:
        early.tables.lake.open_existing_table("orders", "rejects").restore(0)

    with pytest.raises(TemporaryError, match=f"orders/rejects does not hold {re.escape(early.slice_.key)}"):
        early.published(restore)


def test_rejects_of_which_rows_were_deleted_are_not_published(early: ReadBefore) -> None:
    log = FakeFencedTransactions(
        lambda: early.tables.lake.open_existing_table("orders", "rejects").delete("origin_offset = 1")
    )
    with pytest.raises(UnbalancedError, match="another number of rows than its commit recorded") as caught:
        early.publish(log)
    assert (caught.value.stored, caught.value.found, log.records) == (3, 2, [])


def test_rejects_that_are_gone_once_they_are_to_be_sent_are_an_error(early: ReadBefore) -> None:
    path = early.tables.lake.build_table_path("orders", "rejects")
    with pytest.raises(DependencyUnavailableError, match="table rejects of orders is gone"):
        early.published(lambda: shutil.rmtree(path))


def test_an_error_of_reading_ahead_is_forgotten_if_it_passes(
    early: ReadBefore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(early.tables.lake.build_table_path("orders", "rejects"))
    hidden = path.with_name("hidden")
    path.rename(hidden)
    assert len(early.published(lambda: hidden.rename(path)).records) == 3


@pytest.mark.parametrize("point", ["", "_publish", "_commit"])
def test_the_group_of_a_slice_is_deleted_once_the_table_records_its_publication(early: ReadBefore, point: str) -> None:
    """Each slice with rejects left a consumer group for good. Deleted earlier, a run that dies would publish twice."""
    done: list[str] = []

    def doing(name: str, answer: object) -> Callable[..., object]:
        def do(*given: object) -> object:
            done.append(f"{name} {given[-1]}" if name == "delete" else name)
            if name == point:
                raise TemporaryError("killed", remedy="wait")
            return answer

        return do

    answers: dict[str, object] = {"ensure_table": None, "ensure_dlq_topics": {}, "_publish": (3, 1)}
    for name, answer in {**answers, "_commit": NumberedCommit(1, {})}.items():
        early.monkeypatch.setattr(dlq, name, doing(name, answer))
    early.monkeypatch.setattr("highwater.assets.dlq_marks.delete_groups", doing("delete", {}))
    work, group = early.tables.work(early.slice_), f"highwater.pub.{early.slice_.key}#{early.decision.attempt}"
    if point:
        with pytest.raises(TemporaryError):
            dlq.materialise(work)
    else:
        dlq.materialise(work)
    steps = ["ensure_table", "ensure_dlq_topics", "_publish", "_commit", f"delete ['{group}']"]
    assert done == steps[: steps.index(point) + 1 if point else None]
