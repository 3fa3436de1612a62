"""The state of breakers in the ledger: one for all processes, also where several change it at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from highwater.breaker import AttemptResult, Circuit, admit_slices
from highwater.errors import (
    BreakerOpenError,
)
from highwater.resources.ledger import Ledger, breakers
from highwater.resources.ledger.breakers import AcceptedReason, AcceptedSlice, Judgement
from tests.helpers.racing import write_before
from tests.helpers.repairing import (
    NOON,
    OPEN,
    minutes,
    open_breaker,
)


def test_the_state_is_one_for_all_processes_and_survives_them(ledger: Ledger, url: str) -> None:
    assert ledger.breakers.read_circuit("orders") == Circuit()
    open_breaker(ledger)
    assert Ledger(url).breakers.read_circuit("orders") == OPEN
    assert Ledger(url).breakers.read_circuit("payments") == Circuit()


def test_one_of_many_concurrent_slices_is_the_probe(url: str, ledger: Ledger) -> None:
    open_breaker(ledger)
    probes: list[str] = []

    def come(key: str) -> None:
        def decide(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
            found = admit_slices(circuit, [key], NOON + minutes(6))
            if found is None:
                raise BreakerOpenError("open", remedy="wait")
            return found, ()

        try:
            Ledger(url, wait_seconds=30).breakers.update("orders", (), decide)
        except BreakerOpenError:
            return
        probes.append(key)

    comers = [threading.Thread(target=come, args=(f"orders@{n:07d}",)) for n in range(8)]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join()
    assert [ledger.breakers.read_circuit("orders").probe] == probes


def test_a_change_that_another_made_first_is_recreated(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL nothing locks the row while the change is worked out: the revision shows it."""
    open_breaker(ledger)
    with ledger.database.writing() as connection:
        assert breakers._keep(connection, "stream orders", Circuit(since=NOON), 1)
        assert not breakers._keep(connection, "stream orders", OPEN, 1)
    seen: list[Circuit] = []
    stored, first = breakers._keep, iter([False])
    monkeypatch.setattr(breakers, "_keep", lambda *given: next(first, True) and stored(*given))

    def decide(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
        seen.append(circuit)
        return replace(circuit, window=(*circuit.window, AttemptResult("a", 1))), ()

    ledger.breakers.update("orders", (), decide)
    assert len(seen) == 2
    assert ledger.breakers.read_circuit("orders") == Circuit((AttemptResult("a", 1),), since=NOON)


@pytest.mark.slow
def test_two_persons_accept_the_same_at_the_same_time(postgresql: Callable[[], str]) -> None:
    """PostgreSQL refused the second row, and the second person met an error of the driver."""
    url = postgresql()
    ledger, other = Ledger(url), Ledger(url).breakers
    slices = [AcceptedSlice("a", "checked", by, NOON) for by in ("ann", "bob")]
    done = write_before(ledger, ("INSERT INTO acceptances",), lambda: other.accept("orders", slices[:1]))
    assert (ledger.breakers.accept("orders", slices[1:]), done) == (0, [1])
    assert other.read_accepted_slices(["a"]) == {"a": slices[1]}
    reasons = [AcceptedReason("malformed", "orders@0000000", 0, "", by, NOON) for by in ("ann", "bob")]
    write_before(ledger, ("INSERT INTO accepted_reasons",), lambda: other.accept_reason("orders", reasons[0]))
    ledger.breakers.accept_reason("orders", reasons[1])
    assert other.read_accepted_reasons("orders") == {"malformed": reasons[1]}
