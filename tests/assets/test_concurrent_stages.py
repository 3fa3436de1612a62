"""A stage beside another one: its result, its log, and its end."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

from highwater.assets.concurrent_stages import ConcurrentStages
from tests.helpers.stage_runs import FakeWork

REPORTS: Any = ["the report"]


def start(stage: Any, *keys: str) -> tuple[ConcurrentStages, Any]:
    lines: list[str] = []
    work: Any = FakeWork(list(keys), lines.append)
    stages = ConcurrentStages()
    stages.start("rejects", stage, work)
    return stages, SimpleNamespace(keys=work.keys, log=lines.append, lines=lines)


def test_the_step_of_a_stage_gets_its_result_and_its_log_once() -> None:
    def stage(work: Any) -> Any:
        work.log("committed")
        return REPORTS

    stages, work = start(stage, "a", "b")
    stages.wait()
    assert work.lines == [], "another step is under way"
    assert stages.take("current", work) is None
    assert stages.take("rejects", work) == REPORTS
    assert work.lines == ["committed"]
    assert stages.take("rejects", work) is None


def test_a_stage_that_failed_is_left_to_its_step() -> None:
    def stage(work: Any) -> Any:
        work.log("committing")
        raise OSError("no space")

    stages, work = start(stage, "a")
    assert stages.take("rejects", work) is None
    assert work.lines == []


def test_a_step_for_other_slices_gets_no_result() -> None:
    stages, work = start(lambda _: REPORTS, "a")
    others: Any = FakeWork(["a", "b"])
    assert stages.take("rejects", others) is None
    assert stages.take("rejects", work) is None


def test_the_result_is_waited_for_and_the_wait_has_an_end() -> None:
    go_on = Event()

    def stage(_: Any) -> Any:
        go_on.wait(60)
        return REPORTS

    stages, work = start(stage, "a")
    stages.wait(0.01)
    go_on.set()
    assert stages.take("rejects", work) == REPORTS
