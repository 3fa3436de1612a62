"""Conditions in SQL over places of records, for topics of thousands of partitions."""

# DataFusion simplifies alternatives pair by pair, and by recursion: a thousand ranges joined by `OR` or `AND NOT` took
# ten seconds, and three thousand ended the process. So no condition here grows by terms: two places bound everything
# between them, and ranges are rows to look up.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from highwater.envelope import ORIGIN

# Generation, partition, first offset and the one after the last.
Span = tuple[int, int, int, int]


def build_between(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Holds for two origins and for all that lie between them, ordered by topic, generation, partition and offset."""
    return f"{_on_side(first, '>')} AND {_on_side(last, '<')}"


def _on_side(place: Mapping[str, Any], side: str) -> str:
    *names, offset = ORIGIN
    condition = f"{offset} {side}= {place[offset]}"
    for name in reversed(names):
        value = f"'{place[name]}'" if isinstance(place[name], str) else place[name]
        condition = f"({name} {side} {value} OR ({name} = {value} AND {condition}))"
    return condition


def build_in_none(spans: Iterable[Span]) -> str:
    """Holds for origins that lie in none of these ranges of offsets of one topic."""
    rows = ", ".join(map(str, spans))
    return f"NOT {_build_lookup(rows, ORIGIN[1:-1])}" if rows else "true"


def build_in_any(spans: Iterable[tuple[str, int, int, int, int]]) -> str:
    """Holds for origins that lie in one of these ranges of offsets; each range names its topic first."""
    rows = ", ".join(f"('{topic}', {', '.join(map(str, span))})" for topic, *span in spans)
    return _build_lookup(rows, ORIGIN[:-1]) if rows else "false"


def _build_lookup(rows: str, names: Sequence[str]) -> str:
    offset = ORIGIN[-1]
    span = ", ".join(f"of_{name}" for name in names)
    same = " AND ".join(f"span.of_{name} = {name}" for name in names)
    return (
        f"EXISTS (SELECT 1 FROM (VALUES {rows}) AS span({span}, first, behind) WHERE {same} "
        f"AND {offset} >= span.first AND {offset} < span.behind)"
    )
