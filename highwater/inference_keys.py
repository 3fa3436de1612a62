"""The keys of sampled records, and the columns that are the stream's key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from highwater.declaration import Field
from highwater.decoding import Schemas, decode_key
from highwater.formats import Avro, BigEndian, Json, KeyFormat, Protobuf, Text
from highwater.inference_fields import FormatHints, guess_scalar, split_words
from highwater.inference_formats import decode_text, parse_json_document
from highwater.inference_names import ColumnDraft, is_writable
from highwater.schemas import KEY_HEADER, FramingError, parse_framing
from highwater.second_reader import KafkaRecord, MisfitError
from highwater.sources import Key, format_path

_NO_KEY = frozenset({"float", "double", "binary", "json", "array", "map", "struct"})
# A second delivery of one record in a hundred does not make an ID another field.
_UNIQUE_SHARE = 0.99
_BEST_IDS = ("id", "uuid", "guid", "event_id", "message_id", "eventid", "messageid")
# A heartbeat, a test message or a truncate amid the records: so few are rejects, and say nothing of the others.
_ODD_SHARE = 0.02
# Counting integers and times share their first bytes; random bytes do not.
_MAX_FIRST_BYTES = 2
_FRAMED: Mapping[str, KeyFormat] = {"AVRO": Avro(), "JSON": Json(registry=True), "PROTOBUF": Protobuf()}


@dataclass(frozen=True)
class RecordKey:
    """A record's key as far as it can be read.

    Args:
        raw: its bytes.
        value: the value of a key that is a text or a number; None otherwise.
        members: the values of a key that is an object.
        within: where the value or the members are in it, such as `payload`; empty where they are the key itself.
    """

    raw: bytes
    value: Any = None
    members: Mapping[str, Any] | None = None
    within: str = ""

    @property
    def text(self) -> str | None:
        """The value as text; None without one, or where it cannot be a part of a key."""
        return format_key_part(self.value)


@dataclass(frozen=True)
class RecordKeys:
    """The keys of sampled records.

    Args:
        format: their format.
        reason: why, for a person.
    """

    format: KeyFormat
    reason: str

    def read(self, record: KafkaRecord, schemas: Schemas | None) -> RecordKey | None:
        """A record's key; None without one."""
        if record.key is None:
            return None
        if self.format == Text():
            return RecordKey(record.key, decode_text(record.key))
        try:
            found = _to_plain_value(decode_key(self.format, record.key, record, schemas))
        except MisfitError:
            return RecordKey(record.key)
        within = ""
        if isinstance(found, Mapping) and {*found} == {"schema", "payload"}:
            found, within = found["payload"], "payload"
        if isinstance(found, Mapping):
            return RecordKey(record.key, None, found, within)
        return RecordKey(record.key, found, None, within)


@dataclass(frozen=True)
class SampledRecord:
    """One sampled record with the values of its columns, in the order of the drafts."""

    record: KafkaRecord
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
        judged: the records that the choice rests on: all of the sample but a few odd ones.
    """

    drafts: tuple[ColumnDraft, ...]
    reason: str
    from_record: tuple[ColumnDraft, ...] = ()
    record_key: Literal["warn", "ignore"] = "ignore"
    judged: tuple[SampledRecord, ...] = ()


def recognise_keys(records: Sequence[KafkaRecord], schemas: Schemas | None) -> RecordKeys:
    """Find the format of the records' keys: the one that all of them have, or nearly all in JSON or text."""
    keyed = [(record, record.key) for record in records if record.key is not None]
    keys = [key for _, key in keyed]
    if not keys:
        return RecordKeys(Text(), "none: the sampled records have no keys")
    framed = _recognise_framed([record for record, _ in keyed], schemas)
    if framed is not None:
        return framed
    documents = [parse_json_document(key) for key in keys]
    for kind, description in ((dict, "JSON objects"), (str, "texts in JSON, in quotation marks")):
        if _is_nearly_all(sum(isinstance(one, kind) for one in documents), len(keys)):
            return RecordKeys(Json(), description)
    if _is_nearly_all(sum(decode_text(key) is not None for key in keys), len(keys)):
        return RecordKeys(Text(), "text")
    [size, *others] = {len(key) for key in keys}
    if not others and len({key[:1] for key in keys}) <= _MAX_FIRST_BYTES:
        if size == 8:
            return RecordKeys(BigEndian(8), "integers of 8 bytes, as Kafka's LongSerializer writes them")
        if size == 4:
            return RecordKeys(BigEndian(4), "integers of 4 bytes, as Kafka's IntegerSerializer writes them")
    return RecordKeys(Text(), "none that is known: the keys are neither text, integers, JSON nor framed")


