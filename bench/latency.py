"""(f) From a sensor's tick to the committed slice, against an asset that does nothing in the same queue."""

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
OURS, PEER, FORKED = "Highwater", "no-op asset", "no-op asset, forked worker"
# The names under which `bench.noop` is served: by Dagster's own code server, and by ours.
NOOPS = {"noop": PEER, "forked_noop": FORKED}


def tick_to_commit(world: World, rounds: int, records: int) -> Result:
    """(f) Runs that sensors ask for, from the tick to the end, in turn with runs that do nothing."""
    del records
    home = world.home / "latency"
    folder = home / "asked"
    for name in NOOPS:
        (folder / name).mkdir(parents=True)
    row = _measure(home, folder, rounds)
    return Result(
        name="f",
        title="From a sensor's tick to the committed slice",
        method=(
            f"From the tick that requests a run for {RECORDS:,} records to its end, with checks. The peer is an asset "
            "that does nothing, in the same queue, served by `dagster api grpc`; beside it by `highwater serve-code`."
        ),
        rows=[row],
        targets=[Target("no-op runs that take as long as a slice", 1 / row.ratio(OURS, PEER), 2.5, at_least=False)],
    )


def _measure(home: Path, folder: Path, rounds: int) -> Row:
    from dev.stack import Stack

    base = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "SPARK_", "DAGSTER_HOME"))}
    with Stack(home, base=base, on_broker=_prepare, extra={noop.ASKED: str(folder)}) as stack:
        return _run_rounds(stack, folder, rounds)


def _prepare(stack: Stack) -> None:
    """Make the topics, and serve the peers beside the shipped code location, whose sensors alone run."""
    from dev.processes import LOOPBACK, accepts, free_port, wait_until

    _make_topics(stack)
    programs = {"noop": ["dagster", "api", "grpc"], "forked_noop": ["highwater", "serve-code"]}
    workspace = stack.home / "workspace.yaml"
    for name, program in programs.items():
        port = free_port()
        at = ["--host", LOOPBACK, "--port", str(port), "--module-name", "bench.noop", "--location-name", name]
        stack.run(name, ["env", f"HIGHWATER_BENCH_NAME={name}", "HIGHWATER_SENSORS=stopped", *program, *at])
        wait_until(lambda port=port: accepts(port), 60, f"the code server of {name}")  # type: ignore[misc]
        entry = f"  - grpc_server: {{host: {LOOPBACK}, port: {port}, location_name: {name}}}\n"
        workspace.write_text(workspace.read_text() + entry)


def _make_topics(stack: Stack) -> None:
    from tests.conftest import create_topic

    create_topic(stack.bootstrap, "orders", 4, {})
    create_topic(stack.bootstrap, "payments", 4, {})


def _run_rounds(stack: Stack, folder: Path, rounds: int) -> Row:
    import dagster as dg

    _write_reference(stack)
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *NOOPS.values())}
    with dg.DagsterInstance.from_config(stack.env["DAGSTER_HOME"]) as instance:
        for turn in range(rounds + 1):
            took = {OURS: _run_seconds(instance, "orders_slice", turn, lambda: _produce(stack))}
            for name, label in NOOPS.items():
                took[label] = _run_seconds(
                    instance,
                    f"{name}_job",
                    turn,
                    lambda name=name, turn=turn: (folder / name / f"n{turn}").touch(),  # type: ignore[misc]
                )
            if turn:  # the first round warms up
                for label, value in took.items():
                    seconds[label].append(value)
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
