"""The steps of a run: which stages go on beside each other.

The stages are left out: what they would commit is planted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.assets.classified import SharedFrames
from highwater.assets.concurrent_stages import ConcurrentStages
from highwater.declaration_parts import OnReject
from highwater.orchestration import stream_assets
from highwater.orchestration.checking import checks
from tests.helpers.stage_runs import StageRuns
from tests.helpers.version_tables import FIRST

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work

# Seconds of processor each.
pytestmark = pytest.mark.slow

HELD = replace(ORDERS, on_reject={**ORDERS.on_reject, "unresolved": OnReject.HOLD})
FRAMES: Any = SimpleNamespace(unpersist=lambda: None)


class SessionRuns(StageRuns):
    """Remembers for each stage its session, and whether it was in the thread of the step."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        super().__init__(folder, instance)
        self.frames = SharedFrames()
        self.sessions: dict[str, tuple[Any, bool]] = {}
        self.fail_once: list[str] = []
        self.spark = SimpleNamespace(
            get_session=lambda: "first",
            get_second_session=lambda: "second",
            interrupt=lambda: None,
            classified=self.frames,
            concurrent=ConcurrentStages(),
        )

    def stage(self, name: str) -> Callable[[Work], list[SliceReport]]:
        take = super().stage(name)

        def noted(work: Work) -> list[SliceReport]:
            if name == "events":
                self.frames.keep(FRAMES, {}, 1)
            in_step = threading.current_thread() is threading.main_thread()
            self.sessions[name] = (work.open_own_session() if work.open_own_session else work.spark, in_step)
            if name in self.fail_once and not in_step:
                self.fail_once.remove(name)
                raise OSError("the disk")
            return take(work)

        return noted


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionRuns]:
    with dg.DagsterInstance.ephemeral() as instance:
        found = SessionRuns(tmp_path, instance)
        monkeypatch.setattr(stream_assets, "load_stage", found.stage)
        monkeypatch.setattr(checks, "CHECKS", ())
        yield found


def test_rejects_are_committed_beside_current_with_a_session_of_its_own(runs: SessionRuns) -> None:
    assert runs.run(ORDERS, FIRST)
    assert runs.sessions["current"] == ("second", True)
    assert runs.sessions["rejects"] == ("first", False)
    assert runs.taken.count("rejects") == 1, "its step took the result"


def test_rejects_that_failed_beside_current_are_committed_by_their_step(runs: SessionRuns) -> None:
    runs.fail_once.append("rejects")
    assert runs.run(ORDERS, FIRST)
    assert runs.sessions["rejects"] == ("first", True)
    assert runs.taken.count("rejects") == 1


def test_a_run_without_rejects_commits_none(runs: SessionRuns) -> None:
    assert runs.run(ORDERS, FIRST, "events", "current")
    assert runs.sessions["current"] == ("first", True)
    assert runs.taken == ["events", "current"]


def test_a_run_that_classified_nothing_goes_on_step_by_step(runs: SessionRuns) -> None:
    """Classifying in the thread would pass the breaker of the reference table."""
    assert runs.run(ORDERS, FIRST, "current", "rejects")
    assert runs.sessions == {"current": ("first", True), "rejects": ("first", True)}


def test_each_table_of_an_ordered_stream_waits_for_its_turn(runs: SessionRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_assets, "ensure_in_turn", lambda *_: None)
    assert runs.run(HELD, FIRST)
    assert runs.sessions["rejects"] == ("first", True)
