"""Fields and rules that are declared as expressions of Spark SQL over other fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.assets.fields import build_sql_type
from highwater.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.declaration import Stream

# The name of the whole row while the names of fields are free for expressions.
_ROW = "highwater row"


# Guarded expressions occur twice in a plan, one of them inside the guard: Spark would compute both before the guard.
GUARDED: Mapping[str, str] = MappingProxyType({"spark.sql.subexpressionElimination.enabled": "false"})


def has_expressions(stream: Stream) -> bool:
    """Whether the stream computes fields or rules."""
    return bool(stream.rules) or any(f.expression is not None for f in stream.fields)


def with_expressions(stream: Stream, rows: DataFrame, *, guarded: bool = False) -> DataFrame:
    """Rows with their fields get those that are expressions, as `field_x`, and of each rule `rule_x`.

    Args:
        stream: the declaration.
        rows: the rows.
        guarded: an expression that fails on a row, such as a division by zero, gives null there and `fails_x`, instead
            of failing the query. It costs a second computation; the query runs with the settings `GUARDED`.

    Raises:
        ConfigurationError: Spark does not accept an expression.
    """
    from pyspark.sql import functions as F

    computed = [f for f in stream.fields if f.expression is not None]
    if not has_expressions(stream):
        return rows
    read = [F.col(f"field_{f.name}").alias(f.name) for f in stream.fields if f.is_read]
    packed = rows.select(F.struct("*").alias(_ROW), *read)
    for name, text in [(f"field {f.name!r}", f.expression) for f in computed]:
        _ensure_accepted(stream, packed, name, str(text))
    values = {f.name: F.expr(str(f.expression)).try_cast(build_sql_type(f)) for f in computed}
    with_values = packed.select(_quote(_ROW), *read_names(stream), *_build_columns("field", values, guarded=guarded))
    named = with_values.select("*", *[F.col(_quote(f"field_{f.name}")).alias(f.name) for f in computed])
    for name, text in stream.rules.items():
        _ensure_accepted(stream, named, f"rule {name!r}", text)
    rules = {name: F.expr(text).cast("boolean") for name, text in stream.rules.items()}
    made = [_quote(f"{kind}_{f.name}") for f in computed for kind in ("field", _fails("field"))]
    return named.select(f"{_quote(_ROW)}.*", *made, *_build_columns("rule", rules, guarded=guarded))


def build_failure(kind: str, name: str) -> Column:
    """Whether a guarded expression failed on the row.

    Args:
        kind: `field` or `rule`.
        name: of the field or the rule.
    """
    from pyspark.sql import functions as F

    return F.col(_quote(f"{_fails(kind)}_{name}"))


def _fails(kind: str) -> str:
    return f"fails_{kind}"


def _build_columns(kind: str, values: Mapping[str, Column], *, guarded: bool) -> list[Column]:
    """The columns of the values, and of each whether it failed."""
    from pyspark.sql import functions as F

    found = []
    for name, value in values.items():
        # Spark catches any error inside this function, and only there.
        text = F.try_to_binary(F.to_json(F.struct(value.alias("value"))), F.lit("utf-8"))
        failed = text.isNull() if guarded else F.lit(False)
        found += [
            (F.when(~failed, value) if guarded else value).alias(f"{kind}_{name}"),
            failed.alias(f"{_fails(kind)}_{name}"),
        ]
    return found


def read_names(stream: Stream) -> list[str]:
    """The names of the fields that are read from records, quoted."""
    return [_quote(f.name) for f in stream.fields if f.is_read]


def _quote(name: str) -> str:
    return f"`{name}`"


def _ensure_accepted(stream: Stream, rows: DataFrame, name: str, text: str) -> None:
    """Ensure that Spark accepts an expression over the rows: that it can be parsed, and that its names are there."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        _ = rows.select(F.expr(text)).schema
    except (AnalysisException, ParseException) as error:
        names = [f.name for f in stream.fields if f.reference is None]
        raise ConfigurationError(
            f"stream {stream.name!r}: Spark does not accept the expression of {name}",
            stored=text,
            found=str(error).splitlines()[0][:300],
            remedy=f"fix the declaration; it may name {', '.join(names)}",
        ) from error
