"""A lake on S3: two drivers that write at once lose nothing, and a slice goes through all tables as on files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assets.streams.orders import STREAM as ORDERS
from dev.object_store import KEY, SECRET, ObjectStore
from dev.paths import REPOSITORY
from dev.spark_connect import SparkConnect
from dev.spark_local import SMALL_QUERIES, environment, local_conf, write_conf_dir
from highwater import settings
from highwater.assets import commit, raw
from highwater.errors import ConfigurationError
from highwater.orchestration.operations import erasing, maintenance
from highwater.orchestration.reporting.audit import audit
from highwater.resources.delta import open_table
from highwater.resources.delta_rs_writes import append_at, append_missing
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.object_store import build_s3a_conf
from highwater.resources.spark import close, delta_errors, prepare
from highwater.resources.spark_tables import create_table
from tests.helpers.support import Bench, Message, customers, make_stream, order_message, read_rows, read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.resources.ledger import Ledger
    from tests.conftest import TopicFactory

pytestmark = pytest.mark.slow

# How often two drivers write at once; the longer series belongs to `make test-long`.
ROUNDS = [3, pytest.param(20, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def own_server(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkConnect]:
    """A Connect server that was set up for the store."""
    conf = {**SMALL_QUERIES, **build_s3a_conf(store.variables)}
    with SparkConnect(tmp_path_factory.mktemp("driver"), extra=conf, driver_memory_mb=1024) as server:
        yield server


@pytest.fixture
def first(own_server: SparkConnect) -> Iterator[SparkSession]:
    """A session on a driver of its own."""
    yield from session_on(own_server, {})


@pytest.fixture
def second(store: ObjectStore, spark_server: SparkConnect) -> Iterator[SparkSession]:
    """A session on another driver, which was started before there was a store: the session brings what it needs."""
    conf = {name.removeprefix("spark.hadoop."): value for name, value in build_s3a_conf(store.variables).items()}
    keys = {"fs.s3a.access.key": KEY, "fs.s3a.secret.key": SECRET}
    provider = {"fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"}
    yield from session_on(spark_server, {**conf, **keys, **provider})


def session_on(server: SparkConnect, conf: dict[str, str]) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    session = prepare(SparkSession.builder.remote(server.remote).create())
    for name, value in conf.items():
        session.conf.set(name, value)
    yield session
    close(session)


@pytest.fixture
def bench(topic: TopicFactory, second: SparkSession, bootstrap: str, ledger: Ledger, bucket: str) -> Bench:
    """A stream whose lake is on S3, on the driver of all tests: the module's own has run no slice yet."""
    lake = Lake(f"{bucket}/lake")
    customers(lake)
    stream = replace(make_stream(topic(partitions=3)), metrics=ORDERS.metrics)
    return Bench(stream, second, lake, ledger, Kafka(bootstrap, {}), bootstrap)


def in_background(action: Callable[[], object]) -> Callable[[], None]:
    """Begin something; what is returned waits for its end, and raises what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's wait
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(300)
        assert not thread.is_alive()
        if failed:
            raise failed[0]

    return join


def add(spark: SparkSession, path: str, number: int) -> None:
    with delta_errors(path):
        spark.range(number, number + 1).selectExpr("id AS n").write.format("delta").mode("append").save(path)


def numbers(path: str) -> list[int]:
    return sorted(row["n"] for row in read_rows(path))


def log_of(path: str, version: int | None = None) -> str:
    """How the server names the entries of a table's log, or one of them; the store's probe is not among them."""
    entry = "0" if version is None else f"{version:020d}.json"
    return f"{path.removeprefix('s3a:/')}/_delta_log/{entry}"


def writes_of_log(store: ObjectStore, path: str) -> list[int]:
    """How often each entry of a table's log was written."""
    return [count for key, count in sorted(store.writes(log_of(path)).items()) if key.endswith(".json")]


# Two drivers


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_late_entry_never_replaces_the_one_of_another_driver(
    store: ObjectStore, bucket: str, first: SparkSession, second: SparkSession, rounds: int
) -> None:
    """The first driver's PUT of an entry was late, and overwrote the entry that the second had committed meanwhile."""
    path = f"{bucket}/lake/orders/rounds"
    create_table(first, path, "n BIGINT", ["n"])
    for number in range(rounds):
        with store.holding(log_of(path)) as held:
            join = in_background(lambda number=number: add(first, path, 2 * number))  # type: ignore[misc]
            held.wait_arrived()
            add(second, path, 2 * number + 1)
        join()
        assert "412" in held.wait_answered()
    assert numbers(path) == [*range(2 * rounds)]
    assert writes_of_log(store, path) == [1] * (2 * rounds + 1)


