"""Spark as a run uses it: a process of its own opens a session, tries what the tables need, and runs a job."""

# The process ends with its JVM after a bounded time, whatever Spark waits for.

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from highwater import settings as names
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError, TemporaryError
from highwater.orchestration.redaction import redact_secrets, select_secret_values
from highwater.orchestration.reporting.trial_results import TrialResult
from highwater.orchestration.resources import close_session, open_session
from highwater.resources import spark_checks
from highwater.resources.spark import is_connect
from highwater.resources.spark_places import reach
from highwater.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long the process and its JVM have to end by themselves.
END_SECONDS = 10.0
# Lines of Spark's log about a session or a job that does not start. Such lines hold no secret.
_HINT = re.compile(
    r"All masters are unresponsive|Initial job has not accepted any resources[^\n]*|UnknownHostException[^\n]*"
    r"|InvalidClassException[^\n]*|Failed to connect to master[^\n]*|OutOfMemoryError[^\n]*"
)


@dataclass(frozen=True)
class TrialStep:
    """One thing that the process tries.

    Args:
        what: its name among what the doctor tried.
        check: takes a session and the settings, returns what was found and a warning's remedy.
        seconds: how long it may take.
        late: the meaning of a longer duration.
        remedy: the remedy for that.
    """

    what: str
    check: Callable[[SparkSession, Settings], str | tuple[str, str]]
    seconds: float
    late: str
    remedy: str


_LOG = "read the log of Spark's driver or server"
SESSION = TrialStep(
    "Spark session",
    spark_checks.check_session,
    # A driver is up in ten seconds. A client of Connect tries for 35 s, one of a standalone master for 60 s; YARN and
    # Kubernetes start a container first.
    120.0,
    "no Spark session was open",
    "see on the cluster's page that it accepts applications of this Spark version and has room for one",
)
LAKE = TrialStep(
    "Spark and the lake", spark_checks.check_lake, 60.0, "Spark did not answer about a table in the lake", _LOG
)
KAFKA = TrialStep("Spark and Kafka", spark_checks.check_kafka, 60.0, "Spark did not load the Kafka connector", _LOG)
AVRO = TrialStep("Spark and Avro", spark_checks.check_avro, 60.0, "Spark did not load the module for Avro", _LOG)
# A worker of a standalone cluster has an executor in some five seconds, a pod with its image at hand in some twenty.
JOB = TrialStep(
    "Spark job",
    spark_checks.check_job,
    60.0,
    "no executor of Spark ran a task",
    "start workers, or give the application fewer cores and less memory (spark.cores.max, spark.executor.memory) "
    "than workers have free; executors must also reach the driver at spark.driver.host",
)


STEPS = (SESSION, LAKE, KAFKA, AVRO, JOB)


def try_spark(settings: Settings, environment: Mapping[str, str], *, avro: bool) -> Iterator[TrialResult]:
    """Connect to Spark, then open a session and use it.

    Args:
        settings: which Spark.
        environment: the variables of a run.
        avro: whether a stream needs the module for Avro.
    """
    try:
        text, unavailable = reach(settings, environment)
    except HighwaterError as error:
        yield TrialResult("Spark", error=error)
        return
    if unavailable:
        text = f"{text}; none at {', '.join(unavailable)}"
    yield TrialResult(
        "Spark",
        text,
        warning=bool(unavailable),
        remedy="start the others, or take them off the list" if unavailable else "",
    )
    yield from _run_in_process([step for step in STEPS if avro or step is not AVRO], settings, environment)


def _run_in_process(
    steps: Sequence[TrialStep], settings: Settings, environment: Mapping[str, str]
) -> Iterator[TrialResult]:
    """Have the steps tried by a process, and end it."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as reports, tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                build_trial_command(write_end, steps),
                env=build_environment(settings, environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                # Its JVM is in the same group, so that both can be ended.
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        answered = False
        try:
            answered = yield from _read_reports(steps, reports, log, select_secret_values(settings))
        finally:
            if answered:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            end(process)


def build_trial_command(write_end: int, steps: Sequence[TrialStep]) -> list[str]:
    """The process; it reports to the pipe."""
    return [sys.executable, "-m", __name__, str(write_end), *(step.what for step in steps)]


def build_environment(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the process: those of a run, with these settings."""
    named = {
        names.HOME: str(settings.home),
        names.LAKE: settings.lake,
        names.SPARK_REMOTE: settings.spark_remote or "",
        names.SPARK_MASTER: settings.spark_master,
    }
    return {name: value for name, value in {**environment, **named}.items() if value}


