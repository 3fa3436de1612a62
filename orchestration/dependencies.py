"""Which work asks which dependency.

What belongs here: the guards of a stream's dependencies. What does not: how a guard works (`resources.guards`).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import KAFKA, LAKE
from resources.guards import Guard, open_error, resting

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from resources.kafka import Kafka
    from resources.lake import Lake
    from resources.ledger import Ledger


def kafka_guard(ledger: Ledger, kafka: Kafka) -> Guard:
    """The breaker of the brokers."""
    return Guard(ledger.breakers, KAFKA, kafka.topics)


def lake_guard(ledger: Ledger, lake: Lake, stream: Stream) -> Guard:
    """The breaker of the lake's storage."""
    return Guard(ledger.breakers, LAKE, lambda: lake.see_answering(stream.name))


def lookup_guards(ledger: Ledger, lake: Lake, stream: Stream) -> list[Guard]:
    """The breaker of the reference table, if the stream has one."""
    from assets.parsing import see_lookup

    lookup = stream.lookup
    return [] if lookup is None else [Guard(ledger.breakers, lookup.dependency, lambda: see_lookup(lake, lookup))]


def guards_of(table: str, ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> list[Guard]:
    """The breakers of what a step asks that takes slices through a table."""
    lookups = lookup_guards(ledger, lake, stream) if table in {"events", "rejects"} else []
    brokers = [kafka_guard(ledger, kafka)] if table in {"raw", "dlq", "published"} else []
    return [lake_guard(ledger, lake, stream), *lookups, *brokers]


def see_kafka_awake(ledger: Ledger, now: datetime) -> None:
    """See that runs which read from Kafka are worth a request.

    Raises:
        BreakerOpenError: Kafka is left alone now.
    """
    row = ledger.breakers.dependency(KAFKA)
    if resting(row, now):
        raise open_error(row)


def lookup_rests(ledger: Ledger, stream: Stream, now: datetime) -> bool:
    """Whether the stream's reference table is left alone now, so that nothing can be decided."""
    return stream.lookup is not None and resting(ledger.breakers.dependency(stream.lookup.dependency), now)
