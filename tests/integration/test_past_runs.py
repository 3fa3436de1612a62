"""What Dagster remembers of a stream's runs, however many runs others have."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

import dagster as dg
import pytest

from highwater.orchestration.asset_keys import PUBLISHED, build_table_key
from highwater.orchestration.run_tags import PARTITION, PUBLISH, PURPOSE, STREAM_TAG
from highwater.orchestration.sensing import run_history
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
KEYS = [f"orders@{n:07}" for n in range(4)]
NAMED = {STREAM_TAG: "orders"}
OTHERS = {STREAM_TAG: "payments"}


def add(
    instance: dg.DagsterInstance, tags: dict[str, str], job: str = "orders_slice", tables: Collection[str] = ()
) -> str:
    chosen = frozenset(build_table_key(STREAM, table) for table in tables) or None
    run = dg.DagsterRun(job, tags=tags, asset_selection=chosen, status=dg.DagsterRunStatus.FAILURE)
    return instance.add_run(run).run_id


@pytest.mark.parametrize("others", [0, 5], ids=["few runs", "many runs"])
def test_runs_of_other_streams_hide_none(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many streams the failures of the last hour fell out: the waits began again, and no slice was exhausted."""
    monkeypatch.setattr(run_history, "RECORDS", 2)
    monkeypatch.setattr(run_history, "ENDED_RECORDS", 2)
    with dg.DagsterInstance.ephemeral() as instance:
        taken = {add(instance, {**NAMED, PARTITION: key}) for key in KEYS[:3]}
        taken.add(add(instance, {PARTITION: KEYS[3]}, "__ASSET_JOB", ["raw"]))  # from the page of the assets
        sent = {
            add(instance, {**NAMED, PURPOSE: PUBLISH, PARTITION: KEYS[0]}, "orders_publish"),
            add(instance, {PARTITION: KEYS[1]}, "__ASSET_JOB", [PUBLISHED.name]),
        }
        for _ in range(others):
            add(instance, {**OTHERS, PARTITION: KEYS[0]}, "payments_slice")
        now = datetime.now(UTC)
        found = run_history.read_past_runs(instance, STREAM, KEYS, now)
        assert sorted(run.run_id for run in found) == sorted(taken)
        assert {key for run in found for key in run.keys} == {*KEYS}
        publishing = run_history.read_publishing_runs(instance, STREAM, KEYS, now)
        assert sorted(run.run_id for run in publishing) == sorted(sent)
