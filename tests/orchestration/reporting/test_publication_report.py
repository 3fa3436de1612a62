"""What `status`, `explain` and the alert say about accepted events that are not sent, and why they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from highwater.assets import published
from highwater.declaration import Alerts
from highwater.errors import LAKE, BreakerOpenError, DependencyUnavailableError
from highwater.holds import HoldingRecords
from highwater.orchestration.reporting import alert_conditions, alert_inputs, publication_status
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.plan_status import _load_waiting_work
from highwater.orchestration.reporting.publication_status import PublicationLag, measure_publication_lag
from highwater.orchestration.reporting.status_report import StreamStatus, WaitingWork
from highwater.plans import PublicationRecord
from highwater.resources.ledger.breakers import Judgement
from highwater.slices import Slice
from tests.helpers.accepted import NOON, Broken, Event
from tests.helpers.publishing_scene import PublishingScene, open_scene

# Seconds of processor each.
pytestmark = pytest.mark.slow


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishingScene]:
    with open_scene(tmp_path, monkeypatch) as made:
        yield made


def look(scene: PublishingScene) -> PublicationLag:
    found = measure_publication_lag(scene.tables.ledger, scene.tables.lake, scene.tables.stream)
    assert found is not None
    return found


def judged(scene: PublishingScene, slice_: Slice, at: datetime, *, refused: bool = False) -> None:
    one = Judgement(slice_.key, "orders", "run", at, records=4, rejects=0, refused=refused)
    scene.tables.ledger.breakers.update("orders", [slice_.key], lambda circuit, _: (circuit, [one]))


def test_waiting_slices_are_counted_with_the_oldest_and_its_obstacle(scene: PublishingScene) -> None:
    slices = [scene.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(4)]
    assert look(scene).line == f"orders.accepted: nothing is sent yet; {slices[0].key} is next, and is not decided yet"
    begin = datetime.now(UTC) - timedelta(seconds=1)
    for n in (0, 1, 3):
        scene.decide(slices[n], 2 * n, 2 * n + 1)
    scene.tables.publish(slices[0])
    reported = look(scene)
    assert (reported.last, reported.slices, reported.records, reported.revised) == (slices[0].key, 2, 4, 0)
    assert reported.oldest == slices[1].key
    assert reported.since is not None
    assert begin <= reported.since <= datetime.now(UTC)
    assert reported.compute_age(reported.since + timedelta(hours=1)) == timedelta(hours=1)
    assert f"{slices[1].key} is next; check that the sensor publisher is switched on" in reported.line
    scene.tables.publish(slices[1])
    reported = look(scene)
    assert (reported.slices, reported.records, reported.oldest) == (1, 2, slices[3].key)
    assert reported.held_up == f"{slices[2].key} is next, and is not decided yet"
    scene.decide(slices[2], 4)
    scene.tables.publish(*slices[2:])
    assert look(scene).line == f"orders.accepted: sent up to {slices[3].key}, no accepted event waits"


def test_reprocessed_and_retried_slices_wait_too(scene: PublishingScene) -> None:
    first, retried = scene.plan(0, p0=(0, 2)), scene.plan(0, scene.tables.stream.tier_topics[0], p0=(0, 1))
    scene.decide(first, 0)
    scene.tables.publish(first)
    scene.decide(first, 0, status="paid")
    scene.decide(retried, 1)
    reported = look(scene)
    assert (reported.slices, reported.records, reported.revised) == (1, 1, 1)
    scene.tables.publish(first, retried)
    scene.decide(first, 0, status="paid")
    assert (look(scene).slices, look(scene).revised) == (0, 1)
    for name in ("events", "published"):  # files that are joined are younger, and nothing else
        table = scene.tables.lake.open_stream_table("orders", name)
        assert table is not None
        scene.tables.publish(first)
        table.optimize.z_order(["origin_offset"])
        assert not look(scene).waits


def test_each_cause_is_named(scene: PublishingScene) -> None:
    ledger = scene.tables.ledger
    first, second = scene.plan(0, p0=(0, 2)), scene.plan(1, p0=(2, 4))
    judged(scene, first, NOON, refused=True)
    assert "refused by the breaker; fix it, or highwater accept-rejects orders@0000000" in look(scene).held_up
    origin = Event(0, 0, "o0").origin(scene.tables.stream)
    ledger.holds.note("orders", first.key, HoldingRecords(3, origin, "unresolved", "why"), NOON)
    assert "held by 3 records; fix it, or highwater release-hold orders@0000000" in look(scene).held_up
    scene.tables.decide(first, [Event(0, 0, "o0")], [Event(0, 1, "o1")], known=False)
    assert look(scene).held_up.endswith("its rejects are not published to the DLQ yet")
    scene.decide(first, 0, 1)
    scene.decide(second, 2, 3)
    scene.log.breaks = "committed 1"
    with pytest.raises(Broken):
        scene.tables.publish(first, second)
    assert look(scene).held_up.startswith("a batch of 4 records of orders@0000000 and 1 more slices is being sent, or")
    now = datetime.now(UTC)
    ledger.breakers.change("kafka", lambda one: replace(one, state="open", since=now, why="no broker"))
    assert "kafka" in look(scene).held_up
    assert look(scene).waits


def test_a_slice_that_was_sent_in_part_waits(scene: PublishingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 2)
    first, second = scene.plan(0, p0=(0, 2)), scene.plan(1, p0=(2, 5))
    scene.decide(first, 0, 1)
    scene.decide(second, 2, 3, 4)
    for point in ("committed 2", "before 3"):
        scene.log.breaks = point
        with pytest.raises(Broken):
            scene.tables.publish(first, second)
    reported = look(scene)
    assert (reported.last, reported.oldest, reported.slices) == (first.key, second.key, 1)
    scene.tables.publish(first, second)
    assert look(scene).line == f"orders.accepted: sent up to {second.key}, no accepted event waits"


@pytest.mark.parametrize("kind", ["of a tier", "reprocessed"])
def test_a_slice_that_is_written_down_after_its_events_and_was_sent_in_part_waits(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What is settled of a batch that broke off is younger than the slice's events: times alone take it for sent."""
    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 2)
    tables, restarted = scene.tables, kind == "reprocessed"
    first, retried = scene.plan(0, p0=(0, 3)), scene.plan(0, tables.stream.tier_topics[0], p0=(0, 3))
    scene.decide(first, 0, 1, 2)
    tables.publish(first)
    slice_ = first if restarted else retried
    scene.decide(slice_, *((0, 1, 2) if restarted else (5, 6, 7)), status="paid")
    for point in (f"committed {scene.log.commits + 1}", f"before {scene.log.commits + 2}"):
        scene.log.breaks = point
        with pytest.raises(Broken):
            tables.publish(slice_)
    now = look(scene)
    assert (now.slices, now.records, now.revised, now.oldest) == ((0, 0, 1) if restarted else (1, 3, 0)) + (slice_.key,)
    assert now.held_up.startswith(f"a batch of 1 records of {slice_.key} is being sent, or broke off")
    lines = explain(tables.ledger, tables.lake, tables.stream, slice_.key, None).lines
    part, why = [line.removeprefix("orders.accepted: ") for line in lines if line.startswith("orders.accepted")]
    assert part.startswith("3 sent, of attempt 1, settled " if restarted else "2 sent, not sent to its end, settled ")
    what = "now not sent" if restarted else "the rest is not sent"
    assert why == f"{what}: it is in the batch that is being sent, or that broke off"
    tables.publish(slice_)
    assert look(scene).line == f"orders.accepted: sent up to {first.key}, no accepted event waits"


