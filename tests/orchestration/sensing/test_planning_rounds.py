"""One tick of the planner over many streams: a fault stays with its stream, and idle streams cost little."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import event

from highwater.declaration import Accepted, Foreign, Limits, Stream
from highwater.errors import ConfigurationError, DeclarationError, DependencyUnavailableError, TopicAbsentError
from highwater.orchestration import sensors
from highwater.orchestration.build import build_defs
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.stalled_work import measure_skipped_streams, measure_stream_files
from highwater.orchestration.sensing import planning_rounds, resting_rounds, rounds
from highwater.orchestration.sensing.rounds import Cursor
from highwater.orchestration.sensing.run_places import RunQueue
from highwater.orchestration.sensing.stream_ticks import Tick
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.pauses import ALL, PLANNER, PUBLISHER, RETRIES, Pause
from highwater.resources.time_limits import limit_wait
from highwater.resources.topic_state import PartitionState, TopicState, TopicStates
from highwater.slices import OffsetRange
from highwater.stream_files import Declarations
from tests.helpers.support import make_stream

NOW = datetime(2026, 3, 1, tzinfo=UTC)
MANY = 100
PARTITIONS = 10


def named(*names: str) -> list[Stream]:
    return [replace(make_stream(name), name=name) for name in names]


class FakeCountingTopics:
    """Topics of ten partitions, with a count of each request."""

    def __init__(self, names: Collection[str]) -> None:
        self.ends = {name: dict.fromkeys(range(PARTITIONS), 5) for name in names}
        self.asked: Counter[str] = Counter()
        self.epoch = 1
        self.denied = frozenset[str]()

    def list_topic_names(self) -> list[str]:
        return [*self.ends]

    def read_topic_state(self, topic: str) -> TopicState:
        self.asked["topic_state"] += 1
        if topic in self.denied:
            raise ConfigurationError(f"topic {topic} may not be used by this user", remedy="allow it")
        if topic not in self.ends:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        return self._state(topic)

    def read_topic_states(self, topics: Collection[str]) -> TopicStates:
        self.asked["topic_states"] += 1
        found = {topic: self._state(topic) for topic in topics if topic in self.ends}
        return TopicStates(found, self.denied & {*topics})

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **__: Any) -> Iterator[Any]:
        self.asked["read"] += 1
        return iter([])

    def read_offsets_at(self, *_: object) -> dict[int, int]:
        return {}

    def get_admin(self) -> Any:
        raise DependencyUnavailableError("settings are not known", remedy="none")

    def _state(self, topic: str) -> TopicState:
        seen = {p: PartitionState(0, at, at, 1, self.epoch) for p, at in self.ends[topic].items()}
        return TopicState(topic, f"ID of {topic}", seen)


class Deployment:
    """Streams on a cluster, whose sensors are ticked as the daemon does: keys, events and the cursor are kept."""

    def __init__(
        self,
        root: Path,
        instance: dg.DagsterInstance,
        streams: Sequence[Stream],
        files: Declarations | None = None,
        kafka: FakeCountingTopics | None = None,
    ) -> None:
        self.instance, self.streams = instance, streams
        self.ledger = Ledger(f"sqlite:///{root / 'ledger.sqlite'}")
        self.kafka = kafka or FakeCountingTopics([stream.topic for stream in streams])
        self.lake = Lake(str(root / "lake"))
        self.cursors: dict[str, str | None] = {}
        resources = {"ledger": self.ledger, "kafka": self.kafka, "lake": self.lake}
        opened = {name: SimpleNamespace(open=lambda one=one: one) for name, one in resources.items()}
        self.defs = build_defs(streams=files or streams, resources=opened)

    def tick(self, name: str) -> Any:
        sensor = self.defs.get_repository_def().get_sensor_def(name)
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursors.get(name), resources=self.defs.resources
        ) as context:
            result = sensor.evaluate_tick(context)
        self.cursors[name] = result.cursor
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
        for one in result.asset_events:
            self.instance.report_runless_asset_event(one)
        return result

    def queries(self) -> Counter[str]:
        """Counts the ledger's statements from now on, by their first word."""
        counts: Counter[str] = Counter()

        def count(_: Any, __: Any, statement: str, *___: Any) -> None:
            counts[statement.split(maxsplit=1)[0]] += 1

        event.listen(self.ledger.database.engine, "before_cursor_execute", count)
        return counts


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Deployment]]:
    # On a machine that hangs a tick takes longer, and the instance is recorded again.
    monkeypatch.setattr(sensors, "BUDGET_SECONDS", 3_600.0)
    monkeypatch.setattr("highwater.resources.ledger.instances.WRITE_EVERY", timedelta(hours=1))
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:

        def make(many: int = MANY, **changes: Any) -> Deployment:
            names = [f"s{n:03d}" for n in range(many)]
            return Deployment(tmp_path, instance, [replace(one, **changes) for one in named(*names)])

        yield make


