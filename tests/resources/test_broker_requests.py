"""Admin requests that any broker can answer, and brokers that hang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.errors import DependencyUnavailableError, OutOfTimeError
from highwater.resources import broker_requests
from highwater.resources.kafka import Kafka
from highwater.resources.time_limits import limit_time
from highwater.resources.topic_facts import fetch_topic_settings


class FakeBrokers:
    """A test double for three brokers: requests go to the one that the last metadata named, as librdkafka sends them.

    Args:
        named: the controllers that metadata name, one after another.
        hung: the brokers that do not answer.
    """

    def __init__(self, named: Sequence[int], hung: Sequence[int]) -> None:
        self.named, self.hung = [*named], hung
        self.asked: list[int] = []
        self.waits: list[float] = []
        self.clients = 0

    def open(self, *_: object, **__: object) -> FakeBrokers:
        self.clients += 1
        self.controller = self.named.pop(0)
        return self

    def poll(self, _: float) -> int:
        return 0

    def list_topics(self, timeout: float) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        self.waits.append(timeout)
        if len(self.hung) == 3:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        self.controller = self.named.pop(0)
        return SimpleNamespace(controller_id=self.controller, topics={"orders": None})

    def describe_topics(self, asked: Any, request_timeout: float) -> dict[str, Any]:
        partition = SimpleNamespace(id=0, leader=SimpleNamespace(id=2))
        found = SimpleNamespace(topic_id="T" * 22, partitions=[partition])
        return {topic: self._answer(found, request_timeout) for topic in asked.topic_names}

    def describe_configs(self, resources: Sequence[Any], request_timeout: float) -> dict[Any, Any]:
        return {resources[0]: self._answer({}, request_timeout)}

    def _answer(self, found: Any, wait: float) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        self.asked.append(self.controller)
        self.waits.append(wait)

        def result(_: float) -> Any:
            if self.asked[-1] in self.hung:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return found

        return SimpleNamespace(result=result)


def connect(monkeypatch: pytest.MonkeyPatch, named: Sequence[int], hung: Sequence[int]) -> tuple[Kafka, FakeBrokers]:
    brokers = FakeBrokers(named, hung)
    monkeypatch.setattr("highwater.resources.kafka.open_client", brokers.open)
    return Kafka("nowhere:1"), brokers


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        ([2], [2]),
        # The client's first metadata, a new client's, and the one before the second request.
        ([1, 1, 2], [1, 2]),
        ([1, 1, 1, 3], [1, 1, 3]),
        ([1, 2, 1, 1, 1, 3], [1, 1, 3]),
    ],
)
def test_a_description_comes_from_a_broker_that_answers(
    monkeypatch: pytest.MonkeyPatch, named: Sequence[int], asked: Sequence[int]
) -> None:
    """One broker that hung made every topic unreadable, where the client happened to ask that one."""
    kafka, brokers = connect(monkeypatch, named, hung=[1])
    found, denied = kafka._read_leaders_by_topic(["orders"])
    assert (found, denied, brokers.asked) == ({"orders": ("T" * 22, {0: 2})}, set(), asked)
    assert brokers.clients == min(2, len(asked)), "the second client never had a connection to the broker that hangs"


def test_settings_come_from_a_broker_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, brokers = connect(monkeypatch, [1, 1, 2], hung=[1])
    assert fetch_topic_settings(kafka, "orders") == {}
    assert brokers.asked == [1, 2]


def test_brokers_that_are_all_unavailable_are_no_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """I15."""
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 4.0)
    kafka, brokers = connect(monkeypatch, [1, 2], hung=[1, 2, 3])
    with pytest.raises(DependencyUnavailableError, match="did not answer"):
        kafka._read_leaders_by_topic(["orders"])
    assert brokers.waits == [broker_requests.FIRST_SECONDS, broker_requests.FIRST_SECONDS, 4.0]


def test_a_refused_login_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers lock a user for logins that fail."""
    kafka, brokers = connect(monkeypatch, [1, 2], hung=[1])
    kafka.get_admin()
    kafka._refusals.append("SASL authentication failed")
    with pytest.raises(DependencyUnavailableError, match="SASL authentication failed"):
        kafka._read_leaders_by_topic(["orders"])
    assert brokers.clients == 1


def test_no_request_waits_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, brokers = connect(monkeypatch, [1, 1, 2, 2, 2], hung=[1])
    with limit_time(1.0):
        kafka._read_leaders_by_topic(["orders"])
    assert max(brokers.waits) < 1.0
    brokers.asked.clear()
    with limit_time(0), pytest.raises(OutOfTimeError, match="the time of this tick is over"):
        kafka._read_leaders_by_topic(["orders"])
    assert brokers.asked == []
    kafka._read_leaders_by_topic(["orders"])
    assert brokers.asked == [2], "the limit ends with its block"


def test_a_request_that_the_limit_cut_short_blames_no_broker() -> None:
    """Three of them would open the breaker of Kafka."""
    with limit_time(0.01):
        time.sleep(0.02)
        error = Kafka("nowhere:1").build_unavailable_error("timed out")
    assert isinstance(error, OutOfTimeError)
    assert error.of is None


def test_the_inner_of_two_limits_cannot_be_longer() -> None:
    with limit_time(0), limit_time(60), pytest.raises(OutOfTimeError):
        Kafka("nowhere:1").list_topic_names()
