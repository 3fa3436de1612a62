"""The record's key is compared with the key's fields by value, in every key format, by both readers."""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from highwater.classifying import classify
from highwater.declaration import Answers, Field, Stream
from highwater.formats import Avro, BigEndian, Csv, Format, Json, KeyFormat, Protobuf
from highwater.orchestration.checking.contents import check_events_as_recorded
from highwater.orchestration.checking.key_checks import check_record_keys
from highwater.second_reader import KafkaRecord
from tests.helpers.pipeline_rows import KEY_RECORD, bare, by_pipeline, framed, schema_of
from tests.helpers.support import LONG_TIERS, Message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow

ID, SKU = Field("id", "long"), Field("sku", "string")
POSITION = Field("v", "long")


def in_avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


IN_RECORD = in_avro(KEY_RECORD, {"id": 7, "at": 5, "parts": ["a", None]})
OTHER_RECORD = in_avro(KEY_RECORD, {"id": 8, "at": 5, "parts": []})


@dataclass(frozen=True)
class Case:
    """Keys of records that have one value.

    Args:
        key_format: their format.
        fields: the fields of the key.
        value: the value of the records.
        same: keys that are the stream's key.
        other: keys that are not, but can be decoded.
        broken: keys that are no such format.
        unknown: keys whose schema the registry does not know.
        format: the format of the value.
    """

    key_format: KeyFormat
    fields: tuple[Field, ...]
    value: bytes
    same: tuple[bytes, ...]
    other: tuple[bytes | None, ...] = (None,)
    broken: tuple[bytes, ...] = ()
    unknown: tuple[bytes, ...] = ()
    format: Format = field(default_factory=Json)


