"""Maintenance of tables: their size in log and storage, joining small files, and removal of files no version needs."""

# Neither changes a row: OPTIMIZE writes the same rows into fewer files, and removal deletes files that belong to no
# version younger than the horizon. Neither cleans Delta's log up.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from highwater.errors import SupersededAttemptError
from highwater.maintenance import REWRITTEN_BYTES, TARGET_BYTES, File, TablePartition
from highwater.resources.delta import add_actions, read_commit_info, translate_read_errors
from highwater.resources.delta_rs_writes import translate_write_errors
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import quote_table

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

# The one partition of a table that has none.
WHOLE = ""


@dataclass(frozen=True)
class TableSize:
    """The sizes of a table.

    Args:
        files: data files of its version now.
        bytes: size of the live files.
        stored: data files in storage, with those of older versions and those that no version has.
        stored_bytes: size of the stored files.
    """

    files: int
    bytes: int
    stored: int
    stored_bytes: int


def list_files(table: DeltaTable) -> list[File]:
    """The files of a table of slices, by its log; those without statistics are left out."""
    found = add_actions(table)
    names = ("path", "size_bytes", "min.slice", "max.slice")
    if not set(names) <= {*found.column_names}:
        return []
    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return [File(*row) for row in rows if None not in row]


def read_slice_keys(table: DeltaTable, files: Sequence[File]) -> set[str]:
    """The slices that rows of some files name.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    import pyarrow.parquet as pq

    storage_, found = _open_storage(table), {file.first for file in files if file.first == file.last}
    with translate_read_errors(str(table.table_uri)):
        for file in files:
            if file.first == file.last:
                continue
            column = pq.read_table(unquote(file.path), columns=["slice"], filesystem=storage_)["slice"]
            found |= {str(key) for key in column.unique().to_pylist()}
    return found


def list_partitions(table: DeltaTable) -> list[TablePartition]:
    """The table's partitions with the sizes of their files, by its log."""
    found: dict[str, list[int]] = {}
    for key, size in _list_file_sizes(table):
        found.setdefault(key, []).append(size)
    return [TablePartition(key, tuple(sizes)) for key, sizes in sorted(found.items())]


def _list_file_sizes(table: DeltaTable) -> Iterator[tuple[str, int]]:
    """Partition and size of each file of the version now."""
    found = add_actions(table)
    sizes = found["size_bytes"].to_pylist()
    by = _find_partition_column(table)
    keys = [WHOLE] * len(sizes) if by is None else found[f"partition.{by}"].to_pylist()
    yield from zip(keys, sizes, strict=True)


def _find_partition_column(table: DeltaTable) -> str | None:
    return next(iter(table.metadata().partition_columns), None)


def _list_live_files(table: DeltaTable) -> Iterator[tuple[str, int]]:
    """Path, as the log writes it, and size of each file of the version now."""
    columns = add_actions(table).select(["path", "size_bytes"]).to_pydict()
    yield from zip(columns["path"], columns["size_bytes"], strict=True)


def measure_stock(table: DeltaTable) -> TableSize:
    """The sizes of the table now.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    live, stored = [size for _, size in _list_live_files(table)], _list_stored_files(table)
    return TableSize(len(live), sum(live), len(stored), sum(stored.values()))


def _list_stored_files(table: DeltaTable) -> dict[str, int]:
    """All data files below the table, by path, with their sizes."""
    from pyarrow import fs

    with translate_read_errors(str(table.table_uri)):
        infos = _open_storage(table).get_file_info(fs.FileSelector("", recursive=True))
    return {info.path: info.size for info in infos if info.is_file and _is_data(info.path)}


def _open_storage(table: DeltaTable) -> Any:
    """The storage below the table, as delta-rs reaches it."""
    from deltalake.fs import DeltaStorageHandler
    from pyarrow import fs

    return fs.PyFileSystem(DeltaStorageHandler.from_table(table._table))  # noqa: SLF001 - there is no other way


def _is_data(path: str) -> bool:
    """Whether a file may hold rows: it is no part of Delta's log, and no checksum of Hadoop.

    Deletion vectors and Iceberg's metadata lie beside the rows too, and Delta's log lists them in no version.
    """
    return path.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in path.split("/"))


def read_commit_times(table: DeltaTable, versions: Sequence[int]) -> Mapping[int, datetime | None]:
    """The times at which versions were committed, in UTC; None where Delta's log has them no more.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    said = {version: read_commit_info(table, version) or {} for version in versions}
    return {
        version: datetime.fromtimestamp(one["timestamp"] / 1000, UTC) if "timestamp" in one else None
        for version, one in said.items()
    }


def join_files(spark: SparkSession, path: str) -> None:
    """Join the small files of a table without partitions, in one commit that changes no row.

    Raises:
        SupersededAttemptError: another writer was first; nothing was written.
        DependencyUnavailableError: Spark or the storage is unavailable.
    """
    # By default OPTIMIZE rewrites every file below a gigabyte.
    sizes = {
        "spark.databricks.delta.optimize.minFileSize": str(REWRITTEN_BYTES),
        "spark.databricks.delta.optimize.maxFileSize": str(TARGET_BYTES),
    }
    with delta_errors(path), session_settings(spark, sizes):
        spark.sql(f"OPTIMIZE {quote_table(path)}").collect()


def join_small(table: DeltaTable, keys: Sequence[str]) -> None:
    """`join_files` for a table that is written without a JVM; its caller holds the lease of its writers, if it has one.

    Raises:
        SupersededAttemptError: another writer was first; nothing was written.
        DependencyUnavailableError: the storage is unavailable.
    """
    from deltalake.exceptions import CommitFailedError

    path = str(table.table_uri)
    with translate_write_errors(path):
        try:
            by = _find_partition_column(table)
            some = None if by is None else [(by, "in", list(keys))]
            table.optimize.compact(some, target_size=TARGET_BYTES)
        except CommitFailedError as error:
            raise SupersededAttemptError(
                f"another writer of {path} was first",
                found=_format_error_line(error),
                remedy="nothing to do: it is tried another time",
            ) from error


def list_removable_files(table: DeltaTable, hours: int) -> dict[str, int]:
    """The data files that no version younger than `hours` needs, and those of writers that died so long ago, by size.

    delta-rs lists them: by Delta's log, and by the age in storage of files outside the log. It would also take Hadoop's
    checksums of files that stay, and would make an entry in the log; so it is only asked.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    with translate_read_errors(str(table.table_uri)):
        found = set(table.vacuum(retention_hours=int(hours), enforce_retention_duration=False, full=True))
    live = {form for path, _ in _list_live_files(table) for form in (path, unquote(path))}
    return {path: size for path, size in _list_stored_files(table).items() if path in found and path not in live}


def remove_files(table: DeltaTable, hours: int) -> int:
    """Remove the files of `list_removable_files` with their checksums; returns the number of data files.

    Raises:
        DependencyUnavailableError: the storage is unavailable; files that were removed by then are gone.
    """
    gone, opened = list_removable_files(table, hours), _open_storage(table)
    with translate_write_errors(str(table.table_uri)):
        for path in gone:
            opened.delete_file(path)
            folder, _, name = path.rpartition("/")
            checksum = f"{folder}/.{name}.crc"
            if opened.get_file_info(checksum).is_file:
                opened.delete_file(checksum)
    return len(gone)


def _format_error_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
