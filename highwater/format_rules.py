"""The rules of a stream's formats of values and keys: that they can be read, and that fields name what they have."""

from __future__ import annotations

import base64
import binascii
import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from highwater.formats import Avro, BigEndian, Csv, Lines, Protobuf, Raw, Text
from highwater.record_key_fields import find_key_comparison_problems
from highwater.sources import Key

if TYPE_CHECKING:
    from highwater.declaration import Stream

_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9]*")
# Parts of a pattern: escapes, sets, the beginnings of groups, quantifiers, and single characters.
_PARTS = re.compile(
    r"(?P<escape>\\(?:[1-9][0-9]+|.))"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<named>\(\?P?<(?=[A-Za-z_]))"
    r"|(?P<group>\(\?(?:<?[=!]|>|[a-zA-Z-]*[:)]|.?))"
    r"|(?P<quantifier>(?:[*+?]|\{[^{}]*\}?)[+?]?)"
    r"|.",
    re.DOTALL,
)
_SHARED_GROUP = re.compile(r"\(\?(?:<?[=!]|>|[ims]*(?:-[ims]+)?[:)])")
# A possessive quantifier Java follows in a loop.
_REPEATED = re.compile(r"(?:[*+]|\{[0-9]+,[0-9]*\})\??")
_SHARED_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})[?+]?")
# Letters and digits after a backslash that both read as the same: classes, boundaries, characters, back references.
_SHARED_ESCAPES = frozenset("dDsSwWbBAtnrfaxu123456789")
_SHARED_IN_SETS = _SHARED_ESCAPES - frozenset("bBA123456789")
_IN_SETS_ALONE = re.compile(r"\[|&&")


def to_java_pattern(pattern: str) -> str:
    """A declared pattern in Java's syntax."""
    return _with_names(pattern, "(?<")


def to_python_pattern(pattern: str) -> str:
    """A declared pattern in Python's syntax, for the flag `re.ASCII`: Java's classes have ASCII alone."""
    return _with_names(pattern, "(?P<")


def _with_names(pattern: str, begin: str) -> str:
    return "".join(begin if one.lastgroup == "named" else one[0] for one in _PARTS.finditer(pattern))


def _find_unshared_part(pattern: str) -> str | None:
    """The first part of a pattern that Python and Java do not both read, or not as the same."""
    for one in _PARTS.finditer(pattern):
        text = one[0]
        shared = {
            "escape": len(text) == 2 and (text[1] in _SHARED_ESCAPES or not (text[1].isalnum() and text[1].isascii())),
            "set": not _set_fault(text),
            "group": bool(_SHARED_GROUP.fullmatch(text)),
            "quantifier": bool(_SHARED_QUANTIFIER.fullmatch(text)),
        }
        if not shared.get(one.lastgroup or "", True):
            return text
    return None


def _set_fault(text: str) -> bool:
    """Whether a set has another set or an intersection in it, as in Java, or an escape that both do not share."""
    inside = text[1:-1].removeprefix("^")
    escapes = re.findall(r"\\(.)", inside, re.DOTALL)
    odd = [one for one in escapes if one.isascii() and one.isalnum() and one not in _SHARED_IN_SETS]
    return bool(odd) or bool(_IN_SETS_ALONE.search(re.sub(r"\\.", "", inside, flags=re.DOTALL)))


def _find_recursive_quantifier(pattern: str) -> str | None:
    """The first quantifier of a group that Java follows by recursion, which a long line overflows."""
    pairs = pairwise(one[0] for one in _PARTS.finditer(pattern))
    return next((after for one, after in pairs if one == ")" and _REPEATED.fullmatch(after)), None)


def find_format_problems(stream: Stream) -> list[str]:
    """The faults of a stream's format, and of fields that the format cannot have, in sentences."""
    value = stream.value
    if isinstance(value, Csv):
        return _find_csv_problems(value) + _find_path_problems(stream, set(value.columns), "column")
    if isinstance(value, Lines):
        found = _find_pattern_problems(value)
        return found or _find_path_problems(
            stream, set(re.compile(to_python_pattern(value.pattern)).groupindex), "group"
        )
    if isinstance(value, Raw):
        return _find_raw_problems(stream)
    if isinstance(value, Avro):
        return _find_avro_problems(value.schema, "value", records_alone=True)
    return _find_protobuf_problems(value, "value") if isinstance(value, Protobuf) else []


_KEY_SIZES = (4, 8)


