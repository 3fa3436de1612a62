"""Decoding values in Spark: in every format to a variant whose parts become fields, or to a fault."""

# The columns are `payload`, the value without its framing; `usual`, whether the record is a usual one, and `usual_x`,
# the fields of such records (see `highwater.assets.fast_expressions`). For other records `json` is the variant, null
# where there is none; `unread` is the fault; and `mark` (see `highwater.assets.documents.build_number_mark`).
# `unknown_schema` is the schema that the registry does not know yet.

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.assets.avro_values import has_valid_utf8, with_nullable_doubles, without_members
from highwater.assets.documents import (
    build_number_mark,
    describe_invalid_utf8,
    describe_refusal,
    extract_valid_part,
    has_lone_surrogate,
    mark_inexact_numbers,
    scan_document,
)
from highwater.assets.fast_expressions import (
    build_null_values,
    build_typed_values,
    has_usual_records,
    has_usual_typed_values,
    has_usual_values,
    with_usual_fields,
)
from highwater.assets.field_parts import can_hold_infinity, select_outermost_names, select_whole_fields
from highwater.assets.framing import fetch_schemas_by_id, skip_header_id, without_framing
from highwater.formats import Avro, Csv, Json, Lines, Protobuf, Raw
from highwater.schemas import build_self_contained_avro, describe_other_kind, with_storable_decimals

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.schemas import Schema

# The first character of a sound document shows that it is an object.
_OBJECT = r"^[ \t\r\n]*\{"
_END = "end of the value"


def with_json(work: Work, raw: DataFrame) -> DataFrame:
    """Rows of raw with the columns of the decoded value.

    Raises:
        ConfigurationError: the format needs a schema registry, and none is configured.
        DependencyUnavailableError: the registry cannot be read (I15).
    """
    from pyspark.sql import functions as F

    stream = work.stream
    value = stream.value
    if isinstance(value, Json | Protobuf):
        return _parse_documents(stream, with_payload(work, value, raw))
    if isinstance(value, Avro):
        return with_avro(work, value, raw)
    readers = {Csv: _parse_csv, Lines: _parse_lines, Raw: _wrap_raw_value}
    read = readers[type(value)](stream, _with_unframed_payload(raw))
    return read.withColumn("usual", F.lit(False))


def with_payload(work: Work, declared: Json | Protobuf, raw: DataFrame) -> DataFrame:
    """Rows with the JSON document of a value as `payload`, the fault of its framing, and `unknown_schema`."""
    if isinstance(declared, Protobuf):
        return _decode_protobuf(work, declared, raw)
    return without_framing(work, raw, by_guid=False) if declared.registry else _with_unframed_payload(raw)


def _with_unframed_payload(raw: DataFrame) -> DataFrame:
    """Rows whose values have no framing."""
    from pyspark.sql import functions as F

    nothing = F.lit(None).cast("string")
    return raw.withColumns({"payload": F.col("value"), "misframed": nothing, "unknown_schema": nothing})


def _parse_documents(stream: Stream, rows: DataFrame) -> DataFrame:
    """The payload as a variant, null where it is not one JSON document in UTF-8, and `scan` where that is in doubt.

    `try_parse_json` stops at the end of the first document and would drop what follows in silence. Read as the first
    element of an array whose second one is ours, trailing text moves ours from its place. A payload that the parser
    refuses is scanned, and so is one whose strings have half of a surrogate pair: the parser reads that as `?`.
    """
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    # In a message NaN is a number like others, also in a field that nobody declared.
    infinite = can_hold_infinity(stream) or isinstance(stream.value, Protobuf)
    rows = _with_usual(stream, rows.withColumn("is_text", F.is_valid_utf8(text)), text)
    left = ~F.col("usual")
    mark = F.col("mark")
    marked = rows.withColumn("mark", F.when(left, build_number_mark(text, infinite=infinite)))
    exact = mark_inexact_numbers(text, mark, infinite=infinite)
    pair = F.when(left & F.col("is_text"), _parse_with_end(exact, text))
    whole = F.when(_is_sound(text, "json_and_end"), F.try_variant_get("json_and_end", "$[0]", "variant"))
    read = marked.withColumn("json_and_end", pair).withColumn("whole", whole)
    refused = left & F.col("whole").isNull() & F.col("is_text")
    parts = read.withColumns({"text": F.when(refused, text), "sound": F.when(refused, extract_valid_part(text))})
    scan = F.when(F.col("text").isNotNull(), scan_document("text", "sound", *_select_scanned_names(stream)))
    scans = parts.withColumn("scan", evaluate_once(scan))
    fields = F.try_parse_json(mark_inexact_numbers(F.col("scan.fields"), mark, infinite=infinite))
    fields = F.when(F.col("scan.problem").isNull(), fields)
    found = scans.withColumn("json", evaluate_once(F.coalesce("whole", fields)))
    return found.withColumn("unread", F.when(left, F.coalesce("misframed", _find_document_problem(stream))))


