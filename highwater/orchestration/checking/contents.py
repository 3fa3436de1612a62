"""Compares events with their records field by field, with parsers that share no code with the pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.assets.parsing import select_column_fields
from highwater.assets.schema_evolution import build_evolved_stream
from highwater.classifying import build_key, build_version, read_record_key
from highwater.column_comparison import matches_stored
from highwater.declaration import Field
from highwater.decoding import Schemas, decode_record_key, read_fields
from highwater.decoding import decode_value as decode_document
from highwater.envelope import ORIGIN_SQL, Origin
from highwater.formats import Json
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.origin_checks import (
    RECORD,
    build_tombstone_condition,
    describe_sample,
    parse_record_envelope,
)
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import has_column, query, quote_column, slice_is_one_of, stream_batches, stream_rows
from highwater.retention import count_expired_rows
from highwater.second_reader import KafkaRecord, MisfitError, UnreadableError, convert_field

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

AS_RECORDED = "events_as_recorded"


class _EventColumn(NamedTuple):
    """A declared field, the column that it is in, and whether events always had it."""

    declared: Field
    column: str
    always: bool

    @property
    def field(self) -> str:
        """The field's name."""
        return self.declared.name


class _Reader(NamedTuple):
    """The declaration and the schemas by which records are read."""

    stream: Stream
    schemas: Schemas | None


class _DifferentEvent(NamedTuple):
    """An event whose fields are not those of its record."""

    origin: Origin
    fields: Sequence[str]


def check_events_as_recorded(
    ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str], schemas: Schemas | None = None
) -> dict[str, CheckResult]:
    """For each slice whether its events have the fields of their records in raw.

    Args:
        ledger: the plans.
        lake: the tables.
        stream: its declaration.
        keys: the slices.
        schemas: finds the registry's schemas, for formats that need them.

    Raises:
        DependencyUnavailableError: the ledger, the lake or the registry could not be read.
    """
    raw, events = lake.open_stream_table(stream.name, "raw"), lake.open_stream_table(stream.name, "events")
    if raw is None or events is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="there is no table of raw, or none of events"))
    stream = build_evolved_stream(stream, events)
    columns, reader = _select_columns(stream, events), _Reader(stream, schemas)
    found = {}
    gone = {
        key: count
        for key, slice_commit in read_slice_commits(raw, keys).items()
        if (count := count_expired_rows(slice_commit))
    }
    for slice_ in ledger.get(keys):
        if slice_.key in gone:
            text = f"nothing is compared: {gone[slice_.key]:,} rows of raw have expired"
            found[slice_.key] = CheckResult(passed=True, text=text, numbers={"events": 0, "unlike": 0})
        elif slice_.topic == stream.topic:
            found[slice_.key] = _build_result(
                *_compare_main_slice(raw, events, reader, _load_filled_columns(events, columns, slice_), slice_)
            )
        elif slice_.topic in stream.tier_topics:
            found[slice_.key] = _build_result(
                *_compare_tier_slice(raw, events, reader, _load_filled_columns(events, columns, slice_), slice_)
            )
        else:
            found[slice_.key] = CheckResult(passed=True, text="the origins of other systems' records are not looked up")
    return found


def _build_result(events: int, unlike: Sequence[_DifferentEvent]) -> CheckResult:
    numbers = {"events": events, "unlike": len(unlike)}
    if not unlike:
        return CheckResult(passed=True, text=f"{events:,} events have the fields of their records", numbers=numbers)
    samples = [
        {**describe_sample("other fields than the record", one.origin), "fields": ", ".join(one.fields)}
        for one in sorted(unlike)[:SAMPLES]
    ]
    text = f"{len(unlike):,} of {events:,} events have other fields than their records in raw"
    return CheckResult(passed=False, text=text, numbers=numbers, samples=samples)


def _compare_main_slice(
    raw: DeltaTable, events: DeltaTable, reader: _Reader, columns: Sequence[_EventColumn], slice_: Slice
) -> tuple[int, list[_DifferentEvent]]:
    """The number of compared events of a slice, and those that differ; a batch at a time."""
    conditions = {f"{name}_slices": slice_is_one_of([slice_.key], f"{name}.slice") for name in "er"}
    chosen = (
        _build_select_list(columns)
        + _build_version_column(reader.stream)
        + _build_deleted_column(reader.stream, events)
    )
    sql = _PAIRS.format(chosen=chosen, tombstone=build_tombstone_condition(reader.stream, "r.value"), **conditions)
    compared, unlike = 0, list[_DifferentEvent]()
    for batch in stream_batches({"raw": raw, "events": events}, sql):
        compared += batch.num_rows
        rows = (batch.slice(at, 1).to_pylist()[0] for at in _select_candidate_rows(reader.stream, columns, batch))
        differing = ((row, _select_differing_fields(reader, columns, row, _build_record(row))) for row in rows)
        unlike += [_DifferentEvent(Origin.from_row(row), fields) for row, fields in differing if fields]
    return compared, unlike


