"""The rules for topics: what each calls ok, a warning or an error, and the command that fixes it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from highwater.declaration import Accepted
from highwater.orchestration.checking import topic_audit
from highwater.resources import topic_facts
from highwater.topic_rules import (
    Level,
    Setting,
    TopicFacts,
    check_max_message_bytes,
    check_published_topic,
    check_topic,
    describe_endurance,
    merge_broker_settings,
)
from tests.helpers.support import make_stream
from tests.helpers.topic_facts import OF_BROKER, SAFE, with_setting

ONE = replace(SAFE, brokers=1, replicas={0: 1, 1: 1}, in_sync={0: 1, 1: 1})


def test_a_safe_topic_breaks_no_rule() -> None:
    assert {finding.level for finding in check_topic(SAFE)} == {Level.OK}
    assert describe_endurance(SAFE).startswith("1 of 3 brokers may fail with writes going on, 2 with reads")


@pytest.mark.parametrize(
    ("facts", "rule", "level", "remedy"),
    [
        (replace(SAFE, replicas={0: 3, 1: 2}), "replication", Level.ERROR, "kafka-reassign-partitions"),
        (ONE, "replication", Level.WARNING, "three brokers"),
        (with_setting(SAFE, min_insync_replicas="1"), "min.insync.replicas", Level.ERROR, "min.insync.replicas=2"),
        (with_setting(SAFE, min_insync_replicas="3"), "min.insync.replicas", Level.ERROR, "min.insync.replicas=2"),
        (with_setting(ONE, min_insync_replicas="1"), "min.insync.replicas", Level.WARNING, "three brokers"),
        (ONE, "min.insync.replicas", Level.WARNING, "three brokers"),
        (
            replace(SAFE, replicas={0: 1, 1: 1}, in_sync={0: 1, 1: 1}, assignment={0: [1], 1: [2]}),
            "min.insync.replicas",
            Level.ERROR,
            "kafka-reassign-partitions",
        ),
        (
            with_setting(SAFE, unclean_leader_election_enable="true"),
            "unclean election",
            Level.ERROR,
            "unclean.leader.election.enable=false",
        ),
        (
            replace(SAFE, oldest_unread=timedelta(hours=13)),
            "retention",
            Level.WARNING,
            f"retention.ms={52 * 3_600_000}",
        ),
        (replace(SAFE, oldest_unread=timedelta(hours=24)), "retention", Level.ERROR, "retention.ms="),
        (with_setting(SAFE, retention_bytes="1000"), "retention by size", Level.WARNING, "retention.bytes=-1"),
        (with_setting(SAFE, cleanup_policy="compact,delete"), "cleanup", Level.WARNING, "cleanup.policy=delete"),
        (replace(SAFE, in_sync={0: 3, 1: 2}), "replicas in sync", Level.WARNING, "a broker"),
        (replace(SAFE, in_sync={0: 3, 1: 1}), "replicas in sync", Level.ERROR, "start the brokers"),
        (replace(SAFE, age_known=False), "retention", Level.UNKNOWN, "allow this user Read"),
        (replace(SAFE, leaderless=frozenset({1})), "replicas in sync", Level.ERROR, "start the brokers"),
        (
            replace(
                SAFE, broker_settings={**OF_BROKER, "auto.create.topics.enable": Setting("true", "DEFAULT_CONFIG")}
            ),
            "auto-creation",
            Level.WARNING,
            "auto.create.topics.enable=false",
        ),
    ],
)
def test_each_rule_turns_alone(facts: TopicFacts, rule: str, level: Level, remedy: str) -> None:
    found = {finding.rule: finding for finding in check_topic(facts)}
    assert found[rule].level is level
    assert remedy in found[rule].remedy
    alone = {name for name, finding in found.items() if finding.level is not Level.OK}
    assert alone - ({"replication", "min.insync.replicas"} if facts.factor < 3 else set()) <= {rule}


@pytest.mark.parametrize("changes", [{"oldest_unread": timedelta(hours=12)}, {"oldest_unread": None}])
def test_retention_of_twice_the_backlog_is_enough(changes: dict[str, Any]) -> None:
    assert {finding.level for finding in check_topic(replace(SAFE, **changes))} == {Level.OK}
    for ever in ("-1", str(2**63 - 1)):
        stored = with_setting(replace(SAFE, oldest_unread=timedelta(days=900)), retention_ms=ever)
        assert {finding.level for finding in check_topic(stored)} == {Level.OK}


def test_an_age_that_could_not_be_read_is_not_reported_as_nothing_unread() -> None:
    """The read of the one unread record had failed, and the page said that nothing was unread."""
    [reported] = [one for one in check_topic(replace(SAFE, age_known=False)) if one.rule == "retention"]
    assert reported.value == "1 day, 0:00:00, the age of the oldest unread record could not be read"
    for hours, level in ((1, Level.UNKNOWN), (13, Level.WARNING), (24, Level.ERROR)):
        some = replace(SAFE, oldest_unread=timedelta(hours=hours), age_known=False)
        assert {one.level for one in check_topic(some) if one.rule == "retention"} == {level}
    assert {one.level for one in check_topic(with_setting(replace(SAFE, age_known=False), retention_ms="-1"))} == {
        Level.OK
    }


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, "1 of 3 brokers may fail with writes going on, 2 with reads; beyond"),
        (
            {"in_sync": {0: 3, 1: 2}},
            "now 0 more of 3 brokers may fail with writes going on, 1 more with reads; once all replicas are in sync",
        ),
        (
            {"in_sync": {0: 1, 1: 3}},
            "now writes with acks=all wait, 0 more of 3 brokers may fail with reads going on; once all replicas are in",
        ),
        (
            {"in_sync": {0: 3, 1: 1}, "leaderless": frozenset({1})},
            "now some partitions can be neither written to nor read; once all replicas are in sync",
        ),
        # A broker asks for no more replicas than the partition has.
        ({"replicas": {0: 1, 1: 3}, "in_sync": {0: 1, 1: 3}}, "0 of 3 brokers may fail with writes going on, 0 with"),
    ],
    ids=["all in sync", "one behind", "too few for writes", "no leader", "one replica"],
)
def test_how_many_brokers_may_fail_is_reported_the_replicas_in_sync_now(changes: dict[str, Any], reported: str) -> None:
    """One of three was in sync and min.insync.replicas 2: writes hung, and one broker was said to be spare."""
    assert describe_endurance(replace(SAFE, **changes)).startswith(reported)


def test_a_broker_that_is_unavailable_is_one_of_the_cluster_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of three down the page reported that two of two might fail with reads going on."""
    nodes = [SimpleNamespace(id=number) for number in (1, 2, 3)]
    partition = SimpleNamespace(id=0, replicas=nodes, isr=nodes[:2], leader=nodes[0])
    kafka: Any = SimpleNamespace(
        bootstrap="broker:9092", read_description=lambda _: SimpleNamespace(partitions=[partition])
    )
    monkeypatch.setattr(topic_facts, "_list_brokers", lambda _: [1, 2])
    monkeypatch.setattr(topic_facts, "_fetch_settings", lambda *_: SAFE.settings)
    facts = topic_facts.fetch_topic_facts(kafka, "orders")
    assert (facts.brokers, facts.broker_ids) == (3, [1, 2])
    assert describe_endurance(facts).startswith(
        "now 0 more of 3 brokers may fail with writes going on, 1 more with reads; once"
    )


