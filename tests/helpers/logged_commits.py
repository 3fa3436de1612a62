"""Commits of a table, and what lies between them in its log."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from highwater.resources import commit_log
from highwater.resources.lake import Lake

if TYPE_CHECKING:
    from deltalake import DeltaTable


def open_table(lake: Lake, table: str, stream: str = "orders") -> DeltaTable:
    found = lake.open_stream_table(stream, table)
    assert found is not None
    return found


def wait_between_commits() -> datetime:
    """A moment after one commit and before the next, by the clock's milliseconds."""
    time.sleep(0.02)
    now = datetime.now(UTC)
    time.sleep(0.02)
    return now


def build_options(number: int, metadata: str) -> dict[str, str]:
    return {"txnAppId": commit_log.APP, "txnVersion": str(number), "userMetadata": metadata}
