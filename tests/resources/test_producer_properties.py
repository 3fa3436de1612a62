"""Properties of the reliable producer: defaults, and refusals of what weakens a guarantee."""

from __future__ import annotations

import pytest

from highwater.errors import ConfigurationError
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties


def test_defaults_wait_for_all_replicas_once_and_in_order_for_a_day() -> None:
    found = build_producer_properties("b:9092")
    assert found["acks"] == "all"
    assert found["enable.idempotence"] == "true"
    assert found["max.in.flight.requests.per.connection"] == "5"
    assert found["delivery.timeout.ms"] == "86400000"
    assert found["partitioner"] == "murmur2_random"
    assert found["allow.auto.create.topics"] == "false"


def test_a_transactional_producer_waits_no_longer_than_its_transaction() -> None:
    found = build_producer_properties(
        "b:9092", {"transaction.timeout.ms": "30000", "delivery.timeout.ms": "200000"}, transactional_id="t"
    )
    assert found["transactional.id"] == "t"
    assert found["delivery.timeout.ms"] == "30000"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("request.required.acks", "0"),
        ("enable.idempotence", "false"),
        ("max.in.flight", "6"),
        ("max.in.flight.requests.per.connection", "100"),
        ("retries", "0"),
        ("message.send.max.retries", "3"),
        ("message.timeout.ms", "5000"),
        ("delivery.timeout.ms", "0"),
        ("delivery.report.only.error", "true"),
        ("allow.auto.create.topics", "true"),
        ("enable.gapless.guarantee", "true"),
        ("queuing.strategy", "lifo"),
        ("partitioner", "consistent_random"),
        # librdkafka takes properties of topics under such names too.
        ("topic.partitioner", "random"),
        ("topic.message.timeout.ms", "5000"),
        ("topic.request.required.acks", "1"),
    ],
)
def test_a_property_that_weakens_is_refused_with_its_value_and_a_reason(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        build_producer_properties("b:9092", {name: value})
    text = str(refused.value)
    assert f"{name} must not be {value}: " in text
    assert "remedy: take " in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "-1"),
        ("max.in.flight", "1"),
        ("message.timeout.ms", "200000"),
        ("compression.type", "zstd"),
        ("topic.acks", "-1"),
        ("topic.message.timeout.ms", "200000"),
    ],
)
def test_a_property_that_does_not_weaken_is_taken_under_one_name(name: str, value: str) -> None:
    found = build_producer_properties("b:9092", {name: value})
    assert value in found.values()
    assert not {"message.timeout.ms", "max.in.flight", "topic.acks", "topic.message.timeout.ms"} & found.keys()


@pytest.mark.parametrize("name", ["topic.metadata.refresh.interval.ms", "topic.metadata.propagation.max.ms"])
def test_a_property_whose_own_name_begins_like_that_of_topics_keeps_it(nobody: str, name: str) -> None:
    found = build_producer_properties(nobody, {name: "1000"})
    assert found[name] == "1000"
    ReliableProducer(found).close(0)
