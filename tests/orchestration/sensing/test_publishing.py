"""The slices that the sensor `publisher` asks for, and what a run of the asset reports to Dagster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from assets.streams.payments import STREAM as PAYMENTS
from highwater.assets import retraction_guard
from highwater.assets.dlq_marks import list_needless_groups
from highwater.envelope import Origin
from highwater.errors import KAFKA, RetractionError
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.published_checks import describe_publication
from highwater.orchestration.operations.retrying_slices import RetryRequest, release_for_retries
from highwater.orchestration.run_tags import PURPOSE, RANGE_END, RANGE_START
from highwater.orchestration.sensing import publishing
from highwater.orchestration.sensing.publishing import RULES, SLICES_PER_RUN, select_next_run
from highwater.orchestration.sensing.run_requests import Repair
from highwater.plans import Generation
from highwater.publishing import PossibleCopy, select_second_deliveries
from highwater.resources.ledger.breakers import AcceptedSlice
from highwater.slices import Slice
from tests.helpers.accepted import NOON
from tests.helpers.publishing_scene import PublishingScene, open_scene
from tests.helpers.support import make_stream, report_failed_run
from tests.helpers.written_tables import Written, a_slice

LATER = datetime.now(UTC) + timedelta(days=2)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishingScene]:
    with open_scene(tmp_path, monkeypatch) as made:
        yield made


def test_slices_are_asked_for_up_to_the_first_that_is_not_done_and_a_run_sends_them(scene: PublishingScene) -> None:
    slices = [scene.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(4)]
    for n in (3, 1, 0):
        scene.decide(slices[n], 2 * n, 2 * n + 1)
    tick = scene.tick()
    [request] = tick.requests
    assert request.keys == (slices[0].key, slices[1].key)
    assert f"wait for {slices[2].key}, which is not done" in tick.message
    done = scene.run(request)
    assert done.success
    assert [record.place[1] for record in scene.log.records] == [0, 1, 2, 3]
    found = {e.partition: e for e in done.get_asset_materialization_events()}
    assert {*found} == {slices[0].key, slices[1].key}
    numbers = {name: one.value for name, one in found[slices[0].key].materialization.metadata.items()}
    assert (numbers["sent"], numbers["sent_now"], numbers["second_deliveries"], numbers["late"]) == (2, 2, 0, 0)
    assert "seconds/publish" in numbers
    checked = [e.asset_check_evaluation_data for e in done.all_events if e.event_type_value == "ASSET_CHECK_EVALUATION"]
    assert {(one.check_name, one.partition, one.passed) for one in checked} == {
        ("events_published", slices[n].key, True) for n in (0, 1)
    }
    assert scene.asked() == []
    scene.decide(slices[2], 4, 5)
    assert scene.asked() == [(slices[2].key, slices[3].key)]
    line = describe_publication(scene.tables.lake, scene.tables.stream)
    assert line == f"sent to orders.accepted up to {slices[1].key}: 4 sent, 0 second delivery, 0 retracted"


@pytest.mark.slow
def test_changed_and_retried_slices_are_requested(scene: PublishingScene) -> None:
    tier = scene.tables.stream.tier_topics[0]
    first = scene.plan(0, minute=0, p0=(0, 2))
    retried = scene.plan(0, tier, minute=5, p0=(0, 1))
    second = scene.plan(1, minute=10, p0=(2, 4))
    scene.decide(first, 0)
    scene.decide(retried, 1)
    assert scene.asked() == [(first.key,)], "a tier's slice comes after all that was planned before it"
    scene.run(scene.tick().requests[0])
    assert scene.asked() == [(retried.key,)]
    scene.decide(second, 2, 3)
    scene.decide(first, 0, status="paid")
    [request] = scene.tick().requests
    assert request.keys == (second.key,), "alone: what cannot be sent of another slice would stop it"
    assert scene.run(request).success
    [request] = scene.tick().requests
    assert request.keys == (first.key, retried.key), "neighbours in Dagster's order"
    assert scene.run(request).success
    assert [(one.place[1], one.headers.get("highwater.late")) for one in scene.log.records] == [
        (0, None),
        (2, None),
        (3, None),
        (0, "corrected"),
        (1, "retried"),
    ]


def test_slices_whose_keys_are_gone_get_them_again_and_are_sent(scene: PublishingScene) -> None:
    """A key that is retired without its slice being sent stopped all that follows, and no line named it."""
    retired, half, lost = (scene.plan(n, p0=(n, n + 1)) for n in range(3))
    for at, slice_ in enumerate((retired, half, lost)):
        scene.decide(slice_, at)
    ledger = scene.tables.ledger
    ledger.retired.retire("orders", [retired.key, half.key], NOON)
    for slice_ in (retired, lost):
        scene.instance.delete_dynamic_partition("orders_slices", slice_.key)
    tick = scene.tick()
    assert tick.keys == [retired.key, lost.key]
    assert tick.lines[0] == f"2 had no key in Dagster, and get it again: {retired.key} .. {lost.key}"
    assert ledger.retired.list_retired([retired.key, half.key]) == set(), "nobody deletes them while they are asked for"
    scene.instance.add_dynamic_partitions("orders_slices", list(tick.keys))
    [request] = tick.requests
    assert request.keys == (half.key, retired.key, lost.key), "as Dagster orders them now"
    assert scene.run(request).success
    assert [record.place[1] for record in scene.log.records] == [0, 1, 2]


def test_a_slice_that_is_being_reprocessed_is_not_asked_for(scene: PublishingScene) -> None:
    slice_ = scene.plan(0, p0=(0, 1))
    scene.decide(slice_, 0)
    scene.run(scene.tick().requests[0])
    scene.decide(slice_, 0, status="paid")
    tags = {"highwater/stream": "orders", RANGE_START: slice_.key, RANGE_END: slice_.key}
    run = create_run_for_test(scene.instance, tags=tags, status=dg.DagsterRunStatus.STARTED)
    assert scene.asked() == []
    scene.instance.report_run_failed(run)
    assert scene.asked() == [(slice_.key,)]


def test_slices_of_a_topic_that_the_declaration_does_not_name_are_not_asked_for(scene: PublishingScene) -> None:
    """They passed for slices of a tier, which go out at any time, and every run of them is refused."""
    slice_ = scene.plan(0, p0=(0, 1))
    scene.decide(slice_, 0)
    before = scene.tables.stream
    scene.tables.stream = replace(before, topic="orders.v2")
    assert scene.asked() == []
    scene.tables.stream = before
    assert scene.asked() == [(slice_.key,)]


def test_slices_that_a_person_has_reprocessed_are_left_out_of_what_is_next(scene: PublishingScene) -> None:
    """The first one that is; the run that decides a slice for the first time goes on while it is sent."""
    slices = [scene.plan(n, p0=(n, n + 1)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        scene.decide(slice_, n)
    tags = {"highwater/stream": "orders", RANGE_START: slices[1].key, RANGE_END: slices[1].key}
    for more, wanted in (({PURPOSE: "plan"}, slices), ({}, slices[:1])):
        run = create_run_for_test(scene.instance, tags={**tags, **more}, status=dg.DagsterRunStatus.STARTED)
        tick = scene.tick()
        assert [request.keys for request in tick.requests] == [tuple(slice_.key for slice_ in wanted)]
        assert (f"2 wait for {slices[1].key}, which is being reprocessed" in tick.lines) == (not more)
        scene.instance.report_run_failed(run)
    [asked] = scene.asked()
    assert len(asked) == 3


def test_one_run_at_a_time_and_one_that_failed_waits(scene: PublishingScene) -> None:
    slice_ = scene.plan(0, p0=(0, 1))
    scene.decide(slice_, 0)
    [request] = scene.tick().requests
    tags = {PURPOSE: "publish", "highwater/stream": "orders", RANGE_START: slice_.key, RANGE_END: slice_.key}
    run = create_run_for_test(scene.instance, tags=tags, status=dg.DagsterRunStatus.STARTED)
    assert scene.tick().lines == ["a run is sending 1 slices"]
    scene.instance.report_run_failed(run)
    tick = scene.tick()
    assert (tick.requests, tick.lines) == ([], ["1 wait for their next attempt"])
    assert request.run_key.startswith(f"{slice_.key}..{slice_.key} publish 1")


def exhausted_slices(scene: PublishingScene, text: str = "RecordTooLargeError: too large") -> list[Slice]:
    """Two slices that were asked for together, as often as in a day, by runs that failed by an error of this text."""
    slices = [scene.plan(n, p0=(n, n + 1)) for n in range(2)]
    for n, slice_ in enumerate(slices):
        scene.decide(slice_, n)
    tags = {PURPOSE: "publish", "highwater/stream": "orders", RANGE_START: slices[0].key, RANGE_END: slices[1].key}
    for _ in range(RULES.most_runs):
        report_failed_run(scene.instance, tags, text)
    return slices


def test_slices_that_were_abandoned_are_asked_for_when_a_person_lets_them_go(scene: PublishingScene) -> None:
    """They stayed exhausted for a day, whatever was accepted meanwhile."""
    first, second = exhausted_slices(scene)
    tick = scene.tick()
    line = f"2 exhausted for a day after {RULES.most_runs} runs, look at them, then highwater retry-slice {first.key}"
    assert (tick.requests, tick.lines) == ([], [line])
    leave = [AcceptedSlice(one.key, "test data", "ann", LATER) for one in (first, second)]
    scene.tables.ledger.breakers.accept("orders", leave)
    assert scene.asked() == [(first.key, second.key)]


def test_slices_that_were_abandoned_are_tried_again_when_a_person_says_so_of_one(scene: PublishingScene) -> None:
    """`retry-slice` refused: only repair heard it, and only accept-rejects helped, which lets events be retracted."""
    first, second = exhausted_slices(scene)
    ledger, streams = scene.tables.ledger, {"orders": scene.tables.stream}
    lines: list[str] = []
    assert release_for_retries(ledger, streams, RetryRequest(first.key), LATER, lines.append) is None
    assert scene.asked() == [], "a dry run"
    for _ in range(2):  # said twice is no error
        release_for_retries(ledger, streams, RetryRequest(first.key, dry_run=False, by="ann"), LATER, lines.append)
    assert lines[-1] == f"{first.key}: recorded; where it is not sent, the sensor publisher requests it and later ones"
    assert scene.asked() == [(first.key, second.key)]
    assert ledger.exhausted_slices.read_open("orders") == [], "repair gave nothing up"


def test_slices_that_failed_during_an_outage_are_requested_after_it(scene: PublishingScene) -> None:
    """The outage used up the six runs, and the broker's return changed nothing for a day."""
    first, second = exhausted_slices(scene, "BreakerOpenError: kafka is not asked")
    assert scene.asked() == []
    scene.tables.ledger.breakers.change(KAFKA, lambda row: replace(row, closed=LATER))
    assert scene.asked() == [(first.key, second.key)]


