"""A process that takes slices through the real job, and kills itself or its Spark at a point that a test names.

The points are provoked here, by patches and by threads that watch the lake and Spark; the code under test knows nothing
of them. What was so at the moment of the kill is written to a file first: without that evidence a kill proves nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

# Loaded once by the process that all children are forked from.
import dagster as dg
import deltalake  # noqa: F401 - see above
import pandas as pd  # noqa: F401 - see above
import pyspark.sql.connect.session  # noqa: F401 - see above

from highwater.assets import commit, current, raw, small_merge, small_writes
from highwater.orchestration import failures
from highwater.orchestration.build import build_defs
from highwater.orchestration.resources import KafkaResource, LakeResource, LedgerResource
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.orchestration.sensing import stream_ticks
from highwater.resources import spark
from highwater.resources.kafka import Kafka
from highwater.resources.ledger.leases import Lease
from tests.helpers.crash_support import build_stream
from tests.helpers.support import PAGE_SECONDS

if TYPE_CHECKING:
    import pyarrow as pa

POLL = 0.005
# A child that never reaches its point must not hold a test for ever.
LONGEST = 480
# The class that a task is in while it reads from Kafka.
READER = "org.apache.spark.sql.kafka010"
FAILED = 3
MISSED = 4

Send = Callable[[], int]


@dataclass(frozen=True)
class Task:
    """What a child does.

    Args:
        environment: all of its variables.
        topic: the stream's topic.
        folder: evidence, signals and the log file of this child lie in it.
        batches: ranges of neighbouring slices, one run each; none for a tick of planning.
        point: where it kills: `plan`, `key`, or `<table>:read|files|logged|overlap|late`.
        victim: `client` (this process), `group` (this process and its JVM) or `server`.
        server: process group of the Connect server.
        ui: address of Spark's page, for its running jobs.
        peers: folder in which children meet before each run, with the number of them.
        tables: the tables that the runs make; all of them if empty.
        lease: how long a killed driver keeps others from a table, in seconds.
    """

    environment: dict[str, str]
    topic: str
    folder: Path
    batches: tuple[tuple[str, ...], ...] = ()
    point: str | None = None
    victim: str = "client"
    server: int | None = None
    ui: str | None = None
    peers: tuple[Path, int] | None = None
    tables: tuple[str, ...] = ()
    lease: int = 5


def main(task: Task) -> None:
    """The process."""
    os.setsid()
    task.folder.mkdir(parents=True, exist_ok=True)
    with (task.folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(task.environment)
    commit.LEASE_SECONDS = task.lease
    # As long as ours in all, with shorter waits: a server is back within seconds here.
    spark.RETRIES, spark.LONGEST_BACKOFF_MS = 40, 1_000
    failures.FIRST_WAIT = 1.0
    (task.folder / "started").touch()
    with dg.DagsterInstance.get() as instance:
        status = _run(task, instance) if task.batches else _tick(task, instance)
    sys.stdout.flush()
    # Not sys.exit: threads of Spark's client may hold the end.
    os._exit(status)


def _tick(task: Task, instance: dg.DagsterInstance) -> int:
    add = instance.add_dynamic_partitions

    def adding(name: str, keys: Sequence[str]) -> None:
        if task.point == "plan":
            _die(task, keys=keys)
        add(name, keys)
        if task.point == "key":
            _die(task, keys=keys)

    instance.add_dynamic_partitions = adding  # type: ignore[method-assign, assignment]
    connections = SimpleNamespace(ledger=LedgerResource(), kafka=KafkaResource(), lake=LakeResource())
    stream = build_stream(task.topic)
    tick = stream_ticks.plan_stream(instance, connections, stream)
    if tick.keys:
        instance.add_dynamic_partitions(stream.partitions_name, [*tick.keys])
    return 0


def _run(task: Task, instance: dg.DagsterInstance) -> int:
    job = build_defs(streams=[build_stream(task.topic)]).resolve_job_def("orders_slice")
    if task.point:
        _arm(task)
    done = []
    for number, keys in enumerate(task.batches):
        _meet(task, number)
        tags = {RANGE_START: keys[0], RANGE_END: keys[-1]}
        chosen = [dg.AssetKey(["orders", table]) for table in task.tables] or None
        run = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False, asset_selection=chosen)
        done.append(run.success)
    if task.point and task.victim != "server":
        return MISSED
    return 0 if all(done) else FAILED


def _meet(task: Task, number: int) -> None:
    """Begin a run when all children are ready for it."""
    if task.peers is None:
        return
    folder, count = task.peers
    (folder / f"{number}.{os.getpid()}").touch()
    _wait(lambda: len([*folder.glob(f"{number}.*")]) >= count)


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(POLL)


def _die(task: Task, **evidence: object) -> None:
    """Write what is so now, then kill; returns only when the victim is another process."""
    text = json.dumps({"point": task.point, "victim": task.victim, **evidence})
    partial = task.folder / "evidence.partial"
    partial.write_text(text)
    partial.rename(task.folder / "evidence")
    if task.victim == "server":
        assert task.server is not None
        os.killpg(task.server, signal.SIGKILL)
    elif task.victim == "group":
        os.killpg(0, signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _arm(task: Task) -> None:
    table, _, point = str(task.point).partition(":")
    if point == "orphan":
        vars(small_writes)["append_rows"] = lambda opened, rows, _: _leave_orphan(task, Path(opened.table_uri), rows)
        return
    if point != "logged" or task.victim != "client":
        # The other points are in the middle of Spark's work. What follows a kill is written as usual.
        small_merge.find_winners = lambda *_, **__: None
        small_writes.append = lambda *_: False
    if point == "read":
        _slow_fetches(seconds=3)
        _patch_commit(table, lambda path, send: _read_watched(task, path, send))
    elif point == "files":
        _patch_commit(table, lambda path, send: _while_watched(_list_files_without_log(task, path), send))
    elif point == "logged" and task.victim == "server":
        _patch_commit(table, lambda path, send: _while_watched(_log_without_answer(task, path), send))
    elif point == "logged":
        _patch_commit(table, lambda path, send: _after_answer(task, path, send))
    else:
        if point == "late":
            _lose_leases()
            _patch_commit(table, lambda path, send: _sent_late(task, path, send))
            return
        # On a busy machine Spark's page took seconds to report the job.
        (_slow_winners if table == "current" else partial(_slow_rows, table))(seconds=15)
        _patch_commit(table, lambda path, send: _outlived(task, path, send))


def _read_watched(task: Task, table: Path, send: Send) -> int:
    """A busy page answers its first question late, so it is asked while nothing is read yet."""
    assert _list_reading_tasks(task) == []
    return _while_watched(_while_reading(task, table), send)


def _slow_fetches(seconds: int) -> None:
    """Let the broker hold each fetch of Spark's consumers for so long: a hundred records are read between two looks."""
    raw.LONGEST_FETCH_MS = str(seconds * 1000)
    options = Kafka.build_spark_options
    never_there = {"kafka.fetch.min.bytes": str(50 * 2**20)}
    Kafka.build_spark_options = lambda self: {**options(self), **never_there}  # type: ignore[method-assign]


