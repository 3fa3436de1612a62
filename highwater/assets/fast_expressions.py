"""Cheap expressions for the fields of usual records: those whose values have the declared types, plainly written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from highwater.assets import field_parts, field_times, fields
from highwater.assets.documents import may_round_numbers
from highwater.assets.fields import build_sql_type, parse_precision_and_scale
from highwater.declaration_parts import UNITS
from highwater.formats import Avro, Json, Protobuf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from highwater.declaration import Field, Stream

# Other records take the expressions of `highwater.assets.fields`, which find each value and each fault at ten times the
# cost. So an expression here is null wherever it does not read exactly what those read.
_NUMBERS = frozenset({"integer", "long", "float", "double", "decimal"})
_TEXTS = frozenset({"string", "binary", "timestamp", "timestamp_ntz", "date", "time"})
_PLAIN_WHOLE = r"^-?(0|[1-9][0-9]{0,18})\z"


@dataclass(frozen=True)
class _Place:
    """The place in a document from which a field is read."""

    document: Column
    path: str

    def get_as(self, kind: str) -> Column:
        """The value as a type of SQL; null where it has another type."""
        from pyspark.sql import functions as F

        return F.try_variant_get(self.document, self.path, kind)


def has_usual_records(stream: Stream) -> bool:
    """Whether there are cheap expressions for all that a stream reads of records."""
    if stream.reads_all_members:
        return False
    if isinstance(stream.value, Avro):
        return all(_is_cheap(one) and _has_one_path(one) and one.type != "json" for one in _read(stream))
    return isinstance(stream.value, Json | Protobuf) and all(map(_is_cheap, _read(stream)))


def _read(stream: Stream) -> list[Field]:
    return [one for one in stream.fields if one.is_read]


def _is_cheap(declared: Field) -> bool:
    kind = declared.type.split("(")[0]
    if declared.unit is not None:
        return kind in {"timestamp", "timestamp_ntz", "date"} and not declared.text
    return (kind in _NUMBERS and not declared.unscaled) or kind in _TEXTS or kind in {"boolean", "json"}


def with_usual_fields(stream: Stream, rows: DataFrame, document: str, root: str) -> DataFrame:
    """Rows with a document get `usual_x` of each field.

    Args:
        stream: has such fields.
        rows: the rows.
        document: the column of documents as variants, whose numbers may be rounded; `payload` is its text.
        root: the path of the record in the document.
    """
    from pyspark.sql import functions as F

    read = _read(stream)
    several = [one for one in read if not _has_one_path(one)]
    if several:
        rows = rows.withColumns(
            {f"usualjson_{one.name}": _build_first_value(stream, one, document, root) for one in several}
        )
    kinds = {
        f"usualkind_{one.name}": F.schema_of_variant(_find_place(one, document, root).get_as("variant"))
        for one in read
        if _needs_kind(one)
    }
    texts = {
        f"usualtext_{one.name}": _build_text(one, _find_place(one, document, root)) for one in read if _needs_text(one)
    }
    rows = rows.withColumns({**kinds, **texts})
    return rows.withColumns({f"usual_{one.name}": _build_value(one, _find_place(one, document, root)) for one in read})


def has_usual_values(stream: Stream, document: str, root: str) -> Column:
    """Whether each field has a value, or has none where it need not have one."""
    from pyspark.sql import functions as F

    found = F.lit(True)
    for declared in _read(stream):
        found &= _is_usual(declared, _find_place(declared, document, root))
    return found


def build_null_values(stream: Stream) -> dict[str, Column]:
    """The columns of the values of a record that is not a usual one."""
    from pyspark.sql import functions as F

    return {f"usual_{one.name}": F.lit(None).cast(build_sql_type(one)) for one in _read(stream)}


def build_typed_values(stream: Stream, record: Column, kind: DataType) -> dict[str, Column] | None:
    """The columns of the values of a record whose members have types.

    Args:
        stream: has such fields.
        record: the record.
        kind: its type.

    Returns:
        The values; None where a field takes more than a cheap expression.
    """
    from pyspark.sql.types import StructType

    found = {}
    for declared in _read(stream):
        inner: DataType | None = kind
        for step in _find_path(declared):
            inner = inner[step].dataType if isinstance(inner, StructType) and step in inner.fieldNames() else None
        read = None if inner is None else _convert_typed_value(declared, _select_member(record, declared), inner)
        if read is None:
            return None
        found[f"usual_{declared.name}"] = read
    return found


def has_usual_typed_values(stream: Stream, record: Column) -> Column:
    """Whether each field has a value, or is null in the record itself where it may be."""
    from pyspark.sql import functions as F

    found = F.lit(True)
    for declared in _read(stream):
        is_usual = F.col(f"usual_{declared.name}").isNotNull()
        # Deeper down it may be a record around it that is null, which has no such member.
        outermost = len(_find_path(declared)) == 1
        found &= is_usual | _select_member(record, declared).isNull() if declared.nullable and outermost else is_usual
    return found


def _find_path(declared: Field) -> tuple[str, ...]:
    [path] = declared.sources
    assert isinstance(path, tuple)
    return path


def _select_member(record: Column, declared: Field) -> Column:
    for step in _find_path(declared):
        record = record.getField(step)
    return record


def _convert_typed_value(declared: Field, value: Column, kind: DataType) -> Column | None:
    """The value of a field from one of a type; None where only `highwater.assets.fields` knows that."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    whole, type_ = isinstance(kind, T.IntegerType | T.LongType), build_sql_type(declared)
    if isinstance(kind, T.StringType):
        if declared.type not in _TEXTS or declared.unit is not None:
            return None
        return value if declared.type == "string" else fields.convert_text(value, declared)
    if declared.type in {"timestamp", "timestamp_ntz", "date"}:
        if type_ == kind.simpleString().upper():
            return F.when(value.between(*_build_bounds(declared)), value)
        return _convert_to_time(declared, value.cast("bigint")) if whole and declared.unit is not None else None
    if declared.type in {"float", "double"} and (whole or isinstance(kind, T.FloatType | T.DoubleType)):
        read = value.cast(type_)
        return F.when(F.abs(read) < F.lit(float("inf")), read)
    if declared.type in {"integer", "long"}:
        return value.try_cast(type_) if whole else None
    if declared.type.startswith("decimal"):
        _, scale = parse_precision_and_scale(declared)
        exact = isinstance(kind, T.DecimalType) and kind.scale <= scale
        return value.try_cast(type_) if whole or exact else None
    return value if type_ == kind.simpleString().upper() else None


