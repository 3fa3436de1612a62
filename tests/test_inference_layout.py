"""The file of an inferred declaration: it loads as the same stream, in the format of ruff."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.declaration import Answers, Deletes, Field, Limits, OnReject, Start, Stream
from highwater.declaration_parts import ON_REJECT, RESERVED_COLUMNS
from highwater.formats import Avro, BigEndian, Format, Json, KeyFormat, Protobuf, Text
from highwater.inference import infer
from highwater.sources import Header, Key, Meta
from highwater.stream_source import to_source
from tests.helpers.inferred import (
    build_records,
    changes,
    github_events,
    list_sentences,
    list_types,
    load_stream,
    opaque,
    orders,
    telemetry,
)


def lines() -> list[tuple[Any, Any]]:
    return [(None, f"{n},n{n},{n}.5".encode()) for n in range(20)]


@pytest.mark.parametrize("sample", [changes, github_events, telemetry, orders, lines, list_sentences, opaque])
def test_the_file_declares_the_same_stream_in_the_format_of_ruff(
    sample: Callable[[], list[tuple[Any, Any]]], tmp_path: Path
) -> None:
    found = infer("shop", build_records(sample()))
    source = to_source(found.stream, comments=found.comments, field_comments=found.field_reasons)
    assert load_stream(source, tmp_path) == found.stream
    assert "declaration_parts" not in source
    assert_formatted([source], tmp_path)


def test_numbers_in_text_are_text_and_the_reason_names_the_declaration_that_reads_numbers() -> None:
    records = build_records([(f"p-{n}", {"parcel": f"p-{n}", "weight": f"{n}.250"}) for n in range(40)])
    found = infer("parcels", records)
    assert list_types(found)["weight"] == "string"
    assert "text=True" in found.field_reasons["weight"]


def assert_formatted(sources: Sequence[str], folder: Path, *, rules: bool = True) -> None:
    """Ruff would change none of the files, and finds no fault in them."""
    (folder / "__init__.py").touch()  # else each would be a fault, as a file of no package
    files = [folder / f"file{number}.py" for number, _ in enumerate(sources)]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source)
    configuration = ["--config", str(Path(__file__).parent.parent / "pyproject.toml")]
    commands = [["format", "--diff"]]
    # Any text may be a comment that looks like code, or has letters that look like others.
    commands += [["check", "--no-cache"]] if rules else []
    for command in commands:
        names = [*map(str, files)]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *configuration, *names],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in RESERVED_COLUMNS | {"version", "event_time"}
)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=90)
SCALARS = st.sampled_from(["string", "long", "integer", "double", "boolean", "date", "binary", "json", "decimal(12,2)"])
STEPS = st.from_regex(r'[^"\\\x00-\x1f\x7f]{1,20}', fullmatch=True)
SOURCES = st.one_of(
    st.none(),
    STEPS.map(lambda step: f'["{step}"]'),
    STEPS.map(Header),
    st.just(Key()),
    st.just(Key("payload.id")),
    st.just(Meta("offset")),
    st.just(("after.id", "before.id")),
)


FIELDS = st.builds(
    lambda name, kind, source, optional, nullable: Field(
        name, kind, source=source, optional=optional, nullable=nullable
    ),
    NAMES,
    SCALARS,
    SOURCES,
    st.booleans(),
    st.booleans(),
)


STRUCTS = st.builds(
    lambda name, members: Field(name, "array", of=Field("element", "struct", of=tuple(members))),
    NAMES,
    st.lists(FIELDS.map(lambda one: replace(one, source=None)), min_size=1, max_size=4, unique_by=lambda one: one.name),
)


FORMATS: st.SearchStrategy[Format] = st.sampled_from([Json(), Json(registry=True), Avro(), Protobuf()])


@st.composite
def declarations(draw: st.DrawFn) -> Stream:
    fields = draw(st.lists(st.one_of(FIELDS, STRUCTS), max_size=8, unique_by=lambda one: one.name))
    keyed = draw(st.booleans())
    more: dict[str, Any] = {}
    if keyed:
        fields = [Field("the_key", "string", source=Key()), Field("version", "long", source=Meta("offset")), *fields]
        fields = list({one.name: one for one in reversed(fields)}.values())[::-1]
        more = {"key": ("the_key",), "version": "version", "deletes": Deletes(tombstones=True)}
    if draw(st.booleans()):
        at = st.datetimes(datetime(2000, 1, 1), datetime(2030, 1, 1))  # noqa: DTZ001 - the zone is written beside it
        more["start"] = draw(st.one_of(st.just(Start.LATEST), at.map(lambda one: f"{one.isoformat()}Z")))
    if draw(st.booleans()):
        more["limits"] = Limits(max_wait=draw(st.timedeltas(timedelta(0), timedelta(days=3))))
        more["tiers"] = (timedelta(seconds=draw(st.integers(1, 9))), timedelta(minutes=5))
        more["on_reject"] = {**ON_REJECT, "malformed": OnReject.RETRY}
    deep = any(one.source == Key("payload.id") for one in fields)
    formats: list[KeyFormat] = [Json(), Avro(), Protobuf()] if deep else [Text(), BigEndian(4)]
    key_format = draw(st.sampled_from(formats))
    checks = ["warn", "ignore", "strict"] if key_format == Text() else ["ignore"]
    return Stream(
        name=draw(NAMES),
        topic="t.1",
        key_format=key_format,
        fields=tuple(fields),
        value=draw(FORMATS),
        description=draw(TEXTS),
        record_key=draw(st.sampled_from(checks)),
        answers=Answers(draw(TEXTS), draw(TEXTS), draw(TEXTS)),
        **more,
    )


@settings(max_examples=60)
@given(declarations(), TEXTS)
def test_any_declaration_is_the_same_when_its_file_is_loaded(stream: Stream, comment: str) -> None:
    source = to_source(
        stream,
        summary=comment,
        comments={"key": comment, "fields": comment, "deletes": comment},
        field_comments={one.name: comment for one in stream.fields[::2]},
    )
    held: dict[str, Any] = {}
    exec(compile(source, "stream.py", "exec"), held)
    assert held["STREAM"] == stream


def test_any_declaration_is_in_the_format_of_ruff(tmp_path: Path) -> None:
    sources: list[str] = []

    @settings(max_examples=60, database=None, derandomize=True)
    @given(declarations(), TEXTS)
    def collect(stream: Stream, comment: str) -> None:
        sources.append(
            to_source(
                stream,
                comments={"key": comment},
                field_comments={stream.fields[0].name: comment} if stream.fields else {},
            )
        )

    collect()
    assert_formatted(sources, tmp_path, rules=False)
