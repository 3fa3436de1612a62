"""Accepted events go out once, in the order of their origin; what is late, revised or reclaimed is marked."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from highwater.assets import (
    event_json,
    event_records,
    publication_batch,
    publication_log,
    publication_log_writer,
    published,
    retraction_guard,
)
from highwater.assets.erasing import list_origins
from highwater.assets.publication_window import RUN, PublicationWindow
from highwater.assets.publication_window import build_schema as window_schema
from highwater.assets.work import Work
from highwater.declaration import Accepted, Field
from highwater.envelope import Origin
from highwater.erasing import compute_digest
from highwater.errors import (
    ConfigurationError,
    DependencyAwayError,
    HighwaterError,
    LeaseHeldError,
    RetractionError,
    SupersededAttemptError,
    TemporaryError,
    TopicAbsentError,
    TopicRecreatedError,
)
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.plans import Publication
from highwater.publishing import EventState, PublicationOutcome
from highwater.resources.delta import query
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.ledger import schema
from highwater.resources.ledger.breakers import AcceptedSlice
from highwater.resources.topic_state import TopicState
from highwater.slices import Slice
from tests.helpers.accepted import NOON, Broken, Event, Log, Tables, orders, places, said

# Seconds of processor each.
pytestmark = pytest.mark.slow


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A test double for Kafka: a topic of two partitions."""
    log = Log()
    monkeypatch.setattr(published, "Transactions", log)
    shape = TopicShape(2, 1, {"max.message.bytes": "1000000"})
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: shape)
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    return log


@pytest.fixture
def tables(tmp_path: Path, log: Log) -> Tables:
    del log
    return Tables(tmp_path)


