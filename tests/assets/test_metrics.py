"""Metrics against simple models: whatever the order, the repetition and the moment of a crash, one answer.

The tables of events are written here, row by row; the expected minutes are worked out from the same rows by a plain
model (`tests.helpers.plain_minutes`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import metrics, minute_rows
from highwater.declaration import Field, Metrics, Stream
from highwater.errors import DeclarationError, DependencyUnavailableError, SupersededAttemptError, TemporaryError
from highwater.minutes import (
    Minute,
    Sums,
    build_spans,
    collect_linked_minutes,
    convert_to_time,
    format_day,
    select_affected_minutes,
    split_minutes,
    sum_hours,
)
from highwater.orchestration.checking import metrics_checks
from highwater.resources.delta import add_actions, query
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from tests.helpers.measured import NOON, Event, Measured
from tests.helpers.plain_minutes import STATUSES


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


MINUTES = st.sets(st.integers(-200, 3000), max_size=30)


@given(MINUTES, st.integers(1, 6))
def test_spans_cover_each_minute_once_and_are_no_more_than_allowed(minutes: set[int], most: int) -> None:
    found = build_spans(minutes, most)
    assert len(found) <= most
    assert all(sum(start <= minute < end for start, end in found) == 1 for minute in minutes)
    assert sum(end - start for start, end in build_spans(minutes, 1000)) == len(minutes)


@given(st.dictionaries(st.integers(0, 200), st.integers(0, 50), max_size=30), MINUTES, MINUTES)
def test_the_hour_of_a_minute_ends_with_it(amounts: dict[int, int], wanted: set[int], changed: set[int]) -> None:
    minutes = {m: Minute(1, {"paid": Sums(1, Decimal(a)), "placed": Sums(1, Decimal(7))}) for m, a in amounts.items()}
    found = sum_hours(minutes, wanted, ["paid"])
    for minute in wanted:
        seen = [Decimal(amounts[m]) for m in range(minute - 59, minute + 1) if m in amounts]
        assert found[minute] == Sums(len(seen), sum(seen, Decimal(0)))
    assert select_affected_minutes(changed, amounts) == [m for m in amounts if any(m - 59 <= c <= m for c in changed)]


PAIRS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=15)


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 9), min_size=1), PAIRS, st.integers(1, 40))
def test_linked_minutes_are_computed_together(weights: dict[int, int], pairs: list[tuple[int, int]], most: int) -> None:
    links = {a: {b for c, b in pairs if c == a} for a, _ in pairs}
    parts = split_minutes(weights, links, most)
    assert sorted(m for part in parts for m in part) == sorted(weights)
    for a, b in pairs:
        assert not any(a in part and b in weights and b not in part for part in parts)
    unlinked = [part for part in parts if not any(m in part for pair in pairs for m in pair)]
    assert all(sum(weights[m] for m in part) <= most for part in unlinked if len(part) > 1)


@given(PAIRS, st.integers(0, 20))
def test_linked_minutes_are_found_transitively(pairs: list[tuple[int, int]], begin: int) -> None:
    reached = {begin}
    for _ in pairs:
        reached |= {b for a, b in pairs if a in reached}
    assert collect_linked_minutes([begin], lambda some: {m: [b for a, b in pairs if a == m] for m in some}) == reached


def test_a_mean_is_exact_and_a_half_is_rounded_away_from_zero() -> None:
    assert Sums(3, Decimal("10.00")).mean(6) == Decimal("3.333333")
    assert Sums(8, Decimal("0.01")).mean(3) == Decimal("0.001")
    assert Sums(8, Decimal("-0.02")).mean(4) == Decimal("-0.0025")
    assert Sums(16, Decimal("0.02")).mean(5) == Decimal("0.00125")
    assert Sums(16, Decimal("0.02")).mean(4) == Decimal("0.0013")
    most = Decimal("9" * 36 + ".99")
    assert (Sums(1, most) + Sums(1, most) - Sums(1, most)).mean(6) == most
    assert Sums().mean(2) is None


def test_a_minute_beyond_the_calendar_has_a_name() -> None:
    assert format_day(0) == "1970-01-01"
    assert format_day(-1) == "1969-12-31"
    assert convert_to_time(24 * 60 + 61) == "1970-01-02 01:01"
    year_10000 = (date.max.toordinal() + 1 - date(1970, 1, 1).toordinal()) * 24 * 60
    assert format_day(year_10000) == "day 2932897"
    assert convert_to_time(year_10000 + 5) == "day 2932897, minute 5"


# The table


def test_events_are_summed_by_minute_and_status(measured: Measured) -> None:
    measured.decide(
        0,
        Event("o1", 1, 0, "placed", "5.00"),
        Event("o1", 2, 59.999, "paid", "5.00"),
        Event("o2", 1, 30, "placed", "0.01"),
        Event("o2", 2, 60, "canceled", "0.01"),
        Event("o3", 1, 59 * 60 + 59, "paid", "9999999999.99"),
        Event("o4", 1, 60 * 60, "paid", "0.02"),
    )
    [report] = measured.measure(0)
    assert report.rows == 4
    noon, later = measured.table()[NOON], measured.table()[NOON + timedelta(hours=1)]
    assert (noon["events"], noon["placed_events"], noon["placed_amount"]) == (3, 2, Decimal("5.01"))
    assert (noon["hour_events"], noon["hour_mean"]) == (1, Decimal(5))
    # The hour that ends with 13:00 begins at 12:01: the five of 12:00 are no longer in it.
    assert (later["hour_events"], later["hour_amount"]) == (2, Decimal("10000000000.01"))
    assert later["hour_mean"] == Decimal("5000000000.005")
    measured.ensure_followed()


def test_rows_are_found_by_amounts_of_any_digits(measured: Measured) -> None:
    """Statistics of them would be inexact, and a reader would skip the file."""
    measured.decide(0, *(Event(f"o{n}", 1, n / 10, "paid", amount) for n, amount in enumerate(["9999999999.99"] * 3)))
    measured.decide(1, Event("o4", 1, 0.5, "paid", "9999999999.98"))
    measured.measure(0, 1)
    opened = DeltaTable(measured.lake.build_table_path("orders", "metrics"))
    names = add_actions(opened).column_names
    assert {name for name in names if name.startswith("min.")} == {"min.minute", "min.events"}
    [row] = measured.table().values()
    kind = f"Decimal128(38, {-row['hour_mean'].as_tuple().exponent})"
    found = query(opened, f"SELECT events FROM t WHERE hour_mean = arrow_cast('{row['hour_mean']}', '{kind}')")
    assert [one["events"] for one in found] == [4]


def test_a_late_event_corrects_old_minutes_and_the_hours_that_see_them(measured: Measured) -> None:
    day = 24 * 3600
    measured.decide(0, Event("o1", 1, 0), Event("o2", 1, 1800, amount="20.00"), Event("o3", 1, day, amount="3.00"))
    measured.measure(0)
    measured.decide(1, Event("o4", 1, 0, amount="40.00"), Event("o5", 1, -day - 60, amount="1.00"))
    measured.measure(1)
    assert measured.table()[NOON + timedelta(minutes=30)]["hour_amount"] == Decimal("70.00")
    measured.ensure_followed()


def test_an_hour_reaches_over_midnight(measured: Measured) -> None:
    midnight = 12 * 3600
    measured.decide(0, Event("o1", 1, midnight + 60))
    measured.measure(0)
    measured.decide(1, Event("o2", 1, midnight - 60, amount="30.00"))
    measured.measure(1)
    assert measured.table()[NOON + timedelta(hours=12, minutes=1)]["hour_mean"] == Decimal(20)
    measured.ensure_followed()


def test_a_second_delivery_counts_once_wherever_it_is(measured: Measured) -> None:
    first = Event("o1", 1, 0)
    measured.decide(0, first, replace(first, offset=1))
    measured.decide(1, replace(first, offset=2))
    measured.measure(0, 1)
    assert measured.table()[NOON]["events"] == 1
    # The first delivery goes, and the second one is in for it.
    measured.decide(0)
    measured.measure(0)
    assert measured.table()[NOON]["events"] == 1
    measured.ensure_followed()


@pytest.mark.parametrize("later", [0, 1])
def test_earliest_origin_wins_between_two_contents_in_two_slices(measured: Measured, later: int) -> None:
    """The slice that comes later may win or lose; the other's minute changes with it, a day away."""
    events = [Event("o1", 1, 0, offset=5), Event("o1", 1, 24 * 3600, offset=3)]
    measured.decide(1 - later, events[1 - later])
    measured.measure(1 - later)
    measured.decide(later, events[later])
    measured.measure(later)
    assert [*measured.table()] == [NOON + timedelta(days=1)]
    measured.ensure_followed()


