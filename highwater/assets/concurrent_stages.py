"""A stage that works in a thread beside another stage of its run, and its result until its own step asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work


@dataclass
class _Running:
    name: str
    keys: list[str]
    thread: Thread
    lines: list[str] = field(default_factory=list)
    reports: list[SliceReport] | None = None


class ConcurrentStages:
    """At most one stage that works beside another one.

    A stage sets its session up, so the other one needs a session of its own for that. What fails here is not reported:
    the step of the stage finds no result, takes the slices through the stage itself, and reports what fails then.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None

    def start(self, name: str, stage: Callable[[Work], list[SliceReport]], work: Work) -> None:
        """Begin a stage in a thread.

        Args:
            name: the name of its table.
            stage: the function that materialises the table.
            work: its inputs; what it logs is shown when its step takes the result.
        """

        def run() -> None:
            with suppress(Exception):
                running.reports = stage(replace(work, log=running.lines.append))

        # A process that ends does not wait for it: the next run adopts or fences its commit, as that of a killed run.
        running = self._running = _Running(name, work.keys, Thread(target=run, name=f"stage {name}", daemon=True))
        running.thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the stage ended, for some seconds at most."""
        if self._running is not None:
            self._running.thread.join(seconds)

    def take(self, name: str, work: Work) -> list[SliceReport] | None:
        """The reports of a stage that did all slices of a step here; None where the step has to do them itself."""
        running = self._running
        if running is None or running.name != name:
            return None
        running.thread.join()
        self._running = None
        if running.reports is None or running.keys != work.keys:
            return None
        for line in running.lines:
            work.log(line)
        return running.reports
