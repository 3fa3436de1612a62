"""How benchmarks take turns, what they compare, and what the page says of them; no figure is checked here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from assets.streams.orders import STREAM as ORDERS
from bench import __main__ as command
from bench import growth, report, ticks
from bench.harness import Result, Row, Target, alternate
from bench.world import World
from highwater.orchestration.sensing.topic_planner import Planner
from tests.conftest import TopicFactory


def result(**changes: object) -> Result:
    rows = [Row("1 batch", {"ours": [1.0, 2.0, 3.0], "theirs": [4.0, 4.0, 3.0]})]
    targets = [Target("times as fast", 2.0, 1.5), Target("seconds", 0.5, 1.0, at_least=False)]
    plain: dict[str, object] = {"name": "x", "title": "Ours, against theirs", "method": "In turn.", "rows": rows}
    return Result(**{**plain, "targets": targets, **changes})  # type: ignore[arg-type]


def test_variants_take_turns_and_the_warm_up_does_not_count() -> None:
    turns: list[tuple[str, int]] = []

    def variant(name: str, seconds: float) -> object:
        def run(turn: int) -> float:
            turns.append((name, turn))
            return seconds if turn >= 0 else 1000.0

        return run

    row = alternate("case", {"a": variant("a", 1.0), "b": variant("b", 2.0)}, rounds=2)  # type: ignore[dict-item]
    assert turns == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert row.seconds == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


def test_a_ratio_is_taken_round_by_round() -> None:
    """The machine may be twice as slow in one round: that must not move a ratio."""
    row = Row("case", {"ours": [1.0, 2.0, 1.0], "theirs": [3.0, 6.0, 3.0]})
    assert row.ratio("ours", "theirs") == 3.0


@pytest.mark.parametrize(
    ("value", "at_least", "reached"), [(1.5, True, True), (1.4, True, False), (1.5, False, True), (1.6, False, False)]
)
def test_a_figure_is_compared_with_its_limit(value: float, *, at_least: bool, reached: bool) -> None:
    assert Target("figure", value, 1.5, at_least=at_least).reached is reached


def test_one_missed_figure_is_the_exit_status() -> None:
    missed = result(targets=[Target("times as fast", 1.0, 1.5)])
    assert command.compute_status([result()]) == 0
    assert command.compute_status([result(), missed]) == 1


def test_the_page_reports_the_retained_figures(tmp_path: Path) -> None:
    result().save(tmp_path)
    assert Result.load(tmp_path / "x.json") == result()
    report.write(tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| 1 batch | 2 | 4 |" in page
    assert "| times as fast | 2.00 | ≥ 1.5 |" in page
    result(targets=[Target("share", 0.5, 0.8, case="1 batch")]).save(tmp_path)
    report.write(tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| case | ours | theirs | share ≥ 0.8 |" in page
    assert "| 1 batch | 2 | 4 | **0.50** |" in page
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_missed_figure_has_its_limit_on_the_page(tmp_path: Path) -> None:
    """Each limit is of a benchmark that there is, and is left out where all figures reach their goals."""
    assert set(report.LIMITS) <= set(command.BENCHMARKS)
    missed = Target("times as fast", 1.0, 1.5)
    for targets, shown in (([missed], True), ([replace(missed, value=2.0)], False)):
        replace(result(targets=targets), name="d").save(tmp_path)
        report.write(tmp_path, tmp_path / "page.md")
        assert (f"Limit: {report.LIMITS['d']}" in (tmp_path / "page.md").read_text()) == shown


def test_a_letter_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "a,z"])
    assert ended.value.code == 2
    assert "no benchmark z" in capsys.readouterr().err


def test_a_tick_that_plans_nothing_is_no_figure(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    """Ticks that waited for more records were once measured as ticks that store a slice."""
    world = World(tmp_path, bootstrap, spark=None)  # type: ignore[arg-type]
    stream = replace(ORDERS, topic=topic(partitions=3))
    planner = Planner(world.fresh(stream).ledger, world.kafka())
    with pytest.raises(RuntimeError, match=r"0 of 3 partitions were planned and read: .* wait for 1000"):
        ticks._tick(world, planner, stream, partitions=3)
    row = ticks._measure_partitions(world, 3, rounds=2)
    assert len(row.seconds["tick"]) == 2


def test_a_checkpoint_among_the_commits_to_raw_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the commits leaves out the one in ten that writes a checkpoint of 100,000 files."""
    taken: list[int] = []

    def measured(_world: object, _stream: object, slices: int, commits: int) -> Row:
        taken.append(commits)
        checkpoint = 30.0 if slices > 100 else 1.0
        return Row(f"{slices}", {"commit": [1.0] * (commits - 1) + [checkpoint], "read of a slice": [1.0] * commits})

    monkeypatch.setattr(growth, "fill_topic", lambda *_: None)
    monkeypatch.setattr(growth, "_measure_raw_at", measured)
    result = growth.measure_growth_of_raw(cast("World", None), 1, 0)
    assert min(taken) > 10, "each tenth version of a table is checkpointed"
    assert [target.value for target in result.targets] == [0, 0, pytest.approx(29 / 12)]
    assert [target.reached for target in result.targets] == [True, True, False]
