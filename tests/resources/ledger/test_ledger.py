"""The ledger on real databases: all or nothing, several processes at once, locked, broken, far away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    InconsistentRecordError,
    LeaseHeldError,
    LedgerRefusedError,
    UnknownSliceError,
)
from highwater.gaps import Gaps
from highwater.plans import Generation, Loss, PublicationRecord
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.leases import Lease
from highwater.resources.ledger.schema import slices
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import BOUNDED

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture
def url(either_url: str) -> str:
    """A database of the test's own, on SQLite and on a server."""
    return either_url


def slice_(ordinal: int, topic: str = "orders", **ranges: tuple[int, int]) -> Slice:
    offsets = {int(name[1:]): OffsetRange(*bounds) for name, bounds in (ranges or {"p0": (0, 5)}).items()}
    return Slice("orders", topic, f"Id-{topic}", 0, ordinal, offsets, NOON, lag=7, epochs={0: 3})


def generation(starts: Mapping[int, int | None], number: int = 0) -> Generation:
    return Generation("orders", "orders", "Id-orders", number, starts, NOON)


def loss(partition: int, start: int, end: int, number: int = 0) -> Loss:
    return Loss("orders", "orders", number, partition, OffsetRange(start, end), "expired", "ann", NOON)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process that runs this code."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    root = Path(__file__).parents[3]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        found.append(output)
    return found


def test_making_a_ledger_touches_nothing(tmp_path: Path, sqlite_url: str) -> None:
    Ledger(sqlite_url)
    assert list(tmp_path.iterdir()) == []


def test_a_slice_comes_back_as_it_was_planned(ledger: Ledger) -> None:
    planned = slice_(3, p0=(0, 5), p11=(7, 7), p2=(1, 9))
    assert ledger.add([planned])
    [found] = ledger.get(["orders@0000003"])
    assert found == planned
    assert (found.lag, found.epochs, list(found.ranges)) == (7, {0: 3}, [0, 2, 11])


def test_slices_come_in_the_order_of_the_keys(ledger: Ledger) -> None:
    ledger.add([slice_(0), slice_(1), slice_(2)])
    keys = ["orders@0000002", "orders@0000000", "orders@0000002"]
    assert [found.key for found in ledger.get(keys)] == keys


def test_more_keys_than_a_statement_takes(ledger: Ledger) -> None:
    slices = [slice_(n) for n in range(1201)]
    ledger.add(slices)
    assert ledger.get([s.key for s in slices]) == slices
    assert set(ledger.allocate_attempts([s.key for s in slices]).values()) == {1}


def test_plans_are_stored_all_or_none(ledger: Ledger) -> None:
    assert ledger.add([slice_(0), slice_(1)])
    assert not ledger.add([slice_(2), slice_(1)])
    assert [found.key for found in ledger.list_slices("orders")] == ["orders@0000000", "orders@0000001"]


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("orders@0000009", "orders@0000001 is the last of orders"),
        ("nothing@0000000", "nothing of topic nothing"),
        ("orders@0000000' OR '1'='1", "no slice of that key"),
        ("orders@0000000; DROP TABLE slices; --", "no slice of that key"),
        ('"orders"@0000000', "no slice of that key"),
    ],
)
def test_an_unknown_key_is_named_with_what_is_there(ledger: Ledger, key: str, stored: str) -> None:
    ledger.add([slice_(0), slice_(1)])
    for asked in (
        lambda: ledger.get(["orders@0000000", key]),
        lambda: ledger.allocate_attempts(["orders@0000000", key]),
    ):
        with pytest.raises(UnknownSliceError) as caught:
            asked()
        assert key in caught.value.problem
        assert (caught.value.stored, caught.value.found) == (stored, key)
        assert caught.value.remedy
    assert ledger.count_slices() == {("orders", "orders"): 2}
    assert ledger.allocate_attempts(["orders@0000000"]) == {"orders@0000000": 1}  # a refused call gave out no number


