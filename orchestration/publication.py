"""How far accepted events are behind on their way to their topic: what `status`, `explain` and an alert tell of it.

What belongs here: gathering what is decided and not sent, and what holds it up, without a JVM and without Dagster. What
does not: asking for runs (`orchestration.publishing`), sending (`assets.published`), or the check of what was sent
(`orchestration.published_checks`).

What is sent is a prefix of the main topic's slices. So its end is looked for among the newest ones first: listing all
slices of a table that has 100,000 of them takes longer than all else that is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from assets import sent
from assets.events import TABLE as EVENTS
from assets.origins import DLQ
from assets.rejects import TABLE as REJECTS
from highwater.errors import KAFKA, LAKE
from highwater.publishing import State
from resources.guards import resting, told
from resources.lake import last_written, proofs_in, query, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.plans import Publication
    from highwater.proof import Proof
    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger

# So many slices are looked at: from the first one that is not sent, and of the newest.
LOOK = 200
# The end of what is sent is looked for among so many of the newest slices, then among these, then in the whole table.
WINDOWS = (20, 500)


@dataclass(frozen=True)
class Behind:
    """How far publication is behind what is decided.

    Args:
        topic: where accepted events are sent.
        last: the last slice of the main topic that is sent; all before it are. None if none is.
        slices: slices that are decided and were never sent, of those that were looked at.
        records: their events.
        anew: slices that were decided anew since they were sent; what of them goes out again is not counted before.
        oldest: of all these the one that was decided first; None if there is none.
        since: when it was decided, in UTC.
        unseen: planned slices of the main topic behind those that were looked at.
        held_up: why the next is not sent, in a sentence; empty if nothing waits.
    """

    topic: str
    last: str | None
    slices: int = 0
    records: int = 0
    anew: int = 0
    oldest: str | None = None
    since: datetime | None = None
    unseen: int = 0
    held_up: str = ""

    @property
    def waits(self) -> bool:
        """Whether anything that is decided is not sent."""
        return self.oldest is not None

    def age(self, now: datetime) -> timedelta:
        """For how long the oldest accepted event that is not sent has been one; 0 if nothing waits."""
        return timedelta(0) if self.since is None else max(now - self.since, timedelta(0))

    @property
    def line(self) -> str:
        """The same in a sentence."""
        begin = f"{self.topic}: sent up to {self.last}" if self.last else f"{self.topic}: nothing is sent yet"
        if not self.waits:
            return f"{begin}; {self.held_up}" if self.held_up else f"{begin}, no accepted event waits"
        parts = [f"{self.records:,} events of {self.slices:,} slices wait"]
        parts += [f"{self.anew:,} slices were decided anew since they were sent"] if self.anew else []
        parts += [f"the oldest is {self.oldest}, decided {self.since:%Y-%m-%d %H:%M:%S} UTC"] if self.since else []
        parts += [f"{self.unseen:,} planned slices behind these were not looked at"] if self.unseen else []
        return "; ".join([begin, *parts, self.held_up])

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "since": None if self.since is None else self.since.isoformat()}


def behind(ledger: Ledger, lake: Lake, stream: Stream, now: datetime) -> Behind | None:
    """Look how far a stream is published; None of one that publishes nothing.

    The slices of tiers, and those that were decided anew, are looked for among the newest ones alone: the sensor looks
    at all in turn.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    if stream.publishes is None:
        return None
    with ThreadPoolExecutor(2) as opening:  # half of the time is spent on opening them
        events, published = opening.map(lambda name: lake.table(stream.name, name), (EVENTS, sent.TABLE))
    last = _last_sent(ledger, lake, stream, published)
    following = ledger.slices(stream.name, stream.topic, after=last, limit=LOOK)
    pieces = {one.key: one for one in (*following, *ledger.slices(stream.name, newest=LOOK))}
    decided = {} if events is None else proofs_in(events, [*pieces])
    known = {} if published is None else sent.complete(proofs_in(published, [*pieces]))
    attempts = {key: proof.attempt for key, proof in known.items()}
    waiting = [key for key, proof in decided.items() if attempts.get(key) != proof.attempt]
    fresh = [key for key in waiting if key not in known]
    since = _decided_at(ledger, events, waiting)
    oldest = min(since, key=lambda key: (since[key], key), default=None)
    newest = ledger.last(stream.name, stream.topic)
    full = len(following) == LOOK and newest is not None
    return Behind(
        topic=stream.publishes.topic,
        last=last,
        slices=len(fresh),
        records=sum(decided[key].rows or 0 for key in fresh),
        anew=len(waiting) - len(fresh),
        oldest=oldest,
        since=None if oldest is None else since[oldest],
        unseen=newest.ordinal - following[-1].ordinal if full and newest is not None else 0,
        held_up=_held_up(ledger, lake, stream, published, following, decided, now) if following or waiting else "",
    )