CASES = {
    "long": Case(
        BigEndian(), (ID,), b'{"id": 1001, "v": 1}',
        (bytes.fromhex("00000000000003e9"),), (bytes.fromhex("00000000000003ea"), None), (b"1001", b""),
    ),
    "integer": Case(
        BigEndian(4), (Field("id", "integer"),), b'{"id": -2, "v": 1}',
        (bytes.fromhex("fffffffe"),), (bytes.fromhex("00000002"), None), (b"\xfe",),
    ),
    "json": Case(
        Json(), (ID,), b'{"id": 1, "v": 1}',
        (
            b'{"id": 1}', b'{"id":1.0}', b' {"other": [2], "id": 1 } ', b"1",
            b'{"schema": {"type": "struct"}, "payload": {"id": 1}}', b'{"schema": null, "payload": 1}',
        ),
        (
            b'{"id": 2}', b'{"id": "1"}', b'{"id": null}', b'{"ID": 1}', b"2", b'"1"', b"[1]", b"{}", b"null",
            b'{"id": {"id": 1}}', b'{"id": 1.5}', None,
        ),
        (b"id", b'{"id": 1', b"\xff", b'{"id": 1, "id": 1}', b""),
    ),
    "json texts": Case(
        Json(), (SKU,), '{"sku": "ü|1", "v": 1}'.encode(),
        ('"ü|1"'.encode(), rb'{"sku": "\u00fc|1"}'), (b'"u|1"', b'{"sku": 1}', None), ("ü|1".encode(),),
    ),
    "json of several fields": Case(
        Json(), (ID, SKU), rb'{"id": 3, "sku": "A|\\B", "v": 1}',
        (rb'{"id":3,"sku":"A|\\B"}', rb'{"sku":"A|\\B","id":3}', rb'{"payload": {"id":3,"sku":"A|\\B"}}'),
        (b'{"id":3,"sku":"A|B"}', b'{"id":3}', rb'{"id":4,"sku":"A|\\B"}', b"3", rb'"3|A|\\B"', None), (b"3|A",),
    ),
    "json decimals": Case(
        Json(), (Field("id", "decimal(8,2)"),), b'{"id": 1.50, "v": 1}',
        (b'{"id": 1.5}', b"1.500"), (b'{"id": 1.501}', b'{"id": 15}', b'{"id": true}', None), (b"1.",),
    ),
    "json dates": Case(
        Json(), (Field("day", "date"),), b'{"day": "2026-03-01", "v": 1}',
        (b'{"day":"2026-03-01"}', b'"2026-03-01"'), (b'"2026-03-02"', b"20260301", None),
    ),
    "json by the end of a path": Case(
        Json(), (Field("customer", "long", source=("after.id", "before.id")),), b'{"before": {"id": 5}, "v": 1}',
        (b'{"id": 5}', b'{"customer": 5}'), (b'{"before": {"id": 5}}', b'{"id": 6, "customer": 5}', None),
    ),
    "framed json": Case(
        Json(registry=True), (ID,), b'{"id": 1, "v": 1}',
        (framed(63, b'{"id": 1}'),), (framed(63, b'{"id": 2}'), None), (b'{"id": 1}',), (framed(98, b'{"id": 1}'),),
    ),
    "avro longs": Case(
        Avro('"long"'), (ID,), b'{"id": -9, "v": 1}',
        (in_avro("long", -9),), (in_avro("long", 9), None), (b"\x80",),
    ),
    "framed avro texts": Case(
        Avro(), (SKU,), b'{"sku": "o-17", "v": 1}',
        (framed(60, in_avro("string", "o-17")),), (framed(60, in_avro("string", "o-1")), framed(61, b"\x02"), None),
        (b"o-17",), (framed(98, in_avro("string", "o-17")),),
    ),
    "avro records": Case(
        Avro(json.dumps(KEY_RECORD)), (ID,), b'{"id": 7, "v": 1}', (IN_RECORD,), (OTHER_RECORD, None), (b"\x0e",),
    ),
    "framed avro records of two fields": Case(
        Avro(), (ID, Field("at", "timestamp")), b'{"id": 7, "at": "1970-01-01T00:00:00.005Z", "v": 1}',
        (framed(62, IN_RECORD),), (framed(62, OTHER_RECORD), framed(61, b"\x0e"), None), (IN_RECORD,),
        (framed(98, IN_RECORD),),
    ),
    "framed protobuf": Case(
        Protobuf(), (Field("n", "long"), Field("id", "string")), b'{"n": 7, "id": "ab", "v": 1}',
        (framed(64, b"\0\x0a\x02ab\x10\x07"),), (framed(64, b"\0\x0a\x02ab\x10\x08"), framed(64, b"\0\x10\x07"), None),
        (b"ab",), (framed(98, b"\0\x0a\x02ab\x10\x07"),),
    ),
    "values that are texts": Case(
        Json(), (ID,), b"1,1", (b'{"id": 1}', b'{"id": "1"}'), (b'{"id": "2"}', None), (b"x",), (), Csv(("id", "v")),
    ),
    "a default": Case(
        Json(), (ID, Field("site", "string", optional=True, default="eu")), b'{"id": 1, "v": 1}',
        (b'{"id": 1}', b'{"id": 1, "site": "eu"}'), (b'{"id": 1, "site": "us"}', None),
    ),
}  # fmt: skip


def stream_of(case: Case, record_key: str, *more: Field, **options: Any) -> Stream:
    key = options.pop("key", tuple(one.name for one in case.fields))
    fields = (*case.fields, POSITION, *more)
    return bare(
        case.format, *fields, key=key, version="v", key_format=case.key_format, record_key=record_key, **options
    )


@pytest.mark.parametrize("name", CASES)
def test_both_readers_compare_keys_by_value(spark: SparkSession, name: str) -> None:
    """Also keys with a byte changed: a warning counts what is a reject where the key is declared strict."""
    case, seed = CASES[name], random.randrange(10**6)
    chance, sound = random.Random(seed), [*case.same, *filter(None, case.other)]
    mutated = [mutate(chance.choice(sound), chance) for _ in range(60)]
    keys = [*case.same, *case.other, *case.broken, *case.unknown, *mutated]
    stream = stream_of(case, "strict")
    strict = sorted(by_pipeline(spark, stream, [case.value] * len(keys), keys), key=lambda row: row["name"])
    warned = sorted(
        by_pipeline(spark, stream_of(case, "warn"), [case.value] * len(keys), keys), key=lambda row: row["name"]
    )
    known = len(keys) - len(mutated)
    expected: dict[bytes | None, tuple[str | None, bool]] = dict.fromkeys(case.same, (None, False))
    expected |= dict.fromkeys((*case.other, *case.broken), ("malformed", True))
    expected |= dict.fromkeys(case.unknown, ("unresolved", True))
    found = {key: (row["reason"], other["other_key"]) for key, row, other in zip(keys, strict, warned, strict=True)}
    assert {key: found[key] for key in keys[:known]} == expected
    assert {row["reason"] for row in warned} == {None}, "a warning rejects nothing"
    theirs = [classify(stream, KafkaRecord(case.value, key, (), "t", 0, 0, 0), schema_of) for key in keys]
    unlike = [
        (key, row["detail"], one.detail)
        for key, row, one in zip(keys, strict, theirs, strict=True)
        if row["reason"] != one.reason
    ]
    assert not unlike, f"seed {seed}"


