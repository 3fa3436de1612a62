"""What the checks decide: pure functions over proofs and counted keys.

What belongs here: when a slice is accounted for, when its versions are in order, when it is done. What does not:
reading the lake, or Dagster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from highwater.proof import Proof

# Where raw's records may end (I5).
PLACES = ("events", "rejects", "tombstones", "superseded")


@dataclass(frozen=True)
class Verdict:
    """A check's answer for one slice, with the numbers that it rests on.

    Args:
        passed: the answer.
        text: the same in a sentence.
        numbers: exact counts.
        samples: a few of what was found, as rows of a table.
        warning: whether the tables are right all the same, and only their source has to be looked at.
    """

    passed: bool
    text: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    warning: bool = False


def conserved(proofs: Mapping[str, Proof | None], rows: Mapping[str, int]) -> Verdict:
    """Whether every record of a slice is in exactly one place (I5).

    Args:
        proofs: by table (`raw`, `events`, `rejects`) what its commit recorded of the slice; None where it is not there.
            The proof in events holds the numbers of the split.
        rows: by table the rows that were counted in it now.
    """
    raw, events, rejects = (proofs[table] for table in ("raw", "events", "rejects"))
    if raw is None or events is None or rejects is None:
        absent = [table for table, proof in proofs.items() if proof is None]
        return Verdict(passed=False, text=f"the slice is not in {', '.join(absent)}")
    numbers = _numbers(raw, events, rejects)
    problem = _disagreement(raw, events, rejects) or _imbalance(numbers, rows)
    sums = " + ".join(f"{numbers[name]} {name}" for name in PLACES)
    return Verdict(problem is None, problem or f"{raw.rows} raw = {sums}", numbers)


def _numbers(raw: Proof, events: Proof, rejects: Proof) -> dict[str, int]:
    return {
        "offsets": raw.piece.offsets,
        "raw": raw.rows or 0,
        "gaps": raw.piece.offsets - (raw.rows or 0),
        "events": events.rows or 0,
        "rejects": rejects.rows or 0,
        "tombstones": events.counts.get("tombstones", 0),
        "superseded": events.counts.get("superseded", 0),
    }


def _disagreement(raw: Proof, events: Proof, rejects: Proof) -> str | None:
    if rejects.attempt != events.attempt:
        return f"rejects belong to attempt {rejects.attempt}, events to attempt {events.attempt}"
    if raw.piece.ranges != events.piece.ranges or raw.piece.ranges != rejects.piece.ranges:
        return "the proofs name different offsets"
    return None


def _imbalance(numbers: Mapping[str, int], rows: Mapping[str, int]) -> str | None:
    found = sum(numbers[name] for name in PLACES)
    if numbers["gaps"] < 0:
        return f"raw holds {numbers['raw']} rows for {numbers['offsets']} offsets"
    if found != numbers["raw"]:
        return f"{numbers['raw']} raw, and {found} in " + ", ".join(f"{name} {numbers[name]}" for name in PLACES)
    for table in ("raw", "events", "rejects"):
        if rows.get(table, 0) != numbers[table]:
            return f"the commit of {table} recorded {numbers[table]} rows, and {rows.get(table, 0)} are there"
    return None


def in_order(keys: int, absent: int, behind: int) -> Verdict:
    """Whether `current` is at least at each version that a slice's events brought (I6).

    Args:
        keys: keys that the slice has events of.
        absent: those that `current` does not hold.
        behind: those that `current` holds at a lower version.
    """
    numbers = {"keys": keys, "absent": absent, "behind": behind}
    if absent or behind:
        return Verdict(passed=False, text=f"of {keys} keys {absent} are absent and {behind} behind", numbers=numbers)
    return Verdict(passed=True, text=f"current is at or above the slice's version for all {keys} keys", numbers=numbers)


def versions_rise(events: int, moved: int, classes: Mapping[str, int], samples: Sequence[Mapping[str, Any]]) -> Verdict:
    """Whether every version that falls along the offsets of its key is explained.

    Args:
        events: events of the slice.
        moved: keys that stand in several partitions, between which no order is claimed.
        classes: falls by their explanation.
        samples: some of them.
    """
    falls = sum(classes.values())
    unexplained = classes.get("unexplained", 0)
    told = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    spread = f"; {moved} keys stand in several partitions, between which no order is claimed" if moved else ""
    numbers = {"events": events, "falls": falls, "keys_in_several_partitions": moved, **_named(classes)}
    if unexplained:
        text = (
            f"{falls} versions fall along the offsets of {events} events ({told}){spread}. The unexplained happened "
            "after the higher version before it: look at its producer. current has the highest version all the same"
        )
        return Verdict(passed=False, text=text, numbers=numbers, samples=samples)
    text = f"{falls} versions fall along the offsets of {events} events" + (f": {told}" if falls else "") + spread
    return Verdict(passed=True, text=text, numbers=numbers, samples=samples)


def _named(classes: Mapping[str, int]) -> dict[str, int]:
    return {name.replace(" ", "_"): count for name, count in classes.items()}


def one_content(events: int, conflicts: int, samples: Sequence[Mapping[str, Any]]) -> Verdict:
    """Whether no version of a key has two contents; of those that have, the earliest origin wins."""
    return _warned(
        {"events": events, "conflicts": conflicts},
        f"{conflicts} versions have several contents: the earliest origin of each is in current. Ask the producer "
        "which is right; a further version mends it",
        samples,
        or_else=f"no version has two contents in {events} events",
    )


def allowed_transitions(events: int, wrong: int, samples: Sequence[Mapping[str, Any]]) -> Verdict:
    """Whether every state of a key may follow the one of the version before it."""
    return _warned(
        {"events": events, "not_allowed": wrong},
        f"{wrong} states may not follow the one before them, as the stream declares it. Ask the producer; or mend "
        "the declared transitions",
        samples,
        or_else=f"every state may follow the one before it in {events} events",
    )


def _warned(numbers: Mapping[str, int], text: str, samples: Sequence[Mapping[str, Any]], *, or_else: str) -> Verdict:
    """A warning if there are samples of what is wrong: the tables are right all the same."""
    if not samples:
        return Verdict(passed=True, text=or_else, numbers=numbers)
    return Verdict(passed=False, text=text, numbers=numbers, samples=samples, warning=True)


@dataclass(frozen=True)
class Attempts:
    """For each table the slices that stand in it, with the attempt that they belong to.

    A slice without rejects has nothing to publish: it stands in `dlq` as soon as it stands in `rejects`.
    `metrics` is None for a stream that declares none.
    """

    raw: Mapping[str, int]
    events: Mapping[str, int]
    rejects: Mapping[str, int]
    dlq: Mapping[str, int]
    current: Mapping[str, int]
    metrics: Mapping[str, int] | None = None

    def tables(self) -> dict[str, Mapping[str, int]]:
        """The tables by name, upstream first."""
        return {"raw": self.raw, "events": self.events, **self._followers}

    @property
    def _followers(self) -> dict[str, Mapping[str, int]]:
        always = {"rejects": self.rejects, "dlq": self.dlq, "current": self.current}
        return always if self.metrics is None else {**always, "metrics": self.metrics}

    def lacking(self, key: str) -> tuple[str, ...]:
        """The tables in which a slice does not stand as its decision has it; empty when it is done."""
        decision = self.events.get(key)
        return (
            *(() if key in self.raw else ("raw",)),
            *(() if decision is not None else ("events",)),
            *(name for name, table in self._followers.items() if decision is None or table.get(key) != decision),
        )
