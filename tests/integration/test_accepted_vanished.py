"""A topic of accepted events that is gone is an error everywhere, once something was sent to it; and has a way out."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from highwater.assets import publication_log, published
from highwater.assets.work import Work
from highwater.errors import DependencyUnavailableError, HighwaterError, TopicAbsentError, TopicRecreatedError
from highwater.errors import TopicVanishedError as Vanished
from highwater.orchestration.checking import topic_audit
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.reporting import doctor, plan_status, status_report
from highwater.orchestration.reporting.audit import audit
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.publication_status import find_accepted_vanished_error
from highwater.plans import PublicationRecord
from highwater.resources import dlq_topics
from highwater.resources.dlq_topics import check_accepted
from highwater.resources.topic_state import TopicState
from tests.conftest import create_topic
from tests.helpers.accepted import TARGET, Event, Tables
from tests.helpers.bench_records import published as read
from tests.helpers.fake_topics import MAIN_SHAPE
from tests.helpers.scene import Scene

if TYPE_CHECKING:
    from highwater.slices import Slice

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ABSENT = TopicAbsentError(f"topic {TARGET!r} does not exist", remedy="create it")
AWAY = DependencyUnavailableError("Kafka did not answer", remedy="check that it runs")


class FakeTopicDescriptions:
    """A test double for the brokers: what is said of the topic of accepted events, and how often it was asked."""

    def __init__(self, said: HighwaterError | None) -> None:
        self.said, self.asked = said, 0

    def read_description(self, topic: str) -> None:
        assert topic == TARGET
        self.asked += 1
        if self.said is not None:
            raise self.said

    def look_again(self, topic: str) -> Any:
        self.read_description(topic)


class FakeLaggingBroker(FakeTopicDescriptions):
    """The broker that is asked first does not know the topic yet, another one does."""

    def look_again(self, topic: str) -> Any:
        assert topic == TARGET
        return TopicState(topic, "A", {})


class Known:
    """What ledger and lake know of the topic."""

    def __init__(self, folder: Path) -> None:
        self.tables = Tables(folder)
        self.stream = self.tables.stream

    def send(self, topic: str = TARGET) -> None:
        self.tables.ledger.publications.record("orders", topic, PublicationRecord(3, 40, NOW))

    def write(self) -> None:
        from deltalake import write_deltalake

        write_deltalake(
            self.tables.lake.build_table_path("orders", publication_log.TABLE),
            publication_log.build_schema().empty_table(),
        )

    def gone(self, topic: str = TARGET) -> Vanished | None:
        return find_accepted_vanished_error(self.tables.ledger, self.tables.lake, self.stream, topic)

    def status(self, kafka: Any) -> HighwaterError | None:
        return plan_status._find_accepted_topic_error(self.tables.ledger, kafka, self.tables.lake, self.stream)


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(tmp_path)


def test_a_topic_that_was_sent_to_is_gone_with_its_way_out(known: Known) -> None:
    known.send()
    known.write()
    found = known.gone()
    assert found is not None
    assert found.stored == "batch 3 was sent to it by 2026-03-01 00:00:00 UTC"
    assert known.tables.lake.build_table_path("orders", "published") in found.remedy
    assert "highwater.pub.orders.accepted" in found.remedy
    assert (known.gone("orders.dlq.1"), known.gone("orders.parked")) == (None, None)


def test_a_topic_that_nothing_was_sent_to_is_not_there_yet(known: Known) -> None:
    """A new stream, a stream that moved to another topic, and one whose table was deleted to send all again."""
    assert known.gone() is None
    known.write()
    assert known.gone() is None
    known.send("orders.old")
    assert known.gone() is None
    shutil.rmtree(known.tables.lake.build_table_path("orders", publication_log.TABLE))
    known.send()
    assert known.gone() is None
    known.stream = replace(known.stream, publishes=None)
    assert known.gone() is None


def test_status_asks_once_and_only_where_something_was_sent(known: Known) -> None:
    silent = FakeTopicDescriptions(ABSENT)
    assert known.status(silent) is None
    assert silent.asked == 0
    known.send()
    known.write()
    there = FakeTopicDescriptions(None)
    assert known.status(there) is None
    assert there.asked == 1
    assert isinstance(known.status(FakeTopicDescriptions(ABSENT)), Vanished)
    assert known.status(FakeLaggingBroker(ABSENT)) is None, "one look is no proof"
    assert known.status(FakeTopicDescriptions(AWAY)) is AWAY


def test_status_reports_it_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Vanished("topic t is gone", remedy="fix it")
    reported = status_report.StreamStatus("orders", "orders", 0, None, None, accepted=error)
    assert reported.lines[1] == "  TopicVanishedError: topic t is gone; remedy: fix it"
    assert reported.to_plain()["accepted_error"]["error"] == "TopicVanishedError"
    sound = replace(reported, accepted=None)
    assert sound.to_plain()["accepted_error"] is None
    scene = Scene("nowhere:1", "orders", tmp_path)
    for one, status in ((reported, EXIT_PERMANENT), (sound, 0)):
        monkeypatch.setattr(plan_status, "read_stream_status", lambda *_, one=one: one)
        assert scene.run("status").exit_code == status


def test_the_audit_looks_at_the_other_topics_all_the_same(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is not there is reported by the status of tiers."""
    asked: list[str] = []

    def facts(_: object, topic: str) -> None:
        asked.append(topic)
        raise ABSENT

    monkeypatch.setattr(topic_audit, "fetch_topic_facts", facts)
    kafka: Any = FakeTopicDescriptions(ABSENT)
    assert topic_audit.check_published_topics(kafka, known.stream) == ({}, [])
    error = Vanished("gone", remedy="-")
    found = topic_audit.check_published_topics(kafka, known.stream, lambda topic: error if topic == TARGET else None)
    assert found == ({}, [error])
    assert asked == 2 * [*known.stream.published_topics]