def _last_sent(ledger: Ledger, lake: Lake, stream: Stream, published: DeltaTable | None) -> str | None:
    if published is None:
        return None
    for window in WINDOWS:
        keys = [one.key for one in ledger.slices(stream.name, stream.topic, newest=window)]
        found = sent.complete(proofs_in(published, keys)) if keys else {}
        if found:
            return max(found, key=lambda key: found[key].piece.ordinal)
    return sent.last_published(lake, stream)


def _decided_at(ledger: Ledger, events: DeltaTable | None, keys: Sequence[str]) -> dict[str, datetime]:
    """When slices were decided: as the breaker judged them; of those that it does not watch, as their files say."""
    if events is None or not keys:
        return {}
    found = {key: one.judged_at for key, one in ledger.breakers.judgements(keys).items()}
    others = [key for key in keys if key not in found]
    return {**found, **(last_written(events, others) if others else {})}


def _held_up(
    ledger: Ledger,
    lake: Lake,
    stream: Stream,
    published: DeltaTable | None,
    following: Sequence[Slice],
    decided: Mapping[str, Proof],
    now: datetime,
) -> str:
    asleep = [told(one) for one in ledger.breakers.dependencies() if one.name in {KAFKA, LAKE} and resting(one, now)]
    if asleep:
        return "; ".join(asleep)
    batch = None if published is None else sent.batch_of(published)
    if batch is not None and batch.slices:
        first, *more = batch.slices
        some = f"{first} and {len(more):,} more slices" if more else first
        return f"a batch of {batch.total:,} records of {some} is being sent, or broke off: the next run goes on with it"
    if following and following[0].key not in decided:
        return f"{following[0].key} is next, and {_undecided(ledger, following[0].key)}"
    if following and not _rejects_follow(lake, stream, decided[following[0].key]):
        return f"{following[0].key} is next, and its rejects are not published to the DLQ yet"
    due = f"{following[0].key} is next" if following else "they go out as they are found"
    return f"{due}; see that the sensor {stream.name}_published is switched on, and what its ticks say"


def _undecided(ledger: Ledger, key: str) -> str:
    """Why a slice is not decided, as far as the ledger tells."""
    hold = ledger.holds.of([key]).get(key)
    if hold is not None and hold.release is None:
        return f"is held by {hold.found.many}; mend it, or highwater release-hold {key}"
    judged = ledger.breakers.judgements([key]).get(key)
    if judged is not None and judged.refused:
        return f"is refused by the breaker; mend it, or highwater accept-rejects {key}"
    return "is not decided yet"


def _rejects_follow(lake: Lake, stream: Stream, decided: Proof) -> bool:
    """Whether a slice is done up to its publication to the DLQ, without a look at the tables that do not matter."""

    def found(name: str) -> Proof | None:
        return lake.committed(stream.name, name, [decided.key]).get(decided.key)

    rejected = found(REJECTS)
    if rejected is None or rejected.attempt != decided.attempt:
        return False
    published = found(DLQ) if rejected.rows else rejected
    return published is not None and published.attempt == decided.attempt


