"""Versions along the offsets of a slice: whether they fall, contradict each other, or skip a state.

What belongs here: the questions to the table of events, read without a JVM. What does not: judging the numbers
(`orchestration.verdicts`). The order of arrival never makes a record invalid; it is told here instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from assets.parsing import field_columns
from orchestration.verdicts import (
    Verdict,
    allowed_transitions,
    one_content,
    versions_rise,
)
from resources.lake import query, slice_is_one_of

if TYPE_CHECKING:
    from highwater.declaration import Stream, Transitions
    from resources.lake import Lake

# So many examples a slice; the counts are exact.
SAMPLES = 10

ALONG_OFFSETS = "versions_along_offsets"
ONE_CONTENT = "one_content_a_version"
TRANSITIONS = "transitions_allowed"

_MINE = """
mine AS (SELECT slice, key, version, event_time, retries, origin_topic, origin_generation AS generation,
                origin_partition AS partition, origin_offset AS "offset", {content} AS content{state}
         FROM t WHERE proof IS NULL AND {slices})
"""
# A fall is explained by evidence alone: it came back through a tier, it is the copy of a record before it, it
# contradicts one, or its producer sent it late: it happened before what stands before it.
_FALLS = """
WITH {mine},
     seen AS (SELECT *,
                max(version) OVER before AS highest, max(event_time) OVER before AS latest,
                row_number() OVER (PARTITION BY slice, key, version, content ORDER BY {place}) AS copy,
                row_number() OVER (PARTITION BY slice, key, version ORDER BY {place}) AS of_version
              FROM mine
              WINDOW before AS (PARTITION BY slice, key, origin_topic, generation, partition ORDER BY "offset"
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT slice, key, version, highest, generation, partition, "offset",
       CASE WHEN retries > 0 THEN 'returns from the DLQ' WHEN copy > 1 THEN 'second deliveries'
            WHEN of_version > 1 THEN 'conflicts' WHEN event_time < latest THEN 'reordered by their producer'
            ELSE 'unexplained' END AS class
FROM seen WHERE version < highest ORDER BY slice, key, {place}
"""
_CONFLICTS = """
WITH {mine}
SELECT slice, key, version, count(DISTINCT content) AS contents,
       string_agg(concat(partition, ':', "offset"), ', ') AS origins
FROM mine GROUP BY slice, key, version HAVING count(DISTINCT content) > 1 ORDER BY slice, key, version
"""
_STATES = """
WITH {mine},
     firsts AS (SELECT *, row_number() OVER (PARTITION BY slice, key, version ORDER BY {place}) AS of_version
                FROM mine),
     states AS (SELECT slice, key, version, state, partition, "offset",
                  lag(version) OVER of_key AS version_before, lag(state) OVER of_key AS state_before
                FROM firsts WHERE of_version = 1 WINDOW of_key AS (PARTITION BY slice, key ORDER BY version))
SELECT slice, key, version, state_before, state, partition, "offset" FROM states
WHERE (version = 1 AND state <> {first}) OR (version_before = version - 1 AND NOT ({allowed}))
ORDER BY slice, key, version
"""
_KEYS = """
WITH {mine},
     spread AS (SELECT slice, key, count(*) AS events, count(DISTINCT partition) AS partitions FROM mine
                GROUP BY slice, key)
SELECT slice, sum(events) AS events, count(*) AS keys, sum(CASE WHEN partitions > 1 THEN 1 ELSE 0 END) AS moved
FROM spread GROUP BY slice
"""


def version_checks(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, dict[str, Verdict]]:
    """For each check the verdict on each slice.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    table = lake.table(stream.name, "events")
    if table is None:
        nothing = dict.fromkeys(keys, Verdict(passed=False, text="there is no table of events"))
        return dict.fromkeys(names(stream), nothing)
    asked = _Questions(stream, keys)
    totals = {str(row["slice"]): row for row in query(table, asked.text(_KEYS))}
    events = {key: int(str(totals[key]["events"])) if key in totals else 0 for key in keys}
    falls = _by_slice(query(table, asked.text(_FALLS)))
    conflicts = _by_slice(query(table, asked.text(_CONFLICTS)))
    found = {
        ALONG_OFFSETS: {key: _rise(totals.get(key, {}), falls[key]) for key in keys},
        ONE_CONTENT: {key: one_content(events[key], len(conflicts[key]), conflicts[key][:SAMPLES]) for key in keys},
    }
    if TRANSITIONS in names(stream):
        wrong = _by_slice(query(table, asked.text(_STATES)))
        found[TRANSITIONS] = {
            key: allowed_transitions(events[key], len(wrong[key]), wrong[key][:SAMPLES]) for key in keys
        }
    return found


def names(stream: Stream) -> list[str]:
    """The checks that a stream has: transitions need a declared state machine, and versions that count."""
    counted = stream.field_named(stream.version).type in {"integer", "long"}
    return [ALONG_OFFSETS, ONE_CONTENT, *([TRANSITIONS] if stream.transitions and counted else [])]


def _rise(total: Mapping[str, Any], falls: Sequence[Mapping[str, Any]]) -> Verdict:
    classes = Counter(str(row["class"]) for row in falls)
    # What is unexplained first: the examples are few.
    samples = sorted(falls, key=lambda row: row["class"] != "unexplained")[:SAMPLES]
    return versions_rise(int(total.get("events") or 0), int(total.get("moved") or 0), classes, samples)


def _by_slice(rows: Sequence[Mapping[str, Any]]) -> defaultdict[str, list[Mapping[str, Any]]]:
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[str(row["slice"])].append({name: value for name, value in row.items() if name != "slice"})
    return found


class _Questions:
    """The queries for some slices of a stream."""

    def __init__(self, stream: Stream, keys: Sequence[str]) -> None:
        columns = ["event_time", *[f.name for f in field_columns(stream)]]
        content = ", ".join(f"coalesce(cast({_quoted(name)} AS VARCHAR), '')" for name in columns)
        machine = stream.transitions
        self._parts = {
            "content": f"concat_ws(chr(31), {content})",
            "slices": slice_is_one_of(keys),
            "state": f", {_quoted(machine.field)} AS state" if machine else "",
        }
        self._machine = machine

    def text(self, template: str) -> str:
        first, allowed = _rules(self._machine) if self._machine else ("''", "true")
        place = 'generation, partition, "offset"'
        return template.format(mine=_MINE.format(**self._parts), place=place, first=first, allowed=allowed)


def _rules(machine: Transitions) -> tuple[str, str]:
    """The first state, and the condition under which a state may follow another, in SQL."""
    pairs = [
        f"(state_before = {_text(before)} AND state = {_text(after)})"
        for before, afters in machine.allowed.items()
        for after in afters
    ]
    return _text(machine.first), " OR ".join(pairs) or "false"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
