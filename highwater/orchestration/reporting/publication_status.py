"""Publication of accepted events: the lag of a stream, the state of a slice, and the error of a topic that is gone."""

# File times in the logs of the two tables show what waits: opening the commits of some hundred slices takes longer than
# all the rest. Slice commits are opened only where the times leave it open.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from highwater.assets import publication_log
from highwater.assets.events import TABLE as EVENTS
from highwater.assets.origins import DLQ
from highwater.assets.rejects import TABLE as REJECTS
from highwater.errors import KAFKA, LAKE, TopicVanishedError
from highwater.publishing import EventState
from highwater.resources.commit_log import read_slice_commits, read_written
from highwater.resources.delta import query, slice_is_one_of
from highwater.resources.dependency_guards import describe, is_cooling_down

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.plans import PublicationRecord
    from highwater.resources.commit_log import CommitTime
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# How many slices are looked up. First, slices whose events were written after they were sent, in case they were
# reprocessed: half of them the oldest, half the newest, since files that maintenance joined are written later, too.
# Second, the newest sent slices, in case they were sent in part: such a slice is recorded later than its events.
MAX_OPENED = 50


@dataclass(frozen=True)
class PublicationLag:
    """The lag of publication behind the decisions.

    Args:
        topic: where accepted events are sent.
        last: the last slice of the main topic that is sent; all before it are. None if none is.
        slices: slices that are decided and were never sent to their end.
        records: their events.
        revised: slices that were reprocessed since they were sent; how many records go out again is not known yet.
        unopened: further slices in an unknown state: there are too many to look them all up.
        oldest: the one that was decided first; None if there is none.
        since: when it was decided, in UTC.
        held_up: why the next is not sent, in a sentence; empty if nothing waits.
    """

    topic: str
    last: str | None
    slices: int = 0
    records: int = 0
    revised: int = 0
    unopened: int = 0
    oldest: str | None = None
    since: datetime | None = None
    held_up: str = ""

    @property
    def waits(self) -> bool:
        """Whether anything that is decided is not sent."""
        return self.oldest is not None

    def compute_age(self, now: datetime) -> timedelta:
        """For how long the oldest accepted event that is not sent has been one; 0 if nothing waits."""
        return timedelta(0) if self.since is None else max(now - self.since, timedelta(0))

    @property
    def line(self) -> str:
        """The state of the publication in a sentence."""
        begin = f"{self.topic}: sent up to {self.last}" if self.last else f"{self.topic}: nothing is sent yet"
        parts = [*self._counts, *([self.held_up] if self.held_up else [])]
        return "; ".join([begin, *parts]) if parts else f"{begin}, no accepted event waits"

    @property
    def _counts(self) -> Iterator[str]:
        if self.slices:
            events = f"{self.records:,} events of " if self.records else ""
            yield f"{events}{self.slices:,} slices wait"
        if self.revised:
            least = "at least " if self.unopened else ""
            yield f"{least}{self.revised:,} slices were reprocessed since they were sent"
        if self.unopened:
            more = "more " if self.revised else ""
            yield f"{self.unopened:,} {more}slices may have been reprocessed since they were sent"
        if self.since:
            yield f"the oldest is {self.oldest}, decided {self.since:%Y-%m-%d %H:%M:%S} UTC"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "since": None if self.since is None else self.since.isoformat()}


def measure_publication_lag(
    ledger: Ledger, lake: Lake, stream: Stream, also: Collection[str] = ()
) -> PublicationLag | None:
    """Look how far a stream is published; None of one that publishes nothing.

    Args:
        ledger: the ledger.
        lake: the lake.
        stream: the stream.
        also: slices to look up in any case, whether they are sent as they are decided.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    if stream.publishes is None:
        return None
    with ThreadPoolExecutor(2) as opening:  # most of the time is spent on reading the two logs
        (events, decided), (published, settled) = opening.map(
            lambda name: _load_written_slices(lake, stream, name), (EVENTS, publication_log.TABLE)
        )
    last = _find_last_sent(stream, published, settled)
    fresh, revised, unopened = _list_waiting_slices(decided, settled, events, published, also)
    since = {key: decided[key].at_ms for key in (*fresh, *revised)}
    oldest = min(since, key=lambda key: (since[key], key), default=None)
    following = ledger.list_slices(stream.name, stream.topic, after=last, limit=1)
    return PublicationLag(
        topic=stream.publishes.topic,
        last=last,
        slices=len(fresh),
        records=sum(decided[key].rows or 0 for key in fresh),
        revised=len(revised),
        unopened=unopened,
        oldest=oldest,
        since=None if oldest is None else decided[oldest].at,
        held_up=_describe_delay(ledger, lake, stream, events, following) if following or since else "",
    )


def find_accepted_vanished_error(ledger: Ledger, lake: Lake, stream: Stream, topic: str) -> TopicVanishedError | None:
    """The error for a topic of accepted events that is missing.

    None of another topic, and where nothing was sent, as far as ledger and table know: that is how it begins, and how a
    person has everything sent again.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    if stream.publishes is None or topic != stream.publishes.topic:
        return None
    mark = ledger.publications.read_for_slices([topic]).get(topic)
    if mark is None or lake.open_stream_table(stream.name, publication_log.TABLE) is None:
        return None
    return TopicVanishedError(
        f"topic {topic} of stream {stream.name} is gone",
        stored=f"batch {mark.attempt} was sent to it by {mark.published_at:%Y-%m-%d %H:%M:%S} UTC",
        found="no such topic",
        remedy="check that HIGHWATER_KAFKA_BOOTSTRAP names the right cluster; if it does, have all sent again: stop "
        f"the sensor publisher, delete the table {lake.build_table_path(stream.name, publication_log.TABLE)} "
        f"and the group highwater.pub.{topic}, and start the sensor, which recreates the topic. A run before that "
        "makes it without a record, and fails with TopicRecreatedError",
    )