def test_events_that_are_written_part_by_part_keep_value_and_fingerprint(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part has a text that is escaped, which JSON is written for in another way."""
    monkeypatch.setattr(event_records, "PART", 2)
    slice_ = tables.plan(0, p0=(0, 7))
    some = [*orders(0, 0, 3), *orders(0, 3, 4, customer_id='a "name"'), *orders(0, 4, 7)]
    tables.decide(slice_, some)
    tables.publish(slice_)
    assert [said(one)["customer_id"] for one in log.records] == [one.fields["customer_id"] for one in some]
    table = tables.lake.open_existing_table("orders", published.TABLE)
    stored = query(table, "SELECT origin_offset, fingerprint FROM t ORDER BY origin_offset")
    assert [row["fingerprint"] for row in stored] == [
        event_json.compute_fingerprint(one.value or b"") for one in log.records
    ]
    assert len(stored) == 7


def test_events_go_out_in_the_order_of_their_offsets_partition_by_partition(tables: Tables, log: Log) -> None:
    """Slices finish out of order, and their rows lie in the tables in any order."""
    slices = [tables.plan(n, p0=(3 * n, 3 * n + 3), p1=(2 * n, 2 * n + 2)) for n in range(3)]
    for n in (2, 0, 1):
        rows = [*orders(0, 3 * n, 3 * n + 3), *orders(1, 2 * n, 2 * n + 2)]
        tables.decide(slices[n], reversed(rows))
    reports = tables.publish(*reversed(slices))
    for partition, count in ((0, 9), (1, 6)):
        mine = [one for one in log.records if one.partition == partition]
        assert places(mine) == [(partition, offset) for offset in range(count)]
    assert not any("highwater.late" in one.headers or "highwater.revision" in one.headers for one in log.records)
    assert reports[slices[0].key].counts["sent"] == reports[slices[0].key].counts["sent_now"] == 5
    again = tables.publish(*slices)
    assert len(log.records) == 15
    assert {report.note for report in again.values()} == {"already published"}


def test_a_record_is_the_event_with_its_origin(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    odd = 'a "b" \\ \n\u2028 é'
    tables.decide(
        slice_,
        [
            Event(
                0, 0, "o1", minute=1.5, changes={"amount": 1234567890.1, "event_time": "2026-03-01T10:00:00.25+01:00"}
            ),
            Event(0, 1, "o2", changes={"customer_id": odd}),
        ],
    )
    tables.publish(slice_)
    first, second = log.records
    assert (first.partition, first.key) == (0, b"o1")
    assert first.value == (
        b'{"order_id":"o1","version":1,"status":"placed","customer_id":"c1","amount":1234567890.10,'
        b'"event_time":"2026-03-01T09:00:00.250000Z"}'
    )
    assert first.headers == {
        "highwater.origin.topic": "orders",
        "highwater.origin.generation": "0",
        "highwater.origin.partition": "0",
        "highwater.origin.offset": "0",
        "highwater.origin.timestamp": str(round((NOON + timedelta(minutes=1.5)).timestamp() * 1000)),
        "highwater.slice": slice_.key,
    }
    assert said(second)["customer_id"] == odd
    assert said(second)["amount"] == Decimal("12.50")


def test_a_slice_waits_for_those_before_it(tables: Tables, log: Log) -> None:
    first, second = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 4))
    tables.decide(second, orders(0, 2, 4))
    with pytest.raises(TemporaryError, match=f"{first.key} is not published yet"):
        tables.publish(second)
    assert log.records == []
    tables.decide(first, orders(0, 0, 2))
    tables.publish(first)
    tables.publish(second)
    assert places(log.records) == [(0, n) for n in range(4)]


def test_a_slice_whose_rejects_are_not_published_is_not_done(tables: Tables) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, orders(0, 0, 1), rejected=orders(0, 1, 2), known=False)
    with pytest.raises(TemporaryError, match="do not follow"):
        tables.publish(slice_)


def test_what_comes_back_through_a_tier_follows_and_is_marked(tables: Tables, log: Log) -> None:
    tier = tables.stream.tier_topics[0]
    first, second = tables.plan(0, p0=(0, 3)), tables.plan(1, minute=90, p0=(3, 5))
    late = tables.plan(0, tier, minute=120, p0=(0, 1))
    tables.decide(first, orders(0, 0, 2), rejected=orders(0, 2, 3))
    tables.decide(late, orders(0, 2, 3))
    tables.publish(first)
    with pytest.raises(TemporaryError, match=second.key):
        tables.publish(late)
    tables.decide(second, orders(0, 3, 5))
    tables.publish(late, first, second)
    assert places(log.records) == [(0, 0), (0, 1), (0, 3), (0, 4), (0, 2)]
    assert [one.headers.get("highwater.late") for one in log.records] == [None] * 4 + ["retried"]
    assert log.records[-1].headers["highwater.slice"] == late.key


def test_second_deliveries_within_the_horizon_are_left_out(tables: Tables, log: Log) -> None:
    """The same content at another offset, in the same slice and in later ones; other content goes out."""
    tables.stream = replace(tables.stream, publishes=Accepted("orders.accepted", horizon=timedelta(minutes=10)))
    slices = [tables.plan(n, p0=(3 * n, 3 * n + 3)) for n in range(3)]
    tables.decide(slices[0], [Event(0, 0, "o1"), Event(0, 1, "o1", minute=1), Event(0, 2, "o2", minute=2)])
    # The second one of these is known from the first slice alone, which was published by another run.
    tables.decide(slices[1], [Event(0, 3, "o3", minute=3), Event(0, 4, "o1", minute=9), Event(0, 5, "o1", 2, 9)])
    # Beyond the horizon of the last copy; and a conflict.
    tables.decide(slices[2], [Event(0, 6, "o1", minute=20), Event(0, 7, "o2", minute=5, changes={"amount": 1})])
    tables.publish(slices[0])
    reports = tables.publish(*slices)
    assert places(log.records) == [(0, 0), (0, 2), (0, 3), (0, 5), (0, 6), (0, 7)]
    assert [reports[slice_.key].counts["second_deliveries"] for slice_ in slices] == [1, 1, 0]
    states = Counter(row["state"] for row in rows_of(tables))
    assert states == {"sent": 6, "second delivery": 2}


def rows_of(tables: Tables) -> list[dict[str, Any]]:
    from tests.helpers.support import read_rows

    return read_rows(tables.lake.build_table_path("orders", "published"))


def test_a_corrected_slice_sends_what_is_new_and_what_changed(tables: Tables, log: Log) -> None:
    first, second = tables.plan(0, p0=(0, 4)), tables.plan(1, p0=(4, 5))
    tables.decide(first, orders(0, 1, 4))
    tables.decide(second, orders(0, 4, 5))
    tables.publish(first, second)
    for changed in ("paid", "canceled"):
        rows = [*orders(0, 0, 3), *orders(0, 3, 4, status=changed)]
        tables.decide(first, rows)
        tables.publish(first)
    found = [
        (one.place, one.headers.get("highwater.late"), one.headers.get("highwater.revision")) for one in log.records
    ]
    assert found[4:] == [
        ((0, 0), "corrected", None),
        ((0, 3), "corrected", "1"),
        ((0, 3), "corrected", "2"),
    ]
    assert [said(one)["status"] for one in log.records[5:]] == ["paid", "canceled"]
    report = tables.publish(first)[first.key]
    assert len(log.records) == 7
    assert (report.counts["sent"], report.counts["late"], report.counts["revisions"]) == (4, 2, 2)


def test_what_was_sent_is_not_rejected_again_unless_a_person_lets_it(tables: Tables, log: Log) -> None:
    slice_, other = tables.plan(0, p0=(0, 3)), tables.plan(1, p0=(3, 4))
    tables.decide(slice_, orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 2), rejected=orders(0, 2, 3))
    tables.decide(other, orders(0, 3, 4))
    with pytest.raises(RetractionError, match="partition 0 offset 2") as caught:
        tables.publish(slice_)
    assert f"highwater accept-rejects {slice_.key}" in caught.value.remedy
    assert len(log.records) == 3
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "over the limit", "ann", NOON)])
    with pytest.raises(RetractionError, match="partition 0 offset 2"):
        tables.publish(slice_)  # that was said before they were sent, of the breaker
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "test data", "ann", datetime.now(UTC))])
    tables.publish(slice_, other)
    assert [(one.place, one.value is None) for one in log.records[3:]] == [((0, 3), False), ((0, 2), True)]
    taken = log.records[-1]
    assert taken.key == b"o0-2"
    assert (taken.headers["highwater.retracted"], taken.headers["highwater.revision"]) == ("true", "1")
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 3))
    tables.publish(slice_)
    assert len(log.records) == 6
    assert (log.records[-1].place, log.records[-1].headers["highwater.revision"]) == ((0, 2), "2")


def test_what_was_reclaimed_from_the_dlq_follows_the_revisions_of_the_tier_that_sent_it(
    tables: Tables, log: Log
) -> None:
    """The tier's slice sent it and retracted it; the slice of the main topic knew of neither, and sent no revision."""
    tier = tables.stream.tier_topics[0]
    main, retried = tables.plan(0, p0=(0, 2)), tables.plan(0, tier, minute=120, p0=(0, 1))
    tables.decide(main, orders(0, 0, 1), rejected=orders(0, 1, 2))
    tables.decide(retried, orders(0, 1, 2))
    tables.publish(main, retried)
    tables.ledger.breakers.accept("orders", [AcceptedSlice(retried.key, "test data", "ann", datetime.now(UTC))])
    tables.decide(retried, [], rejected=orders(0, 1, 2))
    tables.publish(retried)
    [back] = orders(0, 1, 2)
    for status in ("placed", "placed", "paid"):
        row = replace(back, reclaims=1, changes={**back.changes, "status": status})
        tables.decide(main, [*orders(0, 0, 1), row])
        tables.publish(main)
    found = [(one.place[1], one.headers.get("highwater.revision"), one.value is None) for one in log.records]
    assert found == [(0, None, False), (1, None, False), (1, "1", True), (1, "2", False), (1, "3", False)]


@pytest.mark.parametrize("changed", ["retracted", "revised"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_second_delivery_is_sent_where_the_content_that_was_sent_is_taken_away(
    tables: Tables, log: Log, changed: str, *, broken: bool
) -> None:
    """It stayed in events and current, and the topic held nothing of it. Of two that were left out one is sent."""
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(3)]
    same = [Event(0, 2 * n, "o1", minute=n) for n in range(3)]
    rest = [Event(0, 2 * n + 1, f"x{n}") for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, [same[n], rest[n]])
    tables.publish(*slices)
    assert places(log.records) == [(0, 0), (0, 1), (0, 3), (0, 5)]
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slices[0].key, "", "ann", datetime.now(UTC))])
    if changed == "retracted":
        tables.decide(slices[0], rest[:1], rejected=same[:1])
    else:
        tables.decide(slices[0], [replace(same[0], changes={"status": "paid"}), rest[0]])
    if broken:
        log.breaks = f"committed {log.commits + 1}"
        with pytest.raises(Broken):
            tables.publish(slices[0])
    tables.publish(slices[0])
    decided = {
        key: one.attempt for key, one in tables.lake.load_slice_commits("orders", "events", [*tables.slices]).items()
    }
    left = [
        key
        for key in decided
        if key not in publication_log.ensure_unchanged(tables.lake, tables.stream, [*decided], decided)
    ]
    assert sorted(left) == [slice_.key for slice_ in slices[1:]], "the sensor asks for them"
    check_published(tables, waiting=2)
    tables.publish(*slices)
    assert [(one.place, one.headers.get("highwater.late")) for one in log.records[4:]] == [
        ((0, 0), "corrected"),
        ((0, 2), "corrected"),
    ]
    tables.publish(*slices)
    check_published(tables, waiting=0)
    assert len(log.records) == 6
    assert Counter(row["state"] for row in rows_of(tables) if row["slice"] == slices[2].key) == {
        "sent": 1,
        "second delivery": 1,
    }