def test_slices_are_listed_in_the_order_of_their_plan(ledger: Ledger) -> None:
    ledger.add([slice_(0), slice_(1)])
    ledger.add([replace(slice_(0, "orders.dlq.1"), planned_at=NOON + timedelta(seconds=1))])
    ledger.add([replace(slice_(2), planned_at=NOON + timedelta(seconds=2))])
    keys = ["orders@0000000", "orders@0000001", "orders.dlq.1@0000000", "orders@0000002"]
    assert [s.key for s in ledger.list_slices("orders")] == keys
    assert [s.key for s in ledger.list_slices("orders", after=keys[1])] == keys[2:]
    assert [s.key for s in ledger.list_slices("orders", after=keys[0], limit=2)] == keys[1:3]
    assert [s.key for s in ledger.list_slices("orders", newest=2)] == keys[2:]
    assert [s.key for s in ledger.list_slices("orders", "orders", newest=2)] == [keys[1], keys[3]]
    assert [s.key for s in ledger.list_slices("orders", "orders", after=keys[1])] == [keys[3]]
    assert ledger.list_slices("payments") == []


def test_the_slices_that_hold_an_offset(ledger: Ledger) -> None:
    """One for each generation; offsets have 64 bits, and 9 is before 10 as a number alone."""
    big = 2**40
    ledger.add([slice_(0, p0=(0, 9), p1=(0, big)), slice_(1, p0=(9, 100), p1=(big, big + 2))])
    ledger.add([replace(slice_(2, p0=(50, 60)), generation=1)])

    def holding(partition: int, offset: int) -> list[int]:
        return [found.ordinal for found in ledger.list_slices_at_offset("orders", "orders", partition, offset)]

    assert [holding(0, n) for n in (0, 8, 9, 55, 99, 100)] == [[0], [0], [1], [1, 2], [1], []]
    assert [holding(1, n) for n in (big - 1, big, big + 1, big + 2)] == [[0], [1], [1], []]
    assert holding(7, 0) == []


def test_the_last_slice_and_the_planned_ends(ledger: Ledger) -> None:
    assert ledger.read_last_slice("orders", "orders") is None
    assert ledger.topics.read_planned_topic("orders", "orders") is None
    assert ledger.topics.read_planned_ends("orders", "orders") == {}
    ledger.topics.open_generation(generation({0: 2, 1: None, 2: 5}))
    ledger.add([slice_(0, p0=(2, 4), p2=(5, 6)), slice_(1, p0=(4, 9), p2=(6, 6))])
    assert str(ledger.read_last_slice("orders", "orders")) == str(slice_(1, p0=(4, 9), p2=(6, 6)))
    assert ledger.topics.read_planned_ends("orders", "orders") == {0: 9, 2: 6}
    found = ledger.topics.read_planned_topic("orders", "orders")
    assert found is not None
    assert (found.next_ordinal, set(found.undecided)) == (2, {1})


@pytest.mark.parametrize(
    "changes",
    [{"starts": {0: -1001}}, {"starts": {-1: 0}}, {"number": 2}, {"number": 0}, {"topic": "others"}, {"topic_id": ""}],
    ids=str,
)
def test_a_generation_that_no_topic_can_have_is_refused(ledger: Ledger, changes: dict[str, object]) -> None:
    """One that began at -1001 ended all planning, and the next acceptance crashed."""
    first = Generation("orders", "orders", "A", 0, {0: 5}, NOON)
    assert ledger.topics.open_generation(first)
    second = replace(first, **{"number": 1, "starts": {0: 3}, "topic_id": "B", **changes})  # type: ignore[arg-type]
    with pytest.raises(InconsistentRecordError):
        ledger.topics.open_generation(second, seen=first)
    assert ledger.topics.list_generations("orders", "orders") == [first]
    with pytest.raises(InconsistentRecordError):
        ledger.topics.decide_starts(first, {1: -1})
    assert ledger.topics.list_generations("orders", "orders") == [first]


@pytest.mark.parametrize(
    "changes", [{"offsets": OffsetRange(4, 4)}, {"partition": -1}, {"generation": 1}, {"topic": "others"}], ids=str
)
def test_a_loss_that_no_topic_can_have_is_refused(ledger: Ledger, changes: dict[str, object]) -> None:
    first = Generation("orders", "orders", "A", 0, {0: 5}, NOON)
    assert ledger.topics.open_generation(first)
    with pytest.raises(InconsistentRecordError):
        ledger.record_loss([replace(loss(0, 5, 9), **changes)], seen=first)  # type: ignore[arg-type]
    assert ledger.list_losses() == []


def test_a_loss_moves_the_planned_end(ledger: Ledger) -> None:
    ledger.topics.open_generation(generation({0: 0}))
    ledger.add([slice_(0, p0=(0, 4))])
    assert ledger.record_loss([loss(0, 4, 9)])
    assert ledger.topics.read_planned_ends("orders", "orders") == {0: 9}
    assert ledger.list_losses("orders", "orders") == [loss(0, 4, 9)]
    assert ledger.list_losses("payments") == []
    assert not ledger.record_loss([loss(0, 4, 9)])  # a hole is recorded once