def test_a_loser_counts_when_the_winner_is_gone(measured: Measured) -> None:
    """Its minute is touched by none of the slice's own events, neither of before nor of now."""
    measured.decide(0, Event("o1", 1, 0, offset=1), Event("o2", 1, 0))
    measured.measure(0)
    measured.decide(1, Event("o1", 1, 24 * 3600, offset=9), Event("o3", 1, 24 * 3600))
    measured.measure(1)
    measured.decide(0, Event("o2", 1, 0))
    measured.measure(0)
    assert measured.table()[NOON + timedelta(days=1)]["events"] == 2
    measured.ensure_followed()


def test_a_minute_without_an_event_that_counts_still_hangs_together_with_others(measured: Measured) -> None:
    """No row of 12:01 describes its link with 12:00, since its events never count."""
    measured.decide(1, Event("o1", 1, 36 * 3600, offset=1), Event("o1", 1, 60, offset=2))
    measured.measure(1)
    measured.decide(0, Event("o1", 1, 0, offset=5), Event("o1", 1, 60, offset=6))
    measured.decide(1)
    measured.measure(0)
    measured.measure(1)
    assert [*measured.table()] == [NOON]
    measured.ensure_followed()


def test_a_slice_reprocessed_takes_its_old_minutes_back(measured: Measured) -> None:
    measured.decide(0, Event("o1", 1, 0), Event("o2", 1, 3600))
    measured.measure(0)
    measured.decide(0, Event("o1", 1, 7200))
    measured.measure(0)
    assert [*measured.table()] == [NOON + timedelta(hours=2)]
    measured.decide(0)
    measured.measure(0)
    assert measured.table() == {}


