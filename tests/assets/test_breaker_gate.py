"""The slices that a run may decide while a stream's breaker is closed, open or half open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.assets import slice_classification
from highwater.assets.breaker_gate import ensure_admitted, ensure_within_limit
from highwater.assets.commit import CommittedSlices
from highwater.assets.work import Work
from highwater.breaker import AttemptResult, Circuit
from highwater.errors import (
    BreakerOpenError,
    DependencyUnavailableError,
    PermanentError,
    RejectsOverLimitError,
    RetractionError,
    UnbalancedError,
)
from highwater.orchestration.sensing.step_breaker import report_to_breaker
from highwater.reject_reasons import BY_REASON
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import AcceptedSlice
from highwater.slice_commits import SliceCommit
from tests.helpers.breaking import RETRIED, accept, build_counts, build_split, make_work
from tests.helpers.commits import commit_empty
from tests.helpers.repairing import (
    FOUR,
    NOON,
    ONE,
    OPEN,
    THREE,
    TWO,
    minutes,
    open_breaker,
)
from tests.helpers.written_tables import a_slice


@pytest.fixture
def work(ledger: Ledger, tmp_path: Path) -> Callable[..., Work]:
    return make_work(ledger, tmp_path)


def test_a_slice_over_the_limit_is_refused_with_all_of_its_run(ledger: Ledger, work: Callable[..., Work]) -> None:
    ours = work(ONE, TWO)
    counts = build_counts(s1=(300, 3), s2=(200, 120))
    counts[TWO.key] |= {f"{BY_REASON}invalid": 20, f"{BY_REASON}malformed": 100, f"{BY_REASON}schema": 0}
    with pytest.raises(RejectsOverLimitError, match="120 of 200 records of orders@0000002") as raised:
        ensure_within_limit(ours, [TWO, ONE], {}, counts)
    assert "none of the 2 slices" in str(raised.value)
    assert "would be rejected (100 malformed, 20 invalid)" in str(raised.value)
    assert "highwater try orders --spark shows why" in str(raised.value)
    assert "highwater accept-rejects orders@0000002" in str(raised.value)
    assert ledger.breakers.read_circuit("orders").state == "open"
    assert [one.slice_key for one in ledger.breakers.list_refused("orders")] == [TWO.key]
    assert ledger.breakers.read_judgements([ONE.key]) == {}, (
        "a sound slice of a refused run is judged when it is decided"
    )


def test_while_it_is_open_nothing_is_decided_but_the_probe(ledger: Ledger, work: Callable[..., Work]) -> None:
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(100, 100)))
    for slices in ([TWO], [TWO, THREE], [RETRIED]):
        with pytest.raises(BreakerOpenError, match="100 of 100 records of orders@0000001"):
            ensure_admitted(work(*slices), slices)
    ensure_admitted(work(ONE), [])
    open_breaker(ledger, replace(OPEN, until=datetime.now(UTC)))
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(RETRIED), [RETRIED])
    ensure_admitted(work(TWO), [TWO])
    assert ledger.breakers.read_circuit("orders").probe == TWO.key
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(THREE), [THREE])
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(TWO), [TWO], {}, build_counts(s2=(3, 2)))
    found = ledger.breakers.read_circuit("orders")
    assert (found.state, found.since) == ("open", NOON), "few records are judged, since the last ones were rejected"


def test_only_first_attempts_count(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Neither what comes back through a tier, nor what is materialised again, nor a step's next try."""
    ensure_within_limit(work(RETRIED), [RETRIED], {}, {RETRIED.key: {"raw": 500, "rejects": 500}})
    committed = {ONE.key: SliceCommit(ONE, 1, 400, {"rejects": 0})}
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], committed, build_counts(s1=(500, 400)))
    for _ in range(3):
        ensure_within_limit(work(TWO), [TWO], {}, build_counts(s2=(99, 40)))
    found = ledger.breakers.read_circuit("orders")
    assert found.window == (AttemptResult(TWO.key, 99, 40),)
    assert found.closed


def test_breaker_counts_only_new_rejects_of_a_rematerialised_slice(work: Callable[..., Work]) -> None:
    """Its published rejects stay rejects: they flood nothing again."""
    committed = {ONE.key: SliceCommit(ONE, 1, 50, {"rejects": 400})}
    ensure_within_limit(work(ONE), [ONE], committed, build_counts(s1=(500, 450)))


