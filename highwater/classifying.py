"""Classification without Spark, for the second reader, `try` and `infer`; `assets/parsing.py` is the one in Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from highwater.declaration import Field, Stream
from highwater.declaration_parts import VERSION_DIGITS, VERSION_SEPARATOR
from highwater.decoding import (
    RepeatedNames,
    Schemas,
    UnknownSchemaError,
    decode_record_key,
    decode_value,
    read_fields,
    read_record_key_fields,
)
from highwater.formats import Avro, Json, Protobuf, Text
from highwater.reject_reasons import INVALID, MALFORMED, SCHEMA, UNRESOLVED
from highwater.second_reader import (
    HALF_OF_A_PAIR,
    KafkaRecord,
    MisfitError,
    OtherTypeError,
    UnreadableError,
    convert_field,
    format_located_problem,
    select_unknown_members,
)
from highwater.truncates import TRUNCATE, describe_truncate, find_operation_field, name_truncate_check

_RANGES = {"integer": 2**31, "long": 2**63}
_NO_RECORD = KafkaRecord(None)
_NESTED_TYPES = frozenset({"json", "array", "map", "struct"})
_BEGIN = datetime(1970, 1, 1)  # noqa: DTZ001 - a time that is shown without its zone


@dataclass(frozen=True)
class Classification:
    """The outcome of a record.

    Args:
        kind: an `event`, an event that is a `delete`, a `tombstone` that does nothing, or a `reject`.
        reason: a reject's reason: `malformed`, `schema`, `invalid` or `unresolved`.
        detail: why the record was rejected.
        values: the fields by name, of a reject as far as they can be read.
        key: the key; None without one.
        version: the version; a timestamp in microseconds since 1970.
        event_time: in microseconds since 1970.
        rule: of an `invalid` reject the rule or the check of a field that it violates.
    """

    kind: Literal["event", "delete", "tombstone", "reject"]
    reason: str | None = None
    detail: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    version: Any = None
    event_time: int | None = None
    rule: str | None = None


def classify(stream: Stream, record: KafkaRecord, schemas: Schemas | None) -> Classification:
    """Classify a record as the pipeline does, but for lookups, rules and fields that are expressions.

    Raises:
        DependencyUnavailableError: the registry gave no answer.
    """
    if record.value is None and not stream.tombstones_delete:
        return Classification("tombstone")
    try:
        own_key = _read_own_key(stream, record, schemas)
        infinite = any(map(_allows_infinite, read_fields(stream)))
        found = {} if record.value is None else decode_value(stream.value, record, schemas, infinite=infinite)
        _ensure_sound(stream, found)
    except UnknownSchemaError as error:
        return Classification("reject", UNRESOLVED, str(error))
    except MisfitError as error:
        return Classification("reject", MALFORMED, str(error))
    except RecursionError:
        return Classification("reject", MALFORMED, "the value is nested deeper than Python reads")
    if isinstance(own_key, MisfitError):
        return Classification("reject", MALFORMED, str(own_key))
    return _name_truncate(stream, _classify_read(stream, record, found, own_key))


def _classify_read(stream: Stream, record: KafkaRecord, found: Mapping[str, Any], own_key: Any) -> Classification:
    """Classify a record whose value and key could be read."""
    deletes = _is_delete(stream, record, found, own_key)
    values, errors = _read_values(stream, record, found, own_key, deletes=deletes)
    problem, reason = None, MALFORMED
    if errors:
        name, first = errors[0]
        problem = format_located_problem(f"field {name}", first)
        reason = SCHEMA if isinstance(first, OtherTypeError) and _has_schemas(stream) else reason
    key = build_key(stream, values)
    problem = problem or _find_key_problem(stream, record, own_key, key)
    if problem is None and (problem := _find_unknown_problem(stream, found)):
        reason = SCHEMA
    if problem is not None:
        return Classification("reject", reason, problem, values)
    if invalid := _find_invalid_value(stream, values):
        return Classification("reject", INVALID, invalid.detail, values, key, rule=invalid.rule)
    version = build_version(stream, values)
    time = record.timestamp_ms * 1000 if stream.event_time is None else values.get(stream.event_time)
    return Classification("delete" if deletes else "event", None, None, values, key, version, time)


def _name_truncate(stream: Stream, outcome: Classification) -> Classification:
    """A refused record that is a truncate of Debezium says so: without a key its first problem would name a field."""
    name = find_operation_field(stream) if outcome.kind == "reject" else None
    if name is None or outcome.values.get(name) != TRUNCATE:
        return outcome
    return replace(outcome, reason=INVALID, detail=describe_truncate(stream), rule=name_truncate_check(name))


def _read_values(
    stream: Stream, record: KafkaRecord, found: Mapping[str, Any], own_key: Any, *, deletes: bool
) -> tuple[dict[str, Any], list[tuple[str, ValueError]]]:
    """The fields that can be read by name, and the faults of the others."""
    values, errors = dict[str, Any](), list[tuple[str, ValueError]]()
    for declared in read_fields(stream):
        needed = declared.name in stream.required_fields
        lenient = declared if needed or not deletes else replace(declared, optional=True, nullable=True, default=None)
        try:
            values[declared.name] = _validate_value(declared, convert_field(lenient, record, found, own_key))
        except (MisfitError, UnreadableError) as error:
            errors.append((declared.name, error))
    return values, errors


def _has_schemas(stream: Stream) -> bool:
    """Whether a value of another type than its field follows a schema that contradicts the declaration."""
    return isinstance(stream.value, Avro | Protobuf) or stream.unknown_fields.policy == "add"


# Members that a problem names at most.
_MAX_NAMED = 5


def _find_unknown_problem(stream: Stream, found: Mapping[str, Any]) -> str | None:
    """The members without a field, where that makes a record a reject."""
    if stream.unknown_fields.policy != "reject":
        return None
    path = stream.unknown_fields.path
    names = sorted(select_unknown_members(path, stream.select_taken_members(path), found))
    listed = ", ".join(".".join((*path, name)) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"no field is declared for {listed}{more}" if names else None


def _allows_infinite(declared: Field) -> bool:
    return declared.nan != "reject" or any(map(_allows_infinite, declared.members))


def _ensure_sound(stream: Stream, found: Mapping[str, Any]) -> None:
    """Ensure that the declared parts of a document in JSON have no name twice, and no half of a surrogate pair.

    Raises:
        MisfitError: one has.
    """
    if not isinstance(stream.value, Json):
        return
    paths = [(one, path) for one in read_fields(stream) for path in one.sources if isinstance(path, tuple)]
    repeated = found.repeated if isinstance(found, RepeatedNames) else frozenset()
    if stream.reads_all_members:
        _ensure_part_is_sound("value", found)
    for name in dict.fromkeys(path[0] for _, path in paths):
        if name in repeated:
            raise MisfitError(f"field {name} occurs twice")
    for name in dict.fromkeys(path[0] for one, path in paths if len(path) > 1 or one.type in _NESTED_TYPES):
        _ensure_part_is_sound(name, found.get(name))


def _ensure_part_is_sound(name: str, part: Any) -> None:
    parts = [part]
    while parts:
        one = parts.pop()
        if isinstance(one, RepeatedNames):
            raise MisfitError(f"field {name} has the name {min(one.repeated)!r} twice")
        if isinstance(one, dict):
            parts += [*one, *one.values()]
        elif isinstance(one, list):
            parts += one
        elif isinstance(one, str) and HALF_OF_A_PAIR.search(one):
            raise MisfitError(f"field {name} has half of a surrogate pair")


def _read_own_key(stream: Stream, record: KafkaRecord, schemas: Schemas | None) -> Any:
    """The record's decoded key, or its fault: a value whose schema is not known yet comes first."""
    try:
        return decode_record_key(stream, record, schemas)
    except UnknownSchemaError:
        raise
    except MisfitError as error:
        return error


