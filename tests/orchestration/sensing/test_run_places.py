"""The places of runs in Dagster's queue; tests/integration/test_queue.py has what the queue does with them."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from highwater.orchestration.run_tags import MAIN_TAG, PRIORITY, TIER_TAG, URGENT_PRIORITY
from highwater.orchestration.sensing.run_places import TURNS_BEFORE_RETRIES, RunQueue, assign_places, read_queue
from highwater.orchestration.sensing.run_requests import Request
from highwater.orchestration.sensing.stream_ticks import Tick
from tests.helpers.run_queue import ORIGIN

QUEUED, STARTED = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED


def place(instance: dg.DagsterInstance) -> list[int]:
    """The places of two new runs of the stream `a`."""
    requests = [Request(("a@1",)), Request(("a@2",))]
    return [one.place for one in assign_places(instance, {"a": Tick(requests=requests)})["a"].requests]


def add(instance: dg.DagsterInstance, stream: str, priority: str, status: dg.DagsterRunStatus) -> None:
    tags = {MAIN_TAG: stream, PRIORITY: priority}
    instance.add_run(dg.DagsterRun("orders_slice", tags=tags, status=status, remote_job_origin=ORIGIN))


def test_a_run_follows_those_that_began_and_the_last_of_its_stream(instance: dg.DagsterInstance) -> None:
    assert place(instance) == [0, 1]
    add(instance, "b", "-9", QUEUED)
    assert place(instance) == [9, 10], "it is next, as the oldest that waits"
    add(instance, "b", "-7", STARTED)
    assert place(instance) == [8, 9]
    add(instance, "a", "-12", QUEUED)
    assert place(instance) == [13, 14]


def test_places_go_on_from_those_of_ended_runs(instance: dg.DagsterInstance) -> None:
    """They began again from 0, and a run that a person executed again waited until they had reached its own."""
    add(instance, "b", "-20", dg.DagsterRunStatus.FAILURE)
    add(instance, "b", "-7", dg.DagsterRunStatus.SUCCESS)
    assert place(instance) == [21, 22]
    add(instance, "b", "-3", STARTED)
    add(instance, "b", "-300", dg.DagsterRunStatus.CANCELED)
    assert place(instance) == [21, 22], "what is executed again takes no place back, and what never began none ahead"


@pytest.mark.parametrize("priority", [URGENT_PRIORITY, "high", "-", ""])
@pytest.mark.parametrize("status", [QUEUED, STARTED])
def test_a_run_with_another_priority_has_no_place(
    instance: dg.DagsterInstance, priority: str, status: dg.DagsterRunStatus
) -> None:
    """A person who launches a run may write anything into the tag; it ended the ticks of all streams."""
    add(instance, "a", priority, status)
    assert place(instance) == [0, 1]


def test_urgent_runs_take_no_turn_and_those_of_tiers_wait_for_some(instance: dg.DagsterInstance) -> None:
    add(instance, "b", "-7", STARTED)
    requests = [Request(("a@1",), urgent=True), Request(("a.dlq.1@1",), tier=True), Request(("a@2",))]
    found = assign_places(instance, {"a": Tick(requests=requests), "b": Tick(lines=["nothing new"])})
    assert [one.place for one in found["a"].requests] == [0, 7 + TURNS_BEFORE_RETRIES, 8]
    assert found["b"].lines == ["nothing new"]


def test_where_retries_alone_wait_a_new_run_is_some_turns_before_them(instance: dg.DagsterInstance) -> None:
    """Places began again from 0, and a retry from before waited until they had reached its own."""
    tags = {TIER_TAG: "a", PRIORITY: "-20"}
    instance.add_run(dg.DagsterRun("orders_slice", tags=tags, status=QUEUED, remote_job_origin=ORIGIN))
    assert place(instance) == [21 - TURNS_BEFORE_RETRIES, 22 - TURNS_BEFORE_RETRIES]


def test_the_queue_has_room_for_some_runs_of_main_topics_for_each_that_may_run(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    assert read_queue(instance, ["a"]).room is None, "without a queue nothing waits"
    (tmp_path / "dagster.yaml").write_text("concurrency: {runs: {max_concurrent_runs: 2}}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as limited:
        for stream, status in (("a", QUEUED), ("a", QUEUED), ("b", QUEUED), ("b", STARTED), ("others", QUEUED)):
            add(limited, stream, "0", status)
        add(limited, "a", "0", dg.DagsterRunStatus.NOT_STARTED)
        assert read_queue(limited, ["a", "b"]) == RunQueue({"a": 2, "b": 1}, 1)
        assert read_queue(limited, []) == RunQueue({}, 4)
        for _ in range(4):
            add(limited, "b", "0", QUEUED)
        assert read_queue(limited, ["a", "b"]).room == 0
