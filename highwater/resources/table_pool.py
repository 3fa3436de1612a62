"""Delta tables that stay open for a while: to look at one again, only what came since is read from its log."""

# On an object store some seventeen requests, one after the other, open a table whose log has a checkpoint, and a slice
# looks at tables some fifty times. A table that is open needs two at once: is its log the one that was read, and did
# something come since.

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

# The sensors look at the tables of all streams in turn, at each at least once in two minutes while it has work. A table
# takes 0.1 MB and its files 2 kB each: 200 MB, and what the tables have that were used last, such as all of one stream.
IDLE_TABLES = 1_000
IDLE_FILES = 50_000
LAST_TABLES = 16
IDLE_SECONDS = 180.0
# To list the files of a table takes 0.6 µs for each, and a commit adds few.
COUNTED_EVERY = 20
# Of an entry of a log: what says of the commit, and the names of some of its files. One of OPTIMIZE can be very long.
HEAD_BYTES = 65_536


def read_entry(table: DeltaTable, version: int, *, whole: bool = False) -> bytes | None:
    """The entry of a version in the log of a table; None where there is none.

    Args:
        table: the table; its connection to the storage is used.
        version: of the table.
        whole: not its beginning alone, which is one request to an object store instead of two.

    Raises:
        OSError: the storage could not be read.
    """
    name = f"_delta_log/{version:020d}.json"
    # With the size that it is given the handler does not ask for it; a shorter file is read to its end.
    files = DeltaStorageHandler.from_table(vars(table)["_table"], None, None if whole else {name: HEAD_BYTES})
    try:
        with files.open_input_file(name) as file:
            read: bytes = file.read()
    except FileNotFoundError:
        return None
    return read


@dataclass
class _OpenTable:
    """A table with what identifies the log that was read: the beginning of its newest entry.

    A table that was deleted and created again, or restored from a backup, has another entry of that version, or none.
    """

    path: str
    table: DeltaTable
    files: int = 0
    counted: int = -COUNTED_EVERY
    version: int = -1
    entry: bytes | None = None
    idle_since: float = 0.0

    def follow(self) -> None:
        """Take note of the version that the table was brought to."""
        if (version := self.table.version()) != self.version:
            self.version = version
            self.entry = read_entry(self.table, version)
            if abs(version - self.counted) >= COUNTED_EVERY:
                self.files, self.counted = len(self.table.file_uris()), version


class LentTable(DeltaTable):
    """A table for its holder alone: nobody else brings it to another version."""

    def __init__(self, lent: _OpenTable) -> None:
        # It has the state of the open table, which goes back to the pool when this one is let go of.
        vars(self).update(vars(lent.table))
        self._lent = lent

    def update_incremental(self) -> None:
        """Bring the table to its newest version."""
        super().update_incremental()
        self._lent.follow()

    def follow(self) -> None:
        """Take note of the version that a write brought the table to; without it, the table is opened again."""
        self._lent.follow()

    def read_entry(self, version: int) -> bytes | None:
        """The beginning of the entry of a version; that of the newest is at hand."""
        return self._lent.entry if version == self._lent.version else read_entry(self, version)


class TablePool:
    """Open tables that nobody uses at the moment.

    Args:
        size: the most tables that are kept, those that were used last.
        files: the most files that these have together, without the last few tables, which are kept with any number.
        idle_seconds: how long one is kept.
    """

    def __init__(self, size: int = IDLE_TABLES, files: int = IDLE_FILES, idle_seconds: float = IDLE_SECONDS) -> None:
        self._size = size
        self._files = files
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._idle: list[_OpenTable] = []
        # The collector of garbage may run while the lock is held: what it returns is put here.
        self._returned: deque[_OpenTable] = deque()
        self._beside = ThreadPoolExecutor(thread_name_prefix="table-log")

    def lend(self, path: str, table: DeltaTable) -> LentTable:
        """Let somebody have a table that was just opened; it comes to the pool when they let go of it."""
        opened = _OpenTable(path, table)
        opened.follow()
        return self._lend(opened)

    def take(self, path: str, version: int | None = None) -> LentTable | None:
        """An open table as it is now, or as one version has it; None where it must be opened.

        Raises:
            OSError: the storage could not be read.
        """
        if (opened := self._pop(path, version)) is None:
            return None
        # Versions follow one another without a gap.
        newer = self._beside.submit(read_entry, opened.table, opened.version + 1) if version is None else None
        if read_entry(opened.table, opened.version) != opened.entry:
            return None
        if newer is not None and newer.result() is not None:
            try:
                opened.table.update_incremental()
            except DeltaError:  # entries of the log that it needs are gone
                return None
            opened.follow()
        return self._lend(opened)

    def _lend(self, opened: _OpenTable) -> LentTable:
        lent = LentTable(opened)
        weakref.finalize(lent, self._take_back, opened).atexit = False
        return lent

    def _take_back(self, opened: _OpenTable) -> None:
        opened.idle_since = time.monotonic()
        self._returned.append(opened)

    def _pop(self, path: str, version: int | None) -> _OpenTable | None:
        now = time.monotonic()
        with self._lock:
            while self._returned:
                opened = self._returned.popleft()
                # A write brings a table to a version whose entry nobody took note of.
                if opened.entry is not None and opened.table.version() == opened.version:
                    self._idle.append(opened)
            self._drop_old(now)
            for at in reversed(range(len(self._idle))):
                if self._idle[at].path == path and version in {None, self._idle[at].version}:
                    return self._idle.pop(at)
        return None

    def _drop_old(self, now: float) -> None:
        newest = [one for one in self._idle if now - one.idle_since <= self._idle_seconds][-self._size :]
        kept, files = newest[-LAST_TABLES:], 0
        for one in reversed(newest[:-LAST_TABLES]):
            # A table with too many leaves the room to others.
            if files + one.files <= self._files:
                files += one.files
                kept.insert(0, one)
        self._idle = kept


POOL = TablePool()
