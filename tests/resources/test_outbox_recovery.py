"""What an outbox knows of a topic that forgot records: found, withheld, or sent again."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from highwater.errors import ConfigurationError, UndeliveredError
from highwater.resources.delivery import NOT_SENT, DeliveryEnd
from highwater.resources.outbox import Outbox, _build_window
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Outcome
from highwater.resources.topic_state import PartitionState
from highwater.slices import OffsetRange
from tests.helpers.fake_client import FakeClient, build_fault
from tests.helpers.outboxes import NOBODY, RECORD, FakeDyingProducer, FakeTopicLog, die_amid, record, show_policies


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    return show_policies(monkeypatch)


def retention(log: FakeTopicLog) -> None:
    """Takes what was where sending began."""
    log.log_start, log.records = log.high_watermark, []


def compaction(log: FakeTopicLog) -> None:
    log.policy, log.records = "compact,delete", []


def the_unreadable(log: FakeTopicLog) -> None:
    """Nobody may read the policy, and compaction may be what it says."""
    log.policy, log.records = "", []


FORGETTING = pytest.mark.parametrize("forget", [retention, compaction, the_unreadable], ids=lambda f: f.__name__)


def sent_again(box: Outbox) -> tuple[list[str], dict[str, str | None]]:
    """What goes to a producer that stops keys, and the ends that are not delivered."""
    client = FakeClient()
    client.room = 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("confluent_kafka.Producer", lambda _: client)
        producer = ReliableProducer(build_producer_properties("nobody:1"))
    ends: dict[str, str | None] = {}
    box.send(producer, lambda record_id, outcome: ends.update({record_id: outcome.error}))
    given = [value.decode() for value in client.sent if value]
    while client.under_way:
        client.report(None, offset=1)
    box.close()
    return given, {record_id: error for record_id, error in ends.items() if error}


@FORGETTING
def test_possibly_deleted_records_are_withheld_with_their_key(
    tmp_path: Path, forget: Callable[[FakeTopicLog], None]
) -> None:
    """It was taken for a record that never arrived, and came twice, after later ones of its key."""
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["sent", "lost"], arrived=["sent"])
    forget(log)
    for _ in range(2):  # the next look begins where the log does now, and knows no more than the first
        box = log.outbox(file)
        assert box.recover() == 0
        assert box.list_withheld() == ["sent", "lost"]
        box.close()
    box = log.outbox(file)
    box.put([("never sent", record("never sent")), ("behind", record("behind", b"sent"))])
    given, ends = sent_again(box)
    assert given == ["never sent"]
    assert ends == {"sent": "WITHHELD", "lost": "WITHHELD", "behind": NOT_SENT}
    assert Outcome("t", -1, -1, -1, "WITHHELD").end is DeliveryEnd.UNKNOWN


@FORGETTING
def test_a_person_says_which_of_those_arrived(tmp_path: Path, forget: Callable[[FakeTopicLog], None]) -> None:
    """It holds until they are sent, also in a process after that; and then they may be on their way again."""
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["sent", "lost", "open"], arrived=["sent"])
    forget(log)
    box = log.outbox(file)
    box.recover()
    with pytest.raises(
        ConfigurationError,
        match=r"not withheld; found: another; remedy: resolve only the records that list_withheld\(\) lists",
    ):
        box.resolve_withheld(["lost", "another"], arrived=False)
    box.resolve_withheld(["sent"], arrived=True)
    box.resolve_withheld(["lost"], arrived=False)
    box.close()
    die_amid(file, log, [], arrived=[])
    box = log.outbox(file)
    assert box.list_ticked() == {"sent": (-1, -1)}
    if forget is retention:  # all that was written since is there: this time it did not arrive
        assert (box.recover(), box.list_withheld()) == (0, ["open"])
        assert sent_again(box) == (["lost"], {"open": "WITHHELD"})
    else:
        assert (box.recover(), box.list_withheld()) == (0, ["lost", "open"])


@FORGETTING
def test_records_settled_as_not_delivered_are_sent_by_the_next_process(
    tmp_path: Path, forget: Callable[[FakeTopicLog], None]
) -> None:
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["lost"], arrived=[])
    forget(log)
    box = log.outbox(file)
    box.recover()
    box.resolve_withheld(["lost"], arrived=False)
    box.close()
    box = log.outbox(file)
    box.recover()
    assert sent_again(box) == (["lost"], {})


@FORGETTING
def test_records_found_in_a_topic_with_retention_are_ticked(
    tmp_path: Path, forget: Callable[[FakeTopicLog], None]
) -> None:
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["sent", "lost"], arrived=["sent"])
    [(offset, _)] = stored = log.records
    forget(log)
    log.log_start, log.records = min(log.log_start, offset), stored
    box = log.outbox(file)
    assert box.recover() == 1
    assert (box.list_withheld(), [name for name, _ in box.list_waiting()]) == (["lost"], ["lost"])


def test_a_record_of_a_partition_that_forgot_nothing_is_sent_again(tmp_path: Path) -> None:
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    box = log.outbox(file)
    box.put((name, record(name)._replace(partition=p)) for name, p in (("of 0", 0), ("of 1", 1)))
    box.send(cast("Any", FakeDyingProducer(log, [])))
    box.close()
    retention(log)
    assert sent_again(log.outbox(file))[0] == ["of 1"]


def test_unsent_records_are_not_withheld(tmp_path: Path) -> None:
    """One that the client refused, another of its key, and one that waited for the client when the producer closed."""
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    box, client = log.outbox(file), FakeClient()
    box.put([("under way", record("under way")), ("waits", record("waits"))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("confluent_kafka.Producer", lambda _: client)
        producer = ReliableProducer(build_producer_properties("nobody:1"), most_with_client=1)
    box.send(producer)
    with pytest.raises(UndeliveredError):
        producer.close(0)
    client.refusal = build_fault("MSG_SIZE_TOO_LARGE")
    box.put([("refused", record("refused", b"k")), ("stopped", record("stopped", b"k"))])
    box.send(producer)
    box.close()
    compaction(log)
    box = log.outbox(file)
    box.recover()
    assert box.list_withheld() == ["under way"]


def test_possibly_sent_records_of_an_older_file_are_withheld(tmp_path: Path) -> None:
    """It says of no record whether it was sent."""
    file, log = tmp_path / "outbox.sqlite", FakeTopicLog()
    die_amid(file, log, ["sent"], arrived=["sent"])
    with contextlib.closing(sqlite3.connect(file)) as old, old:
        old.execute("ALTER TABLE identity DROP COLUMN handed_over")
        old.execute("ALTER TABLE outbox DROP COLUMN doubt")
    retention(log)
    box = log.outbox(file)
    box.recover()
    assert box.list_withheld() == ["sent"]


def test_a_record_whose_place_is_not_reported_is_ticked_and_moves_no_position(tmp_path: Path) -> None:
    """As if it were at the beginning of the log, it would have sent the next recovery back there."""
    box = Outbox(tmp_path / "outbox.sqlite", NOBODY)
    box.put([("a", RECORD)])
    box._keep_positions("t", "id", {0: 7})
    box._store_outcome("a", Outcome("t", 0, -1, -1))
    box.save()
    assert (box.list_ticked(), box.list_waiting()) == ({"a": (0, -1)}, [])
    assert box._connection.execute('SELECT "offset" FROM positions').fetchall() == [(7,)]


@pytest.mark.parametrize(("began", "start"), [(0, 10), (10, 10), (30, 30), (50, 50), (51, 10), (150, 10)])
def test_a_log_that_ends_before_the_position_is_read_from_its_start(began: int, start: int) -> None:
    """It was cut off, and may have grown again: what arrived since is before the position, and was sent again."""
    seen = PartitionState(log_start=10, last_stable=50, high_watermark=50, leader=1)
    assert _build_window("t", 0, began, seen) == (OffsetRange(start, 50), 10 <= began <= 50)


def test_a_log_that_was_cut_off_and_lost_nothing_else_is_whole() -> None:
    seen = PartitionState(log_start=0, last_stable=50, high_watermark=50, leader=1)
    assert _build_window("t", 0, 51, seen) == (OffsetRange(0, 50), True)
