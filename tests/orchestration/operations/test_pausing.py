"""A tier is paused alone: nothing of it is planned, the others go on, and everybody who looks is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations.pausing import (
    PauseRequest,
    TierPauseRequest,
    pause_or_resume,
    pause_or_resume_tier,
)
from highwater.orchestration.reporting.audit_report import _build_dlq_row as audited
from highwater.orchestration.reporting.plan_status import _read_dlq_status
from highwater.orchestration.reporting.status_report import StreamStatus
from highwater.orchestration.sensing import stream_ticks
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.pauses import ALL, RETRIES, Pause
from tests.helpers.fake_topics import FakeTopics
from tests.helpers.support import make_stream

NOW = datetime(2026, 3, 1, tzinfo=UTC)
STREAM = replace(make_stream("orders"), tiers=(timedelta(seconds=10), timedelta(minutes=5)))
FIRST, SECOND = STREAM.tier_topics


class Ours:
    """Two tiers of five records each that are due, and a ledger."""

    def __init__(self, instance: dg.DagsterInstance, url: str) -> None:
        self.instance, self.url = instance, url
        self.ledger = Ledger(url)
        self.kafka: Any = FakeTopics({"orders": ("A", 5), FIRST: ("B", 5), SECOND: ("C", 5)})

    def tick(self) -> stream_ticks.Tick:
        lake = Lake(str(Path(str(self.ledger.database.url.database)).parent / "lake"))
        opened = {"ledger": self.ledger, "kafka": self.kafka, "lake": lake}
        resources = SimpleNamespace(**{n: SimpleNamespace(open=lambda one=one: one) for n, one in opened.items()})
        return stream_ticks.plan_retries(self.instance, resources, STREAM)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments], env={"HIGHWATER_LEDGER_URL": self.url})


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Ours]:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        yield Ours(instance, f"sqlite:///{tmp_path / 'ledger.sqlite'}")


def test_a_paused_tier_is_not_planned_and_the_others_are(ours: Ours) -> None:
    ours.ledger.paused.pause("orders", Pause(FIRST, NOW, "ann", "a test"))
    tick = ours.tick()
    assert tick.keys == [f"{SECOND}@0000000"]
    assert f"{FIRST} is paused by ann since 2026-03-01 00:00 UTC: a test" in tick.message
    assert ours.ledger.list_slices("orders", FIRST) == []
    first, second, _ = _read_dlq_status(ours.ledger, ours.kafka, STREAM)
    assert first.due == 5
    assert second.pause is None
    lines = StreamStatus("orders", "orders", 0, 0, "A", dlq=[first, second]).lines
    assert [line.rpartition(", ")[2] for line in lines if "paused" in line] == [f"highwater resume-tier orders {FIRST}"]
    assert [audited(one)[-1] for one in (first, second)] == [first.pause.text if first.pause else "", ""]
    plain = StreamStatus("orders", "orders", 0, 0, "A", dlq=[first, second]).to_plain()["dlq"]
    assert [one["pause"] for one in plain] == [{"at": NOW.isoformat(), "by": "ann", "because": "a test"}, None]
    ours.ledger.paused.resume("orders", FIRST)
    assert f"{FIRST}@0000000" in ours.tick().keys


def test_a_person_pauses_and_resumes_by_command(ours: Ours) -> None:
    stream = "orders"
    first = "orders.dlq.1"
    assert "a dry run" in ours.run("pause-tier", stream, first).output
    assert ours.ledger.paused.read_for_stream(stream) == {}
    assert ours.run("pause-tier", stream, first, "--yes", "--by", "").exit_code == 2
    done = ours.run("pause-tier", stream, first, "--yes", "--by", "ann", "--because", "moved")
    assert (done.exit_code, "slices that are planned go on" in done.output) == (0, True), done.output
    [stored] = ours.ledger.paused.read_for_stream(stream).values()
    assert (stored.topic, stored.by, stored.because) == (first, "ann", "moved")
    assert ours.run("pause-tier", stream, first, "--yes", "--by", "bob").exit_code == 2, "it is paused already"
    assert ours.ledger.paused.read_for_stream(stream)[first].by == "ann"
    shown = ours.run("resume-tier", stream, first, "--json")
    assert '"by": "ann"' in shown.output
    assert ours.run("resume-tier", stream, first, "--yes", "--by", "bob").exit_code == 0
    assert ours.ledger.paused.read_for_stream(stream) == {}


def test_a_person_pauses_and_resumes_a_stream_and_its_parts_by_command(ours: Ours) -> None:
    def paused() -> dict[str, str]:
        return {
            part: one.by for part, one in ours.ledger.paused.read_parts_by_stream("orders").get("orders", {}).items()
        }

    assert "a dry run" in ours.run("pause", "orders").output
    assert paused() == {}
    assert ours.run("pause", "orders", "--yes", "--by", "").exit_code == 2, "needs the name of the person"
    assert ours.run("pause", "orders", "mirror", "--yes", "--by", "ann").exit_code == 2, "no such part"
    done = ours.run("pause", "orders", "planner", "--yes", "--by", "ann", "--because", "moved")
    assert (done.exit_code, "the planner of orders: paused; runs that are requested go on" in done.output) == (0, True)
    assert ours.run("pause", "orders", "planner", "--yes", "--by", "bob").exit_code == 2, "it is paused already"
    assert ours.run("pause", "orders", "--yes", "--by", "bob").exit_code == 0
    assert paused() == {"planner": "ann", "": "bob"}
    refused = ours.run("resume", "orders", "retries", "--yes", "--by", "eve")
    assert (refused.exit_code, "highwater resume orders" in refused.output) == (2, True), "the whole stream is paused"
    shown = ours.run("resume", "orders", "--json")
    assert json.loads(shown.output)["was_paused"]["planner"]["because"] == "moved"
    assert ours.run("resume", "orders", "planner", "--yes", "--by", "eve").exit_code == 0
    assert paused() == {"": "bob"}
    assert ours.run("pause", "orders", "publisher", "--yes", "--by", "ann").exit_code == 0
    assert ours.run("resume", "orders", "--yes", "--by", "eve").exit_code == 0
    assert paused() == {}, "the stream's resume ends the pauses of its parts"
    assert ours.run("resume", "orders", "--yes", "--by", "eve").exit_code == 2


def test_the_second_of_two_persons_learns_that_a_stream_is_paused(ours: Ours) -> None:
    mine, theirs = PauseRequest(dry_run=False, by="ann"), Pause("", NOW, "bob")
    with pytest.raises(ConfigurationError, match="stream orders is paused by bob"):
        pause_or_resume(ours.ledger, STREAM, mine, NOW, lambda _: ours.ledger.paused.pause_part("orders", ALL, theirs))
    with pytest.raises(ConfigurationError, match="is not paused"):
        pause_or_resume(
            ours.ledger,
            STREAM,
            replace(mine, resume=True),
            NOW,
            lambda _: ours.ledger.paused.resume_part("orders", ALL),
        )


def test_a_paused_part_is_no_paused_tier(ours: Ours) -> None:
    ours.ledger.paused.pause_part("orders", RETRIES, Pause("", NOW, "ann"))
    assert ours.ledger.paused.read_for_stream("orders") == {}
    assert all(one.pause is None for one in _read_dlq_status(ours.ledger, ours.kafka, STREAM))


def test_second_pause_or_resume_is_reported(ours: Ours) -> None:
    """Both heard that they had paused it, or resumed it."""
    mine = TierPauseRequest(FIRST, dry_run=False, by="ann")
    first = Pause(FIRST, NOW, "bob")
    with pytest.raises(ConfigurationError, match="is paused by bob"):
        pause_or_resume_tier(ours.ledger, STREAM, mine, NOW, lambda _: ours.ledger.paused.pause("orders", first))
    assert ours.ledger.paused.read_for_stream("orders") == {FIRST: first}
    with pytest.raises(ConfigurationError, match="is not paused"):
        pause_or_resume_tier(
            ours.ledger, STREAM, replace(mine, resume=True), NOW, lambda _: ours.ledger.paused.resume("orders", FIRST)
        )


def test_the_ledger_records_who_resumed_and_why(ours: Ours) -> None:
    """The record of the pause ends with the resume, and nothing named the person."""
    ours.ledger.paused.pause("orders", Pause(FIRST, NOW, "ann"))
    done = ours.run("resume-tier", "orders", FIRST, "--yes", "--by", "bob", "--because", "moved")
    assert done.exit_code == 0, done.output
    [stored] = ours.ledger.operator_actions.list_newest("orders")
    assert (stored.action, stored.by, stored.because, stored.asked) == ("resume_tier", "bob", "moved", {"topic": FIRST})


def test_only_what_is_retried_can_be_paused(ours: Ours) -> None:
    for topic in ("orders", STREAM.parked_topic, "elsewhere"):
        with pytest.raises(ConfigurationError, match="is no topic of stream orders whose records are retried"):
            pause_or_resume_tier(ours.ledger, STREAM, TierPauseRequest(topic), NOW, print)
    with pytest.raises(ConfigurationError, match="is not paused"):
        pause_or_resume_tier(ours.ledger, STREAM, TierPauseRequest(FIRST, resume=True), NOW, print)
