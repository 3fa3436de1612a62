"""DLQ topics that other systems filled: whose an origin is, and what becomes of such records.

The headers are bytes as those systems write them: Kafka Connect and Kafka Streams text, Spring big-endian numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets.streams.orders import STREAM as ORDERS
from highwater import envelope
from highwater.assets.foreign import read_main_log
from highwater.assets.work import Work
from highwater.declaration import Foreign
from highwater.envelope import MAX_BYTES, Envelope, Origin, open_envelope
from highwater.foreign import MainLog, NamedOrigin, parse_foreign_origin, resolve_origin
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.reporting.locating import locate
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing.stream_ticks import select_tiers_to_plan
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.ledger import Ledger
from highwater.routing import build_stream_of_topic as asked
from highwater.routing import build_tier_stream, find_destination, find_tier, format_topic_option
from highwater.slices import OffsetRange, Slice
from tests.conftest import create_topic
from tests.helpers.bench_records import plan_due
from tests.helpers.foreign_records import (
    BAD,
    DELAY,
    HOUR,
    MS,
    NOW,
    ONE,
    PUBLISHED,
    SOUND,
    THEIRS,
    THREE,
    TRACE,
    Headers,
    connect,
    generation,
    lost,
    retryable,
    spring,
    streams,
)
from tests.helpers.support import Message, customers, make_stream, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.helpers.support import Bench


STREAM = replace(make_stream("orders"), foreign=(Foreign("sink.errors", DELAY),))


@pytest.mark.parametrize(
    ("log", "place", "expected"),
    [
        (ONE, (0, 0, 9), None),  # before the start of planning
        (ONE, (0, 0, 10), 0),
        (ONE, (0, 0, 10**9), 0),  # not planned yet
        (ONE, (0, 1, 20), None),  # lost
        (ONE, (0, 1, 30), 0),
        (ONE, (0, 2, 0), 0),  # its start is not decided
        (ONE, (0, 7, 0), 0),  # it joins later
        (THREE, (0, 0, 5), None),
        (THREE, (0, 0, 49), 0),
        (THREE, (0, 0, 50), 1),  # what the first one did not plan any more
        (THREE, (0, 1, 45), 0),  # planned, and cut off since
        (THREE, (1, 1, 39), None),
        (THREE, (1, 1, 44), 1),
        (THREE, (1, 1, 45), None),  # of the log that is gone, or of the new one: who knows
        (THREE, (0, 0, 80), None),
        (THREE, (2, 0, 80), 2),
    ],
)
def test_an_offset_is_of_the_slices_that_read_it(
    log: MainLog, place: tuple[int, int, int], expected: int | None
) -> None:
    assert log.find_reader(*place) == expected


LOGS = st.builds(
    lambda starts, ends, ids, losses: MainLog(
        [generation(n, n, chr(97 + ids[n]), **starts[n]) for n in range(3)],
        [lost(n, p, a, a + b) for n, p, a, b in losses],
        {n: ends[n] for n in range(2)},
    ),
    st.tuples(*[st.dictionaries(st.sampled_from(["p0", "p1"]), st.none() | st.integers(0, 9))] * 3),
    st.tuples(*[st.dictionaries(st.integers(0, 2), st.integers(0, 15))] * 2),
    st.tuples(*[st.integers(0, 1)] * 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 15), st.integers(1, 5)), max_size=4),
)


@given(LOGS, st.integers(0, 2), st.integers(0, 3), st.integers(0, 25))
def test_the_spans_that_spark_joins_say_what_the_rule_says(
    log: MainLog, number: int, partition: int, offset: int
) -> None:
    hits = [
        span
        for span in log.compute_unread_spans()
        if (span.generation, span.partition) == (number, partition)
        and span.start <= offset
        and (span.end is None or offset < span.end)
    ]
    assert len(hits) <= 1, "a second one would double the record"
    assert (hits[0].reader if hits else number) == log.find_reader(number, partition, offset)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (NamedOrigin("orders", 0, 10, MS), Origin("orders", 0, 0, 10)),
        (NamedOrigin("orders", 0, 9, MS), Origin("orders.foreign/orders", 0, 0, 9)),
        (NamedOrigin("legacy", 0, 10, MS), Origin("orders.foreign/legacy", 0, 0, 10)),
        (NamedOrigin("orders.dlq.1", 0, 10, MS), Origin("orders.foreign/orders.dlq.1", 0, 0, 10)),
    ],
)
def test_origins_outside_the_main_topic_have_their_own_namespace(found: NamedOrigin, expected: Origin) -> None:
    assert resolve_origin(STREAM, ONE, found, MS) == expected
    assert STREAM.is_origin(expected.topic)


def test_the_ledger_says_what_its_slices_read_and_an_older_look_can_be_had_again(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    first = replace(generation(0, p0=0), stream=STREAM.name)
    ledger.topics.open_generation(first)
    slice_ = Slice(STREAM.name, "orders", "a", 0, 0, {0: OffsetRange(0, 8), 1: OffsetRange(0, 5)}, NOW)
    assert ledger.add([slice_], [lost(0, 0, 8, 12)])
    assert read_main_log(ledger, STREAM) == MainLog(
        [*ledger.topics.list_generations("orders", "orders")], [lost(0, 0, 8, 12)], {}
    )
    [moved] = ledger.topics.list_generations("orders", "orders")
    assert ledger.topics.open_generation(replace(generation(1, 10, "b", p0=0), first_ordinal=1), seen=moved)
    assert read_main_log(ledger, STREAM).ends == {0: {0: 12, 1: 5}}
    before = read_main_log(ledger, STREAM, {"generations_seen": 1, "losses_seen": 0})
    assert (len(before.generations), before.losses, before.ends) == (1, [], {})


def test_rejects_of_another_system_count_as_rejected_once() -> None:
    assert find_tier(STREAM, "sink.errors") == 1
    assert find_destination(STREAM, "unresolved", 1) == "orders.dlq.2"
    assert find_destination(replace(STREAM, tiers=()), "unresolved", 1) == "orders.parked"
    assert [*STREAM.delays.values()] == [*STREAM.tiers, DELAY]


def test_commands_name_the_topic_that_they_mean() -> None:
    assert build_tier_stream(STREAM, "sink.errors").topic == "sink.errors"
    assert asked(STREAM, "sink.errors") == build_tier_stream(STREAM, "sink.errors")
    assert format_topic_option(build_tier_stream(STREAM, "sink.errors"), "sink.errors") == " --topic sink.errors"
    assert format_topic_option(STREAM, "orders") == ""


def test_their_topics_wait_for_the_first_plan_of_the_main_topic() -> None:
    """Before it nobody knows whether the main topic's slices will read what their records name."""
    assert select_tiers_to_plan(STREAM, begun=False) == ["orders.dlq.1", "orders.dlq.2"]
    assert select_tiers_to_plan(STREAM, begun=True) == ["orders.dlq.1", "orders.dlq.2", "sink.errors"]


