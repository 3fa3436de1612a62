"""The fields of an event beside those of its record, by two parsers that share no code with the pipeline."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from highwater.declaration import Field
from highwater.orchestration.checking import contents
from highwater.orchestration.checking.contents import (
    _EventColumn,
    _Reader,
    _select_candidate_rows,
    _select_differing_fields,
)
from highwater.second_reader import KafkaRecord
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
READER = _Reader(STREAM, None)
COLUMNS = [
    _EventColumn(Field("id", "string"), "id", always=False),
    _EventColumn(Field("version", "integer"), "version", always=False),
    _EventColumn(Field("amount", "decimal(12,2)"), "amount", always=False),
    _EventColumn(Field("at", "timestamp"), "event_time", always=False),
    _EventColumn(Field("ok", "boolean"), "ok", always=False),
]
BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
NOON = (datetime(2026, 3, 1, 12, tzinfo=UTC) - BEGIN) // timedelta(microseconds=1)
EVENT = ("o1", 2, Decimal("12.50"), NOON, True)
RECORD = {"id": "o1", "version": 2, "amount": 12.5, "at": "2026-03-01T12:00:00Z", "ok": True, "more": {"a": [1]}}


def batch(*pairs: tuple[bytes, tuple[Any, ...]]) -> pa.RecordBatch:
    """Values of records, each with the columns of its event."""
    kinds = [pa.string_view(), pa.int32(), pa.decimal128(12, 2), pa.int64(), pa.bool_()]
    columns = [pa.array([event[at] for _, event in pairs], kind) for at, kind in enumerate(kinds)]
    values = pa.array([value for value, _ in pairs], pa.binary_view())
    return pa.RecordBatch.from_arrays([values, *columns], ["value", *(f"c{at}" for at in range(len(kinds)))])


def unlike(*pairs: tuple[bytes, tuple[Any, ...]]) -> dict[int, list[str]]:
    """By the place in the batch the fields that differ, of those that Arrow's parser leaves to Python's."""
    made = batch(*pairs)
    rows = made.to_pylist()
    suspects = _select_candidate_rows(STREAM, COLUMNS, made)
    found = {at: _select_differing_fields(READER, COLUMNS, rows[at], KafkaRecord(rows[at]["value"])) for at in suspects}
    return {at: fields for at, fields in found.items() if fields}


def record(**changes: object) -> bytes:
    return json.dumps(RECORD | changes).encode()


def test_equal_values_need_only_the_quick_parser() -> None:
    alike = [record(), record(at="2026-03-01T13:00:00.000+01:00"), b" " + record(more=None).replace(b",", b",\n")]
    assert _select_candidate_rows(STREAM, COLUMNS, batch(*((value, EVENT) for value in alike))) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "o2"), ("version", 3), ("amount", 12.51), ("at", "2026-03-01T12:00:00.000001Z"), ("ok", False)],
)
def test_each_field_that_differs_is_named(field: str, value: object) -> None:
    assert unlike((record(), EVENT), (record(**{field: value}), EVENT), (record(), EVENT)) == {1: [field]}
    gone = json.dumps({name: reported for name, reported in RECORD.items() if name != field}).encode()
    assert unlike((gone, EVENT)) == {0: [field]}


@pytest.mark.parametrize("spoiled", [b"", b"{", b"o1", b"[1]", b"\xff", record() + record(), b'{"id": "o1", "id": 2}'])
def test_a_value_that_arrow_cannot_read_hides_no_other(spoiled: bytes) -> None:
    """A batch that the quick parser refuses, or takes for another number of records, is read one by one."""
    found = unlike((spoiled, EVENT), (record(), EVENT), (record(id="o2"), EVENT))
    assert found.keys() == {0, 2}
    assert found[2] == ["id"]


def test_incomparable_values_are_not_called_different() -> None:
    far = record(at="2026-03-01T12:00:00.123456789Z")
    assert unlike((far, (*EVENT[:3], NOON + 123456, True))) == {}
    assert unlike((record(at="9999-12-31T23:59:59-18:00"), (*EVENT[:3], 253402365599000000, True))) == {}
    deep = b"[" * 100_000 + b"]" * 100_000
    assert unlike((record()[:-1] + b', "deep": ' + deep + b"}", EVENT)) == {}


def test_half_of_a_surrogate_pair_is_no_question_mark() -> None:
    """Spark read `"\\ud83d"` as `?`, and the check passed on purpose: events of different keys had one key."""
    assert unlike((record(id="\ud83d"), ("?", *EVENT[1:]))) == {0: ["id"]}
    assert unlike((record(id="?"), ("?", *EVENT[1:])), (record(id="\U0001f600"), ("\U0001f600", *EVENT[1:]))) == {}


@pytest.mark.parametrize("number", ["9" * 5000, "1e9999999999999999999999", "-0.0", "1E400"])
def test_a_number_in_an_ignored_field_hides_nothing(number: str) -> None:
    """Python refuses whole numbers of more than 4,300 digits: the event was called unlike its record."""
    value = record()[:-1] + f', "ignored": {number}}}'.encode()
    assert unlike((value, EVENT), (value, ("o2", *EVENT[1:]))) == {1: ["id"]}


def test_true_is_no_number() -> None:
    assert unlike((record(version=True), (EVENT[0], 1, *EVENT[2:]))) == {0: ["version"]}


@pytest.mark.parametrize("time", ["2026-03-01t12:00:00z", "2026-03-01T12:00:00z", "2026-03-01t12:00:00.0000+00:00"])
def test_lower_case_letters_of_a_time_are_read(time: str) -> None:
    assert unlike((record(at=time), EVENT), (record(at=time), (*EVENT[:3], NOON + 1, True))) == {1: ["at"]}


@pytest.mark.parametrize("at", range(len(COLUMNS)))
def test_an_event_that_lacks_a_field_differs(at: int) -> None:
    """An update to null was not reported: a null passed as a field that came to the stream later."""
    lacking = (*EVENT[:at], None, *EVENT[at + 1 :])
    assert unlike((record(), EVENT), (record(), lacking)) == {1: [COLUMNS[at].field]}


def test_the_quick_parser_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(record(**{name: value}), EVENT) for name, value in (("id", "x"), ("ok", True), ("amount", 1), ("at", ""))]
    quick = unlike(*pairs)
    monkeypatch.setattr(contents, "_read", lambda *_: (_ for _ in ()).throw(pa.ArrowInvalid("refused")))
    assert unlike(*pairs) == quick
    assert quick.keys() == {0, 2}
