"""The commands `infer` and `try` on a real broker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.resources.lake import Lake
from highwater.stream_files import find_streams_folder, load_streams
from tests.helpers.support import Message, customers, send

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

TopicFactory = Callable[..., str]
RECORDS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder of declared streams."""
    copy = tmp_path / "streams"
    shutil.copytree(find_streams_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def run(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Runs the command with a deployment of the test's own."""

    def command(*arguments: str, bootstrap: str = "", **more: str) -> Result:
        environment = {
            "HIGHWATER_HOME": str(tmp_path),
            "HIGHWATER_KAFKA_BOOTSTRAP": bootstrap or request.getfixturevalue("bootstrap"),
            **more,
        }
        return CliRunner().invoke(main, ["--declarations", str(folder), *arguments], env=environment)

    return command


def parcel(number: int) -> Message:
    value: dict[str, Any] = {"parcel": f"p{number % 10}", "version": number // 10 + 1, "place": "depot"}
    value["scanned_at"] = f"2026-03-01T10:00:{number:02d}Z"
    return Message(value["parcel"].encode(), json.dumps(value).encode(), partition=number % 2)


@pytest.mark.slow
def test_a_topic_is_inferred_declared_and_tried(
    run: Callable[..., Result], folder: Path, topic: TopicFactory, bootstrap: str
) -> None:
    name = topic("parcels", partitions=2)
    send(bootstrap, name, map(parcel, range(RECORDS)))
    shown = run("infer", name, "--name", "parcels")
    assert shown.exit_code == 0, shown.output
    assert "parcel equals the record key in all 60 sampled records" in shown.output
    stream = load_streams(folder)["parcels"]
    assert (stream.topic, stream.key, stream.version, stream.event_time) == (name, ("parcel",), "version", "scanned_at")

    again = run("infer", name, "--name", "parcels")
    assert (again.exit_code, "--force" in again.stderr) == (EXIT_PERMANENT, True)
    assert run("infer", name, "--name", "parcels", "--force").exit_code == 0

    other = run("infer", name, "--name", "others")
    assert (other.exit_code, "declared twice" in other.stderr) == (EXIT_PERMANENT, True)
    assert not (folder / "others.py").exists()

    send(bootstrap, name, [Message(b"p1", b"{"), Message(b"p1", None)])
    counts = json.loads(run("try", "parcels", "--json").output)
    assert (counts["records"], counts["events"], counts["tombstones"], counts["rejected"]) == (62, 60, 1, 1)
    assert "reject: malformed" in run("try", "parcels").output

    few = json.loads(run("infer", name, "--records", "10", "--print", "--json").output)
    assert few["classified"]["records"] == 10

    empty = topic("empty")
    assert "no committed records" in run("infer", empty, "--print").stderr
    absent = run("infer", f"{name}x", "--print")
    assert (absent.exit_code, name in absent.stderr) == (EXIT_PERMANENT, True)


@pytest.mark.slow
def test_a_key_and_a_version_are_found_though_a_sample_has_each_key_once(
    run: Callable[..., Result], folder: Path, topic: TopicFactory, bootstrap: str
) -> None:
    """The keys are bytes, so only records of the same sensor show which field is theirs."""

    def reading(number: int) -> Message:
        sensor = number % 200
        value = {"sensor": f"s-{sensor}", "seq": number // 200, "ts": 1_767_225_600_000 + number}
        return Message(b"\xff" + sensor.to_bytes(2, "big"), json.dumps(value).encode(), partition=sensor % 2)

    name = topic("readings", partitions=2)
    send(bootstrap, name, map(reading, range(600)))
    shown = run("infer", name, "--name", "readings", "--records", "100")
    assert shown.exit_code == 0, shown.output
    stream = load_streams(folder)["readings"]
    assert (stream.key, stream.version) == (("sensor",), "seq")


def test_records_of_a_file_are_tried_without_a_broker(run: Callable[..., Result], tmp_path: Path) -> None:
    value = {"order_id": "o-1", "version": 1, "status": "placed", "customer_id": "c1", "amount": 12.5}
    value["event_time"] = "2026-03-01T10:00:00Z"
    lines = [
        {"key_hex": b"o-1".hex(), "value_hex": json.dumps(value).encode().hex(), "headers": [], "timestamp_ms": 1},
        {"key_hex": b"o-2".hex(), "value_hex": b"{}".hex()},
        {"key_hex": b"o-2".hex(), "value_hex": None},
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run("try", "orders", "--file", str(file), "--json", bootstrap="127.0.0.1:1")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.output)
    assert (counts["events"], counts["tombstones"], counts["rejected"]) == (1, 1, 1)
    assert counts["rejects"][0]["offset"] == 1
    shown = run("try", "orders", "--file", str(file), bootstrap="127.0.0.1:1")
    assert "reject: malformed" in shown.output


COMPUTED = """
from highwater.declaration import Answers, Deletes, Field, Lookup, Stream

STREAM = Stream(
    name="computed",
    topic="computed",
    fields=(
        Field("id", "string"),
        Field("n", "integer"),
        Field("whole", "string", expression="concat(id, '/', n)"),
        Field("gone", "boolean", expression="n = 0"),
    ),
    key=("whole",),
    version="n",
    record_key="ignore",
    deletes=Deletes("gone", (True,)),
    rules={"few": "n < 10", "spread": "100 / (n - 7) <> 0"},
    lookup=Lookup("id", "reference/customers", "customer_id"),
    answers=Answers("By key.", "Once.", "A person reads them."),
)
"""


@pytest.mark.slow
def test_rules_expressions_and_lookups_are_tried_in_spark(
    run: Callable[..., Result], folder: Path, spark_server: SparkConnect, tmp_path: Path
) -> None:
    (folder / "computed.py").write_text(COMPUTED)
    customers(Lake(str(tmp_path / "lake")))
    values = [{"id": "c1", "n": n} for n in (1, 2, 0, 11, 7)] + [{"id": "nobody", "n": 1}, {"id": "c1"}, None]
    file = tmp_path / "records.jsonl"
    lines = [{"key_hex": None, "value_hex": None if one is None else json.dumps(one).encode().hex()} for one in values]
    file.write_text("\n".join(map(json.dumps, lines)))
    given = {"SPARK_REMOTE": spark_server.remote, "HIGHWATER_LAKE": str(tmp_path / "lake")}
    result = run("try", "computed", "--file", str(file), "--json", bootstrap="127.0.0.1:1", **given)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    counts = [found[name] for name in ("events", "deletes", "tombstones", "keys", "left_out")]
    assert counts == [2, 1, 1, 3, []]
    assert {(one["reason"], one["rule"], one["offset"]) for one in found["rejects"]} == {
        ("invalid", "few", 3),
        ("invalid", "spread", 4),
        ("unresolved", None, 5),
        ("malformed", None, 6),
    }
    details = {one["offset"]: one["detail"] for one in found["rejects"]}
    assert details[3] == "rule few is not met: n < 10"
    assert details[4] == "rule spread fails on this record: 100 / (n - 7) <> 0"
    without = run("try", "computed", "--file", str(file), "--no-spark", bootstrap="127.0.0.1:1")
    assert "left out: field whole, field gone, rule few, rule spread, the lookup of id; --spark" in without.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("try", "nobody"), "declared are orders"),
        (("infer", "t", "--subject", "s", "--print"), "HIGHWATER_SCHEMA_REGISTRY_URL"),
        (("infer", "t", "--name", "orders"), "--force"),
    ],
)
def test_errors_say_what_to_do(run: Callable[..., Result], arguments: tuple[str, ...], expected: str) -> None:
    result = run(*arguments, bootstrap="127.0.0.1:1")
    assert result.exit_code == EXIT_PERMANENT
    assert expected in result.stderr
