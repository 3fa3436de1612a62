"""Records of every format as Python's own libraries write them, with the values that their columns have then."""

from __future__ import annotations

import base64
import csv
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, cached_property
from typing import Any

import fastavro

from highwater.declaration import Stream
from highwater.formats import Avro, BigEndian, Csv, Format, Json, KeyFormat, Lines, Protobuf, Raw, Text
from highwater.protobuf import compile_schema
from highwater.schemas import KEY_HEADER, VALUE_HEADER, Schema
from highwater.second_reader import KafkaRecord
from highwater.sources import Header, Key
from tests.helpers import binary_columns as b
from tests.helpers import encoded_columns as e
from tests.helpers import value_domains as v
from tests.helpers.encoded_columns import Column, Field, allow_nulls, move
from tests.helpers.pipeline_rows import bare

MOMENT_MS = 1_767_225_600_000
Values = dict[str, Any]
Headers = list[tuple[str, bytes | None]]
# Writes the values of columns as they are to be written, and gives headers beside them.
Writer = Callable[[Values, random.Random], tuple[bytes, Headers]]


@dataclass(frozen=True)
class Encoder:
    """What writes the records of a stream.

    Args:
        value: the format of values.
        columns: the columns that come from the value and from headers.
        write: writes them.
        key_format: the format of keys.
        key_columns: the columns that come from the key.
        write_key: writes them.
        schemas: those of the registry.
    """

    value: Format
    columns: Sequence[Column]
    write: Writer
    key_format: KeyFormat = field(default_factory=Text)
    key_columns: Sequence[Column] = ()
    write_key: Writer = lambda *_: (b"k", [])
    schemas: Sequence[Schema] = ()

    @cached_property
    def stream(self) -> Stream:
        fields = [one.field for one in (*self.columns, *self.key_columns)]
        return bare(self.value, *fields, key_format=self.key_format)

    def find_schema(self, number: int | str) -> Schema | None:
        return next((one for one in self.schemas if one.id == number), None)

    def draw(self, at: int, chance: random.Random) -> Values:
        """The values of a record: of the first ones those at the edges."""
        return {
            one.field.name: one.domain.edges[at] if at < len(one.domain.edges) else v.pick(one.domain, chance)
            for one in (*self.columns, *self.key_columns)
        }

    def encode(self, values: Values, offset: int, chance: random.Random) -> KafkaRecord:
        value, headers = self.write(_write_each(self.columns, values), chance)
        key, of_key = self.write_key(_write_each(self.key_columns, values), chance)
        return KafkaRecord(value, key, [*headers, *of_key], "t", 0, offset, MOMENT_MS)

    def store(self, values: Values) -> Values:
        """The values as the columns have them."""
        return {
            one.field.name: None if values[one.field.name] is None else one.stored(values[one.field.name])
            for one in (*self.columns, *self.key_columns)
        }


def _write_each(columns: Sequence[Column], values: Values) -> Values:
    return {
        one.field.name: None if values[one.field.name] is None else one.write(values[one.field.name]) for one in columns
    }


@dataclass(frozen=True)
class _Notation:
    """How a document in JSON is written."""

    is_ascii: bool
    is_plain: bool

    def write(self, value: Any) -> str:
        """A document whose decimals have all their digits."""
        if isinstance(value, Decimal):
            return f"{value:f}" if self.is_plain else str(value)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.write(str(name))}: {self.write(one)}' for name, one in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self.write, value))}]"
        return json.dumps(value, ensure_ascii=self.is_ascii)


Wrapper = Callable[[Values, random.Random], Values]


