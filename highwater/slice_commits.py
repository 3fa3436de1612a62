"""The commit of one slice in a table: its ranges, the attempt and the counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from highwater.divergence import decode_epochs, decode_fingerprints, encode_epochs, encode_fingerprints
from highwater.slices import OffsetRange, Slice, SliceKey, decode_ranges, encode_ranges

FORMAT = 1


@dataclass(frozen=True)
class SliceCommit:
    """The commit of one slice in a table.

    Args:
        slice_: the slice as it was planned.
        attempt: the number, issued by the ledger, of the decision that the commit belongs to.
        rows: the slice's number of rows in the table; None if only Delta's log has it.
        counts: further numbers by name; in events the whole split of raw.
        past: whether the commit also holds what the plan recorded of each partition's past (I16), for a ledger that is
            rebuilt; one table of a stream does.
        run: the run that read the slice, where one table of a stream has it.
        extra: further values of JSON that one table needs.
    """

    slice_: Slice
    attempt: int
    rows: int | None
    counts: Mapping[str, int] = field(default_factory=dict)
    past: bool = False
    run: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The slice key."""
        return self.slice_.key

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        slice_ = self.slice_
        plain = {
            "format": FORMAT,
            "slice": self.key,
            "stream": slice_.stream,
            "topic_id": slice_.topic_id,
            "generation": slice_.generation,
            "planned_at": slice_.planned_at.isoformat(),
            "ranges": encode_ranges(slice_.ranges),
            "attempt": self.attempt,
            "rows": self.rows,
            "counts": dict(sorted(self.counts.items())),
        }
        optional = {"run": self.run, "extra": dict(self.extra)}
        return {
            **plain,
            **(_encode_history(slice_) if self.past else {}),
            **{name: one for name, one in optional.items() if one},
        }

    def to_json(self) -> str:
        """The written form; equal commits are written alike."""
        return json.dumps(self.to_plain(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SliceCommit:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text was written by a newer format or is none of ours.
        """
        return cls.from_plain(json.loads(text))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SliceCommit:
        """The inverse of `to_plain`.

        Raises:
            ValueError: the values were written by a newer format or are none of ours.
        """
        if plain.get("format") != FORMAT:
            raise ValueError(f"slice commit of format {plain.get('format')!r}; this version reads format {FORMAT}")
        return cls(
            slice_=_build_slice(plain, decode_ranges(plain["ranges"])),
            attempt=plain["attempt"],
            rows=plain["rows"],
            counts=plain["counts"],
            past="epochs" in plain,
            run=plain.get("run", ""),
            extra=plain.get("extra", {}),
        )


def _encode_history(slice_: Slice) -> dict[str, Any]:
    """The epochs, and of the fingerprints those of the slice's own records: older ones are in commits before it."""
    own = {p: mark for p, mark in slice_.fingerprints.items() if p in slice_.ranges and mark.offset in slice_.ranges[p]}
    return {"epochs": encode_epochs(slice_.epochs), "fingerprints": encode_fingerprints(own)}


def _build_slice(plain: Mapping[str, Any], ranges: Mapping[int, OffsetRange]) -> Slice:
    key = SliceKey.parse(plain["slice"])
    return Slice(
        stream=plain["stream"],
        topic=key.topic,
        topic_id=plain["topic_id"],
        generation=plain["generation"],
        ordinal=key.ordinal,
        ranges=ranges,
        planned_at=datetime.fromisoformat(plain["planned_at"]),
        # The slice commits of other tables have neither, nor have those that an older version wrote.
        epochs=decode_epochs(plain.get("epochs", {})),
        fingerprints=decode_fingerprints(plain.get("fingerprints", {})),
    )
