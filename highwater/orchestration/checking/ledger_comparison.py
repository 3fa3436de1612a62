"""For `highwater ledger verify`: compares plans and attempts in the ledger with commits in the lake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.orchestration.checking.orphan_rows import NAMED, describe_orphan_slices, read_table_slices
from highwater.orchestration.checking.slice_status import read_commit_attempts, read_stream_commits

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice


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
