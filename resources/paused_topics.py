"""Topics of the DLQ whose retries a person paused, in the ledger.

What belongs here: storing and reading them. What does not: what a pause keeps from being planned
(`orchestration.sensing.ticks`), or the command (`orchestration.operating.pausing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from resources import ledger_schema as schema

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

_TABLE = schema.paused_topics


@dataclass(frozen=True)
class Pause:
    """A topic whose retries wait.

    Args:
        topic: the tier, or another system's topic.
        at: since when, in UTC.
        by: the person's name.
        because: why; may be empty.
    """

    topic: str
    at: datetime
    by: str
    because: str = ""

    @property
    def text(self) -> str:
        """The same in a sentence."""
        why = f": {self.because}" if self.because else ""
        return f"{self.topic} is paused by {self.by} since {self.at:%Y-%m-%d %H:%M} UTC{why}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"at": self.at.isoformat(), "by": self.by, "because": self.because}


class PausedTopics:
    """The paused topics of a deployment.

    Args:
        engine: gives the ledger's database.

    Every method may raise DependencyAwayError: the database cannot be reached or stayed locked; nothing was written.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def of(self, stream: str) -> dict[str, Pause]:
        """The paused topics of a stream."""
        query = select(_TABLE).where(_TABLE.c.stream == stream)
        with schema.transaction(self._engine(), writes=False) as connection:
            found = connection.execute(query)
            return {row.topic: Pause(row.topic, row.paused_at, row.paused_by, row.because) for row in found}

    def pause(self, stream: str, pause: Pause) -> bool:
        """Keep that a topic is paused; False if it was before, which stays."""
        row = {"paused_at": pause.at, "paused_by": pause.by, "because": pause.because}
        try:
            with schema.transaction(self._engine(), writes=True) as connection:
                connection.execute(insert(_TABLE).values(stream=stream, topic=pause.topic, **row))
        except IntegrityError:
            return False
        return True

    def resume(self, stream: str, topic: str) -> bool:
        """End a topic's pause; False if it is not paused."""
        mine = delete(_TABLE).where(_TABLE.c.stream == stream, _TABLE.c.topic == topic)
        with schema.transaction(self._engine(), writes=True) as connection:
            return connection.execute(mine).rowcount == 1
