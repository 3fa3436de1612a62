"""`python -m bench`: measure all, or a part, and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bench import (
    auditing,
    backlog,
    definitions,
    formats,
    growth,
    latency,
    many_streams,
    producing,
    publishing,
    reading,
    report,
    ticks,
)
from bench.harness import Result
from bench.world import World, open_world

# Letter → what measures it, and the records of a slice.
BENCHMARKS: dict[str, tuple[Callable[[World, int, int], Result], int]] = {
    "a": (backlog.compare_raw_with_streaming, 50_000),
    "b": (backlog.compare_raw_with_bare_reads, 2_000_000),
    "c": (backlog.compare_whole_path, 10_000),
    "d": (growth.measure_growth_of_current, 0),
    "e": (ticks.measure_planner_ticks, 0),
    "f": (latency.tick_to_commit, 0),
    "g": (backlog.compare_skewed_topic, 400_000),
    "h": (growth.measure_growth_of_raw, 0),
    "i": (backlog.measure_slice_sizes, 0),
    "j": (producing.compare_reliable_with_bare, 400_000),
    "k": (auditing.measure_looks, 1_000_000),
    "l": (publishing.compare_publication_with_bare, 100_000),
    "m": (reading.compare_table_reads, 5_000_000),
    "n": (reading.compare_reads_of_small_slices, 1_000_000),
    "o": (formats.compare_classification, 300_000),
    "p": (definitions.measure_definitions, 0),
    "q": (many_streams.measure_idle_streams, 0),
    "r": (many_streams.measure_busy_streams, 0),
}
# These need neither broker nor Spark, or start their own.
WITHOUT_SERVICES = frozenset("pqr")

# These take minutes whatever the rounds: they make large tables first.
LONG = frozenset("dhkmnoqr")


def main(arguments: list[str]) -> int:
    """Measure what is asked for; 0 when every figure with a target reached it."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="letters, for example a,d (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only write the page from the figures that are kept")
    parser.add_argument(
        "--quick", action="store_true", help="one round of all but d, h, k, m to o, q and r; keeps nothing"
    )
    parser.add_argument("--records", type=int, help="records instead of the usual number, for example 10000000 of k")
    options = parser.parse_args(arguments)
    letters = options.only.split(",")
    if unknown := set(letters) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if options.quick:
        quick = [letter for letter in letters if letter not in LONG]
        return compute_status(_measure(quick, rounds=1, keep=False, records=options.records))
    missed = (
        0 if options.report else compute_status(_measure(letters, options.rounds, keep=True, records=options.records))
    )
    report.write()
    print(f"written: {report.PAGE.name}")
    return missed


def compute_status(results: Iterable[Result]) -> int:
    """0 when every figure with a target reached it, else 1."""
    return int(not all(target.reached for result in results for target in result.targets))


def _measure(letters: Sequence[str], rounds: int, *, keep: bool, records: int | None) -> list[Result]:
    found = []
    services: AbstractContextManager[Any] = nullcontext() if set(letters) <= WITHOUT_SERVICES else open_world()
    with services as world:
        for letter in letters:
            measure, usual = BENCHMARKS[letter]
            begin = time.monotonic()
            print(f"({letter}) {measure.__doc__}", flush=True)
            result = measure(world, rounds, usual if records is None else records)
            if keep:
                result.save()
            for target in result.targets:
                name = ", ".join(filter(None, (target.case, target.what)))
                print(f"  {name}: {target.value:.2f}, {'reached' if target.reached else 'NOT reached'}")
            print(f"  took {time.monotonic() - begin:.0f} s", flush=True)
            found.append(result)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