def test_the_doctor_reports_it_before_it_asks_whether_the_topic_would_be_created(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shape(_: object, topic: str) -> dlq_topics.TopicShape:
        if topic == TARGET:
            raise ABSENT
        return MAIN_SHAPE

    monkeypatch.setattr(dlq_topics, "_read_shape", shape)
    monkeypatch.setattr(dlq_topics, "_create", lambda *_, **__: None)
    kafka: Any = FakeTopicDescriptions(ABSENT)
    assert check_accepted(kafka, known.stream).startswith("is not there yet")
    with pytest.raises(Vanished, match="gone"):
        check_accepted(kafka, known.stream, lambda _: Vanished("gone", remedy="-"))


@pytest.mark.slow
def test_a_topic_that_was_deleted_is_reported_and_refilled_as_the_remedy_says(
    bootstrap: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nobody noticed: what readers had not read was gone, and the doctor said that the topic was still to come."""
    topic = f"vanishing.{os.getpid()}"
    create_topic(bootstrap, topic, 1, {})
    tables, scene = Tables(tmp_path, topic, bootstrap=bootstrap), Scene(bootstrap, topic, tmp_path)
    target, lake = f"{topic}.accepted", tables.lake

    def send(*slices: Slice) -> None:
        published.materialise(
            Work(tables.stream, list(slices), None, lake, tables.ledger, tables.kafka, lambda _: None)  # type: ignore[arg-type]
        )

    def reported() -> HighwaterError | None:
        return read_stream_status(tables.ledger, tables.kafka, tables.stream, {}, lake).accepted

    first, second = (tables.plan(n, p0=(3 * n, 3 * n + 3)) for n in (0, 1))
    for n, slice_ in enumerate((first, second)):
        tables.decide(slice_, [Event(0, at, f"o{at}", minute=at) for at in range(3 * n, 3 * n + 3)])
    assert reported() is None
    send(first)
    assert reported() is None
    scene.admin.delete_topics([target])[target].result(30)
    wait_until(lambda: target not in tables.kafka.list_topic_names(), 30, "the topic's end")
    assert isinstance(reported(), Vanished)
    page = audit(tables.ledger, tables.kafka, lake, tables.stream)
    assert len([error for error in page.errors if error.startswith(f"topic {target} of stream orders is gone")]) == 1
    opened: Any = SimpleNamespace(
        open_kafka=lambda: tables.kafka, open_ledger=lambda: tables.ledger, open_lake=lambda: lake
    )
    with pytest.raises(Vanished):
        doctor._check_accepted_topic(opened, tables.stream)
    with pytest.raises(TopicRecreatedError):
        send(second)
    assert read(bootstrap, target) == []
    # As the remedy says.
    shutil.rmtree(lake.build_table_path("orders", publication_log.TABLE))
    send(first, second)
    assert [key for _, key, _, _ in read(bootstrap, target)] == [f"o{at}".encode() for at in range(6)]
    assert reported() is None
