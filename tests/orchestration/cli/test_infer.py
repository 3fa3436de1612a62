"""What `highwater infer` writes and shows, without a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.errors import DeclarationError
from highwater.inference import infer
from highwater.orchestration.cli import infer as command
from highwater.sample_counts import count_sample
from highwater.stream_source import to_source
from tests.helpers.inferred import build_records, orders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "_select_streams_folder", lambda: tmp_path)
    return tmp_path


def write_stream(folder: Path, name: str, topic: str) -> Path:
    file = folder / f"{name}.py"
    command._write(file, to_source(infer(topic, build_records(orders()), name=name).stream))
    return file


def test_a_faulty_file_of_another_stream_prevents_nothing(folder: Path) -> None:
    """No further topic was declared until the other file was mended."""
    (folder / "broken.py").write_text("STREAM =")
    assert write_stream(folder, "orders", "orders.v1").exists()


def test_a_file_that_contradicts_another_one_is_not_left(folder: Path) -> None:
    first = write_stream(folder, "orders", "orders.v1")
    with pytest.raises(DeclarationError, match=r"topic 'orders\.v1' is declared twice"):
        write_stream(folder, "again", "orders.v1")
    assert [one.name for one in folder.glob("*.py")] == ["orders.py"]
    before = first.read_text()
    write_stream(folder, "refunds", "refunds.v1")
    with pytest.raises(DeclarationError, match="declared twice"):
        command._write(first, before.replace("orders.v1", "refunds.v1"))
    assert first.read_text() == before


@pytest.mark.parametrize(("value", "shown"), [(b'{"id":1,"id":2}', True), (b'{"id":1}', False)])
def test_a_declaration_that_accepts_nothing_says_so(
    value: bytes, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the table of rejects showed it, above a line that all was written."""
    records = build_records((None, value) for _ in range(20))
    found = infer("t", records)
    command._show(found, count_sample(found.stream, records, None), Path("t.py"))
    assert ("no sampled record would be an event" in capsys.readouterr().out) is shown


def test_names_are_shown_in_quotation_marks() -> None:
    """A tab or an empty name was not to be seen."""
    assert command._list_names(["", "a\tb", "größe", "\ud83d"]) == r'"", "a\tb", "größe", "\ud83d"'
    assert command._list_names([str(n) for n in range(22)]).endswith('"19", and 2 more')
