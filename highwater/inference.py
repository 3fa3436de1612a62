"""A stream's declaration inferred from sampled records, with the reason for each choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from highwater.classifying import classify
from highwater.declaration import Answers, Deletes, Field, Stream
from highwater.errors import ConfigurationError
from highwater.formats import Avro, Csv, Json, Lines, Protobuf, Raw
from highwater.inference_fields import Guesses, Hints, leaves, seen_in
from highwater.inference_formats import Envelope, Recognised, Schemas, envelope_of, header_envelope, recognise
from highwater.inference_names import Draft, Path, is_writable, named, writable
from highwater.inference_roles import (
    Choice,
    Evidence,
    KeyChoice,
    choose_event_time,
    choose_key,
    choose_version,
    read_key,
)
from highwater.inference_schemas import connect_tree, merged, tree_of
from highwater.reading import Record
from highwater.schemas import Schema
from highwater.sources import Header, Key

EXAMPLE_LENGTH = 40
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a time without a zone has none
_CHANGE = frozenset({"op", "source"})
# Attributes of CloudEvents that a record's headers have; `time` and `subject` are optional there.
_CLOUD_HEADERS: Mapping[str, str] = {"id": "string", "source": "string", "type": "string", "subject": "string"}


@dataclass(frozen=True)
class Column:
    """A column of the inferred stream, for a person.

    Args:
        field: its declaration.
        source: where its value is taken from.
        seen: how many of the sampled values have it.
        share: the same as a share of those that could be read.
        example: the first value as text, cut short.
        reason: why it has its type; empty where it is plain.
    """

    field: Field
    source: str
    seen: int
    share: float
    example: str
    reason: str


@dataclass(frozen=True)
class Inferred:
    """An inferred stream.

    Args:
        stream: the declaration.
        reasons: one sentence for each choice: `format`, `envelope`, `key`, `version`, `event_time`, `deletes` and
            `record_key`.
        columns: the columns, in their order.
        left_out: paths that no source can name, so that they have no column.
    """

    stream: Stream
    reasons: Mapping[str, str]
    columns: tuple[Column, ...]
    left_out: tuple[str, ...] = ()

    @property
    def field_reasons(self) -> dict[str, str]:
        """Why each field has its type, by its name, where there is something to say."""
        return {one.field.name: one.reason for one in self.columns if one.reason}


@dataclass
class _Layout:
    """The drafts of the columns, and what the envelope says of their roles.

    Args:
        drafts: the columns; of Debezium a row's columns are also looked for in `before`.
        versions: the wanted names of possible versions, best first; empty where the fields' names decide.
        times: likewise of the event time.
        rows: the drafts of a database's row, which has no values in a delete beside its key.
    """

    drafts: list[Draft] = field(default_factory=list)
    versions: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    rows: frozenset[str] = frozenset()
    left_out: list[str] = field(default_factory=list)


def infer(
    topic: str,
    records: Sequence[Record],
    *,
    name: str | None = None,
    schemas: Schemas | None = None,
    compacted: bool = False,
) -> Inferred:
    """Infer a declaration from a sample of a topic.

    Args:
        topic: the topic.
        records: the sample; at least one of them has a value.
        name: the stream's name; made from the topic's if it is left out.
        schemas: finds a schema by its ID or GUID; None without a registry.
        compacted: whether the topic keeps the newest record of each key.

    Raises:
        ConfigurationError: no record has a value, or the values name schemas and no registry is configured.
        DeclarationError: the name, or the topic's, cannot be a stream's.
    """
    filled = [record for record in records if record.value is not None]
    if not filled:
        raise ConfigurationError(
            f"no sampled record of {topic} has a value",
            found=f"{len(records):,} records, all of them tombstones",
            remedy="sample more records with --records, or give the schema with --subject",
        )
    recognised = recognise(filled, schemas)
    layout, envelope = _layout(recognised, filled)
    compacted = compacted or len(filled) < len(records)
    evidence = _evidence(topic, recognised, layout, filled, schemas)
    return _concluded(topic, name or stream_name(topic), recognised, envelope, layout, evidence, compacted=compacted)


def infer_from_schema(topic: str, schema: Schema, *, name: str | None = None) -> Inferred:
    """Infer a declaration from a registered schema alone.

    Raises:
        ConfigurationError: the schema cannot be read, or describes no object.
    """
    formats = {"AVRO": Avro(), "JSON": Json(registry=True), "PROTOBUF": Protobuf()}
    reason = f"the {schema.kind} schema {schema.id} of the registry; no record was sampled"
    recognised = Recognised(formats[schema.kind], reason, (), (schema,))
    layout, envelope = _layout(recognised, ())
    return _concluded(topic, name or stream_name(topic), recognised, envelope, layout, (), compacted=False)


def stream_name(topic: str) -> str:
    """A stream's name made from a topic's."""
    name = re.sub(r"[^a-z0-9]+", "_", topic.lower()).strip("_")
    return name if name[:1].isalpha() else f"topic_{name}".rstrip("_")


def _layout(recognised: Recognised, records: Sequence[Record]) -> tuple[_Layout, Envelope]:
    tree, envelope, reasons = _tree(recognised, records)
    layout = _Layout()
    if envelope.kind == "debezium" and tree is not None:
        _add_change(layout, tree, envelope.prefix, reasons)
    elif tree is not None:
        top = _member(tree, envelope.prefix)
        _add_leaves(layout, top, envelope.prefix, envelope.prefix, reasons, shorter=envelope.kind == "cloudevents")
    if isinstance(recognised.format, Raw):
        kind = "string" if recognised.documents else "binary"
        layout.drafts.append(Draft("value", Field("value", kind), (("value",),), "the whole value"))
    if envelope.kind == "cloudevents headers":
        _add_headers(layout)
    if envelope.kind.startswith("cloudevents"):
        layout.times = ("time", "ce_time")
    if isinstance(recognised.format, Raw | Lines) and any(record.key is not None for record in records):
        all_text = all(one is not None and one.text is not None for one in (read_key(r, None) for r in records))
        if all_text:
            layout.drafts.append(Draft("record_key", Field("", "string"), (Key(),), "the record key as text"))
    return layout, envelope


def _tree(recognised: Recognised, records: Sequence[Record]) -> tuple[Field | None, Envelope, Mapping[Path, str]]:
    """The tree of the values' fields, the envelope, and why types were guessed, by path."""
    documents = recognised.documents
    if isinstance(recognised.format, Raw):
        return None, header_envelope(records), {}
    schema_tree = _schema_tree(recognised)
    if not documents:
        is_change_tree = schema_tree is not None and _is_change_tree(schema_tree)
        found = Envelope("debezium", "Debezium, by the schema: before, after, source and op")
        return schema_tree, found if is_change_tree else header_envelope(records), {}
    envelope = envelope_of(documents, records)
    if envelope.schema is not None:
        try:
            payload = connect_tree(envelope.schema, "payload")
        except ValueError:
            payload = None
        if payload is not None and payload.type == "struct":
            return Field("", "struct", of=(replace(payload, nullable=False),)), envelope, {}
    guesses = Guesses(Hints(isinstance(recognised.format, Csv | Lines), envelope.kind == "debezium"))
    guessed = guesses.tree(seen_in(documents))
    if schema_tree is not None:
        return _reconciled(schema_tree, guessed), envelope, guesses.reasons
    return guessed, envelope, guesses.reasons


