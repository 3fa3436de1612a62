"""What a stream declares: topic, schema, key and version, transitions, lookup, limits, tiers, alerts, breaker.

What belongs here: the types of a declaration and the checks that it does not contradict itself.
What does not: the declared streams (`assets/streams/`) and what is done with a declaration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from highwater.errors import DeclarationError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
TOPIC_NAME = "[A-Za-z0-9._-]{1,249}"
_TOPIC = re.compile(TOPIC_NAME)
_TYPE = re.compile(r"string|integer|long|boolean|timestamp|decimal\((\d+),(\d+)\)")
# What neither a path into the JSON value, nor SQL, nor a Delta table's column takes amiss.
_FIELD = re.compile(r"[\w@-]+")
# Dagster's rule; what it refuses would fail all streams as they load, without naming the file.
_OWNER = re.compile(r"team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Z|a-z]{2,7}")
_MOST_DECIMAL_DIGITS = 38

# Columns that every events table has beside the declared fields.
RESERVED_COLUMNS = frozenset(
    {
        "slice",
        "origin_topic",
        "origin_generation",
        "origin_partition",
        "origin_offset",
        "origin_timestamp",
        "attempt",
        "retries",
        "reclaims",
        "key",
        "version",
        "event_time",
        "proof",
        "updated_by_slice",
    }
)


class Start(str, Enum):
    """Where planning begins in a topic that was never planned."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class Field:
    """One field of the JSON value.

    Args:
        name: the name in the JSON object; it becomes the column's name.
        type: `string`, `integer`, `long`, `boolean`, `timestamp` (ISO 8601 with a zone) or
            `decimal(p,s)` (a JSON number that fits without rounding).
        one_of: the values allowed, of a string or a whole number; another one makes the record `invalid`.
        at_least: the least value allowed, of a number; a smaller one makes the record `invalid`.
    """

    name: str
    type: str
    one_of: tuple[str | int, ...] = ()
    at_least: int | None = None


@dataclass(frozen=True)
class Lookup:
    """A field that must be found in a Delta table of the lake, else the record is `unresolved`.

    Args:
        field: the field of the stream that is looked up.
        table: path of the table below the lake, for example `reference/customers`.
        column: the column of the table that must hold the field's value.
    """

    field: str
    table: str
    column: str

    @property
    def dependency(self) -> str:
        """The name of the table's breaker."""
        return f"lookup {self.table}"


@dataclass(frozen=True)
class Transitions:
    """The state machine of a key: `first` is the state of the first version, `allowed` maps state to next states."""

    field: str
    first: str
    allowed: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Limits:
    """How a backlog is cut.

    Args:
        most_records: offsets in one slice at the most, over all partitions.
        fewest_records: a slice is cut at once when so many offsets wait ...
        longest_wait: ... or when the oldest of fewer has waited so long since the last plan.
        slices_a_tick: slices that one tick of the planner cuts at the most.
        slices_a_run: slices that one requested run takes at the most.
    """

    most_records: int = 200_000
    fewest_records: int = 1
    longest_wait: timedelta = timedelta(minutes=1)
    slices_a_tick: int = 100
    slices_a_run: int = 20


@dataclass(frozen=True)
class Foreign:
    """A DLQ topic that another system fills, with Kafka Connect's or Spring's headers. It is only read.

    Args:
        topic: its name.
        delay: how long a record waits there by its timestamp before it is tried; between a second and seven days.
    """

    topic: str
    delay: timedelta


@dataclass(frozen=True)
class Accepted:
    """Where accepted events are sent to, for others to read.

    Args:
        topic: its name.
        horizon: an event is not sent if the same content of its version was accepted before, and published no longer
            than this before it.
    """

    topic: str
    horizon: timedelta = timedelta(days=7)


@dataclass(frozen=True)
class Alerts:
    """Beyond what somebody is to be told.

    Args:
        reject_ratio: rejects among the records of the newest 20 slices, 0 to 1.
        parked: records that wait for a person.
        retries_late: how long after its due time a retry is still in no slice.
        retention_left: time until retention takes the oldest unread record; of a topic that keeps less than twice as
            long half of what it keeps.
        published_late: how long an accepted event may wait until it is sent, of a stream that publishes.
        reclaimed_late: how long what was taken back from the DLQ may wait until its slice is materialised again.
    """

    reject_ratio: float = 0.5
    parked: int = 1_000
    retries_late: timedelta = timedelta(hours=1)
    retention_left: timedelta = timedelta(hours=12)
    published_late: timedelta = timedelta(hours=1)
    reclaimed_late: timedelta = timedelta(hours=1)


