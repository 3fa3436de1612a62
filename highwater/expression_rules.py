"""The rules of a declaration's expressions, and of fields that are columns of the lookup's table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from highwater.declaration import Stream

# Columns are named after rules, and after values of fields.
COLUMN_PART = re.compile(r"[A-Za-z0-9_]+")
# Functions that give another value at each evaluation, or need more than one record.
_UNFIT = re.compile(
    r"\b(rand|randn|random|uuid|now|current_timestamp|current_date|localtimestamp|unix_timestamp|shuffle|"
    r"monotonically_increasing_id|spark_partition_id|input_file_name|select|over)\b(?!\s*=)"
    r"|\(\s*(?:from|table|values)\b|\|>",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"(?:[-+*/%=<>!&|,]|\b(?:and|or|not|between|is))\s*$", re.IGNORECASE)
# Texts in other quotation marks, and comments: whatever they hold is left to Spark.
_OTHER_TEXT = re.compile(r"\"|\b[rR]'|/\*|--")
# Comparisons and arithmetic alone are understood without Spark: their names are fields.
_TERM = r"(?:[A-Za-z_]\w*|\d+(?:\.\d+)?|'')"
_OPERATOR = r"(?:\s*(?:<=>|<>|!=|<=|>=|==|[-+*/%=<>])\s*|\s+(?:and|or)\s+)"
_PLAIN = re.compile(rf"\s*{_TERM}(?:{_OPERATOR}{_TERM})*\s*", re.IGNORECASE)
_PLAIN_WORDS = frozenset({"and", "or", "null", "true", "false"})


def find_expression_problems(stream: Stream) -> list[str]:
    """The faults of expressions and rules that are certain without Spark, in sentences."""
    texts = {f"field {f.name!r}": f.expression for f in stream.fields if f.expression is not None}
    texts |= {f"rule {name!r}": text for name, text in stream.rules.items()}
    found = [f"{name}: the expression is empty" for name, text in texts.items() if not text.strip()]
    for name, text in texts.items():
        if unfit := _UNFIT.search(_remove_literals(text)):
            found.append(
                f"{name}: {unfit[0]!r} cannot be used: an expression is computed more than once, of one record alone"
            )
    found += [f"{name}: {problem}" for name, text in texts.items() if (problem := _find_fault(stream, text))]
    names = {f.name for f in stream.fields}
    found += [
        f"field {f.name!r}: there is a field 'field_{f.name}' too: give one of them another name"
        for f in stream.fields
        if f.expression is not None and f"field_{f.name}" in names
    ]
    found += [
        f"rule {name!r}: a name is letters, digits and _" for name in stream.rules if not COLUMN_PART.fullmatch(name)
    ]
    for f in stream.fields:
        if f.expression is not None and (f.source is not None or f.optional or f.default is not None):
            found.append(f"field {f.name!r}: an expression has no source, is not optional and has no default")
    return found


def find_reference_problems(stream: Stream) -> list[str]:
    """The faults of fields that are taken from the lookup's table, in sentences."""
    names = [f.name for f in stream.fields if f.reference is not None]
    if names and stream.lookup is None:
        return [f"field {names[0]!r} is a column of the lookup's table, and no lookup is declared"]
    roles = {
        "the key": stream.key,
        "the version": (stream.version,),
        "the event time": (stream.event_time,),
        "the field of deletes": (stream.deletes.field,) if stream.deletes else (),
        "the field of the lookup": (stream.lookup.field,) if stream.lookup else (),
        "the field of transitions": (stream.transitions.field,) if stream.transitions else (),
    }
    found = [
        f"field {name!r} is a column of the lookup's table, so it cannot be {role}: its rows may change"
        for role, used in roles.items()
        for name in names
        if name in used
    ]
    texts = {f"field {f.name!r}": f.expression for f in stream.fields if f.expression is not None}
    texts |= {f"rule {name!r}": text for name, text in stream.rules.items()}
    found += [
        f"{what}: it names {name!r}, a column of the lookup's table, which is looked up after expressions and rules"
        for what, text in texts.items()
        for name in names
        if re.search(rf"(?<![\w@-]){re.escape(name)}(?![\w@-])", _remove_literals(text), re.IGNORECASE)
    ]
    if stream.lookup is not None and stream.find_field(stream.lookup.field).may_be_null:
        by = f"field {stream.lookup.field!r}, by which it is looked up, may be null"
        found += [
            f"field {name!r}: {by}: declare optional=True" for name in names if not stream.find_field(name).optional
        ]
    return found


def _remove_literals(expression: str) -> str:
    return re.sub(r"'(?:[^'\\]|\\.)*'", "''", expression)


def _find_fault(stream: Stream, expression: str) -> str | None:
    """The fault of an expression that is sure without Spark, which looks at it when it is first used."""
    text = re.sub(r"`[^`]*`", "x", _remove_literals(expression))
    if _OTHER_TEXT.search(expression):
        return None
    if text.count("(") != text.count(")"):
        return "its parentheses do not match"
    if "'" in text.replace("''", "") or "`" in text:
        return "a quotation mark is not closed"
    if unfinished := _UNFINISHED.search(text):
        return f"it ends with {unfinished[0].strip()!r}"
    if "`" in expression or not _PLAIN.fullmatch(text):
        return None
    words = {one.lower() for one in re.findall(r"[A-Za-z_]\w*", text)} - _PLAIN_WORDS
    unknown = sorted(words - {f.name.lower() for f in stream.fields})
    return f"there is no field {unknown[0]!r}" if unknown else None
