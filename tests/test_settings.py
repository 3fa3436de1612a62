"""What a deployment configures, read from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.settings import Settings


@pytest.mark.parametrize(
    ("named", "root"),
    [
        ("lake", f"{Path('lake').absolute()}"),
        ("/mnt/lake", "/mnt/lake"),
        ("s3://bucket/lake", "s3://bucket/lake"),
        ("file:/mnt/lake", "file:/mnt/lake"),
    ],
)
def test_a_lake_lies_at_one_place_for_every_process(named: str, root: str) -> None:
    """Spark takes a table by its path only where that is absolute."""
    assert Settings.from_environment({"HIGHWATER_LAKE": named}).lake == root