@dataclass(frozen=True)
class Metrics:
    """What is measured of each minute of event time.

    Args:
        status: the field of type `string` by whose values (`one_of`) events are counted.
        amount: the field that is summed by them: a decimal of 28 digits at the most, an integer or a long.
        mean_of: the values of `status` whose amounts count in the mean over the moving hour.
    """

    status: str
    amount: str
    mean_of: tuple[str, ...]


# Columns are named after the values.
_COLUMN = re.compile(r"[A-Za-z0-9_]+")
# A sum has ten digits more, and a table's decimals have 38.
MOST_DIGITS = 28
# Begins the names of the columns of the moving hour.
HOUR = "hour"


@dataclass(frozen=True)
class Breaker:
    """When a stream's slices are no longer decided, and when one is tried again.

    Args:
        reject_ratio: rejects among the records of the newest slices from which on it opens, above 0 and up to 1.
        least_records: fewer records than this are not judged.
        slices: first attempts that are looked back at, at the most.
        failures: first attempts in a row that end in an error before it opens; a run of several slices is one.
        cool_down: how long it stays open before one slice is tried.
    """

    reject_ratio: float = 0.5
    least_records: int = 100
    slices: int = 5
    failures: int = 3
    cool_down: timedelta = timedelta(minutes=5)


# `delta.deletedFileRetentionDuration`: Delta's checkpoints forget by then which files were removed when.
LONGEST_HORIZON = timedelta(days=7)
# Repair goes by the runs of the last day.
LEAST_RUNS_FOR = timedelta(days=2)


@dataclass(frozen=True)
class Upkeep:
    """What maintenance keeps of a stream.

    Args:
        live_slices: so many slices, the youngest plans, keep their keys in Dagster at the most; 1 or more.
        live_for: slices planned longer ago lose theirs as well; None for no such limit.
        horizon: data files that no version of a table younger than this needs are removed.
        runs_for: Dagster's runs that ended longer ago and name no live key are deleted; None keeps them.
    """

    live_slices: int = 2_000
    live_for: timedelta | None = None
    horizon: timedelta = LONGEST_HORIZON
    runs_for: timedelta | None = timedelta(days=30)


@dataclass(frozen=True)
class Retention:
    """How long rows are kept, by table; None keeps them forever.

    Args:
        raw: rows of slices whose newest record was published, and that were planned, longer ago than this go; a day
            at least. What keeps them longer, docs/operations.md tells.
        events: forever, so None: rows of events are what `current`, the versions and the ends of records are told by,
            and without its row a second delivery of an event would count as a first.
        rejects: forever, so None: by their rows it is told what waits, is parked or was given up.
    """

    raw: timedelta | None = None
    events: timedelta | None = None
    rejects: timedelta | None = None


class OnReject(str, Enum):
    """What becomes of a record that is no event.

    `HOLD` keeps its slice, and all that come behind it, from being decided until the record is none any more; the
    stream's slices are then decided one at a time, in their order.
    """

    PARK = "park"
    RETRY = "retry"
    HOLD = "hold"


# Of the reasons that `assets.parsing` gives: only a record's own content speaks for the first two.
ON_REJECT: Mapping[str, OnReject] = MappingProxyType(
    {"malformed": OnReject.PARK, "invalid": OnReject.PARK, "unresolved": OnReject.RETRY}
)


class Severity(str, Enum):
    """What a check that fails does.

    `WARN` marks the slice and counts nowhere as an error; `ERROR` counts as one in the audit; `BLOCK` also keeps runs
    from committing what is downstream of the table that was checked.
    """

    WARN = "warn"
    ERROR = "error"
    BLOCK = "block"


