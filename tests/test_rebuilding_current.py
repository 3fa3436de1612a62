"""`current` computed anew from the events: exact, whatever became of it, and while runs go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from assets import current, raw
from assets.current_rebuild import Look, differences, rebuild, replace_all
from assets.layout import Layout
from highwater.errors import ConfigurationError, SupersededAttemptError
from highwater.folding import BASE, RECENT, Fold, Run
from highwater.proof import Proof
from highwater.slices import SliceKey
from orchestration.build import build_defs
from orchestration.cli.main import main
from tests.support import Bench, customers, order_message
from tests.test_rebuilding import a_slice

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

EXPECTED = {"o0": 3, "o1": 3, "o2": 2, "o3": 2}


def decided(*ordinals: int, attempt: int = 1) -> dict[str, Proof]:
    pieces = [a_slice(ordinal, {0: (ordinal, ordinal + 1)}) for ordinal in ordinals]
    return {piece.key: Proof(piece, attempt, 1) for piece in pieces}


def keys(*ordinals: int) -> list[str]:
    return [f"orders@{ordinal:07d}" for ordinal in ordinals]


def test_a_look_tells_what_is_behind_and_what_has_no_decision() -> None:
    base = Fold(BASE, 3, {"orders": (Run(0, 1, 1), Run(2, 2, 7))})
    rows = dict.fromkeys([BASE, RECENT, *keys(3, 4, 9), "extra"], 1)
    look = Look(0, decided(0, 1, 2, 3, 4, 5), Layout({**decided(3, 9)}, {BASE: base}, rows))
    assert look.behind == keys(2, 4, 5), "another attempt, no proof, not there"
    assert look.strange == [*sorted([RECENT, "extra", *keys(4, 9)])], "no proof, or no decision"
    assert dict(look.places()) == {**dict.fromkeys(keys(0, 1, 2), BASE), **{key: key for key in keys(3, 4, 5)}}


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30)))
def test_what_is_replaced_holds_every_decided_slice_and_no_later_one(mine: set[int], there: set[int]) -> None:
    """A slice that is decided later goes on beside the rebuild, so the predicate must leave it out."""
    import sqlite3

    look = Look(0, decided(*mine), Layout({}, {}, dict.fromkeys(keys(*there), 1)))
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE t (slice TEXT)")
        every = [BASE, RECENT, *keys(*range(40))]
        database.executemany("INSERT INTO t VALUES (?)", [(key,) for key in every])
        found = {row[0] for row in database.execute(f"SELECT slice FROM t WHERE {look.replaced()}")}
    assert found == {BASE, RECENT, *keys(*mine), *keys(*there)}


def stood(bench: Bench) -> tuple[dict[str, int], set[object]]:
    rows = bench.rows("current")
    return {key: row["version"] for key, row in bench.current().items()}, {row["slice"] for row in rows}


@pytest.fixture
def folded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Versions of four orders in five slices: three in the base, two beside it."""
    monkeypatch.setattr("highwater.folding.SLICES_BEFORE_FOLD", 3)
    bench.send(*[order_message(f"o{n % 4}", n // 4 + 1) for n in range(10)])
    slices = [bench.plan(ordinal, p0=(2 * ordinal, 2 * ordinal + 2)) for ordinal in range(5)]
    bench.materialise(*slices[:3])
    bench.materialise(*slices[3:])
    assert stood(bench) == (EXPECTED, {BASE, *[str(SliceKey(bench.stream.topic, n)) for n in (3, 4)]})
    return bench


@pytest.mark.slow
def test_whatever_became_of_current_it_is_what_the_events_say(
    folded: Bench, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, work = folded, folded.work()
    assert differences(work, Look.take(work)).none
    table = bench.lake.table(bench.stream.name, "current")
    assert table is not None
    table.delete(f"slice = '{BASE}' AND key = 'o0'")
    # o1 stands in the base and in a slice.
    table.update(predicate="key = 'o1' AND proof IS NULL", updates={"version": "9"})
    table.delete(f"slice = '{SliceKey(bench.stream.topic, 3)}' AND proof IS NOT NULL")
    found = differences(work, Look.take(work))
    assert (found.lacking, found.wrong) == (3, 2)
    assert (found.behind, found.strange) == ([str(SliceKey(bench.stream.topic, 3))],) * 2

    told = by_command(bench, spark_server, tmp_path)
    assert (told["written"], told["lacking"], told["wrong"]) == (False, 3, 2)
    assert {row["key"] for row in told["samples"]} == {"o0", "o1"}
    assert stood(bench)[0]["o1"] == 9, "a dry run writes nothing"
    assert rebuild(work) == 4
    assert stood(bench) == (EXPECTED, {BASE})
    assert differences(work, Look.take(work)).none

    shutil.rmtree(bench.lake.path(bench.stream.name, "current"))
    assert by_command(bench, spark_server, tmp_path)["lacking"] == 10, "winners of five slices"
    assert by_job(bench, spark_server, monkeypatch)
    assert stood(bench) == (EXPECTED, {BASE})
    assert differences(work, Look.take(work)).none


@pytest.mark.long
@pytest.mark.slow
def test_runs_go_on_while_current_is_rebuilt(folded: Bench) -> None:
    """What is decided between the look and the commit is neither overwritten nor forgotten."""
    bench = folded
    slices = bench.ledger.slices(bench.stream.name)
    work, early = bench.work(), Look.take(bench.work())
    customers(bench.lake, [])
    bench.materialise(slices[4])  # o0 and o1 fall back to their second version
    with pytest.raises(SupersededAttemptError):
        replace_all(work, early)
    rebuild(work)
    assert stood(bench) == ({**EXPECTED, "o0": 2, "o1": 2}, {BASE})
    assert current.materialise(bench.work(*slices))[0].note == "already followed the events"

    customers(bench.lake, ["c1"])
    bench.send(order_message("o2", 5), order_message("o3", 5))
    later = bench.plan(5, p0=(10, 12))
    early = Look.take(work)
    bench.materialise(later)  # a slice of which the look knows nothing stands beside what it replaces
    replace_all(work, early)
    assert stood(bench) == ({"o0": 2, "o1": 2, "o2": 5, "o3": 5}, {BASE, later.key})
    bench.materialise(slices[0])
    assert stood(bench)[0] == {"o0": 2, "o1": 2, "o2": 5, "o3": 5}


def by_command(bench: Bench, server: SparkConnect, folder: Path) -> dict[str, Any]:
    """A dry run of the command."""
    declarations = folder / "declarations"
    declarations.mkdir(exist_ok=True)
    (declarations / "orders.py").write_text(
        f"from tests.support import make_stream\nSTREAM = make_stream({bench.stream.topic!r})\n"
    )
    ran = CliRunner().invoke(
        main,
        ["--declarations", str(declarations), "rebuild-current", "orders", "--json"],
        env=environment(bench, server),
    )
    assert ran.exit_code == 0, ran.output
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def by_job(bench: Bench, server: SparkConnect, monkeypatch: pytest.MonkeyPatch) -> bool:
    for name, value in environment(bench, server).items():
        monkeypatch.setenv(name, value)
    job = build_defs(streams=[bench.stream]).resolve_job_def("orders_rebuild_current")
    config = {"ops": {"orders_rebuild_current_op": {"config": {"record": True}}}}
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
    assert bench.lake.table(bench.stream.name, "current") is None