def test_a_slice_that_follows_already_is_not_committed_again(measured: Measured) -> None:
    measured.decide(0, Event("o1", 1, 0))
    assert measured.measure(0)[0].note is None
    before = len(measured.commits())
    assert measured.measure(0)[0].note == "already followed the events"
    assert len(measured.commits()) == before


def test_days_that_stay_as_they_are_are_not_written(measured: Measured) -> None:
    measured.decide(0, *[Event(f"o{n}", 1, n * 24 * 3600) for n in range(5)])
    measured.measure(0)
    # Half past eleven in the evening: the hours of the next day are looked at too.
    measured.decide(1, Event("late", 1, 2 * 24 * 3600 + 11 * 3600 + 1800))
    measured.measure(1)
    last = measured.commits()[0]["operationMetrics"]
    assert (last["num_added_files"], last["num_removed_files"]) == (1, 1)
    measured.ensure_followed()


def test_the_commit_of_minutes_records_the_slice_and_its_minutes(measured: Measured) -> None:
    measured.decide(0, Event("o1", 1, 0), Event("o2", 1, 60))
    measured.measure(0, run="r1")
    [slice_commit] = measured.lake.load_slice_commits("orders", "metrics").values()
    assert (slice_commit.key, slice_commit.attempt, slice_commit.rows) == (measured.slice_(0).key, 1, 2)
    noon = round(NOON.timestamp()) // 60
    assert slice_commit.extra == {"minutes": [noon, noon + 1]}
    written = json.loads(measured.commits()[0]["userMetadata"])["highwater"]
    assert written["run"] == "r1"
    assert [SliceCommit.from_plain(one) for one in written["records"]] == [slice_commit]
    [record] = measured.lake.load_commits("orders", "metrics").records.values()
    assert record.version == measured.lake.open_existing_table("orders", "metrics").version()


def test_slices_that_were_decided_before_the_table_came_are_taken_in_at_once(measured: Measured) -> None:
    for ordinal in range(4):
        measured.decide(ordinal, Event("o1", ordinal + 1, 60 * ordinal))
    assert measured.lacking() == [0, 1, 2, 3]
    assert [report.slice_.key for report in measured.measure(2)] == [measured.slice_(2).key]
    assert measured.lacking() == []
    measured.ensure_followed()


def test_another_declaration_makes_the_table_again(measured: Measured) -> None:
    for ordinal in range(2):
        measured.decide(ordinal, Event("o1", ordinal + 1, 0, status="placed", amount="4.00"))
        measured.measure(ordinal)
    measured.stream = replace(ORDERS, metrics=Metrics("status", "amount", ("placed", "paid")))
    measured.decide(2, Event("o1", 3, 24 * 3600, amount="10.00"))
    measured.measure(2)
    assert measured.table()[NOON]["hour_mean"] == Decimal(4)
    assert measured.lacking() == []


def test_without_events_of_a_slice_it_is_reported(measured: Measured) -> None:
    measured.decide(0, Event("o1", 1, 0))
    with pytest.raises(TemporaryError, match="does not hold orders@0000001"):
        measured.measure(0, 1)


