"""The checks that fail, decided as Dagster decides them: for programs and tests that check a whole deployment.

They are stricter than the stream: a check that it declares a warning fails here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.checking.checks import Sources


class Failing(NamedTuple):
    """A check that fails in a slice, with what it says."""

    check: str
    slice_key: str
    text: str

    def __str__(self) -> str:
        return f"{self.check} of {self.slice_key}: {self.text}"


def failing(sources: Sources, stream: Stream) -> Iterator[Failing]:
    """The checks that fail in slices that are complete in all tables, those that the stream only warns of among them.

    What a check itself calls a warning is no failure: it is explained, and may fix itself.
    """
    from highwater.orchestration.checking.checks import CHECKS, select_failures
    from highwater.orchestration.checking.slice_status import read_attempts

    committed = read_attempts(sources.lake, stream)
    keys = [
        slice_.key
        for slice_ in sources.ledger.list_slices(stream.name)
        if not committed.select_missing_tables(slice_.key)
    ]
    for checks in CHECKS if keys else ():
        red = select_failures(stream, checks.check_slices(sources, stream, keys), warned=True)
        yield from (Failing(name, key, result.text) for name, key, result in red)
