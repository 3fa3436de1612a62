"""The sources of a field: a path into the value or the key, a header, Kafka's metadata, or a lookup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

# A name between dots, or any text in brackets: `after.id`, `after["user.id"]`.
_STEP = re.compile(r'(?:^|\.)([^.\[\]"\\\s]+)|\["([^"\\\x00-\x1f]+)"\]')


@dataclass(frozen=True)
class Key:
    """The record's key, decoded as `Stream.key_format` says.

    Args:
        path: the path to a member of a key that is an object or a record; empty for the whole key.
    """

    path: str = ""


@dataclass(frozen=True)
class Header:
    """The last header of a name, as text in UTF-8."""

    name: str


@dataclass(frozen=True)
class Meta:
    """Kafka's metadata of the record.

    Args:
        name: `timestamp` is a number in milliseconds since 1970, `partition` and `offset` are numbers, `topic` is text.
    """

    name: Literal["timestamp", "partition", "offset", "topic"]


@dataclass(frozen=True)
class Rest:
    """The members of an object in the value that no other field is taken from, as one object of type `json`.

    It is absent where every member is taken.

    Args:
        within: the path of the object, such as `after`; empty for the value itself.
        taken: the names of the members that other fields are taken from; `highwater.decoding.read_fields` fills it in.
    """

    within: str = ""
    taken: frozenset[str] = field(default=frozenset(), metadata={"internal": True})

    @property
    def path(self) -> tuple[str, ...]:
        """The names on the way to the object, outermost first."""
        return split_path(self.within) if self.within else ()


@dataclass(frozen=True)
class Reference:
    """A column of the row that the stream's lookup finds.

    Args:
        column: the name of the column in the lookup's table.
    """

    column: str


# A text is a path into the value.
Source = str | Key | Header | Meta | Reference | Rest


# What a name may be without brackets.
_PLAIN_STEP = re.compile(r'[^.\[\]"\\\s]+')


def format_path(path: Sequence[str]) -> str:
    """A path as a source is written: the inverse of `split_path`."""
    text = ""
    for step in path:
        plain = _PLAIN_STEP.fullmatch(step)
        text += f'["{step}"]' if plain is None else f".{step}" if text else step
    return text


# A stream has some tens of paths, which are asked for with each record.
@lru_cache(maxsize=10_000)
def split_path(path: str) -> tuple[str, ...]:
    """The names of a path, outermost first.

    Args:
        path: names with dots between them; one with other characters, for example a dot, is in `["..."]`. Names
            with quotation marks, backslashes or control characters cannot be written.

    Raises:
        ValueError: it is no such path.
    """
    found, at = [], 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None or (at == 0 and path.startswith(".")):
            raise ValueError(f'{path!r} is no path: names with dots between them, or ["any text"]')
        found.append(step[1] or step[2])
        at = step.end()
    if not found:
        raise ValueError("a path names one field at least")
    return tuple(found)


def describe_source(source: object) -> str:
    """The place in a record that a field is taken from, for a person."""
    if isinstance(source, tuple):
        return ".".join(source)
    if isinstance(source, Key):
        return f"{source.path} of the record's key" if source.path else "the record's key"
    if isinstance(source, Header):
        return f"header {source.name}"
    return f"the record's {source.name}" if isinstance(source, Meta) else str(source)
