"""Records of a bench: reads of its topics and tables, plans of its tiers, and a transaction that is aborted."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from highwater import envelope
from highwater.orchestration.sensing.retries import plan_tier
from highwater.slices import Slice
from tests.helpers.support import Bench, read_messages

Headers = list[tuple[str, bytes | None]]


def published(bootstrap: str, topic: str) -> list[tuple[int, bytes | None, bytes | None, Headers]]:
    """All records of a topic: partition, key, value, headers."""
    found = read_messages(bootstrap, topic)
    return [(one.partition() or 0, one.key(), one.value(), _headers(one)) for one in found]


def _headers(message: Any) -> Headers:
    return list(message.headers() or [])


def due(bench: Bench, tier: int = 1) -> tuple[Slice, ...]:
    """Plan the tier as at the moment when all that is in it now has waited long enough."""
    return plan_due(bench, bench.stream.tier_topics[tier - 1])


def plan_due(bench: Bench, topic: str) -> tuple[Slice, ...]:
    """The same for any topic of retries. Nobody waits for the moment: the planner has its time from its caller."""
    moment = datetime.now(UTC) + 1.2 * bench.stream.delays[topic] + timedelta(seconds=0.1)
    return plan_tier(bench.ledger, bench.kafka, bench.stream, topic, moment).slices


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