def _with_usual(stream: Stream, rows: DataFrame, text: Column) -> DataFrame:
    """Rows with `usual`, and the values of usual records, where Spark may round members that are not read."""
    from pyspark.sql import functions as F

    if not has_usual_records(stream):
        return rows.withColumn("usual", F.lit(False))
    read = rows.withColumn("rounded", F.when(F.col("is_text"), _parse_with_end(text, text)))
    values = with_usual_fields(stream, read, "rounded", "$[0]")
    is_object = F.startswith(text, F.lit("{")) | text.rlike(_OBJECT)
    usual = has_usual_values(stream, "rounded", "$[0]") & _is_sound(text, "rounded") & is_object
    usual &= F.col("misframed").isNull()
    return values.withColumn("usual", F.coalesce(usual, F.lit(False)))


def _parse_with_end(document: Column, text: Column) -> Column:
    """A document, which may be marked, and our text after it as a variant."""
    from pyspark.sql import functions as F

    return F.try_parse_json(F.concat(F.lit("["), document, F.lit(',"'), _build_end(text), F.lit('"]')))


def _build_end(text: Column) -> Column:
    """Our text behind a document; where a string of the document may be that text, another one that depends on it."""
    from pyspark.sql import functions as F

    return F.when(F.contains(text, F.lit(_END)), F.hex(F.xxhash64(text))).otherwise(F.lit(_END))


def _is_sound(text: Column, pair: str) -> Column:
    """Whether one document was read to its end, and nothing in it as another character."""
    from pyspark.sql import functions as F

    alone = F.try_variant_get(pair, "$[1]", "string") == _build_end(text)
    return alone & ~has_lone_surrogate(text)


def _select_scanned_names(stream: Stream) -> tuple[Sequence[str] | None, Sequence[str]]:
    """The outermost members that are read, None for all, and those whose objects and arrays are read too."""
    return (None, ()) if stream.reads_all_members else (select_outermost_names(stream), select_whole_fields(stream))


def _find_document_problem(stream: Stream) -> Column:
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    # Without a problem it is longer than Jackson's limit for strings, or a variant's; or within it is what both refuse.
    refused = F.lit("a declared field is longer than 16 MiB")
    if stream.reads_all_members or select_whole_fields(stream):
        refused = describe_refusal(text, "a declared field")
    problem = F.coalesce("scan.problem", refused)
    unread = F.when(F.is_valid_utf8(text), problem).otherwise(describe_invalid_utf8(F.col("payload")))
    return F.when(F.col("json").isNull(), unread).when(~text.rlike(_OBJECT), F.lit("the value is no JSON object"))


def evaluate_once(column: Column) -> Column:
    """The column's values, in a form that the optimizer does not copy into the filters above.

    It never inlines a non-deterministic expression. Copies of the scan made the plan of a filter on `reason` take 20 s.
    """
    from pyspark.sql import functions as F

    return F.when(F.spark_partition_id() >= 0, column)


# Read after the value, and known before: bytes that a value leaves over move it from its place. The mark does not end
# as it begins, so it is found in a wrong place only where the bytes before it hold all of it.
_AVRO_MARK = b"\xf1high\xf2w\xf3"
_AVRO_END = {"type": "fixed", "name": "highwater_end", "size": len(_AVRO_MARK)}


