"""Masked fields: events, `current` and the accepted topic hold the hash of a value or nothing, and never the value."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import published
from highwater.column_comparison import matches_stored
from highwater.declaration import Accepted, Answers, Deletes, Field, Lookup, Stream, UnknownFields
from highwater.errors import DeclarationError
from highwater.formats import Avro, Json
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.schemas import Schema
from highwater.sources import Key
from tests.helpers.bench_records import published as read
from tests.helpers.support import LONG_TIERS, Message, customers

if TYPE_CHECKING:
    from highwater.slices import Slice
    from tests.helpers.support import Bench

FIELDS = (
    Field("id", "string"),
    Field("v", "long"),
    Field("email", "string", mask="hash", optional=True, nullable=True),
    Field("phone", "long", source="contact.phone", mask="hash", optional=True),
    Field("balance", "decimal(18,8)", mask="hash", optional=True),
    Field("born", "date", mask="hash", optional=True),
    Field("woken", "time", mask="hash", optional=True),
    Field("adult", "boolean", mask="hash", optional=True, default=False),
    Field("customer_id", "string", mask="hash", optional=True),
    Field("card", "string", mask="drop", optional=True),
    Field("notes", "json", mask="drop", optional=True),
    Field("domain", "string", expression="substring_index(email, '@', -1)", nullable=True),
    Field("issuer", "string", expression="left(card, 4)", nullable=True, mask="hash"),
)
RECORDS: list[dict[str, Any]] = [
    {
        "id": "a",
        "v": 1,
        "email": "ünal.secret@example.org",
        "contact": {"phone": 4917012345678},
        "balance": 98765.5,
        "born": "1980-07-31",
        "woken": "05:43:21.25",
        "adult": True,
        "customer_id": "customer-77",
        "card": "4929123456789012",
        "notes": {"diagnosis": "migraine"},
    },
    {"id": "b", "v": 1, "email": None, "balance": 0},
    {"id": "c", "v": 1, "email": "", "phone": 1},
    {"id": "d", "v": 1, "email": "hidden.person@example.org", "card": "short"},
    {"id": "e", "v": 1, "customer_id": "nobody"},
]
# As they are written in the records: no part of an event has one of them.
CLEAR = (
    "secret",
    "4917012345678",
    "98765.5",
    "1980-07",
    "05:43",
    "customer-77",
    "492912345",
    "migraine",
    "hidden.person",
    "short",
)


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def masked(topic: str, **changes: Any) -> Stream:
    options: dict[str, Any] = {
        "fields": FIELDS,
        "answers": Answers("By key.", "Once.", "Parked."),
        "tiers": LONG_TIERS,
        "record_key": "strict",
        "lookup": Lookup("customer_id", "reference/customers", "customer_id"),
        "rules": {"card_is_long": "length(card) > 10"},
        "publishes": Accepted(f"{topic}.accepted"),
    }
    return Stream("masked", topic, key=("id",), version="v", **{**options, **changes})


def next_slice(bench: Bench, number: int, *messages: Message) -> Slice:
    bench.send(*messages)
    slice_ = bench.plan(number, p0=(0, len(messages)))
    bench.materialise(slice_)
    return slice_


def events(bench: Bench, *names: str) -> list[tuple[Any, ...]]:
    rows = sorted(bench.rows("events"), key=lambda row: row["origin_offset"])
    return [tuple(row[name] for name in names) for row in rows]


def types(bench: Bench, table: str) -> dict[str, Any]:
    fields = bench.lake.open_existing_table(bench.stream.name, table).schema().fields
    return {field.name: json.loads(field.type.to_json()) for field in fields}


MEMBERS = [("id", "string"), ("v", "long"), ("n", "int"), ("key", "string"), ("more", "string")]
SCHEMA = json.dumps({"type": "record", "name": "R", "fields": [{"name": n, "type": kind} for n, kind in MEMBERS]})


def find_schema(one: int | str) -> Schema | None:
    return Schema(7, "AVRO", SCHEMA) if one == 7 else None


def framed(**values: Any) -> Message:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(SCHEMA)), values)
    return Message(values["id"].encode(), b"\0" + (7).to_bytes(4) + out.getvalue())


@pytest.mark.slow
def test_no_clear_value_is_behind_raw_and_rejects(bench: Bench) -> None:
    """Rules, expressions and the lookup see the value; columns, the accepted topic and commits have its hash alone."""
    bench.stream = masked(bench.stream.topic)
    customers(bench.lake, ["customer-77"])
    slice_ = next_slice(
        bench, 0, *[Message(one["id"].encode(), json.dumps(one, ensure_ascii=False).encode()) for one in RECORDS]
    )
    nothing = dict.fromkeys(("email", "phone", "balance", "born", "woken", "customer_id", "domain", "issuer"))
    expected: dict[str, dict[str, Any]] = {
        "a": {
            "email": digest("ünal.secret@example.org"),
            "phone": digest("4917012345678"),
            "balance": digest("98765.50000000"),
            "born": digest("1980-07-31"),
            "woken": digest("05:43:21.250000"),
            "adult": digest("true"),
            "customer_id": digest("customer-77"),
            "domain": "example.org",
            "issuer": digest("4929"),
        },
        "b": {**nothing, "balance": digest("0.00000000"), "adult": digest("false")},
        "c": {**nothing, "email": digest(""), "adult": digest("false"), "domain": ""},
    }
    rows = {row["key"]: row for row in bench.rows("events")}
    assert {key: {name: row[name] for name in expected["a"]} for key, row in rows.items()} == expected
    assert {key: {name: row[name] for name in expected["a"]} for key, row in bench.current().items()} == expected
    assert {"card", "notes"}.isdisjoint(types(bench, "events").keys() | types(bench, "current").keys())
    assert types(bench, "events")["phone"] == types(bench, "current")["phone"] == "string"
    assert sorted((row["key"], row["reason"]) for row in bench.rows("rejects")) == [
        (b"d", "invalid"),
        (b"e", "unresolved"),
    ]
    [report] = published.materialise(bench.work(slice_))
    sent = {key: value for _, key, value, _ in read(bench.bootstrap, f"{bench.stream.topic}.accepted")}
    assert [*json.loads(sent[b"a"] or b"")] == [one.name for one in FIELDS if one.name not in {"card", "notes"}]
    assert {
        (key or b"").decode(): {name: json.loads(value or b"")[name] for name in expected["a"]}
        for key, value in sent.items()
    } == expected
    logs = [
        json.dumps(bench.lake.open_existing_table("masked", name).history(), default=str)
        for name in ("events", "current", "rejects", "published")
    ]
    whole = [repr(rows), repr(bench.current()), repr(sent), repr(report), repr(bench.rows("published")), *logs]
    assert [(clear, text) for clear in CLEAR for text in whole if clear in text] == []
    assert not bench.failing()
    settled = check_events_published(bench.ledger, bench.lake, bench.stream, [slice_.key])["events_published"]
    assert (settled[slice_.key].passed, settled[slice_.key].numbers["sent"]) == (True, 3)


@pytest.mark.slow
def test_a_hash_of_another_value_is_found_by_the_second_reader(bench: Bench) -> None:
    """A slice that was decided before the field was masked has clear values: the check says so until it is repeated."""
    options: dict[str, Any] = {"publishes": None, "lookup": None, "rules": {}}
    bench.stream = masked(bench.stream.topic, fields=(*FIELDS[:2], Field("email", "string")), **options)
    slice_ = next_slice(bench, 0, Message(b"a", b'{"id": "a", "v": 1, "email": "x@y"}'))
    bench.stream = replace(bench.stream, fields=(*FIELDS[:2], Field("email", "string", mask="hash")))
    assert [name.split()[0] for name in bench.failing()] == ["events_as_recorded"]
    bench.materialise(slice_)
    assert events(bench, "email") == [(digest("x@y"),)]
    assert bench.current()["a"]["email"] == digest("x@y")
    assert not bench.failing()


@pytest.mark.slow
def test_a_schema_adds_no_column_for_a_masked_member(bench: Bench) -> None:
    hashed, dropped = Field("n", "long", mask="hash", optional=True), Field("key_part", "string", source="key")
    fields = (Field("id", "string"), Field("v", "long"), hashed, replace(dropped, mask="drop", optional=True))
    options: dict[str, Any] = {"publishes": None, "lookup": None, "rules": {}, "value": Avro()}
    unknown = UnknownFields("add")
    bench.stream = masked(bench.stream.topic, fields=fields, unknown_fields=unknown, **options)
    bench.schemas = find_schema
    next_slice(bench, 0, framed(id="a", v=2, n=71077, key="clear", more="open"))
    rows = bench.rows("events")
    assert events(bench, "key", "n", "more") == [("a", digest("71077"), "open")]
    assert {"key_2", "key_part", "n_2"}.isdisjoint(rows[0])
    assert "clear" not in repr(rows)
    assert "71077" not in repr(rows)
    assert not bench.failing()


@pytest.mark.slow
def test_a_masked_field_may_say_which_records_delete(bench: Bench) -> None:
    fields = (*FIELDS[:2], Field("op", "string", mask="drop"))
    options: dict[str, Any] = {"publishes": None, "lookup": None, "rules": {}, "deletes": Deletes("op", ("d",))}
    bench.stream = masked(bench.stream.topic, fields=fields, **options)
    next_slice(
        bench, 0, Message(b"a", b'{"id": "a", "v": 1, "op": "c"}'), Message(b"a", b'{"id": "a", "v": 2, "op": "d"}')
    )
    assert events(bench, "v", "deleted") == [(1, False), (2, True)]
    assert bench.current() == {}
    assert not bench.failing()


@pytest.mark.parametrize(
    ("kind", "read", "stored"),
    [
        ("string", "a", digest("a")),
        ("long", -7, digest("-7")),
        ("boolean", True, digest("true")),
        ("decimal(8,2)", None, None),
    ],
)
def test_the_second_reader_compares_hashes(kind: str, read: Any, stored: Any) -> None:
    declared = Field("x", kind, mask="hash")
    assert matches_stored(declared, read, stored)
    assert not matches_stored(declared, read, digest("other"))
    assert stored is None or not matches_stored(declared, read, None)
    assert read is None or not matches_stored(declared, read, read)


def with_field(**options: Any) -> dict[str, Any]:
    return {"fields": (*ORDERS.fields, Field("x", **{"type": "string", "mask": "hash", "optional": True, **options}))}


def with_masked(name: str) -> dict[str, Any]:
    return {"fields": tuple(replace(one, mask="hash") if one.name == name else one for one in ORDERS.fields)}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (with_field(mask="md5"), "field 'x': mask is 'md5'; it is 'hash', 'drop' or left out"),
        (with_field(type="double"), "and this is a double: declare mask='drop'"),
        (with_field(type="timestamp"), "and this is a timestamp: declare mask='drop'"),
        (with_field(type="array", of=Field("one", "string", mask="hash"), mask=None), "mask the whole field"),
        (with_masked("order_id"), "field 'order_id' is masked, so it cannot be the key, whose column holds the value"),
        (with_masked("version"), "field 'version' is masked, so it cannot be the version"),
        (
            {**with_masked("status"), "metrics": None},
            "field 'status' is masked, so it cannot be the field of transitions",
        ),
        (with_masked("amount"), "field 'amount' is masked, so it cannot be part of metrics"),
        (with_field(source="status"), "field 'x' is masked, and field 'status' holds its value too"),
        (with_field(source="status.name"), "field 'x' is masked, and field 'status' holds its value too"),
        (
            {"fields": (*with_field(source=Key())["fields"], Field("y", "string", source=Key()))},
            "field 'x' is masked, and field 'y' holds its value too",
        ),
    ],
)
def test_fields_that_cannot_be_masked_are_refused(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        replace(ORDERS, **changes)
    assert reported in str(caught.value)


def test_a_part_of_a_dropped_object_may_be_a_column() -> None:
    parts = (Field("all", "json", source="person", mask="drop"), Field("city", "string", source="person.city"))
    unknown = UnknownFields("ignore")
    assert replace(ORDERS, fields=(*ORDERS.fields, *parts), value=Json(), unknown_fields=unknown).stored_fields
