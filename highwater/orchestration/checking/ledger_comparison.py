"""Compares plans and attempts in the ledger with commits and rows in the lake."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.assets.publication_log import TABLE as PUBLISHED
from highwater.declaration import Stream
from highwater.orchestration.checking.slice_status import read_commit_attempts, read_stream_commits
from highwater.resources.commit_log import read_slice_keys
from highwater.resources.delta import list_slices_in_rows, query
from highwater.resources.lake import Lake

if TYPE_CHECKING:
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# The partitions of `metrics` are days: its check compares their rows with the events of all slices.
_BY_SLICE = ("raw", "events", "rejects", "dlq", PUBLISHED)
NAMED = 5


def compare(ledger: Ledger, lake: Lake, stream: Stream) -> list[str]:
    """Rows that the ledger lacks, or holds otherwise than the commits of a stream's tables say, in sentences.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    # The lake first: whatever is committed was planned before.
    there, slice_commits = read_table_slices(lake, stream), read_stream_commits(lake, stream)
    seen = read_commit_attempts(lake, stream, slice_commits).group_by_table().values()
    plans = {slice_.key: slice_ for slice_ in ledger.list_slices(stream.name)}
    issued: dict[str, int] = {}
    for topic, topic_id in {(slice_.topic, slice_.topic_id) for slice_ in plans.values()}:
        issued |= ledger.read_attempts(stream.name, topic, topic_id)
    return [
        *describe_orphan_slices(there, plans, stream.name),
        *_describe_plan_differences(plans, slice_commits["raw"]),
        *_describe_unissued_attempts(issued, {key: max(table.get(key, 0) for table in seen) for key in plans}),
    ]


def _describe_plan_differences(plans: Mapping[str, Slice], read: Mapping[str, SliceCommit]) -> list[str]:
    def select_facts(slice_: Slice) -> tuple[object, ...]:
        return slice_.topic_id, slice_.generation, slice_.ranges

    wrong = [
        key
        for key, slice_commit in sorted(read.items())
        if key in plans and select_facts(plans[key]) != select_facts(slice_commit.slice_)
    ]
    if not wrong:
        return []
    first, slice_commit = plans[wrong[0]], read[wrong[0]].slice_
    return [
        _format_problem(
            wrong,
            "were committed with other offsets than the ledger plans",
            f"the ledger says {first.offsets:,} offsets of {first.topic_id}, raw {slice_commit.offsets:,} of "
            f"{slice_commit.topic_id}",
            "restore the ledger that planned them",
        )
    ]


def _describe_unissued_attempts(issued: Mapping[str, int], seen: Mapping[str, int]) -> list[str]:
    behind = sorted(key for key, attempt in seen.items() if attempt > issued.get(key, 0))
    if not behind:
        return []
    first = behind[0]
    return [
        _format_problem(
            behind,
            "were committed under attempts that the ledger did not issue",
            f"the lake has attempt {seen[first]} of the first, the ledger issued {issued.get(first, 0)}",
            "the ledger is older than the lake: restore a newer backup, or highwater rebuild-ledger into an empty one",
        )
    ]


def _format_problem(keys: Sequence[str], problem: str, values: str, remedy: str) -> str:
    return f"{len(keys):,} slices {problem}: {', '.join(keys[:NAMED])}; {values}; remedy: {remedy}"


def read_table_slices(lake: Lake, stream: Stream) -> dict[str, set[str]]:
    """For each table the slices that its rows name.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    found: dict[str, set[str]] = {}
    for name in _BY_SLICE:
        table = lake.open_stream_table(stream.name, name)
        if table is None:
            continue
        found[name] = read_slice_keys(table) | list_slices_in_rows(table)
    if current := lake.open_stream_table(stream.name, "current"):
        rows = query(current, "SELECT DISTINCT updated_by_slice AS slice FROM t")
        found["current"] = {str(row["slice"]) for row in rows}
    return found


def describe_orphan_slices(there: Mapping[str, Collection[str]], planned: Collection[str], stream: str) -> list[str]:
    """Rows that the tables hold of slices that were never planned, in sentences.

    Args:
        there: from `read_table_slices`, looked at before the plan: whatever is committed was planned before.
        planned: the keys of all slices.
        stream: its name.
    """
    found = {name: sorted(set(keys).difference(planned)) for name, keys in there.items()}
    return [
        f"{name} holds rows of {len(keys):,} slices that the ledger does not know: {', '.join(keys[:NAMED])}; remedy: "
        f"highwater rebuild-ledger {stream} if plans were lost; else find out who wrote them, and delete them"
        for name, keys in found.items()
        if keys
    ]
