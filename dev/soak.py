"""`make soak`: faulty records are written while processes are killed; then every record is accounted for."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING
from unittest.mock import patch

import dagster as dg
from confluent_kafka import KafkaException

from dev import paths
from dev.account import Account, Written, account_file
from dev.compare import Comparison
from dev.compare_versions import NUMBERS, OF_THE_DATA, compare_versions, wrong_versions
from dev.dagster_questions import read_slice_states
from dev.demo import STREAMS, TooSlowError, fresh_home, without_configuration
from dev.failing import failing
from dev.generator import SOURCES, Order, Target, create_topic, generate
from dev.kills import Killer, schedule
from dev.object_store import ObjectStore
from dev.postgresql import dagster_storage, dagster_variables, postgresql
from dev.processes import LOOPBACK, exit_status
from dev.readings import is_covered, read_rows
from dev.reconcile import reconcile
from dev.reconcile import report as report_comparison
from dev.shapes import SHAPES
from dev.stack import DAGSTER_HOME, Stack
from highwater import settings
from highwater.errors import TemporaryError
from highwater.orchestration.checking.checks import Sources
from highwater.orchestration.checking.origin_counts import count_ends, count_parked
from highwater.orchestration.checking.version_checks import check_stream_versions
from highwater.orchestration.reporting.publication_status import measure_publication_lag
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.stream_files import load_streams

if TYPE_CHECKING:
    from rich.console import Console

    from dev.failing import Failing
    from highwater.declaration import Stream

RECORDS, KILLS, SEED = 1_000_000, 100, 20_260_101
# Seconds between two kills.
MIN_SECONDS, MAX_SECONDS = 5.0, 30.0
# Most of the records are orders, which have more ways to fail.
SHARES = {"orders": 0.8, "payments": 0.2}
# Soon enough that the first tier's retry finds some of the late customers, and the second one's the others.
LATE_SECONDS = 20.0
SETTLE_SECONDS = 3600.0
POLL_SECONDS = 5.0
# Sensors look for alerts every three quarters of a minute.
ALERT_SECONDS = 120.0
# Records between two kills, about, below which a driver does not live long enough for the second compiler.
MANY_RECORDS = 200_000


@dataclass(frozen=True)
class Ordeal:
    """The request of a soak.

    Args:
        records: how many are written in all.
        kills: how many processes are killed meanwhile.
        seed: decides the records, and what is killed when.
        least: seconds between two kills, at the least.
        most: seconds between two kills, at the most.
        settle: seconds that the rest may take after the last kill.
    """

    records: int = RECORDS
    kills: int = KILLS
    seed: int = SEED
    least: float = MIN_SECONDS
    most: float = MAX_SECONDS
    settle: float = SETTLE_SECONDS

    @property
    def rate(self) -> float:
        """Records a second, so that writing lasts about as long as killing."""
        return self.records / max(1.0, self.kills * (self.least + self.most) / 2)

    @property
    def short_lived(self) -> bool:
        """Whether Spark is to start quickly rather than to run fast for hours."""
        return self.records / (self.kills + 1) < MANY_RECORDS


@dataclass
class SoakResult:
    """The result of the soak test: `wrong` is empty when every record is accounted for."""

    comparisons: list[Comparison] = field(default_factory=list)
    killed: Mapping[str, int] = field(default_factory=dict)
    slices: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def s3_and_postgresql(home: Path) -> Iterator[Mapping[str, str]]:
    """An S3 server for the lake and a PostgreSQL for ledger and Dagster.

    Args:
        home: gets the S3 server's log and Dagster's settings.

    Yields:
        The variables of the soak. This process has them too, since it reads the lake and Dagster's storage itself.
    """
    with ObjectStore(home) as store, postgresql("max_connections=300") as server, server.databases() as create:
        dagster_home = home / "dagster"
        dagster_home.mkdir(parents=True)
        text = (paths.REPOSITORY / "dagster.yaml").read_text()
        (dagster_home / "dagster.yaml").write_text(dagster_storage(text, server.port))
        variables = {
            **store.variables,
            **dagster_variables(create()),
            settings.LAKE: f"{store.make_bucket('soak')}/lake",
            settings.LEDGER_URL: server.url(create()),
            DAGSTER_HOME: str(dagster_home),
        }
        with patch.dict(os.environ, variables):
            yield variables


@contextmanager
def no_services(_home: Path) -> Iterator[Mapping[str, str]]:
    """Lake, ledger and Dagster's storage in files of the home."""
    yield {}


