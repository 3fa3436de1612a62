"""A second implementation of the version checks: key by key, in plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dev.readings import Row

if TYPE_CHECKING:
    from highwater.declaration import Transitions

CONTENTS, TRANSITIONS, MISSING = "one_content_a_version", "transitions_allowed", "no_version_missing"
# Checks of what producers wrote: the generator's faults are to turn them red.
OF_THE_DATA = frozenset({CONTENTS, TRANSITIONS, MISSING})
# What each of them counts.
NUMBERS = {CONTENTS: "conflicts", TRANSITIONS: "not_allowed", MISSING: "missing"}


@dataclass
class Wrong:
    """The expected findings of one check: their number, and the slices of the events that show them."""

    count: int = 0
    slices: set[str] = field(default_factory=set)


def wrong_versions(
    events: Iterable[Row],
    fields: Sequence[str],
    machine: Transitions | None,
    first: int | None,
    written: Container[tuple[str, int | None]],
) -> dict[str, Wrong]:
    """The faults of the versions of a stream's events.

    Args:
        events: the table's rows.
        fields: the declared fields, which are a record's content.
        machine: the stream's state machine.
        first: the first version of a key, where versions count.
        written: the versions that readers of the topic see, by key: what is missing and among them is somewhere.
    """
    found = {check: Wrong() for check in OF_THE_DATA}
    by_key: dict[str, list[Row]] = defaultdict(list)
    for row in events:
        by_key[row["key"]].append(row)
    for rows in by_key.values():
        by_version: dict[int, list[Row]] = defaultdict(list)
        for row in sorted(rows, key=_rank):
            by_version[row["version"]].append(row)
        for same in by_version.values():
            if len({tuple(row[name] for name in fields) for row in same}) > 1:
                found[CONTENTS].count += 1
                found[CONTENTS].slices |= {row["slice"] for row in same}
        if first is not None:
            _ensure_life([same[0] for _, same in sorted(by_version.items())], machine, first, written, found)
    return found


def _rank(row: Row) -> tuple[object, ...]:
    """The rank of an origin: among equal versions the earliest counts."""
    return row["origin_timestamp_ms"], row["origin_partition"], row["origin_offset"], row["origin_generation"]


def _ensure_life(
    life: Sequence[Row],
    machine: Transitions | None,
    first: int,
    written: Container[tuple[str, int | None]],
    found: Mapping[str, Wrong],
) -> None:
    """One event a version, the lowest first."""
    before: Row | None = None
    for row in life:
        version, expected = row["version"], first if before is None else before["version"] + 1
        if version > expected:
            found[MISSING].count += version - expected
            if any((row["key"], lacking) not in written for lacking in range(expected, version)):
                found[MISSING].slices.add(row["slice"])
        elif machine is not None and not _may_follow(machine, before, row):
            found[TRANSITIONS].count += 1
            found[TRANSITIONS].slices.add(row["slice"])
        before = row


def _may_follow(machine: Transitions, before: Row | None, row: Row) -> bool:
    state = row[machine.field]
    return state == machine.first if before is None else state in machine.allowed.get(before[machine.field], ())


def compare_versions(
    expected: Mapping[str, Wrong], counts: Mapping[str, int], red: Mapping[str, Iterable[str]]
) -> list[str]:
    """Findings that the checks report too often or too rarely, in sentences.

    Args:
        expected: from `wrong_versions`.
        counts: by check what it counts over the stream.
        red: by check the slices in which it fails. A slice may pass although a version is missing below its events:
            in the newest one it may still come.
    """
    found = []
    for check, count in sorted(counts.items()):
        wrong, slices = expected[check], set(red.get(check, ()))
        if count != wrong.count:
            found.append(f"{check} counts {count:,} where {wrong.count:,} are wrong")
        if false := sorted(slices - wrong.slices):
            found.append(f"{check} fails in {len(false):,} slices where nothing is wrong: {', '.join(false[:3])}")
        if check != MISSING and (silent := sorted(wrong.slices - slices)):
            found.append(f"{check} passes in {len(silent):,} slices that show it: {', '.join(silent[:3])}")
    return found
