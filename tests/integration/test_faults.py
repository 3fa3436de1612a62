"""Bad input: each fault is reported with both values and a remedy, and once its cause is fixed the tables end equal.

Ticks are those of the real sensor, runs those of the real job, statuses those of the real command.
"""

from __future__ import annotations

import json
import sqlite3
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from dev.failing import Failing, failing
from dev.processes import wait_until
from highwater import settings
from highwater.errors import KAFKA, DeclarationError, PermanentError
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.checks import Sources
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.orchestration.sensing.repairing import repair
from highwater.orchestration.sensing.run_requests import RepairRules
from highwater.resources.dependency_guards import COOL_DOWN, FAILURES
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.sensor_faults import SensorFault
from highwater.slices import OffsetRange, Slice
from tests.conftest import create_topic
from tests.helpers.crash_support import PARTITIONS, TABLES, Deployment
from tests.helpers.support import Message, order_message, read_rows, read_topic, send

if TYPE_CHECKING:
    from click.testing import Result
    from dagster._core.definitions.sensor_definition import SensorExecutionData

    from dev.broker import EmbeddedBroker
    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory

pytestmark = pytest.mark.slow

MENDED, PERMANENT, TEMPORARY = 0, 2, 75


@dataclass
class Ours:
    """A deployment whose sensor is ticked, whose job is run and whose command is called by hand."""

    held: Deployment
    instance: dg.DagsterInstance
    defs: dg.Definitions

    @classmethod
    def on(cls, held: Deployment, instance: dg.DagsterInstance) -> Ours:
        return cls(held, instance, build_defs(streams=[held.stream]))

    def tick(self) -> SensorExecutionData:
        """A tick of the planner, as the daemon does it: keys first, then runs, which are left to `run`."""
        sensor = self.defs.get_repository_def().get_sensor_def("planner")
        with dg.build_sensor_context(instance=self.instance, resources=self.defs.resources) as context:
            result = sensor.evaluate_tick(context)
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
        return result

    def fault(self, stream: str = "orders") -> SensorFault | None:
        """Tick the planner; why it skips a stream."""
        self.tick()
        faults = Ledger(f"sqlite:///{self.held.home / 'ledger.sqlite'}").sensor_faults.list_all()
        return next((one for one in faults if (one.stream, one.sensor) == (stream, "planner")), None)

    def run(self, first: str, last: str | None = None, stream: str = "orders") -> dg.ExecuteInProcessResult:
        job = self.defs.resolve_job_def(f"{stream}_slice")
        tags = {RANGE_START: first, RANGE_END: last or first}
        return job.execute_in_process(instance=self.instance, tags=tags, raise_on_error=False)

    def taken(self, result: SensorExecutionData | None = None, stream: str = "orders") -> list[str]:
        """Tick, and run what the tick requests; returns the slices that were planned."""
        result = result or self.tick()
        for request in result.run_requests or []:
            self.took(request.tags[RANGE_START], request.tags[RANGE_END], stream)
        return [key for request in result.dynamic_partitions_requests or [] for key in request.partition_keys]

    def planned(self) -> list[str]:
        """Tick, and leave the runs: what a later run takes together with its own."""
        return [key for request in self.tick().dynamic_partitions_requests or [] for key in request.partition_keys]

    def took(self, first: str, last: str, stream: str = "orders") -> None:
        """Run a range of slices, which ends well."""
        done = self.run(first, last, stream)
        assert done.success, [event for event in done.all_events if event.is_failure]
        assert alarms(done) == []

    def repair(self) -> SensorExecutionData:
        """A tick of repair."""
        sensor = self.defs.get_repository_def().get_sensor_def("repair")
        with dg.build_sensor_context(instance=self.instance, resources=self.defs.resources) as context:
            return sensor.evaluate_tick(context)

    def repaired(self) -> None:
        """A tick of repair, and the runs that it requests."""
        assert self.taken(self.repair()) == [], "no new slices"

    def command(self, *arguments: str) -> Result:
        """The command `highwater`, on a declaration of the test's stream."""
        from click.testing import CliRunner

        from highwater.orchestration.cli.main import main

        folder = self.held.home / "streams"
        folder.mkdir(exist_ok=True)
        (folder / "orders.py").write_text(
            f"from tests.helpers.crash_support import stream_on\nSTREAM = stream_on({self.held.stream.topic!r})\n"
        )
        return CliRunner().invoke(main, ["--declarations", str(folder), *arguments])


