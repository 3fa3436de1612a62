"""Conditions of alerts on a stream's topics: time until retention deletes unread records, and open transactions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from highwater.alerting import Condition
from highwater.errors import TopicAbsentError
from highwater.orchestration.reporting.alert_inputs import StreamInputs
from highwater.orchestration.reporting.consumer_lag import RecordAges
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.topic_rules import find_retention, find_size_limit, has_no_age_limit
from highwater.wording import format_duration

if TYPE_CHECKING:
    from highwater.declaration import Stream


@dataclass(frozen=True)
class _RetentionLeft:
    """The time for which a topic still keeps its oldest unread record.

    Args:
        topic: its name.
        left: None if it takes none for its age.
        limit: below it there is something to warn of.
        ages: the ages of the unread records.
        size: `retention.bytes`, if that is limited: it may take the record at any time.
    """

    topic: str
    left: timedelta | None
    limit: timedelta
    ages: RecordAges
    size: int | None

    @property
    def margin(self) -> timedelta:
        """Below 0 it is to be reported."""
        return timedelta.max if self.left is None else self.left - self.limit

    @property
    def by_size(self) -> str:
        """The limit by size."""
        return "" if self.size is None else f"; retention.bytes={self.size} of {self.topic} may take it before"


def measure_retention_left(inputs: StreamInputs) -> Condition | None:
    """The topic in most danger, among the main topic and every topic whose records are retried."""
    stream = inputs.stream
    found = _measure_times_left(inputs)
    if gone := next((one for one in found if one.ages.expired), None):
        lost = "; ".join(f"partition {p}: {offsets}" for p, offsets in sorted(gone.ages.expired.items()))
        return Condition(
            stream.name,
            "retention before unread records",
            f"retention deleted unread records of {gone.topic}: {lost}",
            str(gone.limit),
            over=True,
            remedy=f"highwater status {stream.name} names the command that records the loss; raise retention.ms of "
            f"{gone.topic}, and see what kept the records from being read",
        )
    worst = min(found, key=lambda one: one.margin, default=None)
    known = any(one.topic == stream.topic for one in found) and all(one.ages.sure for one in found)
    if worst is None or (worst.margin >= timedelta(0) and not known):
        return None
    if worst.left is None:
        sizes = ", ".join(f"retention.bytes={one.size} of {one.topic}" for one in found if one.size is not None)
        why = f"no age ends a record; when {sizes} takes one is not known" if sizes else "the topics keep all"
        return Condition.not_applicable(stream.name, "retention before unread records", why)
    return Condition(
        stream.name,
        "retention before unread records",
        f"{format_duration(worst.left)} until retention takes the oldest unread record of {worst.topic}{worst.by_size}",
        str(worst.limit),
        worst.margin < timedelta(0),
        _read_sooner(stream, worst),
    )


def _measure_times_left(inputs: StreamInputs) -> list[_RetentionLeft]:
    found = []
    for topic in (inputs.stream.topic, *inputs.stream.delays):
        try:
            found += [one] if (one := _measure_time_left(inputs, topic)) is not None else []
        except TopicAbsentError:
            if topic == inputs.stream.topic:
                raise
            # Nothing was published to it yet; if it is gone, the age of retries shows it.
    return found


def measure_open_transaction(inputs: StreamInputs) -> Condition | None:
    """The open transaction that holds records back for longest, by the limit of its topic."""
    stream = inputs.stream
    held = [
        (topic, p, found)
        for topic in _list_existing_topics(inputs)
        for p, found in inputs.measure_ages(topic).held_back.items()
    ]
    if not held:
        return Condition.not_applicable(stream.name, "open transaction", "none holds records back")
    limits = {topic: _compute_held_back_limit(inputs, topic) for topic, _, _ in held}
    known = [(found.age, topic, p, found) for topic, p, found in held if found.age is not None]
    if not known:
        return None
    age, topic, partition, found = max(known, key=lambda one: one[0] - limits[one[1]])
    place = f"--topic {topic} --partition {partition}"
    tool = f"kafka-transactions --bootstrap-server {inputs.kafka.bootstrap}"
    return Condition(
        stream.name,
        "open transaction",
        f"{topic} partition {partition}: {found.offsets:,} offsets from offset {found.offset} on are held back by "
        f"a transaction whose first record is {format_duration(age)} old",
        str(limits[topic]),
        age > limits[topic],
        f"{tool} describe-producers {place} names the producer ID: end that producer. If nobody runs it any more: "
        f"{tool} abort {place} --start-offset {found.offset}",
    )


def _list_existing_topics(inputs: StreamInputs) -> list[str]:
    """The main topic, and those retried topics that exist; the age of retries reports a missing one."""
    found = [inputs.stream.topic]
    for topic in inputs.stream.delays:
        with suppress(TopicAbsentError):
            inputs.measure_ages(topic)
            found.append(topic)
    return found


def _compute_held_back_limit(inputs: StreamInputs, topic: str) -> timedelta:
    retained_for = find_retention(fetch_topic_settings(inputs.kafka, topic))
    limit = inputs.stream.alerts.held_back
    return limit if retained_for is None else min(limit, retained_for / 2)


def _measure_time_left(inputs: StreamInputs, topic: str) -> _RetentionLeft | None:
    """None where the settings of the topic may not be read."""
    settings = fetch_topic_settings(inputs.kafka, topic)
    retained_for, size = find_retention(settings), find_size_limit(settings)
    if retained_for is None:
        if not has_no_age_limit(settings):
            return None
        # A limit by size may have taken records all the same.
        expired = {} if size is None else inputs.measure_ages(topic).expired
        return _RetentionLeft(topic, None, timedelta(0), RecordAges({}, sure=True, expired=expired), size)
    ages = inputs.measure_ages(topic)
    # Where a topic keeps less than the threshold at all, half of what it keeps is what there is to warn of.
    limit = min(inputs.stream.alerts.retention_left, retained_for / 2)
    return _RetentionLeft(topic, retained_for - (ages.oldest or timedelta(0)), limit, ages, size)


def _read_sooner(stream: Stream, worst: _RetentionLeft) -> str:
    waiting = worst.ages.waiting
    planned = f"highwater explain {waiting[0]} shows why it is planned and not read, or " if waiting else ""
    runs = f"the sensor planner runs, that {stream.name} is not paused,"
    if worst.topic != stream.topic:
        runs = f"the sensor dlq_retries runs, that neither {stream.name} nor {worst.topic} is paused,"
    return f"{planned}check that {runs} and read its ticks, or raise retention.ms of {worst.topic}"
