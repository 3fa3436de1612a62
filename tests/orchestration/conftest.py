"""Fixtures of the tests of Dagster's definitions and of the commands."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.orchestration.build import build_defs
from tests.helpers.operator_calls import OTHERS, SAME, WORK, Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """Every function that does the work, replaced."""
    found = Calls()
    for module in {module for module, _, _ in SAME.values()}:
        monkeypatch.setattr(import_module(f"highwater.orchestration.operations.{module}"), WORK[module], found)
    for name in ("pause_or_resume", "pause_or_resume_tier"):
        monkeypatch.setattr(f"highwater.orchestration.operations.pausing.{name}", found)
        monkeypatch.setattr(f"highwater.orchestration.cli.pause.{name}", found)
    monkeypatch.setattr("highwater.orchestration.resources.open_session", lambda _: None)
    monkeypatch.setattr("highwater.orchestration.resources.close_session", lambda _: None)
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", "nobody:1")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return found


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    spark = SimpleNamespace(get_session=lambda: None, interrupt=lambda: None)
    return build_defs(streams=[ORDERS, OTHERS], resources={"spark": spark})
