"""The rules of a declaration: that it contradicts neither itself nor Spark, Kafka or Dagster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import combinations
from typing import TYPE_CHECKING

from highwater.declaration_parts import (
    CAN_BLOCK,
    CHECK_SEVERITIES,
    HOUR,
    LONGEST_DELAY,
    LONGEST_HORIZON,
    MAX_DIGITS,
    MIN_RUNS_FOR,
    ON_REJECT,
    RESERVED_COLUMNS,
    SHORTEST_DELAY,
    SHORTEST_RETENTION,
    TOPIC_NAME,
    Alerts,
    Breaker,
    Limits,
    Maintenance,
    OnReject,
    Retention,
    Severity,
    Start,
    fold_case,
)
from highwater.expression_rules import COLUMN_PART, find_expression_problems, find_reference_problems
from highwater.field_rules import CONTAINERS, NAME, TYPE, find_field_problems
from highwater.format_rules import find_format_problems, find_key_format_problems
from highwater.formats import Raw
from highwater.mask_rules import find_mask_problems
from highwater.sources import Rest

if TYPE_CHECKING:
    from highwater.declaration import Stream

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Dagster refuses two definitions of one name, and with them all streams.
TAKEN_NAMES = {
    "kafka": "assets of topics begin with kafka/",
    "retry": "its job would be retry_slice, which is a job of operators",
}
_TOPIC = re.compile(TOPIC_NAME)
# Dagster's rule; what it refuses would fail all streams as they load, without naming the file.
_OWNER = re.compile(r"team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Z|a-z]{2,7}")


def find_problems(stream: Stream) -> list[str]:
    """The faults of a declaration, in sentences; empty if it may be used."""
    names = [f.name for f in stream.fields]
    found = []
    if not _NAME.fullmatch(stream.name):
        found.append("the name must be lower case letters, digits and _")
    if stream.name in TAKEN_NAMES:
        found.append(f"the name is taken: {TAKEN_NAMES[stream.name]}")
    found += [_describe_topic_problem(topic) for topic in (stream.topic, *stream.dlq_topics) if not _is_topic(topic)]
    if not _OWNER.fullmatch(stream.owner):
        found.append(f"the owner {stream.owner!r} is neither a mail address nor team: and a name")
    found += _find_name_problems(names)
    found += [problem for declared in stream.fields for problem in find_field_problems(declared)]
    used = [name for name in (*stream.key, *stream.version_fields, stream.event_time) if name is not None]
    used += [stream.deletes.field] if stream.deletes and stream.deletes.field else []
    used += [stream.lookup.field] if stream.lookup else []
    used += [stream.transitions.field] if stream.transitions else []
    used += [stream.metrics.status, stream.metrics.amount] if stream.metrics else []
    found += [f"field {name!r} is used and not declared" for name in used if name not in names]
    found += _find_key_problems(stream)
    found += _find_limit_problems(stream.limits)
    found += _find_start_problems(stream.start)
    found += _find_reject_problems(stream) + _find_policy_problems(stream)
    found += _find_check_problems(stream)
    found += _find_alert_problems(stream.alerts)
    found += _find_breaker_problems(stream.breaker)
    found += _find_publication_problems(stream)
    found += _find_maintenance_problems(stream.maintenance)
    found += _find_cluster_problems(stream)
    found += _find_retention_problems(stream.retention)
    if not found:
        found += _find_type_problems(stream) + _find_delete_problems(stream) + find_expression_problems(stream)
        found += find_reference_problems(stream) + _find_unknown_field_problems(stream) + find_mask_problems(stream)
        found += find_format_problems(stream) + find_key_format_problems(stream)
    return found


def _find_unknown_field_problems(stream: Stream) -> list[str]:
    """Contradictions in the declared rule for unknown members."""
    found = []
    policy, rests = stream.unknown_fields.policy, _select_rest_fields(stream)
    for name, within in rests:
        declared = stream.find_field(name)
        if declared.type != "json" or not declared.optional or declared.default is not None:
            found.append(f"field {name!r}: the rest of an object is a field of type json, optional, without a default")
        if len(declared.sources) > 1:
            found.append(f"field {name!r}: the rest of an object is its only source")
        found += _find_overlap_problems(stream, within, f"field {name!r}")
    if len({within for _, within in rests}) < len(rests):
        found.append("two fields collect the rest of one object: leave out one of them")
    if isinstance(stream.value, Raw) and (rests or policy != "ignore"):
        found.append("a value that is not parsed has no members: leave out unknown_fields and the source Rest()")
    if policy == "ignore":
        return found
    if rests:
        found.append(f"unknown_fields: members are collected by field {rests[0][0]!r}, so {policy!r} meets none")
    found += _find_overlap_problems(stream, stream.unknown_fields.path, "unknown_fields")
    if policy == "add" and not getattr(stream.value, "registry", False):
        found.append(
            "unknown_fields: 'add' takes types from a registry: declare value=Avro(), Protobuf() or "
            "Json(registry=True), or 'ignore', 'reject', or a field with the source Rest()"
        )
    if policy == "add" and stream.publishes is not None:
        found.append(
            "unknown_fields: events with added columns have no fixed form on the topic of accepted events; "
            "leave out publishes or 'add'"
        )
    return found


def _find_policy_problems(stream: Stream) -> list[str]:
    try:
        _ = stream.unknown_fields.path
    except ValueError as error:
        return [f"unknown_fields: within: {error}"]
    known = ("ignore", "reject", "add")
    policy = stream.unknown_fields.policy
    if policy in known:
        return []
    return [f"unknown_fields: the policy is {policy!r}; there are {', '.join(known)}, and the source Rest() of a field"]


def _select_rest_fields(stream: Stream) -> list[tuple[str, tuple[str, ...]]]:
    """The fields that collect members, each with the path of its object."""
    read = [f for f in stream.fields if f.expression is None]
    return [(f.name, one.path) for f in read for one in f.sources if isinstance(one, Rest)]


def _find_overlap_problems(stream: Stream, path: tuple[str, ...], what: str) -> list[str]:
    read = [f for f in stream.fields if f.expression is None]
    whole = [f.name for f in read for one in f.sources if isinstance(one, tuple) and one == path[: len(one)]]
    return [f"{what}: field {name!r} already takes the whole object" for name in whole]


def _is_topic(name: str) -> bool:
    return bool(_TOPIC.fullmatch(name)) and name not in {".", ".."}


def _describe_topic_problem(name: str) -> str:
    return (
        f"{name!r} is no topic name: that is letters, digits, '.', '_' and '-', 249 at the most (found {len(name)}), "
        "and neither '.' nor '..'"
    )


def _find_name_problems(names: Sequence[str]) -> list[str]:
    found = [
        f"field {name!r}: a name is letters, digits, '_', '-' and '@', one at least"
        for name in names
        if not NAME.fullmatch(name)
    ]
    found += [
        f"the fields {first!r} and {second!r} would be one column: they must differ in more than case"
        for first, second in combinations(names, 2)
        if fold_case(first) == fold_case(second)
    ]
    taken = [name for name in names if name.lower() in RESERVED_COLUMNS and name not in {"version", "event_time"}]
    return found + [f"field {name!r}: the name is taken by the column {name.lower()!r} of Highwater" for name in taken]


def _find_key_problems(stream: Stream) -> list[str]:
    found = _find_append_only_problems(stream) if stream.version is None else []
    if stream.version == ():
        found.append("version names no field; leave it out where the stream is append-only")
    found += [
        f"the version has field {name!r} {n} times" for name, n in Counter(stream.version_fields).items() if n > 1
    ]
    if not stream.key:
        if stream.version is not None:
            found.append("a version orders the states of a key, and no key is declared")
        return found
    found += [f"the key has field {name!r} {n} times" for name, n in Counter(stream.key).items() if n > 1]
    separator = stream.key_separator
    if len(stream.key) > 1 and (not separator or "\\" in separator):
        found.append(f"the key separator {separator!r} must be one character at least, and hold no backslash")
    return found


def _find_append_only_problems(stream: Stream) -> list[str]:
    """Declared features that need versions, of a stream without."""
    needs = {
        "transitions": stream.transitions,
        "metrics": stream.metrics,
        "publishes": stream.publishes,
        "deletes": stream.deletes,
        "first_version": stream.first_version,
    }
    return [f"{name} needs a key and a version, and no version is declared" for name, one in needs.items() if one]


def _find_delete_problems(stream: Stream) -> list[str]:
    deletes = stream.deletes
    if deletes is None:
        return []
    if deletes.field is None:
        if deletes.values:
            return ["deletes: values are of a field, and none is named"]
        return (
            _find_tombstone_problems(stream)
            if deletes.tombstones
            else ["deletes: neither a field nor tombstones delete"]
        )
    declared = stream.find_field(deletes.field)
    wanted = {"string": str, "boolean": bool, "integer": int, "long": int}.get(declared.type)
    if wanted is None:
        return [f"deletes: field {declared.name!r} is a {declared.type}; it may be a string, boolean, integer or long"]
    if not deletes.values:
        return [f"deletes: no value of {declared.name!r} is given that deletes"]
    found = [f"deletes: {one!r} is no {declared.type}" for one in deletes.values if type(one) is not wanted]
    return found + (_find_tombstone_problems(stream) if deletes.tombstones else [])


def _find_tombstone_problems(stream: Stream) -> list[str]:
    """A tombstone has a key, headers, and what Kafka says of it; no value."""
    names = [name for name in (*stream.key, *stream.version_fields, stream.event_time) if name is not None]
    return [
        f"deletes: a tombstone has no field {name!r}, which is the key, the version or the event time: give it a "
        "source in the record's key, a header, or what Kafka says of it"
        for name in dict.fromkeys(names)
        if all(isinstance(one, tuple) for one in stream.find_field(name).sources)
    ]


def _find_limit_problems(limits: Limits) -> list[str]:
    times = {"max_wait": limits.max_wait, "retention_margin": limits.retention_margin}
    counts = {name: value for name, value in vars(limits).items() if name not in times}
    found = [f"limits: {name} is {value}, and must be 1 or more" for name, value in counts.items() if value < 1]
    found += [
        f"limits: {name} is {value}, and cannot be negative" for name, value in times.items() if value < timedelta(0)
    ]
    if limits.min_offsets > limits.max_offsets:
        found.append(f"limits: min_offsets is {limits.min_offsets}, above max_offsets {limits.max_offsets}")
    return found


def _find_alert_problems(alerts: Alerts) -> list[str]:
    found = []
    if not 0 <= alerts.reject_ratio <= 1 or alerts.parked < 0:
        found.append("alerts: the reject ratio must be between 0 and 1, the number of parked records 0 or more")
    times = {name: value for name, value in vars(alerts).items() if isinstance(value, timedelta)}
    negative = {name: value for name, value in times.items() if value < timedelta(0)}
    return found + [f"alerts: {name} is {value}, and cannot be negative" for name, value in negative.items()]


def _find_breaker_problems(breaker: Breaker) -> list[str]:
    found = []
    if not 0 < breaker.reject_ratio <= 1:
        found.append("breaker: the reject ratio must be above 0 and at most 1")
    if min(breaker.min_records, breaker.slices, breaker.failures) < 1:
        found.append("breaker: min_records, slices and failures must be 1 or more")
    if breaker.cool_down < timedelta(0):
        found.append("breaker: the cool-down cannot be negative")
    return found


def _find_publication_problems(stream: Stream) -> list[str]:
    accepted = stream.publishes
    if accepted is None:
        return []
    found = []
    if not _is_topic(accepted.topic):
        found.append(f"publishes: {_describe_topic_problem(accepted.topic)}")
    if stream.deletes is not None:
        found.append("publishes: a delete has no form on the topic of accepted events; leave out publishes or deletes")
    found += [
        f"publishes: field {one.name!r} is a {one.type}, which has no form on the topic of accepted events"
        for one in stream.fields
        if one.type in {*CONTAINERS, "time", "timestamp_ntz"} and one.mask is None
    ]
    if accepted.topic in stream.all_topics:
        found.append(f"publishes: {accepted.topic!r} is read by the stream itself")
    if accepted.horizon < timedelta(0):
        found.append("publishes: the horizon cannot be negative")
    return found


# Columns of `events` beside the declared fields that rows may be ordered by.
_CLUSTERED = frozenset({"key", "event_time", "origin_partition", "origin_offset", "origin_timestamp"})
# Delta has no minimum and maximum of them in a file's statistics.
_WITHOUT_RANGE = CONTAINERS | {"binary", "boolean"}


def _find_cluster_problems(stream: Stream) -> list[str]:
    """The columns of `cluster_by` by which no reader skips files."""
    declared = {field.name: field.type for field in stream.fields}
    known = {*declared, *_CLUSTERED, *(["version"] if stream.versioned else [])}
    by = stream.maintenance.cluster_by
    unknown = [name for name in by if name not in known]
    found = [f"maintenance: cluster_by names {', '.join(unknown)}, which events do not have"] if unknown else []
    found += [
        f"maintenance: cluster_by names {name!r}, a field of type {declared[name]}, for which Delta's statistics have "
        "no minimum and maximum: name another column"
        for name in by
        if declared.get(name) in _WITHOUT_RANGE
    ]
    return found if by else ["maintenance: cluster_by must name a column or more"]


def _find_maintenance_problems(maintenance: Maintenance) -> list[str]:
    found = ["maintenance: live_slices must be 1 or more"] if maintenance.live_slices < 1 else []
    if maintenance.live_for is not None and maintenance.live_for <= timedelta(0):
        found.append("maintenance: live_for must be above 0")
    if not timedelta(0) < maintenance.horizon <= LONGEST_HORIZON:
        found.append("maintenance: the horizon must be above 0 and at most 7 days")
    if maintenance.runs_for is not None and maintenance.runs_for < MIN_RUNS_FOR:
        found.append("maintenance: runs_for must be 2 days or more: repair counts the runs of the last 24 hours")
    return found


def _find_retention_problems(retention: Retention) -> list[str]:
    found = []
    if retention.raw is not None and retention.raw < SHORTEST_RETENTION:
        found.append("retention: raw must be retained for a day at least")
    if retention.events is not None:
        found.append(
            "retention: events are never deleted: current, versions and ends of records depend on them, and "
            "a second delivery of one that is gone would be taken for new; highwater erase removes those of a key"
        )
    if retention.rejects is not None:
        found.append(
            "retention: rejects are never deleted: they show which records wait, are parked or were discarded; "
            "highwater erase removes those of a key"
        )
    return found


def _find_reject_problems(stream: Stream) -> list[str]:
    found = []
    if any(not SHORTEST_DELAY <= delay <= LONGEST_DELAY for delay in stream.tiers):
        found.append("a tier's delay must be between a second and seven days")
    found += [
        f"the foreign topic {one.topic!r} must wait between a second and seven days"
        for one in stream.foreign
        if not SHORTEST_DELAY <= one.delay <= LONGEST_DELAY
    ]
    named = stream.foreign_topics
    found += [f"the foreign topic {_describe_topic_problem(name)}" for name in named if not _is_topic(name)]
    if list(stream.tiers) != sorted(set(stream.tiers)):
        found.append("each tier must wait longer than the one before it")
    found += [f"on_reject says nothing of {reason!r}" for reason in ON_REJECT if reason not in stream.on_reject]
    found += [
        f"on_reject: unknown reason {reason!r}; known are {', '.join(ON_REJECT)}"
        for reason in stream.on_reject
        if reason not in ON_REJECT
    ]
    if not stream.tiers and OnReject.RETRY in {how for r, how in stream.on_reject.items() if how != ON_REJECT.get(r)}:
        found.append("on_reject asks for retries, and no tier is declared")
    return found


def _find_check_problems(stream: Stream) -> list[str]:
    unknown = [
        f"checks: unknown check {name!r}; known are {', '.join(CHECK_SEVERITIES)}"
        for name in stream.checks
        if name not in CHECK_SEVERITIES
    ]
    late = [
        f"{name} cannot block, since it needs downstream tables; {', '.join(sorted(CAN_BLOCK))} can"
        for name, severity in stream.checks.items()
        if severity == Severity.BLOCK and name in CHECK_SEVERITIES and name not in CAN_BLOCK
    ]
    return unknown + late


def _find_start_problems(start: Start | str) -> list[str]:
    if start in {*Start}:
        return []
    wanted = "earliest, latest or a time in ISO 8601 with its zone, such as 2026-03-01T00:00:00Z"
    try:
        zone = datetime.fromisoformat(start).tzinfo
    except ValueError:
        return [f"the start {start!r} is none of {wanted}"]
    return [] if zone else [f"the start {start!r} names no zone; give {wanted}"]


def _find_type_problems(stream: Stream) -> list[str]:
    found = []
    if any(stream.find_field(name).type not in {"integer", "long", "timestamp"} for name in stream.version_fields):
        found.append("the version must be an integer, a long or a timestamp, or a tuple of such fields")
    if stream.event_time and stream.find_field(stream.event_time).type != "timestamp":
        found.append("the event time must be a timestamp")
    for name in dict.fromkeys((*stream.key, *stream.version_fields, stream.event_time)):
        if name is None:
            continue
        declared = stream.find_field(name)
        if declared.may_be_null:
            found.append(f"field {name!r} is the key, the version or the event time, so it cannot be null")
    found += [
        f"field {name!r}: a {stream.find_field(name).type} cannot be a part of the key"
        for name in stream.key
        if stream.find_field(name).type in {"float", "double", "binary", "json", "array", "map", "struct"}
    ]
    found += [
        f"a field named {name!r} must be the stream's {name}; give it another name and a source"
        for name in (*(["version"] if stream.versioned else []), "event_time")
        if name in [f.name for f in stream.fields] and getattr(stream, name) not in {name, (name,)}
    ]
    if stream.first_version is not None and not stream.versions_count:
        found.append("first_version is for versions that count: an integer or a long")
    if stream.first_version is not None and not stream.has_record_key:
        found.append(
            "first_version needs record_key='strict' and key_format=Text(): missing versions are looked for among "
            "rejects by record key"
        )
    return [*found, *_find_metrics_problems(stream)]


def _find_metrics_problems(stream: Stream) -> list[str]:
    if stream.metrics is None:
        return []
    found, status = [], stream.find_field(stream.metrics.status)
    if status.type != "string" or not status.one_of:
        found.append(f"metrics: field {status.name!r} must be a string with one_of: its values become columns")
    unfit = [value for value in status.one_of if not COLUMN_PART.fullmatch(str(value))]
    found += [f"metrics: {value!r} cannot be part of a column's name: letters, digits and _" for value in unfit]
    if len({str(value).lower() for value in (*status.one_of, HOUR)}) <= len(status.one_of):
        found.append(f"metrics: values of {status.name!r} must differ in more than case, and none be {HOUR!r}")
    found += [
        f"metrics: mean_of: {v!r} is no value of {status.name!r}"
        for v in stream.metrics.mean_of
        if v not in status.one_of
    ]
    digits = TYPE.fullmatch(stream.find_field(stream.metrics.amount).type)
    summed = digits and (digits[0] in {"integer", "long"} or (digits[1] and int(digits[1]) <= MAX_DIGITS))
    if not summed:
        found.append(f"metrics: the amount must be an integer, a long, or a decimal of {MAX_DIGITS} digits at the most")
    return found
