"""Reads topic, tables and account, holds them against each other, and reports: `python -m dev.reconcile --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dev import paths
from dev.account import Account, account_file
from dev.compare import Comparison, compare
from dev.readings import read_tables, read_topic, read_topics
from dev.shapes import SHAPES
from highwater.errors import ConfigurationError, HighwaterError
from highwater.settings import HOME, Settings

if TYPE_CHECKING:
    from rich.console import Console


def reconcile(
    stream: str,
    *,
    bootstrap: str,
    lake: str,
    home: Path,
    config: Mapping[str, str] | None = None,
    topic: str | None = None,
    all_retried: bool = False,
    all_sent: bool = False,
) -> Comparison:
    """Read everything of a stream and compare it.

    Args:
        stream: `orders` or `payments`.
        bootstrap: the brokers.
        lake: root of the lake, as delta-rs opens it.
        home: folder of the generator's account.
        config: further properties of the Kafka client, secrets included.
        topic: the topic, where it is not named after the stream.
        all_retried: see `dev.compare.compare`.
        all_sent: see `dev.compare.compare`.

    Raises:
        ConfigurationError: there is no account.
        DependencyUnavailableError: the brokers do not answer.
    """
    file = account_file(home, stream)
    if not file.exists():
        raise ConfigurationError(
            f"there is no account of {stream}",
            found=str(file),
            remedy="run `python -m dev.generator` with the same --home",
        )
    name = topic or stream
    account = Account(file)
    try:
        written = account.written(name)
    finally:
        account.close()
    shape = SHAPES[stream]
    held = read_topic(bootstrap, name, config)
    dlq = read_topics(bootstrap, shape.dlq_topics(name), config)
    accepted = read_topics(bootstrap, [shape.accepted], config).get(shape.accepted) if shape.accepted else None
    return compare(
        shape,
        written,
        held,
        read_tables(lake, stream),
        dlq=dlq,
        accepted=accepted,
        all_retried=all_retried,
        all_sent=all_sent,
        main_topic=name,
    )


def report(comparison: Comparison, console: Console) -> None:
    """Report to a person what was compared, where the faults ended, and what differs."""
    from rich.markup import escape
    from rich.table import Table

    numbers = ", ".join(f"{value:,} {name}" for name, value in comparison.numbers.items())
    console.print(f"[bold]{comparison.stream}[/bold]: {numbers}")
    table = Table("fault", "ended as", title_justify="left")
    for fault, ends in sorted(comparison.faults.items()):
        table.add_row(fault, ", ".join(f"{count:,} {end}" for end, count in ends.most_common()))
    if comparison.numbers["aborted records"]:
        table.add_row("aborted_transaction", f"{comparison.numbers['aborted records']:,} nowhere")
    if table.rows:
        console.print(table)
    if not comparison.differences:
        console.print(f"[green]no difference[/green]: {comparison.stream} is equal to its account, record by record\n")
        return
    wrong = Table("difference", "count", "for example", title=f"{comparison.stream}: differences")
    for kind, count in comparison.differences.counts.most_common():
        wrong.add_row(escape(kind), f"{count:,}", escape("\n".join(comparison.differences.samples[kind])))
    console.print(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: exit status 0 when all is equal, 1 when something differs, 2 when it could not be read."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m dev.reconcile", description=__doc__)
    parser.add_argument("--stream", choices=sorted(SHAPES), action="append", help="default: those with an account")
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="default: HIGHWATER_KAFKA_BOOTSTRAP")
    parser.add_argument("--topic", help="default: the stream's name")
    parser.add_argument("--home", type=Path, default=paths.home(os.environ), help="default: %(default)s")
    options = parser.parse_args(arguments)
    settings = Settings.from_environment({**os.environ, HOME: str(options.home)})
    streams = options.stream or [name for name in sorted(SHAPES) if account_file(settings.home, name).exists()]
    console = Console()
    try:
        found = [
            reconcile(
                stream,
                bootstrap=options.bootstrap or settings.kafka_bootstrap,
                lake=settings.lake,
                home=settings.home,
                config=settings.kafka_config,
                topic=options.topic,
            )
            for stream in streams
        ]
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for comparison in found:
        report(comparison, console)
    return 1 if any(comparison.differences for comparison in found) else 0


if __name__ == "__main__":
    sys.exit(main())
