"""What weaker settings lose: the losing rows of docs/producers.md, reproduced against real brokers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from tests.conftest import create_topic
from tests.support import read_topic

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

pytestmark = [pytest.mark.slow, pytest.mark.crash]

TOPIC = "weak"
RECORDS = 50
# A follower's fetch waits 0.5 s for records (replica.fetch.wait.max.ms). What comes while the fetch of a follower that
# hangs still waits is in that follower's socket, and it reads it when it goes on.
FETCH_SECONDS = 1.5


def reported_delivered(bootstrap: str, acks: str, *, seconds: float) -> int:
    """Send by a bare client; returns how many records it reports as delivered."""
    from confluent_kafka import Producer

    delivered = 0

    def report(error: object, message: object) -> None:
        nonlocal delivered
        del message
        delivered += error is None

    producer = Producer({"bootstrap.servers": bootstrap, "acks": acks, "linger.ms": 0, "log_level": 0})
    producer.list_topics(TOPIC, timeout=10)  # so that it knows the leader and is connected to it
    producer.produce(TOPIC, b"first", partition=0)
    assert producer.flush(10) == 0
    wait_until(lambda: len(read_topic(bootstrap, TOPIC)) == 1, 30, "the first record")
    stopped.kill(signal.SIGSTOP)
    time.sleep(FETCH_SECONDS)
    for number in range(RECORDS):
        producer.produce(TOPIC, b"%d" % number, partition=0, on_delivery=report)
    producer.flush(seconds)
    return delivered


class Stopped:
    """The broker that is stopped between the first record and the others, with all its processes."""

    pid: int | None = None

    def kill(self, sign: signal.Signals) -> None:
        assert self.pid is not None
        os.killpg(self.pid, sign)


stopped = Stopped()


def test_acks_0_report_as_delivered_what_nobody_read(tmp_path: Path) -> None:
    """A broker that hangs and dies has read nothing of what was handed to the network."""
    with EmbeddedBroker(tmp_path) as broker:
        create_topic(broker.bootstrap, TOPIC, 1, {})
        stopped.pid = broker.pid
        delivered = reported_delivered(broker.bootstrap, "0", seconds=5)
        broker.kill()
        broker.start()
        assert delivered == RECORDS
        assert [value for _, value in read_topic(broker.bootstrap, TOPIC).values()] == [b"first"]


def test_acks_1_lose_what_no_follower_had_when_the_leader_dies(tmp_path: Path) -> None:
    """A clean election: the follower hangs for a moment, is still in sync by the rules, and takes over."""
    with EmbeddedCluster(tmp_path) as cluster:
        leader, follower, _ = cluster.brokers
        make_topic(cluster.bootstrap, [leader.node.id, follower.node.id])
        stopped.pid = follower.pid
        delivered = reported_delivered(cluster.bootstrap, "1", seconds=2)
        leader.kill()
        stopped.kill(signal.SIGCONT)
        wait_until(lambda: leads(cluster.bootstrap) == follower.node.id, 60, "the election")
        assert delivered == RECORDS
        assert [value for _, value in read_topic(cluster.bootstrap, TOPIC).values()] == [b"first"]


def make_topic(bootstrap: str, replicas: list[int]) -> None:
    from confluent_kafka.admin import NewTopic

    client = admin(bootstrap)
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "false"}
    topic = NewTopic(TOPIC, num_partitions=1, replica_assignment=[replicas], config=config)
    client.create_topics([topic])[TOPIC].result(30)
    wait_until(lambda: leads(bootstrap) == replicas[0], 30, "the leader")
    time.sleep(1)


def leads(bootstrap: str) -> int:
    from confluent_kafka import KafkaException

    try:
        return int(admin(bootstrap).list_topics(TOPIC, timeout=5).topics[TOPIC].partitions[0].leader)
    except (KafkaException, KeyError):
        return -1


def admin(bootstrap: str) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
