"""Paths in a checkout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from highwater import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Jars and the Java wrapper follow from the checkout's locks, as the virtual environment does: they stay with it
# wherever HIGHWATER_HOME points, so that a second home downloads nothing.
TOOLS = REPOSITORY / ".highwater"


def home(environment: Mapping[str, str]) -> Path:
    """The folder of all local state: `HIGHWATER_HOME`, else `.highwater` in the checkout."""
    named = environment.get(settings.HOME)
    return Path(named).absolute() if named else TOOLS