def _recognise_framed(records: Sequence[KafkaRecord], schemas: Schemas | None) -> RecordKeys | None:
    """The format of keys whose schemas a registry knows, if all can be read by it."""
    if schemas is None:
        return None
    kinds: Counter[str] = Counter()
    names: set[int | str] = set()
    for record in records:
        try:
            framed = parse_framing(record.key, record.headers, header=KEY_HEADER)
        except FramingError:
            return None
        name = None if framed is None else framed.guid if framed.schema_id is None else framed.schema_id
        schema = None if name is None else schemas(name)
        if schema is None or name is None or schema.kind not in _FRAMED:
            return None
        kinds[schema.kind] += 1
        names.add(name)
    [kind, *others] = kinds
    if others or any(_is_broken(_FRAMED[kind], record, schemas) for record in records):
        return None
    shown = ", ".join(map(str, sorted(names, key=str)))
    return RecordKeys(_FRAMED[kind], f"the keys name schemas of the registry: {kind} {shown}")


def _is_broken(declared: KeyFormat, record: KafkaRecord, schemas: Schemas) -> bool:
    try:
        decode_key(declared, record.key or b"", record, schemas)
    except MisfitError:
        return True
    return False


def _to_plain_value(value: Any) -> Any:
    """A decoded key with numbers as Python's own: whole ones of JSON as int."""
    if isinstance(value, Mapping):
        return {name: _to_plain_value(one) for name, one in value.items()}
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else value


def build_key_draft(keys: Sequence[RecordKey | None]) -> ColumnDraft | None:
    """The column of a key that no field of the value has; None if a record's key cannot be one."""
    found = [one for one in keys if one is not None and one.text is not None]
    if not found or len(found) < len(keys):
        return None
    field = _build_key_field([one.value for one in found])
    return None if field is None else ColumnDraft("record_key", field, (Key(found[0].within),), "the record key")


def _build_key_field(values: Sequence[Any]) -> Field | None:
    """The field for whole keys; None where they are of several types."""
    for kind, name in ((str, "string"), (int, "long")):
        if all(type(one) is kind for one in values):
            return Field("", name)
    return None


