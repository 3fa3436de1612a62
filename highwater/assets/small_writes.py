"""Few rows that Spark computed are appended to a table by delta-rs in the run's own process."""

# Spark's append of a few rows reads the table's state, plans a write and reads the state again. delta-rs appends the
# same values; Spark gets all that the two would write differently.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from highwater.resources.delta_rs_writes import append_rows, takes_writes
from highwater.resources.spark import delta_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

# The longest text that goes into the statistics of a file: delta-rs puts the whole of it there.
MAX_STATISTICS_BYTES = 260
# Spark before 4.0 refuses earlier times in files that Spark did not write.
FIRST_DAY = date(1900, 1, 2)
_STATISTICS = "delta.dataSkippingStatsColumns"


def append(opened: DeltaTable, rows: DataFrame, options: Mapping[str, str]) -> bool:
    """Append rows in one commit, which takes the version after the opened one.

    Args:
        opened: the table.
        rows: rows for it, few enough for the memory of this process.
        options: what the commit carries, as `commit_slices` gives it.

    Returns:
        False if the rows are for Spark: nothing was committed.

    Raises:
        DependencyUnavailableError: Spark or the storage is unavailable.
    """
    if not takes_writes(opened):
        return False
    with delta_errors(str(opened.table_uri)):
        found = rows.toArrow()
    made = _fit(found, opened)
    return made is not None and append_rows(opened, made, options)


def _fit(rows: pa.Table, opened: DeltaTable) -> pa.Table | None:
    """The rows with the columns of a table; None if delta-rs would write them otherwise than Spark."""
    import pyarrow as pa

    schema = pa.schema(opened.schema().to_arrow())
    if {*schema.names} != {*rows.column_names} or not all(_is_plain(field.type) for field in schema):
        return None
    try:
        made = rows.select(schema.names).cast(schema)
    except pa.ArrowInvalid:  # a null in a column without any
        return None
    searched = [name.strip("`") for name in opened.metadata().configuration.get(_STATISTICS, "").split(",")]
    is_plain = all(name in schema.names and _has_plain_statistics(made[name]) for name in searched)
    return made if is_plain and all(_has_plain_times(column) for column in made.columns) else None


def _is_plain(kind: pa.DataType, *, inner: bool = False) -> bool:
    """Whether delta-rs writes values of a type as Spark does: not maps, and no times in lists and structs (`inner`)."""
    from pyarrow import types

    if types.is_list(kind) or types.is_struct(kind):
        return all(_is_plain(kind.field(at).type, inner=True) for at in range(kind.num_fields))
    is_time = types.is_date32(kind) or types.is_timestamp(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    is_plain = is_number or types.is_boolean(kind) or types.is_string(kind) or types.is_binary(kind)
    return bool(is_plain or (is_time and not inner))


def _has_plain_statistics(column: pa.ChunkedArray) -> bool:
    """Whether the statistics of a column are exact, and short: decimal places become inexact numbers."""
    import pyarrow.compute as pc
    from pyarrow import types

    kind = column.type
    if types.is_string(kind):
        return (pc.max(pc.binary_length(column)).as_py() or 0) <= MAX_STATISTICS_BYTES
    is_whole = types.is_integer(kind) or (types.is_decimal(kind) and kind.scale == 0)
    return bool(is_whole or types.is_date32(kind) or types.is_timestamp(kind))


def _has_plain_times(column: pa.ChunkedArray) -> bool:
    """Whether no time of a column is one that a reader of the file could refuse."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_date32(column.type):
        first: date = FIRST_DAY
    elif types.is_timestamp(column.type):
        first = datetime(FIRST_DAY.year, FIRST_DAY.month, FIRST_DAY.day, tzinfo=UTC if column.type.tz else None)
    else:
        return True
    least = pc.min(column)
    return not least.is_valid or bool(pc.greater_equal(least, pa.scalar(first, column.type)).as_py())
