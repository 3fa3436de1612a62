"""Writes a declaration as the text of a stream file, in the format that `ruff format` keeps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date, timedelta
from enum import Enum
from typing import Any

from highwater import declaration
from highwater.declaration import Stream

LINE_LENGTH = 120
_INDENT = "    "
# Positional arguments, by class.
_POSITIONAL: Mapping[str, tuple[str, ...]] = {
    "Field": ("name", "type"),
    "Key": ("path",),
    "Header": ("name",),
    "Meta": ("name",),
    "Reference": ("column",),
    "BigEndian": ("size",),
    "Lines": ("pattern",),
}


@dataclass(frozen=True)
class _Node:
    """A node of source: an opening, parts separated by commas, and a closing; or plain text.

    Args:
        text: the text before the parts.
        parts: the parts, each with the comments above it.
        end: the text after them; empty for plain text.
        single: whether it is a tuple, which needs a comma after its only part.
    """

    text: str
    parts: tuple[tuple[tuple[str, ...], _Node], ...] = ()
    end: str = ""
    single: bool = False

    def format_on_one_line(self) -> str | None:
        """The source on one line; None if a comment needs its own line."""
        if not self.end:
            return self.text
        inner = [part.format_on_one_line() for comments, part in self.parts if not comments]
        if len(inner) < len(self.parts) or None in inner:
            return None
        comma = "," if self.single and len(inner) == 1 else ""
        return f"{self.text}{', '.join(one for one in inner if one is not None)}{comma}{self.end}"

    def format_lines(self, indent: str, *, behind: int = 0) -> list[str]:
        """The source as lines, with `behind` characters left free on the last one."""
        flat = self.format_on_one_line()
        if flat is not None and (not self.end or len(indent) + len(flat) + behind <= LINE_LENGTH):
            return [indent + flat]
        deeper = indent + _INDENT
        found = [indent + self.text]
        for comments, part in self.parts:
            found += [line for comment in comments for line in _format_comment(comment, deeper)]
            lines = part.format_lines(deeper, behind=1)
            found += [*lines[:-1], lines[-1] + ","]
        return [*found, indent + self.end]

    def with_prefix(self, text: str) -> _Node:
        """The source with a text before it, such as an argument's name."""
        return _Node(text + self.text, self.parts, self.end, self.single)


def to_source(
    stream: Stream,
    *,
    summary: str = "",
    comments: Mapping[str, str] | None = None,
    field_comments: Mapping[str, str] | None = None,
) -> str:
    """The text of a module that declares the stream.

    Args:
        stream: the declaration.
        summary: the module's docstring; one sentence.
        comments: comments above arguments of the stream, by their names.
        field_comments: comments above fields, by their names.
    """
    source = _Source(dict(comments or {}), dict(field_comments or {}))
    body = source.call(stream).with_prefix("STREAM = ").format_lines("")
    head = _to_printable(summary).strip() or f"The stream {stream.name} of the topic {stream.topic}."
    head = head.replace("\\", "/").replace('"', "'")
    docstring = f'"""{textwrap.shorten(head, LINE_LENGTH - 6, placeholder=" …")}"""'
    return "\n".join([docstring, "", *source.format_imports(), "", *body, ""])


def _to_printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)


def _format_comment(text: str, indent: str) -> list[str]:
    width = LINE_LENGTH - len(indent) - 2
    return [f"{indent}# {line}" for line in textwrap.wrap(_to_printable(text), width, break_on_hyphens=False)]


