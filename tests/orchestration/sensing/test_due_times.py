"""When what waits in a tier is due, by the times of its first and its last record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.reporting.audit_report import _build_dlq_row as audited
from highwater.orchestration.reporting.plan_status import _read_tier_status
from highwater.orchestration.reporting.status_report import DlqStatus, StreamStatus
from highwater.orchestration.sensing.retries import plan_tier
from highwater.plans import Generation
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.conftest import create_topic
from tests.helpers.lagging import FakeTimedMessage
from tests.helpers.support import Message as Record
from tests.helpers.support import make_stream, send

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

# Nothing comes due while the tests run, however long they take.
DELAY = timedelta(days=1)
STREAM = replace(make_stream("orders"), tiers=(DELAY,))
[TIER] = STREAM.tier_topics
BEGUN = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=10)


@dataclass
class FakeTier:
    """A tier whose record at offset n of partition p came n seconds and p minutes after its beginning.

    Args:
        ends: of its partitions.
        markers: offsets without a record.
        unavailable: no reads are answered.
    """

    ends: dict[int, int]
    markers: frozenset[int] = frozenset()
    unavailable: bool = False

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, "A", {p: PartitionState(0, end, end, 1) for p, end in self.ends.items()})

    def read_offsets_at(self, _: str, ms: int, state: TopicState) -> dict[int, int]:
        came = {p: datetime.fromtimestamp(ms / 1000, UTC) - BEGUN - timedelta(minutes=p) for p in state.partitions}
        return {p: min(max(0, int(since.total_seconds())), self.ends[p]) for p, since in came.items()}

    def read(self, _: str, ranges: Mapping[int, OffsetRange], **__: object) -> Iterator[FakeTimedMessage]:
        if self.unavailable:
            raise DependencyUnavailableError("no broker answered", remedy="start it")
        assert all(len(offsets) <= 20 for offsets in ranges.values()), "not all that waits is read"
        at = [(p, n) for p, r in ranges.items() for n in range(r.start, r.end) if n not in self.markers]
        return (FakeTimedMessage(BEGUN + timedelta(minutes=p, seconds=n)) for p, n in at)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The tier is planned to offset 5 of partition 0, and not at all in partition 1."""
    made = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    made.topics.open_generation(Generation("orders", TIER, "A", 0, {0: 0, 1: 0}, BEGUN))
    made.add([Slice("orders", TIER, "A", 0, 0, {0: OffsetRange(0, 5), 1: OffsetRange(0, 0)}, BEGUN)])
    return made


def look(ledger: Ledger, tier: Any) -> DlqStatus:
    return _read_tier_status(ledger, tier, STREAM, TIER)


def jitter(key: str) -> float:
    """As docs/dlq.md says: up to a fifth more, by the slice's key."""
    return 0.2 * int.from_bytes(sha256(key.encode()).digest()[:4], "big") / 2**32


def test_the_first_waits_by_the_key_of_the_next_slice_and_the_last_at_the_longest(ledger: Ledger) -> None:
    found = look(ledger, FakeTier({0: 100, 1: 40}))
    assert found.times is not None
    expected = BEGUN + timedelta(seconds=5) + DELAY * (1 + jitter(f"{TIER}@0000001"))
    assert abs(found.times.next_due - expected) < timedelta(seconds=1)
    assert found.times.all_due == BEGUN + timedelta(seconds=99) + DELAY * 1.2
    assert (found.waiting, found.due) == (135, 0)
    assert found.line.endswith(
        f"the first from {expected:%Y-%m-%d %H:%M}:{found.times.next_due:%S} UTC on, all by "
        f"{found.times.all_due:%Y-%m-%d %H:%M:%S} UTC"
    )


def test_times_of_what_is_due_already_lie_in_the_past(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(STREAM), "delays", property(lambda _: {TIER: timedelta(seconds=1)}))
    found = look(ledger, FakeTier({0: 100, 1: 40}))
    assert (found.waiting, found.due) == (135, 135)
    assert found.times is not None
    assert found.times.next_due < found.times.all_due < datetime.now(UTC)


def test_markers_have_no_time(ledger: Ledger) -> None:
    found = look(ledger, FakeTier({0: 9, 1: 0}, frozenset({5, 8})))
    assert found.times is not None
    assert found.times.all_due == BEGUN + timedelta(seconds=7) + DELAY * 1.2
    nothing = look(ledger, FakeTier({0: 7, 1: 0}, frozenset({5, 6})))
    assert (nothing.waiting, nothing.times) == (2, None)


def test_where_nothing_waits_or_can_be_read_there_are_none(ledger: Ledger) -> None:
    assert look(ledger, FakeTier({0: 5, 1: 0})).times is None
    unavailable = look(ledger, FakeTier({0: 9, 1: 0}, unavailable=True))
    assert (unavailable.waiting, unavailable.times, unavailable.error) == (4, None, None)


