"""The declared fields of a record: their place in the value, their value in the column's type, and their faults."""

# Of a field `x` the columns are `json_x`, what the record has as a variant, null where it has nothing; `kind_x`, the
# type of that; `number_x`, of a number its digits, plain and exact; and `field_x`, the value. What is inside of arrays,
# maps and structs has no columns: the same expressions are evaluated for each element.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from highwater.assets.documents import EXACT
from highwater.declaration_parts import UNITS
from highwater.formats import Csv, Lines, Raw
from highwater.sources import Header, Key, Meta, Reference, Rest, steps

if TYPE_CHECKING:
    from datetime import date

    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Field, Stream

# ISO 8601 date and time with a zone, as RFC 3339 narrows it; Spark reads no time without seconds, and would cut off
# what it cannot hold: two versions would be one. To Java's `$` a line break may follow the end.
_SECONDS = r"^\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}"
_LOCAL = _SECONDS + r"(\.\d{1,6}0*+)?"
_ISO = _LOCAL + r"([Zz]|[+-]\d{2}:?\d{2})\z"
_FINER = _SECONDS + r"\.\d{6}\d*[1-9]"
_DATE = r"^\d{4}-\d{2}-\d{2}\z"
_TIME = r"^((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,6})0*+)?\z"
_NUMBER = r"^-?(0|[1-9][0-9]*+)(\.[0-9]++)?+([eE][+-]?[0-9]++)?+\z"
_WHOLE = r"^-?[0-9]{1,19}\z"
# More places than a number is moved by its exponent fit no type.
_MOST_PLACES = 400
DAYS = (-719_162, 2_932_896)  # of the years 1 to 9999
_DAY_US = 86_400_000_000
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
_INFINITE = ("NaN", "Infinity", "-Infinity")
_CONTAINERS = frozenset({"array", "map", "struct"})


@dataclass(frozen=True)
class Part:
    """The value of a field in a record.

    Args:
        json: a variant; null where it has nothing.
        kind: the type of the variant.
        number: of a number its digits, plain and exact.
        declared: the field.
        textual: whether the format has texts alone, so that numbers and booleans are written as such.
        written: the value as text where that is known to be its type.
    """

    json: Column
    kind: Column
    number: Column
    declared: Field
    textual: bool
    written: Column | None = None

    @cached_property
    def text(self) -> Column:
        """The value as text."""
        from pyspark.sql import functions as F

        return F.try_variant_get(self.json, "$", "string") if self.written is None else self.written

    @cached_property
    def is_inexact(self) -> Column:
        """Whether the value is a number that the variant parser would have rounded."""
        from pyspark.sql import functions as F

        if self.written is not None:
            return F.lit(False)  # noqa: FBT003 - a literal column
        return F.col("markable") & (self.kind == "STRING") & F.startswith(self.text, F.lit(EXACT))

    @cached_property
    def behind_mark(self) -> Column:
        """The text of a number that the variant parser would have rounded."""
        from pyspark.sql import functions as F

        return self.text.substr(F.lit(len(EXACT) + 1), F.length(self.text))

    @cached_property
    def is_infinite(self) -> Column:
        """Whether the value is NaN or an infinity in a document."""
        return self.is_inexact & self.text.isin([EXACT + name for name in _INFINITE])

    def got(self, kind: str) -> Column:
        """The value as a type of SQL; null where it is another."""
        from pyspark.sql import functions as F

        return F.try_variant_get(self.json, "$", kind)


def sql_type(declared: Field) -> str:
    """The column type of a field."""
    inner = [sql_type(one) for one in declared.members]
    if declared.type == "array":
        return f"ARRAY<{inner[0]}>"
    if declared.type == "map":
        return f"MAP<STRING, {inner[0]}>"
    if declared.type == "struct":
        members = zip(declared.members, inner, strict=True)
        return f"STRUCT<{', '.join(f'`{one.name}`: {kind}' for one, kind in members)}>"
    return _SQL_TYPES.get(declared.type, declared.type.upper())


def outermost(stream: Stream) -> list[str]:
    """The names in the value's outermost object that fields are taken from."""
    return list(dict.fromkeys(path[0] for path in _paths(stream)))


