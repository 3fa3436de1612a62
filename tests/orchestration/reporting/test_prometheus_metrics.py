"""Metrics: the numbers of a scene whose every record is known, and what is left out when something is unavailable."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from prometheus_client import parser as older

from dev.processes import LOOPBACK, free_port
from highwater.alerting import DEPLOYMENT, Alert
from highwater.declaration import Severity, Stream
from highwater.errors import DependencyUnavailableError, PermanentError, TopicAbsentError
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.orchestration.reporting import prometheus_metrics
from highwater.orchestration.reporting.prometheus_metrics import FAMILIES, MetricSamples, measure
from highwater.plans import Generation, Loss
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.database import Database
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.helpers.prometheus_text import read
from tests.helpers.written_tables import PARKED, STREAM, TIER, Written

NOW = datetime(2026, 3, 1, tzinfo=UTC)
TOPIC_ID = "A" * 22
# They differ from one measuring to the next.
COLLECTION = {"highwater_collection_duration_seconds", "highwater_collection_timestamp_seconds"}


def a_slice(topic: str, ordinal: int, start: int, end: int) -> Slice:
    return Slice("orders", topic, TOPIC_ID, 0, ordinal, {0: OffsetRange(start, end)}, NOW)


FIRST, SECOND, THIRD = (a_slice("orders", n, 10 * n, 10 * n + 10) for n in range(3))
RETRIED = a_slice(TIER, 0, 0, 2)


@dataclass
class FakeBroker:
    """A test double of the network: topics by name, and the age of what they hold."""

    topics: Mapping[str, TopicState] = field(default_factory=dict)
    age: timedelta = timedelta(0)
    unavailable: bool = False

    def read_topic_state(self, topic: str) -> TopicState:
        if self.unavailable:
            raise DependencyUnavailableError("Kafka did not answer", remedy="check that it runs")
        if topic not in self.topics:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        return self.topics[topic]

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **_: object) -> Iterator[Any]:
        assert topic in self.topics

        @dataclass
        class FakeAgedMessage:
            at: int

            def partition(self) -> int:
                return self.at

            def timestamp(self) -> tuple[int, int]:
                return 1, round((datetime.now(UTC) - age).timestamp() * 1000)

        age = self.age
        return (FakeAgedMessage(partition) for partition, offsets in ranges.items() if len(offsets))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Three slices, the first and the third of them whole; of their records one was retried, one is parked."""
    made = Written(tmp_path)
    for topic, starts in {"orders": {0: 0, 1: 0}, TIER: {0: 0}}.items():
        made.ledger.topics.open_generation(Generation("orders", topic, TOPIC_ID, 0, {**starts}, NOW))
    for slice_ in (FIRST, SECOND, THIRD, RETRIED):
        assert made.ledger.add([slice_], seen=made.ledger.topics.read_planned_topic("orders", slice_.topic).generation)
    made.prove(FIRST, {"raw": 10, "events": 7, "rejects": 2, "dlq": 2, "current": 7}, tombstones=1)
    made.add("events", FIRST, range(7))
    made.add("rejects", FIRST, [8], next_topic=TIER)
    made.add("rejects", FIRST, [9], next_topic=PARKED)
    made.add("dlq", FIRST, [8, 9])
    made.prove(SECOND, {"raw": 10})
    made.prove(THIRD, {"raw": 10, "events": 10, "rejects": 0, "current": 10})
    made.add("events", THIRD, range(20, 30))
    made.prove(RETRIED, {"raw": 1, "events": 1, "rejects": 0, "current": 1})
    made.add("events", RETRIED, [8], retries=1)
    made.write()
    made.ledger.record_loss([Loss("orders", "orders", 0, 1, OffsetRange(0, 5), "expired", "ann", NOW)])
    made.ledger.alerts.record(
        {
            ("orders", "parked records"): Alert("orders", "parked records", "7", "5", "look", since=NOW),
            (DEPLOYMENT, "c"): Alert(DEPLOYMENT, "circuit breaker of Kafka", "open", "closed", "start it", since=NOW),
            ("orders", "reject ratio"): Alert("orders", "reject ratio", "7", "5", "look", since=NOW, ended=NOW),
        }
    )
    return made