# Of `orchestration.checking.checks`. A conflict and a transition are the producer's: the tables are right.
CHECKS: Mapping[str, Severity] = MappingProxyType(
    {
        "slices_tile": Severity.ERROR,
        "offsets_as_planned": Severity.ERROR,
        "gaps_explained": Severity.ERROR,
        "offsets_accounted_for": Severity.ERROR,
        "events_as_recorded": Severity.ERROR,
        "versions_along_offsets": Severity.ERROR,
        "one_content_a_version": Severity.WARN,
        "transitions_allowed": Severity.WARN,
        "no_version_missing": Severity.ERROR,
        "rejects_published": Severity.ERROR,
        "versions_in_order": Severity.ERROR,
        "current_follows_events": Severity.ERROR,
        "metrics_follow_events": Severity.ERROR,
        "events_published": Severity.ERROR,
    }
)
# Those that can be judged before anything downstream of their table is written: the others need what is downstream.
CAN_BLOCK = frozenset(
    {
        "slices_tile",
        "offsets_as_planned",
        "gaps_explained",
        "events_as_recorded",
        "versions_along_offsets",
        "one_content_a_version",
        "transitions_allowed",
        "versions_in_order",
        "current_follows_events",
    }
)

# A tier of less would be planned again before its own slice has run; one of more would outlive what people remember.
SHORTEST_DELAY = timedelta(seconds=1)
LONGEST_DELAY = timedelta(days=7)
# Maintenance runs once a day; what is shorter is a mistake in the unit.
SHORTEST_RETENTION = timedelta(days=1)


@dataclass(frozen=True)
class Answers:
    """What the stream's owners answered to the three questions; shown on the assets' pages."""

    does_order_matter: str
    what_of_doubles: str
    what_on_failure: str


@dataclass(frozen=True)
class Stream:
    """One declared stream.

    Args:
        name: names the assets, the lake's folder and the definitions; lower case, digits and `_`.
        topic: the main topic.
        fields: the fields of the JSON value; `version` and `event_time` name two of them.
        key: the fields whose values, joined by `key_separator`, must equal the record's key in UTF-8; of several
            fields each has a backslash before every backslash and every first character of the separator.
        version: the field that orders the states of a key: an integer or a timestamp.
        event_time: the field of type timestamp that says when it happened.
        key_separator: what stands between the parts of a key of several fields; it holds no backslash.
        start: where planning begins in a topic that was never planned: a `Start`, or a time in ISO 8601 with its zone.
        on_expired: whether offsets that retention took before they were planned stop their partition until a person
            accepts the loss, or are recorded as lost by the planner itself.
        tiers: how long a rejected record waits before its first, second, ... retry: each is a DLQ topic,
            `<topic>.dlq.1` and so on. Between a second and seven days, each longer than the one before.
        on_reject: for each reason whether such a record is retried, parked at once for a person, or holds its slice.
        alerts: beyond what somebody is told.
        foreign: DLQ topics of other systems whose records are retried as if they came from the first tier.
        metrics: what is measured of each minute of event time; without it the stream has no table `metrics`.
        first_version: the number of a key's first version, where each version is one more than the one before it: one
            that is missing is told then. None where versions may have gaps, or are times.
        checks: for each check that shall have another severity than in `CHECKS` which one.
        breaker: when slices are no longer decided.
        publishes: where accepted events are sent to; None if nowhere.
        upkeep: what maintenance keeps.
        retention: how long rows are kept.
    """

    name: str
    topic: str
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    version: str
    event_time: str
    answers: Answers
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
    checks: Mapping[str, Severity] = field(default_factory=lambda: CHECKS)
    breaker: Breaker = field(default_factory=Breaker)
    publishes: Accepted | None = None
    upkeep: Upkeep = field(default_factory=Upkeep)
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise DeclarationError(
                f"stream {self.name!r}: {problem}",
                remedy="mend the declaration in assets/streams/; docs/streams.md lists what it may say",
            )

    def field_named(self, name: str) -> Field:
        """The declared field of that name."""
        return next(f for f in self.fields if f.name == name)

    def severity(self, check: str) -> Severity:
        """What a failure of the check does."""
        return self.checks.get(check, CHECKS.get(check, Severity.ERROR))

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
    def versions_count(self) -> bool:
        """Whether versions are whole numbers, and no times."""
        return self.field_named(self.version).type in {"integer", "long"}

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
        """How long records wait on each topic whose records are retried: the tiers, then those of other systems."""
        tiers = dict(zip(self.tier_topics, self.tiers, strict=True))
        return {**tiers, **{one.topic: one.delay for one in self.foreign}}

    @property
    def namespace(self) -> str:
        """What stands before the topic of an origin that no slice of the main topic reads; no topic's name has a /."""
        return f"{self.topic}.foreign/"

    def is_origin(self, topic: str) -> bool:
        """Whether an origin on this topic is one of the stream's."""
        return topic in self.all_topics or bool(re.fullmatch(re.escape(self.namespace) + TOPIC_NAME, topic))

    @property
    def group(self) -> str:
        """The consumer group that mirrors the progress (I12)."""
        return f"highwater.{self.name}"


