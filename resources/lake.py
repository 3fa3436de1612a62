"""The lake: where the tables lie, what their commits proved, and how Spark commits a slice.

What belongs here: paths, creation of tables, proofs read without a JVM, and `replace_slices`. What does not: what
the rows mean (`assets`), or commits without a JVM (`resources.small_tables`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from highwater.errors import LAKE, DependencyAwayError, SupersededAttemptError
from highwater.proof import Proof
from resources.spark import delta_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

# The message of the fence below; `resources.spark` knows it again among Spark's errors.
SUPERSEDED = "HIGHWATER_SUPERSEDED"
# Two first runs at once: the one that lost finds the table at its second try.
CREATE_TRIES = 3


class Mark(Protocol):
    """What stands in the column `proof` of a partition: the proof of a slice, or of a fold."""

    @property
    def key(self) -> str:
        """The partition's value."""

    @property
    def attempt(self) -> int:
        """The number that the compare-and-set compares."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values for the commit's `userMetadata`."""

    def to_json(self) -> str:
        """The written form for the column."""


class Lake:
    """The Delta tables of all streams below one root.

    Args:
        root: a local path, or a URI that both Spark and delta-rs can open (`file:`, `s3:`, `abfss:`, `gs:`).
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    def path(self, stream: str, table: str) -> str:
        """Where a stream's table lies."""
        return f"{self.root}/{stream}/{table}"

    def reference(self, table: str) -> str:
        """Where a table that streams look things up in lies; `table` is its path below the root."""
        return f"{self.root}/{table}"

    @property
    def takes_one_driver(self) -> bool:
        """Whether the log store tells apart only the writers of one JVM (local files, and S3 as Delta ships it)."""
        return "://" not in self.root or self.root.startswith(("file:", "s3:", "s3a:"))

    def folder_is_gone(self) -> bool:
        """Whether the root is a folder of this machine that does not exist; never of a lake behind a URI."""
        local = self.root.removeprefix("file://").removeprefix("file:")
        return "://" not in local and not Path(local).is_dir()

    def see_answering(self, stream: str) -> None:
        """Ask the storage one short question.

        Raises:
            DependencyAwayError: it did not answer.
        """
        _is_table(self.path(stream, "raw"))

    def table(self, stream: str, table: str) -> DeltaTable | None:
        """The table opened without a JVM, or None if it was never created.

        Raises:
            DependencyAwayError: the lake could not be read; this is not the same as empty (I15).
        """
        return open_table(self.path(stream, table))

    def committed(self, stream: str, table: str, keys: Sequence[str] | None = None) -> dict[str, Proof]:
        """The proofs that stand in a table, by slice key; all of them when `keys` is None.

        Of the slices that are named, the rows are told even where the proof leaves them to the log.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        return self.committed_at(stream, table, keys)[0]

    def committed_at(self, stream: str, table: str, keys: Sequence[str] | None = None) -> tuple[dict[str, Proof], int]:
        """The same, and the version of the table in which they stand; -1 without a table."""
        opened = None if keys is not None and not keys else self.table(stream, table)
        if opened is None:
            return {}, -1
        proofs = proofs_in(opened, keys)
        return sized(opened, proofs) if keys else proofs, opened.version()

    def sizes(self, stream: str, table: str, keys: Sequence[str]) -> dict[str, Size]:
        """Rows and bytes of slices by the table's log; what is not there is left out.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        opened = self.table(stream, table)
        return {} if opened is None else sizes(opened, keys)


def open_table(path: str) -> DeltaTable | None:
    """Open a Delta table without a JVM; None if there is none at the path.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    from deltalake import DeltaTable

    if not _is_table(path):
        return None
    try:
        return DeltaTable(path)
    except Exception as error:
        raise _unreadable([path], error) from error


def _is_table(path: str) -> bool:
    """Whether there is a table, by its log alone."""
    from deltalake import DeltaTable

    try:
        return DeltaTable.is_deltatable(path)
    except Exception as error:
        raise _away(path, error) from error


def query(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
    """Rows of a query over one table, named `t` in it, read without a JVM.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    return query_all({"t": table}, sql)