def broker(**changes: Any) -> FakeBroker:
    main = TopicState(
        "orders",
        TOPIC_ID,
        {0: PartitionState(0, 37, 40, 1), 1: PartitionState(9, 9, 9, 1), 2: PartitionState(*[None] * 4)},
    )
    tier = TopicState(TIER, TOPIC_ID, {0: PartitionState(0, 2, 2, 1)})
    return FakeBroker({"orders": main, TIER: tier}, timedelta(seconds=100), **changes)


@contextmanager
def dagster(*results: tuple[str, bool]) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        for number, (name, passed) in enumerate(results):
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey(["orders", "events"]),
                    check_name=name,
                    passed=passed,
                    partition=f"orders@{number:07}",
                )
            )
        yield instance


def nobody() -> AbstractContextManager[None]:
    return nullcontext(None)


def asked(ledger: Ledger, kafka: Any, lake: Lake, opened: Any = nobody) -> MetricSamples:
    return measure(ledger, kafka, lake, [STREAM], opened)


def test_the_numbers_are_those_of_the_scene(written: Written) -> None:
    results = [("offsets_accounted_for", True), ("offsets_accounted_for", False), ("versions_along_offsets", True)]
    found = read(asked(written.ledger, broker(), written.lake, lambda: dagster(*results)).text)
    p0, p1, t0 = ("orders", "orders", "0"), ("orders", "orders", "1"), ("orders", TIER, "0")
    age = found["highwater_oldest_unread_age_seconds"].pop(p0)
    assert 99 < age < 160
    assert 99 < found["highwater_held_back_age_seconds"].pop(p0) < 160
    [taken] = found.pop("highwater_collection_duration_seconds").values()
    [at] = found.pop("highwater_collection_timestamp_seconds").values()
    assert 0 < taken < 120
    assert 0 <= time.time() - at < 120
    late = STREAM.tier_topics[1]
    # The stream publishes and measures nothing, so nobody looks at what it published or measured.
    there = STREAM.checks.keys() - {"events_published", "metrics_follow_events"}
    erring = [name for name in there if STREAM.find_severity(name) is not Severity.WARN]
    assert found == {
        "highwater_up": {("ledger",): 1, ("kafka",): 1, ("lake",): 1, ("dagster",): 1},
        "highwater_planned_end_offset": {p0: 30, p1: 5, t0: 2},
        # The third slice is whole, and after one that is not.
        "highwater_committed_end_offset": {p0: 10, p1: 0, t0: 2},
        "highwater_last_stable_offset": {p0: 37, p1: 9, t0: 2},
        # Up to the high watermark, and three of them after a transaction.
        "highwater_lag_records": {p0: 10, p1: 4, t0: 0},
        "highwater_held_back_offsets": {p0: 3, p1: 0, t0: 0},
        "highwater_held_back_age_seconds": {},
        "highwater_oldest_unread_age_seconds": {},
        "highwater_slices": {("orders", "orders"): 3, ("orders", TIER): 1, ("orders", late): 0},
        "highwater_slices_incomplete": {("orders", "orders"): 1, ("orders", TIER): 0, ("orders", late): 0},
        # Nothing is called lost while a partition has no leader.
        "highwater_stopped": {},
        "highwater_origins": {
            ("orders", "accepted", ""): 18,
            ("orders", "tombstone", ""): 1,
            ("orders", "waiting", TIER): 0,
            ("orders", "waiting", late): 0,
            ("orders", "stranded", TIER): 0,
            ("orders", "stranded", late): 0,
            ("orders", "parked", PARKED): 1,
            ("orders", "discarded", ""): 0,
            ("orders", "reclaimed", ""): 0,
            ("orders", "rejected", ""): 0,
            ("orders", "undecided", ""): 10,
        },
        "highwater_origins_produced": {("orders",): 30},
        "highwater_origins_twice": {("orders",): 0},
        "highwater_held_slices": {("orders",): 0},
        "highwater_held_records": {("orders",): 0},
        "highwater_losses": {p1: 1},
        "highwater_lost_offsets": {p1: 5},
        "highwater_alerts_open": {("orders",): 1, (DEPLOYMENT,): 1},
        "highwater_alert_since_timestamp_seconds": {
            ("orders", "parked records"): NOW.timestamp(),
            (DEPLOYMENT, "circuit breaker of Kafka"): NOW.timestamp(),
        },
        "highwater_failing_check_slices": {
            **{("orders", name): 0 for name in erring},
            ("orders", "offsets_accounted_for"): 1,
        },
        # An instance in memory has neither daemons nor ticks.
        "highwater_daemon_heartbeat_timestamp_seconds": {},
        "highwater_sensor_tick_timestamp_seconds": {},
        "highwater_stream_measured": {("orders",): 1},
    }
    led = broker()
    led.topics = {**led.topics, "orders": replace(led.topics["orders"], partitions={1: PartitionState(9, 9, 9, 1)})}
    stopped = read(asked(written.ledger, led, written.lake).text)["highwater_stopped"]
    assert stopped == {
        ("orders", "orders", "OffsetsExpiredError"): 1,
        ("orders", "orders", "PartitionsRemovedError"): 1,
    }
    counted = found["highwater_origins"]
    assert sum(counted.values()) == found["highwater_origins_produced"]["orders",]


