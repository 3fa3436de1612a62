"""Tables as Spark makes and writes them: the fence of a slice's commit is here (I4).

What belongs here: creating a table, adding columns, and `replace_slices`. What does not: what the rows mean (`assets`),
or reading without a JVM (`resources.lake`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from operator import and_
from typing import TYPE_CHECKING

from highwater.balancing import balanced
from highwater.errors import DependencyAwayError, SupersededAttemptError
from highwater.proof import user_metadata
from resources.lake import open_table, slice_is_one_of
from resources.small_tables import create
from resources.spark import ADAPTIVE, delta_errors, translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from highwater.proof import Mark

# The message of the fence below; `resources.spark` knows it again among Spark's errors.
SUPERSEDED = "HIGHWATER_SUPERSEDED"
# Taken around a commit; what it guards against is `assets.commit`'s to know.
Lock = Callable[[], AbstractContextManager[object]]
# Runs that change a table at once: one that was too late finds the change at its second try.
CHANGE_TRIES = 3
# The catalog that Delta stands behind (`resources.spark.STATIC_CONF`).
CATALOG = "spark_catalog"
# What is read is cut into this many tasks or more, so that one slice has work for as many cores.
TASKS = 8
# A task that writes what so many others would have read does it one after the other; of more it is gathered.
READS_A_WRITER = 2


def create_table(
    spark: SparkSession, path: str, columns: str, searched: Sequence[str], lock: Lock, *, plain: bool = False
) -> None:
    """Create a table if it is absent; first commits into a table that is not there yet would race.

    One that is there gets the columns that it lacks: a field that was added to the stream, or a column of a newer
    Highwater. Rows of before have null in them. A run under way writes on, without the new columns.

    Args:
        path: where it lies.
        columns: the columns in SQL, without `proof`, which every table has.
        searched: the columns of which each file keeps the least and the greatest value, so that readers skip files.
        lock: keeps out whoever commits to the table from another driver; it is taken when columns are to be added.
        plain: the table has no partitions and no column `proof`.
    """
    lacking = _lacking(path, columns)
    if lacking is None:
        whole = columns if plain else f"{columns}, proof STRING"
        _create(path, spark.createDataFrame([], whole).schema.json(), searched, plain=plain)
        lacking = _lacking(path, columns)
    for tries in range(1, CHANGE_TRIES + 1):
        if not lacking:
            return
        with lock():
            # Another run may have added them meanwhile.
            if (lacking := _lacking(path, columns)) and _added(spark, path, lacking, last=tries == CHANGE_TRIES):
                return


def _create(path: str, schema: str, searched: Sequence[str], *, plain: bool) -> None:
    """Write a table's first version, not with Spark.

    Spark makes the log's folder first, and refuses a table where there is a folder: the second of two runs at once
    would fail, and so would every run after one that was killed in between.
    """
    from deltalake import Schema

    # With the proof among them, a look at the proofs opens only files that hold one.
    with_statistics = searched if plain else [*searched, "proof"]
    create(
        path,
        Schema.from_json(schema),
        partition_by=() if plain else ("slice",),
        configuration={"delta.dataSkippingStatsColumns": ",".join(with_statistics)},
    )


def _lacking(path: str, columns: str) -> list[str] | None:
    """The columns in SQL that a table lacks as it stands now; None if there is no table."""
    table = open_table(path)
    if table is None:
        return None
    there = {field.name.lower() for field in table.schema().fields}
    return [column for column in parts_of(columns) if name_of(column) not in there]


# Delta's two ways to say that a column is there, by where it notices: as it plans a change, and as it carries it out.
_THERE_ALREADY = ("FIELD_ALREADY_EXISTS", "DELTA_DUPLICATE_COLUMNS_FOUND")


def _added(spark: SparkSession, path: str, lacking: Sequence[str], *, last: bool) -> bool:
    """Add columns; another run that adds the same at the same moment is no error before the last try."""
    try:
        with delta_errors(path):
            spark.sql(f"ALTER TABLE {table_in_sql(path)} ADD COLUMNS ({', '.join(lacking)})")
    except Exception as error:
        same = isinstance(error, SupersededAttemptError) or any(it in str(error) for it in _THERE_ALREADY)
        if not same or last:
            raise
        return False
    return True


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
    return table_at(spark, path, version).where("proof IS NULL")


def table_at(spark: SparkSession, path: str, version: int) -> DataFrame:
    """One version of any Delta table, however often the query is computed.

    Whatever Spark holds (`persist`) it computes anew when another session of the same server commits to one of its
    tables, and when another run lets go of the same query; without a version it would then read the newest.
    """
    return spark.read.format("delta").option("versionAsOf", str(version)).load(path)


def known_rows(spark: SparkSession, columns: str, rows: Sequence[Sequence[str | int]]) -> DataFrame:
    """Rows that we know, as a part of the plan; PySpark's own `createDataFrame` sends them through a job of Python.

    A slice of 50,000 records into raw took 0.84 s instead of 0.96 s, by medians of 14 turns in one process.

    Args:
        spark: the session.
        columns: their columns in SQL, of strings and integers.
        rows: their values, in the columns' order.
    """
    return spark.sql(_known(columns), {"rows": _told(columns, rows)})


def _known(columns: str) -> str:
    """The query that makes rows of what `_told` tells as its argument `rows`."""
    # By default a value that its column cannot hold is read as null: a slice's records would be joined with nothing.
    strict = "map('mode', 'FAILFAST')"
    fields = ", ".join(column.replace(" ", ": ", 1) for column in parts_of(columns))
    return f"SELECT inline(from_json(:rows, 'ARRAY<STRUCT<{fields}>>', {strict}))"


def _told(columns: str, rows: Sequence[Sequence[str | int]]) -> str:
    names = [name_of(column) for column in parts_of(columns)]
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows])


def replace_slices(
    spark: SparkSession,
    path: str,
    rows: DataFrame,
    proofs: Sequence[Mark],
    bases: Mapping[str, int],
    *,
    files: int,
    spread: str,
    tasks: int | None = None,
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
        spread: the column whose value picks the file where slices have several, or rows are gathered.
        tasks: how many tasks read the rows, where these come from where they are without a shuffle; of those that Spark
            holds, 1. One small slice of them is committed by a plan that Spark need not adapt.
        replaced: a predicate on `slice` that picks the partitions to replace, where they are others than the proofs'.
        unchanged: further partitions that the rows rest on, with the attempt found in each, 0 for none.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another attempt committed first; nothing was written.
        DependencyAwayError: Spark or the storage is away.
    """
    keys = [proof.key for proof in proofs]
    with delta_errors(path):
        fenced = _proof_rows(spark, path, proofs, bases, unchanged or {})
        whole = rows.unionByName(fenced, allowMissingColumns=True)
        alone = replaced is None and len(keys) == 1
        writer = _laid_out(whole, files, spread, tasks or 1, alone=alone).write.format("delta")
        if replaced is None and not any(bases.values()):
            # The comparison makes sure that there is nothing to replace, so Delta need not look for it: 0.5 s less.
            writer = writer.mode("append")
        else:
            writer = writer.mode("overwrite").option("replaceWhere", replaced or slice_is_one_of(keys))
        few = tasks is not None and alone and 0 < files < TASKS
        with _as_planned(spark) if few else nullcontext():
            writer.option("userMetadata", user_metadata(proofs)).save(path)
        return last_version(spark)


