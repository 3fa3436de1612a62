"""How far the group may be, compared with a model that follows single records and not offsets.

In the model each record is a number of its own: where other records come to occupy the same offsets, they differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.mirroring import MirrorMark, compute_finished_prefix
from highwater.plans import Generation, Loss, Planned
from highwater.slices import OffsetRange, Slice

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@dataclass
class Model:
    """A topic, what was planned of it, and in which order."""

    topic_id: str = "a"
    logs: list[list[int]] = field(default_factory=lambda: [[], []])
    generations: list[Generation] = field(default_factory=lambda: [Generation("s", "t", "a", 0, {0: 0, 1: 0}, NOW)])
    slices: list[Slice] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    # What was planned or exhausted of the topic that is there, in its order: the slice's key, or None; and the records.
    journal: list[tuple[str | None, set[int]]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    records: count[int] = field(default_factory=count)

    @property
    def planned(self) -> Planned:
        return Planned.from_generation(self.generations[-1], self.slices[-1] if self.slices else None, self.losses)

    def end(self, partition: int) -> int:
        return self.planned.ends.get(partition, 0)

    def write(self, partition: int, number: int) -> None:
        log = self.logs[partition % len(self.logs)]
        log += [next(self.records) for _ in range(number)]

    def plan(self, first: int, others: int) -> None:
        """A slice of a number of offsets of partition 0 and of the others at the most."""
        starts = {p: self.end(p) for p in range(len(self.logs))}
        most = {p: first if p == 0 else others for p in starts}
        ranges = {p: OffsetRange(s, max(s, min(len(self.logs[p]), s + most[p]))) for p, s in starts.items()}
        slice_ = Slice("s", "t", self.topic_id, self.generations[-1].number, len(self.slices), ranges, NOW)
        self.slices.append(slice_)
        self.journal.append((slice_.key, {n for p, r in ranges.items() for n in self.logs[p][r.start : r.end]}))

    def lose(self, partition: int, number: int) -> None:
        """Retention takes what was not planned yet, and that is accepted."""
        partition %= len(self.logs)
        hole = OffsetRange(self.end(partition), max(self.end(partition), min(len(self.logs[partition]), number)))
        if len(hole):
            generation = self.generations[-1].number
            self.losses.append(Loss("s", "t", generation, partition, hole, "expired", "ann", NOW))
            self.journal.append((None, set(self.logs[partition][hole.start : hole.end])))

    def cut(self, partition: int, at: int) -> None:
        """The log ends at an offset before its planned end, and that is accepted; what comes then is something else."""
        partition %= len(self.logs)
        at %= self.end(partition) + 1
        del self.logs[partition][at:]
        ends = {p: self.end(p) for p in range(len(self.logs)) if p in self.planned.ends}
        self._open({**ends, partition: at})

    def recreate(self, log_start: int) -> None:
        """Another topic comes under the name; what was there before it was looked at is never planned."""
        self.topic_id += "a"
        self.logs = [[next(self.records) for _ in range(log_start)] for _ in self.logs]
        self.journal = [(None, {n for log in self.logs for n in log})]
        self._open(dict.fromkeys(range(len(self.logs)), log_start))

    def _open(self, starts: dict[int, int]) -> None:
        last = self.generations[-1]
        self.generations.append(replace(last, topic_id=self.topic_id, number=last.number + 1, starts=starts))

    def add_partition(self) -> None:
        self.logs.append([])

    def settle(self, number: int) -> None:
        if self.slices:
            self.done.add(self.slices[number % len(self.slices)].key)

    @property
    def expected(self) -> dict[int, int]:
        """For each partition how many records from the first on are in slices that are done, without a gap in them."""
        leading = takewhile(lambda entry: entry[0] is None or entry[0] in self.done, self.journal)
        passed = set().union(*[records for _, records in leading])
        return {p: len([*takewhile(passed.__contains__, log)]) for p, log in enumerate(self.logs)}


small = st.integers(0, 6)
steps = st.one_of(
    st.tuples(st.just("write"), small, st.integers(1, 8)),
    st.tuples(st.just("plan"), small, small),
    st.tuples(st.just("lose"), small, small),
    st.tuples(st.just("cut"), small, small),
    st.tuples(st.just("recreate"), small),
    st.tuples(st.just("add_partition")),
    # Often enough that a prefix grows.
    *[st.tuples(st.just("settle"), st.integers(0, 30))] * 4,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40), st.integers(0, 3))
def test_the_group_is_where_the_first_record_is_that_is_not_done(
    history: list[tuple[str, int, int]], known: int
) -> None:
    """Slices done in any order, holes, empty ranges, new partitions, logs that are cut off, and new topics.

    Leading slices that are known to be done need not be given again, nor those of a topic that is gone.
    """
    model = Model()
    for name, *arguments in history:
        getattr(model, name)(*arguments)
    mine = [slice_ for slice_ in model.slices if slice_.topic_id == model.topic_id]
    leading = len([*takewhile(lambda slice_: slice_.key in model.done, mine)])
    given_now = mine[min(known, leading) :] if known else model.slices
    found = compute_finished_prefix(given_now, model.done, model.planned, model.generations)
    assert {p: found.get(p, 0) for p in model.expected} == model.expected


def test_a_partition_whose_start_is_not_decided_has_no_offset() -> None:
    generation = Generation("s", "t", "a", 0, {0: 5, 1: None}, NOW)
    assert compute_finished_prefix([], set(), Planned.from_generation(generation, None, []), [generation]) == {0: 5}


def test_slices_of_a_topic_that_is_gone_hold_up_nothing() -> None:
    old = Generation("s", "t", "a", 0, {0: 0}, NOW)
    new = replace(old, topic_id="b", number=1, starts={0: 7})
    unread = Slice("s", "t", "a", 0, 0, {0: OffsetRange(0, 100)}, NOW)
    assert compute_finished_prefix([unread], set(), Planned.from_generation(new, unread, []), [old, new]) == {0: 7}


def test_a_generation_that_was_opened_after_the_look_holds_back_what_was_done_before() -> None:
    before = Generation("s", "t", "a", 0, {0: 0}, NOW)
    slice_ = Slice("s", "t", "a", 0, 0, {0: OffsetRange(0, 100)}, NOW)
    opened = replace(before, number=1, starts={0: 60})
    assert compute_finished_prefix(
        [slice_], {slice_.key}, Planned.from_generation(before, slice_, []), [before, opened]
    ) == {0: 60}


def test_a_mark_reads_as_it_was_written() -> None:
    slice_ = Slice("s", "t", "a", 0, 0, {p: OffsetRange(10**15, 10**16) for p in range(1_000)}, NOW)
    mark = MirrorMark.from_last_slice("id", slice_, NOW + timedelta(microseconds=3))
    assert MirrorMark.from_json(mark.to_json()) == mark
    assert len(mark.to_json()) < 500, "a broker takes 4,096 bytes"
    assert MirrorMark.from_json(MirrorMark.from_last_slice("id", None, NOW).to_json()) == MirrorMark("id", "", "", NOW)


@pytest.mark.parametrize(
    "text",
    [None, "", "{}", "[]", "17", "no JSON", '{"at":"2026-03-01"}', '{"at":"2026-03-01T00:00:00","topic_id":"a"}'],
)
def test_metadata_of_other_writers_is_no_mark(text: str | None) -> None:
    assert MirrorMark.from_json(text) is None
