"""Decoding record keys: a variant that fields are taken from, or the fault of the key, in every format."""

# The columns are `key_json`, the variant, null where there is no key; `key_unread`, the fault of the key; and
# `key_unknown_schema`, the schema that the registry does not know yet. All are null where no field is taken from the
# key, and where it is not compared. A fault of a key that is only compared, for a warning, is null too.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from highwater.assets.decoding import evaluate_once, with_avro, with_payload
from highwater.assets.documents import (
    describe_invalid_utf8,
    describe_refusal,
    extract_valid_part,
    has_lone_surrogate,
    scan_document,
)
from highwater.formats import Avro, BigEndian, Json, Protobuf, Raw, Text
from highwater.schemas import KEY_HEADER, VALUE_HEADER, Schema, build_self_contained_avro
from highwater.sources import Key, split_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Stream

_END = "end of the key"
# Avro writes a record of one field as the field alone: a key of any type is read as such a record.
_MEMBER = "key"


def with_key(work: Work, raw: DataFrame) -> DataFrame:
    """Rows of raw with the columns of the decoded key.

    Raises:
        ConfigurationError: the format needs a schema registry, and none is configured.
        DependencyUnavailableError: the registry cannot be read (I15).
    """
    from pyspark.sql import functions as F

    nothing = F.lit(None).cast("string")
    rows = _with_decoded_key(work, raw)
    if work.stream.needs_readable_key or not work.stream.decodes_key:
        return rows
    # A document without its framing can be read, and is still no such key.
    sound = F.when(F.coalesce("key_unread", "key_unknown_schema").isNull(), F.col("key_json"))
    return rows.withColumns({"key_json": sound, "key_unread": nothing, "key_unknown_schema": nothing})


def _with_decoded_key(work: Work, raw: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    declared, key, nothing = work.stream.key_format, F.col("key"), F.lit(None).cast("string")
    bare = {"key_unread": nothing, "key_unknown_schema": nothing}
    if not work.stream.decodes_key:
        return raw.withColumns({"key_json": F.lit(None).cast("variant"), **bare})
    if isinstance(declared, Raw):
        return raw.withColumns({"key_json": key.cast("variant"), **bare})
    if isinstance(declared, Text):
        text = key.cast("string")
        broken = F.when(~F.is_valid_utf8(text), _translate_key_problem(describe_invalid_utf8(key)))
        sound = F.when(F.is_valid_utf8(text), text).cast("variant")
        return raw.withColumns({**bare, "key_json": sound, "key_unread": broken})
    if isinstance(declared, BigEndian):
        wrong = F.concat(F.lit("the key has "), F.length(key), F.lit(f" bytes, and an integer {declared.size}"))
        return raw.withColumns(
            {
                **bare,
                "key_json": F.when(F.length(key) == declared.size, _decode_integer(key, declared.size)).cast("variant"),
                "key_unread": F.when(F.length(key) != declared.size, wrong),
            }
        )
    return _decode_key(work, declared, raw)


def _decode_integer(key: Column, size: int) -> Column:
    from pyspark.sql import functions as F

    number = F.conv(F.hex(key), 16, -10).cast("bigint")
    # Four bytes are read without their sign.
    return number if size == 8 else F.when(number < 2**31, number).otherwise(number - 2**32)


def _decode_key(work: Work, declared: Json | Avro | Protobuf, raw: DataFrame) -> DataFrame:
    """Rows with a key in the format of a value: the key is decoded in the place of the value."""
    from pyspark.sql import functions as F

    headers = F.transform(
        F.filter("headers", lambda h: h["key"] == KEY_HEADER),
        lambda h: F.struct(F.lit(VALUE_HEADER).alias("key"), h["value"].alias("value")),
    )
    moved = {"record_value": F.col("value"), "record_headers": F.col("headers")}
    rows = raw.withColumns({**moved, "value": F.col("key"), "headers": headers})
    if isinstance(declared, Avro):
        rows = _from_avro(work, declared, rows)
    else:
        rows = _parse_document(work.stream, with_payload(work, declared, rows))
    unknown = F.concat("unknown_schema", F.lit(" of the key"))
    back = [F.col(f"record_{name}" if name in {"value", "headers"} else name).alias(name) for name in raw.columns]
    found = [F.col("json").alias("key_json"), _translate_key_problem(F.col("unread")).alias("key_unread")]
    return rows.select(*back, *found, unknown.alias("key_unknown_schema"))


def _from_avro(work: Work, declared: Avro, rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    if declared.schema is not None:
        declared = Avro(_wrap_in_record(declared.schema))
    find = None if work.schemas is None else _wrap_schemas(work.schemas)
    read = with_avro(replace(work, schemas=find), declared, rows, usual=False)
    return read.withColumn("json", F.try_variant_get("json", f'$["{_MEMBER}"]', "variant"))


def _wrap_in_record(schema: str) -> str:
    fields = [{"name": _MEMBER, "type": json.loads(schema)}]
    return json.dumps({"type": "record", "name": "highwater_key", "fields": fields})


def _wrap_schemas(find: Callable[[int | str], Schema | None]) -> Callable[[int | str], Schema | None]:
    """The finder of schemas of keys, each as a record."""

    def found(one: int | str) -> Schema | None:
        schema = find(one)
        if schema is None or schema.kind != "AVRO":
            return schema
        try:
            return Schema(schema.id, "AVRO", _wrap_in_record(build_self_contained_avro(schema)))
        except (ValueError, KeyError, TypeError):
            return schema  # the record is rejected: its schema cannot be read

    return found


def _parse_document(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows whose payload is a JSON document of any type, as a whole: in a key a name that occurs twice is a fault.

    `try_parse_json` stops at the end of the first document and would drop what follows in silence. Read as the first
    element of an array whose last one is ours, trailing text moves ours from its place.
    """
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    pair = F.try_parse_json(F.concat(F.lit("["), text, F.lit(f',"{_END}"]')))
    is_last = F.try_variant_get("key_and_end", "$[1]", "string") == _END
    is_last &= F.try_variant_get("key_and_end", "$[2]", "variant").isNull()
    whole = F.when(is_last & ~has_lone_surrogate(text), F.try_variant_get("key_and_end", "$[0]", "variant"))
    read = rows.withColumn("key_and_end", F.when(F.is_valid_utf8(text), pair)).withColumn("json", evaluate_once(whole))
    refused = F.when(F.col("json").isNull() & F.is_valid_utf8(text), text)
    parts = read.withColumn("text", refused).withColumn("sound", extract_valid_part(F.col("text")))
    names = [split_path(one.path)[0] for f in stream.fields for one in f.sources if isinstance(one, Key) and one.path]
    scan = F.when(F.col("text").isNotNull(), scan_document("text", "sound", list(dict.fromkeys(names)) or [_MEMBER]))
    scans = parts.withColumn("scan", evaluate_once(scan))
    rest = F.when(has_lone_surrogate(text), "the value has half of a surrogate pair").otherwise(
        describe_refusal(text, "the value")
    )
    broken = F.when(F.is_valid_utf8(text), F.coalesce("scan.problem", rest)).otherwise(
        describe_invalid_utf8(F.col("payload"))
    )
    return scans.withColumn("unread", F.coalesce("misframed", F.when(F.col("json").isNull(), broken)))


def _translate_key_problem(problem: Column) -> Column:
    """The fault of a value, worded for a key."""
    from pyspark.sql import functions as F

    named = F.regexp_replace(problem, "^the value", "the key")
    return F.when(F.startswith(named, F.lit("the key")), named).otherwise(F.concat(F.lit("the key: "), named))
