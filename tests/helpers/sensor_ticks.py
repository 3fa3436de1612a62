"""Ticks of sensors on a real broker, a ledger and an instance of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from highwater.declaration import Limits
from highwater.orchestration.build import build_defs
from highwater.resources.kafka import Kafka
from tests.conftest import create_topic
from tests.helpers.support import Message, make_stream, send
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from tests.conftest import TopicFactory


SOON = timedelta(seconds=0)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as made:
        yield made


def make_ticking(
    topic: TopicFactory,
    bootstrap: str,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ticking]:
    def make(records: int = 40, **limits: int) -> Ticking:
        name = topic(partitions=2)
        monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", bootstrap)
        monkeypatch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{tmp_path / 'ledger.sqlite'}")
        monkeypatch.setenv("HIGHWATER_LAKE", str(tmp_path / "lake"))
        send(bootstrap, name, [Message(b"k", b"v", partition=n % 2) for n in range(records)])
        given: dict[str, Any] = {"max_offsets": 10, "slices_per_run": 3, **limits}
        stream = make_stream(name, limits=Limits(**given))
        return Ticking(stream, instance, tmp_path)

    return make


def _later(ours: Ticking) -> None:
    """Let the grace pass: slices look as if they had been planned an hour ago."""
    from sqlalchemy import create_engine, text

    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    with create_engine(ours.ledger.database.url).begin() as connection:
        connection.execute(text("UPDATE slices SET planned_at = :at"), {"at": _as_stored(hour_ago)})


def _as_stored(at: datetime) -> str:
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ")


def wait_for(ours: Ticking, *delays: timedelta) -> None:
    """Let the stream have tiers of these delays."""
    ours.stream = replace(ours.stream, tiers=delays)
    ours.defs = build_defs(streams=[ours.stream])


def tiers_of(ours: Ticking, records: int) -> None:
    """Let the stream have tiers of seconds, the first of them with records whose time the broker sets."""
    wait_for(ours, timedelta(seconds=1), timedelta(seconds=2))
    kafka = Kafka(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"])
    create_topic(kafka.bootstrap, ours.stream.tier_topics[0], 2, {"message.timestamp.type": "LogAppendTime"})
    send(kafka.bootstrap, ours.stream.tier_topics[0], [Message(b"k", b"v", partition=n % 2) for n in range(records)])
