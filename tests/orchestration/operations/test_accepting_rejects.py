"""Refused slices and reasons as an operator sees and accepts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.assets.breaker_gate import ensure_within_limit
from highwater.assets.work import Work
from highwater.breaker import Circuit
from highwater.declaration import OnReject
from highwater.declaration_parts import ON_REJECT
from highwater.errors import (
    ConfigurationError,
    RejectsOverLimitError,
    UnknownSliceError,
)
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import AcceptedReason, Judgement
from tests.helpers.breaking import RETRIED, accept, build_counts, build_split, make_work
from tests.helpers.repairing import (
    FOUR,
    NOON,
    ONE,
    OPEN,
    STREAM,
    THREE,
    TWO,
    Repairing,
    minutes,
    open_breaker,
)
from tests.helpers.written_tables import a_slice


@pytest.fixture
def work(ledger: Ledger, tmp_path: Path) -> Callable[..., Work]:
    return make_work(ledger, tmp_path)


def test_the_breaker_is_an_alert_while_it_is_not_closed(ledger: Ledger) -> None:
    nothing: Any = None
    closed = alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    open_breaker(ledger)
    open_ = alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert closed is not None
    assert open_ is not None
    assert (closed.over, open_.over) == (False, True)
    assert "open since 2026-03-01 12:00:00 UTC: poison" in open_.value
    assert alert_conditions._measure_breaker in alert_conditions.CONDITIONS


def test_status_reports_the_state_and_the_refused_slices(ledger: Ledger, work: Callable[..., Work]) -> None:
    from dev.processes import LOOPBACK, free_port

    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(100, 60)))
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    assert any("breaker open since" in line for line in status.lines)
    assert any("orders@0000001 is refused: 60 of 100" in line for line in status.lines)
    plain = status.to_plain()
    assert plain["breaker"]["state"] == "open"
    assert plain["refused"] == [{"slice": ONE.key, "records": 100, "rejects": 60}]


def test_a_person_lets_a_slice_through_under_a_name(ledger: Ledger, url: str, work: Callable[..., Work]) -> None:
    ledger.add([ONE, TWO])
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, build_counts(s1=(100, 60)))
    environment = {"HIGHWATER_LEDGER_URL": url}

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["accept-rejects", *arguments], env=environment)

    dry = run(ONE.key)
    assert dry.exit_code == 0, dry.output
    assert "refused" in dry.output
    assert "60 of 100 records" in dry.output
    assert ledger.breakers.read_accepted_slices([ONE.key]) == {}
    assert "needs the name of the person" in run(ONE.key, "--yes", "--by", "").output
    assert run("orders@0000099", "--yes", "--by", "ann").exit_code == 2
    done_ = run(ONE.key, TWO.key, "--yes", "--by", "ann", "--because", "test data")
    assert done_.exit_code == 0, done_.output
    found = ledger.breakers.read_accepted_slices([ONE.key, TWO.key])
    assert {key: (one.accepted_by, one.because) for key, one in found.items()} == {
        ONE.key: ("ann", "test data"),
        TWO.key: ("ann", "test data"),
    }


def test_many_refused_slices_are_one_alert_with_one_command(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Status and alert named a command for each slice, and the alert ended with each probe that was sound."""
    from dev.processes import LOOPBACK, free_port

    nothing: Any = None
    slices = [a_slice(n, 200) for n in range(1, 41)]
    ledger.add(slices)
    command = "highwater accept-rejects orders --reason malformed --from orders@0000001"

    def breaker() -> Any:
        return alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))

    for slice_ in slices:
        with pytest.raises(RejectsOverLimitError):
            ensure_within_limit(work(slice_), [slice_], {}, build_split(slice_.key, 200, malformed=150, invalid=20))
    found = breaker()
    assert (found.what, found.over) == ("circuit breaker", True)
    assert "40 slices are refused" in found.value
    assert f"{command} accepts all of them" in found.remedy
    ledger.breakers.update("orders", (), lambda *_: (Circuit(since=NOON), ()))
    assert breaker().over, "a probe that is sound fixes none of those that are refused"

    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    lines = [line for line in status.lines if "refuse" in line]
    assert len(lines) == 7, "five slices, how many more there are, and the command for all"
    assert lines[-1].endswith(command)
    assert len(status.to_plain()["refused"]) == 40

    ledger.breakers.update("orders", (), lambda *_: (replace(OPEN, until=NOON + minutes(30), lost=5), ()))
    accept(ledger, "malformed", from_slice="orders@0000001")
    assert ledger.breakers.read_circuit("orders").can_admit_probe(NOON), "the cool-down of before ends"
    for slice_ in slices:
        ensure_within_limit(work(slice_), [slice_], {}, build_split(slice_.key, 200, malformed=150, invalid=20))
    ledger.breakers.update("orders", (), lambda *_: (Circuit(since=NOON), ()))
    assert not breaker().over
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    [line] = [line for line in status.lines if "are accepted" in line]
    assert "rejects for malformed are accepted from orders@0000001 on, by ann at 2026-03-01 12:00 UTC: foreign" in line
    assert "--reason malformed --revoke ends that" in line
    assert status.to_plain()["accepted_reasons"][0]["because"] == "foreign keys"


