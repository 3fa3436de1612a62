"""The rules of masked fields: that no other column of events holds the value, and that nothing needs it later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.sources import Header, Key, split_path

if TYPE_CHECKING:
    from highwater.declaration import Field, Stream

# Values whose text is the same to Spark and to the second reader.
_HASHED = frozenset({"string", "integer", "long", "boolean", "date", "time", "decimal"})
_MASKS = ("hash", "drop")


def find_field_mask_problems(declared: Field) -> list[str]:
    """The faults of a field's mask by itself, in sentences."""
    named, kind = f"field {declared.name!r}", declared.type.split("(")[0]
    if declared.mask is not None and declared.mask not in _MASKS:
        return [f"{named}: mask is {declared.mask!r}; it is 'hash', 'drop' or left out"]
    if declared.mask == "hash" and kind not in _HASHED:
        return [f"{named}: mask='hash' is for {', '.join(sorted(_HASHED))}, and this is a {kind}: declare mask='drop'"]
    if any(one.mask is not None for one in declared.members):
        return [f"{named}: mask is for fields of the record, not inside of one: mask the whole field"]
    return []


def find_mask_problems(stream: Stream) -> list[str]:
    """The contradictions between masked fields and the rest of a stream, in sentences."""
    masked = [f for f in stream.fields if f.mask is not None]
    return [problem for one in masked for problem in (*_find_role_problems(stream, one), *_find_copies(stream, one))]


def _find_role_problems(stream: Stream, masked: Field) -> list[str]:
    """The roles that a masked field cannot have."""
    named = f"field {masked.name!r} is masked, so it cannot be"
    roles = {"the key": stream.key, "the version": stream.version_fields, "the event time": (stream.event_time,)}
    found = [
        f"{named} {role}, whose column holds the value: leave out mask; or take {role} from a field with an "
        f"expression over it, such as sha2({masked.name}, 256)"
        for role, names in roles.items()
        if masked.name in names
    ]
    used = {"cluster_by of maintenance": stream.maintenance.cluster_by}
    used["part of metrics"] = (stream.metrics.status, stream.metrics.amount) if stream.metrics else ()
    used["the field of transitions"] = (stream.transitions.field,) if stream.transitions else ()
    return found + [
        f"{named} {role}, which reads events: leave out one of the two"
        for role, names in used.items()
        if masked.name in names
    ]


def _find_copies(stream: Stream, masked: Field) -> list[str]:
    """The fields without a mask that hold the masked part of a record too."""
    places = _list_places(masked)
    return [
        f"field {masked.name!r} is masked, and field {one.name!r} holds its value too: mask that one as well, or give "
        "it a source that leaves the value out"
        for one in stream.fields
        if one.mask is None and any(mine[: len(held)] == held for mine in places for held in _list_places(one))
    ]


def _list_places(declared: Field) -> list[tuple[str, ...]]:
    """The parts of a record that a field is taken from, each as a path that begins with what has it."""
    found = []
    for source in declared.sources if declared.is_read else ():
        if isinstance(source, tuple):
            found.append(("value", *source))
        elif isinstance(source, Key):
            found.append(("key", *(split_path(source.path) if source.path else ())))
        elif isinstance(source, Header):
            found.append(("header", source.name))
    return found