def check_published(tables: Tables, waiting: int) -> None:
    found = check_events_published(tables.ledger, tables.lake, tables.stream, [*tables.slices])["events_published"]
    assert all(one.passed for one in found.values()), found
    assert sum("its turn comes" in one.text for one in found.values()) == waiting


def test_a_second_delivery_that_is_no_event_any_more_is_forgotten(tables: Tables, log: Log) -> None:
    """Its row stayed, and the check was red for ever. Accepted again it is a second delivery again."""
    first, second = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 4))
    tables.decide(first, orders(0, 0, 2))
    again, other = Event(0, 2, "o0-1", minute=2, changes={"n": 1}), Event(0, 3, "x")
    tables.decide(second, [again, other])
    tables.publish(first, second)
    for events, rejected in (([other], [again]), ([again, other], [])):
        tables.decide(second, events, rejected)
        reports = tables.publish(second)
        assert reports[second.key].counts["second_deliveries"] == 1 - len(rejected)
        check_published(tables, waiting=0)
    assert places(log.records) == [(0, 0), (0, 1), (0, 3)]


def test_what_another_lost_from_events_is_never_reclaimed(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 2))
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "", "ann", datetime.now(UTC))])
    with pytest.raises(RetractionError, match="offset 2"):
        tables.publish(slice_)
    assert len(log.records) == 3


