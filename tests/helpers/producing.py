"""Reliable producers on a simulated client, and callbacks."""

from __future__ import annotations

from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import OnFailure
from tests.helpers.support import read_topic


def open_producer(policy: OnFailure = OnFailure.STOP_KEY) -> ReliableProducer:
    return ReliableProducer(build_producer_properties("nobody:1"), on_failure=policy)


def build_answering_properties() -> dict[str, str]:
    """The properties of a producer with librdkafka's own stand-in for a broker, which takes what it is sent."""
    taking = {"test.mock.num.brokers": "1", "allow.auto.create.topics": "true"}
    return build_producer_properties("127.0.0.1:1") | taking


def read_records(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Every committed record, partition by partition in the order of offsets."""
    found = read_topic(bootstrap, topic)
    return [found[place] for place in sorted(found)]


def build_pairs(number: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"%d" % n, b"v") for n in range(number)]