def _while_reading(task: Task, table: Path) -> Iterator[None]:
    before = list_data_files(table)
    yield
    found: list[str] = []

    def reads() -> bool:
        found[:] = _list_reading_tasks(task)
        return bool(found)

    _wait(reads)
    _hold(task)
    _die(task, reading=found, files=sorted(file.name for file in list_data_files(table) - before))


def _list_reading_tasks(task: Task) -> list[str]:
    """Spark's tasks that are in its reader of Kafka now, by the names of their threads."""
    ui = str(task.ui)
    if task.victim == "group":
        from pyspark import SparkContext

        ui = str(SparkContext._active_spark_context.uiWebUrl)
    threads = f"{ui}/api/v1/applications/{_fetch_application(ui)}/executors/driver/threads"
    with urllib.request.urlopen(threads, timeout=PAGE_SECONDS) as answer:
        found = json.load(answer)
    return [
        thread["threadName"]
        for thread in found
        if "task launch worker for task" in thread["threadName"] and READER in json.dumps(thread["stackTrace"])
    ]


def list_running_jobs(ui: str) -> int:
    """Jobs that a Connect server runs now, by its REST interface."""
    return len(_list_running_jobs(ui))


def _list_running_jobs(ui: str) -> set[int]:
    jobs = f"{ui}/api/v1/applications/{_fetch_application(ui)}/jobs?status=running"
    with urllib.request.urlopen(jobs, timeout=PAGE_SECONDS) as answer:
        return {job["jobId"] for job in json.load(answer)}


def _fetch_application(ui: str) -> str:
    """Asked each time: a server that was killed comes back at its address as another application."""
    with urllib.request.urlopen(f"{ui}/api/v1/applications", timeout=PAGE_SECONDS) as answer:
        return str(json.load(answer)[0]["id"])


def _list_lasting_jobs(ui: str) -> set[int]:
    """The jobs that ran a second ago and run still."""
    before = _list_running_jobs(ui)
    time.sleep(1)
    return before & _list_running_jobs(ui)


def _patch_commit(table: str, around: Callable[[Path, Send], int]) -> None:
    """Put something around the first commit of a table."""
    once: list[str] = []
    for module in (commit, current):
        real = vars(module)["commit_slices"]

        def patched(target: Any, *given: Any, _real: Any = real, **named: Any) -> int:
            *before, write = given

            def watched(options: Any) -> object:
                def send() -> int:
                    write(options)
                    return 0

                if once or target.table != table:
                    return send()
                once.append(target.path)
                return around(Path(target.path), send)

            version: int = _real(target, *before, watched, **named)
            return version

        vars(module)["commit_slices"] = patched


