"""Dagster instances that work on one stream: which of them are live at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

# An instance writes once a minute that it is there, and its sensors tick every 10 to 30 s: after five missed writes it
# is taken for stopped.
TERM = timedelta(minutes=5)
# Remedy for two instances at the same time.
ONE_INSTANCE = (
    "stop the sensors, or the daemon, of all instances but one: each instance repeats what the other does. Runs that "
    "both requested commit once"
)


@dataclass(frozen=True)
class Instance:
    """A Dagster instance whose sensors ticked for a stream.

    Args:
        id: the ID that Dagster gave its run storage.
        place: host and DAGSTER_HOME.
        first_seen: when its sensors ticked first without a pause longer than `TERM`, in UTC.
        last_seen: when they ticked last, in UTC.
    """

    id: str
    place: str
    first_seen: datetime
    last_seen: datetime

    @property
    def text(self) -> str:
        """The instance in some words."""
        return f"{self.id} ({self.place}), last seen {self.last_seen:%Y-%m-%d %H:%M:%S} UTC"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        seen = {"first_seen": self.first_seen.isoformat(), "last_seen": self.last_seen.isoformat()}
        return {"id": self.id, "place": self.place, **seen}


def select_concurrent(instances: Iterable[Instance], now: datetime) -> list[Instance]:
    """The instances that are live at the same time, the longest running first; none where one alone is.

    An instance that replaces another is no fault: the old one ticked no more when the new one began.
    """
    live = sorted((one for one in instances if now - one.last_seen < TERM), key=lambda one: one.first_seen)
    return [
        one
        for one in live
        if any(
            other.id != one.id and other.first_seen < one.last_seen and one.first_seen < other.last_seen
            for other in live
        )
    ]
