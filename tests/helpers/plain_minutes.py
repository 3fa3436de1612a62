"""The rows of metrics as the definition has them, from rows of events, in plain Python and by means of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

STATUSES = ("placed", "paid", "refunded", "canceled")
_PLACE = ("origin_timestamp", "origin_partition", "origin_offset", "origin_generation")
Row = Mapping[str, Any]


def compute_minute(event: Row) -> datetime:
    """The minute that an event happened in."""
    found = event["event_time"].replace(second=0, microsecond=0)
    assert isinstance(found, datetime)
    return found


def compute_minutes(events: Iterable[Row]) -> dict[datetime, dict[str, Any]]:
    """The minutes; a version counts once, at its earliest origin. Nothing is kept from one call to the next.

    The columns are those of the table but for `slice` and `minute`, and what the table holds for itself.
    """
    first: dict[tuple[str, int], Row] = {}
    for event in sorted(events, key=lambda row: [row[name] for name in _PLACE]):
        first.setdefault((event["key"], event["version"]), event)
    minutes: defaultdict[datetime, list[Row]] = defaultdict(list)
    for event in first.values():
        minutes[compute_minute(event)].append(event)
    return {minute: _row(minute, minutes) for minute in minutes}


def _row(minute: datetime, minutes: Mapping[datetime, Sequence[Row]]) -> dict[str, Any]:
    row: dict[str, Any] = {"events": len(minutes[minute])}
    for status in STATUSES:
        amounts = [event["amount"] for event in minutes[minute] if event["status"] == status]
        row[f"{status}_events"], row[f"{status}_amount"] = len(amounts), sum(amounts, Decimal(0))
    hour = [event for at in minutes for event in minutes[at] if minute - timedelta(minutes=59) <= at <= minute]
    paid = [event["amount"] for event in hour if event["status"] == "paid"]
    row["hour_events"], row["hour_amount"] = len(paid), sum(paid, Decimal(0))
    with localcontext() as exact:
        exact.prec = 60
        mean = (row["hour_amount"] / len(paid)).quantize(Decimal("0.000001"), ROUND_HALF_UP) if paid else None
    row["hour_mean"] = mean
    return row
