"""The breakers of Kafka, the lake and the reference tables: no call while one is open, one probe, one state for all."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import deltalake
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.processes import LOOPBACK, wait_until
from highwater.assets.lookups import ensure_lookup
from highwater.errors import KAFKA, LAKE, BreakerOpenError, DependencyUnavailableError, HighwaterError, PermanentError
from highwater.orchestration.dependencies import build_step_guards, list_lookup_guards
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing import repairing, stream_ticks
from highwater.orchestration.sensing.run_requests import stop
from highwater.resources import delta, dependency_guards
from highwater.resources.delta import open_table, query
from highwater.resources.dependency_guards import COOL_DOWN, FAILURES, Guard, guard_dependencies
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import Breakers, Dependency
from tests.helpers.commits import commit_empty
from tests.helpers.repairing import OPEN, UNDECIDED, UNREAD, Repairing
from tests.helpers.support import customers, make_stream
from tests.helpers.written_tables import a_slice

STREAM = make_stream("orders")


class FakeDependency:
    """A dependency that counts who asks it."""

    def __init__(self, url: str, name: str = KAFKA) -> None:
        self.url, self.name, self.ledger = url, name, Ledger(url)
        self.asked, self.unavailable = 0, False

    def ask(self) -> None:
        self.asked += 1
        if self.unavailable:
            raise DependencyUnavailableError(f"{self.name} did not answer", remedy="wait", of=self.name)

    def guard(self) -> Guard:
        """As another process has it: nothing is kept beside the ledger."""
        return Guard(self.ledger.breakers, self.name, self.ask)

    def work(self) -> str:
        try:
            with guard_dependencies(self.guard()):
                self.ask()
        except BreakerOpenError:
            return "refused"
        except DependencyUnavailableError:
            return "away"
        return "done"


@pytest.fixture
def thing(url: str) -> FakeDependency:
    return FakeDependency(url)


def cool_down(url: str, name: str = KAFKA) -> None:
    """Let the cool-down pass."""
    long_ago = datetime.now(UTC) - COOL_DOWN
    Ledger(url).breakers.change(name, lambda row: replace(row, since=long_ago))


def test_an_answer_takes_earlier_failures_back_and_else_asks_the_ledger_once(
    thing: FakeDependency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve conditions of a stream's alerts asked it twice each."""
    for unavailable, failures in ((True, 1), (True, 2), (False, 0), (True, 1), (False, 0)):
        thing.unavailable = unavailable
        thing.work()
        assert Ledger(thing.url).breakers.read_dependency(KAFKA).failures == failures
    guard, reads = thing.guard(), list[str]()
    read = Breakers.read_dependency

    def count(breakers: Breakers, name: str) -> Dependency:
        reads.append(name)
        return read(breakers, name)

    monkeypatch.setattr(Breakers, "read_dependency", count)
    with guard_dependencies(guard):
        thing.ask()
    assert reads == [KAFKA]
    monkeypatch.setattr(dependency_guards, "SHORT_SECONDS", 0.0)
    with guard_dependencies(thing.guard()):
        thing.unavailable = True
        assert thing.work() == "away", "another one asks while this one takes its time"
        thing.unavailable = False
    assert Ledger(thing.url).breakers.read_dependency(KAFKA).failures == 0


def test_while_it_is_open_nobody_asks_and_then_one_does(thing: FakeDependency) -> None:
    thing.unavailable = True
    assert [thing.work() for _ in range(FAILURES)] == ["away"] * FAILURES
    asked = thing.asked
    assert [thing.work() for _ in range(50)] == ["refused"] * 50
    assert thing.asked == asked == FAILURES
    cool_down(thing.url)
    assert [thing.work() for _ in range(20)] == ["away", *["refused"] * 19]
    assert thing.asked == asked + 1, "the probe found it unavailable, and the cool-down began again"
    thing.unavailable = False
    cool_down(thing.url)
    assert [thing.work() for _ in range(3)] == ["done"] * 3
    assert Ledger(thing.url).breakers.read_dependency(KAFKA).state == "closed"