def _problems(stream: Stream) -> list[str]:
    names = [f.name for f in stream.fields]
    found = []
    if not _NAME.fullmatch(stream.name):
        found.append("the name must be lower case letters, digits and _")
    found += [_no_topic(topic) for topic in (stream.topic, *stream.dlq_topics) if not _is_topic(topic)]
    if not _OWNER.fullmatch(stream.owner):
        found.append(f"the owner {stream.owner!r} is neither a mail address nor team: and a name")
    found += _name_problems(names)
    found += [problem for declared in stream.fields for problem in _field_problems(declared)]
    used = [*stream.key, stream.version, stream.event_time]
    used += [stream.lookup.field] if stream.lookup else []
    used += [stream.transitions.field] if stream.transitions else []
    used += [stream.metrics.status, stream.metrics.amount] if stream.metrics else []
    found += [f"field {name!r} is used and not declared" for name in used if name not in names]
    found += _key_problems(stream)
    found += _limit_problems(stream.limits)
    found += _start_problems(stream.start)
    found += _reject_problems(stream)
    found += _check_problems(stream)
    found += _alert_problems(stream.alerts)
    found += _breaker_problems(stream.breaker)
    found += _accepted_problems(stream)
    found += _upkeep_problems(stream.upkeep)
    found += _retention_problems(stream.retention)
    if not found:
        found += _typed_problems(stream)
    return found


def _is_topic(name: str) -> bool:
    return bool(_TOPIC.fullmatch(name)) and name not in {".", ".."}


def _no_topic(name: str) -> str:
    return (
        f"{name!r} is no topic name: that is letters, digits, '.', '_' and '-', 249 at the most (found {len(name)}), "
        "and neither '.' nor '..'"
    )


def _name_problems(names: Sequence[str]) -> list[str]:
    found = [
        f"field {name!r}: a name is letters, digits, '_', '-' and '@', one at least"
        for name in names
        if not _FIELD.fullmatch(name)
    ]
    # Spark does not tell upper from lower case.
    found += [
        f"the fields {first!r} and {second!r} would be one column: they must differ in more than case"
        for first, second in combinations(names, 2)
        if first.lower() == second.lower()
    ]
    taken = [name for name in names if name.lower() in RESERVED_COLUMNS and name not in {"version", "event_time"}]
    return found + [f"field {name!r}: the name is taken by the column {name.lower()!r} of Highwater" for name in taken]


def _field_problems(declared: Field) -> list[str]:
    kind = _TYPE.fullmatch(declared.type)
    if kind is None:
        return [f"field {declared.name!r}: unknown type {declared.type!r}"]
    if kind[1] and not (1 <= int(kind[1]) <= _MOST_DECIMAL_DIGITS and int(kind[2]) <= int(kind[1])):
        rule = f"a decimal has 1 to {_MOST_DECIMAL_DIGITS} digits, and no more behind the point than in all"
        return [f"field {declared.name!r}: there is no {declared.type}: {rule}"]
    return _bound_problems(declared, _greatest(declared, kind)) + _choice_problems(declared)


def _greatest(declared: Field, kind: re.Match[str]) -> int | None:
    """The greatest whole number that fits the type and 64 bits; None where it is no number."""
    if kind[1]:
        whole_digits = int(kind[1]) - int(kind[2])
        return min(int("9" * whole_digits or 0), 2**63 - 1)
    return {"integer": 2**31 - 1, "long": 2**63 - 1}.get(declared.type)


