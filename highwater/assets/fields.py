"""The values of declared fields, each in the type of its column."""

# The columns of a field `x` are `json_x`, the record's value as a variant, null if it has none; `kind_x`, the
# type of that; `number_x`, the plain and exact digits of a number; and `field_x`, the value. Elements of arrays, maps
# and structs have no columns: the same expressions are evaluated for each element.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from highwater.assets.field_parts import (
    FieldPart,
    build_part,
    build_variant_path,
    from_source,
    matches_type,
    needs_digits,
    to_text,
)
from highwater.assets.field_times import (
    WHOLE_NUMBER,
    convert_date,
    convert_local_timestamp,
    convert_time_of_day,
    convert_timestamp,
)
from highwater.formats import Csv, Lines, Raw

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Field, Stream

_NUMBER = r"^-?(0|[1-9][0-9]*+)(\.[0-9]++)?+([eE][+-]?[0-9]++)?+\z"
# More places than a number is moved by its exponent fit no type.
_MAX_PLACES = 400
_SQL_TYPES = {
    "string": "STRING",
    "timestamp": "TIMESTAMP",
    "timestamp_ntz": "TIMESTAMP_NTZ",
    "date": "DATE",
    # Spark 4.0 has no type for it.
    "time": "STRING",
    "boolean": "BOOLEAN",
    "integer": "INT",
    "long": "BIGINT",
    "binary": "BINARY",
    "json": "STRING",
}


def build_sql_type(declared: Field) -> str:
    """The type of a field's values."""
    inner = [build_sql_type(one) for one in declared.members]
    if declared.type == "array":
        return f"ARRAY<{inner[0]}>"
    if declared.type == "map":
        return f"MAP<STRING, {inner[0]}>"
    if declared.type == "struct":
        members = zip(declared.members, inner, strict=True)
        return f"STRUCT<{', '.join(f'`{one.name}`: {kind}' for one, kind in members)}>"
    return _SQL_TYPES.get(declared.type, declared.type.upper())


def build_column_type(declared: Field) -> str:
    """The type of a field's column in events: that of its values, or of their hashes."""
    return "STRING" if declared.mask == "hash" else build_sql_type(declared)


def mask_value(declared: Field, value: Column) -> Column:
    """The value of a field as events hold it."""
    from pyspark.sql import functions as F

    return F.sha2(value.cast("string"), 256) if declared.mask == "hash" else value


def with_fields(stream: Stream, rows: DataFrame, *, usual: bool = False) -> DataFrame:
    """Rows with a column `json`, and those of raw, get the columns of all fields.

    Args:
        stream: declares the fields.
        rows: the rows.
        usual: whether usual records have their values already (see `highwater.assets.fast_expressions`).
    """
    from pyspark.sql import functions as F

    read = [f for f in stream.fields if f.is_read]
    found = rows.withColumns({f"json_{f.name}": _build_json(stream, f) for f in read})
    found = found.withColumns({f"kind_{f.name}": F.schema_of_variant(f"json_{f.name}") for f in read})
    parts = [build_part(stream, f) for f in read]
    numbers = [part for part in parts if needs_digits(part.declared)]
    if numbers:
        # Once for all fields, and of few records: hardly any number is written with an exponent.
        inexact = [F.when(part.is_inexact, part.behind_mark) for part in numbers]
        any_ = F.exists(F.array(*inexact), F.isnotnull)
        found = found.withColumn("plain", F.when(any_, F.transform(F.array(*inexact), _to_plain_number)))
        digits = [_extract_digits(part, F.get("plain", F.lit(at))) for at, part in enumerate(numbers)]
        found = found.withColumns(
            {f"number_{part.declared.name}": one for part, one in zip(numbers, digits, strict=True)}
        )
    values = {part.declared.name: convert_value(part) for part in parts}
    if usual:
        values = {name: F.when(F.col("usual"), F.col(f"usual_{name}")).otherwise(one) for name, one in values.items()}
    return found.withColumns({f"field_{name}": one for name, one in values.items()})


def _build_json(stream: Stream, declared: Field) -> Column:
    from pyspark.sql import functions as F

    if isinstance(stream.value, Raw) and declared.type == "string":
        # The whole value is taken as text, not as bytes.
        found = [
            to_text(F.col("value")).cast("variant") if isinstance(s, tuple) else from_source(stream, s)
            for s in declared.sources
        ]
    else:
        found = [from_source(stream, one) for one in declared.sources]
    json = F.coalesce(*found)
    # A group of a pattern that matches nothing is absent, not null.
    return F.when(~F.is_variant_null(json), json) if isinstance(stream.value, Lines) else json


def _extract_digits(part: FieldPart, plain: Column) -> Column:
    """The digits of a number, plain; null for anything else."""
    from pyspark.sql import functions as F

    kind, text, declared = part.kind, part.text, part.declared
    if declared.unscaled:
        return F.when(
            (kind == "STRING") & ~part.is_inexact, _decode_unscaled(text, parse_precision_and_scale(declared)[1])
        )
    found = F.when((kind == "BIGINT") | kind.startswith("DECIMAL"), text).when(part.is_inexact, plain)
    if not declared.text and not part.textual:
        return found
    return found.when((kind == "STRING") & text.rlike(_NUMBER), _to_plain_number(text))


