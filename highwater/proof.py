"""The proof of a slice: what one commit recorded of it, beside its rows.

What belongs here: the value and its written forms. What does not: reading it (`resources.lake`) or committing it
(`resources.spark_tables`).

A proof stands twice in the same Delta commit: in the commit's `userMetadata`, and in the table itself, as the one
row of the slice whose column `proof` is not null. The second copy outlives Delta's log retention (30 days).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from highwater.history import epochs_from_plain, epochs_to_plain, marks_from_plain, marks_to_plain
from highwater.slices import OffsetRange, Slice, SliceKey, ranges_from_plain, ranges_to_plain

FORMAT = 1


class Mark(Protocol):
    """What stands in the column `proof` of a partition: the proof of a slice, or of a fold."""

    @property
    def key(self) -> str:
        """The partition's value."""

    @property
    def attempt(self) -> int:
        """The number that the compare-and-set compares."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values for the commit's `userMetadata`."""

    def to_json(self) -> str:
        """The written form for the column."""


@dataclass(frozen=True)
class Proof:
    """What a commit says of one slice.

    Args:
        piece: the slice as it was planned.
        attempt: the number, issued by the ledger, of the decision that the commit belongs to.
        rows: rows of the slice in the table, the row of the proof left out; None where they were not counted before
            they were written, and Delta's log tells them.
        counts: further numbers by name; in events the whole split of raw.
        past: whether it also tells what the plan recorded of each partition's past (I16), for a ledger that is rebuilt;
            one table of a stream does.
        run: the run that read the slice, where one table of a stream tells it; empty in proofs of older versions.
    """

    piece: Slice
    attempt: int
    rows: int | None
    counts: Mapping[str, int] = field(default_factory=dict)
    past: bool = False
    run: str = ""

    @property
    def key(self) -> str:
        """The slice key."""
        return self.piece.key

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        piece = self.piece
        plain = {
            "format": FORMAT,
            "slice": self.key,
            "stream": piece.stream,
            "topic_id": piece.topic_id,
            "generation": piece.generation,
            "planned_at": piece.planned_at.isoformat(),
            "ranges": ranges_to_plain(piece.ranges),
            "attempt": self.attempt,
            "rows": self.rows,
            "counts": dict(sorted(self.counts.items())),
        }
        return {**plain, **(_past(piece) if self.past else {}), **({"run": self.run} if self.run else {})}

    def to_json(self) -> str:
        """The written form; equal proofs are written alike."""
        return json.dumps(self.to_plain(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Proof:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text was written by a newer format or is none of ours.
        """
        plain = json.loads(text)
        if plain.get("format") != FORMAT:
            raise ValueError(f"proof of format {plain.get('format')!r}; this version reads format {FORMAT}")
        return cls(
            piece=_slice_of(plain, ranges_from_plain(plain["ranges"])),
            attempt=plain["attempt"],
            rows=plain["rows"],
            counts=plain["counts"],
            past="epochs" in plain,
            run=plain.get("run", ""),
        )


def _past(piece: Slice) -> dict[str, Any]:
    """The epochs, and of the fingerprints those of the slice's own records: older ones stand in proofs before it."""
    own = {p: mark for p, mark in piece.marks.items() if p in piece.ranges and mark.offset in piece.ranges[p]}
    return {"epochs": epochs_to_plain(piece.epochs), "marks": marks_to_plain(own)}


def _slice_of(plain: Mapping[str, Any], ranges: Mapping[int, OffsetRange]) -> Slice:
    key = SliceKey.parse(plain["slice"])
    return Slice(
        stream=plain["stream"],
        topic=key.topic,
        topic_id=plain["topic_id"],
        generation=plain["generation"],
        ordinal=key.ordinal,
        ranges=ranges,
        planned_at=datetime.fromisoformat(plain["planned_at"]),
        # The proofs of other tables have neither, nor have those that an older version wrote.
        epochs=epochs_from_plain(plain.get("epochs", {})),
        marks=marks_from_plain(plain.get("marks", {})),
    )


def user_metadata(proofs: Iterable[Mark]) -> str:
    """The `userMetadata` of a commit that holds these slices."""
    return json.dumps({"highwater": [proof.to_plain() for proof in proofs]}, separators=(",", ":"), sort_keys=True)