def write_json(wrap: Wrapper = lambda row, _: row, *, may_lack: bool = True, is_key: bool = False) -> Writer:
    """Writes an object within an envelope, its members in any order.

    Args:
        wrap: the envelope around an object.
        may_lack: whether some members that are null are left out.
        is_key: whether numbers have no exponent, with which those of a key are doubles.
    """

    def write(values: Values, chance: random.Random) -> tuple[bytes, Headers]:
        row = {name: one for name, one in values.items() if one is not None or not may_lack or chance.random() < 0.5}
        unread = {"unread": [Decimal("1E+99"), {"a": None}]} if chance.random() < 0.2 else {}
        members = {name: row[name] for name in chance.sample(list(row), len(row))}
        notation = _Notation(chance.random() < 0.5, is_key or chance.random() < 0.5)
        return notation.write(wrap(members | unread, chance)).encode(), []

    return write


def frame(number: int, write: Writer, *, places: bytes = b"", header: str = VALUE_HEADER) -> Writer:
    """Writes what another writer does with the number of a schema, in front of it or in a header."""

    def write_framed(values: Values, chance: random.Random) -> tuple[bytes, Headers]:
        payload, headers = write(values, chance)
        framing = b"\0" + number.to_bytes(4) + places
        return (framing + payload, headers) if chance.random() < 0.5 else (payload, [*headers, (header, framing)])

    return write_framed


def frame_key(number: int, write: Writer, places: bytes = b"") -> Writer:
    return frame(number, write, places=places, header=KEY_HEADER)


def write_whole(write: Callable[[Any], bytes]) -> Writer:
    """Writes the value of the only column."""
    return lambda values, _: (write(*values.values()), [])


def write_avro(schema: Any, *, whole: bool = False) -> Writer:
    parsed = fastavro.parse_schema(schema)

    def write(values: Values, _: random.Random) -> tuple[bytes, Headers]:
        [value] = values.values() if whole else [values | {"outer": {"inner": {"inside": values.get("inside") or ""}}}]
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, value)
        return out.getvalue(), []

    return write


@cache
def _find_message(text: str) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    for one in FileDescriptorSet.FromString(compile_schema(Schema(0, "PROTOBUF", text))[0]).file:
        pool.Add(one)
    return GetMessageClass(pool.FindMessageTypeByName("shop.All.Row"))


def write_protobuf(text: str) -> Writer:
    def write(values: Values, _: random.Random) -> tuple[bytes, Headers]:
        given = {name: one for name, one in values.items() if one is not None}
        if "inside" in given:
            given["outer"] = {"inner": {"inside": given.pop("inside")}}
        return _find_message(text)(**given).SerializeToString(), []

    return write


def write_csv(values: Values, chance: random.Random) -> tuple[bytes, Headers]:
    out = io.StringIO()
    quoting: Any = chance.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    csv.writer(out, quoting=quoting, lineterminator=chance.choice(("", "\n", "\r\n"))).writerow(values.values())
    return out.getvalue().encode(), []


SEPARATOR = "\xa6"


def write_line(values: Values, chance: random.Random) -> tuple[bytes, Headers]:
    return (SEPARATOR.join(one or "" for one in values.values()) + chance.choice(("", "\n"))).encode(), []


def write_in_headers(write: Writer) -> Writer:
    """Writes columns whose names begin with `ce_` as headers, and others as another writer does."""

    def write_both(values: Values, chance: random.Random) -> tuple[bytes, Headers]:
        headers = [(name, one.encode()) for name, one in values.items() if name.startswith("ce_")]
        value, _ = write({name: one for name, one in values.items() if not name.startswith("ce_")}, chance)
        return value, [("ce_id", b"first"), *headers, ("more", b"\xff"), ("empty", None)]

    return write_both


def _below(path: str, columns: Sequence[Column]) -> list[Column]:
    return [move(one, f"{path}.{one.field.name}") for one in columns]


def _of_key(columns: Sequence[Column]) -> list[Column]:
    """Columns of members of the key, which are not those of the value."""
    renamed = [replace(one, field=replace(one.field, name=f"key_{one.field.name}")) for one in columns]
    return [move(one, Key(one.field.name)) for one in renamed]


def _of_whole_key(column: Column, **declared: Any) -> list[Column]:
    return [move(replace(column, field=replace(column.field, name="key_whole", **declared)), Key())]


