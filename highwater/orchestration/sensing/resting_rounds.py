"""The rounds of repair, offset mirror and publisher: a stream with nothing to do now rests until it changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from highwater.declaration import Stream
from highwater.orchestration.sensing.dead_workers import end_runs_without_worker
from highwater.orchestration.sensing.offset_mirror import mirror
from highwater.orchestration.sensing.publishing import publish
from highwater.orchestration.sensing.repairing import format_dead_worker_lines, repair
from highwater.orchestration.sensing.rounds import RoundContext
from highwater.orchestration.sensing.run_history import RECORDS, select_stream_names
from highwater.orchestration.sensing.stream_ticks import Tick

# A complete look at a stream takes about 0.3 s. With 100 streams at rest one of them is due every 6 s: 5 % of a core.
REST = timedelta(minutes=10)
# Rests differ by this fraction, so that streams which began together do not stay together.
REST_JITTER = 0.25
# The clocks of workers and of Dagster's storage, which set the times of runs, may differ by this from ours. As long
# after the end of a run there is what follows from it.
CLOCKS = timedelta(minutes=1)
# In a cursor, for what is not there.
NONE = "-"


@dataclass(frozen=True)
class RestingStream:
    """A stream in which a look found nothing to do, or only work of runs that are under way.

    Args:
        since: when the look began, in UTC.
        until: when the next look is due at the latest, in UTC.
        revisions: revisions of the stream's plans at that time.
        ended: names the run that had ended last by then; `-` if none had for a while.
        place: the cursor of the look itself.
    """

    since: datetime
    until: datetime
    revisions: str
    ended: str = NONE
    place: str | None = None

    @classmethod
    def parse(cls, cursor: str | None) -> RestingStream | None:
        """The rest that a cursor holds; None if it holds none."""
        try:
            mark, since, until, revisions, ended, place = (cursor or "").split(" ")
            begins, ends = (datetime.fromtimestamp(int(text), UTC) for text in (since, until))
        except (ValueError, OverflowError, OSError):
            return None
        return cls(begins, ends, revisions, ended, None if place == NONE else place) if mark == "rest" else None

    def to_cursor(self) -> str:
        """The stored form, some 70 bytes."""
        times = f"{self.since.timestamp():.0f} {self.until.timestamp():.0f}"
        return f"rest {times} {self.revisions} {self.ended} {self.place or NONE}"


class RestingStreams:
    """The streams at rest, by one question to the ledger and one to Dagster.

    A stream is looked at again when something of it was planned or accepted, when one of its runs ended, a minute after
    that, and when its rest is over. So a change that neither ledger nor Dagster shows, such as a table that was
    deleted, is found within a rest. A run that begins wakes no stream.

    Args:
        context: the streams, and their clients.

    Raises:
        TemporaryError: the ledger is unavailable.
    """

    def __init__(self, context: RoundContext) -> None:
        self._now = context.now
        self._revisions = context.resources.ledger.open().topics.read_revisions()
        parsed = {name: RestingStream.parse(cursor) for name, cursor in context.cursors.items()}
        self._before = {name: rest for name, rest in parsed.items() if rest is not None}
        # A rest that begins later than now is from before the clock was set back.
        rests = {name: rest for name, rest in self._before.items() if rest.since - CLOCKS <= context.now < rest.until}
        ended = _read_last_ends(context.instance, min((one.since for one in rests.values()), default=None))
        self._at_rest = {
            name
            for name, rest in rests.items()
            if rest.revisions == _hash(self._revisions.get(name, ""))
            and (ended is not None and ended.get(name, rest.ended) == rest.ended)
        }
        self._ended = ended or {}

    def is_at_rest(self, stream: str) -> bool:
        """Whether nothing of a stream changed since its rest began."""
        return stream in self._at_rest

    def begin(self, stream: str, lasts: timedelta = REST, place: str | None = None) -> str:
        """The cursor of a stream in which a complete look found nothing to do."""
        lasts *= random.uniform(1 - REST_JITTER, 1 + REST_JITTER)  # noqa: S311 - no secret depends on it
        return self.rest_until(stream, self._now + lasts, place)

    def rest_until(self, stream: str, until: datetime, place: str | None = None) -> str:
        """The cursor of a stream that is looked at again at a time, if nothing of it changes before.

        Some of what follows from a run's end comes seconds later: what repair records of it, a commit that its killed
        worker began, another run's end that bears an earlier time. So the first rest after an end is a short one.
        """
        before, ended = self._before.get(stream), self._ended.get(stream, NONE)
        if before is None or ended not in {NONE, before.ended}:
            until = min(until, self._now + CLOCKS)
        revisions = _hash(self._revisions.get(stream, ""))
        return RestingStream(self._now, until, revisions, ended, place).to_cursor()


def _hash(text: str) -> str:
    """A text of fixed length, for the revisions of any number of topics."""
    from hashlib import sha256

    return sha256(text.encode()).hexdigest()[:16]


def _read_last_ends(instance: dg.DagsterInstance, since: datetime | None) -> dict[str, str] | None:
    """Which run of each stream ended last, of those that did since then; None if they are too many to read.

    Ends are compared with each other alone, since their times are by the clocks of workers and of Dagster's storage.
    Some are to the second: so several runs may be the last one together.
    """
    if since is None:
        return {}
    ended = dg.RunsFilter(statuses=FINISHED_STATUSES, updated_after=since - CLOCKS)
    records = instance.get_run_records(ended, limit=RECORDS)
    if len(records) == RECORDS:
        return None
    last: dict[str, tuple[datetime, list[str]]] = {}
    for record in records:
        at, run = record.update_timestamp, record.dagster_run.run_id
        for name in select_stream_names(record):
            newest, runs = last.get(name, (at, []))
            last[name] = (max(at, newest), [run] if at > newest else [*runs, run] if at == newest else runs)
    return {name: _hash(f"{at} {sorted(runs)}") for name, (at, runs) in last.items()}


class RestingRound:
    """A round that lets streams rest that are idle, or that only wait for their runs.

    Args:
        context: the streams, and their clients.
        look: looks at a stream from its cursor on.
        lines: sentences for the tick's log.

    Raises:
        TemporaryError: the ledger is unavailable.
    """

    def __init__(
        self, context: RoundContext, look: Callable[[Stream, str | None], Tick], lines: Sequence[str] = ()
    ) -> None:
        self.lines = lines
        self.begin = ""
        self._look = look
        self._rests = RestingStreams(context)

    def visit(self, stream: Stream, cursor: str | None) -> Tick | None:
        """Look at the stream unless it rests; raises what the look does."""
        if self._rests.is_at_rest(stream.name):
            return None
        rest = RestingStream.parse(cursor)
        tick = self._look(stream, cursor if rest is None else rest.place)
        if tick.idle:
            return replace(tick, cursor=self._rests.begin(stream.name, place=tick.cursor))
        if tick.until is not None:
            return replace(tick, cursor=self._rests.rest_until(stream.name, tick.until, tick.cursor))
        return tick


def begin_repair(context: RoundContext) -> RestingRound:
    """The round of repair: runs whose worker is gone are ended first, for all streams together.

    Raises:
        TemporaryError: the ledger is unavailable.
    """
    ended = end_runs_without_worker(context.instance, context.resources.ledger.open(), context.streams, context.now)
    look = partial(repair, context.instance, context.resources)
    return RestingRound(context, look, format_dead_worker_lines(ended))


def begin_mirror(context: RoundContext) -> RestingRound:
    """The round of the offset mirror; raises what `RestingRound` does."""
    return RestingRound(context, partial(mirror, context.resources))


def begin_publisher(context: RoundContext) -> RestingRound:
    """The round of the publisher; raises what `RestingRound` does."""
    return RestingRound(context, partial(publish, context.instance, context.resources))
