"""Records that are reclaimed from the DLQ: a backfill decides them again, older copies count no more, the ends sum."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from click.testing import CliRunner
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Alerts, Field
from highwater.envelope import MAX_COUNT, RECLAIMS, Origin
from highwater.errors import ConfigurationError
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.follower_checks import check_rejects_published
from highwater.orchestration.checking.origin_checks import check_offsets_accounted
from highwater.orchestration.checking.origin_counts import count_ends, count_parked
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operations import parked, pending_reprocessing
from highwater.orchestration.operations.parked import ParkedSelection
from highwater.orchestration.operations.pending_reprocessing import ReclaimedRecords
from highwater.orchestration.operations.rebuilding import _load_reclaims
from highwater.orchestration.operations.reclaiming import ReclaimRequest, read_records_on_dlq, reclaim_records
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.plan_status import _load_waiting_work
from highwater.orchestration.reporting.status_report import WaitingWork
from highwater.plans import Discard
from highwater.reclaims import Reclaim, count_reclaims, is_stale
from highwater.resources.ledger import Ledger
from tests.helpers.bench_records import due, ends, published
from tests.helpers.reclaiming import Reclaiming, X, Y
from tests.helpers.support import Bench, Message, customers, order_message
from tests.helpers.world import FIRST, NOON, PARKED, RETRIED, STREAM, build_headers

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def a_reclaim(origin: Origin = X, number: int = 1) -> Reclaim:
    return Reclaim(origin, FIRST.key, number, "fixed", "ann", NOW)


# The rule and the ledger


def test_a_copy_from_before_the_last_time_that_its_origin_was_reclaimed_is_stale() -> None:
    taken = count_reclaims([a_reclaim(number=2), a_reclaim(), a_reclaim(Y)])
    assert taken == {X: 2, Y: 1}
    assert [is_stale(taken, X, number) for number in (0, 1, 2, 3)] == [True, True, False, False]
    assert not is_stale(taken, Origin("orders", 1, 0, 2), 0), "another generation is another record"


def test_the_ledger_keeps_acts_in_their_order_and_each_number_of_an_origin_once(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    assert (ledger.reclaims.read_last_act_number("orders"), ledger.reclaims.list_for_stream("orders")) == (0, [])
    ledger.reclaims.add("orders", [a_reclaim(), a_reclaim(Y)])
    ledger.reclaims.add("orders", [a_reclaim(number=2)])
    ledger.reclaims.add("payments", [a_reclaim()])
    with pytest.raises(IntegrityError):
        ledger.reclaims.add("orders", [a_reclaim(Origin("orders", 0, 9, 9)), a_reclaim(number=2)])
    assert ledger.reclaims.read_last_act_number("orders") == 2
    assert count_reclaims(ledger.reclaims.list_for_stream("orders", acts=1)) == {X: 1, Y: 1}, (
        "as a decision of then saw it"
    )
    assert count_reclaims(ledger.reclaims.list_for_stream("orders", slice_key=FIRST.key)) == {X: 2, Y: 1}
    assert ledger.reclaims.list_for_stream("orders", slice_key="orders@0000009") == []
    assert ledger.reclaims.list_for_stream("orders")[-1] == a_reclaim(number=2)


# Over tables that are written row by row: of the first slice offset 2 is parked, and 4 was accepted by a retry


@pytest.fixture
def taking(tmp_path: Path) -> Reclaiming:
    return Reclaiming(tmp_path)


BY_ANN = {"dry_run": False, "by": "ann", "because": "a fixed rule"}


def test_a_rule_that_refused_nothing_shows_the_causes_of_the_others(taking: Reclaiming) -> None:
    found = taking.reclaim(choice=ParkedSelection(rules=("paid",)))
    assert found.meant == {}
    assert "1 others are in the DLQ: 1 malformed" in taking.log


def test_dry_run_reports_dlq_records_and_reclaims_none(taking: Reclaiming) -> None:
    found = taking.reclaim()
    assert [(origin, one.home, one.reason, one.next_topic) for origin, one in found.meant.items()] == [
        (X, FIRST.key, "malformed", PARKED)
    ], "what a retry accepted is not in the DLQ"
    assert (found.slices, found.others, found.taken, found.discarded) == ([FIRST.key], 0, 0, 0)
    assert "nothing was recorded" in taking.log[-1]
    assert taking.world.ledger.reclaims.read_last_act_number("orders") == 0


@pytest.mark.parametrize("asked", [{}, BY_ANN])
def test_slices_whose_key_is_retired_are_reported_with_the_command_that_brings_it_back(
    taking: Reclaiming, asked: dict[str, Any]
) -> None:
    """Without it nobody could materialise them, and what was reclaimed would have no place to go."""
    ledger = taking.world.ledger
    ledger.retired.retire("orders", [FIRST.key], NOW)
    taking.reclaim(**asked)
    [reported] = [line for line in taking.log if "retired" in line]
    assert reported == (
        "1 of 1 slices have a retired key: first highwater recall-keys orders orders@0000000 orders@0000000 --yes"
    )
    ledger.retired.recall([FIRST.key], NOW)
    taking.log.clear()
    taking.reclaim(**asked)
    assert "retired" not in " ".join(taking.log)


@pytest.mark.parametrize(
    ("asked", "problem"), [({"because": "x"}, "needs the name of the person"), ({"by": "ann"}, "no reason is given")]
)
def test_nothing_is_reclaimed_without_a_name_and_a_reason(
    taking: Reclaiming, asked: dict[str, Any], problem: str
) -> None:
    asked |= {"dry_run": False}
    with pytest.raises(ConfigurationError, match=problem):
        taking.reclaim(**asked)
    assert taking.world.ledger.reclaims.read_last_act_number("orders") == 0


def test_a_choice_is_by_reason_slice_key_and_time_of_publication(taking: Reclaiming) -> None:
    taking.world.write()

    def meant(**choice: Any) -> int:
        return len(read_records_on_dlq(*taking.where, ParkedSelection(**choice)).meant)

    later = NOON + timedelta(seconds=1)
    assert meant(reasons=["malformed"]) == meant(slices=[FIRST.key]) == meant(keys=["o5"]) == 1
    assert meant(since=NOON, until=later) == 1
    assert meant(reasons=["invalid"]) == meant(slices=[RETRIED.key]) == meant(keys=["o1"]) == 0
    assert meant(since=later) == meant(until=NOON) == 0


def test_a_choice_is_by_the_rule_that_refused_a_record(taking: Reclaiming) -> None:
    """By reason alone a corrected rule took the rejects of every other rule out of the DLQ too."""
    for table in ("rejects", "dlq"):
        taking.world.at(table, FIRST, (0, 2)).update(reason="invalid", rule="amount.at_least")
    taking.world.write()

    def meant(**choice: Any) -> list[tuple[str, str | None]]:
        found = read_records_on_dlq(*taking.where, ParkedSelection(**choice))
        return [(one.reason, one.rule) for one in found.meant.values()]

    chosen = [("invalid", "amount.at_least")]
    assert meant(rules=["amount.at_least"]) == meant(reasons=["invalid"], rules=["x", "amount.at_least"]) == chosen
    assert meant(rules=["amount"]) == []


def test_discarded_or_reclaimed_records_are_not_reclaimed(taking: Reclaiming, tmp_path: Path) -> None:
    taking.world.ledger.discards.add("orders", [Discard(X, "test data", "bob", NOW)])
    assert (taking.reclaim().meant, taking.reclaim().discarded) == ({}, 1)
    other = Reclaiming(tmp_path / "other")
    assert other.reclaim(**BY_ANN).slices == [FIRST.key]
    assert FIRST.key in other.log[-1]
    again = other.reclaim(**BY_ANN)
    assert (again.meant, again.taken) == ({}, 1)
    assert count_reclaims(other.world.ledger.reclaims.list_for_stream("orders")) == {X: 1}


def test_until_it_is_reprocessed_a_record_that_was_reclaimed_is_its_slices_again(taking: Reclaiming) -> None:
    before = taking.ends()
    assert (before.parked, before.reclaimed, taking.end(2)) == (1, 0, "parked")
    taking.reclaim(**BY_ANN)
    after = taking.ends()
    assert (after.parked, after.reclaimed, after.sum) == (0, 1, before.sum)
    assert count_parked(*taking.where) == 0
    assert taking.end(2) == "reclaimed"
    reported = explain(taking.world.ledger, taking.world.lake, STREAM, FIRST.key, None)
    assert any("reclaimed from the DLQ: 1 records, last by ann" in line for line in reported.lines)


def test_a_ledger_that_counts_again_goes_on_above_what_decisions_saw(taking: Reclaiming) -> None:
    """A rebuilt one knows no acts; the commit records in the lake have their numbers."""
    world = taking.world
    counts = world.slice_commits["events"][FIRST.key].counts
    world.alter_slice_commit("events", FIRST, counts={**counts, "reclaims_seen": 5})
    world.write()
    taking.reclaim(**BY_ANN)
    assert world.ledger.reclaims.read_last_act_number("orders") == 6
    assert [one.slice_key for one in pending_reprocessing.list_pending_slices(world.ledger, world.lake, STREAM)] == [
        FIRST.key
    ]


def test_a_slice_that_nobody_materialises_is_reported_with_the_command_that_does(taking: Reclaiming) -> None:
    world, nothing = taking.world, cast("Any", None)
    stream = replace(STREAM, metrics=ORDERS.metrics, alerts=Alerts(reclaimed_late=timedelta(minutes=5)))
    asked = (world.ledger, world.lake, stream)
    taking.reclaim()
    assert pending_reprocessing.list_pending_slices(*asked) == []
    begin = datetime.now(UTC)
    taking.reclaim(**BY_ANN)
    [reported] = pending_reprocessing.list_pending_slices(*asked)
    assert (reported.slice_key, reported.records, reported.by, reported.retired) == (FIRST.key, 1, "ann", False)
    assert begin <= reported.since <= datetime.now(UTC)
    command = (
        '.venv/bin/dagster asset materialize -m orchestration.definitions --select "key:orders/events or '
        'key:orders/rejects or key:orders/dlq or key:orders/current or key:orders/metrics" --partition'
    )
    found = _load_waiting_work(*asked)
    assert isinstance(found, WaitingWork)
    [line] = found.lines
    assert line == (
        "1 records of 1 slices were reclaimed from the DLQ and not reprocessed, the first by ann "
        f"at {reported.since:%Y-%m-%d %H:%M} UTC; {command} orders@0000000"
    )
    plain = found.to_plain()
    assert plain["reclaimed"][0]["slice_key"] == FIRST.key
    assert (plain["reclaimed_remedy"], plain["lake_error"]) == (f"{command} {FIRST.key}", None)
    for waited, over in ((4, False), (6, True)):
        stale_for = replace(reported, since=datetime.now(UTC) - timedelta(minutes=waited))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pending_reprocessing, "list_pending_slices", lambda *_, one=stale_for: [one])
            measure = alert_conditions._measure_reclaim_age(
                alert_inputs.StreamInputs(world.ledger, nothing, world.lake, stream)
            )
        assert measure is not None
        assert (measure.over, measure.remedy) == (over, f"{command} orders@0000000")
    world.ledger.retired.retire("orders", [FIRST.key], NOW)
    two = [*pending_reprocessing.list_pending_slices(*asked), replace(reported, slice_key="orders@0000001")]
    assert pending_reprocessing.build_reprocess_command(STREAM, two) == (
        ".venv/bin/highwater recall-keys orders orders@0000000 orders@0000000 --yes && for slice in orders@0000000 "
        f'orders@0000001; do {command.replace(" or key:orders/metrics", "")} "$slice"; done'
    )
    counts = world.slice_commits["events"][FIRST.key].counts
    world.alter_slice_commit("events", FIRST, counts={**counts, "reclaims_seen": 1})
    world.write()
    assert pending_reprocessing.list_pending_slices(*asked) == []
    none = alert_conditions._measure_reclaim_age(alert_inputs.StreamInputs(world.ledger, nothing, world.lake, stream))
    assert none is not None
    assert (none.over, none.value) == (False, "none waits to be reprocessed")


def test_a_command_for_more_slices_than_it_names_ends_with_the_command() -> None:
    """What a shell is given to run must not end in a sentence about the rest."""
    many = [
        ReclaimedRecords(f"orders@{n:07}", 1, NOW, "ann", retired=False) for n in range(pending_reprocessing.NAMED + 5)
    ]
    reported = pending_reprocessing.build_reprocess_command(STREAM, many)
    assert reported.startswith("(5 more are named when these are done) for slice in orders@0000000 ")
    assert reported.endswith(
        "orders@0000019; do .venv/bin/dagster asset materialize -m orchestration.definitions --select "
        '"key:orders/events or key:orders/rejects or key:orders/dlq or key:orders/current" --partition "$slice"; done'
    )


def test_waiting_records_are_counted_by_one_query_of_the_ledger(taking: Reclaiming) -> None:
    """With one for each slice, thousands of slices took the sensor's tick longer than it has."""
    world = taking.world
    by_act = [
        [a_reclaim(Origin("orders", 0, 0, n)) for n in (2, 4)],
        [a_reclaim(number=2), replace(a_reclaim(Origin("orders", 0, 1, 0)), slice_key="orders@0000007")],
        [replace(a_reclaim(Y, number=2), reclaimed_by="bob", reclaimed_at=NOW + timedelta(hours=1))],
    ]
    for n, reclaims in enumerate(by_act):
        at = NOW + timedelta(minutes=n)
        world.ledger.reclaims.add("orders", [replace(one, reclaimed_at=max(at, one.reclaimed_at)) for one in reclaims])
    world.ledger.reclaims.add("payments", [a_reclaim()])
    counts = world.slice_commits["events"][FIRST.key].counts
    world.alter_slice_commit("events", FIRST, counts={**counts, "reclaims_seen": 1})
    world.write()
    asked: list[str] = []

    def listen(*seen: Any) -> None:
        asked.append(seen[2])

    event.listen(world.ledger.database.engine, "before_cursor_execute", listen)
    found = pending_reprocessing.list_pending_slices(world.ledger, world.lake, STREAM)
    assert found == [
        ReclaimedRecords(FIRST.key, 2, NOW + timedelta(minutes=1), "ann", retired=False),
        ReclaimedRecords("orders@0000007", 1, NOW + timedelta(minutes=1), "ann", retired=False),
    ]
    assert sum("FROM reclaims" in one for one in asked) == 1


