"""Fields and rules that are declared as expressions of Spark SQL over other fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.assets.fields import build_sql_type
from highwater.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.declaration import Stream

# The name of the whole row while the names of fields are free for expressions.
_ROW = "highwater row"


def with_expressions(stream: Stream, rows: DataFrame) -> DataFrame:
    """Rows with their fields get those that are expressions, as `field_x`, and of each rule `rule_x`.

    Raises:
        ConfigurationError: Spark does not accept an expression.
    """
    from pyspark.sql import functions as F

    computed = [f for f in stream.fields if f.expression is not None]
    if not computed and not stream.rules:
        return rows
    read = [F.col(f"field_{f.name}").alias(f.name) for f in stream.fields if f.is_read]
    packed = rows.select(F.struct("*").alias(_ROW), *read)
    for name, text in [(f"field {f.name!r}", f.expression) for f in computed]:
        _ensure_accepted(stream, packed, name, str(text))
    values = [F.expr(str(f.expression)).try_cast(build_sql_type(f)).alias(f"field_{f.name}") for f in computed]
    with_values = packed.select(_quote(_ROW), *read_names(stream), *values)
    named = with_values.select("*", *[F.col(_quote(f"field_{f.name}")).alias(f.name) for f in computed])
    for name, text in stream.rules.items():
        _ensure_accepted(stream, named, f"rule {name!r}", text)
    rules = [F.expr(text).cast("boolean").alias(f"rule_{name}") for name, text in stream.rules.items()]
    return named.select(f"{_quote(_ROW)}.*", *[_quote(f"field_{f.name}") for f in computed], *rules)


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
