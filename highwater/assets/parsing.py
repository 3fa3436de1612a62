"""Parsing and validation of records in Spark: the declared fields, or the reason for a reject and its detail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from highwater.assets import field_problems
from highwater.assets.decoding import evaluate_once, with_json
from highwater.assets.expressions import build_failure, with_expressions
from highwater.assets.fast_expressions import filter_unusual, has_usual_records
from highwater.assets.field_parts import describe_unknown_members
from highwater.assets.field_problems import is_of_other_type
from highwater.assets.fields import build_sql_type, convert_from_key, with_fields
from highwater.assets.lookups import with_lookup
from highwater.assets.origins import PROBLEM
from highwater.assets.record_keys import with_key
from highwater.declaration_parts import VERSION_DIGITS, VERSION_SEPARATOR
from highwater.formats import Avro, Protobuf, Text
from highwater.reject_reasons import INVALID, MALFORMED, SCHEMA, UNRESOLVED
from highwater.truncates import TRUNCATE, describe_truncate, find_operation_field, name_truncate_check

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Field, Stream


# The column of the key that the decoded record key gives.
_OWN_KEY = "own_key"


def select_column_fields(stream: Stream) -> list[Field]:
    """The fields that are columns of their own, beside `key`, `version` and `event_time`."""
    taken = {"key", "event_time", *(["version"] if stream.versioned else [])}
    return [f for f in stream.stored_fields if f.name not in taken]


def select_content_fields(stream: Stream) -> list[Field]:
    """The fields of `select_column_fields` that are content of the record.

    Rows of a lookup table may change at any time.
    """
    return [f for f in select_column_fields(stream) if f.reference is None]


def build_event_time(stream: Stream) -> Column:
    """The event time of a parsed record; without a declared field the time of its publication."""
    from pyspark.sql import functions as F

    return F.col("origin_timestamp" if stream.event_time is None else f"field_{stream.event_time}")


def is_tombstone(stream: Stream) -> Column:
    """Whether a record of raw is a tombstone that deletes nothing: it is neither an event nor a reject."""
    from pyspark.sql import functions as F

    return F.lit(False) if stream.tombstones_delete else F.col("value").isNull()


def parse_records(work: Work, raw: DataFrame, *, guarded: bool = False) -> DataFrame:
    """Add to raw rows with their origins the parsed columns, and `reason`, `rule` and `detail`, null for an event.

    `rule` is null unless the record is `invalid`.
    The column `deleted` says which records delete their key. Columns of a tombstone that deletes nothing say nothing.

    Args:
        work: the connections.
        raw: the rows.
        guarded: a record for which an expression fails is a reject, instead of failing the query.

    Raises:
        DependencyUnavailableError: the table that the stream looks things up in cannot be read (I15).
    """
    from pyspark.sql import functions as F

    stream = work.stream
    read = with_fields(stream, with_json(work, with_key(work, raw)), usual=has_usual_records(stream))
    expressed = with_expressions(stream, read, guarded=guarded)
    parsed = _with_own_key(stream, with_deleted(stream, expressed))
    # Without its schema nothing is known of a value or a key, so nothing is wrong with it.
    known = F.coalesce("unknown_schema", "key_unknown_schema").isNull()
    structure = F.coalesce(_find_structure_problem(stream), _find_key_problem(stream), describe_unknown_members(stream))
    problem = F.coalesce(PROBLEM, F.when(known, structure))
    checked = parsed.withColumns({"malformed": problem, "invalid": F.when(known, _find_value_problem(stream))})
    looked_up = with_lookup(work, _with_truncates(stream, checked))
    reason = (
        F.when(_contradicts_schema(stream), SCHEMA)
        .when(F.col("malformed").isNotNull(), MALFORMED)
        .when(F.col("invalid").isNotNull(), INVALID)
        .when(F.coalesce("unknown_schema", "key_unknown_schema", "unresolved").isNotNull(), UNRESOLVED)
    )
    detail = F.coalesce("malformed", "invalid.detail", "unknown_schema", "key_unknown_schema", "unresolved")
    rule = F.when(F.col("malformed").isNull(), F.col("invalid.rule"))
    return looked_up.withColumns({"reason": reason, "rule": rule, "detail": detail})


def _with_truncates(stream: Stream, checked: DataFrame) -> DataFrame:
    """Refused records that are truncates of Debezium say so: without a key the first problem would name a field."""
    from pyspark.sql import functions as F

    name = find_operation_field(stream)
    if name is None:
        return checked
    refused = F.coalesce("malformed", "invalid.detail").isNotNull()
    is_whole = F.coalesce(PROBLEM, F.col("unread"), F.col("key_unread")).isNull()
    truncates = F.coalesce(refused & is_whole & (F.col(f"field_{name}") == TRUNCATE), F.lit(False))
    violation = _build_violation(truncates, name_truncate_check(name), describe_truncate(stream))
    return checked.withColumns(
        {"malformed": F.when(~truncates, F.col("malformed")), "invalid": F.coalesce(violation, "invalid")}
    )


def _contradicts_schema(stream: Stream) -> Column:
    """Whether a malformed record follows a schema that contradicts the declaration."""
    from pyspark.sql import functions as F

    problem = F.col("malformed")
    contradicts = F.lit(False)
    if isinstance(stream.value, Avro | Protobuf) or stream.unknown_fields.policy == "add":
        contradicts = is_of_other_type(problem)
    if stream.unknown_fields.policy == "reject":
        contradicts |= problem == describe_unknown_members(stream)
    return F.col(PROBLEM).isNull() & problem.isNotNull() & F.coalesce(contradicts, F.lit(False))


def with_deleted(stream: Stream, parsed: DataFrame) -> DataFrame:
    """Rows with `deleted`; the absent fields of a record that deletes are null, whatever their default."""
    from pyspark.sql import functions as F

    declared = stream.deletes
    if declared is None:
        return parsed.withColumn("deleted", F.lit(False))
    deletes = F.lit(False)
    if declared.field is not None:
        deletes = F.coalesce(F.col(f"field_{declared.field}").isin(list(declared.values)), deletes)
    if declared.tombstones:
        deletes = F.col("value").isNull() | deletes
    marked = parsed.withColumn("deleted", deletes)
    needed = stream.required_fields
    with_default = [f.name for f in stream.fields if f.default is not None and f.is_read and f.name not in needed]
    if not with_default:
        return marked
    unusual = F.col("deleted") & ~F.col("usual")
    absent = {name: unusual & F.col(f"json_{name}").isNull() for name in with_default}
    return marked.withColumns({f"field_{name}": F.when(~absent[name], F.col(f"field_{name}")) for name in with_default})


def _find_structure_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    unread = F.col("unread")
    if stream.tombstones_delete:
        unread = F.when(F.col("value").isNotNull(), unread)
    problems = []
    checked = [f for f in stream.fields if f.reference is None]
    for is_read, some in groupby(checked, key=lambda one: one.is_read):
        found = F.coalesce(*[_find_field_problem(stream, f) for f in some])
        # Fields that are read from a usual record have no problem.
        problems.append(filter_unusual(found) if is_read and has_usual_records(stream) else found)
    return F.coalesce(unread, "key_unread", *problems)


def _find_field_problem(stream: Stream, declared: Field) -> Column:
    """The fault of a field; a record that deletes needs no more than its key, version and event time."""
    from pyspark.sql import functions as F

    needed = stream.required_fields
    if declared.expression is not None:
        failed = F.lit(f"field {declared.name}: its expression fails on this record: {declared.expression}")
        problem = F.coalesce(
            F.when(build_failure("field", declared.name), failed), field_problems.find_problem(stream, declared)
        )
        return problem if stream.deletes is None or declared.name in needed else F.when(~F.col("deleted"), problem)
    if stream.deletes is None or declared.name in needed:
        return field_problems.find_problem(stream, declared)
    lacks = F.col(f"json_{declared.name}").isNull() | (F.col(f"kind_{declared.name}") == "VOID")
    return F.when(~F.col("deleted") | ~lacks, field_problems.find_problem(stream, declared))


def _find_key_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    if stream.record_key != "strict" or not stream.key:
        return F.lit(None).cast("string")
    if not isinstance(stream.key_format, Text):
        differs = build_key(stream).isNotNull() & has_other_key(stream)
        return F.when(differs, F.lit(f"the record's key does not have the {', '.join(stream.key)} of the record"))
    key = F.col("key").cast("string")
    return F.when(F.col("key").isNull() | ~F.is_valid_utf8(key), F.lit("the record's key is null or not UTF-8")).when(
        key != build_key(stream), F.lit(f"the record's key differs from {describe_expected_key(stream)}")
    )


def build_key(stream: Stream) -> Column:
    """The key that the fields say, as text; null where one of them is, or where none is declared.

    The separator is escaped in each field, so two keys whose fields differ never have the same text.
    """
    from pyspark.sql import functions as F

    return _join_key_parts(stream, [F.col(f"field_{name}") for name in stream.key])


def has_other_key(stream: Stream) -> Column:
    """Whether the record of an event has another key than the event."""
    from pyspark.sql import functions as F

    if isinstance(stream.key_format, Text):
        return ~F.col("key").eqNullSafe(build_key(stream).cast("binary"))
    if not stream.compares_decoded_keys:
        return F.lit(False)
    return ~F.col(_OWN_KEY).eqNullSafe(build_key(stream))


def _with_own_key(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows with the key that the decoded record key gives, where it is compared."""
    if not stream.compares_decoded_keys:
        return rows
    parts = [convert_from_key(stream, declared) for declared in stream.record_key_fields]
    return rows.withColumn(_OWN_KEY, evaluate_once(_join_key_parts(stream, parts)))


