"""Topics in the ledger: their generations, and where their plans end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import and_, func, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from highwater.plans import Generation, Loss, Planned, ensure_recordable
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.rows import (
    build_generation,
    build_generation_row,
    build_loss,
    build_loss_row,
    build_slice,
    encode_starts,
)
from highwater.slices import Slice


class PlannedTopics(LedgerPart):
    """The planned topics of a ledger."""

    def read_planned_topic(self, stream: str, topic: str) -> Planned | None:
        """The end of a topic's plans, or None if it was never planned; costs the same after any number of slices."""
        with self._database.reading() as connection:
            generation = _read_newest_generation(connection, stream, topic)
            if generation is None:
                return None
            last = read_newest_slice(connection, stream, topic)
            table = schema.losses
            query = select(table).where(
                table.c.stream == stream, table.c.topic == topic, table.c.generation == generation.number
            )
            return Planned.from_generation(generation, last, [build_loss(row) for row in connection.execute(query)])

    def read_all_planned(self) -> dict[tuple[str, str], Planned]:
        """The end of the plans of each planned topic of each stream, by stream and topic, by three queries for all."""
        with self._database.reading() as connection:
            newest = {(one.stream, one.topic): one for one in _read_newest_generations(connection)}
            last = {(slice_.stream, slice_.topic): slice_ for slice_ in _read_newest_slices(connection)}
            losses: dict[tuple[str, str], list[Loss]] = {}
            for row in connection.execute(select(schema.losses)):
                losses.setdefault((row.stream, row.topic), []).append(build_loss(row))
        return {of: Planned.from_generation(one, last.get(of), losses.get(of, ())) for of, one in newest.items()}

    def read_revisions(self) -> dict[str, str]:
        """For each stream a text that changes with everything that is planned or accepted of its topics."""
        with self._database.reading() as connection:
            found: dict[str, list[str]] = {}
            for one in _read_newest_generations(connection):
                found.setdefault(one.stream, []).append(f"{one.topic} {one.number}.{one.revision}")
        return {stream: ",".join(sorted(topics)) for stream, topics in found.items()}

    def read_planned_ends(self, stream: str, topic: str) -> dict[int, int]:
        """For each partition the end of the offsets that are planned or recorded as lost."""
        found = self.read_planned_topic(stream, topic)
        if found is not None:
            return dict(found.ends)
        with self._database.reading() as connection:
            last = read_newest_slice(connection, stream, topic)
        return {} if last is None else {partition: offsets.end for partition, offsets in last.ranges.items()}

    def list_generations(self, stream: str, topic: str) -> list[Generation]:
        """All generations of a topic, oldest first."""
        table = schema.topics
        query = select(table).where(table.c.stream == stream, table.c.topic == topic).order_by(table.c.generation)
        return [build_generation(row) for row in self._database.read(query)]

    def open_generation(
        self, generation: Generation, losses: Sequence[Loss] = (), seen: Generation | None = None
    ) -> bool:
        """Pin a topic's identity; False if somebody else was first.

        Args:
            generation: the new one.
            losses: the losses to record with it.
            seen: the generation before; if it was planned on since, nothing is stored.

        Raises:
            InconsistentRecordError: no topic can be like that.
        """
        ensure_recordable([generation], losses, seen)
        try:
            with self._database.writing() as connection:
                if seen is not None and not move_on(connection, seen):
                    return False
                connection.execute(insert(schema.topics).values(build_generation_row(generation)))
                insert_losses(connection, losses)
                return True
        except IntegrityError:
            return False

    def decide_starts(self, seen: Generation, starts: dict[int, int]) -> bool:
        """Settle where partitions begin that had no leader when the generation was opened; False if not the first."""
        table = schema.topics
        with self._database.writing() as connection:
            if not move_on(connection, seen):
                return False
            merged = {**seen.starts, **starts}
            ensure_recordable([replace(seen, starts=merged)], [], None)
            connection.execute(update(table).where(_is(seen)).values(starts=encode_starts(merged)))
            return True


def _is(generation: Generation) -> Any:
    table = schema.topics
    return and_(
        table.c.stream == generation.stream,
        table.c.topic == generation.topic,
        table.c.generation == generation.number,
    )


def move_on(connection: Connection, seen: Generation) -> bool:
    """Compare and set the revision. It also locks the row, so that writers of one topic follow each other."""
    table = schema.topics
    newest = select(func.max(table.c.generation)).where(table.c.stream == seen.stream, table.c.topic == seen.topic)
    counted = update(table).where(_is(seen), table.c.revision == seen.revision).values(revision=seen.revision + 1)
    return connection.execute(counted).rowcount == 1 and connection.execute(newest).scalar() == seen.number


def read_newest_slice(connection: Connection, stream: str, topic: str) -> Slice | None:
    """The newest slice of a topic."""
    table = schema.slices
    query = select(table).where(table.c.stream == stream, table.c.topic == topic)
    row = connection.execute(query.order_by(table.c.ordinal.desc()).limit(1)).first()
    return None if row is None else build_slice(row)


def _read_newest_generation(connection: Connection, stream: str, topic: str) -> Generation | None:
    table = schema.topics
    query = select(table).where(table.c.stream == stream, table.c.topic == topic)
    row = connection.execute(query.order_by(table.c.generation.desc()).limit(1)).first()
    return None if row is None else build_generation(row)


def _read_newest_generations(connection: Connection) -> list[Generation]:
    """The newest generation of each topic of each stream."""
    table = schema.topics
    found = [build_generation(row) for row in connection.execute(select(table).order_by(table.c.generation))]
    return [*{(one.stream, one.topic): one for one in found}.values()]


def _read_newest_slices(connection: Connection) -> list[Slice]:
    """The newest slice of each topic of each stream; one look into an index for each topic."""
    table, topics = schema.slices, schema.topics
    of_topic = (table.c.stream == topics.c.stream) & (table.c.topic == topics.c.topic)
    ordinal = select(func.max(table.c.ordinal)).where(of_topic).scalar_subquery()
    newest = select(topics.c.stream, topics.c.topic, ordinal.label("ordinal")).distinct().subquery()
    joined = (
        (table.c.stream == newest.c.stream) & (table.c.topic == newest.c.topic) & (table.c.ordinal == newest.c.ordinal)
    )
    return [build_slice(row) for row in connection.execute(select(table).join(newest, joined))]


def insert_losses(connection: Connection, losses: Sequence[Loss]) -> None:
    """Record holes."""
    if losses:
        connection.execute(insert(schema.losses), [build_loss_row(loss) for loss in losses])
