"""Tables of the lake under names in Spark's catalog, so that `SELECT * FROM lake.orders_events` works."""

# A registered table is external: the catalog has its name and its location, and Delta's log has everything else.
# Dropping the name deletes no file.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.resources.delta import open_table
from highwater.resources.object_store import SCHEME
from highwater.resources.spark import delta_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCATION = re.compile(r"^Location: (.+)$", re.MULTILINE)


def build_catalog_name(stream: str, table: str) -> str:
    """The name of a stream's table within the schema: `orders_events`; `_commits` is `orders_commits`."""
    return f"{stream}_{table.removeprefix('_')}"


def register(spark: SparkSession, schema: str, tables: Mapping[str, str]) -> list[str]:
    """Register tables that the catalog lacks, or has at the location of a lake that moved.

    Args:
        spark: a session whose catalog it is.
        schema: the schema, `lake` or `catalog.lake`; it is created if absent.
        tables: by name the location of each Delta table, which must exist.

    Returns:
        The names that were registered now.

    Raises:
        ConfigurationError: the catalog has another table under a name, such as that of another lake.
        DependencyUnavailableError: Spark or the catalog is unavailable.
    """
    with delta_errors(f"catalog {schema}"):
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {_quote(schema)}")
        there = _list_locations(spark, schema)
        missing = {name: path for name, path in tables.items() if there.get(name.lower()) != _normalize_location(path)}
        for name, path in missing.items():
            found = there.get(name.lower())
            # A lake that moved left nothing behind. A table that is still there belongs to another lake.
            if found is not None and (not found.endswith(_get_location_end(path)) or open_table(found) is not None):
                raise ConfigurationError(
                    f"the catalog has another table under the name {schema}.{name}",
                    stored=found,
                    found=path,
                    remedy=f"set HIGHWATER_CATALOG to a schema of this lake alone; or, if the lake moved, drop "
                    f"{schema}.{name}, which deletes no file",
                )
            if found is not None:
                spark.sql(f"DROP TABLE {_quote(f'{schema}.{name}')}")
            location = path.replace("\\", "\\\\").replace("'", "\\'")
            spark.sql(f"CREATE TABLE {_quote(f'{schema}.{name}')} USING delta LOCATION '{location}'")
    return [*missing]


def drop_missing(spark: SparkSession, schema: str, root: str) -> list[str]:
    """Drop the names of tables that were in this lake and are gone, such as those of a stream that was renamed.

    Args:
        spark: a session whose catalog it is.
        schema: the schema; it is created if absent.
        root: the lake.

    Returns:
        The names that were dropped.

    Raises:
        DependencyUnavailableError: Spark, the catalog or the lake is unavailable; a table that cannot be read is not
            gone (I15).
    """
    with delta_errors(f"catalog {schema}"):
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {_quote(schema)}")
        ours = {name: at for name, at in _list_locations(spark, schema).items() if _is_ours(name, at, root)}
        gone = [name for name, at in ours.items() if open_table(at) is None]
        for name in gone:
            spark.sql(f"DROP TABLE IF EXISTS {_quote(f'{schema}.{name}')}")
    return gone


def _list_locations(spark: SparkSession, schema: str) -> dict[str, str]:
    """By table of a schema its location. Delta is not asked: the files of a table may be gone."""
    rows = spark.sql(f"SHOW TABLE EXTENDED IN {_quote(schema)} LIKE '*'").collect()
    found = {row["tableName"]: _LOCATION.search(row["information"]) for row in rows if not row["isTemporary"]}
    return {name: "" if match is None else _normalize_location(match[1]) for name, match in found.items()}


def _is_ours(name: str, at: str, root: str) -> bool:
    """Whether a name was registered for a table of this lake; a person may have put tables of other kinds below it."""
    stream, _, table = at.removeprefix(f"{_normalize_location(root)}/").partition("/")
    return at.startswith(f"{_normalize_location(root)}/") and name == build_catalog_name(stream, table)


def _normalize_location(path: str) -> str:
    """A location as catalog and settings both write it: a local path has no scheme, and S3 the scheme of Hadoop."""
    local = re.sub(r"^file:/{1,3}", "/", path.strip())
    return re.sub(r"^s3n?://", f"{SCHEME}://", local).rstrip("/")


def _get_location_end(path: str) -> str:
    """Stream and table, the part of a location that stays when a lake moves."""
    return "/" + "/".join(_normalize_location(path).split("/")[-2:])


def _quote(name: str) -> str:
    return ".".join(f"`{part}`" for part in name.split("."))