def keys_of(result: Any) -> dict[str, list[str]]:
    return {one.partitions_def_name: [*one.partition_keys] for one in result.dynamic_partitions_requests or []}


def test_a_stream_with_a_fault_is_skipped_and_the_others_are_planned_in_the_same_tick(
    deployed: Callable[..., Deployment],
) -> None:
    """A tick that raises hands on nothing: one absent topic would have stopped all streams."""
    ours = deployed()
    del ours.kafka.ends["s042"]
    result = ours.tick("planner")
    healthy = [stream for stream in ours.streams if stream.name != "s042"]
    assert keys_of(result) == {one.partitions_name: [f"{one.topic}@0000000"] for one in healthy}
    assert Counter(one.job_name for one in result.run_requests) == Counter(f"{one.name}_slice" for one in healthy)
    [fault] = ours.ledger.sensor_faults.list_all()
    assert (fault.stream, fault.sensor, fault.remedy) == ("s042", "planner", "create it")
    status = read_stream_status(ours.ledger, ours.kafka, ours.streams[42], {})  # type: ignore[arg-type]
    assert any("sensor planner skips s042 since" in line for line in status.lines)
    assert [one["sensor"] for one in status.to_plain()["sensor_faults"]] == ["planner"]
    later = fault.since + timedelta(minutes=2)
    over = [one for one in measure_skipped_streams(ours.ledger, ours.streams, ["planner", "repair"], later) if one.over]
    assert [(one.stream, one.what, one.remedy) for one in over] == [("s042", "sensor planner", "create it")]
    ours.kafka.ends["s042"] = dict.fromkeys(range(PARTITIONS), 5)
    assert keys_of(ours.tick("planner")) == {"s042_slices": ["s042@0000000"]}
    assert ours.ledger.sensor_faults.list_all() == [], "the fault ends with the first tick that serves the stream"


def test_another_system_s_topic_that_may_not_be_described_is_a_fault(deployed: Callable[..., Deployment]) -> None:
    """It was taken for one that does not exist yet, and no fault was recorded."""
    ours = deployed(2, foreign=(Foreign("legacy.DLT", timedelta(minutes=1)),))
    ours.tick("planner")
    ours.tick("dlq_retries")
    assert ours.ledger.sensor_faults.list_all() == [], "one that is not there yet is none"
    ours.kafka.denied = frozenset({"legacy.DLT", ours.streams[0].tier_topics[0]})
    ours.tick("dlq_retries")
    faults = ours.ledger.sensor_faults.list_all()
    assert [(one.stream, one.sensor, one.remedy) for one in faults] == [
        (stream.name, "dlq_retries", "allow it") for stream in ours.streams
    ]


def test_a_stream_file_with_a_fault_is_recorded_and_the_other_streams_are_planned(
    tmp_path: Path, deployed: Callable[..., Deployment]
) -> None:
    """It stopped the whole code location: no sensor ticked for any stream."""
    plain = deployed(2)
    folder = tmp_path / "streams"
    broken = folder / "broken.py"
    wrong = DeclarationError("broken.py cannot be read as a declaration", remedy="fix the file")
    streams = {one.name: one for one in plain.streams}
    of_broken = Declarations(folder, streams, {broken: wrong})
    ours = Deployment(tmp_path, plain.instance, plain.streams, of_broken)
    result = ours.tick("planner")
    assert keys_of(result) == {f"{name}_slices": [f"{one.topic}@0000000"] for name, one in streams.items()}
    [fault] = ours.ledger.sensor_faults.list_all()
    assert (fault.stream, fault.sensor, fault.remedy) == (str(broken), "planner", "fix the file")
    alert = measure_stream_files(of_broken)
    assert (alert.over, str(broken) in str(alert.value)) == (True, True)
    elsewhere = Declarations(tmp_path / "other", streams)
    Deployment(tmp_path, plain.instance, plain.streams, elsewhere).tick("planner")
    assert ours.ledger.sensor_faults.list_all() == [fault], "another project knows nothing of this file"
    fixed = Declarations(folder, streams)
    Deployment(tmp_path, plain.instance, plain.streams, fixed).tick("planner")
    assert ours.ledger.sensor_faults.list_all() == []
    assert not measure_stream_files(fixed).over


