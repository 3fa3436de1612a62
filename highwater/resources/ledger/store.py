"""The class `Ledger`: slices, losses and leases, and the way to the ledger's other parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, Select, cast, func, insert, literal, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from highwater.batching import split_by_count
from highwater.errors import HighwaterError, UnknownSliceError
from highwater.plans import Generation, Loss, ensure_recordable
from highwater.resources.ledger import schema
from highwater.resources.ledger.alerts import OpenAlerts
from highwater.resources.ledger.breakers import Breakers
from highwater.resources.ledger.database import Database
from highwater.resources.ledger.discards import Discards
from highwater.resources.ledger.engine import KEYS_PER_STATEMENT
from highwater.resources.ledger.erasures import Erasures
from highwater.resources.ledger.exhausted_slices import ExhaustedSlices, StalledSlices
from highwater.resources.ledger.gaps import RecordedGaps
from highwater.resources.ledger.holds import Holds
from highwater.resources.ledger.instances import Instances
from highwater.resources.ledger.intents import Intents
from highwater.resources.ledger.leases import (
    Heartbeat,
    Lease,
    acquire_lease,
    delete_expired_leases,
    measure_clock_skew,
    read_current_leases,
)
from highwater.resources.ledger.operator_actions import OperatorActions
from highwater.resources.ledger.pauses import PausedTopics
from highwater.resources.ledger.publications import Publications
from highwater.resources.ledger.reclaims import Reclaims
from highwater.resources.ledger.retired_keys import RetiredKeys
from highwater.resources.ledger.rows import (
    build_loss,
    build_slice,
    build_slice_row,
)
from highwater.resources.ledger.sensor_faults import SensorFaults
from highwater.resources.ledger.topics import PlannedTopics, insert_losses, move_on, read_newest_slice
from highwater.slices import Slice, SliceKey

# A sensor tick shall answer within seconds whatever is unavailable.
WAIT_SECONDS = 5.0


class Ledger:
    """The ledger of a deployment. Making one connects to nothing; the first use creates missing tables.

    Args:
        url: an SQLAlchemy URL of SQLite or PostgreSQL.
        wait_seconds: how long a call waits for a lock or a server.

    Raises:
        ConfigurationError: the URL cannot be used.

    Every method may raise DependencyUnavailableError: the database cannot be reached or stayed locked; nothing was
    written.
    """

    def __init__(self, url: str, wait_seconds: float = WAIT_SECONDS) -> None:
        self.database = Database(url, wait_seconds)
        self.topics = PlannedTopics(self.database)
        self.publications = Publications(self.database)
        self.discards = Discards(self.database)
        self.gaps = RecordedGaps(self.database)
        self.alerts = OpenAlerts(self.database)
        self.breakers = Breakers(self.database)
        self.holds = Holds(self.database)
        self.exhausted_slices = ExhaustedSlices(self.database)
        self.stalled_slices = StalledSlices(self.database)
        self.instances = Instances(self.database)
        self.operator_actions = OperatorActions(self.database)
        self.paused = PausedTopics(self.database)
        self.sensor_faults = SensorFaults(self.database)
        self.reclaims = Reclaims(self.database)
        self.retired = RetiredKeys(self.database)
        self.intents = Intents(self.database)
        self.erasures = Erasures(self.database)

    def __repr__(self) -> str:
        return f"Ledger({self.database.shown!r})"

    # Slices

    def add(self, slices: Sequence[Slice], losses: Sequence[Loss] = (), seen: Generation | None = None) -> bool:
        """Store plans, all or none.

        Args:
            slices: new slices of one topic.
            losses: holes that the stream's declaration accepts, recorded together with the slices after them.
            seen: the generation that the plans were made from; if the topic was planned or opened again since, nothing
                is stored.

        Raises:
            InconsistentRecordError: no topic can lose that.

        Returns:
            Whether they were stored; False if another planner was first, be it one of another stream
            (`read_last_of_other_stream`).
        """
        ensure_recordable([], losses, seen)
        try:
            with self.database.writing() as connection:
                if seen is not None and not move_on(connection, seen):
                    return False
                if slices:
                    connection.execute(insert(schema.slices), [build_slice_row(slice_) for slice_ in slices])
                insert_losses(connection, losses)
                return True
        except IntegrityError:
            return False

    def get(self, keys: Sequence[str]) -> list[Slice]:
        """The slices of these keys, in the order of the keys.

        Raises:
            UnknownSliceError: one of them was never planned or is no key; the topic's last slice is named.
        """
        if not keys:
            return []
        found = {row.slice_key: build_slice(row) for row in self.database.read_slices(schema.slices, keys)}
        for key in keys:
            if key not in found:
                raise self._build_unknown_error(key)
        return [found[key] for key in keys]

    def _build_unknown_error(self, text: str) -> HighwaterError:
        try:
            key = SliceKey.parse(text)
        except UnknownSliceError as error:
            return UnknownSliceError(error.problem, stored="no slice of that key", found=text, remedy=error.remedy)
        table = schema.slices
        newest = select(table).where(table.c.topic == key.topic).order_by(table.c.ordinal.desc()).limit(1)
        with self.database.reading() as connection:
            row = connection.execute(newest).first()
        return UnknownSliceError(
            f"slice {text} was never planned",
            stored=f"nothing of topic {key.topic}" if row is None else f"{row.slice_key} is the last of {row.stream}",
            found=text,
            remedy="highwater slices STREAM lists the keys; delete a key from Dagster that the ledger does not hold",
        )

    def list_slices(
        self,
        stream: str,
        topic: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        newest: int | None = None,
        topic_id: str | None = None,
    ) -> list[Slice]:
        """Planned slices, oldest first.

        Args:
            stream: the stream's name.
            topic: only slices of this topic.
            after: only slices that were planned after the one with this key.
            limit: at most this many from the start.
            newest: this many from the end.
            topic_id: only slices of the topic with this ID; earlier ones under its name are left out.

        Raises:
            UnknownSliceError: `after` was never planned.
        """
        query = self._build_slices_query(stream, topic, after)
        table = schema.slices
        if topic_id is not None:
            query = query.where(table.c.topic_id == topic_id)
        order = [table.c.planned_at, table.c.topic, table.c.ordinal] if topic is None else [table.c.ordinal]
        if newest is not None:
            query = query.order_by(*[column.desc() for column in order]).limit(newest)
        else:
            query = query.order_by(*order).limit(limit)
        found = [build_slice(row) for row in self.database.read(query)]
        return found if newest is None else found[::-1]

    def read_attempts(self, stream: str, topic: str, topic_id: str) -> dict[str, int]:
        """For each slice of a topic, oldest first, the last attempt that was about to commit it; 0 where none ever was.

        Args:
            stream: the stream's name.
            topic: the topic.
            topic_id: slices of earlier topics under its name are left out.
        """
        table = schema.slices
        query = select(table.c.slice_key, table.c.attempt).where(
            table.c.stream == stream, table.c.topic == topic, table.c.topic_id == topic_id
        )
        with self.database.reading() as connection:
            # 100,000 rows by the names of their columns would take twice as long.
            return dict(connection.execute(query.order_by(table.c.ordinal)).tuples().all())

    def _build_slices_query(self, stream: str, topic: str | None, after: str | None) -> Select[Any]:
        table = schema.slices
        query = select(table).where(table.c.stream == stream)
        if topic is not None:
            query = query.where(table.c.topic == topic)
        if after is None:
            return query
        [slice_] = self.get([after])
        if topic is not None:
            return query.where(table.c.ordinal > slice_.ordinal)
        later = tuple_(table.c.planned_at, table.c.topic, table.c.ordinal) > tuple_(
            literal(slice_.planned_at, schema.UtcDateTime), literal(slice_.topic), literal(slice_.ordinal)
        )
        return query.where(later)

    def list_slices_at_offset(self, stream: str, topic: str, partition: int, offset: int) -> list[Slice]:
        """The slices that hold an offset, one for each generation that planned it, oldest first."""
        table = schema.slices
        start, end = (cast(table.c.ranges[str(partition), at].as_string(), BigInteger) for at in (0, 1))
        query = select(table).where(table.c.stream == stream, table.c.topic == topic, start <= offset, end > offset)
        return [build_slice(row) for row in self.database.read(query.order_by(table.c.ordinal))]

    def read_last_slice(self, stream: str, topic: str) -> Slice | None:
        """The newest slice of a topic in any generation; found by index."""
        with self.database.reading() as connection:
            return read_newest_slice(connection, stream, topic)

    def read_last_of_other_stream(self, stream: str, topic: str) -> Slice | None:
        """The newest slice of a topic that another stream planned; the same key cannot be planned a second time."""
        table = schema.slices
        query = select(table).where(table.c.topic == topic, table.c.stream != stream)
        with self.database.reading() as connection:
            row = connection.execute(query.order_by(table.c.ordinal.desc()).limit(1)).first()
        return None if row is None else build_slice(row)

    def read_previous_slice(self, slice_: Slice) -> Slice | None:
        """The slice of the same topic and generation that was planned before this one; None for the first."""
        table = schema.slices
        query = select(table).where(
            table.c.stream == slice_.stream,
            table.c.topic == slice_.topic,
            table.c.generation == slice_.generation,
            table.c.ordinal < slice_.ordinal,
        )
        with self.database.reading() as connection:
            row = connection.execute(query.order_by(table.c.ordinal.desc()).limit(1)).first()
        return None if row is None else build_slice(row)

    def list_preceding_slices(self, stream: str, topic: str, ordinal: int, many: int) -> list[Slice]:
        """The newest N slices of a topic before this ordinal, in any generation, oldest first."""
        table = schema.slices
        query = select(table).where(table.c.stream == stream, table.c.topic == topic, table.c.ordinal < ordinal)
        with self.database.reading() as connection:
            rows = connection.execute(query.order_by(table.c.ordinal.desc()).limit(many))
            return [build_slice(row) for row in rows][::-1]

    def allocate_attempts(self, keys: Sequence[str]) -> dict[str, int]:
        """A new attempt number for each slice: 1 or more, higher than any before, given to no one else.

        Raises:
            UnknownSliceError: one of them was never planned; no number was given out.
        """
        table = schema.slices
        found: dict[str, int] = {}
        with self.database.writing() as connection:
            for some in split_by_count(
                sorted(set(keys)), KEYS_PER_STATEMENT
            ):  # in one order, so that two callers cannot wait for each other
                counted = (
                    update(table)
                    .where(table.c.slice_key.in_(some))
                    .values(attempt=table.c.attempt + 1)
                    .returning(table.c.slice_key, table.c.attempt)
                )
                found.update({row.slice_key: row.attempt for row in connection.execute(counted)})
            missing = [key for key in keys if key not in found]
            if missing:
                connection.rollback()
        if missing:
            raise self._build_unknown_error(missing[0])
        return {key: found[key] for key in keys}

    def has_attempts(self) -> bool:
        """Whether an attempt at any slice was ever about to commit."""
        table = schema.slices
        query = select(table.c.slice_key).where(table.c.attempt > 0).limit(1)
        with self.database.reading() as connection:
            return connection.execute(query).first() is not None

    def read_plan_times(self, keys: Sequence[str]) -> dict[str, datetime]:
        """The times at which slices were planned; keys that never were are left out."""
        table = schema.slices
        found: dict[str, datetime] = {}
        for some in split_by_count(keys, KEYS_PER_STATEMENT):
            query = select(table.c.slice_key, table.c.planned_at).where(table.c.slice_key.in_(some))
            found.update({row.slice_key: row.planned_at for row in self.database.read(query)})
        return found

    def count_slices(self) -> dict[tuple[str, str], int]:
        """Planned slices by stream and topic."""
        table = schema.slices
        query = select(table.c.stream, table.c.topic, func.count()).group_by(table.c.stream, table.c.topic)
        return {(stream, topic): count for stream, topic, count in self.database.read(query)}

    # Losses

    def record_loss(self, losses: Sequence[Loss], seen: Generation | None = None) -> bool:
        """Record holes, all or none; False if the topic was planned on since `seen`, or a hole is recorded already."""
        return self.add([], losses, seen)

    def list_losses(self, stream: str | None = None, topic: str | None = None) -> list[Loss]:
        """Recorded holes, oldest first."""
        table = schema.losses
        query = select(table).order_by(table.c.id)
        if stream is not None:
            query = query.where(table.c.stream == stream)
        if topic is not None:
            query = query.where(table.c.topic == topic)
        return [build_loss(row) for row in self.database.read(query)]

    # Leases

    def lease(self, name: str, seconds: float, wait: float = 0.0) -> AbstractContextManager[Lease]:
        """A lock that all processes on this ledger respect, and that outlives its holder by `seconds` at the most.

        It is renewed while the block runs. Critical code asks the lease's `check` before it acts.

        Args:
            name: the name of the lock.
            seconds: how long it stays held when its holder dies.
            wait: how long to wait for another holder.

        Raises:
            LeaseHeldError: another holder kept it for `wait` seconds.
        """
        return acquire_lease(self.database, name, seconds, wait)

    def measure_clock_skew(self) -> timedelta:
        """How far the database's clock is ahead of this process's."""
        with self.database.reading() as connection:
            return measure_clock_skew(connection)

    def read_leases(self) -> dict[str, datetime]:
        """The leases that somebody holds now, and when each ends unless it is renewed."""
        with self.database.reading() as connection:
            return read_current_leases(connection)

    def build_heartbeat(self, name: str, seconds: float) -> Heartbeat:
        """A lease as a sign of life of this process; start and stop do not raise while the ledger is unavailable.

        Args:
            name: the process that is alive; nobody else uses it.
            seconds: how long it counts as alive after the last sign.
        """
        return Heartbeat(self.database, name, seconds)

    def forget_leases(self, over_for: float) -> None:
        """Delete leases that expired this many seconds ago."""
        with self.database.writing() as connection:
            delete_expired_leases(connection, over_for)
