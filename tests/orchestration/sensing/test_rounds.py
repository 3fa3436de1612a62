"""One tick of a sensor over many streams: faults stay with their stream, and time is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from highwater.declaration import Stream
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.orchestration.sensing import rounds
from highwater.orchestration.sensing.rounds import Cursor, find_first_unserved, limit_runs, visit_all
from highwater.orchestration.sensing.run_requests import Request
from highwater.orchestration.sensing.stream_ticks import Tick
from tests.helpers.support import make_stream


def named(*names: str) -> list[Stream]:
    return [replace(make_stream(name), name=name) for name in names]


@dataclass
class Visits:
    """A round whose visits are listed; each does what a test says."""

    acts: Mapping[str, Callable[[], Tick | None]] = field(default_factory=dict)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    lines: Sequence[str] = ()
    begin = ""

    def visit(self, stream: Stream, cursor: str | None) -> Tick | None:
        self.seen.append((stream.name, cursor))
        return self.acts.get(stream.name, lambda: None)()

    @property
    def names(self) -> str:
        return "".join(name for name, _ in self.seen)


def raising(error: Exception) -> Callable[[], Tick | None]:
    def act() -> Tick | None:
        raise error

    return act


def far() -> float:
    return time.monotonic() + 60


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("no", remedy="fix it"),
        ValueError("a defect"),
        DependencyUnavailableError("away", remedy="wait"),
    ],
)
def test_an_error_of_one_stream_stops_no_other(error: Exception) -> None:
    tick = Tick(keys=["c@0000000"])
    made = Visits({"b": raising(error), "c": lambda: tick})
    found = visit_all(made, named("a", "b", "c"), Cursor(streams={"b": "before"}), (), far())
    assert (made.names, found.ticks, found.served) == ("abc", {"c": tick}, ["a", "c"])
    assert [*found.faults, *found.skipped] == ["b"]
    assert found.cursor.streams == {"b": "before"}, "the stream continues where it was"


def test_each_round_begins_one_stream_further() -> None:
    cursor, streams = Cursor(), named("c", "a", "b")
    orders = []
    for _ in range(4):
        made = Visits()
        cursor = visit_all(made, streams, Cursor.parse(cursor.to_json()), (), far()).cursor
        orders.append(made.names)
    assert orders == ["abc", "bca", "cab", "abc"]


def test_a_round_without_time_continues_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [0.0]
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: at[0]))

    def slow() -> None:
        at[0] += 20

    streams, cursor, orders = named(*"abcde"), Cursor(), []
    for _ in range(3):
        made = Visits(dict.fromkeys("abcde", slow))
        found = visit_all(made, streams, cursor, (), at[0] + 40)
        orders.append((made.names, "".join(found.left)))
        cursor = found.cursor
    assert orders == [("abc", "de"), ("dea", "bc"), ("bcd", "ea")]


def test_streams_with_a_known_fault_come_last_and_share_a_time_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes a second look, 3 s later: they would delay the others."""
    at = [0.0]
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: at[0]))

    def slow() -> None:
        at[0] += 6

    cursor, orders = Cursor(), []
    for _ in range(2):
        made = Visits(dict.fromkeys("abcd", slow))
        found = visit_all(made, named(*"abcdef"), cursor, "abcd", at[0] + 40)
        orders.append(made.names)
        cursor = found.cursor
    assert orders == ["efab", "fecd"]


def test_a_stream_that_is_gone_leaves_nothing_in_the_cursor() -> None:
    made = Visits({"a": lambda: Tick(cursor="a@0000007"), "b": lambda: Tick(cursor=None)})
    found = visit_all(made, named("a", "b"), Cursor(streams={"b": "x", "gone": "y"}), (), far())
    assert Cursor.parse(found.cursor.to_json()) == Cursor("b", "", {"a": "a@0000007"})


@pytest.mark.parametrize("text", [None, "", "no JSON", "[1]", '"text"', '{"streams": 3}'])
def test_a_cursor_that_cannot_be_read_begins_again(text: str | None) -> None:
    assert Cursor.parse(text) == Cursor()


def wanting(stream: str, runs: int) -> Tick:
    """A tick with a given number of runs of two slices each."""
    keys = [f"{stream}@{n:07d}" for n in range(2 * runs)]
    return Tick(keys=keys, requests=[Request((keys[n], keys[n + 1])) for n in range(0, len(keys), 2)])


def test_run_requests_are_shared_among_streams() -> None:
    """The stream with the longest backlog took every place of the tick."""
    ticks = {"a": wanting("a", 50), "b": wanting("b", 3), "c": wanting("c", 1), "d": Tick(lines=["nothing new"])}
    found = limit_runs(ticks, 12)
    assert {name: len(tick.requests) for name, tick in found.items()} == {"a": 8, "b": 3, "c": 1, "d": 0}
    assert found["a"].keys == ticks["a"].keys[:16], "the next tick finds the other keys in the ledger"
    assert "42 runs wait for the next tick" in found["a"].message
    assert {name: found[name] for name in "bcd"} == {name: ticks[name] for name in "bcd"}
    assert limit_runs(ticks, 54) == ticks


def test_keys_that_no_run_is_requested_for_are_added_all_the_same() -> None:
    tick = Tick(keys=["a@0", "a@1", "a@2"], requests=[Request(("a@2",)), Request(("a@1",))])
    assert limit_runs({"a": replace(tick, requests=[])}, 1)["a"].keys == tick.keys
    cut = limit_runs({"a": tick}, 1)["a"]
    assert (cut.keys, cut.requests) == (["a@0"], []), "keys are added in the order of the plan"


def test_a_round_begins_with_the_first_stream_whose_runs_all_waited() -> None:
    ticks = {name: wanting(name, 2) for name in "abcd"} | {"e": Tick(lines=["nothing new"])}
    assert find_first_unserved(ticks, limit_runs(ticks, 2)) == "c"
    assert find_first_unserved(ticks, limit_runs(ticks, 4)) == "", "each had one"