def _load_written_slices(lake: Lake, stream: Stream, name: str) -> tuple[DeltaTable | None, dict[str, CommitTime]]:
    table = lake.open_stream_table(stream.name, name)
    return table, {} if table is None else read_written(table)


def _find_last_sent(stream: Stream, published: DeltaTable | None, settled: dict[str, CommitTime]) -> str | None:
    """The last slice of the main topic that is sent; a later one that was sent in part is taken from `settled`."""
    main = f"{stream.topic}@"
    while published is not None:
        keys = [key for key in settled if key.startswith(main)]
        longest = max(map(len, keys), default=0)  # an ordinal beyond the usual digits has more of them
        last = max((key for key in keys if len(key) == longest), default=None)
        if last is None or publication_log.select_complete(read_slice_commits(published, [last])):
            return last
        del settled[last]
    return None


def _list_waiting_slices(
    decided: Mapping[str, CommitTime],
    settled: Mapping[str, CommitTime],
    events: DeltaTable | None,
    published: DeltaTable | None,
    also: Collection[str],
) -> tuple[list[str], list[str], int]:
    """The slices that were never sent to their end, those that were reprocessed since, and of how many it is open."""
    fresh = [key for key in decided if key not in settled]
    both = [key for key in decided if key in settled]  # not a set: in its order hundred thousand take thrice as long
    if events is None or published is None or not both:
        return fresh, [], 0
    after = [key for key in both if decided[key].at_ms > settled[key].at_ms]
    after.sort(key=lambda key: (decided[key].at_ms, key))
    half = MAX_OPENED // 2
    latest = nlargest(MAX_OPENED, both, key=lambda key: (settled[key].at_ms, key))
    some = sorted({*after[:half], *after[-half:], *latest, *(key for key in also if key in settled)})
    with ThreadPoolExecutor(2) as reading:
        decided_slice_commits, sent_slice_commits = reading.map(
            lambda table: read_slice_commits(table, some), (events, published)
        )
    found = sorted(
        key
        for key in decided_slice_commits
        if key in sent_slice_commits and sent_slice_commits[key].attempt != decided_slice_commits[key].attempt
    )
    begun = publication_log.select_complete({key: sent_slice_commits[key] for key in found})
    fresh += [key for key in found if key not in begun]
    return fresh, [*begun], len(set(after) - set(some))


def _describe_delay(
    ledger: Ledger,
    lake: Lake,
    stream: Stream,
    events: DeltaTable | None,
    following: Sequence[Slice],
) -> str:
    now = datetime.now(UTC)
    asleep = [
        describe(one)
        for one in ledger.breakers.list_dependencies()
        if one.name in {KAFKA, LAKE} and is_cooling_down(one, now)
    ]
    if asleep:
        return "; ".join(asleep)
    batch = publication_log.load_current_batch(lake, stream)
    if batch is not None and batch.slices:
        first, *more = batch.slices
        some = f"{first} and {len(more):,} more slices" if more else first
        return f"a batch of {batch.total:,} records of {some} is being sent, or broke off: the next run goes on with it"
    keys = [slice_.key for slice_ in following]
    decided = {} if events is None or not keys else read_slice_commits(events, keys)
    for key in keys:
        if key not in decided:
            return f"{key} is next, and {_describe_undecided(ledger, key)}"
        if not _has_published_rejects(lake, stream, decided[key]):
            return f"{key} is next, and its rejects are not published to the DLQ yet"
    due = f"{keys[0]} is next" if keys else "they go out as they are found"
    return f"{due}; check that the sensor publisher is switched on, and read its ticks"


