"""Results of `slices_tile` and `offsets_as_planned`: slices tile, and raw holds the planned records (I2, I4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.plans import Generation
from highwater.retention import count_expired_rows
from highwater.tiling import TilingFault, detect_tiling_faults

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.checking.offset_queries import RawRows, RawSlices
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

ABSENT = CheckResult(passed=False, text="the slice is not in raw")


def check_slices_tile(ledger: Ledger, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether it begins where the one before it ends, or after a recorded loss.

    Raises:
        DependencyUnavailableError: the ledger could not be read.
    """
    slices = ledger.get(keys)
    generations = _read_generations(ledger, stream, slices)
    losses = ledger.list_losses(stream.name)
    return {
        slice_.key: _build_tiling_result(
            slice_,
            detect_tiling_faults(
                [slice_], generations[slice_.topic, slice_.generation], losses, ledger.read_previous_slice(slice_)
            ),
        )
        for slice_ in slices
    }


def list_all_tiling_faults(ledger: Ledger, stream: Stream, slices: Iterable[Slice]) -> list[TilingFault]:
    """The places at which the slices of a stream, all of them given, do not tile.

    Raises:
        DependencyUnavailableError: the ledger could not be read.
    """
    groups: dict[tuple[str, int], list[Slice]] = {}
    for slice_ in sorted(slices, key=lambda one: one.ordinal):
        groups.setdefault((slice_.topic, slice_.generation), []).append(slice_)
    losses = ledger.list_losses(stream.name)
    generations = _read_generations(ledger, stream, [group[0] for group in groups.values()])
    return [fault for name, group in groups.items() for fault in detect_tiling_faults(group, generations[name], losses)]


def _read_generations(ledger: Ledger, stream: Stream, slices: Iterable[Slice]) -> dict[tuple[str, int], Generation]:
    """The generations of the slices; one that the ledger does not hold began wherever its first slice does."""
    found = {
        (topic, generation.number): generation
        for topic in {slice_.topic for slice_ in slices}
        for generation in ledger.topics.list_generations(stream.name, topic)
    }
    unknown = {
        (slice_.topic, slice_.generation): Generation(
            stream.name,
            slice_.topic,
            slice_.topic_id,
            slice_.generation,
            dict.fromkeys(slice_.ranges),
            slice_.planned_at,
        )
        for slice_ in slices
    }
    return unknown | found


def _build_tiling_result(slice_: Slice, found: Sequence[TilingFault]) -> CheckResult:
    if not found:
        return CheckResult(passed=True, text=f"{len(slice_.ranges)} ranges begin where those before them end")
    samples = [
        {"partition": fault.partition, "expected": fault.expected, "found": fault.found} for fault in found[:SAMPLES]
    ]
    text = (
        f"{found[0].text}. The ledger was changed beside Highwater: restore it, or highwater accept-loss records a hole"
    )
    return CheckResult(passed=False, text=text, numbers={"tiling_faults": len(found)}, samples=samples)


def check_offsets_as_planned(found: RawSlices) -> dict[str, CheckResult]:
    """For each slice whether the commit of raw names the planned offsets, and its rows are of these, each once."""
    return {
        slice_.key: _check_as_planned(slice_, found.slice_commits[slice_.key], found.rows[slice_.key])
        if slice_.key in found.slice_commits
        else ABSENT
        for slice_ in found.slices
    }


def _check_as_planned(slice_: Slice, slice_commit: SliceCommit, rows: RawRows) -> CheckResult:
    numbers = {"rows": rows.rows, "doubled": rows.doubled, "stretches_outside": len(rows.outside)}
    problem = find_plan_difference(slice_, slice_commit, "raw")
    if problem is None and rows.doubled:
        problem = f"{rows.doubled:,} rows have an offset that has one already"
    if problem is None and rows.outside:
        problem = f"rows have offsets that were not planned: {rows.outside[0]}"
    if problem is None:
        gone = f"; {count_expired_rows(slice_commit):,} have expired" if count_expired_rows(slice_commit) else ""
        text = f"{rows.rows:,} rows, each under a planned offset of its own{gone}"
        return CheckResult(passed=True, text=text, numbers=numbers)
    samples = [{"outside": place} for place in rows.outside[:SAMPLES]]
    text = f"{problem}. The table was changed beside Highwater: restore it, or materialise the slice again from raw on"
    return CheckResult(passed=False, text=text, numbers=numbers, samples=samples)


def find_plan_difference(slice_: Slice, slice_commit: SliceCommit, table: str) -> str | None:
    """The difference of a commit's offsets from the plan, in a sentence; None if there is none."""
    planned = (slice_.topic_id, slice_.generation, dict(slice_.ranges))
    committed = (slice_commit.slice_.topic_id, slice_commit.slice_.generation, dict(slice_commit.slice_.ranges))
    if planned == committed:
        return None
    names = ("topic ID", "generation", "ranges")
    differs = [name for name, one, other in zip(names, planned, committed, strict=True) if one != other]
    return f"the commit of {table} names other offsets than were planned: {', '.join(differs)}"


def find_commit_difference(slice_: Slice, slice_commit: SliceCommit, table: str, rows: int | None) -> str | None:
    """The difference of a commit's offsets or rows from the expected ones, in a sentence; None if there is none.

    Args:
        slice_: the plan.
        slice_commit: the commit's facts about the slice.
        table: the commit's table.
        rows: how many the commit must name; None if nobody knows.
    """
    if (
        (problem := find_plan_difference(slice_, slice_commit, table))
        or None in {rows, slice_commit.rows}
        or rows == slice_commit.rows
    ):
        return problem
    return f"the commit of {table} names {slice_commit.rows:,} rows, and should of {rows:,}"