def _build_record(row: Mapping[str, Any]) -> KafkaRecord:
    """The record of an event, with the event's own origin: a copy on a tier lies elsewhere."""
    headers = [(one["key"], one["value"]) for one in row["headers"] or ()]
    origin = Origin.from_row(row)
    return KafkaRecord(
        row["value"],
        row["record_key"],
        headers,
        origin.topic,
        origin.partition,
        origin.offset,
        row["origin_timestamp_ms"],
    )


_PAIRS = f"""
SELECT {ORIGIN_SQL}, origin_timestamp_ms, r.value AS value, r.key AS record_key, r.headers AS headers, {{chosen}}
FROM events e JOIN raw r ON e.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE NOT ({{tombstone}}) AND {{e_slices}} AND {{r_slices}}
"""


def _compare_tier_slice(
    raw: DeltaTable, events: DeltaTable, reader: _Reader, columns: Sequence[_EventColumn], slice_: Slice
) -> tuple[int, list[_DifferentEvent]]:
    """Compare the events of a tier's slice: of several copies of an origin the event is like one at least."""
    stream, slice_condition = reader.stream, f"{slice_is_one_of([slice_.key])}"
    read: defaultdict[Origin, list[Mapping[str, Any]]] = defaultdict(list)
    for row in stream_rows(
        raw, f"SELECT {RECORD} FROM t WHERE NOT ({build_tombstone_condition(stream)}) AND {slice_condition}"
    ):
        origin, *_ = parse_record_envelope(stream, slice_, row)
        read[origin].append({"value": row["value"], "record_key": row["key"], "headers": row["headers"]})
    compared, unlike = 0, list[_DifferentEvent]()
    chosen = _build_select_list(columns) + _build_version_column(stream) + _build_deleted_column(stream, events)
    sql = f"SELECT {ORIGIN_SQL}, origin_timestamp_ms, {chosen} FROM t e WHERE {slice_condition}"
    for row in query(events, sql):
        copies = read[Origin.from_row(row)]
        found = [_select_differing_fields(reader, columns, row, _build_record({**row, **copy})) for copy in copies]
        compared += 1 if copies else 0
        unlike += [_DifferentEvent(Origin.from_row(row), found[0])] if found and all(found) else []
    return compared, unlike


def _select_columns(stream: Stream, events: DeltaTable) -> list[_EventColumn]:
    """All columns of a record; a field that was added to the stream counts as soon as the table has it."""
    declared = {one.name: one for one in stream.fields} | {one.name: one for one in read_fields(stream)}
    there = {field.name for field in events.schema().fields}
    named = [(one.name, one.name) for one in select_column_fields(stream) if one.name in there]
    roles = [(name, column) for name, column in _select_role_columns(stream) if name is not None]
    # Only Spark computes expressions and lookups.
    pairs = [(name, column) for name, column in [*named, *roles] if declared[name].is_read]
    # A record that deletes has these at least.
    always = stream.required_fields
    return [_EventColumn(declared[name], column, name in always) for name, column in pairs]


def _select_role_columns(stream: Stream) -> list[tuple[str | None, str]]:
    # A version of several fields consists of columns that are compared themselves, where they are stored.
    version = stream.version_fields[0] if len(stream.version_fields) == 1 else None
    return [(version, "version"), (stream.event_time, "event_time")]


def _build_version_column(stream: Stream) -> str:
    """The version in SQL, after others, where it has several fields."""
    return ", e.version AS event_version" if len(stream.version_fields) > 1 else ""


def _build_deleted_column(stream: Stream, events: DeltaTable) -> str:
    """The column `deleted` in SQL, after others; nothing where a stream has none, or has it only since."""
    return ", e.deleted AS deleted" if stream.deletes and has_column(events, "deleted") else ""


