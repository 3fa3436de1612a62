"""Unions of several Avro types as what they hold: Spark reads them as structs with a member for each type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

# Spark widens these by itself.
_WIDENED = ({"int", "long"}, {"float", "double"})
_CONTAINERS = frozenset({"record", "array", "map"})


def without_members(value: Column, schema: Any) -> Column:
    """A value as Spark reads it from Avro, with a variant in the place of each struct of a union's members.

    Args:
        value: the column.
        schema: the writer's schema, as JSON is loaded.

    Raises:
        ValueError: a type is inside of itself, which Spark does not read.
    """
    return _plain(value, schema, {}) if _has_members(schema, {}) else value


def _resolved(schema: Any, names: dict[str, Any]) -> Any:
    """The definition of a type; a name that is defined here is known from now on, with its namespace and without."""
    if isinstance(schema, str):
        return names.get(schema, schema)
    if isinstance(schema, Mapping) and isinstance(schema["type"], Mapping | list):
        return _resolved(schema["type"], names)
    if isinstance(schema, Mapping) and "name" in schema:
        names[schema["name"]] = names[schema["name"].rpartition(".")[2]] = schema
        if schema.get("namespace"):
            names[f"{schema['namespace']}.{schema['name']}"] = schema
    return schema


def _types(union: list[Any]) -> list[Any]:
    return [one for one in union if one not in ("null", {"type": "null"})]


def _is_widened(types: list[Any]) -> bool:
    names = [one["type"] if isinstance(one, Mapping) and "logicalType" not in one else one for one in types]
    return all(isinstance(one, str) for one in names) and {*names} in _WIDENED


def _has_members(schema: Any, names: dict[str, Any], around: tuple[Any, ...] = ()) -> bool:
    """Whether there is such a union; `around` is what the type is inside of."""
    found = _resolved(schema, names)
    if any(found is one for one in around if isinstance(one, Mapping)):
        raise ValueError(f"the type {found['name']} is inside of itself")
    # All of them are looked at: a type may be named before others that use it.
    inside = [_has_members(one, names, (*around, found)) for one in _inside(found)]
    types = _types(found) if isinstance(found, list) else []
    return any(inside) or (len(types) > 1 and not _is_widened(types))


def _inside(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return _types(schema)
    if not isinstance(schema, Mapping):
        return []
    if schema["type"] == "record":
        return [field["type"] for field in schema["fields"]]
    return [schema[name] for name in ("items", "values") if name in schema]


def _plain(value: Column, schema: Any, names: dict[str, Any]) -> Column:
    from pyspark.sql import functions as F

    found = _resolved(schema, names)
    if isinstance(found, list):
        types = _types(found)
        if len(types) == 1:
            return _plain(value, types[0], names)
        if not types or _is_widened(types):
            return value
        return F.coalesce(*[_variant(value[f"member{at}"], one, names) for at, one in enumerate(types)])
    if not isinstance(found, Mapping) or not _has_members(found, dict(names)):
        return value
    if found["type"] == "array":
        return F.transform(value, lambda one: _plain(one, found["items"], names))
    if found["type"] == "map":
        return F.transform_values(value, lambda _, one: _plain(one, found["values"], names))
    fields = [_plain(value[one["name"]], one["type"], names).alias(one["name"]) for one in found["fields"]]
    return F.when(value.isNotNull(), F.struct(*fields))


def _variant(value: Column, schema: Any, names: dict[str, Any]) -> Column:
    from pyspark.sql import functions as F

    found, plain = _resolved(schema, names), _plain(value, schema, names)
    kind = found["type"] if isinstance(found, Mapping) else found
    return F.to_variant_object(plain) if kind in _CONTAINERS else plain.cast("variant")
