"""Errors as Dagster understands them."""

from __future__ import annotations

import json
from collections.abc import Callable

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster_shared.serdes import serialize_value

from highwater.errors import DependencyUnavailableError, HighwaterError, OffsetsExpiredError
from highwater.orchestration.failures import FIRST_WAIT, TRIES_AGAIN, translate_errors, wait_seconds
from highwater.orchestration.redaction import HIDDEN, redact_error, select_secret_values
from highwater.orchestration.resources import read_settings
from highwater.settings import Settings

AWAY = DependencyUnavailableError("Kafka is unavailable", found="refused", remedy="check that it runs")
EXPIRED = OffsetsExpiredError("gone", stored="[0, 5)", found="7", remedy="accept the loss")


def raising(error: BaseException, stop: Callable[[], None] = lambda: None) -> None:
    with translate_errors(0, stop):
        raise error


@pytest.mark.parametrize("error", [AWAY, EXPIRED])
def test_the_failure_shows_both_values_and_the_remedy(error: HighwaterError) -> None:
    with pytest.raises((dg.Failure, dg.RetryRequested)) as raised:
        raising(error)
    failure = raised.value if isinstance(raised.value, dg.Failure) else raised.value.__cause__
    assert isinstance(failure, dg.Failure)
    shown = {name: value.value for name, value in failure.metadata.items()}
    assert shown["error"] == type(error).__name__
    assert shown["found"] == str(error.found)
    assert shown["remedy"] == error.remedy
    assert failure.description == f"{type(error).__name__}: {error}"


def test_only_what_waiting_may_fix_is_tried_again() -> None:
    with pytest.raises(dg.RetryRequested) as again:
        raising(AWAY)
    assert again.value.max_retries == TRIES_AGAIN
    with pytest.raises(dg.Failure) as final:
        raising(EXPIRED)
    assert not final.value.allow_retries
    with pytest.raises(dg.RetryRequested):
        raising(ZeroDivisionError())


@pytest.mark.parametrize("error", [DagsterExecutionInterruptedError(), KeyboardInterrupt(), SystemExit(1)])
def test_a_termination_stops_the_work_and_is_never_tried_again(error: BaseException) -> None:
    """A retry policy of Dagster's made a terminated run go on: its step was put up for retry."""
    stopped: list[bool] = []
    with pytest.raises(type(error)):
        raising(error, lambda: stopped.append(True))
    assert stopped == [True]


def test_no_step_has_a_retry_policy() -> None:
    from assets.streams.orders import STREAM
    from highwater.orchestration.build import build_defs

    job = build_defs(streams=[STREAM]).resolve_job_def("orders_slice")
    with_policy = [node.name for node in job.nodes if getattr(node.definition, "retry_policy", None) is not None]
    assert with_policy == []


def test_an_error_met_while_stopping_does_not_hide_the_first() -> None:
    def stop() -> None:
        raise OSError

    with pytest.raises(dg.Failure, match="gone"):
        raising(EXPIRED, stop)


def test_waits_double_and_are_spread() -> None:
    for tries in range(TRIES_AGAIN):
        waits = [wait_seconds(tries) for _ in range(200)]
        assert FIRST_WAIT * 2**tries * 0.5 <= min(waits) < max(waits) <= FIRST_WAIT * 2**tries * 1.5
        assert max(waits) > 1.5 * min(waits)


SECRET = "correct-horse-battery"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    # The failure itself is stored, without a wait.
    monkeypatch.setattr("highwater.orchestration.failures.TRIES_AGAIN", 0)
    config = {"security.protocol": "SASL_SSL", "sasl.username": "reader", "sasl.password": SECRET}
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", json.dumps(config))
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", "postgresql://ledger:staple-of-the-ledger@db/highwater")


@pytest.mark.parametrize("secret", [SECRET, "staple-of-the-ledger"])
@pytest.mark.parametrize("kind", [RuntimeError, DependencyUnavailableError, OffsetsExpiredError])
@pytest.mark.parametrize("depth", [0, 2])
def test_no_secret_reaches_what_dagster_stores(
    configured: None, secret: str, kind: type[Exception], depth: int
) -> None:
    """Dagster stores an error with all of its causes; Spark's may repeat the options of its Kafka source."""
    with dg.DagsterInstance.ephemeral() as instance:
        result = _failing_job(secret, kind, depth).execute_in_process(instance=instance, raise_on_error=False)
        assert not result.success
        stored = " ".join(serialize_value(entry) for entry in instance.all_logs(result.run_id))
    assert secret not in stored
    assert HIDDEN in stored


def _failing_job(secret: str, kind: type[Exception], depth: int) -> dg.JobDefinition:
    def fail(left: int) -> None:
        text = f"login with {secret} refused" if left == 0 else "could not read"
        error = kind(text, remedy="log in") if issubclass(kind, HighwaterError) else kind(text)
        if left == 0:
            raise error
        try:
            fail(left - 1)
        except Exception as cause:
            raise error from cause

    @dg.op
    def failing() -> None:
        with translate_errors(0, lambda: None):
            fail(depth)

    @dg.job(executor_def=dg.in_process_executor)
    def job() -> None:
        failing()

    return job


def test_the_token_of_a_connect_server_is_a_secret() -> None:
    """Only the doctor hid it; a client that refused its address repeated it in the events of a run."""
    remote = "sc://spark:15002/;use_ssl=true;token=planted%2Ftoken;x-key=planted-header"
    found = Settings.from_environment({"SPARK_REMOTE": remote})
    assert {"planted%2Ftoken", "planted/token", "planted-header"} <= select_secret_values(found)
    assert "true" not in select_secret_values(found)
    assert "planted" not in repr(found)


def test_an_error_without_secrets_keeps_its_causes(configured: None) -> None:
    error = RuntimeError("reader was refused")
    assert redact_error(error, select_secret_values(read_settings())) is error