def query_all(tables: Mapping[str, DeltaTable], sql: str) -> list[dict[str, Any]]:
    """Rows of a query over tables, by their names in it, read without a JVM.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    found: list[dict[str, Any]] = answer(tables, sql).to_pylist()
    return found


def query_arrow(tables: Mapping[str, DeltaTable], sql: str) -> pa.Table:
    """The same as a table of Arrow's, whose text is of the type `string`.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    import pyarrow as pa

    try:
        found = pa.table(_asked(tables, sql))
        plain = [one.with_type(pa.string()) if one.type == pa.string_view() else one for one in found.schema]
        return found.cast(pa.schema(plain))
    except Exception as error:
        raise _unreadable([str(table.table_uri) for table in tables.values()], error) from error


def query_columns(tables: Mapping[str, DeltaTable], sql: str) -> dict[str, list[Any]]:
    """The same by column: much lighter where the answer is long.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    found: dict[str, list[Any]] = answer(tables, sql).to_pydict()
    return found


def answer(tables: Mapping[str, DeltaTable], sql: str) -> pa.Table:
    """The same as an Arrow table: lighter still, for what goes into another query.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    import pyarrow as pa

    try:
        return pa.table(_asked(tables, sql))
    except Exception as error:
        raise _unreadable([str(table.table_uri) for table in tables.values()], error) from error


def _asked(tables: Mapping[str, DeltaTable], sql: str) -> Any:
    """The answer as a stream, to be read by pyarrow.

    deltalake's own reader was seen to hold the interpreter's lock as long as a query takes: no lease could be renewed.
    """
    from deltalake import QueryBuilder

    builder = QueryBuilder()
    for name, table in tables.items():
        builder = builder.register(name, table)
    return builder.execute(sql)


def proofs_in(table: DeltaTable, keys: Sequence[str] | None = None) -> dict[str, Proof]:
    """The proofs that stand in a table as it was opened, by slice key; all of them when `keys` is None."""
    return proofs_where(table, "true" if keys is None else slice_is_one_of(keys))


def proofs_where(table: DeltaTable, where: str) -> dict[str, Proof]:
    """The same, of slices that a condition in SQL picks."""
    found = query(table, f"SELECT proof FROM t WHERE proof IS NOT NULL AND {where}")
    return {proof.key: proof for proof in (Proof.from_json(str(row["proof"])) for row in found)}


@dataclass(frozen=True)
class Size:
    """What the table's log says of a slice: its rows, the row of the proof left out, and the bytes of its files.

    The rows are None where a file came without statistics.
    """

    rows: int | None
    bytes: int


def sizes(table: DeltaTable, keys: Sequence[str] | None = None) -> dict[str, Size]:
    """The sizes of slices, or of all when `keys` is None, by the table's log: no data file is opened."""
    import pyarrow as pa
    import pyarrow.compute as pc

    actions = pa.table(table.get_add_actions(flatten=True)).select(["partition.slice", "num_records", "size_bytes"])
    if keys is not None:
        actions = actions.filter(pc.is_in(actions["partition.slice"], pa.array(keys)))
    whole = pc.ScalarAggregateOptions(skip_nulls=False)
    found = actions.group_by("partition.slice").aggregate([("num_records", "sum", whole), ("size_bytes", "sum")])
    told = {row["partition.slice"]: (row["num_records_sum"], row["size_bytes_sum"]) for row in found.to_pylist()}
    return {key: Size(None if rows is None else rows - 1, size) for key, (rows, size) in told.items()}


def rows_in(table: DeltaTable) -> int:
    """About how many rows a table has, by its log: those of files without statistics are left out."""
    return sum(size.rows or 0 for size in sizes(table).values())


