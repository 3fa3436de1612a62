"""Schemas of a registry: how a record names its schema, and how the schema becomes one document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.schemas import (
    VALUE_HEADER,
    FramedValue,
    FramingError,
    Schema,
    SchemaReference,
    build_self_contained_avro,
    parse_framing,
    parse_message_indexes,
    parse_protobuf_message,
)

IDS = st.integers(0, 2**31 - 1)
GUIDS = st.uuids().map(str)
INDEXES = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def written(*, schema_id: int | None = None, guid: str | None = None, indexes: list[int] | None = None) -> bytes:
    """The framing as Confluent's own client writes it."""
    from confluent_kafka.schema_registry.serde import SchemaId

    made = SchemaId("PROTOBUF" if indexes else "AVRO", schema_id, guid, indexes)
    found: bytes = made.id_to_bytes() if guid is None else made.guid_to_bytes()
    return found


@given(IDS, st.binary())
def test_a_framing_in_front_of_the_value_gives_id_and_payload(schema_id: int, payload: bytes) -> None:
    assert parse_framing(written(schema_id=schema_id) + payload, []) == FramedValue(schema_id, None, payload)


@given(IDS, st.binary())
def test_a_header_may_hold_the_id_of_a_bare_value(schema_id: int, value: bytes) -> None:
    headers = [("other", b"x"), (VALUE_HEADER, written(schema_id=schema_id))]
    assert parse_framing(value, headers) == FramedValue(schema_id, None, value, b"")


@given(GUIDS, st.binary())
def test_a_header_may_hold_the_guid_of_a_bare_value(guid: str, value: bytes) -> None:
    assert parse_framing(value, [(VALUE_HEADER, written(guid=guid))]) == FramedValue(None, guid, value, b"")


def test_the_last_header_of_a_name_counts() -> None:
    headers = [(VALUE_HEADER, written(schema_id=1)), (VALUE_HEADER, written(schema_id=2))]
    assert parse_framing(b"value", headers) == FramedValue(2, None, b"value", b"")


def test_a_key_has_a_header_of_its_own() -> None:
    headers = [(VALUE_HEADER, written(schema_id=1)), ("__key_schema_id", written(schema_id=2))]
    assert parse_framing(b"key", headers, header="__key_schema_id") == FramedValue(2, None, b"key", b"")


@pytest.mark.parametrize("headers", [[], [(VALUE_HEADER, b"\x00\x00\x00\x00\x01")]])
def test_a_record_without_a_value_has_no_framing(headers: list[tuple[str, bytes | None]]) -> None:
    assert parse_framing(None, headers) is None


@pytest.mark.parametrize(
    ("value", "position", "text"),
    [
        (b"", 0, "no magic byte 0 at byte 0 of the value"),
        (b"{}", 0, "no magic byte 0 at byte 0 of the value"),
        (b"\x01" + bytes(range(16)), 0, "no magic byte 0 at byte 0 of the value"),
        (b"\x00\x00\x00", 3, "the framing of 5 bytes is cut short at byte 3 of the value"),
    ],
)
def test_a_value_without_a_whole_framing_is_refused(value: bytes, position: int, text: str) -> None:
    with pytest.raises(FramingError) as caught:
        parse_framing(value, [])
    assert (caught.value.position, str(caught.value)) == (position, text)


@pytest.mark.parametrize(
    ("content", "position", "text"),
    [
        (None, 0, "no magic byte 0 or 1 at byte 0 of header __value_schema_id"),
        (b"", 0, "no magic byte 0 or 1 at byte 0 of header __value_schema_id"),
        (b"\x02abcd", 0, "no magic byte 0 or 1 at byte 0 of header __value_schema_id"),
        (b"\x00abc", 4, "the framing of 5 bytes is cut short at byte 4 of header __value_schema_id"),
        (b"\x01abcd", 5, "the framing of 17 bytes is cut short at byte 5 of header __value_schema_id"),
    ],
)
def test_a_header_without_a_whole_framing_is_refused(content: bytes | None, position: int, text: str) -> None:
    with pytest.raises(FramingError) as caught:
        parse_framing(written(schema_id=1) + b"value", [(VALUE_HEADER, content)])
    assert (caught.value.position, str(caught.value)) == (position, text)


@given(IDS, INDEXES, st.binary())
def test_message_indexes_stand_between_id_and_message(schema_id: int, indexes: list[int], message: bytes) -> None:
    framed = parse_framing(written(schema_id=schema_id, indexes=indexes) + message, [])
    assert framed is not None
    assert parse_protobuf_message(framed) == (tuple(indexes), message)


@given(GUIDS, INDEXES, st.binary())
def test_message_indexes_follow_the_guid_in_a_header(guid: str, indexes: list[int], message: bytes) -> None:
    framed = parse_framing(message, [(VALUE_HEADER, written(guid=guid, indexes=indexes))])
    assert framed is not None
    assert parse_protobuf_message(framed) == (tuple(indexes), message)


