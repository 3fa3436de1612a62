"""Bad input: each fault is reported with both values and a remedy, and once its cause is fixed the tables end equal.

Ticks are those of the real sensor, runs those of the real job, statuses those of the real command."""

from __future__ import annotations

import sqlite3
import string
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from dev.failing import Failing, failing
from dev.processes import wait_until
from highwater import settings
from highwater.errors import KAFKA, DeclarationError, PermanentError
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.checks import Sources
from highwater.orchestration.sensing.repairing import repair
from highwater.resources.dependency_guards import COOL_DOWN, FAILURES
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.slices import OffsetRange, Slice
from tests.conftest import create_topic
from tests.helpers.crash_support import PARTITIONS, Deployment
from tests.helpers.faults import (
    MENDED,
    PERMANENT,
    TEMPORARY,
    Ours,
    configure,
    ensure_decided,
    ensure_rows,
    find_failure,
    read_rows_by_place,
)
from tests.helpers.support import order_message, read_topic, send

if TYPE_CHECKING:
    from click.testing import Result

    from dev.broker import EmbeddedBroker
    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory


pytestmark = pytest.mark.slow


def tried_again(result: dg.ExecuteInProcessResult) -> str:
    """The error of a step that was tried again and came to nothing: a temporary one."""
    assert any(event.event_type_value == "STEP_UP_FOR_RETRY" for event in result.all_events), find_failure(result)
    return str(next(event for event in result.all_events if event.is_step_failure).step_failure_data.error)


def stored_foreign(held: Deployment) -> str:
    """A slice of another stream in the same ledger."""
    slice_ = Slice("payments", "payments", "AAAAAAAAAAAAAAAAAAAAAA", 0, 0, {0: OffsetRange(0, 1)}, datetime.now(UTC))
    assert Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}").add([slice_])
    return slice_.key


def test_keys_that_name_no_slice_of_the_stream(ours: Ours) -> None:
    ours.held.send(60)
    [planned] = ours.taken()
    topic = ours.held.stream.topic
    foreign = stored_foreign(ours.held)
    no_key, lists = "write <topic>@<ordinal of 7 digits>", "highwater slices STREAM lists the keys"
    nothing = "no slice of that key"
    wrong = {
        f"{topic}@0000099": ((f"{planned} is the last of orders", f"{topic}@0000099"), lists),
        foreign: (("stream payments", "stream orders"), "request it from payments"),
        **{key: ((nothing, key), no_key) for key in (DROPS, f"{topic}@0000000' OR '1'='1", '"@0000000')},
    }
    for key, (values, remedy) in wrong.items():
        ours.instance.add_dynamic_partitions("orders_slices", [key])
        reported = find_failure(ours.run(key))
        assert (reported["error"], reported["stored"], reported["found"]) == ("UnknownSliceError", *values)
        assert remedy in reported["remedy"]
        tick = ours.repair()
        assert not tick.run_requests
        assert f"1 no slices of the stream by the ledger, delete their keys from Dagster: {key}" in str(
            tick.skip_message
        )
        ensure_refused(ours.command("explain", key), key)
        ours.instance.delete_dynamic_partition("orders_slices", key)
    ours.held.send(60)
    assert len(ours.taken()) == 1
    ours.held.check_whole()


DROPS = "x'); DROP TABLE slices; --"


def ensure_refused(reported: Result, key: str) -> None:
    """The command names the key, or the topic that is none of the declared streams', and a remedy."""
    assert reported.exit_code == PERMANENT, reported.output
    assert "remedy: " in reported.output
    assert f"found:  {key}" in reported.output or "no stream has a topic 'payments'" in reported.output


def test_a_range_of_transaction_markers_alone(ours: Ours) -> None:
    held = ours.held
    held.abort()
    [key] = ours.taken()
    assert all(start < end for start, end in held.slices()[key].values())
    assert key in held.slice_commits("raw")
    ensure_rows(held, {})
    held.check_whole()
    held.send(60)
    ours.taken()
    held.check_whole()


