"""Fixtures of the tests of Dagster's definitions and of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Limits
from highwater.orchestration.build import build_defs
from tests.helpers.breaking import open_repairing
from tests.helpers.operator_calls import OTHERS, SAME, WORK, Calls
from tests.helpers.repairing import Repairing
from tests.helpers.support import Message, make_stream, send
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from tests.conftest import TopicFactory


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


@pytest.fixture
def repairing(tmp_path: Path) -> Iterator[Repairing]:
    """Four planned slices, three of them in raw."""
    with open_repairing(tmp_path) as made:
        yield made


@pytest.fixture
def ticking(
    topic: TopicFactory,
    bootstrap: str,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ticking]:
    """Makes streams with some records on a topic, and ticks of their sensors."""

    def make(records: int = 40, **limits: int) -> Ticking:
        name = topic(partitions=2)
        monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", bootstrap)
        monkeypatch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{tmp_path / 'ledger.sqlite'}")
        monkeypatch.setenv("HIGHWATER_LAKE", str(tmp_path / "lake"))
        send(bootstrap, name, [Message(b"k", b"v", partition=n % 2) for n in range(records)])
        given: dict[str, Any] = {"max_offsets": 10, "slices_per_run": 3, **limits}
        stream = make_stream(name, limits=Limits(**given))
        return Ticking(stream, instance, tmp_path)

    return make