def _schema_tree(recognised: Recognised) -> Field | None:
    """The tree of the registered schemas; None without any, or where JSON needs none."""
    if not recognised.schemas:
        return None
    try:
        return tree_of(recognised.schemas, recognised.message)
    except (ValueError, KeyError, TypeError) as error:
        if recognised.documents:
            return None
        raise ConfigurationError(
            f"a schema of the registry cannot be read: {error}",
            found=f"schemas {', '.join(str(one.id) for one in recognised.schemas)}",
            remedy="write the declaration by hand: docs/streams.md lists what it may say",
        ) from error


def _reconciled(declared: Field, guessed: Field) -> Field:
    """A field of a JSON Schema, corrected by what the documents have."""
    options = {
        "nullable": declared.nullable or guessed.nullable,
        "optional": declared.optional or guessed.optional,
    }
    if declared.type == guessed.type == "struct":
        seen = {one.name: one for one in guessed.members}
        members = [_reconciled(one, seen.pop(one.name)) if one.name in seen else one for one in declared.members]
        return replace(declared, of=(*members, *(replace(one, optional=True) for one in seen.values())), **options)
    timed = {"timestamp", "timestamp_ntz", "date"}
    contradicts = declared.type in timed and guessed.type not in {declared.type, "json"}
    if contradicts or (declared.type == "json" and guessed.type != "json"):
        return replace(guessed, **options)
    return replace(declared, **options)


