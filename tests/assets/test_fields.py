"""Fields by path, optional ones, and every type: the pipeline and the second reader say the same of each record."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from highwater.assets.origins import PROBLEM
from highwater.assets.parsing import parse_records
from highwater.column_comparison import matches_stored
from highwater.declaration import Field, Stream
from highwater.decoding import decode_record_key
from highwater.formats import BigEndian, Json, KeyFormat, Raw, Text
from highwater.second_reader import KafkaRecord, MisfitError, convert_field, parse_document
from highwater.sources import Header, Key, Meta, Source, split_path
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work


class Malformed(str):
    """What `detail` says of a record that is refused."""

    __slots__ = ()


@dataclass(frozen=True)
class Case:
    """A declared field, a record, and the value or the detail of the reject."""

    declared: Field
    value: str
    wanted: Any
    key: bytes | None = b"k"
    headers: tuple[tuple[str, bytes], ...] = field(default=())
    key_format: KeyFormat = field(default_factory=Text)


def one(kind: str, written: str, wanted: Any, **declared: Any) -> Case:
    """A record whose field `x` is written so."""
    return Case(Field("x", kind, **declared), f'{{"x": {written}}}', wanted)


def at(path: Source | tuple[Source, ...], value: str, wanted: Any, kind: str = "string", **more: Any) -> Case:
    """A field that is taken from elsewhere."""
    record = {name: more.pop(name) for name in ("key", "headers", "key_format") if name in more}
    return Case(Field("x", kind, source=path, **more), value, wanted, **record)


def in_json(path: Key, wanted: Any, key: bytes | None, kind: str = "long") -> Case:
    """A field that is taken from a key in JSON."""
    return at(path, "{}", wanted, kind, key=key, key_format=Json())


def micros(text: str) -> int:
    return int((datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) * 1_000_000


NO_ID = Malformed("field x (id of the record's key) is missing")


# What Spark's parser of variants refuses.
REFUSED = '{"z": 1, "z": 2}'
CASES: dict[str, Case] = {
    "a whole number with a point": one("integer", "3.0", 3),
    "a whole number with an exponent": one("long", "1E+2", 100),
    "the greatest long with an exponent": one("long", "9.223372036854775807e18", 2**63 - 1),
    "one beyond it": one("long", "9.223372036854775808e18", Malformed("field x does not fit long")),
    "a fraction": one("integer", "1.5", Malformed("field x is no whole number")),
    "a fraction with an exponent": one("integer", "15e-1", Malformed("field x is no whole number")),
    "a decimal with an exponent": one("decimal(18,8)", "1e-07", Decimal("0.0000001")),
    "an exponent that rounds": one(
        "decimal(10,2)", "1005e-3", Malformed("field x has more than 2 digits after the point")
    ),
    "an exponent beyond every type": one("decimal(38,0)", "1e99999", Malformed("field x does not fit decimal(38,0)")),
    "an exponent of ten digits": one("decimal(38,0)", "1e2000000000", Malformed("field x does not fit decimal(38,0)")),
    "milliseconds with such an exponent": one(
        "timestamp", "1e2000000000", Malformed("field x does not fit timestamp"), unit="ms"
    ),
    "zero with an exponent": one("decimal(4,2)", "-0.0e5", Decimal(0)),
    "50 digits that are zeros": one("decimal(4,2)", "1." + "0" * 50, Decimal(1)),
    "39 digits": one("decimal(38,0)", "9" * 39, Malformed("field x does not fit decimal(38,0)")),
    "a number as text": one("decimal(12,2)", '"12.50"', Decimal("12.5"), text=True),
    "an exponent as text": one("integer", '"1e3"', 1000, text=True),
    "no number as text": one("integer", '"12a"', Malformed("field x does not fit integer"), text=True),
    "text that was not declared": one("integer", '"12"', Malformed("field x is integer, found JSON STRING")),
    "an exponent for a text": one("string", "1e3", Malformed("field x is string, found the number 1e3")),
    "a double": one("double", "21.500000000000004", 21.500000000000004),
    "a small double": one("double", "1e-05", 1e-05),
    "a whole number for a double": one("double", "21", 21.0),
    "a double of many digits": one("double", "0." + "1" * 45, float("0." + "1" * 45)),
    "a double beyond the type": one("double", "1e400", Malformed("field x does not fit double")),
    "a float": one("float", "0.1", 0.10000000149011612),
    "a float beyond the type": one("float", "1e39", Malformed("field x does not fit float")),
    "NaN": one("double", "NaN", Malformed("not JSON: NaN or infinity at byte 6")),
    "NaN as null": one("double", "NaN", None, nan="null"),
    "NaN as it is": one("double", "NaN", math.nan, nan="keep"),
    "an infinity as it is": one("double", "-Infinity", -math.inf, nan="keep"),
    "NaN in a text": Case(Field("x", "double", nan="null"), '{"y": "NaN\\" NaN", "x": 1}', 1.0),
    "a date": one("date", '"2026-02-28"', date(2026, 2, 28)),
    "no such day": one("date", '"2026-02-30"', Malformed("field x does not fit date")),
    "a date as a number of days": one("date", "20454", date(2026, 1, 1), unit="days"),
    "a day before 1970": one("date", "-1", date(1969, 12, 31), unit="days"),
    "a zone of hours": one("timestamp", '"2026-07-01 12:00:00+00"', micros("2026-07-01T12:00:00+00:00")),
    "a zone of hours behind": one("timestamp", '"2026-07-01T12:00:00-05"', micros("2026-07-01T17:00:00+00:00")),
    "seconds": one("timestamp", "1767225600", micros("2026-01-01T00:00:00+00:00"), unit="s"),
    "seconds with a fraction": one(
        "timestamp", "1767225600.5", micros("2026-01-01T00:00:00+00:00") + 500_000, unit="s"
    ),
    "milliseconds": one("timestamp", "1767225600123", micros("2026-01-01T00:00:00+00:00") + 123_000, unit="ms"),
    "microseconds": one("timestamp", "1767225600123456", micros("2026-01-01T00:00:00+00:00") + 123_456, unit="us"),
    "nanoseconds": one("timestamp", "1767225600123456789", micros("2026-01-01T00:00:00+00:00") + 123_456, unit="ns"),
    "seconds for milliseconds": one(
        "timestamp",
        "1767225602",
        Malformed("field x is outside of 1980-01-01 to 2099-12-31 as a number in ms"),
        unit="ms",
    ),
    "digits after the microsecond": one(
        "timestamp", "1767225600.1234567", Malformed("field x does not fit timestamp"), unit="s"
    ),
    "a text for a number": one("timestamp", '"now"', Malformed("field x is timestamp, found JSON STRING"), unit="ms"),
    "a local time": one(
        "timestamp", '"2026-07-01T12:00:00"', micros("2026-07-01T10:00:00+00:00"), zone="Europe/Berlin"
    ),
    "a time with its own zone": one(
        "timestamp", '"2026-07-01T12:00:00Z"', micros("2026-07-01T12:00:00+00:00"), zone="Europe/Berlin"
    ),
    "a local time without a zone": one(
        "timestamp", '"2026-07-01T12:00:00"', Malformed("field x does not fit timestamp")
    ),
    "bytes": one("binary", '"AAH/"', b"\0\1\xff"),
    "no base64": one("binary", '"A*"', Malformed("field x is no base64")),
    "an object as JSON": one(
        "json", '{"b": [1, 2.50, 1e-07], "a": null}', {"a": None, "b": [1, Decimal("2.5"), Decimal("1e-07")]}
    ),
    "a text as JSON": one("json", '"one"', "one"),
    "null as JSON": one("json", "null", Malformed("field x is null")),
    "missing": Case(Field("x", "string"), '{"y": 1}', Malformed("field x is missing")),
    "null": one("string", "null", Malformed("field x is null")),
    "absent and optional": Case(Field("x", "string", optional=True), '{"y": 1}', None),
    "null and only optional": one("string", "null", Malformed("field x is null"), optional=True),
    "null and nullable": one("string", "null", None, nullable=True),
    "absent and only nullable": Case(Field("x", "long", nullable=True), "{}", Malformed("field x is missing")),
    "a default": Case(Field("x", "string", optional=True, default="EUR"), "{}", "EUR"),
    "a default beside null": one("string", "null", None, optional=True, nullable=True, default="EUR"),
    "a default of a number": Case(Field("x", "double", optional=True, default=0.5), "{}", 0.5),
    "of another type and optional": one("long", '"1"', Malformed("field x is long, found JSON STRING"), optional=True),
    "a path": at("after.id", '{"after": {"id": "a"}}', "a"),
    "a path into null": at("after.id", '{"after": null}', Malformed("field x (after.id) is missing")),
    "a path into a text": at("after.id", '{"after": "id"}', Malformed("field x (after.id) is missing")),
    "the second of two paths": at(("after.id", "before.id"), '{"before": {"id": "b"}, "after": null}', "b"),
    "the first of two paths": at(("after.id", "before.id"), '{"before": {"id": "b"}, "after": {"id": "a"}}', "a"),
    "a name with a dot": at('["user.id"]', '{"user.id": "a", "user": {"id": "b"}}', "a"),
    "a name with a quotation mark of SQL": at("it's.$schema", '{"it\'s": {"$schema": "a"}}', "a"),
    "a decimal in a path": at("a.b", '{"a": {"b": 1e-2}}', Decimal("0.01"), "decimal(4,2)"),
    "the key as text": at(Key(), "{}", "k"),
    "a key that is no text": at(Key(), "{}", Malformed("the key is not UTF-8 at byte 1"), key=b"a\xff"),
    "no key": at(Key(), "{}", Malformed("field x (the record's key) is missing"), key=None),
    "no key, and a member": in_json(Key("id"), NO_ID, None),
    "a path into the key": in_json(Key("id"), 1001, b'{"id":1001}'),
    "a path that the key has not": in_json(Key("id"), NO_ID, b'{"no":1}'),
    "a key that is a number in JSON": in_json(Key(), -7, b" -7 "),
    "a key that is null in JSON": in_json(Key(), Malformed("field x (the record's key) is null"), b"null"),
    "a key that is a text in JSON": in_json(Key(), "a\n", b'"a\\n"', "string"),
    "a key with half of a pair": in_json(
        Key(), Malformed("the key has half of a surrogate pair"), b'"\\ud83d"', "string"
    ),
    "a key with text behind it": in_json(
        Key("id"), Malformed("the key: text follows the JSON document at byte 9"), b'{"id":1} {"id":2}'
    ),
    "a key that ends as ours": in_json(
        Key("id"), Malformed("the key: text follows the JSON document at byte 8"), b'{"id":1},"end of the key"'
    ),
    "a key with a name twice": in_json(
        Key("id"), Malformed("the key: field id occurs twice, again at byte 8"), b'{"id":1,"id":2}'
    ),
    "a key with another name twice": in_json(
        Key("id"), Malformed("the key has a name twice in an object"), b'{"id":1,"x":2,"x":2}'
    ),
    "a key that is no JSON": in_json(Key("id"), Malformed("the key: not JSON: unexpected character at byte 0"), b"x"),
    "an exponent in a key": in_json(Key(), Malformed("field x (the record's key) does not fit long"), b"1e2"),
    "a long": at(Key(), "{}", -2, "long", key=b"\xff" * 7 + b"\xfe", key_format=BigEndian()),
    "the greatest long": at(Key(), "{}", 2**63 - 1, "long", key=b"\x7f" + b"\xff" * 7, key_format=BigEndian()),
    "an integer": at(Key(), "{}", 258, "integer", key=b"\x00\x00\x01\x02", key_format=BigEndian(4)),
    "an integer below zero": at(Key(), "{}", 1 - 2**31, "integer", key=b"\x80\0\0\1", key_format=BigEndian(4)),
    "an integer that is no long": at(
        Key(), "{}", Malformed("the key has 4 bytes, and an integer 8"), "long", key=b"\0\0\0\1", key_format=BigEndian()
    ),
    "a key as bytes": at(Key(), "{}", b"\xff\0", "binary", key=b"\xff\0", key_format=Raw()),
    "a header": at(Header("h"), "{}", "2", headers=(("h", b"1"), ("h", b"2"), ("i", b"3"))),
    "a header that is not there": at(Header("h"), "{}", None, optional=True),
    "a header as a number": at(Header("h"), "{}", 2, "long", text=True, headers=(("h", b"2"),)),
    "the record's timestamp": at(Meta("timestamp"), "{}", 1_767_225_600_000_000, "timestamp", unit="ms"),
    "the record's place": at(Meta("offset"), "{}", 7, "long"),
    "the record's topic": at(Meta("topic"), "{}", "fields"),
    # Documents that Spark's parser of variants refuses for the fault of an ignored field.
    "a path beside a fault": at("a.b", f'{{"a": {{"c": [1], "b": "ö"}}, "ö": {REFUSED}}}', "ö"),
    "a path behind a fault": at("a.b", f' {{"ö": {REFUSED}, "a": {{"b": "x"}} }}', "x"),
    "an exponent beside a fault": one("decimal(4,2)", f'1e-2, "y": {REFUSED}', Decimal("0.01")),
    "an object as JSON beside a fault": one("json", f'{{"b": [1e-2]}}, "y": {REFUSED}', {"b": [Decimal("0.01")]}),
    "half of a pair in a path": at(
        "a.b", '{"a": {"b": "\\ud83d"}}', Malformed("field a has half of a surrogate pair at byte 13")
    ),
    "a pair in a path": at("a.b", '{"a": {"b": "\\ud83d\\ude00"}}', "\U0001f600"),
    "a name twice in a path": at(
        "a.b",
        '{"a": {"b": "1", "b": "2"}}',
        Malformed("a declared field has a name twice in an object"),
    ),
    "a path nested too deep": at(
        "a.b",
        f'{{"a": {{"b": "1", "c": {"[" * 1100}{"]" * 1100}}}}}',
        Malformed("a declared field is nested deeper than 1,000 levels, or has a name twice in an object"),
    ),
    "the mark of exact numbers": one("string", '"\\ue000number:1", "y": 1e5', "\ue000number:1"),
}
EACH = pytest.mark.parametrize("name", CASES)


def record_of(case: Case) -> KafkaRecord:
    return KafkaRecord(case.value.encode(), case.key, case.headers, "fields", 3, 7, 1_767_225_600_000)


@EACH
def test_the_second_reader_reads_what_is_wanted(name: str) -> None:
    case = CASES[name]
    if isinstance(case.wanted, Malformed):
        too_deep = name == "a path nested too deep"  # Python's own limit, which `classify` reports
        with pytest.raises(RecursionError if too_deep else (MisfitError, ValueError)):
            read_apart(case)
    else:
        read = read_apart(case)
        wanted = json.dumps(case.wanted, default=float) if case.declared.type == "json" else case.wanted
        assert matches_stored(case.declared, read, wanted) or read == case.wanted


def read_apart(case: Case) -> Any:
    record = record_of(case)
    own_key = decode_record_key(stream_of(case.declared, case.key_format), record, None)
    read = convert_field(case.declared, record, parse_document(case.value.encode()), own_key)
    if name_twice(case) or "\ud83d" in str(read).replace("\U0001f600", ""):
        raise MisfitError("the pipeline refuses what Python reads")
    if case.declared.type.startswith("decimal") or case.declared.type in {"integer", "long"}:
        ensure_fits(case.declared, read)
    return read


def name_twice(case: Case) -> bool:
    return '"b": "1", "b"' in case.value


def ensure_fits(declared: Field, read: Any) -> None:
    """The second reader compares with a column, so it need not know the column's bounds."""
    if not read:
        return
    if declared.type in {"integer", "long"}:
        if abs(read) > {"integer": 2**31 - 1, "long": 2**63 - 1}[declared.type]:
            raise MisfitError("beyond the type")
        return
    precision, scale = map(int, declared.type[8:-1].split(","))
    if Decimal(read).adjusted() >= precision - scale or Decimal(read) != round(Decimal(read), scale):
        raise MisfitError("beyond the type")


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> dict[str, tuple[str | None, Any]]:
    """Detail and value of each case; those of one declaration together."""
    by_field: dict[tuple[Field, KeyFormat], list[str]] = {}
    for name, case in CASES.items():
        by_field.setdefault((case.declared, case.key_format), []).append(name)
    frames = [classified(spark, *declared, names) for declared, names in by_field.items()]
    return {row["name"]: (row["detail"], row["reported"]) for rows in frames for row in rows}