def test_one_of_many_processes_makes_the_probe(thing: FakeDependency) -> None:
    thing.unavailable = True
    for _ in range(FAILURES):
        thing.work()
    cool_down(thing.url)
    asked, released, found = thing.asked, threading.Event(), list[str]()

    def slow() -> None:
        thing.asked += 1
        released.wait(30)

    def enter() -> None:
        try:
            Guard(Ledger(thing.url, wait_seconds=30).breakers, KAFKA, slow).enter()
            found.append("in")
        except BreakerOpenError:
            found.append("refused")
        if len(found) == 7:
            released.set()

    comers = [threading.Thread(target=enter) for _ in range(8)]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join(60)
    assert sorted(found) == ["in", *["refused"] * 7]
    assert thing.asked == asked + 1


def test_a_probe_whose_process_died_is_made_again_after_a_cool_down(thing: FakeDependency) -> None:
    breakers = Ledger(thing.url).breakers
    dead = Dependency(KAFKA, "half-open", since=datetime.now(UTC), probe="dead", why="away")
    breakers.change(KAFKA, lambda _: dead)
    assert thing.work() == "refused"
    cool_down(thing.url)
    assert thing.work() == "done"


def test_another_error_counts_neither_way(thing: FakeDependency) -> None:
    """What failed by something else may not have asked at all."""
    thing.unavailable = True
    for _ in range(FAILURES - 1):
        thing.work()
    for error in (PermanentError("broken", remedy="look"), DependencyUnavailableError("lake", remedy="wait", of=LAKE)):
        with pytest.raises(HighwaterError), guard_dependencies(thing.guard()):
            raise error
    assert Ledger(thing.url).breakers.read_dependency(KAFKA).failures == FAILURES - 1
    assert thing.work() == "away"
    assert thing.work() == "refused"


