"""A test double for the copy of a ledger's table in the lake, which dies before or after it follows the ledger."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from highwater.errors import TemporaryError

if TYPE_CHECKING:
    import pytest

    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger


class FailingSync:
    """Dies once at a point: `before 2` is before the table follows the ledger for the second time.

    Args:
        module: of the table.
        point: `before N`, `after N`; any other text for none.
        monkeypatch: undoes it.
    """

    def __init__(self, module: ModuleType, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point, self.calls, self.sync = point, 0, module.sync_with_ledger
        monkeypatch.setattr(module, "sync_with_ledger", self)

    def __call__(self, ledger: Ledger, lake: Lake, stream: str) -> int:
        self.calls += 1
        self.fail_at("before")
        found: int = self.sync(ledger, lake, stream)
        self.fail_at("after")
        return found

    def fail_at(self, when: str) -> None:
        if self.point == f"{when} {self.calls}":
            self.point = ""
            raise TemporaryError(f"killed {when} {self.calls}", remedy="none")
