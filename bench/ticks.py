"""(e) A tick of the planner while partitions and plans grow."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from assets.streams.orders import STREAM as ORDERS
from bench.harness import Result, Row, Target, measure_seconds
from bench.world import PARTITIONS as FEW
from bench.world import World, fill_topic
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.ledger import Ledger
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.sensing.topic_planner import PlanningResult

PARTITIONS = (10, 100, 1000)
PLANS = (100, 10_000, 100_000)
IN_TIER = 1_000_000


def measure_planner_ticks(world: World, rounds: int, records: int) -> Result:
    """(e) Ticks that plan one slice each, at three numbers of partitions and of plans.

    Raises:
        RuntimeError: a tick planned nothing, so its time says nothing.
    """
    del records
    by_partitions = [_measure_partitions(world, n, rounds) for n in PARTITIONS]
    by_plans = _measure_plans(world, rounds)
    tier = _measure_tier(world, rounds)
    return Result(
        name="e",
        title="A tick of the planner",
        method=(
            "A tick inspects a topic, reads the last record of each partition, and stores one slice in SQLite. The "
            "tier's figure is all ticks until it is planned."
        ),
        rows=[*by_partitions, *by_plans, tier],
        targets=[
            Target("seconds at 1,000 partitions", by_partitions[-1].median("tick"), 1.0, at_least=False),
            Target(
                "ticks at 100,000 plans in ticks at 100",
                by_plans[-1].median("tick") / by_plans[0].median("tick"),
                1.2,
                at_least=False,
            ),
            Target(f"seconds for a tier of {IN_TIER:,} records", tier.median("tick"), 1.0, at_least=False),
        ],
    )


def _measure_partitions(world: World, partitions: int, rounds: int) -> Row:
    from tests.conftest import create_topic

    topic = f"bench-e-{partitions}"
    create_topic(world.bootstrap, topic, partitions, {})
    # What came is planned at once: a tick that waits for more stores nothing.
    stream = replace(ORDERS, topic=topic, limits=replace(ORDERS.limits, min_offsets=1))
    bed = world.fresh(stream)
    planner = Planner(bed.ledger, world.kafka())
    seconds = [_tick(world, planner, stream, partitions) for _ in range(rounds + 1)]
    return Row(f"{partitions:,} partitions", {"tick": seconds[1:]})


def _tick(world: World, planner: Planner, stream: Stream, partitions: int) -> float:
    """Seconds of a tick that finds one new record in each partition, and plans them."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": world.bootstrap})
    for partition in range(partitions):
        producer.produce(stream.topic, value=b"{}", partition=partition)
    if producer.flush(60):
        raise RuntimeError(f"{stream.topic} did not take a record in each partition")
    begin = time.perf_counter()
    tick = planner.tick(stream, datetime.now(UTC))
    seconds = time.perf_counter() - begin
    _ensure_planned(tick, partitions)
    return seconds


def _ensure_planned(tick: PlanningResult, partitions: int) -> None:
    """Ensure that the tick did all of its work: it planned every partition, and read its last record."""
    read = {
        p
        for slice_ in tick.slices
        for p, r in slice_.ranges.items()
        if p in slice_.fingerprints and slice_.fingerprints[p].offset in r
    }
    if len(read) != partitions:
        raise RuntimeError(f"{len(read)} of {partitions} partitions were planned and read: {tick.lines}")


def _measure_plans(world: World, rounds: int) -> list[Row]:
    """Ledgers of three sizes on one topic, their ticks in turn."""
    stream = fill_topic(world, "bench-e-plans", FEW)
    planners = {n: Planner(_open_ledger(world, stream, n), world.kafka()) for n in PLANS}
    seconds: dict[int, list[float]] = {n: [] for n in PLANS}
    for turn in range(-2, 3 * rounds):
        for n, planner in planners.items():
            took = _tick(world, planner, stream, FEW)
            if turn >= 0:
                seconds[n].append(took)
    return [Row(f"{n:,} plans", {"tick": seconds[n]}) for n in PLANS]


def _measure_tier(world: World, rounds: int) -> Row:
    """All records of a tier, which are due, planned under a ledger that is new each time."""
    from tests.conftest import create_topic

    stream = replace(ORDERS, topic="bench-e-tier", tiers=(timedelta(seconds=1),))
    [topic] = stream.tier_topics
    create_topic(world.bootstrap, topic, 4, {"message.timestamp.type": "LogAppendTime"})
    _fill_tier(world, topic)
    time.sleep(2)  # longer than the longest wait of the tier
    seconds = [
        measure_seconds(partial(_plan_all, world, world.fresh(stream).ledger, stream, topic)) for _ in range(rounds + 1)
    ]
    return Row(f"a tier of {IN_TIER:,} records", {"tick": seconds[1:]})


def _fill_tier(world: World, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": world.bootstrap, "linger.ms": 50})
    for number in range(IN_TIER):
        while True:
            try:
                producer.produce(topic, value=b"{}", partition=number % 4)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(60)


def _plan_all(world: World, ledger: Ledger, stream: Stream, topic: str) -> None:
    kafka, planned = world.kafka(), 0
    while slices := plan_tier(ledger, kafka, stream, topic, datetime.now(UTC)).slices:
        planned += sum(slice_.offsets for slice_ in slices)
    if planned != IN_TIER:
        raise RuntimeError(f"{planned:,} of {IN_TIER:,} records were planned")


def _open_ledger(world: World, stream: Stream, plans: int) -> Ledger:
    bed = world.fresh(stream)
    Planner(bed.ledger, world.kafka()).tick(stream, datetime.now(UTC))
    last = bed.ledger.read_last_slice(stream.name, stream.topic)
    if last is None:
        raise RuntimeError("the first tick planned nothing")
    bed.ledger.add([_build_empty_slice(last, n) for n in range(1, plans)])
    return bed.ledger


def _build_empty_slice(last: Slice, n: int) -> Slice:
    ranges = {p: OffsetRange(r.end, r.end) for p, r in last.ranges.items()}
    return replace(last, ordinal=last.ordinal + n, ranges=ranges)