def test_a_topic_that_was_compacted(ours: Ours, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that Kafka no longer has stay; a range that was compacted before it was read has gaps."""
    config = {"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"}
    name = topic("compacted", partitions=1, **config)
    held = replace(ours.held, stream=replace(ours.held.stream, topic=name))
    ours = Ours.on(held, ours.instance)
    send(held.bootstrap, name, [order_message(f"o{n % 4}", n // 4 + 1) for n in range(40)])
    [first] = ours.taken()
    before = read_topic(held.bootstrap, name)
    ensure_rows(held, before)
    [gappy], seen = compacted(ours, name)
    start, end = held.slices()[gappy][0]
    assert 0 < sum(start <= offset < end for _, offset in read_rows_by_place(held)) < end - start
    again = ours.run(first)
    assert again.success, [event for event in again.all_events if event.is_failure]
    reported = [
        event.step_materialization_data.materialization.metadata for event in again.get_asset_materialization_events()
    ]
    notes = [str(metadata["note"].value) for metadata in reported if "note" in metadata]
    assert any("Kafka would give" in note and "the commit recorded 40" in note for note in notes)
    # The cleaner goes on while the slice is read.
    taken = read_rows_by_place(held).items()
    assert (before | read_topic(held.bootstrap, name)).items() <= taken <= (before | seen).items()
    ensure_decided(held)
    # The test's producer pays its orders again and again; compaction alone makes nothing red.
    assert {one.check for one in red(held)} == {"transitions_allowed"}


def red(held: Deployment) -> list[Failing]:
    """The checks that fail in complete slices, those that the stream only warns of among them."""
    sources = Sources(Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}"), Kafka(held.bootstrap, {}), held.lake)
    return [*failing(sources, held.stream)]


def compacted(ours: Ours, name: str) -> tuple[list[str], dict[tuple[int, int], tuple[bytes | None, bytes | None]]]:
    """Send until the cleaner has been there, and take what is left of it; returns the slices, and what was left."""
    sent = [40]
    left: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}

    def gone() -> bool:
        send(ours.held.bootstrap, name, [order_message(f"o{sent[0] % 4}", sent[0] // 4 + 1)])
        sent[0] += 1
        left.clear()
        left.update(read_topic(ours.held.bootstrap, name))
        return min(offset for _, offset in left) > 40

    wait_until(gone, 120, "compaction")
    return ours.taken(), left


def test_an_open_transaction_is_waited_for(ours: Ours) -> None:
    from confluent_kafka import Producer

    held = ours.held
    held.send(60)
    [before] = ours.planned()
    producer = Producer({"bootstrap.servers": held.bootstrap, "transactional.id": f"open-{held.stream.topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    message = order_message("open", 1, partition=0)
    held.ends[message.value or b""] = "event"
    producer.produce(held.stream.topic, key=message.key, value=message.value, partition=0)
    producer.flush(30)
    result = ours.tick()
    name = held.stream.topic
    assert f"nothing new in {name}; 1 offsets of {name} follow an open transaction" in str(result.skip_message)
    reported = ours.command("plan", "orders")
    assert (reported.exit_code, "1 offsets of" in reported.output) == (MENDED, True)
    producer.commit_transaction(30)
    wait_until(lambda: bool(ours.planned()), 30, "a slice of the transaction's records")
    ours.took(before, [*held.slices()][-1])
    held.check_whole()


def test_a_slice_that_cannot_be_written(ours: Ours) -> None:
    """The table is there and is read; files are where folders of data files would be, so a task of Spark's fails."""
    held = ours.held
    held.send(60)
    ours.taken()
    held.send(60)
    [key] = ours.planned()
    # Each data file gets a folder of one letter or digit.
    folders = {"delta.randomizeFilePrefixes": "true", "delta.randomPrefixLength": "1"}
    DeltaTable(str(held.path("raw"))).alter.set_table_properties(folders)
    in_the_way = [held.path("raw") / name for name in string.ascii_letters + string.digits]
    for file in in_the_way:
        file.write_text("in the way")
    reported = tried_again(ours.run(key))
    assert f"DependencyUnavailableError: the lake's storage failed at {held.path('raw')}; found: " in reported
    assert "is not a directory" in reported
    assert "remedy: check that HIGHWATER_LAKE may be written" in reported
    assert key not in held.slice_commits("raw")
    asked = ours.command("explain", key)
    assert (asked.exit_code, "incomplete: raw, events, rejects" in asked.output) == (MENDED, True)
    assert f"1 requested again: {key}" in repair_lines(ours)
    for file in in_the_way:
        file.unlink()
    ours.repaired()
    held.check_whole()


def repair_lines(ours: Ours) -> list[str]:
    """What a tick of repair says in its log."""
    return [*repair(ours.instance, SimpleNamespace(**(ours.defs.resources or {})), ours.held.stream, None).lines]


def test_a_lake_that_cannot_be_read(ours: Ours) -> None:
    """A file is where the table's folder would be: what even root cannot write over."""
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    held.path("raw").parent.mkdir(parents=True)
    held.path("raw").write_text("in the way")
    reported = tried_again(ours.run(key))
    assert "DependencyUnavailableError: the lake" in reported
    found = ("found: Generic LocalFileSystem error: ", "_delta_log: Not a directory")
    for text in (str(held.path("raw")), *found, "remedy: check that HIGHWATER_LAKE"):
        assert text in reported
    asked = ours.command("explain", key)
    assert asked.exit_code == TEMPORARY, asked.output
    assert "_delta_log: Not a directory" in asked.output
    held.path("raw").unlink()
    ours.repaired()
    held.check_whole()


def test_a_locked_ledger(ours: Ours) -> None:
    held = ours.held
    held.send(60)
    ours.tick()
    [key] = held.slices()
    held.send(30)
    lock = sqlite3.connect(held.home / "ledger.sqlite", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    try:
        result = ours.tick()
        reason = str(result.skip_message)
        for text in ("ledger.sqlite does not answer", "found: database is locked", "a process that holds its lock"):
            assert text in reason
        reported = ours.command("plan", "orders", "--yes")
        assert reported.exit_code == TEMPORARY
        assert "database is locked" in reported.output
        assert [*held.slices()] == [key]
        shown = tried_again(ours.run(key))
        assert "DependencyUnavailableError: " in shown
        assert "does not answer; found: database is locked; remedy: look for a process" in shown
        assert key not in held.slice_commits("raw")
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    [behind] = ours.planned()
    ours.repaired()
    assert {key, behind} == set(held.slice_commits("raw"))
    held.check_whole()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own."""
    from dev.broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path / "mortal") as started:
        yield started


# Spark's consumer waits two minutes for a broker; a test need not.
IMPATIENT = {
    "kafkaConsumer.pollTimeoutMs": "3000",
    "kafka.default.api.timeout.ms": "4000",
    "kafka.request.timeout.ms": "3000",
}


def test_a_broker_that_is_unavailable_before_and_during_a_run(
    mortal: EmbeddedBroker,
    spark_server: SparkConnect,
    instance: dg.DagsterInstance,
    soon: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_topic(mortal.bootstrap, "orders", PARTITIONS, {})
    held = Deployment.make("orders", tmp_path, mortal.bootstrap, {settings.SPARK_REMOTE: spark_server.remote})
    configure(held, monkeypatch)
    ours = Ours.on(held, instance)
    held.send(60)
    ours.tick()
    [key] = held.slices()
    with monkeypatch.context() as patch:
        killed_while_reading(mortal, patch)
        reported = tried_again(ours.run(key))
    for text in ("DependencyUnavailableError: ", "Kafka", "found: ", "remedy: check that the broker"):
        assert text in reported
    assert key not in held.slice_commits("raw")
    result = ours.tick()
    reason = str(result.skip_message)
    assert f"Kafka at {mortal.bootstrap} did not answer" in reason
    assert "HIGHWATER_KAFKA_BOOTSTRAP" in reason
    assert ours.command("plan", "orders").exit_code == TEMPORARY
    breakers = Ledger(f"sqlite:///{held.home / 'ledger.sqlite'}").breakers
    for _ in range(FAILURES):
        ours.tick()
    assert breakers.read_dependency(KAFKA).state == "open"
    refused = find_failure(ours.run(key))
    assert refused["error"] == "BreakerOpenError", "and the step waits for nothing"
    assert "kafka is not asked" in refused["problem"]
    mortal.start()
    breakers.change(KAFKA, lambda row: replace(row, since=datetime.now(UTC) - COOL_DOWN))
    ours.repaired()
    assert breakers.read_dependency(KAFKA).state == "closed"
    held.check_whole()


def killed_while_reading(broker: EmbeddedBroker, patch: pytest.MonkeyPatch) -> None:
    from highwater.assets import raw
    from highwater.resources.kafka import Kafka

    options, read = Kafka.build_spark_options, raw._read
    patch.setattr(Kafka, "build_spark_options", lambda self: {**options(self), **IMPATIENT})

    def reading(*given: Any) -> Any:
        broker.kill()
        return read(*given)

    patch.setattr(raw, "_read", reading)


DO_NOT_PARSE = {
    "STREAM = Stream(": "SyntaxError",
    "from nowhere import STREAM": "ModuleNotFoundError",
    "STREAM = 'orders'": "STREAM is str",
}


def test_a_declaration_that_does_not_parse(ours: Ours) -> None:
    """Its file alone is skipped, with a warning; fixed, the deployment plans and reads what came meanwhile."""
    assert ours.command("slices", "orders").exit_code == MENDED
    folder = ours.held.home / "streams"
    broken = folder / "broken.py"
    for text, reported in DO_NOT_PARSE.items():
        broken.write_text(text)
        with pytest.raises(DeclarationError, match=r"broken\.py") as caught:
            declared(ours, folder)
        assert isinstance(caught.value, PermanentError)
        assert caught.value.stored == f"{broken}"
        assert reported in str(caught.value.found)
        assert "docs/streams.md" in caught.value.remedy
        shown = ours.command("plan", "orders")
        assert shown.exit_code == MENDED
        assert f"{broken} is skipped" in shown.stderr
        assert reported in shown.stderr
    ours.held.send(60)
    broken.write_text(OTHER_DECLARED)
    fixed = declared(ours, folder)
    assert {"orders_slice", "other_slice"} <= {*fixed.defs.get_repository_def().job_names}
    assert len(fixed.taken()) == 1
    fixed.held.check_whole()


def declared(ours: Ours, folder: Path) -> Ours:
    """The deployment with the definitions that a folder of declarations gives."""
    from highwater.stream_files import load_streams

    return replace(ours, defs=build_defs(streams=[*load_streams(folder).values()]))


OTHER_DECLARED = """
from dataclasses import replace
from tests.helpers.crash_support import build_stream
STREAM = replace(build_stream("other"), name="other")
"""
