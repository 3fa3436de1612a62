"""A stream that is restarted knows what was sent from the topic itself: none of it goes out a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.assets import accepted_copies, publication_log, publication_log_writer, published
from highwater.assets.accepted_copies import read
from highwater.declaration import Accepted
from highwater.envelope import Origin
from highwater.errors import ConfigurationError, RetractionError
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.orchestration.operations import reading_accepted
from highwater.orchestration.operations.reading_accepted import AcceptedFacts, store_accepted
from highwater.orchestration.operations.rebuilding_all import ensure_stream_is_new
from highwater.publishing import EventState, Lateness, PublicationOutcome, RecordedOutcome, decide_publication
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import AcceptedSlice
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.resources.transactions import PublicationMark
from highwater.slices import OffsetRange, Slice
from tests.helpers.accepted import (
    NOON,
    TARGET,
    Broken,
    Event,
    FakeTransactionLog,
    Sent,
    Tables,
    build_orders,
    list_places,
)
from tests.helpers.support import Bench, Message, order_message, read_rows

HEADERS = {
    "highwater.origin.topic": b"orders",
    "highwater.origin.generation": b"1",
    "highwater.origin.partition": b"2",
    "highwater.origin.offset": b"3",
    "highwater.origin.timestamp": b"77",
    "highwater.slice": b"orders@0000004",
}
SENT_MS = round(NOON.timestamp() * 1000)


def headers(**changes: bytes | None) -> list[tuple[str, bytes | None]]:
    return [*HEADERS.items(), *((f"highwater.{name.replace('_', '.')}", value) for name, value in changes.items())]


def test_headers_of_an_accepted_record_are_parsed() -> None:
    plain = read(headers(), b"{}")
    assert (plain.origin, plain.ms, plain.slice_key) == (Origin("orders", 1, 2, 3), 77, "orders@0000004")
    assert (plain.revision, plain.late) == (0, None)
    assert plain.fingerprint == "44136fa355b3678a1146ad16f7e8649e", "the first half of `printf {} | sha256sum`"
    reclaimed = read(headers(late=b"corrected", revision=b"2", retracted=b"true"), None)
    assert (reclaimed.revision, reclaimed.late, reclaimed.fingerprint) == (2, Lateness.CORRECTED, None)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"origin_offset": b"x"}, b"{}"),
        ({"origin_offset": b"-1"}, b"{}"),
        ({"origin_partition": None}, b"{}"),
        ({"origin_topic": b""}, b"{}"),
        ({"origin_topic": b"\xff"}, b"{}"),
        ({"late": b"soon"}, b"{}"),
        ({}, None),
        ({"retracted": b"true"}, b"{}"),
    ],
)
def test_a_record_of_somebody_else_is_none(changes: Mapping[str, bytes | None], value: bytes | None) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(headers(**changes), value)


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (
            RecordedOutcome(EventState.SENT, 1, "a", "", NOON, Lateness.RETRIED),
            PublicationOutcome(EventState.SENT, 1, Lateness.RETRIED, NOON),
        ),
        (
            RecordedOutcome(EventState.SENT, 1, "b", "", NOON),
            PublicationOutcome(EventState.SENT, 2, Lateness.CORRECTED),
        ),
        (
            RecordedOutcome(EventState.RETRACTED, 2, None, "", NOON),
            PublicationOutcome(EventState.SENT, 3, Lateness.CORRECTED),
        ),
    ],
    ids=["as it is there", "changed", "retracted"],
)
def test_sent_events_are_preserved_or_revised(known: RecordedOutcome, found: PublicationOutcome) -> None:
    outcome = decide_publication("orders@0000007", "a", known, again=False, late=None)
    assert outcome == found
    assert outcome is not None
    assert outcome.goes_out == (found.at is None)


def copy(offset: int, late: Lateness | None = None, generation: int = 0) -> accepted_copies.AcceptedCopy:
    return accepted_copies.AcceptedCopy(Origin("orders", generation, 0, offset), 0, "orders@0000000", 0, late, "f")


@pytest.mark.parametrize(
    ("start", "copies", "number", "unknown"),
    [
        (0, [], 0, {}),
        (9, [copy(7), copy(3, Lateness.RETRIED)], 0, {0: OffsetRange(5, 7)}),
        (9, [copy(4)], 0, {}),
        (9, [], 0, {0: OffsetRange(5, 20)}),
        (9, [copy(7)], 1, {}),
        (9, [copy(7, generation=1), copy(2)], 1, {0: OffsetRange(5, 7)}),
    ],
    ids=["all is there", "begins later", "begins before", "nothing is there", "other records", "two generations"],
)
def test_events_that_the_topic_no_longer_holds_may_be_sent_again(
    start: int, copies: list[accepted_copies.AcceptedCopy], number: int, unknown: Mapping[int, OffsetRange]
) -> None:
    seen = AcceptedFacts({0: OffsetRange(start, start + 5)})
    for one in copies:
        seen.add(one, 0, 100, "orders")
    assert seen.select_unknown_ranges(number, {0: OffsetRange(5, 20)}) == unknown
    for ms in (99, 100):
        seen.ensure_on_tier("orders.dlq.1", 0, ms)
    assert seen.older["orders.dlq.1"] == (0 if not start else 1 if copies else 2)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeTransactionLog:
    """A test double for Kafka: a topic of two partitions."""
    log = FakeTransactionLog()
    for module in (published, reading_accepted):
        monkeypatch.setattr(module, "Transactions", log)
    shape = TopicShape(2, 1, {"max.message.bytes": "1000000"})
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: shape)
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    monkeypatch.setattr(reading_accepted, "fetch_topic_settings", lambda *_: None)
    monkeypatch.setattr(reading_accepted, "ROWS_PER_BATCH", 2)
    return log


@pytest.fixture
def tables(tmp_path: Path, log: FakeTransactionLog) -> Tables:
    del log
    return Tables(tmp_path / "first")


class FakeAcceptedTopic:
    """The records of the topic of accepted events, and the end of the main topic."""

    def __init__(self, log: FakeTransactionLog, end: int) -> None:
        self._log, self._end = log, end

    def read_topic_state(self, topic: str) -> TopicState:
        ends = [len(self._of(p)) if topic == TARGET else self._end for p in range(2)]
        return TopicState(topic, "T" * 22, {p: PartitionState(0, end, end, 1) for p, end in enumerate(ends)})

    def _of(self, partition: int) -> list[Sent]:
        return [one for one in self._log.records if one.partition == partition]

    def read(self, topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[Any]:
        for partition, offsets in ranges.items():
            for at, one in [*enumerate(self._of(partition))][offsets.start : offsets.end]:
                reported = [(name, text.encode()) for name, text in one.headers.items()]
                yield SimpleNamespace(
                    **{name: (lambda it=it: it) for name, it in (("headers", reported), ("value", one.value))},
                    timestamp=lambda: (1, SENT_MS),
                    partition=lambda partition=partition: partition,
                    offset=lambda at=at: at,
                )


Restarted = Callable[[], Tables]


@pytest.fixture
def restarted(tmp_path: Path, log: FakeTransactionLog) -> Restarted:
    """Begin the stream again, with tables and a ledger that know of nothing."""

    def begin() -> Tables:
        found = Tables(tmp_path / "again")
        topics: Any = FakeAcceptedTopic(log, 10)
        seen = store_accepted(
            found.ledger, found.lake, topics, found.stream, lambda _: None, dry_run=False, resend=False
        )
        assert seen.count == len(log.records)
        return found

    return begin


def check_whole(tables: Tables, *slices: Slice) -> None:
    """Every check of what was sent passes."""
    found = check_events_published(tables.ledger, tables.lake, tables.stream, [slice_.key for slice_ in slices])
    assert [result.text for results in found.values() for result in results.values() if not result.passed] == []


def reported(records: list[Sent]) -> list[tuple[int, str | None, str | None]]:
    return [(one.place[1], one.headers.get("highwater.late"), one.headers.get("highwater.revision")) for one in records]


@pytest.mark.slow
def test_new_slices_preserve_sent_events_and_send_the_others(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    """Other slices, and among their events one that had been rejected, one that changed, and new ones."""
    first = tables.plan(0, p0=(0, 3), p1=(0, 2)), tables.plan(1, p0=(3, 5))
    tables.decide(
        first[0],
        [*build_orders(0, 0, 1), *build_orders(0, 2, 3), *build_orders(1, 0, 2)],
        rejected=build_orders(0, 1, 2),
    )
    tables.decide(first[1], build_orders(0, 3, 5))
    tables.publish(*first)
    assert len(log.records) == 6

    again = restarted()
    one, two = again.plan(7, p0=(0, 4), p1=(0, 1)), again.plan(8, p0=(4, 6), p1=(1, 2))
    again.decide(one, [*build_orders(0, 0, 3), *build_orders(0, 3, 4, status="paid"), *build_orders(1, 0, 1)])
    again.decide(two, [*build_orders(0, 4, 6), *build_orders(1, 1, 2)])
    reports = again.publish(one, two)
    assert reported(log.records[6:]) == [(1, "corrected", None), (3, "corrected", "1"), (5, None, None)]
    assert {key: (it.counts["sent"], it.counts["sent_now"]) for key, it in reports.items()} == {
        one.key: (5, 2), two.key: (3, 1)
    }  # fmt: skip
    check_whole(again, one, two)
    remaining = {
        row["origin_offset"]: row["published_at"]
        for row in read_rows(again.lake.build_table_path("orders", "published"))
    }
    assert remaining[4] == datetime.fromtimestamp(SENT_MS / 1000, UTC), "it keeps the time at which it was sent"
    assert remaining[5] > remaining[4]
    again.decide(
        one, [*build_orders(0, 0, 1, status="paid"), *build_orders(0, 1, 3), *build_orders(0, 3, 4, status="paid")]
    )
    again.decide(one, [*build_orders(0, 0, 1, status="paid"), *build_orders(0, 1, 4), *build_orders(1, 0, 1)])
    again.publish(one)
    assert reported(log.records[9:]) == [(0, "corrected", "1"), (3, "corrected", "2")]


@pytest.mark.slow
def test_a_revision_a_retraction_and_a_late_one_are_known_as_they_are_there(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    tier = tables.stream.tier_topics[0]
    slice_, retried = tables.plan(0, p0=(0, 4)), tables.plan(0, tier, minute=120, p0=(0, 1))
    tables.decide(slice_, build_orders(0, 0, 3), rejected=build_orders(0, 3, 4))
    tables.decide(retried, build_orders(0, 3, 4))
    tables.publish(slice_, retried)
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "test data", "ann", datetime.now(UTC))])
    changed = [*build_orders(0, 0, 1), *build_orders(0, 1, 2, status="paid")]
    tables.decide(slice_, changed, rejected=build_orders(0, 2, 4))
    tables.publish(slice_)
    assert reported(log.records[3:]) == [(3, "retried", None), (1, "corrected", "1"), (2, "corrected", "1")]

    again = restarted()
    slice_, retried = again.plan(7, p0=(0, 4)), again.plan(7, tier, minute=120, p0=(0, 1))
    left = [replace(one, left_at=NOON) for one in build_orders(0, 3, 4)]
    again.decide(slice_, changed, rejected=[*build_orders(0, 2, 3), *left])
    again.decide(retried, build_orders(0, 3, 4))
    reports = again.publish(slice_, retried)
    assert len(log.records) == 6
    assert [it.counts["revisions"] + it.counts["late"] for it in reports.values()] == [2, 1]
    check_whole(again, slice_, retried)
    again.decide(slice_, [*changed, *build_orders(0, 2, 3)], rejected=left)
    again.publish(slice_)
    assert reported(log.records[6:]) == [(2, "corrected", "2")], "behind the retraction"


def publish_and_restart(tables: Tables, restarted: Restarted) -> tuple[Tables, Slice]:
    """Send three events, and begin again with a slice of the same records."""
    first = tables.plan(0, p0=(0, 3))
    tables.decide(first, build_orders(0, 0, 3))
    tables.publish(first)
    again = restarted()
    return again, again.plan(7, p0=(0, 3))


@pytest.mark.slow
def test_rejecting_a_sent_event_needs_a_persons_permission(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    again, slice_ = publish_and_restart(tables, restarted)
    again.decide(slice_, build_orders(0, 0, 2), rejected=build_orders(0, 2, 3))
    with pytest.raises(RetractionError, match="partition 0 offset 2"):
        again.publish(slice_)
    assert len(log.records) == 3
    again.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "test data", "ann", datetime.now(UTC))])
    again.publish(slice_)
    assert [(one.place[1], one.value is None, one.headers["highwater.revision"]) for one in log.records[3:]] == [
        (2, True, "1")
    ]
    again.decide(slice_, build_orders(0, 0, 2), rejected=build_orders(0, 2, 3))
    again.publish(slice_)
    assert len(log.records) == 4
    check_whole(again, slice_)


@pytest.mark.long
@pytest.mark.slow
def test_a_decision_rejects_nothing_that_had_been_sent(bench: Bench) -> None:
    """It is seen before the decision is committed: its reject would be on its way to a tier."""
    topic = bench.stream.topic
    bench.stream = replace(bench.stream, publishes=Accepted(f"{topic}.accepted"))
    bench.send(order_message("o1", 1), Message(b"o2", b"garbled", 0), Message(b"o3", b"garbled", 0))

    def row(offset: int, revision: int, fingerprint: str | None) -> dict[str, Any]:
        origin = Origin(topic, 0, 0, offset)
        return accepted_copies.AcceptedCopy(origin, 0, f"{topic}@0000000", revision, None, fingerprint).build_row(
            SENT_MS
        )

    rows = [row(1, 0, "f"), row(2, 0, "f"), row(2, 1, None)]
    accepted_copies.write(bench.lake, "orders", [rows], {topic: {0: 3}})
    slice_ = bench.plan(7, p0=(0, 3))
    with pytest.raises(RetractionError, match=f"1 events of {slice_.key} were sent") as caught:
        bench.materialise(slice_)
    assert "partition 0 offset 1" in str(caught.value.stored)
    assert bench.rows("events") == []
    bench.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "test data", "ann", datetime.now(UTC))])
    bench.materialise(slice_)
    assert [row["origin_offset"] for row in bench.rows("rejects")] == [1, 2]


@pytest.mark.slow
def test_a_second_delivery_of_what_had_been_sent_is_left_out(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    """The copy is in an earlier slice now, and is published before the event that had been sent."""
    first, second = tables.plan(0, p0=(0, 1)), tables.plan(1, p1=(0, 1))
    tables.decide(first, [Event(0, 0, "o1")])
    tables.decide(second, [Event(1, 0, "o1", minute=1)])
    tables.publish(first, second)
    assert list_places(log.records) == [(0, 0)]
    again = restarted()
    copies, event = again.plan(7, p1=(0, 1)), again.plan(8, p0=(0, 1))
    again.decide(copies, [Event(1, 0, "o1", minute=1)])
    again.decide(event, [Event(0, 0, "o1")])
    again.publish(copies)
    again.publish(event)
    assert list_places(log.records) == [(0, 0)]
    check_whole(again, copies, event)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["handed over 1", "before 2", "committed 2"])
def test_a_batch_that_breaks_off_among_what_had_been_sent(
    point: str, tables: Tables, log: FakeTransactionLog, restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 1)
    first = tables.plan(0, p0=(0, 6))
    tables.decide(first, [one for one in build_orders(0, 0, 6) if one.offset % 2])
    tables.publish(first)
    again = restarted()
    assert log.marks[f"highwater.pub.{TARGET}"].sent == 0, "it counts for the new table from here on"
    slice_, last = again.plan(7, p0=(0, 6)), again.plan(8, p0=(6, 8))
    again.decide(slice_, build_orders(0, 0, 6))
    again.decide(last, build_orders(0, 6, 8))
    word, number = point.rsplit(" ", 1)
    log.breaks = f"{word} {log.commits + int(number)}"
    with pytest.raises(Broken):
        again.publish(slice_, last)
    again.publish(slice_, last)
    assert sorted(list_places(log.records)) == [(0, n) for n in range(8)]
    assert list_places(log.records)[-2:] == [(0, 6), (0, 7)]
    check_whole(again, slice_, last)


@pytest.mark.slow
def test_the_mark_of_the_lost_table_is_handed_to_the_new_one(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    """Without that, no run would go on; and a number of a batch is never given twice."""
    name = f"highwater.pub.{TARGET}"
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, build_orders(0, n, n + 1))
        tables.publish(slice_)
    was = log.marks[name]
    assert was.attempt == 3
    again = restarted()
    book = publication_log_writer.PublicationLog(again.work(), "T" * 22)
    assert log.marks[name] == PublicationMark(3, 0, book.identity)
    assert log.marks[name].identity != was.identity
    assert (book.sending.attempt, book.load_last_published()) == (3, None)
    assert publication_log.list_sending_slices(again.lake, again.stream) == set()
    once_more = restarted()  # a command that died is begun again
    assert log.marks[name] == PublicationMark(
        3, 0, publication_log_writer.PublicationLog(once_more.work(), "T" * 22).identity
    )


@pytest.mark.slow
def test_erased_origins_are_deleted_from_the_copies(
    tables: Tables, log: FakeTransactionLog, restarted: Restarted
) -> None:
    again, slice_ = publish_and_restart(tables, restarted)
    again.decide(slice_, build_orders(0, 0, 3))
    again.publish(slice_)
    publication_log_writer.delete_origins(again.work(), {slice_.key: {Origin("orders", 0, 0, 1)}})
    assert len(log.records) == 3
    rows = read_rows(again.lake.build_table_path("orders", accepted_copies.TABLE), "true")
    assert sorted(row["origin_offset"] for row in rows) == [0, 2]


@pytest.mark.slow
def test_a_table_published_that_was_not_lost_is_not_begun_over(
    tables: Tables, log: FakeTransactionLog, tmp_path: Path
) -> None:
    del log
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    rmtree(tables.lake.build_table_path("orders", "events"))
    rmtree(tables.lake.build_table_path("orders", "rejects"))
    with pytest.raises(ConfigurationError, match="the lake holds slices of orders") as caught:
        ensure_stream_is_new(Ledger(f"sqlite:///{tmp_path / 'empty.sqlite'}"), tables.lake, tables.stream)
    assert caught.value.stored == "1 in published"


def test_a_record_of_another_stream_stops_the_rebuild_and_names_it(tables: Tables, log: FakeTransactionLog) -> None:
    sound = {name: text.decode() for name, text in HEADERS.items()}
    topics: Any = FakeAcceptedTopic(log, 10)
    given = tables.ledger, tables.lake, topics, tables.stream, lambda _: None
    for wrong, found in (
        ({**sound, "highwater.origin.topic": "payments"}, "of another stream: payments"),
        ({"highwater.origin.topic": "orders"}, "invalid literal"),
    ):
        log.records = [Sent(1, b"k", b"{}", sound), Sent(1, b"k", b"{}", wrong)]
        with pytest.raises(ConfigurationError, match="holds a record that orders did not send") as caught:
            store_accepted(*given, dry_run=True, resend=False)
        assert caught.value.stored == "partition 1, offset 1"
        assert found in str(caught.value.found)
    assert store_accepted(*given, dry_run=True, resend=True) == AcceptedFacts()


def test_a_compacted_topic_does_not_show_what_was_sent(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"cleanup.policy": SimpleNamespace(value="compact,delete")}
    monkeypatch.setattr(reading_accepted, "fetch_topic_settings", lambda *_: settings)
    topics: Any = FakeAcceptedTopic(log, 10)
    with pytest.raises(ConfigurationError, match="is compacted"):
        store_accepted(tables.ledger, tables.lake, topics, tables.stream, lambda _: None, dry_run=True, resend=False)


def test_all_again_leaves_nothing_of_a_rebuild_that_died(tables: Tables) -> None:
    path = tables.lake.build_table_path("orders", accepted_copies.TABLE)
    accepted_copies.write(tables.lake, "orders", [[copy(3).build_row(SENT_MS)]], {"orders": {0: 9}})
    unavailable: Any = None
    store_accepted(tables.ledger, tables.lake, unavailable, tables.stream, lambda _: None, dry_run=False, resend=True)
    assert read_rows(path, "true") == []
    before = accepted_copies.open_copies(tables.lake, tables.stream)
    assert before is not None
    assert not before.may_contain(tables.plan(0, p0=(0, 9)))
    assert accepted_copies.open_copies(tables.lake, replace(tables.stream, publishes=None)) is None