def test_nothing_is_stored_over_a_plan_that_was_not_seen(ledger: Ledger) -> None:
    seen = generation({0: 0})
    assert ledger.topics.open_generation(seen)
    assert not ledger.topics.open_generation(seen)
    assert ledger.add([slice_(0)], seen=seen)
    assert not ledger.add([slice_(1)], seen=seen)
    assert not ledger.record_loss([loss(0, 5, 6)], seen=seen)
    assert not ledger.topics.open_generation(generation({0: 0}, 1), seen=seen)
    assert not ledger.topics.decide_starts(seen, {1: 4})
    assert ledger.count_slices() == {("orders", "orders"): 1}
    assert ledger.list_losses() == []
    assert [g.number for g in ledger.topics.list_generations("orders", "orders")] == [0]


def test_a_new_generation_ends_planning_in_the_old_one(ledger: Ledger) -> None:
    ledger.topics.open_generation(generation({0: 0}))
    old = ledger.topics.list_generations("orders", "orders")[0]
    assert ledger.topics.open_generation(replace(generation({0: 3}, 1), first_ordinal=4), seen=old)
    moved = ledger.topics.list_generations("orders", "orders")[0]
    assert not ledger.add([slice_(0)], seen=moved)
    found = ledger.topics.read_planned_topic("orders", "orders")
    assert found is not None
    assert (found.generation.number, found.ends, found.next_ordinal) == (1, {0: 3}, 4)


def test_starts_are_decided_once(ledger: Ledger) -> None:
    seen = generation({0: 0, 1: None})
    ledger.topics.open_generation(seen)
    assert ledger.topics.decide_starts(seen, {1: 8})
    assert not ledger.topics.decide_starts(seen, {1: 9})
    assert ledger.topics.read_planned_ends("orders", "orders") == {0: 0, 1: 8}


COUNT_UP = """
    import json, sys
    from highwater.resources.ledger import Ledger
    ledger = Ledger(sys.argv[1], wait_seconds=60)
    print(json.dumps([ledger.allocate_attempts(["orders@0000000", "orders@0000001"]) for _ in range(50)]))
"""


def test_attempt_numbers_are_given_out_once(url: str, ledger: Ledger) -> None:
    ledger.add([slice_(0), slice_(1)])
    given = [json.loads(output) for output in outputs(*[python(COUNT_UP, url) for _ in range(3)])]
    for key in ("orders@0000000", "orders@0000001"):
        assert sorted(numbers[key] for output in given for numbers in output) == list(range(1, 151))


FIRST_USE = """
    import sys
    from highwater.resources.ledger import Ledger
    print(Ledger(sys.argv[1], wait_seconds=60).count_slices())
"""


@pytest.mark.slow
def test_several_processes_may_be_the_first_to_use_a_ledger(url: str) -> None:
    assert outputs(*[python(FIRST_USE, url) for _ in range(6)]) == ["{}\n"] * 6


@pytest.fixture
def locked(url: str, ledger: Ledger) -> Iterator[sa.Connection]:
    """Somebody else holds the locks of a writer."""
    ledger.add([slice_(0)])
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as other:
        if engine.dialect.name == "sqlite":
            other.exec_driver_sql("BEGIN EXCLUSIVE")
        else:
            other.exec_driver_sql("LOCK TABLE slices IN SHARE MODE")
        yield other


def test_a_locked_ledger_is_unavailable_after_a_bounded_wait(url: str, locked: sa.Connection) -> None:
    waiting = Ledger(url, wait_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(DependencyUnavailableError) as caught:
        waiting.add([slice_(1)])
    assert time.monotonic() - began < BOUNDED
    assert "lock" in str(caught.value.found)
    assert "lock" in caught.value.remedy
    assert [found.key for found in waiting.list_slices("orders")] == ["orders@0000000"]  # readers do not wait
    locked.exec_driver_sql("COMMIT")
    assert waiting.add([slice_(1)])


def test_a_ledger_in_a_folder_that_cannot_be_made_is_a_fault_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        Ledger(f"sqlite:///{tmp_path / 'file' / 'ledger.sqlite'}").count_slices()
    assert "HIGHWATER_LEDGER_URL" in caught.value.remedy


def test_a_file_that_is_no_database_is_a_fault_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("no database" * 100)
    with pytest.raises(ConfigurationError) as caught:
        Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}").count_slices()
    assert "not a database" in str(caught.value.found)


