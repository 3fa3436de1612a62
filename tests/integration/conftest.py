"""Fixtures of the tests of whole runs: a stream whose faults are repaired, and tables with planted defects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.faults import Ours, make_held, make_soon
from tests.helpers.planting import build_factory, look, show_settings

if TYPE_CHECKING:
    import dagster as dg

    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory
    from tests.helpers.crash_support import Deployment
    from tests.helpers.world import World


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and repair without their waits."""
    make_soon(monkeypatch)


@pytest.fixture
def held(
    topic: TopicFactory, bootstrap: str, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Deployment:
    """A deployment that this process is configured for."""
    return make_held(topic, bootstrap, spark_server, tmp_path, monkeypatch)


@pytest.fixture
def ours(held: Deployment, instance: dg.DagsterInstance, soon: None) -> Ours:
    """The deployment, with its sensors, its job and its commands."""
    return Ours.on(held, instance)


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes sound tables, whose gaps were not looked at."""
    return build_factory(tmp_path, monkeypatch)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """Sound tables, whose gaps were not looked at."""
    return make_world()


@pytest.fixture(scope="session")
def shared_looked(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Sound tables, whose gaps were looked at; tests change copies of them."""
    with pytest.MonkeyPatch.context() as patch:
        return look(build_factory(tmp_path_factory.mktemp("looked"), patch)())


@pytest.fixture
def looked(shared_looked: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Sound tables of the test's own, whose gaps were looked at."""
    return show_settings(shared_looked.copy(tmp_path), monkeypatch)
