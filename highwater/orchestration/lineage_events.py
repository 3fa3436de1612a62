"""The OpenLineage events of a step: offsets of Kafka topics in, rows of Delta tables out, no payload and no secret."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

import attr
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    DatasetFacet,
    InputDatasetFacet,
    RunFacet,
    dataset_version_dataset,
    error_message_run,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    storage_dataset,
)
from openlineage.client.naming.dataset import ABFSS, GCS, HDFS, S3, DatasetNaming, Kafka, LocalFileSystem
from openlineage.client.uuid import generate_new_uuid

from highwater.errors import HighwaterError
from highwater.orchestration.failures import find_runbook_entry
from highwater.slices import encode_ranges

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work
    from highwater.orchestration.asset_keys import Table
    from highwater.slices import Slice

PRODUCER = "urn:highwater"
DEFAULT_NAMESPACE = "highwater"
KAFKA_PORT = "9092"
# 1,000 ranges are some 50 KB. The facet says how many ranges it leaves out.
MAX_RANGES = 1000


@attr.define
class OffsetsInputFacet(InputDatasetFacet):
    """The offsets of a Kafka topic that a step read, by slice: half-open ranges by partition."""

    slices: list[dict[str, Any]] = attr.field(factory=list)
    rangesLeftOut: int = 0  # noqa: N815 - OpenLineage writes names so

    @staticmethod
    def _get_schema() -> str:
        return f"{PRODUCER}:facet:offsets:1"


@attr.define
class SlicesRunFacet(RunFacet):
    """The slices of a step, with their offsets, and the attempt of each that is in the table afterwards."""

    slices: list[dict[str, Any]] = attr.field(factory=list)
    rangesLeftOut: int = 0  # noqa: N815

    @staticmethod
    def _get_schema() -> str:
        return f"{PRODUCER}:facet:slices:1"


@dataclass(frozen=True)
class LineageStep:
    """A step that takes slices through one table.

    Args:
        run_id: the id of this try of the step.
        name: the name of the asset.
        slices: the slices.
        inputs: the Kafka topics and tables that it reads.
        outputs: the table that it writes, and then the topics.
        parent: Dagster's run, where its id is a UUID, and the name of its job.
    """

    run_id: str
    name: str
    slices: Sequence[Slice]
    inputs: Sequence[DatasetNaming]
    outputs: Sequence[DatasetNaming]
    parent: tuple[str, str] | None

    @classmethod
    def from_work(cls, work: Work, table: Table, job: str) -> LineageStep:
        """The step of a run.

        Args:
            work: the slices and the connections.
            table: the table.
            job: the name of Dagster's job.
        """
        stream, bootstrap = work.stream, work.kafka.bootstrap
        return cls(
            str(generate_new_uuid()),
            f"{stream.name}/{table.name}",
            work.slices,
            [*_select_input_datasets(work, table)],
            [
                build_delta_dataset(work.lake.build_table_path(stream.name, table.name)),
                *[build_kafka_dataset(bootstrap, topic) for topic in _select_output_topics(work, table)],
            ],
            (work.run, job) if _is_uuid(work.run) else None,
        )

    def build_event(
        self, state: str, reports: Sequence[SliceReport] = (), error: BaseException | None = None
    ) -> RunEvent:
        """An event of the step.

        Args:
            state: START, COMPLETE, FAIL or ABORT.
            reports: the rows and attempts of its slices, on completion.
            error: why it failed; of it the event has the name alone.
        """
        kind = job_type_job.JobTypeJobFacet("BATCH", "HIGHWATER", "TASK", producer=PRODUCER)
        return RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            producer=PRODUCER,
            eventType=RunState(state),
            run=Run(self.run_id, self._build_run_facets(reports, error)),
            job=Job(_read_namespace(), self.name, {"jobType": kind}),
            inputs=[self._build_input(one) for one in self.inputs],
            outputs=[_build_output(one, reports) for one in self.outputs],
        )

    def _build_run_facets(self, reports: Sequence[SliceReport], error: BaseException | None) -> dict[str, RunFacet]:
        slices, left_out = _to_plain_slices(self.slices, {report.slice_.key: report for report in reports})
        found: dict[str, RunFacet] = {"highwater_slices": SlicesRunFacet(slices, left_out, producer=PRODUCER)}
        if self.parent is not None:
            run, job = self.parent
            found["parent"] = parent_run.ParentRunFacet(
                parent_run.Run(run), parent_run.Job(_read_namespace(), job), producer=PRODUCER
            )
        if error is not None:
            found["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                _describe_error(error), "python", producer=PRODUCER
            )
        return found

    def _build_input(self, dataset: DatasetNaming) -> InputDataset:
        facets: dict[str, InputDatasetFacet] = {}
        if isinstance(dataset, Kafka):
            slices, left_out = _to_plain_slices([one for one in self.slices if one.topic == dataset.topic], {})
            facets["highwater_offsets"] = OffsetsInputFacet(slices, left_out, producer=PRODUCER)
        return InputDataset(dataset.get_namespace(), dataset.get_name(), facets)


def _select_input_datasets(work: Work, table: Table) -> Iterator[DatasetNaming]:
    for name in table.above:
        if name == "kafka":
            topics = sorted({one.topic for one in work.slices})
            yield from (build_kafka_dataset(work.kafka.bootstrap, topic) for topic in topics)
        else:
            yield build_delta_dataset(work.lake.build_table_path(work.stream.name, name))
    if table.name == "events" and work.stream.lookup is not None:
        yield build_delta_dataset(work.lake.build_reference_path(work.stream.lookup.table))


def _select_output_topics(work: Work, table: Table) -> tuple[str, ...]:
    stream = work.stream
    if table.name == "dlq":
        return stream.dlq_topics
    return (stream.publishes.topic,) if table.name == "published" and stream.publishes else ()


def _build_output(dataset: DatasetNaming, reports: Sequence[SliceReport]) -> OutputDataset:
    found = OutputDataset(dataset.get_namespace(), dataset.get_name())
    if isinstance(dataset, Kafka):
        return found
    storage = storage_dataset.StorageDatasetFacet("delta", "parquet", producer=PRODUCER)
    facets: dict[str, DatasetFacet] = {"storage": storage}
    at = max((report.delta_version for report in reports), default=-1)
    if at >= 0:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(str(at), producer=PRODUCER)
    found.facets = facets
    if reports:
        statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=sum(report.rows for report in reports), producer=PRODUCER
        )
        found.outputFacets = {"outputStatistics": statistics}
    return found


def _to_plain_slices(slices: Sequence[Slice], reports: dict[str, SliceReport]) -> tuple[list[dict[str, Any]], int]:
    """The slices as plain values with at most `MAX_RANGES` ranges in all, and how many ranges are left out."""
    found: list[dict[str, Any]] = []
    room = MAX_RANGES
    for one in slices:
        some = list(encode_ranges(one.ranges).items())[:room]
        room -= len(some)
        ranges = [{"partition": int(p), "start": start, "end": end} for p, (start, end) in some]
        plain = {"slice": one.key, "topic": one.topic, "generation": one.generation, "ranges": ranges}
        if (report := reports.get(one.key)) is not None:
            plain |= {"attempt": report.attempt, "rows": report.rows}
        found.append(plain)
    return found, sum(len(one.ranges) for one in slices) - (MAX_RANGES - room)


def _describe_error(error: BaseException) -> str:
    """The name of an error and its entry in the runbook: its text may repeat a value of a record."""
    name = type(error).__name__
    return f"{name}: see {find_runbook_entry(error)}" if isinstance(error, HighwaterError) else name


def build_kafka_dataset(bootstrap: str, topic: str) -> DatasetNaming:
    """The name of a topic: its namespace is the first of the brokers' addresses.

    Args:
        bootstrap: the addresses, separated by commas; librdkafka takes a protocol before each.
        topic: the topic.
    """
    first = bootstrap.split(",", maxsplit=1)[0].strip().rpartition("://")[2]
    host, _, port = first.rpartition(":")
    return Kafka(host, port, topic) if host and not first.endswith("]") else Kafka(first, KAFKA_PORT, topic)


def build_delta_dataset(path: str) -> DatasetNaming:
    """The name of a Delta table by its path or URI, as OpenLineage names places of storage; logins are left out.

    Args:
        path: the path, or a URI such as `s3a://bucket/lake/orders/raw`.
    """
    parts = urlsplit(path)
    user, _, host = parts.netloc.rpartition("@")
    name = parts.path.strip("/")
    if parts.scheme in {"", "file"}:
        return LocalFileSystem(parts.path)
    if parts.scheme in {"s3", "s3a", "s3n"}:
        return S3(host, name)
    if parts.scheme in {"abfs", "abfss"}:
        return ABFSS(user, host.partition(".")[0], name)
    if parts.scheme == "gs":
        return GCS(host, name)
    if parts.scheme == "hdfs":
        return HDFS(parts.hostname or "", str(parts.port or 8020), parts.path)
    return OtherStorage(f"{parts.scheme}://{host}", parts.path)


@dataclass(frozen=True)
class OtherStorage:
    """The name of a place of storage that OpenLineage's naming does not list."""

    namespace: str
    name: str

    def get_namespace(self) -> str:
        """The part that names the storage."""
        return self.namespace

    def get_name(self) -> str:
        """The path of the table."""
        return self.name


def _read_namespace() -> str:
    return os.environ.get("OPENLINEAGE_NAMESPACE") or DEFAULT_NAMESPACE


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
