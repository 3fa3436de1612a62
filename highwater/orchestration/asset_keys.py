"""The tables of a stream as assets: upstream tables, pool, engine and keys; its jobs' names and its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from highwater.orchestration import metadata
from highwater.orchestration.run_tags import STREAM_TAG
from highwater.tables import COMMENTS, select_stages

if TYPE_CHECKING:
    from highwater.declaration import Stream


@dataclass(frozen=True)
class Table:
    """One asset of a stream.

    Args:
        name: the table's name, and the last part of the asset's key.
        what: one sentence for the asset's page.
        above: the tables that it is made from; `kafka` is the topic.
        pool: whether runs take turns here.
        engine: the engine that computes it.
        spark: whether a session is opened for it.
        kinds: its other kinds in Dagster, beside Delta.
    """

    name: str
    what: str
    above: tuple[str, ...]
    pool: bool = False
    engine: str = "spark"
    spark: bool = True
    kinds: frozenset[str] = frozenset()


# Tables of every stream.
TABLES = (
    Table("raw", COMMENTS["raw"], ("kafka",)),
    Table("events", COMMENTS["events"], ("raw",)),
    Table("rejects", COMMENTS["rejects"], ("raw", "events")),
    Table("dlq", COMMENTS["dlq"], ("rejects",)),
    # Two merges into one table conflict, so they take turns.
    Table("current", COMMENTS["current"], ("events",), pool=True),
)

# Only one commit at a time succeeds, so runs take turns and no computed rows are thrown away.
METRICS = Table(
    "metrics",
    COMMENTS["metrics"],
    ("events", "current"),
    pool=True,
    engine="python",
)

# No part of the job that takes slices through the tables: it follows the prefix of slices that are done.
PUBLISHED = Table(
    "published",
    COMMENTS["published"],
    ("events", "dlq"),
    pool=True,
    engine="python",
    spark=False,
    kinds=frozenset({"kafka"}),
)


BY_NAME = {table.name: table for table in (*TABLES, METRICS, PUBLISHED)}


def build_slice_job_name(stream: Stream) -> str:
    """The job that takes slices of a stream through its tables."""
    return f"{stream.name}_slice"


def build_publish_job_name(stream: Stream) -> str:
    """The job that sends a stream's accepted events."""
    return f"{stream.name}_publish"


def build_topic_key(stream: Stream) -> dg.AssetKey:
    """The key of the external asset of the topic."""
    return dg.AssetKey(["kafka", stream.topic])


def build_table_key(stream: Stream, table: str) -> dg.AssetKey:
    """The key of a table's asset."""
    return dg.AssetKey([stream.name, table])


def build_table_keys(stream: Stream) -> list[dg.AssetKey]:
    """The keys of the tables that a run takes its slices through, upstream first."""
    return [build_table_key(stream, name) for name in select_stages(stream)]


def build_topic_spec(stream: Stream) -> dg.AssetSpec:
    """The topic, as the asset that Highwater reads and does not make."""
    return dg.AssetSpec(
        build_topic_key(stream),
        group_name=stream.name,
        kinds={"kafka"},
        owners=[stream.owner],
        tags={STREAM_TAG: stream.name},
        description=metadata.describe_asset(stream, f"The Kafka topic `{stream.topic}`."),
        metadata=metadata.build_stream_metadata(stream),
    )


def build_partitions_definition(stream: Stream) -> dg.DynamicPartitionsDefinition:
    """The partitions definition of a stream: its slice keys, in the order in which they were added."""
    return dg.DynamicPartitionsDefinition(name=stream.partitions_name)


def list_missing_keys(instance: dg.DagsterInstance, stream: Stream, keys: Sequence[str]) -> list[str]:
    """The keys that Dagster does not hold as partitions, in their order."""
    if not keys:
        return []
    known = instance.get_existing_dynamic_partitions(stream.partitions_name, list(keys))
    return [key for key in keys if key not in known]
