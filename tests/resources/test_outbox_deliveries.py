"""The outbox on a real broker: each id is in the topic once, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from dev.generator import SOURCES, Order, Target, generate, outbox_file
from dev.processes import wait_until
from dev.readings import end_offsets
from highwater.resources.delivery import DeliveryEnd
from highwater.resources.kafka import Kafka
from highwater.resources.outbox import ID_HEADER, Outbox
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Outcome, Record
from highwater.slices import OffsetRange
from tests.conftest import TopicFactory, create_topic
from tests.helpers.outboxes import RECORD, show_policies
from tests.helpers.support import open_forkserver, read_topic

# The longer series is of `make test-long`.
SERIES = pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
RECORDS = 20_000


def work(file: Path, bootstrap: str, ready: Path) -> None:
    """What a child does until it is killed: find out what arrived, and send the rest."""
    box = Outbox(file, Kafka(bootstrap))
    box.recover()
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        ready.touch()
        box.send(producer)
        producer.close()
    box.close()


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    return show_policies(monkeypatch)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
@SERIES
def test_whatever_is_killed_every_id_is_there_once_and_only_those_are_ticked(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, kills: int
) -> None:
    name, file = topic(partitions=3), tmp_path / "outbox.sqlite"
    chance = random.Random(7)
    context = open_forkserver()
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
    context = open_forkserver()
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
def test_records_delivered_to_a_recreated_topic_are_found(
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
def test_records_delivered_during_sending_are_not_sent_again(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
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
def test_records_deleted_or_compacted_by_a_broker_are_withheld(
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
