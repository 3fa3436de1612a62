"""The actions `accept-loss` and `accept-divergence`: create a vanished tier again, then record what is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from highwater.orchestration.operations.acceptance import accept_loss, build_unread_filter
from highwater.resources.deleted_topics import (
    find_vanished_error,
    read_created_state,
    read_state_if_exists,
    recreate_topic,
    topic_exists,
)
from highwater.routing import build_stream_of_topic

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.operations.acceptance import Acceptance, Partitions
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState


@dataclass(frozen=True)
class AcceptLossRequest:
    """A request to accept losses of a topic.

    Args:
        topic: the tier, or another system's topic, that is meant; the main topic if None.
        partitions: the only ones that are meant; None means all.
        divergence: accept that other records occupy planned offsets than before (I16).
        dry_run: record nothing.
        by: the person's name.
    """

    topic: str | None = None
    partitions: Partitions = None
    divergence: bool = False
    dry_run: bool = True
    by: str = ""


def accept_topic_losses(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, request: AcceptLossRequest, now: datetime
) -> tuple[Acceptance, list[str]]:
    """Accept the losses of a topic, or report what would be recorded; returns them, and the same in sentences.

    An absent tier is recreated first. After a crash in between, the same command finds a recreated topic and accepts
    it.

    Args:
        ledger: gets the losses, and a new generation if one is needed.
        kafka: has the topic.
        lake: has the commits of raw, which show the slices that were read.
        stream: the declared stream.
        request: the topic, its partitions and the person.
        now: the time of the acceptance, in UTC.

    Raises:
        TopicVanishedError: the topic no longer exists, and others must create it.
        As `accept_loss` and `recreate_topic`.
    """
    view = build_stream_of_topic(stream, request.topic)
    state, made = _recreate_if_vanished(ledger, kafka, stream, view.topic, dry_run=request.dry_run)
    found = accept_loss(
        ledger,
        kafka,
        view,
        build_unread_filter(lake, view),
        by=request.by or "nobody yet",
        now=now,
        partitions=request.partitions,
        dry_run=request.dry_run,
        divergence=request.divergence,
        state=state,
    )
    return found, [*made, *found.lines, *_describe_next_steps(stream, view.topic, found, now)]


def _recreate_if_vanished(
    ledger: Ledger, kafka: Kafka, stream: Stream, topic: str, *, dry_run: bool
) -> tuple[TopicState | None, list[str]]:
    """Recreate a vanished tier if that is confirmed; else return the state it would have. Returns sentences too."""
    if topic_exists(kafka, topic):
        return None, []
    gone = find_vanished_error(ledger, stream, topic)
    if gone is None or read_state_if_exists(kafka, topic) is not None:
        return None, []
    if topic not in stream.tier_topics:
        raise gone
    if dry_run:
        return read_created_state(kafka, stream, topic), [f"{topic} is gone, and would be recreated"]
    recreate_topic(ledger, kafka, stream, topic)
    return None, [f"{topic} was gone, and is recreated"]


def _describe_next_steps(stream: Stream, topic: str, found: Acceptance, now: datetime) -> list[str]:
    """The outcome of records that waited on a tier: they are in raw and in rejects."""
    if found.nothing or topic not in stream.tier_topics:
        return []
    until = now + timedelta(seconds=1)  # the option takes whole seconds; later records are reprocessed once for nothing
    next_command = f"highwater reclaim {stream.name} --on {topic} --until {until:%Y-%m-%dT%H:%M:%S} shows which records"
    return [f"what waited on {topic} and is gone is still in raw: {next_command}, and reclaims them to be reprocessed"]
