"""Where a rejected record goes, when it is due, and what its envelope says: pure functions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from highwater.declaration import OnReject, Start
from highwater.declaration_parts import ON_REJECT
from highwater.envelope import MAX_BYTES, PREFIX, Envelope, add_envelope, open_envelope, remove_envelope
from highwater.errors import DeclarationError
from highwater.routing import (
    RETRY_JITTER,
    build_stream_of_topic,
    build_tier_stream,
    compute_retry_delay,
    find_destination,
    find_tier,
    format_topic_option,
)


@pytest.mark.parametrize(
    ("reason", "retries", "topic"),
    [
        ("unresolved", 0, "orders.dlq.1"),
        ("unresolved", 1, "orders.dlq.2"),
        ("unresolved", 2, "orders.dlq.3"),
        ("unresolved", 3, "orders.parked"),
        ("unresolved", 2**40, "orders.parked"),
        ("malformed", 0, "orders.parked"),
        ("invalid", 1, "orders.parked"),
    ],
)
def test_a_record_goes_through_the_tiers_and_is_parked(reason: str, retries: int, topic: str) -> None:
    assert find_destination(ORDERS, reason, retries) == topic


def test_the_declaration_decides() -> None:
    parked = replace(ORDERS, on_reject={**ON_REJECT, "unresolved": OnReject.PARK, "invalid": OnReject.RETRY})
    assert find_destination(parked, "unresolved", 0) == "orders.parked"
    assert find_destination(parked, "invalid", 0) == "orders.dlq.1"
    assert find_destination(PAYMENTS, "unresolved", 0) == "payments.parked", "without tiers every reject is parked"


@st.composite
def declared(draw: st.DrawFn) -> tuple[int, dict[str, OnReject]]:
    """How many tiers a stream has, and what becomes of each reason; without a tier nothing is retried."""
    tiers = draw(st.integers(0, 5))
    ways = [way for way in OnReject if tiers or way != OnReject.RETRY]
    return tiers, {reason: draw(st.sampled_from(ways)) for reason in ON_REJECT}


@given(declared(), st.sampled_from(sorted(ON_REJECT)), st.integers(0, 8), st.booleans())
def test_every_record_goes_where_the_table_of_the_documentation_says(
    stream: tuple[int, dict[str, OnReject]], reason: str, retries: int, park: bool
) -> None:
    """The model counts down the places that are left to a record, as the table in docs/dlq.md has them."""
    tiers, how = stream
    made = replace(
        ORDERS, tiers=tuple(timedelta(minutes=n) for n in range(1, tiers + 1)), on_reject=how, breaker=ORDERS.breaker
    )
    left = [f"orders.dlq.{n}" for n in range(1, tiers + 1)][retries:]
    if how[reason] == OnReject.PARK:
        left = []
    if how[reason] == OnReject.HOLD and park and retries == 0:  # on a tier it holds nothing, and is retried
        left = []
    assert find_destination(made, reason, retries, park=park) == [*left, "orders.parked"][0]


DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tiers": (timedelta(milliseconds=999),)}, "between a second and seven days"),
        ({"tiers": (8 * DAY,)}, "between a second and seven days"),
        ({"tiers": (DAY, DAY)}, "longer than the one before"),
        ({"tiers": (2 * DAY, DAY)}, "longer than the one before"),
        ({"on_reject": {"malformed": OnReject.PARK}}, "says nothing of"),
        ({"on_reject": {**ON_REJECT, "odd": OnReject.PARK}}, "unknown reason 'odd'"),
        ({"tiers": (), "on_reject": {**ON_REJECT, "invalid": OnReject.RETRY}}, "no tier is declared"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        replace(ORDERS, **changes)  # type: ignore[arg-type]


@given(st.timedeltas(timedelta(seconds=1), timedelta(days=7)), st.text(min_size=1))
def test_nothing_is_due_before_its_delay_nor_a_fifth_after_it(delay: timedelta, key: str) -> None:
    assert delay <= compute_retry_delay(delay, key) <= delay * (1 + RETRY_JITTER)
    assert compute_retry_delay(delay, key) == compute_retry_delay(delay, key)


def test_slices_of_a_tier_do_not_come_back_together() -> None:
    waits = {compute_retry_delay(DAY, f"orders.dlq.1@{n:07d}") for n in range(100)}
    assert len(waits) == 100
    assert max(waits) - min(waits) > DAY * RETRY_JITTER * 0.8


def test_a_tier_is_planned_from_its_beginning_and_at_once() -> None:
    tier = build_tier_stream(replace(ORDERS, start=Start.LATEST), "orders.dlq.2")
    assert (tier.topic, tier.start, tier.limits.min_offsets) == ("orders.dlq.2", Start.EARLIEST, 1)
    assert tier.publishes is None, "what the stream has published is no sign that the tier was planned before"
    assert [find_tier(ORDERS, topic) for topic in ("orders", *ORDERS.tier_topics)] == [0, 1, 2, 3]
    assert build_stream_of_topic(ORDERS, "orders.dlq.2").topic == "orders.dlq.2"
    assert build_stream_of_topic(ORDERS, None) is build_stream_of_topic(ORDERS, "orders") is ORDERS
    assert (format_topic_option(ORDERS, "orders"), format_topic_option(tier, "orders.dlq.2")) == (
        "",
        " --topic orders.dlq.2",
    )


def envelope(**changes: object) -> Envelope:
    sound = Envelope("orders", 0, 1, 42, 1_700_000_000_000, 1, "unresolved", "late", "orders@0000001", BEGIN)
    return replace(sound, **changes)  # type: ignore[arg-type]


BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
HEADERS = st.lists(st.tuples(st.text(), st.none() | st.binary()))


@given(HEADERS)
def test_headers_pass_through_and_do_not_grow(own: list[tuple[str, bytes | None]]) -> None:
    once = add_envelope(envelope(), own)
    again = add_envelope(envelope(attempt=2), once)
    assert remove_envelope(again) == [header for header in own if not header[0].startswith(PREFIX)]
    assert len(again) == len(once)
    assert dict(again)["highwater.attempt"] == b"2"


@pytest.mark.parametrize("rule", [None, "amount_positive"])
def test_an_envelope_names_the_rule_that_refused_its_record(rule: str | None) -> None:
    sent = envelope(reason="invalid", rule=rule)
    assert dict(sent.to_headers()).get("highwater.rule") == (None if rule is None else rule.encode())
    assert open_envelope(sent.to_headers()) == sent


def test_an_envelope_stays_within_its_room() -> None:
    wide = envelope(topic="t" * 249, rule="r" * 100_000, detail="d" * 100_000, slice_key="s" * 270)
    assert sum(len(name) + len(value or b"") for name, value in wide.to_headers()) < MAX_BYTES


def test_a_partition_that_could_not_be_asked_is_not_taken_for_due() -> None:
    from highwater.orchestration.sensing.retries import _limit_to_due
    from highwater.resources.topic_state import PartitionState

    seen = PartitionState(0, 100, 100, 1)
    assert _limit_to_due(seen, None, 0).last_stable is None
    assert _limit_to_due(seen, 40, 0).last_stable == 40
    assert _limit_to_due(seen, 40, 60).last_stable == 60, "the next slice may wait longer than the one before"
    assert _limit_to_due(seen, 40, 120).last_stable == 100, "a log that really ends before its plan is not hidden"
