"""Whether slices tile, and whether raw holds what was planned and nothing else (I2, I4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from highwater.orchestration.checking.verdicts import Verdict
from highwater.plans import Generation
from highwater.retention import aged
from highwater.tiling import Seam, seams

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.checking.offset_queries import InRaw, Rows
    from highwater.proof import Proof
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

# So many examples a slice; the counts are exact.
SAMPLES = 10
ABSENT = Verdict(passed=False, text="the slice is not in raw")


def slices_tile(ledger: Ledger, stream: Stream, keys: Sequence[str]) -> dict[str, Verdict]:
    """For each slice whether it begins where the one before it ends, or behind a recorded loss.

    Raises:
        DependencyAwayError: the ledger could not be read.
    """
    pieces = ledger.get(keys)
    generations = _generations(ledger, stream, pieces)
    losses = ledger.losses(stream.name)
    return {
        piece.key: _tiled(
            piece, seams([piece], generations[piece.topic, piece.generation], losses, ledger.before(piece))
        )
        for piece in pieces
    }


def all_seams(ledger: Ledger, stream: Stream, pieces: Iterable[Slice]) -> list[Seam]:
    """Where the slices of a stream, all of them given, do not tile.

    Raises:
        DependencyAwayError: the ledger could not be read.
    """
    groups: dict[tuple[str, int], list[Slice]] = {}
    for piece in sorted(pieces, key=lambda one: one.ordinal):
        groups.setdefault((piece.topic, piece.generation), []).append(piece)
    losses = ledger.losses(stream.name)
    generations = _generations(ledger, stream, [group[0] for group in groups.values()])
    return [seam for name, group in groups.items() for seam in seams(group, generations[name], losses)]


def _generations(ledger: Ledger, stream: Stream, pieces: Iterable[Slice]) -> dict[tuple[str, int], Generation]:
    """The generations of the slices; one that the ledger does not hold began wherever its first slice does."""
    found = {
        (topic, generation.number): generation
        for topic in {piece.topic for piece in pieces}
        for generation in ledger.generations(stream.name, topic)
    }
    unknown = {
        (piece.topic, piece.generation): Generation(
            stream.name, piece.topic, piece.topic_id, piece.generation, dict.fromkeys(piece.ranges), piece.planned_at
        )
        for piece in pieces
    }
    return unknown | found


def _tiled(piece: Slice, found: Sequence[Seam]) -> Verdict:
    if not found:
        return Verdict(passed=True, text=f"{len(piece.ranges)} ranges begin where those before them end")
    samples = [
        {"partition": seam.partition, "expected": seam.expected, "found": seam.found} for seam in found[:SAMPLES]
    ]
    text = (
        f"{found[0].text}. The ledger was changed beside Highwater: restore it, or highwater accept-loss records a hole"
    )
    return Verdict(passed=False, text=text, numbers={"seams": len(found)}, samples=samples)


def offsets_as_planned(found: InRaw) -> dict[str, Verdict]:
    """For each slice whether the commit of raw names the planned offsets, and its rows are of these, each once."""
    return {
        piece.key: _as_planned(piece, found.proofs[piece.key], found.rows[piece.key])
        if piece.key in found.proofs
        else ABSENT
        for piece in found.pieces
    }


def _as_planned(piece: Slice, proof: Proof, rows: Rows) -> Verdict:
    numbers = {"rows": rows.rows, "doubled": rows.doubled, "stretches_outside": len(rows.outside)}
    problem = another_plan(piece, proof, "raw")
    if problem is None and rows.doubled:
        problem = f"{rows.doubled:,} rows stand under an offset that has one already"
    if problem is None and rows.outside:
        problem = f"rows stand under offsets that were not planned: {rows.outside[0]}"
    if problem is None:
        gone = f"; {aged(proof):,} went by their age" if aged(proof) else ""
        text = f"{rows.rows:,} rows, each under a planned offset of its own{gone}"
        return Verdict(passed=True, text=text, numbers=numbers)
    samples = [{"outside": place} for place in rows.outside[:SAMPLES]]
    text = f"{problem}. The table was changed beside Highwater: restore it, or materialise the slice again from raw on"
    return Verdict(passed=False, text=text, numbers=numbers, samples=samples)


def another_plan(piece: Slice, proof: Proof, table: str) -> str | None:
    """How a commit's offsets differ from the plan, in a sentence; None if they do not."""
    planned = (piece.topic_id, piece.generation, dict(piece.ranges))
    committed = (proof.piece.topic_id, proof.piece.generation, dict(proof.piece.ranges))
    if planned == committed:
        return None
    names = ("topic ID", "generation", "ranges")
    differs = [name for name, one, other in zip(names, planned, committed, strict=True) if one != other]
    return f"the commit of {table} names other offsets than were planned: {', '.join(differs)}"


def another_commit(piece: Slice, proof: Proof, table: str, rows: int | None) -> str | None:
    """How a commit's offsets or its number of rows differ from what they must be, in a sentence; None if they do not.

    Args:
        piece: the plan.
        proof: what the commit says.
        table: where it stands.
        rows: how many the commit must tell of; None if nobody knows.
    """
    if (problem := another_plan(piece, proof, table)) or None in {rows, proof.rows} or rows == proof.rows:
        return problem
    return f"the commit of {table} tells of {proof.rows:,} rows, and should of {rows:,}"
