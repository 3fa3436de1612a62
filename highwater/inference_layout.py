"""The columns of sampled records before they have names, and what the envelope says of their roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from highwater.declaration import Field
from highwater.errors import ConfigurationError
from highwater.formats import Csv, Lines, Raw
from highwater.inference_fields import FormatHints, TypeGuesser, collect_statistics, select_leaves
from highwater.inference_formats import (
    RecognisedFormat,
    ValueEnvelope,
    decode_text,
    recognise_envelope,
    recognise_header_envelope,
)
from highwater.inference_keys import RecordKey, build_key_draft
from highwater.inference_names import ColumnDraft, Path, is_writable, without_unwritable
from highwater.inference_schemas import build_tree, connect_tree, merge_fields
from highwater.schemas import KEY_HEADER, VALUE_HEADER
from highwater.second_reader import KafkaRecord
from highwater.sources import Header

_CHANGE = frozenset({"op", "source", "before", "after"})
# Attributes of CloudEvents that a record's headers have.
_CLOUD_HEADERS = ("id", "source", "type", "subject", "time")
_CLOUD_OPTIONAL = frozenset({"subject", "time"})
# Headers whose content the pipeline reads itself, or that are the same in each record.
_OWN_HEADERS = frozenset({VALUE_HEADER, KEY_HEADER, "ce_specversion"})


@dataclass
class Layout:
    """The drafts of the columns, and what the envelope says of their roles.

    Args:
        drafts: the columns; of Debezium a row's columns are also looked for in `before`.
        versions: the wanted names of possible versions, best first; empty where the fields' names decide.
        times: likewise of the event time.
        rows: the drafts of a database's row, which has no values in a delete beside its key.
        left_out: paths that no source can name.
        headers: names of headers that no draft is taken from.
        position: the wanted names of file, position and row by which MySQL's log has the change; empty elsewhere.
    """

    drafts: list[ColumnDraft] = field(default_factory=list)
    versions: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    rows: frozenset[str] = frozenset()
    position: tuple[str, ...] = ()
    left_out: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


def infer_layout(
    recognised: RecognisedFormat, records: Sequence[KafkaRecord], keys: Sequence[RecordKey | None] = ()
) -> tuple[Layout, ValueEnvelope]:
    """The columns of the values, and the envelope around them.

    Args:
        recognised: the format of the values.
        records: the sample.
        keys: the records' keys.

    Raises:
        ConfigurationError: a registered schema cannot be read.
    """
    tree, envelope, reasons = _infer_tree(recognised, records)
    layout = Layout()
    if envelope.kind == "debezium" and tree is not None:
        _add_change(layout, tree, envelope.prefix, reasons)
    elif tree is not None:
        top = _find_member(tree, envelope.prefix)
        if top.type != "struct":
            top, envelope = tree, replace(envelope, prefix=())
        _add_leaves(layout, top, envelope.prefix, envelope.prefix, reasons, shorter=envelope.kind == "cloudevents")
    if isinstance(recognised.format, Raw):
        kind = "string" if recognised.documents else "binary"
        layout.drafts.append(ColumnDraft("value", Field("value", kind), (("value",),), "the whole value"))
    _add_headers(layout, records, envelope)
    if envelope.kind.startswith("cloudevents"):
        layout.times = ("time", "ce_time")
    if isinstance(recognised.format, Raw | Lines):
        draft = build_key_draft(keys)
        if draft is not None:
            layout.drafts.append(draft)
    return layout, envelope


def _infer_tree(
    recognised: RecognisedFormat, records: Sequence[KafkaRecord]
) -> tuple[Field | None, ValueEnvelope, Mapping[Path, str]]:
    """The tree of the values' fields, the envelope, and why types were guessed, by path."""
    documents = recognised.documents
    if isinstance(recognised.format, Raw):
        return None, recognise_header_envelope(records), {}
    schema_tree = _build_schema_tree(recognised)
    if not documents:
        is_change_tree = schema_tree is not None and _is_change_tree(schema_tree)
        found = ValueEnvelope("debezium", "Debezium, by the schema: before, after, source and op")
        return schema_tree, found if is_change_tree else recognise_header_envelope(records), {}
    envelope = recognise_envelope(documents, records)
    guesses = TypeGuesser(FormatHints(isinstance(recognised.format, Csv | Lines), envelope.kind == "debezium"))
    guessed = guesses.guess_tree(collect_statistics(documents))
    if envelope.schemas:
        try:
            payload = reduce(merge_fields, [connect_tree(one, "payload") for one in envelope.schemas])
        except ValueError:
            payload = None
        if payload is not None:
            payload = _with_plain_decimals(payload, _find_member(guessed, envelope.prefix))
            is_row = payload.type == "struct"
            return Field("", "struct", of=(replace(payload, nullable=payload.nullable and not is_row),)), envelope, {}
    if schema_tree is not None:
        return _with_plain_decimals(_reconcile_field(schema_tree, guessed), guessed), envelope, {}
    return guessed, envelope, guesses.reasons


