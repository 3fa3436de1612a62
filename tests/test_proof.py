"""The proof of a slice keeps everything that the plan said, through its written form."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from highwater.proof import Proof
from highwater.slices import OffsetRange, Slice

PIECE = Slice(
    "orders", "orders", "Abc", 2, 42, {0: OffsetRange(5, 9), 1: OffsetRange(7, 7)}, datetime(2026, 1, 2, tzinfo=UTC)
)


def test_a_proof_survives_its_written_form() -> None:
    proof = Proof(PIECE, attempt=3, rows=4, counts={"bytes": 17})
    assert Proof.from_json(proof.to_json()) == proof


def test_a_proof_of_a_newer_format_is_not_guessed_at() -> None:
    text = Proof(PIECE, attempt=3, rows=4).to_json().replace('"format":1', '"format":2')
    with pytest.raises(ValueError, match="format 2"):
        Proof.from_json(text)
