"""Streams, topics with known records and their work, for the tests of the stages.

Expected values are computed here from the records that were sent, never by the code under test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.streams.orders import STREAM as ORDERS
from dev.failing import failing
from dev.processes import wait_until
from highwater.assets import current, dlq, events, metrics, raw, rejects
from highwater.assets.classified import SharedFrames
from highwater.assets.work import SliceReport, Work
from highwater.declaration import Limits
from highwater.errors import DependencyUnavailableError
from highwater.slices import OffsetRange, Slice
from highwater.tables import select_stages

if TYPE_CHECKING:
    import dagster as dg
    import pytest
    from confluent_kafka import Message as KafkaMessage
    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.schemas import Schema

STAGES = (raw, events, rejects, dlq, current)


def order(order_id: str, version: int, **changes: object) -> dict[str, Any]:
    """A sound order; `changes` overrides fields, a value of `...` leaves the field out."""
    sound = {
        "order_id": order_id,
        "version": version,
        "status": "placed" if version == 1 else "paid",
        "customer_id": "c1",
        "amount": 12.5,
        "event_time": f"2026-03-01T10:{version % 60:02d}:00Z",
    }
    return {name: value for name, value in (sound | changes).items() if value is not ...}


@dataclass(frozen=True)
class Message:
    """One record to send."""

    key: bytes | None
    value: bytes | None
    partition: int = 0
    headers: list[tuple[str, str | bytes | None]] = field(default_factory=list)
    timestamp: int | None = None


def order_message(order_id: str, version: int, partition: int = 0, **changes: object) -> Message:
    """An order as a record."""
    return Message(order_id.encode(), json.dumps(order(order_id, version, **changes)).encode(), partition)


def send(bootstrap: str, topic: str, messages: Iterable[Message]) -> None:
    """Send records and wait until each is acknowledged."""
    from confluent_kafka import Producer

    failed: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    for message in messages:
        producer.produce(
            topic,
            key=message.key,
            value=message.value,
            partition=message.partition,
            headers=list(message.headers),
            # 0 is "now" to the client.
            timestamp=message.timestamp or 0,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
        producer.poll(0)
    if producer.flush(60) or failed:
        raise TimeoutError(f"the broker did not take in every record within 60 s: {failed}")


def customers(lake: Lake, known: Sequence[str] = ("c1",)) -> None:
    """Write the reference table without a JVM."""
    import pyarrow as pa
    from deltalake import write_deltalake

    table = pa.table({"customer_id": list(known), "region": ["north"] * len(known)})
    write_deltalake(lake.build_reference_path("reference/customers"), table, mode="overwrite")


class FakeSilentKafka:
    """A cluster that gives no answer: what is asked of it beside the matter of a test stays unknown."""

    def get_admin(self) -> Any:
        raise DependencyUnavailableError("nobody answers", remedy="wait")

    list_topic_names = get_admin


@dataclass
class Bench:
    """A stream on a topic of its own, with a lake and a ledger of its own."""

    stream: Stream
    spark: SparkSession
    lake: Lake
    ledger: Ledger
    kafka: Kafka
    bootstrap: str
    log: list[str] = field(default_factory=list)
    schemas: Callable[[int | str], Schema | None] | None = None

    def copy(self, home: Path) -> Bench:
        """The same topic and slices with copies of lake and ledger below `home`, for a test that changes them."""
        lake, ledger = copy_stores(self.lake, home)
        return replace(self, lake=lake, ledger=ledger, log=[])

    def work(self, *slices: Slice, **changes: Any) -> Work:
        opened = self.spark, self.lake, self.ledger, self.kafka
        work = Work(self.stream, slices, *opened, self.log.append, schemas=self.schemas)
        return replace(work, **changes)

    def send(self, *messages: Message) -> None:
        send(self.bootstrap, self.stream.topic, messages)

    def plan(self, ordinal: int, **ranges: tuple[int, int]) -> Slice:
        """A slice put into the ledger as planned: `plan(0, p0=(0, 3))`."""
        slice_ = Slice(
            stream=self.stream.name,
            topic=self.stream.topic,
            topic_id=self.kafka.read_topic_state(self.stream.topic).topic_id,
            generation=0,
            ordinal=ordinal,
            ranges={int(name[1:]): OffsetRange(*bounds) for name, bounds in ranges.items()},
            planned_at=datetime.now(UTC),
        )
        self.ledger.add([slice_])
        return slice_

    def materialise(self, *slices: Slice) -> dict[str, list[SliceReport]]:
        """Take slices together through all stages of the stream, which share what they classified, as in a run."""
        names = select_stages(self.stream)
        stages = [stage for stage in (*STAGES, metrics) if stage.TABLE in names]
        work = self.work(*slices, classified=SharedFrames())
        return {stage.TABLE: self._tried_again(partial(stage.materialise, work)) for stage in stages}

    def rejects_from_raw(self, *slices: Slice) -> list[dict[str, Any]]:
        """The rows of rejects of these slices, as a run makes them that finds nothing classified; the table is new."""
        shutil.rmtree(self.lake.build_table_path(self.stream.name, rejects.TABLE))
        rejects.materialise(self.work(*slices))
        return self.rows(rejects.TABLE)

    def _tried_again(self, materialise: Callable[[], list[SliceReport]]) -> list[SliceReport]:
        """As a run does: a dependency that does not answer in time, on a busy machine, is asked again."""
        try:
            return materialise()
        except DependencyUnavailableError as error:
            self.log.append(f"tried again: {error}")
            return materialise()

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table, read without a JVM."""
        return read_rows(self.lake.build_table_path(self.stream.name, table))

    def current(self) -> dict[str, dict[str, Any]]:
        """The rows of `current` by key, each key once."""
        rows = self.rows("current")
        found = {row["key"]: row for row in rows}
        assert len(found) == len(rows), "a key has several rows"
        return found

    def failing(self) -> dict[str, str]:
        """The checks that fail in slices that are complete in all tables, with what they say."""
        from highwater.orchestration.checking.checks import Sources

        sources = Sources(self.ledger, self.kafka, self.lake, self.schemas)
        return {f"{red.check} of {red.slice_key}": red.text for red in failing(sources, self.stream)}

    def versions(self, table: str) -> int:
        """Commits of the table so far that wrote slices."""
        from deltalake import DeltaTable

        history = DeltaTable(self.lake.build_table_path(self.stream.name, table)).history()
        return sum("highwater" in (commit.get("userMetadata") or "") for commit in history)