def test_two_replicas_need_a_third_before_two_in_sync_leave_one_to_spare() -> None:
    """The remedy for two in sync of two was to set two in sync, which changed nothing."""
    two = replace(SAFE, replicas={0: 2, 1: 2}, in_sync={0: 2, 1: 2}, assignment={0: [1, 2], 1: [2, 3]})
    for facts, parts in (
        (two, ["kafka-reassign-partitions"]),
        (with_setting(two, min_insync_replicas="1"), ["kafka-reassign-partitions", "min.insync.replicas=2"]),
        (with_setting(SAFE, min_insync_replicas="3"), ["min.insync.replicas=2"]),
        (replace(two, brokers=2), ["use three brokers or more"]),
        (replace(two, broker_ids=[1, 2]), ["start the brokers that are unavailable"]),
    ):
        remedy = {one.rule: one.remedy for one in check_topic(facts)}["min.insync.replicas"]
        assert ("--verify" in remedy) == (parts == ["kafka-reassign-partitions", "min.insync.replicas=2"])
        assert [
            part
            for part in (
                "kafka-reassign-partitions",
                "min.insync.replicas=2",
                "use three brokers or more",
                "start the brokers that are unavailable",
            )
            if part in remedy
        ] == parts


def test_published_topics_are_checked_for_rules_without_drift() -> None:
    unclean = with_setting(replace(SAFE, leaderless=frozenset({0})), unclean_leader_election_enable="true")
    assert {one.rule: one.level for one in check_published_topic(unclean)} == {
        "unclean election": Level.ERROR,
        "replicas in sync": Level.ERROR,
    }


def test_too_little_room_in_the_dlq_is_a_warning_and_no_error() -> None:
    """What does not fit is parked, by reference in the end: only the doctor reported it."""
    main = with_setting(SAFE, max_message_bytes="1000000")
    needed = 1_000_000 + 16 * 1024
    tier = replace(SAFE, topic="orders.dlq.1")
    enough, little = (with_setting(tier, max_message_bytes=str(needed - less)) for less in (0, 1))
    assert check_max_message_bytes(enough, main).level is Level.OK
    found = check_max_message_bytes(little, main)
    assert (found.level, found.value.split(",")[0]) == (Level.WARNING, "1")
    assert found.remedy.endswith(f"--entity-name orders.dlq.1 --add-config max.message.bytes={needed}")
    assert (check_max_message_bytes(tier, main).level, check_max_message_bytes(enough, SAFE).level) == (
        Level.UNKNOWN,
        Level.UNKNOWN,
    )


