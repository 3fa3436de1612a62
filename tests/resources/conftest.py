"""Fixtures of the tests of producers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.helpers.fake_client import FakeClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client of the next producer."""
    found = FakeClient()
    monkeypatch.setattr("confluent_kafka.Producer", lambda _: found)
    return found


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing answers, and nothing can begin to while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
