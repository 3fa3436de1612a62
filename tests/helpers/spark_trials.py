"""The doctor's trial of a real Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from highwater.orchestration.reporting.spark_trial import try_spark
from highwater.settings import Settings

if TYPE_CHECKING:
    import pytest

    from highwater.orchestration.reporting.spark_trial import TrialStep
    from highwater.orchestration.reporting.trial_results import TrialResult

STEPS = ["Spark", "Spark session", "Spark and the lake", "Spark and Kafka", "Spark job"]
# With a stream whose records are Avro.
ALL_STEPS = [*STEPS[:4], "Spark and Avro", STEPS[4]]


def limit_step(monkeypatch: pytest.MonkeyPatch, step: TrialStep, seconds: float) -> None:
    """Let a step take this long at the most."""
    monkeypatch.setitem(vars(step), "seconds", seconds)


def try_real_spark(home: Path, variables: Mapping[str, str], **given: str) -> dict[str, TrialResult]:
    """What the doctor finds, by step."""
    found = Settings.from_environment({"HIGHWATER_HOME": str(home), **given})
    return {one.what: one for one in try_spark(found, variables, avro=True)}


def read_states(found: Mapping[str, TrialResult]) -> dict[str, str]:
    """The first word of each step's row: `ok` or `failed`."""
    return {name: one.row[0] for name, one in found.items()}
