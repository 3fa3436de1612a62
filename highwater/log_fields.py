"""Fields of log lines: the code that knows a line's subject binds it, and the formatter adds it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager


def bind_log_fields(**values: object) -> AbstractContextManager[None]:
    """Give every line that is logged within the block these fields; the innermost block wins."""
    from structlog.contextvars import bound_contextvars

    return bound_contextvars(**values)


def build_slice_fields(keys: Sequence[str]) -> dict[str, str]:
    """The field of one slice, or of several, which are neighbours."""
    if not keys:
        return {}
    return {"slice": keys[0]} if len(keys) == 1 else {"slices": f"{keys[0]} .. {keys[-1]}"}
