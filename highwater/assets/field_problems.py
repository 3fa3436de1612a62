"""The problems of declared fields: why a record has no value for a column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.assets.field_parts import FieldPart, build_part, matches_type
from highwater.assets.field_times import FINER_THAN_MICROS, convert_to_micros
from highwater.assets.fields import (
    build_inner_part,
    build_member_part,
    convert_value,
    is_beyond,
    parse_precision_and_scale,
)
from highwater.declaration_parts import UNITS
from highwater.field_rules import CONTAINERS
from highwater.sources import describe_source

if TYPE_CHECKING:
    from pyspark.sql import Column

    from highwater.declaration import Field, Stream


def find_problem(stream: Stream, declared: Field) -> Column:
    """The fault of a field, for a person; null where there is none."""
    from pyspark.sql import functions as F

    if declared.expression is not None:
        fine = F.lit(declared.nullable) | F.col(f"field_{declared.name}").isNotNull()
        return F.when(~fine, F.lit(f"field {declared.name} is null: {declared.expression}"))
    part = build_part(stream, declared)
    return _find_part_problem(part, F.lit(_format_field_name(declared)), F.col(f"field_{declared.name}"))


# In the problem of a value whose type is another one than that of its field, in front of the type that was found.
_FOUND = ", found "


def is_of_other_type(problem: Column) -> Column:
    """Whether the problem of a field is that its value has another type."""
    return problem.contains(_FOUND)


def _find_part_problem(part: FieldPart, named: Column, value: Column) -> Column:
    """The problem of a part whose name is an expression."""
    from pyspark.sql import functions as F

    declared, absent, void = part.declared, part.json.isNull(), part.kind == "VOID"
    nothing = F.lit(False)
    fine = value.isNotNull() if declared.type not in CONTAINERS else nothing
    if declared.optional:
        fine |= absent
    if declared.nullable:
        fine |= void
    if declared.nan == "null":
        fine |= part.is_infinite | is_beyond(F.when(part.kind.isin(["DOUBLE", "FLOAT"]), part.get_as("double")))

    def format_problem(what: str) -> Column:
        return F.concat(F.lit("field "), named, F.lit(f" {what}"))

    missing = F.when(absent, format_problem("is missing"))
    if not declared.nullable:
        missing = missing.when(void, format_problem("is null"))
    unfit = F.when(~matches_type(part), F.concat(format_problem(f"is {declared.type}{_FOUND}"), _found(part)))
    if declared.type in CONTAINERS:
        rest = _find_inner_problem(part, named)
    else:
        rest = F.concat(F.lit("field "), named, F.lit(" "), _describe_misfit(part))
    return F.when(F.coalesce(fine, nothing), None).otherwise(F.coalesce(missing, unfit, rest))


def _find_inner_problem(part: FieldPart, named: Column) -> Column:
    """The first problem inside an array, a map or a struct."""
    from pyspark.sql import functions as F

    def find_named_problem(inner: FieldPart, name: Column) -> Column:
        return _find_part_problem(inner, name, convert_value(inner))

    if part.declared.type == "struct":
        members = [build_member_part(part, one) for one in part.declared.members]
        dotted = [F.concat(named, F.lit(f".{_format_field_name(one.declared)}")) for one in members]
        return F.coalesce(*[find_named_problem(one, name) for one, name in zip(members, dotted, strict=True)])
    inner = part.declared.members[0]
    if part.declared.type == "array":
        found = F.transform(
            part.get_as("array<variant>"),
            lambda one, at: find_named_problem(
                build_inner_part(part, inner, one), F.concat(named, F.lit("["), at.cast("string"), F.lit("]"))
            ),
        )
    else:
        found = F.transform(
            F.map_entries(part.get_as("map<string,variant>")), lambda one: _find_entry_problem(part, one, named)
        )
    return F.get(F.filter(found, F.isnotnull), F.lit(0))


def _find_entry_problem(part: FieldPart, entry: Column, named: Column) -> Column:
    """The fault of an entry of a map."""
    from pyspark.sql import functions as F

    inner = build_inner_part(part, part.declared.members[0], entry["value"])
    return _find_part_problem(inner, F.concat(named, F.lit('["'), entry["key"], F.lit('"]')), convert_value(inner))


def _format_field_name(declared: Field) -> str:
    """The name of a field, and where its value is looked for if that is elsewhere."""
    places = [describe_source(one) for one in declared.sources]
    return declared.name if places == [declared.name] else f"{declared.name} ({', else '.join(places)})"


def _found(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    shown = F.concat(F.lit("the number "), part.behind_mark.substr(1, 40))
    kind = F.regexp_extract(part.kind, r"^\w+(?:\(\d+,\d+\))?", 0)
    return F.when(part.is_inexact, shown).otherwise(F.concat(F.lit("JSON "), kind))


def _describe_misfit(part: FieldPart) -> Column:
    """The reason why a field of the right type does not fit its column."""
    from pyspark.sql import functions as F

    declared, number = part.declared, part.number
    rest = F.lit(f"does not fit {declared.type}")
    if declared.type == "time" and declared.unit:
        return F.lit(f"is no time of day in {declared.unit} since midnight")
    if declared.unit in UNITS:
        first, last = declared.plausible
        beyond = F.lit(f"is outside of {first} to {last} as a number in {declared.unit}")
        return F.when(convert_to_micros(part).isNotNull(), beyond).otherwise(rest)
    if declared.type in {"timestamp", "timestamp_ntz"}:
        return F.when(part.text.rlike(FINER_THAN_MICROS), "has digits after the microsecond").otherwise(rest)
    if declared.type.startswith("decimal"):
        _, scale = parse_precision_and_scale(declared)
        finer = F.when(number.rlike(rf"\.\d{{{scale + 1}}}"), f"has more than {scale} digits after the point")
        return rest if declared.rounded else finer.otherwise(rest)
    if declared.type in {"integer", "long"}:
        return F.when(number.contains("."), "is no whole number").otherwise(rest)
    if declared.type == "binary":
        return F.lit("is no base64")
    return rest
