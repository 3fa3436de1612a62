"""Fixtures of the tests of published events."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.assets import published
from highwater.resources.dlq_topics import TopicShape
from tests.helpers.accepted import FakeTransactionLog, Tables


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeTransactionLog:
    """A test double for Kafka: a topic of two partitions."""
    log = FakeTransactionLog()
    monkeypatch.setattr(published, "Transactions", log)
    shape = TopicShape(2, 1, {"max.message.bytes": "1000000"})
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: shape)
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    return log


@pytest.fixture
def tables(tmp_path: Path, log: FakeTransactionLog) -> Tables:
    """The tables of a stream that publishes to that topic."""
    del log
    return Tables(tmp_path)
