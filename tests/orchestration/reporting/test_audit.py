"""The audit: the ends of all origins sum to what was produced, and what does not agree is reported.

The tables are written here, row by row, without the pipeline.
"""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dev.processes import LOOPBACK, free_port
from highwater.envelope import Origin
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking import origin_counts
from highwater.orchestration.checking.origin_counts import OriginEnds, count_ends, count_parked
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.plans import Discard
from highwater.resources.kafka import Kafka
from tests.helpers.scene import Scene
from tests.helpers.written_tables import LATER, MAIN, NOW, PARKED, RETRIED, STREAM, TIER, Written, a_slice

if TYPE_CHECKING:
    from tests.conftest import TopicFactory


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Ten records: five events, a tombstone, two sent to a tier, one of them accepted, one parked, one discarded."""
    made = Written(tmp_path)
    made.prove(MAIN, {"raw": 10, "events": 5, "rejects": 4, "dlq": 4, "current": 5}, tombstones=1)
    made.add("events", MAIN, range(5))
    made.add("rejects", MAIN, [6, 7], next_topic=TIER)
    made.add("rejects", MAIN, [8, 9], next_topic=PARKED)
    made.add("dlq", MAIN, [6, 7, 8, 9])
    made.prove(RETRIED, {"raw": 2, "events": 1, "rejects": 0, "current": 1})
    made.add("events", RETRIED, [6], retries=1)
    made.ledger.discards.add("orders", [Discard(Origin("orders", 0, 0, 9), "garbage", "ann", NOW)])
    return made


SOUND = OriginEnds(
    produced=10, accepted=6, tombstones=1, waiting={TIER: 1, STREAM.tier_topics[1]: 0}, parked=1, discarded=1
)


def test_every_origin_has_one_end(written: Written) -> None:
    assert written.ends() == SOUND
    assert SOUND.error is None


def test_records_discarded_with_a_copy_under_way_count_as_discarded(written: Written) -> None:
    """The tier that it was sent back to supersedes the copy; it was reported as waiting there for ever."""
    written.ledger.discards.add(
        "orders", [Discard(Origin("orders", 0, 0, offset), "garbage", "ann", NOW) for offset in (6, 7)]
    )
    ends = written.ends()
    assert (ends.accepted, ends.discarded, ends.waiting[TIER], ends.parked, ends.error) == (6, 2, 0, 1, None)
    assert count_parked(written.ledger, written.lake, STREAM) == 1


def test_origins_are_counted_in_ranges(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_counts, "ROWS_AT_ONCE", 2)
    assert written.ends() == SOUND
    written.rows["events"] += [row for row in written.rows["events"] if row.get("origin_offset") == 3]
    assert (written.ends().twice, written.ends().accepted) == (1, 6)


def test_records_rejected_again_count_where_they_were_sent_last(written: Written) -> None:
    again = a_slice(1, 2, TIER)
    written.prove(again, {"raw": 1, "events": 0, "rejects": 1, "current": 0})
    written.add("rejects", again, [7], next_topic=PARKED, retries=1)
    found = written.ends()
    assert (found.waiting[TIER], found.parked, found.unpublished, found.error) == (0, 1, 1, None)
    written.add("dlq", again, [7])
    found = written.ends()
    assert (found.waiting[TIER], found.parked, found.unpublished, found.error) == (0, 2, 0, None)


def test_redriven_records_count_where_they_are_now(written: Written) -> None:
    """Fixed, and sent with its retries counted again: the rejection that was published last is the last one."""
    first, again = a_slice(1, 2, TIER), a_slice(2, 2, TIER)
    written.prove(first, {"raw": 1, "events": 0, "rejects": 1, "dlq": 1, "current": 0})
    written.add("rejects", first, [8], next_topic=PARKED, retries=3)
    written.add("dlq", first, [8], published_at=NOW)
    written.prove(again, {"raw": 1, "events": 0, "rejects": 1, "dlq": 1, "current": 0})
    written.add("rejects", again, [8], next_topic=STREAM.tier_topics[1], retries=1)
    assert (written.ends().unpublished, written.ends().error) == (1, None)
    written.add("dlq", again, [8], published_at=NOW + timedelta(minutes=5))
    found = written.ends()
    assert (found.waiting[STREAM.tier_topics[1]], found.parked, found.error) == (1, 0, None)


def test_rejects_of_another_system_count_by_their_origin(written: Written) -> None:
    """Origins of the main topic end there as in a tier; those in the namespace were not produced on it."""
    theirs = a_slice(0, 6, "sink.errors")
    written.prove(theirs, {"raw": 6, "events": 2, "rejects": 2, "dlq": 2, "current": 2}, tombstones=1, superseded=1)
    written.add("events", theirs, [7], retries=1)
    written.add("rejects", theirs, [8], next_topic=STREAM.tier_topics[1], retries=1)
    namespace = {"origin_topic": "orders.foreign/orders", "retries": 1}
    written.add("events", theirs, [100], **namespace)
    written.add("rejects", theirs, [101], next_topic=PARKED, **namespace)
    written.add("dlq", theirs, [8], published_at=NOW + timedelta(minutes=1))
    written.add("dlq", theirs, [101], published_at=NOW + timedelta(minutes=1), origin_topic="orders.foreign/orders")
    found = written.ends()
    assert (found.accepted, found.tombstones, found.parked, found.error) == (7, 1, 0, None)
    assert found.waiting == {TIER: 0, STREAM.tier_topics[1]: 1}


def test_a_slice_that_is_reprocessed_is_no_error(written: Written) -> None:
    """Some of its origins were accepted in a tier meanwhile: until it is decided they all count as undecided."""
    written.rows["events"] = [row for row in written.rows["events"] if row["slice"] != MAIN.key]
    written.prove(MAIN, {"events": 5}, attempt=2)
    written.add("events", MAIN, range(5))
    found = written.ends()
    assert (found.undecided, found.accepted, found.error) == (10, 0, None)


def test_unfinished_slices_are_no_error(written: Written) -> None:
    """Read and not decided; decided, and the rejects not written; reprocessed, and the rejects of before."""
    written.prove(LATER, {"raw": 5})
    assert (written.ends().undecided, written.ends().error) == (5, None)
    written.prove(LATER, {"events": 4})
    written.add("events", LATER, range(100, 104))
    assert (written.ends().undecided, written.ends().error) == (5, None)
    written.prove(LATER, {"rejects": 1}, attempt=0)
    assert (written.ends().undecided, written.ends().error) == (5, None)


def test_a_row_that_is_missing_or_doubled_is_reported(written: Written) -> None:
    doubled = [row for row in written.rows["events"] if row.get("origin_offset") == 3]
    written.rows["events"] += doubled
    assert "1 rows of events" in str(written.ends().error)
    written.rows["events"] = [row for row in written.rows["events"] if row.get("origin_offset") != 3]
    assert "sum to 9, produced were 10" in str(written.ends().error)


def test_an_origin_in_two_places_is_reported(written: Written) -> None:
    """Accepted without a retry, and rejected all the same."""
    written.add("events", MAIN, [8])
    assert "sum to 11, produced were 10" in str(written.ends().error)


def test_a_reject_that_is_gone_is_reported(written: Written) -> None:
    written.rows["rejects"] = [row for row in written.rows["rejects"] if row.get("origin_offset") != 8]
    assert "sum to 9, produced were 10" in str(written.ends().error)


def test_a_lake_without_tables_has_no_ends(tmp_path: Path) -> None:
    assert count_ends(Written(tmp_path).ledger, Written(tmp_path).lake, STREAM) == OriginEnds()


def ensure_topic_and_producers(scene: Scene, page: dict[str, Any]) -> None:
    """What the page shows of generations, brokers' times and producers; another one is read from a file."""
    [period] = page["generations"]
    assert (period["partitions"], period["topic_id"]) == (2, scene.slices()[0].topic_id)
    assert "replica lag" in {rule["rule"] for rule in page["topic_rules"] if rule["level"] == "ok"}
    assert {rule["level"] for rule in page["producers"]["publication of rejects of orders"]} == {"ok"}
    assert [rule["level"] for rule in page["producers"]["others"]] == ["unknown"]
    (scene.folder / "app.json").write_text('{"partitioner": "random", "acks": 1}')
    other = scene.run("audit", "--producer", str(scene.folder / "app.json"), "--client-version", "2.3.0")
    assert other.exit_code == EXIT_PERMANENT
    assert "producer app.json: acks: 1: what the leader alone has" in other.output


