"""The rules of the checks: pure functions over slice commits and counted keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from highwater.retention import count_expired_rows, count_records
from highwater.slice_commits import SliceCommit

# The number of examples of a slice, or of a class; the counts are exact.
SAMPLES = 10
# Where raw's records may end (I5).
PLACES = ("events", "rejects", "tombstones", "superseded")


@dataclass(frozen=True)
class CheckResult:
    """A check's answer for one slice, with the numbers that it rests on.

    Args:
        passed: the answer.
        text: the same in a sentence.
        numbers: exact counts.
        samples: a few of what was found, as rows of a table.
        warning: whether it is always a warning, against the declared severity: the fault is explained, and may end
            by itself.
    """

    passed: bool
    text: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    warning: bool = False


@dataclass(frozen=True)
class CountedRows:
    """The rows of a slice that were counted in a table.

    Args:
        rows: how many there are.
        attempts: the least and the greatest of the attempts that they name; empty where they name none.
    """

    rows: int = 0
    attempts: Collection[int] = ()


def build_conservation_result(
    slice_commits: Mapping[str, SliceCommit | None], rows: Mapping[str, CountedRows]
) -> CheckResult:
    """Whether every record of a slice is in exactly one place (I5).

    Args:
        slice_commits: by table (`raw`, `events`, `rejects`) the commit of the slice; None where it is not there.
            The slice commit in events holds the numbers of the split; the one in raw how many rows have expired.
        rows: by table what was counted in it now.
    """
    raw, events, rejects = (slice_commits[table] for table in ("raw", "events", "rejects"))
    if raw is None or events is None or rejects is None:
        absent = [table for table, slice_commit in slice_commits.items() if slice_commit is None]
        return CheckResult(passed=False, text=f"the slice is not in {', '.join(absent)}")
    numbers = _build_numbers(raw, events, rejects)
    problem = (
        _find_disagreement(raw, events, rejects)
        or _find_imbalance(numbers, rows)
        or _find_wrong_attempt(events, rejects, rows)
    )
    sums = " + ".join(f"{numbers[name]} {name}" for name in PLACES)
    gone = f", {numbers['aged']} of raw have expired" if "aged" in numbers else ""
    return CheckResult(problem is None, problem or f"{numbers['raw']} raw = {sums}{gone}", numbers)


def _build_numbers(raw: SliceCommit, events: SliceCommit, rejects: SliceCommit) -> dict[str, int]:
    return {
        "offsets": raw.slice_.offsets,
        "raw": count_records(raw),
        "gaps": raw.slice_.offsets - count_records(raw),
        **({"aged": count_expired_rows(raw)} if count_expired_rows(raw) else {}),
        "events": events.rows or 0,
        "rejects": rejects.rows or 0,
        "tombstones": events.counts.get("tombstones", 0),
        "superseded": events.counts.get("superseded", 0),
    }


def _find_disagreement(raw: SliceCommit, events: SliceCommit, rejects: SliceCommit) -> str | None:
    if rejects.attempt != events.attempt:
        return f"rejects belong to attempt {rejects.attempt}, events to attempt {events.attempt}"
    if raw.slice_.ranges != events.slice_.ranges or raw.slice_.ranges != rejects.slice_.ranges:
        return "the commit records name different offsets"
    return None


def _find_wrong_attempt(events: SliceCommit, rejects: SliceCommit, rows: Mapping[str, CountedRows]) -> str | None:
    for table, slice_commit in (("events", events), ("rejects", rejects)):
        if others := {*rows.get(table, CountedRows()).attempts} - {slice_commit.attempt}:
            return f"the commit of {table} is of attempt {slice_commit.attempt}, and rows are of attempt {min(others)}"
    return None


def _find_imbalance(numbers: Mapping[str, int], rows: Mapping[str, CountedRows]) -> str | None:
    found = sum(numbers[name] for name in PLACES)
    if numbers["gaps"] < 0:
        return f"raw holds {numbers['raw']} rows for {numbers['offsets']} offsets"
    if found != numbers["raw"]:
        return f"{numbers['raw']} raw, and {found} in " + ", ".join(f"{name} {numbers[name]}" for name in PLACES)
    recorded = {**numbers, "raw": numbers["raw"] - numbers.get("aged", 0)}
    for table in ("raw", "events", "rejects"):
        there = rows.get(table, CountedRows()).rows
        if there != recorded[table]:
            return f"the commit of {table} recorded {recorded[table]} rows, and {there} are there"
    return None


def check_order(
    keys: int,
    absent: int,
    behind: int,
    samples: Sequence[Mapping[str, Any]] = (),
    stream: str = "STREAM",
    *,
    later: int = 0,
) -> CheckResult:
    """Whether `current` is at least at each version that a slice's events brought, and by the rule (I6).

    Args:
        keys: keys that the slice has events of.
        absent: keys that `current` lacks.
        behind: keys that `current` has at a lower version.
        samples: some of all.
        stream: its name, for the remedy.
        later: keys with the right version but another content, from a later origin.
    """
    numbers = {"keys": keys, "absent": absent, "behind": behind, "of_a_later_origin": later}
    if absent or behind or later:
        more = f", and {later:,} have another content there, of a later origin" if later else ""
        text = (
            f"of {keys:,} keys {absent:,} are absent and {behind:,} behind in current{more}: materialise current of "
            "the slice again; if it stays, somebody changed the table, and highwater rebuild-current "
            f"{stream} recomputes it"
        )
        return CheckResult(passed=False, text=text, numbers=numbers, samples=samples)
    return CheckResult(
        passed=True, text=f"current is at or above the slice's version for all {keys} keys", numbers=numbers
    )


def is_highest(keys: int, classes: Mapping[str, int], samples: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Whether `current` holds each key at the highest version that events have (I6).

    Args:
        keys: keys that were compared.
        classes: keys that differ: `absent`, `behind`, or `ahead` of all that events have, `revived` after a delete of a
            higher version, or `of a later origin` than another content of their version.
        samples: some of them.
    """
    numbers = {"keys": keys, **{name: classes.get(name, 0) for name in ("absent", "behind", "ahead")}}
    numbers |= {"revived": classes["revived"]} if classes.get("revived") else {}
    numbers["of_a_later_origin"] = classes.get("of a later origin", 0)
    text = f"current is at the highest version in events for all {keys:,} keys"
    if classes:
        counts_text = ", ".join(f"{count:,} {name}" for name, count in sorted(classes.items()))
        text = (
            f"of {keys:,} keys {counts_text} in current: materialise current again for the slices that hold these keys"
            "; if it stays, somebody changed the table"
        )
    return CheckResult(not classes, text, numbers, samples)


