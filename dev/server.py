"""A server that is one child process: started side by side with others, waited for, ended in good order, or killed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from dev.processes import Child, is_free, wait_until
from highwater.errors import HighwaterError

RELEASE_SECONDS = 30.0
STOP_SECONDS = 10.0


class Service(ABC):
    """Something that is started and stopped; as a context it is killed when it does not start."""

    @abstractmethod
    def start(self) -> None:
        """Start and wait until it answers.

        Raises:
            ChildFailedError: it ended, or did not answer in time.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it in good order."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL, as a crash would."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Server(Service):
    """A service of one process. It can be started again after it ended: on the same ports, with the same data.

    Args:
        log: the file that it logs to.
        ports: where it will listen.
        start_seconds: how long it may take until it answers.
    """

    def __init__(self, log: Path, ports: Sequence[int], start_seconds: float) -> None:
        self.log = log
        self._ports = ports
        self._start_seconds = start_seconds
        self._child: Child | None = None

    @abstractmethod
    def _make_child(self) -> Child:
        """The process, not started, with all that it needs in place."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves."""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.alive

    @property
    def pid(self) -> int | None:
        """The id of the process group, None when it does not run."""
        return self._child.pid if self._child is not None else None

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self._child is None:
            self._child = self._make_child()
        elif not self.alive:
            # A restart right after a kill was once seen to find a port taken, on a busy machine.
            with suppress(HighwaterError):
                wait_until(lambda: all(is_free(port) for port in self._ports), RELEASE_SECONDS, "its ports")
        self._child.start()

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ChildFailedError: it ended, or did not answer in time.
        """
        assert self._child is not None, "launch it first"
        self._child.wait_healthy(self._answers, self._start_seconds)

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def stop(self, grace_seconds: float = STOP_SECONDS) -> None:
        if self._child is not None:
            self._child.stop(grace_seconds)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
