"""Topics as other systems fill them: from exact bytes to the rows of events and of `current`."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from highwater.classifying import classify
from highwater.second_reader import KafkaRecord
from tests.helpers.format_streams import FORMATS, find_schema, records
from tests.helpers.support import LONG_TIERS, Message

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow


def loaded(bench: Bench, name: str, **changes: Any) -> list[dict[str, Any]]:
    """The events of a format's records in the order of their offsets; one slice has them all.

    They are sent as of now: the broker would delete records of their time.
    """
    bench.stream = on(FORMATS[name], bench.stream.topic, **changes)
    bench.schemas = find_schema
    found = records(name)
    bench.send(*[Message(one.key, one.value, 0, [*one.headers]) for one in found])
    bench.materialise(bench.plan(0, p0=(0, len(found))))
    return sorted(bench.rows("events"), key=lambda row: row["origin_offset"])


def on(stream: Stream, topic: str, **changes: Any) -> Stream:
    return replace(stream, topic=topic, tiers=LONG_TIERS, **changes)


def picked(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def rejected(bench: Bench) -> list[tuple[int, str, str]]:
    return sorted(picked(bench.rows("rejects"), "origin_offset", "reason", "detail"))


def test_debezium_without_schemas(bench: Bench) -> None:
    """Insert, update, delete and the tombstone after it: base64 decimals, microseconds and days since 1970."""
    rows = loaded(bench, "01-debezium-postgres-plain")
    names = ("key", "id", "customer", "amount", "note", "op", "lsn", "deleted")
    assert picked(rows, *names) == [
        ("1001", 1001, "ada", Decimal("12.34"), None, "c", 24023128, False),
        ("1001", 1001, "ada", Decimal("20.00"), "gift ☕", "u", 24023300, False),
        ("1001", 1001, None, None, None, "d", 24023400, True),
    ]
    assert picked(rows[:1], "created", "day", "updated_at", "event_time") == [
        (
            datetime(2026, 1, 1, 0, 0, 0, 123456),  # noqa: DTZ001 - a column without a zone
            date(2026, 1, 1),
            datetime(2026, 1, 1, 0, 0, 0, 123456, UTC),
            datetime(2026, 1, 1, 0, 0, 0, 200000, UTC),
        )
    ]
    assert bench.current() == {}
    assert rejected(bench) == []
    assert not bench.failing()


SOURCE = (
    b'"source":{"version":"3.2.0.Final","connector":"postgresql","name":"shop","ts_ms":1767225603200,"snapshot":"false",'
    b'"db":"shop","schema":"public","table":"orders","txId":556,"lsn":24023500,"xmin":null}'
)
# The rows are null, or absent as in Debezium's documentation; the record has no key.
TRUNCATES = (
    b'{"before":null,"after":null,' + SOURCE + b',"transaction":null,"op":"t","ts_ms":1767225603290}',
    b"{" + SOURCE + b',"op":"t","ts_ms":1767225603290}',
)


def test_a_truncate_of_debezium_says_what_happened_and_what_to_do(bench: Bench) -> None:
    """Its detail was `field id (after.id, else before.id) is missing`, as of a broken record; both readers agree."""
    name = "01-debezium-postgres-plain"
    bench.stream = on(FORMATS[name], bench.stream.topic)
    garbled = TRUNCATES[0].replace(b'"op":"t"', b'"op":"x"')
    bench.send(Message(b"k", records(name)[0].value), *[Message(None, one) for one in (*TRUNCATES, garbled)])
    bench.materialise(bench.plan(0, p0=(0, 4)))

    detail = (
        "the table was truncated in the source (op t), and current still has its keys: write a delete with this "
        f"record's version for each of them to {bench.stream.topic}, then discard this record with highwater "
        "discard-parked debezium. With skipped.operations=t the connector sends no truncates"
    )
    truncate, missing = ("invalid", "op.truncate", detail), "field id (after.id, else before.id) is missing"
    found = sorted(picked(bench.rows("rejects"), "origin_offset", "reason", "rule", "detail"))
    assert found == [(1, *truncate), (2, *truncate), (3, "malformed", None, missing)]
    outcomes = [classify(bench.stream, KafkaRecord(one, None), find_schema) for one in (*TRUNCATES, garbled)]
    assert [(one.reason, one.rule, one.detail) for one in outcomes[:2]] == [truncate, truncate]
    assert (outcomes[2].reason, outcomes[2].rule) == ("malformed", None)
    assert bench.current().keys() == {"1001"}
    assert not bench.failing()


def test_nested_events_without_a_version(bench: Bench) -> None:
    """Nested fields, a part of any shape as JSON, and no table `current`."""
    rows = loaded(bench, "05-github-events")
    assert picked(rows, "id", "type", "actor_login", "repo_id", "repo_name", "org_login") == [
        ("22249084964", "PushEvent", "octo", 1296269, "octo/hello", None),
        ("22249084965", "WatchEvent", "octo", 1296269, "octo/hello", "corp"),
        ("22249084966", "IssuesEvent", "octo", 1296269, "octo/hello", None),
    ]
    assert rows[1]["payload"] == '{"action":"started"}'
    issue = json.loads(rows[2]["payload"])["issue"]
    assert (issue["the"], issue["The"], issue["number"], issue["labels"]) == (1, 2, 7, [])
    assert bench.lake.open_stream_table(bench.stream.name, "current") is None
    assert not bench.failing()


def test_telemetry(bench: Bench) -> None:
    """Doubles, NaN as null, a key of other bytes, and a time in another unit, which is reported."""
    rows = loaded(bench, "06-iot-telemetry")
    assert picked(rows, "key", "version", "ts", "temp", "hum", "lat") == [
        ("s-17", 4711, datetime(2026, 1, 1, 0, 0, 0, 123000, UTC), 21.500000000000004, 1e-05, 52.520008),
        ("s-17", 4712, datetime(2026, 1, 1, 0, 0, 1, 123000, UTC), None, None, -0.0),
    ]
    beyond = "field ts is outside of 1980-01-01 to 2099-12-31 as a number in ms"
    assert rejected(bench) == [(2, "malformed", beyond)]
    assert bench.current()["s-17"]["version"] == 4712
    assert not bench.failing()


def test_an_order_with_lines(bench: Bench) -> None:
    """An array of structs; one without lines keeps its order, and a double in place of an amount is rounded."""
    rows = loaded(bench, "09-order-lines")
    lines = [[tuple(line.values()) for line in row["lines"]] for row in rows]
    assert lines == [
        [("A", 2, Decimal("19.95"), None), ("B", 1, Decimal("10.00"), None)],
        [("A", 2, Decimal("4.90"), True)],
        [],
    ]
    assert picked(rows, "order_id", "version", "status", "total", "coupon") == [
        ("o-17", 1, "placed", Decimal("49.90"), None),
        ("o-17", 2, "paid", Decimal("49.90"), None),
        ("o-17", 3, "canceled", Decimal("49.90"), None),
    ]
    assert bench.current()["o-17"]["lines"] == []
    assert not bench.failing()


def test_avro_of_two_writers(bench: Bench) -> None:
    """Logical types, unions with null, and a field that only the newer schema has."""
    rows = loaded(bench, "10-avro-logical-types")
    assert picked(rows, "amount", "note", "kind", "currency", "checksum") == [
        (Decimal("1234.56"), None, "STANDARD", "EUR", b"\x00\xc0\xff\xee"),
        (None, "", "CREDIT", "EUR", b"\xff\xff\xff\xff"),
        (Decimal("-0.05"), "n", "STANDARD", "USD", b"\x00\x00\x00\x00"),
    ]
    assert [dict(row["tags"]) for row in rows] == [{"a": "ö"}, {}, {}]
    assert rows[2]["seen_at"] == datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
    assert rows[0]["due"] == date(2026, 1, 1)
    current = bench.current()["7f1c3c1e-0000-4000-8000-000000000001"]
    assert current["amount"] == Decimal("-0.05")
    assert not bench.failing()


def test_json_with_the_framing_of_a_registry(bench: Bench) -> None:
    """The ID in front of the document, or in a header."""
    rows = loaded(bench, "12-json-schema-registry")
    assert picked(rows, "order_id", "version", "amount", "coupon") == [
        ("o-17", 1, Decimal("12.5"), None),
        ("o-17", 2, Decimal("12.5"), None),
        ("o-17", 3, Decimal("0.0000001"), None),
    ]
    assert bench.current()["o-17"]["version"] == 3
    assert not bench.failing()


def test_a_schema_that_the_registry_does_not_know_yet(bench: Bench) -> None:
    """Its records wait for a retry; those of known schemas go on."""
    bench.stream = on(FORMATS["10-avro-logical-types"], bench.stream.topic)
    bench.schemas = find_schema
    one = records("10-avro-logical-types")[0]
    assert one.value is not None
    unknown = b"\x00\x00\x00\x00\x63" + one.value[5:]
    bench.send(Message(one.key, one.value), Message(one.key, unknown), Message(one.key, one.value[5:]))
    bench.materialise(bench.plan(0, p0=(0, 3)))
    assert len(bench.rows("events")) == 1
    assert rejected(bench) == [
        (1, "unresolved", "the registry does not know schema 99"),
        (2, "malformed", "the value has no schema ID: neither a magic byte in front of it nor a header"),
    ]
    assert not bench.failing()


def test_a_registry_that_is_unavailable_rejects_nothing(bench: Bench) -> None:
    """The slice fails, and is materialised once the registry is back."""
    from highwater.errors import DependencyUnavailableError

    def unavailable(_: int | str) -> None:
        raise DependencyUnavailableError("the registry is unavailable", remedy="wait")

    bench.stream = on(FORMATS["10-avro-logical-types"], bench.stream.topic)
    bench.schemas = unavailable
    one = records("10-avro-logical-types")[0]
    bench.send(Message(one.key, one.value))
    slice_ = bench.plan(0, p0=(0, 1))
    with pytest.raises(DependencyUnavailableError):
        bench.materialise(slice_)
    assert bench.rows("events") == []
    bench.schemas = find_schema
    bench.materialise(slice_)
    assert len(bench.rows("events")) == 1


def test_schemas_of_other_kinds_reject_their_records_alone(bench: Bench) -> None:
    """A record of another topic, with a Protobuf schema that imports another, failed the slice for ever."""
    from highwater.schemas import Schema, SchemaReference

    imported = SchemaReference("other.proto", "other", 1, 'syntax = "proto3"; message Other {}')
    strange = {
        5: Schema(
            5, "PROTOBUF", 'syntax = "proto3"; import "other.proto"; message Order { Other other = 1; }', (imported,)
        ),
        6: Schema(6, "AVRO", '{"type": "record", "name": "R", "fields": [{"name": "n", "type": ["null", "R"]}]}'),
        42: Schema(42, "JSON", "{}"),
    }
    bench.stream = on(FORMATS["10-avro-logical-types"], bench.stream.topic)
    bench.schemas = lambda one: strange.get(one) if one in strange else find_schema(one)
    one = records("10-avro-logical-types")[0]
    assert one.value is not None
    others = [Message(one.key, bytes([0, 0, 0, 0, number]) + one.value[5:]) for number in strange]
    bench.send(Message(one.key, one.value), *others)
    bench.materialise(bench.plan(0, p0=(0, 4)))
    assert len(bench.rows("events")) == 1
    assert rejected(bench) == [
        (1, "malformed", "schema 5 cannot be read: its type is PROTOBUF, and not AVRO"),
        (2, "malformed", "schema 6 cannot be read: the type R is inside of itself"),
        (3, "malformed", "schema 42 cannot be read: its type is JSON, and not AVRO"),
    ]
    assert not bench.failing()


def test_a_line_of_more_values_than_spark_takes_is_a_reject(bench: Bench) -> None:
    """Spark's parser failed the whole query."""
    from highwater.declaration import Field
    from highwater.formats import Csv

    fields = (Field("value", "string"), Field("n", "integer"))
    bench.stream = replace(on(FORMATS["05-github-events"], bench.stream.topic), fields=fields, key=(), event_time=None)
    bench.stream = replace(bench.stream, value=Csv(("value", "n")))
    bench.send(Message(None, b"a,1"), Message(None, b"," * 30_000))
    bench.materialise(bench.plan(0, p0=(0, 2)))
    # A field of the name that a record's value has in raw.
    assert picked(bench.rows("events"), "value", "n") == [("a", 1)]
    assert rejected(bench) == [(1, "malformed", "no line of 2 values separated by ','")]
    assert not bench.failing()