def whole_fields(stream: Stream) -> list[str]:
    """The fields of `outermost` whose objects and arrays are read too."""
    any_ = [f for f in stream.fields if f.type == "json" or f.type in _CONTAINERS]
    deep = [path[0] for path in _paths(stream) if len(path) > 1]
    return list(dict.fromkeys([*deep, *(path[0] for f in any_ for path in _paths_of(f))]))


def takes_infinite(stream: Stream) -> bool:
    """Whether a field takes NaN or an infinity."""
    return any(map(_takes_infinite, stream.fields))


def _takes_infinite(declared: Field) -> bool:
    return declared.nan != "reject" or any(map(_takes_infinite, declared.members))


def _paths(stream: Stream) -> list[tuple[str, ...]]:
    return [path for declared in stream.fields if not declared.expression for path in _paths_of(declared)]


def _paths_of(declared: Field) -> list[tuple[str, ...]]:
    return [one for one in declared.sources if isinstance(one, tuple)]


def part_of(stream: Stream, declared: Field) -> Part:
    """The part of a declared field of a stream, by its columns."""
    from pyspark.sql import functions as F

    name, textual = declared.name, isinstance(stream.value, Csv | Lines)
    return Part(F.col(f"json_{name}"), F.col(f"kind_{name}"), F.col(f"number_{name}"), declared, textual)


def with_fields(stream: Stream, rows: DataFrame, *, usual: bool = False) -> DataFrame:
    """Rows with a column `json`, and those of raw, get the columns of all fields.

    Args:
        stream: declares the fields.
        rows: the rows.
        usual: whether usual records have their values already (see `highwater.assets.fast_expressions`).
    """
    from pyspark.sql import functions as F

    read = [f for f in stream.fields if f.is_read]
    found = rows.withColumns({f"json_{f.name}": _json_of(stream, f) for f in read})
    found = found.withColumns({f"kind_{f.name}": F.schema_of_variant(f"json_{f.name}") for f in read})
    parts = [part_of(stream, f) for f in read]
    numbers = [part for part in parts if _reads_digits(part.declared)]
    if numbers:
        # Once for all fields, and of few records: hardly any number is written with an exponent.
        inexact = [F.when(part.is_inexact, part.behind_mark) for part in numbers]
        any_ = F.exists(F.array(*inexact), F.isnotnull)
        found = found.withColumn("plain", F.when(any_, F.transform(F.array(*inexact), _plain)))
        digits = [_digits_of(part, F.get("plain", F.lit(at))) for at, part in enumerate(numbers)]
        found = found.withColumns(
            {f"number_{part.declared.name}": one for part, one in zip(numbers, digits, strict=True)}
        )
    values = {part.declared.name: _value(part) for part in parts}
    if usual:
        values = {name: F.when(F.col("usual"), F.col(f"usual_{name}")).otherwise(one) for name, one in values.items()}
    return found.withColumns({f"field_{name}": one for name, one in values.items()})


def _json_of(stream: Stream, declared: Field) -> Column:
    from pyspark.sql import functions as F

    if isinstance(stream.value, Raw) and declared.type == "string":
        # Of the whole value the text, not the bytes.
        found = [
            _as_text(F.col("value")).cast("variant") if isinstance(s, tuple) else from_source(stream, s)
            for s in declared.sources
        ]
    else:
        found = [from_source(stream, one) for one in declared.sources]
    json = F.coalesce(*found)
    # A group of a pattern that matches nothing is absent, not null.
    return F.when(~F.is_variant_null(json), json) if isinstance(stream.value, Lines) else json


def _unknown_members(stream: Stream, path: tuple[str, ...]) -> Column:
    """The members that no field is taken from, by name, of the object at a path; null where there is none."""
    from pyspark.sql import functions as F

    members = F.try_variant_get("json", variant_path(path), "map<string,variant>")
    taken = sorted(stream.members_taken(path))
    return F.map_filter(members, lambda name, _: ~name.isin(taken)) if taken else members


def _rest_of(stream: Stream, path: tuple[str, ...]) -> Column:
    """The members of the object at a path that no field is taken from, as a variant; null where there are none."""
    from pyspark.sql import functions as F

    unknown = _unknown_members(stream, path)
    return F.when(F.size(unknown) > 0, F.to_variant_object(unknown))


