"""A DLQ topic that was planned and is gone is an error everywhere, is not recreated by itself, and has a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pytest

from dev.processes import wait_until
from highwater.assets import unreadable_slices
from highwater.declaration import Foreign
from highwater.errors import (
    DependencyUnavailableError,
    HighwaterError,
    TopicAbsentError,
    TopicRecreatedError,
    TopicTruncatedError,
    TopicVanishedError,
)
from highwater.orchestration import observation
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.operations import accepting_losses
from highwater.orchestration.operations.parked import ParkedSelection, read_parked
from highwater.orchestration.operations.reclaiming import ReclaimRequest
from highwater.orchestration.operations.reclaiming import reclaim_records as reclaim
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.plan_status import _read_dlq_status, read_topic_status
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation, Loss, PublicationRecord
from highwater.resources import dlq_topics
from highwater.resources.deleted_topics import find_parked_loss, find_vanished_error
from highwater.resources.dlq_topics import ensure_dlq_topics, ensure_no_drift
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.helpers.fake_topics import MAIN_SHAPE, FakeTopics
from tests.helpers.scene import Scene
from tests.helpers.support import LONG_TIERS, Message, make_stream, send
from tests.helpers.written_tables import MAIN, Written, a_slice
from tests.helpers.written_tables import TIER as TIER_TOPIC

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from tests.conftest import TopicFactory

NOW = datetime(2026, 3, 1, tzinfo=UTC)
OTHERS = "sink.errors"
STREAM = replace(
    make_stream("orders"), tiers=(timedelta(seconds=10),), foreign=(Foreign(OTHERS, timedelta(seconds=10)),)
)
[TIER] = STREAM.tier_topics
PARKED = STREAM.parked_topic


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The main topic, the tier and the topic of another system were planned to offset 5."""
    made = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    for topic in ("orders", TIER, OTHERS):
        made.topics.open_generation(Generation("orders", topic, "A", 0, {0: 0}, NOW))
        made.add([Slice("orders", topic, "A", 0, 0, {0: OffsetRange(0, 5)}, NOW)])
    return made


@pytest.fixture
def reported(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], dict[str, Any]]:
    """What tick, status and alert say of the topics of a cluster."""
    monkeypatch.setattr(alert_conditions, "has_broker_timestamps", lambda *_: True)

    def report(kafka: Any) -> dict[str, Any]:
        resources = SimpleNamespace(
            ledger=SimpleNamespace(open=lambda: ledger), kafka=SimpleNamespace(open=lambda: kafka)
        )
        with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
            keys = [slice_.key for slice_ in ledger.list_slices("orders")]
            instance.add_dynamic_partitions(STREAM.partitions_name, keys)
            found = stream_ticks.plan_retries(instance, resources, STREAM)
            tick: Any = found.error or found.message
        alert = alert_conditions._measure_retry_age(
            alert_inputs.StreamInputs(ledger, kafka, Lake(str(tmp_path / "lake")), STREAM)
        )
        status = {one.topic: one.error for one in _read_dlq_status(ledger, kafka, STREAM)}
        return {"tick": tick, "alert": alert, "status": status}

    return report


WHOLE = {"orders": ("A", 5), TIER: ("A", 5), OTHERS: ("A", 5), PARKED: ("A", 5)}


def test_nothing_is_reported_topics_that_are_as_they_were_planned(reported: Callable[[Any], dict[str, Any]]) -> None:
    found = reported(FakeTopics(WHOLE))
    assert found["status"] == {TIER: None, OTHERS: None, PARKED: None}
    assert (found["alert"].over, f"nothing new in {TIER}" in found["tick"]) == (False, True)


@pytest.mark.parametrize("topic", [TIER, OTHERS])
def test_a_planned_topic_that_is_absent_is_an_error_in_tick_status_and_alert(
    reported: Callable[[Any], dict[str, Any]], topic: str
) -> None:
    """It passed for one that nothing was ever published to, and what waited there was forgotten."""
    found = reported(FakeTopics({name: one for name, one in WHOLE.items() if name != topic}))
    for error in (found["tick"], found["status"][topic]):
        assert isinstance(error, TopicVanishedError)
        assert (error.stored, error.found) == ("topic ID A, planned to 0: 5", "no such topic")
        assert f"highwater accept-loss orders --topic {topic}" in error.remedy
    assert (found["alert"].over, found["alert"].value) == (True, f"topic {topic} of stream orders is gone")
    assert f"--topic {topic}" in found["alert"].remedy


