"""A declaration that names other topics than the slices are of, or another stream than planned them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Foreign, Limits, Stream
from highwater.errors import ConfigurationError
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.sensing.topic_planner import Planner, PlanningResult
from highwater.orchestration.stream_assets import read_planned_slices
from highwater.plans import Generation
from highwater.resources.ledger import Ledger
from highwater.routing import build_tier_stream
from highwater.slices import OffsetRange, Slice
from highwater.tables import select_tables
from tests.helpers.fake_topics import FakeTopics
from tests.helpers.holding import FOUND
from tests.helpers.repairing import Repairing

LONG_AGO = datetime(2026, 3, 1, tzinfo=UTC)
NOW = LONG_AGO + timedelta(days=1)
OTHERS = "sink.errors"
STREAM = replace(
    ORDERS, tiers=(timedelta(seconds=10), timedelta(minutes=5)), foreign=(Foreign(OTHERS, timedelta(seconds=10)),)
)
RENAMED = replace(STREAM, topic="orders.v2", foreign=())


def a_slice(topic: str, ordinal: int = 0) -> Slice:
    return Slice("orders", topic, "A", 0, ordinal, {0: OffsetRange(0, 5)}, LONG_AGO)


OF_MAIN, OF_FIRST, OF_SECOND, OF_OTHERS = (a_slice(topic) for topic in ("orders", *STREAM.delays))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    assert made.add([OF_MAIN, OF_FIRST, OF_SECOND, OF_OTHERS])
    return made


@pytest.mark.parametrize("table", select_tables(STREAM))
def test_a_slice_of_a_topic_that_is_not_declared_any_more_is_refused_by_every_asset(
    ledger: Ledger, tmp_path: Path, table: str
) -> None:
    """Every record of the old topic was judged as a retry without an envelope, and parked as malformed."""

    def never() -> Any:
        pytest.fail("something was opened")

    unused = SimpleNamespace(open=never, get_session=never, interrupt=lambda: None)
    opened = {"kafka": unused, "lake": unused, "spark": unused, "ledger": SimpleNamespace(open=lambda: ledger)}
    built = build_defs(streams=[RENAMED], resources=opened)
    job = built.resolve_job_def("orders_publish" if table == "published" else "orders_slice")
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        instance.add_dynamic_partitions("orders_slices", [OF_MAIN.key])
        done = job.execute_in_process(
            instance=instance,
            partition_key=OF_MAIN.key,
            raise_on_error=False,
            asset_selection=[build_table_key(RENAMED, table)],
        )
    event = next(event for event in done.all_events if event.is_step_failure)
    assert event.step_failure_data.user_failure_data is not None, event.step_failure_data.error
    reported = {name: value.value for name, value in event.step_failure_data.user_failure_data.metadata.items()}
    assert reported["error"] == "ConfigurationError"
    assert reported["problem"] == f"{OF_MAIN.key} is of a topic that stream orders does not read"
    assert reported["stored"] == "topic orders"
    assert reported["found"] == "declared are orders.v2, orders.v2.dlq.1, orders.v2.dlq.2"
    assert "if orders was its main topic, declare that again" in str(reported["remedy"])


@pytest.mark.parametrize("slice_", [OF_MAIN, OF_FIRST, OF_SECOND, OF_OTHERS], ids=lambda slice_: slice_.topic)
def test_a_topic_of_another_system_that_is_declared_no_more_is_refused_and_a_tier_is_finished(
    ledger: Ledger, slice_: Slice
) -> None:
    """The records of a tier carry our envelope; others are distinguished from a tier's by the declaration alone."""
    assert read_planned_slices(ledger, STREAM, [slice_.key]) == [slice_]
    fewer = replace(STREAM, tiers=STREAM.tiers[:1], foreign=())
    if slice_ is not OF_OTHERS:
        assert read_planned_slices(ledger, fewer, [slice_.key]) == [slice_]
        return
    with pytest.raises(ConfigurationError) as caught:
        read_planned_slices(ledger, fewer, [slice_.key])
    assert (caught.value.stored, caught.value.found) == (f"topic {OTHERS}", "declared are orders, orders.dlq.1")
    assert "declare it under `foreign` again" in caught.value.remedy