# Members that a problem names at most.
_MOST_NAMED = 5


def unknown_problem(stream: Stream) -> Column:
    """The members of a record without a field, for a person; null where every member has one, or none is looked for."""
    from pyspark.sql import functions as F

    if stream.unknown_fields.policy != "reject":
        return F.lit(None).cast("string")
    path = stream.unknown_fields.path
    names = F.array_sort(F.map_keys(_unknown_members(stream, path)))
    prefix = "".join(f"{step}." for step in path)
    listed = F.concat_ws(", ", F.transform(F.slice(names, 1, _MOST_NAMED), lambda one: F.concat(F.lit(prefix), one)))
    more = F.size(names) - _MOST_NAMED
    rest = F.when(more > 0, F.concat(F.lit(" and "), more.cast("string"), F.lit(" more"))).otherwise("")
    return F.when(F.size(names) > 0, F.concat(F.lit("no field is declared for "), listed, rest))


def from_source(stream: Stream, source: Key | Header | Meta | Rest | Reference | tuple[str, ...]) -> Column:
    """The value of a source, as a variant; null where it has none."""
    from pyspark.sql import functions as F

    if isinstance(source, Rest):
        return _rest_of(stream, source.path)
    if isinstance(source, tuple):
        return F.try_variant_get("json", variant_path(source), "variant")
    if isinstance(source, Meta):
        # Of the origin: a copy on a tier lies elsewhere.
        column = F.col("origin_timestamp_ms" if source.name == "timestamp" else f"origin_{source.name}")
        return column.cast("string" if source.name == "topic" else "bigint").cast("variant")
    if isinstance(source, Header):
        values = F.transform(F.filter("headers", lambda h: h["key"] == source.name), lambda h: h["value"])
        return _as_text(F.try_element_at(values, F.lit(-1))).cast("variant")
    assert isinstance(source, Key), "fields of the lookup's table are no part of a record"
    key = F.col("key_json")
    return F.try_variant_get(key, variant_path(steps(source.path)), "variant") if source.path else key


def _as_text(value: Column) -> Column:
    from pyspark.sql import functions as F

    return F.when(F.is_valid_utf8(value.cast("string")), value.cast("string"))


def variant_path(names: tuple[str, ...], root: str = "$") -> str:
    """The path in Spark's syntax to the values below these names."""
    return root + "".join(f'["{step}"]' for step in names)


def _reads_digits(declared: Field) -> bool:
    return declared.is_number or declared.unit is not None


def _digits_of(part: Part, plain: Column) -> Column:
    """The digits of a number, plain; null for anything else."""
    from pyspark.sql import functions as F

    kind, text, declared = part.kind, part.text, part.declared
    if declared.unscaled:
        return F.when((kind == "STRING") & ~part.is_inexact, _unscaled(text, precision_and_scale(declared)[1]))
    found = F.when((kind == "BIGINT") | kind.startswith("DECIMAL"), text).when(part.is_inexact, plain)
    if not declared.text and not part.textual:
        return found
    return found.when((kind == "STRING") & text.rlike(_NUMBER), _plain(text))


def _unscaled(text: Column, scale: int) -> Column:
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


def _plain(number: Column) -> Column:
    """A number of JSON without an exponent, and without zeros that say nothing; null beyond any type."""
    from pyspark.sql import functions as F

    def part(group: int) -> Column:
        return F.regexp_extract(number, r"^(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?\z", group)

    exponent = F.when(part(4) == "", F.lit(0)).otherwise(part(4).try_cast("int"))
    # Null beyond the bound, so that no text of a billion zeros is ever made.
    moved = F.when(exponent.between(-_MOST_PLACES, _MOST_PLACES), exponent)
    point = F.length(part(2)) + moved
    digits = F.concat(part(2), part(3))
    # The digits with as many zeros before and behind them as bring the point into them.
    before = F.repeat(F.lit("0"), F.greatest(F.lit(0), 1 - point))
    behind = F.repeat(F.lit("0"), F.greatest(F.lit(0), point - F.length(digits)))
    padded, at = F.concat(before, digits, behind), F.greatest(F.lit(1), point)
    whole = F.regexp_replace(padded.substr(F.lit(1), at), r"^0+(?=[0-9])", "")
    fraction = F.regexp_replace(padded.substr(at + 1, F.length(padded)), r"0+\z", "")
    plain = F.concat(part(1), whole, F.when(fraction == "", "").otherwise(F.concat(F.lit("."), fraction)))
    return F.when((part(2) != "") & moved.isNotNull(), plain)


