"""Transactions whose coordinator dies, is unavailable, or gives them up since they hung: each record is there once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from highwater.errors import DependencyUnavailableError, SupersededAttemptError
from highwater.resources import transactions
from highwater.resources.kafka import Kafka
from highwater.resources.producer_records import Record
from highwater.resources.transactions import PublicationMark, Transactions
from tests.conftest import TopicFactory, create_topic
from tests.helpers.support import read_topic

pytestmark = [pytest.mark.slow, pytest.mark.crash]

NAME = "highwater.pub.orders"
# One partition each: its leader is the coordinator of all.
COORDINATION = {"transaction.state.log.num.partitions": "1", "offsets.topic.num.partitions": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), extra=COORDINATION) as started:
        yield started


@pytest.fixture
def replicated(cluster: EmbeddedCluster, request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    create_topic(cluster.bootstrap, name, 1, {"min.insync.replicas": "2"}, replicas=3)
    return name


def test_another_broker_takes_over_from_a_coordinator_that_dies(
    cluster: EmbeddedCluster, replicated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the commit, and before the mark is read: the transaction goes on, without another attempt of the run."""
    with opened(cluster.bootstrap, replicated) as sender:
        sender.commit(records(replicated, 0, 3), PublicationMark(1, 3))
        with once_sent(monkeypatch, lambda: coordinator(cluster).kill()):
            sender.commit(records(replicated, 3, 6), PublicationMark(1, 6))
    assert keys(cluster.bootstrap, replicated) == [b"%d" % n for n in range(6)]
    cluster.start()
    coordinator(cluster).kill()
    with opened(cluster.bootstrap, replicated) as sender:
        assert sender.mark() == PublicationMark(1, 6)
        sender.commit(records(replicated, 6, 7), PublicationMark(1, 7))
    cluster.start()
    assert keys(cluster.bootstrap, replicated) == [b"%d" % n for n in range(7)]