def _with_plain_decimals(declared: Field, guessed: Field) -> Field:
    """A field whose decimals are numbers where the documents have numbers, as `decimal.format=NUMERIC` writes them."""
    if declared.unscaled and guessed.type not in {"string", "json"}:
        return replace(declared, unscaled=False)
    if declared.type == "struct":
        seen = {one.name: one for one in guessed.members}
        members = (_with_plain_decimals(one, seen.get(one.name, Field("", "json"))) for one in declared.members)
        return replace(declared, of=tuple(members))
    if declared.members and guessed.members:
        return replace(declared, of=_with_plain_decimals(declared.members[0], guessed.members[0]))
    return declared


def _build_schema_tree(recognised: RecognisedFormat) -> Field | None:
    """The tree of the registered schemas; None without any, or where JSON needs none."""
    if not recognised.schemas:
        return None
    try:
        return build_tree(recognised.schemas, recognised.message)
    except (ValueError, KeyError, TypeError) as error:
        if recognised.documents:
            return None
        raise ConfigurationError(
            f"a schema of the registry cannot be read: {error}",
            found=f"schemas {', '.join(str(one.id) for one in recognised.schemas)}",
            remedy="declare value=Raw(), which stores the bytes, or another format: docs/formats/README.md lists them",
        ) from error


def _reconcile_field(declared: Field, guessed: Field) -> Field:
    """A field of a JSON Schema, corrected by what the documents have."""
    options: dict[str, Any] = {
        "nullable": declared.nullable or guessed.nullable,
        "optional": declared.optional or guessed.optional,
    }
    if declared.type == guessed.type == "struct":
        seen = {one.name: one for one in guessed.members}
        members = [_reconcile_field(one, seen.pop(one.name)) if one.name in seen else one for one in declared.members]
        return replace(declared, of=(*members, *(replace(one, optional=True) for one in seen.values())), **options)
    timed = {"timestamp", "timestamp_ntz", "date"}
    contradicts = declared.type in timed and guessed.type not in {declared.type, "json"}
    # JSON Schema's integers have no largest value.
    contradicts |= declared.type == "long" and guessed.type.startswith("decimal")
    if contradicts or (declared.type == "json" and guessed.type != "json"):
        return replace(guessed, **options)
    return replace(declared, **options)


def _is_change_tree(tree: Field) -> bool:
    names = {one.name: one for one in tree.members}
    return {*names} >= _CHANGE and names["after"].type in {"struct", "string"}


def _find_member(tree: Field, path: Path) -> Field:
    for name in path:
        tree = next((one for one in tree.members if one.name == name), Field(name, "struct"))
    return tree


def _add_leaves(
    layout: Layout, tree: Field, at: Path, prefix: Path, reasons: Mapping[Path, str], *, shorter: bool = False
) -> None:
    """Add the columns of a struct; `shorter` takes the name of an event's data alone if it is free."""
    found = select_leaves(tree, at)
    top = {path[-1].lower() for path, _ in found if len(path) == len(prefix) + 1}
    for path, declared in found:
        below = path[len(prefix) :]
        if shorter and len(below) > 1 and below[0] == "data" and "_".join(below[1:]).lower() not in top:
            below = below[1:]
        if (draft := _build_draft(path, declared, "_".join(below), (path,), reasons)) is None:
            layout.left_out.append(".".join(path))
        else:
            layout.drafts.append(draft)


def _build_draft(
    path: Path, declared: Field, wanted: str, sources: tuple[Path, ...], reasons: Mapping[Path, str]
) -> ColumnDraft | None:
    writable_field = without_unwritable(declared) if is_writable(path) else None
    if writable_field is None:
        return None
    inside = {one[len(path) :]: why for one, why in reasons.items() if one[: len(path)] == path}
    comments = [f"{'.'.join(filter(None, below))}: {why}" if any(below) else why for below, why in inside.items()]
    return ColumnDraft(wanted, writable_field, sources, "; ".join(comments))


