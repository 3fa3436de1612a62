"""The ledger's record of streams that a sensor skips because of a fault."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

_TABLE = schema.sensor_faults
# The length of a name in the ledger.
NAME_LENGTH = 249


@dataclass(frozen=True)
class SensorFault:
    """The reason why a sensor skips a stream.

    Args:
        stream: the stream, or the path of a stream file that cannot be read.
        sensor: the sensor.
        since: when a tick found the fault first, in UTC.
        problem: the fault, with the stored and the found value.
        remedy: the remedy for a person.
    """

    stream: str
    sensor: str
    since: datetime
    problem: str
    remedy: str

    @property
    def text(self) -> str:
        """The fault in a sentence."""
        return f"sensor {self.sensor} skips {self.stream} since {self.since:%Y-%m-%d %H:%M} UTC: {self.problem}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "since": self.since.isoformat()}


class SensorFaults(LedgerPart):
    """The faults that sensors of a deployment found."""

    def list_all(self) -> list[SensorFault]:
        """The faults of all streams, the oldest first."""
        query = select(_TABLE).order_by(_TABLE.c.since, _TABLE.c.stream, _TABLE.c.sensor)
        return [SensorFault(**row._mapping) for row in self._database.read(query)]  # noqa: SLF001 - SQLAlchemy's public name

    def replace(self, sensor: str, found: Collection[SensorFault], ended: Collection[str]) -> None:
        """Record the faults that a tick of a sensor found, and delete those of streams that it served.

        Args:
            sensor: the sensor.
            found: the faults; each takes the place of an earlier one of its stream.
            ended: streams without a fault.
        """
        gone = [*ended, *(one.stream for one in found)]
        if not gone:
            return
        try:
            with self._database.writing() as connection:
                for stream in gone:
                    connection.execute(delete(_TABLE).where(_TABLE.c.stream == stream, _TABLE.c.sensor == sensor))
                if found:
                    connection.execute(insert(_TABLE), [vars(one) for one in found])
        except IntegrityError:
            return  # another tick recorded the same fault first