def test_accepted_after_that_it_has_one_end_and_is_no_reject_of_a_tier_any_more(taking: Reclaiming) -> None:
    """A tier's slice had rejected it too, and says so for ever: that it is accepted without a retry is no error."""
    taking.reject_in_tier()
    [one] = taking.reclaim(**BY_ANN).meant.values()
    assert (one.home, one.slice_key, one.next_topic) == (FIRST.key, RETRIED.key, STREAM.tier_topics[1])
    taking.reprocess(accepted=True)
    found = taking.ends()
    assert (found.accepted, found.waiting[STREAM.tier_topics[1]], found.reclaimed) == (9, 0, 0)
    assert taking.end(2) == "accepted"
    assert taking.reclaim().meant == {}


def test_records_with_the_greatest_number_are_not_reclaimed(taking: Reclaiming) -> None:
    """Anybody may write it into a header on a tier; the next one no column holds, and no copy could carry."""
    for table in ("rejects", "dlq"):
        taking.world.at(table, FIRST, (0, 2))["reclaims"] = MAX_COUNT
    found = taking.reclaim(dry_run=False, by="ann", because="fixed")
    assert (found.meant, found.others, taking.world.ledger.reclaims.list_for_stream("orders")) == ({}, 1, [])


def test_a_topic_that_nothing_is_published_to_is_reported(taking: Reclaiming) -> None:
    """A typo means no record, which looks like success."""
    taking.world.write()
    ledger, lake, _ = taking.where
    for stream in (STREAM, replace(STREAM, name="new")):
        with pytest.raises(ConfigurationError, match=r"nothing is published to orders\.dql\.2") as caught:
            reclaim_records(ledger, lake, stream, ReclaimRequest(on=["orders.dql.2", PARKED]), taking.log.append)
        assert f"{STREAM.tier_topics[1]}, {PARKED}" in str(caught.value)
    assert taking.reclaim(on=STREAM.tier_topics).meant == {}, "there nothing lies"
    taking.reject_in_tier()
    taking.world.write()
    fewer = replace(STREAM, tiers=STREAM.tiers[:1])
    found = reclaim_records(ledger, lake, fewer, ReclaimRequest(on=[STREAM.tier_topics[1]]), taking.log.append)
    assert [*found.meant] == [X], "records of a tier that is no longer declared are reclaimed as well"