def _read_reports(
    steps: Sequence[TrialStep], reports: BinaryIO, log: BinaryIO, secrets: frozenset[str]
) -> Generator[TrialResult, None, bool]:
    """The process's report of each step; returns whether it answered to the end."""
    rest = b""
    for step in steps:
        line, rest = _read_line(reports, rest, step.seconds)
        if line is None:
            yield TrialResult(step.what, error=_build_unanswered_error(step, ended=rest == ENDED, log=log))
            return False
        one = from_plain(json.loads(line), secrets)
        yield one
        if step is SESSION and one.error is not None:
            break
    return True


ENDED = b"ended"


def _read_line(reports: BinaryIO, rest: bytes, seconds: float) -> tuple[bytes | None, bytes]:
    """The next line and what was read after it; without a line, `ENDED` if the process has closed the pipe."""
    deadline = time.monotonic() + seconds
    while b"\n" not in rest:
        ready, _, _ = select.select([reports], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None, b""
        read = reports.read(65536)
        if not read:
            return None, ENDED
        rest += read
    line, _, rest = rest.partition(b"\n")
    return line, rest


def _build_unanswered_error(step: TrialStep, *, ended: bool, log: BinaryIO) -> HighwaterError:
    log.seek(0)
    hints = _HINT.findall(log.read().decode(errors="replace"))
    hint = hints[-1][:300] if hints else None
    if ended:
        return DependencyUnavailableError(
            f"the process that tried Spark ended at: {step.what}",
            found=hint,
            remedy="check that this machine has memory for a driver (spark.driver.memory), then run it again",
        )
    return DependencyUnavailableError(f"{step.late} within {step.seconds:g} s", found=hint, remedy=step.remedy)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its JVM: by SIGTERM, so that a driver leaves its cluster, at last by SIGKILL."""
    with suppress(ProcessLookupError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()


def to_plain(one: TrialResult) -> dict[str, Any]:
    """The result as JSON holds it."""
    plain: dict[str, Any] = {"what": one.what, "text": one.text, "warning": one.warning, "remedy": one.remedy}
    if (error := one.error) is not None:
        found = None if error.found is None else str(error.found)
        plain["error"] = {"problem": error.problem, "stored": error.stored, "found": found, "remedy": error.remedy}
        plain["temporary"] = isinstance(error, TemporaryError)
    return plain


def from_plain(plain: Mapping[str, Any], secrets: frozenset[str] = frozenset()) -> TrialResult:
    """The inverse of `to_plain`, without the secrets; an error comes back as one of two kinds."""

    def redact_values(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: redact_secrets(one, secrets) if isinstance(one, str) else one for name, one in part.items()}

    rest = redact_values(plain)
    error, temporary = rest.pop("error", None), rest.pop("temporary", False)
    if error is not None:
        error = redact_values(error)
        return TrialResult(**rest, error=(DependencyUnavailableError if temporary else ConfigurationError)(**error))
    return TrialResult(**rest)


def run_steps(steps: Iterable[TrialStep], settings: Settings) -> Iterator[TrialResult]:
    """Open a session and try the steps; none follows a session that cannot be used."""
    with _session(settings) as session:
        for step in steps:
            one = _run_step(step, session, settings)
            yield one
            if step is SESSION and one.error is not None:
                return


def _run_step(step: TrialStep, session: SparkSession, settings: Settings) -> TrialResult:
    try:
        found = step.check(session, settings)
    except HighwaterError as error:
        return TrialResult(step.what, error=error)
    except Exception as error:  # noqa: BLE001 - Spark has no common class of errors
        return TrialResult(
            step.what, error=spark_checks.explain_error(f"{step.what}: the check failed", error, settings)
        )
    text, remedy = (found, "") if isinstance(found, str) else found
    return TrialResult(step.what, text, warning=bool(remedy), remedy=remedy)


@contextmanager
def _session(settings: Settings) -> Iterator[SparkSession]:
    """A session; one of this process is stopped, so that its cluster has its cores back at once."""
    session = open_session(settings)
    try:
        yield session
    finally:
        close_session(session)
        if not is_connect(session):
            session.stop()


def main(write_end: int, chosen: Sequence[str]) -> None:
    """The process: one line of JSON for each step."""
    settings = Settings.from_environment(os.environ)
    steps = [step for step in STEPS if step.what in chosen]
    with os.fdopen(write_end, "w", encoding="utf-8") as reports:

        def report(one: TrialResult) -> None:
            reports.write(f"{json.dumps(to_plain(one))}\n")
            reports.flush()

        try:
            for one in run_steps(steps, settings):
                report(one)
        except Exception as error:  # noqa: BLE001 - of `open_session`: Spark has no common class of errors
            report(
                TrialResult(SESSION.what, error=spark_checks.explain_error("no Spark session opens", error, settings))
            )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