@pytest.mark.parametrize("held", [False, True])
def test_repair_leaves_what_every_run_would_refuse_and_says_so(tmp_path: Path, *, held: bool) -> None:
    new = a_slice("orders.v2")
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        repairing = Repairing(tmp_path, instance, [OF_MAIN, OF_OTHERS, new], RENAMED)
        if held:
            repairing.ledger.exhausted_slices.add("orders", {OF_MAIN.key: 6}, LONG_AGO)
            repairing.ledger.holds.note("orders", OF_OTHERS.key, FOUND, LONG_AGO)
        requests, tick = repairing.tick()
        assert requests == [([new.key], False, "repair")]
        reported = "not done, and of topics that the declaration does not name, they are left"
        assert f"2 {reported}: {OF_MAIN.key}, {OF_OTHERS.key}" in tick.lines
        ledger = repairing.ledger
        exhausted, holds = ledger.exhausted_slices.read_open("orders"), ledger.holds.read_open("orders")
        assert [*(one.slice_key for one in exhausted), *(one.slice_key for one in holds)] == (
            [OF_MAIN.key, OF_OTHERS.key] if held else []
        ), "what is left is not done"
        repairing.stream = replace(STREAM, topic="orders")
        requests, tick = repairing.tick()
        assert {key for keys, *_ in requests for key in keys} == {OF_OTHERS.key, *([] if held else [OF_MAIN.key])}
        assert f"1 {reported}: {new.key}" in tick.lines


EAGER = replace(ORDERS, limits=Limits())


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("topic", [ORDERS.topic, ORDERS.tier_topics[0]])
def test_a_stream_under_another_name_is_reported_whose_the_topic_is(
    tmp_path: Path, topic: str, *, pinned: bool
) -> None:
    """Each tick said that other planners were first; where rejects were parked, that the ledger was lost."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    kafka: Any = FakeTopics(dict.fromkeys((EAGER.topic, *EAGER.dlq_topics), ("A", 5)))
    ours = replace(EAGER, name="bookings")

    def tick(stream: Stream) -> PlanningResult:
        view = stream if topic == stream.topic else build_tier_stream(stream, topic)
        return Planner(ledger, kafka).tick(view, NOW)

    def opened(stream: Stream) -> None:
        assert ledger.topics.open_generation(Generation(stream.name, topic, "A", 0, {0: 0}, NOW))

    opened(EAGER)
    assert tick(EAGER).slices
    if pinned:
        opened(ours)  # by a version that looked only when it stored the slices
    with pytest.raises(ConfigurationError) as caught:
        tick(ours)
    assert caught.value.problem.startswith(f"topic {topic} is planned by another stream")
    assert (caught.value.stored, caught.value.found) == (f"stream orders, up to {topic}@0000000", "stream bookings")
    assert "declare it under the name orders again" in caught.value.remedy
    kafka.there[topic] = ("A", 9)
    assert [slice_.ranges for slice_ in tick(EAGER).slices] == [{0: OffsetRange(5, 9)}]


def test_a_stream_with_slices_does_not_plan_another_main_topic(tmp_path: Path) -> None:
    """It did so without a word, and nobody read on in the former topic and its tiers."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    kafka: Any = FakeTopics(dict.fromkeys((EAGER.topic, *EAGER.dlq_topics, "orders.v2"), ("A", 5)))
    planner, changed = Planner(ledger, kafka), replace(EAGER, topic="orders.v2")
    assert ledger.topics.open_generation(Generation("orders", EAGER.topic, "A", 0, {0: 0}, NOW))
    assert planner.tick(EAGER, NOW).slices
    with pytest.raises(ConfigurationError, match="slices of another main topic") as caught:
        planner.tick(changed, NOW)
    assert (caught.value.stored, caught.value.found) == ("topic orders", "topic orders.v2")
    assert ledger.count_slices() == {("orders", "orders"): 1}
    kafka.there["orders"] = ("A", 9)
    assert planner.tick(EAGER, NOW).slices


def test_a_name_that_planned_nothing_yet_may_be_changed(tmp_path: Path) -> None:
    kafka: Any = FakeTopics({"orders": ("A", 0)})
    planner = Planner(Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), kafka)
    assert planner.tick(EAGER, NOW).slices == ()
    kafka.there["orders"] = ("A", 5)
    assert planner.tick(replace(EAGER, name="bookings"), NOW).slices[0].stream == "bookings"