def test_debezium_in_avro_whose_tombstones_delete(bench: Bench) -> None:
    """Keys and values in a registry's framing: an insert, a delete, its tombstone, and a tombstone of another key."""
    from io import BytesIO

    import fastavro

    from highwater.declaration import Deletes, Field
    from highwater.formats import Avro
    from highwater.schemas import Schema
    from highwater.sources import Key, Meta

    def record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
        return {"type": "record", "name": name, "namespace": "shop.public.addresses", "fields": [*fields]}

    row = record("Value", {"name": "id", "type": "long"}, {"name": "city", "type": "string"})
    values = record(
        "Envelope",
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    )
    written = {12: record("Key", {"name": "id", "type": "long"}), 13: values}

    def framed(number: int, value: dict[str, Any]) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(written[number]), value)
        return b"\0" + number.to_bytes(4) + out.getvalue()

    def change(op: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> bytes:
        return framed(13, {"before": before, "after": after, "op": op})

    fields = (
        Field("id", "long", source=Key("id")),
        Field("city", "string", source="after.city"),
        Field("op", "string"),
        Field("position", "long", source=Meta("offset")),
    )
    bench.stream = replace(
        on(FORMATS["01-debezium-postgres-plain"], bench.stream.topic),
        fields=fields,
        key=("id",),
        version="position",
        event_time=None,
        value=Avro(),
        key_format=Avro(),
        deletes=Deletes("op", ("d",), tombstones=True),
    )
    schemas = {number: Schema(number, "AVRO", json.dumps(one)) for number, one in written.items()}
    bench.schemas = lambda one: schemas.get(one) if isinstance(one, int) else None
    ada, bob = {"id": 1, "city": "Turin"}, {"id": 2, "city": "Oslo"}
    first, second = framed(12, {"id": 1}), framed(12, {"id": 2})
    bench.send(
        Message(first, change("c", None, ada)),
        Message(second, change("c", None, bob)),
        Message(first, change("d", ada, None)),
        Message(first, None),
        Message(second, None),
        Message(second, change("c", None, {"id": 2, "city": "Bergen"})),
        Message(first[:-1], None),
        Message(b"\0\0\0\0\x63" + first[5:], None),
    )
    bench.materialise(bench.plan(0, p0=(0, 8)))
    rows = sorted(bench.rows("events"), key=lambda row: row["origin_offset"])
    assert picked(rows, "key", "id", "city", "deleted") == [
        ("1", 1, "Turin", False),
        ("2", 2, "Oslo", False),
        ("1", 1, None, True),
        ("1", 1, None, True),
        ("2", 2, None, True),
        ("2", 2, "Bergen", False),
    ]
    assert {key: row["city"] for key, row in bench.current().items()} == {"2": "Bergen"}
    assert rejected(bench) == [
        (6, "malformed", "the key: no Avro of schema 12"),
        (7, "unresolved", "the registry does not know schema 99 of the key"),
    ]
    assert not bench.failing()


def test_current_with_a_map_is_rebuilt(bench: Bench) -> None:
    """Spark subtracts no rows with maps."""
    from highwater.assets.current_rebuild import RebuildSnapshot, compare_with_events, rebuild

    loaded(bench, "10-avro-logical-types")
    work = bench.work()
    assert compare_with_events(work, RebuildSnapshot.take(work)).none
    assert rebuild(work) == 1