def _build_bounds(declared: Field) -> tuple[Column, Column]:
    """The first and the last moment or day of the years 1 to 9999."""
    from pyspark.sql import functions as F

    texts = ("0001-01-01", "9999-12-31" if declared.type == "date" else "9999-12-31 23:59:59.999999")
    first, last = (F.lit(text).cast(build_sql_type(declared)) for text in texts)
    return first, last


def filter_unusual(column: Column) -> Column:
    """The column's values of unusual records, and null of usual ones.

    Spark generates no code inside `transform`. With long expressions that hardly any record needs, the method for each
    row has more than 8,000 bytes, and Java does not compile such a method at all.
    """
    from pyspark.sql import functions as F

    return F.get(F.transform(F.when(~F.col("usual"), F.array(F.lit(0))), lambda _: column), F.lit(0))


def _has_one_path(declared: Field) -> bool:
    return len(declared.sources) == 1 and isinstance(declared.sources[0], tuple)


def _find_place(declared: Field, document: str, root: str) -> _Place:
    from pyspark.sql import functions as F

    if not _has_one_path(declared):
        return _Place(F.col(f"usualjson_{declared.name}"), "$")
    return _Place(F.col(document), field_parts.build_variant_path(_find_path(declared), root))


def _build_first_value(stream: Stream, declared: Field, document: str, root: str) -> Column:
    """The value of the first source that has one."""
    from pyspark.sql import functions as F

    return F.coalesce(
        *[
            F.try_variant_get(document, field_parts.build_variant_path(one, root), "variant")
            if isinstance(one, tuple)
            else field_parts.from_source(stream, one)
            for one in declared.sources
        ]
    )


