"""The burst of the demonstration: records that nobody can read open a breaker; what fixes it; how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from dev.dagster_questions import Ask, launch_run, observed, runs
from dev.readings import read_topics
from highwater.orchestration.operations.accepting_rejects import AcceptSlicesRequest, accept_slices
from highwater.orchestration.run_tags import PROBE, PURPOSE, RANGE_END, RANGE_START
from highwater.resources.ledger import Ledger

# Its records wait for nothing, so none of its rejects has another end than the parked topic.
STREAM = "payments"
PARKED = f"{STREAM}.parked"
# As many as a slice of the demonstration holds at the least, so that the planner cuts one of them, and none before.
RECORDS = 1_200


@dataclass
class BurstFigures:
    """The outcome of the burst.

    Args:
        records: how many were written.
        slice_key: the slice that was refused; empty before.
        rejects: records of it that would have been rejected.
        of: its records.
        run: the run that the breaker refused.
        opened: when the breaker opened, in UTC.
        why: what opened it, in the breaker's words.
        published: records on the parked topic while it was open.
        status_line: what a tick of the planner said meanwhile.
        probes: the slices that were tried after the cool-down.
        closed: when the breaker closed, in UTC.
        ends: where the records ended, by the comparison.
    """

    records: int = RECORDS
    slice_key: str = ""
    rejects: int = 0
    of: int = 0
    run: str = ""
    opened: datetime | None = None
    why: str = ""
    published: int = 0
    status_line: str = ""
    probes: tuple[str, ...] = ()
    closed: datetime | None = None
    ends: Counter[str] | None = None

    @property
    def seconds(self) -> float:
        """The seconds during which the breaker was not closed."""
        return (self.closed - self.opened).total_seconds() if self.closed and self.opened else 0.0

    @property
    def wrong(self) -> list[str]:
        """Differences from the outcome that the burst must have."""
        expected = Counter({"reject (malformed)": self.records})
        found = []
        if self.published:
            found.append(f"{self.published:,} records stood on {PARKED} while the breaker of {STREAM} was open")
        if self.closed and not self.status_line:
            found.append(f"no observation of kafka/{STREAM} shows the open breaker")
        if self.ends is not None and self.ends != expected:
            found.append(f"the burst of {self.records:,} records ended as {dict(self.ends)}")
        return found


class Burst:
    """Follows the burst, one step at a look: refused, accepted by a person, materialised, and the breaker closed.

    Args:
        ledger: holds the breaker.
        bootstrap: the brokers.
        ask: asks Dagster.
        write_sound: writes records of the same stream that are sound, which wait until the breaker's probe.
    """

    def __init__(self, ledger: Ledger, bootstrap: str, ask: Ask, write_sound: Callable[[], object]) -> None:
        self.figures = BurstFigures()
        self._ledger, self._bootstrap, self._ask, self._write_sound = ledger, bootstrap, ask, write_sound
        self._launched = False

    @property
    def over(self) -> bool:
        """Whether the breaker opened, and is closed again."""
        return self.figures.closed is not None

    def look(self) -> None:
        """Do the next step if its time has come."""
        if not self.figures.opened:
            self._ensure_refused()
        elif not self._launched:
            self._materialise()
        elif not self.over:
            self._ensure_closed()

    def refused(self, run: str) -> bool:
        """Whether a run failed because the breaker refused its slice: that is what it is for."""
        if not self.figures.opened:
            self._ensure_refused()
        return run == self.figures.run

    def _ensure_refused(self) -> None:
        refused = self._ledger.breakers.list_refused(STREAM)
        circuit = self._ledger.breakers.read_circuit(STREAM)
        if circuit.closed or not refused:
            return
        [judgement] = refused
        figures = self.figures
        figures.slice_key, figures.rejects, figures.of = judgement.slice_key, judgement.rejects, judgement.records
        figures.run, figures.opened, figures.why = judgement.run, circuit.since, circuit.why or ""
        figures.published = len(read_topics(self._bootstrap, [PARKED]).get(PARKED, ()))
        # At once, or the breaker would take it for its probe as long as no other slice waits in raw.
        request = AcceptSlicesRequest(
            [judgement.slice_key], dry_run=False, by="demo", because="a wrong serializer, since fixed"
        )
        accept_slices(self._ledger, [STREAM], request, datetime.now(UTC), lambda _: None)
        self._write_sound()

    def _materialise(self) -> None:
        """Request the slice that was accepted, once another one is planned that the breaker may take for its probe.

        Repair asks for it too, two minutes after it was planned: sooner on a quick machine than that one waits.
        """
        if len(self._ledger.list_slices(STREAM, STREAM, newest=2)) < 2:
            return
        key, self._launched = self.figures.slice_key, True
        if len(runs(self._ask, tags=[{"key": RANGE_START, "value": key}])) == 1:
            launch_run(self._ask, f"{STREAM}_slice", {RANGE_START: key, RANGE_END: key})

    def _ensure_closed(self) -> None:
        circuit = self._ledger.breakers.read_circuit(STREAM)
        if not circuit.closed:
            return
        figures = self.figures
        figures.closed = circuit.since
        probes = runs(self._ask, tags=[{"key": PURPOSE, "value": PROBE}])
        figures.probes = tuple(run.tags[RANGE_START] for run in probes)
        shown = [text for text in observed(self._ask, ("kafka", STREAM), "breaker") if not text.startswith("closed")]
        figures.status_line = shown[-1] if shown else ""
