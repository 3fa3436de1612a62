"""Minutes of event time: which are computed again together, and the moving hour over them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import accumulate, pairwise

HOUR_MINUTES = 60
DAY_MINUTES = 24 * 60
# A mean has this many decimal places more than the amounts.
MEAN_DIGITS = 4
# Sums have 38 digits; a quotient of twice as many is rounded where no tie can come about.
EXACT = Context(prec=80)
_DAYS_BEFORE_1970 = date(1970, 1, 1).toordinal()


@dataclass(frozen=True)
class Sums:
    """Some events, and what their amounts come to."""

    events: int = 0
    amount: Decimal = Decimal(0)

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.events + other.events, EXACT.add(self.amount, other.amount))

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.events - other.events, EXACT.subtract(self.amount, other.amount))

    def mean(self, scale: int) -> Decimal | None:
        """The mean amount, half a unit rounded away from 0; None without events.

        Args:
            scale: digits after the decimal point.
        """
        if not self.events:
            return None
        return EXACT.divide(self.amount, self.events).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, EXACT)


@dataclass(frozen=True)
class Minute:
    """The measures of one minute.

    Args:
        events: its events of every status.
        by_status: its sums by status; a status without events may be left out.
        hour: sums of the hour that ends with it, over the statuses of the mean.
        linked: the minutes where a version of its events also occurs, with other content: which of them counts there
            depends on this minute.
    """

    events: int
    by_status: Mapping[str, Sums] = field(default_factory=dict)
    hour: Sums = Sums()
    linked: frozenset[int] = frozenset()


def format_day(minute: int) -> str:
    """The day that a minute belongs to, as the table's partition names it."""
    number = minute // DAY_MINUTES
    ordinal = number + _DAYS_BEFORE_1970
    # An event time may lie a day beyond the years of the calendar, by its zone.
    inside = date.min.toordinal() <= ordinal <= date.max.toordinal()
    return date.fromordinal(ordinal).isoformat() if inside else f"day {number}"


def convert_to_time(minute: int) -> str:
    """A minute for a person to read."""
    if not format_day(minute).startswith("day"):
        return f"{datetime.fromtimestamp(minute * 60, UTC):%Y-%m-%d %H:%M}"
    return f"{format_day(minute)}, minute {minute % DAY_MINUTES}"


def collect_linked_minutes(
    minutes: Iterable[int], linked: Callable[[Collection[int]], Mapping[int, Collection[int]]]
) -> set[int]:
    """The minutes and all that are linked with them, over any number of links.

    Args:
        minutes: where to begin.
        linked: the links of some minutes.
    """
    found: set[int] = set()
    fresh = set(minutes)
    while fresh:
        found |= fresh
        fresh = {other for others in linked(fresh).values() for other in others} - found
    return found


def split_minutes(weights: Mapping[int, int], links: Mapping[int, Collection[int]], most: int) -> list[set[int]]:
    """The minutes in parts that can be computed apart: linked minutes stay together.

    Args:
        weights: the minutes, each with its number of events as far as it is known.
        links: the links among them.
        most: events in a part, if no minute with its links has more.
    """
    both: dict[int, set[int]] = defaultdict(set)
    for minute, others in links.items():
        for other in others:
            both[minute].add(other)
            both[other].add(minute)
    found: list[set[int]] = []
    left, room = set(weights), 0
    for minute in sorted(weights):
        if minute in left:
            together = collect_linked_minutes([minute], lambda some: {m: both[m] for m in some if m in both}) & left
            left -= together
            weight = sum(weights[m] for m in together)
            if not found or weight > room:
                found.append(set())
                room = most
            found[-1] |= together
            room -= weight
    return found


def build_spans(minutes: Collection[int], most: int) -> list[tuple[int, int]]:
    """Half-open ranges that cover the minutes and leave out the gaps; with more than `most` the widest gaps alone."""
    ordered = sorted(minutes)
    if not ordered:
        return []
    gaps = [(after - before, at) for at, (before, after) in enumerate(pairwise(ordered), 1)]
    widest = sorted((gap for gap in gaps if gap[0] > 1), reverse=True)[: most - 1]
    cuts = [0, *sorted(at for _, at in widest), len(ordered)]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in pairwise(cuts)]


def select_affected_minutes(changed: Collection[int], present: Iterable[int]) -> list[int]:
    """The present minutes whose hour reaches a changed one."""
    ordered = sorted(changed)
    return [m for m in present if bisect_right(ordered, m) > bisect_left(ordered, m - HOUR_MINUTES + 1)]


def sum_hours(minutes: Mapping[int, Minute], wanted: Iterable[int], statuses: Collection[str]) -> dict[int, Sums]:
    """For each wanted minute the sums over the hour that ends with it.

    Args:
        minutes: all minutes of those hours that have events.
        wanted: minutes.
        statuses: statuses whose events count.
    """
    ordered = sorted(minutes)
    counted = [sum((minutes[m].by_status.get(s, Sums()) for s in statuses), Sums()) for m in ordered]
    until = [Sums(), *accumulate(counted)]
    return {m: until[bisect_right(ordered, m)] - until[bisect_left(ordered, m - HOUR_MINUTES + 1)] for m in wanted}
