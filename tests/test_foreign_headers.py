"""Headers of DLQ topics that other systems filled, and the origins that they name."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Foreign
from highwater.errors import DeclarationError
from highwater.foreign import MainLog, find_publication_time, parse_foreign_origin
from highwater.stream_files import load_streams
from tests.helpers.foreign_records import BAD, DELAY, HOUR, MS, ONE, PUBLISHED, SOUND, THEIRS, THREE


@pytest.mark.parametrize("name", SOUND)
def test_their_headers_name_the_first_failure(name: str) -> None:
    headers, kind, expected = SOUND[name]
    assert parse_foreign_origin(headers, 77, kind) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_copy_is_as_old_as_its_original(name: str) -> None:
    topic, headers, kind, expected = PUBLISHED[name]
    assert find_publication_time(replace(ORDERS, foreign=(THEIRS,)), topic, headers, 77, kind) == expected


@pytest.mark.parametrize("name", BAD)
def test_invalid_foreign_headers_have_no_origin(name: str) -> None:
    assert parse_foreign_origin(BAD[name], 77, 0) is None


@pytest.mark.parametrize(
    ("log", "timestamp", "appended", "expected"),
    [
        (ONE, 0, MS, 0),
        (ONE, None, MS + HOUR, 0),
        (MainLog([]), MS, MS, None),
        (THREE, MS + 10 * HOUR - 1, MS + 30 * HOUR, 0),
        (THREE, MS + 10 * HOUR, MS + 30 * HOUR, 1),
        (THREE, MS + 20 * HOUR, MS + 30 * HOUR, 2),
        (THREE, None, MS + 10 * HOUR - 1, 0),
        (THREE, None, MS + 10 * HOUR, None),
        (THREE, None, MS + 30 * HOUR, None),
    ],
)
def test_the_generation_is_the_one_open_at_the_time(
    log: MainLog, timestamp: int | None, appended: int, expected: int | None
) -> None:
    """Without the record's own time it is known only as long as there was one: it came before it was appended."""
    assert log.find_open_offset(timestamp, appended) == expected


@pytest.mark.parametrize(
    ("foreign", "problem"),
    [
        (Foreign("sink.errors", timedelta(0)), "must wait between a second and seven days"),
        (Foreign("sink.errors", timedelta(days=8)), "must wait between a second and seven days"),
        (Foreign("sink errors", DELAY), "'sink errors' is no topic name"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(foreign: Foreign, problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        replace(ORDERS, foreign=(foreign,))


@pytest.mark.parametrize(
    ("topics", "named"),
    [
        (["orders"], "has the topic 'orders' 2 times"),
        (["orders.dlq.1"], "has the topic 'orders.dlq.1' 2 times"),
        (["sink.errors", "sink.errors"], "has the topic 'sink.errors' 2 times"),
        (["payments"], "the topic 'payments' is declared twice"),
        (["payments.parked"], "the topic 'payments.parked' is declared twice"),
    ],
)
def test_a_topic_has_one_stream_and_one_part_in_it(tmp_path: Path, topics: list[str], named: str) -> None:
    """Two that plan the same topic would give their slices the same keys."""
    text = (
        "from dataclasses import replace\nfrom datetime import timedelta\nfrom highwater.declaration import Foreign\n"
    )
    for name in ("orders", "payments"):
        foreign = [f"Foreign({topic!r}, timedelta(minutes=1))" for topic in topics if name == "orders"]
        (tmp_path / f"{name}.py").write_text(
            f"{text}from assets.streams.{name} import STREAM\n"
            f"STREAM = replace(STREAM, foreign=({''.join(one + ', ' for one in foreign)}))\n"
        )
    with pytest.raises(DeclarationError, match=named):
        load_streams(tmp_path)
