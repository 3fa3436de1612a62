"""Repair's ticks over slices of the stream `orders`, with its circuit breaker and without Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import dagster as dg

from highwater.breaker import Circuit
from highwater.declaration import Stream
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.repairing import RULES as REPAIR
from highwater.orchestration.sensing.repairing import repair
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slices import Slice
from tests.helpers.support import FakeSilentKafka, make_stream
from tests.helpers.written_tables import a_slice

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = make_stream("orders")


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


OPEN = Circuit(since=NOON, why="poison", until=NOON + minutes(5))


def open_breaker(ledger: Ledger, circuit: Circuit = OPEN) -> None:
    ledger.breakers.update("orders", (), lambda *_: (circuit, ()))


ONE, TWO, THREE, FOUR = (a_slice(n, 100) for n in range(1, 5))
UNDECIDED, UNREAD, HALF = ("events", "rejects", "dlq", "current"), ("raw", "events", "rejects"), ("dlq",)


class Repairing:
    """A stream whose slices are planned long ago, and repair's ticks over ledger and lake, without Kafka."""

    def __init__(
        self, folder: Path, instance: dg.DagsterInstance, slices: Sequence[Slice], stream: Stream = STREAM
    ) -> None:
        self.stream = stream
        self.ledger, self.lake = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}"), Lake(str(folder / "lake"))
        self.instance = instance
        self.ledger.add(slices)
        instance.add_dynamic_partitions("orders_slices", [slice_.key for slice_ in slices])
        self.resources = SimpleNamespace(
            ledger=SimpleNamespace(open=lambda: self.ledger),
            lake=SimpleNamespace(open=lambda: self.lake),
            kafka=SimpleNamespace(open=FakeSilentKafka),
        )

    def fail_often(self, key: str) -> None:
        """Fail as often as repair requests the slice in a day.

        A run whose end is not reported has ended at the beginning of a second, which is before what came just ahead.
        """
        for _ in range(REPAIR.most_runs):
            self.fail(key)

    def fail(self, key: str, tables: Sequence[str] = ()) -> None:
        """A run that ends, and failed; of all tables, or of these."""
        run = dg.DagsterRun(
            "orders_slice",
            tags={"dagster/partition": key, "highwater/stream": "orders"},
            asset_selection=frozenset(build_table_key(self.stream, name) for name in tables) or None,
        )
        self.instance.add_run(run)
        self.instance.report_run_failed(run)

    def read(self, key: str) -> None:
        """A run for raw alone that ends."""
        self.fail(key, ["raw"])

    def tick(self) -> tuple[list[tuple[list[str], bool, str]], stream_ticks.Tick]:
        """Keys, whether raw alone, and who asks; and the tick."""
        found = repair(self.instance, self.resources, self.stream, None)
        return [([*r.keys], r.raw_alone, r.purpose) for r in found.requests], found


NAMED = {"highwater/stream": "orders"}