def _in_header(column: Column) -> Column:
    name = f"ce_{column.field.name}"
    return move(replace(column, field=replace(column.field, name=name)), Header(name))


def _declared(name: str, columns: Sequence[Column]) -> list[Column]:
    return [one for one in columns if one.field.name in name.split()]


JSON_COLUMNS = allow_nulls(e.PLAIN, optional=True, nullable=True)
AVRO_COLUMNS = allow_nulls(b.AVRO_PLAIN, nullable=True)
FRAMED_JSON = [*_declared("string long money moment binary json", e.PLAIN), *e.ODD]
FRAMED_AVRO = [*(one for one in b.AVRO_PLAIN if one.kind != "string"), *b.AVRO_ODD]
AVRO_SCHEMA = b.build_avro_schema("Row", AVRO_COLUMNS)
FRAMED_AVRO_SCHEMA = b.build_avro_schema("Row", FRAMED_AVRO)
AVRO_KEY = _of_key(_declared("string long flag double money typed_date typed_micros local bytes", b.AVRO_PLAIN))
AVRO_KEY_SCHEMA = b.build_avro_schema("Key", AVRO_KEY)
FRAMED_PROTOBUF = [*_declared("string long_sint64 fixed64 bytes typed more", b.PROTOBUF_PLAIN), *b.PROTOBUF_ODD]
PROTOBUF_KEY = _of_key(_declared("string flag long_int64 uint64 double date enum typed", b.PROTOBUF_PLAIN))
PROTOBUF_TEXTS = [b.build_protobuf_schema(one) for one in (b.PROTOBUF_PLAIN, FRAMED_PROTOBUF, PROTOBUF_KEY)]
# The message at place 4 inside of that at place 1: a list of two numbers, in zigzag.
PLACES = b"\x04\x02\x08"
_TEXT_KEY, _INTEGER_KEY, _LONG_KEY = _declared("string integer long", e.PLAIN)


def _declare_message(text: str) -> Protobuf:
    files = compile_schema(Schema(0, "PROTOBUF", text))[0]
    return Protobuf("shop.All.Row", base64.b64encode(files).decode())


def _in_debezium(row: Values, chance: random.Random) -> Values:
    """A change; that of a delete has its row in `before`."""
    before, after, op = chance.choice([(None, row, "c"), ({}, row, "u"), (row, None, "d")])
    return {"before": before, "after": after, "source": {"lsn": 1}, "op": op, "ts_ms": MOMENT_MS}


def _in_cloudevent(row: Values, _: random.Random) -> Values:
    blob = {"data_base64": row.pop("data_base64")}
    return {"specversion": "1.0", "id": "first", "source": "/a", "type": "b", "data": row, **blob}