def _needs_kind(declared: Field) -> bool:
    return declared.unit is not None or declared.is_number or declared.type == "boolean"


def _needs_text(declared: Field) -> bool:
    return not _needs_kind(declared) or (declared.text and not declared.type.startswith(("float", "double")))


def _build_text(declared: Field, place: _Place) -> Column:
    """A text, or of a field of type json an object or an array as it is written."""
    from pyspark.sql import functions as F

    # In a document texts alone have bytes: Spark casts no number to them.
    data = place.get_as("binary")
    return F.when(data.isNull(), place.get_as("string")) if declared.type == "json" else data.cast("string")


def _build_value(declared: Field, place: _Place) -> Column:
    """The value of a field; null where that takes more than a cheap expression, or where there is none."""
    from pyspark.sql import functions as F

    kind, text = F.col(f"usualkind_{declared.name}"), F.col(f"usualtext_{declared.name}")
    if declared.unit is not None:
        return _convert_to_time(declared, F.when(kind == "BIGINT", place.get_as("bigint")))
    if declared.type == "boolean":
        return F.when(kind == "BOOLEAN", place.get_as("boolean"))
    if declared.type == "json":
        # A double is written with a point, or as an infinity.
        has_double = F.contains(text, F.lit(".")) | F.contains(text, F.lit("Infinity"))
        rounds = has_double & may_round_numbers(F.col("payload").cast("string"))
        return F.when((F.startswith(text, F.lit("{")) | F.startswith(text, F.lit("["))) & ~rounds, text)
    if declared.is_number:
        return _convert_number(declared, kind, place)
    return text if declared.type == "string" else fields.convert_text(text, declared)


def _convert_number(declared: Field, kind: Column, place: _Place) -> Column:
    from pyspark.sql import functions as F

    is_whole, is_decimal, type_ = kind == "BIGINT", kind.startswith("DECIMAL"), build_sql_type(declared)
    if declared.type in {"float", "double"}:
        return F.when(is_whole | is_decimal, place.get_as("string").try_cast(type_))
    text = F.col(f"usualtext_{declared.name}")
    if declared.type in {"integer", "long"}:
        found = F.when(is_whole, place.get_as(type_))
        return found.when(text.rlike(_PLAIN_WHOLE), text.try_cast(type_)) if declared.text else found
    _, scale = parse_precision_and_scale(declared)
    # The kind of a decimal ends with its own scale, without zeros that say nothing.
    exact = F.substring_index(kind, ",", -1).isin([f"{digits})" for digits in range(scale + 1)])
    found = F.when(is_whole | exact, place.get_as(type_))
    return (
        found.when(text.rlike(fields.build_decimal_pattern(declared)), text.try_cast(type_)) if declared.text else found
    )


def _convert_to_time(declared: Field, number: Column) -> Column:
    """A time by a whole number of units since 1970."""
    from pyspark.sql import functions as F

    if declared.unit == "days":
        return F.when(number.between(*field_times.DAYS), F.date_from_unix_date(number.cast("int")))
    first, last = field_times.compute_plausible_micros(declared)
    if declared.unit == "ns":
        micros = F.floor(number.cast("decimal(19,0)") / F.lit(1000).cast("decimal(4,0)")).cast("bigint")
        return F.when(micros.between(first, last), F.timestamp_micros(micros)).cast(build_sql_type(declared))
    factor = int(UNITS[str(declared.unit)])
    fits = number.between(-(-first // factor), last // factor)
    return F.when(fits, F.timestamp_micros(number * factor)).cast(build_sql_type(declared))


def _is_usual(declared: Field, place: _Place) -> Column:
    """Whether a field has its value, or has none where it need not have one."""
    from pyspark.sql import functions as F

    found = F.col(f"usual_{declared.name}").isNotNull()
    if declared.optional and declared.default is None:
        found |= place.get_as("variant").isNull()
    if declared.nullable:
        found |= F.is_variant_null(place.get_as("variant"))
    return found