def _join_key_parts(stream: Stream, values: Sequence[Column]) -> Column:
    from pyspark.sql import functions as F

    if not values:
        return F.lit(None).cast("string")
    first, *others = [value.cast("string") for value in values]
    if not others:
        return first
    separator = F.lit(stream.key_separator)
    whole = _escape_key_part(first, stream)
    for part in others:
        whole = F.concat(whole, separator, _escape_key_part(part, stream))
    return whole


def _escape_key_part(part: Column, stream: Stream) -> Column:
    from pyspark.sql import functions as F

    # The separator's first character alone: escaped whole, `a:` and `b` would be `a:::b` by `::`, and so `a` and `:b`.
    for special in ("\\", stream.key_separator[0]):
        part = F.replace(part, F.lit(special), F.lit("\\" + special))
    return part


def find_version_type(stream: Stream) -> str:
    """The type of the column `version` in SQL; the stream has versions."""
    names = stream.version_fields
    return build_sql_type(stream.find_field(names[0])) if len(names) == 1 else "STRING"


def build_version(stream: Stream) -> Column:
    """The version of a parsed record; of several fields a text that sorts as they do, the first one first."""
    from pyspark.sql import functions as F

    names = stream.version_fields
    if len(names) == 1:
        return F.col(f"field_{names[0]}")
    return F.concat_ws(VERSION_SEPARATOR, *[_build_sortable_text(stream.find_field(name)) for name in names])