def test_an_answer_begins_the_count_again(thing: FakeDependency) -> None:
    for _ in range(4):
        thing.unavailable = True
        for _ in range(FAILURES - 1):
            assert thing.work() == "away"
        thing.unavailable = False
        assert thing.work() == "done"


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["fails", "answers", "cools"]), max_size=30))
def test_it_does_what_a_counter_and_a_flag_would(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    thing = FakeDependency(f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'l.sqlite'}")
    in_a_row, is_open, cooled, asked = 0, False, False, 0
    for step in steps:
        if step == "cools":
            cooled = is_open
            if is_open:
                cool_down(thing.url)
            continue
        thing.unavailable = step == "fails"
        if is_open and not cooled:
            assert thing.work() == "refused"
        elif thing.unavailable:
            assert thing.work() == "away"
            in_a_row, asked = in_a_row + 1, asked + 1
            is_open, cooled = is_open or in_a_row == FAILURES, False
        else:
            assert thing.work() == "done"
            asked += 2 if is_open else 1  # the probe, and then the work
            in_a_row, is_open, cooled = 0, False, False
        assert thing.asked == asked


# In ticks and steps


class CountingListener:
    """A broker's address where nobody talks Kafka: it counts who connects, and hangs up."""

    def __init__(self) -> None:
        self.connections = 0
        self._socket = socket.create_server((LOOPBACK, 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[CountingListener]:
    made = CountingListener()
    yield made
    made.close()


def test_a_broker_that_is_unavailable_gets_no_connection_while_its_breaker_is_open(
    listener: CountingListener, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 1.0)
    ledger, kafka, lake = Ledger(url), Kafka(f"{LOOPBACK}:{listener.port}"), Lake(str(tmp_path / "lake"))
    resources = SimpleNamespace(
        ledger=SimpleNamespace(open=lambda: ledger),
        kafka=SimpleNamespace(open=lambda: kafka),
        lake=SimpleNamespace(open=lambda: lake),
    )
    instance = dg.DagsterInstance.ephemeral(tempdir=str(tmp_path))

    def planned() -> str:
        try:
            stream_ticks.plan_stream(instance, resources, STREAM)
        except BreakerOpenError as error:
            return str(error)
        except DependencyUnavailableError:
            return "away"
        return "planned"

    assert [planned() for _ in range(FAILURES)] == ["away"] * FAILURES
    before = settled(listener)
    reported = [planned() for _ in range(5)]
    assert all("kafka is not asked" in text and "did not answer" in text for text in reported)
    with pytest.raises(BreakerOpenError):
        stream_ticks.plan_retries(instance, resources, STREAM)
    with pytest.raises(BreakerOpenError):
        repairing.repair(instance, resources, STREAM, None)
    heard: list[Any] = []
    assert "not measured" in " ".join(alerts.tick(ledger, kafka, lake, [STREAM], heard.append).lines)
    assert [(alert.stream, alert.what) for alert in heard] == [("the deployment", "circuit breaker of kafka")]
    for table in ("raw", "dlq"):
        with (
            pytest.raises(BreakerOpenError),
            guard_dependencies(*build_step_guards(table, ledger, kafka, lake, STREAM)),
        ):
            pytest.fail("the step began")
    with guard_dependencies(*build_step_guards("current", ledger, kafka, lake, STREAM)):
        """What asks Kafka nothing goes on."""
    time.sleep(1)  # a client that was kept would come back by itself, ten times in this time
    assert listener.connections == before, "0 calls until the probe"
    cool_down(url)
    assert planned() == "away"
    wait_until(lambda: listener.connections > before, 10, "the probe's connection")


def settled(listener: CountingListener) -> int:
    """The connections so far, when clients that were closed have ended theirs: the thread that counts may come late."""
    wait_until(lambda: listener.connections > 0, 10, "the first connection")
    before = -1
    while before != listener.connections:
        before = listener.connections
        time.sleep(0.5)
    return before


def counting(monkeypatch: pytest.MonkeyPatch, *, unavailable: Callable[[str], bool]) -> list[str]:
    """The questions to the storage, which fails where the test says so."""
    from deltalake import DeltaTable

    asked: list[str] = []
    real = DeltaTable.is_deltatable

    def is_deltatable(path: str, *rest: Any) -> bool:
        asked.append(path)
        if unavailable(path):
            raise OSError("the storage is unavailable")
        return bool(real(path, *rest))

    monkeypatch.setattr(DeltaTable, "is_deltatable", staticmethod(is_deltatable))
    monkeypatch.setattr(delta, "_is_root_readable", lambda _: False)
    return asked


def test_a_lake_that_is_unavailable_is_not_asked_while_its_breaker_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_unavailable = [True]
    asked = counting(monkeypatch, unavailable=lambda _: is_unavailable[0])
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        ours = Repairing(tmp_path, instance, [a_slice(1, 100)])
        for _ in range(FAILURES):
            with pytest.raises(DependencyUnavailableError):
                ours.tick()
        before = len(asked)
        for _ in range(5):
            with pytest.raises(BreakerOpenError, match="lake is not asked"):
                ours.tick()
        assert len(asked) == before
        is_unavailable[0] = False
        cool_down(f"sqlite:///{tmp_path / 'ledger.sqlite'}", LAKE)
        assert ours.tick()[0]


def test_a_reference_table_that_is_unavailable_is_not_asked_and_raw_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        first, second = a_slice(1, 100), a_slice(2, 100)
        ours = Repairing(tmp_path, instance, [first, second])
        commit_empty(ours.lake, [first], "raw")
        asked = counting(monkeypatch, unavailable=lambda _: False)
        [guard] = list_lookup_guards(ours.ledger, ours.lake, STREAM)
        for _ in range(FAILURES):
            from highwater.assets.lookups import ensure_lookup

            assert STREAM.lookup is not None
            with pytest.raises(DependencyUnavailableError, match="reference/customers"), guard_dependencies(guard):
                ensure_lookup(ours.lake, STREAM.lookup)
        asked.clear()
        requests, tick = ours.tick()
        assert requests == [([second.key], True, "repair")]
        assert "the breaker of the reference table is open" in tick.message
        for table in ("events", "rejects"):
            nothing: Any = SimpleNamespace(topics=None)
            steps = build_step_guards(table, ours.ledger, nothing, ours.lake, STREAM)
            with pytest.raises(BreakerOpenError), guard_dependencies(*steps):
                pytest.fail("the step began")
        assert not [path for path in asked if path.endswith("customers")]
        customers(ours.lake)
        cool_down(f"sqlite:///{tmp_path / 'ledger.sqlite'}", guard.name)
        with guard_dependencies(guard):
            """The probe found it."""
        assert sorted(ours.tick()[0]) == [([first.key, second.key], False, "repair")]


def test_nothing_is_a_probe_while_the_reference_table_is_left_alone() -> None:
    asked = {"lacking": {"a": UNDECIDED, "b": UNREAD}, "main": {"a", "b"}, "accepted": {"a"}, "refused": (), "busy": ()}
    found = stop(OPEN, now=OPEN.until, unavailable=True, **asked)  # type: ignore[arg-type]
    assert (set(found.waiting), set(found.raw_alone), found.probe) == ({"a"}, {"b"}, None)


def test_status_reports_of_what_is_left_alone(
    url: str, listener: CountingListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 0.5)
    ledger = Ledger(url)
    since = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for name in (KAFKA, "lookup reference/others"):
        ledger.breakers.change(name, lambda row: replace(row, state="open", since=since, why="it was unavailable"))
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{listener.port}"), STREAM, {})
    [line] = [line for line in status.lines if "breaker of" in line]
    assert "kafka is open since 2026-03-01 12:00:00 UTC: it was unavailable; it is asked again from 12:01:00 on" in line
    assert status.to_plain()["dependencies"] == [line.strip()]


def test_the_cool_down_ends_by_the_clock(thing: FakeDependency) -> None:
    now = datetime.now(UTC)
    row = Dependency(KAFKA, "open", since=now - COOL_DOWN + timedelta(seconds=1))
    assert dependency_guards.is_cooling_down(row, now)
    assert not dependency_guards.is_cooling_down(row, now + timedelta(seconds=1))
    assert not dependency_guards.is_cooling_down(Dependency(KAFKA), now)


# Dependencies that are unavailable or there


def test_repair_finds_a_reference_table_back_and_forgives_what_failed_without_it(tmp_path: Path) -> None:
    """Slices that failed for an hour were exhausted for a day, and nobody was left to find the table back."""
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        first = a_slice(1, 100)
        ours = Repairing(tmp_path, instance, [first])
        commit_empty(ours.lake, [first], "raw")
        ours.fail_often(first.key)
        assert ours.tick()[0] == [], "exhausted"
        [guard] = list_lookup_guards(ours.ledger, ours.lake, STREAM)
        for _ in range(FAILURES):
            with pytest.raises(DependencyUnavailableError), guard_dependencies(guard):
                ensure_lookup(ours.lake, STREAM.lookup)  # type: ignore[arg-type]
        url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        for _ in range(2):
            requests, tick = ours.tick()
            assert requests == []
            assert "1 wait for the breaker" in tick.message
            cool_down(url, guard.name)
        customers(ours.lake)
        cool_down(url, guard.name)
        time.sleep(0.01)  # the runs ended before the table came back
        assert ours.tick()[0] == [([first.key], False, "repair")]


def test_a_row_of_an_older_ledger_is_read(url: str) -> None:
    plain = {"name": KAFKA, "state": "closed", "failures": 1, "successes": 0, "since": None, "probe": "", "why": ""}
    assert Dependency.from_plain(plain) == Dependency(KAFKA, failures=1)
    row = Dependency(KAFKA, since=datetime(2026, 3, 1, tzinfo=UTC), closed=datetime(2026, 3, 2, tzinfo=UTC))
    assert Dependency.from_plain(row.to_plain()) == row


def test_one_broken_table_is_not_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error of a table counted as the lake unavailable, and its breaker stopped all streams."""
    lake = Lake(str(tmp_path / "lake"))
    customers(lake)
    path = Path(lake.build_reference_path("reference/customers"))
    table = open_table(str(path))
    assert table is not None
    for file in path.glob("*.parquet"):
        file.unlink()
    with pytest.raises(DependencyUnavailableError) as raised:
        query(table, "SELECT * FROM t")
    assert raised.value.of is None
    counting(monkeypatch, unavailable=lambda _: True)
    with pytest.raises(DependencyUnavailableError) as raised:
        query(table, "SELECT * FROM t")
    assert raised.value.of == LAKE


@pytest.mark.parametrize("shut", ["", "pay", "pay/raw", "pay/raw/_delta_log"])
def test_a_table_that_may_not_be_looked_at_is_not_absent(open_folder: Path, shut: str) -> None:
    """delta-rs takes a folder that it may not enter for the absence of a table (I15)."""
    lake = Lake(str(open_folder / "lake"))
    deltalake.write_deltalake(lake.build_table_path("pay", "raw"), pa.table({"slice": ["pay@0000000"]}))
    folder = Path(lake.root, shut)
    folder.chmod(0)
    try:
        with as_nobody(), pytest.raises(DependencyUnavailableError) as raised:
            lake.open_stream_table("pay", "raw")
        assert raised.value.of == (None if shut else LAKE), "a table's own fault leaves the lake to the other streams"
        with as_nobody(), nullcontext() if shut else pytest.raises(DependencyUnavailableError):
            lake.ensure_answering("pay")
    finally:
        folder.chmod(0o755)
    with as_nobody():
        assert lake.open_stream_table("pay", "raw") is not None
        assert lake.open_stream_table("pay", "events") is None


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are shut."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        try:
            with as_nobody():
                Path(folder, "absent").exists()
        except OSError as error:
            pytest.skip(f"this process cannot give its rights up, or its temporary folder is shut: {error}")
        yield Path(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, who may look into any folder."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_lake_whose_folder_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    """A mount that is gone looks like a lake that was never written."""
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        ours = Repairing(tmp_path, instance, [a_slice(1, 100)])
        assert ours.tick()[0], "a lake that nothing was committed to may be begun"
        ours.ledger.allocate_attempts([a_slice(1, 100).key])
        for _ in range(FAILURES):
            with pytest.raises(DependencyUnavailableError, match="the lake's folder") as raised:
                ours.tick()
        assert raised.value.of == LAKE
        for _ in range(2):
            with pytest.raises(BreakerOpenError, match="lake is not asked"):
                ours.tick()
            with pytest.raises(BreakerOpenError):
                cool_down_and_probe(tmp_path, ours)
        commit_empty(ours.lake, [a_slice(1, 100)], "raw")
        cool_down(f"sqlite:///{tmp_path / 'ledger.sqlite'}", LAKE)
        assert ours.tick()[0]
    assert not Lake("s3://bucket/lake").is_root_missing()
    assert Lake("file:///no/such/folder").is_root_missing()
    assert not Lake(f"file://{tmp_path}").is_root_missing()


def cool_down_and_probe(folder: Path, ours: Repairing) -> None:
    """The probe finds it still unavailable; the next tick shows the breaker again."""
    cool_down(f"sqlite:///{folder / 'ledger.sqlite'}", LAKE)
    with pytest.raises(DependencyUnavailableError, match="the lake's folder"):
        ours.tick()
    ours.tick()
