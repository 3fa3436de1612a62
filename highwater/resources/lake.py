"""The lake: where the tables of all streams are, and which slices they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from highwater.errors import DependencyAwayError
from highwater.resources.commit_log import Committed, committed_in, held_in, sized, slice_commits_of
from highwater.resources.delta import is_table, open_table, rows_by_slice, slices_in

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.slice_commits import SliceCommit


class Lake:
    """The Delta tables of all streams below one root.

    Args:
        root: a local path, or a URI that both Spark and delta-rs can open (`file:`, `s3a:`, `abfss:`, `gs:`).
        catalog: the schema of Spark's catalog where tables are registered; None if nowhere.
    """

    def __init__(self, root: str, catalog: str | None = None) -> None:
        self.root = root.rstrip("/")
        self.catalog = catalog

    def path(self, stream: str, table: str) -> str:
        """The path of a stream's table."""
        return f"{self.root}/{stream}/{table}"

    def reference(self, table: str) -> str:
        """The path of a table that streams look things up in; `table` is its path below the root."""
        return f"{self.root}/{table}"

    @property
    def takes_one_driver(self) -> bool:
        """Whether the log store separates only the writers of one JVM, as it does on local files."""
        return "://" not in self.root or self.root.startswith("file:")

    def folder_is_gone(self) -> bool:
        """Whether the root is a folder of this machine that does not exist; never of a lake behind a URI."""
        local = self.root.removeprefix("file://").removeprefix("file:")
        return "://" not in local and not Path(local).is_dir()

    def ensure_answering(self, stream: str) -> None:
        """Ask the storage one short question.

        Raises:
            DependencyAwayError: it did not answer.
        """
        is_table(self.path(stream, "raw"))

    def table(self, stream: str, table: str) -> DeltaTable | None:
        """The table opened without a JVM, or None if it was never created.

        Raises:
            DependencyAwayError: the lake could not be read; this is not the same as empty (I15).
        """
        return open_table(self.path(stream, table))

    def table_at(self, stream: str, table: str, version: int | None = None) -> DeltaTable:
        """A table that must be there, as one version has it, or the newest.

        Raises:
            DependencyAwayError: it is gone, or could not be read: neither is the same as empty (I15).
        """
        found = open_table(self.path(stream, table), version)
        if found is None:
            raise DependencyAwayError(
                f"the table {table} of {stream} is gone", remedy="restore it, or materialise the slice from raw on"
            )
        return found

    def commits(self, stream: str, table: str, keys: Sequence[str] | None = None) -> Committed:
        """The commit records of the slices that a table holds.

        Args:
            stream: the stream's name.
            table: the table's name.
            keys: the slices that are asked for; all if None.

        Raises:
            DependencyAwayError: the lake could not be read; this is not the same as empty (I15).
        """
        opened = self.table(stream, table)
        return Committed() if opened is None else committed_in(opened, keys)

    def committed(self, stream: str, table: str, keys: Sequence[str] | None = None) -> dict[str, SliceCommit]:
        """The commit records of the slices in a table, by slice key; all of them when `keys` is None.

        Of the slices that are named, the rows are counted in the table where no record of the commit has them.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        return self.committed_at(stream, table, keys)[0]

    def committed_at(
        self, stream: str, table: str, keys: Sequence[str] | None = None
    ) -> tuple[dict[str, SliceCommit], int]:
        """The commit records of the slices in a table, and the version that holds them; -1 without a table."""
        opened = None if keys is not None and not keys else self.table(stream, table)
        if opened is None:
            return {}, -1
        found = slice_commits_of(committed_in(opened, keys))
        return sized(opened, found) if keys else found, opened.version()

    def holds(self, stream: str, table: str) -> set[str]:
        """The keys of all slices in a table.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        opened = self.table(stream, table)
        return set() if opened is None else held_in(opened)

    def slices_in(self, stream: str, table: str) -> set[str]:
        """The slices that rows of a table name, whatever the commit records say.

        Raises:
            IncompleteReadError: fewer rows were read than the table's log counts.
            DependencyAwayError: the lake could not be read.
        """
        opened = self.table(stream, table)
        return set() if opened is None else slices_in(opened)

    def rows_of(self, stream: str, table: str, keys: Sequence[str]) -> dict[str, int]:
        """The rows of slices, counted in a table's files; empty without a table.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        opened = self.table(stream, table)
        return {} if opened is None else rows_by_slice(opened, keys)
