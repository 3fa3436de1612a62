"""Readings of topic and lake that share nothing with the pipeline: by librdkafka, and by delta-rs without a JVM."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dev.intended import Headers
from highwater.errors import DependencyUnavailableError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

Row = Mapping[str, Any]

KAFKA_SECONDS = 15.0
# Numbers of the wire format: 0 is CreateTime, 1 LogAppendTime. librdkafka's constants lie one above them.
_TIMESTAMP_TYPES_ABOVE_WIRE = 1


class Place(NamedTuple):
    """The place of a record in its topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


@dataclass(frozen=True)
class TopicRecord:
    """A record as the topic holds it; the timestamp in milliseconds since 1970."""

    place: Place
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True)
class Tables:
    """The rows of a stream's tables, and what their commits say of each slice, as parsed JSON."""

    raw: Sequence[Row] = ()
    events: Sequence[Row] = ()
    rejects: Sequence[Row] = ()
    current: Sequence[Row] = ()
    dlq: Sequence[Row] = ()
    metrics: Sequence[Row] = ()
    slice_commits: Mapping[str, Sequence[Row]] = field(default_factory=dict)


# Written out here, since what is read must not depend on the settings that it proves.
_READER: dict[str, object] = {
    # A name is asked for and never used: without a subscription there is no group.
    "group.id": "highwater.reconciliation",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    # At its log's end a broker holds a fetch for half a second otherwise, once for each topic.
    "fetch.wait.max.ms": 10,
}


def read_topic(bootstrap: str, topic: str, config: Mapping[str, str] | None = None) -> dict[Place, TopicRecord]:
    """Every committed record of a topic. Nothing is subscribed, and no offset is committed.

    Raises:
        DependencyUnavailableError: the brokers do not answer, or the topic does not come to its end.
    """
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({**(config or {}), **_READER, "bootstrap.servers": bootstrap, "enable.partition.eof": True})
    try:
        known = consumer.list_topics(topic, timeout=KAFKA_SECONDS).topics[topic]
        if known.error is not None:
            raise _away(topic, known.error.str())
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in known.partitions])
        return _read_to_end(consumer, topic, set(known.partitions))
    finally:
        consumer.close()


def read_topics(
    bootstrap: str, topics: Sequence[str], config: Mapping[str, str] | None = None
) -> dict[str, dict[Place, TopicRecord]]:
    """The same of several topics; one that does not exist is left out."""
    from confluent_kafka.admin import AdminClient

    there = AdminClient({**(config or {}), "bootstrap.servers": bootstrap}).list_topics(timeout=KAFKA_SECONDS).topics
    return {topic: read_topic(bootstrap, topic, config) for topic in topics if topic in there}


