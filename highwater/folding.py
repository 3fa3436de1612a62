"""Which slices of `current` are folded together, and when the next fold is due.

What belongs here: the value that names folded slices, and the rule when to fold. What does not: folding
(`assets.current`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from highwater.slices import SliceKey

# A reader of `current` merges at most so many slices that are not folded yet.
SLICES_BEFORE_FOLD = 50
# The base is rewritten once the rest holds a quarter of its rows, so each row is rewritten four times at the most for
# each quarter by which the table grows, however large it is.
REST_BEFORE_BASE = 0.25

BASE = "base"
RECENT = "recent"


@dataclass(frozen=True)
class Run:
    """Consecutive ordinals of one topic, ends included, whose rows come from decisions of one attempt number."""

    first: int
    last: int
    attempt: int


@dataclass(frozen=True)
class Fold:
    """The proof of a folded partition: which slices are in it, and at which attempt.

    Args:
        key: `base` or `recent`; the partition of `current` that holds the rows.
        attempt: the number of the fold.
        runs: for each topic the folded ordinals in ascending order.
    """

    key: str
    attempt: int
    runs: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)

    def attempt_of(self, key: str) -> int:
        """The attempt at which a slice was folded; 0 if it is not in here."""
        wanted = SliceKey.parse(key)
        runs = self.runs.get(wanted.topic, ())
        return next((run.attempt for run in runs if run.first <= wanted.ordinal <= run.last), 0)

    def attempts(self) -> dict[tuple[str, int], int]:
        """Every folded slice, as topic and ordinal, with its attempt."""
        return {
            (topic, ordinal): run.attempt
            for topic, runs in self.runs.items()
            for run in runs
            for ordinal in range(run.first, run.last + 1)
        }

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        runs = {topic: [[r.first, r.last, r.attempt] for r in runs] for topic, runs in sorted(self.runs.items())}
        return {"fold": self.key, "attempt": self.attempt, "runs": runs}

    def to_json(self) -> str:
        """The written form."""
        return json.dumps(self.to_plain(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fold:
        """The inverse of `to_json`."""
        plain = json.loads(text)
        runs = {topic: tuple(Run(*run) for run in runs) for topic, runs in plain["runs"].items()}
        return cls(plain["fold"], plain["attempt"], runs)


def runs_of(attempts: Mapping[tuple[str, int], int]) -> dict[str, tuple[Run, ...]]:
    """Folded slices in their short form: neighbours of one attempt number become one run."""
    runs: dict[str, list[Run]] = {}
    for (topic, ordinal), attempt in sorted(attempts.items()):
        before = runs.setdefault(topic, [])
        if before and before[-1].last == ordinal - 1 and before[-1].attempt == attempt:
            before[-1] = Run(before[-1].first, ordinal, attempt)
        else:
            before.append(Run(ordinal, ordinal, attempt))
    return {topic: tuple(found) for topic, found in runs.items()}


def merged_runs(folds: Iterable[Fold], slices: Mapping[str, int]) -> dict[str, tuple[Run, ...]]:
    """The runs of a fold that takes in other folds, then slices (key → attempt)."""
    attempts: dict[tuple[str, int], int] = {}
    for fold in folds:
        attempts.update(fold.attempts())
    for key, attempt in slices.items():
        parsed = SliceKey.parse(key)
        attempts[parsed.topic, parsed.ordinal] = attempt
    return runs_of(attempts)


def fold_due(slices: int, slice_rows: int, recent_rows: int, base_rows: int, least: int | None = None) -> str | None:
    """Where the unfolded slices are to be folded into now: `recent`, `base`, or None while it can wait.

    Args:
        slices: slices that are not folded.
        slice_rows: rows of these slices.
        recent_rows: rows of the partition `recent`.
        base_rows: rows of the partition `base`.
        least: fewer slices wait; `SLICES_BEFORE_FOLD` if None.
    """
    if slices < (SLICES_BEFORE_FOLD if least is None else least):
        return None
    rest = slice_rows + recent_rows
    return BASE if rest >= REST_BEFORE_BASE * base_rows else RECENT
