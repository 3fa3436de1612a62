"""Conditions in SQL over places of records, for topics of thousands of partitions.

What belongs here: texts. What does not: asking (`resources.lake`).

DataFusion simplifies alternatives pair by pair, and by recursion: a thousand ranges joined by `OR` or `AND NOT` took
ten seconds, and three thousand ended the process. So no condition here grows by terms: two places stand for all that
lies between them, and ranges are rows to look up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from highwater.envelope import ORIGIN

# Generation, partition, first offset and the one behind the last.
Span = tuple[int, int, int, int]


def between(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Holds for two origins and for all that lie between them, ordered by topic, generation, partition and offset."""
    return f"{_on_side(first, '>')} AND {_on_side(last, '<')}"


def _on_side(place: Mapping[str, Any], side: str) -> str:
    *names, offset = ORIGIN
    condition = f"{offset} {side}= {place[offset]}"
    for name in reversed(names):
        value = f"'{place[name]}'" if isinstance(place[name], str) else place[name]
        condition = f"({name} {side} {value} OR ({name} = {value} AND {condition}))"
    return condition


def in_none_of(spans: Iterable[Span]) -> str:
    """Holds for origins that lie in none of these ranges of offsets of one topic."""
    rows = ", ".join(map(str, spans))
    if not rows:
        return "true"
    generation, partition, offset = ORIGIN[1:]
    return (
        f"NOT EXISTS (SELECT 1 FROM (VALUES {rows}) AS span(g, p, first, behind) WHERE span.g = {generation} "
        f"AND span.p = {partition} AND {offset} >= span.first AND {offset} < span.behind)"
    )