def _decode_unscaled(text: Column, scale: int) -> Column:
    """The digits of a two's complement number in base64, the highest byte first, of 16 bytes at the most."""
    from pyspark.sql import functions as F

    digits = F.hex(F.try_to_binary(text, F.lit("base64")))
    sign = F.when(F.substr(digits, F.lit(1), F.lit(1)).isin(list("89ABCDEF")), F.lit("F")).otherwise(F.lit("0"))
    # `lpad` would cut longer texts.
    padded = F.when(
        F.length(digits).between(1, 32), F.concat(F.expr("''"), F.repeat(sign, 32 - F.length(digits)), digits)
    )
    high = F.conv(F.substr(padded, F.lit(1), F.lit(16)), 16, -10).cast("decimal(19,0)")
    low = F.conv(F.substr(padded, F.lit(17), F.lit(16)), 16, 10).cast("decimal(20,0)")
    # Towards zero, so that no part has more digits than the whole.
    below = F.when(high < 0, F.lit(1)).otherwise(F.lit(0))
    times = F.lit("18446744073709551616").cast("decimal(20,0)")
    moved = F.try_multiply(high + below, times).cast("decimal(38,0)")
    rest = low - below * times
    whole = F.try_add(moved, rest.cast("decimal(38,0)")).cast("string")
    negative = F.startswith(whole, F.lit("-"))
    plain = F.regexp_replace(whole, "^-", "")
    filled = F.concat(F.repeat(F.lit("0"), F.greatest(F.lit(0), scale + 1 - F.length(plain))), plain)
    before = filled.substr(F.lit(1), F.length(filled) - scale)
    behind = F.regexp_replace(F.right(filled, F.lit(scale)), r"0+\z", "") if scale else F.lit("")
    fraction = F.when(behind == "", F.lit("")).otherwise(F.concat(F.lit("."), behind))
    return F.concat(F.when(negative, F.lit("-")).otherwise(F.lit("")), before, fraction)


def _to_plain_number(number: Column) -> Column:
    """A number of JSON without an exponent, and without zeros that say nothing; null beyond any type."""
    from pyspark.sql import functions as F

    def extract_group(group: int) -> Column:
        return F.regexp_extract(number, r"^(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?\z", group)

    exponent = F.when(extract_group(4) == "", F.lit(0)).otherwise(extract_group(4).try_cast("int"))
    # Null beyond the bound, so that no text of a billion zeros is ever made.
    moved = F.when(exponent.between(-_MAX_PLACES, _MAX_PLACES), exponent)
    point = F.length(extract_group(2)) + moved
    digits = F.concat(extract_group(2), extract_group(3))
    # The digits with as many zeros before and after them as bring the point into them.
    before = F.repeat(F.lit("0"), F.greatest(F.lit(0), 1 - point))
    behind = F.repeat(F.lit("0"), F.greatest(F.lit(0), point - F.length(digits)))
    padded, at = F.concat(before, digits, behind), F.greatest(F.lit(1), point)
    whole = F.regexp_replace(padded.substr(F.lit(1), at), r"^0+(?=[0-9])", "")
    fraction = F.regexp_replace(padded.substr(at + 1, F.length(padded)), r"0+\z", "")
    plain = F.concat(extract_group(1), whole, F.when(fraction == "", "").otherwise(F.concat(F.lit("."), fraction)))
    return F.when((extract_group(2) != "") & moved.isNotNull(), plain)


def convert_value(part: FieldPart) -> Column:
    """The field in its column's type; null where it does not fit, or where there is nothing."""
    from pyspark.sql import functions as F

    declared, read = part.declared, _READERS[part.declared.type.split("(")[0]](part)
    if declared.default is None:
        return read
    given = F.lit(declared.default).cast(build_sql_type(declared))
    return F.when(part.json.isNull(), given).otherwise(read)


def convert_text(text: Column, declared: Field) -> Column:
    """The value of a field from a text; null where it does not fit."""
    from pyspark.sql import functions as F

    nothing = F.lit(None).cast("variant")
    part = FieldPart(
        nothing,
        F.lit("STRING"),
        F.lit(None).cast("string"),
        declared,
        textual=False,
        mark=nothing.cast("string"),
        written=text,
    )
    return _READERS[declared.type.split("(")[0]](part)