def test_a_late_entry_of_deltalake_is_refused_too(store: ObjectStore, bucket: str, second: SparkSession) -> None:
    import pyarrow as pa

    path = f"{bucket}/lake/orders/small"
    append_missing(path, lambda _: pa.table({"n": [0]}))
    opened = open_table(path)
    assert opened is not None
    taken: list[bool] = []
    with store.holding(log_of(path)) as held:
        join = in_background(lambda: taken.append(append_at(opened, pa.table({"n": [1]}))))
        held.wait_arrived()
        add(second, path, 2)
    join()
    assert taken == [False]
    assert numbers(path) == [0, 2]
    assert writes_of_log(store, path) == [1, 1, 1]


def test_an_entry_whose_answer_is_lost_is_known_again(store: ObjectStore, bucket: str, first: SparkSession) -> None:
    """The SDK repeats such a PUT, is refused by its own entry, and the rows would be written a second time."""
    path = f"{bucket}/lake/orders/once"
    create_table(first, path, "n BIGINT", ["n"])
    store.lose_answers(log_of(path))
    add(first, path, 7)
    assert numbers(path) == [7]
    assert writes_of_log(store, path) == [1, 1]


def test_an_entry_is_put_again_while_another_request_for_it_is_under_way(
    store: ObjectStore, bucket: str, first: SparkSession
) -> None:
    path = f"{bucket}/lake/orders/again"
    create_table(first, path, "n BIGINT", ["n"])
    store.conflict(log_of(path), times=2)
    add(first, path, 7)
    assert numbers(path) == [7]
    assert writes_of_log(store, path) == [1, 1]