def with_avro(work: Work, declared: Avro, raw: DataFrame, *, usual: bool = True) -> DataFrame:
    """Rows whose payload is read by the schema of its writer, each by its own.

    Args:
        work: the stream, and the schemas.
        declared: the format.
        raw: the rows.
        usual: whether usual records get the values of the stream's fields at once, and no variant.
    """
    from pyspark.sql import functions as F

    if declared.schema is not None:
        rows = _with_unframed_payload(raw).withColumn("schema", F.lit("declared"))
        types: dict[str, Any] = {"declared": (declared.schema, _resolve_avro_type(work.spark, declared.schema))}
    else:
        rows = without_framing(work, raw)
        known = {one: schema for one, schema in fetch_schemas_by_id(work, rows).items() if schema}
        types = {one: _read_avro_schema(work.spark, schema) for one, schema in known.items()}
    # The bytes after a payload that has the mark in it depend on all of the payload.
    hashed = F.unhex(F.lpad(F.hex(F.xxhash64("payload")), 16, "0"))
    end = F.when(F.contains("payload", F.lit(_AVRO_MARK)), hashed).otherwise(F.lit(_AVRO_MARK))
    rows = rows.withColumn("end", end)
    read = [(one, text, type_) for one, (text, type_) in types.items() if not isinstance(type_, str)]
    for at, (one, text, _) in enumerate(read):
        mine = F.when(F.col("schema") == one, _from_avro(F.concat("payload", "end"), text))
        rows = rows.withColumn(f"avro_{at}", evaluate_once(mine))
    no = F.lit(False)
    rows = _with_usual_avro(work.stream, rows, read) if usual else rows.withColumn("usual", no)
    json_, problem = F.lit(None).cast("variant"), F.lit(None).cast("string")
    for one, (_, reason) in types.items():
        if isinstance(reason, str):
            refused = F.lit(f"{_format_schema_name(one)} cannot be read: {reason}")
            problem = F.when(F.col("schema") == one, refused).otherwise(problem)
    for at, (one, text, _) in enumerate(read):
        mine, record, whole = F.col("schema") == one, F.col(f"avro_{at}"), _is_whole(at)
        sound = has_valid_utf8(record["value"], json.loads(text))
        json_ = F.when(mine & whole & sound, _build_variant_object(record, text)).otherwise(json_)
        problem = (
            F.when(mine & ~whole, F.lit(f"no Avro of {_format_schema_name(one)}"))
            .when(mine & ~sound, F.lit(f"a text in Avro of {_format_schema_name(one)} is not UTF-8"))
            .otherwise(problem)
        )
    left = ~F.col("usual")
    rows = rows.withColumns({"json": evaluate_once(F.when(left, json_)), "mark": F.lit(None).cast("string")})
    unread = F.coalesce("misframed", F.when(F.col("value").isNotNull(), problem))
    return rows.withColumn("unread", F.when(left, unread))


def _with_usual_avro(stream: Stream, rows: DataFrame, read: Sequence[tuple[str, str, DataType]]) -> DataFrame:
    """Rows with `usual`, and the values of usual records by the types of their writers."""
    from pyspark.sql import functions as F

    no = F.lit(False)
    if not has_usual_records(stream):
        return rows.withColumn("usual", no)
    usual, values = no, build_null_values(stream)
    for at, (one, text, type_) in enumerate(read):
        has_schema, record = F.col("schema") == one, F.col(f"avro_{at}")["value"]
        typed = build_typed_values(stream, record, type_)
        if typed is None:
            continue
        values = {name: F.when(has_schema, typed[name]).otherwise(rest) for name, rest in values.items()}
        sound = _is_whole(at) & has_valid_utf8(record, json.loads(text)) & has_usual_typed_values(stream, record)
        usual = F.when(has_schema, sound).otherwise(usual)
    usual = F.coalesce(usual & F.col("misframed").isNull(), no)
    return rows.withColumns(values).withColumn("usual", usual)


def _is_whole(at: int) -> Column:
    """Whether a value was read to its end."""
    from pyspark.sql import functions as F

    return F.coalesce(F.col(f"avro_{at}")["end"] == F.col("end"), F.lit(False))


def _format_schema_name(one: str) -> str:
    return "the declared schema" if one == "declared" else f"schema {one}"


def _read_avro_schema(spark: SparkSession, schema: Schema) -> tuple[str, DataType | str]:
    """A schema of the registry as one document, with the type of its values, or why they cannot be read."""
    if schema.kind != "AVRO":
        return "", describe_other_kind(schema, "AVRO")
    try:
        text = build_self_contained_avro(schema)
    except (ValueError, KeyError, TypeError):
        return "", "it is no Avro"
    return text, _resolve_avro_type(spark, text)