def _bound_problems(declared: Field, greatest: int | None) -> list[str]:
    least = declared.at_least
    if least is None:
        return []
    if greatest is None:
        return [f"field {declared.name!r}: at_least is for numbers, and a {declared.type} is none"]
    if least > greatest:
        return [f"field {declared.name!r}: at_least is {least:,}, and {declared.type} takes {greatest:,} at the most"]
    return []


def _choice_problems(declared: Field) -> list[str]:
    wanted = {"string": str, "integer": int, "long": int}.get(declared.type)
    if declared.one_of and wanted is None:
        return [f"field {declared.name!r}: one_of is for strings and whole numbers, and a {declared.type} is neither"]
    unfit = [value for value in declared.one_of if type(value) is not wanted]
    return [f"field {declared.name!r}: one_of has {value!r}, which is no {declared.type}" for value in unfit]


def _key_problems(stream: Stream) -> list[str]:
    if not stream.key:
        return ["no key is declared"]
    found = [f"the key has field {name!r} {n} times" for name, n in Counter(stream.key).items() if n > 1]
    separator = stream.key_separator
    if len(stream.key) > 1 and (not separator or "\\" in separator):
        found.append(f"the key separator {separator!r} must be one character at least, and hold no backslash")
    return found


def _limit_problems(limits: Limits) -> list[str]:
    counts = {name: value for name, value in vars(limits).items() if name != "longest_wait"}
    found = [f"limits: {name} is {value}, and must be 1 or more" for name, value in counts.items() if value < 1]
    if limits.longest_wait < timedelta(0):
        found.append(f"limits: longest_wait is {limits.longest_wait}, and cannot be negative")
    if limits.fewest_records > limits.most_records:
        found.append(f"limits: fewest_records is {limits.fewest_records}, above most_records {limits.most_records}")
    return found


def _alert_problems(alerts: Alerts) -> list[str]:
    found = []
    if not 0 <= alerts.reject_ratio <= 1 or alerts.parked < 0:
        found.append("alerts: the reject ratio must be between 0 and 1, the number of parked records 0 or more")
    times = {name: value for name, value in vars(alerts).items() if isinstance(value, timedelta)}
    negative = {name: value for name, value in times.items() if value < timedelta(0)}
    return found + [f"alerts: {name} is {value}, and cannot be negative" for name, value in negative.items()]


def _breaker_problems(breaker: Breaker) -> list[str]:
    found = []
    if not 0 < breaker.reject_ratio <= 1:
        found.append("breaker: the reject ratio must be above 0 and at most 1")
    if min(breaker.least_records, breaker.slices, breaker.failures) < 1:
        found.append("breaker: least_records, slices and failures must be 1 or more")
    if breaker.cool_down < timedelta(0):
        found.append("breaker: the cool-down cannot be negative")
    return found


def _accepted_problems(stream: Stream) -> list[str]:
    accepted = stream.publishes
    if accepted is None:
        return []
    found = []
    if not _is_topic(accepted.topic):
        found.append(f"publishes: {_no_topic(accepted.topic)}")
    if accepted.topic in stream.all_topics:
        found.append(f"publishes: {accepted.topic!r} is read by the stream itself")
    if accepted.horizon < timedelta(0):
        found.append("publishes: the horizon cannot be negative")
    return found


def _upkeep_problems(upkeep: Upkeep) -> list[str]:
    found = ["upkeep: live_slices must be 1 or more"] if upkeep.live_slices < 1 else []
    if upkeep.live_for is not None and upkeep.live_for <= timedelta(0):
        found.append("upkeep: live_for must be longer than nothing")
    if not timedelta(0) < upkeep.horizon <= LONGEST_HORIZON:
        found.append("upkeep: the horizon must be longer than nothing, and seven days at the most")
    if upkeep.runs_for is not None and upkeep.runs_for < LEAST_RUNS_FOR:
        found.append("upkeep: runs_for must be two days or more: repair goes by the runs of the last one")
    return found


def _retention_problems(retention: Retention) -> list[str]:
    found = []
    if retention.raw is not None and retention.raw < SHORTEST_RETENTION:
        found.append("retention: raw is kept for a day at least")
    if retention.events is not None:
        found.append(
            "retention: events are kept forever: current, the versions and the ends of records are told by them, and "
            "a second delivery of one that is gone would be taken for new; highwater erase removes those of a key"
        )
    if retention.rejects is not None:
        found.append(
            "retention: rejects are kept forever: by them it is told what waits, is parked or was given up; "
            "highwater erase removes those of a key"
        )
    return found


