"""Delta tables read without a JVM: opening, queries, and what a table's log says."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.errors import LAKE, DependencyUnavailableError, IncompleteReadError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

READER: Mapping[str, str] = MappingProxyType(
    {
        # Spark without our session settings, such as a person's own OPTIMIZE, writes timestamps as INT96. By default
        # DataFusion reads these as nanoseconds, which overflow outside of 1677 to 2262.
        "datafusion.execution.parquet.coerce_int96": "us",
        # deltalake takes a missing count of nulls in a Parquet footer for zero, so `IS NULL` finds no row of such a
        # file (see `highwater.resources.spark.SESSION_CONF`). Files are still chosen by the statistics of Delta's log.
        "datafusion.execution.parquet.pruning": "false",
    }
)


# Each file takes several requests in a row, so sixteen files are read at once.
READER_OF_OBJECTS: Mapping[str, str] = MappingProxyType(
    {
        **READER,
        "datafusion.execution.target_partitions": "16",
        "datafusion.optimizer.repartition_file_min_size": f"{64 * 1024}",
    }
)


def open_table(path: str, version: int | None = None) -> DeltaTable | None:
    """Open a Delta table without a JVM; None if there is none at the path.

    Args:
        path: where it lies.
        version: is read, without the log after it; the newest if None.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    from deltalake.exceptions import TableNotFoundError

    from highwater.resources.table_pool import POOL

    try:
        if (found := POOL.take(path, version)) is not None:
            return found
        with suppress(TableNotFoundError):
            return _open(path, version)
        # It is absent, was created meanwhile, or lacks the version. To ask this first would be one request more to an
        # object store, for each table that a run looks at.
        return _open(path, version) if is_table(path) else None
    except DependencyUnavailableError:
        raise
    except Exception as error:
        raise _build_unreadable_error([path], error) from error


def _open(path: str, version: int | None) -> DeltaTable:
    from deltalake import DeltaTable

    from highwater.resources.table_pool import POOL

    return POOL.lend(path, DeltaTable(path)) if version is None else DeltaTable(path, version)


def read_commit_info(table: DeltaTable, version: int) -> dict[str, Any] | None:
    """The description of a commit in the table's log; None where Delta has cleaned the entry away.

    Not from `DeltaTable.history`, which counts versions down from the one that was opened. After another commit, or
    for a commit that says nothing of itself, its numbers are those of other commits.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    from highwater.resources.table_pool import HEAD_BYTES, read_entry

    with translate_read_errors(str(table.table_uri)):
        entry = _read_entry_head(table, version)
        if entry is not None and len(entry) == HEAD_BYTES:
            entry = read_entry(table, version, whole=True)
    return None if entry is None else next(_find_actions(entry, "commitInfo"), {})


# The bytes that a commit added, among the metrics of one by delta-rs, which leaves them out.
ADDED_BYTES = "num_target_bytes_added"


def read_commit_metrics(table: DeltaTable, version: int) -> dict[str, Any]:
    """The metrics of a commit, as the table's log has them; empty where it has none.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    metrics: dict[str, Any] = (read_commit_info(table, version) or {}).get("operationMetrics") or {}
    if not metrics.keys() & {"num_target_files_added", "num_added_files"}:
        return metrics
    from highwater.resources.table_pool import read_entry

    with translate_read_errors(str(table.table_uri)):
        added = _find_actions(read_entry(table, version, whole=True) or b"", "add")
    return {**metrics, ADDED_BYTES: sum(one["size"] for one in added)}