@pytest.mark.parametrize(
    ("state", "kind"), [(("B", 9), TopicRecreatedError), (("A", 3), TopicTruncatedError)], ids=["recreated", "cut off"]
)
def test_a_tier_that_was_recreated_or_cut_off_is_an_error_in_tick_and_status(
    reported: Callable[[Any], dict[str, Any]], state: tuple[str, int], kind: type[Exception]
) -> None:
    found = reported(FakeTopics({**WHOLE, TIER: state}))
    for error in (found["tick"], found["status"][TIER]):
        assert isinstance(error, kind)
        assert f"highwater accept-loss orders --topic {TIER}" in str(error) or "--partition 0" in str(error)


@pytest.mark.parametrize("shown", ["tick", "plan", "status", "observation", "accept-loss", "raw"])
def test_a_planned_main_topic_that_is_absent_is_not_to_be_recreated_at_once(
    ledger: Ledger, tmp_path: Path, shown: str
) -> None:
    """The remedy was to create it, which makes it a recreated one; and no text gave what was planned."""
    kafka: Any = FakeTopics({name: one for name, one in WHOLE.items() if name != "orders"})
    lake = Lake(str(tmp_path / "lake"))
    [slice_] = ledger.list_slices("orders", "orders")
    resources = SimpleNamespace(ledger=SimpleNamespace(open=lambda: ledger), kafka=SimpleNamespace(open=lambda: kafka))
    instance: Any = None

    def read() -> None:
        work: Any = SimpleNamespace(stream=STREAM, slices=[slice_], ledger=ledger, kafka=kafka, lake=lake)
        unreadable_slices.list_unreadable_slices(work, {slice_.key: slice_}, SimpleNamespace(slice_commits={}))  # type: ignore[arg-type]

    def status() -> None:
        [error] = read_topic_status(kafka, STREAM, ledger.topics.read_planned_topic("orders", "orders")).errors
        raise error

    ways: dict[str, Callable[[], object]] = {
        "tick": lambda: stream_ticks.plan_stream(instance, resources, STREAM),
        "plan": lambda: Planner(ledger, kafka).tick(STREAM, NOW, dry_run=True),
        "status": status,
        "observation": lambda: observation.observe_positions(kafka, ledger, STREAM),
        "accept-loss": lambda: accepting_losses.accept_topic_losses(
            ledger, kafka, lake, STREAM, accepting_losses.AcceptLossRequest(), NOW
        ),
        "raw": read,
    }
    with pytest.raises(TopicVanishedError) as caught:
        ways[shown]()
    error = caught.value
    assert error.problem == f"{'' if shown != 'raw' else slice_.key + ': '}topic orders of stream orders is gone"
    near = "" if shown == "accept-loss" else "; nearest names: orders.v2"
    assert (error.stored, error.found) == ("topic ID A, planned to 0: 5", f"no such topic{near}")
    first, _, then = error.remedy.partition("only if the old one is lost for good")
    assert "HIGHWATER_KAFKA_BOOTSTRAP names the right cluster, and restore the topic" in first
    assert then == "; then highwater accept-loss orders records the loss"


def test_a_main_topic_that_was_never_planned_is_absent(tmp_path: Path) -> None:
    planner = Planner(Ledger(f"sqlite:///{tmp_path / 'fresh.sqlite'}"), FakeTopics())  # type: ignore[arg-type]
    with pytest.raises(TopicAbsentError, match="create it") as caught:
        planner.tick(STREAM, NOW)
    assert type(caught.value) is TopicAbsentError


def test_topics_that_nothing_was_published_to_are_no_error(tmp_path: Path) -> None:
    fresh = Ledger(f"sqlite:///{tmp_path / 'fresh.sqlite'}")
    assert [find_vanished_error(fresh, STREAM, topic) for topic in (TIER, PARKED, OTHERS)] == [None, None, None]


