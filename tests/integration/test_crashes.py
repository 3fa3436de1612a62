"""Exactly once, whatever is killed, whenever: processes end by SIGKILL in the middle of their work.

Each series kills at named points, shows that the points were reached, lets other processes finish, and then holds every
table against the topic (`tests.helpers.crash_support`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from dev.spark_local import SMALL_QUERIES
from highwater import settings
from tests.helpers.crash_support import PARTITIONS, TABLES, Deployment
from tests.helpers.support import fetch_rest, open_forkserver

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory

# The minute or two that a test takes was seen to become twenty on a machine with ten runnable processes a core.
pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1800)]


def series_of(name: str, short: Sequence[object], long: Sequence[object]) -> pytest.MarkDecorator:
    """Two lengths of a test; the longer one belongs to `make test-long`."""
    return pytest.mark.parametrize(
        name, [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.long)]
    )


# Seen: 15 s for a child that takes one slice on a machine with a load of 10 a core.
LONGEST = 480
SIGKILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkConnect]:
    """A Connect server of these tests' own: they kill it, and leave it with work of dead clients."""
    from dev.spark_connect import SparkConnect

    with SparkConnect(tmp_path_factory.mktemp("crashes"), extra=SMALL_QUERIES) as started:
        # The first answer of its page takes seconds, in which a child would be past the point where it is to be killed.
        wait_until(lambda: bool(fetch_rest(started, "applications")), LONGEST, "its page")
        yield started


@dataclass
class Series:
    """Children over one deployment."""

    deployment: Deployment
    server: SparkConnect | None = None
    children: list[tuple[BaseProcess, Path]] = field(default_factory=list)

    def start(self, *batches: Sequence[str], **task: Any) -> int:
        """Start a child; returns its number."""
        from tests.helpers import crash_child

        folder = self.deployment.home / f"child-{len(self.children)}"
        made = crash_child.Task(
            self.deployment.environment, self.deployment.stream.topic, folder, tuple(map(tuple, batches)), **task
        )
        if self.server is not None:
            made = replace(made, ui=self.server.ui_url, server=self.server.pid)
        child = open_forkserver().Process(target=crash_child.main, args=(made,))
        child.start()
        self.children.append((child, folder))
        return len(self.children) - 1

    def end(self, number: int) -> int | None:
        """Wait for a child's end; returns its exit status."""
        child, _ = self.children[number]
        child.join(LONGEST)
        assert child.exitcode is not None, self.said(number)
        return child.exitcode

    def run(self, *batches: Sequence[str], **task: Any) -> None:
        """Let a child take slices to their end."""
        number = self.start(*batches, **task)
        assert self.end(number) == 0, self.said(number)

    def killed(self, *batches: Sequence[str], point: str, **task: Any) -> dict[str, Any]:
        """Let a child be killed at a point; returns what was so then."""
        number = self.start(*batches, point=point, **task)
        assert self.end(number) == SIGKILLED, f"{point} was not reached: {self.said(number)}"
        self.deployment.end_dead_runs()
        return self.evidence(number)

    def evidence(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.children[number][1] / "evidence").read_text())
        return found

    def said(self, number: int) -> str:
        """The end of a child's log."""
        return (self.children[number][1] / "log").read_text()[-3000:]

    def quiet(self) -> None:
        """Wait until the server works no more: what a dead client began is over."""
        from tests.helpers.crash_child import list_running_jobs

        assert self.server is not None
        ui = self.server.ui_url
        calm: list[float] = []

        def over() -> bool:
            if list_running_jobs(ui):
                calm.clear()
            calm.append(time.monotonic())
            return calm[-1] - calm[0] > 1

        wait_until(over, LONGEST, "the end of the server's work")

    def stop(self) -> None:
        for child, _ in self.children:
            if child.is_alive() and child.pid:
                os.kill(child.pid, signal.SIGKILL)
            child.join(10)


