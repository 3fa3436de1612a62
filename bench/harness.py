"""Measurement: alternating rounds, medians, one JSON file a benchmark."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"

Variant = Callable[[int], float]


@dataclass(frozen=True)
class Row:
    """One case of a benchmark.

    Args:
        case: what was varied, for example `20 batches`.
        seconds: for each variant the seconds of every round.
    """

    case: str
    seconds: Mapping[str, Sequence[float]]

    def median(self, variant: str) -> float:
        """The median of a variant's rounds, in seconds."""
        return statistics.median(self.seconds[variant])

    def mean(self, variant: str) -> float:
        """The mean of a variant's rounds, in seconds: where rare long rounds belong to the cost."""
        return statistics.fmean(self.seconds[variant])

    def ratio(self, variant: str, peer: str) -> float:
        """The speed of the variant relative to its peer: the median of the ratios, round by round."""
        pairs = zip(self.seconds[variant], self.seconds[peer], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


@dataclass(frozen=True)
class Target:
    """A figure and the limit that it must reach.

    Args:
        what: the sentence that names the figure.
        value: the figure.
        limit: the figure to reach.
        at_least: whether the figure shall be at least the limit, else at the most.
        case: the row that the figure belongs to; empty for a figure of the whole benchmark.
    """

    what: str
    value: float
    limit: float
    at_least: bool = True
    case: str = ""

    @property
    def reached(self) -> bool:
        """Whether the figure is on the right side of the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Result:
    """All figures of one benchmark.

    Args:
        name: the letter by which `--only` picks it.
        title: the heading of its section.
        method: how it was measured, in a few sentences.
        rows: the cases.
        targets: the figures that have a limit to reach.
    """

    name: str
    title: str
    method: str
    rows: Sequence[Row] = field(default_factory=list)
    targets: Sequence[Target] = field(default_factory=list)

    def save(self, folder: Path = RESULTS) -> None:
        """Keep the figures beside those of the other benchmarks."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Result:
        """Read figures that were kept."""
        plain = json.loads(file.read_text())
        rows = [Row(**row) for row in plain.pop("rows")]
        targets = [Target(**target) for target in plain.pop("targets")]
        return cls(**plain, rows=rows, targets=targets)


def alternate(case: str, variants: Mapping[str, Variant], rounds: int, *, warm_up: bool = True) -> Row:
    """Run the variants in turn, A B A B, so that a change of the machine's speed meets all of them.

    Args:
        case: what is measured.
        variants: each takes the round's number and returns its own seconds; preparing is left out by the variant.
        rounds: rounds that count.
        warm_up: whether a round that does not count comes first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-1 if warm_up else 0, rounds):
        for name, run in variants.items():
            took = run(turn)
            if turn >= 0:
                seconds[name].append(took)
        if turn >= 0:
            said = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
            print(f"  {case}, round {turn + 1} of {rounds}: {said}", flush=True)
    return Row(case, seconds)


def measure_seconds(action: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
