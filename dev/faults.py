"""The faults that any stream can have: each turns the sound life of one key into the records to be written."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dev.intended import EVENT, MALFORMED, TOMBSTONE, Ending, Fate, Headers, Intended, microseconds

NONE = "none"
# What the records of a burst are called in the account; no fault that a key has, so no rate is asked for it.
BURST = "burst"
LARGE_BYTES = 500_000
# Far enough that its publish time lies before every other record's of its key.
BACKDATED_MS = 3_600_000

State = Mapping[str, Any]


@dataclass(frozen=True)
class Story:
    """The sound life of one key, from which a fault departs.

    Args:
        key: the key of its records, as text.
        states: the JSON values in their order, the first version first.
        version_field: the field that orders them: an integer, or an ISO 8601 time.
        mistyped: fields with values of a wrong type, one for each fault.
        partitions: of the topic.
        waits_for: the customer that is not known yet.
    """

    key: str
    states: tuple[State, ...]
    version_field: str
    mistyped: Sequence[tuple[str, object]]
    partitions: int
    waits_for: str | None = None


Fault = Callable[[Random, Story], list[Intended]]


@dataclass(frozen=True)
class Source:
    """One stream as the generator knows it.

    Args:
        name: of the stream, and of its topic.
        partitions: of its topic.
        story: the sound life of the n-th key, from a random source, the run's prefix and the number.
        faults: the faults by name.
        rates: of each fault the share of keys that have it, where nothing else is asked for.
    """

    name: str
    partitions: int
    story: Callable[[Random, str, int, int], Story]
    faults: Mapping[str, Fault]
    rates: Mapping[str, float] = field(default_factory=dict)


def record(
    rng: Random, story: Story, state: State, *, fault: str = NONE, ending: Ending = EVENT, **changes: Any
) -> Intended:
    """A state of a story as a record; `changes` overrides what follows from the state."""
    made = Intended(
        entity=story.key,
        key=story.key.encode(),
        value=encoded(rng, state),
        fault=fault,
        ending=ending,
        version=version_of(story, state),
        headers=_headers(rng),
        waits_for=story.waits_for,
    )
    return replace(made, **changes)


def version_of(story: Story, state: State) -> int | None:
    """The version as a number; None where the state holds none that is sound."""
    value = state.get(story.version_field)
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return microseconds(value) if isinstance(value, str) else None
    except (ValueError, TypeError):
        return None


def encoded(rng: Random, state: State) -> bytes:
    """JSON as different writers write it: order of fields, blanks, escapes and extra fields vary."""
    names = list(state)
    extra: dict[str, object] = {}
    if rng.random() < 0.2:
        rng.shuffle(names)
    if rng.random() < 0.1:
        extra = {"note": "grüße", "nested": {"a": [1, None, True]}}
    blanks = (", ", ": ") if rng.random() < 0.3 else (",", ":")
    plain = {**{name: state[name] for name in names}, **extra}
    return json.dumps(plain, separators=blanks, ensure_ascii=rng.random() < 0.5).encode()


def _headers(rng: Random) -> Headers:
    if rng.random() < 0.7:
        return ()
    found: list[tuple[str, bytes | None]] = [("source", b"shop"), ("trace", rng.randbytes(8))]
    if rng.random() < 0.2:
        found += [("source", b"again"), ("nothing", None), ("empty", b"")]
    return tuple(found)


def sound(rng: Random, story: Story) -> list[Intended]:
    """The life as it should be."""
    return [record(rng, story, state) for state in story.states]


def _with_extra(rng: Random, story: Story, extra: Callable[[State], Intended]) -> list[Intended]:
    """The sound life with one more record somewhere in it."""
    life = sound(rng, story)
    at = rng.randrange(len(life))
    return [*life[:at], extra(story.states[at]), *life[at:]]


def malformed_json(rng: Random, story: Story) -> list[Intended]:
    """A value that is not one JSON object in UTF-8."""
    spoil: Callable[[bytes], bytes] = rng.choice(_SPOILERS)
    return _with_extra(
        rng,
        story,
        lambda state: record(
            rng,
            story,
            state,
            fault="malformed_json",
            ending=MALFORMED,
            value=spoil(encoded(rng, state)),
            version=None,
        ),
    )


def poison(rng: Random, story: Story) -> Intended:
    """A record that nobody can read, as a producer with a wrong serializer writes nothing else; no fault of one key."""
    state = story.states[0]
    value = rng.choice(_SPOILERS)(encoded(rng, state))
    return record(rng, story, state, fault=BURST, ending=MALFORMED, value=value, version=None)


_SPOILERS: Sequence[Callable[[bytes], bytes]] = (
    lambda value: value[: len(value) // 2],
    lambda value: value + b" trailing",
    lambda value: value + value,
    lambda value: b"[" + value + b"]",
    lambda value: value.replace(b'"', b'"\xff', 1),
    lambda value: value.replace(b'"', b"'"),
    lambda _: b"",
    lambda _: b"null",
    lambda _: b"no json at all",
)


def missing_field(rng: Random, story: Story) -> list[Intended]:
    """A declared field that is left out, or null."""

    def extra(state: State) -> Intended:
        name = rng.choice(sorted(state))
        left = {n: v for n, v in state.items() if n != name}
        changed = {**state, name: None} if rng.random() < 0.3 else left
        return record(rng, story, changed, fault="missing_field", ending=MALFORMED)

    return _with_extra(rng, story, extra)


def mistyped_field(rng: Random, story: Story) -> list[Intended]:
    """A declared field whose value is of another type, or does not fit its type."""

    def extra(state: State) -> Intended:
        name, value = rng.choice(story.mistyped)
        return record(rng, story, {**state, name: value}, fault="mistyped_field", ending=MALFORMED)

    return _with_extra(rng, story, extra)


def second_delivery(rng: Random, story: Story) -> list[Intended]:
    """One record twice, byte by byte; now and then the second comes with later records in between."""
    life = sound(rng, story)
    at = rng.randrange(len(life))
    again = replace(life[at], fault="second_delivery")
    to = rng.randint(at + 1, len(life))
    return [*life[:to], again, *life[to:]]


def out_of_order(rng: Random, story: Story) -> list[Intended]:
    """Versions that arrive in another order than they happened."""
    life = [replace(made, fault="out_of_order") for made in sound(rng, story)]
    return life[::-1] if rng.random() < 0.5 else [*life[1:], life[0]]


def conflict(rng: Random, story: Story) -> list[Intended]:
    """Two contents under one version; for every third the later offset has the earlier publish time."""
    life = sound(rng, story)
    at = rng.randrange(len(life))
    state = {**story.states[at], "amount": round(story.states[at]["amount"] + 1, 2)}
    backdated = BACKDATED_MS if rng.random() < 1 / 3 else 0
    other = record(rng, story, state, fault="conflict", backdated_ms=backdated)
    return [*life[: at + 1], other, *life[at + 1 :]]


def tombstone(rng: Random, story: Story) -> list[Intended]:
    """A null value after the life."""
    last = record(rng, story, story.states[-1], fault="tombstone", ending=TOMBSTONE, value=None, version=None)
    return [*sound(rng, story), last]


def null_key(rng: Random, story: Story) -> list[Intended]:
    """A sound value without a key; its partition is drawn here, since the client would draw one of its own."""
    partition = rng.randrange(story.partitions)
    return _with_extra(
        rng,
        story,
        lambda state: record(
            rng, story, state, fault="null_key", ending=MALFORMED, key=None, partition=partition, version=None
        ),
    )


def wrong_key(rng: Random, story: Story) -> list[Intended]:
    """A sound value under a key that is not its own."""
    other = rng.choice([f"{story.key}x".encode(), story.key.upper().encode() + b"\xff", b""])
    return _with_extra(
        rng,
        story,
        lambda state: record(rng, story, state, fault="wrong_key", ending=MALFORMED, key=other, version=None),
    )


def large_record(rng: Random, story: Story) -> list[Intended]:
    """A life whose last value is so large that few others fit beside it in a batch."""
    life = [record(rng, story, state) for state in story.states[:-1]]
    blob = base64.b64encode(rng.randbytes(LARGE_BYTES * 3 // 4)).decode()
    return [*life, record(rng, story, {**story.states[-1], "attachment": blob}, fault="large_record")]


def in_transaction(name: str, fate: Fate) -> Fault:
    """A whole life inside of a transaction."""

    def write(rng: Random, story: Story) -> list[Intended]:
        return [replace(made, fault=name, transaction=fate) for made in sound(rng, story)]

    return write


COMMON: Mapping[str, Fault] = {
    "malformed_json": malformed_json,
    "missing_field": missing_field,
    "mistyped_field": mistyped_field,
    "second_delivery": second_delivery,
    "out_of_order": out_of_order,
    "conflict": conflict,
    "tombstone": tombstone,
    "null_key": null_key,
    "wrong_key": wrong_key,
    "large_record": large_record,
    "committed_transaction": in_transaction("committed_transaction", "committed"),
    "aborted_transaction": in_transaction("aborted_transaction", "aborted"),
}
COMMON_RATES: Mapping[str, float] = {
    **dict.fromkeys(COMMON, 0.01),
    # Half a megabyte each: more than a few would only measure the disk.
    "large_record": 0.0003,
    # Each is a transaction of its own, a few round trips with the broker.
    "committed_transaction": 0.002,
    "aborted_transaction": 0.002,
}
