"""Names of inferred columns: legal, distinct, and free of the names that Highwater takes itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from highwater.declaration import Field
from highwater.declaration_parts import RESERVED_COLUMNS, fold_case
from highwater.sources import Header, Key, Meta, Source, format_path

_ILLEGAL = re.compile(r"[^\w@-]+")
# A half of a surrogate pair is in no text that is written to a file.
_UNWRITABLE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')

Path = tuple[str, ...]
From = Path | Key | Header | Meta


@dataclass(frozen=True)
class ColumnDraft:
    """A column before it has its final name.

    Args:
        wanted: the name to take if it is free.
        field: the type and its options; the names in it are those of the values.
        sources: where the value is taken from, the first that is there.
        reason: why the type was chosen; empty where it is plain.
    """

    wanted: str
    field: Field
    sources: tuple[From, ...]
    reason: str = ""

    @property
    def path(self) -> Path:
        """The first path into the value; empty if there is none."""
        return next((one for one in self.sources if isinstance(one, tuple)), ())

    @property
    def shown_source(self) -> str:
        """The source of the value, for a person."""
        return ", else ".join(_format_source(one) for one in self.sources)


def _format_source(one: From) -> str:
    if isinstance(one, tuple):
        return format_path(one)
    if isinstance(one, Key):
        return f"key {one.path}".strip()
    return f"{type(one).__name__.lower()} {one.name}"


def is_writable(path: Iterable[str]) -> bool:
    """Whether a source can name a path: without empty names, quotation marks, backslashes and control characters."""
    return all(step and not _UNWRITABLE.search(step) for step in path)


def build_fields(
    drafts: Sequence[ColumnDraft], *, version: ColumnDraft | None = None, event_time: ColumnDraft | None = None
) -> list[Field]:
    """The fields with their final names.

    Args:
        drafts: the columns.
        version: the one that is the stream's version; beside a version no other column has that name.
        event_time: the one that is the stream's event time, which alone may have that name.
    """
    taken: set[str] = set()
    found = []
    for draft in drafts:
        allowed = {"event_time"} if event_time is draft else set()
        allowed |= {"version"} if version is None or version is draft else set()
        name = choose_free_name(draft.wanted, taken, allowed)
        found.append(_with_sources(replace(draft.field, name=name, of=build_legal_members(draft.field)), draft.sources))
    return found


def _with_sources(field: Field, sources: Sequence[From]) -> Field:
    if tuple(sources) == ((field.name,),):
        return field
    written: list[Source] = [format_path(one) if isinstance(one, tuple) else one for one in sources]
    return replace(field, source=written[0] if len(written) == 1 else tuple(written))


def build_legal_members(field: Field) -> Field | tuple[Field, ...]:
    """The members of a field with legal names, each with its source where the name differs."""
    if isinstance(field.of, Field):
        return replace(field.of, of=build_legal_members(field.of))
    taken: set[str] = set()
    found = []
    for member in field.of:
        name = choose_free_name(member.name, taken, reserved=False)
        found.append(_with_sources(replace(member, name=name, of=build_legal_members(member)), [(member.name,)]))
    return tuple(found)


def choose_free_name(wanted: str, taken: set[str], allowed: Collection[str] = (), *, reserved: bool = True) -> str:
    """A legal name that differs from those that are taken in more than case; it is taken from now on."""
    name = _ILLEGAL.sub("_", wanted).strip("_") if _ILLEGAL.search(wanted) else wanted
    name = name or "field"
    if reserved and fold_case(name) in RESERVED_COLUMNS and name not in allowed:
        name = f"{name}_value"
    number, free = 1, name
    while fold_case(free) in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(fold_case(free))
    return free


def without_unwritable(field: Field) -> Field | None:
    """The field without members that no source can name; None if nothing is left."""
    if not field.members:
        return field
    members = [
        inner for one in field.members if is_writable((one.name,)) and (inner := without_unwritable(one)) is not None
    ]
    if not members:
        return None
    return replace(field, of=members[0] if isinstance(field.of, Field) else tuple(members))