def alarms(result: dg.ExecuteInProcessResult) -> list[tuple[str, str | None]]:
    """Checks that say that a table is wrong."""
    found = [
        event.asset_check_evaluation_data
        for event in result.all_events
        if event.event_type_value == "ASSET_CHECK_EVALUATION"
    ]
    return [
        (one.check_name, one.description)
        for one in found
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR
    ]


def failure(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """What Dagster shows of the first step that failed for good: error, problem, stored, found, remedy."""
    event = next(event for event in result.all_events if event.is_step_failure)
    data = event.step_failure_data
    assert data.user_failure_data is not None, data.error
    return {name: str(value.value) for name, value in data.user_failure_data.metadata.items()}


def tried_again(result: dg.ExecuteInProcessResult) -> str:
    """The error of a step that was tried again and came to nothing: a temporary one."""
    assert any(event.event_type_value == "STEP_UP_FOR_RETRY" for event in result.all_events), failure(result)
    return str(next(event for event in result.all_events if event.is_step_failure).step_failure_data.error)


def rows_by_place(held: Deployment) -> dict[tuple[int, int], tuple[bytes | None, bytes | None]]:
    rows = read_rows(str(held.path("raw")))
    assert len({(row["generation"], row["partition"], row["offset"]) for row in rows}) == len(rows)
    return {(row["partition"], row["offset"]): (row["key"], row["value"]) for row in rows}


def ensure_rows(held: Deployment, expected: Mapping[tuple[int, int], tuple[bytes | None, bytes | None]]) -> None:
    """Raw holds these records, each once."""
    assert rows_by_place(held) == expected


def ensure_decided(held: Deployment) -> None:
    """Hold events, rejects and current against raw, for topics that Kafka holds in part."""
    raw = {(r["generation"], r["partition"], r["offset"]): r["value"] for r in read_rows(str(held.path("raw")))}
    tables = {name: read_rows(str(held.path(name))) for name in ("events", "rejects", "current")}
    places = {name: [in_history(row) for row in rows] for name, rows in tables.items()}
    remaining = {place for place, value in raw.items() if value is not None}
    assert sorted(places["events"] + places["rejects"]) == sorted(remaining), "each record that is no tombstone, once"
    newest: dict[str, int] = {}
    for row in tables["events"]:
        newest[row["key"]] = max(row["version"], newest.get(row["key"], 0))
    found: dict[str, int] = {}
    for row in tables["current"]:
        found[row["key"]] = max(row["version"], found.get(row["key"], 0))
    assert found == newest


def in_history(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["origin_generation"], row["origin_partition"], row["origin_offset"]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps try a temporary error again once, and at once."""
    monkeypatch.setattr("highwater.orchestration.failures.TRIES_AGAIN", 1)
    monkeypatch.setattr("highwater.orchestration.failures.FIRST_WAIT", 0.05)
    # Repair asks at once for what the planner may still request, and for what failed just now.
    monkeypatch.setattr(
        "highwater.orchestration.sensing.repairing.RULES", RepairRules(grace=timedelta(), first_wait=timedelta())
    )


@pytest.fixture
def held(
    topic: TopicFactory, bootstrap: str, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Deployment:
    made = Deployment.make(
        topic(partitions=PARTITIONS), tmp_path, bootstrap, {settings.SPARK_REMOTE: spark_server.remote}
    )
    configure(made, monkeypatch)
    return made


def configure(held: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (settings.HOME, settings.KAFKA_BOOTSTRAP, settings.SPARK_REMOTE):
        monkeypatch.setenv(name, held.environment[name])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def ours(held: Deployment, instance: dg.DagsterInstance, soon: None) -> Ours:
    return Ours.on(held, instance)


def stored_foreign(held: Deployment) -> str:
    """A slice of another stream in the same ledger."""
    slice_ = Slice("payments", "payments", "AAAAAAAAAAAAAAAAAAAAAA", 0, 0, {0: OffsetRange(0, 1)}, datetime.now(UTC))
    assert Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}").add([slice_])
    return slice_.key


def test_keys_that_name_no_slice_of_the_stream(ours: Ours) -> None:
    ours.held.send(60)
    [planned] = ours.taken()
    topic = ours.held.stream.topic
    foreign = stored_foreign(ours.held)
    no_key, lists = "write <topic>@<ordinal of 7 digits>", "highwater slices STREAM lists the keys"
    nothing = "no slice of that key"
    wrong = {
        f"{topic}@0000099": ((f"{planned} is the last of orders", f"{topic}@0000099"), lists),
        foreign: (("stream payments", "stream orders"), "request it from payments"),
        **{key: ((nothing, key), no_key) for key in (DROPS, f"{topic}@0000000' OR '1'='1", '"@0000000')},
    }
    for key, (values, remedy) in wrong.items():
        ours.instance.add_dynamic_partitions("orders_slices", [key])
        reported = failure(ours.run(key))
        assert (reported["error"], reported["stored"], reported["found"]) == ("UnknownSliceError", *values)
        assert remedy in reported["remedy"]
        tick = ours.repair()
        assert not tick.run_requests
        assert f"1 no slices of the stream by the ledger, delete their keys from Dagster: {key}" in str(
            tick.skip_message
        )
        ensure_refused(ours.command("explain", key), key)
        ours.instance.delete_dynamic_partition("orders_slices", key)
    ours.held.send(60)
    assert len(ours.taken()) == 1
    ours.held.check_whole()


DROPS = "x'); DROP TABLE slices; --"


def ensure_refused(reported: Result, key: str) -> None:
    """The command names the key, or the topic that is none of the declared streams', and a remedy."""
    assert reported.exit_code == PERMANENT, reported.output
    assert "remedy: " in reported.output
    assert f"found:  {key}" in reported.output or "no stream has a topic 'payments'" in reported.output


def test_an_absent_topic_and_then_an_empty_one(ours: Ours, instance: dg.DagsterInstance) -> None:
    name = f"{ours.held.stream.topic}x"
    other = Ours.on(replace(ours.held, stream=replace(ours.held.stream, topic=name)), instance)
    absent = other.fault()
    assert absent is not None
    assert ours.held.stream.topic in absent.problem
    assert "create the topic" in absent.remedy
    reported = other.command("plan", "orders")
    assert reported.exit_code == PERMANENT
    assert f"topic {name!r} does not exist" in reported.output
    assert "remedy: create the topic" in reported.output
    create_topic(ours.held.bootstrap, name, PARTITIONS, {})
    result = other.tick()
    assert "nothing new" in str(result.skip_message)
    assert other.held.slices() == {}
    assert other.command("plan", "orders", "--yes").exit_code == MENDED
    other.held.send(60)
    assert len(other.taken()) == 1
    other.held.check_whole()


def test_a_deleted_topic_leaves_the_other_stream_untouched(ours: Ours, topic: TopicFactory) -> None:
    from confluent_kafka.admin import AdminClient

    from assets.streams.payments import STREAM as PAYMENTS

    held = ours.held
    payments = replace(PAYMENTS, topic=topic("payments", partitions=2), limits=held.stream.limits)
    both = Ours(held, ours.instance, build_defs(streams=[held.stream, payments]))
    booking = {"account_id": "a", "payment_id": "p", "amount": 1.25, "currency": "EUR"}
    values = [json.dumps({**booking, "booked_at": f"2026-03-01T10:00:0{n}Z"}).encode() for n in range(4)]
    send(held.bootstrap, payments.topic, [Message(b"a|p", value, n % 2) for n, value in enumerate(values)])
    held.send(60)
    keys = {one.partitions_def_name: one.partition_keys for one in both.tick().dynamic_partitions_requests or []}
    [early], [paid] = keys["orders_slices"], keys["payments_slices"]
    both.took(paid, paid, "payments")
    before = {table: read_rows(held.lake.build_table_path("payments", table)) for table in TABLES}
    assert {row["key"] for row in before["events"]} == {"a|p"}
    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    admin.delete_topics([payments.topic])[payments.topic].result(30)
    wait_until(lambda: both.fault("payments") is not None, 30, "the end of the topic")
    held.send(60)
    [behind] = both.planned()
    both.took(early, behind)
    held.check_whole()
    again = both.run(paid, stream="payments")
    assert again.success, "rows that Kafka cannot give again stay"
    after = {table: read_rows(held.lake.build_table_path("payments", table)) for table in TABLES}
    for table in ("raw", "rejects"):
        assert after[table] == before[table]
    assert {row["origin_offset"] for row in after["events"]} == {row["origin_offset"] for row in before["events"]}


def test_a_recreated_topic(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    [old] = ours.taken()
    held.send(30)
    [never_read] = ours.planned()
    before = rows_by_place(held)
    ids = [topic_id(held)]
    recreate(held)
    ids.append(topic_id(held))
    # While a partition has no leader yet, no look at the topic counts, and the next tick decides.
    wait_until(lambda: ours.fault() is not None, 30, "a tick that finds another topic")
    recreated = ours.fault()
    assert recreated is not None
    assert recreated.problem.endswith(f"stored: topic ID {ids[0]}; found: topic ID {ids[1]}")
    assert recreated.problem.startswith("TopicRecreatedError")
    assert "accept-loss" in recreated.remedy
    assert ours.command("plan", "orders").exit_code == PERMANENT
    reported = failure(ours.run(never_read))
    assert (reported["error"], reported["stored"], reported["found"]) == ("TopicRecreatedError", *ids)
    again = ours.run(old)
    assert again.success, "its rows stay"
    ensure_rows(held, before)
    accepted = ours.command("accept-loss", "orders", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    held.send(60)
    assert ours.taken()
    rows = read_rows(str(held.path("raw")))
    found = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in rows if r["generation"] == 1}
    assert found == read_topic(held.bootstrap, held.stream.topic)
    assert len(rows) == len(found) + len(before)
    ensure_decided(held)


def topic_id(held: Deployment) -> str:
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    return str(admin.describe_topics(TopicCollection([name]))[name].result(60).topic_id)


def recreate(held: Deployment) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    admin.delete_topics([name])[name].result(30)
    wait_until(lambda: name not in admin.list_topics(timeout=60).topics, 30, f"the end of {name}")
    create_topic(held.bootstrap, name, PARTITIONS, {})


def test_offsets_that_retention_took_before_they_were_planned(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.taken()
    before = read_topic(held.bootstrap, held.stream.topic)
    planned = held.slices().popitem()[1][0][1]
    held.send(60)
    delete_before(held, 0, planned + 5)
    [others] = ours.taken()
    reported = ours.command("plan", "orders")
    assert reported.exit_code == PERMANENT
    for text in (
        f"stored: planned to offset {planned}",
        f"found:  log start offset {planned + 5}",
        "accept-loss orders",
    ):
        assert text in reported.output
    assert held.slices()[others][0] == (planned, planned), "the other partitions go on"
    accepted = ours.command("accept-loss", "orders", "--partition", "0", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    assert ours.taken()
    ensure_rows(held, before | read_topic(held.bootstrap, held.stream.topic))
    ensure_decided(held)
    assert ours.command("plan", "orders").exit_code == MENDED


def test_offsets_that_retention_took_before_they_were_read(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    delete_before(held, 0, 5)
    reported = failure(ours.run(key))
    end = held.slices()[key][0][1]
    values = (reported["error"], reported["stored"], reported["found"])
    assert values == ("OffsetsExpiredError", f"[0, {end})", "log start offset 5")
    assert "accept-loss" in reported["remedy"]
    accepted = ours.command("accept-loss", "orders", "--partition", "0", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    ours.repaired()
    held.check_whole()


def delete_before(held: Deployment, partition: int, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    for future in admin.delete_records([TopicPartition(held.stream.topic, partition, offset)]).values():
        future.result(30)


def test_added_partitions_join_the_next_slice(ours: Ours) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    held = ours.held
    held.send(60)
    [before] = ours.planned()
    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    admin.create_partitions([NewPartitions(name, PARTITIONS + 1)])[name].result(30)
    wait_until(lambda: len(admin.list_topics(name, timeout=60).topics[name].partitions) > PARTITIONS, 30, "a partition")
    send(held.bootstrap, name, [order_message("late", 1, partition=PARTITIONS)])
    wait_until(lambda: bool(ours.planned()), 30, "a slice of the new partition")
    joined, ranges = held.slices().popitem()
    assert ranges[PARTITIONS] == (0, 1)
    ours.took(before, joined)
    ensure_rows(held, read_topic(held.bootstrap, name))
    ensure_decided(held)


def test_a_range_of_transaction_markers_alone(ours: Ours) -> None:
    held = ours.held
    held.abort()
    [key] = ours.taken()
    assert all(start < end for start, end in held.slices()[key].values())
    assert key in held.slice_commits("raw")
    ensure_rows(held, {})
    held.check_whole()
    held.send(60)
    ours.taken()
    held.check_whole()


def test_a_topic_that_was_compacted(ours: Ours, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that Kafka no longer has stay; a range that was compacted before it was read has gaps."""
    config = {"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"}
    name = topic("compacted", partitions=1, **config)
    held = replace(ours.held, stream=replace(ours.held.stream, topic=name))
    ours = Ours.on(held, ours.instance)
    send(held.bootstrap, name, [order_message(f"o{n % 4}", n // 4 + 1) for n in range(40)])
    [first] = ours.taken()
    before = read_topic(held.bootstrap, name)
    ensure_rows(held, before)
    [gappy], seen = compacted(ours, name)
    start, end = held.slices()[gappy][0]
    assert 0 < sum(start <= offset < end for _, offset in rows_by_place(held)) < end - start
    again = ours.run(first)
    assert again.success, [event for event in again.all_events if event.is_failure]
    reported = [
        event.step_materialization_data.materialization.metadata for event in again.get_asset_materialization_events()
    ]
    notes = [str(metadata["note"].value) for metadata in reported if "note" in metadata]
    assert any("Kafka would give" in note and "the commit recorded 40" in note for note in notes)
    # The cleaner goes on while the slice is read.
    taken = rows_by_place(held).items()
    assert (before | read_topic(held.bootstrap, name)).items() <= taken <= (before | seen).items()
    ensure_decided(held)
    # The test's producer pays its orders again and again; compaction alone makes nothing red.
    assert {one.check for one in red(held)} == {"transitions_allowed"}


def red(held: Deployment) -> list[Failing]:
    """The checks that fail in complete slices, those that the stream only warns of among them."""
    sources = Sources(Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}"), Kafka(held.bootstrap, {}), held.lake)
    return [*failing(sources, held.stream)]


def compacted(ours: Ours, name: str) -> tuple[list[str], dict[tuple[int, int], tuple[bytes | None, bytes | None]]]:
    """Send until the cleaner has been there, and take what is left of it; returns the slices, and what was left."""
    sent = [40]
    left: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}

    def gone() -> bool:
        send(ours.held.bootstrap, name, [order_message(f"o{sent[0] % 4}", sent[0] // 4 + 1)])
        sent[0] += 1
        left.clear()
        left.update(read_topic(ours.held.bootstrap, name))
        return min(offset for _, offset in left) > 40

    wait_until(gone, 120, "compaction")
    return ours.taken(), left


def test_an_open_transaction_is_waited_for(ours: Ours) -> None:
    from confluent_kafka import Producer

    held = ours.held
    held.send(60)
    [before] = ours.planned()
    producer = Producer({"bootstrap.servers": held.bootstrap, "transactional.id": f"open-{held.stream.topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    message = order_message("open", 1, partition=0)
    held.ends[message.value or b""] = "event"
    producer.produce(held.stream.topic, key=message.key, value=message.value, partition=0)
    producer.flush(30)
    result = ours.tick()
    name = held.stream.topic
    assert f"nothing new in {name}; 1 offsets of {name} follow an open transaction" in str(result.skip_message)
    reported = ours.command("plan", "orders")
    assert (reported.exit_code, "1 offsets of" in reported.output) == (MENDED, True)
    producer.commit_transaction(30)
    wait_until(lambda: bool(ours.planned()), 30, "a slice of the transaction's records")
    ours.took(before, [*held.slices()][-1])
    held.check_whole()


def test_a_slice_that_cannot_be_written(ours: Ours) -> None:
    """The table is there and is read; files are where folders of data files would be, so a task of Spark's fails."""
    held = ours.held
    held.send(60)
    ours.taken()
    held.send(60)
    [key] = ours.planned()
    # Each data file gets a folder of one letter or digit.
    folders = {"delta.randomizeFilePrefixes": "true", "delta.randomPrefixLength": "1"}
    DeltaTable(str(held.path("raw"))).alter.set_table_properties(folders)
    in_the_way = [held.path("raw") / name for name in string.ascii_letters + string.digits]
    for file in in_the_way:
        file.write_text("in the way")
    reported = tried_again(ours.run(key))
    assert f"DependencyAwayError: the lake's storage failed at {held.path('raw')}; found: " in reported
    assert "is not a directory" in reported
    assert "remedy: check that HIGHWATER_LAKE may be written" in reported
    assert key not in held.slice_commits("raw")
    asked = ours.command("explain", key)
    assert (asked.exit_code, "incomplete: raw, events, rejects" in asked.output) == (MENDED, True)
    assert f"1 requested again: {key}" in repair_lines(ours)
    for file in in_the_way:
        file.unlink()
    ours.repaired()
    held.check_whole()


def repair_lines(ours: Ours) -> list[str]:
    """What a tick of repair says in its log."""
    return [*repair(ours.instance, SimpleNamespace(**(ours.defs.resources or {})), ours.held.stream, None).lines]


def test_a_lake_that_cannot_be_read(ours: Ours) -> None:
    """A file is where the table's folder would be: what even root cannot write over."""
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    held.path("raw").parent.mkdir(parents=True)
    held.path("raw").write_text("in the way")
    reported = tried_again(ours.run(key))
    assert "DependencyAwayError: the lake" in reported
    found = ("found: Generic LocalFileSystem error: ", "_delta_log: Not a directory")
    for text in (str(held.path("raw")), *found, "remedy: check that HIGHWATER_LAKE"):
        assert text in reported
    asked = ours.command("explain", key)
    assert asked.exit_code == TEMPORARY, asked.output
    assert "_delta_log: Not a directory" in asked.output
    held.path("raw").unlink()
    ours.repaired()
    held.check_whole()


def test_a_locked_ledger(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    held.send(30)
    lock = sqlite3.connect(held.home / "ledger.sqlite", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    try:
        result = ours.tick()
        reason = str(result.skip_message)
        for text in ("ledger.sqlite does not answer", "found: database is locked", "a process that holds its lock"):
            assert text in reason
        reported = ours.command("plan", "orders", "--yes")
        assert reported.exit_code == TEMPORARY
        assert "database is locked" in reported.output
        assert [*held.slices()] == [key]
        shown = tried_again(ours.run(key))
        assert "DependencyAwayError: " in shown
        assert "does not answer; found: database is locked; remedy: look for a process" in shown
        assert key not in held.slice_commits("raw")
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    [behind] = ours.planned()
    ours.repaired()
    assert {key, behind} == set(held.slice_commits("raw"))
    held.check_whole()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own."""
    from dev.broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path / "mortal") as started:
        yield started


# Spark's consumer waits two minutes for a broker; a test need not.
IMPATIENT = {
    "kafkaConsumer.pollTimeoutMs": "3000",
    "kafka.default.api.timeout.ms": "4000",
    "kafka.request.timeout.ms": "3000",
}


def test_a_broker_that_is_away_before_and_during_a_run(
    mortal: EmbeddedBroker,
    spark_server: SparkConnect,
    instance: dg.DagsterInstance,
    soon: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_topic(mortal.bootstrap, "orders", PARTITIONS, {})
    held = Deployment.make("orders", tmp_path, mortal.bootstrap, {settings.SPARK_REMOTE: spark_server.remote})
    configure(held, monkeypatch)
    ours = Ours.on(held, instance)
    held.send(60)
    ours.tick()
    [key] = held.slices()
    with monkeypatch.context() as patch:
        killed_while_reading(mortal, patch)
        reported = tried_again(ours.run(key))
    for text in ("DependencyAwayError: ", "Kafka", "found: ", "remedy: check that the broker"):
        assert text in reported
    assert key not in held.slice_commits("raw")
    result = ours.tick()
    reason = str(result.skip_message)
    assert f"Kafka at {mortal.bootstrap} did not answer" in reason
    assert "HIGHWATER_KAFKA_BOOTSTRAP" in reason
    assert ours.command("plan", "orders").exit_code == TEMPORARY
    breakers = Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}").breakers
    for _ in range(FAILURES):
        ours.tick()
    assert breakers.read_dependency(KAFKA).state == "open"
    refused = failure(ours.run(key))
    assert refused["error"] == "BreakerOpenError", "and the step waits for nothing"
    assert "kafka is not asked" in refused["problem"]
    mortal.start()
    breakers.change(KAFKA, lambda row: replace(row, since=datetime.now(UTC) - COOL_DOWN))
    ours.repaired()
    assert breakers.read_dependency(KAFKA).state == "closed"
    held.check_whole()


def killed_while_reading(broker: EmbeddedBroker, patch: pytest.MonkeyPatch) -> None:
    from highwater.assets import raw
    from highwater.resources.kafka import Kafka

    options, read = Kafka.build_spark_options, raw._read
    patch.setattr(Kafka, "build_spark_options", lambda self: {**options(self), **IMPATIENT})

    def reading(*given: Any) -> Any:
        broker.kill()
        return read(*given)

    patch.setattr(raw, "_read", reading)


DO_NOT_PARSE = {
    "STREAM = Stream(": "SyntaxError",
    "from nowhere import STREAM": "ModuleNotFoundError",
    "STREAM = 'orders'": "STREAM is str",
}


def test_a_declaration_that_does_not_parse(ours: Ours) -> None:
    """Its file alone is skipped, with a warning; fixed, the deployment plans and reads what came meanwhile."""
    assert ours.command("slices", "orders").exit_code == MENDED
    folder = ours.held.home / "streams"
    broken = folder / "broken.py"
    for text, reported in DO_NOT_PARSE.items():
        broken.write_text(text)
        with pytest.raises(DeclarationError, match=r"broken\.py") as caught:
            declared(ours, folder)
        assert isinstance(caught.value, PermanentError)
        assert caught.value.stored == f"{broken}"
        assert reported in str(caught.value.found)
        assert "docs/streams.md" in caught.value.remedy
        shown = ours.command("plan", "orders")
        assert shown.exit_code == MENDED
        assert f"{broken} is skipped" in shown.stderr
        assert reported in shown.stderr
    ours.held.send(60)
    broken.write_text(OTHER_DECLARED)
    fixed = declared(ours, folder)
    assert {"orders_slice", "other_slice"} <= {*fixed.defs.get_repository_def().job_names}
    assert len(fixed.taken()) == 1
    fixed.held.check_whole()


def declared(ours: Ours, folder: Path) -> Ours:
    """The deployment with the definitions that a folder of declarations gives."""
    from highwater.stream_files import load_streams

    return replace(ours, defs=build_defs(streams=[*load_streams(folder).values()]))


OTHER_DECLARED = """
from dataclasses import replace
from tests.helpers.crash_support import stream_on
STREAM = replace(stream_on("other"), name="other")
"""