def _convert_string(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    return F.when(matches_type(part), part.text)


def _convert_boolean(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    read = F.when(part.kind == "BOOLEAN", part.get_as("boolean"))
    return read.when(part.text.isin(["true", "false"]), part.text == "true") if part.textual else read


def _convert_integer(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    return F.when(part.number.rlike(WHOLE_NUMBER), part.number.try_cast(build_sql_type(part.declared)))


def _convert_decimal(part: FieldPart) -> Column:
    """A decimal. The cast would round, and a double has lost digits before; money is not rounded in silence."""
    from pyspark.sql import functions as F

    cast = part.number.try_cast(build_sql_type(part.declared))
    return cast if part.declared.rounded else F.when(part.number.rlike(build_decimal_pattern(part.declared)), cast)


def _convert_binary(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    read = F.when(part.kind == "BINARY", part.get_as("binary"))
    return read.when((part.kind == "STRING") & ~part.is_inexact, F.try_to_binary(part.text, F.lit("base64")))


def _to_json(part: FieldPart) -> Column:
    """Any value as text, its numbers as they were written; null of JSON's null, which is no value."""
    from pyspark.sql import functions as F

    written = F.to_json(part.json)
    marked = F.concat(F.lit('"'), part.mark, F.lit('([^"]*+)"'))
    restored = F.when(F.contains(written, part.mark), F.regexp_replace(written, marked, F.lit("$1")))
    return F.when(part.kind != "VOID", F.coalesce(restored, written))


def _convert_floating(part: FieldPart) -> Column:
    """The nearest number of the type; infinite ones only where the stream keeps them."""
    from pyspark.sql import functions as F

    kind = build_sql_type(part.declared).lower()
    given = F.when(part.kind.isin(["DOUBLE", "FLOAT"]), part.get_as("double"))
    typed = given.cast(kind)
    read = F.coalesce(typed, part.number.try_cast(kind))
    finite = F.when(F.abs(read) < F.lit(float("inf")), read)
    if part.declared.nan == "keep":
        named = F.when(part.is_infinite, part.behind_mark.cast(kind)).when(is_beyond(given), typed)
        return named.otherwise(finite)
    return finite


def is_beyond(value: Column) -> Column:
    """Whether a number is NaN or an infinity."""
    from pyspark.sql import functions as F

    return F.isnan(value) | (F.abs(value) == F.lit(float("inf")))


def _convert_array(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    element = part.declared.members[0]
    return F.when(
        part.kind.startswith("ARRAY"),
        F.transform(part.get_as("array<variant>"), lambda one: convert_value(build_inner_part(part, element, one))),
    )


def _convert_map(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    inner = part.declared.members[0]
    return F.when(
        part.kind.startswith("OBJECT"),
        F.transform_values(
            part.get_as("map<string,variant>"), lambda _, one: convert_value(build_inner_part(part, inner, one))
        ),
    )


def _convert_struct(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    members = [convert_value(build_member_part(part, one)).alias(one.name) for one in part.declared.members]
    return F.when(part.kind.startswith("OBJECT"), F.struct(*members))


def build_member_part(part: FieldPart, declared: Field) -> FieldPart:
    """The part of a struct's member."""
    from pyspark.sql import functions as F

    paths = [one for one in declared.sources if isinstance(one, tuple)]
    found = [F.try_variant_get(part.json, build_variant_path(path), "variant") for path in paths]
    return build_inner_part(part, declared, F.coalesce(*found))


def convert_from_key(stream: Stream, declared: Field) -> Column:
    """A field in its column's type, as the decoded record key has it; null where it does not fit or is absent."""
    from pyspark.sql import functions as F

    json = F.coalesce(*[from_source(stream, one) for one in declared.sources])
    textual, no_mark = isinstance(stream.value, Csv | Lines), F.lit(None).cast("string")
    return convert_value(_build_bare_part(declared, json, textual=textual, mark=no_mark))


def build_inner_part(part: FieldPart, declared: Field, json: Column) -> FieldPart:
    """The part of a field inside of another one."""
    return _build_bare_part(declared, json, textual=part.textual, mark=part.mark)


def _build_bare_part(declared: Field, json: Column, *, textual: bool, mark: Column) -> FieldPart:
    """The part of a field that has no columns."""
    from pyspark.sql import functions as F

    bare = FieldPart(json, F.schema_of_variant(json), F.lit(None).cast("string"), declared, textual, mark)
    if not needs_digits(declared):
        return bare
    return replace(bare, number=_extract_digits(bare, _to_plain_number(bare.behind_mark)))


_READERS: dict[str, Callable[[FieldPart], Column]] = {
    "timestamp": convert_timestamp,
    "timestamp_ntz": convert_local_timestamp,
    "date": convert_date,
    "time": convert_time_of_day,
    "binary": _convert_binary,
    "json": _to_json,
    "integer": _convert_integer,
    "long": _convert_integer,
    "float": _convert_floating,
    "double": _convert_floating,
    "decimal": _convert_decimal,
    "string": _convert_string,
    "boolean": _convert_boolean,
    "array": _convert_array,
    "map": _convert_map,
    "struct": _convert_struct,
}


def build_decimal_pattern(declared: Field) -> str:
    """The numbers that a decimal holds, as a variant writes them: plain, without leading or trailing zeros."""
    precision, scale = parse_precision_and_scale(declared)
    whole = rf"(0|[1-9]\d{{0,{precision - scale - 1}}})" if precision > scale else "0"
    return rf"^-?{whole}(\.\d{{1,{scale}}})?\z" if scale else rf"^-?{whole}\z"


def parse_precision_and_scale(declared: Field) -> tuple[int, int]:
    """The precision and scale of a declared `decimal(p,s)`, in digits."""
    precision, scale = declared.type.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)
