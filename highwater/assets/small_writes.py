"""Few rows that Spark computed are appended to a table by delta-rs in the run's own process."""

# Spark's append of a few rows reads the table's state, plans a write and reads the state again. delta-rs appends the
# same values; Spark gets all that the two would write differently.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from highwater.resources.delta_rs_writes import append_no_rows, append_rows, list_statistics_columns, takes_writes
from highwater.resources.spark import delta_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

# The longest text that goes into the statistics of a file: delta-rs puts the whole of it there.
MAX_STATISTICS_BYTES = 260
# Spark before 4.0 refuses earlier times in files that Spark did not write.
FIRST_TIME = datetime(1900, 1, 2, tzinfo=UTC)


def append(opened: DeltaTable, rows: DataFrame | None, options: Mapping[str, str]) -> bool:
    """Append rows in one commit, which takes the version after the opened one.

    Args:
        opened: the table.
        rows: rows for it, few enough for the memory of this process; None if there are none.
        options: what the commit carries, as `commit_slices` gives it.

    Returns:
        False if the rows are for Spark: delta-rs committed nothing.

    Raises:
        DependencyUnavailableError: Spark or the storage is unavailable.
    """
    import pyarrow as pa

    if rows is None:
        return takes_writes(opened) and append_no_rows(opened, options)
    schema = pa.schema(opened.schema().to_arrow())
    if not takes_writes(opened) or not all(_is_plain(field.type) for field in schema):
        return False
    with delta_errors(str(opened.table_uri)):
        found = rows.toArrow()
    if not _has_same_names(pa.struct(schema), pa.struct(found.schema)):
        return False
    try:
        made = found.select(schema.names).cast(schema)
    except pa.ArrowException:  # another type, or a null in a column without any
        return False
    has_short_texts = all(_has_short_texts(made[name]) for name in list_statistics_columns(opened))
    return has_short_texts and all(map(_has_plain_values, made.columns)) and append_rows(opened, made, options)


def _is_plain(kind: pa.DataType, *, inner: bool = False) -> bool:
    """Whether delta-rs may write a type: no maps, and in lists and structs (`inner`) none whose values are checked."""
    from pyarrow import types

    if types.is_list(kind) or types.is_struct(kind):
        return all(_is_plain(kind.field(at).type, inner=True) for at in range(kind.num_fields))
    is_checked = types.is_floating(kind) or types.is_date32(kind) or types.is_timestamp(kind)
    is_number = types.is_integer(kind) or types.is_decimal(kind)
    is_plain = is_number or types.is_boolean(kind) or types.is_string(kind) or types.is_binary(kind)
    return bool(is_plain or (is_checked and not inner))


def _has_same_names(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether the parts of two types have the same names: a cast drops parts, and adds others without a value."""
    from pyarrow import types

    if types.is_list(kind) and types.is_list(other):
        return _has_same_names(kind.value_type, other.value_type)
    if not (types.is_struct(kind) and types.is_struct(other)):
        return True
    mine, theirs = ({part.name: part.type for part in each} for each in (kind, other))
    return mine.keys() == theirs.keys() and all(_has_same_names(mine[name], theirs[name]) for name in mine)


def _has_short_texts(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc
    from pyarrow import types

    if not types.is_string(column.type):
        return True
    return (pc.max(pc.binary_length(column)).as_py() or 0) <= MAX_STATISTICS_BYTES


def _has_plain_values(column: pa.ChunkedArray) -> bool:
    """Whether a column has no NaN, which statistics leave out, and no time that a reader of the file could refuse."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_floating(column.type):
        return not pc.any(pc.is_nan(column)).as_py()
    if types.is_date32(column.type):
        first: date = FIRST_TIME.date()
    elif types.is_timestamp(column.type):
        first = FIRST_TIME if column.type.tz else FIRST_TIME.replace(tzinfo=None)
    else:
        return True
    least = pc.min(column)
    return not least.is_valid or bool(pc.greater_equal(least, pa.scalar(first, column.type)).as_py())