@pytest.mark.parametrize(
    ("topic", "believed"),
    [
        ("orders", True),
        ("sink.errors", True),
        ("orders.foreign/legacy", True),
        ("payments", False),
        ("payments.foreign/legacy", False),
        ("orders.foreign/", False),
        ("orders.foreign/a' OR '1'='1", False),
        ("orders.foreign/legacy\n", False),
        ("ordersXforeign/legacy", False),
    ],
)
def test_an_envelope_may_name_the_namespace_of_its_stream(topic: str, believed: bool) -> None:
    headers = Envelope(topic, 0, 0, 7, MS, 2, "unresolved", "", "sink.errors@0000000", NOW).to_headers()
    assert (open_envelope(headers, STREAM.is_origin) is not None) == believed


def publish(bootstrap: str, topic: str, records: list[tuple[Message, int]]) -> None:
    """Send records with timestamps of their own, as Kafka Connect does."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for message, timestamp in records:
        producer.produce(topic, message.value, message.key, 0, timestamp=timestamp, headers=[*message.headers])
    assert producer.flush(30) == 0


def due(bench: Bench, topic: str) -> Slice:
    [slice_] = plan_due(bench, topic)
    return slice_


def sent_to(bench: Bench, topic: str) -> list[Headers]:
    """The headers of what is in a topic's first partition."""
    state = bench.kafka.read_topic_state(topic).partitions[0]
    found = bench.kafka.read(topic, {0: OffsetRange(0, state.last_stable or 0)}, seconds=10)
    return [list(message.headers() or []) for message in found]  # type: ignore[arg-type]