def test_what_was_erased_is_not_missed_among_the_events(tables: Tables, log: Log) -> None:
    """The slices' decisions lose it, as an erasure commits them; it was sent, and nothing follows."""
    tier = tables.stream.tier_topics[0]
    slice_, late = tables.plan(0, p0=(0, 3)), tables.plan(0, tier, minute=0, p0=(0, 2))
    tables.decide(slice_, orders(0, 0, 2), rejected=orders(0, 2, 3))
    tables.decide(late, [Event(0, 2, "o0-1", 2), Event(1, 7, "o1-7")])
    tables.publish(slice_, late)
    events = tables.lake.open_stream_table("orders", "events")
    assert events is not None
    gone = list_origins(events, compute_digest(b"o0-1"), [slice_.key, late.key])
    assert gone == {slice_.key: {Origin("orders", 0, 0, 1)}, late.key: {Origin("orders", 0, 0, 2)}}
    publication_log_writer.forget(tables.work(), gone)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()
    found = publication_log.read_published_commits(tables.lake, tables.stream, [*gone])
    assert {key: one.rows for key, one in found.items()} == {slice_.key: 1, late.key: 1}
    tables.decide(slice_, orders(0, 0, 1), rejected=orders(0, 2, 3))
    tables.decide(late, [Event(1, 7, "o1-7")])
    reports = tables.publish(slice_, late)
    assert [reports[key].counts["sent"] for key in (slice_.key, late.key)] == [1, 1]
    assert len(log.records) == 4
    assert sorted((row["origin_partition"], row["origin_offset"]) for row in rows_of(tables)) == [
        (0, 0), (1, 7)
    ]  # fmt: skip


def test_what_is_being_sent_is_not_erased_meanwhile(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, orders(0, 0, 3))
    log.breaks = "committed 1"
    with pytest.raises(Broken):
        tables.publish(slice_)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == {slice_.key}
    origin = Origin("orders", 0, 0, 1)
    with pytest.raises(SupersededAttemptError, match=slice_.key):
        publication_log_writer.forget(tables.work(), {slice_.key: {origin}})
    tables.publish(slice_)
    publication_log_writer.forget(tables.work(), {slice_.key: {origin}})
    assert [row["origin_offset"] for row in rows_of(tables) if row["slice"] == slice_.key] == [0, 2]