def format_key_part(value: Any) -> str | None:
    """A value as it is written in a key; None where it cannot be a part of one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value) if isinstance(value, str | int) else None


def is_filled(at: int, evidence: Sequence[SampledRecord]) -> bool:
    """Whether a column has a value in each record of the sample."""
    return bool(evidence) and all(one.values[at] is not None for one in evidence)


def _is_nearly_all(count: int, total: int) -> bool:
    """Whether all records of a sample have something, but for a few odd ones."""
    return total > 0 and total - count <= _ODD_SHARE * total


def _is_nearly_filled(at: int, evidence: Sequence[SampledRecord]) -> bool:
    """Whether a column has a value in nearly each record of the sample."""
    return _is_nearly_all(sum(one.values[at] is not None for one in evidence), len(evidence))


def choose_key(
    drafts: Sequence[ColumnDraft],
    evidence: Sequence[SampledRecord],
    declared: KeyFormat,
    *,
    compacted: bool,
    others: int = 0,
) -> KeyChoice:
    """The columns that make the key, from the strongest evidence to the weakest.

    Args:
        drafts: the columns.
        evidence: the sample.
        declared: the format of the records' keys.
        compacted: whether the topic keeps the newest record of each key, or has tombstones.
        others: how many records of the sample are none of its evidence.
    """
    keyed, usual = _select_keyed(evidence), _select_usual(drafts, evidence)
    samples = [evidence, *([keyed] if len(keyed) < len(evidence) else []), *([usual] if usual != keyed else [])]
    for choose in (partial(_choose_by_record_keys, declared=declared, compacted=compacted), _choose_by_unique_id):
        for some in samples:
            able = [at for at, one in enumerate(drafts) if _can_be_key(one) and is_filled(at, some)]
            if (found := choose(drafts, able, some)) is not None:
                return _with_odd(found, some, others + len(evidence) - len(some))
    return KeyChoice((), _explain_no_key(drafts, evidence, declared), judged=tuple(evidence))


def _explain_no_key(drafts: Sequence[ColumnDraft], evidence: Sequence[SampledRecord], declared: KeyFormat) -> str:
    """Why a sample has no key: also which columns would be one if all records had a key."""
    if not evidence:
        return "none: there is no record to judge by"
    keyed = [one for one in evidence if _has_key(one)]
    able = [at for at, one in enumerate(drafts) if _can_be_key(one) and is_filled(at, evidence)]
    found = _choose_by_record_keys(drafts, able, keyed, declared=declared, compacted=False)
    if found is None or len(keyed) == len(evidence):
        return "none: no field equals the record key, and no ID is distinct in each record"
    return f"none: {len(evidence) - len(keyed):,} of {len(evidence):,} records have no record key; else {found.reason}"


def _with_odd(found: KeyChoice, judged: Sequence[SampledRecord], odd: int) -> KeyChoice:
    """The choice, with the records that it rests on, and how many others there are."""
    others = f"; {odd:,} of the sample {'is' if odd == 1 else 'are'} of another form" if odd else ""
    return replace(found, reason=found.reason + others, judged=tuple(judged))


def _choose_by_record_keys(
    drafts: Sequence[ColumnDraft],
    able: Sequence[int],
    evidence: Sequence[SampledRecord],
    *,
    declared: KeyFormat,
    compacted: bool,
) -> KeyChoice | None:
    """The columns that the keys of the records show."""
    if not evidence or any(one.key is None for one in evidence):
        return None
    return (
        _choose_by_members(drafts, able, evidence)
        or _choose_by_text(drafts, able, evidence, declared)
        or _choose_by_pairing(drafts, able, evidence)
        or (_choose_by_record_key(evidence, declared) if compacted else None)
    )


def _select_keyed(evidence: Sequence[SampledRecord]) -> list[SampledRecord]:
    """The records without the few that lack a key, or whose key cannot be read, where nearly all have one."""
    keyed = [*evidence]
    for has in (_has_key, _has_readable_key):
        if _is_nearly_all(sum(map(has, evidence)), len(evidence)):
            keyed = [one for one in keyed if has(one)]
    return keyed


def _select_usual(drafts: Sequence[ColumnDraft], evidence: Sequence[SampledRecord]) -> list[SampledRecord]:
    """The keyed records without the few that lack a possible part of a key that nearly all have."""
    keyed = _select_keyed(evidence)
    nearly = [at for at, one in enumerate(drafts) if _can_be_key(one) and _is_nearly_filled(at, keyed)]
    usual = [one for one in keyed if all(one.values[at] is not None for at in nearly)]
    return usual if _is_nearly_all(len(usual), len(evidence)) else keyed


def _has_key(one: SampledRecord) -> bool:
    return one.key is not None


def _has_readable_key(one: SampledRecord) -> bool:
    return one.key is not None and (one.key.value is not None or one.key.members is not None)


def _can_be_key(draft: ColumnDraft) -> bool:
    return draft.field.type not in _NO_KEY and not draft.field.type.startswith("timestamp")


def _choose_by_members(
    drafts: Sequence[ColumnDraft], able: Sequence[int], evidence: Sequence[SampledRecord]
) -> KeyChoice | None:
    """A key that is an object: each member is a column of the same name, or becomes one."""
    keys = [one.key.members for one in evidence if one.key is not None and one.key.members is not None]
    if len(keys) < len(evidence) or len({tuple(sorted(one)) for one in keys}) != 1 or not keys[0]:
        return None
    within = evidence[0].key.within if evidence[0].key else ""
    chosen, from_record = [], []
    for name in keys[0]:
        values = [one[name] for one in keys]
        if any(format_key_part(value) is None for value in values):
            return None
        same = [
            at
            for at in able
            if drafts[at].path[-1:] == (name,)
            and all(
                format_key_part(one.values[at]) == format_key_part(v) for one, v in zip(evidence, values, strict=True)
            )
        ]
        field, _ = guess_scalar("", values, FormatHints())
        if not is_writable((name,)):
            return None
        path = format_path((within, name) if within else (name,))
        key_column = ColumnDraft(name, field, (Key(path),), "a member of the record key")
        if not same and not _can_be_key(key_column):
            return None
        best = min(same, key=lambda at: len(drafts[at].path)) if same else None
        draft = key_column if best is None else drafts[best]
        chosen.append(draft)
        from_record.append(replace(key_column, wanted=draft.wanted))
    names = ", ".join(one.wanted for one in chosen)
    reason = f"{names}: the record key is an object with the same values"
    return KeyChoice(tuple(chosen), reason, tuple(from_record))


def _choose_by_text(
    drafts: Sequence[ColumnDraft], able: Sequence[int], evidence: Sequence[SampledRecord], declared: KeyFormat
) -> KeyChoice | None:
    texts = [one.key.text if one.key else None for one in evidence]
    same = [at for at in able if all(format_key_part(e.values[at]) == t for e, t in zip(evidence, texts, strict=True))]
    if not same:
        return None
    best = min(same, key=lambda at: (len(drafts[at].path), not _is_id(drafts[at].wanted), at))
    draft = drafts[best]
    reason = f"{draft.wanted} equals the record key in all {len(evidence):,} sampled records"
    if declared == Text():
        from_key = replace(draft, sources=(Key(),), field=replace(draft.field, text=draft.field.is_number))
        return KeyChoice((draft,), reason, (from_key,), "warn")
    key_draft = build_key_draft([one.key for one in evidence])
    return KeyChoice((draft,), reason, () if key_draft is None else (replace(key_draft, wanted=draft.wanted),))


def _choose_by_pairing(
    drafts: Sequence[ColumnDraft], able: Sequence[int], evidence: Sequence[SampledRecord]
) -> KeyChoice | None:
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


def _choose_by_record_key(evidence: Sequence[SampledRecord], declared: KeyFormat) -> KeyChoice | None:
    draft = build_key_draft([one.key for one in evidence])
    if draft is None:
        return None
    reason = "the record key itself, which no field of the value has; the topic is compacted or has tombstones"
    return KeyChoice((draft,), reason, (draft,), "warn" if declared == Text() else "ignore")


def _choose_by_unique_id(
    drafts: Sequence[ColumnDraft], able: Sequence[int], evidence: Sequence[SampledRecord]
) -> KeyChoice | None:
    found = []
    for at in able:
        values = [format_key_part(one.values[at]) for one in evidence]
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
    return bool(split_words(name) & {"id", "uuid", "guid"}) or name.lower().endswith("id")
