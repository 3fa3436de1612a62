"""Judging a record: parsed into the declared fields, or the reason why not.

What belongs here: the declaration's rules as Spark expressions. What does not: reading or committing (`assets.events`,
`assets.rejects`).

A reason is permanent when only the record's own content speaks for it, and temporary when waiting may mend it (I9).
Order of arrival never makes a record invalid: that is for checks.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from assets.decoding import with_json
from assets.expressions import with_expressions
from assets.fields import problem as problem_of
from assets.fields import sql_type, with_fields
from assets.origins import PROBLEM
from assets.usual import has_usual_records, of_unusual
from highwater.errors import DependencyAwayError
from resources.delta import open_table
from resources.spark import delta_errors
from resources.spark_tables import rows_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from assets.work import Work
    from highwater.declaration import Field, Lookup, Stream
    from resources.lake import Lake

MALFORMED = "malformed"
INVALID = "invalid"
UNRESOLVED = "unresolved"
PERMANENT = frozenset({MALFORMED, INVALID})


def field_columns(stream: Stream) -> list[Field]:
    """The fields that are columns of their own, beside `key`, `version` and `event_time`."""
    taken = {"key", "event_time", *(["version"] if stream.versioned else [])}
    return [f for f in stream.fields if f.stored and f.name not in taken]


def event_time_of(stream: Stream) -> Column:
    """When a parsed record happened; without a declared field when it was published."""
    from pyspark.sql import functions as F

    return F.col("origin_timestamp" if stream.event_time is None else f"field_{stream.event_time}")


def is_tombstone(stream: Stream) -> Column:
    """Whether a record of raw is a tombstone that deletes nothing: it is neither an event nor a reject."""
    from pyspark.sql import functions as F

    return F.lit(False) if stream.tombstones_delete else F.col("value").isNull()  # noqa: FBT003 - a literal column


def judged(work: Work, raw: DataFrame) -> DataFrame:
    """Raw rows with their origins get the parsed columns, and `reason` and `detail`: null for what is an event.

    The column `deleted` says which records delete their key. Columns of a tombstone that deletes nothing say nothing.

    Raises:
        DependencyAwayError: the table that the stream looks things up in cannot be read (I15).
    """
    from pyspark.sql import functions as F

    stream = work.stream
    read = with_fields(stream, with_json(work, raw), usual=has_usual_records(stream))
    parsed = with_deleted(stream, with_expressions(stream, read))
    # Without its schema nothing is known of a value, so nothing is wrong with it.
    known = F.col("unknown_schema").isNull()
    problem = F.coalesce(PROBLEM, F.when(known, F.coalesce(_structure_problem(stream), _key_problem(stream))))
    told = parsed.withColumns({"malformed": problem, "invalid": _invalid_problem(stream)})
    looked_up = _with_lookup(work, told, stream.lookup)
    reason = (
        F.when(F.col("malformed").isNotNull(), MALFORMED)
        .when(F.col("invalid").isNotNull(), INVALID)
        .when(F.coalesce("unknown_schema", "unresolved").isNotNull(), UNRESOLVED)
    )
    detail = F.coalesce("malformed", "invalid", "unknown_schema", "unresolved")
    return looked_up.withColumns({"reason": reason, "detail": detail})


def with_deleted(stream: Stream, parsed: DataFrame) -> DataFrame:
    """Rows with `deleted`; what a record that deletes does not have is null in it, whatever the default."""
    from pyspark.sql import functions as F

    declared = stream.deletes
    if declared is None:
        return parsed.withColumn("deleted", F.lit(False))  # noqa: FBT003 - a literal column
    deletes = F.lit(False)  # noqa: FBT003 - a literal column
    if declared.field is not None:
        deletes = F.coalesce(F.col(f"field_{declared.field}").isin(list(declared.values)), deletes)
    if declared.tombstones:
        deletes = F.col("value").isNull() | deletes
    told = parsed.withColumn("deleted", deletes)
    needed = {*stream.key, stream.version, stream.event_time}
    with_default = [
        f.name for f in stream.fields if f.default is not None and f.expression is None and f.name not in needed
    ]
    if not with_default:
        return told
    unusual = F.col("deleted") & ~F.col("usual")
    absent = {name: unusual & F.col(f"json_{name}").isNull() for name in with_default}
    return told.withColumns({f"field_{name}": F.when(~absent[name], F.col(f"field_{name}")) for name in with_default})


def _structure_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    unread = F.col("unread")
    if stream.tombstones_delete:
        unread = F.when(F.col("value").isNotNull(), unread)
    problems = []
    for is_read, some in groupby(stream.fields, key=lambda one: one.expression is None):
        found = F.coalesce(*[_field_problem(stream, f) for f in some])
        # Fields that are read from a usual record have no problem.
        problems.append(of_unusual(found) if is_read and has_usual_records(stream) else found)
    return F.coalesce(unread, *problems)


def _field_problem(stream: Stream, declared: Field) -> Column:
    """What is wrong with a field; a record that deletes needs no more than its key, version and event time."""
    from pyspark.sql import functions as F

    needed = {*stream.key, stream.version, stream.event_time}
    if stream.deletes is None or declared.name in needed:
        return problem_of(stream, declared)
    if declared.expression is not None:
        return F.when(~F.col("deleted"), problem_of(stream, declared))
    lacks = F.col(f"json_{declared.name}").isNull() | (F.col(f"kind_{declared.name}") == "VOID")
    return F.when(~F.col("deleted") | ~lacks, problem_of(stream, declared))


def _key_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    if stream.record_key != "strict" or not stream.key:
        return F.lit(None).cast("string")
    key = F.col("key").cast("string")
    return F.when(F.col("key").isNull() | ~F.is_valid_utf8(key), F.lit("the record's key is null or not UTF-8")).when(
        key != key_of(stream), F.lit(f"the record's key is not {told_key(stream)}")
    )


def key_of(stream: Stream) -> Column:
    """The key that the fields say, as text; null where one of them is, or where none is declared.

    What separates several fields is escaped in each of them: two keys whose fields differ are never one text.
    """
    from pyspark.sql import functions as F

    if not stream.key:
        return F.lit(None).cast("string")
    first, *others = [F.col(f"field_{name}").cast("string") for name in stream.key]
    if not others:
        return first
    separator = F.lit(stream.key_separator)
    whole = _escaped(first, stream)
    for part in others:
        whole = F.concat(whole, separator, _escaped(part, stream))
    return whole


def _escaped(part: Column, stream: Stream) -> Column:
    from pyspark.sql import functions as F

    # The separator's first character alone: escaped whole, `a:` and `b` would be `a:::b` by `::`, and so `a` and `:b`.
    for special in ("\\", stream.key_separator[0]):
        part = F.replace(part, F.lit(special), F.lit("\\" + special))
    return part


def told_key(stream: Stream) -> str:
    """What the record's key must be, for a person."""
    names = stream.key_separator.join(stream.key)
    return names if len(stream.key) == 1 else rf"{names} with \ before each \ and {stream.key_separator[0]} of a field"


