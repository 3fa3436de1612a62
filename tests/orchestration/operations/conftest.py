"""Fixtures of the tests of operations: the tables of a stream, and the step that deletes old rows of raw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.retained import Step, make_looked, open_step
from tests.helpers.world import World


@pytest.fixture(scope="session")
def shared_looked(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Sound tables, whose gaps were looked at; tests change copies of them."""
    return make_looked(tmp_path_factory.mktemp("looked"))


@pytest.fixture
def world(shared_looked: World, tmp_path: Path) -> World:
    """Sound tables of the test's own."""
    return shared_looked.copy(tmp_path)


@pytest.fixture
def step(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    """Maintenance of these tables."""
    with open_step(world, monkeypatch) as made:
        yield made
