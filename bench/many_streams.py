"""(q) and (r): many streams on one deployment, idle and busy."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.definitions import DECLARATIONS
from bench.harness import Result, Row, Target
from bench.world import World, build_order, write_customers

if TYPE_CHECKING:
    import dagster as dg

    from dev.processes import Child
    from dev.stack import Stack

IDLE_STREAMS, IDLE_PARTITIONS = 100, 10
BUSY_STREAMS, BUSY_PARTITIONS, RECORDS_PER_SECOND = 40, 1, 200
# Every stream is looked at once; then its rest begins.
SETTLING_SECONDS = 120.0
MINUTE = 60.0
BUSY_MINUTES = 10
SAMPLE_SECONDS = 30.0
FIRST_SLICES_SECONDS = 1_200.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
CPU, TICK, LAG = (
    "CPU of daemon and code server in a minute",
    "a whole tick of the planner",
    "lag, in seconds of writing",
)


@dataclass(frozen=True)
class Ticks:
    """The ticks of all sensors since a moment.

    Args:
        planner: the seconds of each tick of the planner.
        failed: how many ticks of any sensor failed.
    """

    planner: Sequence[float]
    failed: int


def measure_idle_streams(world: World, rounds: int, records: int) -> Result:
    """(q) 100 streams whose topics get nothing: CPU of Dagster's processes, and the planner's ticks."""
    del world, records
    cpu: list[float] = []
    with _stack(IDLE_STREAMS, IDLE_PARTITIONS, {"SPARK_REMOTE": "sc://127.0.0.1:1"}) as stack:
        time.sleep(SETTLING_SECONDS)
        begin = time.time()
        for _ in range(rounds):
            before = _read_cpu_seconds(stack)
            time.sleep(MINUTE)
            cpu.append(_read_cpu_seconds(stack) - before)
            print(f"  {cpu[-1]:.1f} CPU seconds in a minute", flush=True)
        ticks = _list_ticks(stack, begin)
    row = Row(f"{IDLE_STREAMS} streams of {IDLE_PARTITIONS} partitions", {CPU: cpu, TICK: ticks.planner})
    return Result(
        name="q",
        title="Many idle streams",
        method=(
            f"{IDLE_STREAMS} streams, each with an empty topic of {IDLE_PARTITIONS} partitions. Each round is a "
            "minute of daemon and code server with their children."
        ),
        rows=[row],
        targets=[
            Target("CPU seconds a minute", row.median(CPU), 15, at_least=False),
            Target("seconds of the planner's tick", row.median(TICK), 2, at_least=False),
            Target("ticks that failed", ticks.failed, 0, at_least=False),
        ],
    )


def measure_busy_streams(world: World, rounds: int, records: int) -> Result:
    """(r) 40 streams with 200 records a second each, for ten minutes: lag and ticks."""
    del world, rounds, records
    lags: list[float] = []
    with _stack(BUSY_STREAMS, BUSY_PARTITIONS, {}) as stack:
        _take_first_slices(stack)
        begin, stop = time.time(), threading.Event()
        writer = threading.Thread(target=_write, args=(stack.bootstrap, stop), daemon=True)
        writer.start()
        while time.time() - begin < BUSY_MINUTES * MINUTE:
            time.sleep(SAMPLE_SECONDS)
            lags.append(_lag(stack) / RECORDS_PER_SECOND / BUSY_STREAMS)
            print(f"  {time.time() - begin:.0f} s: the streams lag by {lags[-1]:.0f} s of writing", flush=True)
        stop.set()
        writer.join()
        ticks = _list_ticks(stack, begin)
    third = len(lags) // 3
    growth = max(lags[-third:]) / max(lags[-2 * third : -third])
    return Result(
        name="r",
        title="Many busy streams",
        method=(
            f"{BUSY_STREAMS} streams with tables get {RECORDS_PER_SECOND} records a second each for {BUSY_MINUTES} "
            "minutes. The lag of the groups `highwater.<stream>` is bounded if its largest value in the last third is "
            "that of the third before."
        ),
        rows=[Row(f"{BUSY_STREAMS} streams", {LAG: lags, TICK: ticks.planner})],
        targets=[
            Target("lag of the last third in that of the third before", growth, 1.2, at_least=False),
            Target("ticks that failed", ticks.failed, 0, at_least=False),
        ],
    )


@contextmanager
def _stack(streams: int, partitions: int, base: Mapping[str, str]) -> Iterator[Stack]:
    """A stack of its own with copies of `orders`."""
    from dev.stack import Stack
    from highwater import settings
    from highwater.resources.lake import Lake
    from highwater.settings import Settings

    def prepare(stack: Stack) -> None:
        write_customers(Lake(Settings.from_environment(stack.env).lake))
        _make_topics(stack.bootstrap, streams, partitions)

    own = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "SPARK_", "DAGSTER_HOME"))}
    with tempfile.TemporaryDirectory(prefix="highwater-bench-") as folder:
        declared = Path(folder, "streams")
        declared.mkdir()
        (declared / "many.py").write_text(DECLARATIONS.format(streams=streams))
        extra = {settings.STREAMS_FOLDER: str(declared)}
        with Stack(Path(folder, "home"), base={**own, **base}, extra=extra, on_broker=prepare) as stack:
            _ensure_planned(stack, streams)
            yield stack


def _ensure_planned(stack: Stack, streams: int) -> None:
    """Wait until the planner has looked at every stream: a code server with other streams would measure nothing.

    Raises:
        AssertionError: it has not within minutes.
    """
    from dev.processes import wait_until
    from highwater.resources.ledger import Ledger
    from highwater.settings import Settings

    ledger = Ledger(Settings.from_environment(stack.env).ledger_url)
    wait_until(lambda: len(ledger.topics.read_all_planned()) == streams, 300, "the first plan of every stream")


def _take_first_slices(stack: Stack) -> None:
    """Write a second's records, and wait until all tables have them."""
    stop = threading.Event()
    stop.set()
    _write(stack.bootstrap, stop, seconds=1)
    begin = time.time()
    while _lag(stack):
        if time.time() - begin > FIRST_SLICES_SECONDS:
            raise AssertionError(f"the first slices took more than {FIRST_SLICES_SECONDS:.0f} s")
        time.sleep(SAMPLE_SECONDS)
    print(f"  first slices of all streams: {time.time() - begin:.0f} s", flush=True)


