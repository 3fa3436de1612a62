"""The Dagster resources of this project: Highwater's own, which read their settings from the environment."""

from __future__ import annotations

from typing import Any

from highwater.orchestration.resources import default_resources


def project_resources() -> dict[str, Any]:
    """The resources by name; replace one here to configure it in code instead of by environment variables."""
    return default_resources()