def test_taking_back_goes_on_where_a_run_broke_off_by_the_same_leave(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 1)
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, orders(0, 0, 3))
    tables.publish(slice_)
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "", "ann", datetime.now(UTC))])
    tables.decide(slice_, [], rejected=orders(0, 0, 3))
    log.breaks = f"committed {log.commits + 1}"
    with pytest.raises(Broken):
        tables.publish(slice_)
    tables.publish(slice_)
    assert [(one.place[1], one.value is None) for one in log.records[3:]] == [(n, True) for n in range(3)]
    tables.decide(slice_, orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, [], rejected=orders(0, 0, 3))
    with pytest.raises(RetractionError):
        tables.publish(slice_)  # these were sent after the leave


def test_what_was_sent_is_known_of_slices_that_the_lake_lost_and_of_a_batch_that_broke_off(
    tables: Tables, log: Log
) -> None:
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    keys = [slice_.key for slice_ in slices]
    assert retraction_guard._list_sent_slices(tables.work(*slices), keys) == []
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, orders(0, n, n + 1))
    tables.publish(slices[0])
    log.breaks = f"committed {log.commits + 1}"
    with pytest.raises(Broken):
        tables.publish(slices[1])
    events = tables.lake.open_stream_table("orders", "events")
    assert events is not None
    events.delete()
    assert retraction_guard._list_sent_slices(tables.work(*slices), keys) == keys[:2]


def commit(tables: Tables, slice_: Slice, rows: list[Event], rejected: list[Event]) -> None:
    """What the run of events does at its end."""
    accepted: Any = {(one.partition, one.offset) for one in rows}
    work = tables.work(slice_)
    with retraction_guard.block_sending(
        work, lambda: retraction_guard.ensure_no_retraction(work, [slice_.key], accepted, accepted)
    ) as ensure_held:
        ensure_held()
        tables.decide(slice_, rows, rejected)


@pytest.fixture
def seen_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def ensure_no_retraction(work: Work, keys: list[str], accepted: Any, refused: Any) -> None:
        asked = "SELECT slice, state, origin_partition, origin_offset FROM t"
        being_sent = publication_log.list_sending_slices(work.lake, work.stream) & {*keys}
        table = work.lake.open_stream_table("orders", "published")
        rows = [] if table is None else query(table, asked)
        if being_sent:
            rows += query(
                work.lake.open_existing_table("orders", publication_log.SENDING), f"{asked} WHERE batch IS NULL"
            )
        gone = [row for row in rows if row["slice"] in keys and row["state"] == "sent"]
        if any((row["origin_partition"], row["origin_offset"]) not in accepted for row in gone):
            raise RetractionError("sent", remedy="none")

    monkeypatch.setattr(retraction_guard, "ensure_no_retraction", ensure_no_retraction)
    monkeypatch.setattr(retraction_guard, "ABANDONED_SECONDS", 0.2)


@pytest.mark.usefixtures("seen_without_spark")
@pytest.mark.parametrize(
    ("point", "ends"),
    [
        ("read", SupersededAttemptError),
        ("handed over 1", LeaseHeldError),
        ("before 1", LeaseHeldError),
        ("committed 1", LeaseHeldError),
        ("settled", RetractionError),
    ],
)
def test_whatever_comes_first_of_a_stricter_decision_and_the_first_publication_the_other_sees_it(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch, point: str, ends: type[Exception]
) -> None:
    """A decision that had looked before anything was sent rejected what was sent meanwhile: it was in both topics."""
    slice_, after = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 3))
    tables.decide(slice_, orders(0, 0, 2))
    tables.decide(after, orders(0, 2, 3))
    reported: list[Exception] = []

    def decide_at(now: str) -> None:
        if now == point and not reported:
            try:
                commit(tables, slice_, orders(0, 1, 2), orders(0, 0, 1))
            except HighwaterError as error:
                reported.append(error)

    monkeypatch.setattr(log, "at", lambda name: decide_at(f"{name} {log.commits}"))
    ensure_done = published._ensure_done

    def seen(*given: Any) -> None:
        ensure_done(*given)
        decide_at("read")

    if ends is SupersededAttemptError:
        monkeypatch.setattr(published, "_ensure_done", seen)
        with pytest.raises(SupersededAttemptError, match=f"{slice_.key}: reprocessed"):
            tables.publish(slice_, after)
        assert (log.records, reported) == ([], [])
        monkeypatch.setattr(published, "_ensure_done", ensure_done)
        assert publication_log.list_sending_slices(tables.lake, tables.stream) == set(), (
            "nobody takes it for what may have been sent"
        )
        tables.publish(slice_, after)
        assert places(log.records) == [(0, 1), (0, 2)]
    else:
        tables.publish(slice_, after)
        decide_at("settled")
        assert [type(error) for error in reported] == [ends]
        assert places(log.records) == [(0, 0), (0, 1), (0, 2)]
        with pytest.raises(RetractionError):
            commit(tables, slice_, orders(0, 1, 2), orders(0, 0, 1))
    tables.publish(slice_, after)
    assert not any("highwater.late" in one.headers for one in log.records)


