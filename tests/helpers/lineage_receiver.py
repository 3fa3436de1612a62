"""A receiver of lineage events, work that sends them, and the validation of an event by the client's classes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    dataset_version_dataset,
    error_message_run,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    storage_dataset,
    tags_run,
)
from openlineage.client.serde import Serde

from assets.streams.orders import STREAM
from dev.processes import LOOPBACK
from highwater.assets.work import Work
from highwater.orchestration.lineage_events import OffsetsInputFacet, SlicesRunFacet
from highwater.resources.lake import Lake
from highwater.slices import OffsetRange, Slice

DEADLINE = 60.0
NOW = datetime(2026, 3, 1, tzinfo=UTC)
RUN = "0b4a1c9e-8c1f-4c55-9d5e-1f0f3a3b6a01"
FACETS: dict[str, Any] = {
    "highwater_slices": SlicesRunFacet,
    "highwater_offsets": OffsetsInputFacet,
    "parent": lambda run, job, **rest: parent_run.ParentRunFacet(parent_run.Run(**run), parent_run.Job(**job), **rest),
    # The client adds them.
    "tags": lambda tags, **rest: tags_run.TagsRunFacet([tags_run.TagsRunFacetFields(**one) for one in tags], **rest),
    "errorMessage": error_message_run.ErrorMessageRunFacet,
    "jobType": job_type_job.JobTypeJobFacet,
    "version": dataset_version_dataset.DatasetVersionDatasetFacet,
    "storage": storage_dataset.StorageDatasetFacet,
    "outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
}


class Receiver:
    """A lineage server: events in their order, answered once `answering` is set."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.answering = threading.Event()
        self.answering.set()
        self.url = ""

    def take(self, body: bytes) -> None:
        with self.changed:
            self.events.append(json.loads(body))
            self.changed.notify_all()
        self.answering.wait(DEADLINE)

    def wait_for(self, number: int) -> list[dict[str, Any]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= number, DEADLINE)
            return [*self.events]


@contextmanager
def receiving() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/api/v1/lineage"
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        found.url = f"http://{LOOPBACK}:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield found
        finally:
            found.answering.set()
            server.shutdown()


def a_slice(topic: str, ordinal: int, **ranges: tuple[int, int]) -> Slice:
    planned = {int(p[1:]): OffsetRange(*bounds) for p, bounds in ranges.items()}
    return Slice("orders", topic, "A" * 22, 0, ordinal, planned, NOW)


FIRST = a_slice("orders", 0, p0=(0, 10), p1=(5, 7))


def work(*slices: Slice, root: str = "/mnt/lake") -> Work:
    nothing = cast("Any", None)
    kafka = cast("Any", SimpleNamespace(bootstrap="kafka-1:9093,kafka-2:9093"))
    return Work(STREAM, slices, nothing, Lake(root), nothing, kafka, print, run=RUN)


def rebuilt(plain: dict[str, Any]) -> RunEvent:
    """The event made again by the client's own classes, whose validators refuse anything else."""

    def facets(found: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, values in found.items():
            fields = {key: value for key, value in values.items() if not key.startswith("_")}
            made[name] = FACETS[name](**fields, producer=values["_producer"])
            assert made[name]._schemaURL == values["_schemaURL"]
        return made

    return RunEvent(
        eventTime=plain["eventTime"],
        producer=plain["producer"],
        eventType=RunState(plain["eventType"]),
        run=Run(plain["run"]["runId"], facets(plain["run"]["facets"])),
        job=Job(plain["job"]["namespace"], plain["job"]["name"], facets(plain["job"]["facets"])),
        inputs=[
            InputDataset(one["namespace"], one["name"], facets(one.get("inputFacets", {}))) for one in plain["inputs"]
        ],
        outputs=[
            OutputDataset(
                one["namespace"],
                one["name"],
                outputFacets=facets(one.get("outputFacets", {})),
                facets=facets(one.get("facets", {})),
            )
            for one in plain["outputs"]
        ],
    )


def without_empty(plain: Any) -> Any:
    """Plain values without empty objects, which the client writes or leaves out by the kind of a dataset."""
    if isinstance(plain, dict):
        made = {name: without_empty(value) for name, value in plain.items()}
        return {name: value for name, value in made.items() if value not in ({}, None)}
    return [without_empty(one) for one in plain] if isinstance(plain, list) else plain


def is_valid(plain: dict[str, Any]) -> bool:
    return bool(without_empty(Serde.to_dict(rebuilt(plain))) == without_empty(plain))
