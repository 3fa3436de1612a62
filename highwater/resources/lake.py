"""The lake: where the tables of all streams are, and which slices they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from highwater.errors import LAKE, ConfigurationError, DependencyUnavailableError
from highwater.resources.commit_log import (
    TableSlices,
    collect_slice_commits,
    read_committed_slices,
    read_slice_keys,
    with_row_counts,
)
from highwater.resources.delta import count_slice_rows, find_local_path, is_table, list_slices_in_rows, open_table
from highwater.resources.delta_rs_writes import append_missing
from highwater.resources.spark_tables import quote_table

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.slice_commits import SliceCommit

# A property of Delta's tables: a DELETE then lists the deleted rows in a file of its own and rewrites no data.
DELETION_VECTORS = "delta.enableDeletionVectors"


class Lake:
    """The Delta tables of all streams below one root.

    Args:
        root: a local path, or a URI that both Spark and delta-rs can open (`file:`, `s3a:`, `abfss:`, `gs:`).
        catalog: the schema of Spark's catalog where tables are registered; None if nowhere.
    """

    def __init__(self, root: str, catalog: str | None = None) -> None:
        self.root = root.rstrip("/")
        self.catalog = catalog

    def build_table_path(self, stream: str, table: str) -> str:
        """The path of a stream's table."""
        return f"{self.root}/{stream}/{table}"

    def build_reference_path(self, table: str) -> str:
        """The path of a table that streams look things up in; `table` is its path below the root."""
        return f"{self.root}/{table}"

    def is_root_missing(self) -> bool:
        """Whether the root is a folder of this machine that does not exist; never true of a lake with a URI."""
        local = find_local_path(self.root)
        return local is not None and not local.is_dir()

    def ensure_answering(self, stream: str) -> None:
        """Ask the storage one short question.

        Raises:
            DependencyUnavailableError: it did not answer.
        """
        try:
            is_table(self.build_table_path(stream, "raw"))
        except DependencyUnavailableError as error:
            if error.of == LAKE:  # a fault of that table alone is no outage
                raise

    def open_stream_table(self, stream: str, table: str) -> DeltaTable | None:
        """The table opened without a JVM, or None if it was never created.

        Raises:
            DependencyUnavailableError: the lake could not be read; this is not the same as empty (I15).
            ConfigurationError: somebody enabled deletion vectors for the table.
        """
        found = open_table(path := self.build_table_path(stream, table))
        if found is not None:
            _ensure_without_deletion_vectors(path, found)
        return found

    def append_missing(self, stream: str, table: str, find: Callable[[DeltaTable | None], pa.Table]) -> int:
        """Add the rows that a table lacks; see `highwater.resources.delta_rs_writes.append_missing`.

        Args:
            stream: the stream's name.
            table: the table's name.
            find: the rows that the table lacks as it was opened; None where it was never created.

        Returns:
            The number of rows.

        Raises:
            SupersededAttemptError: others wrote to the table again and again.
            DependencyUnavailableError: the lake could not be read or written.
            ConfigurationError: somebody enabled deletion vectors for the table.
        """
        path = self.build_table_path(stream, table)

        def find_in_sound_table(opened: DeltaTable | None) -> pa.Table:
            if opened is not None:
                _ensure_without_deletion_vectors(path, opened)
            return find(opened)

        return append_missing(path, find_in_sound_table)[1]

    def open_existing_table(self, stream: str, table: str, version: int | None = None) -> DeltaTable:
        """A table that must be there, as one version has it, or the newest.

        Raises:
            DependencyUnavailableError: it is gone, or could not be read: neither is the same as empty (I15).
            ConfigurationError: somebody enabled deletion vectors for the table.
        """
        found = open_table(path := self.build_table_path(stream, table), version)
        if found is None:
            raise DependencyUnavailableError(
                f"the table {table} of {stream} is gone", remedy="restore it, or materialise the slice from raw on"
            )
        _ensure_without_deletion_vectors(path, found)
        return found

    def load_commits(self, stream: str, table: str, keys: Sequence[str] | None = None) -> TableSlices:
        """The commit records of the slices that a table holds.

        Args:
            stream: the stream's name.
            table: the table's name.
            keys: the slices that are asked for; all if None.

        Raises:
            DependencyUnavailableError: the lake could not be read; this is not the same as empty (I15).
        """
        opened = self.open_stream_table(stream, table)
        return TableSlices() if opened is None else read_committed_slices(opened, keys)

    def load_slice_commits(self, stream: str, table: str, keys: Sequence[str] | None = None) -> dict[str, SliceCommit]:
        """The commit records of the slices in a table, by slice key; all of them when `keys` is None.

        For named slices, rows are counted in the table if their commit record has no count.

        Raises:
            DependencyUnavailableError: the lake could not be read.
        """
        return self.load_commits_and_version(stream, table, keys)[0]

    def load_commits_and_version(
        self, stream: str, table: str, keys: Sequence[str] | None = None, opened: DeltaTable | None = None
    ) -> tuple[dict[str, SliceCommit], int]:
        """The commit records of the slices in a table, and the version that holds them; -1 without a table.

        Args:
            stream, table, keys: as of `load_commits`.
            opened: the table, if it is open; it is opened again if None.
        """
        if keys is not None and not keys:
            return {}, -1
        if opened is None:
            opened = self.open_stream_table(stream, table)
        else:
            _ensure_without_deletion_vectors(self.build_table_path(stream, table), opened)
        if opened is None:
            return {}, -1
        found = collect_slice_commits(read_committed_slices(opened, keys))
        return with_row_counts(opened, found) if keys else found, opened.version()

    def list_slice_keys(self, stream: str, table: str) -> set[str]:
        """The keys of all slices in a table.

        Raises:
            DependencyUnavailableError: the lake could not be read.
        """
        opened = self.open_stream_table(stream, table)
        return set() if opened is None else read_slice_keys(opened)

    def list_slices_in_rows(self, stream: str, table: str) -> set[str]:
        """The slices that rows of a table name, also those without a commit record.

        Raises:
            IncompleteReadError: fewer rows were read than the table's log counts.
            DependencyUnavailableError: the lake could not be read.
        """
        opened = self.open_stream_table(stream, table)
        return set() if opened is None else list_slices_in_rows(opened)

    def count_slice_rows(self, stream: str, table: str, keys: Sequence[str]) -> dict[str, int]:
        """The rows of slices, counted in a table's files; empty without a table. Without slices nothing is read.

        Raises:
            DependencyUnavailableError: the lake could not be read.
        """
        opened = self.open_stream_table(stream, table) if keys else None
        return {} if opened is None else count_slice_rows(opened, keys)


def _ensure_without_deletion_vectors(path: str, table: DeltaTable) -> None:
    """Refuse a table whose deleted rows stay in its files: an erased key would, and row counts of the log are wrong.

    Raises:
        ConfigurationError: the table has Delta's property `delta.enableDeletionVectors`.
    """
    if table.metadata().configuration.get(DELETION_VECTORS, "false").lower() == "true":
        name = quote_table(path)
        raise ConfigurationError(
            f"the table {path} has deletion vectors: deleted rows stay in its files",
            found=f"{DELETION_VECTORS} = true",
            remedy=f"run in Spark: ALTER TABLE {name} SET TBLPROPERTIES ('{DELETION_VECTORS}' = 'false'); then "
            f"REORG TABLE {name} APPLY (PURGE)",
        )
