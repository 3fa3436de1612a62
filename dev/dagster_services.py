"""Dagster's processes on this machine: the instance's first touch, the code server, the webserver, the daemon."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.paths import REPOSITORY
from dev.processes import LOOPBACK, Child, ChildFailedError, accepts, free_port
from highwater.settings import read_log_format

# Seen: 7 s on a quiet machine of 2 cores, 40 s on one that runs several JVMs.
START_SECONDS = 180.0
UI_PORT = 3000
WORKSPACE = REPOSITORY / "workspace.yaml"
LOCATION = "highwater"
# The module that the code server loads in `make up` and in the documented deployment.
DEFINITIONS = "orchestration.definitions"
# A process that ends sooner after its start would end again and again: that is an error, not a reason for a restart.
SHORTEST_LIFE_SECONDS = 30.0

_WORKSPACE = """{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {
  __typename ... on PythonError { message errorChain { error { message } } } } } } } }"""
_DAEMONS = "{ instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }"


def prepare_home(dagster_home: Path, *, ours: bool) -> None:
    """Have the instance's settings in its folder.

    Args:
        dagster_home: the folder.
        ours: whether the folder is the stack's own; then its settings follow the repository's, else they are kept.
    """
    dagster_home.mkdir(parents=True, exist_ok=True)
    settings = dagster_home / "dagster.yaml"
    if ours or not settings.exists():
        shutil.copyfile(REPOSITORY / "dagster.yaml", settings)


class DagsterServices:
    """Code server, webserver and daemon of one instance.

    Args:
        home: the log files lie below it.
        environment: the variables of all, `DAGSTER_HOME` among them.
        workspace: the definitions that webserver and daemon load by themselves, where `module` is None. The daemon then
            starts a new code server every minute, which takes a core for ten seconds.
        ui_port: taken for the page when it is free.
        module: the definitions that one code server loads, for webserver and daemon.
        daemon: program and arguments of the daemon; Dagster's own if left out.
    """

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str],
        *,
        workspace: Path = WORKSPACE,
        ui_port: int = UI_PORT,
        module: str | None = None,
        daemon: Sequence[str | Path] | None = None,
    ) -> None:
        self._home = home
        self._environment = environment
        self.port = free_port(prefer=ui_port)
        programs = Path(sys.executable).parent
        self.code = None
        if module is not None:
            self._code_port = free_port()
            self.code = self._child("dagster-code", self._serve(module))
            workspace = home / "workspace.yaml"
        load = ["-w", str(workspace), *self._log_options]
        self.touch = self._child("dagster-instance", [programs / "dagster", "instance", "info"])
        self.webserver = self._child(
            "dagster-webserver", [programs / "dagster-webserver", "-h", LOOPBACK, "-p", str(self.port), *load]
        )
        self.daemon = self._child("dagster-daemon", [*(daemon or [programs / "dagster-daemon"]), "run", *load])
        self._launched: dict[str, float] = {}

    @property
    def _log_options(self) -> list[str]:
        """For the lines of Dagster's own; those of runs and ticks follow the variable by themselves."""
        return ["--log-format", "json"] if read_log_format(self._environment) == "json" else []

    def _serve(self, module: str) -> list[str | Path]:
        # Not `dagster code-server start`: it does not restart the process that it starts for the definitions.
        at = ["--host", LOOPBACK, "--port", str(self._code_port)]
        load = ["--module-name", module, "--location-name", LOCATION]
        return [Path(sys.executable).parent / "highwater", "serve-code", *at, *load]

    def launch_code(self) -> None:
        """Start the process that serves the definitions, without waiting for it; nothing where there is none.

        Raises:
            ChildFailedError: the instance cannot be used.
        """
        if self.code is None:
            return
        self.wait_touched()
        (self._home / "workspace.yaml").write_text(
            f"load_from:\n  - grpc_server: {{host: {LOOPBACK}, port: {self._code_port}, location_name: {LOCATION}}}\n"
        )
        self._launch(self.code)

    def launch(self) -> None:
        """Start webserver and daemon without waiting for them, when what they need is there.

        Raises:
            ChildFailedError: the instance cannot be used, or the definitions are not served.
        """
        self.wait_touched()
        if self.code is not None:
            self.code.wait_healthy(lambda: accepts(self._code_port), START_SECONDS)
        self._launch(self.webserver)
        self._launch(self.daemon)

    def _launch(self, child: Child) -> None:
        child.start()
        self._launched[child.name] = time.monotonic()

    def restart_ended(self) -> list[str]:
        """Restart each launched process that ended; returns a sentence for each.

        A code server leaves the workers of its runs behind. They are killed with it, since nobody could cancel them:
        the sensor `repair` requests their slices again.

        Raises:
            ChildFailedError: a process ended within seconds of its start.
        """
        lines = []
        for child in (self.code, self.webserver, self.daemon):
            if child is None or child.name not in self._launched or child.alive:
                continue
            ended = f"{child.name} ended with exit status {child.exit_status}"
            if time.monotonic() - self._launched[child.name] < SHORTEST_LIFE_SECONDS:
                raise ChildFailedError(
                    f"{ended}, within {SHORTEST_LIFE_SECONDS:.0f} s of its start",
                    found=f"the end of its log:\n{child.tail()}\n",
                    remedy=f"read {child.log}",
                )
            child.kill()
            self._launch(child)
            lines.append(f"{ended}, and was started again; its log is {child.log}")
        return lines

    def _child(self, name: str, command: list[str | Path]) -> Child:
        # The workspace's working_directory is relative to the current folder.
        return Child(name, command, logs=self._home / "logs", environment=self._environment, cwd=REPOSITORY)

    @property
    def url(self) -> str:
        """The page of Dagster."""
        return f"http://{LOOPBACK}:{self.port}"

    def wait_touched(self) -> None:
        """Wait until the instance was touched once: webserver and daemon that first use it side by side broke it.

        Raises:
            ChildFailedError: the instance cannot be used.
        """
        status = self.touch.wait(START_SECONDS)
        if status != 0:
            raise ChildFailedError(
                "Dagster's instance cannot be used", found=self.touch.tail(), remedy=f"read {self.touch.log}"
            )

    def wait_ready(self) -> None:
        """Wait until the page serves our definitions and the daemon is well.

        Raises:
            ChildFailedError: a process ended, was not ready in time, or the definitions do not load.
        """
        self.webserver.wait_healthy(self._serves, START_SECONDS)
        self.require_loaded()
        self.daemon.wait_healthy(self._daemons_well, START_SECONDS)

    def require_loaded(self) -> None:
        """Raise ChildFailedError with Dagster's words if a code location did not load."""
        for entry in self.ask(_WORKSPACE)["workspaceOrError"]["locationEntries"]:
            loaded = entry["locationOrLoadError"]
            if loaded["__typename"] == "PythonError":
                raise ChildFailedError(
                    f"the code location {entry['name']!r} does not load",
                    found="".join(message.strip() + "\n" for message in _messages(loaded)),
                    remedy="fix the module; `dagster definitions validate -w workspace.yaml` shows the same",
                )

    def ask(self, query: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask the webserver by GraphQL; returns `data`.

        Raises:
            OSError: it does not answer.
        """
        body = json.dumps({"query": query, "variables": dict(variables or {})}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def _serves(self) -> bool:
        try:
            entries = self.ask(_WORKSPACE)["workspaceOrError"]["locationEntries"]
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return all(entry["locationOrLoadError"] is not None for entry in entries)

    def _daemons_well(self) -> bool:
        try:
            statuses = self.ask(_DAEMONS)["instance"]["daemonHealth"]["allDaemonStatuses"]
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return all(status["healthy"] for status in statuses if status["required"])

    def stop(self) -> None:
        """End all, the daemon first so that it starts nothing new, and the others side by side."""
        self._launched.clear()
        self.daemon.stop()
        others = [child for child in (self.webserver, self.code, self.touch) if child is not None]
        for child in others:
            child.ask_to_end()
        for child in others:
            child.stop()


def _messages(error: Mapping[str, Any]) -> list[str]:
    """An error's message and those of its causes: the first one says only that something did not load."""
    return [error["message"], *(link["error"]["message"] for link in error["errorChain"])]
