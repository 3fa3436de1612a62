"""Types of fields as schemas say them: Avro, JSON Schema, and Kafka Connect's JsonConverter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import reduce
from typing import Any

from highwater.declaration import Field
from highwater.field_rules import DEFAULT_TYPES
from highwater.inference_protobuf import build_protobuf_tree
from highwater.schemas import MAX_DECIMAL_DIGITS, Schema, build_self_contained_avro, with_storable_decimals

# Where a schema says the unit no number is implausible: databases have an end of validity in the year 9999.
_ANY_YEAR: Mapping[str, Any] = {"plausible": (date(1, 1, 1), date(9999, 12, 31))}
# Logical types of Kafka Connect and Debezium, which say in what unit a number is.
_LOGICAL: Mapping[str, Mapping[str, Any]] = {
    "org.apache.kafka.connect.data.Timestamp": {"type": "timestamp", "unit": "ms", **_ANY_YEAR},
    "org.apache.kafka.connect.data.Date": {"type": "date", "unit": "days"},
    "org.apache.kafka.connect.data.Time": {"type": "time", "unit": "ms"},
    "io.debezium.time.Timestamp": {"type": "timestamp_ntz", "unit": "ms", **_ANY_YEAR},
    "io.debezium.time.MicroTimestamp": {"type": "timestamp_ntz", "unit": "us", **_ANY_YEAR},
    "io.debezium.time.NanoTimestamp": {"type": "timestamp_ntz", "unit": "ns", **_ANY_YEAR},
    "io.debezium.time.ZonedTimestamp": {"type": "timestamp"},
    "io.debezium.time.Date": {"type": "date", "unit": "days"},
    "io.debezium.time.Time": {"type": "time", "unit": "ms"},
    "io.debezium.time.MicroTime": {"type": "time", "unit": "us"},
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
# Pairs of types where the wider one holds the values of both.
_WIDER = ("integer", "long", "float", "double")


def build_tree(schemas: Sequence[Schema], message: Sequence[int] = (0,)) -> Field:
    """The field of type `struct` that holds the values of all schemas, the newest one last.

    Args:
        schemas: schemas of one kind.
        message: for Protobuf which message of the schema the values are.

    Raises:
        ValueError: a schema cannot be read, or describes no object.
    """
    read: Callable[[Schema], Field]
    if schemas[0].kind == "AVRO":
        read = build_avro_tree
    elif schemas[0].kind == "JSON":
        read = build_json_schema_tree
    else:

        def read(schema: Schema) -> Field:
            return build_protobuf_tree(schema, message)

    return reduce(merge_fields, [read(one) for one in schemas])


def merge_fields(first: Field, second: Field) -> Field:
    """The field that holds the values of both."""
    options: dict[str, Any] = {
        "nullable": first.nullable or second.nullable,
        "optional": first.optional or second.optional,
        "default": second.default if second.default is not None else first.default,
    }
    if first.type == second.type == "struct":
        first_members, other = ({one.name: one for one in tree.members} for tree in (first, second))
        both = [
            merge_fields(one, other[name]) if name in other else _to_optional(one)
            for name, one in first_members.items()
        ]
        added = [_to_optional(one) for name, one in other.items() if name not in first_members]
        return replace(second, of=(*both, *added), **options)
    if first.type == second.type:
        return replace(second, **options)
    if {first.type, second.type} <= {*_WIDER}:
        return replace(max(first, second, key=lambda one: _WIDER.index(one.type)), **options)
    return Field(second.name, "json", nullable=options["nullable"], optional=options["optional"])


def _to_optional(one: Field) -> Field:
    return replace(one, optional=True)


def connect_tree(schema: Any, name: str = "") -> Field:
    """The field of a schema as Kafka Connect's JsonConverter writes it beside the payload.

    Raises:
        ValueError: it is no such schema.
    """
    if not isinstance(schema, Mapping) or "type" not in schema:
        raise ValueError("the schema has no type")
    optional = bool(schema.get("optional"))
    kind, inner = schema["type"], find_logical_options(schema.get("name"), schema.get("parameters") or {})
    if inner is not None:
        return Field(name, **{"nullable": optional, **inner})
    if kind == "struct":
        members = tuple(connect_tree(one, one.get("field", "")) for one in schema.get("fields", ()))
        return Field(name, "struct" if members else "json", nullable=optional, of=members)
    if kind == "array":
        return Field(name, "array", nullable=optional, of=connect_tree(schema.get("items"), "element"))
    if kind == "map" and (schema.get("keys") or {}).get("type") == "string":
        return Field(name, "map", nullable=optional, of=connect_tree(schema.get("values"), "value"))
    types = {
        **dict.fromkeys(("int8", "int16", "int32"), "integer"),
        "int64": "long",
        "float32": "float",
        "float": "float",
        "float64": "double",
        "double": "double",
        "boolean": "boolean",
        "string": "string",
        "bytes": "binary",
    }
    return _with_nan(Field(name, types.get(kind, "json"), nullable=optional))


def find_logical_options(logical: Any, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The type and the options of a logical type; None if it is none of these."""
    if logical == _DECIMAL and "scale" in parameters:
        scale = int(parameters["scale"])
        precision = min(int(parameters.get("connect.decimal.precision", MAX_DECIMAL_DIGITS)), MAX_DECIMAL_DIGITS)
        if 0 <= scale <= precision:
            return {"type": f"decimal({precision},{scale})", "unscaled": True}
    return dict(_LOGICAL[logical]) if logical in _LOGICAL else None