def read_transaction_version(table: DeltaTable, app: str) -> int | None:
    """The version of Delta's transaction that an application committed last; None if it committed none.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    with translate_read_errors(str(table.table_uri)):
        # To look it up, all entries since the last checkpoint are read; mostly the newest has it.
        newest = _find_actions(_read_entry_head(table, table.version()) or b"", "txn")
        if (found := next((one["version"] for one in newest if one["appId"] == app), None)) is not None:
            return int(found)
        try:
            return table.transaction_version(app)
        except DeltaError:  # since it was opened, Delta has cleaned entries away that a checkpoint replaces
            return DeltaTable(table.table_uri, table.version()).transaction_version(app)


def _read_entry_head(table: DeltaTable, version: int) -> bytes | None:
    from highwater.resources.table_pool import LentTable, read_entry

    return table.read_entry(version) if isinstance(table, LentTable) else read_entry(table, version)


def _find_actions(entry: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The actions of a name in an entry of a log, or in its beginning, whose last line may be a part."""
    from highwater.resources.table_pool import HEAD_BYTES

    lines = entry.split(b"\n")
    for line in lines[:-1] if len(entry) == HEAD_BYTES else lines:
        if line.startswith(b'{"%b"' % name.encode()):
            yield json.loads(line)[name]


def is_table(path: str) -> bool:
    """Whether there is a table, by its log alone."""
    from deltalake import DeltaTable

    try:
        found = DeltaTable.is_deltatable(path)
        if not found:
            _ensure_absent(path)
        return found
    except Exception as error:
        raise _build_unavailable_error(path, error) from error


def _ensure_absent(path: str) -> None:
    """Ensure that a local table is not there: delta-rs takes a folder that it may not enter for an absent one (I15).

    Raises:
        OSError: a folder could not be entered.
    """
    if (local := find_local_path(path)) is not None:
        with suppress(FileNotFoundError, NotADirectoryError):
            (local / "_delta_log").stat()


def find_local_path(path: str) -> Path | None:
    """A path of the lake in the file system of this machine; None for another URI."""
    local = path.removeprefix("file://").removeprefix("file:")
    return None if "://" in local else Path(local)