def _is_delete(stream: Stream, record: KafkaRecord, found: Any, own_key: Any) -> bool:
    deletes = stream.deletes
    if deletes is None or record.value is None:
        return deletes is not None
    named = [one for one in read_fields(stream) if one.name == deletes.field]
    try:
        return any(convert_field(one, record, found, own_key) in deletes.values for one in named)
    except (MisfitError, UnreadableError):
        return False


def _validate_value(declared: Field, value: Any) -> Any:
    """A value that fits its column: the reader itself knows no bounds of numbers."""
    if value is None:
        return None
    inner = declared.members[:1]
    if declared.type == "array":
        return [_validate_member(inner[0], one, f"[{at}]") for at, one in enumerate(value)]
    if declared.type == "map":
        return {key: _validate_member(inner[0], one, f'["{key}"]') for key, one in value.items()}
    if declared.type == "struct":
        return {one.name: _validate_member(one, value[one.name], f".{one.name}") for one in declared.members}
    bound = _RANGES.get(declared.type)
    if bound is not None and not -bound <= value < bound:
        raise MisfitError(f"it does not fit {declared.type}")
    if declared.type.startswith("decimal"):
        precision, scale = map(int, declared.type[len("decimal(") : -1].split(","))
        # The reader has given it its digits after the point.
        if value and value.adjusted() >= precision - scale:
            raise MisfitError(f"it does not fit {declared.type}")
    return value


