"""Results for single values: what is an event, with which fields, and what `detail` says of the others."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from highwater.assets import event_json
from highwater.assets.documents import EXACT, mark_inexact_numbers
from highwater.assets.field_parts import build_part
from highwater.assets.fields import _extract_digits, _to_plain_number, convert_value
from highwater.assets.origins import PROBLEM
from highwater.assets.parsing import parse_records
from highwater.declaration import Field
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.declaration import Stream

STREAM = make_stream(
    "exact",
    fields=(
        Field("id", "string"),
        Field("version", "long"),
        Field("count", "integer"),
        Field("at", "timestamp"),
        Field("cents", "decimal(38,2)"),
        Field("whole", "decimal(38,0)"),
        Field("part", "decimal(38,38)", at_least=0),
        Field("narrow", "decimal(28,2)"),
    ),
    key=("id",),
    event_time="at",
    lookup=None,
    transitions=None,
    first_version=None,
)
FIELDS = {
    "id": '"o1"',
    "version": "1",
    "count": "1",
    "at": '"2026-03-01T10:00:00Z"',
    "cents": "1.5",
    "whole": "7",
    "part": "0.5",
    "narrow": "2.00",
}
PLAIN: dict[str, Any] = {
    "id": "o1",
    "version": 1,
    "count": 1,
    "at": datetime(2026, 3, 1, 10, tzinfo=UTC),
    "cents": Decimal("1.5"),
    "whole": Decimal(7),
    "part": Decimal("0.5"),
    "narrow": Decimal(2),
}


def document(more: str = "", **fields: str) -> bytes:
    """A sound value with some fields written otherwise, and more text before its last bracket."""
    inside = ", ".join(f'"{name}": {text}' for name, text in {**FIELDS, **fields}.items())
    return ("{" + inside + more + "}").encode()


# The value of an ignored field that Spark's parser of variants refuses.
REFUSED = '{"z": 1, "z": 2}'
SOUND = document()
END = len(SOUND) - 1


def with_ignored(text: str) -> bytes:
    return document(f', "ignored": {text}')


EVENTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "plain": (SOUND, {}),
    "space around it": (b"\r\n\t " + SOUND + b" \n", {}),
    "2,000 digits in an ignored field": (with_ignored("9" * 2000), {}),
    "a fraction of 5,000 digits in an ignored field": (with_ignored("-0." + "1" * 5000 + "e-7"), {}),
    "an ignored name of 60,000 characters": (document(f', "{"n" * 60_000}": 1'), {}),
    "an ignored array of 1,001 levels": (with_ignored("[" * 1001 + "]" * 1001), {}),
    "ignored objects of 20,000 levels": (with_ignored('{"a": [' * 10_000 + "1" + "]}" * 10_000), {}),
    "an ignored name twice": (document(', "more": 1, "more": 2'), {}),
    "a name twice in an ignored object": (with_ignored('{"id": 1, "id": 2}'), {}),
    "a declared name in an ignored object": (
        with_ignored('[{"id": 7}], "x": "' + "9" * 3 + '", "y": ' + REFUSED),
        {},
    ),
    "an infinite number in an ignored field": (with_ignored("1e99999"), {}),
    "half a pair in an ignored field": (with_ignored(r'"\ud83d"'), {}),
    "half a pair in an ignored name": (document(r', "\uDE00\ud83d": 1'), {}),
    "the pairs of an ignored field": (with_ignored(r'["\ud83d\ude00", "\uD83D\uDE00", "\\ud83d"]'), {}),
    "escapes in an ignored field": (with_ignored(r'"\"\\\/\b\f\n\r\t\u00e9", "y": ' + REFUSED), {}),
    "a name written by escapes": (document().replace(b'"cents"', rb'"\u0063ent\u0073"'), {}),
    "the same, scanned": (with_ignored(REFUSED).replace(b'"cents"', rb'"\u0063ent\u0073"  '), {}),
    "fields in another order, scanned": (
        document(', "y": ' + REFUSED, at='"2026-03-01T10:00:00.5Z"'),
        {"at": datetime(2026, 3, 1, 10, 0, 0, 500_000, tzinfo=UTC)},
    ),
    "a pair as an escape": (document(id=r'"\ud83d\ude00"'), {"id": "\U0001f600"}),
    "a pair as an escape in capitals": (document(id=r'"\uD83D\uDE00"'), {"id": "\U0001f600"}),
    "a backslash and what looks like half a pair": (document(id=r'"\\ud83d"'), {"id": r"\ud83d"}),
    "the mark that ends our array": (document(id='"end of the value"'), {"id": "end of the value"}),
    "lower case letters of a time": (document(at='"2026-03-01t10:00:00z"'), {}),
    "a lower case t, and an offset": (document(at='"2026-03-01t11:00:00.000+01:00"'), {}),
    "zeros after the microsecond": (document(at='"2026-03-01T10:00:00.000000000000Z"'), {}),
    "an exponent": (document(cents="1E+2", version="1e0"), {"cents": Decimal(100)}),
    "10^20": (document(whole="1" + "0" * 20), {"whole": Decimal(10**20)}),
    "38 digits": (document(whole="-" + "9" * 38), {"whole": Decimal("-" + "9" * 38)}),
    "38 digits after the point": (document(part="0." + "0" * 37 + "1"), {"part": Decimal("1e-38")}),
    "zeros after the point": (document(cents="3.000", whole="3.0"), {"cents": Decimal(3), "whole": Decimal(3)}),
    "zero below zero": (document(cents="-0.0", whole="-0", part="-0"), {"cents": 0, "whole": 0, "part": 0}),
    "beside a name twice": (document(', "y": ' + REFUSED, cents="0.01"), {"cents": Decimal("0.01")}),
    "the greatest numbers": (
        document(version=str(2**63 - 1), count=str(-(2**31))),
        {
            "version": 2**63 - 1,
            "count": -(2**31),
        },
    ),
}
HALF = "has half of a surrogate pair at byte"
REJECTS: dict[str, tuple[bytes, str]] = {
    "1.005": (document(cents="1.005"), "field cents has more than 2 digits after the point"),
    "1.5": (document(whole="1.5"), "field whole has more than 0 digits after the point"),
    "1.0000000000001": (document(narrow="1.0000000000001"), "field narrow has more than 2 digits after the point"),
    "10^26": (document(narrow="1" + "0" * 26), "field narrow does not fit decimal(28,2)"),
    "1": (document(part="1"), "field part does not fit decimal(38,38)"),
    "39 digits": (document(whole="9" * 39), "field whole does not fit decimal(38,0)"),
    "2,000 digits": (document(whole="9" * 2000), "field whole does not fit decimal(38,0)"),
    "2,000 digits, scanned": (
        document(f', "y": {REFUSED}', whole="9" * 2000),
        f"field whole has more than 1,000 digits at byte {{{'9' * 2000}}}",
    ),
    "beyond 64 bits": (document(version=str(2**63)), "field version does not fit long"),
    "beyond 32 bits": (document(count=str(2**31)), "field count does not fit integer"),
    "a fraction of a long": (document(version="1.5"), "field version is no whole number"),
    "digits after the microsecond": (
        document(at='"2026-03-01T10:00:00.0000001Z"'),
        "field at has digits after the microsecond",
    ),
    "half a pair": (document(id=r'"\ud83d"'), f"field id {HALF} 8"),
    "half a pair behind text": (document(id=r'"ü\"\uDE00x"'), f"field id {HALF} 12"),
    "halves in the wrong order": (document(id=r'"\ude00\ud83d"'), f"field id {HALF} 8"),
    "a pair and a half": (document(id=r'"\ud83d\ude00\uD83D"'), f"field id {HALF} 20"),
    "a backslash before the second half": (document(id=r'"\\ud83d\ude00"'), f"field id {HALF} 15"),
    "not UTF-8": (SOUND.replace(b"o1", b"\xc3\xa9\xed\xa0\xbd"), "the value is not UTF-8 at byte 10"),
    "UTF-8 cut off": (SOUND + b"\xf0\x9f\x98", f"the value is not UTF-8 at byte {END + 1}"),
    "empty": (b"", "the value is empty"),
    "space": (b" \n", "not JSON: the document ends, expected a value at byte 2"),
    "a byte order mark": (b"\xef\xbb\xbf" + SOUND, "not JSON: a byte order mark at byte 0"),
    "NaN": (with_ignored("NaN"), f"not JSON: NaN or infinity at byte {END + 13}"),
    "infinity": (document(cents="-Infinity"), "not JSON: NaN or infinity at byte {-Infinity}"),
    "a word": (b"nope", "not JSON: unexpected character at byte 0"),
    "a second document": (SOUND + SOUND, f"text follows the JSON document at byte {END + 1}"),
    "trailing text": (SOUND + b" x", f"text follows the JSON document at byte {END + 2}"),
    "a trailing bracket": (SOUND + b"]", f"text follows the JSON document at byte {END + 1}"),
    "the end of our array, and text": (
        SOUND + b',"end of the value"] text',
        f"text follows the JSON document at byte {END + 1}",
    ),
    "a string without end": (document(', "more'), f"not JSON: a string without end begins at byte {END + 2}"),
    "a line break in a string": (
        with_ignored('"a\nb"'),
        f"not JSON: a control character in a string at byte {END + 15}",
    ),
    "an unknown escape": (with_ignored(r'"a\x41"'), f"not JSON: an unknown escape at byte {END + 15}"),
    "a leading zero": (with_ignored("01"), f"not JSON: expected , or }} at byte {END + 14}"),
    "a number for a name": (document(", 1e5: 3"), f"not JSON: expected a name at byte {END + 2}"),
    "an infinity for a name": (document(", NaN: 3"), f"not JSON: NaN or infinity at byte {END + 2}"),
    "a comma too many": (document(", "), f"not JSON: expected a name at byte {END + 2}"),
    "no comma": (with_ignored("[1 2]"), f"not JSON: expected , or ] at byte {END + 16}"),
    "no colon": (document(', "more" 1'), f"not JSON: expected : at byte {END + 9}"),
    "another bracket": (with_ignored("[1}"), f"not JSON: expected , or ] at byte {END + 15}"),
    "cut off": (SOUND[:-1], f"not JSON: the document ends, expected , or }} at byte {END}"),
    "200,000 open brackets": (
        with_ignored("[" * 200_000)[:-1],
        f"not JSON: the document ends, expected a value or ] at byte {END + 13 + 200_000}",
    ),
    "no object": (b"[1]", "the value is no JSON object"),
    "no object, scanned": (b"[" * 1001 + b"]" * 1001, "the value is no JSON object"),
    "a declared name twice": (document(', "id": "o1"'), f"field id occurs twice, again at byte {END + 2}"),
    "the same by an escape": (document(r', "\u0069d" : "o1"'), f"field id occurs twice, again at byte {END + 2}"),
    "nothing of an ignored field": (b'{"ignored": ' + REFUSED.encode() + b"}", "field id is missing"),
    "an array for a string": (
        document(', "y": ' + REFUSED, id="[[]]"),
        "field id is string, found JSON ARRAY",
    ),
}
INVALID = {"below by the last digit": (document(part="-0." + "0" * 37 + "1"), "part is below 0")}


def detail(value: bytes, reported: str) -> str:
    """`{text}` means the position of the text in the value."""
    before, _, text = reported.partition(" {")
    return f"{before} {value.index(text[:-1].encode())}" if text else reported


@dataclass(frozen=True)
class Found:
    reason: str | None
    rule: str | None
    detail: str | None
    fields: dict[str, Any]


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> dict[str, Found]:
    """Of all of these values together, by their names."""
    from pyspark.sql import functions as F

    values = {name: value for name, (value, _) in (EVENTS | REJECTS | INVALID).items()}
    keys = {name: EVENTS[name][1].get("id", "o1") if name in EVENTS else "o1" for name in values}
    rows: list[Any] = [(name, keys[name].encode(), value) for name, value in values.items()]
    reported = spark.createDataFrame(rows, "name STRING, key BINARY, value BINARY").withColumn(
        PROBLEM, F.lit(None).cast("string")
    )
    work = cast("Work", SimpleNamespace(stream=STREAM))
    columns = [f"field_{field.name}" for field in STREAM.fields]
    return {
        row["name"]: Found(
            row["reason"],
            row["rule"],
            row["detail"],
            {name.removeprefix("field_"): row[name] for name in columns},
        )
        for row in parse_records(work, reported).select("name", "reason", "rule", "detail", *columns).collect()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_faults_in_ignored_fields_reject_nothing(found: dict[str, Found], name: str) -> None:
    """Spark's parser of variants refused the whole document for a fault of a field that nobody declared."""
    one, (_, changed) = found[name], EVENTS[name]
    reported = {**one.fields, "at": one.fields["at"] and one.fields["at"].astimezone(UTC)}
    assert (one.reason, one.rule, one.detail, reported) == (None, None, None, {**PLAIN, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("name", REJECTS)
def test_a_reject_names_its_cause_and_the_position(found: dict[str, Found], name: str) -> None:
    """`detail` was "the value is not one JSON document in UTF-8" for nearly all of them, and some were accepted:
    decimals were rounded, half of a surrogate pair was read as `?`.
    """
    value, reported = REJECTS[name]
    assert (found[name].reason, found[name].rule) == ("malformed", None)
    assert found[name].detail == detail(value, reported)


@pytest.mark.slow
@pytest.mark.parametrize("name", INVALID)
def test_a_bound_is_held_to_the_last_digit(found: dict[str, Found], name: str) -> None:
    """Spark compared both numbers in a third type without the last digits: -1e-38 was not below 0."""
    assert (found[name].reason, found[name].rule, found[name].detail) == ("invalid", "part.at_least", INVALID[name][1])


TYPES = [(p, s) for p in range(1, 39) for s in range(p + 1)]


def numbers() -> list[str]:
    """As JSON writes them: the greatest of each type, with either sign, some in between, zeros and exponents."""
    chance = random.Random(7)
    found = [
        "0",
        "-0",
        "-0.0",
        "0." + "0" * 38,
        "0." + "0" * 39,
        "1E+2",
        "1e-2",
        "10e0",
        "1." + "0" * 37,
        "1." + "0" * 38,
    ]
    for p, s in TYPES:
        whole, part = "9" * (p - s) or "0", "9" * s
        found.append(("-" if chance.random() < 0.3 else "") + whole + ("." + part if part else ""))
    for _ in range(150):
        digits = "".join(chance.choice("0123456789") for _ in range(chance.randint(1, 40)))
        cut = chance.randint(0, len(digits))
        whole, part = digits[:cut].lstrip("0") or "0", digits[cut:] + "0" * chance.choice([0, 0, 1, 5])
        found.append(chance.choice(["", "-"]) + whole + ("." + part if part else ""))
    return list(dict.fromkeys(found))


def holds(text: str, p: int, s: int) -> bool:
    """Whether a decimal holds the number exactly."""
    unscaled = Fraction(text) * 10**s
    return bool(unscaled.denominator == 1 and abs(unscaled) < 10**p)


@pytest.mark.slow
def test_a_filter_on_the_reason_does_not_copy_the_scan(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer inlined the scan of refused documents into the filter: planning one query took 20 s."""
    from pyspark.sql import functions as F

    value = F.concat(F.lit('{"id": '), F.col("id").cast("string"), F.lit("}")).cast("binary")
    rows = spark.range(1).select(value.alias("key"), value.alias("value"), F.lit(None).cast("string").alias(PROBLEM))
    found = parse_records(cast("Work", SimpleNamespace(stream=STREAM)), rows)
    found.where("reason IS NULL").select("key").explain(extended=True)
    _, _, optimized = capsys.readouterr().out.partition("== Optimized Logical Plan ==")
    optimized, _, _ = optimized.partition("== Physical Plan ==")
    filters = [line for line in optimized.splitlines() if "Filter" in line]
    assert filters
    assert not any("regexp_extract_all" in line for line in filters)


@pytest.mark.slow
def test_a_decimal_is_exact_or_malformed_for_every_precision_and_scale(spark: SparkSession) -> None:
    """1.005 became 1.01 in a decimal(38,2), 1.5 became 2 in a decimal(38,0), which took no 10^20."""
    from pyspark.sql import functions as F

    texts = numbers()
    rows = spark.createDataFrame([(text,) for text in texts], "text STRING")
    stream = make_stream("numbers")
    any_ = build_part(stream, Field("x", "decimal(1,0)"))
    read = rows.withColumn("mark", F.lit(EXACT))
    exact = mark_inexact_numbers(F.col("text"), F.col("mark"), infinite=False)
    read = read.withColumn("json_x", F.try_parse_json(exact))
    read = read.withColumn("kind_x", F.schema_of_variant("json_x"))
    read = read.withColumn("number_x", _extract_digits(any_, _to_plain_number(any_.behind_mark)))
    columns = [convert_value(build_part(stream, Field("x", f"decimal({p},{s})"))).alias(f"d_{p}_{s}") for p, s in TYPES]
    table = read.select("text", *columns).toArrow()
    order = table["text"].to_pylist()
    assert sorted(order) == sorted(texts)
    for p, s in TYPES:
        column = table[f"d_{p}_{s}"]
        assert column.type == pa.decimal128(p, s)
        expected = [Decimal(text) if holds(text, p, s) else None for text in order]
        assert column.to_pylist() == expected, (p, s)


def test_a_published_decimal_is_exact_for_every_precision_and_scale() -> None:
    exact = Context(prec=100)
    for p, s in TYPES:
        field = Field("x", f"decimal({p},{s})")
        units = [0, 1, -1, 10**p - 1, 1 - 10**p, 10 ** (p - 1)]
        values = [exact.scaleb(Decimal(one), -s) for one in units]
        table = pa.table({"x": pa.array(values, pa.decimal128(p, s))})
        written = event_json.encode_values(cast("Stream", SimpleNamespace(stored_fields=(field,))), table)
        texts = [one.decode() for one in written.to_pylist()]
        assert [json.loads(text, parse_float=Decimal, parse_int=Decimal)["x"] for text in texts] == values
        assert not any("e" in text.lower() for text in texts)