def _with_nan(found: Field) -> Field:
    """A schema allows NaN in each float and double, and a document has no text for it."""
    return replace(found, nan="null") if found.type in {"float", "double"} else found


def build_avro_tree(schema: Schema) -> Field:
    """The field of an Avro record.

    Raises:
        ValueError: the schema is no JSON, or no record.
    """
    text = with_storable_decimals(json.loads(build_self_contained_avro(schema)))
    found = _Avro().build_field("", text, "")
    if found.type != "struct":
        raise ValueError("the schema is no record, so its values have no fields")
    return found


_AVRO_LOGICAL: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("long", "timestamp-millis"): {"type": "timestamp"},
    ("long", "timestamp-micros"): {"type": "timestamp"},
    ("long", "timestamp-nanos"): {"type": "timestamp", "unit": "ns", **_ANY_YEAR},
    ("long", "local-timestamp-millis"): {"type": "timestamp_ntz"},
    ("long", "local-timestamp-micros"): {"type": "timestamp_ntz"},
    ("long", "local-timestamp-nanos"): {"type": "timestamp_ntz", "unit": "ns", **_ANY_YEAR},
    ("int", "date"): {"type": "date"},
    ("int", "time-millis"): {"type": "time", "unit": "ms"},
    ("long", "time-micros"): {"type": "time", "unit": "us"},
}
_AVRO_TYPES = {"int": "integer", "bytes": "binary", "fixed": "binary", "enum": "string"}
_AVRO_SAME = frozenset({"string", "boolean", "long", "float", "double"})


