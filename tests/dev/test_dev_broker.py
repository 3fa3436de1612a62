from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.broker import EmbeddedBroker, Node, _new_cluster_id, properties
from dev.processes import LOOPBACK, ChildFailedError, wait_until
from tests.conftest import create_topic
from tests.helpers.support import Message, read_topic, send

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


def admin(bootstrap: str) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap})


def test_every_listener_is_on_loopback(tmp_path: Path) -> None:
    found = properties(Node(1, 20001, 20002), [Node(1, 20001, 20002)], tmp_path, auto_create_topics=False)
    assert found["listeners"] == f"PLAINTEXT://{LOOPBACK}:20001,CONTROLLER://{LOOPBACK}:20002"
    assert found["auto.create.topics.enable"] == "false"


@pytest.mark.parametrize(("size", "replicas", "in_sync"), [(1, "1", "1"), (2, "2", "1"), (3, "3", "2"), (5, "3", "2")])
def test_topics_fit_the_cluster(tmp_path: Path, size: int, replicas: str, in_sync: str) -> None:
    nodes = [Node(n, 20000 + 2 * n, 20001 + 2 * n) for n in range(1, size + 1)]
    found = properties(nodes[0], nodes, tmp_path, auto_create_topics=False)
    assert found["transaction.state.log.replication.factor"] == replicas
    assert found["transaction.state.log.min.isr"] == in_sync
    assert found["min.insync.replicas"] == in_sync
    assert found["default.replication.factor"] == replicas
    assert found["controller.quorum.voters"].count("@") == size


def test_an_id_of_a_cluster_is_never_taken_for_an_option() -> None:
    """One broker in 64 did not start: the storage tool took its ID for an option."""
    assert not any(_new_cluster_id().startswith("-") for _ in range(2000))


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_broker_serves_the_same_records_on_the_same_port(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        address = broker.bootstrap
        create_topic(address, "kept", 1, {})
        send(address, "kept", [Message(b"k", b"before")])
        broker.kill()
        assert not broker.alive
        broker.start()
        assert broker.bootstrap == address
        send(address, "kept", [Message(b"k", b"after")])
        assert [value for _, value in read_topic(address, "kept").values()] == [b"before", b"after"]
    assert not broker.alive


@pytest.mark.long
@pytest.mark.slow
def test_a_broker_that_ended_goes_on_with_its_data_under_another_port(tmp_path: Path) -> None:
    """`make up` the next day: the home is the same, the ports need not be."""
    with EmbeddedBroker(tmp_path) as first:
        create_topic(first.bootstrap, "kept", 1, {})
        send(first.bootstrap, "kept", [Message(b"k", b"v")])
    with EmbeddedBroker(tmp_path) as second:
        assert second.bootstrap != first.bootstrap
        assert [value for _, value in read_topic(second.bootstrap, "kept").values()] == [b"v"]


@pytest.mark.slow
def test_asking_for_a_topic_creates_none_unless_asked(tmp_path: Path, bootstrap: str) -> None:
    from confluent_kafka import Producer

    admin(bootstrap).list_topics("never-made", timeout=60)
    assert "never-made" not in admin(bootstrap).list_topics(timeout=60).topics
    with EmbeddedBroker(tmp_path, auto_create_topics=True) as creating:
        producer = Producer({"bootstrap.servers": creating.bootstrap})
        producer.produce("made-by-asking", b"v")
        assert producer.flush(30) == 0
        assert "made-by-asking" in admin(creating.bootstrap).list_topics(timeout=60).topics


@pytest.mark.slow
def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    wrong = EmbeddedBroker(tmp_path, extra={"offsets.topic.num.partitions": "none"})
    with pytest.raises(ChildFailedError, match=r"offsets\.topic\.num\.partitions"), wrong:
        pass
    assert not wrong.alive


@pytest.mark.slow
@pytest.mark.crash
def test_the_command_starts_a_cluster_of_three_that_goes_on_without_one(tmp_path: Path) -> None:
    """A topic that says nothing of replicas has three; the leader that is killed is started again, and catches up."""
    command = [sys.executable, "-m", "dev.cluster", "--home", str(tmp_path / "cluster")]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(program.stdout.readline, "")
        bootstrap = next(lines).strip().removeprefix("HIGHWATER_KAFKA_BOOTSTRAP=")
        reported = (re.match(r"broker (\d+): process group (\d+)", next(lines)) for _ in range(3))
        groups = {int(found[1]): int(found[2]) for found in reported if found}
        assert len(groups) == 3
        create_topic(bootstrap, "replicated", 1, {}, replicas=-1)
        partition = admin(bootstrap).list_topics("replicated", timeout=60).topics["replicated"].partitions[0]
        assert len(partition.replicas) == 3
        os.killpg(groups[partition.leader], signal.SIGKILL)
        send(bootstrap, "replicated", [Message(b"k", b"v")])

        def in_sync() -> int:
            topics = admin(bootstrap).list_topics("replicated", timeout=60).topics
            return len(topics["replicated"].partitions[0].isrs)

        wait_until(lambda: in_sync() == 3, 120, "the broker that was killed to catch up")
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.stdout.close()
