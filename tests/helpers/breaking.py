"""Work and slices of a stream whose breaker admits or refuses them, without Spark and Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from highwater.assets.work import Work
from highwater.declaration import Breaker, Stream
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slices import Slice
from tests.helpers.commits import commit_empty
from tests.helpers.repairing import (
    FOUR,
    NOON,
    ONE,
    STREAM,
    THREE,
    TWO,
    Repairing,
)
from tests.helpers.written_tables import a_slice


def make_work(ledger: Ledger, tmp_path: Path) -> Callable[..., Work]:
    """Work without Spark and Kafka: the breaker is asked before either is touched."""

    def make(*slices: Slice, run: str = "run", **rules: Any) -> Work:
        nothing: Any = None
        stream = replace(STREAM, breaker=Breaker(**rules))
        lake = Lake(str(tmp_path / "lake"))
        return Work(stream, slices, nothing, lake, ledger, nothing, lambda _: None, run=run)

    return make


def build_counts(**slices: tuple[int, int]) -> dict[str, dict[str, int]]:
    """The numbers of a split: raw records and rejects, by the slice's ordinal."""
    return {f"orders@{int(name[1:]):07d}": {"raw": raw, "rejects": rejects} for name, (raw, rejects) in slices.items()}


RETRIED = a_slice(1, 100, STREAM.tier_topics[0])


@contextmanager
def open_repairing(
    tmp_path: Path, stream: Stream = STREAM, slices: Sequence[Slice] = (ONE, TWO, THREE, FOUR), in_raw: int = 3
) -> Iterator[Repairing]:
    """Planned slices; the first ones are in raw."""
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        made = Repairing(tmp_path, instance, [*slices], stream)
        commit_empty(made.lake, [*slices[:in_raw]], "raw")
        yield made


def build_split(key: str, raw: int, **reasons: int) -> dict[str, dict[str, int]]:
    """The numbers of a split of one slice."""
    by_reason = {f"rejects_{reason}": count for reason, count in reasons.items()}
    return {key: {"raw": raw, "rejects": sum(reasons.values()), **by_reason}}


def accept(
    ledger: Ledger, *reasons: str, from_slice: str = TWO.key, stream: Stream = STREAM, **asked: Any
) -> list[str]:
    from highwater.orchestration.operations.accepting_rejects import AcceptReasonsRequest, accept_reasons

    lines: list[str] = []
    given = {"from_slice": from_slice, "dry_run": False, "by": "ann", "because": "foreign keys", **asked}
    accept_reasons(ledger, stream, AcceptReasonsRequest(reasons, **given), NOON, lines.append)
    return lines