def query(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
    """Rows of a query over one table, named `t` in it, read without a JVM.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    return query_all({"t": table}, sql)


def query_all(tables: Mapping[str, DeltaTable], sql: str) -> list[dict[str, Any]]:
    """Rows of a query over tables, by their names in it, read without a JVM.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    found: list[dict[str, Any]] = run_query(tables, sql).to_pylist()
    return found


def query_arrow(tables: Mapping[str, DeltaTable], sql: str) -> pa.Table:
    """Rows of a query over tables as an Arrow table, whose text is of the type `string`.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    import pyarrow as pa

    try:
        found = read_columns(_execute_query(tables, sql))
        plain = [one.with_type(pa.string()) if one.type == pa.string_view() else one for one in found.schema]
        return found.cast(pa.schema(plain))
    except Exception as error:
        raise _build_unreadable_error([str(table.table_uri) for table in tables.values()], error) from error


def query_columns(tables: Mapping[str, DeltaTable], sql: str) -> dict[str, list[Any]]:
    """The columns of a query's answer: much lighter than rows where it is long.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    found: dict[str, list[Any]] = run_query(tables, sql).to_pydict()
    return found


def run_query(tables: Mapping[str, DeltaTable], sql: str) -> pa.Table:
    """A query's answer as an Arrow table: lighter still, for what goes into another query.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    try:
        return read_columns(_execute_query(tables, sql))
    except Exception as error:
        raise _build_unreadable_error([str(table.table_uri) for table in tables.values()], error) from error


# Sessions of DataFusion, which keep the footers of Parquet files that they read. Each thread has its own, since the
# tables of a query have its names in the session.
_sessions = threading.local()


def _execute_query(tables: Mapping[str, DeltaTable], sql: str) -> Any:
    """The answer as a stream, to be read by pyarrow.

    deltalake's own reader was seen to hold the interpreter's lock as long as a query takes: no lease could be renewed.
    """
    from deltalake import QueryBuilder

    is_local = all(find_local_path(str(table.table_uri)) is not None for table in tables.values())
    kind, reader = ("files", READER) if is_local else ("objects", READER_OF_OBJECTS)
    session = vars(_sessions).pop(kind, None) or QueryBuilder(dict(reader))
    for name, table in tables.items():
        session = session.register(name, table)
    answer = session.execute(sql)
    for name in tables:
        read_columns(session.execute(f'DROP TABLE "{name}"'))
    vars(_sessions)[kind] = session  # after an error the next query has a new one
    return answer


def add_actions(table: DeltaTable) -> pa.Table:
    """The files of a table as it was opened, with their statistics, by its log.

    Raises:
        DependencyUnavailableError: the log could not be read.
    """
    try:
        return read_columns(table.get_add_actions(flatten=True))
    except Exception as error:
        raise _build_unreadable_error([str(table.table_uri)], error) from error


def read_columns(stream: Any) -> pa.Table:
    """An answer of deltalake, as a table of Arrow's; `pa.table` would load pandas first, for half a second."""
    import pyarrow as pa

    return pa.RecordBatchReader.from_stream(stream).read_all()


def count_logged_rows(table: DeltaTable) -> int:
    """About how many rows a table has, by its log: those of files without statistics are left out."""
    return sum(count or 0 for count in add_actions(table)["num_records"].to_pylist())


def count_slice_rows(table: DeltaTable, keys: Collection[str]) -> dict[str, int]:
    """The rows of slices, counted in the table's files; 0 for a slice without any."""
    if not keys:
        return {}
    found = query(table, f"SELECT slice, count(*) AS rows FROM t WHERE {slice_is_one_of(keys)} GROUP BY slice")
    return {**dict.fromkeys(keys, 0), **{str(row["slice"]): int(str(row["rows"])) for row in found}}


def count_all_slice_rows(table: DeltaTable) -> dict[str, int]:
    """The rows of each slice that rows of a table name, by a read of all rows and no filter.

    Raises:
        IncompleteReadError: the query saw fewer rows than the table's log counts.
        DependencyUnavailableError: the storage could not be read.
    """
    found = query(table, "SELECT slice, count(*) AS rows FROM t GROUP BY slice")
    rows = {str(row["slice"]): int(row["rows"]) for row in found}
    ensure_all_read(table, sum(rows.values()))
    return rows


def list_slices_in_rows(table: DeltaTable) -> set[str]:
    """The slices that rows of a table name, by a read of all rows.

    Raises:
        IncompleteReadError: the query saw fewer rows than the table's log counts.
        DependencyUnavailableError: the storage could not be read.
    """
    return set(count_all_slice_rows(table))


def ensure_all_read(table: DeltaTable, seen: int) -> None:
    """Compare the rows that a query saw of a plain table with the table's log, where that has statistics.

    Raises:
        IncompleteReadError: the query saw fewer.
    """
    counts = add_actions(table)["num_records"].to_pylist()
    logged = sum(count for count in counts if count is not None)
    if seen < logged:
        raise IncompleteReadError(
            f"a read of {table.table_uri} did not return all rows",
            stored=f"{logged:,} rows by the table's log",
            found=f"{seen:,} rows",
            remedy="nothing was concluded from it; see IncompleteReadError in the runbook",
        )


def ensure_complete(table: DeltaTable, seen: Mapping[str, int], recorded: Mapping[str, int]) -> None:
    """Compare the rows that a query saw of each slice with what its commit recorded.

    Raises:
        IncompleteReadError: the query saw fewer.
    """
    for key, rows in recorded.items():
        if seen.get(key, 0) < rows:
            raise IncompleteReadError(
                f"a read of {table.table_uri} did not return all rows of {key}",
                stored=f"{rows:,} rows by its commit",
                found=f"{seen.get(key, 0):,} rows",
                remedy="nothing was concluded from it; see IncompleteReadError in the runbook",
            )


def stream_rows(table: DeltaTable, sql: str) -> Iterator[dict[str, Any]]:
    """Rows of a query over one table, a batch at a time: for results that are not to be held whole.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    return stream_all({"t": table}, sql)


def stream_all(tables: Mapping[str, DeltaTable], sql: str) -> Iterator[dict[str, Any]]:
    """Rows of a query over several tables, by their names in it, a batch at a time.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    for batch in stream_batches(tables, sql):
        yield from batch.to_pylist()


def stream_batches(tables: Mapping[str, DeltaTable], sql: str) -> Iterator[pa.RecordBatch]:
    """A query's answer as Arrow batches of some thousand rows each.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    import pyarrow as pa

    try:
        yield from pa.RecordBatchReader.from_stream(_execute_query(tables, sql))
    except Exception as error:
        raise _build_unreadable_error([str(table.table_uri) for table in tables.values()], error) from error


def _build_unreadable_error(paths: Sequence[str], error: Exception) -> DependencyUnavailableError:
    """The error for tables that could not be read: the lake is unavailable only if one gets no answer at all.

    A fault of one table alone, such as a missing file, must not open the lake's breaker for all.
    """
    for path in paths:
        try:
            is_table(path)
        except DependencyUnavailableError as unavailable:
            return unavailable
    found = _build_unavailable_error(", ".join(paths), error)
    found.of = None
    return found


@contextmanager
def translate_read_errors(path: str) -> Iterator[None]:
    """Say the errors of a look without a JVM in our words."""
    try:
        yield
    except Exception as error:
        raise _build_unavailable_error(path, error) from error


def _build_unavailable_error(path: str, error: Exception) -> DependencyUnavailableError:
    return DependencyUnavailableError(
        f"the lake could not be read at {path}",
        found=join_lines(str(error)) or type(error).__name__,
        remedy="check that HIGHWATER_LAKE is reachable and readable, then request the slice again",
        of=None if _is_root_readable(path) else LAKE,
    )


def _is_root_readable(path: str) -> bool:
    """Whether the lake around a local table answers, so that the fault is of this table alone."""
    if (local := find_local_path(path)) is None:
        return False
    try:
        with os.scandir(local.parent.parent) as found:
            next(found, None)
    except OSError:
        return False
    return True


def join_lines(text: str) -> str:
    """An error of delta-rs, which puts each cause below what it caused, in colours and with arrows."""
    lines = [line.strip(" ↳\t") for line in _COLOUR.sub("", text).splitlines()]
    return ": ".join(line for line in lines if line)[:_LONGEST_ERROR]


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_ERROR = 500


def slice_is_one_of(keys: Iterable[str], column: str = "slice") -> str:
    """The SQL predicate that picks whole slices, for `replaceWhere` and for reading; of no slices it picks nothing.

    DataFusion skips no file by a list of more than twenty values, so the bounds are said too.
    """
    ordered = sorted(keys)
    if not ordered:
        return "false"
    listed = f"{column} IN ({', '.join(map(quote_text, ordered))})"
    if len(ordered) == 1:
        return listed
    return f"({column} >= {quote_text(ordered[0])} AND {column} <= {quote_text(ordered[-1])} AND {listed})"


def quote_text(value: str) -> str:
    """A text as a literal in SQL."""
    return "'" + value.replace("'", "''") + "'"


def quote_column(name: str) -> str:
    """A column's name in a query to `query` and its like; Spark quotes otherwise (`highwater.assets.parsing`)."""
    return '"' + name.replace('"', '""') + '"'


def select_common_columns(tables: Iterable[DeltaTable], names: Iterable[str]) -> list[str]:
    """The columns, quoted, that all tables have: a field that was added comes with each one's next commit."""
    there = [{field.name for field in table.schema().fields} for table in tables]
    return [quote_column(name) for name in names if all(name in one for one in there)]


def read_count(table: DeltaTable, name: str) -> str:
    """A column of counts as SQL: 0 in rows, and in a table, from before it was there."""
    return f"coalesce({name}, 0)" if has_column(table, name) else "0"


def has_column(table: DeltaTable, name: str) -> bool:
    """Whether a table has a column; one that an older version made may not have it yet."""
    return any(field.name == name for field in table.schema().fields)
