"""Delta tables as Spark creates, reads and writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.errors import SupersededAttemptError
from highwater.resources.delta import open_table, slice_is_one_of
from highwater.resources.delta_rs_writes import create
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import ADAPTIVE, delta_errors

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import Column, DataFrame, SparkSession


# Runs that change a table at once: one that was too late finds the change at its second try.
CHANGE_TRIES = 3
# The catalog that Delta follows (`highwater.resources.spark.STATIC_CONF`).
CATALOG = "spark_catalog"
# Sources are cut into at least this many tasks, so that one slice has work for as many cores.
TASKS = 8
# A task that writes the input of this many others does it one after the other; larger inputs are shuffled.
READS_PER_WRITER = 2
# Queries are not planned again between their shuffles. To find out what a shuffle holds Spark makes a job of it and
# plans the rest again: a tenth of a small commit. Without that a shuffle that does not say how many tasks it wants gets
# hundreds, so this is not for every query.
AS_PLANNED: Mapping[str, str] = MappingProxyType({ADAPTIVE: "false"})
# Parts of a slice that may go to different files.
_SHARES = 1024
_BITS = 2**32 - 1


def create_table(
    spark: SparkSession,
    path: str,
    columns: str,
    searched: Sequence[str],
    *,
    comment: str | None = None,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> DeltaTable | None:
    """Create a table if it is absent; first commits into a table that is not there yet would race.

    An existing table gets the columns that it lacks: a field that was added to the stream, or a column of a newer
    Highwater. Earlier rows have null in them. A run under way writes on, without the new columns.

    Args:
        path: where it lies.
        columns: the columns in SQL.
        searched: the columns with minimum and maximum in each file's statistics, so that readers skip files.
        comment: the comment of a table that is created.
        properties: table properties of a table that is created, beside those of Delta.

    Returns:
        The table as it was opened, if it was complete; None if it was created or changed.
    """
    opened = open_table(path)
    if opened is None:
        _create(path, spark.createDataFrame([], columns).schema.json(), searched, comment, properties)
        lacking = _list_missing_columns(path, columns)
    elif not (lacking := _select_missing_columns(opened, columns)):
        return opened
    for tries in range(1, CHANGE_TRIES + 1):
        if not lacking or _add_columns(spark, path, lacking, last=tries == CHANGE_TRIES):
            break
        lacking = _list_missing_columns(path, columns)  # another run may have added them
    return None


def _create(
    path: str, schema: str, searched: Sequence[str], comment: str | None, properties: Mapping[str, str]
) -> None:
    """Write a table's first version, not with Spark.

    Spark makes the log's folder first, and refuses a table where there is a folder: the second of two runs at once
    would fail, and so would every run after one that was killed in between.
    """
    from deltalake import Schema

    create(
        path,
        Schema.from_json(schema),
        partition_by=(),
        description=comment,
        configuration={"delta.dataSkippingStatsColumns": ",".join(searched), **properties},
    )


def _list_missing_columns(path: str, columns: str) -> list[str]:
    """The columns in SQL that a table lacks now; none if there is no table."""
    opened = open_table(path)
    return [] if opened is None else _select_missing_columns(opened, columns)


def _select_missing_columns(table: DeltaTable, columns: str) -> list[str]:
    there = {field.name.lower() for field in table.schema().fields}
    return [column for column in split_columns(columns) if read_column_name(column) not in there]


# Delta's two ways to say that a column is there, by where it notices: as it plans a change, and as it carries it out.
_THERE_ALREADY = ("FIELD_ALREADY_EXISTS", "DELTA_DUPLICATE_COLUMNS_FOUND")


def _add_columns(spark: SparkSession, path: str, lacking: Sequence[str], *, last: bool) -> bool:
    """Add columns; another run that adds the same at the same moment is no error before the last try."""
    try:
        with delta_errors(path):
            spark.sql(f"ALTER TABLE {quote_table(path)} ADD COLUMNS ({', '.join(lacking)})")
    except Exception as error:
        same = isinstance(error, SupersededAttemptError) or any(it in str(error) for it in _THERE_ALREADY)
        if not same or last:
            raise
        return False
    return True


def split_columns(columns: str) -> list[str]:
    """The columns of a SQL list, split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in columns:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def read_column_name(column: str) -> str:
    """The name of a column in SQL, in lower case and without quotes."""
    quoted = re.match(r"`((?:[^`]|``)+)`", column)
    return (quoted[1].replace("``", "`") if quoted else column.split(maxsplit=1)[0]).lower()


def read_table_version(spark: SparkSession, path: str, version: int) -> DataFrame:
    """One version of a Delta table, however often the query is computed.

    Whatever Spark holds (`persist`) it computes again when another session of the same server commits to one of its
    tables, and when another run lets go of the same query; without a version it would then read the newest.
    """
    return spark.read.format("delta").option("versionAsOf", str(version)).load(path)


def build_known_rows(spark: SparkSession, columns: str, rows: Sequence[Sequence[str | int]]) -> DataFrame:
    """Rows that we know, as a part of the plan; PySpark's own `createDataFrame` sends them through a job of Python.

    A slice of 50,000 records into raw took 0.84 s instead of 0.96 s, by medians of 14 turns in one process.

    Args:
        spark: the session.
        columns: their columns in SQL, of strings and integers.
        rows: their values, in the columns' order.
    """
    return spark.sql(_build_rows_query(columns), {"rows": _encode_rows(columns, rows)})


