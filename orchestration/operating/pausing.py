"""Pausing the retries of one tier, a person's decision that is kept under a name until they are resumed.

A resume ends the record: who did it is told, in the command's output or the run's log, and not kept.

What belongs here: which topics may be paused, and recording it. What does not: what is not planned then
(`orchestration.sensing.ticks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from resources.paused_topics import Pause

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from resources.ledger import Ledger


@dataclass(frozen=True)
class Asked:
    """What a person asks.

    Args:
        topic: the tier, or another system's topic.
        resume: end the pause, instead of beginning one.
        sure: record it; without it only how it stands is told.
        by: the person's name.
        because: why it is paused; a resume has no reason.
    """

    topic: str
    resume: bool = False
    sure: bool = False
    by: str = ""
    because: str = ""


def act(ledger: Ledger, stream: Stream, asked: Asked, now: datetime, log: Callable[[str], object]) -> Pause | None:
    """Pause or resume the retries of a topic, or tell how it stands; returns the pause as it was.

    Args:
        ledger: keeps it.
        stream: whose topic it is.
        asked: what is asked.
        now: the time, in UTC.
        log: gets what is found and done, in sentences.

    Raises:
        ConfigurationError: its records are not retried, it is paused already or is not, or nobody is named.
    """
    if asked.topic not in stream.delays:
        raise ConfigurationError(
            f"{asked.topic} is no topic of stream {stream.name} whose records are retried",
            found=f"those are {', '.join(stream.delays) or 'none'}",
            remedy="name one of them; to pause all, stop the sensor of retries",
        )
    if asked.sure and not asked.by:
        raise ConfigurationError("nobody is named who decides it", remedy="name a person with `by`")
    found = ledger.paused.of(stream.name).get(asked.topic)
    if (found is None) == asked.resume:
        raise _as_it_is(found, asked.topic)
    log(_told(found, asked.topic))
    if asked.sure and not _record(ledger, stream, asked, now):
        raise _as_it_is(ledger.paused.of(stream.name).get(asked.topic), asked.topic)  # somebody else was first
    if asked.sure and asked.resume:
        log(f"{asked.topic}: resumed by {asked.by}; what is due is planned with the next tick")
    elif asked.sure:
        log(f"{asked.topic}: paused; slices that are planned go on")
    return found


def _record(ledger: Ledger, stream: Stream, asked: Asked, now: datetime) -> bool:
    if asked.resume:
        return ledger.paused.resume(stream.name, asked.topic)
    return ledger.paused.pause(stream.name, Pause(asked.topic, now, asked.by, asked.because))


def _told(found: Pause | None, topic: str) -> str:
    return found.text if found else f"{topic} is not paused"


def _as_it_is(found: Pause | None, topic: str) -> ConfigurationError:
    return ConfigurationError(_told(found, topic), remedy="nothing is to be done: highwater status tells it")