@pytest.mark.parametrize("joined", [False, True])
def test_explain_gives_a_cause_where_status_looks_up_no_more(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch, *, joined: bool
) -> None:
    """Of more slices than are looked up it is not said that none waits, nor that no more do."""
    monkeypatch.setattr(publication_status, "MAX_OPENED", 2)
    tables = scene.tables
    slices = [scene.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(8)]
    for n, slice_ in enumerate(slices):
        scene.decide(slice_, 2 * n)
    tables.publish(*slices[:6])
    tables.publish(*slices[6:])  # the two that are looked up because they were sent last
    assert look(scene).unopened == 0
    for n in (2, 0, 5, 1):  # the first and the last of them are looked up
        with monkeypatch.context() as patched:
            if joined and n in {1, 2}:  # written again, as they were
                patched.setattr(tables.ledger, "allocate_attempts", lambda keys: dict.fromkeys(keys, 1))
            scene.decide(slices[n], 2 * n)
    now = look(scene)
    assert (now.revised, now.unopened) == (0 if joined else 2, 2)
    some = "2 slices may have been reprocessed since they were sent"
    more = "at least 2 slices were reprocessed since they were sent; 2 more slices may have been reprocessed"
    assert f"{slices[7].key}; {some if joined else more}" in now.line
    [settled, why] = [
        line
        for line in explain(tables.ledger, tables.lake, tables.stream, slices[5].key, None).lines
        if line.startswith("orders.accepted")
    ]
    assert "1 sent, of attempt 1" in settled
    assert why.endswith(
        "now not sent: it waits for its turn; they go out as they are found; check that the sensor "
        "publisher is switched on, and read its ticks"
    )


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"slices": 2, "records": 3}, "t: nothing is sent yet; 3 events of 2 slices wait"),
        ({"slices": 2}, "t: nothing is sent yet; 2 slices wait"),
        ({"revised": 1}, "t: nothing is sent yet; 1 slices were reprocessed since they were sent"),
        ({"unopened": 4}, "t: nothing is sent yet; 4 slices may have been reprocessed since they were sent"),
        ({}, "t: nothing is sent yet, no accepted event waits"),
    ],
)
def test_zero_counts_are_left_out(found: dict[str, int], line: str) -> None:
    assert PublicationLag("t", None, **found).line == line  # type: ignore[arg-type]


