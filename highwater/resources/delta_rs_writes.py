"""Writes to the lake by delta-rs, without a JVM: create a table, append, replace slices, delete folders."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.errors import LAKE, DependencyUnavailableError, SupersededAttemptError
from highwater.resources.delta import join_lines, open_table, query, slice_is_one_of, translate_read_errors
from highwater.resources.object_store import ensure_conditional_put

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema

# Commits between two checkpoints of a table's log. deltalake's own default is 100, and who opens the table reads the
# entries since the last: with 10, which is Spark's default, an open took half the time, and so did an append.
CHECKPOINT_INTERVAL = 10
CHECKPOINTS: Mapping[str, str] = MappingProxyType({"delta.checkpointInterval": f"{CHECKPOINT_INTERVAL}"})
# The metrics of a MERGE that changed no row.
NOTHING_MERGED: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys([f"num_target_rows_{done}" for done in ("inserted", "updated", "deleted", "copied")], 0),
        "num_target_files_added": 0,
    }
)
# Those of an append of no row, by Spark's names.
_NOTHING_APPENDED: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(["numFiles", "numOutputRows", "numOutputBytes"], 0)
)
# Table properties that delta-rs follows, or that say nothing to a writer, and features of tables that it writes.
_PROPERTIES = frozenset(
    {
        "delta.checkpointInterval",
        "delta.dataSkippingStatsColumns",
        "delta.deletedFileRetentionDuration",
        "delta.enableExpiredLogCleanup",
        "delta.logRetentionDuration",
    }
)
_FEATURES = frozenset({"timestampNtz"})
# Versions of the protocol without any feature but appendOnly and invariants, and with a list of them.
_PLAIN, _WITH_LIST = (1, 2), (3, 7)
# Types whose statistics delta-rs writes exactly.
_EXACT = re.compile(r"string|byte|short|integer|long|date|timestamp|timestamp_ntz|decimal\((\d|1[0-8]),\s*0\)")
# Each try takes some 50 ms; some ten processes add to one table at once at the most.
TRIES = 50


def open_or_create_table(
    path: str,
    schema: pa.Schema,
    description: str,
    *,
    partition_by: Sequence[str] = (),
    configuration: Mapping[str, str] = MappingProxyType({}),
) -> DeltaTable:
    """Open a table; one that is absent, or was made by another description, is created without rows.

    Args:
        path: where it lies.
        schema: its columns.
        description: inputs of its rows beside events; rows with another description are discarded.
        partition_by: the columns that partition it.
        configuration: Delta's table properties.

    Raises:
        DependencyUnavailableError: the storage could not be read or written.
    """
    from deltalake import DeltaTable

    found = open_table(path)
    if found is not None and found.metadata().description == description:
        return found
    if found is None:
        create(path, schema, description=description, partition_by=partition_by, configuration=configuration)
    else:
        with translate_write_errors(path):
            DeltaTable.create(
                path,
                schema,
                mode="overwrite",
                partition_by=list(partition_by),
                description=description,
                configuration={**CHECKPOINTS, **configuration},
                raise_if_key_not_exists=False,
            )
    with translate_write_errors(path):
        return DeltaTable(path)


def create(
    path: str,
    schema: Schema | pa.Schema,
    *,
    partition_by: Sequence[str] = (),
    description: str | None = None,
    configuration: Mapping[str, str | None] | None = None,
) -> None:
    """Write the first version of a table, unless somebody else does at the same moment.

    It is one file, there or not, despite other writers and kills. The client's own retries would write a late log entry
    as the second version, with another identity of the table, over what came between.

    Args:
        path: where it lies; that it is absent was seen.
        schema: its columns.
        partition_by: the columns that partition it.
        description: inputs of its rows.
        configuration: Delta's table properties.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake import CommitProperties, DeltaTable
    from deltalake.exceptions import DeltaError

    with translate_write_errors(path):
        try:
            DeltaTable.create(
                path,
                schema,
                partition_by=list(partition_by),
                description=description,
                configuration={**CHECKPOINTS, **(configuration or {})},
                # A property of our own is none of Delta's.
                raise_if_key_not_exists=False,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except DeltaError:
            if not DeltaTable.is_deltatable(path):
                raise


def replace_rows_of_slices(
    table: DeltaTable,
    rows: pa.Table,
    keys: Iterable[str],
    metadata: str,
    *,
    unlike: Sequence[str] = (),
) -> int:
    """Replace the rows of some values of `slice` in one commit, which takes the version after the opened one, or fails.

    So a writer has read the whole table when it commits, and nobody comes in between. The version is taken in this
    process, by the storage's own put-if-absent: a writer that hung commits at its old place or not at all.

    Args:
        table: as it was opened before anything was read that the rows rest on.
        rows: the new rows.
        keys: the values of `slice` that are replaced.
        metadata: the commit's `userMetadata`.
        unlike: columns with hardly two equal rows; they are written without a dictionary.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another commit took the version; nothing was written.
        DependencyUnavailableError: the storage is unavailable.
    """
    replaced = list(keys)
    return _replace(table, rows, slice_is_one_of(replaced) if replaced else "false", metadata, unlike)


def replace_all(table: DeltaTable, rows: pa.Table, *, unlike: Sequence[str] = ()) -> int:
    """Replace all rows of the table in one commit, which takes the version after the opened one, or fails."""
    return _replace(table, rows, None, None, unlike)


def _replace(
    table: DeltaTable, rows: pa.Table, predicate: str | None, metadata: str | None, unlike: Sequence[str]
) -> int:
    from deltalake import ColumnProperties, CommitProperties, DeltaTable, WriterProperties, write_deltalake
    from deltalake.exceptions import CommitFailedError

    read = table.version()
    path = str(table.table_uri)
    carried = None if metadata is None else {"userMetadata": metadata}
    once = CommitProperties(custom_metadata=carried, max_commit_retries=0)
    plain = ColumnProperties(dictionary_enabled=False)
    files = WriterProperties(compression="SNAPPY", column_properties=dict.fromkeys(unlike, plain))
    with translate_write_errors(path):
        try:
            write_deltalake(
                table,
                rows,
                mode="overwrite",
                predicate=predicate,
                writer_properties=files,
                commit_properties=once,
                post_commithook_properties=_build_hooks(read + 1),
            )
        except CommitFailedError:
            if DeltaTable(path).version() == read:
                raise
            raise SupersededAttemptError(
                f"another writer of {path} was first",
                stored=f"version {read + 1}",
                remedy="nothing to do: the write is tried again",
            ) from None
    return read + 1


def append_missing(
    path: str, find: Callable[[DeltaTable | None], pa.Table], *, partition_by: Sequence[str] = ()
) -> tuple[DeltaTable | None, int]:
    """Add the rows that a table lacks; it is created before the first of them.

    A commit takes the version after the look that it rests on. So two processes that look at once add no row twice: the
    one that is late looks again.

    Args:
        path: where the table lies.
        find: the rows that the table lacks as it was opened; None where it is absent.
        partition_by: the columns that partition it.

    Returns:
        The table with them, None where it is absent, and the number of rows that were added.

    Raises:
        SupersededAttemptError: others wrote to the table again and again.
        DependencyUnavailableError: the storage could not be read or written.
    """
    for tries in range(1, TRIES + 1):
        table = open_table(path)
        rows = find(table)
        if not rows.num_rows:
            return table, 0
        if table is None:
            create(path, rows.schema, partition_by=partition_by)
        elif append_at(table, rows):
            return table, rows.num_rows
        else:
            time.sleep(random.uniform(0, 0.05 * tries))  # noqa: S311 - spreads the waiting, hides nothing
    raise SupersededAttemptError(
        f"{path}: other writers were first {TRIES} times", remedy="nothing to do: the next run adds what is missing"
    )


def append_at(table: DeltaTable, rows: pa.Table) -> bool:
    """Add rows in the version after the one that was opened, which the table has then; False if another commit took it.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake import CommitProperties, DeltaTable, write_deltalake
    from deltalake.exceptions import CommitFailedError

    read, path = table.version(), str(table.table_uri)
    with translate_write_errors(path):
        try:
            write_deltalake(
                table,
                rows,
                mode="append",
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=_build_hooks(read + 1),
            )
        except CommitFailedError:
            if DeltaTable(path).version() == read:
                raise
            return False
        _follow(table)
    return True


def takes_writes(table: DeltaTable) -> bool:
    """Whether nothing in a table asks of its writers what delta-rs would not do.

    The table must name the columns that have statistics. delta-rs computes those of decimals as floating-point numbers,
    cut to 64 bits, and leaves NaN out of those of floats: readers would skip files that have rows for them.
    """
    protocol, properties = table.protocol(), table.metadata().configuration
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    versions = (protocol.min_reader_version, protocol.min_writer_version)
    kinds = {field.name: str(field.type.type) for field in table.schema().fields}
    return (
        (versions == _PLAIN or (versions == _WITH_LIST and features <= _FEATURES))
        and {name for name in properties if name.startswith("delta.")} <= _PROPERTIES
        and all(_EXACT.fullmatch(kinds.get(name, "")) for name in list_statistics_columns(table))
    )


def list_statistics_columns(table: DeltaTable) -> list[str]:
    """The columns that have statistics in the files of a table; one empty name where no property names them."""
    named = table.metadata().configuration.get("delta.dataSkippingStatsColumns") or ""
    return [name.strip("`") for name in named.split(",")]


def merge_rows(table: DeltaTable, rows: pa.Table, newer: str, options: Mapping[str, str]) -> None:
    """Merge rows into a table by their key in one commit, which takes the version after the opened one.

    There is a commit of that version afterwards: this one, or that of another writer who was first. The caller looks.

    Args:
        table: as it was opened.
        rows: one for each key, with all columns of the table.
        newer: the condition in SQL that such a row `s` replaces the row `t` of the table.
        options: `txnAppId`, `txnVersion` and `userMetadata` of the commit, as Spark's writer takes them.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake import DeltaTable, WriterProperties
    from deltalake.exceptions import DeltaError

    read, path = table.version(), str(table.table_uri)
    with translate_write_errors(path):
        try:
            (
                table.merge(
                    rows,
                    "t.key = s.key",
                    source_alias="s",
                    target_alias="t",
                    writer_properties=WriterProperties(compression="SNAPPY"),
                    commit_properties=_build_commit(options),
                    post_commithook_properties=_build_hooks(read + 1),
                )
                .when_matched_update_all(newer)
                .when_not_matched_insert_all()
                .execute()
            )
            if table.version() == read:  # no row is newer, so delta-rs committed nothing
                _append_nothing(table, options, NOTHING_MERGED)
        except (DeltaError, OSError):
            # Also an error after the commit: its answer was lost, or the checkpoint that follows it failed.
            if DeltaTable(path).version() == read:
                raise
        else:
            _follow(table)


def append_rows(table: DeltaTable, rows: pa.Table, options: Mapping[str, str]) -> bool:
    """Append rows in one commit, which takes the version after the opened one.

    Args:
        table: as it was opened.
        rows: with all columns of the table, in their order.
        options: as of `merge_rows`.

    Returns:
        False if delta-rs did not commit, because it refused, or another writer was first: Spark may, under the same
        number. Otherwise there is a commit of that version; the caller looks.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake import WriterProperties, write_deltalake

    def write() -> None:
        write_deltalake(
            table,
            rows,
            mode="append",
            writer_properties=WriterProperties(compression="SNAPPY"),
            commit_properties=_build_commit(options),
            post_commithook_properties=_build_hooks(table.version() + 1),
        )

    return _try_to_commit(table, write)


def append_no_rows(table: DeltaTable, options: Mapping[str, str]) -> bool:
    """Commit what a commit carries, and no row, as `append_rows` does."""
    return _try_to_commit(table, lambda: _append_nothing(table, options, _NOTHING_APPENDED))


def _try_to_commit(table: DeltaTable, write: Callable[[], None]) -> bool:
    from deltalake import DeltaTable
    from deltalake.exceptions import CommitFailedError

    read, path = table.version(), str(table.table_uri)
    with translate_write_errors(path):
        try:
            write()
        except CommitFailedError:
            return False
        except Exception as error:
            # Also an error after the commit: its answer was lost, or the checkpoint that follows it failed.
            if DeltaTable(path).version() != read:
                return True
            if isinstance(error, OSError):
                raise
            return False
    _follow(table)
    return True


def _follow(table: DeltaTable) -> None:
    from highwater.resources.table_pool import LentTable

    if isinstance(table, LentTable):
        table.follow()


def _append_nothing(table: DeltaTable, options: Mapping[str, str], metrics: Mapping[str, int]) -> None:
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=_build_commit(options, operationMetrics=dict(metrics)),
        post_commithook_properties=_build_hooks(table.version() + 1),
    )


def _build_commit(options: Mapping[str, str], **described: Any) -> CommitProperties:
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        max_commit_retries=0,
        app_transactions=[Transaction(options["txnAppId"], int(options["txnVersion"]))],
        custom_metadata={"userMetadata": options["userMetadata"], **described},
    )


def _build_hooks(version: int) -> PostCommitHookProperties:
    """What follows the commit of a version: entries that are too old leave the log with its checkpoints alone.

    deltalake looks for them after every commit, and lists the whole log for it.
    """
    from deltalake import PostCommitHookProperties

    return PostCommitHookProperties(cleanup_expired_logs=None if (version + 1) % CHECKPOINT_INTERVAL == 0 else False)


def compact(table: DeltaTable, partitions: Sequence[tuple[str, str, str]]) -> None:
    """Join the small files of some partitions, where that can be done now: maintenance does it another day."""
    from deltalake.exceptions import DeltaError

    with suppress(DeltaError, OSError):
        table.optimize.compact(list(partitions))


def rewrite_table(
    path: str, schema: pa.Schema, batches: Iterable[Sequence[Mapping[str, Any]]], description: str
) -> None:
    """Write a table again, batch by batch; each is held alone, and a partly written one starts over.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    with translate_write_errors(path):
        DeltaTable.create(path, schema, mode="overwrite", description=description, configuration=dict(CHECKPOINTS))
        for rows in batches:
            write_deltalake(path, pa.Table.from_pylist([dict(row) for row in rows], schema), mode="append")


def list_folders_with_files(root: str, folder: str) -> list[str]:
    """The names of the folders in a folder that hold a file at any depth; none where that is not there.

    Args:
        root: the existing root of the lake.
        folder: its path below the root.

    Raises:
        DependencyUnavailableError: the storage could not be read.
    """
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileSelector, FileType, PyFileSystem

    with translate_read_errors(f"{root}/{folder}"):
        selector = FileSelector(folder, allow_not_found=True, recursive=True)
        found = PyFileSystem(DeltaStorageHandler(root)).get_file_info(selector)
    files = (one.path for one in found if one.type == FileType.File)
    return sorted({path.removeprefix(f"{folder}/").partition("/")[0] for path in files})


def remove_folder(root: str, folder: str) -> None:
    """Remove all files in a folder; its path is below the root.

    Raises:
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake.fs import DeltaStorageHandler

    with translate_write_errors(f"{root}/{folder}"):
        DeltaStorageHandler(root).delete_dir(folder)


# The beginning of the names of the doctor's tables in a lake.
_TRIAL = ".highwater-doctor-"
# A trial takes seconds, so an older table is one that a killed doctor left behind.
_LONGEST_TRIAL = timedelta(hours=1)


def remove_left_trials(root: str, now: datetime) -> None:
    """Remove the tables that killed doctors left in a lake; those of others are younger.

    They harm nobody: where the store refuses, the next maintenance tries it again.
    """
    from deltalake.exceptions import DeltaError
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileSelector, FileType, PyFileSystem

    with suppress(DeltaError, OSError):
        handler = DeltaStorageHandler(root)
        files = PyFileSystem(handler)
        for trial in files.get_file_info(FileSelector("", allow_not_found=True)):
            if not trial.base_name.startswith(_TRIAL):
                continue
            inside = files.get_file_info(FileSelector(trial.path, allow_not_found=True, recursive=True))
            found = [one for one in [trial, *inside] if one.type == FileType.File]
            if found and all(now - one.mtime > _LONGEST_TRIAL for one in found):
                for one in found:
                    handler.delete_file(one.path)


def try_storage(root: str) -> None:
    """Do with a table of one row below a root what the pipeline and its maintenance do with theirs.

    Raises:
        DependencyUnavailableError: it could not be written, read or removed.
    """
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake
    from deltalake.fs import DeltaStorageHandler

    name = f"{_TRIAL}{uuid.uuid4().hex}"
    path = f"{root}/{name}"
    steps: dict[str, Callable[[], object]] = {
        "written": lambda: write_deltalake(path, pa.table({"n": [1]})),
        "read": lambda: query(DeltaTable(path), "SELECT n FROM t"),
        "removed": lambda: DeltaStorageHandler(root).delete_dir(name),
    }
    for done, step in steps.items():
        try:
            step()
        except Exception as error:
            raise DependencyUnavailableError(
                f"a table at {path} could not be {done}",
                found=join_lines(str(error)) or type(error).__name__,
                remedy=(
                    "check that HIGHWATER_LAKE is reachable, and that this user may list, read, write and delete below "
                    "it; maintenance removes the rest at that place"
                ),
                of=LAKE,
            ) from error


@contextmanager
def translate_write_errors(path: str) -> Iterator[None]:
    """Say the errors of a write without a JVM in our words; a store that could lose a commit is refused before.

    Raises:
        ConfigurationError: the store ignores the condition of a PUT.
        DependencyUnavailableError: the storage could not be written.
    """
    from deltalake.exceptions import DeltaError

    try:
        ensure_conditional_put(path)
        yield
    except (DeltaError, OSError) as error:
        raise DependencyUnavailableError(
            f"the table at {path} could not be written",
            found=join_lines(str(error)) or type(error).__name__,
            remedy="check that HIGHWATER_LAKE may be written, then request the slice again",
            of=LAKE,
        ) from error
