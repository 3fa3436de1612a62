"""Commits of an erasure, written into the tables of a world as Spark would write them."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.assets import current, dlq, erasing, publication_log_writer, rejects
from highwater.assets.work import Work
from highwater.envelope import Origin
from highwater.errors import TemporaryError
from tests.helpers.world import RETRIED, World


class FakeErasureCommits:
    """Commits of an erasure, written into the tables of a world as Spark would write them."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, keeps: str = "") -> None:
        self.world, self.names, self.dies_after, self.keeps = world, list[str](), "", keeps
        for one in world.slices:
            world.alter_slice_commit("raw", one, rows=len(world.of("raw", slice=one.key)))
        world.write()
        for _ in range(2):  # those that the tables have
            world.ledger.allocate_attempts(world.keys)
        monkeypatch.setattr(erasing, "_read_remaining_rows", lambda *given: given)
        monkeypatch.setattr(erasing, "_with_attempts", lambda rows, attempts: (rows, attempts))
        monkeypatch.setattr(erasing, "_commit", self.commit)
        monkeypatch.setattr(publication_log_writer, "delete_origins", self.forget)
        monkeypatch.setattr(rejects, "materialise", self.ensure_followed)
        monkeypatch.setattr(dlq, "materialise", lambda _: None)
        monkeypatch.setattr(current, "materialise", self.follow)

    def commit(self, work: Work, name: str, committed: Any, rows: Any, slice_commits: Any, spread: str) -> None:
        del work, committed, spread
        mine = {slice_commit.key: slice_commit for slice_commit in slice_commits}
        attempts = {} if name == "raw" else rows[1]
        self.world.slice_commits[name].update(mine)
        gone = set() if name == self.keeps else {"o5", b"o5"}
        self.world.rows[name] = [
            {**row, **({"attempt": attempts[row["slice"]]} if row["slice"] in attempts else {})}
            for row in self.world.rows[name]
            if row["slice"] not in mine or row["key"] not in gone
        ]
        self.world.write()
        self.names.append(name)
        if name == self.dies_after:
            raise TemporaryError(f"killed after {name}", remedy="none")

    def follow(self, work: Work) -> None:
        if self.keeps != "current":
            self.world.rows["current"] = [row for row in self.world.rows["current"] if row["key"] != "o5"]
            self.world.write()

    def forget(self, work: Work, origins: Any) -> None:
        del work
        assert origins == {RETRIED.key: {Origin("orders", 0, 0, 4)}}
        self.names.append("forgotten")

    def ensure_followed(self, work: Work) -> None:
        """The stage would compute the rejects of what does not follow its decision."""
        slice_commits = {
            name: work.lake.load_slice_commits("orders", name, work.keys) for name in ("events", "rejects")
        }
        assert {k: p.attempt for k, p in slice_commits["events"].items()} == {
            k: p.attempt for k, p in slice_commits["rejects"].items()
        }