def _is_change_tree(tree: Field) -> bool:
    names = {one.name: one for one in tree.members}
    return {*names} >= _CHANGE | {"before", "after"} and names["after"].type == "struct"


def _member(tree: Field, path: Path) -> Field:
    for name in path:
        tree = next((one for one in tree.members if one.name == name), Field(name, "struct"))
    return tree


def _add_leaves(
    layout: _Layout, tree: Field, at: Path, prefix: Path, reasons: Mapping[Path, str], *, shorter: bool = False
) -> None:
    """Add the columns of a struct; `shorter` takes the name of an event's data alone if it is free."""
    found = leaves(tree, at)
    top = {path[-1].lower() for path, _ in found if len(path) == len(prefix) + 1}
    for path, declared in found:
        below = path[len(prefix) :]
        if shorter and len(below) > 1 and below[0] == "data" and "_".join(below[1:]).lower() not in top:
            below = below[1:]
        if (kept := _draft(path, declared, "_".join(below), (path,), reasons)) is None:
            layout.left_out.append(".".join(path))
        else:
            layout.drafts.append(kept)


def _draft(
    path: Path, declared: Field, wanted: str, sources: tuple[Path, ...], reasons: Mapping[Path, str]
) -> Draft | None:
    kept = writable(declared) if is_writable(path) else None
    return None if kept is None else Draft(wanted, kept, sources, reasons.get(path, ""))


def _add_change(layout: _Layout, tree: Field, prefix: Path, reasons: Mapping[Path, str]) -> None:
    """Add the columns of a database's row, and of the change: `op`, `lsn` and `source_ts_ms`."""
    whole = _member(tree, prefix)
    row, before = _member(whole, ("after",)), _member(whole, ("before",))
    if row.type == before.type == "struct":
        row = merged(before, row) if not row.members else row
    elif row.type != "struct":
        row = before
    for path, declared in leaves(replace(row, optional=False, nullable=False), (*prefix, "after")):
        below = path[len(prefix) + 1 :]
        both = (path, (*prefix, "before", *below))
        if (kept := _draft(path, declared, "_".join(below), both, reasons)) is None:
            layout.left_out.append(".".join(path))
        else:
            layout.drafts.append(kept)
    layout.rows = frozenset(one.wanted for one in layout.drafts)
    source = {one.name for one in _member(whole, ("source",)).members}
    layout.drafts.append(Draft(_apart("op", layout), Field("op", "string"), ((*prefix, "op"),), "what was done: c, u, d, r"))
    if "lsn" in source:
        reason = "the position in PostgreSQL's log"
        lsn = Field("lsn", "long", optional=True, nullable=True)
        layout.drafts.append(Draft(_apart("lsn", layout), lsn, ((*prefix, "source", "lsn"),), reason))
    moment = Field("ts_ms", "timestamp", unit="ms")
    path = (*prefix, "source", "ts_ms")
    layout.drafts.append(Draft(_apart("source_ts_ms", layout), moment, (path,), "when the database changed"))
    layout.versions = (_apart("lsn", layout), _apart("source_ts_ms", layout))
    layout.times = layout.versions[1:]


def _apart(name: str, layout: _Layout) -> str:
    """A name for what the envelope says, that no column of the row has."""
    return f"change_{name}" if name in {one.lower() for one in layout.rows} else name


