"""Numbers and spans as texts for people, the same everywhere."""

from __future__ import annotations

from datetime import timedelta


def format_number(value: int | None) -> str:
    """A count or an offset; a dash where it is not known."""
    return "-" if value is None else f"{value:,}"


def format_duration(value: timedelta) -> str:
    """A duration to the second."""
    return str(timedelta(seconds=round(value.total_seconds())))
