"""When an alert begins and ends: pure functions over conditions that were just evaluated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

# The stream of a condition that concerns all streams; no stream's name has a blank.
DEPLOYMENT = "the deployment"


@dataclass(frozen=True)
class Condition:
    """The condition of an alert, as it was just evaluated.

    Args:
        stream: whose.
        what: names the condition; with the stream it is the alert's identity.
        value: the measured value, in words with its unit.
        threshold: the value above which the alert begins, in words with its unit.
        over: whether the value is above it.
        remedy: the action for the operator.
    """

    stream: str
    what: str
    value: str
    threshold: str
    over: bool
    remedy: str

    @classmethod
    def not_applicable(cls, stream: str, what: str, why: str) -> Condition:
        """The condition that ends an alert whose subject was removed; nothing else would end it."""
        return cls(stream, what, why, "none", over=False, remedy="no action needed")


@dataclass(frozen=True)
class Alert:
    """An alert that is open, or whose recovery is still to be reported.

    Args:
        reported: whether the receiver took the alert.
        ended: when the condition passed; None while it lasts.
    """

    stream: str
    what: str
    value: str
    threshold: str
    remedy: str
    since: datetime
    reported: bool = False
    ended: datetime | None = None

    @property
    def is_unreported(self) -> bool:
        """Whether the receiver gets a message."""
        return not self.reported or self.ended is not None

    def to_plain(self) -> dict[str, Any]:
        """The message to the receiver."""
        return {
            "kind": "alert" if self.ended is None else "recovery",
            "stream": self.stream,
            "what": self.what,
            "value": self.value,
            "threshold": self.threshold,
            "since": self.since.isoformat(),
            "ended": None if self.ended is None else self.ended.isoformat(),
            "remedy": self.remedy,
        }


Open = Mapping[tuple[str, str], Alert]

# Another code location may declare what this one does not, and its ticks may fail for a while.
GONE_AFTER = timedelta(days=1)
# After a longer pause of all ticks nothing follows from who did not tick meanwhile.
PAUSE = timedelta(hours=1)
# A tick a minute need not write each time that it watches.
REFRESH = timedelta(minutes=10)


@dataclass(frozen=True)
class WatchChange:
    """The names that nobody watches over any more, and the names to record as watched.

    Args:
        gone: subjects that are no longer watched.
        added: names to record as watched: declared names without a recent record, and names that get another day.
    """

    gone: frozenset[str]
    added: frozenset[str]


def update_watch(
    watched: Collection[str], declared: Collection[str], seen: Mapping[str, datetime], now: datetime
) -> WatchChange:
    """The watched names that nothing declares any more, so that nothing evaluates them.

    Args:
        watched: the names of open alerts.
        declared: the names of what this tick evaluates.
        seen: when a tick of anybody last watched over a name.
        now: the time, in UTC.
    """
    others = frozenset(watched) - frozenset(declared)
    pause = now - max(seen.values(), default=now - PAUSE)
    if pause >= PAUSE:
        return WatchChange(frozenset(), frozenset(declared) | others)
    gone = frozenset(name for name in others if name in seen and now - seen[name] >= GONE_AFTER)
    due = frozenset(name for name in declared if name not in seen or now - seen[name] >= REFRESH)
    return WatchChange(gone, due | gone | (others - seen.keys()))


def update_alerts(open_: Open, conditions: Iterable[Condition], now: datetime) -> dict[tuple[str, str], Alert]:
    """The alerts after some measurements.

    A condition that was not measured stays unchanged. A lasting alert takes the text of its last evaluation, since the
    old remedy may be done. A condition that passes before its alert was sent leaves no trace. A condition that returns
    before its recovery was sent goes on.
    """
    found = dict(open_)
    for condition in conditions:
        name = condition.stream, condition.what
        known = found.get(name)
        if condition.over:
            fresh = Alert(*name, condition.value, condition.threshold, condition.remedy, since=now)
            found[name] = fresh if known is None else replace(fresh, since=known.since, reported=known.reported)
        elif known is not None and known.reported:
            found[name] = replace(known, value=condition.value, ended=known.ended or now)
        elif known is not None:
            del found[name]
    return found


def mark_reported(open_: Open, alert: Alert) -> dict[tuple[str, str], Alert]:
    """The alerts after the receiver took this one: an alert stays open, a recovery closes it."""
    name = alert.stream, alert.what
    rest = {key: value for key, value in open_.items() if key != name}
    return rest if alert.ended is not None else {**rest, name: replace(alert, reported=True)}
