"""The declaration of a stream: topic, schema, key and version, transitions, lookup, limits, tiers, alerts, breaker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

from highwater.declaration_parts import (
    CHECK_SEVERITIES,
    ON_REJECT,
    TOPIC_NAME,
    Accepted,
    Alerts,
    Answers,
    Breaker,
    Deletes,
    Field,
    Foreign,
    Limits,
    Lookup,
    Maintenance,
    Metrics,
    OnReject,
    Retention,
    Severity,
    Start,
    Transitions,
    UnknownFields,
)
from highwater.declaration_rules import find_problems
from highwater.errors import DeclarationError
from highwater.formats import Format, Json, KeyFormat, Text
from highwater.record_key_fields import build_record_key_field
from highwater.sources import Key, Rest

# The names that a stream file imports from here.
__all__ = [
    "Accepted",
    "Alerts",
    "Answers",
    "Breaker",
    "Deletes",
    "Field",
    "Foreign",
    "Limits",
    "Lookup",
    "Maintenance",
    "Metrics",
    "OnReject",
    "Retention",
    "Severity",
    "Start",
    "Stream",
    "Transitions",
    "UnknownFields",
]


@dataclass(frozen=True)
class Stream:
    """One declared stream.

    Args:
        name: names the assets, the lake's folder and the definitions; lower case, digits and `_`.
        topic: the main topic.
        fields: the fields of the value, the record's key and its headers; `version` and `event_time` name two of them.
        key: the fields whose values, joined by `key_separator`, are the key of an event; of several fields each has a
            backslash before every backslash and every first character of the separator. None: events have no key.
        version: the field that orders the states of a key: an integer, a long or a timestamp; or several such fields,
            most significant first. None, required without a key: the stream is append-only, without `current` and
            without checks of versions.
        event_time: the field of type timestamp that says when it happened; None for the record's timestamp.
        key_separator: separates the parts of a key of several fields; it holds no backslash.
        start: where planning begins in a topic that was never planned: a `Start`, or a time in ISO 8601 with its zone.
        on_expired: whether offsets that retention took before they were read stop their partition, or their slice,
            until a person accepts the loss, or are recorded as lost by the planner and by the slice's run.
        tiers: how long a rejected record waits before its first, second, ... retry: each is a DLQ topic,
            `<topic>.dlq.1` and so on. Between a second and seven days, each longer than the one before.
        on_reject: for each reason whether such a record is retried, parked at once for a person, or holds its slice.
        alerts: the thresholds above which an alert is sent.
        foreign: DLQ topics of other systems whose records are retried as if they came from the first tier.
        metrics: the measures of each minute of event time; without it the stream has no table `metrics`.
        first_version: the number of a key's first version, where each version is one more than the one before it: one
            that is missing is reported then. None where versions may have gaps, or are times.
        checks: by name the severity of each check whose severity differs from `CHECK_SEVERITIES`.
        breaker: when slices are no longer decided.
        publishes: where accepted events are sent to; None if nowhere.
        maintenance: limits of maintenance.
        retention: how long rows are kept.
        value: the format of record values.
        key_format: the format of record keys, which fields with the source `Key` are taken from.
        record_key: whether a record whose own key is not `key` is a reject (`strict`), counted by the check
            `record_keys_as_declared` (`warn`), or nothing of interest (`ignore`). A key of the format `Text` is
            compared as a text with the column `key`, a key of another format field by field: see `record_key_fields`.
        deletes: which records delete their key; None where none does.
        unknown_fields: treatment of members of a record that no field is taken from.
        rules: conditions of Spark SQL over the fields, by name; a record that violates one is `invalid`. A null
            condition counts as satisfied; a record on which one fails is `invalid`.
    """

    name: str
    topic: str
    fields: tuple[Field, ...]
    key: tuple[str, ...] = ()
    version: str | tuple[str, ...] | None = None
    event_time: str | None = None
    answers: Answers = field(kw_only=True)
    value: Format = field(default_factory=Json)
    key_format: KeyFormat = field(default_factory=Text)
    record_key: Literal["strict", "warn", "ignore"] = "warn"
    deletes: Deletes | None = None
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    rules: Mapping[str, str] = field(default_factory=dict)
    owner: str = "team:data-platform"
    description: str = ""
    key_separator: str = "|"
    start: Start | str = Start.EARLIEST
    transitions: Transitions | None = None
    lookup: Lookup | None = None
    limits: Limits = field(default_factory=Limits)
    on_expired: Literal["stop", "record"] = "stop"
    tiers: tuple[timedelta, ...] = ()
    on_reject: Mapping[str, OnReject] = field(default_factory=lambda: ON_REJECT)
    alerts: Alerts = field(default_factory=Alerts)
    foreign: tuple[Foreign, ...] = ()
    metrics: Metrics | None = None
    first_version: int | None = None
    checks: Mapping[str, Severity] = field(default_factory=lambda: CHECK_SEVERITIES)
    breaker: Breaker = field(default_factory=Breaker)
    publishes: Accepted | None = None
    maintenance: Maintenance = field(default_factory=Maintenance)
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        for problem in find_problems(self):
            raise DeclarationError(
                f"stream {self.name!r}: {problem}",
                remedy="fix the declaration in its file; docs/streams.md lists what it may say",
            )

    def find_field(self, name: str) -> Field:
        """The declared field of that name."""
        return next(f for f in self.fields if f.name == name)

    @property
    def stored_fields(self) -> tuple[Field, ...]:
        """The fields that are columns of events."""
        return tuple(f for f in self.fields if f.is_stored)

    def select_taken_members(self, path: tuple[str, ...]) -> frozenset[str]:
        """The names of the members that fields are taken from, of the object at a path into the value."""
        paths = [one for f in self.fields if f.expression is None for one in f.sources if isinstance(one, tuple)]
        return frozenset(one[len(path)] for one in paths if len(one) > len(path) and one[: len(path)] == path)

    @property
    def reads_all_members(self) -> bool:
        """Whether members of the value matter that no field is taken from."""
        sources = [one for f in self.fields if f.expression is None for one in f.sources]
        return self.unknown_fields.policy == "reject" or any(isinstance(one, Rest) for one in sources)

    def find_severity(self, check: str) -> Severity:
        """The effect of a failure of the check."""
        return self.checks.get(check, CHECK_SEVERITIES.get(check, Severity.ERROR))

    @property
    def blocks(self) -> bool:
        """Whether a check of the stream blocks."""
        return Severity.BLOCK in self.checks.values()

    @property
    def holding(self) -> frozenset[str]:
        """The reasons that hold a slice of the main topic."""
        return frozenset(reason for reason, how in self.on_reject.items() if how == OnReject.HOLD)

    @property
    def ordered(self) -> bool:
        """Whether slices of the main topic are decided one at a time, in their order."""
        return bool(self.holding)

    @property
    def versioned(self) -> bool:
        """Whether events have keys and versions, so that the stream has a table `current`."""
        return self.version is not None

    @property
    def tombstones_delete(self) -> bool:
        """Whether a record without a value deletes its key."""
        return self.deletes is not None and self.deletes.tombstones

    @property
    def reads_key(self) -> bool:
        """Whether a field is taken from the record's key."""
        read = [one for one in self.fields if one.is_read]
        return any(isinstance(source, Key) for one in read for source in one.sources)

    @cached_property
    def compares_decoded_keys(self) -> bool:
        """Whether records' keys are decoded to be compared: not a text, nor a key that all fields are taken from."""
        if self.record_key == "ignore" or isinstance(self.key_format, Text):
            return False
        return any(one.sources != self.find_field(one.name).sources for one in self.record_key_fields)

    @property
    def decodes_key(self) -> bool:
        """Whether records' keys are decoded."""
        return self.reads_key or self.compares_decoded_keys

    @property
    def needs_readable_key(self) -> bool:
        """Whether a record whose key cannot be decoded is a reject."""
        return self.reads_key or (self.compares_decoded_keys and self.record_key == "strict")

    @property
    def has_record_key(self) -> bool:
        """Whether the key of each event is that of its record, byte for byte."""
        return self.record_key == "strict" and isinstance(self.key_format, Text)

    @cached_property
    def record_key_fields(self) -> tuple[Field, ...]:
        """The fields of the key as a decoded record key has them."""
        alone = len(self.key) == 1
        return tuple(build_record_key_field(self.find_field(name), self.key_format, alone=alone) for name in self.key)

    @property
    def versions_count(self) -> bool:
        """Whether versions are whole numbers: neither times nor several fields."""
        return len(self.version_fields) == 1 and self.find_field(self.version_fields[0]).type in {"integer", "long"}

    @property
    def version_fields(self) -> tuple[str, ...]:
        """The names of the fields that are the version, the one that counts most first; empty without a version."""
        if self.version is None:
            return ()
        return (self.version,) if isinstance(self.version, str) else self.version

    @property
    def never_negative(self) -> frozenset[str]:
        """The names of whole numbers that are one of several parts of the version: as texts only these are in order."""
        if len(self.version_fields) < 2:
            return frozenset()
        return frozenset(name for name in self.version_fields if self.find_field(name).type != "timestamp")

    @cached_property
    def required_fields(self) -> frozenset[str]:
        """The names of the fields that are key, version or event time, which no event lacks."""
        return frozenset({*self.key, *self.version_fields, *([self.event_time] if self.event_time else [])})

    @property
    def partitions_name(self) -> str:
        """The name of the dynamic partitions definition."""
        return f"{self.name}_slices"

    @property
    def tier_topics(self) -> tuple[str, ...]:
        """The DLQ topics whose records are retried, in the order in which a record goes through them."""
        return tuple(f"{self.topic}.dlq.{number}" for number, _ in enumerate(self.tiers, 1))

    @property
    def parked_topic(self) -> str:
        """The topic of records that wait for a person."""
        return f"{self.topic}.parked"

    @property
    def dlq_topics(self) -> tuple[str, ...]:
        """The tiers and the parked topic."""
        return (*self.tier_topics, self.parked_topic)

    @property
    def published_topics(self) -> tuple[str, ...]:
        """The topics that its records are sent to."""
        accepted = () if self.publishes is None else (self.publishes.topic,)
        return (*self.dlq_topics, *accepted)

    @property
    def foreign_topics(self) -> tuple[str, ...]:
        """The DLQ topics of other systems whose records are retried."""
        return tuple(one.topic for one in self.foreign)

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The main topic, the tiers, the parked topic and those of other systems."""
        return (self.topic, *self.dlq_topics, *self.foreign_topics)

    @property
    def delays(self) -> dict[str, timedelta]:
        """The delay of each topic whose records are retried: the tiers, then those of other systems."""
        tiers = dict(zip(self.tier_topics, self.tiers, strict=True))
        return {**tiers, **{one.topic: one.delay for one in self.foreign}}

    @property
    def namespace(self) -> str:
        """The prefix of an origin's topic that no slice of the main topic reads; no topic's name has a /."""
        return f"{self.topic}.foreign/"

    def is_origin(self, topic: str) -> bool:
        """Whether an origin on this topic is one of the stream's."""
        return topic in self.all_topics or bool(re.fullmatch(re.escape(self.namespace) + TOPIC_NAME, topic))

    @property
    def group(self) -> str:
        """The consumer group that mirrors the progress (I12)."""
        return f"highwater.{self.name}"