def test_two_drivers_whose_leases_ended_both_commit_their_slices(
    store: ObjectStore, bench: Bench, first: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hung for longer than its lease, with its log entry on the way."""
    monkeypatch.setattr(commit, "take_commit_turn", lambda *_, **__: nullcontext())
    bench.send(*[order_message(f"o{n}", 1, partition=n % 3) for n in range(6)])
    slices = [bench.plan(0, p0=(0, 1), p1=(0, 1)), bench.plan(1, p0=(1, 2), p2=(0, 2))]
    raw.materialise(bench.work(slices[1]))  # the table is there
    path = bench.lake.build_table_path("orders", "raw")
    with store.holding(log_of(path)) as held:
        join = in_background(lambda: raw.materialise(bench.work(slices[0])))
        held.wait_arrived()
        raw.materialise(bench.work(slices[1], spark=first))
    join()
    assert "412" in held.wait_answered()
    found = sorted((row["slice"], row["partition"], row["offset"]) for row in bench.rows("raw"))
    assert found == sorted(
        (one.key, p, offset) for one in slices for p, r in one.ranges.items() for offset in range(r.start, r.end)
    )
    assert set(writes_of_log(store, path)) == {1}
    assert set(bench.lake.load_slice_commits("orders", "raw")) == {one.key for one in slices}


def test_a_driver_in_the_run_s_process_is_killed_beside_a_connect_server(
    store: ObjectStore, bench: Bench, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is overtaken in raw, and killed while its commit of events is on the way: nothing is lost or twice."""
    monkeypatch.setattr(commit, "take_commit_turn", lambda *_, **__: nullcontext())
    orders = [(f"o{n % 4}", n // 4 + 1) for n in range(8)]
    bench.send(*[order_message(*one, partition=n % 3) for n, one in enumerate(orders)], Message(b"o1", b"no"))
    raw_log, events_log = (log_of(bench.lake.build_table_path("orders", name), 1) for name in ("raw", "events"))
    with store.holding(raw_log) as overtaken, store.holding(events_log) as killed:
        child = start_slice(tmp_path, bench, url)
        try:
            overtaken.wait_arrived()
            bench.send(order_message("late", 1, partition=1))
            late = bench.plan(1, p1=(3, 4))
            raw.materialise(bench.work(late))
            overtaken.release()
            killed.wait_arrived()
        finally:
            child.kill()
            output = child.communicate()[0]
    assert "412" in overtaken.wait_answered(), output[-3000:]
    assert killed.wait_answered()
    [slice_0] = bench.ledger.get([f"{bench.stream.topic}@0000000"])
    bench.materialise(slice_0, late)
    got = {(row["partition"], row["offset"]): (row["key"], row["value"]) for row in bench.rows("raw")}
    assert got == read_topic(bench.bootstrap, bench.stream.topic)
    assert len(bench.rows("raw")) == len(got)
    assert sorted((row["key"], row["version"]) for row in bench.rows("events")) == sorted([*orders, ("late", 1)])
    assert bench.failing() == {}


def start_slice(home: Path, bench: Bench, url: str) -> subprocess.Popen[str]:
    """Take everything on the topic as slice 0, by a session in the process itself, which finds S3 by its settings."""
    conf_dir = write_conf_dir(home, "local", {**local_conf(home, driver_memory_mb=1024), **SMALL_QUERIES})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    variables = {
        **inherited,
        **environment(conf_dir),
        settings.SPARK_MASTER: "local[2]",
        settings.HOME: str(home),
        settings.LAKE: bench.lake.root,
        settings.LEDGER_URL: url,
        settings.KAFKA_BOOTSTRAP: bench.bootstrap,
    }
    command = [sys.executable, "-m", "tests.helpers.slice_child", bench.stream.topic]
    return subprocess.Popen(
        command, env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# The whole pipeline


def test_slices_go_through_all_tables_and_are_maintained(
    store: ObjectStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ingested, maintained, repeated as by a backfill, erased from, and audited."""
    monkeypatch.setattr("highwater.maintenance.FEWEST_FILES", 2)
    sent = [order_message(f"o{n}", v, partition=n % 3) for v in (1, 2) for n in range(6)]
    bench.send(*sent, Message(b"bad", b"{", 0), Message(b"o2", None, 2))
    slices = [bench.plan(0, p0=(0, 2), p1=(0, 2), p2=(0, 2)), bench.plan(1, p0=(2, 5), p1=(2, 4), p2=(2, 5))]
    bench.materialise(slices[0])
    before = len(store.requests())
    bench.materialise(slices[1])
    looks = [one for one in store.requests()[before:] if "_delta_log" in one]
    # 328 requests for logs; 892 where each look opens its table.
    assert len(looks) < 500

    def ensure_whole(gone: str = "") -> None:
        topic = read_topic(bench.bootstrap, bench.stream.topic)
        expected = {place: record for place, record in topic.items() if record[0] != gone.encode()}
        assert {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in bench.rows("raw")} == expected
        left = [f"o{n}" for n in range(6) if f"o{n}" != gone]
        assert sorted((r["key"], r["version"]) for r in bench.rows("events")) == [(k, v) for k in left for v in (1, 2)]
        assert [row["key"] for row in bench.rows("rejects")] == [b"bad"]
        assert {key: row["version"] for key, row in bench.current().items()} == dict.fromkeys(left, 2)

    ensure_whole()

    now = datetime.now(UTC)
    report = {one.table: one for one in maintenance.maintain(bench.work(), None, now, dry_run=False).tables}
    assert report["raw"].compacted >= 2
    monkeypatch.setattr(maintenance, "to_whole_hours", lambda _: 0)
    report = {one.table: one for one in maintenance.maintain(bench.work(), None, now, dry_run=False).tables}
    assert report["raw"].removed >= 2
    assert all(one.after.stored == one.after.files for one in report.values())
    ensure_whole()
    assert bench.failing() == {}

    bench.materialise(*slices)
    ensure_whole()

    asked = erasing.ErasureRequest(hashlib.sha256(b"o5").hexdigest(), dry_run=False, by="somebody", because="asked for")
    found = erasing.erase_key(bench.work(), None, asked, datetime.now(UTC))
    assert [*found.done] == [one.key for one in slices]
    ensure_whole(gone="o5")
    assert bench.failing() == {}

    page = audit(bench.ledger, bench.kafka, bench.lake, bench.stream, {}, versions=True)
    assert (page.ends.accepted, page.ends.parked, page.ends.tombstones) == (10, 1, 1)
    bucket = bench.lake.root.removeprefix("s3a://").partition("/")[0]
    assert not [key for key in store.keys(bucket) if "probe" in key]


# Refusals


def test_spark_writes_nothing_to_a_store_without_conditions(
    store: ObjectStore, bucket: str, first: SparkSession
) -> None:
    path = f"{bucket}/lake/orders/raw"
    with store.ignoring_conditions(), pytest.raises(ConfigurationError, match="was not written") as refused:
        add(first, path, 1)
    assert "ignores If-None-Match" in str(refused.value.found)
    assert "docs/deployment/s3.md" in refused.value.remedy
    assert not [key for key in store.keys(bucket.removeprefix("s3a://")) if key.endswith(".json")]
    add(first, path, 1)
    assert numbers(path) == [1]
