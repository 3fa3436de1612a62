"""(k) What looking costs: `status` at 100,000 slices, the audit of a whole stream, the checks of a slice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.streams.orders import STREAM as ORDERS
from bench.harness import Result, Row, Target, measure_seconds
from bench.tables import PARTITIONS, Maker, write_log
from bench.world import Bed, World, add_orders, build_last_slices, fill_topic
from highwater.assets import current, dlq, events, metrics, raw, rejects
from highwater.orchestration.checking.checks import CHECKS, Sources
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from highwater.declaration import Stream

SLICES = 100_000
WIDTH = 50_000
# Slices that are materialised and checked, and the records of each.
CHECKED, RECORDS_CHECKED = 6, 50_000
STATUS_SECONDS, AUDIT_SECONDS, AUDIT_GIGABYTES, SHARE_OF_CHECKS = 1.5, 120, 2.0, 0.25
TABLES = (raw, events, rejects, dlq, current, metrics)


def measure_looks(world: World, rounds: int, records: int) -> Result:
    """(k) `highwater status` at 100,000 slices, `highwater audit` over all tables, and the checks of single slices."""
    planned, sent = build_status_rows(world, rounds)
    whole, behind = _audit(world, records)
    checked = _measure_checks(world)
    return Result(
        name="k",
        title="What looking costs",
        method=(
            f"`status` has a ledger of {SLICES:,} slices, without and with the tables of a stream that publishes. "
            f"`audit --versions --keys` reads {records:,} records without an error. "
            f"Then {CHECKED} slices pass all tables and checks, in a new stream and behind those records."
        ),
        rows=[
            planned,
            sent,
            Row(f"audit, {records:,} records", {"seconds": [whole.seconds]}),
            checked,
            behind,
        ],
        targets=[
            Target("seconds of status, planned", planned.median("seconds"), STATUS_SECONDS, at_least=False),
            Target("seconds of status, sent", sent.median("seconds"), STATUS_SECONDS, at_least=False),
            Target("seconds of the audit", whole.seconds, AUDIT_SECONDS, at_least=False),
            Target("gigabytes of memory at its most", whole.gigabytes, AUDIT_GIGABYTES, at_least=False),
            Target("false alarms", whole.alarms, 0, at_least=False),
            *(
                Target(
                    f"checks in materialisations, {what}",
                    row.ratio("all tables", "checks"),
                    SHARE_OF_CHECKS,
                    at_least=False,
                )
                for what, row in (("first slices", checked), (f"behind {records:,} records", behind))
            ),
        ],
    )


@dataclass(frozen=True)
class Ended:
    """A command that ended: its page, how long it took, and what memory it had at the most."""

    page: Any
    seconds: float
    gigabytes: float

    @property
    def alarms(self) -> int:
        """Errors of an audit, and checks of versions that do not pass."""
        failed = [name for name, one in self.page["versions"].items() if one["result"] != "passed"]
        return len(self.page["errors"]) + len(failed)


def _run(world: World, bed: Bed, *arguments: str) -> Ended:
    """Run the command on a bed, in a process of its own."""
    declarations = bed.home / "declarations"
    declarations.mkdir(exist_ok=True)
    (declarations / "orders.py").write_text(
        "from dataclasses import replace\nfrom assets.streams.orders import STREAM as ORDERS\n"
        f"STREAM = replace(ORDERS, topic={bed.stream.topic!r})\n"
    )
    environment = {
        **os.environ,
        "HIGHWATER_HOME": str(bed.home),
        "HIGHWATER_LAKE": bed.lake.root,
        "HIGHWATER_LEDGER_URL": f"sqlite:///{bed.home / 'ledger.sqlite'}",
        "HIGHWATER_KAFKA_BOOTSTRAP": world.bootstrap,
    }
    command = [
        sys.executable,
        "-m",
        "highwater.orchestration.cli.main",
        "--declarations",
        str(declarations),
        *arguments,
        "--json",
    ]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as child:
        assert child.stdout is not None
        out = child.stdout.read()
        _, _, usage = os.wait4(child.pid, 0)
        child.returncode = 0
    took = time.perf_counter() - begin
    [page] = json.loads(out)
    return Ended(page, took, usage.ru_maxrss / 1_000_000)


def build_status_rows(world: World, rounds: int) -> tuple[Row, Row]:
    """`status` of slices that are planned, and of as many whose events were accepted and sent."""
    stream = fill_topic(world, "bench-k-status", 4)
    bed = world.fresh(stream)
    Planner(bed.ledger, world.kafka()).tick(stream, datetime.now(UTC))
    last = bed.ledger.read_last_slice(stream.name, stream.topic)
    if last is None:
        raise RuntimeError("the first tick planned nothing")
    empty = {p: OffsetRange(offsets.end, offsets.end) for p, offsets in last.ranges.items()}
    more = [replace(last, ordinal=last.ordinal + n, ranges=empty) for n in range(1, SLICES)]
    bed.ledger.add(more)
    planned = _measure_status(world, bed, "planned", rounds)
    for table in ("events", "published"):
        write_log(bed.lake.build_table_path(stream.name, table), [last, *more])
    return planned, _measure_status(world, bed, "sent", rounds)


def _measure_status(world: World, bed: Bed, what: str, rounds: int) -> Row:
    found = [_run(world, bed, "status") for _ in range(rounds + 1)]
    if found[-1].page["slices"] != SLICES:
        raise RuntimeError(f"status reports {found[-1].page['slices']} slices")
    seconds = [one.seconds for one in found[1:]]
    print(f"  status, {what}: {seconds}", flush=True)
    return Row(f"status, {SLICES:,} slices {what}", {"seconds": seconds})


def _audit(world: World, records: int) -> tuple[Ended, Row]:
    """The audit of a large stream, and the checks of slices that come after it."""
    stream, topic_id = _write_topic(world, "bench-k")
    bed = world.fresh(stream)
    maker = Maker(stream, bed.lake, bed.ledger, topic_id, records, WIDTH)
    maker.write()
    _extend_topic(world, stream.topic, bed.ledger.topics.read_planned_ends(stream.name, stream.topic))
    ended = _run(world, bed, "audit", "--versions", "--keys")
    print(f"  audit: {ended.seconds:.1f} s, {ended.gigabytes:.2f} GB, errors {ended.page['errors']}", flush=True)
    if ended.page["ends"]["produced"] != maker.records:
        raise RuntimeError(f"of {maker.records} records the audit found {ended.page['ends']['produced']}")
    add_orders(world, stream.topic, (CHECKED + 1) * RECORDS_CHECKED, prefix="behind-")
    last = bed.ledger.read_last_slice(stream.name, stream.topic)
    behind = _run_checks(world, bed, f"behind {records:,} records", first=0 if last is None else last.ordinal + 1)
    bed.remove()
    return ended, behind


def _write_topic(world: World, name: str) -> tuple[Stream, str]:
    from tests.conftest import create_topic

    create_topic(world.bootstrap, name, PARTITIONS, {})
    return replace(ORDERS, topic=name), world.kafka().read_topic_state(name).topic_id


def _extend_topic(world: World, topic: str, ends: dict[int, int]) -> None:
    """Let the topic be as long as it was planned; no record of it is looked at."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": world.bootstrap, "queue.buffering.max.messages": 1_000_000})
    for partition, end in ends.items():
        for number in range(end):
            producer.produce(topic, b"", partition=partition)
            if number % 10_000 == 0:
                producer.poll(0)
                while len(producer) > 500_000:
                    producer.poll(0.1)
    if producer.flush(300):
        raise RuntimeError(f"{topic} was not filled")


