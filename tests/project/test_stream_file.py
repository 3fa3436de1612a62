"""A new stream is one short file: nothing else is changed, and it goes through its slices and their checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from highwater.errors import DeclarationError
from highwater.orchestration.asset_keys import TABLES, build_table_key
from highwater.orchestration.build import build_defs
from highwater.stream_files import find_streams_folder, load_streams
from tests.helpers.support import Message, read_rows, send

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory

SHIPMENTS = '''"""Shipments: where a parcel is; the highest scan number counts."""

from highwater.declaration import Answers, Field, Limits, Stream, Transitions

STREAM = Stream(
    name="shipments",
    topic="TOPIC",
    description="Scans of parcels on their way.",
    fields=(
        Field("parcel", "string"),
        Field("scan", "long", at_least=1),
        Field("place", "string", one_of=("depot", "van", "door")),
        Field("scanned_at", "timestamp"),
        Field("topic", "string"),
    ),
    key=("parcel",),
    version="scan",
    event_time="scanned_at",
    transitions=Transitions("place", "depot", {"depot": ("depot", "van"), "van": ("depot", "door")}),
    limits=Limits(max_offsets=6),
    answers=Answers(
        does_order_matter="Yes, for each parcel.",
        what_about_duplicates="They count once.",
        what_on_failure="A person looks at them.",
    ),
)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder of declared streams."""
    copy = tmp_path / "streams"
    shutil.copytree(find_streams_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def scan(parcel: str, number: int, place: str) -> Message:
    plain = {"parcel": parcel, "scan": number, "place": place, "topic": "parcels"}
    plain["scanned_at"] = f"2026-03-01T10:00:{number:02d}Z"
    return Message(parcel.encode(), json.dumps(plain).encode())


@pytest.mark.slow
def test_a_dropped_file_goes_through_its_slices_and_checks(
    folder: Path,
    topic: TopicFactory,
    bootstrap: str,
    spark_server: SparkConnect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = topic("shipments")
    assert len(SHIPMENTS.splitlines()) <= 40
    (folder / "shipments.py").write_text(SHIPMENTS.replace("TOPIC", name))
    for variable, value in {
        "HIGHWATER_KAFKA_BOOTSTRAP": bootstrap,
        "HIGHWATER_LEDGER_URL": f"sqlite:///{tmp_path / 'ledger.sqlite'}",
        "HIGHWATER_LAKE": str(tmp_path / "lake"),
        "SPARK_REMOTE": spark_server.remote,
    }.items():
        monkeypatch.setenv(variable, value)
    streams = load_streams(folder)
    assert sorted(streams) == ["orders", "payments", "shipments"]
    defs = build_defs(streams=list(streams.values()))
    send(bootstrap, name, [scan(p, n, "depot") for n in (1, 2, 3) for p in ("a", "b", "c")] + [scan("a", 4, "attic")])

    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        keys = _plan(defs, instance)
        assert len(keys) == 2
        result = defs.resolve_job_def("shipments_slice").execute_in_process(
            instance=instance,
            tags={"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]},
        )
        assert result.success
        for table in TABLES:
            key = build_table_key(streams["shipments"], table.name)
            assert instance.get_materialized_partitions(key) == set(keys)
        checks = result.get_asset_check_evaluations()
        assert len(checks) == 12 * len(keys)
        assert all(check.passed for check in checks)
        assert {check.partition for check in checks} == set(keys)

    rejects = read_rows(str(tmp_path / "lake" / "shipments" / "rejects"))
    assert [(row["origin_offset"], row["reason"]) for row in rejects] == [(9, "invalid")]
    assert len(read_rows(str(tmp_path / "lake" / "shipments" / "events"))) == 9


def _plan(defs: dg.Definitions, instance: dg.DagsterInstance) -> list[str]:
    sensor = defs.get_repository_def().get_sensor_def("planner")
    with dg.build_sensor_context(instance=instance, resources=defs.resources) as context:
        tick = sensor.evaluate_tick(context)
    for request in tick.dynamic_partitions_requests or []:
        instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
    return list(instance.get_dynamic_partitions("shipments_slices"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("STREAM = Stream(", "cannot be read"),
        ("", "declares no stream"),
        (SHIPMENTS.replace('version="scan"', 'version="place"'), "version must be"),
        (SHIPMENTS.replace('"shipments"', '"orders"'), "name 'orders' is declared twice"),
    ],
)
def test_a_declaration_that_does_not_parse_is_named(folder: Path, text: str, said: str) -> None:
    """Loading the definitions fails with it, and so does every command."""
    (folder / "shipments.py").write_text(text)
    with pytest.raises(DeclarationError, match=said) as raised:
        load_streams(folder)
    assert "shipments.py" in str(raised.value)
    assert raised.value.remedy