def test_a_lake_that_cannot_be_read_is_not_an_empty_one(measured: Measured) -> None:
    measured.decide(0, Event("o1", 1, 0))
    measured.measure(0)
    for file in (Path(measured.lake.build_table_path("orders", "metrics")) / "_delta_log").iterdir():
        file.write_text("{")
    with pytest.raises(DependencyUnavailableError):
        measured.measure(0)


def test_a_writer_that_was_overtaken_writes_nothing_and_looks_again(measured: Measured, tmp_path: Path) -> None:
    """Its lease ran out unnoticed: the table's own log keeps it from writing minutes of older events."""
    other = Ledger(f"sqlite:///{tmp_path / 'other.sqlite'}")
    measured.decide(0, Event("o1", 1, 0))
    measured.measure(0)
    measured.decide(1, Event("o2", 1, 0))
    overtakings: list[int] = []

    def overtaken() -> None:
        if not overtakings:
            overtakings.append(1)
            measured.decide(2, Event("o3", 1, 0))
            metrics.materialise(measured.work(2, ledger=other))

    measured.measure(1, before_commit=overtaken)
    assert measured.table()[NOON]["events"] == 3
    measured.ensure_followed()


@pytest.mark.slow
def test_an_overtaken_writer_gives_up_in_the_end(measured: Measured, tmp_path: Path) -> None:
    other = Ledger(f"sqlite:///{tmp_path / 'other.sqlite'}")
    measured.decide(0, Event("o1", 1, 0))
    overtakings: list[int] = []

    def overtaken() -> None:
        overtakings.append(1)
        measured.decide(1, Event("o2", len(overtakings), 0))
        metrics.materialise(measured.work(1, ledger=other))
        measured.decide(0, Event("o1", 1, 0))

    with pytest.raises(SupersededAttemptError):
        measured.measure(0, before_commit=overtaken)
    assert len(overtakings) == metrics.TRIES


@pytest.mark.slow
def test_many_events_are_asked_for_in_parts(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_EVENTS", 3)
    monkeypatch.setattr(metrics, "MAX_SPANS", 1)
    for module in (metrics, minute_rows):
        monkeypatch.setattr(module, "MAX_PARTITIONS", 2)
    for ordinal in range(3):
        measured.decide(ordinal, *[Event(f"o{n}", ordinal % 2 + 1, 7200 * n, offset=ordinal) for n in range(30)])
    measured.measure(0, 1, 2)
    measured.decide(0, *[Event(f"o{n}", 1, 7200 * (n + 1), offset=0) for n in range(30)])
    measured.measure(0)
    measured.ensure_followed()


def test_a_part_does_not_speak_for_minutes_between_its_own(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question for 5000 and 7000 covers 6000 as well, and not 0, which has the event that counts."""
    monkeypatch.setattr(metrics, "MAX_EVENTS", 1)
    monkeypatch.setattr(metrics, "MAX_SPANS", 1)
    pairs = {"o1": (0, 6000), "o2": (5000, 7000)}
    events = [Event(key, 1, 60 * minute, offset=at) for key, both in pairs.items() for at, minute in enumerate(both)]
    measured.decide(0, *events)
    measured.measure(0)
    assert sorted(measured.table()) == [NOON, NOON + timedelta(minutes=5000)]
    measured.ensure_followed()


def test_the_newest_minutes_are_shown(measured: Measured) -> None:
    measured.decide(0, *[Event(f"o{n}", 1, 60 * n, amount=f"{n}.00") for n in range(-800, 10)])
    [report] = measured.measure(0)
    assert len(report.samples) == minute_rows.NEWEST
    assert [row["minute"] for row in report.samples[:2]] == ["2026-03-01 12:09", "2026-03-01 12:08"]
    assert report.samples[0]["paid_amount"] == Decimal("9.00")
    assert report.measures["newest_minute/hour_mean"] == pytest.approx(-20.5)
    assert report.plot is not None
    assert "2026-03-01 12:09  " + "█" * minute_rows.BAR in report.plot


# Any order, any repetition, any crash

EVENTS_OF_ALL = st.builds(
    Event,
    key=st.sampled_from(["a", "b", "c"]),
    version=st.integers(1, 2),
    seconds=st.sampled_from([0, 59, 60, 59 * 60, 60 * 60, 12 * 3600 - 1, 12 * 3600, 36 * 3600]),
    status=st.sampled_from(STATUSES),
    amount=st.sampled_from(["0.00", "0.01", "7.77", "9999999999.99"]),
    published=st.integers(0, 2),
)
ORDINALS = st.integers(0, 3)


class KilledError(Exception):
    """The process ends here."""


class History(RuleBasedStateMachine):
    """Slices are decided, measured, reprocessed; runs die or overtake each other; then all that lacks is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="metrics-"))
        self.measured = Measured(self.folder)
        self.other = Ledger(f"sqlite:///{self.folder / 'other.sqlite'}")
        self.offset = 0

    def teardown(self) -> None:
        try:
            self._ensure_settled()
        finally:
            shutil.rmtree(self.folder)

    @rule(ordinal=ORDINALS, events=st.lists(EVENTS_OF_ALL, max_size=4))
    def decide(self, ordinal: int, events: list[Event]) -> None:
        """A decision is recreated only when metrics follow the last one, which `highwater.assets.events` sees to."""
        if ordinal in self.measured.lacking():
            return
        own = []
        for event in events:
            self.offset += 1
            own.append(replace(event, offset=self.offset))
        self.measured.decide(ordinal, *own)

    @rule(ordinals=st.lists(ORDINALS, min_size=1, max_size=3, unique=True))
    def measure(self, ordinals: list[int]) -> None:
        self._run(ordinals)

    @rule(ordinals=st.lists(ORDINALS, min_size=1, max_size=2, unique=True))
    def die_before_the_commit(self, ordinals: list[int]) -> None:
        def killed() -> None:
            raise KilledError

        self._run(ordinals, killed)

    @rule(ordinals=st.lists(ORDINALS, min_size=1, max_size=2, unique=True), others=st.lists(ORDINALS, max_size=2))
    def be_overtaken(self, ordinals: list[int], others: list[int]) -> None:
        left = [self._there(others)]

        def overtaken() -> None:
            if found := left.pop() if left else []:
                metrics.materialise(self.measured.work(*found, ledger=self.other))

        self._run(ordinals, overtaken)

    @rule()
    def look(self) -> None:
        """The check of a slice that is measured is green whatever others have yet to do."""
        lacking = self.measured.lacking()
        keys = [self.measured.slice_(o).key for o in self.measured.held if o not in lacking]
        if keys:
            found = metrics_checks.check_metrics_follow_events(
                self.measured.ledger, self.measured.lake, self.measured.stream, keys
            )
            assert {key: one.text for by in found.values() for key, one in by.items() if not one.passed} == {}

    def _there(self, ordinals: Iterable[int]) -> list[int]:
        return [*dict.fromkeys(o for o in ordinals if o in self.measured.held)]

    def _run(self, ordinals: Iterable[int], before_commit: Callable[[], None] = lambda: None) -> None:
        found = self._there(ordinals)
        if found:
            with suppress(KilledError):
                self.measured.measure(*found, before_commit=before_commit)

    def _ensure_settled(self) -> None:
        if self.measured.held:
            for ordinal in reversed(self.measured.lacking()):
                self.measured.measure(ordinal)
            self.measured.measure(*self.measured.held)
            self.measured.ensure_followed()
            self.look()


