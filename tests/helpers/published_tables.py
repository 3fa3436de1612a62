"""The log of a publication, and the rows of one that was published."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.assets import (
    published,
)
from highwater.resources.dlq_topics import TopicShape
from tests.helpers.accepted import Log, Tables


def make_log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A test double for Kafka: a topic of two partitions."""
    log = Log()
    monkeypatch.setattr(published, "Transactions", log)
    shape = TopicShape(2, 1, {"max.message.bytes": "1000000"})
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: shape)
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: "T" * 22)
    return log


def rows_of(tables: Tables) -> list[dict[str, Any]]:
    from tests.helpers.support import read_rows

    return read_rows(tables.lake.build_table_path("orders", "published"))
