"""Events that were published cannot be rejected afterwards, whichever of the two comes first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from highwater.assets import (
    publication_log,
    publication_log_writer,
    published,
    retraction_guard,
)
from highwater.assets.erasing import list_origins
from highwater.assets.work import Work
from highwater.envelope import Origin
from highwater.erasing import compute_digest
from highwater.errors import (
    HighwaterError,
    LeaseHeldError,
    RetractionError,
    SupersededAttemptError,
)
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.resources.delta import query
from highwater.resources.ledger import schema
from highwater.resources.ledger.breakers import AcceptedSlice
from highwater.slices import Slice
from tests.helpers.accepted import NOON, Broken, Event, FakeTransactionLog, Tables, build_orders, list_places
from tests.helpers.published_tables import read_published_rows

# Seconds of processor each.
pytestmark = pytest.mark.slow


def test_sent_events_are_not_rejected_without_permission(tables: Tables, log: FakeTransactionLog) -> None:
    slice_, other = tables.plan(0, p0=(0, 3)), tables.plan(1, p0=(3, 4))
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, build_orders(0, 0, 2), rejected=build_orders(0, 2, 3))
    tables.decide(other, build_orders(0, 3, 4))
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
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    assert len(log.records) == 6
    assert (log.records[-1].place, log.records[-1].headers["highwater.revision"]) == ((0, 2), "2")


def test_reclaimed_records_continue_the_revisions_of_the_sending_tier(tables: Tables, log: FakeTransactionLog) -> None:
    """The tier's slice sent it and retracted it; the slice of the main topic knew of neither, and sent no revision."""
    tier = tables.stream.tier_topics[0]
    main, retried = tables.plan(0, p0=(0, 2)), tables.plan(0, tier, minute=120, p0=(0, 1))
    tables.decide(main, build_orders(0, 0, 1), rejected=build_orders(0, 1, 2))
    tables.decide(retried, build_orders(0, 1, 2))
    tables.publish(main, retried)
    tables.ledger.breakers.accept("orders", [AcceptedSlice(retried.key, "test data", "ann", datetime.now(UTC))])
    tables.decide(retried, [], rejected=build_orders(0, 1, 2))
    tables.publish(retried)
    [back] = build_orders(0, 1, 2)
    for status in ("placed", "placed", "paid"):
        row = replace(back, reclaims=1, changes={**back.changes, "status": status})
        tables.decide(main, [*build_orders(0, 0, 1), row])
        tables.publish(main)
    found = [(one.place[1], one.headers.get("highwater.revision"), one.value is None) for one in log.records]
    assert found == [(0, None, False), (1, None, False), (1, "1", True), (1, "2", False), (1, "3", False)]


@pytest.mark.parametrize("changed", ["retracted", "revised"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_second_delivery_is_sent_where_the_content_that_was_sent_is_taken_away(
    tables: Tables, log: FakeTransactionLog, changed: str, *, broken: bool
) -> None:
    """It stayed in events and current, and the topic held nothing of it. Of two that were left out one is sent."""
    slices = [tables.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(3)]
    same = [Event(0, 2 * n, "o1", minute=n) for n in range(3)]
    rest = [Event(0, 2 * n + 1, f"x{n}") for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, [same[n], rest[n]])
    tables.publish(*slices)
    assert list_places(log.records) == [(0, 0), (0, 1), (0, 3), (0, 5)]
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
    assert Counter(row["state"] for row in read_published_rows(tables) if row["slice"] == slices[2].key) == {
        "sent": 1,
        "second delivery": 1,
    }


def check_published(tables: Tables, waiting: int) -> None:
    found = check_events_published(tables.ledger, tables.lake, tables.stream, [*tables.slices])["events_published"]
    assert all(one.passed for one in found.values()), found
    assert sum("its turn comes" in one.text for one in found.values()) == waiting


def test_a_second_delivery_that_is_no_event_any_more_is_forgotten(tables: Tables, log: FakeTransactionLog) -> None:
    """Its row stayed, and the check was red for ever. Accepted again it is a second delivery again."""
    first, second = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 4))
    tables.decide(first, build_orders(0, 0, 2))
    again, other = Event(0, 2, "o0-1", minute=2, changes={"n": 1}), Event(0, 3, "x")
    tables.decide(second, [again, other])
    tables.publish(first, second)
    for events, rejected in (([other], [again]), ([again, other], [])):
        tables.decide(second, events, rejected)
        reports = tables.publish(second)
        assert reports[second.key].counts["second_deliveries"] == 1 - len(rejected)
        check_published(tables, waiting=0)
    assert list_places(log.records) == [(0, 0), (0, 1), (0, 3)]


def test_permission_for_one_event_does_not_cover_another_lost_event(tables: Tables, log: FakeTransactionLog) -> None:
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, build_orders(0, 0, 2))
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "", "ann", datetime.now(UTC))])
    with pytest.raises(RetractionError, match="offset 2"):
        tables.publish(slice_)
    assert len(log.records) == 3