def _while_watched(watch: Iterator[None], send: Send) -> int:
    """Commit while a watcher waits, which has seen by its first step what was there before."""
    next(watch, None)
    threading.Thread(target=lambda: next(watch, None), daemon=True).start()
    return send()


def log_of(table: Path) -> list[str]:
    """The entries of a table's log."""
    return sorted(file.name for file in (table / "_delta_log").glob("*.json"))


def list_data_files(table: Path) -> set[Path]:
    """The data files of a table, begun or written."""
    return {*table.glob("*.parquet")}


def list_whole_files(table: Path) -> set[Path]:
    """The data files of a table that are written to their end: Parquet ends as it begins."""
    return {file for file in list_data_files(table) if _ends_well(file)}


def _ends_well(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(0, os.SEEK_END)
        if opened.tell() < 12:
            return False
        opened.seek(-4, os.SEEK_END)
        return opened.read() == b"PAR1"


def _list_files_without_log(task: Task, table: Path) -> Iterator[None]:
    log, files = log_of(table), list_whole_files(table)
    yield
    _wait(lambda: list_whole_files(table) - files)
    _hold(task)
    new = sorted(file.name for file in list_whole_files(table) - files)
    if log_of(table) == log:
        _die(task, log=log, files=new)


def _hold(task: Task) -> None:
    """Stop the JVM, so that what is looked at next stays so until the kill; one that only loses its client goes on."""
    if task.victim == "server":
        assert task.server is not None
        os.killpg(task.server, signal.SIGSTOP)
    elif task.victim == "group":
        from pyspark import SparkContext

        os.kill(SparkContext._gateway.proc.pid, signal.SIGSTOP)
    if task.victim != "client":
        time.sleep(0.1)


def _log_without_answer(task: Task, table: Path) -> Iterator[None]:
    log = log_of(table)
    yield
    _wait(lambda: log_of(table) != log)
    _die(task, log=log_of(table))


def _leave_orphan(task: Task, table: Path, rows: pa.Table) -> bool:
    """Die as delta-rs does between the file and its entry in the log: milliseconds, in one call."""
    import pyarrow.parquet as pq

    pq.write_table(rows, table / "part-00000-orphan.parquet")
    _die(task, log=log_of(table), files=["part-00000-orphan.parquet"])
    return False


def _after_answer(task: Task, table: Path, send: Send) -> int:
    version = send()
    _die(task, log=log_of(table), version=version)
    return version


def _slow_rows(table: str, *, seconds: int) -> None:
    """Let the table's commits take some seconds on the server, in a job."""
    real = vars(commit)["write_slices"]

    def slow(path: str, rows: Any, *given: Any, **named: Any) -> None:
        if Path(path).name == table:
            sleep = f"java_method('java.lang.Thread', 'sleep', {seconds * 1000}L) IS NOT NULL OR id >= 0"
            rows = rows.crossJoin(rows.sparkSession.range(1).where(sleep).drop("id"))
        real(path, rows, *given, **named)

    vars(commit)["write_slices"] = slow


def _slow_winners(*, seconds: int) -> None:
    """Let a MERGE into `current` take some seconds on the server, in a job that reads its source."""
    real = current.select_winners

    def slow(rows: Any, *by: str) -> Any:
        sleep = f"java_method('java.lang.Thread', 'sleep', {seconds * 1000}L) IS NOT NULL OR id >= 0"
        return real(rows, *by).crossJoin(rows.sparkSession.range(1).where(sleep).drop("id"))

    vars(current)["select_winners"] = slow


def _lose_leases() -> None:
    """Let no lease be renewed, as if this process hung: another run takes it when its term is over."""
    Lease.renew = lambda self: False  # type: ignore[method-assign]


def _sent_late(task: Task, table: Path, send: Send) -> int:
    """Begin a commit only when the test says so, and be killed once the server has answered."""
    (task.folder / "ready").touch()
    _wait((task.folder / "go").exists)
    log = log_of(table)
    version = send()
    _die(task, log=log, log_then=log_of(table), running=1)
    return version


def _outlived(task: Task, table: Path, send: Send) -> int:
    """Be killed while the server goes on with our commit."""
    log = log_of(table)

    def kill() -> None:
        # One job for a second: the one that sleeps, not one of the short ones before it. The look that found it is the
        # evidence: on a busy machine a short one was over at the next.
        while not (lasting := _list_lasting_jobs(str(task.ui))):
            time.sleep(POLL)
        _die(task, log=log, log_then=log_of(table), running=len(lasting))

    threading.Thread(target=kill, daemon=True).start()
    return send()
