"""Records of a bench: reads of its topics and tables, plans of its tiers, and a transaction that is aborted."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from highwater import envelope
from highwater.orchestration.sensing.retries import plan_tier
from highwater.slices import Slice
from tests.helpers.support import Bench

Headers = list[tuple[str, bytes | None]]


def published(bootstrap: str, topic: str) -> list[tuple[int, bytes | None, bytes | None, Headers]]:
    """Read all records of a topic with a plain consumer: partition, key, value, headers."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"group.id": "foreign", "isolation.level": "read_committed", "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest", **settings})
    partitions = list(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found: list[tuple[int, bytes | None, bytes | None, Headers]] = []
    ended: set[int | None] = set()
    while len(ended) < len(partitions):
        message = consumer.poll(60)
        if message is None:
            raise TimeoutError("the topic did not end within 10 s")
        if message.error():
            ended.add(message.partition())
        else:
            found.append((message.partition() or 0, message.key(), message.value(), _headers(message)))
    consumer.close()
    return found


def _headers(message: Any) -> Headers:
    return list(message.headers() or [])


def due(bench: Bench, tier: int = 1) -> tuple[Slice, ...]:
    """Plan the tier when all that is in it now has waited long enough."""
    time.sleep(1.2 * bench.stream.tiers[tier - 1].total_seconds() + 0.1)
    return plan_tier(
        bench.ledger, bench.kafka, bench.stream, bench.stream.tier_topics[tier - 1], datetime.now(UTC)
    ).slices


def ends(bench: Bench, table: str) -> Counter[tuple[str, int]]:
    return Counter((row["slice"], row["origin_offset"]) for row in bench.rows(table))


def read_content(bench: Bench, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a table by origin, without what names slices and attempts."""
    rows = bench.rows(table)
    names = ("slice", "attempt", "updated_by_slice")
    found = {
        tuple(row[name] for name in envelope.ORIGIN): {n: v for n, v in row.items() if n not in names} for row in rows
    }
    assert len(found) == len(rows), f"{table} has an origin twice"
    return found


def abort_transaction(bench: Bench, partition: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bench.bootstrap, "transactional.id": bench.stream.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(bench.stream.topic, key=b"o1", value=b"{}", partition=partition)
    producer.flush(30)
    producer.abort_transaction(30)
