"""Health of a deployment: whether the ledger answers, the daemon runs and the planner ticks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.errors import HighwaterError
from highwater.orchestration.dagster_home import Opened, ask_instance
from highwater.wording import format_duration

if TYPE_CHECKING:
    import dagster as dg

    from highwater.resources.ledger import Ledger

# The sensors that serve all streams.
PLANNER = "planner"
SENSORS = (PLANNER, "dlq_retries", "repair", "offset_mirror", "publisher", "alerts")
# Daemons report every 30 s. A tick of a sensor takes 60 s at the longest, and the planner's next one begins 10 s later.
# The limit leaves room for two of them.
LIMIT = timedelta(seconds=180)


@dataclass(frozen=True)
class HealthCondition:
    """A condition of health.

    Args:
        name: `ledger`, `daemon` or `planner`.
        ok: whether it holds; None where it cannot be asked.
        reason: the values that were found, and the remedy of what does not hold.
    """

    name: str
    ok: bool | None
    reason: str


@dataclass(frozen=True)
class Health:
    """All conditions of health.

    Args:
        findings: one for each condition.
    """

    findings: Sequence[HealthCondition]

    @property
    def ok(self) -> bool:
        """Whether no condition fails."""
        return all(one.ok is not False for one in self.findings)

    def to_plain(self) -> dict[str, Any]:
        """The conditions as values of JSON."""
        checks = {one.name: {"ok": one.ok, "reason": one.reason} for one in self.findings}
        return {"status": "ok" if self.ok else "failing", "checks": checks}


def examine(ledger: Callable[[], Ledger], dagster: Opened, now: datetime) -> Health:
    """Examine the health of a deployment.

    Args:
        ledger: opens the ledger.
        dagster: opens the instance; it gives None where DAGSTER_HOME is not set.
        now: the time, in UTC.
    """
    return Health(
        [
            _check_ledger(ledger),
            _check_dagster("daemon", dagster, lambda instance: _check_daemon(instance, now)),
            _check_dagster(PLANNER, dagster, lambda instance: _check_planner(instance, now)),
        ]
    )


def _check_ledger(ledger: Callable[[], Ledger]) -> HealthCondition:
    try:
        ledger().alerts.read_open()
    except HighwaterError as error:
        return HealthCondition("ledger", ok=False, reason=f"{error.problem}; {error.remedy}")
    return HealthCondition("ledger", ok=True, reason="it answers")


def _check_dagster(
    name: str, dagster: Opened, question: Callable[[dg.DagsterInstance], HealthCondition]
) -> HealthCondition:
    found, error = ask_instance(dagster, question)
    if error is not None:
        return HealthCondition(name, ok=False, reason=f"{error.problem}; {error.remedy}")
    return found or HealthCondition(name, ok=None, reason="not asked: DAGSTER_HOME is not set")


def _check_daemon(instance: dg.DagsterInstance, now: datetime) -> HealthCondition:
    beats = fetch_heartbeats(instance)
    late = {name: at for name, at in beats.items() if at is None or now.timestamp() - at > LIMIT.total_seconds()}
    if not late:
        return HealthCondition(
            "daemon", ok=True, reason=f"{len(beats)} daemons reported within {format_duration(LIMIT)}"
        )
    shown = ", ".join(f"{name} {_format_time_ago(at, now)}" for name, at in sorted(late.items()))
    return HealthCondition(
        "daemon", ok=False, reason=f"no heartbeat within {format_duration(LIMIT)}: {shown}; start dagster-daemon"
    )


def _check_planner(instance: dg.DagsterInstance, now: datetime) -> HealthCondition:
    at = fetch_last_ticks(instance, [PLANNER]).get(PLANNER)
    if at is None:
        return HealthCondition(PLANNER, ok=False, reason="no tick of a running sensor planner; switch it on in Dagster")
    if now.timestamp() - at > LIMIT.total_seconds():
        remedy = "check that dagster-daemon and the code server run"
        return HealthCondition(PLANNER, ok=False, reason=f"its last tick was {_format_time_ago(at, now)}; {remedy}")
    return HealthCondition(PLANNER, ok=True, reason=f"its last tick was {_format_time_ago(at, now)}")


def _format_time_ago(at: float | None, now: datetime) -> str:
    return "never" if at is None else f"{format_duration(timedelta(seconds=max(0, round(now.timestamp() - at))))} ago"


def fetch_heartbeats(instance: dg.DagsterInstance) -> Mapping[str, float | None]:
    """The last heartbeat of each daemon that the instance needs, in seconds since 1970; None where there is none."""
    found = instance.get_daemon_heartbeats()
    return {name: found[name].timestamp if name in found else None for name in instance.get_required_daemon_types()}


def fetch_last_ticks(instance: dg.DagsterInstance, sensors: Collection[str]) -> Mapping[str, float]:
    """The begin of the last tick of each sensor that is switched on, in seconds since 1970.

    Args:
        instance: Dagster's instance.
        sensors: the names of the sensors.
    """
    from dagster._core.definitions.run_request import InstigatorType

    if instance.schedule_storage is None:  # an instance in memory
        return {}
    found: dict[str, float] = {}
    for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
        if state.instigator_name in sensors and state.is_running:
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1):
                found[state.instigator_name] = max(found.get(state.instigator_name, 0.0), tick.timestamp)
    return found
