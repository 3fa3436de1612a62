"""Refuses to decide a slice while one of its records holds it, and notes the hold in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.envelope import ORIGIN, Origin
from highwater.errors import SliceHeldError
from highwater.holds import HoldingRecords, format_place
from highwater.routing import find_destination

if TYPE_CHECKING:
    from pyspark.sql import Column

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.slice_commits import SliceCommit

# The column that shows whether a record holds its slice, and in the numbers of a split how many do.
HOLDS = "holds"
FIRST = "first_that_holds"


def holds_slice(stream: Stream) -> Column:
    """Whether a classified record holds its slice: one of the main topic that was not published before."""
    from pyspark.sql import functions as F

    from_main_topic = (F.col("topic") == stream.topic) & F.col("held_reason").isNull()
    return F.coalesce(from_main_topic & F.col("reason").isin(sorted(stream.holding)), F.lit(False))


def aggregate_holds(alive: Column) -> tuple[Column, Column]:
    """The number of records that hold a slice, and the first of them."""
    from pyspark.sql import functions as F

    that = alive & F.col(HOLDS)
    first = F.min(F.when(that, F.struct(*ORIGIN, "reason", "detail")))
    return F.count_if(that).alias(HOLDS), first.alias(FIRST)


def ensure_none_held(
    work: Work, committed: Mapping[str, SliceCommit], measured: Mapping[str, Mapping[str, Any]]
) -> None:
    """Ensure that no record holds a slice that is about to be decided; a hold is kept in the ledger.

    A slice that is in events keeps its rows, and later slices may follow: it is refused without a hold.

    Args:
        work: the connections.
        committed: the commits of the slices in events.
        measured: the numbers of the split, by slice.

    Raises:
        SliceHeldError: records hold one of them, and nobody released it.
    """
    held = {key: _found(row) for key, row in measured.items() if row.get(HOLDS)}
    known = work.ledger.holds.read_for_slices(list(held)) if held else {}
    for key, found in held.items():
        if key in known and known[key].release is not None:
            work.log(f"{known[key].text}: the slice is decided")
        else:
            raise _build_held_error(work, key, found, is_committed=key in committed)


def _found(row: Mapping[str, Any]) -> HoldingRecords:
    first = row[FIRST]
    return HoldingRecords.with_trimmed_detail(
        row[HOLDS], Origin(*[first[name] for name in ORIGIN]), first["reason"], first["detail"]
    )


def _build_held_error(work: Work, key: str, found: HoldingRecords, *, is_committed: bool) -> SliceHeldError:
    reason = f"{key} is held by {found.many}, the first is {format_place(found.origin)}"
    because = f"{found.reason}: {found.detail}"
    if is_committed:
        return SliceHeldError(
            f"{reason}; its earlier decision stays",
            found=because,
            remedy="supply what the records lack, then request the slice again",
        )
    target = find_destination(work.stream, found.reason, 0)
    hold = work.ledger.holds.note(work.stream.name, key, found, datetime.now(UTC))
    return SliceHeldError(
        f"{reason}; slices of {work.stream.name} after it wait in raw",
        stored=f"held since {hold.since:%Y-%m-%d %H:%M:%S} UTC, attempt {hold.attempts}",
        found=because,
        remedy="supply what the records lack: the sensor repair requests the slice again. "
        f"Or highwater release-hold {key} sends them to {target}, with --park to {work.stream.parked_topic}",
    )


def subtract_released_rejects(
    measured: Mapping[str, Mapping[str, Any]], counts: Mapping[str, Mapping[str, int]]
) -> dict[str, Mapping[str, int]]:
    """The numbers of the split without the rejects that a person released: those the breaker does not judge."""
    return {
        key: {**numbers, "rejects": numbers["rejects"] - (measured[key].get(HOLDS) or 0)}
        for key, numbers in counts.items()
    }


def end_holds(work: Work) -> None:
    """Forget what held slices that are decided now."""
    if work.ledger.holds.end(work.keys):
        work.log(f"the hold of {', '.join(work.keys)} has ended")


def list_slices_to_park(work: Work) -> list[str]:
    """Slices whose holding records a person parks."""
    holds = work.ledger.holds.read_for_slices(work.keys) if work.stream.ordered else {}
    return [key for key, hold in holds.items() if hold.release is not None and hold.release.park]
