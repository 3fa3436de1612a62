"""The parts of a declaration: fields, deletes, lookups, limits, alerts, breaker, maintenance, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from highwater.reject_reasons import INVALID, MALFORMED, SCHEMA, UNRESOLVED
from highwater.sources import Header, Key, Meta, Reference, Rest, Source, split_path

TOPIC_NAME = "[A-Za-z0-9._-]{1,249}"


def fold_case(name: str) -> str:
    """A name as Spark compares columns: letter by letter without case, so that the letters I of Turkish are one."""
    upper = [one.upper() if len(one.upper()) == 1 else one for one in name]
    return "".join(one.lower()[0] for one in upper)


# A version of several fields is a text in which each whole number has as many digits as the largest `long`.
VERSION_DIGITS = 19
VERSION_SEPARATOR = "|"

# Columns that every events table has beside the declared fields.
RESERVED_COLUMNS = frozenset(
    {
        "slice",
        "origin_topic",
        "origin_generation",
        "origin_partition",
        "origin_offset",
        "origin_timestamp",
        "origin_timestamp_ms",
        "attempt",
        "retries",
        "reclaims",
        "key",
        "version",
        "event_time",
        "updated_by_slice",
        "deleted",
    }
)


class Start(str, Enum):
    """The offset at which planning begins in a topic that was never planned."""

    EARLIEST = "earliest"
    LATEST = "latest"


# How many microseconds a unit of a `timestamp` has that is a number.
UNITS: Mapping[str, Fraction] = MappingProxyType(
    {"s": Fraction(10**6), "ms": Fraction(1000), "us": Fraction(1), "ns": Fraction(1, 1000)}
)
NUMBERS = frozenset({"integer", "long", "float", "double"})


@dataclass(frozen=True)
class Field:
    """One field of a record, which becomes a column.

    Args:
        name: the column's name and, without a source, the name in the JSON object.
        type: `string`, `integer`, `long`, `float`, `double`, `boolean`, `timestamp`, `timestamp_ntz` (without a zone),
            `date`, `time` (ISO 8601, as text), `binary` (base64), `json` (any value, as text), `decimal(p,s)` (a number
            that fits without rounding), `array`, `map` (keys are text) or `struct`.
        one_of: the values allowed, of a string or a whole number; another one makes the record `invalid`.
        at_least: the least value allowed, of a number; a smaller one makes the record `invalid`.
        source: where the value is taken from. If several are named, the first one that the record has counts. A
            `Reference` must be the only one; with it `nullable` allows a null in the found row, and `optional` a record
            without a value to look up.
        optional: the value may be absent: `default` then.
        nullable: the value may be null in the record.
        default: the value for an absent one; None is null.
        text: a number may also be written as a text.
        unit: a `timestamp` is a number in `s`, `ms`, `us` or `ns` since 1970, a `date` one in `days`, a `time` one in
            `ms` or `us` since midnight; None for text in ISO 8601.
        zone: the zone of a `timestamp` in ISO 8601 that names none, such as `Europe/Berlin`.
        plausible: first and last day of a `timestamp` that is a number, in UTC: another unit misses them by far.
        nan: treatment of NaN and infinities, which are no JSON, in a `float` or a `double`.
        rounded: a `decimal` with more digits after the point is rounded, half up; otherwise it is a reject.
        unscaled: a `decimal` is base64 of its unscaled value, a two's complement number with the highest byte first, as
            Kafka Connect's JsonConverter writes it.
        of: the elements of an `array` or the values of a `map`, one field whose name says nothing; of a `struct` its
            members, whose sources are paths in the struct.
        expression: the value as an expression of Spark SQL over the other fields, in the place of a source. A
            record on which it fails, such as by a division by zero, is `malformed`.
        mask: what events get in place of the value: `hash`, the SHA-256 of its text in UTF-8, as 64 lower-case
            hexadecimal digits, null for null; or `drop`, no column. Rules, expressions, lookups and deletes see the
            value itself. Not for key, version and event time.
    """

    name: str
    type: str
    one_of: tuple[str | int, ...] = ()
    at_least: int | None = None
    source: Source | tuple[Source, ...] | None = None
    optional: bool = False
    nullable: bool = False
    default: str | int | float | bool | None = None
    text: bool = False
    unit: Literal["s", "ms", "us", "ns", "days"] | None = None
    zone: str | None = None
    plausible: tuple[date, date] = (date(1980, 1, 1), date(2099, 12, 31))
    nan: Literal["reject", "null", "keep"] = "reject"
    rounded: bool = False
    unscaled: bool = False
    of: Field | tuple[Field, ...] = ()
    expression: str | None = None
    mask: Literal["hash", "drop"] | None = None

    @property
    def members(self) -> tuple[Field, ...]:
        """The fields inside of it: an element, a map's value, or a struct's members."""
        return self.of if isinstance(self.of, tuple) else (self.of,)

    @cached_property
    def sources(self) -> tuple[Key | Header | Meta | Reference | Rest | tuple[str, ...], ...]:
        """The sources of the value: the first one that is there counts; a path into the value as its names."""
        if self.source is None:
            return ((self.name,),)
        given = self.source if isinstance(self.source, tuple) else (self.source,)
        return tuple(split_path(one) if isinstance(one, str) else one for one in given)

    @property
    def reference(self) -> str | None:
        """The column of the lookup's table that the value is taken from; None of other fields."""
        return self.source.column if isinstance(self.source, Reference) else None

    @cached_property
    def is_read(self) -> bool:
        """Whether the value comes from the record: neither from an expression nor from the lookup's table."""
        return self.expression is None and self.reference is None

    @property
    def may_be_null(self) -> bool:
        """Whether the column of an event may be null."""
        return self.nullable or (self.optional and self.default is None) or self.nan == "null"

    @property
    def is_stored(self) -> bool:
        """Whether the field is a column of events."""
        return self.mask != "drop"

    @property
    def is_number(self) -> bool:
        """Whether the type is one of numbers."""
        return self.type in NUMBERS or self.type.startswith("decimal")