def test_an_accepted_slice_passes_and_changes_nothing(ledger: Ledger, work: Callable[..., Work]) -> None:
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(100, 100)))
    before = ledger.breakers.read_circuit("orders")
    assert ledger.breakers.accept("orders", [AcceptedSlice(ONE.key, "test data", "ann", NOON)]) == 1
    again = AcceptedSlice(ONE.key, "again", "bob", NOON + minutes(1))
    assert ledger.breakers.accept("orders", [again]) == 0
    assert ledger.breakers.read_accepted_slices([ONE.key, TWO.key]) == {ONE.key: again}, (
        "what is given again counts from then"
    )
    ensure_admitted(work(ONE), [ONE])
    ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(100, 100)))
    assert ledger.breakers.read_circuit("orders") == before
    assert ledger.breakers.list_refused("orders") == []
    with pytest.raises(BreakerOpenError, match="orders@0000002 may not"):
        ensure_admitted(work(ONE, TWO), [ONE, TWO])


def test_a_committed_slice_is_no_probe(ledger: Ledger, work: Callable[..., Work]) -> None:
    """A backfill that was requested while it was half-open became the probe, and showed nothing about new records."""
    ready = replace(OPEN, until=datetime.now(UTC))
    open_breaker(ledger, ready)
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(ONE), [ONE], {ONE.key})
    assert ledger.breakers.read_circuit("orders") == ready
    ensure_admitted(work(TWO), [TWO], {ONE.key})
    assert ledger.breakers.read_circuit("orders").probe == TWO.key


def test_sent_events_are_checked_for_every_slice_before_the_breaker(ledger: Ledger, work: Callable[..., Work]) -> None:
    """A slice whose events the lake lost does not be there, and the breaker kept how it would have been split."""
    asked: list[Sequence[str]] = []

    def ensure_no_retraction(keys: Sequence[str]) -> None:
        asked.append(keys)
        raise RetractionError("sent", remedy="fix the rule")

    messages = build_counts(s1=(100, 100), s2=(100, 0))
    committed = CommittedSlices({TWO.key: SliceCommit(TWO, 1, 100, {"rejects": 0})}, 0)
    made: Any = SimpleNamespace(work=work(ONE, TWO), measured=messages, ensure_no_retraction=ensure_no_retraction)
    with pytest.raises(RetractionError):
        slice_classification._ensure_decidable(made, committed, [ONE, TWO], messages)
    assert asked == [[ONE.key, TWO.key]]
    assert ledger.breakers.read_judgements([ONE.key, TWO.key]) == {}
    assert ledger.breakers.read_circuit("orders") == Circuit()


def fails(work: Work, error: Exception, tries: int = 3, table: str = "events") -> None:
    with pytest.raises(type(error)), report_to_breaker(work, table, tries):
        raise error


def test_three_failures_in_a_row_open_it(ledger: Ledger, work: Callable[..., Work]) -> None:
    broken = UnbalancedError("rows were changed", remedy="restore them")
    fails(work(ONE), broken, tries=0)
    fails(work(ONE), broken, tries=0)
    fails(work(TWO), ValueError("secret"), tries=2)
    assert len(ledger.breakers.read_circuit("orders").window) == 1, (
        "a failed slice counts once, a try that is not the last not"
    )
    fails(work(TWO), ValueError("secret"))
    ensure_within_limit(work(THREE, run="another"), [THREE], {}, build_counts(s3=(10, 0)))
    fails(work(THREE, run="another"), broken, table="dlq")
    found = ledger.breakers.read_circuit("orders")
    assert found.state == "open", "it failed in the run of its first attempt, though after its decision"
    assert "3 runs up to orders@0000003 failed in a row" in found.text


def test_a_run_of_several_slices_is_one_failure(ledger: Ledger, work: Callable[..., Work]) -> None:
    """One error of a backlog's run opened it at once."""
    slices = [a_slice(n, 100) for n in range(1, 10)]
    broken = UnbalancedError("rows were changed", remedy="restore them")
    for number, at in enumerate((0, 3, 6)):
        assert ledger.breakers.read_circuit("orders").closed
        some = slices[at : at + 3]
        for table in ("rejects", "dlq"):  # tried again in the same run, after its decision
            messages = {slice_.key: {"raw": 10, "rejects": 0} for slice_ in some}
            ensure_within_limit(work(*some, run=f"run {number}"), some, {}, messages)
            fails(work(*some, run=f"run {number}"), broken, table=table)
    found = ledger.breakers.read_circuit("orders")
    assert found.state == "open"
    assert f"3 runs up to {slices[-1].key} failed in a row" in found.text


