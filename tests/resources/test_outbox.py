"""The outbox: whatever is killed, every id is in the topic once, and none is ticked that is not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Message

from dev.generator import SOURCES, Order, Target, generate, outbox_file
from dev.processes import wait_until
from dev.readings import end_offsets
from highwater.errors import ConfigurationError, DependencyAwayError, UndeliveredError
from highwater.resources.delivery import NOT_SENT, DeliveryEnd
from highwater.resources.kafka import Kafka
from highwater.resources.outbox import ID_HEADER, ORIGIN_HEADER, Outbox, _build_window
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Outcome, Record
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from highwater.topic_rules import Setting
from tests.conftest import TopicFactory, create_topic
from tests.helpers.fake_client import FakeClient, fault
from tests.helpers.support import forkserver, read_topic

NOBODY = Kafka("127.0.0.1:1")
# The longer series is of `make test-long`.
SERIES = pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
RECORDS = 20_000
RECORD = Record("t", b"k", b"v")


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


def work(file: Path, bootstrap: str, ready: Path) -> None:
    """What a child does until it is killed: find out what arrived, and send the rest."""
    box = Outbox(file, Kafka(bootstrap))
    box.recover()
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        ready.touch()
        box.send(producer)
        producer.close()
    box.close()


class Receiver:
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


class Log:
    """A test double for a topic, with what retention has taken from partition 0 and its policy; 1 is empty."""

    def __init__(self) -> None:
        self.log_start = 0
        self.high_watermark = 100
        self.policy = "delete"
        self.away = False
        self.records: list[tuple[int, bytes]] = []

    def outbox(self, file: Path) -> Outbox:
        return Outbox(file, cast("Kafka", self))

    def read_topic_state(self, topic: str) -> TopicState:
        if self.away:
            raise DependencyAwayError("away", remedy="none")
        end = self.high_watermark
        whole = PartitionState(0, 0, 0, leader=1)
        return TopicState(topic, "id", {0: PartitionState(self.log_start, end, end, leader=1), 1: whole})

    def read(self, topic: str, ranges: dict[int, OffsetRange], *, committed: bool) -> Iterator[Message]:
        assert not committed
        for offset, origin in self.records:
            if offset in ranges[0]:
                headers: list[tuple[str, str | bytes | None]] = [(ORIGIN_HEADER, origin)]
                yield Message(topic=topic, partition=0, offset=offset, headers=headers, timestamp=(1, 0))


class FakeDyingProducer:
    """A test double for a producer whose process dies before any report; what it was given may have arrived."""

    transactional = False

    def __init__(self, log: Log, arrived: list[str]) -> None:
        self.log, self.arrived = log, arrived

    def send(self, record: Record, record_id: str, on_outcome: object) -> None:
        del on_outcome
        self.log.high_watermark += 1  # by somebody else
        if record_id in self.arrived:
            self.log.records.append((self.log.high_watermark, dict(record.headers)[ORIGIN_HEADER] or b""))
            self.log.high_watermark += 1

    def stop(self, *of: object) -> None:
        """It dies before that matters."""


def record(name: str, key: bytes | None = None) -> Record:
    """One whose value shows its name."""
    return Record("t", name.encode() if key is None else key, name.encode())


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a `Log` show its policy."""
    asked = fetch_topic_settings

    def settings(kafka: Kafka | Log, topic: str) -> Mapping[str, Setting] | None:
        if isinstance(kafka, Log):
            return {"cleanup.policy": Setting(kafka.policy, "of the topic")} if kafka.policy else None
        return asked(kafka, topic)

    monkeypatch.setattr("highwater.resources.outbox.fetch_topic_settings", settings)


def die_amid(file: Path, log: Log, names: list[str], arrived: list[str]) -> None:
    """Send records and die; `arrived` are those that the topic has."""
    box = log.outbox(file)
    box.put((name, record(name)) for name in names)
    box.send(cast("Any", FakeDyingProducer(log, arrived)))
    box.close()


