"""The rules of a declared field: that its type, its source and its options go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from highwater.declaration_parts import UNITS, Field, fold_case
from highwater.mask_rules import find_field_mask_problems
from highwater.sources import Meta, Reference, Rest

TYPE = re.compile(
    r"string|integer|long|float|double|boolean|timestamp|timestamp_ntz|date|time|binary|json|array|map|struct|"
    r"decimal\((\d+),(\d+)\)"
)
# Characters that are safe in a path into the value, in SQL and in a Delta table's column.
NAME = re.compile(r"[\w@-]+")
CONTAINERS = frozenset({"array", "map", "struct"})
_MAX_DEEP = 16
_UNITS_OF = {
    "timestamp": frozenset(UNITS),
    "timestamp_ntz": frozenset(UNITS),
    "date": frozenset({"days"}),
    "time": frozenset({"ms", "us"}),
}
_MAX_DECIMAL_DIGITS = 38


def find_field_problems(declared: Field, depth: int = 0) -> list[str]:
    """The faults of a declared field, in sentences; empty if it may be used."""
    kind = TYPE.fullmatch(declared.type)
    if kind is None:
        return [f"field {declared.name!r}: unknown type {declared.type!r}"]
    if kind[1] and not (1 <= int(kind[1]) <= _MAX_DECIMAL_DIGITS and int(kind[2]) <= int(kind[1])):
        rule = f"a decimal has 1 to {_MAX_DECIMAL_DIGITS} digits, and no more after the decimal point than in all"
        return [f"field {declared.name!r}: there is no {declared.type}: {rule}"]
    found = _find_source_problems(declared) + _find_notation_problems(declared) + _find_default_problems(declared, kind)
    found += _find_bound_problems(declared, _compute_maximum(declared, kind)) + _find_choice_problems(declared)
    found += find_field_mask_problems(declared)
    return found + (
        _find_member_problems(declared, depth) if depth < _MAX_DEEP else [_describe_depth_problem(declared)]
    )


def _describe_depth_problem(declared: Field) -> str:
    return f"field {declared.name!r}: fields are nested in each other {_MAX_DEEP} times at the most"


def _find_member_problems(declared: Field, depth: int) -> list[str]:
    """The faults inside an array, a map or a struct."""
    name, kind, members = declared.name, declared.type, declared.members
    if kind not in CONTAINERS:
        return [f"field {name!r}: of is for arrays, maps and structs, and this is a {kind}"] if members else []
    if kind == "struct":
        found = [] if members else [f"field {name!r}: of gives no member of the struct"]
        found += [
            f"field {name!r}: member {one.name!r}: a name is letters, digits, '_', '-' and '@', one at least"
            for one in members
            if not NAME.fullmatch(one.name)
        ]
        names = [fold_case(one.name) for one in members]
        found += [f"field {name!r}: {one!r} is a member twice" for one in sorted({*names}) if names.count(one) > 1]
    else:
        what = "the elements of the array" if kind == "array" else "the values of the map"
        found = [] if len(members) == 1 else [f"field {name!r}: of must be one field, {what}"]
        found += [
            f"field {name!r}: {what} are there or null; they cannot be optional" for one in members if one.optional
        ]
        found += [f"field {name!r}: {what} have no source" for one in members if one.source is not None]
    for one in members:
        if one.one_of or one.at_least is not None:
            found.append(f"field {name!r}: one_of and at_least are for fields of the record; use a rule of the stream")
        if one.expression is not None or not _is_from_paths(one):
            found.append(f"field {name!r}: {one.name!r} inside of it can only come from a path")
        found += [f"field {name!r}: {problem}" for problem in find_field_problems(one, depth + 1)]
    return found


def _is_from_paths(declared: Field) -> bool:
    given = declared.source if isinstance(declared.source, tuple) else (declared.source,)
    return all(one is None or isinstance(one, str) for one in given)


def _find_source_problems(declared: Field) -> list[str]:
    if declared.source == ():
        return [f"field {declared.name!r}: source names nothing"]
    try:
        found = declared.sources
        _ = [one.path for one in found if isinstance(one, Rest)]
    except ValueError as error:
        return [f"field {declared.name!r}: source: {error}"]
    if any(isinstance(one, Reference) for one in found):
        return _find_reference_problems(declared)
    timestamps = [one for one in found if one == Meta("timestamp")]
    if timestamps and declared.type in {"timestamp", "timestamp_ntz"} and declared.unit != "ms":
        return [f"field {declared.name!r}: the timestamp of a record is a number in ms: declare unit='ms'"]
    return []


def _find_reference_problems(declared: Field) -> list[str]:
    """The faults of a field that is taken from the lookup's table, in sentences."""
    named = f"field {declared.name!r}"
    if declared.reference is None or declared.expression is not None:
        return [f"{named}: a column of the lookup's table is its only source"]
    if declared.type in {*CONTAINERS, "json", "time"}:
        return [f"{named}: a column of the lookup's table cannot be a {declared.type}"]
    plain = Field(declared.name, declared.type)
    options = ("one_of", "at_least", "default", "text", "unit", "zone", "nan", "rounded", "unscaled", "mask")
    said = [name for name in options if getattr(declared, name) != getattr(plain, name)]
    return [f"{named}: it is a column of the lookup's table as it is: leave out {', '.join(said)}"] if said else []


