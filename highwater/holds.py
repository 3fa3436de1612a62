"""Holds: slices that a record stops, their release, and the slice that is next in order."""

# A record whose reason holds keeps its slice from being classified. Every later slice waits in each table downstream
# of raw. Planning and raw go on.

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from highwater.envelope import Origin

# A detail names fields and rules; where it gives the JSON type that was found, what the type holds is left out: names
# of nested fields are the record's content.
_TYPE_PARAMETERS = "<"
LONGEST_DETAIL = 200


@dataclass(frozen=True)
class HoldingRecords:
    """The records that hold a slice, as an attempt found them.

    Args:
        records: how many records hold it.
        origin: origin of the first record, in the order of origins.
        reason: reason of the first record.
        detail: detail of the first record, without its content.
    """

    records: int
    origin: Origin
    reason: str
    detail: str

    @classmethod
    def with_trimmed_detail(cls, records: int, origin: Origin, reason: str, detail: str | None) -> HoldingRecords:
        """With the detail cut where it would repeat the record, and without NUL, which PostgreSQL refuses."""
        text = (detail or "").split(_TYPE_PARAMETERS)[0][:LONGEST_DETAIL]
        return cls(records, origin, reason, text.replace("\0", "\N{REPLACEMENT CHARACTER}"))

    @property
    def many(self) -> str:
        """The number of records, in words."""
        return f"{self.records:,} record{'' if self.records == 1 else 's'}"


@dataclass(frozen=True)
class Release:
    """A person's release of a slice that records hold.

    Args:
        park: whether these are parked; else they go to the first tier, where there is one.
        by: the person.
        because: why.
        at: when, in UTC.
    """

    park: bool
    by: str
    because: str
    at: datetime


@dataclass(frozen=True)
class Hold:
    """A slice that is held, or was until a person released it.

    Args:
        slice_key: the slice.
        stream: its stream.
        since: when it was found first, in UTC.
        found: the holding records that the newest attempt found.
        attempts: how many found something.
        tried_at: when the newest of them did, in UTC.
        release: None while nobody released it.
    """

    slice_key: str
    stream: str
    since: datetime
    found: HoldingRecords
    attempts: int
    tried_at: datetime
    release: Release | None = None

    @property
    def text(self) -> str:
        """The hold in a sentence."""
        found = self.found
        what = (
            f"{self.slice_key} is held since {self.since:%Y-%m-%d %H:%M:%S} UTC by {found.many}, the first is "
            f"{format_place(found.origin)}, {found.reason}: {found.detail}; "
            f"attempt {self.attempts} at {self.tried_at:%H:%M:%S}"
        )
        if self.release is None:
            return what
        fate = "parked" if self.release.park else "not parked"
        return f"{what}; released by {self.release.by} at {self.release.at:%Y-%m-%d %H:%M} UTC, its records {fate}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        release = self.release
        return {
            "slice": self.slice_key,
            "since": self.since.isoformat(),
            "reason": self.found.reason,
            "detail": self.found.detail,
            "records": self.found.records,
            "first_origin": self.found.origin._asdict(),
            "attempts": self.attempts,
            "tried_at": self.tried_at.isoformat(),
            "release": None if release is None else {**vars(release), "at": release.at.isoformat()},
        }


def format_place(origin: Origin) -> str:
    """An origin in words."""
    return f"{origin.topic} partition {origin.partition} offset {origin.offset}"


def find_obstacle(order: Sequence[str], committed: Collection[str], run: Collection[str]) -> tuple[str, str] | None:
    """The first slice of a run that has to wait, and the earlier one that it waits for; None if none waits.

    Args:
        order: slices in their order: those of the run, those between them, and as many before them as are looked at.
        committed: slices that are in the table.
        run: slices to be committed now, in their order.
    """
    first = next((key for key in order if key not in committed and key not in run), None)
    if first is None:
        return None
    behind = next((key for key in order[order.index(first) :] if key in run), None)
    return None if behind is None else (behind, first)
