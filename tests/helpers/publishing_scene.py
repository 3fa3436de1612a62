"""Publication of accepted events, without Spark and Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from highwater.assets import published
from highwater.orchestration.build import build_defs
from highwater.orchestration.sensing.publishing import publish
from highwater.orchestration.sensing.run_requests import Request
from highwater.orchestration.sensing.stream_ticks import Tick, build_run_requests
from highwater.resources.dlq_topics import TopicShape
from highwater.slices import Slice
from tests.helpers.accepted import Event, FakeTransactionLog, Tables


@dataclass
class PublishingScene:
    """Tables without Spark, a topic in memory, and Dagster."""

    tables: Tables
    log: FakeTransactionLog
    instance: dg.DagsterInstance

    @property
    def resources(self) -> dict[str, Any]:
        opened = {
            "ledger": self.tables.ledger,
            "lake": self.tables.lake,
            "kafka": SimpleNamespace(list_topic_names=list),
        }
        return {name: SimpleNamespace(open=lambda one=one: one) for name, one in opened.items()}

    def plan(
        self, ordinal: int, topic: str | None = None, minute: float | None = None, **ranges: tuple[int, int]
    ) -> Slice:
        slice_ = self.tables.plan(ordinal, topic, minute, **ranges)
        self.instance.add_dynamic_partitions("orders_slices", [slice_.key])
        return slice_

    def decide(self, slice_: Slice, *offsets: int, **changes: object) -> None:
        """Take a slice through all tables up to dlq, with these offsets of partition 0 as events."""
        self.tables.read(slice_, len(offsets))
        self.tables.decide(slice_, [Event(0, n, f"o{n}", minute=n, changes=changes) for n in offsets])

    def tick(self) -> Tick:
        return publish(self.instance, SimpleNamespace(**self.resources), self.tables.stream)

    def asked(self) -> list[tuple[str, ...]]:
        return [request.keys for request in self.tick().requests]

    def run(self, request: Request) -> dg.ExecuteInProcessResult:
        """Run a request as the daemon does."""
        defs = build_defs(streams=[self.tables.stream], resources=self.resources)
        [asked] = build_run_requests(self.tables.stream, [request])
        return defs.resolve_job_def("orders_publish").execute_in_process(
            instance=self.instance, tags=asked.tags, raise_on_error=False
        )


@contextmanager
def open_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishingScene]:
    log = FakeTransactionLog()
    monkeypatch.setattr(published, "Transactions", log)
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: TopicShape(2, 1, {"max.message.bytes": "1000000"}))
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    with dg.DagsterInstance.ephemeral() as instance:
        yield PublishingScene(Tables(tmp_path), log, instance)
