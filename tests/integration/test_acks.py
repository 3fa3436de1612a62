"""What weaker settings lose: the losing rows of docs/producers.md, reproduced on a cluster of real brokers. And what
the audit says of such a cluster while brokers are unavailable.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pytest

from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from highwater.resources.kafka import Kafka
from highwater.resources.topic_facts import fetch_topic_facts
from highwater.topic_rules import Level, check_topic, describe_endurance
from tests.helpers.support import read_topic

if TYPE_CHECKING:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, PartitionMetadata

pytestmark = [pytest.mark.slow, pytest.mark.crash]

REPLICAS = 3
RECORDS = 50
# A follower's fetch waits 0.5 s for records (replica.fetch.wait.max.ms). What comes while the fetch of a follower that
# hangs still waits is in that follower's socket, and it reads it when it goes on.
FETCH_SECONDS = 1.5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Three brokers, and a fourth that is the only controller: it elects leaders with two of them down."""
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("acks"), REPLICAS + 1)
    controller = cluster.brokers[-1]
    for broker in cluster.brokers:
        broker.properties["controller.quorum.voters"] = controller.node.voter
        if broker is not controller:
            broker.properties["process.roles"] = "broker"
            broker.properties["listeners"] = f"PLAINTEXT://{broker.bootstrap}"
    with cluster:
        yield cluster


@pytest.fixture
def cluster(shared: EmbeddedCluster) -> EmbeddedCluster:
    """With all of its brokers, whatever the test before did to them."""
    for broker in shared.brokers:
        if not broker.alive:
            broker.start()
    return shared


