"""The keys of sampled records, and the columns that are the stream's key."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from highwater.declaration import Field
from highwater.decoding import Schemas
from highwater.inference_fields import Hints, guessed_scalar, words
from highwater.inference_formats import document_of, text_of
from highwater.inference_names import Draft
from highwater.reading import Record
from highwater.schemas import KEY_HEADER, FramingError, framing_of, self_contained_avro
from highwater.sources import Key

_NO_KEY = frozenset({"float", "double", "binary", "json", "array", "map", "struct"})
# A second delivery of one record in a hundred does not make an ID another field.
_UNIQUE_SHARE = 0.99
_BEST_IDS = ("id", "uuid", "guid", "event_id", "message_id", "eventid", "messageid")

# The column of a key that no field of the value has.
RECORD_KEY = Draft("record_key", Field("", "string"), (Key(),), "the record key as text")


@dataclass(frozen=True)
class RecordKey:
    """A record's key as far as it can be read.

    Args:
        raw: its bytes.
        text: the text of a key that is one; None otherwise.
        members: the values of a key that is an object.
        within: where they are in it, such as `payload`; None if a source cannot read them.
    """

    raw: bytes
    text: str | None = None
    members: Mapping[str, Any] | None = None
    within: str | None = None


@dataclass(frozen=True)
class Evidence:
    """One sampled record with the values of its columns, in the order of the drafts."""

    record: Record
    values: tuple[Any, ...]
    key: RecordKey | None


@dataclass(frozen=True)
class KeyChoice:
    """The chosen key.

    Args:
        drafts: its columns; empty for none.
        reason: why, for a person.
        from_record: the same columns, taken from the record's key; empty if that is not possible.
        record_key: how the record's own key is checked.
    """

    drafts: tuple[Draft, ...]
    reason: str
    from_record: tuple[Draft, ...] = ()
    record_key: Literal["warn", "ignore"] = "ignore"


def read_key(record: Record, schemas: Schemas | None) -> RecordKey | None:
    """A record's key; None without one."""
    if record.key is None:
        return None
    text = text_of(record.key)
    document = document_of(record.key)
    if isinstance(document, Mapping):
        wrapped = {*document} == {"schema", "payload"} and isinstance(document["payload"], Mapping)
        return RecordKey(record.key, text, document["payload"] if wrapped else document, "payload" if wrapped else "")
    if text is not None:
        return RecordKey(record.key, text)
    framed = _framed_key(record, schemas)
    if isinstance(framed, Mapping):
        return RecordKey(record.key, None, framed)
    return RecordKey(record.key, framed if isinstance(framed, str) else None)


def _framed_key(record: Record, schemas: Schemas | None) -> Any:
    """The value of a key with the framing of a registry; None where it is none, or cannot be read."""
    if schemas is None:
        return None
    try:
        framed = framing_of(record.key, record.headers, header=KEY_HEADER)
    except FramingError:
        return None
    name = None if framed is None else framed.guid if framed.schema_id is None else framed.schema_id
    schema = None if name is None else schemas(name)
    if framed is None or schema is None:
        return None
    if schema.kind == "JSON":
        return document_of(framed.payload)
    return _avro_value(self_contained_avro(schema), framed.payload) if schema.kind == "AVRO" else None


def _avro_value(schema: str, payload: bytes) -> Any:
    import fastavro

    try:
        return fastavro.schemaless_reader(io.BytesIO(payload), fastavro.parse_schema(json.loads(schema)), None)
    except (ValueError, EOFError, IndexError, KeyError, TypeError):
        return None