def rows_by_slice(table: DeltaTable, keys: Sequence[str]) -> dict[str, int]:
    """The rows of slices, counted in the table's files."""
    where = f"proof IS NULL AND {slice_is_one_of(keys)}"
    found = query(table, f"SELECT slice, count(*) AS rows FROM t WHERE {where} GROUP BY slice")
    return {str(row["slice"]): int(str(row["rows"])) for row in found}


def sized(table: DeltaTable, proofs: Mapping[str, Proof]) -> dict[str, Proof]:
    """The proofs, with the rows from the table's log where they leave them to it."""
    unknown = [key for key, proof in proofs.items() if proof.rows is None]
    if not unknown:
        return dict(proofs)
    found = sizes(table, unknown)
    silent = [key for key, size in found.items() if size.rows is None]
    counted = rows_by_slice(table, silent) if silent else {}
    told = {
        key: replace(proofs[key], rows=counted.get(key, 0) if size.rows is None else size.rows)
        for key, size in found.items()
    }
    return {**proofs, **told}


def stream_rows(table: DeltaTable, sql: str) -> Iterator[dict[str, Any]]:
    """Rows of a query over one table, a batch at a time: for results that are not to be held whole.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    return stream_all({"t": table}, sql)


def stream_all(tables: Mapping[str, DeltaTable], sql: str) -> Iterator[dict[str, Any]]:
    """The same over tables, by their names in the query.

    Raises:
        DependencyAwayError: the storage could not be read.
    """
    import pyarrow as pa

    try:
        for batch in pa.RecordBatchReader.from_stream(_asked(tables, sql)):
            yield from batch.to_pylist()
    except Exception as error:
        raise _unreadable([str(table.table_uri) for table in tables.values()], error) from error


def _unreadable(paths: Sequence[str], error: Exception) -> DependencyAwayError:
    """The error for tables that could not be read. The lake is away only if it does not answer for one of them at all.

    What is wrong with one table alone, such as a file of it that is gone, must not open the lake's breaker for all.
    """
    for path in paths:
        try:
            _is_table(path)
        except DependencyAwayError as away:
            return away
    found = _away(", ".join(paths), error)
    found.of = None
    return found


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Say the errors of a look without a JVM in our words."""
    try:
        yield
    except Exception as error:
        raise _away(path, error) from error


def _away(path: str, error: Exception) -> DependencyAwayError:
    return DependencyAwayError(
        f"the lake could not be read at {path}",
        found=str(error).splitlines()[0] if str(error) else type(error).__name__,
        remedy="see that HIGHWATER_LAKE is reachable and readable, then request the slice again",
        of=LAKE,
    )


def slice_is_one_of(keys: Iterable[str]) -> str:
    """The SQL predicate that picks whole slices, for `replaceWhere` and for reading."""
    listed = ", ".join("'" + key.replace("'", "''") + "'" for key in keys)
    return f"slice IN ({listed})"


def count_in(table: DeltaTable, name: str) -> str:
    """A column of counts as SQL: 0 in rows, and in a table, from before it was there."""
    return f"coalesce({name}, 0)" if any(field.name == name for field in table.schema().fields) else "0"


def create_table(spark: SparkSession, path: str, columns: str, searched: Sequence[str]) -> None:
    """Create a table if it is absent; first commits into a table that is not there yet would race.

    One that is there gets the columns that it lacks: a field that was added to the stream, or a column of a newer
    Highwater. Rows of before have null in them. A run under way writes on, without the new columns.

    Args:
        path: where it lies.
        columns: the columns in SQL, without `proof`, which every table has.
        searched: the columns of which each file keeps the least and the greatest value, so that readers skip files.
    """
    found = open_table(path)
    if found is not None:
        _add_columns(spark, path, columns, found)
        return
    statement = (
        f"CREATE TABLE IF NOT EXISTS delta.`{path}` ({columns}, proof STRING) USING delta PARTITIONED BY (slice) "
        # With the proof among them, a look at the proofs opens only files that hold one.
        f"TBLPROPERTIES ('delta.dataSkippingStatsColumns' = '{','.join([*searched, 'proof'])}')"
    )
    _once(spark, path, lambda: statement)