@pytest.mark.parametrize("ordinal", [1, 2, 3, 40, 5000])
def test_retries_are_bounded_by_delay_and_jitter_of_the_slice(ledger: Ledger, ordinal: int) -> None:
    """The question to the broker is the whole bound: what it asks for later is retried too early."""
    asked: list[int] = []

    class RecordingTier(FakeTier):
        def read_offsets_at(self, topic: str, ms: int, state: TopicState) -> dict[int, int]:
            asked.append(ms)
            return super().read_offsets_at(topic, ms, state)

    nothing = {0: OffsetRange(5, 5), 1: OffsetRange(0, 0)}
    ledger.add([Slice("orders", TIER, "A", 0, n, nothing, BEGUN) for n in range(1, ordinal)][-1:])
    kafka: Any = RecordingTier({0: 100, 1: 40})
    now = BEGUN + DELAY * (1 + jitter(f"{TIER}@{ordinal:07}")) + timedelta(seconds=30, milliseconds=1)
    planned = plan_tier(ledger, kafka, STREAM, TIER, now, dry_run=True)
    assert asked == pytest.approx([(BEGUN.timestamp() + 30) * 1000], abs=2)
    [slice_] = planned.slices
    assert (slice_.ordinal, slice_.ranges[0]) == (ordinal, OffsetRange(5, 30))


def test_whatever_its_key_a_slice_waits_for_the_delay_and_at_most_a_fifth_more(ledger: Ledger) -> None:
    kafka: Any = FakeTier({0: 100, 1: 0})
    first, last = BEGUN + timedelta(seconds=5), BEGUN + timedelta(seconds=100)
    nothing = {0: OffsetRange(5, 5), 1: OffsetRange(0, 0)}
    for ordinal in range(1, 60):
        early = plan_tier(ledger, kafka, STREAM, TIER, first + DELAY, dry_run=True)
        assert early.slices == (), "nothing came before the delay"
        [slice_] = plan_tier(ledger, kafka, STREAM, TIER, last + DELAY * 1.2, dry_run=True).slices
        assert (slice_.ordinal, slice_.ranges[0]) == (ordinal, OffsetRange(5, 100))
        ledger.add([Slice("orders", TIER, "A", 0, ordinal, nothing, BEGUN)])


@pytest.mark.slow
def test_an_open_transaction_holds_up_what_follows_it_alone(
    bootstrap: str, topic: TopicFactory, ledger: Ledger
) -> None:
    from confluent_kafka import Producer

    stream = replace(make_stream(topic()), tiers=(timedelta(seconds=1),))
    [tier] = stream.tier_topics
    create_topic(bootstrap, tier, 1, {"message.timestamp.type": "LogAppendTime"})
    kafka = Kafka(bootstrap)
    sender = Producer({"bootstrap.servers": bootstrap, "transactional.id": tier})
    sender.init_transactions(60)

    def retried() -> list[OffsetRange]:
        """What is planned when all has waited long enough."""
        return [slice_.ranges[0] for slice_ in plan_tier(ledger, kafka, stream, tier, datetime.now(UTC) + DELAY).slices]

    send(bootstrap, tier, [Record(b"k", b"before")])
    sender.begin_transaction()
    sender.produce(tier, b"open", b"k", partition=0)
    assert sender.flush(60) == 0
    send(bootstrap, tier, [Record(b"k", b"behind")])
    assert retried() == [OffsetRange(0, 1)]
    assert retried() == []
    sender.commit_transaction(60)
    wait_until(lambda: kafka.read_topic_state(tier).partitions[0].last_stable == 4, 60, "the end of the transaction")
    assert retried() == [OffsetRange(1, 4)]


@pytest.mark.parametrize("ms", [10**15, 10**18, 253_402_300_799_000])
def test_where_a_clock_names_a_year_that_there_is_not_there_are_none(ledger: Ledger, ms: int) -> None:
    """A producer sets the times of another system's topic: status and audit ended with a ValueError.

    The last of them is the end of the year 9999, which a delay goes beyond.
    """

    class FarMessage:
        def timestamp(self) -> tuple[int, int]:
            return 1, ms

    class FarClockTier(FakeTier):
        def read(self, *_: object, **__: object) -> Iterator[Any]:
            return iter([FarMessage()])

    found = look(ledger, FarClockTier({0: 9, 1: 0}))
    assert (found.waiting, found.times, found.error) == (4, None, None)


def test_page_and_json_have_both(ledger: Ledger) -> None:
    one, none = look(ledger, FakeTier({0: 100, 1: 40})), look(ledger, FakeTier({0: 5, 1: 0}))
    assert one.times is not None
    texts = [f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in (one.times.next_due, one.times.all_due)]
    assert (audited(one)[3:5], audited(none)[3:5]) == (texts, ["", ""])
    plain = StreamStatus("orders", "orders", 0, 0, "A", dlq=[one, none]).to_plain()["dlq"]
    assert (plain[0]["next_due"], plain[0]["all_due"]) == (
        one.times.next_due.isoformat(),
        one.times.all_due.isoformat(),
    )
    assert (plain[1]["next_due"], "times" in plain[1]) == (None, False)