def test_erased_events_do_not_count_as_retracted(tables: Tables, log: FakeTransactionLog) -> None:
    """The slices' decisions lose it, as an erasure commits them; it was sent, and nothing follows."""
    tier = tables.stream.tier_topics[0]
    slice_, late = tables.plan(0, p0=(0, 3)), tables.plan(0, tier, minute=0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 2), rejected=build_orders(0, 2, 3))
    tables.decide(late, [Event(0, 2, "o0-1", 2), Event(1, 7, "o1-7")])
    tables.publish(slice_, late)
    events = tables.lake.open_stream_table("orders", "events")
    assert events is not None
    gone = list_origins(events, compute_digest(b"o0-1"), [slice_.key, late.key])
    assert gone == {slice_.key: {Origin("orders", 0, 0, 1)}, late.key: {Origin("orders", 0, 0, 2)}}
    publication_log_writer.delete_origins(tables.work(), gone)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()
    found = publication_log.read_published_commits(tables.lake, tables.stream, [*gone])
    assert {key: one.rows for key, one in found.items()} == {slice_.key: 1, late.key: 1}
    tables.decide(slice_, build_orders(0, 0, 1), rejected=build_orders(0, 2, 3))
    tables.decide(late, [Event(1, 7, "o1-7")])
    reports = tables.publish(slice_, late)
    assert [reports[key].counts["sent"] for key in (slice_.key, late.key)] == [1, 1]
    assert len(log.records) == 4
    assert sorted((row["origin_partition"], row["origin_offset"]) for row in read_published_rows(tables)) == [
        (0, 0), (1, 7)
    ]  # fmt: skip


def test_events_under_way_are_not_erased(tables: Tables, log: FakeTransactionLog) -> None:
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, build_orders(0, 0, 3))
    log.breaks = "committed 1"
    with pytest.raises(Broken):
        tables.publish(slice_)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == {slice_.key}
    origin = Origin("orders", 0, 0, 1)
    with pytest.raises(SupersededAttemptError, match=slice_.key):
        publication_log_writer.delete_origins(tables.work(), {slice_.key: {origin}})
    tables.publish(slice_)
    publication_log_writer.delete_origins(tables.work(), {slice_.key: {origin}})
    assert [row["origin_offset"] for row in read_published_rows(tables) if row["slice"] == slice_.key] == [0, 2]


def test_taking_back_goes_on_where_a_run_broke_off_by_the_same_leave(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 1)
    slice_ = tables.plan(0, p0=(0, 3))
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    tables.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "", "ann", datetime.now(UTC))])
    tables.decide(slice_, [], rejected=build_orders(0, 0, 3))
    log.breaks = f"committed {log.commits + 1}"
    with pytest.raises(Broken):
        tables.publish(slice_)
    tables.publish(slice_)
    assert [(one.place[1], one.value is None) for one in log.records[3:]] == [(n, True) for n in range(3)]
    tables.decide(slice_, build_orders(0, 0, 3))
    tables.publish(slice_)
    tables.decide(slice_, [], rejected=build_orders(0, 0, 3))
    with pytest.raises(RetractionError):
        tables.publish(slice_)  # these were sent after the leave


def test_sent_slices_include_lost_slices_and_a_failed_batch(tables: Tables, log: FakeTransactionLog) -> None:
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    keys = [slice_.key for slice_ in slices]
    assert retraction_guard._list_sent_slices(tables.work(*slices), keys) == []
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, build_orders(0, n, n + 1))
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
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch, point: str, ends: type[Exception]
) -> None:
    """A decision that had looked before anything was sent rejected what was sent meanwhile: it was in both topics."""
    slice_, after = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 3))
    tables.decide(slice_, build_orders(0, 0, 2))
    tables.decide(after, build_orders(0, 2, 3))
    reported: list[Exception] = []

    def decide_at(now: str) -> None:
        if now == point and not reported:
            try:
                commit(tables, slice_, build_orders(0, 1, 2), build_orders(0, 0, 1))
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
        assert list_places(log.records) == [(0, 1), (0, 2)]
    else:
        tables.publish(slice_, after)
        decide_at("settled")
        assert [type(error) for error in reported] == [ends]
        assert list_places(log.records) == [(0, 0), (0, 1), (0, 2)]
        with pytest.raises(RetractionError):
            commit(tables, slice_, build_orders(0, 1, 2), build_orders(0, 0, 1))
    tables.publish(slice_, after)
    assert not any("highwater.late" in one.headers for one in log.records)


@pytest.mark.usefixtures("seen_without_spark")
def test_a_decision_that_lands_after_its_run_has_died_is_seen_before_anything_is_sent(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark goes on without its client. Where that gets no report of the outcome the lock is left to run out."""
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 2))
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
        tables.decide(slice_, build_orders(0, 1, 2), build_orders(0, 0, 1))

    with monkeypatch.context() as patch:
        patch.setattr(publication_log_writer.PublicationLog, "write_down", land)
        with pytest.raises(SupersededAttemptError):
            tables.publish(slice_)
    tables.publish(slice_)
    assert list_places(log.records) == [(0, 1)]


def test_only_what_may_still_be_sent_unchanged_is_locked_for_a_decision(
    tables: Tables, log: FakeTransactionLog
) -> None:
    del log
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(4)]
    for n, slice_ in enumerate(slices[:3]):
        tables.decide(slice_, build_orders(0, n, n + 1) if n < 2 else [Event(0, 2, "o0-0", minute=2, changes={"n": 0})])

    def exposed() -> set[str]:
        work = tables.work(*slices)
        return retraction_guard.list_exposed_slices(work, tables.lake.load_slice_commits("orders", "events", work.keys))

    assert exposed() == {slice_.key for slice_ in slices[:3]}, "what was never decided cannot have been sent"
    tables.publish(*slices[:3])
    assert exposed() == {slices[2].key}, "its second delivery is sent where the first one is retracted"
    tables.decide(slices[0], build_orders(0, 0, 1))
    assert exposed() == {slices[0].key, slices[2].key}
