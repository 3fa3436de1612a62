"""Avro values that Spark misreads: unions of several types, texts that are not UTF-8, arrays of double."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

# Spark widens these by itself.
_WIDENED = ({"int", "long"}, {"float", "double"})
_CONTAINERS = frozenset({"record", "array", "map"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})


def without_members(value: Column, schema: Any) -> Column:
    """A value as Spark reads it from Avro, with a variant in the place of each struct of a union's members.

    Args:
        value: the column.
        schema: the writer's schema, as JSON is loaded.

    Raises:
        ValueError: a type is inside of itself, which Spark does not read.
    """
    return _replace_unions(value, _expand_schema(schema, {}, "", ()))


def has_valid_utf8(value: Column, schema: Any) -> Column:
    """Whether all texts of a value are UTF-8: Spark keeps their bytes as they are, and a variant would replace some.

    Args:
        value: the column.
        schema: the writer's schema, as JSON is loaded.
    """
    from pyspark.sql import functions as F

    return F.coalesce(_has_valid_utf8(value, _expand_schema(schema, {}, "", ())), F.lit(True))


def with_nullable_doubles(schema: Any) -> Any:
    """A schema for its reader, in which elements of arrays that are `double` may be null.

    Avro 1.12.0, the one in Spark 4.0, keeps an array of `double` in an array of its own, which rounds to `float`
    (AVRO-4108). An array whose elements may be null it keeps as objects.

    Args:
        schema: the writer's schema, as JSON is loaded.
    """
    if isinstance(schema, list):
        return [with_nullable_doubles(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: with_nullable_doubles(schema[name]) for name in ("type", "items", "values") if name in schema}
    if "fields" in schema:
        found["fields"] = [{**one, "type": with_nullable_doubles(one["type"])} for one in schema["fields"]]
    items = found.get("items")
    if items == "double" or (isinstance(items, Mapping) and items.get("type") == "double"):
        found["items"] = ["null", items]
    return {**schema, **found}


def _has_valid_utf8(value: Column, schema: Any) -> Column:
    """Whether texts are sound; true or null without any."""
    from pyspark.sql import functions as F

    yes = F.lit(True)
    if isinstance(schema, list):
        types = _select_non_null_types(schema)
        if len(types) == 1:
            return _has_valid_utf8(value, types[0])
        if _is_widened(types):
            return yes
        return _combine_conditions(
            _has_valid_utf8(value[f"member{at}"], one) for at, one in enumerate(types) if _has_texts(one)
        )
    kind = schema["type"] if isinstance(schema, Mapping) else schema
    if not _has_texts(schema):
        return yes
    if kind == "string":
        return F.is_valid_utf8(value)
    if kind == "array":
        return F.forall(value, lambda one: F.coalesce(_has_valid_utf8(one, schema["items"]), yes))
    if kind == "map":
        keys = F.forall(F.map_keys(value), F.is_valid_utf8)
        return keys & F.forall(F.map_values(value), lambda one: F.coalesce(_has_valid_utf8(one, schema["values"]), yes))
    fields = [one for one in schema["fields"] if _has_texts(one["type"])]
    return _combine_conditions(_has_valid_utf8(value[one["name"]], one["type"]) for one in fields)


def _combine_conditions(sound: Iterable[Column]) -> Column:
    from pyspark.sql import functions as F

    found = F.lit(True)
    for one in sound:
        found &= F.coalesce(one, F.lit(True))
    return found


def _has_texts(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_texts, _select_non_null_types(schema)))
    if not isinstance(schema, Mapping):
        return bool(schema == "string")
    inside = [schema[name] for name in ("items", "values") if name in schema]
    inside += [one["type"] for one in schema.get("fields", ())]
    return schema["type"] in {"string", "map"} or any(map(_has_texts, inside))


def _expand_schema(schema: Any, names: dict[str, Any], space: str, around: tuple[str, ...]) -> Any:
    """The schema with each type in the place of its name.

    Args:
        schema: a type.
        names: the named types so far, with their namespaces.
        space: the namespace around the type.
        around: the names of the types that it is inside of.
    """
    if isinstance(schema, str):
        full = schema if schema in names else f"{space}.{schema}"
        if full not in names:
            return schema
        if full in around:
            raise ValueError(f"the type {schema} is inside of itself")
        return _expand_schema(names[full][0], {**names}, names[full][1], around)
    if isinstance(schema, list):
        return [_expand_schema(one, names, space, around) for one in schema]
    kind = schema["type"]
    if not isinstance(kind, str) or (kind not in _NAMED | _CONTAINERS and ("." in kind or f"{space}.{kind}" in names)):
        return _expand_schema(kind, names, space, around)
    if kind in _NAMED:
        name = schema["name"]
        if "." not in name and schema.get("namespace", space):
            name = f"{schema.get('namespace', space)}.{name}"
        names[name] = (schema, space)
        space, around = name.rpartition(".")[0], (*around, name)
    if "fields" in schema:
        fields = [{**one, "type": _expand_schema(one["type"], names, space, around)} for one in schema["fields"]]
        return {**schema, "fields": fields}
    inner = {name: _expand_schema(schema[name], names, space, around) for name in ("items", "values") if name in schema}
    return {**schema, **inner}


def _select_non_null_types(union: Any) -> list[Any]:
    return [one for one in union if one not in ("null", {"type": "null"})]


def _is_widened(types: list[Any]) -> bool:
    names = [one["type"] if isinstance(one, Mapping) and "logicalType" not in one else one for one in types]
    return all(isinstance(one, str) for one in names) and {*names} in _WIDENED


def _has_members(schema: Any) -> bool:
    """Whether there is a union of several types in an expanded schema."""
    if isinstance(schema, list):
        types = _select_non_null_types(schema)
        return (len(types) > 1 and not _is_widened(types)) or any(map(_has_members, types))
    if not isinstance(schema, Mapping):
        return False
    inside = [schema[name] for name in ("items", "values") if name in schema]
    return any(map(_has_members, [*inside, *(one["type"] for one in schema.get("fields", ()))]))


def _replace_unions(value: Column, schema: Any) -> Column:
    from pyspark.sql import functions as F

    if not _has_members(schema):
        return value
    if isinstance(schema, list):
        types = _select_non_null_types(schema)
        if len(types) == 1:
            return _replace_unions(value, types[0])
        return F.coalesce(*[_to_variant(value[f"member{at}"], one) for at, one in enumerate(types)])
    if schema["type"] == "array":
        return F.transform(value, lambda one: _replace_unions(one, schema["items"]))
    if schema["type"] == "map":
        return F.transform_values(value, lambda _, one: _replace_unions(one, schema["values"]))
    fields = [_replace_unions(value[one["name"]], one["type"]).alias(one["name"]) for one in schema["fields"]]
    return F.when(value.isNotNull(), F.struct(*fields))


def _to_variant(value: Column, schema: Any) -> Column:
    from pyspark.sql import functions as F

    kind = schema["type"] if isinstance(schema, Mapping) else schema
    plain = _replace_unions(value, schema)
    return F.to_variant_object(plain) if kind in _CONTAINERS else plain.cast("variant")
