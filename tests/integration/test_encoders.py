"""What a Python encoder of each format writes comes out as the same values, and a changed byte as no other value."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from highwater.assets.documents import EXACT
from highwater.classifying import classify
from highwater.declaration import Field
from highwater.declaration_rules import find_problems
from highwater.formats import Avro, Csv, Json
from highwater.second_reader import KafkaRecord
from tests.helpers import value_domains as v
from tests.helpers.agreement import find_difference, is_canonical, mutate
from tests.helpers.encoders import ENCODERS, Encoder, Values
from tests.helpers.pipeline_rows import bare, by_pipeline, reported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS, MUTATED = 80, 120


def write_records(encoder: Encoder, chance: random.Random) -> list[tuple[Values, KafkaRecord]]:
    """Records, with the values that their columns must have."""
    drawn = [encoder.draw(at, chance) for at in range(RECORDS)]
    return [(encoder.store(one), encoder.encode(one, at, chance)) for at, one in enumerate(drawn)]


def normalize(value: Any) -> Any:
    """A value that equals those of the same type alone; times are microseconds since 1970."""
    if isinstance(value, Mapping):
        return {name: normalize(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [normalize(one) for one in value]
    if isinstance(value, datetime):
        return normalize(v.micros_of(value))
    # NaN equals nothing, and -0.0 equals 0.0.
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def normalize_document(value: Any) -> Any:
    """A document in JSON, whose numbers are those that are written."""
    if isinstance(value, Mapping):
        return {name: normalize_document(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [normalize_document(one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return normalize(Decimal(repr(value)) if is_number else value)


def find_unequal(encoder: Encoder, wanted: Values, found: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that do not have the values that they must have."""
    unequal = {}
    for declared in encoder.stream.fields:
        pair = wanted[declared.name], found[declared.name]
        wished, seen = map(normalize_document if declared.type == "json" else normalize, pair)
        if wished != seen:
            unequal[declared.name] = pair
    return unequal


def read_columns(encoder: Encoder, row: Mapping[str, Any]) -> Values:
    """The columns of a row of the pipeline."""
    values = {declared.name: reported(row[f"v_{declared.name}"]) for declared in encoder.stream.fields}
    for declared in encoder.stream.fields:
        if declared.type == "json" and values[declared.name] is not None:
            values[declared.name] = json.loads(values[declared.name], parse_int=Decimal, parse_float=Decimal)
    return values


def mutate_record(record: KafkaRecord, chance: random.Random) -> KafkaRecord:
    """A record with a byte changed, left out or added in its value, its key, or a header."""
    part = chance.choice(["value", "value", "key", "header" if record.headers else "value"])
    if part == "value":
        return replace(record, value=mutate(record.value or b"", chance))
    if part == "key":
        return replace(record, key=mutate(record.key or b"", chance))
    headers, at = list(record.headers), chance.randrange(len(record.headers))
    name, content = headers[at]
    headers[at] = name, mutate(content or b"", chance)
    return replace(record, headers=headers)


@pytest.mark.parametrize("name", ENCODERS)
def test_each_declaration_of_an_encoder_is_allowed(name: str) -> None:
    assert find_problems(ENCODERS[name].stream) == []


@pytest.mark.parametrize("name", ENCODERS)
def test_the_second_reader_reads_what_was_written(name: str) -> None:
    seed = random.randrange(10**6)
    encoder = ENCODERS[name]
    for wanted, record in write_records(encoder, random.Random(seed)):
        found = classify(encoder.stream, record, encoder.find_schema)
        assert found.detail is None, (seed, record)
        assert find_unequal(encoder, wanted, found.values) == {}, (seed, record)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_the_pipeline_reads_what_was_written_and_a_changed_byte_as_no_other_value(
    spark: SparkSession, name: str
) -> None:
    """A record with a byte changed, left out or added is a reject, or an event as the second reader has it."""
    seed = random.randrange(10**6)
    encoder, chance = ENCODERS[name], random.Random(seed)
    written = write_records(encoder, chance)
    records = [one for _, one in written]
    changed = [replace(mutate_record(chance.choice(records), chance), offset=RECORDS + at) for at in range(MUTATED)]
    parts = [(one.value, one.key, one.headers) for one in (*records, *changed)]
    values, keys, headers = zip(*parts, strict=True)
    found = by_pipeline(spark, encoder.stream, values, keys, headers, encoder.find_schema)
    rows = {row["name"]: row.asDict() for row in found}
    for wanted, record in written:
        assert rows[record.offset]["detail"] is None, (seed, record)
        assert find_unequal(encoder, wanted, read_columns(encoder, rows[record.offset])) == {}, (seed, record)
    for record in changed:
        theirs = classify(encoder.stream, record, encoder.find_schema)
        if theirs.kind == "reject" or is_canonical(encoder.stream, record, encoder.find_schema):
            assert not find_difference(encoder.stream, theirs, rows[record.offset]), (seed, record)