def _find_notation_problems(declared: Field) -> list[str]:
    """The declared settings of a value's notation that do not fit the type."""
    name, kind, found = declared.name, declared.type, []
    units = _UNITS_OF.get(kind, frozenset())
    if declared.unit is not None and declared.unit not in units:
        allowed = f"; of a {kind} it is {', '.join(sorted(units))}" if units else ": it is for timestamp, date and time"
        found.append(f"field {name!r}: unit is {declared.unit!r}{allowed}")
    if declared.zone is not None and (kind != "timestamp" or declared.unit is not None):
        found.append(f"field {name!r}: zone is for a timestamp in ISO 8601")
    elif declared.zone is not None and not _is_zone(declared.zone):
        found.append(f"field {name!r}: there is no zone {declared.zone!r}")
    if declared.text and not declared.is_number:
        found.append(f"field {name!r}: text is for numbers, and a {kind} is none")
    if declared.nan != "reject" and kind not in {"float", "double"}:
        found.append(f"field {name!r}: nan is for float and double, and this is a {kind}")
    if (declared.rounded or declared.unscaled) and not kind.startswith("decimal"):
        found.append(f"field {name!r}: rounded and unscaled are for decimals, and this is a {kind}")
    if declared.unscaled and declared.text:
        found.append(f"field {name!r}: an unscaled decimal is no text of digits: leave out text")
    if declared.plausible[0] > declared.plausible[1]:
        found.append(f"field {name!r}: plausible ends before it begins")
    return found


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ValueError, ZoneInfoNotFoundError, OSError):
        return False
    return True


# By field type the Python types of its default; the other field types have none.
DEFAULT_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
}


def _find_default_problems(declared: Field, kind: re.Match[str]) -> list[str]:
    default = declared.default
    if default is None:
        return []
    if not declared.optional:
        return [f"field {declared.name!r}: default is for an optional field"]
    allowed = DEFAULT_TYPES.get(declared.type)
    if allowed is None:
        return [f"field {declared.name!r}: a {declared.type} has no default"]
    # To Python a bool is an int.
    if type(default) not in allowed:
        return [f"field {declared.name!r}: the default {default!r} is no {declared.type}"]
    greatest = _compute_maximum(declared, kind)
    if greatest is not None and isinstance(default, int) and not -greatest - 1 <= default <= greatest:
        return [f"field {declared.name!r}: the default {default!r} does not fit {declared.type}"]
    return []


def _compute_maximum(declared: Field, kind: re.Match[str]) -> int | None:
    """The greatest whole number that fits the type and 64 bits; None where it is no number."""
    if kind[1]:
        whole_digits = int(kind[1]) - int(kind[2])
        return min(int("9" * whole_digits or 0), 2**63 - 1)
    greatest = {"integer": 2**31 - 1, "long": 2**63 - 1, "float": 2**63 - 1, "double": 2**63 - 1}
    return greatest.get(declared.type)


def _find_bound_problems(declared: Field, greatest: int | None) -> list[str]:
    least = declared.at_least
    if least is None:
        return []
    if greatest is None:
        return [f"field {declared.name!r}: at_least is for numbers, and a {declared.type} is none"]
    if least > greatest:
        return [f"field {declared.name!r}: at_least is {least:,}, and {declared.type} takes {greatest:,} at the most"]
    return []


def _find_choice_problems(declared: Field) -> list[str]:
    wanted = {"string": str, "integer": int, "long": int}.get(declared.type)
    if declared.one_of and wanted is None:
        return [f"field {declared.name!r}: one_of is for strings and whole numbers, and a {declared.type} is neither"]
    unfit = [value for value in declared.one_of if type(value) is not wanted]
    return [f"field {declared.name!r}: one_of has {value!r}, which is no {declared.type}" for value in unfit]
