"""The declared fields of a record: where each is taken from, its value in its column's type, and what is wrong with it.

What belongs here: single fields, as Spark expressions over the value's JSON as a variant. What does not: reading the
document (`assets.documents`), or the rules that concern the whole record (`assets.parsing`).

Of a field `x` the columns are `json_x`, what the record has as a variant, null where it has nothing; `kind_x`, the type
of that; `number_x`, of a number its digits, plain and exact; and `field_x`, the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assets.documents import EXACT
from highwater.declaration import UNITS
from highwater.sources import Header, Key, Meta

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
_NUMBER = r"^-?(0|[1-9][0-9]*+)(\.[0-9]++)?+([eE][+-]?[0-9]++)?+\z"
_WHOLE = r"^-?[0-9]{1,19}\z"
# More places than a number is moved by its exponent fit no type.
_MOST_PLACES = 400
_DAYS = (-719_162, 2_932_896)  # of the years 1 to 9999
_SQL_TYPES = {
    "string": "STRING",
    "timestamp": "TIMESTAMP",
    "date": "DATE",
    "boolean": "BOOLEAN",
    "integer": "INT",
    "long": "BIGINT",
    "binary": "BINARY",
    "json": "STRING",
}
_INFINITE = ("NaN", "Infinity", "-Infinity")


def sql_type(declared: Field) -> str:
    """The column type of a field."""
    return _SQL_TYPES.get(declared.type, declared.type.upper())


def outermost(stream: Stream) -> list[str]:
    """The names in the value's outermost object that fields are taken from."""
    return list(dict.fromkeys(path[0] for path in _paths(stream)))


def kept_whole(stream: Stream) -> list[str]:
    """Those of `outermost` whose objects and arrays are read too."""
    any_ = [f.name for f in stream.fields if f.type == "json"]
    deep = [path[0] for path in _paths(stream) if len(path) > 1]
    return list(dict.fromkeys([*deep, *(p[0] for f in stream.fields if f.name in any_ for p in _paths_of(f))]))


def takes_infinite(stream: Stream) -> bool:
    """Whether a field takes NaN or an infinity."""
    return any(f.nan != "reject" for f in stream.fields)


def _paths(stream: Stream) -> list[tuple[str, ...]]:
    return [path for declared in stream.fields for path in _paths_of(declared)]


def _paths_of(declared: Field) -> list[tuple[str, ...]]:
    return [one for one in declared.sources if isinstance(one, tuple)]


