"""Offsets of unread slices that retention deleted, confirmed by a second look at the topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from highwater.resources.kafka import Kafka
from highwater.resources.topic_state import TopicState
from highwater.slices import OffsetRange, Slice


@dataclass(frozen=True)
class ExpiredSlice:
    """A slice, and for each of its partitions the offsets that were deleted before they were read."""

    slice_: Slice
    offsets: Mapping[int, OffsetRange]


def list_expired_slices(kafka: Kafka, topic: str, unread: Iterable[Slice]) -> list[ExpiredSlice]:
    """The slices that lost offsets to retention.

    Slices of another topic that had the same name are left out. Only if offsets seem deleted the topic is looked at a
    second time; the lower log start counts. While a partition has no leader, no slice is called expired: answers may be
    wrong then, and what follows from them is final.

    Args:
        kafka: is looked at.
        topic: the slices' topic.
        unread: slices that were never read, without offsets that are recorded as lost.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: no broker answered in time.
    """
    slices = [*unread]
    if not slices:
        return []
    first = kafka.read_topic_state(topic)
    found = _select_expired(slices, first, _find_log_starts(first))
    if first.leaderless_partitions or not found:
        return []
    second = kafka.look_again(topic)
    if second.leaderless_partitions or second.topic_id != first.topic_id:
        return []
    before, after = _find_log_starts(first), _find_log_starts(second)
    return _select_expired(slices, second, {p: min(start, after[p]) for p, start in before.items() if p in after})


def _find_log_starts(state: TopicState) -> dict[int, int]:
    return {p: seen.log_start for p, seen in state.partitions.items() if seen.known and seen.log_start is not None}


def _select_expired(slices: Iterable[Slice], state: TopicState, log_starts: Mapping[int, int]) -> list[ExpiredSlice]:
    found = []
    for slice_ in slices:
        if slice_.topic_id != state.topic_id:
            continue
        gone = {
            p: OffsetRange(offsets.start, min(offsets.end, log_starts[p]))
            for p, offsets in sorted(slice_.ranges.items())
            if len(offsets) and log_starts.get(p, 0) > offsets.start
        }
        if gone:
            found.append(ExpiredSlice(slice_, gone))
    return found