@pytest.fixture
def series(topic: TopicFactory, bootstrap: str, tmp_path: Path, server: SparkConnect) -> Iterator[Series]:
    """Children that are clients of the Connect server."""
    made = Deployment.make(topic(partitions=PARTITIONS), tmp_path, bootstrap, {settings.SPARK_REMOTE: server.remote})
    found = Series(made, server)
    yield found
    found.stop()


@pytest.fixture
def local(topic: TopicFactory, bootstrap: str, tmp_path: Path) -> Iterator[Series]:
    """Children that have the driver in their own process."""
    from dev.spark_local import environment, local_conf, write_conf_dir

    conf = write_conf_dir(tmp_path, "local", {**local_conf(tmp_path, driver_memory_mb=1024), **SMALL_QUERIES})
    spark = {**environment(conf), settings.SPARK_MASTER: "local[2]"}
    found = Series(Deployment.make(topic(partitions=PARTITIONS), tmp_path, bootstrap, spark))
    yield found
    found.stop()


def planned(series: Series, slices: int) -> list[str]:
    """Send and plan a given number of slices, aborted records among them; returns their keys, shuffled."""
    deployment = series.deployment
    deployment.send(90 * slices)
    deployment.abort()
    deployment.send(25 * slices)
    series.run()
    keys = deployment.shuffled(seed=slices)
    assert len(keys) >= slices
    assert set(deployment.keys_in_dagster()) == set(keys)
    return keys


