"""The commands `ledger upgrade`, `ledger backup`, `ledger restore` and `ledger verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from highwater.errors import LedgerDiffersError
from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_lines
from highwater.orchestration.deployment import Deployment


@click.group("ledger")
def ledger() -> None:
    """Upgrade the ledger's schema, copy the ledger, or compare it with the lake."""


@ledger.command("upgrade")
@as_json_option
@deployment_of
def upgrade(deployment: Deployment, *, as_json: bool) -> None:
    """Bring the ledger's schema to the revision of this Highwater, in one transaction.

    Make a backup first. An empty database gets its tables. A schema that is up to date stays as it is.
    """
    from highwater.resources.ledger import creation, revisions

    database = deployment.open_ledger().database
    applied = creation.upgrade(database.unchecked, database.wait_seconds)
    if as_json:
        print_json({"applied": [one.number for one in applied], "revision": revisions.get_code_revision()})
        return
    names = ", ".join(f"{one.number}{' (additive)' if one.additive else ''}" for one in applied)
    print_lines(
        [
            f"applied schema revision {names}"
            if applied
            else f"schema revision {revisions.get_code_revision()} is in place"
        ]
    )


@ledger.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
@deployment_of
def backup(deployment: Deployment, *, file: Path, as_json: bool) -> None:
    """Copy the ledger into FILE, a SQLite database, as it is at one moment; runs and sensors go on."""
    from highwater.resources.ledger.backup import back_up

    _show(back_up(deployment.open_ledger().database, file), "written", as_json=as_json)


@ledger.command("restore")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
@deployment_of
def restore(deployment: Deployment, *, file: Path, as_json: bool) -> None:
    """Copy the backup FILE into the ledger's database, which must hold no rows.

    Stop the sensors first. Then verify: what was planned or committed since the backup is missing in it.
    """
    from highwater.resources.ledger.backup import restore as restore_backup

    _show(restore_backup(file, deployment.open_ledger().database), "restored", as_json=as_json)


@ledger.command("verify")
@click.argument("streams", nargs=-1)
@as_json_option
@deployment_of
def verify(deployment: Deployment, *, streams: Sequence[str], as_json: bool) -> None:
    """Compare the ledger with its schema, and with the commits in the lake of the named STREAMS or all.

    Exit status 2 if something differs.
    """
    from highwater.orchestration.checking.ledger_comparison import compare
    from highwater.resources.ledger.backup import list_problems

    declared = [deployment.find_stream(name) for name in streams] or list(deployment.list_streams().values())
    opened, lake = deployment.open_ledger(), deployment.open_lake()
    found = {"schema": list_problems(opened.database)}
    if not found["schema"]:
        found |= {one.name: compare(opened, lake, one) for one in declared}
    if as_json:
        print_json(found)
    else:
        print_lines([f"{name}: {line}" for name, lines in found.items() for line in lines or ["as it should be"]])
    if any(found.values()):
        raise LedgerDiffersError(
            "the ledger differs from its schema or from the lake", remedy="each line above names its remedy"
        )


def _show(rows: Mapping[str, int], done: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"rows": dict(rows)})
        return
    filled = [f"{count:,} rows of {name}" for name, count in rows.items() if count]
    print_lines([f"{done}: {sum(rows.values()):,} rows", *filled])