def _add_columns(spark: SparkSession, path: str, columns: str, table: DeltaTable) -> None:
    def statement() -> str | None:
        """Asked at each try: another run may have added them meanwhile."""
        table.update_incremental()
        there = {field.name.lower() for field in table.schema().fields}
        lacking = [column for column in parts_of(columns) if name_of(column) not in there]
        return f"ALTER TABLE delta.`{path}` ADD COLUMNS ({', '.join(lacking)})" if lacking else None

    _once(spark, path, statement)


# Delta's two ways to say that a column is there, by where it notices: as it plans a change, and as it carries it out.
_THERE_ALREADY = ("FIELD_ALREADY_EXISTS", "DELTA_DUPLICATE_COLUMNS_FOUND")


def _once(spark: SparkSession, path: str, statement: Callable[[], str | None]) -> None:
    """Change a table; another run that makes the same change at the same moment is no error."""
    for tries in range(1, CREATE_TRIES + 1):
        text = statement()
        if text is None:
            return
        try:
            with delta_errors(path):
                spark.sql(text)
        except Exception as error:
            same = isinstance(error, SupersededAttemptError) or any(it in str(error) for it in _THERE_ALREADY)
            if not same or tries == CREATE_TRIES:
                raise
        else:
            return


def parts_of(columns: str) -> list[str]:
    """The columns of a SQL list, split where a comma stands outside of brackets."""
    parts, depth = [""], 0
    for letter in columns:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def name_of(column: str) -> str:
    """The name of a column in SQL, in lower case and without quotes."""
    quoted = re.match(r"`((?:[^`]|``)+)`", column)
    return (quoted[1].replace("``", "`") if quoted else column.split(maxsplit=1)[0]).lower()


def rows_at(spark: SparkSession, path: str, version: int) -> DataFrame:
    """The rows of a table, the proofs left out, as one version of it has them.

    What was decided from proofs is computed from the rows of the same version: another commit may come between.
    """
    return spark.read.format("delta").option("versionAsOf", str(version)).load(path).where("proof IS NULL")


def replace_slices(
    spark: SparkSession,
    path: str,
    rows: DataFrame,
    proofs: Sequence[Mark],
    bases: Mapping[str, int],
    *,
    files: int,
    spread: str,
    replaced: str | None = None,
    unchanged: Mapping[str, int] | None = None,
) -> int:
    """Commit slices: their rows and proofs replace exactly these slices, in one Delta commit (I4).

    The commit is a compare-and-set. `bases` names the attempt that stood in the table when the caller looked, 0 for
    none. The comparison is part of the written query, so it reads the snapshot that the commit is checked against:
    a query that starts late, even one whose client is long gone, cannot overwrite a younger commit.

    Args:
        spark: the session.
        path: the table.
        rows: the rows, with the table's columns save `proof`.
        proofs: one for each slice.
        bases: for each slice key the attempt found in the table.
        files: data files to write for each slice at the most; 0 leaves the rows as they are spread.
        spread: the column whose value picks the file where a slice has several.
        replaced: a predicate on `slice` that picks the partitions to replace, where they are others than the proofs'.
        unchanged: further partitions that the rows rest on, with the attempt found in each, 0 for none.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another attempt committed first; nothing was written.
        DependencyAwayError: Spark or the storage is away.
    """
    keys = [proof.key for proof in proofs]
    fenced = _proof_rows(spark, path, proofs, bases, unchanged or {})
    whole = rows.unionByName(fenced, allowMissingColumns=True)
    with delta_errors(path):
        writer = _laid_out(whole, files, spread, alone=replaced is None and len(keys) == 1).write.format("delta")
        if replaced is None and not any(bases.values()):
            # The comparison makes sure that there is nothing to replace, so Delta need not look for it: 0.5 s less.
            writer = writer.mode("append")
        else:
            writer = writer.mode("overwrite").option("replaceWhere", replaced or slice_is_one_of(keys))
        writer.option("userMetadata", user_metadata(proofs)).save(path)
        return last_version(spark)


