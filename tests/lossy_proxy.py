"""A proxy in front of a broker that loses the broker's answers: the request was carried out, and nobody is told."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from dev.processes import LOOPBACK, free_port

CHUNK = 65536


class LossyProxy:
    """Forwards connections; while `losing`, a share of the answers is dropped together with its connection.

    Args:
        broker_port: where the broker listens.
        share: of the answers that are lost, 0 to 1.
        seed: decides which.
    """

    def __init__(self, broker_port: int, share: float, seed: int = 1) -> None:
        self.port = free_port()
        self.losing = False
        self.lost = 0
        self._broker_port = broker_port
        self._share = share
        self._chance = random.Random(seed)
        self._listener = socket.create_server((LOOPBACK, self.port))

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"{LOOPBACK}:{self.port}"

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
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            broker = socket.create_connection((LOOPBACK, self._broker_port))
        except OSError:
            client.close()
            return
        threading.Thread(target=self._pump, args=(client, broker, False), daemon=True).start()
        self._pump(broker, client, answers=True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if answers and self.losing and self._chance.random() < self._share:
                    self.lost += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
