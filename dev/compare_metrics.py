"""Holds the minutes of metrics against the events, by the definition written a second time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from dev.differences import Differences
from dev.readings import Row


@dataclass(frozen=True)
class Measures:
    """The comparison's own knowledge of a stream's metrics: the declaration said a second time."""

    status: str
    values: tuple[str, ...]
    amount: str
    mean_of: tuple[str, ...]


def compare_metrics(measures: Measures, events: Sequence[Row], rows: Sequence[Row], diff: Differences) -> int:
    """Hold each minute against the events.

    Args:
        measures: what is measured.
        events: the table of events.
        rows: the table of metrics.
        diff: gets what differs.

    Returns:
        How many minutes there are.
    """
    minutes: dict[datetime, list[Row]] = defaultdict(list)
    for event in _once(events):
        minutes[event["event_time"].replace(second=0, microsecond=0)].append(event)
    found: dict[datetime, Row] = {}
    for row in rows:
        if row["minute"] in found:
            diff.add("metrics: a minute twice", row["minute"])
        found[row["minute"]] = row
    for minute in minutes.keys() | found.keys():
        if minute not in found:
            diff.add("metrics: lacks a minute", minute)
        elif minute not in minutes:
            diff.add("metrics: a minute without events", minute)
        else:
            expected = _expected(measures, minute, minutes)
            for column, value in expected.items():
                diff.compare(f"metrics: another {column}", minute, value, found[minute].get(column))
            _mean(minute, expected["hour_events"], expected["hour_amount"], found[minute]["hour_mean"], diff)
    return len(found)


def _once(events: Sequence[Row]) -> list[Row]:
    """Each version of a key once: the one that was published first, then by partition and offset."""
    first: dict[tuple[str, Any], Row] = {}
    for event in sorted(events, key=lambda e: (e["origin_timestamp_ms"], e["origin_partition"], e["origin_offset"])):
        first.setdefault((event["key"], event["version"]), event)
    return [*first.values()]


def _expected(measures: Measures, minute: datetime, minutes: Mapping[datetime, Sequence[Row]]) -> dict[str, Any]:
    columns: dict[str, Any] = {"events": len(minutes[minute])}
    for value in measures.values:
        amounts = [event[measures.amount] for event in minutes[minute] if event[measures.status] == value]
        columns[f"{value}_events"], columns[f"{value}_amount"] = len(amounts), sum(amounts, Decimal(0))
    hour = [event for ago in range(60) for event in minutes.get(minute - timedelta(minutes=ago), ())]
    counted = [event[measures.amount] for event in hour if event[measures.status] in measures.mean_of]
    return {**columns, "hour_events": len(counted), "hour_amount": sum(counted, Decimal(0))}


def _mean(minute: datetime, events: int, amount: Decimal, found: Decimal | None, diff: Differences) -> None:
    """The mean is the quotient, to within half of the last digit that is reported."""
    exact = Fraction(amount) / events if events else None
    if exact is None or found is None:
        diff.compare("metrics: another hour_mean", minute, exact, found)
    elif abs(Fraction(found) - exact) > Fraction(1, 2) * Fraction(Decimal(1).scaleb(int(found.as_tuple().exponent))):
        diff.add("metrics: another hour_mean", minute, float(exact), found)
