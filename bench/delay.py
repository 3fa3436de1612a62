"""A proxy that holds a broker's answers back, as a long way to it would.

What belongs here: the proxy. What does not: any measurement.

The broker names itself by its own address, so clients would go around the proxy; the names in its answers have the same
length as ours and are replaced.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 18


class DelayingProxy:
    """Forwards connections to one broker; its answers come later.

    Args:
        broker: `host:port` of the only broker.
        seconds: how much later.
    """

    def __init__(self, broker: str, seconds: float) -> None:
        self._port = int(broker.rpartition(":")[2])
        self._seconds = seconds
        self._listener = socket.create_server((LOOPBACK, 0))

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"{LOOPBACK}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection((LOOPBACK, self._port))
                threading.Thread(target=_forward, args=(client, broker), daemon=True).start()
                late: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                threading.Thread(target=self._take, args=(broker, late), daemon=True).start()
                threading.Thread(target=self._give, args=(client, late), daemon=True).start()

    def _take(self, broker: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        own = LOOPBACK.encode() + struct.pack(">I", self._port)
        other = LOOPBACK.encode() + struct.pack(">I", self._listener.getsockname()[1])
        data = b""
        with suppress(OSError):
            while data := broker.recv(CHUNK):
                data = data.replace(own, other)
                late.put((time.monotonic() + self._seconds, data))
        late.put((0.0, b""))

    def _give(self, client: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while (item := late.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                client.sendall(item[1])
        client.close()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    sink.close()
