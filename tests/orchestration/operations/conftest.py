"""Fixtures of the tests of operations: the tables of a stream, and the step that deletes old rows of raw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.retained import Step, make_world, open_step
from tests.helpers.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Sound tables."""
    return make_world(tmp_path)


@pytest.fixture
def step(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    """Maintenance of these tables."""
    with open_step(world, monkeypatch) as made:
        yield made