@dataclass(frozen=True)
class Deletes:
    """The records that delete their key. A delete is a version of the key: an older event never restores it.

    In a record that deletes, fields other than the key, the version and the event time may be absent or null.

    Args:
        field: a declared field of type `string`, `boolean`, `integer` or `long`; None where only tombstones delete.
        values: the values of that field that delete.
        tombstones: whether a record without a value deletes too. Key, version and event time must then come from the
            record's key, headers, or what Kafka says of it. Otherwise a tombstone is counted and does nothing.
    """

    field: str | None = None
    values: tuple[str | int | bool, ...] = ()
    tombstones: bool = False


@dataclass(frozen=True)
class UnknownFields:
    """The rule for members of a record that no field is taken from; a field with the source `Rest` collects them.

    Args:
        policy: `ignore` leaves them in raw alone. `reject` makes the record a reject with the reason `schema`. `add`
            adds a column to events and current for each member that a schema of the registry names; its type is that
            of the schema, and it is null in records without the member.
        within: the path of the object whose members are meant, such as `after`; empty for the value itself.
    """

    policy: Literal["ignore", "reject", "add"] = "ignore"
    within: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        """The names on the way to the object, outermost first."""
        return split_path(self.within) if self.within else ()


@dataclass(frozen=True)
class Lookup:
    """A field that must be found in a Delta table of the lake, else the record is `unresolved`.

    Fields with the source `Reference` take columns of the row that is found.

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
    """The state machine of a key, for the check `transitions_allowed`.

    Args:
        field: name of the field that holds the state.
        first: state of the first version.
        allowed: for each state the states that may follow.
    """

    field: str
    first: str
    allowed: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Limits:
    """The limits by which a backlog is cut.

    Args:
        max_offsets: offsets in one slice at the most, over all partitions.
        min_offsets: a slice is cut at once when this many offsets wait ...
        max_wait: ... or when the oldest of fewer has waited so long since the last plan.
        slices_per_tick: slices that one tick of the planner cuts at the most.
        slices_per_run: slices that one requested run takes at the most.
        retention_margin: records that are not read so long before retention takes them are planned at once, and read
            before all others; of a topic that keeps less, after a quarter of that time. Never less than
            `Alerts.retention_left`.
    """

    max_offsets: int = 200_000
    min_offsets: int = 1
    max_wait: timedelta = timedelta(minutes=1)
    slices_per_tick: int = 100
    slices_per_run: int = 20
    retention_margin: timedelta = timedelta(hours=24)


@dataclass(frozen=True)
class Foreign:
    """A DLQ topic that another system fills, with headers of Kafka Connect, Kafka Streams or Spring. It is only read.

    Args:
        topic: its name.
        delay: how long a record waits there by its timestamp before it is tried; between a second and seven days.
    """

    topic: str
    delay: timedelta


@dataclass(frozen=True)
class Accepted:
    """The topic to which accepted events are sent, for others to read.

    Args:
        topic: its name.
        horizon: an event is not sent if the same content of its version was accepted before, and published no longer
            than this before it.
    """

    topic: str
    horizon: timedelta = timedelta(days=7)


@dataclass(frozen=True)
class Alerts:
    """The thresholds above which an alert is sent.

    Args:
        reject_ratio: rejects among the records of the newest 20 slices, 0 to 1.
        parked: records that wait for a person.
        retries_late: how long after its due time a retry is still not in raw.
        retention_left: time until retention takes the oldest unread record; half of the topic's retention if that is
            shorter.
        unread_late: how long a planned slice may wait until it is in raw.
        held_back: how old the first record of an open transaction may be; half of the topic's retention if that
            is shorter.
        published_late: how long an accepted event may wait until it is sent, of a stream that publishes.
        reclaimed_late: how long what was reclaimed from the DLQ may wait until its slice is materialised again.
    """

    reject_ratio: float = 0.5
    parked: int = 1_000
    retries_late: timedelta = timedelta(hours=1)
    retention_left: timedelta = timedelta(hours=12)
    unread_late: timedelta = timedelta(hours=6)
    # A broker ends a transaction after 15 minutes at the latest (`transaction.max.timeout.ms`), unless it hangs.
    held_back: timedelta = timedelta(minutes=15)
    published_late: timedelta = timedelta(hours=1)
    reclaimed_late: timedelta = timedelta(hours=1)


@dataclass(frozen=True)
class Metrics:
    """The measures of each minute of event time.

    Args:
        status: the field of type `string` by whose values (`one_of`) events are counted.
        amount: the field that is summed by them: a decimal of 28 digits at the most, an integer or a long.
        mean_of: the values of `status` whose amounts count in the mean over the moving hour.
    """

    status: str
    amount: str
    mean_of: tuple[str, ...]


# A sum has ten digits more, and a table's decimals have 38.
MAX_DIGITS = 28
# Begins the names of the columns of the moving hour.
HOUR = "hour"


@dataclass(frozen=True)
class Breaker:
    """The limits at which a stream's slices are no longer decided, and the waits until one is tried again.

    Args:
        reject_ratio: rejects among the records of the newest slices from which on it opens, above 0 and up to 1.
        min_records: fewer records than this are not judged.
        slices: first attempts that are looked back at, at the most.
        failures: first attempts in a row that end in an error before it opens; a run of several slices is one.
        cool_down: how long it stays open before one slice is tried.
    """

    reject_ratio: float = 0.5
    min_records: int = 100
    slices: int = 5
    failures: int = 3
    cool_down: timedelta = timedelta(minutes=5)


# `delta.deletedFileRetentionDuration`: Delta's checkpoints forget by then which files were removed when.
LONGEST_HORIZON = timedelta(days=7)
# Repair goes by the runs of the last day.
MIN_RUNS_FOR = timedelta(days=2)


@dataclass(frozen=True)
class Maintenance:
    """The limits that maintenance keeps for a stream.

    Args:
        live_slices: the number of slices, newest plans first, whose keys stay in Dagster; 1 or more.
        live_for: slices planned longer ago lose theirs as well; None for no such limit.
        horizon: data files that no version of a table younger than this needs are removed.
        runs_for: Dagster's runs that ended longer ago and name no live key are deleted; None keeps them.
        cluster_by: columns of `events`, in whose order maintenance writes the rows that it gathers: readers that filter
            by the first of them read few files.
    """

    live_slices: int = 2_000
    live_for: timedelta | None = None
    horizon: timedelta = LONGEST_HORIZON
    runs_for: timedelta | None = timedelta(days=30)
    cluster_by: tuple[str, ...] = ("event_time",)


@dataclass(frozen=True)
class Retention:
    """The age at which rows are removed, by table; None keeps them forever.

    Args:
        raw: rows of slices go once their newest record and their plan are both older than this; a day at least.
            docs/maintenance.md lists what keeps rows longer.
        events: None, forever: `current`, the versions and the ends of records rest on these rows, and
            without its row a second delivery of an event would count as a first.
        rejects: None, forever: the rows show which records wait, are parked or were discarded.
    """

    raw: timedelta | None = None
    events: timedelta | None = None
    rejects: timedelta | None = None


class OnReject(str, Enum):
    """The outcome of a record that is no event.

    `HOLD` keeps its slice, and all that come after it, from being decided as long as the record would be rejected for
    that reason. The stream's slices are decided one at a time, in their order.
    """

    PARK = "park"
    RETRY = "retry"
    HOLD = "hold"


ON_REJECT: Mapping[str, OnReject] = MappingProxyType(
    {
        MALFORMED: OnReject.PARK,
        SCHEMA: OnReject.PARK,
        INVALID: OnReject.PARK,
        UNRESOLVED: OnReject.RETRY,
    }
)


class Severity(str, Enum):
    """The effect of a failed check.

    `WARN` marks the slice and counts nowhere as an error. `ERROR` counts as an error in the audit. `BLOCK` also stops
    runs before the tables downstream of the checked table.
    """

    WARN = "warn"
    ERROR = "error"
    BLOCK = "block"


# Severities of the checks in `highwater.orchestration.checking.checks`. Conflicts and transitions are the producer's
# faults: the tables are right.
CHECK_SEVERITIES: Mapping[str, Severity] = MappingProxyType(
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
        "record_keys_as_declared": Severity.WARN,
        "rejects_published": Severity.ERROR,
        "versions_in_order": Severity.ERROR,
        "current_follows_events": Severity.ERROR,
        "metrics_follow_events": Severity.ERROR,
        "events_published": Severity.ERROR,
    }
)
# Checks that need nothing downstream of their table; only these can block.
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
# Maintenance runs once a day; a shorter interval is a mistake in the unit.
SHORTEST_RETENTION = timedelta(days=1)


@dataclass(frozen=True)
class Answers:
    """The answers of the stream's owners to three questions; shown on the assets' pages.

    Args:
        does_order_matter: within which records order matters, and which record counts.
        what_about_duplicates: effect of second deliveries and of contradictions.
        what_on_failure: which failures wait, and which need a person.
    """

    does_order_matter: str
    what_about_duplicates: str
    what_on_failure: str
