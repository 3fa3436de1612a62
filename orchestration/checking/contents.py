"""Events against the records that they were made of, field by field, by parsers that share no code with the pipeline.

What belongs here: the check `events_as_recorded`. What does not: whether raw is what Kafka holds
(`orchestration.checking.completeness`), and which records are events (`orchestration.checking.origin_checks`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from assets.parsing import field_columns
from highwater.envelope import ORIGIN, Origin
from highwater.retention import aged
from orchestration.checking.origin_checks import RECORD, SAMPLES, enveloped, told
from orchestration.checking.verdicts import Verdict
from resources.commit_log import proofs_in
from resources.delta import query, quoted, slice_is_one_of, stream_batches, stream_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger

AS_RECORDED = "events_as_recorded"
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_ORIGIN = ", ".join(ORIGIN)


class _Told(NamedTuple):
    """A field as records tell it, the column that it stands in, its declared type, and whether events always had it."""

    field: str
    column: str
    kind: str
    always: bool


class _Unlike(NamedTuple):
    """An event whose fields are not those of its record."""

    origin: Origin
    fields: Sequence[str]


def events_as_recorded(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, Verdict]:
    """For each slice whether its events have the fields that their records in raw tell.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    raw, events = lake.table(stream.name, "raw"), lake.table(stream.name, "events")
    if raw is None or events is None:
        return dict.fromkeys(keys, Verdict(passed=False, text="there is no table of raw, or none of events"))
    columns = _columns(stream, events)
    found = {}
    gone = {key: count for key, proof in proofs_in(raw, keys).items() if (count := aged(proof))}
    for piece in ledger.get(keys):
        if piece.key in gone:
            text = f"nothing is compared: {gone[piece.key]:,} rows of raw went by their age"
            found[piece.key] = Verdict(passed=True, text=text, numbers={"events": 0, "unlike": 0})
        elif piece.topic == stream.topic:
            found[piece.key] = _judged(*_of_main(raw, events, _held(events, columns, piece), piece))
        elif piece.topic in stream.tier_topics:
            found[piece.key] = _judged(*_of_tier(raw, events, stream, _held(events, columns, piece), piece))
        else:
            found[piece.key] = Verdict(passed=True, text="the origins of other systems' records are not looked up")
    return found


def _judged(events: int, unlike: Sequence[_Unlike]) -> Verdict:
    numbers = {"events": events, "unlike": len(unlike)}
    if not unlike:
        return Verdict(passed=True, text=f"{events:,} events have the fields of their records", numbers=numbers)
    samples = [
        {**told("other fields than the record", one.origin), "fields": ", ".join(one.fields)}
        for one in sorted(unlike)[:SAMPLES]
    ]
    text = f"{len(unlike):,} of {events:,} events have other fields than their records in raw"
    return Verdict(passed=False, text=text, numbers=numbers, samples=samples)


def _of_main(raw: DeltaTable, events: DeltaTable, columns: Sequence[_Told], piece: Slice) -> tuple[int, list[_Unlike]]:
    """How many events of a slice were compared, and those that differ; a batch at a time."""
    mine = {f"{name}_slices": slice_is_one_of([piece.key], f"{name}.slice") for name in "er"}
    sql = _PAIRS.format(chosen=_chosen(columns), **mine)
    compared, unlike = 0, list[_Unlike]()
    for batch in stream_batches({"raw": raw, "events": events}, sql):
        compared += batch.num_rows
        rows = (batch.slice(at, 1).to_pylist()[0] for at in _suspects(columns, batch))
        differing = ((row, _differing(columns, row, row["value"])) for row in rows)
        unlike += [_Unlike(Origin.of_row(row), fields) for row, fields in differing if fields]
    return compared, unlike


_PAIRS = f"""
SELECT {_ORIGIN}, r.value AS value, {{chosen}}
FROM events e JOIN raw r ON e.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE r.value IS NOT NULL AND {{e_slices}} AND {{r_slices}}
"""


def _of_tier(
    raw: DeltaTable, events: DeltaTable, stream: Stream, columns: Sequence[_Told], piece: Slice
) -> tuple[int, list[_Unlike]]:
    """The same of a tier's slice: of several copies of an origin the event is like one at least."""
    mine = f"{slice_is_one_of([piece.key])}"
    read: defaultdict[Origin, list[bytes]] = defaultdict(list)
    for row in stream_rows(raw, f"SELECT {RECORD} FROM t WHERE value IS NOT NULL AND {mine}"):
        origin, *_ = enveloped(stream, piece, row)
        read[origin].append(row["value"])
    compared, unlike = 0, list[_Unlike]()
    for row in query(events, f"SELECT {_ORIGIN}, {_chosen(columns)} FROM t e WHERE {mine}"):
        copies = read[Origin.of_row(row)]
        found = [_differing(columns, row, value) for value in copies]
        compared += 1 if copies else 0
        unlike += [_Unlike(Origin.of_row(row), found[0])] if found and all(found) else []
    return compared, unlike


