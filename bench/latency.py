"""(f) From a sensor's tick to the committed slice, against an asset that does nothing on the same way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench import noop
from bench.harness import Result, Row, Target
from bench.world import World, build_order

if TYPE_CHECKING:
    import dagster as dg

    from dev.stack import Stack

RECORDS = 1000
LONGEST_SECONDS = 300.0


def tick_to_commit(world: World, rounds: int, records: int) -> Result:
    """(f) Runs that sensors ask for, from the tick to the end, in turn with runs that do nothing."""
    del records
    home = world.home / "latency"
    folder = home / "asked"
    folder.mkdir(parents=True)
    row = _measure(home, folder, rounds)
    return Result(
        name="f",
        title="From a sensor's tick to the committed slice",
        method=(
            f"From the tick that requests a run for {RECORDS:,} records to its end, with checks. The peer is an asset "
            "that does nothing, in the same queue."
        ),
        rows=[row],
        targets=[
            Target(
                "no-op runs that take as long as a slice",
                1 / row.ratio("Highwater", "no-op asset"),
                2.5,
                at_least=False,
            ),
        ],
    )


def _measure(home: Path, folder: Path, rounds: int) -> Row:
    from dev.dagster_services import DagsterServices
    from dev.stack import SENSORS, Stack

    base = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "SPARK_", "DAGSTER_HOME"))}
    with Stack(home, base=base, on_broker=_make_topics, extra={noop.ASKED: str(folder)}) as stack:
        assert stack.dagster is not None, "a stack has Dagster by default"
        stack.dagster.stop()
        services = DagsterServices(home, {**stack.env, SENSORS: "running"}, module="bench.noop")
        try:
            services.touch.start()
            services.launch_code()
            services.launch()
            services.wait_ready()
            return _run_rounds(stack, folder, rounds)
        finally:
            services.stop()


def _make_topics(stack: Stack) -> None:
    from tests.conftest import create_topic

    create_topic(stack.bootstrap, "orders", 4, {})
    create_topic(stack.bootstrap, "payments", 4, {})


def _run_rounds(stack: Stack, folder: Path, rounds: int) -> Row:
    import dagster as dg

    _write_reference(stack)
    seconds: dict[str, list[float]] = {"Highwater": [], "no-op asset": []}
    with dg.DagsterInstance.from_config(stack.env["DAGSTER_HOME"]) as instance:
        for turn in range(rounds + 1):
            took = {
                "Highwater": _run_seconds(instance, "orders_slice", turn, lambda: _produce(stack)),
                "no-op asset": _run_seconds(
                    instance,
                    "noop_job",
                    turn,
                    lambda turn=turn: (folder / f"n{turn}").touch(),  # type: ignore[misc]
                ),
            }
            if turn:  # the first round warms up
                for name, value in took.items():
                    seconds[name].append(value)
                print(f"  round {turn} of {rounds}: {took}", flush=True)
    return Row(f"{RECORDS:,} records", seconds)


def _write_reference(stack: Stack) -> None:
    from bench.world import write_customers
    from highwater.resources.lake import Lake
    from highwater.settings import Settings

    write_customers(Lake(Settings.from_environment(stack.env).lake))


def _produce(stack: Stack) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": stack.bootstrap, "linger.ms": 200})
    for number in range(RECORDS):
        key, value = build_order(number, RECORDS)
        producer.produce("orders", key=key, value=value, partition=0)
    producer.flush(30)


def _run_seconds(instance: dg.DagsterInstance, job: str, before: int, ask: Callable[[], None]) -> float:
    """Seconds from the beginning of the tick that asked for a run to the run's end."""
    import dagster as dg

    from dev.processes import wait_until

    done = dg.RunsFilter(job_name=job, statuses=[dg.DagsterRunStatus.SUCCESS])
    ask()
    wait_until(lambda: len(instance.get_run_records(done)) > before, LONGEST_SECONDS, f"a run of {job}")
    record = instance.get_run_records(done, limit=1)[0]
    return float(record.end_time or 0) - _tick_began(instance, record.dagster_run.tags["dagster/tick"])


def _tick_began(instance: dg.DagsterInstance, tick_id: str) -> float:
    """The time at which a tick began, in seconds since 1970."""
    for sensor in instance.all_instigator_state():
        for tick in instance.get_ticks(sensor.instigator_origin_id, sensor.selector_id, limit=100):
            if str(tick.tick_id) == tick_id:
                return tick.timestamp
    raise LookupError(f"tick {tick_id} is not among the last 100 of any sensor")