class _Source:
    """Turns values into source, and remembers what has to be imported."""

    def __init__(self, comments: Mapping[str, str], field_comments: Mapping[str, str]) -> None:
        self._comments = comments
        self._field_comments = field_comments
        self._used: dict[str, set[str]] = {}

    def format_imports(self) -> list[str]:
        """The import lines: the standard library first, then ours."""
        standard = [_import(module, self._used[module]) for module in sorted(self._used) if "." not in module]
        ours = [_import(module, self._used[module]) for module in sorted(self._used) if "." in module]
        flat = [line for lines in ours for line in lines]
        return [*(line for lines in standard for line in lines), *([""] if standard else []), *flat]

    def call(self, value: Any) -> _Node:
        """The construction of a dataclass, without arguments that have their defaults."""
        kind = type(value)
        self._use(kind.__module__, kind.__name__)
        parts = []
        for one in fields(value):
            given = getattr(value, one.name)
            if _is_default(one, given):
                continue
            is_stream = isinstance(value, Stream)
            node = self._build_fields_node(given) if is_stream and one.name == "fields" else self.build_node(given)
            positional = one.name in _POSITIONAL.get(kind.__name__, ())
            parts.append((one.name, node if positional else node.with_prefix(f"{one.name}=")))
        comments = self._group_comments([name for name, _ in parts]) if isinstance(value, Stream) else {}
        commented = tuple((tuple(comments.get(name, ())), part) for name, part in parts)
        return _Node(f"{kind.__name__}(", commented, ")")

    def _group_comments(self, written: Sequence[str]) -> dict[str, list[str]]:
        """The comments by the argument below them: the comment of an omitted argument moves to the next one."""
        order = [one.name for one in fields(Stream)]
        found: dict[str, list[str]] = {}
        for name in sorted(self._comments, key=order.index):
            if not self._comments[name].strip():
                continue
            above = next((one for one in order[order.index(name) :] if one in written), written[-1])
            text = self._comments[name] if above == name else f"{name}: {self._comments[name]}"
            found.setdefault(above, []).append(text)
        return found

    def _build_fields_node(self, given: Sequence[Any]) -> _Node:
        comments = {name: (text,) for name, text in self._field_comments.items() if text.strip()}
        parts = tuple((comments.get(one.name, ()), self.call(one)) for one in given)
        return _Node("(", parts, ")", single=True)

    def build_node(self, value: Any) -> _Node:
        """A value as source."""
        if isinstance(value, Enum):
            self._use(type(value).__module__, type(value).__name__)
            return _Node(f"{type(value).__name__}.{value.name}")
        if is_dataclass(value):
            return self.call(value)
        if isinstance(value, timedelta):
            return self._build_duration_node(value)
        if isinstance(value, date):
            self._use("datetime", "date")
            return _Node(f"date({value.year}, {value.month}, {value.day})")
        if isinstance(value, str):
            return _Node(quote_literal(value))
        if isinstance(value, tuple):
            return _Node("(", tuple(((), self.build_node(one)) for one in value), ")", single=True)
        if isinstance(value, Mapping):
            parts = tuple(((), self.build_node(v).with_prefix(f"{quote_literal(k)}: ")) for k, v in value.items())
            return _Node("{", parts, "}")
        return _Node(repr(value))

    def _build_duration_node(self, value: timedelta) -> _Node:
        self._use("datetime", "timedelta")
        seconds, micros = value.days * 86_400 + value.seconds, value.microseconds
        if micros:
            return _Node(f"timedelta(seconds={seconds}, microseconds={micros})")
        for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
            if seconds and seconds % size == 0:
                return _Node(f"timedelta({unit}={seconds // size})")
        return _Node(f"timedelta(seconds={seconds})")

    def _use(self, module: str, name: str) -> None:
        # A declaration names one module for a stream and its parts, as the pages do.
        module = declaration.__name__ if name in declaration.__all__ else module
        self._used.setdefault(module, set()).add(name)


def _is_default(one: Any, given: Any) -> bool:
    if one.default is not MISSING:
        return type(one.default) is type(given) and bool(one.default == given)
    return one.default_factory is not MISSING and bool(one.default_factory() == given)


def _import(module: str, names: set[str]) -> list[str]:
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= LINE_LENGTH:
        return [line]
    return [f"from {module} import (", *(f"{_INDENT}{name}," for name in ordered), ")"]


def quote_literal(text: str) -> str:
    """A text as a literal with double quotes, or with single ones where that saves escapes."""
    written = repr(text)
    if written[0] == '"' or '"' in text:
        return written
    return f'"{written[1:-1]}"'