@pytest.mark.usefixtures("seen_without_spark")
def test_a_decision_that_lands_after_its_run_has_died_is_seen_before_anything_is_sent(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark goes on without its client. Where that gets no report of the outcome the lock is left to run out."""
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, orders(0, 0, 2))
    for error, left in ((SupersededAttemptError("first", remedy="none"), False), (Broken("no answer"), True)):
        monkeypatch.setattr(retraction_guard, "ABANDONED_SECONDS", 600)
        with pytest.raises(type(error)), retraction_guard.block_sending(tables.work(slice_), lambda: None):
            raise error
        assert ("sending orders" in tables.ledger.read_leases()) == left
    monkeypatch.setattr(retraction_guard, "ABANDONED_SECONDS", 0.01)
    with pytest.raises(LeaseHeldError):
        tables.publish(slice_)
    assert log.records == []
    with tables.ledger.database.writing() as connection:
        connection.execute(schema.leases.delete())
    write_down = publication_log_writer.PublicationLog.write_down

    def land(book: publication_log_writer.PublicationLog) -> None:
        write_down(book)
        tables.decide(slice_, orders(0, 1, 2), orders(0, 0, 1))

    with monkeypatch.context() as patch:
        patch.setattr(publication_log_writer.PublicationLog, "write_down", land)
        with pytest.raises(SupersededAttemptError):
            tables.publish(slice_)
    tables.publish(slice_)
    assert places(log.records) == [(0, 1)]


def test_only_what_may_still_be_sent_unchanged_is_locked_for_a_decision(tables: Tables, log: Log) -> None:
    del log
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(4)]
    for n, slice_ in enumerate(slices[:3]):
        tables.decide(slice_, orders(0, n, n + 1) if n < 2 else [Event(0, 2, "o0-0", minute=2, changes={"n": 0})])

    def exposed() -> set[str]:
        work = tables.work(*slices)
        return retraction_guard.list_exposed_slices(work, tables.lake.load_slice_commits("orders", "events", work.keys))

    assert exposed() == {slice_.key for slice_ in slices[:3]}, "what was never decided cannot have been sent"
    tables.publish(*slices[:3])
    assert exposed() == {slices[2].key}, "its second delivery is sent where the first one is retracted"
    tables.decide(slices[0], orders(0, 0, 1))
    assert exposed() == {slices[0].key, slices[2].key}


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
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch, point: str, window: int, held: int
) -> None:
    """Two slices of seven events in one batch, one a second delivery; read in windows, each once or again."""
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    monkeypatch.setattr(event_records, "WINDOW", window)
    monkeypatch.setattr(publication_batch, "HELD_BYTES", held)
    asked = count_reads(monkeypatch)
    slices = [tables.plan(0, p0=(0, 4), p1=(0, 3)), tables.plan(1, p0=(4, 9), p1=(3, 5))]
    tables.decide(slices[0], [*orders(0, 0, 4), *orders(1, 0, 3)])
    tables.decide(slices[1], [Event(0, 4, "o0-1", minute=1, changes={"n": 1}), *orders(0, 5, 9), *orders(1, 3, 5)])
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
        assert places([one for one in log.records if one.partition == partition]) == [(partition, n) for n in wanted]
    assert not any("highwater.late" in one.headers for one in log.records)
    assert Counter(row["state"] for row in rows_of(tables)) == {"sent": 13, "second delivery": 1}
    assert {row["slice"] for row in rows_of(tables)} == {slice_.key for slice_ in slices}


@pytest.mark.parametrize(
    "point",
    [*(f"{point} {number}" for number in range(1, 5) for point in ("handed over", "before", "committed"))]
    + [f"{step} {number}" for number in range(1, 4) for step in ("settle", "write_down", "settled")],
)
def test_a_batch_is_settled_as_the_next_one_is_written_down(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Three slices, each a batch of its own; wherever a run breaks off, the next one finds what was sent."""
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    slices = [tables.plan(n, p0=(4 * n, 4 * n + 4)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, orders(0, 4 * n, 4 * n + 2 + n))
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
    assert places(log.records) == [(0, at) for at in (0, 1, 4, 5, 6, 8, 9, 10, 11)]
    assert not any("highwater.late" in one.headers for one in log.records)
    assert Counter(row["slice"] for row in rows_of(tables)) == {slice_.key: 2 + n for n, slice_ in enumerate(slices)}
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()


def test_each_batch_is_written_down_once_and_settled_by_one_commit(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, orders(0, n, n + 1))
    tables.publish(*slices)
    assert places(log.records) == [(0, n) for n in range(3)]
    versions = {
        name: tables.lake.open_existing_table("orders", name).version()
        for name in (publication_log.TABLE, publication_log.SENDING)
    }
    assert versions == dict.fromkeys(versions, len(slices))
    settled = tables.lake.load_slice_commits("orders", publication_log.TABLE, [slice_.key for slice_ in slices])
    assert [settled[slice_.key].extra[publication_log.BATCH] for slice_ in slices] == [1, 2, 3]


def test_what_the_batch_before_has_sent_is_not_sent_again(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is settled before it is looked for second deliveries of it."""
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2)]
    tables.decide(slices[0], orders(0, 0, 2))
    tables.decide(slices[1], [Event(0, 2, "o0-1", minute=1, changes={"n": 1}), *orders(0, 3, 4)])
    tables.publish(*slices)
    assert places(log.records) == [(0, n) for n in (0, 1, 3)]
    assert Counter(row["state"] for row in rows_of(tables)) == {"sent": 3, "second delivery": 1}


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


def test_what_was_reprocessed_after_a_run_broke_off_is_sent_as_it_is_now(
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six events were sent; then a rule was fixed, and accepts two more, one of them before the third."""
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 3)
    slice_ = tables.plan(0, p0=(0, 8))
    tables.decide(slice_, [*orders(0, 0, 1), *orders(0, 2, 7)])
    log.breaks = "committed 1"
    with pytest.raises(Broken):
        tables.publish(slice_)
    tables.decide(slice_, [*orders(0, 0, 3), *orders(0, 3, 5, status="canceled"), *orders(0, 5, 8)])
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
    tables: Tables, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 2)
    slice_ = tables.plan(0, p0=(0, 6))
    tables.decide(slice_, orders(0, 0, 6))
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
    assert places(log.records) == [(0, n) for n in range(6)]


def test_a_restored_table_sends_nothing_again(tables: Tables, log: Log) -> None:
    """The number of the last batch is in another table, which a RESTORE leaves as it is."""
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(4)]
    versions = []
    for n, slice_ in enumerate(slices[:3]):
        tables.decide(slice_, orders(0, 2 * n, 2 * n + 2))
        tables.publish(slice_)
        versions.append(tables.lake.open_existing_table("orders", "published").version())
    tables.decide(slices[3], orders(0, 6, 8))
    tables.lake.open_existing_table("orders", "published").restore(versions[0])
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(slices[3])
    assert places(log.records) == [(0, n) for n in range(6)]
    tables.lake.open_existing_table("orders", "published").restore(versions[1])
    tables.publish(slices[3])  # what the last batch sent is in `_sending`, and is settled from there
    assert places(log.records) == [(0, n) for n in range(8)]
    keys = [slice_.key for slice_ in slices]
    assert sorted(publication_log.read_published_commits(tables.lake, tables.stream, keys)) == sorted(keys)