# What rests on what: a family without its dependency has no sample, and never a 0.
OF_KAFKA = {
    "highwater_last_stable_offset",
    "highwater_lag_records",
    "highwater_oldest_unread_age_seconds",
    "highwater_held_back_offsets",
    "highwater_held_back_age_seconds",
}
OF_LAKE = {
    "highwater_committed_end_offset",
    "highwater_slices_incomplete",
    "highwater_origins",
    "highwater_origins_produced",
    "highwater_origins_twice",
}


def test_without_kafka_the_plan_and_the_tables_are_reported(written: Written) -> None:
    unavailable = broker(unavailable=True)
    found = asked(written.ledger, unavailable, written.lake)
    numbers, before = read(found.text), read(asked(written.ledger, broker(), written.lake).text)
    assert numbers.pop("highwater_up") == {("ledger",): 1, ("kafka",): 0, ("lake",): 1}
    silent = OF_KAFKA | {"highwater_stopped"}
    assert {name: samples for name, samples in numbers.items() if name in silent} == {name: {} for name in silent}
    assert all(numbers[name] == before[name] for name in numbers if name not in silent | COLLECTION)


def test_without_the_lake_the_plan_and_the_topic_are_reported(written: Written) -> None:
    class FailingLake(Lake):
        def open_stream_table(self, stream: str, table: str) -> Any:
            raise DependencyUnavailableError(f"{stream}/{table} could not be read", remedy="mount it")

    numbers = read(asked(written.ledger, broker(), FailingLake("/nowhere")).text)
    assert numbers["highwater_up"]["lake",] == 0
    assert {name for name in FAMILIES if not numbers[name]} == OF_LAKE | {
        "highwater_failing_check_slices",
        "highwater_daemon_heartbeat_timestamp_seconds",
        "highwater_sensor_tick_timestamp_seconds",
        "highwater_oldest_unread_age_seconds",
        "highwater_held_back_age_seconds",
        "highwater_stopped",
    }
    assert numbers["highwater_lag_records"]["orders", "orders", "0"] == 10


