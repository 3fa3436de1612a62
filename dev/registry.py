"""The embedded schema registry: Apicurio with Confluent's API on the loopback address."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

from dev import jars
from dev.java import find_java
from dev.processes import LOOPBACK, Child, accepts, free_port
from dev.server import Server

# Seen once it answers: 217 MB with a heap of 256 MB, 167 MB with one of 96 MB, and 5 s of processor time with both.
HEAP_MB = 128
# Seen: 5 s to 6 s on a quiet machine of 2 cores. The broker was seen to need four times its 4 s beside several JVMs;
# four times 6 s are 24 s, and the rest is reserve.
START_SECONDS = 90.0
ANSWER_SECONDS = 2.0


class EmbeddedRegistry(Server):
    """One schema registry. Use it as a context, or call `start` and `stop`. It forgets its schemas when it ends.

    Args:
        home: holds its log file.
        port: a free one if left out.
        heap_mb: the JVM's heap in MiB.
    """

    def __init__(self, home: Path, *, port: int | None = None, heap_mb: int = HEAP_MB) -> None:
        self.port = port or free_port()
        self.home = home / "registry"
        self._heap_mb = heap_mb
        super().__init__(home / "logs" / "registry.log", [self.port], START_SECONDS)

    @property
    def url(self) -> str:
        """The address for `HIGHWATER_SCHEMA_REGISTRY_URL`."""
        return f"http://{LOOPBACK}:{self.port}/apis/ccompat/v7"

    def _make_child(self) -> Child:
        (program,) = jars.ensure("registry").glob("*/*-runner.jar")
        self.home.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [
            find_java(os.environ).executable,
            f"-Xmx{self._heap_mb}m",
            # For the same reasons as the broker's: a small JVM beside others, which lives for minutes.
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-jar",
            program,
        ]
        environment = {**os.environ, "QUARKUS_HTTP_HOST": LOOPBACK, "QUARKUS_HTTP_PORT": str(self.port)}
        return Child(self.log.stem, command, logs=self.log.parent, environment=environment, cwd=self.home)

    def _answers(self) -> bool:
        if not accepts(self.port):
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=ANSWER_SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