def _from_avro(data: Column, text: str) -> Column:
    from pyspark.sql import functions as F

    fields = [
        {"name": "value", "type": with_storable_decimals(json.loads(text))},
        {"name": "end", "type": _AVRO_END},
    ]
    written = {"type": "record", "name": "highwater_record", "fields": fields}
    read = with_nullable_doubles(written)
    options = {"mode": "PERMISSIVE"} if read == written else {"mode": "PERMISSIVE", "avroSchema": json.dumps(read)}
    return F.call_function("from_avro", data, F.lit(json.dumps(written)), _build_constant_map(options))


def _build_constant_map(values: Mapping[str, str]) -> Column:
    """A map of texts that queries of several sessions may evaluate at the same time.

    `map(…)`, which PySpark's `from_avro` makes of its options, fills a buffer of its own: a session that looked for
    cached rows evaluated it while another one did, and its query failed with DUPLICATED_MAP_KEY.
    """
    from pyspark.sql import functions as F

    return F.from_json(F.lit(json.dumps(values)), "map<string,string>")


def _build_variant_object(read: Column, text: str) -> Column:
    from pyspark.sql import functions as F

    return F.to_variant_object(without_members(read["value"], json.loads(text)))


def _resolve_avro_type(spark: SparkSession, text: str) -> DataType | str:
    """The type of the values of a schema, or why they cannot be read."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException
    from pyspark.sql import functions as F

    try:
        schema = json.loads(text)
        if not isinstance(schema, dict) or schema.get("type") != "record":
            return "it is no record"
        empty = spark.range(0).select(F.lit(b"").alias("v"))
        read = empty.select(_from_avro(F.col("v"), text).alias("read"))
        found = read.select("read.value", _build_variant_object(F.col("read"), text).alias("object")).schema
    except (AnalysisException, IllegalArgumentException, ParseException, ValueError, TypeError, KeyError) as error:
        return str(error).splitlines()[0][:200]
    except Py4JJavaError as error:
        # Only what the schema itself is refused for; a Spark that is unavailable says nothing of it (I15).
        if not str(error.java_exception).startswith(("org.apache.avro", "org.apache.spark.sql.avro")):
            raise
        return str(error.java_exception).splitlines()[0][:200]
    return found["value"].dataType


def _decode_protobuf(work: Work, declared: Protobuf, raw: DataFrame) -> DataFrame:
    """Rows whose payload is a JSON document that says what the Protobuf message says."""
    from pyspark.sql import functions as F

    from highwater.assets.protobuf import build_reader_udf

    if declared.descriptors is not None:
        rows = _with_unframed_payload(raw).withColumn("schema", F.lit("declared"))
        rows = rows.withColumn("places", F.lit(None).cast("binary"))
        schemas = None
    else:
        rows = without_framing(work, raw)
        schemas = {one: schema for one, schema in fetch_schemas_by_id(work, rows).items() if schema}
        rows = _with_other_kinds(rows, schemas)
        # Where the ID is in a header, which message it is follows there.
        rows = rows.withColumn("places", skip_header_id())
    rows = rows.withColumn("known", F.when(F.col("unknown_schema").isNull(), F.col("schema")))
    read = build_reader_udf(declared, schemas)("known", "payload", "places")
    rows = rows.withColumn("message", evaluate_once(read))
    return rows.withColumns(
        {
            "payload": F.col("message.document").cast("binary"),
            "misframed": F.coalesce("misframed", "message.problem"),
        }
    )


def _with_other_kinds(rows: DataFrame, schemas: Mapping[str, Schema]) -> DataFrame:
    """Rows whose `misframed` also reports schemas that are no Protobuf."""
    from pyspark.sql import functions as F

    problem, others = F.lit(None).cast("string"), {k: v for k, v in schemas.items() if v.kind != "PROTOBUF"}
    for one, schema in others.items():
        text = f"{_format_schema_name(one)} cannot be read: {describe_other_kind(schema, 'PROTOBUF')}"
        problem = F.when(F.col("schema") == one, F.lit(text)).otherwise(problem)
    reported = F.coalesce("misframed", F.when(F.col("value").isNotNull(), problem))
    return rows.withColumn("misframed", reported) if others else rows


def _parse_csv(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows whose payload is one line of separated values."""
    from pyspark.sql import functions as F

    declared = stream.value
    assert isinstance(declared, Csv)
    value, separator = _build_csv_pattern(declared), re.escape(declared.delimiter)
    # Spark's own parser drops a zero byte at the end of a line.
    line = F.concat(F.lit(declared.delimiter), F.col("line"))
    parts = F.regexp_extract_all(line, F.lit(f"{separator}({value})"), F.lit(1))
    sound = F.col("line").rlike(rf"\A{value}(?:{separator}{value})*+\z")
    read = _with_line(rows).withColumn("parts", evaluate_once(F.when(sound, parts)))
    values = [_unquote(F.get("parts", F.lit(at)), declared.quote) for at, _ in enumerate(declared.columns)]
    if declared.null is not None:
        values = [F.when(one != declared.null, one) for one in values]
    whole = F.struct(*[one.alias(name) for one, name in zip(values, declared.columns, strict=True)])
    wanted = len(declared.columns)
    wrong = F.coalesce(F.size("parts") != wanted, F.lit(True))
    problem = F.when(wrong, F.lit(f"no line of {wanted} values separated by {declared.delimiter!r}"))
    return _with_text_object(read, whole, problem)


