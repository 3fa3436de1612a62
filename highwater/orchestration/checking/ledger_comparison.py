"""What `highwater ledger verify` compares: plans and attempts in the ledger with commits in the lake. No check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.orchestration.checking.orphan_rows import NAMED, orphan_slices, slices_there
from highwater.orchestration.checking.slice_status import attempts_of, committed

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice


def compare(ledger: Ledger, lake: Lake, stream: Stream) -> list[str]:
    """Rows that the ledger lacks, or holds otherwise than the commits of a stream's tables say, in sentences.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    # The lake first: whatever is committed was planned before.
    there, slice_commits = slices_there(lake, stream), committed(lake, stream)
    seen = attempts_of(lake, stream, slice_commits).tables().values()
    plans = {slice_.key: slice_ for slice_ in ledger.slices(stream.name)}
    issued: dict[str, int] = {}
    for topic, topic_id in {(slice_.topic, slice_.topic_id) for slice_ in plans.values()}:
        issued |= ledger.attempts_at(stream.name, topic, topic_id)
    return [
        *orphan_slices(there, plans, stream.name),
        *_differing(plans, slice_commits["raw"]),
        *_issued_again(issued, {key: max(table.get(key, 0) for table in seen) for key in plans}),
    ]


def _differing(plans: Mapping[str, Slice], read: Mapping[str, SliceCommit]) -> list[str]:
    def facts(slice_: Slice) -> tuple[object, ...]:
        return slice_.topic_id, slice_.generation, slice_.ranges

    wrong = [
        key
        for key, slice_commit in sorted(read.items())
        if key in plans and facts(plans[key]) != facts(slice_commit.slice_)
    ]
    if not wrong:
        return []
    first, slice_commit = plans[wrong[0]], read[wrong[0]].slice_
    return [
        _sentence(
            wrong,
            "were committed with other offsets than the ledger plans",
            f"the ledger says {first.offsets:,} offsets of {first.topic_id}, raw {slice_commit.offsets:,} of "
            f"{slice_commit.topic_id}",
            "restore the ledger that planned them",
        )
    ]


def _issued_again(issued: Mapping[str, int], seen: Mapping[str, int]) -> list[str]:
    behind = sorted(key for key, attempt in seen.items() if attempt > issued.get(key, 0))
    if not behind:
        return []
    first = behind[0]
    return [
        _sentence(
            behind,
            "were committed under attempts that the ledger did not issue",
            f"the lake has attempt {seen[first]} of the first, the ledger issued {issued.get(first, 0)}",
            "the ledger is older than the lake: restore a newer backup, or highwater rebuild-ledger into an empty one",
        )
    ]


def _sentence(keys: Sequence[str], problem: str, values: str, remedy: str) -> str:
    return f"{len(keys):,} slices {problem}: {', '.join(keys[:NAMED])}; {values}; remedy: {remedy}"
