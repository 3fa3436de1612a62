"""The value of an accepted event as others read it: a JSON object of the declared fields, exact."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from highwater.declaration import Field, Stream

# Hexadecimal digits: 128 bits.
FINGERPRINT_DIGITS = 32
# Characters that JSON requires to be escaped.
_ESCAPED = r'["\\\x00-\x1f]'
# Digits after the decimal point above which Arrow may write an exponent.
_PLAIN_DIGITS = 6


def encode_values(stream: Stream, rows: pa.Table) -> pa.Array:
    """The value of each row of events, in UTF-8: no spaces, the fields in the order of their declaration."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[Any] = []
    for number, field in enumerate(stream.stored_fields):
        parts.append(("," if number else "{") + json.dumps(field.name, ensure_ascii=False) + ":")
        parts.append(pc.fill_null(_encode_column(field, rows[field.name].combine_chunks()), "null"))
    whole = pc.binary_join_element_wise(*parts, "}", "")
    return pc.cast(whole, pa.binary())


def encode_keys(rows: pa.Table) -> pa.Array:
    """The key of each row, as the record on the main topic had it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.cast(pc.cast(rows["key"].combine_chunks(), pa.string()), pa.binary())


def compute_fingerprints(values: pa.Array) -> list[str]:
    """The content that distinguishes events; the key consists of fields, so it is left out."""
    return [*map(compute_fingerprint, values.to_pylist())]


def compute_fingerprint(value: bytes) -> str:
    """The content of one value that distinguishes events."""
    return sha256(value).hexdigest()[:FINGERPRINT_DIGITS]


def _encode_column(field: Field, column: Any) -> Any:
    """A column as JSON text; null stays null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if field.type == "string" or field.mask == "hash":
        return _quote(pc.cast(column, pa.string()))
    if field.type == "timestamp":
        # In UTC as it is stored: as a time of a zone each would be looked up there, in thirty times the time.
        plain = pc.cast(pc.cast(column, pa.timestamp("us")), pa.string())
        return pc.binary_join_element_wise('"', pc.replace_substring(plain, " ", "T", max_replacements=1), 'Z"', "")
    if field.type == "date":
        return pc.binary_join_element_wise('"', pc.cast(column, pa.string()), '"', "")
    if field.type in _ONE_BY_ONE or _has_exponents(field):
        write = _ONE_BY_ONE.get(field.type, lambda one: format(one, "f"))
        return pa.array([None if one is None else write(one) for one in column.to_pylist()], pa.string())
    return pc.cast(column, pa.string())


def _has_exponents(field: Field) -> bool:
    return field.type.startswith("decimal") and int(field.type.rstrip(")").split(",")[1]) > _PLAIN_DIGITS


def _encode_float(one: float) -> str:
    """A number as Python writes it, which reads back as the same; a value that is no JSON as text."""
    if math.isnan(one):
        return '"NaN"'
    return repr(one) if math.isfinite(one) else ('"Infinity"' if one > 0 else '"-Infinity"')


# Types whose values are written one by one; a value of `json` is JSON already.
_ONE_BY_ONE: Mapping[str, Callable[[Any], str]] = {
    "float": _encode_float,
    "double": _encode_float,
    "binary": lambda one: f'"{base64.b64encode(one).decode()}"',
    "json": str,
}


def _quote(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
        escaped = [None if one is None else json.dumps(one, ensure_ascii=False) for one in column.to_pylist()]
        return pa.array(escaped, pa.string())
    return pc.binary_join_element_wise('"', column, '"', "")