def finished(series: Series, keys: Sequence[str], **see: Any) -> None:
    """Let a fresh process take all slices in another order, some again; then hold the tables against the topic."""
    ordered = sorted(keys)
    series.run([ordered[-1]], ordered, [ordered[len(ordered) // 2]])
    series.deployment.check_whole(**see)
    ensure_nothing_committed_to_kafka(series.deployment)


def ensure_nothing_committed_to_kafka(deployment: Deployment) -> None:
    """No consumer of the dead or of the living left an offset (I12); nobody mirrors progress here."""
    from highwater.resources.kafka import Kafka
    from tests.helpers.support import read_committed_offsets

    assert deployment.slice_commits("raw"), "slices were read"
    assert read_committed_offsets(Kafka(deployment.bootstrap), deployment.stream.topic) == {}


@series_of("points", ("plan", "key"), ("plan", "key") * 5)
def test_killed_between_plan_and_key_and_between_key_and_run(
    series: Series, monkeypatch: pytest.MonkeyPatch, points: Sequence[str]
) -> None:
    deployment = series.deployment
    for point in points:
        deployment.send(60)
        before, known = deployment.slices(), deployment.keys_in_dagster()
        keys = series.killed(point=point)["keys"]
        assert [*deployment.slices()] == [*before, *[key for key in keys if key not in before]], "not planned"
        assert deployment.keys_in_dagster() == (known if point == "plan" else [*known, *keys])
    series.run()
    assert deployment.keys_in_dagster() == [*deployment.slices()]
    assert len(deployment.slices()) == len(points)
    requested = repaired(deployment, monkeypatch)
    assert sorted(key for keys in requested for key in keys) == sorted(deployment.slices())
    series.run(*requested)
    deployment.check_whole()


def repaired(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the sensor of repair requests, without its grace for slices that the planner may still request."""
    from highwater.orchestration.resources import KafkaResource, LakeResource, LedgerResource
    from highwater.orchestration.sensing import repairing

    monkeypatch.setattr(repairing, "RULES", replace(repairing.RULES, grace=timedelta()))
    for name in (settings.HOME, settings.KAFKA_BOOTSTRAP):
        monkeypatch.setenv(name, deployment.environment[name])
    connections = SimpleNamespace(ledger=LedgerResource(), lake=LakeResource(), kafka=KafkaResource())
    with deployment.instance() as instance:
        tick = repairing.repair(instance, connections, deployment.stream, None)
    return [request.keys for request in tick.requests]


# One slice, killed at each step that it comes to.
STEPS = ("raw:read", "raw:files", "events:logged", "rejects:logged", "current:files")
SERVER_STEPS = (STEPS[0], "raw:logged", *STEPS[1:])

# Each slice is killed again and again on its way: 5 times in its read, 5 times with data files written and no entry in
# the log, 5 times with the entry and no event in Dagster.
CHAINS = (
    ("raw:read", "raw:files", "raw:logged", "events:files"),
    ("raw:read", "events:logged", "rejects:files"),
    ("raw:read", "rejects:logged", "current:files"),
    ("raw:read", "current:logged"),
    ("raw:read", "raw:files", "events:logged"),
)


@pytest.mark.long
def test_only_the_connect_client_is_killed(series: Series) -> None:
    keys = planned(series, len(CHAINS))
    kill_clients(series, keys, CHAINS)
    finished(series, keys)


def kill_clients(series: Series, keys: Sequence[str], chains: Sequence[Sequence[str]]) -> None:
    """Kill a client at each point of a slice's chain; the server goes on with what the dead client asked for."""
    for key, chain in zip(keys, chains, strict=False):
        for point in chain:
            found = series.killed([key], point=point, victim="client", tables=up_to(series.deployment, key, point))
            ensure_reached(series.deployment, key, point, found)
            # What it began must not be the first to commit: the next one would take that over, short of its point.
            series.quiet()


def up_to(deployment: Deployment, key: str, point: str) -> tuple[str, ...]:
    """The tables that a run must make to come to a point."""
    table = point.partition(":")[0]
    return *(above for above in ABOVE[table] if key not in deployment.materialised(above)), table


ABOVE = {"raw": (), "events": ("raw",), "rejects": ("raw", "events"), "current": ("raw", "events")}


def ensure_reached(
    deployment: Deployment, key: str, point: str, evidence: dict[str, Any], *, client_lives: bool = False
) -> None:
    """The kill came where it was meant to: the tables above are committed, this one as the point says.

    A client that lives on finds a commit that was logged without the dead server, and reports it at any moment: on a
    busy machine it was quicker than this look.
    """
    table, _, at = point.partition(":")
    for above in ABOVE[table]:
        assert key in deployment.slice_commits(above)
        assert key in deployment.materialised(above)
    assert (client_lives and at == "logged") or key not in deployment.materialised(table)
    if at == "read":
        assert evidence["reading"], "tasks of Spark that stood in its reader of Kafka"
        assert evidence["files"] == [], "nothing was written yet"
        assert key not in deployment.slice_commits(table)
    elif at in {"files", "orphan"}:
        assert evidence["files"]
    else:
        assert key in deployment.slice_commits(table)


@pytest.mark.long
def test_the_driver_in_the_worker_is_killed(local: Series) -> None:
    """Each child starts a Spark of its own, which takes minutes: `test_s3` kills one in `make test`."""
    keys = planned(local, 2)
    for point in STEPS:
        found = local.killed([keys[0]], point=point, victim="group", tables=up_to(local.deployment, keys[0], point))
        ensure_reached(local.deployment, keys[0], point, found)
        ensure_nothing_committed(local.deployment, keys[0], point)
    finished(local, keys)


def ensure_nothing_committed(deployment: Deployment, key: str, point: str) -> None:
    table, _, at = point.partition(":")
    assert at != "files" or key not in deployment.slice_commits(table)


@pytest.mark.long
def test_only_the_connect_server_is_killed(series: Series) -> None:
    keys = planned(series, sum(point.startswith("raw:") for point in SERVER_STEPS))
    kill_server(series, keys, SERVER_STEPS)
    finished(series, keys)


def test_connect_clients_and_the_server_are_killed_in_turn(series: Series) -> None:
    """The short series, on one deployment."""
    keys = planned(series, 2)
    kill_clients(series, keys[:1], [("raw:read", "events:logged", "current:files")])
    # While a merge of a dead client is open, Spark does the next one.
    series.run(keys[:1])
    kill_server(series, keys[1:], ["raw:logged"])
    kill_clients(series, keys[1:], [("events:orphan", "current:logged")])
    log = Path(series.deployment.lake.build_table_path("orders", "current")) / "_delta_log"
    engines = [entry for entry in log.glob("*.json") if '"engineInfo":"delta-rs' in entry.read_text()]
    assert len(engines) > 1, "beside the first entry, the MERGE of the client that was killed"
    finished(series, keys)


def kill_server(series: Series, keys: Sequence[str], points: Sequence[str]) -> None:
    """Kill the server at each point; its clients fail or try again, on one that starts again on the same port."""
    assert series.server is not None
    # The surviving client does not commit a table again: a slice for each point of raw.
    for number, point in enumerate(points):
        key = keys[sum(one.startswith("raw:") for one in points[: number + 1]) - 1]
        tables = up_to(series.deployment, key, point)
        child = series.start([key], point=point, victim="server", tables=tables)
        wait_until((series.children[child][1] / "evidence").exists, LONGEST, f"{point} of {key}")
        series.server.kill()
        ensure_reached(series.deployment, key, point, series.evidence(child), client_lives=True)
        ensure_nothing_committed(series.deployment, key, point)
        series.server.start()
        assert series.end(child) == 0, series.said(child)
        if point == "raw:logged":
            assert series.deployment.slice_commits("raw")[key]["attempt"] == 1, (
                "the commit whose answer was lost was repeated"
            )


@pytest.mark.long
def test_a_retry_runs_while_the_server_commits_for_a_dead_client(series: Series) -> None:
    """Whichever is first: one split, although the reference table changed between the two."""
    from tests.helpers.support import customers

    overlapped = ("events", "rejects", "current")
    keys = planned(series, len(overlapped))
    for key, table in zip(keys, overlapped, strict=False):
        customers(series.deployment.lake, ["c1"])
        found = series.killed([key], point=f"{table}:overlap", victim="client")
        assert found["running"]
        assert found["log"] == found["log_then"]
        customers(series.deployment.lake, ["c1", "c2"])
        series.run([key])
        series.quiet()
    customers(series.deployment.lake, ["c1"])
    rest = [key for key in keys if key not in series.deployment.slice_commits("raw")]
    series.run(*[[key] for key in rest])
    series.deployment.check_whole(late=["c2"])


@series_of("late", ("events",), ("raw", "events", "current"))
def test_the_server_begins_a_commit_of_a_dead_client_after_the_retry(series: Series, late: Sequence[str]) -> None:
    """A query whose client was killed was seen to commit 12 s later, over the split of the retry."""
    from tests.helpers.support import customers

    keys = planned(series, len(late))
    for key, table in zip(keys, late, strict=False):
        customers(series.deployment.lake, ["c1"])
        number = series.start([key], point=f"{table}:late", victim="client")
        folder = series.children[number][1]
        wait_until((folder / "ready").exists, LONGEST, f"the commit of {table}")
        # Its worker counts as gone: else the retry would wait for its place in the pool.
        series.deployment.end_dead_runs()
        customers(series.deployment.lake, ["c1", "c2"])
        series.run([key])
        before = attempts(series.deployment, key)
        (folder / "go").touch()
        assert series.end(number) == SIGKILLED, series.said(number)
        series.deployment.end_dead_runs()
        assert series.evidence(number)["running"]
        series.quiet()
        assert attempts(series.deployment, key) == before
    customers(series.deployment.lake, ["c1"])
    rest = [key for key in keys if key not in series.deployment.slice_commits("raw")]
    series.run(*[[key] for key in rest])
    series.deployment.check_whole(late=["c2"])


def attempts(deployment: Deployment, key: str) -> list[int]:
    return [deployment.slice_commits(table)[key]["attempt"] for table in TABLES]


@pytest.mark.long
def test_two_runs_of_a_slice_at_once(series: Series) -> None:
    """Two processes begin each slice together; one commits, the other takes its split over."""
    keys = planned(series, 2)
    folder = series.deployment.home / "peers"
    folder.mkdir()
    batches = [[key] for key in keys]
    numbers = [series.start(*batches, peers=(folder, 2)) for _ in range(2)]
    assert [series.end(number) for number in numbers] == [0, 0], [series.said(number) for number in numbers]
    series.deployment.check_whole()
