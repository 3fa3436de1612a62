"""Each dependency unavailable, one by one, while one slice goes through its tables: no reject for it, and nothing lost.

A lake that cannot be written, a ledger that is locked and a broker that dies are in `test_faults`, a Spark server that
is killed in `test_crashes`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dev.processes import LOOPBACK, free_port
from dev.spark_local import SMALL_QUERIES
from highwater import settings
from highwater.assets.small_writes import append
from highwater.resources.spark_tables import write_slices
from tests.helpers.runs import Runs, configure, find_failure_message
from tests.helpers.support import Bench, Message, order_message, read_topic, shorten_timeouts

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow

MESSAGES = [
    *(order_message(f"o{n}", 1, partition=n % 3) for n in range(9)),
    order_message("o9", 1, customer_id="nobody"),
    Message(b"o10", b"{"),
]


@contextmanager
def moved(folder: str) -> Iterator[None]:
    """The folder is elsewhere."""
    place = Path(folder)
    place.rename(place.with_name("elsewhere"))
    try:
        yield
    finally:
        place.with_name("elsewhere").rename(place)


@contextmanager
def refused(name: str, form: str) -> Iterator[None]:
    """Nobody listens where this variable points to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, form.format(f"{LOOPBACK}:{free_port()}"))
        patch.setattr("highwater.resources.spark.RETRIES", 2)
        patch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 0.5)
        yield


@contextmanager
def stopped_at_the_commit(server: SparkConnect, *, by_spark: bool) -> Iterator[None]:
    """The server hangs as it is asked to commit, or for the rows; then it goes on, with what it was asked for."""
    group = server.pid
    assert group is not None
    stopped: list[str] = []

    def stop(asked: str) -> None:
        os.killpg(group, signal.SIGSTOP)
        stopped.append(asked)

    def stop_and_write(*given: Any, **named: Any) -> None:
        stop("commit")
        write_slices(*given, **named)

    def stop_and_append(*given: Any) -> bool:
        if by_spark:
            return False
        stop("rows")
        return append(*given)

    with pytest.MonkeyPatch.context() as patch:
        # A JVM on a busy machine needs a second or two for a word.
        shorten_timeouts(patch, seconds=5)
        patch.setattr("highwater.assets.commit.write_slices", stop_and_write)
        patch.setattr("highwater.assets.small_writes.append", stop_and_append)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)
    assert stopped == ["commit" if by_spark else "rows"]


@pytest.fixture
def unresponsive(tmp_path: Path) -> Iterator[SparkConnect]:
    """A server of its own: every worker of the tests would wait for theirs."""
    from dev.spark_connect import SparkConnect

    with SparkConnect(tmp_path / "spark", extra=SMALL_QUERIES) as started:
        yield started


def test_a_slice_waits_for_each_dependency_and_then_equals_the_topic(
    bench: Bench, unresponsive: SparkConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(bench, unresponsive, monkeypatch)
    bench.send(*MESSAGES)
    slice_ = bench.plan(0, p0=(0, 5), p1=(0, 3), p2=(0, 3))
    dlq = {bench.stream.parked_topic, *bench.stream.tier_topics}
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", [slice_.key])
        runs = Runs(bench, instance)

        def fails(table: str, *texts: str) -> None:
            result = runs.run([slice_.key], table, tries=False)
            assert not result.success
            reported = find_failure_message(result)
            for text in ("DependencyUnavailableError: ", "remedy: ", *texts):
                assert text in reported
            assert runs.done(table) == set()
            assert dlq.isdisjoint(bench.kafka.list_topic_names())

        with refused(settings.SPARK_REMOTE, "sc://{}"):
            fails("raw", "Spark failed", "check that the Spark server runs (SPARK_REMOTE)")
        with refused(settings.KAFKA_BOOTSTRAP, "{}"):
            fails("raw", "Kafka at", "did not answer", settings.KAFKA_BOOTSTRAP)
        assert runs.run([slice_.key], "raw").success
        with moved(bench.lake.root):
            fails("events", f"the lake's folder {bench.lake.root} is not there", "mount or restore it")
            assert not Path(bench.lake.root).exists(), "it was not restarted"
        with moved(bench.lake.build_reference_path("reference/customers")):
            fails("events", "the reference table reference/customers is not in the lake")
        for by_spark in (False, True):
            with stopped_at_the_commit(unresponsive, by_spark=by_spark):
                fails("events", "Spark failed", "check that the Spark server runs (SPARK_REMOTE)")
        assert runs.run([slice_.key], "events").success
        with moved(bench.lake.build_reference_path("reference/customers")):
            fails("rejects", "the reference table reference/customers is not in the lake")
        assert bench.rows("rejects") == []
        assert runs.run([slice_.key], "rejects").success
        with refused(settings.KAFKA_BOOTSTRAP, "{}"):
            fails("dlq", "did not answer", settings.KAFKA_BOOTSTRAP)
        assert runs.run([slice_.key], "dlq", "current").success
    sent = read_topic(bench.bootstrap, bench.stream.topic)
    assert {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in bench.rows("raw")} == sent
    assert {row["key"] for row in bench.rows("events")} == {f"o{n}" for n in range(9)}
    assert sorted(row["reason"] for row in bench.rows("rejects")) == ["malformed", "unresolved"]
    for topic in (bench.stream.parked_topic, bench.stream.tier_topics[0]):
        assert len(read_topic(bench.bootstrap, topic)) == 1
    assert bench.failing() == {}