def _describe_undecided(ledger: Ledger, key: str) -> str:
    """The reason why a slice is not decided, by the ledger."""
    hold = ledger.holds.read_for_slices([key]).get(key)
    if hold is not None and hold.release is None:
        return f"is held by {hold.found.many}; fix it, or highwater release-hold {key}"
    judgement = ledger.breakers.read_judgements([key]).get(key)
    if judgement is not None and judgement.refused:
        return f"is refused by the breaker; fix it, or highwater accept-rejects {key}"
    return "is not decided yet"


def _has_published_rejects(lake: Lake, stream: Stream, decided: SliceCommit) -> bool:
    """Whether a slice is done up to its publication to the DLQ, without a look at the tables that do not matter."""

    def found(name: str) -> SliceCommit | None:
        return lake.load_slice_commits(stream.name, name, [decided.key]).get(decided.key)

    rejected = found(REJECTS)
    if rejected is None or rejected.attempt != decided.attempt:
        return False
    published = found(DLQ) if rejected.rows else rejected
    return published is not None and published.attempt == decided.attempt


@dataclass(frozen=True)
class PublishedSlice:
    """The state of a slice's way to the topic of accepted events.

    Args:
        topic: that topic.
        attempt: attempt of the decision that was sent last; None if the slice was never sent to its end.
        decided: the attempt that is in events; None if none does.
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
    mark: PublicationRecord | None
    why_not: str

    @property
    def lines(self) -> list[str]:
        """The state in sentences."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.states.items() if count) or "no event"
        when = "" if self.at is None else f", settled {self.at:%Y-%m-%d %H:%M:%S} UTC"
        lines = [] if self.attempt is None else [f"{self.topic}: {counts}, of attempt {self.attempt}{when}"]
        if self.attempt is None and self.states:
            lines = [f"{self.topic}: {counts}, not sent to its end{when}"]
        if self.why_not:
            what = "now not sent" if self.attempt is not None else "the rest is not sent" if lines else "not sent"
            lines.append(f"{self.topic}: {what}: {self.why_not}")
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


def load_published_slice(ledger: Ledger, lake: Lake, stream: Stream, slice_: Slice) -> PublishedSlice | None:
    """The outcome of a slice's events on their way to the topic; None of a stream that publishes nothing.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    if stream.publishes is None:
        return None
    table, topic = lake.open_stream_table(stream.name, publication_log.TABLE), stream.publishes.topic
    decided = lake.load_slice_commits(stream.name, EVENTS, [slice_.key]).get(slice_.key)
    slice_commit = (
        None
        if table is None
        else publication_log.select_complete(read_slice_commits(table, [slice_.key])).get(slice_.key)
    )
    batch = publication_log.load_current_batch(lake, stream)
    is_in_batch = batch is not None and slice_.key in batch.slices
    states, at = ({}, None) if table is None else _count_states(table, slice_.key)
    settled = slice_commit is not None and decided is not None and slice_commit.attempt == decided.attempt
    return PublishedSlice(
        topic=topic,
        attempt=None if slice_commit is None else slice_commit.attempt,
        decided=None if decided is None else decided.attempt,
        states=states,
        at=at,
        batch=batch.attempt if batch is not None and is_in_batch else None,
        mark=ledger.publications.read_for_slices([topic]).get(topic),
        why_not="" if settled else _describe_unsent(ledger, lake, stream, slice_, decided, batch=is_in_batch),
    )


def _count_states(table: DeltaTable, key: str) -> tuple[dict[str, int], datetime | None]:
    sql = (
        f"SELECT state, count(*) AS rows, max(published_at) AS at FROM t WHERE {slice_is_one_of([key])} GROUP BY state"
    )
    found = {str(row["state"]): row for row in query(table, sql)}
    states: dict[str, int] = {
        state.value: int(found[state.value]["rows"]) for state in EventState if state.value in found
    }
    return states, max((row["at"] for row in found.values()), default=None)


def _describe_unsent(
    ledger: Ledger, lake: Lake, stream: Stream, slice_: Slice, decided: SliceCommit | None, *, batch: bool
) -> str:
    if batch:
        return "it is in the batch that is being sent, or that broke off"
    if decided is None:
        return f"it {_describe_undecided(ledger, slice_.key)}"
    if not _has_published_rejects(lake, stream, decided):
        return "its rejects are not published to the DLQ yet"
    found = measure_publication_lag(ledger, lake, stream, [slice_.key])
    # Without a cause it was sent while this was looked up.
    return "; ".join(["it waits for its turn", *([found.held_up] if found is not None and found.held_up else [])])
