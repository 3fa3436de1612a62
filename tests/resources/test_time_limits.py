"""Requests under the time limit of a tick, by real clients of a broker that accepts connections and never answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from highwater.errors import DependencyUnavailableError, OutOfTimeError
from highwater.mirroring import MirrorMark
from highwater.resources.consumer_groups import commit, read_group, read_group_offsets
from highwater.resources.divergence_detection import read_fingerprints
from highwater.resources.kafka import Kafka
from highwater.resources.offset_requests import OffsetQuery
from highwater.resources.time_limits import limit_time, limit_wait
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.slices import OffsetRange

LIMIT = 0.3
# Beside the limit: a future is waited for a second longer than its request, and clients open and close.
MARGIN = 2.5
RANGES = {0: OffsetRange(0, 5)}
MARK = MirrorMark.from_last_slice("T" * 22, None, datetime(2026, 3, 1, tzinfo=UTC))


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The address of a broker that hangs: the kernel accepts connections to it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


REQUESTS: dict[str, Callable[[Kafka], Any]] = {
    "names": lambda kafka: kafka.list_topic_names(),
    "groups": lambda kafka: kafka.list_group_names(),
    "state": lambda kafka: kafka.read_topic_state("orders"),
    "states": lambda kafka: kafka.read_topic_states(["orders"]),
    "second look": lambda kafka: kafka.look_again("orders"),
    "offsets": lambda kafka: kafka._read_topic_offsets("orders", [0], OffsetQuery.HIGH),
    "all offsets": lambda kafka: kafka._read_offsets([("orders", 0)], OffsetQuery.HIGH),
    "settings": lambda kafka: fetch_topic_settings(kafka, "orders"),
    "records": lambda kafka: [*kafka.read("orders", RANGES)],
    "members": lambda kafka: read_group(kafka, "group"),
    "group offsets": lambda kafka: read_group_offsets(kafka, "group", [("orders", 0)]),
    "commit": lambda kafka: commit(kafka, "group", {("orders", 0): (5, MARK)}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_ends_with_the_tick(silent: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit waited 10 s for settings, and 30 s for records; a tick of 60 s is ended without its results."""
    monkeypatch.setattr("highwater.resources.kafka.LOOKS_APART", 3.0)
    kafka, began = Kafka(silent), time.monotonic()
    with limit_time(LIMIT), pytest.raises(OutOfTimeError):
        REQUESTS[name](kafka)
    assert time.monotonic() - began < LIMIT + MARGIN


def test_fingerprints_that_did_not_fit_are_left_out(silent: str) -> None:
    began = time.monotonic()
    with limit_time(LIMIT):
        assert read_fingerprints(Kafka(silent), "orders", RANGES) == {}
    assert time.monotonic() - began < LIMIT + MARGIN


def test_without_a_limit_a_broker_that_hangs_is_named(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 0.2)
    with pytest.raises(DependencyUnavailableError, match="did not answer") as found:
        Kafka(silent).list_topic_names()
    assert found.value.of == "kafka"
    assert limit_wait(30.0) == 30.0
