"""What hangs until a person acts has an alert, and `highwater status` ends with an error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    ScheduleInstigatorData,
    SensorInstigatorData,
    TickData,
    TickStatus,
)
from dagster_shared.error import SerializableErrorInfo

from dev.processes import wait_until
from highwater.alerting import Alert, Condition
from highwater.declaration import Alerts
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.orchestration import sensors
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operations.acceptance import accept_loss, build_unread_filter
from highwater.orchestration.reporting import alert_conditions, alert_inputs, alerts, stalled_work
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.stalled_work import (
    find_stopped_sensors,
    measure_expired_slices,
    measure_planning,
    measure_recorded_losses,
    measure_retry_planning,
    measure_schedules,
    measure_sensors,
    measure_skipped_streams,
    measure_unread_age,
)
from highwater.plans import Loss
from highwater.resources import expired_offsets
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.pauses import Pause
from highwater.resources.ledger.sensor_faults import SensorFault
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from tests.conftest import TopicFactory
from tests.helpers.lagging import Deployed, FakeAgedTopics
from tests.helpers.scene import Scene
from tests.helpers.written_tables import STREAM, TIER

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def asked(deployed: Any, kafka: Any = None, **changes: Any) -> alert_inputs.StreamInputs:
    return alert_inputs.StreamInputs(
        deployed.ledger, kafka or deployed.kafka, deployed.lake, replace(STREAM, **changes)
    )


class FakePartitions(FakeAgedTopics):
    """Each partition as a test says it is."""

    def __init__(self, seen: dict[int, PartitionState], topic_id: str = "A") -> None:
        self.seen, self.topic_id = seen, topic_id

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, self.topic_id, self.seen)

    look_again = read_topic_state

    def read_offsets_at(self, *_: object) -> dict[int, int]:
        """All records are old enough to be retried."""
        return {p: seen.last_stable or 0 for p, seen in self.seen.items()}


SOUND, LEADERLESS = PartitionState(0, 100, 100, 1), PartitionState(None, None, None, None)


@pytest.mark.parametrize(
    ("kafka", "value", "remedy"),
    [
        (
            FakePartitions({0: SOUND, 1: PartitionState(0, 40, 40, 1)}),
            "last stable offset 40",
            "accept-loss orders --part",
        ),
        (
            FakePartitions({0: PartitionState(70, 100, 100, 1), 1: SOUND}),
            "log start offset 70",
            "accept-loss orders --part",
        ),
        (FakePartitions({0: SOUND}), "partition 1 is gone", "accept-loss orders --partition 1"),
        (FakePartitions({0: SOUND, 1: SOUND}, "B"), "stored: topic ID A; found: topic ID B", "accept-loss orders"),
        (FakePartitions({0: SOUND, 1: LEADERLESS}), "orders partition 1: no leader", "every partition has a leader"),
    ],
    ids=["truncated", "expired", "removed", "recreated", "without a leader"],
)
def test_planning_that_stopped_is_an_alert(tmp_path: Path, kafka: Any, value: str, remedy: str) -> None:
    """Only the log of a sensor's tick said so, and `highwater status` when a person asked."""
    deployed = Deployed(tmp_path)
    found = measure_planning(asked(deployed, kafka))
    assert (found.over, value in found.value, remedy in found.remedy) == (True, True, True)
    assert not measure_planning(asked(deployed, FakePartitions({0: SOUND, 1: SOUND}))).over
    assert len(deployed.ledger.list_slices("orders")) == 6, "nothing is planned by it"