SECRET = "hunter2-secret"


def test_a_value_that_the_driver_refuses_is_no_outage(ledger: Ledger) -> None:
    """It was an outage: it was tried for ever, and its remedy named locks and servers."""
    with pytest.raises(LedgerRefusedError, match="ProgrammingError") as caught, ledger.database.writing() as connection:
        connection.execute(sa.text("INSERT INTO slices (stream) VALUES (:value)"), {"value": object()})
    assert caught.value.__cause__ is None, "the chain would repeat statement and address"


def test_the_clock_of_the_database_is_compared_with_ours(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(ledger.measure_clock_skew()) < timedelta(seconds=5)
    now = time.time
    monkeypatch.setattr("highwater.resources.ledger.leases.time.time", lambda: now() - 60)
    ahead = timedelta(0) if ledger.database.engine.dialect.name == "sqlite" else timedelta(minutes=1)
    assert abs(ledger.measure_clock_skew() - ahead) < timedelta(seconds=5)


def test_a_value_of_another_type_than_its_column_is_no_outage(ledger: Ledger) -> None:
    with pytest.raises(LedgerRefusedError, match="not JSON serializable"), ledger.database.writing() as connection:
        connection.execute(sa.insert(slices), {"slice_key": "k", "ranges": object()})


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["value too long", "out of range", "maximum size", "cannot"])
def test_a_value_that_no_column_holds_is_no_outage(postgresql: Callable[[], str], fault: str) -> None:
    statements = {
        "value too long": "INSERT INTO topics (stream) VALUES (repeat('x', 300))",
        "out of range": f"SELECT {2**40}::integer",
        # An OperationalError: the row of an index is too large.
        "maximum size": "CREATE TEMP TABLE t (x TEXT PRIMARY KEY); "
        "INSERT INTO t SELECT string_agg(md5(n::text), '') FROM generate_series(1, 1000) n",
        # A NotSupportedError.
        "cannot": "CREATE TEMP TABLE t (x INTEGER); ALTER TABLE t ALTER COLUMN ctid SET DEFAULT 1",
    }
    with pytest.raises(LedgerRefusedError, match=fault), Ledger(postgresql()).database.writing() as connection:
        connection.exec_driver_sql(statements[fault])


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://high:{SECRET}@127.0.0.1:1/ledger",
        f"postgresql://high@127.0.0.1:1/ledger?password={SECRET}",
        f"postgresql+psycopg2://high:{SECRET}@no-such-host.invalid/ledger",
    ],
)
def test_a_server_that_is_unavailable_is_named_without_its_password(url: str) -> None:
    ledger = Ledger(url, wait_seconds=2)
    with pytest.raises(DependencyUnavailableError) as caught:
        ledger.count_slices()
    chain = [caught.value, caught.value.__cause__, None if caught.value.__suppress_context__ else 1]
    assert chain[1:] == [None, None]
    for text in (str(caught.value), repr(caught.value), repr(ledger)):
        assert SECRET not in text
        assert "postgresql" in text or "Ledger" in text