def test_rejected_after_that_it_is_parked_once_and_can_be_reclaimed_again(taking: Reclaiming) -> None:
    """Also where what a tier's slice said of the older copy was published later: it was being finished meanwhile."""
    taking.reject_in_tier()
    taking.reclaim(**BY_ANN)
    taking.reprocess(accepted=False)
    found = taking.ends()
    assert (found.parked, found.waiting[STREAM.tier_topics[1]], found.reclaimed) == (1, 0, 0)
    assert taking.end(2) == "parked"
    assert taking.reclaim(**BY_ANN).meant[X].reason == "invalid"
    assert count_reclaims(taking.world.ledger.reclaims.list_for_stream("orders")) == {X: 2}
    assert (taking.ends().parked, taking.ends().reclaimed) == (0, 1)


def test_a_copy_in_a_tier_from_before_is_superseded_and_a_later_one_is_not(taking: Reclaiming) -> None:
    """The check follows each copy: one that was published since must be somewhere."""
    world = taking.world
    world.ledger.reclaims.add("orders", [a_reclaim()])
    world.read(RETRIED, 0, 1, "o5", headers=[h for h in build_headers(2) if h["key"] != RECLAIMS])
    del (
        world.slice_commits["events"][RETRIED.key],
        world.slice_commits["rejects"][RETRIED.key],
        world.slice_commits["current"][RETRIED.key],
    )
    world._prove(RETRIED)

    def result() -> CheckResult:
        world.write()
        return check_offsets_accounted(world.ledger, world.lake, STREAM, [RETRIED.key])[RETRIED.key]

    assert result().passed, result().text
    world.rows["raw"][-1]["headers"] += [{"key": RECLAIMS, "value": b"1"}]
    assert [row["problem"] for row in result().samples] == ["in no place"]


