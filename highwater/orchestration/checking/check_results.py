"""Checks that fail now, with the number of their slices, by Dagster's own records."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from highwater.declaration import Severity

if TYPE_CHECKING:
    import dagster as dg

    from highwater.declaration import Stream

# Executions of a check that are read from Dagster at once.
CHECKS_PER_PAGE = 1_000


def count_failing_slices(instance: dg.DagsterInstance, stream: Stream) -> dict[str, int]:
    """For each check whose last execution found an error in some slices their number; warnings do not count."""
    keys = _select_error_keys(stream)
    found = instance.event_log_storage.get_asset_check_partition_info(keys)
    failed: dict[dg.AssetCheckKey, set[str | None]] = {}
    for info in found:
        if info.latest_execution_status.value == "FAILED":
            failed.setdefault(info.check_key, set()).add(info.partition_key)
    counts = {key.name: len(slices - load_warned_slices(instance, key, slices)) for key, slices in failed.items()}
    return {name: count for name, count in counts.items() if count}


def load_warned_slices(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey, slices: Collection[str | None]
) -> set[str | None]:
    """The slices in which the check failed and its last execution gave a warning only."""
    import dagster as dg
    from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

    looked_at: set[str | None] = set()
    mild: set[str | None] = set()
    cursor = None
    while looked_at != set(slices):
        page = instance.event_log_storage.get_asset_check_execution_history(
            key, limit=CHECKS_PER_PAGE, cursor=cursor, status={AssetCheckExecutionRecordStatus.FAILED}
        )
        for record in page:
            if record.partition in slices and record.partition not in looked_at:
                looked_at.add(record.partition)
                if record.evaluation and record.evaluation.severity is dg.AssetCheckSeverity.WARN:
                    mild.add(record.partition)
        if len(page) < CHECKS_PER_PAGE:
            break
        cursor = page[-1].id
    return mild


def select_error_checks(stream: Stream) -> list[str]:
    """The names of the checks that do more than warn."""
    return [key.name for key in _select_error_keys(stream)]


def _select_error_keys(stream: Stream) -> list[dg.AssetCheckKey]:
    return [key for key in check_keys(stream) if stream.find_severity(key.name) is not Severity.WARN]


def check_keys(stream: Stream) -> list[dg.AssetCheckKey]:
    """The keys of a stream's checks."""
    import dagster as dg

    from highwater.orchestration.asset_keys import build_table_key
    from highwater.orchestration.checking.checks import CHECKS

    return [
        dg.AssetCheckKey(build_table_key(stream, checks.table), name)
        for checks in CHECKS
        for name in checks.select_names(stream)
    ]
