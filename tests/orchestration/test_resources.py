"""The resource `spark`: the sessions of a run, and their end."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from highwater.orchestration import resources
from highwater.orchestration.resources import SparkResource
from highwater.resources import spark
from tests.helpers.stage_runs import FakeWork


def test_a_step_that_ends_early_stops_both_sessions_and_the_stage_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are texts here. A query of the thread would go on in a session that is closed."""
    done: list[str] = []
    interrupted = Event()

    def interrupt(session: Any) -> None:
        done.append(f"interrupt {session}")
        if session == "a":
            interrupted.set()

    def stage(_: Any) -> Any:
        interrupted.wait(60)
        done.append("the stage ended")

    names = iter("ab")
    monkeypatch.setattr(resources, "open_session", lambda _: next(names))
    monkeypatch.setattr(resources, "open_session_beside", lambda session, _: f"beside {session}")
    monkeypatch.setattr(resources, "close_session", lambda session: done.append(f"close {session}"))
    monkeypatch.setattr(spark, "try_once", lambda session: done.append(f"try once {session}"))
    monkeypatch.setattr(spark, "interrupt", interrupt)
    resource = SparkResource()
    assert [str(resource.get_session()), str(resource.get_second_session())] == ["a", "beside a"]
    work: Any = FakeWork(["orders@0000000"])
    resource.concurrent.start("rejects", stage, work)
    resource.interrupt()
    first, second = ["try once a", "try once beside a"], ["interrupt a", "interrupt beside a", "the stage ended"]
    assert (done[:2], sorted(done[2:5]), sorted(done[5:])) == (first, second, ["close a", "close beside a"])
    assert str(resource.get_session()) == "b", "a session does not outlive its server"
