"""Rejects are published once, wherever the process that publishes them is killed or stopped (I7)."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from highwater.assets import dlq, dlq_marks, events, raw, rejects
from highwater.errors import ConfigurationError
from highwater.mirroring import MirrorMark as GroupMark
from highwater.resources.consumer_groups import commit
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.ledger import schema
from highwater.resources.transactions import PublicationMark, Transactions
from tests.helpers.publish_child import FENCED, POINTS
from tests.helpers.support import Bench, Children, order_message, read_topic

if TYPE_CHECKING:
    from highwater.slices import Slice

pytestmark = [pytest.mark.slow, pytest.mark.crash]

RECORDS = 60


class Publishing:
    """A slice whose rejects are in the lake, and processes that publish them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.send(*[order_message(f"o{n}", 1, n % 3, customer_id="late") for n in range(RECORDS)])
        each = RECORDS // 3
        self.slice_: Slice = bench.plan(0, p0=(0, each), p1=(0, each), p2=(0, each))
        for stage in (raw, events, rejects):
            stage.materialise(bench.work(self.slice_))

        task = {
            "topic": bench.stream.topic,
            "slice": self.slice_.key,
            "lake": bench.lake.root,
            "ledger": str(bench.ledger.database.url),
            "bootstrap": bench.bootstrap,
        }
        self.children = Children("tests.helpers.publish_child", task)

    def ensure_each_once(self) -> None:
        found = read_topic(self.bench.bootstrap, self.bench.stream.tier_topics[0])
        assert Counter(key for key, _ in found.values()) == Counter(f"o{n}".encode() for n in range(RECORDS))

    def expire(self) -> None:
        """Lose Kafka's mark, as group offsets that nobody renews are lost after a week."""
        [group] = self.groups()
        self.bench.kafka.get_admin().delete_consumer_groups([group])[group].result(30)

    def groups(self) -> list[str]:
        """The consumer groups that are named after the slice."""
        return [name for name in self.bench.kafka.list_group_names() if self.slice_.key in name]

    def forget(self) -> None:
        """Lose the ledger's copy of the mark."""
        with self.bench.ledger.database.writing() as connection:
            connection.execute(schema.publications.delete())


def test_killed_at_every_point_each_reject_is_published_once(bench: Bench) -> None:
    publishing = Publishing(bench)
    for point in POINTS:
        assert publishing.children.end(point) == -signal.SIGKILL, f"{point} was not reached"
        publishing.forget()
    assert publishing.children.end() == 0
    publishing.ensure_each_once()
    published = bench.ledger.publications.read_for_slices([publishing.slice_.key])[publishing.slice_.key]
    assert published.sent == RECORDS


def test_a_mark_that_expired_is_known_from_the_ledger(bench: Bench) -> None:
    publishing = Publishing(bench)
    assert publishing.children.end("recorded") == -signal.SIGKILL
    for _ in range(2):
        publishing.expire()
        assert publishing.children.end() == 0
        publishing.ensure_each_once()


def test_the_group_of_a_publication_goes_with_its_last_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice with rejects left a consumer group for good; a run may die before it deletes its own."""
    publishing, work = Publishing(bench), bench.work()
    key, topic = publishing.slice_.key, bench.stream.parked_topic
    assert publishing.children.end("recorded") == -signal.SIGKILL
    [group] = publishing.groups()
    assert dlq_marks.clean_up(work, dry_run=False) == ""
    assert publishing.groups() == [group], "its publication is under way"
    with monkeypatch.context() as dying:
        dying.setattr(dlq, "delete_marks", lambda *_: None)
        dlq.materialise(bench.work(publishing.slice_))
    older, others = f"highwater.pub.{key}", f"highwater.pub.{bench.stream.topic}@0000099"
    place = {(topic, 0): (1, GroupMark.from_last_slice("of an earlier version", None, datetime.now(UTC)))}
    for name in (older, others):
        commit(bench.kafka, name, place)
    assert "2 consumer groups of complete publications would be deleted" in dlq_marks.clean_up(work, dry_run=True)
    assert set(publishing.groups()) == {group, older}
    assert "2 consumer groups of complete publications were deleted" in dlq_marks.clean_up(work, dry_run=False)
    assert (publishing.groups(), others in bench.kafka.list_group_names()) == ([], True), (
        "another ledger may know that slice"
    )
    publishing.ensure_each_once()

    # A process that was stopped before its deletion goes on when the slice is decided and published another time.
    later, name = PublicationMark(9, 5, publishing.slice_.identity), f"highwater.pub.{key}"
    with Transactions(bench.kafka, name, topic, group=dlq_marks.build_group_name(key, 9)) as transactions:
        transactions.commit([], later)
    dlq_marks.delete_marks(work, {key: 1})
    with Transactions(bench.kafka, name, topic, group=dlq_marks.build_group_name(key, 9)) as transactions:
        assert transactions.mark() == later


@pytest.mark.long
def test_the_mark_of_another_plan_is_not_counted(bench: Bench) -> None:
    """The ledger was lost, and another slice has the key of one that was published."""
    publishing = Publishing(bench)
    decided, _ = bench.lake.load_commits_and_version(bench.stream.name, "rejects", [publishing.slice_.key])
    decision = decided[publishing.slice_.key]
    assert publishing.children.end() == 0
    other = replace(publishing.slice_, topic_id="another")
    with pytest.raises(ConfigurationError, match="another plan were published under this key"):
        dlq._publish(bench.work(other), other, decision, ensure_dlq_topics(bench.kafka, bench.stream))
    publishing.ensure_each_once()


def test_a_process_that_was_stopped_in_its_transaction_is_fenced(bench: Bench) -> None:
    publishing = Publishing(bench)
    assert publishing.children.stop_and_overtake("half", publishing.ensure_each_once) == FENCED
