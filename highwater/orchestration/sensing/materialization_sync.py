"""Materializations that the lake proves and Dagster lacks, for the sensor `repair` to report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import dagster as dg

from highwater.assets.commit import Clock, build_report
from highwater.assets.work import SliceReport
from highwater.declaration import Stream
from highwater.orchestration import metadata
from highwater.orchestration.asset_keys import METRICS, build_table_key
from highwater.orchestration.checking.check_rules import SliceAttempts
from highwater.orchestration.sensing.run_history import select_materialised_slices
from highwater.resources.delta import count_slice_rows
from highwater.resources.lake import Lake
from highwater.slice_commits import SliceCommit
from highwater.slices import Slice

# The decision says what was published, and what a slice brought to `current`.
DECISIONS = {"dlq": "rejects", "current": "events"}


def read_missing_events(
    instance: dg.DagsterInstance,
    lake: Lake,
    stream: Stream,
    slices: Sequence[Slice],
    there: SliceAttempts,
    materialised: Mapping[str, Collection[str]],
    most: int,
) -> list[dg.AssetMaterialization]:
    """Materialisations that the lake proves and Dagster does not hold.

    Args:
        instance: Dagster's.
        lake: the tables.
        stream: the stream.
        slices: the slices to compare.
        there: the commits in the tables.
        materialised: for each table the slices that Dagster held before. Others may have come since, so Dagster is
            asked for these again.
        most: at most this many.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    found: list[dg.AssetMaterialization] = []
    for table, attempts in there.group_by_table().items():
        key = build_table_key(stream, table)
        before = materialised.get(table, ())
        lacking = [slice_ for slice_ in slices if slice_.key in attempts and slice_.key not in before]
        known = select_materialised_slices(instance, key, [slice_.key for slice_ in lacking])
        some_slices = [slice_ for slice_ in lacking if slice_.key not in known][: most - len(found)]
        found += [
            dg.AssetMaterialization(
                key,
                partition=report.slice_.key,
                description="The lake holds this slice; Dagster had no record of it.",
                metadata=metadata.build_slice_metadata(report),
            )
            for report in read_reports(lake, stream, table, some_slices, attempts)
        ]
    return found


def read_reports(
    lake: Lake, stream: Stream, table: str, some_slices: Sequence[Slice], attempts: Mapping[str, int]
) -> list[SliceReport]:
    """The metadata that commits and log hold for slices in a table; for a reprocessed slice the attempt alone.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    keys = [slice_.key for slice_ in some_slices]
    if not keys:
        return []
    slice_commits = lake.load_slice_commits(stream.name, DECISIONS.get(table, table), keys)
    opened = lake.open_stream_table(stream.name, table)
    # A row of `metrics` or `current` belongs to no slice alone.
    rows = {} if opened is None or table in {METRICS.name, "current"} else count_slice_rows(opened, keys)
    version = -1 if opened is None else opened.version()

    def find_slice_commit(slice_: Slice) -> SliceCommit:
        slice_commit, attempt = slice_commits.get(slice_.key), attempts[slice_.key]
        return (
            slice_commit
            if slice_commit is not None and slice_commit.attempt == attempt
            else SliceCommit(slice_, attempt, None, {})
        )

    return [
        build_report(slice_, find_slice_commit(slice_), rows.get(slice_.key), version, Clock(), {})
        for slice_ in some_slices
    ]