def _value(part: Part) -> Column:
    """The field in its column's type; null where it does not fit, or where there is nothing."""
    from pyspark.sql import functions as F

    declared, read = part.declared, _READERS[part.declared.type.split("(")[0]](part)
    if declared.default is None:
        return read
    given = F.lit(declared.default).cast(sql_type(declared))
    return F.when(part.json.isNull(), given).otherwise(read)


def of_text(text: Column, declared: Field) -> Column:
    """The value of a field from a text; null where it does not fit."""
    from pyspark.sql import functions as F

    nothing = F.lit(None).cast("variant")
    part = Part(nothing, F.lit("STRING"), F.lit(None).cast("string"), declared, textual=False, written=text)
    return _READERS[declared.type.split("(")[0]](part)


def _string(part: Part) -> Column:
    from pyspark.sql import functions as F

    return F.when(_fits(part), part.text)


def _boolean(part: Part) -> Column:
    from pyspark.sql import functions as F

    read = F.when(part.kind == "BOOLEAN", part.got("boolean"))
    return read.when(part.text.isin(["true", "false"]), part.text == "true") if part.textual else read


def _whole(part: Part) -> Column:
    from pyspark.sql import functions as F

    return F.when(part.number.rlike(_WHOLE), part.number.try_cast(sql_type(part.declared)))


def _exact(part: Part) -> Column:
    """A decimal. The cast would round, and a double has lost digits before; money is not rounded in silence."""
    from pyspark.sql import functions as F

    cast = part.number.try_cast(sql_type(part.declared))
    return cast if part.declared.rounded else F.when(part.number.rlike(digits(part.declared)), cast)


def _bytes(part: Part) -> Column:
    from pyspark.sql import functions as F

    read = F.when(part.kind == "BINARY", part.got("binary"))
    return read.when((part.kind == "STRING") & ~part.is_inexact, F.try_to_binary(part.text, F.lit("base64")))


def _as_json(part: Part) -> Column:
    """Any value as text, its numbers as they were written; null of JSON's null, which is no value."""
    from pyspark.sql import functions as F

    written = F.to_json(part.json)
    marked = F.contains(written, F.lit(EXACT)) & F.col("markable")
    restored = F.regexp_replace(written, f'"{EXACT}([^"]*+)"', "$1")
    return F.when(part.kind != "VOID", F.when(marked, restored).otherwise(written))


def _floating(part: Part) -> Column:
    """The nearest number of the type; infinite ones only where the stream keeps them."""
    from pyspark.sql import functions as F

    kind = sql_type(part.declared).lower()
    given = F.when(part.kind.isin(["DOUBLE", "FLOAT"]), part.got("double"))
    typed = given.cast(kind)
    read = F.coalesce(typed, part.number.try_cast(kind))
    finite = F.when(F.abs(read) < F.lit(float("inf")), read)
    if part.declared.nan == "keep":
        named = F.when(part.is_infinite, part.behind_mark.cast(kind)).when(_is_beyond(given), typed)
        return named.otherwise(finite)
    return finite


def _is_beyond(value: Column) -> Column:
    """Whether a number is NaN or an infinity."""
    from pyspark.sql import functions as F

    return F.isnan(value) | (F.abs(value) == F.lit(float("inf")))


def _moment(part: Part) -> Column:
    """A timestamp; null where the text is none, or the number is outside the plausible range."""
    from pyspark.sql import functions as F

    declared, text = part.declared, part.text
    if declared.unit is not None:
        read = _counted(part)
    else:
        read = F.when(text.rlike(_ISO), F.try_to_timestamp(F.upper(text)))
        if declared.zone is not None:
            local = F.to_utc_timestamp(F.try_to_timestamp(F.concat(F.upper(text), F.lit("Z"))), declared.zone)
            read = F.when(text.rlike(_LOCAL + r"\z"), local).otherwise(read)
    moment = F.when(part.kind == "TIMESTAMP", part.got("timestamp")).otherwise(read)
    # In UTC: a zone moves the first and the last hours into years that other readers' times do not have.
    return F.when(F.year(moment).between(1, 9999), moment)