def _load_filled_columns(events: DeltaTable, columns: Sequence[_EventColumn], slice_: Slice) -> list[_EventColumn]:
    """The columns in which the events of a slice must have something.

    One declaration decides a whole slice: a field that came to the stream later is null in all of its events. A
    field that records have but only some of the events have was removed from the others.
    """
    counts = ", ".join(f"count({_quote_column(one)}) AS c{at}" for at, one in enumerate(columns))
    [filled] = query(events, f"SELECT {counts} FROM t e WHERE {slice_is_one_of([slice_.key])}")
    return [one for at, one in enumerate(columns) if one.always or filled[f"c{at}"]]


def _build_select_list(columns: Sequence[_EventColumn]) -> str:
    return ", ".join(["e.key AS event_key", *(f"{_format_stored(one)} AS c{at}" for at, one in enumerate(columns))])


def _format_stored(one: _EventColumn) -> str:
    """A time as a number: a producer's clock may name a year that Python's times do not know."""
    is_time = one.declared.type in {"timestamp", "timestamp_ntz"}
    return f"arrow_cast({_quote_column(one)}, 'Int64')" if is_time else _quote_column(one)


def _quote_column(one: _EventColumn) -> str:
    return f"e.{quote_column(one.column)}"


def _select_candidate_rows(stream: Stream, columns: Sequence[_EventColumn], batch: pa.RecordBatch) -> list[int]:
    """The rows that are to be looked at one by one: Arrow's parser, five times as fast, calls them different.

    All of them where it cannot read the values: it knows fewer forms of times and numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    every = list(range(batch.num_rows))
    if stream.value != Json() or stream.deletes or len(stream.version_fields) > 1 or not all(map(_is_plain, columns)):
        return every
    if stream.needs_readable_key:
        return every
    try:
        read = _read(columns, batch["value"].to_pylist())
        if read.num_rows != batch.num_rows:
            return every
        unlike = pa.repeat(pa.scalar(False), batch.num_rows)  # noqa: FBT003 - a value
        for at, one in enumerate(columns):
            ours, theirs = batch[f"c{at}"], read[one.field].combine_chunks()
            if one.declared.type == "timestamp":
                theirs = pc.cast(pc.cast(theirs, pa.timestamp("us", "UTC")), pa.int64())
            same = pc.fill_null(pc.equal(pc.cast(ours, theirs.type), theirs), fill_value=False)
            unlike = pc.or_(unlike, pc.invert(same))
        if not stream.has_record_key:
            unlike = pc.or_(unlike, _compute_key_mask(stream, batch, read))
    except pa.ArrowException:
        return every
    found: list[int] = pc.indices_nonzero(unlike).to_pylist()
    return found


def _compute_key_mask(stream: Stream, batch: pa.RecordBatch, read: pa.Table) -> pa.Array:
    """The events to look at for their key: of a key of one text those that have another one, else all."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(stream.key) != 1 or stream.find_field(stream.key[0]).type != "string":
        return pa.repeat(pa.scalar(bool(stream.key)), batch.num_rows)
    theirs = read[stream.key[0]].combine_chunks()
    return pc.invert(pc.fill_null(pc.equal(pc.cast(batch["event_key"], theirs.type), theirs), fill_value=False))


