"""Dagster's partitions definition of a stream, and which keys of slices Dagster lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from highwater.declaration import Stream


def build_partitions_definition(stream: Stream) -> dg.DynamicPartitionsDefinition:
    """The partitions definition of a stream: its slice keys, in the order in which they were added."""
    return dg.DynamicPartitionsDefinition(name=stream.partitions_name)


def list_missing_keys(instance: dg.DagsterInstance, stream: Stream, keys: Sequence[str]) -> list[str]:
    """The keys that Dagster does not hold as partitions, in their order."""
    if not keys:
        return []
    known = instance.get_existing_dynamic_partitions(stream.partitions_name, list(keys))
    return [key for key in keys if key not in known]
