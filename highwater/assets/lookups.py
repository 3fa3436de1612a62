"""Looking up a field of records in a reference table of the lake, and the columns of events that come from its rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from highwater.assets.fields import build_sql_type
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.resources.delta import open_table
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Field, Lookup, Stream
    from highwater.resources.lake import Lake

# Types of a table's column whose values all fit the type of a field.
_NARROWER = {
    "int": {"tinyint", "smallint"},
    "bigint": {"tinyint", "smallint", "int"},
    "double": {"float"},
}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def with_lookup(work: Work, rows: DataFrame) -> DataFrame:
    """Rows with the fields from the lookup's table, and `unresolved`: why a record cannot be an event yet.

    Raises:
        ConfigurationError: the table lacks a column, or has it in a type that does not fit.
        DependencyUnavailableError: the table cannot be read (I15).
    """
    from pyspark.sql import functions as F

    stream, lookup = work.stream, work.stream.lookup
    if lookup is None:
        return rows.withColumn("unresolved", F.lit(None).cast("string"))
    taken = [f for f in stream.fields if f.reference is not None]
    known, field = _read_reference_rows(work, lookup, taken), F.col(f"field_{lookup.field}")
    found = rows.join(known, field == known["known_value"], "left")
    problem = F.when(
        field.isNotNull() & F.col("known_value").isNull(), F.lit(f"{lookup.field} is not in {lookup.table}")
    )
    if taken:
        several = F.lit(f"{lookup.table} has several rows of this {lookup.field}, which differ")
        problem = F.coalesce(problem, F.when(~F.col("deleted") & F.col("known_differ"), several))
        problem = F.coalesce(problem, *[_find_null_problem(lookup, f) for f in taken if not f.nullable])
        found = found.withColumns({f"field_{f.name}": F.col(f"known_row.`{f.name}`") for f in taken})
    return found.withColumn("unresolved", problem).drop("known_value", "known_row", "known_differ")


def _find_null_problem(lookup: Lookup, declared: Field) -> Column:
    """The fault of a row without a value that must be there; a record that deletes needs none."""
    from pyspark.sql import functions as F

    lacks = F.col("known_value").isNotNull() & F.col(f"known_row.`{declared.name}`").isNull() & ~F.col("deleted")
    said = f"field {declared.name} is null in {lookup.table}, column {declared.reference}, for this {lookup.field}"
    return F.when(lacks, F.lit(said))


def _read_reference_rows(work: Work, lookup: Lookup, taken: Sequence[Field]) -> DataFrame:
    """One row for each value of the lookup's column, so that no event is doubled.

    The columns are `known_value`; and with fields `known_row`, a struct of their values, and `known_differ`, whether
    several rows of the value have different ones.
    """
    from pyspark.sql import functions as F

    version = ensure_lookup(work.lake, lookup)
    path = work.lake.build_reference_path(lookup.table)
    with delta_errors(path):
        table = read_table_version(work.spark, path, version)
        types = {one.name: one.dataType.simpleString() for one in table.schema.fields}
    _ensure_fits(work.stream, lookup, taken, types, version)
    # Two values of another type, such as 1 and 01 as text, may be one value of the field.
    kind = build_sql_type(work.stream.find_field(lookup.field))
    value = F.col(_quote(lookup.column)).try_cast(kind).alias("known_value")
    if not taken:
        return table.select(value).distinct()
    row = F.struct(*[F.col(_quote(str(f.reference))).cast(build_sql_type(f)).alias(f.name) for f in taken])
    first = table.select(value, row.alias("row")).groupBy("known_value").agg(F.min("row"), F.max("row"))
    return first.select(
        "known_value",
        F.col("min(row)").alias("known_row"),
        (~F.col("min(row)").eqNullSafe(F.col("max(row)"))).alias("known_differ"),
    )


def _ensure_fits(stream: Stream, lookup: Lookup, taken: Sequence[Field], types: dict[str, str], version: int) -> None:
    """Ensure that the table has the columns of the lookup, in types whose values fit the fields.

    Raises:
        ConfigurationError: it has not.
    """
    remedy = "change the table, or the declaration of the stream, then request the slice again"
    for column in (lookup.column, *[str(f.reference) for f in taken]):
        if column not in types:
            raise ConfigurationError(
                f"the reference table {lookup.table} has no column {column}, which {stream.name} reads",
                stored=f"version {version} has {', '.join(types)}",
                remedy=remedy,
            )
    for field in taken:
        kind = types[str(field.reference)]
        if not _can_widen_type(kind, build_sql_type(field).lower()):
            raise ConfigurationError(
                f"the column {field.reference} of the reference table {lookup.table} does not fit field {field.name}",
                stored=f"{stream.name} declares {field.type}",
                found=f"version {version} of the table has {kind}",
                remedy=remedy,
            )


def _can_widen_type(kind: str, wanted: str) -> bool:
    """Whether all values of a column's type fit another type."""
    narrow, wide = _DECIMAL.fullmatch(kind), _DECIMAL.fullmatch(wanted)
    if narrow and wide:
        (digits, scale), (most, wide_scale) = map(int, narrow.groups()), map(int, wide.groups())
        return scale <= wide_scale and digits - scale <= most - wide_scale
    return kind == wanted or kind in _NARROWER.get(wanted, ())


def ensure_lookup(lake: Lake, lookup: Lookup) -> int:
    """Ensure that the reference table can be opened; returns its version.

    Raises:
        DependencyUnavailableError: it cannot, or is not there (I15).
    """
    path = lake.build_reference_path(lookup.table)
    try:
        found = open_table(path)
    except DependencyUnavailableError as error:
        error.of = lookup.dependency
        raise
    if found is None:
        raise DependencyUnavailableError(
            f"the reference table {lookup.table} is not in the lake",
            found=path,
            remedy=f"write it as a Delta table with the column {lookup.column}, then request the slice again",
            of=lookup.dependency,
        )
    return found.version()


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
