"""The stream `payments` as the generator writes it: bookings of payments, where the latest one counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

from dev.faults import COMMON, COMMON_RATES, Source, Story

PARTITIONS = 4
MISTYPED: tuple[tuple[str, object], ...] = (
    ("booked_at", "2026-01-01"),
    ("booked_at", 1_767_225_600),
    ("amount", "1.00"),
    ("amount", 0.001),
    ("currency", 978),
    ("currency", ["EUR"]),
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def story(rng: Random, prefix: str, number: int, partitions: int) -> Story:
    """The bookings of the n-th payment."""
    account, payment = f"a-{rng.randrange(1000):04d}", f"p-{prefix}-{number:07d}"
    first = BEGIN + timedelta(seconds=number, microseconds=rng.randrange(1_000_000))
    states = tuple(
        {
            "account_id": account,
            "payment_id": payment,
            "booked_at": booked.isoformat(),
            "amount": rng.randrange(-500_000, 500_000) / 100,
            "currency": rng.choice(["EUR", "CHF", "SEK"]),
        }
        for booked in _bookings(rng, first)
    )
    return Story(f"{account}|{payment}", states, "booked_at", MISTYPED, partitions)


def _bookings(rng: Random, first: datetime) -> list[datetime]:
    """Up to three times, each later than the one before, by a microsecond at the least."""
    found = [first]
    for _ in range(rng.randrange(3)):
        found.append(found[-1] + timedelta(microseconds=rng.choice([1, rng.randrange(1, 10**9)])))
    return found


PAYMENTS = Source("payments", PARTITIONS, story, COMMON, COMMON_RATES)
