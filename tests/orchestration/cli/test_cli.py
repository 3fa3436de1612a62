"""The command `highwater` on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dev.processes import LOOPBACK, free_port
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from tests.helpers.scene import Scene

TopicFactory = Callable[..., str]


@pytest.fixture
def scene(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> Scene:
    return Scene(bootstrap, topic(), tmp_path)


@pytest.mark.slow
def test_the_command_shows_where_planning_is(scene: Scene) -> None:
    scene.write(25)
    assert "a dry run" in scene.run("plan", "orders").output
    assert scene.slices() == []
    planned = json.loads(scene.run("plan", "orders", "--yes", "--json").output)
    assert (planned["recorded"], len(planned["slices"])) == (True, 1)
    scene.write(3)
    listed = scene.run("slices", "orders").output
    assert f"{scene.topic}@0000000" in listed
    assert "0: [0, 25)" in listed
    status = json.loads(scene.run("status", "--json").output)
    [partition] = status[0]["partitions"]
    assert (partition["planned"], partition["last_stable"], partition["lag"]) == (25, 28, 3)
    assert "lag 3" in scene.run("status", "orders").output
    unknown = scene.run("plan", "nobody")
    assert (unknown.exit_code, "declared are orders" in unknown.stderr) == (EXIT_PERMANENT, True)
    assert scene.run("accept-loss", "orders", "--yes", "--by", "").exit_code == EXIT_PERMANENT
    assert "nothing to accept" in scene.run("accept-loss", "orders").output


def test_the_command_reports_a_service_that_is_unavailable_by_its_exit_status(tmp_path: Path) -> None:
    scene = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path)
    result = scene.run("status")
    assert result.exit_code == EXIT_TEMPORARY
    assert "did not answer" in result.stderr
    assert "lag not known" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("reclaim", "orders", "--slice", "first"), "is not a slice key"),
        (("redrive-parked", "orders", "--slice", "orders@1"), "is not a slice key"),
        (("erase", "orders", "--key", ""), "the key is empty"),
        (("erase", "orders"), "either --key or --digest"),
    ],
)
def test_selections_without_records_are_reported_before_any_query(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    result = Scene("127.0.0.1:1", "orders", tmp_path).run(*arguments)
    assert result.exit_code
    assert expected in result.output
