"""A Protobuf schema with most of what such schemas have, and messages of it."""

from __future__ import annotations

from typing import Any

from highwater.declaration import Answers, Field, Stream
from highwater.formats import Protobuf
from highwater.protobuf import compile_schema
from highwater.schemas import Schema

TEXT = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
message Other { string z = 1; }
message Order {
  message Line { string sku = 1; int32 qty = 2; }
  enum Kind { NORMAL = 0; GIFT = 1; }
  string id = 1;
  int64 version = 2;
  double price = 3;
  float weight = 4;
  optional string note = 5;
  repeated Line lines = 6;
  map<string, int64> counts = 7;
  google.protobuf.Timestamp at = 8;
  Kind kind = 9;
  bytes raw = 10;
  google.protobuf.StringValue coupon = 11;
  google.protobuf.Struct more = 12;
  uint64 big = 13;
  bool paid = 14;
}
"""
SCHEMA = Schema(5, "PROTOBUF", TEXT)
# The magic byte, the ID, and the list of one index: the second message of the file.
FRAMING = b"\x00\x00\x00\x00\x05\x02\x02"
FRAMING_BYTES = len(FRAMING)
LINE = (Field("sku", "string"), Field("qty", "integer"))
STREAM = Stream(
    "protobuf_orders",
    "protobuf_orders",
    (
        Field("id", "string"),
        Field("version", "long"),
        Field("price", "double", nan="keep"),
        Field("weight", "float", nan="keep"),
        Field("note", "string", optional=True),
        Field("lines", "array", of=Field("line", "struct", of=LINE)),
        Field("counts", "map", of=Field("count", "long")),
        Field("at", "timestamp"),
        Field("kind", "string"),
        Field("raw", "binary"),
        Field("coupon", "string", optional=True),
        Field("big", "decimal(20,0)"),
        Field("paid", "boolean"),
    ),
    key=("id",),
    version="version",
    answers=Answers("By key.", "Once.", "Parked."),
    value=Protobuf(),
    record_key="ignore",
)


def find_schema(one: int | str) -> Schema | None:
    """The schema by its number."""
    return SCHEMA if one == 5 else None


def message(**fields: Any) -> bytes:
    """An order with the framing of a registry; it is the second message of its file."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    for one in FileDescriptorSet.FromString(compile_schema(SCHEMA)[0]).file:
        pool.Add(one)
    made: Any = GetMessageClass(pool.FindMessageTypeByName("shop.Order"))()
    made.at.seconds = fields.pop("seconds", 1767225600)
    made.at.nanos = fields.pop("nanos", 0)
    if coupon := fields.pop("coupon", None):
        made.coupon.value = coupon
    for line in fields.pop("lines", ()):
        made.lines.add(**line)
    for name, value in fields.items():
        if isinstance(value, dict):
            getattr(made, name).update(value)
        else:
            setattr(made, name, value)
    return FRAMING + bytes(made.SerializeToString())


MESSAGES = (
    message(id="a", version=2**60, price=1e-7, weight=0.1, lines=[{"sku": "x", "qty": 2}], counts={"k": 5, "": -1}),
    message(
        id="b", version=-1, note="", kind=1, raw=b"\xff\x00", coupon="c", big=2**64 - 1, paid=True, nanos=123456789
    ),
    message(id="ö", version=0, price=float("nan"), weight=float("-inf"), kind=7, more={"a": [1, None, {"b": True}]}),
)
