"""For producers of other programs: several clients that send as one, for brokers that are far away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from highwater.errors import ConfigurationError
from highwater.resources.clients import open_client

if TYPE_CHECKING:
    from confluent_kafka import Producer

# How long one client is waited for before the next one is looked at.
TURN_SECONDS = 0.002


def find_client_index(key: bytes | None, number: int) -> int:
    """The index of the client that sends a key's records; records without a key share one client."""
    return crc32(key or b"") % number


class SeveralClients:
    """As much of a producing client as `ReliableProducer` uses.

    An idempotent client sends more to a partition only while fewer than five records of it are under way (so librdkafka
    2.16, `rd_kafka_toppar_producer_serve`): far away one batch for each partition and round trip, of a megabyte at the
    most. Each of several has its own. All records of a key, and all without one, belong to one of them, so that they
    stay in order.

    Args:
        properties: each client's properties.
        number: number of clients, 2 or more.

    Raises:
        ConfigurationError: a client refuses its properties, or they name a transaction, which one client alone has.
    """

    def __init__(self, properties: Mapping[str, str], number: int) -> None:
        from confluent_kafka import Producer

        if "transactional.id" in properties:
            raise ConfigurationError(
                "a transaction belongs to one client",
                stored=f"transactional.id, {number} clients",
                remedy="construct the producer with clients=1",
            )
        self._clients: list[Producer] = [
            open_client(Producer, properties, name="reliable producer") for _ in range(max(1, number))
        ]
        self.produces: list[Callable[..., None]] = [client.produce for client in self._clients]
        """The `produce` of each client, at its index."""

    def select_produces(self, keys: Sequence[bytes | None]) -> list[Callable[..., None]]:
        """For each key what hands its record to the client to which it belongs."""
        produces, number = self.produces, len(self.produces)
        # The rule of `find_client_index`, inlined: a call for each key would take as long as the rest of this.
        return [produces[crc32(key or b"") % number] for key in keys]

    def poll(self, seconds: float) -> int:
        """Take in the reports that are there, waiting so long at the most for the first one."""
        deadline = time.monotonic() + seconds
        while not (found := sum(client.poll(0) for client in self._clients)):
            for client in self._clients:
                left = deadline - time.monotonic()
                if left <= 0:
                    return 0
                if found := client.poll(min(TURN_SECONDS, left)):
                    return found
        return found

    def flush(self, seconds: float) -> int:
        """Wait so long at the most for all reports; returns how many records have none.

        In short turns: only while a client is flushed it sends what would wait for its `linger.ms`.
        """
        deadline = time.monotonic() + seconds
        while (waiting := [client for client in self._clients if len(client)]) and time.monotonic() < deadline:
            for client in waiting:
                client.flush(min(TURN_SECONDS, max(0.0, deadline - time.monotonic())))
        return len(self)

    def purge(self, **which: bool) -> None:
        """Abandon records that are queued or under way."""
        for client in self._clients:
            client.purge(**which)

    def __len__(self) -> int:
        return sum(len(client) for client in self._clients)