def test_a_defect_that_one_stream_meets_is_recorded_without_secrets(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", '{"sasl.password": "swordfish"}')
    ours, state = deployed(3), FakeCountingTopics._state

    def damaged(self: FakeCountingTopics, topic: str) -> TopicState:
        found = state(self, topic)
        broken: Any = {0: "swordfish"}
        return replace(found, partitions=broken) if topic == "s001" else found

    monkeypatch.setattr(FakeCountingTopics, "_state", damaged)
    monkeypatch.setattr("highwater.orchestration.sensing.planning_rounds.is_caught_up", lambda *_: False)
    result = ours.tick("planner")
    assert sorted(keys_of(result)) == ["s000_slices", "s002_slices"]
    [fault] = ours.ledger.sensor_faults.list_all()
    assert fault.problem.startswith("AttributeError")
    assert "swordfish" not in f"{fault}{result}"


def test_an_idle_tick_of_a_hundred_streams_asks_little_and_writes_nothing(
    deployed: Callable[..., Deployment],
) -> None:
    ours = deployed()
    for name in ("planner", "dlq_retries"):
        ours.tick(name)
    ours.tick("planner")
    ours.kafka.asked.clear()
    counts = ours.queries()
    for name in ("planner", "dlq_retries"):
        before = dict(counts)
        result = ours.tick(name)
        assert result.skip_message == f"{MANY} streams: nothing to do"
        assert not result.asset_events
        made = Counter(counts) - Counter(before)
        assert made["SELECT"] <= 12, made
        assert not {"INSERT", "UPDATE", "DELETE"} & {*made}
    assert ours.kafka.asked == {"topic_states": 2}


def test_a_stream_with_new_records_is_planned_among_idle_ones(deployed: Callable[..., Deployment]) -> None:
    ours = deployed(20)
    ours.tick("planner")
    ours.kafka.ends["s007"][3] = 9
    result = ours.tick("planner")
    assert keys_of(result) == {"s007_slices": ["s007@0000001"]}
    assert [request.job_name for request in result.run_requests] == ["s007_slice"]
    assert ours.ledger.read_last_slice("s007", "s007").ranges[3] == OffsetRange(5, 9)


def test_topics_are_compared_with_their_plan_once_after_an_election(deployed: Callable[..., Deployment]) -> None:
    """After a restart of the brokers a topic that nobody writes to would be read in every tick."""
    ours = deployed(3)
    ours.tick("planner")
    ours.tick("planner")
    reads = []
    for epoch in (1, 2, 2, 3, 3):
        ours.kafka.epoch = epoch
        before = ours.kafka.asked["read"]
        ours.tick("planner")
        reads.append(ours.kafka.asked["read"] > before)
    assert reads == [False, True, False, True, False]


def test_the_lag_of_a_topic_is_observed_while_something_waits_and_once_after(
    deployed: Callable[..., Deployment],
) -> None:
    ours = deployed(1, limits=Limits(slices_per_tick=1, max_offsets=10))
    ours.kafka.ends["s000"] = dict.fromkeys(range(PARTITIONS), 2)

    def lags() -> list[Any]:
        return [one.metadata["lag"].value for one in ours.tick("planner").asset_events]

    assert lags() == [10]
    assert lags() == [0]
    assert (lags(), lags()) == ([], []), "an idle topic costs no write"
    ours.kafka.ends["s000"][0] = 1
    assert (len(lags()), len(lags())) == (1, 0), "once a minute while a partition is left out"
    ours.kafka.ends["s000"][0] = 2
    assert (lags(), lags()) == ([0], [])


def test_keys_that_a_tick_planned_and_did_not_add_are_added_by_the_next(deployed: Callable[..., Deployment]) -> None:
    """The topic holds what is planned of it, so it looks idle."""
    ours = deployed(3)
    sensor = ours.defs.get_repository_def().get_sensor_def("planner")
    with dg.build_sensor_context(instance=ours.instance, resources=ours.defs.resources) as context:
        sensor.evaluate_tick(context)
    assert keys_of(ours.tick("planner")) == {f"s00{n}_slices": [f"s00{n}@0000000"] for n in range(3)}
    assert keys_of(ours.tick("planner")) == {}


def test_one_tick_requests_a_bounded_number_of_runs_and_the_next_ones_the_rest(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensors, "MAX_RUNS", 8)
    ours = deployed(4, limits=Limits(max_offsets=10, slices_per_run=1))
    ours.kafka.ends["s000"] = dict.fromkeys(range(PARTITIONS), 20)
    requests = ours.tick("planner").run_requests
    first = Counter(one.job_name for one in requests)
    places = [one.tags.get("dagster/priority") for one in requests if one.job_name == "s000_slice"]
    assert places == [None, "-1"], "the second waits for its turn"
    assert sum(first.values()) == 8
    assert set(first.values()) == {2}, "each stream has the same share"
    asked = first
    while more := Counter(one.job_name for one in ours.tick("planner").run_requests):
        asked += more
    assert asked == {"s000_slice": 20, "s001_slice": 5, "s002_slice": 5, "s003_slice": 5}
    for stream in ours.streams:
        keys = [slice_.key for slice_ in ours.ledger.list_slices(stream.name)]
        assert list(ours.instance.get_dynamic_partitions(stream.partitions_name)) == keys


@pytest.mark.parametrize(
    ("sensor", "stops"),
    [
        ("planner", {PLANNER, ALL}),
        ("dlq_retries", {RETRIES, ALL}),
        ("publisher", {PUBLISHER, ALL}),
        ("repair", {ALL}),
        ("offset_mirror", set[str]()),
    ],
)
def test_a_pause_stops_the_sensors_of_its_part_alone(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, sensor: str, stops: set[str]
) -> None:
    parts = dict(zip(("s000", "s001", "s002", "s003"), (PLANNER, RETRIES, PUBLISHER, ALL), strict=True))
    streams = [replace(one, publishes=Accepted(f"{one.name}.accepted")) for one in named(*parts, "s004")]
    ours, visited, visit_all = Deployment(tmp_path, instance, streams), set[str](), rounds.visit_all

    def record_visits(round_: Any, streams: Sequence[Stream], *rest: Any) -> Any:
        visited.update(stream.name for stream in streams)
        return visit_all(round_, streams, *rest)

    monkeypatch.setattr(sensors, "visit_all", record_visits)
    for name, part in parts.items():
        ours.ledger.paused.pause_part(name, part, Pause("", NOW, "ann", f"no {part}"))
    ours.tick(sensor)
    message = ours.tick(sensor).skip_message or ""
    stopped = {name for name, part in parts.items() if part in stops}
    assert visited == {stream.name for stream in ours.streams} - stopped
    assert all((f"no {part}" in message) == (part in stops) for part in parts.values()), message


def test_streams_take_turns_at_the_room_in_the_queue(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the others wait unplanned, so each run takes all that came until its turn."""
    monkeypatch.setattr(planning_rounds, "read_queue", lambda *_: RunQueue({"s001": 1}, 2))
    ours = deployed(5)
    turns = [[one.job_name for one in ours.tick("planner").run_requests] for _ in range(2)]
    assert turns == [["s000_slice", "s002_slice"], ["s003_slice", "s004_slice"]]
    assert [one.name for one in ours.streams if not ours.ledger.list_slices(one.name)] == ["s001"]
    again = ours.tick("planner")
    assert (again.run_requests, again.asset_events) == ([], []), "it was observed a moment ago"
    monkeypatch.setattr(planning_rounds, "read_queue", lambda *_: RunQueue({}, 2))
    assert [one.job_name for one in ours.tick("planner").run_requests] == ["s001_slice"]


def test_streams_whose_runs_all_waited_are_first_in_the_next_tick(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more busy streams than runs of a tick, each tick began one stream further, and the others waited."""
    monkeypatch.setattr(sensors, "MAX_RUNS", 2)
    ours = deployed(5)
    asked = []
    for _ in range(3):
        asked.append([one.job_name for one in ours.tick("planner").run_requests])
        for ends in ours.kafka.ends.values():
            ends[0] += 1
    assert asked == [["s000_slice", "s001_slice"], ["s002_slice", "s003_slice"], ["s004_slice", "s000_slice"]]


def test_a_paused_stream_is_skipped_and_the_others_are_planned(deployed: Callable[..., Deployment]) -> None:
    ours = deployed(4)
    ours.ledger.paused.pause_part("s001", PLANNER, Pause("", NOW, "ann", "a test"))
    ours.ledger.paused.pause_part("s002", ALL, Pause("", NOW, "bob"))
    ours.ledger.paused.pause_part("s003", RETRIES, Pause("", NOW, "eve"))
    assert sorted(keys_of(ours.tick("planner"))) == ["s000_slices", "s003_slices"]
    message = ours.tick("planner").skip_message
    assert "the planner of s001 is paused by ann since 2026-03-01 00:00 UTC: a test" in message
    assert "stream s002 is paused by bob" in message
    assert "eve" not in message
    status = read_stream_status(ours.ledger, ours.kafka, ours.streams[1], {})  # type: ignore[arg-type]
    assert any(line.endswith("a test, highwater resume s001 planner") for line in status.lines)
    assert [*status.to_plain()["paused"]] == ["planner"]
    ours.ledger.paused.resume_part("s001", PLANNER)
    ours.ledger.paused.resume_part("s002", ALL)
    assert sorted(keys_of(ours.tick("planner"))) == ["s001_slices", "s002_slices"]


def test_a_pause_ends_the_fault_of_a_stream(deployed: Callable[..., Deployment]) -> None:
    ours = deployed(2)
    del ours.kafka.ends["s000"]
    ours.tick("planner")
    assert ours.ledger.sensor_faults.list_all()
    ours.ledger.paused.pause_part("s000", ALL, Pause("", NOW, "ann"))
    ours.tick("planner")
    assert ours.ledger.sensor_faults.list_all() == []


def test_kafka_that_is_unavailable_is_no_empty_topic(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I15: the tick skips with the reason, and leaves the cursor as it is."""
    ours = deployed(3)
    ours.cursors["planner"] = Cursor("s001").to_json()

    def unavailable(*_: object) -> None:
        raise DependencyUnavailableError("Kafka did not answer", remedy="wait")

    monkeypatch.setattr(ours.kafka, "read_topic_states", unavailable)
    result = ours.tick("planner")
    assert "Kafka did not answer" in result.skip_message
    assert Cursor.parse(result.cursor).begin == "s001"
    assert ours.ledger.sensor_faults.list_all() == []


class FakeHungTopics(FakeCountingTopics):
    """Topics, one of them on a broker that hangs: its records are waited for by a real client."""

    hung: str | None = "accepted"

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **more: Any) -> Iterator[Any]:
        if topic != self.hung:
            return
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            yield from Kafka(f"127.0.0.1:{listening.getsockname()[1]}").read(topic, ranges, **more)


def test_a_visit_that_would_outlast_its_tick_is_cut_and_the_other_streams_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan of a stream that publishes waited 45 s for records.

    Dagster ended the tick, and the next one began with the same stream.
    """
    monkeypatch.setattr(sensors, "BUDGET_SECONDS", 1.0)
    monkeypatch.setattr(sensors, "LIMIT_SECONDS", 2.0)
    streams = named("s000", "s001", "s002")
    streams[0] = replace(streams[0], publishes=Accepted("accepted"))
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        kafka = FakeHungTopics([*(stream.topic for stream in streams), "accepted"])
        ours = Deployment(tmp_path, instance, streams, kafka=kafka)
        found = dict[str, list[str]]()
        messages = []
        for _ in range(3):
            began = time.monotonic()
            result = ours.tick("planner")
            messages.append(result.skip_message)
            found |= keys_of(result)
            assert time.monotonic() - began < 15
        assert sorted(found) == ["s001_slices", "s002_slices"]
        assert "the time of this tick is over" in messages[0]
        assert "2 streams are left to the next tick, from s001 on" in messages[0]
        assert ours.ledger.sensor_faults.list_all() == []
        assert not ours.ledger.breakers.list_dependencies(), "no broker is blamed for the time of a tick"
        kafka.hung = None
        while "s000_slices" not in found:
            found |= keys_of(ours.tick("planner"))


def test_the_sensor_of_alerts_has_the_same_limit(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def measure(*_: object, **__: object) -> None:
        waits.append(limit_wait(1_000.0))
        raise DependencyUnavailableError("Kafka did not answer", remedy="wait")

    monkeypatch.setattr(alerts, "tick", measure)
    deployed(1).tick("alerts")
    assert [wait <= rounds.LIMIT_SECONDS for wait in waits] == [True]


def test_an_idle_stream_rests_until_something_changes(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, looked = deployed(3), list[str]()
    monkeypatch.setattr(resting_rounds, "random", SimpleNamespace(uniform=lambda *_: 1.0))

    def look(_: object, __: object, stream: Stream, cursor: str | None) -> Tick:
        del cursor
        looked.append(stream.name)
        return Tick(idle=stream.name != "s002")

    monkeypatch.setattr(resting_rounds, "repair", look)

    def visited() -> list[str]:
        looked.clear()
        ours.tick("repair")
        return sorted(looked)

    everything = ["s000", "s001", "s002"]
    assert visited() == everything
    assert visited() == ["s002"], "what is not idle is looked at in every tick"
    ours.tick("planner")
    assert visited() == everything, "slices were planned"
    assert visited() == ["s002"]
    ours.cursors["repair"] = end_rest(ours, "s000", "s001")
    assert visited() == everything
    assert find_rest(ours, "s001") == resting_rounds.REST
    streams = Cursor.parse(ours.cursors["repair"]).streams
    rest, ahead = resting_rounds.RestingStream.parse(streams["s000"]), timedelta(hours=1)
    assert rest is not None
    moved = replace(rest, since=rest.since + ahead, until=rest.until + ahead).to_cursor()
    ours.cursors["repair"] = Cursor(streams={**streams, "s000": moved}).to_json()
    assert visited() == ["s000", "s002"], "the clock was set back by an hour since the rest began"
    for ended in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED):
        begun = dg.DagsterRun("s001_slice", tags={"highwater/stream": "s001"}, status=dg.DagsterRunStatus.STARTED)
        ours.instance.add_run(begun)
        assert visited() == ["s002"], "a run that begins says nothing of its slices"
        ours.instance.add_run(dg.DagsterRun("s001_slice", tags={"highwater/stream": "s001"}, status=ended))
        assert visited() == ["s001", "s002"], "a run ended"
        assert visited() == ["s002"]
        assert find_rest(ours, "s001") == timedelta(minutes=1), "what follows from an end comes seconds later"
    ours.cursors["repair"] = end_rest(ours, "s001")
    assert visited() == ["s001", "s002"]
    assert find_rest(ours, "s001") == resting_rounds.REST
    long_ago = resting_rounds.RestingStream(NOW, NOW + resting_rounds.REST, "").to_cursor()
    ours.cursors["repair"] = Cursor(streams={"s000": long_ago}).to_json()
    assert visited() == everything, "the rest is over"


def find_rest(deployment: Deployment, stream: str, sensor: str = "repair") -> timedelta | None:
    rest = resting_rounds.RestingStream.parse(cursor_of(deployment, sensor).get(stream))
    return None if rest is None else rest.until - rest.since


def end_rest(deployment: Deployment, *names: str) -> str:
    """The cursor of repair after the rests of these streams."""
    streams = {**cursor_of(deployment, "repair")}
    for name in names:
        rest = resting_rounds.RestingStream.parse(streams[name])
        assert rest is not None
        streams[name] = replace(rest, until=rest.since - timedelta(seconds=1)).to_cursor()
    return Cursor(streams=streams).to_json()


def test_a_look_goes_on_after_a_rest_where_it_was(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more slices than a page each rest began with the first page again."""
    ours, places = deployed(1), list[str | None]()

    def look(_: object, __: object, ___: object, cursor: str | None) -> Tick:
        places.append(cursor)
        return Tick(cursor=f"s000@000000{len(places)}", until=datetime.now(UTC) + timedelta(minutes=1))

    monkeypatch.setattr(resting_rounds, "repair", look)
    for _ in range(3):
        ours.tick("repair")
        ours.cursors["repair"] = end_rest(ours, "s000")
    assert places == [None, "s000@0000001", "s000@0000002"]


def test_a_stream_whose_visits_fail_does_not_keep_the_others_awake(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest of long ago made all runs since then be read, which were too many."""
    ours, seen = deployed(2), list[datetime | None]()

    def read(_: object, since: datetime | None) -> dict[str, str]:
        seen.append(since)
        return {}

    monkeypatch.setattr(resting_rounds, "_read_last_ends", read)
    long_ago = resting_rounds.RestingStream(NOW, NOW + resting_rounds.REST, "").to_cursor()
    ours.cursors["repair"] = Cursor(streams={"s000": long_ago}).to_json()
    ours.tick("repair")
    assert seen == [None]


@pytest.mark.parametrize("sensor", ["repair", "offset_mirror"])
def test_a_stream_that_waits_for_its_runs_rests_for_as_long_as_its_look_allows(
    sensor: str, deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, looked = deployed(3), list[str]()
    untils = {"s000": timedelta(seconds=40), "s001": timedelta(seconds=-2)}

    def look(*given: Any) -> Tick:
        [stream] = [one for one in given if isinstance(one, Stream)]
        looked.append(stream.name)
        until = untils.get(stream.name)
        return Tick(lines=["1 being worked on"], until=None if until is None else datetime.now(UTC) + until)

    monkeypatch.setattr(resting_rounds, {"repair": "repair", "offset_mirror": "mirror"}[sensor], look)
    ours.tick(sensor)
    looked.clear()
    ours.tick(sensor)
    assert sorted(looked) == ["s001", "s002"]
    rest = find_rest(ours, "s000", sensor)
    assert rest is not None
    assert timedelta(seconds=38) <= rest <= timedelta(seconds=50), "it is no longer by chance"


def test_alerts_measure_a_stream_again_by_what_they_found(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, measured = deployed(3), list[str]()

    def measure(*_: object, resting: Collection[str], **__: object) -> alerts.TickResult:
        measured[:] = sorted({"s000", "s001", "s002"} - {*resting})
        return alerts.TickResult([], calm=["s000"], alerting=["s001"])

    monkeypatch.setattr(alerts, "tick", measure)
    monkeypatch.setattr(resting_rounds, "random", SimpleNamespace(uniform=lambda *_: 1.0))
    ours.tick("alerts")
    assert [find_rest(ours, name, "alerts") for name in ("s000", "s001", "s002")] == [
        timedelta(minutes=1),
        timedelta(minutes=1),
        None,
    ]
    ours.tick("alerts")
    assert measured == ["s002"], "it could not be measured whole"
    monkeypatch.setattr(resting_rounds, "CLOCKS", timedelta(hours=1))
    ours.cursors["alerts"] = None
    ours.tick("alerts")
    assert [find_rest(ours, name, "alerts") for name in ("s000", "s001")] == [sensors.ALERT_REST, sensors.ALERTING_REST]


def cursor_of(deployment: Deployment, sensor: str) -> Mapping[str, str]:
    return Cursor.parse(deployment.cursors[sensor]).streams


def test_streams_that_rest_together_wake_up_apart(
    deployed: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, drawn = deployed(3), iter([1.0] * 3)
    monkeypatch.setattr(resting_rounds, "repair", lambda *_: Tick(idle=True))
    draw = SimpleNamespace(uniform=lambda low, high: min(max(next(drawn), low), high))
    monkeypatch.setattr(resting_rounds, "random", draw)
    ours.tick("repair")
    drawn = iter([0.75, 1.0, 1.25])
    ours.cursors["repair"] = end_rest(ours, "s000", "s001", "s002")
    ours.tick("repair")
    rests = map(resting_rounds.RestingStream.parse, cursor_of(ours, "repair").values())
    assert sorted(rest.until - rest.since for rest in rests if rest is not None) == [
        resting_rounds.REST * share for share in (0.75, 1.0, 1.25)
    ]


def test_a_rest_that_cannot_be_read_is_none() -> None:
    rest = resting_rounds.RestingStream(NOW, NOW + resting_rounds.REST, "abc", "def", "orders@0000001")
    assert resting_rounds.RestingStream.parse(rest.to_cursor()) == rest
    for text in (
        None,
        "",
        "orders@0000001",
        "oldest",
        "rest",
        "rest 1 2",
        "rest 1 2 c 0",
        "rest a b c 0 -",
        "wait 1 2 c 0 -",
        f"rest {10**30} 2 c 0 -",
    ):
        assert resting_rounds.RestingStream.parse(text) is None
