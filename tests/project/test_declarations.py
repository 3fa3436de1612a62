"""The declared streams: found by their files, and refused with the file's name."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from click.testing import CliRunner

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Accepted, Alerts, Deletes, Field, Foreign, Limits, Maintenance, UnknownFields
from highwater.errors import DeclarationError
from highwater.formats import Avro, BigEndian, Json, Protobuf, Raw
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operator_jobs import build_operator_jobs
from highwater.protobuf import compile_schema
from highwater.schemas import Schema
from highwater.sources import Key, Meta, Rest
from highwater.stream_files import load_streams, read_streams

ROOT = Path(__file__).parents[2]


def declare(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


@pytest.fixture
def declarations(tmp_path: Path) -> Path:
    folder = tmp_path / "streams"
    folder.mkdir()
    shipped = (ROOT / "assets/streams/orders.py").read_text()
    (folder / "orders.py").write_text(shipped)
    return folder


def field(kind: str, name: str = "x", **rules: Any) -> tuple[Field, ...]:
    return (Field(name, kind, **rules),)


OTHER = "from dataclasses import replace\nfrom assets.streams.orders import STREAM as ORDERS\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("STREAM = (", "was never closed"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("STREAM = 3", "STREAM is int"),
        ("", "STREAM is NoneType"),
        ("STREAMS = [3]", "STREAMS has int"),
        ("STREAMS = []", "STREAMS has nothing"),
        ("from assets.streams.orders import STREAM", "declared twice"),
        (
            OTHER + "STREAMS = [replace(ORDERS, name=n, topic='o') for n in 'ab']",
            "the topic 'o' is declared twice",
        ),
        (OTHER + "STREAM = replace(ORDERS, name='other')", "the topic 'orders' is declared twice"),
        (
            OTHER + "STREAM = replace(ORDERS, name='other', topic='o', key=('nothing',))",
            "'nothing' is used and not declared",
        ),
        (OTHER + "STREAM = replace(ORDERS, name='other', topic='o', start='yesterday')", "'yesterday'"),
        (OTHER + "STREAM = replace(ORDERS, name='other', topic='o', start='2026-03-01T00:00:00')", "zone"),
    ],
)
def test_a_broken_declaration_is_named_and_fixed(
    declarations: Path, text: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(declarations, "broken.py", text)
    with pytest.raises(DeclarationError) as caught:
        load_streams(declarations)
    assert "broken.py" in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.remedy
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{declarations.parent / 'ledger.sqlite'}")
    result = CliRunner().invoke(main, ["--declarations", str(declarations), "slices", "orders"])
    # A file that declares the same stream leaves open which of the two is right.
    assert result.exit_code == (0 if "orders" in read_streams(declarations).streams else EXIT_PERMANENT)
    assert "broken.py is skipped: " in result.stderr
    (declarations / "broken.py").unlink()
    assert set(load_streams(declarations)) == {"orders"}


@pytest.mark.parametrize("text", ["STREAM = (", "STREAM = 3", "raise SystemExit(0)", "1 / 0"])
def test_a_file_with_a_fault_hides_no_other_file(declarations: Path, text: str) -> None:
    declare(declarations, "broken.py", text)
    declare(declarations, "zebras.py", OTHER + "STREAM = replace(ORDERS, name='zebras', topic='z', publishes=None)")
    found = read_streams(declarations)
    assert set(found.streams) == {"orders", "zebras"}
    assert [file.name for file in found.faults] == ["broken.py"]


def test_two_files_that_declare_one_topic_are_both_at_fault(declarations: Path) -> None:
    declare(declarations, "copy.py", OTHER + "STREAM = replace(ORDERS, name='copied', publishes=None)")
    declare(declarations, "zebras.py", OTHER + "STREAM = replace(ORDERS, name='zebras', topic='z', publishes=None)")
    found = read_streams(declarations)
    assert set(found.streams) == {"zebras"}
    assert sorted(file.name for file in found.faults) == ["copy.py", "orders.py"]


@pytest.mark.parametrize("topic", ["z.dlq.1", "z.parked", "z.accepted"])
def test_no_stream_publishes_to_a_topic_that_another_one_writes(declarations: Path, topic: str) -> None:
    """A stream published its accepted events to the tier of another one, which took them for records to be retried."""
    copied = f"STREAM = replace(ORDERS, name='copied', topic='c', publishes=replace(ORDERS.publishes, topic='{topic}'))"
    declare(declarations, "copy.py", OTHER + copied)
    others = (
        "STREAM = replace(ORDERS, name='zebras', topic='z', publishes=replace(ORDERS.publishes, topic='z.accepted'))"
    )
    declare(declarations, "zebras.py", OTHER + others)
    found = read_streams(declarations)
    assert set(found.streams) == {"orders"}
    assert [f"the topic to publish to '{topic}' is declared twice" in str(one) for one in found.faults.values()] == [
        True,
        True,
    ]


def test_one_file_declares_several_streams(declarations: Path) -> None:
    """A list of topics is one declaration, beside other files."""
    several = "STREAMS = [replace(ORDERS, name=f'shop_{n}', topic=f'shop.{n}', publishes=None) for n in (1, 2)]"
    declare(declarations, "shops.py", OTHER + several)
    assert {name: one.topic for name, one in load_streams(declarations).items()} == {
        "orders": "orders",
        "shop_1": "shop.1",
        "shop_2": "shop.2",
    }


NO_VERSION = {"version": None, "first_version": None, "transitions": None, "metrics": None, "publishes": None}


def rest(**options: Any) -> dict[str, Any]:
    """The fields of orders with one that collects members."""
    declared = {"type": "json", "optional": True, "source": Rest(), **options}
    return {"fields": (*ORDERS.fields, Field("rest", **declared))}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"key": ()}, "a version orders the states of a key, and no key is declared"),
        ({"version": None}, "transitions needs a key and a version, and no version is declared"),
        ({**NO_VERSION, "deletes": Deletes("status", ("x",))}, "deletes needs a key and a version"),
        ({"deletes": Deletes("status", ("canceled",))}, "publishes: a delete has no form"),
        ({"record_key": "warn"}, "first_version needs record_key='strict'"),
        ({"unknown_fields": UnknownFields("add")}, "'add' takes types from a registry"),
        ({"unknown_fields": UnknownFields("add"), "value": Avro()}, "leave out publishes or 'add'"),
        ({"unknown_fields": UnknownFields(cast("Any", "keep"))}, "the policy is 'keep'; there are ignore, reject, add"),
        ({"unknown_fields": UnknownFields("reject", "a..b")}, "'a..b' is no path"),
        ({"unknown_fields": UnknownFields("reject", "status")}, "field 'status' already takes the whole object"),
        ({"unknown_fields": UnknownFields("reject"), **rest()}, "members are collected by field 'rest'"),
        (rest(type="string"), "the rest of an object is a field of type json, optional"),
        (rest(optional=False), "the rest of an object is a field of type json, optional"),
        (rest(source=(Rest(), "x")), "the rest of an object is its only source"),
        ({"publishes": None, "deletes": Deletes()}, "neither a field nor tombstones delete"),
        ({"publishes": None, "deletes": Deletes(values=("d",))}, "values are of a field, and none is named"),
        ({"publishes": None, "deletes": Deletes("status")}, "no value of 'status' is given that deletes"),
        ({"publishes": None, "deletes": Deletes("status", (1,))}, "deletes: 1 is no string"),
        ({"publishes": None, "deletes": Deletes("amount", (1,))}, "field 'amount' is a decimal(12,2)"),
        ({"publishes": None, "deletes": Deletes("nothing", ("d",))}, "'nothing' is used and not declared"),
        ({"publishes": None, "deletes": Deletes(tombstones=True)}, "a tombstone has no field 'order_id'"),
    ],
)
def test_keys_versions_and_deletes_go_together(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(reported)):
        replace(ORDERS, **changes)


IGNORED: dict[str, Any] = {"record_key": "ignore", "first_version": None}
WARNED: dict[str, Any] = {"record_key": "warn", "first_version": None}
TWO_KEYS: dict[str, Any] = {**WARNED, "key": ("order_id", "customer_id")}
BY_VERSION: dict[str, Any] = {**WARNED, "key": ("version",)}
KEY_OF_ID = json.dumps(
    {"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}, {"name": "region", "type": "int"}]}
)
# A FileDescriptorSet with the message `k.Key`, whose only field is `id`.
KEY_MESSAGE = base64.b64encode(
    compile_schema(Schema(1, "PROTOBUF", 'syntax = "proto3"; package k; message Key { string id = 1; }'))[0]
).decode()


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"key_format": Json()}, "first_version needs record_key='strict' and key_format=Text()"),
        ({"key_format": Raw(), **WARNED}, "and key_format=Raw() does not decode it: declare the format of the keys"),
        ({"key_format": BigEndian(), **WARNED}, "the key is a whole number, and 'order_id' is a string: declare it as"),
        ({"key_format": Avro('{"type": "int"}'), **WARNED}, "the key is a whole number, and 'order_id' is a string"),
        (
            {"key_format": Avro('"string"'), **BY_VERSION},
            "the key is a text, and 'version' is a number: declare text=True for it, or record_key='ignore'",
        ),
        ({"key_format": BigEndian(), **TWO_KEYS}, "a key of the format BigEndian is one value: declare record_key="),
        ({"key_format": Avro('"string"'), **TWO_KEYS}, "a key of the format Avro is one value"),
        ({"key_format": Avro(KEY_OF_ID), **WARNED}, "have no member 'order_id'; they have id, region: name the field"),
        ({"key_format": Protobuf("k.Key", KEY_MESSAGE), **WARNED}, "have no member 'order_id'; they have id: name the"),
        ({"key_format": BigEndian(2), **IGNORED}, "key_format: an integer has 4 or 8 bytes, and size is 2"),  # type: ignore[arg-type]
        ({"key_format": Avro("no"), **IGNORED}, "key_format: this is no Avro schema"),
        ({"key_format": Protobuf(descriptors="CgA="), **IGNORED}, "key_format: name the message"),
        ({"fields": field("long", source=Key("id"))}, "Key('id') is a member of a key that is an object or a record"),
        (
            {"fields": field("long", source=Key("id")), "key_format": BigEndian(), **IGNORED},
            "the stream declares key_format=BigEndian(): declare Json(), Avro() or Protobuf()",
        ),
        ({"fields": field("string", source=Key()), "key_format": Raw(), **IGNORED}, "it is of type binary"),
    ],
)
def test_key_formats_and_the_fields_that_are_taken_from_keys_go_together(
    changes: dict[str, Any], reported: str
) -> None:
    with pytest.raises(DeclarationError, match=re.escape(reported)):
        replace(ORDERS, **{**changes, "fields": ORDERS.fields + changes.get("fields", ())})


@pytest.mark.parametrize(
    "declared",
    [BigEndian(4), Json(registry=True), Avro('"long"'), Avro('{"type": "enum", "name": "E", "symbols": ["A"]}')],
)
def test_keys_of_any_type_are_declared(declared: Any) -> None:
    whole = field("json", source=Key())
    assert replace(ORDERS, key_format=declared, fields=(*ORDERS.fields, *whole), **IGNORED).reads_key


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"fields": field("decimal(50,2)")}, "there is no decimal(50,2): a decimal has 1 to 38 digits"),
        ({"fields": field("decimal(0,0)")}, "there is no decimal(0,0)"),
        ({"fields": field("decimal(2,5)")}, "no more after the decimal point than in all"),
        ({"fields": field("string", "X") + field("string")}, "'X' and 'x' would be one column"),
        ({"fields": field("string") + field("string")}, "'x' and 'x' would be one column"),
        # The MERGE into current failed.
        ({"fields": field("string", "\u0130l") + field("string", "\u0131l")}, "would be one column"),
        ({"fields": field("string", "Slice")}, "'Slice': the name is taken by the column 'slice'"),
        ({"fields": field("integer", "Version")}, "'version' and 'Version' would be one column"),
        ({"fields": field("string", "it's")}, '"it\'s": a name is letters'),
        ({"fields": field("string", "a.b")}, "'a.b': a name is letters"),
        ({"fields": field("string", "")}, "'': a name is letters, digits, '_', '-' and '@', one at least"),
        ({"fields": field("boolean", at_least=1)}, "at_least is for numbers, and a boolean is none"),
        ({"fields": field("string", at_least=1)}, "at_least is for numbers, and a string is none"),
        ({"fields": field("integer", at_least=2**31)}, "at_least is 2,147,483,648, and integer takes 2,147,483,647"),
        ({"fields": field("decimal(3,2)", at_least=10)}, "at_least is 10, and decimal(3,2) takes 9"),
        ({"fields": field("integer", one_of=(1, "two"))}, "one_of has 'two', which is no integer"),
        ({"fields": field("string", one_of=("one", 2))}, "one_of has 2, which is no string"),
        ({"fields": field("boolean", one_of=("yes",))}, "one_of is for strings and whole numbers, and a boolean is"),
        ({"fields": field("string", source="a..b")}, "field 'x': source: 'a..b' is no path"),
        ({"fields": field("string", source=())}, "field 'x': source names nothing"),
        ({"fields": field("timestamp", source=Meta("timestamp"))}, "is a number in ms: declare unit='ms'"),
        ({"fields": field("timestamp", unit="days")}, "unit is 'days'; of a timestamp it is ms, ns, s, us"),
        ({"fields": field("date", unit="ms")}, "unit is 'ms'; of a date it is days"),
        ({"fields": field("long", unit="ms")}, "unit is 'ms': it is for timestamp, date and time"),
        ({"fields": field("timestamp", unit="ms", zone="UTC")}, "zone is for a timestamp in ISO 8601"),
        ({"fields": field("timestamp", zone="Berlin")}, "there is no zone 'Berlin'"),
        ({"fields": field("string", text=True)}, "text is for numbers, and a string is none"),
        ({"fields": field("long", nan="null")}, "nan is for float and double, and this is a long"),
        (
            {"fields": field("timestamp", plausible=(date(2026, 1, 2), date(2026, 1, 1)))},
            "plausible ends before",
        ),
        ({"fields": field("string", default="a")}, "default is for an optional field"),
        ({"fields": field("json", optional=True, default="a")}, "a json has no default"),
        ({"fields": field("long", optional=True, default=True)}, "the default True is no long"),
        ({"fields": field("integer", optional=True, default=2**31)}, "the default 2147483648 does not fit integer"),
        ({"key": ("x",), "fields": field("double")}, "a double cannot be a part of the key"),
        ({"key": ("x",), "fields": field("string", nullable=True)}, "'x' is the key, the version or the event time"),
        ({"version": "x", "fields": field("long", optional=True)}, "'x' is the key, the version or the event time"),
        ({"key": ("order_id", "order_id")}, "the key has field 'order_id' 2 times"),
        ({"key": ("order_id", "customer_id"), "key_separator": ""}, "the key separator ''"),
        ({"key": ("order_id", "customer_id"), "key_separator": "\\"}, "hold no backslash"),
        ({"topic": "."}, "'.' is no topic name"),
        ({"topic": ".."}, "neither '.' nor '..'"),
        ({"topic": "or ders"}, "'or ders' is no topic name"),
        ({"topic": "o" * 250}, "249 at the most (found 250)"),
        ({"topic": "o" * 245}, ".dlq.1' is no topic name: that is letters, digits, '.', '_' and '-', 249 at the most"),
        ({"publishes": Accepted("..")}, "publishes: '..' is no topic name"),
        ({"foreign": (Foreign(".", timedelta(minutes=1)),)}, "the foreign topic '.' is no topic name"),
        ({"limits": Limits(max_wait=timedelta(seconds=-1))}, "max_wait is -1 day, 23:59:59, and cannot be"),
        ({"limits": Limits(slices_per_run=0)}, "slices_per_run is 0, and must be 1 or more"),
        ({"limits": Limits(max_offsets=5, min_offsets=6)}, "min_offsets is 6, above max_offsets 5"),
        ({"alerts": Alerts(retries_late=timedelta(hours=-1))}, "retries_late is -1 day, 23:00:00, and cannot be"),
        ({"name": "kafka"}, "the name is taken: assets of topics begin with kafka/"),
        ({"owner": "data-platform"}, "the owner 'data-platform' is neither a mail address nor team: and a name"),
    ],
)
def test_a_declaration_that_contradicts_itself_or_what_reads_it_is_refused(
    changes: dict[str, Any], reported: str
) -> None:
    """Each of these was accepted, and failed in Spark, Kafka or Dagster later, or never did what it says."""
    fields = ORDERS.fields + changes.get("fields", ())
    with pytest.raises(DeclarationError) as caught:
        replace(ORDERS, **{**changes, "fields": fields})
    assert reported in str(caught.value)
    assert "'orders'" in str(caught.value) or changes.keys() & {"topic", "name"}
    assert "docs/streams.md" in caught.value.remedy


UNVERSIONED: dict[str, Any] = {**NO_VERSION, "fields": tuple(f for f in ORDERS.fields if f.name != "version")}
WITHOUT_RANGE = [
    field("boolean"),
    field("binary"),
    field("array", of=Field("", "long")),
    field("map", of=Field("", "long")),
    field("struct", of=(Field("y", "long"),)),
]


@pytest.mark.parametrize(
    ("by", "changes", "reported"),
    [
        ((), {}, "maintenance: cluster_by must name a column or more"),
        (("event_time", "region"), {}, "maintenance: cluster_by names region, which events do not have"),
        (("Status",), {}, "maintenance: cluster_by names Status, which events do not have"),
        (("version",), UNVERSIONED, "maintenance: cluster_by names version, which events do not have"),
        (("x",), {"fields": ORDERS.fields + field("string", mask="hash")}, "it cannot be cluster_by of maintenance"),
        (("x",), {"fields": ORDERS.fields + field("string", mask="drop")}, "it cannot be cluster_by of maintenance"),
        *[
            (
                ("x",),
                {"publishes": None, "fields": ORDERS.fields + one},
                f"cluster_by names 'x', a field of type {one[0].type}, for which",
            )
            for one in WITHOUT_RANGE
        ],
    ],
)
def test_merged_files_are_ordered_by_columns_that_let_readers_skip_them(
    by: tuple[str, ...], changes: dict[str, Any], reported: str
) -> None:
    """Spark refuses to sort by a map, so that maintenance failed each night; others it ordered by their slices."""
    with pytest.raises(DeclarationError, match=re.escape(reported)):
        replace(ORDERS, maintenance=Maintenance(cluster_by=by), **changes)


def test_no_job_of_a_stream_has_the_name_of_a_job_of_operators() -> None:
    """The stream `retry` had the job `retry_slice`: Dagster then refused the definitions of all streams."""
    jobs = {job.name for job in build_operator_jobs({})}
    taken = [name.removesuffix(end) for name in jobs for end in ("_slice", "_publish") if name.endswith(end)]
    assert taken == ["retry"]
    with pytest.raises(DeclarationError, match="its job would be retry_slice, which is a job of operators"):
        replace(ORDERS, name="retry")


def test_boundary_values_are_accepted() -> None:
    numbers = [
        *field("integer", "i", at_least=2**31 - 1, one_of=(1, 2)),
        *field("long", "l", at_least=2**63 - 1),
        *field("decimal(38,38)", "d", at_least=0),
        *field("decimal(38,0)", "e", at_least=2**63 - 1),
        *field("string", "@odd-Größe_1"),
    ]
    stream = replace(ORDERS, topic="o" * 242, fields=(*ORDERS.fields, *numbers))
    assert len(stream.parked_topic) == 249


@pytest.mark.parametrize(
    "owner", ["team:data", "team:", "team", "data", "a@b.org", "a.b+c@d-e.example.org", "a@b", "a@b.c", "@b.org", ""]
)
def test_an_owner_is_taken_where_dagster_takes_it(owner: str) -> None:
    """One that Dagster alone refused failed the assets of every stream, and nothing named the file."""
    try:
        dg.AssetSpec("asset", owners=[owner])
    except dg.DagsterInvalidDefinitionError:
        with pytest.raises(DeclarationError, match="the owner"):
            replace(ORDERS, owner=owner)
    else:
        assert replace(ORDERS, owner=owner).owner == owner


def test_the_shipped_streams_are_found() -> None:
    found = load_streams()
    assert set(found) == {"orders", "payments"}
    assert found["orders"] == ORDERS
