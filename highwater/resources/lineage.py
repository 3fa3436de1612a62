"""The sender of OpenLineage events: in the background, and never in the way of a run."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

# A process waits so long at its end, once, for events that are still on their way.
WAIT_SECONDS = 3.0
# A step has two events. A run that takes slices through six tables, tried four times each, has 48.
MAX_WAITING = 1000
FILE = "openlineage.yml"
_LOG = logging.getLogger(__name__)


class Sender:
    """Sends events one after another in a thread of its own.

    Args:
        connect: makes the client; called in the thread. None for a client that has no transport configured.
        wait_seconds: how long `close` waits.
    """

    def __init__(self, connect: Callable[[], OpenLineageClient | None], wait_seconds: float = WAIT_SECONDS) -> None:
        self._connect = connect
        self._wait_seconds = wait_seconds
        self._waiting: deque[RunEvent] = deque()
        self._changed = threading.Condition()
        self._sending = False
        self._thread: threading.Thread | None = None

    def send(self, event: RunEvent) -> None:
        """Put an event into the queue, and return at once; beyond `MAX_WAITING` the oldest ones are dropped."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lineage", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> bool:
        """Wait for the events on their way, at most `wait_seconds`; returns whether none is left."""
        deadline = time.monotonic() + self._wait_seconds
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._sending, deadline - time.monotonic())
            left = len(self._waiting) + self._sending
            self._waiting.clear()
        if not done:
            _LOG.warning("%s OpenLineage events were not delivered within %s s", left, self._wait_seconds)
        return done

    def _run(self) -> None:
        client: OpenLineageClient | None = None
        connected = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                event = self._waiting.popleft()
                self._sending = True
            try:
                if not connected:
                    client, connected = self._connect(), True
                if client is not None:
                    client.emit(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no fault of the run
                # Only the error's name is logged: texts may hold the address with a login.
                _LOG.warning("an OpenLineage event was not delivered: %s", type(error).__name__)
            with self._changed:
                self._sending = False
                self._changed.notify_all()


def is_configured(environment: Mapping[str, str], folder: Path, home: Path) -> bool:
    """Whether OpenLineage's own variables or files name a transport; without one nothing is sent.

    Args:
        environment: the process's environment variables.
        folder: the working folder.
        home: the user's home folder.
    """
    if environment.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OPENLINEAGE_URL") or any(name.startswith("OPENLINEAGE__TRANSPORT") for name in environment):
        return True
    named = environment.get("OPENLINEAGE_CONFIG")
    files = [*([Path(named)] if named else []), folder / FILE, home / ".openlineage" / FILE]
    return any(file.is_file() for file in files)


@lru_cache(maxsize=1)
def get_sender() -> Sender | None:
    """The sender of this process; None where no transport is configured."""
    if not is_configured(os.environ, Path.cwd(), Path.home()):
        return None
    made = Sender(_connect)
    atexit.register(made.close)
    return made


def _connect() -> OpenLineageClient | None:
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.console import ConsoleTransport

    client = OpenLineageClient()
    # The client prints events where it finds no transport, as in a file that only names facets.
    if isinstance(client.transport, ConsoleTransport) and not client.config.transport:
        return None
    return client