def _invalid_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    problems = [F.lit(None).cast("string")]
    for declared in stream.fields:
        value = F.col(f"field_{declared.name}")
        if declared.one_of:
            problems.append(F.when(~value.isin(list(declared.one_of)), F.lit(f"unknown {declared.name}")))
        if declared.at_least is not None:
            # Of two types Spark would compare in a third one, which cuts digits off.
            least = F.lit(str(declared.at_least)).cast(sql_type(declared))
            problems.append(F.when(value < least, F.lit(f"{declared.name} is below {declared.at_least}")))
    for name, condition in stream.rules.items():
        problems.append(F.when(~F.col(f"rule_{name}"), F.lit(f"rule {name}: not {condition}")))
    return F.coalesce(*problems)


def _with_lookup(work: Work, rows: DataFrame, lookup: Lookup | None) -> DataFrame:
    from pyspark.sql import functions as F

    if lookup is None:
        return rows.withColumn("unresolved", F.lit(None).cast("string"))
    known = _known_values(work, lookup)
    found = rows.join(known, rows[f"field_{lookup.field}"] == known["known_value"], "left")
    unknown = F.col(f"field_{lookup.field}").isNotNull() & F.col("known_value").isNull()
    return found.withColumn("unresolved", F.when(unknown, F.lit(f"{lookup.field} is not in {lookup.table}"))).drop(
        "known_value"
    )


def _known_values(work: Work, lookup: Lookup) -> DataFrame:
    from pyspark.sql import functions as F

    version = see_lookup(work.lake, lookup)
    path = work.lake.reference(lookup.table)
    with delta_errors(path):
        return rows_at(work.spark, path, version).select(F.col(lookup.column).alias("known_value")).distinct()


def see_lookup(lake: Lake, lookup: Lookup) -> int:
    """See that the reference table can be opened; returns its version.

    Raises:
        DependencyAwayError: it cannot, or is not there (I15).
    """
    path = lake.reference(lookup.table)
    try:
        found = open_table(path)
    except DependencyAwayError as error:
        error.of = lookup.dependency
        raise
    if found is None:
        raise DependencyAwayError(
            f"the reference table {lookup.table} is not in the lake",
            found=path,
            remedy=f"write it as a Delta table with the column {lookup.column}, then request the slice again",
            of=lookup.dependency,
        )
    return found.version()


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return "`" + re.sub("`", "``", name) + "`"
