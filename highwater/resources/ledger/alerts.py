"""Alerts: the open ones, and what somebody watches over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select, update

from highwater.alerting import Alert
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart


class OpenAlerts(LedgerPart):
    """The alerts of a ledger."""

    def read_open(self) -> dict[tuple[str, str], Alert]:
        """The open alerts of all streams by stream and condition, the oldest first."""
        table = schema.alerts
        found = [Alert(**row._mapping) for row in self._database.read(select(table).order_by(table.c.since))]  # noqa: SLF001 - SQLAlchemy's public name
        return {(alert.stream, alert.what): alert for alert in found}

    def record(self, open_: Mapping[tuple[str, str], Alert]) -> None:
        """Store these alerts, and no others."""
        table = schema.alerts

        def write(connection: Connection) -> None:
            connection.execute(delete(table))
            if open_:
                connection.execute(insert(table), [vars(alert) for alert in open_.values()])

        self._database.write_again(write)

    def read_watch_times(self) -> dict[str, datetime]:
        """The watched names of alerts, and when somebody last watched over each, in UTC."""
        return {row.name: row.at for row in self._database.read(select(schema.watched))}

    def watch(self, names: Collection[str], now: datetime) -> None:
        """Record that these are watched over now."""
        table = schema.watched

        def write(connection: Connection) -> None:
            for name in names:
                if connection.execute(update(table).where(table.c.name == name).values(at=now)).rowcount == 0:
                    connection.execute(insert(table).values(name=name, at=now))

        self._database.write_again(write)