def find_key_format_problems(stream: Stream) -> list[str]:
    """The faults of a stream's key format, and of fields that it cannot have, in sentences."""
    declared, found = stream.key_format, list[str]()
    if isinstance(declared, BigEndian) and declared.size not in _KEY_SIZES:
        sizes = " or ".join(map(str, _KEY_SIZES))
        found.append(f"key_format: an integer has {sizes} bytes, and size is {declared.size!r}")
    if isinstance(declared, Avro):
        found += _find_avro_problems(declared.schema, "key_format", records_alone=False)
    if isinstance(declared, Protobuf):
        found += _find_protobuf_problems(declared, "key_format")
    found += _find_key_source_problems(stream)
    return found or find_key_comparison_problems(stream)


def _find_key_source_problems(stream: Stream) -> list[str]:
    """The faults of fields that are taken from the record's key, in sentences."""
    found, declared = [], stream.key_format
    for field in stream.fields:
        paths = [one.path for one in field.sources if isinstance(one, Key)] if field.expression is None else []
        if isinstance(declared, Raw) and paths and field.type != "binary":
            found.append(f"field {field.name!r}: a key that is not parsed is bytes: it is of type binary")
        if isinstance(declared, Text | BigEndian | Raw):
            found += [
                f"field {field.name!r}: Key({path!r}) is a member of a key that is an object or a record, and the "
                f"stream declares key_format={type(declared).__name__}(): declare Json(), Avro() or Protobuf()"
                for path in paths
                if path
            ]
    return found


def _find_csv_problems(value: Csv) -> list[str]:
    found = [] if value.columns else ["value: a line of separated values has one column at least"]
    if len({*value.columns}) < len(value.columns):
        found.append("value: a column is named twice")
    if len(value.delimiter) != 1 or len(value.quote) != 1 or value.delimiter == value.quote:
        found.append("value: delimiter and quote are one character each, and not the same")
    elif {value.delimiter, value.quote} & set("\r\n\\\ue001"):
        found.append("value: delimiter and quote can be neither a line break nor a backslash")
    return found


def _find_pattern_problems(value: Lines) -> list[str]:
    if (unshared := _find_unshared_part(value.pattern)) is not None:
        return [f"value: the pattern has {unshared!r}, which Python and Java do not both read"]
    if (repeated := _find_recursive_quantifier(value.pattern)) is not None:
        possessive = repeated.rstrip("?") + "+"
        return [f"value: the pattern repeats a group by {repeated!r}: write {possessive!r}, which takes all it can"]
    try:
        compiled = re.compile(to_python_pattern(value.pattern), re.ASCII)
    except re.error as error:
        return [f"value: the pattern cannot be read: {error}"]
    if not compiled.groupindex:
        return ["value: the pattern names no group: write (?P<name>...)"]
    odd = [name for name in compiled.groupindex if not _GROUP.fullmatch(name)]
    return [
        f"value: the group {name!r} must be a letter, then letters and digits: Java reads no others" for name in odd
    ]


def _find_path_problems(stream: Stream, names: set[str], what: str) -> list[str]:
    found = []
    for declared in stream.fields:
        for source in declared.sources if declared.expression is None else ():
            if isinstance(source, tuple) and (len(source) > 1 or source[0] not in names):
                path = ".".join(source)
                found.append(
                    f"field {declared.name!r}: there is no {what} {path!r}; there are {', '.join(sorted(names))}"
                )
        if declared.members:
            found.append(f"field {declared.name!r}: a line has no {declared.type}")
    return found


def _find_raw_problems(stream: Stream) -> list[str]:
    paths = [(one, source) for one in stream.fields if one.expression is None for source in one.sources]
    return [
        f"field {one.name!r}: of a value that is not parsed there is only 'value', as string or binary"
        for one, source in paths
        if isinstance(source, tuple) and (source != ("value",) or one.type not in {"string", "binary"})
    ]


def _find_avro_problems(schema: str | None, name: str, *, records_alone: bool) -> list[str]:
    if schema is None:
        return []
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException

    try:
        parsed = parse_schema(json.loads(schema))
    except (SchemaParseException, ValueError, KeyError, TypeError) as error:
        return [f"{name}: this is no Avro schema: {error}"]
    is_record = isinstance(parsed, dict) and parsed.get("type") == "record"
    return [] if is_record or not records_alone else [f"{name}: the Avro schema is no record"]


def _find_protobuf_problems(value: Protobuf, name: str) -> list[str]:
    if value.descriptors is None:
        return []
    if not value.message:
        return [f"{name}: name the message of the descriptors"]
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError

    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(base64.b64decode(value.descriptors, validate=True)).file:
            pool.Add(file)
        pool.FindMessageTypeByName(value.message)
    except (DecodeError, binascii.Error, TypeError, ValueError) as error:
        return [f"{name}: descriptors is no FileDescriptorSet in base64 with all imports: {error}"]
    except KeyError:
        return [f"{name}: the descriptors have no message {value.message!r}"]
    return []
