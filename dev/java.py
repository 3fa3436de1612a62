"""The Java of a checkout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dev import paths
from highwater.resources import java
from highwater.resources.java import Java

__all__ = ["Java", "find_java"]


def find_java(environment: Mapping[str, str], tools: Path = paths.TOOLS) -> Java:
    """The Java that `highwater.resources.java.find_java` finds, with the wrapper among the checkout's tools."""
    return java.find_java(environment, tools)