@pytest.mark.parametrize("url", [f"::{SECRET}", f"mysql://u:{SECRET}@h/d", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_cannot_be_used_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Ledger(url)
    assert SECRET not in str(caught.value)
    assert "HIGHWATER_LEDGER_URL" in caught.value.remedy
    assert caught.value.__cause__ is None


def test_a_lease_keeps_others_out_until_it_is_given_back(url: str, ledger: Ledger) -> None:
    with ledger.lease("commit", seconds=30) as lease:
        lease.check()
        with pytest.raises(LeaseHeldError) as caught, Ledger(url).lease("commit", seconds=30, wait=0.3):
            pass
        assert "'commit'" in caught.value.problem
        with Ledger(url).lease("another", seconds=30):
            pass
    with Ledger(url).lease("commit", seconds=30):
        pass


def test_a_lease_is_reported_while_it_is_held_and_not_when_its_holder_died(ledger: Ledger) -> None:
    Lease(ledger.database, "of one that died", seconds=-1).take()
    before = datetime.now(UTC)
    with ledger.lease("commit", seconds=30):
        [(name, ends)] = ledger.read_leases().items()
    assert name == "commit"
    assert timedelta(seconds=25) < ends - before < timedelta(seconds=60)
    assert ledger.read_leases() == {}


def test_a_lease_is_renewed_while_its_block_runs(url: str, ledger: Ledger) -> None:
    # Longer than a busy machine keeps the renewing thread waiting: a term of 0.6 s was seen to lapse.
    with ledger.lease("commit", seconds=2) as lease:
        with pytest.raises(LeaseHeldError), Ledger(url).lease("commit", seconds=30, wait=5):
            pass
        lease.check()


def test_a_waiter_gets_the_lease_when_it_is_given_back(url: str, ledger: Ledger) -> None:
    order: list[str] = []

    def wait() -> None:
        with Ledger(url).lease("commit", seconds=30, wait=30):
            order.append("second")

    with ledger.lease("commit", seconds=30):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


HOLD = """
    import sys, time
    from highwater.resources.ledger import Ledger
    with Ledger(sys.argv[1]).lease("commit", seconds=6):
        print("held", flush=True)
        time.sleep(600)
"""


def test_the_lease_of_a_process_that_died_ends_by_itself(url: str, ledger: Ledger) -> None:
    holder = python(HOLD, url)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with pytest.raises(LeaseHeldError), ledger.lease("commit", seconds=30, wait=0):
        pass
    with ledger.lease("commit", seconds=30, wait=30) as lease:
        lease.check()


def test_a_lease_that_another_had_meanwhile_is_not_renewed(ledger: Ledger) -> None:
    """Its holder hung, and what it had looked at may have changed, although the other gave it back."""
    lease, other = (Lease(ledger.database, "commit", 30) for _ in range(2))
    assert lease.take()
    let_run_out(ledger)
    assert lease.renew(), "nobody came in between"
    lease.check()
    let_run_out(ledger)
    assert other.take()
    other.give_back()
    assert not lease.renew()
    with pytest.raises(LeaseHeldError, match="ran out"):
        lease.check()


def let_run_out(ledger: Ledger) -> None:
    """Let the term of all leases end now, as the database sees it."""
    with ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE leases SET until = 0")


def test_a_holder_that_hung_learns_that_its_lease_is_gone(url: str) -> None:
    """A holder that was suspended went on committing beside its successor."""
    holder = python(
        """
        import sys, time
        from highwater.resources.ledger import Ledger
        from highwater.errors import LeaseHeldError
        with Ledger(sys.argv[1]).lease("commit", seconds=1) as lease:
            print("held", flush=True)
            sys.stdin.readline()
            try:
                lease.check()
            except LeaseHeldError as error:
                print(error.problem, flush=True)
        """,
        url,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGSTOP)
    with Ledger(url).lease("commit", seconds=30, wait=30):
        os.kill(holder.pid, signal.SIGCONT)
        time.sleep(1.5)
        output, _ = holder.communicate(timeout=300)
    assert output == "the lease 'commit' ran out before its work was done\n"


def test_recorded_publications_never_decrease(ledger: Ledger) -> None:
    for attempt, sent in ((1, 5), (1, 3), (2, 1), (1, 9)):
        ledger.publications.record("orders", "orders@0000000", PublicationRecord(attempt, sent, NOON))
    assert ledger.publications.read_for_slices(["orders@0000000", "orders@0000001"]) == {
        "orders@0000000": PublicationRecord(2, 1, NOON)
    }


def test_first_recorded_gaps_stay(ledger: Ledger) -> None:
    first = Gaps("d" * 64, 5, 2, 0, 0, 1, "delete", NOON)
    later = replace(first, digest="e" * 64, unseen=8, cleanup_policy="compact")
    assert ledger.gaps.record(slice_(0), first)
    assert not ledger.gaps.record(slice_(0), later)
    assert ledger.gaps.record(slice_(1), replace(later, cleanup_policy=None))
    assert ledger.gaps.read_for_slices([slice_(0).key, slice_(7).key]) == {slice_(0).key: first}
    assert ledger.gaps.list_cleanup_policies(slice_(0).topic_id) == {"delete", None}
    assert ledger.gaps.list_cleanup_policies("another topic") == set()


def test_the_slice_before_is_of_the_same_topic_and_generation(ledger: Ledger) -> None:
    other = replace(slice_(2), topic="payments")
    restarted = replace(slice_(4), generation=1)
    ledger.add([slice_(0), slice_(1)])
    ledger.add([other])
    ledger.add([slice_(3), restarted])
    assert ledger.read_previous_slice(slice_(3)) == slice_(1)
    assert ledger.read_previous_slice(slice_(0)) is None
    assert ledger.read_previous_slice(restarted) is None
