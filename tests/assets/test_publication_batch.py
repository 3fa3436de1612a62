"""Batches of published events: settled once, wherever a run dies, and no event twice."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from highwater.assets import (
    event_records,
    publication_batch,
    publication_log,
    publication_log_writer,
    published,
)
from highwater.declaration import Accepted, Field
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    TopicAbsentError,
    TopicRecreatedError,
)
from highwater.plans import PublicationRecord
from highwater.resources.ledger import schema
from highwater.resources.topic_state import TopicState
from tests.helpers.accepted import (
    NOON,
    Broken,
    Event,
    FakeTransactionLog,
    Tables,
    build_orders,
    list_places,
    read_fields,
)
from tests.helpers.published_tables import read_published_rows

# Seconds of processor each.
pytestmark = pytest.mark.slow


POINTS = [f"{point} {number}" for number in range(1, 6) for point in ("before", "committed")]
RESTARTED, HELD = 0, 1 << 20


@pytest.mark.parametrize(
    ("point", "window", "held"),
    [
        *((point, 3, RESTARTED) for point in ("handed over 1", *POINTS, "written down", "settling")),
        ("committed 2", 100, HELD),
        ("committed 2", 3, HELD),
    ],
)
def test_wherever_a_run_breaks_off_each_event_goes_out_once_and_in_order(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch, point: str, window: int, held: int
) -> None:
    """Two slices of seven events in one batch, one a second delivery; read in windows, each once or again."""
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    monkeypatch.setattr(event_records, "WINDOW", window)
    monkeypatch.setattr(publication_batch, "HELD_BYTES", held)
    asked = count_reads(monkeypatch)
    slices = [tables.plan(0, p0=(0, 4), p1=(0, 3)), tables.plan(1, p0=(4, 9), p1=(3, 5))]
    tables.decide(slices[0], [*build_orders(0, 0, 4), *build_orders(1, 0, 3)])
    tables.decide(
        slices[1], [Event(0, 4, "o0-1", minute=1, changes={"n": 1}), *build_orders(0, 5, 9), *build_orders(1, 3, 5)]
    )
    if point in {"written down", "settling"}:
        break_once(
            monkeypatch, {"written down": "write_down", "settling": "settle"}[point], after=point == "written down"
        )
    else:
        log.breaks = point
    with pytest.raises(Broken):
        tables.publish(*slices)
    tables.publish(*slices)
    assert max(asked.values()) == (1 if held == HELD else 2)
    for partition, wanted in ((0, [0, 1, 2, 3, 5, 6, 7, 8]), (1, [0, 1, 2, 3, 4])):
        assert list_places([one for one in log.records if one.partition == partition]) == [
            (partition, n) for n in wanted
        ]
    assert not any("highwater.late" in one.headers for one in log.records)
    assert Counter(row["state"] for row in read_published_rows(tables)) == {"sent": 13, "second delivery": 1}
    assert {row["slice"] for row in read_published_rows(tables)} == {slice_.key for slice_ in slices}


@pytest.mark.parametrize(
    "point",
    [*(f"{point} {number}" for number in range(1, 5) for point in ("handed over", "before", "committed"))]
    + [f"{step} {number}" for number in range(1, 4) for step in ("settle", "write_down", "settled")],
)
def test_a_batch_is_settled_as_the_next_one_is_written_down(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Three slices, each a batch of its own; wherever a run breaks off, the next one finds what was sent."""
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    slices = [tables.plan(n, p0=(4 * n, 4 * n + 4)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, build_orders(0, 4 * n, 4 * n + 2 + n))
    step, _, number = point.rpartition(" ")
    if step in {"settle", "write_down"}:
        break_once(monkeypatch, step, after=True, at=int(number))
    elif step == "settled":  # the commit of `published` is done, and `_sending` still has the batch
        break_once(monkeypatch, "replace_slices", after=True, at=int(number), owner=publication_log_writer)
    else:
        log.breaks = point
    with pytest.raises(Broken):
        tables.publish(*slices)
    tables.publish(*slices)
    assert list_places(log.records) == [(0, at) for at in (0, 1, 4, 5, 6, 8, 9, 10, 11)]
    assert not any("highwater.late" in one.headers for one in log.records)
    assert Counter(row["slice"] for row in read_published_rows(tables)) == {
        slice_.key: 2 + n for n, slice_ in enumerate(slices)
    }
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()


def test_each_batch_is_written_down_once_and_settled_by_one_commit(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, build_orders(0, n, n + 1))
    tables.publish(*slices)
    assert list_places(log.records) == [(0, n) for n in range(3)]
    versions = {
        name: tables.lake.open_existing_table("orders", name).version()
        for name in (publication_log.TABLE, publication_log.SENDING)
    }
    assert versions == dict.fromkeys(versions, len(slices))
    settled = tables.lake.load_slice_commits("orders", publication_log.TABLE, [slice_.key for slice_ in slices])
    assert [settled[slice_.key].extra[publication_log.BATCH] for slice_ in slices] == [1, 2, 3]


def test_events_of_the_previous_batch_are_not_sent_again(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is settled before it is looked for second deliveries of it."""
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2)]
    tables.decide(slices[0], build_orders(0, 0, 2))
    tables.decide(slices[1], [Event(0, 2, "o0-1", minute=1, changes={"n": 1}), *build_orders(0, 3, 4)])
    tables.publish(*slices)
    assert list_places(log.records) == [(0, n) for n in (0, 1, 3)]
    assert Counter(row["state"] for row in read_published_rows(tables)) == {"sent": 3, "second delivery": 1}


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """How often each batch reads each of its windows."""
    found: Counter[tuple[int, str]] = Counter()
    stored: list[event_records.EventRecords] = []
    read = event_records.EventRecords._read

    def counting(self: event_records.EventRecords, where: str) -> Any:
        stored.append(self)  # or another one could have its id
        found[id(self), where] += 1
        return read(self, where)

    monkeypatch.setattr(event_records.EventRecords, "_read", counting)
    return found


def break_once(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    after: bool,
    at: int = 1,
    owner: Any = publication_log_writer.PublicationLog,
) -> None:
    step, calls = getattr(owner, name), itertools.count(1)

    def breaking(*given: Any, **named: Any) -> Any:
        if next(calls) < at:
            return step(*given, **named)
        monkeypatch.setattr(owner, name, step)
        if after:
            step(*given, **named)
        raise Broken(name)

    monkeypatch.setattr(owner, name, breaking)


def test_slices_reprocessed_after_a_failed_run_send_their_current_events(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six events were sent; then a rule was fixed, and accepts two more, one of them before the third."""
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    slice_ = tables.plan(0, p0=(0, 8))
    tables.decide(slice_, [*build_orders(0, 0, 1), *build_orders(0, 2, 7)])
    log.breaks = "committed 1"
    with pytest.raises(Broken):
        tables.publish(slice_)
    tables.decide(slice_, [*build_orders(0, 0, 3), *build_orders(0, 3, 5, status="canceled"), *build_orders(0, 5, 8)])
    tables.publish(slice_)
    found = [
        (one.place[1], one.headers.get("highwater.late"), one.headers.get("highwater.revision")) for one in log.records
    ]
    assert found == [
        *[(n, None, None) for n in (0, 2, 3)],
        (1, "corrected", None),
        (3, "corrected", "1"),
        *[(n, None, None) for n in (4, 5, 6, 7)],
    ]


def test_a_mark_that_expired_is_known_from_the_ledger_and_one_that_was_lost_there_from_kafka(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 2)
    slice_ = tables.plan(0, p0=(0, 6))
    tables.decide(slice_, build_orders(0, 0, 6))
    log.breaks = "before 2"
    with pytest.raises(Broken):
        tables.publish(slice_)
    log.marks.clear()
    log.breaks, log.commits = "committed 2", 0
    with pytest.raises(Broken):
        tables.publish(slice_)
    with tables.ledger.database.writing() as connection:
        connection.execute(schema.publications.delete())
    tables.publish(slice_)
    assert list_places(log.records) == [(0, n) for n in range(6)]


def test_a_restored_table_sends_nothing_again(tables: Tables, log: FakeTransactionLog) -> None:
    """The number of the last batch is in another table, which a RESTORE leaves as it is."""
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(4)]
    versions = []
    for n, slice_ in enumerate(slices[:3]):
        tables.decide(slice_, build_orders(0, 2 * n, 2 * n + 2))
        tables.publish(slice_)
        versions.append(tables.lake.open_existing_table("orders", "published").version())
    tables.decide(slices[3], build_orders(0, 6, 8))
    tables.lake.open_existing_table("orders", "published").restore(versions[0])
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(slices[3])
    assert list_places(log.records) == [(0, n) for n in range(6)]
    tables.lake.open_existing_table("orders", "published").restore(versions[1])
    tables.publish(slices[3])  # what the last batch sent is in `_sending`, and is settled from there
    assert list_places(log.records) == [(0, n) for n in range(8)]
    keys = [slice_.key for slice_ in slices]
    assert sorted(publication_log.read_published_commits(tables.lake, tables.stream, keys)) == sorted(keys)


def test_without_the_table_of_the_batch_only_what_is_settled_counts_as_sent(
    tables: Tables, log: FakeTransactionLog
) -> None:
    """A missing table was taken for no batch: records of one that had broken off went out twice."""
    first, second = (tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2))
    tables.decide(first, build_orders(0, 0, 2))
    tables.publish(first)
    [(name, mark)] = log.marks.items()
    tables.decide(second, build_orders(0, 2, 4))
    shutil.rmtree(tables.lake.build_table_path("orders", publication_log.SENDING))
    with pytest.raises(DependencyUnavailableError, match="the records being sent are unknown"):
        publication_log.list_sending_slices(tables.lake, tables.stream)
    log.marks[name] = replace(mark, attempt=mark.attempt + 1, sent=1)
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(second)
    log.marks[name] = mark
    tables.publish(second)
    assert list_places(log.records) == [(0, n) for n in range(4)]
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()


