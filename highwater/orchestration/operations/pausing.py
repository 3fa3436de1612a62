"""Pausing a stream, one of its sensors, or the retries of one topic; the ledger has the pause until the resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.resources.ledger.pauses import ALL, PARTS, Pause, name_of

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger


@dataclass(frozen=True)
class Asked:
    """A person's wish for a topic whose records are retried.

    Args:
        topic: the tier, or another system's topic.
        resume: end the pause, instead of beginning one.
        sure: record it; without it only the present state is reported.
        by: the person's name.
        because: why it is paused; the reason of a resume is among the ledger's decisions alone.
    """

    topic: str
    resume: bool = False
    sure: bool = False
    by: str = ""
    because: str = ""


@dataclass(frozen=True)
class AskedPart:
    """A person's wish for a stream, or a part of it.

    Args:
        part: `planner`, `retries` or `publisher`; the whole stream if empty.
        resume: end the pause, instead of beginning one.
        sure: record it; without it only the present state is reported.
        by: the person's name.
        because: why it is paused; the reason of a resume is among the ledger's decisions alone.
    """

    part: str = ALL
    resume: bool = False
    sure: bool = False
    by: str = ""
    because: str = ""


def act(ledger: Ledger, stream: Stream, asked: Asked, now: datetime, log: Callable[[str], object]) -> Pause | None:
    """Pause or resume the retries of a topic, or report their state; returns the pause as it was.

    Args:
        ledger: has the record.
        stream: whose topic it is.
        asked: the wish.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Raises:
        ConfigurationError: its records are not retried, it is paused already or is not, or nobody is named.
    """
    if asked.topic not in stream.delays:
        raise ConfigurationError(
            f"{asked.topic} is no topic of stream {stream.name} whose records are retried",
            found=f"those are {', '.join(stream.delays) or 'none'}",
            remedy=f"name one of them; to pause all, highwater pause {stream.name} retries",
        )
    _ensure_named(asked.by, sure=asked.sure)
    found = ledger.paused.of(stream.name).get(asked.topic)
    if (found is None) == asked.resume:
        raise _as_it_is(found, asked.topic)
    log(_state(found, asked.topic))
    if asked.sure and not _record(ledger, stream, asked, now):
        raise _as_it_is(ledger.paused.of(stream.name).get(asked.topic), asked.topic)  # somebody else was first
    if asked.sure and asked.resume:
        log(f"{asked.topic}: resumed by {asked.by}; the next tick plans due records")
    elif asked.sure:
        log(f"{asked.topic}: paused; slices that are planned go on")
    return found


def act_on_part(
    ledger: Ledger, stream: Stream, asked: AskedPart, now: datetime, log: Callable[[str], object]
) -> dict[str, Pause]:
    """Pause or resume a stream or a part of it, or report its state: for the commands and jobs `pause` and `resume`.

    A paused stream gets no new plans and no run requests from sensors: neither from planner, retries and publisher nor
    from repair. Runs that are queued or started go on. A pause of one part leaves the others alone. To resume the whole
    stream ends the pauses of its parts too.

    Args:
        ledger: has the record.
        stream: the stream.
        asked: the wish.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Returns:
        The pauses as they were, by part.

    Raises:
        ConfigurationError: there is no such part, it is paused already or is not, or nobody is named.
    """
    if asked.part not in {*PARTS, ALL}:
        raise ConfigurationError(
            f"{asked.part!r} is no part of a stream that can be paused",
            found=f"those are {', '.join(PARTS)}",
            remedy="name one of them, or none for the whole stream",
        )
    _ensure_named(asked.by, sure=asked.sure)
    name, found = name_of(stream.name, asked.part), ledger.paused.parts(stream.name).get(stream.name, {})
    mine = [*found] if asked.resume and asked.part == ALL else [part for part in found if part == asked.part]
    if bool(mine) != asked.resume:
        raise _part_as_it_is(stream, asked, found)
    for pause in found.values():
        log(pause.text)
    if not found:
        log(f"{name} is not paused")
    if not asked.sure:
        return found
    if asked.resume:
        done = [part for part in mine if ledger.paused.resume_part(stream.name, part)]
    else:
        done = [asked.part] * ledger.paused.pause_part(
            stream.name, asked.part, Pause(name, now, asked.by, asked.because)
        )
    if not done:  # somebody else was first
        raise _part_as_it_is(stream, asked, ledger.paused.parts(stream.name).get(stream.name, {}))
    log(f"{name}: resumed by {asked.by}" if asked.resume else f"{name}: paused; runs that are requested go on")
    return found


def _ensure_named(by: str, *, sure: bool) -> None:
    if sure and not by:
        raise ConfigurationError("nobody is named who decides it", remedy="name a person with `by`")


def _record(ledger: Ledger, stream: Stream, asked: Asked, now: datetime) -> bool:
    if asked.resume:
        return ledger.paused.resume(stream.name, asked.topic)
    return ledger.paused.pause(stream.name, Pause(asked.topic, now, asked.by, asked.because))


def _state(found: Pause | None, topic: str) -> str:
    return found.text if found else f"{topic} is not paused"


def _as_it_is(found: Pause | None, topic: str) -> ConfigurationError:
    return ConfigurationError(_state(found, topic), remedy="nothing is to be done: highwater status shows it")


def _part_as_it_is(stream: Stream, asked: AskedPart, found: dict[str, Pause]) -> ConfigurationError:
    pauses = "; ".join(pause.text for pause in found.values())
    if asked.resume and ALL in found:
        remedy = f"the whole stream is paused: highwater resume {stream.name}"
    else:
        remedy = f"nothing is to be done: highwater status {stream.name} shows it"
    return ConfigurationError(pauses or f"{name_of(stream.name, asked.part)} is not paused", remedy=remedy)
