"""Outboxes, and records in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Message

from highwater.errors import DependencyUnavailableError
from highwater.resources.kafka import Kafka
from highwater.resources.outbox import ORIGIN_HEADER, Outbox
from highwater.resources.producer_records import Record
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from highwater.topic_rules import Setting

NOBODY = Kafka("127.0.0.1:1")
RECORD = Record("t", b"k", b"v")


class FakeTopicLog:
    """A test double for a topic, with what retention has taken from partition 0 and its policy; 1 is empty."""

    def __init__(self) -> None:
        self.log_start = 0
        self.high_watermark = 100
        self.policy = "delete"
        self.unavailable = False
        self.records: list[tuple[int, bytes]] = []

    def outbox(self, file: Path) -> Outbox:
        return Outbox(file, cast("Kafka", self))

    def read_topic_state(self, topic: str) -> TopicState:
        if self.unavailable:
            raise DependencyUnavailableError("away", remedy="none")
        end = self.high_watermark
        whole = PartitionState(0, 0, 0, leader=1)
        return TopicState(topic, "id", {0: PartitionState(self.log_start, end, end, leader=1), 1: whole})

    def read(self, topic: str, ranges: dict[int, OffsetRange], *, committed: bool) -> Iterator[Message]:
        assert not committed
        for offset, origin in self.records:
            if offset in ranges[0]:
                headers: list[tuple[str, str | bytes | None]] = [(ORIGIN_HEADER, origin)]
                yield Message(topic=topic, partition=0, offset=offset, headers=headers, timestamp=(1, 0))


class FakeDyingProducer:
    """A test double for a producer whose process dies before any report; what it was given may have arrived."""

    transactional = False

    def __init__(self, log: FakeTopicLog, arrived: list[str]) -> None:
        self.log, self.arrived = log, arrived

    def send(self, record: Record, record_id: str, on_outcome: object) -> None:
        del on_outcome
        self.log.high_watermark += 1  # by somebody else
        if record_id in self.arrived:
            self.log.records.append((self.log.high_watermark, dict(record.headers)[ORIGIN_HEADER] or b""))
            self.log.high_watermark += 1

    def stop(self, *of: object) -> None:
        """It dies before that matters."""


def record(name: str, key: bytes | None = None) -> Record:
    """One whose value shows its name."""
    return Record("t", name.encode() if key is None else key, name.encode())


def show_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a `FakeTopicLog` show its policy."""
    asked = fetch_topic_settings

    def settings(kafka: Kafka | FakeTopicLog, topic: str) -> Mapping[str, Setting] | None:
        if isinstance(kafka, FakeTopicLog):
            return {"cleanup.policy": Setting(kafka.policy, "of the topic")} if kafka.policy else None
        return asked(kafka, topic)

    monkeypatch.setattr("highwater.resources.outbox.fetch_topic_settings", settings)


def die_amid(file: Path, log: FakeTopicLog, names: list[str], arrived: list[str]) -> None:
    """Send records and die; `arrived` are those that the topic has."""
    box = log.outbox(file)
    box.put((name, record(name)) for name in names)
    box.send(cast("Any", FakeDyingProducer(log, arrived)))
    box.close()
