"""The declared streams: found by their files, and refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from assets.streams import load_streams
from assets.streams.orders import STREAM as ORDERS
from highwater.errors import DeclarationError
from orchestration.cli import main
from orchestration.terminal import PERMANENT

ROOT = Path(__file__).parents[1]


def declare(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


@pytest.fixture
def declarations(tmp_path: Path) -> Path:
    folder = tmp_path / "streams"
    folder.mkdir()
    shipped = (ROOT / "assets/streams/orders.py").read_text()
    (folder / "orders.py").write_text(shipped)
    return folder


OTHER = "from dataclasses import replace\nfrom assets.streams.orders import STREAM as ORDERS\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("STREAM = (", "was never closed"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("STREAM = 3", "STREAM is int"),
        ("", "STREAM is NoneType"),
        ("from assets.streams.orders import STREAM", "declared twice"),
        (OTHER + "STREAM = replace(ORDERS, name='other')", "the topic 'orders' is declared twice"),
        (
            OTHER + "STREAM = replace(ORDERS, name='other', topic='o', key=('nothing',))",
            "'nothing' is used and not declared",
        ),
        (OTHER + "STREAM = replace(ORDERS, name='other', topic='o', start='yesterday')", "'yesterday'"),
        (OTHER + "STREAM = replace(ORDERS, name='other', topic='o', start='2026-03-01T00:00:00')", "zone"),
    ],
)
def test_a_broken_declaration_is_named_and_mended(declarations: Path, text: str, named: str) -> None:
    declare(declarations, "broken.py", text)
    with pytest.raises(DeclarationError) as caught:
        load_streams(declarations)
    assert "broken.py" in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.remedy
    result = CliRunner().invoke(main, ["--declarations", str(declarations), "status"])
    assert (result.exit_code, "broken.py" in result.stderr) == (PERMANENT, True)
    (declarations / "broken.py").unlink()
    assert set(load_streams(declarations)) == {"orders"}


def test_the_shipped_streams_are_found() -> None:
    found = load_streams()
    assert set(found) == {"orders", "payments"}
    assert found["orders"] == ORDERS
