"""The generator's own account of a stream: one row for each record that it wrote or tried to write, in SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.intended import Ending, Intended

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run INTEGER PRIMARY KEY, seed INTEGER NOT NULL, number INTEGER NOT NULL,
    started_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, topic TEXT NOT NULL, run INTEGER NOT NULL, entity TEXT NOT NULL,
    key BLOB, value_hash BLOB, value_size INTEGER, fault TEXT NOT NULL,
    ending TEXT NOT NULL, reason TEXT, permanent INTEGER, version INTEGER, waits_for TEXT,
    transaction_id INTEGER, partition INTEGER, "offset" INTEGER, timestamp INTEGER, error TEXT
);
CREATE INDEX IF NOT EXISTS records_by_offset ON records (topic, partition, "offset");
CREATE TABLE IF NOT EXISTS transactions (
    id INTEGER PRIMARY KEY, intended TEXT NOT NULL, outcome TEXT
);
CREATE TABLE IF NOT EXISTS customers (
    customer_id TEXT PRIMARY KEY, first_used_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, known_at TEXT
);
"""


@dataclass(frozen=True)
class Written:
    """A row of the account.

    Args:
        id: the record's identity in this account.
        entity: what it is about.
        key: the key as it was written.
        value_hash: SHA-256 of the value; None for a null value.
        fault: the fault's name.
        ending: where it must end.
        version: the version as a number.
        waits_for: the customer that it waits for.
        known: whether that customer is known by now.
        visible: whether readers of committed records must see it; None when the writer died before it knew.
        partition: with `offset` and `timestamp` (milliseconds since 1970) where it is; None without a report.
    """

    id: int
    entity: str
    key: bytes | None
    value_hash: bytes | None
    fault: str
    ending: Ending
    version: int | None
    waits_for: str | None
    known: bool
    visible: bool | None
    partition: int | None
    offset: int | None
    timestamp: int | None


