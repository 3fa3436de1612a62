"""A test double for a client of Kafka, and the errors that it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confluent_kafka import KafkaError


class FakeClient:
    """A test double for librdkafka, which gives its errors only when brokers fail in their own time.

    A look takes one end out of `ends`, that of the oldest record; without one, all stay under way.
    """

    def __init__(self) -> None:
        self.room = 1
        self.sent: list[bytes | None] = []
        self.ends: list[KafkaError | None] = []
        self.refusal: KafkaError | None = None
        self.silent = False
        self.under_way: list[tuple[str, bytes | None, Callable[[KafkaError | None, Any], None]]] = []

    def produce(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int, shown: Any, **more: object
    ) -> None:
        from confluent_kafka import KafkaException

        del partition, more
        if self.refusal is not None:
            raise KafkaException(self.refusal)
        if len(self.under_way) >= self.room:
            raise BufferError
        self.sent.append(value)
        self.under_way.append((topic, key, shown))

    def report(self, error: KafkaError | None, offset: int = 0) -> None:
        from confluent_kafka import Message

        topic, key, shown = self.under_way.pop(0)
        shown(error, Message(topic=topic, partition=0, offset=offset, key=key, timestamp=(1, 7)))

    def poll(self, seconds: float) -> int:
        del seconds
        if self.ends and self.under_way:
            self.report(self.ends.pop(0))
        return 0

    def flush(self, seconds: float) -> int:
        self.poll(seconds)
        return len(self)

    def purge(self, **which: bool) -> None:
        del which
        while self.under_way and not self.silent:
            self.report(build_fault("_PURGE_QUEUE"))

    def __len__(self) -> int:
        return len(self.under_way)


def build_fault(name: str, *, fatal: bool = False) -> KafkaError:
    from confluent_kafka import KafkaError

    return KafkaError(getattr(KafkaError, name), f"the words of {name}", fatal=fatal)