def test_slices_that_fail_without_a_coordinator_are_not_exhausted(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other brokers answer meanwhile, so the breaker of Kafka stays closed, and nothing was forgiven at the end."""
    first, second = exhausted_slices(scene, "DependencyUnavailableError: Kafka did not answer")
    assert scene.tick().lines == ["2 wait for their next attempt"]
    monkeypatch.setattr(publishing, "datetime", SimpleNamespace(now=lambda _: LATER))
    assert scene.asked() == [(first.key, second.key)], "an hour after the last run"


KEYS = [f"t@{n:07}" for n in range(5)]


@pytest.mark.parametrize(
    ("order", "main", "late", "due", "expected"),
    [
        (KEYS, KEYS[1:3], [], KEYS, KEYS[1:3]),
        (KEYS, KEYS[1:3], [KEYS[0], KEYS[3]], KEYS, KEYS[1:3]),
        (KEYS, KEYS[1:2], [KEYS[3]], KEYS, KEYS[1:2]),
        (KEYS, KEYS[1:3], [], KEYS[2:], []),
        (KEYS, KEYS[1:3], [KEYS[4]], KEYS[4:], KEYS[4:]),
        # Keys that were lost and added again follow the others.
        ([KEYS[0], KEYS[2], KEYS[1]], KEYS[0:3], [], KEYS, [KEYS[0], KEYS[2], KEYS[1]]),
        ([KEYS[1], KEYS[3], KEYS[0], KEYS[2]], KEYS[1:4], [], KEYS, [KEYS[1]]),
        (KEYS, [], [], KEYS, []),
    ],
)
def test_a_run_takes_neighbours_and_begins_where_the_order_goes_on(
    order: list[str], main: list[str], late: list[str], due: list[str], expected: list[str]
) -> None:
    found = Repair(due=dict.fromkeys(due, 1))
    assert select_next_run(order, main, late, found) == tuple(expected)


def test_a_run_takes_so_many_slices_at_the_most() -> None:
    keys = [f"t@{n:07}" for n in range(3 * SLICES_PER_RUN)]
    assert select_next_run(keys, keys, [], Repair(due=dict.fromkeys(keys, 1))) == tuple(keys[:SLICES_PER_RUN])


def test_only_streams_that_publish_have_the_asset(scene: PublishingScene) -> None:
    repository = build_defs(streams=[scene.tables.stream, PAYMENTS]).get_repository_def()
    keys = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    assert "orders/published" in keys
    assert "payments/published" not in keys
    [publisher] = [s for s in repository.sensor_defs if s.name == "publisher"]
    assert [target.job_name for target in publisher.targets] == ["orders_publish"]
    assert {name for name in repository.job_names if name.endswith("_publish")} == {"orders_publish"}
    node = repository.asset_graph.get(dg.AssetKey(["orders", "published"]))
    assert node.kinds == {"python", "kafka", "deltalake"}


def test_the_horizon_looks_back_from_an_events_own_time() -> None:
    from highwater.envelope import Origin

    def copy(offset: int, minute: int, place: int | None) -> PossibleCopy:
        return PossibleCopy("t@0000000", Origin("t", 0, 0, offset), "same", minute * 60_000, place)

    cases = {
        "within": ([copy(0, 0, 0), copy(1, 10, 1)], {1}),
        "beyond": ([copy(0, 0, 0), copy(1, 11, 1)], set()),
        "one after the other": ([copy(0, 0, 0), copy(1, 8, 1), copy(2, 16, 2)], {1, 2}),
        "a copy that overtook": ([copy(0, 99, None), copy(1, 0, 5)], {1}),
        "judged before, whatever its place": ([copy(0, 0, 0), copy(1, 0, None)], {0}),
    }
    for name, (copies, expected) in cases.items():
        found = select_second_deliveries(copies, timedelta(minutes=10))
        assert {origin.offset for _, origin in found} == expected, name


def test_only_groups_that_nothing_needs_any_more_are_deleted(tmp_path: Path) -> None:
    """Each slice with rejects left a consumer group for good. One that is needed keeps a publication from doubling.

    A mark is needed until the table `dlq` records that its decision is published, and a slice that this ledger does not
    know may be another ledger's.
    """
    published_, reprocessed, open_, unknown = (a_slice(n, 10, "orders") for n in range(4))
    written = Written(tmp_path)
    written.ledger.topics.open_generation(Generation("orders", "orders", published_.topic_id, 0, {0: 0}, NOON))
    written.ledger.add([published_, reprocessed, open_])
    for slice_, rejects, dlq in ((published_, 2, 2), (reprocessed, 3, 1), (open_, 1, None), (unknown, 1, 1)):
        written.prove(slice_, {"rejects": 1}, attempt=rejects)
        if dlq is not None:
            written.prove(slice_, {"dlq": 1}, attempt=dlq)
    written.write()
    expected = {f"highwater.pub.{published_.key}{attempt}": attempt != "#3" for attempt in ("", "#1", "#2", "#3")}
    expected |= {f"highwater.pub.{reprocessed.key}{end}": end == "#1" for end in ("", "#1", "#3")}
    others = ("highwater.pub.orders.accepted", "highwater.orders", "highwater.pub.sales@0000001#1", "somebody")
    needed = [f"highwater.pub.{open_.key}#1", f"highwater.pub.{unknown.key}#1", f"highwater.pub.{open_.key}", *others]
    expected |= dict.fromkeys(needed, False)
    kafka = SimpleNamespace(list_group_names=lambda: [*expected])
    work: Any = SimpleNamespace(stream=make_stream("orders"), kafka=kafka, ledger=written.ledger, lake=written.lake)
    assert list_needless_groups(work) == sorted(name for name, needless in expected.items() if needless)


def test_a_copy_of_the_last_moment_that_there_is_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float rounded it into the year 10000: the run failed by a bare ValueError, and every try after it.

    A record on the accepted topic may have any timestamp; in a rebuilt lake one beyond 9999 has this moment.
    """
    origin = {f"origin_{name}": value for name, value in Origin("orders", 0, 0, 1)._asdict().items()}

    class Row(dict[str, Any]):
        def asDict(self) -> dict[str, Any]:  # noqa: N802 - as Spark's
            return self

    row = Row(slice="orders@0000001", us=253_402_300_799_999_999, **origin)
    monkeypatch.setattr(retraction_guard, "_list_sent_slices", lambda *_: [])
    monkeypatch.setattr("highwater.assets.accepted_copies.list_refused_events", lambda *_: [row])
    seen: list[Any] = []
    monkeypatch.setattr(retraction_guard, "can_retract", lambda _, sent_at: seen.extend(sent_at))
    ledger = SimpleNamespace(breakers=SimpleNamespace(read_accepted_slices=lambda _: {}))
    nothing: Any = None
    with pytest.raises(RetractionError):
        retraction_guard.ensure_no_retraction(
            cast("Any", SimpleNamespace(ledger=ledger)), ["orders@0000001"], nothing, nothing
        )
    assert seen == [datetime.max.replace(tzinfo=UTC)]
