"""What stands in `current`: slices by themselves, and the partitions that slices were folded into.

What belongs here: reading the layout without a JVM. What does not: writing or folding it (`assets.current`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from highwater.folding import BASE, RECENT, Fold, fold_due
from highwater.proof import Proof
from resources.lake import query, sizes

if TYPE_CHECKING:
    from assets.work import Work

TABLE = "current"


@dataclass(frozen=True)
class Layout:
    """Proofs of slices that are not folded, and the folded partitions.

    Args:
        slices: by slice key.
        folds: by partition.
        rows: rows by partition.
        version: the version of the table; -1 without one.
    """

    slices: Mapping[str, Proof]
    folds: Mapping[str, Fold]
    rows: Mapping[str, int]
    version: int = -1

    @classmethod
    def read(cls, work: Work) -> Layout:
        """Look at the table now.

        Raises:
            DependencyAwayError: the lake could not be read.
        """
        table = work.lake.table(work.stream.name, TABLE)
        if table is None:
            return cls({}, {}, {})
        found = query(table, "SELECT slice, proof FROM t WHERE proof IS NOT NULL")
        texts = {str(row["slice"]): str(row["proof"]) for row in found}
        folds = {key: Fold.from_json(text) for key, text in texts.items() if key in {BASE, RECENT}}
        rows = {key: size.rows or 0 for key, size in sizes(table).items()}
        slices = {k: Proof.from_json(t) for k, t in texts.items() if k not in folds}
        return cls(slices, folds, rows, table.version())

    def attempt(self, key: str) -> int:
        """The attempt at which a slice stands here; 0 for none."""
        if key in self.slices:
            return self.slices[key].attempt
        return max((fold.attempt_of(key) for fold in self.folds.values()), default=0)

    def fold(self, key: str) -> Fold:
        """A folded partition; an empty one where there is none."""
        return self.folds.get(key, Fold(key, attempt=0))

    def fold_attempts(self) -> dict[str, int]:
        """The attempt of each folded partition; 0 where there is none."""
        return {key: self.fold(key).attempt for key in (BASE, RECENT)}

    def due(self, least: int | None = None) -> str | None:
        """Where the slices are to be folded into now; see `highwater.folding.fold_due`."""
        rows = sum(self.rows.get(key, 0) for key in self.slices)
        return fold_due(len(self.slices), rows, self.rows.get(RECENT, 0), self.rows.get(BASE, 0), least)
