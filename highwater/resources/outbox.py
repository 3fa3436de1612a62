"""For producers of other programs (docs/producers.md), not the pipeline: records in SQLite until Kafka has them."""

# A killed process leaves records with an unknown end. They are not sent again blindly: each has a header with the name
# of its outbox and its number there. So the topic is read from where the outbox began to send, and every record found
# there is ticked. Where the topic has lost records, a missing one may have been sent: it is withheld, and a person
# decides.

from __future__ import annotations

import fcntl
import json
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple
from uuid import uuid4

from highwater.errors import ConfigurationError, DependencyUnavailableError, KeyStoppedError, RecordRefusedError
from highwater.gaps import FORBIDDEN, can_compact
from highwater.resources.delivery import NOT_SENT, DeliveryEnd
from highwater.resources.kafka import Kafka
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_records import Outcome, Record, build_unplaced_outcome
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange

# For people and programs that look for a record. Another outbox may use the same id, and so may this one once a record
# is forgotten, so it is the other header that counts here.
ID_HEADER = "highwater.outbox.id"
# `<name of the outbox>:<number of the record>`: no other record ever has the same.
ORIGIN_HEADER = "highwater.outbox"
# The number of ticks written together; a crash between costs nothing, since the topic shows them.
TICKS = 500
# The number of records held in memory at once.
BATCH = 1_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, key BLOB, value BLOB, headers TEXT,
    fixed INTEGER, time INTEGER, partition INTEGER, "offset" INTEGER, doubt INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS waiting ON outbox (number) WHERE "offset" IS NULL;