def _local(part: Part) -> Column:
    """A timestamp without a zone."""
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        read = _counted(part)
    else:
        text = part.text
        read = F.when(text.rlike(_LOCAL + r"\z"), F.try_to_timestamp(F.concat(F.upper(text), F.lit("Z"))))
    read = read.cast("timestamp_ntz")
    moment = F.when(part.kind == "TIMESTAMP_NTZ", part.got("timestamp_ntz")).otherwise(read)
    return F.when(F.year(moment).between(1, 9999), moment)


def _counted(part: Part) -> Column:
    from pyspark.sql import functions as F

    micros = _micros(part)
    return F.when(micros.between(*plausible_micros(part.declared)), F.timestamp_micros(micros))


def plausible_micros(declared: Field) -> tuple[int, int]:
    """The first and the last microsecond since 1970 of the plausible days of a number."""
    first, last = (_micros_of(day) for day in declared.plausible)
    return first, last + _DAY_US - 1


def _micros(part: Part) -> Column:
    """The microseconds since 1970 of a number; what nanoseconds have beyond them is cut off."""
    from pyspark.sql import functions as F

    unit = part.declared.unit
    assert unit is not None
    number = part.number
    exact = F.when(number.rlike(r"^-?[0-9]{1,19}(\.[0-9]{1,9})?\z"), number.try_cast("decimal(28,9)"))
    if unit == "ns":
        return F.floor(exact / F.lit(1000).cast("decimal(4,0)")).cast("bigint")
    micros = exact * F.lit(int(UNITS[unit])).cast("decimal(7,0)")
    return F.when(micros == F.floor(micros), micros.try_cast("bigint"))


def _micros_of(day: date) -> int:
    return (day.toordinal() - 719_163) * _DAY_US


def _day(part: Part) -> Column:
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        days = F.when(part.number.rlike(_WHOLE), part.number.try_cast("int"))
        read = F.when(days.between(*DAYS), F.date_from_unix_date(days))
    else:
        day = F.when(part.text.rlike(_DATE), part.text.try_cast("date"))
        read = F.when(F.year(day) >= 1, day)
    typed = part.got("date")
    return F.when((part.kind == "DATE") & F.year(typed).between(1, 9999), typed).otherwise(read)


def _time(part: Part) -> Column:
    """A time of day as text, `HH:MM:SS`, with six digits more where it has microseconds."""
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        micros = _micros(part)
        clock = F.date_format(F.timestamp_micros(micros).cast("timestamp_ntz"), "HH:mm:ss")
        rest = F.lpad(F.pmod(micros, F.lit(1_000_000)).cast("string"), 6, "0")
        fits = micros.between(0, _DAY_US - 1)
    else:
        clock = F.regexp_extract(part.text, _TIME, 1)
        rest = F.rpad(F.regexp_extract(part.text, _TIME, 2), 6, "0")
        fits = part.text.rlike(_TIME)
    more = F.when(rest == "000000", F.lit("")).otherwise(F.concat(F.lit("."), rest))
    return F.when(fits, F.concat(clock, more))


def _elements(part: Part) -> Column:
    from pyspark.sql import functions as F

    element = part.declared.members[0]
    return F.when(
        part.kind.startswith("ARRAY"),
        F.transform(part.got("array<variant>"), lambda one: _value(_inside(part, element, one))),
    )


def _entries(part: Part) -> Column:
    from pyspark.sql import functions as F

    inner = part.declared.members[0]
    return F.when(
        part.kind.startswith("OBJECT"),
        F.transform_values(part.got("map<string,variant>"), lambda _, one: _value(_inside(part, inner, one))),
    )


def _struct(part: Part) -> Column:
    from pyspark.sql import functions as F

    members = [_value(_member(part, one)).alias(one.name) for one in part.declared.members]
    return F.when(part.kind.startswith("OBJECT"), F.struct(*members))