@pytest.mark.parametrize(("config", "expected"), [({}, 10), ({"slices": 3}, 3), ({"slices": 0}, 0)])
def test_the_job_reads_the_newest_slices_again(
    config: dict[str, object], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader is part of every day's audit; by its own config of a larger one."""
    asked: list[int] = []
    page = SimpleNamespace(ends=SOUND, markdown="", errors=[], unfinished=[], head=[])

    def audit(*_: object, records_of: int, **__: object) -> object:
        asked.append(records_of)
        return page

    monkeypatch.setattr("highwater.orchestration.reporting.audit.audit", audit)
    opened: dict[str, Any] = {name: SimpleNamespace(open=lambda: None) for name in ("kafka", "ledger", "lake")}
    job = build_defs(streams=[STREAM], resources=opened).resolve_job_def("audit")
    with dg.DagsterInstance.ephemeral() as instance:
        run_config = {"stream": "orders", **config}
        assert job.execute_in_process(instance=instance, run_config=run_config).success
    assert asked == [expected]


def test_a_broker_that_is_unavailable_is_a_temporary_error_until_a_real_one_runs_beside_it(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended as if somebody had changed a table, and reported the same twice, in the words of two clients."""
    words, unavailable_as_said = count(), Kafka.build_unavailable_error
    monkeypatch.setattr(
        Kafka, "build_unavailable_error", lambda self, error: unavailable_as_said(self, f"{error}, {next(words)}")
    )
    written.ledger.add([MAIN, RETRIED])
    written.write()
    scene = Scene(f"{LOOPBACK}:{free_port()}", "orders", written.folder)
    unavailable = scene.run("audit", "orders")
    assert unavailable.exit_code == EXIT_TEMPORARY, unavailable.output
    assert unavailable.stdout.count("error: Kafka at ") == 1
    doubled = [row for row in written.rows["events"] if row.get("origin_offset") == 3]
    written.rows["events"] += doubled
    written.write()
    both = scene.run("audit", "orders")
    assert both.exit_code == EXIT_PERMANENT, both.output
    assert "the audit found 2 errors" in both.output


@pytest.mark.slow
def test_the_command_and_the_job_report_the_same(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(bootstrap, topic(partitions=2), tmp_path)
    scene.write(15)
    scene.run("plan", "orders", "--yes")
    scene.write(4)
    before = scene.run("audit", "orders")
    assert before.exit_code == 0, before.output
    assert "development" in before.output
    assert "incomplete" in before.output
    page = json.loads(scene.run("audit", "--json").output)[0]
    [first, second] = page["partitions"]
    assert (first["planned"], first["committed"], first["last_stable"]) == (15, 0, 19)
    assert first["age"] > 0
    assert second["age"] is None
    scraped = scene.run("metrics")
    assert scraped.exit_code == 0, scraped.output
    of_first = f'{{partition="0",stream="orders",topic="{scene.topic}"}}'
    assert f"highwater_lag_records{of_first} 4.0" in scraped.output
    assert f"highwater_planned_end_offset{of_first} 15.0" in scraped.output
    assert f"highwater_oldest_unread_age_seconds{of_first} " in scraped.output
    assert page["failing_checks"] is None
    assert page["errors"] == []
    ensure_topic_and_producers(scene, page)

    for name, value in {"HIGHWATER_HOME": tmp_path, "HIGHWATER_KAFKA_BOOTSTRAP": bootstrap}.items():
        monkeypatch.setenv(name, str(value))
    [slice_] = scene.slices()
    found = Written(tmp_path)
    found.prove(slice_, {"raw": 15, "events": 15, "rejects": 0, "current": 15})
    forward = {
        "key": "o1",
        "order_id": "o1",
        "version": 2,
        "status": "paid",
        "origin_timestamp_ms": round(NOW.timestamp() * 1000),
        "event_time": NOW,
    }
    backward = {**forward, "version": 1, "status": "placed", "event_time": NOW + timedelta(hours=1)}
    for offset, columns in enumerate((forward, backward)):
        for table in ("events", "current"):
            found.add(table, slice_, [offset], **columns, updated_by_slice=slice_.key)
            found.rows[table][-1]["origin_topic"] = scene.topic
    found.write()
    job = build_defs(streams=[scene.stream]).resolve_job_def("audit")
    with dg.DagsterInstance.ephemeral() as instance:
        # The rows of raw are not written here.
        config = {"stream": "orders", "slices": 0}
        run = job.execute_in_process(instance=instance, raise_on_error=False, run_config=config)
        [seen] = instance.fetch_observations(dg.AssetKey(["orders", "events"]), limit=1).records
    assert not run.success
    observation = seen.asset_observation
    assert observation is not None
    text = str(observation.metadata["audit"].value)
    assert "the ends sum to 2, produced were 15" in text
    assert "versions_along_offsets over the stream: 1 versions fall" in text
    reported = scene.run("audit", "orders")
    assert reported.exit_code == EXIT_PERMANENT
    assert "the ends sum to 2, produced were 15" in reported.output
    assert "versions_along_offsets" not in reported.output
    [plain] = json.loads(scene.run("audit", "orders", "--versions", "--json").stdout)
    assert {name: one["result"] for name, one in plain["versions"].items()} == {
        "versions_along_offsets": "error",
        "one_content_a_version": "passed",
        "transitions_allowed": "passed",
        "no_version_missing": "passed",
        "versions_in_order": "passed",
    }
    assert plain["versions"]["versions_along_offsets"]["samples"][0]["behind"] == "0"
