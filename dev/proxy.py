"""A proxy in front of a broker, for what a good network does not do: lose answers, or bring them late."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from dev.processes import LOOPBACK

CHUNK = 1 << 16
LARGE = 1 << 20


class Proxy:
    """Forwards connections to one broker. Use it as a context.

    Args:
        broker_port: where the broker listens, on the loopback address.
    """

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """The address to which clients connect."""
        return f"{LOOPBACK}:{self.port}"

    def __enter__(self) -> Self:
        _in_background(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                _in_background(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            broker = socket.create_connection((LOOPBACK, self._broker_port))
        except OSError:  # the broker is down
            client.close()
            return
        _in_background(self._forward, client, broker)
        self._answer(broker, client)
        _end(broker, client)

    def _forward(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            _carry(client, broker)
        _end(client, broker)

    def _answer(self, broker: socket.socket, client: socket.socket) -> None:
        """Bring the broker's answers to the client, until one of them ends."""
        raise NotImplementedError


class LossyProxy(Proxy):
    """While `losing`, a share of the answers is dropped together with its connection: the request was carried out.

    Args:
        broker_port: where the broker listens.
        share: of the answers that are lost, 0 to 1.
        seed: decides which.
    """

    def __init__(self, broker_port: int, share: float, seed: int = 1) -> None:
        super().__init__(broker_port)
        self.losing = False
        self.lost = 0
        self._share = share
        self._chance = random.Random(seed)  # noqa: S311 - no secret depends on it

    def _answer(self, broker: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := broker.recv(CHUNK):
                if self.losing and self._chance.random() < self._share:
                    self.lost += 1
                    return
                client.sendall(data)


class DelayingProxy(Proxy):
    """Every answer comes later, as over a long way; how much is under way does not matter.

    Args:
        broker_port: where the broker listens.
        seconds: how much later.
    """

    def __init__(self, broker_port: int, seconds: float) -> None:
        super().__init__(broker_port)
        self._seconds = seconds

    def _answer(self, broker: socket.socket, client: socket.socket) -> None:
        late: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        _in_background(self._take, broker, late)
        with suppress(OSError):
            while (item := late.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                client.sendall(item[1])

    def _take(self, broker: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while data := broker.recv(CHUNK):
                late.put((time.monotonic() + self._seconds, data))
        late.put((0.0, b""))


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Bring all bytes over without a look at them: where the kernel can, it moves them by itself.

    A measurement through a proxy has two cores for producer, proxy and broker together.
    """
    if not hasattr(os, "splice"):
        while data := source.recv(CHUNK):
            target.sendall(data)
        return
    out, into = os.pipe()
    _enlarge(into)
    try:
        while moved := os.splice(source.fileno(), into, LARGE):
            while moved:
                moved -= os.splice(out, target.fileno(), moved)
    finally:
        os.close(out)
        os.close(into)


def _enlarge(pipe: int) -> None:
    """Room for all that is moved at once, which saves most of the calls; a smaller pipe does as well."""
    with suppress(OSError):  # the user's pipes have all the room they are allowed
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, LARGE)


def _in_background(action: Callable[..., None], *given: object) -> None:
    threading.Thread(target=action, args=given, daemon=True).start()


def _end(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
