"""The Dagster instances whose sensors work on streams, in the ledger."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from highwater.instances import TERM, Instance, select_concurrent
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

_TABLE = schema.instances
# Sensors tick every 10 to 30 s for all streams: the ledger gets one write a minute, whatever the number of streams.
WRITE_EVERY = timedelta(minutes=1)
# Old rows show which instance worked on a stream before.
RETENTION = timedelta(days=30)


class Instances(LedgerPart):
    """The Dagster instances of a deployment."""

    def list_for_stream(self, stream: str) -> list[Instance]:
        """The instances that worked on a stream within the last days."""
        query = select(_TABLE).where(_TABLE.c.stream == stream).order_by(_TABLE.c.first_seen)
        return [Instance(r.instance_id, r.place, r.first_seen, r.last_seen) for r in self._database.read(query)]

    def list_concurrent(self, stream: str, now: datetime) -> list[Instance]:
        """The instances that work on a stream at the same time; none where one alone does."""
        return select_concurrent(self.list_for_stream(stream), now)

    def record(self, streams: Collection[str], instance_id: str, place: str, now: datetime) -> None:
        """Record that an instance's sensors tick for these streams: an update a minute, with one statement for all."""
        query = select(_TABLE).where(_TABLE.c.instance_id == instance_id)
        known = {row.stream: row for row in self._database.read(query)}
        live = {n: row for n, row in known.items() if row.place == place and now - row.last_seen < TERM}
        due = [n for n in streams if n in live and now - live[n].last_seen >= WRITE_EVERY]
        new = [n for n in streams if n not in live]
        if not due and not new:
            return
        # An instance that moved meanwhile, to another host or DAGSTER_HOME, is the same one.
        since = {n: known[n].first_seen for n in new if n in known and now - known[n].last_seen < TERM}
        here = {"instance_id": instance_id, "place": place, "last_seen": now}
        rows = [{"stream": n, "first_seen": since.get(n, now), **here} for n in new]
        is_mine = _TABLE.c.instance_id == instance_id
        try:
            with self._database.writing() as connection:
                if due:
                    connection.execute(update(_TABLE).where(is_mine, _TABLE.c.stream.in_(due)).values(last_seen=now))
                if new:
                    connection.execute(delete(_TABLE).where(_TABLE.c.last_seen < now - RETENTION))
                    connection.execute(delete(_TABLE).where(is_mine, _TABLE.c.stream.in_(new)))
                    connection.execute(insert(_TABLE), rows)
        except IntegrityError:
            return  # another sensor of the same instance recorded it first