def _unquote(part: Column, quote: str) -> Column:
    """A value without the quotes around it."""
    from pyspark.sql import functions as F

    inside = part.substr(F.lit(2), F.length(part) - 2)
    return F.when(F.startswith(part, F.lit(quote)), F.replace(inside, F.lit(quote * 2), F.lit(quote))).otherwise(part)


def _build_csv_pattern(declared: Csv) -> str:
    """A value whose quotes are around all of it, and doubled inside of it."""
    delimiter, quote = re.escape(declared.delimiter), re.escape(declared.quote)
    return f"(?:{quote}(?:[^{quote}]++|{quote}{quote})*+{quote}|(?!{quote})[^{delimiter}]*+)"


def _parse_lines(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows whose payload is a line that a pattern matches."""
    from pyspark.sql import functions as F

    from highwater.format_rules import to_java_pattern, to_python_pattern

    declared = stream.value
    assert isinstance(declared, Lines)
    # Lines end by a line feed alone, and letters are those of ASCII, as they are to the second reader.
    pattern = rf"(?d)\A(?:{to_java_pattern(declared.pattern)})\z"
    groups = re.compile(to_python_pattern(declared.pattern), re.ASCII).groupindex
    found = [F.regexp_extract("line", pattern, at).alias(name) for name, at in groups.items()]
    whole = F.struct(*[F.when(one != "", one).alias(name) for one, name in zip(found, groups, strict=True)])
    matches = F.col("line").rlike(pattern)
    return _with_text_object(
        _with_line(rows), whole, F.when(~matches, F.lit("the line does not match the declared pattern"))
    )


def _with_line(rows: DataFrame) -> DataFrame:
    """Rows with their payload as a line of text, without what ends it; null where it is none."""
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    return rows.withColumn("line", F.when(F.is_valid_utf8(text), F.regexp_replace(text, r"\r?\n\z", "")))


def _with_text_object(rows: DataFrame, whole: Column, problem: Column) -> DataFrame:
    """Rows whose line is an object of texts, unless there is a problem."""
    from pyspark.sql import functions as F

    several = F.when(F.col("line").rlike(r"[\r\n]"), F.lit("the value has more than one line"))
    broken = F.when(F.col("line").isNull(), describe_invalid_utf8(F.col("payload")))
    unread = F.when(F.col("value").isNotNull(), F.coalesce(broken, several, problem))
    marked = rows.withColumn("unread", evaluate_once(unread))
    json_ = F.when(F.col("unread").isNull() & F.col("value").isNotNull(), F.to_variant_object(whole))
    return marked.withColumns({"json": evaluate_once(json_), "mark": F.lit(None).cast("string")})


def _wrap_raw_value(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows whose payload is not parsed."""
    from pyspark.sql import functions as F

    del stream
    whole = F.when(F.col("value").isNotNull(), F.to_variant_object(F.struct("value")))
    nothing = F.lit(None).cast("string")
    return rows.withColumns({"json": whole, "unread": nothing, "mark": nothing})
