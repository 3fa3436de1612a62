"""A stream's declaration inferred from sampled records, with the reason for each choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from highwater.classifying import classify
from highwater.declaration import Answers, Deletes, Field, Stream
from highwater.declaration_parts import fold_case
from highwater.declaration_rules import TAKEN_NAMES
from highwater.decoding import Schemas
from highwater.errors import ConfigurationError, DeclarationError
from highwater.formats import Avro, Format, Json, Protobuf, Text
from highwater.inference_formats import RecognisedFormat, ValueEnvelope, recognise
from highwater.inference_keys import KeyChoice, RecordKeys, SampledRecord, choose_key, recognise_keys
from highwater.inference_layout import Layout, infer_layout
from highwater.inference_names import ColumnDraft, build_fields, choose_free_name
from highwater.inference_roles import ChosenColumn, choose_event_time, choose_log_position, choose_version
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from highwater.sources import Key

EXAMPLE_LENGTH = 40
# A schema that the registry does not know yet is there when it is replicated, or when its producer's owner fixes that.
REGISTRY_TIERS = (timedelta(minutes=5), timedelta(hours=1))
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a time without a zone has none


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
        reasons: one sentence for each choice: `format`, `envelope`, `key`, `version`, `event_time`, `deletes`,
            `record_key`, and `key_format` where keys that are no text are decoded.
        columns: the columns, in their order.
        left_out: paths that no source can name, so that they have no column.
        headers: names of headers that no column is taken from.
    """

    stream: Stream
    reasons: Mapping[str, str]
    columns: tuple[Column, ...]
    left_out: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()

    @property
    def comments(self) -> dict[str, str]:
        """The reasons by the arguments of the stream that they are for."""
        renamed = {"format": "value", "envelope": "fields"}
        plain = {"envelope"} if self.reasons["envelope"].startswith("none") else set()
        reasons = {choice: reason for choice, reason in self.reasons.items() if choice not in plain}
        return {renamed.get(choice, choice): reason for choice, reason in reasons.items()}

    @property
    def field_reasons(self) -> dict[str, str]:
        """The reason for the type of each field, by its name, where there is something to say."""
        return {one.field.name: one.reason for one in self.columns if one.reason}