def test_a_copy_in_a_tier_of_what_was_abandoned_is_superseded(taking: Reclaiming) -> None:
    world = taking.world
    world.read(RETRIED, 0, 1, "o5", headers=build_headers(2))
    del (
        world.slice_commits["events"][RETRIED.key],
        world.slice_commits["rejects"][RETRIED.key],
        world.slice_commits["current"][RETRIED.key],
    )
    world._prove(RETRIED)
    world.write()

    def result() -> CheckResult:
        return check_offsets_accounted(world.ledger, world.lake, STREAM, [RETRIED.key])[RETRIED.key]

    assert [row["problem"] for row in result().samples] == ["in no place"]
    world.ledger.discards.add("orders", [Discard(X, "test data", "bob", NOW)])
    assert result().passed, result().text


def test_a_reject_was_published_under_its_own_number(taking: Reclaiming) -> None:
    """Else the copy on its topic would be superseded, and nobody would have the record."""
    world = taking.world

    def result() -> CheckResult:
        world.write()
        return check_rejects_published(world.ledger, world.lake, STREAM, [FIRST.key])[FIRST.key]

    assert result().passed, result().text
    world.at("rejects", FIRST, (0, 2))["reclaims"] = 1
    assert not result().passed


def test_a_ledger_that_is_rebuilt_knows_what_was_reprocessed(taking: Reclaiming) -> None:
    taking.reclaim(**BY_ANN)
    taking.world.write()
    assert _load_reclaims(taking.world.lake, STREAM) == [], "not reprocessed yet"
    taking.reprocess(accepted=True)
    taking.world.write()
    [found] = _load_reclaims(taking.world.lake, STREAM)
    assert (found.origin, found.slice_key, found.number) == (X, FIRST.key, 1)