def build_version_rise_result(
    totals: Mapping[str, int], classes: Mapping[str, int], samples: Sequence[Mapping[str, Any]]
) -> CheckResult:
    """Whether every version that falls along the offsets of its key is explained.

    Args:
        totals: events, and keys that moved: they are in several partitions, between which no order is claimed.
        classes: falls by their explanation.
        samples: some of them.
    """
    falls, events = sum(classes.values()), totals.get("events", 0)
    moved = totals.get("keys_in_several_partitions", 0)
    counts_text = ", ".join(f"{count:,} {name}" for name, count in sorted(classes.items()))
    spread = f"; {moved:,} keys moved to other partitions, between which no order is claimed" if moved else ""
    numbers = {"events": events, "falls": falls, "keys_in_several_partitions": moved, **_replace_spaces(classes)}
    text = (
        f"{falls:,} versions fall along the offsets of {events:,} events"
        + (f": {counts_text}" if falls else "")
        + spread
    )
    if classes.get("unexplained"):
        text += (
            ". The unexplained happened after the higher version before it: look at its producer. current has the "
            "highest version all the same; a further version fixes a state that is wrong"
        )
    # Unexplained versions first: few examples are looked at.
    ordered = sorted(samples, key=lambda row: row["class"] != "unexplained")
    return CheckResult(not classes.get("unexplained"), text, numbers, ordered)


