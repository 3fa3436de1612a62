"""Unread records that retention is about to take: they are planned at once, and read before all others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import timedelta

from highwater.declaration import Stream
from highwater.errors import HighwaterError
from highwater.resources.kafka import Kafka
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.resources.topic_state import TopicState
from highwater.slices import Slice
from highwater.topic_rules import find_retention

# For a topic with a retention below the margin: its records are read in their turn for a quarter of that time.
RETENTION_SHARE = 0.75
# Of the margin: what is left of it is for the run.
WAIT_SHARE = 0.1


def compute_margin(stream: Stream, retained_for: timedelta) -> timedelta:
    """The time before retention takes them at which unread records come first; never later than the alert."""
    return min(max(stream.limits.retention_margin, stream.alerts.retention_left), retained_for * RETENTION_SHARE)


def fetch_endangered_ends(kafka: Kafka, stream: Stream, topic: str, state: TopicState | None = None) -> dict[int, int]:
    """For each partition the offset before which retention takes records within the margin.

    Empty where the topic keeps all, or its settings may not be read. Retention by size cannot be foreseen.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: no broker answered in time.
    """
    retained_for = find_retention(fetch_topic_settings(kafka, topic))
    if retained_for is None:
        return {}
    oldest = time.time_ns() // 1_000_000 - (retained_for - compute_margin(stream, retained_for)) // timedelta(
        milliseconds=1
    )
    return kafka.read_offsets_at(topic, max(oldest, 0), state)


def compute_longest_wait(kafka: Kafka, stream: Stream, slices: Iterable[Slice], most: timedelta) -> timedelta:
    """How long unread slices may be left without a look: a tenth of the shortest margin at the most.

    Args:
        kafka: is asked for the retention of their topics.
        stream: the declaration.
        slices: unread ones.
        most: never longer.

    Raises:
        TopicAbsentError: a topic does not exist.
        DependencyUnavailableError: no broker answered in time.
    """
    retained = [find_retention(fetch_topic_settings(kafka, topic)) for topic in {slice_.topic for slice_ in slices}]
    return min([most, *(compute_margin(stream, one) * WAIT_SHARE for one in retained if one is not None)])


def list_endangered_slices(
    kafka: Kafka, stream: Stream, slices: Iterable[Slice], state: TopicState | None = None
) -> frozenset[str]:
    """The unread slices that retention takes records of within the margin; none where that cannot be asked.

    Args:
        kafka: is asked.
        stream: the declaration.
        slices: unread ones.
        state: a look at a topic that was taken just now.
    """
    by_topic: dict[str, list[Slice]] = {}
    for slice_ in slices:
        by_topic.setdefault(slice_.topic, []).append(slice_)
    found: set[str] = set()
    for topic, some_slices in by_topic.items():
        try:
            ends = fetch_endangered_ends(kafka, stream, topic, state if state and state.topic == topic else None)
        except HighwaterError:
            continue  # they are read in their turn, and the alert of retention has its own look
        found |= {slice_.key for slice_ in some_slices if is_endangered(slice_, ends)}
    return frozenset(found)


def is_endangered(slice_: Slice, ends: Mapping[int, int]) -> bool:
    """Whether a slice has offsets before these ends."""
    return any(len(offsets) and offsets.start < ends.get(p, 0) for p, offsets in slice_.ranges.items())
