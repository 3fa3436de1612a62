"""The ledger's record of what a person paused: sensors of a stream, and topics whose records are retried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, true
from sqlalchemy.exc import IntegrityError

from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

_TABLE = schema.paused_topics
# The parts of a stream that are paused by themselves. ALL pauses each of them, and repair.
PLANNER, RETRIES, PUBLISHER, ALL = "planner", "retries", "publisher", ""
PARTS = (PLANNER, RETRIES, PUBLISHER)
# Marks a part in the column of topics: no topic's name has this character.
_MARK = "@"


@dataclass(frozen=True)
class Pause:
    """A pause of a topic's retries, or of a part of a stream.

    Args:
        topic: the paused subject, as sentences name it: the topic, or for example `the planner of orders`.
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
        """The pause in a sentence."""
        why = f": {self.because}" if self.because else ""
        return f"{self.topic} is paused by {self.by} since {self.at:%Y-%m-%d %H:%M} UTC{why}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"at": self.at.isoformat(), "by": self.by, "because": self.because}


class PausedTopics(LedgerPart):
    """The pauses of a deployment."""

    def read_for_stream(self, stream: str) -> dict[str, Pause]:
        """The paused topics of a stream."""
        return self.read_topics_by_stream(stream).get(stream, {})

    def read_topics_by_stream(self, stream: str | None = None) -> dict[str, dict[str, Pause]]:
        """The paused topics by stream, of one stream or of all."""
        found: dict[str, dict[str, Pause]] = {}
        for (name, of), pause in self._read(stream).items():
            if not of.startswith(_MARK):
                found.setdefault(name, {})[of] = pause
        return found

    def read_parts_by_stream(self, stream: str | None = None) -> dict[str, dict[str, Pause]]:
        """The paused parts by stream, of one stream or of all."""
        found: dict[str, dict[str, Pause]] = {}
        for (name, of), pause in self._read(stream).items():
            if of.startswith(_MARK):
                part = of.removeprefix(_MARK)
                found.setdefault(name, {})[part] = replace(pause, topic=build_name(name, part))
        return found

    def pause(self, stream: str, pause: Pause) -> bool:
        """Record that a topic is paused; False if it was before, which stays."""
        return self._add(stream, pause.topic, pause)

    def resume(self, stream: str, topic: str) -> bool:
        """End a topic's pause; False if it is not paused."""
        return self._end(stream, topic)

    def pause_part(self, stream: str, part: str, pause: Pause) -> bool:
        """Record that a part of a stream is paused; False if it was before, which stays."""
        return self._add(stream, f"{_MARK}{part}", pause)

    def resume_part(self, stream: str, part: str) -> bool:
        """End the pause of a part; False if it is not paused."""
        return self._end(stream, f"{_MARK}{part}")

    def _read(self, stream: str | None) -> dict[tuple[str, str], Pause]:
        where = true() if stream is None else _TABLE.c.stream == stream
        with self._database.reading() as connection:
            rows = connection.execute(select(_TABLE).where(where))
            return {(r.stream, r.topic): Pause(r.topic, r.paused_at, r.paused_by, r.because) for r in rows}

    def _add(self, stream: str, of: str, pause: Pause) -> bool:
        row = {"paused_at": pause.at, "paused_by": pause.by, "because": pause.because}
        try:
            with self._database.writing() as connection:
                connection.execute(insert(_TABLE).values(stream=stream, topic=of, **row))
        except IntegrityError:
            return False
        return True

    def _end(self, stream: str, of: str) -> bool:
        statement = delete(_TABLE).where(_TABLE.c.stream == stream, _TABLE.c.topic == of)
        with self._database.writing() as connection:
            return connection.execute(statement).rowcount == 1


def build_name(stream: str, part: str) -> str:
    """A part of a stream as sentences name it."""
    return f"the {part} of {stream}" if part else f"stream {stream}"
