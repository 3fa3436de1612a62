"""The command `erase`."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import click

from highwater.errors import TemporaryError
from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    as_json_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_needed_options,
    print_result,
)
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment


@click.command("erase", cls=OperatorCommand)
@click.argument("stream")
@click.option("--key", help="The key, as text in UTF-8. It stays in your shell's history: see --digest.")
@click.option("--digest", help="SHA-256 of the key's bytes in hexadecimal, instead of the key.")
@click.option("--because", default="", help="Why; goes into the record. Needed with --yes.")
@by_option
@dry_run_option
@as_json_option
@deployment_of
def erase(
    deployment: Deployment,
    *,
    stream: str,
    key: str | None,
    digest: str | None,
    because: str,
    by: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove all records of one key from all tables of STREAM. The ledger records your name and the reason.

    The ledger keeps a digest of the key, so that no slice that is read again, and no retry, brings them back. Needs
    Spark with --yes, as runs do.
    """
    from highwater.erasing import compute_digest
    from highwater.orchestration.operations.erasing import ErasureRequest, erase_key
    from highwater.orchestration.resources import use_session

    if (key is None) == (digest is None):
        raise click.UsageError("give either --key or --digest")
    if not (key or digest):
        raise click.UsageError("the key is empty")
    request = ErasureRequest(digest or "" if key is None else compute_digest(key.encode()), dry_run, by, because)
    request.check_complete()
    declared = deployment.find_stream(stream)
    lines: list[str] = []
    session: Any = nullcontext(None) if dry_run else use_session(deployment.settings)
    with session as spark, dagster_instance() as instance:
        found = erase_key(deployment.open_work(declared, spark, lines.append), instance, request, datetime.now(UTC))
    plain = {"stream": stream, "done": not dry_run, "digest": request.digest}
    plain |= {"rows": {name: dict(counts) for name, counts in found.rows.items()}}
    plain |= {"erased": [*found.done], "later": dict(found.later)}
    print_result(plain, lines, as_json=as_json, table=found.table)
    print_needed_options("--yes --by NAME --because TEXT", dry_run=dry_run, as_json=as_json)
    if not dry_run and found.later:
        raise TemporaryError(
            "the key is not erased everywhere yet",
            found=", ".join(f"{slice_key}: {why}" for slice_key, why in found.later.items()),
            remedy="run the same command again when they are done",
        )