def test_explain_reports_what_became_of_a_slice(scene: PublishingScene) -> None:
    tables = scene.tables
    first, second = scene.plan(0, p0=(0, 3)), scene.plan(1, p0=(3, 5))

    def reported(slice_: Slice) -> list[str]:
        lines = explain(tables.ledger, tables.lake, tables.stream, slice_.key, None).lines
        return [line.removeprefix("orders.accepted: ") for line in lines if line.startswith("orders.accepted")]

    scene.decide(second, 3, 4)
    assert reported(first) == ["not sent: it is not decided yet"]
    assert reported(second) == [f"not sent: it waits for its turn; {first.key} is next, and is not decided yet"]
    tables.decide(first, [Event(0, 0, "o0"), Event(0, 1, "o0"), Event(0, 2, "o2")])
    tables.publish(first)
    [line] = reported(first)
    assert line.startswith("2 sent, 1 second delivery, of attempt 1, settled ")
    scene.log.breaks = f"committed {scene.log.commits + 1}"
    with pytest.raises(Broken):
        tables.publish(second)
    tables.ledger.publications.record("orders", "orders.accepted", PublicationRecord(2, 2, NOON))
    why, mark = reported(second)
    assert why == "not sent: it is in the batch that is being sent, or that broke off"
    assert mark.startswith(
        "2 records of its batch 2 are committed, as of 2026-03-01 12:00:00 UTC; group highwater.pub."
    )
    tables.publish(second)
    tables.decide(first, [Event(0, 0, "o0")])
    settled, now_not = reported(first)
    assert settled.startswith("2 sent, 1 second delivery, of attempt 1")
    assert now_not.startswith("now not sent: it waits for its turn; they go out as they are found")
    plain = explain(tables.ledger, tables.lake, tables.stream, second.key, None).to_plain()["accepted"]
    assert (plain["attempt"], plain["decided"], plain["states"], plain["why_not"]) == (1, 1, {"sent": 2}, "")