def _make_topics(bootstrap: str, streams: int, partitions: int) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [NewTopic(f"orders.{number:03}", partitions, 1) for number in range(streams)]
    for made in admin.create_topics(wanted, request_timeout=60).values():
        made.result()


def _write(bootstrap: str, stop: threading.Event, seconds: int = 0) -> None:
    """Write every second what each topic gets in one, for some seconds and until it is stopped."""
    from confluent_kafka import Producer

    producer, number, due = Producer({"bootstrap.servers": bootstrap, "linger.ms": 200}), 0, time.monotonic()
    while seconds > 0 or not stop.is_set():
        seconds -= 1
        for _ in range(RECORDS_PER_SECOND):
            key, value = build_order(number, 1_000_000_000)
            number += 1
            for stream in range(BUSY_STREAMS):
                producer.produce(f"orders.{stream:03}", key=key, value=value)
            producer.poll(0)
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
    producer.flush(30)


def _lag(stack: Stack) -> int:
    """Records of all topics after the offsets of the streams' groups."""
    from confluent_kafka import Consumer, TopicPartition

    lag = 0
    for number in range(BUSY_STREAMS):
        group, topic = f"highwater.orders_{number:03}", f"orders.{number:03}"
        consumer = Consumer({"bootstrap.servers": stack.bootstrap, "group.id": group})
        try:
            for partition in range(BUSY_PARTITIONS):
                at = TopicPartition(topic, partition)
                low, high = consumer.get_watermark_offsets(at, timeout=30)
                [found] = consumer.committed([at], timeout=30)
                lag += high - (found.offset if found.offset >= 0 else low)
        finally:
            consumer.close()
    return lag


def _read_cpu_seconds(stack: Stack) -> float:
    """Processor time of daemon and code server, with their children, also those that ended."""
    assert stack.dagster is not None, "a stack has Dagster by default"
    children: list[Child | None] = [stack.dagster.code, stack.dagster.daemon]
    groups = {child.pid for child in children if child is not None}
    used = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended meanwhile
        if int(after_name[2]) in groups:
            used += sum(map(int, after_name[11:15]))
    return used / TICKS_PER_SECOND


def _list_ticks(stack: Stack, since: float) -> Ticks:
    import dagster as dg
    from dagster._core.scheduler.instigation import TickStatus

    planner: list[float] = []
    failed = 0
    with dg.DagsterInstance.from_config(stack.env["DAGSTER_HOME"]) as instance:
        for state in instance.all_instigator_state():
            for tick in _read_instance_ticks(instance, state, since):
                failed += tick.status == TickStatus.FAILURE
                if state.instigator_name == "planner" and tick.end_timestamp:
                    planner.append(tick.end_timestamp - tick.timestamp)
    print(
        f"  {len(planner)} ticks of the planner, median {statistics.median(planner):.2f} s; {failed} failed", flush=True
    )
    return Ticks(planner, failed)


def _read_instance_ticks(instance: dg.DagsterInstance, state: Any, since: float) -> Sequence[Any]:
    return instance.get_ticks(state.instigator_origin_id, state.selector_id, after=since)