def copy_stores(lake: Lake, home: Path) -> tuple[Lake, Ledger]:
    """Copies below `home` of a lake and of the ledger beside it."""
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

    ours = Path(lake.root).parent / "ledger.sqlite"
    shutil.copytree(lake.root, home / "lake")
    with closing(sqlite3.connect(ours)) as stored, closing(sqlite3.connect(home / "ledger.sqlite")) as copied:
        stored.backup(copied)
    return Lake(str(home / "lake")), Ledger(f"sqlite:///{home / 'ledger.sqlite'}")


def make_bench(topic: str, bootstrap: str, spark: SparkSession, home: Path) -> Bench:
    """The stream `orders` on a topic, with lake and ledger below `home`."""
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

    lake = Lake(str(home / "lake"))
    customers(lake)
    ledger = Ledger(f"sqlite:///{home / 'ledger.sqlite'}")
    return Bench(make_stream(topic), spark, lake, ledger, Kafka(bootstrap, {}), bootstrap)


def with_milliseconds(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of raw, or of a table that follows it, with the numbers of their times."""
    rows = [*rows]
    begin, names = datetime(1970, 1, 1, tzinfo=UTC), ("timestamp", "origin_timestamp")
    numbers = [
        {f"{name}_ms": (row[name] - begin) // timedelta(milliseconds=1) for name in names if row.get(name) is not None}
        for row in rows
    ]
    return [{**of, **row} for of, row in zip(numbers, rows, strict=True)]


def read_rows(path: str, where: str | None = None) -> list[dict[str, Any]]:
    """Rows of a Delta table, by a reader that shares no code with the pipeline."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(path)
    mine = where or "true"
    result = QueryBuilder().register("t", table).execute(f"SELECT * FROM t WHERE {mine}")
    return [dict(row) for row in pa.table(result).to_pylist()]


def read_messages(bootstrap: str, topic: str) -> list[KafkaMessage]:
    """Every committed record of a topic, by a plain consumer."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader-of-tests",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,  # at its log's end a broker holds a fetch for half a second otherwise
        }
    )
    partitions = list(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found: list[KafkaMessage] = []
    ended: set[int] = set()
    while len(ended) < len(partitions):
        message = consumer.poll(60)
        if message is None:
            raise TimeoutError("the topic did not end within 60 s")
        if message.error():
            ended.add(message.partition() or 0)
        else:
            found.append(message)
    consumer.close()
    return found


def read_topic(bootstrap: str, topic: str) -> dict[tuple[int, int], tuple[bytes | None, bytes | None]]:
    """Every committed record of a topic: (partition, offset) → (key, value)."""
    found = read_messages(bootstrap, topic)
    return {(one.partition() or 0, one.offset() or 0): (one.key(), one.value()) for one in found}


def read_committed_offsets(kafka: Kafka, topic: str) -> dict[str, dict[int, int]]:
    """What consumer groups have committed of a topic: partition → offset, by group; groups without are left out."""
    from confluent_kafka.admin import AdminClient

    from highwater.resources.consumer_groups import read_group_offsets

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})  # one that is let go of drops the request under way
    listed = admin.list_consumer_groups().result(60)
    assert not listed.errors
    places = [(topic, number) for number in kafka.read_topic_state(topic).partitions]
    found = {group.group_id: read_group_offsets(kafka, group.group_id, places) for group in listed.valid}
    return {name: {p: one.offset for (_, p), one in by.items()} for name, by in found.items() if by}


def shorten_timeouts(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a client of Spark Connect give up within seconds, where it does so by the same settings after minutes.

    Args:
        patch: undoes it.
        seconds: without a word, for an answer to the ping, and for a connection.
    """
    from highwater.resources import spark

    pings = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    # The least wait between two connections is also how long one may take.
    short = dict.fromkeys((*pings, "grpc.min_reconnect_backoff_ms"), int(seconds * 1000))
    patch.setattr(spark, "CHANNEL", [*{**dict(spark.CHANNEL), **short}.items()])
    patch.setattr(spark, "RETRIES", 2)


# The modules of children, each loaded once for all of them.
CHILDREN = [
    "tests.helpers.crash_child",
    "tests.helpers.publish_child",
    "tests.helpers.accept_child",
    "tests.resources.test_outbox_deliveries",
]


def open_forkserver() -> Any:
    """Forks children from a process that has loaded everything and started nothing."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(CHILDREN)
    return found


@dataclass
class Children:
    """Processes of a module that do one task, each killed or stopped at a point of it, or not at all.

    Args:
        module: what they run.
        task: what they do, without `point` and `sign`.
    """

    module: str
    task: dict[str, Any]

    def start(self, point: str | None = None, sign: signal.Signals = signal.SIGKILL) -> BaseProcess:
        task = {**self.task, "point": point, "sign": sign.value}
        child: BaseProcess = open_forkserver().Process(target=_run_child, args=(self.module, task))
        child.start()
        return child

    def end(self, point: str | None = None) -> int | None:
        return _has_ended(self.start(point))

    def stop_and_overtake(self, point: str, see: Callable[[], None]) -> int | None:
        """One hangs at the point while another does the task, and goes on then: how it ends."""
        stopped = self.start(point, signal.SIGSTOP)
        assert stopped.pid is not None
        pid = stopped.pid
        wait_until(lambda: _read_state(pid) == "T", 60, "the stop")
        assert self.end() == 0
        see()
        os.kill(pid, signal.SIGCONT)
        ended = _has_ended(stopped)
        see()
        return ended


def _run_child(module: str, task: dict[str, Any]) -> None:
    sys.exit(import_module(module).main(task))


def _has_ended(child: BaseProcess) -> int | None:
    child.join(600)
    return child.exitcode


def _read_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# The first answer of Spark's page took more than ten seconds on a machine that was busy.
PAGE_SECONDS = 60.0
# Distinguishes a wait that ends by itself from one that never does, on a machine that hangs for seconds.
BOUNDED = 60.0


def fetch_rest(server: SparkConnect, path: str) -> list[dict[str, Any]]:
    """What Spark's REST interface says below `path`.

    A list that loses an entry while it is made, since a query of another worker came, is answered by 404.
    """
    found: list[list[dict[str, Any]]] = []

    def answered() -> bool:
        try:
            with urllib.request.urlopen(f"{server.ui_url}/api/v1/{path}", timeout=PAGE_SECONDS) as answer:
                found.append(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
        return bool(found)

    wait_until(answered, PAGE_SECONDS, f"Spark's page {path}")
    return found[0]


def list_tagged_jobs(server: SparkConnect, mark: str, *, status: str = "") -> list[dict[str, Any]]:
    """The jobs with a tag that holds the mark, `User_<id>_` or `Session_<id>_`: other workers have the server too."""
    [application] = fetch_rest(server, "applications")
    jobs = fetch_rest(server, f"applications/{application['id']}/jobs" + (f"?status={status}" if status else ""))
    return [job for job in jobs if any(mark in tag for tag in job["jobTags"])]


# No test lasts until such a retry: what is rejected stays rejected, unless a test declares tiers of its own.
LONG_TIERS = (timedelta(days=1), timedelta(days=2))


def make_stream(topic: str, **changes: Any) -> Stream:
    """The stream `orders` on another topic; it waits for nothing, retries nothing today, measures and sends nothing."""
    ours = {"topic": topic, "limits": Limits(), "tiers": LONG_TIERS, "metrics": None, "publishes": None}
    return replace(ORDERS, **{**ours, **changes})


def report_failed_run(instance: dg.DagsterInstance, tags: Mapping[str, str], text: str) -> None:
    """A run with these tags as a step leaves it that failed by an error of this text."""
    import dagster as dg
    from dagster._core.execution.plan.objects import StepFailureData
    from dagster_shared.error import SerializableErrorInfo

    run = dg.DagsterRun("orders_slice", tags=dict(tags))
    instance.add_run(run)
    cause = SerializableErrorInfo(f"dagster._core.definitions.events.Failure: {text}", [], "Failure")
    error = SerializableErrorInfo("RetryRequestedFromPolicy", [], "RetryRequestedFromPolicy", cause=cause)
    event = dg.DagsterEvent(
        dg.DagsterEventType.STEP_FAILURE.value,
        "orders_slice",
        step_key="orders__raw",
        event_specific_data=StepFailureData(error, user_failure_data=None),  # type: ignore[no-untyped-call]
    )
    instance.report_dagster_event(event, run.run_id)
    instance.report_run_failed(run)