class Soak:
    """One soak in a home of its own.

    Args:
        home: a fresh folder for all state.
        console: where progress and report go.
        ordeal: the size of the test and its faults.
        variables: what is configured in place of files in the home.
    """

    def __init__(
        self, home: Path, console: Console, ordeal: Ordeal, variables: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.console = console
        self.ordeal = ordeal
        self._variables = dict(variables or {})
        self._settings = settings.Settings.from_environment({**self._variables, settings.HOME: str(home)})
        self.lake = self._settings.lake
        # Opened where it is first asked.
        self._ledger = Ledger(self._settings.ledger_url)
        self._stop = Event()
        self._began = time.monotonic()

    def run(self) -> SoakResult:
        """Write and kill, wait for the rest, compare.

        Raises:
            TooSlowError: not everything was settled in time.
        """
        with ExitStack() as ending:
            # It takes connections and never answers: alerts are no reason for anything else to wait.
            deaf = ending.enter_context(socket.create_server((LOOPBACK, 0)))
            stack = Stack(
                self.home,
                base=without_configuration(os.environ) | self._variables,
                extra={settings.ALERTS_URL: f"http://{LOOPBACK}:{deaf.getsockname()[1]}/"},
                short_lived=self.ordeal.short_lived,
                on_broker=self._create_topics,
            )
            ending.enter_context(stack)
            ending.callback(self._stop.set)
            # Its client would report each connection that the killed broker refuses.
            target = Target(stack.bootstrap, self.home, self.lake, {"log_level": "0"})
            writers = [self._writer(stream, target) for stream in STREAMS]
            killer = Killer(stack, self._report)
            killer.run(schedule(self.ordeal.seed, self.ordeal.kills, self.ordeal.least, self.ordeal.most), self._stop)
            for writer in writers:
                writer.join()
            self._report("everything is written and killed; the rest is waited for")
            self._settle(stack, killer)
            # The daemon that sends alerts is stopped for the comparison.
            due = self._alerts_due()
            alerted = not due or _is_called(deaf, ALERT_SECONDS)
            result = self._compare(stack, {str(victim): count for victim, count in killer.done.items()})
            if not alerted:
                result.wrong.append(f"no alert was sent within {ALERT_SECONDS:.0f} s of the last slice: {due}")
            return result

    def _create_topics(self, stack: Stack) -> None:
        for stream in STREAMS:
            create_topic(Target(stack.bootstrap, self.home, self.lake), stream, SOURCES[stream].partitions)

    def _writer(self, stream: str, target: Target) -> Thread:
        thread = Thread(target=self._write, args=(stream, target), daemon=True)
        thread.start()
        return thread

    def _write(self, stream: str, target: Target) -> None:
        """Write a stream's share; a generator that gives up as its broker is killed is started again for the rest."""
        wanted, rate = (int(share * SHARES[stream]) for share in (self.ordeal.records, self.ordeal.rate))
        tries = 0
        while (left := wanted - len(self._written(stream))) > 0 and not self._stop.is_set():
            order = Order(self.ordeal.seed + tries, left, max(1.0, rate), late_after=LATE_SECONDS)
            tries += 1
            try:
                generate(SOURCES[stream], target, order, self._stop)
            except (TemporaryError, KafkaException) as error:
                self._report(f"the generator of {stream} starts again: {str(error).splitlines()[0]}")
                self._stop.wait(1.0)

    def _written(self, stream: str) -> Sequence[Written]:
        """The account of a stream so far."""
        file = account_file(self.home, stream)
        if not file.exists():
            return []
        account = Account(file)
        try:
            return account.written(stream)
        finally:
            account.close()

    def _settle(self, stack: Stack, killer: Killer) -> None:
        """Wait until every offset of the main topics is in a slice that is in all tables, and events are sent."""
        deadline, reported = time.monotonic() + self.ordeal.settle, -1
        with dg.DagsterInstance.from_config(stack.env["DAGSTER_HOME"]) as instance:
            while left := self._left(instance, stack.bootstrap):
                killer.supervise()
                self._release()
                if time.monotonic() > deadline:
                    raise TooSlowError(
                        "not everything was settled in time", found="; ".join(left), remedy=f"read {self.home / 'logs'}"
                    )
                if len(left) != reported:
                    reported = len(left)
                    self._report(f"{reported} things are left, {left[0]} among them")
                time.sleep(POLL_SECONDS)

    def _left(self, instance: dg.DagsterInstance, bootstrap: str) -> list[str]:
        """The work that is not done yet, of the slices that were planned and of the topics."""
        tables = [(stream, table) for stream, tables in STREAMS.items() for table in tables]
        lacking = {
            key: None for states in read_slice_states(instance, tables).values() for key in sorted(states.missing)
        }
        unread = [stream for stream in STREAMS if not is_covered(bootstrap, self.lake, stream)]
        return [*lacking, *unread, *([] if lacking or unread else self._unsent())]

    def _release(self) -> None:
        """Do what a person does who sees that slices were exhausted because their workers were killed that often."""
        exhausted = self._ledger.exhausted_slices
        for one in [one for stream in STREAMS for one in exhausted.read_open(stream)]:
            exhausted.release(one.slice_key, by="soak", because="its workers were killed", now=datetime.now(UTC))
            self._report(f"{one.text}: let go on")

    def _unsent(self) -> list[str]:
        """The events that wait to be sent to the topics of accepted events."""
        lake = Lake(self.lake)
        found = [measure_publication_lag(self._ledger, lake, load_streams()[stream]) for stream in STREAMS]
        return [one.line for one in found if one is not None and one.waits]

    def _alerts_due(self) -> str:
        """The streams with more parked records than they allow, for which an alert is certain; empty if none has."""
        lake, streams = Lake(self.lake), [load_streams()[name] for name in STREAMS]
        parked = {stream.name: count_parked(self._ledger, lake, stream) for stream in streams}
        return ", ".join(
            f"{stream.name} has {parked[stream.name]:,} parked records"
            for stream in streams
            if parked[stream.name] > stream.alerts.parked
        )

    def _compare(self, stack: Stack, killed: Mapping[str, int]) -> SoakResult:
        """Hold topics, tables and account against each other, once nothing moves any more."""
        dagster = stack.dagster
        assert dagster is not None
        dagster.daemon.stop()
        result = SoakResult(killed=killed)
        lake, kafka = Lake(self.lake), Kafka(stack.bootstrap)
        for stream in STREAMS:
            self._report(f"topic, tables and account of {stream} are compared, record by record")
            comparison = reconcile(stream, bootstrap=stack.bootstrap, lake=self.lake, home=self.home, all_sent=True)
            result.comparisons.append(comparison)
            written, wanted = self._written(stream), int(self.ordeal.records * SHARES[stream])
            if len(written) < wanted:
                result.wrong.append(f"{stream}: {len(written):,} of {wanted:,} records were written")
            result.slices += comparison.numbers["slices"]
            if comparison.differences:
                result.wrong.append(f"{stream}: differences")
            declared = load_streams()[stream]
            if error := count_ends(self._ledger, lake, declared).error:
                result.wrong.append(f"{stream}: {error}")
            red = [*failing(Sources(self._ledger, kafka, lake), declared)]
            result.wrong += [f"{stream}: {one}" for one in red if one.check not in OF_THE_DATA]
            result.wrong += [f"{stream}: {one}" for one in _alarms(lake, declared, written, red)]
        result.seconds = time.monotonic() - self._began
        return result

    def _report(self, what: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._began:6.0f} s[/dim]  {what}")


def _is_called(listener: socket.socket, seconds: float) -> bool:
    """Whether anybody connects within this time, or has connected before."""
    listener.settimeout(seconds)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return False
    connection.close()
    return True


def _alarms(lake: Lake, stream: Stream, account: Sequence[Written], red: Sequence[Failing]) -> list[str]:
    """Checks of the producers' records that report too much or too little: the generator's faults are theirs."""
    written = {(one.entity, one.version) for one in account if one.visible is not False}
    events = read_rows(lake.build_table_path(stream.name, "events"))
    fields = [*SHAPES[stream.name].types]
    expected = wrong_versions(events, fields, stream.transitions, stream.first_version, written)
    over_all = check_stream_versions(lake, stream)
    counts = {check: over_all[check].numbers[name] for check, name in NUMBERS.items() if check in over_all}
    failed = {check: [one.slice_key for one in red if one.check == check] for check in OF_THE_DATA}
    return compare_versions(expected, counts, failed)


def report(console: Console, ordeal: Ordeal, result: SoakResult) -> None:
    """The report."""
    console.print()
    for comparison in result.comparisons:
        report_comparison(comparison, console)
    killed = ", ".join(f"{count} x {victim}" for victim, count in sorted(result.killed.items()))
    console.print(f"seed {ordeal.seed}: {ordeal.records:,} records, {result.slices} slices, {result.seconds:.0f} s")
    console.print(f"killed: {killed or 'nothing'}")
    for wrong in result.wrong:
        console.print(f"[red]wrong: {wrong}[/red]", markup=True)
    if not result.wrong:
        console.print("[green]every record is accounted for, and the checks agree[/green]")


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: exit status 0 when every record is accounted for, 1 when not, 130 after Ctrl-C."""
    from rich.console import Console

    options = _parser().parse_args(arguments)
    console = Console()
    ordeal = Ordeal(options.records, options.kills, options.seed, options.least, options.most, settle=options.settle)

    def run() -> int:
        home = fresh_home(options.home.absolute())
        services = s3_and_postgresql if options.s3_and_postgresql else no_services
        with services(home) as variables:
            console.print(f"seed {ordeal.seed}; logs: {home / 'logs'}")
            result = Soak(home, console, ordeal, variables).run()
            report(console, ordeal, result)
        return 1 if result.wrong else 0

    return exit_status(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.soak", description=__doc__)
    home = paths.home(os.environ) / "soak"
    parser.add_argument("--home", type=Path, default=home, help="emptied first; default: %(default)s")
    parser.add_argument("--records", type=int, default=RECORDS, help="of all streams; default: %(default)s")
    parser.add_argument("--kills", type=int, default=KILLS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--least", type=float, default=MIN_SECONDS, help="seconds between kills; default: %(default)s")
    parser.add_argument("--most", type=float, default=MAX_SECONDS, help="seconds between kills; default: %(default)s")
    parser.add_argument(
        "--s3-and-postgresql", action="store_true", help="the lake on an S3 server, ledger and Dagster on PostgreSQL"
    )
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="seconds; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