@contextmanager
def _as_planned(spark: SparkSession) -> Iterator[None]:
    """Queries of the block are not planned again between their shuffles.

    To find out what a shuffle holds Spark makes a job of it and then plans the rest anew: a tenth of a small commit.
    Without that a shuffle that does not say how many tasks it wants gets hundreds, so this is not for every query.
    """
    if not _adapts(spark):
        yield
        return
    spark.conf.set(ADAPTIVE, "false")
    try:
        yield
    except Exception as error:
        # A server that is away would be waited for once more.
        if not isinstance(translated("", f"{type(error).__name__}: {error}"), DependencyAwayError):
            spark.conf.set(ADAPTIVE, "true")
        raise
    spark.conf.set(ADAPTIVE, "true")


@lru_cache(maxsize=4)
def _adapts(spark: SparkSession) -> bool:
    """Whether a session's plans are adapted, as it was set up: what a commit that broke down left set says nothing."""
    return spark.conf.get(ADAPTIVE) != "false"


def last_version(spark: SparkSession) -> int:
    """The version of this session's last Delta commit."""
    found = spark.conf.get("spark.databricks.delta.lastCommitVersionInSession")
    return int(found) if found else -1


def _proof_rows(
    spark: SparkSession, path: str, proofs: Sequence[Mark], bases: Mapping[str, int], unchanged: Mapping[str, int]
) -> DataFrame:
    planned = _told(_PLANNED, [(p.key, p.to_json(), bases[p.key]) for p in proofs])
    # One text: each step of a DataFrame is analysed by itself, and these are in the way of every commit.
    checked = spark.sql(
        f"SELECT /*+ BROADCAST(standing) */ slice, "
        f"IF(COALESCE(attempt, 0) = base, planned, RAISE_ERROR({_SUPERSEDED_BY})) AS proof "
        f"FROM ({_known(_PLANNED)}) LEFT JOIN ({_standing(path, bases)}) AS standing USING (slice)",
        {"rows": planned},
    )
    return _if_unchanged(checked, spark.sql(_standing(path, unchanged)), unchanged) if unchanged else checked