@pytest.mark.slow
def test_records_that_other_systems_rejected_are_retried_once(bench: Bench) -> None:
    """Kafka Connect and Spring read the same topic, and another one, and sent what they could not take to one topic."""
    theirs = f"{bench.stream.topic}.sink.errors"
    create_topic(bench.bootstrap, theirs, 1, {"max.message.bytes": "2000000"})
    second = timedelta(seconds=1)
    bench.stream = replace(bench.stream, tiers=(second, 2 * second), foreign=(Foreign(theirs, second),))
    main = bench.stream.topic
    late, accepted, parked = (
        order_message("o0", 1, customer_id="late"),
        order_message("o1", 1),
        order_message("o2", 1, amount="twelve"),
    )
    bench.send(late, accepted, parked)
    [first] = Planner(bench.ledger, bench.kafka).tick(bench.stream, datetime.now(UTC)).slices
    bench.materialise(first)
    bench.send(order_message("o3", 1))  # what is not planned yet is left to its slice
    times = {row["offset"]: int(row["timestamp"].timestamp() * 1000) for row in bench.rows("raw")}
    unread = order_message("o3", 1)
    fixed, unknown = order_message("o2", 1), order_message("x9", 1, customer_id="later")
    begin = times[0]

    def record(message: Message, headers: Headers, timestamp: int = begin) -> tuple[Message, int]:
        return Message(message.key, message.value, 0, [*TRACE, *headers]), timestamp

    publish(
        bench.bootstrap,
        theirs,
        [
            record(late, connect(main, 0, 0), times[0]),
            record(accepted, spring(main, 0, 1, times[1])),
            record(order_message("o2", 2), spring(main, 0, 2, times[2] + 1)),  # another record by the same offset
            record(fixed, spring(main, 0, 2, times[2])),
            record(unread, connect(main, 0, 3)),
            record(order_message("x0", 1), retryable("legacy", 6, 0)),
            record(order_message("x0", 1), streams("legacy", 6, 0)),
            record(unknown, connect("legacy", 6, 1)),
            record(order_message("x2", 1), []),
            record(Message(b"x3", None), connect("legacy", 6, 2)),
        ],
    )
    customers(bench.lake, ["c1", "late"])
    assert read_stream_status(bench.ledger, bench.kafka, bench.stream, {}).dlq[2].topic == theirs
    slice_ = due(bench, theirs)
    reports = bench.materialise(slice_)
    counts = reports["events"][0].counts
    split = {name: counts[name] for name in ("raw", "events", "rejects", "tombstones", "superseded")}
    assert split == {"raw": 10, "events": 3, "rejects": 2, "tombstones": 1, "superseded": 4}
    namespace = f"{main}.foreign/"
    taken = {(row["origin_topic"], row["origin_offset"], row["key"]): row for row in bench.rows("events")}
    assert set(taken) == {
        (main, 0, "o0"),
        (main, 1, "o1"),
        (main, 2, "o2"),
        (namespace + "legacy", 0, "x0"),
    }
    assert (taken[main, 0, "o0"]["retries"], taken[main, 2, "o2"]["version"]) == (1, 1)
    assert int(taken[namespace + "legacy", 0, "x0"]["origin_timestamp"].timestamp() * 1000) == MS
    rejected = {
        (row["origin_topic"], row["origin_offset"]): row for row in bench.rows("rejects") if row["slice"] == slice_.key
    }
    assert set(rejected) == {(namespace + "legacy", 1), (namespace + theirs, 8)}
    assert "no header __connect.errors.topic" in rejected[namespace + theirs, 8]["detail"]
    [again] = sent_to(bench, bench.stream.tier_topics[1])
    reported = dict(again)
    assert again[:2] == TRACE
    assert reported["__connect.errors.exception.stacktrace"].startswith(b"java.lang")
    assert reported[envelope.ORIGIN_TOPIC] == (namespace + "legacy").encode()
    assert (reported[envelope.ATTEMPT], reported[envelope.ORIGIN_OFFSET]) == (b"2", b"1")
    ensure_the_sum(bench)
    ensure_followed(bench, theirs)
    assert (
        int(ensure_dlq_topics(bench.kafka, bench.stream)[bench.stream.parked_topic].config["max.message.bytes"])
        == 2_000_000 + MAX_BYTES
    )

    customers(bench.lake, ["c1", "late", "later"])
    [rest] = Planner(bench.ledger, bench.kafka).tick(bench.stream, datetime.now(UTC)).slices
    tiers = [due(bench, tier) for tier in bench.stream.tier_topics]
    bench.materialise(first, slice_, rest, *tiers)
    found = Counter((row["key"], row["slice"]) for row in bench.rows("events"))
    theirs_again = {"o0": slice_.key, "o2": slice_.key, "x0": slice_.key}
    expected = {**theirs_again, "o1": first.key, "o3": rest.key, "x9": tiers[1].key}
    assert found == Counter({*expected.items()}), "what was sent on is left to the tier"
    ensure_the_sum(bench)