def test_another_table_an_older_one_and_another_topic_stop_the_run(tables: Tables, log: FakeTransactionLog) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, build_orders(0, 0, 2, status="paid"))
    [(name, mark)] = log.marks.items()
    assert name == "highwater.pub.orders.accepted"
    log.marks[name] = replace(mark, identity="another")
    with pytest.raises(ConfigurationError, match="has records of another table"):
        tables.publish(slice_)
    log.marks[name] = mark
    tables.ledger.publications.record("orders", "orders.accepted", PublicationRecord(9, 1, NOON))
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(slice_)
    tables.stream = replace(tables.stream, publishes=Accepted("elsewhere"))
    with pytest.raises(ConfigurationError, match="to another topic before"):
        tables.publish(slice_)
    assert len(log.records) == 2


def test_a_field_that_was_just_declared_is_null_in_what_was_accepted_before(
    tables: Tables, log: FakeTransactionLog
) -> None:
    slice_ = tables.plan(0, p0=(0, 1))
    tables.decide(slice_, build_orders(0, 0, 1))
    fields = (
        *tables.stream.fields,
        Field("note", "string"),
        Field("paid_at", "timestamp"),
        Field("tax", "decimal(9,8)"),
    )
    tables.stream = replace(tables.stream, fields=fields)
    tables.publish(slice_)
    assert [read_fields(log.records[0])[name] for name in ("order_id", "note", "paid_at", "tax")] == [
        "o0-0",
        None,
        None,
        None,
    ]


def test_a_topic_that_was_recreated_stops_the_run(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, build_orders(0, 0, 2, status="paid"))
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "U" * 22)
    again = TopicState("", "U" * 22, {})
    monkeypatch.setattr(tables.kafka, "look_again", lambda topic: replace(again, topic=topic))
    with pytest.raises(TopicRecreatedError, match="topic ID U"):
        tables.publish(slice_)


@pytest.mark.parametrize("second", ["T" * 22, "V" * 22, None])
def test_one_look_does_not_show_that_the_topic_was_recreated(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, second: str | None
) -> None:
    """The remedy is to delete the table of what was sent, and to send everything again."""
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, build_orders(0, 0, 2, status="paid"))
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "U" * 22)

    def look_again(topic: str) -> TopicState:
        if second is None:
            raise TopicAbsentError(f"topic {topic} does not exist", remedy="create it")
        return TopicState(topic, second, {})

    monkeypatch.setattr(tables.kafka, "look_again", look_again)
    with pytest.raises(DependencyUnavailableError, match="two looks"):
        tables.publish(slice_)
