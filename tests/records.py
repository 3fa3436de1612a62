"""Marks failures that tell of records lost, doubled, out of order or planned twice (I2, I4 to I7).

A race is seen once in many runs, so a test that then passes alone has told all the same: `tests.again` excuses none of
these. What belongs here: the mark. What does not: the assertions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from highwater.errors import UnbalancedError

MARK = "It tells of records, so it stands."
# `Failed` is also how pytest tells of a time limit.
DID_NOT_RAISE = "DID NOT RAISE"


@contextmanager
def of_records() -> Iterator[None]:
    """What is asserted in the block, or in the decorated function, tells of records; a wait that was in vain does not.

    A test with the marker `records` is one such block.
    """
    try:
        yield
    except (AssertionError, UnbalancedError) as error:
        error.add_note(MARK)
        raise
    except pytest.fail.Exception as error:
        if DID_NOT_RAISE in str(error):
            error.add_note(MARK)
        raise
