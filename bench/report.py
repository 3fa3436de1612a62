"""The page of the benchmarks: tables and plots from the kept figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bench.harness import RESULTS, Result, Row, Target

PAGE = RESULTS.parent / "benchmarks.md"
HEAD = """# Benchmarks

`make bench` writes this page; `make bench ARGS="--only a,d"` measures a part. Broker, Spark and benchmark share 2
cores, so compare ratios. Variants take turns. Cells are seconds, the median of the rounds; plots' lines reach from
the fastest round to the slowest, and `docs/benchmarks/` has every round. Bold values miss their goal.
"""
# Why goals are missed, by benchmark; shown while one is.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "b": "`raw` has further columns, compares the record before the slice, and counts its rows after the commit. "
        "[ADR 20](adr/0020-speed-of-raw.md) has what was tried.",
        "c": "One slice plans and commits four tables; [ADR 28](adr/0028-speed-of-classification.md) has its seconds.",
        "d": "Delta rewrites each file that has a matching key, as a plain MERGE does.",
        "f": "New Spark sessions, the tables and the checks: [ADR 36](adr/0036-fixed-cost-of-a-run.md).",
        "h": "The commit that writes the checkpoint takes seconds.",
        "i": "[ADR 28](adr/0028-speed-of-classification.md) has the seconds of each table.",
        "m": "`events` has a file for each slice until maintenance; (n) has the reads afterwards.",
        "n": "On `events` either query of DuckDB takes 9 to 10 ms longer; the checkpoint still lists removed files.",
        "o": "Each field is checked for type, range, UTF-8, repeated names and digits that a double would lose: "
        "[ADR 28](adr/0028-speed-of-classification.md).",
    }
)


def write(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page and its plots from what is kept."""
    results = [Result.load(file) for file in sorted(folder.glob("*.json"))]
    for result in results:
        _draw_plot(result, folder / f"{result.name}.png")
    page.write_text("\n".join([HEAD, *[_format_section(result) for result in results]]))


def _format_section(result: Result) -> str:
    lines = [f"## ({result.name}) {result.title}", "", result.method, "", *_table(result), ""]
    whole = [target for target in result.targets if not target.case]
    if whole:
        lines += ["| figure | value | goal |", "| --- | --- | --- |"]
        lines += [f"| {v.what} | {_format_value(v)} | {_format_goal(v)} |" for v in whole]
        lines.append("")
    if result.name in LIMITS and not all(target.reached for target in result.targets):
        lines += [f"Limit: {LIMITS[result.name]}", ""]
    return "\n".join([*lines, f"![plot](benchmarks/{result.name}.png)", ""])


def _table(result: Result) -> list[str]:
    """A row per case: its variants, then the figures that have a target."""
    variants = list(dict.fromkeys(name for row in result.rows for name in row.seconds))
    values = {(v.case, f"{v.what} {_format_goal(v)}"): _format_value(v) for v in result.targets if v.case}
    goals = list(dict.fromkeys(goal for _, goal in values))
    lines = [["case", *variants, *goals], ["---"] * (1 + len(variants) + len(goals))]
    for row in result.rows:
        cells = [_format_cell(row, name) for name in variants]
        lines.append([row.case, *cells, *(values.get((row.case, goal), "") for goal in goals)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _format_value(target: Target) -> str:
    return f"{target.value:.2f}" if target.reached else f"**{target.value:.2f}**"


def _format_goal(target: Target) -> str:
    return f"{'≥' if target.at_least else '≤'} {target.limit:g}"


def _format_cell(row: Row, variant: str) -> str:
    return f"{row.median(variant):.3g}" if variant in row.seconds else ""


def _draw_plot(result: Result, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    variants = list(dict.fromkeys(name for row in result.rows for name in row.seconds))
    width = 0.8 / max(1, len(variants))
    for at, variant in enumerate(variants):
        rows = [(n, row) for n, row in enumerate(result.rows) if variant in row.seconds]
        medians = [row.median(variant) for _, row in rows]
        reach = [
            [m - min(row.seconds[variant]) for m, (_, row) in zip(medians, rows, strict=True)],
            [max(row.seconds[variant]) - m for m, (_, row) in zip(medians, rows, strict=True)],
        ]
        axes.bar([n + at * width for n, _ in rows], medians, width, yerr=reach, ecolor="gray", label=variant)
    middle = 0.4 - width / 2
    axes.set_xticks([n + middle for n in range(len(result.rows))], [row.case for row in result.rows], fontsize=8)
    axes.set_ylabel("seconds, median")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
