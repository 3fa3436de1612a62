"""One broker and one Spark server for all workers of a test run.

`python -m tests.helpers.services KIND HOME PORT PORT OWNER` runs one of them.

A warm JVM takes a slice with a fraction of the processor time that a new one needs, so workers share what each would
have to warm by itself. The first worker that asks starts the server in a process of its own, which ends it when the
run is over.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from dev.broker import EmbeddedBroker, Node
from dev.processes import free_port, wait_until
from dev.server import Server
from dev.spark_connect import SparkConnect
from dev.spark_local import SMALL_QUERIES

POLL_SECONDS = 0.5
START_SECONDS = 300.0
BROKER, SPARK = "broker", "spark"


def join_broker(home: Path) -> EmbeddedBroker:
    """The broker of this test run, started if nobody asked for it yet."""
    return _build_broker(home, *_join(BROKER, home))


def join_spark(home: Path) -> SparkConnect:
    """The Spark server of this test run, started if nobody asked for it yet."""
    return _build_spark(home, *_join(SPARK, home))


def _build_broker(home: Path, port: int, controller_port: int) -> EmbeddedBroker:
    # Nobody kills it, so nobody waits for its session to end: on a machine that hung for five seconds its own
    # controller took it for dead, and every partition was without a leader.
    return EmbeddedBroker(home, node=Node(1, port, controller_port), extra={"broker.session.timeout.ms": "600000"})


def _build_spark(home: Path, port: int, ui_port: int) -> SparkConnect:
    return SparkConnect(home, port=port, ui_port=ui_port, driver_memory_mb=4096, extra=SHARED)


# It lives for the whole run, so its code is worth compiling well: with the second compiler held back to what runs eight
# times as often, it took a third more processor time. One worker's slow task must not hold up the others.
SHARED = {
    **SMALL_QUERIES,
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.master": "local[8]",
    # Tests ask Spark's page what their queries read; by default it forgets them after a thousand of all workers.
    "spark.sql.ui.retainedExecutions": "3000",
}


def _join(kind: str, home: Path) -> tuple[int, int]:
    """The ports of a server that serves."""
    home.mkdir(parents=True, exist_ok=True)
    ready = home / f"{kind}.ready"
    with (home / f"{kind}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            ports = free_port(), free_port()
            with (home / f"{kind}.log").open("ab") as log:
                keeper = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.helpers.services",
                        kind,
                        str(home),
                        *map(str, ports),
                        str(_find_owner()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[2],
                    start_new_session=True,
                )
            wait_until(lambda: ready.exists() or keeper.poll() is not None, START_SECONDS, f"the {kind}")
            assert ready.exists(), f"the {kind} did not start: {(home / f'{kind}.log').read_text()[-2000:]}"
    first, second = ready.read_text().split()
    return int(first), int(second)


def _find_owner() -> int:
    """The process whose end is the end of the run: workers are children of the one that was started."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def main(kind: str, home: Path, ports: tuple[int, int], owner: int) -> None:
    """Serve until the owner is gone."""
    server: Server = _build_broker(home, *ports) if kind == BROKER else _build_spark(home, *ports)
    with server:
        made = home / f"{kind}.made"
        made.write_text(" ".join(map(str, ports)))
        made.rename(home / f"{kind}.ready")
        while _is_alive(owner):
            time.sleep(POLL_SECONDS)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])), int(sys.argv[5]))
