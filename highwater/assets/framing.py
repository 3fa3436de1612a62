"""Splits the framing of a schema registry off in Spark, and fetches the schemas that the IDs in it name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.schemas import GUID_BYTES, GUID_MAGIC, ID_BYTES, ID_MAGIC, VALUE_HEADER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.schemas import Schema

# The first byte of the framing and where it ends, with a number or with a GUID.
_BY_NUMBER, _NUMBER_ENDS = f"{ID_MAGIC:02X}", 1 + ID_BYTES
_BY_GUID, _GUID_ENDS = f"{GUID_MAGIC:02X}", 1 + GUID_BYTES


def without_framing(work: Work, raw: DataFrame, *, by_guid: bool = True) -> DataFrame:
    """Rows without the framing of a registry; `schema` is the schema's ID, a number or a GUID, as text.

    Args:
        work: finds the schemas.
        raw: the rows.
        by_guid: whether GUIDs are looked up, which few registries can: a document in JSON is read without its schema.
    """
    from pyspark.sql import functions as F

    value, rows = F.col("value"), _split_framing(raw)
    unframed = "the value has no schema ID: neither a magic byte in front of it nor a header"
    misframed = F.when(F.col("schema").isNull() & value.isNotNull(), F.lit(unframed))
    rows = rows.withColumn("misframed", misframed)
    is_wanted = F.lit(True) if by_guid else ~F.contains("schema", F.lit("-"))
    known = fetch_schemas_by_id(work, rows.where(is_wanted))
    unknown_schema = F.when(
        F.col("schema").isNotNull()
        & is_wanted
        & ~F.col("schema").isin([one for one, schema in known.items() if schema]),
        F.concat(F.lit("the registry does not know schema "), F.col("schema")),
    )
    return rows.withColumn("unknown_schema", unknown_schema)


def _split_framing(raw: DataFrame) -> DataFrame:
    """Rows with `payload`, the value without its framing, and `schema`, the ID in the framing as text."""
    from pyspark.sql import functions as F

    value, found = F.col("value"), _parse_header_id()
    in_front = F.col("in_header").isNull() & (F.hex(value.substr(1, 1)) == _BY_NUMBER)
    headers = F.transform(F.filter("headers", lambda h: h["key"] == VALUE_HEADER), lambda h: h["value"])
    in_front &= F.length(value) >= _NUMBER_ENDS
    # A header without a value is a broken framing, none in front of the value.
    last = F.coalesce(F.try_element_at(headers, F.lit(-1)), F.lit(b""))
    rows = raw.withColumn("in_header", F.when(F.size(headers) > 0, last))
    return rows.withColumns(
        {
            "payload": F.when(in_front, _skip_bytes(value, _NUMBER_ENDS)).otherwise(value),
            "schema": F.when(in_front, _decode_number(value.substr(2, ID_BYTES))).otherwise(found),
        }
    )


def _parse_header_id() -> Column:
    """The ID in a record's header, as text; null without one."""
    from pyspark.sql import functions as F

    header, kind = F.col("in_header"), F.hex(F.col("in_header").substr(1, 1))
    guid = F.when((kind == _BY_GUID) & (F.length(header) >= _GUID_ENDS), _format_guid(header))
    return guid.when(
        (kind == _BY_NUMBER) & (F.length(header) >= _NUMBER_ENDS), _decode_number(header.substr(2, ID_BYTES))
    )


def skip_header_id() -> Column:
    """The bytes after the ID in a record's header: there Protobuf says which message it is."""
    from pyspark.sql import functions as F

    header = F.col("in_header")
    end = F.when(F.hex(header.substr(1, 1)) == _BY_GUID, _GUID_ENDS).otherwise(_NUMBER_ENDS)
    return header.substr(end + 1, F.length(header))


def _skip_bytes(data: Column, end: int) -> Column:
    """The bytes after a framing."""
    from pyspark.sql import functions as F

    return data.substr(F.lit(end + 1), F.length(data))


def _decode_number(four: Column) -> Column:
    from pyspark.sql import functions as F

    return F.conv(F.hex(four), 16, 10)


def _format_guid(header: Column) -> Column:
    from pyspark.sql import functions as F

    digits = F.lower(F.hex(header.substr(2, GUID_BYTES)))
    parts = [digits.substr(at, length) for at, length in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))]
    return F.concat_ws("-", *parts)


def fetch_schemas_by_id(work: Work, rows: DataFrame) -> Mapping[str, Schema | None]:
    """The schemas that the rows name, by their IDs; None for those that the registry does not know."""
    found = [row["schema"] for row in rows.where("schema IS NOT NULL").select("schema").distinct().collect()]
    schema_of = require_schema_finder(work)
    return {one: schema_of(int(one) if one.isdecimal() else one) for one in sorted(found)}


def fetch_referenced_schemas(work: Work, raw: DataFrame) -> list[Schema]:
    """The schemas that rows of raw name in their framing and that the registry knows, the oldest first."""
    found = fetch_schemas_by_id(work, _split_framing(raw)).values()
    return sorted((schema for schema in found if schema), key=lambda one: one.id or 0)


def require_schema_finder(work: Work) -> Callable[[int | str], Schema | None]:
    """The finder of a stream's schemas, by number or GUID.

    Raises:
        ConfigurationError: no registry is configured.
    """
    if work.schemas is None:
        raise ConfigurationError(
            f"{work.stream.name} needs a schema registry",
            stored=f"key_format={work.stream.key_format!r}, value={work.stream.value!r}"[:200],
            remedy="set HIGHWATER_SCHEMA_REGISTRY_URL, then request the slice again",
        )
    return work.schemas