@pytest.mark.slow
def test_planning_that_a_person_must_fix_is_reported_on_a_real_broker(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    scene, heard = Scene(bootstrap, topic(), tmp_path), list[str]()
    lake = Lake(str(tmp_path / "lake"))

    def tick(stream: Any) -> list[str]:
        heard.clear()
        report: Callable[[Alert], object] = lambda alert: heard.append(f"{alert.to_plain()['kind']}: {alert.value}")  # noqa: E731
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(alerts, "CONDITIONS", (measure_planning,))
            alerts.tick(scene.ledger, scene.kafka, lake, [stream], report)  # type: ignore[arg-type]
        return heard

    absent = replace(scene.stream, topic=f"{scene.topic}.absent")
    assert "does not exist" in tick(absent)[0]
    scene.write(3)
    scene.tick()
    assert tick(scene.stream)[0].startswith("recovery")
    [reported] = tick(replace(scene.stream, name="renamed"))
    assert "is planned by another stream" in reported
    scene.admin.delete_topics([scene.topic])[scene.topic].result(30)
    wait_until(scene.absent, 30, "the topic's end")
    [reported] = tick(scene.stream)
    assert "is gone" in reported


def test_retries_that_are_not_planned_are_an_alert(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, topic=TIER)
    Deployed.__init__(deployed, tmp_path)  # the main topic is planned too
    truncated = FakePartitions({0: SOUND, 1: PartitionState(0, 40, 40, 1)})
    tiers = STREAM.tiers[:1]
    found = measure_retry_planning(asked(deployed, truncated, tiers=tiers))
    assert (found.over, f"topic {TIER} partition 1" in found.value) == (True, True)
    deployed.ledger.paused.pause("orders", Pause(TIER, NOW, "ann", "fixing"))
    assert not measure_retry_planning(asked(deployed, truncated, tiers=tiers)).over, "a person wants it so"


def test_a_planned_slice_that_lost_offsets_before_it_was_read_is_an_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` ended with 0 and lag 0, and the slice failed on and on."""
    deployed = Deployed(tmp_path)
    deployed.read(0, 1)
    gone = FakePartitions({0: PartitionState(25, 100, 100, 1), 1: PartitionState(18, 100, 100, 1)})
    found = measure_expired_slices(asked(deployed, gone, tiers=()))
    assert found.over
    assert found.value == (
        "1 planned slices of orders, from orders@0000002 on, lost 5 offsets before they were read; "
        "stored: 0: [20, 30); found: deleted: 0: [20, 25)"
    )
    assert "highwater accept-loss orders" in found.remedy
    assert not measure_expired_slices(asked(deployed, gone, tiers=(), on_expired="record")).over, (
        "its run records the loss"
    )
    deployed.ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(20, 25), "expired", "ann", NOW)])
    assert not measure_expired_slices(asked(deployed, gone, tiers=())).over


def test_status_ends_with_an_error_for_planned_slices_that_expired(tmp_path: Path) -> None:
    """It ended with 0 and lag 0, since the plan goes on after what retention took."""
    deployed = Deployed(tmp_path)
    deployed.read(0, 1)
    gone = FakePartitions({0: PartitionState(25, 60, 60, 1), 1: PartitionState(18, 60, 60, 1)})

    def errors(**changes: Any) -> list[str]:
        stream = replace(STREAM, tiers=(), **changes)
        found = read_stream_status(deployed.ledger, cast("Any", gone), stream, {}, deployed.lake)
        assert found.lag == 0
        return [f"{type(one).__name__}: {one}" for one in found.errors]

    [error] = errors()
    assert error.startswith("OffsetsExpiredError: 1 planned slices of orders, from orders@0000002 on, lost 5 offsets")
    assert errors(on_expired="record") == []


def test_a_tick_of_the_alerts_measures_all_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measure that the sensor does not know is never reported."""
    monkeypatch.setattr("highwater.orchestration.reporting.topic_conditions.fetch_topic_settings", lambda *_: None)
    deployed, heard = Deployed(tmp_path), dict[str, str]()
    deployed.read(0, 1)
    deployed.ledger.record_loss(
        [Loss("orders", "orders", 0, 1, OffsetRange(0, 5), "expired", "on_expired=record", datetime.now(UTC))]
    )
    kafka: Any = FakePartitions({0: PartitionState(25, 100, 100, 1), 1: PartitionState(0, 40, 40, 1)})

    def report(alert: Alert) -> None:
        heard[alert.what] = alert.value

    failing = Condition("orders", "sensor offset_mirror", "its ticks failed", "3", over=True, remedy="see them")
    alerts.tick(deployed.ledger, kafka, deployed.lake, [replace(STREAM, tiers=())], report, lambda: [failing])
    assert heard.keys() >= {
        "planning",
        "expired slices",
        "age of unread slices",
        "recorded losses",
        "sensor offset_mirror",
    }
    assert "last stable offset 40" in heard["planning"]
    assert measure_retry_planning in alert_conditions.CONDITIONS


def test_stopped_sensors_are_all_reported_within_a_minute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sensor ticked once a minute, and the daemon looks every five seconds; no tick looked at other sensors."""
    [sensor] = [one for one in build_defs(streams=[STREAM]).sensors or () if one.name == "alerts"]
    assert isinstance(sensor, dg.SensorDefinition)
    # The daemon sees five seconds late that a tick is due; the measuring has the rest.
    assert (sensor.minimum_interval_seconds or 60) + 5 <= 50
    asked: list[str] = []

    def failing(_: object, sensors: list[str], __: object) -> list[Condition]:
        asked.extend(sensors)
        return []

    def tick(*_: Any, sensors: Callable[[], object], **__: Any) -> alerts.TickResult:
        sensors()
        return alerts.TickResult(["measured"])

    def of_schedules(_: object, streams: list[str]) -> list[Condition]:
        asked.extend(streams)
        return []

    def of_streams(*given: Any) -> list[Condition]:
        switched_off.append(given[-1])
        return []

    switched_off: list[set[str]] = []
    monkeypatch.setattr(sensors, "find_stopped_sensors", lambda *_: {"repair"})
    monkeypatch.setattr(sensors, "measure_skipped_streams", of_streams)
    monkeypatch.setattr(sensors, "measure_sensors", failing)
    monkeypatch.setattr(sensors, "measure_schedules", of_schedules)
    monkeypatch.setattr(alerts, "tick", tick)
    opened = SimpleNamespace(open=lambda: Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"))
    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"kafka": opened, "lake": opened, "ledger": opened}
        sensor.evaluate_tick(dg.build_sensor_context(instance=instance, resources=resources))
    ours = {one.name for one in build_defs(streams=[STREAM]).sensors or ()} - {"alerts"}
    assert {*asked} == ours | {STREAM.name}
    assert switched_off == [{"repair"}]


def test_a_planned_slice_that_nobody_reads_is_an_alert(tmp_path: Path) -> None:
    """A run queue that hung was reported when retention came near: never, where a topic keeps all."""
    deployed = Deployed(tmp_path)
    deployed.read(0, 1)
    found = measure_unread_age(asked(deployed, tiers=()))
    assert found is not None
    assert (found.over, found.value.startswith("orders@0000002 was planned ")) == (True, True)
    patient = measure_unread_age(asked(deployed, tiers=(), alerts=Alerts(unread_late=timedelta(days=100_000))))
    assert patient is not None
    assert not patient.over
    deployed.read(*range(2, 6))
    found = measure_unread_age(asked(deployed, tiers=()))
    assert found is not None
    assert not found.over


def test_nothing_is_expired_by_a_single_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log start that only one answer has leads a person to give records up."""
    deployed = Deployed(tmp_path)
    looks = iter([{0: PartitionState(25, 100, 100, 1), 1: SOUND}, {0: SOUND, 1: SOUND}])
    kafka = FakePartitions({})
    for look in ("read_topic_state", "look_again"):
        monkeypatch.setattr(kafka, look, lambda topic: TopicState(topic, "A", next(looks)))
    assert expired_offsets.list_expired_slices(kafka, "orders", deployed.slices) == []  # type: ignore[arg-type]


def test_a_loss_that_the_declaration_records_is_reported_for_a_day(tmp_path: Path) -> None:
    deployed, now = Deployed(tmp_path), datetime.now(UTC)
    person = Loss("orders", "orders", 0, 0, OffsetRange(0, 5), "expired", "ann", now)
    deployed.ledger.record_loss([person])
    assert not measure_recorded_losses(asked(deployed)).over
    deployed.ledger.record_loss([replace(person, offsets=OffsetRange(60, 67), accepted_by="on_expired=record")])
    found = measure_recorded_losses(asked(deployed))
    assert (found.over, "7 offsets, last of orders partition 0: [60, 67)" in found.value) == (True, True)


@pytest.mark.slow
def test_status_reports_expired_slices(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    scene = Scene(bootstrap, topic(), tmp_path)
    scene.write(5)
    scene.tick()
    (tmp_path / "lake").mkdir()
    assert scene.run("status", "orders").exit_code == 0
    scene.delete_before(3)
    shown = scene.run("status", "orders")
    assert (shown.exit_code, "OffsetsExpiredError: 1 planned slices" in shown.output) == (EXIT_PERMANENT, True)
    unread = build_unread_filter(Lake(str(tmp_path / "lake")), scene.stream)
    accept_loss(scene.ledger, scene.kafka, scene.stream, unread, by="ann", now=datetime.now(UTC), dry_run=False)
    assert scene.run("status", "orders").exit_code == 0


def instance_in(folder: Path) -> dg.DagsterInstance:
    """An instance with storage for ticks."""
    return dg.DagsterInstance.local_temp(str(folder))


@pytest.mark.slow
def test_status_reports_that_nobody_measures_alerts(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    """Where Dagster's daemon is dead no alert can say so, and `status` had nothing to say."""
    scene = Scene(bootstrap, topic(), tmp_path)
    text = "no alert was measured since"
    assert text not in scene.run("status", "orders").output, "nobody ever did"
    scene.ledger.alerts.watch(["orders"], datetime.now(UTC) - timedelta(minutes=29))
    assert text not in scene.run("status", "orders").output
    scene.ledger.alerts.watch(["orders"], datetime.now(UTC) - timedelta(minutes=31))
    shown = scene.run("status", "orders")
    assert (shown.exit_code, text in shown.output) == (0, True)
    assert json.loads(scene.run("status", "orders", "--json").output)[0]["alerts_measured_at"] is not None


def ticks(instance: dg.DagsterInstance, name: str, *statuses: TickStatus, location: str = "here", at: float = 0) -> str:
    """A sensor whose ticks ended so, the oldest first."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "highwater")
    origin = RemoteInstigatorOrigin(repository, name)
    state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData())
    instance.add_instigator_state(state)
    for number, status in enumerate(statuses):
        cause = SerializableErrorInfo("TopicRecreatedError: the password is swordfish\n", [], "TopicRecreatedError")
        error = SerializableErrorInfo("SensorExecutionError", [], "SensorExecutionError", cause=cause)
        instance.create_tick(
            TickData(
                origin.get_id(),
                name,
                InstigatorType.SENSOR,
                status,
                time.time() + at + number,
                error=error if status == TickStatus.FAILURE else None,
                run_ids=["run"] if status == TickStatus.SUCCESS else [],
                skip_reason="nothing to do" if status == TickStatus.SKIPPED else None,
                selector_id=state.selector_id,
            )
        )
    return state.selector_id


FAILED, SKIPPED, DONE, STARTED = TickStatus.FAILURE, TickStatus.SKIPPED, TickStatus.SUCCESS, TickStatus.STARTED


@pytest.mark.parametrize(
    ("statuses", "over"),
    [
        ((DONE, FAILED, FAILED, FAILED), True),
        ((FAILED, FAILED, FAILED, STARTED), True),
        ((FAILED, FAILED), False),
        ((FAILED, FAILED, FAILED, SKIPPED), False),
        ((FAILED, DONE, FAILED, FAILED), False),
        ((), False),
    ],
)
def test_a_sensor_that_fails_three_ticks_in_a_row_is_an_alert(
    tmp_path: Path, statuses: tuple[TickStatus, ...], over: bool
) -> None:
    """A sensor of any kind that failed, was timed out, or could not be loaded: only Dagster's page showed it."""
    with instance_in(tmp_path) as instance:
        ticks(instance, "offset_mirror", *statuses)
        ticks(instance, "planner", DONE)
        mirror, planner = measure_sensors(instance, ["offset_mirror", "planner"], ["swordfish"])
    assert (mirror.over, planner.over) == (over, False)
    assert mirror.what == "sensor offset_mirror"
    if over:
        assert "TopicRecreatedError: the password is (hidden)" in mirror.value


def test_the_ticks_of_a_code_location_that_was_renamed_do_not_count(tmp_path: Path) -> None:
    with instance_in(tmp_path) as instance:
        ticks(instance, "planner", FAILED, FAILED, FAILED, location="before", at=-3600)
        ticks(instance, "planner", DONE, DONE, DONE)
        [found] = measure_sensors(instance, ["planner"])
    assert not found.over


def test_the_last_fault_of_a_sensor_that_is_switched_off_is_no_alert_any_more(tmp_path: Path) -> None:
    """Nothing would end it: only the next tick takes a fault back."""
    ledger, since = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), NOW - timedelta(hours=1)
    for sensor in ("planner", "repair"):
        ledger.sensor_faults.replace(sensor, [SensorFault("orders", sensor, since, "it is absent", "create it")], [])
    with instance_in(tmp_path) as instance:
        for name in ("planner", "repair"):
            ticks(instance, name, DONE)
        [repair] = [one for one in instance.all_instigator_state() if one.instigator_name == "repair"]
        instance.update_instigator_state(repair.with_status(InstigatorStatus.STOPPED))
        stopped = find_stopped_sensors(instance, ["planner", "repair", "publisher"])
    assert stopped == {"repair"}
    found = measure_skipped_streams(ledger, [STREAM], ["planner", "repair"], NOW, stopped)
    assert [(one.what, one.over) for one in found] == [("sensor planner", True), ("sensor repair", False)]


def schedule_on(instance: dg.DagsterInstance, name: str) -> None:
    """Switch a schedule on, as a person does."""
    origin = RemoteInstigatorOrigin(
        RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "__repository__"), name
    )
    data = ScheduleInstigatorData("0 3 * * *", NOW.timestamp())
    instance.add_instigator_state(InstigatorState(origin, InstigatorType.SCHEDULE, InstigatorStatus.RUNNING, data))


def ended(instance: dg.DagsterInstance, job: str, *, well: bool, **config: Any) -> str:
    """A run that ended; returns what alerts call it."""
    status = dg.DagsterRunStatus.SUCCESS if well else dg.DagsterRunStatus.FAILURE
    run = dg.DagsterRun(job_name=job, run_config=config, status=status)
    instance.add_run(run)
    return run.run_id[:8]


def test_a_nightly_run_that_failed_is_an_alert_until_one_succeeds(tmp_path: Path) -> None:
    """Without maintenance files are merged no more, and only Dagster's page showed it."""
    with instance_in(tmp_path) as instance:
        ended(instance, "maintenance", well=False)
        assert not any(one.over for one in measure_schedules(instance, ["orders"]))  # both are switched off
        schedule_on(instance, "maintenance")
        schedule_on(instance, "audit_daily")
        failed = ended(instance, "maintenance", well=False)
        ended(instance, "maintenance", well=True, dry_run=True)
        ended(instance, "maintenance", well=True, streams=["orders"])
        ended(instance, "audit", well=False, stream="orders")
        ended(instance, "audit", well=True, stream="orders")
        of_payments = ended(instance, "audit", well=False, stream="payments")
        ended(instance, "audit", well=False, stream="no longer declared")
        maintenance, audit = measure_schedules(instance, ["orders", "payments"])
        assert (maintenance.what, audit.what) == ("schedule maintenance", "schedule audit_daily")
        assert (maintenance.over, maintenance.value) == (True, f"the last run of maintenance failed: {failed}")
        assert (audit.over, audit.value) == (True, f"the last run of audit failed: {of_payments} of payments")
        ended(instance, "maintenance", well=True)
        ended(instance, "audit", well=True, stream="payments")
        assert not any(one.over for one in measure_schedules(instance, ["orders", "payments"]))


def test_alerts_cover_every_schedule() -> None:
    repository = build_defs(streams=[STREAM]).get_repository_def()
    declared = {one.name: one.job_name for one in repository.schedule_defs}
    assert declared == dict(stalled_work.SCHEDULES)


def test_a_measure_that_fails_for_good_is_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tick's log said so: nobody knew what it should have measured."""
    heard: list[str] = []
    deployed = Deployed(tmp_path)

    def tick(*errors: Exception) -> list[str]:
        def raising(error: Exception) -> Callable[[object], Condition]:
            def _measure_parked_records(_: object) -> Condition:
                raise error

            return _measure_parked_records

        heard.clear()
        monkeypatch.setattr(alerts, "CONDITIONS", [raising(error) for error in errors])
        alerts.tick(deployed.ledger, deployed.kafka, deployed.lake, [STREAM], lambda one: heard.append(one.value))
        return heard

    assert tick(DependencyUnavailableError("the lake is unavailable", remedy="wait")) == []
    reported = tick(ConfigurationError("the broker forbids it", remedy="allow it"), OverflowError("year 10000"))
    assert reported == ["the broker forbids it; parked records: OverflowError"]
    assert tick() == ["all is measured"]
