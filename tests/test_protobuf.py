"""Values of Protobuf, decoded by Python alone as Spark decodes them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.classifying import classify
from highwater.declaration import Field
from highwater.formats import Protobuf
from highwater.protobuf import compile_schema
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from tests.helpers.format_streams import MICRO, build_stream_of

PROTO = """
syntax = "proto3";
package p;
import "google/protobuf/any.proto";
import "google/protobuf/field_mask.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Around { message Inside { int32 n = 1; } }
message M {
  string s = 1;
  int64 n = 2;
  float f = 3;
  double d = 4;
  bytes b = 5;
  uint64 u = 6;
  bool ok = 7;
  optional int32 o = 8;
  google.protobuf.Timestamp t = 9;
  google.protobuf.Int64Value w = 10;
  repeated google.protobuf.Int64Value ws = 11;
  google.protobuf.Any any = 12;
  google.protobuf.FieldMask mask = 13;
  google.protobuf.Value v = 14;
  map<bool, M> deep = 15;
  repeated int64 many = 16;
  enum E { ZERO = 0; ONE = 1; }
  E e = 17;
}
"""
SCHEMA = Schema(1, "PROTOBUF", PROTO)


def message(name: str = "M") -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    for one in FileDescriptorSet.FromString(compile_schema(SCHEMA)[0]).file:
        pool.Add(one)
    return GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))()


def of_message(made: Any, *fields: Field, places: bytes = b"\x02\x02") -> Any:
    stream = build_stream_of(Protobuf(), *fields)
    value = b"\0\0\0\0\x01" + places + made.SerializeToString()
    found = classify(stream, KafkaRecord(value), lambda _: SCHEMA)
    return found.values if found.kind == "event" else found.detail


def test_unset_members_of_a_message_have_defaults() -> None:
    fields = (
        Field("s", "string"), Field("n", "long"), Field("d", "double"), Field("b", "binary"), Field("ok", "boolean"),
        Field("e", "string"), Field("many", "array", of=Field("one", "long")), Field("o", "integer", optional=True),
        Field("w", "long", optional=True),
    )  # fmt: skip
    assert list(of_message(message(), *fields).values()) == ["", 0, 0.0, b"", False, "ZERO", [], None, None]


def test_well_known_protobuf_types_are_decoded() -> None:
    """A wrapper of 64 bits was a text, `Any` raised TypeError, and a time of a far year refused the message."""
    made = message()
    made.t.seconds, made.t.nanos = 1_767_225_600, 123_456_789
    made.w.value = 2**60
    made.ws.add().value = -5
    made.any.type_url, made.any.value = "nowhere/p.Q", b"1"
    made.mask.paths.append("a_b")
    made.deep[True].n = 7
    inner = Field("m", "struct", of=(Field("n", "long"),))
    found = of_message(
        made, Field("t", "timestamp"), Field("w", "long"), Field("ws", "array", of=Field("one", "long")),
        Field("type", "string", source="any.type_url"), Field("deep", "map", of=inner),
        Field("paths", "array", source="mask.paths", of=Field("one", "string")),
    )  # fmt: skip
    assert found == {
        "t": MICRO + 123456, "w": 2**60, "ws": [-5], "type": "nowhere/p.Q", "deep": {"true": {"n": 7}}, "paths": ["a_b"]
    }  # fmt: skip
    made.t.seconds = 2**50
    assert of_message(made, Field("w", "long")) == {"w": 2**60}
    assert "it is no time" in of_message(made, Field("t", "timestamp"))


def test_numbers_of_32_bits_and_infinite_ones() -> None:
    """A float was read by its few digits, unlike by the pipeline."""
    made = message()
    made.f, made.d, made.e = 0.1, 0.5, 9
    found = of_message(made, Field("f", "double"), Field("d", "decimal(4,2)"), Field("e", "string"))
    assert found == {"f": 0.10000000149011612, "d": Decimal("0.5"), "e": "9"}
    made.d = float("nan")
    assert of_message(made, Field("s", "string")) == {"s": ""}
    assert of_message(made, Field("d", "double")) == "field d: it is NaN"
    assert of_message(made, Field("d", "double", nan="null")) == {"d": None}
    made.d = float("-inf")
    assert of_message(made, Field("d", "double", nan="keep")) == {"d": float("-inf")}


def test_a_message_by_its_place() -> None:
    inside = message("Around.Inside")
    inside.n = 3
    assert of_message(inside, Field("n", "integer"), places=b"\x04\x00\x00") == {"n": 3}
    assert "no message" in of_message(inside, Field("n", "integer"), places=b"\x02\x0c")
    assert "message indexes" in of_message(message(), Field("n", "integer"), places=b"\x03")


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "s": st.text(),
            "n": st.integers(-(2**63), 2**63 - 1),
            "u": st.integers(0, 2**64 - 1),
            "d": st.floats(),
            "f": st.floats(width=32),
            "b": st.binary(),
            "ok": st.booleans(),
            "many": st.lists(st.integers(-(2**63), 2**63 - 1)),
        }
    )
)
def test_values_of_a_protobuf_encoder_are_decoded(values: dict[str, Any]) -> None:
    kinds = {"s": "string", "n": "long", "d": "double", "f": "float", "b": "binary", "ok": "boolean"}
    fields = [Field(name, kind, nan="keep" if name in "df" else "reject") for name, kind in kinds.items()]
    fields += [Field("u", "decimal(20,0)"), Field("many", "array", of=Field("one", "long"))]
    made = message()
    made.MergeFrom(type(made)(**values))
    found = of_message(made, *fields)
    assert {name: repr(float(one)) if name in "df" else one for name, one in found.items()} == {
        name: repr(float(one)) if name in "df" else one for name, one in values.items()
    } | ({"d": "0.0"} if repr(values["d"]) == "0.0" else {})