def _build_rows_query(columns: str) -> str:
    """The query that makes rows of the JSON of `_encode_rows`, its argument `rows`."""
    # By default a value that its column cannot hold is read as null: a slice's records would be joined with nothing.
    strict = "map('mode', 'FAILFAST')"
    fields = ", ".join(column.replace(" ", ": ", 1) for column in split_columns(columns))
    return f"SELECT inline(from_json(:rows, 'ARRAY<STRUCT<{fields}>>', {strict}))"


def _encode_rows(columns: str, rows: Sequence[Sequence[str | int]]) -> str:
    names = [read_column_name(column) for column in split_columns(columns)]
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows])


def write_slices(
    path: str,
    rows: DataFrame,
    keys: Sequence[str],
    options: Mapping[str, str],
    *,
    replace: bool,
    files: int,
    spread: str,
    tasks: int | None = None,
) -> None:
    """Write the rows of slices in one Delta commit; with `replace` in place of the rows that these slices have.

    Args:
        path: the table.
        rows: the rows, with the table's columns.
        keys: the slices.
        options: options of the write, with the facts that its commit stores.
        replace: whether the table may hold rows of these slices. Without it Delta need not look: 0.5 s less.
        files: data files to write at the most; 0 leaves the rows as they are spread.
        spread: the column whose value picks the file where a slice has several, or rows are gathered.
        tasks: how many tasks read the rows, where these come from where they are without a shuffle; of those that Spark
            holds, 1. One small slice of them is committed by a plan that Spark need not adapt.

    Raises:
        SupersededAttemptError: another commit was first; nothing was written.
        DependencyUnavailableError: Spark or the storage is unavailable.
    """
    alone = len(keys) == 1
    with delta_errors(path):
        writer = _repartition_rows(rows, files, spread, tasks or 1, keys).write.format("delta").options(**options)
        if replace:
            writer = writer.mode("overwrite").option("replaceWhere", slice_is_one_of(keys))
        else:
            writer = writer.mode("append")
        few = tasks is not None and alone and 0 < files < TASKS
        with session_settings(rows.sparkSession, AS_PLANNED if few else {}):
            writer.save(path)


def quote_table(path: str) -> str:
    """A table by its path, in the catalog that Delta follows; the session may look into another by itself."""
    return f"{CATALOG}.delta.`{path.replace('`', '``')}`"


def _build_file_key(files: int, spread: str, keys: Sequence[str]) -> Column:
    """The key that puts slices beside each other into one of several files, and a large slice into several files.

    So the statistics of a file name few slices, and readers of one open few files.
    """
    from pyspark.sql import functions as F

    ordinals = [int(key.rpartition("@")[2]) for key in keys]
    first, count = min(ordinals), max(ordinals) - min(ordinals) + 1
    ordinal = F.substring_index("slice", "@", -1).cast("int")
    share = F.pmod(F.xxhash64(spread), F.lit(_SHARES)) / _SHARES
    file = F.least(F.lit(files - 1), F.floor((ordinal - first + share) * files / count).cast("int"))
    return F.element_at(F.array(*[F.lit(number) for number in compute_partition_numbers(files)]), file + 1)


@lru_cache
def compute_partition_numbers(count: int) -> list[int]:
    """Numbers that Spark's `repartition` sends to partition 0, 1, 2, ... of a given count: it goes by a hash.

    The hash is Murmur3 of 32 bits with the seed 42, modulo the number of partitions
    (`org.apache.spark.sql.catalyst.expressions.Murmur3Hash`).
    """
    found: dict[int, int] = {}
    number = 0
    while len(found) < count:
        found.setdefault(_compute_murmur3(number) % count, number)
        number += 1
    return [found[partition] for partition in range(count)]


def _compute_murmur3(number: int) -> int:
    """The hash of a number from 0 to 2^31 - 1, as a signed number."""

    def rotate_left(value: int, by: int) -> int:
        return ((value << by) | (value >> (32 - by))) & _BITS

    mixed = rotate_left(number * 0xCC9E2D51 & _BITS, 15) * 0x1B873593 & _BITS
    value = (rotate_left(42 ^ mixed, 13) * 5 + 0xE6546B64) & _BITS
    value ^= 4
    value = (value ^ value >> 16) * 0x85EBCA6B & _BITS
    value = (value ^ value >> 13) * 0xC2B2AE35 & _BITS
    value ^= value >> 16
    return value - 2**32 if value >> 31 else value


def _repartition_rows(whole: DataFrame, files: int, spread: str, tasks: int, keys: Sequence[str]) -> DataFrame:
    """At most this many files, and one slice by itself without a shuffle where few tasks can read it."""
    from pyspark.sql import functions as F

    if files == 0:
        return whole
    if files == 1:
        return whole.repartition(1)  # after the tasks that read: one task would read partition after partition
    # By value, never by row number: a task that is run again must send every row where it went before.
    if len(keys) > 1:
        return whole.repartition(files, _build_file_key(files, spread, keys))
    if tasks > READS_PER_WRITER * files:
        return whole.repartition(files, F.xxhash64(spread))
    return whole.coalesce(files)
