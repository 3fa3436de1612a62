"""The differences that a comparison found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dev.intended import Ending

SAMPLES = 5


@dataclass
class Differences:
    """The differences that were found: exact counts by kind, and a few samples of each."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, where: object, expected: object = None, found: object = None) -> None:
        """Note a difference."""
        self.counts[kind] += 1
        listed = self.samples.setdefault(kind, [])
        if len(listed) < SAMPLES:
            values = (
                "" if expected is None and found is None else f": expected {_short(expected)}, found {_short(found)}"
            )
            listed.append(f"{where}{values}")

    def compare(self, kind: str, where: object, expected: object, found: object) -> None:
        """Note a difference where the two are not equal."""
        if expected != found:
            self.add(kind, where, expected, found)

    def __bool__(self) -> bool:
        return bool(self.counts)


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Ending) else repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
