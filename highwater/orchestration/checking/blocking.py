"""Checks that block, from one run to the next."""

# Dagster's blocking ends with the run. A run that begins further down, of a backfill or of repair, would commit what
# a check blocked in the run before.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

from highwater.declaration import Severity
from highwater.errors import BlockedError
from highwater.orchestration.asset_keys import BY_NAME, build_table_key
from highwater.orchestration.checking.check_results import load_warned_slices
from highwater.orchestration.checking.checks import CHECKS

if TYPE_CHECKING:
    from dagster._core.storage.asset_check_execution_record import AssetCheckPartitionInfo

    from highwater.declaration import Stream


def ensure_not_blocked(instance: dg.DagsterInstance, stream: Stream, table: str, keys: Sequence[str]) -> None:
    """Ensure that no blocking check failed for the current rows of these slices upstream of a table.

    Raises:
        BlockedError: one did.
    """
    blocking = _select_blocking_checks(stream, table)
    if not blocking:
        return
    found = instance.event_log_storage.get_asset_check_partition_info(blocking, partition_keys=keys)
    failed = [
        info
        for info in found
        if info.latest_execution_status.value == "FAILED"
        and _is_up_to_date(info)
        # Within a run Dagster lets a warning pass, whatever the check.
        and not load_warned_slices(instance, info.check_key, {info.partition_key})
    ]
    if failed:
        failures = sorted({f"{info.check_key.name} of {info.partition_key}" for info in failed})
        raise BlockedError(
            f"{stream.name}/{table} is not committed: a check that blocks failed above it",
            found=", ".join(failures),
            remedy=(
                "read what the check says, and fix what it names; or declare another severity of it in "
                "assets/streams/, and request the slices again"
            ),
        )


def _is_up_to_date(info: AssetCheckPartitionInfo) -> bool:
    """Whether the table was not materialised again since: what was reprocessed is not covered by an older check."""
    materialised = info.latest_materialization_storage_id
    return materialised is None or info.latest_check_event_storage_id > materialised


def _select_blocking_checks(stream: Stream, table: str) -> list[dg.AssetCheckKey]:
    above = _select_upstream_tables(table)
    return [
        dg.AssetCheckKey(build_table_key(stream, checks.table), name)
        for checks in CHECKS
        if checks.table in above
        for name in checks.select_names(stream)
        if stream.find_severity(name) is Severity.BLOCK
    ]


def _select_upstream_tables(table: str) -> set[str]:
    """The tables that a table is made from, however many lie in between."""
    direct = BY_NAME[table].above if table in BY_NAME else ()
    return set(direct).union(*(_select_upstream_tables(name) for name in direct))