def _member(part: Part, declared: Field) -> Part:
    """The part of a struct's member."""
    from pyspark.sql import functions as F

    paths = [one for one in declared.sources if isinstance(one, tuple)]
    found = [F.try_variant_get(part.json, variant_path(path), "variant") for path in paths]
    return _inside(part, declared, F.coalesce(*found))


def _inside(part: Part, declared: Field, json: Column) -> Part:
    """The part of a field inside of another one, which has no columns."""
    from pyspark.sql import functions as F

    bare = Part(json, F.schema_of_variant(json), F.lit(None).cast("string"), declared, part.textual)
    if not _reads_digits(declared):
        return bare
    return replace(bare, number=_digits_of(bare, _plain(bare.behind_mark)))


_READERS: dict[str, Callable[[Part], Column]] = {
    "timestamp": _moment,
    "timestamp_ntz": _local,
    "date": _day,
    "time": _time,
    "binary": _bytes,
    "json": _as_json,
    "integer": _whole,
    "long": _whole,
    "float": _floating,
    "double": _floating,
    "decimal": _exact,
    "string": _string,
    "boolean": _boolean,
    "array": _elements,
    "map": _entries,
    "struct": _struct,
}


def digits(declared: Field) -> str:
    """The numbers that a decimal holds, as a variant writes them: plain, without leading or trailing zeros."""
    precision, scale = precision_and_scale(declared)
    whole = rf"(0|[1-9]\d{{0,{precision - scale - 1}}})" if precision > scale else "0"
    return rf"^-?{whole}(\.\d{{1,{scale}}})?\z" if scale else rf"^-?{whole}\z"


def precision_and_scale(declared: Field) -> tuple[int, int]:
    precision, scale = declared.type.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def problem(stream: Stream, declared: Field) -> Column:
    """The fault of a field, for a person; null where there is none."""
    from pyspark.sql import functions as F

    if declared.expression is not None:
        fine = F.lit(declared.nullable) | F.col(f"field_{declared.name}").isNotNull()
        return F.when(~fine, F.lit(f"field {declared.name} is null: {declared.expression}"))
    part = part_of(stream, declared)
    return _problem(part, F.lit(_named(declared)), F.col(f"field_{declared.name}"))


# In the problem of a value whose type is another one than that of its field, in front of the type that was found.
_FOUND = ", found "


def is_of_other_type(problem: Column) -> Column:
    """Whether the problem of a field is that its value has another type."""
    return problem.contains(_FOUND)


def _problem(part: Part, named: Column, value: Column) -> Column:
    """The same of a part whose name is an expression."""
    from pyspark.sql import functions as F

    declared, absent, void = part.declared, part.json.isNull(), part.kind == "VOID"
    nothing = F.lit(False)  # noqa: FBT003 - a literal column
    fine = value.isNotNull() if declared.type not in _CONTAINERS else nothing
    if declared.optional:
        fine |= absent
    if declared.nullable:
        fine |= void
    if declared.nan == "null":
        fine |= part.is_infinite | _is_beyond(F.when(part.kind.isin(["DOUBLE", "FLOAT"]), part.got("double")))

    def problem_text(what: str) -> Column:
        return F.concat(F.lit("field "), named, F.lit(f" {what}"))

    missing = F.when(absent, problem_text("is missing"))
    if not declared.nullable:
        # Without a type of its own null counts as missing, like an absent value.
        missing = missing.when(void, problem_text(f"is {'null' if declared.optional else 'missing'}"))
    unfit = F.when(~_fits(part), F.concat(problem_text(f"is {declared.type}{_FOUND}"), _found(part)))
    if declared.type in _CONTAINERS:
        rest = _problem_inside(part, named)
    else:
        rest = F.concat(F.lit("field "), named, F.lit(" "), _misfit(part))
    return F.when(F.coalesce(fine, nothing), None).otherwise(F.coalesce(missing, unfit, rest))


