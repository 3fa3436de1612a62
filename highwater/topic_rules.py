"""Rules for a topic so that no acknowledged record is lost: a table of pure functions."""

# The rules follow Kafka's documentation of topic and broker settings (replication factor, `min.insync.replicas`,
# `unclean.leader.election.enable`, `retention.ms`, `cleanup.policy`, `auto.create.topics.enable`).

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

from highwater.envelope import MAX_BYTES
from highwater.wording import format_duration

SAFE_REPLICAS = 3
SAFE_IN_SYNC = 2
# A backlog that is half as old as retention allows leaves its owner as long again to act.
RETENTION_PER_AGE = 2
FOR_EVER = -1
# A thousand years: some write the greatest number there is where -1 is meant.
LONGEST_MS = 1_000 * 365 * 24 * 3_600_000


# Settings where the longest time of all brokers counts.
_TIMES = frozenset({"replica.lag.time.max.ms", "broker.session.timeout.ms", "zookeeper.session.timeout.ms"})
AUTO_CREATION = "auto.create.topics.enable"


class Level(Enum):
    """The weight of a finding."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Setting:
    """A value of a topic or a broker, and where it is set (`DYNAMIC_TOPIC_CONFIG`, `DEFAULT_CONFIG`, ...)."""

    value: str
    source: str


@dataclass(frozen=True)
class TopicFacts:
    """The facts of a topic in a cluster.

    Args:
        topic: its name.
        bootstrap: for the commands of the remedies.
        brokers: how many the cluster has, as far as it shows: those that run, and those that hold the topic's replicas.
        replicas: for each partition the number of its replicas.
        in_sync: for each partition the number of those in sync.
        leaderless: partitions without a leader.
        settings: the topic's settings; None where the cluster forbids reading them.
        broker_settings: settings of all brokers, merged (`merge_broker_settings`); None likewise.
        oldest_unread: age of the oldest record that is not in raw; None where none that could be looked at is unread.
        age_known: whether no unread record can be older: all could be looked at.
        assignment: for each partition the brokers that hold it, the preferred leader first.
        broker_ids: the brokers that run.
    """

    topic: str
    bootstrap: str
    brokers: int
    replicas: Mapping[int, int]
    in_sync: Mapping[int, int]
    leaderless: frozenset[int]
    settings: Mapping[str, Setting] | None
    broker_settings: Mapping[str, Setting] | None
    oldest_unread: timedelta | None = None
    age_known: bool = True
    assignment: Mapping[int, Sequence[int]] = field(default_factory=dict)
    broker_ids: Sequence[int] = ()

    @property
    def factor(self) -> int:
        """Replicas of the partition that has the fewest."""
        return min(self.replicas.values(), default=0)

    @property
    def least_in_sync(self) -> int | None:
        """`min.insync.replicas`; None where it cannot be read."""
        found = (self.settings or {}).get("min.insync.replicas")
        return None if found is None else int(found.value)

    @property
    def led(self) -> Mapping[int, int]:
        """For each partition the number of replicas in sync; 0 without a leader, since nobody can use them."""
        return {p: 0 if p in self.leaderless else count for p, count in self.in_sync.items()}

    def count_spare(self, in_sync: Mapping[int, int], least: int) -> Mapping[int, int]:
        """For each partition how many of these replicas may go with writes going on; below 0 they wait already.

        Brokers ask for no more than a partition's replicas, whatever `min.insync.replicas` says (`effectiveMinIsr`).
        """
        return {p: count - min(least, self.replicas[p]) for p, count in in_sync.items()}


@dataclass(frozen=True)
class Finding:
    """The finding of one rule for a topic.

    Args:
        rule: its name.
        level: how much it matters.
        value: the found value.
        where: where that is set, empty where it is no setting.
        remedy: the command that fixes the fault, empty where nothing needs a fix.
    """

    rule: str
    level: Level
    value: str
    where: str = ""
    remedy: str = ""


def check_topic(facts: TopicFacts) -> list[Finding]:
    """Check a topic against every rule, in the order of the table in docs/audit.md."""
    return [rule(facts) for rule in RULES]


def check_published_topic(facts: TopicFacts) -> list[Finding]:
    """Check a topic that is published to against the rules that its likeness to the main topic does not cover.

    It must have no fewer replicas than that one, nor fewer in sync (`highwater.resources.dlq_topics`).
    """
    return [rule(facts) for rule in OF_PUBLISHED]


def check_max_message_bytes(facts: TopicFacts, main: TopicFacts) -> Finding:
    """Whether a topic of the DLQ takes whatever the main topic holds, with its envelope.

    No error: what it does not take holds nobody up (ADR 6).
    """
    rule = "max.message.bytes"
    found, largest = _find_setting(facts, rule), _find_setting(main, rule)
    if found is None or largest is None:
        return _build_unreadable_finding(facts if found is None else main, rule)
    needed = int(largest.value) + MAX_BYTES
    if int(found.value) >= needed:
        return Finding(rule, Level.OK, found.value, found.source)
    text = f"{int(found.value):,}, less than {needed:,}: larger records are parked, at last by reference"
    return Finding(rule, Level.WARNING, text, found.source, _configure(facts, f"{rule}={needed}"))


def describe_endurance(facts: TopicFacts) -> str:
    """The number of brokers that may fail now, that once all replicas are in sync, and the effects beyond it."""
    least = facts.least_in_sync
    if least is None:
        return "how many brokers may fail is unknown: min.insync.replicas is not readable"
    now, whole = (_count_spare_brokers(facts, replicas, least) for replicas in (facts.led, facts.replicas))
    effect = _may_fail(facts, *whole)
    if now != whole:
        effect = f"now {_may_fail(facts, *now, ' more')}; once all replicas are in sync {effect}"
    return (
        f"{effect}; beyond that producers with acks=all wait, and what only the lost brokers held cannot be read until "
        "one of them is back"
    )


def _count_spare_brokers(facts: TopicFacts, in_sync: Mapping[int, int], least: int) -> tuple[int, int]:
    """The number of brokers that may fail, whichever they are, while writes and reads go on, with these in sync."""
    return min(facts.count_spare(in_sync, least).values(), default=0), min(in_sync.values(), default=1) - 1


def _may_fail(facts: TopicFacts, writes: int, reads: int, more: str = "") -> str:
    if reads < 0:
        return "some partitions can be neither written to nor read"
    if writes < 0:
        return f"writes with acks=all wait, {reads}{more} of {facts.brokers} brokers may fail with reads going on"
    return f"{writes}{more} of {facts.brokers} brokers may fail with writes going on, {reads}{more} with reads"


def _configure(facts: TopicFacts, setting: str) -> str:
    return (
        f"kafka-configs --bootstrap-server {facts.bootstrap} --alter --entity-type topics --entity-name {facts.topic} "
        f"--add-config {setting}"
    )


def _find_setting(facts: TopicFacts, name: str) -> Setting | None:
    return (facts.settings or {}).get(name)


def _build_unreadable_finding(facts: TopicFacts, rule: str, resource: str | None = None) -> Finding:
    """The finding for a setting of the topic, or of another resource, that an ACL forbids to read."""
    command = (
        f"kafka-acls --bootstrap-server {facts.bootstrap} --add --allow-principal User:NAME --operation "
        f"DescribeConfigs {resource or f'--topic {facts.topic}'}, with this user's name"
    )
    return Finding(rule, Level.UNKNOWN, "not readable", "", command)


def _check_replication(facts: TopicFacts) -> Finding:
    value = f"replication factor {facts.factor} on {facts.brokers} broker{'' if facts.brokers == 1 else 's'}"
    if facts.factor >= SAFE_REPLICAS:
        return Finding("replication", Level.OK, value)
    if facts.brokers == 1:
        return Finding("replication", Level.WARNING, f"{value}: for development", "", _build_replicas_remedy(facts))
    return Finding("replication", Level.ERROR, value, "", _build_replicas_remedy(facts))


def _build_replicas_remedy(facts: TopicFacts) -> str:
    if facts.brokers < SAFE_REPLICAS:
        return "use three brokers or more"
    return build_reassignment(facts, SAFE_REPLICAS)


def build_reassignment(facts: TopicFacts, replicas: int) -> str:
    """The command that gives each partition with too few replicas further ones, spread over the brokers.

    Args:
        facts: facts about the topic.
        replicas: as many as each shall have.
    """
    if len(facts.broker_ids) < replicas:
        return "start the brokers that are unavailable, then ask again"
    plan = [
        {"topic": facts.topic, "partition": partition, "replicas": _select_replicas(facts, partition, held, replicas)}
        for partition, held in sorted(facts.assignment.items())
        if len(held) < replicas
    ]
    document = json.dumps({"version": 1, "partitions": plan}, separators=(",", ":"))
    return (
        f"echo '{document}' > reassign.json && kafka-reassign-partitions --bootstrap-server {facts.bootstrap} "
        "--reassignment-json-file reassign.json --execute"
    )


def _select_replicas(facts: TopicFacts, partition: int, held: Sequence[int], replicas: int) -> list[int]:
    """The replicas of a partition: those that it has, then brokers from another one on for each partition."""
    turned = [facts.broker_ids[(partition + at) % len(facts.broker_ids)] for at in range(len(facts.broker_ids))]
    return [*held, *[broker for broker in turned if broker not in held]][:replicas]


def _check_in_sync_minimum(facts: TopicFacts) -> Finding:
    rule, found = "min.insync.replicas", _find_setting(facts, "min.insync.replicas")
    if found is None:
        return _build_unreadable_finding(facts, rule)
    least = int(found.value)
    if least >= facts.factor > 1:
        text = f"{least} of {facts.factor}: one unavailable broker stops writes"
        return Finding(rule, Level.ERROR, text, found.source, _find_spare_replica(facts, least))
    # Brokers ask for no more replicas than there are.
    in_force = min(least, facts.factor)
    if in_force >= SAFE_IN_SYNC:
        return Finding(rule, Level.OK, found.value, found.source)
    value_text = found.value if in_force == least else f"{least}, in force {in_force}"
    if facts.brokers == 1:
        return Finding(
            rule, Level.WARNING, f"{value_text}: for development", found.source, _build_replicas_remedy(facts)
        )
    text = f"{value_text}: an acknowledged record may be on one broker alone"
    return Finding(rule, Level.ERROR, text, found.source, _find_spare_replica(facts, least))


def _find_spare_replica(facts: TopicFacts, least: int) -> str:
    """The remedy for too few replicas: a third one before two must be in sync, or the setting would stop writes."""
    steps = [_build_replicas_remedy(facts)] if facts.factor <= SAFE_IN_SYNC else []
    if facts.brokers >= SAFE_REPLICAS and least != SAFE_IN_SYNC:
        steps.append(_configure(facts, f"min.insync.replicas={SAFE_IN_SYNC}"))
    # The first returns before the new replicas have caught up; until then they count, and none of them is in sync.
    return "; and when the same with --verify says that it is complete: ".join(steps)


def _check_unclean_election(facts: TopicFacts) -> Finding:
    rule, found = "unclean election", _find_setting(facts, "unclean.leader.election.enable")
    if found is None:
        return _build_unreadable_finding(facts, rule)
    if found.value == "false":
        return Finding(rule, Level.OK, "off", found.source)
    fix = _configure(facts, "unclean.leader.election.enable=false")
    return Finding(rule, Level.ERROR, "on: acknowledged records may be replaced", found.source, fix)


def merge_broker_settings(brokers: Mapping[int, Mapping[str, Setting] | None]) -> Mapping[str, Setting] | None:
    """The settings of brokers as one: whichever receives a request may create a topic, and the slowest is waited for.

    None where one of them cannot be read, or there is none.
    """
    found: dict[str, Setting] = {}
    for number, settings in sorted(brokers.items()):
        if settings is None:
            return None
        for name, one in settings.items():
            known = found.setdefault(name, one)
            longer = name in _TIMES and int(one.value) > int(known.value)
            if longer or (name == AUTO_CREATION and known.value == "false" and one.value != "false"):
                found[name] = Setting(one.value, f"{one.source} of broker {number}")
    return found or None


def find_retention(settings: Mapping[str, Setting] | None) -> timedelta | None:
    """The time for which a topic with these settings keeps records; None for ever, or where that cannot be read."""
    found = (settings or {}).get("retention.ms")
    if found is None or not 0 <= int(found.value) <= LONGEST_MS:
        return None
    return timedelta(milliseconds=int(found.value))


def has_no_age_limit(settings: Mapping[str, Setting] | None) -> bool:
    """Whether a topic with these settings is known to take no record for its age; its size may be limited."""
    return "retention.ms" in (settings or {}) and find_retention(settings) is None


def find_size_limit(settings: Mapping[str, Setting] | None) -> int | None:
    """Beyond how many bytes a partition the oldest records are taken; None without a limit, or if it is not known."""
    found = (settings or {}).get("retention.bytes")
    return None if found is None or int(found.value) == FOR_EVER else int(found.value)


def _check_retention(facts: TopicFacts) -> Finding:
    rule, found = "retention", _find_setting(facts, "retention.ms")
    if found is None:
        return _build_unreadable_finding(facts, rule)
    retained_for, age = find_retention(facts.settings), facts.oldest_unread or timedelta(0)
    if retained_for is None:
        return Finding(rule, Level.OK, "for ever", found.source)
    value = (
        f"{retained_for}, oldest unread record {format_duration(age)}"
        if facts.oldest_unread
        else f"{retained_for}, nothing unread"
    )
    if retained_for >= RETENTION_PER_AGE * age:
        return (
            Finding(rule, Level.OK, value, found.source)
            if facts.age_known
            else _build_unknown_age_finding(facts, found.source)
        )
    fix = _configure(facts, f"retention.ms={int(4 * age.total_seconds() * 1000)}")
    return Finding(rule, Level.ERROR if retained_for <= age else Level.WARNING, value, found.source, fix)


def _build_unknown_age_finding(facts: TopicFacts, source: str) -> Finding:
    """Nothing unread that is too old was found, and not all was looked at."""
    text = f"{find_retention(facts.settings)}, the age of the oldest unread record could not be read"
    remedy = (
        "check that each partition has a leader and that the lake can be read, and allow this user Read on the topic; "
        "of many partitions that lag some may hold markers of transactions alone"
    )
    return Finding("retention", Level.UNKNOWN, text, source, remedy)


def _check_size_limit(facts: TopicFacts) -> Finding:
    rule, found = "retention by size", _find_setting(facts, "retention.bytes")
    if found is None:
        return _build_unreadable_finding(facts, rule)
    if int(found.value) == FOR_EVER:
        return Finding(rule, Level.OK, "none", found.source)
    text = f"{int(found.value):,} bytes a partition: a burst may take records before they are read"
    return Finding(rule, Level.WARNING, text, found.source, _configure(facts, "retention.bytes=-1"))


def _check_cleanup(facts: TopicFacts) -> Finding:
    rule, found = "cleanup", _find_setting(facts, "cleanup.policy")
    if found is None:
        return _build_unreadable_finding(facts, rule)
    if "compact" not in found.value:
        return Finding(rule, Level.OK, found.value, found.source)
    text = f"{found.value}: records may be gone before they are read, and gaps cannot be distinguished from markers"
    return Finding(rule, Level.WARNING, text, found.source, _configure(facts, "cleanup.policy=delete"))


def _check_in_sync_now(facts: TopicFacts) -> Finding:
    rule = "replicas in sync"
    if facts.leaderless:
        return Finding(rule, Level.ERROR, f"no leader for {_format_partitions(facts.leaderless)}", "", _START)
    least = facts.least_in_sync
    waits = (
        [p for p, spare in facts.count_spare(facts.in_sync, least).items() if spare < 0] if least is not None else []
    )
    if waits:
        text = f"writes with acks=all wait: fewer than min.insync.replicas={least} for {_format_partitions(waits)}"
        return Finding(rule, Level.ERROR, text, "", _START)
    behind = [p for p, count in facts.in_sync.items() if count < facts.replicas[p]]
    if not behind:
        return Finding(rule, Level.OK, "all")
    return Finding(
        rule,
        Level.WARNING,
        f"too few for {_format_partitions(behind)}",
        "",
        "look for a broker that is unavailable or slow",
    )


_START = "start the brokers that hold them"


def _format_partitions(which: Collection[int]) -> str:
    return f"partitions {', '.join(map(str, sorted(which)))}"


def _check_auto_creation(facts: TopicFacts) -> Finding:
    rule = "auto-creation"
    found = (facts.broker_settings or {}).get(AUTO_CREATION)
    if found is None:
        return _build_unreadable_finding(facts, rule, "--cluster")
    if found.value == "false":
        return Finding(rule, Level.OK, "off", found.source)
    text = "on: a mistyped name becomes a topic"
    return Finding(
        rule,
        Level.WARNING,
        text,
        found.source,
        f"set {AUTO_CREATION}=false in each broker's server.properties, and start it again: no command changes it",
    )


def _check_replica_lag(facts: TopicFacts) -> Finding:
    return _build_time_finding(
        facts, "replica lag", ("replica.lag.time.max.ms",), "until a replica that lags counts as out of sync"
    )


def _check_broker_session(facts: TopicFacts) -> Finding:
    # The second is that of clusters with ZooKeeper.
    names = ("broker.session.timeout.ms", "zookeeper.session.timeout.ms")
    return _build_time_finding(facts, "broker session", names, "until a broker that is silent loses its leaderships")


def _build_time_finding(facts: TopicFacts, rule: str, names: Sequence[str], what: str) -> Finding:
    """A time of the brokers for which no value is wrong: writes and reads may hang for so long."""
    if facts.broker_settings is None:
        return _build_unreadable_finding(facts, rule, "--cluster")
    found = next((facts.broker_settings[name] for name in names if name in facts.broker_settings), None)
    if found is None:
        return Finding(rule, Level.UNKNOWN, f"this broker has no {names[0]}")
    return Finding(rule, Level.OK, f"{int(found.value):,} ms {what}", found.source)


RULES: tuple[Callable[[TopicFacts], Finding], ...] = (
    _check_replication,
    _check_in_sync_minimum,
    _check_unclean_election,
    _check_retention,
    _check_size_limit,
    _check_cleanup,
    _check_in_sync_now,
    _check_auto_creation,
    _check_replica_lag,
    _check_broker_session,
)
OF_PUBLISHED = (_check_unclean_election, _check_in_sync_now)
