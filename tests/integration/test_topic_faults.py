"""Faults of topics: absent, deleted, recreated, expired or grown; each is reported with both values and a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dev.processes import wait_until
from highwater.orchestration.build import build_defs
from tests.conftest import create_topic
from tests.helpers.crash_support import PARTITIONS, TABLES, Deployment
from tests.helpers.faults import (
    MENDED,
    PERMANENT,
    Ours,
    ensure_decided,
    ensure_rows,
    find_failure,
    read_rows_by_place,
)
from tests.helpers.support import Message, order_message, read_rows, read_topic, send

if TYPE_CHECKING:
    from tests.conftest import TopicFactory


pytestmark = pytest.mark.slow


def test_an_absent_topic_and_then_an_empty_one(ours: Ours, instance: dg.DagsterInstance) -> None:
    name = f"{ours.held.stream.topic}x"
    other = Ours.on(replace(ours.held, stream=replace(ours.held.stream, topic=name)), instance)
    absent = other.fault()
    assert absent is not None
    assert ours.held.stream.topic in absent.problem
    assert "create the topic" in absent.remedy
    reported = other.command("plan", "orders")
    assert reported.exit_code == PERMANENT
    assert f"topic {name!r} does not exist" in reported.output
    assert "remedy: create the topic" in reported.output
    create_topic(ours.held.bootstrap, name, PARTITIONS, {})
    result = other.tick()
    assert "nothing new" in str(result.skip_message)
    assert other.held.slices() == {}
    assert other.command("plan", "orders", "--yes").exit_code == MENDED
    other.held.send(60)
    assert len(other.taken()) == 1
    other.held.check_whole()


def test_a_deleted_topic_leaves_the_other_stream_untouched(ours: Ours, topic: TopicFactory) -> None:
    from confluent_kafka.admin import AdminClient

    from assets.streams.payments import STREAM as PAYMENTS

    held = ours.held
    payments = replace(PAYMENTS, topic=topic("payments", partitions=2), limits=held.stream.limits)
    both = Ours(held, ours.instance, build_defs(streams=[held.stream, payments]))
    booking = {"account_id": "a", "payment_id": "p", "amount": 1.25, "currency": "EUR"}
    values = [json.dumps({**booking, "booked_at": f"2026-03-01T10:00:0{n}Z"}).encode() for n in range(4)]
    send(held.bootstrap, payments.topic, [Message(b"a|p", value, n % 2) for n, value in enumerate(values)])
    held.send(60)
    keys = {one.partitions_def_name: one.partition_keys for one in both.tick().dynamic_partitions_requests or []}
    [early], [paid] = keys["orders_slices"], keys["payments_slices"]
    both.took(paid, paid, "payments")
    before = {table: read_rows(held.lake.build_table_path("payments", table)) for table in TABLES}
    assert {row["key"] for row in before["events"]} == {"a|p"}
    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    admin.delete_topics([payments.topic])[payments.topic].result(30)
    wait_until(lambda: both.fault("payments") is not None, 30, "the end of the topic")
    held.send(60)
    [behind] = both.planned()
    both.took(early, behind)
    held.check_whole()
    again = both.run(paid, stream="payments")
    assert again.success, "rows that Kafka cannot give again stay"
    after = {table: read_rows(held.lake.build_table_path("payments", table)) for table in TABLES}
    for table in ("raw", "rejects"):
        assert after[table] == before[table]
    assert {row["origin_offset"] for row in after["events"]} == {row["origin_offset"] for row in before["events"]}


def test_a_recreated_topic(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    [old] = ours.taken()
    held.send(30)
    [never_read] = ours.planned()
    before = read_rows_by_place(held)
    ids = [topic_id(held)]
    recreate(held)
    ids.append(topic_id(held))
    # While a partition has no leader yet, no look at the topic counts, and the next tick decides.
    wait_until(lambda: ours.fault() is not None, 30, "a tick that finds another topic")
    recreated = ours.fault()
    assert recreated is not None
    assert recreated.problem.endswith(f"stored: topic ID {ids[0]}; found: topic ID {ids[1]}")
    assert recreated.problem.startswith("TopicRecreatedError")
    assert "accept-loss" in recreated.remedy
    assert ours.command("plan", "orders").exit_code == PERMANENT
    reported = find_failure(ours.run(never_read))
    assert (reported["error"], reported["stored"], reported["found"]) == ("TopicRecreatedError", *ids)
    again = ours.run(old)
    assert again.success, "its rows stay"
    ensure_rows(held, before)
    accepted = ours.command("accept-loss", "orders", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    held.send(60)
    assert ours.taken()
    rows = read_rows(str(held.path("raw")))
    found = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in rows if r["generation"] == 1}
    assert found == read_topic(held.bootstrap, held.stream.topic)
    assert len(rows) == len(found) + len(before)
    ensure_decided(held)


def topic_id(held: Deployment) -> str:
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    return str(admin.describe_topics(TopicCollection([name]))[name].result(60).topic_id)


def recreate(held: Deployment) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    admin.delete_topics([name])[name].result(30)
    wait_until(lambda: name not in admin.list_topics(timeout=60).topics, 30, f"the end of {name}")
    create_topic(held.bootstrap, name, PARTITIONS, {})


def test_offsets_that_retention_took_before_they_were_planned(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.taken()
    before = read_topic(held.bootstrap, held.stream.topic)
    planned = held.slices().popitem()[1][0][1]
    held.send(60)
    delete_before(held, 0, planned + 5)
    [others] = ours.taken()
    reported = ours.command("plan", "orders")
    assert reported.exit_code == PERMANENT
    for text in (
        f"stored: planned to offset {planned}",
        f"found:  log start offset {planned + 5}",
        "accept-loss orders",
    ):
        assert text in reported.output
    assert held.slices()[others][0] == (planned, planned), "the other partitions go on"
    accepted = ours.command("accept-loss", "orders", "--partition", "0", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    assert ours.taken()
    ensure_rows(held, before | read_topic(held.bootstrap, held.stream.topic))
    ensure_decided(held)
    assert ours.command("plan", "orders").exit_code == MENDED


def test_offsets_that_retention_took_before_they_were_read(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    delete_before(held, 0, 5)
    reported = find_failure(ours.run(key))
    end = held.slices()[key][0][1]
    values = (reported["error"], reported["stored"], reported["found"])
    assert values == ("OffsetsExpiredError", f"[0, {end})", "log start offset 5")
    assert "accept-loss" in reported["remedy"]
    accepted = ours.command("accept-loss", "orders", "--partition", "0", "--yes", "--by", "anna")
    assert accepted.exit_code == MENDED, accepted.output
    ours.repaired()
    held.check_whole()


def delete_before(held: Deployment, partition: int, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    for future in admin.delete_records([TopicPartition(held.stream.topic, partition, offset)]).values():
        future.result(30)


def test_added_partitions_join_the_next_slice(ours: Ours) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    held = ours.held
    held.send(60)
    [before] = ours.planned()
    admin = AdminClient({"bootstrap.servers": held.bootstrap})
    name = held.stream.topic
    admin.create_partitions([NewPartitions(name, PARTITIONS + 1)])[name].result(30)
    wait_until(lambda: len(admin.list_topics(name, timeout=60).topics[name].partitions) > PARTITIONS, 30, "a partition")
    send(held.bootstrap, name, [order_message("late", 1, partition=PARTITIONS)])
    wait_until(lambda: bool(ours.planned()), 30, "a slice of the new partition")
    joined, ranges = held.slices().popitem()
    assert ranges[PARTITIONS] == (0, 1)
    ours.took(before, joined)
    ensure_rows(held, read_topic(held.bootstrap, name))
    ensure_decided(held)
