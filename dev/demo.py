"""`make demo`: from nothing to slices in Delta tables, compared with the generator's account; ends by itself."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dev import demo_burst, jars, paths
from dev.account import Account, account_file
from dev.compare import Comparison
from dev.customers import add_customers
from dev.dagster_questions import (
    ACTIVE,
    ENDED_BADLY,
    Ask,
    RunState,
    SliceStates,
    backfill_state,
    launch_backfill,
    read_slice_states,
    runs,
)
from dev.demo_burst import Burst
from dev.demo_report import Figures, report
from dev.demo_shipments import Shipments, compare_shipments
from dev.faults import BURST
from dev.generator import SOURCES, Order, Target, create_topic, generate
from dev.processes import exit_status
from dev.readings import covered_ends, end_offsets, is_covered
from dev.reconcile import reconcile
from dev.shipments import STREAM as SHIPMENTS
from dev.stack import DAGSTER_HOME, Stack
from highwater import settings
from highwater.errors import ConfigurationError, PermanentError, TemporaryError
from highwater.orchestration.checking.origin_counts import OriginEnds, count_ends
from highwater.orchestration.run_tags import PUBLISH, PURPOSE
from highwater.resources.jars import DownloadError, JarError
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.stream_files import load_streams
from highwater.tables import COMMON

if TYPE_CHECKING:
    import dagster as dg
    from rich.console import Console
    from rich.progress import Progress

# The streams, each with its tables.
STREAMS = {"orders": (*COMMON, "metrics"), "payments": COMMON}
# Its records wait some seconds; those of the next tier wait for longer than the demonstration lasts.
FIRST_TIER = "orders.dlq.1"
PUBLISHED = "published"
SEED = 20_260_101
# A backlog of two slices, which one run takes: a run costs a small machine's processors some ten seconds, mostly
# for its start.
ORDERS = 12_000
MAX_RECORDS = 6_500
# The variable that the definitions read.
MAX_RECORDS_NAME = "DEMO_MOST_RECORDS"
# Payments begin with the burst, while everything starts; as many that are sound come when the breaker has opened. So
# what it has to wait for passes while orders are taken through their tables and retried. Not scaled: a slice of
# payments holds at least this many, which makes each of the two one slice.
SOUND = demo_burst.RECORDS
DEFINITIONS = "dev.demo_definitions"
# Reached only where something hangs: a machine that is slow shows that by its progress.
DEADLINE_SECONDS = 900.0
# Each look takes a tenth of a second of the processor time that Spark needs.
POLL_SECONDS = 3.0


class DemoFailedError(PermanentError):
    """A run failed, or something did not happen in time."""


class TooSlowError(TemporaryError):
    """The machine needed longer than the demonstration waits."""


class Demo:
    """One demonstration in a home of its own.

    Args:
        home: a fresh folder for all state.
        console: where progress and report go.
        deadline: seconds within which everything must have happened.
        scale: a factor on the numbers of records.
    """

    def __init__(self, home: Path, console: Console, *, deadline: float = DEADLINE_SECONDS, scale: float = 1.0) -> None:
        self.home = home
        self.console = console
        self.scale = scale
        self.figures = Figures()
        self.streams: dict[str, tuple[str, ...]] = dict(STREAMS)
        self.shipments: Shipments | None = None
        self._began = time.monotonic()
        self._deadline = self._began + deadline

    @property
    def lake(self) -> str:
        """Root of the demonstration's lake."""
        return str(self.home / "lake")

    def run(self) -> list[Comparison]:
        """Everything in its order; returns how the tables compare."""
        registry = self._fetch_registry()
        if registry:
            self.streams[SHIPMENTS.name] = COMMON
        with self._phase("broker, Spark and Dagster start; the first records are written"):
            stack = Stack(
                self.home,
                base=without_configuration(os.environ) | {MAX_RECORDS_NAME: str(self._scaled(MAX_RECORDS))},
                short_lived=True,
                registry=registry,
                definitions=DEFINITIONS,
                daemon=[sys.executable, "-m", "dev.dagster_daemon"],
                on_broker=self._begin_writing,
            )
            ending = ExitStack()
            ending.enter_context(stack)
        with ending:
            return self._on(stack)

    def _fetch_registry(self) -> bool:
        """Fetch the schema registry if it is missing; returns False, and prints the reason, where that fails."""
        try:
            jars.ensure("registry")
        except (DownloadError, JarError) as error:
            self.figures.no_registry = f"the schema registry could not be fetched: {error.problem}"
            self.console.print(f"{self.figures.no_registry}\n{error.found or ''}", markup=False)
            self.console.print(
                f"The demonstration goes on without the stream {SHIPMENTS.name}. "
                "To see it, connect the network and run `make demo` again."
            )
            return False
        return True

    def _on(self, stack: Stack) -> list[Comparison]:
        target = Target(stack.bootstrap, self.home, self.lake)
        ask = _asker(stack)
        sound = Order(seed=SEED, records=SOUND)
        write_sound = partial(self._generate, demo_burst.STREAM, target, sound)
        burst = Burst(Ledger(self._here.ledger_url), target.bootstrap, ask, write_sound)
        with self._progress() as progress, _open_instance(stack) as instance:
            watch = _Watch(self, stack, ask, instance, target, progress, burst)
            with self._phase("the planner cuts the backlog into slices"):
                watch.until(lambda: all(watch.planned(stream) for stream in self.streams), "the first slices")
            with self._phase("the backlog is taken and sent; half of the late customers become known; a burst"):
                watch.until(lambda: watch.decided("orders"), "the first decision")
                self.figures.resolved = self._release_half()
                # Sent too: a run that sends gives up where a backfill decides its slices again meanwhile.
                watch.until(lambda: watch.taken("orders") and watch.sent("orders"), "the end of the backlog")
            slices = watch.slices("orders")
            if len(slices) < 2:
                raise DemoFailedError(
                    "the backlog of orders is one slice", found=slices, remedy="report it: two were due"
                )
            with self._phase("what waits in the first tier is tried again; the burst is accepted"):
                # Decided, or the backfill would take what the retry is to show.
                watch.until(watch.retried, "the retries")
            with self._phase(f"a backfill of {len(slices)} slices; the breaker closes, and its backlog completes"):
                self._backfill(ask, watch, slices)
                watch.until(lambda: burst.over and self._is_all_written and watch.caught_up(), "the end of the burst")
            self.figures.burst = burst.figures
            self.figures.runs = len(runs(ask, statuses=["SUCCESS"]))
            self.figures.lag = watch.lag()
        with self._phase("topic, tables and account are compared, record by record"):
            self.figures.ends = {stream: self._ends(stream) for stream in self.streams}
            comparisons = [self._compare(stream, target) for stream in STREAMS]
            if self.shipments:
                comparisons.append(compare_shipments(self.shipments.written, self.lake))
            burst.figures.ends = next(c.faults[BURST] for c in comparisons if c.stream == demo_burst.STREAM)
        self.figures.seconds = self.seconds
        return comparisons

    def _ends(self, stream: str) -> OriginEnds:
        """The ends of the origins as `highwater audit` counts them."""
        declared = {**load_streams(), SHIPMENTS.name: SHIPMENTS}
        return count_ends(Ledger(self._here.ledger_url), Lake(self._here.lake), declared[stream])

    @property
    def _here(self) -> settings.Settings:
        return settings.Settings.from_environment({settings.HOME: str(self.home)})

    def _backfill(self, ask: Ask, watch: _Watch, slices: Sequence[str]) -> None:
        began = time.monotonic()
        assets = [("orders", table) for table in STREAMS["orders"]]
        backfill = launch_backfill(ask, assets, slices, "demo: customers became known")
        watch.until(lambda: watch.backfill_done(backfill), "the backfill")
        self.figures.backfilled = tuple(slices)
        self.figures.backfill_seconds = time.monotonic() - began

    def _compare(self, stream: str, target: Target) -> Comparison:
        return reconcile(stream, bootstrap=target.bootstrap, lake=self.lake, home=self.home, all_retried=True)

    def _begin_writing(self, stack: Stack) -> None:
        """Create the topics, and write the backlog while Spark and the definitions start.

        Dagster's daemon starts after it: a planner that looks earlier cuts more slices, which take more runs.
        """
        target = Target(stack.bootstrap, self.home, self.lake)
        for stream in STREAMS:
            create_topic(target, stream, SOURCES[stream].partitions)
        burst = Order(seed=SEED, records=0, burst=demo_burst.RECORDS)
        self._generate(demo_burst.STREAM, target, burst)
        self._generate("orders", target, Order(seed=SEED, records=self._scaled(ORDERS)))
        if stack.registry:
            stack.registry.wait_ready()
            self.shipments = Shipments(target, stack.registry.url)
            self.figures.written.append(self.shipments.begin())

    def complete_shipments(self, materialised: Collection[str]) -> None:
        """Write the rest of the shipments once all tables have a slice, so the column is added to tables in use."""
        if self.shipments and not self.shipments.is_complete and materialised:
            self.figures.written.append(self.shipments.complete())

    @property
    def _is_all_written(self) -> bool:
        return self.shipments is None or self.shipments.is_complete

    def _scaled(self, records: int) -> int:
        return max(1, int(records * self.scale))

    def _generate(self, stream: str, target: Target, order: Order) -> None:
        self.figures.written.append(generate(SOURCES[stream], target, order))

    def _release_half(self) -> int:
        """Let every second late customer become known: the orders of the others must go on waiting."""
        account = Account(account_file(self.home, "orders"))
        try:
            known = account.unknown_customers()[::2]
            add_customers(self.lake, known)
            account.customers_known(known)
            return len(known)
        finally:
            account.close()

    @contextmanager
    def _phase(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self.console.print(f"[dim]{began - self._began:5.1f} s[/dim]  {what} ...")
        yield
        self.figures.phases.append((what, time.monotonic() - began))

    def _progress(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began


class _Watch:
    """Looks at Dagster, lake and topic until something holds, and shows how far it is."""

    def __init__(
        self,
        demo: Demo,
        stack: Stack,
        ask: Ask,
        instance: dg.DagsterInstance,
        target: Target,
        progress: Progress,
        burst: Burst,
    ) -> None:
        self._burst = burst
        self._demo = demo
        self._stack = stack
        self._ask = ask
        self._instance = instance
        self._target = target
        self._progress = progress
        self._streams = demo.streams
        self._tasks = {stream: progress.add_task(f"{stream}: slices x tables", total=None) for stream in self._streams}
        self._known: dict[tuple[str, str], SliceStates] = {}

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Look every few seconds.

        Raises:
            DemoFailedError: a run failed, or a part of the stack ended.
            TooSlowError: it did not hold in time.
        """
        while not self._look(holds):
            for line in self._stack.supervise():
                self._demo.console.print(line)
            self._ensure_no_run_failed()
            if self._demo.left() < 0:
                raise TooSlowError(
                    f"{what} did not come in time",
                    found=self._missing_slices(),
                    remedy="run it again with --deadline SECONDS",
                )
            time.sleep(POLL_SECONDS)

    def _look(self, holds: Callable[[], bool]) -> bool:
        self._known = read_slice_states(
            self._instance, [(stream, table) for stream, tables in self._streams.items() for table in tables]
        )
        for stream, task in self._tasks.items():
            states = [states for (name, _), states in self._known.items() if name == stream]
            total, done = sum(len(s.planned) for s in states), sum(len(s.materialised) for s in states)
            self._progress.update(task, total=total or None, completed=done)
        self._burst.look()
        if SHIPMENTS.name in self._streams:
            self._demo.complete_shipments(self.materialised(SHIPMENTS.name))
        return holds()

    def _ensure_no_run_failed(self) -> None:
        failed = [run for run in runs(self._ask, statuses=list(ENDED_BADLY)) if not run.will_retry]
        failed = [run for run in failed if not self._burst.refused(run.id)]
        if failed:
            raise _failed(failed, self._stack)

    def _missing_slices(self) -> str:
        missing = {"/".join(a): sorted(s.planned - s.materialised) for a, s in self._known.items()}
        missing_text = "; ".join(f"{asset} lacks {', '.join(keys)}" for asset, keys in missing.items() if keys)
        return missing_text or "every slice that is planned is materialised"

    def planned(self, stream: str) -> frozenset[str]:
        """The slices that Dagster knows."""
        return self._known[stream, "raw"].planned

    def materialised(self, stream: str) -> frozenset[str]:
        """The slices that all tables of the stream have."""
        known = [states.materialised for (name, _), states in self._known.items() if name == stream]
        return frozenset.intersection(*known)

    def slices(self, stream: str) -> list[str]:
        """The slices of the stream's main topic."""
        return sorted(key for key in self.planned(stream) if key.startswith(f"{stream}@"))

    def decided(self, stream: str) -> bool:
        """Whether a slice was split already, without the customers that become known only then."""
        return bool(self._known[stream, "events"].materialised)

    def retried(self) -> bool:
        """Whether everything that was sent to the first tier has come back through a slice, and is decided."""
        states = self._known["orders", "events"]
        decided = all(key in states.materialised for key in states.planned if key.startswith(f"{FIRST_TIER}@"))
        return decided and is_covered(self._target.bootstrap, self._demo.lake, "orders", FIRST_TIER)

    def taken(self, stream: str) -> bool:
        """Whether every offset of its topic is in a slice that all of its tables hold; of its tiers it says nothing."""
        slices = self.slices(stream)
        known = [states for (name, _), states in self._known.items() if name == stream]
        return all(states.materialised.issuperset(slices) for states in known) and self._covered(stream)

    def caught_up(self) -> bool:
        """Whether every offset of all topics is in a materialised slice, and no run changes the tables."""
        settled = all(states.planned and states.planned == states.materialised for states in self._known.values())
        return settled and all(self._covered(stream) for stream in self._streams) and not self._active()

    def _active(self) -> list[RunState]:
        """The runs that have not ended and write to the compared tables."""
        found = runs(self._ask, statuses=list(ACTIVE))
        return [run for run in found if run.tags.get(PURPOSE) != PUBLISH]

    def sent(self, stream: str) -> bool:
        """Whether the accepted events of every slice of the main topic were sent on."""
        [states] = read_slice_states(self._instance, [(stream, PUBLISHED)]).values()
        return states.materialised.issuperset(self.slices(stream))

    def _covered(self, stream: str) -> bool:
        return is_covered(self._target.bootstrap, self._demo.lake, stream)

    def lag(self) -> dict[str, int]:
        """Offsets of each topic that lie in no materialised slice."""
        return {
            stream: sum(end_offsets(self._target.bootstrap, stream).values())
            - sum(covered_ends(self._demo.lake, stream).values())
            for stream in self._streams
        }

    def backfill_done(self, backfill: str) -> bool:
        """Whether every run of the backfill succeeded."""
        state = backfill_state(self._ask, backfill)
        if state.failed:
            raise DemoFailedError(
                f"the backfill ended as {state.status}", found=state.error or state.runs, remedy=_where(self._stack)
            )
        return state.done


def _failed(failed: Sequence[RunState], stack: Stack) -> DemoFailedError:
    return DemoFailedError(
        f"{len(failed)} runs failed", found=", ".join(run.id for run in failed), remedy=_where(stack)
    )


def _where(stack: Stack) -> str:
    return "read " + ", ".join(str(log) for log in stack.logs())


def _asker(stack: Stack) -> Ask:
    dagster = stack.dagster
    assert dagster is not None
    return dagster.ask


def _open_instance(stack: Stack) -> dg.DagsterInstance:
    import dagster as dg

    return dg.DagsterInstance.from_config(stack.env[DAGSTER_HOME])


def without_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which nothing of ours is configured: the demonstration writes to nobody's broker or lake."""
    ours = (settings.SPARK_REMOTE, "DAGSTER_HOME")
    return {n: v for n, v in environment.items() if not n.startswith("HIGHWATER_") and n not in ours}


def fresh_home(home: Path) -> Path:
    """Empty the demonstration's folder.

    Raises:
        ConfigurationError: another demonstration runs in it.
    """
    busy = home / "stack.busy"
    if busy.exists():
        with busy.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(
                    f"another demonstration runs in {home}", remedy="wait for its end, or name another --home"
                ) from error
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: exit status 0 when the tables are right, 1 when something differs or failed, 130 after Ctrl-C."""
    from rich.console import Console

    options = _parser().parse_args(arguments)
    console = Console()

    def run() -> int:
        demo = Demo(fresh_home(options.home.absolute()), console, deadline=options.deadline, scale=options.scale)
        console.print(f"logs: {demo.home / 'logs'}")
        comparisons = demo.run()
        report(demo.console, demo.figures, comparisons, demo.home)
        differ = any(comparison.differences for comparison in comparisons)
        return 1 if differ or demo.figures.wrong else 0

    return exit_status(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.demo", description=__doc__)
    home = paths.home(os.environ) / "demo"
    parser.add_argument("--home", type=Path, default=home, help="emptied first; default: %(default)s")
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="seconds; default: %(default)s")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on the numbers of records; default: %(default)s"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
