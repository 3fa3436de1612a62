"""Streams take turns, and a retry waits for some of them; a stream's retries delay its new slice by one run at most.

The queue's daemon decides here as it does in a deployment, with the limits of our dagster.yaml; no run is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster import instance_for_test

from highwater.declaration import Stream
from highwater.orchestration.run_tags import MAIN_TAG, PUBLISH, RETRY
from tests.helpers.run_queue import TIER, add_runs, list_dequeued
from tests.helpers.support import make_stream

# Seconds of processor each.
pytestmark = pytest.mark.slow

# More than a page of the queue, 100, so that a new slice is on a later one than all of the first.
RETRIES = 110
OURS = yaml.safe_load((Path(__file__).parents[2] / "dagster.yaml").read_text())


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with instance_for_test(temp_dir=str(tmp_path), overrides={"concurrency": OURS["concurrency"]}) as made:
        yield made


def test_a_new_slice_goes_before_all_retries_that_wait(instance: dg.DagsterInstance) -> None:
    retries = add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    [main] = add_runs(instance, ["orders@0000000"], "plan", dg.DagsterRunStatus.QUEUED)
    first, *others = list_dequeued(instance)
    assert first == main, "it came last"
    assert len(others) == 1, "of all retries one runs beside it"
    assert others[0] in retries


def test_a_retry_that_runs_leaves_room_for_new_slices(instance: dg.DagsterInstance) -> None:
    add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add_runs(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    mains = add_runs(instance, [f"orders@{n:07d}" for n in range(5)], "plan", dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == mains[:2], "a stream has three places, retries one of them"


def test_where_all_places_are_taken_a_new_slice_is_next(instance: dg.DagsterInstance) -> None:
    """So it waits for one run at the most, whichever ends first."""
    add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add_runs(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    running = add_runs(instance, ["orders@0000000", "orders@0000001"], "plan", dg.DagsterRunStatus.STARTED)
    [main] = add_runs(instance, ["orders@0000002"], "plan", dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == []
    instance.report_run_canceled(instance.get_run_by_id(running[0]))  # type: ignore[arg-type]
    assert list_dequeued(instance) == [main]


@pytest.mark.parametrize("purpose", [RETRY, PUBLISH])
def test_a_backlog_that_runs_leaves_a_place_for_what_is_retried_or_published(
    instance: dg.DagsterInstance, purpose: str
) -> None:
    """However long it is: a retry that is due would wait for its end, and it may last for hours."""
    add_runs(instance, [f"orders@{n:07d}" for n in range(2)], "plan", dg.DagsterRunStatus.STARTED)
    add_runs(instance, [f"orders@{n:07d}" for n in range(2, RETRIES)], "repair", dg.DagsterRunStatus.QUEUED)
    key = f"{TIER}@0000000" if purpose == RETRY else "orders@0000000"
    wanted = add_runs(instance, [key], purpose, dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == wanted


def test_a_stream_waits_for_one_run_of_each_other_stream_however_many_of_theirs_wait(
    instance: dg.DagsterInstance,
) -> None:
    """The two take all places. A third stream waited for the last run of both."""
    busy = {name: _declare(name) for name in ("a", "b")}
    owners: dict[str, str] = {}
    for name, stream in busy.items():
        owners |= dict.fromkeys(_add(instance, stream, 2, dg.DagsterRunStatus.STARTED), name)
    for name, stream in busy.items():
        owners |= dict.fromkeys(_add(instance, stream, 38, dg.DagsterRunStatus.QUEUED, first=2), name)
    third = _declare("c")
    owners |= dict.fromkeys(_add(instance, third, 3, dg.DagsterRunStatus.QUEUED), "c")
    ended = [run for run in owners if instance.get_run_by_id(run).status == dg.DagsterRunStatus.STARTED]
    launched = [owners[_end_and_launch(instance, ended)] for _ in range(15)]
    assert launched.index("c") <= 2, launched
    assert launched.count("c") == 3, "its later runs take their turn too"
    assert min(launched[:9].count(name) for name in "abc") >= 2, launched


def test_a_backlog_goes_on_beside_streams_that_always_have_a_new_slice(instance: dg.DagsterInstance) -> None:
    """Were runs of streams without a backlog always first, a stream that is behind would be for ever."""
    _add(instance, _declare("behind"), 40, dg.DagsterRunStatus.QUEUED)
    steady, started = [_declare(f"steady{n}") for n in range(6)], list[str]()
    unfinished = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED]
    for number in range(30):
        for stream in steady:
            if not instance.get_runs_count(dg.RunsFilter(tags={MAIN_TAG: stream.name}, statuses=unfinished)):
                _add(instance, stream, 1, dg.DagsterRunStatus.QUEUED, first=number)
        for run in list_dequeued(instance):
            _start(instance, run)
            started.append(run)
        instance.report_run_canceled(instance.get_run_by_id(started.pop(0)))  # type: ignore[arg-type]
    left = dg.RunsFilter(tags={MAIN_TAG: "behind"}, statuses=[dg.DagsterRunStatus.QUEUED])
    assert 40 - instance.get_runs_count(left) >= 5, "a seventh of 33 runs is its share"


def test_a_retry_takes_its_turn_beside_streams_that_always_have_a_new_slice(instance: dg.DagsterInstance) -> None:
    """Were it behind all new slices, it would wait for the end of a backlog, or for ever."""
    streams, started = [_declare(f"steady{n}") for n in range(3)], list[str]()
    for stream in streams:
        _add(instance, stream, 16, dg.DagsterRunStatus.QUEUED)
    for run in list_dequeued(instance):
        _start(instance, run)
        started.append(run)
    [retry] = add_runs(instance, [f"{TIER}@0000000"], RETRY, dg.DagsterRunStatus.QUEUED)
    launched = [_end_and_launch(instance, started) for _ in range(40)]
    assert retry in launched, "it never came"
    assert launched.index(retry) >= 8 * len(streams), "new slices go first for some turns"


def _declare(name: str) -> Stream:
    return replace(make_stream(name), name=name)


def _add(
    instance: dg.DagsterInstance, stream: Stream, runs: int, status: dg.DagsterRunStatus, first: int = 0
) -> list[str]:
    keys = [f"{stream.topic}@{n:07d}" for n in range(first, first + runs)]
    return add_runs(instance, keys, "plan", status, stream)


def _end_and_launch(instance: dg.DagsterInstance, started: list[str]) -> str:
    """End the run that began first, and start the one that the queue launches then."""
    instance.report_run_canceled(instance.get_run_by_id(started.pop(0)))  # type: ignore[arg-type]
    [run] = list_dequeued(instance)
    _start(instance, run)
    started.append(run)
    return run


def _start(instance: dg.DagsterInstance, run: str) -> None:
    instance.report_dagster_event(
        dg.DagsterEvent(dg.DagsterEventType.PIPELINE_START.value, "orders_slice", message="started"), run
    )
