"""An S3 server of a module's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dev.object_store import ObjectStore


@contextmanager
def open_store(folder: Path) -> Iterator[ObjectStore]:
    """An S3 server, which this process and its children find by AWS's variables."""
    with ObjectStore(folder) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        yield store
