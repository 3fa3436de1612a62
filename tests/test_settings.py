"""What a deployment configures, read from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.errors import ConfigurationError
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


@pytest.mark.parametrize("url", ["http://user:pa/ss@host:8081", "https://user:pa#ss@host", "http://[bad", "http://h:x"])
def test_an_address_of_a_registry_whose_password_would_show_is_refused(url: str) -> None:
    """The part behind `/` or `#` counted as the path, and was shown with the address."""
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({"HIGHWATER_SCHEMA_REGISTRY_URL": url})
    assert "ss@" not in str(caught.value)
