"""Records at the limits of what Kafka and the tables can hold: no slice fails, and every reader reads the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.assets import published
from highwater.assets.client_reads import FOLDER
from highwater.declaration import Accepted, Breaker
from highwater.orchestration import metadata
from highwater.resources import spark as settings
from highwater.resources.delta import open_table, query
from highwater.slices import Slice
from tests.helpers.bench_records import published as read
from tests.helpers.support import Bench, Message, make_bench, order, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import TopicFactory

# The broker refuses these unless a topic is set to take them; those up to 3.9 take them without.
ANY_TIMESTAMP = {f"message.timestamp.{side}.max.ms": str(2**63 - 1) for side in ("before", "after")}
# Else retention takes what looks old.
ANY_TIMESTAMP["retention.ms"] = "-1"
YEAR_1, YEAR_10000 = -62_135_596_800_000, 253_402_300_800_000
# The last day of the Julian calendar, which Spark takes for another one.
JULIAN = -12_219_379_200_000
NANOSECONDS = 1_767_225_600_000_000_000
TIMESTAMPS = [
    *(NANOSECONDS, 2**63 - 1, -(2**63) + 1, YEAR_1, YEAR_1 - 1, YEAR_10000, YEAR_10000 - 1, JULIAN, JULIAN - 1),
    *(-2, -1, 1, 9_223_372_036_854_775, 9_223_372_036_854_776, -2_208_988_800_001),
]


@pytest.fixture
def any_time(topic: TopicFactory, spark: SparkSession, bootstrap: str, tmp_path: Path) -> Bench:
    """A stream whose topic takes any timestamp."""
    return make_bench(topic(partitions=3, **ANY_TIMESTAMP), bootstrap, spark, tmp_path)


def by_offset(rows: list[dict[str, Any]], column: str, place: str = "origin_offset") -> dict[int, Any]:
    return {row[place]: row[column] for row in rows}


def at(message: Message, timestamp: int) -> Message:
    return Message(message.key, message.value, message.partition, message.headers, timestamp)


@pytest.mark.slow
def test_any_timestamp_of_a_record_reaches_every_table(any_time: Bench) -> None:
    """Nanoseconds ended each run of the slice by Spark's "long overflow"; year 1 and 1582 came as replaced history."""
    bench, expected = any_time, {}
    for number, timestamp in enumerate(TIMESTAMPS):
        bench.send(at(order_message(f"o{number}", 1), timestamp))
        expected[number] = timestamp
    bad = [Message(b"k", b"{", 1, timestamp=timestamp) for timestamp in TIMESTAMPS]
    # Of equal versions the earliest origin wins, which the timestamps show.
    twice = [at(order_message("twice", 1, 2, amount=n), ms) for n, ms in ((1, NANOSECONDS), (2, -1), (3, YEAR_10000))]
    bench.send(*bad, *twice)
    # The last record of each slice has a fingerprint, which the read holds against the plan.
    ends = [0, *(TIMESTAMPS.index(ms) + 1 for ms in (NANOSECONDS, YEAR_1, JULIAN)), len(TIMESTAMPS)]
    slices = [bench.plan(n, p0=(ends[n], ends[n + 1])) for n in range(3)]
    slices.append(bench.plan(3, p0=(ends[3], ends[4]), p1=(0, ends[4]), p2=(0, 3)))
    # By itself, since none of its timestamps overflows: one that does has all slices of a run read by our own consumer.
    bench.materialise(slices.pop(2))
    bench.materialise(*slices)

    raw = bench.rows("raw")
    assert by_offset([row for row in raw if row["partition"] == 0], "timestamp_ms", "offset") == expected
    assert by_offset([row for row in raw if row["partition"] == 1], "timestamp_ms", "offset") == expected
    for row in raw:
        inside = YEAR_1 <= row["timestamp_ms"] < YEAR_10000
        assert (row["timestamp"] is not None) == inside
    events = [row for row in bench.rows("events") if row["origin_partition"] == 0]
    assert by_offset(events, "origin_timestamp_ms") == expected
    assert by_offset(bench.rows("rejects"), "origin_timestamp_ms") == expected
    assert by_offset(bench.rows("dlq"), "origin_timestamp_ms") == expected
    assert bench.current()["twice"]["amount"] == 2
    assert {check.partition(" of ")[0] for check in bench.failing()} <= {"one_content_a_version"}
    assert list((Path(bench.lake.root) / bench.stream.name / FOLDER).rglob("*.parquet")) == []


BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_US, LAST_US = YEAR_1 * 1000, YEAR_10000 * 1000 - 1
LIMITS: dict[str, tuple[str, list[Any]]] = {
    "us": ("BIGINT", [FIRST_US, LAST_US, FIRST_US + 1, -1, 0, -9_223_372_036_854_776, 9_223_372_036_854_776]),
    "long": ("BIGINT", [-(2**63), 2**63 - 1, 0, -1]),
    "integer": ("INT", [-(2**31), 2**31 - 1, 0, -1]),
    "text": ("STRING", ["", "\0", "a\0b", "\U0001f600", "\uffff", "e\u0301", '"\\', "x" * 70_000]),
    "bytes": ("BINARY", [b"", b"\0", b"\xff\xfe", b"\xed\xa0\xbd", bytes(range(256))]),
    "flag": ("BOOLEAN", [True, False]),
    "money": ("DECIMAL(12,2)", [Decimal("9999999999.99"), Decimal("-9999999999.99"), Decimal("0.01"), Decimal("0.00")]),
    "whole": ("DECIMAL(38,0)", [Decimal(10**38 - 1), Decimal(1 - 10**38), Decimal(0)]),
    "fine": ("DECIMAL(38,38)", [Decimal("0." + "9" * 38), Decimal("0." + "0" * 37 + "1")]),
    "headers": (
        "ARRAY<STRUCT<key: STRING, value: BINARY>>",
        [[], [{"key": "a\0", "value": None}, {"key": "", "value": b""}, {"key": "\U0001f600", "value": b"\xff"}]],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("written_as", ["TIMESTAMP_MICROS", "INT96"])
def test_extreme_values_of_spark_are_read_unchanged_without_a_jvm(
    spark: SparkSession, tmp_path: Path, written_as: str
) -> None:
    """9999-12-31 was read as 1816, and year 1 as 1754: Spark's INT96 was taken for nanoseconds, without an error.

    A file that was written so, before or by somebody else's session, is read right too.
    """
    seeded = random.Random(29)
    rows: list[dict[str, Any]] = [dict.fromkeys(LIMITS)]
    rows += [{**dict.fromkeys(LIMITS), name: value} for name, (_, values) in LIMITS.items() for value in values]
    for _ in range(100):
        row = {name: seeded.choice([None, *values]) for name, (_, values) in LIMITS.items()}
        rows.append({**row, "us": seeded.randint(FIRST_US, LAST_US)})
    rows = [{"number": n, **row} for n, row in enumerate(rows)]
    kinds = {name: kind for name, (kind, _) in LIMITS.items()}
    # PySpark takes decimals of one scale alone.
    exact = {name: kind for name, kind in kinds.items() if kind.startswith("DECIMAL")}
    schema = ", ".join(["number INT", *(f"{name} {kinds[name] if name not in exact else 'STRING'}" for name in kinds)])
    path = str(tmp_path / "limits")
    given = [tuple(f"{v:f}" if isinstance(v, Decimal) else v for v in row.values()) for row in rows]
    casts = [f"CAST({name} AS {kind}) AS {name}" for name, kind in exact.items()]
    made = spark.createDataFrame(given, schema).selectExpr(
        f"* EXCEPT (us, {', '.join(exact)})", "TIMESTAMP_MICROS(us) AS moment", *casts
    )
    assert spark.conf.get(settings.TIMESTAMPS) == "TIMESTAMP_MICROS"
    spark.conf.set(settings.TIMESTAMPS, written_as)
    try:
        made.coalesce(1).write.format("delta").save(path)
    finally:
        spark.conf.set(settings.TIMESTAMPS, "TIMESTAMP_MICROS")

    table = open_table(path)
    assert table is not None
    found = {row["number"]: row for row in query(table, "SELECT * FROM t")}
    for row in rows:
        us = row.pop("us")
        row["moment"] = None if us is None else BEGIN + timedelta(microseconds=us)
        assert found[row["number"]] == row
    late = f"arrow_cast({LAST_US}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    picked = query(table, f"SELECT number FROM t WHERE moment = {late}")
    assert {row["number"] for row in picked} == {
        row["number"] for row in rows if row["moment"] == datetime.max.replace(tzinfo=UTC)
    }


RECORDS, WIDTH = 20_000, 5_000
EVENT, REJECT, TOMBSTONE, UNKNOWN = "event", "reject", "tombstone", "unknown"
Made = tuple[str, bytes | None, bytes | None]


def encoded(**changes: object) -> Callable[[random.Random, str], Made]:
    """A sound order but for the changes, with the end that the rules of the stream give it."""

    def make(_: random.Random, key: str) -> Made:
        return EVENT, key.encode(), json.dumps(order(key, 1) | changes).encode()

    return make


def rejected(make: Callable[[random.Random, str], Made]) -> Callable[[random.Random, str], Made]:
    return lambda seeded, key: (REJECT, *make(seeded, key)[1:])


def mutated(seeded: random.Random, key: str) -> Made:
    """An order with another byte in it: what it is then only the rules show."""
    value = bytearray(json.dumps(order(key, 1)).encode())
    value[seeded.randrange(len(value))] = seeded.randrange(256)
    return UNKNOWN, key.encode(), bytes(value)


def number(text: str) -> Callable[[random.Random, str], Made]:
    """An order whose amount is written so."""

    def make(_: random.Random, key: str) -> Made:
        return (
            UNKNOWN,
            key.encode(),
            json.dumps(order(key, 1, amount=0)).replace('"amount": 0', f'"amount": {text}').encode(),
        )

    return make


MAKERS: list[Callable[[random.Random, str], Made]] = [
    *[encoded()] * 20,
    encoded(event_time="9999-12-31T23:59:59.999999Z"),
    encoded(event_time="0001-01-01T00:00:00Z"),
    encoded(event_time="1582-10-10T12:00:00Z"),
    encoded(amount=9999999999.99),
    encoded(extra={"deep": [[[None]]]}),
    rejected(encoded(event_time="0001-01-01T00:00:00+14:00")),
    rejected(encoded(event_time="9999-12-31T23:59:59-01:00")),
    rejected(encoded(event_time="0000-01-01T00:00:00Z")),
    rejected(encoded(event_time="10000-01-01T00:00:00Z")),
    rejected(encoded(amount=10_000_000_000)),
    rejected(encoded(amount=-1)),
    rejected(encoded(version=2**31)),
    rejected(encoded(version=0)),
    rejected(encoded(status="lost")),
    rejected(encoded(customer_id="nobody")),
    rejected(encoded(order_id="\0")),
    rejected(lambda seeded, key: (REJECT, None, encoded()(seeded, key)[2])),
    rejected(lambda seeded, key: (REJECT, b"\xff" + key.encode(), encoded()(seeded, key)[2])),
    rejected(lambda seeded, key: (REJECT, key.encode(), seeded.randbytes(seeded.randrange(40)))),
    rejected(lambda seeded, key: (REJECT, key.encode(), encoded()(seeded, key)[2][:-1])),
    rejected(lambda _, key: (REJECT, key.encode(), b"[" * 5000 + b"]" * 5000)),
    lambda _, key: (TOMBSTONE, key.encode(), None),
    lambda _, key: (TOMBSTONE, None, None),
    lambda _, key: (UNKNOWN, key.encode(), json.dumps(order(key, 1)).replace('"c1"', '"\\ud83d"').encode()),
    *map(number, ("1e400", "-0", "1e-400", "0.1000000000000000000000", "9" * 500, "1.0e0", "NaN")),
    *[mutated] * 6,
]
HEADERS = (
    "",
    "a",
    "\u00fc",
    "\U0001f600",
    "highwater.origin.offset",
    "__connect.errors.topic",
    "kafka_dlt-original-topic",
)


def records(seeded: random.Random) -> list[tuple[str, Message]]:
    """Records by partition, with the end that each must have; those of partition 2 have any timestamp."""
    found = []
    for n in range(RECORDS):
        partition = 2 if n % 4 == 3 else n % 2
        end, key, value = seeded.choice(MAKERS)(seeded, f"f{n}")
        contents = (None, b"", b"\xff\x00", b"7", seeded.randbytes(3))
        headers = [(seeded.choice(HEADERS), seeded.choice(contents)) for _ in range(seeded.choice((0, 0, 0, 1, 2, 60)))]
        headers += [("large", seeded.randbytes(100_000))] if n % 2000 == 0 else []
        chosen = seeded.choice((*TIMESTAMPS, seeded.randrange(-(2**63) + 1, 2**63)))
        timestamp = chosen if partition == 2 else seeded.randrange(1, 1_800_000_000_000)
        found.append((end, Message(key, value, partition, headers, timestamp)))  # type: ignore[arg-type]
    return found


@pytest.mark.slow
def test_no_record_fails_a_slice_and_each_has_its_end(any_time: Bench) -> None:
    """What Kafka can carry goes through raw, events, rejects, DLQ and publication, and is accounted for by origin."""
    bench, target = any_time, f"{any_time.stream.topic}.accepted"
    bench.stream = replace(bench.stream, breaker=Breaker(reject_ratio=1.0), publishes=Accepted(target))
    made = records(random.Random(29))
    bench.send(*[message for _, message in made])
    sent: dict[tuple[int, int], tuple[str, Message]] = {}
    ends: Counter[int] = Counter()
    for end, message in made:
        sent[message.partition, ends[message.partition]] = end, message
        ends[message.partition] += 1
    plain = bench.plan(0, p0=(0, ends[0]), p1=(0, 5))
    wild: list[Slice] = [bench.plan(1, p1=(5, ends[1]), p2=(0, 7)), bench.plan(2, p2=(7, ends[2]))]
    bench.materialise(plain)
    reports = [*bench.materialise(*wild)["events"]]
    published.materialise(bench.work(plain, *wild))

    raw = {(row["partition"], row["offset"]): row for row in bench.rows("raw")}
    assert raw.keys() == sent.keys()
    for place, (_, message) in sent.items():
        row, headers = raw[place], [{"key": name, "value": value} for name, value in message.headers] or None
        reported = (row["key"], row["value"], row["headers"], row["timestamp_ms"])
        assert reported == (message.key, message.value, headers, message.timestamp), place
    events, rejects = (
        {(row["origin_partition"], row["origin_offset"]): row for row in bench.rows(table)}
        for table in ("events", "rejects")
    )
    assert (len(events), len(rejects)) == (len(bench.rows("events")), len(bench.rows("rejects")))
    for place, (end, message) in sent.items():
        found = [EVENT] * (place in events) + [REJECT] * (place in rejects) + [TOMBSTONE] * (message.value is None)
        assert len(found) == 1, (place, message)
        assert end in {*found, UNKNOWN}, (place, message)
        assert place not in events or events[place]["origin_timestamp_ms"] == message.timestamp
    assert {metadata.build_slice_metadata(report).get("metadata_error") for report in reports} == {None}

    dlq = [record for topic in bench.stream.published_topics if topic != target for record in _there(bench, topic)]
    origins = {_origin(record): record for record in dlq}
    assert (len(dlq), origins.keys()) == (len(rejects), rejects.keys())
    for place, (_, key, value, headers) in origins.items():
        message, named = sent[place][1], dict(headers)
        own = [header for header in message.headers if not header[0].startswith("highwater.")]
        assert (key, value, headers[: len(own)]) == (message.key, message.value, own)
        assert named["highwater.origin.timestamp"] == str(message.timestamp).encode()
    accepted = read(bench.bootstrap, target)
    assert sorted(map(_origin, accepted)) == sorted(events)
    for record in accepted:
        named = dict(record[3])
        assert named["highwater.origin.timestamp"] == str(sent[_origin(record)][1].timestamp).encode()


def _there(bench: Bench, topic: str) -> list[Any]:
    return read(bench.bootstrap, topic) if topic in bench.kafka.list_topic_names() else []


def _origin(record: Any) -> tuple[int, int]:
    reported = dict(record[3])
    return int(reported["highwater.origin.partition"]), int(reported["highwater.origin.offset"])
