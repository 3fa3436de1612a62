"""Facts of a topic that breaks no rule, and changes of its settings."""

from __future__ import annotations

from dataclasses import replace

from highwater.topic_rules import Setting, TopicFacts

SETTINGS = {
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "retention.ms": "86400000",
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
}
SAFE = TopicFacts(
    topic="orders",
    bootstrap="broker:9092",
    brokers=3,
    replicas={0: 3, 1: 3},
    in_sync={0: 3, 1: 3},
    leaderless=frozenset(),
    settings={name: Setting(value, "DYNAMIC_TOPIC_CONFIG") for name, value in SETTINGS.items()},
    broker_settings={
        "auto.create.topics.enable": Setting("false", "STATIC_BROKER_CONFIG"),
        "replica.lag.time.max.ms": Setting("30000", "DEFAULT_CONFIG"),
        "broker.session.timeout.ms": Setting("9000", "DEFAULT_CONFIG"),
    },
    assignment={0: [1, 2, 3], 1: [2, 3, 1]},
    broker_ids=[1, 2, 3, 4],
)
OF_BROKER = dict(SAFE.broker_settings or {})


def with_setting(facts: TopicFacts, **settings: str) -> TopicFacts:
    named = {name.replace("_", "."): Setting(value, "DEFAULT_CONFIG") for name, value in settings.items()}
    return replace(facts, settings={**(facts.settings or {}), **named})