CSV_COLUMNS, LINE_COLUMNS = allow_nulls(e.TEXTS, nullable=True), allow_nulls(e.TEXTS, optional=True)
GROUPS = [move(one, f"c{at}") for at, one in enumerate(LINE_COLUMNS)]
PATTERN = SEPARATOR.join(f"(?P<c{at}>[^{SEPARATOR}]*)" for at, _ in enumerate(LINE_COLUMNS))
_BLOB = Column(Field("data_base64", "binary"), v.BINARY, e.encode_base64)
_BODY = Column(Field("body", "binary", source="value"), v.BINARY)
_TEXT = Column(Field("text", "string", source="value"), v.TEXT)
_EITHER = Column(Field("ce_either", "string", source=("either", Header("ce_either"))), v.TEXT)
ENCODERS: Mapping[str, Encoder] = {
    "json": Encoder(
        Json(),
        JSON_COLUMNS,
        write_json(),
        Json(),
        _of_key(_declared("string flag integer long double money fine number date moment binary", e.PLAIN)),
        write_json(is_key=True),
    ),
    "framed json": Encoder(
        Json(registry=True),
        FRAMED_JSON,
        frame(1, write_json()),
        Json(registry=True),
        _of_whole_key(_TEXT_KEY),
        frame_key(2, write_whole(lambda text: json.dumps(text).encode())),
        [Schema(1, "JSON", "{}"), Schema(2, "JSON", "{}")],
    ),
    "kafka connect": Encoder(
        Json(),
        _below("payload", allow_nulls(e.CONNECT, nullable=True)),
        write_json(lambda row, _: {"schema": {"type": "struct", "fields": []}, "payload": row}, may_lack=False),
        Text(),
        _of_whole_key(_LONG_KEY, text=True),
        write_whole(lambda number: str(number).encode()),
    ),
    "debezium": Encoder(
        Json(),
        [move(one, f"after.{one.field.name}", f"before.{one.field.name}") for one in e.CONNECT],
        write_json(_in_debezium),
        BigEndian(),
        _of_whole_key(_LONG_KEY),
        write_whole(lambda number: number.to_bytes(8, signed=True)),
    ),
    "cloudevents": Encoder(
        Json(),
        [*_below("data", JSON_COLUMNS), _BLOB],
        write_json(_in_cloudevent),
        Avro('"string"'),
        _of_whole_key(_TEXT_KEY),
        write_avro("string", whole=True),
    ),
    "cloudevents in headers": Encoder(
        Json(),
        [*map(_in_header, e.AS_TEXT), _EITHER, *_declared("string long json", JSON_COLUMNS)],
        write_in_headers(write_json()),
        BigEndian(4),
        _of_whole_key(_INTEGER_KEY),
        write_whole(lambda number: number.to_bytes(4, signed=True)),
    ),
    "avro": Encoder(Avro(json.dumps(AVRO_SCHEMA)), AVRO_COLUMNS, write_avro(AVRO_SCHEMA)),
    "framed avro": Encoder(
        Avro(),
        FRAMED_AVRO,
        frame(1, write_avro(FRAMED_AVRO_SCHEMA)),
        Avro(),
        AVRO_KEY,
        frame_key(2, write_avro(AVRO_KEY_SCHEMA)),
        [Schema(1, "AVRO", json.dumps(FRAMED_AVRO_SCHEMA)), Schema(2, "AVRO", json.dumps(AVRO_KEY_SCHEMA))],
    ),
    "protobuf": Encoder(_declare_message(PROTOBUF_TEXTS[0]), b.PROTOBUF_PLAIN, write_protobuf(PROTOBUF_TEXTS[0])),
    "framed protobuf": Encoder(
        Protobuf(),
        FRAMED_PROTOBUF,
        frame(1, write_protobuf(PROTOBUF_TEXTS[1]), places=PLACES),
        Protobuf(),
        PROTOBUF_KEY,
        frame_key(2, write_protobuf(PROTOBUF_TEXTS[2]), PLACES),
        [Schema(1, "PROTOBUF", PROTOBUF_TEXTS[1]), Schema(2, "PROTOBUF", PROTOBUF_TEXTS[2])],
    ),
    "csv": Encoder(
        Csv(tuple(one.field.name for one in CSV_COLUMNS)),
        CSV_COLUMNS,
        write_csv,
        Text(),
        _of_whole_key(_TEXT_KEY),
        write_whole(lambda text: text.encode()),
    ),
    "lines": Encoder(
        Lines(PATTERN),
        GROUPS,
        write_line,
        _declare_message(PROTOBUF_TEXTS[2]),
        PROTOBUF_KEY,
        write_protobuf(PROTOBUF_TEXTS[2]),
    ),
    "raw": Encoder(
        Raw(),
        [_BODY, *map(_in_header, e.AS_TEXT)],
        write_in_headers(write_whole(bytes)),
        Raw(),
        _of_whole_key(_BODY),
        write_whole(bytes),
    ),
    "raw text": Encoder(
        Raw(),
        [_TEXT],
        write_whole(lambda text: text.encode()),
        Avro(json.dumps(AVRO_KEY_SCHEMA)),
        AVRO_KEY,
        write_avro(AVRO_KEY_SCHEMA),
    ),
}