def test_an_alert_begins_when_the_oldest_has_waited_for_too_long(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_ = scene.plan(0, p0=(0, 2))
    stream = replace(scene.tables.stream, alerts=Alerts(published_late=timedelta(minutes=10)))
    asked = alert_inputs.StreamInputs(scene.tables.ledger, cast("Any", None), scene.tables.lake, stream)
    unsent = replace(stream, publishes=None)
    for declared, value in ((unsent, "the stream sends none"), (stream, "none waits to be sent")):
        found = alert_conditions._measure_publication_age(replace(asked, stream=declared))
        assert found is not None
        assert (found.over, found.value) == (False, value)
    scene.decide(slice_, 0, 1)
    shown_now = look(scene)
    for minutes, over in ((9, False), (11, True)):
        waited = replace(shown_now, since=datetime.now(UTC) - timedelta(minutes=minutes))
        monkeypatch.setattr(alert_conditions, "measure_publication_lag", lambda *_, one=waited: one)
        found = alert_conditions._measure_publication_age(asked)
        assert found is not None
        reported = f"the oldest that is not sent to orders.accepted was accepted 0:{minutes:02}:"
        assert (found.over, found.value.startswith(reported)) == (over, True)
        assert "publisher is switched on" in found.remedy


def test_a_lake_that_is_unavailable_is_reported_and_is_not_taken_for_one_without_slices(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (scene.tables.ledger, scene.tables.lake, scene.tables.stream)
    scene.decide(scene.plan(0, p0=(0, 2)), 0)
    found = _load_waiting_work(*asked)
    assert isinstance(found, WaitingWork)
    assert [line.split(":")[0] for line in found.lines] == ["orders.accepted"]

    def unavailable(*_: object) -> None:
        raise DependencyUnavailableError("the lake could not be read", remedy="wait")

    monkeypatch.setattr(publication_status, "read_written", unavailable)
    assert isinstance(_load_waiting_work(*asked), DependencyUnavailableError)
    now = datetime.now(UTC)
    scene.tables.ledger.breakers.change(LAKE, lambda one: replace(one, state="open", since=now, why="away"))
    assert isinstance(_load_waiting_work(*asked), BreakerOpenError)


def test_a_log_that_cannot_be_read_and_a_slice_commit_of_another_format_are_reported(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ended `status` in a traceback."""
    tables = scene.tables
    scene.decide(scene.plan(0, p0=(0, 2)), 0)
    table = tables.lake.open_stream_table("orders", "events")
    assert table is not None

    def fails(*_: object, **__: object) -> None:
        raise OSError("a checkpoint is gone")

    tables.publish(*tables.slices.values())
    with monkeypatch.context() as patched:
        patched.setattr(type(table), "get_add_actions", fails)
        found = _load_waiting_work(tables.ledger, tables.lake, tables.stream)
    assert isinstance(found, DependencyUnavailableError)
    assert (found.of, found.found) == (None, "a checkpoint is gone"), "one broken table is no outage of the lake"

    def newer(*_: object) -> None:
        raise ValueError("slice commit of format 9; this version reads format 2")

    monkeypatch.setattr(publication_status, "read_slice_commits", newer)
    reported = _load_waiting_work(tables.ledger, tables.lake, tables.stream)
    status = StreamStatus("orders", "orders", 1, 0, None, waiting=reported)
    text = "ValueError: slice commit of format 9; this version reads format 2"
    assert status.lines[-1] == f"  what waits in the lake is not known: {text}"
    plain = status.to_plain()
    assert plain["lake_error"] == {
        "error": "ValueError",
        "text": "slice commit of format 9; this version reads format 2",
    }
    assert (plain["publication"], plain["reclaimed"], plain["reclaimed_remedy"]) == (None, [], "")
    assert replace(status, waiting=None).to_plain()["lake_error"] is None


def test_the_last_slice_is_reported_where_ordinals_outgrow_their_digits(scene: PublishingScene) -> None:
    slices = [scene.plan(9_999_999 + n, p0=(2 * n, 2 * n + 2)) for n in range(2)]
    for n, slice_ in enumerate(slices):
        scene.decide(slice_, 2 * n, 2 * n + 1)
    scene.tables.publish(*slices)
    assert look(scene).last == "orders@10000000"