def test_without_the_ledger_nobody_knows_what_is_unread(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole topic would be its lag, were the plan taken for empty."""

    def unavailable(*_: object) -> None:
        raise DependencyUnavailableError("the ledger does not answer", remedy="start it")

    monkeypatch.setattr(Database, "reading", unavailable)
    numbers = read(asked(written.ledger, broker(), written.lake).text)
    assert numbers["highwater_up"] == {("ledger",): 0, ("kafka",): 1, ("lake",): 1}
    known = {"highwater_up", "highwater_last_stable_offset", "highwater_stream_measured"}
    assert {name for name in FAMILIES if numbers[name]} == known | COLLECTION


def test_without_dagsters_database_the_rest_is_reported(written: Written) -> None:
    def broken() -> AbstractContextManager[None]:
        raise OSError("password=hunter2")

    found = asked(written.ledger, broker(), written.lake, broken)
    numbers = read(found.text)
    assert (numbers["highwater_up"]["dagster",], numbers["highwater_failing_check_slices"]) == (0, {})
    assert numbers["highwater_slices"]["orders", "orders"] == 3
    assert "hunter2" not in str(found.unavailable["dagster"])


def test_an_error_of_one_stream_hides_no_number_of_the_others(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permanent error of one stream ended the whole command without a number."""
    other = replace(STREAM, name="others", topic="others")
    holds = prometheus_metrics._measure_holds

    def broken(found: MetricSamples, ledger: Ledger, stream: Stream) -> None:
        if stream.name == "others":
            raise ValueError("hunter2")
        holds(found, ledger, stream)

    monkeypatch.setattr(prometheus_metrics, "_measure_holds", broken)
    kafka: Any = broker()
    found = measure(written.ledger, kafka, written.lake, [other, STREAM], nobody)
    numbers = read(found.text)
    assert numbers["highwater_stream_measured"] == {("others",): 0, ("orders",): 1}
    assert numbers["highwater_slices"]["orders", "orders"] == 3
    assert [type(error) for error in found.errors] == [PermanentError]
    assert "hunter2" not in str(found.errors)


def test_a_ledger_that_cannot_be_used_is_down(written: Written, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    numbers = read(asked(Ledger(f"sqlite:///{tmp_path / 'folder'}"), broker(), written.lake).text)
    assert numbers["highwater_up"] == {("ledger",): 0, ("kafka",): 1, ("lake",): 1}
    assert numbers["highwater_last_stable_offset"]["orders", "orders", "0"] == 37


def test_a_tier_that_is_not_there_yet_has_not_stopped(written: Written) -> None:
    """A main topic that was planned and is absent has."""
    kafka = broker()
    numbers = read(asked(written.ledger, FakeBroker({TIER: kafka.topics[TIER]}), written.lake).text)
    assert numbers["highwater_stopped"] == {("orders", "orders", "TopicVanishedError"): 1}
    assert numbers["highwater_up"]["kafka",] == 1


def test_a_textfile_collector_reads_it_too(written: Written) -> None:
    """Its parser knows the older format, in which the lines that OpenMetrics added are comments."""
    text = asked(written.ledger, broker(), written.lake).text
    families = {family.name: family for family in older.text_string_to_metric_families(text)}
    assert {family.type for family in families.values()} == {"gauge"}
    assert {s.labels["partition"]: s.value for s in families["highwater_lag_records"].samples} == {"0": 7, "1": 4} | {
        "0": 0
    }


def test_the_command_prints_all_it_knows_and_says_what_is_unavailable(tmp_path: Path) -> None:
    environment = {"HIGHWATER_HOME": str(tmp_path), "HIGHWATER_KAFKA_BOOTSTRAP": f"{LOOPBACK}:{free_port()}"}
    reported = CliRunner().invoke(main, ["metrics", "orders"], env=environment)
    assert reported.exit_code == EXIT_TEMPORARY
    assert read(reported.stdout)["highwater_up"] == {("ledger",): 1, ("kafka",): 0, ("lake",): 1}
    assert "did not answer" in reported.stderr
    unknown = CliRunner().invoke(main, ["metrics", "nobody"], env=environment)
    assert (unknown.exit_code, unknown.stdout) == (EXIT_PERMANENT, "")