def _columns(stream: Stream, events: DeltaTable) -> list[_Told]:
    """All that a record tells; a field that was added to the stream counts as soon as the table has it."""
    kinds = {one.name: one.type for one in stream.fields}
    there = {field.name for field in events.schema().fields}
    named = [(one.name, one.name) for one in field_columns(stream) if one.name in there]
    pairs = [*named, (stream.version, "version"), (stream.event_time, "event_time")]
    always = {stream.version, stream.event_time, *stream.key}
    return [_Told(name, column, kinds[name], name in always) for name, column in pairs]


def _held(events: DeltaTable, columns: Sequence[_Told], piece: Slice) -> list[_Told]:
    """The columns in which the events of a slice must have something.

    Every declared field is required, and one declaration decides a whole slice: a field that came to the stream later
    is null in all of its events. What is null in some alone was taken from them.
    """
    counts = ", ".join(f"count({_quoted(one)}) AS c{at}" for at, one in enumerate(columns))
    [filled] = query(events, f"SELECT {counts} FROM t e WHERE {slice_is_one_of([piece.key])}")
    return [one for at, one in enumerate(columns) if one.always or filled[f"c{at}"]]


def _chosen(columns: Sequence[_Told]) -> str:
    return ", ".join(f"{_as_told(one)} AS c{at}" for at, one in enumerate(columns))


def _as_told(one: _Told) -> str:
    """A time as a number: a producer's clock may name a year that Python's times do not know."""
    return f"arrow_cast({_quoted(one)}, 'Int64')" if one.kind == "timestamp" else _quoted(one)


def _quoted(one: _Told) -> str:
    return f"e.{quoted(one.column)}"


def _suspects(columns: Sequence[_Told], batch: pa.RecordBatch) -> list[int]:
    """The rows that are to be looked at one by one: Arrow's parser, five times as fast, calls them different.

    All of them where it cannot read the values: it knows fewer forms of times and numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    every = list(range(batch.num_rows))
    try:
        read = _read(columns, batch["value"].to_pylist())
        if read.num_rows != batch.num_rows:
            return every
        unlike = pa.repeat(pa.scalar(False), batch.num_rows)  # noqa: FBT003 - a value
        for at, one in enumerate(columns):
            ours, theirs = batch[f"c{at}"], read[one.field].combine_chunks()
            if one.kind == "timestamp":
                theirs = pc.cast(pc.cast(theirs, pa.timestamp("us", "UTC")), pa.int64())
            same = pc.fill_null(pc.equal(pc.cast(ours, theirs.type), theirs), fill_value=False)
            unlike = pc.or_(unlike, pc.invert(same))
    except pa.ArrowException:
        return every
    found: list[int] = pc.indices_nonzero(unlike).to_pylist()
    return found


def _read(columns: Sequence[_Told], values: Sequence[bytes]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import json as arrow

    whole = b"\n".join(values)
    kinds = {"string": pa.string(), "timestamp": pa.string(), "boolean": pa.bool_()}
    kinds |= dict.fromkeys(("integer", "long"), pa.int64())
    fields = {one.field: kinds.get(one.kind) or pa.decimal128(*_digits(one.kind)) for one in columns}
    return arrow.read_json(
        BytesIO(whole),
        # In one block: a value must not lie across two.
        arrow.ReadOptions(use_threads=False, block_size=len(whole) + 1),
        arrow.ParseOptions(pa.schema(fields.items()), newlines_in_values=True, unexpected_field_behavior="ignore"),
    )


def _digits(kind: str) -> tuple[int, int]:
    precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
    return int(precision), int(scale)


def _differing(columns: Sequence[_Told], row: Mapping[str, Any], value: bytes) -> list[str]:
    """The fields that an event has otherwise than its record, or has not."""
    try:
        record = json.loads(value, parse_int=_number, parse_float=_number)
    except RecursionError:
        return []  # nested deeper than Python reads, in a field that is ignored: not to be compared
    except ValueError:
        return ["the record is no JSON"]
    if not isinstance(record, dict):
        return ["the record is no JSON object"]
    return [
        one.field
        for at, one in enumerate(columns)
        if row[f"c{at}"] is None or not _equal(one.kind, record.get(one.field), row[f"c{at}"])
    ]


def _number(text: str) -> Decimal | None:
    """A number exactly; None where Python holds none so large. Python's own parser refuses whole numbers that long."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _equal(kind: str, value: Any, told: Any) -> bool:
    if kind == "timestamp":
        try:
            return bool((datetime.fromisoformat(value.upper()) - _BEGIN) // timedelta(microseconds=1) == told)
        except (AttributeError, ValueError):
            return isinstance(value, str)  # Spark reads more forms and years than Python: not to be compared
    # A number of JSON equals a decimal by its value. To Python `true` equals 1.
    return bool(value == told) and isinstance(value, bool) == (kind == "boolean")
