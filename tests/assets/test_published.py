"""Accepted events go out once, in the order of their origin; what is late, revised or reclaimed is marked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from highwater.assets import (
    event_json,
    event_records,
    published,
)
from highwater.assets.publication_window import RUN, PublicationWindow
from highwater.assets.publication_window import build_schema as window_schema
from highwater.declaration import Accepted, Field
from highwater.errors import (
    TemporaryError,
)
from highwater.publishing import EventState, PublicationOutcome
from highwater.resources.delta import query
from tests.helpers.accepted import NOON, Event, FakeTransactionLog, Tables, build_orders, list_places, read_fields
from tests.helpers.published_tables import read_published_rows

# Seconds of processor each.
pytestmark = pytest.mark.slow


def test_events_that_are_written_part_by_part_keep_value_and_fingerprint(
    tables: Tables, log: FakeTransactionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part has a text that is escaped, which JSON is written for in another way."""
    monkeypatch.setattr(event_records, "PART", 2)
    slice_ = tables.plan(0, p0=(0, 7))
    some = [*build_orders(0, 0, 3), *build_orders(0, 3, 4, customer_id='a "name"'), *build_orders(0, 4, 7)]
    tables.decide(slice_, some)
    tables.publish(slice_)
    assert [read_fields(one)["customer_id"] for one in log.records] == [one.fields["customer_id"] for one in some]
    table = tables.lake.open_existing_table("orders", published.TABLE)
    stored = query(table, "SELECT origin_offset, fingerprint FROM t ORDER BY origin_offset")
    assert [row["fingerprint"] for row in stored] == [
        event_json.compute_fingerprint(one.value or b"") for one in log.records
    ]
    assert len(stored) == 7


def test_events_go_out_in_the_order_of_their_offsets_partition_by_partition(
    tables: Tables, log: FakeTransactionLog
) -> None:
    """Slices finish out of order, and their rows lie in the tables in any order."""
    slices = [tables.plan(n, p0=(3 * n, 3 * n + 3), p1=(2 * n, 2 * n + 2)) for n in range(3)]
    for n in (2, 0, 1):
        rows = [*build_orders(0, 3 * n, 3 * n + 3), *build_orders(1, 2 * n, 2 * n + 2)]
        tables.decide(slices[n], reversed(rows))
    reports = tables.publish(*reversed(slices))
    for partition, count in ((0, 9), (1, 6)):
        mine = [one for one in log.records if one.partition == partition]
        assert list_places(mine) == [(partition, offset) for offset in range(count)]
    assert not any("highwater.late" in one.headers or "highwater.revision" in one.headers for one in log.records)
    assert reports[slices[0].key].counts["sent"] == reports[slices[0].key].counts["sent_now"] == 5
    again = tables.publish(*slices)
    assert len(log.records) == 15
    assert {report.note for report in again.values()} == {"already published"}


def test_a_record_is_the_event_with_its_origin(tables: Tables, log: FakeTransactionLog) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    odd = 'a "b" \\ \n\u2028 é'
    tables.decide(
        slice_,
        [
            Event(
                0, 0, "o1", minute=1.5, changes={"amount": 1234567890.1, "event_time": "2026-03-01T10:00:00.25+01:00"}
            ),
            Event(0, 1, "o2", changes={"customer_id": odd}),
        ],
    )
    tables.publish(slice_)
    first, second = log.records
    assert (first.partition, first.key) == (0, b"o1")
    assert first.value == (
        b'{"order_id":"o1","version":1,"status":"placed","customer_id":"c1","amount":1234567890.10,'
        b'"event_time":"2026-03-01T09:00:00.250000Z"}'
    )
    assert first.headers == {
        "highwater.origin.topic": "orders",
        "highwater.origin.generation": "0",
        "highwater.origin.partition": "0",
        "highwater.origin.offset": "0",
        "highwater.origin.timestamp": str(round((NOON + timedelta(minutes=1.5)).timestamp() * 1000)),
        "highwater.slice": slice_.key,
    }
    assert read_fields(second)["customer_id"] == odd
    assert read_fields(second)["amount"] == Decimal("12.50")


def test_a_slice_waits_for_those_before_it(tables: Tables, log: FakeTransactionLog) -> None:
    first, second = tables.plan(0, p0=(0, 2)), tables.plan(1, p0=(2, 4))
    tables.decide(second, build_orders(0, 2, 4))
    with pytest.raises(TemporaryError, match=f"{first.key} is not published yet"):
        tables.publish(second)
    assert log.records == []
    tables.decide(first, build_orders(0, 0, 2))
    tables.publish(first)
    tables.publish(second)
    assert list_places(log.records) == [(0, n) for n in range(4)]


def test_a_slice_whose_rejects_are_not_published_is_not_done(tables: Tables) -> None:
    slice_ = tables.plan(0, p0=(0, 2))
    tables.decide(slice_, build_orders(0, 0, 1), rejected=build_orders(0, 1, 2), known=False)
    with pytest.raises(TemporaryError, match="do not follow"):
        tables.publish(slice_)


def test_events_from_a_tier_are_sent_later_and_marked(tables: Tables, log: FakeTransactionLog) -> None:
    tier = tables.stream.tier_topics[0]
    first, second = tables.plan(0, p0=(0, 3)), tables.plan(1, minute=90, p0=(3, 5))
    late = tables.plan(0, tier, minute=120, p0=(0, 1))
    tables.decide(first, build_orders(0, 0, 2), rejected=build_orders(0, 2, 3))
    tables.decide(late, build_orders(0, 2, 3))
    tables.publish(first)
    with pytest.raises(TemporaryError, match=second.key):
        tables.publish(late)
    tables.decide(second, build_orders(0, 3, 5))
    tables.publish(late, first, second)
    assert list_places(log.records) == [(0, 0), (0, 1), (0, 3), (0, 4), (0, 2)]
    assert [one.headers.get("highwater.late") for one in log.records] == [None] * 4 + ["retried"]
    assert log.records[-1].headers["highwater.slice"] == late.key