def test_without_the_table_of_the_batch_only_what_is_settled_counts_as_sent(tables: Tables, log: Log) -> None:
    """A missing table was taken for no batch: records of one that had broken off went out twice."""
    first, second = (tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2))
    tables.decide(first, orders(0, 0, 2))
    tables.publish(first)
    [(name, mark)] = log.marks.items()
    tables.decide(second, orders(0, 2, 4))
    shutil.rmtree(tables.lake.build_table_path("orders", publication_log.SENDING))
    with pytest.raises(DependencyAwayError, match="the records being sent are unknown"):
        publication_log.list_sending_slices(tables.lake, tables.stream)
    log.marks[name] = replace(mark, attempt=mark.attempt + 1, sent=1)
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(second)
    log.marks[name] = mark
    tables.publish(second)
    assert places(log.records) == [(0, n) for n in range(4)]
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()


def test_another_table_an_older_one_and_another_topic_stop_the_run(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 2, status="paid"))
    [(name, mark)] = log.marks.items()
    assert name == "highwater.pub.orders.accepted"
    log.marks[name] = replace(mark, identity="another")
    with pytest.raises(ConfigurationError, match="has records of another table"):
        tables.publish(slice_)
    log.marks[name] = mark
    tables.ledger.publications.record("orders", "orders.accepted", Publication(9, 1, NOON))
    with pytest.raises(ConfigurationError, match="older than what was sent"):
        tables.publish(slice_)
    tables.stream = replace(tables.stream, publishes=Accepted("elsewhere"))
    with pytest.raises(ConfigurationError, match="to another topic before"):
        tables.publish(slice_)
    assert len(log.records) == 2