def _reject_problems(stream: Stream) -> list[str]:
    found = []
    if any(not SHORTEST_DELAY <= delay <= LONGEST_DELAY for delay in stream.tiers):
        found.append("a tier's delay must be between a second and seven days")
    found += [
        f"the foreign topic {one.topic!r} must wait between a second and seven days"
        for one in stream.foreign
        if not SHORTEST_DELAY <= one.delay <= LONGEST_DELAY
    ]
    named = stream.foreign_topics
    found += [f"the foreign topic {_no_topic(name)}" for name in named if not _is_topic(name)]
    if list(stream.tiers) != sorted(set(stream.tiers)):
        found.append("each tier must wait longer than the one before it")
    found += [f"on_reject says nothing of {reason!r}" for reason in ON_REJECT if reason not in stream.on_reject]
    found += [
        f"on_reject speaks of {reason!r}, which is no reason; there are {', '.join(ON_REJECT)}"
        for reason in stream.on_reject
        if reason not in ON_REJECT
    ]
    if not stream.tiers and OnReject.RETRY in {how for r, how in stream.on_reject.items() if how != ON_REJECT.get(r)}:
        found.append("on_reject asks for retries, and no tier is declared")
    return found


def _check_problems(stream: Stream) -> list[str]:
    unknown = [
        f"checks speaks of {name!r}, which is no check; there are {', '.join(CHECKS)}"
        for name in stream.checks
        if name not in CHECKS
    ]
    late = [
        f"{name} cannot block, since it needs what is downstream; {', '.join(sorted(CAN_BLOCK))} can"
        for name, severity in stream.checks.items()
        if severity == Severity.BLOCK and name in CHECKS and name not in CAN_BLOCK
    ]
    return unknown + late


def _start_problems(start: Start | str) -> list[str]:
    if start in {*Start}:
        return []
    wanted = "earliest, latest or a time in ISO 8601 with its zone, such as 2026-03-01T00:00:00Z"
    try:
        zone = datetime.fromisoformat(start).tzinfo
    except ValueError:
        return [f"the start {start!r} is none of {wanted}"]
    return [] if zone else [f"the start {start!r} names no zone; give {wanted}"]


def _typed_problems(stream: Stream) -> list[str]:
    found = []
    if stream.field_named(stream.version).type not in {"integer", "long", "timestamp"}:
        found.append("the version must be an integer, a long or a timestamp")
    if stream.field_named(stream.event_time).type != "timestamp":
        found.append("the event time must be a timestamp")
    found += [
        f"a field named {name!r} must be the stream's {name}"
        for name in ("version", "event_time")
        if name in [f.name for f in stream.fields] and getattr(stream, name) != name
    ]
    if stream.first_version is not None and not stream.versions_count:
        found.append("first_version is for versions that count: an integer or a long")
    return [*found, *_metrics_problems(stream)]


def _metrics_problems(stream: Stream) -> list[str]:
    if stream.metrics is None:
        return []
    found, status = [], stream.field_named(stream.metrics.status)
    if status.type != "string" or not status.one_of:
        found.append(f"metrics: field {status.name!r} must be a string with one_of: its values become columns")
    unfit = [value for value in status.one_of if not _COLUMN.fullmatch(str(value))]
    found += [f"metrics: {value!r} cannot be part of a column's name: letters, digits and _" for value in unfit]
    if len({str(value).lower() for value in (*status.one_of, HOUR)}) <= len(status.one_of):
        found.append(f"metrics: values of {status.name!r} must differ in more than case, and none be {HOUR!r}")
    found += [
        f"metrics: mean_of: {v!r} is no value of {status.name!r}"
        for v in stream.metrics.mean_of
        if v not in status.one_of
    ]
    digits = _TYPE.fullmatch(stream.field_named(stream.metrics.amount).type)
    summed = digits and (digits[0] in {"integer", "long"} or (digits[1] and int(digits[1]) <= MOST_DIGITS))
    if not summed:
        found.append(
            f"metrics: the amount must be an integer, a long, or a decimal of {MOST_DIGITS} digits at the most"
        )
    return found
