"""The report of the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dev.compare import Comparison
from dev.demo_burst import PARKED, STREAM, BurstFigures
from dev.demo_shipments import WITH_ADDED
from dev.generator import Summary
from dev.reconcile import report as report_comparison
from dev.shipments import ADDED
from dev.shipments import STREAM as SHIPMENTS
from highwater.orchestration.checking.origin_counts import OriginEnds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass
class Figures:
    """The figures that the report gives beside the comparison."""

    written: list[Summary] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    backfilled: tuple[str, ...] = ()
    backfill_seconds: float = 0.0
    resolved: int = 0
    runs: int = 0
    seconds: float = 0.0
    lag: dict[str, int] = field(default_factory=dict)
    ends: dict[str, OriginEnds] = field(default_factory=dict)
    burst: BurstFigures = field(default_factory=BurstFigures)
    no_registry: str = ""

    @property
    def wrong(self) -> list[str]:
        """Disagreements in the ends of the origins, and differences in the outcome of the burst."""
        return [*(f"{stream}: {ends.error}" for stream, ends in self.ends.items() if ends.error), *self.burst.wrong]


def report(console: Console, figures: Figures, comparisons: Sequence[Comparison], home: Path) -> None:
    """The report."""
    from rich.table import Table

    console.print()
    for comparison in comparisons:
        report_comparison(comparison, console)
    records = sum(summary.records for summary in figures.written)
    busy = sum(summary.seconds for summary in figures.written)
    slices = {c.stream: c.numbers["slices"] for c in comparisons}
    table = Table(show_header=False, title="the demonstration", title_justify="left")
    table.add_row("written", f"{records:,} records at {records / max(busy, 0.001):,.0f} a second")
    table.add_row("slices", ", ".join(f"{count} of {stream}" for stream, count in slices.items()))
    table.add_row("runs", f"{figures.runs} succeeded, 1 was refused by the breaker, none failed otherwise")
    table.add_row(
        "backfill",
        f"{', '.join(figures.backfilled)} in {figures.backfill_seconds:.1f} s: nothing is there twice",
    )
    accepted = sum(c.numbers["accepted by a retry"] for c in comparisons)
    table.add_row(
        "retries",
        f"{accepted:,} records accepted after {figures.resolved} late customers had become known; the others' orders "
        "wait in the next tier",
    )
    for name, text in _burst_rows(figures.burst):
        table.add_row(name, text)
    table.add_row("schemas", _schemas(figures, comparisons))
    table.add_row("lag", ", ".join(f"{lag} offsets of {stream}" for stream, lag in figures.lag.items()))
    table.add_row("time", f"{figures.seconds:.0f} s: " + ", ".join(f"{s:.0f} s {what}" for what, s in figures.phases))
    table.add_row("logs", str(home / "logs"))
    table.add_row("look at it", f"HIGHWATER_HOME={home} make up")
    console.print(table)
    console.print(_ends_table(figures))
    for wrong in figures.wrong:
        console.print(f"[red]wrong: {wrong}[/red]")


def _burst_rows(burst: BurstFigures) -> list[tuple[str, str]]:
    """The times at which the breaker opened and closed, and the end of the records that opened it."""
    when = f"{burst.opened:%H:%M:%S} UTC: {burst.why}; " if burst.opened else ""
    opened = (
        f"{when}{burst.records:,} records of {STREAM} that nobody can read: the breaker opened at {burst.slice_key} "
        f"after {burst.rejects:,} rejects of {burst.of:,} records, {burst.published:,} of them on {PARKED}"
    )
    probes = f"{', '.join(burst.probes)} was the probe" if burst.probes else "no slice waited to be the probe"
    ends = ", ".join(f"{count:,} {end}" for end, count in (burst.ends or {}).items())
    closed = (
        f"highwater accept-rejects {burst.slice_key}; {probes}; the breaker closed after {burst.seconds:.0f} s; "
        f"the burst ended as {ends}, on {PARKED}"
    )
    return [
        ("burst", opened),
        ("meanwhile", f"kafka/{STREAM} shows that the breaker is {burst.status_line}"),
        ("recovery", closed),
    ]


def _schemas(figures: Figures, comparisons: Sequence[Comparison]) -> str:
    """The changes of a second schema, or the reason why there was no schema registry."""
    if figures.no_registry:
        return f"not shown: {figures.no_registry}"
    added = sum(c.numbers[WITH_ADDED] for c in comparisons)
    return (
        f"the second schema of {SHIPMENTS.name} added the column {ADDED} while slices were materialised: "
        f"{added:,} events have a value, earlier ones have null"
    )


def _ends_table(figures: Figures) -> Table:
    """The ends of all records of the main topics."""
    from rich.table import Table

    table = Table("end", *figures.ends, title="how the records ended (highwater audit)", title_justify="left")
    counted = {stream: {row[0]: row[1] for row in ends.rows} for stream, ends in figures.ends.items()}
    names = dict.fromkeys(name for ends in counted.values() for name in ends)
    for name in names:
        table.add_row(name, *[counted[stream].get(name, "") for stream in figures.ends])
    return table