def _validate_member(declared: Field, value: Any, place: str) -> Any:
    try:
        return _validate_value(declared, value)
    except MisfitError as error:
        raise MisfitError(format_located_problem(place, error)) from error


def build_key(stream: Stream, values: Mapping[str, Any]) -> str | None:
    """The key that the values of fields give, as text; None where one of them is null, or where none is declared."""
    parts = [format_text(stream.find_field(name), values.get(name)) for name in stream.key]
    if not parts or None in parts:
        return None
    if len(parts) == 1:
        return parts[0]
    escaped = [str(part) for part in parts]
    for special in ("\\", stream.key_separator[0]):
        escaped = [part.replace(special, "\\" + special) for part in escaped]
    return stream.key_separator.join(escaped)


def build_version(stream: Stream, values: Mapping[str, Any]) -> Any:
    """The version that the values of fields give; of several fields the text that sorts as they do."""
    names = stream.version_fields
    if len(names) < 2:
        return values.get(names[0]) if names else None
    texts = []
    for name in names:
        value = values.get(name)
        if value is None:
            return None
        is_time = stream.find_field(name).type == "timestamp"
        texts.append(_format_sortable_time(value) if is_time else f"{value:0{VERSION_DIGITS}}")
    return VERSION_SEPARATOR.join(texts)


def _format_sortable_time(micros: int) -> str:
    """A time since 1970 as a text of fixed length."""
    return (_BEGIN + timedelta(microseconds=micros)).isoformat(" ", "microseconds")


def format_text(declared: Field, value: Any) -> str | None:
    """A value as Spark casts it to a text."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if declared.type in {"timestamp", "timestamp_ntz"}:
        clock, _, fraction = (_BEGIN + timedelta(microseconds=value)).isoformat(sep=" ").partition(".")
        return f"{clock}.{fraction.rstrip('0')}" if fraction else clock
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def read_record_key(stream: Stream, own_key: Any) -> str | None:
    """The key that a decoded record key gives, as text; None where it lacks a field or has it in another form."""
    try:
        values = {
            one.name: _validate_value(one, convert_field(one, _NO_RECORD, {}, own_key))
            for one in read_record_key_fields(stream)
        }
    except (MisfitError, UnreadableError):
        return None
    return build_key(stream, values)


def _find_key_problem(stream: Stream, record: KafkaRecord, own_key: Any, key: str | None) -> str | None:
    if stream.record_key != "strict" or not stream.key or key is None:
        return None
    if not isinstance(stream.key_format, Text):
        same = not stream.compares_decoded_keys or read_record_key(stream, own_key) == key
        return None if same else f"the record's key does not have the {', '.join(stream.key)} of the record"
    same = record.key == key.encode("utf-8", "surrogatepass")
    return None if same else f"the record's key differs from {stream.key_separator.join(stream.key)}"


class _Violation(NamedTuple):
    """The check that a record violates."""

    rule: str
    detail: str


def _find_invalid_value(stream: Stream, values: Mapping[str, Any]) -> _Violation | None:
    negative = stream.never_negative
    for declared in stream.fields:
        value = values.get(declared.name)
        if value is None:
            continue
        if declared.one_of and value not in declared.one_of:
            return _Violation(f"{declared.name}.one_of", f"unknown {declared.name}")
        if declared.at_least is not None and value < declared.at_least:
            return _Violation(f"{declared.name}.at_least", f"{declared.name} is below {declared.at_least}")
        if declared.name in negative and value < 0:
            return _Violation(f"{declared.name}.version", f"{declared.name} is below 0, and a part of the version")
    return None
