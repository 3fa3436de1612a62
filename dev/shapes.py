"""What the comparison knows of each stream by itself: the declarations, said a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dev.compare_metrics import Measures


@dataclass(frozen=True)
class Shape:
    """The comparison's own knowledge of a stream: the declaration said a second time."""

    stream: str
    version: str
    event_time: str
    types: Mapping[str, str]
    tiers: int = 0
    accepted: str | None = None
    measures: Measures | None = None

    def dlq_topics(self, topic: str) -> list[str]:
        """The topics that rejects of a topic go to."""
        return [*[f"{topic}.dlq.{number}" for number in range(1, self.tiers + 1)], f"{topic}.parked"]


SHAPES: Mapping[str, Shape] = {
    "orders": Shape(
        "orders",
        "version",
        "event_time",
        {
            "order_id": "text",
            "version": "number",
            "status": "text",
            "customer_id": "text",
            "amount": "decimal",
            "event_time": "time",
        },
        tiers=3,
        accepted="orders.accepted",
        measures=Measures("status", ("placed", "paid", "refunded", "canceled"), "amount", ("paid",)),
    ),
    "payments": Shape(
        "payments",
        "booked_at",
        "booked_at",
        {"account_id": "text", "payment_id": "text", "booked_at": "time", "amount": "decimal", "currency": "text"},
    ),
}