def _judged(judged: Judgement, circuit: Circuit, _: object) -> tuple[Circuit, list[Judgement]]:
    return circuit, [judged]


def test_a_slice_that_was_abandoned_is_requested_when_its_reason_is_accepted(repairing: Repairing) -> None:
    for refused in (ONE, TWO):
        repairing.fail_often(refused.key)
        judged = Judgement(refused.key, "orders", "run", NOON, 200, 200, refused=True, reasons={"malformed": 200})
        repairing.ledger.breakers.update("orders", (), partial(_judged, judged))
    assert repairing.tick()[0] == [([THREE.key, FOUR.key], False, "repair")]
    accepted = AcceptedReason("malformed", TWO.key, TWO.ordinal, "", "ann", datetime.now(UTC) + timedelta(seconds=1))
    repairing.ledger.breakers.accept_reason("orders", accepted)
    asked = sorted(keys for keys, _, _ in repairing.tick()[0])
    assert asked == [[TWO.key], [THREE.key, FOUR.key]], "the first one comes before the slice that was named"


@pytest.mark.parametrize(
    ("reasons", "asked", "reported"),
    [
        (["mangled"], {}, "rejects for mangled cannot be accepted"),
        (["unresolved"], {}, "rejects for unresolved cannot be accepted"),
        (["malformed"], {"from_slice": ""}, "no first slice is named"),
        (["malformed"], {"from_slice": RETRIED.key}, "is no slice of orders"),
        (["malformed"], {"from_slice": "orders@0000099"}, "orders@0000099"),
        (["malformed"], {"by": ""}, "needs the name of the person"),
    ],
)
def test_a_reason_that_cannot_be_accepted_is_refused(
    ledger: Ledger, reasons: list[str], asked: dict[str, Any], reported: str
) -> None:
    """`unresolved` holds slices here: these wait whatever the breaker does."""
    holding = replace(STREAM, on_reject={**ON_REJECT, "unresolved": OnReject.HOLD})
    ledger.add([TWO, RETRIED])
    with pytest.raises((ConfigurationError, UnknownSliceError), match=reported):
        accept(ledger, *reasons, stream=holding, **asked)
    assert ledger.breakers.read_accepted_reasons("orders") == {}


def test_command_and_job_accept_a_reason_for_a_stream(
    ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.add([ONE])
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["accept-rejects", *arguments])

    ask = ("orders", "--reason", "malformed", "--from", ONE.key)
    dry = run(*ask)
    assert (dry.exit_code, "add --yes --by NAME" in dry.output) == (0, True), dry.output
    assert ledger.breakers.read_accepted_reasons("orders") == {}
    assert run(*ask, "--yes", "--by", "ann").exit_code == 0
    assert [*ledger.breakers.read_accepted_reasons("orders")] == ["malformed"]
    assert run("orders", "--reason", "malformed", "--revoke", "--yes", "--by", "ann").exit_code == 0
    assert ledger.breakers.read_accepted_reasons("orders") == {}
    for wrong in (("orders", "--reason", "malformed"), (*ask, "--revoke"), (ONE.key, "--from", ONE.key)):
        assert run(*wrong).exit_code == 2
    job = build_defs(streams=[STREAM]).get_job_def("accept_rejects")
    asked = {
        "stream": "orders",
        "reasons": ["invalid"],
        "from_slice": ONE.key,
        "dry_run": False,
        "by": "bob",
        "because": "test data",
    }
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    assert ledger.breakers.read_accepted_reasons("orders")["invalid"].accepted_by == "bob"


def test_the_job_does_what_the_command_does(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add([ONE])
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)
    job = build_defs(streams=[STREAM]).get_job_def("accept_rejects")
    asked = {"stream": "orders", "slices": [ONE.key], "dry_run": False, "by": "ann", "because": "test data"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    assert ledger.breakers.read_accepted_slices([ONE.key])[ONE.key].accepted_by == "ann"


def test_invalid_acceptances_are_reported(ledger: Ledger) -> None:
    from highwater.orchestration.operations.accepting_rejects import AcceptSlicesRequest, accept_slices

    ledger.add([ONE])
    for asked, stream, error in (
        (AcceptSlicesRequest([ONE.key], dry_run=False), "orders", ConfigurationError),
        (AcceptSlicesRequest([]), "orders", ConfigurationError),
        (AcceptSlicesRequest([ONE.key]), "payments", ConfigurationError),
        (AcceptSlicesRequest(["orders@0000009"]), "orders", UnknownSliceError),
    ):
        with pytest.raises(error):
            accept_slices(ledger, [stream], asked, NOON, lambda _: None)