def test_the_parked_topic_must_be_there_once_anything_was_published(ledger: Ledger, tmp_path: Path) -> None:
    kafka: Any = FakeTopics({name: one for name, one in WHOLE.items() if name != PARKED})
    lake = Lake(str(tmp_path / "lake"))
    ledger.publications.record("orders", "orders@0000000", PublicationRecord(1, 0, NOW))
    ledger.publications.record(
        "orders", "orders.accepted", PublicationRecord(1, 9, NOW)
    )  # accepted events, and no rejects
    assert find_vanished_error(ledger, STREAM, PARKED) is None, "nothing of it was sent"
    assert read_parked(ledger, kafka, lake, STREAM, ParkedSelection()).waiting == {}
    ledger.publications.record("orders", "orders@0000000", PublicationRecord(1, 2, NOW))
    with pytest.raises(TopicVanishedError, match=f"topic {PARKED} of stream orders is gone") as caught:
        read_parked(ledger, kafka, lake, STREAM, ParkedSelection())
    assert f"highwater reclaim orders --on {PARKED}" in caught.value.remedy
    assert isinstance(_read_dlq_status(ledger, kafka, STREAM)[-1].error, TopicVanishedError)


@pytest.mark.parametrize("look", [ensure_dlq_topics, ensure_no_drift])
def test_the_ledger_is_asked_of_absent_topics_alone(
    look: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each publication asked it of every topic of the DLQ."""
    kafka: Any = SimpleNamespace(bootstrap="here", look_again=lambda topic: shape(None, topic))
    there = {"orders": MAIN_SHAPE, **dlq_topics._build_wanted_shapes(STREAM, MAIN_SHAPE)}
    asked: list[str] = []

    def shape(_: Any, topic: str) -> dlq_topics.TopicShape:
        if topic not in there:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        return there[topic]

    def gone(topic: str) -> TopicVanishedError:
        asked.append(topic)
        return TopicVanishedError(f"{topic} is gone", remedy="restore it")

    monkeypatch.setattr(dlq_topics, "_read_shape", shape)
    look(kafka, STREAM, gone)
    assert asked == []
    del there[PARKED]
    with pytest.raises(TopicVanishedError, match=f"{PARKED} is gone"):
        look(kafka, STREAM, gone)
    assert asked == [PARKED]


def test_a_tier_that_vanished_is_recreated_by_its_acceptance_alone(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    scene = Scene(bootstrap, topic(), tmp_path)
    stream = replace(scene.stream, tiers=(timedelta(seconds=1),))
    scene.stream = stream
    [tier] = stream.tier_topics
    ensure_dlq_topics(scene.kafka, stream)
    send(bootstrap, tier, [Message(b"k", b"v")] * 3)

    def cut() -> bool:
        due = datetime.now(UTC) + timedelta(seconds=5)
        return bool(plan_tier(scene.ledger, scene.kafka, stream, tier, due).slices)

    wait_until(cut, 30, "its slice")
    gone = partial(find_vanished_error, scene.ledger, stream)
    assert set(ensure_dlq_topics(scene.kafka, stream, gone)) == {tier, stream.parked_topic}
    scene.admin.delete_topics([tier])[tier].result(30)
    wait_until(lambda: tier not in scene.kafka.list_topic_names(), 30, "the tier's end")
    for asked in (ensure_dlq_topics, ensure_no_drift):
        with pytest.raises(TopicVanishedError, match=tier):
            asked(scene.kafka, stream, gone)
    assert tier not in scene.kafka.list_topic_names(), "publication has not made it again"
    shown = scene.run("status", "orders")
    assert (shown.exit_code, f"TopicVanishedError: topic {tier}" in shown.output) == (2, True)
    dry = scene.run("accept-loss", "orders", "--topic", tier)
    assert (dry.exit_code, f"{tier} is gone, and would be recreated" in dry.output) == (0, True), dry.output
    assert "3 offsets: recreated" in dry.output
    assert tier not in scene.kafka.list_topic_names()
    done = scene.run("accept-loss", "orders", "--topic", tier, "--yes", "--by", "ann")
    assert (done.exit_code, f"highwater reclaim orders --on {tier} --until" in done.output) == (0, True), done.output
    [loss] = scene.ledger.list_losses("orders", tier)
    assert (loss.offsets, loss.accepted_by) == (OffsetRange(0, 3), "ann")
    send(bootstrap, tier, [Message(b"k", b"v")] * 2)
    wait_until(cut, 30, "the next slice")
    [_, after] = scene.ledger.list_slices("orders", tier)
    assert (after.generation, after.ordinal, after.ranges) == (1, 1, {0: OffsetRange(0, 2)})
    ensure_dlq_topics(scene.kafka, stream, gone)


# What waited there: over tables that are written row by row


@pytest.fixture
def waits(tmp_path: Path) -> Written:
    """Ten records: four events, six sent to the first tier before noon of the first day; nothing came back yet."""
    made = Written(tmp_path)
    made.prove(MAIN, {"raw": 10, "events": 4, "rejects": 6, "dlq": 6, "current": 4})
    made.add("events", MAIN, range(4))
    made.add("rejects", MAIN, range(4, 10), next_topic=TIER_TOPIC)
    made.add("dlq", MAIN, range(4, 10), published_at=NOW)
    made.ledger.add([MAIN])
    made.ledger.topics.open_generation(Generation("orders", TIER_TOPIC, "A", 0, {0: 0}, NOW))
    return made


def a_retry(planned_at: datetime) -> Slice:
    return Slice("orders", TIER_TOPIC, "A", 0, 0, {0: OffsetRange(0, 2)}, planned_at)


def test_records_waiting_on_a_recreated_topic_are_reported_as_lost(waits: Written) -> None:
    """It was counted as waiting for ever."""
    ends = waits.ends()
    assert (ends.waiting[TIER_TOPIC], ends.stranded) == (6, {})
    waits.ledger.topics.open_generation(Generation("orders", TIER_TOPIC, "B", 1, {0: 0}, NOW + timedelta(hours=1)))
    ends = waits.ends()
    assert (ends.waiting[TIER_TOPIC], ends.stranded, ends.error) == (0, {TIER_TOPIC: 6}, None)
    assert [f"not read from {TIER_TOPIC}, to be reclaimed", "6"] in ends.rows


def test_records_waiting_on_a_tier_that_is_declared_no_more_are_to_be_reclaimed(waits: Written) -> None:
    """The ends summed to less than was produced, and no text named the records."""
    waits.ends()
    ends = count_ends(waits.ledger, waits.lake, replace(STREAM, tiers=()))
    assert (ends.waiting, ends.stranded, ends.error) == ({}, {TIER_TOPIC: 6}, None)


def test_records_published_to_the_new_topic_wait(waits: Written) -> None:
    waits.ledger.topics.open_generation(Generation("orders", TIER_TOPIC, "B", 1, {0: 0}, NOW))
    assert waits.ends().waiting[TIER_TOPIC] == 6


def test_while_a_slice_of_before_is_not_decided_what_waits_may_be_in_it(waits: Written) -> None:
    waits.ledger.add([a_retry(NOW)])
    waits.ledger.topics.open_generation(Generation("orders", TIER_TOPIC, "B", 1, {0: 0}, NOW + timedelta(hours=1)))
    assert waits.ends().stranded == {}
    waits.prove(a_retry(NOW), {"raw": 2, "events": 2, "rejects": 0})
    waits.add("events", a_retry(NOW), [4, 5], retries=1)
    assert waits.ends().stranded == {TIER_TOPIC: 4}


def test_behind_a_loss_the_rest_of_the_tier_is_read_first(waits: Written, tmp_path: Path) -> None:
    """Retention took some of what waits; which, is known when all the rest was read."""
    now = datetime.now(UTC)
    hole = Loss("orders", TIER_TOPIC, 0, 0, OffsetRange(0, 4), "expired", "ann", now)
    waits.ledger.record_loss([hole])
    assert waits.ends().stranded == {}, "what is left of it is not planned yet"
    long_ago = now - LONG_TIERS[0] * 1.2 - timedelta(minutes=3)
    hole = replace(hole, recorded_at=long_ago)
    earlier = Written(tmp_path / "earlier")
    earlier.rows, earlier.slice_commits = waits.rows, waits.slice_commits
    earlier.ledger.topics.open_generation(Generation("orders", TIER_TOPIC, "A", 0, {0: 0}, NOW))
    earlier.ledger.record_loss([hole])
    assert earlier.ends().stranded == {TIER_TOPIC: 6}


def test_lost_records_are_reclaimed_by_their_publication_topic(tmp_path: Path) -> None:
    from tests.helpers.reclaiming import Reclaiming, X
    from tests.helpers.world import FIRST
    from tests.helpers.world import PARKED as ELSEWHERE

    taking = Reclaiming(tmp_path)
    taking.reject_in_tier()
    taking.world.write()
    late = taking.world.ledger
    where = late, taking.world.lake, taking.where[2]
    reported: list[str] = []
    [_, second] = where[2].tier_topics[:2]
    assert reclaim(*where, ReclaimRequest(on=[ELSEWHERE]), reported.append).meant == {}
    found = reclaim(
        *where, ReclaimRequest(dry_run=False, by="ann", because="the tier was deleted", on=[second]), reported.append
    )
    assert ([*found.meant], found.slices) == ([X], [FIRST.key])
    late.topics.open_generation(Generation("orders", second, "A" * 22, 0, {0: 0}, NOW))
    late.topics.open_generation(Generation("orders", second, "B" * 22, 1, {0: 0}, datetime.now(UTC)))
    ends = count_ends(*where)
    assert (ends.stranded, ends.reclaimed, ends.error) == ({}, 1, None)


class FakeLateTopics(FakeTopics):
    """The broker that is asked first does not know a topic; another one does, some seconds later."""

    missing = ""

    def read_topic_state(self, topic: str) -> TopicState:
        if topic == self.missing:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        return super().read_topic_state(topic)

    def look_again(self, topic: str) -> TopicState:
        return super().read_topic_state(topic)

    def build_unavailable_error(self, error: object) -> DependencyUnavailableError:
        return DependencyUnavailableError(str(error), remedy="wait")


@pytest.mark.parametrize("topic", [TIER, PARKED])
def test_a_topic_that_one_look_misses_is_not_called_gone(ledger: Ledger, tmp_path: Path, topic: str) -> None:
    """Status and alerts named the remedy for a topic that was deleted: to make it again, without what waits there."""
    ledger.publications.record("orders", MAIN.key, PublicationRecord(1, 3, NOW))
    kafka, lake = FakeLateTopics(WHOLE), Lake(str(tmp_path / "lake"))
    kafka.missing = topic
    asked = alert_inputs.StreamInputs(ledger, cast("Any", kafka), lake, STREAM)

    def status() -> HighwaterError | None:
        return {one.topic: one.error for one in _read_dlq_status(ledger, cast("Any", kafka), STREAM)}[topic]

    def alert() -> bool:
        if topic == PARKED:
            return alert_conditions._find_parked_loss(asked, 3) is not None
        late = alert_conditions._measure_retry_age(asked)
        return late is not None and late.over

    assert not isinstance(status(), TopicVanishedError)
    with pytest.raises(DependencyUnavailableError, match="one broker did not know"):
        alert()
    kafka.missing, kafka.there = "", {name: one for name, one in WHOLE.items() if name != topic}
    assert isinstance(status(), TopicVanishedError)
    assert alert()


# A parked topic that is there, and lost what waited on it


def parked_state(**logs: tuple[int | None, int | None]) -> Any:
    """A cluster whose parked topic holds these offsets of its partitions."""
    states = {int(name[1:]): PartitionState(start, end, end, 1) for name, (start, end) in logs.items()}
    state = TopicState("orders.parked", "B", states)
    return SimpleNamespace(read_topic_state=lambda _: state, look_again=lambda _: state)


@pytest.mark.parametrize(
    ("waiting", "logs", "lost"),
    [
        (3, {"p0": (0, 2), "p1": (0, 1)}, False),
        (0, {"p0": (7, 7)}, False),  # records of an erased key were deleted there
        (2, {"p0": (7, 9)}, False),  # reclaimed, and parked again
        (1, {"p0": (7, 7)}, True),
        (4, {"p0": (5, 7), "p1": (0, 1)}, True),
        (1, {"p0": (0, 0), "p1": (0, 0)}, True),  # recreated
        (4, {"p0": (5, 7), "p1": (None, None)}, False),  # no leader: not known
    ],
)
def test_a_parked_topic_that_holds_less_than_waits_there_lost_some(
    waiting: int,
    logs: dict[str, tuple[int | None, int | None]],
    lost: bool,
) -> None:
    error = find_parked_loss(parked_state(**logs), STREAM, waiting)
    assert (error is not None) == lost
    if error is not None:
        assert f"{waiting:,} wait there" in str(error.stored)
        assert f"0: [{logs['p0'][0]}, {logs['p0'][1]})" in str(error.found)
        assert f"highwater reclaim orders --on {PARKED}" in error.remedy


def some_parked(folder: Path, stream: Stream, count: int = 3) -> Written:
    """Tables of a slice with a number of parked records, and one more that is not published yet."""
    written, main = Written(folder), a_slice(0, 10, stream.topic)
    of, topic = {"origin_topic": stream.topic}, stream.parked_topic
    written.prove(main, {"raw": 10, "events": 9 - count, "rejects": count + 1, "dlq": count, "current": 5}, raw=10)
    written.add("events", main, range(count + 1, 10), **of)
    written.add("rejects", main, range(count + 1), next_topic=topic, **of)
    written.add("dlq", main, range(count), **of)
    written.write()
    return written


@pytest.mark.parametrize(("held", "over"), [((0, 3), False), ((1, 3), True), ((3, 3), True), ((0, 0), True)])
def test_the_alert_reports_that_the_parked_topic_lost_some(
    tmp_path: Path,
    held: tuple[int, int],
    over: bool,
) -> None:
    """It said how many wait, and its remedy listed none."""
    written = some_parked(tmp_path, STREAM)
    found = alert_conditions._measure_parked_topic(
        alert_inputs.StreamInputs(written.ledger, parked_state(p0=held), written.lake, STREAM)
    )
    assert found is not None
    assert found.over == over
    assert ("3 wait there by the tables" in found.value) == over
    assert (f"highwater reclaim orders --on {PARKED}" in found.remedy) == over
    assert alert_conditions._measure_parked_topic in alert_conditions.CONDITIONS


def test_the_alert_reports_that_the_parked_topic_is_gone(tmp_path: Path) -> None:
    written, nowhere = some_parked(tmp_path, STREAM), FakeTopics()
    written.ledger.publications.record("orders", MAIN.key, PublicationRecord(1, 3, NOW))
    kafka: Any = nowhere
    found = alert_conditions._measure_parked_topic(
        alert_inputs.StreamInputs(written.ledger, kafka, written.lake, STREAM)
    )
    assert found is not None
    assert (found.over, f"topic {PARKED} of stream orders is gone" in found.value) == (True, True)


@pytest.mark.slow
def test_status_audit_and_the_list_report_what_was_deleted_from_the_parked_topic(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    """`kafka-delete-records`: status showed a smaller number, the audit was green, and nothing was listed."""
    from confluent_kafka import TopicPartition

    scene = Scene(bootstrap, topic(), tmp_path)
    ensure_dlq_topics(scene.kafka, scene.stream)
    parked = scene.stream.parked_topic
    some_parked(tmp_path, scene.stream)
    send(bootstrap, parked, [Message(b"k", b"v", 0) for _ in range(3)])

    def reported() -> list[bool]:
        status, audit = scene.run("status", "orders"), scene.run("audit", "orders")
        return [f"topic {parked} of stream orders lost records" in one.output for one in (status, audit)]

    assert reported() == [False, False]
    for future in scene.admin.delete_records([TopicPartition(parked, 0, 2)]).values():
        future.result(30)
    assert reported() == [True, True]
    listed = scene.run("redrive-parked", "orders")
    assert "3 more wait by the tables, and the topic does not hold them" in listed.output, "they have no envelope"
