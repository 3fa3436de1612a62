"""A real Spark cluster on one machine: a standalone master and workers, each a process of its own."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from pathlib import Path

from dev import jars
from dev.processes import LOOPBACK, Child, free_port
from dev.server import Service
from dev.spark_connect import START_SECONDS
from dev.spark_local import SMALL_QUERIES, environment, local_conf, spark_home, write_conf_dir

_PACKAGE = "org.apache.spark.deploy"


class SparkStandalone(Service):
    """A master and its workers, as a context.

    Args:
        home: holds their scratch files, settings and log files.
        workers: how many.
        worker_memory_mb: what each may give to executors, in MiB.
    """

    def __init__(self, home: Path, *, workers: int = 2, worker_memory_mb: int = 1024) -> None:
        self.home = home
        self.workers = workers
        self.worker_memory_mb = worker_memory_mb
        self.port, self._page = free_port(), free_port()
        self._children: list[Child] = []

    @property
    def master(self) -> str:
        """The value for `HIGHWATER_SPARK_MASTER`."""
        return f"spark://{LOOPBACK}:{self.port}"

    @property
    def page(self) -> str:
        """The master's page; `/json/` below it shows workers and applications."""
        return f"http://{LOOPBACK}:{self._page}"

    def driver_conf(self) -> dict[str, str]:
        """Settings of a driver on this cluster: executors on every worker, within what the workers have."""
        return {
            **local_conf(self.home, driver_memory_mb=1024),
            **SMALL_QUERIES,
            "spark.executor.extraJavaOptions": SMALL_QUERIES["spark.driver.extraJavaOptions"],
            "spark.executor.memory": f"{self.worker_memory_mb}m",
            "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
        }

    def driver_environment(self) -> dict[str, str]:
        """The variables of a process that starts a driver on this cluster."""
        return environment(write_conf_dir(self.home, "standalone-driver", self.driver_conf()))

    def start(self) -> None:
        """Start master and workers and wait until all workers are registered.

        Raises:
            ChildFailedError: one ended, or was not there in time.
        """
        jars.ensure("spark")
        at = ["--host", LOOPBACK]
        self._launch("spark-master", "master.Master", [*at, "--port", self.port, "--webui-port", self._page])
        self._children[0].wait_healthy(lambda: self._workers_alive() is not None, START_SECONDS)
        for _ in range(self.workers):
            self._launch_worker()
        self._children[-1].wait_healthy(lambda: self._workers_alive() == self.workers, START_SECONDS)

    def add_worker(self) -> None:
        """Start one more worker and wait until it is registered.

        Raises:
            ChildFailedError: it ended, or was not there in time.
        """
        self.workers += 1
        self._launch_worker()
        self._children[-1].wait_healthy(lambda: self._workers_alive() == self.workers, START_SECONDS)

    def _launch_worker(self) -> None:
        number = len(self._children)
        limits = ["--cores", "1", "--memory", f"{self.worker_memory_mb}m", "--webui-port", free_port()]
        work = ["--work-dir", self.home / "spark" / f"worker-{number}"]
        self._launch(f"spark-worker-{number}", "worker.Worker", ["--host", LOOPBACK, *limits, *work, self.master])

    def _launch(self, name: str, main: str, arguments: list[object]) -> None:
        conf_dir = write_conf_dir(self.home, "standalone", {"spark.local.dir": str(self.home / "spark" / "scratch")})
        command: list[str | Path] = [spark_home() / "bin" / "spark-class", f"{_PACKAGE}.{main}", *map(str, arguments)]
        variables = {**environment(conf_dir), "SPARK_DAEMON_MEMORY": "384m"}
        child = Child(name, command, logs=self.home / "logs", environment=variables, cwd=conf_dir.parent)
        self._children.append(child)
        child.start()

    def _workers_alive(self) -> int | None:
        """Workers that the master counts as alive; None while it does not answer."""
        with suppress(OSError, ValueError), urllib.request.urlopen(f"{self.page}/json/", timeout=2) as page:
            return int(json.load(page)["aliveworkers"])
        return None

    def stop(self) -> None:
        """Kill all: nothing of them is used again."""
        self.kill()

    def kill(self) -> None:
        """SIGKILL to each."""
        for child in reversed(self._children):
            child.kill()