def stream_of(declared: Field, key_format: KeyFormat) -> Stream:
    fields = (
        declared,
        Field("id", "string", source=Meta("topic")),
        Field("v", "long", source=Meta("offset")),
        Field("at", "timestamp", source=Meta("timestamp"), unit="ms"),
    )
    return make_stream(
        "fields", fields=fields, key=("id",), version="v", event_time="at", lookup=None,
        transitions=None, first_version=None, record_key="ignore", key_format=key_format,
    )  # fmt: skip


def classified(spark: SparkSession, declared: Field, key_format: KeyFormat, names: list[str]) -> list[Any]:
    from pyspark.sql import functions as F

    stream = stream_of(declared, key_format)
    rows = [
        (name, case.key, case.value.encode(), [*case.headers], "fields", 3, 7, 1_767_225_600_000)
        for name, case in ((name, CASES[name]) for name in names)
    ]
    raw = spark.createDataFrame(
        cast("Any", rows),
        "name STRING, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
        "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp_ms BIGINT",
    ).withColumn(PROBLEM, F.lit(None).cast("string"))
    value = F.col("field_x")
    reported = F.unix_micros(value) if declared.type == "timestamp" else value
    work = cast("Work", SimpleNamespace(stream=stream))
    return parse_records(work, raw).select("name", "detail", reported.alias("reported")).collect()


@pytest.mark.slow
@EACH
def test_the_pipeline_reads_what_is_wanted(found: dict[str, tuple[str | None, Any]], name: str) -> None:
    case, (detail, reported) = CASES[name], found[name]
    if isinstance(case.wanted, Malformed):
        assert (detail, reported) == (str(case.wanted), None)
        return
    assert detail is None
    reported = bytes(reported) if isinstance(reported, bytearray) else reported
    assert matches_stored(case.declared, read_apart(case), reported)
    if not (isinstance(case.wanted, float) and math.isnan(case.wanted)):
        assert (
            parse_document(reported.encode()) if case.declared.type == "json" and reported is not None else reported
        ) == case.wanted


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a", ("a",)),
        ("a.b.c", ("a", "b", "c")),
        ('["a.b"]', ("a.b",)),
        ('a["b c"].d', ("a", "b c", "d")),
        ("$schema.@id", ("$schema", "@id")),
    ],
)
def test_a_path_names_its_steps(path: str, names: tuple[str, ...]) -> None:
    assert split_path(path) == names


@pytest.mark.parametrize("path", ["", ".a", "a..b", "a.", "a[0]", 'a["b', "a b", 'a["b\\"c"]'])
def test_invalid_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        split_path(path)