def _add_headers(layout: _Layout) -> None:
    for name, kind in _CLOUD_HEADERS.items():
        optional = name == "subject"
        declared = Field(name, kind, optional=optional)
        layout.drafts.append(Draft(f"ce_{name}", declared, (Header(f"ce_{name}"),), "an attribute of CloudEvents"))
    moment = Field("time", "timestamp", optional=True)
    layout.drafts.append(Draft("ce_time", moment, (Header("ce_time"),), "an attribute of CloudEvents"))


def _evidence(
    topic: str, recognised: Recognised, layout: _Layout, records: Sequence[Record], schemas: Schemas | None
) -> list[Evidence]:
    """The values of the columns in each record that can be read, by the rules that the pipeline has too."""
    loose = [replace(one, optional=True, nullable=True, default=None) for one in named(layout.drafts)]
    stream = _stream(topic, "sample", recognised, loose)
    found = []
    for record in records:
        outcome = classify(stream, record, schemas or _no_schema)
        if outcome.kind == "event":
            values = tuple(outcome.values.get(one.name) for one in loose)
            found.append(Evidence(record, values, read_key(record, schemas)))
    return found


def _no_schema(_: int | str) -> None:
    """Without a registry no schema is known."""


def _stream(topic: str, name: str, recognised: Recognised, fields: Sequence[Field], **more: Any) -> Stream:
    answers = Answers("", "", "")
    options = {"answers": answers, "record_key": "ignore", **more}
    return Stream(name=name, topic=topic, fields=tuple(fields), value=recognised.format, **options)


def _concluded(
    topic: str,
    name: str,
    recognised: Recognised,
    envelope: Envelope,
    layout: _Layout,
    evidence: Sequence[Evidence],
    *,
    compacted: bool,
) -> Inferred:
    """The declaration, when all that is known of the columns is known."""
    key = choose_key(layout.drafts, evidence, compacted=compacted)
    version = choose_version(layout.drafts, evidence, key, compacted=compacted, preferred=layout.versions)
    tombstones = version.draft is not None and version.draft not in layout.drafts
    if tombstones:
        event_time = Choice(None, "the record's timestamp: a tombstone, which deletes its key, has no other")
    else:
        event_time = choose_event_time(layout.drafts, evidence, preferred=layout.times)
    roles = _Roles.of(layout, key, version, event_time, tombstones=tombstones)
    fields = named(roles.drafts, version=roles.version, event_time=roles.event_time)
    by_draft = dict(zip(roles.drafts, fields, strict=True))
    deletes, deletes_reason = _deletes(envelope, layout, roles, by_draft, compacted=compacted)
    stream = _stream(
        topic,
        name,
        recognised,
        fields,
        key=tuple(by_draft[one].name for one in roles.key),
        version=None if roles.version is None else by_draft[roles.version].name,
        event_time=None if roles.event_time is None else by_draft[roles.event_time].name,
        deletes=deletes,
        record_key=key.record_key if roles.key else "ignore",
        answers=_answers(roles, by_draft),
    )
    reasons = {
        "format": recognised.reason,
        "envelope": envelope.reason,
        "key": key.reason,
        "version": version.reason,
        "event_time": event_time.reason,
        "deletes": deletes_reason,
        "record_key": _record_key_reason(key),
    }
    columns = tuple(
        _column(final, by_draft[final], _values(layout, draft, evidence), len(evidence))
        for draft, final in roles.final.items()
    )
    return Inferred(stream, reasons, columns, tuple(layout.left_out))