def test_a_field_that_was_just_declared_is_null_in_what_was_accepted_before(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 1))
    tables.decide(slice_, orders(0, 0, 1))
    fields = (
        *tables.stream.fields,
        Field("note", "string"),
        Field("paid_at", "timestamp"),
        Field("tax", "decimal(9,8)"),
    )
    tables.stream = replace(tables.stream, fields=fields)
    tables.publish(slice_)
    assert [said(log.records[0])[name] for name in ("order_id", "note", "paid_at", "tax")] == ["o0-0", None, None, None]


def test_a_topic_that_was_recreated_stops_the_run(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 2, status="paid"))
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
    tables.decide(slice_, orders(0, 0, 2))
    tables.publish(slice_)
    tables.decide(slice_, orders(0, 0, 2, status="paid"))
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "U" * 22)

    def look_again(topic: str) -> TopicState:
        if second is None:
            raise TopicAbsentError(f"topic {topic} does not exist", remedy="create it")
        return TopicState(topic, second, {})

    monkeypatch.setattr(tables.kafka, "look_again", look_again)
    with pytest.raises(DependencyAwayError, match="two looks"):
        tables.publish(slice_)


@pytest.mark.parametrize("us", [-62_135_596_800_000_000, -1, 0, 999, 1_740_000_000_000_001, 253_402_300_799_999_999])
def test_times_are_in_utc_to_the_microsecond_in_all_years(us: int) -> None:
    """The header's are whole milliseconds, those before 1970 rounded down like all others."""
    import pyarrow as pa

    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).replace(tzinfo=None)
    column = pa.chunked_array([pa.array([us], pa.timestamp("us", "UTC"))])
    written = event_json._encode_column(Field("at", "timestamp"), column.combine_chunks()).to_pylist()
    assert written == [f'"{moment.isoformat(timespec="microseconds")}Z"']
    plain = [["s"], ["t"], [0], [0], [7], [us // 1000], [b"k"], [b"v"], ["f"]]
    window = PublicationWindow(pa.table(plain, schema=window_schema()), [None], pa.array([0]))
    assert [*window.iterate_rows()] == [(b"k", b"v", b"7", b"%d" % (us // 1000), 0)]


def test_a_window_is_taken_apart_where_slice_topic_generation_or_partition_change() -> None:
    import pyarrow as pa

    runs = [("a", "t", 0, 0), ("a", "t", 0, 1), ("a", "t", 1, 1), ("a", "u", 1, 1), ("b", "u", 1, 1)]
    reported = [(*run, offset) for run in runs for offset in range(2)]
    places = [*zip(*reported, strict=True)]
    columns = [*map(list, places), [0] * 10, [b"k"] * 10, [b"v"] * 10, ["f"] * 10]
    window = PublicationWindow(
        pa.table(columns, schema=window_schema()),
        [None, PublicationOutcome(EventState.SENT, 0, None)],
        pa.array([0, 1] * 5),
    )
    assert [(tuple(run.rows[name][0].as_py() for name in RUN), len(run)) for run in window.split_runs()] == [
        (run, 2) for run in runs
    ]
    assert window.count_by_slice() == {"a": 8, "b": 2}
    known = window.filter_by_outcome(lambda one: one is not None)
    assert known.rows["origin_offset"].to_pylist() == [1] * 5
    assert [len(run) for run in known.split_runs()] == [1] * 5
    assert [*window.select_range(0, 0).split_runs()] == []
    assert window.build_column(lambda one: one.state.value, pa.string()).to_pylist() == [None, "sent"] * 5


def test_values_are_json_for_any_text(tables: Tables, log: Log) -> None:
    slice_ = tables.plan(0, p0=(0, 64))
    texts = [chr(n) * 2 for n in range(64)]
    tables.decide(slice_, [Event(0, n, f"k{n}", changes={"customer_id": text}) for n, text in enumerate(texts)])
    tables.publish(slice_)
    assert [json.loads(one.value or b"")["customer_id"] for one in log.records] == texts