@pytest.mark.slow
def test_a_document_with_the_character_of_the_marks_keeps_its_numbers(spark: SparkSession) -> None:
    """`[1e400]` came out as `["Infinity"]`, and 1.00000000000000000000000000000000000000001 as 1.0."""
    fields = (Field("s", "string"), Field("any", "json"), Field("small", "decimal(38,38)"))
    wanted = [("\ue000", "[1e400]"), (EXACT, "1.00000000000000000000000000000000000000001"), (f"{EXACT}1", "[1E+2]")]
    values = [f'{{"s": "{text}", "any": {number}, "small": 1e-38}}'.encode() for text, number in wanted]
    rows = sorted(by_pipeline(spark, bare(Json(), *fields), values), key=lambda row: row["name"])
    assert [(row["v_s"], row["v_any"]) for row in rows] == wanted
    assert {(row["detail"], row["v_small"]) for row in rows} == {(None, Decimal("1e-38"))}


@pytest.mark.slow
def test_a_document_with_our_text_behind_documents_may_have_nan(spark: SparkSession) -> None:
    """A sound document with the text `end of the value` was a reject where it had NaN, which a field allows."""
    stream = bare(Json(), Field("s", "string"), Field("d", "double", nan="keep"))
    texts = ["end of the value", '\\",\\"end of the value']
    values = [f'{{"s": "{text}", "d": Infinity}}'.encode() for text in texts]
    values += [b'{"s": "end of the value", "d": 1},"end of the value"', b'{"s": "a", "d": 1},"end of the value"']
    rows = sorted(by_pipeline(spark, stream, values), key=lambda row: row["name"])
    assert [(row["v_s"], row["v_d"]) for row in rows[:2]] == [(json.loads(f'"{text}"'), float("inf")) for text in texts]
    assert [row["detail"] for row in rows] == [
        None,
        None,
        *[f"text follows the JSON document at byte {at}" for at in (33, 18)],
    ]


@pytest.mark.slow
def test_a_line_of_separated_values_keeps_each_character(spark: SparkSession) -> None:
    """The last value lost its zero bytes, and one of U+E001 alone was null."""
    texts = [
        f"{before}{one}{after}" for one in "\0\x01 \ue001\u2028\ufeff" for before in ("", "a") for after in ("", "b")
    ]
    wanted = [tuple(text if at == place else "x" for at in range(3)) for text in texts for place in range(3)]
    lines = [
        quote.join(("", f"{quote},{quote}".join(one), end)) for one in wanted for quote, end in (("", "\n"), ('"', ""))
    ]
    stream = bare(Csv(("a", "b", "c")), *(Field(name, "string") for name in "abc"))
    rows = sorted(by_pipeline(spark, stream, [one.encode() for one in lines]), key=lambda row: row["name"])
    assert [(row["v_a"], row["v_b"], row["v_c"]) for row in rows[::2]] == wanted
    assert [(row["v_a"], row["v_b"], row["v_c"]) for row in rows[1::2]] == wanted


_ARRAY = {"type": "array", "items": "double"}
ARRAYS = {
    "type": "record",
    "name": "Arrays",
    "fields": [
        {"name": "either", "type": ["null", "string", _ARRAY]},
        {"name": "named", "type": {"type": "map", "values": _ARRAY}},
        {"name": "rows", "type": {"type": "array", "items": _ARRAY}},
    ],
}


@pytest.mark.slow
def test_doubles_in_arrays_of_avro_keep_their_digits_wherever_the_array_is(spark: SparkSession) -> None:
    """Avro 1.12.0 alone rounds them to `float`: 0.1 becomes 0.10000000149011612, and 1.7e308 infinite."""
    doubles = Field("doubles", "array", of=Field("double", "double"))
    fields = (Field("either", "json"), Field("named", "map", of=doubles), Field("rows", "array", of=doubles))
    stream, numbers, parsed = (
        bare(Avro(json.dumps(ARRAYS)), *fields),
        [0.1, 1.7e308, -1e-300],
        fastavro.parse_schema(ARRAYS),
    )
    encoded = []
    for either in (numbers, "text"):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, {"either": either, "named": {"a": numbers}, "rows": [numbers, []]})
        encoded.append(out.getvalue())
    found = sorted(by_pipeline(spark, stream, encoded), key=lambda row: row["name"])
    assert [row["detail"] for row in found] == [None, None]
    assert [json.loads(row["v_either"]) for row in found] == [numbers, "text"]
    assert [(row["v_named"], row["v_rows"]) for row in found] == [({"a": numbers}, [numbers, []])] * 2