def test_the_command_and_the_job(taking: Reclaiming, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taking.world.write()
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    shown = CliRunner().invoke(main, ["reclaim", "orders", "--reason", "malformed"])
    assert shown.exit_code == 0, shown.output
    assert "1 records of 1 slices match: 1 malformed on orders.parked" in shown.output
    assert "a dry run: nothing was recorded\nto do it, add --yes --by NAME --because TEXT\n" in shown.output
    assert CliRunner().invoke(main, ["reclaim", "orders", "--yes", "--by", "ann"]).exit_code == EXIT_PERMANENT
    named = ["--limit", "1", "--yes", "--by", "ann", "--because", "a fixed rule", "--json"]
    done = json.loads(CliRunner().invoke(main, ["reclaim", "orders", *named]).output)
    assert (done["done"], done["slices"], done["meant"][0]["origin"]) == (True, [FIRST.key], X._asdict())
    taking.reprocess(accepted=False)
    taking.world.write()

    defs = build_defs(streams=[STREAM])
    config = {"dry_run": False, "by": "bob", "because": "again", "slices": [FIRST.key]}
    run = defs.resolve_job_def("reclaim").execute_in_process(
        run_config={"stream": "orders", **config}, instance=dg.DagsterInstance.ephemeral()
    )
    assert run.success
    reported = [
        (one.number, one.reclaimed_by, one.reason) for one in taking.world.ledger.reclaims.list_for_stream("orders")
    ]
    assert reported == [(1, "ann", "a fixed rule"), (2, "bob", "again")]


# Through the stages


CHANNEL = Field("channel", "string")


def an_order(number: int, **changes: Any) -> Message:
    return order_message(f"o{number}", 1, channel="web", **changes)


def fixed(bench: Bench) -> None:
    """The declaration as a person corrects it: amounts may be below 0, and each record names a channel."""
    fields = [replace(one, at_least=None) if one.name == "amount" else one for one in bench.stream.fields]
    bench.stream = replace(bench.stream, fields=(*fields, CHANNEL))


def keys_on(bench: Bench, topic: str) -> Counter[tuple[str, bytes | None]]:
    """Which records are on a DLQ topic, and how often they had been reclaimed before."""
    found = published(bench.bootstrap, topic)
    return Counter(((key or b"").decode(), dict(headers)[RECLAIMS]) for _, key, _, headers in found)


@pytest.mark.slow
def test_a_backfill_with_fixed_code_accepts_what_was_reclaimed(bench: Bench) -> None:
    """Waiting in a tier, sent back to one, or parked: accepted once; what waits there of them is superseded later.

    In the same slice one record that was accepted before changes, one is rejected now, one that was reclaimed is
    rejected again, and one that nobody reclaimed is left to its tier.
    """
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1), timedelta(seconds=2)))
    waiting, sent_back, stays, changes, refused, again, left = range(7)
    bench.send(
        an_order(waiting, customer_id="late"),
        an_order(sent_back, amount=-1),
        an_order(stays, amount=-1),
        an_order(changes),
        order_message(f"o{refused}", 1),
        an_order(again, amount=-1, customer_id="later"),
        an_order(left, customer_id="later"),
    )
    first = bench.plan(0, p0=(0, 7))
    bench.materialise(first)
    tier, to_park = bench.stream.tier_topics[0], bench.stream.parked_topic
    redriven = parked.ParkedRequest(ParkedSelection(keys=[f"o{sent_back}", f"o{again}"]), dry_run=False, by="ann")
    parked.redrive_or_discard(bench.ledger, bench.kafka, bench.lake, bench.stream, redriven, bench.log.append)
    ensure_reclaimed(bench, first.key, [waiting, sent_back, stays, again])

    fixed(bench)
    customers(bench.lake, ["c1", "late"])
    counts = bench.materialise(first)["events"][0].counts
    assert (counts["events"], counts["rejects_malformed"], counts["rejects_unresolved"]) == (4, 1, 2)
    assert ends(bench, "events") == {(first.key, of): 1 for of in (waiting, sent_back, stays, changes)}
    assert bench.current()[f"o{changes}"]["channel"] == "web"
    found = count_ends(bench.ledger, bench.lake, bench.stream)
    assert (found.accepted, found.waiting[tier], found.parked, found.reclaimed, found.error) == (4, 2, 1, 0, None)
    assert keys_on(bench, tier) == Counter(
        {(f"o{of}", b"0"): 1 for of in (waiting, sent_back, again, left)} | {(f"o{again}", b"1"): 1}
    )
    assert keys_on(bench, to_park) == {(f"o{of}", b"0"): 1 for of in (sent_back, stays, again, refused)}
    assert bench.failing() == {}

    customers(bench.lake, ["c1", "late", "later"])
    [slice_] = due(bench)
    for slices in ([slice_], [first, slice_]):
        reports = bench.materialise(*slices)["events"]
        counts = reports[-1].counts
        assert (counts["raw"], counts["events"], counts["rejects"], counts["superseded"]) == (5, 2, 0, 3)
        accepted = {(first.key, of): 1 for of in (waiting, sent_back, stays, changes)}
        assert ends(bench, "events") == accepted | {(slice_.key, of): 1 for of in (again, left)}
        found = count_ends(bench.ledger, bench.lake, bench.stream)
        assert (found.accepted, found.waiting[tier], found.parked, found.error) == (6, 0, 1, None)
        assert sum(keys_on(bench, tier).values()) == 5, "what was published is not published again"
        assert bench.failing() == {}
    assert [row["reclaims"] for row in bench.rows("events") if row["origin_offset"] == again] == [1]
    waits = parked.read_parked(bench.ledger, bench.kafka, bench.lake, bench.stream, ParkedSelection())
    assert ([origin.offset for origin in waits.waiting], waits.ended) == ([refused], 3)


def ensure_reclaimed(bench: Bench, key: str, offsets: list[int]) -> None:
    asked = ReclaimRequest(
        ParkedSelection(keys=[f"o{of}" for of in offsets]), dry_run=False, by="ann", because="a fixed rule"
    )
    found = reclaim_records(bench.ledger, bench.lake, bench.stream, asked, bench.log.append)
    assert ([origin.offset for origin in sorted(found.meant)], found.slices, found.others) == (offsets, [key], 1)
    counted = count_ends(bench.ledger, bench.lake, bench.stream)
    assert (counted.reclaimed, counted.parked, counted.accepted, counted.error) == (4, 0, 2, None)
    waits = parked.read_parked(bench.ledger, bench.kafka, bench.lake, bench.stream, ParkedSelection())
    assert (len(waits.waiting), waits.ended) == (0, 3), "copies on the parked topic wait for nobody"
