"""Selection and order of a slice's events for the topic of accepted events: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from highwater.envelope import Origin
from highwater.errors import RetractionError
from highwater.slices import Slice


class EventState(str, Enum):
    """The outcome of an event on its way to the topic."""

    SENT = "sent"
    """Its content is there."""
    AGAIN = "second delivery"
    """It was left out: the same content of its version was accepted before."""
    RETRACTED = "retracted"
    """It was sent, and is no event any more."""
    GONE = "gone"
    """It was left out, and is no event any more: a batch says so, and it is forgotten."""

    @property
    def sends(self) -> bool:
        """Whether a record of it goes out."""
        return self in {EventState.SENT, EventState.RETRACTED}


class Lateness(str, Enum):
    """The reason why a record is not in the order of its origin: the value of the header."""

    RETRIED = "retried"
    """It came back through the DLQ."""
    CORRECTED = "corrected"
    """Its slice was materialised again after it was sent."""


class RecordedOutcome(NamedTuple):
    """The outcome that an earlier publication recorded of an origin.

    Args:
        state: its last state.
        revision: how often it was sent again with other content, or retracted.
        fingerprint: fingerprint of the content that was decided last; None if it was retracted.
        slice_key: the slice that it is kept under; empty of what was sent before a lost lake was restarted.
        at: when that was known to be sent, in UTC.
        late: why its last record is late.
    """

    state: EventState
    revision: int
    fingerprint: str | None
    slice_key: str
    at: datetime | None = None
    late: Lateness | None = None


class PublicationOutcome(NamedTuple):
    """The outcome of an origin now; `None` instead of it where nothing changes.

    Args:
        state, revision: as in `RecordedOutcome`.
        late: why its record is late.
        at: when it was sent, for a record that is already on the topic and only moves to its new slice.
    """

    state: EventState
    revision: int
    late: Lateness | None
    at: datetime | None = None

    @property
    def goes_out(self) -> bool:
        """Whether a record is sent for it."""
        return self.state.sends and self.at is None


@dataclass(frozen=True)
class PossibleCopy:
    """An event whose version may have been accepted before with the same content.

    Args:
        slice_key: the slice that holds it.
        origin: its identity.
        fingerprint: fingerprint of its content, or of the content decided before.
        ms: when it was published first, milliseconds since 1970 in UTC.
        place: its place among the records to send now; None if it was decided before.
    """

    slice_key: str
    origin: Origin
    fingerprint: str
    ms: int
    place: int | None = None


def select_second_deliveries(copies: Iterable[PossibleCopy], horizon: timedelta) -> set[tuple[str, Origin]]:
    """Records to send now whose content was accepted before, by slice and origin.

    Before are all that were decided in earlier publications, then the others in the order in which they would be sent.
    The horizon looks back from an event's own time of publication; what was published later than it, and decided
    before it, counts always: it is a copy that overtook.
    """
    by_content: dict[str, list[PossibleCopy]] = defaultdict(list)
    for copy in copies:
        by_content[copy.fingerprint].append(copy)
    reach = round(horizon.total_seconds() * 1000)
    found = set()
    for same in by_content.values():
        latest: int | None = None
        for copy in sorted(same, key=lambda one: -1 if one.place is None else one.place):
            if copy.place is not None and latest is not None and latest >= copy.ms - reach:
                found.add((copy.slice_key, copy.origin))
            latest = copy.ms if latest is None else max(latest, copy.ms)
    return found


def decide_publication(
    slice_key: str, fingerprint: str, known: RecordedOutcome | None, *, again: bool, late: Lateness | None
) -> PublicationOutcome | None:
    """The state of an event; None where the earlier outcome stays valid.

    Args:
        slice_key: the slice whose event it is.
        fingerprint: its content's fingerprint.
        known: the earlier publication of its origin; None if there is none.
        again: whether its content was accepted before, of another origin.
        late: why it would be late, if nothing is known of it.
    """
    if known is None:
        return PublicationOutcome(EventState.AGAIN, 0, None) if again else PublicationOutcome(EventState.SENT, 0, late)
    if known.fingerprint == fingerprint:
        if not known.slice_key:
            return PublicationOutcome(EventState.SENT, known.revision, known.late, known.at)
        # An event that another slice sent for the same origin is not sent by this one.
        return None if known.slice_key == slice_key else PublicationOutcome(EventState.AGAIN, known.revision, None)
    if known.state is EventState.AGAIN:
        return (
            PublicationOutcome(EventState.AGAIN, 0, None)
            if again
            else PublicationOutcome(EventState.SENT, 0, Lateness.CORRECTED)
        )
    return PublicationOutcome(EventState.SENT, known.revision + 1, Lateness.CORRECTED)


def can_retract(accepted_at: datetime | None, sent_at: Iterable[datetime | None]) -> bool:
    """Whether a person's permission covers a retraction: a permission given before sending meant something else.

    Args:
        accepted_at: when the person gave it; None if nobody did.
        sent_at: when each event was known to be sent; None where that is not known yet.
    """
    return accepted_at is not None and all(at is not None and at < accepted_at for at in sent_at)


def ensure_none_retracted(slice_key: str, origins: Collection[Origin], *, allowed: bool) -> None:
    """Ensure that nothing that was sent of a slice would be retracted, unless a person allows it.

    Raises:
        RetractionError: something would.
    """
    if not origins or allowed:
        return
    few = ", ".join(f"{one.topic} partition {one.partition} offset {one.offset}" for one in sorted(origins)[:5])
    raise RetractionError(
        f"{len(origins):,} events of {slice_key} were sent, and would be rejected now",
        stored=few + (" and more" if len(origins) > 5 else ""),
        found="rejected by today's rules, or lost from the table of events; no accept-rejects was given since",
        remedy="fix the rule and materialise the slice again; or let them be rejected and retracted: "
        f"highwater accept-rejects {slice_key}",
    )


def select_in_order(
    slices: Collection[Slice], main: str, following: Sequence[Slice], published: Collection[str]
) -> tuple[list[Slice], str | None]:
    """The slices that can be published now, in the order of their publication, and the one that the others wait for.

    Slices of the main topic follow each other without a gap; then come slices that were published before and have
    changed, and slices of tiers, each after all slices of the main topic that were planned before it.

    Args:
        slices: the slices that are asked for.
        main: the main topic.
        following: the slices of the main topic that are not published yet, in their order, as far as they matter.
        published: the slices that were published before.
    """
    wanted = {slice_.key for slice_ in slices}
    begin: list[Slice] = []
    for slice_ in following:
        if slice_.key not in wanted:
            break
        begin.append(slice_)
    waits = following[len(begin)] if len(begin) < len(following) else None
    fresh = {slice_.key for slice_ in begin}

    def is_due(slice_: Slice) -> bool:
        if slice_.key in published:
            return True
        return slice_.topic != main and (waits is None or slice_.planned_at < waits.planned_at)

    late = [slice_ for slice_ in slices if slice_.key not in fresh and is_due(slice_)]
    ordered = [*begin, *sorted(late, key=lambda slice_: (slice_.planned_at, slice_.topic, slice_.ordinal))]
    return ordered, None if waits is None or len(ordered) == len(wanted) else waits.key


def group_for_publication(
    slices: Sequence[Slice], rows: Mapping[str, int], most_rows: int, most: int
) -> Iterator[list[Slice]]:
    """The slices in groups that are published together; one that is too large is a group of its own.

    Args:
        slices: the slices, in their order.
        rows: the events of each.
        most_rows: events in a group at the most.
        most: slices in a group at the most.
    """
    group: list[Slice] = []
    total = 0
    for slice_ in slices:
        if group and (len(group) == most or total + rows[slice_.key] > most_rows):
            yield group
            group, total = [], 0
        group.append(slice_)
        total += rows[slice_.key]
    if group:
        yield group
