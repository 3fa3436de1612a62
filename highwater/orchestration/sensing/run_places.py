"""The places of runs in Dagster's queue, so that streams take turns however many runs of one of them wait."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dagster as dg

from highwater.orchestration.run_tags import MAIN_TAG, PRIORITY, TIER_TAG
from highwater.orchestration.sensing.run_requests import Request

if TYPE_CHECKING:
    from highwater.orchestration.sensing.stream_ticks import Tick

# Dagster's queue launches runs of one priority in the order of their requests: a stream would wait for the last run of
# two others with a backlog, which fill the queue's limit. So runs of main topics have places as in start-time fair
# queueing: a stream's next run is one behind its own last one, and behind those that began.
_QUEUED = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED]
_IN_PROGRESS = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
# A canceled run may have been queued until then.
_BEGUN = [*_IN_PROGRESS, dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
# Runs that are read to find a place: among them are publications and retries.
_LOOKED_AT = 100
_NONE = -1
# Runs of main topics that wait, for each that may run at once. A run takes 8 s and more, so two of them last about as
# long as it is from one tick of the planner to the next: 10 s, and up to 5 until the daemon looks. Runs of a backlog
# take longer. More would only wait, for slices that were cut too early: for 40 busy streams 125 runs waited, and a tick
# of the planner took a minute.
QUEUED_PER_PLACE = 2
# Turns of new slices before a run of tiers. Behind all new slices a retry would wait for the end of every backlog. A
# stream has one run of tiers at a time, so while the queue is full it has at most one for ten of new slices.
TURNS_BEFORE_RETRIES = 10
_PLACED = re.compile(r"0|-[0-9]+")


@dataclass(frozen=True)
class RunQueue:
    """The runs of main topics that wait in Dagster's queue.

    Args:
        counts: how many, by stream.
        room: how many more the planner may request; None where Dagster limits no runs.
    """

    counts: Mapping[str, int]
    room: int | None


def read_queue(instance: dg.DagsterInstance, streams: Sequence[str]) -> RunQueue:
    """The queue of some streams, by one query.

    Runs that a daemon created and did not queue before it died do not count: nobody starts them, and planning would
    wait for ever.
    """
    filters = dg.RunsFilter(tags={MAIN_TAG: [*streams]}, statuses=[dg.DagsterRunStatus.QUEUED])
    counts = Counter(run.tags[MAIN_TAG] for run in instance.get_runs(filters)) if streams else Counter[str]()
    config = instance.get_concurrency_config().run_queue_config
    most = config.max_concurrent_runs if config is not None else -1
    return RunQueue(counts, None if most < 0 else max(0, QUEUED_PER_PLACE * most - counts.total()))


def assign_places(instance: dg.DagsterInstance, ticks: Mapping[str, Tick]) -> dict[str, Tick]:
    """The ticks with a place for each request that has one; one query, and one for each stream with new slices.

    Args:
        instance: Dagster's.
        ticks: by stream.
    """
    streams = [name for name, tick in ticks.items() if any(one.takes_turn or one.tier for one in tick.requests)]
    now = _read_current_place(instance) if streams else _NONE
    return {**ticks, **{name: _place(instance, name, ticks[name], now) for name in streams}}


def _place(instance: dg.DagsterInstance, stream: str, tick: Tick, now: int) -> Tick:
    takes_turns = any(one.takes_turn for one in tick.requests)
    last = max(now, _read_last_place(instance, stream)) if takes_turns else now
    requests: list[Request] = []
    for request in tick.requests:
        last += request.takes_turn
        place = last if request.takes_turn else now + TURNS_BEFORE_RETRIES if request.tier else request.place
        requests.append(replace(request, place=place))
    return replace(tick, requests=requests)


def _read_current_place(instance: dg.DagsterInstance) -> int:
    """The highest place of new slices whose run began; where none is known, the one before the place that is next.

    Ended runs count: were places to begin again, a run that somebody executes again, which has the tags of the first,
    would wait until they had reached its own.
    """
    begun = instance.get_runs(dg.RunsFilter(statuses=_BEGUN), limit=_LOOKED_AT)
    if places := _list_places(begun, MAIN_TAG):
        return max(places)
    oldest = instance.get_runs(dg.RunsFilter(statuses=_QUEUED), limit=_LOOKED_AT, ascending=True)
    retries = [place - TURNS_BEFORE_RETRIES for place in _list_places(oldest, TIER_TAG)]
    return min([*(place - 1 for place in _list_places(oldest, MAIN_TAG)), *retries], default=_NONE)


def _read_last_place(instance: dg.DagsterInstance, stream: str) -> int:
    """The place of the stream's last run that is queued or in progress."""
    unfinished = dg.RunsFilter(statuses=[*_QUEUED, *_IN_PROGRESS], tags={MAIN_TAG: stream})
    return max(_list_places(instance.get_runs(unfinished, limit=1), MAIN_TAG), default=_NONE)


def _list_places(runs: Sequence[dg.DagsterRun], tag: str) -> list[int]:
    """The places of runs with a tag: some have none, such as urgent ones or those with a person's priority."""
    priorities = [run.tags.get(PRIORITY, "0") for run in runs if tag in run.tags]
    return [-int(priority) for priority in priorities if _PLACED.fullmatch(priority)]