def test_second_deliveries_within_the_horizon_are_left_out(tables: Tables, log: FakeTransactionLog) -> None:
    """The same content at another offset, in the same slice and in later ones; other content goes out."""
    tables.stream = replace(tables.stream, publishes=Accepted("orders.accepted", horizon=timedelta(minutes=10)))
    slices = [tables.plan(n, p0=(3 * n, 3 * n + 3)) for n in range(3)]
    tables.decide(slices[0], [Event(0, 0, "o1"), Event(0, 1, "o1", minute=1), Event(0, 2, "o2", minute=2)])
    # The second one of these is known from the first slice alone, which was published by another run.
    tables.decide(slices[1], [Event(0, 3, "o3", minute=3), Event(0, 4, "o1", minute=9), Event(0, 5, "o1", 2, 9)])
    # Beyond the horizon of the last copy; and a conflict.
    tables.decide(slices[2], [Event(0, 6, "o1", minute=20), Event(0, 7, "o2", minute=5, changes={"amount": 1})])
    tables.publish(slices[0])
    reports = tables.publish(*slices)
    assert list_places(log.records) == [(0, 0), (0, 2), (0, 3), (0, 5), (0, 6), (0, 7)]
    assert [reports[slice_.key].counts["second_deliveries"] for slice_ in slices] == [1, 1, 0]
    states = Counter(row["state"] for row in read_published_rows(tables))
    assert states == {"sent": 6, "second delivery": 2}


def test_a_corrected_slice_sends_what_is_new_and_what_changed(tables: Tables, log: FakeTransactionLog) -> None:
    first, second = tables.plan(0, p0=(0, 4)), tables.plan(1, p0=(4, 5))
    tables.decide(first, build_orders(0, 1, 4))
    tables.decide(second, build_orders(0, 4, 5))
    tables.publish(first, second)
    for changed in ("paid", "canceled"):
        rows = [*build_orders(0, 0, 3), *build_orders(0, 3, 4, status=changed)]
        tables.decide(first, rows)
        tables.publish(first)
    found = [
        (one.place, one.headers.get("highwater.late"), one.headers.get("highwater.revision")) for one in log.records
    ]
    assert found[4:] == [
        ((0, 0), "corrected", None),
        ((0, 3), "corrected", "1"),
        ((0, 3), "corrected", "2"),
    ]
    assert [read_fields(one)["status"] for one in log.records[5:]] == ["paid", "canceled"]
    report = tables.publish(first)[first.key]
    assert len(log.records) == 7
    assert (report.counts["sent"], report.counts["late"], report.counts["revisions"]) == (4, 2, 2)


@pytest.mark.parametrize("us", [-62_135_596_800_000_000, -1, 0, 999, 1_740_000_000_000_001, 253_402_300_799_999_999])
def test_times_are_in_utc_to_the_microsecond_in_all_years(us: int) -> None:
    """The header's are whole milliseconds, those before 1970 rounded down like all others."""
    import pyarrow as pa

    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).replace(tzinfo=None)
    column = pa.chunked_array([pa.array([us], pa.timestamp("us", "UTC"))])
    written = event_json._encode_column(Field("at", "timestamp"), column.combine_chunks()).to_pylist()
    assert written == [f'"{moment.isoformat(timespec="microseconds")}Z"']
    plain = [["s"], ["t"], [0], [0], [7], [us // 1000], [b"k"], [b"v"], ["f"]]
    window = PublicationWindow(pa.table(plain, schema=window_schema()), [None], pa.array([0]))
    assert [*window.iterate_rows()] == [(b"k", b"v", b"7", b"%d" % (us // 1000), 0)]


def test_a_window_is_taken_apart_where_slice_topic_generation_or_partition_change() -> None:
    import pyarrow as pa

    runs = [("a", "t", 0, 0), ("a", "t", 0, 1), ("a", "t", 1, 1), ("a", "u", 1, 1), ("b", "u", 1, 1)]
    reported = [(*run, offset) for run in runs for offset in range(2)]
    places = [*zip(*reported, strict=True)]
    columns = [*map(list, places), [0] * 10, [b"k"] * 10, [b"v"] * 10, ["f"] * 10]
    window = PublicationWindow(
        pa.table(columns, schema=window_schema()),
        [None, PublicationOutcome(EventState.SENT, 0, None)],
        pa.array([0, 1] * 5),
    )
    assert [(tuple(run.rows[name][0].as_py() for name in RUN), len(run)) for run in window.split_runs()] == [
        (run, 2) for run in runs
    ]
    assert window.count_by_slice() == {"a": 8, "b": 2}
    known = window.filter_by_outcome(lambda one: one is not None)
    assert known.rows["origin_offset"].to_pylist() == [1] * 5
    assert [len(run) for run in known.split_runs()] == [1] * 5
    assert [*window.select_range(0, 0).split_runs()] == []
    assert window.build_column(lambda one: one.state.value, pa.string()).to_pylist() == [None, "sent"] * 5


def test_values_are_json_for_any_text(tables: Tables, log: FakeTransactionLog) -> None:
    slice_ = tables.plan(0, p0=(0, 64))
    texts = [chr(n) * 2 for n in range(64)]
    tables.decide(slice_, [Event(0, n, f"k{n}", changes={"customer_id": text}) for n, text in enumerate(texts)])
    tables.publish(slice_)
    assert [json.loads(one.value or b"")["customer_id"] for one in log.records] == texts
