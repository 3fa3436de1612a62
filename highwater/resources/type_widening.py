"""The common type of a stored and a new column, and values in it; Delta's own type widening is not used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

# A type of Delta's schema: a name, or an object of a struct, an array or a map.
DeltaType = str | Mapping[str, Any]
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_WIDER = {("integer", "long"), ("float", "double")}
# The types of SQL column lists, which hardly ever change: Spark parses each list once per process.
_PARSED: dict[str, dict[str, Any]] = {}


def parse_column_types(spark: SparkSession, columns: str) -> dict[str, Any]:
    """The types of a list of columns in SQL, by name.

    Args:
        spark: parses the list.
        columns: the list, for example `key STRING, version BIGINT`.
    """
    if columns not in _PARSED:
        fields = spark.createDataFrame([], columns).schema.jsonValue()["fields"]
        _PARSED[columns] = {field["name"]: field["type"] for field in fields}
    return _PARSED[columns]


def find_common_type(stored: DeltaType, wanted: DeltaType) -> DeltaType | None:
    """The type that holds the values of both; None where a value of the stored type would have to change.

    `integer` widens to `long`, `float` to `double`, and a decimal to one with more digits before and after the point.
    A struct has the members of both.

    Args:
        stored: the type of the table's column.
        wanted: the type that values have from now on.
    """
    if isinstance(stored, str) or isinstance(wanted, str):
        if stored == wanted:
            return stored
        if not isinstance(stored, str) or not isinstance(wanted, str):
            return None
        return wanted if _can_widen(stored, wanted) else stored if _can_widen(wanted, stored) else None
    if stored["type"] != wanted["type"]:
        return None
    if stored["type"] == "struct":
        return _find_common_struct(stored, wanted)
    inside = {}
    for name in {"elementType", "keyType", "valueType"} & stored.keys():
        inner = find_common_type(stored[name], wanted[name])
        if inner is None:
            return None
        inside[name] = inner
    return {**stored, **inside}


def _can_widen(narrow: str, wide: str) -> bool:
    narrow_digits, other = _DECIMAL.fullmatch(narrow), _DECIMAL.fullmatch(wide)
    if narrow_digits and other:
        before, after = (int(one[1]) - int(one[2]) for one in (narrow_digits, other))
        return before <= after and int(narrow_digits[2]) <= int(other[2])
    return (narrow, wide) in _WIDER


def _find_common_struct(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> DeltaType | None:
    theirs = {field["name"].lower(): field for field in wanted["fields"]}
    fields = []
    for field in stored["fields"]:
        other = theirs.pop(field["name"].lower(), None)
        inner = field["type"] if other is None else find_common_type(field["type"], other["type"])
        if inner is None:
            return None
        fields.append({**field, "type": inner})
    return {**stored, "fields": [*fields, *theirs.values()]}


def has_other_leaves(stored: DeltaType, common: DeltaType) -> bool:
    """Whether a value of the stored type has to be written again to have the common one: more members alone do not."""
    if isinstance(stored, str) or isinstance(common, str):
        return stored != common
    if stored["type"] == "struct":
        there = {field["name"]: field["type"] for field in common["fields"]}
        return any(has_other_leaves(field["type"], there[field["name"]]) for field in stored["fields"])
    inside = {"elementType", "keyType", "valueType"} & stored.keys()
    return any(has_other_leaves(stored[name], common[name]) for name in inside)


def convert_value(value: Column, stored: DeltaType, common: DeltaType) -> Column:
    """A value of the stored type in the common one; members that it lacks are null.

    Args:
        value: a column of the type `stored`.
        stored: its type.
        common: the result of `find_common_type` with it.
    """
    from pyspark.sql import functions as F

    if stored == common:
        return value
    if isinstance(stored, str) or isinstance(common, str):
        return value.cast(format_sql_type(common))
    if stored["type"] == "array":
        return F.transform(value, lambda one: convert_value(one, stored["elementType"], common["elementType"]))
    if stored["type"] == "map":
        return F.transform_values(value, lambda _, one: convert_value(one, stored["valueType"], common["valueType"]))
    there = {field["name"]: field["type"] for field in stored["fields"]}
    members = [
        convert_value(value[field["name"]], there[field["name"]], field["type"])
        if field["name"] in there
        else F.lit(None).cast(format_sql_type(field["type"]))
        for field in common["fields"]
    ]
    names = [field["name"] for field in common["fields"]]
    whole = F.struct(*[one.alias(name) for one, name in zip(members, names, strict=True)])
    return F.when(value.isNotNull(), whole)


def format_sql_type(kind: DeltaType) -> str:
    """A type of Delta's schema in SQL."""
    if isinstance(kind, str):
        return {"integer": "INT", "long": "BIGINT"}.get(kind, kind.upper())
    if kind["type"] == "array":
        return f"ARRAY<{format_sql_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"MAP<{format_sql_type(kind['keyType'])}, {format_sql_type(kind['valueType'])}>"
    members = [f"`{field['name']}`: {format_sql_type(field['type'])}" for field in kind["fields"]]
    return f"STRUCT<{', '.join(members)}>"
