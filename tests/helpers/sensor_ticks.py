"""Ticks of sensors on a real broker, a ledger and an instance of their own."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from highwater.orchestration.build import build_defs
from highwater.resources.kafka import Kafka
from tests.conftest import create_topic
from tests.helpers.support import Message, send
from tests.helpers.ticking import Ticking

SOON = timedelta(seconds=0)


def end_grace(ours: Ticking) -> None:
    """Let the grace pass: slices look as if they had been planned an hour ago."""
    from sqlalchemy import create_engine, text

    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    with create_engine(ours.ledger.database.url).begin() as connection:
        connection.execute(text("UPDATE slices SET planned_at = :at"), {"at": format_stored(hour_ago)})


def format_stored(at: datetime) -> str:
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ")


def set_tiers(ours: Ticking, *delays: timedelta) -> None:
    """Let the stream have tiers of these delays."""
    ours.stream = replace(ours.stream, tiers=delays)
    ours.defs = build_defs(streams=[ours.stream])


def fill_tiers(ours: Ticking, records: int) -> None:
    """Let the stream have tiers of seconds, the first of them with records whose time the broker sets."""
    set_tiers(ours, timedelta(seconds=1), timedelta(seconds=2))
    kafka = Kafka(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"])
    create_topic(kafka.bootstrap, ours.stream.tier_topics[0], 2, {"message.timestamp.type": "LogAppendTime"})
    send(kafka.bootstrap, ours.stream.tier_topics[0], [Message(b"k", b"v", partition=n % 2) for n in range(records)])