def user_metadata(proofs: Iterable[Mark]) -> str:
    """The `userMetadata` of a commit that holds these slices."""
    return json.dumps({"highwater": [proof.to_plain() for proof in proofs]}, separators=(",", ":"), sort_keys=True)


def last_version(spark: SparkSession) -> int:
    """The version of this session's last Delta commit."""
    found = spark.conf.get("spark.databricks.delta.lastCommitVersionInSession")
    return int(found) if found else -1


def _proof_rows(
    spark: SparkSession, path: str, proofs: Sequence[Mark], bases: Mapping[str, int], unchanged: Mapping[str, int]
) -> DataFrame:
    from pyspark.sql import functions as F

    planned = spark.createDataFrame(
        [(p.key, p.to_json(), bases[p.key]) for p in proofs],
        "slice STRING, planned STRING, base INT",
    )
    standing = _standing(spark, path, [p.key for p in proofs])
    message = F.concat(F.lit(f"{SUPERSEDED}: "), "slice", F.lit(" stands at attempt "), F.col("attempt").cast("string"))
    fenced = F.when(F.coalesce("attempt", F.lit(0)) == F.col("base"), F.col("planned")).otherwise(
        F.raise_error(F.coalesce(message, F.lit(f"{SUPERSEDED}: the slice is gone")))
    )
    checked = planned.join(F.broadcast(standing), "slice", "left").select("slice", fenced.alias("proof"))
    return _if_unchanged(checked, _standing(spark, path, list(unchanged)), unchanged) if unchanged else checked


def _standing(spark: SparkSession, path: str, keys: Sequence[str]) -> DataFrame:
    """The attempts that stand in some partitions of a table, as `slice` and `attempt`."""
    return (
        spark.read.format("delta")
        .load(path)
        .where(slice_is_one_of(keys))
        .where("proof IS NOT NULL")
        .selectExpr("slice", "CAST(get_json_object(proof, '$.attempt') AS INT) AS attempt")
    )


def _if_unchanged(checked: DataFrame, standing: DataFrame, unchanged: Mapping[str, int]) -> DataFrame:
    """The rows, or an error in Spark when other attempts stand than those that are named."""
    from pyspark.sql import functions as F

    found = standing.agg(F.map_from_entries(F.collect_list(F.struct("slice", "attempt"))).alias("found"))
    same = F.lit(True)  # noqa: FBT003 - a literal column
    for key, attempt in unchanged.items():
        same = same & (F.coalesce(F.try_element_at("found", F.lit(key)), F.lit(0)) == attempt)
    message = F.concat(F.lit(f"{SUPERSEDED}: what the slice rests on changed: "), F.col("found").cast("string"))
    return checked.crossJoin(F.broadcast(found)).select(
        "slice", F.when(same, F.col("proof")).otherwise(F.raise_error(message)).alias("proof")
    )


def _laid_out(whole: DataFrame, files: int, spread: str, *, alone: bool) -> DataFrame:
    """One file a small slice: its rows meet in as many tasks as it shall have files."""
    from pyspark.sql import functions as F

    if files == 0:
        return whole
    if alone and files == 1:
        return whole.repartition(1)  # after the tasks that read: one task would read partition after partition
    if alone:
        return whole.coalesce(files)
    if files == 1:
        return whole.repartition("slice")
    # By value, never by row number: a task that is run again must send every row where it went before.
    return whole.repartition("slice", F.pmod(F.xxhash64(spread), F.lit(files)))
