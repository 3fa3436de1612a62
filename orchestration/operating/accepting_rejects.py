"""Letting slices through although most of their records are rejected: a person's decision, kept under a name.

What belongs here: which slices may be let through, and recording it. What does not: what becomes of their rejects,
which is the routing's as always (`highwater.routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from orchestration.operating.named_slices import slices_of
from resources.breakers import Acceptance

if TYPE_CHECKING:
    from resources.breakers import Judgement
    from resources.ledger import Ledger


@dataclass(frozen=True)
class Asked:
    """What a person asks.

    Args:
        slices: the keys.
        sure: record it; without it only what would be recorded is told.
        by: the person's name.
        because: why.
    """

    slices: Sequence[str]
    sure: bool = False
    by: str = ""
    because: str = ""


def act(ledger: Ledger, streams: Collection[str], asked: Asked, now: datetime, log: Callable[[str], object]) -> int:
    """Let slices through, or tell what is known of them; returns how many were not let through before.

    Args:
        ledger: holds plans and judgements.
        streams: the names of those that the slices may be of.
        asked: what is asked.
        now: the time, in UTC.
        log: gets what is found and done, in sentences.

    Raises:
        UnknownSliceError: one of them was never planned.
        ConfigurationError: it is to be recorded and nobody is named, or a slice cannot be let through.
    """
    if asked.sure and not asked.by:
        raise ConfigurationError("nobody is named who accepts the rejects", remedy="name a person with `by`")
    pieces = slices_of(ledger, streams, asked.slices)
    if not pieces:
        raise ConfigurationError("no slice is named", remedy="name the slices whose rejects are accepted")
    judgements, known = ledger.breakers.judgements([*asked.slices]), ledger.breakers.accepted([*asked.slices])
    for piece in pieces:
        log(_told(piece.key, judgements.get(piece.key)))
    fresh = [piece.key for piece in pieces if piece.key not in known]
    log(f"{len(fresh):,} of {len(pieces):,} slices are not let through yet")
    if asked.sure:
        # Those too that were let through before: a leave covers only what was sent until it was given.
        for name in sorted({piece.stream for piece in pieces}):
            keys = [piece.key for piece in pieces if piece.stream == name]
            ledger.breakers.accept(name, [Acceptance(key, asked.because, asked.by, now) for key in keys])
            log(f"{', '.join(keys)}: recorded; {name}_repair requests what is not done, or materialise it by hand")
    return len(fresh)


def _told(key: str, judged: Judgement | None) -> str:
    if judged is None:
        return f"{key}: never judged; its rejects, however many, would be published"
    state = "refused" if judged.refused else "not refused"
    return (
        f"{key}: {state} at {judged.judged_at:%Y-%m-%d %H:%M} UTC, {judged.rejects:,} of {judged.records:,} records "
        "would be rejected; they would be published to the tiers and parked, by their reasons"
    )