def infer(
    topic: str,
    records: Sequence[KafkaRecord],
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
    keys = recognise_keys(records, schemas)
    layout, envelope = infer_layout(recognised, filled, [keys.read(record, schemas) for record in filled])
    compacted = compacted or len(filled) < len(records)
    evidence = _collect_evidence(topic, recognised, keys, layout, filled, schemas)
    name = name or build_stream_name(topic)
    return _build_inferred(topic, name, recognised, keys, envelope, layout, evidence, schemas, compacted=compacted)


def infer_from_schema(topic: str, schema: Schema, *, name: str | None = None) -> Inferred:
    """Infer a declaration from a registered schema alone.

    Raises:
        ConfigurationError: the schema cannot be read, or describes no object.
    """
    formats: dict[str, Format] = {"AVRO": Avro(), "JSON": Json(registry=True), "PROTOBUF": Protobuf()}
    if schema.kind not in formats:
        raise ConfigurationError(
            f"schema {schema.id} of the registry has a type that no format reads",
            found=f"type {schema.kind}; read are {', '.join(formats)}",
            remedy="infer from records instead, without --subject; values of an unknown format are declared as Raw()",
        )
    reason = f"the {schema.kind} schema {schema.id} of the registry; no record was sampled"
    recognised = RecognisedFormat(formats[schema.kind], reason, (), (schema,))
    layout, envelope = infer_layout(recognised, ())
    keys = recognise_keys((), None)
    return _build_inferred(
        topic, name or build_stream_name(topic), recognised, keys, envelope, layout, (), None, compacted=False
    )


def build_stream_name(topic: str) -> str:
    """A stream's name made from a topic's."""
    name = re.sub(r"[^a-z0-9]+", "_", topic.lower()).strip("_")
    is_free = name[:1].isalpha() and name not in TAKEN_NAMES
    return name if is_free else f"topic_{name}".rstrip("_")


def _collect_evidence(
    topic: str,
    recognised: RecognisedFormat,
    keys: RecordKeys,
    layout: Layout,
    records: Sequence[KafkaRecord],
    schemas: Schemas | None,
) -> list[SampledRecord]:
    """The values of the columns in each record that can be read, by the rules that the pipeline has too."""
    loose = [replace(one, optional=True, nullable=True, default=None) for one in build_fields(layout.drafts)]
    stream = _build_stream(topic, "sample", recognised, keys, loose)
    found = []
    for record in records:
        outcome = classify(stream, record, schemas)
        if outcome.kind == "event":
            values = tuple(outcome.values.get(one.name) for one in loose)
            found.append(SampledRecord(record, values, keys.read(record, schemas)))
    return found


def _without_messages(layout: Layout, evidence: Sequence[SampledRecord]) -> list[SampledRecord]:
    """The sampled changes of rows: truncates and messages of a log have no row, and are rejects."""
    op = next(at for at, one in enumerate(layout.drafts) if one.path[-1:] == ("op",) and one.wanted not in layout.rows)
    return [one for one in evidence if one.values[op] not in {"t", "m"}]


def _build_stream(
    topic: str, name: str, recognised: RecognisedFormat, keys: RecordKeys, fields: Sequence[Field], **more: Any
) -> Stream:
    """A declaration, with the format of keys where a field is taken from them."""
    options = {"answers": Answers("", "", ""), "record_key": "ignore", **more}
    if any(isinstance(source, Key) for one in fields for source in one.sources):
        options["key_format"] = keys.format
    if any(getattr(one, "registry", False) for one in (recognised.format, options.get("key_format"))):
        options["tiers"] = REGISTRY_TIERS
    return Stream(name=name, topic=topic, fields=tuple(fields), value=recognised.format, **options)


def _build_inferred(
    topic: str,
    name: str,
    recognised: RecognisedFormat,
    keys: RecordKeys,
    envelope: ValueEnvelope,
    layout: Layout,
    evidence: Sequence[SampledRecord],
    schemas: Schemas | None,
    *,
    compacted: bool,
) -> Inferred:
    """The declaration, when all that is known of the columns is known."""
    changes = _without_messages(layout, evidence) if envelope.kind == "debezium" else evidence
    others = len(evidence) - len(changes)
    key = choose_key(layout.drafts, changes, keys.format, compacted=compacted, others=others)
    version = choose_log_position(layout.drafts, key.judged, key, layout.position)
    by_log = version.draft is not None
    if not by_log:
        version = choose_version(layout.drafts, key.judged, key, compacted=compacted, preferred=layout.versions)
    tombstones = version.draft is not None and version.draft not in layout.drafts
    if tombstones:
        event_time = ChosenColumn(None, "the record's timestamp: a tombstone, which deletes its key, has no other")
    else:
        event_time = choose_event_time(layout.drafts, evidence, preferred=layout.times)
    roles = _Roles.from_layout(layout, key, version, event_time, tombstones=tombstones)
    fields = build_fields(roles.drafts, version=roles.version, event_time=roles.event_time)
    by_draft = dict(zip(roles.drafts, fields, strict=True))
    deletes, deletes_reason = _infer_deletes(envelope, layout, roles, by_draft, compacted=compacted)
    stream = _build_stream(
        topic,
        name,
        recognised,
        keys,
        fields,
        key=tuple(by_draft[one].name for one in roles.key),
        version=None if roles.version is None else by_draft[roles.version].name,
        event_time=None if roles.event_time is None else by_draft[roles.event_time].name,
        deletes=deletes,
        record_key=key.record_key if roles.key else "ignore",
    )
    if by_log:
        stream = _with_log_number(stream, layout, roles, by_draft)
    stream = _with_compared_keys(stream, keys, key.judged, schemas)
    stream = replace(stream, answers=_build_answers(roles, stream.version, by_draft, retries=bool(stream.tiers)))
    reasons = {
        "format": recognised.reason,
        "envelope": envelope.reason,
        "key": key.reason,
        "version": version.reason,
        "event_time": event_time.reason,
        "deletes": deletes_reason,
        "record_key": _explain_record_key(stream),
    }
    if stream.key_format != Text():
        reasons["key_format"] = keys.reason
    columns = tuple(
        _build_column(final, by_draft[final], _select_values(layout, draft, evidence), len(evidence))
        for draft, final in roles.final.items()
    )
    columns += tuple(
        Column(one, str(one.expression), len(evidence), 1.0, "", "the number of the log's file")
        for one in stream.fields
        if one.expression is not None
    )
    return Inferred(stream, reasons, columns, tuple(layout.left_out), tuple(layout.headers))


def _with_compared_keys(
    stream: Stream, keys: RecordKeys, judged: Sequence[SampledRecord], schemas: Schemas | None
) -> Stream:
    """The stream with its records' keys decoded and compared, if each of the sample has the fields of the key."""
    if isinstance(keys.format, Text) or not stream.key or not judged:
        return stream
    try:
        strict = replace(stream, key_format=keys.format, record_key="strict")
    except DeclarationError:
        return stream  # the keys have no members for the fields of the key
    if not strict.compares_decoded_keys or any(_has_other_key(stream, strict, one.record, schemas) for one in judged):
        return stream
    return replace(strict, record_key="warn")


def _has_other_key(stream: Stream, strict: Stream, record: KafkaRecord, schemas: Schemas | None) -> bool:
    """Whether a record is a reject only where its key is compared."""
    is_rejected = classify(strict, record, schemas).kind == "reject"
    return is_rejected and classify(stream, record, schemas).kind != "reject"


def _with_log_number(stream: Stream, layout: Layout, roles: _Roles, by_draft: Mapping[ColumnDraft, Field]) -> Stream:
    """The stream with the number of MySQL's log as the first part of its version."""
    names = {one.wanted: by_draft[one].name for one in roles.drafts}
    file, pos, row = (names[one] for one in layout.position)
    name = choose_free_name("log", {fold_case(one.name) for one in stream.fields})
    number = Field(name, "integer", expression=f"try_cast(substring_index(`{file}`, '.', -1) AS INT)")
    read = [replace(one, optional=False, nullable=False) if one.name == row else one for one in stream.fields]
    return replace(stream, fields=(*read, number), version=(name, pos, row))


@dataclass(frozen=True)
class _Roles:
    """The drafts as they are declared, and those with a role.

    Args:
        final: by each draft the one that is declared, in their order.
        key, version, event_time: those of the declared ones that have the role.
    """

    final: Mapping[ColumnDraft, ColumnDraft]
    key: tuple[ColumnDraft, ...]
    version: ColumnDraft | None
    event_time: ColumnDraft | None

    @classmethod
    def from_layout(
        cls, layout: Layout, key: KeyChoice, version: ChosenColumn, event_time: ChosenColumn, *, tombstones: bool
    ) -> _Roles:
        """The drafts when those with a role cannot be null, and a tombstone's key comes from the record's key."""
        chosen = [one for one in (*key.drafts, version.draft, event_time.draft) if one is not None]
        moved = dict(zip(key.drafts, key.from_record, strict=True)) if tombstones else {}
        added = [one for one in chosen if one not in layout.drafts]
        final: dict[ColumnDraft, ColumnDraft] = {}
        for draft in (*layout.drafts, *added):
            one = moved.get(draft, draft)
            if draft in chosen:
                one = replace(one, field=replace(one.field, optional=False, nullable=False, default=None))
            elif draft.wanted in layout.rows:
                one = replace(one, sources=one.sources[:1])
            final[draft] = one

        def find_final(draft: ColumnDraft | None) -> ColumnDraft | None:
            return None if draft is None else final[draft]

        return cls(
            final, tuple(final[one] for one in key.drafts), find_final(version.draft), find_final(event_time.draft)
        )

    @property
    def drafts(self) -> list[ColumnDraft]:
        """The drafts as they are declared, in their order."""
        return [*self.final.values()]


def _infer_deletes(
    envelope: ValueEnvelope, layout: Layout, roles: _Roles, by_draft: Mapping[ColumnDraft, Field], *, compacted: bool
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


def _build_answers(
    roles: _Roles, version: str | tuple[str, ...] | None, by_draft: Mapping[ColumnDraft, Field], *, retries: bool
) -> Answers:
    key = ", ".join(by_draft[one].name for one in roles.key)
    if version is None:
        order = "No: events are appended, and none replaces another."
        doubles = "A record that is published twice is two events."
    else:
        version = version if isinstance(version, str) else f"({', '.join(version)})"
        order = f"Only within a key ({key}): the event with the highest {version} is its state."
        doubles = f"The same {version} with the same content counts once; other content is a conflict."
    retried = "one whose schema is unknown is retried" if retries else "nothing is retried"
    return Answers(
        does_order_matter=order,
        what_about_duplicates=doubles,
        what_on_failure=f"Malformed and invalid records are parked for a person; {retried}.",
    )


def _explain_record_key(stream: Stream) -> str:
    if stream.record_key == "warn":
        return "checked: it equals the key in the sampled records"
    return "not checked: it is written in another way than the key, or there is none"


def _select_values(layout: Layout, draft: ColumnDraft, evidence: Sequence[SampledRecord]) -> list[Any]:
    """The values of a column in the sample."""
    if draft not in layout.drafts:
        return []
    at = layout.drafts.index(draft)
    return [one.values[at] for one in evidence if one.values[at] is not None]


def _build_column(draft: ColumnDraft, declared: Field, values: Sequence[Any], records: int) -> Column:
    example = shorten_text(format_value(declared, values[0])) if values else ""
    share = len(values) / records if records else 0.0
    return Column(declared, draft.shown_source, len(values), share, example, draft.reason)


def format_value(declared: Field, value: Any) -> str:
    """A value of a column as a person reads it."""
    shown = _to_shown(declared, value)
    if isinstance(shown, dict | list | bool) and declared.type != "boolean":
        return json.dumps(shown, ensure_ascii=False, default=str)
    return str(value) if isinstance(value, Decimal) else str(shown)


def _to_shown(declared: Field | None, value: Any) -> Any:
    """A value whose parts a person can read: times as text, bytes in hexadecimal, numbers of JSON as numbers."""
    kind, inner = ("json", ()) if declared is None else (declared.type, declared.members)
    if isinstance(value, dict):
        parts = {one.name: one for one in inner} if kind == "struct" else dict.fromkeys(value, next(iter(inner), None))
        return {name: _to_shown(parts.get(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_shown(next(iter(inner), None), one) for one in value]
    if isinstance(value, int) and kind.startswith("timestamp"):
        return (_EPOCH + timedelta(microseconds=value)).isoformat() + ("Z" if kind == "timestamp" else "")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return f"0x{value.hex()}" if isinstance(value, bytes) else value


def shorten_text(text: str) -> str:
    """A text of at most 40 characters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= EXAMPLE_LENGTH else f"{text[: EXAMPLE_LENGTH - 1]}…"
