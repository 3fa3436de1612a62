"""Rejects by the name of the rule that refused them: in the tables, on the DLQ, in counts and after an erasure."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from highwater.orchestration.checking.follower_checks import check_rejects_published
from highwater.orchestration.metadata import build_slice_metadata
from highwater.orchestration.operations.erasing import ErasureRequest, erase_key
from highwater.orchestration.operations.rebuilding_all import rebuild_from_kafka
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.bench_records import published
from tests.helpers.support import Message, customers, make_stream, order_message

if TYPE_CHECKING:
    from pathlib import Path

    from highwater.assets.work import SliceReport
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow

RULES = {"amount_is_whole": "amount = floor(amount)", "amount_is_small": "amount < 1000"}
EXPECTED = {
    0: ("invalid", "amount_is_whole"),
    1: ("invalid", "amount_is_whole"),
    2: ("invalid", "amount_is_small"),
    3: ("invalid", "status.one_of"),
    4: ("invalid", "amount.at_least"),
    5: ("malformed", None),
    6: ("unresolved", None),
}


def rules_of(bench: Bench, table: str) -> dict[int, tuple[str, str | None]]:
    return {row["origin_offset"]: (row["reason"], row["rule"]) for row in bench.rows(table)}


def count_by_rule(report: SliceReport) -> dict[str, int]:
    """The rejects of a slice by rule, as the page of its materialisation shows them."""
    prefix, shown = "rejects/invalid/", build_slice_metadata(report)
    return {name.removeprefix(prefix): shown[name].value for name in shown if name.startswith(prefix)}  # type: ignore[misc]


def test_a_rule_is_named_wherever_its_rejects_are(bench: Bench) -> None:
    """Its name was only in the text of `detail`; two rules break one record, and the first one counts."""
    bench.stream = make_stream(bench.stream.topic, rules=RULES)
    bench.send(
        order_message("o1", 1, amount=1.5),
        order_message("o2", 1, amount=2000.5),
        order_message("o2", 1, amount=2000),
        order_message("o3", 1, status="lost"),
        order_message("o4", 1, amount=-1.5),
        Message(b"o5", b"no json"),
        order_message("o6", 1, amount=5, customer_id="nobody"),
        order_message("o7", 1, amount=5),
    )
    slice_ = bench.plan(0, p0=(0, 8))
    reports = bench.materialise(slice_)
    by_rule = dict(Counter(rule for _, rule in EXPECTED.values() if rule))

    assert rules_of(bench, "rejects") == rules_of(bench, "dlq") == EXPECTED
    counts = reports["events"][0].counts
    assert {name.removeprefix("rule_"): n for name, n in counts.items() if name.startswith("rule_")} == by_rule
    assert (counts["rejects"], counts["rejects_invalid"], counts["events"]) == (7, sum(by_rule.values()), 1)
    assert count_by_rule(reports["events"][0]) == count_by_rule(reports["rejects"][0]) == by_rule

    [result] = check_rejects_published(bench.ledger, bench.lake, bench.stream, [slice_.key]).values()
    shown = {name: n for name, n in result.numbers.items() if name.startswith("rejects/")}
    by_reason = {"rejects/malformed": 1, "rejects/invalid": 5, "rejects/unresolved": 1}
    assert shown == by_reason | {f"rejects/invalid/{rule}": n for rule, n in by_rule.items()}
    explained = explain(bench.ledger, bench.lake, bench.stream, slice_.key)
    assert {(one.reason, one.rule): one.records for one in explained.rejects} == Counter(EXPECTED.values())
    assert ["invalid", "amount_is_whole", "2", bench.stream.parked_topic] in explained.tables[-1][1]

    sent = [dict(headers) for _, _, _, headers in published(bench.bootstrap, bench.stream.parked_topic)]
    assert Counter(one.get("highwater.rule", b"").decode() or None for one in sent) == by_rule | {None: 1}
    assert bench.failing() == {}
    assert {row["origin_offset"]: (row["reason"], row["rule"]) for row in bench.rejects_from_raw(slice_)} == EXPECTED


def test_published_rejects_keep_a_rule_that_is_no_longer_declared(bench: Bench) -> None:
    """They are left to the DLQ with their reason, so counts and rows name the old rule too; new ones name theirs."""
    bench.stream = make_stream(bench.stream.topic, rules=RULES)
    bench.send(order_message("o1", 1, amount=1.5), order_message("o2", 1, amount=2))
    slice_ = bench.plan(0, p0=(0, 2))
    bench.materialise(slice_)
    bench.stream = replace(bench.stream, rules={"whole": RULES["amount_is_whole"], "below_two": "amount < 2"})
    report = bench.materialise(slice_)["events"][0]

    assert rules_of(bench, "rejects") == {0: ("invalid", "amount_is_whole"), 1: ("invalid", "below_two")}
    assert count_by_rule(report) == {"amount_is_whole": 1, "below_two": 1}
    assert report.counts["rejects_invalid"] == report.counts["rejects"] == 2
    assert bench.failing() == {}


def test_a_rebuild_from_the_dlq_knows_the_rules(bench: Bench, tmp_path: Path) -> None:
    """Lake and ledger are lost: the headers alone say which rule refused a published record."""
    bench.stream = make_stream(bench.stream.topic, rules=RULES)
    bench.send(order_message("o1", 1, amount=1.5), Message(b"o2", b"no json"), order_message("o3", 1, amount=2))
    bench.materialise(bench.plan(0, p0=(0, 3)))
    bench.ledger, bench.lake = Ledger(f"sqlite:///{tmp_path / 'again.sqlite'}"), Lake(str(tmp_path / "again"))
    customers(bench.lake, ["c1"])
    nobody: Any = []
    rebuild_from_kafka(bench.ledger, bench.lake, bench.kafka, bench.stream, nobody, print, dry_run=False, by="ann")
    bench.stream = replace(bench.stream, rules={"whole": RULES["amount_is_whole"], "below_two": "amount < 2"})
    now = datetime.now(UTC) + timedelta(minutes=1)
    [slice_] = Planner(bench.ledger, bench.kafka).tick(bench.stream, now).slices
    report = bench.materialise(slice_)["events"][0]

    known = {0: ("invalid", "amount_is_whole"), 1: ("malformed", None), 2: ("invalid", "below_two")}
    assert rules_of(bench, "rejects") == rules_of(bench, "dlq") == known
    assert count_by_rule(report) == {"amount_is_whole": 1, "below_two": 1}
    assert bench.failing() == {}


def test_an_erasure_takes_a_keys_rejects_out_of_the_counts_per_rule(bench: Bench) -> None:
    """Or the sum over the rules would exceed the rejects of the slice."""
    bench.stream = make_stream(bench.stream.topic, rules=RULES)
    bench.send(*[order_message(f"o{number % 2}", 1, amount=1.5) for number in range(3)])
    bench.send(order_message("o0", 1, amount=5), order_message("o0", 1, amount=2000))
    slice_ = bench.plan(0, p0=(0, 5))
    assert count_by_rule(bench.materialise(slice_)["events"][0]) == {"amount_is_whole": 3, "amount_is_small": 1}
    digest = hashlib.sha256(b"o0").hexdigest()
    asked = ErasureRequest(digest, dry_run=False, by="somebody", because="asked for")
    erase_key(bench.work(), None, asked, datetime.now(UTC))

    for table in ("events", "rejects"):
        counts = bench.lake.load_slice_commits("orders", table, [slice_.key])[slice_.key].counts
        assert (counts["raw"], counts["rejects"], counts["rejects_invalid"]) == (1, 1, 1)
        assert (counts["rule_amount_is_whole"], counts["rule_amount_is_small"]) == (1, 0)
    assert rules_of(bench, "rejects") == {1: ("invalid", "amount_is_whole")}
    assert bench.failing() == {}