def a_box(file: Path, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    monkeypatch.setattr("highwater.resources.outbox.BATCH", 3)
    monkeypatch.setattr("highwater.resources.outbox.TICKS", 2)
    box = Outbox(file, NOBODY)
    monkeypatch.setattr(box, "_begin", lambda topics: None)
    return box


def test_each_record_is_handed_over_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, with ticks written between them, and with records that stay behind."""
    box = a_box(tmp_path / "outbox.sqlite", monkeypatch)
    receiver: Any = Receiver()
    names = [*"abcd", "stays", *"efghij"]
    box.put((name, RECORD) for name in names)
    for _ in range(3):
        box.send(receiver)
        box.put([(f"more{len(receiver.given)}", RECORD)])
    assert receiver.given == [*names, "more11", "more12"]
    assert [name for name, _ in box.list_waiting()] == ["stays", "more13"]


def test_what_arrived_can_be_forgotten_and_numbers_are_not_given_out_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = a_box(tmp_path / "outbox.sqlite", monkeypatch)
    receiver: Any = Receiver()
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
    """Nothing kept a second one away, and both sent all of it."""
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
    file, log = tmp_path / "outbox.sqlite", Log()
    die_amid(file, log, ["a", "b", "c"], arrived=["b"])
    box, receiver = log.outbox(file), Receiver()
    found: list[str] = []
    box.send(cast("Any", receiver), lambda record_id, outcome: found.append(f"{record_id} {outcome.error}"))
    assert receiver.given == ["a", "c"]
    assert found == ["b None", "a None", "c None"]
    log.away = True  # it looks once
    box.put([("d", RECORD)])
    box.send(cast("Any", receiver))
    assert receiver.given == ["a", "c", "d"]


def test_nothing_is_sent_while_the_topic_cannot_be_read(tmp_path: Path) -> None:
    file, log = tmp_path / "outbox.sqlite", Log()
    die_amid(file, log, ["a"], arrived=["a"])
    box, receiver = log.outbox(file), Receiver()
    log.away = True
    for _ in range(2):
        with pytest.raises(DependencyAwayError):
            box.send(cast("Any", receiver))
    assert receiver.given == []


def retention(log: Log) -> None:
    """Takes what was where sending began."""
    log.log_start, log.records = log.high_watermark, []


def compaction(log: Log) -> None:
    log.policy, log.records = "compact,delete", []


def the_unreadable(log: Log) -> None:
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
def test_what_a_topic_may_have_forgotten_is_withheld_with_its_key_and_not_sent_again(
    tmp_path: Path, forget: Callable[[Log], None]
) -> None:
    """It was taken for a record that never arrived, and came twice, after later ones of its key."""
    file, log = tmp_path / "outbox.sqlite", Log()
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
def test_a_person_says_which_of_those_arrived(tmp_path: Path, forget: Callable[[Log], None]) -> None:
    """It holds until they are sent, also in a process after that; and then they may be on their way again."""
    file, log = tmp_path / "outbox.sqlite", Log()
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
def test_what_was_settled_as_not_arrived_is_sent_by_a_process_after_that(
    tmp_path: Path, forget: Callable[[Log], None]
) -> None:
    file, log = tmp_path / "outbox.sqlite", Log()
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
def test_what_is_found_in_a_topic_that_forgets_is_ticked(tmp_path: Path, forget: Callable[[Log], None]) -> None:
    file, log = tmp_path / "outbox.sqlite", Log()
    die_amid(file, log, ["sent", "lost"], arrived=["sent"])
    [(offset, _)] = stored = log.records
    forget(log)
    log.log_start, log.records = min(log.log_start, offset), stored
    box = log.outbox(file)
    assert box.recover() == 1
    assert (box.list_withheld(), [name for name, _ in box.list_waiting()]) == (["lost"], ["lost"])


def test_a_record_of_a_partition_that_forgot_nothing_is_sent_again(tmp_path: Path) -> None:
    file, log = tmp_path / "outbox.sqlite", Log()
    box = log.outbox(file)
    box.put((name, record(name)._replace(partition=p)) for name, p in (("of 0", 0), ("of 1", 1)))
    box.send(cast("Any", FakeDyingProducer(log, [])))
    box.close()
    retention(log)
    assert sent_again(log.outbox(file))[0] == ["of 1"]


def test_what_was_surely_not_sent_is_not_withheld(tmp_path: Path) -> None:
    """One that the client refused, another of its key, and one that waited for the client when the producer closed."""
    file, log = tmp_path / "outbox.sqlite", Log()
    box, client = log.outbox(file), FakeClient()
    box.put([("under way", record("under way")), ("waits", record("waits"))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("confluent_kafka.Producer", lambda _: client)
        producer = ReliableProducer(build_producer_properties("nobody:1"), most_with_client=1)
    box.send(producer)
    with pytest.raises(UndeliveredError):
        producer.close(0)
    client.refusal = fault("MSG_SIZE_TOO_LARGE")
    box.put([("refused", record("refused", b"k")), ("stopped", record("stopped", b"k"))])
    box.send(producer)
    box.close()
    compaction(log)
    box = log.outbox(file)
    box.recover()
    assert box.list_withheld() == ["under way"]


def test_what_a_file_of_the_version_before_may_have_sent_is_withheld_too(tmp_path: Path) -> None:
    """It says of no record whether it was sent."""
    file, log = tmp_path / "outbox.sqlite", Log()
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


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
@SERIES
def test_whatever_is_killed_every_id_is_there_once_and_only_those_are_ticked(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, kills: int
) -> None:
    name, file = topic(partitions=3), tmp_path / "outbox.sqlite"
    chance = random.Random(7)
    context = forkserver()
    box = Outbox(file, Kafka(bootstrap))
    box.put((f"id-{n}", Record(name, b"k%d" % (n % 50), b"%d" % n)) for n in range(RECORDS))
    box.close()
    killed_amid = unreported = arrived = 0
    for number in range(kills):
        ready = tmp_path / f"ready-{number}"
        child = context.Process(target=work, args=(file, bootstrap, ready))
        child.start()
        while child.is_alive() and not ready.exists():
            time.sleep(0.002)
        if number % 2:  # amid what arrives; the others at any time
            while child.is_alive() and sum(end_offsets(bootstrap, name).values()) == arrived:
                time.sleep(0.002)
        else:
            time.sleep(chance.uniform(0, 0.6))
        if child.is_alive() and child.pid:
            os.kill(child.pid, signal.SIGKILL)
            killed_amid += 1
        child.join(30)
        stored = ids(bootstrap, name)
        arrived = len(stored)
        box = Outbox(file, Kafka(bootstrap))
        ticked = box.list_ticked()
        assert len(stored) == len(set(stored)), "an id is stored twice"
        assert set(ticked) <= set(stored), "ticked, and not in the topic"
        unreported += len(stored) > len(ticked)
        if len(stored) > RECORDS // 2:  # more of them, so that there is something to kill at
            box.put((f"id-{number}-{n}", Record(name, b"k%d" % (n % 50), b"x")) for n in range(RECORDS // 2))
        box.close()
    assert killed_amid >= kills // 2
    assert unreported >= 1, "nothing had arrived whose tick was lost: there was nothing to find out"
    work(file, bootstrap, tmp_path / "last")
    box = Outbox(file, Kafka(bootstrap))
    stored = ids(bootstrap, name)
    first = [int(value) for key, value in in_order(bootstrap, name) if value != b"x" and key == b"k7"]
    assert box.list_waiting() == []
    assert sorted(stored) == sorted(box.list_ticked())
    assert first == [*range(7, RECORDS, 50)], "in the order of the outbox for each key"
    box.close()


def ids(bootstrap: str, topic: str) -> list[str]:
    kafka = Kafka(bootstrap)
    state = kafka.read_topic_state(topic)
    ranges = {p: OffsetRange(0, seen.last_stable or 0) for p, seen in state.partitions.items()}
    return [(dict(message.headers() or [])[ID_HEADER] or b"").decode() for message in kafka.read(topic, ranges)]


def in_order(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes]]:
    found = read_topic(bootstrap, topic)
    return [(key, value or b"") for _, (key, value) in sorted(found.items())]


def generate_some(bootstrap: str, home: Path, name: str, seed: int) -> None:
    """What a child does until it is killed: a generator of orders without faults."""
    source = SOURCES["orders"]
    rates = dict.fromkeys(source.faults, 0.0)
    target = Target(bootstrap, home, str(home / "lake"), topic=name)
    generate(source, target, Order(seed=seed, records=3000, rate=1500, rates=rates))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
def test_a_generator_that_is_killed_twenty_times_has_every_id_in_the_topic_once(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    kills = 20
    name = topic(partitions=SOURCES["orders"].partitions)
    chance = random.Random(11)
    context = forkserver()
    unreported = 0
    for number in range(kills):
        before = len(ids(bootstrap, name))
        child = context.Process(target=generate_some, args=(bootstrap, tmp_path, name, number))
        child.start()
        deadline = time.monotonic() + 60
        while child.is_alive() and time.monotonic() < deadline and len(ids(bootstrap, name)) <= before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(30)
        stored = ids(bootstrap, name)
        box = Outbox(outbox_file(tmp_path, name), Kafka(bootstrap))
        ticked = box.list_ticked()
        assert len(stored) == len(set(stored)), "an id is stored twice"
        assert set(ticked) <= set(stored), "ticked, and not in the topic"
        unreported += len(stored) > len(ticked)
        box.close()
    assert unreported >= 1, "nothing had arrived whose tick was lost: there was nothing to find out"
    generate_some(bootstrap, tmp_path, name, kills)
    box = Outbox(outbox_file(tmp_path, name), Kafka(bootstrap))
    assert box.list_waiting() == []
    assert sorted(box.list_ticked()) == sorted(ids(bootstrap, name))
    box.close()


@pytest.mark.slow
def test_a_refused_record_and_a_stopped_key_hold_nobody_up(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    name = topic(partitions=1)
    box = Outbox(tmp_path / "outbox.sqlite", Kafka(bootstrap))
    producer = ReliableProducer(build_producer_properties(bootstrap, {"message.max.bytes": "2000"}))
    producer.stopped[name, b"stopped"] = "before"
    box.put(
        [
            ("large", Record(name, b"a", b"x" * 5000)),
            ("stopped", Record(name, b"stopped", b"v")),
            ("sound", Record(name, b"b", b"v")),
        ]
    )
    ends: dict[str, Outcome] = {}
    box.send(producer, lambda record_id, outcome: ends.update({record_id: outcome}))
    producer.close()
    box.save()
    assert {record_id: outcome.end for record_id, outcome in ends.items()} == {
        "large": DeliveryEnd.NOT_DELIVERED,
        "stopped": DeliveryEnd.NOT_DELIVERED,
        "sound": DeliveryEnd.DELIVERED,
    }
    assert [record_id for record_id, _ in box.list_waiting()] == ["large", "stopped"]
    assert ids(bootstrap, name) == ["sound"]


def open_topic(bootstrap: str, name: str) -> str:
    """The topic, once each partition shows where it begins and ends: a new leader refuses that for a moment."""
    states = Kafka(bootstrap)

    def reported() -> bool:
        found = states.read_topic_state(name).partitions.values()
        return all(p.known and p.high_watermark is not None for p in found)

    wait_until(reported, 30, f"offsets of each partition of {name}")
    return name


def send_all(box: Outbox, bootstrap: str) -> None:
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        box.send(producer)


def killed_before_any_tick(file: Path, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send what waits, and keep no tick of it."""
    box = Outbox(file, Kafka(bootstrap))
    with monkeypatch.context() as broken:
        broken.setattr(box, "_store_outcome", lambda *_: None)
        send_all(box, bootstrap)
        box.close()


@pytest.mark.slow
def test_the_record_of_another_outbox_with_the_same_id_ticks_nothing(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that count from 1 meet where two write to one topic: the record was ticked, and never sent."""
    name = open_topic(bootstrap, topic(partitions=1))
    mine, theirs = tmp_path / "mine.sqlite", tmp_path / "theirs.sqlite"
    for file in (mine, theirs):
        box = Outbox(file, Kafka(bootstrap))
        box.put([("1", Record(name, None, file.stem.encode()))])
        box._begin({name})
        box.close()
    killed_before_any_tick(theirs, bootstrap, monkeypatch)
    box = Outbox(mine, Kafka(bootstrap))
    assert box.recover() == 0
    send_all(box, bootstrap)
    box.close()
    box = Outbox(theirs, Kafka(bootstrap))
    assert (box.recover(), box.list_waiting()) == (1, [])
    assert [value for _, value in in_order(bootstrap, name)] == [b"theirs", b"mine"]


@pytest.mark.slow
def test_a_forgotten_record_does_not_tick_a_later_one_of_its_id(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    name = open_topic(bootstrap, topic(partitions=1))
    box = Outbox(tmp_path / "outbox.sqlite", Kafka(bootstrap))
    box.put([("1", RECORD._replace(topic=name)), ("2", RECORD._replace(topic=name))])
    send_all(box, bootstrap)
    assert box.forget(keep=1) == 1
    box._keep_positions(name, None, {0: 0})  # as where some other record waited all the time
    box.put([("1", RECORD._replace(topic=name))])
    assert box.recover() == 0
    assert [record_id for record_id, _ in box.list_waiting()] == ["1"]


@pytest.mark.slow
def test_what_arrived_in_a_topic_that_was_recreated_is_found(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position was of the topic before: nothing in front of it was looked at, and all of it was sent again."""
    name, file = open_topic(bootstrap, topic(partitions=2)), tmp_path / "outbox.sqlite"
    box = Outbox(file, Kafka(bootstrap))
    box.put((f"old-{n}", Record(name, None, b"v", partition=n % 2)) for n in range(10))
    send_all(box, bootstrap)
    box.close()
    recreate(bootstrap, name, partitions=1)
    box = Outbox(file, Kafka(bootstrap))
    box.put((f"new-{n}", Record(name, None, b"v", partition=0)) for n in range(8))
    box.close()
    killed_before_any_tick(file, bootstrap, monkeypatch)
    for found in (8, 0):  # and the next time nothing is left to find
        box = Outbox(file, Kafka(bootstrap))
        assert box.recover() == found
        assert box.list_waiting() == []
        box.close()


def recreate(bootstrap: str, name: str, partitions: int) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([name])[name].result(30)
    wait_until(lambda: name not in admin.list_topics(timeout=60).topics, 30, f"the deletion of {name}")
    create_topic(bootstrap, name, partitions, {})
    open_topic(bootstrap, name)


@pytest.mark.slow
def test_a_file_of_the_version_before_is_taken_over_with_what_it_had_sent(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    """Its records have nothing but their ids."""
    name, file = open_topic(bootstrap, topic(partitions=1)), tmp_path / "outbox.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as old, old:
        old.execute(
            "CREATE TABLE outbox (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, key BLOB, "
            'value BLOB, headers TEXT, fixed INTEGER, time INTEGER, partition INTEGER, "offset" INTEGER)'
        )
        old.execute(
            'CREATE TABLE positions (topic TEXT NOT NULL, partition INTEGER NOT NULL, "offset" INTEGER NOT NULL, '
            "PRIMARY KEY (topic, partition))"
        )
        row = "INSERT INTO outbox (id, topic, value, headers) VALUES (?, ?, 'v', '[]')"
        old.executemany(row, [("sent", name), ("lost", name)])
        old.execute("INSERT INTO positions VALUES (?, 0, 0)", (name,))
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        for record_id in ("sent", "later"):
            producer.send(Record(name, None, b"v", [(ID_HEADER, record_id.encode())]))
    box = Outbox(file, Kafka(bootstrap))
    box.put([("later", Record(name, None, b"v"))])
    assert box.recover() == 1
    assert [record_id for record_id, _ in box.list_waiting()] == ["lost", "later"]


@pytest.mark.slow
def test_what_arrived_while_more_is_sent_is_not_sent_again(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    name = topic(partitions=1)
    box = Outbox(tmp_path / "outbox.sqlite", Kafka(bootstrap))
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        for n in range(10):
            box.put([(str(n), Record(name, None, b"v"))])
            box.send(producer)
            producer.flush(60)  # the tick is there, and not written
    box.close()
    assert ids(bootstrap, name) == [str(n) for n in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_what_a_topic_of_a_broker_forgot_is_withheld(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two is deleted; or a third was handed over, and may have been compacted away."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    name, file = open_topic(bootstrap, topic(**{"cleanup.policy": policy})), tmp_path / "outbox.sqlite"
    box = Outbox(file, Kafka(bootstrap))
    box.put((str(n), Record(name, b"%d" % n, b"v")) for n in range(2))
    box.close()
    killed_before_any_tick(file, bootstrap, monkeypatch)
    if policy == "delete":
        admin = AdminClient({"bootstrap.servers": bootstrap})
        [gone] = admin.delete_records([TopicPartition(name, 0, 1)]).values()
        gone.result(30)
    else:
        box = Outbox(file, Kafka(bootstrap))
        box.put([("2", Record(name, b"2", b"v"))])
        box._note_handed_over(3, 3)
        box.close()
    box = Outbox(file, Kafka(bootstrap))
    assert box.recover() == 1 + (policy == "compact")
    assert box.list_withheld() == ["2" if policy == "compact" else "0"]
    send_all(box, bootstrap)
    assert Kafka(bootstrap).read_topic_state(name).partitions[0].high_watermark == 2, "nothing was sent again"
    box.close()


@pytest.mark.slow
def test_after_a_quiet_end_the_next_recovery_reads_no_more_than_it_must(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    name = topic(partitions=1)
    box = Outbox(tmp_path / "outbox.sqlite", Kafka(bootstrap))
    outcomes: list[Outcome] = []
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        for n in range(3):
            box.put([(str(n), Record(name, None, b"v"))])
            box.send(producer, lambda _, outcome: outcomes.append(outcome))
            producer.flush(60)
            box.save()
    assert [outcome.offset for outcome in outcomes] == [0, 1, 2]
    box.put([("next", Record(name, None, b"v"))])
    windows = box._load_windows(Kafka(bootstrap).read_topic_state(name))
    assert list(box._read_outcomes(name, windows)) == []
    assert box.recover() == 0
