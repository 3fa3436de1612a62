"""The outbox: it hands over each record once, in order, and ticks none that did not arrive."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from highwater.errors import ConfigurationError, DependencyUnavailableError, UndeliveredError
from highwater.resources.delivery import NOT_SENT
from highwater.resources.outbox import Outbox
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Outcome, Record
from tests.helpers.outboxes import NOBODY, RECORD, FakeTopicLog, die_amid, show_policies


def test_records_are_preserved_as_they_were_put_and_in_order(tmp_path: Path) -> None:
    file = tmp_path / "outbox.sqlite"
    records = [
        ("b", Record("t", b"k", b"v", [("h", b"\xff"), ("n", None)], 2, 7)),
        ("a", Record("t", None, None)),
    ]
    box = Outbox(file, NOBODY)
    box.put(records)
    box.close()
    found = Outbox(file, NOBODY).list_waiting()
    assert [record_id for record_id, _ in found] == ["b", "a"]
    assert found[0][1] == Record("t", b"k", b"v", [("h", b"\xff"), ("n", None)], 2, 7)
    assert (found[1][1].key, found[1][1].value) == (None, None)


def test_an_id_is_taken_once_and_its_batch_not_at_all(tmp_path: Path) -> None:
    box = Outbox(tmp_path / "outbox.sqlite", NOBODY)
    box.put([("a", Record("t", None, b"1"))])
    with pytest.raises(sqlite3.IntegrityError):
        box.put([("b", Record("t", None, b"2")), ("a", Record("t", None, b"3"))])
    assert [record_id for record_id, _ in box.list_waiting()] == ["a"]


class FakeProducer:
    """A test double for a producer whose broker takes every record at once; counts what it was given."""

    transactional = False

    def __init__(self) -> None:
        self.given: list[str] = []

    def send(self, record: Record, record_id: str, on_outcome: Any) -> None:
        self.given.append(record_id)
        if record_id != "stays":
            on_outcome(Outcome(record.topic, 0, len(self.given), 0))

    def stop(self, *of: object) -> None:
        """It sends whatever it is given."""


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    return show_policies(monkeypatch)


def a_box(file: Path, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    monkeypatch.setattr("highwater.resources.outbox.BATCH", 3)
    monkeypatch.setattr("highwater.resources.outbox.TICKS", 2)
    box = Outbox(file, NOBODY)
    monkeypatch.setattr(box, "_begin", lambda topics: None)
    return box


def test_each_record_is_handed_over_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, with ticks written between them, and with records that stay behind."""
    box = a_box(tmp_path / "outbox.sqlite", monkeypatch)
    receiver: Any = FakeProducer()
    names = [*"abcd", "stays", *"efghij"]
    box.put((name, RECORD) for name in names)
    for _ in range(3):
        box.send(receiver)
        box.put([(f"more{len(receiver.given)}", RECORD)])
    assert receiver.given == [*names, "more11", "more12"]
    assert [name for name, _ in box.list_waiting()] == ["stays", "more13"]


def test_delivered_records_can_be_forgotten_and_numbers_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = a_box(tmp_path / "outbox.sqlite", monkeypatch)
    receiver: Any = FakeProducer()
    box.put((name, RECORD) for name in ("a", "stays", "b", "c"))
    box.send(receiver)
    assert box.forget(keep=0) == 2
    assert (set(box.list_ticked()), [name for name, _ in box.list_waiting()]) == ({"c"}, ["stays"])
    box.put([("d", RECORD)])
    box.send(receiver)
    assert receiver.given == ["a", "stays", "b", "c", "d"]


def test_a_record_that_the_client_refuses_holds_up_its_key_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions of its key went out, and the first one would have come after them once the limit was raised."""
    box = a_box(tmp_path / "outbox.sqlite", monkeypatch)
    producer = ReliableProducer(build_producer_properties("127.0.0.1:1", {"message.max.bytes": "2000"}))
    box.put(
        [
            ("v1", Record("t", b"k", b"x" * 5000)),
            ("v2", RECORD),
            ("other", Record("t", b"o", b"v")),
            ("v3", RECORD),
        ]
    )
    ends: dict[str, str | None] = {}
    box.send(producer, lambda record_id, outcome: ends.update({record_id: outcome.error}))
    assert ends == {"v1": "MSG_SIZE_TOO_LARGE", "v2": NOT_SENT, "v3": NOT_SENT}
    assert producer.counts.sent == 1
    assert [name for name, _ in box.list_waiting()] == ["v1", "v2", "other", "v3"]
    with pytest.raises(UndeliveredError, match="unknown: other"):
        producer.close(0.1)


def test_a_file_has_one_process_that_sends_from_it(tmp_path: Path) -> None:
    """Nothing refused a second one, and both sent all of it."""
    file = tmp_path / "outbox.sqlite"
    box = Outbox(file, NOBODY)
    with pytest.raises(ConfigurationError, match=r"outbox.sqlite is open already; .*outbox.sqlite.lock; remedy: end"):
        Outbox(file, NOBODY)
    box.close()
    Outbox(file, NOBODY).close()


def test_a_transactional_producer_is_not_taken(tmp_path: Path) -> None:
    """Its reports come before the commit, so a record of a transaction that is aborted later was ticked."""
    box = Outbox(tmp_path / "outbox.sqlite", NOBODY)
    box.put([("a", RECORD)])
    producer = ReliableProducer(build_producer_properties("127.0.0.1:1", transactional_id="t"))
    with pytest.raises(ConfigurationError, match=r"without transactional\.id"):
        box.send(producer)
    assert producer.counts.sent == 0


def test_the_first_send_looks_by_itself_for_what_a_dead_process_had_sent(tmp_path: Path) -> None:
    """Who forgot to call `recover` sent all of it twice."""
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["a", "b", "c"], arrived=["b"])
    box, receiver = log.outbox(file), FakeProducer()
    found: list[str] = []
    box.send(cast("Any", receiver), lambda record_id, outcome: found.append(f"{record_id} {outcome.error}"))
    assert receiver.given == ["a", "c"]
    assert found == ["b None", "a None", "c None"]
    log.unavailable = True  # it looks once
    box.put([("d", RECORD)])
    box.send(cast("Any", receiver))
    assert receiver.given == ["a", "c", "d"]


def test_nothing_is_sent_while_the_topic_cannot_be_read(tmp_path: Path) -> None:
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["a"], arrived=["a"])
    box, receiver = log.outbox(file), FakeProducer()
    log.unavailable = True
    for _ in range(2):
        with pytest.raises(DependencyUnavailableError):
            box.send(cast("Any", receiver))
    assert receiver.given == []
