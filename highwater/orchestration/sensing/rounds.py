"""A round: one tick of a sensor over all streams, with its time limit, its faults and its fair share of runs."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import dropwhile, takewhile
from typing import Any, Protocol

import dagster as dg

from highwater.declaration import Stream
from highwater.errors import HighwaterError, PermanentError, TemporaryError
from highwater.log_fields import bind_log_fields
from highwater.orchestration.sensing.stream_ticks import Tick

# Dagster ends a tick after 60 s and drops all of its results, its cursor too. No visit of a stream begins after 40 s,
# and no request to Kafka waits beyond 50 s, whatever the visit asks. That leaves 10 s for the ledger and for Dagster.
BUDGET_SECONDS = 40.0
LIMIT_SECONDS = 50.0
# Streams with a known fault are visited last, since confirming a fault takes a second look 3 s later. Each tick spends
# at most this time on them, so that they delay the next tick of the others by no more.
FAULTY_SECONDS = 10.0
# The daemon submits the runs of a tick before the sensor ticks again. It has 8 threads for it (dagster.yaml), and a run
# takes 0.1 to 0.8 s: 100 runs take 1.3 to 10 s, the planner's interval. Where the queue has room for as many, each of
# 100 streams gets one run a tick, and a run takes up to 20 slices of 200,000 records.
MAX_RUNS = 100


@dataclass(frozen=True)
class RoundContext:
    """The streams of a round, and their clients.

    Args:
        instance: Dagster's.
        resources: open ledger, lake and Kafka.
        streams: the streams to visit.
        cursors: by stream what its last tick left.
        now: the time, in UTC.
    """

    instance: dg.DagsterInstance
    resources: Any
    streams: Sequence[Stream]
    cursors: Mapping[str, str]
    now: datetime


class Round(Protocol):
    """The facts that a sensor asks once for all streams, and its work for each of them.

    Args:
        lines: sentences for the tick's message that concern no single stream.
        begin: the first stream that has to wait for the next round, which begins with it; empty if none has to.
    """

    lines: Sequence[str]
    begin: str

    def visit(self, stream: Stream, cursor: str | None) -> Tick | None:
        """Do the sensor's work for a stream; None if there is no work.

        Args:
            stream: the stream.
            cursor: the cursor of its last tick.

        Raises:
            TemporaryError: a dependency is unavailable; nothing was decided.
            PermanentError: a person has to act before the sensor can serve the stream.
        """


@dataclass(frozen=True)
class Cursor:
    """The stream with which the next round begins; no decision depends on it.

    Args:
        begin: the stream that is visited first.
        faulty: the stream that is visited first among those with a known fault.
        streams: the cursor of each stream's last tick.
    """

    begin: str = ""
    faulty: str = ""
    streams: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> Cursor:
        """Read a stored cursor; one that cannot be read begins again."""
        try:
            plain = json.loads(text or "{}")
            streams = {str(name): str(left) for name, left in plain.get("streams", {}).items()}
            return cls(str(plain.get("begin", "")), str(plain.get("faulty", "")), streams)
        except (ValueError, AttributeError):
            return cls()

    def to_json(self) -> str:
        """The stored form: some 50 bytes for each stream that has something to continue."""
        return json.dumps({name: value for name, value in vars(self).items() if value}, separators=(",", ":"))


@dataclass
class RoundResult:
    """The result of a round.

    Args:
        ticks: by stream, in the order of the visits; streams without work are left out.
        skipped: streams that could not be served because a dependency is unavailable, with the reason.
        faults: streams that cannot be served until a person acts, with the error.
        served: streams that were served without a fault.
        left: streams that were not visited for want of time.
        cursor: where the next round begins.
    """

    ticks: dict[str, Tick] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Exception] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    cursor: Cursor = field(default_factory=Cursor)


def visit_all(
    round_: Round, streams: Sequence[Stream], cursor: Cursor, faulty: Collection[str], deadline: float
) -> RoundResult:
    """Visit streams in turn until all are visited or time is over; a fault of one stream stops no other.

    Each round begins one stream further, so that no stream is always the last one. A round that ran out of time
    continues with the stream where it stopped.

    Args:
        round_: the sensor's work.
        streams: the streams to visit.
        cursor: where to begin.
        faulty: the streams with a known fault; they come last.
        deadline: no visit begins later; a value of `time.monotonic`.
    """
    found = RoundResult()
    lefts = dict(cursor.streams)
    order = rotate_streams([stream for stream in streams if stream.name not in faulty], cursor.begin)
    last = rotate_streams([stream for stream in streams if stream.name in faulty], cursor.faulty)
    begin = _visit_each(round_, order, lefts, deadline, found)
    until = min(deadline, time.monotonic() + FAULTY_SECONDS)
    next_faulty = _visit_each(round_, last, lefts, until, found)
    names = {stream.name for stream in streams}
    lefts = {name: left for name, left in lefts.items() if name in names}
    found.cursor = Cursor(begin, next_faulty, lefts)
    return found


def rotate_streams(streams: Sequence[Stream], name: str) -> list[Stream]:
    """The streams in the order of their names, from this one on, then the earlier ones."""
    ordered = sorted(streams, key=lambda stream: stream.name)
    before = len([*takewhile(lambda stream: stream.name < name, ordered)])
    return [*ordered[before:], *ordered[:before]]


def _visit_each(
    round_: Round, streams: Sequence[Stream], lefts: dict[str, str], deadline: float, found: RoundResult
) -> str:
    """Visit streams until time is over; returns the name of the stream that the next round begins with."""
    for number, stream in enumerate(streams):
        if time.monotonic() > deadline:
            found.left += [one.name for one in streams[number:]]
            return stream.name
        with bind_log_fields(stream=stream.name):
            _visit(round_, stream, lefts, found)
    return streams[1 % len(streams)].name if streams else ""


def _visit(round_: Round, stream: Stream, lefts: dict[str, str], found: RoundResult) -> None:
    name = stream.name
    try:
        tick = round_.visit(stream, lefts.get(name))
    except TemporaryError as error:
        found.skipped[name] = str(error)
        return
    except Exception as error:  # noqa: BLE001 - a defect that one stream meets must not stop the others
        found.faults[name] = error
        return
    if tick is None:
        found.served.append(name)
        return
    found.ticks[name] = tick
    lefts.pop(name, None)
    if tick.cursor is not None:
        lefts[name] = tick.cursor
    if tick.error is None:
        found.served.append(name)
    else:
        found.faults[name] = tick.error


def describe_remedy(error: Exception, sensor: str) -> str:
    """The remedy of a fault, for a person."""
    if isinstance(error, HighwaterError):
        return error.remedy
    return f"report this as a defect of Highwater, with the log of the sensor {sensor}'s last tick"


def describe_problem(error: Exception) -> str:
    """A fault in a sentence, with the stored and the found value."""
    if not isinstance(error, PermanentError):
        return f"{type(error).__name__}: {error}"
    values = [f"{name}: {value}" for name, value in (("stored", error.stored), ("found", error.found)) if value]
    return "; ".join([f"{type(error).__name__}: {error.problem}", *values])


def limit_runs(ticks: Mapping[str, Tick], most: int) -> dict[str, Tick]:
    """The ticks with a limited number of run requests, shared one by one among the streams.

    Keys whose request has to wait are left out too: the stream's next tick finds both in the ledger.

    Args:
        ticks: by stream.
        most: the limit, of all streams together.
    """
    if sum(len(tick.requests) for tick in ticks.values()) <= most:
        return dict(ticks)
    counts = dict.fromkeys(ticks, 0)
    waiting = deque(name for name, tick in ticks.items() if tick.requests)
    for _ in range(most):
        name = waiting.popleft()
        counts[name] += 1
        if counts[name] < len(ticks[name].requests):
            waiting.append(name)
    return {name: _limit_requests(tick, counts[name]) for name, tick in ticks.items()}


def find_first_unserved(asked: Mapping[str, Tick], ticks: Mapping[str, Tick]) -> str:
    """The first stream whose runs all wait for the next tick, which begins with it; empty if there is none."""
    return next((name for name, tick in asked.items() if tick.requests and not ticks[name].requests), "")


def _limit_requests(tick: Tick, many: int) -> Tick:
    """The tick with its first requests only, and the keys before those that have to wait."""
    if many == len(tick.requests):
        return tick
    waiting = {key for request in tick.requests[many:] for key in request.keys}
    first = [*takewhile(lambda key: key not in waiting, tick.keys)]
    cut = {*dropwhile(lambda key: key not in waiting, tick.keys)}
    requests = [request for request in tick.requests[:many] if not cut & {*request.keys}]
    line = f"{len(tick.requests) - len(requests)} runs wait for the next tick: one tick requests {MAX_RUNS} at most"
    return replace(tick, keys=first, requests=requests, lines=[*tick.lines, line])
