"""Records that Spark's Kafka source cannot convert, read by our own consumer and handed to Spark as a Delta table."""

# Spark's source turns each timestamp into `java.sql.Timestamp`: one beyond the year 294247 fails the task, and one
# before 1582 comes out as another moment.

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.resources.delta_rs_writes import list_folders_with_files, remove_folder, rewrite_table

if TYPE_CHECKING:
    import pyarrow as pa

    from highwater.assets.work import Work
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.slices import OffsetRange

# The folder of these tables, in that of the stream.
FOLDER = "_client_reads"
# So much is held in memory at a time: one record of Kafka's largest default size, or many small ones.
BYTES_PER_BATCH = 32 * 1024 * 1024
RECORDS_PER_BATCH = 50_000
# A run is long over by then: what it left was killed with it.
LEFT_OVER = timedelta(days=1)
# Each of these tables has the moment of its read in its name.
_MOMENT = "%Y%m%dT%H%M%S"


def stage_records(work: Work, topic: str, ranges: Mapping[int, OffsetRange]) -> str:
    """Read ranges of a topic into a table of their own; returns its path.

    Raises:
        DependencyUnavailableError: Kafka or the lake is unavailable.
        OffsetsExpiredError: the log begins after the start of a range.
    """
    name = f"{datetime.now(UTC):{_MOMENT}}-{uuid.uuid4().hex}"
    path = work.lake.build_table_path(work.stream.name, f"{FOLDER}/{name}")
    rewrite_table(
        path,
        build_record_schema(),
        _read_batches(work.kafka, topic, ranges),
        f"ranges of {topic}, while a run reads them",
    )
    return path


def remove(lake: Lake, stream: str, path: str) -> None:
    """Remove one of these tables.

    Raises:
        DependencyUnavailableError: the storage is unavailable.
    """
    remove_folder(lake.root, f"{stream}/{FOLDER}/{path.rpartition('/')[2]}")


def remove_left_over(lake: Lake, stream: str, age: timedelta = LEFT_OVER) -> int:
    """Remove the tables that runs left behind that were killed; returns how many.

    A run that still reads such a table fails, and is tried again.

    Args:
        lake: the tables.
        stream: the stream's name.
        age: younger ones stay.

    Raises:
        DependencyUnavailableError: the storage is unavailable.
    """
    before = f"{datetime.now(UTC) - age:{_MOMENT}}"
    old = [
        name for name in list_folders_with_files(lake.root, f"{stream}/{FOLDER}") if name.partition("-")[0] <= before
    ]
    for name in old:
        remove_folder(lake.root, f"{stream}/{FOLDER}/{name}")
    return len(old)


def build_record_schema() -> pa.Schema:
    """The columns of a record that raw has too."""
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp_ms", pa.int64()),
            ("timestamp_type", pa.int32()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(header)),
        ]
    )


def _read_batches(kafka: Kafka, topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for message in kafka.read(topic, ranges):
        kind, timestamp_ms = message.timestamp()
        key: Any = message.key()
        value: Any = message.value()
        headers: Any = message.headers()
        batch.append(
            {
                "topic": topic,
                "partition": message.partition(),
                "offset": message.offset(),
                "timestamp_ms": timestamp_ms,
                # librdkafka numbers the types from 1 on, Spark and the protocol from 0 on.
                "timestamp_type": kind - 1,
                "key": key,
                "value": value,
                "headers": [{"key": name, "value": content} for name, content in headers] if headers else None,
            }
        )
        size += sum(len(part) for part in (key, value, *(content for _, content in headers or ())) if part)
        if size >= BYTES_PER_BATCH or len(batch) >= RECORDS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