def _read(columns: Sequence[_EventColumn], values: Sequence[bytes]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import json as arrow

    whole = b"\n".join(values)
    kinds = {"string": pa.string(), "timestamp": pa.string(), "boolean": pa.bool_()}
    kinds |= dict.fromkeys(("integer", "long"), pa.int64())
    types = {one.field: one.declared.type for one in columns}
    fields = {name: kinds.get(kind) or pa.decimal128(*_parse_digits(kind)) for name, kind in types.items()}
    return arrow.read_json(
        BytesIO(whole),
        # In one block: a value must not lie across two.
        arrow.ReadOptions(use_threads=False, block_size=len(whole) + 1),
        arrow.ParseOptions(pa.schema(fields.items()), newlines_in_values=True, unexpected_field_behavior="ignore"),
    )


def _parse_digits(kind: str) -> tuple[int, int]:
    precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
    return int(precision), int(scale)


# Types that Arrow's parser reads as declared.
_PLAIN = frozenset({"string", "timestamp", "boolean", "integer", "long", "decimal"})


def _is_plain(one: _EventColumn) -> bool:
    """Whether a field is a required one of the value's outermost object, of a type that Arrow's parser reads."""
    bare = Field(one.field, one.declared.type, one.declared.one_of, one.declared.at_least)
    return one.declared == bare and one.declared.type.split("(")[0] in _PLAIN


def _select_differing_fields(
    reader: _Reader, columns: Sequence[_EventColumn], row: Mapping[str, Any], record: KafkaRecord
) -> list[str]:
    """The fields that an event has otherwise than its record, or has not."""
    stream = reader.stream
    try:
        document = {} if record.value is None else decode_document(stream.value, record, reader.schemas)
        key = decode_record_key(stream, record, reader.schemas)
    except (RecursionError, UnreadableError):
        return []  # nested deeper than Python reads, in a field that is ignored: not to be compared
    except MisfitError as error:
        return [str(error)]
    deletes = _is_delete(stream, record, document, key, stored=bool(row.get("deleted")))
    # Null in events from before the stream declared deletes.
    found = [] if row.get("deleted") in {None, deletes} else ["deleted"]
    found += _compare_key(stream, row, record, document, key) + _compare_version(stream, row, record, document, key)
    found += _compare_record_key(stream, row, key)
    compared = [
        one if one.always or not deletes else one._replace(declared=_to_lenient_field(one.declared)) for one in columns
    ]
    same_ = (_is_same(one.declared, record, document, key, row[f"c{at}"]) for at, one in enumerate(compared))
    return found + [one.field for one, same in zip(compared, same_, strict=True) if not same]


def _compare_key(
    stream: Stream, row: Mapping[str, Any], record: KafkaRecord, document: dict[str, Any], key: Any
) -> list[str]:
    """`key` if an event has another one than its record's fields give."""
    values = _extract_values(stream, stream.key, record, document, key)
    if values is None or "event_key" not in row:
        return []
    return [] if _has_time_in_key(stream) or build_key(stream, values) == row["event_key"] else ["key"]


def _has_time_in_key(stream: Stream) -> bool:
    """Whether the key has a time: how it is written is the pipeline's."""
    return any(stream.find_field(name).type in {"timestamp", "timestamp_ntz"} for name in stream.key)


def _compare_record_key(stream: Stream, row: Mapping[str, Any], key: Any) -> list[str]:
    """`record key` if it is declared to be the event's, and is another one."""
    if not stream.compares_decoded_keys or stream.record_key != "strict" or _has_time_in_key(stream):
        return []
    return [] if read_record_key(stream, key) == row["event_key"] else ["record key"]


def _compare_version(
    stream: Stream, row: Mapping[str, Any], record: KafkaRecord, document: dict[str, Any], key: Any
) -> list[str]:
    """`version` if that of an event has several fields, and another one than those of its record give."""
    values = _extract_values(stream, stream.version_fields, record, document, key)
    if values is None or "event_version" not in row:
        return []
    return [] if build_version(stream, values) == row["event_version"] else ["version"]


def _extract_values(
    stream: Stream, names: Sequence[str], record: KafkaRecord, document: dict[str, Any], key: Any
) -> dict[str, Any] | None:
    """The fields that a key or a version consists of; None where one is an expression, or is reported by itself."""
    declared = [one for one in read_fields(stream) if one.name in names]
    if len(declared) < len(names):
        return None
    try:
        return {one.name: convert_field(one, record, document, key) for one in declared}
    except (MisfitError, UnreadableError):
        return None


def _is_delete(stream: Stream, record: KafkaRecord, document: dict[str, Any], key: Any, *, stored: bool) -> bool:
    """Whether a record deletes its key, as the stream declares it; by an expression, as it is `stored`."""
    deletes = stream.deletes
    if deletes is None or record.value is None:
        return stream.tombstones_delete
    if deletes.field is None:
        return False
    if stream.find_field(deletes.field).expression is not None:
        return stored
    try:
        [declared] = [one for one in read_fields(stream) if one.name == deletes.field]
        return convert_field(declared, record, document, key) in deletes.values
    except (MisfitError, UnreadableError):
        return False


def _to_lenient_field(declared: Field) -> Field:
    """A field as a record that deletes may have it: absent or null, and without its default."""
    return replace(declared, optional=True, nullable=True, default=None)


def _is_same(declared: Field, record: KafkaRecord, document: dict[str, Any], key: Any, stored: Any) -> bool:
    try:
        return matches_stored(declared, convert_field(declared, record, document, key), stored)
    except UnreadableError:
        return stored is not None  # not to be compared
    except MisfitError:
        return False