def end_offsets(bootstrap: str, topic: str) -> dict[int, int]:
    """The offset after the last record of each partition that readers of committed records may reach."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({**_READER, "bootstrap.servers": bootstrap})
    try:
        partitions = consumer.list_topics(topic, timeout=KAFKA_SECONDS).topics[topic].partitions
        return {
            p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=KAFKA_SECONDS)[1] for p in partitions
        }
    finally:
        consumer.close()


def _read_to_end(consumer: Consumer, topic: str, partitions: set[int]) -> dict[Place, TopicRecord]:
    from confluent_kafka import KafkaError

    found: dict[Place, TopicRecord] = {}
    deadline = time.monotonic() + KAFKA_SECONDS
    while partitions:
        for message in consumer.consume(1000, 0.05):
            deadline = time.monotonic() + KAFKA_SECONDS
            error = message.error()
            if error is None:
                record = _record_of(message)
                found[record.place] = record
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the name that librdkafka gives it
                partitions.discard(message.partition() or 0)
            else:
                raise _away(topic, error.str())
        if time.monotonic() > deadline:
            raise _away(topic, f"no end of partitions {sorted(partitions)} within {KAFKA_SECONDS:.0f} s")
    return found


def _away(topic: str, found: str) -> DependencyUnavailableError:
    return DependencyUnavailableError(
        f"topic {topic} could not be read", found=found, remedy="check that the broker answers"
    )


def _record_of(message: Message) -> TopicRecord:
    kind, milliseconds = message.timestamp()
    headers: Any = message.headers() or ()  # the stub allows a mapping, which librdkafka never gives
    return TopicRecord(
        place=Place(message.partition() or 0, message.offset() or 0),
        timestamp=milliseconds,
        timestamp_type=kind - _TIMESTAMP_TYPES_ABOVE_WIRE,
        key=message.key(),
        value=message.value(),
        headers=tuple((str(name), _as_bytes(value)) for name, value in headers),
    )


def _as_bytes(value: object) -> bytes | None:
    return value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else None


def read_tables(lake: str, stream: str) -> Tables:
    """The tables of a stream; one that does not exist is empty here, and the comparison will miss its rows."""
    names = ("raw", "events", "rejects", "current", "dlq", "metrics")
    data: dict[str, Any] = {name: read_rows(f"{lake}/{stream}/{name}") for name in names}
    slice_commits = {name: _slice_commits(f"{lake}/{stream}/{name}") for name in names}
    return Tables(**data, slice_commits=slice_commits)


def _slice_commits(path: str) -> list[Row]:
    """The newest commit record of each slice in a table, from `_commits` and the entries of the table's log."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(path):
        return []
    table = DeltaTable(path)
    root, _, name = path.rpartition("/")
    mine = f"\"table\" = '{name}' AND table_id = '{table.metadata().id}' AND record IS NOT NULL"
    columns = "version, record, rows"
    found = [
        (row["version"], {**json.loads(row["record"]), "rows": row["rows"]})
        for row in read_rows(f"{root}/_commits", mine, columns)
    ]
    for version, said in _commit_infos(path):
        metadata = json.loads(said.get("userMetadata") or "{}")
        found += [(version, one) for one in metadata.get("highwater", {}).get("records", ())]
    newest = {one["slice"]: one for _, one in sorted(found, key=lambda it: (it[0], it[1]["rows"] is not None))}
    return [*newest.values()]


def _commit_infos(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The version of each entry of a table's log, and what its commit says of itself.

    Not from `DeltaTable.history`: a commit that says nothing of itself would shift the versions of those before it.
    """
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileSelector, PyFileSystem

    files = PyFileSystem(DeltaStorageHandler(path))
    for entry in files.get_file_info(FileSelector("_delta_log")):
        if entry.base_name.endswith(".json"):
            with files.open_input_stream(entry.path) as file:
                lines = file.read().splitlines()
            said: dict[str, Any] = next(
                (json.loads(line)["commitInfo"] for line in lines if line.startswith(b'{"commitInfo"')), {}
            )
            yield int(entry.base_name.removesuffix(".json")), said


def covered_ends(lake: str, stream: str, topic: str | None = None) -> dict[int, int]:
    """Up to which offset of each partition of a topic, by default the main one, the slices in raw reach."""
    ends: dict[int, int] = {}
    for slice_commit in _slice_commits(f"{lake}/{stream}/raw"):
        if slice_commit["slice"].rpartition("@")[0] != (topic or stream):
            continue
        for partition, (_, end) in slice_commit["ranges"].items():
            ends[int(partition)] = max(ends.get(int(partition), 0), end)
    return {partition: end for partition, end in ends.items() if end}


def is_covered(bootstrap: str, lake: str, stream: str, topic: str | None = None) -> bool:
    """Whether every offset of a topic, by default the main one, is in a slice of raw."""
    ends = {partition: end for partition, end in end_offsets(bootstrap, topic or stream).items() if end}
    return covered_ends(lake, stream, topic) == ends


def read_rows(path: str, where: str = "true", columns: str = "*") -> list[Row]:
    """Rows of a Delta table; none if there is no table."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    if not DeltaTable.is_deltatable(path):
        return []
    result = QueryBuilder().register("t", DeltaTable(path)).execute(f"SELECT {columns} FROM t WHERE {where}")
    rows: list[Row] = pa.table(result).to_pylist()
    return rows
