"""The command `rebuild-ledger`.

What belongs here: arguments and output. What does not: what is done (`orchestration.rebuilding`).
"""

from __future__ import annotations

import click

from orchestration.terminal import Deployment, as_json_option, dagster_instance, deployment_of, print_json, print_lines


@click.command("rebuild-ledger")
@click.argument("stream")
@click.option("--yes", "sure", is_flag=True, help="Write it. Without it only what would be written is shown.")
@as_json_option
@deployment_of
def rebuild_ledger(
    deployment: Deployment,
    stream: str,
    sure: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Rebuild the plans of STREAM from the lake, into a ledger that holds none of it.

    For a ledger that was lost. Set DAGSTER_HOME, so that no key that Dagster knows is given to another slice.
    """
    from orchestration.rebuilding import act

    declared = deployment.stream(stream)
    with dagster_instance() as instance:
        known = [] if instance is None else instance.get_dynamic_partitions(declared.partitions_name)
    lines: list[str] = []
    ledger, lake, kafka = deployment.ledger(), deployment.lake(), deployment.kafka()
    found = act(ledger, lake, kafka, declared, known, lines.append, sure=sure)
    if as_json:
        plain = {"stream": stream, "written": sure, "slices": [piece.key for piece in found.slices], "lines": lines}
        print_json({**plain, "unread": [*found.unread]})
    else:
        print_lines(lines)
