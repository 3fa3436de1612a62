"""The warm Spark: a Connect server, so that a process on it writes its first slice without starting a JVM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dev import class_archives, jars, paths
from dev.java import find_java
from dev.processes import LOOPBACK, Child, accepts, free_port
from dev.server import Server
from dev.spark_local import environment, local_conf, spark_home, write_conf_dir
from highwater.resources.local_spark import SERVER

# Seen: 8 s on a quiet machine of 2 cores, 30 s on one that runs several JVMs.
START_SECONDS = 180.0
_OPTIONS = "spark.driver.extraJavaOptions"


class SparkConnect(Server):
    """One Connect server. Use it as a context, or call `start` and `stop`.

    Args:
        home: holds its scratch files, settings and log file.
        port: where it listens; a free one if left out.
        ui_port: where its page and REST interface listen; a free one if left out.
        driver_memory_mb: the heap in MiB.
        extra: further settings of Spark.
        name: of the log file and the settings folder, for several below one home.
        java_options: beside those of the settings; those that use the archive of its classes if None.
    """

    def __init__(
        self,
        home: Path,
        *,
        port: int | None = None,
        ui_port: int | None = None,
        driver_memory_mb: int = 2048,
        extra: Mapping[str, str] | None = None,
        name: str = "spark-connect",
        java_options: Sequence[str] | None = None,
    ) -> None:
        self.home = home
        self.port = port or free_port()
        self.ui_port = ui_port or free_port()
        super().__init__(home / "logs" / f"{name}.log", [self.port, self.ui_port], START_SECONDS)
        self.name = name
        self._java_options = java_options
        self.conf = {
            **local_conf(home, driver_memory_mb=driver_memory_mb),
            "spark.master": "local[*]",
            "spark.app.name": "highwater",
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.ui.port": str(self.ui_port),
            # A taken port is an error to see, not a reason to listen elsewhere.
            "spark.port.maxRetries": "0",
            **(extra or {}),
        }

    @property
    def remote(self) -> str:
        """The value for `SPARK_REMOTE`."""
        return f"sc://{LOOPBACK}:{self.port}"

    @property
    def ui_url(self) -> str:
        """Spark's page; its REST interface is below `/api/v1`."""
        return f"http://{LOOPBACK}:{self.ui_port}"

    def _answers(self) -> bool:
        return accepts(self.port)

    def _make_child(self) -> Child:
        jars.ensure("spark")
        conf_dir = write_conf_dir(self.home, self.name, self.conf | {_OPTIONS: self._all_options()})
        # Spark puts its settings folder on the class path, and a JVM takes an archive only where that is as it was when
        # the archive was made, and where folders on it hold no files.
        empty = paths.TOOLS / "no-settings"
        empty.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [
            spark_home() / "bin" / "spark-submit",
            "--properties-file",
            conf_dir / "spark-defaults.conf",
            "--class",
            SERVER,
            "spark-internal",
        ]
        return Child(
            self.name,
            command,
            logs=self.log.parent,
            environment=environment(empty),
            cwd=conf_dir.parent,
        )

    def _all_options(self) -> str:
        logging = f"-Dlog4j2.configurationFile={self.home / 'spark' / self.name / 'log4j2.properties'}"
        ours = self._java_options
        if ours is None:
            ours = class_archives.options("spark", find_java(os.environ))
        return " ".join([self.conf.get(_OPTIONS, ""), *(f'"{option}"' for option in (logging, *ours))])
