"""The rules of a stream's value format: that it can be read, and that fields name what it has."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import TYPE_CHECKING

from highwater.formats import Avro, Csv, Lines, Protobuf, Raw

if TYPE_CHECKING:
    from highwater.declaration import Stream

_GROUP = re.compile(r"\(\?P?<([A-Za-z][A-Za-z0-9]*)>")
# What Python and Java read otherwise, or one of them alone.
_UNSHARED = re.compile(r"\(\?P=|\(\?P>|\\[ZzGAKRXhHV]|\(\?\(|\\k<|\(\?[aiLmsux-]*[aLuxU]|\\[pPQE]|&&|\[\[")
# Java follows such a loop by recursion, which a long line overflows: a possessive one it follows in a loop.
_RECURSIVE = re.compile(r"\)(?:\*|\+|\{[0-9]+,[0-9]*\})(?!\+)")


def java_pattern(pattern: str) -> str:
    """A declared pattern in Java's syntax."""
    return pattern.replace("(?P<", "(?<")


def python_pattern(pattern: str) -> str:
    """A declared pattern in Python's syntax."""
    return re.sub(r"\(\?<([A-Za-z])", r"(?P<\1", pattern)


def format_problems(stream: Stream) -> list[str]:
    """What is wrong with the format of a stream, and with fields that it cannot have, in sentences."""
    value = stream.value
    if isinstance(value, Csv):
        return _csv_problems(value) + _named_problems(stream, set(value.columns), "column")
    if isinstance(value, Lines):
        found = _pattern_problems(value)
        return found or _named_problems(stream, set(re.compile(python_pattern(value.pattern)).groupindex), "group")
    if isinstance(value, Raw):
        return _raw_problems(stream)
    if isinstance(value, Avro):
        return _avro_problems(value)
    return _protobuf_problems(value) if isinstance(value, Protobuf) else []


def _csv_problems(value: Csv) -> list[str]:
    found = [] if value.columns else ["value: a line of separated values has one column at least"]
    if len({*value.columns}) < len(value.columns):
        found.append("value: a column is named twice")
    if len(value.delimiter) != 1 or len(value.quote) != 1 or value.delimiter == value.quote:
        found.append("value: delimiter and quote are one character each, and not the same")
    elif {value.delimiter, value.quote} & set("\r\n\\\ue001"):
        found.append("value: delimiter and quote can be neither a line break nor a backslash")
    return found


def _pattern_problems(value: Lines) -> list[str]:
    if unshared := _UNSHARED.search(value.pattern):
        return [f"value: the pattern has {unshared[0]!r}, which Python and Java do not both read"]
    if recursive := _RECURSIVE.search(value.pattern):
        repeated = recursive[0]
        return [f"value: the pattern repeats a group by {repeated!r}: write {repeated + '+'!r}, which takes all it can"]
    try:
        compiled = re.compile(python_pattern(value.pattern))
    except re.error as error:
        return [f"value: the pattern cannot be read: {error}"]
    if not compiled.groupindex:
        return ["value: the pattern names no group: write (?P<name>...)"]
    odd = [name for name in compiled.groupindex if not _GROUP.fullmatch(f"(?P<{name}>")]
    return [
        f"value: the group {name!r} must be a letter, then letters and digits: Java reads no others" for name in odd
    ]


def _named_problems(stream: Stream, names: set[str], what: str) -> list[str]:
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


def _raw_problems(stream: Stream) -> list[str]:
    paths = [(one, source) for one in stream.fields if one.expression is None for source in one.sources]
    return [
        f"field {one.name!r}: of a value that is not parsed there is only 'value', as string or binary"
        for one, source in paths
        if isinstance(source, tuple) and (source != ("value",) or one.type not in {"string", "binary"})
    ]


def _avro_problems(value: Avro) -> list[str]:
    if value.schema is None:
        return []
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException

    try:
        parsed = parse_schema(json.loads(value.schema))
    except (SchemaParseException, ValueError, KeyError, TypeError) as error:
        return [f"value: this is no Avro schema: {error}"]
    is_record = isinstance(parsed, dict) and parsed.get("type") == "record"
    return [] if is_record else ["value: the Avro schema is no record"]


def _protobuf_problems(value: Protobuf) -> list[str]:
    if value.descriptors is None:
        return []
    if not value.message:
        return ["value: name the message of the descriptors"]
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError

    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(base64.b64decode(value.descriptors, validate=True)).file:
            pool.Add(file)
        pool.FindMessageTypeByName(value.message)
    except (DecodeError, binascii.Error, TypeError, ValueError) as error:
        return [f"value: descriptors is no FileDescriptorSet in base64 with all imports: {error}"]
    except KeyError:
        return [f"value: the descriptors have no message {value.message!r}"]
    return []