def _build_sortable_text(declared: Field) -> Column:
    """A part of a version as a text of fixed length."""
    from pyspark.sql import functions as F

    value = F.col(f"field_{declared.name}")
    if declared.type == "timestamp":
        return F.date_format(value, "yyyy-MM-dd HH:mm:ss.SSSSSS")
    return F.lpad(value.cast("string"), VERSION_DIGITS, "0")


def describe_expected_key(stream: Stream) -> str:
    """The expected key of a record, for a person."""
    names = stream.key_separator.join(stream.key)
    return names if len(stream.key) == 1 else rf"{names} with \ before each \ and {stream.key_separator[0]} of a field"


def _find_value_problem(stream: Stream) -> Column:
    """The first declared check that a record violates, as a struct of `rule` and `detail`."""
    from pyspark.sql import functions as F

    problems = [F.lit(None).cast("struct<rule: string, detail: string>")]
    for declared in stream.fields:
        if declared.reference is not None:
            continue  # has no such rules, and is looked up later
        value = F.col(f"field_{declared.name}")
        if declared.one_of:
            unknown = ~value.isin(list(declared.one_of))
            problems.append(_build_violation(unknown, f"{declared.name}.one_of", f"unknown {declared.name}"))
        if declared.at_least is not None:
            # Spark would compare two types in a third one, which cuts off digits.
            least = F.lit(str(declared.at_least)).cast(build_sql_type(declared))
            below = f"{declared.name} is below {declared.at_least}"
            problems.append(_build_violation(value < least, f"{declared.name}.at_least", below))
        if declared.name in stream.never_negative:
            below = f"{declared.name} is below 0, and a part of the version"
            problems.append(_build_violation(value < 0, f"{declared.name}.version", below))
    for name, condition in stream.rules.items():
        failed = f"rule {name} fails on this record: {condition}"
        problems.append(_build_violation(build_failure("rule", name), name, failed))
        problems.append(_build_violation(~F.col(f"rule_{name}"), name, f"rule {name} is not met: {condition}"))
    return F.coalesce(*problems)


def _build_violation(violated: Column, rule: str, detail: str) -> Column:
    from pyspark.sql import functions as F

    return F.when(violated, F.struct(F.lit(rule).alias("rule"), F.lit(detail).alias("detail")))


def quote_column(name: str) -> str:
    """A column's name in SQL."""
    return "`" + re.sub("`", "``", name) + "`"
