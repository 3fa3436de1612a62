"""Pausing a stream, one of its sensors, or the retries of one topic; the ledger has the pause until the resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.operator_actions import ensure_named
from highwater.resources.ledger.pauses import ALL, PARTS, Pause, build_name

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger


@dataclass(frozen=True)
class TierPauseRequest:
    """A request to pause or resume the retries of a topic.

    Args:
        topic: the tier, or another system's topic.
        resume: end the pause, instead of beginning one.
        dry_run: record nothing.
        by: the person's name.
        because: why it is paused; the reason of a resume is among the ledger's decisions alone.
    """

    topic: str
    resume: bool = False
    dry_run: bool = True
    by: str = ""
    because: str = ""


@dataclass(frozen=True)
class PauseRequest:
    """A request to pause or resume a stream, or a part of it.

    Args:
        part: `planner`, `retries` or `publisher`; the whole stream if empty.
        resume: end the pause, instead of beginning one.
        dry_run: record nothing.
        by: the person's name.
        because: why it is paused; the reason of a resume is among the ledger's decisions alone.
    """

    part: str = ALL
    resume: bool = False
    dry_run: bool = True
    by: str = ""
    because: str = ""


def pause_or_resume_tier(
    ledger: Ledger, stream: Stream, request: TierPauseRequest, now: datetime, log: Callable[[str], object]
) -> Pause | None:
    """Pause or resume the retries of a topic, or report their state; returns the pause as it was.

    Args:
        ledger: has the record.
        stream: the topic's stream.
        request: the change to make.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Raises:
        ConfigurationError: its records are not retried, it is paused already or is not, or nobody is named.
    """
    if request.topic not in stream.delays:
        raise ConfigurationError(
            f"{request.topic} is no topic of stream {stream.name} whose records are retried",
            found=f"those are {', '.join(stream.delays) or 'none'}",
            remedy=f"name one of them; to pause all, highwater pause {stream.name} retries",
        )
    ensure_named(request.by, "a pause or its end", dry_run=request.dry_run)
    found = ledger.paused.read_for_stream(stream.name).get(request.topic)
    if (found is None) == request.resume:
        raise _build_unchanged_error(found, request.topic)
    log(_describe_state(found, request.topic))
    if not request.dry_run and not _record(ledger, stream, request, now):
        raise _build_unchanged_error(
            ledger.paused.read_for_stream(stream.name).get(request.topic), request.topic
        )  # somebody else was first
    if not request.dry_run and request.resume:
        log(f"{request.topic}: resumed by {request.by}; the next tick plans due records")
    elif not request.dry_run:
        log(f"{request.topic}: paused; slices that are planned go on")
    return found


def pause_or_resume(
    ledger: Ledger, stream: Stream, request: PauseRequest, now: datetime, log: Callable[[str], object]
) -> dict[str, Pause]:
    """Pause or resume a stream or a part of it, or report its state: for the commands and jobs `pause` and `resume`.

    A paused stream gets no new plans and no run requests from sensors: neither from planner, retries and publisher nor
    from repair. Runs that are queued or started go on. A pause of one part leaves the others alone. To resume the whole
    stream ends the pauses of its parts too.

    Args:
        ledger: has the record.
        stream: the stream.
        request: the change to make.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Returns:
        The pauses as they were, by part.

    Raises:
        ConfigurationError: there is no such part, it is paused already or is not, or nobody is named.
    """
    if request.part not in {*PARTS, ALL}:
        raise ConfigurationError(
            f"{request.part!r} is no part of a stream that can be paused",
            found=f"those are {', '.join(PARTS)}",
            remedy="name one of them, or none for the whole stream",
        )
    ensure_named(request.by, "a pause or its end", dry_run=request.dry_run)
    name, found = (
        build_name(stream.name, request.part),
        ledger.paused.read_parts_by_stream(stream.name).get(stream.name, {}),
    )
    paused_parts = (
        [*found] if request.resume and request.part == ALL else [part for part in found if part == request.part]
    )
    if bool(paused_parts) != request.resume:
        raise _build_part_state_error(stream, request, found)
    for pause in found.values():
        log(pause.text)
    if not found:
        log(f"{name} is not paused")
    if request.dry_run:
        return found
    if request.resume:
        done = [part for part in paused_parts if ledger.paused.resume_part(stream.name, part)]
    else:
        done = [request.part] * ledger.paused.pause_part(
            stream.name, request.part, Pause(name, now, request.by, request.because)
        )
    if not done:  # somebody else was first
        raise _build_part_state_error(
            stream, request, ledger.paused.read_parts_by_stream(stream.name).get(stream.name, {})
        )
    log(f"{name}: resumed by {request.by}" if request.resume else f"{name}: paused; runs that are requested go on")
    return found


def _record(ledger: Ledger, stream: Stream, request: TierPauseRequest, now: datetime) -> bool:
    if request.resume:
        return ledger.paused.resume(stream.name, request.topic)
    return ledger.paused.pause(stream.name, Pause(request.topic, now, request.by, request.because))


def _describe_state(found: Pause | None, topic: str) -> str:
    return found.text if found else f"{topic} is not paused"


def _build_unchanged_error(found: Pause | None, topic: str) -> ConfigurationError:
    return ConfigurationError(_describe_state(found, topic), remedy="no action needed: highwater status shows it")


def _build_part_state_error(stream: Stream, request: PauseRequest, found: dict[str, Pause]) -> ConfigurationError:
    pauses = "; ".join(pause.text for pause in found.values())
    if request.resume and ALL in found:
        remedy = f"the whole stream is paused: highwater resume {stream.name}"
    else:
        remedy = f"no action needed: highwater status {stream.name} shows it"
    return ConfigurationError(pauses or f"{build_name(stream.name, request.part)} is not paused", remedy=remedy)
