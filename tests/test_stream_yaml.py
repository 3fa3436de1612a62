"""Streams declared in YAML: equal to those of Python, with errors that name file and field, as Dagster components."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest
import yaml

from assets.streams.orders import STREAM
from highwater.declaration import Field, Stream
from highwater.errors import DeclarationError
from highwater.formats import BigEndian, Json
from highwater.sources import Header, Key, Rest
from highwater.stream_files import load_streams, read_streams
from highwater.stream_yaml import TYPE, build_stream_model, load_yaml, to_stream

ORDERS = """
type: highwater.orchestration.components.StreamComponent
attributes:
  name: orders
  topic: orders
  description: The states of every order, in the order in which they happened.
  fields:
    - {name: order_id, type: string}
    - {name: version, type: integer, at_least: 1}
    - {name: status, type: string, one_of: [placed, paid, refunded, canceled]}
    - {name: customer_id, type: string}
    - {name: amount, type: "decimal(12,2)", at_least: 0}
    - {name: event_time, type: timestamp}
  key: [order_id]
  version: version
  first_version: 1
  event_time: event_time
  record_key: strict
  transitions:
    field: status
    first: placed
    allowed: {placed: [paid, canceled], paid: [refunded]}
  lookup: {field: customer_id, table: reference/customers, column: customer_id}
  limits: {max_offsets: 200000, min_offsets: 1000, max_wait: 20s}
  tiers: [10s, 5m, PT1H]
  metrics: {status: status, amount: amount, mean_of: [paid]}
  publishes: {topic: orders.accepted}
  answers:
    does_order_matter: "Yes, for each order: the highest version is the order's state, whenever it arrives."
    what_about_duplicates: The same version with the same content counts once; other content is a conflict.
    what_on_failure: Malformed and invalid records are parked for a person; unknown customers are retried.
"""

SMALL = """
name: small
topic: small
fields: [{name: id, type: string}]
answers: {does_order_matter: "No.", what_about_duplicates: None are known., what_on_failure: A person reads them.}
"""


def small(**changes: object) -> dict[str, object]:
    return {**yaml.safe_load(SMALL), **changes}


def write(file: Path, attributes: dict[str, object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"type": TYPE, "attributes": attributes}))
    return file


def declared(**changes: object) -> Stream:
    return to_stream(build_stream_model().model_validate(small(**changes)))


def test_the_shipped_stream_is_the_same_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "defs.yaml").write_text(ORDERS)
    assert load_yaml(tmp_path / "defs.yaml") == [STREAM]


def test_attributes_are_those_of_the_dataclass() -> None:
    properties = build_stream_model().model_json_schema()["properties"]
    assert [*properties] == [field.name for field in dataclasses.fields(Stream)]


def test_every_format_and_source_has_a_name_in_yaml() -> None:
    """A new format must not be left out of YAML."""
    text = str(build_stream_model().model_json_schema()["$defs"])
    hints = typing.get_type_hints(Stream)
    for cls in (*typing.get_args(hints["value"]), *typing.get_args(hints["key_format"]), Key, Header, Rest):
        assert f"{cls.__name__}Choice" in text


def test_sources_formats_and_nested_fields_are_read() -> None:
    stream = declared(
        fields=[
            {"name": "id", "type": "string", "source": {"key": None}},
            {"name": "trace", "type": "string", "source": [{"header": {"name": "t"}}, "meta.trace"]},
            {
                "name": "lines",
                "type": "array",
                "of": {"name": "line", "type": "struct", "of": [{"name": "n", "type": "long"}]},
            },
            {"name": "rest", "type": "json", "source": {"rest": {"within": "a"}}, "optional": True},
            {"name": "mail", "type": "string", "mask": "hash"},
        ],
        value="json",
        key_format={"big_endian": {"size": 4}},
        record_key="ignore",
        start="2026-03-01T00:00:00+00:00",
    )
    assert stream.fields == (
        Field("id", "string", source=Key()),
        Field("trace", "string", source=(Header("t"), "meta.trace")),
        Field("lines", "array", of=Field("line", "struct", of=(Field("n", "long"),))),
        Field("rest", "json", source=Rest("a"), optional=True),
        Field("mail", "string", mask="hash"),
    )
    assert (stream.value, stream.key_format, stream.start) == (Json(), BigEndian(4), "2026-03-01T00:00:00+00:00")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topic": None}, r"attributes\.topic: Input should be a valid string"),
        ({"topik": "x"}, r"attributes\.topik: Extra inputs"),
        ({"fields": [{"name": "id", "type": "string", "at_least": "x"}]}, r"attributes\.fields\[0\]\.at_least: .*'x'"),
        (
            {"fields": [{"name": "id", "type": "string", "source": {"header": {"nam": "x"}}}]},
            r"attributes\.fields\[0\]\.source\.header\.name: Field required",
        ),
        (
            {"fields": [{"name": "id", "type": "string", "mask": "md5"}]},
            r"attributes\.fields\[0\]\.mask: Input should be 'hash' or 'drop'",
        ),
        ({"value": "jsn"}, r"attributes\.value: write one of json, avro, protobuf, csv, lines, raw"),
        ({"limits": {"max_wait": "soon"}}, r"attributes\.limits\.max_wait: .*'soon'"),
        ({"fields": [{"name": "id", "type": "strng"}]}, r"field 'id': unknown type 'strng'"),
    ],
)
def test_an_error_names_the_file_and_the_field(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    file = write(tmp_path / "small" / "defs.yaml", small(**changes))
    with pytest.raises(DeclarationError, match=said) as caught:
        load_streams(tmp_path)
    assert str(file) in caught.value.problem


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "defs.yaml").write_text("a: [")
    with pytest.raises(DeclarationError, match="cannot be read as YAML"):
        load_streams(tmp_path)


@pytest.mark.parametrize("twice", ["  topic: others\n", "  deletes: {field: a, field: b}\n"])
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, twice: str) -> None:
    """YAML's own rule is that the last one counts: a stream silently read another topic."""
    file = tmp_path / "defs.yaml"
    file.write_text(ORDERS + twice)
    with pytest.raises(DeclarationError, match="is there twice") as caught:
        load_yaml(file)
    assert f"line {len(ORDERS.splitlines()) + 1}," in str(caught.value)