@dataclass(frozen=True)
class Told:
    """What is known of a slice's way to the topic of accepted events.

    Args:
        topic: that topic.
        attempt: of the decision that was sent last; None if the slice was never sent to its end.
        decided: the attempt that stands in events; None if none does.
        states: how many of its events are in each state.
        at: when the last of them was written down as settled, in UTC.
        batch: the number of the batch that holds it and is not settled; None if none does.
        mark: the ledger's copy of the topic's last mark: batch, records of it that were committed, and when.
        why_not: why it is not sent as it is decided; empty if it is.
    """

    topic: str
    attempt: int | None
    decided: int | None
    states: Mapping[str, int]
    at: datetime | None
    batch: int | None
    mark: Publication | None
    why_not: str

    @property
    def lines(self) -> list[str]:
        """The same in sentences."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.states.items() if count) or "no event"
        when = "" if self.at is None else f", settled {self.at:%Y-%m-%d %H:%M:%S} UTC"
        lines = [] if self.attempt is None else [f"{self.topic}: {counts}, of attempt {self.attempt}{when}"]
        if self.why_not:
            lines.append(f"{self.topic}: {'not' if self.attempt is None else 'now not'} sent: {self.why_not}")
        if self.batch is not None and self.mark is not None and self.mark.attempt == self.batch:
            lines.append(
                f"{self.topic}: {self.mark.sent:,} records of its batch {self.batch} are committed, as of "
                f"{self.mark.published_at:%Y-%m-%d %H:%M:%S} UTC; group highwater.pub.{self.topic}"
            )
        return lines

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        mark = None if self.mark is None else {"batch": self.mark.attempt, "records": self.mark.sent}
        at = None if self.at is None else self.at.isoformat()
        return {**vars(self), "states": dict(self.states), "at": at, "mark": mark}


def of_slice(ledger: Ledger, lake: Lake, stream: Stream, piece: Slice, now: datetime) -> Told | None:
    """What became of a slice's events on their way to the topic; None of a stream that publishes nothing.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    if stream.publishes is None:
        return None
    table, topic = lake.table(stream.name, sent.TABLE), stream.publishes.topic
    decided = lake.committed(stream.name, EVENTS, [piece.key]).get(piece.key)
    proof = None if table is None else sent.complete(proofs_in(table, [piece.key])).get(piece.key)
    batch = None if table is None else sent.batch_of(table)
    mine = batch is not None and piece.key in batch.slices
    states, at = ({}, None) if table is None else _states(table, piece.key)
    settled = proof is not None and decided is not None and proof.attempt == decided.attempt
    return Told(
        topic=topic,
        attempt=None if proof is None else proof.attempt,
        decided=None if decided is None else decided.attempt,
        states=states,
        at=at,
        batch=batch.attempt if batch is not None and mine else None,
        mark=ledger.publications([topic]).get(topic),
        why_not="" if settled else _why_not(ledger, lake, stream, piece, decided, now, batch=mine),
    )


def _states(table: DeltaTable, key: str) -> tuple[dict[str, int], datetime | None]:
    asked = (
        "SELECT state, count(*) AS rows, max(published_at) AS at FROM t "
        f"WHERE proof IS NULL AND {slice_is_one_of([key])} GROUP BY state"
    )
    found = {str(row["state"]): row for row in query(table, asked)}
    states: dict[str, int] = {state.value: int(found[state.value]["rows"]) for state in State if state.value in found}
    return states, max((row["at"] for row in found.values()), default=None)


def _why_not(
    ledger: Ledger, lake: Lake, stream: Stream, piece: Slice, decided: Proof | None, now: datetime, *, batch: bool
) -> str:
    if batch:
        return "it is in the batch that is being sent, or that broke off"
    if decided is None:
        return f"it {_undecided(ledger, piece.key)}"
    if not _rejects_follow(lake, stream, decided):
        return "its rejects are not published to the DLQ yet"
    found = behind(ledger, lake, stream, now)
    return "nothing is known of it" if found is None else f"it waits for its turn; {found.held_up}"