TestHistory = pytest.mark.slow(History.TestCase)
TestHistory.settings = settings(
    max_examples=15, stateful_step_count=10, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# The declaration


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Metrics("customer_id", "amount", ()), "must be a string with one_of"),
        (Metrics("status", "customer_id", ("paid",)), "the amount must be"),
        (Metrics("status", "amount", ("gone",)), "'gone' is no value of 'status'"),
        (Metrics("state", "amount", ("paid",)), "'state' is used and not declared"),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused(declared: Metrics, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        replace(ORDERS, metrics=declared)


@pytest.mark.parametrize(
    ("values", "said"),
    [(("on hold", "paid"), "'on hold' cannot be part"), (("paid", "Paid"), "differ in more"), (("hour",), "none be")],
)
def test_statuses_become_columns(values: tuple[str, ...], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        _with_statuses(values)


def _with_statuses(values: tuple[str, ...], amount: str = "decimal(12,2)") -> Stream:
    changed = {"status": {"one_of": values}, "amount": {"type": amount}}
    fields: tuple[Field, ...] = tuple(replace(f, **changed.get(f.name, {})) for f in ORDERS.fields)  # type: ignore[arg-type]
    return replace(ORDERS, fields=fields, transitions=None, metrics=Metrics("status", "amount", values[:1]))


@pytest.mark.parametrize(("amount", "scale"), [("integer", 0), ("long", 0), ("decimal(28,3)", 3)])
def test_amounts_of_any_number_are_summed(amount: str, scale: int) -> None:
    assert minute_rows.find_scale(_with_statuses(("paid",), amount)) == scale


def test_a_decimal_whose_sum_might_not_fit_is_refused() -> None:
    with pytest.raises(DeclarationError, match="28 digits"):
        _with_statuses(("paid",), "decimal(29,3)")
