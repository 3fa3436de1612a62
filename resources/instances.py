"""The Dagster instances whose sensors work on streams, in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from highwater.instances import TERM, Instance, live_together
from resources import ledger_schema as schema

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

_TABLE = schema.instances
# Each of a stream's five sensors ticks every 10 to 30 s: the ledger gets two writes a minute.
WRITE_EVERY = timedelta(seconds=30)
# For whoever wants to know which instance worked on a stream before.
KEPT = timedelta(days=30)


class Instances:
    """The Dagster instances of a deployment.

    Args:
        engine: gives the ledger's database.

    Every method may raise DependencyAwayError: the database cannot be reached or stayed locked; nothing was written.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def of(self, stream: str) -> list[Instance]:
        """The instances that worked on a stream within the last days."""
        query = select(_TABLE).where(_TABLE.c.stream == stream).order_by(_TABLE.c.first_seen)
        with schema.transaction(self._engine(), writes=False) as connection:
            return [Instance(r.instance_id, r.place, r.first_seen, r.last_seen) for r in connection.execute(query)]

    def live_together(self, stream: str, now: datetime) -> list[Instance]:
        """The instances that work on a stream at the same time; none where one alone does."""
        return live_together(self.of(stream), now)

    def record(self, stream: str, instance_id: str, place: str, now: datetime) -> None:
        """Record that an instance's sensors tick for a stream."""
        known = next((one for one in self.of(stream) if one.id == instance_id), None)
        if known is not None and known.place == place and now - known.last_seen < WRITE_EVERY:
            return
        mine = (_TABLE.c.stream == stream) & (_TABLE.c.instance_id == instance_id)
        began = known.first_seen if known is not None and now - known.last_seen < TERM else now
        values = {"place": place, "first_seen": began, "last_seen": now}
        try:
            with schema.transaction(self._engine(), writes=True) as connection:
                if connection.execute(update(_TABLE).where(mine).values(values)).rowcount == 0:
                    connection.execute(delete(_TABLE).where(_TABLE.c.last_seen < now - KEPT))
                    connection.execute(insert(_TABLE).values(stream=stream, instance_id=instance_id, **values))
        except IntegrityError:
            return  # another sensor of the same instance recorded it first