def key_text(value: Any) -> str | None:
    """A value as it is written in a key; None where it cannot be a part of one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value) if isinstance(value, str | int) else None


def is_filled(at: int, evidence: Sequence[Evidence]) -> bool:
    """Whether a column has a value in each record of the sample."""
    return bool(evidence) and all(one.values[at] is not None for one in evidence)


def choose_key(drafts: Sequence[Draft], evidence: Sequence[Evidence], *, compacted: bool) -> KeyChoice:
    """The columns that make the key, from the strongest evidence to the weakest."""
    able = [at for at, one in enumerate(drafts) if _can_be_key(one) and is_filled(at, evidence)]
    keyed = bool(evidence) and all(one.key is not None for one in evidence)
    found = None
    if keyed:
        found = (
            _by_members(drafts, able, evidence)
            or _by_text(drafts, able, evidence)
            or _by_pairing(drafts, able, evidence)
            or (_by_record_key(evidence) if compacted else None)
        )
    found = found or _by_unique_id(drafts, able, evidence)
    if found is not None:
        return found
    reason = "none: no field equals the record key, and no ID is distinct in each record"
    return KeyChoice((), reason if evidence else "none: there is no record to judge by")


def _can_be_key(draft: Draft) -> bool:
    return draft.field.type not in _NO_KEY and not draft.field.type.startswith("timestamp")


def _by_members(drafts: Sequence[Draft], able: Sequence[int], evidence: Sequence[Evidence]) -> KeyChoice | None:
    """A key that is an object: each member is a column of the same name, or becomes one."""
    keys = [one.key.members for one in evidence if one.key is not None and one.key.members is not None]
    if len(keys) < len(evidence) or len({tuple(sorted(one)) for one in keys}) != 1 or not keys[0]:
        return None
    within = evidence[0].key.within if evidence[0].key else None
    chosen, from_record = [], []
    for name in keys[0]:
        values = [one[name] for one in keys]
        if any(key_text(value) is None for value in values):
            return None
        same = [
            at
            for at in able
            if drafts[at].path[-1:] == (name,)
            and all(key_text(one.values[at]) == key_text(v) for one, v in zip(evidence, values, strict=True))
        ]
        field, _ = guessed_scalar("", values, Hints())
        if within is None:
            mine = None
        else:
            mine = Draft(name, field, (Key(f"{within}.{name}" if within else name),), "a member of the record key")
        if not same and (mine is None or not _can_be_key(mine)):
            return None
        best = min(same, key=lambda at: len(drafts[at].path)) if same else None
        draft = mine if best is None else drafts[best]
        if draft is None:
            return None
        chosen.append(draft)
        if mine is not None:
            from_record.append(replace(mine, wanted=draft.wanted))
    complete = tuple(from_record) if len(from_record) == len(chosen) else ()
    names = ", ".join(one.wanted for one in chosen)
    return KeyChoice(tuple(chosen), f"{names}: the record key is an object with the same values", complete)


def _by_text(drafts: Sequence[Draft], able: Sequence[int], evidence: Sequence[Evidence]) -> KeyChoice | None:
    texts = [one.key.text if one.key else None for one in evidence]
    same = [at for at in able if all(key_text(e.values[at]) == t for e, t in zip(evidence, texts, strict=True))]
    if not same:
        return None
    best = min(same, key=lambda at: (len(drafts[at].path), not _is_id(drafts[at].wanted), at))
    draft = drafts[best]
    field = draft.field
    from_key = replace(draft, sources=(Key(),), field=replace(field, text=field.is_number))
    bare = all(one.key is not None and text_of(one.key.raw) == one.key.text for one in evidence)
    return KeyChoice(
        (draft,),
        f"{draft.wanted} equals the record key in all {len(evidence):,} sampled records",
        (from_key,) if bare else (),
        "warn" if bare else "ignore",
    )


def _by_pairing(drafts: Sequence[Draft], able: Sequence[int], evidence: Sequence[Evidence]) -> KeyChoice | None:
    """A column that has one value for each record key, and the other way round."""
    keys = [one.key.raw for one in evidence if one.key is not None]
    distinct = len({*keys})
    if not 1 < distinct < len(keys):
        return None
    for at in sorted(able, key=lambda at: (len(drafts[at].path), at)):
        values = [one.values[at] for one in evidence]
        if len({*values}) == distinct == len({*zip(keys, values, strict=True)}):
            reason = f"{drafts[at].wanted} and the record key always go together: {distinct:,} pairs"
            return KeyChoice((drafts[at],), reason)
    return None


def _by_record_key(evidence: Sequence[Evidence]) -> KeyChoice | None:
    if any(one.key is None or one.key.text is None for one in evidence):
        return None
    reason = "the record key itself, which no field of the value has; the topic is compacted or has tombstones"
    return KeyChoice((RECORD_KEY,), reason, (RECORD_KEY,), "warn")


def _by_unique_id(drafts: Sequence[Draft], able: Sequence[int], evidence: Sequence[Evidence]) -> KeyChoice | None:
    found = []
    for at in able:
        values = [key_text(one.values[at]) for one in evidence]
        if _is_id(drafts[at].wanted) and None not in values and len({*values}) >= _UNIQUE_SHARE * len(values):
            found.append(at)
    if not found:
        return None

    def rank(at: int) -> tuple[bool, int, int]:
        name = drafts[at].wanted.lower()
        best = _BEST_IDS.index(name) if name in _BEST_IDS else len(_BEST_IDS)
        return len(drafts[at].path) > 1, best, at

    draft = drafts[min(found, key=rank)]
    reason = f"{draft.wanted} is distinct in {'each of' if len(evidence) > 1 else ''} {len(evidence):,} records"
    return KeyChoice((draft,), " ".join(reason.split()) + ", and is not the record key")


def _is_id(name: str) -> bool:
    return bool(words(name) & {"id", "uuid", "guid"}) or name.lower().endswith("id")