def test_the_audit_judges_the_room_of_the_dlq_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little of the topic of accepted events is drift, which its publication shows."""
    small = with_setting(SAFE, max_message_bytes="20000")
    monkeypatch.setattr(topic_audit, "fetch_topic_facts", lambda _, topic: replace(small, topic=topic))
    stream = replace(make_stream("orders"), publishes=Accepted("orders.accepted"))
    kafka: Any = None
    for main, reported in ((small, {*stream.dlq_topics}), (None, set())):
        found, errors = topic_audit.check_published_topics(kafka, stream, main=main)
        warned = {topic for topic, all_ in found.items() for one in all_ if one.level is Level.WARNING}
        assert (warned, errors) == (reported, [])


def test_forbidden_reads_are_reported_as_forbidden() -> None:
    hidden = replace(SAFE, settings=None, broker_settings=None)
    unknown = {finding.rule for finding in check_topic(hidden) if finding.level is Level.UNKNOWN}
    commands = {finding.remedy for finding in check_topic(hidden) if finding.value == "not readable"}
    allow = "kafka-acls --bootstrap-server broker:9092 --add --allow-principal User:NAME --operation DescribeConfigs "
    assert commands == {f"{allow}{what}, with this user's name" for what in ("--topic orders", "--cluster")}
    assert unknown == {finding.rule for finding in check_topic(SAFE)} - {"replication", "replicas in sync"}
    assert "is unknown" in describe_endurance(hidden)


def test_the_command_of_a_reassignment_gives_each_partition_what_it_lacks() -> None:
    facts = replace(SAFE, brokers=4, replicas={0: 3, 1: 1, 2: 2}, assignment={0: [1, 2, 3], 1: [4], 2: [3, 1]})
    command = check_topic(facts)[0].remedy
    plan = json.loads(command.split("'")[1])
    assert command.endswith(
        "> reassign.json && kafka-reassign-partitions --bootstrap-server broker:9092 "
        "--reassignment-json-file reassign.json --execute"
    )
    assert plan == {
        "version": 1,
        "partitions": [
            {"topic": "orders", "partition": 1, "replicas": [4, 2, 3]},
            {"topic": "orders", "partition": 2, "replicas": [3, 1, 4]},
        ],
    }


def test_the_settings_of_all_brokers_count() -> None:
    """A topic is created by whichever broker is asked for it."""
    off = {**OF_BROKER, "replica.lag.time.max.ms": Setting("10000", "DEFAULT_CONFIG")}
    on = {**OF_BROKER, "auto.create.topics.enable": Setting("true", "DEFAULT_CONFIG")}
    for brokers in ({1: off, 2: on, 3: off}, {1: on, 2: off}):
        shown = {one.rule: one for one in check_topic(replace(SAFE, broker_settings=merge_broker_settings(brokers)))}
        assert shown["auto-creation"].level is Level.WARNING
        assert shown["replica lag"].value.startswith("30,000 ms")
    assert (
        merge_broker_settings({1: off, 2: on, 3: off})["auto.create.topics.enable"].source
        == "DEFAULT_CONFIG of broker 2"
    )
    assert merge_broker_settings({1: off, 2: None}) is None
    assert merge_broker_settings({}) is None


def test_times_of_brokers_are_shown() -> None:
    shown = {finding.rule: finding for finding in check_topic(SAFE)}
    assert shown["replica lag"].value.startswith("30,000 ms")
    assert shown["broker session"].value.startswith("9,000 ms")
    with_zookeeper = replace(SAFE, broker_settings={"zookeeper.session.timeout.ms": Setting("18000", "DEFAULT_CONFIG")})
    shown = {finding.rule: finding for finding in check_topic(with_zookeeper)}
    assert shown["broker session"].value.startswith("18,000 ms")
    assert shown["replica lag"].level is Level.UNKNOWN


class FakePartlyLedTopic:
    """A topic of one broker with a partition without a leader: the client writes -1 for unknown."""

    bootstrap = "broker:9092"

    def read_description(self, _: str) -> Any:
        node = {n: SimpleNamespace(id=n) for n in (-1, 1)}
        leaders = {0: node[-1], 1: node[1], 2: None}
        parts = [
            SimpleNamespace(id=p, leader=leader, replicas=[node[1], node[-1]], isr=[node[1]])
            for p, leader in leaders.items()
        ]
        return SimpleNamespace(partitions=parts)

    def get_admin(self) -> Any:
        return self

    def list_topics(self, **_: object) -> Any:
        return SimpleNamespace(brokers={1: None})

    def describe_configs(self, asked: list[Any], **_: object) -> dict[Any, Any]:
        given = {"retention.ms": "60000", "retention.bytes": None}
        entries = {name: SimpleNamespace(value=value, source=5, is_sensitive=False) for name, value in given.items()}
        return {asked[0]: SimpleNamespace(result=lambda _: entries)}


def test_unknown_values_of_the_client_are_no_facts() -> None:
    """Broker -1 led a partition and was counted as a broker, and the text "None" was the value of a setting."""
    facts = topic_facts.fetch_topic_facts(cast("Any", FakePartlyLedTopic()), "orders")
    assert (facts.leaderless, facts.brokers) == (frozenset({0, 2}), 1)
    assert {name: one.value for name, one in (facts.settings or {}).items()} == {"retention.ms": "60000"}
