"""The comparison of an event's columns with the fields that the second reader finds in its record."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from highwater.classifying import format_text
from highwater.declaration import Field
from highwater.second_reader import EPOCH, InfiniteNumber, UnreadableError, parse_document, round_to_single


def _matches_document(document: Any, read: Any) -> bool:
    """Whether a JSON document says what was decoded; nothing here is nested too deep for Python."""
    pairs = [(document, read)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(other, Mapping):
            if not isinstance(one, Mapping) or one.keys() != other.keys():
                return False
            pairs += [(one[key], other[key]) for key in other]
        elif isinstance(other, list | tuple):
            if not isinstance(one, list) or len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif not _is_said(one, other):
            return False
    return True


def _is_said(one: Any, other: Any) -> bool:
    """Whether a JSON document says a decoded value that has nothing inside."""
    if isinstance(other, bytes):
        return bool(one == base64.b64encode(other).decode())
    if isinstance(other, datetime):
        try:
            return isinstance(one, str) and datetime.fromisoformat(one) == other
        except ValueError:
            return False
    if isinstance(other, date):
        return bool(one == other.isoformat())
    if isinstance(other, float):
        if not math.isfinite(other):
            name = "NaN" if math.isnan(other) else "Infinity" if other > 0 else "-Infinity"
            return one in (InfiniteNumber(name), name)
        return isinstance(one, Decimal) and (float(one) == other or _is_single(one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _is_single(written: Decimal, read: float) -> bool:
    """Whether a number in 32 bits is written with the few digits that it needs there."""
    try:
        return round_to_single(written) == read
    except OverflowError:
        return False


def hash_value(field: Field, value: Any) -> str:
    """The SHA-256 of a value's text, as a masked column holds it."""
    return hashlib.sha256(str(format_text(field, value)).encode()).hexdigest()


def matches_stored(field: Field, read: Any, stored: Any) -> bool:
    """Whether a column of an event holds what was read of its record.

    Args:
        field: its declaration.
        read: the value as the second reader returned it.
        stored: as the table has it; of a timestamp in microseconds since 1970.
    """
    if read is None or stored is None:
        return read is None and stored is None
    if field.mask == "hash":
        return bool(stored == hash_value(field, read))
    if field.type == "json":
        try:
            return _matches_document(parse_document(stored.encode()), read)
        except RecursionError as error:
            raise UnreadableError("it is nested deeper than Python reads") from error
    if field.type == "array":
        [element] = field.members
        return len(read) == len(stored) and all(
            matches_stored(element, *pair) for pair in zip(read, stored, strict=True)
        )
    if field.type == "map":
        [inner], there = field.members, dict(stored)
        return read.keys() == there.keys() and all(matches_stored(inner, read[key], there[key]) for key in read)
    if field.type == "struct":
        return all(matches_stored(one, read[one.name], stored.get(one.name)) for one in field.members)
    if field.type in {"timestamp", "timestamp_ntz"} and isinstance(stored, datetime):
        aware = stored if stored.tzinfo else stored.replace(tzinfo=UTC)
        stored = (aware - EPOCH) // timedelta(microseconds=1)
    if isinstance(read, float) and math.isnan(read):
        return isinstance(stored, float) and math.isnan(stored)
    # To Python `true` equals 1.
    return bool(read == stored) and isinstance(read, bool) == isinstance(stored, bool)
