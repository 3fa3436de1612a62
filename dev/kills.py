"""Kills processes of a running stack, by a schedule that a seed decides."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from dagster._core.storage.dagster_run import DagsterRun

    from dev.stack import Stack

# A run that begins is looked for that often, and that long before something else is killed.
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 60.0


class Victim(StrEnum):
    """A process that is killed with SIGKILL, and started again where nobody else does."""

    WORKER = "worker of a run"
    DAEMON = "daemon with its code servers and workers"
    SPARK = "Spark Connect server"
    BROKER = "broker"


# Workers most of all: they are what writes. After the server's end the next slice costs a minute of compiling.
WEIGHTS = {Victim.WORKER: 6, Victim.DAEMON: 2, Victim.SPARK: 1, Victim.BROKER: 1}


@dataclass(frozen=True)
class Kill:
    """One kill: what, and how many seconds after the one before."""

    victim: Victim
    after: float


def schedule(seed: int, kills: int, least: float, most: float) -> Iterator[Kill]:
    """A number of kills between `least` and `most` seconds apart; of four, each kind is among them."""
    chosen = random.Random(seed)  # noqa: S311 - repeatable, not secret
    first = [*Victim]
    chosen.shuffle(first)
    for number in range(kills):
        victim = first[number] if number < len(first) else chosen.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        yield Kill(victim, chosen.uniform(least, most))


@dataclass
class Killer:
    """Kills what a schedule says.

    Args:
        stack: whose processes.
        report: called after each kill.
        done: how many of what were killed.
    """

    stack: Stack
    report: Callable[[str], None]
    done: Counter[Victim] = field(default_factory=Counter)

    def run(self, kills: Iterator[Kill], stop: Event) -> None:
        """Carry the schedule out, until its end or until `stop` is set."""
        for kill in kills:
            if stop.wait(kill.after):
                return
            self.supervise()
            self._kill(kill.victim, stop)

    def supervise(self) -> None:
        """Restart what ended by itself, as `make up` and deployments do.

        The client (confluent-kafka 2.16) was seen to abort the code server by an assertion of its own, about the
        references of a request, when the broker was killed under a question about a consumer group.
        """
        assert self.stack.dagster is not None
        for line in self.stack.dagster.restart_ended():
            self.report(line)

    def _kill(self, victim: Victim, stop: Event) -> None:
        if victim is Victim.WORKER and not self._kill_worker(stop):
            victim = Victim.DAEMON  # nothing ran for a minute
        if victim is not Victim.WORKER:
            self._restart(victim)
        self.done[victim] += 1
        self.report(f"kill {self.done.total()}: {victim}")

    def _kill_worker(self, stop: Event) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        with dg.DagsterInstance.from_config(self.stack.env["DAGSTER_HOME"]) as instance:
            while time.monotonic() < deadline and not stop.wait(POLL_SECONDS):
                for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
                    pid = worker(instance, run)
                    if pid is not None and works(pid):
                        with suppress(ProcessLookupError):  # it ended just now
                            os.kill(pid, signal.SIGKILL)
                            return True
        return False

    def _restart(self, victim: Victim) -> None:
        dagster, spark, broker = self.stack.dagster, self.stack.spark, self.stack.broker
        assert dagster is not None
        assert spark is not None
        assert broker is not None
        if victim is Victim.DAEMON:
            dagster.daemon.kill()
            dagster.daemon.start()
            return
        server = spark if victim is Victim.SPARK else broker
        server.kill()
        server.start()


def worker(instance: dg.DagsterInstance, run: DagsterRun) -> int | None:
    """The process that executes a run's steps; None until it began."""
    for record in instance.all_logs(run.run_id):
        event = record.dagster_event
        if event is None or not event.is_engine_event or "Executing steps" not in (event.message or ""):
            continue
        if (pid := event.engine_event_data.metadata.get("pid")) is not None:
            return int(str(pid.value))
    return None


def works(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