@dataclass(frozen=True)
class _Roles:
    """The drafts as they are declared, and those with a role.

    Args:
        final: by each draft the one that is declared, in their order.
        key, version, event_time: those of the declared ones that have the role.
    """

    final: Mapping[Draft, Draft]
    key: tuple[Draft, ...]
    version: Draft | None
    event_time: Draft | None

    @classmethod
    def of(
        cls, layout: _Layout, key: KeyChoice, version: Choice, event_time: Choice, *, tombstones: bool
    ) -> _Roles:
        """The drafts when those with a role cannot be null, and a tombstone's key comes from the record's key."""
        chosen = [one for one in (*key.drafts, version.draft, event_time.draft) if one is not None]
        moved = dict(zip(key.drafts, key.from_record, strict=True)) if tombstones else {}
        added = [one for one in chosen if one not in layout.drafts]
        final: dict[Draft, Draft] = {}
        for draft in (*layout.drafts, *added):
            one = moved.get(draft, draft)
            if draft in chosen:
                one = replace(one, field=replace(one.field, optional=False, nullable=False, default=None))
            elif draft.wanted in layout.rows:
                one = replace(one, sources=one.sources[:1])
            final[draft] = one

        def role(draft: Draft | None) -> Draft | None:
            return None if draft is None else final[draft]

        return cls(final, tuple(final[one] for one in key.drafts), role(version.draft), role(event_time.draft))

    @property
    def drafts(self) -> list[Draft]:
        """The drafts as they are declared, in their order."""
        return [*self.final.values()]


def _deletes(
    envelope: Envelope, layout: _Layout, roles: _Roles, by_draft: Mapping[Draft, Field], *, compacted: bool
) -> tuple[Deletes | None, str]:
    if roles.version is None:
        return None, "none: without a key and a version nothing is deleted"
    if envelope.kind == "debezium":
        op = next(one for one in roles.drafts if one.path[-1:] == ("op",) and one.wanted not in layout.rows)
        return Deletes(field=by_draft[op].name, values=("d",)), "op is d; the tombstone that follows does nothing more"
    flag = next((one for one in roles.drafts if one.path[-1:] == ("__deleted",)), None)
    if flag is not None and flag.field.type in {"string", "boolean"}:
        value = "true" if flag.field.type == "string" else True
        return Deletes(field=by_draft[flag].name, values=(value,)), "__deleted, as Debezium's transform writes it"
    if roles.version not in layout.drafts and all(isinstance(one, Key) for d in roles.key for one in d.sources):
        return Deletes(tombstones=True), "a tombstone deletes its key: key and version come from outside of the value"
    if compacted:
        return None, "none: a tombstone lacks the version, so it is counted and deletes nothing"
    return None, "none: no field says so, and the sample has no tombstones"


def _answers(roles: _Roles, by_draft: Mapping[Draft, Field]) -> Answers:
    key = ", ".join(by_draft[one].name for one in roles.key)
    if roles.version is None:
        order = "No: events are appended, and none replaces another."
        doubles = "A record that is published twice is two events."
    else:
        version = by_draft[roles.version].name
        order = f"Only within a key ({key}): the event with the highest {version} is its state."
        doubles = f"The same {version} with the same content counts once; with other content it is a conflict."
    return Answers(
        does_order_matter=order,
        what_of_doubles=doubles,
        what_on_failure="Malformed and invalid records are parked for a person; nothing is retried.",
    )


def _record_key_reason(key: KeyChoice) -> str:
    if key.record_key == "warn":
        return "checked: it equals the key in all sampled records"
    return "not checked: it is written in another way than the key, or there is none"


def _values(layout: _Layout, draft: Draft, evidence: Sequence[Evidence]) -> list[Any]:
    """The values of a column in the sample."""
    if draft not in layout.drafts:
        return []
    at = layout.drafts.index(draft)
    return [one.values[at] for one in evidence if one.values[at] is not None]


def _column(draft: Draft, declared: Field, values: Sequence[Any], records: int) -> Column:
    example = shortened(shown(declared, values[0])) if values else ""
    return Column(declared, draft.shown_source, len(values), len(values) / records if records else 0.0, example, draft.reason)


def shown(declared: Field, value: Any) -> str:
    """A value of a column as a person reads it."""
    if isinstance(value, int) and declared.type.startswith("timestamp"):
        moment = _EPOCH + timedelta(microseconds=value)
        return moment.isoformat() + ("Z" if declared.type == "timestamp" else "")
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


def shortened(text: str) -> str:
    """A text of at most 40 characters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= EXAMPLE_LENGTH else f"{text[: EXAMPLE_LENGTH - 1]}…"