def ensure_the_sum(bench: Bench) -> None:
    found = count_ends(bench.ledger, bench.lake, bench.stream)
    assert found.error is None, found


def ensure_followed(bench: Bench, theirs: str) -> None:
    """Each record on their topic can be followed to its end."""
    ends = [
        locate(bench.ledger, bench.kafka, bench.lake, bench.stream, theirs, 0, offset)[0].end for offset in range(10)
    ]
    assert ends[:4] == ["accepted"] * 4, "by their origin, whichever copy it was"
    assert ends[4:] == ["superseded", "accepted", "accepted", "waiting", "parked", "tombstone"]


@pytest.mark.slow
def test_spark_reports_the_open_generation_as_python_does(spark: SparkSession) -> None:
    """Also of a hundred: what is sent to Spark must not nest so deep."""
    from highwater.assets import foreign

    logs = {"one": ONE, "three": THREE, "none": MainLog([])}
    logs["many"] = MainLog([generation(n, n, p0=0) for n in range(120)])
    times = [(time, MS + hours * HOUR) for time in (None, MS + 5 * HOUR, MS + 50 * HOUR) for hours in (0, 5, 60)]
    reported = spark.createDataFrame(times, "named_ms BIGINT, timestamp_ms BIGINT")
    found = reported.select([foreign._find_open_offset(log).alias(name) for name, log in logs.items()]).collect()
    expected = [tuple(log.find_open_offset(time, appended) for log in logs.values()) for time, appended in times]
    assert [tuple(row) for row in found] == expected


@pytest.mark.slow
def test_spark_reads_their_headers_as_python_does(spark: SparkSession) -> None:
    from highwater.assets import foreign

    cases: Mapping[str, tuple[Headers, int]] = {
        **{name: (headers, kind) for name, (headers, kind, _) in SOUND.items()},
        **{name: (headers, 0) for name, headers in BAD.items()},
    }
    rows: list[Any] = [(name, 77, kind, headers or None) for name, (headers, kind) in cases.items()]
    schema = "name STRING, timestamp_ms BIGINT, timestamp_type INT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    reported = spark.createDataFrame(rows, schema).withColumns(foreign.build_named_origin())
    for row in reported.withColumn("problem", foreign.find_problem()).collect():
        headers, kind = cases[row["name"]]
        parts = (row["named_topic"], row["named_partition"], row["named_offset"], row["named_ms"])
        found = None if row["problem"] else NamedOrigin(*parts)
        assert found == parse_foreign_origin(headers, 77, kind), row["name"]


@pytest.mark.slow
def test_spark_takes_a_copy_for_as_old_as_python_does(spark: SparkSession) -> None:
    from highwater.assets.origins import build_publication_time

    nothing: Any = None
    stream = replace(ORDERS, foreign=(THEIRS,))
    work = Work(stream, [], spark, nothing, nothing, nothing, print)
    rows: list[Any] = [
        (name, topic, 77, kind, headers or None) for name, (topic, headers, kind, _) in PUBLISHED.items()
    ]
    schema = (
        "name STRING, topic STRING, timestamp_ms BIGINT, timestamp_type INT, "
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    )
    found = spark.createDataFrame(rows, schema).select("name", build_publication_time(work).alias("ms")).collect()
    assert {row["name"]: row["ms"] for row in found} == {name: ms for name, (*_, ms) in PUBLISHED.items()}
