"""Rejects are published once, wherever the process that publishes them is killed or stopped (I7)."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from assets import dlq, events, raw, rejects
from highwater.errors import ConfigurationError
from resources import ledger_schema
from resources.dlq_topics import ensure
from tests.publish_child import FENCED, POINTS
from tests.support import Bench, Children, order_message, read_topic

if TYPE_CHECKING:
    from highwater.slices import Slice

pytestmark = [pytest.mark.slow, pytest.mark.crash]

RECORDS = 60


class Publishing:
    """A slice whose rejects stand in the lake, and processes that publish them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.send(*[order_message(f"o{n}", 1, n % 3, customer_id="late") for n in range(RECORDS)])
        each = RECORDS // 3
        self.piece: Slice = bench.plan(0, p0=(0, each), p1=(0, each), p2=(0, each))
        for stage in (raw, events, rejects):
            stage.materialise(bench.work(self.piece))

        task = {
            "topic": bench.stream.topic,
            "slice": self.piece.key,
            "lake": bench.lake.root,
            "ledger": str(bench.ledger._url),
            "bootstrap": bench.bootstrap,
        }
        self.children = Children("tests.publish_child", task)

    def see_each_once(self) -> None:
        found = read_topic(self.bench.bootstrap, self.bench.stream.tier_topics[0])
        assert Counter(key for key, _ in found.values()) == Counter(f"o{n}".encode() for n in range(RECORDS))

    def expire(self) -> None:
        """Lose Kafka's mark, as group offsets that nobody renews are lost after a week."""
        group = f"highwater.pub.{self.piece.key}"
        self.bench.kafka.admin().delete_consumer_groups([group])[group].result(30)

    def forget(self) -> None:
        """Lose the ledger's copy of the mark."""
        with self.bench.ledger._writing() as connection:
            connection.execute(ledger_schema.publications.delete())


def test_killed_at_every_point_each_reject_is_published_once(bench: Bench) -> None:
    publishing = Publishing(bench)
    for point in POINTS:
        assert publishing.children.end(point) == -signal.SIGKILL, f"{point} was not reached"
        publishing.forget()
    assert publishing.children.end() == 0
    publishing.see_each_once()
    published = bench.ledger.publications([publishing.piece.key])[publishing.piece.key]
    assert published.sent == RECORDS


def test_a_mark_that_expired_is_known_from_the_ledger(bench: Bench) -> None:
    publishing = Publishing(bench)
    assert publishing.children.end("recorded") == -signal.SIGKILL
    for _ in range(2):
        publishing.expire()
        assert publishing.children.end() == 0
        publishing.see_each_once()


@pytest.mark.long
def test_the_mark_of_another_plan_is_not_counted(bench: Bench) -> None:
    """The ledger was lost, and another slice has the key of one that was published."""
    publishing = Publishing(bench)
    decided, _ = bench.lake.committed_at(bench.stream.name, "rejects", [publishing.piece.key])
    decision = decided[publishing.piece.key]
    assert publishing.children.end() == 0
    other = replace(publishing.piece, topic_id="another")
    with pytest.raises(ConfigurationError, match="another plan were published under this key"):
        dlq._publish(bench.work(other), other, decision, ensure(bench.kafka, bench.stream))
    publishing.see_each_once()


def test_a_process_that_was_stopped_in_its_transaction_is_fenced(bench: Bench) -> None:
    publishing = Publishing(bench)
    assert publishing.children.stop_and_overtake("half", publishing.see_each_once) == FENCED