def begin(cluster: EmbeddedCluster, topic: str, acks: str) -> Producer:
    """A bare client that is connected to the topic's leader; its first record is with all replicas in sync."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": acks, "linger.ms": 0, "log_level": 0})
    producer.list_topics(topic, timeout=60)  # so that it knows the leader
    producer.produce(topic, b"first", partition=0)
    assert producer.flush(30) == 0
    wait_until(lambda: values(cluster, topic) == [b"first"], 30, "the first record")
    return producer


def reported_delivered(producer: Producer, topic: str, *, seconds: float) -> int:
    """Send more; returns how many records the client reports as delivered within a given number of seconds."""
    delivered = 0

    def report(error: object, message: object) -> None:
        nonlocal delivered
        del message
        delivered += error is None

    for number in range(RECORDS):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=report)
    producer.flush(seconds)
    return delivered


def values(cluster: EmbeddedCluster, topic: str) -> list[bytes | None]:
    return [value for _, (_, value) in sorted(read_topic(cluster.bootstrap, topic).items())]


def found_after(cluster: EmbeddedCluster, topic: str) -> list[bytes | None]:
    """What the new leader has: at first it may not know yet how far all replicas are, and shows nothing at all."""
    wait_until(lambda: bool(values(cluster, topic)), 60, "what all replicas had")
    return values(cluster, topic)


def send_signal(broker: EmbeddedBroker, sign: signal.Signals) -> None:
    """To the broker with all of its processes."""
    assert broker.pid is not None
    os.killpg(broker.pid, sign)


def test_acks_0_report_as_delivered_what_nobody_read(cluster: EmbeddedCluster) -> None:
    """A leader that hangs and dies has read nothing of what was handed to the network; the others are in sync."""
    leader, *others = cluster.brokers[:REPLICAS]
    make_topic(cluster, "none", [leader, *others], in_sync=2)
    producer = begin(cluster, "none", "0")
    send_signal(leader, signal.SIGSTOP)
    delivered = reported_delivered(producer, "none", seconds=5)
    leader.kill()
    wait_until(lambda: leads(cluster, "none") in {one.node.id for one in others}, 60, "the election")
    assert delivered == RECORDS
    assert found_after(cluster, "none") == [b"first"]


def test_acks_1_lose_what_no_follower_had_when_the_leader_dies(cluster: EmbeddedCluster) -> None:
    """A clean election: the follower hangs for a moment, is still in sync by the rules, and takes over."""
    leader, follower, _ = cluster.brokers[:REPLICAS]
    make_topic(cluster, "one", [leader, follower])
    producer = begin(cluster, "one", "1")
    send_signal(follower, signal.SIGSTOP)
    time.sleep(FETCH_SECONDS)
    delivered = reported_delivered(producer, "one", seconds=30)
    leader.kill()
    send_signal(follower, signal.SIGCONT)
    wait_until(lambda: leads(cluster, "one") == follower.node.id, 60, "the election")
    assert delivered == RECORDS
    assert found_after(cluster, "one") == [b"first"]


@pytest.mark.long
def test_an_unclean_election_loses_what_all_that_were_in_sync_had(cluster: EmbeddedCluster) -> None:
    """Two of three have the records when they die, and the third one, which was unavailable, takes over without them.

    So it is with acks=all as with acks=1; with unclean elections off nobody takes over.
    """
    *in_sync, unavailable = cluster.brokers[:REPLICAS]
    acks = {"unclean.all": "all", "unclean.one": "1", "clean.all": "all"}
    for topic in acks:
        make_topic(cluster, topic, [*in_sync, unavailable], in_sync=2, unclean=topic.startswith("unclean"))
    producers = {topic: begin(cluster, topic, wanted) for topic, wanted in acks.items()}
    unavailable.kill()
    wait_until(lambda: all(len(described(cluster, topic).isrs) == 2 for topic in acks), 60, "its leaving")
    delivered = {topic: reported_delivered(producer, topic, seconds=30) for topic, producer in producers.items()}
    assert delivered == dict.fromkeys(acks, RECORDS)
    for broker in in_sync:
        broker.kill()
    unavailable.start()
    wait_until(lambda: leads(cluster, "unclean.all") == unavailable.node.id, 60, "the unclean election")
    wait_until(lambda: leads(cluster, "unclean.one") == unavailable.node.id, 60, "the other one")
    assert leads(cluster, "clean.all") == -1
    # With fewer in sync than min.insync.replicas a leader shows readers nothing new (KIP-966). A replica that comes
    # back throws away what the new leader lacks.
    in_sync[0].start()
    wait_until(lambda: values(cluster, "unclean.all") == [b"first"], 60, "the first record, and none of the others")
    wait_until(lambda: values(cluster, "unclean.one") == [b"first"], 60, "the same of the other topic")


@pytest.mark.long
def test_the_audit_counts_the_replicas_that_are_in_sync_now(cluster: EmbeddedCluster) -> None:
    """The fourth broker holds none, and counts all the same."""
    first, second, third = cluster.brokers[:REPLICAS]
    make_topic(cluster, "audited", [first, second, third], in_sync=2)
    whole = "1 of 4 brokers may fail with writes going on, 2 with reads"
    reported = judged(cluster, "audited")
    assert (reported[0], reported[1].startswith(whole)) == (Level.OK, True)
    for broker, level, now in (
        (third, Level.WARNING, "now 0 more of 4 brokers may fail with writes going on, 1 more with reads"),
        (second, Level.ERROR, "now writes with acks=all wait, 0 more of 4 brokers may fail with reads going on"),
    ):
        broker.kill()
        wait_until(partial(has_left, cluster, "audited", broker), 60, "its leaving")
        reported = judged(cluster, "audited")
        assert (reported[0], reported[1].startswith(f"{now}; once all replicas are in sync {whole}")) == (
            level,
            True,
        ), reported


def has_left(cluster: EmbeddedCluster, topic: str, broker: EmbeddedBroker) -> bool:
    """Whether a replica is no longer in sync."""
    return broker.node.id not in described(cluster, topic).isrs


def judged(cluster: EmbeddedCluster, topic: str) -> tuple[Level, str]:
    """What the audit says of the replicas in sync, and of how many brokers may fail."""
    facts = fetch_topic_facts(Kafka(cluster.bootstrap), topic)
    [in_sync] = [finding for finding in check_topic(facts) if finding.rule == "replicas in sync"]
    return in_sync.level, describe_endurance(facts)


def make_topic(
    cluster: EmbeddedCluster, name: str, replicas: Sequence[EmbeddedBroker], *, in_sync: int = 1, unclean: bool = False
) -> None:
    """A topic of one partition, led by the first of its replicas; all of them are in sync."""
    from confluent_kafka.admin import NewTopic

    ids = [broker.node.id for broker in replicas]
    config = {"min.insync.replicas": str(in_sync), "unclean.leader.election.enable": str(unclean).lower()}
    topic = NewTopic(name, num_partitions=1, replica_assignment=[ids], config=config)
    client = admin(cluster)
    client.create_topics([topic])[name].result(30)
    wait_until(lambda: leads(cluster, name) == ids[0], 30, "the leader")
    wait_until(lambda: sorted(described(cluster, name).isrs) == sorted(ids), 30, "its replicas")
    time.sleep(1)


def leads(cluster: EmbeddedCluster, topic: str) -> int:
    """The broker that leads the topic; -1 if none does, or nobody said so."""
    from confluent_kafka import KafkaException

    try:
        return int(described(cluster, topic).leader)
    except (KafkaException, KeyError):
        return -1


def described(cluster: EmbeddedCluster, topic: str) -> PartitionMetadata:
    return admin(cluster).list_topics(topic, timeout=60).topics[topic].partitions[0]


def admin(cluster: EmbeddedCluster) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