def test_a_folder_has_streams_of_both_kinds(tmp_path: Path) -> None:
    write(tmp_path / "small" / "defs.yaml", small())
    (tmp_path / "orders.py").write_text("from assets.streams.orders import STREAM\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "defs.yaml").write_text("type: dagster.FunctionComponent\nattributes: {}\n")
    assert sorted(load_streams(tmp_path)) == ["orders", "small"]


def test_a_file_with_a_fault_stops_its_own_stream_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "small" / "defs.yaml", small(topik="x"))
    (tmp_path / "orders.py").write_text("from assets.streams.orders import STREAM\n")
    found = read_streams(tmp_path)
    assert [*found.streams] == ["orders"]
    assert [*found.faults] == [file]


def test_a_topic_that_yaml_declares_again_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "small" / "defs.yaml", small(topic="orders"))
    (tmp_path / "orders.py").write_text("from assets.streams.orders import STREAM\n")
    with pytest.raises(DeclarationError, match="the topic 'orders' is declared twice") as caught:
        load_streams(tmp_path)
    assert "small/defs.yaml" in str(caught.value)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of Dagster's own layout, with the two streams `orders` and `small` as components."""
    module = "shop_" + "".join(letter for letter in tmp_path.name if letter.isalnum())
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "{module}"\n'
    )
    defs = tmp_path / "src" / module / "defs"
    write(defs / "small" / "defs.yaml", small())
    (defs / "orders").mkdir()
    (defs / "orders" / "defs.yaml").write_text(ORDERS)
    for folder in (defs, defs.parent):
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    return tmp_path


def test_components_make_what_build_defs_makes(project: Path, tmp_path: Path) -> None:
    import dagster as dg

    from highwater.orchestration.build import build_defs

    [file] = tmp_path.rglob("small/defs.yaml")
    mine = dg.load_from_defs_folder(path_within_project=project).get_repository_def()
    expected = build_defs(streams=[STREAM, *load_yaml(file)]).get_repository_def()
    assert {job.name for job in mine.get_all_jobs()} == {job.name for job in expected.get_all_jobs()}
    assert sorted(one.name for one in mine.sensor_defs) == sorted(one.name for one in expected.sensor_defs)
    assert mine.asset_graph.get_all_asset_keys() == expected.asset_graph.get_all_asset_keys()
    assert mine.asset_graph.asset_check_keys == expected.asset_graph.asset_check_keys


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("type: strng", "unknown type 'strng'"), ("tpe: string", r"attributes\.fields\.0\.tpe at ")],
)
def test_dagster_names_the_file_of_a_component_and_the_field(project: Path, wrong: str, said: str) -> None:
    import dagster as dg

    [file] = project.rglob("small/defs.yaml")
    file.write_text(file.read_text().replace("type: string", wrong))
    with pytest.raises(Exception, match="Error while loading component small") as caught:
        dg.load_from_defs_folder(path_within_project=project)
    assert str(file) in str(caught.value.__cause__)
    assert re.search(said, str(caught.value.__cause__))
