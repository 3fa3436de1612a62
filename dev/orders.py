"""The stream `orders` as the generator writes it: lives of orders, and the faults that only orders have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

from dev.faults import COMMON, COMMON_RATES, Source, Story, record, sound
from dev.intended import INVALID, UNRESOLVED, Intended

PARTITIONS = 3
CUSTOMERS = 200
# A number of orders have a late customer together.
ORDERS_PER_LATE_CUSTOMER = 5

LIVES = (("placed",), ("placed", "paid"), ("placed", "paid", "refunded"), ("placed", "canceled"))
FORBIDDEN = (("paid",), ("placed", "refunded"), ("placed", "canceled", "paid"), ("placed", "paid", "placed"))
MISTYPED: tuple[tuple[str, object], ...] = (
    ("version", "1"),
    ("version", 1.5),
    ("version", True),
    ("status", 3),
    ("customer_id", 17),
    ("amount", "12.50"),
    ("amount", 12.345),
    ("amount", 12_345_678_901.5),
    ("amount", {"value": 1}),
    ("event_time", "yesterday"),
    ("event_time", "2026-01-01T10:00:00"),
    ("event_time", "2026-13-01T10:00:00Z"),
    ("event_time", 1_767_225_600),
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def customer_ids() -> list[str]:
    """The customers that are known from the beginning."""
    return [f"c-{number:04d}" for number in range(CUSTOMERS)]


def story(rng: Random, prefix: str, number: int, partitions: int) -> Story:
    """The life of the n-th order."""
    return _story(rng, prefix, number, partitions, rng.choice(LIVES))


def _story(rng: Random, prefix: str, number: int, partitions: int, statuses: tuple[str, ...]) -> Story:
    # Now and then an id beyond ASCII: keys are UTF-8.
    order_id = f"{'ö' if number % 50 == 0 else 'o'}-{prefix}-{number:07d}"
    customer = f"c-{rng.randrange(CUSTOMERS):04d}"
    amount = rng.randrange(0, 1_000_000) / 100
    placed = BEGIN + timedelta(seconds=number * 3)
    states = tuple(
        {
            "order_id": order_id,
            "version": version,
            "status": status,
            "customer_id": customer,
            "amount": int(amount) if rng.random() < 0.05 else amount,
            "event_time": _time(rng, placed + timedelta(minutes=7 * (version - 1))),
        }
        for version, status in enumerate(statuses, start=1)
    )
    return Story(order_id, states, "version", MISTYPED, partitions)


def _time(rng: Random, when: datetime) -> str:
    """The same instant as different writers write it."""
    shape = rng.random()
    if shape < 0.1:
        return when.astimezone(tz=_ZONES[rng.randrange(len(_ZONES))]).isoformat()
    if shape < 0.2:
        return (when + timedelta(microseconds=rng.randrange(1_000_000))).isoformat(timespec="microseconds")
    return when.isoformat().replace("+00:00", "Z")


_ZONES = tuple(datetime.fromisoformat(f"2026-01-01T00:00:00{z}").tzinfo for z in ("+02:00", "-05:30", "+14:00"))


def unknown_status(rng: Random, story: Story) -> list[Intended]:
    """A status that nobody declared, after the life."""
    state = {**story.states[-1], "version": len(story.states) + 1, "status": rng.choice(["shipped", "PAID", ""])}
    return [*sound(rng, story), record(rng, story, state, fault="unknown_status", ending=INVALID)]


def out_of_bounds(rng: Random, story: Story) -> list[Intended]:
    """An amount below 0, or a version below 1."""
    changed: dict[str, object] = rng.choice([{"amount": -0.01}, {"amount": -5}, {"version": 0}, {"version": -1}])
    state = {**story.states[-1], "version": len(story.states) + 1, **changed}
    return [*sound(rng, story), record(rng, story, state, fault="out_of_bounds", ending=INVALID)]


def forbidden_transition(rng: Random, story: Story) -> list[Intended]:
    """States that may not follow one another; each record is sound for itself, so all are events."""
    first = story.states[0]
    states = tuple(
        {**first, "version": version, "status": status} for version, status in enumerate(rng.choice(FORBIDDEN), start=1)
    )
    return [replace(r, fault="forbidden_transition") for r in sound(rng, replace(story, states=states))]


def missing_version(rng: Random, story: Story) -> list[Intended]:
    """A life without its second version."""
    first = story.states[0]
    states = ({**first, "status": "placed"}, {**first, "version": 3, "status": "refunded"})
    return [replace(r, fault="missing_version") for r in sound(rng, replace(story, states=states))]


def late_customer(rng: Random, story: Story) -> list[Intended]:
    """An order of a customer whom nobody knows yet."""
    prefix, number = story.key[2:].rsplit("-", 1)
    customer = f"late-{prefix}-{int(number) // ORDERS_PER_LATE_CUSTOMER}"
    states = tuple({**state, "customer_id": customer} for state in story.states)
    waiting = replace(story, states=states, waits_for=customer)
    return [replace(r, fault="late_customer", ending=UNRESOLVED) for r in sound(rng, waiting)]


FAULTS = {
    **COMMON,
    "unknown_status": unknown_status,
    "out_of_bounds": out_of_bounds,
    "forbidden_transition": forbidden_transition,
    "missing_version": missing_version,
    "late_customer": late_customer,
}
ORDERS = Source("orders", PARTITIONS, story, FAULTS, {**dict.fromkeys(FAULTS, 0.01), **COMMON_RATES})
