"""The command `audit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_lines, print_table
from highwater.orchestration.dagster_home import ask_instance, dagster_instance
from highwater.orchestration.deployment import Deployment
from highwater.producer_rules import Client

if TYPE_CHECKING:
    from highwater.producer_rules import ProducerFacts


@click.command()
@click.argument("streams", nargs=-1)
@click.option(
    "--slices",
    "newest",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also compare the records of the newest N slices with Kafka.",
)
@click.option("--versions", is_flag=True, help="Also check versions over the whole stream.")
@click.option(
    "--keys", is_flag=True, help="List keys that are in several partitions, and the partitioner that put them there."
)
@click.option(
    "--producer",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Check a producer's configuration in this file (Java properties or JSON); repeatable.",
)
@click.option(
    "--client",
    type=click.Choice([client.name.lower() for client in Client]),
    help="The client that --producer is for, where its names do not show it.",
)
@click.option("--client-version", help="The version of that client; defaults depend on it.")
@as_json_option
@deployment_of
def audit(
    deployment: Deployment,
    *,
    streams: Sequence[str],
    newest: int,
    versions: bool,
    keys: bool,
    files: Sequence[Path],
    client: str | None,
    client_version: str | None,
    as_json: bool,
) -> None:
    """Account for every offset and origin of the named STREAMS or all, and check their topics by the rules.

    With DAGSTER_HOME set it counts failing checks as well. With --slices N it reads the newest N slices of each stream
    from Kafka again and compares them with raw, record by record. With --versions it looks for versions that fall,
    contradict each other, or are missing, over all slices. With --keys it shows keys in several partitions, and
    whether producers hash differently. Exit status 2 if a fault needs a person, 75 if only a service is unavailable.
    """
    from highwater.orchestration.checking.check_results import count_failing_slices
    from highwater.orchestration.reporting.audit import audit as audit_stream
    from highwater.orchestration.reporting.audit import find_audit_error

    declared = [deployment.find_stream(name) for name in streams] or list(deployment.list_streams().values())
    ledger, kafka, lake = deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake()
    if (client or client_version) and not files:
        raise click.UsageError("--client and --client-version say what a --producer FILE is of; give the file")
    others = [_read_producer_file(file, client, client_version) for file in files]
    failing_checks, dagster_error = ask_instance(
        dagster_instance, lambda instance: {one.name: count_failing_slices(instance, one) for one in declared}
    )
    found = [
        audit_stream(
            ledger,
            kafka,
            lake,
            stream,
            None if failing_checks is None else failing_checks[stream.name],
            records_of=newest,
            versions=versions,
            keys=keys,
            others=others,
            dagster_error=dagster_error,
        )
        for stream in declared
    ]
    if as_json:
        print_json([one.to_plain() for one in found])
    else:
        for one in found:
            print_lines(one.head)
            for title, names, rows in one.tables:
                if rows:
                    print_lines(["", title])
                    print_table(names, rows)
            print_lines([""])
    if (error := find_audit_error(found, "the page above names each, with its remedy")) is not None:
        raise error


def _read_producer_file(file: Path, client: str | None, version: str | None) -> ProducerFacts:
    from highwater.producer_files import parse_producer_facts, parse_version

    known = None if client is None else Client[client.upper()]
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file.name} is not text in UTF-8", remedy="give Java properties or JSON") from error
    return parse_producer_facts(file.name, text, known, None if version is None else parse_version(version))