def _replace_spaces(classes: Mapping[str, int]) -> dict[str, int]:
    return {name.replace(" ", "_"): count for name, count in classes.items()}


def build_content_result(
    totals: Mapping[str, int], conflicts: int, samples: Sequence[Mapping[str, Any]]
) -> CheckResult:
    """Whether no version of a key has two contents; of those that have, the earliest origin wins."""
    events, again = totals.get("events", 0), totals.get("second_deliveries", 0)
    numbers = {"events": events, "second_deliveries": again, "conflicts": conflicts}
    text = f"no version has two contents in {events:,} events; {again:,} are second deliveries"
    if conflicts:
        text = (
            f"{conflicts:,} versions have several contents: the earliest origin of each counts. Ask the "
            f"producer which is right; a further version fixes it. {again:,} events are second deliveries"
        )
    return CheckResult(not conflicts, text, numbers, samples)


def build_transition_result(totals: Mapping[str, int], wrong: int, samples: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Whether every state of a key may follow the one of the version before it."""
    events = totals.get("events", 0)
    text = f"every state may follow the one before it in {events:,} events"
    if wrong:
        text = (
            f"{wrong:,} states may not follow the one before them, as the stream declares it. Ask the producer; or "
            "fix the declared transitions"
        )
    return CheckResult(not wrong, text, {"events": events, "not_allowed": wrong}, samples)


def build_missing_versions_result(
    totals: Mapping[str, int], classes: Mapping[str, int], samples: Sequence[Mapping[str, Any]], stream: str
) -> CheckResult:
    """Whether every version below a key's highest is there; one that may still come makes a warning, no error.

    Args:
        totals: events.
        classes: missing versions by where they are.
        samples: some of them.
        stream: its name, for the remedy.
    """
    missing, events, nowhere = sum(classes.values()), totals.get("events", 0), classes.get("nowhere", 0)
    numbers = {"events": events, "missing": missing, **_replace_spaces(classes)}
    if not missing:
        return CheckResult(passed=True, text=f"no version is missing below those of {events:,} events", numbers=numbers)
    counts_text = ", ".join(f"{count:,} {name}" for name, count in sorted(classes.items()))
    text = f"{missing:,} versions are missing below those of {events:,} events: {counts_text}"
    if any(name.endswith("parked") for name in classes):
        text += f". highwater redrive-parked {stream} sends parked ones back once they can be accepted"
    if nowhere:
        text += ". Those nowhere were never published, or lost before they were read: let the producer send them again"
    ordered = sorted(samples, key=lambda row: row["class"] != "nowhere")
    return CheckResult(passed=False, text=text, numbers=numbers, samples=ordered, warning=not nowhere)


@dataclass(frozen=True)
class SliceAttempts:
    """For each table the slices that are in it, with the attempt that they belong to.

    A slice without rejects has nothing to publish: it is in `dlq` as soon as it is in `rejects`.
    `current` and `metrics` are None for a stream that has no such table.
    """

    raw: Mapping[str, int]
    events: Mapping[str, int]
    rejects: Mapping[str, int]
    dlq: Mapping[str, int]
    current: Mapping[str, int] | None
    metrics: Mapping[str, int] | None = None

    def group_by_table(self) -> dict[str, Mapping[str, int]]:
        """The tables by name, upstream first."""
        return {"raw": self.raw, "events": self.events, **self._followers}

    @property
    def _followers(self) -> dict[str, Mapping[str, int]]:
        found = {"rejects": self.rejects, "dlq": self.dlq, "current": self.current, "metrics": self.metrics}
        return {name: table for name, table in found.items() if table is not None}

    def select_missing_tables(self, key: str) -> tuple[str, ...]:
        """The tables that lack the slice's decision; empty when it is done."""
        decision = self.events.get(key)
        return (
            *(() if key in self.raw else ("raw",)),
            *(() if decision is not None else ("events",)),
            *(name for name, table in self._followers.items() if decision is None or table.get(key) != decision),
        )
