"""Reclaims: origins that a person reclaimed from the DLQ, so that their slice of the main topic decides them again."""

# Each reclaim of an origin raises its number by one, and later publications of the origin carry that number. A copy
# with a lower number than the ledger's was published before the reclaim, and no longer counts.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from highwater.envelope import Origin


@dataclass(frozen=True)
class Reclaim:
    """An origin that was reclaimed from the DLQ.

    Args:
        origin: the record's identity.
        slice_key: the slice of the main topic that reprocesses it when it is materialised again.
        number: how often the origin was reclaimed so far, 1 the first time.
        reason: why, in the person's words.
        reclaimed_by: the person's name.
        reclaimed_at: when, in UTC.
    """

    origin: Origin
    slice_key: str
    number: int
    reason: str
    reclaimed_by: str
    reclaimed_at: datetime


def count_reclaims(reclaims: Iterable[Reclaim]) -> dict[Origin, int]:
    """The number of reclaims of each origin; those that never were reclaimed are left out."""
    found: dict[Origin, int] = {}
    for one in reclaims:
        found[one.origin] = max(found.get(one.origin, 0), one.number)
    return found


def is_stale(reclaim_numbers: Mapping[Origin, int], origin: Origin, number: int) -> bool:
    """Whether a copy of an origin that carries this number was published before it was reclaimed."""
    return number < reclaim_numbers.get(origin, 0)
