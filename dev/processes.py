"""Child processes: started with a log file, health-checked to a deadline, ended with all they started."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from highwater.errors import HighwaterError, PermanentError

LOOPBACK = "127.0.0.1"

# Below Linux's range for outgoing connections (32768 and up): a port of ours that is free for a moment, because
# its server was killed and starts again, cannot be taken by somebody's outgoing connection.
PORTS = range(20_000, 32_000)

POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 2.0
# A wait ends after this multiple of the time that it may take: tests run on shared machines.
PATIENCE = 1.0
_GUARD = str(Path(__file__).with_name("guard.py"))
TAIL_LINES = 25


class ChildFailedError(PermanentError):
    """A child process ended before it was healthy, or was not healthy in time."""


def free_port(prefer: int | None = None) -> int:
    """A port on the loopback address that nothing listens on, and no other process of ours is about to.

    Args:
        prefer: taken when it is free; 0 for any.

    Raises:
        ChildFailedError: 200 ports tried at random were all taken.
    """
    if prefer and is_free(prefer) and _claimed(prefer):
        return prefer
    for port in random.SystemRandom().sample(PORTS, 200):
        if is_free(port) and _claimed(port):
            return port
    raise ChildFailedError("no free port", found=f"200 of {PORTS} are taken", remedy="end what listens there")


# Of this process, by port: each lasts as long as it does, wherever it is killed.
_claims: dict[int, socket.socket] = {}


def _claimed(port: int) -> bool:
    """Keep a port for this process: a server takes seconds until it listens there.

    Two that began at once both found it free, and one then took the other's webserver for its own. The claim is the
    UDP port of the same number, which nobody listens on.
    """
    if port not in _claims:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((LOOPBACK, port))
        except OSError:
            claim.close()
            return False
        _claims[port] = claim
    return True


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return not accepts(port)


def accepts(port: int) -> bool:
    """Whether something on the loopback address accepts connections on the port."""
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False


class Child:
    """One child process, in a process group of its own; it can be started again after it ended.

    Args:
        name: for messages, and the name of the log file.
        command: program and arguments.
        logs: folder of the log file, which later starts append to.
        environment: all of its variables; the parent's own if left out.
        cwd: its working folder.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = logs / f"{name}.log"
        self.environment = dict(os.environ if environment is None else environment)
        self.cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        self._lives: int | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The id of the process group, None when it does not run."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; nothing happens when it runs already."""
        if self.alive:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._forget()
        # A process that holds the writing end lives: it reads as ended when guard, child and heirs are really gone.
        self._lives, held = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-IS", _GUARD, str(os.getpid()), str(held), *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    cwd=self.cwd,
                    start_new_session=True,
                    pass_fds=(held,),
                )
        finally:
            os.close(held)
        self._group = self._process.pid

    def wait_healthy(self, healthy: Callable[[], bool], seconds: float) -> None:
        """Poll until it is healthy.

        Raises:
            ChildFailedError: it ended, or was not healthy in time; it is killed then, and the error has the log's end.
        """
        deadline = time.monotonic() + PATIENCE * seconds
        while not healthy():
            if not self.alive:
                raise self._failed(f"{self.name} ended with exit status {self.exit_status}")
            if time.monotonic() > deadline:
                error = self._failed(f"{self.name} was not ready within {seconds:.0f} s")
                self.kill()
                raise error
            time.sleep(POLL_SECONDS)

    @property
    def exit_status(self) -> int | None:
        """The exit status once it ended; 128 + n when a signal n ended it."""
        return None if self._process is None else self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; returns the exit status, None if it still runs."""
        if self._process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_status

    def ask_to_end(self) -> None:
        """Let it begin to end, without waiting; nothing happens when it does not run."""
        self._signal(signal.SIGTERM)

    def stop(self, grace_seconds: float = 10) -> None:
        """Ask it to end, and kill after the grace what is left; nothing happens when it does not run."""
        self.ask_to_end()
        self.wait(grace_seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to it and to everything it started in its group."""
        self._signal(signal.SIGKILL)
        self.wait(10)
        self._wait_gone(10)
        self._forget()

    def _wait_gone(self, seconds: float) -> None:
        # The guard's end is not yet the child's: a JVM that is being killed was seen to accept connections still.
        if self._lives is not None:
            select.select([self._lives], [], [], seconds)

    def _forget(self) -> None:
        self._group = None  # the id may be somebody else's from now on
        if self._lives is not None:
            os.close(self._lives)
            self._lives = None

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader while a grandchild runs, so it is signalled even after the leader's end.
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of what it wrote since its last start."""
        if not self.log.is_file():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _failed(self, problem: str) -> ChildFailedError:
        return ChildFailedError(
            problem,
            found=f"the end of its log:\n{self.tail()}\n",
            remedy=f"read {self.log}, fix the cause, start again",
        )


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll a condition, mostly asleep: what is waited for needs the processor too.

    Raises:
        HighwaterError: it did not hold in time.
    """
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        if now > deadline:
            raise HighwaterError(f"{what} did not happen within {seconds:.0f} s", remedy="read the logs named above")
        time.sleep(min(max(POLL_SECONDS, 2 * (now - began)), LONGEST_POLL_SECONDS))


@contextmanager
def signals_raise_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that `finally` runs. For the main thread only."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(run: Callable[[], int]) -> int:
    """The exit status of a program that ends all that it started: its own, 1 after an error, 130 after Ctrl-C."""
    try:
        with signals_raise_interrupt():
            return run()
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything was ended", file=sys.stderr)
        return 130
