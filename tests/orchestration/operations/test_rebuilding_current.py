"""`current` computed again from the events: exact, whatever became of it, and while runs go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.assets import current, raw
from highwater.assets.current_rebuild import RebuildSnapshot, compare_with_events, rebuild
from highwater.commit_records import CommitRecord
from highwater.errors import ConfigurationError
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.resources.commit_log import TableSlices
from highwater.slice_commits import SliceCommit
from tests.helpers.commits import commit_current
from tests.helpers.support import Bench, customers, order_message
from tests.helpers.written_tables import slice_of

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

EXPECTED = {"o0": 3, "o1": 3, "o2": 2, "o3": 2}


def decided(*ordinals: int, attempt: int = 1) -> dict[str, SliceCommit]:
    slices = [slice_of(ordinal, {0: (ordinal, ordinal + 1)}) for ordinal in ordinals]
    return {slice_.key: SliceCommit(slice_, attempt, 1) for slice_ in slices}


def keys(*ordinals: int) -> list[str]:
    return [f"orders@{ordinal:07d}" for ordinal in ordinals]


def test_a_look_names_what_is_behind_and_what_events_lack() -> None:
    held = {key: CommitRecord(key, 7 if key == keys(2)[0] else 1, 1, "b") for key in keys(0, 1, 2, 9)}
    look = RebuildSnapshot(0, decided(0, 1, 2, 3, 4), TableSlices(held, 5))
    assert look.behind == keys(2, 3, 4), "another attempt, or not there"
    assert look.unknown == keys(9)


def versions(bench: Bench) -> dict[str, int]:
    return {key: row["version"] for key, row in bench.current().items()}


@pytest.fixture
def merged(bench: Bench) -> Bench:
    """Versions of four orders in five slices, by two runs."""
    bench.send(*[order_message(f"o{n % 4}", n // 4 + 1) for n in range(10)])
    slices = [bench.plan(ordinal, p0=(2 * ordinal, 2 * ordinal + 2)) for ordinal in range(5)]
    bench.materialise(*slices[:3])
    bench.materialise(*slices[3:])
    assert versions(bench) == EXPECTED
    return bench


@pytest.mark.slow
def test_whatever_became_of_current_it_is_what_the_events_say(
    merged: Bench, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, work = merged, merged.work()
    assert compare_with_events(work, RebuildSnapshot.take(work)).none
    table = bench.lake.open_stream_table(bench.stream.name, "current")
    assert table is not None
    table.delete("key = 'o0'")
    table.update(predicate="key = 'o1'", updates={"version": "9"})
    table.update(predicate="key = 'o2'", updates={"updated_by_slice": "'unknown'"})
    never_planned = f"{bench.stream.topic}@0000009"
    commit_current(bench.lake, bench.stream.name, {never_planned: 1}, table.to_pyarrow_table().slice(0, 0))
    found = compare_with_events(work, RebuildSnapshot.take(work))
    assert (found.lacking, found.wrong) == (3, 2)
    assert (found.behind, found.unknown) == ([], [never_planned])

    reported = by_command(bench, spark_server, tmp_path)
    assert (reported["written"], reported["lacking"], reported["wrong"]) == (False, 3, 2)
    assert {row["key"] for row in reported["samples"]} == {"o0", "o1", "o2"}
    assert versions(bench)["o1"] == 9, "a dry run writes nothing"
    assert rebuild(work) == 4
    assert versions(bench) == EXPECTED
    assert compare_with_events(work, RebuildSnapshot.take(work)).none

    shutil.rmtree(bench.lake.build_table_path(bench.stream.name, "current"))
    assert by_command(bench, spark_server, tmp_path)["lacking"] == 4
    assert by_job(bench, spark_server, monkeypatch)
    assert versions(bench) == EXPECTED
    assert compare_with_events(work, RebuildSnapshot.take(work)).none


@pytest.mark.long
@pytest.mark.slow
def test_runs_go_on_after_current_was_rebuilt(merged: Bench) -> None:
    """A slice that is materialised again after the rebuild recomputes its keys; a new one is merged."""
    bench = merged
    slices = bench.ledger.list_slices(bench.stream.name)
    work = bench.work()
    rebuild(work)
    assert current.materialise(bench.work(*slices))[0].note == "already followed the events"
    customers(bench.lake, [])
    bench.materialise(slices[4])  # o0 and o1 fall back to their second version
    assert versions(bench) == {**EXPECTED, "o0": 2, "o1": 2}
    customers(bench.lake, ["c1"])
    bench.send(order_message("o2", 5), order_message("o3", 5))
    bench.materialise(bench.plan(5, p0=(10, 12)))
    assert versions(bench) == {"o0": 2, "o1": 2, "o2": 5, "o3": 5}
    assert bench.failing() == {}


@pytest.mark.slow
def test_columns_of_removed_fields_hold_their_values_after_a_rebuild(merged: Bench) -> None:
    """A rebuild once emptied them, and the checks failed as soon as the field was declared again."""
    bench, before = merged, merged.current()
    fields = tuple(field for field in bench.stream.fields if field.name != "amount")
    declared, bench.stream = bench.stream, replace(bench.stream, fields=fields)
    assert rebuild(bench.work()) == 4
    assert bench.current() == before
    bench.stream = declared
    assert not [name for name in bench.failing() if name.startswith("current_follows_events")]


def by_command(bench: Bench, server: SparkConnect, folder: Path) -> dict[str, Any]:
    """A dry run of the command."""
    declarations = folder / "declarations"
    declarations.mkdir(exist_ok=True)
    (declarations / "orders.py").write_text(
        f"from tests.helpers.support import make_stream\nSTREAM = make_stream({bench.stream.topic!r})\n"
    )
    ran = CliRunner().invoke(
        main,
        ["--declarations", str(declarations), "rebuild-current", "orders", "--json"],
        env=environment(bench, server),
    )
    assert ran.exit_code == 0, ran.output
    reported: dict[str, Any] = json.loads(ran.stdout)
    return reported


def by_job(bench: Bench, server: SparkConnect, monkeypatch: pytest.MonkeyPatch) -> bool:
    for name, value in environment(bench, server).items():
        monkeypatch.setenv(name, value)
    job = build_defs(streams=[bench.stream]).resolve_job_def("rebuild_current")
    config = {"stream": bench.stream.name, "dry_run": False, "by": "ann"}
    with dg.DagsterInstance.ephemeral() as instance:
        return job.execute_in_process(instance=instance, run_config=config).success


def environment(bench: Bench, server: SparkConnect) -> dict[str, str]:
    home = Path(bench.lake.root).parent
    return {
        "HIGHWATER_HOME": str(home),
        "HIGHWATER_LAKE": bench.lake.root,
        "HIGHWATER_LEDGER_URL": f"sqlite:///{home / 'ledger.sqlite'}",
        "HIGHWATER_KAFKA_BOOTSTRAP": bench.bootstrap,
        "SPARK_REMOTE": server.remote,
    }


@pytest.mark.slow
def test_without_events_nothing_is_rebuilt(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    raw.materialise(bench.work(bench.plan(0, p0=(0, 1))))
    with pytest.raises(ConfigurationError, match="has no events"):
        rebuild(bench.work())
    assert bench.lake.open_stream_table(bench.stream.name, "current") is None