def with_fields(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows with a column `json`, and those of raw, get the columns of all fields."""
    from pyspark.sql import functions as F

    found = rows.withColumns({f"json_{f.name}": _part(f) for f in stream.fields})
    found = found.withColumns({f"kind_{f.name}": F.schema_of_variant(f"json_{f.name}") for f in stream.fields})
    numbers = [f for f in stream.fields if _reads_digits(f)]
    if numbers:
        # Once for all fields, and of few records: hardly any number is written with an exponent.
        inexact = [F.when(_is_inexact(f), _behind_mark(f)) for f in numbers]
        any_ = F.exists(F.array(*inexact), F.isnotnull)
        found = found.withColumn("plain", F.when(any_, F.transform(F.array(*inexact), _plain)))
        found = found.withColumns(
            {f"number_{f.name}": _digits_of(f, F.get("plain", F.lit(at))) for at, f in enumerate(numbers)}
        )
    return found.withColumns({f"field_{f.name}": _value(f) for f in stream.fields})


def _part(declared: Field) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(*[_from(one) for one in declared.sources])


def _from(source: Key | Header | Meta | tuple[str, ...]) -> Column:
    """What a source has, as a variant; null where it has nothing."""
    from pyspark.sql import functions as F

    if isinstance(source, tuple):
        return F.try_variant_get("json", _variant_path(source), "variant")
    if isinstance(source, Meta):
        # Of the origin: a copy on a tier lies elsewhere.
        column = F.col("origin_timestamp_ms" if source.name == "timestamp" else f"origin_{source.name}")
        return column.cast("string" if source.name == "topic" else "bigint").cast("variant")
    if isinstance(source, Header):
        values = F.transform(F.filter("headers", lambda h: h["key"] == source.name), lambda h: h["value"])
        return _as_text(F.try_element_at(values, F.lit(-1))).cast("variant")
    text = _as_text(F.col("key"))
    if not source.path:
        return text.cast("variant")
    from highwater.sources import steps

    return F.try_variant_get(F.try_parse_json(text), _variant_path(steps(source.path)), "variant")


def _as_text(value: Column) -> Column:
    from pyspark.sql import functions as F

    return F.when(F.is_valid_utf8(value.cast("string")), value.cast("string"))


def _variant_path(steps: tuple[str, ...]) -> str:
    return "$" + "".join(f'["{step}"]' for step in steps)


def _text(declared: Field) -> Column:
    from pyspark.sql import functions as F

    return F.try_variant_get(f"json_{declared.name}", "$", "string")


def _behind_mark(declared: Field) -> Column:
    """Of a number that the variant parser would have rounded its text."""
    from pyspark.sql import functions as F

    text = _text(declared)
    return text.substr(F.lit(len(EXACT) + 1), F.length(text))


def _reads_digits(declared: Field) -> bool:
    return declared.is_number or declared.unit is not None


def _is_inexact(declared: Field) -> Column:
    """Whether the value is a number that the variant parser would have rounded."""
    from pyspark.sql import functions as F

    is_text = F.col(f"kind_{declared.name}") == "STRING"
    return F.col("markable") & is_text & F.startswith(_text(declared), F.lit(EXACT))


def _digits_of(declared: Field, plain: Column) -> Column:
    """The digits of a number, plain; null of what is none."""
    from pyspark.sql import functions as F

    kind, text = F.col(f"kind_{declared.name}"), _text(declared)
    found = F.when((kind == "BIGINT") | kind.startswith("DECIMAL"), text).when(_is_inexact(declared), plain)
    if not declared.text:
        return found
    return found.when((kind == "STRING") & text.rlike(_NUMBER), _plain(text))


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


def _value(declared: Field) -> Column:
    """The field in its column's type; null where it does not fit, or where there is nothing."""
    from pyspark.sql import functions as F

    read = _read(declared)
    if declared.default is None:
        return read
    given = F.lit(declared.default).cast(sql_type(declared))
    return F.when(F.col(f"json_{declared.name}").isNull(), given).otherwise(read)


def _read(declared: Field) -> Column:
    readers = {
        "timestamp": _moment,
        "date": _day,
        "binary": _bytes,
        "json": _as_json,
        "integer": _whole,
        "long": _whole,
        "float": _floating,
        "double": _floating,
        "decimal": _exact,
        "string": _string,
        "boolean": _boolean,
    }
    return readers[declared.type.split("(")[0]](declared)


def _string(declared: Field) -> Column:
    from pyspark.sql import functions as F

    return F.when(_fits(declared), _text(declared))


def _boolean(declared: Field) -> Column:
    from pyspark.sql import functions as F

    return F.when(_fits(declared), F.try_variant_get(f"json_{declared.name}", "$", "boolean"))


def _whole(declared: Field) -> Column:
    from pyspark.sql import functions as F

    number = F.col(f"number_{declared.name}")
    return F.when(number.rlike(_WHOLE), number.try_cast(sql_type(declared)))


def _exact(declared: Field) -> Column:
    """A decimal. The cast would round, and a double has lost digits before; money is not rounded in silence."""
    from pyspark.sql import functions as F

    number = F.col(f"number_{declared.name}")
    return F.when(number.rlike(_digits(declared)), number.try_cast(sql_type(declared)))


def _bytes(declared: Field) -> Column:
    from pyspark.sql import functions as F

    return F.when(_fits(declared), F.try_to_binary(_text(declared), F.lit("base64")))


def _as_json(declared: Field) -> Column:
    """Any value as text, its numbers as they were written; null of JSON's null, which is no value."""
    from pyspark.sql import functions as F

    kind, written = F.col(f"kind_{declared.name}"), F.to_json(F.col(f"json_{declared.name}"))
    marked = F.contains(written, F.lit(EXACT)) & F.col("markable")
    restored = F.regexp_replace(written, f'"{EXACT}([^"]*+)"', "$1")
    return F.when(kind != "VOID", F.when(marked, restored).otherwise(written))


def _floating(declared: Field) -> Column:
    """The nearest number of the type; infinite ones only where the stream keeps them."""
    from pyspark.sql import functions as F

    kind = sql_type(declared).lower()
    read = F.col(f"number_{declared.name}").try_cast(kind)
    finite = F.when(F.abs(read) < F.lit(float("inf")), read)
    if declared.nan == "keep":
        return F.when(_is_infinite(declared), _behind_mark(declared).cast(kind)).otherwise(finite)
    return finite


def _is_infinite(declared: Field) -> Column:
    return _is_inexact(declared) & _text(declared).isin([EXACT + name for name in _INFINITE])


def _moment(declared: Field) -> Column:
    """A timestamp; null where the text is none, or the number outside of what is plausible."""
    from pyspark.sql import functions as F

    if declared.unit is not None:
        micros = _micros(declared)
        first, last = (_micros_of(day) for day in declared.plausible)
        return F.when(micros.between(first, last + 86_400_000_000 - 1), F.timestamp_micros(micros))
    text = _text(declared)
    moment = F.when(text.rlike(_ISO), F.try_to_timestamp(F.upper(text)))
    if declared.zone is not None:
        local = F.to_utc_timestamp(F.try_to_timestamp(F.concat(F.upper(text), F.lit("Z"))), declared.zone)
        moment = F.when(text.rlike(_LOCAL + r"\z"), local).otherwise(moment)
    # In UTC: a zone moves the first and the last hours into years that other readers' times do not have.
    return F.when(F.year(moment).between(1, 9999), moment)


def _micros(declared: Field) -> Column:
    """The microseconds since 1970 of a number; what nanoseconds have beyond them is cut off."""
    from pyspark.sql import functions as F

    assert declared.unit is not None
    number, factor = F.col(f"number_{declared.name}"), UNITS[declared.unit]
    exact = F.when(number.rlike(r"^-?[0-9]{1,19}(\.[0-9]{1,9})?\z"), number.try_cast("decimal(28,9)"))
    if declared.unit == "ns":
        return F.floor(exact / F.lit(1000).cast("decimal(4,0)")).cast("bigint")
    micros = exact * F.lit(int(factor)).cast("decimal(7,0)")
    return F.when(micros == F.floor(micros), micros.try_cast("bigint"))


def _micros_of(day: date) -> int:
    return (day.toordinal() - 719_163) * 86_400_000_000


def _day(declared: Field) -> Column:
    from pyspark.sql import functions as F

    if declared.unit is not None:
        number = F.col(f"number_{declared.name}")
        days = F.when(number.rlike(_WHOLE), number.try_cast("int"))
        return F.when(days.between(*_DAYS), F.date_from_unix_date(days))
    text = _text(declared)
    day = F.when(text.rlike(_DATE), text.try_cast("date"))
    return F.when(F.year(day) >= 1, day)


def _digits(declared: Field) -> str:
    """The numbers that a decimal holds, as a variant writes them: plain, without leading or trailing zeros."""
    precision, scale = _precision_and_scale(declared)
    whole = rf"(0|[1-9]\d{{0,{precision - scale - 1}}})" if precision > scale else "0"
    return rf"^-?{whole}(\.\d{{1,{scale}}})?\z" if scale else rf"^-?{whole}\z"


def _precision_and_scale(declared: Field) -> tuple[int, int]:
    precision, scale = declared.type.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def problem(declared: Field) -> Column:
    """What is wrong with a field, for a person; null where nothing is."""
    from pyspark.sql import functions as F

    part, kind, named = F.col(f"json_{declared.name}"), F.col(f"kind_{declared.name}"), _named(declared)
    absent, void = part.isNull(), kind == "VOID"
    fine = F.col(f"field_{declared.name}").isNotNull()
    if declared.optional:
        fine |= absent
    if declared.nullable:
        fine |= void
    if declared.nan == "null":
        fine |= _is_infinite(declared)
    missing = F.when(absent, F.lit(f"field {named} is missing"))
    if not declared.nullable:
        # Without a type of its own null is said to be missing, as what is not there.
        missing = missing.when(void, F.lit(f"field {named} is {'null' if declared.optional else 'missing'}"))
    return F.when(fine, None).otherwise(
        F.coalesce(
            missing,
            F.when(~_fits(declared), F.concat(F.lit(f"field {named} is {declared.type}, found "), _found(declared))),
            F.concat(F.lit(f"field {named} "), _misfit(declared)),
        )
    )


def _named(declared: Field) -> str:
    """The name of a field, and where its value is looked for if that is elsewhere."""
    paths = [".".join(one) if isinstance(one, tuple) else str(one) for one in declared.sources]
    return declared.name if paths == [declared.name] else f"{declared.name} ({', else '.join(paths)})"


def _fits(declared: Field) -> Column:
    """Whether the JSON type is one that the field may have."""
    from pyspark.sql import functions as F

    kind = F.col(f"kind_{declared.name}")
    if declared.type == "json":
        return F.lit(True)  # noqa: FBT003 - a literal column
    if declared.type == "boolean":
        return kind == "BOOLEAN"
    if not _reads_digits(declared):
        return (kind == "STRING") & ~_is_inexact(declared)
    number = (kind == "BIGINT") | kind.startswith("DECIMAL") | (kind == "DOUBLE")
    return number | (kind == "STRING" if declared.text else _is_inexact(declared) & ~_is_infinite(declared))


def _found(declared: Field) -> Column:
    from pyspark.sql import functions as F

    shown = F.concat(F.lit("the number "), _behind_mark(declared).substr(1, 40))
    return F.when(_is_inexact(declared), shown).otherwise(F.concat(F.lit("JSON "), F.col(f"kind_{declared.name}")))


def _misfit(declared: Field) -> Column:
    """Why a field of the right JSON type does not fit its column."""
    from pyspark.sql import functions as F

    rest = F.lit(f"does not fit {declared.type}")
    if declared.unit in UNITS:
        first, last = declared.plausible
        beyond = F.lit(f"is outside of {first} to {last} as a number in {declared.unit}")
        return F.when(_micros(declared).isNotNull(), beyond).otherwise(rest)
    if declared.type == "timestamp":
        return F.when(_text(declared).rlike(_FINER), "has digits after the microsecond").otherwise(rest)
    if declared.type.startswith("decimal"):
        _, scale = _precision_and_scale(declared)
        number = F.col(f"number_{declared.name}")
        return F.when(number.rlike(rf"\.\d{{{scale + 1}}}"), f"has more than {scale} digits after the point").otherwise(
            rest
        )
    if declared.type in {"integer", "long"}:
        number = F.col(f"number_{declared.name}")
        return F.when(number.contains("."), "is no whole number").otherwise(rest)
    if declared.type == "binary":
        return F.lit("is no base64")
    return rest
