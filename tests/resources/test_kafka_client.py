"""The client of a process's questions to Kafka, which its threads share."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.errors import DependencyUnavailableError, HighwaterError
from highwater.resources.consumer_groups import _request_group
from highwater.resources.dlq_topics import TopicShape, _create
from highwater.resources.kafka import Kafka
from highwater.resources.offset_requests import OffsetQuery
from highwater.resources.topic_facts import fetch_allowed_operations, fetch_topic_settings


class FakeAdmin:
    """A test double for an admin client: while somebody waits for its answer, another thread finds the broker
    unavailable."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka

    def poll(self, _: float) -> int:
        return 0

    def list_consumer_groups(self, **_: Any) -> Any:
        return self.answer()

    def describe_topics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"orders": self.answer()}

    def describe_configs(self, resources: Sequence[Any], **_: Any) -> dict[Any, Any]:
        return {resources[0]: self.answer()}

    def describe_consumer_groups(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"g": self.answer()}

    def create_topics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"orders.dlq.1": self.answer()}

    def list_offsets(self, places: Mapping[Any, Any], **_: Any) -> dict[Any, Any]:
        return {place: self.answer() for place in places}

    def answer(self) -> Any:
        kafka, alive = self.kafka, weakref.ref(self)

        def result(_: float) -> Any:
            kafka.build_unavailable_error("no broker answered another thread")
            assert alive() is not None, "nobody holds the client that was asked"
            sound = {"topic_id": "T" * 22, "partitions": [SimpleNamespace(id=0, leader=None)], "offset": 0}
            return SimpleNamespace(
                errors=[], valid=[], authorized_operations=None, items=dict[str, Any]().items, **sound
            )

        return SimpleNamespace(result=result)


QUESTIONS: dict[str, Callable[[Kafka], Any]] = {
    "description": lambda kafka: kafka.read_description("orders"),
    "descriptions": lambda kafka: kafka._read_leaders_by_topic(["orders"]),
    "all offsets": lambda kafka: kafka._read_offsets([("orders", 0)], OffsetQuery.STABLE, OffsetQuery.HIGH),
    "offsets": lambda kafka: kafka._read_topic_offsets("orders", [0], 5, 6),
    "groups": lambda kafka: kafka.list_group_names(),
    "create": lambda kafka: _create(kafka, "orders.dlq.1", TopicShape(1, 1, {})),
    "settings": lambda kafka: fetch_topic_settings(kafka, "orders"),
    "members": lambda kafka: _request_group(kafka, "g"),
    "permissions": lambda kafka: fetch_allowed_operations(kafka, ["orders"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_client_that_another_thread_gives_up_answers_those_who_wait(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that nobody holds is destroyed; those who wait heard that no broker had answered."""
    kafka = Kafka("nowhere:1")
    monkeypatch.setattr("highwater.resources.kafka.open_client", lambda *_, **__: FakeAdmin(kafka))
    QUESTIONS[question](kafka)


class FakeSilentAdmin(FakeAdmin):
    """One that no broker answers."""

    def list_topics(self, **_: Any) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def answer(self) -> Any:
        def result(_: float) -> Any:
            raise TimeoutError

        return SimpleNamespace(result=result)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_error_of_a_question_holds_no_client(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its traceback: the client would go on connecting to a broker that is left alone."""
    kafka, made = Kafka("nowhere:1"), list[weakref.ref[FakeAdmin]]()

    def silent(*_: object, **__: object) -> FakeAdmin:
        client = FakeSilentAdmin(kafka)
        made.append(weakref.ref(client))
        return client

    monkeypatch.setattr("highwater.resources.kafka.open_client", silent)
    with pytest.raises(DependencyUnavailableError) as reported:
        QUESTIONS[question](kafka)
    assert made, "no client was asked"
    assert [one() for one in made] == [None] * len(made), reported.traceback


def test_threads_that_ask_first_at_once_share_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opened one, and the later took the earlier one's place, which was destroyed amid its question."""
    made: list[object] = []

    def slow(*_: object, **__: object) -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr("highwater.resources.kafka.open_client", slow)
    kafka = Kafka("nowhere:1")
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda _: kafka.get_admin(), range(3))]
    assert found == made * 3


def test_the_next_question_opens_a_new_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.resources.kafka.open_client", lambda *_, **__: SimpleNamespace(poll=lambda _: 0))
    kafka = Kafka("nowhere:1")
    first = kafka.get_admin()
    assert kafka.get_admin() is first
    assert isinstance(kafka.build_unavailable_error("nobody answers"), HighwaterError)
    assert kafka.get_admin() is not first