def mutate(key: bytes, chance: random.Random) -> bytes:
    at, byte = chance.randrange(len(key)), bytes([chance.randrange(256)])
    return chance.choice([key[:at] + byte + key[at + 1 :], key[:at] + key[at + 1 :], key + byte])


def test_a_key_by_an_expression_is_compared_by_its_result(spark: SparkSession) -> None:
    case = Case(Json(), (Field("name", "string"),), b'{"name": "ab", "v": 1}', ())
    stream = stream_of(case, "strict", Field("k", "string", expression="upper(name)"), key=("k",))
    rows = by_pipeline(spark, stream, [case.value] * 3, [b'{"k": "AB"}', b'"AB"', b'{"k": "ab"}'])
    assert [row["detail"] for row in sorted(rows, key=lambda row: row["name"])] == [
        None,
        None,
        "the record's key does not have the k of the record",
    ]


def declared(topic: str, **options: Any) -> Stream:
    fields = (ID, SKU, POSITION)
    answers = Answers("By key.", "Once.", "Parked.")
    return Stream(
        "keyed", topic, fields, ("id", "sku"), "v", answers=answers, key_format=Json(), tiers=LONG_TIERS, **options
    )


def test_a_differing_key_is_counted_or_a_reject(bench: Bench) -> None:
    """From bytes to rows: the check names records by the second reader, and the audit finds a key that differs."""
    bench.stream = declared(bench.stream.topic)
    keys = [b'{"sku":"a","id":1}', b'{"sku":"b","id":1}', None, b"no JSON", b'{"id": 1, "sku": "a"}']
    bench.send(*[Message(key, json.dumps({"id": 1, "sku": "a", "v": at}).encode()) for at, key in enumerate(keys)])
    slice_ = bench.plan(0, p0=(0, len(keys)))
    bench.materialise(slice_)
    assert [(row["key"], row["version"]) for row in bench.rows("events")] == [("1|a", at) for at, _ in enumerate(keys)]
    result = check_record_keys(bench.lake, bench.stream, [slice_.key])[slice_.key]
    assert (result.passed, result.numbers) == (False, {"events": 5, "unlike": 3})
    assert [(row["origin_offset"], row["record_key_hex"]) for row in result.samples] == [
        (at, key.hex() if key is not None else None) for at, key in list(enumerate(keys))[1:4]
    ]
    assert [name.split()[0] for name in bench.failing()] == ["record_keys_as_declared"]

    bench.stream = declared(bench.stream.topic, record_key="strict")
    found = check_events_as_recorded(bench.ledger, bench.lake, bench.stream, [slice_.key])[slice_.key]
    assert [(row["offset"], row["fields"]) for row in found.samples][:2] == [(1, "record key"), (2, "record key")]
    assert found.numbers == {"events": 5, "unlike": 3}
    bench.materialise(slice_)
    assert [row["version"] for row in bench.rows("events")] == [0, 4]
    assert sorted((row["origin_offset"], row["reason"], row["detail"]) for row in bench.rows("rejects"))[:2] == [
        (1, "malformed", "the record's key does not have the id, sku of the record"),
        (2, "malformed", "the record's key does not have the id, sku of the record"),
    ]
    assert not bench.failing()


def test_a_key_of_which_all_fields_are_taken_is_not_compared() -> None:
    from highwater.sources import Key

    stream = declared("t")
    fields = tuple(replace(one, source=Key(one.name)) for one in (ID, SKU))
    assert stream.compares_decoded_keys
    assert not replace(stream, fields=(*fields, POSITION)).compares_decoded_keys
    assert replace(stream, fields=(fields[0], SKU, POSITION)).compares_decoded_keys