def _measure_checks(world: World) -> Row:
    stream = fill_topic(world, "bench-k-slices", (CHECKED + 1) * RECORDS_CHECKED)
    bed = world.fresh(stream)
    found = _run_checks(world, bed, "the first of a stream", first=0)
    bed.remove()
    return found


def _run_checks(world: World, bed: Bed, where: str, first: int) -> Row:
    seconds: dict[str, list[float]] = {"all tables": [], "checks": []}
    for slice_ in build_last_slices(world, bed, CHECKED + 1, RECORDS_CHECKED, first=first):
        took = measure_seconds(lambda slice_=slice_: _materialise(world, bed, slice_))  # type: ignore[misc]
        seconds["all tables"].append(took)
        seconds["checks"].append(measure_seconds(lambda slice_=slice_: _check(world, bed, [slice_.key])))  # type: ignore[misc]
    print(f"  slices, {where}: {seconds}", flush=True)
    return Row(
        f"a slice of {RECORDS_CHECKED:,} records, {where}", {name: values[1:] for name, values in seconds.items()}
    )


def _materialise(world: World, bed: Bed, slice_: Slice) -> None:
    for table in TABLES:
        table.materialise(world.work(bed, [slice_]))


def _check(world: World, bed: Bed, keys: Sequence[str]) -> None:
    sources = Sources(bed.ledger, world.kafka(), bed.lake)
    for checks in CHECKS:
        if checks.select_names(bed.stream):
            checks.decide(sources, bed.stream, keys)
