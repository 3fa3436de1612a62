"""Records and transactions written to a topic, and read back."""

from __future__ import annotations

from highwater.resources.kafka import Kafka
from highwater.slices import OffsetRange


class Writer:
    """Writes transactions to partition 0 of a topic."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        from confluent_kafka import Producer

        self.topic = topic
        self.producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-writer"})
        self.producer.init_transactions(30)

    def open(self, *values: str) -> None:
        self.producer.begin_transaction()
        for value in values:
            self.producer.produce(self.topic, value, partition=0)
        self.producer.flush(30)

    def commit(self) -> None:
        self.producer.commit_transaction(30)

    def abort(self) -> None:
        self.producer.abort_transaction(30)


def write(bootstrap: str, topic: str, count: int, partition: int = 0, timestamp: int = 0) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1})
    for number in range(count):
        producer.produce(topic, f"v{number}", partition=partition, timestamp=timestamp)
    assert producer.flush(30) == 0


def read_values(kafka: Kafka, topic: str, start: int, end: int) -> list[tuple[int, str]]:
    found = kafka.read(topic, {0: OffsetRange(start, end)}, seconds=10)
    return [(message.offset() or 0, (message.value() or b"").decode()) for message in found]