def _problem_inside(part: Part, named: Column) -> Column:
    """The first problem inside an array, a map or a struct."""
    from pyspark.sql import functions as F

    def of(inner: Part, name: Column) -> Column:
        return _problem(inner, name, _value(inner))

    if part.declared.type == "struct":
        members = [_member(part, one) for one in part.declared.members]
        dotted = [F.concat(named, F.lit(f".{_named(one.declared)}")) for one in members]
        return F.coalesce(*[of(one, name) for one, name in zip(members, dotted, strict=True)])
    inner = part.declared.members[0]
    if part.declared.type == "array":
        found = F.transform(
            part.got("array<variant>"),
            lambda one, at: of(_inside(part, inner, one), F.concat(named, F.lit("["), at.cast("string"), F.lit("]"))),
        )
    else:
        found = F.transform(
            F.map_entries(part.got("map<string,variant>")), lambda one: _problem_of_entry(part, one, named)
        )
    return F.get(F.filter(found, F.isnotnull), F.lit(0))


def _problem_of_entry(part: Part, entry: Column, named: Column) -> Column:
    """The fault of an entry of a map."""
    from pyspark.sql import functions as F

    inner = _inside(part, part.declared.members[0], entry["value"])
    return _problem(inner, F.concat(named, F.lit('["'), entry["key"], F.lit('"]')), _value(inner))


def _named(declared: Field) -> str:
    """The name of a field, and where its value is looked for if that is elsewhere."""
    paths = [".".join(one) if isinstance(one, tuple) else str(one) for one in declared.sources]
    return declared.name if paths == [declared.name] else f"{declared.name} ({', else '.join(paths)})"


# What a decoded value may be of, beside what a JSON document has.
_TYPED = {
    "timestamp": "TIMESTAMP",
    "timestamp_ntz": "TIMESTAMP_NTZ",
    "date": "DATE",
    "binary": "BINARY",
    "array": "ARRAY",
    "map": "OBJECT",
    "struct": "OBJECT",
}


def _fits(part: Part) -> Column:
    """Whether the type of the value is one that the field may have."""
    from pyspark.sql import functions as F

    kind, declared = part.kind, part.declared
    if declared.type == "json":
        return F.lit(True)  # noqa: FBT003 - a literal column
    if declared.type in _CONTAINERS:
        return kind.startswith(_TYPED[declared.type])
    text = (kind == "STRING") & ~part.is_inexact
    if declared.type == "boolean":
        return (kind == "BOOLEAN") | text if part.textual else kind == "BOOLEAN"
    typed = kind == _TYPED[declared.type] if declared.type in _TYPED else F.lit(False)  # noqa: FBT003 - a literal column
    if not _reads_digits(declared) or declared.unscaled:
        return typed | text
    number = (kind == "BIGINT") | kind.startswith("DECIMAL") | kind.isin(["DOUBLE", "FLOAT"]) | typed
    texts = declared.text or part.textual
    return number | (kind == "STRING" if texts else part.is_inexact & ~part.is_infinite)


def _found(part: Part) -> Column:
    from pyspark.sql import functions as F

    shown = F.concat(F.lit("the number "), part.behind_mark.substr(1, 40))
    kind = F.regexp_extract(part.kind, r"^\w+(?:\(\d+,\d+\))?", 0)
    return F.when(part.is_inexact, shown).otherwise(F.concat(F.lit("JSON "), kind))


def _misfit(part: Part) -> Column:
    """The reason why a field of the right type does not fit its column."""
    from pyspark.sql import functions as F

    declared, number = part.declared, part.number
    rest = F.lit(f"does not fit {declared.type}")
    if declared.type == "time" and declared.unit:
        return F.lit(f"is no time of day in {declared.unit} since midnight")
    if declared.unit in UNITS:
        first, last = declared.plausible
        beyond = F.lit(f"is outside of {first} to {last} as a number in {declared.unit}")
        return F.when(_micros(part).isNotNull(), beyond).otherwise(rest)
    if declared.type in {"timestamp", "timestamp_ntz"}:
        return F.when(part.text.rlike(_FINER), "has digits after the microsecond").otherwise(rest)
    if declared.type.startswith("decimal"):
        _, scale = precision_and_scale(declared)
        finer = F.when(number.rlike(rf"\.\d{{{scale + 1}}}"), f"has more than {scale} digits after the point")
        return rest if declared.rounded else finer.otherwise(rest)
    if declared.type in {"integer", "long"}:
        return F.when(number.contains("."), "is no whole number").otherwise(rest)
    if declared.type == "binary":
        return F.lit("is no base64")
    return rest