def test_while_no_coordinator_answers_the_run_fails_and_the_next_one_goes_on(
    cluster: EmbeddedCluster, replicated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent until then is seen by nobody, and sent once afterwards."""
    # The client itself waits so long for an answer; its default is a minute.
    with opened(cluster.bootstrap, replicated, **{"socket.timeout.ms": "5000"}) as sender:
        sender.commit(records(replicated, 0, 3), PublicationMark(1, 3))
        for name in ("CALL_SECONDS", "INIT_SECONDS"):
            monkeypatch.setattr(transactions, name, 2.0)
        with once_sent(monkeypatch, cluster.kill), pytest.raises(DependencyUnavailableError, match=NAME) as caught:
            sender.commit(records(replicated, 3, 6), PublicationMark(1, 6))
        assert caught.value.remedy
    with pytest.raises(DependencyUnavailableError, match=NAME), opened(cluster.bootstrap, replicated):
        pass
    cluster.start()
    monkeypatch.undo()
    with opened(cluster.bootstrap, replicated) as sender:
        # It was never asked to commit, so no broker can have done it.
        assert sender.mark() == PublicationMark(1, 3)
        sender.commit(records(replicated, 3, 6), PublicationMark(2, 6))
    assert keys(cluster.bootstrap, replicated) == [b"%d" % n for n in range(6)]


def test_a_transaction_that_hung_for_too_long_is_abandoned_and_sent_by_the_next_run(
    bootstrap: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker ends it after `transaction.timeout.ms`, so that it holds up no reader; who sent it is fenced."""
    name = topic(partitions=1)
    with opened(bootstrap, name, **{"transaction.timeout.ms": "3000"}) as sender:
        sender.commit(records(name, 0, 3), PublicationMark(1, 3))
        committed = once_sent(monkeypatch, lambda: wait_until(lambda: settled(bootstrap, name) > 4, 60, "the abort"))
        with committed, pytest.raises(SupersededAttemptError) as caught:
            sender.commit(records(name, 3, 6), PublicationMark(1, 6))
        assert "transaction.timeout.ms" in str(caught.value.remedy)
    with opened(bootstrap, name) as sender:
        assert sender.mark() == PublicationMark(1, 3)
        sender.commit(records(name, 3, 6), PublicationMark(2, 6))
    assert keys(bootstrap, name) == [b"%d" % n for n in range(6)]


def test_fencing_during_a_send_is_reported_as_fencing(bootstrap: str, topic: TopicFactory) -> None:
    """The client learns it by itself, and then only says that it broke down; that is no outage of Kafka."""
    name = topic(partitions=1)

    def overtaken() -> Iterator[Record]:
        yield from records(name, 0, 3)
        with opened(bootstrap, name) as later:
            later.commit(records(name, 0, 3), PublicationMark(1, 3))
        for n in range(3, 2400):
            time.sleep(0.05)
            yield from records(name, n, n + 1)
        raise AssertionError("no callback ran within 120 s")

    with opened(bootstrap, name) as sender, pytest.raises(SupersededAttemptError, match="another run publishes"):
        sender.commit(overtaken(), PublicationMark(1, 2400))
    assert keys(bootstrap, name) == [b"0", b"1", b"2"]


def test_failure_during_a_send_aborts_the_transaction(bootstrap: str, topic: TopicFactory) -> None:
    """It is ended at once: an open one would hold up readers until it times out."""
    name = topic(partitions=1)
    asked: list[str] = []

    with opened(bootstrap, name) as sender:

        def broken() -> None:
            asked.append("broken")
            sender._producer.flush(30)
            raise LookupError

        with pytest.raises(LookupError):
            sender.commit(records(name, 0, 3), PublicationMark(1, 3), broken)
        # Sooner than the minute after which the broker would end it.
        wait_until(lambda: settled(bootstrap, name) > len("012"), 20, "the abort")
        sender.commit(records(name, 3, 6), PublicationMark(1, 3), lambda: asked.append("whole"))
        sender.commit(records(name, 6, 7), PublicationMark(1, 4))
    assert asked == ["broken", "whole"]
    assert keys(bootstrap, name) == [b"%d" % n for n in range(3, 7)]


@contextmanager
def opened(bootstrap: str, topic: str, **config: str) -> Iterator[Transactions]:
    with Transactions(Kafka(bootstrap, config), f"{NAME}.{topic}", topic) as sender:
        yield sender


@contextmanager
def once_sent(patch: pytest.MonkeyPatch, happens: Callable[[], object]) -> Iterator[None]:
    """Let it happen when the records of a transaction have reached the broker, before it is committed."""
    send = Transactions._produce

    def sent(self: Transactions, found: list[Record]) -> None:
        send(self, found)
        assert self._producer.flush(30) == 0
        happens()

    with patch.context() as inner:
        inner.setattr(Transactions, "_produce", sent)
        yield


def records(topic: str, first: int, end: int) -> list[Record]:
    return [Record(topic, b"%d" % number, b"v", []) for number in range(first, end)]


def keys(bootstrap: str, topic: str) -> list[bytes | None]:
    """Those that a reader of committed records sees, in the order of their offsets.

    A commit is acknowledged before its marker is in the topic, and by a coordinator that took over seconds before.
    """
    wait_until(lambda: all_ended(bootstrap, topic), 60, "the marker of the last transaction")
    found = read_topic(bootstrap, topic)
    return [found[place][0] for place in sorted(found)]


def all_ended(bootstrap: str, topic: str) -> bool:
    """Whether no transaction is open, up to the end of the topic."""
    state = Kafka(bootstrap).read_topic_state(topic).partitions[0]
    return state.last_stable is not None and state.last_stable == state.high_watermark


def settled(bootstrap: str, topic: str) -> int:
    """Up to where no transaction is open."""
    return Kafka(bootstrap).read_topic_state(topic).partitions[0].last_stable or 0


def coordinator(cluster: EmbeddedCluster) -> EmbeddedBroker:
    """The broker that leads the log of transactions."""
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    log = client.list_topics("__transaction_state", timeout=60).topics["__transaction_state"]
    return next(broker for broker in cluster.brokers if broker.node.id == log.partitions[0].leader)