class Account:
    """The account in one SQLite file; created when it is missing.

    Rows are collected and written together: call `save` before a record counts as entered. It belongs to one thread.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self._connection = sqlite3.connect(file, timeout=30)
        # The file is read while it is written, and a power failure is no concern of a demonstration.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.executescript(SCHEMA)
        self._rows: list[tuple[object, ...]] = []
        self._reports: list[tuple[object, ...]] = []
        self._next = self._one("SELECT COALESCE(MAX(id), 0) + 1 FROM records")

    def _one(self, sql: str, *values: object) -> int:
        return int(self._connection.execute(sql, values).fetchone()[0])

    def begin_run(self, seed: int) -> int:
        """Enter a run; returns how many runs of this seed came before."""
        before = self._one("SELECT COUNT(*) FROM runs WHERE seed = ?", seed)
        self._connection.execute("INSERT INTO runs (seed, number) VALUES (?, ?)", (seed, before))
        self._connection.commit()
        return before

    def enter(self, topic: str, run: int, made: Intended, transaction: int | None = None) -> int:
        """Enter a record that is about to be written; returns its identity."""
        identity, self._next = self._next, self._next + 1
        value = made.value
        self._rows.append(
            (
                *(identity, topic, run, made.entity, made.key),
                *(None if value is None else digest(value), None if value is None else len(value), made.fault),
                *(
                    made.ending.end,
                    made.ending.reason,
                    made.ending.permanent,
                    made.version,
                    made.waits_for,
                    transaction,
                ),
            )
        )
        return identity

    def report(self, identity: int, partition: int, offset: int, timestamp: int, error: str | None) -> None:
        """Enter what became of a record."""
        self._reports.append((partition, offset, timestamp, error, identity))

    def save(self) -> None:
        """Write what was entered since."""
        rows, self._rows = self._rows, []
        reports, self._reports = self._reports, []
        with self._connection as open_:
            open_.executemany(
                "INSERT INTO records (id, topic, run, entity, key, value_hash, value_size, fault, ending, reason, "
                "permanent, version, waits_for, transaction_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            open_.executemany("INSERT OR IGNORE INTO customers (customer_id) VALUES (?)", _customers(rows))
            open_.executemany(
                'UPDATE records SET partition = ?, "offset" = ?, timestamp = ?, error = ? WHERE id = ?', reports
            )

    def begin_transaction(self, intended: str) -> int:
        """Enter a transaction that is about to begin; returns its identity."""
        with self._connection as open_:
            made = open_.execute("INSERT INTO transactions (intended) VALUES (?)", (intended,))
        return int(made.lastrowid or 0)

    def end_transaction(self, identity: int, outcome: str) -> None:
        """Enter how a transaction ended: `committed` or `aborted`."""
        with self._connection as open_:
            open_.execute("UPDATE transactions SET outcome = ? WHERE id = ?", (outcome, identity))

    def unknown_customers(self, older_than_seconds: float = 0) -> list[str]:
        """Customers that records wait for, first used so long ago."""
        rows = self._connection.execute(
            "SELECT customer_id FROM customers WHERE known_at IS NULL AND "
            "(julianday('now') - julianday(first_used_at)) * 86400 >= ? ORDER BY customer_id",
            (older_than_seconds,),
        )
        return [row[0] for row in rows]

    def customers_known(self, customers: Iterable[str]) -> None:
        """Enter that these customers are in the reference table now."""
        with self._connection as open_:
            open_.executemany(
                "UPDATE customers SET known_at = CURRENT_TIMESTAMP WHERE customer_id = ?", [(c,) for c in customers]
            )

    def written(self, topic: str) -> list[Written]:
        """Every record that may be in the topic, in the order of writing."""
        rows = self._connection.execute(
            "SELECT r.id, r.entity, r.key, r.value_hash, r.fault, r.ending, r.reason, r.permanent, r.version, "
            "r.waits_for, c.known_at IS NOT NULL, r.transaction_id, t.outcome, "
            'r.partition, r."offset", r.timestamp FROM records r '
            "LEFT JOIN transactions t ON t.id = r.transaction_id LEFT JOIN customers c ON c.customer_id = r.waits_for "
            "WHERE r.topic = ? AND r.error IS NULL ORDER BY r.id",
            (topic,),
        )
        return [_written(row) for row in rows]

    def close(self) -> None:
        """Write what was entered, and close the file."""
        self.save()
        self._connection.close()


def account_file(home: Path, stream: str) -> Path:
    """The file of a stream's account: one file each, so that their generators never wait for each other."""
    return home / "generator" / f"{stream}.sqlite"


def digest(value: bytes) -> bytes:
    """The hash by which values are compared."""
    return hashlib.sha256(value).digest()


def _customers(rows: Iterable[Sequence[object]]) -> list[tuple[object]]:
    return [(row[12],) for row in rows if row[12] is not None]


def _written(row: Sequence[object]) -> Written:
    identity, entity, key, value_hash, fault, end, reason, permanent, version, waits_for, known, transaction = row[:12]
    outcome, partition, offset, timestamp = row[12:]
    return Written(
        id=identity,  # type: ignore[arg-type] # SQLite's columns have no types for a checker
        entity=entity,  # type: ignore[arg-type]
        key=key,  # type: ignore[arg-type]
        value_hash=value_hash,  # type: ignore[arg-type]
        fault=fault,  # type: ignore[arg-type]
        ending=Ending(end, reason, None if permanent is None else bool(permanent)),  # type: ignore[arg-type]
        version=version,  # type: ignore[arg-type]
        waits_for=waits_for,  # type: ignore[arg-type]
        known=bool(known),
        visible=_visible(transaction, outcome, offset),
        partition=partition,  # type: ignore[arg-type]
        offset=offset,  # type: ignore[arg-type]
        timestamp=timestamp,  # type: ignore[arg-type]
    )


def _visible(transaction: object, outcome: object, offset: object) -> bool | None:
    if transaction is not None:
        return {"committed": True, "aborted": False}.get(str(outcome))
    return True if offset is not None else None
