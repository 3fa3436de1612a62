"""The rule of planning, compared with a model that counts offsets one by one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assets.streams.orders import STREAM
from highwater.declaration import Limits, Stream
from highwater.divergence import Divergence, Fingerprint
from highwater.errors import (
    OffsetsExpiredError,
    PartitionsRemovedError,
    TopicRecreatedError,
    TopicTruncatedError,
)
from highwater.orchestration.operations.acceptance import compute_acceptance
from highwater.orchestration.sensing import topic_planner
from highwater.orchestration.sensing.slice_cutting import SlicePlan, compute_fair_shares, cut_slices
from highwater.plans import Generation, Loss, Planned
from highwater.resources.time_limits import limit_time, limit_wait
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
EAGER = replace(STREAM, limits=Limits(max_offsets=10, slices_per_tick=3))


def led(log_start: int, last_stable: int, high_watermark: int | None = None) -> PartitionState:
    return PartitionState(log_start, last_stable, max(last_stable, high_watermark or 0), 1, 0)


LEADERLESS = PartitionState(None, None, None, None)


def topic(*partitions: PartitionState, topic_id: str = "Id") -> TopicState:
    return TopicState("orders", topic_id, dict(enumerate(partitions)))


def planned(ends: Mapping[int, int], *, ordinal: int | None = None, ago: float = 60.0, **changes: object) -> Planned:
    """A plan that ends there, made by a slice of that ordinal or by a cold start."""
    generation = Generation("orders", "orders", "Id", 0, dict(ends), NOON - timedelta(seconds=ago))
    generation = replace(generation, **changes)  # type: ignore[arg-type]
    if ordinal is None:
        return Planned.from_generation(generation, None, [])
    ranges = {p: OffsetRange(0, end) for p, end in ends.items()}
    last = Slice("orders", "orders", "Id", generation.number, ordinal, ranges, NOON - timedelta(seconds=ago))
    return Planned.from_generation(generation, last, [])


@dataclass
class Model:
    """A ledger and a topic that are lists: every offset that was ever planned, in its order."""

    stream: Stream
    generation: Generation
    slices: list[Slice] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def tick(self, state: TopicState, now: datetime = NOON) -> SlicePlan:
        last = self.slices[-1] if self.slices else None
        result = cut_slices(self.stream, Planned.from_generation(self.generation, last, self.losses), state, now)
        self.slices += result.slices
        self.losses += result.losses
        return result

    def count(self) -> Counter[tuple[int, int]]:
        """How often each offset of each partition was planned."""
        return Counter((p, o) for s in self.slices for p, r in s.ranges.items() for o in range(r.start, r.end))


@dataclass(frozen=True)
class Event:
    """What happens to a partition between two ticks."""

    partition: int
    written: int
    open_transaction: int
    led: bool


events = st.lists(
    st.builds(Event, st.integers(0, 4), st.integers(0, 35), st.integers(0, 3), st.booleans()), max_size=25
)


@pytest.mark.slow
@settings(max_examples=300)
@given(events, st.integers(1, 30), st.integers(1, 4), st.integers(1, 12))
def test_every_stable_offset_is_planned_once_and_none_beyond(
    happened: list[Event], most: int, a_tick: int, fewest: int
) -> None:
    limits = Limits(max_offsets=most, min_offsets=min(fewest, most), slices_per_tick=a_tick)
    model = Model(replace(STREAM, limits=limits), Generation("orders", "orders", "Id", 0, {0: 0}, NOON))
    ends, stable, leaderless, known = {0: 0}, {0: 0}, set[int](), {0}
    for number, event in enumerate(happened):
        known |= set(range(event.partition + 1))
        ends = {p: ends.get(p, 0) + (event.written if p == event.partition else 0) for p in known}
        stable = {p: stable.get(p, 0) for p in known}
        stable[event.partition] = max(stable[event.partition], ends[event.partition] - event.open_transaction)
        leaderless = leaderless - {event.partition} if event.led else leaderless | {event.partition}
        seen = [LEADERLESS if p in leaderless else led(0, stable[p], ends[p]) for p in sorted(known)]
        result = model.tick(topic(*seen), NOON + timedelta(seconds=number))
        assert set(result.skipped) == leaderless
        assert len(result.slices) <= a_tick
        assert all(0 < slice_.offsets <= most for slice_ in result.slices)
        assert set(model.count()) <= {(p, o) for p in known for o in range(stable[p])}
    for _ in range(2 + sum(ends.values())):
        # Everything commits, every partition has a leader again, and the longest wait is over.
        model.tick(topic(*[led(0, ends[p]) for p in sorted(known)]), NOON + timedelta(hours=1 + len(model.slices)))
    assert model.count() == Counter((p, o) for p in known for o in range(ends[p]))
    assert [slice_.ordinal for slice_ in model.slices] == list(range(len(model.slices)))


@given(events)
def test_slices_tile(happened: list[Event]) -> None:
    model = Model(EAGER, Generation("orders", "orders", "Id", 0, {0: 0}, NOON))
    ends = dict.fromkeys(range(5), 0)
    for event in happened:
        ends[event.partition] += event.written
        model.tick(topic(*[led(0, end) for end in ends.values()]))
    for one, following in pairwise(model.slices):
        assert set(one.ranges) <= set(following.ranges)
        assert all(r.is_followed_by(following.ranges[p]) for p, r in one.ranges.items())


backlogs = st.dictionaries(st.integers(0, 9), st.integers(0, 1000), min_size=1)


@given(backlogs, st.integers(1, 500), st.integers(0, 50))
def test_shares_fill_the_slice_and_differ_by_one_at_the_most(left: dict[int, int], most: int, turn: int) -> None:
    shares = compute_fair_shares(left, most, turn)
    assert sum(shares.values()) == min(most, sum(left.values()))
    assert all(0 <= shares[p] <= left[p] for p in left)
    unsated = [shares[p] for p in left if shares[p] < left[p]]
    # A partition that gets less than it could take gets as much as any other, but for the remainder of the division.
    assert all(share + 1 >= max(shares.values()) for share in unsated)


def test_a_partition_with_most_of_the_backlog_neither_starves_others_nor_waits() -> None:
    assert compute_fair_shares({0: 900, 1: 40, 2: 60}, 200) == {0: 100, 1: 40, 2: 60}
    assert compute_fair_shares({0: 900, 1: 400, 2: 300}, 300) == {0: 100, 1: 100, 2: 100}


def test_with_fewer_offsets_than_partitions_each_has_its_turn() -> None:
    """Shares went to the first partitions in order: with a steady inflow the last one was never planned."""
    taken: Counter[int] = Counter()
    for turn in range(15):
        taken.update(compute_fair_shares(dict.fromkeys(range(5), 100), 2, turn))
    assert set(taken.values()) == {6}


def test_planning_ends_at_the_last_stable_offset() -> None:
    result = cut_slices(STREAM, planned({0: 0}), topic(led(0, 5, 9)), NOON)
    assert result.slices[0].ranges == {0: OffsetRange(0, 5)}


def test_a_partition_without_a_leader_gets_an_empty_range_and_is_named() -> None:
    result = cut_slices(STREAM, planned({0: 0, 1: 7}), topic(led(0, 3), LEADERLESS), NOON)
    assert result.slices[0].ranges == {0: OffsetRange(0, 3), 1: OffsetRange(7, 7)}
    assert result.skipped == {1: "no leader"}


def test_a_partition_that_joins_starts_at_zero() -> None:
    result = cut_slices(STREAM, planned({0: 3}), topic(led(0, 3), led(0, 2)), NOON)
    assert result.slices[0].ranges == {0: OffsetRange(3, 3), 1: OffsetRange(0, 2)}


def test_a_partition_that_joins_and_expired_before_it_was_seen_is_no_silent_loss() -> None:
    result = cut_slices(STREAM, planned({0: 3}), topic(led(0, 4), led(2, 9)), NOON)
    assert isinstance(result.errors[1], OffsetsExpiredError)
    assert result.slices[0].ranges == {0: OffsetRange(3, 4), 1: OffsetRange(0, 0)}


def test_a_start_that_is_not_decided_yet_is_left_out_and_named() -> None:
    before = planned({0: 0}, starts={0: 0, 1: None})
    result = cut_slices(STREAM, before, topic(led(0, 3), led(0, 9)), NOON)
    assert result.slices[0].ranges == {0: OffsetRange(0, 3)}
    assert result.skipped == {1: "no start is decided yet"}


@pytest.mark.parametrize(
    ("seen", "error", "found"),
    [
        (led(5, 9), OffsetsExpiredError, "log start offset 5"),
        (led(0, 3), TopicTruncatedError, "last stable offset 3"),
        (led(0, 0), TopicTruncatedError, "last stable offset 0"),
    ],
)
def test_a_partition_that_cannot_go_on_stops_alone(seen: PartitionState, error: type[Exception], found: str) -> None:
    result = cut_slices(STREAM, planned({0: 4, 1: 0}), topic(seen, led(0, 2)), NOON)
    assert type(result.errors[0]) is error
    assert (result.errors[0].stored, result.errors[0].found) == ("planned to offset 4", found)
    assert "highwater accept-loss orders --partition 0" in result.errors[0].remedy
    assert result.slices[0].ranges == {0: OffsetRange(4, 4), 1: OffsetRange(0, 2)}


def test_a_partition_that_is_gone_stops_alone() -> None:
    result = cut_slices(STREAM, planned({0: 0, 1: 4}), topic(led(0, 2)), NOON)
    assert isinstance(result.errors[1], PartitionsRemovedError)
    assert result.slices[0].ranges == {0: OffsetRange(0, 2), 1: OffsetRange(4, 4)}


def test_replaced_records_stop_their_partition() -> None:
    result = cut_slices(STREAM, planned({0: 4, 1: 0}, ordinal=0), topic(led(0, 9), led(0, 2)), NOON, Divergence({0: 3}))
    assert isinstance(result.errors[0], TopicTruncatedError)
    assert "ends at offset 3" in str(result.errors[0].found)
    assert result.slices[0].ranges[0] == OffsetRange(4, 4)


def test_a_recreated_topic_is_not_planned() -> None:
    with pytest.raises(TopicRecreatedError) as caught:
        cut_slices(STREAM, planned({0: 4}), topic(led(0, 9), topic_id="Other"), NOON)
    assert (caught.value.stored, caught.value.found) == ("topic ID Id", "topic ID Other")
    assert "highwater accept-loss orders" in caught.value.remedy


def test_a_stream_may_let_expired_offsets_be_recorded() -> None:
    stream = replace(STREAM, on_expired="record")
    result = cut_slices(stream, planned({0: 4, 1: 0}), topic(led(6, 9), led(0, 0)), NOON)
    [loss] = result.losses
    assert (loss.partition, loss.offsets, loss.accepted_by) == (0, OffsetRange(4, 6), "on_expired=record")
    assert result.slices[0].ranges[0] == OffsetRange(6, 9)
    assert not result.errors


WAITING = replace(STREAM, limits=Limits(max_offsets=10, min_offsets=4, max_wait=timedelta(seconds=30)))


@pytest.mark.parametrize(
    ("offsets", "seconds_ago", "slices"),
    [(3, 29, 0), (3, 30, 1), (4, 0, 1), (0, 99, 0), (13, 0, 1), (14, 0, 2), (23, 99, 2), (3, -5, 0), (3, -3600, 1)],
)
def test_few_records_wait_until_the_longest_wait_is_over(offsets: int, seconds_ago: int, slices: int) -> None:
    """After a clock was set back by an hour, few records waited for an hour."""
    before = planned({0: 0}, ordinal=6, ago=seconds_ago)
    result = cut_slices(WAITING, replace(before, ends={0: 0}), topic(led(0, offsets)), NOON)
    assert len(result.slices) == slices
    assert (result.waiting is not None) == (slices == 0 and offsets > 0)


def test_nothing_is_cut_beside_runs_that_wait_in_the_queue() -> None:
    result = cut_slices(EAGER, planned({0: 0}), topic(led(0, 42)), NOON, queued_runs=2)
    assert (result.slices, result.lag) == ((), {0: 42})
    assert result.waiting == "42 offsets wait for room in the queue, where 2 runs wait; slices are larger then"
    assert cut_slices(EAGER, planned({0: 42}), topic(led(0, 42)), NOON, queued_runs=2).waiting is None


def test_lag_and_time_of_planning_stand_in_the_slice() -> None:
    result = cut_slices(EAGER, planned({0: 0}), topic(led(0, 42)), NOON)
    assert [slice_.lag for slice_ in result.slices] == [32, 22, 12]
    assert result.lag == {0: 12}
    behind = planned({0: 0}, ordinal=3, ago=-5)  # planned by a machine whose clock is 5 s ahead
    later = cut_slices(EAGER, behind, topic(led(0, 42)), NOON)
    assert {slice_.planned_at for slice_ in later.slices} == {NOON + timedelta(seconds=5)}


def unread(ordinal: int, generation: int = 0, **ranges: tuple[int, int]) -> Slice:
    parts = {int(name[1:]): OffsetRange(*pair) for name, pair in ranges.items()}
    return Slice("orders", "orders", "Id", generation, ordinal, parts, NOON)


def holes(losses: tuple[Loss, ...]) -> set[tuple[int, int, int, int]]:
    return {(loss.generation, loss.partition, loss.offsets.start, loss.offsets.end) for loss in losses}


def test_accepting_expired_offsets_goes_on_at_the_log_start() -> None:
    before, seen = planned({0: 4, 1: 2}, ordinal=0), topic(led(6, 9), led(0, 2))
    found = compute_acceptance(STREAM, before, seen, [], by="ann", now=NOON)
    assert holes(found.losses) == {(0, 0, 4, 6)}
    assert found.losses[0].accepted_by == "ann"
    assert found.opened is None
    after = Planned.from_generation(before.generation, before.last, found.losses)
    assert cut_slices(STREAM, after, seen, NOON).slices[0].ranges == {0: OffsetRange(6, 9), 1: OffsetRange(2, 2)}


def test_a_slice_that_was_never_read_loses_what_expired_and_keeps_the_rest() -> None:
    before, seen = planned({0: 9, 1: 9}, ordinal=2), topic(led(6, 9), led(0, 9))
    left = [unread(0, p0=(0, 4), p1=(0, 4)), unread(1, p0=(4, 8), p1=(4, 9)), unread(2, p0=(8, 9))]
    found = compute_acceptance(STREAM, before, seen, left, by="ann", now=NOON)
    assert holes(found.losses) == {(0, 0, 0, 4), (0, 0, 4, 6)}
    assert Planned.from_generation(before.generation, before.last, found.losses).ends == {0: 9, 1: 9}


def test_only_the_named_partition_is_accepted() -> None:
    before, seen = planned({0: 4, 1: 4}, ordinal=0), topic(led(6, 9), led(5, 9))
    assert holes(compute_acceptance(STREAM, before, seen, [], by="ann", now=NOON, partitions={1}).losses) == {
        (0, 1, 4, 5)
    }


def test_accepting_a_truncated_partition_goes_on_there_in_a_new_generation() -> None:
    before, seen = planned({0: 9, 1: 5}, ordinal=7), topic(led(0, 4), led(0, 8))
    found = compute_acceptance(STREAM, before, seen, [unread(7, p0=(2, 9), p1=(3, 5))], by="ann", now=NOON)
    assert holes(found.losses) == {(0, 0, 4, 9)}
    assert found.opened is not None
    assert (found.opened.number, found.opened.topic_id, found.opened.starts) == (1, "Id", {0: 4, 1: 5})
    after = Planned.from_generation(found.opened, before.last, found.losses)
    [slice_] = cut_slices(STREAM, after, seen, NOON).slices
    assert (slice_.ordinal, slice_.generation, slice_.ranges) == (8, 1, {0: OffsetRange(4, 4), 1: OffsetRange(5, 8)})


def test_accepting_a_recreated_topic_starts_with_the_new_one() -> None:
    before, seen = planned({0: 9, 1: 5}, ordinal=7), topic(led(2, 4), LEADERLESS, topic_id="New")
    found = compute_acceptance(STREAM, before, seen, [unread(7, p0=(2, 9), p1=(5, 5))], by="ann", now=NOON)
    assert holes(found.losses) == {(0, 0, 2, 9)}
    assert found.opened is not None
    assert (found.opened.number, found.opened.topic_id, found.opened.starts) == (1, "New", {0: 2, 1: None})
    after = Planned.from_generation(found.opened, before.last, found.losses)
    [slice_] = cut_slices(STREAM, after, seen, NOON).slices
    assert (slice_.key, slice_.topic_id, slice_.ranges) == ("orders@0000008", "New", {0: OffsetRange(2, 4)})


def test_where_nothing_is_lost_there_is_nothing_to_accept() -> None:
    before = planned({0: 4}, ordinal=0)
    assert compute_acceptance(STREAM, before, topic(led(0, 9)), [unread(0, p0=(0, 4))], by="ann", now=NOON).nothing


def _marked(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], object], slices: int = 6) -> list[list[int]]:
    """The offsets of the marks of some slices of ten records, each looked at by `look`, with its ordinal."""

    def fingerprints(_: object, topic: str, ranges: Mapping[int, OffsetRange]) -> dict[int, Fingerprint]:
        assert topic == "orders"
        look(ranges[0].start // 10)
        return {0: Fingerprint(ranges[0].end - 1, "")}

    monkeypatch.setattr(topic_planner, "read_fingerprints", fingerprints)
    made = [
        Slice(
            "orders",
            "orders",
            "Id",
            0,
            n,
            {0: OffsetRange(10 * n, 10 * n + 10)},
            NOON,
            fingerprints={0: Fingerprint(0, "")},
        )
        for n in range(slices)
    ]
    nobody = cast("Any", None)
    result = topic_planner.Planner(nobody, nobody)._with_fingerprints(topic(led(0, 100)), SlicePlan(slices=tuple(made)))
    return [[mark.offset for mark in slice_.fingerprints.values()] for slice_ in result.slices]


def test_looks_in_threads_end_with_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with limit_time(5.0):
        _marked(monkeypatch, lambda _: waits.append(limit_wait(100.0)))
    assert len(waits) == 6
    assert max(waits) <= 5.0


def test_the_last_records_of_several_slices_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(topic_planner.LOOKS_AT_ONCE)
    found = _marked(monkeypatch, lambda _: together.wait(30), 2 * topic_planner.LOOKS_AT_ONCE)
    assert found == [[10 * n + 9] for n in range(2 * topic_planner.LOOKS_AT_ONCE)]


def test_where_looking_takes_too_long_the_newest_slice_has_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is compared with it; the others keep the mark from before."""
    clock = [0.0]
    monkeypatch.setattr(topic_planner, "LOOKS_AT_ONCE", 1)
    monkeypatch.setattr(topic_planner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert _marked(monkeypatch, lambda _: clock.append(clock.pop() + topic_planner.FINGERPRINT_SECONDS), 3) == [
        [0],
        [0],
        [29],
    ]
