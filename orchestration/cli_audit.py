"""The command `audit`.

What belongs here: arguments, output, exit status. What does not: what is gathered (`orchestration.audit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from highwater.errors import UnbalancedError
from orchestration.terminal import (
    Deployment,
    as_json_option,
    dagster_instance,
    deployment_of,
    print_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    import dagster as dg

    from highwater.declaration import Stream


@click.command()
@click.argument("streams", nargs=-1)
@click.option(
    "--records",
    "records_of",
    type=click.IntRange(min=0),
    default=0,
    help="Hold the records of the newest N slices too.",
)
@click.option("--versions", is_flag=True, help="Put the checks of versions to the whole stream too.")
@as_json_option
@deployment_of
def audit(
    deployment: Deployment,
    streams: Sequence[str],
    records_of: int,
    versions: bool,  # noqa: FBT001 - click's flags
    as_json: bool,  # noqa: FBT001
) -> None:
    """Account for every offset and origin of the named STREAMS or all, and hold their topics against the rules.

    With DAGSTER_HOME set it counts failing checks as well. With --records N it reads the newest N slices of each stream
    from Kafka once more and compares them with raw, record by record. With --versions it looks for versions that fall,
    contradict each other, or are missing, over all slices. Exit status 2 if something has to be mended.
    """
    from orchestration.audit import audit as gather

    declared = [deployment.stream(name) for name in streams] or list(deployment.streams().values())
    ledger, kafka, lake = deployment.ledger(), deployment.kafka(), deployment.lake()
    with dagster_instance() as instance:
        found = [
            gather(ledger, kafka, lake, stream, _red(instance, stream), records_of=records_of, versions=versions)
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
    errors = [f"{one.stream}: {error}" for one in found for error in one.errors]
    if errors:
        raise UnbalancedError(
            f"the audit found {len(errors)} errors",
            found=errors[0],
            remedy="the page above names each, with its remedy",
        )


def _red(instance: dg.DagsterInstance | None, stream: Stream) -> Mapping[str, int] | None:
    from orchestration.check_results import failing_checks

    return None if instance is None else failing_checks(instance, stream)