def test_errors_that_do_not_concern_the_stream_are_no_failures(ledger: Ledger, work: Callable[..., Work]) -> None:
    unavailable = DependencyUnavailableError("the reference table is unavailable", remedy="wait")
    for slice_ in (ONE, TWO, THREE, FOUR):
        fails(work(slice_), unavailable)
        fails(work(slice_), RetractionError("events were sent, and would be rejected", remedy="fix the rule"))
        fails(work(slice_), PermanentError("expired", remedy="look"), table="raw")
    ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(10, 0)))
    fails(work(ONE, run="a backfill"), PermanentError("broken", remedy="look"))
    found = ledger.breakers.read_circuit("orders")
    assert found.closed
    assert not any(one.failed for one in found.window)


def test_a_slice_committed_before_there_was_a_breaker_is_no_first_attempt(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    ours = work(ONE, failures=1)
    commit_empty(ours.lake, [ONE], "events")
    fails(ours, PermanentError("broken", remedy="look"))
    assert ledger.breakers.read_circuit("orders") == Circuit()


def test_the_probe_closes_it_when_it_is_committed_in_all_tables(ledger: Ledger, work: Callable[..., Work]) -> None:
    ours = work(ONE)
    open_breaker(ledger, replace(OPEN, probe=ONE.key))
    commit_empty(ours.lake, [ONE], "raw", "events")
    for table in ("events", "rejects", "current"):
        with report_to_breaker(ours, table, 0):
            commit_empty(ours.lake, [ONE], *([table] if table != "events" else []))
        assert ledger.breakers.read_circuit("orders").closed == (table == "current")


def test_a_probe_that_fails_begins_the_cool_down_again_whatever_failed(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    open_breaker(ledger, replace(OPEN, probe=ONE.key))
    fails(work(ONE), DependencyUnavailableError("Spark is unavailable", remedy="wait"), tries=2)
    assert ledger.breakers.read_circuit("orders").probe == ONE.key, "the step is tried again"
    fails(work(ONE), DependencyUnavailableError("Spark is unavailable", remedy="wait"))
    found = ledger.breakers.read_circuit("orders")
    assert found.probe is None
    assert not found.can_admit_probe(datetime.now(UTC))
    assert "the probe orders@0000001 failed: Spark is unavailable" in found.text


def test_an_accepted_reason_opens_the_breaker_no_more_and_others_do(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Each slice of a stream that nobody could fix needed a person, and a probe that was refused again."""
    ledger.add([ONE, TWO, THREE, FOUR])
    accept(ledger, "malformed")
    ensure_within_limit(work(TWO), [TWO], {}, build_split(TWO.key, 200, malformed=200))
    ensure_within_limit(work(THREE), [THREE], {}, build_split(THREE.key, 300, malformed=200, invalid=10))
    assert ledger.breakers.read_circuit("orders").closed
    with pytest.raises(RejectsOverLimitError, match="60 of 100 records of orders@0000004") as raised:
        ensure_within_limit(work(FOUR), [FOUR], {}, build_split(FOUR.key, 1_100, malformed=1_000, invalid=60))
    assert "records rejected for malformed do not count" in str(raised.value)
    assert ledger.breakers.read_circuit("orders").state == "open"
    # The slice before the first accepted one is judged as before.
    with pytest.raises(RejectsOverLimitError, match="200 of 200 records of orders@0000001"):
        ensure_within_limit(work(ONE), [ONE], {}, build_split(ONE.key, 200, malformed=200))


def test_breaker_counts_rejects_with_other_reasons_of_a_rematerialised_slice(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    ledger.add([TWO])
    accept(ledger, "malformed")
    before = {TWO.key: SliceCommit(TWO, 1, 0, {"rejects": 150, "rejects_malformed": 100, "rejects_invalid": 50})}
    ensure_within_limit(work(TWO), [TWO], before, build_split(TWO.key, 300, malformed=150, invalid=124))
    with pytest.raises(RejectsOverLimitError, match="75 of 150 records"):
        ensure_within_limit(work(TWO), [TWO], before, build_split(TWO.key, 300, malformed=150, invalid=125))


def test_a_revoked_reason_opens_the_breaker_again(ledger: Ledger, work: Callable[..., Work]) -> None:
    ledger.add([TWO, THREE])
    accept(ledger, "malformed")
    assert accept(ledger, "malformed", revoke=True, from_slice="", by="bob")[-1] == "malformed: revoked"
    assert accept(ledger, "malformed", revoke=True, from_slice="")[-1] == "malformed: it was not accepted"
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(THREE), [THREE], {}, build_split(THREE.key, 200, malformed=200))
    accept(ledger, "malformed", by="cat")
    assert ledger.breakers.read_accepted_reasons("orders")["malformed"].accepted_by == "cat"