_PLANNED = "slice STRING, planned STRING, base INT"
_SUPERSEDED_BY = (
    f"COALESCE('{SUPERSEDED}: ' || slice || ' stands at attempt ' || attempt, '{SUPERSEDED}: the slice is gone')"
)


def _standing(path: str, keys: Iterable[str]) -> str:
    """The query for the attempts that stand in some partitions of a table, as `slice` and `attempt`."""
    return (
        "SELECT slice, CAST(get_json_object(proof, '$.attempt') AS INT) AS attempt "
        f"FROM {table_in_sql(path)} WHERE {slice_is_one_of(keys)} AND proof IS NOT NULL"
    )


def table_in_sql(path: str) -> str:
    """A table by its path, in the catalog that Delta stands behind; the session may look into another by itself."""
    return f"{CATALOG}.delta.`{path.replace('`', '``')}`"


def _if_unchanged(checked: DataFrame, standing: DataFrame, unchanged: Mapping[str, int]) -> DataFrame:
    """The rows, or an error in Spark when other attempts stand than those that are named."""
    from pyspark.sql import functions as F

    found = standing.agg(F.map_from_entries(F.collect_list(F.struct("slice", "attempt"))).alias("found"))
    same = balanced(
        and_,
        [F.coalesce(F.try_element_at("found", F.lit(key)), F.lit(0)) == attempt for key, attempt in unchanged.items()],
    )
    message = F.concat(F.lit(f"{SUPERSEDED}: what the slice rests on changed: "), F.col("found").cast("string"))
    return checked.crossJoin(F.broadcast(found)).select(
        "slice", F.when(same, F.col("proof")).otherwise(F.raise_error(message)).alias("proof")
    )


def _laid_out(whole: DataFrame, files: int, spread: str, tasks: int, *, alone: bool) -> DataFrame:
    """At the most so many files for each slice, and one by itself without a shuffle where few tasks can read it."""
    from pyspark.sql import functions as F

    if files == 0:
        return whole
    if alone and files == 1:
        return whole.repartition(1)  # after the tasks that read: one task would read partition after partition
    # By value, never by row number: a task that is run again must send every row where it went before.
    if alone and tasks > READS_A_WRITER * files:
        return whole.repartition(files, F.xxhash64(spread))
    if alone:
        return whole.coalesce(files)
    if files == 1:
        return whole.repartition("slice")
    return whole.repartition("slice", F.pmod(F.xxhash64(spread), F.lit(files)))