def _add_change(layout: Layout, tree: Field, prefix: Path, reasons: Mapping[Path, str]) -> None:
    """Add the columns of a database's row, and of the change: `op`, `lsn` and `source_ts_ms`."""
    whole = _find_member(tree, prefix)
    row, before = _find_member(whole, ("after",)), _find_member(whole, ("before",))
    if row.type == before.type == "struct":
        row = merge_fields(before, row) if not row.members else row
    elif row.type != "struct" and before.type == "struct":
        row = before
    elif row.type == "string":
        _add_documents(layout, whole, prefix, reasons)
    for path, declared in select_leaves(replace(row, optional=False, nullable=False), (*prefix, "after")):
        below = path[len(prefix) + 1 :]
        both = (path, (*prefix, "before", *below))
        if (draft := _build_draft(path, declared, "_".join(below), both, reasons)) is None:
            layout.left_out.append(".".join(path))
        else:
            layout.drafts.append(draft)
    layout.rows = frozenset(one.wanted for one in layout.drafts)
    source = {one.name for one in _find_member(whole, ("source",)).members}
    operation = Field("op", "string")
    layout.drafts.append(
        ColumnDraft(_choose_change_name("op", layout), operation, ((*prefix, "op"),), "what was done: c, u, d or r")
    )
    if "lsn" in source:
        reason = "the position in PostgreSQL's log"
        lsn = Field("lsn", "long", optional=True, nullable=True)
        layout.drafts.append(
            ColumnDraft(_choose_change_name("lsn", layout), lsn, ((*prefix, "source", "lsn"),), reason)
        )
    elif {"file", "pos", "row"} <= source:
        parts = (
            Field("file", "string", optional=True, nullable=True, mask="drop"),
            Field("pos", "long", optional=True, nullable=True),
            Field("row", "integer", optional=True, nullable=True),
        )
        layout.position = tuple(_choose_change_name(one.name, layout) for one in parts)
        for wanted, declared in zip(layout.position, parts, strict=True):
            at = (*prefix, "source", declared.name)
            layout.drafts.append(ColumnDraft(wanted, declared, (at,), "where MySQL's binary log has the change"))
    moment = Field("ts_ms", "timestamp", unit="ms")
    path = (*prefix, "source", "ts_ms")
    layout.drafts.append(
        ColumnDraft(_choose_change_name("source_ts_ms", layout), moment, (path,), "when the database changed")
    )
    layout.versions = (_choose_change_name("lsn", layout), _choose_change_name("source_ts_ms", layout))
    layout.times = layout.versions[1:]


def _add_documents(layout: Layout, whole: Field, prefix: Path, reasons: Mapping[Path, str]) -> None:
    """Add the columns of a change in MongoDB: the document, which is a text in JSON, and the changed fields."""
    parts = [one for one in whole.members if one.name in {"after", "updateDescription"}]
    lenient = tuple(replace(one, optional=True, nullable=True) for one in parts)
    _add_leaves(layout, Field("", "struct", of=lenient), prefix, prefix, reasons)


def _choose_change_name(name: str, layout: Layout) -> str:
    """A name for what the envelope says, that no column of the row has."""
    return f"change_{name}" if name in {one.lower() for one in layout.rows} else name


def _add_headers(layout: Layout, records: Sequence[KafkaRecord], envelope: ValueEnvelope) -> None:
    """Add the columns of CloudEvents' headers, and of all headers where the values are empty."""
    filled = [record for record in records if record.value is not None]
    times = Counter(one for record in filled for one in {name for name, text in record.headers if decode_text(text)})
    names = {name for record in filled for name, _ in record.headers}
    are_events = envelope.kind == "cloudevents headers"
    if are_events:
        for name in _CLOUD_HEADERS:
            kind = "timestamp" if name == "time" else "string"
            declared = Field(name, kind, optional=name in _CLOUD_OPTIONAL)
            layout.drafts.append(
                ColumnDraft(f"ce_{name}", declared, (Header(f"ce_{name}"),), "an attribute of CloudEvents")
            )
    are_empty = not any(record.value for record in filled)
    for name in sorted(names - _OWN_HEADERS - {f"ce_{one}" for one in _CLOUD_HEADERS if are_events}):
        if times[name] and is_writable((name,)) and (are_empty or (are_events and name.startswith("ce_"))):
            declared = Field(name, "string", optional=times[name] < len(filled))
            layout.drafts.append(ColumnDraft(name, declared, (Header(name),), "a header"))
        else:
            layout.headers.append(name)