class _Avro:
    """Reads the types of one Avro schema, with those that it defines by name."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self._open: set[str] = set()

    def build_field(self, name: str, node: Any, namespace: str) -> Field:
        """The field of a node of the schema."""
        if isinstance(node, list):
            return self._build_union_field(name, node, namespace)
        if isinstance(node, str):
            return self._build_named_field(name, node, namespace)
        kind = node["type"]
        if isinstance(kind, dict | list):
            return self.build_field(name, kind, namespace)
        if kind in {"record", "error", "enum", "fixed"}:
            full = node["name"] if "." in node["name"] else f"{node.get('namespace', namespace)}.{node['name']}"
            self._named[full] = node
            namespace = full.rpartition(".")[0]
            if kind in {"record", "error"}:
                return self._build_record(name, node, full, namespace)
        if kind == "array":
            return Field(name, "array", of=self.build_field("element", node["items"], namespace))
        if kind == "map":
            return Field(name, "map", of=self.build_field("value", node["values"], namespace))
        return self._build_plain_field(name, kind, node, namespace)

    def _build_plain_field(self, name: str, kind: str, node: Mapping[str, Any], namespace: str) -> Field:
        logical = node.get("logicalType")
        if logical == "decimal" and kind in {"bytes", "fixed"}:
            return Field(name, f"decimal({node['precision']},{node.get('scale', 0)})")
        if options := _AVRO_LOGICAL.get((kind, logical or "")):
            return Field(name, **options)
        if not logical and (options := find_logical_options(node.get("connect.name"), {})):
            return Field(name, **options)
        return self._build_named_field(name, kind, namespace)

    def _build_named_field(self, name: str, kind: str, namespace: str) -> Field:
        if kind in _AVRO_SAME or kind in _AVRO_TYPES:
            return _with_nan(Field(name, _AVRO_TYPES.get(kind, kind)))
        for full in (kind, f"{namespace}.{kind}"):
            if full in self._open:
                break  # a type within itself has no end
            if full in self._named:
                return self.build_field(name, self._named[full], namespace)
        return Field(name, "json", nullable=True)

    def _build_union_field(self, name: str, branches: Sequence[Any], namespace: str) -> Field:
        others = [one for one in branches if one != "null"]
        nullable = len(others) < len(branches)
        found = self.build_field(name, others[0], namespace) if len(others) == 1 else Field(name, "json")
        return replace(found, nullable=found.nullable or nullable)

    def _build_record(self, name: str, node: Mapping[str, Any], full: str, namespace: str) -> Field:
        self._open.add(full)
        members = tuple(
            _with_default(self.build_field(one["name"], one["type"], namespace), one) for one in node.get("fields", ())
        )
        self._open.discard(full)
        return Field(name, "struct" if members else "json", of=members)


def _with_default(found: Field, node: Mapping[str, Any]) -> Field:
    """A field whose schema has a default may be absent in values of an older schema."""
    if "default" not in node:
        return found
    default = node["default"]
    if type(default) in DEFAULT_TYPES.get(found.type, ()):
        return replace(found, optional=True, default=default)
    return replace(found, optional=True)


def build_json_schema_tree(schema: Schema) -> Field:
    """The field of a JSON Schema; a part that says nothing of its type is `json`.

    Raises:
        ValueError: the schema is no JSON, or describes no object with properties.
    """
    root = json.loads(schema.text)
    found = _JsonSchema(root).build_field("", root, 0)
    if found.type != "struct":
        raise ValueError("the schema names no properties of an object")
    return found


# Parts below this depth are `json`.
_MAX_DEPTH = 12


class _JsonSchema:
    """Reads the types of one JSON Schema, with what it refers to in itself."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open = ["#"]

    def build_field(self, name: str, node: Any, depth: int) -> Field:
        """The field of a node of the schema."""
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return Field(name, "json", nullable=True)
        if "$ref" in node:
            return self._build_referred_field(name, node["$ref"], depth)
        for choice in ("oneOf", "anyOf"):
            if choice in node:
                return self._build_choice_field(name, node[choice], depth)
        kinds = node.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        others = [one for one in listed if one != "null"]
        nullable = len(others) < len(listed)
        if len(others) != 1:
            return Field(name, "json", nullable=True)
        return replace(self._build_typed_field(name, others[0], node, depth), nullable=nullable)

    def _build_referred_field(self, name: str, reference: str, depth: int) -> Field:
        if reference in self._open:
            return Field(name, "json", nullable=True)  # a type within itself has no end
        self._open.append(reference)
        found = self.build_field(name, self._resolve_reference(reference), depth + 1)
        self._open.pop()
        return found

    def _resolve_reference(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        found = self._root
        for step in reference[1:].strip("/").split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _build_choice_field(self, name: str, branches: Sequence[Any], depth: int) -> Field:
        others = [one for one in branches if not (isinstance(one, Mapping) and one.get("type") == "null")]
        found = self.build_field(name, others[0], depth + 1) if len(others) == 1 else Field(name, "json")
        return replace(found, nullable=found.nullable or len(others) < len(branches))

    def _build_typed_field(self, name: str, kind: Any, node: Mapping[str, Any], depth: int) -> Field:
        options = find_logical_options(node.get("title"), node.get("connect.parameters") or {})
        if options is not None and kind in {"integer", "string", "number"}:
            return Field(name, **options)
        if kind == "object":
            required = frozenset(node.get("required", ()))
            members = tuple(
                replace(self.build_field(inner, one, depth + 1), optional=inner not in required)
                for inner, one in (node.get("properties") or {}).items()
            )
            if not members and isinstance(node.get("additionalProperties"), Mapping):
                return Field(name, "map", of=self.build_field("value", node["additionalProperties"], depth + 1))
            return Field(name, "struct" if members else "json", of=members)
        if kind == "array" and isinstance(node.get("items"), Mapping):
            return Field(name, "array", of=self.build_field("element", node["items"], depth + 1))
        if kind == "string":
            formats = {"date-time": "timestamp", "date": "date"}
            return Field(name, formats.get(node.get("format", ""), "string"))
        if kind == "integer":
            return Field(name, "integer" if node.get("connect.type") in {"int8", "int16", "int32"} else "long")
        return Field(name, {"number": "double", "boolean": "boolean"}.get(kind, "json"))