def test_a_single_zero_is_the_first_message() -> None:
    assert parse_message_indexes(b"\x00rest") == ((0,), b"rest")


@given(INDEXES)
def test_cut_message_indexes_are_refused_at_their_end(indexes: list[int]) -> None:
    whole = written(schema_id=1, indexes=indexes)[5:]
    for length in range(len(whole)):
        with pytest.raises(FramingError, match="cut short") as caught:
            parse_message_indexes(whole[:length])
        assert caught.value.position == length


@pytest.mark.parametrize(
    ("payload", "position", "text"),
    [
        (b"\x01rest", 0, "a negative number"),  # zig-zag: 1 is -1
        (b"\x02\x03rest", 1, "a negative number"),
        (b"\xff\xff\xff\xff\xff\x01", 0, "more than 5 bytes"),
        (b"\xfe\xff\xff\xff\x0fab", 7, "2147483647 message indexes are cut short"),
    ],
)
def test_message_indexes_that_cannot_be_are_refused(payload: bytes, position: int, text: str) -> None:
    with pytest.raises(FramingError, match=text) as caught:
        parse_message_indexes(payload)
    assert caught.value.position == position


@given(st.binary(max_size=40))
def test_any_bytes_give_indexes_or_a_position_in_them(payload: bytes) -> None:
    position, rest = 0, b""
    try:
        _, rest = parse_message_indexes(payload)
    except FramingError as error:
        position = error.position
    assert 0 <= position <= len(payload)
    assert payload.endswith(rest)


MONEY = {
    "type": "record",
    "name": "Money",
    "namespace": "shop",
    "fields": [
        {"name": "amount", "type": "long"},
        {"name": "currency", "type": {"type": "enum", "name": "Currency", "symbols": ["CHF", "EUR"]}},
    ],
}
LINE = {
    "type": "record",
    "name": "shop.cart.Line",
    "fields": [{"name": "sku", "type": "string"}, {"name": "price", "type": ["null", "shop.Money"], "default": None}],
}
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "currency", "type": "Currency"},
        {"name": "lines", "type": {"type": "array", "items": "shop.cart.Line"}},
        {"name": "total", "type": "Money"},
        {"name": "next", "type": ["null", "Order"], "default": None},
        {"name": "by_day", "type": {"type": "map", "values": "Money"}},
    ],
}


def order_schema() -> Schema:
    references = (
        SchemaReference("shop.Money", "money", 1, json.dumps(MONEY)),
        SchemaReference("shop.cart.Line", "line", 1, json.dumps(LINE)),
    )
    return Schema(1, "AVRO", json.dumps(ORDER), references)


def test_an_avro_schema_with_references_becomes_one_that_reads_what_the_original_wrote() -> None:
    """The original is parsed by fastavro beside its references; nothing of that sees the document under test."""
    import io

    import fastavro

    known: dict[str, dict[Any, Any]] = {}
    for text in (MONEY, LINE):
        fastavro.parse_schema(text, named_schemas=known)
    original = fastavro.parse_schema(ORDER, named_schemas=known)
    money = {"amount": 3, "currency": "EUR"}
    record = {
        "currency": "CHF",
        "lines": [{"sku": "a", "price": None}, {"sku": "b", "price": money}],
        "total": money,
        "next": None,
        "by_day": {"monday": money},
    }
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, original, {**record, "next": record})
    stream.seek(0)

    alone = fastavro.parse_schema(json.loads(build_self_contained_avro(order_schema())))

    assert fastavro.schemaless_reader(stream, alone, None) == {**record, "next": record}


def test_each_type_is_defined_once_where_it_is_used_first() -> None:
    """`Currency` is used before `Money`, in whose text it is defined."""
    alone = json.loads(build_self_contained_avro(order_schema()))
    currency, lines, total, following, by_day = (field["type"] for field in alone["fields"])

    assert currency == {"type": "enum", "name": "Currency", "namespace": "shop", "symbols": ["CHF", "EUR"]}
    money = lines["items"]["fields"][1]["type"][1]
    assert (money["namespace"], money["name"]) == ("shop", "Money")
    assert money["fields"][1]["type"] == "shop.Currency"
    assert total == "Money"
    assert following == ["null", "Order"]
    assert by_day == {"type": "map", "values": "Money"}


def test_a_type_by_its_name_needs_no_object_around_it() -> None:
    order = {"type": "record", "name": "Order", "fields": [{"name": "total", "type": {"type": "shop.Money"}}]}
    schema = Schema(1, "AVRO", json.dumps(order), (SchemaReference("shop.Money", "money", 1, json.dumps(MONEY)),))
    assert json.loads(build_self_contained_avro(schema))["fields"][0]["type"]["name"] == "Money"


def test_an_avro_schema_without_references_stays_as_it_is() -> None:
    assert build_self_contained_avro(Schema(1, "AVRO", ' "string"')) == ' "string"'
