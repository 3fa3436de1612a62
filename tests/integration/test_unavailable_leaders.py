"""What planner, status and alerts say of a cluster whose leaders are killed and stopped under load."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from assets.streams.orders import STREAM as ORDERS
from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from highwater.alerting import Alert
from highwater.declaration import Limits
from highwater.errors import HighwaterError, TemporaryError
from highwater.orchestration.operations.acceptance import accept_loss
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.conftest import create_topic

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1800)]

TOPIC = "leaders.unavailable"
PARTITIONS = 6
# Commands and tools that destroy something.
DESTRUCTIVE = ("accept-", "reclaim", "delete", "discard", "abort")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Two replicas of three brokers: with two of them down some partitions have no leader, others have one."""
    with EmbeddedCluster(tmp_path, controller_apart=True) as started:
        config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "false"}
        create_topic(started.bootstrap, TOPIC, PARTITIONS, config, replicas=2)
        yield started


class Load(threading.Thread):
    """Sends to all partitions until it is stopped, whatever the brokers do."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self._brokers = bootstrap

    def run(self) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self._brokers, "acks": "all", "linger.ms": 5, "log_level": 0})
        number = 0
        while not self.stopping.wait(0.01):
            with suppress(BufferError):
                producer.produce(TOPIC, b"%d" % number, partition=number % PARTITIONS)
            number += 1
            producer.poll(0)
        producer.flush(60)


class Watched:
    """A stream that is planned, and everything that anybody is shown of it."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.stream = replace(ORDERS, topic=TOPIC, limits=Limits(max_offsets=1_000, slices_per_tick=1_000))
        self.ledger, self.kafka = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}"), Kafka(bootstrap)
        self.lake = Lake(str(folder / "lake"))
        self.errors: list[HighwaterError] = []
        self.texts: list[str] = []
        self.leaderless = 0

    def look(self) -> None:
        """One tick of the planner, a look at the status, the alerts, and what `accept-loss` would record."""
        self._try(self._tick)
        status = read_stream_status(self.ledger, self.kafka, self.stream, {})
        self.errors += status.errors
        self.leaderless += sum(one.leader is None or one.last_stable is None for one in status.partitions)
        self.texts += [text for text in status.lines if "alert since" not in text]
        self.texts += [one.trouble for one in status.partitions if one.trouble]
        self._try(lambda: alerts.tick(self.ledger, self.kafka, self.lake, [self.stream], self._report))
        self._try(self._accept)

    def _tick(self) -> None:
        tick = Planner(self.ledger, self.kafka).tick(self.stream, datetime.now(UTC))
        self.errors += tick.errors.values()
        self.texts += tick.lines

    def _report(self, alert: Alert) -> None:
        self.texts.append(f"{alert.what}: {alert.value}; {alert.remedy}")

    def _accept(self) -> None:
        for dry_run in (True, False):
            found = accept_loss(
                self.ledger, self.kafka, self.stream, lambda _: [], by="ann", now=datetime.now(UTC), dry_run=dry_run
            )
            self.texts += found.lines

    def _try(self, act: Any) -> None:
        try:
            act()
        except HighwaterError as error:
            self.errors.append(error)

    def planned(self) -> dict[int, int]:
        found = self.ledger.topics.read_planned_topic(self.stream.name, TOPIC)
        return {} if found is None else dict(found.ends)


# Twenty rounds, whose first one usually suffices.
MAX_SECONDS = 240.0


@pytest.mark.parametrize("seconds", [20.0, pytest.param(600.0, marks=pytest.mark.long)])
def test_leaders_that_are_unavailable_are_no_loss(
    cluster: EmbeddedCluster, tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offset -1001 for a partition without a leader was taken for its end: a truncation, with `accept-loss` as remedy.

    Who followed the remedy had a generation that starts at -1001, and planning stopped for good.
    """
    monkeypatch.setattr("highwater.resources.kafka.LOOKS_APART", 2.0)
    load, watched, chance = Load(cluster.bootstrap), Watched(cluster.bootstrap, tmp_path), random.Random(7)
    load.start()

    def begun() -> bool:
        watched.look()
        return len(watched.planned()) == PARTITIONS

    wait_until(begun, 60, "the first plan")
    [before] = watched.ledger.topics.list_generations("orders", TOPIC)
    watched.errors.clear()
    began, round_ = time.monotonic(), 0
    # On a busy machine a look may take as long as brokers are unavailable: rounds go on until one has seen it.
    while (took := time.monotonic() - began) < seconds or (not watched.leaderless and took < MAX_SECONDS):
        unavailable = chance.sample(cluster.brokers, 2)
        for broker in unavailable:
            broker.kill() if round_ % 2 == 0 else stop(broker, signal.SIGSTOP)
        ends = time.monotonic() + 6
        while time.monotonic() < ends:
            watched.look()
        for broker in unavailable:
            broker.start() if round_ % 2 == 0 else stop(broker, signal.SIGCONT)
        watched.look()
        round_ += 1
    load.stopping.set()
    load.join(120)
    assert watched.leaderless, "no partition was ever without a leader"
    assert [error for error in watched.errors if not isinstance(error, TemporaryError)] == []
    offered = [text for text in [*watched.texts, *map(str, watched.errors)] if any(d in text for d in DESTRUCTIVE)]
    assert offered == []
    assert watched.ledger.topics.list_generations("orders", TOPIC)[0].starts == before.starts
    assert len(watched.ledger.topics.list_generations("orders", TOPIC)) == 1
    assert watched.ledger.list_losses() == []

    def all_planned() -> bool:
        watched.look()
        state = watched.kafka.read_topic_state(TOPIC)
        return not state.leaderless_partitions and watched.planned() == {
            p: seen.last_stable for p, seen in state.partitions.items()
        }

    wait_until(all_planned, 120, "the whole topic to be planned")
    assert len(watched.ledger.topics.list_generations("orders", TOPIC)) == 1


def stop(broker: EmbeddedBroker, sign: signal.Signals) -> None:
    """Let all of a broker's processes hang, or go on."""
    assert broker.pid is not None
    os.killpg(broker.pid, sign)