CREATE TABLE IF NOT EXISTS positions (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, "offset" INTEGER NOT NULL, topic_id TEXT,
    PRIMARY KEY (topic, partition)
);
CREATE TABLE IF NOT EXISTS identity (name TEXT NOT NULL, unnamed INTEGER NOT NULL, handed_over INTEGER NOT NULL);
"""
# Whether a record may have arrived and gone: nobody knows, or it is sure that it did not arrive.
_WITHHELD, _NOT_ARRIVED = 1, 2
# Our own word, in an outcome, for a record that is withheld.
WITHHELD = "WITHHELD"

OnOutcome = Callable[[str, Outcome], None]


class Outbox:
    """Records in one SQLite file, created when it is missing. It belongs to one thread of one process.

    Args:
        file: the database; a lock file lies beside it.
        kafka: the cluster that the records go to; looked at before the first record of a topic, and after a crash.

    Raises:
        ConfigurationError: another process has the outbox open.
    """

    def __init__(self, file: Path, kafka: Kafka) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire_lock(file)
        self._kafka = kafka
        self._connection = sqlite3.connect(file, timeout=30)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(_SCHEMA)
        # Up to the last number, records may have been sent, by any process.
        self._name, self._unnamed, self._perhaps_sent = _load_identity(self._connection)
        rows = self._connection.execute("SELECT DISTINCT topic, topic_id FROM positions")
        self._topic_ids: dict[str, str | None] = dict(rows.fetchall())
        self._ticks: list[tuple[int, int, str]] = []
        self._not_sent: list[str] = []
        self._ends: dict[tuple[str, int], int] = {}
        self._handed_over = 0  # the number of the last record that this process gave to a producer
        self._recovered = False
        self._withheld = set(self.list_withheld())

    def put(self, records: Iterable[tuple[str, Record]]) -> None:
        """Store records under their ids, all or none; they are safe when this returns.

        Raises:
            sqlite3.IntegrityError: an id is there already.
        """
        with self._connection as open_:
            open_.executemany(
                "INSERT INTO outbox (id, topic, key, value, headers, fixed, time) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(record_id, *_build_row(record)) for record_id, record in records],
            )

    def list_waiting(self) -> list[tuple[str, Record]]:
        """The records without a tick, in the order of storing."""
        return [(record_id, record) for batch in self._read_batches_after(0) for _, record_id, record in batch]

    def _read_batches_after(self, number: int) -> Iterator[list[tuple[int, str, Record]]]:
        """The records after a record, in batches; ticks may be written between them."""
        query = (
            'SELECT number, id, topic, key, value, headers, fixed, time FROM outbox WHERE "offset" IS NULL '
            "AND number > ? ORDER BY number LIMIT ?"
        )
        while rows := self._connection.execute(query, (number, BATCH)).fetchall():
            yield [(row[0], row[1], _build_record(row[2:])) for row in rows]
            number = rows[-1][0]

    def list_ticked(self) -> dict[str, tuple[int, int]]:
        """Partition and offset of every record that arrived, by id; an offset of -1 is not known."""
        rows = self._connection.execute('SELECT id, partition, "offset" FROM outbox WHERE "offset" IS NOT NULL')
        return {record_id: (partition, offset) for record_id, partition, offset in rows}

    def list_withheld(self) -> list[str]:
        """Records that may have arrived and are gone from the topic since, by id; they wait for `resolve_withheld`."""
        query = 'SELECT id FROM outbox WHERE "offset" IS NULL AND doubt = ? ORDER BY number'
        return [record_id for (record_id,) in self._connection.execute(query, (_WITHHELD,))]

    def resolve_withheld(self, record_ids: Iterable[str], *, arrived: bool) -> None:
        """Say whether withheld records arrived: they are ticked then, and else sent by the next first `send`.

        Raises:
            ConfigurationError: one of them is not withheld.
        """
        ids = set(record_ids)
        if others := sorted(ids - self._withheld):
            raise ConfigurationError(
                "records of the outbox are not withheld",
                found=", ".join(others),
                remedy="resolve only the records that list_withheld() lists",
            )
        with self._connection as open_:
            if arrived:
                there = 'UPDATE outbox SET partition = -1, "offset" = -1, value = NULL WHERE id = ?'
                open_.executemany(there, [(record_id,) for record_id in ids])
            else:
                _store_doubt(open_, ids, _NOT_ARRIVED)
        self._withheld -= ids

    def recover(self, on_found: OnOutcome | None = None) -> int:
        """Tick what a process that died had sent; returns how many. The first `send` does it, if nobody did before.

        A record that may have been sent and is not found waits to be sent again, if the topic still has all of that
        time; else it is withheld (`list_withheld`).

        Raises:
            DependencyUnavailableError: the topic could not be read; nothing may be sent yet.
        """
        rows = self._connection.execute('SELECT number, id FROM outbox WHERE "offset" IS NULL').fetchall()
        waiting = {f"{self._name}:{number}".encode(): record_id for number, record_id in rows}
        waiting |= {record_id.encode(): record_id for number, record_id in rows if number <= self._unnamed}
        found: set[str] = set()
        for topic in sorted(self._topic_ids) if waiting else ():
            state = self._kafka.read_topic_state(topic)
            windows = self._load_windows(state)
            for origin, outcome in self._read_outcomes(topic, windows):
                record_id = waiting.get(origin)
                if record_id is not None and record_id not in found:
                    found.add(record_id)
                    self._store_outcome(record_id, outcome)
                    if on_found is not None:
                        on_found(record_id, outcome)
            # Before the positions, which then lie where the topic begins now.
            self._keep_back(self._list_possibly_lost(topic, windows) - found)
            self._keep_positions(topic, state.topic_id, {p: window.offsets.start for p, window in windows.items()})
        self.save()
        self._recovered = True
        return len(found)

    def _load_windows(self, state: TopicState) -> dict[int, _Window]:
        """The offsets of each partition that are read to find out what arrived."""
        topic = state.topic
        began: dict[int, int] = {}
        if self._topic_ids[topic] in {state.topic_id, None}:  # else it was recreated, and all of it is read
            rows = self._connection.execute('SELECT partition, "offset" FROM positions WHERE topic = ?', (topic,))
            began = dict(rows.fetchall())
        return {p: _build_window(topic, p, began.get(p, 0), seen) for p, seen in state.partitions.items()}

    def _read_outcomes(self, topic: str, windows: Mapping[int, _Window]) -> Iterable[tuple[bytes, Outcome]]:
        """The origin and the offset of each record that the topic holds."""
        for message in self._kafka.read(topic, {p: window.offsets for p, window in windows.items()}, committed=False):
            headers = dict(message.headers() or [])
            origin = headers.get(ORIGIN_HEADER, headers.get(ID_HEADER))
            if isinstance(origin, bytes):
                yield origin, Outcome(topic, message.partition() or 0, message.offset() or 0, message.timestamp()[1])

    def _list_possibly_lost(self, topic: str, windows: Mapping[int, _Window]) -> set[str]:
        """Records that may have been sent before this process, and that the topic may have lost."""
        query = (
            'SELECT id, fixed FROM outbox WHERE "offset" IS NULL AND topic = ? AND doubt = 0 '
            "AND number > ? AND number <= ?"
        )
        rows = self._connection.execute(query, (topic, self._handed_over, self._perhaps_sent)).fetchall()
        if rows and can_compact(_fetch_cleanup_policy(self._kafka, topic)):
            return {record_id for record_id, _ in rows}
        cut = {p for p, window in windows.items() if not window.whole}
        return {record_id for record_id, fixed in rows if cut and (fixed is None or fixed in cut)}

    def _keep_back(self, record_ids: set[str]) -> None:
        with self._connection as open_:
            _store_doubt(open_, record_ids, _WITHHELD)
        self._withheld |= record_ids

    def _keep_positions(self, topic: str, topic_id: str | None, offsets: Mapping[int, int]) -> None:
        """From where each partition is read after a crash: none of our waiting records is before that offset."""
        rows = [(topic, partition, offset, topic_id) for partition, offset in offsets.items()]
        with self._connection as open_:
            open_.execute("DELETE FROM positions WHERE topic = ?", (topic,))
            open_.executemany("INSERT INTO positions VALUES (?, ?, ?, ?)", rows)
        self._topic_ids[topic] = topic_id

    def send(self, producer: ReliableProducer, on_outcome: OnOutcome | None = None) -> None:
        """Hand over what waits and was not handed over by this process, in order; ticks come with `producer.poll`.

        Withheld records are not sent, nor others of their key, unless the producer goes on after a failure.

        Raises:
            ConfigurationError: the producer is transactional.
            DependencyUnavailableError: the topic could not be read; nothing was sent.
        """
        if producer.transactional:
            raise ConfigurationError(
                "an outbox does not send through a transactional producer",
                found="its delivery reports come before the commit: records that are aborted later would be ticked",
                remedy="give it a producer without transactional.id",
            )
        if not self._recovered:
            self.recover(on_outcome)
        for batch in self._read_batches_after(self._handed_over):
            self._begin({record.topic for _, _, record in batch})
            self._note_handed_over(batch[0][0], batch[-1][0])
            for number, record_id, record in batch:
                self._handed_over = number
                try:
                    self._send(producer, number, record_id, record, on_outcome)
                except (KeyStoppedError, RecordRefusedError) as error:
                    # It stays in the outbox; the others go on.
                    reason = str(error.found) if isinstance(error, RecordRefusedError) else NOT_SENT
                    self._handle_outcome(
                        record_id, build_unplaced_outcome(record.topic, reason, refused=True), on_outcome
                    )

    def _send(
        self, producer: ReliableProducer, number: int, record_id: str, record: Record, on_outcome: OnOutcome | None
    ) -> None:
        if record_id in self._withheld:
            producer.stop(record.topic, record.key, record_id)
            self._handle_outcome(record_id, build_unplaced_outcome(record.topic, WITHHELD), on_outcome)
            return
        origin = f"{self._name}:{number}".encode()
        headers = [*record.headers, (ID_HEADER, record_id.encode()), (ORIGIN_HEADER, origin)]
        ended = partial(self._handle_outcome, record_id, on_outcome=on_outcome)
        producer.send(record._replace(headers=headers), record_id, on_outcome=ended)

    def _handle_outcome(self, record_id: str, outcome: Outcome, on_outcome: OnOutcome | None) -> None:
        if outcome.delivered:
            self._store_outcome(record_id, outcome)
        elif outcome.end is DeliveryEnd.NOT_DELIVERED:
            self._not_sent.append(record_id)  # it is in no topic, whatever that may have forgotten
            if len(self._not_sent) >= TICKS:
                self.save()
        if on_outcome is not None:
            on_outcome(record_id, outcome)

    def _note_handed_over(self, first: int, last: int) -> None:
        """Note that these records may be on their way, before the first of them is."""
        with self._connection as open_:
            open_.execute("UPDATE identity SET handed_over = max(handed_over, ?)", (last,))
            settled = 'UPDATE outbox SET doubt = 0 WHERE "offset" IS NULL AND number BETWEEN ? AND ? AND doubt = ?'
            open_.execute(settled, (first, last, _NOT_ARRIVED))
        self._perhaps_sent = max(self._perhaps_sent, last)

    def _begin(self, topics: Iterable[str]) -> None:
        """Note where a topic ended before the first record went to it: from there it is read after a crash."""
        for topic in sorted(set(topics) - self._topic_ids.keys()):
            state = self._kafka.read_topic_state(topic)
            ends = {p: _build_window(topic, p, 0, seen).offsets.end for p, seen in state.partitions.items()}
            self._keep_positions(topic, state.topic_id, ends)

    def _store_outcome(self, record_id: str, outcome: Outcome) -> None:
        self._ticks.append((outcome.partition, outcome.offset, record_id))
        self._withheld.discard(record_id)
        if outcome.offset >= 0:  # else the broker did not say where it is
            place = (outcome.topic, outcome.partition)
            self._ends[place] = max(self._ends.get(place, 0), outcome.offset + 1)
        if len(self._ticks) >= TICKS:
            self.save()

    def save(self) -> None:
        """Write the ticks; where nothing waits any more, the next recovery begins after what arrived."""
        ticks, self._ticks = self._ticks, []
        not_sent, self._not_sent = self._not_sent, []
        with self._connection as open_:
            _store_doubt(open_, not_sent, _NOT_ARRIVED)
            open_.executemany('UPDATE outbox SET partition = ?, "offset" = ?, value = NULL WHERE id = ?', ticks)
            if open_.execute('SELECT 1 FROM outbox WHERE "offset" IS NULL LIMIT 1').fetchone() is None:
                # With the ID from before the first of them: in a topic that was recreated since, all is read.
                ends = [(topic, p, end, self._topic_ids.get(topic)) for (topic, p), end in self._ends.items()]
                open_.executemany("INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?)", ends)

    def forget(self, keep: int) -> int:
        """Delete arrived records, except for a number of the newest; returns how many are gone.

        A record that is forgotten may be put again under its id, and would be sent again.

        Args:
            keep: 1 or more: numbers of records are not given out twice.
        """
        self.save()
        with self._connection as open_:
            newest = open_.execute("SELECT coalesce(max(number), 0) FROM outbox").fetchone()[0]
            gone = 'DELETE FROM outbox WHERE "offset" IS NOT NULL AND number <= ?'
            return open_.execute(gone, (newest - max(keep, 1),)).rowcount

    def close(self) -> None:
        """Write the ticks, and close the file."""
        self.save()
        self._connection.close()
        self._lock.close()


def _acquire_lock(file: Path) -> IO[str]:
    """The lock file of an outbox, held until it is closed or the process dies.

    Two that send from one outbox would each send all of it.
    """
    held = file.with_name(f"{file.name}.lock").open("a")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise ConfigurationError(
            f"the outbox {file} is open already",
            found=f"somebody holds {held.name}",
            remedy="end the other process, or give this one a file of its own",
        ) from error
    return held


class _Window(NamedTuple):
    """The records of a partition, and whether they are all that was written to it since sending began."""

    offsets: OffsetRange
    whole: bool


def _build_window(topic: str, partition: int, began: int, seen: PartitionState) -> _Window:
    """From where to where a partition is read; what retention took cannot be looked at.

    A position after the end belongs to a log that was truncated: nothing is known of its current records.
    """
    if seen.log_start is None or seen.high_watermark is None:
        raise DependencyUnavailableError(
            f"topic {topic} partition {partition} has no leader", remedy="nothing was sent; try again when it has one"
        )
    since = began if began <= seen.high_watermark else 0
    return _Window(OffsetRange(max(since, seen.log_start), seen.high_watermark), whole=seen.log_start <= since)


def _fetch_cleanup_policy(kafka: Kafka, topic: str) -> str:
    found = (fetch_topic_settings(kafka, topic) or {}).get("cleanup.policy")
    return FORBIDDEN if found is None else found.value


def _load_identity(connection: sqlite3.Connection) -> tuple[str, int, int]:
    """The name of an outbox, given once, and up to which number its records were sent without it, or sent at all.

    A file from before has records that may be in a topic with nothing but their id, and does not say whether one was
    sent.
    """
    with connection as open_:
        if "topic_id" not in _list_columns(open_, "positions"):
            open_.execute("ALTER TABLE positions ADD COLUMN topic_id TEXT")
        if "doubt" not in _list_columns(open_, "outbox"):
            open_.execute("ALTER TABLE outbox ADD COLUMN doubt INTEGER NOT NULL DEFAULT 0")
        last = "(SELECT coalesce(max(number), 0) FROM outbox)"
        if "handed_over" not in _list_columns(open_, "identity"):
            open_.execute("ALTER TABLE identity ADD COLUMN handed_over INTEGER NOT NULL DEFAULT 0")
            open_.execute(f"UPDATE identity SET handed_over = {last}")
        if open_.execute("SELECT 1 FROM identity").fetchone() is None:
            open_.execute(f"INSERT INTO identity VALUES (?, {last}, {last})", (uuid4().hex,))
        name, unnamed, handed_over = open_.execute("SELECT name, unnamed, handed_over FROM identity").fetchone()
    return str(name), int(unnamed), int(handed_over)


def _list_columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _store_doubt(connection: sqlite3.Connection, record_ids: Iterable[str], doubt: int) -> None:
    connection.executemany("UPDATE outbox SET doubt = ? WHERE id = ?", [(doubt, one) for one in record_ids])


def _build_row(record: Record) -> tuple[object, ...]:
    headers = [[name, None if value is None else b64encode(value).decode()] for name, value in record.headers]
    return record.topic, record.key, record.value, json.dumps(headers), record.partition, record.timestamp


def _build_record(row: tuple[str, bytes | None, bytes | None, str, int | None, int | None]) -> Record:
    topic, key, value, headers, partition, timestamp = row
    found = [(name, None if text is None else b64decode(text)) for name, text in json.loads(headers)]
    return Record(topic, key, value, found, partition, timestamp)
